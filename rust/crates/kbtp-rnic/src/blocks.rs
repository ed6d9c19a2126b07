//! The block structures of a target in registered memory, shared by all who execute sequences on them.
//!
//! The store's lock (`SharedBlocks::with`) comes between those of a channel and of the device; see `core`. It is held
//! for one step of a sequence, never over I/O.

use std::fmt;
use std::sync::atomic::AtomicU64;
use std::sync::{Arc, Mutex, OnceLock};

use kbtp_proto::blocks::{
    BlockStore, ClearBlock, Entry, FinishedFree, FreeToken, RingMemory, StoreConfig, StoreMemory, Words,
};
use kbtp_proto::types::Handle;

use crate::api::Access;
use crate::core::lock;
use crate::device::{Device, Pd, Region};
use crate::error::Error;
use crate::memory::{Buffer, SharedWords};

/// Tells a session that its FREE is complete.
type Router = Box<dyn Fn(FinishedFree) + Send + Sync>;

struct Shared {
    store: Mutex<BlockStore>,
    pool: Region,
    router: OnceLock<Router>,
    _structures: Structures,
}

/// Table, slots, Head and Tail, each with an STag of its own: they are not to be had with the same rights. They are
/// registered as long as this lives.
#[derive(Default)]
struct Structures(Vec<Region>);

impl Structures {
    fn register(&mut self, pd: &Pd, word_count: u64) -> Result<Box<dyn Words>, Error> {
        let device = Device {
            shared: Arc::clone(&pd.device),
        };
        let words = zeroed(word_count)?;
        let buffer = Buffer::of_words(&words)?;
        self.0.push(device.register(buffer, Access::empty(), pd, None, 0)?);
        Ok(Box::new(words))
    }
}

impl Drop for Structures {
    fn drop(&mut self) {
        for region in &self.0 {
            region.revoke();
        }
    }
}

/// A `BlockStore` over a registered pool. A handle: clones are the same store.
#[derive(Clone)]
pub struct SharedBlocks {
    shared: Arc<Shared>,
}

impl SharedBlocks {
    /// A store whose table and ring are registered in the domain of `pool`; no peer has a right to them.
    ///
    /// `clear_on_free`: see `BlockStore::new`.
    ///
    /// # Errors
    ///
    /// `Error::ApiMisuse` for numbers outside profile 5 or a pool that does not fit them; `Error::Io` if the system
    /// gives no memory.
    pub fn create(pool: &Region, config: &StoreConfig, clear_on_free: bool) -> Result<Self, Error> {
        let pd = Pd {
            device: Arc::clone(&pool.shared.device),
            id: pool.shared.pd,
        };
        let mut structures = Structures::default();
        let table = structures.register(&pd, config.table_words())?;
        let ring = RingMemory {
            slots: structures.register(&pd, config.slot_words()?)?,
            head: structures.register(&pd, 1)?,
            tail: structures.register(&pd, 1)?,
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
        pd.device.table().memories.set_restless(pool.shared.id);
        Ok(Self {
            shared: Arc::new(Shared {
                store: Mutex::new(store),
                pool: pool.clone(),
                router: OnceLock::new(),
                _structures: structures,
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

fn zeroed(count: u64) -> Result<SharedWords, Error> {
    let none = || Error::Io(std::io::Error::from(std::io::ErrorKind::OutOfMemory));
    let count = usize::try_from(count).map_err(|_| none())?;
    let mut words = Vec::new();
    words.try_reserve_exact(count).map_err(|_| none())?;
    words.resize_with(count, || AtomicU64::new(0));
    Ok(Arc::new(words.into_boxed_slice()))
}

#[cfg(test)]
mod tests {
    use super::*;
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

    fn blocks(clear_on_free: bool) -> (Device, SharedBlocks) {
        let device = Device::open(Options::default());
        let pd = device.allocate_pd();
        let buffer = Buffer::zeroed(3 * 512).unwrap();
        let pool = device.register(buffer, Access::empty(), &pd, None, 0x10000).unwrap();
        let blocks = SharedBlocks::create(&pool, &CONFIG, clear_on_free).unwrap();
        blocks.with(|store| store.quotas_mut().grant(1, 3)).unwrap();
        (device, blocks)
    }

    fn octets(blocks: &SharedBlocks, region: &Region, length: u32) -> Vec<u8> {
        let mut octets = Vec::new();
        assert!(blocks.pool() == region || region.access().is_empty());
        region.copy_out(0, length, &mut octets);
        octets
    }

    #[test]
    fn thestructures_are_registered_in_network_byte_order() {
        let (_device, blocks) = blocks(false);
        blocks.with(|store| {
            let Ok(Allocation::Block(block)) = store.begin_alloc_store(0x4001, 1) else {
                panic!("no block");
            };
            store.commit_alloc_store(0x4001, block, 0x1234, true).unwrap_err();
            store.commit_alloc_store(0x4001, block, 0x123, true).unwrap();
        });
        let [table, slots, head, tail] = &blocks.shared._structures.0[..] else {
            panic!("four");
        };
        assert_eq!(
            octets(&blocks, table, 32),
            [
                [0, 0, 0, 1, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0],
                [0, 3, 0, 2, 0, 0, 1, 0x23, 0, 0, 0, 0, 0, 1, 0, 0]
            ]
            .concat()
        );
        let empty = [0xFF; 8];
        assert_eq!(
            octets(&blocks, slots, 32),
            [
                [0, 0, 0, 0, 0, 0, 0, 0],
                empty,
                [0, 0, 0, 1, 0, 0, 0, 0],
                [0, 0, 0, 0, 0, 1, 2, 0]
            ]
            .concat()
        );
        assert_eq!(octets(&blocks, head, 8), 0x0000_0001_0000_0010_u64.to_ne_bytes());
        assert_eq!(octets(&blocks, tail, 8), 0x0000_0003_0000_0030_u64.to_ne_bytes());
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
            assert_eq!(octets(&blocks, blocks.pool(), 6), b"secret");
            assert!(matches!(blocks.store(0x4000, b"", false), Err(Error::ApiMisuse(_))));
            let freeing = blocks.with(|store| store.begin_free(0x4000, 1, FreeToken::Python(0), None));
            assert!(matches!(freeing, Ok(Freeing::Freed(_))));
            assert_eq!(octets(&blocks, blocks.pool(), 6), left);
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
    fn the_structures_are_registered_as_long_as_the_store_lives() {
        let (_device, blocks) = blocks(false);
        let regions = blocks.shared._structures.0.clone();
        let other = blocks.clone();
        drop(blocks);
        assert!(regions.iter().all(Region::valid));
        drop(other);
        assert!(!regions.iter().any(Region::valid));
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
        let wrong = StoreConfig {
            block_count: 2,
            ..CONFIG
        };
        assert!(matches!(
            SharedBlocks::create(blocks.pool(), &wrong, false),
            Err(Error::ApiMisuse(_))
        ));
        let endless = StoreConfig {
            table_handles: u64::MAX,
            ..CONFIG
        };
        assert!(matches!(
            SharedBlocks::create(blocks.pool(), &endless, false),
            Err(Error::Io(_))
        ));
        drop(device);
    }
}
