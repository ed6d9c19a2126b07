//! The one owner of blocks, entries, quotas and pins (draft 6, profile 6.1, 6.5, 6.8).

use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use kbtp_proto::blocks::{
    Allocation, BlockStore, Entry, FinishedFree, FreeToken, Freeing, HandleRange, RingMemory, StoreConfig, StoreMemory,
};
use kbtp_proto::types::{EntryFlag, Status};

use crate::words::{Shared, zeroed};

pub(crate) const BASE: u64 = 0x4000;
pub(crate) const POOL_BASE: u64 = 0x10000;
pub(crate) const HANDLES: HandleRange = HandleRange { first: BASE, count: 8 };
pub(crate) const PREFILL: u64 = 1;
const READER: u64 = 2;
const TOKEN: FreeToken = FreeToken::Stream { stream: 5, request: 6 };

/// Which octets were cleared: position and length.
pub(crate) type Cleared = Arc<Mutex<Vec<(u64, u32)>>>;

pub(crate) struct Made {
    pub(crate) store: BlockStore,
    pub(crate) cleared: Cleared,
    head: Shared,
}

pub(crate) fn config(block_count: u32, first_ticket: u32) -> StoreConfig {
    StoreConfig {
        block_size_bytes: 512,
        block_count,
        pool_base: POOL_BASE,
        table_base_handle: BASE,
        table_handles: 8,
        ring_order: 2,
        first_ticket,
        direct_blocks: 0,
        masked_counters: true,
    }
}

pub(crate) fn make(block_count: u32, quota: u32, clear_on_free: bool, first_ticket: u32) -> Made {
    let config = config(block_count, first_ticket);
    let head = zeroed(1);
    let memory = StoreMemory {
        table: Box::new(zeroed(config.table_words() as usize)),
        ring: RingMemory {
            slots: Box::new(zeroed(config.slot_words().unwrap() as usize)),
            head: Box::new(head.clone()),
            tail: Box::new(zeroed(1)),
        },
    };
    let cleared = Cleared::default();
    let list = cleared.clone();
    let clear = move |position, length| list.lock().unwrap().push((position, length));
    let mut store = BlockStore::new(&config, memory, clear_on_free.then(|| Box::new(clear) as _)).unwrap();
    store.quotas_mut().grant(PREFILL, quota).unwrap();
    Made { store, cleared, head }
}

pub(crate) fn begin_alloc_store(store: &mut BlockStore, handle: u64, holder: u64) -> u64 {
    match store.begin_alloc_store(handle, holder).unwrap() {
        Allocation::Block(block_offset) => block_offset,
        Allocation::Refused(status) => panic!("{status:?}"),
    }
}

fn alloc_store(store: &mut BlockStore, handle: u64, length: u32, seal: bool) -> Entry {
    let block_offset = begin_alloc_store(store, handle, PREFILL);
    store.commit_alloc_store(handle, block_offset, length, seal).unwrap()
}

pub(crate) fn unbound(generation: u16) -> Entry {
    Entry {
        flags: EntryFlag::empty(),
        generation,
        data_length: 0,
        block_offset: 0,
    }
}

fn begin_free(store: &mut BlockStore) -> Freeing {
    store.begin_free(BASE, PREFILL, TOKEN, None).unwrap()
}

#[test]
fn an_allocation_is_seen_once_it_is_committed() {
    let mut store = make(3, 3, false, 0).store;
    assert_eq!(begin_alloc_store(&mut store, BASE + 1, PREFILL), POOL_BASE);
    assert!(!store.read(BASE + 1).unwrap().valid());
    assert_eq!((store.free_blocks(), store.quotas().usage(PREFILL)), (2, 1));
    let entry = store.commit_alloc_store(BASE + 1, POOL_BASE, 5, true).unwrap();
    let expected = Entry {
        flags: EntryFlag::VALID | EntryFlag::SEALED,
        generation: 2,
        data_length: 5,
        block_offset: POOL_BASE,
    };
    assert_eq!((entry, store.read(BASE + 1)), (expected, Ok(expected)));
    assert_eq!(store.bound_handles(HANDLES), Ok(vec![BASE + 1]));
    assert_eq!(store.bound_count(HANDLES), Ok(1));
}

