"""Direct Allocation without I/O (draft 6.6, profile 6.11): ticket, slot, BIND, and the ways in which they fail."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kbtp.blocks.counter import MaskedCounter, UnmaskedCounter
from kbtp.errors import ApiMisuse, PeerMisbehaved, TicketAbandoned
from kbtp.initiator.direct import (
    BindSpare,
    BindTaken,
    DirectTerms,
    Ended,
    FreeSpare,
    ReadStructure,
    Step,
    TakeTicket,
    UseRequest,
    Wait,
)
from kbtp.initiator.direct_alloc import DirectAlloc
from kbtp.initiator.operations import Result, TakenBlock
from kbtp.limits import DIRECT_SLOT_WAIT_MAX_S, DIRECT_SLOT_WAIT_S
from kbtp.types import Feature, Status
from tests.initiator.direct_acks import (
    BLOCK_BYTES,
    EMPTY,
    HEAD_STAG,
    POOL_BASE,
    RING_STAG,
    TABLE_BASE,
    TICKET_TIMEOUT_S,
    block,
    direct_ack,
    slot,
)

TICKET = 6  # of a ring of four slots: slot 2
SLOT = ReadStructure(RING_STAG, 0x40 + 16 * 2)
TAKEN = TakenBlock(TICKET, block(5))
HEAD = MaskedCounter(2).encode(TICKET)
UNMASKED = Feature.INVALIDATE | Feature.DIRECT_ALLOC
START_S = 50.0


def begun(handle: int | None = None, length: int = 100, ack: object = None) -> tuple[DirectAlloc, Step]:
    alloc = DirectAlloc(DirectTerms(ack or direct_ack()), handle, length)  # type: ignore[arg-type]
    return alloc, alloc.begin()


def with_ticket() -> DirectAlloc:
    alloc, _ = begun()
    alloc.posted(START_S)
    assert alloc.completed(b"", HEAD, START_S) == SLOT
    return alloc


def bind_refused(status: Status) -> tuple[DirectAlloc, Step, Result]:
    alloc = with_ticket()
    alloc.completed(slot(TICKET, block(5)), 0, START_S)
    assert alloc.completed(slot(TICKET, block(5)), 0, START_S) == BindTaken(TAKEN)
    result = Result(status, TABLE_BASE)
    return alloc, alloc.answered(result, TAKEN), result


# --- ticket and slot ---------------------------------------------------------------------------


def test_a_ticket_a_slot_read_twice_and_bind() -> None:
    """Draft 6.6: once more to confirm both values."""
    alloc, step = begun()
    assert step == TakeTicket(HEAD_STAG, 0x8, 0x0000_0001_0000_0010, 1 << 63 | 1 << 31 | 1 << 5)
    assert alloc.completed(b"", HEAD, START_S) == SLOT
    assert alloc.completed(slot(TICKET, block(5)), 0, START_S) == SLOT
    assert alloc.completed(slot(TICKET, block(5)), 0, START_S) == BindTaken(TAKEN)
    result = Result(Status.SUCCESS, TABLE_BASE, 2, 100, block(5))
    assert alloc.answered(result, TAKEN) == Ended(result)


def test_without_masked_atomics_the_slot_is_computed_from_the_ticket() -> None:
    """Draft 9.2."""
    alloc, step = begun(ack=direct_ack(granted_features=UNMASKED))
    assert step == TakeTicket(HEAD_STAG, 0x8, 0x0000_0001_0000_0000, 0)
    assert alloc.completed(b"", UnmaskedCounter(2).encode(TICKET), START_S) == SLOT


@pytest.mark.parametrize("head", [HEAD + 16, HEAD | 1 << 6, HEAD | 1, 1 << 32])
def test_a_head_that_no_fetch_add_can_have_made_is_the_targets_fault(head: int) -> None:
    alloc, _ = begun()
    with pytest.raises(PeerMisbehaved, match="no FetchAdd can have made"):
        alloc.completed(b"", head, START_S)


@pytest.mark.parametrize(
    "early",
    [
        slot(TICKET - 4, EMPTY),
        slot(TICKET - 4, block(5)),
        slot(TICKET, EMPTY),
        slot(TICKET + 4, block(5)),
        slot(TICKET, block(5) + 64),
        slot(TICKET, POOL_BASE - BLOCK_BYTES),
    ],
    ids=["consumed", "not consumed yet", "torn", "of a later turn", "no block", "outside"],
)
def test_a_slot_that_is_not_ready_is_read_again_after_a_while(early: bytes) -> None:
    """Draft 3.3. Twice as long each time, up to a limit: no busy loop."""
    alloc = with_ticket()
    waits = []
    for _ in range(20):
        step = alloc.completed(early, 0, START_S)
        assert isinstance(step, Wait)
        waits.append(step.until_s - START_S)
        assert alloc.waited() == SLOT
    assert waits[:3] == pytest.approx([DIRECT_SLOT_WAIT_S, 2 * DIRECT_SLOT_WAIT_S, 4 * DIRECT_SLOT_WAIT_S])
    assert max(waits) == pytest.approx(DIRECT_SLOT_WAIT_MAX_S)
    assert alloc.completed(slot(TICKET, block(5)), 0, START_S) == SLOT
    assert alloc.completed(slot(TICKET, block(5)), 0, START_S) == BindTaken(TAKEN)


@pytest.mark.parametrize("confirming", [slot(TICKET, EMPTY), slot(TICKET, block(6)), slot(TICKET - 4, block(5))])
def test_a_confirming_read_that_says_otherwise_confirms_nothing(confirming: bytes) -> None:
    """Draft 6.6: a read of 16 octets is not atomic."""
    alloc = with_ticket()
    assert alloc.completed(slot(TICKET, block(5)), 0, START_S) == SLOT
    assert isinstance(alloc.completed(confirming, 0, START_S), Wait)
    alloc.waited()
    step = alloc.completed(slot(TICKET, block(6)), 0, START_S)
    if step == SLOT:
        step = alloc.completed(slot(TICKET, block(6)), 0, START_S)
    assert step == BindTaken(TakenBlock(TICKET, block(6)))


def test_a_ticket_runs_out_counted_from_before_its_fetch_add() -> None:
    """Profile 6.11."""
    alloc, _ = begun()
    assert not alloc.ran_out(START_S + 100)  # it has no ticket
    alloc.posted(START_S)
    alloc.completed(b"", HEAD, START_S + 0.9 * TICKET_TIMEOUT_S)
    alloc.posted(START_S + 0.9 * TICKET_TIMEOUT_S)
    assert not alloc.ran_out(START_S + 0.99 * TICKET_TIMEOUT_S)
    assert alloc.ran_out(START_S + TICKET_TIMEOUT_S)


@pytest.mark.parametrize(
    ("handle", "length"),
    [(TABLE_BASE + 8, 100), (TABLE_BASE - 1, BLOCK_BYTES + 1), (TABLE_BASE, BLOCK_BYTES + 1), (None, BLOCK_BYTES + 1)],
)
def test_what_is_known_to_be_refused_takes_no_ticket(handle: int | None, length: int) -> None:
    """ALLOC_STORE says with what: the order of checks (profile 1) is the target's."""
    assert begun(handle, length)[1] == UseRequest()


