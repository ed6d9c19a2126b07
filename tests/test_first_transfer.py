"""The whole life of a block, both ends in this process. Read this test first."""

from __future__ import annotations

import numpy as np
import pytest

import kbtp
from kbtp.target.config import TargetConfig
from kbtp.target.server import Server


def test_a_block_is_stored_loaded_and_freed() -> None:
    server = Server(TargetConfig(block_size_bytes=1 << 20, pool_blocks=16), kbtp.open_rnic())
    url = str(server.listen(port=0))
    server.start()
    cache = np.random.default_rng(seed=5040).standard_normal((4, 128, 256), dtype=np.float32)  # layers, tokens, width

    with kbtp.connect(url, quota=4, name="prefill") as prefill, kbtp.connect(url, name="decode") as decode:
        blocks = [prefill.alloc_store(layer) for layer in cache]
        assert server.target.store.free_blocks == 12

        loaded = np.zeros_like(cache)
        results = decode.load_many(blocks, into=list(loaded))
        assert [result.length_bytes for result in results] == [128 * 256 * 4] * 4
        assert (loaded == cache).all()

        prefill.free(blocks[0])
        with pytest.raises(kbtp.NotBound, match="never stored, or freed"):
            decode.load(blocks[0], into=loaded[0])

    server.stop()
    assert server.target.store.free_blocks == 16  # an anonymous initiator's blocks end with its session
