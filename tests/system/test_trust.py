"""Trust domains and replacement over sockets: what the RNIC does by itself keeps to them too (profile 3, 4)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

import kbtp
from kbtp.errors import AccessDenied, ConnectionLost, HandleOutOfRange, NotBound
from kbtp.keys import Key, Keys
from kbtp.types import HelloAckFlag, RequestFlag, Status
from kbtp.wire import AllocStore, DataDescriptor, Free, Load, Store

A, B = Key(1, bytes(range(32)), "a"), Key(2, bytes(range(1, 33)), "b")
ALICE = bytes(range(1, 17))
BLOCK_BYTES = 8192
SECRET = b"a's alone " * 800

Serve = Callable[..., Any]
Peers = Callable[..., Any]


def in_pool(server: Any, octets: bytes) -> bool:
    return server._pool_memory.find(octets) >= 0


def descriptor(peer: Any, buffer: bytearray) -> DataDescriptor:
    region = peer.register(buffer)
    return DataDescriptor(region.stag, 0, len(buffer))


def test_two_domains_share_a_target_and_learn_nothing_of_each_other(serve: Serve) -> None:
    server = serve(keys=Keys((A, B)))
    with (
        kbtp.connect(server.url, key=A, initiator_id=ALICE) as one,
        kbtp.connect(server.url, key=B, initiator_id=ALICE) as other,
    ):
        sealed, unsealed = one.alloc_store(SECRET), one.alloc_store(SECRET[:5], seal=False)
        empty, free = one.alloc_store(b""), one.alloc_store(b"x")
        one.free(free)
        for block in (sealed, unsealed, empty, free):
            for size in (0, BLOCK_BYTES):
                for allow_unsealed in (False, True):
                    buffer = bytearray(size)
                    with pytest.raises(HandleOutOfRange):
                        other.load(block.handle, into=buffer, allow_unsealed=allow_unsealed)
                    with pytest.raises(HandleOutOfRange):
                        other.load(block, into=buffer, allow_unsealed=allow_unsealed)
                    assert buffer == bytes(size)
            with pytest.raises(HandleOutOfRange):
                other.free(block.handle)
        assert in_pool(server, SECRET)
        one.free(sealed)
        assert not in_pool(server, SECRET)
        results = other.load_many([unsealed.handle, empty.handle], into=[bytearray(9), bytearray(9)])
        assert [(result.status, result.length_bytes) for result in results] == [(Status.HANDLE_OUT_OF_RANGE, 0)] * 2


def test_a_domain_keeps_its_blocks_to_itself_when_it_is_gone(serve: Serve) -> None:
    """While it lingers, and afterwards: range and block may be another's then."""
    server = serve(keys=Keys((A, B)), linger_s=0.0, pool_blocks=1, quota=1, table_handles=1)
    with kbtp.connect(server.url, key=A, initiator_id=ALICE) as one:
        block = one.alloc_store(SECRET)
    assert server.wait_until(lambda: server.free_blocks == 1 and not server.target.sessions)
    assert not in_pool(server, SECRET)
    with kbtp.connect(server.url, key=B) as other:
        assert other.terms.first_handle == block.handle
        with pytest.raises(kbtp.NotBound):
            other.load(block, into=bytearray(BLOCK_BYTES))
        assert other.alloc_store(b"b's").generation != block.generation


def test_wrong_keys_are_one_line_each_and_cost_others_nothing(serve: Serve, warnings: Any) -> None:
    server = serve(keys=Keys((A,)))
    with kbtp.connect(server.url, key=A, initiator_id=ALICE) as client:
        block = client.alloc_store(SECRET)
        for wrong in (B, Key(A.key_id, B.secret), None):
            with pytest.raises(AccessDenied):
                kbtp.connect(server.url, key=wrong, initiator_id=ALICE)
        assert client.load(block, into=bytearray(BLOCK_BYTES)) == len(SECRET)
    assert server.wait_until(lambda: not server.target.sessions)
    assert len(warnings.lines) == 3
    assert all("HELLO refused: ACCESS_DENIED" in line for line in warnings.lines)


# --- a new session takes the place of a live one ---


def check_replaced(server: Any, warnings: Any) -> None:
    assert "(key 00000001): session ended: replaced by a new session of the same identity" in warnings.wait_for_one()
    assert server.wait_until(lambda: len(server.target.sessions) == 1)


def test_an_idle_session_is_replaced(serve: Serve, warnings: Any) -> None:
    server = serve(keys=Keys((A,)))
    old = kbtp.connect(server.url, key=A, initiator_id=ALICE)
    block = old.alloc_store(SECRET)
    with kbtp.connect(server.url, key=A, initiator_id=ALICE) as new:
        assert (new.terms.resumed, new.terms.bound_blocks) == (True, 1)
        assert new.terms.first_handle == old.terms.first_handle
        check_replaced(server, warnings)
        buffer = bytearray(len(SECRET))
        assert new.load(block, into=buffer) == len(SECRET)
        assert buffer == SECRET
        with pytest.raises(ConnectionLost):
            old.load(block, into=buffer)
        new.free(block)
    old.close()


