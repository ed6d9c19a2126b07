"""A target, a hostile peer on a bare socket, and a neighbour that must notice nothing."""

from __future__ import annotations

import json
import logging
import os
import random
import secrets
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

import kbtp
from kbtp.address import Address
from kbtp.iwarp import events
from kbtp.iwarp.mpa import ActiveStartup, MpaOptions, MpaRejected
from kbtp.iwarp.stream import IwarpStream
from kbtp.keys import Key
from kbtp.target.config import TargetConfig
from kbtp.target.server import Server
from kbtp.types import Feature, TerminateCause
from kbtp.verbs.api import Access, Rnic
from kbtp.verbs.stag_table import Region, StagTable
from kbtp.wire import ConnectionData, Hello, Nonces, parse_response, sign_hello

DEADLINE_S = 10.0
LOOK_AGAIN_S = 0.01  # what the RNIC does by itself nobody tells
MESSAGE_BYTES = 1024


class WatchedServer(Server):
    """A target in a thread of its own that tells when it has done something, so that a test can wait for a state."""

    def __init__(self, config: TargetConfig, rnic: Rnic) -> None:
        super().__init__(config, rnic)
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


class TargetProcess:
    """`target_process.py`, and what it says."""

    def __init__(self, rnic_name: str, **config: Any) -> None:
        self._process = subprocess.Popen(
            [sys.executable, str(Path(__file__).with_name("target_process.py")), json.dumps(config), rnic_name],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        )
        ready = self._answer()
        self.url: str = ready["url"]
        self.free_blocks: int = ready["free_blocks"]

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        answer: dict[str, Any] = json.loads(self._process.stdout.readline())
        return answer

    def after_all_have_left(self) -> dict[str, Any]:
        assert self._process.stdin is not None
        self._process.stdin.write(b"free?\n")
        self._process.stdin.flush()
        return self._answer()

    def stop(self) -> None:
        self._process.communicate(timeout=DEADLINE_S)


@pytest.fixture
def target_process(best_rnic: str) -> Iterator[Callable[..., TargetProcess]]:
    """`target_process(**config)`: a target in a process of its own."""
    with ExitStack() as stack:

        def start(**config: Any) -> TargetProcess:
            process = TargetProcess(best_rnic, **config)
            stack.callback(process.stop)
            return process

        yield start


