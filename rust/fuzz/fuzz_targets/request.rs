//! Sessions of a target whose initiators send any octets, over a small block store.
//!
//! An input is an octet of options and then commands, see `Target::step`. Octets that are a request get a Request ID and
//! a buffer of their own, since those are names an honest initiator would not give twice; all else of them stays.
#![no_main]
#![allow(clippy::unwrap_used)]

#[allow(dead_code)]
#[path = "../../crates/kbtp-proto/tests/target/oracle.rs"]
mod oracle;
#[allow(dead_code)]
#[path = "../../crates/kbtp-proto/tests/target/python.rs"]
mod python;
mod script;
#[allow(dead_code)]
#[path = "../../crates/kbtp-proto/tests/target/world.rs"]
mod world;

use std::collections::{HashMap, HashSet};
use std::time::Duration;

use kbtp_proto::blocks::Entry;
use kbtp_proto::limits::{COMMON_HEADER_BYTES, DATA_DESCRIPTOR_BYTES};
use kbtp_proto::target::{ForcedPunts, PuntReason, SharedStore};
use kbtp_proto::wire::{CommonHeader, HEAD_BYTES_MAX, Request};
use libfuzzer_sys::fuzz_target;

use script::Script;
use world::{BASE_HANDLE, BLOCK, BLOCKS, DOMAIN, HANDLES, World, repost};

const QUOTA: u32 = 3;
const CREDITS: u32 = 6;
/// Of the initiators, the last is in a trust domain of its own.
const PEERS: usize = 3;
/// Sum of the quotas is less than all blocks, so that a block that is lost is missed.
const _: () = assert!(PEERS as u32 * QUOTA > BLOCKS && 2 * QUOTA < BLOCKS);

struct Target {
    world: World,
    next_request_id: u64,
    foreign_keys: u64,
    generations: HashMap<u64, u16>,
}

impl Target {
    fn new(script: &mut Script) -> Self {
        let options = script.octet();
        let mut world = World::new();
        let punts = [0.0, 0.0, 0.5, 1.0][usize::from(options & 3)];
        for number in 0..PEERS {
            let domain = if number + 1 < PEERS { DOMAIN } else { DOMAIN + 1 };
            let quota = if number + 1 < PEERS { QUOTA } else { BLOCKS - 2 * QUOTA };
            let read_depth = u32::from(options >> 2 & 3);
            let forced = ForcedPunts::new(punts, number as u64).unwrap();
            let peer = world.connect(domain, quota, read_depth, CREDITS, Some(forced));
            world.peers[peer].takes_sends = options & 0x10 != 0;
        }
        let generations = world_handles().map(|handle| (handle, 0)).collect();
        Self {
            world,
            next_request_id: 0,
            foreign_keys: 0,
            generations,
        }
    }

    fn step(&mut self, script: &mut Script) {
        let choice = script.octet();
        let number = usize::from(choice >> 6) % PEERS;
        if self.world.peers[number].ended {
            return;
        }
        match choice % 32 {
            0..16 => {
                let length = usize::from(script.octet());
                self.send(number, script.octets(length).to_vec());
            }
            16..21 => {
                let posted = self.world.peers[number].posted.len();
                if posted > 0 {
                    self.world.finish(number, script.below(8) % posted);
                }
            }
            21..23 => self.world.take_sends(number),
            23..27 => self.serve_punt(number),
            27 => {
                self.foreign_keys += 1;
                self.world.peers[number]
                    .session
                    .foreign_read(self.foreign_keys, self.world.now);
                self.world.perform(number);
            }
            29 => self.world.advance(Duration::from_secs(script.octet().into())),
            30 => self.world.drain(number),
            _ => self.end(number),
        }
        for number in 0..PEERS {
            let peer = &self.world.peers[number];
            if !peer.ended && (peer.end_action.is_some() || peer.drained) {
                self.end(number);
            }
        }
        self.check();
    }

