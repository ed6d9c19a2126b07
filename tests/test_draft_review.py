"""docs/draft-review.md: every point is there, and what is to reproduce it exists."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from model.runs import HOLDING, RUNS, WITHOUT_A_RULE

ROOT = Path(__file__).parents[1]
REVIEW = (ROOT / "docs" / "draft-review.md").read_text()
ROWS = re.findall(r"^\| (\d+) \| (.*?) \| (.*?) \| (.*?) \| (.*?) ?\|$", REVIEW, re.MULTILINE)
NAMED = {int(number): re.findall(r"`([^`]+)`", by) for number, _, _, _, by in ROWS}


def test_each_row_of_the_table_has_its_section() -> None:
    numbers = [int(number) for number in re.findall(r"^## (\d+)\. ", REVIEW, re.MULTILINE)]
    assert list(NAMED) == numbers == list(range(1, len(ROWS) + 1))


@pytest.mark.parametrize("name", [name for names in NAMED.values() for name in names])
def test_what_reproduces_a_point_exists(name: str) -> None:
    path, _, test = name.partition("::")
    if test:
        assert re.search(rf"^(async )?def {test}\(", (ROOT / path).read_text(), re.MULTILINE), name
    else:
        assert name in [run.name for run in WITHOUT_A_RULE]


def test_every_race_is_reproduced() -> None:
    for number, _, kind, _, _ in ROWS:
        assert NAMED[int(number)] or kind != "race", f"point {number}"


def test_every_run_that_finds_something_is_told_of() -> None:
    told = {name for names in NAMED.values() for name in names}
    assert [run.name for run in WITHOUT_A_RULE if run.name not in told] == []


def test_runs_are_told_apart() -> None:
    assert len({run.name for run in RUNS}) == len(RUNS)
    assert all(run.finds is None for run in HOLDING)
    assert all(run.finds for run in WITHOUT_A_RULE)
