//! Two initiators that do anything in any order, with punts at 0 %, at random and at 100 %, against a model.
//!
//! A handle is changed by the session that owns it alone, in the order of its requests: so the model knows the answer to
//! each of them as it is sent. A LOAD of the other's handle must give one of the versions that handle had, whole.

use std::collections::HashMap;

use kbtp_proto::blocks::Entry;
use kbtp_proto::target::{ForcedPunts, SharedStore};
use kbtp_proto::types::{EntryFlag, RequestFlag, Status};
use kbtp_proto::wire::{DataDescriptor, Operation, Request};
use proptest::prelude::*;

use crate::oracle::refusal;
use crate::world::{BLOCK, BLOCKS, DOMAIN, HANDLES, Peer, Posted, World};

#[derive(Clone, Debug)]
pub(crate) enum Step {
    Request {
        peer: usize,
        operation: Operation,
        whose: usize,
        n: u64,
        flags: RequestFlag,
        length: u32,
        generation: u16,
    },
    Finish {
        peer: usize,
        n: usize,
    },
    TakeSends {
        peer: usize,
    },
    ServePunt {
        peer: usize,
    },
    ForeignRead {
        peer: usize,
    },
    End {
        peer: usize,
    },
}

fn step() -> impl Strategy<Value = Step> {
    let operation = proptest::sample::select(vec![
        Operation::Load,
        Operation::Load,
        Operation::Store,
        Operation::AllocStore,
        Operation::AllocStore,
        Operation::Free,
    ]);
    let flag = || proptest::sample::select(vec![1u16, 2, 2, 8, 16, 16, 0]);
    let length = prop_oneof![6 => 1..200u32, 1 => Just(0), 1 => Just(BLOCK), 1 => Just(BLOCK + 1)];
    // Some handles more often, so that requests meet on them.
    let handle = proptest::sample::select(vec![0, 0, 0, 0, 1, 1, 2, 3]);
    let request = (
        0..2usize,
        operation,
        0..2usize,
        handle,
        (flag(), flag()),
        length,
        0..40u16,
    );
    prop_oneof![
        20 => request.prop_map(|(peer, operation, whose, n, (one, two), length, generation)| {
            let flags = RequestFlag::from_bits_retain(one | two) & operation.flags_allowed();
            let length = if operation == Operation::Load && length % 8 > 0 { BLOCK } else { length };
            let inline = flags.contains(RequestFlag::INLINE);
            let flags = if inline { flags - RequestFlag::INVALIDATE } else { flags };
            Step::Request { peer, operation, whose, n, flags, length, generation }
        }),
        5 => (0..2usize, 0..8usize).prop_map(|(peer, n)| Step::Finish { peer, n }),
        3 => (0..2usize).prop_map(|peer| Step::TakeSends { peer }),
        5 => (0..2usize).prop_map(|peer| Step::ServePunt { peer }),
        1 => (0..2usize).prop_map(|peer| Step::ForeignRead { peer }),
    ]
}

/// What a handle is after all requests of its owner so far.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Version {
    valid: bool,
    sealed: bool,
    generation: u16,
    data: Vec<u8>,
}

impl Version {
    fn entry(&self) -> Entry {
        let valid = if self.valid {
            EntryFlag::VALID
        } else {
            EntryFlag::empty()
        };
        let sealed = if self.sealed {
            EntryFlag::SEALED
        } else {
            EntryFlag::empty()
        };
        Entry {
            flags: valid | sealed,
            generation: self.generation,
            data_length: self.data.len() as u32,
            block_offset: 0,
        }
    }
}

enum Expected {
    /// To a request on a handle of the session's own.
    Answer(Status, Version),
    /// To a LOAD of a handle of the other's.
    OneOf { handle: u64 },
}

pub(crate) struct Model {
    world: World,
    /// Every version a handle had; the last is the newest.
    versions: HashMap<u64, Vec<Version>>,
    expected: HashMap<(usize, u64), (Request, Expected)>,
    foreign_keys: u64,
}

