"""The second level of LMCache's multiprocess server: `"type": "plugin"` of its `--l2-adapter`.

docs/connectors/lmcache.md has the line of configuration.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any

from lmcache.lmcache_native import Bitmap
from lmcache.v1.distributed.api import MemoryLayoutDesc, ObjectKey
from lmcache.v1.distributed.internal_api import L1MemoryDesc, L2StoreResult
from lmcache.v1.distributed.l2_adapters.base import L2AdapterInterface
from lmcache.v1.memory_management import MemoryObj

from kbtp import limits
from kbtp.connectors.lmcache.arena import Arena
from kbtp.connectors.lmcache.lanes import Lane
from kbtp.connectors.names import key_of
from kbtp.connectors.opening import open_cache, take_flag
from kbtp.connectors.troubles import Troubles

log = logging.getLogger("kbtp.connectors.lmcache")

_KEY_FORM = "lmcache l2 1"  # of what `_name` makes: another form is another number


class KbtpL2Adapter(L2AdapterInterface):
    """Objects of LMCache as values of a `kbtp.Cache`, from and into LMCache's own memory.

    What LMCache counts as used stays 0: the cache makes room itself, of all engines' values together.
    """

    def __init__(self, params: Mapping[str, Any], l1_memory_desc: L1MemoryDesc | None = None) -> None:
        """`params` are those of `open_cache` and `serialized`: whether LMCache stores through a `serde`, so that
        objects do not show their layout. Raises `ApiMisuse`."""
        super().__init__()
        options = dict(params)
        self._serialized = take_flag(options, "serialized", False)
        self._shapeless_seen = False
        self._cache = open_cache(options)
        self._arena = Arena(l1_memory_desc.ptr, l1_memory_desc.size) if l1_memory_desc else Arena(0, 0)
        self._arena.register(self._cache)
        self._troubles = Troubles(log)
        wait_s = options.get("timeout_s", limits.CACHE_TIMEOUT_S)
        self._stores: Lane[L2StoreResult] = Lane("store", wait_s, self._troubles)
        self._lookups: Lane[Bitmap] = Lane("look-up", wait_s, self._troubles)
        self._loads: Lane[Bitmap] = Lane("load", wait_s, self._troubles)

    # --- store ---------------------------------------------------------------------------------

    def get_store_event_fd(self) -> int:
        return int(self._stores.notifier.fileno())

    def submit_store_task(self, keys: list[ObjectKey], objects: list[MemoryObj]) -> int:
        return self._stores.submit(lambda: self._store(keys, objects), L2StoreResult(False, 0))

    def pop_completed_store_tasks(self) -> dict[int, L2StoreResult]:
        return self._stores.take_all()

    def _store(self, keys: Sequence[ObjectKey], objects: Sequence[MemoryObj]) -> L2StoreResult:
        values = [self._arena.octets_of(one) for one in objects]
        items = self._cache.put_many(self._names_of(keys, objects), values)
        stored = [(key, len(value)) for key, value, item in zip(keys, values, items, strict=True) if item.ok]
        for item in items:
            if not item.ok:
                self._troubles.count(f"not stored: {item.outcome.value}", item.error or "")
        if stored:
            self._notify_keys_stored([key for key, _ in stored], [0] * len(stored))
        return L2StoreResult(len(stored) == len(keys), sum(length for _, length in stored))

    # --- look-up -------------------------------------------------------------------------------

    def get_lookup_and_lock_event_fd(self) -> int:
        return int(self._lookups.notifier.fileno())

    def submit_lookup_and_lock_task(
        self, keys: list[ObjectKey], group_layout_descs: dict[int, MemoryLayoutDesc]
    ) -> int:
        return self._lookups.submit(lambda: self._look_up(keys, group_layout_descs), Bitmap(len(keys)))

    def query_lookup_and_lock_result(self, task_id: int) -> Bitmap | None:
        return self._lookups.take(task_id)

    def submit_unlock(self, keys: list[ObjectKey]) -> None:
        """Nothing is locked: a value evicted between look-up and load is a miss, which LMCache is ready for."""

    def _look_up(self, keys: Sequence[ObjectKey], layouts: Mapping[int, MemoryLayoutDesc]) -> Bitmap:
        if layouts and self._shapeless_seen:
            self._troubles.count("objects without a layout", 'with a serde, say "serialized": true in adapter_params')
        names = []
        for key in keys:
            layout = layouts.get(key.object_group_id)
            names.append(self._name(key, layout.shapes, layout.dtypes) if layout else self._name(key, (), ()))
        return _bitmap([item.ok for item in self._cache.contains_many(names)])

    # --- load ----------------------------------------------------------------------------------

    def get_load_event_fd(self) -> int:
        return int(self._loads.notifier.fileno())

    def submit_load_task(self, keys: list[ObjectKey], objects: list[MemoryObj]) -> int:
        return self._loads.submit(lambda: self._load(keys, objects), Bitmap(len(keys)))

    def query_load_result(self, task_id: int) -> Bitmap | None:
        return self._loads.take(task_id)

    def _load(self, keys: Sequence[ObjectKey], objects: Sequence[MemoryObj]) -> Bitmap:
        into = [self._arena.octets_of(one) for one in objects]
        items = self._cache.get_many_into(self._names_of(keys, objects), into)
        loaded = [item.ok and item.length_bytes == len(view) for item, view in zip(items, into, strict=True)]
        if not all(loaded):
            self._troubles.count("not loaded", "evicted since the look-up, or not to be had", loaded.count(False))
        if any(loaded):
            self._notify_keys_accessed([key for key, ok in zip(keys, loaded, strict=True) if ok])
        return _bitmap(loaded)

    # --- names and life ------------------------------------------------------------------------

    def _names_of(self, keys: Sequence[ObjectKey], objects: Sequence[MemoryObj]) -> list[bytes]:
        names = []
        for key, one in zip(keys, objects, strict=True):
            shapes, dtypes = one.meta.shapes or [one.meta.shape], one.meta.dtypes or [one.meta.dtype]
            self._shapeless_seen |= _shapeless(shapes) and not self._serialized
            names.append(self._name(key, shapes, dtypes))
        return names

    def _name(self, key: ObjectKey, shapes: Sequence[Sequence[int]], dtypes: Sequence[object]) -> bytes:
        """With the layout, which LMCache's own keys leave out: two engines may cache one model in two dtypes."""
        layout: list[str] = []
        if not self._serialized and not _shapeless(shapes):
            layout = [f"{dtype} {tuple(shape)}" for dtype, shape in zip(dtypes, shapes, strict=True)]
        fields = (key.model_name, key.kv_rank, key.object_group_id, key.cache_salt, key.chunk_hash)
        return key_of(_KEY_FORM, *fields, *layout)

    def report_status(self) -> dict[str, Any]:
        """The counters of the cache, and of what went wrong here. A target that is away is no reason to restart."""
        return {
            "is_healthy": True,
            "type": "kbtp",
            "cache": self._cache.counters.as_dict(),
            "troubles": self._troubles.as_dict(),
        }

    def close(self) -> None:
        for lane in (self._stores, self._lookups, self._loads):
            lane.close()
        self._cache.close()


def _shapeless(shapes: Sequence[Sequence[int]]) -> bool:
    """Of octets in a row, as a serde and LMCache's own benchmark make them, nobody can tell the layout."""
    return all(len(shape) <= 1 for shape in shapes)


def _bitmap(bits: Sequence[bool]) -> Bitmap:
    bitmap = Bitmap(len(bits))
    for number, is_set in enumerate(bits):
        if is_set:
            bitmap.set(number)
    return bitmap
