"""What the suite cannot ask over a driver is left out with a reason, which no guest is needed to see."""

from __future__ import annotations

import pytest

from conformance.over_rnic import kbtp_part
from conformance.profiles import INITIATORS, TARGETS, Profile, divided
from interop.checks import ROOT
from kbtp.conformance.case import Role
from kbtp.conformance.catalogue import cases
from kbtp.conformance.expectations import Expectations
from kbtp.conformance.setup import BY_HAND


@pytest.mark.parametrize(
    ("driver", "streams", "lacks"),
    [("siw", BY_HAND, {"direct", "direct-alloc"}), ("rxe", {"infiniband"}, set())],
)
@pytest.mark.parametrize(("role", "profiles"), [(Role.TARGET, TARGETS), (Role.INITIATOR, INITIATORS)])
def test_what_cannot_be_asked_has_a_reason(
    driver: str, streams: frozenset[str], lacks: set[str], role: Role, profiles: tuple[Profile, ...]
) -> None:
    expectations = Expectations.read(ROOT / "interop" / f"expectations_{driver}.toml", cases())
    by_profile = divided(profiles, kbtp_part(role))
    silent = [
        case.name
        for profile in profiles
        for case in by_profile[profile.name]
        if case.needs - ((profile.has | streams) - lacks) and not expectations.skip_reason(case)
    ]
    assert silent == []


def test_what_is_asked_is_counted_right() -> None:
    page = (ROOT / "docs" / "testing.md").read_text()
    for driver in ("siw", "rxe"):
        expectations = Expectations.read(ROOT / "interop" / f"expectations_{driver}.toml", cases())
        for role in Role:
            every = kbtp_part(role)
            asked = sum(not expectations.skip_reason(case) for case in every)
            assert f"{asked} of {len(every)}" in page, f"{role.value} on {driver}"
