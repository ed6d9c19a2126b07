"""The rules that close races, and what is left when something fails: profile 6.1, 6.5, 6.8, TARGET_ERROR."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest

from kbtp.target.actions import Abort, Disconnect
from kbtp.target.sequences import Sequences, Task
from kbtp.types import Status
from kbtp.wire import AllocStore

BLOCK = 512
OLD = b"\xaa" * BLOCK
NEW = b"\x55" * BLOCK


# --- 6.1: a SUCCESS of a LOAD is never a mixture ---


@pytest.fixture
def owner_and_reader(world: Any) -> tuple[Any, Any, int]:
    """An owner with one sealed block, a reader with a LOAD of it half done, the LOAD's Request ID."""
    owner, reader = world.connect(), world.connect()
    owner.bind(owner.handle(), OLD)
    return owner, reader, reader.load(owner.handle())


def test_free_clears_the_entry_at_once(world: Any, owner_and_reader: tuple[Any, Any, int]) -> None:
    """Profile 6.1: so that later loads see it."""
    owner, reader, _ = owner_and_reader
    owner.free(owner.handle())
    assert not owner.entry(owner.handle()).valid
    late = reader.load(owner.handle())
    assert (reader.status(late), reader.answers[late].generation) == (Status.NOT_BOUND, 3)


def test_free_completes_when_the_pins_are_gone(world: Any, owner_and_reader: tuple[Any, Any, int]) -> None:
    """Profile 6.1: and the LOAD that began before it returns the old block, whole."""
    owner, reader, load = owner_and_reader
    free = owner.free(owner.handle())
    assert owner.status(free) is None
    assert world.store.free_blocks == 3
    reader.finish()
    assert (owner.status(free), owner.answers[free].generation) == (Status.SUCCESS, 3)
    assert world.store.free_blocks == 4
    assert reader.status(load) is Status.SUCCESS
    assert reader.buffers[reader.next_stag] == OLD


