"""The free-block ring (draft 3.3): unallocated blocks in the order in which they are handed out.

     0                   1                   2                   3
     0 1 2 3 4 5 6 7 8 9 0 1 2 3 4 5 6 7 8 9 0 1 2 3 4 5 6 7 8 9 0 1
    +---------------------------------------------------------------+
    |                       Sequence (Ticket)                       |  written after the Block Offset
    +---------------------------------------------------------------+
    |                           Reserved                            |
    +---------------------------------------------------------------+
    |                     Block Offset (64 bits)                    |  all ones: consumed
    |                                                               |
    +---------------------------------------------------------------+

Allocation and free are each a few *steps*, and the steps of many allocations and frees may interleave in any way:

    allocation   take_head_ticket -> t    read_slot(t), until it is there    consume(t)
    free         take_tail_ticket -> u    publish(u, block), deferred until the slot is consumed

A slot lives through this, N tickets a turn:

    {t, block}  --consume(t)-->  {t, all ones}  --publish(t + N)-->  {t + N, other block}
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from kbtp.atomics import fetch_add
from kbtp.blocks.counter import (
    TICKET_MASK,
    CounterForm,
    MaskedCounter,
    UnmaskedCounter,
    checked_order,
    ring_order_for,
)
from kbtp.blocks.memory import WORD_BYTES, Memory, network_word, words_of
from kbtp.errors import ApiMisuse, PeerMisbehaved
from kbtp.limits import BLOCK_OFFSET_EMPTY, COUNTER_BYTES, SLOT_BYTES
from kbtp.types import BlockOffset, TerminateCause, Ticket

__all__ = ["CounterForm", "FreeBlockRing", "MaskedCounter", "UnmaskedCounter", "ring_order_for"]

_SLOT_WORDS = SLOT_BYTES // WORD_BYTES
_AGE_MAX = TICKET_MASK // 2
"""How far before Head a ticket may be that was taken; one that is farther is ahead of Head."""


class FreeBlockRing:
    """A ring of 2^order slots over `block_offsets`, its F blocks, all free at first.

    `slots_memory` is 16 octets a slot; `head_memory` and `tail_memory` are 8 octets each, native integers; all writable
    and aligned to 8. One owner calls the methods. A peer of a direct mode may read the slots and advance Head with its
    own FetchAdds (draft 6.6): then Head is checked by `audit_head` at every look and no address comes from it
    (profile 6.9), and the owner calls `take_head_ticket` and `allocate` where no atomic of the RNIC can come between.
    What the peer has taken is `unbound_count` tickets; `outstanding_tickets` are those of them whose block is there.

    `first_ticket` is Head's first Ticket: 0 (draft 3.3), or near 2^32 to see tickets wrap.

    Raises `ApiMisuse` for memory or numbers that do not fit; so does every step that its caller takes out of turn.
    """

    def __init__(
        self,
        slots_memory: Memory,
        head_memory: Memory,
        tail_memory: Memory,
        order: int,
        block_offsets: Sequence[BlockOffset],
        counter_form: CounterForm,
        first_ticket: Ticket = 0,
    ) -> None:
        self.order = checked_order(order)
        self.slot_count = 1 << order
        if counter_form.order != order:
            raise ApiMisuse(f"counters of order {counter_form.order} on a ring of order {order}")
        if not 1 <= len(block_offsets) <= self.slot_count:
            raise ApiMisuse(f"{len(block_offsets)} blocks: 1 to {self.slot_count} expected on a ring of order {order}")
        if len(set(block_offsets)) != len(block_offsets):
            raise ApiMisuse("block offsets: each block once expected")
        if not all(0 <= block_offset < BLOCK_OFFSET_EMPTY for block_offset in block_offsets):
            raise ApiMisuse("block offsets: 64 bits, not all ones, expected")
        if not 0 <= first_ticket <= TICKET_MASK:
            raise ApiMisuse(f"first ticket {first_ticket}: 32 bits expected")
        self.block_offsets = frozenset(block_offsets)
        self.counter_form = counter_form
        self._slots = words_of(slots_memory, "ring slots", SLOT_BYTES * self.slot_count)
        self._head = words_of(head_memory, "Head", COUNTER_BYTES)
        self._tail = words_of(tail_memory, "Tail", COUNTER_BYTES)
        self._available = len(block_offsets)
        self._taken: set[BlockOffset] = set()
        self._unpublished: set[Ticket] = set()
        self._deferred: dict[Ticket, BlockOffset] = {}
        self._ticket_in_hand: Ticket | None = None
        self._audited = first_ticket
        """Every ticket before it has been taken; Head was there once, by rule."""
        self._not_consumed_from = first_ticket
        """Head's Ticket, were each ticket that was taken also consumed: first_ticket + how many have been consumed."""
        self._initialize(block_offsets, first_ticket)

    def _initialize(self, block_offsets: Sequence[BlockOffset], first_ticket: Ticket) -> None:
        """Draft 3.3 Initialization, for any first ticket: "slot s" is the slot of ticket first_ticket + s."""
        s = np.arange(self.slot_count, dtype=np.int64)
        slots = np.frombuffer(self._slots, dtype=">u8").reshape(self.slot_count, _SLOT_WORDS)
        tickets = (first_ticket + s) & TICKET_MASK
        sequences = np.where(s < len(block_offsets), tickets, tickets - self.slot_count) & TICKET_MASK
        contents = np.full(self.slot_count, BLOCK_OFFSET_EMPTY, dtype=np.uint64)
        contents[: len(block_offsets)] = np.array(block_offsets, dtype=np.uint64)
        index = tickets & (self.slot_count - 1)
        slots[index, 0] = sequences.astype(np.uint64) << np.uint64(32)
        slots[index, 1] = contents
        self._head[0] = self.counter_form.encode(first_ticket)
        self._tail[0] = self.counter_form.encode((first_ticket + len(block_offsets)) & TICKET_MASK)

    # --- the steps of an allocation ---

    def take_head_ticket(self) -> Ticket:
        """FetchAdd on Head: the turn of this allocation. Its block may not be there yet."""
        return self._fetch_add(self._head)

    def read_slot(self, ticket: Ticket) -> BlockOffset | None:
        """The block for `ticket`: once its slot's Sequence equals the ticket and its Block Offset is not all ones.

        None until then; the allocator reads again.
        """
        sequence, block_offset = self._slot(ticket)
        return block_offset if sequence == ticket and block_offset != BLOCK_OFFSET_EMPTY else None

    def consume(self, ticket: Ticket) -> None:
        """Mark the slot consumed, its block taken: all ones into its Block Offset. Writes the free deferred for it."""
        block_offset = self.read_slot(ticket)
        if block_offset is None:
            raise ApiMisuse(f"the slot of ticket {ticket} holds no block for it")
        self._slots[self._index(ticket) + 1] = BLOCK_OFFSET_EMPTY
        self._taken.add(block_offset)
        self._available -= 1
        self._not_consumed_from = (self._not_consumed_from + 1) & TICKET_MASK
        if self._may_be_head((ticket + 1) & TICKET_MASK):
            self._audited = (ticket + 1) & TICKET_MASK
        self._retry_deferred(ticket)

    # --- the steps of a free ---

    def take_tail_ticket(self) -> Ticket:
        """FetchAdd on Tail: the turn of this free. `publish` must follow, at any time."""
        ticket = self._fetch_add(self._tail)
        self._unpublished.add(ticket)
        return ticket

    def publish(self, ticket: Ticket, block_offset: BlockOffset) -> bool:
        """Return a taken block under a Tail ticket. False: its slot is not due yet, and the write is deferred."""
        if ticket not in self._unpublished:
            raise ApiMisuse(f"ticket {ticket} was not taken from Tail, or is published already")
        if block_offset not in self._taken:
            raise ApiMisuse(f"block offset {block_offset:#x} was not taken from this ring")
        self._unpublished.remove(ticket)
        self._taken.remove(block_offset)
        self._available += 1
        if self._is_due(ticket):
            self._write_slot(ticket, block_offset)
            return True
        self._deferred[ticket] = block_offset
        return False

    def _is_due(self, ticket: Ticket) -> bool:
        """Whether the slot is consumed *and* its turn before this one is the last it had (profile 6.2).

        Without the second condition a later free could be written before an earlier one that waits for the same slot,
        and the earlier ticket would never match.
        """
        sequence, block_offset = self._slot(ticket)
        return block_offset == BLOCK_OFFSET_EMPTY and sequence == (ticket - self.slot_count) & TICKET_MASK

    def _write_slot(self, ticket: Ticket, block_offset: BlockOffset) -> None:
        i = self._index(ticket)
        # Draft 3.3: whoever sees this Sequence must see this Block Offset.
        self._slots[i + 1] = network_word(block_offset)
        self._slots[i] = network_word(ticket << 32)

    def _retry_deferred(self, consumed: Ticket) -> None:
        """Of all frees deferred on this slot, only the one of its next turn can be due."""
        ticket = (consumed + self.slot_count) & TICKET_MASK
        if ticket in self._deferred:
            self._write_slot(ticket, self._deferred.pop(ticket))

    # --- whole allocations and frees, executed by the target ---

    def allocate(self) -> BlockOffset | None:
        """Take the next block, or None while its slot is not ready.

        No ticket is taken then, for nobody would come back for it. Should a peer's FetchAdd come between the look at
        the slot and the FetchAdd here, the ticket is kept and used by the next call.
        """
        ticket = self._ticket_in_hand
        if ticket is None:
            if self.read_slot(self.counter_form.ticket_of(self._head[0])) is None:
                return None
            ticket = self._ticket_in_hand = self.take_head_ticket()
        block_offset = self.read_slot(ticket)
        if block_offset is not None:
            self._ticket_in_hand = None
            self.consume(ticket)
        return block_offset

    def free(self, block_offset: BlockOffset) -> None:
        """Return a taken block. The free is complete even if its slot is written later (profile 6.2)."""
        self.publish(self.take_tail_ticket(), block_offset)

    # --- what there is to see ---

    @property
    def free_count(self) -> int:
        """Blocks in the ring: in slots not yet consumed, or deferred."""
        return self._available

    @property
    def deferred_count(self) -> int:
        """Of these, blocks whose slot write is deferred."""
        return len(self._deferred)

    @property
    def slots(self) -> memoryview:
        """The octets of the slots, for a peer to read (draft 6.6)."""
        return self._slots.cast("B")

    @property
    def head(self) -> memoryview:
        """The 8 octets of Head, for a peer to FetchAdd (draft 6.6)."""
        return self._head.cast("B")

    def audit_head(self) -> Ticket:
        """Head's next Ticket, after a look at whether its peer kept the rules (profile 6.9, 8.10).

        Raises `PeerMisbehaved` (Terminate 0/2/07) if no FetchAdds could have made the value, if more tickets were taken
        than blocks were ever offered, or if Head went back.
        """
        value: int = self._head[0]
        ticket = self.counter_form.ticket_of(value)
        if not self.counter_form.well_formed(value):
            raise PeerMisbehaved(
                TerminateCause.RDMAP_CATASTROPHIC_STREAM,
                f"Head is {value:#018x}, {self.counter_form.encode(ticket):#018x} expected for ticket {ticket}",
            )
        if not self._may_be_head(ticket):
            raise PeerMisbehaved(
                TerminateCause.RDMAP_CATASTROPHIC_STREAM,
                f"Head is at ticket {ticket}, not between {self._audited} and Tail's {self._tail_ticket()}",
            )
        self._audited = ticket
        return ticket

    def restore_head(self) -> None:
        """Where a peer can move Head no more: back to the last Ticket that was by rule, if it is not by rule now."""
        try:
            self.audit_head()
        except PeerMisbehaved:
            self._head[0] = self.counter_form.encode(self._audited)

    @property
    def unbound_count(self) -> int:
        """Tickets taken by a peer and not consumed (draft 3.4). Nobody's number if Head is not by rule."""
        in_hand = self._ticket_in_hand is not None
        return (self.counter_form.ticket_of(self._head[0]) - self._not_consumed_from - in_hand) & TICKET_MASK

    def is_outstanding(self, ticket: Ticket) -> bool:
        """Whether a peer has taken `ticket` and its block lies in its slot. Audits Head, and raises as that does."""
        age = (self.audit_head() - ticket) & TICKET_MASK
        return 0 < age <= _AGE_MAX and ticket != self._ticket_in_hand and self.read_slot(ticket) is not None

    def outstanding_tickets(self) -> list[Ticket]:
        """All that `is_outstanding` holds for, oldest first."""
        head_ticket = self.audit_head()
        if not self.unbound_count:
            return []
        slots = np.frombuffer(self._slots, dtype=">u8").reshape(self.slot_count, _SLOT_WORDS)
        written = (slots[slots[:, 1] != np.uint64(BLOCK_OFFSET_EMPTY), 0] >> np.uint64(32)).astype(np.int64)
        ages = (head_ticket - written) & TICKET_MASK
        ages = np.sort(ages[(ages > 0) & (ages <= _AGE_MAX)])[::-1]
        tickets = [(head_ticket - int(age)) & TICKET_MASK for age in ages]
        return [ticket for ticket in tickets if ticket != self._ticket_in_hand]

    def _may_be_head(self, ticket: Ticket) -> bool:
        """Whether FetchAdds can have taken Head from where it was to `ticket`: not back, and not beyond Tail."""
        return (ticket - self._audited) & TICKET_MASK <= (self._tail_ticket() - self._audited) & TICKET_MASK

    def _tail_ticket(self) -> Ticket:
        return self.counter_form.ticket_of(self._tail[0])

    def _slot(self, ticket: Ticket) -> tuple[Ticket, BlockOffset]:
        """Sequence and Block Offset of the slot of `ticket`; the address comes from the ticket, not from a counter."""
        i = self._index(ticket)
        return network_word(self._slots[i]) >> 32, network_word(self._slots[i + 1])

    def _index(self, ticket: Ticket) -> int:
        """Of the slot's Sequence word; the Block Offset follows."""
        return _SLOT_WORDS * (ticket & (self.slot_count - 1))

    def _fetch_add(self, counter: memoryview) -> Ticket:
        old: int = counter[0]
        counter[0] = fetch_add(old, self.counter_form.add_data, self.counter_form.add_mask)
        return self.counter_form.ticket_of(old)
