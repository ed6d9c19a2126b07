"""What a completion says, which STag it invalidates, and what releases a credit: profile 2, 3 "Credits", 8.6, 8.7."""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import Any

import pytest

from kbtp.limits import COMPLETIONS_POSTED_PER_CREDIT
from kbtp.target.actions import Disconnect
from kbtp.types import Status
from kbtp.verbs.api import RdmaWrite, Recv, Send

BLOCK = 512


def test_load_store_and_alloc_store_say_what_the_entry_is(world: Any) -> None:
    """Profile 8.6, draft 6.1 step 3 and 6.3 step 5: Data Length, Block Offset and Generation of the entry."""
    peer = world.connect()
    bound = peer.bind(peer.handle(), b"first", seal=False)
    assert (bound.generation, bound.data_length) == (2, 5)
    assert world.store.pool.contains(bound.block_offset)

    requests = [
        peer.store(peer.handle(), b"longer than that"),
        peer.load(peer.handle(), flags=world.ALLOW_UNSEALED),
    ]
    peer.finish()
    for answer in (peer.answers[request] for request in requests):
        assert (answer.generation, answer.data_length, answer.block_offset) == (2, 16, bound.block_offset)


def test_free_carries_zeros_and_the_generation_after_the_increment(world: Any) -> None:
    """Profile 8.6, draft 6.4 step 2."""
    peer = world.connect()
    peer.bind(peer.handle(), b"gone soon")
    freed = peer.answers[peer.free(peer.handle())]
    assert (freed.status, freed.generation, freed.data_length, freed.block_offset) == (Status.SUCCESS, 3, 0, 0)
    assert peer.bind(peer.handle(), b"again").generation == 4


