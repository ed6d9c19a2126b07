//! Any order of calls: two initiators with ranges of their own, on three blocks, and one that allocates by itself too, on
//! two of its own, against a model that knows what each handle holds.

use std::collections::BTreeMap;

use kbtp_proto::blocks::{Allocation, Binding, Entry, FreeToken, Freeing, Pin};
use kbtp_proto::types::{EntryFlag, Status};
use proptest::prelude::*;

use crate::direct::{DIRECT, Made, Peer, block as block_offset_of, make, open};
use crate::store::{BASE, HANDLES, PREFILL, unbound};

const DECODE: u64 = 2;
const SHARED: u32 = 3;
const OWN: u32 = 2;
const PLACES: [u64; 7] = [BASE, BASE + 1, BASE + 4, BASE + 5, BASE + 6, BASE + 7, BASE + 6];

struct Machine {
    made: Made,
    quota: BTreeMap<u64, u32>,
    generation: BTreeMap<u64, u16>,
    /// Block, length and sealed, by handle.
    bound: BTreeMap<u64, (u64, u32, bool)>,
    filling: BTreeMap<u64, u64>,
    peer: Peer,
    /// Tickets that the peer has taken and not bound.
    out: Vec<u32>,
    pins: Vec<Pin>,
    /// Block, holder and the number of the FREE that waits, oldest first.
    waiting: Vec<(u64, u64, u64)>,
    frees: u64,
    returned: usize,
    clear: bool,
}

fn holder(handle: u64) -> u64 {
    match handle - BASE {
        0..4 => PREFILL,
        4..6 => DECODE,
        _ => DIRECT,
    }
}

fn key<V: Copy>(map: &BTreeMap<u64, V>, pick: usize) -> Option<(u64, V)> {
    let place = pick.checked_rem(map.len())?;
    map.iter().nth(place).map(|(&key, &value)| (key, value))
}

impl Machine {
    fn new(quotas: (u32, u32), clear: bool, first_ticket: u32) -> Self {
        let mut made = make(SHARED, OWN, first_ticket, clear);
        made.store.quotas_mut().grant(PREFILL, quotas.0).unwrap();
        made.store.quotas_mut().grant(DECODE, quotas.1).unwrap();
        let peer = open(&mut made.store, DIRECT, SHARED, OWN);
        Self {
            made,
            peer,
            out: Vec::new(),
            quota: BTreeMap::from([(PREFILL, quotas.0), (DECODE, quotas.1), (DIRECT, OWN)]),
            generation: (0..HANDLES.count).map(|i| (HANDLES.first + i, 1)).collect(),
            bound: BTreeMap::new(),
            filling: BTreeMap::new(),
            pins: Vec::new(),
            waiting: Vec::new(),
            frees: 0,
            returned: 0,
            clear,
        }
    }

    fn usage(&self, who: u64) -> u32 {
        let handles = self.bound.keys().chain(self.filling.keys());
        let held = handles.filter(|&&handle| holder(handle) == who).count();
        let waiting = self.waiting.iter().filter(|free| free.1 == who).count();
        (held + waiting) as u32
    }

    fn next_generation(&mut self, handle: u64) -> u16 {
        let generation = self.generation.get_mut(&handle).unwrap();
        *generation += 1;
        *generation
    }

    fn pinned(&self, block: u64) -> Vec<Pin> {
        self.pins
            .iter()
            .copied()
            .filter(|pin| pin.block_offset == block)
            .collect()
    }

    fn step(&mut self, step: u8, pick: usize, length: u32, seal: bool) {
        match step {
            0 => self.begin_alloc_store(PLACES[pick % PLACES.len()]),
            1 => self.commit_alloc_store(pick, length, seal),
            2 => self.abort_alloc_store(pick),
            3 => self.commit_store(pick, length, seal),
            4 => self.begin_load(pick),
            5 => self.end_load(pick),
            6 => self.begin_free(pick),
            7 => self.take_ticket(),
            8 => self.bind_ticket(pick, length, seal),
            _ => self.reclaim_ticket(pick),
        }
    }

    /// Draft 3.4: its tickets are usage too.
    fn has_room(&self, who: u64) -> bool {
        let tickets = if who == DIRECT { self.out.len() as u32 } else { 0 };
        self.usage(who) + tickets < self.quota[&who]
    }

