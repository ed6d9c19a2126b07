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


class Extents:
    """Divides the last `direct_blocks` of a pool's blocks: a contiguous extent a holder, first fit.

    Extents are of numbers within the pool.
    """

    def __init__(self, pool_blocks: int, direct_blocks: int) -> None:
        self._ranges = HandleRanges(pool_blocks - direct_blocks, direct_blocks) if direct_blocks else None

    @property
    def free_count(self) -> int:
        """Blocks in no extent."""
        return self._ranges.free_count if self._ranges is not None else 0

    @property
    def longest(self) -> int:
        """Blocks that `assign` could give."""
        return self._ranges.longest_gap if self._ranges is not None else 0

    def assign(self, blocks: int) -> HandleRange | None:
        """So many blocks side by side, in nobody else's extent from now on; None where there are none."""
        if self._ranges is None or blocks > self._ranges.longest_gap:
            return None
        return self._ranges.assign(blocks)

    def release(self, extent: HandleRange) -> None:
        """Give back what `assign` returned."""
        assert self._ranges is not None
        self._ranges.release(extent)


class Partitions:
    """A partition a holder, of the last `block_count` blocks of the pool.

    `masked_counters`: Head is of the form of draft 3.3, else of 9.2. `first_ticket`: of every ring.
    """

    def __init__(self, pool: Pool, block_count: int, *, masked_counters: bool, first_ticket: Ticket) -> None:
        self._pool = pool
        self._form = MaskedCounter if masked_counters else UnmaskedCounter
        self._first_ticket = first_ticket
        self._extents = Extents(pool.block_count, block_count)
        self._by_holder: dict[Hashable, RingPartition] = {}

    @property
    def largest(self) -> int:
        """Blocks that a new one could have."""
        return self._extents.longest

    def open(self, holder: Hashable, blocks: int) -> RingPartition | None:
        """A partition of `blocks` blocks for `holder`; None where there is no room, or the system has no memory for
        the ring. Raises `ApiMisuse` for a second one."""
        if holder in self._by_holder:
            raise ApiMisuse(f"{holder!r} has a partition already")
        extent = self._extents.assign(blocks)
        if extent is None:
            return None
        try:
            ring = self._ring_over(extent)
        except BaseException as error:
            self._extents.release(extent)
            if isinstance(error, MemoryError):
                return None
            raise
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
        if partition is None:
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
        return self._extents.free_count + sum(partition.free_count for partition in self._by_holder.values())
