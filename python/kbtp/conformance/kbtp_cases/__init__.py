"""The rules of the KBTP draft and of profile 1, and the cases that look at them."""

from __future__ import annotations

from kbtp.conformance.case import Group
from kbtp.conformance.kbtp_cases import (
    auth,
    blocks,
    credits,
    direct,
    hello,
    identity,
    infiniband,
    initiator_auth,
    initiator_direct,
    initiator_hello,
    initiator_requests,
    order,
    quota,
    races,
    rdma,
    tickets,
    turns,
)
from kbtp.conformance.kbtp_cases.rules import RULES

__all__ = ["GROUPS", "RULES"]

GROUPS: tuple[Group, ...] = (
    hello.GROUP,
    identity.GROUP,
    order.GROUP,
    blocks.GROUP,
    rdma.GROUP,
    turns.GROUP,
    credits.GROUP,
    quota.GROUP,
    races.GROUP,
    auth.GROUP,
    direct.GROUP,
    tickets.GROUP,
    infiniband.GROUP,
    initiator_hello.GROUP,
    initiator_requests.GROUP,
    initiator_direct.GROUP,
    initiator_auth.GROUP,
)
