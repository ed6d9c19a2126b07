"""A stream may end at any point: what was in progress is wholly done or not done, nothing is lost. Profile 3, 8.9."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest

from kbtp.target.actions import Abort, Disconnect
from kbtp.types import HelloAckFlag, Status

ALICE = bytes(range(1, 17))
ANONYMOUS = bytes(16)
BLOCK = 512
SEAL, INLINE, ALLOW_UNSEALED = 2, 1, 16
OLD, NEW = b"\xaa" * BLOCK, b"\x55" * BLOCK

Step = Callable[[Any, Any], object]
"""One thing that happens to a peer and another one beside it."""


def finish(peer: Any, _other: Any) -> None:
    peer.finish()


SEQUENCES: dict[str, list[Step]] = {
    "LOAD": [
        lambda peer, _: peer.bind(peer.handle(), OLD),
        lambda peer, _: peer.load(peer.handle()),
        lambda peer, _: peer.load(peer.handle()),
        finish,
        finish,
    ],
    "LOAD of another's block": [
        lambda _, other: other.bind(other.handle(), OLD),
        lambda peer, other: peer.load(other.handle()),
        lambda _, other: other.free(other.handle()),
        lambda _, other: other.alloc_store(other.handle(), NEW),
        finish,
        lambda _, other: other.finish_all(),
    ],
    "STORE": [
        lambda peer, _: peer.bind(peer.handle(), OLD, seal=False),
        lambda peer, _: peer.store(peer.handle(), NEW, flags=SEAL),
        lambda _, other: other.load(_.handle(), flags=ALLOW_UNSEALED),
        finish,
        lambda _, other: other.finish_all(),
    ],
    "ALLOC_STORE": [
        lambda peer, _: peer.alloc_store(peer.handle(), OLD),
        lambda peer, _: peer.alloc_store(peer.handle(1), NEW, flags=SEAL),
        finish,
        finish,
    ],
    "FREE while another loads": [
        lambda peer, _: peer.bind(peer.handle(), OLD),
        lambda peer, other: other.load(peer.handle()),
        lambda peer, other: other.load(peer.handle()),
        lambda peer, _: peer.free(peer.handle()),
        lambda peer, _: peer.alloc_store(peer.handle(), NEW, flags=INLINE),
        lambda _, other: other.finish(),
        lambda _, other: other.finish(),
    ],
    "a queue on one handle": [
        lambda peer, _: peer.alloc_store(peer.handle(), OLD),
        lambda peer, _: peer.load(peer.handle(), flags=ALLOW_UNSEALED),
        lambda peer, _: peer.store(peer.handle(), NEW),
        lambda peer, _: peer.free(peer.handle()),
        finish,
        finish,
        finish,
    ],
    "reads beyond the depth": [
        lambda peer, _: peer.alloc_store(peer.handle(), OLD),
        lambda peer, _: peer.bind(peer.handle(1), OLD, seal=False),
        lambda peer, _: peer.store(peer.handle(1), NEW),
        lambda peer, _: peer.store(peer.handle(1), OLD),
        finish,
        finish,
        finish,
    ],
}
POINTS = [(name, steps) for name, sequence in SEQUENCES.items() for steps in range(len(sequence) + 1)]


@pytest.mark.parametrize("other_first", [False, True])
@pytest.mark.parametrize("initiator_id", [ANONYMOUS, ALICE], ids=["anonymous", "named"])
@pytest.mark.parametrize(("name", "steps"), POINTS)
def test_everything_balances_wherever_a_stream_ends(
    new_world: Callable[..., Any], name: str, steps: int, initiator_id: bytes, other_first: bool
) -> None:
    """Profile 3 "End of a stream": free count, quotas, pins, ranges and staging memory."""
    world = new_world()
    peer, other = world.connect(read_depth=1, initiator_id=initiator_id), world.connect()
    for step in SEQUENCES[name][:steps]:
        step(peer, other)
    ending = [other, peer] if other_first else [peer, other]
    ending[0].end()
    ending[1].finish_all()
    assert ending[1].end_action is None
    assert ending[1].session.outstanding == 0, "no request of a live session waits for an ended one"
    ending[1].end()
    if initiator_id == ALICE:
        bound = world.store.bound_count(peer.session.identity.handles)
        assert world.store.free_blocks == 4 - bound
        assert world.store.quotas.usage(peer.session.identity) == bound
        again = world.connect(initiator_id=ALICE)
        assert (again.ack.flags, again.ack.bound_blocks) == (HelloAckFlag.RESUMED, bound)
        again.end()
    world.advance(world.config.linger_s)
    world.check_nothing_is_left()


@pytest.mark.parametrize(("name", "steps"), POINTS)
def test_a_second_hello_balances_too(new_world: Callable[..., Any], name: str, steps: int) -> None:
    """Profile 8.1: the stream that the target ends itself; what was posted before may still finish."""
    world = new_world(request_credits=5)
    peer, other = world.connect(read_depth=1), world.connect()
    for step in SEQUENCES[name][:steps]:
        step(peer, other)
    peer.hello()
    peer.finish_all()
    other.finish_all()
    world.end_all()
    world.advance(0)
    world.check_nothing_is_left()


@pytest.mark.parametrize(("name", "steps"), POINTS)
def test_drain_finishes_what_is_outstanding(new_world: Callable[..., Any], name: str, steps: int) -> None:
    """A target that goes: every request received has its completion, then the stream ends in order."""
    world = new_world()
    peer, other = world.connect(read_depth=1), world.connect()
    for step in SEQUENCES[name][:steps]:
        step(peer, other)
    peer.session.drain()
    world.perform()
    assert (peer.end_action is not None) == (peer.session.outstanding == 0)
    for _ in range(20):
        other.finish_all()
        peer.finish_all()
    assert isinstance(peer.end_action, Disconnect)
    assert not peer.unanswered
    world.end_all()
    world.advance(0)
    world.check_nothing_is_left()


def test_drain_before_hello_and_after_the_end(world: Any) -> None:
    silent, ended = world.open(), world.connect()
    ended.end()
    silent.session.drain()
    ended.session.drain()
    world.perform()
    assert isinstance(silent.end_action, Disconnect)
    assert ended.end_action is None


def test_drain_of_an_aborted_session_says_no_more(world: Any) -> None:
    peer = world.connect()
    peer.session.abort("a fault of ours")
    peer.session.abort("again")
    peer.session.drain()
    world.perform()
    assert peer.end_action is not None
    assert peer.end_action.why == "a fault of ours"


def test_a_read_that_is_not_answered_while_the_stream_ends_in_order(world: Any) -> None:
    """Profile 8.8 holds to the end of the stream."""
    peer = world.connect()
    peer.alloc_store(peer.handle(), OLD)
    peer.hello()
    assert isinstance(peer.end_action, Disconnect)
    assert world.target.next_deadline_s() == world.now_s + 5
    world.advance(5)
    assert isinstance(peer.end_action, Abort)
    assert "an RDMA Read was not answered" in peer.end_action.why
    assert world.target.next_deadline_s() == math.inf


def test_a_fault_at_a_deadline_ends_its_session_and_no_other(world: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    bad, late = world.connect(), world.open()
    with monkeypatch.context() as patched:
        patched.setattr(bad.session, "tick", lambda _: 1 / 0)
        world.advance(5)
    assert isinstance(bad.end_action, Abort)
    assert isinstance(bad.end_action.error, ZeroDivisionError)
    assert isinstance(late.end_action, Abort)
    assert "no HELLO" in late.end_action.why


def test_a_refused_hello_has_come_in_time(world: Any) -> None:
    world.connect(initiator_id=ALICE)
    peer = world.open()
    assert peer.hello(initiator_id=ALICE).status == Status.ACCESS_DENIED
    world.advance(5)
    assert isinstance(peer.end_action, Disconnect)


def test_nothing_starts_once_the_stream_is_being_flushed(world: Any) -> None:
    """Profile 3: after the first flushed completion nothing more is accepted; `end` resolves the rest."""
    peer = world.connect()
    peer.bind(peer.handle(), OLD, seal=False)
    peer.load(peer.handle(), flags=ALLOW_UNSEALED)
    peer.store(peer.handle(), NEW, flags=INLINE)
    peer.flush()
    world.perform()
    assert peer.end_action is None
    assert peer.entry(peer.handle()).data_length == BLOCK
    assert bytes(world.pool.view[:BLOCK]) == OLD
    peer.end()
    peer.session.abort("too late")
    assert not world.target.has_actions


def test_nothing_is_said_on_a_stream_that_is_being_flushed(world: Any) -> None:
    """A FREE whose pins go between the first flushed completion and the end takes effect; there is no one to tell."""
    peer, reader = world.connect(), world.connect()
    peer.bind(peer.handle(), OLD)
    reader.load(peer.handle())
    free = peer.free(peer.handle())
    peer.alloc_store(peer.handle(1), NEW)
    peer.flush()
    reader.finish()
    assert world.store.free_blocks == 3
    assert peer.status(free) is None
    peer.end()
    assert world.store.free_blocks == 4


def test_an_unknown_work_completion_is_nobodys(world: Any) -> None:
    peer = world.connect()
    peer.bind(peer.handle(), OLD)
    peer.load(peer.handle())
    operation = peer.posted[0]
    peer.finish()
    peer.posted.append(operation)
    peer.finish()
    assert peer.end_action is None


# --- what an identity owns, and for how long ---


def test_an_anonymous_initiators_blocks_are_freed_with_its_stream(world: Any) -> None:
    """Profile 3 "Identity"."""
    peer, reader = world.connect(), world.connect()
    peer.bind(peer.handle(), OLD)
    peer.bind(peer.handle(1), OLD)
    gone = [peer.handle(), peer.handle(1)]
    peer.end()
    assert world.store.free_blocks == 4
    assert [reader.status(reader.load(handle)) for handle in gone] == [Status.HANDLE_OUT_OF_RANGE] * 2
    assert [world.store.read(handle).generation for handle in gone] == [3, 3]


def test_generations_go_on_when_a_range_is_given_to_another(world: Any) -> None:
    """Profile 5: never reset within an incarnation, so a reference to the earlier owner's block is found out."""
    before = world.connect()
    before.bind(before.handle(), OLD)
    before.end()
    after, reader = world.connect(), world.connect()
    assert after.handle() == before.handle()
    assert after.bind(after.handle(), NEW).generation == 4
    assert reader.status(reader.load(after.handle(), generation=2)) is Status.GENERATION_MISMATCH


