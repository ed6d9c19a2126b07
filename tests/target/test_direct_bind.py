"""BIND: the block of a ticket that the initiator took itself becomes a handle's (draft 6.6; profile 1, 6.8 to 6.10)."""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import Any

import pytest

from kbtp.target.actions import Terminate
from kbtp.types import Feature, Status, TerminateCause

ALLOC, MASKED = 4, 8
BLOCK = 512
INLINE, SEAL, RECORD, INVALIDATE, ALLOW_UNSEALED = 1, 2, 4, 8, 16
ALICE = bytes(range(1, 17))


def direct_world(made: Callable[..., Any], **config: Any) -> Any:
    return made(
        **{
            "pool_blocks": 8,
            "direct": Feature.DIRECT_ALLOC,
            "direct_blocks": 4,
            "ticket_timeout_s": 8.0,
            "request_credits": 8,
            **config,
        }
    )


@pytest.fixture
def world(new_world_of_any_store: Callable[..., Any]) -> Any:
    return direct_world(new_world_of_any_store)


@pytest.fixture
def peer(world: Any) -> Any:
    return connected(world)


def connected(world: Any, **hello: Any) -> Any:
    peer = world.connect(**{"requested_features": ALLOC | MASKED, "requested_quota": 4, **hello})
    assert peer.ack.granted_features & Feature.DIRECT_ALLOC
    return peer


def test_a_bound_block_is_loaded_like_any_other(world: Any, peer: Any) -> None:
    """Profile 8.6: the completion carries Data Length and Block Offset of the entry."""
    other = world.connect()
    ticket, block_offset = peer.take_block(b"written by the initiator")
    answer = peer.answers[peer.bind_ticket(peer.handle(), ticket, block_offset, 24)]
    assert (answer.status, answer.generation, answer.data_length, answer.block_offset) == (
        Status.SUCCESS, 2, 24, block_offset,
    )  # fmt: skip
    assert other.loaded(other.load(peer.handle()), peer.handle()) == b"written by the initiator"
    assert peer.slot(ticket) is None


def test_without_seal_a_store_may_follow(peer: Any) -> None:
    ticket, block_offset = peer.take_block(b"first")
    peer.bind_ticket(peer.handle(), ticket, block_offset, 5, flags=0)
    assert not peer.entry(peer.handle()).sealed
    assert peer.status(peer.store(peer.handle(), b"second", flags=INLINE | SEAL)) is Status.SUCCESS
    assert peer.look(peer.handle()) == b"second"


# --- what refuses a BIND, in the order of profile 1 ---

Fault = tuple[str, Status, dict[str, Any]]
FAULTS: list[Fault] = [
    ("flag RECORD", Status.UNSUPPORTED, {"flags": RECORD}),
    ("flag INLINE", Status.UNSUPPORTED, {"flags": INLINE}),
    ("flag INVALIDATE", Status.UNSUPPORTED, {"flags": INVALIDATE}),
    ("flag ALLOW_UNSEALED", Status.UNSUPPORTED, {"flags": ALLOW_UNSEALED}),
    ("cut", Status.MALFORMED, {"cut": 39}),
    ("octets left over", Status.MALFORMED, {"tail": b"x"}),
    ("handle of another", Status.HANDLE_OUT_OF_RANGE, {"handle": "other's"}),
    ("no handle", Status.HANDLE_OUT_OF_RANGE, {"handle": "none"}),
    ("bound handle", Status.ALREADY_BOUND, {"handle": "bound"}),
    ("generation", Status.GENERATION_MISMATCH, {"generation": 7}),
    ("longer than a block", Status.LENGTH_ERROR, {"length": BLOCK + 1}),
    ("longest", Status.LENGTH_ERROR, {"length": 2**32 - 1}),
    ("never taken", Status.TICKET_MISMATCH, {"ticket": 1}),
    ("bound before", Status.TICKET_MISMATCH, {"ticket": -1}),
    ("far away", Status.TICKET_MISMATCH, {"ticket": 2**31}),
    ("same slot, another turn", Status.TICKET_MISMATCH, {"ticket": 4}),
    ("another block", Status.TICKET_MISMATCH, {"offset": BLOCK}),
    ("a block of the shared ring", Status.TICKET_MISMATCH, {"offset": -4 * BLOCK}),
    ("no block", Status.TICKET_MISMATCH, {"offset": 64}),
]


