"""LMCache's own storage manager, which its multiprocess server is built on, with the configured second level.

`python engine.py CONFIGURATION load|store PROMPT`: the same in a process of its own; prints how many chunks it loaded.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from lmcache.v1.distributed.api import (
    FULL_ATTENTION_WINDOW_CHUNKS,
    GroupedObjectKeys,
    MemoryLayoutDesc,
    ObjectKey,
    PrefetchHandle,
    PrefetchTaskSpec,
)
from lmcache.v1.distributed.config import (
    EvictionConfig,
    L1ManagerConfig,
    L1MemoryManagerConfig,
    StorageManagerConfig,
)
from lmcache.v1.distributed.l2_adapters.config import parse_args_to_l2_adapters_config
from lmcache.v1.distributed.storage_manager import StorageManager

CONFIGURATION = Path(__file__).with_name("configuration.json").read_text()
CHUNKS = 8
MODEL = "llama/3-8b"
LAYOUT = MemoryLayoutDesc(shapes=[torch.Size([2, 4, 256, 128])], dtypes=[torch.float16])  # 512 KiB
L1_BYTES = 64 << 20
WAIT_S = 60.0
LOOK_AGAIN_S = 0.005
ENDS = ("stored", "present", "no_space", "unavailable")  # what becomes of a value that is put


def configuration(url: str, **params: object) -> dict[str, Any]:
    """What the documentation tells an operator to write, with this target, and more options if a test has some."""
    spec: dict[str, Any] = json.loads(CONFIGURATION.replace("kbtp://cache-server", url))
    spec["adapter_params"].update(params)
    return spec


def keys_of(prompt: str, chunks: int = CHUNKS, **fields: Any) -> list[ObjectKey]:
    """Of the chunks of a prompt, as LMCache has them: each the hash of all tokens up to its end."""
    chosen = {"model_name": MODEL, "kv_rank": ObjectKey.ComputeKVRank(2, 0, 2, 0), **fields}
    hashes = [hashlib.sha256(f"{prompt} {chunk}".encode()).digest() for chunk in range(chunks)]
    return [ObjectKey(chunk_hash=one, **chosen) for one in hashes]


def octets_of(key: ObjectKey, length_bytes: int) -> bytes:
    """What the cache of that chunk holds: octets that nothing else has."""
    return hashlib.shake_128(repr(key).encode()).digest(length_bytes)


class Engine:
    def __init__(self, spec: dict[str, Any]) -> None:
        l2 = parse_args_to_l2_adapters_config(argparse.Namespace(l2_adapter=[json.dumps(spec)]))
        memory = L1MemoryManagerConfig(size_in_bytes=L1_BYTES, use_lazy=False)
        self.manager = StorageManager(
            StorageManagerConfig(
                l1_manager_config=L1ManagerConfig(memory_config=memory),
                eviction_config=EvictionConfig(eviction_policy="LRU"),
                l2_adapter_config=l2,
            )
        )

    def store(self, keys: list[ObjectKey], layout: MemoryLayoutDesc = LAYOUT) -> int:
        """Has LMCache put them into its first level and so into the second; how many arrived there."""
        before = self.counters
        for key, one in self.manager.reserve_write(keys, layout).items():
            octets = memoryview(one.byte_array).cast("B")
            octets[:] = octets_of(key, len(octets))
        self.manager.finish_write(keys)
        self._wait(lambda: sum(self.counters[end] - before[end] for end in ENDS) == len(keys))
        self._empty()
        return int(self.counters["stored"] - before["stored"])

    def _empty(self) -> None:
        """The first level, of which nothing is in use any more as soon as LMCache has noticed."""

        def emptied() -> bool:
            self.manager.clear()
            return not self.manager.get_l1_usage()[0]

        self._wait(emptied)

    def _wait(self, predicate: Callable[[], bool]) -> None:
        nothing = threading.Event()
        end_s = time.monotonic() + WAIT_S
        while not predicate():
            assert time.monotonic() < end_s, self.status
            nothing.wait(LOOK_AGAIN_S)

    def begin(self, keys: list[ObjectKey], layout: MemoryLayoutDesc = LAYOUT) -> PrefetchHandle:
        group = GroupedObjectKeys(keys, keys[0].object_group_id, layout, FULL_ATTENTION_WINDOW_CHUNKS)
        return self.manager.submit_prefetch_task(PrefetchTaskSpec(key_groups=[group]))

    def end(self, handle: PrefetchHandle, keys: list[ObjectKey], deadline_s: float = WAIT_S) -> int:
        """How many chunks, from the first on, were loaded; every octet of them is compared."""
        assert self.manager.wait_prefetch_status(handle, deadline_s), f"no answer within {deadline_s} s"
        result = self.manager.query_prefetch_status(handle)
        assert result is not None
        found: int = result.l2_hit_count
        if found:
            with self.manager.read_prefetched_results(keys[:found]) as objects:
                assert objects is not None
                for key, one in zip(keys[:found], objects, strict=True):
                    octets = memoryview(one.byte_array).cast("B")
                    assert octets == octets_of(key, len(octets))
            self.manager.finish_read_prefetched(keys[:found])
        self._empty()
        return found

    def load(self, keys: list[ObjectKey], layout: MemoryLayoutDesc = LAYOUT) -> int:
        return self.end(self.begin(keys, layout), keys)

    @property
    def status(self) -> dict[str, Any]:
        whole: dict[str, Any] = self.manager.report_status()
        return whole

    @property
    def counters(self) -> dict[str, Any]:
        counted: dict[str, Any] = self.status["l2_adapters"][0]["cache"]
        return counted

    def close(self) -> None:
        self.manager.close()


def main() -> None:
    spec, verb, prompt = sys.argv[1:]
    engine = Engine(json.loads(spec))
    try:
        print(json.dumps(getattr(engine, verb)(keys_of(prompt))))
    finally:
        engine.close()


if __name__ == "__main__":
    main()
