"""python -m model [NAME ...]: check every run of model/runs.py, or those named.

Needs `spin` and a C compiler. A line a run: how many states there are, and whether what had to come came. What the
checker found is left in build/model/NAME, its trace in NAME/trace. The exit status is 1 if a run came out otherwise.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from model.runs import RUNS, Run, Search

MODELS = Path(__file__).parent
OUT = MODELS.parent / "build" / "model"
MEMORY_MIB_MAX = 1_800
DEPTH_MAX = 500_000
WORKERS = 2
TIMEOUT_S = 300.0

_COMPILED_FOR = {
    Search.SAFETY: ("-O2", "-DSAFETY", "-DNOCLAIM", "-DCOLLAPSE"),
    Search.FAIRNESS: ("-O2", "-DCOLLAPSE", "-DNFAIR=4"),
    # Found soon: most of the time is the compiler's.
    Search.SHORTEST: ("-O0", "-DSAFETY", "-DNOCLAIM", "-DCOLLAPSE", "-DBFS"),
}
_NOT_EXHAUSTIVE = ("max search depth too small", "reached -DMEMLIM bound", "VECTORSZ too small")


@dataclass(frozen=True, slots=True)
class Outcome:
    """`states` that were looked at, and what is wrong with the run, if anything."""

    states: int
    seconds: float
    wrong: str | None


def check(run: Run) -> Outcome:
    """Generate the checker, compile and run it, and judge what it says."""
    folder = OUT / run.name
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    for source in MODELS.glob("*.pml"):
        shutil.copy(source, folder)
    started_s = time.monotonic()
    switches = [f"-D{switch}" for switch in run.switches]
    _run(folder, "spin", "-a", *switches, f"{run.model}.pml")
    compiler = os.environ.get("CC", "cc")
    flags = ("-w", f"-DMEMLIM={MEMORY_MIB_MAX}", *_COMPILED_FOR[run.search])
    _run(folder, compiler, *flags, "-o", "pan", "pan.c")
    fair = ("-a", "-f") if run.search is Search.FAIRNESS else ()
    said = _run(folder, "./pan", *fair, f"-m{DEPTH_MAX}", "-n", statuses=(0, 1))
    (folder / "said").write_text(said)
    trail = folder / f"{run.model}.pml.trail"
    if trail.exists():
        trace = _run(folder, "spin", "-T", "-t", "-DTRACE", *switches, f"{run.model}.pml", statuses=(0, 1))
        (folder / "trace").write_text(trace)
    states = re.search(r"(\d+) states, stored", said)
    return Outcome(int(states[1]) if states else 0, time.monotonic() - started_s, _wrong(run, said))


def _wrong(run: Run, said: str) -> str | None:
    partial = [words for words in _NOT_EXHAUSTIVE if words in said]
    violation = re.search(r"^pan:\d+: (.*?)(?: \(at depth \d+\))?$", said, re.MULTILINE)
    if run.finds is not None:
        if violation is None:
            return "no violation was found"
        return None if run.finds in violation[1] else f"another violation was found: {violation[1]}"
    if violation is not None:
        return violation[1]
    if partial:
        return f"not exhaustive: {', '.join(partial)}"
    return None if "errors: 0" in said else "the checker did not come to an end"


def _run(folder: Path, *command: str, statuses: tuple[int, ...] = (0,)) -> str:
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    if done.returncode not in statuses:
        raise SystemExit(f"{' '.join(command)} in {folder}: status {done.returncode}\n{done.stdout}{done.stderr}")
    return done.stdout + done.stderr


def main(names: list[str]) -> int:
    for tool in ("spin", os.environ.get("CC", "cc")):
        if shutil.which(tool) is None:
            print(f"{tool} is not installed (on Debian: apt-get install spin gcc)", file=sys.stderr)
            return 2
    runs = [run for run in RUNS if not names or run.name in names]
    if len(runs) < len(set(names)):
        print(f"no such run; there are {', '.join(run.name for run in RUNS)}", file=sys.stderr)
        return 2
    print(f"{'run':22} {'what':46} {'states':>10} {'s':>6}")
    wrong, states = 0, 0
    with ThreadPoolExecutor(max_workers=WORKERS) as pool:
        for run, outcome in zip(runs, pool.map(check, runs), strict=True):
            wrong += outcome.wrong is not None
            states += outcome.states
            verdict = outcome.wrong or ("holds" if run.finds is None else f"violated, as it must be: {run.finds}")
            start = f"{run.name:22} {run.says:46} {outcome.states:10,} {outcome.seconds:6.1f}"
            print(f"{start}  {'WRONG: ' if outcome.wrong else ''}{verdict}", flush=True)
    print(f"{len(runs)} runs, {states:,} states, {wrong} not as they must be")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
