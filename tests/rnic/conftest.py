"""Two ends of a wire, and a peer that is only a socket.

The tests here know `kbtp.verbs.api` alone; `new_rnic` is where an RNIC comes from, so that every RNIC runs the
same suite. Everything happens in the test's own thread: `net.pump(until)` polls all channels until a condition holds.
"""

from __future__ import annotations

import select
import socket
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial

import pytest

from kbtp.iwarp.fpdu import FpduDecoder, FpduEncoder
from kbtp.iwarp.mpa import ActiveStartup, MpaOptions, Negotiated, PassiveStartup
from kbtp.iwarp.terminate import parse_terminate
from kbtp.types import TerminateInfo
from kbtp.verbs.api import (
    Access,
    BatchDone,
    Channel,
    ConnectRequest,
    Established,
    Event,
    Listener,
    MemoryRegion,
    ProtectionDomain,
    Recv,
    Rejected,
    Rnic,
    Sge,
    Stream,
    StreamEnded,
    WcOpcode,
    WcStatus,
    WorkCompletion,
)

PATIENCE_S = 20.0
DEPTH = 4
RECEIVE_BYTES = 1024
RECEIVES = 8

DDP_UNTAGGED = 18
TERMINATE_SECOND_OCTET = 0x47


@dataclass(eq=False)
class Side:
    """One channel with a domain of its own, and what came out of it so far."""

    net: Net
    rnic: Rnic
    pd: ProtectionDomain
    channel: Channel
    events: list[Event] = field(default_factory=list)
    accepted: list[Stream] = field(default_factory=list)
    listener: Listener | None = None
    answer: Callable[[ConnectRequest], Stream | None] | None = None
    depth: tuple[int, int] = (DEPTH, DEPTH)
    receives: int = RECEIVES
    buffers: dict[Stream, list[Recv]] = field(default_factory=dict)

    def region(self, octets: object, access: Access = Access.NONE, stream: Stream | None = None) -> MemoryRegion:
        """`octets`: a buffer, or how many zeros."""
        buffer = bytearray(octets) if isinstance(octets, int) else octets
        return self.rnic.register(buffer, access, pd=self.pd, stream=stream)

    def sge(self, octets: object) -> Sge:
        region = self.region(octets)
        return Sge(region, 0, region.length)

    def recvs(self, count: int | None = None, size: int = RECEIVE_BYTES, first_wr_id: int = 0) -> list[Recv]:
        count = self.receives if count is None else count
        region = self.region(max(1, count * size))
        return [Recv(first_wr_id + index, Sge(region, index * size, size)) for index in range(count)]

    def listen(self, host: str = "127.0.0.1") -> Listener:
        self.listener = self.channel.listen(host, 0)
        return self.listener

    def accept(self, request: ConnectRequest, private_data: bytes = b"server") -> Stream:
        ird, ord_ = self.depth
        recvs = self.recvs()
        stream = request.accept(pd=self.pd, private_data=private_data, ird=ird, ord_=ord_, receives=recvs)
        self.accepted.append(stream)
        self.buffers[stream] = recvs
        return stream

    def connect(
        self, address: tuple[str, int], private_data: bytes = b"client", *, timeout_s: float = PATIENCE_S
    ) -> Stream:
        ird, ord_ = self.depth
        recvs = self.recvs()
        stream = self.channel.connect(
            *address, pd=self.pd, private_data=private_data, ird=ird, ord_=ord_, timeout_s=timeout_s, receives=recvs
        )
        self.buffers[stream] = recvs
        return stream

    def poll(self) -> None:
        for event in self.channel.poll(0):
            if isinstance(event, Established | Rejected | StreamEnded | WorkCompletion | BatchDone):
                self.events.append(event)
            elif self.answer is not None:
                self.answer(event)
            else:
                self.accept(event)

    def completions(self, stream: Stream) -> list[WorkCompletion]:
        return [event for event in self.events if isinstance(event, WorkCompletion) and event.stream is stream]

    def received(self, stream: Stream) -> list[bytes]:
        """The octets of every Send that `stream` delivered into the receives it started with."""
        octets = []
        for completion in self.completions(stream):
            if completion.opcode is WcOpcode.RECV and completion.status is WcStatus.SUCCESS:
                sge = self.buffers[stream][completion.wr_id].sge
                octets.append(bytes(sge.region.view[sge.offset : sge.offset + completion.length]))
        return octets

    def established(self, stream: Stream) -> Established | None:
        return next((event for event in self.events if isinstance(event, Established) and event.stream is stream), None)

    def rejected(self, stream: Stream) -> Rejected | None:
        return next((event for event in self.events if isinstance(event, Rejected) and event.stream is stream), None)

    def ended(self, stream: Stream) -> StreamEnded | None:
        return next((event for event in self.events if isinstance(event, StreamEnded) and event.stream is stream), None)

    def wait(self, stream: Stream, count: int) -> list[WorkCompletion]:
        """The completions of `stream` once there are `count`; no more may have come."""
        self.net.pump(lambda: len(self.completions(stream)) >= count)
        completions = self.completions(stream)
        assert len(completions) == count, completions
        return completions

    def wait_end(self, stream: Stream) -> StreamEnded:
        self.net.pump(lambda: self.ended(stream) is not None)
        ended = self.ended(stream)
        assert ended is not None
        assert [event for event in self.events if getattr(event, "stream", None) is stream][-1] is ended
        return ended


