//! The block structures of a target in registered memory, shared by all who execute sequences on them.
//!
//! The store's lock (`SharedBlocks::with`) comes between those of a channel and of the device; see `core`. It is held
//! for one step of a sequence, never over I/O.

use std::fmt;
use std::sync::atomic::AtomicU64;
use std::sync::{Arc, Mutex, OnceLock};

use kbtp_proto::blocks::{
    BlockStore, ClearBlock, Entry, FinishedFree, FreeToken, HolderId, PartitionBlocks, RingMemory, StoreConfig,
    StoreMemory, Words,
};
use kbtp_proto::types::Handle;

use crate::core::lock;
use crate::device::Region;
use crate::error::Error;
use crate::memory::{Buffer, BufferWords};

/// Tells a session that its FREE is complete.
type Router = Box<dyn Fn(FinishedFree) + Send + Sync>;

struct Shared {
    store: Mutex<BlockStore>,
    pool: Region,
    router: OnceLock<Router>,
}

/// A `BlockStore` over a registered pool. A handle: clones are the same store.
#[derive(Clone)]
pub struct SharedBlocks {
    shared: Arc<Shared>,
}

impl SharedBlocks {
    /// A store whose table lies in `table`, which has `StoreConfig::table_words` words. Peers of a direct mode may be let
    /// read it: register its octets for them. The shared ring is in memory that no peer reaches.
    ///
    /// `clear_on_free`: see `BlockStore::new`.
    ///
    /// # Errors
    ///
    /// `Error::ApiMisuse` for numbers outside profile 5, a pool or a table that does not fit them; `Error::Io` if the
    /// system gives no memory.
    pub fn create(pool: &Region, table: Buffer, config: &StoreConfig, clear_on_free: bool) -> Result<Self, Error> {
        let table = Box::new(BufferWords::new(table, "block table")?);
        let ring = RingMemory {
            slots: zeroed(config.slot_words()?)?,
            head: zeroed(1)?,
            tail: zeroed(1)?,
        };
        let clear = clear_on_free.then(|| -> ClearBlock {
            let pool = pool.clone();
            Box::new(move |position, length| pool.clear(position, length))
        });
        let store = BlockStore::new(config, StoreMemory { table, ring }, clear)?;
        if pool.length() != store.pool().length_bytes() || !pool.shared.writable {
            let (length, expected) = (pool.length(), store.pool().length_bytes());
            return Err(Error::misuse(format!(
                "pool: {expected} writable octets expected, {length} given"
            )));
        }
        // A STORE to an unsealed block may come while somebody sends it.
        let device = &pool.shared.device;
        device.table().memories.set_restless(pool.shared.id);
        Ok(Self {
            shared: Arc::new(Shared {
                store: Mutex::new(store),
                pool: pool.clone(),
                router: OnceLock::new(),
            }),
        })
    }

    /// Nobody else sees or changes the store while `act` runs.
    pub fn with<R>(&self, act: impl FnOnce(&mut BlockStore) -> R) -> R {
        act(&mut lock(&self.shared.store))
    }

    /// Names it among the stores of its device.
    #[must_use]
    pub fn number(&self) -> u64 {
        self.shared.pool.shared.id.0
    }

    /// The pool's memory.
    #[must_use]
    pub fn pool(&self) -> &Region {
        &self.shared.pool
    }

    // --- partitions (draft 6.6) ---

    /// See `BlockStore::open_partition`. `slots` and `head` hold the ring's slots and Head, to be registered for the one
    /// stream of the holder.
    ///
    /// # Errors
    ///
    /// `Error::ApiMisuse` as there, and for memory that does not fit.
    pub fn open_partition(
        &self,
        holder: HolderId,
        blocks: PartitionBlocks,
        slots: Buffer,
        head: Buffer,
    ) -> Result<(), Error> {
        // What is refused is not dropped under the store's lock: a keepalive may run anything.
        let _kept = (slots.share(), head.share());
        let memory = RingMemory {
            slots: Box::new(BufferWords::new(slots, "ring slots")?),
            head: Box::new(BufferWords::new(head, "Head")?),
            tail: zeroed(1)?,
        };
        Ok(self.with(|store| store.open_partition(holder, blocks, memory))?)
    }

