//! Completion records (draft 6.5, profile 7), and what else depends on the binding.

use kbtp_proto::target::{BindingTerms, PuntReason, Session};
use kbtp_proto::types::{RequestFlag, Status};
use kbtp_proto::wire::{CompletionDescriptor, Operation};

use crate::world::World;

const INFINIBAND: BindingTerms = BindingTerms {
    records: true,
    invalidates: false,
    head_of_device: false,
};

fn join(world: &mut World, binding: BindingTerms) -> usize {
    let peer = world.join();
    let one = &mut world.peers[peer];
    one.grant.binding = binding;
    one.session = Session::new(one.grant.clone(), world.store.clone(), None, world.now);
    peer
}

/// ALLOC_STORE of "abc", inline, with a slot for a record; the Request ID.
fn alloc_store(world: &mut World, peer: usize, n: u64) -> u64 {
    let handle = world.handle(peer, n);
    let mut request = world.request(peer, Operation::AllocStore, handle);
    request.flags = RequestFlag::INLINE | RequestFlag::RECORD;
    request.data.length = 3;
    request.completion = Some(CompletionDescriptor { stag: 9, to: 0x1234 });
    world.send(peer, &request.pack(b"abc"));
    request.request_id
}

#[test]
fn a_record_says_what_a_completion_would() {
    let mut world = World::new();
    let peer = join(&mut world, INFINIBAND);
    let request_id = alloc_store(&mut world, peer, 0);
    let entry = world.entry(world.handle(peer, 0));
    let mut expected = request_id.to_be_bytes().to_vec();
    expected.extend((Status::Success as u16).to_be_bytes());
    expected.extend(entry.generation.to_be_bytes());
    expected.extend(3_u32.to_be_bytes());
    expected.extend(entry.block_offset.to_be_bytes());
    let one = &world.peers[peer];
    assert_eq!(one.records.len(), 1);
    assert_eq!((one.records[0].0, one.records[0].1), (9, 0x1234));
    assert_eq!(one.records[0].2.to_vec(), expected);
    assert!(one.answers.is_empty() && one.unanswered.is_empty() && one.punted.is_empty());
    assert_eq!(one.lent.len(), 4);
}

#[test]
fn a_refusal_is_recorded_too() {
    let mut world = World::new();
    let peer = join(&mut world, INFINIBAND);
    alloc_store(&mut world, peer, 0);
    alloc_store(&mut world, peer, 0);
    let statuses: Vec<_> = world.peers[peer]
        .records
        .iter()
        .map(|(_, _, record)| record[9])
        .collect();
    assert_eq!(statuses, [Status::Success as u8, Status::AlreadyBound as u8]);
}

#[test]
fn a_flag_that_was_not_granted_is_left_to_python() {
    for (binding, flag) in [
        (BindingTerms::RDMAP, RequestFlag::RECORD),
        (INFINIBAND, RequestFlag::INVALIDATE),
    ] {
        let mut world = World::new();
        let peer = join(&mut world, binding);
        let handle = world.handle(peer, 0);
        let mut request = world.request(peer, Operation::AllocStore, handle);
        request.flags = flag;
        if flag == RequestFlag::RECORD {
            request.completion = Some(CompletionDescriptor { stag: 9, to: 0 });
        }
        world.send(peer, &request.pack(&[]));
        let punted = world.peers[peer].punted.pop_front();
        assert_eq!(punted.map(|punted| punted.reason), Some(PuntReason::Unsupported));
    }
}

#[test]
fn where_only_the_device_may_move_head_an_alloc_store_is_left_to_python() {
    let mut world = World::new();
    let peer = join(
        &mut world,
        BindingTerms {
            head_of_device: true,
            ..INFINIBAND
        },
    );
    let handle = world.handle(peer, 0);
    world.put(peer, Operation::AllocStore, handle, b"", RequestFlag::INLINE);
    let punted = world.peers[peer].punted.pop_front();
    assert_eq!(punted.map(|punted| punted.reason), Some(PuntReason::HeadOfDevice));
    let elsewhere = world.handle(peer, 1);
    world.bind_own(peer, 1, b"x", true);
    let freed = world.free(peer, elsewhere);
    assert_eq!(world.status(peer, freed), Some(Status::Success));
}
