"""Peers that read and write the memory of another process, and know no keys."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

from kbtp.testing.bench.workload import Call, Slots


class OneSided(ABC):
    """`BlockServer` on memory of a target: the blocks to load, and behind them those to replace."""

    def __init__(self, slots: Slots, blocks: int) -> None:
        self._slots = slots
        self._blocks = blocks

    @abstractmethod
    def read(self, slots: Sequence[int], remote: Sequence[int]) -> Call:
        """Into these slots from the target's blocks of these numbers."""

    @abstractmethod
    def write(self, slots: Sequence[int], remote: Sequence[int]) -> Call: ...

    # --- BlockServer ---------------------------------------------------------------------------

    def fill(self, indices: Sequence[int]) -> None:
        self.write(range(len(indices)), indices)()

    def load(self, indices: Sequence[int], first_slot: int) -> Call:
        return self.read(range(first_slot, first_slot + len(indices)), indices)

    def store(self, indices: Sequence[int], first_slot: int) -> Call:
        return self.write(range(first_slot, first_slot + len(indices)), [self._blocks + index for index in indices])

    def read_back(self, indices: Sequence[int], first_slot: int) -> Call:
        return self.load([self._blocks + index for index in indices], first_slot)

    def allocate(self, indices: Sequence[int], first_slot: int) -> Call:
        return self.store(indices, first_slot)

    def free(self, indices: Sequence[int]) -> Call:
        return lambda: None  # its memory has no keys

    def finish(self) -> None:
        return  # there is always room

    @abstractmethod
    def close(self) -> None: ...


class Addressed(OneSided):
    """One that names its own memory and the target's by address."""

    def __init__(self, slots: Slots, blocks: int, address: int) -> None:
        super().__init__(slots, blocks)
        self._address = address
        self._sources = [row.ctypes.data for row in slots.source]
        self._destinations = [row.ctypes.data for row in slots.destination]

    @abstractmethod
    def transfer(self, write: bool, local: list[int], remote: list[int], lengths: list[int]) -> Call: ...

    def read(self, slots: Sequence[int], remote: Sequence[int]) -> Call:
        return self._transfer(False, self._destinations, slots, remote)

    def write(self, slots: Sequence[int], remote: Sequence[int]) -> Call:
        return self._transfer(True, self._sources, slots, remote)

    def _transfer(self, write: bool, local: list[int], slots: Sequence[int], remote: Sequence[int]) -> Call:
        size = self._slots.block_bytes
        there = [self._address + block * size for block in remote]
        return self.transfer(write, [local[slot] for slot in slots], there, [size] * len(there))
