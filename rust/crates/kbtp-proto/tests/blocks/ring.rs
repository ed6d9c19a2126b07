//! The free-block ring step by step (draft 3.3, profile 5, 6.2, 6.9), looked at as words in memory.

use std::sync::atomic::{AtomicU32, Ordering};

use kbtp_proto::blocks::{CounterForm, FreeBlockRing, Pool, RingMemory, Words};
use kbtp_proto::types::TerminateCause;

use crate::words::{Counted, Shared, Watched, native, network, zeroed};

const EMPTY: u64 = u64::MAX;
const BLOCKS: [u64; 4] = [0x1000, 0x2000, 0x3000, 0x4000];

/// What a peer of a direct mode could see.
pub(crate) struct Memories {
    pub(crate) slots: Shared,
    pub(crate) head: Shared,
    pub(crate) tail: Shared,
}

impl Memories {
    pub(crate) fn new(slot_count: usize) -> Self {
        Self {
            slots: zeroed(2 * slot_count),
            head: zeroed(1),
            tail: zeroed(1),
        }
    }

    /// (Sequence, Block Offset) of every slot.
    pub(crate) fn slot_contents(&self) -> Vec<(u32, u64)> {
        let words = network(&self.slots);
        let slots = words.chunks_exact(2);
        slots
            .map(|slot| {
                assert_eq!(slot[0] as u32, 0, "reserved");
                ((slot[0] >> 32) as u32, slot[1])
            })
            .collect()
    }

    pub(crate) fn counters(&self) -> (u64, u64) {
        (native(&self.head), native(&self.tail))
    }

    fn set_head(&self, value: u64) {
        self.head[0].store(value, Ordering::SeqCst);
    }

    fn memory(&self) -> RingMemory {
        RingMemory {
            slots: Box::new(self.slots.clone()),
            head: Box::new(self.head.clone()),
            tail: Box::new(self.tail.clone()),
        }
    }

    /// Over blocks at 0x1000, 0x2000 and so on.
    pub(crate) fn ring(&self, blocks: u32, masked: bool, first_ticket: u32) -> FreeBlockRing {
        let order = (self.slots.len() / 2).ilog2();
        let form = if masked {
            CounterForm::masked(order).unwrap()
        } else {
            CounterForm::unmasked(order).unwrap()
        };
        FreeBlockRing::new(self.memory(), form, pool(blocks), first_ticket).unwrap()
    }
}

fn pool(blocks: u32) -> Pool {
    Pool::new(0x1000, blocks, 0x1000).unwrap()
}

fn four() -> (FreeBlockRing, Memories) {
    let memories = Memories::new(4);
    (memories.ring(4, true, 0), memories)
}

// --- Initialization ---

#[test]
fn slots_below_f_hold_the_blocks_and_the_rest_is_empty_one_turn_earlier() {
    let memories = Memories::new(4);
    memories.ring(3, true, 0);
    assert_eq!(
        memories.slot_contents(),
        [(0, 0x1000), (1, 0x2000), (2, 0x3000), (u32::MAX, EMPTY)]
    );
    memories.ring(1, true, 0);
    assert_eq!(
        memories.slot_contents(),
        [
            (0, 0x1000),
            (u32::MAX - 2, EMPTY),
            (u32::MAX - 1, EMPTY),
            (u32::MAX, EMPTY)
        ]
    );
}

#[test]
fn head_starts_at_zero_and_tail_at_f() {
    for (masked, f, tail) in [
        (true, 3, 0x0000_0003_0000_0030),
        (true, 4, 0x0000_0004_0000_0000),
        (false, 3, 0x0000_0003_0000_0000),
        (false, 4, 0x0000_0004_0000_0000),
    ] {
        let memories = Memories::new(4);
        memories.ring(f, masked, 0);
        assert_eq!(memories.counters(), (0, tail));
    }
}

#[test]
fn a_preset_first_ticket_is_the_same_ring_later_in_its_life() {
    let memories = Memories::new(4);
    memories.ring(3, true, u32::MAX - 1);
    // Tickets fffffffe, ffffffff and 0 lie in slots 2, 3 and 0; slot 1 awaits ticket 1.
    assert_eq!(
        memories.slot_contents(),
        [
            (0, 0x3000),
            (u32::MAX - 2, EMPTY),
            (u32::MAX - 1, 0x1000),
            (u32::MAX, 0x2000)
        ]
    );
    assert_eq!(memories.counters(), (0xFFFF_FFFE_0000_0020, 0x0000_0001_0000_0010));
}

#[test]
fn a_ring_for_one_block_has_two_slots() {
    let mut ring = Memories::new(2).ring(1, true, 0);
    for _ in 0..5 {
        assert_eq!(ring.allocate(), Some(0x1000));
        assert_eq!(ring.allocate(), None);
        ring.free(0x1000).unwrap();
    }
}