    fn is_nowhere(&self, block: u64) -> bool {
        let in_use = self.filling.values().chain(self.bound.values().map(|bound| &bound.0));
        let waiting = self.waiting.iter().map(|free| &free.0);
        in_use.chain(waiting).all(|&other| other != block) && self.pinned(block).is_empty()
    }

    // --- what the peer does by itself ---

    fn take_ticket(&mut self) {
        if self.has_room(DIRECT) {
            self.out.push(self.peer.take());
        }
    }

    fn slot(&mut self, ticket: u32) -> Option<u64> {
        let block = self.made.store.partition(DIRECT).unwrap().read_slot(ticket)?;
        assert!(block >= block_offset_of(SHARED.into()) && self.is_nowhere(block));
        Some(block)
    }

    fn bind_ticket(&mut self, pick: usize, length: u32, seal: bool) {
        let unbound = [BASE + 6, BASE + 7].into_iter();
        let mut unbound = unbound.filter(|place| !self.bound.contains_key(place) && !self.filling.contains_key(place));
        let (Some(handle), Some(at)) = (unbound.next(), pick.checked_rem(self.out.len())) else {
            return;
        };
        let ticket = self.out[at];
        let block = self.slot(ticket);
        let named = block.unwrap_or(block_offset_of(SHARED.into()));
        let binding = self.made.store.bind_ticket(handle, DIRECT, ticket, named, length, seal);
        match (block, binding.unwrap()) {
            (Some(block), Binding::Bound(entry)) => {
                self.out.remove(at);
                self.next_generation(handle);
                assert_eq!(
                    (entry.block_offset, entry.generation),
                    (block, self.generation[&handle])
                );
                self.bound.insert(handle, (block, length, seal));
            }
            // A ticket whose block is not there is nobody's yet: it counts as any other.
            other if self.has_room(DIRECT) => assert_eq!(other, (None, Binding::Refused(Status::TicketMismatch))),
            other => assert_eq!(other, (None, Binding::Refused(Status::NoSpace))),
        }
    }

    fn reclaim_ticket(&mut self, pick: usize) {
        let Some(at) = pick.checked_rem(self.out.len()) else {
            return;
        };
        if let Some(block) = self.slot(self.out[at]) {
            assert_eq!(self.made.store.reclaim_ticket(DIRECT, self.out[at]), Ok(block));
            self.out.remove(at);
            self.returned += 1;
        }
    }

    // --- what the target does ---

    fn begin_alloc_store(&mut self, handle: u64) {
        if self.bound.contains_key(&handle) || self.filling.contains_key(&handle) {
            return;
        }
        let who = holder(handle);
        let room = self.has_room(who);
        let block = match self.made.store.begin_alloc_store(handle, who).unwrap() {
            Allocation::Block(block) => block,
            // Its slot waits for a ticket of the peer's.
            Allocation::Refused(Status::TargetError) => return assert!(who == DIRECT && room && !self.out.is_empty()),
            // Draft 3.4: within quotas the ring always has a block.
            Allocation::Refused(status) => return assert_eq!((status, room), (Status::NoSpace, false)),
        };
        assert!(room);
        assert!(self.is_nowhere(block));
        assert_eq!(block >= block_offset_of(SHARED.into()), who == DIRECT);
        self.filling.insert(handle, block);
    }

    fn commit_alloc_store(&mut self, pick: usize, length: u32, seal: bool) {
        let Some((handle, block)) = key(&self.filling, pick) else {
            return;
        };
        self.made.store.commit_alloc_store(handle, block, length, seal).unwrap();
        self.filling.remove(&handle);
        self.next_generation(handle);
        self.bound.insert(handle, (block, length, seal));
    }

    fn abort_alloc_store(&mut self, pick: usize) {
        let Some((handle, block)) = key(&self.filling, pick) else {
            return;
        };
        self.made
            .store
            .abort_alloc_store(handle, block, holder(handle))
            .unwrap();
        self.filling.remove(&handle);
        self.returned += 1;
    }

