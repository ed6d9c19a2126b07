"""The synchronous cache: `kbtp.Cache`."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any, Protocol, TypeVar

from kbtp.cache.get import get_many
from kbtp.cache.index import Asking, Index, ask, is_at_once, open_index
from kbtp.cache.links import Links
from kbtp.cache.lookups import clear, contains_many, delete_many, pin_many, unpin_many
from kbtp.cache.outcomes import Counters, Item, Outcome, ended, valid
from kbtp.cache.put import put_many
from kbtp.cache.requests import buffers_of, checked_s, named_of, values_of
from kbtp.cache.settings import CacheSettings
from kbtp.cache.steps import TARGET_STEPS, Beside, Claim, IndexUnavailable, ListTargets, Load, Plan, Step
from kbtp.rnic import open_rnic
from kbtp.verbs.api import Rnic
from kbtp.verbs.buffers import buffer_of

_T = TypeVar("_T")


class Revocable(Protocol):
    def revoke(self, key: int) -> None: ...


class Registration:
    """A buffer whose slices are used in place, without being registered for each call."""

    def __init__(self, links: Revocable, key: int) -> None:
        self._links = links
        self._key = key

    def revoke(self) -> None:
        """No target reaches the buffer any more. Idempotent."""
        self._links.revoke(self._key)


class Cache:
    """Values under keys, in blocks of one or many targets (docs/cache.md). Threads may share it.

    Keys are octets, 1 to 65,536 of them; values and buffers anything contiguous with the buffer protocol or DLPack in
    CPU memory. Batch forms give one `Item` for each, in order, and raise for none of them; single forms raise
    `ApiMisuse` for what can never work. Whatever else is wrong (no index, no target, a record whose blocks are gone) is
    a miss, a put that is not `STORED`, and a counter.
    """

    def __init__(
        self,
        index: str | Index,
        settings: CacheSettings | None = None,
        *,
        rnic: Rnic | None = None,
        clock: Callable[[], float] = time.monotonic,
        **options: Any,
    ) -> None:
        """`index`: its URL, or that of a target with `kbtp serve --index` beside it. `options` are those of
        `CacheSettings`; `clock` is what backoff and expiry go by. Nothing is connected yet."""
        self._settings = settings or CacheSettings(**options)
        self._now_s = clock
        self._names = self._settings.names()
        self._state = self._settings.state()
        self._index = open_index(index, self._settings.timeout_s) if isinstance(index, str) else index
        self._links = Links(self._settings, self._state, rnic or open_rnic(), clock)
        self._lock = threading.Lock()

    # --- single forms --------------------------------------------------------------------------

    def put(self, key: bytes, value: object, *, ttl_s: float | None = None) -> Outcome:
        """Store `value` unless there is one under `key`: STORED, PRESENT, NO_SPACE or UNAVAILABLE."""
        return valid(self.put_many([key], [value], ttl_s=ttl_s)[0]).outcome

    def get_into(self, key: bytes, into: object, *, verify: bool = True) -> int | None:
        """Load the value to the start of `into`; its octets, or None for a miss, after which what `into` holds is
        undefined. Raises `ApiMisuse` if it is too small. Behind a value that has made way for a shorter one since
        this cache saw it `into` may have changed too."""
        item = valid(self.get_many_into([key], [into], verify=verify)[0])
        return item.length_bytes if item.ok else None

    def contains(self, key: bytes) -> bool:
        return valid(self.contains_many([key])[0]).ok

    def delete(self, key: bytes) -> bool:
        """False if there was no value, or the index does not answer."""
        return valid(self.delete_many([key])[0]).ok

    # --- batch forms ---------------------------------------------------------------------------

    def put_many(self, keys: Sequence[bytes], values: Sequence[object], *, ttl_s: float | None = None) -> list[Item]:
        """Store each of `values`; they are as if used one after the other from the last to the first. None evicts
        another one of the batch: what does not fit beside those before it is NO_SPACE."""
        self._settings.check_writes()
        wanted = values_of(self._names, keys, values)
        return self._run(put_many(self._state, wanted, self._settings.put_options(ttl_s), self._now_s()))

    def get_many_into(self, keys: Sequence[bytes], into: Sequence[object], *, verify: bool = True) -> list[Item]:
        """Load each value to the start of the buffer at its place; `Item.length_bytes` are the octets of each."""
        wanted = buffers_of(self._names, keys, into)
        return self._run(get_many(self._state, wanted, verify=verify, now_s=self._now_s()))

    def contains_many(self, keys: Sequence[bytes]) -> list[Item]:
        """HIT with its length for each value that the index knows of, on a target that lives."""
        named = named_of(self._names, keys)
        self._run(contains_many(self._state, named, self._now_s()))
        return [ended(one.item) for one in named]

    def longest_prefix(self, keys: Sequence[bytes]) -> int:
        """How many of `keys`, from the first on, have a value: one round trip."""
        for count, item in enumerate(self.contains_many(keys)):
            if not item.ok:
                return count
        return len(keys)

    def delete_many(self, keys: Sequence[bytes]) -> list[Item]:
        named = named_of(self._names, keys)
        self._run(delete_many(self._state, named))
        return [ended(one.item) for one in named]

    def clear(self) -> int:
        """Delete all values of the namespace; how many. Raises `IndexUnavailable`."""
        return self._run(clear(self._state))

    def pin(self, keys: Sequence[bytes], seconds: float) -> list[Item]:
        """Keep values from being evicted for so long: HIT or MISS for each. A pin ends by itself."""
        checked_s("a pin for", seconds)
        named = named_of(self._names, keys)
        self._run(pin_many(self._state, named, seconds))
        return [ended(one.item) for one in named]

    def unpin(self, keys: Sequence[bytes]) -> None:
        """Give up pins of this cache's."""
        self._run(unpin_many(self._state, named_of(self._names, keys)))

    # --- memory and life -----------------------------------------------------------------------

    def register(self, buffer: object) -> Registration:
        """Register `buffer` with every target, once; its slices are then used in place. Raises `ApiMisuse`."""
        buffer_of(buffer)
        return Registration(self._links, self._links.register(buffer))

    @property
    def counters(self) -> Counters:
        return self._state.counters

    @property
    def writer_id(self) -> bytes:
        """The Initiator ID of this writer, 16 octets."""
        return self._state.owner

    def close(self) -> None:
        """End all sessions. What was put stays for the targets' linger time. Idempotent."""
        self._links.close()
        self._index.close()

    def __enter__(self) -> Cache:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # --- running plans -------------------------------------------------------------------------

    def _run(self, plan: Plan[_T]) -> _T:
        """The lock is held between steps, while the plan changes what the cache knows, and in none of them."""
        reply: Any = None
        error: IndexUnavailable | None = None
        while True:
            try:
                with self._lock:
                    step = plan.throw(error) if error is not None else plan.send(reply)
            except StopIteration as done:
                value: _T = done.value
                return value
            reply, error = None, None
            try:
                reply = self._perform(step)
            except IndexUnavailable as unavailable:
                error = unavailable
            except BaseException as interruption:
                with self._lock:
                    plan.throw(interruption)
                raise

    def _perform(self, step: Step) -> Any:
        if isinstance(step, Beside):
            return self._beside(step)
        if isinstance(step, Load):
            return self._links.load(step)
        if isinstance(step, TARGET_STEPS):
            return self._links.perform(step)
        if isinstance(step, Claim) and step.meanwhile is not None:
            return self._claim(step, step.meanwhile)
        if isinstance(step, ListTargets) and self._settings.targets is not None:
            return self._links.listed()
        return self._index.perform(step)

    def _claim(self, step: Claim, meanwhile: Callable[[], None]) -> Any:
        asked = ask(self._index, step)
        try:
            meanwhile()
        except BaseException:
            asked.forget()
            raise
        return asked.answer()

    def _beside(self, step: Beside) -> tuple[Any, Any]:
        asking = Asking(self._index, step.index)
        try:
            if not is_at_once(self._index):
                asking.begin()
            reply = self._links.load(step.target, asking.begin_meanwhile)
            asking.begin_meanwhile()
        except BaseException:
            asking.forget()
            raise
        try:
            return asking.answer(), reply
        except IndexUnavailable as unavailable:
            return unavailable, reply
