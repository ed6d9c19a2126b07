"""`kbtp bench`: how fast blocks go to a target and come back."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace

import click
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn
from rich.table import Table

import kbtp
from kbtp import limits
from kbtp.address import Address
from kbtp.cli.keys import key_file_option
from kbtp.cli.serve import available_memory_bytes
from kbtp.cli.units import Seconds, Size, format_size
from kbtp.errors import ApiMisuse
from kbtp.testing.bench.crew import Crew, blocks_for, memory_bytes
from kbtp.testing.bench.figures import OPERATIONS, Cell, Figures, row_of, spreads_of
from kbtp.testing.bench.target import TargetProcess, TargetSettings
from kbtp.testing.bench.workload import STAMP_BYTES

KIB, MIB = 1 << 10, 1 << 20
SIZES = (4 * KIB, 64 * KIB, 256 * KIB, MIB, 4 * MIB)
QUICK_SIZES = (4 * KIB, 64 * KIB, MIB)
INITIATORS = (1, 2, 8)
QUICK_INITIATORS = (1, 2)
OUTSTANDING = 32
ROUNDS, QUICK_ROUNDS = 5, 3
SECONDS, QUICK_SECONDS = 0.3, 0.05


@dataclass(frozen=True, slots=True)
class Plan:
    """What to measure, and for how long."""

    sizes: Sequence[int]
    operations: Sequence[str]
    initiators: Sequence[int]
    outstanding: int
    rounds: int
    seconds: float

    def cells(self, block_bytes: int) -> list[Cell]:
        depths = dict.fromkeys((1, self.outstanding))
        return [
            Cell(operation, block_bytes, outstanding, initiators)
            for initiators in self.initiators
            for operation in self.operations
            for outstanding in depths
        ]


@dataclass(frozen=True, slots=True)
class Reach:
    """The target to measure and how: `url` None starts one for each block size."""

    url: str | None
    pid: int | None
    namespace: str | None
    key_file: str | None
    rnic: str
    spin_us: int | None
    threads: int = 1
    """Of a target that is started."""
    pool_blocks: int | None = None
    """Of the target at `url`."""


@click.command()
@click.argument("url", required=False)
@click.option("--block-size", "sizes", type=Size(), multiple=True, show_default="4KiB 64KiB 256KiB 1MiB 4MiB",
    help="Octets to load and store; may be given often.")  # fmt: skip
@click.option("--operation", "operations", type=click.Choice(OPERATIONS), multiple=True, show_default="all",
    help="What to measure; may be given often.")  # fmt: skip
@click.option("--initiators", type=click.IntRange(1, 64), multiple=True, show_default="1 2 8",
    help="Processes that load and store at the same time; may be given often.")  # fmt: skip
@click.option("--outstanding", type=click.IntRange(2, 256), default=OUTSTANDING, show_default=True,
    help="Operations in one call where throughput is measured.")  # fmt: skip
@click.option("--rounds", type=click.IntRange(1, 1000), show_default=f"{ROUNDS}",
    help="How often each is measured; the median is shown, ± half of the range.")  # fmt: skip
@click.option("--seconds", type=Seconds(), show_default=f"{SECONDS}s", help="How long one measurement takes.")
@click.option("--quick", is_flag=True, help="Fewer, shorter measurements: some seconds in all.")
@click.option("--spin-us", type=click.IntRange(0, 1_000_000), show_default="the RNIC's own",
    help="How long to look for something to do before blocking, on an RNIC that can.")  # fmt: skip
@click.option("--threads", type=click.IntRange(1, limits.RNIC_THREADS_MAX), default=1, show_default=True,
    help="Event loops of the target that is started; beyond 1 for the native RNIC only.")  # fmt: skip
@click.option("--rnic", default="auto", show_default=True, envvar="KBTP_RNIC", help="RNIC to use.")
@click.option("--namespace", envvar="KBTP_NAMESPACE", help="Must equal the target's, when it has one.")
@key_file_option
@click.option(
    "--pid", type=click.IntRange(1), help="The target's process, if it runs on this machine: to tell its cost."
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def bench(
    url: str | None, sizes: tuple[int, ...], operations: tuple[str, ...], initiators: tuple[int, ...],
    outstanding: int, rounds: int | None, seconds: float | None, quick: bool, spin_us: int | None, threads: int,
    rnic: str, namespace: str | None, key_file: str | None, pid: int | None, as_json: bool,
) -> None:  # fmt: skip
    """Measure latency with one operation outstanding and throughput with many, and verify what comes back.

    Without URL a target is started on this machine, in a process of its own; so is every initiator.

    \b
    Examples:
      kbtp bench --quick
      kbtp bench kbtp://10.0.0.7 --block-size 1MiB --operation load --initiators 1
      kbtp bench --spin-us 500 --json
    """
    plan = Plan(
        sizes=sizes or (QUICK_SIZES if quick else SIZES),
        operations=operations or OPERATIONS,
        initiators=sorted(set(initiators or (QUICK_INITIATORS if quick else INITIATORS))),
        outstanding=outstanding,
        rounds=rounds or (QUICK_ROUNDS if quick else ROUNDS),
        seconds=seconds or (QUICK_SECONDS if quick else SECONDS),
    )
    if min(plan.sizes) < STAMP_BYTES:
        raise ApiMisuse(f"--block-size: a block is stamped to know it again, which takes {STAMP_BYTES} octets")
    if not math.isfinite(plan.seconds):
        raise ApiMisuse("--seconds: a measurement has to end")
    if pid is not None and url is None:
        raise click.UsageError("--pid is for a target that was given; one that is started here is known")
    if threads > 1 and url is not None:
        raise click.UsageError("--threads is for a target that is started here; one that was given has its own")
    reach = Reach(url, pid, namespace, key_file if url is not None else None, rnic, spin_us, threads)
    said: list[str] = []
    if url is not None:
        Address.parse(url)
        plan, reach = _within_target(plan, reach, url, said)
    plan = _within_memory(plan, said)
    figures, rnics = _measure(plan, reach)
    if as_json:
        rows = [row_of(cell, rounds_) for cell, rounds_ in figures.items()]
        told = {"url": url, "rounds": plan.rounds, "seconds": plan.seconds, "spin_us": spin_us, **rnics}
        click.echo(json.dumps({**told, "left_out": said, "rows": rows}))
        return
    console = Console(width=None if Console().is_terminal else 150)
    console.print(table_of(figures, plan.outstanding))
    console.print(
        f"median of {plan.rounds} rounds of {plan.seconds:g} s, ± half of their range; contents verified; "
        + ", ".join(f"{key.partition('_')[0]} on the {name} RNIC" for key, name in rnics.items())
    )
    for line in said:
        console.print(line)


def _within_target(plan: Plan, reach: Reach, url: str, said: list[str]) -> tuple[Plan, Reach]:
    """Without the sizes and numbers of initiators that the target has no room for. Raises as `kbtp.connect` does."""
    with kbtp.connect(url, name="kbtp bench", namespace=reach.namespace, key_file=reach.key_file, handles=1) as client:
        block_bytes, pool_blocks = client.terms.block_size_bytes, client.terms.pool_blocks
    sizes = [size for size in plan.sizes if size <= block_bytes]
    said += [
        f"{format_size(size)} was left out: the target's blocks have {format_size(block_bytes)}"
        for size in plan.sizes
        if size not in sizes
    ]
    initiators = [count for count in plan.initiators if 2 * plan.outstanding * count <= pool_blocks]
    said += [
        f"{count} initiators were left out: with {plan.outstanding} outstanding each they need "
        f"{2 * plan.outstanding * count} blocks, the target has {pool_blocks}"
        for count in plan.initiators
        if count not in initiators
    ]
    return _something_left(replace(plan, sizes=sizes, initiators=initiators), said), replace(
        reach, pool_blocks=pool_blocks
    )


def _within_memory(plan: Plan, said: list[str]) -> Plan:
    """Without the sizes that this machine's memory has no room for."""
    available = available_memory_bytes()
    sizes = []
    for size in plan.sizes:
        needed = memory_bytes(size, plan.outstanding, max(plan.initiators))
        if available is None or needed <= available:
            sizes.append(size)
        else:
            said.append(f"{format_size(size)} was left out: it takes {format_size(needed)} of memory")
    return _something_left(replace(plan, sizes=sizes), said)


