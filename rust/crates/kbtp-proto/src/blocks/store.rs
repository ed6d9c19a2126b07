//! The one owner of block table, free-block ring, quotas and handle ranges, and of the pins between them.
//!
//! Everything a target changes in its block structures goes through here, so that no two writers ever meet. Nothing
//! here knows of sessions or messages: what may be done is decided by the caller, who has checked the entry first. A
//! call out of turn is refused and changes nothing.
//!
//! A block is always in one place:
//!
//! ```text
//! free (in its ring) --begin_alloc_store--> being filled --commit--> bound --begin_free--> free
//!                     <------- abort ------                        /    \-- while pinned: waiting --/
//!                     ------------------ bind_ticket -------------/
//! ```
//!
//! There is a ring that most holders share, and one for each holder with a partition of its own (draft 3.4, 6.6): all
//! that it allocates comes from there and goes back there.

mod direct;

use std::sync::Arc;
use std::time::Instant;

use super::counter::CounterForm;
use super::handles::{AssignedRanges, DomainId, HandleRange};
use super::partition::Partitions;
use super::pins::{FinishedFree, FreeToken, OwnerId, Pin, PinnedFree, Pins};
use super::pool::Pool;
use super::quota::{HolderId, QuotaLedger};
use super::ring::{FreeBlockRing, RingMemory};
use super::table::{BlockTable, Entry, check_writable};
use super::words::Words;
use crate::known_crcs::KnownCrcs;
use crate::own_maps::OwnMap;
use crate::types::{ApiMisuse, BlockOffset, Handle, Status, Ticket};

pub use direct::Binding;

/// Overwrites the given octets of the pool's memory, counted from its start, with zeros.
pub type ClearBlock = Box<dyn FnMut(u64, u32) + Send>;

/// What `begin_free` did.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Freeing {
    /// The FREE is complete; the entry as unbound.
    Freed(Entry),
    /// The FREE completes out of the `end_load` that lets the last pin go.
    Waiting,
}

/// What `begin_alloc_store` did.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Allocation {
    /// This block is to be filled.
    Block(BlockOffset),
    /// NO_SPACE or TARGET_ERROR, and nothing has changed.
    Refused(Status),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Filling {
    block_offset: BlockOffset,
    holder: HolderId,
}

/// The numbers of a store; see `kbtp.blocks.BlockStore.create`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[allow(missing_docs, reason = "the names say it")]
pub struct StoreConfig {
    pub block_size_bytes: u32,
    pub block_count: u32,
    pub pool_base: u64,
    pub table_base_handle: Handle,
    pub table_handles: u64,
    /// Of the shared ring.
    pub ring_order: u32,
    pub first_ticket: Ticket,
    /// The last of the blocks are for partitions, all others in the shared ring.
    pub direct_blocks: u32,
    /// Whether the counters that peers move have the form of draft 3.3, or else that of 9.2.
    pub masked_counters: bool,
}

impl StoreConfig {
    /// How many words the table needs.
    #[must_use]
    pub fn table_words(&self) -> u64 {
        BlockTable::words_for(self.table_handles)
    }

    /// How many words the slots of the shared ring need.
    ///
    /// # Errors
    ///
    /// For an order outside profile 5.
    pub fn slot_words(&self) -> Result<u64, ApiMisuse> {
        Ok(FreeBlockRing::slot_words_for(CounterForm::masked(self.ring_order)?))
    }
}

/// Where table and shared ring are.
pub struct StoreMemory {
    /// `StoreConfig::table_words` many.
    pub table: Box<dyn Words>,
    /// `StoreConfig::slot_words` many, and the counters.
    pub ring: RingMemory,
}

/// See the head of this module.
pub struct BlockStore {
    pool: Pool,
    table: BlockTable,
    shared_ring: FreeBlockRing,
    partitions: Partitions,
    quotas: QuotaLedger,
    ranges: AssignedRanges,
    clear_on_free: Option<ClearBlock>,
    filling: OwnMap<Handle, Filling>,
    pins: Pins,
    /// Of sealed blocks that were loaded.
    known_crcs: OwnMap<BlockOffset, Arc<KnownCrcs>>,
}

