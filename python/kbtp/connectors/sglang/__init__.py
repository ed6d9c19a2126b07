"""SGLang's HiCache, `--hicache-storage-backend dynamic`; docs/connectors/sglang.md has the line of configuration.

HiCache names a page by the hash of all tokens up to its end, salts included, and keeps it in a host pool: `pools` knows
where, and what else must be equal. Pages are stored from there and loaded into it in place.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeVar

import torch
from sglang.srt.mem_cache.hicache_storage import HiCacheStorage, PoolHitPolicy, PoolName, PoolTransferResult
from sglang.srt.runtime_context import get_server_args

from kbtp.cache import Cache, Item, Outcome
from kbtp.connectors.names import fingerprint_of, key_of
from kbtp.connectors.opening import open_cache, take_flag
from kbtp.connectors.sglang.pools import Pool, is_sharded
from kbtp.connectors.troubles import Troubles
from kbtp.errors import ApiMisuse

log = logging.getLogger("kbtp.sglang")

_T = TypeVar("_T")
_KEYS_ARE = 1  # counted up with every change of what keys are made of
_OF_SGLANG = frozenset(
    "backend_name module_path class_name interface_v1 prefetch_threshold prefetch_timeout_base"
    " prefetch_timeout_per_ki_token hicache_storage_pass_prefix_keys tp_lcm_size".split()
)
# Of the engine's arguments, those that change what a page holds beside the name of its model.
_ARGUMENTS = (
    "model_path revision dtype kv_cache_dtype quantization quantization_param_path json_model_override_args".split()
)
_NOT_STORED = (Outcome.NO_SPACE, Outcome.UNAVAILABLE, Outcome.INVALID)


class KbtpStorage(HiCacheStorage):
    """Raises nothing once it is made: what is wrong is a miss, a counter, and a line in the log now and then."""

    def __init__(self, storage_config: Any, kwargs: object = None) -> None:
        """Raises `ApiMisuse` if the configuration cannot work. Nothing is connected yet."""
        said = storage_config.extra_config or {}
        if not said.get("interface_v1"):
            raise ApiMisuse('"interface_v1": 1 is missing: without it SGLang copies every page twice')
        self._config = storage_config
        self._options = {name: value for name, value in said.items() if name not in _OF_SGLANG}
        self._verify = take_flag(self._options, "verify", True)
        self._only_reads = take_flag(self._options, "read_only", False)
        self._model = _fingerprint(storage_config)
        self._options.setdefault("namespace", f"sglang:{self._model.hex()}")
        if isinstance(self._options.get("writer"), str):
            ranks = [
                storage_config.tp_rank,
                storage_config.pp_rank,
                storage_config.attn_cp_rank,
                storage_config.dp_rank,
            ]
            self._options["writer"] = key_of(self._model, self._options["writer"], *ranks)
        self._troubles = Troubles(log)
        self._pools: dict[str, Pool] = {}
        self._memory: dict[int, tuple[Any, memoryview]] = {}
        self._writes = bool(storage_config.is_storage_writer)
        self._cache = self._open()
        log.info("%s, namespace %s", self._options.get("url"), self._options["namespace"])

    @property
    def counters(self) -> dict[str, object]:
        """Those of `kbtp.Cache`, and how often what went wrong."""
        return {**self._cache.counters.as_dict(), **self._troubles.as_dict()}

    # --- host pools ----------------------------------------------------------------------------

    def register_mem_pool_host(self, mem_pool_host: Any) -> None:
        super().register_mem_pool_host(mem_pool_host)
        self._or_miss("use the pool", partial(self._add, PoolName.KV, mem_pool_host), None)

    def register_mem_host_pool_v2(self, host_pool: Any, host_pool_name: Any) -> None:
        super().register_mem_host_pool_v2(host_pool, host_pool_name)
        self._or_miss("use the pool", partial(self._add, host_pool_name, host_pool), None)

    def _add(self, name: str, host: Any) -> None:
        if is_sharded(self._config, host) and not self._writes:
            self._writes = True
            self._cache.close()
            self._cache = self._open()
        pool = self._pools[name] = Pool.of(self._config, self._model, name, host)
        for storage, octets in pool.memory():
            if storage.data_ptr() not in self._memory:
                self._memory[storage.data_ptr()] = storage, octets
                self._cache.register(octets)

    def _open(self) -> Cache:
        """Ranks whose pages another one stores take no share of the target."""
        cache = open_cache({**self._options, "read_only": self._only_reads or not self._writes})
        for _, octets in self._memory.values():
            cache.register(octets)
        return cache

    # --- pages ---------------------------------------------------------------------------------

    def batch_exists(self, keys: list[str], extra_info: object = None) -> int:
        return self._or_miss("look up", lambda: _run_of(self._present([(PoolName.KV, keys)])[0]), 0)

    def batch_get_v1(self, keys: list[str], host_indices: torch.Tensor, extra_info: object = None) -> list[bool]:
        return self._moved("load", PoolName.KV, keys, host_indices)

    def batch_set_v1(self, keys: list[str], host_indices: torch.Tensor, extra_info: object = None) -> list[bool]:
        return self._moved("store", PoolName.KV, keys, host_indices)

    def batch_exists_v2(
        self, keys: list[str], pool_transfers: Sequence[Any] | None = None, extra_info: object = None
    ) -> PoolTransferResult:
        nothing = PoolTransferResult(0, {}, [])
        return self._or_miss("look up", lambda: self._restorable(keys, pool_transfers or ()), nothing)

    def batch_get_v2(self, transfers: Sequence[Any], extra_info: object = None) -> dict[str, list[bool]]:
        return self._moved_all("load", transfers)

    def batch_set_v2(self, transfers: Sequence[Any], extra_info: object = None) -> dict[str, list[bool]]:
        return self._moved_all("store", transfers)

    def _present(self, asked: Sequence[tuple[str, Sequence[str]]]) -> list[list[bool]]:
        """Which pages of each pool are there: one round trip for all of them."""
        pools = [self._pools[name] for name, _ in asked]
        names = [pool.names(keys) for pool, (_, keys) in zip(pools, asked, strict=True)]
        there = iter([item.ok for item in self._cache.contains_many([one for some in names for one in some])])
        flags = [[next(there) for _ in some] for some in names]
        return [pool.pages(some, len(keys)) for pool, some, (_, keys) in zip(pools, flags, asked, strict=True)]

    def _restorable(self, keys: Sequence[str], transfers: Sequence[Any]) -> PoolTransferResult:
        """Where a prefix may end so that every pool has what it needs of it."""
        gating = [one for one in transfers if one.hit_policy != PoolHitPolicy.BLOCK_GROUPS]
        kv, *others = self._present([(PoolName.KV, keys), *((one.name, keys) for one in gating)])
        ends = range(1, _run_of(kv) + 1)
        hits = {PoolName.KV: len(ends)} if ends else {}
        restorable = list(ends)
        for one, there in zip(gating, others, strict=True):
            window = len(keys) if one.hit_policy == PoolHitPolicy.ALL_PAGES else max(1, len(one.keys or ()))
            served = [end for end in ends if all(there[max(0, end - window) : end])]
            if served:
                hits[one.name] = served[-1]
            restorable = [end for end in restorable if end in served]
        return PoolTransferResult(restorable[-1] if restorable else 0, hits, restorable)

    def _moved_all(self, what: str, transfers: Sequence[Any]) -> dict[str, list[bool]]:
        results: dict[str, list[bool]] = {}
        for one in transfers:
            moved = self._moved(what, one.name, one.keys or [], one.host_indices)
            results.setdefault(one.name, []).extend(moved)
        return results

    def _moved(self, what: str, name: str, keys: Sequence[str], indices: torch.Tensor) -> list[bool]:
        move = self._load if what == "load" else self._store
        return self._or_miss(what, lambda: move(self._pools[name], keys, indices), [False] * len(keys))

    def _load(self, pool: Pool, keys: Sequence[str], indices: torch.Tensor) -> list[bool]:
        if pool.in_place:
            return self._loaded(pool, keys, pool.views(indices, len(keys)))
        pages = [pool.host.get_dummy_flat_data_page() for _ in keys]
        loaded = self._loaded(pool, keys, [_octets(page) for page in pages])
        for at, page, is_loaded in zip(pool.starts(indices, len(keys)), pages, loaded, strict=True):
            if is_loaded:
                pool.host.set_from_flat_data_page(at, page)
        return loaded

    def _loaded(self, pool: Pool, keys: Sequence[str], buffers: Sequence[Any]) -> list[bool]:
        items = self._cache.get_many_into(pool.names(keys), buffers, verify=self._verify)
        self._tell(items)
        whole = [item.ok and item.length_bytes == buffer.nbytes for item, buffer in zip(items, buffers, strict=True)]
        return pool.pages(whole, len(keys))

    def _store(self, pool: Pool, keys: Sequence[str], indices: torch.Tensor) -> list[bool]:
        if pool.in_place:
            values: Sequence[Any] = pool.views(indices, len(keys))
        else:
            values = [_octets(pool.host.get_data_page(at, flat=True)) for at in pool.starts(indices, len(keys))]
        items = self._cache.put_many(pool.names(keys), values)
        self._tell(items)
        return pool.pages([item.ok for item in items], len(keys))

    # --- what is not asked for with "interface_v1" ---------------------------------------------

    def get(self, key: str, target_location: object = None, target_sizes: object = None) -> None:
        return None

    def batch_get(self, keys: list[str], target_locations: object = None, target_sizes: object = None) -> list[None]:
        return [None] * len(keys)

    def set(self, key: str, value: object = None, target_location: object = None, target_sizes: object = None) -> bool:
        return False

    def batch_set(
        self, keys: list[str], values: object = None, target_locations: object = None, target_sizes: object = None
    ) -> bool:
        return False

    def exists(self, key: str) -> bool:
        return self.batch_exists([key]) == 1

    # --- life ----------------------------------------------------------------------------------

    def clear(self) -> None:
        """All pages of the namespace, whoever has stored them: of this model, unless the configuration names one."""
        self._or_miss("clear", self._cache.clear, 0)

    def close(self) -> None:
        self._or_miss("close", self._cache.close, None)

    def _or_miss(self, what: str, call: Callable[[], _T], miss: _T) -> _T:
        try:
            return call()
        except Exception as error:
            self._troubles.count(f"cannot {what}", repr(error))
            return miss

    def _tell(self, items: Sequence[Item]) -> None:
        for outcome, times in Counter(item.outcome for item in items).items():
            if outcome in _NOT_STORED:
                error = next((item.error for item in items if item.error is not None), "")
                self._troubles.count(outcome.value, error, times)


def _fingerprint(config: Any) -> bytes:
    """Of what all ranks of an engine have in common, and all engines that can use its pages."""
    try:
        arguments = get_server_args()
    except ValueError:  # no server, but a cache controller by itself
        arguments = None
    fields = [f"{name}={getattr(arguments, name, None)}" for name in _ARGUMENTS]
    return fingerprint_of("sglang", _KEYS_ARE, str(config.model_name), *fields)


def _octets(page: torch.Tensor) -> Any:
    """Of a tensor of any type on the CPU."""
    return page.contiguous().reshape(-1).view(torch.uint8).numpy()


def _run_of(flags: Sequence[bool]) -> int:
    """How many are True before the first that is not."""
    return next((at for at, flag in enumerate(flags) if not flag), len(flags))
