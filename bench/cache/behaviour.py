"""What must hold of the cache whatever it costs: killed writers, many writers, keys, round trips."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

from kbtp.cache import Cache, Outcome
from kbtp.cache.embedded import EmbeddedIndex
from kbtp.cache.steps import Load, Lookup, Step
from kbtp.rnic import open_rnic
from kbtp.target.config import TargetConfig
from kbtp.target.server import Server
from kbtp.testing.bench.process import Child, environment, python
from kbtp.testing.cache_writer import KEYS, LONGEST_BYTES, STEPS_OF_A_PUT, is_whole

KILLS = 200
WRITERS, WRITERS_S = 32, 60.0
LINGER_S = 0.2
DEADLINE_S = 30.0


@dataclass(frozen=True, slots=True)
class Requirement:
    """One line of the end of a run."""

    name: str
    holds: bool
    seen: str

    @property
    def line(self) -> str:
        return f"{'ok' if self.holds else 'short':5}  {self.name}: {self.seen}"


@contextmanager
def cluster(**config: Any) -> Iterator[tuple[Server, str, str]]:
    """A target of this process, its URL and that of an index."""
    with ExitStack() as stack:
        server = Server(TargetConfig(block_size_bytes=4096, **config), open_rnic())
        url = str(server.listen(port=0))
        server.start()
        stack.callback(server.stop)
        index = EmbeddedIndex()
        stack.callback(index.close)
        yield server, url, index.url


def _writer(index: str, url: str, seed: int, puts: int, killed_at: int) -> list[str]:
    return python("kbtp.testing.cache_writer", index, url, *map(str, (seed, puts, killed_at)))


def used_blocks(server: Server) -> int:
    return server.config.pool_blocks - server.target.store.free_blocks


def killed_writers(kills: int, advance: Callable[[str], None]) -> Requirement:
    leaks = halves = 0
    into = [bytearray(LONGEST_BYTES + 100) for _ in KEYS]
    env = {**os.environ, **environment(), "KBTP_SPIN_US": "0"}
    with ExitStack() as stack:
        server, url, index = stack.enter_context(cluster(pool_blocks=64, linger_s=LINGER_S))
        reader = stack.enter_context(Cache(index, targets=[url], namespace="shared", read_only=True))
        for number in range(kills):
            advance("killed writers")
            turn, killed_at = divmod(number, STEPS_OF_A_PUT + 1)
            command = _writer(index, url, number, 1 + turn % 3, killed_at)
            ended = subprocess.run(command, check=False, env=env, stdout=subprocess.DEVNULL, timeout=DEADLINE_S)
            halves += ended.returncode != -signal.SIGKILL
            for key, item, buffer in zip(KEYS, reader.get_many_into(KEYS, into), into, strict=True):
                halves += item.ok and not is_whole(key, bytes(buffer[: item.length_bytes]))
            deadline_s = time.monotonic() + DEADLINE_S
            while used_blocks(server) and time.monotonic() < deadline_s:
                threading.Event().wait(LINGER_S / 10)
            leaks += used_blocks(server) > 0
    seen = f"{kills} killed: {leaks} left blocks behind, {halves} half values or other ends"
    return Requirement(
        "a writer killed in any state: no leak after the linger time, no half value", not leaks + halves, seen
    )


def many_writers(writers: int, seconds: float, advance: Callable[[str], None]) -> Requirement:
    with cluster(pool_blocks=8 * writers, linger_s=0) as (_, url, index), ExitStack() as stack:
        children = []
        for seed in range(writers):
            child = Child(_writer(index, url, seed, 0, -1), env={**environment(), "KBTP_SPIN_US": "0"})
            stack.callback(child.stop, ask_first=False)
            children.append(child)
        for child in children:
            child.answer(DEADLINE_S)
        for child in children:
            child.tell()
        for _ in range(round(seconds)):
            advance("many writers")
            threading.Event().wait(1)
        for child in children:
            child.tell()
        told = [child.answer(DEADLINE_S) for child in children]
    total = {what: sum(one[what] for one in told) for what in ("gets", "hits", "wrong", "evictions", "corrupt_values")}
    seen = (
        f"{writers} processes, {seconds:g} s: {total['gets']} gets, {total['hits']} hits, "
        f"{total['evictions']} evictions, {total['wrong']} values that nobody put"
    )
    holds = not total["wrong"] and total["hits"] > 0 and total["evictions"] > 0
    return Requirement("many writers, the same keys: every value is one that somebody put", holds, seen)


HARD_KEYS = (b"\x00", b"/", b"../", b"@", b"\xff\xfe", bytes(65536), bytes(65535) + b"\x01")


def keys() -> Requirement:
    """In another process, with another PYTHONHASHSEED, each key finds its value."""
    code = (
        "import sys; from bench.cache.behaviour import HARD_KEYS; from kbtp.cache import Cache\n"
        "cache = Cache(sys.argv[1], targets=[sys.argv[2]], read_only=True)\n"
        "into = [bytearray(1) for _ in HARD_KEYS]\n"
        "assert all(item.ok for item in cache.get_many_into(HARD_KEYS, into))\n"
        "print(b''.join(into).hex())\n"
    )
    with cluster(pool_blocks=64, quota=32) as (_, url, index), Cache(index, targets=[url]) as cache:
        refused = [item.outcome for item in cache.put_many([b"", bytes(65537)], [b"x", b"x"])] == [Outcome.INVALID] * 2
        values = [bytes([place]) for place in range(len(HARD_KEYS))]
        put = all(item.ok for item in cache.put_many(HARD_KEYS, values))
        seen = {
            subprocess.run(
                [sys.executable, "-c", code, index, url],
                check=False,
                env={**os.environ, **environment(), "PYTHONHASHSEED": seed},
                stdout=subprocess.PIPE,
                text=True,
                timeout=DEADLINE_S,
            ).stdout.strip()
            for seed in ("1", "2")
        }
    holds = refused and put and seen == {b"".join(values).hex()}
    return Requirement("keys of any octets, the same in every process", holds, f"{len(HARD_KEYS)} keys, 2 hash seeds")


class _Counted:
    """An index, or links, that tell each step they are asked for."""

    def __init__(self, counted: Any, done: list[Step]) -> None:
        self._counted = counted
        self._done = done

    def __getattr__(self, name: str) -> Any:
        call = getattr(self._counted, name)
        return partial(self._told, call) if name in ("ask", "load", "perform") else call

    def _told(self, call: Callable[..., Any], step: Step, *meanwhile: Callable[[], None]) -> Any:
        self._done.append(step)
        return call(step, *meanwhile)


def round_trips() -> Requirement:
    done: list[Step] = []
    with cluster(pool_blocks=64, quota=32) as (_, url, index), Cache(index, targets=[url]) as cache:
        cache.put(b"key", bytes(4096))
        into = bytearray(4096)
        cache.get_into(b"key", into)
        # All that goes to the index and to the target, whichever way it is put.
        cache._index, cache._links = _Counted(cache._index, done), _Counted(cache._links, done)  # type: ignore[assignment]
        lengths = [cache.get_into(b"key", into) for _ in range(100)]
    looks, loads = (sum(isinstance(step, kind) for step in done) for kind in (Lookup, Load))
    holds = lengths == [4096] * 100 and looks == loads == 100 and len(done) == 200
    return Requirement(
        "one get_into of 4 KiB: 1 look-up and 1 LOAD", holds, f"100 gets: {looks} look-ups, {loads} LOADs"
    )
