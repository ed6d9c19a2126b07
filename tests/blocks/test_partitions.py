"""Rings of an initiator's own over a part of the pool, and the tickets it takes there itself (draft 3.4, 6.6)."""

from __future__ import annotations

import struct
import sys
from collections.abc import Callable
from typing import ClassVar, Protocol

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kbtp.atomics import fetch_add
from kbtp.blocks import BlockStore, Entry
from kbtp.blocks.owner import BlockOwner, LoadPin, Partition
from kbtp.errors import ApiMisuse, PeerMisbehaved
from kbtp.types import EntryFlag, Status, TerminateCause
from kbtp.verbs.api import Access

BASE = 0x4000
POOL_BASE = 0x10000
EMPTY = 2**64 - 1
SEALED = EntryFlag.VALID | EntryFlag.SEALED


class NewStore(Protocol):
    def __call__(
        self, *, shared: int = 2, direct: int = 3, first_ticket: int = 0, clear_on_free: bool = False
    ) -> BlockOwner: ...


def python_store(
    *, shared: int = 2, direct: int = 3, first_ticket: int = 0, clear_on_free: bool = False, masked: bool = True
) -> BlockStore:
    return BlockStore.create(
        bytearray(512 * (shared + direct)),
        block_size_bytes=512,
        block_count=shared + direct,
        pool_base=POOL_BASE,
        table_base_handle=BASE,
        table_handles=8,
        ring_order=2,
        first_ticket=first_ticket,
        clear_on_free=clear_on_free,
        direct_blocks=direct,
        masked_counters=masked,
    )


def native_store(
    *, shared: int = 2, direct: int = 3, first_ticket: int = 0, clear_on_free: bool = False, masked: bool = True
) -> BlockOwner:
    from kbtp.rnic.native import NativeRnic  # what needs no RNIC is tested without it being built

    rnic = NativeRnic()
    memory = bytearray(512 * (shared + direct))
    return rnic.create_block_store(
        rnic.register(memory, Access.NONE, pd=rnic.allocate_pd(), base_to=POOL_BASE),
        block_size_bytes=512,
        block_count=shared + direct,
        pool_base=POOL_BASE,
        table_base_handle=BASE,
        table_handles=8,
        ring_order=2,
        first_ticket=first_ticket,
        clear_on_free=clear_on_free,
        direct_blocks=direct,
        masked_counters=masked,
        freed=lambda _holder: None,
    )


@pytest.fixture(params=[python_store, native_store])
def a_store(request: pytest.FixtureRequest) -> NewStore:
    """A test that uses this runs once for each store there is."""
    new_store: NewStore = request.param
    return new_store


def block(number: int) -> int:
    return POOL_BASE + 512 * number


def opened(store: BlockOwner, holder: str = "direct", blocks: int = 3) -> Partition:
    partition = store.open_partition(holder, blocks)
    assert partition is not None
    return partition


class Peer:
    """Does to Head and the slots what an initiator does through Head STag and Ring STag."""

    def __init__(self, partition: Partition, masked: bool = True) -> None:
        self.partition = partition
        top = 1 << (partition.order + 3)
        self.add = (0x0000000100000010, 1 << 63 | 1 << 31 | top) if masked else (1 << 32, 0)

    def take(self) -> int:
        old = int.from_bytes(self.partition.head, sys.byteorder)
        self.set_head(fetch_add(old, *self.add))
        return old >> 32

    def set_head(self, value: int) -> None:
        self.partition.head[:] = value.to_bytes(8, sys.byteorder)

    def slots(self) -> list[tuple[int, int]]:
        """(Sequence, Block Offset) of every slot, read as drawn in draft 3.3."""
        return [(sequence, offset) for sequence, _, offset in struct.iter_unpack(">IIQ", bytes(self.partition.slots))]


def alloc_store(store: BlockOwner, handle: int, holder: str = "direct") -> Entry:
    block_offset = store.begin_alloc_store(handle, holder)
    assert not isinstance(block_offset, Status)
    return store.commit_alloc_store(handle, block_offset, 4, seal=True)


def free(store: BlockOwner, handle: int, holder: str = "direct") -> None:
    assert store.begin_free(handle, holder, lambda _entry: None)