class RawPeer:
    """A TCP connection that says what the test wants and notes what comes."""

    def __init__(self, net: Net, sock: socket.socket) -> None:
        sock.setblocking(False)
        self.net = net
        self.sock = sock
        self.received = bytearray()
        self.fin = False
        self.reset = False
        self.reading = True
        self.encoder = FpduEncoder(crc=True, markers=False)
        self._decoder = FpduDecoder(crc=True, markers=False)
        self._ulpdus: list[bytes] = []

    @property
    def gone(self) -> bool:
        return self.fin or self.reset

    def pull(self) -> None:
        while self.reading and not self.gone:
            try:
                octets = self.sock.recv(1 << 16)
            except BlockingIOError:
                return
            except OSError:
                self.reset = True
                return
            self.received += octets
            self.fin = not octets

    def send(self, octets: bytes) -> None:
        """All of `octets`, pumping the others while the socket is full; the peer may close meanwhile."""
        view = memoryview(octets)

        def sent() -> bool:
            nonlocal view
            try:
                while view:
                    view = view[self.sock.send(view) :]
            except BlockingIOError:
                return False
            except OSError:
                self.reset = True
            return True

        self.net.pump(sent)

    def initiate(self, *, ird: int = DEPTH, ord_: int = DEPTH, options: MpaOptions | None = None) -> Negotiated:
        """Start-up as the active side."""
        startup = ActiveStartup(options or MpaOptions(), b"raw", ird, ord_)
        self.send(startup.request)
        result: list[object] = []

        def replied() -> bool:
            octets, self.received = self.received, bytearray()
            result.append(startup.receive_data(bytes(octets)) if octets else None)
            return result[-1] is not None

        self.net.pump(replied)
        assert isinstance(result[-1], Negotiated)
        return result[-1]

    def respond(self, *, ird: int = DEPTH, ord_: int = DEPTH, options: MpaOptions | None = None) -> Negotiated:
        """Start-up as the passive side."""
        startup = PassiveStartup(options or MpaOptions())

        def asked() -> bool:
            octets, self.received = self.received, bytearray()
            return bool(octets) and startup.receive_data(bytes(octets)) is not None

        self.net.pump(asked)
        reply, negotiated = startup.accept(b"raw", ird, ord_)
        self.send(reply)
        return negotiated

    def send_ulpdu(self, *pieces: bytes) -> None:
        self.send(self.encoder.encode(pieces))

    def ulpdus(self) -> list[bytes]:
        """All ULPDUs received so far."""
        octets, self.received = self.received, bytearray()
        self._ulpdus += [bytes(ulpdu) for ulpdu in self._decoder.receive(bytes(octets))]
        return self._ulpdus

    def wait_terminate(self) -> TerminateInfo:
        """The Terminate that ends what is received: the connection then closes with a FIN (R40, R43)."""
        self.net.pump(lambda: self.gone)
        assert self.fin, "the connection must end with a FIN, not a RST"
        last = self.ulpdus()[-1]
        assert last[1] == TERMINATE_SECOND_OCTET, last.hex()
        return parse_terminate(last[DDP_UNTAGGED:])

    def close(self) -> None:
        self.sock.close()


