//! The structures a target keeps its blocks in (draft 3): pool, block table, free-block ring, quotas, handle ranges.
//!
//! The twin of the Python package `kbtp.blocks`, file by file and name by name. Pure structures over words that the
//! caller gives, which may be registered with an RNIC; no octet of a block is touched here. `BlockStore` is their one
//! owner.

mod counter;
mod handles;
mod partition;
mod pins;
mod pool;
mod quota;
mod ring;
mod store;
mod table;
mod words;

pub use counter::{CounterForm, ring_order_for};
pub use handles::{AssignedRanges, DomainId, HandleRange};
pub use partition::{Partition, PartitionBlocks, PartitionError};
pub use pins::{FinishedFree, FreeToken, OwnerId, Pin, PinnedFree};
pub use pool::Pool;
pub use quota::{HolderId, QuotaLedger};
pub use ring::{FreeBlockRing, RingMemory};
pub use store::{Allocation, Binding, BlockStore, ClearBlock, Freeing, StoreConfig, StoreMemory};
pub use table::{BlockTable, Entry, next_generation};
pub use words::{Words, update_word};