# --- who gets which part of the pool ---


def test_a_partition_is_a_contiguous_part_of_the_blocks_set_aside(a_store: NewStore) -> None:
    store = a_store(shared=2, direct=4)
    first, second = opened(store, "A", 3), opened(store, "B", 1)
    assert [(one.first, one.block_count, one.order, one.free_count) for one in (first, second)] == [
        (block(2), 3, 2, 3),
        (block(5), 1, 1, 1),  # profile 5: two slots also for one block
    ]
    assert Peer(first).slots() == [(0, block(2)), (1, block(3)), (2, block(4)), (2**32 - 1, EMPTY)]
    assert Peer(second).slots() == [(0, block(5)), (2**32 - 1, EMPTY)]
    assert bytes(first.head) == bytes(second.head) == bytes(8)
    assert store.partition_of("A") is first
    assert store.partition_of("nobody") is None
    assert store.open_partition("C", 1) is None
    assert store.free_blocks == 6


def test_no_partition_where_no_gap_is_long_enough(a_store: NewStore) -> None:
    store = a_store(shared=1, direct=4)
    for holder in ("A", "B", "C"):
        opened(store, holder, 1)
    store.close_partition("B")
    assert store.open_partition("D", 2) is None  # two blocks are left, not side by side
    assert store.largest_partition == 1
    assert store.quotas.quota("D") == 0
    assert opened(store, "D", 1).first == block(2)


def test_no_memory_for_a_ring_is_no_room_and_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_memory(_length: int) -> bytearray:
        raise MemoryError

    store = python_store(direct=2)
    with monkeypatch.context() as patched:
        patched.setattr("kbtp.blocks.partition.bytearray", no_memory, raising=False)
        assert store.open_partition("direct", 2) is None
    assert store.quotas.grant("direct", 1) == 1
    assert opened(store, blocks=2).free_count == 2


def test_without_blocks_set_aside_there_is_no_partition(a_store: NewStore) -> None:
    store = a_store(direct=0)
    assert store.open_partition("direct", 1) is None
    assert store.largest_partition == 0


def test_the_quota_is_the_partition_and_takes_nothing_from_the_others(a_store: NewStore) -> None:
    store = a_store(shared=2, direct=3)
    assert store.quotas.grant("direct", 2) == 2
    assert store.quotas.left == 0
    opened(store, blocks=3)
    assert (store.quotas.quota("direct"), store.quotas.left) == (3, 2)
    assert store.quotas.grant("other", 9) == 2


def test_blocks_come_from_the_holder_s_own_ring_and_return_to_it(a_store: NewStore) -> None:
    store = a_store(shared=2, direct=2)
    partition = opened(store, blocks=2)
    store.quotas.grant("other", 2)
    assert [alloc_store(store, BASE + i).block_offset for i in range(2)] == [block(2), block(3)]
    assert store.begin_alloc_store(BASE + 2, "direct") is Status.NO_SPACE
    assert [alloc_store(store, BASE + 2 + i, "other").block_offset for i in range(2)] == [block(0), block(1)]
    assert (partition.free_count, store.free_blocks) == (0, 0)
    free(store, BASE + 1)
    free(store, BASE + 2, "other")
    assert (partition.free_count, store.free_blocks) == (1, 2)
    assert alloc_store(store, BASE + 4).block_offset == block(3)
    assert alloc_store(store, BASE + 5, "other").block_offset == block(0)


def test_a_partition_closes_when_every_block_is_home_and_leaves_nothing_behind(a_store: NewStore) -> None:
    store = a_store(shared=1, direct=2)
    partition = opened(store, blocks=2)
    peer = Peer(partition)
    alloc_store(store, BASE)
    store.pool.view(block(1), 6)[:] = b"secret"
    with pytest.raises(ApiMisuse, match="blocks or tickets out"):
        store.close_partition("direct")
    free(store, BASE)
    ticket = peer.take()
    with pytest.raises(ApiMisuse, match="blocks or tickets out"):
        store.close_partition("direct")
    store.reclaim_ticket("direct", ticket)
    store.close_partition("direct")
    assert bytes(store.pool.view(block(1), 6)) == bytes(6)
    assert (store.partition_of("direct"), store.quotas.quota("direct")) == (None, 0)
    assert Peer(opened(store, "next", 2)).slots() == [(0, block(1)), (1, block(2))]
    assert store.quotas.grant("direct", 1) == 1  # an ordinary holder again


