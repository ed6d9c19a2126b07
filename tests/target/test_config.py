"""What an operator may decide, and what follows from it."""

from __future__ import annotations

import math
from typing import Any

import pytest

from kbtp import limits
from kbtp.errors import ApiMisuse
from kbtp.keys import Key, Keys
from kbtp.target.config import TargetConfig
from kbtp.types import Feature


def test_defaults_are_those_of_limits() -> None:
    config = TargetConfig()
    assert config.pool_bytes == limits.DEFAULT_BLOCK_SIZE_BYTES * limits.DEFAULT_POOL_BLOCKS
    assert config.linger_s == limits.LINGER_S
    assert config.drain_s == limits.DRAIN_S
    assert config.hello_timeout_s == limits.HELLO_TIMEOUT_S
    assert config.default_quota == limits.DEFAULT_POOL_BLOCKS // 16
    assert config.quota_cap == limits.DEFAULT_POOL_BLOCKS


@pytest.mark.parametrize(
    ("wrong", "named"),
    [
        ({"block_size_bytes": 511}, "block size"),
        ({"block_size_bytes": 512 + 32}, "block size"),
        ({"block_size_bytes": (1 << 30) + 64}, "block size"),
        ({"pool_blocks": 0}, "pool blocks"),
        ({"pool_blocks": (1 << 28) + 1}, "pool blocks"),
        ({"quota": -1}, "quota"),
        ({"pool_blocks": 4, "quota": 5}, "quota"),
        ({"pool_blocks": 4, "max_quota": 5}, "max quota"),
        ({"table_handles": -1}, "table handles"),
        ({"table_handles": limits.TABLE_HANDLES_MAX + 1}, "table handles"),
        ({"request_credits": 0}, "request credits"),
        ({"max_message_bytes": 1023}, "max message"),
        ({"read_depth": -1}, "read depth"),
        ({"read_depth": limits.IRD_ORD_MAX + 1}, "read depth"),
        ({"max_sessions": 0}, "max sessions"),
        ({"namespace": bytes(256)}, "namespace"),
        ({"name": "é" * 128}, "name"),
        ({"linger_s": -1.0}, "linger"),
        ({"linger_s": math.nan}, "linger"),
        ({"drain_s": -0.1}, "drain"),
        ({"hello_timeout_s": -0.1}, "HELLO"),
        ({"direct": Feature.INVALIDATE}, "direct modes"),
        ({"direct": Feature.DIRECT_ALLOC}, "direct blocks"),
        ({"direct_blocks": 1}, "direct blocks"),
        ({"direct": Feature.DIRECT_LOAD, "direct_blocks": 1}, "direct blocks"),
        ({"pool_blocks": 4, "direct": Feature.DIRECT_ALLOC, "direct_blocks": 4}, "direct blocks of 4: must be 0 to 3"),
        ({"direct": Feature.DIRECT_ALLOC, "direct_blocks": -1}, "direct blocks"),
        ({"ticket_timeout_s": 0.0009}, "ticket timeout"),
        ({"ticket_timeout_s": limits.TICKET_TIMEOUT_MAX_S + 1}, "ticket timeout"),
        ({"ticket_timeout_s": math.nan}, "ticket timeout"),
    ],
)
def test_what_cannot_work_is_refused_by_name(wrong: dict[str, Any], named: str) -> None:
    with pytest.raises(ApiMisuse, match=named):
        TargetConfig(**wrong)


@pytest.mark.parametrize(
    "right",
    [
        {"block_size_bytes": 512, "pool_blocks": 1, "quota": 1, "max_quota": 1},
        {"block_size_bytes": 1 << 30, "pool_blocks": 1 << 28},
        {"max_message_bytes": 1024, "request_credits": 1, "read_depth": 0, "max_sessions": 1},
        {"namespace": bytes(255), "name": "é" * 127},
        {"linger_s": math.inf, "drain_s": 0.0, "hello_timeout_s": math.inf},
        {"linger_s": 0.0},
        {"pool_blocks": 2, "direct": Feature.DIRECT_ALLOC | Feature.DIRECT_LOAD, "direct_blocks": 1},
        {"pool_blocks": 1, "direct": Feature.DIRECT_LOAD},
        {"ticket_timeout_s": 0.001},
        {"ticket_timeout_s": limits.TICKET_TIMEOUT_MAX_S},
    ],
)
def test_the_edges_of_what_works(right: dict[str, Any]) -> None:
    TargetConfig(**right)


@pytest.mark.parametrize(("blocks", "order"), [(1, 1), (2, 1), (3, 2), (4, 2), (5, 3), (256, 8), (1 << 28, 28)])
def test_ring_order_is_the_least_that_holds_all_blocks(blocks: int, order: int) -> None:
    """Draft 3.3: N = 2^n is not smaller than F; profile 5: and at least 2."""
    assert TargetConfig(pool_blocks=blocks).ring_order == order


def test_the_shared_ring_has_the_blocks_that_are_not_set_aside() -> None:
    config = TargetConfig(pool_blocks=64, direct=Feature.DIRECT_ALLOC, direct_blocks=31)
    assert (config.shared_blocks, config.ring_order) == (33, 6)


@pytest.mark.parametrize(("timeout_s", "said_ms"), [(0.001, 1), (10.0, 10_000), (1.9999, 1999)])
def test_hello_ack_never_says_more_time_than_there_is(timeout_s: float, said_ms: int) -> None:
    assert TargetConfig(ticket_timeout_s=timeout_s).ticket_timeout_ms == said_ms


@pytest.mark.parametrize(("domains", "one", "clears"), [("", True, False), ("a", True, False), ("ab", False, True)])
def test_blocks_of_several_trust_domains_are_cleared(domains: str, one: bool, clears: bool) -> None:
    keys = Keys(tuple(Key(number, bytes(32), domain) for number, domain in enumerate(domains)))
    config = TargetConfig(keys=keys)
    assert (config.one_trust_domain, config.clears_blocks) == (one, clears)


def test_shares_derived_from_the_pool() -> None:
    assert TargetConfig(pool_blocks=4).default_quota == 1
    assert TargetConfig(pool_blocks=64, quota=7).default_quota == 7
    for blocks, quota in ((3, 3), (32, 7)):
        config = TargetConfig(pool_blocks=64, quota=7, direct=Feature.DIRECT_ALLOC, direct_blocks=blocks)
        assert (config.default_quota, config.default_direct_quota) == (7, quota)
    assert TargetConfig(pool_blocks=64, max_quota=9).quota_cap == 9
    assert TargetConfig(pool_blocks=4).handle_count == limits.DEFAULT_TABLE_HANDLES
    assert TargetConfig(pool_blocks=1 << 20).handle_count == limits.DEFAULT_TABLE_HANDLES_PER_BLOCK << 20
    assert TargetConfig(pool_blocks=4, table_handles=3).handle_count == 3
    assert TargetConfig().default_handles(5) == 10
    assert TargetConfig().default_handles(0) == 1
