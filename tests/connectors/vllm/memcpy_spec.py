"""vLLM's tiered offloading for an engine on the CPU: `memcpy` in place of the accelerator's copies to and from its CPU
tier, which vLLM has for accelerators alone. All else, its manager and its secondary tiers, is vLLM's own."""

from __future__ import annotations

from typing import Any

import torch
from vllm.v1.kv_offload.base import (
    CanonicalKVCaches,
    GPULoadStoreSpec,
    LoadStoreSpec,
    OffloadingWorker,
    TransferResult,
)
from vllm.v1.kv_offload.cpu.common import CPULoadStoreSpec
from vllm.v1.kv_offload.cpu.shared_offload_region import SharedOffloadRegion
from vllm.v1.kv_offload.tiering.spec import TieringOffloadingSpec


class MemcpyWorker(OffloadingWorker):
    def __init__(self, kv_caches: CanonicalKVCaches, region: SharedOffloadRegion) -> None:
        tensors = [one.tensor for one in kv_caches.tensors]
        self._blocks = [one.view(torch.int8).reshape(one.shape[0], -1) for one in tensors]
        self._rows = [region.create_next_worker_view(one.shape[1]) for one in self._blocks]
        self._region = region
        self._ended: list[TransferResult] = []

    def submit_store(self, job_id: int, src_spec: GPULoadStoreSpec, dst_spec: LoadStoreSpec) -> bool:
        return self._copy(job_id, src_spec, dst_spec, to_rows=True)

    def submit_load(
        self, job_id: int, src_spec: LoadStoreSpec, dst_spec: GPULoadStoreSpec, expedited: bool = False
    ) -> bool:
        return self._copy(job_id, dst_spec, src_spec, to_rows=False)

    def _copy(self, job_id: int, blocks: GPULoadStoreSpec, chunks: LoadStoreSpec, *, to_rows: bool) -> bool:
        assert isinstance(chunks, CPULoadStoreSpec)
        copied = 0
        for block, chunk in zip(blocks.block_ids.tolist(), chunks.chunk_ids.tolist(), strict=True):
            for in_engine, rows in zip(self._blocks, self._rows, strict=True):
                here, there = (rows[chunk], in_engine[block]) if to_rows else (in_engine[block], rows[chunk])
                here.copy_(there)
                copied += here.numel()
        self._ended.append(TransferResult(job_id, True, copied, 1e-6))
        return True

    def get_finished(self) -> list[TransferResult]:
        ended, self._ended = self._ended, []
        return ended

    def wait(self, job_ids: set[int]) -> None:
        """Nothing is on its way."""

    def shutdown(self) -> None:
        self._rows.clear()
        self._region.cleanup()


class MemcpySpec(TieringOffloadingSpec):
    def get_worker(self, kv_caches: CanonicalKVCaches) -> Any:
        region = SharedOffloadRegion(
            engine_id=self._engine_id,
            num_chunks=self.num_chunks,
            rank=self.config.parallel.rank,
            kv_bytes_per_chunk=self.kv_bytes_per_chunk,
            cpu_page_size=self.cpu_page_size_per_worker,
        )
        return MemcpyWorker(kv_caches, region)
