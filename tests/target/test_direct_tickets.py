"""What becomes of tickets that are not bound (draft 3.4; profile 3 "End of a stream", 6.11, 8.10).

The Ticket Timeout is 8 s, so Head is looked at every 2 s at least.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from kbtp.target.tickets import Tickets
from kbtp.types import Feature, HelloAckFlag, Status

ALICE = bytes(range(1, 17))
ALLOC, MASKED, INLINE, SEAL = 4, 8, 1, 2
BLOCK = 512
TIMEOUT_S = 8.0
QUARTER_S = 2.0


def direct_world(made: Callable[..., Any], **config: Any) -> Any:
    return made(
        **{
            "pool_blocks": 8,
            "direct": Feature.DIRECT_ALLOC,
            "direct_blocks": 4,
            "ticket_timeout_s": TIMEOUT_S,
            "request_credits": 8,
            **config,
        }
    )


@pytest.fixture
def world(new_world_of_any_store: Callable[..., Any]) -> Any:
    return direct_world(new_world_of_any_store)


@pytest.fixture
def peer(world: Any) -> Any:
    return connected(world)


def connected(world: Any, **hello: Any) -> Any:
    peer = world.connect(**{"requested_features": ALLOC | MASKED, "requested_quota": 4, **hello})
    assert peer.ack.granted_features & Feature.DIRECT_ALLOC
    return peer


def pass_time(world: Any, seconds: float) -> None:
    """The target looks when it said it would, and at the end."""
    until_s = world.now_s + seconds
    while (due_s := world.target.next_deadline_s()) < until_s:
        world.advance(due_s - world.now_s)
    world.advance(until_s - world.now_s)
    world.advance(0)


def valid_stags(peer: Any) -> set[str]:
    return {
        name
        for name in ("partition", "ring", "head")
        if any(region.valid and region.stag == getattr(peer.ack, f"{name}_stag") for region in peer.memory.exposed)
    }


# --- a ticket that runs out ---


def test_a_ticket_in_time_is_bound(world: Any, peer: Any) -> None:
    taken = peer.take_block()
    pass_time(world, TIMEOUT_S - 0.01)
    assert peer.status(peer.bind_ticket(peer.handle(), *taken)) is Status.SUCCESS
    pass_time(world, 10 * TIMEOUT_S)
    assert valid_stags(peer) == {"partition", "ring", "head"}


def test_a_ticket_that_ran_out_is_abandoned_and_direct_allocation_over(world: Any, peer: Any) -> None:
    ticket, block_offset = peer.take_block(b"late")
    pass_time(world, QUARTER_S + TIMEOUT_S)
    assert valid_stags(peer) == {"ring"}
    answer = peer.answers[peer.bind_ticket(peer.handle(), ticket, block_offset, 4)]
    assert (answer.status, answer.generation) == (Status.TICKET_ABANDONED, 1)
    assert not peer.entry(peer.handle()).valid
    assert peer.status(peer.bind_ticket(peer.handle(), ticket + 1, block_offset)) is Status.TICKET_MISMATCH
    assert peer.end_action is None
    # The session goes on, with all of its quota.
    assert {peer.bind(peer.handle(n), b"x").block_offset for n in range(4)} >= {block_offset}
    assert peer.status(peer.bind_ticket(peer.handle(4), ticket, block_offset)) is Status.NO_SPACE


def test_the_time_counts_from_the_first_look_at_the_moved_head(world: Any, peer: Any) -> None:
    world.advance(QUARTER_S - 0.01)
    taken = peer.take_block()
    world.advance(0.01)  # seen
    pass_time(world, TIMEOUT_S - 0.01)
    assert valid_stags(peer) == {"partition", "ring", "head"}
    pass_time(world, 0.01)
    assert peer.status(peer.bind_ticket(peer.handle(), *taken)) is Status.TICKET_ABANDONED


def test_a_ticket_that_waits_for_its_slot_has_its_time_still_before_it(world: Any, peer: Any) -> None:
    slow = peer.take_block()
    for n in range(3):
        peer.bind_ticket(peer.handle(n), *peer.take_block())
    for n in range(3):
        peer.free(peer.handle(n))
    waiting = peer.take_ticket()
    pass_time(world, TIMEOUT_S - 1)
    assert peer.slot(waiting) is None
    peer.bind_ticket(peer.handle(), *slow)
    block_offset = peer.slot(waiting)
    assert block_offset is not None
    pass_time(world, TIMEOUT_S - 0.01)
    assert peer.status(peer.bind_ticket(peer.handle(1), waiting, block_offset)) is Status.SUCCESS


def test_when_one_runs_out_the_others_may_still_be_bound_and_run_out_in_their_turn(world: Any, peer: Any) -> None:
    """Profile 6.11: tickets before the snapshot still inside the timeout."""
    first = peer.take_block()
    pass_time(world, QUARTER_S)
    pass_time(world, QUARTER_S)
    second, third = peer.take_block(b"in time"), peer.take_block()
    pass_time(world, TIMEOUT_S - QUARTER_S)
    assert valid_stags(peer) == {"ring"}
    assert peer.status(peer.bind_ticket(peer.handle(), *first)) is Status.TICKET_ABANDONED
    assert peer.status(peer.bind_ticket(peer.handle(), *second, 7)) is Status.SUCCESS
    assert peer.look(peer.handle()) == b"in time"
    pass_time(world, TIMEOUT_S)
    assert peer.status(peer.bind_ticket(peer.handle(1), *third)) is Status.TICKET_ABANDONED
    assert world.store.partition_of(peer.session.identity).free_count == 3


def test_a_reclaimed_block_comes_again_under_a_new_ticket(world: Any, peer: Any) -> None:
    ticket, block_offset = peer.take_block()
    pass_time(world, QUARTER_S + TIMEOUT_S)
    assert peer.slot(ticket) is None
    assert peer.slot(ticket + 4) == block_offset


class Noted:
    """A store and a partition with ticket 7 out, and what is done to them, in order."""

    def __init__(self) -> None:
        self.done: list[str] = []

    def outstanding_tickets(self) -> list[int]:
        self.done.append("look")
        return [7]

    def reclaim_ticket(self, _holder: object, ticket: int) -> None:
        self.done.append(f"reclaim {ticket}")


def test_head_is_looked_at_for_the_last_time_after_its_stag_is_invalid() -> None:
    """Profile 6.11: Head STag, snapshot, Partition STag, reclaim."""
    noted = Noted()
    store: Any = noted
    tickets = Tickets(
        store,
        "holder",
        store,
        timeout_s=TIMEOUT_S,
        now_s=0.0,
        invalidate_head=lambda: noted.done.append("invalidate Head STag"),
        invalidate_partition=lambda: noted.done.append("invalidate Partition STag"),
    )
    tickets.tick(QUARTER_S, [])
    tickets.tick(QUARTER_S + TIMEOUT_S, [])
    assert noted.done == ["look", "look"]
    tickets.tick(QUARTER_S + TIMEOUT_S, [])
    assert noted.done[2:] == ["look", "invalidate Head STag", "look", "invalidate Partition STag", "reclaim 7"]


# --- BINDs already received come first ---


def test_a_bind_that_was_received_when_the_time_ran_out_is_served(world: Any, peer: Any) -> None:
    taken = peer.take_block()
    world.advance(QUARTER_S)
    world.advance(TIMEOUT_S)  # overdue; what the RNIC has received meanwhile comes out of the next poll
    assert peer.status(peer.bind_ticket(peer.handle(), *taken)) is Status.SUCCESS
    pass_time(world, 2 * TIMEOUT_S)
    assert valid_stags(peer) == {"partition", "ring", "head"}


def test_a_bind_that_waits_for_its_turn_keeps_its_ticket(new_world_of_any_store: Callable[..., Any]) -> None:
    world = direct_world(new_world_of_any_store, drain_s=100.0)
    peer = connected(world)
    peer.bind(peer.handle(), b"old", seal=False)
    taken = peer.take_block(b"new")
    storing = peer.store(peer.handle(), b"slow")
    freeing = peer.free(peer.handle())
    binding = peer.bind_ticket(peer.handle(), *taken, 3)
    for _ in range(6):
        world.advance(QUARTER_S)
    assert peer.status(binding) is None
    peer.finish()
    assert [peer.status(one) for one in (storing, freeing, binding)] == [Status.SUCCESS] * 3


# --- the end of a stream ---


def test_tickets_that_are_out_when_the_stream_ends_are_reclaimed(world: Any) -> None:
    peer = connected(world, initiator_id=ALICE)
    kept = peer.take_block(b"kept")
    lost = [peer.take_block() for _ in range(3)]
    peer.bind_ticket(peer.handle(), *kept, 4)
    peer.end()
    again = connected(world, initiator_id=ALICE)
    assert (again.ack.flags, again.ack.bound_blocks) == (HelloAckFlag.RESUMED, 1)
    assert again.head() >> 32 == 4
    assert again.status(again.bind_ticket(again.handle(1), *lost[0])) is Status.TICKET_MISMATCH
    assert sorted(again.take_block()[1] for _ in range(3)) == sorted(block_offset for _, block_offset in lost)


def test_also_those_whose_blocks_wait_for_one_slot(world: Any) -> None:
    peer = connected(world, initiator_id=ALICE)
    peer.take_block()
    for n in range(3):
        peer.bind_ticket(peer.handle(n), *peer.take_block())
    for n in range(3):
        peer.free(peer.handle(n))
    for _ in range(3):
        peer.take_ticket()
    peer.end()
    again = connected(world, initiator_id=ALICE)
    assert len({again.take_block()[1] for _ in range(4)}) == 4


def test_a_bind_that_waited_for_its_turn_at_the_end_is_not_done(world: Any) -> None:
    reader = world.connect()
    peer = connected(world, initiator_id=ALICE)
    peer.bind_ticket(peer.handle(), *peer.take_block(b"old"), 3)
    reader.load(peer.handle())
    peer.free(peer.handle())
    peer.bind_ticket(peer.handle(), *peer.take_block(b"new"), 3)
    handle = peer.handle()
    peer.end()
    assert not world.store.read(handle).valid
    reader.finish_all()
    again = connected(world, initiator_id=ALICE)
    assert again.ack.bound_blocks == 0
    assert len({again.take_block()[1] for _ in range(4)}) == 4


# --- any order of everything ---


class Direct(RuleBasedStateMachine):
    """An identity in direct mode over one or more sessions, another initiator that loads its blocks, and time in
    quarters of the Ticket Timeout.

    The model knows for each ticket its block and since how many looks it is there.
    """

    new_world: ClassVar[Callable[..., Any]]
    OLDEST = 4
    """Looks that a ticket survives: the first begins its time, the fifth finds it over."""

    @initialize(first_ticket=st.sampled_from([0, 2**32 - 2, 2**32 - 7]))
    def start(self, first_ticket: int) -> None:
        self.world = direct_world(
            self.new_world, pool_blocks=5, direct_blocks=3, first_ticket=first_ticket, drain_s=1e6, table_handles=64
        )
        self.reader = self.world.connect(requested_quota=1, requested_handles=1)
        self.bound: dict[int, tuple[int, bytes]] = {}  # number of the handle -> block, contents
        self.loading: dict[Any, tuple[int, bytes, int]] = {}  # RDMA Write -> block, contents, STag
        self.waiting: dict[int, tuple[int, Any, int]] = {}  # block -> number of the handle, whose FREE, its Request ID
        self.serial = 0
        self.connect()

    def connect(self) -> None:
        self.peer = connected(self.world, initiator_id=ALICE, requested_quota=3, requested_handles=8)
        self.out: dict[int, tuple[int | None, int]] = {}  # ticket -> its block if it is there, looks since
        self.abandoned: set[int] = set()
        assert self.peer.ack.bound_blocks == len(self.bound)

    def usage(self) -> int:
        return len(self.bound) + len(self.waiting) + len(self.out)

    def free_handle(self) -> int:
        return min(set(range(8)) - self.bound.keys() - {handle for handle, _, _ in self.waiting.values()})

    def contents(self, handle: int) -> bytes:
        self.serial += 1
        return b"handle %d, serial %d" % (handle, self.serial)

    def notice(self) -> None:
        """Blocks that have come into the slots of tickets: no other's."""
        for ticket, (known, looks) in self.out.items():
            block_offset = self.peer.slot(ticket)
            if known is not None:
                assert block_offset == known
            elif block_offset is not None:
                assert block_offset not in [block for block, _ in self.bound.values()]
                assert block_offset not in self.waiting
                assert block_offset not in [block for block, _ in self.out.values()]
                self.out[ticket] = (block_offset, looks)

    @precondition(lambda self: self.usage() < 3 and not self.abandoned)
    @rule()
    def take(self) -> None:
        self.out[self.peer.take_ticket()] = (None, 0)

    @precondition(lambda self: any(block for block, _ in self.out.values()))
    @rule(data=st.data())
    def bind(self, data: st.DataObject) -> None:
        ticket = data.draw(st.sampled_from([ticket for ticket, (block, _) in self.out.items() if block]))
        block_offset = self.out[ticket][0]
        handle = self.free_handle()
        contents = self.contents(handle)
        if self.abandoned:
            contents = bytes(self.world.store.pool.view(block_offset, 8))  # written before, if at all
        else:
            self.peer.put(block_offset, contents)
        request_id = self.peer.bind_ticket(self.peer.handle(handle), ticket, block_offset, len(contents))
        assert self.peer.status(request_id) is Status.SUCCESS
        del self.out[ticket]
        self.bound[handle] = (block_offset, contents)

    @rule(ticket=st.integers(0, 2**32 - 1), block=st.integers(0, 4))
    def bind_what_is_none(self, ticket: int, block: int) -> None:
        if ticket in self.out:
            return
        block_offset = self.world.config.pool_base + BLOCK * block
        status = self.peer.status(self.peer.bind_ticket(self.peer.handle(self.free_handle()), ticket, block_offset))
        if self.usage() >= 3:
            assert status is Status.NO_SPACE
        else:
            assert status is (Status.TICKET_ABANDONED if ticket in self.abandoned else Status.TICKET_MISMATCH)

    @precondition(lambda self: self.abandoned)
    @rule(data=st.data())
    def bind_abandoned(self, data: st.DataObject) -> None:
        ticket = data.draw(st.sampled_from(sorted(self.abandoned)))
        self.bind_what_is_none(ticket, 2)

    @rule()
    def alloc_store(self) -> None:
        handle = self.free_handle()
        contents = self.contents(handle)
        answer = self.peer.answers[self.peer.alloc_store(self.peer.handle(handle), contents, flags=INLINE | SEAL)]
        if self.usage() >= 3:
            assert answer.status is Status.NO_SPACE
        elif answer.status is Status.TARGET_ERROR:
            assert self.out  # the next slot is another ticket's
        else:
            assert answer.status is Status.SUCCESS
            assert answer.block_offset not in [block for block, _ in (*self.bound.values(), *self.out.values())]
            assert answer.block_offset not in self.waiting
            self.bound[handle] = (answer.block_offset, contents)

    @precondition(lambda self: self.bound)
    @rule(data=st.data())
    def free(self, data: st.DataObject) -> None:
        handle = data.draw(st.sampled_from(sorted(self.bound)))
        block_offset, _ = self.bound.pop(handle)
        request_id = self.peer.free(self.peer.handle(handle))
        if block_offset in [block for block, _, _ in self.loading.values()]:
            assert self.peer.status(request_id) is None
            self.waiting[block_offset] = (handle, self.peer, request_id)
        else:
            assert self.peer.status(request_id) is Status.SUCCESS

    @precondition(lambda self: self.bound and len(self.loading) < 4)
    @rule(data=st.data())
    def load(self, data: st.DataObject) -> None:
        handle = data.draw(st.sampled_from(sorted(self.bound)))
        block_offset, contents = self.bound[handle]
        self.reader.load(self.peer.handle(handle), stag=self.reader.buffer(bytes(BLOCK)))
        self.loading[self.reader.writes[-1]] = (block_offset, contents, self.reader.next_stag)

    @precondition(lambda self: self.loading)
    @rule(data=st.data())
    def finish_load(self, data: st.DataObject) -> None:
        write = data.draw(st.sampled_from(list(self.loading)))
        block_offset, contents, stag = self.loading.pop(write)
        self.reader.finish(write)
        assert bytes(self.reader.buffers[stag][: len(contents)]) == contents
        if block_offset in self.waiting and block_offset not in [block for block, _, _ in self.loading.values()]:
            _, peer, request_id = self.waiting.pop(block_offset)
            assert peer.status(request_id) is (None if peer.ended else Status.SUCCESS)

    @rule()
    def a_quarter_passes(self) -> None:
        self.notice()
        pass_time(self.world, QUARTER_S)
        over = [ticket for ticket, (block, looks) in self.out.items() if block and looks >= self.OLDEST]
        self.abandoned.update(over)
        self.out = {
            ticket: (block, looks + bool(block)) for ticket, (block, looks) in self.out.items() if ticket not in over
        }
        assert valid_stags(self.peer) == ({"ring"} if self.abandoned else {"partition", "ring", "head"})

    @rule()
    def the_stream_ends(self) -> None:
        self.peer.end()
        self.connect()

    @invariant()
    def no_block_is_lost(self) -> None:
        self.notice()
        partition = self.world.store.partition_of(self.peer.session.identity)
        assert partition.free_count + len(self.bound) + len(self.waiting) == 3
        assert self.world.store.quotas.usage(self.peer.session.identity) == len(self.bound) + len(self.waiting)
        for handle in range(8):
            entry = self.peer.entry(self.peer.handle(handle))
            assert entry.valid == (handle in self.bound)
            if entry.valid:
                block_offset, contents = self.bound[handle]
                assert (entry.block_offset, entry.data_length) == (block_offset, len(contents))
                assert bytes(self.world.store.pool.view(block_offset, len(contents))) == contents

    def teardown(self) -> None:
        if hasattr(self, "peer"):
            self.reader.finish_all()
            self.world.end_all()
            self.world.advance(self.world.config.linger_s)
            self.world.check_nothing_is_left()


@pytest.mark.untraced
def test_any_order_of_everything(new_world_of_any_store: Callable[..., Any]) -> None:
    run_state_machine_as_test(
        type("Bound", (Direct,), {"new_world": staticmethod(new_world_of_any_store)}),
        settings=settings(
            max_examples=60, stateful_step_count=40, deadline=None, suppress_health_check=list(HealthCheck)
        ),
    )
