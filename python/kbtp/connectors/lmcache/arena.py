"""LMCache's memory in the host: one piece, registered once, of which every object is a slice."""

from __future__ import annotations

import ctypes

from lmcache.v1.memory_management import MemoryObj

from kbtp.cache import Cache


class Arena:
    def __init__(self, start: int, length_bytes: int) -> None:
        """No octets: there is no such piece."""
        self.start = start
        self.octets = (
            memoryview((ctypes.c_ubyte * length_bytes).from_address(start)).cast("B") if length_bytes else None
        )

    def register(self, cache: Cache) -> None:
        if self.octets is not None:
            cache.register(self.octets)

    def octets_of(self, one: MemoryObj) -> memoryview:
        """In place, wherever it lies."""
        if self.octets is not None:
            first = one.data_ptr - self.start
            last = first + one.get_size()
            if 0 <= first <= last <= len(self.octets):
                return self.octets[first:last]
        return memoryview(one.byte_array).cast("B")
