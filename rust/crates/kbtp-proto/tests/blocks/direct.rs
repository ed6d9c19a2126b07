//! Partitions and the tickets that peers take there (draft 3.4, 6.6, profile 6.8 to 6.11, 8.10).

use std::sync::atomic::Ordering;

use kbtp_proto::blocks::{
    Allocation, Binding, BlockStore, CounterForm, Entry, FreeToken, Freeing, PartitionBlocks, PartitionError,
    RingMemory, StoreMemory,
};
use kbtp_proto::types::{EntryFlag, Status, TerminateCause};

use crate::store::{BASE, Cleared, POOL_BASE, begin_alloc_store, config};
use crate::words::{Shared, zeroed};

pub(crate) const DIRECT: u64 = 7;
const TOKEN: FreeToken = FreeToken::Python(0);
const EMPTY: u64 = u64::MAX;

/// A holder's own ring as its peer sees it.
#[derive(Clone)]
pub(crate) struct Peer {
    pub(crate) slots: Shared,
    pub(crate) head: Shared,
    pub(crate) form: CounterForm,
}

impl Peer {
    fn new(block_count: u32) -> Self {
        let blocks = PartitionBlocks {
            first: 0,
            count: block_count,
        };
        let order = blocks.ring_order().unwrap();
        Self {
            slots: zeroed(2 << order),
            head: zeroed(1),
            form: CounterForm::masked(order).unwrap(),
        }
    }

    pub(crate) fn memory(&self) -> RingMemory {
        RingMemory {
            slots: Box::new(self.slots.clone()),
            head: Box::new(self.head.clone()),
            tail: Box::new(zeroed(1)),
        }
    }

    pub(crate) fn take(&self) -> u32 {
        let advance = |value| Some(self.form.advance(value));
        let old = self.head[0].fetch_update(Ordering::SeqCst, Ordering::SeqCst, advance);
        self.form.ticket_of(old.unwrap())
    }

    fn set_head(&self, value: u64) {
        self.head[0].store(value, Ordering::SeqCst);
    }

    fn head(&self) -> u64 {
        self.head[0].load(Ordering::SeqCst)
    }
}

pub(crate) struct Made {
    pub(crate) store: BlockStore,
    pub(crate) cleared: Cleared,
}

/// `shared` blocks for everybody, then `direct` ones.
pub(crate) fn make(shared: u32, direct: u32, first_ticket: u32, clear_on_free: bool) -> Made {
    let mut config = config(shared + direct, first_ticket);
    config.direct_blocks = direct;
    let memory = StoreMemory {
        table: Box::new(zeroed(config.table_words() as usize)),
        ring: RingMemory {
            slots: Box::new(zeroed(config.slot_words().unwrap() as usize)),
            head: Box::new(zeroed(1)),
            tail: Box::new(zeroed(1)),
        },
    };
    let cleared = Cleared::default();
    let list = cleared.clone();
    let clear = move |position, length| list.lock().unwrap().push((position, length));
    let store = BlockStore::new(&config, memory, clear_on_free.then(|| Box::new(clear) as _)).unwrap();
    Made { store, cleared }
}

/// A partition of blocks `first` to `first + count - 1`.
pub(crate) fn open(store: &mut BlockStore, holder: u64, first: u32, count: u32) -> Peer {
    let peer = Peer::new(count);
    let blocks = PartitionBlocks { first, count };
    store.open_partition(holder, blocks, peer.memory()).unwrap();
    peer
}

pub(crate) fn block(number: u64) -> u64 {
    POOL_BASE + 512 * number
}

fn alloc_store(store: &mut BlockStore, handle: u64, holder: u64) -> u64 {
    let block_offset = begin_alloc_store(store, handle, holder);
    store.commit_alloc_store(handle, block_offset, 4, true).unwrap();
    block_offset
}

fn free(store: &mut BlockStore, handle: u64, holder: u64) {
    let freeing = store.begin_free(handle, holder, TOKEN, None);
    assert!(matches!(freeing, Ok(Freeing::Freed(_))));
}

fn outstanding(store: &mut BlockStore) -> Vec<u32> {
    store.partition(DIRECT).unwrap().outstanding_tickets().unwrap()
}

