"""The decode process: LOADs a prompt's KV cache into place and continues a text that it has never seen."""

from __future__ import annotations

import time

import events
import smollm2
from worker import Worker

import kbtp


def load_cache(worker: Worker, job: events.DecodeJob, cache: smollm2.KvCache) -> events.Loaded:
    """LOAD the job's blocks, all at once, into the first blocks of `cache`."""
    began = time.perf_counter()
    # It binds no block and needs no handle of its own: any initiator of the trust domain may LOAD (profile 3).
    with kbtp.connect(job.url, quota=0, handles=1, name="decode", namespace=worker.namespace) as client:
        if client.incarnation != job.incarnation:
            raise RuntimeError("the target has started anew since the prefill: the blocks are gone")
        client.register(cache.blocks)
        connect_s = time.perf_counter() - began

        began = time.perf_counter()
        results = client.load_many([kbtp.BlockRef(*block) for block in job.blocks], into=cache.full_blocks)
        load_s = time.perf_counter() - began
    for result in results:
        result.raise_for_status()
        if result.length_bytes != worker.model.shape.block_bytes:
            raise RuntimeError(f"a block of {result.length_bytes} octets, not {worker.model.shape.block_bytes}")
    return events.Loaded(connect_s, load_s)


def main() -> None:
    worker = Worker()
    job = events.receive(events.DecodeJob)
    prompt_token_count = len(job.blocks) * smollm2.BLOCK_TOKENS + len(job.tail)
    cache = smollm2.KvCache(worker.model.shape, prompt_token_count, job.new_token_count)

    events.send(load_cache(worker, job, cache))
    events.send(worker.write(job.tail, cache, job.new_token_count))


if __name__ == "__main__":
    main()
