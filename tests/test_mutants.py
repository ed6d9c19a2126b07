"""Each fault still has its place in the sources; how `python -m mutants` judges one in Rust: what cannot be built says
nothing about the rule it breaks."""

from __future__ import annotations

from pathlib import Path

import pytest

from mutants import __main__ as program
from mutants.faults import MUTANTS
from mutants.plant import Mutant, Verdict

FAULT = Mutant("RFC 5044 4.4", "it does the opposite", "lib.rs", "true", "false", ("-p", "kbtp-rnic"))


@pytest.mark.parametrize(
    ("build", "tests", "verdict"),
    [
        ("exit 101", "exit 101", Verdict.BROKEN),
        ("exec sleep 60", "exit 101", Verdict.BROKEN),
        ("exit 0", "echo 'test wrong ... FAILED'; exit 101", Verdict.CAUGHT),
        ("exit 0", "exec sleep 60", Verdict.CAUGHT),
        ("exit 0", "exit 0", Verdict.SURVIVED),
    ],
    ids=["not built", "not built in time", "failed", "endless", "passed"],
)
def test_tests_are_built_before_they_are_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, build: str, tests: str, verdict: Verdict
) -> None:
    cargo = tmp_path / "cargo"
    cargo.write_text(f'#!/bin/sh\ncase "$*" in *--no-run*) {build};; *) {tests};; esac\n')
    cargo.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    monkeypatch.setattr(program, "BUILD_LIMIT_S", 0.1 if "sleep" in build else 60.0)
    monkeypatch.setattr(program, "TIME_LIMIT_S", 0.1 if "sleep" in tests else 60.0)
    (tmp_path / "lib.rs").write_text("true")
    outcome = program.Tree(tmp_path).judge(FAULT)
    assert outcome.verdict is verdict, outcome.detail
    assert (tmp_path / "lib.rs").read_text() == "true"


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: f"{mutant.rule}: {mutant.fault}")
def test_its_place_is_there_just_once_and_its_tests_are_there(mutant: Mutant) -> None:
    assert mutant.planted(program.ROOT) != (program.ROOT / mutant.file).read_text()
    for test in mutant.tests:
        assert not test.startswith("tests/") or (program.ROOT / test.partition("::")[0]).exists()
