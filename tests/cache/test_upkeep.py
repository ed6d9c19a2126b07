"""What is done besides: announcing, registering with targets that are there already, targets cut alike."""

from __future__ import annotations

import dataclasses
import json
import logging
import random
import threading
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from kbtp.cache import Cache, IndexUnavailable, MemoryIndex, Outcome
from kbtp.cache.announcement import Announcement
from kbtp.cache.announcer import Announcer
from kbtp.cache.backoff import Backoff
from kbtp.cache.checksum import checksums
from kbtp.cache.commands import exchange
from kbtp.cache.drain import drain_target
from kbtp.cache.keys import Names
from kbtp.cache.steps import Announce, IndexStep, ListTargets, Publish, Withdraw
from kbtp.errors import ApiMisuse
from kbtp.initiator.view import SessionView
from kbtp.limits import CACHE_BACKOFF_MAX_S, CACHE_BACKOFF_MIN_S
from kbtp.rnic import open_rnic

from .conftest import BLOCK_BYTES, Clock, WatchedServer

OpenCache = Callable[..., Cache]
TARGET = Announcement(5, "kbtp://10.0.0.1", 4096, 16)


class Flaky(MemoryIndex):
    """Refuses announcements while `fails`; tells of each that it refused, and of each that it took."""

    def __init__(self, clock: Clock) -> None:
        self.fails = False
        self.refused = threading.Semaphore(0)
        self.taken = threading.Semaphore(0)
        super().__init__(clock)

    def perform(self, step: IndexStep) -> Any:
        if isinstance(step, Announce | Withdraw) and self.fails:
            self.refused.release()
            raise IndexUnavailable("no answer")
        answer = super().perform(step)
        if isinstance(step, Announce):
            self.taken.release()
        return answer


def test_a_target_announces_itself_again_and_again(clock: Clock, caplog: pytest.LogCaptureFixture) -> None:
    index = Flaky(clock)
    index.fails = True
    with caplog.at_level(logging.INFO, "kbtp.index"):
        announcer = Announcer(index, TARGET, beat_s=0.001)
        for _ in range(3):
            assert index.refused.acquire(timeout=10)
        index.fails = False
        for _ in range(3):
            assert index.taken.acquire(timeout=10)
        assert index.perform(ListTargets()) == [TARGET]
        announcer.close()
        announcer.close()
    assert index.perform(ListTargets()) == []
    assert [record.levelname for record in caplog.records] == ["WARNING", "INFO"]


def test_an_index_that_is_away_at_the_end_is_no_error(clock: Clock, caplog: pytest.LogCaptureFixture) -> None:
    index = Flaky(clock)
    announcer = Announcer(index, TARGET, beat_s=1000)
    index.fails = True
    announcer.close()
    assert "is not withdrawn" in caplog.text


SAID = {"incarnation": 5, "url": "kbtp://10.0.0.1", "block_bytes": 4096, "pool_blocks": 16}
BAD_ANNOUNCEMENTS = [
    b"",
    b"{}",
    b"[1]",
    b"[" * 100_000,
    *(
        json.dumps({**SAID, field: value}).encode()
        for field, value in (
            ("incarnation", 0),
            ("incarnation", 1 << 64),
            ("incarnation", "5"),
            ("block_bytes", 1),
            ("block_bytes", 1 << 40),
            ("block_bytes", 4096.0),
            ("pool_blocks", 0),
            ("pool_blocks", -1),
            ("pool_blocks", 10**400),
            ("url", 7),
        )
    ),
]


@pytest.mark.parametrize("octets", BAD_ANNOUNCEMENTS, ids=range(len(BAD_ANNOUNCEMENTS)))
def test_what_is_no_announcement(octets: bytes) -> None:
    with pytest.raises(ApiMisuse, match="an announcement in the index cannot be read"):
        Announcement.parse(octets)


def test_an_announcement_of_a_later_version_is_read() -> None:
    assert Announcement.parse(json.dumps({**SAID, "zone": "a"}).encode()) == TARGET


def test_an_announcement_that_cannot_be_read_is_told_once_and_hides_no_other(caplog: pytest.LogCaptureFixture) -> None:
    beats = [b"1000 " + octets for octets in (b"nonsense", TARGET.pack())] + [b"no time " + TARGET.pack(), b""]
    for _ in range(3):
        listing = exchange(ListTargets())
        next(listing)
        with pytest.raises(StopIteration) as listed:
            listing.send([[b"1001", beats, []]])
        assert listed.value.value == [TARGET]
    assert caplog.text.count("an announcement in the index cannot be read") == 1


