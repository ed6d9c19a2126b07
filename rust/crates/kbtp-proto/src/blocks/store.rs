//! The one owner of block table, free-block ring, quotas and handle ranges, and of the pins between them.
//!
//! Everything a target changes in its block structures goes through here, so that no two writers ever meet. Nothing
//! here knows of sessions or messages: what may be done is decided by the caller, who has checked the entry first. A
//! call out of turn is refused and changes nothing.
//!
//! A block is always in one place:
//!
//! ```text
//! free (in the ring) --begin_alloc_store--> being filled --commit--> bound --begin_free--> free
//!                     <------- abort ------                             \-- while pinned: waiting --/
//! ```

use std::sync::Arc;
use std::time::Instant;

use smallvec::SmallVec;

use super::counter::CounterForm;
use super::handles::{AssignedRanges, DomainId, HandleRange};
use super::pool::Pool;
use super::quota::{HolderId, QuotaLedger};
use super::ring::{FreeBlockRing, RingMemory};
use super::table::{BlockTable, Entry, check_writable};
use super::words::Words;
use crate::known_crcs::KnownCrcs;
use crate::own_maps::OwnMap;
use crate::types::{ApiMisuse, BlockOffset, Generation, Handle, Status, Ticket};

/// Names who holds a pin: the stream that is to end if its LOAD does not drain (profile 6.1).
pub type OwnerId = u64;

/// Overwrites the given octets of the pool's memory, counted from its start, with zeros.
pub type ClearBlock = Box<dyn FnMut(u64, u32) + Send>;

/// One LOAD's hold on a block, from the read of the entry to the block's last octet sent (profile 6.1).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Pin {
    /// Given once.
    pub number: u64,
    /// The block that is held.
    pub block_offset: BlockOffset,
    /// Of the entry when it was read.
    pub data_length: u32,
    /// Of the entry when it was read.
    pub generation: Generation,
    /// As `begin_load` was given it.
    pub owner: OwnerId,
}

/// Who is to hear that a FREE which waited for pins has finished.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FreeToken {
    /// The RNIC's session on a stream.
    Stream {
        /// Which stream.
        stream: u64,
        /// Which of its requests; the number is the session's.
        request: u64,
    },
    /// A caller in Python; the number is its own.
    Python(u64),
}

/// What `begin_free` did.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Freeing {
    /// The FREE is complete; the entry as unbound.
    Freed(Entry),
    /// The FREE completes out of the `end_load` that lets the last pin go.
    Waiting,
}

/// A FREE that had to wait is complete: its block is in the ring, its holder credited.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FinishedFree {
    /// As unbound.
    pub entry: Entry,
    /// Whose block it was.
    pub holder: HolderId,
    /// Whom to tell.
    pub token: FreeToken,
}

/// What `begin_alloc_store` did.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Allocation {
    /// This block is to be filled.
    Block(BlockOffset),
    /// NO_SPACE or TARGET_ERROR, and nothing has changed.
    Refused(Status),
}

/// A block whose FREE waits.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PinnedFree {
    /// Which block.
    pub block_offset: BlockOffset,
    /// What it waits for, in the order in which they were made.
    pub pins: Vec<Pin>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Filling {
    block_offset: BlockOffset,
    holder: HolderId,
}

#[derive(Clone, Copy, Debug)]
struct WaitingFree {
    /// Counts the frees that waited.
    turn: u64,
    finished: FinishedFree,
    /// None: nobody is to be ended over it, or its readers have been named already.
    deadline: Option<Instant>,
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
    pub ring_order: u32,
    pub first_ticket: Ticket,
}

impl StoreConfig {
    /// How many words the table needs.
    #[must_use]
    pub fn table_words(&self) -> u64 {
        BlockTable::words_for(self.table_handles)
    }

    /// How many words the slots of the ring need.
    ///
    /// # Errors
    ///
    /// For an order outside profile 5.
    pub fn slot_words(&self) -> Result<u64, ApiMisuse> {
        Ok(FreeBlockRing::slot_words_for(CounterForm::masked(self.ring_order)?))
    }
}

/// Where table and ring are.
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
    ring: FreeBlockRing,
    quotas: QuotaLedger,
    ranges: AssignedRanges,
    clear_on_free: Option<ClearBlock>,
    filling: OwnMap<Handle, Filling>,
    pins: OwnMap<BlockOffset, SmallVec<[Pin; 2]>>,
    waiting_frees: OwnMap<BlockOffset, WaitingFree>,
    /// Of sealed blocks that were loaded.
    known_crcs: OwnMap<BlockOffset, Arc<KnownCrcs>>,
    pins_made: u64,
    frees_waited: u64,
}

