"""`python -m conformance`: the four runs, the count by section, and docs/conformance.md compared or written."""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from pathlib import Path

from conformance.runs import RNICS, run
from conformance.table import Run, page
from kbtp.conformance.case import Role
from kbtp.conformance.catalogue import cases, faults
from kbtp.conformance.expectations import Expectations
from kbtp.conformance.report import as_junit, by_chapter
from kbtp.conformance.result import Outcome, Result

ROOT = Path(__file__).parent
PAGE = ROOT.parent / "docs" / "conformance.md"


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m conformance", description=__doc__)
    parser.add_argument("-k", dest="words", action="append", default=[], help="only cases whose name holds this")
    parser.add_argument("--rnic", action="append", choices=RNICS, help="only this one; may be repeated")
    parser.add_argument("--role", action="append", choices=[role.value for role in Role])
    parser.add_argument("--write", action="store_true", help="write docs/conformance.md instead of comparing it")
    parser.add_argument("--junit", type=Path, help="folder for JUnit XML, one file a run")
    arguments = parser.parse_args()
    wrong = list(faults())
    expectations = Expectations.read(ROOT / "expectations.toml", cases())
    runs: dict[Run, list[Result]] = {}
    with tempfile.TemporaryDirectory() as folder:
        for role in [role for role in Role if not arguments.role or role.value in arguments.role]:
            for rnic in arguments.rnic or RNICS:
                began_s = time.monotonic()
                results = sorted(
                    run(role, rnic, expectations, Path(folder), arguments.words), key=lambda one: one.case.name
                )
                runs[role, rnic] = results
                _tell(f"{rnic} RNIC as {role.value}", results, time.monotonic() - began_s)
                if arguments.junit is not None:
                    arguments.junit.mkdir(parents=True, exist_ok=True)
                    file = arguments.junit / f"{role.value}-{rnic}.xml"
                    file.write_text(as_junit(results, f"the {rnic} RNIC as {role.value}"))
    wrong += [str(result) for results in runs.values() for result in results if result.outcome.fails_the_run]
    if not (arguments.words or arguments.rnic or arguments.role):
        wrong += _compare(page(runs), write=arguments.write)
    for line in wrong:
        print(line, file=sys.stderr)
    return 1 if wrong else 0


def _tell(what: str, results: list[Result], took_s: float) -> None:
    """The count by section, as lines."""
    print(f"{what}: {len(results)} cases in {took_s:.0f} s")
    for chapter, counts in by_chapter(results).items():
        print(f"  {chapter:12} {_counted(counts)}")
    total = {outcome: sum(one.outcome is outcome for one in results) for outcome in Outcome}
    print(f"  {'all':12} {_counted(total)}", flush=True)


def _counted(counts: dict[Outcome, int]) -> str:
    return ", ".join(f"{counts[outcome]} {outcome.value}" for outcome in Outcome if counts.get(outcome))


def _compare(text: str, *, write: bool) -> list[str]:
    if write:
        PAGE.write_text(text)
        return []
    there = PAGE.read_text() if PAGE.exists() else ""
    return [] if there == text else [f"{PAGE.name} is not what came out: make conformance WRITE=1"]


if __name__ == "__main__":
    sys.exit(main())