def bind_octets(peer: Any, taken: tuple[int, int], **fault: Any) -> bytes:
    """A BIND of an outstanding ticket to a free handle, or with faults."""
    handle = {
        "own": peer.handle(1),
        "other's": peer.world.peers[0].handle(),
        "none": (peer.ack.table_base_handle + peer.ack.table_handles) % 2**64,
        "bound": peer.handle(),
    }[fault.get("handle", "own")]
    ticket = (taken[0] + fault.get("ticket", 0)) % 2**32
    block_offset = (taken[1] + fault.get("offset", 0)) % 2**64
    header = struct.pack(">BBHQQHH", 1, 7, fault.get("flags", 0), 99, handle, fault.get("generation", 0), 0)
    octets = header + struct.pack(">IIQ", ticket, fault.get("length", 3), block_offset)
    return octets[: fault.get("cut")] + fault.get("tail", b"")


def seen(world: Any, peer: Any) -> Any:
    """Everything that a refused BIND leaves as it is."""
    usage = world.store.quotas.usage(peer.session.identity)
    return peer.head(), bytes(peer.region("ring").view), world.table(), usage


def refused(world: Any, peer: Any, *faults: dict[str, Any]) -> Any:
    """The answer to a BIND with all of `faults`, which changes nothing; without them it succeeds right after."""
    peer.bind_ticket(peer.handle(), *peer.take_block(b"old"), 3)
    taken = peer.take_block(b"new")
    before = seen(world, peer)
    peer.send(bind_octets(peer, taken, **{key: value for one in faults for key, value in one.items()}))
    answer = peer.answers[99]
    assert seen(world, peer) == before
    assert (answer.data_length, answer.block_offset) == (0, 0)
    assert peer.status(peer.bind_ticket(peer.handle(1), *taken, 3)) is Status.SUCCESS
    assert peer.look(peer.handle(1)) == b"new"
    return answer


@pytest.mark.parametrize(("_name", "status", "fault"), FAULTS, ids=[name for name, _, _ in FAULTS])
def test_each_check_of_bind(
    new_world_of_any_store: Callable[..., Any], _name: str, status: Status, fault: dict[str, Any]
) -> None:
    """A refused BIND leaves its ticket outstanding (profile 6.11)."""
    world = direct_world(new_world_of_any_store)
    world.connect()
    answer = refused(world, connected(world), fault)
    assert answer.status is status
    silent = {Status.UNSUPPORTED, Status.MALFORMED, Status.HANDLE_OUT_OF_RANGE}
    assert answer.generation == (0 if status in silent else 2 if status is Status.ALREADY_BOUND else 1)


PAIRS = [
    (f"{one[0]} before {two[0]}", one[1], one[2], two[2])
    for i, one in enumerate(FAULTS)
    for two in FAULTS[i + 1 :]
    if one[1] != two[1] and not set(one[2]) & set(two[2])
]


@pytest.mark.parametrize(("_name", "status", "earlier", "later"), PAIRS, ids=[pair[0] for pair in PAIRS])
def test_the_earlier_check_names_the_status(
    new_world_of_any_store: Callable[..., Any],
    _name: str,
    status: Status,
    earlier: dict[str, Any],
    later: dict[str, Any],
) -> None:
    world = direct_world(new_world_of_any_store)
    world.connect()
    assert refused(world, connected(world), later, earlier).status is status


def test_no_space_comes_before_the_ticket_statuses(world: Any, peer: Any) -> None:
    for n in range(4):
        peer.bind_ticket(peer.handle(n), *peer.take_block())
    assert peer.status(peer.bind_ticket(peer.handle(4), 0, 0)) is Status.NO_SPACE
    peer.free(peer.handle())
    assert peer.status(peer.bind_ticket(peer.handle(4), 0, 0)) is Status.TICKET_MISMATCH


