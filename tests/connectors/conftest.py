"""What the tests of all connectors share: a target that can be killed and comes back, and what its octets say."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

START_S = 30.0
WAIT_S = 60.0
LOOK_AGAIN_S = 0.01


class Cluster:
    """`kbtp serve --index` in a process of its own: a target and, on the port behind its own, its index."""

    def __init__(self, *options: str) -> None:
        self._command = [sys.executable, "-m", "kbtp", "serve", "--json", "--index", "--port", str(_free_pair())]
        self._options = options
        self.start()

    def start(self) -> None:
        """Anew too, on the same port: with nothing in it."""
        self.process = subprocess.Popen(
            [*self._command, *self._options], stdout=subprocess.PIPE, text=True, env=os.environ
        )
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, f"kbtp serve has ended: {self.process.wait(START_S)}"
        self.url: str = json.loads(line)["url"]

    def kill(self) -> None:
        """As the kernel does it when memory is short. The index ends with it."""
        self.process.kill()
        self._gone()

    def freeze(self) -> None:
        """It keeps its connections and answers nothing."""
        self.process.send_signal(signal.SIGSTOP)

    def thaw(self) -> None:
        self.process.send_signal(signal.SIGCONT)

    def corrupt(self, octets: bytes) -> int:
        """Turns a bit of `octets` wherever the target holds them; in how many places."""
        changed = 0
        maps = Path(f"/proc/{self.process.pid}/maps").read_text().splitlines()
        with open(f"/proc/{self.process.pid}/mem", "r+b", buffering=0) as memory:
            for addresses, rights, *_ in (line.split() for line in maps):
                if rights.startswith("rw"):
                    start, end = (int(address, 16) for address in addresses.split("-"))
                    with contextlib.suppress(OSError):  # what the kernel maps there is not for reading
                        memory.seek(start)
                        held = memory.read(end - start)
                        at = held.find(octets)
                        while at >= 0:
                            memory.seek(start + at)
                            memory.write(bytes([octets[0] ^ 1]))
                            changed += 1
                            at = held.find(octets, at + 1)
        return changed

    def stop(self) -> None:
        self.process.kill()
        self._gone()

    def _gone(self) -> None:
        self.process.wait(START_S)
        assert self.process.stdout is not None
        self.process.stdout.close()


def _free_pair() -> int:
    """A port that is free, and the one behind it too."""
    while True:
        with socket.socket() as first, socket.socket() as behind, contextlib.suppress(OSError):
            first.bind(("127.0.0.1", 0))
            port: int = first.getsockname()[1]
            behind.bind(("127.0.0.1", port + 1))
            return port


@pytest.fixture
def start_cluster() -> Iterator[Callable[..., Cluster]]:
    """`start_cluster("--pool-size", "64MiB", ...)`: a `Cluster`, with these options of `kbtp serve`."""
    with ExitStack() as stack:

        def start(*options: str) -> Cluster:
            cluster = Cluster(*options)
            stack.callback(cluster.stop)
            return cluster

        yield start


@pytest.fixture
def cluster(start_cluster: Callable[..., Cluster]) -> Cluster:
    """With room for four writers of 64 MiB each, in blocks of 64 KiB."""
    return start_cluster("--block-size", "64KiB", "--pool-size", "256MiB", "--quota", "1024")


@pytest.fixture
def wait_until() -> Callable[..., bool]:
    """`wait_until(predicate)`: True as soon as it holds, False if it does not within `deadline_s`."""

    def wait(predicate: Callable[[], object], deadline_s: float = WAIT_S) -> bool:
        nothing = threading.Event()  # what a framework does in threads of its own nobody tells
        end_s = time.monotonic() + deadline_s
        while not predicate():
            if time.monotonic() > end_s:
                return False
            nothing.wait(LOOK_AGAIN_S)
        return True

    return wait


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The requirement a test shows is in the report that run.py reads."""
    for item in items:
        for mark in item.iter_markers("requirement"):
            item.user_properties.append(("requirement", mark.args[0]))
