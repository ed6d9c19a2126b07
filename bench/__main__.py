"""`python -m bench`: the whole comparison. Exit status 0 if every demand holds, 1 if one does not."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import click

from bench import behaviour, ratios, report
from bench.contenders import ANYWHERE, Contender, Kbtp, Peer, Places, halves
from bench.peers import KINDS, bare_sockets
from bench.ratios import DEEP, Verdict
from bench.rounds import Results, interleaved, steps
from kbtp import limits
from kbtp.cli.bench import Advance, progress_bar
from kbtp.cli.units import Seconds, Size
from kbtp.errors import KbtpError
from kbtp.testing.bench.figures import LOAD, OPERATIONS, STORE, Cell
from kbtp.testing.bench.process import end_in_order_on_sigterm

KIB, MIB = 1 << 10, 1 << 20
SIZES = (4 * KIB, 64 * KIB, 256 * KIB, MIB, 4 * MIB)
QUICK_SIZES = (4 * KIB, 64 * KIB, MIB)
INITIATORS = (1, 2, 8)
MANY_INITIATORS_BYTES_MAX = MIB  # with larger blocks four times eight initiators take more memory than there may be
ROUNDS, QUICK_ROUNDS = 5, 3
SECONDS, QUICK_SECONDS = 0.3, 0.05
SPIN_US = limits.RNIC_SPIN_US
PHASES = ("comparison", "initiators", "behaviour")


@dataclass(frozen=True, slots=True)
class Field:
    """Everyone who is compared, by what a demand needs of them."""

    kbtp: dict[bool, Kbtp]
    """By whether it spins, as `floor`."""
    floor: dict[bool, Peer]
    peers: Sequence[Peer]

    @property
    def everyone(self) -> list[Contender]:
        return [*self.kbtp.values(), *self.floor.values(), *self.peers]

    @property
    def pairs(self) -> dict[bool, tuple[str, str]]:
        return {spins: (self.kbtp[spins].name, self.floor[spins].name) for spins in (False, True)}


@dataclass(frozen=True, slots=True)
class Ours:
    """What kbtp runs on."""

    rnic: str
    threads: int
    forced_punts: float

    def contender(self, name: str, spin_us: int, places: Places) -> Kbtp:
        return Kbtp(
            name,
            rnic=self.rnic,
            spin_us=spin_us,
            places=places,
            threads=self.threads,
            forced_punts=self.forced_punts,
        )


def field_of(ours: Ours, spin_us: int, floor: Path, with_peers: bool, places: Places) -> tuple[Field, list[str]]:
    """Who takes part, and lines about who does not."""
    spins = {False: 0, True: spin_us}
    named = {False: "blocking", True: f"spin {spin_us} us"}
    found = [kind for kind in KINDS if with_peers and kind.find() is not None]
    absent = [
        f"{kind.name} is not installed: {kind.wanted}" for kind in KINDS if kind.is_judged and kind.find() is None
    ]
    field = Field(
        {s: ours.contender(f"kbtp, {named[s]}", us, places) for s, us in spins.items()},
        {s: Peer(bare_sockets.kind(f"bare sockets, {named[s]}", floor, us), places) for s, us in spins.items()},
        [Peer(kind, places) for kind in found],
    )
    return field, absent


def comparison_cells(size: int) -> list[Cell]:
    return [Cell(operation, size, outstanding) for operation in OPERATIONS for outstanding in (1, DEEP)]


def initiator_cells(size: int, counts: Sequence[int]) -> list[Cell]:
    return [Cell(op, size, depth, count) for op in (LOAD, STORE) for count in counts for depth in (1, DEEP)]


@dataclass(frozen=True, slots=True)
class Run:
    """What to do, and for how long."""

    field: Field
    phases: Sequence[str]
    sizes: Sequence[int]
    rounds: int
    seconds: float
    rnic: str
    spin_us: int
    places: Places

    @property
    def _stages(self) -> list[tuple[list[Contender], list[Cell]]]:
        """Who is measured together, and on what: one block size after the other."""
        stages: list[tuple[list[Contender], list[Cell]]] = []
        if "comparison" in self.phases:
            stages += [(self.field.everyone, comparison_cells(size)) for size in self.sizes]
        if "initiators" in self.phases:
            scaling: list[Contender] = [*self.field.kbtp.values(), *self.field.floor.values()]
            counts = [count for count in INITIATORS if count > 1 or "comparison" not in self.phases]
            sizes = [size for size in self.sizes if size <= MANY_INITIATORS_BYTES_MAX]
            stages += [(scaling, initiator_cells(size, counts)) for size in sizes]
        return stages

    @property
    def steps(self) -> int:
        counted = sum(steps(contenders, cells) for contenders, cells in self._stages)
        if "behaviour" in self.phases:
            counted += behaviour.STEPS_A_ROUND
        return counted * self.rounds

    def measure(self, advance: Advance) -> tuple[Results, list[Verdict]]:
        """Raises BenchFailed."""
        results: Results = {}
        verdicts: list[Verdict] = []
        for contenders, cells in self._stages:
            results |= interleaved(contenders, cells, rounds=self.rounds, seconds=self.seconds, advance=advance)
        if "comparison" in self.phases:
            verdicts += ratios.against_floor(results, self.sizes, self.field.pairs)
            peers = [peer.name for peer in self.field.peers if peer.is_judged]
            verdicts += ratios.against_peers(results, self.sizes, self.field.kbtp[True].name, peers)
        if "behaviour" in self.phases:
            manner = behaviour.Manner(self.rnic, self.spin_us, self.rounds, self.seconds, self.places, advance)
            found, figures = behaviour.verdicts(manner)
            results |= figures
            verdicts += found
        return results, verdicts


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--floor", type=click.Path(path_type=Path, exists=True), required=True, help="baseline/floor.c, built.")
@click.option("--block-size", "sizes", type=Size(), multiple=True, show_default="4KiB 64KiB 256KiB 1MiB 4MiB",
    help="Octets to load and store; may be given often.")  # fmt: skip
@click.option("--only", "phases", type=click.Choice(PHASES), multiple=True, help="Leave the other parts out.")
@click.option("--rounds", type=click.IntRange(1), show_default=f"{ROUNDS}", help="How often each is measured, in turn.")
@click.option("--seconds", type=Seconds(), show_default=f"{SECONDS}s", help="How long one measurement takes.")
@click.option("--quick", is_flag=True, help="Three short rounds: to see that it works, not to judge by.")
@click.option("--spin-us", type=click.IntRange(1), default=SPIN_US, show_default=True, help="For those that spin.")
@click.option("--rnic", default="auto", show_default=True, help="RNIC of target and initiators.")
@click.option("--threads", type=click.IntRange(1, limits.RNIC_THREADS_MAX), default=1, show_default=True,
    help="Event loops of kbtp's target; beyond 1 for the native RNIC only.")  # fmt: skip
@click.option("--forced-punts", type=click.FloatRange(0, 1), default=0.0, show_default=True,
    help="Part of the requests that the target's native RNIC leaves to Python: to see what that costs.")  # fmt: skip
@click.option("--peers/--no-peers", default=True, help="Compare with what else is installed.")
@click.option("--pin/--no-pin", default=True, help="Servers on one half of the processors, clients on the other.")
@click.option("--json", "json_path", type=click.Path(path_type=Path, dir_okay=False), help="Write all figures there.")
@click.option("--plot", "plot_path", type=click.Path(path_type=Path, dir_okay=False), help="Draw a PNG there.")
def main(
    floor: Path, sizes: tuple[int, ...], phases: tuple[str, ...], rounds: int | None, seconds: float | None,
    quick: bool, spin_us: int, rnic: str, threads: int, forced_punts: float, peers: bool, pin: bool,
    json_path: Path | None, plot_path: Path | None,
) -> None:  # fmt: skip
    """Compare kbtp with bare sockets and with peers, and say of each demand whether it holds."""
    places = halves() if pin else ANYWHERE
    field, notes = field_of(Ours(rnic, threads, forced_punts), spin_us, floor, peers, places)
    run = Run(
        field,
        phases or PHASES,
        sizes or (QUICK_SIZES if quick else SIZES),
        rounds or (QUICK_ROUNDS if quick else ROUNDS),
        seconds or (QUICK_SECONDS if quick else SECONDS),
        rnic,
        spin_us,
        places,
    )
    try:
        with progress_bar(run.steps) as advance:
            results, verdicts = run.measure(advance)
    except KbtpError as error:
        raise click.ClickException(str(error)) from None
    told = field.kbtp[True].told
    if told:
        notes.append(f"kbtp: target on the {told['target']} RNIC, initiators on the {told['initiators']} RNIC")
    if quick:
        notes.append("a quick run: too short to judge by")
    if json_path is not None:
        report.write_json(
            json_path,
            results,
            verdicts,
            {
                "rounds": run.rounds,
                "seconds": run.seconds,
                "spin_us": spin_us,
                "pinned": places != ANYWHERE,
                "threads": threads,
                "forced_punts": forced_punts,
                **told,
            },
        )
        notes.append(f"all figures: {json_path}")
    if plot_path is not None and "comparison" in run.phases:
        try:
            report.plot(plot_path, results, [one.name for one in field.everyone])
            notes.append(f"plot: {plot_path}")
        except ImportError as error:
            notes.append(f"no plot: {error}")
    report.print_report(results, verdicts, notes)
    sys.exit(0 if all(verdict.holds for verdict in verdicts) else 1)


if __name__ == "__main__":
    end_in_order_on_sigterm()
    main()
