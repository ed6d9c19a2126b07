"""Targets that break the protocol: the session ends, says why, and no buffer changes afterwards."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from kbtp.errors import ConnectionLost, LengthError, PeerMisbehaved
from kbtp.types import HelloAckFlag, Status, TerminateCause
from kbtp.verbs.api import Send
from kbtp.wire import AllocStore, Completion, Hello, Load

Connect = Callable[..., Any]
FakeTargets = Callable[..., Any]


def test_a_target_that_keeps_to_the_protocol(fake_target: FakeTargets, connect: Connect) -> None:
    """What the scripts below depart from."""

    def script(target: Any) -> None:
        target.open_session()
        store = target.receive()
        assert isinstance(store, AllocStore)
        assert target.read(5000, store.data.stag, store.data.to) == b"s" * 5000
        target.complete(store, data_length=5000, block_offset=65536)
        load = target.receive()
        assert isinstance(load, Load)
        target.write(b"l" * 5000, load.data.stag, load.data.to)
        target.complete(load, data_length=5000, block_offset=65536)
        assert target.ended().reason is None

    client = connect(fake_target(script).url)
    block = client.alloc_store(b"s" * 5000)
    buffer = bytearray(5000)
    assert client.load(block, into=buffer) == 5000
    assert buffer == b"l" * 5000


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"block_size": 0}, "Block Size"),
        ({"request_credits": 33}, "Request Credits"),
        ({"allocation_quota": 17}, "Allocation Quota"),
        ({"handle_count": 65}, "Handle Count"),
        ({"flags": HelloAckFlag.RESUMED}, "RESUMED"),
    ],
)
def test_an_impossible_hello_ack_ends_the_stream_with_a_terminate(
    fake_target: FakeTargets, connect: Connect, changes: dict[str, Any], field: str
) -> None:
    """Profile 2."""

    def script(target: Any) -> None:
        target.open_session(**changes)
        terminate = target.ended().terminate
        assert (terminate.layer, terminate.etype, terminate.code) == TerminateCause.RDMAP_UNSPECIFIED.value

    with pytest.raises(PeerMisbehaved, match=f"impossible {field}"):
        connect(fake_target(script).url)


def test_a_hello_ack_too_many(fake_target: FakeTargets, connect: Connect) -> None:
    def script(target: Any) -> None:
        target.accept()
        assert isinstance(target.receive(), Hello)
        ack = target.hello_ack()
        target.stream.post([Send(0, inline=ack), Send(0, inline=ack)])
        terminate = target.ended().terminate
        assert (terminate.layer, terminate.etype, terminate.code) == TerminateCause.RDMAP_UNSPECIFIED.value

    with pytest.raises((PeerMisbehaved, ConnectionLost), match=r"HELLO_ACK|answers nothing|opcode"):
        connect(fake_target(script).url).free(1000)


@pytest.mark.parametrize(
    "answer", [b"rubbish", bytes(152), Completion(0, 0, 0, Status.SUCCESS).pack()], ids=["short", "zeros", "COMPLETION"]
)
def test_anything_but_a_hello_ack_in_answer_to_hello(fake_target: FakeTargets, connect: Connect, answer: bytes) -> None:
    def script(target: Any) -> None:
        target.accept()
        assert isinstance(target.receive(), Hello)
        target.send(answer)
        target.ended()

    with pytest.raises(PeerMisbehaved):
        connect(fake_target(script).url)


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"request_id": 77}, "Request ID 77, which is not outstanding"),
        ({"handle": 1001}, "names handle 1001, asked was 1000"),
        ({"data_length": 5001}, "LOAD of 5001 octets into 5000"),
    ],
)
def test_a_completion_of_something_that_was_not_asked(
    fake_target: FakeTargets, connect: Connect, fields: dict[str, int], said: str
) -> None:
    def script(target: Any) -> None:
        target.open_session()
        target.complete(target.receive(), **fields)
        terminate = target.ended().terminate
        assert (terminate.layer, terminate.etype, terminate.code) == TerminateCause.RDMAP_UNSPECIFIED.value

    client = connect(fake_target(script).url)
    buffer = bytearray(5000)
    with pytest.raises(ConnectionLost, match=said):
        client.load(1000, into=buffer)
    assert buffer == bytes(5000)
    with pytest.raises(ConnectionLost, match=said):
        client.load(1000, into=buffer)


@pytest.mark.parametrize("message", [b"rubbish", bytes(40), bytes(1000)], ids=["short", "zeros", "long"])
def test_rubbish_instead_of_a_completion(fake_target: FakeTargets, connect: Connect, message: bytes) -> None:
    def script(target: Any) -> None:
        target.open_session()
        target.receive()
        target.send(message)
        target.ended()

    with pytest.raises(ConnectionLost, match="COMPLETION"):
        connect(fake_target(script).url).free(1000)


def test_a_message_longer_than_the_initiators_buffers(fake_target: FakeTargets, connect: Connect) -> None:
    """RFC 5041 7: the initiator's RNIC ends the stream."""

    def script(target: Any) -> None:
        target.open_session()
        target.receive()
        target.send(bytes(1025))
        terminate = target.ended().terminate
        assert (terminate.layer, terminate.etype, terminate.code) == TerminateCause.DDP_MESSAGE_TOO_LONG.value

    with pytest.raises(ConnectionLost):
        connect(fake_target(script).url).free(1000)


