"""From the times of single calls to figures, and from the figures of several rounds to medians with their spread."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass

LOAD, STORE, ALLOC = "load", "store", "alloc+free"
OPERATIONS = (LOAD, STORE, ALLOC)
ALLOC_ALONE = "alloc"
"""As ALLOC, but that the free is not timed: for who is compared and has no such operation."""
GB = 1e9
WHOLE_FROM = 100


@dataclass(frozen=True, slots=True)
class Cell:
    """What is measured: `operation` on blocks of `block_bytes`, `outstanding` of them in one call, by `initiators`."""

    operation: str
    block_bytes: int
    outstanding: int = 1
    initiators: int = 1


@dataclass(frozen=True, slots=True)
class Calls:
    """What one initiator saw: how long each call took, and of how many operations it compared the contents."""

    calls_ns: Sequence[int]
    verified: int
    warm_up_calls: int = 0
    """Calls made before, which cost the server as much and are not counted."""


@dataclass(frozen=True, slots=True)
class Figures:
    """One round of one cell. The percentiles are those of a call, so of one operation where one is outstanding."""

    calls: int
    p50_us: float
    p99_us: float
    p999_us: float
    gb_per_s: float
    operations_per_s: float
    server_cpu_s_per_gb: float | None
    """None where the server's process is not known."""
    verified: int

    def as_dict(self) -> dict[str, float | None]:
        return asdict(self)


METRICS = ("p50_us", "p99_us", "p999_us", "gb_per_s", "operations_per_s", "server_cpu_s_per_gb")


@dataclass(frozen=True, slots=True)
class Spread:
    """The median of some rounds, and the least and the greatest of them."""

    median: float
    low: float
    high: float
    rounds: int

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        """Raises ValueError if there are none."""
        return cls(statistics.median(values), min(values), max(values), len(values))

    @property
    def relative(self) -> float:
        """Half the way from the least to the greatest, as a part of the median."""
        return (self.high - self.low) / 2 / self.median if self.median else 0.0

    @property
    def text(self) -> str:
        """`15.6 ±4%`: to three digits, or to the whole number."""
        median = f"{self.median:,.0f}" if self.median >= WHOLE_FROM else f"{self.median:.3g}"
        return f"{median} ±{self.relative:.0%}"


def percentile(ordered: Sequence[int], part: float) -> int:
    """The least of the values, in ascending order, that at least `part` of them do not exceed (nearest rank)."""
    # Rounded first: 0.999 * 1000 must be rank 999 whatever the last bit of the product is.
    return ordered[max(0, math.ceil(round(part * len(ordered), 9)) - 1)]


def figures_of(cell: Cell, measured: Sequence[Calls], server_cpu_s: float | None) -> Figures:
    """Put together what the initiators of one round saw. Raises ValueError if none of them made a call."""
    ordered = sorted(call_ns for calls in measured for call_ns in calls.calls_ns)
    if not ordered:
        raise ValueError("no call was measured")
    # Each initiator's own rate: they begin and end together but for the last call of each.
    rate = sum(len(calls.calls_ns) * cell.outstanding / (sum(calls.calls_ns) / 1e9) for calls in measured)
    calls = len(ordered) + sum(calls.warm_up_calls for calls in measured)
    moved_gb = calls * cell.outstanding * cell.block_bytes / GB
    return Figures(
        calls=len(ordered),
        p50_us=percentile(ordered, 0.5) / 1000,
        p99_us=percentile(ordered, 0.99) / 1000,
        p999_us=percentile(ordered, 0.999) / 1000,
        gb_per_s=rate * cell.block_bytes / GB,
        operations_per_s=rate,
        server_cpu_s_per_gb=None if server_cpu_s is None else server_cpu_s / moved_gb,
        verified=sum(calls.verified for calls in measured),
    )


def spreads_of(rounds: Sequence[Figures]) -> dict[str, Spread]:
    """By metric; one that some round does not have is left out."""
    found = {}
    for metric in METRICS:
        values = [value for figures in rounds if (value := figures.as_dict()[metric]) is not None]
        if len(values) == len(rounds):
            found[metric] = Spread.of(values)
    return found


def row_of(cell: Cell, rounds: Sequence[Figures]) -> dict[str, object]:
    """A cell and its figures as plain values, for JSON."""
    spreads = {metric: asdict(spread) for metric, spread in spreads_of(rounds).items()}
    calls = sum(figures.calls for figures in rounds)
    return {**asdict(cell), "calls": calls, "verified": sum(figures.verified for figures in rounds), **spreads}
