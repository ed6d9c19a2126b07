"""Memory that LOADs are placing into: no two of them the same octets.

Loads of different handles complete in any order (profile 3), so two into one place would both be told
SUCCESS while the buffer holds either block, or some of both. The second one is refused instead.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Hashable, Sequence

from kbtp.errors import ApiMisuse
from kbtp.initiator.operations import Operation, Result
from kbtp.types import Opcode
from kbtp.verbs.buffers import buffer_of


class Destinations:
    """Address ranges, disjoint, each held by one operation, or by whatever else loads."""

    def __init__(self) -> None:
        self._starts: list[int] = []
        self._ends: list[int] = []
        self._start_of: dict[Hashable, int] = {}

    def claim(self, operation: Hashable, start: int, end: int) -> None:
        """Hold `start` up to `end` for `operation`. Raises `ApiMisuse` if another one holds any of it."""
        position = bisect_right(self._starts, start)
        before_reaches_in = position > 0 and self._ends[position - 1] > start
        next_begins_inside = position < len(self._starts) and self._starts[position] < end
        if before_reaches_in or next_begins_inside:
            raise ApiMisuse(
                "another load is placing a block in the same memory: give every load of a batch memory of its own, "
                "and wait for a load before its buffer is used again"
            )
        self._starts.insert(position, start)
        self._ends.insert(position, end)
        self._start_of[operation] = start

    def release(self, operation: Hashable) -> None:
        """Let go of what `operation` holds, if anything."""
        start = self._start_of.pop(operation, None)
        if start is not None:
            position = bisect_right(self._starts, start) - 1
            del self._starts[position], self._ends[position]


def refuse_overlaps(operations: Sequence[Operation]) -> None:
    """End every LOAD of a batch that shares memory with an earlier one of it, even if they would not meet in time."""
    held = Destinations()
    for operation in operations:
        if operation.opcode is not Opcode.LOAD or operation.result is not None or operation.is_empty:
            continue
        try:
            buffer = buffer_of(operation.buffer)
            held.claim(operation, buffer.address, buffer.address + len(buffer.view))
        except ApiMisuse as error:
            operation.finish(Result(None, operation.handle or 0, error=error))
