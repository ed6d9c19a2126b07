"""What a user sees: puts, gets, batches, buffers, and what becomes of them when something is wrong."""

from __future__ import annotations

import math
import os
import threading
from collections.abc import Callable
from functools import partial

import numpy as np
import pytest

from kbtp.cache import Cache, MemoryIndex, Outcome
from kbtp.cache.record import Record
from kbtp.cache.steps import Claim, Publish, Step
from kbtp.errors import ApiMisuse
from kbtp.types import BlockRef

from .conftest import BLOCK_BYTES, Clock, WatchedServer

OpenCache = Callable[..., Cache]


def outcomes(items: list) -> list[Outcome]:
    return [item.outcome for item in items]


@pytest.mark.parametrize("length", [0, 1, BLOCK_BYTES - 1, BLOCK_BYTES, BLOCK_BYTES + 1, 4 * BLOCK_BYTES])
def test_a_value_of_any_length_comes_back(cache: Cache, target: WatchedServer, length: int) -> None:
    value, into = os.urandom(length), bytearray(b"\xee" * (length + 8))
    assert cache.put(b"key", value) is Outcome.STORED
    assert cache.get_into(b"key", into) == length
    assert into == value + b"\xee" * 8
    assert target.used_blocks == -(-length // BLOCK_BYTES)


def test_a_buffer_that_was_released_is_its_own_item_s_trouble(cache: Cache) -> None:
    buffer = memoryview(bytearray(5))
    buffer.release()
    assert outcomes(cache.put_many([b"a", b"b"], [b"value", buffer])) == [Outcome.STORED, Outcome.INVALID]
    assert outcomes(cache.get_many_into([b"a", b"a"], [bytearray(5), buffer])) == [Outcome.HIT, Outcome.INVALID]


KEYS = [b"\x00", b"/", b"../", b"@", b"\xff\xfe", b"a", b"a\x00", bytes(65536), bytes(65535) + b"\x01"]


def test_keys_are_octets(open_cache: OpenCache, serve: Callable[..., WatchedServer]) -> None:
    cache = open_cache(targets=[serve(quota=16).url])
    values = [b"value %d" % place for place in range(len(KEYS))]
    assert {*outcomes(cache.put_many(KEYS, values))} == {Outcome.STORED}
    for key, value in zip(KEYS, values, strict=True):
        into = bytearray(len(value))
        assert cache.get_into(key, into) == len(value)
        assert into == value


def test_what_is_no_key_or_no_buffer_is_said(cache: Cache) -> None:
    with pytest.raises(ApiMisuse, match="key of 0 octets"):
        cache.put(b"", b"value")
    with pytest.raises(ApiMisuse, match="buffer protocol or DLPack"):
        cache.put(b"key", 7)
    with pytest.raises(ApiMisuse, match="read-only"):
        cache.get_into(b"key", b"octets")
    with pytest.raises(ApiMisuse, match="2 keys, 1 buffers"):
        cache.put_many([b"a", b"b"], [b"value"])
    for never_s in (0, -1, math.nan, math.inf, 1e300):
        with pytest.raises(ApiMisuse, match="ttl_s of"):
            cache.put(b"key", b"value", ttl_s=never_s)
        with pytest.raises(ApiMisuse, match="a pin for"):
            cache.pin([b"key"], never_s)


def test_one_bad_item_is_its_own_affair(cache: Cache) -> None:
    put = cache.put_many([b"a", b"", b"c"], [b"1", b"2", object()])
    assert outcomes(put) == [Outcome.STORED, Outcome.INVALID, Outcome.INVALID]
    got = cache.get_many_into([b"a", b"b", b""], [bytearray(1), bytearray(1), bytearray(1)])
    assert outcomes(got) == [Outcome.HIT, Outcome.MISS, Outcome.INVALID]
    assert [item.ok for item in got] == [True, False, False]


def test_a_buffer_too_small_is_said_with_the_length(cache: Cache) -> None:
    cache.put(b"key", bytes(100))
    [item] = cache.get_many_into([b"key"], [bytearray(99)])
    assert (item.outcome, item.length_bytes) == (Outcome.INVALID, 100)
    with pytest.raises(ApiMisuse, match="the value has 100 octets, the buffer 99"):
        cache.get_into(b"key", bytearray(99))


def test_numpy_and_registered_slices_are_used_in_place(cache: Cache) -> None:
    memory = np.arange(6 * BLOCK_BYTES, dtype=np.uint8).reshape(6, BLOCK_BYTES)
    registration = cache.register(memory)
    cache.put(b"key", memory[:2])
    assert cache.get_into(b"key", memory[3:5]) == 2 * BLOCK_BYTES
    assert (memory[3:5] == memory[:2]).all()
    registration.revoke()
    assert cache.get_into(b"key", memory[3:5]) == 2 * BLOCK_BYTES


def test_the_same_key_twice_in_a_batch_of_gets_fills_both_buffers(cache: Cache) -> None:
    cache.put(b"key", b"value")
    buffers = [bytearray(5), bytearray(5)]
    assert outcomes(cache.get_many_into([b"key", b"key"], buffers)) == [Outcome.HIT, Outcome.HIT]
    assert buffers == [b"value", b"value"]


def test_two_values_into_the_same_memory_are_refused(cache: Cache) -> None:
    cache.put_many([b"a", b"b"], [b"1" * 100, b"2" * 100])
    memory = bytearray(150)
    view = memoryview(memory)
    assert outcomes(cache.get_many_into([b"a", b"b"], [view[:100], view[50:]])) == [Outcome.HIT, Outcome.INVALID]
    assert memory[:100] == b"1" * 100


# --- who wins ------------------------------------------------------------------------------------


def test_the_first_put_of_a_key_wins(open_cache: OpenCache, target: WatchedServer) -> None:
    one, other = open_cache(), open_cache()
    assert one.put(b"key", b"first") is Outcome.STORED
    assert other.put(b"key", b"second") is Outcome.PRESENT
    into = bytearray(6)
    assert other.get_into(b"key", into) == 5
    assert into[:5] == b"first"
    assert target.used_blocks == 1


def steps_of(cache: Cache, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What the index and the targets are asked for from now on."""
    done: list[str] = []

    def told(call: Callable[..., object], step: Step, *meanwhile: object) -> object:
        done.append(type(step).__name__)
        return call(step, *meanwhile)

    for at, name in ((cache._index, "perform"), (cache._links, "perform"), (cache._links, "load")):
        monkeypatch.setattr(at, name, partial(told, getattr(at, name)))
    return done


def test_a_value_whose_record_is_known_is_one_look_up_and_one_load(
    open_cache: OpenCache, cache: Cache, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache.put(b"key", b"value")
    reader = open_cache()
    for one in (cache, reader, reader):  # that put it, that reads it first, that has read it
        done = steps_of(one, monkeypatch)
        into = bytearray(5)
        one.get_into(b"other", into)
        done.clear()
        assert one.get_into(b"key", into) == 5
        assert into == b"value"
        assert done == ["Lookup", "Load"]
        monkeypatch.undo()


@pytest.mark.parametrize("later", [b"other", b"longer than it was", b"less", b""], ids=str)
def test_a_value_that_has_made_way_for_another_since_is_that_one(
    open_cache: OpenCache, cache: Cache, later: bytes
) -> None:
    """Also where the blocks of the former one are still there."""
    owner, into = open_cache(), bytearray(20)
    owner.put_many([b"key", b"kept"], [b"value", b"stays"])
    kept = bytearray(5)
    assert all(item.ok for item in cache.get_many_into([b"key", b"kept"], [into, kept]))
    other = open_cache()
    other.delete(b"key")
    other.put(b"key", later)
    kept[:] = bytes(5)
    items = cache.get_many_into([b"kept", b"key"], [kept, into])
    assert [item.length_bytes for item in items] == [5, len(later)]
    assert (kept, into[: len(later)]) == (b"stays", later)
    assert cache.counters.stale_records == cache.counters.corrupt_values == 0


def test_a_value_that_has_outgrown_its_buffer_is_said(open_cache: OpenCache, cache: Cache) -> None:
    cache.put(b"key", b"value")
    with pytest.raises(ApiMisuse, match="5 octets, the buffer 4"):
        cache.get_into(b"key", bytearray(4))
    other = open_cache()
    other.delete(b"key")
    other.put(b"key", b"longer")
    with pytest.raises(ApiMisuse, match="6 octets, the buffer 5"):
        cache.get_into(b"key", bytearray(5))


def test_a_put_of_what_is_likely_to_be_new_is_one_round_trip(cache: Cache, monkeypatch: pytest.MonkeyPatch) -> None:
    cache.put(b"first", b"1")
    done = steps_of(cache, monkeypatch)
    assert cache.put(b"key", b"value") is Outcome.STORED
    assert done == ["AllocStore", "Claim"]
    done.clear()
    assert cache.put(b"key", b"value") is Outcome.PRESENT
    assert done == ["Lookup"]
    done.clear()
    large = memoryview(bytes(1)).cast("B")
    monkeypatch.setattr("kbtp.cache.put.CACHE_CLAIM_MAX_BYTES", 0)
    assert cache.put(b"large", large) is Outcome.STORED
    assert done[0] == "Lookup"


def test_the_same_key_twice_in_a_batch_of_puts_is_stored_once(cache: Cache, target: WatchedServer) -> None:
    assert outcomes(cache.put_many([b"key", b"key"], [b"1", b"2"])) == [Outcome.STORED, Outcome.PRESENT]
    into = bytearray(1)
    cache.get_into(b"key", into)
    assert into == b"1"
    assert target.used_blocks == 1


class Overtaken(MemoryIndex):
    """Somebody else publishes under each name just before we do."""

    rival: bytes = b""

    def perform(self, step):  # type: ignore[no-untyped-def]
        if isinstance(step, (Publish, Claim)) and self.rival:
            super().perform(Publish([(name, self.rival) for name, _ in step.entries]))
        return super().perform(step)


def test_a_put_that_is_overtaken_frees_its_blocks(open_cache: OpenCache, target: WatchedServer, clock: Clock) -> None:
    index = Overtaken(clock)
    cache = open_cache(index=index)
    index.rival = Record(bytes(16), 0, 0, 1, ()).pack()
    assert cache.put(b"key", bytes(2 * BLOCK_BYTES)) is Outcome.PRESENT
    assert target.used_blocks == 0
    index.rival = b""
    cache.put_many([b"1", b"2"], [b"1", b"2"])
    cache._state.puts_to_look_up = 0
    index.rival = Record(bytes(16), 0, 0, 1, ()).pack()
    assert cache.put(b"other", bytes(2 * BLOCK_BYTES)) is Outcome.PRESENT  # without a look-up first
    assert target.used_blocks == 2


def test_namespaces_have_nothing_to_do_with_each_other(open_cache: OpenCache) -> None:
    one, other = open_cache(namespace="bf16"), open_cache(namespace="fp8")
    one.put(b"key", b"one")
    assert not other.contains(b"key")
    assert other.put(b"key", b"other") is Outcome.STORED
    assert one.clear() == 1
    assert other.contains(b"key")


def test_threads_share_a_cache(open_cache: OpenCache, serve: Callable[..., WatchedServer]) -> None:
    cache = open_cache(targets=[serve(quota=12).url])
    wrong: list[bytes] = []

    def work(number: int) -> None:
        for turn in range(30):
            key = b"%d" % (turn % 7)
            value = key * BLOCK_BYTES
            cache.put(key, value)
            into = bytearray(BLOCK_BYTES)
            if cache.get_into(key, into) is not None and bytes(into) != value:
                wrong.append(key)
            if turn % 5 == number:
                cache.delete(key)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


# --- look-ups, deleting, time --------------------------------------------------------------------


def test_the_longest_prefix(cache: Cache) -> None:
    cache.put_many([b"0", b"1", b"3"], [b"x", b"y", b"z"])
    assert cache.longest_prefix([b"0", b"1", b"2", b"3"]) == 2
    assert cache.longest_prefix([b"3"]) == 1
    assert cache.longest_prefix([]) == 0


def test_delete_frees_the_blocks(cache: Cache, target: WatchedServer) -> None:
    cache.put(b"key", bytes(2 * BLOCK_BYTES))
    assert cache.delete(b"key")
    assert not cache.delete(b"key")
    assert cache.get_into(b"key", bytearray(2 * BLOCK_BYTES)) is None
    assert target.used_blocks == 0


def test_what_another_one_deletes_is_freed_with_the_owner_s_next_put(
    open_cache: OpenCache, target: WatchedServer
) -> None:
    owner, other = open_cache(), open_cache()
    owner.put(b"key", bytes(3 * BLOCK_BYTES))
    assert other.delete(b"key")
    assert owner.get_into(b"key", bytearray(3 * BLOCK_BYTES)) is None
    owner.put(b"next", b"value")
    assert target.used_blocks == 1


def test_a_value_put_again_survives_the_news_of_its_deletion(open_cache: OpenCache, target: WatchedServer) -> None:
    owner, other = open_cache(), open_cache()
    owner.put(b"key", b"old")
    other.delete(b"key")
    owner.put(b"key", b"new")
    owner.put(b"next", b"value")
    into = bytearray(3)
    assert owner.get_into(b"key", into) == 3
    assert into == b"new"
    assert target.used_blocks == 2


def test_a_value_expires(cache: Cache, clock: Clock) -> None:
    cache.put(b"key", b"value", ttl_s=10)
    clock.now_s += 9.9
    assert cache.contains(b"key")
    clock.now_s += 0.1
    assert not cache.contains(b"key")
    assert cache.put(b"key", b"other") is Outcome.STORED


def test_a_reader_takes_no_share(open_cache: OpenCache, target: WatchedServer) -> None:
    writer, reader = open_cache(), open_cache(read_only=True)
    writer.put(b"key", b"value")
    assert reader.get_into(b"key", bytearray(5)) == 5
    assert target.target.store.quotas.left == 16 - 4 - 1
    with pytest.raises(ApiMisuse, match="read_only"):
        reader.put(b"other", b"value")


# --- never silently wrong ------------------------------------------------------------------------


def record_of(index: MemoryIndex) -> tuple[bytes, Record]:
    [(name, (octets, _))] = index._records.items()
    return name, Record.parse(octets)


def replace(index: MemoryIndex, name: bytes, record: bytes) -> None:
    index._records[name] = record, None


def test_a_block_that_was_freed_is_a_miss_and_its_record_goes(
    cache: Cache, index: MemoryIndex, target: WatchedServer
) -> None:
    cache.put(b"key", b"value")
    name, record = record_of(index)
    [ref] = record.copies[0].refs
    gone = Record(
        record.owner,
        record.length_bytes,
        record.checksum,
        record.block_bytes,
        (type(record.copies[0])(record.copies[0].incarnation, (BlockRef(ref.handle, ref.generation + 1, 5),)),),
    )
    replace(index, name, gone.pack())
    assert cache.get_into(b"key", bytearray(5)) is None
    assert cache.counters.stale_records == 1
    assert not cache.contains(b"key")


def test_a_value_that_does_not_match_its_checksum_is_a_miss(cache: Cache, index: MemoryIndex) -> None:
    cache.put(b"key", b"value")
    name, record = record_of(index)
    other = Record(record.owner, record.length_bytes, record.checksum ^ 1, record.block_bytes, record.copies)
    replace(index, name, other.pack())
    assert cache.get_into(b"key", bytearray(5), verify=False) == 5
    assert cache.get_into(b"key", bytearray(5)) is None
    assert cache.counters.corrupt_values == 1
    assert not cache.contains(b"key")


def test_a_block_of_another_length_is_a_miss(cache: Cache, index: MemoryIndex) -> None:
    cache.put(b"key", b"value")
    name, record = record_of(index)
    longer = Record(record.owner, 6, record.checksum, record.block_bytes, record.copies)
    replace(index, name, longer.pack())
    assert cache.get_into(b"key", bytearray(6)) is None
    assert cache.counters.stale_records == 1


def test_a_record_that_cannot_be_read_is_a_miss_and_stays(cache: Cache, index: MemoryIndex) -> None:
    cache.put(b"key", b"value")
    name, _ = record_of(index)
    replace(index, name, b"\x02 of a later version")
    assert cache.get_into(b"key", bytearray(5)) is None
    assert cache.put(b"key", b"value") is Outcome.UNAVAILABLE
    assert index._records[name][0] == b"\x02 of a later version"


# --- room ----------------------------------------------------------------------------------------


def test_the_least_recently_used_makes_room(cache: Cache, target: WatchedServer) -> None:
    for number in range(4):
        cache.put(b"%d" % number, bytes(BLOCK_BYTES))
    cache.get_into(b"0", bytearray(BLOCK_BYTES))
    assert cache.put(b"new", bytes(2 * BLOCK_BYTES)) is Outcome.STORED
    assert [cache.contains(key) for key in (b"0", b"1", b"2", b"3", b"new")] == [True, False, False, True, True]
    assert cache.counters.evictions == 2
    assert target.used_blocks == 4


def test_what_others_read_is_kept(open_cache: OpenCache) -> None:
    owner, reader = open_cache(), open_cache()
    for number in range(4):
        owner.put(b"%d" % number, bytes(BLOCK_BYTES))
    reader.get_into(b"0", bytearray(BLOCK_BYTES))
    reader.contains(b"anything")  # takes along what was read
    owner.put(b"new", bytes(BLOCK_BYTES))
    assert owner.contains(b"0")
    assert not owner.contains(b"1")


def test_a_batch_is_used_from_its_end(cache: Cache) -> None:
    cache.put_many([b"0", b"1", b"2", b"3"], [bytes(BLOCK_BYTES)] * 4)
    cache.put(b"new", bytes(BLOCK_BYTES))
    assert cache.longest_prefix([b"0", b"1", b"2", b"3"]) == 3


def test_the_expired_go_first(open_cache: OpenCache, clock: Clock) -> None:
    cache = open_cache(clock=clock)
    cache.put_many([b"old", b"older"], [bytes(BLOCK_BYTES)] * 2)
    cache.put(b"short", bytes(BLOCK_BYTES), ttl_s=5)
    cache.put(b"new", bytes(BLOCK_BYTES))
    clock.now_s += 6
    cache.put(b"newest", bytes(BLOCK_BYTES))
    assert all(cache.contains(key) for key in (b"old", b"older", b"new", b"newest"))


def test_a_value_larger_than_the_share_is_told(cache: Cache, target: WatchedServer) -> None:
    cache.put(b"small", b"value")
    assert cache.put(b"large", bytes(5 * BLOCK_BYTES)) is Outcome.NO_SPACE
    assert cache.contains(b"small")
    assert cache.counters.no_space == 1


def test_a_batch_larger_than_the_share_keeps_its_beginning(cache: Cache, target: WatchedServer) -> None:
    cache.put(b"before", bytes(BLOCK_BYTES))
    keys = [b"%d" % number for number in range(10)]
    stored = cache.put_many(keys, [bytes(BLOCK_BYTES)] * 10)
    assert outcomes(stored) == [Outcome.STORED] * 4 + [Outcome.NO_SPACE] * 6
    assert [cache.contains(key) for key in keys] == [item.ok for item in stored]
    assert target.used_blocks == 4


def test_what_is_there_already_makes_no_way_for_the_rest_of_its_batch(cache: Cache, target: WatchedServer) -> None:
    keys = [b"%d" % number for number in range(5)]
    cache.put(keys[0], bytes(2 * BLOCK_BYTES))
    cache.put_many([b"x", b"y"], [bytes(BLOCK_BYTES)] * 2)
    stored = cache.put_many(keys, [bytes(BLOCK_BYTES)] * 5)
    assert outcomes(stored) == [Outcome.PRESENT] + [Outcome.STORED] * 2 + [Outcome.NO_SPACE] * 2
    assert cache.longest_prefix(keys) == 3
    assert target.used_blocks == 4


def test_a_pin_keeps_the_evictor_away_until_its_deadline(open_cache: OpenCache, clock: Clock) -> None:
    owner, other = open_cache(), open_cache()
    owner.put_many([b"a", b"b"], [bytes(2 * BLOCK_BYTES)] * 2)
    assert outcomes(other.pin([b"a", b"none"], 10)) == [Outcome.HIT, Outcome.MISS]
    owner.put(b"c", bytes(BLOCK_BYTES))
    assert [owner.contains(key) for key in (b"a", b"b", b"c")] == [True, False, True]
    assert owner.put(b"d", bytes(3 * BLOCK_BYTES)) is Outcome.NO_SPACE
    clock.now_s += 10
    assert owner.put(b"d", bytes(3 * BLOCK_BYTES)) is Outcome.STORED
    assert not owner.contains(b"a")


def test_an_unpinned_value_can_go_and_a_pinned_one_be_deleted(open_cache: OpenCache) -> None:
    cache = open_cache()
    cache.put_many([b"a", b"b"], [bytes(2 * BLOCK_BYTES)] * 2)
    cache.pin([b"a", b"b"], 10)
    cache.unpin([b"a"])
    assert cache.put(b"c", bytes(2 * BLOCK_BYTES)) is Outcome.STORED
    assert not cache.contains(b"a")
    assert cache.delete(b"b")
    with pytest.raises(ApiMisuse, match="a pin for 0 s"):
        cache.pin([b"c"], 0)


def test_a_target_without_room_for_a_writer_is_read(open_cache: OpenCache, serve: Callable[..., WatchedServer]) -> None:
    small = serve(pool_blocks=4, quota=4)
    first, late = open_cache(targets=[small.url]), open_cache(targets=[small.url], quota=2)
    first.put(b"key", b"value")
    assert late.get_into(b"key", bytearray(5)) == 5
    assert late.put(b"other", b"value") is Outcome.NO_SPACE
