"""The KBTP part of the suite, both sides on one RNIC: `python -m conformance.over_rnic RNIC HOST [OPTIONS]`.

For devices that have no wire to speak on by hand: the suite's streams are those of the RNIC too.
"""

from __future__ import annotations

import argparse
import shlex
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from conformance.profiles import INITIATORS, TARGETS, Profile, divided, patient
from conformance.runs import initiator_arguments, new_keys, reasoned, serving
from kbtp.address import Address
from kbtp.conformance.case import Case, Role
from kbtp.conformance.catalogue import cases
from kbtp.conformance.deviation import NotApplicable
from kbtp.conformance.expectations import Expectations
from kbtp.conformance.initiators import initiators_of
from kbtp.conformance.kbtp_cases import GROUPS
from kbtp.conformance.probe import Probe
from kbtp.conformance.result import Outcome, Result
from kbtp.conformance.runner import InitiatorRunner, TargetRunner, run_case
from kbtp.conformance.setup import Setup
from kbtp.conformance.tcp import Deadline
from kbtp.rnic import open_rnic

END_OF_CASE_S = 10.0
"""One that is started anew takes seconds for that, where a guest has no KVM."""

BIG_DRAIN_S = 15.0
"""And 8 MiB take some."""


def kbtp_part(role: Role) -> list[Case]:
    """The cases of the draft and of the profile."""
    names = {case.name for group in GROUPS for case in group.cases}
    return [case for case in cases(role) if case.name in names]


class Suite:
    """`host` is an address of the device, where targets and the suite listen; `python` starts both under test."""

    def __init__(
        self,
        rnic_name: str,
        host: str,
        expectations: Expectations,
        *,
        python: Sequence[str],
        at_once: int,
        patience: float,
    ) -> None:
        self._python = python
        self._rnic_name = rnic_name
        self._rnic = open_rnic(rnic_name)
        self._host = host
        self._expectations = expectations
        self._at_once = at_once
        self._patience = patience

    def run(self, role: Role, words: Sequence[str], folder: Path) -> Iterator[Result]:
        """Profile by profile; a skip that no expectation gives a reason for fails."""
        chosen = [case for case in kbtp_part(role) if not words or any(word in case.name for word in words)]
        profiles, one = (
            (patient(TARGETS, BIG_DRAIN_S), self._target) if role is Role.TARGET else (INITIATORS, self._initiator)
        )
        for profile, some in zip(profiles, divided(profiles, chosen).values(), strict=True):
            file = folder / f"{role.value} {profile.name}.keys"
            setup = profile.setup(self._rnic, keys=new_keys(profile, file))
            setup = replace(setup, patience=self._patience)
            if some:
                for result in one(profile, some, setup, file if setup.keys else None):
                    yield reasoned(result, self._expectations)

    def _target(self, profile: Profile, some: Sequence[Case], setup: Setup, keys: Path | None) -> Iterator[Result]:
        if not any(self._is_asked(case, setup) for case in some):
            yield from (run_case(case, _no_target, self._expectations, setup) for case in some)
            return
        with serving(profile, self._rnic_name, keys, self._host, python=self._python) as url:
            address = Address.parse(url)
            runner = TargetRunner(address, setup, self._expectations, at_once=self._at_once, rnic=self._rnic)
            yield from runner.run(some)

    def _initiator(self, profile: Profile, some: Sequence[Case], setup: Setup, keys: Path | None) -> Iterator[Result]:
        arguments = initiator_arguments(profile, self._rnic_name, keys)
        command = [*self._python, "-m", "conformance.initiator", *arguments]
        initiators = initiators_of(shlex.join(command), self._at_once, end_of_case_s=END_OF_CASE_S)
        place = Address(self._host, 0)
        runner = InitiatorRunner(setup, self._expectations, initiators, place, rnic=self._rnic)
        yield from runner.run(some)

    def _is_asked(self, case: Case, setup: Setup) -> bool:
        return case.needs <= setup.has and not self._expectations.skip_reason(case)

    def close(self) -> None:
        self._rnic.close()


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m conformance.over_rnic", description=__doc__)
    parser.add_argument("rnic")
    parser.add_argument("host", help="an address of the device, where targets and the suite listen")
    parser.add_argument("-k", dest="words", action="append", default=[], help="only cases whose name holds this")
    parser.add_argument("--role", action="append", choices=[role.value for role in Role])
    parser.add_argument("--expect", type=Path, help="cases to skip and expected to fail, each with its reason")
    parser.add_argument("--at-once", type=int, default=2)
    parser.add_argument("--patience", type=float, default=2.0, help="wait so many times as long for what should come")
    parser.add_argument("--python", default=sys.executable, help="command that starts targets and initiators")
    parser.add_argument("--times", action="store_true", help="tell of each case how long it took")
    arguments = parser.parse_args()
    expectations = Expectations.read(arguments.expect, cases()) if arguments.expect else Expectations()
    suite = Suite(
        arguments.rnic,
        arguments.host,
        expectations,
        python=shlex.split(arguments.python),
        at_once=arguments.at_once,
        patience=arguments.patience,
    )
    wrong = False
    with tempfile.TemporaryDirectory() as folder:
        for role in [role for role in Role if not arguments.role or role.value in arguments.role]:
            counts: Counter[Outcome] = Counter()
            for result in suite.run(role, arguments.words, Path(folder)):
                counts[result.outcome] += 1
                if arguments.times:
                    print(f"{result.duration_s:6.1f} s {result.case.name}: {result.outcome.value}", flush=True)
                if result.outcome.fails_the_run or result.outcome is Outcome.WARNED:
                    print(result, flush=True)
            print(f"{role.value}: {', '.join(f'{count} {outcome.value}' for outcome, count in counts.items())}")
            wrong |= any(outcome.fails_the_run for outcome in counts) or not (counts[Outcome.PASSED] or arguments.words)
    suite.close()
    return int(wrong)


def _no_target(_case: Case, _deadline: Deadline) -> Probe:
    raise NotApplicable("no target was started: nothing is to be asked of it")


if __name__ == "__main__":
    sys.exit(main())
