"""Plant every fault, one at a time, in a copy of the tree, and see that the tests notice.

    python -m mutants                       all of them
    python -m mutants --match 'profile 6'   those whose rule, fault or file has that in it
    python -m mutants --list

First the tests are run with nothing planted. The exit status says whether every fault was caught.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from mutants.faults import MUTANTS
from mutants.plant import Mutant, Outcome, Verdict

ROOT = Path(__file__).resolve().parent.parent
TIME_LIMIT_S = 300.0
BUILD_LIMIT_S = 1800.0
PYTEST_FAILED = 1  # 2 and up: interrupted, misused, nothing collected
CARGO_FAILED = 101
CARGO = ("cargo", "test", "--manifest-path", "rust/Cargo.toml", "--locked")
PYTEST = ("-m", "pytest", "-q", "-x", "--hypothesis-profile=ci", "-p", "no:cacheprovider", "--no-header")
FIRST_FAILURE = re.compile(r"^(?:FAILED|ERROR) (\S+)|^test (\S+) \.\.\. FAILED", re.MULTILINE)
NOT_RUN = re.compile(r"^error(\[E\d+\])?:|^ERROR .*(SyntaxError|ImportError)", re.MULTILINE)


class NotBuilt(Exception):
    """The tests could not be built."""


class Tree:
    """A copy of the project in which faults are planted, one after the other."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def copy(self) -> None:
        """Fill the folder with what git knows of, and the native module that is built."""
        listed = subprocess.run(
            ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
            cwd=ROOT, check=True, capture_output=True, text=True,
        ).stdout  # fmt: skip
        built = [str(path.relative_to(ROOT)) for path in (ROOT / "python/kbtp").glob("_native*.so")]
        for name in [*filter(None, listed.split("\0")), *built]:
            source = ROOT / name
            if source.is_file():
                (self.folder / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(source, self.folder / name)  # not its time: cargo would take what the last fault left built

    def judge(self, mutant: Mutant) -> Outcome:
        began = time.monotonic()
        place = self.folder / mutant.file
        original = place.read_text()
        try:
            place.write_text(mutant.planted(self.folder))
            status, output = self.run(mutant.in_rust, mutant.tests)
        except (ValueError, NotBuilt) as error:
            return Outcome(mutant, Verdict.BROKEN, str(error), 0.0)
        finally:
            place.write_text(original)
        return Outcome(mutant, *_verdict(mutant.in_rust, status, output), time.monotonic() - began)

    def run(self, in_rust: bool, tests: Sequence[str]) -> tuple[int | None, str]:
        """The exit status, None for one that did not end in time, and all that was printed. Raises `NotBuilt`."""
        if not in_rust:
            return self._command([sys.executable, *PYTEST, *tests], TIME_LIMIT_S)
        status, output = self._command([*CARGO, "--no-run", *tests], BUILD_LIMIT_S)
        if status != 0:
            raise NotBuilt(output[-2000:])
        return self._command([*CARGO, *tests], TIME_LIMIT_S)

    def _command(self, command: Sequence[str], limit_s: float) -> tuple[int | None, str]:
        paths = os.pathsep.join([str(self.folder / "python"), str(self.folder)])
        environment = {
            **os.environ, "PYTHONPATH": paths, "PYTHONDONTWRITEBYTECODE": "1", "OPENBLAS_NUM_THREADS": "1",
            "CARGO_TARGET_DIR": str(ROOT / "build" / "mutants"),
        }  # fmt: skip
        try:
            done = subprocess.run(
                command, check=False, cwd=self.folder, env=environment, text=True, timeout=limit_s,
                stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
            )  # fmt: skip
        except subprocess.TimeoutExpired as error:
            return None, str(error)
        return done.returncode, done.stdout


def _verdict(in_rust: bool, status: int | None, output: str) -> tuple[Verdict, str]:
    if status is None:
        return Verdict.CAUGHT, f"the tests did not end within {TIME_LIMIT_S:g} s"
    if status == 0:
        return Verdict.SURVIVED, "every test passed"
    failure = FIRST_FAILURE.search(output)
    if status != (CARGO_FAILED if in_rust else PYTEST_FAILED) or (NOT_RUN.search(output) and not failure):
        return Verdict.BROKEN, f"exit status {status}: {output[-2000:]}"
    name = next(filter(None, failure.groups()), None) if failure else None
    return Verdict.CAUGHT, name or output.strip().splitlines()[-1]


def _baseline(tree: Tree, mutants: Sequence[Mutant]) -> None:
    """All the tests that faults rely on, with nothing planted. Ends the program if they fail by themselves."""
    for in_rust in (False, True):
        runs = dict.fromkeys(mutant.tests for mutant in mutants if mutant.in_rust == in_rust)
        if not in_rust:  # one process for those that name nothing but files
            plain = [tests for tests in runs if not any(test.startswith("-") for test in tests)]
            together = tuple(dict.fromkeys(test for tests in plain for test in tests))
            runs = dict.fromkeys(([together] if together else []) + [tests for tests in runs if tests not in plain])
        for tests in runs:
            try:
                status, output = tree.run(in_rust, tests)
            except NotBuilt as error:
                status, output = None, str(error)
            if status != 0:
                sys.exit(f"{output[-4000:]}\nwith nothing planted, these fail already: {' '.join(tests)}")


def _run(mutants: Sequence[Mutant], folder: Path, jobs: int) -> list[Outcome]:
    """Python faults in `jobs` trees at a time; Rust ones in one, since cargo builds in one place."""
    lock = threading.Lock()
    done: list[Outcome] = []
    trees = [Tree(folder / str(number)) for number in range(jobs)]
    for tree in trees:
        tree.copy()
    print(f"the tests with nothing planted, then {len(mutants)} faults", flush=True)
    _baseline(trees[0], mutants)

    def judge(mutant: Mutant) -> None:
        with lock:
            tree = trees.pop()
        outcome = tree.judge(mutant)
        with lock:
            trees.append(tree)
            done.append(outcome)
            print(
                f"[{len(done):3}/{len(mutants)}] {outcome.verdict.value:8} {outcome.seconds:5.1f} s  "
                f"{mutant.rule}: {mutant.fault}\n{'':23}{outcome.detail}",
                flush=True,
            )

    for in_rust, workers in ((False, jobs), (True, 1)):
        with ThreadPoolExecutor(workers) as pool:
            for _ in pool.map(judge, [mutant for mutant in mutants if mutant.in_rust == in_rust]):
                pass
    return done


def main() -> None:
    parser = argparse.ArgumentParser(prog="mutants", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--match", default="", help="only faults whose rule, fault or file has this in it")
    parser.add_argument("--jobs", type=int, default=2, help="trees to plant in at the same time (default: 2)")
    parser.add_argument("--list", action="store_true", help="print the faults and plant none")
    asked = parser.parse_args()
    mutants = [one for one in MUTANTS if asked.match.lower() in f"{one.rule} {one.fault} {one.file}".lower()]
    if asked.list:
        for mutant in mutants:
            print(f"{mutant.rule:24} {mutant.file:52} {mutant.fault}")
        return
    with tempfile.TemporaryDirectory(prefix="kbtp-mutants-") as folder:
        done = _run(mutants, Path(folder), max(1, asked.jobs))
    missed = [outcome for outcome in done if outcome.verdict is not Verdict.CAUGHT]
    for outcome in missed:
        print(f"{outcome.verdict.value}: {outcome.mutant.rule}: {outcome.mutant.fault} ({outcome.mutant.file})")
    print(f"{len(done) - len(missed)} of {len(done)} planted faults caught")
    sys.exit(bool(missed) or not done)


if __name__ == "__main__":
    main()
