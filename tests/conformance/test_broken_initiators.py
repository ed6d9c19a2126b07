"""Initiators that are started for the suite: those that keep to the rules, those that do not, those that hang."""

from __future__ import annotations

import shlex
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from kbtp.address import Address
from kbtp.conformance.case import Case, Role
from kbtp.conformance.catalogue import cases
from kbtp.conformance.expectations import Expectations
from kbtp.conformance.initiators import initiators_of
from kbtp.conformance.result import Outcome, Result
from kbtp.conformance.runner import InitiatorRunner
from kbtp.conformance.setup import BY_HAND, Setup
from kbtp.key_file import write_key
from kbtp.keys import Key

WORKLOAD = [sys.executable, "-m", "kbtp.conformance.workload", "--rnic", "reference"]
HERE = Address("127.0.0.1", 0)
ONE_BY_ONE = Setup(has=BY_HAND | {"no-keys", "one-by-one"})

# An initiator of the facade that lets one thing pass which it should not.
BROKEN = """
import dataclasses
import sys
from kbtp.conformance import workload
from kbtp.initiator import connection, session
from kbtp.types import Status
from kbtp.wire import HelloAck
parsed = session._parse_completion
{fault}
sys.exit(workload.main())
"""
BELIEVES_ANY_ACK = "connection.accepted = lambda config, said, message: HelloAck.parse(message)"
BELIEVES_IN_SUCCESS = (
    "session._parse_completion = lambda message: dataclasses.replace(parsed(message), status=Status.SUCCESS)"
)


def cases_named(*names: str) -> list[Case]:
    every = {case.name: case for case in cases(Role.INITIATOR)}
    return [every[f"initiator/{name}"] for name in names]


def run(
    command: list[str],
    names: tuple[str, ...],
    *,
    at_once: int = 2,
    timeout_s: float | None = None,
    setup: Setup = ONE_BY_ONE,
) -> dict[str, Result]:
    """By group and name; `timeout_s` instead of what the cases allow themselves."""
    named = [replace(case, timeout_s=timeout_s or case.timeout_s) for case in cases_named(*names)]
    runner = InitiatorRunner(setup, Expectations(), initiators_of(shlex.join(command), at_once), HERE)
    return {result.case.name.partition("/")[2]: result for result in runner.run(named)}


def script(tmp_path: Path, text: str) -> list[str]:
    file = tmp_path / "initiator.py"
    file.write_text(text)
    return [sys.executable, str(file)]


GOOD = (
    "initiator-requests/whole-workload",
    "initiator-hello/hello-is-well-formed",
    "initiator-requests/target-that-closes",
)


@pytest.mark.parametrize(
    "command",
    [WORKLOAD, [*WORKLOAD, "{url}"], [*WORKLOAD, "--direct", "load,alloc"]],
    ids=["line by line", "for each case", "asking for direct modes that are not granted"],
)
def test_the_workload_passes(command: list[str]) -> None:
    results = run(command, GOOD)
    assert {name: result.outcome for name, result in results.items()} == dict.fromkeys(GOOD, Outcome.PASSED)


@pytest.mark.parametrize(
    ("fault", "caught_by", "outcome"),
    [
        (BELIEVES_ANY_ACK, ("initiator-hello/ack-with-impossible-range",), Outcome.WARNED),
        (BELIEVES_IN_SUCCESS, ("initiator-requests/free-refused",), Outcome.FAILED),
    ],
    ids=["HELLO_ACK", "statuses"],
)
def test_a_fault_is_caught(tmp_path: Path, fault: str, caught_by: tuple[str, ...], outcome: Outcome) -> None:
    right = run(WORKLOAD, caught_by)
    assert {result.outcome for result in right.values()} == {Outcome.PASSED}
    command = [*script(tmp_path, BROKEN.format(fault=fault)), "--rnic", "reference"]
    wrong = run(command, caught_by)
    assert {name: result.outcome for name, result in wrong.items()} == dict.fromkeys(caught_by, outcome)


KEY = Key(0x5EED, bytes(range(32)))
WITH_KEY = Setup(has=BY_HAND | {"keys", "one-by-one"}, keys=(KEY,))


@pytest.fixture
def key_file(tmp_path: Path) -> str:
    file = tmp_path / "initiator.keys"
    write_key(file, KEY)
    return str(file)


def test_an_initiator_may_always_use_its_key(key_file: str) -> None:
    """Every HELLO_ACK that it is to accept proves the key, however the case makes and sends it."""
    names = (
        "initiator-authentication/hello-is-signed",
        "initiator-hello/ack-with-skippable-options",
        "initiator-hello/more-private-data-is-ignored",
        "initiator-hello/second-ack",
        "initiator-requests/whole-workload",
        "initiator-requests/no-read-depth",
        "ddp-messages/reserved-fields-of-ours",
        "ddp-messages/hello-ack-in-several-segments",
        "mpa-startup/reply-in-any-segmentation",
    )
    results = run([*WORKLOAD, "--key-file", key_file], names, setup=WITH_KEY)
    assert {name: result.outcome for name, result in results.items()} == dict.fromkeys(names, Outcome.PASSED)


def test_an_initiator_in_direct_mode_may_always_use_its_key(key_file: str) -> None:
    names = ("initiator-direct/whole-workload", "initiator-direct/no-ticket-beyond-the-quota")
    setup = replace(WITH_KEY, has=WITH_KEY.has | {"direct"})
    results = run([*WORKLOAD, "--key-file", key_file, "--direct", "load,alloc"], names, setup=setup)
    assert {name: result.outcome for name, result in results.items()} == dict.fromkeys(names, Outcome.PASSED)


