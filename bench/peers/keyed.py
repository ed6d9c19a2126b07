"""Peers that store values under keys."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Generic, TypeVar

from kbtp.testing.bench.workload import Call

Key = TypeVar("Key")


class Keyed(ABC, Generic[Key]):
    """`BlockServer` on values under keys: of blocks to load, and of blocks to replace."""

    def __init__(self, loaded: Sequence[Key], stored: Sequence[Key]) -> None:
        self._loaded = loaded
        self._stored = stored

    @abstractmethod
    def get(self, keys: list[Key], first_slot: int) -> Call: ...

    @abstractmethod
    def put(self, keys: list[Key], first_slot: int) -> Call: ...

    # --- BlockServer ---------------------------------------------------------------------------

    def fill(self, indices: Sequence[int]) -> None:
        self.put([self._loaded[index] for index in indices], 0)()

    def load(self, indices: Sequence[int], first_slot: int) -> Call:
        return self.get([self._loaded[index] for index in indices], first_slot)

    def store(self, indices: Sequence[int], first_slot: int) -> Call:
        return self.put([self._stored[index] for index in indices], first_slot)

    def read_back(self, indices: Sequence[int], first_slot: int) -> Call:
        return self.get([self._stored[index] for index in indices], first_slot)

    def allocate(self, indices: Sequence[int], first_slot: int) -> Call:
        return self.store(indices, first_slot)

    def free(self, indices: Sequence[int]) -> Call:
        return lambda: None  # the next value replaces this one

    def finish(self) -> None:
        return  # there is always room

    @abstractmethod
    def close(self) -> None: ...
