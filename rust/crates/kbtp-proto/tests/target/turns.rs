//! Whose turn it is: the same handle, the read depth, and the time an RDMA Read may take. Profile 3 and 8.8.

use std::time::Duration;

use kbtp_proto::target::Action;
use kbtp_proto::types::{RequestFlag, Status};
use kbtp_proto::wire::Operation;

use crate::world::{DOMAIN, Posted, World};

const NONE: RequestFlag = RequestFlag::empty();
const LATER: [(Operation, RequestFlag); 6] = [
    (Operation::Load, NONE),
    (Operation::Store, NONE),
    (Operation::Store, RequestFlag::INLINE),
    (Operation::AllocStore, NONE),
    (Operation::AllocStore, RequestFlag::INLINE),
    (Operation::Free, NONE),
];

fn send(world: &mut World, peer: usize, what: (Operation, RequestFlag), handle: u64) -> u64 {
    match what.0 {
        Operation::Load => world.load(peer, handle, what.1),
        Operation::Free => world.free(peer, handle),
        operation => world.put(peer, operation, handle, b"data", what.1),
    }
}

/// What leaves an RDMA operation posted, and how its handle is before.
const PENDING: [(Operation, Option<bool>); 3] = [
    (Operation::Load, Some(true)),
    (Operation::Store, Some(false)),
    (Operation::AllocStore, None),
];

#[test]
fn two_requests_on_one_handle() {
    for (earlier, bound) in PENDING {
        for later in LATER {
            let mut world = World::new();
            let peer = world.join();
            let handle = world.handle(peer, 0);
            if let Some(seal) = bound {
                world.bind_own(peer, 0, b"before", seal);
            }
            let one = send(&mut world, peer, (earlier, RequestFlag::SEAL & NONE), handle);
            let two = send(&mut world, peer, later, handle);
            let overlap = (earlier, later.0) == (Operation::Load, Operation::Load);
            assert_eq!(world.peers[peer].posted.len(), if overlap { 2 } else { 1 });
            if !overlap {
                assert_eq!(world.status(peer, two), None);
            }
            world.finish_all(peer);
            assert_eq!(world.status(peer, one), Some(Status::Success), "{earlier:?} {later:?}");
            let expected = match (earlier, later.0) {
                (_, Operation::AllocStore) => Status::AlreadyBound,
                (Operation::Load, Operation::Store) => Status::Sealed,
                (Operation::Store | Operation::AllocStore, Operation::Load) => Status::NotSealed,
                _ => Status::Success,
            };
            assert_eq!(world.status(peer, two), Some(expected), "{earlier:?} {later:?}");
            assert_eq!(world.peers[peer].session.outstanding(), 0);
        }
    }
}

#[test]
fn two_requests_on_two_handles() {
    for (earlier, bound) in PENDING {
        for later in LATER {
            let mut world = World::new();
            let peer = world.connect(DOMAIN, 4, 2, 4, None);
            if let Some(seal) = bound {
                world.bind_own(peer, 0, b"before", seal);
            }
            if later.0 != Operation::AllocStore {
                world.bind_own(peer, 1, b"other", later.0 == Operation::Load);
            }
            let first = world.handle(peer, 0);
            send(&mut world, peer, (earlier, NONE), first);
            let other = world.handle(peer, 1);
            let two = send(&mut world, peer, later, other);
            if world.peers[peer].posted.len() > 1 {
                world.finish(peer, 1);
            }
            assert_eq!(world.status(peer, two), Some(Status::Success), "{earlier:?} {later:?}");
            assert_eq!(world.peers[peer].posted.len(), 1);
        }
    }
}

#[test]
fn a_chain_on_one_handle_sees_each_step_done() {
    let mut world = World::new();
    let peer = world.join();
    let handle = world.handle(peer, 0);
    let store = world.put(peer, Operation::AllocStore, handle, b"one", NONE);
    let free = world.free(peer, handle);
    let again = world.put(
        peer,
        Operation::AllocStore,
        handle,
        b"two",
        RequestFlag::INLINE | RequestFlag::SEAL,
    );
    let load = world.load(peer, handle, NONE);
    world.finish_all(peer);
    let answers = &world.peers[peer].answers;
    let of = |request: u64| (answers[&request].status, answers[&request].generation);
    assert_eq!(of(store), (Status::Success, 2));
    assert_eq!(of(free), (Status::Success, 3));
    assert_eq!(of(again), (Status::Success, 4));
    assert_eq!(of(load), (Status::Success, 4));
}

