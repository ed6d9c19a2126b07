"""Keys that name prefixes, and the longest prefix there is, loaded into place."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence

import numpy as np
import prefix
import pytest
import smollm2
from smollm2 import CHUNK_TOKENS

import kbtp
from kbtp.cache import MemoryIndex
from kbtp.rnic import open_rnic
from kbtp.target.config import TargetConfig
from kbtp.target.server import Server

TOKENS = list(range(1000, 1000 + 3 * CHUNK_TOKENS))
SHAPE = smollm2.Shape(layers=2, width=16, heads=2, kv_heads=1, head_width=8, rope_base=1e4, norm_epsilon=1e-5)
VALUE_BYTES = prefix.VALUE_BLOCKS * SHAPE.block_bytes


class Hopeful(kbtp.Cache):
    """Whoever asks it finds everything: what has been deleted since, say."""

    def longest_prefix(self, keys: Sequence[bytes]) -> int:
        return len(keys)


@pytest.fixture
def target() -> Iterator[str]:
    config = TargetConfig(block_size_bytes=VALUE_BYTES, pool_blocks=8, quota=4)
    server = Server(config, open_rnic())
    url = str(server.listen(port=0))
    server.start()
    yield url
    server.stop()


def filled(seed: int) -> smollm2.KvCache:
    """A cache of 3 values and a tail, as if computed."""
    kv = smollm2.KvCache(SHAPE, len(TOKENS) + 1, 0)
    kv.blocks[:] = np.random.default_rng(seed).standard_normal(kv.blocks.shape)
    return kv


def test_a_key_is_of_all_tokens_before_it() -> None:
    keys = prefix.keys_of(TOKENS)
    assert len(set(keys)) == 3
    for changed in (0, CHUNK_TOKENS - 1, CHUNK_TOKENS, len(TOKENS) - 1):
        other = prefix.keys_of([*TOKENS[:changed], 7, *TOKENS[changed + 1 :]])
        same = changed // CHUNK_TOKENS
        assert other[:same] == keys[:same], "what stands before the change"
        assert not set(other[same:]) & set(keys), "and whatever follows it"


@pytest.mark.parametrize(("count", "keys"), [(0, 0), (63, 0), (64, 1), (65, 1), (127, 1), (128, 2)])
def test_a_chunk_that_is_not_whole_has_no_key(count: int, keys: int) -> None:
    assert prefix.keys_of(TOKENS[:count]) == prefix.keys_of(TOKENS)[:keys]


def test_the_longest_prefix_comes_into_place(target: str) -> None:
    keys, index = prefix.keys_of(TOKENS), MemoryIndex(time.monotonic)
    computed, loaded = filled(1), filled(2)
    behind = loaded.blocks[2 * prefix.VALUE_BLOCKS :].tobytes()
    with kbtp.Cache(index, targets=[target]) as first:
        assert prefix.store(first, keys[:2], prefix.values_of(computed, 2)) == 2
    with kbtp.Cache(index, targets=[target]) as second:
        second.register(loaded.blocks)
        assert prefix.load(second, keys, prefix.values_of(loaded, 3)).values == 2
    split = 2 * prefix.VALUE_BLOCKS
    assert loaded.blocks[:split].tobytes() == computed.blocks[:split].tobytes()
    assert loaded.blocks[split:].tobytes() == behind


def test_an_empty_cache_has_no_prefix(target: str) -> None:
    with kbtp.Cache(MemoryIndex(time.monotonic), targets=[target]) as shared:
        assert prefix.load(shared, prefix.keys_of(TOKENS), prefix.values_of(filled(1), 3)).values == 0


@pytest.mark.parametrize("gone", [0, 1, 2])
def test_a_prefix_ends_before_the_first_value_that_went_meanwhile(target: str, gone: int) -> None:
    keys, values = prefix.keys_of(TOKENS), prefix.values_of(filled(1), 3)
    with Hopeful(MemoryIndex(time.monotonic), targets=[target]) as shared:
        assert prefix.store(shared, keys, values) == 3
        assert shared.delete(keys[gone])
        assert prefix.load(shared, keys, values).values == gone


def test_a_value_of_another_length_is_no_prefix(target: str) -> None:
    keys, values = prefix.keys_of(TOKENS), prefix.values_of(filled(1), 3)
    with kbtp.Cache(MemoryIndex(time.monotonic), targets=[target]) as shared:
        assert shared.put(keys[0], values[0][:-1]) is kbtp.cache.Outcome.STORED
        assert prefix.load(shared, keys, values).values == 0


def test_what_cannot_be_put_is_not_counted() -> None:
    with kbtp.Cache(MemoryIndex(time.monotonic), targets=[]) as shared:
        assert prefix.store(shared, prefix.keys_of(TOKENS), prefix.values_of(filled(1), 3)) == 0
