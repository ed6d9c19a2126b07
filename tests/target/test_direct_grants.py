"""To whom direct modes are granted, what HELLO_ACK says of them, and what the STags reach (draft 6.6; profile 2, 6.4,
6.10, 8.3)."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import pytest

from kbtp.blocks import Entry
from kbtp.keys import Key, Keys
from kbtp.types import Feature, HelloAckFlag, Status
from kbtp.verbs.api import Access

ALICE, BOB = bytes(range(1, 17)), bytes(range(17, 33))
LOAD, ALLOC, MASKED, INVALIDATE = 2, 4, 8, 16
DIRECT = Feature.DIRECT_LOAD | Feature.DIRECT_ALLOC
BLOCK = 512
STAGS = ("table", "pool", "partition", "ring", "head")


def direct_world(made: Callable[..., Any], **config: Any) -> Any:
    """Four shared blocks and four set aside."""
    return made(
        **{"pool_blocks": 8, "direct": DIRECT, "direct_blocks": 4, "ticket_timeout_s": 8.0, "linger_s": 60.0, **config}
    )


def signed_in(world: Any, key: Key, **hello: Any) -> Any:
    """A peer that asked for every direct mode with `key`."""
    peer = world.open()
    peer.say_hello(key=key, **{"requested_features": LOAD | ALLOC | MASKED, **hello})
    return peer


def granted(peer: Any) -> Feature:
    return Feature(peer.ack.granted_features)


def stags(peer: Any) -> dict[str, int]:
    return {name: getattr(peer.ack, f"{name}_stag") for name in STAGS if getattr(peer.ack, f"{name}_stag")}


def end(peer: Any) -> None:
    """The RNIC revokes what is scoped to a stream before it reports its end."""
    for region in peer.memory.exposed:
        region.revoke()
    peer.end()


# --- what HELLO_ACK says ---


def test_direct_load_shows_table_and_pool_to_read(new_world_of_any_store: Callable[..., Any]) -> None:
    world = direct_world(new_world_of_any_store)
    peer = world.connect(requested_features=LOAD)
    assert granted(peer) == Feature.DIRECT_LOAD
    assert set(stags(peer)) == {"table", "pool"}
    assert (peer.ack.table_offset, peer.ack.ticket_timeout_ms, peer.ack.ring_order) == (0, 0, 0)
    table, pool = peer.region("table"), peer.region("pool")
    assert (table.access, pool.access) == (Access.REMOTE_READ, Access.REMOTE_READ)
    assert (pool.base_to, pool.length) == (world.config.pool_base, world.config.pool_bytes)
    handle = peer.handle(1)
    answer = peer.bind(handle, b"contents")
    at = 16 * ((handle - peer.ack.table_base_handle) % 2**64)
    entry = Entry.unpack(table.view[at : at + 16])
    assert entry == world.store.read(handle)
    assert bytes(pool.view[entry.block_offset - pool.base_to :][:8]) == b"contents"
    assert entry.block_offset == answer.block_offset


def test_direct_alloc_shows_the_initiator_its_own_partition_and_ring(
    new_world_of_any_store: Callable[..., Any],
) -> None:
    world = direct_world(new_world_of_any_store, first_ticket=2**32 - 1)
    other = world.connect(requested_features=ALLOC | MASKED, requested_quota=1)
    peer = world.connect(requested_features=ALLOC | MASKED, requested_quota=3)
    ack = peer.ack
    assert granted(peer) == Feature.DIRECT_ALLOC | Feature.MASKED_ATOMICS
    assert set(stags(peer)) == {"partition", "ring", "head"}
    assert (ack.allocation_quota, ack.ring_order, ack.ticket_timeout_ms) == (3, 2, 8000)
    assert (ack.ring_offset, ack.head_offset) == (0, 0)
    first = world.config.pool_base + 5 * BLOCK  # behind four shared ones and the other's
    partition = peer.region("partition")
    assert (partition.access, partition.base_to, partition.length) == (Access.REMOTE_WRITE, first, 3 * BLOCK)
    assert peer.region("ring").length == 4 * 16
    assert peer.region("head").length == 8
    assert peer.take_ticket() == 2**32 - 1
    assert [peer.slot((2**32 - 1 + i) % 2**32) for i in range(4)] == [first, first + BLOCK, first + 2 * BLOCK, None]
    assert (other.ack.ring_order, other.region("partition").base_to) == (1, first - BLOCK)
    assert other.head() >> 32 == 2**32 - 1  # the ticket that the peer took was none of the other's


@pytest.mark.parametrize("asked", range(32))
def test_every_set_of_features(new_world_of_any_store: Callable[..., Any], asked: int) -> None:
    """Profile 8.3: contradictory ones are not granted; MASKED_ATOMICS is the form of a Head, so it comes with one."""
    peer = direct_world(new_world_of_any_store).connect(requested_features=asked)
    expected = asked & (LOAD | INVALIDATE)
    if asked & ALLOC and asked & MASKED:
        expected |= ALLOC | MASKED
    assert granted(peer) == expected
    assert bool(peer.ack.ticket_timeout_ms) == bool(expected & ALLOC)
    assert bool(peer.ack.ring_order) == bool(expected & ALLOC)
    assert len(stags(peer)) == 2 * bool(expected & LOAD) + 3 * bool(expected & ALLOC)


@pytest.mark.parametrize("asked", range(32))
def test_without_masked_atomics_head_has_the_ticket_alone(
    new_world_of_any_store: Callable[..., Any], asked: int
) -> None:
    """Draft 9.2, over an RNIC that can do no more."""

    class Unmasked(new_world_of_any_store):  # type: ignore[misc,valid-type]
        masked_atomics = False

    peer = direct_world(Unmasked).connect(requested_features=asked)
    assert granted(peer) == asked & (LOAD | ALLOC | INVALIDATE)
    if asked & ALLOC:
        tickets = [peer.take_block() for _ in range(1)]
        assert peer.head() == 1 << 32
        answer = peer.answers[peer.bind_ticket(peer.handle(), *tickets[0])]
        assert answer.status is Status.SUCCESS


def test_what_the_target_does_not_offer_is_not_granted(new_world_of_any_store: Callable[..., Any]) -> None:
    peer = direct_world(new_world_of_any_store, direct=Feature.DIRECT_LOAD, direct_blocks=0).connect(
        requested_features=0x1F
    )
    assert granted(peer) == Feature.DIRECT_LOAD | Feature.INVALIDATE
    peer = direct_world(new_world_of_any_store, direct=Feature.DIRECT_ALLOC).connect(requested_features=0x1F)
    assert granted(peer) == Feature.DIRECT_ALLOC | Feature.MASKED_ATOMICS | Feature.INVALIDATE


def test_an_initiator_that_may_not_read_gets_no_direct_mode(new_world_of_any_store: Callable[..., Any]) -> None:
    """Profile 3 "RDMA Reads"."""
    peer = direct_world(new_world_of_any_store).connect(peer_read_depth=0, requested_features=0x1F)
    assert granted(peer) == Feature.INVALIDATE
    assert stags(peer) == {}


# --- who is trusted ---


@pytest.mark.parametrize("allowed", [Feature.NONE, Feature.DIRECT_LOAD, Feature.DIRECT_ALLOC, DIRECT])
def test_a_key_says_which_direct_modes_it_may_use(new_world_of_any_store: Callable[..., Any], allowed: Feature) -> None:
    key = Key(1, bytes(32), direct=allowed)
    peer = signed_in(direct_world(new_world_of_any_store, keys=Keys((key,))), key)
    assert granted(peer) & DIRECT == allowed


def test_with_several_trust_domains_nobody_reads_the_pool(new_world_of_any_store: Callable[..., Any]) -> None:
    """Profile 6.4: STags that reach octets of others; a partition reaches its owner's alone."""
    keys = (Key(1, bytes(32), "a", DIRECT), Key(2, bytes(32), "b", DIRECT))
    world = direct_world(new_world_of_any_store, keys=Keys(keys), quota=2)
    for key in keys:
        assert granted(signed_in(world, key)) == Feature.DIRECT_ALLOC | Feature.MASKED_ATOMICS


