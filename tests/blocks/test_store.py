"""The one owner of blocks, entries, quotas and pins (draft 6, profile 6.1, 6.5, 6.8)."""

from __future__ import annotations

from typing import ClassVar, Protocol

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kbtp.blocks import BlockStore, Entry, FreeBlockRing, HandleRange, MaskedCounter, QuotaLedger
from kbtp.blocks.owner import BlockOwner, LoadPin
from kbtp.errors import ApiMisuse
from kbtp.types import EntryFlag, Status
from kbtp.verbs.api import Access

BASE = 0x4000
POOL_BASE = 0x10000
HANDLES = HandleRange(BASE, 8)


class NewStore(Protocol):
    def __call__(
        self, block_count: int = 3, *, quota: int = 3, clear_on_free: bool = False, first_ticket: int = 0
    ) -> BlockOwner: ...


def numbers(block_count: int) -> dict[str, int]:
    return {
        "block_size_bytes": 512,
        "block_count": block_count,
        "pool_base": POOL_BASE,
        "table_base_handle": BASE,
        "table_handles": 8,
        "ring_order": 2,
    }


def python_store(
    block_count: int = 3, *, quota: int = 3, clear_on_free: bool = False, first_ticket: int = 0
) -> BlockStore:
    store = BlockStore.create(
        bytearray(512 * block_count), **numbers(block_count), first_ticket=first_ticket, clear_on_free=clear_on_free
    )
    store.quotas.grant("prefill", quota)
    return store


def native_store(
    block_count: int = 3, *, quota: int = 3, clear_on_free: bool = False, first_ticket: int = 0
) -> BlockOwner:
    from kbtp.rnic.native import NativeRnic  # what needs no RNIC is tested without it being built

    rnic = NativeRnic()
    pool = rnic.register(bytearray(512 * block_count), Access.NONE, pd=rnic.allocate_pd(), base_to=POOL_BASE)
    store = rnic.create_block_store(
        pool,
        **numbers(block_count),
        first_ticket=first_ticket,
        clear_on_free=clear_on_free,
        freed=lambda _holder: None,
    )
    store.quotas.grant("prefill", quota)
    return store


@pytest.fixture(params=[python_store, native_store])
def a_store(request: pytest.FixtureRequest) -> NewStore:
    """A test that uses this runs once for each store there is."""
    new_store: NewStore = request.param
    return new_store


def alloc_store(store: BlockOwner, handle: int, data: bytes, *, holder: str = "prefill", seal: bool = True) -> Entry:
    block_offset = store.begin_alloc_store(handle, holder)
    assert not isinstance(block_offset, Status)
    store.pool.view(block_offset, len(data))[:] = data
    return store.commit_alloc_store(handle, block_offset, len(data), seal)


def loaded(store: BlockOwner, pin: LoadPin) -> bytes:
    return bytes(store.pool.view(pin.block_offset, pin.data_length))


class Freed:
    """Hears of frees, and of what the store looked like at that moment."""

    def __init__(self, store: BlockOwner, holder: str = "prefill") -> None:
        self.store, self.holder = store, holder
        self.entries: list[Entry] = []
        self.free_blocks: list[int] = []
        self.usages: list[int] = []

    def __call__(self, entry: Entry) -> None:
        self.entries.append(entry)
        self.free_blocks.append(self.store.free_blocks)
        self.usages.append(self.store.quotas.usage(self.holder))


# --- ALLOC_STORE ---


def test_an_allocation_is_seen_once_it_is_committed(a_store: NewStore) -> None:
    store = a_store()
    block_offset = store.begin_alloc_store(BASE + 1, "prefill")
    assert block_offset == POOL_BASE
    assert not store.read(BASE + 1).valid
    assert (store.free_blocks, store.quotas.usage("prefill")) == (2, 1)
    store.pool.view(POOL_BASE, 5)[:] = b"block"
    entry = store.commit_alloc_store(BASE + 1, POOL_BASE, 5, seal=True)
    assert entry == store.read(BASE + 1) == Entry(EntryFlag.VALID | EntryFlag.SEALED, 2, 5, POOL_BASE)
    assert store.bound_handles(HANDLES) == [BASE + 1]
    assert store.bound_count(HANDLES) == 1


def test_no_space_is_found_before_a_ticket_is_taken() -> None:
    store = python_store(quota=1)
    alloc_store(store, BASE, b"x")
    head = store.ring.audit_head()
    assert store.begin_alloc_store(BASE + 1, "prefill") is Status.NO_SPACE
    assert store.ring.audit_head() == head
    assert store.quotas.usage("prefill") == 1


