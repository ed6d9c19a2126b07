//! What completions say, what is moved, and who has which credit. Profile 2, 3, 6 and 8.6.

use kbtp_proto::stream::Piece;
use kbtp_proto::target::SharedStore;
use kbtp_proto::types::{RequestFlag, Status};
use kbtp_proto::wire::{DataDescriptor, Operation};

use crate::world::{BLOCK, BLOCKS, DOMAIN, DRAIN, Posted, World};

const NONE: RequestFlag = RequestFlag::empty();

#[test]
fn a_load_moves_data_length_octets_and_no_more() {
    let mut world = World::new();
    let peer = world.join();
    world.bind_own(peer, 0, b"five!", true);
    let stag = world.buffer(peer, vec![b'.'; 512]);
    let mut request = world.request(peer, Operation::Load, world.handle(peer, 0));
    request.data = DataDescriptor {
        stag,
        to: 0,
        length: 512,
    };
    request.flags = RequestFlag::INVALIDATE;
    world.send(peer, &request.pack(&[]));
    // The completion is posted behind the Write, and gives the credit back with it.
    let answer = world.peers[peer].answers[&request.request_id];
    assert_eq!(
        (answer.status, answer.data_length, answer.generation),
        (Status::Success, 5, 2)
    );
    assert_eq!(answer.block_offset, world.entry(request.handle).block_offset);
    assert_eq!(answer.invalidated, Some(stag));
    assert_eq!(world.peers[peer].lent.len(), 4);
    world.finish(peer, 0);
    assert_eq!(
        world.peers[peer].buffers[&stag],
        [b"five!".to_vec(), vec![b'.'; 507]].concat()
    );
}

#[test]
fn an_unsealed_block_is_loaded_by_who_allows_it_and_may_change_on_its_way() {
    let mut world = World::new();
    let (owner, reader) = (world.join(), world.join());
    world.bind_own(owner, 0, b"draft", false);
    let handle = world.handle(owner, 0);
    let refused = world.load(reader, handle, NONE);
    assert_eq!(world.status(reader, refused), Some(Status::NotSealed));
    let load = world.load(reader, handle, RequestFlag::ALLOW_UNSEALED);
    assert_eq!(world.status(reader, load), Some(Status::Success));
    assert!(matches!(source(&world, reader), Piece::Changing(_)));
    // profile 6.1: a STORE does not wait for it, a FREE does.
    let sealed = world.put(
        owner,
        Operation::Store,
        handle,
        b"final",
        RequestFlag::INLINE | RequestFlag::SEAL,
    );
    let free = world.free(owner, handle);
    assert_eq!(
        [sealed, free].map(|request| world.status(owner, request)),
        [Some(Status::Success), None]
    );
    world.finish(reader, 0);
    assert_eq!(world.status(owner, free), Some(Status::Success));

    world.bind_own(owner, 0, b"sealed", true);
    world.load(reader, handle, RequestFlag::ALLOW_UNSEALED);
    assert!(matches!(source(&world, reader), Piece::Still(_)));
}

/// Of the RDMA Write that was posted first.
fn source(world: &World, peer: usize) -> Piece {
    match &world.peers[peer].posted[0] {
        Posted::Write { source, .. } => source.clone(),
        other => panic!("{other:?}"),
    }
}

#[test]
fn a_sealed_block_stays_still_unless_it_is_of_a_partition_whose_holder_may_write_it() {
    let mut world = World::with_direct_blocks(2);
    let (owner, direct, reader) = (world.join(), world.join(), world.join());
    world.open_partition(direct, BLOCKS - 2, 2);
    for (holder, still) in [(owner, true), (direct, false)] {
        world.bind_own(holder, 0, b"sealed", true);
        world.load(reader, world.handle(holder, 0), NONE);
        assert_eq!(matches!(source(&world, reader), Piece::Still(_)), still);
        assert_eq!(matches!(source(&world, reader), Piece::Changing(_)), !still); // draft 6.6
        world.finish(reader, 0);
    }
}

#[test]
fn data_comes_by_descriptor_or_inline() {
    for flags in [NONE, RequestFlag::INLINE] {
        let mut world = World::new();
        let peer = world.join();
        let handle = world.handle(peer, 0);
        let data: Vec<u8> = (0..=255).cycle().take(BLOCK as usize).collect();
        let alloc = world.put(peer, Operation::AllocStore, handle, &data, flags);
        world.finish_all(peer);
        let answer = world.peers[peer].answers[&alloc];
        assert_eq!(
            (answer.status, answer.data_length, answer.generation),
            (Status::Success, 512, 2)
        );
        assert_eq!(world.data(handle), data);
        assert!(!world.entry(handle).sealed());

        let store = world.put(peer, Operation::Store, handle, b"shorter", flags | RequestFlag::SEAL);
        if flags == NONE {
            assert_eq!(
                world.entry(handle).data_length,
                512,
                "as it was until all of it is there"
            );
            assert!(!world.entry(handle).sealed());
        }
        world.finish_all(peer);
        let answer = world.peers[peer].answers[&store];
        assert_eq!(
            (answer.status, answer.data_length, answer.generation),
            (Status::Success, 7, 2)
        );
        assert_eq!(world.data(handle), b"shorter");
        assert!(world.entry(handle).sealed());
    }
}

