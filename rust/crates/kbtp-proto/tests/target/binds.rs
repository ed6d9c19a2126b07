//! BIND is Python's, and has its turn on its handle all the same (profile 3 "Same handle, same session", 6.11).

use kbtp_proto::target::{ForcedPunts, PuntReason, Session};
use kbtp_proto::types::{Opcode, RequestFlag, Status};
use kbtp_proto::wire::{Bind, CommonHeader, HEAD_BYTES_MAX, Operation};

use crate::world::{DOMAIN, World};

const NONE: RequestFlag = RequestFlag::empty();

fn message(handle: u64, ticket: u32) -> Vec<u8> {
    let header = CommonHeader {
        version: 1,
        opcode: Opcode::Bind as u8,
        flags: RequestFlag::SEAL.bits(),
        request_id: 0xB1D0_0000 + u64::from(ticket),
        handle,
        generation: 0,
        status: 0,
    };
    let mut octets = header.pack().to_vec();
    octets.extend(ticket.to_be_bytes());
    octets.resize(40, 0); // profile 1
    octets
}

/// A session that was granted DIRECT_ALLOC.
fn join(world: &mut World) -> usize {
    join_with(world, None)
}

fn join_with(world: &mut World, forced: Option<ForcedPunts>) -> usize {
    let peer = world.connect(DOMAIN, 4, 2, 8, None);
    let one = &mut world.peers[peer];
    one.grant.direct_alloc = true;
    one.session = Session::new(one.grant.clone(), world.store.clone(), forced, world.now);
    peer
}

fn bind(world: &mut World, peer: usize, n: u64, ticket: u32) {
    let handle = world.handle(peer, n);
    world.send(peer, &message(handle, ticket));
}

fn reasons(world: &World, peer: usize) -> Vec<PuntReason> {
    world.peers[peer].punted.iter().map(|punted| punted.reason).collect()
}

fn tickets(world: &World, peer: usize) -> Vec<u32> {
    let mut tickets: Vec<_> = world.peers[peer].session.bind_tickets().collect();
    tickets.sort_unstable();
    tickets
}

#[test]
fn a_bind_is_left_to_python_and_what_follows_on_its_handle_goes_along() {
    let mut world = World::new();
    let peer = join(&mut world);
    bind(&mut world, peer, 0, 7);
    let handles = [0, 1].map(|n| world.handle(peer, n));
    world.load(peer, handles[0], NONE);
    let elsewhere = world.put(peer, Operation::AllocStore, handles[1], b"", RequestFlag::INLINE);
    assert_eq!(world.status(peer, elsewhere), Some(Status::Success));
    assert_eq!(reasons(&world, peer), [PuntReason::Bind, PuntReason::BehindPunt]);
    let punted = world.peers[peer].punted[0];
    assert_eq!(world.message(peer, &punted), message(handles[0], 7));
    world.peers[peer].session.resolved(handles[0]);
    world.peers[peer].session.resolved(handles[0]);
    let native = world.free(peer, handles[0]);
    assert_eq!(world.status(peer, native), Some(Status::NotBound));
}

#[test]
fn a_bind_waits_for_what_is_before_it() {
    let mut world = World::new();
    let peer = join(&mut world);
    let handle = world.handle(peer, 0);
    let alloc = world.put(peer, Operation::AllocStore, handle, b"data", NONE);
    bind(&mut world, peer, 0, 7);
    assert_eq!((reasons(&world, peer), tickets(&world, peer)), (vec![], vec![7]));
    assert_eq!(world.peers[peer].session.outstanding(), 2);
    world.finish(peer, 0);
    assert_eq!(world.status(peer, alloc), Some(Status::Success));
    assert_eq!(reasons(&world, peer), [PuntReason::Bind]);
}

#[test]
fn the_ticket_of_a_bind_is_known_until_it_is_resolved() {
    let mut world = World::new();
    let peer = join_with(&mut world, Some(ForcedPunts::new(1.0, 0).unwrap()));
    world.bind_own(peer, 0, b"data", true);
    let handle = world.handle(peer, 0);
    for _ in 0..2 {
        world.load(peer, handle, RequestFlag::empty());
    }
    bind(&mut world, peer, 0, 7);
    bind(&mut world, peer, 1, 9);
    assert_eq!(reasons(&world, peer).len(), 4);
    for expected in [vec![7, 9], vec![7, 9], vec![9], vec![9]] {
        world.peers[peer].session.resolved(handle);
        assert_eq!(tickets(&world, peer), expected);
    }
    world.end(peer);
    assert_eq!(tickets(&world, peer), []);
}

#[test]
fn what_python_refuses_without_a_turn_has_none_here() {
    let mut world = World::new();
    let peer = join(&mut world);
    let handle = world.handle(peer, 0);
    for (ticket, (at, octet, length, reason)) in [
        (0, 2, 40, PuntReason::Unsupported), // version
        (3, RequestFlag::RECORD.bits() as u8, 40, PuntReason::Unsupported),
        (3, RequestFlag::INLINE.bits() as u8, 40, PuntReason::Unsupported),
        (2, 0x80, 40, PuntReason::Unsupported),
        (0, 1, 39, PuntReason::Malformed),
        (0, 1, 24, PuntReason::Malformed),
        (0, 1, 41, PuntReason::Malformed),
    ]
    .into_iter()
    .enumerate()
    {
        let mut octets = message(handle, ticket as u32);
        octets[at] = octet;
        octets.resize(length, 0);
        world.send(peer, &octets);
        assert_eq!(
            world.peers[peer].punted.pop_front().map(|punted| punted.reason),
            Some(reason)
        );
        assert_eq!(
            (tickets(&world, peer), world.peers[peer].session.outstanding()),
            (vec![], 0)
        );
    }
    let native = world.put(peer, Operation::AllocStore, handle, b"", RequestFlag::INLINE);
    assert_eq!(world.status(peer, native), Some(Status::Success));
}

#[test]
fn without_direct_allocation_a_bind_is_no_request() {
    let mut world = World::new();
    let peer = world.connect(DOMAIN, 4, 2, 8, None);
    let handle = world.handle(peer, 0);
    world.put(peer, Operation::AllocStore, handle, b"data", NONE);
    bind(&mut world, peer, 0, 7);
    assert_eq!(
        (reasons(&world, peer), tickets(&world, peer)),
        (vec![PuntReason::NotARequest], vec![])
    );
}

#[test]
fn only_a_bind_is_parsed_as_one() {
    let good = message(5, 7);
    assert_eq!(Bind::parse(&good, 40), Ok(Bind { handle: 5, ticket: 7 }));
    let mut long = good.clone();
    long.resize(HEAD_BYTES_MAX, 0);
    assert_eq!(
        Bind::parse(&long, 56).map_err(|error| error.status),
        Err(Status::Malformed)
    );
    let mut load = good;
    load[1] = Opcode::Load as u8;
    assert_eq!(Bind::parse(&load, 40).map_err(|error| error.field), Err("opcode"));
}
