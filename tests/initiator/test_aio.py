"""What is particular to the asyncio client: many tasks, one loop, no thread."""

from __future__ import annotations

import asyncio
import random
import threading
from collections.abc import Callable
from typing import Any

import crc32c
import pytest

import kbtp
from kbtp.errors import ApiMisuse, ConnectionLost, DeadlineExceeded

Serve = Callable[..., Any]
FakeTargets = Callable[..., Any]


def test_many_tasks_share_a_client(serve: Serve) -> None:
    """More of them than credits; every load sees what its own store stored."""
    server = serve(pool_blocks=128, request_credits=8)

    async def one(client: kbtp.AsyncClient, seed: int) -> None:
        data = random.Random(seed).randbytes(seed * 31)
        block = await client.alloc_store(data)
        buffers = [bytearray(len(data)) for _ in range(3)]
        lengths = await asyncio.gather(*(client.load(block, into=buffer) for buffer in buffers))
        assert lengths == [len(data)] * 3
        assert buffers == [data] * 3
        await client.free(block)

    async def scenario() -> None:
        async with await kbtp.connect_async(server.url, quota=128) as client:
            await asyncio.gather(*(one(client, seed) for seed in range(100)))
            assert server.free_blocks == 128

    asyncio.run(scenario())


def test_several_clients_in_one_loop(serve: Serve) -> None:
    server = serve()

    async def scenario() -> None:
        clients = await asyncio.gather(*(kbtp.connect_async(server.url, quota=1) for _ in range(8)))
        blocks = await asyncio.gather(*(client.alloc_store(bytes([n]) * 5000) for n, client in enumerate(clients)))
        buffers = [bytearray(5000) for _ in clients]
        await asyncio.gather(
            *(client.load(blocks[-1 - n], into=buffers[n]) for n, client in enumerate(clients)),
        )
        assert [buffer[0] for buffer in buffers] == [7, 6, 5, 4, 3, 2, 1, 0]
        await asyncio.gather(*(client.close() for client in clients))

    asyncio.run(scenario())
    assert server.wait_until(lambda: server.free_blocks == 16)


def test_the_deadline_of_one_task_ends_the_session_of_all(fake_target: FakeTargets) -> None:
    def script(target: Any) -> None:
        target.open_session()
        target.receive()
        target.receive()
        target.ended()

    async def scenario(url: str) -> None:
        client = await kbtp.connect_async(url)
        patient = asyncio.create_task(client.free(1000))
        with pytest.raises(DeadlineExceeded):
            await client.free(1001, timeout_s=0.1)
        with pytest.raises(DeadlineExceeded, match=r"within 0\.1 s"):
            await patient
        await client.close()

    asyncio.run(scenario(fake_target(script).url))


def test_closing_with_operations_outstanding_ends_them(
    fake_target: FakeTargets, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kbtp.limits.CLOSE_S", 0.1)

    def script(target: Any) -> None:
        target.open_session()
        target.receive()
        target.session_over.wait(10)

    async def scenario(url: str) -> None:
        client = await kbtp.connect_async(url)
        call = asyncio.create_task(client.load(1000, into=bytearray(100)))
        await asyncio.sleep(0)
        await asyncio.gather(client.close(), client.close())
        with pytest.raises(ConnectionLost):
            await call

    asyncio.run(scenario(fake_target(script).url))


def test_an_operation_begun_while_closing_ends_with_the_session(serve: Serve) -> None:
    async def scenario(url: str) -> None:
        client = await kbtp.connect_async(url)
        closing = asyncio.create_task(client.close())
        await asyncio.sleep(0)
        with pytest.raises(ConnectionLost):
            await client.alloc_store(b"x")
        await closing

    asyncio.run(scenario(serve().url))


def test_a_cancelled_connect_leaves_nothing_behind(fake_target: FakeTargets) -> None:
    hello_came = threading.Event()

    def script(target: Any) -> None:
        target.accept()
        target.receive()
        hello_came.set()
        target.ended()

    async def scenario(url: str) -> None:
        connecting = asyncio.create_task(kbtp.connect_async(url))
        await asyncio.get_running_loop().run_in_executor(None, hello_came.wait, 10)
        connecting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await connecting

    asyncio.run(scenario(fake_target(script).url))


def test_a_cancelled_close_closes(fake_target: FakeTargets) -> None:
    def script(target: Any) -> None:
        target.open_session()
        target.session_over.wait(10)

    async def scenario(url: str) -> None:
        client = await kbtp.connect_async(url)
        closing = asyncio.create_task(client.close())
        await asyncio.sleep(0)
        closing.cancel()
        with pytest.raises(asyncio.CancelledError):
            await closing
        assert client.closed

    asyncio.run(scenario(fake_target(script).url))


def test_cancelling_twice_waits_once(fake_target: FakeTargets) -> None:
    def script(target: Any) -> None:
        target.open_session()
        load = target.receive()
        target.complete(load)
        target.ended()

    async def scenario(url: str) -> None:
        client = await kbtp.connect_async(url)
        call = asyncio.create_task(client.load(1000, into=bytearray(100)))
        await asyncio.sleep(0)
        call.cancel()
        await asyncio.sleep(0)
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        assert not client.closed
        await client.close()

    asyncio.run(scenario(fake_target(script).url))


def test_checksums_of_batches_are_as_the_client_has_them(serve: Serve, best_rnic: str) -> None:
    async def scenario(url: str) -> None:
        async with await kbtp.connect_async(url) as client:
            data, buffer = bytes(range(200)) * 30, bytearray(6000)
            expected = [crc32c.crc32c(data) if best_rnic == "native" else -1]
            stored = await client.alloc_store_many([data], checksums=True)
            assert stored.checksums.tolist() == expected
            loaded = await client.load_many(stored.refs, [buffer], checksums=True)
            assert (loaded.checksums.tolist(), buffer) == (expected, data)

    asyncio.run(scenario(serve().url))


def test_batches_that_are_over_before_they_begin(serve: Serve) -> None:
    async def scenario(url: str) -> None:
        async with await kbtp.connect_async(url) as client:
            assert await client.free_many([]) == []
            results = await client.load_many([-1, -2], into=[bytearray(1), bytearray(1)])
            assert [type(result.error) for result in results] == [ApiMisuse, ApiMisuse]

    asyncio.run(scenario(serve().url))


def test_the_loop_does_other_things_meanwhile(serve: Serve) -> None:
    """A large load, and a task that wants its turns."""
    server = serve(block_size_bytes=8 << 20, pool_blocks=2, quota=1)
    turns = 0

    async def others(done: asyncio.Event) -> None:
        nonlocal turns
        while not done.is_set():
            turns += 1
            await asyncio.sleep(0)

    async def scenario() -> None:
        done = asyncio.Event()
        task = asyncio.create_task(others(done))
        async with await kbtp.connect_async(server.url) as client:
            block = await client.alloc_store(bytes(8 << 20))
            assert await client.load(block, into=bytearray(8 << 20)) == 8 << 20
        done.set()
        await task

    asyncio.run(scenario())
    assert turns > 10