#[test]
fn each_holder_allocates_from_its_ring_and_its_blocks_go_back_there() {
    let mut store = make(2, 3, 0, false).store;
    open(&mut store, DIRECT, 2, 3);
    store.quotas_mut().grant(1, 2).unwrap();
    assert_eq!((store.quotas().quota(DIRECT), store.quotas().left()), (3, 0));
    let mine = [0, 1, 2].map(|n| alloc_store(&mut store, BASE + n, DIRECT));
    let others = [3, 4].map(|n| alloc_store(&mut store, BASE + n, 1));
    assert_eq!((mine, others), ([block(2), block(3), block(4)], [block(0), block(1)]));
    for (handle, holder) in [(BASE + 5, DIRECT), (BASE + 5, 1)] {
        let refused = store.begin_alloc_store(handle, holder);
        assert_eq!(refused, Ok(Allocation::Refused(Status::NoSpace)));
    }
    free(&mut store, BASE + 3, 1);
    free(&mut store, BASE, DIRECT);
    assert_eq!(store.partition(DIRECT).unwrap().free_count(), 1);
    assert_eq!(alloc_store(&mut store, BASE, DIRECT), block(2));
    assert_eq!(alloc_store(&mut store, BASE + 3, 1), block(0));
}

#[test]
fn a_free_that_waited_for_a_load_goes_back_to_its_own_ring() {
    let mut store = make(1, 1, 0, false).store;
    open(&mut store, DIRECT, 1, 1);
    alloc_store(&mut store, BASE, DIRECT);
    let pin = store.begin_load(BASE, 9).unwrap();
    assert_eq!(store.begin_free(BASE, DIRECT, TOKEN, None), Ok(Freeing::Waiting));
    assert_eq!(store.partition(DIRECT).unwrap().free_count(), 0);
    assert!(
        store
            .close_partition(DIRECT)
            .unwrap_err()
            .0
            .contains("blocks or tickets out")
    );
    assert!(store.end_load(&pin).unwrap().is_some());
    assert_eq!(store.close_partition(DIRECT).unwrap().blocks().pool_base(), block(1));
    assert_eq!(store.quotas().quota(DIRECT), 0);
}

#[test]
fn a_ticket_binds_the_block_of_its_slot() {
    for first_ticket in [0, u32::MAX] {
        let mut store = make(1, 3, first_ticket, false).store;
        let peer = open(&mut store, DIRECT, 1, 3);
        let tickets = [peer.take(), peer.take()];
        assert_eq!(outstanding(&mut store), tickets);
        let bound = store.bind_ticket(BASE, DIRECT, tickets[1], block(2), 7, true);
        let entry = Entry {
            flags: EntryFlag::all(),
            generation: 2,
            data_length: 7,
            block_offset: block(2),
        };
        assert_eq!((bound, store.read(BASE)), (Ok(Binding::Bound(entry)), Ok(entry)));
        assert_eq!(outstanding(&mut store), tickets[..1]);
        assert_eq!((store.quotas().usage(DIRECT), store.free_blocks()), (1, 3));
    }
}

#[test]
fn another_ticket_or_another_block_is_a_mismatch_and_changes_nothing() {
    let mut store = make(1, 4, 0, false).store;
    let peer = open(&mut store, DIRECT, 1, 4);
    let (bound, out) = (peer.take(), peer.take());
    store.bind_ticket(BASE, DIRECT, bound, block(1), 0, false).unwrap();
    for (ticket, block_offset) in [
        (bound, block(1)),
        (out + 1, block(3)),
        (out + 4, block(2)),
        (out.wrapping_sub(4), block(2)),
        (out, block(1)),
        (out, EMPTY),
    ] {
        let refused = store.bind_ticket(BASE + 1, DIRECT, ticket, block_offset, 0, false);
        assert_eq!(refused, Ok(Binding::Refused(Status::TicketMismatch)));
        assert_eq!((outstanding(&mut store), store.quotas().usage(DIRECT)), (vec![out], 1));
        assert!(!store.read(BASE + 1).unwrap().valid());
    }
}

