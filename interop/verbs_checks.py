"""The RNIC of rdma-core in the guest: over siw against our user-space RNIC outside, over rxe between two processes."""

from __future__ import annotations

from functools import partial

import kbtp
from interop.checks import RNICS, Check, CheckFailed
from interop.guest.machine import GUEST_ADDRESS, Guest
from interop.kbtp_in_guest import (
    OPERATIONS_S,
    PYTHON_IN_GUEST,
    START_S,
    connect_here,
    operate_here,
    operate_in_guest,
    target_here,
    target_in_guest,
)
from kbtp.limits import DEFAULT_PORT

RNIC = "rdma_core"
OPERATIONS = 1000
CONNECTIONS = 100
MULTIPLE_BYTES = 4
"""Over siw: see docs/testing.md."""


def siw_checks() -> list[Check]:
    return [
        Check("rdma_core: every kind of work over siw", partial(_program, "verbs_loop")),
        Check("kbtp: target on siw, initiator here in user space", _target_on_siw),
        Check("kbtp: target here in user space, initiator on siw", _initiator_on_siw),
        *[
            Check(f"kbtp: {CONNECTIONS} sessions of {name} with a target on siw, none lost", partial(_sessions, name))
            for name in RNICS
        ],
    ]


def rxe_checks() -> list[Check]:
    return [
        Check("rdma_core: every kind of work over rxe", partial(_program, "verbs_loop")),
        Check("kbtp: target and initiator on rxe", _both_on_rxe),
        Check("kbtp: records, direct allocation and a reclaimed ticket on rxe", partial(_program, "verbs_modes")),
    ]


def _program(name: str, guest: Guest) -> None:
    done = guest.run(f"{PYTHON_IN_GUEST} -m interop.{name} {GUEST_ADDRESS}", timeout_s=START_S + OPERATIONS_S)
    if done.status:
        raise CheckFailed(done.output)


def _target_on_siw(guest: Guest) -> None:
    with target_in_guest(guest, RNIC, "--direct", "load,alloc", "--direct-blocks", "16") as url:
        with kbtp.connect(url, direct="load,alloc", connect_timeout_s=START_S) as client:
            if client.features & (kbtp.Feature.DIRECT_ALLOC | kbtp.Feature.MASKED_ATOMICS):
                raise CheckFailed(f"siw has no atomics, and HELLO_ACK grants {client.features!r}")
        operate_here(url, "native", count=OPERATIONS, multiple_bytes=MULTIPLE_BYTES)


def _initiator_on_siw(guest: Guest) -> None:
    with target_here("native") as (_, url):
        operate_in_guest(guest, url, RNIC, count=OPERATIONS, multiple_bytes=MULTIPLE_BYTES)


def _sessions(rnic: str, guest: Guest) -> None:
    with target_in_guest(guest, RNIC) as url:
        connect_here(url, rnic, count=CONNECTIONS, multiple_bytes=MULTIPLE_BYTES)


def _both_on_rxe(guest: Guest) -> None:
    with target_in_guest(guest, RNIC):
        operate_in_guest(guest, f"kbtp://{GUEST_ADDRESS}:{DEFAULT_PORT}", RNIC, count=OPERATIONS)
