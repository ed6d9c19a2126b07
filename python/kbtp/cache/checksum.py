"""CRC32c of a value in pieces."""

from __future__ import annotations

from collections.abc import Iterable

import crc32c


def checksum(pieces: Iterable[memoryview]) -> int:
    value = 0
    for piece in pieces:
        value = crc32c.crc32c(piece, value)
    return value
