"""CRC32c of values: of their blocks as the RNIC has taken it while it moved them, or of the octets themselves."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from kbtp.initiator.batches import Results
from kbtp.rnic import joined_checksum
from kbtp.verbs.requester import NO_CHECKSUM


class BlockChecksums:
    """Those that the results of a batch have."""

    __slots__ = ("_checksums", "lengths")

    def __init__(self, results: Results) -> None:
        rows = results.rows
        self._checksums = [row[5] for row in rows]
        self.lengths = [row[2] for row in rows]

    def of_value(self, at: int, end: int) -> int | None:
        """That of the value whose blocks have the results from `at` to `end`; None if one of theirs is not known."""
        known = self._checksums[at:end]
        if NO_CHECKSUM in known:
            return None
        if len(known) == 1:
            return known[0]
        value = 0
        for block, length_bytes in zip(known, self.lengths[at:end], strict=True):
            value = joined_checksum(value, block, length_bytes)
        return value


def checksum(pieces: Iterable[memoryview]) -> int:
    import crc32c  # here: who imports `kbtp` for a session over the native RNIC can do without it

    value = 0
    for piece in pieces:
        value = crc32c.crc32c(piece, value)
    return value


def checksums(values: Iterable[Sequence[memoryview]]) -> list[int]:
    return [checksum(pieces) for pieces in values]
