"""The native RNIC's block structures as a target's sessions in Python know them: `kbtp.blocks.owner.BlockOwner`.

What is done to blocks, entries, quotas and pins is decided in Rust (`kbtp_proto::blocks`), for the RNIC's sessions and
these alike. There holders, readers and domains are numbers; here they are what the target calls them.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass

from kbtp import _native
from kbtp.atomics import MASK64
from kbtp.blocks.handles import HandleRange, HandleRanges
from kbtp.blocks.owner import LoadPin
from kbtp.blocks.pool import Pool
from kbtp.blocks.table import Entry
from kbtp.errors import ApiMisuse
from kbtp.limits import ENTRY_BYTES, RING_ORDER_MAX, RING_ORDER_MIN
from kbtp.rnic.native_partitions import NativePartition, NativePartitions, zeroed
from kbtp.types import BlockOffset, EntryFlag, Generation, Handle, Status, Ticket

_NOBODY = MASK64
"""Owner of the pins of those who have no stream: no stream has this number."""
_U32_MAX = (1 << 32) - 1


@dataclass(frozen=True, slots=True, eq=False)
class NativePin:
    """As `kbtp.blocks.Pin`."""

    number: int
    block_offset: BlockOffset
    data_length: int
    generation: Generation
    owner: object
    owner_number: int


class NativeQuotas:
    """As `kbtp.blocks.QuotaLedger`; charges and credits are the store's own."""

    def __init__(self, native: _native.BlockStore) -> None:
        self._native = native
        self._numbers: dict[Hashable, int] = {}
        self._holders: dict[int, Hashable] = {}
        self._released: set[int] = set()
        self._next_number = 0

    @property
    def left(self) -> int:
        return self._native.quota_left

    def grant(self, holder: Hashable, requested: int) -> int:
        if requested < 0:
            raise ApiMisuse(f"quota {requested} requested: zero or more expected")
        self._forget_settled()
        if holder in self._numbers:
            raise ApiMisuse(f"{holder!r} has a quota already")
        return self._native.grant(self.enter(holder), min(requested, _U32_MAX))

    def enter(self, holder: Hashable) -> int:
        """What the RNIC knows `holder` as, from now on: its account is opened."""
        self._forget_settled()
        if holder not in self._numbers:
            self._numbers[holder], self._holders[self._next_number] = self._next_number, holder
            self._next_number += 1
        return self._numbers[holder]

    def release(self, holder: Hashable) -> None:
        number = self.number_of(holder)
        self._native.release(number)
        self.released(number)

    def released(self, number: int) -> None:
        """The account of this number has been closed."""
        self._released.add(number)
        self._forget_settled()

    def usage(self, holder: Hashable) -> int:
        number = self._numbers.get(holder)
        return 0 if number is None else self._native.usage(number)

    def quota(self, holder: Hashable) -> int:
        number = self._numbers.get(holder)
        return 0 if number is None else self._native.quota(number)

    def number_of(self, holder: Hashable) -> int:
        """What the RNIC knows `holder` as. Raises `ApiMisuse` for one without a quota."""
        number = self._numbers.get(holder)
        if number is None:
            raise ApiMisuse(f"{holder!r} has no quota")
        return number

    def find(self, holder: Hashable) -> int | None:
        """As `number_of`; None for one without a quota."""
        return self._numbers.get(holder)

    def holder_of(self, number: int) -> Hashable | None:
        """The reverse; None for one whose account is closed and settled."""
        return self._holders.get(number)

    def _forget_settled(self) -> None:
        for number in [number for number in self._released if not self._native.usage(number)]:
            self._released.remove(number)
            del self._numbers[self._holders.pop(number)]


