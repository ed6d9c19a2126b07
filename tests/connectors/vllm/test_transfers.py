"""What a worker loads in time, without an engine, over a cache that answers when the test says so."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from kbtp.connectors.troubles import Troubles
from kbtp.connectors.vllm.connector import log
from kbtp.connectors.vllm.pages import LANES, Pages, Staging
from kbtp.connectors.vllm.worker import THREADS, Shard, Transfers

BLOCKS = 8
TIMEOUT_S = 0.2
LONG_S = 600.0


class HeldCache:
    """Finds all it is asked for, once it is let go."""

    def __init__(self) -> None:
        self.asked: list[bytes] = []
        self.go = threading.Event()

    def get_many_into(self, names: Sequence[bytes], into: Sequence[memoryview]) -> list[Any]:
        self.asked += names
        self.go.wait()
        return [SimpleNamespace(ok=True, length_bytes=len(one)) for one in into]

    def register(self, octets: memoryview) -> Any:
        return SimpleNamespace(revoke=lambda: None)

    def close(self) -> None:
        """Nothing is open."""


SHARD = Shard(b"layout", 0, 0)


@pytest.fixture
def held() -> HeldCache:
    return HeldCache()


@pytest.fixture
def open_transfers(held: HeldCache) -> Iterator[Callable[[float], Transfers]]:
    """With a staging area for one block at a time and lane."""
    opened: list[Transfers] = []

    def open_(timeout_s: float) -> Transfers:
        pages = Pages({"layer": torch.zeros(BLOCKS, 2, 32, 64)}, BLOCKS)
        staging = Staging(pages, LANES * pages.row_bytes)
        opened.append(Transfers(held, SHARD, pages, staging, timeout_s, Troubles(log)))  # type: ignore[arg-type]
        return opened[-1]

    yield open_
    held.go.set()
    for one in opened:
        one.close()


def passed(since_s: float) -> Callable[[], bool]:
    return lambda: time.monotonic() > since_s + TIMEOUT_S


def test_a_load_that_waited_too_long_for_its_turn_is_not_begun(
    held: HeldCache, open_transfers: Callable[[float], Transfers], wait_until: Callable[..., bool]
) -> None:
    transfers = open_transfers(TIMEOUT_S)
    for number in range(THREADS):
        transfers.load(f"request {number}", [(b"block %d" % number, number)])
    assert wait_until(lambda: len(held.asked) == THREADS)
    transfers.load("late", [(b"late", BLOCKS - 1)])
    assert wait_until(passed(time.monotonic()))
    held.go.set()
    ended: set[str] = set()
    assert wait_until(lambda: ended.update(transfers.finished()) or "late" in ended)
    assert SHARD.key_of(b"late") not in held.asked
    assert transfers.take_failed() == {BLOCKS - 1}


def test_nor_is_the_rest_of_a_load_whose_time_is_over(
    held: HeldCache, open_transfers: Callable[[float], Transfers], wait_until: Callable[..., bool]
) -> None:
    transfers = open_transfers(TIMEOUT_S)
    transfers.load("request", [(b"first", 3), (b"second", 4)])
    assert wait_until(lambda: held.asked == [SHARD.key_of(b"first")])
    assert wait_until(passed(time.monotonic()))
    held.go.set()
    assert wait_until(transfers.finished)
    assert held.asked == [SHARD.key_of(b"first")]
    assert transfers.take_failed() == {4}


def test_in_time_all_of_it_is_loaded(
    held: HeldCache, open_transfers: Callable[[float], Transfers], wait_until: Callable[..., bool]
) -> None:
    transfers = open_transfers(LONG_S)
    held.go.set()
    transfers.load("request", [(b"first", 3), (b"second", 4)])
    assert wait_until(transfers.finished)
    assert held.asked == [SHARD.key_of(b"first"), SHARD.key_of(b"second")]
    assert transfers.take_failed() == set()
