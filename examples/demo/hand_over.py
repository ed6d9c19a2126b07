"""The first part: a KV cache computed in one process, kept in a second, used in a third."""

from __future__ import annotations

from contextlib import AsyncExitStack
from pathlib import Path

import events
from child import THREADS, running, script, serving
from display import Display
from report import Report


async def hand_over(prompt_path: Path, new_token_count: int, pool_blocks: int, display: Display) -> Report:
    """Run the three processes, one after the other where times are taken; raises DemoFailed."""
    # Should this be cut short, the model processes end first and so do not see their target go.
    async with AsyncExitStack() as targets, AsyncExitStack() as models:
        display.say("two processes load SmolLM2-135M-Instruct ...")
        prefill = await models.enter_async_context(running("prefill", script("prefill"), environment=THREADS))
        decode = await models.enter_async_context(running("decode", script("decode"), environment=THREADS))
        ready = await prefill.hear(events.Ready)
        await decode.hear(events.Ready)

        serve = serving(pool_blocks, ready.block_bytes, "--namespace", ready.namespace)
        target = await targets.enter_async_context(serve)
        url = (await target.hear_serving()).url
        display.say(f"the target serves {pool_blocks} blocks of {ready.block_bytes:,} octets at {url}")

        await prefill.tell(events.PrefillJob(url, str(prompt_path), new_token_count))
        stored = await display.follow(prefill, "prefill", events.Stored)
        reference = await prefill.hear(events.Written)
        await prefill.end()
        display.say("the prefill process has stored its blocks and ended; the decode process loads them")

        await decode.tell(events.DecodeJob(url, stored.incarnation, stored.blocks, stored.tail, new_token_count))
        loaded = await decode.hear(events.Loaded)
        cached = await decode.hear(events.Written)
        await decode.end()
        await target.stop()

    return Report(
        prompt_tokens=stored.prompt_token_count,
        blocks=len(stored.blocks),
        octets=sum(length_bytes for _, _, length_bytes in stored.blocks),
        prefill_s=stored.prefill_s,
        store_s=stored.store_s,
        connect_s=loaded.connect_s,
        load_s=loaded.load_s,
        first_token_without_cache_s=stored.prefill_s + reference.first_token_s,
        first_token_with_cache_s=loaded.load_s + cached.first_token_s,
        reference_tokens=reference.tokens,
        reference_text=reference.text,
        cached_tokens=cached.tokens,
        cached_text=cached.text,
    )