# --- tickets that the initiator takes itself ---


@pytest.mark.parametrize("first_ticket", [0, 2**32 - 1])
def test_bind_consumes_the_slot_binds_the_entry_and_charges_the_quota(a_store: NewStore, first_ticket: int) -> None:
    store = a_store(first_ticket=first_ticket)
    partition = opened(store)
    peer = Peer(partition)
    tickets = [peer.take(), peer.take()]
    assert tickets == [first_ticket, (first_ticket + 1) % 2**32]
    assert partition.audit_head() == (first_ticket + 2) % 2**32
    assert partition.outstanding_tickets() == tickets
    assert [partition.read_slot(ticket) for ticket in tickets] == [block(2), block(3)]
    entry = store.bind_ticket(BASE, "direct", tickets[1], block(3), 7, seal=True)
    assert entry == store.read(BASE) == Entry(SEALED, 2, 7, block(3))
    assert (tickets[1], EMPTY) in peer.slots()
    assert partition.outstanding_tickets() == tickets[:1]
    assert (store.quotas.usage("direct"), partition.free_count) == (1, 2)


def test_what_is_no_outstanding_ticket_of_this_block_is_a_mismatch_and_changes_nothing(a_store: NewStore) -> None:
    store = a_store(direct=4)
    partition = opened(store, blocks=4)
    peer = Peer(partition)
    bound, out = peer.take(), peer.take()
    store.bind_ticket(BASE, "direct", bound, block(2), 0, seal=False)
    before = (peer.slots(), bytes(partition.head), store.quotas.usage("direct"), store.read(BASE + 1))
    for ticket, block_offset in (
        (bound, block(2)),  # bound already
        (out + 1, block(4)),  # in the ring, but never taken
        (out + 4, block(3)),  # same slot, another turn
        (out - 4 & 0xFFFFFFFF, block(3)),
        (out, block(2)),  # another ticket's block
        (out, EMPTY),
        (out, block(3) + 64),
    ):
        assert store.bind_ticket(BASE + 1, "direct", ticket, block_offset, 0, seal=False) is Status.TICKET_MISMATCH
        assert (peer.slots(), bytes(partition.head), store.quotas.usage("direct"), store.read(BASE + 1)) == before
    assert store.bind_ticket(BASE + 1, "direct", out, block(3), 0, seal=False) == store.read(BASE + 1)


def test_its_own_ticket_counts_once_and_no_space_comes_before_the_ticket_s_faults(a_store: NewStore) -> None:
    """Profile 8.10 and the order of profile 1."""
    store = a_store()
    peer = Peer(opened(store))
    alloc_store(store, BASE)
    tickets = [peer.take(), peer.take()]  # usage is the quota now
    assert store.bind_ticket(BASE + 1, "direct", 7, block(2), 0, seal=False) is Status.NO_SPACE
    for i, ticket in enumerate(tickets, 1):
        assert isinstance(store.bind_ticket(BASE + i, "direct", ticket, block(2 + i), 0, seal=False), Entry)
    assert store.bind_ticket(BASE + 3, "direct", tickets[0], block(3), 0, seal=False) is Status.NO_SPACE


def test_tickets_that_are_out_count_for_the_target_s_own_allocations(a_store: NewStore) -> None:
    """Draft 3.4, profile 6.8: before a ticket is taken."""
    store = a_store()
    partition = opened(store)
    peer = Peer(partition)
    tickets = [peer.take(), peer.take()]
    assert alloc_store(store, BASE).block_offset == block(4)
    head = bytes(partition.head)
    assert store.begin_alloc_store(BASE + 1, "direct") is Status.NO_SPACE
    assert bytes(partition.head) == head
    store.reclaim_ticket("direct", tickets[0])
    assert alloc_store(store, BASE + 1).block_offset == block(2)


