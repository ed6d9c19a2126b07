"""The KBTP part of the suite, both sides on one RNIC: `python -m conformance.over_rnic RNIC HOST [OPTIONS]`.

For devices that have no wire to speak on by hand: the suite's streams are those of the RNIC too.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from conformance.profiles import TARGETS, divided
from conformance.runs import new_keys, serving
from kbtp.address import Address
from kbtp.conformance.case import Case, Role
from kbtp.conformance.catalogue import cases
from kbtp.conformance.expectations import Expectations
from kbtp.conformance.kbtp_cases import GROUPS
from kbtp.conformance.result import Outcome, Result
from kbtp.conformance.runner import TargetRunner
from kbtp.rnic import open_rnic


def kbtp_part(role: Role) -> list[Case]:
    """The cases of the draft and of the profile."""
    names = {case.name for group in GROUPS for case in group.cases}
    return [case for case in cases(role) if case.name in names]


def run_targets(
    rnic_name: str, host: str, chosen: Sequence[Case], expectations: Expectations, *, at_once: int, patience: float
) -> Iterator[Result]:
    """A target for each profile, at `host`, and its cases."""
    rnic = open_rnic(rnic_name)
    with tempfile.TemporaryDirectory() as folder:
        for profile, some in zip(TARGETS, divided(TARGETS, chosen).values(), strict=True):
            file = Path(folder) / f"{profile.name}.keys"
            setup = replace(profile.setup(rnic, keys=new_keys(profile, file)), patience=patience)
            if any(case.needs <= setup.has for case in some):
                with serving(profile, rnic_name, file if setup.keys else None, host) as url:
                    runner = TargetRunner(Address.parse(url), setup, expectations, at_once=at_once, rnic=rnic)
                    yield from runner.run(some)
    rnic.close()


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m conformance.over_rnic", description=__doc__)
    parser.add_argument("rnic")
    parser.add_argument("host", help="an address of the device, where targets listen")
    parser.add_argument("-k", dest="words", action="append", default=[], help="only cases whose name holds this")
    parser.add_argument("--expect", type=Path, help="cases to skip and expected to fail, each with its reason")
    parser.add_argument("--at-once", type=int, default=2)
    parser.add_argument("--patience", type=float, default=2.0, help="wait so many times as long for what should come")
    arguments = parser.parse_args()
    expectations = Expectations.read(arguments.expect, cases()) if arguments.expect else Expectations()
    chosen = [
        case
        for case in kbtp_part(Role.TARGET)
        if not arguments.words or any(word in case.name for word in arguments.words)
    ]
    counts: Counter[Outcome] = Counter()
    options = {"at_once": arguments.at_once, "patience": arguments.patience}
    for result in run_targets(arguments.rnic, arguments.host, chosen, expectations, **options):
        counts[result.outcome] += 1
        if result.outcome.fails_the_run or result.outcome is Outcome.WARNED:
            print(result, flush=True)
    print(", ".join(f"{count} {outcome.value}" for outcome, count in counts.items()))
    return 1 if any(outcome.fails_the_run for outcome in counts) or not counts[Outcome.PASSED] else 0


if __name__ == "__main__":
    sys.exit(main())