    /// See `BlockStore::close_partition`; its blocks are cleared.
    ///
    /// # Errors
    ///
    /// `Error::ApiMisuse` as there.
    pub fn close_partition(&self, holder: HolderId) -> Result<(), Error> {
        let (pool, partition) = self.with(|store| {
            let partition = store.close_partition(holder);
            partition.map(|partition| (*store.pool(), partition))
        })?;
        // Nobody's now, and so with no lock held.
        let blocks = partition.blocks();
        for block_offset in (0..blocks.block_count()).filter_map(|index| blocks.offset_of(index)) {
            if let Some(position) = pool.position(block_offset) {
                self.shared.pool.clear(position, pool.block_size_bytes());
            }
        }
        Ok(())
    }

    /// Draft 6.2 steps 2 and 3 for data that lies elsewhere.
    ///
    /// # Errors
    ///
    /// As `BlockStore::commit_store`.
    pub fn store(&self, handle: Handle, data: &[u8], seal: bool) -> Result<Entry, Error> {
        let length = u32::try_from(data.len()).unwrap_or(u32::MAX);
        let copy = |position| self.shared.pool.copy_in(position, data);
        Ok(self.with(|store| store.commit_store(handle, length, seal, copy))?)
    }

    /// Whom to tell of frees whose token is a stream's, for those that finish elsewhere. Set once, before there is any.
    pub fn set_router(&self, router: impl Fn(FinishedFree) + Send + Sync + 'static) {
        // A second one would be for the same streams.
        let _ = self.shared.router.set(Box::new(router));
    }

    /// Tell whoever waits for `finished`, with no lock held; what waits in Python is given back.
    #[must_use = "Python waits for it"]
    pub fn route(&self, finished: FinishedFree) -> Option<(u64, Entry)> {
        match finished.token {
            FreeToken::Python(number) => Some((number, finished.entry)),
            FreeToken::Stream { .. } => {
                if let Some(router) = self.shared.router.get() {
                    router(finished);
                }
                None
            }
        }
    }
}

impl fmt::Debug for SharedBlocks {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "SharedBlocks({:?})", self.shared.pool)
    }
}

