"""What must hold: each demand with what was measured and whether that is enough."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass

from bench.rounds import Results
from kbtp.cli.units import format_size
from kbtp.testing.bench.figures import LOAD, STORE, Cell, Figures, Spread

KIB = 1 << 10
SMALLEST = 4 * KIB
FEW_KIB_MAX = 64 * KIB  # up to here a request's cost counts most, beyond it its octets
DEEP = 32

P50_BLOCKING_MAX = 1.15
P50_SPINNING_MAX = 1.5
DEEP_OPERATIONS_MIN = 0.7
DEEP_GB_MIN = 0.9
PEER_GB_LARGE_MIN = 0.95
BUSY_P99_MAX = 1.3
UNCHANGED_MAX = 1.05
SESSION_KB_MAX = 100.0
IDLE_CPU_PERCENT_MAX = 0.1


@dataclass(frozen=True, slots=True)
class Verdict:
    """One line of the end of a run. `wanted` is the most allowed if `at_most`, else the least."""

    name: str
    measured: Spread
    wanted: float
    at_most: bool
    unit: str = "x"

    @property
    def holds(self) -> bool:
        return self.measured.median <= self.wanted if self.at_most else self.measured.median >= self.wanted

    @property
    def line(self) -> str:
        bound = "at most" if self.at_most else "at least"
        measured = f"{self.measured.median:.3g} {self.unit} ({self.measured.low:.3g} to {self.measured.high:.3g})"
        answer = "ok" if self.holds else "short"
        return f"{answer:5}  {self.name}: {measured}, wanted {bound} {self.wanted:g} {self.unit}"

    def as_dict(self) -> dict[str, object]:
        return {**asdict(self), "holds": self.holds}


def ratio_of(ours: Sequence[float], theirs: Sequence[float]) -> Spread:
    """The ratio of the medians; its range is that of the rounds, each by itself. Raises ValueError without rounds."""
    each = [our / their for our, their in zip(ours, theirs, strict=True)]
    return Spread(statistics.median(ours) / statistics.median(theirs), min(each), max(each), len(each))


Metric = Callable[[Figures], float]


def p50(figures: Figures) -> float:
    return figures.p50_us


def p99(figures: Figures) -> float:
    return figures.p99_us


def gb_per_s(figures: Figures) -> float:
    return figures.gb_per_s


def compared(results: Results, metric: Metric, ours: tuple[str, Cell], theirs: tuple[str, Cell]) -> Spread:
    return ratio_of([metric(one) for one in results[ours]], [metric(one) for one in results[theirs]])


def _loaded_or_stored(operation: str) -> str:
    return {LOAD: "loads", STORE: "stores"}[operation]


def against_floor(results: Results, sizes: Sequence[int], pairs: dict[bool, tuple[str, str]]) -> list[Verdict]:
    """`pairs`: by whether both spin, the names of ours and of the bare sockets' contender."""
    verdicts = []
    for spinning, bound in ((False, P50_BLOCKING_MAX), (True, P50_SPINNING_MAX)):
        ours, floor = pairs[spinning]
        cell = Cell(LOAD, SMALLEST)
        if SMALLEST in sizes:
            how = "both spin" if spinning else "both block"
            measured = compared(results, p50, (ours, cell), (floor, cell))
            verdicts.append(Verdict(f"one load of 4 KiB, p50 / bare sockets, {how}", measured, bound, True))
    ours, floor = pairs[True]
    for operation in (LOAD, STORE):
        for size in sizes:
            cell = Cell(operation, size, DEEP)
            wanted = DEEP_OPERATIONS_MIN if size == SMALLEST else DEEP_GB_MIN
            rate = "operations/s" if size == SMALLEST else "GB/s"
            what = f"{DEEP} {_loaded_or_stored(operation)} of {format_size(size)}, {rate} / bare sockets, both spin"
            measured = compared(results, gb_per_s, (ours, cell), (floor, cell))
            verdicts.append(Verdict(what, measured, wanted, False))
    return verdicts


def best_of(results: Results, peers: Sequence[str], cell: Cell, metric: Metric, *, least: bool) -> str:
    """The peer whose median is best."""
    medians = {peer: statistics.median(metric(one) for one in results[peer, cell]) for peer in peers}
    return min(medians, key=lambda peer: medians[peer] if least else -medians[peer])


def against_peers(results: Results, sizes: Sequence[int], ours: str, peers: Sequence[str]) -> list[Verdict]:
    """Who is ahead of the best of them is ahead of each."""
    verdicts = []
    for operation in (LOAD, STORE) if peers else ():
        for size in sizes:
            named = f"{_loaded_or_stored(operation)} of {format_size(size)}"
            one, deep = Cell(operation, size), Cell(operation, size, DEEP)
            for label, metric in (("p50", p50), ("p99", p99)):
                best = best_of(results, peers, one, metric, least=True)
                measured = compared(results, metric, (ours, one), (best, one))
                verdicts.append(Verdict(f"{named}, {label} / best peer ({best})", measured, 1.0, True))
            best = best_of(results, peers, deep, gb_per_s, least=False)
            measured = compared(results, gb_per_s, (ours, deep), (best, deep))
            wanted = 1.0 if size <= FEW_KIB_MAX else PEER_GB_LARGE_MIN
            verdicts.append(Verdict(f"{DEEP} {named}, GB/s / best peer ({best})", measured, wanted, False))
    return verdicts
