"""A real target in a thread, a target that does what a script says, and both clients behind one face."""

from __future__ import annotations

import asyncio
import inspect
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import Any

import pytest

import kbtp
from kbtp.errors import ConnectionLost
from kbtp.rnic import open_rnic
from kbtp.target.config import TargetConfig
from kbtp.target.server import Server
from kbtp.types import Feature, Status
from kbtp.verbs.api import (
    Access,
    ConnectRequest,
    Event,
    RdmaRead,
    RdmaWrite,
    Recv,
    Send,
    Sge,
    StreamEnded,
    WcOpcode,
    WcStatus,
    WorkCompletion,
)
from kbtp.wire import Completion, ConnectionData, Hello, HelloAck, parse_request

DEADLINE_S = 10.0
LOOK_AGAIN_S = 0.01  # what the RNIC does by itself nobody tells
OWN_DATA = ConnectionData(nonce=bytes(16)).pack()
MESSAGE_BYTES = 16384


class WatchedServer(Server):
    """A target in a thread of its own that tells when it has done something, so that a test can wait for a state."""

    def __init__(self, config: TargetConfig) -> None:
        super().__init__(config, open_rnic())
        self.changed = threading.Condition()
        self.url = str(self.listen(port=0))

    def _step(self, until_s: float = float("inf")) -> None:
        super()._step(until_s)
        with self.changed:
            self.changed.notify_all()

    def wait_until(self, predicate: Callable[[], bool]) -> bool:
        deadline_s = time.monotonic() + DEADLINE_S
        with self.changed:
            while not (seen := predicate()) and time.monotonic() < deadline_s:
                self.changed.wait(LOOK_AGAIN_S)
        return seen

    @property
    def free_blocks(self) -> int:
        return self.target.store.free_blocks


@pytest.fixture
def serve(best_rnic: str) -> Iterator[Callable[..., WatchedServer]]:
    """`serve(**config)`: a running target; unless `config` says otherwise, of 16 blocks of 8 KiB, 4 a session."""
    with ExitStack() as stack:

        def start(**config: Any) -> WatchedServer:
            server = WatchedServer(TargetConfig(**{"block_size_bytes": 8192, "pool_blocks": 16, "quota": 4, **config}))
            stack.callback(server.stop)
            server.start()
            return server

        yield start


