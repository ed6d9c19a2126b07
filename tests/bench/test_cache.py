"""`make bench-cache`: it runs, says a line a requirement, and its status is what they say."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from click.testing import CliRunner

from bench.cache.__main__ import main

ROOT = Path(__file__).parents[2]
TRACE = ROOT / "tests" / "cache" / "mooncake_cut.jsonl"
DEADLINE_S = 40.0


def test_each_requirement_is_a_line() -> None:
    quick = ["--only", "traces", "--only", "behaviour", "--kills", "2", "--writers", "2", "--writers-for", "1s"]
    result = CliRunner().invoke(main, [*quick, str(TRACE)])
    assert (result.exit_code, result.stdout.count("ok     ")) == (0, 8), result.output
    assert "short" not in result.stdout


def test_speed_is_compared_with_the_session_below() -> None:
    result = CliRunner().invoke(main, ["--only", "speed", "--block-size", "1MiB", "--rounds", "1", "--seconds", "20ms"])
    assert result.exit_code in (0, 1), result.output
    for judged in ("get_into / LOAD", "put / ALLOC_STORE"):
        assert f"32 of 1 MiB, {judged}, GB/s" in result.stdout
    assert "shown  32 of 1 MiB, put and delete / ALLOC_STORE and FREE, GB/s: " in result.stdout
    assert "kbtp.Cache: load, 1 of 1 MiB: p50" in result.stdout


def test_what_was_not_shown_does_not_hold() -> None:
    result = CliRunner().invoke(main, ["--only", "traces"])
    assert (result.exit_code, result.stdout) == (1, "short  traces: none was given, so nothing was shown\n")


def test_whoever_ends_it_leaves_nothing_behind() -> None:
    """Also of those that are frozen between their turns."""
    command = "-m bench.cache --only speed --block-size 4KiB --rounds 500 --seconds 5ms".split()
    bench = subprocess.Popen(
        [sys.executable, *command],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        cwd=ROOT,
    )
    deadline_s = time.monotonic() + DEADLINE_S
    while len(children := _children_of(bench.pid)) < 3 or not any(map(_is_frozen, children)):
        assert time.monotonic() < deadline_s
        assert bench.poll() is None
    bench.terminate()
    assert bench.wait(DEADLINE_S) == 128 + signal.SIGTERM
    while any(Path(f"/proc/{pid}").exists() for pid in children):
        assert time.monotonic() < deadline_s


def _children_of(pid: int) -> set[int]:
    lists = Path(f"/proc/{pid}/task").glob("*/children")
    return {int(child) for path in lists for child in path.read_text().split()}


def _is_frozen(pid: int) -> bool:
    return "\nState:\tT" in Path(f"/proc/{pid}/status").read_text()
