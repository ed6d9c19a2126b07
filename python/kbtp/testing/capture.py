"""Recording TCP connections into a pcap file without capture rights: a proxy that keeps what it forwards.

`TcpRecording` makes the packets: Ethernet, IPv4 and TCP around recorded octets, with the sequence numbers they would
have had. `CapturingProxy` fills one while it stands between an initiator and a target, whatever RNIC they use.
"""

from __future__ import annotations

import contextlib
import selectors
import socket
import struct
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO

import dpkt

from kbtp.testing.packets import Endpoint

SEGMENT_BYTES = 16_384
"""Most octets of a recorded TCP segment, as over loopback. FPDUs may lie in them as they fall: TCP is a stream."""
SNAPLEN_BYTES = 262_144
_SEQUENCE_MASK = 0xFFFF_FFFF
_READ_BYTES = 65_536
_BUFFERED_BYTES_MAX = 1 << 20
_CONNECT_TIMEOUT_S = 5.0
_CLIENT_MAC, _SERVER_MAC = bytes.fromhex("020000000001"), bytes.fromhex("020000000002")


@dataclass(slots=True)
class _RecordedEnd:
    endpoint: Endpoint
    mac: bytes
    sequence: int


class RecordedConnection:
    """One TCP connection of a recording; its first three packets are there from the start."""

    def __init__(
        self, recording: TcpRecording, time_s: float, client: Endpoint, server: Endpoint, first_sequence: int
    ) -> None:
        self._recording = recording
        self._ends = {
            True: _RecordedEnd(client, _CLIENT_MAC, first_sequence),
            False: _RecordedEnd(server, _SERVER_MAC, first_sequence),
        }
        self._packet(time_s, True, dpkt.tcp.TH_SYN, acknowledge=False)
        self._packet(time_s, False, dpkt.tcp.TH_SYN)
        self._packet(time_s, True)

    def octets(self, time_s: float, octets: bytes, *, from_client: bool) -> None:
        """`octets` went to the other end at `time_s` (seconds since the epoch)."""
        for at in range(0, len(octets), SEGMENT_BYTES):
            self._packet(time_s, from_client, dpkt.tcp.TH_PUSH, octets[at : at + SEGMENT_BYTES])

    def finish(self, time_s: float, *, from_client: bool) -> None:
        """That end has closed its half of the connection."""
        self._packet(time_s, from_client, dpkt.tcp.TH_FIN)

    def reset(self, time_s: float, *, from_client: bool) -> None:
        """That end has reset the connection."""
        self._packet(time_s, from_client, dpkt.tcp.TH_RST)

    def _packet(
        self, time_s: float, from_client: bool, flags: int = 0, payload: bytes = b"", *, acknowledge: bool = True
    ) -> None:
        source, sink = self._ends[from_client], self._ends[not from_client]
        segment = dpkt.tcp.TCP(
            sport=source.endpoint.port,
            dport=sink.endpoint.port,
            seq=source.sequence,
            ack=sink.sequence if acknowledge else 0,
            flags=flags | (dpkt.tcp.TH_ACK if acknowledge else 0),
            win=65_535,
            data=payload,
        )
        packet = dpkt.ip.IP(
            src=socket.inet_aton(source.endpoint.host),
            dst=socket.inet_aton(sink.endpoint.host),
            p=dpkt.ip.IP_PROTO_TCP,
            data=segment,
        )
        frame = dpkt.ethernet.Ethernet(src=source.mac, dst=sink.mac, type=dpkt.ethernet.ETH_TYPE_IP, data=packet)
        self._recording.packets.append((time_s, bytes(frame)))
        takes_one = bool(flags & (dpkt.tcp.TH_SYN | dpkt.tcp.TH_FIN))
        source.sequence = (source.sequence + len(payload) + takes_one) & _SEQUENCE_MASK


class TcpRecording:
    """Packets and their times, in the order they were recorded."""

    def __init__(self) -> None:
        self.packets: list[tuple[float, bytes]] = []

    def connection(
        self, time_s: float, client: Endpoint, server: Endpoint, *, first_sequence: int = 0
    ) -> RecordedConnection:
        """A connection that `client` opened to `server`, IPv4 both; `first_sequence` is that of both SYNs."""
        return RecordedConnection(self, time_s, client, server, first_sequence)

    def write(self, file: BinaryIO) -> None:
        """The recording so far as a pcap file."""
        writer = dpkt.pcap.Writer(file, snaplen=SNAPLEN_BYTES, nano=True)
        writer.writepkts(list(self.packets))


@dataclass(slots=True)
class _Leg:
    """One direction of a proxied connection: what was read from `source` and is not yet sent to `sink`."""

    source: socket.socket
    sink: socket.socket
    recorded: RecordedConnection
    from_client: bool
    unsent: bytearray = field(default_factory=bytearray)
    source_ended: bool = False
    finished: bool = False


