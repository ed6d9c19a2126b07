"""The second part: two instances are asked about one document, and the second finds its beginning in the cache."""

from __future__ import annotations

from contextlib import AsyncExitStack
from pathlib import Path

import events
from child import THREADS, running, script, serving
from display import Display
from prefix import VALUE_BLOCKS
from report import SharedPrefix


async def share(
    document_path: Path, questions: tuple[str, str], new_token_count: int, pool_blocks: int, display: Display
) -> SharedPrefix:
    """Run the target and both instances, one after the other where times are taken; raises DemoFailed."""
    async with AsyncExitStack() as targets, AsyncExitStack() as models:
        display.say("two instances load the model ...")
        instances = [
            await models.enter_async_context(running(name, script("instance"), environment=THREADS))
            for name in ("first instance", "second instance")
        ]
        for instance in instances:
            ready = await instance.hear(events.Ready)

        # A block as long as a value: one request for each.
        serve = serving(pool_blocks, VALUE_BLOCKS * ready.block_bytes, "--namespace", ready.namespace, "--index")
        target = await targets.enter_async_context(serve)
        served = await target.hear_serving()
        display.say(f"the target serves at {served.url}, its index at {served.index_url}")

        asked = [
            events.Request(served.index_url, str(document_path), question, new_token_count, compare)
            for question, compare in zip(questions, (False, True), strict=True)
        ]
        await instances[0].tell(asked[0])
        first = await display.follow(instances[0], "first request", events.Answered)
        await instances[0].end()
        display.say("the first instance has put what it computed into the cache, and ended")

        await instances[1].tell(asked[1])
        second = await display.follow(instances[1], "second request", events.Answered)
        compared = await display.follow(instances[1], "second request, without the cache", events.Answered)
        await instances[1].end()
        await target.stop()
    return SharedPrefix(questions, first, second, compared)
