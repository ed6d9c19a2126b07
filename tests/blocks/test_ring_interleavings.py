"""No block is lost or handed out twice, for any interleaving of the steps (draft 3.3).

Allocations that have a ticket but have not read, that have read but not consumed, and frees that have a Tail ticket but
have not written wait for as long as they like, on a ring of four whose tickets may be about to wrap. The model counts
turns with integers that do not wrap; turn k has ticket (first ticket + k) mod 2^32.

The same machine is then run against rings with one fault each, and must find it.
"""

from __future__ import annotations

import struct
import sys
from typing import ClassVar

import pytest
from hypothesis import Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from kbtp.atomics import fetch_add
from kbtp.blocks import FreeBlockRing, MaskedCounter, UnmaskedCounter
from kbtp.errors import ApiMisuse

N = 4
EMPTY = 2**64 - 1
BLOCKS = [0x1000, 0x2000, 0x3000, 0x4000]
FIRST_TICKETS = [0, 2**32 - 1, 2**32 - 2, 2**32 - 3, 2**32 - 5, 2**32 - 9, 2**31 - 2]


class Interleavings(RuleBasedStateMachine):
    ring_class: ClassVar[type[FreeBlockRing]] = FreeBlockRing

    @initialize(f=st.sampled_from([4, 3, 1]), first=st.sampled_from(FIRST_TICKETS), masked=st.booleans())
    def start(self, f: int, first: int, masked: bool) -> None:
        self.slots, self.head, self.tail = bytearray(16 * N), bytearray(8), bytearray(8)
        self.first, self.masked, self.blocks = first, masked, BLOCKS[:f]
        form = MaskedCounter(2) if masked else UnmaskedCounter(2)
        self.ring = self.ring_class(self.slots, self.head, self.tail, 2, self.blocks, form, first)
        self.next_head, self.next_tail = 0, f
        self.promised = dict(enumerate(self.blocks))  # turn -> the block that its allocation must get
        self.published = set(range(f))
        self.consumed = set(range(-N, 0))
        self.asked: set[int] = set()  # turns of allocations that have a ticket and have read nothing yet
        self.read: set[int] = set()  # turns of allocations that have read their block
        self.freeing: set[int] = set()  # turns of frees that have a ticket and have written nothing yet
        self.held: set[int] = set()  # blocks allocated

    # --- the model's view ---

    def ticket(self, turn: int) -> int:
        return (self.first + turn) % 2**32

    def ready(self, turn: int) -> bool:
        """Whether the turn's block must be in its slot now."""
        return turn in self.published and turn not in self.consumed and turn - N in self.consumed

    def deferred(self) -> set[int]:
        return {turn for turn in self.published - self.consumed if not self.ready(turn)}

    def counter(self, turn: int) -> int:
        return self.ticket(turn) << 32 | (16 * (self.ticket(turn) % N) if self.masked else 0)

    # --- the steps ---

    @precondition(lambda self: self.next_head <= self.next_tail)
    @rule(by_peer=st.booleans())
    def take_head_ticket(self, by_peer: bool) -> None:
        """By the target, or with draft 3.3's (or 9.2's) FetchAdd by a peer on the octets of Head."""
        if by_peer:
            old = int.from_bytes(self.head, sys.byteorder)
            data, mask = (0x0000000100000010, 1 << 63 | 1 << 31 | 1 << 5) if self.masked else (1 << 32, 0)
            self.head[:] = fetch_add(old, data, mask).to_bytes(8, sys.byteorder)
            ticket = old >> 32
        else:
            ticket = self.ring.take_head_ticket()
        assert ticket == self.ticket(self.next_head)
        self.asked.add(self.next_head)
        self.next_head += 1

    @precondition(lambda self: self.asked)
    @rule(data=st.data())
    def read_slot(self, data: st.DataObject) -> None:
        turn = data.draw(st.sampled_from(sorted(self.asked)))
        block = self.ring.read_slot(self.ticket(turn))
        assert block == (self.promised[turn] if self.ready(turn) else None)
        if block is not None:
            self.asked.remove(turn)
            self.read.add(turn)

    @precondition(lambda self: self.read)
    @rule(data=st.data())
    def consume(self, data: st.DataObject) -> None:
        turn = data.draw(st.sampled_from(sorted(self.read)))
        self.ring.consume(self.ticket(turn))
        self.read.remove(turn)
        self.consumed.add(turn)
        self.held.add(self.promised[turn])

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def take_tail_ticket(self, data: st.DataObject) -> None:
        block = data.draw(st.sampled_from(sorted(self.held)))
        assert self.ring.take_tail_ticket() == self.ticket(self.next_tail)
        self.held.remove(block)
        self.promised[self.next_tail] = block
        self.freeing.add(self.next_tail)
        self.next_tail += 1

    @precondition(lambda self: self.freeing)
    @rule(data=st.data())
    def publish(self, data: st.DataObject) -> None:
        turn = data.draw(st.sampled_from(sorted(self.freeing)))
        written = self.ring.publish(self.ticket(turn), self.promised[turn])
        self.freeing.remove(turn)
        self.published.add(turn)
        assert written == self.ready(turn)

    @rule()
    def allocate(self) -> None:
        """The whole allocation: a block if its turn's is there, else nothing, and no ticket taken."""
        turn = self.next_head
        block = self.ring.allocate()
        if not self.ready(turn):
            assert block is None
            return
        assert block == self.promised[turn]
        self.next_head += 1
        self.consumed.add(turn)
        self.held.add(block)

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def free(self, data: st.DataObject) -> None:
        self._free(data.draw(st.sampled_from(sorted(self.held))))

    @rule(times=st.integers(1, 2 * N))
    def others_allocate_and_free(self, times: int) -> None:
        """Whoever has a step under way stays behind while the ring goes round."""
        for _ in range(times):
            turn = self.next_head
            self.allocate()
            if turn == self.next_head:
                break
            self._free(self.promised[turn])

    def _free(self, block: int) -> None:
        self.ring.free(block)
        self.held.remove(block)
        self.promised[self.next_tail] = block
        self.published.add(self.next_tail)
        self.next_tail += 1

    # --- what must hold after every step ---

    @invariant()
    def every_block_is_in_exactly_one_place(self) -> None:
        in_slots = [block for _, _, block in struct.iter_unpack(">IIQ", self.slots) if block != EMPTY]
        elsewhere = [self.promised[turn] for turn in self.freeing | self.deferred()]
        assert sorted([*in_slots, *elsewhere, *self.held]) == self.blocks
        assert self.ring.free_count == len(in_slots) + len(self.deferred())
        assert self.ring.deferred_count == len(self.deferred())

    @invariant()
    def no_slot_is_overwritten_before_it_is_consumed(self) -> None:
        slots = list(struct.iter_unpack(">IIQ", self.slots))
        for turn in filter(self.ready, self.published):
            assert slots[self.ticket(turn) % N] == (self.ticket(turn), 0, self.promised[turn])

    @invariant()
    def counters_move_by_fetch_add_alone(self) -> None:
        assert int.from_bytes(self.head, sys.byteorder) == self.counter(self.next_head)
        assert int.from_bytes(self.tail, sys.byteorder) == self.counter(self.next_tail)

    def teardown(self) -> None:
        """Nobody waits for ever: once every step under way is done, every ticket has got its block."""
        if not hasattr(self, "ring"):
            return
        for turn in sorted(self.freeing, reverse=True):
            self.ring.publish(self.ticket(turn), self.promised[turn])
            self.published.add(turn)
        self.freeing.clear()
        while self.asked or self.read:
            served = [turn for turn in self.asked | self.read if self.ready(turn)]
            assert served or self.held, "every allocation waits and nothing is left to free"
            for turn in served:
                assert self.ring.read_slot(self.ticket(turn)) == self.promised[turn]
                self.ring.consume(self.ticket(turn))
                self.consumed.add(turn)
                self.held.add(self.promised[turn])
            self.asked.difference_update(served)
            self.read.difference_update(served)
            if not served:
                self._free(min(self.held))
        rest = [self.ring.allocate() for _ in range(len(self.blocks) - len(self.held))]
        assert None not in rest
        assert {*rest, *self.held} == set(self.blocks)
        assert self.ring.allocate() is None


