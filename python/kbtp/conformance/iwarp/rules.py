"""What RFC 5044, 6581, 5041, 5040, 7306 and 5042 ask of an endpoint, rule by rule, in our words."""

from __future__ import annotations

from kbtp.conformance.rule import Rule

RULES: tuple[Rule, ...] = (
    Rule(
        "F6",
        "RFC 5044 4.4; RFC 5044 6; RFC 5044 8",
        "A wrong CRC is reported as 2/0/02, its ULPDU neither placed nor delivered",
    ),
)
