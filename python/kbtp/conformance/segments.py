"""ULPDUs by hand: any field can be wrong. What is not given is what a conforming sender writes."""

from __future__ import annotations

import struct

from kbtp.iwarp.ddp import DDP_VERSION, MSN_MASK, TO_MASK
from kbtp.iwarp.rdmap import (
    QN_ATOMIC_RESPONSE,
    QN_REQUEST,
    QN_SEND,
    QN_TERMINATE,
    RDMAP_VERSION,
    AtomicRequest,
    AtomicResponse,
    RdmapOpcode,
    ReadRequest,
)

_UNTAGGED = struct.Struct(">BBIIII")
_TAGGED = struct.Struct(">BBIQ")
_LENGTH = struct.Struct(">H")
T_BIT, L_BIT = 0x80, 0x40

QN_OF = {
    RdmapOpcode.READ_REQUEST: QN_REQUEST,
    RdmapOpcode.ATOMIC_REQUEST: QN_REQUEST,
    RdmapOpcode.TERMINATE: QN_TERMINATE,
    RdmapOpcode.ATOMIC_RESPONSE: QN_ATOMIC_RESPONSE,
}


def ddp_control(*, tagged: bool, last: bool, version: int = DDP_VERSION, reserved: int = 0) -> int:
    """The first octet of a segment; `reserved` are its 4 Rsvd bits (RFC 5041 4.1)."""
    return (T_BIT if tagged else 0) | (L_BIT if last else 0) | reserved << 2 | version


def rdmap_control(opcode: int, *, version: int = RDMAP_VERSION, reserved: int = 0) -> int:
    """The second octet; `reserved` are its 2 Rsvd bits (RFC 5040 4.1)."""
    return version << 6 | reserved << 4 | opcode


def untagged(
    opcode: int, msn: int, payload: bytes = b"", *, qn: int | None = None, mo: int = 0, last: bool = True,
    ulp_word: int = 0, ddp_version: int = DDP_VERSION, ddp_reserved: int = 0, rdmap_version: int = RDMAP_VERSION,
    rdmap_reserved: int = 0,
) -> bytes:  # fmt: skip
    """RFC 5041 4.3: 18 octets and the payload. `qn` defaults to the queue the opcode belongs on."""
    if qn is None:
        qn = QN_OF.get(RdmapOpcode(opcode), QN_SEND) if opcode in set(RdmapOpcode) else QN_SEND
    header = _UNTAGGED.pack(
        ddp_control(tagged=False, last=last, version=ddp_version, reserved=ddp_reserved),
        rdmap_control(opcode, version=rdmap_version, reserved=rdmap_reserved),
        ulp_word,
        qn,
        msn & MSN_MASK,
        mo,
    )
    return header + payload


def tagged(
    opcode: int, stag: int, to: int, payload: bytes = b"", *, last: bool = True, ddp_version: int = DDP_VERSION,
    ddp_reserved: int = 0, rdmap_version: int = RDMAP_VERSION, rdmap_reserved: int = 0,
) -> bytes:  # fmt: skip
    """RFC 5041 4.2: 14 octets and the payload."""
    header = _TAGGED.pack(
        ddp_control(tagged=True, last=last, version=ddp_version, reserved=ddp_reserved),
        rdmap_control(opcode, version=rdmap_version, reserved=rdmap_reserved),
        stag,
        to & TO_MASK,
    )
    return header + payload


def send(msn: int, payload: bytes = b"", *, mo: int = 0, last: bool = True) -> bytes:
    return untagged(RdmapOpcode.SEND, msn, payload, mo=mo, last=last)


def write(stag: int, to: int, payload: bytes = b"", *, last: bool = True) -> bytes:
    return tagged(RdmapOpcode.WRITE, stag, to, payload, last=last)


def read_response(stag: int, to: int, payload: bytes = b"", *, last: bool = True) -> bytes:
    return tagged(RdmapOpcode.READ_RESPONSE, stag, to, payload, last=last)


def read_request(msn: int, request: ReadRequest) -> bytes:
    return untagged(RdmapOpcode.READ_REQUEST, msn, request.pack())


def atomic_request(msn: int, request: AtomicRequest) -> bytes:
    return untagged(RdmapOpcode.ATOMIC_REQUEST, msn, request.pack())


def atomic_response(msn: int, response: AtomicResponse) -> bytes:
    return untagged(RdmapOpcode.ATOMIC_RESPONSE, msn, response.pack())


def terminate(layer: int, etype: int, code: int, *, msn: int = 1, rest: bytes = b"", bits: int = 0) -> bytes:
    """RFC 5040 4.8; `bits` are the M, D, R and reserved ones, `rest` what follows the control field."""
    return untagged(RdmapOpcode.TERMINATE, msn, struct.pack(">BBH", layer << 4 | etype, code, bits) + rest)


def bare_fpdu(ulpdu: bytes, crc: bytes, *, pad: bytes | None = None, length: int | None = None) -> bytes:
    """An FPDU without markers in which length, padding and CRC may be anything (RFC 5044 4.1)."""
    size = len(ulpdu) if length is None else length
    return _LENGTH.pack(size) + ulpdu + (bytes(-(2 + len(ulpdu)) & 3) if pad is None else pad) + crc