/// Words that no peer reaches.
fn zeroed(count: u64) -> Result<Box<dyn Words>, Error> {
    let none = || Error::Io(std::io::Error::from(std::io::ErrorKind::OutOfMemory));
    let count = usize::try_from(count).map_err(|_| none())?;
    let mut words = Vec::new();
    words.try_reserve_exact(count).map_err(|_| none())?;
    words.resize_with(count, || AtomicU64::new(0));
    Ok(Box::new(Arc::new(words)))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::api::Access;
    use crate::device::Device;
    use crate::options::Options;
    use kbtp_proto::blocks::{Allocation, Freeing};

    const CONFIG: StoreConfig = StoreConfig {
        block_size_bytes: 512,
        block_count: 3,
        pool_base: 0x10000,
        table_base_handle: 0x4000,
        table_handles: 8,
        ring_order: 2,
        first_ticket: 0,
        direct_blocks: 0,
        masked_counters: true,
    };

    fn words(count: u64) -> Buffer {
        Buffer::zeroed(8 * count as usize).unwrap()
    }

    fn of_config(config: &StoreConfig, clear_on_free: bool) -> (Device, SharedBlocks, Buffer) {
        let device = Device::open(Options::default());
        let pd = device.allocate_pd().unwrap();
        let buffer = Buffer::zeroed(3 * 512).unwrap();
        let pool = device.register(buffer, Access::empty(), &pd, None, 0x10000).unwrap();
        let table = words(config.table_words());
        let blocks = SharedBlocks::create(&pool, table.share(), config, clear_on_free).unwrap();
        (device, blocks, table)
    }

    fn blocks(clear_on_free: bool) -> (Device, SharedBlocks) {
        let (device, blocks, _) = of_config(&CONFIG, clear_on_free);
        blocks.with(|store| store.quotas_mut().grant(1, 3)).unwrap();
        (device, blocks)
    }

    fn octets(region: &Region, length: u32) -> Vec<u8> {
        let mut octets = Vec::new();
        region.copy_out(0, length, &mut octets);
        octets
    }

    fn octets_of(buffer: &Buffer, length: usize) -> Vec<u8> {
        let mut octets = vec![0; length];
        buffer.read_into(&mut octets);
        octets
    }

    fn bind(blocks: &SharedBlocks, handle: u64, holder: u64, length: u32) -> u64 {
        blocks.with(|store| {
            let Ok(Allocation::Block(block)) = store.begin_alloc_store(handle, holder) else {
                panic!("no block");
            };
            store.commit_alloc_store(handle, block, length, true).unwrap();
            block
        })
    }

    #[test]
    fn the_table_is_where_it_was_asked_for_in_network_byte_order() {
        let (_device, blocks, table) = of_config(&CONFIG, false);
        blocks.with(|store| store.quotas_mut().grant(1, 3)).unwrap();
        bind(&blocks, 0x4001, 1, 0x123);
        assert_eq!(
            octets_of(&table, 32),
            [
                [0, 0, 0, 1, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0],
                [0, 3, 0, 2, 0, 0, 1, 0x23, 0, 0, 0, 0, 0, 1, 0, 0]
            ]
            .concat()
        );
    }

    #[test]
    fn a_partition_has_its_slots_and_head_where_they_were_asked_for() {
        let config = StoreConfig {
            direct_blocks: 2,
            first_ticket: 6,
            ..CONFIG
        };
        let (_device, blocks, _) = of_config(&config, false);
        let (slots, head) = (words(4), words(1));
        let two = PartitionBlocks { first: 1, count: 2 };
        blocks.open_partition(1, two, slots.share(), head.share()).unwrap();
        assert_eq!(bind(&blocks, 0x4000, 1, 5), 0x10200);
        let slot = |ticket: u32, block_offset: u64| [u64::from(ticket) << 32, block_offset].map(u64::to_be_bytes);
        let expected = [slot(6, u64::MAX), slot(7, 0x10400)].concat().concat();
        assert_eq!(octets_of(&slots, 32), expected);
        assert_eq!(octets_of(&head, 8), 0x0000_0007_0000_0010_u64.to_ne_bytes());
        assert!(matches!(blocks.close_partition(1), Err(Error::ApiMisuse(_))));
    }

    #[test]
    fn a_partition_that_goes_back_is_cleared() {
        let config = StoreConfig {
            direct_blocks: 2,
            ..CONFIG
        };
        let (_device, blocks, _) = of_config(&config, false);
        let two = PartitionBlocks { first: 1, count: 2 };
        blocks.open_partition(1, two, words(4), words(1)).unwrap();
        blocks.pool().copy_in(0, &[7; 3 * 512]);
        blocks.close_partition(1).unwrap();
        assert_eq!(octets(blocks.pool(), 3 * 512), [[7; 512], [0; 512], [0; 512]].concat());
        assert!(matches!(blocks.close_partition(1), Err(Error::ApiMisuse(_))));
    }

    #[test]
    fn memory_that_does_not_fit_a_partition_is_refused() {
        let config = StoreConfig {
            direct_blocks: 2,
            ..CONFIG
        };
        let (_device, blocks, _) = of_config(&config, false);
        let two = PartitionBlocks { first: 1, count: 2 };
        for (slots, head) in [
            (words(2), words(1)),
            (words(4), words(2)),
            (words(4), Buffer::zeroed(12).unwrap()),
        ] {
            let refused = blocks.open_partition(1, two, slots, head);
            assert!(matches!(refused, Err(Error::ApiMisuse(_))));
        }
        blocks.open_partition(1, two, words(4), words(1)).unwrap();
    }

    #[test]
    fn a_freed_block_is_cleared_if_the_pool_is_told_to() {
        for (clear_on_free, left) in [(true, [0; 6]), (false, *b"secret")] {
            let (_device, blocks) = blocks(clear_on_free);
            blocks.with(|store| {
                assert_eq!(store.begin_alloc_store(0x4000, 1), Ok(Allocation::Block(0x10000)));
                store.commit_alloc_store(0x4000, 0x10000, 0, false).unwrap();
            });
            blocks.store(0x4000, b"secret", true).unwrap();
            assert_eq!(octets(blocks.pool(), 6), b"secret");
            assert!(matches!(blocks.store(0x4000, b"", false), Err(Error::ApiMisuse(_))));
            let freeing = blocks.with(|store| store.begin_free(0x4000, 1, FreeToken::Python(0), None));
            assert!(matches!(freeing, Ok(Freeing::Freed(_))));
            assert_eq!(octets(blocks.pool(), 6), left);
        }
    }

    #[test]
    fn a_free_is_told_to_whoever_waits_for_it() {
        let (_device, blocks) = blocks(false);
        let heard = Arc::new(Mutex::new(Vec::new()));
        let hears = Arc::clone(&heard);
        blocks.set_router(move |finished| lock(&hears).push(finished.token));
        let of_stream = FreeToken::Stream { stream: 7, request: 9 };
        for token in [of_stream, FreeToken::Python(5)] {
            let finished = blocks
                .with(|store| {
                    let Ok(Allocation::Block(block)) = store.begin_alloc_store(0x4000, 1) else {
                        panic!("no block");
                    };
                    store.commit_alloc_store(0x4000, block, 4, true)?;
                    let pin = store.begin_load(0x4000, 7)?;
                    assert_eq!(store.begin_free(0x4000, 1, token, None), Ok(Freeing::Waiting));
                    store.end_load(&pin)
                })
                .unwrap()
                .unwrap();
            let for_python = blocks.route(finished).map(|(number, _)| number);
            assert_eq!(for_python, (token != of_stream).then_some(5));
        }
        assert_eq!(*lock(&heard), [of_stream]);
    }

    #[test]
    fn many_threads_lose_no_block() {
        let (_device, blocks) = blocks(true);
        std::thread::scope(|threads| {
            for thread in 0..4 {
                let blocks = &blocks;
                threads.spawn(move || {
                    let handle = 0x4000 + thread;
                    for turn in 0..500 {
                        let allocation = blocks.with(|store| store.begin_alloc_store(handle, 1)).unwrap();
                        let Allocation::Block(block) = allocation else { continue };
                        if turn % 3 == 0 {
                            blocks.with(|store| store.abort_alloc_store(handle, block, 1)).unwrap();
                            continue;
                        }
                        let pin = blocks.with(|store| {
                            store.commit_alloc_store(handle, block, 8, false).unwrap();
                            store.begin_load(handle, thread).unwrap()
                        });
                        blocks.store(handle, &u64::to_be_bytes(turn), true).unwrap();
                        let freeing = blocks.with(|store| store.begin_free(handle, 1, FreeToken::Python(turn), None));
                        assert_eq!(freeing, Ok(Freeing::Waiting));
                        let mut octets = Vec::new();
                        blocks.pool().copy_out(block - CONFIG.pool_base, 8, &mut octets);
                        assert_eq!(octets, turn.to_be_bytes());
                        let finished = blocks.with(|store| store.end_load(&pin)).unwrap();
                        assert_eq!(
                            finished.and_then(|free| blocks.route(free)).map(|free| free.0),
                            Some(turn)
                        );
                    }
                });
            }
        });
        assert_eq!(
            blocks.with(|store| (store.free_blocks(), store.quotas().usage(1))),
            (3, 0)
        );
    }

    #[test]
    fn numbers_and_pools_that_do_not_fit_are_refused() {
        let (device, blocks) = blocks(false);
        let create = |table: Buffer, config: &StoreConfig| SharedBlocks::create(blocks.pool(), table, config, false);
        let wrong = StoreConfig {
            block_count: 2,
            ..CONFIG
        };
        assert!(matches!(create(words(16), &wrong), Err(Error::ApiMisuse(_))));
        assert!(matches!(create(words(15), &CONFIG), Err(Error::ApiMisuse(_))));
        let none_shared = StoreConfig {
            direct_blocks: 3,
            ..CONFIG
        };
        assert!(matches!(create(words(16), &none_shared), Err(Error::ApiMisuse(_))));
        drop(device);
    }
}
