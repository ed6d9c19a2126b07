"""The Terminate message (RFC 5040 4.8): which headers it quotes, its octets, and what came in one."""

from __future__ import annotations

import struct
from dataclasses import dataclass

from kbtp.errors import PeerMisbehaved
from kbtp.iwarp.ddp import header_bytes
from kbtp.limits import READ_REQUEST_BYTES
from kbtp.types import TerminateCause, TerminateInfo

LAYER_RDMAP, LAYER_DDP, LAYER_LLP = 0, 1, 2
_LOCAL_CATASTROPHIC = 0
_REMOTE_PROTECTION = 1

_CONTROL = struct.Struct(">BBH")
_LENGTH = struct.Struct(">H")
_M, _D, _R = 0x8000, 0x4000, 0x2000


@dataclass(frozen=True, slots=True)
class Offender:
    """The segment that a Terminate is about: its whole length and its DDP header.

    `read_request` is the 28-octet header of a Read Request, advanced by what was sent, if one is to blame.
    """

    segment_bytes: int
    ddp_header: bytes
    read_request: bytes = b""

    @classmethod
    def of(cls, ulpdu: memoryview | bytes, read_request: bytes = b"") -> Offender | None:
        """None if not even the DDP header is there to be quoted."""
        if not ulpdu or len(ulpdu) < header_bytes(ulpdu):
            return None
        return cls(len(ulpdu), bytes(ulpdu[: header_bytes(ulpdu)]), read_request)


def pack_terminate(cause: TerminateCause, offender: Offender | None) -> bytes:
    """The payload of the Terminate for `cause`.

    RFC 5040 4.8 figure 10: errors of the LLP and local catastrophic ones of RDMAP quote nothing; the others quote
    length and DDP header; a Read Request is quoted as well if a remote protection error is its fault.
    """
    quotes = cause.layer == LAYER_DDP or (cause.layer == LAYER_RDMAP and cause.etype != _LOCAL_CATASTROPHIC)
    if offender is None or not quotes:
        return _CONTROL.pack(cause.layer << 4 | cause.etype, cause.code, 0)
    read_request = b""
    if cause.layer == LAYER_RDMAP and cause.etype == _REMOTE_PROTECTION:
        read_request = offender.read_request
    bits = _M | _D | (_R if read_request else 0)
    return b"".join(
        (
            _CONTROL.pack(cause.layer << 4 | cause.etype, cause.code, bits),
            _LENGTH.pack(offender.segment_bytes),
            offender.ddp_header,
            read_request,
        )
    )


def parse_terminate(payload: memoryview | bytes) -> TerminateInfo:
    """What a received Terminate says, by its M, D and R bits; reserved bits and further octets are ignored.

    A header that is announced but not all there is left out. Raises PeerMisbehaved if even the control field is not.
    """
    if len(payload) < _CONTROL.size:
        raise PeerMisbehaved(
            TerminateCause.RDMAP_UNSPECIFIED, f"a Terminate of {len(payload)} octets is shorter than its control field"
        )
    layer_and_type, code, bits = _CONTROL.unpack_from(payload)
    layer, etype = layer_and_type >> 4, layer_and_type & 0xF
    rest = bytes(payload[_CONTROL.size :])
    segment_bytes: int | None = None
    ddp_header = read_request = b""
    if bits & (_M | _D) and len(rest) >= _LENGTH.size:
        length = _LENGTH.unpack_from(rest)[0]
        segment_bytes = length if bits & _M else None
        rest = rest[_LENGTH.size :]
        if bits & _D and rest and len(rest) >= header_bytes(rest):
            ddp_header, rest = rest[: header_bytes(rest)], rest[header_bytes(rest) :]
            if bits & _R and len(rest) >= READ_REQUEST_BYTES:
                read_request = rest[:READ_REQUEST_BYTES]
    return TerminateInfo(layer, etype, code, segment_bytes, ddp_header, read_request)