def test_a_session_that_takes_a_live_one_s_place_takes_its_ring(new_world_of_any_store: Callable[..., Any]) -> None:
    """Profile 3 "Identity": everything of the old session is resolved first, its tickets too."""
    key = Key(1, bytes(32), direct=DIRECT)
    world = direct_world(new_world_of_any_store, keys=Keys((key,)))
    old = signed_in(world, key, initiator_id=ALICE, requested_quota=4)
    old.bind_ticket(old.handle(), *old.take_block(b"kept"), 4)
    ticket, block_offset = old.take_block(b"lost")
    new = signed_in(world, key, initiator_id=ALICE)
    assert not new.acks
    end(old)
    assert new.ack.flags == HelloAckFlag.RESUMED
    assert granted(new) & Feature.DIRECT_ALLOC
    assert new.look(new.handle()) == b"kept"
    assert new.status(new.bind_ticket(new.handle(1), ticket, block_offset)) is Status.TICKET_MISMATCH
    assert block_offset in [new.take_block()[1] for _ in range(3)]


# --- partitions and quotas ---


def test_an_initiator_without_a_partition_is_an_ordinary_one(new_world_of_any_store: Callable[..., Any]) -> None:
    world = direct_world(new_world_of_any_store)
    world.connect(requested_features=ALLOC | MASKED, requested_quota=3)
    for quota in (2, 4):
        peer = world.connect(requested_features=ALLOC | MASKED, requested_quota=quota)
        assert granted(peer) == Feature.NONE
        assert stags(peer) == {}
        assert peer.ack.allocation_quota == min(quota, 2)  # of the four that are shared
    last = world.connect(requested_features=ALLOC | MASKED, requested_quota=1)
    assert granted(last) & Feature.DIRECT_ALLOC
    refused = world.open()
    assert refused.hello(requested_features=ALLOC | MASKED, requested_quota=1).status == Status.NO_SPACE