@pytest.mark.parametrize("features", [0, MASKED, ALLOC])
def test_bind_without_direct_alloc_is_unsupported_and_the_stream_stays(world: Any, features: int) -> None:
    """Profile 8.3."""
    peer = world.connect(requested_features=features, requested_quota=2)
    assert peer.status(peer.bind_ticket(peer.handle(), 0, world.config.pool_base)) is Status.UNSUPPORTED
    assert peer.bind(peer.handle(), b"still served").status is Status.SUCCESS


def test_bind_before_hello(world: Any) -> None:
    peer = world.open()
    assert peer.status(peer.bind_ticket(0, 0, 0)) is Status.UNSUPPORTED


# --- turns on a handle (profile 3) ---


def test_bind_waits_for_earlier_requests_on_its_handle_and_later_ones_for_it(world: Any, peer: Any) -> None:
    handle = peer.handle()
    reader = world.connect()
    old = peer.take_block(b"old")
    peer.bind_ticket(handle, *old, 3)
    reader.load(handle)
    freeing = peer.free(handle)
    new = peer.take_block(b"new")
    binding = peer.bind_ticket(handle, *new, 3)
    loading = peer.load(handle)
    assert [peer.status(one) for one in (freeing, binding, loading)] == [None, None, None]
    reader.finish()
    assert [peer.status(one) for one in (freeing, binding)] == [Status.SUCCESS, Status.SUCCESS]
    assert peer.loaded(loading, handle) == b"new"


# --- one ring for both kinds of allocation (profile 6.10) ---


def test_the_target_s_allocations_and_tickets_share_the_ring(peer: Any) -> None:
    first = peer.take_block(b"first")
    second = peer.bind(peer.handle(1), b"second")
    third = peer.take_block(b"third")
    assert len({first[1], second.block_offset, third[1]}) == 3
    peer.bind_ticket(peer.handle(2), *third, 5)
    peer.bind_ticket(peer.handle(0), *first, 5)
    assert [peer.look(peer.handle(n)) for n in range(3)] == [b"first", b"second", b"third"]


def test_tickets_that_are_out_count_against_the_quota(peer: Any) -> None:
    """Draft 3.4, profile 6.8."""
    tickets = [peer.take_block() for _ in range(3)]
    assert peer.bind(peer.handle(), b"x").status is Status.SUCCESS
    head = peer.head()
    assert peer.status(peer.alloc_store(peer.handle(1), b"y", flags=INLINE)) is Status.NO_SPACE
    assert peer.head() == head
    assert peer.status(peer.bind_ticket(peer.handle(1), *tickets[0])) is Status.SUCCESS
    assert peer.status(peer.alloc_store(peer.handle(2), b"y", flags=INLINE)) is Status.NO_SPACE


def test_an_allocation_behind_a_ticket_that_is_out_does_not_overtake_it(peer: Any) -> None:
    """The next slot still holds the block of an older ticket: the ring has nothing ready, whatever the quota says."""
    slow = peer.take_block(b"slow")
    for n in range(3):
        peer.bind(peer.handle(n), b"x")
    for n in range(3):
        assert peer.status(peer.free(peer.handle(n))) is Status.SUCCESS
    assert peer.status(peer.alloc_store(peer.handle(3), b"y", flags=INLINE)) is Status.TARGET_ERROR
    assert peer.status(peer.bind_ticket(peer.handle(4), *slow, 4)) is Status.SUCCESS
    assert peer.bind(peer.handle(3), b"y").status is Status.SUCCESS
    assert peer.look(peer.handle(4)) == b"slow"


def test_a_free_completes_while_its_slot_is_out(peer: Any) -> None:
    """Profile 6.2: else FREE and BIND could wait for each other."""
    slow = peer.take_block(b"slow")
    for n in range(3):
        peer.bind_ticket(peer.handle(n), *peer.take_block())
    assert [peer.status(peer.free(peer.handle(n))) for n in range(3)] == [Status.SUCCESS] * 3
    waiting = peer.take_ticket()
    assert peer.slot(waiting) is None
    assert peer.status(peer.bind_ticket(peer.handle(3), *slow, 4)) is Status.SUCCESS
    block_offset = peer.slot(waiting)
    assert block_offset is not None
    assert peer.status(peer.bind_ticket(peer.handle(4), waiting, block_offset)) is Status.SUCCESS


