"""A closer look at what came, octet by octet, and FPDUs in which markers and CRC may be anything.

Nothing here knows how this package frames (but for the CRC's polynomial): an error there must not hide on both sides.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from kbtp.conformance.deviation import expect
from kbtp.conformance.stream import Message, Stream
from kbtp.iwarp.crc32c import wire_crc

MARKER_EVERY_BYTES = 512
MARKER_BYTES = 4
CRC_BYTES = 4
TAGGED_BYTES = 14
UNTAGGED_BYTES = 18
READ_REQUEST_BYTES = 28

MarkerChange = Callable[[int, int], tuple[int, int]]
"""(RESERVED, FPDUPTR) of a marker as it should be, and as it is sent."""


def pad_bytes(ulpdu_bytes: int) -> int:
    return -(2 + ulpdu_bytes) % 4


def laid_out(position: int, ulpdu_bytes: int) -> tuple[int, bool]:
    """Where a half connection with markers is behind an FPDU, and whether a marker stands right before its CRC."""
    for _ in range(0, 2 + ulpdu_bytes + pad_bytes(ulpdu_bytes), 4):
        position += 4 + (MARKER_BYTES if position % MARKER_EVERY_BYTES == 0 else 0)
    before_crc = position % MARKER_EVERY_BYTES == 0
    return position + CRC_BYTES + (MARKER_BYTES if before_crc else 0), before_crc


class Framer:
    """One outgoing half connection: makes FPDUs, with markers if the peer asked for them."""

    def __init__(self, *, crc: bool = True, markers: bool = False) -> None:
        self._crc = crc
        self._markers = markers
        self._position = 0

    def fpdu(
        self,
        ulpdu: bytes,
        *,
        pad: bytes | None = None,
        crc_xor: int = 0,
        length: int | None = None,
        marker: MarkerChange | None = None,
    ) -> bytes:
        """`crc_xor` spoils the CRC, `marker` changes each marker before the CRC is taken."""
        pad = bytes(pad_bytes(len(ulpdu))) if pad is None else pad
        body = struct.pack(">H", len(ulpdu) if length is None else length) + ulpdu + pad
        out = bytearray()
        start: int | None = None
        for at in range(0, len(body) + CRC_BYTES, 4):
            if self._markers and self._position % MARKER_EVERY_BYTES == 0:
                pointer = 0 if start is None else self._position - start
                out += struct.pack(">HH", *(marker(0, pointer) if marker else (0, pointer)))
                self._position += MARKER_BYTES
            start = self._position if start is None else start
            out += body[at : at + 4]
            self._position += 4
        crc = int.from_bytes(wire_crc(bytes(out)), "big") if self._crc else 0
        return bytes(out) + struct.pack(">I", crc ^ crc_xor)


@dataclass(frozen=True, slots=True)
class Marker:
    position: int
    """In the half connection."""
    reserved: int
    pointer: int
    distance: int
    """What FPDUPTR has to be: octets from this FPDU's length field, 0 before it."""


@dataclass(frozen=True, slots=True)
class Fpdu:
    start: int
    """Position in the half connection."""
    size: int
    ulpdu: bytes
    pad: bytes
    crc: bytes
    crc_due: bytes
    markers: tuple[Marker, ...] = ()
    marker_before_crc: bool = False


class Deframer:
    """One incoming half connection: takes octets in any split, judges nothing."""

    def __init__(self, *, markers: bool = False) -> None:
        self._markers = markers
        self._position = 0
        self._octets = bytearray()

    @property
    def left_over(self) -> bytes:
        return bytes(self._octets)

    def feed(self, octets: bytes) -> Iterator[Fpdu]:
        self._octets += octets
        while (fpdu := self._next()) is not None:
            yield fpdu

    def _next(self) -> Fpdu | None:
        take = _Taker(self._octets, self._position, markers=self._markers)
        length_field = take(2)
        if length_field is None:
            return None
        (length,) = struct.unpack(">H", length_field)
        body = take(length + pad_bytes(length))
        markers_before = len(take.found)
        crc = take(CRC_BYTES)
        if body is None or crc is None:
            return None
        fpdu = Fpdu(
            start=self._position,
            size=take.at,
            ulpdu=body[:length],
            pad=body[length:],
            crc=crc,
            crc_due=wire_crc(bytes(self._octets[: take.at - CRC_BYTES])),
            markers=tuple(take.found),
            marker_before_crc=len(take.found) > markers_before,
        )
        del self._octets[: take.at]
        self._position += take.at
        return fpdu


