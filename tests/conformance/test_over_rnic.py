"""The KBTP part over an RNIC: targets and initiators are started for it, and nothing is left out in silence."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

import pytest

from conformance.over_rnic import Suite
from kbtp.conformance.case import Role
from kbtp.conformance.expectations import Expectations
from kbtp.conformance.result import Outcome

BELOW = "target/hello/rtr-is-served"


def outcomes(
    folder: Path, role: Role, *names: str, skip: Mapping[str, str] = MappingProxyType({})
) -> dict[str, Outcome]:
    expectations = Expectations(skip=dict(skip))
    suite = Suite("native", "127.0.0.1", expectations, python=[sys.executable], at_once=2, patience=4.0)
    found = {result.case.name: result.outcome for result in suite.run(role, names, folder)}
    suite.close()
    return found


@pytest.mark.parametrize(
    ("role", "names"),
    [
        (Role.TARGET, ("target/blocks/allow-unsealed", "target/authentication/both-sides-prove-the-key")),
        (
            Role.INITIATOR,
            ("initiator/initiator-requests/whole-workload", "initiator/initiator-authentication/hello-is-signed"),
        ),
    ],
)
def test_each_profile_is_started(tmp_path: Path, role: Role, names: tuple[str, ...]) -> None:
    assert outcomes(tmp_path, role, *names) == dict.fromkeys(names, Outcome.PASSED)


def test_a_skip_needs_a_reason(tmp_path: Path) -> None:
    for number, (skip, outcome) in enumerate((({}, Outcome.FAILED), ({BELOW: "no MPA here"}, Outcome.SKIPPED))):
        folder = tmp_path / str(number)
        folder.mkdir()
        assert outcomes(folder, Role.TARGET, BELOW, skip=skip) == {BELOW: outcome}
