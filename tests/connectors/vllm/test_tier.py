"""`KbtpTier` under vLLM's own TieringOffloadingSpec and TieringOffloadingManager."""

from __future__ import annotations

import dataclasses
import glob
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tiering import CPU_CHUNKS, Tiering, config_of, configuration, key, row
from vllm.v1.kv_offload.base import LookupResult

from kbtp.errors import ApiMisuse

TIMEOUT_S = 2.0
PATIENCE_S = 4 * TIMEOUT_S  # a look-up that waits, then a load, each of an index and a target


@pytest.fixture
def open_tiering(cluster: Any) -> Iterator[Callable[..., Tiering]]:
    opened: list[Tiering] = []

    def open_(**options: Any) -> Tiering:
        opened.append(Tiering(cluster.url, **options))
        return opened[-1]

    yield open_
    for one in opened:
        one.close()


@pytest.fixture
def tiering(open_tiering: Callable[..., Tiering]) -> Tiering:
    return open_tiering()


@pytest.mark.requirement("exact")
def test_what_the_cpu_tier_has_evicted_comes_back(tiering: Tiering) -> None:
    numbers = list(range(3 * CPU_CHUNKS))
    tiering.store(numbers)
    for at in range(0, len(numbers), CPU_CHUNKS):
        assert all(tiering.load(numbers[at : at + CPU_CHUNKS]))
    assert tiering.load([1000]) == [False]
    assert tiering.tier.cache.counters.hits >= 2 * CPU_CHUNKS
    assert not tiering.tier.troubles.as_dict()


@pytest.mark.requirement("exact")
def test_vllm_s_reset_leaves_the_cache_as_it_is(tiering: Tiering) -> None:
    tiering.store(range(CPU_CHUNKS))
    tiering.forget()
    assert all(tiering.load(range(CPU_CHUNKS)))
    assert tiering.tier.cache.counters.hits == CPU_CHUNKS


@pytest.mark.requirement("shared")
def test_a_second_process_loads_what_the_first_has_stored(cluster: Any, tiering: Tiering) -> None:
    program = [sys.executable, Path(__file__).parent / "tiering.py", cluster.url, "0", str(CPU_CHUNKS)]
    with subprocess.Popen(
        program, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env={**os.environ, "PYTHONHASHSEED": "7"}
    ) as other:
        assert other.stdout is not None
        assert f"stored {CPU_CHUNKS}\n" in iter(other.stdout.readline, "")
        assert all(tiering.load(range(CPU_CHUNKS)))
        assert tiering.load(range(CPU_CHUNKS, CPU_CHUNKS + 2)) == [False, False]
        other.communicate()


@pytest.mark.requirement("killed")
@pytest.mark.parametrize("end", ["kill", "freeze"])
def test_without_its_target_the_tier_has_misses_and_vllm_goes_on(cluster: Any, tiering: Tiering, end: str) -> None:
    tiering.store(range(CPU_CHUNKS))
    tiering.forget()
    tiering.submit(range(100, 108))  # on their way
    getattr(cluster, end)()
    began_s = time.monotonic()
    assert tiering.load(range(8)) == [False] * 8
    assert time.monotonic() - began_s < PATIENCE_S
    tiering.settle()
    tiering.store(range(200, 204))  # the CPU tier goes on alone
    assert all(tiering.load(range(200, 204)))
    assert tiering.tier.troubles.as_dict()


@pytest.mark.requirement("killed")
def test_a_target_that_stops_between_look_up_and_load_is_a_miss(cluster: Any, tiering: Tiering) -> None:
    tiering.store(range(CPU_CHUNKS))
    tiering.forget()
    request = tiering.begin()
    seen = []
    while not seen or seen[-1] in (LookupResult.RETRY, LookupResult.HIT_PENDING):
        seen.append(tiering.manager.lookup(key(0), request))
        if seen[-1] is LookupResult.HIT_PENDING:
            cluster.freeze()
        tiering.step([request.req_id])
    assert seen[-1] is LookupResult.MISS
    assert LookupResult.HIT_PENDING in seen
    assert tiering.tier.troubles.as_dict()


