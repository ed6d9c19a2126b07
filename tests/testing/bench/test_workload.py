"""What an initiator of a measurement does, and that it notices what comes back wrong."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from kbtp.testing.bench.figures import ALLOC, ALLOC_ALONE, LOAD, OPERATIONS, STORE
from kbtp.testing.bench.process import BenchFailed
from kbtp.testing.bench.workload import Call, Slots, Workload

BLOCK_BYTES = 256
SLOTS = 4
BLOCKS = 10


class Shelf:
    """A `BlockServer` in memory; a subclass spoils something."""

    def __init__(self, slots: Slots) -> None:
        self.slots = slots
        self.filled: dict[int, bytes] = {}
        self.stored: dict[int, bytes] = {}
        self.loads: list[list[int]] = []

    def fill(self, indices: Sequence[int]) -> None:
        self.filled.update((index, self.slots.source[slot].tobytes()) for slot, index in enumerate(indices))

    def load(self, indices: Sequence[int], first_slot: int) -> Call:
        return lambda: self._load(indices, first_slot)

    def _load(self, indices: Sequence[int], first_slot: int) -> None:
        self.loads.append(list(indices))
        for slot, index in enumerate(indices, first_slot):
            self.deliver(slot, self.filled[index])

    def store(self, indices: Sequence[int], first_slot: int) -> Call:
        return lambda: self._store(indices, first_slot)

    def _store(self, indices: Sequence[int], first_slot: int) -> None:
        for slot, index in enumerate(indices, first_slot):
            self.stored[index] = self.slots.source[slot].tobytes()

    def read_back(self, indices: Sequence[int], first_slot: int) -> Call:
        return lambda: self._read_back(indices, first_slot)

    def _read_back(self, indices: Sequence[int], first_slot: int) -> None:
        for slot, index in enumerate(indices, first_slot):
            self.deliver(slot, self.stored[index])

    def allocate(self, indices: Sequence[int], first_slot: int) -> Call:
        assert not set(indices) & set(self.stored), "there was room for it"
        return self.store(indices, first_slot)

    def free(self, indices: Sequence[int]) -> Call:
        return lambda: [self.stored.pop(index) for index in indices]

    def finish(self) -> None:
        self.stored.clear()

    def close(self) -> None:
        return

    def deliver(self, slot: int, octets: bytes) -> None:
        self.slots.destination[slot].data[:] = octets


class Lazy(Shelf):
    """Says it is done and places nothing."""

    def deliver(self, slot: int, octets: bytes) -> None:
        return


class Crooked(Shelf):
    """Places the right stamp on wrong octets."""

    def deliver(self, slot: int, octets: bytes) -> None:
        super().deliver(slot, octets[:-1] + bytes([octets[-1] ^ 1]))


class Confused(Shelf):
    """Gives what was filled in for what was stored."""

    def read_back(self, indices: Sequence[int], first_slot: int) -> Call:
        return self.load(indices, first_slot)


@pytest.mark.parametrize("outstanding", [1, SLOTS])
@pytest.mark.parametrize("operation", [*OPERATIONS, ALLOC_ALONE])
def test_each_call_is_timed_and_its_contents_are_verified(operation: str, outstanding: int) -> None:
    slots = Slots(SLOTS, BLOCK_BYTES)
    shelf = Shelf(slots)
    calls = Workload(shelf, slots, BLOCKS).measure(operation, outstanding, 0.005)
    assert set(shelf.filled) == set(range(BLOCKS))
    assert len(calls.calls_ns) > 0
    assert min(calls.calls_ns) > 0
    assert calls.warm_up_calls > 0
    if operation == LOAD:
        assert calls.verified == len(calls.calls_ns) * outstanding
    else:
        assert calls.verified >= outstanding
    assert not shelf.stored


class Clocked(Shelf):
    """Says the time, and a second passes with each free."""

    now_ns = 0

    def free(self, indices: Sequence[int]) -> Call:
        free = super().free(indices)

        def freed() -> None:
            free()
            self.now_ns += 10**9

        return freed


@pytest.mark.parametrize(("operation", "seconds"), [(ALLOC, 1), (ALLOC_ALONE, 0)])
def test_a_free_is_timed_if_it_is_asked_for(monkeypatch: pytest.MonkeyPatch, operation: str, seconds: int) -> None:
    slots = Slots(SLOTS, BLOCK_BYTES)
    shelf = Clocked(slots)
    monkeypatch.setattr("kbtp.testing.bench.workload.time.perf_counter_ns", lambda: shelf.now_ns)
    calls = Workload(shelf, slots, BLOCKS).measure(operation, 1, 3.0)
    assert set(calls.calls_ns) == {seconds * 10**9}


def test_a_call_is_made_however_short_the_time() -> None:
    slots = Slots(SLOTS, BLOCK_BYTES)
    calls = Workload(Shelf(slots), slots, BLOCKS).measure(LOAD, 1, 0.0)
    assert (len(calls.calls_ns), calls.warm_up_calls, calls.verified) == (1, 1, 1)


def test_no_block_comes_twice_in_a_call_and_only_every_strideth() -> None:
    slots = Slots(SLOTS, BLOCK_BYTES)
    shelf = Shelf(slots)
    Workload(shelf, slots, BLOCKS, stride=2).measure(LOAD, SLOTS, 0.005)
    for indices in shelf.loads:
        assert len(set(indices)) == SLOTS
        assert all(index % 2 == 0 for index in indices)


@pytest.mark.parametrize(
    ("kind", "operation", "said"),
    [
        (Lazy, LOAD, "as another one"),
        (Lazy, STORE, "as another one"),
        (Crooked, LOAD, "damaged"),
        (Crooked, STORE, "damaged"),
        (Crooked, ALLOC, "damaged"),
        (Confused, STORE, "as another one"),
    ],
)
def test_what_comes_back_wrong_is_noticed(kind: type[Shelf], operation: str, said: str) -> None:
    slots = Slots(SLOTS, BLOCK_BYTES)
    workload = Workload(kind(slots), slots, BLOCKS)
    with pytest.raises(BenchFailed, match=said):
        workload.measure(operation, 2, 0.005)
