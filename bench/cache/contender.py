"""`kbtp.Cache` as one of those that are compared: a target with an index, and clients that put and get by key."""

from __future__ import annotations

import itertools
import os
import sys
from collections.abc import Iterable, Sequence

from bench.contenders import Peer, Places
from bench.peers import Cpus, PeerKind, Start
from kbtp.cache import Cache, Item
from kbtp.testing.bench.figures import ALLOC, ALLOC_ALONE, LOAD, STORE
from kbtp.testing.bench.process import BenchFailed, Child, Message, environment, python
from kbtp.testing.bench.rnics import open_spinning
from kbtp.testing.bench.workload import Call, Slots

START_S = 60.0
NAME = "kbtp.Cache"


class CacheBlocks:
    """`BlockServer` on a cache: a value is a block. What is stored anew gets a key of its own."""

    def __init__(self, slots: Slots, blocks: int, settings: Message) -> None:
        self._count = slots.count
        self._cache = Cache(
            settings["index"],
            # By its URL: whoever is frozen between his turns announces nothing meanwhile.
            targets=[settings["url"]],
            namespace=f"bench {os.getpid()}",
            quota=blocks + slots.count,
            rnic=open_spinning(settings["rnic"], settings["spin_us"]),
        )
        self._cache.register(slots.source)
        self._cache.register(slots.destination)
        self._sources = [row.data for row in slots.source]
        self._destinations = [row.data for row in slots.destination]
        self._fresh = itertools.count()
        self._stored: dict[int, bytes] = {}
        self._allocated: list[bytes] = []
        self._last: list[bytes] = []

    def fill(self, indices: Sequence[int]) -> None:
        _checked(self._cache.put_many([_loaded(index) for index in indices], self._sources[: len(indices)]))
        self._cache.pin([_loaded(index) for index in indices], 3600)  # what is stored anew must not evict these

    def load(self, indices: Sequence[int], first_slot: int) -> Call:
        return self._get([_loaded(index) for index in indices], first_slot)

    def store(self, indices: Sequence[int], first_slot: int) -> Call:
        old = [key for index in indices if (key := self._stored.pop(index, None)) is not None]
        self._cache.delete_many(old)
        keys = self._keys(len(indices))
        self._stored.update(zip(indices, keys, strict=True))
        return self._put(keys, first_slot)

    def read_back(self, indices: Sequence[int], first_slot: int) -> Call:
        return self._get(self._last, first_slot)

    def allocate(self, indices: Sequence[int], first_slot: int) -> Call:
        self._allocated = self._keys(len(indices))
        return self._put(self._allocated, first_slot)

    def free(self, indices: Sequence[int]) -> Call:
        keys, cache = self._allocated, self._cache
        return lambda: _checked(cache.delete_many(keys))

    def finish(self) -> None:
        self._cache.delete_many(list(self._stored.values()))
        self._stored.clear()

    def close(self) -> None:
        self._cache.close()

    def _keys(self, count: int) -> list[bytes]:
        self._last = [b"stored %d" % number for number in itertools.islice(self._fresh, count)]
        return self._last

    def _get(self, keys: list[bytes], first_slot: int) -> Call:
        cache, into = self._cache, self._destinations[first_slot : first_slot + len(keys)]
        return lambda: _checked(cache.get_many_into(keys, into))

    def _put(self, keys: list[bytes], first_slot: int) -> Call:
        cache, data = self._cache, self._sources[first_slot : first_slot + len(keys)]
        return lambda: _checked(cache.put_many(keys, data))


def _loaded(index: int) -> bytes:
    return b"loaded %d" % index


def _checked(items: Iterable[Item]) -> None:
    for item in items:
        if not item.ok:
            raise BenchFailed(f"{NAME}: {item.outcome.value}")


class CacheContender(Peer):
    operations: Sequence[str] = (LOAD, STORE, ALLOC, ALLOC_ALONE)

    def __init__(self, block_bytes: int, spin_us: int, places: Places) -> None:
        """For one size of blocks: a target has but one."""

        def serve(_program: str, octets: int, cpus: Cpus, started: Start) -> Message:
            size = block_bytes + -block_bytes % 64
            blocks = octets // block_bytes
            command = python(
                "kbtp", "serve", "--port", "0", "--json", "--index", "--log-level", "error", "--block-size", str(size),
                "--pool-blocks", str(blocks),
            )  # fmt: skip
            ready = started(Child(command, env=environment(), cpus=cpus)).answer(START_S)
            return {"url": ready["url"], "index": ready["index"], "rnic": "auto", "spin_us": spin_us}

        super().__init__(PeerKind(NAME, "kbtp-cache", lambda: sys.executable, "", serve), places)
