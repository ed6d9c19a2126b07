//! The block table (draft 3.2): one 16-octet entry a handle.
//!
//! ```text
//!  0                   1                   2                   3
//!  0 1 2 3 4 5 6 7 8 9 0 1 2 3 4 5 6 7 8 9 0 1 2 3 4 5 6 7 8 9 0 1
//! +-------------------------------+-------------------------------+
//! |             Flags             |          Generation           |  \ state word: always written in one
//! +-------------------------------+-------------------------------+   > 8-octet store (profile 5)
//! |                          Data Length                          |  /
//! +---------------------------------------------------------------+
//! |                     Block Offset (64 bits)                    |  written before a bind's state word,
//! |                                                               |  after an unbind's
//! +---------------------------------------------------------------+
//! ```
//!
//! An unbound entry keeps its Generation alone: Flags, Data Length and Block Offset are zero, so that it tells nothing
//! of the block it once named.

use super::handles::HandleRange;
use super::words::{Words, check_count, network_word};
use crate::limits::{ENTRY_BYTES, GENERATION_INITIAL, GENERATION_MAX};
use crate::types::{ApiMisuse, BlockOffset, EntryFlag, Generation, Handle};

const ENTRY_WORDS: u64 = (ENTRY_BYTES / size_of::<u64>()) as u64;

/// The contents of one entry.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Entry {
    /// Unknown bits are kept.
    pub flags: EntryFlag,
    /// How often the handle was bound and unbound, in a circle without zero.
    pub generation: Generation,
    /// Octets of the block that are data.
    pub data_length: u32,
    /// Which block.
    pub block_offset: BlockOffset,
}

impl Entry {
    /// Bound.
    #[must_use]
    pub fn valid(&self) -> bool {
        self.flags.contains(EntryFlag::VALID)
    }

    /// Changes no more.
    #[must_use]
    pub fn sealed(&self) -> bool {
        self.flags.contains(EntryFlag::SEALED)
    }

    fn state(&self) -> u64 {
        u64::from(self.flags.bits()) << 48 | u64::from(self.generation) << 32 | u64::from(self.data_length)
    }
}

/// Incremented by one, skipping zero (draft 6.3 step 4).
#[must_use]
pub fn next_generation(generation: Generation) -> Generation {
    if generation < GENERATION_MAX {
        generation + 1
    } else {
        GENERATION_INITIAL
    }
}

/// Entries for `handle_count` handles from `base_handle` on; written by its one owner alone.
///
/// Others may read the words at any moment. Each store is seen after those before it, so a reader that finds the same
/// state word before and after it read the Block Offset has a whole entry.
pub struct BlockTable {
    words: Box<dyn Words>,
    base_handle: Handle,
    handle_count: u64,
}

#[allow(
    clippy::missing_errors_doc,
    reason = "for a handle outside of the table, and as said"
)]
impl BlockTable {
    /// How many words a table of so many handles needs.
    #[must_use]
    pub fn words_for(handle_count: u64) -> u64 {
        handle_count.saturating_mul(ENTRY_WORDS)
    }

    /// Everything is unbound with Generation 1, so that the first bind makes it 2 (profile 5).
    ///
    /// Refuses words that are not exactly two a handle.
    pub fn new(words: Box<dyn Words>, base_handle: Handle, handle_count: u64) -> Result<Self, ApiMisuse> {
        if handle_count == 0 {
            return Err(ApiMisuse("handle count 0: at least 1 expected".into()));
        }
        check_count(&*words, "block table", Self::words_for(handle_count))?;
        let unbound = Entry {
            flags: EntryFlag::empty(),
            generation: GENERATION_INITIAL,
            data_length: 0,
            block_offset: 0,
        };
        for i in (0..words.count()).step_by(ENTRY_WORDS as usize) {
            words.store(i, network_word(unbound.state()));
            words.store(i + 1, 0);
        }
        Ok(Self {
            words,
            base_handle,
            handle_count,
        })
    }

    /// Of the whole table.
    #[must_use]
    pub fn handles(&self) -> HandleRange {
        HandleRange {
            first: self.base_handle,
            count: self.handle_count,
        }
    }

    /// Profile's range test: `handle - base < count`, unsigned.
    #[must_use]
    pub fn contains(&self, handle: Handle) -> bool {
        self.handles().contains(handle)
    }

    /// The entry of `handle`.
    pub fn read(&self, handle: Handle) -> Result<Entry, ApiMisuse> {
        Ok(self.entry(self.index(handle)?))
    }

