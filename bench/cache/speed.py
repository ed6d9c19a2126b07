"""How fast: puts and gets beside the bare session below them, and beside other stores of objects under keys."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence

from bench.cache.contender import NAME, CacheContender
from bench.contenders import Contender, Kbtp, Peer, Places
from bench.peers import KINDS
from bench.ratios import DEEP, Verdict, compared, gb_per_s, p50
from bench.rounds import Results, interleaved
from kbtp.cli.units import format_size
from kbtp.testing.bench.figures import ALLOC, ALLOC_ALONE, LOAD, STORE, Cell

SESSION_MIN = 0.85
SESSION_BYTES = 1 << 20
RAW = "the session below"
PEERS = ("Mooncake Store", "LMCache server", "LMCache server, minimal client")


def verdicts(
    sizes: Sequence[int], rounds: int, seconds: float, spin_us: int, places: Places, advance: Callable[[str], None]
) -> tuple[list[Verdict], list[str], Results]:
    """What holds, lines about peers that are not there, and all figures. Raises BenchFailed."""
    kinds = [kind for kind in KINDS if kind.name in PEERS]
    notes = [f"{kind.name} is not installed: {kind.wanted}" for kind in kinds if kind.is_judged and kind.find() is None]
    found = [Peer(kind, places) for kind in kinds if kind.find() is not None]
    results: Results = {}
    said: list[Verdict] = []
    for size in sizes:
        raw = Kbtp(RAW, rnic="auto", spin_us=spin_us, places=places)
        contenders: list[Contender] = [raw, CacheContender(size, spin_us, places), *found]
        results |= interleaved(contenders, cells_of(size), rounds=rounds, seconds=seconds, advance=advance)
        if size == SESSION_BYTES:
            said += _beside_session(results)
            notes.append(_with_deletes(results))
        said += _beside_peers(results, size, [peer.name for peer in found if peer.is_judged])
    return said, notes, results


def cells_of(size: int) -> list[Cell]:
    cells = [Cell(operation, size, depth) for operation in (LOAD, STORE, ALLOC) for depth in (1, DEEP)]
    return [*cells, Cell(ALLOC_ALONE, size, DEEP)] if size == SESSION_BYTES else cells


def _beside_session(results: Results) -> list[Verdict]:
    """The call that is compared is timed, and nothing else."""
    made = []
    for operation, what in ((LOAD, "get_into / LOAD"), (ALLOC_ALONE, "put / ALLOC_STORE")):
        cell = Cell(operation, SESSION_BYTES, DEEP)
        measured = compared(results, gb_per_s, (NAME, cell), (RAW, cell))
        made.append(Verdict(f"{DEEP} of {format_size(SESSION_BYTES)}, {what}, GB/s", measured, SESSION_MIN, False))
    return made


def _with_deletes(results: Results) -> str:
    """With what makes room again. It is not judged: to delete is two round trips, of which FREE is one."""
    cell = Cell(ALLOC, SESSION_BYTES, DEEP)
    ratio = compared(results, gb_per_s, (NAME, cell), (RAW, cell))
    what = f"{DEEP} of {format_size(SESSION_BYTES)}, put and delete / ALLOC_STORE and FREE, GB/s"
    return f"shown  {what}: {ratio.median:.3g} x ({ratio.low:.3g} to {ratio.high:.3g})"


def _beside_peers(results: Results, size: int, peers: Sequence[str]) -> list[Verdict]:
    made = []
    for operation, verb in ((LOAD, "get"), (STORE, "put")):
        for peer in peers:
            one, deep = Cell(operation, size), Cell(operation, size, DEEP)
            latency = compared(results, p50, (NAME, one), (peer, one))
            made.append(Verdict(f"one {verb} of {format_size(size)}, p50 / {peer}", latency, 1.0, True))
            rate = compared(results, gb_per_s, (NAME, deep), (peer, deep))
            made.append(Verdict(f"{DEEP} {verb} of {format_size(size)}, GB/s / {peer}", rate, 1.0, False))
    return made


def figures(results: Results) -> list[str]:
    """A line for each cell and contender: the medians."""
    lines = []
    for (name, cell), rounds in sorted(results.items(), key=lambda one: (one[0][1].block_bytes, str(one[0]))):
        latency = statistics.median(p50(one) for one in rounds)
        rate = statistics.median(gb_per_s(one) for one in rounds)
        what = f"{cell.operation}, {cell.outstanding} of {format_size(cell.block_bytes)}"
        lines.append(f"{name}: {what}: p50 {latency:.0f} us, {rate:.3g} GB/s")
    return lines
