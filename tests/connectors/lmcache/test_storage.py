"""The storage plugin inside an engine's process, driven by LMCache's own engine."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack

import in_process
import pytest
import torch
from in_process import CHUNK, HEAD, HEADS, LAYERS, TOKENS, WHOLE, Engine, configuration

from kbtp.cache import Item, Outcome

TIMEOUT_S = 1.0
BACK_S = 90.0


@pytest.fixture(autouse=True)
def hashes_of_every_process_are_equal() -> None:
    """LMCache's are Python's `hash`, so an operator sets PYTHONHASHSEED; run.py does."""
    assert os.environ.get("PYTHONHASHSEED") == "0"


@pytest.fixture
def open_engine(cluster) -> Iterator[Callable[..., Engine]]:
    with ExitStack() as stack:

        def open_(*, params: dict[str, object] | None = None, **metadata: object) -> Engine:
            opened = Engine(configuration(cluster.url, **(params or {})), **metadata)
            stack.callback(opened.close)
            return opened

        yield open_


@pytest.mark.requirement("exact")
def test_a_prompt_comes_back_exactly(open_engine) -> None:
    engine = open_engine()
    assert engine.store(1) == WHOLE
    assert engine.load(1) == WHOLE
    assert engine.look_up(2) == engine.load(2) == 0


@pytest.mark.requirement("exact")
def test_a_last_chunk_that_is_short_comes_back_too(cluster) -> None:
    engine = Engine({**configuration(cluster.url), "save_unfull_chunk": True})
    try:
        assert engine.store(1) == TOKENS
        assert engine.load(1) == TOKENS
    finally:
        engine.close()


@pytest.mark.requirement("exact")
def test_what_lmcache_awaits_is_the_prefix_that_there_is(open_engine) -> None:
    engine = open_engine()
    engine.store(1)
    keys = [key for _, _, key in engine.engine.token_database.process_tokens(engine._prompt(1)[0])]
    assert len(keys) == WHOLE // CHUNK
    engine.plugin.remove(keys[2])
    assert asyncio.run(engine.plugin.batched_async_contains("a look-up", keys)) == 2
    objects = asyncio.run(engine.plugin.batched_get_non_blocking("a look-up", keys))
    assert len(objects) == 2
    for number, one in enumerate(objects):
        assert torch.equal(one.tensor, engine._prompt(1)[1][:, :, number * CHUNK : (number + 1) * CHUNK])
        one.ref_count_down()


def test_lmcache_is_told_of_each_chunk_that_is_stored_and_of_no_other(open_engine, wait_until, monkeypatch) -> None:
    engine = open_engine()
    assert engine.store(1) == WHOLE
    keys = [key for _, _, key in engine.engine.token_database.process_tokens(engine._prompt(1)[0])]
    objects = engine.plugin.batched_get_blocking(keys)
    put_many = engine.plugin._cache.put_many

    def no_room_for_the_third(names, values):
        stored = put_many(names, values)
        return [*stored[:2], Item(Outcome.NO_SPACE), *stored[3:]]

    monkeypatch.setattr(engine.plugin._cache, "put_many", no_room_for_the_third)
    told: list[object] = []
    engine.plugin.batched_submit_put_task(keys, objects, on_complete_callback=told.append)
    assert wait_until(lambda: len(told) >= 3)
    assert told == [keys[0], keys[1], keys[3]]
    for one in objects:
        one.ref_count_down()


@pytest.mark.requirement("shared")
def test_a_second_process_loads_what_the_first_has_stored(cluster, open_engine) -> None:
    open_engine().store(1)
    command = [sys.executable, in_process.__file__, json.dumps(configuration(cluster.url)), "load", "1"]
    done = subprocess.run(command, stdout=subprocess.PIPE, timeout=120, check=True)
    assert json.loads(done.stdout.splitlines()[-1]) == WHOLE


@pytest.mark.requirement("killed")
def test_a_target_that_is_killed_between_look_up_and_load_is_a_miss(cluster, open_engine) -> None:
    engine = open_engine(params={"timeout_s": TIMEOUT_S})
    engine.store(1)
    assert engine.look_up(1) == WHOLE
    cluster.kill()
    assert engine.load(1) == 0
    assert engine.look_up(1) == 0
    assert engine.store(2) == 0


@pytest.mark.requirement("killed")
def test_a_target_that_hangs_is_a_miss_within_the_deadline(cluster, open_engine) -> None:
    engine = open_engine(params={"timeout_s": TIMEOUT_S})
    engine.store(1)
    cluster.freeze()
    assert engine.look_up(1) == WHOLE  # its index is there
    assert engine.load(1) == 0
    assert engine.load(1) == 0


@pytest.mark.requirement("back")
def test_hits_again_when_the_target_is_back(cluster, open_engine, wait_until) -> None:
    engine = open_engine(params={"timeout_s": TIMEOUT_S})
    engine.store(1)
    cluster.kill()
    assert engine.load(1) == 0
    cluster.start()
    assert wait_until(lambda: engine.store(1) == engine.load(1) == WHOLE, BACK_S)


@pytest.mark.requirement("corrupt")
def test_a_chunk_that_has_changed_is_a_miss(cluster, open_engine) -> None:
    engine = open_engine()
    engine.store(1)
    third = engine._prompt(1)[1][:, :, 2 * CHUNK : 3 * CHUNK].contiguous()
    assert cluster.corrupt(third.numpy().tobytes()[:64])
    assert engine.load(1) == 2 * CHUNK


@pytest.mark.requirement("keys")
@pytest.mark.parametrize(
    "other",
    [
        {"model_name": "llama/3-8b-instruct"},
        {"worker_id": 1},
        {"world_size": 4},
        {"dtype": torch.bfloat16},
        {"kv_shape": (LAYERS, 2, CHUNK, HEAD, HEADS)},
    ],
    ids=str,
)
def test_chunks_of_another_model_rank_dtype_or_layout_are_others(open_engine, other) -> None:
    first = open_engine()
    assert first.store(1) == WHOLE
    assert open_engine(**other).look_up(1) == 0
    assert first.look_up(1) == WHOLE