@pytest.mark.requirement("back")
def test_the_target_back_there_are_hits_again(cluster: Any, tiering: Tiering, wait_until: Callable[..., bool]) -> None:
    tiering.store(range(4))
    cluster.kill()
    tiering.forget()
    assert tiering.load(range(4)) == [False] * 4
    cluster.start()
    numbers = iter(range(1000, 9000))

    def stored_and_loaded() -> bool:
        number = next(numbers)
        tiering.store([number])
        tiering.forget()
        return all(tiering.load([number]))

    assert wait_until(stored_and_loaded)


@pytest.mark.requirement("back")
def test_a_target_that_hung_for_a_while_has_all_it_had(
    cluster: Any, tiering: Tiering, wait_until: Callable[..., bool]
) -> None:
    tiering.store(range(4))
    tiering.forget()
    cluster.freeze()
    assert tiering.load(range(4)) == [False] * 4
    cluster.thaw()
    assert wait_until(lambda: all(tiering.load(range(4))))


@pytest.mark.requirement("corrupt")
def test_a_chunk_that_was_changed_is_a_miss(cluster: Any, tiering: Tiering) -> None:
    tiering.store([0, 1, 2])
    tiering.forget()
    assert cluster.corrupt(row(1)[:64].tobytes())
    assert tiering.load([0, 1, 2]) == [True, False, True]
    assert tiering.tier.cache.counters.corrupt_values == 1
    assert tiering.tier.troubles.as_dict() == {"chunks not loaded: miss": 1}


@pytest.mark.requirement("keys")
@pytest.mark.parametrize(
    "parts",
    [
        {"model": {"name": "a/model2"}},
        {"model": {"dtype": "float16"}},
        {"cache": {"tokens_per_hash": 32}},
        {"parallel": {"tp_size": 2}},
        {"parallel": {"pp_size": 2}},
        {"parallel": {"world_size": 2}},
    ],
    ids=str,
)
def test_another_model_has_other_keys(cluster: Any, tiering: Tiering, parts: dict[str, Any]) -> None:
    tiering.store(range(4))
    other = tiering.with_other(cluster.url, **parts)
    same = tiering.with_other(cluster.url)
    try:
        assert other.load(range(4)) == [False] * 4
        assert same.load(range(4)) == [True] * 4
    finally:
        other.close()
        same.close()


@pytest.mark.requirement("keys")
def test_another_group_and_another_layout_have_other_keys(cluster: Any, tiering: Tiering) -> None:
    tiering.store([0])
    tiering.forget()
    assert tiering.load([0], group=1) == [False]
    config = dataclasses.replace(config_of(configuration(cluster.url)), kv_cache_layout="LBNHC")
    other = Tiering(cluster.url, config)
    try:
        assert other.load([0]) == [False]
    finally:
        other.close()
    assert tiering.load([0]) == [True]


@pytest.mark.parametrize(
    "wrong", [{"url": "kbtp//nonsense"}, {"copies": 0}, {"nonsense": 1}, {"writer": 5}, {"timeout_s": "2"}], ids=str
)
def test_a_configuration_that_cannot_work_is_refused_at_the_start(cluster: Any, wrong: dict[str, Any]) -> None:
    with pytest.raises(ApiMisuse):
        Tiering(cluster.url, **wrong)


def test_nothing_is_left_mapped(cluster: Any, caplog: pytest.LogCaptureFixture) -> None:
    tiering = Tiering(cluster.url)
    tiering.store(range(4))
    tiering.forget()
    tiering.load(range(4))
    tiering.close()
    assert not glob.glob(f"/dev/shm/vllm_offload_{tiering.config.engine_id}*")
    assert "Failed" not in caplog.text
