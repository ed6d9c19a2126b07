"""The structures a target keeps its blocks in (draft 3): pool, block table, free-block ring, quotas, handle ranges.

Pure structures over memory the caller gives, which may be registered with an RNIC. `BlockStore` is their one owner.
"""

from kbtp.blocks.handles import HandleRange, HandleRanges
from kbtp.blocks.partition import Partitions, RingPartition
from kbtp.blocks.pool import Pool
from kbtp.blocks.quota import QuotaLedger
from kbtp.blocks.ring import CounterForm, FreeBlockRing, MaskedCounter, UnmaskedCounter, ring_order_for
from kbtp.blocks.store import BlockStore, Pin
from kbtp.blocks.table import BlockTable, Entry, next_generation

__all__ = [
    "BlockStore",
    "BlockTable",
    "CounterForm",
    "Entry",
    "FreeBlockRing",
    "HandleRange",
    "HandleRanges",
    "MaskedCounter",
    "Partitions",
    "Pin",
    "Pool",
    "QuotaLedger",
    "RingPartition",
    "UnmaskedCounter",
    "next_generation",
    "ring_order_for",
]
