"""Who may open a session with a target that has keys, and what one trust domain learns of another: profile 3, 4."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from kbtp.errors import ApiMisuse
from kbtp.keys import Key, Keys
from kbtp.target.actions import Abort, Disconnect
from kbtp.target.hello import Trust
from kbtp.types import Feature, HelloAckFlag, RequestFlag, Status
from kbtp.wire import Auth, Hello, Nonces, check_hello_ack, sign_hello

ALICE = bytes(range(1, 17))
A, B = Key(1, bytes(range(32)), "a"), Key(2, bytes(range(1, 33)), "b")
A_TOO = Key(3, bytes(range(2, 34)), "a")
KEYS = Keys((A, B, A_TOO))
NONCES = Nonces(initiator=b"i" * 16, target=b"t" * 16)
ELSEWHERE = Nonces(initiator=b"I" * 16, target=b"t" * 16)
LATER = Nonces(initiator=b"i" * 16, target=b"T" * 16)
ALLOW_UNSEALED, INLINE = RequestFlag.ALLOW_UNSEALED, RequestFlag.INLINE

NewWorld = Callable[..., Any]


def check_denied(peer: Any) -> None:
    """ACCESS_DENIED, a body of zeros without AUTH, and the stream ends; no memory was given for it."""
    assert (peer.ack.status, peer.ack.auth) == (Status.ACCESS_DENIED, None)
    assert peer.ack_octets[24:] == bytes(152 - 24)
    assert isinstance(peer.end_action, Disconnect)
    assert not peer.memory.given


def hello(**changes: Any) -> Hello:
    fields = {"request_id": 7, "requested_quota": 0, "requested_handles": 0, "completion_credits": 8}
    return Hello(requested_features=Feature.NONE, max_message=1024, **{**fields, **changes})


def signed(key: Key = A, nonces: Nonces = NONCES, **changes: Any) -> bytes:
    return sign_hello(hello(**changes), key, nonces)


# --- who is let in ---


@pytest.mark.parametrize("key", [A, B, A_TOO], ids=lambda key: key.name)
def test_the_holder_of_a_key_is_let_in_and_gets_proof(new_world: NewWorld, key: Key) -> None:
    world = new_world(keys=KEYS, name="cache", namespace=b"llama")
    peer = world.open()
    said = peer.say_hello(key=key, namespace=b"llama", name="prefill")
    assert peer.ack.status == Status.SUCCESS
    assert peer.ack.auth.key_id == key.key_id
    check_hello_ack(peer.ack_octets, peer.ack.auth, key, NONCES, said)
    assert (peer.session.identity.domain, peer.session.key) == (key.domain, key)


def wrong_macs() -> dict[str, bytes]:
    right = signed()
    return {
        "first bit": right[:-32] + bytes([right[-32] ^ 0x80]) + right[-31:],
        "last bit": right[:-1] + bytes([right[-1] ^ 1]),
        "all zero": right[:-32] + bytes(32),
        "of another quota": signed(requested_quota=1)[:-32] + right[-32:],
        "of another Initiator ID": signed(initiator_id=ALICE)[:-32] + right[-32:],
        "another key's ID": right[:-36] + B.key_id.to_bytes(4, "big") + right[-32:],
        "an unknown key's ID": right[:-36] + bytes(4) + right[-32:],
        "made with another secret": signed(Key(A.key_id, B.secret)),
        "recorded on another connection": signed(nonces=ELSEWHERE),
        "recorded before": signed(nonces=LATER),
    }


@pytest.mark.parametrize("octets", wrong_macs().values(), ids=wrong_macs())
def test_a_mac_that_is_not_right(new_world: NewWorld, octets: bytes) -> None:
    """An unknown Key ID and a wrong MAC look the same."""
    peer = new_world(keys=KEYS).open()
    peer.send(octets)
    check_denied(peer)


def test_the_right_one_beside_them(new_world: NewWorld) -> None:
    peer = new_world(keys=KEYS).open()
    peer.send(signed())
    assert peer.ack.status == Status.SUCCESS


def test_a_hello_without_auth_to_a_target_with_keys(new_world: NewWorld) -> None:
    peer = new_world(keys=KEYS).open()
    peer.hello()
    check_denied(peer)


def test_a_hello_with_auth_to_a_target_without_keys(world: Any) -> None:
    peer = world.open()
    peer.hello(key=A)
    check_denied(peer)


def test_a_key_does_not_stand_in_for_the_namespace(new_world: NewWorld) -> None:
    peer = new_world(keys=KEYS, namespace=b"llama").open()
    peer.hello(key=A, namespace=b"mistral")
    check_denied(peer)


@pytest.mark.parametrize("cut", [1, 31, 32, 33, 36, 37, 39])
def test_an_auth_that_is_cut_is_malformed(new_world: NewWorld, cut: int) -> None:
    """Profile 8.1: the framing of options comes before what they say."""
    peer = new_world(keys=KEYS).open()
    peer.send(signed()[:-cut])
    assert peer.ack.status == Status.MALFORMED


def test_an_auth_that_is_not_last_is_malformed(new_world: NewWorld) -> None:
    peer = new_world(keys=KEYS).open()
    peer.send(signed() + bytes.fromhex("8000 0000"))
    assert peer.ack.status == Status.MALFORMED


def test_an_unknown_option_is_found_before_the_mac_is_looked_at(new_world: NewWorld) -> None:
    """Profile 8.1."""
    octets = signed()
    peer = new_world(keys=KEYS).open()
    peer.send(octets[:-40] + bytes.fromhex("7fff 0000") + octets[-40:])
    assert peer.ack.status == Status.UNSUPPORTED


def test_a_refusal_after_authentication_has_no_auth(new_world: NewWorld) -> None:
    """Profile 2: all octets from 24 on are zero."""
    world = new_world(keys=KEYS)
    world.connect(key=A, requested_quota=4)
    peer = world.open()
    peer.hello(key=B, requested_quota=1)
    assert (peer.ack.status, peer.ack_octets[24:]) == (Status.NO_SPACE, bytes(152 - 24))


def test_the_same_octets_open_one_stream_alone(new_world: NewWorld) -> None:
    """A HELLO seen on the wire and sent again on another stream, whose nonces differ."""
    world = new_world(keys=KEYS)
    seen = world.connect(key=A)
    octets = signed()
    again = world.open(nonces=LATER)
    again.send(octets)
    check_denied(again)
    assert seen.end_action is None


# --- identity is (trust domain, Initiator ID) ---


def test_the_same_initiator_id_in_another_domain_is_somebody_else(new_world: NewWorld) -> None:
    world = new_world(keys=KEYS)
    one = world.connect(key=A, initiator_id=ALICE, requested_quota=1)
    one.bind(one.handle(), b"of a")
    other = world.connect(key=B, initiator_id=ALICE, requested_quota=1)
    assert (other.ack.flags, other.ack.bound_blocks) == (HelloAckFlag.NONE, 0)
    assert one.end_action is None
    one.end()
    other.end()
    back = world.connect(key=B, initiator_id=ALICE)
    assert (back.ack.flags, back.ack.bound_blocks) == (HelloAckFlag.RESUMED, 0)
    assert back.ack.first_handle == other.ack.first_handle
    assert world.connect(key=A, initiator_id=ALICE).ack.bound_blocks == 1


def test_another_key_of_the_domain_is_the_same_identity(new_world: NewWorld) -> None:
    """So a key can be changed for a new one: blocks and range stay."""
    world = new_world(keys=KEYS)
    before = world.connect(key=A, initiator_id=ALICE)
    before.bind(before.handle(), b"stays")
    before.end()
    after = world.connect(key=A_TOO, initiator_id=ALICE)
    assert (after.ack.flags, after.ack.bound_blocks) == (HelloAckFlag.RESUMED, 1)
    assert after.look(after.handle()) == b"stays"


# --- domains learn nothing of each other ---


STATES = ["unbound", "empty", "short", "full", "unsealed", "being stored", "being freed", "freed", "lingering"]


def put(owner: Any, state: str) -> None:
    """The handle of `owner` in this state."""
    handle = owner.handle()
    if state == "being stored":
        owner.alloc_store(handle, b"x" * 512)
    elif state != "unbound":
        data = {"empty": b"", "full": b"f" * 512}.get(state, b"short")
        owner.bind(handle, data, seal=state != "unsealed")
    if state == "being freed":
        owner.load(handle)
    if state in ("being freed", "freed"):
        owner.free(handle)
    if state == "lingering":
        owner.end()


@pytest.mark.parametrize("flags", [0, ALLOW_UNSEALED])
@pytest.mark.parametrize("length", [0, 512])
def test_whatever_a_foreign_block_is_the_answer_is_the_same(
    new_world_of_any_store: NewWorld, flags: int, length: int
) -> None:
    """Profile 1 HANDLE_OUT_OF_RANGE: octet for octet what a handle gets that nobody has, and nothing is posted."""
    answers = []
    for state in STATES:
        for generation in (0, 1, 2, 3):
            world = new_world_of_any_store(keys=KEYS)
            owner = world.connect(key=B, initiator_id=ALICE)
            put(owner, state)
            peer = world.connect(key=A)
            peer.next_request_id = 0
            request = peer.load(owner.handle(), length, generation=generation, flags=flags)
            assert not peer.posted
            answers.append(replace(peer.answers[request].completion, handle=0))
            nobodys = peer.load((peer.handle() + peer.ack.handle_count) % (1 << 64), length, generation=generation)
            answers.append(replace(peer.answers[nobodys].completion, handle=0, request_id=request))
    assert set(answers) == {answers[0]}
    assert Status(answers[0].status) is Status.HANDLE_OUT_OF_RANGE
    assert (answers[0].generation, answers[0].data_length, answers[0].block_offset) == (0, 0, 0)


@pytest.mark.parametrize("state", STATES)
def test_foreign_blocks_cannot_be_changed(new_world_of_any_store: NewWorld, state: str) -> None:
    world = new_world_of_any_store(keys=KEYS)
    owner = world.connect(key=B, initiator_id=ALICE)
    put(owner, state)
    before = world.table()
    peer = world.connect(key=A)
    for request in (
        peer.store(owner.handle(), b"x", flags=INLINE),
        peer.alloc_store(owner.handle(), b"x", flags=INLINE),
        peer.free(owner.handle()),
    ):
        completion = peer.answers[request].completion
        assert (Status(completion.status), completion.generation) == (Status.HANDLE_OUT_OF_RANGE, 0)
    assert world.table() == before


def test_those_of_one_domain_load_each_others_blocks(new_world_of_any_store: NewWorld) -> None:
    """Profile 3 "Handle ranges": every initiator may LOAD any handle of its trust domain."""
    world = new_world_of_any_store(keys=KEYS)
    owner, reader = world.connect(key=A), world.connect(key=A_TOO)
    owner.bind(owner.handle(), b"for the domain")
    assert reader.look(owner.handle()) == b"for the domain"


@pytest.mark.parametrize("way", ["FREE", "aborted ALLOC_STORE", "end of linger", "end of an anonymous stream"])
def test_a_block_is_cleared_before_another_domain_can_have_it(new_world_of_any_store: NewWorld, way: str) -> None:
    """Profile 3: before it returns to the ring, whatever way it takes there."""
    world = new_world_of_any_store(keys=KEYS)
    peer = world.connect(key=A, initiator_id=ALICE if way == "end of linger" else bytes(16))
    if way == "aborted ALLOC_STORE":
        peer.alloc_store(peer.handle(), b"secret" * 80)  # half of it has been placed
    else:
        peer.bind(peer.handle(), b"secret" * 80)
    assert b"secret" in bytes(world.pool.view)
    if way == "FREE":
        peer.free(peer.handle())
    peer.end()
    world.advance(world.config.linger_s)
    assert bytes(world.pool.view) == bytes(len(world.pool.view))


def test_blocks_of_one_domain_need_not_be_cleared(new_world_of_any_store: NewWorld) -> None:
    world = new_world_of_any_store(keys=Keys((A, A_TOO)))
    peer = world.connect(key=A)
    peer.bind(peer.handle(), b"secret")
    peer.free(peer.handle())
    assert b"secret" in bytes(world.pool.view)


# --- what a key allows ---


@pytest.mark.parametrize("direct", [Feature.NONE, Feature.DIRECT_LOAD, Feature.DIRECT_ALLOC])
def test_direct_modes_are_the_keys_to_allow(direct: Feature) -> None:
    """Without keys what the target offers is for everybody."""
    assert Trust("a", replace(A, direct=direct)).direct == direct
    assert Trust("default", None).direct == Feature.DIRECT_LOAD | Feature.DIRECT_ALLOC


# --- other keys ---


def test_new_keys_are_known_and_old_ones_are_not(new_world: NewWorld) -> None:
    world = new_world(keys=Keys((A, B)))
    stays, goes = world.connect(key=A), world.connect(key=B)
    world.target.replace_keys(Keys((A, A_TOO)))
    world.perform()
    assert stays.end_action is None
    assert isinstance(goes.end_action, Abort)
    assert "key is not valid any more" in goes.end_action.why
    assert world.open().hello(key=A_TOO).status == Status.SUCCESS
    assert world.open().hello(key=B).status == Status.ACCESS_DENIED


def test_a_key_that_is_gone_ends_a_session_that_is_ending_in_order(new_world: NewWorld) -> None:
    """It may be sending for as long as its peer reads."""
    world = new_world(keys=Keys((A, B)))
    goes = world.connect(key=B)
    goes.hello(key=B)
    assert isinstance(goes.end_action, Disconnect)
    world.target.replace_keys(Keys((A, A_TOO)))
    world.perform()
    assert isinstance(goes.end_action, Abort)


@pytest.mark.parametrize("change", [{"secret": bytes(32)}, {"domain": "b"}, {"direct": Feature.DIRECT_LOAD}])
def test_a_key_that_is_another_one_under_the_same_id_is_gone(new_world: NewWorld, change: dict[str, Any]) -> None:
    world = new_world(keys=KEYS)
    peer = world.connect(key=A)
    world.target.replace_keys(Keys((replace(A, **change), B)))
    world.perform()
    assert isinstance(peer.end_action, Abort)


@pytest.mark.parametrize(
    ("keys", "later"),
    [
        (Keys((A,)), Keys((A, B))),
        (Keys((A,)), Keys((B,))),
        (Keys((A, B)), Keys()),
        (Keys(), Keys((A,))),
    ],
)
def test_keys_that_the_target_was_not_started_for(new_world: NewWorld, keys: Keys, later: Keys) -> None:
    """One domain more: blocks were not cleared so far. None at all: everybody would be let in."""
    world = new_world(keys=keys)
    peer = world.connect(key=next(iter(keys), None))
    with pytest.raises(ApiMisuse, match="start it anew"):
        world.target.replace_keys(later)
    assert world.target.keys == keys
    assert peer.end_action is None


def test_an_auth_of_zeros_for_a_zero_key_id_is_no_way_in(new_world: NewWorld) -> None:
    peer = new_world(keys=KEYS).open()
    peer.hello(auth=Auth(0, bytes(32)))
    check_denied(peer)