@pytest.mark.parametrize("requested", [0, 4, 7])
def test_what_is_left_set_aside_is_granted_where_the_shared_ring_has_nothing_left(
    new_world_of_any_store: Callable[..., Any], requested: int
) -> None:
    """Profile 8.4: of the quota as much as there is, and NO_SPACE only where there is nothing."""
    world = direct_world(new_world_of_any_store, quota=4)
    one = world.connect(requested_features=ALLOC | MASKED, requested_quota=1)
    world.connect(requested_quota=4)
    peer = world.connect(requested_features=ALLOC | MASKED, requested_quota=requested)
    assert granted(peer) & Feature.DIRECT_ALLOC
    assert peer.ack.allocation_quota == 3
    assert [peer.take_block()[1] for _ in range(3)] == [world.config.pool_base + n * BLOCK for n in (5, 6, 7)]
    nothing = world.open()
    assert nothing.hello(requested_features=ALLOC | MASKED, requested_quota=1).status == Status.NO_SPACE
    ordinary = world.open()
    assert ordinary.hello(requested_quota=1).status == Status.NO_SPACE
    end(one)
    assert world.connect(requested_features=ALLOC | MASKED, requested_quota=2).ack.allocation_quota == 1


def test_what_is_left_set_aside_is_granted_where_the_shared_ring_has_less_left(
    new_world_of_any_store: Callable[..., Any],
) -> None:
    """One asks for 4 where 3 are left in partitions and 1 in the shared ring."""
    world = direct_world(new_world_of_any_store, quota=4)
    world.connect(requested_features=ALLOC | MASKED, requested_quota=1)
    world.connect(requested_quota=3)
    peer = world.connect(requested_features=ALLOC | MASKED, requested_quota=4)
    assert granted(peer) & Feature.DIRECT_ALLOC
    assert peer.ack.allocation_quota == 3
    assert world.connect(requested_features=ALLOC | MASKED, requested_quota=4).ack.allocation_quota == 1


def test_the_default_is_no_more_than_is_set_aside(new_world_of_any_store: Callable[..., Any]) -> None:
    """Else nobody who asks for no particular quota would get a partition."""
    world = direct_world(new_world_of_any_store, pool_blocks=12, quota=6)
    peer = world.connect(requested_features=ALLOC | MASKED)
    assert granted(peer) & Feature.DIRECT_ALLOC
    assert peer.ack.allocation_quota == 4
    assert world.connect(requested_features=ALLOC | MASKED).ack.allocation_quota == 6


def test_zero_quota_asks_for_the_default(new_world_of_any_store: Callable[..., Any]) -> None:
    world = direct_world(new_world_of_any_store, quota=2)
    peer = world.connect(requested_features=ALLOC | MASKED)
    assert (peer.ack.allocation_quota, peer.ack.ring_order) == (2, 1)


