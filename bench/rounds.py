"""Rounds: everyone is measured in turn, so that what the machine does meanwhile happens to all of them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from typing import TypeAlias

from bench.contenders import Contender
from kbtp.testing.bench.figures import Cell, Figures

Results: TypeAlias = dict[tuple[str, Cell], list[Figures]]
"""The figures of each round, by the contender's name and the cell."""


def turns(contenders: Sequence[Contender], number: int) -> list[Contender]:
    """The order in round `number`: each begins in its turn, so that nobody always follows the same one."""
    first = number % len(contenders)
    return [*contenders[first:], *contenders[:first]]


def steps(contenders: Iterable[Contender], cells: Sequence[Cell]) -> int:
    """How many measurements one round has."""
    return sum(cell.operation in contender.operations for contender in contenders for cell in cells)


def interleaved(
    contenders: Sequence[Contender],
    cells: Sequence[Cell],
    *,
    rounds: int,
    seconds: float,
    advance: Callable[[str], None],
) -> Results:
    """Measure each cell, all of one block size, on each contender that has its operation, `rounds` times.

    `advance` is told before each measurement what it is. Raises BenchFailed; all processes have ended then.
    """
    results: Results = {}
    block_bytes = cells[0].block_bytes
    initiators = max(cell.initiators for cell in cells)
    with ExitStack() as stack:
        for contender in contenders:
            contender.open(block_bytes, initiators)
            stack.callback(contender.close)
        for number in range(rounds):
            for cell in cells:
                for contender in turns(contenders, number):
                    if cell.operation in contender.operations:
                        advance(f"{contender.name}: {cell.operation}")
                        figures = contender.measure(cell, seconds)
                        results.setdefault((contender.name, cell), []).append(figures)
    return results