// --- Allocation ---

#[test]
fn an_allocation_reads_the_slot_of_its_ticket_and_consumes_it() {
    let (mut ring, memories) = four();
    assert_eq!(ring.take_head_ticket(), 0);
    assert_eq!(memories.counters().0, 0x0000_0001_0000_0010);
    assert_eq!(ring.read_slot(0), Some(0x1000));
    assert_eq!(memories.slot_contents()[0], (0, 0x1000));
    ring.consume(0).unwrap();
    assert_eq!(memories.slot_contents()[0], (0, EMPTY));
    assert_eq!(ring.read_slot(0), None);
    assert_eq!(ring.free_count(), 3);
}

#[test]
fn blocks_are_handed_out_in_the_order_they_were_freed() {
    let mut ring = Memories::new(4).ring(4, true, u32::MAX);
    for expected in BLOCKS.map(Some).into_iter().chain([None]) {
        assert_eq!(ring.allocate(), expected);
    }
    for block_offset in [0x3000, 0x1000] {
        ring.free(block_offset).unwrap();
    }
    assert_eq!(
        [ring.allocate(), ring.allocate(), ring.allocate()],
        [Some(0x3000), Some(0x1000), None]
    );
}

#[test]
fn an_allocation_that_finds_no_block_takes_no_ticket() {
    let memories = Memories::new(4);
    let mut ring = memories.ring(1, true, 0);
    assert_eq!(ring.allocate(), Some(0x1000));
    let before = memories.counters();
    assert_eq!(ring.allocate(), None);
    assert_eq!(memories.counters(), before);
}

/// A peer's FetchAdds come right before the first of this side's, so many of them (draft 6.6).
struct PeerIsFaster(Shared, AtomicU32);

impl Words for PeerIsFaster {
    fn count(&self) -> usize {
        self.0.count()
    }

    fn load(&self, index: usize) -> u64 {
        self.0.load(index)
    }

    fn store(&self, index: usize, value: u64) {
        self.0.store(index, value);
    }

    fn update(&self, index: usize, operate: &mut dyn FnMut(u64) -> u64) -> u64 {
        for _ in 0..self.1.swap(0, Ordering::SeqCst) {
            let form = CounterForm::masked(2).unwrap();
            self.0.update(index, &mut |value| form.advance(value));
        }
        self.0.update(index, operate)
    }
}

#[test]
fn no_ticket_is_taken_for_a_block_that_a_peer_was_faster_to_get() {
    for (blocks, faster, expected) in [(1, 1, None), (3, 1, Some(0x2000)), (3, 2, Some(0x3000)), (3, 3, None)] {
        let memories = Memories::new(4);
        let memory = RingMemory {
            head: Box::new(PeerIsFaster(memories.head.clone(), AtomicU32::new(faster))),
            ..memories.memory()
        };
        let form = CounterForm::masked(2).unwrap();
        let mut ring = FreeBlockRing::new(memory, form, pool(blocks), 0).unwrap();
        assert_eq!(ring.allocate(), expected);
        let taken = faster + u32::from(expected.is_some());
        assert_eq!(memories.counters().0, form.encode(taken));
        assert_eq!(ring.unbound_count(), faster);
        assert_eq!(ring.outstanding_tickets(), Ok((0..faster).collect()));
    }
}

// --- Free ---

#[test]
fn a_free_writes_a_consumed_slot() {
    let (mut ring, memories) = four();
    assert_eq!([ring.allocate(), ring.allocate()], [Some(0x1000), Some(0x2000)]);
    assert_eq!(ring.take_tail_ticket(), 4);
    assert_eq!(memories.counters().1, 0x0000_0005_0000_0010);
    assert_eq!(ring.publish(4, 0x2000), Ok(true));
    assert_eq!(memories.slot_contents()[..2], [(4, 0x2000), (1, EMPTY)]);
    assert_eq!((ring.free_count(), ring.deferred_count()), (3, 0));
}

#[test]
fn a_free_is_deferred_until_the_slot_is_consumed() {
    let (mut ring, memories) = four();
    let (slow, quick) = (ring.take_head_ticket(), ring.take_head_ticket());
    ring.consume(quick).unwrap();
    let ticket = ring.take_tail_ticket();
    assert_eq!(ring.publish(ticket, 0x2000), Ok(false));
    assert_eq!(memories.slot_contents()[0], (slow, 0x1000));
    assert_eq!((ring.free_count(), ring.deferred_count()), (4, 1));
    ring.consume(slow).unwrap();
    assert_eq!(memories.slot_contents()[0], (ticket, 0x2000));
    assert_eq!((ring.free_count(), ring.deferred_count()), (3, 0));
}