#[test]
fn no_space_is_found_before_a_ticket_is_taken() {
    let Made { mut store, head, .. } = make(3, 1, false, 0);
    alloc_store(&mut store, BASE, 1, true);
    let before = crate::words::native(&head);
    let refused = store.begin_alloc_store(BASE + 1, PREFILL);
    assert_eq!(refused, Ok(Allocation::Refused(Status::NoSpace)));
    assert_eq!(crate::words::native(&head), before);
    assert_eq!(store.quotas().usage(PREFILL), 1);
}

#[test]
fn a_ring_whose_blocks_others_hold_tickets_for_is_a_target_error() {
    let Made { mut store, head, .. } = make(1, 1, false, 0);
    // A peer takes the ticket of the only block.
    head[0].store(0x0000_0001_0000_0010, std::sync::atomic::Ordering::SeqCst);
    let refused = store.begin_alloc_store(BASE, PREFILL);
    assert_eq!(refused, Ok(Allocation::Refused(Status::TargetError)));
    assert_eq!(store.quotas().usage(PREFILL), 0);
    assert_eq!(store.read(BASE), Ok(unbound(1)));
}

#[test]
fn an_aborted_allocation_returns_its_block_and_its_unit_of_quota() {
    let mut store = make(3, 1, false, 0).store;
    let block_offset = begin_alloc_store(&mut store, BASE, PREFILL);
    store.abort_alloc_store(BASE, block_offset, PREFILL).unwrap();
    assert_eq!(store.read(BASE), Ok(unbound(1)));
    assert_eq!((store.free_blocks(), store.quotas().usage(PREFILL)), (3, 0));
    assert_eq!(alloc_store(&mut store, BASE, 5, true).generation, 2);
}

#[test]
fn a_store_copies_then_changes_the_entry_and_seals_if_asked() {
    let mut store = make(3, 3, false, 0).store;
    alloc_store(&mut store, BASE, 1, true);
    alloc_store(&mut store, BASE + 1, 14, false);
    let mut copied_to = None;
    let entry = store.commit_store(BASE + 1, 6, false, |position| copied_to = Some(position));
    assert_eq!(copied_to, Some(512));
    assert_eq!(entry.map(|entry| (entry.data_length, entry.sealed())), Ok((6, false)));
    let entry = store.commit_store(BASE + 1, 512, true, |_| {});
    assert_eq!(entry.map(|entry| (entry.data_length, entry.sealed())), Ok((512, true)));
}

#[test]
fn a_free_waits_for_the_loads_that_began_before_it() {
    let mut store = make(1, 1, false, 0).store;
    alloc_store(&mut store, BASE, 8, true);
    let (first, second) = (store.begin_load(BASE, 11).unwrap(), store.begin_load(BASE, 12).unwrap());
    assert_eq!(begin_free(&mut store), Freeing::Waiting);
    // Later loads see the free at once; the block is nobody else's yet.
    assert_eq!(store.read(BASE), Ok(unbound(3)));
    assert_eq!((store.free_blocks(), store.quotas().usage(PREFILL)), (0, 1));
    let refused = store.begin_alloc_store(BASE, PREFILL);
    assert_eq!(refused, Ok(Allocation::Refused(Status::NoSpace)));
    assert_eq!(store.pinned_frees()[0].pins, [first, second]);
    assert_eq!(store.end_load(&first), Ok(None));
    assert_eq!(store.pinned_frees()[0].pins, [second]);
    let finished = FinishedFree {
        entry: unbound(3),
        holder: PREFILL,
        token: TOKEN,
    };
    assert_eq!(store.end_load(&second), Ok(Some(finished)));
    assert_eq!((store.free_blocks(), store.quotas().usage(PREFILL)), (1, 0));
    assert!(store.pinned_frees().is_empty());
}

