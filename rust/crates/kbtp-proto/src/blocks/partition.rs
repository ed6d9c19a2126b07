//! Parts of the pool that each belong to one initiator, with a ring of its own (draft 3.4, profile 6.10).
//!
//! An initiator that allocates directly (draft 6.6) reads the slots of its ring and moves its Head. So neither the blocks
//! nor the ring are shared: whatever it does to Head, every ticket there is its own.

use std::collections::hash_map::Entry as Place;
use std::fmt;

use super::counter::{CounterForm, ring_order_for};
use super::pool::Pool;
use super::quota::HolderId;
use super::ring::{FreeBlockRing, RingMemory};
use super::store::StoreConfig;
use crate::own_maps::OwnMap;
use crate::types::{ApiMisuse, BlockOffset, PeerMisbehaved, Ticket};

/// Why a step on a partition was refused.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum PartitionError {
    /// A call out of turn.
    Misuse(ApiMisuse),
    /// Head is not by rule (profile 6.9).
    Misbehaved(PeerMisbehaved),
}

impl From<ApiMisuse> for PartitionError {
    fn from(error: ApiMisuse) -> Self {
        Self::Misuse(error)
    }
}

impl From<PeerMisbehaved> for PartitionError {
    fn from(error: PeerMisbehaved) -> Self {
        Self::Misbehaved(error)
    }
}

/// Which blocks of the pool a partition is made of.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PartitionBlocks {
    /// The first of them; block 0 is that at Pool Base.
    pub first: u32,
    /// How many.
    pub count: u32,
}

impl PartitionBlocks {
    /// n of a ring for them (profile 2, HELLO_ACK at 52).
    ///
    /// # Errors
    ///
    /// For more than a ring takes.
    pub fn ring_order(&self) -> Result<u32, ApiMisuse> {
        ring_order_for(self.count)
    }
}

/// Blocks of one holder, in a ring of its own.
pub struct Partition {
    blocks: Pool,
    pub(super) ring: FreeBlockRing,
}

impl fmt::Debug for Partition {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Partition({:?}, {} free)", self.blocks, self.free_count())
    }
}

impl Partition {
    /// The blocks it is made of.
    #[must_use]
    pub fn blocks(&self) -> &Pool {
        &self.blocks
    }

    /// Blocks in the ring, whether or not a ticket was taken for them.
    #[must_use]
    pub fn free_count(&self) -> u32 {
        self.ring.free_count()
    }

    /// See `FreeBlockRing::audit_head`.
    #[allow(clippy::missing_errors_doc, reason = "said there")]
    pub fn audit_head(&mut self) -> Result<Ticket, PeerMisbehaved> {
        self.ring.audit_head()
    }

    /// See `FreeBlockRing::restore_head`.
    pub fn restore_head(&mut self) {
        self.ring.restore_head();
    }

    /// See `FreeBlockRing::outstanding_tickets`.
    #[allow(clippy::missing_errors_doc, reason = "said there")]
    pub fn outstanding_tickets(&mut self) -> Result<Vec<Ticket>, PeerMisbehaved> {
        self.ring.outstanding_tickets()
    }

    /// See `FreeBlockRing::read_slot`.
    #[must_use]
    pub fn read_slot(&self, ticket: Ticket) -> Option<BlockOffset> {
        self.ring.read_slot(ticket)
    }
}

/// Those there are, in the last blocks of the pool. Which blocks a holder gets is decided in Python, by
/// `kbtp.blocks.HandleRanges`.
pub(super) struct Partitions {
    pool: Pool,
    /// Of the blocks that are set aside.
    first_block: u32,
    masked: bool,
    first_ticket: Ticket,
    by_holder: OwnMap<HolderId, Partition>,
}

impl Partitions {
    pub(super) fn new(pool: Pool, config: &StoreConfig) -> Self {
        Self {
            pool,
            first_block: config.block_count.saturating_sub(config.direct_blocks),
            masked: config.masked_counters,
            first_ticket: config.first_ticket,
            by_holder: OwnMap::default(),
        }
    }

    /// `blocks` are the holder's, all free; `memory` is that of a ring of their `ring_order`.
    pub(super) fn open(
        &mut self,
        holder: HolderId,
        blocks: PartitionBlocks,
        memory: RingMemory,
    ) -> Result<(), ApiMisuse> {
        let part = self.pool.part(blocks.first, blocks.count)?;
        let mut others = self.by_holder.values().map(|partition| &partition.blocks);
        if blocks.first < self.first_block || others.any(|other| meet(other, &part)) {
            let PartitionBlocks { first, count } = blocks;
            return Err(ApiMisuse(format!(
                "{count} blocks from {first} on are not set aside, or another partition's"
            )));
        }
        let order = blocks.ring_order()?;
        let form = if self.masked {
            CounterForm::masked(order)?
        } else {
            CounterForm::unmasked(order)?
        };
        let Place::Vacant(place) = self.by_holder.entry(holder) else {
            return Err(ApiMisuse(format!("holder {holder} has a partition already")));
        };
        let ring = FreeBlockRing::new(memory, form, part, self.first_ticket)?;
        place.insert(Partition { blocks: part, ring });
        Ok(())
    }

    /// Whether this block is one that partitions are made of.
    pub(super) fn set_aside(&self, block_offset: BlockOffset) -> bool {
        self.pool
            .index_of(block_offset)
            .is_some_and(|index| index >= self.first_block)
    }

    pub(super) fn of(&mut self, holder: HolderId) -> Option<&mut Partition> {
        self.by_holder.get_mut(&holder)
    }

    /// None for a holder without a partition. Called for every allocation and every FREE, most often where there are none.
    pub(super) fn ring_of(&mut self, holder: HolderId) -> Option<&mut FreeBlockRing> {
        if self.by_holder.is_empty() {
            return None;
        }
        self.of(holder).map(|partition| &mut partition.ring)
    }

    /// Tickets that the holder has taken by itself and not bound, as Head says.
    pub(super) fn unbound_count(&mut self, holder: HolderId) -> u32 {
        self.ring_of(holder).map_or(0, |ring| ring.unbound_count())
    }

    /// It is no more. Refused while a block of it is out, or a ticket is.
    pub(super) fn close(&mut self, holder: HolderId) -> Result<Partition, ApiMisuse> {
        let Place::Occupied(place) = self.by_holder.entry(holder) else {
            return Err(ApiMisuse(format!("holder {holder} has no partition")));
        };
        let Partition { blocks, ring } = place.get();
        if ring.free_count() != blocks.block_count() || ring.unbound_count() > 0 {
            return Err(ApiMisuse(format!(
                "the partition of holder {holder} has blocks or tickets out"
            )));
        }
        Ok(place.remove())
    }

    pub(super) fn free_count(&self) -> u32 {
        self.by_holder.values().map(Partition::free_count).sum()
    }
}

fn meet(one: &Pool, other: &Pool) -> bool {
    one.contains(other.pool_base()) || other.contains(one.pool_base())
}