#[test]
fn loads_of_one_handle_overlap_and_a_free_waits_for_them_all() {
    let mut world = World::new();
    let peer = world.join();
    world.bind_own(peer, 0, b"data", true);
    let handle = world.handle(peer, 0);
    for _ in 0..3 {
        world.load(peer, handle, NONE);
    }
    let free = world.free(peer, handle);
    for n in [1, 1, 0] {
        assert_eq!(world.status(peer, free), None);
        world.finish(peer, n);
    }
    assert_eq!(world.status(peer, free), Some(Status::Success));
}

#[test]
fn reads_beyond_the_depth_wait_and_hold_up_no_completion() {
    for depth in 1..=3 {
        let mut world = World::new();
        let peer = world.connect(DOMAIN, 4, depth, 8, None);
        world.bind_own(peer, 3, b"to load", true);
        let stores: Vec<u64> = (0..3)
            .map(|n| {
                let handle = world.handle(peer, n);
                world.put(peer, Operation::AllocStore, handle, &[n as u8; 64], NONE)
            })
            .collect();
        assert_eq!(world.peers[peer].posted.len(), depth as usize);
        let handle = world.handle(peer, 3);
        let load = world.load(peer, handle, NONE);
        assert_eq!(world.status(peer, load), Some(Status::Success));
        world.finish(peer, depth as usize);
        for done in 1..=3 {
            world.finish(peer, 0);
            assert_eq!(world.peers[peer].posted.len(), (depth as usize).min(3 - done));
        }
        for (n, store) in stores.into_iter().enumerate() {
            assert_eq!(world.status(peer, store), Some(Status::Success));
            assert_eq!(world.data(world.handle(peer, n as u64)), [n as u8; 64]);
        }
    }
}

#[test]
fn reads_of_python_share_the_depth() {
    let mut world = World::new();
    let peer = world.connect(DOMAIN, 4, 2, 4, None);
    world.foreign_read(peer, 11);
    let handle = world.handle(peer, 0);
    world.put(peer, Operation::AllocStore, handle, b"native", NONE);
    world.foreign_read(peer, 12);
    world.perform(peer);
    assert_eq!(world.peers[peer].posted[0], Posted::Foreign { key: 11 });
    assert_eq!(world.peers[peer].posted.len(), 2);
    world.finish(peer, 1);
    assert_eq!(world.peers[peer].posted[1], Posted::Foreign { key: 12 });
    world.advance(Duration::from_secs(4));
    world.finish(peer, 0);
    world.advance(Duration::from_secs(4));
    assert_eq!(world.peers[peer].end_action, None);
    world.advance(Duration::from_secs(1));
    assert!(matches!(world.peers[peer].end_action, Some(Action::Abort { .. })));
}

#[test]
fn a_read_that_is_not_answered_ends_the_stream() {
    let mut world = World::new();
    let peer = world.connect(DOMAIN, 4, 2, 4, None);
    let handles = [0, 1].map(|n| world.handle(peer, n));
    world.put(peer, Operation::AllocStore, handles[0], b"never comes", NONE);
    let deadline = world.now + Duration::from_secs(5);
    assert_eq!(world.peers[peer].session.next_deadline(), Some(deadline));
    world.advance(Duration::from_secs(3));
    world.put(peer, Operation::AllocStore, handles[1], b"nor does this", NONE);
    world.advance(Duration::from_millis(1999));
    assert_eq!(world.peers[peer].end_action, None);
    world.advance(Duration::from_millis(1));
    let why = "an RDMA Read was not answered within 5 s".to_owned();
    assert_eq!(world.peers[peer].end_action, Some(Action::Abort { why }));
    assert_eq!(world.peers[peer].session.next_deadline(), None);
    world.end(peer);
    assert_eq!(world.store_free_blocks(), 8);
}

#[test]
fn the_next_read_has_its_own_time() {
    let mut world = World::new();
    let peer = world.connect(DOMAIN, 4, 2, 4, None);
    for n in 0..2 {
        let handle = world.handle(peer, n);
        world.put(peer, Operation::AllocStore, handle, b"slow", NONE);
    }
    for _ in 0..2 {
        world.advance(Duration::from_secs(4));
        world.finish(peer, 0);
    }
    world.advance(Duration::from_secs(100));
    assert_eq!(world.peers[peer].end_action, None);
    assert_eq!(world.peers[peer].session.next_deadline(), None);
}