#[test]
fn a_handle_can_be_bound_again_while_its_old_block_is_still_pinned() {
    let mut store = make(2, 2, false, 0).store;
    alloc_store(&mut store, BASE, 3, true);
    let pin = store.begin_load(BASE, 11).unwrap();
    assert_eq!(begin_free(&mut store), Freeing::Waiting);
    let entry = alloc_store(&mut store, BASE, 3, true);
    assert_eq!((entry.block_offset, entry.generation), (POOL_BASE + 512, 4));
    assert_eq!(store.end_load(&pin).unwrap().map(|free| free.entry), Some(unbound(3)));
    assert_eq!(store.read(BASE), Ok(entry));
}

#[test]
fn the_readers_of_a_free_are_named_once_when_its_deadline_has_passed() {
    let mut store = make(3, 3, false, 0).store;
    let now = Instant::now();
    let after = |seconds| now + Duration::from_secs(seconds);
    for (handle, owners) in [(BASE, &[13, 11, 13][..]), (BASE + 1, &[12]), (BASE + 2, &[14])] {
        alloc_store(&mut store, handle, 1, true);
        for &owner in owners {
            store.begin_load(handle, owner).unwrap();
        }
    }
    assert_eq!(store.next_deadline(), None);
    for (handle, deadline) in [(BASE, Some(after(5))), (BASE + 1, Some(after(7))), (BASE + 2, None)] {
        store.begin_free(handle, PREFILL, TOKEN, deadline).unwrap();
    }
    assert_eq!(store.next_deadline(), Some(after(5)));
    assert_eq!(store.take_overdue(after(4)), []);
    assert_eq!(store.take_overdue(after(5)), [11, 13]);
    assert_eq!(store.next_deadline(), Some(after(7)));
    assert_eq!(store.take_overdue(after(100)), [12]);
    assert_eq!((store.take_overdue(after(100)), store.next_deadline()), (vec![], None));
    assert_eq!(store.pinned_frees().len(), 3);
}

#[test]
fn blocks_are_cleared_before_they_return_to_the_ring_if_the_pool_is_told_to() {
    let Made { mut store, cleared, .. } = make(3, 3, true, 0);
    alloc_store(&mut store, BASE, 6, true);
    let pin = store.begin_load(BASE, 11).unwrap();
    begin_free(&mut store);
    assert!(cleared.lock().unwrap().is_empty());
    assert!(store.end_load(&pin).unwrap().is_some());
    let aborted = begin_alloc_store(&mut store, BASE, PREFILL);
    store.abort_alloc_store(BASE, aborted, PREFILL).unwrap();
    assert_eq!(*cleared.lock().unwrap(), [(0, 512), (512, 512)]);
}