impl Model {
    pub(crate) fn new(punts: [f64; 2], seed: u64, read_depth: u32) -> Self {
        let mut world = World::new();
        let mut versions = HashMap::new();
        for (n, probability) in punts.into_iter().enumerate() {
            let forced = ForcedPunts::new(probability, seed + n as u64).unwrap();
            // As much quota as handles: whether it is reached would depend on what has finished.
            let peer = world.connect(DOMAIN, HANDLES as u32, read_depth, 5, Some(forced));
            world.peers[peer].takes_sends = false;
            for n in 0..HANDLES {
                let unbound = Version {
                    valid: false,
                    sealed: false,
                    generation: 1,
                    data: Vec::new(),
                };
                versions.insert(world.handle(peer, n), vec![unbound]);
            }
        }
        Self {
            world,
            versions,
            expected: HashMap::new(),
            foreign_keys: 0,
        }
    }

    pub(crate) fn step(&mut self, step: &Step) {
        let (Step::Request { peer, .. }
        | Step::Finish { peer, .. }
        | Step::TakeSends { peer }
        | Step::ServePunt { peer }
        | Step::ForeignRead { peer }
        | Step::End { peer }) = *step;
        if self.world.peers[peer].ended {
            return;
        }
        match *step {
            Step::Request {
                operation,
                whose,
                n,
                flags,
                length,
                generation,
                ..
            } => {
                let whose = if operation == Operation::Load { whose } else { peer };
                let handle = self.world.handle(whose, n);
                self.request(peer, operation, handle, flags, length, generation);
            }
            Step::Finish { n, .. } => {
                let posted = self.world.peers[peer].posted.len();
                if posted > 0 {
                    self.world.finish(peer, n % posted);
                }
            }
            Step::TakeSends { .. } => self.world.take_sends(peer),
            Step::ServePunt { .. } => {
                if self.world.can_serve_punt(peer) {
                    self.world.serve_punt(peer);
                }
            }
            Step::ForeignRead { .. } => {
                self.foreign_keys += 1;
                self.world.foreign_read(peer, self.foreign_keys);
                self.world.perform(peer);
            }
            Step::End { .. } => self.end(peer),
        }
        (0..2).for_each(|peer| self.check_answers(peer));
    }

    fn request(
        &mut self,
        peer: usize,
        operation: Operation,
        handle: u64,
        flags: RequestFlag,
        length: u32,
        generation: u16,
    ) {
        if self.world.peers[peer].lent.is_empty() {
            return;
        }
        let mut request = self.world.request(peer, operation, handle);
        let data: Vec<u8> = (0..length)
            .map(|n| (n as u8) ^ (request.request_id as u8).wrapping_mul(31))
            .collect();
        let newest = self.versions[&handle].last().unwrap().generation;
        request.generation = match generation {
            38 => newest,
            39 => newest ^ 1,
            _ => 0,
        };
        request.flags = flags;
        if operation != Operation::Free {
            let inline = flags.contains(RequestFlag::INLINE);
            let room = if operation == Operation::Load {
                vec![0; length as usize]
            } else {
                data.clone()
            };
            let stag = if inline { 0 } else { self.world.buffer(peer, room) };
            request.data = DataDescriptor { stag, to: 0, length };
            request.inline_bytes = if inline { length } else { 0 };
        }
        self.expect(peer, &request, &data);
        self.world
            .send(peer, &request.pack(if request.is_inline() { &data } else { &[] }));
    }

