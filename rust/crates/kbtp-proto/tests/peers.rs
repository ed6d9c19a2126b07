//! What peers see of the table and the ring while their owner changes them, in threads of their own.
//!
//! Natively many turns race for real; under Miri, which reorders what the memory model lets be reordered, each seed is one
//! more order (`make sanitize`).
#![allow(clippy::unwrap_used)]

use std::sync::Arc;
use std::sync::atomic::AtomicU64;
use std::thread;

use kbtp_proto::blocks::{BlockTable, CounterForm, FreeBlockRing, Pool, RingMemory, Words};

const TURNS: usize = if cfg!(miri) { 2 } else { 2_000 };
const BLOCK_BYTES: u32 = 512;
const HANDLE: u64 = 7;
const EMPTY: u64 = u64::MAX;
const VALID: u64 = 1 << 48;
const ORDER: u32 = 1;

/// Words, and a peer's way to them.
type Shared = Arc<Box<[AtomicU64]>>;

fn words(count: usize) -> Shared {
    Arc::new((0..count).map(|_| AtomicU64::new(0)).collect())
}

/// As RDMA Reads see them, in network byte order.
fn network(words: &Shared, index: usize) -> u64 {
    u64::from_be(words.load(index))
}

#[test]
fn an_entry_whose_state_word_did_not_change_meanwhile_is_whole() {
    const OFFSETS: [u64; 2] = [0x1000, 0x2000];
    for _ in 0..TURNS {
        let memory = words(2);
        let mut table = BlockTable::new(Box::new(Arc::clone(&memory)), HANDLE, 1).unwrap();
        let peer = thread::spawn(move || {
            for _ in 0..4 {
                let (before, block_offset, after) = (network(&memory, 0), network(&memory, 1), network(&memory, 0));
                if before == after && before & VALID != 0 {
                    let state = ((before >> 32) as u16, before as u32);
                    let of_state = [((2, 10), OFFSETS[0]), ((2, 20), OFFSETS[0]), ((4, 30), OFFSETS[1])];
                    assert!(
                        of_state.contains(&(state, block_offset)),
                        "{state:?} with {block_offset:#x}"
                    );
                }
            }
        });
        table.bind(HANDLE, OFFSETS[0], 10, false).unwrap();
        table.update(HANDLE, 20, true).unwrap();
        table.unbind(HANDLE).unwrap();
        table.bind(HANDLE, OFFSETS[1], 30, false).unwrap();
        peer.join().unwrap();
    }
}

/// What a peer of a direct mode sees of a ring (draft 6.6).
#[derive(Clone)]
struct Ring {
    slots: Shared,
    head: Shared,
    form: CounterForm,
}

/// A ring of two slots and two blocks, whose tickets are about to wrap.
fn ring(masked: bool) -> (FreeBlockRing, Ring) {
    let form = if masked {
        CounterForm::masked(ORDER)
    } else {
        CounterForm::unmasked(ORDER)
    }
    .unwrap();
    let (slots, head, tail) = (words(FreeBlockRing::slot_words_for(form) as usize), words(1), words(1));
    let memory = RingMemory {
        slots: Box::new(Arc::clone(&slots)),
        head: Box::new(Arc::clone(&head)),
        tail: Box::new(tail),
    };
    let pool = Pool::new(BLOCK_BYTES, 2, 0x1000).unwrap();
    let owner = FreeBlockRing::new(memory, form, pool, u32::MAX).unwrap();
    (owner, Ring { slots, head, form })
}

impl Ring {
    fn take_ticket(&self) -> u32 {
        self.form
            .ticket_of(self.head.update(0, &mut |value| self.form.advance(value)))
    }

    /// Reads the slot of its ticket until its block is there.
    fn await_block(&self, ticket: u32) -> u64 {
        let index = 2 * (ticket & ((1 << ORDER) - 1)) as usize;
        loop {
            let sequence = (network(&self.slots, index) >> 32) as u32;
            let block_offset = network(&self.slots, index + 1);
            if sequence == ticket && block_offset != EMPTY {
                return block_offset;
            }
            thread::yield_now();
        }
    }
}

#[test]
fn a_peer_and_the_owner_never_get_the_same_block() {
    for turn in 0..TURNS {
        let (mut owner, ring) = ring(turn % 2 == 0);
        let peer = thread::spawn(move || {
            let ticket = ring.take_ticket();
            (ticket, ring.await_block(ticket))
        });
        // Two turns of the owner, so that the peer's ticket may be one whose block is still to be freed.
        let first = owner.allocate().unwrap();
        owner.free(first).unwrap();
        let second = owner.allocate();
        let (ticket, block_offset) = peer.join().unwrap();
        assert!([0x1000, 0x1000 + u64::from(BLOCK_BYTES)].contains(&block_offset));
        assert_ne!(Some(block_offset), second);
        assert!([u32::MAX, 0, 1].contains(&ticket));
        assert!(owner.audit_head().is_ok());
        // The peer binds its block: the owner consumes the slot, and frees it with its own.
        owner.consume(ticket).unwrap();
        owner.free(block_offset).unwrap();
        second
            .into_iter()
            .for_each(|block_offset| owner.free(block_offset).unwrap());
        assert_eq!((owner.free_count(), owner.deferred_count()), (2, 0));
    }
}

#[test]
fn fetch_adds_give_each_a_ticket_of_its_own() {
    for turn in 0..TURNS {
        let (mut owner, ring) = ring(turn % 2 == 0);
        let peers =
            [ring.clone(), ring.clone()].map(|ring| thread::spawn(move || [ring.take_ticket(), ring.take_ticket()]));
        let ours = [owner.take_head_ticket(), owner.take_head_ticket()];
        let theirs = peers.map(|peer| peer.join().unwrap());
        let mut tickets = [ours, theirs[0], theirs[1]].concat();
        tickets.sort_unstable();
        assert_eq!(tickets, [0, 1, 2, 3, 4, u32::MAX]);
        assert_eq!(ring.head.load(0), ring.form.encode(5));
    }
}
