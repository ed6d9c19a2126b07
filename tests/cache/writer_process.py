"""A writer in a process of its own: `index target seed puts killed_at`, and it says how many puts it has done.

With `killed_at` it kills itself, with SIGKILL, before that step of its last put, counted from 0. Without, it puts, gets
and deletes keys of a few that all processes share, as often as `puts` says, and checks all that it gets.
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
from typing import Any

from kbtp.cache import Cache
from kbtp.cache.steps import Step

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
    for turn in range(turns):
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
