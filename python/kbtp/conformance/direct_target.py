"""A target by hand that grants direct modes: table, pool, ring and Head in memory that a case can change under way."""

from __future__ import annotations

import struct
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias

from kbtp.atomics import fetch_add
from kbtp.conformance import segments
from kbtp.conformance.deviation import Deviation, expect
from kbtp.conformance.memory import Lent
from kbtp.conformance.stream import Message, Stream
from kbtp.conformance.target_side import FIRST_HANDLE, Entry, Request, TargetSide
from kbtp.iwarp.rdmap import (
    QN_ATOMIC_RESPONSE,
    AtomicOperation,
    AtomicRequest,
    AtomicResponse,
    RdmapOpcode,
    ReadRequest,
)
from kbtp.keys import Key
from kbtp.limits import BLOCK_OFFSET_EMPTY, COUNTER_BYTES, ENTRY_BYTES, SLOT_BYTES
from kbtp.types import EntryFlag, Feature, RequestFlag, Status
from kbtp.wire import AllocStore, Bind, Completion

BLOCKS = 8
OWN_BLOCKS = 8
BLOCK_BYTES = 1 << 18
ORDER = 3
POOL_BASE = 1 << 20
TICKET_TIMEOUT_MS = 30_000
ENTRY = struct.Struct(">HHIQ")
SLOT = struct.Struct(">IIQ")
ADD_DATA = 0x0000_0001_0000_0010
ADD_MASK = 1 << 63 | 1 << 31 | 1 << (ORDER + 3)


Shown: TypeAlias = tuple[int, int, int, int]
"""Flags, Generation, Data Length and Block Offset."""


@dataclass(frozen=True, slots=True)
class Step:
    """One thing that the initiator did: a Read of table, pool or ring, a FetchAdd, a Write of a block."""

    what: str
    at: int
    """Handle, Block Offset or ticket."""


def _right(flags: int, generation: int, length: int, block_offset: int) -> Shown:
    return flags, generation, length, block_offset


