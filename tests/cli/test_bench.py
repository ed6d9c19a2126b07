"""`kbtp bench`."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from kbtp.cli import main
from kbtp.rnic import open_rnic
from kbtp.target.config import TargetConfig
from kbtp.target.server import Server

Run = Callable[..., tuple[int, str, str]]
POOL_BLOCKS = 32
SHORT = ("--rnic", "reference", "--rounds", "2", "--seconds", "10ms", "--outstanding", "4")
DEADLINE_S = 30.0


@pytest.fixture
def server() -> Iterator[Server]:
    """32 blocks of 4 KiB, in this process."""
    server = Server(TargetConfig(block_size_bytes=4096, pool_blocks=POOL_BLOCKS), open_rnic("reference"))
    server.url = str(server.listen(port=0))  # type: ignore[attr-defined]
    server.start()
    yield server
    server.stop()


@pytest.fixture
def url(server: Server) -> str:
    url: str = server.url  # type: ignore[attr-defined]
    return url


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Run:
    """`run(*arguments)`: exit status, standard output and standard error of `kbtp bench`."""

    def call(*arguments: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["kbtp", "bench", *arguments])
        with pytest.raises(SystemExit) as ended:
            main()
        captured = capsys.readouterr()
        assert isinstance(ended.value.code, int)
        return ended.value.code, captured.out, captured.err

    return call


def children_of(pid: int) -> set[int]:
    lists = Path(f"/proc/{pid}/task").glob("*/children")
    return {int(child) for path in lists for child in path.read_text().split()}


def test_a_target_that_is_given(run: Run, server: Server, url: str) -> None:
    before = children_of(os.getpid())
    status, out, err = run(url, *SHORT, "--block-size", "4KiB", "--initiators", "1", "--initiators", "2",
                           "--pid", str(os.getpid()), "--json")  # fmt: skip
    assert (status, err) == (0, "")
    told: dict[str, Any] = json.loads(out)
    assert (told["url"], told["rounds"], told["initiator_rnic"], told["left_out"]) == (url, 2, "reference", [])
    cells = {(row["operation"], row["outstanding"], row["initiators"]): row for row in told["rows"]}
    assert set(cells) == {
        (operation, outstanding, initiators)
        for operation in ("load", "store", "alloc+free")
        for outstanding in (1, 4)
        for initiators in (1, 2)
    }
    for (operation, outstanding, _), row in cells.items():
        assert row["verified"] >= (row["calls"] * outstanding if operation == "load" else 2 * outstanding)
        for metric in ("p50_us", "p99_us", "p999_us", "gb_per_s", "operations_per_s"):
            assert 0 < row[metric]["low"] <= row[metric]["median"] <= row[metric]["high"]
        assert row["p50_us"]["median"] <= row["p99_us"]["median"] <= row["p999_us"]["median"]
    assert server.target.store.free_blocks == POOL_BLOCKS
    assert children_of(os.getpid()) == before


def test_without_a_target_it_starts_one(run: Run) -> None:
    before = children_of(os.getpid())
    status, out, err = run(*SHORT, "--block-size", "1MiB", "--operation", "load", "--initiators", "1")
    assert (status, err) == (0, "")
    words = " ".join(out.split())
    assert "load 1 MiB 1 " in words
    assert "median of 2 rounds of 0.01 s, ± half of their range; contents verified; " in words
    assert "target on the reference RNIC, initiator on the reference RNIC" in words
    assert words.count("±") >= 6
    assert children_of(os.getpid()) == before


def test_what_the_target_has_no_room_for_is_left_out_aloud(run: Run, url: str) -> None:
    sizes = ("--block-size", "4KiB", "--block-size", "64KiB")
    status, out, err = run(url, *SHORT, *sizes, "--operation", "load", "--initiators", "1", "--initiators", "8")
    assert (status, err) == (0, "")
    assert "64 KiB was left out: the target's blocks have 4 KiB" in out
    assert "8 initiators were left out: with 4 outstanding each they need 64 blocks, the target has 32" in out


def test_if_nothing_is_left_that_is_an_error(run: Run, url: str) -> None:
    status, out, err = run(url, *SHORT, "--block-size", "64KiB", "--initiators", "1")
    assert (status, out) == (2, "")
    assert err.startswith("kbtp: nothing is left to measure: 64 KiB was left out")


def test_a_target_without_room_is_one_line_and_status_1(run: Run, server: Server, url: str) -> None:
    import kbtp

    with kbtp.connect(url, quota=POOL_BLOCKS - 4):
        status, out, err = run(url, *SHORT, "--block-size", "4KiB", "--initiators", "1")
    assert (status, out) == (1, "")
    assert "the target grants 4 blocks; to measure, 8 are needed" in err
    assert len(err.splitlines()) == 1


def test_a_dead_port_is_one_line_and_status_1(run: Run) -> None:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        port = one.getsockname()[1]
    status, out, err = run(f"kbtp://127.0.0.1:{port}")
    assert (status, out) == (1, "")
    assert len(err.splitlines()) == 1
    assert "Connection refused" in err


def test_a_process_that_is_not_there_is_one_line_and_status_1(run: Run, url: str) -> None:
    status, out, err = run(url, *SHORT, "--block-size", "4KiB", "--initiators", "1", "--pid", str(1 << 30))
    assert (status, out, err) == (1, "", f"kbtp: there is no process {1 << 30}\n")


@pytest.mark.parametrize(
    "arguments",
    [
        ("http://127.0.0.1",),
        ("--block-size", "much"),
        ("--block-size", "15"),
        ("--operation", "dance"),
        ("--outstanding", "1"),
        ("--seconds", "forever"),
        ("--pid", "1"),
    ],
)
def test_what_cannot_work_is_one_line_and_status_2(run: Run, arguments: tuple[str, ...]) -> None:
    status, out, err = run(*arguments)
    assert (status, out) == (2, "")
    assert len(err.splitlines()) == 1


def test_ctrl_c_leaves_nothing_behind() -> None:
    """Interrupted while target and initiators are at work."""
    bench = subprocess.Popen(
        [sys.executable, "-m", "kbtp", "bench", *SHORT[:2], "--block-size", "1MiB", "--initiators", "2"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    deadline_s = time.monotonic() + DEADLINE_S
    while len(children := children_of(bench.pid)) < 3:
        assert time.monotonic() < deadline_s
        assert bench.poll() is None
    bench.send_signal(signal.SIGINT)
    bench.communicate(timeout=DEADLINE_S)
    assert bench.returncode == 130
    # One that was just being started ends by itself, as its standard input does.
    while any(Path(f"/proc/{pid}").exists() for pid in children):
        assert time.monotonic() < deadline_s
