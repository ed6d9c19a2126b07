"""With keys a new session of an identity takes the place of a live one: profile 3 "Identity", "End of a stream".

What "everything of it is resolved, only then HELLO is answered" means is shown by what the new session finds.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from kbtp.keys import Key, Keys
from kbtp.target.actions import Abort, Disconnect
from kbtp.types import HelloAckFlag, Status
from kbtp.wire import Nonces, check_hello_ack

ALICE, BOB = bytes(range(1, 17)), bytes(range(17, 33))
A, B = Key(1, bytes(range(32)), "a"), Key(2, bytes(range(1, 33)), "b")
NONCES = Nonces(initiator=b"i" * 16, target=b"t" * 16)
SEAL = 2
BLOCK = 512
OLD, NEW = b"\xaa" * BLOCK, b"\x55" * BLOCK


@pytest.fixture
def world(new_world_of_any_store: Callable[..., Any]) -> Iterator[Any]:
    """One with two trust domains that must come out even."""
    it = new_world_of_any_store(keys=Keys((A, B)))
    yield it
    it.end_all()
    it.advance(it.config.linger_s)
    it.check_nothing_is_left()


def claim(world: Any, **fields: Any) -> Any:
    """A new stream on which Alice says HELLO again."""
    peer = world.open()
    peer.say_hello(**{"key": A, "initiator_id": ALICE, **fields})
    return peer


def check_replaced(peer: Any) -> None:
    """Its stream is ended at once: it might not be listening."""
    assert isinstance(peer.end_action, Abort)
    assert "replaced by a new session" in peer.end_action.why


def test_hello_is_answered_when_the_old_stream_has_ended(world: Any) -> None:
    old = world.connect(key=A, initiator_id=ALICE, requested_quota=2, requested_handles=5)
    old.bind(old.handle(), OLD)
    new = world.open()
    said = new.say_hello(key=A, initiator_id=ALICE, requested_quota=1)
    check_replaced(old)
    assert new.acks == []
    assert new.memory.given  # all that could fail has been done
    old.end()
    assert (new.ack.status, new.ack.flags) == (Status.SUCCESS, HelloAckFlag.RESUMED)
    assert (new.ack.first_handle, new.ack.handle_count) == (old.ack.first_handle, 5)
    assert (new.ack.allocation_quota, new.ack.bound_blocks) == (2, 1)
    check_hello_ack(new.ack_octets, new.ack.auth, A, NONCES, said)
    assert new.look(new.handle()) == OLD


def test_a_load_that_is_on_its_way(world: Any) -> None:
    old = world.connect(key=A, initiator_id=ALICE)
    old.bind(old.handle(), OLD)
    old.load(old.handle())
    new = claim(world)
    assert len(old.writes) == 1
    old.end()
    answer = new.answers[new.free(new.handle())]
    assert answer.status is Status.SUCCESS  # no pin is left


@pytest.mark.parametrize("sealed", [0, SEAL])
def test_a_store_that_is_being_read(world: Any, sealed: int) -> None:
    """Profile 6.5: it changes nothing, as none of it has been copied."""
    old = world.connect(key=A, initiator_id=ALICE)
    old.bind(old.handle(), OLD, seal=False)
    old.store(old.handle(), NEW, flags=sealed)
    new = claim(world)
    assert len(old.reads) == 1
    old.end()
    assert not new.entry(new.handle()).sealed
    assert new.look(new.handle()) == OLD
    assert new.answers[new.store(new.handle(), NEW[:9], flags=1)].status is Status.SUCCESS


def test_an_alloc_store_that_is_being_read(world: Any) -> None:
    """Profile 6.5: the handle is unbound, block and quota are back."""
    old = world.connect(key=A, initiator_id=ALICE, requested_quota=1)
    old.alloc_store(old.handle(), OLD)
    new = claim(world)
    assert world.store.free_blocks == 3
    old.end()
    assert new.ack.bound_blocks == 0
    assert world.store.free_blocks == 4
    assert new.bind(new.handle(), NEW).generation == 2


def test_a_free_that_waits_for_somebody_elses_load(world: Any) -> None:
    """Wholly done as far as anybody can see; the block follows when the LOAD has left it."""
    old = world.connect(key=A, initiator_id=ALICE)
    old.bind(old.handle(), OLD)
    reader = world.connect(key=A)
    request = reader.load(old.handle())
    old.free(old.handle())
    new = claim(world)
    old.end()
    assert new.ack.bound_blocks == 0
    assert new.status(new.load(new.handle())) is Status.NOT_BOUND
    assert reader.loaded(request, old.handle()) == OLD
    assert world.store.free_blocks == 4


def test_requests_that_wait_for_their_turn_are_not_done(world: Any) -> None:
    old = world.connect(key=A, initiator_id=ALICE)
    old.bind(old.handle(), OLD)
    old.load(old.handle())
    old.free(old.handle())
    old.alloc_store(old.handle(), NEW)
    new = claim(world)
    old.end()
    assert new.look(new.handle()) == OLD
    assert len(old.answers) == 2


def test_what_the_old_stream_still_brings_is_not_done(world: Any) -> None:
    """From the moment that it is replaced, also what was received before."""
    old = world.connect(key=A, initiator_id=ALICE)
    old.bind(old.handle(), OLD)
    new = claim(world)
    request = old.free(old.handle())
    assert old.status(request) is None
    old.end()
    assert new.look(new.handle()) == OLD


def test_a_target_that_does_not_let_identities_linger_hands_them_on_too(new_world: Callable[..., Any]) -> None:
    """It has not left: its new session is here before the old one's end."""
    world = new_world(keys=Keys((A, B)), linger_s=0.0)
    old = world.connect(key=A, initiator_id=ALICE)
    old.bind(old.handle(), OLD)
    new = claim(world)
    old.end()
    assert (new.ack.flags, new.ack.bound_blocks) == (HelloAckFlag.RESUMED, 1)
    new.end()
    world.check_nothing_is_left()


