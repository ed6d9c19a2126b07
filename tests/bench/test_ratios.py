"""What `make bench` demands: which ratios, of whom, and when they hold."""

from __future__ import annotations

import pytest

from bench.ratios import DEEP, KIB, Verdict, against_floor, against_peers, ratio_of
from bench.rounds import Results
from kbtp.testing.bench.figures import LOAD, STORE, Cell, Figures, Spread

OURS, FLOOR = "kbtp", "bare sockets"
SIZES = (4 * KIB, 256 * KIB)


def figures(p50_us: float, p99_us: float, gb_per_s: float) -> Figures:
    return Figures(100, p50_us, p99_us, p99_us, gb_per_s, gb_per_s * 1000, None, 100)


def results(**by_name: tuple[float, float, float]) -> Results:
    """Three rounds of everything, the same figures for each size: p50, p99, GB/s by contender."""
    return {
        (name, Cell(operation, size, outstanding)): [figures(*numbers)] * 3
        for name, numbers in by_name.items()
        for operation in (LOAD, STORE)
        for size in SIZES
        for outstanding in (1, DEEP)
    }


def test_the_ratio_is_that_of_the_medians_and_its_range_that_of_the_rounds() -> None:
    ratio = ratio_of([10.0, 12.0, 30.0], [10.0, 8.0, 10.0])
    assert (ratio.median, ratio.low, ratio.high, ratio.rounds) == (1.2, 1.0, 3.0, 3)


@pytest.mark.parametrize(
    ("median", "at_most", "holds"),
    [(1.15, True, True), (1.16, True, False), (1.14, False, False), (1.15, False, True), (1.2, False, True)],
)
def test_a_demand_holds_up_to_its_bound(median: float, at_most: bool, holds: bool) -> None:
    verdict = Verdict("p50 / bare sockets", Spread(median, 1.0, 2.0, 5), 1.15, at_most)
    assert verdict.holds is holds
    assert verdict.line.startswith("ok " if holds else "short ")
    assert verdict.as_dict()["holds"] is holds


def test_the_line_says_name_measured_and_wanted() -> None:
    verdict = Verdict("memory a session", Spread(17.54, 17.5, 17.62, 5), 100, True, "kB")
    assert verdict.line == "ok     memory a session: 17.5 kB (17.5 to 17.6), wanted at most 100 kB"


def test_against_the_floor_latency_both_ways_and_throughput_of_each_size() -> None:
    found = results(kbtp=(14.0, 20.0, 0.8), kbtp_spin=(14.0, 20.0, 0.8), floor=(10.0, 15.0, 1.0))
    pairs = {False: ("kbtp", "floor"), True: ("kbtp_spin", "floor")}
    verdicts = {verdict.name: (verdict.wanted, verdict.holds) for verdict in against_floor(found, SIZES, pairs)}
    assert verdicts == {
        "one load of 4 KiB, p50 / bare sockets, both block": (1.15, False),
        "one load of 4 KiB, p50 / bare sockets, both spin": (1.5, True),
        "32 loads of 4 KiB, operations/s / bare sockets, both spin": (0.7, True),
        "32 loads of 256 KiB, GB/s / bare sockets, both spin": (0.9, False),
        "32 stores of 4 KiB, operations/s / bare sockets, both spin": (0.7, True),
        "32 stores of 256 KiB, GB/s / bare sockets, both spin": (0.9, False),
    }


def test_against_the_best_peer_in_each_respect() -> None:
    found = results(kbtp=(10.0, 20.0, 0.97), quick=(11.0, 30.0, 0.5), steady=(12.0, 19.0, 1.0))
    verdicts = against_peers(found, SIZES, "kbtp", ["quick", "steady"])
    assert [(verdict.name, verdict.holds) for verdict in verdicts[:6]] == [
        ("loads of 4 KiB, p50 / best peer (quick)", True),
        ("loads of 4 KiB, p99 / best peer (steady)", False),
        ("32 loads of 4 KiB, GB/s / best peer (steady)", False),
        ("loads of 256 KiB, p50 / best peer (quick)", True),
        ("loads of 256 KiB, p99 / best peer (steady)", False),
        ("32 loads of 256 KiB, GB/s / best peer (steady)", True),
    ]
    assert len(verdicts) == 12


def test_without_peers_nothing_is_said_of_them() -> None:
    assert against_peers(results(kbtp=(1.0, 1.0, 1.0)), SIZES, "kbtp", []) == []
