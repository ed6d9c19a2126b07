"""Replaying a request trace against a cache: what an engine would ask for, with contents that say what they are.

A trace has a JSON object a line, as those published with the Mooncake paper (FAST 2025): `timestamp` in ms,
`input_length` in tokens, and `hash_ids`, one for each 512 tokens of the input, equal wherever all tokens up to there
are. A request reads the longest prefix that is in the cache, and puts the blocks behind it.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import numpy.typing as npt

from kbtp.cache.cache import Cache
from kbtp.cache.outcomes import Outcome
from kbtp.errors import ApiMisuse

TOKENS_A_BLOCK = 512
_WORD_BYTES = 8
_MIX = 0x9E37_79B9_7F4A_7C15  # odd, so that no two numbers are mixed alike


@dataclass(frozen=True, slots=True)
class Request:
    """One line of a trace."""

    at_s: float
    tokens: int
    blocks: tuple[int, ...]

    def tokens_of(self, blocks: int) -> int:
        """How many of its tokens the first so many blocks have."""
        return min(self.tokens, blocks * TOKENS_A_BLOCK)


def read_trace(path: Path) -> list[Request]:
    """Raises `ApiMisuse` for a file that cannot be read, or a line that is none of a trace."""
    try:
        with path.open() as lines:
            return [_request_in(line, f"{path}, line {number}") for number, line in enumerate(lines, 1)]
    except (OSError, UnicodeDecodeError) as error:
        raise ApiMisuse(f"cannot read {path}: {error}; give a trace, a JSON object a line") from None


def _request_in(line: str, where: str) -> Request:
    try:
        fields = json.loads(line)
        blocks = tuple(int(block) for block in fields["hash_ids"])
        return Request(fields["timestamp"] / 1000, int(fields["input_length"]), blocks)
    except (ValueError, KeyError, TypeError) as error:
        raise ApiMisuse(f"{where}, is none of a trace: {error!r}") from None


def key_of(block: int) -> bytes:
    return block.to_bytes(_WORD_BYTES, "big", signed=True)


def write_contents(block: int, into: npt.NDArray[np.uint64]) -> None:
    """Every word tells the block and its place in it."""
    first = np.uint64(block * _MIX & (1 << 64) - 1)
    np.add(np.arange(len(into), dtype=np.uint64), first, out=into)


def wrong_octets(block: int, held: npt.NDArray[np.uint64]) -> int:
    expected = np.empty_like(held)
    write_contents(block, expected)
    return int((expected.view(np.uint8) != held.view(np.uint8)).sum())


@dataclass(slots=True)
class Tally:
    """What a replay has seen."""

    requests: int = 0
    references: int = 0
    hit_blocks: int = 0
    tokens: int = 0
    hit_tokens: int = 0
    bytes_loaded: int = 0
    bytes_stored: int = 0
    wrong_octets: int = 0
    not_stored: int = 0
    busy_s: float = 0.0
    lookup_s: list[float] = field(default_factory=list)
    load_s: list[float] = field(default_factory=list)
    store_s: list[float] = field(default_factory=list)
    course: list[tuple[float, int, int]] = field(default_factory=list)
    """After each request: its time in the trace, hits and references so far."""

    def percentiles_us(self) -> dict[str, dict[str, float]]:
        said = {}
        for name, times in (("lookup", self.lookup_s), ("load", self.load_s), ("store", self.store_s)):
            if times:
                p50, p90, p99 = np.percentile(times, (50, 90, 99)) * 1e6
                said[name] = {"p50": round(float(p50), 1), "p90": round(float(p90), 1), "p99": round(float(p99), 1)}
        return said

    def as_dict(self) -> dict[str, object]:
        octets = self.bytes_loaded + self.bytes_stored
        return {
            "requests": self.requests,
            "block_references": self.references,
            "hit_blocks": self.hit_blocks,
            "hit_ratio_blocks": round(self.hit_blocks / max(1, self.references), 6),
            "hit_ratio_tokens": round(self.hit_tokens / max(1, self.tokens), 6),
            "bytes_loaded": self.bytes_loaded,
            "bytes_stored": self.bytes_stored,
            "gb_per_s": round(octets / self.busy_s / 1e9, 3) if self.busy_s else 0.0,
            "wrong_octets": self.wrong_octets,
            "not_stored": self.not_stored,
            "latency_us": self.percentiles_us(),
        }


class Replay:
    """Requests, one after the other, against one cache; values of `block_bytes` octets, a multiple of 8."""

    def __init__(self, cache: Cache, block_bytes: int, longest: int) -> None:
        """`longest`: blocks of the longest request."""
        if block_bytes < _WORD_BYTES or block_bytes % _WORD_BYTES:
            raise ApiMisuse(f"blocks of {block_bytes} octets: a multiple of {_WORD_BYTES} expected")
        self._cache = cache
        self._block_bytes = block_bytes
        self._memory = np.zeros((max(1, longest), block_bytes // _WORD_BYTES), np.uint64)
        self._registration = cache.register(self._memory)
        self.tally = Tally()

    def request(self, request: Request) -> None:
        tally = self.tally
        keys = [key_of(block) for block in request.blocks]
        began_s = time.perf_counter()
        found = self._cache.longest_prefix(keys)
        looked_s = time.perf_counter()
        hits = self._load(keys[:found])
        loaded_s = time.perf_counter()
        self._check(request, hits)
        self._store(request, keys, hits)
        tally.lookup_s.append(looked_s - began_s)
        tally.busy_s += loaded_s - began_s
        if found:
            tally.load_s.append(loaded_s - looked_s)
        tally.requests += 1
        tally.references += len(keys)
        tally.hit_blocks += hits
        tally.tokens += request.tokens
        tally.hit_tokens += request.tokens_of(hits)
        tally.course.append((request.at_s, tally.hit_blocks, tally.references))

    def _load(self, keys: list[bytes]) -> int:
        items = self._cache.get_many_into(keys, list(self._memory[: len(keys)])) if keys else []
        hits = 0
        while hits < len(items) and items[hits].ok and items[hits].length_bytes == self._block_bytes:
            hits += 1
        self.tally.bytes_loaded += sum(item.length_bytes for item in items if item.ok)
        return hits

    def _check(self, request: Request, hits: int) -> None:
        for block, held in zip(request.blocks[:hits], self._memory, strict=False):
            self.tally.wrong_octets += wrong_octets(block, held)

    def _store(self, request: Request, keys: list[bytes], hits: int) -> None:
        if hits == len(keys):
            return
        for place in range(hits, len(keys)):
            write_contents(request.blocks[place], self._memory[place])
        began_s = time.perf_counter()
        items = self._cache.put_many(keys[hits:], list(self._memory[hits : len(keys)]))
        taken_s = time.perf_counter() - began_s
        self.tally.store_s.append(taken_s)
        self.tally.busy_s += taken_s
        self.tally.not_stored += sum(not item.ok for item in items)
        self.tally.bytes_stored += self._block_bytes * sum(item.outcome is Outcome.STORED for item in items)

    def close(self) -> None:
        self._registration.revoke()


def paced(
    requests: Iterable[Request], speed: float, now_s: Callable[[], float], wait_s: Callable[[float], object]
) -> Iterator[Request]:
    """Each request not before its time in the trace, which goes `speed` times as fast; 0: as fast as they are taken."""
    began_s = now_s()
    for request in requests:
        if speed:
            left_s = began_s + request.at_s / speed - now_s()
            if left_s > 0:
                wait_s(left_s)
        yield request
