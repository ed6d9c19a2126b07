"""The rules of MPA, DDP, RDMAP and their extensions, and the cases that look at them."""

from __future__ import annotations

from kbtp.conformance.case import Group
from kbtp.conformance.iwarp import (
    atomics,
    ddp_messages,
    direct_access,
    direct_requests,
    faults,
    mpa_framing,
    mpa_markers,
    mpa_startup,
    placement,
    reads,
    rfc6581,
    security,
    terminates,
)
from kbtp.conformance.iwarp.rules import RULES

__all__ = ["GROUPS", "RULES"]

GROUPS: tuple[Group, ...] = (
    mpa_startup.GROUP,
    mpa_framing.GROUP,
    mpa_markers.GROUP,
    rfc6581.GROUP,
    ddp_messages.GROUP,
    placement.GROUP,
    reads.GROUP,
    faults.GROUP,
    terminates.GROUP,
    direct_access.GROUP,
    direct_requests.GROUP,
    atomics.GROUP,
    security.GROUP,
)
