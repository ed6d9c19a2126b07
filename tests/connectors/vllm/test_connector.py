"""`KbtpConnector` in real engines: one computes prompts, another loads them."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from engine import BLOCK_TOKENS, Engine, connector, prompt

PROMPTS = range(4)
BLOCKS = len(prompt(0)) // BLOCK_TOKENS  # of each prompt, full
ROUNDS_S = 30.0  # for a round of prompts whose target is away


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Engine]]:
    engines: list[Engine] = []

    def start_(url: str, role: str = "kv_both", **options: Any) -> Engine:
        engines.append(Engine(tmp_path / "model", connector(url, role, **options)))
        return engines[-1]

    yield start_
    assert [engine.close() for engine in engines] == [0] * len(engines)


@pytest.mark.requirement("shared")
@pytest.mark.requirement("exact")
def test_what_a_prefill_instance_computes_a_decode_instance_loads(cluster: Any, start: Callable[..., Engine]) -> None:
    prefill, decode = start(cluster.url, "kv_producer"), start(cluster.url, "kv_consumer")
    told = prefill("generate", prompts=[prompt(one) for one in PROMPTS], parameters=None)
    assert told["parameters"] == [{"kbtp_prompt_blocks": BLOCKS}] * len(PROMPTS)
    assert decode.generate(*PROMPTS, parameters=told["parameters"][0]) == told["tokens"]
    counters = decode.counters()
    assert counters["hits"] == BLOCKS * len(PROMPTS)
    assert counters["stored"] == 0
    assert not counters["troubles"]
    computed, loaded = prefill("digests"), decode("digests")
    common = computed.keys() & loaded.keys()
    assert len(common) >= BLOCKS * len(PROMPTS)
    assert {one: computed[one] for one in common} == {one: loaded[one] for one in common}
