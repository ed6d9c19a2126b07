"""The parts of the rig that need no guest."""

from __future__ import annotations

import socket
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

import kbtp
from interop.checks import RNICS, open_rnic
from interop.guest import agent
from interop.guest.calls import Call, CallFailed
from interop.operations import BLOCK_BYTES, QUOTA, Kind, Workload
from interop.rping import PingFailed, Server, message, ping
from interop.rtr_choice import without_write_rtr
from interop.startup import Startup, newest_startup
from kbtp.iwarp.mpa import RtrKind
from kbtp.target.config import TargetConfig
from kbtp.target.server import Server as Target
from kbtp.testing.capture import CapturingProxy
from kbtp.types import Feature

DEADLINE_S = 20.0
PINGS = 3
OPERATIONS = 5


def _ping(name: str, port: int, *, rtr: RtrKind = RtrKind.NONE, crc: bool = True, length: int = 64) -> None:
    rnic = open_rnic(name, crc=crc, rtr=rtr)
    ping(rnic, ("127.0.0.1", port), length=length, count=PINGS, timeout_s=DEADLINE_S)


@pytest.mark.parametrize("name", RNICS)
@pytest.mark.parametrize("length", [64, 65_000])
def test_rping_with_itself(name: str, length: int) -> None:
    with ThreadPoolExecutor(1) as beside, Server(open_rnic(name), length, DEADLINE_S) as server:
        served = beside.submit(server.serve, PINGS)
        _ping(name, server.port, length=length)
        served.result(DEADLINE_S)


def test_rping_of_another_count_fails() -> None:
    with ThreadPoolExecutor(1) as beside, Server(open_rnic("reference"), 64, DEADLINE_S) as server:
        served = beside.submit(server.serve, PINGS + 1)
        _ping("native", server.port)
        with pytest.raises(PingFailed, match="the stream ended"):
            served.result(DEADLINE_S)


def test_the_message_is_that_of_rping() -> None:
    assert message(0, 20) == b"rdma-ping-0: ABCDEF\0"
    assert message(57, 18) == b"rdma-ping-57: zAB\0"


@pytest.mark.parametrize("rtr", [RtrKind.NONE, RtrKind.WRITE, RtrKind.READ])
@pytest.mark.parametrize("crc", [True, False])
def test_how_a_recorded_connection_started(rtr: RtrKind, crc: bool, tmp_path: Path) -> None:
    recording = tmp_path / "packets.pcap"
    with (
        ThreadPoolExecutor(1) as beside,
        Server(open_rnic("native", crc=crc), 64, DEADLINE_S) as server,
        CapturingProxy("127.0.0.1", server.port) as proxy,
    ):
        served = beside.submit(server.serve, PINGS)
        _ping("reference", proxy.address[1], rtr=rtr, crc=crc)
        served.result(DEADLINE_S)
    proxy.write(recording)
    assert newest_startup(recording) == Startup(crc, rtr)


def test_the_write_rtr_is_taken_out_of_a_reply(tmp_path: Path) -> None:
    recording = tmp_path / "packets.pcap"
    with (
        ThreadPoolExecutor(1) as beside,
        Server(open_rnic("native"), 64, DEADLINE_S) as server,
        without_write_rtr(server.port) as port,
        CapturingProxy("127.0.0.1", port) as proxy,
    ):
        served = beside.submit(server.serve, PINGS)
        _ping("native", proxy.address[1], rtr=RtrKind.WRITE | RtrKind.READ)
        served.result(DEADLINE_S)
    proxy.write(recording)
    assert newest_startup(recording) == Startup(True, RtrKind.READ)


def test_operations_of_each_kind() -> None:
    config = TargetConfig(block_size_bytes=BLOCK_BYTES, pool_blocks=QUOTA, direct=Feature.DIRECT_LOAD)
    target = Target(config, open_rnic("native"))
    url = str(target.listen(port=0))
    target.start()
    try:
        with kbtp.connect(url, quota=QUOTA, direct="load", timeout_s=DEADLINE_S) as client:
            workload = Workload(client, seed=1, multiple_bytes=1)
            workload.run(OPERATIONS)
    finally:
        target.stop()
    assert all(workload.done[kind] >= OPERATIONS for kind in Kind)


@pytest.fixture
def agent_here(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> tuple[str, int]:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(agent, "HOME", str(tmp_path))
    listener = socket.create_server(("127.0.0.1", 0))

    def serve() -> None:
        with listener:
            caller, _ = listener.accept()
            agent.serve(caller)

    threading.Thread(target=serve, daemon=True).start()
    address: tuple[str, int] = listener.getsockname()
    return address


def test_a_call_has_output_and_status(agent_here: tuple[str, int]) -> None:
    with Call(agent_here, "echo begun; echo more >&2; exit 3") as call:
        assert call.await_line("begun", DEADLINE_S) == "begun"
        done = call.finish(DEADLINE_S)
    assert (done.status, done.output) == (3, "begun\nmore\n")


def test_a_call_that_is_not_done_in_time(agent_here: tuple[str, int]) -> None:
    with Call(agent_here, "echo begun; exec sleep 100") as call:
        call.await_line("begun", DEADLINE_S)
        with pytest.raises(CallFailed, match="is not done in time"):
            call.finish(0.05)