# --- BIND --------------------------------------------------------------------------------------

REFUSALS = [
    Status.ALREADY_BOUND, Status.HANDLE_OUT_OF_RANGE, Status.GENERATION_MISMATCH, Status.LENGTH_ERROR, Status.NO_SPACE,
    Status.UNSUPPORTED, Status.MALFORMED, Status.TARGET_ERROR,
]  # fmt: skip


@pytest.mark.parametrize("status", REFUSALS)
def test_the_ticket_of_a_refused_bind_is_given_back(status: Status) -> None:
    """Profile 6.11: by BIND to a spare handle and FREE. The answer is the refusal."""
    alloc, step, refusal = bind_refused(status)
    assert step == BindSpare(TAKEN)
    assert alloc.answered(Result(Status.SUCCESS, TABLE_BASE + 1, 7), TAKEN) == FreeSpare(TABLE_BASE + 1, 7)
    assert alloc.freed() == Ended(refusal)


@pytest.mark.parametrize("status", [*REFUSALS, Status.TICKET_ABANDONED, Status.TICKET_MISMATCH, None])
def test_a_ticket_that_cannot_be_given_back_runs_out(status: Status | None) -> None:
    alloc, _, refusal = bind_refused(Status.ALREADY_BOUND)
    assert alloc.answered(Result(status), TAKEN) == Ended(refusal, direct_alloc_is_over=True)


def test_an_abandoned_ticket_ends_direct_allocation_but_not_the_operation() -> None:
    """Profile 6.11: nothing was bound, so ALLOC_STORE may do it."""
    assert bind_refused(Status.TICKET_ABANDONED)[1] == UseRequest(direct_alloc_is_over=True)


def test_a_bind_that_could_not_be_sent_in_time_is_left_to_alloc_store() -> None:
    alloc = with_ticket()
    unsent = Result(None, error=TicketAbandoned("too late"))
    assert alloc.answered(unsent, TAKEN) == UseRequest(direct_alloc_is_over=True)


def test_a_bind_whose_data_is_lost_gives_its_ticket_back() -> None:
    alloc = with_ticket()
    unsent = Result(None, error=ApiMisuse("the region is revoked"))
    assert alloc.answered(unsent, TAKEN) == BindSpare(TAKEN)
    assert alloc.answered(Result(Status.SUCCESS, TABLE_BASE + 1, 7), TAKEN) == FreeSpare(TABLE_BASE + 1, 7)
    assert alloc.freed() == Ended(unsent)


def test_a_ticket_that_the_target_does_not_know_is_told() -> None:
    _, step, refusal = bind_refused(Status.TICKET_MISMATCH)
    assert step == Ended(refusal, direct_alloc_is_over=True)


@given(
    st.lists(
        st.tuples(
            st.sampled_from([TICKET - 4, TICKET, TICKET + 4, 0, 0xFFFF_FFFF]),
            st.sampled_from([EMPTY, 0, block(-1), block(3), block(4), block(4) + 1, block(16)]),
        )
    )
)
def test_whatever_is_read_only_what_two_reads_in_turn_showed_is_bound(reads: list[tuple[int, int]]) -> None:
    alloc = with_ticket()
    for number, (sequence, block_offset) in enumerate(reads):
        step = alloc.completed(slot(sequence, block_offset), 0, START_S)
        if isinstance(step, BindTaken):
            assert step.taken == TakenBlock(TICKET, block_offset)
            assert (sequence, block_offset) == reads[number - 1] == (TICKET, block_offset)
            assert block_offset in (block(3), block(4))
            break
        assert isinstance(step, Wait) or step == SLOT