#[test]
fn tickets_that_are_out_are_usage_and_a_bind_counts_its_own_once() {
    let mut store = make(1, 3, 0, false).store;
    let peer = open(&mut store, DIRECT, 1, 3);
    alloc_store(&mut store, BASE, DIRECT);
    let tickets = [peer.take(), peer.take()];
    let head = peer.head();
    let refused = store.begin_alloc_store(BASE + 1, DIRECT);
    assert_eq!((refused, peer.head()), (Ok(Allocation::Refused(Status::NoSpace)), head));
    let refused = store.bind_ticket(BASE + 1, DIRECT, 9, block(2), 0, false);
    assert_eq!(refused, Ok(Binding::Refused(Status::NoSpace)));
    for (n, ticket) in (1..).zip(tickets) {
        let bound = store.bind_ticket(BASE + n, DIRECT, ticket, block(1 + n), 0, false);
        assert!(matches!(bound, Ok(Binding::Bound(_))));
    }
    assert_eq!(store.quotas().usage(DIRECT), 3);
}

#[test]
fn a_slot_that_waits_for_another_ticket_is_a_target_error() {
    let mut store = make(1, 2, 0, false).store;
    let peer = open(&mut store, DIRECT, 1, 2);
    let slow = peer.take();
    alloc_store(&mut store, BASE, DIRECT);
    free(&mut store, BASE, DIRECT);
    let refused = store.begin_alloc_store(BASE, DIRECT);
    assert_eq!(refused, Ok(Allocation::Refused(Status::TargetError)));
    assert_eq!(store.quotas().usage(DIRECT), 0);
    store.bind_ticket(BASE, DIRECT, slow, block(1), 0, false).unwrap();
    assert_eq!(alloc_store(&mut store, BASE + 1, DIRECT), block(2));
}

#[test]
fn a_reclaimed_block_is_cleared_and_returns_with_a_new_ticket() {
    let Made { mut store, cleared } = make(1, 2, 0, true);
    let peer = open(&mut store, DIRECT, 1, 2);
    let tickets = [peer.take(), peer.take()];
    assert_eq!(store.reclaim_ticket(DIRECT, tickets[0]), Ok(block(1)));
    assert_eq!(*cleared.lock().unwrap(), [(512, 512)]);
    assert_eq!(outstanding(&mut store), tickets[1..]);
    let refused = store.bind_ticket(BASE, DIRECT, tickets[0], block(1), 0, false);
    assert_eq!(refused, Ok(Binding::Refused(Status::TicketMismatch)));
    assert!(matches!(
        store.reclaim_ticket(DIRECT, tickets[0]),
        Err(PartitionError::Misuse(_))
    ));
    let again = peer.take();
    assert_eq!(store.partition(DIRECT).unwrap().read_slot(again), Some(block(1)));
}

#[test]
fn a_head_that_is_not_by_rule_gets_nothing_done_and_is_mended() {
    let form = CounterForm::masked(2).unwrap();
    for head in [
        form.encode(5),
        form.encode(1),
        2 << 32 | 16,
        2 << 32 | 1 << 31 | 32,
        u64::MAX,
    ] {
        let mut store = make(1, 4, 0, false).store;
        let peer = open(&mut store, DIRECT, 1, 4);
        let tickets = [peer.take(), peer.take()];
        assert_eq!(outstanding(&mut store), tickets);
        peer.set_head(head);
        let looks = [
            store
                .bind_ticket(BASE, DIRECT, tickets[0], block(1), 0, false)
                .map(drop),
            store.reclaim_ticket(DIRECT, tickets[0]).map(drop),
            store
                .partition(DIRECT)
                .unwrap()
                .audit_head()
                .map(drop)
                .map_err(Into::into),
        ];
        for look in looks {
            let Err(PartitionError::Misbehaved(error)) = look else {
                panic!("{look:?}");
            };
            assert_eq!(error.cause, TerminateCause::RdmapCatastrophicStream);
        }
        assert!(!store.read(BASE).unwrap().valid());
        store.partition(DIRECT).unwrap().restore_head();
        assert_eq!(
            (peer.head(), outstanding(&mut store)),
            (form.encode(2), tickets.to_vec())
        );
        for ticket in tickets {
            store.reclaim_ticket(DIRECT, ticket).unwrap();
        }
        let mut all = [0, 1, 2, 3].map(|n| alloc_store(&mut store, BASE + n, DIRECT));
        all.sort_unstable();
        assert_eq!(all, [1, 2, 3, 4].map(block));
    }
}

