"""HELLO_ACKs that grant direct modes, and table entries and ring slots as octets."""

from __future__ import annotations

from typing import Any

from kbtp.types import EntryFlag, Feature
from kbtp.wire import HelloAck
from kbtp.wire.layouts import RING_SLOT, TABLE_ENTRY

BLOCK_BYTES = 4096
POOL_BLOCKS = 16
POOL_BASE = 65536
TABLE_BASE = 1000
TABLE_STAG, POOL_STAG, PARTITION_STAG, RING_STAG, HEAD_STAG = 0x11, 0x22, 0x33, 0x44, 0x55
TICKET_TIMEOUT_S = 1.0
EMPTY = 0xFFFF_FFFF_FFFF_FFFF
VALID, SEALED = EntryFlag.VALID, EntryFlag.SEALED

ALL_DIRECT = Feature.DIRECT_LOAD | Feature.DIRECT_ALLOC | Feature.MASKED_ATOMICS

DIRECT_LOAD_FIELDS: dict[str, Any] = {
    "table_offset": 0x100,
    "table_stag": TABLE_STAG,
    "pool_stag": POOL_STAG,
}
DIRECT_ALLOC_FIELDS: dict[str, Any] = {
    "ticket_timeout_ms": int(1000 * TICKET_TIMEOUT_S),
    "ring_order": 2,
    "partition_stag": PARTITION_STAG,
    "ring_stag": RING_STAG,
    "ring_offset": 0x40,
    "head_offset": 0x8,
    "head_stag": HEAD_STAG,
}
FIELDS: dict[str, Any] = {
    "granted_features": Feature.INVALIDATE | ALL_DIRECT,
    "block_size": BLOCK_BYTES,
    "pool_blocks": POOL_BLOCKS,
    "allocation_quota": 4,
    "request_credits": 4,
    "max_message": 1024,
    "first_handle": TABLE_BASE,
    "handle_count": 8,
    "table_base_handle": TABLE_BASE,
    "table_handles": 64,
    "pool_base": POOL_BASE,
    **DIRECT_LOAD_FIELDS,
    **DIRECT_ALLOC_FIELDS,
}


def direct_ack(**changes: Any) -> HelloAck:
    return HelloAck(0, **{**FIELDS, **changes})


def block(number: int) -> int:
    """Block Offset of a block of the pool."""
    return POOL_BASE + BLOCK_BYTES * number


def entry(
    generation: int = 2, length: int = 100, block_offset: int = POOL_BASE, flags: EntryFlag = VALID | SEALED
) -> bytes:
    return TABLE_ENTRY.pack(flags, generation, length, block_offset)


def slot(ticket: int, block_offset: int) -> bytes:
    return RING_SLOT.pack(ticket, block_offset)