def test_a_ring_whose_blocks_others_hold_tickets_for_is_a_target_error() -> None:
    store = python_store(block_count=1)
    ticket = store.ring.take_head_ticket()
    assert store.begin_alloc_store(BASE, "prefill") is Status.TARGET_ERROR
    assert store.quotas.usage("prefill") == 0
    assert not store.read(BASE).valid
    store.ring.consume(ticket)
    store.ring.free(POOL_BASE)
    assert store.begin_alloc_store(BASE, "prefill") == POOL_BASE


def test_an_aborted_allocation_returns_its_block_and_its_unit_of_quota(a_store: NewStore) -> None:
    store = a_store(quota=1)
    block_offset = store.begin_alloc_store(BASE, "prefill")
    assert not isinstance(block_offset, Status)
    store.abort_alloc_store(BASE, block_offset, "prefill")
    assert store.read(BASE) == Entry(EntryFlag.NONE, 1, 0, 0)
    assert (store.free_blocks, store.quotas.usage("prefill")) == (3, 0)
    assert alloc_store(store, BASE, b"again").generation == 2


# --- STORE ---


def test_a_store_replaces_data_and_length_and_seals_if_asked(a_store: NewStore) -> None:
    store = a_store()
    alloc_store(store, BASE, b"first contents", seal=False)
    entry = store.commit_store(BASE, memoryview(b"second"), seal=True)
    assert entry == Entry(EntryFlag.VALID | EntryFlag.SEALED, 2, 6, POOL_BASE)
    assert bytes(store.pool.view(POOL_BASE, 6)) == b"second"


def test_a_store_of_zero_octets_truncates_and_one_of_a_whole_block_fits(a_store: NewStore) -> None:
    store = a_store()
    alloc_store(store, BASE, b"contents", seal=False)
    assert store.commit_store(BASE, b"", seal=False).data_length == 0
    assert store.commit_store(BASE, bytes(512), seal=False).data_length == 512


# --- FREE and LOAD ---


def test_a_free_without_readers_is_done_at_once(a_store: NewStore) -> None:
    store = a_store()
    alloc_store(store, BASE, b"data")
    freed = Freed(store)
    assert store.begin_free(BASE, "prefill", freed)
    assert freed.entries == [Entry(EntryFlag.NONE, 3, 0, 0)] == [store.read(BASE)]
    assert (freed.free_blocks, freed.usages) == ([3], [0])


def test_a_free_waits_for_the_loads_that_began_before_it(a_store: NewStore) -> None:
    store = a_store(quota=1, block_count=1)
    alloc_store(store, BASE, b"old data")
    first, second = store.begin_load(BASE, owner="A"), store.begin_load(BASE, owner="B")
    freed = Freed(store)
    assert not store.begin_free(BASE, "prefill", freed)
    # Later loads see the free at once; the block is nobody else's yet.
    assert store.read(BASE) == Entry(EntryFlag.NONE, 3, 0, 0)
    assert (store.free_blocks, store.quotas.usage("prefill")) == (0, 1)
    assert store.begin_alloc_store(BASE, "prefill") is Status.NO_SPACE
    assert list(store.pinned_frees()) == [(POOL_BASE, (first, second))]
    store.end_load(first)
    assert freed.entries == []
    assert [(pin.owner, pin.generation, loaded(store, pin)) for _, pins in store.pinned_frees() for pin in pins] == [
        ("B", 2, b"old data")
    ]
    store.end_load(second)
    assert freed.entries == [Entry(EntryFlag.NONE, 3, 0, 0)]
    assert (freed.free_blocks, freed.usages) == ([1], [0])
    assert list(store.pinned_frees()) == []


def test_a_handle_can_be_bound_again_while_its_old_block_is_still_pinned(a_store: NewStore) -> None:
    store = a_store(block_count=2, quota=2)
    alloc_store(store, BASE, b"old")
    pin = store.begin_load(BASE, owner=None)
    freed = Freed(store)
    assert not store.begin_free(BASE, "prefill", freed)
    entry = alloc_store(store, BASE, b"new")
    assert (entry.block_offset, entry.generation) == (POOL_BASE + 512, 4)
    assert loaded(store, pin) == b"old"
    store.end_load(pin)
    assert freed.entries == [Entry(EntryFlag.NONE, 3, 0, 0)]
    assert store.read(BASE) == entry