def test_a_free_waits_for_the_slot_that_a_ticket_is_out_for(a_store: NewStore) -> None:
    store = a_store(direct=4)
    partition = opened(store, blocks=4)
    peer = Peer(partition)
    slow = peer.take()
    for i in range(3):
        alloc_store(store, BASE + i)
    for i in range(3):
        free(store, BASE + i)
    assert peer.slots()[0] == (slow, block(2))  # the first of them is deferred
    waiting = peer.take()
    assert partition.outstanding_tickets() == [slow]
    assert partition.read_slot(waiting) is None
    # Usage is within the quota, but the next slot is not ready.
    assert store.bind_ticket(BASE, "direct", waiting, block(3), 0, seal=False) is Status.TICKET_MISMATCH
    # Head is more than N beyond it, and it is outstanding all the same.
    assert isinstance(store.bind_ticket(BASE, "direct", slow, block(2), 0, seal=False), Entry)
    assert partition.outstanding_tickets() == [waiting]
    assert isinstance(store.bind_ticket(BASE + 1, "direct", waiting, block(3), 0, seal=False), Entry)


def test_a_reclaimed_block_returns_with_a_new_ticket(a_store: NewStore) -> None:
    store = a_store(clear_on_free=True)
    partition = opened(store)
    peer = Peer(partition)
    tickets = [peer.take(), peer.take()]
    store.pool.view(block(2), 6)[:] = b"secret"
    assert store.reclaim_ticket("direct", tickets[0]) == block(2)
    assert (3, block(2)) in peer.slots()
    assert bytes(store.pool.view(block(2), 6)) == bytes(6)
    assert partition.outstanding_tickets() == tickets[1:]
    assert store.bind_ticket(BASE, "direct", tickets[0], block(2), 0, seal=False) is Status.TICKET_MISMATCH
    with pytest.raises(ApiMisuse, match="not outstanding"):
        store.reclaim_ticket("direct", tickets[0])
    assert store.quotas.usage("direct") == 0


def test_tickets_are_reclaimed_also_where_blocks_wait_for_one_slot(a_store: NewStore) -> None:
    store = a_store(direct=2)
    partition = opened(store, blocks=2)
    peer = Peer(partition)
    slow, quick = peer.take(), peer.take()
    store.bind_ticket(BASE, "direct", quick, block(3), 0, seal=False)
    free(store, BASE)
    waiting = peer.take()
    reclaimed = []
    while tickets := partition.outstanding_tickets():
        reclaimed += [(ticket, store.reclaim_ticket("direct", ticket)) for ticket in tickets]
    assert reclaimed == [(slow, block(2)), (waiting, block(3))]
    store.close_partition("direct")


@pytest.mark.parametrize("new_store", [python_store, native_store])
def test_the_unmasked_form_has_the_ticket_alone_in_head(new_store: Callable[..., BlockOwner]) -> None:
    """Draft 9.2."""
    store = new_store(masked=False)
    partition = opened(store)
    peer = Peer(partition, masked=False)
    tickets = [peer.take(), peer.take()]
    assert int.from_bytes(partition.head, sys.byteorder) == 2 << 32
    assert isinstance(store.bind_ticket(BASE, "direct", tickets[0], block(2), 0, seal=False), Entry)
    assert partition.audit_head() == 2
    peer.set_head(3 << 32 | 48)
    with pytest.raises(PeerMisbehaved):
        partition.audit_head()


# --- Head is never trusted (profile 6.9, 8.10) ---


@pytest.mark.parametrize(
    "head",
    [
        pytest.param(5 << 32 | 16, id="more tickets than blocks were offered"),
        pytest.param(1 << 32 | 16, id="back"),
        pytest.param(2 << 32 | 16, id="Slot Offset of another ticket"),
        pytest.param(2 << 32 | 1 << 31 | 32, id="filler bit"),
        pytest.param(2**64 - 1, id="all ones"),
    ],
)
def test_a_head_that_is_not_by_rule_ends_the_stream_and_is_mended(a_store: NewStore, head: int) -> None:
    store = a_store(shared=1, direct=4)
    partition = opened(store, blocks=4)
    peer = Peer(partition)
    tickets = [peer.take(), peer.take()]
    assert partition.audit_head() == 2
    peer.set_head(head)
    for look in (
        partition.audit_head,
        partition.outstanding_tickets,
        lambda: store.bind_ticket(BASE, "direct", tickets[0], block(1), 0, seal=False),
    ):
        with pytest.raises(PeerMisbehaved) as caught:
            look()
        assert caught.value.cause is TerminateCause.RDMAP_CATASTROPHIC_STREAM
    assert not store.read(BASE).valid
    partition.restore_head()
    assert partition.audit_head() == 2
    assert partition.outstanding_tickets() == tickets
    for ticket in tickets:
        store.reclaim_ticket("direct", ticket)
    assert {alloc_store(store, BASE + i).block_offset for i in range(4)} == {block(i) for i in range(1, 5)}


