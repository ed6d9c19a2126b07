"""The policies, and what the measured choice between them rests on."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench.eviction import hit_percent
from kbtp.cache.eviction import POLICIES, Lru, Policy, S3Fifo, policy_named
from kbtp.errors import ApiMisuse

NAMES = [b"%d" % number for number in range(8)]
OPERATIONS = st.lists(
    st.tuples(st.sampled_from(["add", "used", "remove", "victim"]), st.sampled_from(NAMES)), max_size=60
)


@given(OPERATIONS)
def test_lru_is_its_definition(operations: list[tuple[str, bytes]]) -> None:
    policy, order = Lru(), []
    for operation, name in operations:
        if operation == "victim":
            assert policy.victim() == (order.pop(0) if order else None)
            continue
        getattr(policy, operation)(name)
        present = name in order
        if present:
            order.remove(name)
        if operation == "add" or (operation == "used" and present):
            order.append(name)
    assert len(policy) == len(order)


@pytest.mark.parametrize("make", POLICIES.values(), ids=POLICIES)
@given(operations=OPERATIONS)
def test_every_policy_gives_each_name_back_once(
    make: Callable[[], Policy], operations: list[tuple[str, bytes]]
) -> None:
    policy, held = make(), set()
    for operation, name in operations:
        if operation == "victim":
            victim = policy.victim()
            assert (victim in held) if held else victim is None
            held.discard(victim)
            continue
        getattr(policy, operation)(name)
        if operation == "add":
            held.add(name)
        elif operation == "remove":
            held.discard(name)
        assert len(policy) == len(held)
    assert {policy.victim() for _ in range(len(held))} == held
    assert policy.victim() is None


def test_s3_fifo_lets_go_first_of_what_was_used_once() -> None:
    policy = S3Fifo()
    for name in NAMES:
        policy.add(name)
    policy.used(NAMES[0])
    assert policy.victim() == NAMES[1]  # the first one goes on to the main queue


def test_s3_fifo_remembers_what_left_the_small_queue() -> None:
    policy = S3Fifo()
    for name in NAMES:
        policy.add(name)
    gone = policy.victim()
    assert gone == NAMES[0]
    policy.add(gone)  # to the main queue: all others go before
    assert [policy.victim() for _ in NAMES] == [*NAMES[1:], gone]


def test_the_end_of_a_prefix_goes_first() -> None:
    """Two requests share a beginning; where there is room for less than both, LRU from the end keeps the beginning."""
    requests = [[b"system", b"a1", b"a2"], [b"system", b"b1", b"b2"], [b"system", b"a1", b"a2"]]
    assert hit_percent(requests, Lru(), 4, end_first=True) > hit_percent(requests, Lru(), 4, end_first=False)


def test_a_policy_that_there_is_not() -> None:
    with pytest.raises(ApiMisuse, match="eviction 'fifo': one of lru, s3-fifo expected"):
        policy_named("fifo")