    fn expect(&mut self, peer: usize, request: &Request, data: &[u8]) {
        let own = crate::world::range_contains(self.world.peers[peer].grant.handles, request.handle);
        let expected = if own {
            let versions = self.versions.get_mut(&request.handle).unwrap();
            let old = versions.last().unwrap().clone();
            let status = refusal(request, Some(old.entry()), BLOCK);
            let mut new = old.clone();
            if status == Status::Success {
                match request.operation {
                    Operation::Load => {}
                    Operation::Store | Operation::AllocStore => {
                        new.generation += u16::from(request.operation == Operation::AllocStore);
                        (new.valid, new.sealed) = (true, request.flags.contains(RequestFlag::SEAL));
                        new.data = data.to_vec();
                    }
                    Operation::Free => {
                        let generation = old.generation + 1;
                        new = Version {
                            valid: false,
                            sealed: false,
                            generation,
                            data: Vec::new(),
                        };
                    }
                }
                if request.mutates() {
                    versions.push(new.clone());
                }
            }
            Expected::Answer(status, new)
        } else {
            Expected::OneOf { handle: request.handle }
        };
        self.expected.insert((peer, request.request_id), (*request, expected));
    }

    /// Every answer that has come, once the data it speaks of is there.
    fn check_answers(&mut self, peer: usize) {
        let state = &self.world.peers[peer];
        let pending = |stag: u32| {
            let of_write = |posted: &Posted| matches!(posted, Posted::Write { stag: other, .. } if *other == stag);
            state.posted.iter().any(of_write)
        };
        self.expected.retain(|(number, request_id), (request, expected)| {
            let Some(answer) = state.answers.get(request_id).filter(|_| *number == peer) else {
                return true;
            };
            if pending(request.data.stag) {
                return true;
            }
            assert_eq!(answer.invalidated, request.invalidates());
            let loaded = |length: u32| &state.buffers[&request.data.stag][..length as usize];
            let is_load_success = !request.mutates() && answer.status == Status::Success;
            match expected {
                Expected::Answer(status, version) => {
                    assert_eq!(
                        (answer.status, answer.generation),
                        (*status, version.generation),
                        "{request:?}"
                    );
                    if is_load_success {
                        assert_eq!(loaded(answer.data_length), version.data);
                    } else if answer.status == Status::Success && request.operation != Operation::Free {
                        assert_eq!(answer.data_length as usize, version.data.len());
                    }
                }
                Expected::OneOf { handle } if is_load_success => {
                    let data = loaded(answer.data_length);
                    let of_binding = |version: &&Version| version.generation == answer.generation;
                    let versions: Vec<_> = self.versions[handle].iter().filter(of_binding).collect();
                    // Profile 6.1: who allows an unsealed block may get some of what its owner stores meanwhile.
                    let unsealed = request.flags.contains(RequestFlag::ALLOW_UNSEALED);
                    let of_any = |(at, octet)| versions.iter().any(|version| version.data.get(at) == Some(octet));
                    let mixed = unsealed && data.iter().enumerate().all(of_any);
                    assert!(
                        mixed || versions.iter().any(|version| version.data == data),
                        "{answer:?} {data:?}"
                    );
                }
                Expected::OneOf { .. } => assert!(answer.status != Status::HandleOutOfRange),
            }
            false
        });
    }

    /// Wholly done or not done, but for a STORE that was on its way into its block, which leaves that empty (profile 8.9):
    /// each handle is what it was after one of the requests.
    fn end(&mut self, peer: usize) {
        self.world.end(peer);
        self.expected.retain(|(number, _), _| *number != peer);
        for n in 0..HANDLES {
            let handle = self.world.handle(peer, n);
            let entry = self.world.entry(handle);
            let data = if entry.valid() {
                self.world.data(handle)
            } else {
                Vec::new()
            };
            let is = Version {
                valid: entry.valid(),
                sealed: entry.sealed(),
                generation: entry.generation,
                data,
            };
            let emptied = |version: &Version| {
                is == Version {
                    data: Vec::new(),
                    ..version.clone()
                } && !version.sealed
            };
            let versions = &self.versions[&handle];
            assert!(versions.contains(&is) || versions.iter().any(emptied), "{is:?}");
        }
        self.world.leave(peer);
    }

