"""A writer in a process of its own, for tests and benchmarks of the cache.

`python -m kbtp.testing.cache_writer INDEX TARGET SEED PUTS KILLED_AT` says one JSON object when it is ready, and one
when it has done.

With KILLED_AT from 0 on it kills itself, with SIGKILL, before that step of its last put, and says nothing. With -1 it
puts, gets, pins and deletes keys that all processes share, and checks all that it gets: as often as PUTS says or, where
that is 0, until its standard input ends.
"""

from __future__ import annotations

import itertools
import json
import os
import random
import select
import signal
import sys
from typing import Any

from kbtp.cache import Cache
from kbtp.cache.steps import Step

STEPS_OF_A_PUT = 5
"""Of the first one, without eviction: look-up, targets, session, blocks, record."""
KEYS = [b"key %d" % number for number in range(100)]
LONGEST_BYTES = 20_000


def value_of(key: bytes, seed: int, turn: int) -> bytes:
    """What no other process, turn or key has: the key, who put it, and that again and again."""
    said = b"%s put by %d in turn %d." % (key, seed, turn)
    length = 1 + (seed * 7919 + turn * 104729) % LONGEST_BYTES
    return (said * (length // len(said) + 1))[: max(length, len(said))]


def is_whole(key: bytes, value: bytes) -> bool:
    """Whether `value` is one that `value_of` makes for `key`."""
    said = value[: value.index(b".") + 1] if b"." in value else b""
    words = said.rstrip(b".").split(b" ")
    if not said.startswith(key + b" put by ") or len(words) != 8:
        return False
    return value == value_of(key, int(words[4]), int(words[7]))


def kill_at(cache: Cache, number: int) -> None:
    steps = 0
    perform = cache._perform

    def count(step: Step) -> Any:
        nonlocal steps
        if steps == number:
            os.kill(os.getpid(), signal.SIGKILL)
        steps += 1
        return perform(step)

    cache._perform = count  # type: ignore[method-assign]


def die(cache: Cache, seed: int, puts: int, killed_at: int) -> None:
    for turn in range(puts):
        if turn == puts - 1:
            kill_at(cache, killed_at)
        key = KEYS[(seed + turn) % len(KEYS)]
        cache.put(key, value_of(key, seed, turn))
    os.kill(os.getpid(), signal.SIGKILL)


def live(cache: Cache, seed: int, turns: int) -> None:
    draw = random.Random(seed)
    into = bytearray(LONGEST_BYTES + 100)
    wrong = gets = hits = 0
    for turn in itertools.count():
        if turn >= turns and (turns or select.select([sys.stdin], [], [], 0)[0]):
            break
        key = draw.choice(KEYS)
        match draw.choice(("put", "get", "get", "delete", "pin")):
            case "put":
                cache.put(key, value_of(key, seed, turn))
            case "get":
                gets += 1
                length = cache.get_into(key, into)
                hits += length is not None
                wrong += length is not None and not is_whole(key, bytes(into[:length]))
            case "delete":
                cache.delete(key)
            case "pin":
                cache.pin([key], 0.05)
    print(json.dumps({"gets": gets, "hits": hits, "wrong": wrong, **cache.counters.as_dict()}), flush=True)


def main() -> None:
    index, target, seed, puts, killed_at = sys.argv[1], sys.argv[2], *map(int, sys.argv[3:6])
    with Cache(index, targets=[target], namespace="shared", quota=8) as cache:
        if killed_at >= 0:
            die(cache, seed, puts, killed_at)
        print(json.dumps({"ready": True}), flush=True)
        sys.stdin.readline()
        live(cache, seed, puts)


if __name__ == "__main__":
    main()