#[test]
fn whoever_sees_the_new_sequence_sees_the_new_block_offset() {
    let watched = Watched::new(zeroed(8));
    let memory = RingMemory {
        slots: Box::new(watched.clone()),
        head: Box::new(zeroed(1)),
        tail: Box::new(zeroed(1)),
    };
    let mut ring = FreeBlockRing::new(memory, CounterForm::masked(2).unwrap(), pool(4), 0).unwrap();
    assert_eq!([ring.allocate(), ring.allocate()], [Some(0x1000), Some(0x2000)]);
    watched.take_states();
    ring.free(0x2000).unwrap();
    let seen: Vec<_> = watched.take_states().iter().map(|state| (state[0], state[1])).collect();
    assert_eq!(seen, [(0, 0x2000), (4 << 32, 0x2000)]);
}

/// Profile 6.2: frees u = 4 and u = 8 hold Tail tickets for slot 0 while the allocation of ticket 0 has not read it.
/// Then it consumes the slot, and the later free comes to write first.
#[test]
fn the_later_of_two_frees_waits_for_the_earlier() {
    let (mut ring, _) = four();
    let slow = ring.take_head_ticket();
    let held = [(); 3].map(|()| ring.allocate().unwrap()); // tickets 1 to 3
    let earlier = ring.take_tail_ticket(); // 4
    ring.free(held[1]).unwrap(); // 5
    ring.free(held[2]).unwrap(); // 6
    let waiting = ring.take_head_ticket(); // 4: its block is on its way
    assert_eq!([ring.allocate(), ring.allocate()], [Some(held[1]), Some(held[2])]);
    ring.free(held[1]).unwrap(); // 7
    let later = ring.take_tail_ticket(); // 8
    assert_eq!([slow, waiting, earlier, later], [0, 4, 4, 8]);
    ring.consume(slow).unwrap();
    assert_eq!(ring.publish(later, held[2]), Ok(false));
    assert_eq!(ring.publish(earlier, held[0]), Ok(true));
    assert_eq!(ring.read_slot(waiting), Some(held[0]));
    ring.consume(waiting).unwrap();
    assert_eq!(ring.read_slot(later), Some(held[2]));
    assert_eq!(ring.deferred_count(), 0);
}

// --- Head is written by peers (profile 6.9, 8.10) ---

#[test]
fn a_head_that_only_fetch_adds_moved_passes() {
    for masked in [true, false] {
        let mut ring = Memories::new(4).ring(4, masked, u32::MAX - 1);
        for expected in [u32::MAX - 1, u32::MAX, 0, 1, 2] {
            assert_eq!(ring.audit_head(), Ok(expected));
            if expected != 2 {
                ring.take_head_ticket();
            }
        }
    }
}

#[test]
fn any_other_head_ends_the_stream() {
    for (masked, head) in [
        (true, 0x0000_0001_0000_0020),  // slot offset of another ticket
        (true, 0x0000_0001_0000_0011),  // slot offset not a multiple of 16
        (true, 0x0000_0001_0000_0050),  // filler bit n+4
        (true, 0x0000_0001_8000_0010),  // filler bit 31
        (true, 0x0000_0005_0000_0010),  // beyond Tail
        (true, 0xFFFF_FFFF_0000_0030),  // back before the first ticket
        (true, 0x8000_0000_0000_0000),  // half a turn of tickets away
        (false, 0x0000_0001_0000_0010), // unmasked with a slot offset
        (false, 0x0000_0005_0000_0000), // unmasked beyond Tail
    ] {
        let memories = Memories::new(4);
        let mut ring = memories.ring(4, masked, 0);
        memories.set_head(head);
        let error = ring.audit_head().unwrap_err();
        assert_eq!(error.cause, TerminateCause::RdmapCatastrophicStream);
    }
}

#[test]
fn a_head_that_went_back_ends_the_stream_and_can_be_restored() {
    let memories = Memories::new(4);
    let mut ring = memories.ring(4, true, u32::MAX - 1);
    let form = CounterForm::masked(2).unwrap();
    let taken = [ring.take_head_ticket(), ring.take_head_ticket()];
    assert_eq!(ring.audit_head(), Ok(0));
    for back in taken {
        memories.set_head(form.encode(back));
        let error = ring.audit_head().unwrap_err();
        assert_eq!(error.cause, TerminateCause::RdmapCatastrophicStream);
        assert!(ring.outstanding_tickets().is_err() && ring.is_outstanding(taken[0]).is_err());
    }
    ring.restore_head();
    assert_eq!((memories.counters().0, ring.audit_head()), (form.encode(0), Ok(0)));
    ring.take_head_ticket();
    ring.restore_head();
    assert_eq!(memories.counters().0, form.encode(1), "what is by rule stays");
    assert_eq!(ring.outstanding_tickets(), Ok(vec![taken[0], taken[1], 0]));
}

