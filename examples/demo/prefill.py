"""The prefill process: computes the KV cache of a prompt and ALLOC_STOREs its full blocks, sealed.

It then goes on and writes the continuation itself, from its own cache: the text to compare with.
"""

from __future__ import annotations

import secrets
import sys
import time
from pathlib import Path

import events
import smollm2
from worker import Worker

import kbtp


def prefill_and_store(worker: Worker, url: str, prompt: list[int], cache: smollm2.KvCache) -> events.Stored:
    """Compute the full blocks of `prompt` into `cache` and store them, each under a handle of its own."""
    full, tail = prompt[: cache.full_token_count], prompt[cache.full_token_count :]
    # An initiator with an ID keeps its blocks beyond its session (profile 3, Identity): they must outlive
    # this process. Those of an anonymous one are freed when its stream ends.
    with kbtp.connect(
        url,
        initiator_id=secrets.token_bytes(16),
        quota=cache.full_block_count,
        handles=cache.full_block_count,
        name="prefill",
        namespace=worker.namespace,
    ) as client:
        client.register(cache.blocks)

        began = time.perf_counter()
        worker.model.extend(full, cache, 0, lambda done: events.send(events.Progress(done, len(full))))
        prefill_s = time.perf_counter() - began

        began = time.perf_counter()
        results = client.alloc_store_many(cache.full_blocks, seal=True)
        store_s = time.perf_counter() - began
        for result in results:
            result.raise_for_status()
        refs = [result.ref for result in results]
        blocks = [(ref.handle, ref.generation, ref.length_bytes) for ref in refs]
        return events.Stored(len(prompt), client.incarnation, blocks, tail, prefill_s, store_s)


def main() -> None:
    worker = Worker()
    job = events.receive(events.PrefillJob)
    prompt = worker.tokenizer.encode(Path(job.prompt_path).read_text(encoding="utf-8").strip())
    if len(prompt) <= smollm2.BLOCK_TOKENS:
        sys.exit(f"{job.prompt_path}: {len(prompt)} tokens; it takes more than {smollm2.BLOCK_TOKENS} to fill a block")
    cache = smollm2.KvCache(worker.model.shape, len(prompt), job.new_token_count)

    stored = prefill_and_store(worker, job.url, prompt, cache)
    events.send(stored)
    events.send(worker.write(stored.tail, cache, job.new_token_count))


if __name__ == "__main__":
    main()
