"""Writers that die between any two steps, targets and indexes that go and come: misses, no leaks, no half values."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterable
from concurrent import futures
from concurrent.futures import Future
from typing import Any

import pytest

from kbtp.address import Address
from kbtp.cache import Cache, IndexUnavailable, MemoryIndex, Outcome
from kbtp.cache.steps import AllocStore, Claim, IndexStep, Lookup, Publish, Remove, Step

from .conftest import BLOCK_BYTES, DEADLINE_S, Clock, WatchedServer

OpenCache = Callable[..., Cache]


class Killed(BaseException):
    """Stands for SIGKILL: nothing after it runs, and the session just ends."""


def kill_before(cache: Cache, number: int) -> list[str]:
    """Let `cache` die before its step of that `number`, counted from 0; the steps it did are told in the list."""
    done: list[str] = []
    perform = cache._perform

    def stop(step: Step) -> Any:
        if len(done) == number:
            for link in cache._links._links.values():
                if link.client is not None:
                    link.client._connection.end(ConnectionResetError("killed"))  # type: ignore[arg-type]
            raise Killed
        done.append(type(step).__name__)
        return perform(step)

    cache._perform = stop  # type: ignore[method-assign]
    return done


VALUE = os.urandom(3 * BLOCK_BYTES)
STEPS_OF_A_PUT = ["Lookup", "ListTargets", "Open", "AllocStore", "Publish"]
STEPS_OF_A_CLAIM = ["AllocStore", "Claim"]
STEPS_WITH_EVICTION = ["Lookup", "Open", "Remove", "Free", "AllocStore", "Publish"]


@pytest.mark.parametrize("number", range(len(STEPS_OF_A_PUT) + 1))
def test_a_writer_killed_in_any_state_leaks_nothing(
    open_cache: OpenCache, serve: Callable[..., WatchedServer], number: int
) -> None:
    target = serve(linger_s=0.05)
    writer, reader = open_cache(targets=[target.url]), open_cache(targets=[target.url], read_only=True)
    done = kill_before(writer, number)
    if number < len(STEPS_OF_A_PUT):
        with pytest.raises(Killed):
            writer.put(b"key", VALUE)
    else:
        assert writer.put(b"key", VALUE) is Outcome.STORED
        kill_before(writer, 0)
        with pytest.raises(Killed):
            writer.contains(b"key")
    assert done == STEPS_OF_A_PUT[:number]
    into = bytearray(len(VALUE))
    assert reader.get_into(b"key", into) in (None, len(VALUE))
    assert target.wait_until(lambda: target.used_blocks == 0)
    assert reader.get_into(b"key", into) is None


@pytest.mark.parametrize("number", range(len(STEPS_OF_A_CLAIM) + 1))
def test_a_writer_killed_while_it_puts_without_looking_first_is_resumed_without_a_leak(
    open_cache: OpenCache, target: WatchedServer, number: int
) -> None:
    writer = open_cache(writer="engine")
    writer.put(b"first", b"1")
    done = kill_before(writer, number)
    if number < len(STEPS_OF_A_CLAIM):
        with pytest.raises(Killed):
            writer.put(b"key", VALUE)
    else:
        assert writer.put(b"key", VALUE) is Outcome.STORED
        kill_before(writer, 0)
        with pytest.raises(Killed):
            writer.contains(b"key")
    assert done == STEPS_OF_A_CLAIM[:number]
    assert target.wait_until(lambda: not target.target.sessions)
    again = open_cache(writer="engine")
    into = bytearray(len(VALUE))
    assert again.get_into(b"key", into) == (None if number < len(STEPS_OF_A_CLAIM) else len(VALUE))
    assert again.put(b"first", b"1") is Outcome.PRESENT
    assert again.delete(b"key") == (number == len(STEPS_OF_A_CLAIM))
    assert again.put(b"key", VALUE) is Outcome.STORED
    assert target.used_blocks == 4


@pytest.mark.parametrize("number", range(len(STEPS_WITH_EVICTION) + 1))
def test_a_writer_killed_while_it_evicts_is_resumed_without_a_leak(
    open_cache: OpenCache, target: WatchedServer, number: int
) -> None:
    writer = open_cache(writer="engine")
    writer.put_many([b"a", b"b"], [b"A" * 2 * BLOCK_BYTES, b"B" * 2 * BLOCK_BYTES])
    done = kill_before(writer, number)
    if number < len(STEPS_WITH_EVICTION):
        with pytest.raises(Killed):
            writer.put(b"new", VALUE)
    else:
        writer.put(b"new", VALUE)
        kill_before(writer, 0)
        with pytest.raises(Killed):
            writer.contains(b"new")
    assert done == STEPS_WITH_EVICTION[:number]
    assert target.wait_until(lambda: not target.target.sessions)

    again = open_cache(writer="engine")
    assert again.put(b"small", b"s") is Outcome.STORED  # which resumes, adopts and sweeps
    blocks = {b"a": 2, b"b": 2, b"new": 3, b"small": 1}
    kept = [key for key in blocks if again.contains(key)]
    assert target.used_blocks == sum(blocks[key] for key in kept)
    for key, value in ((b"a", b"A" * 2 * BLOCK_BYTES), (b"b", b"B" * 2 * BLOCK_BYTES), (b"new", VALUE)):
        into = bytearray(len(value))
        got = again.get_into(key, into)
        assert got == (len(value) if key in kept else None)
        assert got is None or into == value
    assert again.put_many([b"1", b"2", b"3", b"4"], [bytes(BLOCK_BYTES)] * 4)[3].ok
    assert target.used_blocks == 4


def test_a_resumed_writer_does_not_adopt_what_is_gone(
    open_cache: OpenCache, index: MemoryIndex, target: WatchedServer
) -> None:
    writer = open_cache(writer="engine")
    writer.put(b"key", b"value")
    [(name, (octets, _))] = index._records.items()
    writer.delete(b"key")
    writer.put(b"other", b"in its place")
    index.perform(Publish([(name, octets)]))
    writer.close()
    assert target.wait_until(lambda: not target.target.sessions)
    again = open_cache(writer="engine")
    assert again.put(b"more", b"value") is Outcome.STORED
    assert again.counters.stale_records == 1
    assert not again.contains(b"key")
    assert again.contains(b"other")
    assert target.used_blocks == 2


def test_a_session_lost_in_the_middle_of_a_put_is_swept(open_cache: OpenCache, target: WatchedServer) -> None:
    cache = open_cache()
    cache.put(b"kept", b"value")
    perform = cache._perform

    def lose_the_answer(step: Step) -> Any:
        reply = perform(step)
        if isinstance(step, AllocStore):
            [link] = cache._links._links.values()
            assert link.client is not None
            link.client.close()
            link.client = None
            return dict.fromkeys(reply)
        return reply

    cache._perform = lose_the_answer  # type: ignore[method-assign]
    assert cache.put(b"key", VALUE) is Outcome.UNAVAILABLE
    cache._perform = perform  # type: ignore[method-assign]
    assert target.used_blocks == 4
    assert target.wait_until(lambda: not target.target.sessions)
    assert cache.put(b"next", b"value") is Outcome.STORED
    assert target.used_blocks == 2
    assert cache.contains(b"kept")


def test_blocks_of_a_put_that_is_interrupted_at_several_targets_are_found(
    open_cache: OpenCache, serve: Callable[..., WatchedServer], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was bound is not heard of then."""
    targets = [serve(), serve()]
    cache = open_cache(targets=[target.url for target in targets], copies=2)
    cache.put(b"kept", b"value")

    def interrupted(running: Iterable[Future[Any]]) -> None:
        monkeypatch.undo()
        futures.wait(running)
        raise KeyboardInterrupt

    monkeypatch.setattr("kbtp.cache.links.wait", interrupted)
    with pytest.raises(KeyboardInterrupt):
        cache.put(b"key", bytes(2 * BLOCK_BYTES))
    assert all(target.wait_until(lambda at=target: not at.target.sessions) for target in targets)
    assert cache.put(b"next", bytes(3 * BLOCK_BYTES)) is Outcome.STORED
    assert [target.used_blocks for target in targets] == [4, 4]
    assert cache.contains(b"kept")


