"""Both clients against a real target over the reference RNIC: every single and batch form."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import crc32c
import pytest

import kbtp
from kbtp import BlockRef, Result, Status
from kbtp.errors import (
    AccessDenied,
    AlreadyBound,
    ApiMisuse,
    ConnectionLost,
    GenerationMismatch,
    HandleOutOfRange,
    LengthError,
    NoSpace,
    NotBound,
    NotSealed,
    Sealed,
    Unsupported,
)

Serve = Callable[..., Any]
Connect = Callable[..., Any]
BLOCK_BYTES = 8192


def octets(seed: int, length: int) -> bytes:
    return random.Random(seed).randbytes(length)


# --- single forms ------------------------------------------------------------------------------


@pytest.mark.parametrize("length", [0, 1, 4096, 4097, BLOCK_BYTES])
def test_what_was_stored_is_loaded_and_freed(serve: Serve, connect: Connect, length: int) -> None:
    """Inline up to 4096 octets, through a descriptor beyond (profile 3 "Inline data")."""
    server = serve()
    client = connect(server.url)
    block = client.alloc_store(octets(length, length))
    assert (block.generation, block.length_bytes) == (2, length)
    assert server.free_blocks == 15
    buffer = bytearray(length + 3)
    assert client.load(block, into=buffer) == length
    assert bytes(buffer) == octets(length, length) + bytes(3)
    assert client.free(block) is None
    assert server.free_blocks == 16


def test_a_block_is_stored_to_until_it_is_sealed(serve: Serve, connect: Connect) -> None:
    client = connect(serve().url)
    block = client.alloc_store(b"first", seal=False)
    buffer = bytearray(6000)
    with pytest.raises(NotSealed, match="allow_unsealed=True"):
        client.load(block, into=buffer)
    assert client.load(block, into=buffer, allow_unsealed=True) == 5
    longer = octets(1, 6000)
    assert client.store(block, longer, seal=False).length_bytes == 6000
    again = client.store(block, longer[:5000])
    assert again == BlockRef(block.handle, block.generation, 5000)
    assert client.load(block, into=buffer) == 5000
    assert bytes(buffer[:5000]) == longer[:5000]
    with pytest.raises(Sealed, match="free it and store anew"):
        client.store(block, b"third")


def test_a_reference_to_a_freed_block_is_refused_for_ever(serve: Serve, connect: Connect) -> None:
    """Draft 5.1: the generation is the binding's."""
    client = connect(serve().url)
    old = client.alloc_store(b"old")
    client.free(old)
    with pytest.raises(NotBound, match="never stored, or freed"):
        client.load(old, into=bytearray(3))
    new = client.alloc_store(b"new", handle=old.handle)
    assert new.generation != old.generation
    buffer = bytearray(b"???")
    for call in (
        lambda: client.load(old, into=buffer),
        lambda: client.free(old),
        lambda: client.store(old, b"x"),
        lambda: client.load(old.handle, into=buffer, generation=old.generation),
    ):
        with pytest.raises(GenerationMismatch, match="freed and bound again"):
            call()
    assert buffer == b"???"
    assert client.load(old.handle, into=buffer) == 3
    assert buffer == b"new"


def test_handles_are_given_or_chosen(serve: Serve, connect: Connect) -> None:
    client = connect(serve().url, handles=4, quota=4)
    first = client.terms.first_handle
    assert client.terms.handle_count == 4
    assert client.alloc_store(b"x", handle=first + 1).handle == first + 1
    chosen = [client.alloc_store(b"y").handle for _ in range(3)]
    assert sorted(chosen) == [first, first + 2, first + 3]
    with pytest.raises(NoSpace, match="all 4 handles"):
        client.alloc_store(b"z")
    with pytest.raises(AlreadyBound, match="let the client choose"):
        client.alloc_store(b"z", handle=first)
    client.free(first + 2)
    assert client.alloc_store(b"z").handle == first + 2


def test_what_others_own_can_be_loaded_but_not_changed(serve: Serve, connect: Connect) -> None:
    server = serve()
    owner, reader = connect(server.url), connect(server.url)
    block = owner.alloc_store(b"shared")
    buffer = bytearray(6)
    assert reader.load(block, into=buffer) == 6
    assert buffer == b"shared"
    for call in (
        lambda: reader.free(block),
        lambda: reader.store(block, b"x"),
        lambda: reader.alloc_store(b"x", handle=block.handle),
        lambda: reader.load(1, into=buffer),
    ):
        with pytest.raises(HandleOutOfRange, match="one of our own"):
            call()


