"""Programs run by a Python that waits for them are as if they had been started."""

from __future__ import annotations

import select
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from interop import ready_python

DEADLINE_S = 20.0
START = """
import sys
from interop import ready_python
ready_python.PLACE, ready_python.MODULES = sys.argv.pop(1), ()
ready_python.main()
"""


@pytest.fixture
def command(tmp_path: Path) -> Iterator[list[str]]:
    """What `python` would be."""
    program = [sys.executable, "-c", START, str(tmp_path / "place")]
    with subprocess.Popen([*program, "serve"], stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        assert server.stdout.readline().strip() == ready_python.LISTENS
        yield program
        server.kill()


def test_standard_files_arguments_and_status(command: list[str]) -> None:
    pipe = subprocess.PIPE
    tool = [*command, "-m", "json.tool", "--compact"]
    good = subprocess.run(tool, input='{"a": [1]}', capture_output=True, text=True, timeout=DEADLINE_S, check=False)
    assert (good.stdout, good.stderr, good.returncode) == ('{"a":[1]}\n', "", 0)
    bad = subprocess.run(tool, input="{", stdout=pipe, stderr=pipe, text=True, timeout=DEADLINE_S, check=False)
    assert (bad.stdout, bad.returncode) == ("", 1)
    assert "Expecting property name" in bad.stderr


def test_several_run_side_by_side(command: list[str]) -> None:
    tool = [*command, "-m", "json.tool", "--compact"]
    pipe = subprocess.PIPE
    with subprocess.Popen(tool, stdin=pipe, stdout=pipe, text=True) as first:
        second = subprocess.run(tool, input="2", capture_output=True, text=True, timeout=DEADLINE_S, check=False)
        assert second.stdout == "2\n"
        assert first.communicate("1", DEADLINE_S)[0] == "1\n"


def test_a_program_ends_with_its_caller(command: list[str]) -> None:
    pipe = subprocess.PIPE
    with subprocess.Popen([*command, "-m", "code"], stdin=pipe, stderr=pipe) as caller:
        assert caller.stdin is not None and caller.stderr is not None
        assert caller.stderr.readline().startswith(b"Python"), "it is at work, and waits for more"
        caller.kill()
        gone = select.poll()
        gone.register(caller.stdin, select.POLLERR)
        assert gone.poll(DEADLINE_S * 1000), "nobody reads from it any more"
