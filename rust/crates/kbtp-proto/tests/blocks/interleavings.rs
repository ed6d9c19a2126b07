//! No block is lost or handed out twice, for any interleaving of the steps (draft 3.3).
//!
//! Allocations that have a ticket but have not read, that have read but not consumed, and frees that have a Tail ticket
//! but have not written wait for as long as they like, on a ring of four whose tickets may be about to wrap. The model
//! counts turns with integers that do not wrap; turn k has ticket (first ticket + k) mod 2^32.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::atomic::Ordering;

use kbtp_proto::blocks::{CounterForm, FreeBlockRing};
use proptest::prelude::*;

use crate::ring::Memories;

const N: i64 = 4;
const EMPTY: u64 = u64::MAX;

struct Machine {
    memories: Memories,
    ring: FreeBlockRing,
    form: CounterForm,
    first: u32,
    blocks: Vec<u64>,
    next_head: i64,
    next_tail: i64,
    /// The block that the allocation of a turn must get.
    promised: BTreeMap<i64, u64>,
    published: BTreeSet<i64>,
    consumed: BTreeSet<i64>,
    /// Turns of allocations that have a ticket and have read nothing yet.
    asked: BTreeSet<i64>,
    /// Turns of allocations that have read their block.
    read: BTreeSet<i64>,
    /// Turns of frees that have a ticket and have written nothing yet.
    freeing: BTreeSet<i64>,
    /// Blocks allocated.
    held: BTreeSet<u64>,
}

fn nth<T: Copy>(set: &BTreeSet<T>, pick: usize) -> Option<T> {
    (!set.is_empty())
        .then(|| set.iter().nth(pick % set.len()).copied())
        .flatten()
}

impl Machine {
    fn new(f: u32, first: u32, masked: bool) -> Self {
        let memories = Memories::new(N as usize);
        let ring = memories.ring(f, masked, first);
        let blocks: Vec<_> = (1..=u64::from(f)).map(|k| k * 0x1000).collect();
        Self {
            memories,
            ring,
            form: if masked {
                CounterForm::masked(2).unwrap()
            } else {
                CounterForm::unmasked(2).unwrap()
            },
            first,
            next_head: 0,
            next_tail: f.into(),
            promised: blocks.iter().enumerate().map(|(k, &block)| (k as i64, block)).collect(),
            blocks,
            published: (0..f.into()).collect(),
            consumed: (-N..0).collect(),
            asked: BTreeSet::new(),
            read: BTreeSet::new(),
            freeing: BTreeSet::new(),
            held: BTreeSet::new(),
        }
    }

    fn ticket(&self, turn: i64) -> u32 {
        self.first.wrapping_add(turn as u32)
    }

    /// Whether the turn's block must be in its slot now.
    fn ready(&self, turn: i64) -> bool {
        self.published.contains(&turn) && !self.consumed.contains(&turn) && self.consumed.contains(&(turn - N))
    }

    fn deferred(&self) -> Vec<i64> {
        let unread = self.published.difference(&self.consumed);
        unread.copied().filter(|&turn| !self.ready(turn)).collect()
    }

    fn step(&mut self, step: u8, pick: usize) {
        match step {
            0 if self.next_head <= self.next_tail => self.take_head_ticket(pick.is_multiple_of(2)),
            1 => self.read_slot(pick),
            2 => self.consume(pick),
            3 => self.take_tail_ticket(pick),
            4 => self.publish(pick),
            5 => drop(self.allocate()),
            6 => {
                if let Some(block) = nth(&self.held, pick) {
                    self.free(block);
                }
            }
            // Whoever has a step under way stays behind while the ring goes round.
            7 => {
                for _ in 0..=pick % (2 * N as usize) {
                    let Some(block) = self.allocate() else { break };
                    self.free(block);
                }
            }
            _ => {}
        }
    }

    /// By the target, or by a peer on the words of Head.
    fn take_head_ticket(&mut self, by_peer: bool) {
        let ticket = if by_peer {
            let advance = |value| Some(self.form.advance(value));
            let old = self.memories.head[0].fetch_update(Ordering::SeqCst, Ordering::SeqCst, advance);
            (old.unwrap() >> 32) as u32
        } else {
            self.ring.take_head_ticket()
        };
        assert_eq!(ticket, self.ticket(self.next_head));
        self.asked.insert(self.next_head);
        self.next_head += 1;
    }

