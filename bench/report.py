"""What a run says: a table, a JSON object, a plot, and one line for each demand."""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table

from bench.ratios import DEEP, Verdict
from bench.rounds import Results
from kbtp.cli.units import format_size
from kbtp.testing.bench.figures import LOAD, OPERATIONS, STORE, Cell, Spread, row_of, spreads_of

PLOT_INCHES = (13.0, 9.5)
PLOT_LEGEND_COLUMNS = 6


def table_of(results: Results) -> Table:
    """A line for each operation, block size, number of initiators and contender."""
    table = Table(box=None, padding=(0, 2, 0, 0))
    for heading in ("operation", "block", "initiators", ""):
        table.add_column(heading, no_wrap=True)
    for heading in ("p50, us", "p99, us", "p99.9, us", f"GB/s, {DEEP} deep", "operations/s", "server CPU s/GB"):
        table.add_column(heading, justify="right", no_wrap=True)
    lines = dict.fromkeys((cell.operation, cell.block_bytes, cell.initiators) for _, cell in results)
    names = list(dict.fromkeys(name for name, _ in results))
    for operation, size, initiators in sorted(lines, key=lambda line: (OPERATIONS.index(line[0]), line[2], line[1])):
        head = (operation, format_size(size), str(initiators))
        for name in names:
            one = _spreads(results, name, Cell(operation, size, 1, initiators))
            deep = _spreads(results, name, Cell(operation, size, DEEP, initiators))
            if one or deep:
                table.add_row(
                    *head,
                    name,
                    *(_text(one, metric) for metric in ("p50_us", "p99_us", "p999_us")),
                    *(_text(deep, metric) for metric in ("gb_per_s", "operations_per_s", "server_cpu_s_per_gb")),
                )
                head = ("", "", "")
    return table


def _spreads(results: Results, name: str, cell: Cell) -> dict[str, Spread]:
    rounds = results.get((name, cell))
    return spreads_of(rounds) if rounds else {}


def _text(spreads: dict[str, Spread], metric: str) -> str:
    return spreads[metric].text if metric in spreads else "-"


def print_report(results: Results, verdicts: Sequence[Verdict], notes: Sequence[str]) -> None:
    console = Console(width=None if Console().is_terminal else 180, soft_wrap=True, highlight=False)
    console.print(table_of(results))
    console.print("medians of the rounds, ± half of their range; contents verified")
    for note in notes:
        console.print(note, markup=False)
    if verdicts:
        console.print()
    for verdict in verdicts:
        console.print(verdict.line, markup=False)


def write_json(path: Path, results: Results, verdicts: Sequence[Verdict], told: dict[str, object]) -> None:
    rows = [{"contender": name, **row_of(cell, rounds)} for (name, cell), rounds in results.items()]
    whole = {**told, "machine": machine(), "rows": rows, "demands": [verdict.as_dict() for verdict in verdicts]}
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(whole, indent=1) + "\n")


def machine() -> dict[str, object]:
    """What figures depend on."""
    models = [
        line.partition(":")[2].strip()
        for line in Path("/proc/cpuinfo").read_text().splitlines()
        if line.startswith("model name")
    ]
    return {
        "processor": models[0] if models else platform.machine(),
        "processors": os.cpu_count(),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "load_average": os.getloadavg(),
    }


def plot(path: Path, results: Results, names: Sequence[str]) -> None:
    """Latency (median, and p99 dashed) and throughput by block size, loads and stores, for one initiator.

    Raises ImportError where matplotlib is not installed.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    color_of = matplotlib.colormaps["tab20"]
    figure, rows = pyplot.subplots(2, 2, figsize=PLOT_INCHES, sharex=True, sharey="row")
    for column, operation in enumerate((LOAD, STORE)):
        above, below = rows[0][column], rows[1][column]
        above.set_title(f"{operation}, one outstanding: p50, dashed p99")
        below.set_title(f"{operation}, {DEEP} outstanding")
        for number, name in enumerate(names):
            color, width = color_of(number), 2.5 if name.startswith("kbtp") else 1.2
            for metric, style in (("p50_us", "-"), ("p99_us", "--")):
                _draw(above, results, name, operation, 1, metric, color=color, linewidth=width, linestyle=style)
            _draw(below, results, name, operation, DEEP, "gb_per_s", color=color, linewidth=width, label=name)
        below.set_xlabel("block, octets")
    rows[0][0].set_ylabel("us")
    rows[1][0].set_ylabel("GB/s")
    for axes in rows.flat:
        axes.set_xscale("log", base=2)
        axes.grid(True, alpha=0.3)
    rows[0][0].set_yscale("log")
    handles, labels = rows[1][0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="lower center", ncols=PLOT_LEGEND_COLUMNS, fontsize="small")
    figure.tight_layout(rect=(0, 0.08, 1, 1))
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def _draw(
    axes: object, results: Results, name: str, operation: str, outstanding: int, metric: str, **style: object
) -> None:
    """A line with bars from the least to the greatest round, through the sizes that were measured."""
    points = sorted(
        (cell.block_bytes, spreads_of(rounds)[metric])
        for (who, cell), rounds in results.items()
        if who == name and cell == Cell(operation, cell.block_bytes, outstanding)
    )
    if points:
        axes.errorbar(  # type: ignore[attr-defined]
            [size for size, _ in points],
            [spread.median for _, spread in points],
            yerr=[
                [spread.median - spread.low for _, spread in points],
                [spread.high - spread.median for _, spread in points],
            ],
            capsize=2,
            **style,
        )
