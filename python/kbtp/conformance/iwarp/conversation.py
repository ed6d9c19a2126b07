"""What iWARP cases do again and again, whichever side is under test."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from kbtp.conformance import segments
from kbtp.conformance.initiator_side import InitiatorSide
from kbtp.conformance.kbtp_cases.rdma import next_read
from kbtp.conformance.probe import Probe, TargetProbe
from kbtp.conformance.session import Session
from kbtp.conformance.startup import CameFrame, Startup, accepted, receive_frame
from kbtp.conformance.stream import Stream
from kbtp.conformance.target_side import TargetSide, needs_a_read
from kbtp.conformance.tcp import Tcp
from kbtp.iwarp.rdmap import ReadRequest
from kbtp.types import Status
from kbtp.wire import Completion, Free, Load

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


def initiator_on(probe: TargetProbe, stream: Stream) -> InitiatorSide:
    """A session on `stream` whose HELLO is still to be sent."""
    return InitiatorSide(stream, probe.setup.namespace, probe.key)


def open_on(probe: Probe, stream: Stream, **fields: Any) -> Session:
    """HELLO and HELLO_ACK on `stream`; `fields` are those of the one that is ours."""
    if isinstance(probe, TargetProbe):
        return initiator_on(probe, stream).open(**fields)
    return TargetSide(stream, probe.key).open(**fields)


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
    tcp.expect_no_octets(why, for_s=QUIET_S)


def octet_by_octet(octets: bytes) -> list[bytes]:
    return [octets[at : at + 1] for at in range(len(octets))]


# --- traffic ---


SIZES = (0, 1, 2, 3, 4, 5, 700, 100_000)
"""Of messages that the peer is made to send: every PAD, and more than one segment."""


def pattern(size: int) -> bytes:
    return bytes(index % 251 for index in range(size))


def converse(session: Session) -> None:
    """Have the peer send messages of many sizes: a target by LOADs, an initiator by Reads of its memory."""
    if isinstance(session, TargetSide):
        request = session.serve_until(needs_a_read)
        for size in SIZES:
            session.read(request.data, min(size, request.data.length))
        session.serve_one(request)
        session.serve_one(session.serve_until(Free))
    else:
        initiator = as_initiator(session)
        for size in (min(size, initiator.ack.block_size) for size in SIZES):
            initiator.bind(0, pattern(size))
            initiator.expect_contents(0, pattern(size))
            initiator.release(0)


def as_initiator(session: Session) -> InitiatorSide:
    assert isinstance(session, InitiatorSide)
    return session


def sink_of(session: InitiatorSide, size: int, index: int = 0) -> ReadRequest:
    """Have the target ask for `size` octets of ours; its Read Request, which nobody has answered yet."""
    lent = session.stream.memory.lend(pattern(size))
    session.send(session.alloc_store(session.handle(index), lent))
    return next_read(session)


def octets_due(session: TargetSide, request: Load) -> bytes:
    """What a LOAD of the initiator has to bring."""
    return session.table[request.handle].octets


def completion_of(session: TargetSide, request: Load) -> bytes:
    """The COMPLETION with SUCCESS of a LOAD."""
    entry = session.table[request.handle]
    octets = len(entry.octets)
    return Completion(
        request.request_id, request.handle, entry.generation, Status.SUCCESS, octets, session.ack.pool_base
    ).pack()


class Trickle(Tcp):
    """Sends what is cut at odd places: the first octets of all that is said one by one, the rest in pieces."""

    SINGLY, PIECE_BYTES = 100, 997

    def send(self, octets: bytes) -> None:
        for octet in octet_by_octet(octets[: self.SINGLY]):
            super().send(octet)
        for at in range(self.SINGLY, len(octets), self.PIECE_BYTES):
            super().send(octets[at : at + self.PIECE_BYTES])

    @classmethod
    def over(cls, tcp: Tcp) -> Trickle:
        return cls(tcp.socket, tcp.deadline)
