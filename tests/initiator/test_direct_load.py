"""Direct Load without I/O (draft 6.6, profile 6.3): each read, what it showed, what comes next."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kbtp.initiator.direct import DirectTerms, Ended, ReadBlock, ReadStructure, Step, UseRequest
from kbtp.initiator.direct_load import DirectLoad
from kbtp.initiator.operations import Result
from kbtp.limits import DIRECT_LOAD_INTERVAL_S, DIRECT_LOAD_TRIES_MAX
from kbtp.types import EntryFlag, Status
from tests.initiator.direct_acks import (
    BLOCK_BYTES,
    POOL_BASE,
    POOL_BLOCKS,
    POOL_STAG,
    SEALED,
    TABLE_BASE,
    TABLE_STAG,
    VALID,
    block,
    direct_ack,
    entry,
)

HANDLE = TABLE_BASE + 3
ENTRY = ReadStructure(TABLE_STAG, 0x100 + 16 * 3)
NOTHING = EntryFlag.NONE


class Load:
    """A direct load of a buffer of 1000 octets, its reads taking `each_s`."""

    def __init__(self, handle: int = HANDLE, generation: int = 0, size: int = 1000, **options: Any) -> None:
        self._now_s = 50.0
        self._load = DirectLoad(
            DirectTerms(direct_ack()), handle, generation, size, **{"allow_unsealed": False, **options}
        )
        self.step = self._load.begin()

    def reads(self, *octets: bytes, each_s: float = 0.001) -> Step:
        """One read after the other completes with these octets."""
        for each in octets:
            assert isinstance(self.step, ReadStructure | ReadBlock)
            self._load.posted(self._now_s)
            self._now_s += each_s
            self.step = self._load.completed(each, 0, self._now_s)
        return self.step


BLOCK_READ = b"the octets of a block are no matter of the sequence's"


def test_entry_block_and_entry_twice_again_are_a_load() -> None:
    """Draft 6.6: each read after the one before it has completed."""
    load = Load()
    assert load.step == ENTRY
    assert load.reads(entry(2, 100, block(5))) == ReadBlock(POOL_STAG, block(5), 100)
    assert load.reads(BLOCK_READ) == ENTRY
    assert load.reads(entry(2, 100, block(5))) == ENTRY
    assert load.reads(entry(2, 100, block(5))) == Ended(Result(Status.SUCCESS, HANDLE, 2, 100, block(5)))


def test_two_torn_entries_that_agree_are_not_believed() -> None:
    """Generation of one binding, block of another, read once each way round: the third read tells."""
    torn = entry(2, 100, block(5))
    load = Load()
    assert load.reads(torn, BLOCK_READ, torn) == ENTRY
    assert load.reads(entry(4, 100, block(5))) == ReadBlock(POOL_STAG, block(5), 100)


def test_an_empty_block_is_two_reads() -> None:
    """Profile 6.6: nothing moves."""
    load = Load(size=0)
    assert load.reads(entry(2, 0)) == ENTRY
    assert load.reads(entry(2, 0)) == Ended(Result(Status.SUCCESS, HANDLE, 2, 0, POOL_BASE))


@pytest.mark.parametrize("handle", [TABLE_BASE - 1, TABLE_BASE + 64, 0, (1 << 64) - 1])
def test_a_handle_outside_the_table_reads_nothing(handle: int) -> None:
    assert Load(handle).step == Ended(Result(Status.HANDLE_OUT_OF_RANGE, handle))


def test_tables_may_wrap() -> None:
    """Profile, preamble: range tests are unsigned."""
    terms = DirectTerms(direct_ack(table_base_handle=(1 << 64) - 2, table_offset=0))
    assert [terms.entry_to(handle) for handle in ((1 << 64) - 2, 1, 61, 62)] == [0, 48, 16 * 63, None]


@pytest.mark.parametrize(
    ("first", "generation", "result"),
    [
        (entry(3, 0, 0, NOTHING), 2, Result(Status.NOT_BOUND, HANDLE, 3)),
        (entry(3), 2, Result(Status.GENERATION_MISMATCH, HANDLE, 3)),
        (entry(3, flags=VALID), 2, Result(Status.GENERATION_MISMATCH, HANDLE, 3)),
        (entry(2, flags=VALID), 2, Result(Status.NOT_SEALED, HANDLE, 2)),
        (entry(2, flags=SEALED), 2, Result(Status.NOT_BOUND, HANDLE, 2)),
        (entry(2, 1001), 2, Result(Status.LENGTH_ERROR, HANDLE, 2, 1001)),
        (entry(9, 1000), 0, None),
    ],
)
def test_what_an_entry_refuses_is_what_load_would_refuse(first: bytes, generation: int, result: Result | None) -> None:
    """Profile 1's order of checks; believed when a second read says the same."""
    load = Load(generation=generation)
    if result is None:
        assert isinstance(load.reads(first), ReadBlock)
    else:
        assert load.reads(first) == ENTRY
        assert load.reads(first) == Ended(result)