#[allow(clippy::missing_errors_doc, reason = "for calls out of turn")]
impl BlockStore {
    /// Everything is unbound and free, and all quotas and handles are still to give. Counters have the masked form.
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
        Ok(Self {
            pool,
            ranges: AssignedRanges::new(table.handles()),
            table,
            ring: FreeBlockRing::new(memory.ring, form, pool, config.first_ticket)?,
            quotas: QuotaLedger::new(config.block_count)?,
            clear_on_free,
            filling: OwnMap::default(),
            pins: OwnMap::default(),
            waiting_frees: OwnMap::default(),
            known_crcs: OwnMap::default(),
            pins_made: 0,
            frees_waited: 0,
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

    /// Blocks that wait in the ring.
    #[must_use]
    pub fn free_blocks(&self) -> u32 {
        self.ring.free_count()
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
        let pin = Pin {
            number: self.pins_made,
            block_offset: entry.block_offset,
            data_length: entry.data_length,
            generation: entry.generation,
            owner,
        };
        self.pins_made += 1;
        self.pins.entry(pin.block_offset).or_default().push(pin);
        Ok(pin)
    }

    /// The last octet has left the block, or never will. The last pin of a freed block completes its FREE.
    #[must_use = "somebody waits for the FREE"]
    pub fn end_load(&mut self, pin: &Pin) -> Result<Option<FinishedFree>, ApiMisuse> {
        let held = self.pins.get_mut(&pin.block_offset);
        let found = held.and_then(|pins| pins.iter().position(|other| other == pin).map(|at| (pins, at)));
        let Some((pins, at)) = found else {
            return Err(ApiMisuse(format!("{pin:?} has ended already")));
        };
        pins.remove(at);
        if !pins.is_empty() {
            return Ok(None);
        }
        self.pins.remove(&pin.block_offset);
        let Some(waiting) = self.waiting_frees.remove(&pin.block_offset) else {
            return Ok(None);
        };
        self.return_block(pin.block_offset, waiting.finished.holder)?;
        Ok(Some(waiting.finished))
    }

    /// The CRCs of a sealed block, which everybody who sends it shares until it is freed.
    pub fn known_crcs(&mut self, block_offset: BlockOffset) -> Arc<KnownCrcs> {
        Arc::clone(self.known_crcs.entry(block_offset).or_default())
    }

    // --- ALLOC_STORE ---

    /// Draft 6.3 steps 1 and 2: one unit of quota, then a block, for a handle that is not bound.
    ///
    /// NO_SPACE if the quota is reached, found before a ticket is taken (profile 6.8). TARGET_ERROR if the ring has no
    /// block ready all the same: one that others hold a ticket for.
    pub fn begin_alloc_store(&mut self, handle: Handle, holder: HolderId) -> Result<Allocation, ApiMisuse> {
        if self.table.read(handle)?.valid() || self.filling.contains_key(&handle) {
            return Err(ApiMisuse(format!("handle {handle:#x} is bound or being bound")));
        }
        if !self.quotas.charge(holder)? {
            return Ok(Allocation::Refused(Status::NoSpace));
        }
        let Some(block_offset) = self.ring.allocate() else {
            self.quotas.credit(holder)?;
            return Ok(Allocation::Refused(Status::TargetError));
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
        self.known_crcs.remove(&block_offset);
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
        self.known_crcs.remove(&entry.block_offset);
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
        if !self.pins.contains_key(&old.block_offset) {
            self.return_block(old.block_offset, holder)?;
            return Ok(Freeing::Freed(entry));
        }
        let waiting = WaitingFree {
            turn: self.frees_waited,
            finished: FinishedFree { entry, holder, token },
            deadline,
        };
        self.frees_waited += 1;
        self.waiting_frees.insert(old.block_offset, waiting);
        Ok(Freeing::Waiting)
    }

    /// Blocks whose FREE waits, each with the pins it waits for, oldest first.
    #[must_use]
    pub fn pinned_frees(&self) -> Vec<PinnedFree> {
        let mut waiting: Vec<_> = self.waiting_frees.iter().collect();
        waiting.sort_unstable_by_key(|(_, free)| free.turn);
        waiting
            .into_iter()
            .map(|(&block_offset, _)| PinnedFree {
                block_offset,
                pins: self.pins_on(block_offset).collect(),
            })
            .collect()
    }

    /// When `take_overdue` is to be called next.
    #[must_use]
    pub fn next_deadline(&self) -> Option<Instant> {
        self.waiting_frees.values().filter_map(|free| free.deadline).min()
    }

    /// Who holds the pins of the frees whose deadline has passed, each free once (profile 6.1): their streams end.
    pub fn take_overdue(&mut self, now: Instant) -> Vec<OwnerId> {
        let mut overdue = Vec::new();
        for (&block_offset, free) in &mut self.waiting_frees {
            if free.deadline.is_some_and(|deadline| deadline <= now) {
                free.deadline = None;
                overdue.push(block_offset);
            }
        }
        let mut owners: Vec<_> = overdue
            .into_iter()
            .flat_map(|block_offset| self.pins_on(block_offset))
            .map(|pin| pin.owner)
            .collect();
        owners.sort_unstable();
        owners.dedup();
        owners
    }

    // --- inside ---

    fn pins_on(&self, block_offset: BlockOffset) -> impl Iterator<Item = Pin> {
        self.pins.get(&block_offset).into_iter().flatten().copied()
    }

    fn return_block(&mut self, block_offset: BlockOffset, holder: HolderId) -> Result<(), ApiMisuse> {
        let position = self.position(block_offset)?;
        self.known_crcs.remove(&block_offset);
        if let Some(clear) = &mut self.clear_on_free {
            clear(position, self.pool.block_size_bytes());
        }
        // Draft 3.4: quota comes back after the Tail ticket, so that a ticket on Head always has a block coming.
        self.ring.free(block_offset)?;
        self.quotas.credit(holder)
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