@pytest.mark.parametrize(
    ("fields", "status"),
    [
        ({"key": Key(1, B.secret)}, Status.ACCESS_DENIED),
        ({"key": None}, Status.ACCESS_DENIED),
        ({"key": B}, Status.SUCCESS),
        ({"initiator_id": BOB}, Status.SUCCESS),
        ({"initiator_id": bytes(16)}, Status.SUCCESS),
        ({"namespace": b"a"}, Status.SUCCESS),
    ],
    ids=["wrong key", "no key", "another domain", "another ID", "anonymous", "namespace for nobody"],
)
def test_who_does_not_replace_it(world: Any, fields: dict[str, Any], status: Status) -> None:
    """Profile 3: after every HELLO check has passed, and the pair of domain and ID alone. The last one is the pair."""
    old = world.connect(key=A, initiator_id=ALICE)
    new = claim(world, **fields)
    if "namespace" in fields:
        check_replaced(old)
        return
    assert old.end_action is None
    assert new.ack.status == status
    assert old.bind(old.handle(), OLD).status is Status.SUCCESS


def test_one_that_names_another_namespace_does_not_replace_it(new_world: Callable[..., Any]) -> None:
    world = new_world(keys=Keys((A,)), namespace=b"llama")
    old = world.connect(key=A, initiator_id=ALICE, namespace=b"llama")
    new = claim(world, namespace=b"mistral")
    assert new.ack.status == Status.ACCESS_DENIED
    assert old.end_action is None


def test_one_that_gets_no_memory_does_not_replace_it(world: Any) -> None:
    old = world.connect(key=A, initiator_id=ALICE)
    new = world.open()
    new.memory.exhausted = True
    new.hello(key=A, initiator_id=ALICE)
    assert new.ack.status == Status.TARGET_ERROR
    assert old.end_action is None


def test_of_several_the_last_one_has_it(world: Any) -> None:
    """Each replaces the one before, also one that is not answered yet."""
    old = world.connect(key=A, initiator_id=ALICE)
    second, third = claim(world), claim(world)
    check_replaced(old)
    check_replaced(second)
    second.end()
    assert (second.acks, third.acks) == ([], [])
    old.end()
    assert third.ack.flags == HelloAckFlag.RESUMED
    fourth = claim(world)
    check_replaced(third)
    third.end()
    assert fourth.ack.flags == HelloAckFlag.RESUMED


def test_a_waiting_one_that_ends_leaves_nothing_behind(world: Any) -> None:
    old = world.connect(key=A, initiator_id=ALICE)
    old.bind(old.handle(), OLD)
    gone = claim(world)
    gone.end()
    old.end()
    assert gone.acks == []
    back = world.connect(key=A, initiator_id=ALICE)
    assert (back.ack.flags, back.ack.bound_blocks) == (HelloAckFlag.RESUMED, 1)


def test_the_next_one_after_a_waiting_one_that_has_ended(world: Any) -> None:
    old = world.connect(key=A, initiator_id=ALICE)
    gone = claim(world)
    gone.end()
    new = claim(world)
    old.end()
    assert gone.acks == []
    assert new.ack.flags == HelloAckFlag.RESUMED


def test_a_waiting_one_that_the_target_ends_does_not_get_it(world: Any) -> None:
    """The target stops while the old stream is ending."""
    old = world.connect(key=A, initiator_id=ALICE)
    gone = claim(world)
    gone.session.drain()
    world.perform()
    old.end()
    assert gone.acks == []
    assert world.target.identities.live("a", ALICE) is None


def test_the_time_for_hello_is_over_when_it_has_come(world: Any) -> None:
    """Profile 3: 5 s for HELLO. That the old stream takes longer to end is not the new one's fault."""
    old = world.connect(key=A, initiator_id=ALICE)
    new = claim(world)
    world.advance(60)
    assert new.end_action is None
    assert world.target.next_deadline_s() == float("inf")
    old.end()
    assert new.ack.status == Status.SUCCESS


def test_one_that_is_ending_in_order_is_not_waited_for(world: Any) -> None:
    """It would take as long as its peer likes."""
    old = world.connect(key=A, initiator_id=ALICE)
    old.hello(key=A)
    assert isinstance(old.end_action, Disconnect)
    new = claim(world)
    check_replaced(old)
    old.end()
    assert new.ack.status == Status.SUCCESS


def test_a_fault_in_the_new_session_ends_that_one(world: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is found while the old one is ended, which is none of its fault."""
    old = world.connect(key=A, initiator_id=ALICE)
    old.bind(old.handle(), OLD)
    new = claim(world)
    with monkeypatch.context() as patched:
        patched.setattr("kbtp.target.session.Sequences", lambda *_, **__: 1 / 0)
        old.end()
    assert isinstance(new.end_action, Abort)
    assert isinstance(new.end_action.error, ZeroDivisionError)
    assert new.acks == []
    new.end()
    back = world.connect(key=A, initiator_id=ALICE)
    assert back.ack.flags == HelloAckFlag.RESUMED
    assert back.look(back.handle()) == OLD


def test_without_keys_nobody_is_replaced(new_world: Callable[..., Any]) -> None:
    world = new_world()
    old = world.connect(initiator_id=ALICE)
    new = world.open()
    assert new.hello(initiator_id=ALICE).status == Status.ACCESS_DENIED
    assert old.end_action is None
