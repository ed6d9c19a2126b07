"""Parts of the pool with rings of their own, of the native RNIC's block store (draft 3.4, 6.6).

Which blocks a holder gets is decided here; what becomes of them, in Rust. The memory of table and rings is Python's, so
that it can be registered like any other and lives as long as somebody does with it what he may.
"""

from __future__ import annotations

import errno
import os
from dataclasses import dataclass

import numpy as np

from kbtp import _native
from kbtp.blocks.counter import ring_order_for
from kbtp.blocks.handles import HandleRange
from kbtp.blocks.memory import WORD_BYTES
from kbtp.blocks.partition import Extents
from kbtp.limits import COUNTER_BYTES, SLOT_BYTES
from kbtp.types import BlockOffset, Ticket


def zeroed(length_bytes: int) -> memoryview:
    """So many octets, a multiple of 8 and aligned to that. Raises `OSError` if the system does not give them."""
    try:
        return np.zeros(length_bytes // WORD_BYTES, np.uint64).data.cast("B")
    except (MemoryError, ValueError):  # the latter for more than there are addresses
        raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM)) from None


@dataclass(frozen=True, slots=True, eq=False)
class NativePartition:
    """As `kbtp.blocks.RingPartition`."""

    first: BlockOffset
    block_count: int
    order: int
    slots: memoryview
    head: memoryview
    extent: HandleRange
    _native: _native.BlockStore
    _holder_number: int

    @property
    def free_count(self) -> int:
        return self._native.partition_free_count(self._holder_number)

    def audit_head(self) -> Ticket:
        return self._native.audit_head(self._holder_number)

    def restore_head(self) -> None:
        self._native.restore_head(self._holder_number)

    def outstanding_tickets(self) -> list[Ticket]:
        return self._native.outstanding_tickets(self._holder_number)

    def read_slot(self, ticket: Ticket) -> BlockOffset | None:
        return self._native.read_slot(self._holder_number, ticket)


class NativePartitions:
    """A partition a holder, of the last `direct_blocks` blocks of the pool."""

    def __init__(self, native: _native.BlockStore, block_count: int, direct_blocks: int) -> None:
        self._native = native
        self._extents = Extents(block_count, direct_blocks)
        self._by_holder: dict[int, NativePartition] = {}

    @property
    def unassigned_count(self) -> int:
        """Blocks that are set aside and in no partition."""
        return self._extents.free_count

    @property
    def largest(self) -> int:
        """Blocks that a new one could have."""
        return self._extents.longest

    def room_for(self, blocks: int) -> HandleRange | None:
        """So many blocks side by side, in nobody else's partition from now on; None where there are none."""
        return self._extents.assign(blocks)

    def open(self, holder_number: int, extent: HandleRange, first: BlockOffset) -> NativePartition | None:
        """`extent` is the holder's, as `room_for` found it. None, and it is nobody's again, if the system has no memory
        for the ring."""
        try:
            order = ring_order_for(extent.count)
            slots, head = zeroed(SLOT_BYTES << order), zeroed(COUNTER_BYTES)
            self._native.open_partition(holder_number, extent.first, extent.count, slots, head)
        except BaseException as error:
            self._extents.release(extent)
            if isinstance(error, OSError) and error.errno == errno.ENOMEM:
                return None
            raise
        partition = NativePartition(
            first, extent.count, order, slots, head, extent, _native=self._native, _holder_number=holder_number
        )
        self._by_holder[holder_number] = partition
        return partition

    def of(self, holder_number: int) -> NativePartition | None:
        return self._by_holder.get(holder_number)

    def close(self, holder_number: int) -> None:
        """Its blocks are cleared and may be another's. Raises `ApiMisuse` while one is out, or a ticket is."""
        self._native.close_partition(holder_number)
        self._extents.release(self._by_holder.pop(holder_number).extent)
