"""The block pool (draft 3.1): equally sized blocks, each known by its Block Offset."""

from __future__ import annotations

import numpy as np

from kbtp.atomics import MASK64
from kbtp.blocks.memory import Memory, octets_of
from kbtp.errors import ApiMisuse
from kbtp.limits import (
    BLOCK_SIZE_MAX_BYTES,
    BLOCK_SIZE_MIN_BYTES,
    BLOCK_SIZE_MULTIPLE_BYTES,
    POOL_BASE_ALIGN_BYTES,
    RING_ORDER_MAX,
)
from kbtp.types import BlockOffset


class Pool:
    """`block_count` blocks of `block_size_bytes` in `memory`.

    Block k has the Block Offset `pool_base + k * block_size_bytes` (profile 2, HELLO_ACK at 144), which is also its
    Tagged Offset when the memory is registered with `base_to=pool_base`.

    Raises `ApiMisuse` if the numbers are outside profile 5 or the memory is not exactly that large and writable.
    """

    def __init__(self, memory: Memory, block_size_bytes: int, block_count: int, pool_base: int) -> None:
        if not BLOCK_SIZE_MIN_BYTES <= block_size_bytes <= BLOCK_SIZE_MAX_BYTES:
            raise ApiMisuse(
                f"block size {block_size_bytes}: {BLOCK_SIZE_MIN_BYTES} to {BLOCK_SIZE_MAX_BYTES} octets expected"
            )
        if block_size_bytes % BLOCK_SIZE_MULTIPLE_BYTES:
            raise ApiMisuse(f"block size {block_size_bytes}: a multiple of {BLOCK_SIZE_MULTIPLE_BYTES} octets expected")
        if not 1 <= block_count <= 1 << RING_ORDER_MAX:
            raise ApiMisuse(f"block count {block_count}: 1 to {1 << RING_ORDER_MAX} expected")
        length_bytes = block_size_bytes * block_count
        if pool_base % POOL_BASE_ALIGN_BYTES or not 0 <= pool_base <= MASK64 + 1 - length_bytes:
            raise ApiMisuse(
                f"pool base {pool_base:#x}: a multiple of {POOL_BASE_ALIGN_BYTES} expected, "
                f"with {length_bytes} octets from there below 2^64"
            )
        self._octets = octets_of(memory, "pool", length_bytes)
        self._length_bytes = length_bytes
        self.block_size_bytes = block_size_bytes
        self.block_count = block_count
        self.pool_base = pool_base

    def offset_of(self, index: int) -> BlockOffset:
        """Block Offset of block `index`, 0 to block_count - 1."""
        if not 0 <= index < self.block_count:
            raise ApiMisuse(f"block index {index}: 0 to {self.block_count - 1} expected")
        return self.pool_base + index * self.block_size_bytes

    def contains(self, block_offset: BlockOffset) -> bool:
        """Whether this is the Block Offset of one of the blocks. Any integer may be asked about."""
        position = block_offset - self.pool_base
        return 0 <= position < self._length_bytes and position % self.block_size_bytes == 0

    def position(self, block_offset: BlockOffset) -> int:
        """Octets from the start of the memory to the block. Raises `ApiMisuse` if it is none of the pool's."""
        if not self.contains(block_offset):
            raise ApiMisuse(f"block offset {block_offset:#x} is not a block of this pool")
        return block_offset - self.pool_base

    def index_of(self, block_offset: BlockOffset) -> int:
        """The reverse of `offset_of`. Raises `ApiMisuse` if it is none of the pool's."""
        return self.position(block_offset) // self.block_size_bytes

    def view(self, block_offset: BlockOffset, length_bytes: int) -> memoryview:
        """The first `length_bytes` octets of the block, writable, in place."""
        if not 0 <= length_bytes <= self.block_size_bytes:
            raise ApiMisuse(f"length {length_bytes}: 0 to {self.block_size_bytes} octets expected")
        position = self.position(block_offset)
        return self._octets[position : position + length_bytes]

    def clear(self, block_offset: BlockOffset) -> None:
        """Overwrite the whole block with zeros (draft 6.4: before it may go to another trust domain)."""
        np.frombuffer(self.view(block_offset, self.block_size_bytes), dtype=np.uint8).fill(0)
