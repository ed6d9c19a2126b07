"""SGLang's cache controller, its threads and a host pool of its own, without a model.

As a program, `python engine.py store|load URL`: what a second process of an engine would do, and one line about it.
"""

from __future__ import annotations

import json
import sys
import threading
import types
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import absent  # noqa: F401
import torch
from sglang.srt.managers import cache_controller
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool, MLATokenToKVPool
from sglang.srt.mem_cache.pool_host.mha import MHATokenToKVPoolHost
from sglang.srt.mem_cache.pool_host.mla import MLATokenToKVPoolHost
from sglang.srt.server_args import ServerArgs, set_global_server_args_for_scheduler

CONFIGURATION = json.loads((Path(__file__).parent / "configuration.json").read_text())
PAGE, LAYERS, HEADS, HEAD_DIM, TOKENS = 64, 4, 2, 64, 16384
DEADLINE_S = 15.0  # of one operation, on a machine that is busy
RANK = {
    f"{group}_{what}": of for group in ("tp", "pp", "attn_tp", "attn_dcp") for what, of in (("rank", 0), ("size", 1))
}


class Engine:
    """What SGLang's scheduler has to do with storage: pages are stored from the host pool, and loaded into it."""

    def __init__(
        self, url: str, *, layout: str = "page_first", dtype: torch.dtype = torch.float16, model: str = "model",
        tp: tuple[int, int] = (0, 1), arguments: dict[str, str] | None = None, mla: bool = False, **options: object,
    ) -> None:  # fmt: skip
        device, self.host = (_mla if mla else _mha)(layout, dtype)
        parallel = types.SimpleNamespace(**{**RANK, "attn_dp_rank": 0, "tp_rank": tp[0], "tp_size": tp[1]})
        cache_controller.get_parallel = lambda: parallel  # what torch.distributed tells else
        cache_controller.is_dp_attention_enabled = lambda: False
        set_global_server_args_for_scheduler(ServerArgs(model_path="dummy", device="cpu", **(arguments or {})))
        self.controller = cache_controller.HiCacheController(
            types.SimpleNamespace(get_kvcache=lambda: device), self.host, PAGE, tp_group=None,
            load_cache_event=threading.Event(), write_policy="write_through", io_backend="direct",
            storage_backend="dynamic", prefetch_threshold=PAGE, model_name=model,
            storage_backend_extra_config={**CONFIGURATION, "url": url, **options},
        )  # fmt: skip
        self.requests = 0

    @property
    def counters(self) -> dict[str, Any]:
        return self.controller.storage_backend.counters

    @property
    def threads_live(self) -> bool:
        controller = self.controller
        threads = (controller.prefetch_thread, controller.prefetch_io_aux_thread, controller.backup_thread)
        return all(thread.is_alive() for thread in threads)

    def store(self, tokens: list[int]) -> int:
        """Store the pages of `tokens`, as `content` of each has it; how many pages the engine was told are stored."""
        hashes = self.hashes(tokens)
        with self._room(len(hashes)) as (indices, places):
            for place, page_hash in zip(places, hashes, strict=True):
                self.host.set_from_flat_data_page(place, self.content(page_hash))
            self.controller.write_storage(indices, tokens, hash_value=hashes, prefix_keys=[])
            return self.controller.ack_backup_queue.get(timeout=DEADLINE_S).completed_tokens // PAGE

    def load(self, tokens: list[int]) -> int:
        """Load the longest prefix of `tokens` that there is; how many pages. Each is what `content` says."""
        self.requests += 1
        controller = self.controller
        operation = controller.prefetch(f"request {self.requests}", tokens, None, [])
        assert controller.prefetch_hit_queue.get(timeout=DEADLINE_S) is operation
        if not operation.storage_hit_count:
            return 0
        with self._room(operation.storage_hit_count // PAGE) as (indices, places):
            for place in places:  # nothing of it was there before
                self.host.set_from_flat_data_page(place, torch.zeros_like(self.host.get_data_page(place)))
            operation.host_indices = indices
            controller.prefetch_buffer.put(operation)
            loaded = 0
            while not (ack := controller.ack_prefetch_queue.get(timeout=DEADLINE_S)).completed_req:
                loaded = ack.completed_tokens // PAGE
            for place, page_hash in list(zip(places, self.hashes(tokens), strict=False))[:loaded]:
                page = self.host.get_data_page(place).view(torch.uint8)
                assert torch.equal(page, self.content(page_hash).view(torch.uint8)), "a page that nobody stored"
        return loaded

    @staticmethod
    def hashes(tokens: list[int]) -> list[str]:
        """By which SGLang names the pages of `tokens`."""
        names: list[str] = cache_controller.get_storage_hash_str(tokens, None, page_size=PAGE)
        return names

    def content(self, page_hash: str) -> torch.Tensor:
        """A page that says by itself which one it is."""
        random = torch.Generator().manual_seed(int(page_hash[:15], 16))
        octets = self.host.get_dummy_flat_data_page().nbytes
        return torch.randint(0, 256, (octets,), dtype=torch.uint8, generator=random).view(self.host.dtype)

    def close(self) -> None:
        self.controller.detach_storage_backend()

    @contextmanager
    def _room(self, pages: int) -> Iterator[tuple[torch.Tensor, list[int]]]:
        indices = self.host.alloc(pages * PAGE)
        try:
            yield indices, indices[::PAGE].tolist()
        finally:
            self.host.free(indices)


def _mha(layout: str, dtype: torch.dtype) -> tuple[Any, Any]:
    device = MHATokenToKVPool(
        size=TOKENS, page_size=PAGE, dtype=dtype, head_num=HEADS, head_dim=HEAD_DIM, layer_num=LAYERS,
        device="cpu", enable_memory_saver=False,
    )  # fmt: skip
    host = MHATokenToKVPoolHost(
        device._mha_buffer_info(), 2.0, 0, PAGE, layout, pin_memory=False, device="cpu", device_capacity_tokens=TOKENS,
        start_layer=0, end_layer=LAYERS,
    )  # fmt: skip
    return device, host


def _mla(layout: str, dtype: torch.dtype) -> tuple[Any, Any]:
    device = MLATokenToKVPool(
        size=TOKENS, page_size=PAGE, dtype=dtype, kv_lora_rank=128, qk_rope_head_dim=64, layer_num=LAYERS,
        device="cpu", enable_memory_saver=False,
    )  # fmt: skip
    host = MLATokenToKVPoolHost(
        device._mla_buffer_info(), 2.0, 0, PAGE, layout, pin_memory=False, device="cpu", device_capacity_tokens=TOKENS,
        start_layer=0, end_layer=LAYERS, target_layer_num=LAYERS,
    )  # fmt: skip
    return device, host


def document(number: int, pages: int) -> list[int]:
    """The tokens of one."""
    return list(range(number * 1_000_000, number * 1_000_000 + pages * PAGE))


if __name__ == "__main__":
    what, url, number, pages = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
    engine = Engine(url)
    print(json.dumps({"pages": getattr(engine, what)(document(number, pages)), "counters": engine.counters}))
    engine.close()