#[test]
fn calls_out_of_turn_are_refused_and_change_nothing() {
    let mut store = make(3, 3, false, 0).store;
    store.quotas_mut().grant(READER, 0).unwrap();
    alloc_store(&mut store, BASE, 4, true);
    let block_offset = begin_alloc_store(&mut store, BASE + 1, PREFILL);
    let pin = store.begin_load(BASE, 11).unwrap();
    assert_eq!(store.end_load(&pin), Ok(None));
    let look = |store: &BlockStore| {
        let entries: Vec<_> = (BASE..BASE + 8).map(|handle| store.read(handle).unwrap()).collect();
        (store.free_blocks(), store.quotas().usage(PREFILL), entries)
    };
    let before = look(&store);
    assert!(store.end_load(&pin).unwrap_err().0.contains("has ended already"));
    assert!(store.begin_load(BASE + 1, 11).unwrap_err().0.contains("is not bound"));
    for handle in [BASE, BASE + 1] {
        let error = store.begin_alloc_store(handle, PREFILL).unwrap_err();
        assert!(error.0.contains("bound or being bound"));
    }
    for (handle, offset) in [(BASE, POOL_BASE), (BASE + 1, POOL_BASE), (BASE + 2, block_offset)] {
        assert!(store.commit_alloc_store(handle, offset, 0, false).is_err());
        assert!(store.abort_alloc_store(handle, offset, PREFILL).is_err());
    }
    assert!(store.abort_alloc_store(BASE + 1, block_offset, READER).is_err());
    let error = store
        .commit_alloc_store(BASE + 1, block_offset, 513, false)
        .unwrap_err();
    assert!(error.0.contains("0 to 512"));
    let never = |_| panic!("copied");
    let error = store.commit_store(BASE, 0, false, never).unwrap_err();
    assert!(error.0.contains("is sealed"));
    let error = store.commit_store(BASE + 1, 0, false, never).unwrap_err();
    assert!(error.0.contains("is not bound"));
    assert!(store.begin_free(BASE + 1, PREFILL, TOKEN, None).is_err());
    assert!(store.begin_free(BASE, READER, TOKEN, None).is_err());
    assert!(store.begin_alloc_store(BASE + 2, 99).is_err());
    assert!(store.read(BASE + 8).is_err());
    assert_eq!(look(&store), before);
    store.commit_alloc_store(BASE + 1, block_offset, 4, false).unwrap();
    let error = store.commit_store(BASE + 1, 513, false, never).unwrap_err();
    assert!(error.0.contains("0 to 512"));
}

#[test]
fn handles_have_the_domain_they_were_assigned_for() {
    let mut store = make(3, 3, false, 0).store;
    let range = HandleRange {
        first: BASE + 2,
        count: 3,
    };
    store.assign_range(range, 9).unwrap();
    assert_eq!(
        [BASE + 1, BASE + 4].map(|handle| store.domain_of(handle)),
        [None, Some(9)]
    );
    store.release_range(range).unwrap();
    assert_eq!(store.domain_of(BASE + 4), None);
}

#[test]
fn a_store_that_is_being_copied_keeps_its_block_and_a_sealed_one_is_not_begun() {
    let Made { mut store, .. } = make(2, 2, false, 0);
    let entry = alloc_store(&mut store, BASE, 4, false);
    let pin = store.begin_store(BASE, 7).unwrap();
    assert_eq!(pin.block_offset, entry.block_offset);
    assert_eq!(store.commit_store(BASE, 8, true, |_| ()).unwrap().data_length, 8);
    assert!(store.begin_store(BASE, 7).is_err());
    assert_eq!(store.begin_free(BASE, PREFILL, TOKEN, None), Ok(Freeing::Waiting));
    assert!(store.end_load(&pin).unwrap().is_some());
    assert!(store.begin_store(BASE, 7).is_err());
}

#[test]
fn known_crcs_are_those_of_one_binding() {
    let mut store = make(1, 1, false, 0).store;
    let bound = |store: &mut BlockStore| {
        let entry = alloc_store(store, BASE, 8, true);
        store.known_crcs(&entry).unwrap()
    };
    let first = bound(&mut store);
    let entry = store.read(BASE).unwrap();
    assert_eq!(
        store.known_crcs(&entry).unwrap(),
        first,
        "everybody who sends it shares them"
    );
    let freed = store.begin_free(BASE, PREFILL, TOKEN, None).unwrap();
    assert!(matches!(freed, Freeing::Freed(_)));
    assert_ne!(bound(&mut store), first);
}

#[test]
fn the_crcs_of_a_block_are_known_once_nothing_is_stored_there_any_more() {
    let mut store = make(1, 1, false, 0).store;
    let entry = alloc_store(&mut store, BASE, 8, false);
    assert!(store.known_crcs(&entry).is_none());
    let entry = store.commit_store(BASE, 8, true, |_| ()).unwrap();
    assert!(store.known_crcs(&entry).is_some());
}
