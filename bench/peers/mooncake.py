"""Mooncake over TCP: its Transfer Engine (reads and writes of memory, no keys) and its Store (objects under keys)."""

from __future__ import annotations

import contextlib
import importlib
import os
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from bench.peers.keyed import Keyed
from bench.peers.one_sided import Addressed
from kbtp.testing.bench.process import BenchFailed, Message
from kbtp.testing.bench.workload import Call, Slots

_HOST = "127.0.0.1"
_HANDSHAKE = "P2PHANDSHAKE"  # no metadata server
_TCP = "tcp"
_CLIENT_BUFFER_BYTES = 64 << 20


def _checked(status: int, what: str) -> None:
    if status:
        raise BenchFailed(f"Mooncake: {what}: {status}")


@contextlib.contextmanager
def _unheard() -> Iterator[None]:
    """Without what its logs say to standard error before they can be told not to."""
    kept = os.dup(2)
    with open(os.devnull, "w") as nowhere:
        os.dup2(nowhere.fileno(), 2)
    try:
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)


# --- Transfer Engine ---------------------------------------------------------------------------


def _engine() -> Any:
    with _unheard():
        engine = importlib.import_module("mooncake.engine").TransferEngine()
        _checked(engine.initialize(_HOST, _HANDSHAKE, _TCP, ""), "initialize")
    return engine


def engine_target(octets: int) -> tuple[object, Message]:
    engine = _engine()
    memory = np.zeros(octets, np.uint8)
    _checked(engine.register_memory(memory.ctypes.data, memory.nbytes), "register_memory")
    return (engine, memory), {"address": memory.ctypes.data, "name": f"{_HOST}:{engine.get_rpc_port()}"}


class TransferEngine(Addressed):
    def __init__(self, slots: Slots, blocks: int, settings: Message) -> None:
        super().__init__(slots, blocks, settings["address"])
        self._engine = _engine()
        self._target = settings["name"]
        for array in (slots.source, slots.destination):
            _checked(self._engine.register_memory(array.ctypes.data, array.nbytes), "register_memory")

    def transfer(self, write: bool, local: list[int], remote: list[int], lengths: list[int]) -> Call:
        engine, target = self._engine, self._target
        if len(local) == 1:
            one = engine.transfer_sync_write if write else engine.transfer_sync_read
            here, there, length = local[0], remote[0], lengths[0]
            return lambda: _checked(one(target, here, there, length), "transfer")
        many = engine.batch_transfer_sync_write if write else engine.batch_transfer_sync_read
        return lambda: _checked(many(target, local, remote, lengths), "transfer")

    def close(self) -> None:
        for array in (self._slots.source, self._slots.destination):
            self._engine.unregister_memory(array.ctypes.data)


# --- Store -------------------------------------------------------------------------------------


def _store(segment_bytes: int, buffer_bytes: int, master: str) -> Any:
    with _unheard():
        store = importlib.import_module("mooncake.store").MooncakeDistributedStore()
        _checked(store.setup(_HOST, _HANDSHAKE, segment_bytes, buffer_bytes, _TCP, "", master), "setup")
    return store


def store_target(octets: int, master: str) -> tuple[object, Message]:
    """A node that gives the store its memory."""
    return _store(octets, _CLIENT_BUFFER_BYTES, master), {"master": master}


class Store(Keyed[str]):
    """`BlockServer`. Objects do not change: each store is of a key that has just been removed, which is not timed."""

    def __init__(self, slots: Slots, blocks: int, settings: Message) -> None:
        self._store = _store(0, _CLIENT_BUFFER_BYTES, settings["master"])
        self._slots = slots
        for array in (slots.source, slots.destination):
            _checked(self._store.register_buffer(array.ctypes.data, array.nbytes), "register_buffer")
        self._sources = [row.ctypes.data for row in slots.source]
        self._destinations = [row.ctypes.data for row in slots.destination]
        mark = os.urandom(4).hex()  # clients side by side have keys of their own
        super().__init__(
            [f"l{mark}{index:07d}" for index in range(blocks)], [f"s{mark}{index:07d}" for index in range(slots.count)]
        )
        self._present: set[str] = set()

    def store(self, indices: Sequence[int], first_slot: int) -> Call:
        keys = [self._stored[index] for index in indices]
        for key in self._present.intersection(keys):
            _checked(self._store.remove(key, True), "remove")
        self._present.update(keys)
        return super().store(indices, first_slot)

    def close(self) -> None:
        self._store.close()

    def get(self, keys: list[str], first_slot: int) -> Call:
        store, size = self._store, self._slots.block_bytes
        into = self._destinations[first_slot : first_slot + len(keys)]
        sizes = [size] * len(keys)
        if len(keys) == 1:
            key, to = keys[0], into[0]
            return lambda: _checked(size - store.get_into(key, to, size), "get_into")
        return lambda: _checked(store.batch_get_into(keys, into, sizes) != sizes, "batch_get_into")

    def put(self, keys: list[str], first_slot: int) -> Call:
        store, size = self._store, self._slots.block_bytes
        data = self._sources[first_slot : first_slot + len(keys)]
        sizes = [size] * len(keys)
        if len(keys) == 1:
            key, of = keys[0], data[0]
            return lambda: _checked(store.put_from(key, of, size), "put_from")
        return lambda: _checked(any(store.batch_put_from(keys, data, sizes)), "batch_put_from")
