"""What a target costs beside its transfers; and what must not slow them: a busy interpreter, many blocks, sessions."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path

from bench import ratios
from bench.contenders import SLOTS, Kbtp, Places
from bench.ratios import Verdict
from bench.rounds import Results, interleaved
from kbtp.testing.bench.figures import LOAD, Cell, Spread
from kbtp.testing.bench.process import Child, environment, python
from kbtp.testing.bench.target import PROCESS, THREAD, TargetProcess, TargetSettings

CELL = Cell(LOAD, ratios.SMALLEST)
FEW_BLOCKS = 100
MANY_BLOCKS = 100_000
MANY_HANDLES = 1_000_000
IDLE_SESSIONS = 500
MANY_SESSIONS = 1000
IDLE_S = 2.0
CONNECT_S = 300.0
TURNS_A_ROUND = 9
"""Into how many turns, each so much shorter, a round of a pair is cut: what the machine does meanwhile is to happen to
both. For each round both are started anew: where a process's memory happens to lie makes its times differ by some
percent for as long as it lives."""
TURN_PART = 1 / 3
"""The time of a turn, as part of that of a measurement elsewhere."""


@dataclass(frozen=True, slots=True)
class Manner:
    """How to measure: on what, how often, for how long."""

    rnic: str
    spin_us: int
    rounds: int
    seconds: float
    places: Places
    advance: Callable[[str], None]


STEPS_A_ROUND = 2 * 3 * TURNS_A_ROUND + 2
"""Times that `advance` is told something in each round: three pairs, memory and idleness."""


def verdicts(manner: Manner) -> tuple[list[Verdict], Results]:
    """All of them, and the figures behind the pairs. Raises BenchFailed."""
    found, results = [], {}
    for measure in (_busy_interpreter, _big_table, _idle_sessions):
        verdict, figures = measure(manner)
        found.append(verdict)
        results.update(figures)
    return [*found, *_session_costs(manner)], results


def _pair(manner: Manner, ours: Kbtp, other: Kbtp) -> Results:
    results: Results = {}
    for _ in range(manner.rounds):
        seconds = manner.seconds * TURN_PART
        found = interleaved([ours, other], [CELL], rounds=TURNS_A_ROUND, seconds=seconds, advance=manner.advance)
        for key, figures in found.items():
            results.setdefault(key, []).extend(figures)
    return results


def _busy_interpreter(manner: Manner) -> tuple[Verdict, Results]:
    """Both machines have the same work to do on the same processors: only whose interpreter does it differs."""
    inside = Kbtp(
        "kbtp, a thread of the target spins",
        rnic=manner.rnic,
        spin_us=manner.spin_us,
        places=manner.places,
        settings=lambda settings: replace(settings, beside=THREAD),
    )
    outside = Kbtp(
        "kbtp, another process spins",
        rnic=manner.rnic,
        spin_us=manner.spin_us,
        places=manner.places,
        settings=lambda settings: replace(settings, beside=PROCESS),
    )
    results = _pair(manner, inside, outside)
    measured = ratios.compared(results, ratios.p99, (inside.name, CELL), (outside.name, CELL))
    name = "one load of 4 KiB, p99, target's own interpreter busy / another process busy"
    return Verdict(name, measured, ratios.BUSY_P99_MAX, True), results


def _big_table(manner: Manner) -> tuple[Verdict, Results]:
    """From both, the same number of blocks is loaded: the size of the table is measured, not that of a cache."""
    big = Kbtp(
        "kbtp, 10^6 entries, 10^5 blocks",
        rnic=manner.rnic,
        spin_us=manner.spin_us,
        places=manner.places,
        settings=lambda settings: replace(settings, table_handles=MANY_HANDLES),
        handles=MANY_HANDLES,
        blocks=MANY_BLOCKS,
        stride=MANY_BLOCKS // FEW_BLOCKS,
    )
    small = Kbtp(
        "kbtp, 100 blocks",
        rnic=manner.rnic,
        spin_us=manner.spin_us,
        places=manner.places,
        settings=lambda settings: replace(settings, table_handles=2 * (FEW_BLOCKS + SLOTS)),
        blocks=FEW_BLOCKS,
    )
    results = _pair(manner, big, small)
    measured = ratios.compared(results, ratios.p50, (big.name, CELL), (small.name, CELL))
    return Verdict("one load of 4 KiB, p50, 10^5 blocks / 100", measured, ratios.UNCHANGED_MAX, True), results


def _idle_sessions(manner: Manner) -> tuple[Verdict, Results]:
    crowded = Kbtp(
        f"kbtp, {IDLE_SESSIONS} idle sessions",
        rnic=manner.rnic,
        spin_us=manner.spin_us,
        places=manner.places,
        settings=lambda settings: _for_sessions(settings, IDLE_SESSIONS),
        beside=lambda target: connected(target, IDLE_SESSIONS, manner.rnic),
    )
    alone = Kbtp("kbtp, no other session", rnic=manner.rnic, spin_us=manner.spin_us, places=manner.places)
    results = _pair(manner, crowded, alone)
    measured = ratios.compared(results, ratios.p50, (crowded.name, CELL), (alone.name, CELL))
    name = f"one load of 4 KiB, p50, {IDLE_SESSIONS} idle sessions / none"
    return Verdict(name, measured, ratios.UNCHANGED_MAX, True), results


def _for_sessions(settings: TargetSettings, count: int) -> TargetSettings:
    """Room for `count` sessions more, a block for each."""
    return replace(settings, pool_blocks=settings.pool_blocks + count, max_sessions=settings.max_sessions + count)


def connected(target: TargetProcess, count: int, rnic: str) -> Child:
    """A process with that many sessions, all open. Raises BenchFailed."""
    child = Child(python("bench.idle_sessions", target.url, str(count), rnic), env=environment())
    try:
        child.answer(CONNECT_S)
    except BaseException:
        child.stop(ask_first=False)
        raise
    return child


def _session_costs(manner: Manner) -> list[Verdict]:
    """Of a target with many sessions that do nothing: memory for each, processor time.

    Their receive buffers are not in what is resident yet, so nothing is taken off for them.
    """
    kilobytes, percents = [], []
    for _ in range(manner.rounds):
        with ExitStack() as stack:
            manner.advance(f"memory of {MANY_SESSIONS} sessions")
            settings = TargetSettings(ratios.SMALLEST, SLOTS, manner.rnic, manner.spin_us)
            target = TargetProcess(_for_sessions(settings, MANY_SESSIONS))
            stack.callback(target.stop)
            before = resident_bytes(target.pid)
            sessions = connected(target, MANY_SESSIONS, manner.rnic)
            stack.callback(sessions.stop, ask_first=False)
            kilobytes.append((resident_bytes(target.pid) - before) / MANY_SESSIONS / 1000)
            manner.advance("idleness")
            _let_pass(IDLE_S / 4)  # what connecting led to is over
            before_ns = on_processor_ns(target.pid)
            _let_pass(IDLE_S)
            percents.append((on_processor_ns(target.pid) - before_ns) / IDLE_S / 1e9 * 100)
    return [
        Verdict(f"memory a session, {MANY_SESSIONS} sessions", Spread.of(kilobytes), ratios.SESSION_KB_MAX, True, "kB"),
        Verdict("processor time of an idle target", Spread.of(percents), ratios.IDLE_CPU_PERCENT_MAX, True, "%"),
    ]


def _let_pass(seconds: float) -> None:
    threading.Event().wait(seconds)


def resident_bytes(pid: int) -> int:
    fields = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
    return int(fields["VmRSS"].split()[0]) * 1024


def on_processor_ns(pid: int) -> int:
    """Time all threads of `pid` have been running so far. Finer than the clock ticks of /proc/PID/stat."""
    return sum(int(path.read_text().split()[0]) for path in Path(f"/proc/{pid}/task").glob("*/schedstat"))