def test_others_may_load_from_a_lingering_identity(world: Any) -> None:
    """Profile 3: it owns its bound blocks beyond the stream."""
    peer, reader = world.connect(initiator_id=ALICE), world.connect()
    peer.bind(peer.handle(), OLD)
    peer.end()
    assert world.target.next_deadline_s() == world.now_s + 60
    world.advance(59.9)
    assert reader.look(peer.handle()) == OLD
    world.advance(0.1)
    assert reader.status(reader.load(peer.handle())) is Status.HANDLE_OUT_OF_RANGE


def test_a_resumed_identity_does_not_expire(world: Any) -> None:
    """Profile 3: and its next linger time counts from its next end."""
    world.connect(initiator_id=ALICE).end()
    world.advance(59)
    again = world.connect(initiator_id=ALICE)
    again.bind(again.handle(), OLD)
    world.advance(1000)
    assert again.look(again.handle()) == OLD
    again.end()
    world.advance(59)
    assert world.store.free_blocks == 3
    world.advance(1)
    assert world.store.free_blocks == 4


def test_an_expired_identity_is_a_new_one(world: Any) -> None:
    before = world.connect(initiator_id=ALICE)
    before.bind(before.handle(), OLD)
    before.end()
    world.advance(60)
    assert (world.connect(initiator_id=ALICE).ack.flags, world.store.free_blocks) == (HelloAckFlag.NONE, 4)