#[test]
fn an_allocation_for_a_hostile_head_is_refused_and_takes_no_block_twice() {
    for head in [u64::MAX, 0xFFFF_FFFF << 32, 5 << 32 | 16, 0x8000_0000 << 32] {
        let mut store = make(1, 4, 0, false).store;
        let peer = open(&mut store, DIRECT, 1, 4);
        alloc_store(&mut store, BASE, DIRECT);
        peer.set_head(head);
        let refused = store.begin_alloc_store(BASE + 1, DIRECT);
        assert_eq!(refused, Ok(Allocation::Refused(Status::NoSpace)));
        assert_eq!((peer.head(), store.quotas().usage(DIRECT)), (head, 1));
    }
}

#[test]
fn partitions_lie_in_what_is_set_aside_and_do_not_meet() {
    let mut store = make(2, 4, 0, false).store;
    open(&mut store, 1, 3, 2);
    let refused = |store: &mut BlockStore, holder, first, count| {
        let blocks = PartitionBlocks { first, count };
        let opened = store.open_partition(holder, blocks, Peer::new(count.clamp(1, 8)).memory());
        opened.unwrap_err().0
    };
    for (first, count) in [(1, 1), (1, 2), (2, 2), (3, 1), (4, 2), (2, 4), (5, 2), (6, 1), (5, 0)] {
        refused(&mut store, 2, first, count);
    }
    assert!(refused(&mut store, 1, 5, 1).contains("set apart"));
    open(&mut store, 2, 2, 1);
    open(&mut store, 3, 5, 1);
    store.close_partition(1).unwrap();
    open(&mut store, 4, 3, 2);
    assert_eq!(store.free_blocks(), 6);
}

#[test]
fn calls_out_of_turn_are_refused() {
    let mut store = make(1, 2, 0, false).store;
    store.quotas_mut().grant(1, 1).unwrap();
    alloc_store(&mut store, BASE, 1);
    let one = PartitionBlocks { first: 1, count: 1 };
    let error = store.open_partition(1, one, Peer::new(1).memory()).unwrap_err();
    assert!(error.0.contains("in use"));
    let peer = open(&mut store, DIRECT, 1, 2);
    let ticket = peer.take();
    let misuse = |result: Result<Binding, PartitionError>| {
        let Err(PartitionError::Misuse(error)) = result else {
            panic!("{result:?}");
        };
        error.0
    };
    let bind = |store: &mut BlockStore, handle, holder, length| {
        misuse(store.bind_ticket(handle, holder, ticket, block(1), length, false))
    };
    assert!(bind(&mut store, BASE + 1, 1, 0).contains("has no partition"));
    assert!(bind(&mut store, BASE, DIRECT, 0).contains("bound or being bound"));
    assert!(bind(&mut store, BASE + 1, DIRECT, 513).contains("0 to 512"));
    assert!(bind(&mut store, BASE + 8, DIRECT, 0).contains("not in the table"));
    assert!(matches!(
        store.reclaim_ticket(1, ticket),
        Err(PartitionError::Misuse(_))
    ));
    assert!(store.close_partition(1).is_err() && store.close_partition(DIRECT).is_err());
    assert_eq!(
        (outstanding(&mut store), store.quotas().usage(DIRECT)),
        (vec![ticket], 0)
    );
}

#[test]
fn the_crcs_of_a_block_that_its_holder_reaches_are_never_known() {
    let mut store = make(1, 2, 0, false).store;
    store.quotas_mut().grant(1, 1).unwrap();
    let peer = open(&mut store, DIRECT, 1, 2);
    let known = |store: &mut BlockStore, handle| {
        let entry = store.read(handle).unwrap();
        assert!(entry.sealed());
        store.known_crcs(&entry).is_some()
    };
    let ticket = peer.take();
    store.bind_ticket(BASE, DIRECT, ticket, block(1), 4, true).unwrap();
    assert_eq!(alloc_store(&mut store, BASE + 1, DIRECT), block(2));
    assert_eq!(alloc_store(&mut store, BASE + 2, 1), block(0));
    assert_eq!([0, 1, 2].map(|n| known(&mut store, BASE + n)), [false, false, true]);
}
