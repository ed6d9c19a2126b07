"""Sessions with the targets, for asyncio: what `links.py` is for threads."""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, TypeVar

from kbtp.address import Address
from kbtp.cache.announcement import Announcement
from kbtp.cache.backoff import Backoff
from kbtp.cache.checksum import checksums
from kbtp.cache.links import regions_of
from kbtp.cache.settings import CacheSettings
from kbtp.cache.state import State
from kbtp.cache.steps import AllocStore, Free, Load, LoadJob, Open, Session, TakeChecksums, TargetStep
from kbtp.errors import ApiMisuse, KbtpError, NoSpace
from kbtp.initiator.aio import AsyncClient
from kbtp.initiator.batches import Results
from kbtp.limits import CACHE_ASIDE_BYTES
from kbtp.verbs.api import MemoryRegion, Rnic

log = logging.getLogger("kbtp.cache")

_T = TypeVar("_T")


class AsyncLink:
    """One target's address, and the session there is or was with it."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.lock = asyncio.Lock()
        self.backoff = Backoff()
        self.client: AsyncClient | None = None
        self.session: Session | None = None
        self.not_there: set[int] = set()
        """Incarnations that were announced for this address, and were not what answered there."""
        self.regions: dict[int, MemoryRegion] = {}


class AsyncLinks:
    """All targets of one cache, for one event loop."""

    def __init__(self, settings: CacheSettings, state: State, rnic: Rnic, now_s: Callable[[], float]) -> None:
        self._settings = settings
        self._configs = settings.session_configs(state.owner)
        self._rnic = rnic
        self._counters = state.counters
        self._now_s = now_s
        self._links: dict[str, AsyncLink] = {}
        self._buffers: dict[int, object] = {}
        self._keys = itertools.count(1)
        self._session_numbers = itertools.count(1)

    # --- steps ---------------------------------------------------------------------------------

    async def perform(self, step: TargetStep) -> Any:
        match step:
            case Open():
                sessions = await asyncio.gather(*map(self._session, step.targets))
                if None in sessions:  # see `Links.perform`
                    sessions = [one and await self._session(at) for at, one in zip(step.targets, sessions, strict=True)]
                return {target.incarnation: one for target, one in zip(step.targets, sessions, strict=True)}
            case Load():
                return await _each(step.jobs, lambda _, job: self._load(job, step.checksums))
            case AllocStore():
                return await _each(step.jobs, lambda inc, job: self._in_session(inc, job[0], _alloc_store, job[1]))
            case TakeChecksums():
                return await _checksums(step.values)
            case Free():
                return await _each(step.jobs, lambda inc, job: self._in_session(inc, job[0], _free, job[1]))

    async def listed(self) -> list[Announcement]:
        """The targets that the settings name, those of them that answer."""
        found = []
        for url in self._settings.targets or ():
            client = await self._opened(self._link(url))
            if client is not None:
                found += Announcement.of(url, client.terms)
        return found

    async def _session(self, target: Announcement) -> Session | None:
        link = self._link(target.url)
        client = await self._with(link, target)
        return link.session if client is not None else None

    async def _load(self, job: LoadJob, with_checksums: bool) -> Results | None:
        link = self._link(job.target.url)
        client = await self._with(link, job.target)
        if client is None:
            return None
        return self._after(link, client, await client.load_many(job.refs, job.into, checksums=with_checksums))

    async def _in_session(
        self,
        incarnation: int,
        number: int,
        call: Callable[[AsyncClient, Any], Awaitable[Results]],
        argument: Sequence[Any],
    ) -> Results | None:
        for link in list(self._links.values()):
            client, session = link.client, link.session
            if (
                client is not None
                and not client.closed
                and session is not None
                and (client.incarnation, session.number) == (incarnation, number)
            ):
                return self._after(link, client, await call(client, argument))
        return None

    def _after(self, link: AsyncLink, client: AsyncClient, results: Results) -> Results:
        if client.closed and link.client is client:
            link.client = None
            link.backoff.failed(self._now_s())
            log.warning("%s: the session was lost", link.url)
        return results

    # --- sessions ------------------------------------------------------------------------------

    def _link(self, url: str) -> AsyncLink:
        return self._links.setdefault(url, AsyncLink(url))

    async def _with(self, link: AsyncLink, target: Announcement) -> AsyncClient | None:
        """A session with this very life of the target: one with an earlier life need not have noticed its end yet."""
        client = await self._opened(link)
        if client is not None and target.incarnation not in (client.incarnation, *link.not_there):
            await client.close()
            client = await self._opened(link)
            if client is not None and client.incarnation != target.incarnation:
                link.not_there.add(target.incarnation)
        return client if client is not None and client.incarnation == target.incarnation else None

    async def _opened(self, link: AsyncLink) -> AsyncClient | None:
        """The session there is, or a new one; None if there is none to be had now."""
        async with link.lock:
            if link.client is not None and not link.client.closed:
                return link.client
            link.client = None
            if not link.backoff.may_try(self._now_s()):
                return None
            try:
                link.client = await self._connect(link)
            except KbtpError as error:
                link.backoff.failed(self._now_s())
                log.warning("%s is not available: %s", link.url, error)
                return None
            link.backoff.worked()
            return link.client

    async def _connect(self, link: AsyncLink) -> AsyncClient:
        settings = self._settings
        for last, config in enumerate(self._configs, start=1 - len(self._configs)):
            try:
                client = await AsyncClient.connect(
                    Address.parse(link.url),
                    config,
                    self._rnic,
                    timeout_s=settings.timeout_s,
                    connect_timeout_s=settings.connect_timeout_s,
                )
                break
            except NoSpace:
                if last == 0:
                    raise
                log.warning("%s has no room for this writer: its values can be read, none put there", link.url)
        self._counters.sessions[link.url] = self._counters.sessions.get(link.url, 0) + 1
        link.regions = regions_of(client.register, self._buffers)
        number = next(self._session_numbers)
        link.session = Session.of(client.terms, number, anonymous=config.initiator_id is None)
        return client

    # --- memory --------------------------------------------------------------------------------

    def register(self, buffer: object) -> int:
        """Have `buffer` registered in every session, also those to come; a number for `revoke`."""
        key = next(self._keys)
        self._buffers[key] = buffer
        for link in self._links.values():
            if link.client is not None and not link.client.closed:
                try:
                    link.regions[key] = link.client.register(buffer)
                except ApiMisuse:
                    self.revoke(key)
                    raise
        return key

    def revoke(self, key: int) -> None:
        self._buffers.pop(key, None)
        for link in self._links.values():
            region = link.regions.pop(key, None)
            if region is not None:
                region.revoke()

    async def close(self) -> None:
        links, self._links = list(self._links.values()), {}
        for link in links:
            if link.client is not None:
                await link.client.close()


async def _checksums(values: Sequence[Sequence[memoryview]]) -> list[int]:
    """Taken by another thread if they are of much, so that the event loop goes on."""
    if sum(len(piece) for pieces in values for piece in pieces) < CACHE_ASIDE_BYTES:
        return checksums(values)
    return await asyncio.get_running_loop().run_in_executor(None, checksums, values)


async def _each(jobs: Mapping[int, Any], run: Callable[[int, Any], Awaitable[_T]]) -> dict[int, _T]:
    """All targets at once."""
    results = await asyncio.gather(*(run(incarnation, job) for incarnation, job in jobs.items()))
    return dict(zip(jobs, results, strict=True))


def _alloc_store(client: AsyncClient, views: Sequence[memoryview]) -> Awaitable[Results]:
    return client.alloc_store_many(views, checksums=True)


def _free(client: AsyncClient, refs: Sequence[Any]) -> Awaitable[Results]:
    return client.free_many(refs)