#[allow(clippy::missing_errors_doc, reason = "for calls out of turn")]
impl BlockStore {
    /// Everything is unbound and free, and all quotas and handles are still to give.
    ///
    /// `clear_on_free`: blocks are overwritten with zeros before they return to the ring (draft 6.4, profile 3 "Trust
    /// domain"), whether they were bound or an allocation came to nothing.
    ///
    /// Refuses numbers outside profile 5 and memory that does not fit them.
    pub fn new(
        config: &StoreConfig,
        memory: StoreMemory,
        clear_on_free: Option<ClearBlock>,
    ) -> Result<Self, ApiMisuse> {
        let pool = Pool::new(config.block_size_bytes, config.block_count, config.pool_base)?;
        let form = CounterForm::masked(config.ring_order)?;
        let table = BlockTable::new(memory.table, config.table_base_handle, config.table_handles)?;
        let shared = pool.part(0, config.block_count.saturating_sub(config.direct_blocks))?;
        Ok(Self {
            pool,
            ranges: AssignedRanges::new(table.handles()),
            table,
            shared_ring: FreeBlockRing::new(memory.ring, form, shared, config.first_ticket)?,
            partitions: Partitions::new(pool, config),
            quotas: QuotaLedger::new(shared.block_count())?,
            clear_on_free,
            filling: OwnMap::default(),
            pins: Pins::default(),
            known_crcs: OwnMap::default(),
        })
    }

    // --- looking ---

    /// Where the blocks are.
    #[must_use]
    pub fn pool(&self) -> &Pool {
        &self.pool
    }

    /// The entry of a handle that is in the table.
    pub fn read(&self, handle: Handle) -> Result<Entry, ApiMisuse> {
        self.table.read(handle)
    }

    /// Blocks that wait in a ring.
    #[must_use]
    pub fn free_blocks(&self) -> u32 {
        self.shared_ring.free_count() + self.partitions.free_count()
    }

    /// Those of `range` that are bound now, for instance to free all that an identity owns.
    pub fn bound_handles(&self, range: HandleRange) -> Result<Vec<Handle>, ApiMisuse> {
        Ok(self.table.bound_handles(range)?.collect())
    }

    /// How many of `range` are bound now (profile 2, HELLO_ACK at 140).
    pub fn bound_count(&self, range: HandleRange) -> Result<u64, ApiMisuse> {
        Ok(self.table.bound_handles(range)?.count() as u64)
    }

    /// What each holder may hold and holds.
    #[must_use]
    pub fn quotas(&self) -> &QuotaLedger {
        &self.quotas
    }

    /// To grant and release. Charges and credits are the store's own.
    pub fn quotas_mut(&mut self) -> &mut QuotaLedger {
        &mut self.quotas
    }

    // --- whose handles are whose (profile 3) ---

    /// `range` belongs to an initiator of `domain` now; it lies in the table and meets no other.
    pub fn assign_range(&mut self, range: HandleRange, domain: DomainId) -> Result<(), ApiMisuse> {
        self.ranges.assign(range, domain)
    }

    /// It belongs to nobody any more.
    pub fn release_range(&mut self, range: HandleRange) -> Result<(), ApiMisuse> {
        self.ranges.release(range)
    }

    /// Of the initiator that `handle` was assigned to; None if it was assigned to none.
    #[must_use]
    pub fn domain_of(&self, handle: Handle) -> Option<DomainId> {
        self.ranges.domain_of(handle)
    }

    // --- LOAD ---

    /// Pin the block of a VALID entry. Until `end_load` its octets are no other block's (profile 6.1).
    pub fn begin_load(&mut self, handle: Handle, owner: OwnerId) -> Result<Pin, ApiMisuse> {
        let entry = self.table.read(handle)?;
        if !entry.valid() {
            return Err(ApiMisuse(format!("handle {handle:#x} is not bound")));
        }
        Ok(self.pins.pin(&entry, owner))
    }

