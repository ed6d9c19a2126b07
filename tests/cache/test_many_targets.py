"""Several targets: keys are spread, copies survive a dead one, one that is drained is left."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace

import pytest

from kbtp.cache import Cache, MemoryIndex, Outcome
from kbtp.cache.announcement import Announcement
from kbtp.cache.steps import Announce, Drain

from .conftest import BLOCK_BYTES, Clock, WatchedServer

Serve = Callable[..., WatchedServer]
OpenCache = Callable[..., Cache]


def announce(index: MemoryIndex, server: WatchedServer) -> Announcement:
    config = server.config
    about = Announcement(server.target.incarnation, server.url, config.block_size_bytes, config.pool_blocks)
    index.perform(Announce(about))
    return about


@pytest.fixture
def targets(serve: Serve, index: MemoryIndex) -> list[WatchedServer]:
    servers = [serve(pool_blocks=64, quota=48) for _ in range(3)]
    for server in servers:
        announce(index, server)
    return servers


KEYS = [b"%d" % number for number in range(40)]
VALUES = [os.urandom(BLOCK_BYTES) for _ in KEYS]


def found(cache: Cache) -> list[bytes]:
    into = [bytearray(BLOCK_BYTES) for _ in KEYS]
    items = cache.get_many_into(KEYS, into)
    assert all(not item.ok or buffer == value for item, buffer, value in zip(items, into, VALUES, strict=True))
    return [key for key, item in zip(KEYS, items, strict=True) if item.ok]


def test_keys_are_spread_and_found(open_cache: OpenCache, targets: list[WatchedServer]) -> None:
    writer, reader = open_cache(targets=None), open_cache(targets=None)
    assert all(item.ok for item in writer.put_many(KEYS, VALUES))
    assert found(reader) == KEYS
    used = [target.used_blocks for target in targets]
    assert sum(used) == len(KEYS)
    assert all(used)


def test_a_dead_target_costs_its_own_keys_alone(open_cache: OpenCache, targets: list[WatchedServer]) -> None:
    cache = open_cache(targets=None)
    cache.put_many(KEYS, VALUES)
    lost = targets[0].used_blocks
    targets[0].stop()
    assert len(found(cache)) == len(KEYS) - lost
    assert cache.counters.target_failures


def test_two_copies_survive_a_dead_target(
    open_cache: OpenCache, targets: list[WatchedServer], index: MemoryIndex
) -> None:
    cache = open_cache(targets=None, copies=2)
    keys, values = KEYS[:6], VALUES[:6]
    assert all(item.ok for item in cache.put_many(keys, values))
    assert sum(target.used_blocks for target in targets) == 12
    targets[1].stop()
    assert found(cache) == keys
    cache.delete_many(keys)
    assert targets[0].used_blocks == targets[2].used_blocks == 0


def test_fewer_targets_than_copies_is_as_many_as_there_are(open_cache: OpenCache, target: WatchedServer) -> None:
    cache = open_cache(copies=3)
    assert cache.put(b"key", b"value") is Outcome.STORED
    assert target.used_blocks == 1


def test_a_target_that_does_not_announce_itself_any_more_is_not_used(
    open_cache: OpenCache, targets: list[WatchedServer], index: MemoryIndex, clock: Clock
) -> None:
    cache = open_cache(targets=None, clock=clock)
    cache.put_many(KEYS, VALUES)
    clock.now_s += 20
    announce(index, targets[2])
    assert all(item.ok for item in cache.put_many(KEYS, VALUES))
    assert found(cache) == KEYS
    assert targets[2].used_blocks == len(KEYS)


def test_one_that_is_drained_is_left(
    open_cache: OpenCache, targets: list[WatchedServer], index: MemoryIndex, clock: Clock
) -> None:
    cache = open_cache(targets=None, clock=clock)
    cache.put_many(KEYS, VALUES)
    index.perform(Drain(targets[0].target.incarnation))
    clock.now_s += 6
    for target in targets:
        announce(index, target)
    cache.put_many(KEYS, VALUES)
    assert targets[0].used_blocks == 0
    assert found(cache) == KEYS


def test_a_target_that_began_anew_is_used_anew(
    open_cache: OpenCache, serve: Serve, index: MemoryIndex, clock: Clock
) -> None:
    first = serve()
    announce(index, first)
    cache = open_cache(targets=None, clock=clock)
    cache.put(b"key", b"value")
    first.stop()
    second = serve(port=int(first.url.rpartition(":")[2]))
    clock.now_s += 20
    announce(index, second)
    assert cache.put(b"key", b"again") is Outcome.STORED
    into = bytearray(5)
    assert cache.get_into(b"key", into) == 5
    assert into == b"again"
    assert list(cache._state.shares) == [second.target.incarnation]


def test_former_lives_of_a_target_cost_a_session_each_and_no_more(
    open_cache: OpenCache, index: MemoryIndex, target: WatchedServer
) -> None:
    """Their announcements have not run out yet."""
    about = announce(index, target)
    for former in (1, 2):
        index.perform(Announce(replace(about, incarnation=former)))
    cache = open_cache(targets=None)
    for key in KEYS[:4]:
        assert cache.put(key, b"value") is Outcome.STORED
    assert cache.counters.sessions == {target.url: 3}


def test_values_of_different_targets_do_not_share_memory(open_cache: OpenCache, targets: list[WatchedServer]) -> None:
    """Each target moves its own as it should; what is in the buffer then is not what both were told."""
    writer, reader = open_cache(targets=None), open_cache(targets=None)
    writer.put_many(KEYS, VALUES)
    for cache in (writer, reader):  # by records that are remembered, and by others
        memory = memoryview(bytearray(2 * BLOCK_BYTES))
        into = [memory[place * 64 : place * 64 + BLOCK_BYTES] for place in range(40)]
        items = cache.get_many_into(KEYS, into)
        assert [item.outcome for item in items] == [Outcome.HIT] + [Outcome.INVALID] * 39
        assert into[0] == VALUES[0]
        assert cache.counters.corrupt_values == 0
