"""CRC32c of a value in pieces, and how much of a batch is loaded before its checksums are begun."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from kbtp.limits import CACHE_LOAD_CHUNK_BYTES
from kbtp.types import BlockRef

Value = tuple[Sequence[BlockRef], Sequence[memoryview]]


def checksum(pieces: Iterable[memoryview]) -> int:
    import crc32c  # here: who imports `kbtp` for a session over the native RNIC can do without it

    value = 0
    for piece in pieces:
        value = crc32c.crc32c(piece, value)
    return value


def checksums(values: Iterable[Value]) -> list[int]:
    return [checksum(pieces) for _, pieces in values]


def chunks(values: Sequence[Value]) -> Iterator[Sequence[Value]]:
    """Values to load together: while the next ones come in, the checksums of these are taken."""
    first, octets = 0, 0
    for place, (_, pieces) in enumerate(values):
        octets += sum(map(len, pieces))
        if octets >= CACHE_LOAD_CHUNK_BYTES:
            yield values[first : place + 1]
            first, octets = place + 1, 0
    if first < len(values):
        yield values[first:]
