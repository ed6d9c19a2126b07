"""Sessions with the targets, for threads: opened when wanted, given up when lost, tried again after a while."""

from __future__ import annotations

import itertools
import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import CancelledError, ThreadPoolExecutor, wait
from functools import partial
from typing import Any, TypeVar

from kbtp import limits
from kbtp.address import Address
from kbtp.cache.announcement import Announcement
from kbtp.cache.backoff import Backoff
from kbtp.cache.checksum import checksums
from kbtp.cache.settings import CacheSettings
from kbtp.cache.state import State
from kbtp.cache.steps import AllocStore, Free, Load, LoadJob, Open, Session, TakeChecksums, TargetStep
from kbtp.errors import ApiMisuse, KbtpError, NoSpace
from kbtp.initiator.batches import Results
from kbtp.initiator.client import Client
from kbtp.verbs.api import MemoryRegion, Rnic

log = logging.getLogger("kbtp.cache")

_T = TypeVar("_T")


class Link:
    """One target's address, and the session there is or was with it."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.lock = threading.Lock()
        self.backoff = Backoff()
        self.client: Client | None = None
        self.session: Session | None = None
        self.not_there: set[int] = set()
        """Incarnations that were announced for this address, and were not what answered there."""
        self.regions: dict[int, MemoryRegion] = {}


class _Threads:
    """A pool that is there from its first use on."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._pool: ThreadPoolExecutor | None = None

    def get(self) -> ThreadPoolExecutor:
        with self._lock:
            if self._pool is None:
                self._pool = ThreadPoolExecutor(limits.CACHE_COPIES_MAX, thread_name_prefix="kbtp-cache")
            return self._pool

    def close(self) -> None:
        with self._lock:
            pool, self._pool = self._pool, None
        if pool is not None:
            pool.shutdown()


def regions_of(register: Callable[[object], MemoryRegion], buffers: Mapping[int, object]) -> dict[int, MemoryRegion]:
    """Of those that a new session can have: one that was released is no reason to be without a session."""
    regions = {}
    for key, buffer in buffers.items():
        try:
            regions[key] = register(buffer)
        except ApiMisuse as error:
            log.warning("a buffer is not registered: %s", error)
    return regions


def _stored(client: Client, views: Sequence[memoryview]) -> Results:
    return client.alloc_store_many(views, checksums=True)


