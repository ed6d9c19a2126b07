"""What is the native store's own: numbers for holders and readers, and frees that finish in the RNIC.

What it has in common with `kbtp.blocks.BlockStore` is tested in tests/blocks.
"""

from __future__ import annotations

import errno
import sys
from collections.abc import Callable

import pytest

from kbtp.blocks import BlockStore, Entry
from kbtp.errors import ApiMisuse
from kbtp.rnic import native_partitions
from kbtp.rnic.native import NativeRnic
from kbtp.rnic.native_store import NativeBlockStore
from kbtp.types import EntryFlag
from kbtp.verbs.api import Access

BASE = 0x4000
NUMBERS = {
    "block_size_bytes": 512,
    "block_count": 3,
    "pool_base": 0x10000,
    "table_base_handle": BASE,
    "table_handles": 8,
    "ring_order": 2,
}


def a_store(freed: Callable[[object], None] = lambda _holder: None, **numbers: int) -> NativeBlockStore:
    rnic = NativeRnic()
    pool = rnic.register(bytearray(3 * 512), Access.NONE, pd=rnic.allocate_pd(), base_to=0x10000)
    return rnic.create_block_store(pool, **{**NUMBERS, **numbers}, freed=freed)


def bind(store: NativeBlockStore, handle: int, holder: object = "prefill") -> None:
    block_offset = store.begin_alloc_store(handle, holder)
    assert isinstance(block_offset, int)
    store.commit_alloc_store(handle, block_offset, 4, seal=True)


def test_pins_of_the_rnic_are_those_of_the_reader_it_acts_for() -> None:
    store = a_store()
    store.quotas.grant("prefill", 1)
    bind(store, BASE)
    session = object()
    store.name_reader(session, 17)
    native_pin = store.native.begin_load(BASE, 17)
    pin = store.begin_load(BASE, session)
    assert store.begin_load(BASE, "somebody else").owner_number != pin.owner_number == 17

    assert not store.begin_free(BASE, "prefill", lambda _entry: None)
    [(block_offset, pins)] = store.pinned_frees()
    assert block_offset == 0x10000
    assert [pinned.owner for pinned in pins] == [session, session, "somebody else"]
    assert pins[1] is pin

    assert store.native.end_load(native_pin) is None
    store.end_load(pin)
    for _ in range(2):
        store.forget_reader(session)
    assert [pinned.owner for _, pins in store.pinned_frees() for pinned in pins] == ["somebody else"]


def test_a_free_of_this_side_may_finish_in_the_rnic() -> None:
    store = a_store()
    store.quotas.grant("prefill", 1)
    bind(store, BASE)
    native_pin = store.native.begin_load(BASE, 17)
    heard: list[Entry] = []
    assert not store.begin_free(BASE, "prefill", heard.append)
    finished = store.native.end_load(native_pin)
    assert finished is not None
    assert (heard, store.free_blocks) == ([], 3)
    store.free_finished(*finished)
    assert heard == [Entry(EntryFlag.NONE, 3, 0, 0)]


def test_a_free_of_the_rnic_that_outlived_its_stream_is_told_to_the_target() -> None:
    heard: list[object] = []
    store = a_store(heard.append)
    store.quotas.grant("prefill", 1)
    number = store.quotas.number_of("prefill")
    store.free_outlived(number)
    assert heard == ["prefill"]
    store.quotas.release("prefill")
    store.free_outlived(number)
    assert heard == ["prefill"]


def test_a_holder_is_known_until_its_account_is_closed_and_settled() -> None:
    store = a_store()
    for wrong in (store.quotas.release, store.quotas.number_of):
        with pytest.raises(ApiMisuse, match="'prefill' has no quota"):
            wrong("prefill")
    assert (store.quotas.usage("prefill"), store.quotas.quota("prefill")) == (0, 0)
    with pytest.raises(ApiMisuse, match="zero or more"):
        store.quotas.grant("prefill", -1)
    assert store.quotas.grant("prefill", 2**80) == 3
    bind(store, BASE)
    store.quotas.release("prefill")
    assert (store.quotas.left, store.quotas.quota("prefill"), store.quotas.usage("prefill")) == (2, 1, 1)
    with pytest.raises(ApiMisuse, match="'prefill' has a quota already"):
        store.quotas.grant("prefill", 1)
    assert store.begin_free(BASE, "prefill", lambda _entry: None)
    assert store.quotas.grant("prefill", 5) == 3


def test_a_pin_of_another_store_is_refused() -> None:
    store = a_store()
    other = BlockStore.create(bytearray(3 * 512), **NUMBERS)
    other.quotas.grant("prefill", 1)
    block_offset = other.begin_alloc_store(BASE, "prefill")
    assert isinstance(block_offset, int)
    other.commit_alloc_store(BASE, block_offset, 4, seal=True)
    with pytest.raises(ApiMisuse, match="is not of this store"):
        store.end_load(other.begin_load(BASE, None))