def test_generation_65535_is_followed_by_1(world: Any) -> None:
    """Draft 3.2 and 6.4, profile 5: zero is skipped."""
    peer = world.connect()
    for _ in range(0xFFFF // 2 - 1):  # many lives, without the messages
        world.store.table.bind(peer.handle(), world.config.pool_base, 0, False)
        world.store.table.unbind(peer.handle())
    bound = peer.bind(peer.handle(), b"")
    assert bound.generation == 0xFFFE
    assert peer.answers[peer.free(peer.handle(), generation=0xFFFE)].generation == 0xFFFF
    assert peer.bind(peer.handle(), b"").generation == 1


def test_a_load_of_less_than_the_block_holds_says_how_much_it_takes(world: Any) -> None:
    """Profile 2: LENGTH_ERROR of a LOAD carries the Data Length, and no Block Offset."""
    peer = world.connect()
    peer.bind(peer.handle(), bytes(300))
    answer = peer.answers[peer.load(peer.handle(), 299)]
    assert (answer.status, answer.data_length, answer.block_offset) == (Status.LENGTH_ERROR, 300, 0)
    assert answer.generation == 2
    assert not peer.posted


@pytest.mark.parametrize("flags", ["INLINE", ""])
def test_a_length_error_of_a_store_says_nothing_of_the_size(world: Any, flags: str) -> None:
    peer = world.connect()
    peer.bind(peer.handle(), bytes(300), seal=False)
    answer = peer.answers[peer.store(peer.handle(), bytes(BLOCK + 1), flags=world.INLINE if flags else 0)]
    assert (answer.status, answer.data_length, answer.block_offset) == (Status.LENGTH_ERROR, 0, 0)


def test_request_id_of_64_bits_is_echoed(world: Any) -> None:
    peer = world.connect()
    peer.next_request_id = (1 << 64) - 2
    request = peer.free(peer.handle())
    assert request == (1 << 64) - 1
    assert peer.status(request) is Status.NOT_BOUND


# --- INVALIDATE ---


def test_invalidate_on_success_and_on_error(world: Any) -> None:
    """Profile 2: every completion of a well-formed request invalidates its STag."""
    peer = world.connect()
    peer.bind(peer.handle(), b"data", seal=False)
    unsealed = world.ALLOW_UNSEALED
    success = [
        peer.load(peer.handle(), flags=world.INVALIDATE | unsealed),
        peer.store(peer.handle(), b"new", flags=world.INVALIDATE),
        peer.alloc_store(peer.handle(1), b"new", flags=world.INVALIDATE),
    ]
    peer.finish_all()
    error = [
        peer.load(peer.handle(2), flags=world.INVALIDATE),
        peer.store(peer.handle(2), b"new", flags=world.INVALIDATE),
        peer.alloc_store(peer.handle(1), b"new", flags=world.INVALIDATE),
    ]
    assert [peer.status(request) for request in success] == [Status.SUCCESS] * 3
    assert [peer.status(request) for request in error] == [Status.NOT_BOUND, Status.NOT_BOUND, Status.ALREADY_BOUND]
    assert [peer.answers[request].invalidated for request in success + error] == [*peer.buffers]


def test_no_invalidate_unless_asked_for(world: Any) -> None:
    """Profile 8.3: it is served whether or not the feature was asked for, but never without the flag."""
    peer = world.connect(requested_features=0x10)
    peer.bind(peer.handle(), b"data")
    requests = [peer.load(peer.handle()), peer.free(peer.handle(1)), peer.store(peer.handle(), b"x")]
    peer.finish_all()
    assert [peer.answers[request].invalidated for request in requests] == [None] * 3


@pytest.mark.parametrize("octets", [39, 41])
def test_malformed_does_not_invalidate(world: Any, octets: int) -> None:
    """Profile 2: nor does UNSUPPORTED."""
    peer = world.connect()
    message = struct.pack(">BBHQQHHIQIx", 1, 3, world.INVALIDATE, 5, peer.handle(), 0, 0, 0x77, 0, 0)
    peer.send(message[:octets])
    assert (peer.answers[5].status, peer.answers[5].invalidated) == (Status.MALFORMED, None)


def test_unsupported_does_not_invalidate(world: Any) -> None:
    peer = world.connect()
    peer.send(struct.pack(">BBHQQHHIQI", 1, 4, world.INVALIDATE | world.INLINE, 5, peer.handle(), 0, 0, 0x77, 0, 0))
    assert (peer.answers[5].status, peer.answers[5].invalidated) == (Status.UNSUPPORTED, None)


def test_stag_zero_is_invalidated_too(world: Any) -> None:
    """Profile 8.7: the STag as given."""
    peer = world.connect()
    assert peer.answers[peer.load(peer.handle(), flags=world.INVALIDATE, stag=0)].invalidated == 0


# --- nothing to move (6.6, 8.7) ---


@pytest.mark.parametrize("flags", [0, 8])
def test_a_load_of_an_empty_block_moves_nothing(world: Any, flags: int) -> None:
    """Profile 6.6 and 8.7: no RDMA operation, so an STag that names nothing does no harm."""
    peer = world.connect()
    peer.bind(peer.handle(), b"")
    answer = peer.answers[peer.load(peer.handle(), 0, flags=flags, stag=0xDEAD)]
    assert (answer.status, answer.data_length) == (Status.SUCCESS, 0)
    assert answer.invalidated == (0xDEAD if flags else None)
    assert not peer.posted
    assert peer.status(peer.free(peer.handle())) is Status.SUCCESS


@pytest.mark.parametrize("inline", [False, True])
def test_an_alloc_store_of_nothing_binds_an_empty_block(world: Any, inline: bool) -> None:
    """Profile 6.6."""
    peer = world.connect()
    answer = peer.answers[peer.alloc_store(peer.handle(), b"", flags=world.INLINE if inline else 0, stag=0)]
    assert (answer.status, answer.data_length, answer.generation) == (Status.SUCCESS, 0, 2)
    assert not peer.posted
    assert peer.look(peer.handle()) == b""


@pytest.mark.parametrize("inline", [False, True])
def test_a_store_of_nothing_truncates(world: Any, inline: bool) -> None:
    """Profile 6.6."""
    peer = world.connect()
    peer.bind(peer.handle(), b"was here", seal=False)
    answer = peer.answers[peer.store(peer.handle(), b"", flags=world.INLINE if inline else 0, stag=0)]
    assert (answer.status, answer.data_length) == (Status.SUCCESS, 0)
    assert not peer.posted
    assert peer.look(peer.handle()) == b""


def test_a_load_moves_data_length_octets_and_no_more(world: Any) -> None:
    """Draft 6.1 step 2: the rest of the buffer stays as it was."""
    peer = world.connect()
    peer.bind(peer.handle(), b"five!")
    stag = peer.buffer(b"." * BLOCK)
    peer.load(peer.handle(), BLOCK, stag=stag)
    peer.finish()
    assert peer.buffers[stag] == b"five!" + b"." * (BLOCK - 5)


def test_the_write_of_a_load_is_posted_before_its_completion(world: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Draft 6.5: receipt of the completion implies that the data is there, which only this order makes true."""
    peer = world.connect()
    peer.bind(peer.handle(), b"data")
    performed: list[type] = []
    perform = peer.perform
    monkeypatch.setattr(peer, "perform", lambda action: (performed.append(type(action)), perform(action)))
    peer.load(peer.handle())
    assert [one for one in performed if one is not Recv] == [RdmaWrite, Send]


# --- credits ---


def test_every_credit_can_be_used_again_and_again(world: Any) -> None:
    """Profile 3: a request's buffer is reposted before the Send that releases its credit. `Peer` checks each Send."""
    peer = world.connect()
    for _ in range(3):
        requests = [peer.alloc_store(peer.handle(n), b"held", flags=0) for n in range(2)]
        assert len(peer.lent) == 2
        peer.finish_all()
        requests += [peer.free(peer.handle(n)) for n in range(2)]
        assert [peer.status(request) for request in requests] == [Status.SUCCESS] * 4
        assert len(peer.lent) == 4


def test_a_buffer_is_not_reposted_while_its_request_waits(world: Any) -> None:
    """Profile 3: the inline data of a request that waits for its turn is still in its receive buffer."""
    peer = world.connect()
    peer.bind(peer.handle(), b"before", seal=False)
    slow = peer.store(peer.handle(), b"by descriptor")
    waiting = [peer.store(peer.handle(), bytes([n]) * 300, flags=world.INLINE) for n in (1, 2)]
    assert len(peer.lent) == 1
    for _ in range(8):  # the one free buffer goes round and is overwritten each time
        peer.free(peer.handle(1))
    peer.finish()
    assert [peer.status(request) for request in (slow, *waiting)] == [Status.SUCCESS] * 3
    assert peer.look(peer.handle()) == bytes([2]) * 300


def test_a_load_gives_its_credit_back_before_its_write_has_left(world: Any) -> None:
    """The completion is posted behind the Write: the initiator sees both or neither (RFC 5040 5.5 rule 5)."""
    peer = world.connect()
    peer.bind(peer.handle(), b"data")
    request = peer.load(peer.handle())
    assert peer.posted
    assert peer.status(request) is Status.SUCCESS
    assert len(peer.lent) == 4


def test_one_credit_is_enough(new_world: Callable[..., Any]) -> None:
    world = new_world(request_credits=1)
    peer = world.connect()
    peer.bind(peer.handle(), b"one at a time", seal=False)
    request = peer.store(peer.handle(), b"by descriptor")
    assert not peer.lent
    peer.finish()
    assert peer.status(request) is Status.SUCCESS
    assert peer.look(peer.handle()) == b"by descriptor"


def test_a_peer_that_takes_no_completion_comes_to_the_end_of_its_credits(new_world: Callable[..., Any]) -> None:
    """Profile 3 "Credits": more than Request Credits outstanding finds no receive buffer (1/2/02, the RNIC's to say);
    what waits in the send queue of a peer that never reads is bounded, and comes out in order when it does."""
    world = new_world(request_credits=4)
    peer = world.connect()
    peer.takes_sends = False
    asked = []
    while peer.lent:
        assert len(asked) < 100, "the send queue has no end"
        asked.append(peer.free(peer.handle()))
    assert len(peer.untaken) == 4 * COMPLETIONS_POSTED_PER_CREDIT
    assert len(asked) == len(peer.untaken) + 4
    peer.takes_sends = True
    peer.take_sends()
    world.perform()
    assert list(peer.answers) == asked
    assert len(peer.lent) == 4
    peer.end()


def test_a_target_that_drains_sends_the_held_completions_first(new_world: Callable[..., Any]) -> None:
    world = new_world(request_credits=1)
    peer = world.connect()
    peer.takes_sends = False
    while peer.lent:
        last = peer.free(peer.handle())
    peer.session.drain()
    world.perform()
    assert peer.end_action is None
    assert last not in peer.answers
    peer.take_sends()
    world.perform()
    assert last in peer.answers
    assert isinstance(peer.end_action, Disconnect)
    peer.end()


def test_hello_without_memory_for_its_receive_buffers(new_world: Callable[..., Any]) -> None:
    world = new_world()
    peer = world.open()
    peer.memory.exhausted = True
    assert peer.hello(requested_quota=1).status == Status.TARGET_ERROR
    assert isinstance(peer.end_action, Disconnect)
    peer.end()
    world.check_nothing_is_left()