class Warnings(logging.Handler):
    """Every line of warning or worse that any part of kbtp logs."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self._changed = threading.Condition()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        with self._changed:
            self.lines.append(record.getMessage())
            self._changed.notify_all()

    def wait_for_one(self) -> str:
        """The first line, as soon as it is there."""
        with self._changed:
            assert self._changed.wait_for(lambda: self.lines, DEADLINE_S), "nothing was logged"
            return self.lines[0]


@pytest.fixture
def warnings() -> Iterator[Warnings]:
    handler = Warnings()
    logging.getLogger("kbtp").addHandler(handler)
    yield handler
    logging.getLogger("kbtp").removeHandler(handler)


@pytest.fixture
def serve(new_rnic: Callable[..., Rnic], best_rnic: str) -> Iterator[Callable[..., WatchedServer]]:
    """`serve(rnic, **config)`: a running target; unless `config` says otherwise, of 16 blocks of 8 KiB."""
    with ExitStack() as stack:

        def start(rnic: Rnic | None = None, **config: Any) -> WatchedServer:
            defaults = {"block_size_bytes": 8192, "pool_blocks": 16, "quota": 4}
            server = WatchedServer(TargetConfig(**{**defaults, **config}), rnic or new_rnic())
            stack.callback(server.stop)
            server.start()
            return server

        yield start


class Peer:
    """The initiator's side of a connection by hand, from TCP up: it can say anything at any time."""

    def __init__(self, url: str, *, receive_buffer_bytes: int | None = None) -> None:
        address = Address.parse(url)
        self.socket = socket.socket()
        if receive_buffer_bytes is not None:
            self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer_bytes)
        self.socket.settimeout(DEADLINE_S)
        self.socket.connect((address.host, address.port))
        self._nonce = secrets.token_bytes(16)
        self.startup = ActiveStartup(MpaOptions(), ConnectionData(self._nonce).pack(), 16, 16)
        table = StagTable(lambda: secrets.randbits(32))
        self._pd = table.allocate_pd()
        self._memory = table.memory_for(self, self._pd)
        self._table = table
        self.stream: Any = None
        self._buffers = [bytearray(MESSAGE_BYTES) for _ in range(64)]

    # --- what it has -----------------------------------------------------------------------------

    def register(self, buffer: object) -> Region:
        access = Access.REMOTE_READ | Access.REMOTE_WRITE
        return self._table.register(buffer, access, pd=self._pd, scope=self._memory)

    # --- what it does ----------------------------------------------------------------------------

    def start_mpa(self) -> None:
        self.socket.sendall(self.startup.request)
        result = None
        while result is None:
            result = self.startup.receive_data(self.socket.recv(1))
        assert not isinstance(result, MpaRejected)
        self.nonces = Nonces(self._nonce, ConnectionData.parse(result.private_data).nonce)
        self.stream = IwarpStream(result, self._memory, active=True)
        for slot, buffer in enumerate(self._buffers):
            self.stream.post_receive(slot, memoryview(buffer))

    def open_session(self, **fields: Any) -> Any:
        """From the MPA Request to HELLO_ACK, which is returned."""
        self.start_mpa()
        return self.hello(**fields)

    def hello(self, *, key: Key | None = None, **fields: Any) -> Any:
        hello = Hello(
            **{
                "request_id": 0,
                "requested_features": Feature.INVALIDATE,
                "requested_quota": 0,
                "requested_handles": 0,
                "completion_credits": 32,
                "max_message": MESSAGE_BYTES,
                "initiator_id": bytes(16),
                **fields,
            }
        )
        self.send(hello.pack() if key is None else sign_hello(hello, key, self.nonces))
        return self.receive()

    def fpdus_of(self, message: bytes) -> bytes:
        """The octets of a Send on the wire."""
        self.stream.post_send(0, [message])
        return b"".join(self.stream.data_to_send(1 << 30))

    def send(self, *messages: bytes) -> None:
        """Sends, all in one write to the socket."""
        self.socket.sendall(b"".join(self.fpdus_of(message) for message in messages))

    def answer(self) -> None:
        """Send what the stream owes the target."""
        while octets := b"".join(self.stream.data_to_send(1 << 16)):
            self.socket.sendall(octets)

    def read(self, stag: int, to: int, length: int) -> bytes:
        """RDMA Read, done when this returns."""
        sink = bytearray(length)
        self.stream.post_read(0, memoryview(sink), stag, to)
        self.answer()
        self._next(events.ReadCompleted)
        return bytes(sink)

    def write(self, stag: int, to: int, data: bytes) -> None:
        """RDMA Write."""
        self.stream.post_write(0, [data], stag, to)
        self.answer()

    def fetch_add(self, stag: int, to: int, add_data: int, add_mask: int) -> int:
        """What was there before."""
        self.stream.post_fetch_add(0, stag, to, add_data, add_mask)
        self.answer()
        return int(self._next(events.AtomicCompleted).value)

    # --- what it sees ----------------------------------------------------------------------------

    def receive(self) -> Any:
        """The target's next message."""
        event = self._next(events.Received)
        buffer = self._buffers[event.wr_id]
        message = bytes(buffer[: event.length])
        self.stream.post_receive(event.wr_id, memoryview(buffer))
        return parse_response(message)

    def terminate(self) -> tuple[int, int, int]:
        """Layer, error type and code of the Terminate that the target sends."""
        info = self._next(events.TerminateReceived).info
        return info.layer, info.etype, info.code

    def refusal(self) -> TerminateCause:
        """Why this side's RNIC ends the stream."""
        return self._next(events.Failed).error.cause

    def _next(self, kind: type) -> Any:
        while True:
            while (event := self.stream.next_event()) is not None:
                if isinstance(event, kind):
                    return event
            data = self.socket.recv(1 << 16)
            assert data, "the target closed the connection"
            self.stream.receive_data(data)
            self.answer()

    def is_closed_by_target(self) -> bool:
        """True once the target has closed; what it still sends is read and dropped."""
        try:
            while self.socket.recv(1 << 16):
                continue
        except ConnectionResetError:
            pass
        return True

    def reset(self) -> None:
        """Vanish: RST instead of FIN."""
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.socket.close()


@pytest.fixture
def peer() -> Iterator[Callable[..., Peer]]:
    """`peer(url)`: a `Peer`, connected by TCP and no further."""
    with ExitStack() as stack:

        def connect(url: str, **arguments: Any) -> Peer:
            one = Peer(url, **arguments)
            stack.callback(one.socket.close)
            return one

        yield connect


class Neighbour:
    """A well-behaved client at work all the time: stores, loads, compares octet for octet, frees."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._changed = threading.Condition()
        self._rounds = 0
        self._leave = False
        self._executor = ThreadPoolExecutor(1)
        self._outcome = self._executor.submit(self._work)

    def _work(self) -> None:
        rng = random.Random(5040)
        with kbtp.connect(self._url, quota=2, name="neighbour", timeout_s=DEADLINE_S) as client:
            while not self._leave:
                data = rng.randbytes(rng.choice((1, 4096, 4097, 8192)))
                block = client.alloc_store(data)
                buffer = bytearray(len(data))
                assert client.load(block, into=buffer) == len(data)
                assert buffer == data
                client.free(block)
                with self._changed:
                    self._rounds += 1
                    self._changed.notify_all()

    def works_on(self) -> bool:
        """Wait for two more rounds: at least one began after this was called."""
        with self._changed:
            goal = self._rounds + 2
            return self._changed.wait_for(lambda: self._rounds >= goal or self._outcome.done(), DEADLINE_S) and (
                not self._outcome.done()
            )

    def leave(self) -> None:
        """Raises what went wrong."""
        self._leave = True
        self._outcome.result(DEADLINE_S)
        self._executor.shutdown()


@pytest.fixture
def neighbour() -> Iterator[Callable[[str], Neighbour]]:
    """`neighbour(url)`: a `Neighbour` at work until the end of the test."""
    neighbours: list[Neighbour] = []

    def start(url: str) -> Neighbour:
        neighbours.append(Neighbour(url))
        assert neighbours[-1].works_on()
        return neighbours[-1]

    yield start
    for one in neighbours:
        one.leave()