def test_a_load_of_an_entry_that_is_not_the_handle_s_any_more_pins_nothing(a_store: NewStore) -> None:
    store = a_store()
    entry = alloc_store(store, BASE, b"data")
    pin = store.begin_load_of(BASE, entry, "B")
    assert pin is not None
    assert (pin.owner, loaded(store, pin)) == ("B", b"data")
    store.end_load(pin)
    assert store.begin_free(BASE, "prefill", Freed(store))
    assert store.begin_load_of(BASE, entry, "B") is None
    newer = alloc_store(store, BASE, b"newer")
    assert store.begin_load_of(BASE, entry, "B") is None
    assert newer.generation == entry.generation + 2
    assert store.begin_free(BASE, "prefill", Freed(store))


def test_sealing_does_not_disturb_a_load(a_store: NewStore) -> None:
    store = a_store()
    alloc_store(store, BASE, b"data", seal=False)
    pin = store.begin_load(BASE, owner=None)
    assert store.commit_store(BASE, b"data", seal=True).sealed
    assert loaded(store, pin) == b"data"
    store.end_load(pin)


def test_loads_without_a_free_leave_nothing_behind(a_store: NewStore) -> None:
    store = a_store()
    alloc_store(store, BASE, b"data")
    store.end_load(store.begin_load(BASE, owner=None))
    freed = Freed(store)
    assert store.begin_free(BASE, "prefill", freed)


def test_who_hears_of_a_free_may_use_what_it_freed(a_store: NewStore) -> None:
    store = a_store(block_count=1, quota=1)
    alloc_store(store, BASE, b"old")
    pin = store.begin_load(BASE, owner=None)

    def store_the_next(_: Entry) -> None:
        alloc_store(store, BASE + 1, b"new")

    assert not store.begin_free(BASE, "prefill", store_the_next)
    store.end_load(pin)
    assert store.bound_handles(HANDLES) == [BASE + 1]


@pytest.mark.parametrize(("clear_on_free", "left"), [(True, bytes(6)), (False, b"secret")])
def test_blocks_are_cleared_before_they_return_to_the_ring_if_the_pool_is_told_to(
    a_store: NewStore, clear_on_free: bool, left: bytes
) -> None:
    store = a_store(clear_on_free=clear_on_free)
    alloc_store(store, BASE, b"secret")
    pin = store.begin_load(BASE, owner=None)
    store.begin_free(BASE, "prefill", Freed(store))
    assert loaded(store, pin) == b"secret"
    store.end_load(pin)
    assert loaded(store, pin) == left
    for handle in (BASE + 1, BASE + 2):
        alloc_store(store, handle, b"")
    aborted = store.begin_alloc_store(BASE, "prefill")
    assert aborted == pin.block_offset
    store.pool.view(aborted, 6)[:] = b"secret"
    store.abort_alloc_store(BASE, aborted, "prefill")
    assert loaded(store, pin) == left


# --- handle ranges ---


def test_handles_have_the_domain_they_were_assigned_for(a_store: NewStore) -> None:
    store = a_store()
    first = store.assign_range(3, "tenant a")
    second = store.assign_range(6, "tenant b")
    assert (first, second) == (HandleRange(BASE, 3), HandleRange(BASE + 3, 5))
    assert store.assign_range(1, "tenant c") is None
    assert [store.domain_of(handle) for handle in (BASE - 1, BASE, BASE + 2, BASE + 3, BASE + 7, BASE + 8)] == [
        None,
        "tenant a",
        "tenant a",
        "tenant b",
        "tenant b",
        None,
    ]
    store.release_range(HandleRange(BASE, 3))
    assert store.domain_of(BASE) is None
    assert store.assign_range(3, "tenant b") == HandleRange(BASE, 3)
    with pytest.raises(ApiMisuse, match="is not assigned"):
        store.release_range(HandleRange(BASE, 8))


# --- the caller's mistakes ---