class CapturingProxy:
    """Listens on 127.0.0.1, forwards each connection to a target and records both directions of it.

    Used as a context manager; `write` may be called during and after. The recording shows the client connected to the
    target itself, so that its ports are those a capture without the proxy would have.
    """

    def __init__(self, target_host: str, target_port: int) -> None:
        self._target = (target_host, target_port)
        self._recording = TcpRecording()
        self._lock = threading.Lock()  # guards the recording
        self._selector = selectors.DefaultSelector()
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._listener.setblocking(False)
        self._waker, self._woken = socket.socketpair()
        self._legs: dict[socket.socket, tuple[_Leg, _Leg]] = {}  # by socket: (reads from it, writes to it)
        self._thread = threading.Thread(target=self._run, name="kbtp-capturing-proxy", daemon=True)

    @property
    def address(self) -> tuple[str, int]:
        """Where to connect instead of to the target."""
        host, port = self._listener.getsockname()
        return host, port

    def write(self, path: Path) -> None:
        """Write what was recorded so far to a pcap file."""
        with self._lock, path.open("wb") as file:
            self._recording.write(file)

    def __enter__(self) -> CapturingProxy:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._waker.close()
        self._thread.join()

    def _run(self) -> None:
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._selector.register(self._woken, selectors.EVENT_READ)
        try:
            while self._serve_ready():
                pass
        finally:
            for opened in (*self._legs, self._listener, self._woken):
                opened.close()
            self._selector.close()

    def _serve_ready(self) -> bool:
        """Wait for sockets and serve them; False once the proxy is to end."""
        for key, events in self._selector.select():
            ready = key.fileobj
            if ready is self._woken:
                return False
            if ready is self._listener:
                self._accept()
                continue
            assert isinstance(ready, socket.socket)
            if ready not in self._legs:
                continue  # closed by an event before this one
            reading, writing = self._legs[ready]
            try:
                if events & selectors.EVENT_WRITE:
                    self._send(writing)
                if events & selectors.EVENT_READ:
                    self._receive(reading)
            except OSError:
                self._forward_the_rest(reading)
                self._forward_the_rest(writing)
                self._reset(reading)
                continue
            self._after(reading, writing)
        return True

    def _accept(self) -> None:
        try:
            client, address = self._listener.accept()
        except OSError:
            return  # given up before it was taken
        try:
            target = socket.create_connection(self._target, timeout=_CONNECT_TIMEOUT_S)
        except OSError:
            _reset_on_close(client)
            client.close()
            return
        with self._lock:
            recorded = self._recording.connection(time.time(), Endpoint(*address), self._recorded_target())
        outbound = _Leg(client, target, recorded, from_client=True)
        inbound = _Leg(target, client, recorded, from_client=False)
        for end, legs in ((client, (outbound, inbound)), (target, (inbound, outbound))):
            end.setblocking(False)
            end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._legs[end] = legs
            self._selector.register(end, selectors.EVENT_READ)

    def _recorded_target(self) -> Endpoint:
        host, port = self._target
        return Endpoint(host if _is_ipv4(host) else "127.0.0.1", port)

    def _receive(self, leg: _Leg) -> None:
        octets = leg.source.recv(_READ_BYTES)
        if not octets:
            leg.source_ended = True
            with self._lock:
                leg.recorded.finish(time.time(), from_client=leg.from_client)
        self._forward(leg, octets)

    def _forward(self, leg: _Leg, octets: bytes) -> None:
        with self._lock:
            leg.recorded.octets(time.time(), octets, from_client=leg.from_client)
        leg.unsent += octets
        self._send(leg)

    def _send(self, leg: _Leg) -> None:
        try:
            while leg.unsent:
                del leg.unsent[: leg.sink.send(leg.unsent)]
        except BlockingIOError:
            return
        if leg.source_ended and not leg.finished:
            leg.finished = True
            leg.sink.shutdown(socket.SHUT_WR)

    def _after(self, reading: _Leg, writing: _Leg) -> None:
        """Close what has ended both ways, else wait for what each of the two sockets can do next."""
        if reading.finished and writing.finished:
            self._close(reading)
            return
        for end in (reading.source, reading.sink):
            source_of, sink_of = self._legs[end]
            events = 0
            if not source_of.source_ended and len(source_of.unsent) < _BUFFERED_BYTES_MAX:
                events |= selectors.EVENT_READ
            if sink_of.unsent:
                events |= selectors.EVENT_WRITE
            self._listen_for(end, events)

    def _listen_for(self, end: socket.socket, events: int) -> None:
        registered = end in self._selector.get_map()
        if not events:
            if registered:
                self._selector.unregister(end)
        elif registered:
            self._selector.modify(end, events)
        else:
            self._selector.register(end, events)

    def _forward_the_rest(self, leg: _Leg) -> None:
        """What came before the connection broke: a Terminate, for one, of who then closes without having read all."""
        with contextlib.suppress(OSError):
            while len(leg.unsent) < _BUFFERED_BYTES_MAX and (octets := leg.source.recv(_READ_BYTES)):
                self._forward(leg, octets)

    def _reset(self, leg: _Leg) -> None:
        """The connection at `leg.source` or `leg.sink` broke; the end that still has one learns it the same way."""
        with self._lock:
            leg.recorded.reset(time.time(), from_client=leg.from_client)
        for end in (leg.source, leg.sink):
            _reset_on_close(end)
        self._close(leg)

    def _close(self, leg: _Leg) -> None:
        for end in (leg.source, leg.sink):
            self._listen_for(end, 0)
            del self._legs[end]
            end.close()


def _reset_on_close(end: socket.socket) -> None:
    end.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))


def _is_ipv4(host: str) -> bool:
    try:
        socket.inet_aton(host)
    except OSError:
        return False
    return True
