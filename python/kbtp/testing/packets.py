"""From a capture file to the octets of its TCP connections: pcap or pcapng, link layer, IP, TCP, reassembly."""

from __future__ import annotations

import io
import socket
import struct
from collections.abc import Iterator
from dataclasses import dataclass, field

import dpkt

from kbtp.errors import KbtpError

CAPTURE_MAGICS = frozenset(
    bytes.fromhex(magic)
    for magic in ("a1b2c3d4", "d4c3b2a1", "a1b23c4d", "4d3cb2a1", "a1b2cd34", "34cdb2a1", "0a0d0d0a")
)
"""First four octets of pcap (micro- and nanoseconds, modified, either byte order) and of pcapng."""

_ETHERNET, _LINUX_SLL, _LINUX_SLL2 = 1, 113, 276
# Link types whose header has a fixed size and whose payload says itself which IP it is.
_HEADER_BYTES = {0: 4, 108: 4, 12: 0, 14: 0, 101: 0, 228: 0, 229: 0}
_ETHERTYPES_IP = (0x0800, 0x86DD)
_ETHERTYPES_VLAN = (0x8100, 0x88A8)
_PROTOCOL_TCP = 6
_IPV6_EXTENSIONS = (0, 43, 60)  # hop by hop, routing, destination options; a fragment (44) is not put together
_FIN, _SYN, _RST, _ACK = 0x01, 0x02, 0x04, 0x10
_SEQUENCE_MASK = 0xFFFF_FFFF
_WAITING_BYTES_MAX = 16 << 20


class CaptureError(KbtpError):
    """The file is not a capture that can be read, or ends before it should; says where and what is wrong."""