def test_lengths_that_do_not_fit(serve: Serve, connect: Connect) -> None:
    client = connect(serve().url)
    block = client.alloc_store(octets(1, 300))
    buffer = bytearray(299)
    with pytest.raises(LengthError, match="it holds 300 octets"):
        client.load(block, into=buffer)
    assert buffer == bytes(299)
    with pytest.raises(LengthError, match="it holds 300 octets"):
        client.load(block, into=b"")
    with pytest.raises(LengthError, match="block size"):
        client.alloc_store(bytes(BLOCK_BYTES + 1))


def test_the_quota_ends_and_freeing_gives_it_back(serve: Serve, connect: Connect) -> None:
    client = connect(serve().url, quota=2)
    assert client.quota_blocks == 2
    block = client.alloc_store(b"1")
    client.alloc_store(b"2")
    with pytest.raises(NoSpace, match="larger quota"):
        client.alloc_store(b"3")
    client.free(block)
    client.alloc_store(b"3")


def test_empty_blocks(serve: Serve, connect: Connect) -> None:
    """Profile 6.6."""
    client = connect(serve().url)
    block = client.alloc_store(b"", seal=False)
    assert client.load(block, into=b"", allow_unsealed=True) == 0
    assert client.load(block, into=bytearray(5), allow_unsealed=True) == 0
    client.store(block, b"12345", seal=False)
    assert client.store(block, bytearray()).length_bytes == 0
    assert client.load(block, into=memoryview(b"")) == 0


def test_a_target_that_may_not_read_takes_only_inline_data(serve: Serve, connect: Connect) -> None:
    """Profile 3 "RDMA Reads": depth 0."""
    client = connect(serve(read_depth=0).url)
    assert client.alloc_store(bytes(4096)).length_bytes == 4096
    with pytest.raises(Unsupported, match="does not offer"):
        client.alloc_store(bytes(4097))


# --- batch forms -------------------------------------------------------------------------------


def test_batches_of_every_kind(serve: Serve, connect: Connect) -> None:
    server = serve()
    client = connect(server.url, quota=8)
    first = client.terms.first_handle
    data = [octets(n, 1000 * n) for n in range(8)]
    stored = client.alloc_store_many(data[:4], seal=False)
    stored = [*stored, *client.alloc_store_many(data[4:], handles=range(first + 10, first + 14))]
    assert [result.status for result in stored] == [Status.SUCCESS] * 8
    assert [result.handle for result in stored[4:]] == [first + 10, first + 11, first + 12, first + 13]
    blocks = [result.ref for result in stored]
    assert all(result.ok for result in client.store_many(blocks[:4], data[3::-1]))
    buffers = [bytearray(len(one)) for one in (*data[3::-1], *data[4:])]
    loaded = client.load_many(blocks, into=buffers)
    assert [result.length_bytes for result in loaded] == [len(buffer) for buffer in buffers]
    assert buffers == [*data[3::-1], *data[4:]]
    assert all(result.ok for result in client.free_many(blocks))
    assert server.free_blocks == 16
    assert client.load_many([], into=[]) == []


@pytest.mark.parametrize("registered", [False, True])
def test_checksums_are_known_where_the_rnic_takes_them_anyway(
    serve: Serve, connect: Connect, best_rnic: str, registered: bool
) -> None:
    client = connect(serve(pool_blocks=64, block_size_bytes=200_000).url, quota=64)
    data = [octets(length, length) for length in (0, 1, 4096, 4097, 8192, 70_000, 200_000)]
    memory = bytearray(sum(map(len, data)))
    if registered:
        client.register(memory)
    views, at = [], 0
    for one in data:
        views.append(memoryview(memory)[at : at + len(one)])
        views[-1][:] = one
        at += len(one)
    expected = [crc32c.crc32c(one) if best_rnic == "native" else -1 for one in data]
    stored = client.alloc_store_many(views, checksums=True).raise_for_status()
    assert stored.checksums[1:].tolist() == expected[1:]
    memory[:] = bytes(len(memory))
    loaded = client.load_many(stored.refs, views, checksums=True).raise_for_status()
    assert loaded.checksums[1:].tolist() == expected[1:]
    assert [bytes(view) for view in views] == data
    assert client.load_many(stored.refs, views).checksums.tolist() == [-1] * len(data)
    missed = client.load_many([-1, stored.refs[1].handle + 1000], views[1:3], checksums=True)
    assert missed.checksums.tolist() == [-1, -1]


