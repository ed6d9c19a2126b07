"""RDMAP messages (RFC 5040 4, RFC 7306 5 and 6): opcodes, where each travels, and the headers of fixed size."""

from __future__ import annotations

import struct
from dataclasses import dataclass, replace
from enum import IntEnum

from kbtp.errors import PeerMisbehaved
from kbtp.iwarp.ddp import TO_MASK, Segment, TaggedSegment
from kbtp.limits import ATOMIC_REQUEST_BYTES, ATOMIC_RESPONSE_BYTES, IMMEDIATE_DATA_BYTES, READ_REQUEST_BYTES
from kbtp.types import Stag, TerminateCause

RDMAP_VERSION = 1
QN_SEND = 0
QN_REQUEST = 1  # Read and Atomic Requests
QN_TERMINATE = 2
QN_ATOMIC_RESPONSE = 3
COMPARE_MASK_UNUSED = 0xFFFF_FFFF_FFFF_FFFF  # what FetchAdd sends there (RFC 7306 5.2.1)

_CONTROL_VERSION = RDMAP_VERSION << 6
_READ_REQUEST = struct.Struct(">IQIIQ")
_ATOMIC_REQUEST = struct.Struct(">IIIQQQQQ")
_ATOMIC_RESPONSE = struct.Struct(">IQ")
_AOPCODE_MASK = 0xF  # the 28 bits before it are reserved and not looked at


class RdmapOpcode(IntEnum):
    """RFC 5040 4.1 and RFC 7306 4.1."""

    WRITE = 0x0
    READ_REQUEST = 0x1
    READ_RESPONSE = 0x2
    SEND = 0x3
    SEND_INVALIDATE = 0x4
    SEND_SOLICITED = 0x5
    SEND_SOLICITED_INVALIDATE = 0x6
    TERMINATE = 0x7
    IMMEDIATE = 0x8
    IMMEDIATE_SOLICITED = 0x9
    ATOMIC_REQUEST = 0xA
    ATOMIC_RESPONSE = 0xB


SOLICITED = frozenset(
    {RdmapOpcode.SEND_SOLICITED, RdmapOpcode.SEND_SOLICITED_INVALIDATE, RdmapOpcode.IMMEDIATE_SOLICITED}
)
INVALIDATING = frozenset({RdmapOpcode.SEND_INVALIDATE, RdmapOpcode.SEND_SOLICITED_INVALIDATE})

QUEUE_OF: dict[RdmapOpcode, int | None] = {
    RdmapOpcode.WRITE: None,  # tagged
    RdmapOpcode.READ_RESPONSE: None,
    RdmapOpcode.READ_REQUEST: QN_REQUEST,
    RdmapOpcode.ATOMIC_REQUEST: QN_REQUEST,
    RdmapOpcode.TERMINATE: QN_TERMINATE,
    RdmapOpcode.ATOMIC_RESPONSE: QN_ATOMIC_RESPONSE,
    RdmapOpcode.SEND: QN_SEND,
    RdmapOpcode.SEND_INVALIDATE: QN_SEND,
    RdmapOpcode.SEND_SOLICITED: QN_SEND,
    RdmapOpcode.SEND_SOLICITED_INVALIDATE: QN_SEND,
    RdmapOpcode.IMMEDIATE: QN_SEND,
    RdmapOpcode.IMMEDIATE_SOLICITED: QN_SEND,
}

FIXED_BYTES: dict[RdmapOpcode, int] = {
    RdmapOpcode.READ_REQUEST: READ_REQUEST_BYTES,
    RdmapOpcode.ATOMIC_REQUEST: ATOMIC_REQUEST_BYTES,
    RdmapOpcode.ATOMIC_RESPONSE: ATOMIC_RESPONSE_BYTES,
    RdmapOpcode.IMMEDIATE: IMMEDIATE_DATA_BYTES,
    RdmapOpcode.IMMEDIATE_SOLICITED: IMMEDIATE_DATA_BYTES,
}
"""Messages of one size: they fit any segment, so they are one segment."""


class AtomicOperation(IntEnum):
    """RFC 7306 5.2.1 AOpCodes; 1 is reserved, there is no unconditional swap."""

    FETCH_ADD = 0
    COMPARE_SWAP = 2


def control_octet(opcode: RdmapOpcode) -> int:
    return _CONTROL_VERSION | opcode


