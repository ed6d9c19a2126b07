"""Time limits and interruptions: the session ends first, so that no buffer is touched after the call has returned."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
import time
from collections.abc import Callable
from typing import Any, NoReturn

import pytest

import kbtp
from kbtp.errors import ConnectionLost, DeadlineExceeded

Connect = Callable[..., Any]
FakeTargets = Callable[..., Any]
Serve = Callable[..., Any]


def half_written(target: Any) -> None:
    """Writes half of a LOAD, and the rest when the client has given up."""
    target.open_session()
    load = target.receive()
    target.write(b"1" * 3000, load.data.stag, load.data.to)
    target.session_over.wait(10)
    try:
        target.write(b"2" * 3000, load.data.stag, load.data.to + 3000)
        target.complete(load, data_length=6000)
    except ConnectionLost:
        assert target.stream is not None
    target.ended()


def test_after_the_deadline_no_write_of_the_target_lands(fake_target: FakeTargets, connect: Connect) -> None:
    """Profile 3: until the completion or the end of the stream the buffer is the target's."""
    target = fake_target(half_written)
    client = connect(target.url)
    buffer = bytearray(6000)
    with pytest.raises(DeadlineExceeded, match=r"did not answer within 0\.2 s.*longer timeout_s"):
        client.load(1000, into=buffer, timeout_s=0.2)
    assert client.closed
    seen = bytes(buffer)
    target.finish()
    assert buffer == seen
    assert buffer[3000:] == bytes(3000)


def test_after_the_deadline_no_read_of_the_target_sees_the_buffer(fake_target: FakeTargets, connect: Connect) -> None:
    def script(target: Any) -> None:
        target.open_session()
        store = target.receive()
        target.session_over.wait(10)
        with pytest.raises(ConnectionLost):
            target.read(5000, store.data.stag, store.data.to)

    target = fake_target(script)
    client = connect(target.url)
    with pytest.raises(DeadlineExceeded):
        client.alloc_store(bytes(5000), timeout_s=0.1)
    with pytest.raises(ConnectionLost):
        client.register(bytearray(1))


def test_the_deadline_of_a_batch_ends_all_of_it(fake_target: FakeTargets, connect: Connect) -> None:
    def script(target: Any) -> None:
        target.open_session(request_credits=2)
        target.complete(target.receive())
        target.ended()

    client = connect(fake_target(script).url, timeout_s=0.2)
    results = client.free_many([1000, 1001, 1002, 1003])
    assert results[0].ok
    assert all(isinstance(result.error, DeadlineExceeded) for result in results[1:])
    assert isinstance(client.free_many([1000])[0].error, DeadlineExceeded)


def test_closing_does_not_wait_for_a_target_that_does_not(
    fake_target: FakeTargets, connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kbtp.limits.CLOSE_S", 0.05)

    def script(target: Any) -> None:
        target.open_session()
        target.session_over.wait(10)

    client = connect(fake_target(script).url)
    client.close()
    assert client.closed


# --- interruptions -----------------------------------------------------------------------------


def test_ctrl_c_while_waiting_ends_the_session(fake_target: FakeTargets) -> None:
    """By a real signal: it comes once the LOAD is half done."""

    def script(target: Any) -> None:
        target.open_session()
        load = target.receive()
        target.write(b"1" * 3000, load.data.stag, load.data.to)
        os.kill(os.getpid(), signal.SIGINT)
        target.ended()

    target = fake_target(script)
    client = kbtp.connect(target.url)
    buffer = bytearray(6000)
    with pytest.raises(KeyboardInterrupt):
        client.load(1000, into=buffer)
    assert client.closed
    seen = bytes(buffer)
    target.finish()
    assert buffer == seen
    with pytest.raises(ConnectionLost, match="interrupted"):
        client.load(1000, into=buffer)


def test_an_interruption_while_a_batch_is_looked_at_ends_the_session(serve: Serve, connect: Connect) -> None:
    """Its first requests may be under way, and the buffers are the caller's again."""

    class Interrupting:
        def __dlpack_device__(self) -> tuple[int, int]:
            raise KeyboardInterrupt

        def __dlpack__(self) -> NoReturn:
            raise AssertionError

    client = connect(serve().url, quota=9)
    data = [bytes(2000)] * 8
    with pytest.raises(KeyboardInterrupt):
        client.alloc_store_many([*data, Interrupting()])
    assert client.closed
    assert all(isinstance(result.error, ConnectionLost) for result in client.alloc_store_many(data))


class InterruptingClock:
    """`time` as the client sees it, which is interrupted at its `at`-th reading."""

    def __init__(self, at: int) -> None:
        self._left = at

    def monotonic(self) -> float:
        self._left -= 1
        if self._left == 0:
            raise KeyboardInterrupt
        return time.monotonic()


def test_ctrl_c_while_connecting_or_closing_leaves_nothing_open(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    url = serve().url
    before = len(os.listdir("/proc/self/fd"))
    monkeypatch.setattr("kbtp.initiator.client.time", InterruptingClock(3))
    with pytest.raises(KeyboardInterrupt):
        kbtp.connect(url)
    monkeypatch.setattr("kbtp.initiator.client.time", time)
    client = kbtp.connect(url)
    monkeypatch.setattr("kbtp.initiator.client.time", InterruptingClock(2))
    with pytest.raises(KeyboardInterrupt):
        client.close()
    assert client.closed
    client.close()
    client_side = len(os.listdir("/proc/self/fd")) - before
    assert client_side <= 2  # the target may not have seen yet that both are gone


def test_a_cancelled_call_ends_when_its_operation_has(fake_target: FakeTargets) -> None:
    """Until then its buffer is the target's."""

    async def scenario(target: Any) -> bytes:
        client = await kbtp.connect_async(target.url)
        buffer = bytearray(6000)
        call = asyncio.create_task(client.load(1000, into=buffer))
        await asyncio.get_running_loop().run_in_executor(None, target.load_came.wait, 10)
        call.cancel()
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert not call.done()
        target.go_on.set()
        with pytest.raises(asyncio.CancelledError):
            await call
        seen = bytes(buffer)
        assert not client.closed
        await client.close()
        return seen

    def script(target: Any) -> None:
        target.open_session()
        load = target.receive()
        target.load_came.set()
        target.go_on.wait(10)
        target.write(b"2" * 6000, load.data.stag, load.data.to)
        target.complete(load, data_length=6000)
        target.ended()

    target = with_events(fake_target, script)
    assert asyncio.run(scenario(target)) == b"2" * 6000


def test_a_cancelled_call_waits_no_longer_than_its_deadline(fake_target: FakeTargets) -> None:
    async def scenario(target: Any) -> None:
        client = await kbtp.connect_async(target.url)
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(client.load(1000, into=bytearray(6000), timeout_s=0.2), 0.01)
        assert client.closed

    asyncio.run(scenario(fake_target(half_written)))


def with_events(fake_target: FakeTargets, script: Callable[[Any], None]) -> Any:
    """A target with the two more events that the test and its script need."""
    load_came, go_on = threading.Event(), threading.Event()

    def run(target: Any) -> None:
        target.load_came, target.go_on = load_came, go_on
        script(target)

    target = fake_target(run)
    target.load_came, target.go_on = load_came, go_on
    return target