    fn read_slot(&mut self, pick: usize) {
        let Some(turn) = nth(&self.asked, pick) else { return };
        let block = self.ring.read_slot(self.ticket(turn));
        let expected = self.ready(turn).then(|| self.promised[&turn]);
        assert_eq!(block, expected);
        if block.is_some() {
            self.asked.remove(&turn);
            self.read.insert(turn);
        }
    }

    fn consume(&mut self, pick: usize) {
        let Some(turn) = nth(&self.read, pick) else { return };
        self.ring.consume(self.ticket(turn)).unwrap();
        self.read.remove(&turn);
        self.consumed.insert(turn);
        self.held.insert(self.promised[&turn]);
    }

    fn take_tail_ticket(&mut self, pick: usize) {
        let Some(block) = nth(&self.held, pick) else { return };
        assert_eq!(self.ring.take_tail_ticket(), self.ticket(self.next_tail));
        self.held.remove(&block);
        self.promised.insert(self.next_tail, block);
        self.freeing.insert(self.next_tail);
        self.next_tail += 1;
    }

    fn publish(&mut self, pick: usize) {
        let Some(turn) = nth(&self.freeing, pick) else { return };
        let written = self.ring.publish(self.ticket(turn), self.promised[&turn]).unwrap();
        self.freeing.remove(&turn);
        self.published.insert(turn);
        assert_eq!(written, self.ready(turn));
    }

    /// The whole allocation: a block if its turn's is there, else nothing, and no ticket taken.
    fn allocate(&mut self) -> Option<u64> {
        let turn = self.next_head;
        let block = self.ring.allocate();
        assert_eq!(block, self.ready(turn).then(|| self.promised[&turn]));
        if let Some(block) = block {
            self.next_head += 1;
            self.consumed.insert(turn);
            self.held.insert(block);
        }
        block
    }

    fn free(&mut self, block: u64) {
        self.ring.free(block).unwrap();
        self.held.remove(&block);
        self.promised.insert(self.next_tail, block);
        self.published.insert(self.next_tail);
        self.next_tail += 1;
    }

    fn check(&self) {
        let slots = self.memories.slot_contents();
        let in_slots: Vec<_> = slots
            .iter()
            .map(|slot| slot.1)
            .filter(|&block| block != EMPTY)
            .collect();
        let deferred = self.deferred();
        let elsewhere = self.freeing.iter().chain(&deferred).map(|turn| self.promised[turn]);
        let mut everywhere: Vec<_> = in_slots.iter().copied().chain(elsewhere).collect();
        everywhere.extend(&self.held);
        everywhere.sort_unstable();
        assert_eq!(everywhere, self.blocks);
        assert_eq!(self.ring.free_count() as usize, in_slots.len() + deferred.len());
        assert_eq!(self.ring.deferred_count(), deferred.len());
        for &turn in self.published.iter().filter(|&&turn| self.ready(turn)) {
            let ticket = self.ticket(turn);
            assert_eq!(slots[(ticket % N as u32) as usize], (ticket, self.promised[&turn]));
        }
        let counter = |turn| self.form.encode(self.ticket(turn));
        assert_eq!(
            self.memories.counters(),
            (counter(self.next_head), counter(self.next_tail))
        );
    }

    /// Nobody waits for ever: once every step under way is done, every ticket has got its block.
    fn finish(&mut self) {
        while !self.freeing.is_empty() {
            self.publish(self.freeing.len() - 1);
        }
        while !(self.asked.is_empty() && self.read.is_empty()) {
            let waiting = self.asked.union(&self.read);
            let served: Vec<_> = waiting.copied().filter(|&turn| self.ready(turn)).collect();
            if served.is_empty() {
                let block = *self
                    .held
                    .first()
                    .expect("every allocation waits and nothing is left to free");
                self.free(block);
            }
            for turn in served {
                self.asked.remove(&turn);
                self.read.insert(turn);
                let place = self.read.iter().position(|&other| other == turn).unwrap();
                self.consume(place);
            }
        }
        while self.held.len() < self.blocks.len() {
            self.allocate().expect("all that is not held can be had");
        }
        assert_eq!(self.ring.allocate(), None);
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(1000))]

    #[test]
    fn every_block_is_in_exactly_one_place(
        f in prop::sample::select(vec![4, 3, 1]),
        first in prop::sample::select(vec![0, u32::MAX, u32::MAX - 1, u32::MAX - 2, u32::MAX - 4, u32::MAX - 8, i32::MAX as u32 - 1]),
        masked: bool,
        steps in prop::collection::vec((0_u8..8, 0_usize..8), 0..60),
    ) {
        let mut machine = Machine::new(f, first, masked);
        machine.check();
        for (step, pick) in steps {
            machine.step(step, pick);
            machine.check();
        }
        machine.finish();
    }
}

