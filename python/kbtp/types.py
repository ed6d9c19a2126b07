"""The registries of the protocol and the small types that every layer names.

Numbers come from profile section 1 (opcodes, flags, statuses, features, options) and from
RFC 5040 4.8, RFC 5041 7, RFC 5044 8 and RFC 6581 9 (Terminate codes). They stand here and nowhere else.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, IntEnum, IntFlag
from typing import TypeAlias

Handle: TypeAlias = int
"""64-bit name of a block table entry."""
Generation: TypeAlias = int
"""16-bit reuse counter of an entry; in requests zero means "any"."""
Ticket: TypeAlias = int
"""32-bit turn on a free-block ring."""
Stag: TypeAlias = int
"""32-bit steering tag."""
BlockOffset: TypeAlias = int
"""Address of a block under the Pool STag."""


class Opcode(IntEnum):
    """Profile 1: KBTP opcodes."""

    HELLO = 1
    HELLO_ACK = 2
    LOAD = 3
    STORE = 4
    ALLOC_STORE = 5
    FREE = 6
    BIND = 7
    COMPLETION = 8


class RequestFlag(IntFlag):
    """Draft 5.1: flags of LOAD, STORE, ALLOC_STORE, FREE and BIND."""

    NONE = 0
    INLINE = 0x0001
    SEAL = 0x0002
    RECORD = 0x0004
    INVALIDATE = 0x0008
    ALLOW_UNSEALED = 0x0010


class HelloAckFlag(IntFlag):
    """Profile 1: flags of HELLO_ACK."""

    NONE = 0
    RESUMED = 0x0001


class Status(IntEnum):
    """Profile 1: status codes of completions and HELLO_ACK."""

    SUCCESS = 0
    NOT_BOUND = 1
    NOT_SEALED = 2
    SEALED = 3
    ALREADY_BOUND = 4
    GENERATION_MISMATCH = 5
    HANDLE_OUT_OF_RANGE = 6
    LENGTH_ERROR = 7
    NO_SPACE = 8
    TICKET_ABANDONED = 9
    TICKET_MISMATCH = 10
    MALFORMED = 11
    UNSUPPORTED = 12
    ACCESS_DENIED = 13
    NO_SESSION = 14
    TARGET_ERROR = 15


class Feature(IntFlag):
    """Profile 1: features that HELLO asks for and HELLO_ACK grants."""

    NONE = 0
    RECORD_COMPLETION = 0x01
    DIRECT_LOAD = 0x02
    DIRECT_ALLOC = 0x04
    MASKED_ATOMICS = 0x08
    INVALIDATE = 0x10


DIRECT_MODES = Feature.DIRECT_LOAD | Feature.DIRECT_ALLOC
"""Draft 6.6: the direct modes there are."""


class OptionType(IntEnum):
    """Profile 2: option types of HELLO and HELLO_ACK."""

    NAME = 1
    NAMESPACE = 2
    AUTH = 3


class EntryFlag(IntFlag):
    """Draft 3.2: flags of a block table entry."""

    NONE = 0
    VALID = 0x0001
    SEALED = 0x0002


class TerminateCause(Enum):
    """Why a stream is ended, as (layer, error type, error code) of the Terminate message.

    Layers: 0 RDMAP (RFC 5040 4.8), 1 DDP (RFC 5041 7), 2 LLP (RFC 5044 8, RFC 6581 9).
    """

    LOCAL_CATASTROPHIC = (0, 0, 0x00)
    RDMAP_INVALID_STAG = (0, 1, 0x00)
    RDMAP_BASE_OR_BOUNDS = (0, 1, 0x01)
    RDMAP_ACCESS_RIGHTS = (0, 1, 0x02)
    RDMAP_STAG_NOT_ASSOCIATED = (0, 1, 0x03)
    RDMAP_TO_WRAP = (0, 1, 0x04)
    RDMAP_CANNOT_INVALIDATE = (0, 1, 0x09)
    RDMAP_INVALID_VERSION = (0, 2, 0x05)
    RDMAP_UNEXPECTED_OPCODE = (0, 2, 0x06)
    RDMAP_CATASTROPHIC_STREAM = (0, 2, 0x07)
    RDMAP_UNSPECIFIED = (0, 2, 0xFF)
    DDP_LOCAL_CATASTROPHIC = (1, 0, 0x00)
    DDP_INVALID_STAG = (1, 1, 0x00)
    DDP_BASE_OR_BOUNDS = (1, 1, 0x01)
    DDP_STAG_NOT_ASSOCIATED = (1, 1, 0x02)
    DDP_TO_WRAP = (1, 1, 0x03)
    DDP_TAGGED_INVALID_VERSION = (1, 1, 0x04)
    DDP_INVALID_QN = (1, 2, 0x01)
    DDP_NO_BUFFER = (1, 2, 0x02)
    DDP_MSN_OUT_OF_RANGE = (1, 2, 0x03)
    DDP_INVALID_MO = (1, 2, 0x04)
    DDP_MESSAGE_TOO_LONG = (1, 2, 0x05)
    DDP_UNTAGGED_INVALID_VERSION = (1, 2, 0x06)
    MPA_CRC = (2, 0, 0x02)
    MPA_MARKER_MISMATCH = (2, 0, 0x03)
    MPA_LOCAL_CATASTROPHIC = (2, 0, 0x05)
    MPA_INSUFFICIENT_IRD = (2, 0, 0x06)
    MPA_NO_MATCHING_RTR = (2, 0, 0x07)

    @property
    def layer(self) -> int:
        return self.value[0]

    @property
    def etype(self) -> int:
        return self.value[1]

    @property
    def code(self) -> int:
        return self.value[2]

    def __str__(self) -> str:
        return f"{self.name} ({self.layer}/{self.etype}/{self.code:02x})"


@dataclass(frozen=True, slots=True)
class TerminateInfo:
    """What a received Terminate said, decoded by its bits (RFC 5040 4.8).

    `layer`, `etype` and `code` are raw because a peer may send values this stack does not know.
    """

    layer: int
    etype: int
    code: int
    ddp_segment_length: int | None = None
    ddp_header: bytes = b""
    rdmap_header: bytes = b""

    def __str__(self) -> str:
        known = {cause.value: cause.name for cause in TerminateCause}
        name = known.get((self.layer, self.etype, self.code), "unknown code")
        return f"{name} ({self.layer}/{self.etype}/{self.code:02x})"


@dataclass(frozen=True, slots=True)
class BlockRef:
    """Names one stored block: what one process stores, another loads by.

    `generation` is the binding's: once the block is freed, the reference is refused and never
    served from whatever the handle is bound to next. Plain values, so it travels as JSON or in a message.
    """

    handle: Handle
    generation: Generation
    length_bytes: int
