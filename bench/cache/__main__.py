"""`python -m bench.cache`: what must hold of the cache, a line each. Exit status 0 if all of it does, 1 if not."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import click

from bench.cache import behaviour, speed, traces
from bench.contenders import ANYWHERE, halves
from bench.eviction import PARTS
from kbtp import limits
from kbtp.cli.bench import progress_bar
from kbtp.cli.units import Seconds, Size
from kbtp.errors import KbtpError
from kbtp.testing.bench.process import end_in_order_on_sigterm

KIB, MIB = 1 << 10, 1 << 20
SIZES = (4 * KIB, 64 * KIB, 256 * KIB, MIB, 4 * MIB)
PHASES = ("traces", "speed", "behaviour")


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.argument("trace", nargs=-1, type=click.Path(path_type=Path, exists=True, dir_okay=False))
@click.option("--only", type=click.Choice(PHASES), multiple=True, help="Leave the other parts out.")
@click.option("--block-size", "sizes", type=Size(), multiple=True, show_default="4KiB 64KiB 256KiB 1MiB 4MiB")
@click.option("--rounds", type=click.IntRange(1), default=5, show_default=True)
@click.option("--seconds", type=Seconds(), default=0.5, show_default="0.5s", help="How long one measurement takes.")
@click.option("--kills", type=click.IntRange(1), default=behaviour.KILLS, show_default=True)
@click.option("--writers", type=click.IntRange(1), default=behaviour.WRITERS, show_default=True)
@click.option("--writers-for", type=Seconds(), default=behaviour.WRITERS_S, show_default="60s")
@click.option("--pin/--no-pin", default=True, help="Servers on one half of the processors, clients on the other.")
@click.option("--json", "json_path", type=click.Path(path_type=Path, dir_okay=False), help="Write all of it there.")
def main(
    trace: tuple[Path, ...], only: tuple[str, ...], sizes: tuple[int, ...], rounds: int, seconds: float, kills: int,
    writers: int, writers_for: float, pin: bool, json_path: Path | None,
) -> None:  # fmt: skip
    """Each TRACE is a file as `kbtp replay` reads it, such as those published with the Mooncake paper."""
    phases = only or PHASES
    lines: list[tuple[bool, str]] = []
    notes: list[str] = []
    steps = len(trace) * (len(PARTS) + 1) * ("traces" in phases) + ("behaviour" in phases) * (
        kills + round(writers_for)
    )
    try:
        with progress_bar(steps) as advance:
            if "traces" in phases:
                made = traces.requirements(trace, advance)
                lines += [(one.holds, one.line) for one in made]
                if not trace:
                    lines.append((False, "short  traces: none was given, so nothing was shown"))
            if "behaviour" in phases:
                found = [
                    behaviour.round_trips(),
                    behaviour.keys(),
                    behaviour.killed_writers(kills, advance),
                    behaviour.many_writers(writers, writers_for, advance),
                ]
                lines += [(one.holds, one.line) for one in found]
        if "speed" in phases:
            chosen = sizes or SIZES
            with progress_bar(sum(len(speed.cells_of(size)) for size in chosen) * rounds * 2) as advance:
                verdicts, notes, results = speed.verdicts(
                    chosen, rounds, seconds, limits.RNIC_SPIN_US, halves() if pin else ANYWHERE, advance
                )
            notes += speed.figures(results)
            lines += [(one.holds, one.line) for one in verdicts]
    except KbtpError as error:
        raise click.ClickException(str(error)) from None
    for line in (*notes, *(line for _, line in lines)):
        click.echo(line)
    if json_path is not None:
        json_path.parent.mkdir(parents=True, exist_ok=True)
        json_path.write_text(json.dumps({"notes": notes, "lines": [line for _, line in lines]}, indent=1))
    sys.exit(not all(holds for holds, _ in lines))


if __name__ == "__main__":
    end_in_order_on_sigterm()
    main()