def test_a_hello_that_gets_no_handles_leaves_no_partition_behind(new_world_of_any_store: Callable[..., Any]) -> None:
    world = direct_world(new_world_of_any_store)
    world.connect(requested_handles=2**64 - 1)
    refused = world.open()
    assert refused.hello(requested_features=ALLOC | MASKED, requested_quota=4).status == Status.NO_SPACE
    assert world.store.free_blocks == 8
    assert world.store.open_partition("next", 4) is not None


# --- RESUMED ---


def test_a_resumed_identity_keeps_its_ring(new_world_of_any_store: Callable[..., Any]) -> None:
    """Profile 6.10."""
    world = direct_world(new_world_of_any_store)
    peer = world.connect(initiator_id=ALICE, requested_features=ALLOC | MASKED, requested_quota=4)
    ticket, block_offset = peer.take_block(b"kept")
    peer.bind_ticket(peer.handle(), ticket, block_offset, 4)
    first = peer.region("partition").base_to
    end(peer)
    again = world.connect(initiator_id=ALICE, requested_features=LOAD)  # not directly this time
    assert (again.ack.flags, again.ack.bound_blocks) == (HelloAckFlag.RESUMED, 1)
    assert again.bind(again.handle(1), b"own ring").block_offset == first + BLOCK
    end(again)
    third = world.connect(initiator_id=ALICE, requested_features=ALLOC | MASKED)
    assert granted(third) & Feature.DIRECT_ALLOC
    assert (third.ack.bound_blocks, third.ack.allocation_quota) == (2, 4)
    assert third.region("partition").base_to == first
    assert third.head() >> 32 == 2
    assert third.take_block()[1] == first + 2 * BLOCK
    assert third.look(third.handle()) == b"kept"


def test_a_resumed_identity_with_blocks_of_the_shared_ring_gets_no_partition(
    new_world_of_any_store: Callable[..., Any],
) -> None:
    world = direct_world(new_world_of_any_store)
    peer = world.connect(initiator_id=ALICE, requested_quota=2)
    peer.bind(peer.handle(), b"shared")
    end(peer)
    again = world.connect(initiator_id=ALICE, requested_features=ALLOC | MASKED)
    assert granted(again) == Feature.NONE
    again.free(again.handle())
    end(again)
    third = world.connect(initiator_id=ALICE, requested_features=ALLOC | MASKED)
    assert granted(third) & Feature.DIRECT_ALLOC
    assert third.ack.allocation_quota == 2
    assert world.store.quotas.left == 4


def test_the_extent_goes_back_cleared_when_the_identity_is_gone(new_world_of_any_store: Callable[..., Any]) -> None:
    world = direct_world(new_world_of_any_store)
    peer = world.connect(initiator_id=ALICE, requested_features=ALLOC | MASKED, requested_quota=4)
    block_offset = 0
    for n, data in enumerate((b"bound", b"unbound")):
        ticket, block_offset = peer.take_block(data)
        if n == 0:
            peer.bind_ticket(peer.handle(), ticket, block_offset, len(data))
    end(peer)
    assert world.store.free_blocks == 7
    world.advance(60)
    assert world.store.free_blocks == 8
    assert bytes(world.pool.view) == bytes(8 * BLOCK)
    other = world.connect(initiator_id=BOB, requested_features=ALLOC | MASKED, requested_quota=4)
    assert granted(other) & Feature.DIRECT_ALLOC
    assert other.head() == 0


def test_an_extent_waits_for_a_reader_of_its_blocks(new_world_of_any_store: Callable[..., Any]) -> None:
    world = direct_world(new_world_of_any_store)
    reader = world.connect()
    peer = world.connect(requested_features=ALLOC | MASKED, requested_quota=4)
    ticket, block_offset = peer.take_block(b"read")
    peer.bind_ticket(peer.handle(), ticket, block_offset, 4)
    handle = peer.handle()
    loading = reader.load(handle)
    end(peer)
    assert world.store.open_partition("next", 1) is None
    assert reader.loaded(loading, handle) == b"read"
    assert world.store.open_partition("next", 4) is not None


def test_counter_byte_order_is_the_target_s(new_world_of_any_store: Callable[..., Any]) -> None:
    assert direct_world(new_world_of_any_store).connect().ack.counter_byte_order == (sys.byteorder == "big")
