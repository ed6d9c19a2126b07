"""Whose turn it is: the same handle, the read depth, and the time an RDMA Read may take. Profile 3 and 8.8."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from kbtp.target.actions import Abort
from kbtp.types import Status

ALLOW_UNSEALED = 16


def send(peer: Any, what: str, handle: int) -> int:
    requests: dict[str, Callable[[], int]] = {
        "LOAD": lambda: peer.load(handle, flags=ALLOW_UNSEALED),
        "STORE": lambda: peer.store(handle, b"stored"),
        "STORE inline": lambda: peer.store(handle, b"inline", flags=1),
        "ALLOC_STORE": lambda: peer.alloc_store(handle, b"allocated"),
        "ALLOC_STORE inline": lambda: peer.alloc_store(handle, b"allocated", flags=1),
        "FREE": lambda: peer.free(handle),
    }
    return requests[what]()


PENDING = {"LOAD": True, "STORE": True, "ALLOC_STORE": False}
"""What leaves an RDMA operation posted, and whether it wants its handle bound."""
AFTER = ["LOAD", "STORE", "STORE inline", "ALLOC_STORE", "ALLOC_STORE inline", "FREE"]
STATUS_AFTER = {
    ("ALLOC_STORE", "ALLOC_STORE"): Status.ALREADY_BOUND,
    ("ALLOC_STORE", "ALLOC_STORE inline"): Status.ALREADY_BOUND,
    ("STORE", "ALLOC_STORE"): Status.ALREADY_BOUND,
    ("STORE", "ALLOC_STORE inline"): Status.ALREADY_BOUND,
    ("LOAD", "ALLOC_STORE"): Status.ALREADY_BOUND,
    ("LOAD", "ALLOC_STORE inline"): Status.ALREADY_BOUND,
}


@pytest.mark.parametrize("later", AFTER)
@pytest.mark.parametrize("earlier", PENDING)
def test_two_requests_on_one_handle(world: Any, earlier: str, later: str) -> None:
    """Profile 3 "Same handle": mutating ones wait for all earlier ones, a LOAD for earlier mutating ones."""
    peer = world.connect()
    if PENDING[earlier]:
        peer.bind(peer.handle(), b"before", seal=False)
    one = send(peer, earlier, peer.handle())
    operation = peer.posted[0]
    two = send(peer, later, peer.handle())
    if (earlier, later) == ("LOAD", "LOAD"):
        assert len(peer.posted) == 2
    else:
        assert peer.posted == [operation]
        assert peer.status(two) is None
    peer.finish(operation)
    peer.finish_all()
    assert peer.status(one) is Status.SUCCESS
    assert peer.status(two) is STATUS_AFTER.get((earlier, later), Status.SUCCESS)


@pytest.mark.parametrize("later", AFTER)
@pytest.mark.parametrize("earlier", PENDING)
def test_two_requests_on_two_handles(world: Any, earlier: str, later: str) -> None:
    """Profile 3: otherwise completions come in any order."""
    peer = world.connect()
    if PENDING[earlier]:
        peer.bind(peer.handle(), b"before", seal=False)
    bound = not later.startswith("ALLOC")
    if bound:
        peer.bind(peer.handle(1), b"other", seal=False)
    send(peer, earlier, peer.handle())
    first = peer.posted[0]
    two = send(peer, later, peer.handle(1))
    for operation in peer.posted[1:]:
        peer.finish(operation)
    assert peer.status(two) is Status.SUCCESS
    assert peer.posted == [first]


def test_loads_of_one_handle_overlap_and_a_store_waits_for_them_all(world: Any) -> None:
    peer = world.connect()
    peer.bind(peer.handle(), b"old", seal=False)
    loads = [send(peer, "LOAD", peer.handle()) for _ in range(3)]
    store = send(peer, "STORE inline", peer.handle())
    later = send(peer, "LOAD", peer.handle())
    one, two, three = peer.posted
    for operation in (two, three, one):
        assert peer.status(store) is None
        peer.finish(operation)
    assert peer.status(store) is Status.SUCCESS
    peer.finish()
    assert [bytes(peer.buffers[operation.remote_stag][:3]) for operation in (one, two, three)] == [b"old"] * 3
    assert [peer.answers[request].data_length for request in (*loads, later)] == [3, 3, 3, 6]


def test_a_chain_on_one_handle_sees_each_step_done(world: Any) -> None:
    """A request's checks are made when its turn comes: what waits behind a FREE finds the handle unbound."""
    peer = world.connect()
    store = peer.alloc_store(peer.handle(), b"one")
    free = send(peer, "FREE", peer.handle())
    again = send(peer, "ALLOC_STORE inline", peer.handle())
    stale = peer.load(peer.handle(), generation=2, flags=ALLOW_UNSEALED)
    peer.finish()
    assert [peer.answers[request].status for request in (store, free, again, stale)] == [
        Status.SUCCESS,
        Status.SUCCESS,
        Status.SUCCESS,
        Status.GENERATION_MISMATCH,
    ]
    assert [peer.answers[request].generation for request in (store, free, again, stale)] == [2, 3, 4, 4]


