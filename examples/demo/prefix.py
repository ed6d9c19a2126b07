"""Prefixes of a prompt in the keyed cache: **what a program has to do to use `kbtp.Cache`**.

A value is the KV cache of CHUNK_TOKENS tokens, contiguous in a `KvCache`. Its key is a hash of these tokens and of the
key before, so of all tokens from the first on: equal keys, equal prefixes.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import smollm2
from smollm2 import BLOCK_TOKENS, CHUNK_TOKENS

import kbtp

VALUE_BLOCKS = CHUNK_TOKENS // BLOCK_TOKENS
"""Blocks of a `KvCache` in a value. Whole chunks, for a run that loads some must compute the others as one that
computes all does: with the same shapes (smollm2.py tells why)."""


@dataclass(frozen=True, slots=True)
class Found:
    """The longest prefix that was in the cache: so many values of it, in place."""

    values: int = 0
    look_up_s: float = 0.0
    load_s: float = 0.0


def keys_of(tokens: Sequence[int]) -> list[bytes]:
    """A key for each whole chunk of `tokens`."""
    keys: list[bytes] = []
    key = b""
    for start in range(0, len(tokens) - CHUNK_TOKENS + 1, CHUNK_TOKENS):
        chunk = np.asarray(tokens[start : start + CHUNK_TOKENS], dtype="<u4")
        key = hashlib.blake2b(key + chunk.tobytes(), digest_size=32).digest()
        keys.append(key)
    return keys


def values_of(kv: smollm2.KvCache, count: int) -> list[smollm2.Float16s]:
    """Where the first `count` values are in `kv`."""
    return [kv.blocks[index * VALUE_BLOCKS : (index + 1) * VALUE_BLOCKS] for index in range(count)]


def load(shared: kbtp.Cache, keys: Sequence[bytes], values: Sequence[smollm2.Float16s]) -> Found:
    """Load the longest prefix there is into the first of `values`."""
    began = time.perf_counter()
    known = shared.longest_prefix(keys)
    look_up_s = time.perf_counter() - began

    began = time.perf_counter()
    loaded = shared.get_many_into(keys[:known], values[:known])
    whole = [item.ok and item.length_bytes == value.nbytes for item, value in zip(loaded, values, strict=False)]
    # What went between the two calls is a miss, and whatever follows a miss is no part of a prefix.
    count = (*whole, False).index(False)
    return Found(count, look_up_s, time.perf_counter() - began)


def store(shared: kbtp.Cache, keys: Sequence[bytes], values: Sequence[smollm2.Float16s]) -> int:
    """Put what was computed; how many of the values are in the cache now, whoever put them."""
    return sum(item.ok for item in shared.put_many(keys, values))
