"""MPA framing in full operation (RFC 5044 3 to 6): one ULPDU in, one FPDU out, and back.

    [marker] ULPDU_Length(16) | ULPDU ... | PAD 0..3 | CRC(32)

A marker stands at every 512th octet of a half connection that asked for them, counted from its first octet, markers
included (RFC 5044 4.3). Everything is a multiple of 4 octets, so a marker never splits a length or a CRC field.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator, Sequence

from kbtp.errors import PeerMisbehaved
from kbtp.iwarp.crc32c import CRC_BYTES, wire_crc
from kbtp.limits import MPA_MARKER_BYTES, MPA_MARKER_SPACING_BYTES, MULPDU_MIN_BYTES, ULPDU_MAX_BYTES
from kbtp.types import TerminateCause

LENGTH_BYTES = 2
_LENGTH = struct.Struct(">H")
_MARKER = struct.Struct(">HH")
_POINTER_MASK = 0xFFFC  # the low 2 bits of FPDUPTR are not looked at (RFC 5044 4.2)
_NO_CRC = bytes(CRC_BYTES)
_PAD = (b"", bytes(1), bytes(2), bytes(3))
_BETWEEN_MARKERS_BYTES = MPA_MARKER_SPACING_BYTES - MPA_MARKER_BYTES


def mulpdu_for_emss(emss_bytes: int, *, markers: bool) -> int:
    """The largest ULPDU for which its FPDU fits a TCP segment of `emss_bytes` (RFC 5044 4.5), within 128..64768."""
    overhead_bytes = LENGTH_BYTES + CRC_BYTES + emss_bytes % 4
    if markers:
        overhead_bytes += MPA_MARKER_BYTES * -(-emss_bytes // MPA_MARKER_SPACING_BYTES)
    return max(MULPDU_MIN_BYTES, min(ULPDU_MAX_BYTES, emss_bytes - overhead_bytes))


def _pad_bytes(ulpdu_bytes: int) -> int:
    return -(LENGTH_BYTES + ulpdu_bytes) & 3


def runs(fpdus: Iterable[bytes]) -> Iterator[list[bytes]]:
    """`fpdus`, which are without markers, as each `sendmsg` may take them: one with PAD by itself."""
    run: list[bytes] = []
    for fpdu in fpdus:
        if not _pad_bytes(_LENGTH.unpack_from(fpdu)[0]):
            run.append(fpdu)
            continue
        if run:
            yield run
        yield [fpdu]
        run = []
    if run:
        yield run


class FpduEncoder:
    """One outgoing half connection."""

    def __init__(self, *, crc: bool, markers: bool) -> None:
        self._crc = crc
        self._markers = markers
        self._position = 0  # in the half connection, modulo the marker spacing

    def encode(self, pieces: Sequence[bytes | bytearray | memoryview]) -> bytes:
        """The FPDU of the ULPDU that `pieces` make up, 1 to 64768 octets.

        The pieces are copied first and the CRC is taken over the copy: memory that changes meanwhile can tear the
        payload but never makes the CRC wrong.
        """
        ulpdu_bytes = sum(map(len, pieces))
        body = b"".join((_LENGTH.pack(ulpdu_bytes), *pieces, _PAD[_pad_bytes(ulpdu_bytes)]))
        if self._markers:
            body = self._with_markers(body)
        return body + (wire_crc(body) if self._crc else _NO_CRC)

    def _with_markers(self, body: bytes) -> bytes:
        """`body` with the markers that fall before its octets, and the one between it and the CRC (RFC 5044 4.3)."""
        out = bytearray()
        from_length_field = 0  # octets from the first of ULPDU_Length to here, markers counted
        at = 0
        while True:
            if self._position == 0:
                out += _MARKER.pack(0, from_length_field)
                self._position = MPA_MARKER_BYTES
                from_length_field += MPA_MARKER_BYTES if at else 0
            if at == len(body):
                break
            run = min(len(body) - at, MPA_MARKER_SPACING_BYTES - self._position)
            out += body[at : at + run]
            at += run
            from_length_field += run
            self._position = (self._position + run) % MPA_MARKER_SPACING_BYTES
        self._position = (self._position + CRC_BYTES) % MPA_MARKER_SPACING_BYTES
        return bytes(out)


class FpduDecoder:
    """One incoming half connection.

    FPDUs that lie whole in what was received are read in place; only one that is still incomplete is kept, so each
    octet is copied at most once here and memory is bounded by one FPDU.
    """

    def __init__(self, *, crc: bool, markers: bool) -> None:
        self._crc = crc
        self._markers = markers
        self._position = 0  # of the next FPDU in the half connection, modulo the marker spacing
        self._partial = bytearray()

    @property
    def half_received(self) -> bool:
        """True if the octets so far end inside an FPDU."""
        return bool(self._partial)

    def receive(self, data: bytes | bytearray | memoryview) -> Iterator[memoryview]:
        """The ULPDUs that `data` completes, each valid until `data` or the iterator is let go.

        Raises PeerMisbehaved with MPA_CRC or MPA_MARKER_MISMATCH. Framing cannot be trusted from there on: the caller
        gives up this half connection (RFC 5044 8).
        """
        view = memoryview(data).cast("B")
        at = 0
        if self._partial:
            at = self._complete_partial(view)
            if len(self._partial) < (self._fpdu_bytes(self._partial, 0) or len(self._partial) + 1):
                return
            fpdu = memoryview(self._partial)
            self._partial = bytearray()
            yield self._ulpdu(fpdu)
        while size := self._fpdu_bytes(view, at):
            if at + size > len(view):
                break
            yield self._ulpdu(view[at : at + size])
            at += size
        self._partial += view[at:]

    def _complete_partial(self, view: memoryview) -> int:
        """Move octets from `view` to the incomplete FPDU until it is complete; how many were moved."""
        at = 0
        size = self._fpdu_bytes(self._partial, 0)
        if size is None:
            at = min(len(view), self._head_bytes() - len(self._partial))
            self._partial += view[:at]
            size = self._fpdu_bytes(self._partial, 0)
        if size is not None:
            more = min(len(view) - at, size - len(self._partial))
            self._partial += view[at : at + more]
            at += more
        return at

    def _lead_bytes(self) -> int:
        """Octets of the marker before the length field, if there is one."""
        return MPA_MARKER_BYTES if self._markers and self._position == 0 else 0

    def _head_bytes(self) -> int:
        return self._lead_bytes() + LENGTH_BYTES

    def _fpdu_bytes(self, octets: bytearray | memoryview, at: int) -> int | None:
        """Size on the wire of the FPDU at `at`, markers included; None while its length field is not there."""
        lead = self._lead_bytes()
        if len(octets) < at + lead + LENGTH_BYTES:
            return None
        ulpdu_bytes = _LENGTH.unpack_from(octets, at + lead)[0]
        size: int = LENGTH_BYTES + ulpdu_bytes + _pad_bytes(ulpdu_bytes) + CRC_BYTES
        if not self._markers:
            return size
        # The last word, the CRC, has no marker behind it: that one belongs to the next FPDU.
        before_marker = MPA_MARKER_SPACING_BYTES - (self._position + lead)
        inner_markers = max(0, -(-(size - before_marker) // _BETWEEN_MARKERS_BYTES))
        return lead + size + inner_markers * MPA_MARKER_BYTES

    def _ulpdu(self, fpdu: memoryview) -> memoryview:
        """Check one whole FPDU and cut its ULPDU out. CRC first: nothing of a bad FPDU is used (RFC 5044 8)."""
        if self._crc and wire_crc(fpdu[:-CRC_BYTES]) != fpdu[-CRC_BYTES:]:
            raise PeerMisbehaved(
                TerminateCause.MPA_CRC, f"the CRC of an FPDU of {len(fpdu)} octets does not match its content"
            )
        if self._markers:
            fpdu = self._without_markers(fpdu)
        ulpdu_bytes = _LENGTH.unpack_from(fpdu)[0]
        return fpdu[LENGTH_BYTES : LENGTH_BYTES + ulpdu_bytes]

    def _without_markers(self, fpdu: memoryview) -> memoryview:
        out = bytearray()
        from_length_field = 0
        at = 0
        while at < len(fpdu):
            if self._position == 0:
                pointer = _MARKER.unpack_from(fpdu, at)[1] & _POINTER_MASK
                if pointer != from_length_field:
                    raise PeerMisbehaved(
                        TerminateCause.MPA_MARKER_MISMATCH,
                        f"FPDUPTR {pointer} came, the length field is {from_length_field} octets back",
                    )
                self._position = MPA_MARKER_BYTES
                from_length_field += MPA_MARKER_BYTES if at else 0
                at += MPA_MARKER_BYTES
            run = min(len(fpdu) - at, MPA_MARKER_SPACING_BYTES - self._position)
            out += fpdu[at : at + run]
            at += run
            from_length_field += run
            self._position = (self._position + run) % MPA_MARKER_SPACING_BYTES
        return memoryview(out)
