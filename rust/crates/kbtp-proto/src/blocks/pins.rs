//! Who still reads a block, and the frees that wait for them (profile 6.1).

use std::time::Instant;

use smallvec::SmallVec;

use super::quota::HolderId;
use super::table::Entry;
use crate::own_maps::OwnMap;
use crate::types::{ApiMisuse, BlockOffset, Generation};

/// Names who holds a pin: the stream that is to end if its LOAD does not drain (profile 6.1).
pub type OwnerId = u64;

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

/// A block whose FREE waits.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PinnedFree {
    /// Which block.
    pub block_offset: BlockOffset,
    /// What it waits for, in the order in which they were made.
    pub pins: Vec<Pin>,
}

#[derive(Clone, Copy, Debug)]
struct WaitingFree {
    /// Counts the frees that waited.
    turn: u64,
    finished: FinishedFree,
    /// None: nobody is to be ended over it, or its readers have been named already.
    deadline: Option<Instant>,
}

/// The pins there are.
#[derive(Debug, Default)]
pub(super) struct Pins {
    by_block: OwnMap<BlockOffset, SmallVec<[Pin; 2]>>,
    waiting_frees: OwnMap<BlockOffset, WaitingFree>,
    made: u64,
    frees_waited: u64,
}

impl Pins {
    /// Hold the block of `entry`.
    pub(super) fn pin(&mut self, entry: &Entry, owner: OwnerId) -> Pin {
        let pin = Pin {
            number: self.made,
            block_offset: entry.block_offset,
            data_length: entry.data_length,
            generation: entry.generation,
            owner,
        };
        self.made += 1;
        self.by_block.entry(pin.block_offset).or_default().push(pin);
        pin
    }

    /// Let it go. What is returned is the FREE that waited for this pin as the last: its block is to return now.
    pub(super) fn unpin(&mut self, pin: &Pin) -> Result<Option<FinishedFree>, ApiMisuse> {
        let held = self.by_block.get_mut(&pin.block_offset);
        let found = held.and_then(|pins| pins.iter().position(|other| other == pin).map(|at| (pins, at)));
        let Some((pins, at)) = found else {
            return Err(ApiMisuse(format!("{pin:?} has ended already")));
        };
        pins.remove(at);
        if !pins.is_empty() {
            return Ok(None);
        }
        self.by_block.remove(&pin.block_offset);
        let waiting = self.waiting_frees.remove(&pin.block_offset);
        Ok(waiting.map(|waiting| waiting.finished))
    }

    pub(super) fn holds(&self, block_offset: BlockOffset) -> bool {
        self.by_block.contains_key(&block_offset)
    }

    /// The FREE of a block that is held comes out of `unpin`. Its readers are overdue at `deadline`.
    pub(super) fn defer(&mut self, block_offset: BlockOffset, finished: FinishedFree, deadline: Option<Instant>) {
        let turn = self.frees_waited;
        self.frees_waited += 1;
        let waiting = WaitingFree {
            turn,
            finished,
            deadline,
        };
        self.waiting_frees.insert(block_offset, waiting);
    }

    /// Oldest first.
    pub(super) fn pinned_frees(&self) -> Vec<PinnedFree> {
        let mut waiting: Vec<_> = self.waiting_frees.iter().collect();
        waiting.sort_unstable_by_key(|(_, free)| free.turn);
        waiting
            .into_iter()
            .map(|(&block_offset, _)| PinnedFree {
                block_offset,
                pins: self.on(block_offset).collect(),
            })
            .collect()
    }

    pub(super) fn next_deadline(&self) -> Option<Instant> {
        self.waiting_frees.values().filter_map(|free| free.deadline).min()
    }

    /// Who holds the pins of the frees whose deadline has passed, each free once (profile 6.1).
    pub(super) fn take_overdue(&mut self, now: Instant) -> Vec<OwnerId> {
        let mut overdue = Vec::new();
        for (&block_offset, free) in &mut self.waiting_frees {
            if free.deadline.is_some_and(|deadline| deadline <= now) {
                free.deadline = None;
                overdue.push(block_offset);
            }
        }
        let mut owners: Vec<_> = overdue
            .into_iter()
            .flat_map(|block_offset| self.on(block_offset))
            .map(|pin| pin.owner)
            .collect();
        owners.sort_unstable();
        owners.dedup();
        owners
    }

    fn on(&self, block_offset: BlockOffset) -> impl Iterator<Item = Pin> {
        self.by_block.get(&block_offset).into_iter().flatten().copied()
    }
}
