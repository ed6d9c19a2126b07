"""Two real engines: what one computes of a prompt the other one loads, by the tier and by the connector."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from engine import BLOCK_TOKENS, Engine, connector, prompt, tier

from ..conftest import Cluster

BLOCKS = len(prompt(0)) // BLOCK_TOKENS  # of each prompt, full
TIMEOUT_S = 2.0  # of the connectors
ROUND_S = 20.0  # a look-up and a load that wait for an index and a target, for each of two prompts, and computing them


@dataclass
class Pair:
    kind: str
    cluster: Cluster
    first: Engine
    second: Engine
    wait_until: Callable[..., bool]
    last: int = 0

    def fresh(self, count: int = 2) -> list[int]:
        """Numbers of prompts that no test has used; none of those it has is in an engine's own memory."""
        self.last += count
        assert self.first("forget")["forgotten"]
        assert self.second("forget")["forgotten"]
        return list(range(self.last - count, self.last))

    def compute(self, numbers: list[int]) -> dict[str, Any]:
        """By the first engine; returns when the cache has it."""
        before = self.first.counters()
        told: dict[str, Any] = self.first("generate", prompts=[prompt(one) for one in numbers])
        wanted = before["stored"] + before["present"] + BLOCKS * len(numbers)
        assert self.wait_until(lambda: self.stepped() >= wanted)
        return told

    def stores(self) -> bool:
        before = self.stepped()
        self.first.generate(*self.fresh(1))
        return self.wait_until(lambda: self.stepped() >= before + BLOCKS, 1.0)

    def stepped(self) -> int:
        self.first("step")
        counters = self.first.counters()
        done: int = counters["stored"] + counters["present"]
        return done


@pytest.fixture(scope="module", params=["tier", "connector"])
def engines(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    cluster = Cluster("--block-size", "16KiB", "--pool-size", "64MiB", "--quota", "1024")
    configurations = {
        "tier": [tier(cluster.url)] * 2,
        "connector": [connector(cluster.url, "kv_producer"), connector(cluster.url, "kv_consumer")],
    }
    model = tmp_path_factory.getbasetemp() / "model"
    first, second = (Engine(model, one) for one in configurations[request.param])
    yield Pair(request.param, cluster, first, second, lambda predicate: True)
    codes = [first.close(), second.close()]
    cluster.stop()
    assert codes == [0, 0]


@pytest.fixture
def pair(engines: Pair, wait_until: Callable[..., bool]) -> Pair:
    engines.wait_until = wait_until
    return engines


@pytest.mark.requirement("shared")
def test_the_second_engine_loads_what_the_first_has_computed(pair: Pair) -> None:
    numbers = pair.fresh(4)
    told = pair.compute(numbers)
    before = pair.second.counters()
    assert pair.second.generate(*numbers) == told["tokens"]
    after = pair.second.counters()
    assert after["hits"] - before["hits"] == BLOCKS * len(numbers)
    assert not after["troubles"]


@pytest.mark.requirement("exact")
def test_its_blocks_have_the_same_octets(pair: Pair) -> None:
    numbers = pair.fresh()
    pair.compute(numbers)
    pair.second.generate(*numbers)
    computed, loaded = pair.first("blocks"), pair.second("blocks")
    common = computed.keys() & loaded.keys()
    assert len(common) >= BLOCKS * len(numbers)
    assert {one: computed[one] for one in common} == {one: loaded[one] for one in common}


@pytest.mark.requirement("corrupt")
def test_a_block_that_was_changed_is_computed_instead(pair: Pair) -> None:
    numbers = pair.fresh(1)
    told = pair.compute(numbers)
    before = pair.second.counters()
    block = next(iter(pair.first("blocks").values()))
    assert pair.cluster.corrupt(bytes.fromhex(block[0]))
    assert pair.second.generate(*numbers) == told["tokens"]
    after = pair.second.counters()
    assert after["corrupt_values"] - before["corrupt_values"] == 1
    computed, made = pair.first("blocks"), pair.second("blocks")
    assert all(made[one] == computed[one] for one in computed.keys() & made.keys())


def test_a_prompt_that_is_known_as_announced_is_waited_for(pair: Pair) -> None:
    """What the first engine says is handed to the second one, as a router does."""
    numbers = pair.fresh()
    told = pair.first("generate", prompts=[prompt(one) for one in numbers])
    said = {"kbtp_prompt_blocks": BLOCKS} if pair.kind == "connector" else None
    assert told["parameters"] == [said] * len(numbers)
    before = pair.second.counters()
    assert pair.second.generate(*numbers, parameters=said) == told["tokens"]
    if said:
        assert pair.second.counters()["hits"] - before["hits"] == BLOCKS * len(numbers)
    for nonsense in ({"kbtp_prompt_blocks": "x"}, {"kbtp_prompt_blocks": -1}, {"kbtp_prompt_blocks": 10**9}):
        assert pair.second("forget")["forgotten"]
        assert pair.second.generate(*numbers, parameters=nonsense) == told["tokens"]


@pytest.mark.requirement("killed")
@pytest.mark.parametrize("end", ["freeze", "kill"])
def test_without_the_target_the_engines_go_on(pair: Pair, end: str) -> None:
    numbers = pair.fresh()
    told = pair.compute(numbers)
    new = [prompt(one) for one in pair.fresh()]
    pair.first.begin("generate", prompts=new)
    getattr(pair.cluster, end)()
    computed = pair.first.answer()["tokens"]
    for parameters in (None, told["parameters"][0]):
        began_s = time.monotonic()
        assert pair.second.generate(*numbers, parameters=parameters) == told["tokens"]
        assert time.monotonic() - began_s < ROUND_S
        assert pair.second("forget")["forgotten"]
    assert pair.second("generate", prompts=new)["tokens"] == computed
    if end == "freeze":
        pair.cluster.thaw()
        assert pair.wait_until(pair.stores)  # after a while, nothing restarted


@pytest.mark.requirement("back")
def test_the_target_back_there_are_hits_again(pair: Pair) -> None:
    pair.cluster.kill()
    pair.fresh()
    numbers = pair.fresh()
    told = pair.first("generate", prompts=[prompt(one) for one in numbers])
    pair.cluster.start()

    def hits() -> bool:
        assert pair.first("forget")["forgotten"]
        assert pair.second("forget")["forgotten"]
        assert pair.first.generate(*numbers) == told["tokens"]
        pair.stepped()
        before = pair.second.counters()["hits"]
        assert pair.second.generate(*numbers) == told["tokens"]
        return bool(pair.second.counters()["hits"] - before == BLOCKS * len(numbers))

    assert pair.wait_until(hits)


def test_blocks_that_are_used_again_at_once_are_saved_as_they_were(pair: Pair, tmp_path: Path) -> None:
    """An engine with room for two prompts: requests are preempted, and blocks overwritten right after their save."""
    transfer = tier(pair.cluster.url) if pair.kind == "tier" else connector(pair.cluster.url, staging_bytes=8 << 20)
    small = Engine(tmp_path / "model", transfer, num_gpu_blocks_override=26, max_model_len=640)
    numbers = pair.fresh(8)
    tokens = pair.second.generate(*numbers, new_tokens=100)
    assert small.generate(*numbers, new_tokens=100) == tokens
    before = small.counters()["hits"]
    assert small.generate(*numbers, new_tokens=100) == tokens
    after = small.counters()
    assert after["hits"] - before >= BLOCKS * len(numbers) // 2
    assert small.close() == 0
