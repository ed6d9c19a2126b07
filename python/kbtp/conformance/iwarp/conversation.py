"""What iWARP cases do again and again, whichever side is under test."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from kbtp.conformance import segments
from kbtp.conformance.deviation import Deviation, expect
from kbtp.conformance.initiator_side import InitiatorSide
from kbtp.conformance.probe import Probe, TargetProbe
from kbtp.conformance.session import Session
from kbtp.conformance.startup import CameFrame, Startup, accepted, receive_frame
from kbtp.conformance.stream import Stream
from kbtp.conformance.target_side import TargetSide
from kbtp.conformance.tcp import Tcp
from kbtp.wire import Free

QUIET_S = 0.15
"""How long we look whether nothing comes."""

HARMLESS = segments.write(0, 0)
"""An RDMA Write without octets, which every endpoint takes and nobody is told of (RFC 5041 5.2)."""

Pieces = Callable[[bytes], list[bytes]]


def startup_for(came: CameFrame, **changes: Any) -> Startup:
    """The accepting Reply to the Request `came`, of its revision, but for `changes`."""
    base = Startup.plain() if came.frame.word is None else Startup()
    return replace(base, **changes)


def stream_on(tcp: Tcp, *, active: bool, pieces: Pieces | None = None, **changes: Any) -> Stream:
    """Start a stream on `tcp`; our frame is one that nobody objects to, but for `changes`, sent in `pieces`."""

    def say(octets: bytes) -> None:
        tcp.send_in_pieces(pieces(octets) if pieces else [octets])

    if active:
        request = Startup(**changes).frame(reply=False)
        say(request.pack())
        return Stream(tcp, request, accepted(receive_frame(tcp, reply=True)), active=True)
    came = receive_frame(tcp, reply=False)
    reply = startup_for(came, **changes).frame(reply=True)
    say(reply.pack())
    return Stream(tcp, came, reply, active=False)


def stream_with(probe: Probe, *, pieces: Pieces | None = None, **changes: Any) -> Stream:
    """`stream_on` a new connection."""
    return stream_on(probe.tcp(), active=isinstance(probe, TargetProbe), pieces=pieces, **changes)


def open_on(probe: Probe, stream: Stream, **fields: Any) -> Session:
    """HELLO and HELLO_ACK on `stream`; `fields` are those of the one that is ours."""
    if stream.active:
        return InitiatorSide(stream).open(**{"namespace": probe.setup.namespace or None, **fields})
    return TargetSide(stream).open(**fields)


def session_with(probe: Probe, **changes: Any) -> Session:
    return open_on(probe, stream_with(probe, **changes))


def works_on(session: Session) -> None:
    """A target answers one more request; an initiator gets through its work as far as its first FREE."""
    if isinstance(session, TargetSide):
        request = session.serve_until(Free)
        session.serve_one(request)
    else:
        session.goes_on()


def expect_no_octets(tcp: Tcp, why: str) -> None:
    """The peer sends nothing; it may close. Raises `Deviation`."""
    try:
        octets = tcp.receive_some(why, within_s=QUIET_S)
    except Deviation:
        return
    expect(not octets, why, octets.hex())


def octet_by_octet(octets: bytes) -> list[bytes]:
    return [octets[at : at + 1] for at in range(len(octets))]