def test_sessions_do_not_wait_for_each_other(world: Any) -> None:
    """Profile 3 "Same handle, same session": a LOAD by another sees the entry as it is."""
    owner, reader = world.connect(), world.connect()
    owner.bind(owner.handle(), b"old", seal=False)
    owner.store(owner.handle(), b"newer")
    assert reader.look(owner.handle()) == b"old"
    owner.finish()
    assert reader.look(owner.handle()) == b"newer"


def test_a_refused_request_leaves_no_turn_behind(world: Any) -> None:
    peer = world.connect()
    for what in ("LOAD", "STORE", "FREE"):
        assert peer.status(send(peer, what, peer.handle())) is Status.NOT_BOUND
    assert peer.session.outstanding == 0


# --- RDMA Reads ---


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_reads_beyond_the_depth_wait_in_the_target(new_world: Callable[..., Any], depth: int) -> None:
    """Profile 3 "RDMA Reads": not in the send queue, so that completions are not held up."""
    world = new_world(request_credits=8)
    peer = world.connect(read_depth=depth, requested_quota=4)
    peer.bind(peer.handle(7), b"to load")
    stores = [peer.alloc_store(peer.handle(n), bytes([n]) * 64) for n in range(3)]
    assert len(peer.reads) == depth
    load = peer.load(peer.handle(7))
    assert peer.status(load) is Status.SUCCESS
    peer.finish(peer.writes[0])
    for done in range(1, 4):
        peer.finish(peer.reads[0])
        assert len(peer.reads) == min(depth, 3 - done)
    assert [peer.status(request) for request in stores] == [Status.SUCCESS] * 3
    assert [peer.look(peer.handle(n)) for n in range(3)] == [bytes([n]) * 64 for n in range(3)]


def test_one_session_does_not_use_the_reads_of_another(world: Any) -> None:
    one, two = world.connect(read_depth=1), world.connect(read_depth=1)
    one.alloc_store(one.handle(), b"a")
    two.alloc_store(two.handle(), b"b")
    assert (len(one.reads), len(two.reads)) == (1, 1)


def test_a_read_that_is_not_answered_ends_the_stream(world: Any) -> None:
    """Profile 8.8."""
    peer = world.connect()
    peer.alloc_store(peer.handle(), b"never comes")
    assert world.target.next_deadline_s() == world.now_s + 5
    world.advance(4.9)
    assert peer.end_action is None
    world.advance(0.1)
    assert isinstance(peer.end_action, Abort)
    peer.end()
    assert world.store.free_blocks == 4


def test_a_later_read_does_not_give_the_first_more_time(world: Any) -> None:
    """Profile 8.8."""
    peer = world.connect(read_depth=2)
    peer.alloc_store(peer.handle(), b"never comes")
    world.advance(3)
    peer.alloc_store(peer.handle(1), b"nor does this")
    world.advance(2)
    assert isinstance(peer.end_action, Abort)


def test_the_next_read_has_its_own_time(world: Any) -> None:
    """Profile 8.8: Reads are answered in order; the time of one runs from when it is the oldest."""
    peer = world.connect(read_depth=2)
    requests = [peer.alloc_store(peer.handle(n), b"slow") for n in range(2)]
    world.advance(4)
    peer.finish()
    assert world.target.next_deadline_s() == world.now_s + 5
    world.advance(4)
    peer.finish()
    assert world.target.next_deadline_s() == float("inf")
    world.advance(100)
    assert [peer.status(request) for request in requests] == [Status.SUCCESS] * 2


def test_a_read_that_waited_has_its_own_time(world: Any) -> None:
    peer = world.connect(read_depth=1)
    for n in range(2):
        peer.alloc_store(peer.handle(n), b"slow")
    world.advance(4)
    peer.finish()
    assert world.target.next_deadline_s() == world.now_s + 5
    world.advance(5)
    assert isinstance(peer.end_action, Abort)


def test_loads_alone_have_no_deadline(world: Any) -> None:
    """Profile 6.1: only a FREE puts a reader under pressure."""
    peer = world.connect()
    peer.bind(peer.handle(), b"data")
    peer.load(peer.handle())
    world.advance(5000)
    assert peer.end_action is None