@dataclass(frozen=True, slots=True)
class Endpoint:
    """A TCP endpoint."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


@dataclass(frozen=True, slots=True)
class TcpSegment:
    """One TCP segment as captured; `payload` may be cut short by the capture."""

    time_s: float
    source: Endpoint
    sink: Endpoint
    sequence: int
    flags: int
    payload: bytes

    @property
    def opens(self) -> bool:
        return self.flags & (_SYN | _ACK) == _SYN

    @property
    def syn(self) -> bool:
        return bool(self.flags & _SYN)

    @property
    def fin(self) -> bool:
        return bool(self.flags & _FIN)

    @property
    def rst(self) -> bool:
        return bool(self.flags & _RST)


class _NoticingFile(io.BytesIO):
    """Remembers whether a read ran into the end of the file: the readers take a short packet for a whole one."""

    def __init__(self, octets: bytes) -> None:
        super().__init__(octets)
        self.cut = False
        self._at_end = False

    def read(self, size: int | None = -1, /) -> bytes:
        if size is None or size < 0:
            raise CaptureError(f"a block says it is {size} octets long")
        octets = super().read(size)
        # A clean end is one empty read where the next packet would begin, and none after it.
        self.cut = self.cut or 0 < len(octets) < size or (self._at_end and size > 0)
        self._at_end = size > 0 and not octets
        return octets


def read_packets(octets: bytes) -> Iterator[tuple[float, int, bytes]]:
    """Time in seconds, link type and octets of each packet.

    Raises `CaptureError` where the file turns out not to be a whole pcap or pcapng file; the packets before are good.
    """
    file = _NoticingFile(octets)
    number = 0
    try:
        reader = dpkt.pcap.UniversalReader(file)
        link_type = int(reader.datalink())
        file.cut = False  # the reader tries one format after the other
        for time_s, packet in reader:
            if file.cut:
                break
            if not packet:
                continue  # cut right before its octets, which the next read notices, or nothing was kept of it
            number += 1
            yield float(time_s), link_type, packet
    except (dpkt.Error, struct.error, ValueError, IndexError, OverflowError) as error:
        if not file.cut:
            raise CaptureError(f"not a capture file that can be read, after packet {number}: {error}") from error
    if file.cut:
        raise CaptureError(f"the file ends in the middle of packet {number + 1}: it was cut short")


def parse_tcp(time_s: float, link_type: int, packet: bytes) -> TcpSegment | None:
    """The TCP segment in a packet; None if there is none, or only part of its headers.

    Raises `CaptureError` for a link type that is not known here.
    """
    try:
        at = _ip_offset(link_type, packet)
        if at is None:
            return None
        found = _tcp_in_ipv6(packet, at) if packet[at] >> 4 == 6 else _tcp_in_ipv4(packet, at)
        if found is None:
            return None
        source_host, sink_host, at, end = found
        source_port, sink_port, sequence, _, offset, flags = struct.unpack_from(">HHIIBB", packet, at)
    except (struct.error, IndexError):
        return None
    payload = packet[at + (offset >> 4) * 4 : end]
    return TcpSegment(
        time_s, Endpoint(source_host, source_port), Endpoint(sink_host, sink_port), sequence, flags, payload
    )


def _ip_offset(link_type: int, packet: bytes) -> int | None:
    """Where the IP header is; None if the packet carries something else."""
    if link_type in _HEADER_BYTES:
        return _HEADER_BYTES[link_type]
    if link_type == _ETHERNET:
        type_at = 12
        while struct.unpack_from(">H", packet, type_at)[0] in _ETHERTYPES_VLAN:
            type_at += 4
        at = type_at + 2
    elif link_type == _LINUX_SLL:
        type_at, at = 14, 16
    elif link_type == _LINUX_SLL2:
        type_at, at = 0, 20
    else:
        raise CaptureError(
            f"link type {link_type} is not known: Ethernet, Linux cooked (SLL, SLL2), loopback and raw IP are"
        )
    return at if struct.unpack_from(">H", packet, type_at)[0] in _ETHERTYPES_IP else None


def _tcp_in_ipv4(packet: bytes, at: int) -> tuple[str, str, int, int] | None:
    """Source, destination, and where the TCP segment begins and ends."""
    first, total_bytes, fragment, protocol = struct.unpack_from(">BxHxxHxB", packet, at)
    if first >> 4 != 4 or protocol != _PROTOCOL_TCP or fragment & 0x3FFF:
        return None
    source, sink = packet[at + 12 : at + 16], packet[at + 16 : at + 20]
    # Total Length 0: the capture was taken before the interface cut the segment up.
    end = at + total_bytes if total_bytes else len(packet)
    return _host(source), _host(sink), at + (first & 0xF) * 4, min(end, len(packet))


def _tcp_in_ipv6(packet: bytes, at: int) -> tuple[str, str, int, int] | None:
    payload_bytes, protocol = struct.unpack_from(">4xHB", packet, at)
    source, sink = packet[at + 8 : at + 24], packet[at + 24 : at + 40]
    at += 40
    end = at + payload_bytes if payload_bytes else len(packet)
    while protocol in _IPV6_EXTENSIONS:
        protocol, extension = struct.unpack_from(">BB", packet, at)
        at += 8 + 8 * extension
    if protocol != _PROTOCOL_TCP:
        return None
    return _host(source), _host(sink), at, min(end, len(packet))


def _host(address: bytes) -> str:
    try:
        return socket.inet_ntop(socket.AF_INET if len(address) == 4 else socket.AF_INET6, address)
    except ValueError as error:
        raise IndexError("the packet ends inside an address") from error


@dataclass(slots=True)
class HalfConnection:
    """Octets one end sent, put in order by their sequence numbers: retransmissions once, early ones in their turn."""

    expected: int | None = None
    """Sequence number of the next octet; None before the first segment."""
    waiting: dict[int, bytes] = field(default_factory=dict)
    """Payloads that came before their turn, by sequence number."""
    waiting_bytes: int = 0
    lost: bool = False
    """More came early than a gap that is going to close lets wait: the capture lacks octets, and no more is taken."""

    def receive(self, segment: TcpSegment) -> bytes:
        """The octets that are in order now."""
        sequence = (segment.sequence + segment.syn) & _SEQUENCE_MASK
        if self.expected is None:
            self.expected = sequence
        if self.lost or not segment.payload:
            return b""
        if self._ahead(sequence) > 0:
            self._keep(sequence, segment.payload)
            return b""
        ready = bytearray(self._take(sequence, segment.payload))
        while self.waiting:
            sequence = min(self.waiting, key=self._ahead)
            if self._ahead(sequence) > 0:
                break
            payload = self.waiting.pop(sequence)
            self.waiting_bytes -= len(payload)
            ready += self._take(sequence, payload)
        return bytes(ready)

    @property
    def missing_bytes(self) -> int:
        """Octets the capture lacks before the next ones it has."""
        return self._ahead(min(self.waiting, key=self._ahead)) if self.waiting else 0

    def _ahead(self, sequence: int) -> int:
        """How far `sequence` is past what is expected, negative before it (RFC 9293 3.4)."""
        assert self.expected is not None
        return ((sequence - self.expected + 0x8000_0000) & _SEQUENCE_MASK) - 0x8000_0000

    def _take(self, sequence: int, payload: bytes) -> bytes:
        fresh = payload[-self._ahead(sequence) :]
        assert self.expected is not None
        self.expected = (self.expected + len(fresh)) & _SEQUENCE_MASK
        return fresh

    def _keep(self, sequence: int, payload: bytes) -> None:
        known = self.waiting.get(sequence, b"")
        if len(payload) > len(known):
            self.waiting[sequence] = payload
            self.waiting_bytes += len(payload) - len(known)
        self.lost = self.waiting_bytes > _WAITING_BYTES_MAX
