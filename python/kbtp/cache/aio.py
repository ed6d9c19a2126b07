"""The asyncio cache: `kbtp.AsyncCache`. The plans are those of `Cache`."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any, TypeVar

from kbtp.cache.aio_links import AsyncLinks
from kbtp.cache.cache import Registration
from kbtp.cache.get import get_many
from kbtp.cache.index import AsyncIndex, open_async_index
from kbtp.cache.lookups import clear, contains_many, delete_many, pin_many, unpin_many
from kbtp.cache.outcomes import Counters, Item, Outcome, ended, valid
from kbtp.cache.put import put_many
from kbtp.cache.requests import buffers_of, checked_s, named_of, values_of
from kbtp.cache.settings import CacheSettings
from kbtp.cache.steps import TARGET_STEPS, Beside, IndexUnavailable, ListTargets, Plan, Step
from kbtp.rnic import open_rnic
from kbtp.verbs.api import Rnic
from kbtp.verbs.buffers import buffer_of

_T = TypeVar("_T")


class AsyncCache:
    """A cache for one event loop; many tasks may share it. The methods are those of `Cache`, awaited.

    A call that is cancelled ends when what it was about has ended, each step of which has `timeout_s`.
    """

    def __init__(
        self,
        index: str | AsyncIndex,
        settings: CacheSettings | None = None,
        *,
        rnic: Rnic | None = None,
        clock: Callable[[], float] = time.monotonic,
        **options: Any,
    ) -> None:
        """See `Cache`."""
        self._settings = settings or CacheSettings(**options)
        self._now_s = clock
        self._names = self._settings.names()
        self._state = self._settings.state()
        self._index = open_async_index(index, self._settings.timeout_s) if isinstance(index, str) else index
        self._links = AsyncLinks(self._settings, self._state, rnic or open_rnic(), clock)

    # --- single forms --------------------------------------------------------------------------

    async def put(self, key: bytes, value: object, *, ttl_s: float | None = None) -> Outcome:
        """See `Cache.put`."""
        return valid((await self.put_many([key], [value], ttl_s=ttl_s))[0]).outcome

    async def get_into(self, key: bytes, into: object, *, verify: bool = True) -> int | None:
        """See `Cache.get_into`."""
        item = valid((await self.get_many_into([key], [into], verify=verify))[0])
        return item.length_bytes if item.ok else None

    async def contains(self, key: bytes) -> bool:
        """See `Cache.contains`."""
        return valid((await self.contains_many([key]))[0]).ok

    async def delete(self, key: bytes) -> bool:
        """See `Cache.delete`."""
        return valid((await self.delete_many([key]))[0]).ok

    # --- batch forms ---------------------------------------------------------------------------

    async def put_many(
        self, keys: Sequence[bytes], values: Sequence[object], *, ttl_s: float | None = None
    ) -> list[Item]:
        """See `Cache.put_many`."""
        self._settings.check_writes()
        wanted = values_of(self._names, keys, values)
        return await self._run(put_many(self._state, wanted, self._settings.put_options(ttl_s), self._now_s()))

    async def get_many_into(self, keys: Sequence[bytes], into: Sequence[object], *, verify: bool = True) -> list[Item]:
        """See `Cache.get_many_into`."""
        wanted = buffers_of(self._names, keys, into)
        return await self._run(get_many(self._state, wanted, verify=verify, now_s=self._now_s()))

    async def contains_many(self, keys: Sequence[bytes]) -> list[Item]:
        """See `Cache.contains_many`."""
        named = named_of(self._names, keys)
        await self._run(contains_many(self._state, named, self._now_s()))
        return [ended(one.item) for one in named]

    async def longest_prefix(self, keys: Sequence[bytes]) -> int:
        """See `Cache.longest_prefix`."""
        for count, item in enumerate(await self.contains_many(keys)):
            if not item.ok:
                return count
        return len(keys)

    async def delete_many(self, keys: Sequence[bytes]) -> list[Item]:
        """See `Cache.delete_many`."""
        named = named_of(self._names, keys)
        await self._run(delete_many(self._state, named))
        return [ended(one.item) for one in named]

    async def clear(self) -> int:
        """See `Cache.clear`."""
        return await self._run(clear(self._state))

    async def pin(self, keys: Sequence[bytes], seconds: float) -> list[Item]:
        """See `Cache.pin`."""
        checked_s("a pin for", seconds)
        named = named_of(self._names, keys)
        await self._run(pin_many(self._state, named, seconds))
        return [ended(one.item) for one in named]

    async def unpin(self, keys: Sequence[bytes]) -> None:
        """See `Cache.unpin`."""
        await self._run(unpin_many(self._state, named_of(self._names, keys)))

    # --- memory and life -----------------------------------------------------------------------

    def register(self, buffer: object) -> Registration:
        """See `Cache.register`."""
        buffer_of(buffer)
        return Registration(self._links, self._links.register(buffer))

    @property
    def counters(self) -> Counters:
        return self._state.counters

    @property
    def writer_id(self) -> bytes:
        """See `Cache.writer_id`."""
        return self._state.owner

    async def close(self) -> None:
        """See `Cache.close`."""
        await self._links.close()
        await self._index.close()

    async def __aenter__(self) -> AsyncCache:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    # --- running plans -------------------------------------------------------------------------

    async def _run(self, plan: Plan[_T]) -> _T:
        """To its end, also when it is cancelled: blocks that were stored are published or freed, buffers left alone."""
        running = asyncio.ensure_future(self._run_plan(plan))
        cancelled: asyncio.CancelledError | None = None
        while not running.done():
            try:
                await asyncio.shield(running)
            except asyncio.CancelledError as error:
                cancelled = error
        if cancelled is not None:
            raise cancelled
        return running.result()

    async def _run_plan(self, plan: Plan[_T]) -> _T:
        """Between two steps nothing else runs, so a plan changes what the cache knows undisturbed."""
        reply: Any = None
        error: IndexUnavailable | None = None
        while True:
            try:
                step = plan.throw(error) if error is not None else plan.send(reply)
            except StopIteration as done:
                value: _T = done.value
                return value
            reply, error = None, None
            try:
                reply = await self._perform(step)
            except IndexUnavailable as unavailable:
                error = unavailable

    async def _perform(self, step: Step) -> Any:
        if isinstance(step, Beside):
            return await self._beside(step)
        if isinstance(step, TARGET_STEPS):
            return await self._links.perform(step)
        if isinstance(step, ListTargets) and self._settings.targets is not None:
            return await self._links.listed()
        return await self._index.perform(step)

    async def _beside(self, step: Beside) -> tuple[Any, Any]:
        replies = await asyncio.gather(
            self._index.perform(step.index), self._links.perform(step.target), return_exceptions=True
        )
        for reply in replies:
            if isinstance(reply, BaseException) and not isinstance(reply, IndexUnavailable):
                raise reply
        return replies[0], replies[1]