def test_a_batch_tells_each_failure_and_never_raises(serve: Serve, connect: Connect) -> None:
    client = connect(serve().url)
    block, gone = client.alloc_store(b"sealed"), client.alloc_store(b"gone")
    client.free(gone)
    good, small = bytearray(6), bytearray(5)
    loaded = client.load_many(
        [block, gone, block, block, -1, block, 1],
        into=[good, bytearray(6), small, "text", bytearray(6), b"constant", bytearray(6)],
    )
    assert [result.status for result in loaded] == [
        Status.SUCCESS, Status.NOT_BOUND, Status.LENGTH_ERROR, None, None, None, Status.HANDLE_OUT_OF_RANGE,
    ]  # fmt: skip
    assert [isinstance(result.error, ApiMisuse) for result in loaded] == [False, False, False, True, True, True, False]
    assert good == b"sealed"
    stored = client.store_many([block, block], [b"x", object()])
    assert [(one.status, type(one.error)) for one in stored] == [(Status.SEALED, type(None)), (None, ApiMisuse)]
    freed = client.free_many([gone, "x", block])
    assert [one.status for one in freed] == [Status.NOT_BOUND, None, Status.SUCCESS]


def test_arguments_that_are_not_equally_many(serve: Serve, connect: Connect) -> None:
    client = connect(serve().url)
    with pytest.raises(ApiMisuse, match="2 blocks, 1 into"):
        client.load_many([1, 2], into=[bytearray(1)])
    with pytest.raises(ApiMisuse, match="equally many"):
        client.store_many([1], [])
    with pytest.raises(ApiMisuse, match="equally many"):
        client.alloc_store_many([b"x"], handles=[])


def test_more_operations_than_credits(serve: Serve, connect: Connect) -> None:
    """Profile 3 "Credits": the client keeps to them, the caller need not know."""
    client = connect(serve(request_credits=3, pool_blocks=64).url, quota=64)
    assert client.terms.request_credits == 3
    data = [octets(n, 100 + 97 * n) for n in range(60)]
    blocks = [result.raise_for_status().ref for result in client.alloc_store_many(data)]
    buffers = [bytearray(len(one)) for one in data]
    assert all(result.ok for result in client.load_many(blocks, into=buffers))
    assert buffers == data


def test_handles_that_a_resumed_session_does_not_know_are_passed_over(serve: Serve, connect: Connect) -> None:
    """ALREADY_BOUND leads to the next handle; with all of them bound, to NO_SPACE."""
    server = serve()
    before = connect(server.url, initiator_id=b"i" * 16, quota=8, handles=4)
    kept = [result.ref for result in before.alloc_store_many([b"one", b"two", b"three"])]
    before.close()
    assert server.wait_until(lambda: not server.target.sessions)
    after = connect(server.url, initiator_id=b"i" * 16)
    assert (after.terms.resumed, after.terms.bound_blocks, after.quota_blocks) == (True, 3, 8)
    fourth = after.alloc_store(b"four")
    assert fourth.handle not in [block.handle for block in kept]
    with pytest.raises(NoSpace, match="all 4 handles"):
        after.alloc_store(b"five")
    buffer = bytearray(5)
    assert after.load(kept[2], into=buffer) == 5
    assert buffer == b"three"


# --- the session -------------------------------------------------------------------------------


def test_the_terms_of_a_session(serve: Serve, connect: Connect) -> None:
    server = serve(name="cache-0", namespace=b"llama/bf16", quota=5, request_credits=9)
    client = connect(server.url, namespace="llama/bf16", name="decode-0")
    terms = client.terms
    assert terms.as_dict() == {
        "url": server.url,
        "target_name": "cache-0",
        "namespace": "llama/bf16",
        "incarnation": server.target.incarnation,
        "resumed": False,
        "block_size_bytes": BLOCK_BYTES,
        "pool_blocks": 16,
        "quota_blocks": 5,
        "bound_blocks": 0,
        "first_handle": terms.first_handle,
        "handle_count": 10,
        "request_credits": 9,
        "max_message_bytes": 16384,
        "inline_max_bytes": 4096,
        "features": ("INVALIDATE",),
    }
    assert (client.block_size_bytes, client.incarnation) == (BLOCK_BYTES, server.target.incarnation)
    assert server.wait_until(lambda: [session.name for session in server.target.sessions] == ["decode-0"])


