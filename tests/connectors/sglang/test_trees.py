"""SGLang's own prefix tree over the connector, by SGLang's own test kit: device, host pool, target, and back."""

from __future__ import annotations

import json
import unittest
from typing import Any, ClassVar
from unittest import mock

import pytest
import torch
from engine import CONFIGURATION
from sglang.srt.mem_cache.base_prefix_cache import CacheRequestHandle
from sglang.srt.mem_cache.pool_host import common
from sglang.srt.mem_cache.pool_host.mamba import MambaPoolHost
from sglang.srt.mem_cache.pool_host.mha import MHATokenToKVPoolHost
from sglang.srt.mem_cache.unified_cache.components.base import ComponentType
from sglang.srt.mem_cache.utils import get_storage_hash_str
from sglang.srt.runtime_context import get_parallel
from sglang.srt.server_args import ServerArgs, set_global_server_args_for_scheduler
from sglang.test.kits.unified_radix_cache import fixtures
from sglang.test.kits.unified_radix_cache.config import CacheConfig
from sglang.test.kits.unified_radix_cache.storage import UnifiedRadixCacheStorageFixtures

PAGE = 16


def _by_token(pool: MHATokenToKVPoolHost, buffer: torch.Tensor, layer: int) -> torch.Tensor:
    """A layer of a host pool, a row a token, whatever the layout."""
    at = buffer[layer] if pool.layout == "layer_first" else buffer[:, layer]
    return at.reshape(pool.size, -1) if pool.layout == "layer_first" else at.flatten(1)


def _to_host(self: Any, device_pool: object, host_indices: Any, device_indices: Any, io_backend: str) -> None:
    """What a kernel does on a GPU."""
    for layer in range(self.layer_num):
        for host, device in ((self.k_buffer, self.device_k_buffers), (self.v_buffer, self.device_v_buffers)):
            _by_token(self, host, layer)[host_indices] = device[layer].flatten(1)[device_indices]


def _to_device(
    self: Any, device_pool: object, host_indices: Any, device_indices: Any, layer_id: int, io_backend: str, **_: object
) -> None:
    for host, device in ((self.k_buffer, self.device_k_buffers), (self.v_buffer, self.device_v_buffers)):
        device[layer_id].flatten(1)[device_indices] = _by_token(self, host, layer_id)[host_indices]


def _states_to_host(src_layers: Any, dst: Any, src_indices: Any, dst_indices: Any, **_: object) -> None:
    for layer, src in enumerate(src_layers):
        dst[:, layer].flatten(1)[dst_indices] = src[src_indices].flatten(1)


def _states_to_device(
    src: Any, dst: Any, src_indices: Any, dst_indices: Any, layer_id: int, num_layers: int, io_backend: str
) -> None:
    dst[dst_indices] = src[:, layer_id].flatten(1)[src_indices].reshape(dst[dst_indices].shape)


