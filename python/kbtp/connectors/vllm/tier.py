"""A secondary tier of vLLM's `TieringOffloadingSpec`: what its CPU tier holds goes to the cache, and comes back.

All methods run in the thread of the scheduler and only leave work to others: look-ups to vLLM's own
`AsyncLookupManager`, transfers to the threads here. Rows of the CPU tier are stored and loaded in place.
"""

from __future__ import annotations

import gc
import logging
import time
from collections.abc import Collection, Iterable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from typing import Any

import vllm
from vllm.v1.kv_offload.base import (
    Locality,
    LookupResult,
    OffloadingSpec,
    OffloadKey,
    ReqContext,
    RequestOffloadingContext,
    ScheduleEndContext,
)
from vllm.v1.kv_offload.tiering.async_lookup import AsyncLookupManager
from vllm.v1.kv_offload.tiering.backpressure import BackpressureDetector
from vllm.v1.kv_offload.tiering.base import JobResult, SecondaryTierManager, TransferJob

from kbtp.connectors.names import fingerprint_of, key_of
from kbtp.connectors.opening import open_cache
from kbtp.connectors.troubles import Troubles

log = logging.getLogger("kbtp.connectors.vllm")

TIMEOUT_S = 2.0  # of each exchange with the index or a target, and how long a load may wait for its turn
STORE_PATIENCE_S = 30.0  # how long a store may: its rows of the CPU tier are pinned meanwhile
LOAD_THREADS = 2  # one waits for a target while the other copies


def identity_of(spec: OffloadingSpec, row_bytes: int) -> bytes:
    """Of all that decides what the octets of a row mean; engines for which it is equal may share rows.

    A vLLM key is the hash of the tokens, with LoRA and images, and the number of the group: nothing of this is in it.
    """
    config = spec.config
    parallel = config.parallel
    fields: list[bytes | str | int] = ["vllm tier", 1, vllm.__version__, config.model.name, config.model.dtype]
    fields += [config.cache.tokens_per_hash, config.cache.blocks_per_chunk, row_bytes, config.worker_kv_bytes_per_block]
    fields += [str(config.kv_cache_layout), int(config.canonical_layout), int(config.replicated_layout)]
    if not parallel.is_parallelism_agnostic:
        fields += [parallel.world_size, parallel.tp_size, parallel.pp_size, parallel.pcp_size, parallel.dcp_size]
    for group in config.groups:
        fields += ["group", group.group_id, group.tokens_per_block, *group.layer_names]
    return fingerprint_of(*fields)


@dataclass(slots=True)
class Job:
    """One transfer on its way; `future` has for each key whether it was moved, and how long that took."""

    future: Future[tuple[list[bool], float]]
    transfer: TransferJob


class Lookups(AsyncLookupManager):
    """One look-up a request and scheduler step, in a thread of its own."""

    def __init__(self, tier: KbtpTier) -> None:
        self._tier = tier
        super().__init__(tier_type=tier.tier_type)

    def batch_lookup(self, keys: list[OffloadKey], req_context: ReqContext) -> Iterable[bool]:
        return [item.ok for item in self._tier.cache.contains_many(self._tier.names(keys))]