class DirectTarget(TargetSide):
    """`steps` are what the initiator did so far, messages apart. `before_read` may change memory before a Read of it is
    answered, or take its time; it is handed the step. So may `before_atomic` before a FetchAdd.

    Where an RNIC carries the stream it answers Reads and FetchAdds by itself: there are no steps then, and what the
    initiator did is in Head, in the pool and in its requests. `shows` says what the table has instead of a right entry.
    """

    def __init__(
        self, stream: Stream, key: Key | None, *, ticket_timeout_ms: int = TICKET_TIMEOUT_MS, own_blocks: int = 0
    ) -> None:
        """With `own_blocks` behind the partition ALLOC_STORE takes no tickets: only an RNIC's FetchAdds on Head are
        atomic with each other."""
        super().__init__(stream, key)
        lend = stream.memory.lend
        self.blocks_in_all = BLOCKS + own_blocks
        self.entries = lend(ENTRY_BYTES * 64, writable=False, to=0x5000)
        self.pool = lend(self.blocks_in_all * BLOCK_BYTES, writable=False, to=POOL_BASE)
        self.partition = stream.memory.lend_again(self.pool, readable=False)
        self.slots = lend(SLOT_BYTES << ORDER, writable=False, to=0x6000)
        self.head = lend(COUNTER_BYTES, readable=False, writable=False, atomic=True, to=0x7000)
        self.own = [self.pool.to + block * BLOCK_BYTES for block in range(BLOCKS, self.blocks_in_all)]
        self.tail = BLOCKS
        self.ticket_timeout_ms = ticket_timeout_ms
        self.steps: list[Step] = []
        self.before_read: Callable[[Step], None] = lambda step: None
        self.before_atomic: Callable[[], None] = lambda: None
        self.shows: Callable[..., Shown] = _right
        self.requests: list[Request] = []
        self.blocks: dict[int, int] = {}
        for ticket in range(BLOCKS):
            self.put_slot(ticket, ticket, self.pool.to + ticket * BLOCK_BYTES)
        for handle in range(FIRST_HANDLE, FIRST_HANDLE + 64):
            self.put_entry(handle, 0, 1, 0, 0)

    def open(self, **changes: Any) -> DirectTarget:
        """HELLO and a HELLO_ACK that grants what was asked for."""
        features = self.take_hello().requested_features
        load = {
            "table_offset": self.entries.to,
            "table_stag": self.entries.stag,
            "pool_stag": self.pool.stag,
        }
        allocation = {
            "partition_stag": self.partition.stag,
            "ring_stag": self.slots.stag,
            "ring_offset": self.slots.to,
            "head_stag": self.head.stag,
            "head_offset": self.head.to,
            "ring_order": ORDER,
            "ticket_timeout_ms": self.ticket_timeout_ms,
        }
        self.acknowledge(
            **{
                "granted_features": features & ~Feature.RECORD_COMPLETION,
                "block_size": BLOCK_BYTES,
                "pool_blocks": self.blocks_in_all,
                "allocation_quota": BLOCKS,
                "pool_base": self.pool.to,
                "table_base_handle": FIRST_HANDLE,
                "table_handles": 64,
                "handle_count": 16,
                **(load if features & Feature.DIRECT_LOAD else {}),
                **(allocation if features & Feature.DIRECT_ALLOC else {}),
                **changes,
            }
        )
        return self

    # --- the structures ---

    def put_entry(self, handle: int, flags: int, generation: int, length: int, block_offset: int) -> None:
        at = ENTRY_BYTES * (handle - FIRST_HANDLE)
        _put_words(self.entries, at, ENTRY.pack(flags, generation, length, block_offset))

    def entry(self, handle: int) -> tuple[int, ...]:
        """As `Shown`."""
        return ENTRY.unpack_from(self.entries.octets, ENTRY_BYTES * (handle - FIRST_HANDLE))

    def put_slot(self, ticket: int, sequence: int, block_offset: int) -> None:
        _put_words(self.slots, SLOT_BYTES * (ticket % (1 << ORDER)), SLOT.pack(sequence & 0xFFFF_FFFF, 0, block_offset))

    def slot(self, ticket: int) -> tuple[int, ...]:
        """Sequence, reserved and Block Offset."""
        return SLOT.unpack_from(self.slots.octets, SLOT_BYTES * (ticket % (1 << ORDER)))

    @property
    def tickets_taken(self) -> int:
        """The Ticket of Head, whose octets are in this machine's order (draft 3.3)."""
        return int.from_bytes(self.head.octets, sys.byteorder) >> 32

    def block(self, block_offset: int) -> bytes:
        start = block_offset - self.pool.to
        return bytes(self.pool.octets[start : start + BLOCK_BYTES])

    # --- the initiator's steps ---

    def next_step(self) -> Step | Request | None:
        """The initiator's next step, which is served, or its next request, which is not; None when it has closed."""
        message = self.stream.message("a step of the initiator, or the end of the connection")
        if message is None:
            return None
        if message.opcode is RdmapOpcode.READ_REQUEST:
            return self._read(ReadRequest.parse(message.payload))
        if message.opcode is RdmapOpcode.ATOMIC_REQUEST:
            return self._atomic(AtomicRequest.parse(message.payload))
        if message.opcode is RdmapOpcode.WRITE:
            self.stream.memory.write(message.stag, message.to, message.payload)
            return self._did(Step("write", message.to))
        return self._request_in(message)

    def _request_in(self, message: Message) -> Request:
        request: Request = self._parse(message)
        self.requests.append(request)
        return request

    def _read(self, request: ReadRequest) -> Step:
        places: dict[int, tuple[str, Lent]] = {
            self.entries.stag: ("entry", self.entries),
            self.slots.stag: ("slot", self.slots),
            self.pool.stag: ("block", self.pool),
        }
        if request.source_stag not in places:
            raise Deviation("a Read through Table, Pool or Ring STag", f"one of {request.source_stag:#x}")
        what, lent = places[request.source_stag]
        at = request.source_to - lent.to
        if what == "entry":
            expect(request.size == ENTRY_BYTES and at % ENTRY_BYTES == 0, "a Read of one entry", request)
            step = Step(what, FIRST_HANDLE + at // ENTRY_BYTES)
        elif what == "slot":
            expect(request.size == SLOT_BYTES and at % SLOT_BYTES == 0, "a Read of one slot", request)
            step = Step(what, at // SLOT_BYTES)
        else:
            step = Step(what, request.source_to)
        self.before_read(step)
        self.stream.respond_to_read(request, self.stream.memory.read(request))
        return self._did(step)

    def _atomic(self, request: AtomicRequest) -> Step:
        named = (request.operation, request.stag, request.to, request.data, request.mask)
        asked = (AtomicOperation.FETCH_ADD, self.head.stag, self.head.to, ADD_DATA, ADD_MASK)
        expect(named == asked, "FetchAdd on Head with the Add Data and Add Mask of draft 3.3", named)
        self.before_atomic()
        before = self._advance_head()
        response = AtomicResponse(request.request_id, before)
        msn = self.stream.take_msn(QN_ATOMIC_RESPONSE)
        self.stream.send_ulpdus(segments.atomic_response(msn, response))
        return self._did(Step("ticket", before >> 32))

    def _advance_head(self) -> int:
        before = int.from_bytes(self.head.octets, sys.byteorder)
        self.head.octets[:] = fetch_add(before, ADD_DATA, ADD_MASK).to_bytes(COUNTER_BYTES, sys.byteorder)
        return before

    def _did(self, step: Step) -> Step:
        self.steps.append(step)
        return step

    # --- the honest target ---

    def bind_first(self, shows: Callable[..., Shown] = _right) -> Request:
        """What the initiator's first block was bound by, directly or not; it is served, and the table `shows` that."""
        bound = self.run_until("a BIND or an ALLOC_STORE", lambda came: isinstance(came, Bind | AllocStore))
        assert not isinstance(bound, Step)
        self.shows = shows
        self.serve_one(bound)
        self.shows = _right
        return bound

    def serve_one(self, request: Request) -> None:
        if isinstance(request, Bind):
            self._bind(request)
        else:
            super().serve_one(request)

    def complete(self, request: Request, status: Status = Status.SUCCESS, **fields: Any) -> Completion:
        """Whoever has the completion may read what it says."""
        if request.handle in self.table:
            self.mirror(request.handle)
        return super().complete(request, status, **fields)

    def _bind(self, request: Bind) -> None:
        sequence, _, block_offset = self.slot(request.ticket)
        expect(
            request.ticket < self.tickets_taken and sequence == request.ticket,
            "BIND of a ticket that was taken",
            request,
        )
        expect(block_offset == request.block_offset, f"Block Offset {block_offset:#x} of its slot", request)
        self.put_slot(request.ticket, request.ticket, BLOCK_OFFSET_EMPTY)
        start = block_offset - self.pool.to
        entry = self.table.setdefault(request.handle, Entry())
        entry.octets = bytes(self.pool.octets[start : start + request.data_length])
        entry.generation, entry.bound, entry.sealed = entry.generation + 1, True, bool(request.flags & RequestFlag.SEAL)
        self.blocks[request.handle] = block_offset
        length = request.data_length
        self.complete(request, generation=entry.generation, data_length=length, block_offset=block_offset)

    def mirror(self, handle: int) -> None:
        """Table and pool as the sequences of the base class leave them."""
        entry = self.table[handle]
        if not entry.bound:
            block_offset = self.blocks.pop(handle, None)
            if block_offset is not None:
                self._give_back(block_offset)
            self.put_entry(handle, 0, entry.generation, 0, 0)
            return
        block_offset = self.block_offset(handle)
        start = block_offset - self.pool.to
        self.pool.octets[start : start + len(entry.octets)] = entry.octets
        flags = EntryFlag.VALID | (EntryFlag.SEALED if entry.sealed else EntryFlag.NONE)
        self.put_entry(handle, *self.shows(int(flags), entry.generation, len(entry.octets), block_offset))

    def block_offset(self, handle: int) -> int:
        if handle not in self.blocks:
            self.blocks[handle] = self._allocate()
        return self.blocks[handle]

    def _allocate(self) -> int:
        """A block of its own, or its own ticket on the same ring."""
        if self.own:
            return self.own.pop()
        ticket = self._advance_head() >> 32
        block_offset = self.slot(ticket)[2]
        self.put_slot(ticket, ticket, BLOCK_OFFSET_EMPTY)
        return block_offset

    def _give_back(self, block_offset: int) -> None:
        if block_offset >= self.pool.to + BLOCKS * BLOCK_BYTES:
            self.own.append(block_offset)
            return
        self.put_slot(self.tail, self.tail, block_offset)
        self.tail += 1

    def run(self, until: Callable[[Step | Request], bool] | None = None) -> Step | Request | None:
        """Serve everything, up to the first step (served) or request (unserved) that `until` accepts."""
        while (came := self.next_step()) is not None:
            if until is not None and until(came):
                return came
            if not isinstance(came, Step):
                self.serve_one(came)
        return None

    def run_until(self, what: str, until: Callable[[Step | Request], bool]) -> Step | Request:
        """`run`, where it has to come. Raises `Deviation`."""
        came = self.run(until)
        if came is None:
            raise Deviation(f"{what}: the workload has one", "the end of the connection")
        return came


def _put_words(structure: Lent, at: int, octets: bytes) -> None:
    """Draft 3.2 and 3.3: an entry's and a slot's Block Offset, their second word, before the rest. An RNIC may read at
    any time, so each word is stored at once."""
    structure.octets[at + 8 : at + 16] = octets[8:]
    structure.octets[at : at + 8] = octets[:8]