@pytest.mark.parametrize(
    ("numbers", "words"),
    [
        ({"block_size_bytes": 500}, "block size"),
        ({"block_count": 4}, "pool: 2048 octets expected"),
        ({"table_handles": -1}, "handle count"),
        ({"table_base_handle": 2**64}, "base handle"),
        ({"ring_order": 0}, "ring order 0"),
        ({"ring_order": 1}, "3 blocks: 1 to 2"),
        ({"first_ticket": 2**32}, "first ticket"),
    ],
)
def test_numbers_that_do_not_fit_are_refused(numbers: dict[str, int], words: str) -> None:
    with pytest.raises(ApiMisuse, match=words):
        a_store(**numbers)


def test_a_table_that_the_system_has_no_memory_for() -> None:
    with pytest.raises(OSError, match="memory"):
        a_store(table_handles=2**62)


def test_the_pool_must_be_a_region_of_this_rnic() -> None:
    class Elsewhere:
        view = memoryview(bytearray(3 * 512))

    with pytest.raises(ApiMisuse, match="must be registered with this RNIC"):
        NativeRnic().create_block_store(Elsewhere(), **NUMBERS, freed=lambda _holder: None)  # type: ignore[arg-type]


# --- partitions: memory of this side's that the RNIC is let work on ------------------------------


DIRECT = {"block_count": 3, "direct_blocks": 2}


def test_what_a_peer_may_be_shown_is_registered_like_any_other_memory() -> None:
    rnic = NativeRnic()
    pd = rnic.allocate_pd()
    pool = rnic.register(bytearray(3 * 512), Access.NONE, pd=pd, base_to=0x10000)
    store = rnic.create_block_store(pool, **{**NUMBERS, **DIRECT}, freed=lambda _holder: None)
    partition = store.open_partition("direct", 2)
    assert partition is not None
    regions = [
        rnic.register(store.table_memory, Access.REMOTE_READ, pd=pd),
        rnic.register(partition.slots, Access.REMOTE_READ, pd=pd),
        rnic.register(partition.head, Access.REMOTE_ATOMIC, pd=pd),
    ]
    assert [region.length for region in regions] == [16 * 8, 16 * 2, 8]
    bind(store, BASE, "direct")
    assert bytes(regions[0].view[:16]) == bytes.fromhex("0003 0002 00000004 0000000000010200")
    assert bytes(regions[1].view) == bytes.fromhex(
        "00000000 00000000 ffffffffffffffff 00000001 00000000 0000000000010400"
    )
    assert int.from_bytes(regions[2].view, sys.byteorder) == 0x0000_0001_0000_0010


def test_the_memory_of_a_partition_outlives_it_for_who_holds_it() -> None:
    store = a_store(**DIRECT)
    partition = store.open_partition("direct", 2)
    assert partition is not None
    slots, head = partition.slots, partition.head
    store.close_partition("direct")
    again = store.open_partition("another", 2)
    assert again is not None
    bind(store, BASE, "another")
    assert (bytes(head), bytes(slots[:8])) == (bytes(8), bytes(8))
    assert again.head.obj is not head.obj
    with pytest.raises(ApiMisuse, match="has no partition"):
        partition.audit_head()


def test_a_holder_whose_partition_was_closed_is_forgotten() -> None:
    store = a_store(**DIRECT)
    for _ in range(3):
        assert store.open_partition("direct", 2) is not None
        with pytest.raises(ApiMisuse, match="'direct' has a quota already"):
            store.quotas.grant("direct", 1)
        store.close_partition("direct")
        assert store.quotas.quota("direct") == 0
    assert store.quotas.grant("direct", 9) == 1


def no_memory(_length_bytes: int) -> memoryview:
    raise OSError(errno.ENOMEM, "no memory")


def test_no_memory_for_a_ring_is_no_room_and_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    store = a_store(**DIRECT)
    store.quotas.grant("has a quota", 1)
    with monkeypatch.context() as patched:
        patched.setattr(native_partitions, "zeroed", no_memory)
        assert store.open_partition("direct", 2) is store.open_partition("has a quota", 2) is None
    assert (store.free_blocks, store.quotas.quota("has a quota")) == (3, 1)
    store.quotas.release("has a quota")
    assert store.quotas.grant("direct", 1) == 1
    assert store.open_partition("direct", 2) is not None


def test_a_partition_that_is_refused_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    store = a_store(**DIRECT)
    with monkeypatch.context() as patched:
        patched.setattr(native_partitions, "zeroed", lambda _length_bytes: memoryview(bytearray(8)))
        with pytest.raises(ApiMisuse, match="slots"):
            store.open_partition("direct", 2)
    assert store.free_blocks == 3
    assert store.quotas.grant("direct", 1) == 1
    assert store.open_partition("direct", 2) is not None


@pytest.mark.parametrize(
    ("slots", "head", "words"),
    [
        (object(), bytearray(8), "ring slots: a buffer of words expected"),
        (bytearray(32), object(), "Head: a buffer of words expected"),
        (bytearray(12), bytearray(8), "ring slots: writable words"),
        (bytearray(32), bytes(8), "Head: writable words"),
    ],
)
def test_memory_that_is_no_words_is_refused_by_name(slots: object, head: object, words: str) -> None:
    with pytest.raises(ApiMisuse, match=words):
        a_store(**DIRECT).native.open_partition(0, 1, 2, slots, head)  # type: ignore[arg-type]