TestInterleavings = Interleavings.TestCase
TestInterleavings.settings = settings(TestInterleavings.settings, max_examples=150, stateful_step_count=50)


# --- rings with one fault each ---


class OverwritesAnUnconsumedSlot(FreeBlockRing):
    def _is_due(self, ticket: int) -> bool:
        return self._slot(ticket)[0] == (ticket - self.slot_count) % 2**32


class LetsALaterFreePassAnEarlierOne(FreeBlockRing):
    """Without profile 6.2's second condition, whether a slot is found empty at once or on a retry."""

    def _is_due(self, ticket: int) -> bool:
        return self._slot(ticket)[1] == EMPTY

    def _retry_deferred(self, consumed: int) -> None:
        same_slot = [ticket for ticket in self._deferred if (ticket - consumed) % self.slot_count == 0]
        if same_slot:
            self._write_slot(same_slot[-1], self._deferred.pop(same_slot[-1]))


class NeverRetriesADeferredFree(FreeBlockRing):
    def _retry_deferred(self, consumed: int) -> None:
        pass


class ForgetsThatTicketsWrap(FreeBlockRing):
    def _is_due(self, ticket: int) -> bool:
        sequence, block_offset = self._slot(ticket)
        return block_offset == EMPTY and sequence == ticket - self.slot_count


class LeavesTheSlotUnconsumed(FreeBlockRing):
    def consume(self, ticket: int) -> None:
        before = bytes(self._slots)
        super().consume(ticket)
        self._slots.cast("B")[:] = before


class TakesATicketForNothing(FreeBlockRing):
    def allocate(self) -> int | None:
        ticket = self.take_head_ticket()
        block_offset = self.read_slot(ticket)
        if block_offset is not None:
            self.consume(ticket)
        return block_offset


class AddsWithoutTheMask(FreeBlockRing):
    def _fetch_add(self, counter: memoryview) -> int:
        old: int = counter[0]
        counter[0] = (old + self.counter_form.add_data) % 2**64
        return old >> 32


@pytest.mark.untraced
@pytest.mark.parametrize(
    "faulty",
    [
        OverwritesAnUnconsumedSlot,
        LetsALaterFreePassAnEarlierOne,
        NeverRetriesADeferredFree,
        ForgetsThatTicketsWrap,
        LeavesTheSlotUnconsumed,
        TakesATicketForNothing,
        AddsWithoutTheMask,
    ],
)
def test_the_machine_finds_a_faulty_ring(faulty: type[FreeBlockRing]) -> None:
    class Faulty(Interleavings):
        ring_class = faulty

    search = settings(
        TestInterleavings.settings,
        max_examples=2000,
        derandomize=True,
        database=None,
        phases=[Phase.generate],
        print_blob=False,
        report_multiple_bugs=False,
    )
    # Once a check has failed, the machine's last steps may also meet the ring's own guards.
    with pytest.raises((AssertionError, ApiMisuse)):
        run_state_machine_as_test(Faulty, settings=search)
