"""Targets, an index in this process, and caches over both."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import pytest

from kbtp.cache import Cache, MemoryIndex
from kbtp.rnic import open_rnic
from kbtp.target.config import TargetConfig
from kbtp.target.server import Server

DEADLINE_S = 10.0
LOOK_AGAIN_S = 0.01  # what the RNIC does by itself nobody tells
BLOCK_BYTES = 4096


class Clock:
    """Goes on when it is told to."""

    def __init__(self) -> None:
        self.now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


class WatchedServer(Server):
    """A target that a test can wait for."""

    def __init__(self, *, port: int = 0, **config: Any) -> None:
        defaults = {"block_size_bytes": BLOCK_BYTES, "pool_blocks": 16, "quota": 4}
        super().__init__(TargetConfig(**{**defaults, **config}), open_rnic())
        self.changed = threading.Condition()
        self.url = str(self.listen(port=port))

    def _step(self, until_s: float = float("inf")) -> None:
        super()._step(until_s)
        with self.changed:
            self.changed.notify_all()

    def wait_until(self, predicate: Callable[[], bool]) -> bool:
        deadline_s = time.monotonic() + DEADLINE_S
        with self.changed:
            while not (seen := predicate()) and time.monotonic() < deadline_s:
                self.changed.wait(LOOK_AGAIN_S)
        return seen

    @property
    def used_blocks(self) -> int:
        return self.config.pool_blocks - self.target.store.free_blocks


@pytest.fixture
def serve() -> Iterator[Callable[..., WatchedServer]]:
    """`serve(**config)`: a running target; unless `config` says otherwise, of 16 blocks of 4 KiB, 4 a writer."""
    with ExitStack() as stack:

        def start(**config: Any) -> WatchedServer:
            server = WatchedServer(**config)
            stack.callback(server.stop)
            server.start()
            return server

        yield start


@pytest.fixture
def target(serve: Callable[..., WatchedServer]) -> WatchedServer:
    return serve()


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def index(clock: Clock) -> MemoryIndex:
    return MemoryIndex(clock)


@pytest.fixture
def open_cache(index: MemoryIndex, target: WatchedServer) -> Iterator[Callable[..., Cache]]:
    """`open_cache(**settings)`: a cache over `index` and, unless `targets` says otherwise, `target`."""
    with ExitStack() as stack:

        def open_(**settings: Any) -> Cache:
            cache = Cache(settings.pop("index", index), **{"targets": [target.url], **settings})
            return stack.enter_context(cache)

        yield open_


@pytest.fixture
def cache(open_cache: Callable[..., Cache]) -> Cache:
    return open_cache()