def test_what_the_target_took_itself_is_not_given_out_again_when_head_is_mended(a_store: NewStore) -> None:
    store = a_store()
    partition = opened(store)
    peer = Peer(partition)
    mine = peer.take()
    assert alloc_store(store, BASE).block_offset == block(3)
    peer.set_head(0)
    partition.restore_head()
    assert partition.audit_head() == 2
    assert partition.outstanding_tickets() == [mine]


# --- the caller's mistakes ---


def test_calls_out_of_turn_are_refused(a_store: NewStore) -> None:
    store = a_store()
    store.quotas.grant("other", 1)
    alloc_store(store, BASE, "other")
    with pytest.raises(ApiMisuse, match="has blocks of the shared ring"):
        store.open_partition("other", 1)
    partition = opened(store, blocks=2)
    with pytest.raises(ApiMisuse, match="has a partition already"):
        store.open_partition("direct", 1)
    ticket = Peer(partition).take()
    for use in (
        lambda: store.close_partition("other"),
        lambda: store.bind_ticket(BASE + 1, "other", ticket, block(2), 0, seal=False),
        lambda: store.reclaim_ticket("other", ticket),
    ):
        with pytest.raises(ApiMisuse, match="has no partition"):
            use()
    with pytest.raises(ApiMisuse, match="bound or being bound"):
        store.bind_ticket(BASE, "direct", ticket, block(2), 0, seal=False)
    with pytest.raises(ApiMisuse, match="0 to 512"):
        store.bind_ticket(BASE + 1, "direct", ticket, block(2), 513, seal=False)
    with pytest.raises(ApiMisuse, match="not outstanding"):
        store.reclaim_ticket("direct", ticket + 1)
    assert partition.outstanding_tickets() == [ticket]


@pytest.mark.parametrize("direct", [-1, 5])
def test_the_shared_ring_has_a_block(a_store: NewStore, direct: int) -> None:
    with pytest.raises(ApiMisuse, match="set aside: 0 to 4"):
        a_store(shared=5 - direct, direct=direct)


# --- any order of calls ---


