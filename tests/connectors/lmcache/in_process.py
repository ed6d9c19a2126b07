"""LMCache's own engine for use inside an inference engine, with the configured storage plugin.

`python in_process.py CONFIGURATION load|store SEED`: in a process of its own; prints how many tokens it loaded.
"""

from __future__ import annotations

import json
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import yaml
from lmcache.utils import mock_up_broadcast_fn, mock_up_broadcast_object_fn
from lmcache.v1.cache_engine import LMCacheEngineBuilder
from lmcache.v1.config import LMCacheEngineConfig
from lmcache.v1.gpu_connector.mock_gpu_connector import MockGPUConnector
from lmcache.v1.metadata import LMCacheMetadata

CONFIGURATION = Path(__file__).with_name("configuration.yaml").read_text()
LAYERS, CHUNK, HEADS, HEAD = 4, 64, 2, 32
TOKENS = 4 * CHUNK + 17  # what is behind the last whole chunk is not cached
WHOLE = 4 * CHUNK
WAIT_S = 60.0
LOOK_AGAIN_S = 0.005


def configuration(url: str, **params: object) -> dict[str, Any]:
    """What the documentation tells an operator to write, for a small engine that keeps nothing itself."""
    written: dict[str, Any] = yaml.safe_load(CONFIGURATION.replace("kbtp://cache-server", url))
    written.update(chunk_size=CHUNK, local_cpu=False, max_local_cpu_size=0.0625)
    written["extra_config"].update({f"kbtp.{name}": value for name, value in params.items()})
    return written


class CpuConnector(MockGPUConnector):  # type: ignore[misc]
    """Between LMCache's chunks and the tensor that a test calls the engine's KV cache."""

    def get_shape(self, num_tokens: int) -> torch.Size:
        return torch.Size([2, LAYERS, num_tokens, HEADS * HEAD])

    def batched_from_gpu(self, memory_objs: Any, starts: Any, ends: Any, **said: Any) -> None:
        for one, start, end in zip(memory_objs, starts, ends, strict=True):
            one.tensor.copy_(said["kvcaches"][:, :, start:end])

    def batched_to_gpu(self, memory_objs: Any, starts: Any, ends: Any, **said: Any) -> None:
        for one, start, end in zip(memory_objs, starts, ends, strict=True):
            said["kvcaches"][:, :, start:end].copy_(one.tensor)


class Engine:
    def __init__(self, written: dict[str, Any], dtype: torch.dtype = torch.float16, **metadata: Any) -> None:
        with tempfile.NamedTemporaryFile("w", suffix=".yaml") as file:
            yaml.safe_dump(written, file)
            file.flush()
            config = LMCacheEngineConfig.from_file(file.name)
        shape = (LAYERS, 2, CHUNK, HEADS, HEAD)
        chosen = {"model_name": "llama/3-8b", "world_size": 2, "worker_id": 0, "kv_shape": shape, **metadata}
        chosen.update(local_world_size=chosen["world_size"], local_worker_id=chosen["worker_id"])
        described = LMCacheMetadata(kv_dtype=dtype, chunk_size=CHUNK, **chosen)
        self.name = f"engine {id(self)}"
        self.dtype = dtype
        self.engine = LMCacheEngineBuilder.get_or_create(
            self.name, config, described, CpuConnector(shape), mock_up_broadcast_fn, mock_up_broadcast_object_fn
        )
        self.engine.post_init()
        self.plugin = self.engine.storage_manager.storage_backends["kbtp"]

    def store(self, seed: int) -> int:
        """How many tokens of the prompt `seed` the cache has then."""
        counters = self.plugin._cache.counters
        tokens, kv = self._prompt(seed)
        self.engine.store(tokens, kvcaches=kv)
        self._wait(lambda: not self.plugin._putting)
        assert counters.bytes_stored or counters.unavailable
        return self.look_up(seed)

    def look_up(self, seed: int) -> int:
        return int(self.engine.lookup(self._prompt(seed)[0]))

    def load(self, seed: int) -> int:
        """How many tokens of the prompt `seed` were loaded; each value of them is compared."""
        tokens, kv = self._prompt(seed)
        into = torch.zeros_like(kv)
        loaded = int(self.engine.retrieve(tokens, kvcaches=into).sum())
        assert torch.equal(into[:, :, :loaded], kv[:, :, :loaded])
        return loaded

    def _prompt(self, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
        generator = torch.Generator().manual_seed(seed)
        kv = torch.randn(2, LAYERS, TOKENS, HEADS * HEAD, generator=generator).to(self.dtype)
        return torch.arange(seed * TOKENS, (seed + 1) * TOKENS), kv

    def _wait(self, predicate: Callable[[], bool]) -> None:
        nothing = threading.Event()
        end_s = time.monotonic() + WAIT_S
        while not predicate():
            assert time.monotonic() < end_s
            nothing.wait(LOOK_AGAIN_S)

    def close(self) -> None:
        LMCacheEngineBuilder.destroy(self.name)


def main() -> None:
    written, verb, seed = sys.argv[1:]
    engine = Engine(json.loads(written))
    try:
        print(json.dumps(getattr(engine, verb)(int(seed))))
    finally:
        engine.close()


if __name__ == "__main__":
    main()