class Net:
    """Everything that takes part in a test."""

    def __init__(self) -> None:
        self.sides: list[Side] = []
        self.raws: list[RawPeer] = []
        self._sockets: list[socket.socket] = []

    def side(self, rnic: Rnic) -> Side:
        side = Side(self, rnic, rnic.allocate_pd(), rnic.open_channel())
        self.sides.append(side)
        return side

    def raw_to(self, address: tuple[str, int]) -> RawPeer:
        raw = RawPeer(self, socket.create_connection(address))
        self.raws.append(raw)
        return raw

    def raw_listener(self) -> socket.socket:
        """A listening socket that nobody answers for; see `raw_from`."""
        sock = socket.create_server(("127.0.0.1", 0))
        self._sockets.append(sock)
        return sock

    def raw_from(self, listener: socket.socket) -> RawPeer:
        listener.setblocking(False)
        raws: list[RawPeer] = []

        def accepted() -> bool:
            try:
                raws.append(RawPeer(self, listener.accept()[0]))
            except BlockingIOError:
                return False
            return True

        self.pump(accepted)
        self.raws += raws
        return raws[0]

    def pump(self, until: Callable[[], bool]) -> None:
        """Let everybody work until the condition holds."""
        deadline = time.monotonic() + PATIENCE_S
        while True:
            for side in self.sides:
                side.poll()
            for raw in self.raws:
                raw.pull()
            if until():
                return
            remaining_s = deadline - time.monotonic()
            if remaining_s <= 0:
                pytest.fail(f"it never happened; events: {[side.events for side in self.sides]}")
            timeouts = [side.channel.next_timeout_s() for side in self.sides]
            # At most 10 ms, since `until` may wait for something that no file descriptor here shows.
            wait_s = min([0.01, remaining_s, *(timeout for timeout in timeouts if timeout is not None)])
            readers: list[object] = [side.channel.fileno() for side in self.sides]
            readers += [raw.sock for raw in self.raws if raw.reading and not raw.gone]
            select.select(readers, [], [], wait_s)

    def settle(self) -> None:
        """Let everybody work until nothing has happened for a while: for what must *not* happen."""
        quiet = 0
        seen: list[int] = []

        def nothing_new() -> bool:
            nonlocal quiet, seen
            now = [len(side.events) for side in self.sides] + [len(raw.received) for raw in self.raws]
            quiet, seen = (quiet + 1 if now == seen else 0), now
            return quiet >= 5

        self.pump(nothing_new)

    def close(self) -> None:
        for raw in self.raws:
            raw.close()
        for sock in self._sockets:
            sock.close()
        for side in self.sides:
            side.rnic.close()


@dataclass
class Pair:
    """Two sides with a stream between them: `s` is the server's end, `c` the client's."""

    net: Net
    server: Side
    client: Side
    s: Stream
    c: Stream


@pytest.fixture
def net() -> Iterator[Net]:
    net = Net()
    yield net
    net.close()


@pytest.fixture
def new_rnic(new_rnic: Callable[..., Rnic]) -> Callable[..., Rnic]:
    """As everywhere, and it does not wait long for a peer that never closes."""
    return partial(new_rnic, goodbye_s=0.5)


@pytest.fixture
def server(net: Net, new_rnic: Callable[..., Rnic]) -> Side:
    """A side that listens on loopback and accepts whoever comes."""
    side = net.side(new_rnic())
    side.listen()
    return side


@pytest.fixture
def connect_pair(net: Net, new_rnic: Callable[..., Rnic]) -> Callable[..., Pair]:
    """`connect_pair(client_mpa=..., server_mpa=..., client_depth=(ird, ord), server=another_side)`."""

    def connect(
        *,
        client_mpa: MpaOptions | None = None,
        server_mpa: MpaOptions | None = None,
        client_depth: tuple[int, int] = (DEPTH, DEPTH),
        server_depth: tuple[int, int] = (DEPTH, DEPTH),
        receives: int = RECEIVES,
        server: Side | None = None,
        **times: float,
    ) -> Pair:
        if server is None:
            server = net.side(new_rnic(server_mpa, **times))
            server.depth, server.receives = server_depth, receives
            server.listen()
        client = net.side(new_rnic(client_mpa, **times))
        client.depth = client_depth
        assert server.listener is not None
        before = len(server.accepted)
        stream = client.connect(server.listener.address)
        net.pump(lambda: client.established(stream) is not None and len(server.accepted) > before)
        return Pair(net, server, client, server.accepted[-1], stream)

    return connect


@pytest.fixture
def pair(connect_pair: Callable[..., Pair]) -> Pair:
    return connect_pair()
