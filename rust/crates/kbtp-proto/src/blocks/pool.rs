//! The block pool (draft 3.1): equally sized blocks, each known by its Block Offset.

use crate::limits::{
    BLOCK_SIZE_MAX_BYTES, BLOCK_SIZE_MIN_BYTES, BLOCK_SIZE_MULTIPLE_BYTES, POOL_BASE_ALIGN_BYTES, RING_ORDER_MAX,
};
use crate::types::{ApiMisuse, BlockOffset};

/// The arithmetic of a pool. The octets are its owner's.
///
/// Block k has the Block Offset `pool_base + k * block_size_bytes` (profile 2, HELLO_ACK at 144), which is also its
/// Tagged Offset when the memory is registered with `base_to = pool_base`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Pool {
    block_size_bytes: u32,
    block_count: u32,
    pool_base: u64,
}

impl Pool {
    /// `block_count` blocks of `block_size_bytes`.
    ///
    /// # Errors
    ///
    /// For numbers outside profile 5.
    pub fn new(block_size_bytes: u32, block_count: u32, pool_base: u64) -> Result<Self, ApiMisuse> {
        if !(BLOCK_SIZE_MIN_BYTES..=BLOCK_SIZE_MAX_BYTES).contains(&block_size_bytes) {
            return Err(ApiMisuse(format!(
                "block size {block_size_bytes}: {BLOCK_SIZE_MIN_BYTES} to {BLOCK_SIZE_MAX_BYTES} octets expected"
            )));
        }
        if !block_size_bytes.is_multiple_of(BLOCK_SIZE_MULTIPLE_BYTES) {
            return Err(ApiMisuse(format!(
                "block size {block_size_bytes}: a multiple of {BLOCK_SIZE_MULTIPLE_BYTES} octets expected"
            )));
        }
        if !(1..=1 << RING_ORDER_MAX).contains(&block_count) {
            return Err(ApiMisuse(format!(
                "block count {block_count}: 1 to {} expected",
                1 << RING_ORDER_MAX
            )));
        }
        let length_bytes = u64::from(block_size_bytes) * u64::from(block_count);
        // The last octet, not the one behind it: that may be 2^64.
        if !pool_base.is_multiple_of(POOL_BASE_ALIGN_BYTES) || pool_base.checked_add(length_bytes - 1).is_none() {
            return Err(ApiMisuse(format!(
                "pool base {pool_base:#x}: a multiple of {POOL_BASE_ALIGN_BYTES} expected, with {length_bytes} octets \
                 from there below 2^64"
            )));
        }
        Ok(Self {
            block_size_bytes,
            block_count,
            pool_base,
        })
    }

    /// Some of the blocks: `block_count` from block `first` on, under the Block Offsets they have here.
    ///
    /// # Errors
    ///
    /// For no blocks, and for any that are not in here.
    pub fn part(&self, first: u32, block_count: u32) -> Result<Self, ApiMisuse> {
        let ends_inside = first
            .checked_add(block_count)
            .is_some_and(|end| end <= self.block_count);
        match self.offset_of(first) {
            Some(pool_base) if ends_inside && block_count > 0 => Ok(Self {
                block_count,
                pool_base,
                ..*self
            }),
            _ => Err(ApiMisuse(format!(
                "{block_count} blocks from {first} on: 1 to {} expected, and all in the pool",
                self.block_count
            ))),
        }
    }

    /// Of each block.
    #[must_use]
    pub fn block_size_bytes(&self) -> u32 {
        self.block_size_bytes
    }

    /// How many blocks.
    #[must_use]
    pub fn block_count(&self) -> u32 {
        self.block_count
    }

    /// Block Offset of block 0.
    #[must_use]
    pub fn pool_base(&self) -> u64 {
        self.pool_base
    }

    /// Of all blocks together.
    #[must_use]
    pub fn length_bytes(&self) -> u64 {
        u64::from(self.block_size_bytes) * u64::from(self.block_count)
    }

    /// Block Offset of block `index`; None if there is none.
    #[must_use]
    pub fn offset_of(&self, index: u32) -> Option<BlockOffset> {
        (index < self.block_count).then(|| self.pool_base + u64::from(index) * u64::from(self.block_size_bytes))
    }

    /// Whether this is the Block Offset of one of the blocks.
    #[must_use]
    pub fn contains(&self, block_offset: BlockOffset) -> bool {
        self.position(block_offset).is_some()
    }

    /// Octets from the start of the memory to the block; None if it is none of the pool's.
    #[must_use]
    pub fn position(&self, block_offset: BlockOffset) -> Option<u64> {
        let position = block_offset.checked_sub(self.pool_base)?;
        let is_block = position < self.length_bytes() && position.is_multiple_of(self.block_size_bytes.into());
        is_block.then_some(position)
    }

    /// The reverse of `offset_of`; None if it is none of the pool's.
    #[must_use]
    pub fn index_of(&self, block_offset: BlockOffset) -> Option<u32> {
        // Below block_count, which is 32 bits.
        self.position(block_offset)
            .map(|position| (position / u64::from(self.block_size_bytes)) as u32)
    }
}
