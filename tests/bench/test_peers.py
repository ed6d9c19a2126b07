"""How peers are found, and the clients of those that are Python packages, over stand-ins for these."""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

from bench.peers import KINDS, environments, peercache
from bench.peers.client import PROTOCOLS, connect
from bench.peers.mooncake import engine_target, store_target
from bench.peers.target import TARGETS
from kbtp.testing.bench.figures import OPERATIONS
from kbtp.testing.bench.process import BenchFailed, Message
from kbtp.testing.bench.workload import Slots, Workload

BLOCK_BYTES = 1024
SLOTS, BLOCKS = 4, 8
OCTETS = (BLOCKS + SLOTS) * BLOCK_BYTES


# --- where they are ----------------------------------------------------------------------------


def test_a_package_is_found_in_an_environment_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KBTP_BENCH_PEERS", str(tmp_path))
    assert environments.interpreter_with("a_peer", "home") is None
    installed = tmp_path / "home" / "lib" / "python3.12" / "site-packages" / "a_peer"
    installed.mkdir(parents=True)
    assert environments.interpreter_with("a_peer", "home") == str(tmp_path / "home" / "bin" / "python")
    assert environments.package_folder("a_peer", "home") == installed
    assert environments.wanted("home", "a-peer").startswith(f"python3 -m venv {tmp_path}/home && ")


def test_what_can_be_imported_here_needs_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KBTP_BENCH_PEERS", str(tmp_path))
    assert environments.interpreter_with("numpy", "home") == sys.executable


def test_other_interpreters_find_this_project_and_nothing_else_of_ours() -> None:
    places = [Path(place) for place in environments.sources()["PYTHONPATH"].split(":")]
    assert [sorted(place.glob("*/__init__.py")) != [] for place in places] == [True, True]
    assert not any("site-packages" in place.parts for place in places)


def test_each_kind_has_a_client_and_is_not_there_where_nothing_is_installed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KBTP_BENCH_PEERS", str(tmp_path))
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    for kind in KINDS:
        assert kind.protocol in PROTOCOLS
        assert kind.find() is None
        with pytest.raises(BenchFailed, match="is not here any more"):
            kind.start(OCTETS, None)


# --- the clients of packages, and stand-ins for these that move octets within this process ----


def move(to: int, of: int, length: int) -> bool:
    ctypes.memmove(to, of, length)
    return True


class Transport:
    """Of PeerCache."""

    def __init__(self, settings: SimpleNamespace) -> None:
        assert settings.rdma_bind_host == "127.0.0.1"

    def register_mr(self, address: int, length: int) -> None:
        return

    def local_endpoint(self) -> str:
        return "here"

    def batch_read_v(self, _: list[str], here: list[int], there: list[int], __: list[int], sizes: list[int]) -> object:
        return [move(*each) for each in zip(here, there, sizes, strict=True)]

    def batch_write_v(self, _: list[str], here: list[int], there: list[int], __: list[int], sizes: list[int]) -> object:
        return [move(*each) for each in zip(there, here, sizes, strict=True)]

    def close(self) -> None:
        return


class Engine:
    """Of Mooncake."""

    def initialize(self, *_: str) -> int:
        return 0

    def get_rpc_port(self) -> int:
        return 1

    def register_memory(self, address: int, length: int) -> int:
        return 0

    def unregister_memory(self, address: int) -> int:
        return 0

    def transfer_sync_read(self, _: str, here: int, there: int, size: int) -> int:
        return 0 if move(here, there, size) else -1

    def transfer_sync_write(self, _: str, here: int, there: int, size: int) -> int:
        return 0 if move(there, here, size) else -1

    def batch_transfer_sync_read(self, _: str, here: list[int], there: list[int], sizes: list[int]) -> int:
        return 0 if all(move(*each) for each in zip(here, there, sizes, strict=True)) else -1

    def batch_transfer_sync_write(self, _: str, here: list[int], there: list[int], sizes: list[int]) -> int:
        return 0 if all(move(*each) for each in zip(there, here, sizes, strict=True)) else -1


class ObjectStore:
    """Of Mooncake: what is there must be removed before it is put anew."""

    objects: dict[str, bytes]

    def __init__(self) -> None:
        self.objects = {}

    def setup(self, *_: object) -> int:
        return 0

    def register_buffer(self, address: int, length: int) -> int:
        return 0

    def remove(self, key: str, force: bool) -> int:
        del self.objects[key]
        return 0

    def put_from(self, key: str, address: int, size: int) -> int:
        if key in self.objects:
            return -705
        self.objects[key] = ctypes.string_at(address, size)
        return 0

    def get_into(self, key: str, address: int, size: int) -> int:
        ctypes.memmove(address, self.objects[key], size)
        return len(self.objects[key])

    def batch_put_from(self, keys: list[str], addresses: list[int], sizes: list[int]) -> list[int]:
        return [self.put_from(*each) for each in zip(keys, addresses, sizes, strict=True)]

    def batch_get_into(self, keys: list[str], addresses: list[int], sizes: list[int]) -> list[int]:
        return [self.get_into(*each) for each in zip(keys, addresses, sizes, strict=True)]

    def close(self) -> None:
        return


@pytest.fixture(autouse=True)
def stand_ins(monkeypatch: pytest.MonkeyPatch) -> None:
    for module, name, stand_in in (
        ("peercache.transport", "TcpTransport", Transport),
        ("mooncake.engine", "TransferEngine", Engine),
        ("mooncake.store", "MooncakeDistributedStore", ObjectStore),
    ):
        for package in (module.partition(".")[0], module):
            monkeypatch.setitem(sys.modules, package, ModuleType(package))
        setattr(sys.modules[module], name, stand_in)


Target = Callable[[], tuple[object, Message]]


@pytest.mark.parametrize(
    ("protocol", "target"),
    [
        ("peercache", lambda: peercache.target(OCTETS)),
        ("mooncake-engine", lambda: engine_target(OCTETS)),
        ("mooncake-store", lambda: store_target(OCTETS, "127.0.0.1:1")),
    ],
)
def test_what_is_stored_comes_back(protocol: str, target: Target) -> None:
    assert protocol in TARGETS
    _alive, told = target()
    slots = Slots(SLOTS, BLOCK_BYTES)
    server, blocks, _ = connect(protocol, slots, BLOCKS, told)
    workload = Workload(server, slots, blocks)
    for operation in OPERATIONS:
        for outstanding in (1, SLOTS):
            assert workload.measure(operation, outstanding, 0.005).verified >= outstanding
    server.close()


def test_what_fails_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Transport, "batch_write_v", lambda *_: [True, False])
    monkeypatch.setattr(Engine, "batch_transfer_sync_write", lambda *_: -1)
    monkeypatch.setattr(ObjectStore, "batch_put_from", lambda *_: [0, -200])
    for protocol, told in (
        ("peercache", {"address": 0, "endpoint": "here"}),
        ("mooncake-engine", {"address": 0, "name": "here"}),
        ("mooncake-store", {"master": "here"}),
    ):
        server, _, _ = connect(protocol, Slots(SLOTS, BLOCK_BYTES), BLOCKS, told)
        with pytest.raises(BenchFailed):
            server.fill([0, 1])
