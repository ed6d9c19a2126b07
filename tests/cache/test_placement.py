"""Rendezvous hashing: shares by size, and a target more or less moves no key between the others."""

from __future__ import annotations

from collections import Counter

from kbtp.cache.announcement import Announcement
from kbtp.cache.keys import Names
from kbtp.cache.placement import placement

TARGETS = [Announcement(7**number, f"kbtp://10.0.0.{number}", 4096, 100) for number in range(1, 6)]
NAMES = [Names().of(b"%d" % number) for number in range(2000)]


def first_of(name: bytes, targets: list[Announcement]) -> str:
    return placement(name, targets)[0].url


def test_every_target_gets_its_share() -> None:
    counts = Counter(first_of(name, TARGETS) for name in NAMES)
    assert len(counts) == len(TARGETS)
    assert all(300 < count < 500 for count in counts.values())


def test_a_pool_twice_as_large_gets_twice_as_much() -> None:
    large = Announcement(99, "kbtp://10.0.0.99", 8192, 100)
    counts = Counter(first_of(name, [TARGETS[0], large]) for name in NAMES)
    assert 1.7 < counts[large.url] / counts[TARGETS[0].url] < 2.4


def test_a_target_that_goes_moves_its_own_keys_alone() -> None:
    left = TARGETS[1:]
    for name in NAMES:
        order = placement(name, TARGETS)
        assert placement(name, left) == [target for target in order if target is not TARGETS[0]]


def test_the_order_of_the_list_does_not_matter() -> None:
    assert all(placement(name, TARGETS) == placement(name, TARGETS[::-1]) for name in NAMES[:50])