def test_a_ticket_is_given_back_by_bind_to_a_spare_handle_and_free(peer: Any) -> None:
    """Profile 6.11."""
    taken = [peer.take_block() for _ in range(4)]
    for ticket, block_offset in taken:
        assert peer.status(peer.bind_ticket(peer.handle(), ticket, block_offset)) is Status.SUCCESS
        assert peer.status(peer.free(peer.handle())) is Status.SUCCESS
    assert [peer.take_block()[1] for _ in range(4)] == [block_offset for _, block_offset in taken]


def test_the_blocks_of_one_ring_never_reach_another(world: Any, peer: Any) -> None:
    other = world.connect(requested_quota=2)
    own = {peer.region("partition").base_to + n * BLOCK for n in range(4)}
    for _ in range(6):
        assert other.bind(other.handle(), b"x").block_offset not in own
        assert peer.bind(peer.handle(), b"y").block_offset in own
        other.free(other.handle())
        peer.free(peer.handle())


# --- Head is never trusted (profile 6.9, 8.10) ---

HOSTILE = [
    pytest.param(lambda head: head + 0x5_00000050, id="jump by N + 1"),
    pytest.param(lambda head: head + 0x4_00000000, id="one more than the blocks there are"),
    pytest.param(lambda head: head | 1 << 6, id="filler bit n+4"),
    pytest.param(lambda head: head | 1 << 31, id="filler bit 31"),
    pytest.param(lambda head: head ^ 0x10, id="Slot Offset of another slot"),
    pytest.param(lambda head: head ^ 0x1, id="Slot Offset inside a slot"),
    pytest.param(lambda head: head - 0x1_00000010, id="back"),
    pytest.param(lambda _head: 2**64 - 1, id="all ones"),
    pytest.param(lambda head: head ^ 1 << 63, id="half a turn of tickets"),
]


@pytest.mark.parametrize("spoil", HOSTILE)
@pytest.mark.parametrize("noticed_by", ["time", "BIND"])
def test_a_hostile_head_ends_its_stream_and_harms_nobody(
    new_world_of_any_store: Callable[..., Any], spoil: Callable[[int], int], noticed_by: str
) -> None:
    world = direct_world(new_world_of_any_store)
    other = world.connect()
    peer = connected(world, initiator_id=ALICE)
    peer.bind_ticket(peer.handle(), *peer.take_block(b"kept"), 4)
    ticket, block_offset = peer.take_block()
    world.advance(2.0)  # a look: Head has been here
    peer.set_head(spoil(peer.head()))
    if noticed_by == "BIND":
        request_id = peer.bind_ticket(peer.handle(1), ticket, block_offset)
        assert peer.status(request_id) is None
    else:
        world.advance(2.0)  # a quarter of the Ticket Timeout
    assert isinstance(peer.end_action, Terminate)
    assert peer.end_action.cause is TerminateCause.RDMAP_CATASTROPHIC_STREAM
    peer.end()
    assert other.bind(other.handle(), b"unharmed").status is Status.SUCCESS
    again = connected(world, initiator_id=ALICE)
    assert again.look(again.handle()) == b"kept"
    for n in range(1, 4):
        assert again.status(again.bind_ticket(again.handle(n), *again.take_block())) is Status.SUCCESS


def test_a_head_beyond_the_quota_gets_no_space_until_it_is_noticed(world: Any, peer: Any) -> None:
    """Draft 3.4: "it completes the request with NO_SPACE and MAY terminate the session"."""
    peer.set_head(peer.head() + 0x5_00000050)
    assert peer.status(peer.alloc_store(peer.handle(), b"x", flags=INLINE)) is Status.NO_SPACE
    world.advance(2.0)
    assert isinstance(peer.end_action, Terminate)
