"""Every rule and every case there is, and which rule is looked at by which case."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cache

from kbtp.conformance.case import Case, Group, Role
from kbtp.conformance.iwarp import GROUPS as IWARP_GROUPS
from kbtp.conformance.iwarp import RULES as IWARP_RULES
from kbtp.conformance.kbtp_cases import GROUPS as KBTP_GROUPS
from kbtp.conformance.kbtp_cases import RULES as KBTP_RULES
from kbtp.conformance.rule import Level, Rule

GROUPS: tuple[Group, ...] = (*IWARP_GROUPS, *KBTP_GROUPS)


@cache
def rules() -> dict[str, Rule]:
    """By id, in the order of the tables."""
    return {rule.id: rule for rule in (*IWARP_RULES, *KBTP_RULES)}


def cases(role: Role | None = None) -> list[Case]:
    return [case for group in GROUPS for case in group.cases if role in (None, case.role)]


def level_of(case: Case) -> Level:
    return case.level or rules()[case.rules[0]].level


def sections_of(case: Case) -> tuple[str, ...]:
    """Where the rules of `case` stand, each section once."""
    return tuple(dict.fromkeys(part for rule in case.rules for part in rules()[rule].section.split("; ")))


def cases_by_rule(among: Sequence[Case]) -> dict[str, list[Case]]:
    found: dict[str, list[Case]] = {rule: [] for rule in rules()}
    for case in among:
        for rule in case.rules:
            found[rule].append(case)
    return found


def faults() -> Iterator[str]:
    """What is wrong with the tables themselves: rules without a case, cases of no rule, names that are there twice."""
    listed = [rule.id for rule in (*IWARP_RULES, *KBTP_RULES)]
    yield from (f"rule {one} is there twice" for one in sorted({one for one in listed if listed.count(one) > 1}))
    names = [case.name for case in cases()]
    yield from (f"case {one} is there twice" for one in sorted({one for one in names if names.count(one) > 1}))
    covered = set()
    for case in cases():
        covered |= set(case.rules)
        if not case.rules or not case.title:
            yield f"case {case.name} has no {'title' if case.rules else 'rule'}"
        yield from (
            f"case {case.name} names rule {one}, which is not there" for one in case.rules if one not in rules()
        )
    for rule in rules().values():
        if (rule.id in covered) == bool(rule.unobservable):
            yield f"rule {rule.id} has {'a case and is said to be unobservable' if rule.unobservable else 'no case'}"
