"""In turn: who is measured when, and that everyone is closed."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from bench.rounds import interleaved, steps
from kbtp.testing.bench.figures import ALLOC, LOAD, Cell, Figures
from kbtp.testing.bench.process import BenchFailed

CELLS = [Cell(LOAD, 4096), Cell(ALLOC, 4096, 32, 2)]


class Actor:
    """Notes what is asked of it in a list that all share."""

    def __init__(self, name: str, log: list[str], operations: Sequence[str] = (LOAD,), fails: bool = False) -> None:
        self.name = name
        self.operations = operations
        self._log = log
        self._fails = fails

    def open(self, block_bytes: int, initiators: int) -> None:
        self._log.append(f"{self.name} opens for {initiators}")

    def measure(self, cell: Cell, seconds: float) -> Figures:
        if self._fails:
            raise BenchFailed("it broke")
        self._log.append(f"{self.name} {cell.operation}")
        return Figures(1, 1.0, 1.0, 1.0, 1.0, 1.0, None, 1)

    def close(self) -> None:
        self._log.append(f"{self.name} closes")


def test_each_begins_in_its_turn() -> None:
    log: list[str] = []
    told: list[str] = []
    actors = [Actor("a", log, (LOAD, ALLOC)), Actor("b", log)]
    results = interleaved(actors, CELLS, rounds=2, seconds=0.1, advance=told.append)
    opened, first, second, closed = log[:2], log[2:5], log[5:8], log[8:]
    assert opened == ["a opens for 2", "b opens for 2"]
    assert first == ["a load", "b load", "a alloc+free"]
    assert second == ["b load", "a load", "a alloc+free"]
    assert closed == ["b closes", "a closes"]
    assert len(told) == 6 == 2 * steps(actors, CELLS)
    assert {key: len(rounds) for key, rounds in results.items()} == {
        ("a", CELLS[0]): 2,
        ("b", CELLS[0]): 2,
        ("a", CELLS[1]): 2,
    }


def test_who_fails_leaves_nobody_open() -> None:
    log: list[str] = []
    with pytest.raises(BenchFailed, match="it broke"):
        interleaved(
            [Actor("a", log), Actor("b", log, fails=True)], CELLS, rounds=1, seconds=0.1, advance=lambda _: None
        )
    assert log[-2:] == ["b closes", "a closes"]