    /// Draft 6.3 step 4: Block Offset, then VALID, SEALED if asked, Data Length and the next Generation.
    ///
    /// Refuses a VALID entry.
    pub fn bind(
        &mut self,
        handle: Handle,
        block_offset: BlockOffset,
        data_length: u32,
        seal: bool,
    ) -> Result<Entry, ApiMisuse> {
        let i = self.index(handle)?;
        let old = self.entry(i);
        if old.valid() {
            return Err(ApiMisuse(format!("handle {handle:#x} is bound")));
        }
        let sealed = if seal { EntryFlag::SEALED } else { EntryFlag::empty() };
        let new = Entry {
            flags: EntryFlag::VALID | sealed,
            generation: next_generation(old.generation),
            data_length,
            block_offset,
        };
        // Draft 3.2: whoever sees VALID must see this Block Offset.
        self.words.store(i + 1, network_word(block_offset));
        // Profile 5: Flags, Generation and Data Length in one store, so that no reader sees a part of them.
        self.words.store(i, network_word(new.state()));
        Ok(new)
    }

    /// Draft 6.2 step 3: the new Data Length and, if asked, SEALED, in one store.
    ///
    /// Refuses an entry that is not VALID, or is SEALED.
    pub fn update(&mut self, handle: Handle, data_length: u32, seal: bool) -> Result<Entry, ApiMisuse> {
        let i = self.index(handle)?;
        let old = self.entry(i);
        check_writable(handle, &old)?;
        let sealed = if seal { EntryFlag::SEALED } else { EntryFlag::empty() };
        let new = Entry {
            flags: old.flags | sealed,
            data_length,
            ..old
        };
        self.words.store(i, network_word(new.state()));
        Ok(new)
    }

    /// Draft 6.4 step 2: VALID and SEALED cleared, the next Generation; Data Length and Block Offset zero.
    ///
    /// Refuses an entry that is not VALID.
    pub fn unbind(&mut self, handle: Handle) -> Result<Entry, ApiMisuse> {
        let i = self.index(handle)?;
        let old = self.entry(i);
        if !old.valid() {
            return Err(ApiMisuse(format!("handle {handle:#x} is not bound")));
        }
        let new = Entry {
            flags: EntryFlag::empty(),
            generation: next_generation(old.generation),
            data_length: 0,
            block_offset: 0,
        };
        // The other way round than bind: a reader that sees VALID must not see a Block Offset that names nothing.
        self.words.store(i, network_word(new.state()));
        self.words.store(i + 1, 0);
        Ok(new)
    }

    /// The handles of `range`, which lies in the table, that are VALID now, in the order of the range.
    pub fn bound_handles(&self, range: HandleRange) -> Result<impl Iterator<Item = Handle>, ApiMisuse> {
        let position = range.first.wrapping_sub(self.base_handle);
        if position
            .checked_add(range.count)
            .is_none_or(|end| end > self.handle_count)
        {
            return Err(ApiMisuse(format!("{range:?} is not inside the table")));
        }
        let valid = network_word(u64::from(EntryFlag::VALID.bits()) << 48);
        Ok((0..range.count)
            .filter(move |i| self.words.load(((position + i) * ENTRY_WORDS) as usize) & valid != 0)
            .map(move |i| range.first.wrapping_add(i)))
    }

    fn entry(&self, index: usize) -> Entry {
        let state = network_word(self.words.load(index));
        Entry {
            flags: EntryFlag::from_bits_retain((state >> 48) as u16),
            generation: (state >> 32) as u16,
            data_length: state as u32,
            block_offset: network_word(self.words.load(index + 1)),
        }
    }

    /// Of the entry's state word; the Block Offset follows.
    fn index(&self, handle: Handle) -> Result<usize, ApiMisuse> {
        if !self.contains(handle) {
            return Err(ApiMisuse(format!("handle {handle:#x} is not in the table")));
        }
        Ok((handle.wrapping_sub(self.base_handle) * ENTRY_WORDS) as usize)
    }
}

/// Refuses what a STORE may not change.
pub(super) fn check_writable(handle: Handle, entry: &Entry) -> Result<(), ApiMisuse> {
    match (entry.valid(), entry.sealed()) {
        (true, false) => Ok(()),
        (true, true) => Err(ApiMisuse(format!("handle {handle:#x} is sealed"))),
        (false, _) => Err(ApiMisuse(format!("handle {handle:#x} is not bound"))),
    }
}
