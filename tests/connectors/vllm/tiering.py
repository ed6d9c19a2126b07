"""vLLM's tiered offloading without an engine: its spec, its manager, and rows of octets in place of a KV cache.

Started as a program it stores chunks and ends: `tiering.py URL FIRST COUNT`.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import sys
import threading
import time
import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from vllm.v1.kv_offload.base import LookupResult, ReqContext, ScheduleEndContext, make_offload_key
from vllm.v1.kv_offload.config import (
    OffloadingCacheConfig,
    OffloadingConfig,
    OffloadingGroupConfig,
    OffloadingModelConfig,
    OffloadingParallelConfig,
)
from vllm.v1.kv_offload.factory import OffloadingSpecFactory

ROW_BYTES = 256 * 1024
CPU_CHUNKS = 16
TICK_S = 0.001
SETTLED_S = 30.0

CONFIGURATION = json.loads((Path(__file__).parent / "configuration.tier.json").read_text())


def configuration(target: str, **options: Any) -> dict[str, Any]:
    """The tested one, with the address of a target that there is."""
    extra = json.loads(json.dumps(CONFIGURATION["kv_connector_extra_config"]))
    extra["secondary_tiers"][0].update({"url": target, **options})
    return extra


def config_of(extra: dict[str, Any]) -> OffloadingConfig:
    parallel = dict.fromkeys(("world_size", "tp_size", "pp_size", "pcp_size", "dcp_size", "data_parallel_size"), 1)
    return OffloadingConfig(
        groups=(OffloadingGroupConfig(tokens_per_block=16, layer_names=("l0", "l1"), group_id=0),),
        worker_kv_bytes_per_block=ROW_BYTES,
        enable_kv_cache_events=False,
        extra_config={**extra, "cpu_bytes_to_use": CPU_CHUNKS * ROW_BYTES},
        engine_id=uuid.uuid4().hex,
        model=OffloadingModelConfig(name="a/model", dtype="bfloat16"),
        cache=OffloadingCacheConfig(tokens_per_hash=16, blocks_per_chunk=1),
        parallel=OffloadingParallelConfig(
            rank=0, data_parallel_index=0, data_parallel_rank_local=None, is_parallelism_agnostic=False, **parallel
        ),
    )


def key(number: int, group: int = 0) -> Any:
    return make_offload_key(hashlib.sha256(b"tokens %d" % number).digest(), group)


def row(number: int) -> np.ndarray[Any, Any]:
    return np.random.default_rng(number).integers(0, 256, ROW_BYTES, dtype=np.uint8)


class Tiering:
    """What the connector in a scheduler does with vLLM's manager, step by step."""

    def __init__(self, target: str, config: OffloadingConfig | None = None, **options: Any) -> None:
        self.config = config or config_of(configuration(target, **options))
        self.manager = OffloadingSpecFactory.create_spec(self.config).get_manager()
        self.tier = self.manager.secondary_tiers[0]
        self.view = np.asarray(self.manager.primary_tier.get_kv_memoryview()).view(np.uint8)
        self._requests = 0
        self._nothing = threading.Event()

    def close(self) -> None:
        self.view = None  # type: ignore[assignment]
        self.manager.shutdown()

    def step(self, new: Sequence[str] = ()) -> None:
        self.manager.on_schedule_end(ScheduleEndContext(new_req_ids=list(new), preempted_req_ids=[]))
        self._nothing.wait(TICK_S)

    def settle(self) -> None:
        end_s = time.monotonic() + SETTLED_S
        while self.manager.has_pending_work():
            assert time.monotonic() < end_s, "transfers do not end"
            self.step()
        self.step()

    def begin(self) -> ReqContext:
        self._requests += 1
        request = ReqContext(req_id=f"request {self._requests}")
        self.manager.on_new_request(request)
        return request

    def store(self, numbers: Sequence[int]) -> None:
        """Rows of these numbers, a part of the CPU tier at a time, as an accelerator would leave them there."""
        for at in range(0, len(numbers), CPU_CHUNKS // 2):
            self.submit(numbers[at : at + CPU_CHUNKS // 2])
            self.settle()

    def submit(self, numbers: Sequence[int]) -> None:
        request = self.begin()
        output = self.manager.prepare_store([key(number) for number in numbers], request)
        assert output is not None
        by_key = {key(number): number for number in numbers}
        for stored, chunk in zip(output.keys_to_store, output.store_spec.chunk_ids, strict=True):
            self.view[chunk] = row(by_key[stored])
        self.manager.complete_store(output.keys_to_store, request)
        self.manager.on_request_finished(request)

    def load(self, numbers: Sequence[int], group: int = 0) -> list[bool]:
        """Which of them are there; for those that are every octet is compared."""
        request = self.begin()
        keys = [key(number, group) for number in numbers]
        end_s = time.monotonic() + SETTLED_S
        while True:
            found = [self.manager.lookup(one, request) for one in keys]
            if all(one in (LookupResult.HIT, LookupResult.MISS) for one in found):
                break
            assert time.monotonic() < end_s, "look-ups do not end"
            self.step([request.req_id])
        hits = [number for number, one in zip(numbers, found, strict=True) if one is LookupResult.HIT]
        hit_keys = [key(number, group) for number in hits]
        spec = self.manager.prepare_load(hit_keys, request)
        for number, chunk in zip(hits, spec.chunk_ids, strict=True):
            assert np.array_equal(self.view[chunk], row(number)), f"chunk {number} has other octets"
        self.manager.complete_load(hit_keys, request)
        self.manager.on_request_finished(request)
        self.settle()
        return [one is LookupResult.HIT for one in found]

    def forget(self) -> None:
        """The CPU tier is empty then; what its secondary tier has stays there."""
        self.manager.reset_cache()

    def with_other(self, url: str, **parts: dict[str, Any]) -> Tiering:
        """One whose configuration differs: `model={"name": "another"}`."""
        config = config_of(configuration(url))
        for part, fields in parts.items():
            config = dataclasses.replace(config, **{part: dataclasses.replace(getattr(config, part), **fields)})
        return Tiering(url, config)


if __name__ == "__main__":
    tiering = Tiering(sys.argv[1], writer="another process")
    tiering.store(range(int(sys.argv[2]), int(sys.argv[2]) + int(sys.argv[3])))
    print("stored", tiering.tier.cache.counters.stored, flush=True)
    sys.stdin.read()  # its values last as long as it does, and the linger time
    tiering.close()