def test_a_call_that_is_interrupted_while_it_begins_ends_when_what_has_begun_has_ended(
    cache: Cache, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Buffers are the caller's again from then on."""
    pool, has_begun, interrupted = cache._links._threads.get(), threading.Event(), threading.Event()
    begun: list[int] = []
    ended: list[int] = []
    submit = pool.submit

    def begin(*call: Any) -> Future[Any]:
        submit(*call)
        assert has_begun.wait(DEADLINE_S)
        interrupted.set()
        raise KeyboardInterrupt  # a thread has begun, and nobody is told so

    def run(number: int, _: None) -> None:
        begun.append(number)
        has_begun.set()
        interrupted.wait(DEADLINE_S)
        sum(range(1_000_000))
        ended.append(number)

    monkeypatch.setattr(pool, "submit", begin)
    with pytest.raises(KeyboardInterrupt):
        cache._links._each({1: None, 2: None}, run)
    assert ended == begun == [1]


def test_records_of_writers_that_have_gone_are_swept(
    open_cache: OpenCache, serve: Callable[..., WatchedServer], index: MemoryIndex, clock: Clock
) -> None:
    """Nobody asks for them, so nobody else would remove them."""
    target = serve(linger_s=0)
    gone, lives = open_cache(targets=[target.url], clock=clock), open_cache(targets=[target.url], clock=clock)
    writer = open_cache(targets=[target.url], clock=clock)
    gone.put_many([b"1", b"2"], [b"value"] * 2)
    lives.put(b"3", b"value")
    gone.close()
    assert target.wait_until(lambda: target.used_blocks == 1)
    writer.put(b"4", b"value")
    assert len(index._records) == 4
    clock.now_s += 11
    writer.put(b"5", b"value")
    assert writer.counters.stale_records == 2
    assert [writer.contains(key) for key in (b"1", b"2", b"3", b"4", b"5")] == [False, False, True, True, True]
    assert len(index._records) == 3


# --- targets -------------------------------------------------------------------------------------


def test_a_dead_target_costs_misses_and_one_that_is_back_is_used(open_cache: OpenCache, clock: Clock) -> None:
    first = WatchedServer()
    first.start()
    cache = open_cache(targets=[first.url], clock=clock)
    cache.put(b"key", b"value")
    first.stop()
    assert cache.get_into(b"key", bytearray(5)) is None
    clock.now_s += 6
    assert cache.put(b"other", b"value") is Outcome.UNAVAILABLE
    opened = cache.counters.sessions[first.url]

    second = WatchedServer(port=Address.parse(first.url).port)
    second.start()
    try:
        assert cache.put(b"key", b"again") is Outcome.UNAVAILABLE  # not asked again yet
        assert cache.counters.sessions[first.url] == opened
        clock.now_s += 60
        assert cache.put(b"key", b"again") is Outcome.STORED
        into = bytearray(5)
        assert cache.get_into(b"key", into) == 5
        assert into == b"again"
    finally:
        second.stop()


# --- the index -----------------------------------------------------------------------------------


class Failing(MemoryIndex):
    """Does not answer steps of the kinds in `fails`; `after` says that it has done them all the same."""

    fails: tuple[type, ...] = ()
    after = False

    def perform(self, step: IndexStep) -> Any:
        if isinstance(step, self.fails):
            if self.after:
                super().perform(step)
            raise IndexUnavailable("no answer")
        return super().perform(step)


@pytest.fixture
def failing(clock: Clock) -> Failing:
    return Failing(clock)


def test_that_the_index_is_away_is_told_once(
    open_cache: OpenCache, failing: Failing, caplog: pytest.LogCaptureFixture
) -> None:
    cache = open_cache(index=failing)
    for _ in range(2):
        failing.fails = (object,)
        for _ in range(5):
            cache.get_into(b"key", bytearray(5))
            cache.put(b"key", b"value")
        failing.fails = ()
        cache.put(b"key", b"value")
    assert caplog.text.count("the index is not available") == 2
    assert cache.counters.index_failures == 20


def test_without_an_index_gets_are_misses_and_puts_are_refused(open_cache: OpenCache, failing: Failing) -> None:
    cache = open_cache(index=failing)
    cache.put(b"key", b"value")
    failing.fails = (object,)
    assert cache.get_into(b"key", bytearray(5)) is None
    assert cache.put(b"other", b"value") is Outcome.UNAVAILABLE
    assert not cache.contains(b"key")
    assert not cache.delete(b"key")
    assert not cache.pin([b"key"], 1)[0].ok
    with pytest.raises(IndexUnavailable):
        cache.clear()
    assert cache.counters.index_failures >= 4
    failing.fails = ()
    assert cache.get_into(b"key", bytearray(5)) == 5


@pytest.mark.parametrize("after", [False, True], ids=["not done", "done"])
@pytest.mark.parametrize("kind", [Lookup, Publish, Remove])
def test_an_index_that_fails_in_a_put_leaks_nothing(
    open_cache: OpenCache, failing: Failing, target: WatchedServer, kind: type, after: bool
) -> None:
    cache = open_cache(index=failing)
    cache.put_many([b"a", b"b"], [bytes(2 * BLOCK_BYTES)] * 2)
    failing.fails, failing.after = (kind,), after
    assert cache.put(b"key", VALUE) is Outcome.UNAVAILABLE
    failing.fails = ()
    assert cache.get_into(b"key", bytearray(len(VALUE))) in (None, len(VALUE))
    assert cache.put(b"key", VALUE) is Outcome.STORED
    assert cache.get_into(b"key", bytearray(len(VALUE))) == len(VALUE)
    assert target.used_blocks == 3


@pytest.mark.parametrize("after", [False, True], ids=["not done", "done"])
def test_an_index_that_fails_in_a_put_that_has_not_looked_first_leaks_nothing(
    open_cache: OpenCache, failing: Failing, target: WatchedServer, after: bool
) -> None:
    cache = open_cache(index=failing)
    cache.put(b"first", b"1")
    failing.fails, failing.after = (Claim,), after
    assert cache.put(b"key", VALUE) is Outcome.UNAVAILABLE
    failing.fails = ()
    assert cache.get_into(b"key", bytearray(len(VALUE))) in (None, len(VALUE))
    assert cache.put(b"key", VALUE) is Outcome.STORED
    assert cache.get_into(b"key", bytearray(len(VALUE))) == len(VALUE)
    assert target.used_blocks == 4


def test_an_index_that_begins_anew_is_told_again_what_there_is(
    open_cache: OpenCache, index: MemoryIndex, target: WatchedServer
) -> None:
    owner, other = open_cache(), open_cache()
    owner.put_many([b"a", b"b"], [b"A", b"B"])
    owner.put(b"short", b"S", ttl_s=1000)
    index.clear()
    assert other.put(b"b", b"theirs") is Outcome.STORED
    assert owner.get_into(b"a", bytearray(1)) is None  # by which it finds out
    into = bytearray(1)
    assert owner.get_into(b"a", into) == 1
    assert into == b"A"
    assert owner.counters.announced_again == 2
    longer = bytearray(6)
    assert owner.get_into(b"b", longer) == 6
    assert longer == b"theirs"
    assert owner.contains(b"short")
    owner.put(b"next", b"value")
    assert target.used_blocks == 4  # a, short, next, and b of the other