BELIEVES_ANY_PROVEN_ACK = """
def accepted(config, said, message):
    ack = HelloAck.parse(message)
    session.check_hello_ack(message, ack.auth, config.key, said.nonces, said.octets)
    return ack
connection.accepted = accepted
"""


def test_an_impossible_ack_proves_the_key(tmp_path: Path, key_file: str) -> None:
    """An initiator that looks at nothing but the MAC believes it, and is found out."""
    name = "initiator-hello/ack-with-impossible-range"
    command = script(tmp_path, BROKEN.format(fault=BELIEVES_ANY_PROVEN_ACK))
    [result] = run([*command, "--rnic", "reference", "--key-file", key_file], (name,), setup=WITH_KEY).values()
    assert result.outcome is Outcome.WARNED, result


# An initiator that makes no use of what is left to it: no inline data, no INVALIDATE, two credits, a name of its own.
PLAIN = """
import sys
import kbtp
from kbtp.conformance import workload
from kbtp.initiator import session
config, request = kbtp.InitiatorConfig, session.InitiatorSession.request
kbtp.InitiatorConfig = lambda **fields: config(
    **{**fields, "initiator_id": bytes(range(16)), "completion_credits": 2, "inline_max_bytes": 0})
session.InitiatorSession.request = lambda self, operation, **fields: request(
    self, operation, **{**fields, "invalidate": False})
sys.exit(workload.main())
"""


def test_what_is_left_to_an_initiator_is_not_asked_of_it(tmp_path: Path) -> None:
    """Cases that need more are skipped; those that read its memory wait for the long block."""
    passed = (
        "reads/responses-in-order-to-their-sinks",
        "reads/flood-of-reads-at-an-initiator",
        "initiator-requests/reads-in-pieces",
    )
    skipped = (
        "initiator-hello/ack-with-impossible-resumed",
        "initiator-requests/three-credits",
        "initiator-requests/completions-in-any-order",
        "initiator-requests/write-after-the-completion",
        "ddp-messages/cut-untagged-messages",
        "placement/write-after-a-send-with-invalidate",
    )
    results = run([*script(tmp_path, PLAIN), "--rnic", "reference"], (*passed, *skipped))
    assert {name: result.outcome for name, result in results.items()} == {
        **dict.fromkeys(passed, Outcome.PASSED),
        **dict.fromkeys(skipped, Outcome.SKIPPED),
    }


# An initiator that answers LENGTH_ERROR with a buffer as long as the target says.
COMES_AGAIN = """
import sys
import kbtp
from kbtp.conformance import workload
from kbtp.errors import LengthError
load = kbtp.Client.load
def load_again(self, block, *, into, **options):
    try:
        return load(self, block, into=into, **options)
    except LengthError:
        longer = bytearray(len(into) + 1)
        size = load(self, block, into=longer, **options)
        into[:] = longer[:size]
        return size
kbtp.Client.load = load_again
sys.exit(workload.main())
"""


def test_an_initiator_may_come_again_with_a_longer_buffer(tmp_path: Path) -> None:
    [result] = run(
        [*script(tmp_path, COMES_AGAIN), "--rnic", "reference"], ("initiator-requests/load-refused-with-length-error",)
    ).values()
    assert result.outcome is Outcome.PASSED, result


def quick(name: str) -> Case:
    """The case, of which nobody waits for the end."""
    [case] = cases_named(name)
    return Case(case.name, case.role, case.rules, case.title, case.run, case.needs, False, 0.5, None)


def test_a_command_that_ends_at_once_fails_its_cases(tmp_path: Path) -> None:
    for command in (script(tmp_path, ""), [*script(tmp_path, ""), "{url}"]):
        runner = InitiatorRunner(ONE_BY_ONE, Expectations(), initiators_of(shlex.join(command), 1), HERE)
        [result] = runner.run([quick("initiator-hello/hello-is-well-formed")])
        assert (result.outcome, result.saw) == (Outcome.FAILED, "its end without one")


def test_a_command_that_hangs_is_replaced(tmp_path: Path) -> None:
    """It connects and then neither answers nor ends: each case has a new one, which the file of process ids shows."""
    started = tmp_path / "started"
    text = f"import os, socket, sys, threading\nopen({str(started)!r}, 'a').write(f'{{os.getpid()}}\\n')\n"
    text += "host, port = sys.stdin.readline().strip()[7:].split(':')\n"
    text += "one = socket.create_connection((host, int(port)))\nthreading.Event().wait()\n"
    places = initiators_of(shlex.join(script(tmp_path, text)), 1, end_of_case_s=0.1)
    runner = InitiatorRunner(ONE_BY_ONE, Expectations(), places, HERE)
    results = list(runner.run([quick("initiator-hello/connection-data-is-there")] * 2))
    assert {(result.outcome, result.expected) for result in results} == {(Outcome.FAILED, "an MPA Request")}
    assert len(set(started.read_text().split())) == 2


def test_what_needs_direct_loads_alone() -> None:
    """Nothing of direct allocation is told to an initiator that has not asked for it."""
    names = ("initiator-direct/one-read-after-the-other", "initiator-direct/bad-entry-not-valid")
    results = run(
        [*WORKLOAD, "--direct", "load"], names, setup=replace(ONE_BY_ONE, has=ONE_BY_ONE.has | {"direct-loads"})
    )
    assert {name: result.outcome for name, result in results.items()} == dict.fromkeys(names, Outcome.PASSED)
