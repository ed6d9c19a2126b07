"""Direct modes between both clients and a real target, over each RNIC."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from typing import Any

import pytest

import kbtp
from kbtp import Feature, Status
from kbtp.errors import AlreadyBound, GenerationMismatch, HandleOutOfRange, LengthError, NoSpace, NotBound, NotSealed

Serve = Callable[..., Any]
Connect = Callable[..., Any]

DIRECT = Feature.DIRECT_LOAD | Feature.DIRECT_ALLOC
BLOCK_BYTES = 8192


def octets(seed: int, length: int) -> bytes:
    return random.Random(seed).randbytes(length)


@pytest.fixture
def target(serve: Serve) -> Any:
    """16 blocks of 8 KiB, 8 of them for direct allocation, 4 a session; tickets wrap."""
    return serve(direct=DIRECT, direct_blocks=8, first_ticket=0xFFFF_FFFA)


@pytest.mark.parametrize("length", [0, 1, 4097, BLOCK_BYTES])
def test_what_was_allocated_directly_is_loaded_directly_and_freed(target: Any, connect: Connect, length: int) -> None:
    client = connect(target.url, direct="load,alloc")
    assert client.features == Feature.INVALIDATE | DIRECT | Feature.MASKED_ATOMICS
    for turn in range(20):
        data = octets(turn, length)
        block = client.alloc_store(data, mode="direct")
        assert block.length_bytes == length
        for mode in ("direct", "request"):
            buffer = bytearray(length + 3)
            assert client.load(block, into=buffer, mode=mode) == length
            assert bytes(buffer) == data + bytes(3)
        client.free(block)
    assert target.free_blocks == 16


def test_both_ways_of_each_operation_meet(target: Any, connect: Connect) -> None:
    """One ring a session (profile 6.10): target-executed allocations and direct ones in turn."""
    client, other = connect(target.url, direct="load,alloc"), connect(target.url)
    for turn in range(12):
        data = [octets(4 * turn + number, 500 * number) for number in range(4)]
        blocks = [
            client.alloc_store(data[0], mode="direct"),
            client.alloc_store(data[1]),
            *client.alloc_store_many(data[2:3], mode="direct").raise_for_status().refs,
            *client.alloc_store_many(data[3:]).raise_for_status().refs,
        ]
        with pytest.raises(NoSpace):
            client.alloc_store(b"x", mode="direct")
        for mode in ("direct", "request"):
            buffers = [bytearray(len(one)) for one in data]
            client.load_many(blocks, into=buffers, mode=mode).raise_for_status()
            assert buffers == data
        buffer = bytearray(1500)
        assert other.load(blocks[3], into=buffer) == 1500
        assert buffer == data[3]
        client.free_many(blocks).raise_for_status()
    assert target.free_blocks == 16


def test_blocks_of_others_are_loaded_directly(target: Any, connect: Connect) -> None:
    owner, reader = connect(target.url), connect(target.url, direct="load")
    assert reader.features == Feature.INVALIDATE | Feature.DIRECT_LOAD
    data = [octets(number, 2000 * number) for number in range(4)]
    blocks = owner.alloc_store_many(data).raise_for_status().refs
    buffers = [bytearray(len(one)) for one in data]
    reader.load_many(blocks, into=buffers, mode="direct").raise_for_status()
    assert buffers == data


def test_memory_registered_read_only_is_loaded_into_all_the_same(target: Any, connect: Connect) -> None:
    """A registration only makes it faster: loads go through another one, stores use it."""
    client = connect(target.url, direct="load,alloc")
    memory = bytearray(octets(1, 5000))
    client.register(memoryview(memory).toreadonly())
    for mode in ("request", "direct"):
        mine, other = client.alloc_store(memory, mode=mode), client.alloc_store(octets(2, 5000), mode=mode)
        assert client.load(other, into=memory, mode=mode) == 5000
        assert memory == octets(2, 5000)
        assert client.load(mine, into=memory, mode=mode) == 5000
        assert memory == octets(1, 5000)


def test_refusals_are_those_of_load(target: Any, connect: Connect) -> None:
    client = connect(target.url, direct="load,alloc")
    block = client.alloc_store(octets(1, 300), seal=False, mode="direct")
    small, buffer = bytearray(299), bytearray(300)
    for mode in ("request", "direct"):
        with pytest.raises(NotSealed, match="allow_unsealed"):
            client.load(block, into=buffer, mode=mode)
        assert client.load(block, into=buffer, allow_unsealed=True, mode=mode) == 300
    client.store(block, octets(2, 300))
    client.free(old := block)
    for mode in ("request", "direct"):
        with pytest.raises(NotBound):
            client.load(old, into=buffer, mode=mode)
        with pytest.raises(HandleOutOfRange):
            client.load((old.handle + (1 << 40)) % (1 << 64), into=buffer, mode=mode)
    new = client.alloc_store(octets(3, 300), handle=old.handle, mode="direct")
    for mode in ("request", "direct"):
        with pytest.raises(GenerationMismatch):
            client.load(old, into=buffer, mode=mode)
        with pytest.raises(LengthError, match="it holds 300 octets"):
            client.load(new, into=small, mode=mode)
    results = client.load_many([new, old, new], into=[buffer, bytearray(300), small], mode="direct")
    assert [result.status for result in results] == [
        Status.SUCCESS, Status.GENERATION_MISMATCH, Status.LENGTH_ERROR,
    ]  # fmt: skip


def test_refusals_of_an_allocation_are_those_of_alloc_store(target: Any, connect: Connect) -> None:
    """Profile 1: the first check that fails names the status."""
    client = connect(target.url, direct="load,alloc")
    bound, outside = client.alloc_store(b"x").handle, connect(target.url).alloc_store(b"x").handle
    spare, too_long = client.terms.first_handle + client.terms.handle_count - 1, bytes(BLOCK_BYTES + 1)
    cases: list[tuple[int, bytes, type[Exception]]] = [
        (outside, too_long, HandleOutOfRange),
        (bound, too_long, AlreadyBound),
        (spare, too_long, LengthError),
        (bound, b"y", AlreadyBound),
    ]
    for handle, data, refusal in cases:
        for mode in ("request", "direct"):
            with pytest.raises(refusal):
                client.alloc_store(data, handle=handle, mode=mode)
    client.alloc_store_many([b"y"] * 3).raise_for_status()
    for handle, data, refusal in [*cases, (spare, b"y", NoSpace)]:
        for mode in ("request", "direct"):
            with pytest.raises(refusal):
                client.alloc_store(data, handle=handle, mode=mode)
    assert client.features & Feature.DIRECT_ALLOC


def test_a_refused_bind_costs_nothing(target: Any, connect: Connect) -> None:
    """Profile 6.11: its ticket is given back, and with it block and quota."""
    client = connect(target.url, direct="load,alloc")
    blocks = [client.alloc_store(b"x", mode="direct") for _ in range(2)]
    for _ in range(10):
        with pytest.raises(AlreadyBound):
            client.alloc_store(b"y", handle=blocks[0].handle, mode="direct")
    assert client.alloc_store_many([b"3", b"4"], mode="direct").ok
    assert client.features & Feature.DIRECT_ALLOC
    assert target.free_blocks == 12


def test_what_is_resumed_is_allocated_and_loaded_directly(target: Any, connect: Connect) -> None:
    """Profile 6.10. Handles that are bound already are passed over, and what they hold counts (draft 3.4)."""
    before = connect(target.url, direct="load,alloc", initiator_id=b"i" * 16)
    kept = before.alloc_store_many([b"one", b"two", b"three"], mode="direct").raise_for_status().refs
    before.close()
    assert target.wait_until(lambda: not target.target.sessions)
    after = connect(target.url, direct="load,alloc", initiator_id=b"i" * 16)
    assert (after.terms.resumed, after.terms.bound_blocks) == (True, 3)
    assert after.features & Feature.DIRECT_ALLOC
    fourth = after.alloc_store(b"four", mode="direct")
    assert fourth.handle not in [block.handle for block in kept]
    with pytest.raises(NoSpace):
        after.alloc_store(b"five", mode="direct")
    buffer = bytearray(5)
    assert after.load(kept[2], into=buffer, mode="direct") == 5
    assert buffer == b"three"
    after.free(kept[0])
    assert after.alloc_store(b"five", mode="direct").length_bytes == 4


def test_a_session_without_a_grant_is_as_before(serve: Serve, connect: Connect) -> None:
    server = serve()
    client = connect(server.url, direct="load,alloc")
    assert client.features == Feature.INVALIDATE
    block = client.alloc_store(octets(1, 5000))
    buffer = bytearray(5000)
    assert client.load(block, into=buffer) == 5000
    assert buffer == octets(1, 5000)


def test_many_tasks_share_a_direct_client(serve: Serve, best_rnic: str) -> None:
    """More of them than credits, reads and quota; a task that finds no quota tries again when another has freed."""
    server = serve(direct=DIRECT, direct_blocks=8, quota=8, request_credits=4)

    async def one(client: kbtp.AsyncClient, seed: int, quota: asyncio.Semaphore) -> None:
        data = octets(seed, 131 * seed)
        async with quota:
            block = await client.alloc_store(data, mode="direct")
            buffers = [bytearray(len(data)) for _ in range(3)]
            await asyncio.gather(*(client.load(block, into=buffer, mode="direct") for buffer in buffers))
            assert buffers == [data] * 3
            await client.free(block)

    async def scenario() -> None:
        quota = asyncio.Semaphore(8)
        async with await kbtp.connect_async(server.url, direct="load,alloc") as client:
            await asyncio.gather(*(one(client, seed, quota) for seed in range(60)))
            assert client.features & Feature.DIRECT_ALLOC

    asyncio.run(scenario())
    assert server.wait_until(lambda: server.free_blocks == 16)


def test_a_ticket_that_the_target_takes_back_leaves_the_session_usable(
    serve: Serve, connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Profile 6.11. The initiator believes to have more time than it has; BIND comes too late."""
    server = serve(direct=DIRECT, direct_blocks=8, ticket_timeout_s=0.05)
    client = connect(server.url, direct="load,alloc")
    monkeypatch.setattr("kbtp.initiator.direct.DirectTerms.ticket_timeout_s", 10.0)
    session = client._session
    sent = session.request
    late: list[bool] = []

    def request_late(operation: Any, **arguments: Any) -> bytes:
        if operation.taken is not None and not late:
            late.append(server.wait_until(lambda: _abandoned(server)))
        return sent(operation, **arguments)

    monkeypatch.setattr(session, "request", request_late)
    block = client.alloc_store(b"", mode="direct")
    assert late == [True]
    assert not client.features & Feature.DIRECT_ALLOC
    assert client.load(block, into=bytearray(1), mode="direct") == 0
    assert client.alloc_store_many([b"x"] * 3, mode="direct").ok


def _abandoned(server: Any) -> bool:
    (session,) = server.target.sessions
    return bool(session._tickets._abandoned)
