"""What the scheduler's half decides, over a real cache, with requests by hand."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from kbtp.cache import Cache, Outcome
from kbtp.connectors.troubles import Troubles
from kbtp.connectors.vllm.connector import log
from kbtp.connectors.vllm.scheduler import ANNOUNCED, Plans
from kbtp.connectors.vllm.worker import Shard

BLOCK_TOKENS = 32
HASHES = [b"first", b"second", b"third"]
SHARDS = [Shard(b"layout", 0, 0), Shard(b"layout", 0, 1)]
LONG_S = 600.0
HELD_S = 0.2
SHORT_S = 2.0  # within which a look-up that nothing holds up ends


def request(**parameters: Any) -> Any:
    return SimpleNamespace(
        request_id="request",
        block_hashes=HASHES,
        num_tokens=len(HASHES) * BLOCK_TOKENS + 1,
        kv_transfer_params=parameters or None,
    )


@pytest.fixture
def cache(cluster: Any) -> Iterator[Cache]:
    with Cache(cluster.url) as cache:
        yield cache


@pytest.fixture
def plan(cache: Cache) -> Iterator[Callable[..., Plans]]:
    made: list[Plans] = []

    def plan_(timeout_s: float) -> Plans:
        made.append(Plans(cache, BLOCK_TOKENS, timeout_s, Troubles(log)))
        made[-1].shards = SHARDS
        return made[-1]

    yield plan_
    for one in made:
        one.close()


class Held:
    """Look-ups that find everything, once they are let go."""

    def __init__(self) -> None:
        self.asked: list[list[bytes]] = []
        self.go = threading.Event()

    def contains_many(self, names: list[bytes]) -> list[Any]:
        self.asked.append(names)
        self.go.wait()
        return [SimpleNamespace(ok=True) for _ in names]


@pytest.fixture
def held(cache: Cache, monkeypatch: pytest.MonkeyPatch) -> Iterator[Held]:
    """To be asked for behind `plan`, which waits at its end for the look-up that goes on."""
    one = Held()
    monkeypatch.setattr(cache, "contains_many", one.contains_many)
    yield one
    one.go.set()


def save(cache: Cache, hashes: list[bytes], shards: list[Shard] = SHARDS) -> None:
    for one in hashes:
        for shard in shards:
            assert cache.put(shard.key_of(one), one) is Outcome.STORED


def looked_up(plans: Plans, one: Any, wait_until: Callable[..., bool], computed_tokens: int = 0) -> int:
    told: list[int | None] = []

    def ask() -> bool:
        told.append(plans.loadable_tokens(plans.track(one), computed_tokens))
        return told[-1] is not None

    assert wait_until(ask)
    assert told[0] is None  # the scheduler does not wait for the index
    assert told[-1] is not None
    return told[-1]


def test_the_longest_prefix_that_all_workers_have_is_loaded(
    cache: Cache, plan: Callable[..., Plans], wait_until: Callable[..., bool]
) -> None:
    save(cache, HASHES[:2])
    save(cache, HASHES[2:], SHARDS[:1])
    assert looked_up(plan(LONG_S), request(), wait_until) == 2 * BLOCK_TOKENS
    assert looked_up(plan(LONG_S), request(), wait_until, BLOCK_TOKENS) == BLOCK_TOKENS
    assert looked_up(plan(LONG_S), request(), wait_until, 2 * BLOCK_TOKENS) == 0


def test_announced_blocks_are_waited_for(
    cache: Cache, plan: Callable[..., Plans], wait_until: Callable[..., bool]
) -> None:
    save(cache, HASHES[:1])
    plans, one = plan(LONG_S), request(**{ANNOUNCED: 2})
    asked = iter(range(20))
    assert wait_until(lambda: plans.loadable_tokens(plans.track(one), 0) is not None or next(asked, None) is None)
    assert plans.track(one).present is None
    save(cache, HASHES[1:2])
    assert wait_until(lambda: plans.loadable_tokens(plans.track(one), 0) == 2 * BLOCK_TOKENS)


def test_but_not_longer_than_the_deadline(
    cache: Cache, plan: Callable[..., Plans], wait_until: Callable[..., bool]
) -> None:
    save(cache, HASHES[:1])
    assert looked_up(plan(SHORT_S), request(**{ANNOUNCED: 2}), wait_until) == BLOCK_TOKENS
    assert looked_up(plan(LONG_S), request(**{ANNOUNCED: "2"}), wait_until) == BLOCK_TOKENS


def test_what_is_not_known_by_then_is_missing(
    plan: Callable[..., Plans], held: Held, wait_until: Callable[..., bool]
) -> None:
    """Also of requests behind one that the index keeps waiting; they are not looked up any more."""
    plans, one, behind = plan(HELD_S), request(), request()
    behind.request_id = "behind"
    assert looked_up(plans, one, wait_until) == 0
    assert looked_up(plans, behind, wait_until) == 0
    held.go.set()
    plans.close()
    assert len(held.asked) == 1
    assert plans.loadable_tokens(plans.track(one), 0) == 0  # for good, although the answer is there by now


def test_a_look_up_that_waited_too_long_for_its_turn_is_not_begun(
    plan: Callable[..., Plans], held: Held, wait_until: Callable[..., bool]
) -> None:
    plans, one, behind = plan(HELD_S), request(), request()
    behind.request_id = "behind"
    assert plans.loadable_tokens(plans.track(one), 0) is None
    assert plans.loadable_tokens(plans.track(behind), 0) is None
    late_s = plans.track(behind).give_up_at_s
    assert wait_until(lambda: time.monotonic() > late_s)
    held.go.set()
    last = plans.track(behind).lookup
    assert last is not None
    assert wait_until(last.done)
    assert plans.loadable_tokens(plans.track(behind), 0) == 0
    assert plans.loadable_tokens(plans.track(one), 0) == len(HASHES) * BLOCK_TOKENS  # late, but known
    assert len(held.asked) == 1


def test_a_token_is_left_to_compute_and_a_load_is_asked_for_once(
    cache: Cache, plan: Callable[..., Plans], wait_until: Callable[..., bool]
) -> None:
    save(cache, HASHES)
    plans, one = plan(LONG_S), request()
    one.num_tokens -= 1
    assert looked_up(plans, one, wait_until) == 2 * BLOCK_TOKENS
    plans.load(one, [7, 8, 9], 2 * BLOCK_TOKENS)
    assert plans.loadable_tokens(plans.track(one), 0) == 0
    assert plans.finished(one, saves=True) == {ANNOUNCED: 0}


def test_before_the_workers_have_told_their_layouts_nothing_is_loaded(
    cache: Cache, plan: Callable[..., Plans], wait_until: Callable[..., bool]
) -> None:
    save(cache, HASHES)
    plans = plan(LONG_S)
    plans.shards = []
    assert looked_up(plans, request(), wait_until) == 0