    /// The last octet has left the block, or never will. The last pin of a freed block completes its FREE.
    #[must_use = "somebody waits for the FREE"]
    pub fn end_load(&mut self, pin: &Pin) -> Result<Option<FinishedFree>, ApiMisuse> {
        let finished = self.pins.unpin(pin)?;
        if let Some(finished) = finished {
            self.return_block(pin.block_offset, finished.holder)?;
        }
        Ok(finished)
    }

    /// Whether the octets of the block of `entry` stay as they are until it is freed: not those of a block that is not
    /// sealed, nor of a partition's, sealed or not, for the Partition STag of its holder reaches it still (draft 6.6).
    #[must_use]
    pub fn stays_still(&self, entry: &Entry) -> bool {
        entry.sealed() && !self.partitions.set_aside(entry.block_offset)
    }

    /// The CRCs of the block of `entry`, which everybody who sends it shares until it is freed; None if it does not stay
    /// still until then.
    pub fn known_crcs(&mut self, entry: &Entry) -> Option<Arc<KnownCrcs>> {
        self.stays_still(entry)
            .then(|| Arc::clone(self.known_crcs.entry(entry.block_offset).or_default()))
    }

    // --- ALLOC_STORE ---

    /// Draft 6.3 steps 1 and 2: one unit of quota, then a block, for a handle that is not bound.
    ///
    /// NO_SPACE if the quota is reached, found before a ticket is taken (profile 6.8); tickets that the holder itself has
    /// taken and not bound count (draft 3.4). TARGET_ERROR if the ring has no block ready all the same: its slot still
    /// holds one that is another ticket's.
    pub fn begin_alloc_store(&mut self, handle: Handle, holder: HolderId) -> Result<Allocation, ApiMisuse> {
        self.check_bindable(handle)?;
        if !self.quotas.charge(holder, self.partitions.unbound_count(holder))? {
            return Ok(Allocation::Refused(Status::NoSpace));
        }
        let Some(block_offset) = self.ring_of(holder).allocate() else {
            self.quotas.credit(holder)?;
            // The holder itself may have taken the last ticket meanwhile.
            let reached = self.quotas.is_reached(holder, self.partitions.unbound_count(holder));
            let status = if reached { Status::NoSpace } else { Status::TargetError };
            return Ok(Allocation::Refused(status));
        };
        self.filling.insert(handle, Filling { block_offset, holder });
        Ok(Allocation::Block(block_offset))
    }

    /// Draft 6.3 step 4: the data is in the block; bind it.
    pub fn commit_alloc_store(
        &mut self,
        handle: Handle,
        block_offset: BlockOffset,
        data_length: u32,
        seal: bool,
    ) -> Result<Entry, ApiMisuse> {
        if self.filling.get(&handle).map(|filling| filling.block_offset) != Some(block_offset) {
            return Err(ApiMisuse(format!(
                "handle {handle:#x} is not being bound to block offset {block_offset:#x}"
            )));
        }
        self.check_length(data_length)?;
        let entry = self.table.bind(handle, block_offset, data_length, seal)?;
        self.filling.remove(&handle);
        Ok(entry)
    }

    /// The data will not come: the block returns to the ring, the unit to the quota (profile 6.5).
    pub fn abort_alloc_store(
        &mut self,
        handle: Handle,
        block_offset: BlockOffset,
        holder: HolderId,
    ) -> Result<(), ApiMisuse> {
        if self.filling.get(&handle) != Some(&Filling { block_offset, holder }) {
            return Err(ApiMisuse(format!(
                "handle {handle:#x} is not being bound to block offset {block_offset:#x} by holder {holder}"
            )));
        }
        self.filling.remove(&handle);
        self.return_block(block_offset, holder)
    }

    // --- STORE ---

    /// Pin the block of an entry that may be written, so that data can be copied into it outside of any lock on this;
    /// `commit_store` and then `end_load` follow.
    pub fn begin_store(&mut self, handle: Handle, owner: OwnerId) -> Result<Pin, ApiMisuse> {
        check_writable(handle, &self.table.read(handle)?)?;
        self.begin_load(handle, owner)
    }

