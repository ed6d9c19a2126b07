"""Which handles belong to which initiator (profile 3, "Handle ranges are disjoint")."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass

from kbtp.atomics import MASK64
from kbtp.errors import ApiMisuse
from kbtp.types import Handle


@dataclass(frozen=True, slots=True)
class HandleRange:
    """`count` handles from `first` on, modulo 2^64."""

    first: Handle
    count: int

    def contains(self, handle: Handle) -> bool:
        """Profile's range test: `handle - first < count`, unsigned."""
        return (handle - self.first) & MASK64 < self.count

    def __iter__(self) -> Iterator[Handle]:
        return ((self.first + i) & MASK64 for i in range(self.count))


class HandleRanges:
    """Divides the table's handles into disjoint ranges.

    First fit; the gaps that ranges leave behind grow together again. Positions, not handles, are kept inside, so that a
    table whose handles pass 2^64 needs no case of its own.
    """

    def __init__(self, base_handle: Handle, handle_count: int) -> None:
        if not 0 <= base_handle <= MASK64:
            raise ApiMisuse(f"base handle {base_handle}: 64 bits expected")
        if not 1 <= handle_count <= MASK64:
            raise ApiMisuse(f"handle count {handle_count}: 1 to 2^64 - 1 expected")
        self.base_handle = base_handle
        self.handle_count = handle_count
        self._gaps: list[tuple[int, int]] = [(0, handle_count)]  # (position, count), ascending, never adjacent
        self._assigned: list[tuple[int, int]] = []  # (position, count), ascending

    @property
    def free_count(self) -> int:
        """Handles in no range."""
        return sum(count for _, count in self._gaps)

    @property
    def longest_gap(self) -> int:
        """Handles side by side in no range, at most."""
        return max((count for _, count in self._gaps), default=0)

    def assign(self, wanted: int) -> HandleRange | None:
        """A range of `wanted` handles or, if no gap is that long, of the longest there is (profile 8.4).

        None when every handle is assigned. Raises `ApiMisuse` unless `wanted` is at least 1.
        """
        if wanted < 1:
            raise ApiMisuse(f"{wanted} handles wanted: at least 1 expected")
        if not self._gaps:
            return None
        fitting = (i for i, (_, count) in enumerate(self._gaps) if count >= wanted)
        longest = max(range(len(self._gaps)), key=lambda i: self._gaps[i][1])
        chosen = next(fitting, longest)
        position, gap_count = self._gaps[chosen]
        count = min(wanted, gap_count)
        self._gaps[chosen : chosen + 1] = [(position + count, gap_count - count)] if count < gap_count else []
        self._assigned.insert(bisect_right(self._assigned, (position, 0)), (position, count))
        return HandleRange((self.base_handle + position) & MASK64, count)

    def range_of(self, handle: Handle) -> HandleRange | None:
        """The assigned range that holds `handle`, if one does (profile 1, HANDLE_OUT_OF_RANGE of a LOAD)."""
        position = (handle - self.base_handle) & MASK64
        i = bisect_right(self._assigned, (position, MASK64)) - 1
        if i < 0:
            return None
        first, count = self._assigned[i]
        if position - first >= count:
            return None
        return HandleRange((self.base_handle + first) & MASK64, count)

    def release(self, handle_range: HandleRange) -> None:
        """Give back a range that `assign` returned. Raises `ApiMisuse` for anything else."""
        position = (handle_range.first - self.base_handle) & MASK64
        count = handle_range.count
        i = bisect_right(self._assigned, (position, 0))
        if self._assigned[i : i + 1] != [(position, count)]:
            raise ApiMisuse(f"{handle_range} is not assigned")
        del self._assigned[i]
        after = bisect_right(self._gaps, (position, 0))
        before = after - 1
        end = after
        if before >= 0 and sum(self._gaps[before]) == position:
            position, count, after = self._gaps[before][0], count + self._gaps[before][1], before
        if end < len(self._gaps) and position + count == self._gaps[end][0]:
            count += self._gaps[end][1]
            end += 1
        self._gaps[after:end] = [(position, count)]