def test_a_session_whose_peer_reads_nothing_is_replaced(serve: Serve, peer: Peers, warnings: Any) -> None:
    """Its LOADs pin a block that its new session frees; nothing has to drain first."""
    server = serve(keys=Keys((A,)), block_size_bytes=16 << 20, pool_blocks=2, quota=1)
    old = peer(server.url, receive_buffer_bytes=4096)
    ack = old.open_session(key=A, initiator_id=ALICE)
    with kbtp.connect(server.url, key=A) as helper:
        data = b"\x5a" * (16 << 20)
        block = helper.alloc_store(data)
        sink = descriptor(old, bytearray(len(data)))
        old.send(Load(1, block.handle, 0, RequestFlag.NONE, sink).pack())
        assert server.wait_until(lambda: server.outstanding_of(session_of(server, ALICE)) == 1)
        with kbtp.connect(server.url, key=A, initiator_id=ALICE) as new:
            assert new.terms.first_handle == ack.first_handle
            helper.free(block)  # waits for nobody
            with pytest.raises(NotBound):
                new.load(block, into=bytearray(1))
    assert "replaced by a new session" in warnings.wait_for_one()
    assert len(warnings.lines) == 1


def session_of(server: Any, initiator_id: bytes) -> Any:
    [session] = [
        session
        for session in list(server.target.sessions)
        if session.identity is not None and session.identity.initiator_id == initiator_id
    ]
    return session


def test_a_session_whose_peer_answers_no_read_is_replaced(serve: Serve, peer: Peers, warnings: Any) -> None:
    """STORE and ALLOC_STORE wait for RDMA Reads: neither is done afterwards (profile 6.5, 8.9)."""
    server = serve(keys=Keys((A,)))
    old = peer(server.url)
    ack = old.open_session(key=A, initiator_id=ALICE)
    handle = ack.first_handle
    inline = DataDescriptor(0, 0, 3)
    old.send(AllocStore(1, handle, 0, RequestFlag.INLINE, inline, inline_data=b"old").pack())
    assert old.receive().status == Status.SUCCESS
    source = descriptor(old, bytearray(b"new" * 100))
    old.send(
        Store(2, handle, 0, RequestFlag.SEAL, source).pack(),
        AllocStore(3, handle + 1, 0, RequestFlag.SEAL, source).pack(),
        Free(4, handle, 0, RequestFlag.NONE).pack(),
    )
    assert server.wait_until(lambda: server.outstanding_of(session_of(server, ALICE)) == 3)
    with kbtp.connect(server.url, key=A, initiator_id=ALICE) as new:
        assert (new.terms.resumed, new.terms.bound_blocks) == (True, 1)
        check_replaced(server, warnings)
        assert server.free_blocks == 15
        buffer = bytearray(300)
        length = new.load(handle, into=buffer, allow_unsealed=True)
        assert bytes(buffer[:length]) in (b"old", b"")  # as if it had not begun, or empty where it went right there
        assert new.store(handle, b"newer", seal=True).generation == 2
        new.free(handle)
        assert new.alloc_store(b"x", handle=handle + 1).generation == 2
    assert old.is_closed_by_target()


def test_sessions_that_replace_each_other_all_the_time(serve: Serve) -> None:
    """Each finds what the one before has left, whole."""
    server = serve(keys=Keys((A,)), quota=4)
    block, left = None, []
    for n in range(30):
        client = kbtp.connect(server.url, key=A, initiator_id=ALICE)
        left.append(client)
        assert client.terms.resumed == (n > 0)
        if block is not None:
            buffer = bytearray(block.length_bytes)
            assert client.load(block, into=buffer) == block.length_bytes
            assert buffer == bytes([n - 1]) * (n * 100)
            client.free(block)
        assert client.terms.bound_blocks == (n > 0)
        block = client.alloc_store(bytes([n]) * ((n + 1) * 100))
    for client in left:
        client.close()
    assert server.wait_until(lambda: not server.target.sessions)
    assert server.free_blocks == 15


def test_the_answer_to_the_one_who_replaces_says_resumed(serve: Serve, peer: Peers) -> None:
    server = serve(keys=Keys((A,)))
    old, new = peer(server.url), peer(server.url)
    first = old.open_session(key=A, initiator_id=ALICE)
    second = new.open_session(key=A, initiator_id=ALICE)
    assert (first.flags, second.flags) == (HelloAckFlag.NONE, HelloAckFlag.RESUMED)
    assert old.is_closed_by_target()


# --- other keys while it runs ---


def test_keys_are_read_again(serve: Serve, warnings: Any) -> None:
    server = serve(keys=Keys((A, B)))
    now = [Keys((A,))]
    server._key_source = lambda: now[0]
    stays, goes = kbtp.connect(server.url, key=A), kbtp.connect(server.url, key=B)
    block = stays.alloc_store(SECRET)
    server.request_keys()
    assert "(key 00000002): session ended: its key is not valid any more" in warnings.wait_for_one()
    with pytest.raises(ConnectionLost):
        goes.alloc_store(b"x")
    with pytest.raises(AccessDenied):
        kbtp.connect(server.url, key=B)
    assert stays.load(block, into=bytearray(BLOCK_BYTES)) == len(SECRET)
    stays.close()


def test_keys_that_cannot_be_read_leave_those_there_are(serve: Serve, warnings: Any) -> None:
    server = serve(keys=Keys((A,)))

    def read() -> Keys:
        raise kbtp.ApiMisuse("line 1: nonsense")

    server._key_source = read
    server.request_keys()
    assert warnings.wait_for_one() == "the keys stay as they are: line 1: nonsense"
    kbtp.connect(server.url, key=A).close()
