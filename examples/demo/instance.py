"""An inference instance with the keyed cache: answers a request, beginning with the longest prefix that is there.

Which instance has computed the prefix, and whether it still runs, it neither knows nor asks.
"""

from __future__ import annotations

import time
from pathlib import Path

import events
import prefix
import smollm2
from tokenizer import chat
from worker import Worker

import kbtp


def answer(worker: Worker, prompt: list[int], new_token_count: int, shared: kbtp.Cache | None) -> events.Answered:
    """Load what `shared` has of `prompt`, compute the rest, write on, and put what was not there."""
    kv = smollm2.KvCache(worker.model.shape, len(prompt), new_token_count)
    full, tail = prompt[: kv.full_token_count], prompt[kv.full_token_count :]
    keys = prefix.keys_of(full)
    values = prefix.values_of(kv, len(keys))
    found = prefix.Found()
    if shared is not None:
        shared.register(kv.blocks)
        found = prefix.load(shared, keys, values)
    start = found.values * smollm2.CHUNK_TOKENS

    began = time.perf_counter()
    if start < len(full):
        worker.model.extend(full[start:], kv, start, lambda done: events.send(events.Progress(start + done, len(full))))
    compute_s = time.perf_counter() - began
    written = worker.write(tail, kv, new_token_count)

    began = time.perf_counter()
    stored = 0 if shared is None else prefix.store(shared, keys[found.values :], values[found.values :])
    return events.Answered(
        prompt_token_count=len(prompt),
        cached_token_count=start,
        stored_token_count=stored * smollm2.CHUNK_TOKENS,
        loaded_bytes=sum(value.nbytes for value in values[: found.values]),
        look_up_s=found.look_up_s,
        load_s=found.load_s,
        compute_s=compute_s + written.first_token_s,
        store_s=time.perf_counter() - began,
        tokens=written.tokens,
        text=written.text,
    )


def main() -> None:
    worker = Worker()
    job = events.receive(events.Request)
    document = Path(job.document_path).read_text(encoding="utf-8").strip()
    prompt = worker.tokenizer.encode(chat(f"{document}\n\nQuestion: {job.question}"))

    # An instance that goes on has one cache for all its requests, and a quota for more than one of them.
    quota = max(1, len(prompt) // smollm2.CHUNK_TOKENS)
    with kbtp.Cache(job.index_url, namespace=worker.namespace, quota=quota) as shared:
        events.send(answer(worker, prompt, job.new_token_count, shared))
    if job.compare:
        events.send(answer(worker, prompt, job.new_token_count, None))


if __name__ == "__main__":
    main()
