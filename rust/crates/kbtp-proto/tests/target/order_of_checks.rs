//! Which status a request gets: random requests to entries in random states, against profile 1 written down again.

use kbtp_proto::blocks::Entry;
use kbtp_proto::target::{PuntReason, SharedStore};
use kbtp_proto::types::{RequestFlag, Status};
use kbtp_proto::wire::Operation;
use proptest::prelude::*;

use crate::oracle::refusal;
use crate::world::{BASE_HANDLE, BLOCK, DOMAIN, HANDLES, World};

#[derive(Clone, Debug)]
struct Sent {
    version: u8,
    opcode: u8,
    flags: u16,
    whose: usize,
    bound: Option<bool>,
    generation: u16,
    length: u32,
    inline_octets: i32,
    cut: usize,
    extra: usize,
}

const WHOSE: [&str; 5] = ["own", "other's", "nobody's", "outside", "foreign"];

/// Profile 1, the lines up to MALFORMED.
fn fault(sent: &Sent, octets: usize, read_depth: u32) -> Option<PuntReason> {
    let (inline, record, invalidate) = (sent.flags & 1 > 0, sent.flags & 4 > 0, sent.flags & 8 > 0);
    let allowed = match sent.opcode {
        3 => 4 | 8 | 16,
        4 | 5 => 1 | 2 | 4 | 8,
        6 => 4,
        _ => return Some(PuntReason::NotARequest),
    };
    let fetches = [4, 5].contains(&sent.opcode) && !inline;
    if sent.version != 1
        || sent.flags & !allowed > 0
        || record
        || (invalidate && inline)
        || (fetches && read_depth == 0)
    {
        return Some(PuntReason::Unsupported);
    }
    let fixed = if sent.opcode == 6 { 24 } else { 40 };
    (octets < fixed || (octets > fixed && !inline)).then_some(PuntReason::Malformed)
}

fn packed(sent: &Sent, handle: u64, generation: u16, stag: u32) -> Vec<u8> {
    let mut octets = vec![sent.version, sent.opcode];
    octets.extend(sent.flags.to_be_bytes());
    octets.extend(77u64.to_be_bytes());
    octets.extend(handle.to_be_bytes());
    octets.extend(generation.to_be_bytes());
    octets.extend(0xABCDu16.to_be_bytes());
    let mut whole = 24;
    if sent.opcode != 6 {
        octets.extend(stag.to_be_bytes());
        octets.extend(0u64.to_be_bytes());
        octets.extend(sent.length.to_be_bytes());
        whole = 40;
    }
    whole += if sent.flags & 4 > 0 { 16 } else { 0 };
    if sent.flags & 1 > 0 {
        whole += (sent.length as i32 + sent.inline_octets).max(0) as usize;
    }
    octets.extend((0..=255).cycle().take(1024));
    octets.truncate((whole - sent.cut.min(whole)).max(24) + sent.extra);
    octets
}

fn sent() -> impl Strategy<Value = Sent> {
    let opcode = prop_oneof![8 => Just(3u8), 8 => Just(4), 8 => Just(5), 8 => Just(6), 1 => any::<u8>()];
    let flags = prop_oneof![
        3 => Just(0u16), 4 => proptest::sample::select(vec![1u16, 2, 3, 8, 10, 16, 24]),
        1 => proptest::sample::select(vec![4u16, 9, 0x8000, 0x20, 12]),
    ];
    let length = proptest::sample::select(vec![0, 1, 99, 100, 101, BLOCK - 1, BLOCK, BLOCK + 1]);
    let rarely = |odd: Vec<usize>| prop_oneof![9 => Just(0usize), 1 => proptest::sample::select(odd)];
    (
        (
            prop_oneof![15 => Just(1u8), 1 => any::<u8>()],
            opcode,
            flags,
            prop_oneof![6 => Just(0usize), 4 => 0..5usize],
        ),
        (proptest::option::of(any::<bool>()), 0u16..4, length),
        (
            prop_oneof![8 => Just(0i32), 1 => -1..2i32, 1 => Just(-600)],
            rarely(vec![1, 16]),
            rarely(vec![1, 16]),
        ),
    )
        .prop_map(
            |((version, opcode, flags, whose), (bound, generation, length), (inline_octets, cut, extra))| Sent {
                version,
                opcode,
                flags,
                whose,
                bound,
                generation,
                length,
                inline_octets,
                cut,
                extra,
            },
        )
}

