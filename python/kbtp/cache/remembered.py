"""Records that this process has seen in the index: what they say is tried while the index is asked for it anew."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TypeAlias

from kbtp.cache.record import Record
from kbtp.limits import CACHE_REMEMBERED_MAX_BLOCKS

Known: TypeAlias = tuple[bytes, Record, int]
"""The octets of a record, what they say, and what it counts for: itself and the blocks of all copies."""

COUNT_OF_ONE_BLOCK = 2


class Remembered:
    """The last record under each name, of those used most recently; bounded by the blocks that all of them name."""

    def __init__(self, most_blocks: int = CACHE_REMEMBERED_MAX_BLOCKS) -> None:
        self._most_blocks = most_blocks
        self._blocks = 0
        self._records: dict[bytes, Known] = {}

    def get(self, name: bytes) -> Known | None:
        return self._records.get(name)

    def __contains__(self, name: bytes) -> bool:
        return name in self._records

    def has_any(self, names: Iterable[bytes]) -> bool:
        return not self._records.keys().isdisjoint(names)

    def keep(self, name: bytes, octets: bytes, record: Record) -> None:
        """It was there just now."""
        known = self._records.pop(name, None)
        if known is not None and known[0] == octets:
            self._records[name] = known
            return
        blocks = 1 + sum([len(copy.refs) for copy in record.copies])
        self._blocks -= 0 if known is None else known[2]
        if blocks > self._most_blocks:
            return
        self._records[name] = octets, record, blocks
        self._blocks += blocks
        self._forget_oldest()

    def keep_all(self, known: Mapping[bytes, Known]) -> None:
        """As `keep` of each, in order."""
        for name in self._records.keys() & known.keys():
            self.forget(name)
        self._records.update(known)
        self._blocks += sum([blocks for _, _, blocks in known.values()])
        self._forget_oldest()

    def _forget_oldest(self) -> None:
        while self._blocks > self._most_blocks:
            self.forget(next(iter(self._records)))

    def forget_all(self, names: Iterable[bytes]) -> None:
        for name in names:
            self.forget(name)

    def forget(self, name: bytes) -> None:
        known = self._records.pop(name, None)
        if known is not None:
            self._blocks -= known[2]
