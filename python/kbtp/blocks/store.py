"""The one owner of pool, block table, free-block ring, quotas and handle ranges, and of the pins between them.

Everything a target changes in its block structures goes through here, so that no two writers ever meet. Nothing here
knows of sessions, messages or time: what may be done is decided by the caller, who has checked the entry first.
A call out of turn raises `ApiMisuse` and changes nothing.

A block is always in one place:

    free (in its ring) --begin_alloc_store--> being filled --commit--> bound --begin_free--> free
                        <------- abort ------                        /    \\-- while pinned: waiting --/
                        ------------------ bind_ticket -------------/

There is a ring that most holders share, and one for each holder with a partition of its own (draft 3.4, 6.6): all that
it allocates comes from there and goes back there.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass

from kbtp.blocks.counter import MaskedCounter, checked_order
from kbtp.blocks.handles import HandleRange, HandleRanges
from kbtp.blocks.memory import Memory
from kbtp.blocks.owner import LoadPin
from kbtp.blocks.partition import Partitions, RingPartition
from kbtp.blocks.pool import Pool
from kbtp.blocks.quota import QuotaLedger
from kbtp.blocks.ring import FreeBlockRing
from kbtp.blocks.table import BlockTable, Entry
from kbtp.errors import ApiMisuse
from kbtp.limits import COUNTER_BYTES, ENTRY_BYTES, SLOT_BYTES
from kbtp.types import BlockOffset, Generation, Handle, Status, Ticket


@dataclass(frozen=True, slots=True, eq=False)
class Pin:
    """One LOAD's hold on a block, from the read of the entry to the block's last octet sent (profile 6.1).

    `owner` is whatever `begin_load` was given. Two pins are never equal.
    """

    block_offset: BlockOffset
    data_length: int
    generation: Generation
    owner: object


@dataclass(frozen=True, slots=True)
class _Filling:
    block_offset: BlockOffset
    holder: Hashable


@dataclass(frozen=True, slots=True)
class _WaitingFree:
    entry: Entry
    holder: Hashable
    on_freed: Callable[[Entry], None]


class BlockStore:
    """`table` and `ring` over the blocks of `pool`, shared out by `quotas`, and `partitions` over the rest.

    `clear_on_free`: blocks are overwritten with zeros before they return to the ring (draft 6.4, profile 3 "Trust
    domain"), whether they were bound or an allocation came to nothing.

    Raises `ApiMisuse` if the ring's blocks are not of the pool or the quotas are for more blocks than the ring's.
    """

    def __init__(
        self,
        pool: Pool,
        table: BlockTable,
        ring: FreeBlockRing,
        quotas: QuotaLedger,
        partitions: Partitions | None = None,
        *,
        clear_on_free: bool = False,
    ) -> None:
        if not all(map(pool.contains, ring.block_offsets)):
            raise ApiMisuse("every block of the ring is expected to be one of the pool's")
        if quotas.total_blocks > len(ring.block_offsets):
            raise ApiMisuse(f"quotas for {quotas.total_blocks} blocks: {len(ring.block_offsets)} are in the ring")
        self.pool = pool
        self.table = table
        self.ring = ring
        self.quotas = quotas
        self.partitions = partitions or Partitions(pool, 0, masked_counters=True, first_ticket=0)
        self.clear_on_free = clear_on_free
        self._ranges = HandleRanges(table.base_handle, table.handle_count)
        self._domains: dict[Handle, str] = {}
        self._filling: dict[Handle, _Filling] = {}
        self._pins: dict[BlockOffset, dict[LoadPin, None]] = {}
        self._waiting_frees: dict[BlockOffset, _WaitingFree] = {}

    @classmethod
    def create(
        cls,
        pool_memory: Memory,
        *,
        block_size_bytes: int,
        block_count: int,
        pool_base: int,
        table_base_handle: Handle,
        table_handles: int,
        ring_order: int,
        first_ticket: Ticket = 0,
        clear_on_free: bool = False,
        direct_blocks: int = 0,
        masked_counters: bool = True,
    ) -> BlockStore:
        """A store in memory of its own.

        The last `direct_blocks` of the pool are for partitions, whose Heads have the form that `masked_counters` says
        (draft 3.3 or 9.2). The others are in the shared ring, which has `ring_order` and which no peer reaches.
        Everything is unbound and free, and all quotas are still to grant. Raises `ApiMisuse` as the parts do.
        """
        if not 0 <= direct_blocks < block_count:
            raise ApiMisuse(f"{direct_blocks} blocks set aside: 0 to {block_count - 1} expected")
        pool = Pool(pool_memory, block_size_bytes, block_count, pool_base)
        table = BlockTable(bytearray(ENTRY_BYTES * max(0, table_handles)), table_base_handle, table_handles)
        table.initialize()
        ring = FreeBlockRing(
            bytearray(SLOT_BYTES << checked_order(ring_order)),
            bytearray(COUNTER_BYTES),
            bytearray(COUNTER_BYTES),
            ring_order,
            [pool.offset_of(index) for index in range(block_count - direct_blocks)],
            MaskedCounter(ring_order),
            first_ticket,
        )
        partitions = Partitions(pool, direct_blocks, masked_counters=masked_counters, first_ticket=first_ticket)
        quotas = QuotaLedger(block_count - direct_blocks)
        return cls(pool, table, ring, quotas, partitions, clear_on_free=clear_on_free)

    # --- looking ---

    def in_table(self, handle: Handle) -> bool:
        return self.table.contains(handle)

    def read(self, handle: Handle) -> Entry:
        """The entry of a handle that is in the table."""
        return self.table.read(handle)

    @property
    def free_blocks(self) -> int:
        """Blocks that are bound to nothing: in a ring, or in no partition yet."""
        return self.ring.free_count + self.partitions.free_count

    @property
    def table_memory(self) -> memoryview:
        """The octets of all entries, what Table STag lets an initiator read (draft 6.6)."""
        return self.table.memory

    def bound_handles(self, handle_range: HandleRange) -> list[Handle]:
        """Those of `handle_range` that are bound now, for instance to free all that an identity owns."""
        return self.table.bound_handles(handle_range)

    def bound_count(self, handle_range: HandleRange) -> int:
        """How many of `handle_range` are bound now (profile 2, HELLO_ACK at 140)."""
        return len(self.table.bound_handles(handle_range))

    # --- whose handles are whose (profile 3) ---

    def assign_range(self, wanted: int, domain: str) -> HandleRange | None:
        """A range of `wanted` handles, or of as many as there are, for an initiator of `domain`; None if all are
        assigned."""
        handle_range = self._ranges.assign(wanted)
        if handle_range is not None:
            self._domains[handle_range.first] = domain
        return handle_range

    def release_range(self, handle_range: HandleRange) -> None:
        """Give back a range that `assign_range` returned."""
        self._ranges.release(handle_range)
        del self._domains[handle_range.first]

    def domain_of(self, handle: Handle) -> str | None:
        """Of the initiator that `handle` was assigned to; None if it was assigned to none."""
        handle_range = self._ranges.range_of(handle)
        return self._domains[handle_range.first] if handle_range is not None else None

    # --- LOAD ---

    def begin_load(self, handle: Handle, owner: object) -> Pin:
        """Pin the block of a VALID entry. Until `end_load` its octets are no other block's (profile 6.1)."""
        entry = self.table.read(handle)
        if not entry.valid:
            raise ApiMisuse(f"handle {handle:#x} is not bound")
        pin = Pin(entry.block_offset, entry.data_length, entry.generation, owner)
        self._pins.setdefault(pin.block_offset, {})[pin] = None
        return pin

    def begin_load_of(self, handle: Handle, entry: Entry, owner: object) -> Pin | None:
        """As `begin_load`, or None if `entry` is not the entry of `handle` any more."""
        return self.begin_load(handle, owner) if self.table.read(handle) == entry else None

    def end_load(self, pin: LoadPin) -> None:
        """The last octet has left the block, or never will. The last pin of a freed block completes its FREE."""
        pins = self._pins.get(pin.block_offset, {})
        if pin not in pins:
            raise ApiMisuse(f"{pin} has ended already")
        del pins[pin]
        if pins:
            return
        del self._pins[pin.block_offset]
        waiting = self._waiting_frees.pop(pin.block_offset, None)
        if waiting is not None:
            self._finish_free(pin.block_offset, waiting)

    # --- ALLOC_STORE ---

    def begin_alloc_store(self, handle: Handle, holder: Hashable) -> BlockOffset | Status:
        """Draft 6.3 steps 1 and 2: one unit of quota, then a block, for a handle that is not bound.

        NO_SPACE if the quota is reached, found before a ticket is taken (profile 6.8); tickets that the holder itself
        has taken and not bound count (draft 3.4). TARGET_ERROR if the ring has no block ready all the same: its slot
        still holds one that is another ticket's. Neither changes anything. A Status is told from a Block Offset by its
        type.
        """
        if self.table.read(handle).valid or handle in self._filling:
            raise ApiMisuse(f"handle {handle:#x} is bound or being bound")
        partition = self.partitions.of(holder)
        unbound_count = partition.unbound_count if partition is not None else 0
        if self.quotas.usage(holder) + unbound_count >= self.quotas.quota(holder) or not self.quotas.charge(holder):
            return Status.NO_SPACE
        block_offset = self._ring_of(holder).allocate()
        if block_offset is None:
            self.quotas.credit(holder)
            return Status.TARGET_ERROR
        self._filling[handle] = _Filling(block_offset, holder)
        return block_offset

    def commit_alloc_store(self, handle: Handle, block_offset: BlockOffset, data_length: int, seal: bool) -> Entry:
        """Draft 6.3 step 4: the data is in the block; bind it."""
        if handle not in self._filling or self._filling[handle].block_offset != block_offset:
            raise ApiMisuse(f"handle {handle:#x} is not being bound to block offset {block_offset:#x}")
        self._check_length(data_length)
        entry = self.table.bind(handle, block_offset, data_length, seal)
        del self._filling[handle]
        return entry

    def abort_alloc_store(self, handle: Handle, block_offset: BlockOffset, holder: Hashable) -> None:
        """The data will not come: the block returns to the ring, the unit to the quota (profile 6.5)."""
        if self._filling.get(handle) != _Filling(block_offset, holder):
            raise ApiMisuse(f"handle {handle:#x} is not being bound to block offset {block_offset:#x} by {holder!r}")
        del self._filling[handle]
        self._return_block(block_offset, holder)

    # --- partitions, and what an initiator allocates there itself (draft 6.6) ---

    @property
    def largest_partition(self) -> int:
        """Blocks that a new one could have: 0 where there is no room."""
        return self.partitions.largest

    def open_partition(self, holder: Hashable, blocks: int) -> RingPartition | None:
        """A ring of its own over `blocks` blocks, which are its quota from now on (draft 3.4); None: there is no room,
        or no memory for the ring.

        The holder may have a quota in the shared ring, but nothing bound: that quota is given back.
        """
        if self.quotas.usage(holder):
            raise ApiMisuse(f"{holder!r} has blocks of the shared ring")
        partition = self.partitions.open(holder, blocks)
        if partition is not None:
            self.quotas.set_apart(holder, blocks)
        return partition

    def partition_of(self, holder: Hashable) -> RingPartition | None:
        return self.partitions.of(holder)

    def close_partition(self, holder: Hashable) -> None:
        """Clear it and give it back, and the holder's quota with it; every block is home, no ticket is taken."""
        self.partitions.close(holder)
        self.quotas.release(holder)

    def bind_ticket(
        self, handle: Handle, holder: Hashable, ticket: Ticket, block_offset: BlockOffset, data_length: int, seal: bool
    ) -> Entry | Status:
        """Draft 6.6 BIND: bind a handle that is not bound to the block that `holder` took with `ticket` and wrote.

        NO_SPACE if that exceeds the quota, in which the ticket itself counts once (profile 8.10). TICKET_MISMATCH if
        the ticket is not one that was taken and not bound, or its slot holds another block. Neither changes anything.
        Audits Head, and raises `PeerMisbehaved` as that does.
        """
        partition = self._partition(holder)
        if self.table.read(handle).valid or handle in self._filling:
            raise ApiMisuse(f"handle {handle:#x} is bound or being bound")
        self._check_length(data_length)
        outstanding = partition.ring.is_outstanding(ticket)
        others = partition.unbound_count - outstanding
        if self.quotas.usage(holder) + others >= self.quotas.quota(holder):
            return Status.NO_SPACE
        if not outstanding or partition.read_slot(ticket) != block_offset:
            return Status.TICKET_MISMATCH
        self.quotas.charge(holder)
        partition.ring.consume(ticket)
        return self.table.bind(handle, block_offset, data_length, seal)

    def reclaim_ticket(self, holder: Hashable, ticket: Ticket) -> BlockOffset:
        """Draft 3.4: the block of one of `outstanding_tickets` returns to the ring with a new ticket; say which it was.

        No RDMA Write of the initiator reaches the block any more. The unit of usage is released: it was no more than
        the ticket.
        """
        partition = self._partition(holder)
        block_offset = partition.read_slot(ticket)
        if block_offset is None or not partition.ring.is_outstanding(ticket):
            raise ApiMisuse(f"ticket {ticket} of {holder!r} is not outstanding")
        partition.ring.consume(ticket)
        if self.clear_on_free:
            self.pool.clear(block_offset)
        partition.ring.free(block_offset)
        return block_offset

    def _partition(self, holder: Hashable) -> RingPartition:
        partition = self.partitions.of(holder)
        if partition is None:
            raise ApiMisuse(f"{holder!r} has no partition")
        return partition

    def _ring_of(self, holder: Hashable) -> FreeBlockRing:
        partition = self.partitions.of(holder)
        return partition.ring if partition is not None else self.ring

    # --- STORE ---

    def commit_store(self, handle: Handle, data: bytes | bytearray | memoryview, seal: bool) -> Entry:
        """Draft 6.2 steps 2 and 3 with data the caller has staged (profile 6.5): copy it, then update the entry."""
        entry = self.table.read(handle)
        if not entry.valid or entry.sealed:
            raise ApiMisuse(f"handle {handle:#x} is {'sealed' if entry.valid else 'not bound'}")
        octets = memoryview(data).cast("B")
        self._check_length(len(octets))
        self.pool.view(entry.block_offset, len(octets))[:] = octets
        return self.table.update(handle, len(octets), seal)

    # --- FREE ---

    def begin_free(self, handle: Handle, holder: Hashable, on_freed: Callable[[Entry], None]) -> bool:
        """Draft 6.4: unbind at once; return the block when no LOAD is left in it (profile 6.1).

        `on_freed` gets the entry as unbound, once the Tail ticket is taken and the quota credited. It may call the
        store. True: that has happened. False: it will, out of the `end_load` that lets the last pin go.
        """
        old = self.table.read(handle)
        if not old.valid or not self.quotas.usage(holder):
            raise ApiMisuse(f"handle {handle:#x} is not bound, or not by {holder!r}")
        waiting = _WaitingFree(self.table.unbind(handle), holder, on_freed)
        if old.block_offset in self._pins:
            self._waiting_frees[old.block_offset] = waiting
            return False
        self._finish_free(old.block_offset, waiting)
        return True

    def pinned_frees(self) -> Iterator[tuple[BlockOffset, tuple[LoadPin, ...]]]:
        """Blocks whose FREE waits, each with the pins it waits for, oldest first.

        To measure how long, remember pins, not Block Offsets: a pin belongs to one FREE, a block to many in turn.
        """
        for block_offset in self._waiting_frees:
            yield block_offset, tuple(self._pins[block_offset])

    # --- inside ---

    def _finish_free(self, block_offset: BlockOffset, waiting: _WaitingFree) -> None:
        self._return_block(block_offset, waiting.holder)
        waiting.on_freed(waiting.entry)

    def _return_block(self, block_offset: BlockOffset, holder: Hashable) -> None:
        if self.clear_on_free:
            self.pool.clear(block_offset)
        # Draft 3.4: quota comes back after the Tail ticket, so that a ticket on Head always has a block coming.
        self._ring_of(holder).free(block_offset)
        self.quotas.credit(holder)

    def _check_length(self, length_bytes: int) -> None:
        if not 0 <= length_bytes <= self.pool.block_size_bytes:
            raise ApiMisuse(f"length {length_bytes}: 0 to {self.pool.block_size_bytes} octets expected")
