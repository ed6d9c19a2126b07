"""A storage backend of LMCache inside an engine's process: one of its `storage_plugins`.

docs/connectors/lmcache.md has the configuration. `contains` and `get` wait for the cache, which has deadlines; puts
are handed to a thread.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeVar

from lmcache.utils import CacheEngineKey
from lmcache.v1.config import LMCacheEngineConfig
from lmcache.v1.memory_management import MemoryFormat, MemoryObj
from lmcache.v1.metadata import LMCacheMetadata
from lmcache.v1.storage_backend.abstract_backend import StoragePluginInterface
from lmcache.v1.storage_backend.local_cpu_backend import LocalCPUBackend

from kbtp import limits
from kbtp.connectors.lmcache.arena import Arena
from kbtp.connectors.lmcache.lanes import Turns
from kbtp.connectors.names import key_of
from kbtp.connectors.opening import open_cache
from kbtp.connectors.troubles import Troubles
from kbtp.errors import ApiMisuse

log = logging.getLogger("kbtp.connectors.lmcache")

_KEY_FORM = "lmcache storage 1"  # of what `_name` makes: another form is another number
_PREFIX = "kbtp."  # of our options in LMCache's `extra_config`
_T = TypeVar("_T")


class KbtpStorage(StoragePluginInterface):
    """Chunks of LMCache as values of a `kbtp.Cache`, from and into LMCache's own memory."""

    def __init__(
        self,
        dst_device: str = "cpu",
        config: LMCacheEngineConfig | None = None,
        metadata: LMCacheMetadata | None = None,
        local_cpu_backend: LocalCPUBackend | None = None,
        loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        """Options are those of `open_cache`, `kbtp.url` and so on in `extra_config`. Raises `ApiMisuse`, which LMCache
        logs: the engine runs without it then."""
        super().__init__(dst_device, config, metadata, local_cpu_backend, loop)
        if config is None or metadata is None or config.use_layerwise:
            raise ApiMisuse("LMCache stores chunks here, not layers: use_layerwise has to be off")
        extra = config.extra_config or {}
        options = {name.removeprefix(_PREFIX): extra[name] for name in extra if name.startswith(_PREFIX)}
        self._cache = open_cache(options)
        self._troubles = Troubles(log)
        self._arena = _arena_of(local_cpu_backend)
        self._arena.register(self._cache)
        self._puts = Turns("put", options.get("timeout_s", limits.CACHE_TIMEOUT_S), self._troubles)
        self._lock = threading.Lock()
        self._putting: set[CacheEngineKey] = set()
        self._format = MemoryFormat.KV_MLA_FMT if metadata.use_mla else MemoryFormat.KV_2LTD

    # --- put -----------------------------------------------------------------------------------

    def exists_in_put_tasks(self, key: CacheEngineKey) -> bool:
        with self._lock:
            return key in self._putting

    def batched_submit_put_task(
        self,
        keys: Sequence[CacheEngineKey],
        objs: list[MemoryObj],
        transfer_spec: object = None,
        on_complete_callback: Callable[[CacheEngineKey], None] | None = None,
    ) -> None:
        with self._lock:
            new = {key: one for key, one in zip(keys, objs, strict=False) if key not in self._putting}
            self._putting.update(new)
        for one in new.values():
            one.ref_count_up()

        def done(stored: list[bool]) -> None:
            with self._lock:
                self._putting.difference_update(new)
            for (key, one), is_stored in zip(new.items(), stored, strict=True):
                one.ref_count_down()
                if is_stored and on_complete_callback is not None:
                    self._safely("callback", partial(on_complete_callback, key), None)

        self._puts.submit(lambda: self._put(new), [False] * len(new), done)

    def _put(self, objects: dict[CacheEngineKey, MemoryObj]) -> list[bool]:
        values = [self._arena.octets_of(one) for one in objects.values()]
        items = self._cache.put_many([self._name(key) for key in objects], values)
        for item in items:
            if not item.ok:
                self._troubles.count(f"not stored: {item.outcome.value}", item.error or "")
        return [item.ok for item in items]

    # --- look-up -------------------------------------------------------------------------------

    def contains(self, key: CacheEngineKey, pin: bool = False) -> bool:
        return self.batched_contains([key]) == 1

    def batched_contains(self, keys: list[CacheEngineKey], pin: bool = False) -> int:
        return self._safely("look-up", lambda: self._cache.longest_prefix([self._name(key) for key in keys]), 0)

    async def batched_async_contains(self, lookup_id: str, keys: list[CacheEngineKey], pin: bool = False) -> int:
        return await asyncio.to_thread(self.batched_contains, keys)

    # --- get -----------------------------------------------------------------------------------

    def get_blocking(self, key: CacheEngineKey) -> MemoryObj | None:
        return self.batched_get_blocking([key])[0]

    def batched_get_blocking(self, keys: list[CacheEngineKey]) -> list[MemoryObj | None]:
        objects: list[MemoryObj | None] = [None] * len(keys)
        if self.local_cpu_backend is not None:  # there is none in a scheduler
            self._safely("get", lambda: self._get(keys, objects), None)
        return objects

    async def batched_get_non_blocking(
        self, lookup_id: str, keys: list[CacheEngineKey], transfer_spec: object = None
    ) -> list[MemoryObj]:
        """Those before the first that is missing."""
        objects = await asyncio.to_thread(self.batched_get_blocking, keys)
        prefix = objects.index(None) if None in objects else len(objects)
        for one in objects[prefix:]:
            if one is not None:
                one.ref_count_down()
        return [one for one in objects[:prefix] if one is not None]

    def _get(self, keys: Sequence[CacheEngineKey], objects: list[MemoryObj | None]) -> None:
        """Asks how long they are first: the last chunk of a prompt may be short."""
        names = [self._name(key) for key in keys]
        allocated: list[MemoryObj] = []
        loaded: list[bool] = []
        try:
            for item in self._cache.contains_many(names):
                one = self._allocate(item.length_bytes) if item.ok else None
                if one is None:
                    break  # what is behind it nobody needs
                allocated.append(one)
            into = [self._arena.octets_of(one) for one in allocated]
            items = self._cache.get_many_into(names[: len(into)], into)
            loaded = [item.ok and item.length_bytes == len(view) for item, view in zip(items, into, strict=True)]
        finally:
            for place, one in enumerate(allocated):
                if loaded and loaded[place]:
                    objects[place] = one
                else:
                    one.ref_count_down()
        if not all(loaded):
            self._troubles.count("not loaded", "evicted since the look-up, or not to be had", loaded.count(False))

    def _allocate(self, length_bytes: int) -> MemoryObj | None:
        tokens, rest = divmod(length_bytes, self._token_bytes())
        if rest or not 1 <= tokens <= self.metadata.chunk_size:
            self._troubles.count("not loaded", f"{length_bytes} octets are no chunk")
            return None
        shapes = self.metadata.get_shapes(tokens)
        # busy_loop would wait for room without end.
        return self.local_cpu_backend.allocate(shapes, self.metadata.get_dtypes(), self._format, busy_loop=False)

    def _token_bytes(self) -> int:
        shapes, dtypes = self.metadata.get_shapes(1), self.metadata.get_dtypes()
        return sum(int(shape.numel()) * int(dtype.itemsize) for shape, dtype in zip(shapes, dtypes, strict=True))

    # --- names and life ------------------------------------------------------------------------

    def _name(self, key: CacheEngineKey) -> bytes:
        """With the layout as scheduler and workers know it alike."""
        layers, planes, _, heads, head_size = self.metadata.kv_shape
        layout = (str(key.dtype), layers, planes, heads, head_size, self._format.name)
        tags = [text for tag in key.tags or () for text in map(str, tag)]
        fields = (key.model_name, key.world_size, key.worker_id, key.chunk_hash)
        return key_of(_KEY_FORM, *fields, *layout, *tags)

    def _safely(self, kind: str, task: Callable[[], _T], otherwise: _T) -> _T:
        try:
            return task()
        except Exception as error:
            self._troubles.count(f"{kind} failed", repr(error))
            return otherwise

    def remove(self, key: CacheEngineKey, force: bool = True) -> bool:
        return self._safely("remove", lambda: self._cache.delete(self._name(key)), False)

    def pin(self, key: CacheEngineKey) -> bool:
        """Nothing is pinned: a value evicted between look-up and get is a miss."""
        return True

    def unpin(self, key: CacheEngineKey) -> bool:
        return True

    def get_allocator_backend(self) -> Any:
        return self.local_cpu_backend

    def close(self) -> None:
        self._puts.close()
        self._cache.close()


def _arena_of(backend: LocalCPUBackend | None) -> Arena:
    allocator: Any = getattr(backend, "memory_allocator", None)
    buffer = getattr(allocator, "buffer", None)
    if buffer is None and hasattr(allocator, "get_underlying_buffer"):
        buffer = allocator.get_underlying_buffer()
    if buffer is None or buffer.device.type != "cpu":
        return Arena(0, 0)
    return Arena(buffer.data_ptr(), buffer.numel() * buffer.element_size())
