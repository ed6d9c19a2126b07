"""Parts of the pool that each belong to one initiator, with a ring of its own (draft 3.4, profile 6.10).

An initiator that allocates directly (draft 6.6) reads the slots of its ring and moves its Head. So neither the blocks
nor the ring are shared: whatever it does to Head, every ticket there is its own.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass

from kbtp.blocks.counter import MaskedCounter, UnmaskedCounter, ring_order_for
from kbtp.blocks.handles import HandleRange, HandleRanges
from kbtp.blocks.pool import Pool
from kbtp.blocks.ring import FreeBlockRing
from kbtp.errors import ApiMisuse
from kbtp.limits import COUNTER_BYTES, SLOT_BYTES
from kbtp.types import BlockOffset, Ticket


@dataclass(frozen=True, slots=True, eq=False)
class RingPartition:
    """`block_count` blocks from Block Offset `first` on, in `ring`."""

    first: BlockOffset
    block_count: int
    ring: FreeBlockRing
    extent: HandleRange
    """The same blocks as numbers within the pool."""

    @property
    def order(self) -> int:
        """n: the ring has 2^n slots (profile 2, HELLO_ACK at 52)."""
        return self.ring.order

    @property
    def slots(self) -> memoryview:
        """What Ring STag lets the initiator read."""
        return self.ring.slots

    @property
    def head(self) -> memoryview:
        """What Head STag lets the initiator FetchAdd."""
        return self.ring.head

    @property
    def free_count(self) -> int:
        """Blocks in the ring, whether or not a ticket was taken for them."""
        return self.ring.free_count

    @property
    def unbound_count(self) -> int:
        return self.ring.unbound_count

    def audit_head(self) -> Ticket:
        return self.ring.audit_head()

    def restore_head(self) -> None:
        self.ring.restore_head()

    def outstanding_tickets(self) -> list[Ticket]:
        return self.ring.outstanding_tickets()

    def read_slot(self, ticket: Ticket) -> BlockOffset | None:
        return self.ring.read_slot(ticket)


class Partitions:
    """Divides the last `block_count` blocks of the pool: a contiguous extent a holder, first fit.

    `masked_counters`: Head is of the form of draft 3.3, else of 9.2. `first_ticket`: of every ring.
    """

    def __init__(self, pool: Pool, block_count: int, *, masked_counters: bool, first_ticket: Ticket) -> None:
        self._pool = pool
        self._form = MaskedCounter if masked_counters else UnmaskedCounter
        self._first_ticket = first_ticket
        self._extents = HandleRanges(pool.block_count - block_count, block_count) if block_count else None
        self._by_holder: dict[Hashable, RingPartition] = {}

    def open(self, holder: Hashable, blocks: int) -> RingPartition | None:
        """A partition of `blocks` blocks for `holder`; None where no gap has so many, or the system no memory for the
        ring. Raises `ApiMisuse` for a second one."""
        if holder in self._by_holder:
            raise ApiMisuse(f"{holder!r} has a partition already")
        extent = self._extents.assign(blocks) if self._extents is not None else None
        if extent is None or self._extents is None:
            return None
        if extent.count < blocks:
            self._extents.release(extent)
            return None
        try:
            ring = self._ring_over(extent)
        except MemoryError:
            self._extents.release(extent)
            return None
        partition = RingPartition(self._pool.offset_of(extent.first), blocks, ring, extent)
        self._by_holder[holder] = partition
        return partition

    def _ring_over(self, extent: HandleRange) -> FreeBlockRing:
        order = ring_order_for(extent.count)
        return FreeBlockRing(
            bytearray(SLOT_BYTES << order),
            bytearray(COUNTER_BYTES),
            bytearray(COUNTER_BYTES),
            order,
            [self._pool.offset_of(index) for index in extent],
            self._form(order),
            self._first_ticket,
        )

    def of(self, holder: Hashable) -> RingPartition | None:
        return self._by_holder.get(holder)

    def close(self, holder: Hashable) -> None:
        """Clear the extent and give it back. Raises `ApiMisuse` while a block of it is out, or a ticket is."""
        partition = self._by_holder.get(holder)
        if partition is None or self._extents is None:
            raise ApiMisuse(f"{holder!r} has no partition")
        if partition.free_count != partition.block_count or partition.unbound_count:
            raise ApiMisuse(f"the partition of {holder!r} has blocks or tickets out")
        for index in partition.extent:
            self._pool.clear(self._pool.offset_of(index))
        self._extents.release(partition.extent)
        del self._by_holder[holder]

    @property
    def free_count(self) -> int:
        """Blocks of all these that are bound to nothing."""
        unassigned = self._extents.free_count if self._extents is not None else 0
        return unassigned + sum(partition.free_count for partition in self._by_holder.values())