    /// Draft 6.2 steps 2 and 3 with data the caller has staged (profile 6.5): copy it, then update the entry.
    ///
    /// `copy` is given where the block is, in octets from the start of the pool's memory, and puts `data_length` octets
    /// there.
    pub fn commit_store(
        &mut self,
        handle: Handle,
        data_length: u32,
        seal: bool,
        copy: impl FnOnce(u64),
    ) -> Result<Entry, ApiMisuse> {
        let entry = self.table.read(handle)?;
        check_writable(handle, &entry)?;
        self.check_length(data_length)?;
        copy(self.position(entry.block_offset)?);
        self.table.update(handle, data_length, seal)
    }

    // --- FREE ---

    /// Draft 6.4: unbind at once; return the block when no LOAD is left in it (profile 6.1).
    ///
    /// If it has to wait, `token` comes back from the `end_load` that lets the last pin go. `take_overdue` names those
    /// who hold the pins when `deadline` has passed.
    pub fn begin_free(
        &mut self,
        handle: Handle,
        holder: HolderId,
        token: FreeToken,
        deadline: Option<Instant>,
    ) -> Result<Freeing, ApiMisuse> {
        let old = self.table.read(handle)?;
        if !old.valid() || self.quotas.usage(holder) == 0 {
            return Err(ApiMisuse(format!(
                "handle {handle:#x} is not bound, or not by holder {holder}"
            )));
        }
        let entry = self.table.unbind(handle)?;
        if !self.pins.holds(old.block_offset) {
            self.return_block(old.block_offset, holder)?;
            return Ok(Freeing::Freed(entry));
        }
        let finished = FinishedFree { entry, holder, token };
        self.pins.defer(old.block_offset, finished, deadline);
        Ok(Freeing::Waiting)
    }

    /// Blocks whose FREE waits, each with the pins it waits for, oldest first.
    #[must_use]
    pub fn pinned_frees(&self) -> Vec<PinnedFree> {
        self.pins.pinned_frees()
    }

    /// When `take_overdue` is to be called next.
    #[must_use]
    pub fn next_deadline(&self) -> Option<Instant> {
        self.pins.next_deadline()
    }

    /// Who holds the pins of the frees whose deadline has passed, each free once (profile 6.1): their streams end.
    pub fn take_overdue(&mut self, now: Instant) -> Vec<OwnerId> {
        self.pins.take_overdue(now)
    }

    // --- inside ---

    /// That its owner allocates from, and that its blocks go back to (profile 6.10).
    fn ring_of(&mut self, holder: HolderId) -> &mut FreeBlockRing {
        self.partitions.ring_of(holder).unwrap_or(&mut self.shared_ring)
    }

    fn return_block(&mut self, block_offset: BlockOffset, holder: HolderId) -> Result<(), ApiMisuse> {
        self.forget(block_offset)?;
        // Draft 3.4: quota comes back after the Tail ticket, so that a ticket on Head always has a block coming.
        self.ring_of(holder).free(block_offset)?;
        self.quotas.credit(holder)
    }

    /// What was in the block is nobody's any more.
    fn forget(&mut self, block_offset: BlockOffset) -> Result<(), ApiMisuse> {
        let position = self.position(block_offset)?;
        self.known_crcs.remove(&block_offset);
        if let Some(clear) = &mut self.clear_on_free {
            clear(position, self.pool.block_size_bytes());
        }
        Ok(())
    }

    fn check_bindable(&self, handle: Handle) -> Result<(), ApiMisuse> {
        if self.table.read(handle)?.valid() || self.filling.contains_key(&handle) {
            return Err(ApiMisuse(format!("handle {handle:#x} is bound or being bound")));
        }
        Ok(())
    }

    fn position(&self, block_offset: BlockOffset) -> Result<u64, ApiMisuse> {
        self.pool
            .position(block_offset)
            .ok_or_else(|| ApiMisuse(format!("block offset {block_offset:#x} is not a block of this pool")))
    }

    fn check_length(&self, length_bytes: u32) -> Result<(), ApiMisuse> {
        let most = self.pool.block_size_bytes();
        if length_bytes > most {
            return Err(ApiMisuse(format!("length {length_bytes}: 0 to {most} octets expected")));
        }
        Ok(())
    }
}
