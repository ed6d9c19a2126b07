"""Direct Allocation (draft 6.6, profile 6.11): ticket, slot, RDMA Write, BIND. No I/O, no clock.

    FetchAdd on Head -> ticket    the slot, until it holds a block for the ticket    the slot once more, to confirm
    RDMA Write, BIND -> bound; refused: BIND to a spare handle, FREE, and the block is back

A ticket that runs out ends direct allocation in the session: the target takes back what the ticket stands for, and
nothing may be written there any more.
"""

from __future__ import annotations

from kbtp.errors import PeerMisbehaved, TicketAbandoned
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
from kbtp.initiator.operations import Result, TakenBlock
from kbtp.limits import DIRECT_SLOT_WAIT_MAX_S, DIRECT_SLOT_WAIT_S
from kbtp.types import BlockOffset, Handle, Status, TerminateCause, Ticket
from kbtp.wire.layouts import RING_SLOT


class DirectAlloc:
    """One allocation of a block for `length_bytes` under `handle`; None: under one of the session's choice."""

    def __init__(self, terms: DirectTerms, handle: Handle | None, length_bytes: int) -> None:
        self._terms = terms
        self._handle = handle
        self._length_bytes = length_bytes
        self._counter = terms.counter()
        self._ticket: Ticket | None = None
        self._slot_to = 0
        self._seen: BlockOffset | None = None
        self._wait_s = DIRECT_SLOT_WAIT_S
        self._refusal: Result | None = None
        self.deadline_s: float | None = None
        """When the ticket runs out, counted from before its FetchAdd; None before that."""

    def ran_out(self, now_s: float) -> bool:
        return self.deadline_s is not None and now_s >= self.deadline_s

    def begin(self) -> Step:
        """What is known to be refused takes no ticket: ALLOC_STORE says with which status (profile 1)."""
        ack = self._terms.ack
        outside = self._handle is not None and not self._terms.owns(self._handle)
        if outside or self._length_bytes > ack.block_size:
            return UseRequest()
        return TakeTicket(ack.head_stag, ack.head_offset, self._counter.add_data, self._counter.add_mask)

    def posted(self, now_s: float) -> None:
        if self.deadline_s is None:
            self.deadline_s = now_s + self._terms.ticket_timeout_s

    def completed(self, octets: bytes, value: int, now_s: float) -> Step:
        return self._ticket_taken(value) if self._ticket is None else self._slot_read(octets, now_s)

    def _ticket_taken(self, head: int) -> Step:
        if not self._counter.well_formed(head):
            raise PeerMisbehaved(
                TerminateCause.RDMAP_UNSPECIFIED, f"Head was {head:#018x}, which no FetchAdd can have made"
            )
        self._ticket = self._counter.ticket_of(head)
        self._slot_to = self._terms.ack.ring_offset + self._counter.slot_offset_of(head)
        return self.waited()

    def _slot_read(self, octets: bytes, now_s: float) -> Step:
        sequence, block_offset = RING_SLOT.unpack_from(octets)
        # All ones is no block of any pool; nor is what a read saw that was not atomic, unless it is seen twice.
        before, self._seen = self._seen, None
        if sequence == self._ticket and self._terms.holds(block_offset):
            if block_offset == before:
                return BindTaken(TakenBlock(sequence, block_offset))
            self._seen = block_offset
            if before is None:
                return self.waited()
        wait_s, self._wait_s = self._wait_s, min(2 * self._wait_s, DIRECT_SLOT_WAIT_MAX_S)
        return Wait(now_s + wait_s)

    def waited(self) -> Step:
        return ReadStructure(self._terms.ack.ring_stag, self._slot_to)

    # --- BIND ----------------------------------------------------------------------------------

    def answered(self, result: Result, taken: TakenBlock) -> Step:
        """`result` is what became of BIND; no status if it was not sent: its ticket ran out, or its data is lost."""
        if self._refusal is not None:
            if result.ok:
                return FreeSpare(result.handle, result.generation)
            return Ended(self._refusal, direct_alloc_is_over=True)
        if result.ok:
            return Ended(result)
        if isinstance(result.error, TicketAbandoned) or result.status is Status.TICKET_ABANDONED:
            return UseRequest(direct_alloc_is_over=True)
        if result.status is Status.TICKET_MISMATCH:
            return Ended(result, direct_alloc_is_over=True)
        self._refusal = result
        return BindSpare(taken)

    def freed(self) -> Step:
        """The ticket was given back; what BIND was refused with is the answer."""
        assert self._refusal is not None
        return Ended(self._refusal)