/// The peer that sends, and the handle it names, in the state it is to be in. A quota of 2 may be used up.
fn prepare(world: &mut World, sent: &Sent, read_depth: u32, quota_reached: bool) -> (usize, u64) {
    let own = world.connect(DOMAIN, 2, read_depth, 4, None);
    let other = world.connect(DOMAIN, 1, 2, 4, None);
    let foreign = world.connect(DOMAIN + 1, 1, 2, 4, None);
    let handle = match WHOSE[sent.whose] {
        "own" => world.handle(own, 1),
        "other's" => world.handle(other, 3),
        "nobody's" => BASE_HANDLE.wrapping_add(3 * HANDLES),
        "outside" => BASE_HANDLE.wrapping_sub(1),
        _ => world.handle(foreign, 0),
    };
    let owner = match WHOSE[sent.whose] {
        "own" => Some(own),
        "other's" => Some(other),
        "foreign" => Some(foreign),
        _ => None,
    };
    if let (Some(owner), Some(seal)) = (owner, sent.bound) {
        world.bind(world.peers[owner].grant.holder, handle, &[0x11; 100], seal);
    }
    let used = if sent.whose == 0 && sent.bound.is_some() { 1 } else { 0 };
    for n in 0..if quota_reached { 2 - used } else { 0 } {
        world.bind_own(own, 2 + n, b"", true);
    }
    (own, handle)
}

fn check(sent: &Sent, read_depth: u32, quota_reached: bool) {
    let mut world = World::new();
    let (peer, handle) = prepare(&mut world, sent, read_depth, quota_reached);
    let before: Option<Entry> = world.store.with(|store| store.read(handle).ok());
    let current = before.map_or(1, |entry| entry.generation);
    let generation = [0, 0, current, current ^ 3][usize::from(sent.generation)];
    let (table, pool) = (world.table(), world.pool());
    let stag = world.buffer(peer, vec![0; BLOCK as usize]);
    let octets = packed(sent, handle, generation, stag);
    world.send(peer, &octets);
    let untouched = |world: &World| world.table() == table && world.pool() == pool;

    if let Some(reason) = fault(sent, octets.len(), read_depth) {
        assert_eq!(world.peers[peer].punted[0].reason, reason);
        assert!(world.peers[peer].answers.is_empty() && untouched(&world));
        return;
    }
    let request = kbtp_proto::wire::Request::parse(&octets[..octets.len().min(56)], octets.len() as u32).unwrap();
    let load = request.operation == Operation::Load;
    let allowed = sent.whose == 0 || (load && sent.whose == 1);
    let mut status = refusal(&request, before.filter(|_| allowed), BLOCK);
    if status == Status::Success && quota_reached && request.operation == Operation::AllocStore {
        status = Status::NoSpace;
    }
    world.finish_all(peer);

    let answer = world.peers[peer].answers[&77];
    assert_eq!(answer.status, status);
    assert_eq!(answer.invalidated, (sent.flags & 8 > 0).then_some(stag));
    if status == Status::Success {
        return check_success(&world, &request, before.unwrap(), peer);
    }
    assert_eq!(
        answer.generation,
        if status == Status::HandleOutOfRange { 0 } else { current }
    );
    let tells_size = load && status == Status::LengthError;
    assert_eq!(
        (answer.data_length, answer.block_offset),
        (if tells_size { 100 } else { 0 }, 0)
    );
    assert!(untouched(&world));
}

fn check_success(world: &World, request: &kbtp_proto::wire::Request, before: Entry, peer: usize) {
    let (answer, after) = (world.peers[peer].answers[&77], world.entry(request.handle));
    assert_eq!(answer.generation, after.generation);
    let told = (answer.data_length, answer.block_offset);
    match request.operation {
        Operation::Free => {
            assert_eq!(told, (0, 0));
            assert_eq!((after.valid(), after.generation), (false, before.generation + 1));
        }
        Operation::Load => {
            assert_eq!((after, told), (before, (100, before.block_offset)));
            assert_eq!(world.peers[peer].buffers[&request.data.stag][..100], [0x11; 100]);
        }
        operation => {
            assert_eq!(told, (after.data_length, after.block_offset));
            assert_eq!(after.data_length, request.data.length);
            assert_eq!(after.sealed(), request.flags.contains(RequestFlag::SEAL));
            assert_eq!(
                after.generation,
                before.generation + u16::from(operation == Operation::AllocStore)
            );
            let octet = |n: usize| if request.is_inline() { n as u8 } else { 0 };
            let data: Vec<u8> = (0..request.data.length as usize).map(octet).collect();
            assert_eq!(world.data(request.handle), data);
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, cases: 2000, ..ProptestConfig::default() })]

    #[test]
    fn status_and_completion_of_any_request(
        sent in sent(), read_depth in prop_oneof![7 => Just(2u32), 1 => Just(0)], quota_reached in any::<bool>(),
    ) {
        check(&sent, read_depth, quota_reached);
    }
}