class _Taker:
    """Takes octets from the front of a half connection and notes the markers between them."""

    def __init__(self, octets: bytearray, position: int, *, markers: bool) -> None:
        self._octets = octets
        self._position = position
        self._markers = markers
        self._length_field: int | None = None
        self.at = 0
        self.found: list[Marker] = []

    def __call__(self, count: int) -> bytes | None:
        """None if they are not all there yet."""
        out = bytearray()
        while len(out) < count:
            if self._markers and self._position % MARKER_EVERY_BYTES == 0 and not self._take_marker():
                return None
            if self._length_field is None:
                self._length_field = self._position
            run = count - len(out)
            if self._markers:
                run = min(run, MARKER_EVERY_BYTES - self._position % MARKER_EVERY_BYTES)
            if len(self._octets) < self.at + run:
                return None
            out += self._octets[self.at : self.at + run]
            self.at += run
            self._position += run
        return bytes(out)

    def _take_marker(self) -> bool:
        if len(self._octets) < self.at + MARKER_BYTES:
            return False
        reserved, pointer = struct.unpack_from(">HH", self._octets, self.at)
        distance = 0 if self._length_field is None else self._position - self._length_field
        self.found.append(Marker(self._position, reserved, pointer, distance))
        self.at += MARKER_BYTES
        self._position += MARKER_BYTES
        return True


# --- DDP segments (RFC 5041 4) and RDMAP messages (RFC 5040 4, RFC 7306 5 and 6) ---


@dataclass(frozen=True, slots=True)
class Segment:
    """A DDP segment taken apart; fields that its header does not have are 0."""

    ulpdu: bytes
    tagged: bool
    last: bool
    rsvd: int
    dv: int
    rv: int
    rsv: int
    opcode: int
    payload: bytes
    stag: int = 0
    """Of an untagged segment its Invalidate STag."""
    to: int = 0
    qn: int = 0
    msn: int = 0
    mo: int = 0

    @classmethod
    def parse(cls, ulpdu: bytes) -> Segment:
        """Raises `Deviation` if it is shorter than its header."""
        is_tagged = bool(ulpdu and ulpdu[0] & 0x80)
        size = TAGGED_BYTES if is_tagged else UNTAGGED_BYTES
        expect(len(ulpdu) >= size, f"a DDP header of {size} octets (RFC 5041 4)", ulpdu.hex())
        ddp, rdmap = ulpdu[0], ulpdu[1]
        fields = struct.unpack_from(">IQ" if is_tagged else ">IIII", ulpdu, 2)
        named = dict(zip(("stag", "to") if is_tagged else ("stag", "qn", "msn", "mo"), fields, strict=True))
        return cls(
            ulpdu, is_tagged, bool(ddp & 0x40), ddp >> 2 & 0xF, ddp & 3, rdmap >> 6, rdmap >> 4 & 3, rdmap & 0xF,
            ulpdu[size:], **named,
        )  # fmt: skip


@dataclass(frozen=True, slots=True)
class Terminate:
    """RFC 5040 4.8, taken apart by its bits."""

    layer: int
    etype: int
    code: int
    bits: int
    segment_length: int | None
    ddp_header: bytes
    rdmap_header: bytes
    left_over: bytes

    M, D, R = 0x8000, 0x4000, 0x2000

    @classmethod
    def parse(cls, payload: bytes) -> Terminate:
        first, code, bits = struct.unpack_from(">BBH", payload.ljust(4, b"\0"))
        rest = payload[4:]
        length: int | None = None
        ddp = rdmap = b""
        if bits & (cls.M | cls.D) and len(rest) >= 2:
            (length,) = struct.unpack_from(">H", rest)
            rest = rest[2:]
        if bits & cls.D and rest:
            size = TAGGED_BYTES if rest[0] & 0x80 else UNTAGGED_BYTES
            ddp, rest = rest[:size], rest[size:]
        if bits & cls.R:
            rdmap, rest = rest[:28], rest[28:]
        return cls(first >> 4, first & 0xF, code, bits, length, ddp, rdmap, rest)


def fpdus_of(stream: Stream) -> list[Fpdu]:
    """All FPDUs that came on `stream` so far."""
    ours = stream.request if stream.active else stream.reply
    return list(Deframer(markers=ours.markers).feed(bytes(stream.octets_in)))


def segments_of(stream: Stream) -> list[Segment]:
    """All segments that came on `stream` so far."""
    return [Segment.parse(fpdu.ulpdu) for fpdu in fpdus_of(stream)]


def terminate_of(message: Message) -> Terminate:
    return Terminate.parse(message.payload)


def spoilt(fpdu: bytes) -> bytes:
    """`fpdu` with a CRC that is wrong."""
    return fpdu[:-1] + bytes((fpdu[-1] ^ 1,))


def expect_good_crcs(stream: Stream) -> None:
    """Every FPDU that came has the CRC it should have (RFC 5044 4.4). Raises `Deviation`."""
    for fpdu in fpdus_of(stream):
        expect(fpdu.crc == fpdu.crc_due, f"the CRC {fpdu.crc_due.hex()}", fpdu.crc.hex())