class FakeTarget:
    """Runs `script(self)` in a thread; the methods are the script's. Everything has a deadline."""

    def __init__(self, script: Callable[[FakeTarget], None]) -> None:
        self._rnic = open_rnic()
        self._pd = self._rnic.allocate_pd()
        self._channel = self._rnic.open_channel()
        self.port = self._channel.listen("127.0.0.1", 0).address[1]
        self.url = f"kbtp://127.0.0.1:{self.port}"
        self._events: deque[Event] = deque()
        self._messages = self._rnic.register(bytearray(64 * MESSAGE_BYTES), Access.NONE, pd=self._pd)
        self.stream: Any = None
        self.session_over = threading.Event()
        """Set by the test when the client is done with the session."""
        self._script = script
        self._executor = ThreadPoolExecutor(1)
        self._outcome = self._executor.submit(self._run)

    def _run(self) -> None:
        try:
            self._script(self)
        finally:
            self._channel.close()

    def finish(self) -> None:
        """Raises what the script raised."""
        self.session_over.set()
        self._outcome.result(DEADLINE_S)
        self._executor.shutdown()

    def _next(self, wanted: Callable[[Event], bool]) -> Any:
        deadline_s = time.monotonic() + DEADLINE_S
        while True:
            for event in list(self._events):
                if wanted(event):
                    self._events.remove(event)
                    return event
            assert time.monotonic() < deadline_s, "the client did not do what the script waits for"
            self._events.extend(self._channel.poll(0.5))

    def connect_request(self) -> Any:
        return self._next(lambda event: isinstance(event, ConnectRequest))

    def accept(self, private_data: bytes = OWN_DATA) -> None:
        """Take the next connection; `stream` is it from now on."""
        request = self.connect_request()
        self.peer_nonce = ConnectionData.parse(request.private_data).nonce
        self.stream = request.accept(
            pd=self._pd,
            private_data=private_data,
            ird=16,
            ord_=16,
            receives=[Recv(slot, Sge(self._messages, slot * MESSAGE_BYTES, MESSAGE_BYTES)) for slot in range(64)],
        )

    def receive(self) -> Any:
        """The next request, parsed. A script receives fewer than 64."""
        return parse_request(self.receive_octets())

    def receive_octets(self) -> bytes:
        event = self._next(
            lambda event: (
                isinstance(event, WorkCompletion)
                and event.stream is self.stream
                and event.opcode is WcOpcode.RECV
                and event.status is WcStatus.SUCCESS
            )
        )
        start = event.wr_id * MESSAGE_BYTES
        return bytes(self._messages.view[start : start + event.length])

    def send(self, message: bytes, *, invalidate_stag: int | None = None) -> None:
        self.stream.post([Send(0, inline=message, invalidate_stag=invalidate_stag)])

    def write(self, octets: bytes, stag: int, to: int) -> None:
        region = self._rnic.register(octets, Access.NONE, pd=self._pd)
        self.stream.post([RdmaWrite(1, (Sge(region, 0, len(octets)),), stag, to)])

    def read(self, length: int, stag: int, to: int) -> bytes:
        sink = self._rnic.register(bytearray(length), Access.NONE, pd=self._pd)
        self.stream.post([RdmaRead(2, Sge(sink, 0, length), stag, to)])
        done = self._next(lambda event: isinstance(event, WorkCompletion) and event.opcode is WcOpcode.RDMA_READ)
        if done.status is WcStatus.FLUSHED:
            raise ConnectionLost("the stream ended before the read was answered")
        return bytes(sink.view)

    def expose(self, memory: Any, access: Access, base_to: int = 0) -> Any:
        """Let the initiator of this stream reach `memory` from tagged offset `base_to` on."""
        return self._rnic.register(memory, access, pd=self._pd, stream=self.stream, base_to=base_to)

    def ended(self) -> StreamEnded:
        return self._next(lambda event: isinstance(event, StreamEnded) and event.stream is self.stream)

    def hello_ack(self, **changes: Any) -> bytes:
        fields: dict[str, Any] = {
            "status": Status.SUCCESS,
            "granted_features": Feature.INVALIDATE,
            "block_size": 8192,
            "pool_blocks": 16,
            "allocation_quota": 4,
            "request_credits": 4,
            "max_message": 4096,
            "first_handle": 1000,
            "handle_count": 8,
            "table_base_handle": 1000,
            "table_handles": 64,
            "pool_base": 65536,
        }
        return HelloAck(0, **{**fields, **changes}).pack()

    def open_session(self, **changes: Any) -> Hello:
        """Accept, take HELLO, answer it."""
        self.accept()
        hello = self.receive()
        assert isinstance(hello, Hello)
        self.send(self.hello_ack(**changes))
        return hello

    def complete(self, request: Any, status: Status = Status.SUCCESS, **changes: Any) -> None:
        fields = {"request_id": request.request_id, "handle": request.handle, "generation": 2, "status": status}
        self.send(Completion(**{**fields, **changes}).pack())


@pytest.fixture
def fake_target(best_rnic: str) -> Iterator[Callable[..., FakeTarget]]:
    """`fake_target(script)`: a `FakeTarget`; what its script found wrong is raised at the end of the test."""
    targets: list[FakeTarget] = []

    def start(script: Callable[[FakeTarget], None]) -> FakeTarget:
        targets.append(FakeTarget(script))
        return targets[-1]

    yield start
    for target in targets:
        target.finish()


class AwaitedClient:
    """An `AsyncClient` with the face of a `Client`: each call runs the loop until it is done."""

    def __init__(self, loop: asyncio.AbstractEventLoop, client: kbtp.AsyncClient) -> None:
        self._loop = loop
        self._client = client

    def __getattr__(self, name: str) -> Any:
        member = getattr(self._client, name)
        if not inspect.iscoroutinefunction(member):
            return member
        return lambda *args, **kwargs: self._loop.run_until_complete(member(*args, **kwargs))

    def __enter__(self) -> AwaitedClient:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


@pytest.fixture(params=["Client", "AsyncClient"])
def connect(request: pytest.FixtureRequest, best_rnic: str) -> Iterator[Callable[..., Any]]:
    """`connect(url, **arguments)`: a client of either kind."""
    with ExitStack() as stack:
        if request.param == "Client":
            yield lambda url, **arguments: stack.enter_context(kbtp.connect(url, **arguments))
        else:
            loop = asyncio.new_event_loop()
            stack.callback(loop.close)
            yield lambda url, **arguments: stack.enter_context(
                AwaitedClient(loop, loop.run_until_complete(kbtp.connect_async(url, **arguments)))
            )