// --- a peer that keeps no rule (profile 6.9) ---

/// The target's steps, while Head is set to anything between two of them.
struct Hostile {
    memories: Memories,
    ring: FreeBlockRing,
    form: CounterForm,
    blocks: Vec<u64>,
    held: BTreeSet<u64>,
}

impl Hostile {
    fn new(f: u32, first: u32, masked: bool) -> Self {
        let Machine {
            memories,
            ring,
            form,
            blocks,
            ..
        } = Machine::new(f, first, masked);
        Self {
            memories,
            ring,
            form,
            blocks,
            held: BTreeSet::new(),
        }
    }

    fn step(&mut self, step: u8, pick: usize, noise: u64) {
        match step {
            // By so many tickets, forth or back; now and then no FetchAdd could have made it.
            0 => {
                let ticket = self.form.ticket_of(self.memories.counters().0);
                let moved = self.form.encode(ticket.wrapping_add(pick as u32).wrapping_sub(6));
                let value = if noise & 7 == 0 { moved ^ noise >> 32 } else { moved };
                self.memories.head[0].store(value, Ordering::SeqCst);
            }
            1 => {
                if let Some(block) = self.ring.allocate() {
                    self.take(block);
                }
            }
            2 => {
                if let Some(block) = nth(&self.held, pick) {
                    self.ring.free(block).unwrap();
                    self.held.remove(&block);
                }
            }
            3 => {
                let outstanding = self.ring.outstanding_tickets().unwrap_or_default();
                if let Some(at) = pick.checked_rem(outstanding.len()) {
                    self.consume(outstanding[at]);
                }
            }
            _ => self.ring.restore_head(),
        }
    }

    fn consume(&mut self, ticket: u32) -> u64 {
        assert_eq!(self.ring.is_outstanding(ticket), Ok(true));
        let block = self.ring.read_slot(ticket).unwrap();
        self.ring.consume(ticket).unwrap();
        self.take(block);
        block
    }

    fn take(&mut self, block: u64) {
        assert!(self.held.insert(block), "{block:#x} is handed out twice");
    }

    fn check(&self) {
        let contents = self.memories.slot_contents();
        let in_slots: Vec<_> = contents
            .iter()
            .map(|slot| slot.1)
            .filter(|&block| block != EMPTY)
            .collect();
        let once: BTreeSet<_> = in_slots.iter().chain(&self.held).collect();
        assert_eq!(once.len(), in_slots.len() + self.held.len());
        assert_eq!(once.len() + self.ring.deferred_count(), self.blocks.len());
        assert_eq!(self.ring.free_count() as usize + self.held.len(), self.blocks.len());
    }

    /// Once the peer can move Head no more, every block can be had again.
    fn finish(&mut self) {
        self.ring.restore_head();
        while let Some(&ticket) = self.ring.outstanding_tickets().unwrap().first() {
            let block = self.consume(ticket);
            self.ring.free(block).unwrap();
            self.held.remove(&block);
        }
        assert_eq!(self.ring.unbound_count(), 0);
        while let Some(block) = self.ring.allocate() {
            self.take(block);
        }
        assert_eq!(self.held.iter().copied().collect::<Vec<_>>(), self.blocks);
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(1000))]

    #[test]
    fn whatever_is_done_to_head_no_block_is_lost_or_handed_out_twice(
        f in prop::sample::select(vec![4, 3, 1]),
        first in prop::sample::select(vec![0, u32::MAX, u32::MAX - 4]),
        masked: bool,
        steps in prop::collection::vec((0_u8..5, 0_usize..12, any::<u64>()), 0..60),
    ) {
        let mut hostile = Hostile::new(f, first, masked);
        for (step, pick, noise) in steps {
            hostile.step(step, pick, noise);
            hostile.check();
        }
        hostile.finish();
    }
}