class _Begun:
    """Calls in other threads, which may have begun though whoever wanted to hear of it was interrupted."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._called_off = False
        self._ends: list[threading.Event] = []

    def run(self, call: Callable[[], _T]) -> _T:
        with self._lock:
            if self._called_off:
                raise CancelledError
            self._ends.append(ended := threading.Event())
        try:
            return call()
        finally:
            ended.set()

    def call_off(self) -> None:
        """None begins any more, and those that have are waited for."""
        with self._lock:
            self._called_off = True
        for ended in self._ends:
            ended.wait()


class Links:
    """All targets of one cache."""

    def __init__(self, settings: CacheSettings, state: State, rnic: Rnic, now_s: Callable[[], float]) -> None:
        self._settings = settings
        self._configs = settings.session_configs(state.owner)
        self._rnic = rnic
        self._counters = state.counters
        self._now_s = now_s
        self._lock = threading.Lock()
        self._links: dict[str, Link] = {}
        self._buffers: dict[int, object] = {}
        self._keys = itertools.count(1)
        self._session_numbers = itertools.count(1)
        self._threads = _Threads()

    # --- steps ---------------------------------------------------------------------------------

    def perform(self, step: TargetStep) -> Any:
        match step:
            case Open():
                sessions = [self._session(target) for target in step.targets]
                if None in sessions:  # to learn that a former life is not there has ended the session with this one
                    sessions = [one and self._session(at) for at, one in zip(step.targets, sessions, strict=True)]
                return {target.incarnation: one for target, one in zip(step.targets, sessions, strict=True)}
            case AllocStore():
                return self._alloc_store(step)
            case Load():
                return self.load(step)
            case TakeChecksums():
                return checksums(step.values)
            case Free():
                return self._each(step.jobs, lambda inc, job: self._in_session(inc, job[0], Client.free_many, job[1]))

    def load(self, step: Load, meanwhile: Callable[[], None] | None = None) -> dict[int, Results | None]:
        """`meanwhile` is called while it is on its way if it is a batch of one target; else perhaps never."""
        if len(step.jobs) == 1:
            [(incarnation, job)] = step.jobs.items()
            return {incarnation: self._load(job, step.checksums, meanwhile)}
        return self._each(step.jobs, lambda _, job: self._load(job, step.checksums))

    def listed(self) -> list[Announcement]:
        """The targets that the settings name, those of them that answer."""
        found = []
        for url in self._settings.targets or ():
            client = self._opened(self._link(url))
            if client is not None:
                found += Announcement.of(url, client.terms)
        return found

    def _each(self, jobs: Mapping[int, Any], run: Callable[[int, Any], _T]) -> dict[int, _T]:
        """All targets at once, if there are several."""
        if len(jobs) <= 1:
            return {incarnation: run(incarnation, job) for incarnation, job in jobs.items()}
        threads, begun = self._threads.get(), _Begun()
        try:
            running = {number: threads.submit(begun.run, partial(run, number, job)) for number, job in jobs.items()}
            wait(running.values())
        except BaseException:  # buffers are the caller's again only when all have ended, as they do in time
            begun.call_off()
            raise
        return {incarnation: future.result() for incarnation, future in running.items()}

    def _session(self, target: Announcement) -> Session | None:
        link = self._link(target.url)
        client = self._with(link, target)
        return link.session if client is not None else None

    def _load(self, job: LoadJob, with_checksums: bool, meanwhile: Callable[[], None] | None = None) -> Results | None:
        link = self._link(job.target.url)
        client = self._with(link, job.target)
        if client is None:
            return None
        results = client.load_many(job.refs, job.into, checksums=with_checksums, meanwhile=meanwhile)
        if client.closed:
            self._lost(link, client)
        return results

    def _alloc_store(self, step: AllocStore) -> dict[int, Results | None]:
        try:
            if len(step.jobs) == 1:
                [(incarnation, (number, views))] = step.jobs.items()
                return {incarnation: self._in_session(incarnation, number, _stored, views)}
            return self._each(step.jobs, lambda inc, job: self._in_session(inc, job[0], _stored, job[1]))
        except BaseException:  # nobody hears which blocks have been bound: the next sessions free them
            for incarnation, (number, _) in step.jobs.items():
                for _, client in self._sessions(incarnation, number):
                    client.close()
            raise

    def _in_session(
        self, incarnation: int, number: int, call: Callable[[Client, Any], Results], argument: Sequence[Any]
    ) -> Results | None:
        for link, client in self._sessions(incarnation, number):
            results = call(client, argument)
            if client.closed:
                self._lost(link, client)
            return results
        return None

    def _sessions(self, incarnation: int, number: int) -> list[tuple[Link, Client]]:
        """That one session, if it is the one there is."""
        with self._lock:
            links = list(self._links.values())
        return [
            (link, client)
            for link in links
            if (client := link.client) is not None
            and (session := link.session) is not None
            and session.number == number
            and client.incarnation == incarnation
            and not client.closed
        ]

    # --- sessions ------------------------------------------------------------------------------

    def _link(self, url: str) -> Link:
        link = self._links.get(url)
        if link is not None:
            return link
        with self._lock:
            return self._links.setdefault(url, Link(url))

    def _lost(self, link: Link, client: Client) -> None:
        with link.lock:
            if link.client is client:
                link.client = None
                link.backoff.failed(self._now_s())
                log.warning("%s: the session was lost", link.url)

    def _with(self, link: Link, target: Announcement) -> Client | None:
        """A session with this very life of the target: one with an earlier life need not have noticed its end yet."""
        client = self._opened(link)
        if client is not None and client.incarnation == target.incarnation:
            return client
        if client is not None and target.incarnation not in (client.incarnation, *link.not_there):
            client.close()
            client = self._opened(link)
            if client is not None and client.incarnation != target.incarnation:
                link.not_there.add(target.incarnation)
        return client if client is not None and client.incarnation == target.incarnation else None

    def _opened(self, link: Link) -> Client | None:
        """The session there is, or a new one; None if there is none to be had now."""
        client = link.client
        if client is not None and not client.closed:
            return client
        with link.lock:
            if link.client is not None and not link.client.closed:
                return link.client
            link.client = None
            if not link.backoff.may_try(self._now_s()):
                return None
            try:
                client = self._connect(link)
            except KbtpError as error:
                link.backoff.failed(self._now_s())
                log.warning("%s is not available: %s", link.url, error)
                return None
            link.backoff.worked()
            link.client = client
            return client

    def _connect(self, link: Link) -> Client:
        settings = self._settings
        for last, config in enumerate(self._configs, start=1 - len(self._configs)):
            try:
                client = Client(
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
        terms = client.terms
        with self._lock:
            self._counters.sessions[link.url] = self._counters.sessions.get(link.url, 0) + 1
            link.regions = regions_of(client.register, self._buffers)
            link.session = Session.of(terms, next(self._session_numbers), anonymous=config.initiator_id is None)
        return client

    # --- memory --------------------------------------------------------------------------------

    def register(self, buffer: object) -> int:
        """Have `buffer` registered in every session, also those to come; a number for `revoke`."""
        with self._lock:
            key = next(self._keys)
            self._buffers[key] = buffer
            links = list(self._links.values())
        for link in links:
            with link.lock:
                client = link.client
                if client is not None and not client.closed and key not in link.regions:
                    try:
                        link.regions[key] = client.register(buffer)
                    except ApiMisuse:
                        self.revoke(key)
                        raise
                    except KbtpError as error:
                        log.warning("%s: a buffer is not registered: %s", link.url, error)
        return key

    def revoke(self, key: int) -> None:
        with self._lock:
            self._buffers.pop(key, None)
            regions = [link.regions.pop(key, None) for link in self._links.values()]
        for region in regions:
            if region is not None:
                region.revoke()

    def close(self) -> None:
        with self._lock:
            links, self._links = list(self._links.values()), {}
        self._threads.close()
        for link in links:
            if link.client is not None:
                link.client.close()
