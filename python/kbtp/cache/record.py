"""What the index holds under a name: which blocks a value is made of. Octets in, octets out.

| octets | field |
|---|---|
| 1 | version |
| 1 | number of copies |
| 16 | owner: Initiator ID of the writer |
| 8 | length of the value |
| 4 | CRC32c of the value |
| 4 | octets of each of its blocks but the last |
| | for each copy: 8 incarnation of the target, then for each block 8 handle and 2 generation |
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from kbtp.limits import BLOCK_SIZE_MAX_BYTES, CACHE_COPIES_MAX, CACHE_RECORD_MAX_BLOCKS, INITIATOR_ID_BYTES
from kbtp.types import BlockRef

_VERSION = 1
_HEAD = struct.Struct(f">BB{INITIATOR_ID_BYTES}sQII")
_INCARNATION = struct.Struct(">Q")
_BLOCK = struct.Struct(">QH")
_SMALL = struct.Struct(f"{_HEAD.format}QQH")
"""A record with one copy of one block."""


class BadRecord(ValueError):
    """Octets that are not a record this version can read."""


class Copy(NamedTuple):
    """The blocks of a value on one target, in order."""

    incarnation: int
    refs: tuple[BlockRef, ...]


class Record(NamedTuple):
    """A value whose blocks are all sealed."""

    owner: bytes
    length_bytes: int
    checksum: int
    block_bytes: int
    copies: tuple[Copy, ...]

    @property
    def block_count(self) -> int:
        """Of each copy."""
        return -(-self.length_bytes // self.block_bytes)

    def pack(self) -> bytes:
        owner, length_bytes, checksum, block_bytes, copies = self
        if len(copies) == 1 and len(copies[0].refs) == 1:  # as most are
            incarnation, (ref,) = copies[0]
            return _SMALL.pack(
                _VERSION, 1, owner, length_bytes, checksum, block_bytes, incarnation, ref.handle, ref.generation
            )
        parts = [_HEAD.pack(_VERSION, len(copies), owner, length_bytes, checksum, block_bytes)]
        for incarnation, refs in copies:
            parts.append(_INCARNATION.pack(incarnation))
            parts += [_BLOCK.pack(ref.handle, ref.generation) for ref in refs]
        return b"".join(parts)

    @classmethod
    def parse(cls, octets: bytes) -> Record:
        """Raises `BadRecord`."""
        if len(octets) < _HEAD.size:
            raise BadRecord(f"record of {len(octets)} octets")
        version, copy_count, owner, length_bytes, checksum, block_bytes = _HEAD.unpack_from(octets)
        if version != _VERSION:
            raise BadRecord(f"record version {version}; this is {_VERSION}")
        if not 1 <= block_bytes <= BLOCK_SIZE_MAX_BYTES or copy_count > CACHE_COPIES_MAX:
            raise BadRecord(f"{copy_count} copies in blocks of {block_bytes} octets")
        lengths = block_lengths(length_bytes, block_bytes)
        copy_bytes = _INCARNATION.size + len(lengths) * _BLOCK.size
        if len(octets) != _HEAD.size + copy_count * copy_bytes or bool(copy_count) != bool(lengths):
            raise BadRecord(f"record of {len(octets)} octets for {copy_count} copies of {len(lengths)} blocks")
        if copy_count == len(lengths) == 1:  # as most are
            incarnation, handle, generation = _SMALL.unpack(octets)[6:]
            copy = Copy(incarnation, (BlockRef(handle, generation, length_bytes),))
            return cls(owner, length_bytes, checksum, block_bytes, (copy,))
        copies = []
        for at in range(_HEAD.size, len(octets), copy_bytes):
            (incarnation,) = _INCARNATION.unpack_from(octets, at)
            blocks = _BLOCK.iter_unpack(octets[at + _INCARNATION.size : at + copy_bytes])
            refs = [BlockRef(handle, gen, length) for (handle, gen), length in zip(blocks, lengths, strict=True)]
            copies.append(Copy(incarnation, tuple(refs)))
        return cls(owner, length_bytes, checksum, block_bytes, tuple(copies))


def pack_small(
    owner: bytes, block_bytes: int, incarnation: int, lengths_bytes: Sequence[int], rows: Iterable[Sequence[int]]
) -> list[bytes]:
    """Of values of one block each on one target: `rows` are as `Results.rows`."""
    pack = _SMALL.pack
    return [
        pack(_VERSION, 1, owner, length_bytes, checksum, block_bytes, incarnation, handle, generation)
        for length_bytes, (_, generation, _, handle, _, checksum) in zip(lengths_bytes, rows, strict=True)
    ]


def block_lengths(length_bytes: int, block_bytes: int) -> list[int]:
    """How a value is cut; none for one of no octets. Raises `BadRecord` for more than any pool has."""
    full, rest = divmod(length_bytes, block_bytes)
    if full >= CACHE_RECORD_MAX_BLOCKS:
        raise BadRecord(f"value of {length_bytes} octets in blocks of {block_bytes}")
    return [block_bytes] * full + ([rest] if rest else [])