def _something_left(plan: Plan, said: list[str]) -> Plan:
    if not plan.sizes or not plan.initiators:
        raise ApiMisuse("nothing is left to measure: " + "; ".join(said))
    return plan


def _measure(plan: Plan, reach: Reach) -> tuple[dict[Cell, list[Figures]], dict[str, str]]:
    figures: dict[Cell, list[Figures]] = {}
    rnics: dict[str, str] = {}
    with progress_bar(sum(len(plan.cells(size)) for size in plan.sizes) * plan.rounds) as advance:
        for size in plan.sizes:
            with ExitStack() as stack:
                url, pids = reach.url, [] if reach.pid is None else [reach.pid]
                if url is None:
                    target = TargetProcess(_target_for(size, plan, reach))
                    stack.callback(target.stop)
                    url, pids = target.url, [target.pid]
                    rnics["target_rnic"] = target.rnic
                crew = Crew(
                    max(plan.initiators),
                    block_bytes=size,
                    blocks=_blocks(size, plan, reach),
                    slots=plan.outstanding,
                    settings={
                        "url": url,
                        "rnic": reach.rnic,
                        "spin_us": reach.spin_us,
                        "namespace": reach.namespace,
                        "key_file": reach.key_file,
                    },
                    server_pids=lambda pids=pids: pids,  # type: ignore[misc]
                )
                stack.enter_context(crew)
                rnics["initiator_rnic"] = crew.told["rnic"]
                for _ in range(plan.rounds):
                    for cell in plan.cells(size):
                        advance(f"{cell.operation} {format_size(size)}")
                        figures.setdefault(cell, []).append(crew.measure(cell, plan.seconds))
    return figures, rnics


