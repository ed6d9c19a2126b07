"""From calls to figures, from rounds to medians with their spread."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kbtp.testing.bench.figures import LOAD, Calls, Cell, Figures, Spread, figures_of, percentile, row_of, spreads_of


@pytest.mark.parametrize(
    ("part", "expected"), [(0.0, 1), (0.001, 1), (0.5, 500), (0.501, 501), (0.99, 990), (0.999, 999), (1.0, 1000)]
)
def test_percentiles_are_of_the_nearest_rank(part: float, expected: int) -> None:
    assert percentile(range(1, 1001), part) == expected


def test_of_a_single_call_every_percentile_is_that_call() -> None:
    assert [percentile([7], part) for part in (0.5, 0.99, 0.999)] == [7, 7, 7]


@given(st.lists(st.integers(0, 1 << 40), min_size=1), st.floats(0.01, 1.0))
def test_so_many_are_not_above_it(values: list[int], part: float) -> None:
    ordered = sorted(values)
    found = percentile(ordered, part)
    assert sum(value <= found for value in ordered) >= part * len(ordered) - 1e-6
    assert sum(value < found for value in ordered) < part * len(ordered) + 1e-6


def test_a_spread_is_the_median_and_the_range() -> None:
    spread = Spread.of([14.0, 10.0, 12.0])
    assert (spread.median, spread.low, spread.high, spread.rounds) == (12.0, 10.0, 14.0, 3)
    assert spread.text == "12 ±17%"
    assert Spread.of([1234.4, 1234.4]).text == "1,234 ±0%"
    assert Spread.of([0.0]).text == "0 ±0%"


def test_the_rates_of_initiators_add_up() -> None:
    """Two of them, a call of 8 operations each: 1 ms and 2 ms."""
    cell = Cell(LOAD, 125_000, outstanding=8, initiators=2)
    figures = figures_of(cell, [Calls([1_000_000], 8, warm_up_calls=1), Calls([2_000_000], 8, warm_up_calls=1)], 0.8)
    assert figures.operations_per_s == pytest.approx(8000 + 4000)
    assert figures.gb_per_s == pytest.approx(1.5)
    assert (figures.calls, figures.verified) == (2, 16)
    assert (figures.p50_us, figures.p99_us, figures.p999_us) == (1000, 2000, 2000)
    # The server was paid for the calls of the warm-up too: 4 calls of 8 blocks.
    assert figures.server_cpu_s_per_gb == pytest.approx(0.8 / 0.004)


def test_without_a_call_there_is_nothing_to_say() -> None:
    with pytest.raises(ValueError, match="no call"):
        figures_of(Cell(LOAD, 4096), [Calls([], 0)], None)


def test_a_metric_that_some_round_lacks_is_left_out() -> None:
    known = Figures(1, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 1)
    unknown = Figures(1, 3.0, 2.0, 3.0, 4.0, 5.0, None, 1)
    assert set(spreads_of([known])) - set(spreads_of([known, unknown])) == {"server_cpu_s_per_gb"}
    row = row_of(Cell(LOAD, 4096), [known, unknown])
    assert row["p50_us"] == {"median": 2.0, "low": 1.0, "high": 3.0, "rounds": 2}
    assert (row["operation"], row["block_bytes"], row["calls"], row["verified"]) == (LOAD, 4096, 2, 2)