def test_calls_out_of_turn_are_refused_and_change_nothing(a_store: NewStore) -> None:
    store = a_store()
    store.quotas.grant("reader", 0)
    alloc_store(store, BASE, b"data")
    block_offset = store.begin_alloc_store(BASE + 1, "prefill")
    assert not isinstance(block_offset, Status)
    pin = store.begin_load(BASE, owner=None)
    store.end_load(pin)
    before = (store.free_blocks, store.quotas.usage("prefill"), [store.read(handle) for handle in HANDLES])
    heard = Freed(store)
    with pytest.raises(ApiMisuse, match="has ended already"):
        store.end_load(pin)
    with pytest.raises(ApiMisuse, match="is not bound"):
        store.begin_load(BASE + 1, owner=None)
    for handle in (BASE, BASE + 1):
        with pytest.raises(ApiMisuse, match="bound or being bound"):
            store.begin_alloc_store(handle, "prefill")
    for handle, offset in ((BASE, POOL_BASE), (BASE + 1, POOL_BASE), (BASE + 2, block_offset)):
        with pytest.raises(ApiMisuse, match="not being bound to"):
            store.commit_alloc_store(handle, offset, 0, seal=False)
        with pytest.raises(ApiMisuse, match="not being bound to"):
            store.abort_alloc_store(handle, offset, "prefill")
    with pytest.raises(ApiMisuse, match=r"is not being bound to .* by"):
        store.abort_alloc_store(BASE + 1, block_offset, "reader")
    with pytest.raises(ApiMisuse, match="0 to 512"):
        store.commit_alloc_store(BASE + 1, block_offset, 513, seal=False)
    with pytest.raises(ApiMisuse, match="is sealed"):
        store.commit_store(BASE, b"", seal=False)
    with pytest.raises(ApiMisuse, match="is not bound"):
        store.commit_store(BASE + 1, b"", seal=False)
    with pytest.raises(ApiMisuse, match="not bound"):
        store.begin_free(BASE + 1, "prefill", heard)
    with pytest.raises(ApiMisuse, match="not bound, or not by"):
        store.begin_free(BASE, "reader", heard)
    assert heard.entries == []
    assert (store.free_blocks, store.quotas.usage("prefill"), [store.read(handle) for handle in HANDLES]) == before
    unsealed = store.commit_alloc_store(BASE + 1, block_offset, 4, seal=False)
    with pytest.raises(ApiMisuse, match="0 to 512"):
        store.commit_store(BASE + 1, bytes(513), seal=False)
    assert store.read(BASE + 1) == unsealed


def test_parts_that_do_not_fit_together_are_refused() -> None:
    store = python_store()
    with pytest.raises(ApiMisuse, match="quotas for 4 blocks: 3"):
        BlockStore(store.pool, store.table, store.ring, QuotaLedger(4))
    stray = FreeBlockRing(bytearray(64), bytearray(8), bytearray(8), 2, [POOL_BASE + 1], MaskedCounter(2))
    with pytest.raises(ApiMisuse, match="one of the pool's"):
        BlockStore(store.pool, store.table, stray, QuotaLedger(1))
    with pytest.raises(ApiMisuse, match="handle count"):
        BlockStore.create(
            bytearray(512),
            block_size_bytes=512,
            block_count=1,
            pool_base=0,
            table_base_handle=0,
            table_handles=-1,
            ring_order=1,
        )


# --- any order of calls ---


