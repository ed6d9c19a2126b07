"""Rules of the direct modes, of rings and tickets as a peer sees them."""

from __future__ import annotations

from kbtp.conformance.rule import Rule

DIRECT_RULES: tuple[Rule, ...] = ()
