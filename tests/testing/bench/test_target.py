"""A target of a measurement, and what spins beside it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

import kbtp
from kbtp.testing.bench.process import cpu_seconds
from kbtp.testing.bench.target import PROCESS, THREAD, TargetProcess, TargetSettings

DEADLINE_S = 30.0
BLOCK_BYTES = 4096


@pytest.fixture
def start() -> Iterator[Callable[..., TargetProcess]]:
    """`start(threads=2)`: a target with such settings."""
    with ExitStack() as stack:

        def start(rnic: str, **settings: object) -> TargetProcess:
            target = TargetProcess(TargetSettings(BLOCK_BYTES, 8, rnic, **settings))  # type: ignore[arg-type]
            stack.callback(target.stop)
            return target

        yield start


def children_of(pid: int) -> list[int]:
    lists = Path(f"/proc/{pid}/task").glob("*/children")
    return [int(child) for path in lists for child in path.read_text().split()]


def wait_until(holds: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + DEADLINE_S
    while not holds():
        assert time.monotonic() < deadline_s


def state_of(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


def stores_and_loads(target: TargetProcess) -> bool:
    with kbtp.connect(target.url, quota=4) as client:
        buffer = bytearray(2)
        client.load(client.alloc_store(b"is"), into=buffer)
        return buffer == b"is"


@pytest.mark.parametrize("rnic", ["native", "reference"])
def test_a_thread_of_its_own_spins_and_it_serves(start: Callable[..., TargetProcess], rnic: str) -> None:
    target = start(rnic, beside=THREAD)
    before_s = cpu_seconds([target.pid])
    wait_until(lambda: cpu_seconds([target.pid]) > before_s + 0.05)
    assert stores_and_loads(target)


def test_another_process_spins_and_is_frozen_and_ends_with_it(start: Callable[..., TargetProcess]) -> None:
    target = start("reference", beside=PROCESS)
    assert stores_and_loads(target)
    [spinner] = children_of(target.pid)
    before_s = cpu_seconds([spinner])
    wait_until(lambda: cpu_seconds([spinner]) > before_s + 0.05)
    target.freeze()
    wait_until(lambda: state_of(spinner) == "T")
    target.stop()
    wait_until(lambda: not Path(f"/proc/{spinner}").exists() or state_of(spinner) == "Z")


def test_it_has_as_many_event_loops_as_asked(start: Callable[..., TargetProcess]) -> None:
    target = start("native", threads=2)

    def names() -> list[str]:
        found = [path.read_text().strip() for path in Path(f"/proc/{target.pid}/task").glob("*/comm")]
        return sorted(name for name in found if name.startswith("kbtp-rnic"))

    wait_until(lambda: names() == ["kbtp-rnic-0", "kbtp-rnic-1"])
    assert stores_and_loads(target)


def test_requests_that_are_left_to_python_are_answered_too(start: Callable[..., TargetProcess]) -> None:
    assert stores_and_loads(start("native", forced_punts=1.0))
