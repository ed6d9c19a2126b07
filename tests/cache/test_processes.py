"""Writers in processes of their own: killed in any state, and many at once on the same keys."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import pytest

from kbtp.cache import Cache
from kbtp.cache.embedded import EmbeddedIndex
from kbtp.testing.cache_writer import KEYS, LONGEST_BYTES, STEPS_OF_A_PUT, is_whole, value_of

from .conftest import WatchedServer

DEADLINE_S = 50.0


@pytest.fixture(scope="module")
def index_url() -> Iterator[str]:
    embedded = EmbeddedIndex()
    yield embedded.url
    embedded.close()


@pytest.fixture
def spawn(index_url: str) -> Iterator[Callable[..., subprocess.Popen[str]]]:
    with ExitStack() as stack:

        def start(target: WatchedServer, seed: int, puts: int = 1, killed_at: int = -1) -> subprocess.Popen[str]:
            process = subprocess.Popen(
                [
                    sys.executable,
                    "-m",
                    "kbtp.testing.cache_writer",
                    index_url,
                    target.url,
                    *map(str, (seed, puts, killed_at)),
                ],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "KBTP_SPIN_US": "0"},
            )
            stack.enter_context(process)
            stack.callback(process.kill)
            return process

        yield start


def answer(process: subprocess.Popen[str]) -> dict[str, Any]:
    assert process.stdout is not None
    said: dict[str, Any] = json.loads(process.stdout.readline())
    return said


def test_the_values_can_be_told_apart() -> None:
    value = value_of(KEYS[3], 5, 7)
    assert is_whole(KEYS[3], value)
    assert not is_whole(KEYS[4], value)
    assert not is_whole(KEYS[3], value[:-1])
    assert not is_whole(KEYS[3], value[:-1] + b"x")
    assert not is_whole(KEYS[3], b"")


@pytest.mark.parametrize("killed_at", range(STEPS_OF_A_PUT))
def test_a_killed_writer_leaks_nothing_and_leaves_nothing_half(
    serve: Callable[..., WatchedServer], spawn: Callable[..., subprocess.Popen[str]], index_url: str, killed_at: int
) -> None:
    target = serve(linger_s=0.2, pool_blocks=32)
    process = spawn(target, seed=killed_at, puts=3, killed_at=killed_at)
    assert process.wait(DEADLINE_S) == -signal.SIGKILL
    with Cache(index_url, targets=[target.url], namespace="shared", read_only=True) as reader:
        into = [bytearray(LONGEST_BYTES + 100) for _ in KEYS]
        for key, item, buffer in zip(KEYS, reader.get_many_into(KEYS, into), into, strict=True):
            assert not item.ok or is_whole(key, bytes(buffer[: item.length_bytes]))
        assert target.wait_until(lambda: target.used_blocks == 0)
        assert not any(item.ok for item in reader.get_many_into(KEYS, into))


def test_many_writers_on_the_same_keys(
    serve: Callable[..., WatchedServer], spawn: Callable[..., subprocess.Popen[str]]
) -> None:
    target = serve(linger_s=0, pool_blocks=64)
    processes = [spawn(target, seed, puts=600) for seed in range(6)]
    for process in processes:
        assert answer(process) == {"ready": True}
    for process in processes:
        assert process.stdin is not None
        process.stdin.write("\n")
        process.stdin.flush()
    told = [answer(process) for process in processes]
    assert sum(one["wrong"] for one in told) == 0
    assert sum(one["hits"] for one in told) > 100
    assert sum(one["evictions"] for one in told) > 0
    assert all(one["corrupt_values"] == one["bad_records"] == one["index_failures"] == 0 for one in told)
    for process in processes:
        assert process.wait(DEADLINE_S) == 0
    assert target.wait_until(lambda: target.used_blocks == 0)