    fn send(&mut self, number: usize, mut message: Vec<u8>) {
        if self.world.peers[number].lent.is_empty() || self.world.peers[number].drained {
            return;
        }
        if let Some(header) = CommonHeader::parse(&message) {
            self.next_request_id += 1;
            let handle = BASE_HANDLE.wrapping_add(header.handle % (4 * HANDLES + 1));
            message[4..12].copy_from_slice(&self.next_request_id.to_be_bytes());
            message[12..20].copy_from_slice(&handle.to_be_bytes());
        }
        let head = &message[..message.len().min(HEAD_BYTES_MAX)];
        if let Ok(request) = Request::parse(head, message.len() as u32)
            && message.len() >= COMMON_HEADER_BYTES + DATA_DESCRIPTOR_BYTES
            && !request.is_inline()
        {
            let room = request.data.length.min(BLOCK);
            let stag = self
                .world
                .buffer(number, vec![self.next_request_id as u8; room as usize]);
            message[24..28].copy_from_slice(&stag.to_be_bytes());
            message[28..36].fill(0);
        }
        self.world.send(number, &message);
        if message.len() < COMMON_HEADER_BYTES {
            self.end(number); // nothing can be answered to it (profile 8.5)
        }
    }

    fn serve_punt(&mut self, number: usize) {
        let Some(punted) = self.world.peers[number].punted.front().copied() else {
            return;
        };
        let message = self.world.message(number, &punted);
        match punted.reason {
            PuntReason::NotARequest | PuntReason::Unsupported | PuntReason::Malformed => {
                let peer = &mut self.world.peers[number];
                peer.punted.pop_front();
                if let Some(header) = CommonHeader::parse(&message) {
                    peer.unanswered.remove(&header.request_id);
                }
                repost(peer, &self.world.regions, punted.slot);
            }
            _ if self.world.can_serve_punt(number) => drop(self.world.serve_punt(number)),
            _ => {}
        }
    }

    fn end(&mut self, number: usize) {
        self.world.end(number);
        self.world.leave(number);
    }

    /// What holds of the store at every moment (draft 3, profile 5).
    fn check(&mut self) {
        let mut blocks = HashSet::new();
        let table = self.world.table();
        for (handle, entry) in world_handles().zip(&table) {
            if entry.valid() {
                self.world
                    .store
                    .with(|store| store.pool().position(entry.block_offset))
                    .unwrap();
                assert!(blocks.insert(entry.block_offset), "two handles on one block");
                assert!(entry.data_length <= BLOCK);
            } else {
                assert!(!entry.sealed());
            }
            let known = self.generations.insert(handle, entry.generation).unwrap();
            assert!(entry.generation >= known, "a generation went back");
        }
        self.check_counts(&table);
    }

    fn check_counts(&self, table: &[Entry]) {
        let bound = table.iter().filter(|entry| entry.valid()).count() as u32;
        let waiting = self.world.store.with(|store| store.pinned_frees().len()) as u32;
        let used: u32 = self.world.peers.iter().map(|peer| self.usage(peer.grant.holder)).sum();
        let filling = used - bound - waiting;
        assert_eq!(self.world.store_free_blocks() + bound + waiting + filling, BLOCKS);
        for peer in &self.world.peers {
            let quota = self.world.store.with(|store| store.quotas().quota(peer.grant.holder));
            assert!(self.usage(peer.grant.holder) <= quota);
            assert!(peer.session.outstanding() <= CREDITS as usize + peer.answers.len());
        }
    }

    fn usage(&self, holder: u64) -> u32 {
        self.world.store.with(|store| store.quotas().usage(holder))
    }

    /// Nothing is left when everybody has gone.
    fn finish(mut self) {
        for number in 0..PEERS {
            if !self.world.peers[number].ended {
                self.end(number);
            }
        }
        self.check();
        assert_eq!(self.world.store_free_blocks(), BLOCKS);
        assert!(self.world.store.with(|store| store.pinned_frees().is_empty()));
        assert!(self.world.peers.iter().all(|peer| self.usage(peer.grant.holder) == 0));
    }
}

fn world_handles() -> impl Iterator<Item = u64> {
    (0..4 * HANDLES).map(|n| BASE_HANDLE.wrapping_add(n))
}

fuzz_target!(|data: &[u8]| {
    let mut script = Script::new(data);
    let mut target = Target::new(&mut script);
    while !script.is_over() {
        target.step(&mut script);
    }
    target.finish();
});