def send_opcode(*, invalidate: bool, solicited: bool) -> RdmapOpcode:
    if invalidate:
        return RdmapOpcode.SEND_SOLICITED_INVALIDATE if solicited else RdmapOpcode.SEND_INVALIDATE
    return RdmapOpcode.SEND_SOLICITED if solicited else RdmapOpcode.SEND


def opcode_of(segment: Segment) -> RdmapOpcode:
    """The opcode of a segment whose version, T bit and queue fit it; raises PeerMisbehaved otherwise."""
    version = segment.control >> 6
    if version != RDMAP_VERSION:
        raise PeerMisbehaved(
            TerminateCause.RDMAP_INVALID_VERSION, f"RDMAP version {version} came, {RDMAP_VERSION} is spoken"
        )
    try:
        opcode = RdmapOpcode(segment.control & 0xF)
    except ValueError:
        raise PeerMisbehaved(
            TerminateCause.RDMAP_UNEXPECTED_OPCODE, f"RDMAP opcode {segment.control & 0xF:#x} is not known"
        ) from None
    queue = QUEUE_OF[opcode]
    tagged = isinstance(segment, TaggedSegment)
    if tagged != (queue is None):
        raise PeerMisbehaved(
            TerminateCause.RDMAP_UNEXPECTED_OPCODE,
            f"{opcode.name} came with T={int(tagged)}, which never fits it",
        )
    if not isinstance(segment, TaggedSegment) and segment.qn != queue:
        raise PeerMisbehaved(
            TerminateCause.DDP_INVALID_QN, f"{opcode.name} came on queue {segment.qn}, it belongs on {queue}"
        )
    return opcode


@dataclass(frozen=True, slots=True)
class ReadRequest:
    """RFC 5040 4.4: sink first, the size between sink and source."""

    sink_stag: Stag
    sink_to: int
    size: int
    source_stag: Stag
    source_to: int

    def pack(self) -> bytes:
        return _READ_REQUEST.pack(self.sink_stag, self.sink_to, self.size, self.source_stag, self.source_to)

    @classmethod
    def parse(cls, payload: memoryview | bytes) -> ReadRequest:
        """`payload` has exactly 28 octets."""
        return cls(*_READ_REQUEST.unpack(payload))

    def advanced(self, sent_bytes: int) -> ReadRequest:
        """What is left after `sent_bytes` of the response; a Terminate quotes it so (RFC 5040 4.8)."""
        return replace(
            self,
            sink_to=(self.sink_to + sent_bytes) & TO_MASK,
            size=self.size - sent_bytes,
            source_to=(self.source_to + sent_bytes) & TO_MASK,
        )


@dataclass(frozen=True, slots=True)
class AtomicRequest:
    """RFC 7306 5.2.1. `data` and `mask` are Add Data and Add Mask, or Swap Data and Swap Mask."""

    operation: AtomicOperation
    request_id: int
    stag: Stag
    to: int
    data: int
    mask: int
    compare_data: int = 0
    compare_mask: int = COMPARE_MASK_UNUSED

    def pack(self) -> bytes:
        return _ATOMIC_REQUEST.pack(
            self.operation,
            self.request_id,
            self.stag,
            self.to,
            self.data,
            self.mask,
            self.compare_data,
            self.compare_mask,
        )

    @classmethod
    def parse(cls, payload: memoryview | bytes) -> AtomicRequest:
        """`payload` has exactly 52 octets. Raises PeerMisbehaved for an AOpCode that names no operation."""
        first, *rest = _ATOMIC_REQUEST.unpack(payload)
        try:
            operation = AtomicOperation(first & _AOPCODE_MASK)
        except ValueError:
            raise PeerMisbehaved(
                TerminateCause.RDMAP_UNEXPECTED_OPCODE, f"AOpCode {first & _AOPCODE_MASK} names no atomic operation"
            ) from None
        return cls(operation, *rest)


@dataclass(frozen=True, slots=True)
class AtomicResponse:
    """RFC 7306 5.2.2: the request's identifier and the value before the operation."""

    request_id: int
    value: int

    def pack(self) -> bytes:
        return _ATOMIC_RESPONSE.pack(self.request_id, self.value)

    @classmethod
    def parse(cls, payload: memoryview | bytes) -> AtomicResponse:
        """`payload` has exactly 12 octets."""
        return cls(*_ATOMIC_RESPONSE.unpack(payload))
