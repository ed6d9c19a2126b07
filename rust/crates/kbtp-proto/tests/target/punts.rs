//! What goes to Python: untouched, in order, and nothing else.

use kbtp_proto::target::{ForcedPunts, PuntReason};
use kbtp_proto::types::{RequestFlag, Status};
use kbtp_proto::wire::Operation;

use crate::world::{DOMAIN, World};

const NONE: RequestFlag = RequestFlag::empty();

fn reasons(world: &World, peer: usize) -> Vec<PuntReason> {
    world.peers[peer].punted.iter().map(|punted| punted.reason).collect()
}

#[test]
fn what_is_no_request_goes_to_python_at_once() {
    let mut world = World::new();
    let peer = world.connect(DOMAIN, 2, 2, 16, None);
    let header = |version: u8, opcode: u8, flags: u16, octets: usize| {
        let mut message = vec![version, opcode];
        message.extend(flags.to_be_bytes());
        message.resize(octets, 0);
        message
    };
    let messages = [
        (Vec::new(), PuntReason::NotARequest),
        (header(1, 3, 0, 23), PuntReason::NotARequest),
        (header(1, 1, 0, 64), PuntReason::NotARequest),
        (header(1, 2, 0, 152), PuntReason::NotARequest),
        (header(1, 7, 0, 40), PuntReason::NotARequest),
        (header(1, 8, 0, 40), PuntReason::NotARequest),
        (header(1, 0, 0, 40), PuntReason::NotARequest),
        (header(1, 200, 0, 1024), PuntReason::NotARequest),
        (header(2, 3, 0, 40), PuntReason::Unsupported),
        (header(1, 3, 1, 40), PuntReason::Unsupported),
        (header(1, 6, 4, 40), PuntReason::Unsupported),
        (header(1, 4, 0x8000, 40), PuntReason::Unsupported),
        (header(1, 3, 4, 24), PuntReason::Unsupported),
        (header(1, 3, 0, 39), PuntReason::Malformed),
        (header(1, 6, 0, 25), PuntReason::Malformed),
        (header(1, 4, 1, 24), PuntReason::Malformed),
    ];
    for (n, (message, reason)) in messages.iter().enumerate() {
        world.send(peer, message);
        let punted = *world.peers[peer].punted.back().unwrap();
        assert_eq!((n, punted.reason), (n, *reason));
        assert_eq!(world.message(peer, &punted), *message);
    }
    assert_eq!(world.peers[peer].session.outstanding(), 0);
    assert!(world.peers[peer].answers.is_empty());
}

#[test]
fn a_store_by_descriptor_is_unsupported_without_a_read_depth() {
    let mut world = World::new();
    let peer = world.connect(DOMAIN, 2, 0, 4, None);
    let handle = world.handle(peer, 0);
    world.put(peer, Operation::AllocStore, handle, b"", NONE);
    assert_eq!(reasons(&world, peer), [PuntReason::Unsupported]);
    let inline = world.put(peer, Operation::AllocStore, handle, b"data", RequestFlag::INLINE);
    assert_eq!(world.status(peer, inline), Some(Status::Success));
}

#[test]
fn a_punt_waits_for_what_is_before_it_and_takes_what_is_behind_it_along() {
    // Profile 3 "Same handle, same session": "This holds across punts."
    let mut world = World::new();
    let peer = world.connect(
        DOMAIN,
        4,
        2,
        8,
        Some(drawing([false, true, false, false, false, false])),
    );
    world.bind_own(peer, 0, b"data", false);
    let handles = [0, 1].map(|n| world.handle(peer, n));
    let store = world.put(peer, Operation::Store, handles[0], b"newer", NONE);
    let load = world.load(peer, handles[0], RequestFlag::ALLOW_UNSEALED);
    let free = world.free(peer, handles[0]);
    let elsewhere = world.put(peer, Operation::AllocStore, handles[1], b"", RequestFlag::INLINE);
    assert_eq!(world.status(peer, elsewhere), Some(Status::Success));
    assert!(world.peers[peer].punted.is_empty());
    world.finish(peer, 0);
    assert_eq!(world.status(peer, store), Some(Status::Success));
    assert_eq!(reasons(&world, peer), [PuntReason::Forced, PuntReason::BehindPunt]);
    let again = world.put(peer, Operation::AllocStore, handles[0], b"", RequestFlag::INLINE);
    assert_eq!(reasons(&world, peer).len(), 3);
    for request in [load, free, again] {
        assert_eq!(world.status(peer, request), None);
        world.serve_punt(peer);
        assert_eq!(world.status(peer, request), Some(Status::Success));
    }
    let native = world.free(peer, handles[0]);
    assert_eq!(world.status(peer, native), Some(Status::Success));
    assert!(world.peers[peer].punted.is_empty());
}

