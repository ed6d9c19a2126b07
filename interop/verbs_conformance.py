"""The KBTP part of the conformance suite, held against kbtp in the guest over the RNIC of rdma-core."""

from __future__ import annotations

import shlex
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from conformance.over_rnic import BIG_DRAIN_S, kbtp_part
from conformance.profiles import INITIATORS, TARGETS, Profile, divided, patient
from conformance.runs import initiator_arguments, new_keys, reasoned, serve_arguments
from interop.checks import ROOT, Check, CheckFailed
from interop.guest.calls import Call, CallFailed
from interop.guest.machine import GUEST_ADDRESS, HOST_ADDRESS, Guest
from interop.kbtp_in_guest import PYTHON_IN_GUEST, START_S
from kbtp.address import Address
from kbtp.conformance.case import Case, Role
from kbtp.conformance.catalogue import cases
from kbtp.conformance.deviation import Deviation
from kbtp.conformance.expectations import Expectations
from kbtp.conformance.initiators import Initiator
from kbtp.conformance.result import Result
from kbtp.conformance.runner import InitiatorRunner, TargetRunner
from kbtp.limits import DEFAULT_PORT

RNIC = "rdma_core"
HELLO_DELAY_S = 0.2
"""siw overlooks an FPDU right behind its MPA Reply. It takes a CRC that comes in two pieces for wrong, which happens
with big blocks, and has no atomics: the suite asks for no CRC, and nothing is allocated directly."""

PATIENCE = 3.0
"""What siw never does is not waited for so long."""

TARGETS_AT_ONCE = 4
INITIATORS_AT_ONCE = 2
"""Each is a process that imports kbtp in the guest."""

LOADS = "load"
"""The other direct mode needs atomics."""

SUITE_IN_GUEST_S = 600.0

_READY = "kbtp://"
_SHARED = Path("build") / "interop" / "conformance"
"""Keys, for both sides of the share."""

_EXPECTATIONS = Path(__file__).parent / "expectations_siw.toml"


def siw_checks() -> list[Check]:
    return [
        Check(
            f"conformance: the KBTP part, {role.value} on siw",
            partial(_holds, partial(results_over_siw, role=role)),
        )
        for role in Role
    ]


def rxe_checks() -> list[Check]:
    return [Check("conformance: the KBTP part, target and initiator on rxe, the suite's streams on it too", _on_rxe)]


def _on_rxe(guest: Guest) -> None:
    options = f"--python '{PYTHON_IN_GUEST}' --patience 4 --expect /mnt/interop/expectations_rxe.toml"
    suite = f"conformance.over_rnic {RNIC} {GUEST_ADDRESS} {options}"
    done = guest.run(f"cd /mnt; {PYTHON_IN_GUEST} -m {suite}", timeout_s=SUITE_IN_GUEST_S)
    if done.status:
        raise CheckFailed(done.output)


def _holds(results: Callable[[Guest], Iterator[Result]], guest: Guest) -> None:
    every = list(results(guest))
    wrong = [str(result) for result in every if result.outcome.fails_the_run]
    if wrong or not every:
        counts = Counter(result.outcome.value for result in every)
        raise CheckFailed("\n".join([", ".join(f"{count} {name}" for name, count in counts.items()), *wrong]))


def results_over_siw(guest: Guest, role: Role, words: Sequence[str] = ()) -> Iterator[Result]:
    """The suite is here, its peer by hand speaks iWARP over TCP; `words` as -k of `kbtp conformance`."""
    expectations = Expectations.read(_EXPECTATIONS, cases())
    chosen = [one for one in kbtp_part(role) if all(word in one.name for word in words)]
    profiles, run = (patient(TARGETS, BIG_DRAIN_S), _target) if role is Role.TARGET else (INITIATORS, _initiator)
    for profile, some in zip(profiles, divided(profiles, chosen).values(), strict=True):
        if some:
            for result in run(guest, profile, some, expectations):
                yield reasoned(result, expectations)


def _target(guest: Guest, profile: Profile, some: Sequence[Case], expectations: Expectations) -> Iterator[Result]:
    file = _key_file(profile, Role.TARGET)
    setup = profile.setup(keys=new_keys(profile, ROOT / file), hello_delay_s=HELLO_DELAY_S)
    setup = replace(setup, has=setup.has - {"direct-alloc"}, crc=False, patience=PATIENCE)
    arguments = serve_arguments(profile, RNIC, Path("/mnt") / file if profile.keys else None)
    serve = f"{PYTHON_IN_GUEST} -m conformance.serve {shlex.join([*arguments, '0.0.0.0', str(DEFAULT_PORT)])}"
    with guest.start(f"sleep 1000000 | {serve}") as call:
        call.await_line(_READY, START_S)
        address = Address("127.0.0.1", guest.port(DEFAULT_PORT))
        yield from TargetRunner(address, setup, expectations, at_once=TARGETS_AT_ONCE).run(some)


def _initiator(guest: Guest, profile: Profile, some: Sequence[Case], expectations: Expectations) -> Iterator[Result]:
    file = _key_file(profile, Role.INITIATOR)
    setup = profile.setup(keys=new_keys(profile, ROOT / file))
    setup = replace(setup, has=setup.has - {"direct"}, crc=False)
    arguments = initiator_arguments(
        replace(profile, direct=LOADS if profile.direct else ""), RNIC, Path("/mnt") / file if profile.keys else None
    )
    command = f"{PYTHON_IN_GUEST} -m conformance.initiator {shlex.join(arguments)}"
    initiators = [InGuest(guest, command, number) for number in range(INITIATORS_AT_ONCE)]
    yield from InitiatorRunner(setup, expectations, initiators, Address("127.0.0.1", 0)).run(some)


def _key_file(profile: Profile, role: Role) -> Path:
    """In the share, new and not there yet."""
    file = _SHARED / f"{role.value} {profile.name}.keys"
    (ROOT / file).parent.mkdir(parents=True, exist_ok=True)
    (ROOT / file).unlink(missing_ok=True)
    return file


class InGuest(Initiator):
    """A process in the guest that reads URLs, one a line, from a FIFO; one that hangs is replaced."""

    END_OF_CASE_S = 10.0

    def __init__(self, guest: Guest, command: str, number: int) -> None:
        self._guest = guest
        self._command = command
        self._fifo = f"urls-{number}"
        self._call: Call | None = None
        self._answer: bool | None = None
        self._busy = False

    def start(self, url: str) -> None:
        if self._call is None:
            script = f"rm -f {self._fifo}; mkfifo {self._fifo}; exec 3<>{self._fifo}; echo ready; "
            self._call = self._guest.start(f"{script} exec {self._command} <&3 2>/dev/null")
            self._call.await_line("ready", START_S)
        self._answer, self._busy = None, True
        there = replace(Address.parse(url), host=HOST_ADDRESS)
        self._guest.run(f"echo {there} >{self._fifo}")

    def is_there(self) -> bool:
        return self._call is not None

    def outcome(self, within_s: float) -> bool:
        if not self._ended(within_s):
            raise Deviation("an initiator that comes to an end", f"one still at work after {within_s:.1f} s")
        return self._answer is True

    def end_of_case(self) -> None:
        if self._busy and not self._ended(self.END_OF_CASE_S):
            self.stop()

    def stop(self) -> None:
        if self._call is not None:
            self._call.close()
            self._call, self._busy = None, False

    def _ended(self, within_s: float) -> bool:
        """Its answer has come; one that has ended itself is started anew."""
        if self._busy and self._call is not None:
            try:
                self._answer = self._call.await_line("", within_s) == "ok"
            except CallFailed:
                return False
            self._busy = False
        return True