def test_what_the_owner_still_writes_is_left_to_load() -> None:
    """ALLOW_UNSEALED is no matter of a direct load's: only a sealed block stays as it is."""
    assert Load(allow_unsealed=True).reads(entry(flags=VALID)) == UseRequest()
    assert isinstance(Load(allow_unsealed=True).reads(entry()), ReadBlock)


@pytest.mark.parametrize(
    "second",
    [
        entry(3, 100, block(5)),
        entry(2, 99, block(5)),
        entry(2, 100, block(6)),
        entry(2, 100, block(5), VALID),
        entry(2, 100, block(5), VALID | SEALED | EntryFlag(0x8000)),
    ],
    ids=["generation", "length", "block", "flags", "unknown flag"],
)
def test_all_16_octets_are_compared(second: bytes) -> None:
    """Profile 6.3 [D]. The second read is the first of the next try."""
    load = Load()
    step = load.reads(entry(2, 100, block(5)), BLOCK_READ, second)
    if second[1] & SEALED:
        assert isinstance(step, ReadBlock)
    else:
        assert step == ENTRY
        assert load.reads(second) == Ended(Result(Status.NOT_SEALED, HANDLE, 2))


def test_the_next_try_reads_what_is_there_now() -> None:
    load = Load()
    assert load.reads(entry(2, 100, block(5)), BLOCK_READ, entry(4, 7, block(6))) == ReadBlock(POOL_STAG, block(6), 7)
    result = Result(Status.SUCCESS, HANDLE, 4, 7, block(6))
    assert load.reads(BLOCK_READ, entry(4, 7, block(6)), entry(4, 7, block(6))) == Ended(result)


def test_a_block_that_is_freed_meanwhile_is_refused() -> None:
    load = Load(generation=2)
    assert load.reads(entry(2), BLOCK_READ, entry(3, 0, 0, NOTHING)) == ENTRY
    assert load.reads(entry(3, 0, 0, NOTHING)) == Ended(Result(Status.NOT_BOUND, HANDLE, 3))
    load = Load(generation=2)
    load.reads(entry(2), BLOCK_READ, entry(4))
    assert load.reads(entry(4)) == Ended(Result(Status.GENERATION_MISMATCH, HANDLE, 4))


TORN = [
    entry(block_offset=POOL_BASE - BLOCK_BYTES),
    entry(block_offset=POOL_BASE + 1),
    entry(block_offset=block(POOL_BLOCKS)),
    entry(block_offset=(1 << 64) - 1),
    entry(length=BLOCK_BYTES + 1),
    entry(generation=0),
]


