"""The second level of LMCache's multiprocess server, driven by LMCache's own storage manager and command line."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from engine import CHUNKS, LAYOUT, Engine, configuration, keys_of, octets_of
from lmcache.v1.distributed.api import MemoryLayoutDesc, ObjectKey

from kbtp.errors import ApiMisuse

TIMEOUT_S = 1.0  # of one batch or look-up, where a test waits for it
DEADLINE_S = 10.0  # of LMCache's whole task then
BACK_S = 90.0


@pytest.mark.requirement("exact")
def test_chunks_come_back_octet_for_octet(open_engine) -> None:
    engine = open_engine()
    keys = keys_of("a prompt")
    assert engine.store(keys) == CHUNKS
    assert engine.load(keys) == CHUNKS
    assert engine.load(keys_of("another prompt")) == 0


@pytest.mark.requirement("exact")
def test_a_longer_prompt_loads_the_prefix_that_there_is(open_engine) -> None:
    engine = open_engine()
    keys = keys_of("a prompt", 2 * CHUNKS)
    engine.store(keys[:CHUNKS])
    assert engine.load(keys) == CHUNKS


@pytest.mark.requirement("exact")
def test_lmcache_s_own_benchmark_verifies_what_it_loads(cluster) -> None:
    command = [
        Path(sys.executable).with_name("lmcache"),
        "bench",
        "l2",
        "--no-skip-verify",
        "--lookup-max-hit-rate",
        "1",
    ]
    command += ["--rounds", "2", "--in-flight", "2", "--l2-adapter", json.dumps(configuration(cluster.url))]
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
    assert done.returncode == 0, done.stdout
    for operation in ("Store", "Lookup", "Load"):
        told = done.stdout.partition(f" {operation} ---")[2]
        assert told.partition("Total success:")[2].split()[0] == told.partition("Total keys:")[2].split()[0], (
            done.stdout
        )


@pytest.mark.requirement("exact")
def test_memory_is_lmcache_s_own_and_registered_once(open_engine) -> None:
    engine = open_engine()
    _, adapter = engine.manager.l2_adapters()[0]
    described = engine.manager.l1_memory_desc
    keys = keys_of("a prompt")
    [first, *_] = engine.manager.reserve_write(keys, LAYOUT).values()
    view = adapter._arena.octets_of(first)
    assert view.obj is adapter._arena.octets.obj  # a slice, not a copy
    assert len(adapter._arena.octets) == described.size


@pytest.mark.requirement("shared")
def test_a_second_process_loads_what_the_first_has_stored(open_engine, in_another_process) -> None:
    engine = open_engine()
    engine.store(keys_of("a prompt"))
    assert in_another_process("load", "a prompt") == CHUNKS


@pytest.mark.requirement("shared")
def test_what_a_process_stored_outlives_it_for_the_linger_time(open_engine, in_another_process) -> None:
    assert in_another_process("store", "a prompt") == CHUNKS
    assert open_engine().load(keys_of("a prompt")) == CHUNKS


@pytest.mark.requirement("killed")
def test_a_load_is_a_miss_when_its_target_is_killed(cluster, open_engine, wait_until) -> None:
    engine = open_engine()
    keys = keys_of("a prompt")
    engine.store(keys)
    cluster.freeze()  # so that the load is under way, and stays so
    handle = engine.begin(keys)
    assert wait_until(lambda: engine.status["prefetch_controller"]["load_phase_count"])
    cluster.kill()
    assert engine.end(handle, keys, DEADLINE_S) == 0
    assert engine.load(keys) == 0
    assert engine.store(keys_of("another prompt")) == 0
    assert engine.status["is_healthy"]


@pytest.mark.requirement("killed")
def test_a_target_that_hangs_costs_no_more_than_the_deadline(cluster, open_engine) -> None:
    engine = open_engine(timeout_s=TIMEOUT_S)
    keys = keys_of("a prompt")
    engine.store(keys)
    cluster.freeze()
    handles = [engine.begin(keys) for _ in range(4)]
    assert [engine.end(handle, keys, DEADLINE_S) for handle in handles] == [0] * 4
    assert engine.status["is_healthy"]


@pytest.mark.requirement("killed")
def test_a_server_that_is_not_there_when_the_engine_starts(cluster, open_engine) -> None:
    cluster.kill()
    engine = open_engine(timeout_s=TIMEOUT_S)
    keys = keys_of("a prompt")
    assert engine.store(keys) == 0
    assert engine.load(keys) == 0
    assert engine.status["l2_adapters"][0]["troubles"]["not stored: unavailable"] == CHUNKS


@pytest.mark.requirement("back")
def test_hits_again_when_the_target_is_back(cluster, open_engine, wait_until) -> None:
    engine = open_engine(timeout_s=TIMEOUT_S)
    keys = keys_of("before")
    engine.store(keys)
    cluster.kill()
    assert engine.load(keys) == 0
    cluster.start()
    tries = iter(range(1000))
    assert wait_until(lambda: engine.store(keys_of(f"after {next(tries)}")) == CHUNKS, BACK_S)
    assert engine.load(keys_of(f"after {next(tries) - 1}")) == CHUNKS


@pytest.mark.requirement("corrupt")
def test_a_chunk_that_has_changed_is_a_miss(cluster, open_engine, wait_until) -> None:
    engine = open_engine()
    keys = keys_of("a prompt")
    engine.store(keys)
    length_bytes = LAYOUT.shapes[0].numel() * LAYOUT.dtypes[0].itemsize
    assert cluster.corrupt(octets_of(keys[3], length_bytes)[:64])
    assert engine.load(keys) == 3
    assert wait_until(lambda: engine.load(keys[:3]) == 3)


@pytest.mark.requirement("exact")
def test_through_a_serde_of_lmcache_s(cluster, open_engine, tmp_path) -> None:
    secret = tmp_path / "secret"
    secret.write_bytes(bytes(range(32)))
    spec = configuration(cluster.url, serialized=True)
    engine = open_engine({**spec, "serde": {"type": "aesgcm", "master_key_path": str(secret)}})
    keys = keys_of("a prompt")
    assert engine.store(keys) == CHUNKS
    assert engine.load(keys) == CHUNKS


def test_a_serde_that_is_not_told_of_is_complained_about(cluster, open_engine, tmp_path) -> None:
    secret = tmp_path / "secret"
    secret.write_bytes(bytes(range(32)))
    spec = configuration(cluster.url)
    engine = open_engine({**spec, "serde": {"type": "aesgcm", "master_key_path": str(secret)}})
    keys = keys_of("a prompt")
    engine.store(keys)
    assert engine.load(keys) == 0
    assert engine.status["l2_adapters"][0]["troubles"] == {"objects without a layout": 1}


@pytest.mark.parametrize(
    "wrong",
    [{"url": 5}, {"url": "http://cache-server"}, {"quotas": 5}, {"serialized": "false"}, {"timeout_s": "2"}],
    ids=str,
)
def test_what_cannot_work_is_an_error_at_the_start(cluster, wrong) -> None:
    with pytest.raises(ApiMisuse):
        Engine(configuration(cluster.url) | {"adapter_params": {"url": cluster.url, **wrong}})


@pytest.mark.requirement("keys")
@pytest.mark.parametrize(
    "other",
    [
        {"model_name": "llama/3-8b-instruct"},
        {"kv_rank": ObjectKey.ComputeKVRank(2, 1, 2, 1)},
        {"kv_rank": ObjectKey.ComputeKVRank(4, 0, 4, 0)},
        {"object_group_id": 1},
        {"cache_salt": "tenant"},
    ],
    ids=str,
)
def test_chunks_of_another_model_rank_group_or_tenant_are_others(open_engine, other) -> None:
    engine = open_engine()
    engine.store(keys_of("a prompt"))
    assert engine.load(keys_of("a prompt", **other)) == 0
    assert engine.load(keys_of("a prompt")) == CHUNKS


@pytest.mark.requirement("keys")
@pytest.mark.parametrize(
    "layout",
    [
        MemoryLayoutDesc(shapes=LAYOUT.shapes, dtypes=[torch.bfloat16]),  # as long as the other
        MemoryLayoutDesc(shapes=[torch.Size([2, 4, 128, 256])], dtypes=LAYOUT.dtypes),
        MemoryLayoutDesc(shapes=[torch.Size([2, 4, 256, 64])], dtypes=LAYOUT.dtypes),
    ],
    ids=lambda layout: f"{layout.dtypes[0]} {tuple(layout.shapes[0])}",
)
def test_chunks_of_another_dtype_or_layout_are_others(open_engine, layout) -> None:
    engine = open_engine()
    engine.store(keys_of("a prompt"))
    assert engine.load(keys_of("a prompt"), layout) == 0
    assert engine.load(keys_of("a prompt")) == CHUNKS
