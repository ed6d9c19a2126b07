"""Ctrl-C, and what else may end the demo early: no process is left behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import kbtp

# The first part is a target with an index beside it and a process that would never end.
UNENDING = """
import asyncio, run
from child import running, serving

async def unending(*_):
    async with serving(8, 4096, "--index") as target, running("model", "-c", WAITS, environment={}):
        print((await target.hear_serving()).index_url, flush=True)
        await asyncio.Event().wait()

WAITS = "import signal; signal.pause()"
run.hand_over = unending
run.main([])
"""


def descendants(pid: int) -> set[int]:
    """Processes that `pid` has started, and those that they have started."""
    parents: dict[int, int] = {}
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            try:
                stat = (folder / "stat").read_text()
            except (FileNotFoundError, ProcessLookupError):
                continue  # it has ended meanwhile
            parents[int(folder.name)] = int(stat.rpartition(")")[2].split()[1])
    found: set[int] = set()
    while more := {child for child, parent in parents.items() if parent in {pid, *found}} - found:
        found |= more
    return found


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_no_process_is_left(demo_folder: Path, number: signal.Signals) -> None:
    folders = [str(Path(kbtp.__file__).parents[1]), str(demo_folder)]
    with subprocess.Popen(
        [sys.executable, "-c", UNENDING],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(folders)},
    ) as demo:
        assert demo.stdout is not None
        lines = iter(demo.stdout.readline, "")
        assert any(line.startswith("valkey://") for line in lines)
        started = descendants(demo.pid)
        assert len(started) == 3, "the target, its index and the model"

        demo.send_signal(number)
        assert "stopped; all processes have ended" in demo.stdout.read()
    assert demo.returncode == 130
    assert not [pid for pid in started if Path(f"/proc/{pid}").exists()]