@pytest.mark.parametrize("torn", TORN)
def test_what_no_entry_can_say_is_read_again_and_then_left_to_load(torn: bytes) -> None:
    """Profile 6.3: no read of a block goes anywhere but to a block of the pool."""
    load = Load(size=1 << 20)
    assert load.reads(torn) == ENTRY
    assert isinstance(load.reads(entry()), ReadBlock)
    load = Load(size=1 << 20)
    assert load.reads(*[torn] * DIRECT_LOAD_TRIES_MAX) == ENTRY
    assert load.reads(torn) == UseRequest()


def test_a_block_that_changes_all_the_time_is_left_to_load() -> None:
    load = Load()
    for generation in range(2, 2 + DIRECT_LOAD_TRIES_MAX):
        assert isinstance(load.reads(entry(generation)), ReadBlock)
        load.reads(BLOCK_READ)
    assert load.reads(entry(99)) == UseRequest()


def test_entries_read_too_far_apart_prove_nothing() -> None:
    """Profile 6.3: 65535 bindings later a Generation comes again."""
    load = Load()
    assert isinstance(load.reads(entry(), BLOCK_READ, entry(), each_s=DIRECT_LOAD_INTERVAL_S / 2), ReadBlock)
    assert load.reads(BLOCK_READ, entry(), entry()).__class__ is Ended
    late = Load()
    assert late.reads(entry(), BLOCK_READ, entry()) == ENTRY
    assert isinstance(late.reads(entry(), each_s=DIRECT_LOAD_INTERVAL_S), ReadBlock)
    slow = Load()
    for _ in range(DIRECT_LOAD_TRIES_MAX):
        assert isinstance(slow.reads(entry(), each_s=DIRECT_LOAD_INTERVAL_S / 2), ReadBlock)
        slow.reads(BLOCK_READ, each_s=DIRECT_LOAD_INTERVAL_S / 2)
    assert slow.reads(entry(), each_s=DIRECT_LOAD_INTERVAL_S / 2) == UseRequest()


ENTRIES = st.one_of(
    st.binary(min_size=16, max_size=16),
    st.builds(
        entry,
        st.integers(0, 3),
        st.sampled_from([0, 1, 500, 1001, BLOCK_BYTES + 1]),
        st.integers(-1, POOL_BLOCKS).map(block),
        st.integers(0, 3).map(EntryFlag),
    ),
)


@given(st.lists(st.tuples(ENTRIES, st.sampled_from([0.0, 0.03, 0.2]))), st.integers(0, 3))
def test_whatever_is_read_a_load_ends_and_believes_only_what_it_saw_again(
    reads: list[tuple[bytes, float]], generation: int
) -> None:
    """Entries of any content, read at any pace: no read leaves the pool or the buffer, the number of reads is bounded,
    and what is said of the block is what three reads around the block's, close together, all showed."""
    load = Load(generation=generation)
    seen: list[bytes] = []
    last_block: ReadBlock | None = None
    paces: list[float] = []
    for octets, each_s in [*reads, *[(entry(), 0.0)] * 12]:
        if isinstance(load.step, Ended | UseRequest):
            break
        if isinstance(load.step, ReadBlock):
            last_block = load.step
            assert POOL_BASE <= last_block.to < block(POOL_BLOCKS)
            assert last_block.length_bytes <= 1000
            paces[-1] += each_s
            load.reads(BLOCK_READ, each_s=each_s)
            assert load.step == ENTRY
        else:
            seen.append(octets)
            paces.append(each_s)
            load.reads(octets, each_s=each_s)
    assert len(seen) <= 2 * DIRECT_LOAD_TRIES_MAX + 1
    if isinstance(load.step, Ended):
        result = load.step.result
        has_data = result.ok and result.length_bytes
        believed = 3 if has_data else 2
        assert len(set(seen[-believed:])) == 1 and len(seen) >= believed
        assert sum(paces[-believed:]) <= DIRECT_LOAD_INTERVAL_S + 1e-9
        if has_data:
            assert last_block == ReadBlock(POOL_STAG, result.block_offset, result.length_bytes)
            assert generation in (0, result.generation)
    else:
        assert load.step == UseRequest()