    fn is_quiet(&self) -> bool {
        let waits = |peer: &Peer| !peer.posted.is_empty() || peer.sends_posted > 0 || !peer.punted.is_empty();
        self.expected.is_empty() && !self.world.peers.iter().any(waits)
    }

    /// Everything comes to its end, and nothing is left.
    pub(crate) fn finish(mut self) {
        for _ in 0..1000 {
            if self.is_quiet() {
                break;
            }
            for peer in (0..2).filter(|peer| !self.world.peers[*peer].ended).collect::<Vec<_>>() {
                self.step(&Step::Finish { peer, n: 0 });
                self.step(&Step::TakeSends { peer });
                self.step(&Step::ServePunt { peer });
            }
        }
        assert!(self.expected.is_empty(), "a request was never answered");
        for peer in 0..2 {
            if self.world.peers[peer].ended {
                continue;
            }
            let state = &self.world.peers[peer];
            assert!(state.unanswered.is_empty());
            assert_eq!((state.session.outstanding(), state.lent.len()), (0, 5));
            for n in 0..HANDLES {
                let handle = self.world.handle(peer, n);
                let newest = self.versions[&handle].last().unwrap();
                let entry = self.world.entry(handle);
                assert_eq!(
                    (entry.flags, entry.generation),
                    (newest.entry().flags, newest.generation)
                );
                if newest.valid {
                    assert_eq!(self.world.data(handle), newest.data);
                }
            }
            self.world.end(peer);
            self.world.leave(peer);
        }
        assert_eq!(self.world.store_free_blocks(), BLOCKS);
        self.world.store.with(|store| {
            assert!(store.pinned_frees().is_empty());
            assert_eq!((70..72).map(|holder| store.quotas().usage(holder)).sum::<u32>(), 0);
        });
    }
}

fn probability() -> impl Strategy<Value = f64> {
    prop_oneof![2 => Just(0.0), 3 => 0.0..1.0, 1 => Just(1.0)]
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, cases: 150, ..ProptestConfig::default() })]

    #[test]
    fn sessions_that_do_anything(
        steps in proptest::collection::vec(step(), 1..400),
        punts in [probability(), probability()],
        seed in any::<u32>(),
        read_depth in 1..4u32,
        ends in proptest::collection::vec((0..400usize, 0..2usize), 0..2),
    ) {
        let mut model = Model::new(punts, seed.into(), read_depth);
        for (at, step) in steps.iter().enumerate() {
            model.step(step);
            for (_, peer) in ends.iter().filter(|(end_at, _)| *end_at == at) {
                model.step(&Step::End { peer: *peer });
            }
        }
        model.finish();
    }

    #[test]
    fn no_octets_of_a_message_make_anything_panic(
        messages in proptest::collection::vec(proptest::collection::vec(any::<u8>(), 0..80), 1..20),
        opcode in 3..7u8,
    ) {
        let mut world = World::new();
        let peer = world.connect(DOMAIN, 4, 2, 20, None);
        for (n, mut message) in messages.into_iter().enumerate() {
            if message.len() >= 24 && n % 2 == 0 {
                message[..2].copy_from_slice(&[1, opcode]);
                message[2..4].fill(0);
                message[11] = n as u8;
                message[12..20].copy_from_slice(&world.handle(peer, n as u64 % 4).to_be_bytes());
                message[20] = 0;
            }
            let slot = world.peers[peer].lent.pop_front().unwrap();
            let span = kbtp_proto::memory::Span {
                region: world.peers[peer].grant.receives,
                offset: slot * 1024,
                len: message.len() as u32,
            };
            world.regions.put(span, &message);
            let state = &mut world.peers[peer];
            state.session.received(slot, message.len() as u32, &mut state.memory, world.now);
            while state.session.next_action().is_some() {}
        }
        world.peers[peer].session.end();
    }
}