class NativeBlockStore:
    """As `kbtp.blocks.BlockStore`; what is out of turn raises `ApiMisuse` and changes nothing.

    Its owner calls it from one thread, while the RNIC's own threads execute sequences on the same structures.
    """

    def __init__(
        self,
        pool: _native.Region,
        pool_memory: memoryview,
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
        freed: Callable[[object], None],
    ) -> None:
        """`pool` is the region of `pool_memory`. `freed(holder)`: see `OffloadingRnic.create_block_store`.

        Raises `ApiMisuse` for numbers outside profile 5, `OSError` if the system gives no memory.
        """
        self.pool = Pool(pool_memory, block_size_bytes, block_count, pool_base)
        self._ranges = HandleRanges(table_base_handle, table_handles)
        if not RING_ORDER_MIN <= ring_order <= RING_ORDER_MAX:
            raise ApiMisuse(f"ring order {ring_order}: {RING_ORDER_MIN} to {RING_ORDER_MAX} expected")
        if not 0 <= first_ticket <= _U32_MAX:
            raise ApiMisuse(f"first ticket {first_ticket}: 32 bits expected")
        if not 0 <= direct_blocks < block_count:
            raise ApiMisuse(f"{direct_blocks} blocks set aside: 0 to {block_count - 1} expected")
        self.table_memory = zeroed(ENTRY_BYTES * table_handles)
        self.native = _native.BlockStore(
            pool,
            self.table_memory,
            block_size_bytes=block_size_bytes,
            block_count=block_count,
            pool_base=pool_base,
            table_base_handle=table_base_handle,
            table_handles=table_handles,
            ring_order=ring_order,
            first_ticket=first_ticket,
            direct_blocks=direct_blocks,
            masked_counters=masked_counters,
            clear_on_free=clear_on_free,
        )
        self.quotas = NativeQuotas(self.native)
        self._partitions = NativePartitions(self.native, block_count, direct_blocks)
        self._freed = freed
        self._domains: dict[str, int] = {}
        self._domain_names: list[str] = []
        self._pins: dict[int, NativePin] = {}
        self._reader_numbers: dict[object, int] = {}
        self._readers: dict[int, object] = {}
        self._waiting: dict[int, Callable[[Entry], None]] = {}
        self._next_free = 0

    # --- looking ---

    def read(self, handle: Handle) -> Entry:
        return _entry(self.native.read(handle))

    @property
    def free_blocks(self) -> int:
        return self.native.free_blocks + self._partitions.unassigned_count

    def bound_handles(self, handle_range: HandleRange) -> list[Handle]:
        return self.native.bound_handles(handle_range.first, handle_range.count)

    def bound_count(self, handle_range: HandleRange) -> int:
        return self.native.bound_count(handle_range.first, handle_range.count)

    # --- whose handles are whose ---

    def assign_range(self, wanted: int, domain: str) -> HandleRange | None:
        handle_range = self._ranges.assign(wanted)
        if handle_range is not None:
            self.native.assign_range(handle_range.first, handle_range.count, self.domain_number(domain))
        return handle_range

    def release_range(self, handle_range: HandleRange) -> None:
        self._ranges.release(handle_range)
        self.native.release_range(handle_range.first, handle_range.count)

    def domain_of(self, handle: Handle) -> str | None:
        number = self.native.domain_of(handle)
        return None if number is None else self._domain_names[number]

    def domain_number(self, domain: str) -> int:
        """What the RNIC knows `domain` as."""
        number = self._domains.get(domain)
        if number is None:
            number = self._domains[domain] = len(self._domains)
            self._domain_names.append(domain)
        return number

    # --- LOAD ---

    def begin_load(self, handle: Handle, owner: object) -> NativePin:
        number, block_offset, data_length, generation, owner_number = self.native.begin_load(
            handle, self._reader_numbers.get(owner, _NOBODY)
        )
        pin = NativePin(number, block_offset, data_length, generation, owner, owner_number)
        self._pins[number] = pin
        return pin

    def begin_load_of(self, handle: Handle, entry: Entry, owner: object) -> NativePin | None:
        """As `begin_load`, or None if `entry` is not the entry of `handle` any more: the RNIC may have changed it."""
        try:
            pin = self.begin_load(handle, owner)
        except ApiMisuse:  # not bound any more
            return None
        if (pin.generation, pin.block_offset, pin.data_length) == (
            entry.generation, entry.block_offset, entry.data_length,
        ):  # fmt: skip
            return pin
        self.end_load(pin)
        return None

    def end_load(self, pin: LoadPin) -> None:
        if not isinstance(pin, NativePin):
            raise ApiMisuse(f"{pin} is not of this store")
        finished = self.native.end_load(
            (pin.number, pin.block_offset, pin.data_length, pin.generation, pin.owner_number)
        )
        del self._pins[pin.number]
        if finished is not None:
            self.free_finished(*finished)

    def name_reader(self, reader: object, stream_number: int) -> None:
        """The RNIC knows `reader` as the stream of this number from now on; it pins blocks in the reader's name."""
        self._reader_numbers[reader], self._readers[stream_number] = stream_number, reader

    def forget_reader(self, reader: object) -> None:
        """Its stream has ended and holds no pin any more. Idempotent."""
        self._readers.pop(self._reader_numbers.pop(reader, _NOBODY), None)

    # --- ALLOC_STORE ---

    def begin_alloc_store(self, handle: Handle, holder: Hashable) -> BlockOffset | Status:
        block_offset, status = self.native.begin_alloc_store(handle, self.quotas.number_of(holder))
        return Status(status) if block_offset is None else block_offset

    def commit_alloc_store(self, handle: Handle, block_offset: BlockOffset, data_length: int, seal: bool) -> Entry:
        return _entry(self.native.commit_alloc_store(handle, block_offset, data_length, seal))

    def abort_alloc_store(self, handle: Handle, block_offset: BlockOffset, holder: Hashable) -> None:
        self.native.abort_alloc_store(handle, block_offset, self.quotas.number_of(holder))

    # --- partitions, and what an initiator allocates there itself ---

    @property
    def largest_partition(self) -> int:
        return self._partitions.largest

    def open_partition(self, holder: Hashable, blocks: int) -> NativePartition | None:
        if self.partition_of(holder) is not None:
            raise ApiMisuse(f"{holder!r} has a partition already")
        if self.quotas.usage(holder):
            raise ApiMisuse(f"{holder!r} has blocks of the shared ring")
        extent = self._partitions.room_for(blocks)
        if extent is None:
            return None
        known_as = self.quotas.find(holder)
        number = self.quotas.enter(holder)
        partition = None
        try:
            partition = self._partitions.open(number, extent, self.pool.offset_of(extent.first))
        finally:
            if partition is None and number != known_as:
                self.quotas.released(number)  # no account was opened
        return partition

    def partition_of(self, holder: Hashable) -> NativePartition | None:
        number = self.quotas.find(holder)
        return None if number is None else self._partitions.of(number)

    def close_partition(self, holder: Hashable) -> None:
        number = self._number_with_partition(holder)
        self._partitions.close(number)
        self.quotas.released(number)

    def bind_ticket(
        self, handle: Handle, holder: Hashable, ticket: Ticket, block_offset: BlockOffset, data_length: int, seal: bool
    ) -> Entry | Status:
        entry, status = self.native.bind_ticket(
            handle, self._number_with_partition(holder), ticket, block_offset, data_length, seal
        )
        return Status(status) if entry is None else _entry(entry)

    def reclaim_ticket(self, holder: Hashable, ticket: Ticket) -> BlockOffset:
        return self.native.reclaim_ticket(self._number_with_partition(holder), ticket)

    def _number_with_partition(self, holder: Hashable) -> int:
        if self.partition_of(holder) is None:
            raise ApiMisuse(f"{holder!r} has no partition")
        return self.quotas.number_of(holder)

    # --- STORE ---

    def commit_store(self, handle: Handle, data: bytes | bytearray | memoryview, seal: bool) -> Entry:
        return _entry(self.native.commit_store(handle, bytes(data), seal))

    # --- FREE ---

    def begin_free(self, handle: Handle, holder: Hashable, on_freed: Callable[[Entry], None]) -> bool:
        number = self._next_free
        entry = self.native.begin_free(handle, self.quotas.number_of(holder), number)
        if entry is not None:
            on_freed(_entry(entry))
            return True
        self._next_free += 1
        self._waiting[number] = on_freed
        return False

    def pinned_frees(self) -> Iterator[tuple[BlockOffset, tuple[LoadPin, ...]]]:
        for block_offset, pins in self.native.pinned_frees():
            yield block_offset, tuple(self._pin(*pin) for pin in pins)

    # --- what the RNIC's sessions have done ---

    def free_finished(self, number: int, entry: tuple[int, int, int, int]) -> None:
        """The FREE that `begin_free` gave this number waits no longer."""
        self._waiting.pop(number)(_entry(entry))

    def free_outlived(self, holder_number: int) -> None:
        """A FREE of the RNIC's own is complete whose stream had ended before."""
        holder = self.quotas.holder_of(holder_number)
        if holder is not None:
            self._freed(holder)

    def _pin(
        self, number: int, block_offset: BlockOffset, data_length: int, generation: Generation, owner_number: int
    ) -> NativePin:
        """The pin given out here under this number, or one that the RNIC holds in a reader's name."""
        pin = self._pins.get(number)
        if pin is not None:
            return pin
        owner = self._readers.get(owner_number)
        return NativePin(number, block_offset, data_length, generation, owner, owner_number)


def _entry(entry: tuple[int, int, int, int]) -> Entry:
    flags, generation, data_length, block_offset = entry
    return Entry(EntryFlag(flags), generation, data_length, block_offset)