class Trees(UnifiedRadixCacheStorageFixtures, unittest.TestCase):
    layout: ClassVar[str] = "page_first"
    left_of_a_gap: ClassVar[int] = 3 * PAGE
    cfg = CacheConfig(
        page_size=PAGE, num_layers=4, full_attention_layer_ids=(0, 1, 2, 3), kv_size=512, dtype=torch.float16
    )

    @pytest.fixture(autouse=True)
    def _served(self, cluster: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        self.url = cluster.url
        monkeypatch.setattr(fixtures, "get_device", lambda *_: "cpu")
        monkeypatch.setattr(common, "_cuda_host_register", lambda *_, **__: None)
        monkeypatch.setattr(MHATokenToKVPoolHost, "backup_from_device_all_layer", _to_host)
        monkeypatch.setattr(MambaPoolHost, "_copy_tensor_pf_lf", staticmethod(_states_to_device))
        monkeypatch.setattr(MambaPoolHost, "_copy_tensor_all_layers_lf_pf", staticmethod(_states_to_host))
        monkeypatch.setattr(MHATokenToKVPoolHost, "load_to_device_per_layer", _to_device)

    def _init_hicache(self, cache: Any, **_: object) -> None:
        ranks = get_parallel().override(tp_rank=0, tp_size=1, pp_rank=0, pp_size=1)
        ranks.__enter__()
        self.addCleanup(ranks.__exit__, None, None, None)
        arguments = ServerArgs(
            model_path="dummy", device="cpu", page_size=PAGE, hicache_io_backend="kernel",
            hicache_mem_layout=self.layout, hicache_write_policy="write_through", hicache_storage_backend="dynamic",
            hicache_storage_prefetch_policy="wait_complete",
            hicache_storage_backend_extra_config=json.dumps(
                {**CONFIGURATION, "url": self.url, "prefetch_threshold": 1}
            ),
        )  # fmt: skip
        set_global_server_args_for_scheduler(arguments)
        with mock.patch.object(common, "_cuda_host_register"):
            cache.init_hicache(arguments, cache.cache_init_params)
        self.addCleanup(fixtures.drop_hicache_atexit_pin, cache)
        self.addCleanup(cache.release_host_resources)
        cache.write_through_threshold = 1 << 30
        cache.load_back_threshold = 0
        controller = cache.cache_controller
        controller.prefetch_capacity_limit = max(controller.prefetch_capacity_limit, controller.mem_pool_host.size)
        self.addCleanup(controller._stop_storage_threads)

    def _storage(self, cache: Any) -> Any:
        return cache.cache_controller.storage_backend

    @pytest.mark.requirement("exact")
    def test_a_prefix_goes_to_the_target_and_back_to_the_device(self) -> None:
        tokens = self._make_seq(1, 8)
        stored = self._l3_produce(None, tokens, marker=3.0)
        tree, allocator, _ = self._l3_consumer(None)  # empty, as that of another engine
        self._consume_prefetch(tree, tokens, CacheRequestHandle("request", 0))
        match = fixtures.match_prefix(tree, tokens)
        assert match.host_hit_length == len(tokens)
        self._load_back_node(tree, match.last_host_node)
        match = fixtures.match_prefix(tree, tokens)
        assert match.device_prefix_len == len(tokens)
        loaded = self._snapshot_full_kv(allocator, tree.path_device_indices(match.last_device_node))
        assert all(torch.equal(mine, yours) for mine, yours in zip(loaded, stored, strict=True))
        told = self._storage(tree).counters
        assert told["misses"] == told["corrupt_values"] == 0
        assert not any(name.startswith("cannot") for name in told), told

    @pytest.mark.requirement("corrupt")
    def test_a_page_that_is_gone_ends_the_prefix(self) -> None:
        tokens = self._make_seq(5000, 6)
        self._l3_produce(None, tokens, marker=5.0)
        tree, _, _ = self._l3_consumer(None)
        storage = self._storage(tree)
        pool = storage._pools["kv"]
        assert storage._cache.delete(pool.names(_hashes(tokens))[3 * len(pool.segments)])
        self._consume_prefetch(tree, tokens, CacheRequestHandle("request", 0))
        assert fixtures.match_prefix(tree, tokens).host_hit_length == self.left_of_a_gap


def _hashes(tokens: list[int]) -> list[str]:
    names: list[str] = get_storage_hash_str(tokens, None, page_size=PAGE)
    return names


class TreesByLayer(Trees):
    layout = "layer_first"


class SlidingWindows(Trees):
    """A second pool, of which the end of the prefix alone is wanted."""

    layout = "layer_first"
    cfg = CacheConfig(
        page_size=PAGE, components=(ComponentType.FULL, ComponentType.SWA), num_layers=4, sliding_window_size=2 * PAGE,
        full_attention_layer_ids=(1, 3), kv_size=512, dtype=torch.float16,
    )  # fmt: skip

    @pytest.mark.requirement("exact")
    def test_the_window_comes_with_the_prefix(self) -> None:
        tokens = self._make_seq(1, 8)
        self._l3_produce(None, tokens)
        tree, _, _ = self._l3_consumer(None)
        self._consume_prefetch(tree, tokens, CacheRequestHandle("request", 0))
        assert self._swa_host_on_path(tree, tokens)
        assert "swa" in self._storage(tree)._pools


class States(Trees):
    """A second pool, of which the state at the end of what was stored is wanted, and no other is there."""

    left_of_a_gap = 0
    cfg = CacheConfig(
        page_size=PAGE, components=(ComponentType.FULL, ComponentType.MAMBA), num_layers=4, mamba_cache_size=60,
        full_attention_layer_ids=(1, 3), kv_size=512, dtype=torch.float16, enable_mamba_extra_buffer=True,
    )  # fmt: skip

    @pytest.mark.requirement("exact")
    def test_the_state_comes_with_the_prefix(self) -> None:
        tokens = self._make_seq(1, 8)
        self._l3_produce(None, tokens)
        tree, _, _ = self._l3_consumer(None)
        self._consume_prefetch(tree, tokens, CacheRequestHandle("request", 0))
        match = fixtures.match_prefix(tree, tokens)
        assert match.host_hit_length == len(tokens)
        assert fixtures.node_host_value(tree, match.last_host_node, ComponentType.MAMBA) is not None
        assert self._storage(tree)._pools["mamba"].in_place


del UnifiedRadixCacheStorageFixtures
