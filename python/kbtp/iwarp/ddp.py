"""DDP segments (RFC 5041 4): two headers, and how a message is cut.

    tagged    T=1 L Rsvd DV | RsvdULP(8) | STag(32) | TO(64) | payload
    untagged  T=0 L Rsvd DV | RsvdULP(8) | RsvdULP(32) | QN(32) | MSN(32) | MO(32) | payload

RsvdULP is RDMAP's: its control octet, and in untagged segments a 32-bit word, the Invalidate STag.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TypeAlias

from kbtp.errors import PeerMisbehaved
from kbtp.limits import DDP_TAGGED_HEADER_BYTES, DDP_UNTAGGED_HEADER_BYTES
from kbtp.types import Stag, TerminateCause

DDP_VERSION = 1
MESSAGE_MAX_BYTES = 0xFFFF_FFFF
TO_MASK = 0xFFFF_FFFF_FFFF_FFFF
MSN_MASK = 0xFFFF_FFFF

_TAGGED = 0x80
_LAST = 0x40
_VERSION_MASK = 0x03
_TAGGED_HEADER = struct.Struct(">BBIQ")
_UNTAGGED_HEADER = struct.Struct(">BBIIII")


@dataclass(frozen=True, slots=True)
class TaggedSegment:
    """A segment for a tagged buffer: an RDMA Write or a Read Response. `control` is RDMAP's octet."""

    control: int
    stag: Stag
    to: int
    last: bool
    payload: memoryview


@dataclass(frozen=True, slots=True)
class UntaggedSegment:
    """A segment for the next buffer of queue `qn`. `control` and `ulp_word` are RDMAP's."""

    control: int
    ulp_word: int
    qn: int
    msn: int
    mo: int
    last: bool
    payload: memoryview


Segment: TypeAlias = TaggedSegment | UntaggedSegment


def pack_tagged(control: int, stag: Stag, to: int, *, last: bool) -> bytes:
    """The 14-octet header. TO counts modulo 2^64, so that a message that wraps is the peer's to refuse."""
    return _TAGGED_HEADER.pack(_TAGGED | (_LAST if last else 0) | DDP_VERSION, control, stag, to & TO_MASK)


def pack_untagged(control: int, ulp_word: int, qn: int, msn: int, mo: int, *, last: bool) -> bytes:
    """The 18-octet header."""
    return _UNTAGGED_HEADER.pack((_LAST if last else 0) | DDP_VERSION, control, ulp_word, qn, msn, mo)


def header_bytes(ulpdu: memoryview | bytes) -> int:
    """How long the header of this segment is, by its T bit."""
    return DDP_TAGGED_HEADER_BYTES if ulpdu[0] & _TAGGED else DDP_UNTAGGED_HEADER_BYTES


def parse_segment(ulpdu: memoryview) -> Segment:
    """Raises PeerMisbehaved for a header that is not all there or another DDP version."""
    if not ulpdu or len(ulpdu) < header_bytes(ulpdu):
        # RFC 5041 6.2.2: fatal, without a code of its own.
        raise PeerMisbehaved(
            TerminateCause.DDP_LOCAL_CATASTROPHIC, f"a ULPDU of {len(ulpdu)} octets is shorter than its DDP header"
        )
    first = ulpdu[0]
    tagged, last, version = bool(first & _TAGGED), bool(first & _LAST), first & _VERSION_MASK
    if version != DDP_VERSION:
        cause = TerminateCause.DDP_TAGGED_INVALID_VERSION if tagged else TerminateCause.DDP_UNTAGGED_INVALID_VERSION
        raise PeerMisbehaved(cause, f"DDP version {version} came, {DDP_VERSION} is spoken")
    if tagged:
        _, control, stag, to = _TAGGED_HEADER.unpack_from(ulpdu)
        return TaggedSegment(control, stag, to, last, ulpdu[DDP_TAGGED_HEADER_BYTES:])
    _, control, ulp_word, qn, msn, mo = _UNTAGGED_HEADER.unpack_from(ulpdu)
    return UntaggedSegment(control, ulp_word, qn, msn, mo, last, ulpdu[DDP_UNTAGGED_HEADER_BYTES:])


def cut(
    message_bytes: int, segment_bytes: int, padded_max_bytes: int = MESSAGE_MAX_BYTES
) -> Iterator[tuple[int, int, bool]]:
    """(offset, size, last) of each segment of a message; one empty segment for an empty message (RFC 5041 5.2).

    A segment of more than `padded_max_bytes` is a multiple of 4 octets, so that its FPDU needs no PAD: the octets that
    are too many for that make up the next one.
    """
    offset, last = 0, False
    while not last:
        left = message_bytes - offset
        size = min(left, segment_bytes)
        if size > padded_max_bytes:
            size -= size % 4
        last = size == left
        yield offset, size, last
        offset += size
