"""The rules of MPA, DDP, RDMAP and their extensions, and the cases that look at them."""

from __future__ import annotations

from kbtp.conformance.case import Group
from kbtp.conformance.iwarp import framing
from kbtp.conformance.iwarp.rules import RULES

__all__ = ["GROUPS", "RULES"]

GROUPS: tuple[Group, ...] = (framing.GROUP,)
