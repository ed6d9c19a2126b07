//! The end of a stream: every request is resolved as wholly done or not done, and what it held goes back. Profile 3, 6.5.

use kbtp_proto::target::{Action, SessionMemory, TaskId};
use kbtp_proto::types::{RequestFlag, Status};
use kbtp_proto::wire::Operation;

use crate::world::{DOMAIN, World};

const NONE: RequestFlag = RequestFlag::empty();

#[test]
fn an_alloc_store_that_did_not_come_leaves_nothing() {
    let mut world = World::new();
    let peer = world.join();
    let handle = world.handle(peer, 0);
    world.put(peer, Operation::AllocStore, handle, &[7; 100], NONE);
    world.end(peer);
    assert!(!world.entry(handle).valid());
    assert_eq!(world.entry(handle).generation, 1);
    assert_eq!(world.store_free_blocks(), 8);
    assert!(world.pool().iter().all(|octet| *octet == 0));
}

#[test]
fn a_store_that_did_not_come_whole_leaves_the_block_empty() {
    // Profile 6.5, 8.9.
    let mut world = World::new();
    let peer = world.join();
    world.bind_own(peer, 0, b"before", false);
    let handle = world.handle(peer, 0);
    world.put(peer, Operation::Store, handle, b"after!", RequestFlag::SEAL);
    world.end(peer);
    let entry = world.entry(handle);
    assert_eq!((entry.valid(), entry.sealed(), entry.data_length), (true, false, 0));
}

#[test]
fn a_store_that_had_not_begun_to_come_leaves_the_block_as_it_was() {
    let mut world = World::new();
    let peer = world.connect(DOMAIN, 4, 1, 8, None);
    for n in 0..2 {
        world.bind_own(peer, n, b"before", false);
    }
    let handles = [0, 1].map(|n| world.handle(peer, n));
    for handle in handles {
        world.put(peer, Operation::Store, handle, b"after!", NONE);
    }
    assert_eq!(world.peers[peer].posted.len(), 1);
    world.end(peer);
    assert_eq!(world.entry(handles[0]).data_length, 0);
    assert_eq!(world.data(handles[1]), b"before");
}

#[test]
fn the_end_of_a_reader_lets_a_free_go_on() {
    let mut world = World::new();
    let (owner, reader) = (world.join(), world.join());
    world.bind_own(owner, 0, b"data", true);
    let handle = world.handle(owner, 0);
    world.load(reader, handle, NONE);
    let free = world.free(owner, handle);
    assert_eq!(world.status(owner, free), None);
    world.end(reader);
    assert_eq!(world.status(owner, free), Some(Status::Success));
    assert_eq!(world.store_free_blocks(), 8);
}

#[test]
fn a_free_goes_on_after_the_end_of_its_own_stream() {
    let mut world = World::new();
    let (owner, reader) = (world.join(), world.join());
    world.bind_own(owner, 0, b"data", true);
    let handle = world.handle(owner, 0);
    world.load(reader, handle, NONE);
    let free = world.free(owner, handle);
    world.end(owner);
    assert_eq!(world.store_free_blocks(), 7);
    world.finish(reader, 0);
    assert_eq!(world.store_free_blocks(), 8);
    assert_eq!(world.status(owner, free), None);
}

#[test]
fn nothing_starts_after_the_end() {
    let mut world = World::new();
    let peer = world.join();
    let handle = world.handle(peer, 0);
    world.put(peer, Operation::AllocStore, handle, b"data", NONE);
    world.free(peer, handle);
    world.end(peer);
    let now = world.now;
    let peer = &mut world.peers[peer];
    peer.session.received(0, 40, &mut peer.memory, now);
    peer.session.sent();
    peer.session.foreign_read(1, now);
    peer.session.resolved(handle);
    peer.session.tick(now + crate::world::DRAIN * 2);
    assert_eq!(peer.session.next_action(), None);
    assert_eq!(peer.session.next_deadline(), None);
}

#[test]
fn draining_lets_everything_finish_first() {
    let mut world = World::new();
    let peer = world.join();
    world.bind_own(peer, 1, b"data", true);
    let handles = [0, 1].map(|n| world.handle(peer, n));
    world.put(peer, Operation::AllocStore, handles[0], b"data", NONE);
    let free = world.free(peer, handles[0]);
    world.load(peer, handles[1], NONE);
    world.drain(peer);
    world.peers[peer].takes_sends = false;
    world.finish(peer, 0);
    assert_eq!(world.status(peer, free), Some(Status::Success));
    assert!(!world.peers[peer].drained);
    world.finish(peer, 0);
    assert!(world.peers[peer].drained);
    world.take_sends(peer);
    world.drain(peer);
}

#[test]
fn an_idle_session_is_drained_at_once() {
    let mut world = World::new();
    let peer = world.join();
    world.drain(peer);
    assert!(world.peers[peer].drained);
}

#[test]
fn draining_waits_for_pythons_reads_too() {
    let mut world = World::new();
    let peer = world.join();
    for key in 0..3 {
        world.foreign_read(peer, key);
    }
    world.perform(peer);
    world.drain(peer);
    assert!(!world.peers[peer].drained);
    world.finish(peer, 0);
    assert!(world.peers[peer].drained);
    assert_eq!(world.peers[peer].posted.len(), 2);
}

#[test]
fn a_fault_in_here_ends_one_session() {
    // A completion of a task that is none: the RNIC mixed something up.
    let mut world = World::new();
    let peer = world.join();
    let now = world.now;
    let state = &mut world.peers[peer];
    let memory: &mut dyn SessionMemory = &mut state.memory;
    state.session.written(TaskId(99), memory, now);
    world.perform(peer);
    let Some(Action::Abort { why }) = &world.peers[peer].end_action else {
        panic!("no abort")
    };
    assert_eq!(why, "internal error: TaskId(99) is none of this session");
}