def _target_for(size: int, plan: Plan, reach: Reach) -> TargetSettings:
    blocks = (_blocks(size, plan, reach) + plan.outstanding) * max(plan.initiators)
    multiple = limits.BLOCK_SIZE_MULTIPLE_BYTES
    block_bytes = max(limits.BLOCK_SIZE_MIN_BYTES, size + -size % multiple)
    return TargetSettings(block_bytes, blocks, reach.rnic, reach.spin_us, threads=reach.threads)


def _blocks(size: int, plan: Plan, reach: Reach) -> int:
    """Blocks that each initiator loads from; the target has room for as many to store as are outstanding too."""
    initiators = max(plan.initiators)
    blocks = blocks_for(size, plan.outstanding, initiators)
    return blocks if reach.pool_blocks is None else min(blocks, reach.pool_blocks // initiators - plan.outstanding)


def table_of(figures: dict[Cell, list[Figures]], outstanding: int) -> Table:
    """One line an operation, block size and number of initiators."""
    table = Table(box=None, padding=(0, 2, 0, 0))
    for heading in ("operation", "block", "initiators"):
        table.add_column(heading, no_wrap=True)
    for heading in ("p50, us", "p99, us", "p99.9, us", f"GB/s, {outstanding} deep", "operations/s", "server CPU s/GB"):
        table.add_column(heading, justify="right", no_wrap=True)
    lines = dict.fromkeys((cell.block_bytes, cell.initiators, cell.operation) for cell in figures)
    for size, initiators, operation in sorted(lines, key=lambda line: (OPERATIONS.index(line[2]), *line[:2])):
        one = spreads_of(figures[Cell(operation, size, 1, initiators)])
        many = spreads_of(figures[Cell(operation, size, outstanding, initiators)])
        cost = many.get("server_cpu_s_per_gb")
        table.add_row(
            operation,
            format_size(size),
            str(initiators),
            *(one[metric].text for metric in ("p50_us", "p99_us", "p999_us")),
            many["gb_per_s"].text,
            many["operations_per_s"].text,
            cost.text if cost else "-",
        )
    return table


class Advance:
    """Called before each measurement with what it is."""

    def __init__(self, progress: Progress, task: TaskID) -> None:
        self._progress = progress
        self._task = task
        self._begun = False

    def __call__(self, what: str) -> None:
        self._progress.update(self._task, advance=1 if self._begun else 0, description=what)
        self._begun = True
        self._progress.refresh()


@contextmanager
def progress_bar(steps: int) -> Iterator[Advance]:
    """On standard error, if that is a terminal. Drawn between measurements only: no thread runs beside them."""
    columns = (BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TextColumn("{task.description}"))
    console = Console(stderr=True)
    with Progress(
        *columns, console=console, auto_refresh=False, transient=True, disable=not console.is_terminal
    ) as progress:
        yield Advance(progress, progress.add_task("", total=steps))