def test_a_fault_in_what_waited_for_a_pin_ends_its_session_and_not_the_reader_s(
    world: Any, owner_and_reader: tuple[Any, Any, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The end of the reader's LOAD completes the owner's FREE, and starts what the owner has asked for after it."""
    owner, reader, load = owner_and_reader
    owner.free(owner.handle())
    owner.alloc_store(owner.handle(), NEW)
    start = Sequences.start

    def broken(self: Sequences, task: Task) -> None:
        if isinstance(task.request, AllocStore):
            raise ZeroDivisionError("a fault")
        start(self, task)

    monkeypatch.setattr(Sequences, "start", broken)
    reader.finish()
    assert (reader.status(load), reader.end_action) == (Status.SUCCESS, None)
    assert isinstance(owner.end_action, Abort)
    assert isinstance(owner.end_action.error, ZeroDivisionError)


def test_an_entry_that_changes_between_checks_and_pin_is_checked_anew(
    world: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An RNIC that executes sequences may do that. Here the block is freed just then."""
    owner, reader = world.connect(), world.connect()
    owner.bind(owner.handle(), OLD)
    pin = world.store.begin_load_of

    def free_first(handle: int, entry: Any, reader_session: object) -> Any:
        monkeypatch.undo()
        world.store.begin_free(handle, owner.session.identity, lambda _entry: None)
        return pin(handle, entry, reader_session)

    monkeypatch.setattr(world.store, "begin_load_of", free_first)
    load = reader.load(owner.handle())
    assert (reader.status(load), reader.answers[load].generation) == (Status.NOT_BOUND, 3)


def test_every_pin_holds_the_block(world: Any, owner_and_reader: tuple[Any, Any, int]) -> None:
    owner, reader, _ = owner_and_reader
    other = world.connect()
    other.load(owner.handle())
    free = owner.free(owner.handle())
    reader.finish()
    assert owner.status(free) is None
    other.finish()
    assert owner.status(free) is Status.SUCCESS
    assert other.buffers[other.next_stag] == OLD


def test_a_pinned_block_is_nobody_elses(world: Any, owner_and_reader: tuple[Any, Any, int]) -> None:
    """The block is in use until the reader is done: all others are taken and written before that."""
    owner, reader, _ = owner_and_reader
    owner.free(owner.handle())
    offset = reader.writes[0].sges[0].offset
    for peer, n in ((owner, 1), (reader, 0), (reader, 1)):
        answer = peer.bind(peer.handle(n), NEW)
        assert world.store.pool.position(answer.block_offset) != offset
    reader.finish()
    assert reader.buffers[0x101] == OLD


def test_the_quota_comes_back_with_the_completion(world: Any, owner_and_reader: tuple[Any, Any, int]) -> None:
    """Profile 3: quota released by a FREE may be relied on after its completion, not before (draft 3.4)."""
    owner, reader, _ = owner_and_reader
    owner.bind(owner.handle(1), NEW)
    free = owner.free(owner.handle())
    early = owner.alloc_store(owner.handle(2), NEW, flags=world.INLINE)
    assert owner.status(early) is Status.NO_SPACE
    reader.finish()
    assert owner.status(free) is Status.SUCCESS
    owner.bind(owner.handle(2), NEW)


def test_a_block_is_cleared_only_when_the_pins_are_gone(new_world: Callable[..., Any]) -> None:
    """Profile 6.1 and 3 "Trust domain": of a pool that is told to clear all its blocks."""
    world = new_world(clear_on_free=True)
    owner, reader = world.connect(), world.connect()
    owner.bind(owner.handle(), OLD)
    reader.load(owner.handle())
    owner.free(owner.handle())
    reader.finish()
    assert reader.buffers[reader.next_stag] == OLD
    assert bytes(world.pool.view) == bytes(len(world.pool.view))


def test_sealing_does_not_disturb_a_load(world: Any) -> None:
    """Profile 6.1."""
    owner, reader = world.connect(), world.connect()
    owner.bind(owner.handle(), OLD, seal=False)
    load = reader.load(owner.handle(), flags=world.ALLOW_UNSEALED)
    seal = owner.store(owner.handle(), OLD, flags=world.SEAL | world.INLINE)
    assert owner.status(seal) is Status.SUCCESS
    assert reader.load(owner.handle())
    reader.finish_all()
    assert reader.status(load) is Status.SUCCESS
    assert all(octets == OLD for octets in reader.buffers.values())


def test_allow_unsealed_is_what_its_name_says(world: Any) -> None:
    """Profile 6.1: while the owner STOREs, a mixture is possible."""
    owner, reader = world.connect(), world.connect()
    owner.bind(owner.handle(), OLD, seal=False)
    reader.load(owner.handle(), flags=world.ALLOW_UNSEALED)
    owner.store(owner.handle(), NEW, flags=world.INLINE)
    reader.finish()
    assert reader.buffers[reader.next_stag] == OLD[: BLOCK // 2] + NEW[BLOCK // 2 :]


def test_a_reader_that_does_not_drain_has_its_stream_ended(world: Any, owner_and_reader: tuple[Any, Any, int]) -> None:
    """Profile 6.1: within `drain` seconds of the FREE, which completes when the reader's stream has ended."""
    owner, reader, _ = owner_and_reader
    world.advance(1000)
    assert reader.end_action is None
    free = owner.free(owner.handle())
    assert world.target.next_deadline_s() == world.now_s + 5
    world.advance(4.9)
    assert reader.end_action is None
    world.advance(0.1)
    assert isinstance(reader.end_action, Abort)
    assert owner.status(free) is None
    reader.end()
    assert owner.status(free) is Status.SUCCESS
    assert owner.end_action is None
    assert world.target.next_deadline_s() == math.inf


def test_a_reader_that_is_ending_in_order_must_drain_too(world: Any, owner_and_reader: tuple[Any, Any, int]) -> None:
    """It lets go of its pins no sooner than its peer reads."""
    owner, reader, _ = owner_and_reader
    free = owner.free(owner.handle())
    assert reader.hello().status == Status.NO_SESSION
    assert isinstance(reader.end_action, Disconnect)
    world.advance(5)
    assert isinstance(reader.end_action, Abort)
    assert "a LOAD did not drain within 5 s" in reader.end_action.why
    reader.end()
    assert owner.status(free) is Status.SUCCESS


def test_a_reader_that_drains_in_time_stays(world: Any, owner_and_reader: tuple[Any, Any, int]) -> None:
    owner, reader, _ = owner_and_reader
    owner.free(owner.handle())
    world.advance(4.9)
    reader.finish()
    world.advance(0.2)
    assert reader.end_action is None
    assert world.target.next_deadline_s() == math.inf


def test_each_free_of_a_block_has_its_own_time(new_world: Callable[..., Any]) -> None:
    """Profile 6.1: the same block, bound, loaded and freed again before the target has looked at its deadlines."""
    world = new_world(pool_blocks=1, quota=1)
    owner, reader = world.connect(), world.connect()
    owner.bind(owner.handle(), OLD)
    for _ in range(2):
        reader.load(owner.handle())
        owner.free(owner.handle())
        world.now_s += 3
        reader.finish()
        owner.bind(owner.handle(), OLD)
    reader.load(owner.handle())
    owner.free(owner.handle())
    world.advance(4.9)
    assert reader.end_action is None
    world.advance(0.1)
    assert isinstance(reader.end_action, Abort)


@pytest.mark.parametrize("by_leaving", [False, True])
def test_the_time_of_a_free_ends_with_it(world: Any, owner_and_reader: tuple[Any, Any, int], by_leaving: bool) -> None:
    """Profile 6.1: not with the next look at the deadlines, by when somebody else may wait for the same block."""
    owner, reader, _ = owner_and_reader
    if by_leaving:
        owner.end()
    else:
        owner.free(owner.handle())
    assert world.target.next_deadline_s() == world.now_s + 5
    reader.finish()
    assert world.target.next_deadline_s() == math.inf


def test_a_reader_must_also_drain_when_an_owner_has_left(world: Any, owner_and_reader: tuple[Any, Any, int]) -> None:
    """Profile 6.1: what an ended session leaves is freed like by FREE, and no reader may hold it for ever."""
    owner, reader, _ = owner_and_reader
    world.now_s += 3
    owner.end()
    assert world.target.next_deadline_s() == world.now_s + 5
    world.advance(5)
    assert isinstance(reader.end_action, Abort)
    reader.end()
    assert world.store.free_blocks == 4
    assert world.store.quotas.left == 4


def test_an_old_deadline_is_not_a_later_readers(new_world: Callable[..., Any]) -> None:
    """Profile 6.1: the time counts from the freeing that the reader holds up, not from one before."""
    world = new_world(pool_blocks=1, quota=1)
    owner, reader = world.connect(), world.connect()
    owner.bind(owner.handle(), OLD)
    reader.load(owner.handle())
    owner.free(owner.handle())
    world.now_s += 3
    reader.finish()
    owner.bind(owner.handle(), OLD)
    reader.load(owner.handle())
    owner.end()
    world.advance(2)
    assert reader.end_action is None
    world.advance(3)
    assert isinstance(reader.end_action, Abort)


# --- 6.5: a failed STORE ---


def test_a_store_changes_nothing_until_all_its_data_is_there(world: Any) -> None:
    """Profile 6.5: data is staged and copied once complete."""
    peer, reader = world.connect(), world.connect()
    peer.bind(peer.handle(), OLD, seal=False)
    before = peer.entry(peer.handle())
    peer.store(peer.handle(), NEW[:100], flags=world.SEAL)
    assert peer.entry(peer.handle()) == before
    assert reader.look(peer.handle()) == OLD
    peer.finish()
    assert reader.look(peer.handle()) == NEW[:100]
    assert peer.entry(peer.handle()).sealed
    assert peer.memory.held_regions == 0


def test_a_failed_store_leaves_content_and_length_and_does_not_seal(world: Any) -> None:
    """Profile 6.5 and 8.9: the stream ended with the RDMA Read half done."""
    peer, reader = world.connect(initiator_id=bytes([1] * 16)), world.connect()
    peer.bind(peer.handle(), OLD[:300], seal=False)
    before = peer.entry(peer.handle())
    peer.store(peer.handle(), NEW, flags=world.SEAL)
    peer.end()
    assert reader.entry(peer.handle()) == before
    assert reader.look(peer.handle()) == OLD[:300]
    assert peer.memory.held_regions == 0


def test_a_failed_alloc_store_leaves_the_entry_unbound(world: Any) -> None:
    """Profile 6.5: its block is in the ring again, its unit in the quota."""
    peer = world.connect(initiator_id=bytes([1] * 16), requested_quota=1)
    before = peer.entry(peer.handle())
    peer.alloc_store(peer.handle(), NEW)
    assert world.store.free_blocks == 3
    peer.end()
    assert world.store.free_blocks == 4
    again = world.connect(initiator_id=bytes([1] * 16))
    assert again.entry(again.handle()) == before
    assert again.bind(again.handle(), NEW).generation == 2


def test_an_alloc_store_is_not_seen_before_its_data_is_there(world: Any) -> None:
    """Draft 6.3: the entry is written after the data."""
    peer, reader = world.connect(), world.connect()
    peer.alloc_store(peer.handle(), NEW, flags=world.SEAL)
    assert reader.status(reader.load(peer.handle())) is Status.NOT_BOUND
    peer.finish()
    assert reader.look(peer.handle()) == NEW


# --- 6.8: quota ---


def test_quota_is_checked_before_a_ticket_is_taken(world: Any) -> None:
    """Profile 6.8 and 3: NO_SPACE, never the end of the session; the ring does not move."""
    peer = world.connect(requested_quota=1, requested_handles=4)
    peer.bind(peer.handle(), OLD)
    head = world.store.ring.free_count
    for n in range(1, 3):
        request = peer.alloc_store(peer.handle(n), NEW)
        assert (peer.status(request), peer.answers[request].generation) == (Status.NO_SPACE, 1)
    assert world.store.ring.free_count == head == 3
    assert peer.end_action is None
    assert not peer.posted


def test_an_alloc_store_in_progress_counts_against_the_quota(world: Any) -> None:
    """Draft 3.4: tickets taken and not yet bound."""
    peer = world.connect(requested_quota=1)
    first = peer.alloc_store(peer.handle(), OLD)
    assert peer.status(peer.alloc_store(peer.handle(1), NEW)) is Status.NO_SPACE
    peer.finish()
    assert peer.status(first) is Status.SUCCESS


def test_everyone_can_use_all_of_its_quota_at_once(world: Any) -> None:
    """Draft 3.4: the sum of quotas is at most F, so there is a block for each unit."""
    one, two = world.connect(requested_quota=3), world.connect(requested_quota=4)
    offsets = {one.bind(one.handle(n), OLD).block_offset for n in range(3)}
    offsets |= {two.bind(two.handle(n), NEW).block_offset for n in range(two.ack.allocation_quota)}
    assert len(offsets) == 4


# --- TARGET_ERROR: the entry is as it was ---


def test_no_memory_to_stage_a_store(world: Any) -> None:
    """Profile 1: TARGET_ERROR; the session goes on, what waited behind is done."""
    peer = world.connect()
    peer.bind(peer.handle(), OLD, seal=False)
    before = peer.entry(peer.handle())
    peer.memory.exhausted = True
    answer = peer.answers[peer.store(peer.handle(), NEW, flags=world.SEAL | world.INVALIDATE)]
    assert (answer.status, answer.generation) == (Status.TARGET_ERROR, 2)
    assert (answer.data_length, answer.block_offset, answer.invalidated) == (0, 0, peer.next_stag)
    assert peer.entry(peer.handle()) == before
    assert peer.look(peer.handle()) == OLD
    peer.memory.exhausted = False
    peer.store(peer.handle(), NEW)
    peer.finish()
    assert peer.look(peer.handle()) == NEW


def test_a_ring_without_a_ready_block(new_world: Callable[..., Any]) -> None:
    """Profile 1: TARGET_ERROR, should blocks be missing that the quotas say are there."""
    world = new_world()
    peer = world.connect()
    while world.store.ring.allocate() is not None:
        pass
    answer = peer.answers[peer.alloc_store(peer.handle(), NEW)]
    assert (answer.status, answer.generation) == (Status.TARGET_ERROR, 1)
    assert not peer.entry(peer.handle()).valid
    assert world.store.quotas.usage(peer.session.identity) == 0