def test_linger_0(new_world: Callable[..., Any]) -> None:
    """Profile 3: everything goes with the stream."""
    world = new_world(linger_s=0.0)
    peer = world.connect(initiator_id=ALICE)
    peer.bind(peer.handle(), OLD)
    peer.end()
    world.check_nothing_is_left()


def test_linger_for_ever(new_world: Callable[..., Any]) -> None:
    """Profile 3."""
    world = new_world(linger_s=math.inf)
    peer = world.connect(initiator_id=ALICE)
    peer.bind(peer.handle(), OLD)
    peer.end()
    assert world.target.next_deadline_s() == math.inf
    world.advance(1e9)
    again = world.connect(initiator_id=ALICE)
    assert again.look(again.handle()) == OLD


def test_expiry_while_another_loads(world: Any) -> None:
    """Profile 3 and 6.1: the entry is gone at once; range, quota and block when the LOAD has left the block."""
    peer, reader = world.connect(initiator_id=ALICE, requested_quota=3), world.connect()
    peer.bind(peer.handle(), OLD)
    peer.bind(peer.handle(1), OLD)
    peer.end()
    reader.load(peer.handle())
    world.advance(60)
    assert not world.store.read(peer.handle()).valid
    assert world.store.free_blocks == 3
    assert reader.status(reader.load(peer.handle())) is Status.NOT_BOUND
    same_name = world.connect(initiator_id=ALICE)
    assert (same_name.ack.flags, same_name.ack.allocation_quota) == (HelloAckFlag.NONE, 0)
    assert same_name.handle() != peer.handle()
    reader.finish()
    assert world.store.free_blocks == 4
    assert reader.buffers[0x101] == OLD
    assert world.store.quotas.left == 3


