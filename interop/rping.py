"""rping of librdmacm, either side of it, over any RNIC of ours: `rping -s -P` and `rping -c` are its peers.

A ping: the client sends where its message is, and the server reads it (RDMA Read) and says so; the client sends where
its sink is, and the server writes the message there (RDMA Write) and says so. The client compares.
"""

from __future__ import annotations

import struct
import time
from dataclasses import dataclass

from kbtp.verbs.api import (
    Access,
    ConnectRequest,
    Established,
    Event,
    MemoryRegion,
    RdmaRead,
    RdmaWrite,
    Recv,
    Rejected,
    Rnic,
    Send,
    Sge,
    Stream,
    StreamEnded,
    WcOpcode,
    WcStatus,
    WorkCompletion,
)

_INFO = struct.Struct(">QII")
"""Tagged offset, STag and length of a buffer; what the server says has the same size and no meaning."""

RECEIVES = 4
_DEPTH = 1
_FIRST_LETTER, _LETTERS = 65, 58
_NUDGE_S = 0.02
_CLOSE_S = 5.0


class PingFailed(Exception):
    """The other side ended the stream, was silent, or sent other octets than were due."""


def message(number: int, length: int) -> bytes:
    """What rping sends as its ping `number`: letters in turn, and a zero at the end."""
    head = b"rdma-ping-%d: " % number
    start = number % _LETTERS
    letters = bytes(_FIRST_LETTER + (start + at) % _LETTERS for at in range(_LETTERS))
    body = letters * (length // _LETTERS + 1)
    return (head + body)[: length - 1] + b"\0"


@dataclass(frozen=True, slots=True)
class _Buffer:
    """Where the peer's is."""

    to: int
    stag: int
    length: int


class Side:
    """One end of one connection: its memory, its channel and what has come."""

    def __init__(self, rnic: Rnic, length: int, timeout_s: float) -> None:
        self.pd = rnic.allocate_pd()
        self.channel = rnic.open_channel()
        self.length = length
        self.message = rnic.register(bytearray(length), Access.REMOTE_READ, pd=self.pd)
        self.sink = rnic.register(bytearray(length), Access.REMOTE_WRITE, pd=self.pd)
        self.stream: Stream | None = None
        self._inbox = rnic.register(bytearray(RECEIVES * _INFO.size), Access.NONE, pd=self.pd)
        self._events: list[Event] = []
        self.limit(timeout_s)

    def limit(self, timeout_s: float) -> None:
        """A new deadline."""
        self._deadline_s = time.monotonic() + timeout_s

    def close(self) -> None:
        self.channel.close()
        for region in (self.message, self.sink, self._inbox):
            region.revoke()

    def receives(self) -> list[Recv]:
        return [self._receive(slot) for slot in range(RECEIVES)]

    def next_event(self, wait_s: float | None = None) -> Event | None:
        """None when nothing came within `wait_s`. Raises PingFailed at the deadline."""
        left_s = self._deadline_s - time.monotonic()
        if not self._events:
            self._events = self.channel.poll(max(0.0, left_s if wait_s is None else min(wait_s, left_s)))
        if self._events:
            return self._events.pop(0)
        if time.monotonic() >= self._deadline_s:
            raise PingFailed("the other side is silent")
        return None

    def completed(self, opcode: WcOpcode, *, nudge_s: float | None = None) -> WorkCompletion:
        """The next completion of `opcode`. With `nudge_s` the peer is nudged when nothing came for so long."""
        while True:
            event = self.next_event(nudge_s)
            if event is None and nudge_s is not None:
                self.nudge()
                nudge_s *= 2
            if isinstance(event, StreamEnded):
                raise PingFailed(f"the stream ended: {event.reason or 'in order'}")
            if isinstance(event, WorkCompletion) and event.opcode is opcode and event.status is WcStatus.SUCCESS:
                return event

    def nudge(self) -> None:
        """An RDMA Write of no octets: siw overlooks an FPDU that comes with its Reply until another one comes."""
        assert self.stream is not None
        self.stream.post([RdmaWrite(0, (), 0, 0)])

    def read_nothing(self) -> None:
        """Post an RDMA Read that cannot be answered."""
        assert self.stream is not None
        self.stream.post([RdmaRead(0, Sge(self.sink, 0, self.length), 0, 0)])

    def say(self, region: MemoryRegion | None = None) -> None:
        """Send where `region` is, or just anything of that size."""
        info = bytes(_INFO.size)
        if region is not None:
            info = _INFO.pack(region.base_to, region.stag, region.length)
        assert self.stream is not None
        self.stream.post([Send(0, inline=info)])

    def hear(self, *, nudge_s: float | None = None) -> _Buffer:
        completion = self.completed(WcOpcode.RECV, nudge_s=nudge_s)
        if completion.length != _INFO.size:
            raise PingFailed(f"a Send of {completion.length} octets came")
        at = completion.wr_id * _INFO.size
        buffer = _Buffer(*_INFO.unpack(self._inbox.view[at : at + _INFO.size]))
        assert self.stream is not None
        self.stream.post_recv([self._receive(completion.wr_id)])
        return buffer

    def _receive(self, slot: int) -> Recv:
        return Recv(slot, Sge(self._inbox, slot * _INFO.size, _INFO.size))


def connected(rnic: Rnic, address: tuple[str, int], *, length: int, timeout_s: float) -> Side:
    """A client's side of a new connection; whoever asked for it closes it. Raises PingFailed."""
    side = Side(rnic, length, timeout_s)
    host, port = address
    side.stream = side.channel.connect(
        host, port, pd=side.pd, private_data=b"", ird=_DEPTH, ord_=_DEPTH, timeout_s=timeout_s, receives=side.receives()
    )
    while not isinstance(event := side.next_event(), Established):
        if isinstance(event, StreamEnded | Rejected):
            side.close()
            raise PingFailed(f"no connection: {event}")
    return side


def ping(rnic: Rnic, address: tuple[str, int], *, length: int, count: int, timeout_s: float) -> None:
    """Be the client for `count` pings. Raises PingFailed."""
    side = connected(rnic, address, length=length, timeout_s=timeout_s)
    try:
        for number in range(count):
            side.message.view[:] = message(number, length)
            side.sink.view[:] = bytes(length)
            side.say(side.message)
            side.hear(nudge_s=_NUDGE_S if number == 0 else None)
            side.say(side.sink)
            side.hear()
            if side.sink.view != side.message.view:
                raise PingFailed(f"ping {number} came back changed")
        assert side.stream is not None
        side.stream.disconnect()
        _await_end(side)
    finally:
        side.close()


class Server:
    """Listens from the start; `serve` is one connection."""

    def __init__(self, rnic: Rnic, length: int, timeout_s: float) -> None:
        self._side = Side(rnic, length, timeout_s)
        self._listener = self._side.channel.listen("127.0.0.1", 0)
        self.port = self._listener.address[1]

    def __enter__(self) -> Server:
        return self

    def __exit__(self, *_: object) -> None:
        self._side.close()

    def serve(self, count: int) -> None:
        """Answer `count` pings and see the client go. Raises PingFailed."""
        side = self._side
        while not isinstance(event := side.next_event(), ConnectRequest):
            pass
        side.stream = event.accept(pd=side.pd, private_data=b"", ird=_DEPTH, ord_=_DEPTH, receives=side.receives())
        for number in range(count):
            source = side.hear()
            if source.length != side.length:
                raise PingFailed(f"a message of {source.length} octets is offered")
            octets = Sge(side.message, 0, source.length)
            side.stream.post([RdmaRead(0, octets, source.stag, source.to)])
            side.completed(WcOpcode.RDMA_READ)
            if side.message.view != message(number, side.length):
                raise PingFailed(f"ping {number} was read changed: {bytes(side.message.view[:40])!r}")
            side.say()
            sink = side.hear()
            side.stream.post([RdmaWrite(0, (octets,), sink.stag, sink.to)])
            side.say()
        _await_end(side)


def _await_end(side: Side) -> None:
    """The connection has done what it is for; how it ends is not rping's matter, that it does is."""
    deadline_s = time.monotonic() + _CLOSE_S
    while not isinstance(side.next_event(_CLOSE_S), StreamEnded):
        if time.monotonic() >= deadline_s:
            raise PingFailed("the stream does not end")