#[test]
fn what_comes_while_a_punt_waits_goes_along_too() {
    let mut world = World::new();
    let peer = world.connect(DOMAIN, 4, 2, 8, Some(drawing([false, true, false])));
    let handle = world.handle(peer, 0);
    let native = world.put(peer, Operation::AllocStore, handle, b"data", NONE);
    let forced = world.free(peer, handle);
    let behind = world.free(peer, handle);
    assert!(world.peers[peer].punted.is_empty());
    world.finish(peer, 0);
    assert_eq!(world.status(peer, native), Some(Status::Success));
    assert_eq!(reasons(&world, peer), [PuntReason::Forced, PuntReason::BehindPunt]);
    world.serve_punt(peer);
    world.serve_punt(peer);
    let statuses = [forced, behind].map(|request| world.status(peer, request));
    assert_eq!(statuses, [Some(Status::Success), Some(Status::NotBound)]);
}

/// What punts those of the first requests of a session for which `pattern` says so.
fn drawing<const N: usize>(pattern: [bool; N]) -> ForcedPunts {
    let of_seed = |seed: u64| ForcedPunts::new(0.5, seed).unwrap();
    let seed = (0..).find(|seed| draws(of_seed(*seed)) == pattern).unwrap();
    of_seed(seed)
}

/// Whether each of the first requests of a session is punted.
fn draws<const N: usize>(forced: ForcedPunts) -> [bool; N] {
    let mut world = World::new();
    let peer = world.connect(DOMAIN, 4, 2, 8, Some(forced));
    std::array::from_fn(|_| {
        let request = world.free(peer, world.handle(peer, 0));
        let punted = world.status(peer, request).is_none();
        if punted {
            world.serve_punt(peer);
        }
        punted
    })
}

#[test]
fn a_punt_behind_loads_in_flight_waits_for_them() {
    let mut world = World::new();
    let (owner, reader) = (
        world.join(),
        world.connect(DOMAIN, 2, 2, 4, Some(drawing([false, true]))),
    );
    world.bind_own(owner, 0, b"sealed", true);
    let handle = world.handle(owner, 0);
    let first = world.load(reader, handle, NONE);
    let second = world.load(reader, handle, NONE);
    assert_eq!(world.status(reader, first), Some(Status::Success));
    assert!(
        world.peers[reader].punted.is_empty(),
        "the block may still be on its way"
    );
    world.finish(reader, 0);
    assert_eq!(reasons(&world, reader), [PuntReason::Forced]);
    world.serve_punt(reader);
    assert_eq!(world.status(reader, second), Some(Status::Success));
}

#[test]
fn a_request_of_another_session_is_not_held_up_by_a_punt() {
    let mut world = World::new();
    let (owner, reader) = (world.connect(DOMAIN, 2, 2, 4, Some(drawing([true]))), world.join());
    world.bind_own(owner, 0, b"data", true);
    let handle = world.handle(owner, 0);
    world.load(owner, handle, NONE);
    assert_eq!(reasons(&world, owner), [PuntReason::Forced]);
    let load = world.load(reader, handle, NONE);
    assert_eq!(world.status(reader, load), Some(Status::Success));
}

#[test]
fn all_none_or_some_are_forced() {
    for (probability, least, most) in [(0.0, 0, 0), (0.5, 8, 24), (1.0, 32, 32)] {
        let mut world = World::new();
        let forced = ForcedPunts::new(probability, 4).unwrap();
        let peer = world.connect(DOMAIN, 4, 2, 4, Some(forced));
        let mut punted = 0;
        for n in 0..32 {
            let handle = world.handle(peer, n % 2);
            let request = world.put(peer, Operation::AllocStore, handle, b"", RequestFlag::INLINE);
            while !world.peers[peer].punted.is_empty() {
                assert_eq!(world.serve_punt(peer).reason, PuntReason::Forced);
                punted += 1;
            }
            assert!(world.status(peer, request).is_some());
        }
        assert!((least..=most).contains(&punted), "{punted} at {probability}");
    }
}

#[test]
fn python_that_resolves_what_it_was_not_given_changes_nothing() {
    let mut world = World::new();
    let peer = world.join();
    let handle = world.handle(peer, 0);
    world.resolved(peer, handle);
    let store = world.put(peer, Operation::AllocStore, handle, b"data", NONE);
    world.resolved(peer, handle);
    let free = world.free(peer, handle);
    world.finish(peer, 0);
    assert_eq!(world.status(peer, store), Some(Status::Success));
    assert_eq!(world.status(peer, free), Some(Status::Success));
}
