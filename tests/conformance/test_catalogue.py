"""The tables of rules and cases are whole."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from kbtp.conformance import catalogue
from kbtp.conformance.case import Case, Group, Role
from kbtp.conformance.rule import Level, Rule
from kbtp.conformance.setup import NEEDS

PAGE = Path(__file__).parents[2] / "docs" / "conformance.md"


def test_every_rule_has_a_case_and_every_case_its_rules() -> None:
    assert list(catalogue.faults()) == []


def test_every_line_of_iwarp_is_there() -> None:
    """Letters are documents: MPA, framing, enhanced set-up, DDP, RDMAP, extensions, security."""
    counts = {"M": 26, "F": 26, "E": 24, "D": 34, "R": 50, "X": 30, "S": 12}
    missing = [f"{letter}{n}" for letter, count in counts.items() for n in range(1, count + 1)]
    assert not [one for one in missing if one not in catalogue.rules()]
    assert len(missing) == 202


@pytest.mark.parametrize("role", Role)
def test_cases_are_many_and_have_titles(role: Role) -> None:
    cases = catalogue.cases(role)
    assert len(cases) > 100
    for case in cases:
        assert case.title.endswith("."), case.name
        assert re.fullmatch(rf"{role.value}/[a-z0-9-]+/[a-z0-9-]+", case.name), case.name
        assert case.needs <= set(NEEDS), case.name


def test_sections_name_documents_that_there_are() -> None:
    rfcs = "5040|5041|5042|5044|6580|6581|7306"
    documents = re.compile(rf"(RFC ({rfcs})|draft|profile) [\w.]+( (step|rule|item|figure) \d+)?")
    for rule in catalogue.rules().values():
        for section in rule.section.split("; "):
            assert documents.fullmatch(section), f"{rule.id}: {section}"


def test_the_page_has_every_rule_and_every_case() -> None:
    text = PAGE.read_text()
    for rule in catalogue.rules():
        assert f"\n| {rule} | " in text, rule
    for case in catalogue.cases():
        assert case.name in text, case.name


def _faults(monkeypatch: pytest.MonkeyPatch, rules: tuple[Rule, ...], *groups: Group) -> list[str]:
    monkeypatch.setattr(catalogue, "GROUPS", groups)
    monkeypatch.setattr(catalogue, "IWARP_RULES", rules)
    monkeypatch.setattr(catalogue, "KBTP_RULES", ())
    monkeypatch.setattr(catalogue, "rules", lambda: {rule.id: rule for rule in rules})
    return list(catalogue.faults())


def _case(name: str, *rules: str, title: str = "A title.") -> Case:
    return Case(f"target/{name}", Role.TARGET, rules, title, lambda probe: None, frozenset(), False, 1.0, None)


def test_what_is_wrong_with_tables_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    rules = (
        Rule("A1", "draft 1", "has a case"),
        Rule("A2", "draft 1", "has none"),
        Rule("A3", "draft 1", "cannot have one", Level.MUST, "it is inside"),
        Rule("A4", "draft 1", "has one and says it cannot", Level.MUST, "it is inside"),
    )
    group = Group("group")
    group.cases.extend(
        [_case("one", "A1"), _case("one", "A1"), _case("two", "A4", "B9"), _case("three", "A1", title="")]
    )
    assert _faults(monkeypatch, rules, group) == [
        "case target/one is there twice",
        "case target/two names rule B9, which is not there",
        "case target/three has no title",
        "rule A2 has no case",
        "rule A4 has a case and is said to be unobservable",
    ]
