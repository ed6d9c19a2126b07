"""What the draft and the profile ask of targets and initiators, rule by rule, in our words."""

from __future__ import annotations

from kbtp.conformance.rule import Rule

RULES: tuple[Rule, ...] = (
    Rule("KL1", "draft 6.1 step 2", "A LOAD brings the octets of the block, and its completion their number"),
)
