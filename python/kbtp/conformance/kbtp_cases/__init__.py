"""The rules of the KBTP draft and of profile 1, and the cases that look at them."""

from __future__ import annotations

from kbtp.conformance.case import Group
from kbtp.conformance.kbtp_cases import blocks
from kbtp.conformance.kbtp_cases.rules import RULES

__all__ = ["GROUPS", "RULES"]

GROUPS: tuple[Group, ...] = (blocks.GROUP,)
