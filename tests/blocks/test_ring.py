"""The free-block ring step by step (draft 3.3, profile 5, 6.2, 6.9), looked at as octets in memory."""

from __future__ import annotations

import struct
import sys
from collections.abc import Callable

import pytest

from kbtp.blocks import CounterForm, FreeBlockRing, MaskedCounter, UnmaskedCounter
from kbtp.errors import ApiMisuse, PeerMisbehaved
from kbtp.types import TerminateCause

EMPTY = 2**64 - 1
BLOCKS = [0x1000, 0x2000, 0x3000, 0x4000]


class Memories:
    """What a peer of a direct mode could see: the octets of slots and counters."""

    def __init__(self, slot_count: int = 4) -> None:
        self.slots = bytearray(b"\xee" * (16 * slot_count))
        self.head = bytearray(b"\xee" * 8)
        self.tail = bytearray(b"\xee" * 8)

    def slot_contents(self) -> list[tuple[int, int]]:
        """(Sequence, Block Offset) of every slot, read as drawn in draft 3.3."""
        contents = list(struct.iter_unpack(">IIQ", self.slots))
        assert {reserved for _, reserved, _ in contents} == {0}
        return [(sequence, block_offset) for sequence, _, block_offset in contents]

    def counters(self) -> tuple[int, int]:
        return int.from_bytes(self.head, sys.byteorder), int.from_bytes(self.tail, sys.byteorder)

    def set_head(self, value: int) -> None:
        self.head[:] = value.to_bytes(8, sys.byteorder)

    def ring(
        self,
        blocks: list[int] = BLOCKS,
        form_of: Callable[[int], CounterForm] = MaskedCounter,
        first_ticket: int = 0,
        ring_class: type[FreeBlockRing] = FreeBlockRing,
    ) -> FreeBlockRing:
        order = (len(self.slots) // 16).bit_length() - 1
        return ring_class(self.slots, self.head, self.tail, order, blocks, form_of(order), first_ticket)


# --- Initialization ---


def test_slots_below_f_hold_the_blocks_and_the_rest_is_empty_one_turn_earlier() -> None:
    memories = Memories()
    memories.ring(BLOCKS[:3])
    assert memories.slot_contents() == [(0, 0x1000), (1, 0x2000), (2, 0x3000), (2**32 - 1, EMPTY)]


def test_one_block_on_a_ring_of_four() -> None:
    memories = Memories()
    memories.ring(BLOCKS[:1])
    assert memories.slot_contents() == [(0, 0x1000), (2**32 - 3, EMPTY), (2**32 - 2, EMPTY), (2**32 - 1, EMPTY)]


@pytest.mark.parametrize(
    ("form_of", "f", "head", "tail"),
    [
        (MaskedCounter, 3, 0, 0x00000003_00000030),
        (MaskedCounter, 4, 0, 0x00000004_00000000),
        (UnmaskedCounter, 3, 0, 0x00000003_00000000),
        (UnmaskedCounter, 4, 0, 0x00000004_00000000),
    ],
)
def test_head_starts_at_zero_and_tail_at_f(form_of: Callable[[int], CounterForm], f: int, head: int, tail: int) -> None:
    memories = Memories()
    memories.ring(BLOCKS[:f], form_of)
    assert memories.counters() == (head, tail)


def test_a_preset_first_ticket_is_the_same_ring_later_in_its_life() -> None:
    memories = Memories()
    memories.ring(BLOCKS[:3], first_ticket=2**32 - 2)
    # Tickets fffffffe, ffffffff and 0 lie in slots 2, 3 and 0; slot 1 awaits ticket 1.
    assert memories.slot_contents() == [(0, 0x3000), (2**32 - 3, EMPTY), (2**32 - 2, 0x1000), (2**32 - 1, 0x2000)]
    assert memories.counters() == (0xFFFFFFFE_00000020, 0x00000001_00000010)


def test_a_ring_for_one_block_has_two_slots() -> None:
    memories = Memories(slot_count=2)
    ring = memories.ring(BLOCKS[:1])
    for _ in range(5):
        block_offset = ring.allocate()
        assert block_offset == 0x1000
        assert ring.allocate() is None
        ring.free(block_offset)


# --- Allocation ---


def test_an_allocation_reads_the_slot_of_its_ticket_and_consumes_it() -> None:
    memories = Memories()
    ring = memories.ring()
    assert ring.take_head_ticket() == 0
    assert memories.counters()[0] == 0x00000001_00000010
    assert ring.read_slot(0) == 0x1000
    assert memories.slot_contents()[0] == (0, 0x1000)
    ring.consume(0)
    assert memories.slot_contents()[0] == (0, EMPTY)
    assert ring.read_slot(0) is None
    assert ring.free_count == 3


def test_a_slot_of_another_turn_is_not_ready() -> None:
    ring = Memories().ring(BLOCKS[:3])
    assert ring.read_slot(3) is None  # empty
    assert ring.read_slot(4) is None  # holds a block, but for ticket 0


def test_blocks_are_handed_out_in_the_order_they_were_freed() -> None:
    ring = Memories().ring(first_ticket=2**32 - 1)
    assert [ring.allocate() for _ in range(5)] == [*BLOCKS, None]
    for block_offset in (0x3000, 0x1000):
        ring.free(block_offset)
    assert [ring.allocate() for _ in range(3)] == [0x3000, 0x1000, None]


def test_an_allocation_that_finds_no_block_takes_no_ticket() -> None:
    memories = Memories()
    ring = memories.ring(BLOCKS[:1])
    assert ring.allocate() == 0x1000
    before = memories.counters()
    assert ring.allocate() is None
    assert memories.counters() == before


def test_a_ticket_that_a_peer_was_faster_for_is_kept_for_the_next_allocation(monkeypatch: pytest.MonkeyPatch) -> None:
    """Draft 6.6: the peer's FetchAdd comes between the target's look at the slot and its own FetchAdd."""
    memories = Memories()
    ring = memories.ring(BLOCKS[:1])
    take_head_ticket = ring.take_head_ticket
    peers: list[int] = []

    def after_the_peer() -> int:
        if not peers:
            peers.append(take_head_ticket())
        return take_head_ticket()

    monkeypatch.setattr(ring, "take_head_ticket", after_the_peer)
    assert ring.allocate() is None
    assert ring.allocate() is None
    assert memories.counters()[0] >> 32 == 2  # one ticket of the peer's, one of the target's
    ring.consume(peers[0])
    ring.free(0x1000)
    assert ring.allocate() == 0x1000
    assert memories.counters()[0] >> 32 == 2


# --- Free ---


def test_a_free_writes_a_consumed_slot() -> None:
    memories = Memories()
    ring = memories.ring()
    for ticket in (ring.take_head_ticket(), ring.take_head_ticket()):
        ring.consume(ticket)
    assert ring.take_tail_ticket() == 4
    assert memories.counters()[1] == 0x00000005_00000010
    assert ring.publish(4, 0x2000)
    assert memories.slot_contents()[:2] == [(4, 0x2000), (1, EMPTY)]
    assert (ring.free_count, ring.deferred_count) == (3, 0)


def test_a_free_is_deferred_until_the_slot_is_consumed() -> None:
    memories = Memories()
    ring = memories.ring()
    slow, quick = ring.take_head_ticket(), ring.take_head_ticket()
    ring.consume(quick)
    ticket = ring.take_tail_ticket()
    assert not ring.publish(ticket, 0x2000)
    assert memories.slot_contents()[0] == (slow, 0x1000)
    assert (ring.free_count, ring.deferred_count) == (4, 1)
    ring.consume(slow)
    assert memories.slot_contents()[0] == (ticket, 0x2000)
    assert (ring.free_count, ring.deferred_count) == (3, 0)


class Watched:
    """Stands in for the slots' words and keeps every state of the memory between two stores."""

    def __init__(self, words: memoryview) -> None:
        self.words = words
        self.states: list[bytes] = []

    def __getitem__(self, index: int) -> int:
        value: int = self.words[index]
        return value

    def __setitem__(self, index: int, value: int) -> None:
        self.words[index] = value
        self.states.append(bytes(self.words))


def test_whoever_sees_the_new_sequence_sees_the_new_block_offset(monkeypatch: pytest.MonkeyPatch) -> None:
    ring = Memories().ring()
    assert ring.allocate() == 0x1000
    assert ring.allocate() == 0x2000
    watched = Watched(ring._slots)
    monkeypatch.setattr(ring, "_slots", watched)
    ring.free(0x2000)
    assert [struct.unpack(">IIQ", state[:16]) for state in watched.states] == [(0, 0, 0x2000), (4, 0, 0x2000)]


# --- profile 6.2: two deferred frees that meet on one slot ---


class ForgetsTheSequence(FreeBlockRing):
    """A free only looks whether the slot is empty, as the draft's letter has it."""

    def _is_due(self, ticket: int) -> bool:
        return self._slot(ticket)[1] == EMPTY


def two_frees_meet(ring: FreeBlockRing) -> tuple[bool, bool, int | None, int | None]:
    """Frees u = 4 and u = 8 hold Tail tickets for slot 0 while the allocation of ticket 0 has not read it.

    Then it consumes the slot, and the later free comes to write first. Returns what each publish said, later free
    first, and what the allocations of tickets 4 and 8 find.
    """
    slow = ring.take_head_ticket()
    held = [ring.allocate() for _ in range(3)]  # tickets 1 to 3
    assert None not in held
    first, *others = (block_offset for block_offset in held if block_offset is not None)
    earlier = ring.take_tail_ticket()  # 4
    for block_offset in others:  # 5 and 6
        ring.free(block_offset)
    waiting = ring.take_head_ticket()  # 4: its block is on its way
    again = [ring.allocate() for _ in range(2)]  # 5 and 6
    assert again == others
    ring.free(others[0])  # 7
    later = ring.take_tail_ticket()  # 8
    assert [slow, waiting, earlier, later] == [0, 4, 4, 8]
    ring.consume(slow)
    later_written = ring.publish(later, others[1])
    earlier_written = ring.publish(earlier, first)
    for_ticket_4 = ring.read_slot(waiting)
    if for_ticket_4 is not None:
        ring.consume(waiting)
    return later_written, earlier_written, for_ticket_4, ring.read_slot(later)


def test_the_later_of_two_frees_waits_for_the_earlier() -> None:
    ring = Memories().ring()
    assert two_frees_meet(ring) == (False, True, 0x2000, 0x4000)
    assert ring.deferred_count == 0


def test_without_the_second_condition_the_earlier_ticket_never_matches() -> None:
    """The scenario shows what it is for: the same steps on a ring without profile 6.2's second condition."""
    memories = Memories()
    ring = memories.ring(ring_class=ForgetsTheSequence)
    assert two_frees_meet(ring) == (True, False, None, 0x4000)
    # Even once ticket 8 has been consumed: slot 0 stays behind what is wanted of it.
    ring.consume(8)
    assert memories.slot_contents()[0] == (8, EMPTY)
    assert ring.deferred_count == 1


def test_two_frees_deferred_on_one_slot_are_written_one_turn_after_the_other() -> None:
    memories = Memories()
    ring = memories.ring()
    slow = ring.take_head_ticket()
    b, c, d = (ring.allocate() for _ in range(3))
    assert b and c and d
    ring.free(b)  # 4: deferred behind ticket 0
    ring.free(c)  # 5
    ring.free(d)  # 6
    waiting = ring.take_head_ticket()
    assert [ring.allocate() for _ in range(2)] == [c, d]
    ring.free(c)  # 7
    ring.free(d)  # 8: deferred behind ticket 4
    assert ring.deferred_count == 2
    ring.consume(slow)
    assert memories.slot_contents()[0] == (4, b)
    ring.consume(waiting)
    assert memories.slot_contents()[0] == (8, d)
    assert ring.deferred_count == 0


# --- Head is written by peers (profile 6.9, 8.10) ---


@pytest.mark.parametrize("form_of", [MaskedCounter, UnmaskedCounter])
def test_a_head_that_only_fetch_adds_moved_passes(form_of: Callable[[int], CounterForm]) -> None:
    ring = Memories().ring(form_of=form_of, first_ticket=2**32 - 2)
    heads = [ring.audit_head()]
    for _ in range(4):
        ring.take_head_ticket()
        heads.append(ring.audit_head())
    assert heads == [2**32 - 2, 2**32 - 1, 0, 1, 2]


@pytest.mark.parametrize(
    ("form_of", "head"),
    [
        pytest.param(MaskedCounter, 0x00000001_00000020, id="slot offset of another ticket"),
        pytest.param(MaskedCounter, 0x00000001_00000011, id="slot offset not a multiple of 16"),
        pytest.param(MaskedCounter, 0x00000001_00000050, id="filler bit n+4"),
        pytest.param(MaskedCounter, 0x00000001_80000010, id="filler bit 31"),
        pytest.param(MaskedCounter, 0x00000005_00000010, id="beyond Tail"),
        pytest.param(MaskedCounter, 0xFFFFFFFF_00000030, id="back before the first ticket"),
        pytest.param(MaskedCounter, 0x80000000_00000000, id="half a turn of tickets away"),
        pytest.param(UnmaskedCounter, 0x00000001_00000010, id="unmasked with a slot offset"),
        pytest.param(UnmaskedCounter, 0x00000005_00000000, id="unmasked beyond Tail"),
    ],
)
def test_any_other_head_ends_the_stream(form_of: Callable[[int], CounterForm], head: int) -> None:
    memories = Memories()
    ring = memories.ring(form_of=form_of)
    memories.set_head(head)
    with pytest.raises(PeerMisbehaved) as caught:
        ring.audit_head()
    assert caught.value.cause is TerminateCause.RDMAP_CATASTROPHIC_STREAM


@pytest.mark.parametrize("head", [2**64 - 1, 0xFFFFFFFF_FFFFFFF0, 0x12345678_9ABCDEF0])
def test_no_head_leads_the_target_outside_the_ring(head: int) -> None:
    memories = Memories()
    ring = memories.ring()
    memories.set_head(head)
    assert ring.allocate() is None
    assert ring.read_slot(ring.take_head_ticket()) is None
    assert memories.slot_contents() == list(enumerate(BLOCKS))


# --- the caller's mistakes ---


def test_steps_out_of_turn_are_refused() -> None:
    ring = Memories().ring(BLOCKS[:3])
    with pytest.raises(ApiMisuse, match="holds no block"):
        ring.consume(3)
    with pytest.raises(ApiMisuse, match="not taken from Tail"):
        ring.publish(3, 0x1000)
    ticket = ring.take_tail_ticket()
    for not_taken in (0x1000, 0x4000):
        with pytest.raises(ApiMisuse, match="not taken from this ring"):
            ring.publish(ticket, not_taken)
    assert ring.allocate() == 0x1000
    assert ring.publish(ticket, 0x1000)
    with pytest.raises(ApiMisuse, match="published already"):
        ring.publish(ticket, 0x1000)
    with pytest.raises(ApiMisuse, match="not taken from this ring"):
        ring.free(0x1000)


@pytest.mark.parametrize(
    ("blocks", "words"),
    [
        ([], "0 blocks"),
        ([64, 128, 192, 256, 320], "5 blocks: 1 to 4"),
        ([64, 64], "each block once"),
        ([64, EMPTY], "not all ones"),
        ([-64], "64 bits"),
    ],
)
def test_blocks_that_do_not_fit_the_ring(blocks: list[int], words: str) -> None:
    with pytest.raises(ApiMisuse, match=words):
        Memories().ring(blocks)


def test_memory_and_numbers_that_do_not_fit() -> None:
    slots, head, tail = bytearray(64), bytearray(8), bytearray(8)
    form = MaskedCounter(2)
    with pytest.raises(ApiMisuse, match="ring order 0"):
        FreeBlockRing(slots, head, tail, 0, [64], form)
    with pytest.raises(ApiMisuse, match="order 2 on a ring of order 1"):
        FreeBlockRing(slots, head, tail, 1, [64], form)
    with pytest.raises(ApiMisuse, match="first ticket"):
        FreeBlockRing(slots, head, tail, 2, [64], form, first_ticket=2**32)
    with pytest.raises(ApiMisuse, match="ring slots: 64 octets"):
        FreeBlockRing(bytearray(48), head, tail, 2, [64], form)
    with pytest.raises(ApiMisuse, match="Head: 8 octets"):
        FreeBlockRing(slots, bytearray(16), tail, 2, [64], form)
    with pytest.raises(ApiMisuse, match="Tail: memory aligned"):
        FreeBlockRing(slots, head, memoryview(bytearray(16))[4:12], 2, [64], form)
