"""The four runs: the native and the reference RNIC, each as target and as initiator."""

from __future__ import annotations

import json
import secrets
import shlex
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from conformance.profiles import INITIATORS, TARGETS, Profile, divided
from kbtp.address import Address
from kbtp.conformance.case import Case, Role
from kbtp.conformance.catalogue import cases
from kbtp.conformance.expectations import Expectations
from kbtp.conformance.initiators import initiators_of
from kbtp.conformance.result import Outcome, Result
from kbtp.conformance.runner import InitiatorRunner, TargetRunner
from kbtp.key_file import add_key
from kbtp.keys import Key
from kbtp.limits import KEY_SECRET_MIN_BYTES, MPA_REQUEST_TIMEOUT_S
from kbtp.types import Feature

RNICS = ("native", "reference")
AT_ONCE = 5
STOP_S = 10.0


def run(role: Role, rnic: str, expectations: Expectations, folder: Path, words: Sequence[str]) -> Iterator[Result]:
    """One of the four; `words` as -k of `kbtp conformance`. A skip that no expectation gives a reason for fails."""
    chosen = [case for case in cases(role) if not words or any(word in case.name for word in words)]
    profiles = TARGETS if role is Role.TARGET else INITIATORS
    for profile, some in zip(profiles, divided(profiles, chosen).values(), strict=True):
        if some:
            one = _target if role is Role.TARGET else _initiator
            for result in one(profile, some, rnic, expectations, folder):
                yield reasoned(result, expectations)


def reasoned(result: Result, expectations: Expectations) -> Result:
    """A skip that no expectation gives a reason for is a failure."""
    if result.outcome is not Outcome.SKIPPED or expectations.skip_reason(result.case):
        return result
    return Result(result.case, Outcome.FAILED, "a profile that the case runs in", f"a skip: {result.reason}")


def _target(
    profile: Profile, some: Sequence[Case], rnic: str, expectations: Expectations, folder: Path
) -> Iterator[Result]:
    keys = new_keys(profile, folder / f"{rnic} {profile.name}.keys")
    with serving(profile, rnic, folder / f"{rnic} {profile.name}.keys" if keys else None) as url:
        runner = TargetRunner(Address.parse(url), profile.setup(keys=keys), expectations, at_once=AT_ONCE)
        yield from runner.run(some)


def _initiator(
    profile: Profile, some: Sequence[Case], rnic: str, expectations: Expectations, folder: Path
) -> Iterator[Result]:
    file = folder / f"initiator {rnic} {profile.name}.keys"
    keys = new_keys(profile, file)
    arguments = initiator_arguments(profile, rnic, file if keys else None)
    command = [sys.executable, "-m", "conformance.initiator", *arguments]
    initiators = initiators_of(shlex.join(command), AT_ONCE)
    runner = InitiatorRunner(profile.setup(keys=keys), expectations, initiators, Address("127.0.0.1", 0))
    yield from runner.run(some)


def new_keys(profile: Profile, file: Path) -> tuple[Key, ...]:
    """New keys, one for each trust domain of the profile, in `file`."""
    keys = []
    for number, text in enumerate(profile.keys):
        domain, _, untrusted = text.partition(" ")
        direct = Feature.NONE if untrusted else Feature.DIRECT_LOAD | Feature.DIRECT_ALLOC
        keys.append(Key(number + 1, secrets.token_bytes(KEY_SECRET_MIN_BYTES), domain, direct))
        add_key(file, keys[-1])
    return tuple(keys)


def serve_arguments(profile: Profile, rnic: str, keys_file: Path | None) -> list[str]:
    """Of `conformance.serve`."""
    mpa_timeout_s = profile.times.get("mpa_timeout_s", MPA_REQUEST_TIMEOUT_S)
    fields = {**profile.config, "mpa": profile.mpa, "mpa_request_timeout_s": mpa_timeout_s}
    return [rnic, json.dumps(fields), str(keys_file or "")]


def initiator_arguments(profile: Profile, rnic: str, keys_file: Path | None) -> list[str]:
    """Of `conformance.initiator`."""
    arguments = [profile.mpa, "--rnic", rnic]
    arguments += ["--key-file", str(keys_file)] if keys_file else []
    return arguments + (["--direct", profile.direct] if profile.direct else [])


@contextmanager
def serving(
    profile: Profile,
    rnic: str,
    keys_file: Path | None,
    host: str = "127.0.0.1",
    python: Sequence[str] = (sys.executable,),
) -> Iterator[str]:
    """A target in a process of its own; its URL."""
    command = [*python, "-m", "conformance.serve", *serve_arguments(profile, rnic, keys_file), host, "0"]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        yield process.stdout.readline().strip()
    finally:
        try:
            process.communicate(timeout=STOP_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.communicate()