#[test]
fn nothing_is_stored_and_loaded_without_an_operation() {
    // Profile 6.6, 8.7.
    for flags in [NONE, RequestFlag::INLINE] {
        let mut world = World::new();
        let peer = world.join();
        world.bind_own(peer, 0, b"was here", false);
        let handles = [0, 1].map(|n| world.handle(peer, n));
        let requests = [
            world.put(peer, Operation::Store, handles[0], b"", flags | RequestFlag::SEAL),
            world.put(peer, Operation::AllocStore, handles[1], b"", flags),
            world.load(peer, handles[0], NONE),
        ];
        assert!(world.peers[peer].posted.is_empty());
        for request in requests {
            let answer = world.peers[peer].answers[&request];
            assert_eq!((answer.status, answer.data_length), (Status::Success, 0));
        }
        let free = world.free(peer, handles[0]);
        assert_eq!(world.status(peer, free), Some(Status::Success));
    }
}

#[test]
fn a_free_carries_zeros_and_the_generation_after() {
    let mut world = World::new();
    let peer = world.join();
    world.bind_own(peer, 0, b"data", true);
    let request = world.free(peer, world.handle(peer, 0));
    let answer = world.peers[peer].answers[&request];
    assert_eq!((answer.status, answer.generation), (Status::Success, 3));
    assert_eq!((answer.data_length, answer.block_offset), (0, 0));
    assert!(world.pool().iter().all(|octet| *octet == 0), "cleared");
}

#[test]
fn a_free_waits_for_the_loads_of_others() {
    // Profile 6.1.
    let mut world = World::new();
    let (owner, reader) = (world.join(), world.join());
    world.bind_own(owner, 0, b"whole", true);
    let handle = world.handle(owner, 0);
    let load = world.load(reader, handle, NONE);
    let free = world.free(owner, handle);
    let late = world.load(reader, handle, NONE);
    assert_eq!(world.status(reader, late), Some(Status::NotBound));
    assert_eq!(world.status(owner, free), None);
    assert_eq!(world.store.with(|store| store.next_deadline()), Some(world.now + DRAIN));
    let again = world.put(owner, Operation::AllocStore, handle, b"next", RequestFlag::INLINE);
    assert_eq!(world.status(owner, again), None);
    world.finish(reader, 0);
    assert_eq!(world.status(reader, load), Some(Status::Success));
    assert_eq!(&world.peers[reader].buffers[&0x101][..5], b"whole");
    assert_eq!(world.status(owner, free), Some(Status::Success));
    assert_eq!(world.status(owner, again), Some(Status::Success));
}

#[test]
fn a_buffer_is_not_reposted_while_its_request_waits() {
    let mut world = World::new();
    let peer = world.join();
    world.bind_own(peer, 0, b"before", false);
    let handles = [0, 1].map(|n| world.handle(peer, n));
    world.put(peer, Operation::Store, handles[0], b"by descriptor", NONE);
    let waiting: Vec<u64> = [1, 2]
        .map(|n| world.put(peer, Operation::Store, handles[0], &[n; 300], RequestFlag::INLINE))
        .into();
    assert_eq!(world.peers[peer].lent.len(), 1);
    for _ in 0..8 {
        world.free(peer, handles[1]); // the one free buffer goes round and is overwritten each time
    }
    world.finish(peer, 0);
    assert!(
        waiting
            .iter()
            .all(|request| world.status(peer, *request) == Some(Status::Success))
    );
    assert_eq!(world.data(handles[0]), [2; 300]);
}

#[test]
fn a_peer_that_takes_no_completion_comes_to_the_end_of_its_credits() {
    let mut world = World::new();
    let peer = world.join();
    world.peers[peer].takes_sends = false;
    let handle = world.handle(peer, 0);
    let mut asked = Vec::new();
    while !world.peers[peer].lent.is_empty() {
        assert!(asked.len() < 100, "the send queue has no end");
        asked.push(world.free(peer, handle));
    }
    assert_eq!(asked.len(), 4 * 4 + 4);
    assert_eq!(
        (world.peers[peer].sends_posted, world.peers[peer].session.outstanding()),
        (16, 4)
    );
    world.take_sends(peer);
    assert!(
        asked
            .iter()
            .all(|request| world.status(peer, *request) == Some(Status::NotBound))
    );
    assert_eq!(
        (world.peers[peer].lent.len(), world.peers[peer].session.outstanding()),
        (4, 0)
    );
}

#[test]
fn one_credit_is_enough() {
    let mut world = World::new();
    let peer = world.connect(DOMAIN, 2, 1, 1, None);
    let handle = world.handle(peer, 0);
    for operation in [Operation::AllocStore, Operation::Store] {
        let request = world.put(peer, operation, handle, b"by descriptor", NONE);
        assert!(world.peers[peer].lent.is_empty());
        world.finish(peer, 0);
        assert_eq!(world.status(peer, request), Some(Status::Success));
    }
}

#[test]
fn the_quota_is_reached_before_a_ticket_is_taken() {
    let mut world = World::new();
    let peer = world.connect(DOMAIN, 1, 2, 4, None);
    world.bind_own(peer, 0, b"the one", true);
    let handle = world.handle(peer, 1);
    let request = world.put(peer, Operation::AllocStore, handle, b"two", NONE);
    let answer = world.peers[peer].answers[&request];
    assert_eq!(
        (answer.status, answer.generation, answer.block_offset),
        (Status::NoSpace, 1, 0)
    );
    assert_eq!(world.store_free_blocks(), 7);
}