class KbtpTier(SecondaryTierManager):
    """`"secondary_tiers": [{"type": "KbtpTier", "module_path": "kbtp.connectors.vllm.tier", "url": URL}]`"""

    def __init__(
        self,
        offloading_spec: OffloadingSpec,
        primary_kv_view: memoryview,
        tier_type: str,
        backpressure_detector: BackpressureDetector | None = None,
        *,
        timeout_s: float = TIMEOUT_S,
        locality: str = Locality.REMOTE.value,
        **options: Any,
    ) -> None:
        """`options` are those of `open_cache`. Raises `ApiMisuse` for what cannot work; an index or target that is not
        there is no such thing."""
        super().__init__(offloading_spec, primary_kv_view, tier_type, backpressure_detector)
        self.locality = Locality(locality)
        self._identity = identity_of(offloading_spec, self.block_size_bytes)
        self._timeout_s = timeout_s
        self.troubles = Troubles(log)
        if isinstance(options.get("writer"), str):  # each replica of the engine is a writer of its own
            options["writer"] += f" {offloading_spec.config.parallel.data_parallel_index}"
        self.cache = open_cache({"timeout_s": timeout_s, "connect_timeout_s": timeout_s, **options})
        self._rows = primary_kv_view.cast("B")
        self._registration = self.cache.register(self._rows)
        self._loading = ThreadPoolExecutor(LOAD_THREADS, "kbtp-vllm-load")
        self._storing = ThreadPoolExecutor(1, "kbtp-vllm-store")
        self._jobs: dict[int, Job] = {}
        self._lookups = Lookups(self)
        log.info("rows of %d octets, identity %s", self.block_size_bytes, self._identity.hex())

    def names(self, keys: Collection[OffloadKey]) -> list[bytes]:
        return [key_of(self._identity, bytes(key)) for key in keys]

    # --- look-ups ------------------------------------------------------------------------------

    def lookup(self, key: OffloadKey, req_context: ReqContext) -> LookupResult:
        found = self._lookups.lookup(key, req_context)
        return LookupResult.RETRY if found is None else LookupResult.HIT if found else LookupResult.MISS

    def on_new_request(self, req_context: ReqContext) -> RequestOffloadingContext:
        return RequestOffloadingContext()

    def on_request_finished(self, req_context: ReqContext) -> None:
        self._lookups.cleanup(req_context.req_id)

    def on_schedule_end(self, context: ScheduleEndContext) -> None:
        self._lookups.flush()

    # --- transfers -----------------------------------------------------------------------------

    def submit_store(self, job_metadata: TransferJob) -> None:
        self._submit(self._storing, job_metadata, STORE_PATIENCE_S)

    def submit_load(self, job_metadata: TransferJob) -> None:
        self._submit(self._loading, job_metadata, self._timeout_s)

    def _submit(self, threads: ThreadPoolExecutor, transfer: TransferJob, patience_s: float) -> None:
        begin_by_s = time.monotonic() + patience_s
        try:
            future = threads.submit(self._move, transfer, begin_by_s)
        except RuntimeError as error:  # it is shut down
            self.troubles.count("a transfer was not begun", error)
            future = Future()
            future.set_result(([False] * len(transfer.keys), 0.0))
        self._jobs[transfer.job_id] = Job(future, transfer)

    def _move(self, transfer: TransferJob, begin_by_s: float) -> tuple[list[bool], float]:
        """Raises nothing: what was not moved has False."""
        kind = "load" if transfer.is_promotion else "store"
        began_s = time.monotonic()
        moved = [False] * len(transfer.keys)
        try:
            if began_s > begin_by_s:
                self.troubles.count(f"{kind}s given up that had waited too long", "those before it took all the time")
            else:
                moved = self._moved(transfer)
        except Exception as error:
            self.troubles.count(f"{kind}s that failed", repr(error))
        return moved, time.monotonic() - began_s

    def _moved(self, transfer: TransferJob) -> list[bool]:
        names = self.names(transfer.keys)
        step = self.block_size_bytes
        rows = [self._rows[chunk * step : (chunk + 1) * step] for chunk in transfer.chunk_ids.tolist()]
        if transfer.is_promotion:
            items = self.cache.get_many_into(names, rows)
            moved = [item.ok and item.length_bytes == step for item in items]
        else:
            items = self.cache.put_many(names, rows)
            moved = [item.ok for item in items]
        for item, good in zip(items, moved, strict=True):
            if not good:
                kind = f"chunks not {'loaded' if transfer.is_promotion else 'stored'}: {item.outcome.value}"
                self.troubles.count(kind, item.error or "see the counters of the cache")
        return moved

    def get_finished_jobs(self) -> Iterable[JobResult]:
        return [self._result(number) for number, job in list(self._jobs.items()) if job.future.done()]

    def _result(self, number: int) -> JobResult:
        job = self._jobs.pop(number)
        keys = list(job.transfer.keys)
        moved, took_s = ([False] * len(keys), 0.0) if job.future.cancelled() else job.future.result()
        if job.transfer.is_promotion:
            # Else the same request would be promised them again, and wait for them again.
            self._lookups.mark_miss([key for key, good in zip(keys, moved, strict=True) if not good])
        return JobResult(
            number,
            all(moved),
            tuple(key for key, good in zip(keys, moved, strict=True) if good) or None,
            took_s,
            sum(moved) * self.block_size_bytes,
        )

    def drain_jobs(self) -> None:
        """Those that have not begun end at once, those that have by the deadlines of the cache."""
        wait([job.future for job in self._jobs.values() if not job.future.cancel()])

    def shutdown(self) -> None:
        self._loading.shutdown(cancel_futures=True)
        self._storing.shutdown(cancel_futures=True)
        self._lookups.shutdown()
        self._registration.revoke()
        self.cache.close()
        gc.collect()  # what has ended refers to itself in circles, and vLLM unmaps the rows next
        self._rows.release()
