"""The bare-socket baseline, kbtp and the peers' minimal clients, each measured for a moment."""

from __future__ import annotations

import socket
import struct
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path
from types import ModuleType

import pytest

from bench.contenders import SLOTS, Kbtp, Peer
from bench.peers import bare_sockets
from bench.peers.lmcache import LMCache
from bench.peers.lmcache_minimal import MinimalLMCache
from bench.peers.text import Memcached, Resp, TextClient
from kbtp.testing.bench.figures import LOAD, OPERATIONS, STORE, Cell
from kbtp.testing.bench.process import BenchFailed
from kbtp.testing.bench.workload import Slots, Workload

SOURCE = Path(__file__).parents[2] / "bench" / "baseline" / "floor.c"
BLOCK_BYTES = 1 << 20
SECONDS = 0.02


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The baseline, built as the Makefile does, and without a warning."""
    built = tmp_path_factory.mktemp("floor") / "floor.so"
    warnings = ["-Wall", "-Wextra", "-Werror"]
    subprocess.run(["cc", "-O2", *warnings, "-shared", "-fPIC", "-pthread", "-o", built, SOURCE], check=True)
    return built


@pytest.mark.parametrize("spin_us", [0, 50])
@pytest.mark.parametrize("operation", [LOAD, STORE])
def test_the_baseline(library: Path, operation: str, spin_us: int) -> None:
    floor = Peer(bare_sockets.kind("bare sockets", library, spin_us))
    floor.open(BLOCK_BYTES, 2)
    try:
        for outstanding, initiators in ((1, 1), (SLOTS, 1), (4, 2)):
            figures = floor.measure(Cell(operation, BLOCK_BYTES, outstanding, initiators), SECONDS)
            assert figures.calls >= initiators
            assert figures.verified >= initiators * outstanding
            assert figures.gb_per_s > 0
    finally:
        floor.close()


def test_the_baseline_says_what_it_cannot_do(library: Path) -> None:
    with pytest.raises(BenchFailed, match="cannot serve"):
        bare_sockets.target(1 << 60, str(library), "0")
    with socket.create_server(("127.0.0.1", 0)) as gone:
        port = gone.getsockname()[1]
    with pytest.raises(BenchFailed, match="cannot connect: Connection refused"):
        bare_sockets.BareSockets(Slots(1, 64), 1, {"library": str(library), "port": port, "spin_us": 0})


def test_kbtp() -> None:
    kbtp = Kbtp("kbtp", rnic="reference", spin_us=0, blocks=SLOTS)
    kbtp.open(4096, 1)
    try:
        for operation in OPERATIONS:
            for outstanding in (1, 4):
                assert kbtp.measure(Cell(operation, 4096, outstanding), SECONDS).verified >= outstanding
    finally:
        kbtp.close()
    assert kbtp.told == {"target": "reference", "initiators": "reference"}


# --- the text protocols, against servers that know as much of them as is needed ---


def serve_resp(stream: socket.socket) -> None:
    """SET and GET."""
    kept: dict[bytes, bytes] = {}
    with stream, stream.makefile("rwb") as file:
        while (head := file.readline()).startswith(b"*"):
            words = []
            for _ in range(int(head[1:])):
                words.append(file.read(int(file.readline()[1:])))
                file.readline()
            if words[0] == b"SET":
                kept[words[1]] = words[2]
                file.write(b"+OK\r\n")
            else:
                value = kept.get(words[1])
                file.write(b"$-1\r\n" if value is None else b"$%d\r\n%s\r\n" % (len(value), value))
            file.flush()


def serve_memcached(stream: socket.socket) -> None:
    """set and get."""
    kept: dict[bytes, bytes] = {}
    with stream, stream.makefile("rwb") as file:
        while words := file.readline().split():
            if words[0] == b"set":
                kept[words[1]] = file.read(int(words[4]))
                file.readline()
                file.write(b"STORED\r\n")
            else:
                value = kept[words[1]]
                file.write(b"VALUE %s 0 %d\r\n%s\r\nEND\r\n" % (words[1], len(value), value))
            file.flush()


Server = Callable[[socket.socket], None]


@pytest.fixture
def serving() -> Iterator[Callable[[Server], int]]:
    """`serving(server)`: the port where it serves one connection."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        threads: list[threading.Thread] = []

        def start(server: Server) -> int:
            threads.append(threading.Thread(target=lambda: server(listener.accept()[0])))
            threads[0].start()
            port: int = listener.getsockname()[1]
            return port

        yield start
        for thread in threads:
            thread.join()