def test_another_namespace_is_denied(serve: Serve, connect: Connect) -> None:
    server = serve(namespace=b"llama")
    for namespace in (None, "mistral", b"llam"):
        with pytest.raises(AccessDenied, match="namespace differs"):
            connect(server.url, namespace=namespace)
    connect(server.url, namespace=b"llama")


def test_a_second_session_of_a_live_identity_is_denied(serve: Serve, connect: Connect) -> None:
    server = serve()
    connect(server.url, initiator_id=b"i" * 16)
    with pytest.raises(AccessDenied, match="initiator_id is still open"):
        connect(server.url, initiator_id=b"i" * 16)


def test_no_quota_left_is_no_space(serve: Serve, connect: Connect) -> None:
    server = serve()
    assert connect(server.url, quota=1000).quota_blocks == 16
    with pytest.raises(NoSpace, match="no quota or no handles left"):
        connect(server.url, quota=1)
    assert connect(server.url).quota_blocks == 0  # profile 8.4: a pure reader


def test_blocks_of_an_anonymous_initiator_end_with_it(serve: Serve, connect: Connect) -> None:
    """Profile 3."""
    server = serve()
    with connect(server.url) as client:
        client.alloc_store(b"x")
        assert server.free_blocks == 15
    assert server.wait_until(lambda: server.free_blocks == 16)


def test_a_closed_client_says_so(serve: Serve, connect: Connect) -> None:
    client = connect(serve().url)
    block = client.alloc_store(b"x")
    assert not client.closed
    client.close()
    client.close()
    assert client.closed
    assert client.terms.quota_blocks == 4
    for call in (
        lambda: client.load(block, into=bytearray(1)),
        lambda: client.alloc_store(b"x"),
        lambda: client.register(bytearray(1)),
    ):
        with pytest.raises(ConnectionLost, match="closed"):
            call()
    results: list[Result] = client.load_many([block, -1], into=[bytearray(1)] * 2)
    assert [type(result.error) for result in results] == [ConnectionLost, ApiMisuse]


def test_a_target_that_stops_is_a_lost_connection(serve: Serve, connect: Connect) -> None:
    server = serve()
    client = connect(server.url)
    block = client.alloc_store(b"x")
    server.stop()
    with pytest.raises(ConnectionLost):
        client.load(block, into=bytearray(1))
    assert client.closed


def test_one_rnic_serves_many_clients(serve: Serve, connect: Connect) -> None:
    server = serve()
    rnic = kbtp.open_rnic()
    one, two = connect(server.url, rnic=rnic), connect(server.url, rnic=rnic)
    block = one.alloc_store(bytes(5000))
    one.close()
    assert server.wait_until(lambda: server.target.store.domain_of(block.handle) is None)
    with pytest.raises(HandleOutOfRange):
        two.load(block, into=bytearray(5000))


def test_threads_share_a_client(serve: Serve) -> None:
    server = serve(pool_blocks=64)
    with kbtp.connect(server.url, quota=64) as client:
        start = threading.Barrier(8)

        def work(worker: int) -> None:
            start.wait()
            for turn in range(25):
                data = octets(100 * worker + turn, 7 * turn + 4090)
                block = client.alloc_store(data)
                buffer = bytearray(len(data))
                client.load(block, into=buffer)
                assert buffer == data
                client.free(block)

        with ThreadPoolExecutor(8) as pool:
            for done in [pool.submit(work, worker) for worker in range(8)]:
                done.result()
        assert server.free_blocks == 64


def test_blocks_that_cannot_be_counted_cost_no_session(serve: Serve, connect: Connect) -> None:
    client = connect(serve().url)
    block = client.alloc_store(b"stays")
    with pytest.raises(TypeError):
        client.free_many(one for one in [block])
    assert not client.closed
    client.free(block)