#[test]
fn what_was_consumed_was_taken_and_head_does_not_go_back_behind_it() {
    let memories = Memories::new(4);
    let mut ring = memories.ring(4, true, 0);
    let form = CounterForm::masked(2).unwrap();
    assert!(ring.allocate().is_some() && ring.allocate().is_some());
    memories.set_head(form.encode(1));
    assert!(ring.audit_head().is_err());
    memories.set_head(form.encode(2));
    assert_eq!((ring.audit_head(), ring.unbound_count()), (Ok(2), 0));
}

#[test]
fn tickets_are_outstanding_once_taken_and_written_and_until_consumed() {
    let (mut ring, _) = four();
    assert_eq!(
        (ring.outstanding_tickets(), ring.is_outstanding(0)),
        (Ok(vec![]), Ok(false))
    );
    let tickets = [(); 4].map(|()| ring.take_head_ticket());
    assert_eq!(
        (ring.outstanding_tickets(), ring.unbound_count()),
        (Ok(tickets.to_vec()), 4)
    );
    for bound in [2, 0] {
        ring.consume(bound).unwrap();
    }
    assert_eq!((ring.outstanding_tickets(), ring.unbound_count()), (Ok(vec![1, 3]), 2));
    ring.free(0x3000).unwrap();
    let waiting = ring.take_head_ticket();
    assert_eq!((waiting, ring.is_outstanding(waiting)), (4, Ok(true)));
    assert_eq!(ring.outstanding_tickets(), Ok(vec![1, 3, 4]));
    assert_eq!(
        [0, 2, 5].map(|ticket| ring.is_outstanding(ticket)),
        [Ok(false), Ok(false), Ok(false)]
    );
}

#[test]
fn no_head_leads_the_target_outside_the_ring() {
    for head in [u64::MAX, 0xFFFF_FFFF_FFFF_FFF0, 0x1234_5678_9ABC_DEF0] {
        let (mut ring, memories) = four();
        memories.set_head(head);
        assert_eq!(ring.allocate(), None);
        let ticket = ring.take_head_ticket();
        assert_eq!(ring.read_slot(ticket), None);
        assert_eq!(
            memories.slot_contents(),
            [(0, 0x1000), (1, 0x2000), (2, 0x3000), (3, 0x4000)]
        );
    }
}

// --- the caller's mistakes ---

#[test]
fn steps_out_of_turn_are_refused() {
    let mut ring = Memories::new(4).ring(3, true, 0);
    assert!(ring.consume(3).unwrap_err().0.contains("holds no block"));
    assert!(ring.publish(3, 0x1000).unwrap_err().0.contains("not taken from Tail"));
    let ticket = ring.take_tail_ticket();
    for not_taken in [0x1000, 0x4000, 0x1001] {
        let error = ring.publish(ticket, not_taken).unwrap_err();
        assert!(error.0.contains("not taken from this ring"));
    }
    assert_eq!(ring.allocate(), Some(0x1000));
    assert_eq!(ring.publish(ticket, 0x1000), Ok(true));
    assert!(
        ring.publish(ticket, 0x1000)
            .unwrap_err()
            .0
            .contains("published already")
    );
    assert!(ring.free(0x1000).unwrap_err().0.contains("not taken from this ring"));
}

#[test]
fn memory_and_numbers_that_do_not_fit() {
    let form = CounterForm::masked(2).unwrap();
    let refused = |memories: &Memories, blocks| {
        let ring = FreeBlockRing::new(memories.memory(), form, pool(blocks), 0);
        ring.map(drop).unwrap_err().0
    };
    assert!(refused(&Memories::new(4), 5).contains("5 blocks: 1 to 4"));
    assert!(refused(&Memories::new(2), 4).contains("ring slots: 8 words"));
    let mut memories = Memories::new(4);
    memories.tail = zeroed(2);
    assert!(refused(&memories, 4).contains("Tail: 1 words"));
}

/// The owner asks often, and the rest of the target waits for it.
#[test]
fn no_slot_is_looked_at_for_tickets_where_none_is_out() {
    let slots = Counted::new(zeroed(8));
    let memory = RingMemory {
        slots: Box::new(slots.clone()),
        head: Box::new(zeroed(1)),
        tail: Box::new(zeroed(1)),
    };
    let mut ring = FreeBlockRing::new(memory, CounterForm::masked(2).unwrap(), pool(4), u32::MAX).unwrap();
    let ticket = ring.take_head_ticket();
    ring.consume(ticket).unwrap();
    slots.take_loads();
    assert_eq!((ring.outstanding_tickets(), slots.take_loads()), (Ok(vec![]), 0));
    let ticket = ring.take_head_ticket();
    assert_eq!(ring.outstanding_tickets(), Ok(vec![ticket]));
    assert!(slots.take_loads() > 0);
}