    fn commit_store(&mut self, pick: usize, length: u32, seal: bool) {
        let Some((handle, (block, _, sealed))) = key(&self.bound, pick) else {
            return;
        };
        let mut copied_to = None;
        let entry = self
            .made
            .store
            .commit_store(handle, length, seal, |position| copied_to = Some(position));
        assert_eq!(entry.is_ok(), !sealed);
        if !sealed {
            assert_eq!(copied_to, self.made.store.pool().position(block));
            self.bound.insert(handle, (block, length, seal));
        }
    }

    fn begin_load(&mut self, pick: usize) {
        let Some((handle, (block, length, _))) = key(&self.bound, pick) else {
            return;
        };
        let pin = self.made.store.begin_load(handle, pick as u64).unwrap();
        let generation = self.generation[&handle];
        assert_eq!(
            (pin.block_offset, pin.data_length, pin.generation),
            (block, length, generation)
        );
        self.pins.push(pin);
    }

    fn end_load(&mut self, pick: usize) {
        if self.pins.is_empty() {
            return;
        }
        let pin = self.pins.remove(pick % self.pins.len());
        let at = self.waiting.iter().position(|free| free.0 == pin.block_offset);
        let completes = at.filter(|_| self.pinned(pin.block_offset).is_empty());
        let expected = completes.map(|at| self.waiting.remove(at));
        let finished = self.made.store.end_load(&pin).unwrap();
        let told = finished.map(|free| (pin.block_offset, free.holder, free.token));
        assert_eq!(
            told,
            expected.map(|(block, who, number)| (block, who, FreeToken::Python(number)))
        );
        self.returned += usize::from(finished.is_some());
    }

    fn begin_free(&mut self, pick: usize) {
        let Some((handle, (block, ..))) = key(&self.bound, pick) else {
            return;
        };
        let (who, number) = (holder(handle), self.frees);
        self.frees += 1;
        self.bound.remove(&handle);
        let entry = unbound(self.next_generation(handle));
        let freeing = self.made.store.begin_free(handle, who, FreeToken::Python(number), None);
        if self.pinned(block).is_empty() {
            assert_eq!(freeing, Ok(Freeing::Freed(entry)));
            self.returned += 1;
        } else {
            assert_eq!(freeing, Ok(Freeing::Waiting));
            self.waiting.push((block, who, number));
        }
    }

    fn check(&self) {
        let store = &self.made.store;
        for (&handle, &generation) in &self.generation {
            let expected = self
                .bound
                .get(&handle)
                .map(|&(block_offset, data_length, sealed)| Entry {
                    flags: if sealed { EntryFlag::all() } else { EntryFlag::VALID },
                    generation,
                    data_length,
                    block_offset,
                });
            assert_eq!(store.read(handle), Ok(expected.unwrap_or(unbound(generation))));
        }
        assert_eq!(store.bound_handles(HANDLES), Ok(self.bound.keys().copied().collect()));
        let elsewhere = self.bound.len() + self.filling.len() + self.waiting.len();
        assert_eq!(store.free_blocks() as usize + elsewhere, (SHARED + OWN) as usize);
        for who in [PREFILL, DECODE, DIRECT] {
            assert_eq!(store.quotas().usage(who), self.usage(who));
        }
        let waiting = store.pinned_frees();
        assert_eq!(waiting.len(), self.waiting.len());
        for (free, &(block, ..)) in waiting.iter().zip(&self.waiting) {
            assert_eq!((free.block_offset, &free.pins), (block, &self.pinned(block)));
        }
        let cleared = self.made.cleared.lock().unwrap().len();
        assert_eq!(cleared, if self.clear { self.returned } else { 0 });
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(1000))]

    #[test]
    fn no_block_no_entry_and_no_unit_of_quota_is_lost(
        quotas in prop::sample::select(vec![(3, 0), (2, 1), (1, 1)]),
        first_ticket in prop::sample::select(vec![0, u32::MAX, u32::MAX - 5]),
        clear: bool,
        steps in prop::collection::vec((0_u8..10, 0_usize..12, 0_u32..=512, any::<bool>()), 0..80),
    ) {
        let mut machine = Machine::new(quotas, clear, first_ticket);
        for (step, pick, length, seal) in steps {
            machine.step(step, pick, length, seal);
            machine.check();
        }
    }
}
