"""What the direct modes (draft 6.6) are made of: what HELLO_ACK says of the target's structures, and the steps of the
two sequences. No I/O, no clock.

`direct_load.py` and `direct_alloc.py` decide which step is next, `direct_carrier.py` takes it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, TypeAlias

from kbtp.atomics import MASK64
from kbtp.blocks.counter import CounterForm, MaskedCounter, UnmaskedCounter
from kbtp.initiator.operations import Result, TakenBlock
from kbtp.limits import COUNTER_BYTES, ENTRY_BYTES, RING_ORDER_MAX, RING_ORDER_MIN, SLOT_BYTES
from kbtp.types import BlockOffset, Feature, Generation, Handle, Stag
from kbtp.wire import HelloAck

_TAGGED_OFFSETS = MASK64 + 1


# --- what HELLO_ACK says -----------------------------------------------------------------------


class DirectTerms:
    """Where the target's structures lie (profile 2)."""

    def __init__(self, ack: HelloAck) -> None:
        self.ack = ack

    def entry_to(self, handle: Handle) -> int | None:
        """Tagged offset of the handle's entry (draft 3.2); None if the table has none."""
        position = (handle - self.ack.table_base_handle) & MASK64
        return self.ack.table_offset + ENTRY_BYTES * position if position < self.ack.table_handles else None

    def holds(self, block_offset: BlockOffset) -> bool:
        """Whether this is one of the pool's blocks (profile 2, HELLO_ACK at 144)."""
        position = block_offset - self.ack.pool_base
        return 0 <= position < self.ack.pool_blocks * self.ack.block_size and position % self.ack.block_size == 0

    def owns(self, handle: Handle) -> bool:
        """Whether the handle is in the session's own range."""
        return (handle - self.ack.first_handle) & MASK64 < self.ack.handle_count

    def counter(self) -> CounterForm:
        """The form of Head: masked (draft 3.3) if that was granted, else unmasked (draft 9.2)."""
        masked = self.ack.granted_features & Feature.MASKED_ATOMICS
        return MaskedCounter(self.ack.ring_order) if masked else UnmaskedCounter(self.ack.ring_order)

    @property
    def ticket_timeout_s(self) -> float:
        return self.ack.ticket_timeout_ms / 1000


def direct_checks(ack: HelloAck) -> list[tuple[str, bool]]:
    """Profile 2: each field of a HELLO_ACK that goes with a direct mode, and whether it can be what it is."""
    load = bool(ack.granted_features & Feature.DIRECT_LOAD)
    alloc = bool(ack.granted_features & Feature.DIRECT_ALLOC)
    checks = [
        ("Table STag", bool(ack.table_stag) is load),
        ("Pool STag", bool(ack.pool_stag) is load),
        ("Partition STag", bool(ack.partition_stag) is alloc),
        ("Ring STag", bool(ack.ring_stag) is alloc),
        ("Head STag", bool(ack.head_stag) is alloc),
        ("Ticket Timeout", bool(ack.ticket_timeout_ms) is alloc),
    ]
    if load:
        checks.append(("Table Offset", ack.table_offset + ENTRY_BYTES * ack.table_handles <= _TAGGED_OFFSETS))
    if load or alloc:
        checks.append(("Pool Base", ack.pool_base + ack.pool_blocks * ack.block_size <= _TAGGED_OFFSETS))
    if not alloc:
        return [*checks, ("Ring Order", ack.ring_order == 0)]
    slots = 1 << ack.ring_order
    return [
        *checks,
        ("Ring Order", RING_ORDER_MIN <= ack.ring_order <= RING_ORDER_MAX),
        ("Allocation Quota", 1 <= ack.allocation_quota <= slots),
        ("Ring Offset", ack.ring_offset + SLOT_BYTES * slots <= _TAGGED_OFFSETS),
        ("Head Offset", ack.head_offset % COUNTER_BYTES == 0),
    ]


# --- steps -------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ReadStructure:
    """RDMA Read of the 16 octets of a table entry or a ring slot."""

    stag: Stag
    to: int


@dataclass(frozen=True, slots=True)
class ReadBlock:
    """RDMA Read of a block into the caller's buffer."""

    stag: Stag
    to: int
    length_bytes: int


@dataclass(frozen=True, slots=True)
class TakeTicket:
    """FetchAdd on Head."""

    stag: Stag
    to: int
    add_data: int
    add_mask: int


@dataclass(frozen=True, slots=True)
class Wait:
    """`waited` is next, not before `until_s`."""

    until_s: float


@dataclass(frozen=True, slots=True)
class BindTaken:
    """RDMA Write of the caller's data, unless it is there already, and BIND behind it."""

    taken: TakenBlock


@dataclass(frozen=True, slots=True)
class BindSpare:
    """BIND of nothing to a spare handle, so that FREE can give the block back (profile 6.11)."""

    taken: TakenBlock


@dataclass(frozen=True, slots=True)
class FreeSpare:
    """FREE of that handle."""

    handle: Handle
    generation: Generation


@dataclass(frozen=True, slots=True)
class UseRequest:
    """The operation is left to LOAD or ALLOC_STORE."""

    direct_alloc_is_over: bool = False


@dataclass(frozen=True, slots=True)
class Ended:
    """The operation ends with `result`."""

    result: Result
    direct_alloc_is_over: bool = False


ReadStep: TypeAlias = ReadStructure | ReadBlock | TakeTicket
"""What counts against the stream's read depth (profile 3 "RDMA Reads")."""

Step: TypeAlias = ReadStep | Wait | BindTaken | BindSpare | FreeSpare | UseRequest | Ended


class Sequence(Protocol):
    """What both sequences are to whoever takes their steps: each method says which is next."""

    def begin(self) -> Step: ...

    def posted(self, now_s: float) -> None:
        """The read or FetchAdd that is next is about to be posted."""
        ...

    def completed(self, octets: bytes, value: int, now_s: float) -> Step:
        """It is done: `octets` are those of a `ReadStructure`, `value` is what FetchAdd returned."""
        ...