def test_a_target_whose_answer_is_none_is_told_once_and_not_used(
    open_cache: OpenCache, clock: Clock, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    terms = SessionView.terms
    assert terms.fget is not None
    read = terms.fget
    monkeypatch.setattr(SessionView, "terms", property(lambda self: dataclasses.replace(read(self), pool_blocks=0)))
    cache = open_cache(clock=clock)
    for _ in range(3):
        assert cache.put(b"key", b"value") is Outcome.UNAVAILABLE
        clock.now_s += 10
    assert caplog.text.count("is not used: its HELLO_ACK says number of blocks 0") == 1


def test_an_announcement_is_read_as_it_was_written() -> None:
    assert Announcement.parse(TARGET.pack()) == TARGET


def test_backoff_doubles_up_to_a_cap() -> None:
    backoff, now_s, pauses = Backoff(), 100.0, []
    assert backoff.may_try(now_s)
    for _ in range(10):
        backoff.failed(now_s)
        pause_s = CACHE_BACKOFF_MIN_S
        while not backoff.may_try(now_s + pause_s):
            pause_s *= 2
        pauses.append(pause_s)
        now_s += pause_s
    assert pauses[:3] == [CACHE_BACKOFF_MIN_S, 2 * CACHE_BACKOFF_MIN_S, 4 * CACHE_BACKOFF_MIN_S]
    assert pauses[-1] <= 2 * CACHE_BACKOFF_MAX_S
    backoff.worked()
    assert backoff.may_try(now_s)


def test_a_buffer_is_registered_with_sessions_that_are_open(cache: Cache) -> None:
    cache.put(b"key", b"value")
    memory = bytearray(2 * BLOCK_BYTES)
    registration = cache.register(memory)
    assert cache.get_into(b"key", memoryview(memory)[BLOCK_BYTES:]) == 5
    assert bytes(memory[BLOCK_BYTES : BLOCK_BYTES + 5]) == b"value"
    registration.revoke()
    with pytest.raises(ApiMisuse):
        cache.register(7)


def test_to_revoke_twice_revokes_nobody_else_s_buffer(cache: Cache) -> None:
    cache.put(b"key", b"value")
    first = cache.register(bytearray(BLOCK_BYTES))
    first.revoke()
    cache.register(bytearray(BLOCK_BYTES))
    first.revoke()
    [link] = cache._links._links.values()
    assert len(link.regions) == len(cache._links._buffers) == 1


def test_a_buffer_that_was_released_is_no_reason_to_be_without_a_session(cache: Cache) -> None:
    buffer = memoryview(bytearray(BLOCK_BYTES))
    cache.register(buffer)  # there is no session yet that holds it
    buffer.release()
    assert cache.put(b"key", b"value") is Outcome.STORED


def test_copies_are_cut_alike(open_cache: OpenCache, serve: Callable[..., WatchedServer]) -> None:
    """Of targets with blocks of different sizes only those like the first one get copies."""
    targets = [serve(quota=16, block_size_bytes=size * BLOCK_BYTES) for size in (1, 1, 2)]
    cache = open_cache(targets=[target.url for target in targets], copies=3)
    keys = [b"%d" % number for number in range(6)]
    assert all(item.ok for item in cache.put_many(keys, [bytes(100)] * 6))
    assert all(item.ok for item in cache.get_many_into(keys, [bytearray(100) for _ in keys]))
    assert sum(target.used_blocks for target in targets) <= 12


def test_a_pinned_share_takes_what_fits(open_cache: OpenCache) -> None:
    cache = open_cache()
    cache.put(b"pinned", bytes(3 * BLOCK_BYTES))
    cache.pin([b"pinned"], 100)
    items = cache.put_many([b"a", b"b"], [bytes(BLOCK_BYTES)] * 2)
    assert sorted(item.outcome.value for item in items) == ["no space", "stored"]


def test_a_drain_leaves_what_it_cannot_read(
    open_cache: OpenCache, index: MemoryIndex, target: WatchedServer, clock: Clock
) -> None:
    about = Announcement(target.target.incarnation, target.url, BLOCK_BYTES, 16)
    index.perform(Announce(about))
    cache = open_cache(targets=None)
    cache.put(b"key", b"value")
    index.perform(Publish([(Names().of(b"later"), b"\x02 a later version")]))
    assert drain_target(index, target.url) == 1
    assert not cache.contains(b"key")
    assert cache.put(b"key", b"value") is Outcome.STORED  # it has not heard of it yet
    clock.now_s += 6
    index.perform(Announce(about))
    assert drain_target(index, target.url, undo=True) == 0


@pytest.mark.parametrize("rnic", ["native", "reference"])
def test_values_are_read_for_their_checksum_only_where_the_rnic_does_not_know_it(
    open_cache: OpenCache, serve: Callable[..., WatchedServer], monkeypatch: pytest.MonkeyPatch, rnic: str
) -> None:
    read: list[int] = []

    def watched(values: Sequence[Sequence[memoryview]]) -> list[int]:
        read.append(len(values))
        return checksums(values)

    monkeypatch.setattr("kbtp.cache.links.checksums", watched)
    large = serve(block_size_bytes=1 << 16, pool_blocks=32, quota=32)
    values = [random.Random(place).randbytes(place << 15) for place in range(1, 6)]  # up to two and a half blocks
    keys = [b"%d" % place for place in range(1, 6)]
    into = [bytearray(len(value)) for value in values]
    writer = open_cache(targets=[large.url], rnic=open_rnic(rnic))
    assert all(item.ok for item in writer.put_many(keys, values))
    assert all(item.ok for item in writer.get_many_into(keys, into))
    assert into == values
    assert read == ([] if rnic == "native" else [5, 5])
    # Whichever way each takes them, they agree.
    other = open_cache(targets=[large.url], rnic=open_rnic("reference" if rnic == "native" else "native"))
    assert all(item.ok for item in other.get_many_into(keys, into))
    assert read == ([5] if rnic == "native" else [5, 5])
