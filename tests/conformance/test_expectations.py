"""Expectations without a reason, or for nothing, are errors."""

from __future__ import annotations

from pathlib import Path

import pytest

from kbtp.conformance import catalogue
from kbtp.conformance.expectations import Expectations
from kbtp.errors import ApiMisuse

CASES = catalogue.cases()
NAME = "target/blocks/load-of-an-empty-block"
CASE = next(case for case in CASES if case.name == NAME)
OTHER = next(case for case in CASES if case.name.startswith("initiator/"))


def read(tmp_path: Path, text: str) -> Expectations:
    file = tmp_path / "expectations.toml"
    file.write_text(text)
    return Expectations.read(file, CASES)


def test_reasons_by_name_and_by_pattern(tmp_path: Path) -> None:
    text = f'[skip]\n"initiator/*" = "there is none"\n[fail]\n"{NAME}" = "fixed in 2.1"\n'
    expectations = read(tmp_path, text)
    assert expectations.fail_reason(CASE) == "fixed in 2.1"
    assert expectations.skip_reason(CASE) == ""
    assert expectations.skip_reason(OTHER) == "there is none"
    assert read(tmp_path, "") == Expectations()


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (f'[skip]\n"{NAME}" = ""\n', "needs a reason"),
        (f'[fail]\n"{NAME}" = "broken"\n', "needs a reason"),
        (f'[fail]\n"{NAME}" = true\n', "needs a reason"),
        ('[skip]\n"target/blocks/no-such-case" = "for a reason"\n', "the name of no case"),
        ('[ignore]\n"target/*" = "for a reason"\n', "there is no table"),
        ('skip = "all of them"\n', "must be a table"),
        ("[skip\n", "cannot read"),
    ],
)
def test_what_cannot_be_is_named(tmp_path: Path, text: str, said: str) -> None:
    with pytest.raises(ApiMisuse, match=said):
        read(tmp_path, text)


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(ApiMisuse, match="cannot read"):
        Expectations.read(tmp_path / "none.toml", CASES)