class Tickets(RuleBasedStateMachine):
    """An initiator in direct mode and the target's own allocations for it on one ring of three blocks, against a model
    that knows which block each ticket was promised and what each handle is bound to."""

    BLOCKS = 3

    new_store: ClassVar[Callable[..., BlockOwner]] = staticmethod(python_store)

    @initialize(first_ticket=st.sampled_from([0, 2**32 - 1, 2**32 - 6]))
    def start(self, first_ticket: int) -> None:
        self.store = self.new_store(shared=1, direct=self.BLOCKS, first_ticket=first_ticket)
        self.partition = opened(self.store)
        self.peer = Peer(self.partition)
        self.out: dict[int, int | None] = {}  # ticket -> its block, once it has been seen
        self.bound: dict[int, int] = {}  # handle -> block
        self.pins: list[LoadPin] = []
        self.waiting: list[int] = []  # blocks whose FREE waits

    def usage(self) -> int:
        return len(self.bound) + len(self.waiting) + len(self.out)

    def unused_handle(self) -> int:
        return next(handle for handle in range(BASE, BASE + 8) if handle not in self.bound)

    @precondition(lambda self: self.usage() < self.BLOCKS)
    @rule()
    def take(self) -> None:
        self.out[self.peer.take()] = None

    def see(self, ticket: int) -> int | None:
        block_offset = self.partition.read_slot(ticket)
        if block_offset is not None:
            assert self.out[ticket] in (None, block_offset)
            assert block_offset not in [*self.bound.values(), *self.waiting]
            assert block_offset not in [other for key, other in self.out.items() if key != ticket]
            self.out[ticket] = block_offset
        return block_offset

    @precondition(lambda self: self.out)
    @rule(data=st.data())
    def bind(self, data: st.DataObject) -> None:
        ticket = data.draw(st.sampled_from(sorted(self.out)))
        block_offset = self.see(ticket)
        handle = self.unused_handle()
        bound = self.store.bind_ticket(handle, "direct", ticket, block_offset or block(1), 0, seal=True)
        if block_offset is None:
            full = self.usage() >= self.BLOCKS  # and a ticket without its block does not count as the BIND's own
            assert bound is (Status.NO_SPACE if full else Status.TICKET_MISMATCH)
            return
        assert isinstance(bound, Entry)
        assert bound.block_offset == block_offset
        self.bound[handle] = block_offset
        del self.out[ticket]

    @rule()
    def alloc_store(self) -> None:
        handle = self.unused_handle()
        block_offset = self.store.begin_alloc_store(handle, "direct")
        if self.usage() >= self.BLOCKS:
            assert block_offset is Status.NO_SPACE
        elif isinstance(block_offset, Status):
            assert block_offset is Status.TARGET_ERROR
            assert self.out  # the slot is another ticket's
        else:
            assert block_offset not in [*self.bound.values(), *self.waiting, *self.out.values()]
            self.store.commit_alloc_store(handle, block_offset, 0, seal=True)
            self.bound[handle] = block_offset

    @precondition(lambda self: self.bound)
    @rule(data=st.data())
    def begin_load(self, data: st.DataObject) -> None:
        self.pins.append(self.store.begin_load(data.draw(st.sampled_from(sorted(self.bound))), None))

    @precondition(lambda self: self.pins)
    @rule(data=st.data())
    def end_load(self, data: st.DataObject) -> None:
        pin = self.pins.pop(data.draw(st.integers(0, len(self.pins) - 1)))
        if pin.block_offset in self.waiting and pin.block_offset not in [other.block_offset for other in self.pins]:
            self.waiting.remove(pin.block_offset)
        self.store.end_load(pin)

    @precondition(lambda self: self.bound)
    @rule(data=st.data())
    def free(self, data: st.DataObject) -> None:
        handle = data.draw(st.sampled_from(sorted(self.bound)))
        block_offset = self.bound.pop(handle)
        if not self.store.begin_free(handle, "direct", lambda _entry: None):
            self.waiting.append(block_offset)

    @precondition(lambda self: self.out)
    @rule(data=st.data())
    def reclaim(self, data: st.DataObject) -> None:
        ready = [ticket for ticket in sorted(self.out) if self.see(ticket) is not None]
        if ready:
            ticket = data.draw(st.sampled_from(ready))
            assert self.store.reclaim_ticket("direct", ticket) == self.out.pop(ticket)

    @invariant()
    def every_ticket_that_is_out_is_known(self) -> None:
        assert set(self.partition.outstanding_tickets()) == {ticket for ticket in self.out if self.see(ticket)}

    @invariant()
    def no_block_and_no_unit_of_quota_is_lost(self) -> None:
        assert self.partition.free_count + len(self.bound) + len(self.waiting) == self.BLOCKS
        assert self.store.quotas.usage("direct") == len(self.bound) + len(self.waiting)
        assert self.store.free_blocks == 1 + self.partition.free_count

    def teardown(self) -> None:
        """Once all is bound, freed or reclaimed, the partition is as it was."""
        if not hasattr(self, "store"):
            return
        for handle in self.bound:
            self.store.begin_free(handle, "direct", lambda _entry: None)
        for pin in self.pins:
            self.store.end_load(pin)
        while tickets := self.partition.outstanding_tickets():
            for ticket in tickets:
                self.store.reclaim_ticket("direct", ticket)
                del self.out[ticket]
        assert not self.out
        self.store.close_partition("direct")


class NativeTickets(Tickets):
    new_store: ClassVar[Callable[..., BlockOwner]] = staticmethod(native_store)


TestTickets = Tickets.TestCase
TestTickets.settings = settings(TestTickets.settings, max_examples=100, stateful_step_count=40)
TestNativeTickets = NativeTickets.TestCase
TestNativeTickets.settings = settings(TestNativeTickets.settings, max_examples=100, stateful_step_count=40)
