"""What an initiator does while it is measured, against anything that stores blocks and gives them back.

Only the calls themselves are timed, not the drawing of blocks nor the making of lists that a caller has at hand. Every
block is stamped with its number before it is stored; what comes back must bear the right stamp, and now and then all
octets are compared. A call's destination is spoilt afterwards, so that a call that places nothing is found out.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Protocol, TypeAlias

import numpy as np
import numpy.typing as npt

from kbtp.testing.bench.figures import ALLOC, ALLOC_ALONE, LOAD, STORE, Calls
from kbtp.testing.bench.process import BenchFailed

STAMP_BYTES = 16
SLOT_SHIFT_BYTES = 64
COMPARE_EVERY = 64
WARM_UP_PART = 0.15
DRAWS = 256
_SPOILT = -1
_SEED = 1


Indices: TypeAlias = Sequence[int] | npt.NDArray[np.int64]

Call: TypeAlias = Callable[[], object]
"""What is timed: all of its arguments are at hand. It returns when all of it is done and raises if any of it failed."""


class BlockServer(Protocol):
    """What is measured, from an initiator's side.

    A slot is a row of the source and the destination array it was opened with; the nth of `indices` goes with the
    slot `first_slot` + n. What returns a `Call` only looks up what goes with indices and slots, as a caller would have
    it in its block table; to make requests of it, and to look at each answer, is part of the call.
    """

    def fill(self, indices: Sequence[int]) -> None:
        """Store what `load` will find, once for each index."""
        ...

    def load(self, indices: Sequence[int], first_slot: int) -> Call: ...

    def store(self, indices: Sequence[int], first_slot: int) -> Call:
        """Replace blocks of a second set, as many as there are slots; they exist when this returns."""
        ...

    def read_back(self, indices: Sequence[int], first_slot: int) -> Call:
        """Load what `store` or `allocate` stored last."""
        ...

    def allocate(self, indices: Sequence[int], first_slot: int) -> Call: ...

    def free(self, indices: Sequence[int]) -> Call:
        """Of what `allocate` stored last."""
        ...

    def finish(self) -> None:
        """Undo what `store` created, so that there is room for `allocate`. Not timed."""
        ...

    def close(self) -> None: ...


class Slots:
    """The memory an initiator loads into and stores from, one row a slot."""

    def __init__(self, count: int, block_bytes: int) -> None:
        self.count = count
        self.block_bytes = block_bytes
        octets = np.random.default_rng(_SEED).integers(0, 256, block_bytes + count * SLOT_SHIFT_BYTES, np.uint8)
        self.source = np.stack([octets[slot * SLOT_SHIFT_BYTES :][:block_bytes] for slot in range(count)])
        self.destination = np.zeros((count, block_bytes), np.uint8)
        self._stamps: npt.NDArray[np.int64] = self.source[:, :STAMP_BYTES].view(np.int64)
        self._arrived: npt.NDArray[np.int64] = self.destination[:, :STAMP_BYTES].view(np.int64)

    def stamp(self, indices: Indices, first_slot: int, version: int) -> None:
        rows = self._stamps[first_slot : first_slot + len(indices)]
        rows[:, 0] = indices
        rows[:, 1] = version

    def check(self, indices: Indices, sources: Sequence[int], first_slot: int, version: int, whole: bool) -> None:
        """Raises BenchFailed unless what arrived for `indices` came from the slots `sources`. Spoils what it saw."""
        rows = slice(first_slot, first_slot + len(indices))
        arrived = self._arrived[rows]
        if not (arrived[:, 0] == indices).all() or not (arrived[:, 1] == version).all():
            raise BenchFailed(f"a block of {self.block_bytes} octets came back as another one")
        if whole:
            for got, source in zip(self.destination[rows], sources, strict=True):
                if not np.array_equal(got[STAMP_BYTES:], self.source[source, STAMP_BYTES:]):
                    raise BenchFailed(f"a block of {self.block_bytes} octets came back damaged")
        arrived[:, 0] = _SPOILT


class Workload:
    """Fills a server with `blocks` blocks and measures calls to it, loads from every `stride`th of them."""

    def __init__(self, server: BlockServer, slots: Slots, blocks: int, stride: int = 1) -> None:
        self._server = server
        self._slots = slots
        self._blocks = blocks
        self._stride = stride
        self._version = 0
        self._random = random.Random(_SEED)
        for start in range(0, blocks, slots.count):
            indices = range(start, min(start + slots.count, blocks))
            slots.stamp(indices, 0, 0)
            server.fill(indices)

    def measure(self, operation: str, outstanding: int, seconds: float) -> Calls:
        """Call for some `seconds` by the clock on the wall, at least once. Raises BenchFailed if contents differ."""
        kinds: dict[str, Callable[[list[list[int]], float], Calls]] = {
            LOAD: self._loads,
            STORE: self._stores,
            ALLOC: self._allocations,
            ALLOC_ALONE: partial(self._allocations, alone=True),
        }
        run = kinds[operation]
        indices = range(0, self._blocks, self._stride) if operation == LOAD else range(self._slots.count)
        draws = self._draws(indices, outstanding)
        warm_up = run(draws, seconds * WARM_UP_PART)
        calls = run(draws, seconds)
        self._server.finish()
        return replace(calls, warm_up_calls=len(warm_up.calls_ns))

    def _draws(self, indices: range, outstanding: int) -> list[list[int]]:
        """Indices for many calls, drawn beforehand: no two the same within one call."""
        return [self._random.sample(indices, outstanding) for _ in range(DRAWS)]

    def _loads(self, draws: list[list[int]], seconds: float) -> Calls:
        turns, timed = self._turns(draws), _Timed(seconds)
        # All before the first: what lies between two calls is time in which whoever spins goes to sleep.
        calls = [self._server.load(turn.indices, turn.first_slot) for turn in turns]
        while timed.goes_on():
            place = timed.count % len(turns)
            turn = turns[place]
            timed.call(calls[place])
            self._slots.check(turn.stamps, turn.homes, turn.first_slot, 0, timed.is_compared())
        return Calls(timed.calls_ns, timed.count * len(draws[0]))

    def _stores(self, draws: list[list[int]], seconds: float) -> Calls:
        turns, timed = self._turns(draws), _Timed(seconds)
        verified = 0
        while timed.goes_on():
            turn = turns[timed.count % len(turns)]
            self._version += 1
            self._slots.stamp(turn.stamps, turn.first_slot, self._version)
            timed.call(self._server.store(turn.indices, turn.first_slot))
            if timed.is_compared():
                verified += self._verify(turn)
        verified += self._verify(turn)
        return Calls(timed.calls_ns, verified)

    def _allocations(self, draws: list[list[int]], seconds: float, alone: bool = False) -> Calls:
        """`alone`: without the free."""
        turns, timed = self._turns(draws), _Timed(seconds)
        verified = 0
        while timed.goes_on():
            turn = turns[timed.count % len(turns)]
            self._version += 1
            self._slots.stamp(turn.stamps, turn.first_slot, self._version)
            timed.call(self._server.allocate(turn.indices, turn.first_slot))
            if timed.is_compared():
                verified += self._verify(turn)
            free = self._server.free(turn.indices)
            if alone:
                free()
            else:
                timed.continue_call(free)
        return Calls(timed.calls_ns, verified)

    def _turns(self, draws: list[list[int]]) -> list[_Turn]:
        count = self._slots.count
        return [
            _Turn(
                indices,
                np.array(indices, np.int64),
                [index % count for index in indices],
                place % (count - len(indices) + 1),
            )
            for place, indices in enumerate(draws)
        ]

    def _verify(self, turn: _Turn) -> int:
        self._server.read_back(turn.indices, turn.first_slot)()
        sources = range(turn.first_slot, turn.first_slot + len(turn.indices))
        self._slots.check(turn.stamps, sources, turn.first_slot, self._version, True)
        return len(turn.indices)


@dataclass(frozen=True, slots=True)
class _Turn:
    """What one call is about, and what has to come of it."""

    indices: list[int]
    stamps: npt.NDArray[np.int64]
    """The indices once more, to compare all at once."""
    homes: list[int]
    """The slots that a load's blocks were filled from."""
    first_slot: int


class _Timed:
    """Times calls until some seconds have passed by the clock on the wall, at least one call."""

    def __init__(self, seconds: float) -> None:
        self.calls_ns: list[int] = []
        self._deadline_ns = time.perf_counter_ns() + int(seconds * 1e9)

    @property
    def count(self) -> int:
        return len(self.calls_ns)

    def goes_on(self) -> bool:
        return not self.calls_ns or time.perf_counter_ns() < self._deadline_ns

    def is_compared(self) -> bool:
        """Whether the call just made is one whose octets are all compared."""
        return len(self.calls_ns) % COMPARE_EVERY == 1

    def call(self, call: Call) -> None:
        began_ns = time.perf_counter_ns()
        call()
        self.calls_ns.append(time.perf_counter_ns() - began_ns)

    def continue_call(self, call: Call) -> None:
        """Time that belongs to the call before."""
        began_ns = time.perf_counter_ns()
        call()
        self.calls_ns[-1] += time.perf_counter_ns() - began_ns