class Store(RuleBasedStateMachine):
    """Two initiators with ranges of their own, on three blocks, against a model that knows what each handle holds."""

    OWNERS = ("prefill", "decode")
    new_store: ClassVar[NewStore] = staticmethod(python_store)

    @initialize(
        quotas=st.sampled_from([(3, 0), (2, 1), (1, 1)]),
        first_ticket=st.sampled_from([0, 2**32 - 1, 2**32 - 6]),
        clear=st.booleans(),
    )
    def start(self, quotas: tuple[int, int], first_ticket: int, clear: bool) -> None:
        self.store = self.new_store(quota=quotas[0], clear_on_free=clear, first_ticket=first_ticket)
        self.store.quotas.grant("decode", quotas[1])
        self.quota = dict(zip(self.OWNERS, quotas, strict=True))
        self.generation = dict.fromkeys(HANDLES, 1)
        self.bound: dict[int, tuple[int, bytes, bool]] = {}  # handle -> block, data, sealed
        self.filling: dict[int, int] = {}  # handle -> block
        self.pins: dict[LoadPin, bytes] = {}  # pin -> what its block held
        self.waiting: dict[int, str] = {}  # block -> holder whose FREE waits
        self.heard: list[int] = []  # handles whose free completed, in order

    def holder(self, handle: int) -> str:
        return self.OWNERS[handle >= BASE + 4]

    def usage(self, holder: str) -> int:
        handles = [handle for handle in (*self.bound, *self.filling) if self.holder(handle) == holder]
        return len(handles) + list(self.waiting.values()).count(holder)

    @rule(handle=st.sampled_from([BASE, BASE + 1, BASE + 4, BASE + 5]))
    def begin_alloc_store(self, handle: int) -> None:
        if handle in self.bound or handle in self.filling:
            return
        holder = self.holder(handle)
        room = self.usage(holder) < self.quota[holder]
        block = self.store.begin_alloc_store(handle, holder)
        if not room:
            assert block is Status.NO_SPACE
            return
        assert not isinstance(block, Status)  # draft 3.4: within quotas the ring always has a block
        assert block not in self.waiting
        assert block not in self.filling.values()
        assert block not in [bound for bound, _, _ in self.bound.values()]
        assert block not in [pin.block_offset for pin in self.pins]
        self.filling[handle] = block

    @precondition(lambda self: self.filling)
    @rule(data=st.data(), content=st.binary(max_size=8), seal=st.booleans())
    def commit_alloc_store(self, data: st.DataObject, content: bytes, seal: bool) -> None:
        handle = data.draw(st.sampled_from(sorted(self.filling)))
        block = self.filling.pop(handle)
        self.store.pool.view(block, len(content))[:] = content
        self.store.commit_alloc_store(handle, block, len(content), seal)
        self.generation[handle] += 1
        self.bound[handle] = (block, content, seal)

    @precondition(lambda self: self.filling)
    @rule(data=st.data())
    def abort_alloc_store(self, data: st.DataObject) -> None:
        handle = data.draw(st.sampled_from(sorted(self.filling)))
        self.store.pool.view(self.filling[handle], 512)[:] = b"\xaa" * 512
        self.store.abort_alloc_store(handle, self.filling.pop(handle), self.holder(handle))

    @rule(data=st.data(), content=st.binary(max_size=8), seal=st.booleans())
    def commit_store(self, data: st.DataObject, content: bytes, seal: bool) -> None:
        unsealed = sorted(handle for handle, (_, _, sealed) in self.bound.items() if not sealed)
        if unsealed:
            handle = data.draw(st.sampled_from(unsealed))
            self.store.commit_store(handle, content, seal)
            self.bound[handle] = (self.bound[handle][0], content, seal)

    @rule(data=st.data())
    def begin_load(self, data: st.DataObject) -> None:
        sealed = sorted(handle for handle, (_, _, sealed) in self.bound.items() if sealed)
        if sealed:
            handle = data.draw(st.sampled_from(sealed))
            self.pins[self.store.begin_load(handle, owner=self)] = self.bound[handle][1]

    @precondition(lambda self: self.pins)
    @rule(data=st.data())
    def end_load(self, data: st.DataObject) -> None:
        pin = data.draw(st.sampled_from(list(self.pins)))
        del self.pins[pin]
        completes = pin.block_offset in self.waiting and pin.block_offset not in self.pinned_blocks()
        if completes:
            del self.waiting[pin.block_offset]
        before = len(self.heard)
        self.store.end_load(pin)
        assert len(self.heard) - before == completes

    @precondition(lambda self: self.bound)
    @rule(data=st.data())
    def begin_free(self, data: st.DataObject) -> None:
        handle = data.draw(st.sampled_from(sorted(self.bound)))
        block, _, _ = self.bound.pop(handle)
        self.generation[handle] += 1
        expected = Entry(EntryFlag.NONE, self.generation[handle], 0, 0)
        before = len(self.heard)

        def freed(entry: Entry) -> None:
            assert entry == expected
            self.heard.append(handle)

        at_once = self.store.begin_free(handle, self.holder(handle), freed)
        assert at_once == (block not in self.pinned_blocks())
        assert len(self.heard) - before == at_once
        if not at_once:
            self.waiting[block] = self.holder(handle)

    def pinned_blocks(self) -> set[int]:
        return {pin.block_offset for pin in self.pins}

    @invariant()
    def entries_say_what_the_model_says(self) -> None:
        for handle in HANDLES:
            entry = self.store.read(handle)
            assert entry.generation == self.generation[handle]
            if handle in self.bound:
                block, content, sealed = self.bound[handle]
                assert (entry.valid, entry.sealed, entry.block_offset) == (True, sealed, block)
                assert bytes(self.store.pool.view(block, entry.data_length)) == content
            else:
                assert entry == Entry(EntryFlag.NONE, self.generation[handle], 0, 0)
        assert self.store.bound_handles(HANDLES) == sorted(self.bound)

    @invariant()
    def a_load_never_sees_a_mixture(self) -> None:
        for pin, content in self.pins.items():
            assert loaded(self.store, pin) == content

    @invariant()
    def no_block_and_no_unit_of_quota_is_lost(self) -> None:
        assert self.store.free_blocks + len(self.bound) + len(self.filling) + len(self.waiting) == 3
        for holder in self.OWNERS:
            assert self.store.quotas.usage(holder) == self.usage(holder)
        assert [block for block, _ in self.store.pinned_frees()] == list(self.waiting)
        for block, pins in self.store.pinned_frees():
            assert set(pins) == {pin for pin in self.pins if pin.block_offset == block}


TestStore = Store.TestCase
TestStore.settings = settings(TestStore.settings, max_examples=100, stateful_step_count=40)


class NativeStore(Store):
    new_store = staticmethod(native_store)


TestNativeStore = NativeStore.TestCase
TestNativeStore.settings = TestStore.settings