def test_a_write_that_was_not_asked_for_is_refused(fake_target: FakeTargets, connect: Connect) -> None:
    def script(target: Any) -> None:
        target.open_session()
        load = target.receive()
        target.write(b"x" * 5001, load.data.stag, load.data.to)
        terminate = target.ended().terminate
        assert (terminate.layer, terminate.etype, terminate.code) == TerminateCause.DDP_BASE_OR_BOUNDS.value

    memory = bytearray(6000)
    client = connect(fake_target(script).url)
    with pytest.raises(ConnectionLost):
        client.load(1000, into=memoryview(memory)[:5000])
    assert memory[5000:] == bytes(1000)


def test_a_lent_buffer_is_the_callers_again_after_the_completion(fake_target: FakeTargets, connect: Connect) -> None:
    """Whether or not the target invalidates the STag as it was asked to."""

    def script(target: Any) -> None:
        target.open_session()
        load = target.receive()
        target.complete(load, data_length=0)
        second = target.receive()
        target.complete(second, data_length=0)
        target.write(b"x" * 5000, load.data.stag, load.data.to)
        terminate = target.ended().terminate
        assert (terminate.layer, terminate.etype, terminate.code) == TerminateCause.DDP_INVALID_STAG.value

    buffer = bytearray(5000)
    client = connect(fake_target(script).url)
    client.load(1000, into=buffer)
    client.load(1000, into=bytearray(1))
    with pytest.raises(ConnectionLost):
        client.load(1000, into=bytearray(1))
    assert buffer == bytes(5000)


def test_a_refused_load_leaves_the_buffer_alone(fake_target: FakeTargets, connect: Connect) -> None:
    def script(target: Any) -> None:
        target.open_session()
        load = target.receive()
        target.complete(load, Status.LENGTH_ERROR, data_length=9000)
        target.ended()

    client = connect(fake_target(script).url)
    with pytest.raises(LengthError, match="it holds 9000 octets"):
        client.load(1000, into=bytearray(5000))


def test_a_terminate_is_a_lost_connection_that_says_what_it_said(fake_target: FakeTargets, connect: Connect) -> None:
    def script(target: Any) -> None:
        target.open_session()
        target.receive()
        target.stream.terminate(TerminateCause.LOCAL_CATASTROPHIC)

    client = connect(fake_target(script).url)
    with pytest.raises(ConnectionLost, match="LOCAL_CATASTROPHIC") as caught:
        client.free(1000)
    terminate = caught.value.terminate
    assert terminate is not None
    assert (terminate.layer, terminate.etype, terminate.code) == (0, 0, 0)
    assert client.closed


def test_a_target_that_goes_in_the_middle_of_a_batch(fake_target: FakeTargets, connect: Connect) -> None:
    """What was completed stays completed, the rest says that the connection is lost."""

    def script(target: Any) -> None:
        target.open_session(request_credits=2)
        target.complete(target.receive())
        target.receive()
        target.stream.disconnect()
        target.ended()

    client = connect(fake_target(script).url)
    results = client.free_many([1000, 1001, 1002, 1003])
    assert results[0].status is Status.SUCCESS
    for result in results[1:]:
        assert result.status is None
        assert isinstance(result.error, ConnectionLost)


def test_a_target_that_vanishes_without_a_word(fake_target: FakeTargets, connect: Connect) -> None:
    def script(target: Any) -> None:
        target.open_session()
        target.receive()
        target.stream.abort()

    with pytest.raises(ConnectionLost):
        connect(fake_target(script).url).load(1000, into=bytearray(5000))


def test_a_target_that_closes_an_idle_session(fake_target: FakeTargets, connect: Connect) -> None:
    def script(target: Any) -> None:
        target.open_session()
        target.complete(target.receive())
        target.stream.disconnect()
        target.ended()

    client = connect(fake_target(script).url)
    client.free(1000)
    results = client.load_many([1000, 1001], into=[bytearray(9), bytearray(9)])
    assert all(isinstance(result.error, ConnectionLost) for result in results)