def serve_lmcache(stream: socket.socket) -> None:
    """PUT, GET and EXIST, with the headers of LMCache."""
    kept: dict[bytes, bytes] = {}
    with stream, stream.makefile("rwb") as file:
        while header := file.read(9 * 4 + 150):
            command, length, layout, kind, _, *shape = struct.unpack("9i", header[:36])
            key = header[36:].rstrip()
            assert key.startswith(b"bench@1@0@")
            assert int(key.split(b"@")[3], 16) > 0
            if command == 1:
                kept[key] = file.read(length)
                assert shape == [length, 1, 1, 1]
                continue
            code, value = (200, kept[key]) if key in kept else (400, b"")
            if command == 3:
                file.write(struct.pack("9i", code, 0, 1, 2, 0, 0, 0, 0, 0))
            else:
                file.write(struct.pack("9i", code, len(value), layout, kind, len(value), 1, 1, 1, 0) + value)
            file.flush()


@pytest.mark.parametrize(
    ("kind", "server"), [(Resp, serve_resp), (Memcached, serve_memcached), (MinimalLMCache, serve_lmcache)]
)
def test_a_text_client(kind: type[TextClient], server: Server, serving: Callable[[Server], int]) -> None:
    slots = Slots(4, 1024)
    client = kind(slots, 8, {"port": serving(server)})
    try:
        workload = Workload(client, slots, 8)
        for operation in OPERATIONS:
            for outstanding in (1, 4):
                assert workload.measure(operation, outstanding, SECONDS).verified >= outstanding
    finally:
        client.close()


# --- LMCache's protocol classes, and stand-ins for these ---


class Code(IntEnum):
    PUT, GET, EXIST = 1, 2, 3
    SUCCESS, FAIL = 200, 400


@dataclass
class Key:
    model: str
    world_size: int
    worker: int
    chunk_hash: int
    dtype: int

    def to_string(self) -> str:
        return f"{self.model}@{self.world_size}@{self.worker}@{self.chunk_hash:x}@uint8"


@dataclass
class ClientMessage:
    command: Code
    key: Key
    length: int
    fmt: int
    dtype: int
    shape: tuple[int, ...]

    def serialize(self) -> bytes:
        fields = (self.command, self.length, self.fmt, self.dtype, 0, *self.shape)
        return struct.pack("9i150s", *fields, self.key.to_string().encode().ljust(150))


@dataclass
class ServerMessage:
    code: Code
    length: int

    @staticmethod
    def packlength() -> int:
        return 36

    @classmethod
    def deserialize(cls, octets: memoryview) -> ServerMessage:
        code, length = struct.unpack_from("2i", octets)
        return cls(Code(code), length)


@pytest.fixture
def lmcache(monkeypatch: pytest.MonkeyPatch) -> None:
    protocol = {"ClientCommand": Code, "ServerReturnCode": Code, "ClientMetaMessage": ClientMessage}
    for name, content in (
        ("torch", {"uint8": 6, "float16": 2, "Size": tuple}),
        ("lmcache", {}),
        ("lmcache.utils", {"CacheEngineKey": Key}),
        ("lmcache.v1", {}),
        ("lmcache.v1.memory_management", {"MemoryFormat": int}),
        ("lmcache.v1.protocol", {**protocol, "ServerMetaMessage": ServerMessage}),
    ):
        module = ModuleType(name)
        vars(module).update(content)
        monkeypatch.setitem(sys.modules, name, module)


@pytest.mark.usefixtures("lmcache")
def test_a_client_of_lmcaches_classes(serving: Callable[[Server], int]) -> None:
    slots = Slots(4, 1024)
    client = LMCache(slots, 8, {"port": serving(serve_lmcache)})
    try:
        workload = Workload(client, slots, 8)
        for operation in OPERATIONS:
            for outstanding in (1, 4):
                assert workload.measure(operation, outstanding, SECONDS).verified >= outstanding
    finally:
        client.close()


@pytest.mark.usefixtures("lmcache")
def test_lmcaches_refusals_are_noticed(serving: Callable[[Server], int]) -> None:
    client = LMCache(Slots(4, 1024), 8, {"port": serving(serve_lmcache)})
    try:
        with pytest.raises(BenchFailed, match="GET: FAIL"):
            client.load([1], 0)()
    finally:
        client.close()


def test_what_was_not_stored_is_noticed(serving: Callable[[Server], int]) -> None:
    def refuse(stream: socket.socket) -> None:
        with stream:
            stream.recv(1)
            stream.sendall(b"-OOM command not allowed when used memory > 'maxmemory'.\r\n")

    slots = Slots(4, 1024)
    client = Resp(slots, 8, {"port": serving(refuse)})
    try:
        with pytest.raises(BenchFailed, match="not stored"):
            client.fill([0, 1])
    finally:
        client.close()
