"""What the keys of the connector keep apart, without an engine."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import PretrainedConfig
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole

from kbtp.connectors.vllm.connector import KbtpConnector, identity_of
from kbtp.connectors.vllm.pages import LANES, Pages, Staging
from kbtp.connectors.vllm.worker import Shard
from kbtp.errors import ApiMisuse


def config(**other: Any) -> Any:
    fields = {
        "model": "a/model",
        "revision": None,
        "dtype": torch.bfloat16,
        "quantization": None,
        "hf_config": PretrainedConfig(rope_parameters={"rope_theta": 10_000.0}),
        "cache_dtype": "auto",
        "block_size": 32,
        "prefix_caching_hash_algo": "sha256",
        "tensor_parallel_size": 1,
        "pipeline_parallel_size": 1,
        **other,
    }
    one = SimpleNamespace(**fields)
    return SimpleNamespace(model_config=one, cache_config=one, parallel_config=one)


DIFFERENCES = [
    {"model": "a/model2"},
    {"revision": "None "},
    {"dtype": torch.float16},
    {"quantization": "fp8"},
    {"hf_config": PretrainedConfig(rope_parameters={"rope_theta": 20_000.0})},  # --hf-overrides
    {"cache_dtype": "fp8"},
    {"block_size": 16},
    {"prefix_caching_hash_algo": "xxhash"},
    {"tensor_parallel_size": 2},
    {"pipeline_parallel_size": 2},
]


@pytest.mark.requirement("keys")
def test_engines_that_differ_share_nothing() -> None:
    identities = {identity_of(config())} | {identity_of(config(**one)) for one in DIFFERENCES}
    assert len(identities) == 1 + len(DIFFERENCES)
    assert identity_of(config()) == identity_of(config())


BLOCKS = 8


def caches(
    shape: tuple[int, ...] = (BLOCKS, 2, 32, 64), dtype: torch.dtype = torch.bfloat16
) -> dict[str, torch.Tensor]:
    return {f"layer {number}": torch.zeros(shape, dtype=dtype) for number in range(2)}


@pytest.mark.requirement("keys")
def test_memory_that_is_laid_out_otherwise_has_other_keys() -> None:
    one = caches()
    transposed = {name: torch.zeros(8, 32, 2, 64, dtype=torch.bfloat16).transpose(1, 2) for name in one}
    shared = dict.fromkeys(one, one["layer 0"])
    others = [caches((8, 2, 64, 32)), caches(dtype=torch.float16), transposed, shared, {"layer 0": one["layer 0"]}]
    layouts = [Pages(each, BLOCKS).layout for each in (one, *others)]
    assert len(set(layouts)) == len(layouts)
    assert Pages(caches((16, 2, 32, 64)), 16).layout == layouts[0]  # how many blocks there are is no difference
    names = {Shard(layout, *ranks).key_of(b"hash") for layout in layouts for ranks in ((0, 0), (0, 1), (1, 0))}
    assert len(names) == 3 * len(layouts)


@pytest.mark.requirement("exact")
@pytest.mark.parametrize("transposed", [False, True])
def test_rows_hold_all_layers_of_a_block(transposed: bool) -> None:
    source = {name: torch.randn(8, 2, 32, 64).to(torch.bfloat16) for name in caches()}
    sink = caches()
    if transposed:
        for each in (source, sink):
            each.update({name: one.transpose(1, 2).contiguous().transpose(1, 2) for name, one in each.items()})
    rows = torch.zeros(3, Pages(source, BLOCKS).row_bytes, dtype=torch.uint8)
    Pages(source, BLOCKS).gather([5, 0, 7], rows)
    Pages(sink, BLOCKS).scatter(rows, [1, 2, 3], None)
    for name, tensor in source.items():
        assert torch.equal(sink[name][1:4], tensor[[5, 0, 7]])
        assert not sink[name][[0, 4, 5, 6, 7]].any()


def test_memory_that_cannot_be_moved_is_refused_at_the_start() -> None:
    with pytest.raises(ApiMisuse, match="gaps"):
        Pages({"layer": torch.zeros(BLOCKS, 2, 32, 128)[..., :64]}, BLOCKS)
    with pytest.raises(ApiMisuse, match="no KV cache"):
        Pages({"layer": [torch.zeros(BLOCKS, 2)]}, BLOCKS)  # type: ignore[dict-item]
    pages = Pages(caches(), BLOCKS)
    with pytest.raises(ApiMisuse, match="at least 4 rows"):
        Staging(pages, LANES * pages.row_bytes - 1)


@pytest.mark.requirement("keys")
def test_blocks_that_the_attention_backend_splits_are_refused_at_the_start() -> None:
    """vLLM's scheduler goes on to count whole blocks: its numbers would name other rows."""
    with pytest.raises(ApiMisuse, match=r"layer 0 has 16 blocks where vLLM's scheduler counts 8: set block_size to"):
        Pages(caches((2 * BLOCKS, 2, 16, 64)), BLOCKS)


def start(transfer: dict[str, Any], parallel: Any = (), groups: int = 1, block_tokens: int = 32) -> None:
    """A worker's half, without an engine."""
    plain = {"is_kv_consumer": True, "is_kv_producer": True, "kv_load_failure_policy": "recompute"}
    no_context = {"decode_context_parallel_size": 1, "prefill_context_parallel_size": 1}
    vllm_config = SimpleNamespace(
        kv_transfer_config=SimpleNamespace(**{**plain, **transfer}),
        parallel_config=SimpleNamespace(**{**no_context, **dict(parallel)}),
        cache_config=SimpleNamespace(block_size=32),
    )
    group = SimpleNamespace(kv_cache_spec=SimpleNamespace(block_size=block_tokens))
    KbtpConnector(vllm_config, KVConnectorRole.WORKER, SimpleNamespace(kv_cache_groups=[group] * groups))


@pytest.mark.parametrize(
    "wrong",
    [
        ({"kv_load_failure_policy": "fail"}, {}, 1, 32),
        ({}, {"decode_context_parallel_size": 2}, 1, 32),
        ({}, {}, 2, 32),
        ({}, {}, 1, 64),
    ],
    ids=["policy", "context", "groups", "sizes"],
)
def test_what_is_not_supported_is_refused_at_the_start(wrong: Any) -> None:
    transfer, parallel, groups, block_tokens = wrong
    with pytest.raises(ApiMisuse, match=r"must be|not supported"):
        start(transfer, parallel, groups, block_tokens)


@pytest.mark.parametrize(
    ("option", "wrong"),
    [("staging_bytes", "1GiB"), ("staging_bytes", True), ("timeout_s", "2"), ("timeout_s", None), ("writer", 5)],
)
def test_an_option_that_is_mistyped_is_said_at_the_start(option: str, wrong: Any) -> None:
    with pytest.raises(ApiMisuse, match=f"{option} of {wrong!r}: expected"):
        start({"kv_connector_extra_config": {"url": "kbtp://127.0.0.1", option: wrong}})
