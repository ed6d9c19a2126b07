"""The asyncio cache: the same plans, many tasks, cancellation."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

import kbtp
from kbtp.cache import AsyncCache, IndexUnavailable, MemoryIndex, Outcome
from kbtp.cache.steps import IndexStep
from kbtp.errors import ApiMisuse

from .conftest import BLOCK_BYTES, WatchedServer


class Asked:
    """An index in this process, awaited."""

    def __init__(self, index: MemoryIndex) -> None:
        self._index = index

    async def perform(self, step: IndexStep) -> Any:
        await asyncio.sleep(0)
        return self._index.perform(step)

    async def close(self) -> None:
        self._index.close()


@pytest.fixture
def run(index: MemoryIndex, target: WatchedServer) -> Callable[..., None]:
    """`run(test, **settings)`: `test` with an open cache."""

    def run_(test: Callable[[AsyncCache], Coroutine[Any, Any, None]], **settings: Any) -> None:
        async def with_cache() -> None:
            async with AsyncCache(Asked(index), **{"targets": [target.url], **settings}) as cache:
                await asyncio.wait_for(test(cache), 20)

        asyncio.run(with_cache())

    return run_


def test_put_and_get(run: Callable[..., None], target: WatchedServer) -> None:
    async def use(cache: AsyncCache) -> None:
        value, into = os.urandom(2 * BLOCK_BYTES + 5), bytearray(3 * BLOCK_BYTES)
        registration = cache.register(into)
        assert await cache.put(b"key", value) is Outcome.STORED
        assert await cache.put(b"key", b"other") is Outcome.PRESENT
        assert await cache.get_into(b"key", into) == len(value)
        assert into[: len(value)] == value
        registration.revoke()
        assert await cache.get_into(b"none", into) is None
        assert await cache.longest_prefix([b"key", b"none"]) == 1
        assert [item.ok for item in await cache.pin([b"key"], 1)] == [True]
        await cache.unpin([b"key"])
        assert await cache.delete(b"key")
        assert not await cache.contains(b"key")
        with pytest.raises(ApiMisuse):
            await cache.put(b"", b"value")
        with pytest.raises(ApiMisuse):
            await cache.pin([b"key"], 0)
        assert await cache.clear() == 0
        assert cache.counters.stored == 1
        assert len(cache.writer_id) == 16

    run(use)
    assert target.used_blocks == 0


def test_what_is_known_is_loaded_while_the_index_is_asked(run: Callable[..., None]) -> None:
    async def use(cache: AsyncCache) -> None:
        into = bytearray(5)
        await cache.put(b"key", b"value")
        assert await cache.get_into(b"key", into) == 5
        assert into == b"value"
        assert (await cache.put(b"next", b"value"), await cache.get_into(b"next", into)) == (Outcome.STORED, 5)
        perform = cache._index.perform

        async def fail(step: IndexStep) -> Any:
            await perform(step)
            raise IndexUnavailable("no answer")

        cache._index.perform = fail  # type: ignore[method-assign]
        assert await cache.get_into(b"key", into) is None
        assert cache.counters.index_failures == 1

        async def end(step: IndexStep) -> Any:
            raise KeyError("a mistake of ours")

        cache._index.perform = end  # type: ignore[method-assign]
        with pytest.raises(KeyError):
            await cache.get_into(b"key", into)

    run(use)


def test_to_revoke_twice_revokes_nobody_else_s_buffer(run: Callable[..., None]) -> None:
    async def use(cache: AsyncCache) -> None:
        await cache.put(b"key", b"value")
        first = cache.register(bytearray(BLOCK_BYTES))
        first.revoke()
        cache.register(bytearray(BLOCK_BYTES))
        first.revoke()
        [link] = cache._links._links.values()
        assert len(link.regions) == len(cache._links._buffers) == 1

    run(use)


def test_many_tasks_at_once(run: Callable[..., None]) -> None:
    async def use(cache: AsyncCache) -> None:
        async def work(number: int) -> None:
            key = b"%d" % (number % 3)
            value, into = key * BLOCK_BYTES, bytearray(BLOCK_BYTES)
            await cache.put(key, value)
            if await cache.get_into(key, into) is not None:
                assert into == value
            if number % 4 == 0:
                await cache.delete(key)

        await asyncio.gather(*(work(number) for number in range(40)))

    run(use)


def test_a_cancelled_put_leaks_nothing(run: Callable[..., None], target: WatchedServer) -> None:
    async def use(cache: AsyncCache) -> None:
        for turns in range(12):
            task = asyncio.ensure_future(cache.put(b"%d" % turns, bytes(BLOCK_BYTES)))
            for _ in range(turns):
                await asyncio.sleep(0)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
        await cache.put(b"last", b"value")
        await cache.clear()
        await cache.put(b"very last", b"value")
        assert target.used_blocks == 1

    run(use)


def test_a_dead_target_is_a_miss(run: Callable[..., None], target: WatchedServer) -> None:
    async def use(cache: AsyncCache) -> None:
        await cache.put(b"key", b"value")
        target.stop()
        assert await cache.get_into(b"key", bytearray(5)) is None
        assert await cache.get_into(b"key", bytearray(5)) is None

    run(use)


def test_it_is_what_the_package_offers() -> None:
    assert kbtp.AsyncCache is AsyncCache
