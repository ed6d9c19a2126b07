"""A peer that is suddenly gone: what was outstanding ends with an error, and in time, whichever side is gone."""

from __future__ import annotations

import signal
import time
from contextlib import ExitStack
from threading import Timer

import kbtp
from interop.checks import RNICS, Check, CheckFailed, open_rnic
from interop.guest.machine import Guest
from interop.kbtp_in_guest import PYTHON_IN_GUEST, START_S, target_here, target_in_guest
from interop.rping import RECEIVES, Side, connected
from interop.siw_rping import SHORT_BYTES, serving
from kbtp.errors import ConnectionLost
from kbtp.verbs.api import StreamEnded, WcStatus, WorkCompletion

TIMEOUT_S = 2.0
SLACK_S = 2.0
"""What may pass between a time limit and its error on a machine that is busy."""

LOADS = 8
NOTICE_S = 10.0
"""The kernel ends the connections of a killed process at once."""


def checks() -> list[Check]:
    return [
        Check("vanishing: the guest stops, and loads from its target on siw end in their time limit", _guest_stops),
        Check("vanishing: the target here stops, and operations over siw end in their time limit", _target_stops),
        Check("vanishing: the guest is killed, and every stream to it ends", _guest_is_killed),
    ]


def _guest_stops(guest: Guest) -> None:
    octets = bytes(range(200))
    with target_in_guest(guest, "rdma_core") as url, ExitStack() as stack:
        clients = [
            stack.enter_context(kbtp.connect(url, timeout_s=TIMEOUT_S, connect_timeout_s=START_S, rnic=open_rnic(name)))
            for name in RNICS
        ]
        blocks = [client.alloc_store(octets, timeout_s=START_S) for client in clients]
        guest.freeze()
        try:
            for client, block in zip(clients, blocks, strict=True):
                _loads_fail(client, block, len(octets))
        finally:
            guest.thaw()


def _loads_fail(client: kbtp.Client, block: kbtp.BlockRef, length: int) -> None:
    began_s = time.monotonic()
    results = client.load_many([block] * LOADS, [bytearray(length) for _ in range(LOADS)])
    took_s = time.monotonic() - began_s
    others = [result for result in results if not isinstance(result.error, ConnectionLost)]
    if others or took_s > TIMEOUT_S + SLACK_S:
        raise CheckFailed(f"after {took_s:.1f} s {len(others)} of {LOADS} loads have not failed")


def _target_stops(guest: Guest) -> None:
    with target_here("native") as (target, url):
        script = f"{PYTHON_IN_GUEST} -m interop.operations {url} --timeout {START_S} --operation-timeout {TIMEOUT_S}"
        with guest.start(f"{script} --rnic rdma_core --multiple 4") as call:
            call.await_line("session is open", START_S)
            target.send_signal(signal.SIGSTOP)
            began_s = time.monotonic()
            done = call.finish(NOTICE_S)
            took_s = time.monotonic() - began_s
    if done.status == 0 or "DeadlineExceeded" not in done.output or took_s > NOTICE_S:
        raise CheckFailed(f"after {took_s:.1f} s status {done.status}: {done.output}")


def _guest_is_killed(guest: Guest) -> None:
    """The last of a boot. Streams to siw with a read and receives outstanding, and a session with a target here."""
    with target_here("native") as (target, url), serving(guest, SHORT_BYTES) as address:
        sides = [connected(open_rnic(name), address, length=SHORT_BYTES, timeout_s=2 * START_S) for name in RNICS]
        for side in sides:
            side.nudge()
        with guest.start(f"{PYTHON_IN_GUEST} -m interop.operations {url} --timeout {START_S}") as call:
            call.await_line("session is open", START_S)
            guest.freeze()
            for side in sides:
                side.read_nothing()
            guest.down()
        for side in sides:
            side.limit(NOTICE_S)
            _await_loss(side)
        stop = Timer(NOTICE_S, target.kill)
        stop.start()
        assert target.stderr is not None
        said = next((line for line in target.stderr if "session ended" in line), None)
        stop.cancel()
        if said is None:
            raise CheckFailed(f"the target has not ended the guest's session after {NOTICE_S} s")


def _await_loss(side: Side) -> None:
    """The end of the stream, and before it everything that was outstanding. Raises CheckFailed or PingFailed."""
    flushed = 0
    try:
        while not isinstance(event := side.next_event(), StreamEnded):
            flushed += isinstance(event, WorkCompletion) and event.status is WcStatus.FLUSHED
    finally:
        side.close()
    if flushed != RECEIVES + 1 or event.reason is None:
        raise CheckFailed(f"{flushed} of {RECEIVES} receives and a read were flushed; the stream ended: {event.reason}")