def test_a_pending_free_whose_session_has_ended(world: Any) -> None:
    """Profile 6.1: it takes effect, nobody hears of it, and a resumed owner may use the handle meanwhile."""
    peer, reader = world.connect(initiator_id=ALICE), world.connect()
    peer.bind(peer.handle(), OLD)
    reader.load(peer.handle())
    peer.free(peer.handle())
    peer.end()
    again = world.connect(initiator_id=ALICE)
    assert again.ack.bound_blocks == 0
    assert again.bind(again.handle(), NEW).generation == 4
    assert again.status(again.alloc_store(again.handle(1), NEW, flags=INLINE)) is Status.NO_SPACE
    reader.finish()
    assert reader.buffers[0x101] == OLD
    again.bind(again.handle(1), NEW)
    assert again.look(again.handle()) == NEW


def test_a_pending_free_of_an_expired_identity(world: Any) -> None:
    """Both that FREE and the blocks freed at expiry give back what they held."""
    peer, reader = world.connect(initiator_id=ALICE), world.connect()
    peer.bind(peer.handle(), OLD)
    peer.bind(peer.handle(1), OLD)
    reader.load(peer.handle())
    peer.free(peer.handle())
    peer.end()
    reader.load(peer.handle(1))
    world.advance(4)
    assert reader.end_action is None
    reader.finish_all()
    world.advance(60)
    assert world.store.free_blocks == 4
    assert world.store.quotas.left == 2


def test_the_end_of_a_reader_completes_frees_of_others(world: Any) -> None:
    """Profile 3: first placement is impossible, then requests are resolved, only then blocks are freed."""
    one, two, reader = world.connect(requested_quota=1), world.connect(requested_quota=1), world.connect()
    one.bind(one.handle(), OLD)
    two.bind(two.handle(), OLD)
    frees = []
    for owner in (one, two):
        reader.load(owner.handle())
        frees.append(owner.free(owner.handle()))
    reader.end()
    assert [one.status(frees[0]), two.status(frees[1])] == [Status.SUCCESS] * 2


def test_a_session_without_hello_leaves_nothing(world: Any) -> None:
    peer = world.open()
    peer.end()
    assert peer.session.identity is None
    assert not world.target.sessions
