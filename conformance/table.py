"""docs/conformance.md: every rule, the cases that look at it, and how they ended here."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from kbtp.conformance.case import Role
from kbtp.conformance.catalogue import cases_by_rule, rules
from kbtp.conformance.report import chapter_of, chapter_order, document_of
from kbtp.conformance.result import Outcome, Result
from kbtp.conformance.rule import Rule

Run = tuple[Role, str]
"""Who was under test, and which RNIC."""

HEAD = """# Conformance

What `kbtp conformance` looks at, rule by rule, and what it found about this package. `make conformance` runs the suite
against both RNICs as target and as initiator and compares this page with what came out; `make conformance WRITE=1`
writes it anew. How to run the suite against another implementation is in [testing.md](testing.md).

A case passes if it passes with both RNICs. "warned": a rule that is a SHOULD, or a text that can be read otherwise.
"expected": it fails, for the reason below the table.

"""


def page(runs: Mapping[Run, Sequence[Result]]) -> str:
    """The whole page. Nothing in it depends on when and where the runs were."""
    every = [result for results in runs.values() for result in results]
    by_case: dict[str, list[tuple[Run, Result]]] = {}
    for run, results in runs.items():
        for result in results:
            by_case.setdefault(result.case.name, []).append((run, result))
    looked_at = cases_by_rule([result.case for result in every])
    parts = [HEAD, _counts(every), "\n"]
    by_document: dict[str, list[Rule]] = {}
    for rule in rules().values():
        by_document.setdefault(document_of(rule.section.split("; ")[0]), []).append(rule)
    for document, some in by_document.items():
        parts.append(f"## {document}\n\n| rule | section | what it says | cases | result |\n|---|---|---|---|---|\n")
        for rule in some:
            names = list(dict.fromkeys(case.name for case in looked_at[rule.id]))
            parts.append(_row(rule, names, by_case))
        parts.append("\n")
    parts.append(_reasons(by_case))
    return "".join(parts).rstrip() + "\n"


def _row(rule: Rule, names: Sequence[str], by_case: Mapping[str, Sequence[tuple[Run, Result]]]) -> str:
    level = "" if rule.level.value == "MUST" else " (should)"
    said = f"| {rule.id} | {rule.section} | {rule.text}{level} "
    if rule.unobservable:
        return f"{said}| | not to be seen: {rule.unobservable} |\n"
    outcomes = [outcome for name in names for outcome in _outcomes(by_case[name])]
    return f"{said}| {'<br>'.join(names)} | {', '.join(dict.fromkeys(outcomes))} |\n"


_SAID = {Outcome.EXPECTED: "expected"}


def _outcomes(results: Sequence[tuple[Run, Result]]) -> list[str]:
    """One word if all runs say the same."""
    said = [_SAID.get(result.outcome, result.outcome.value) for _, result in results]
    if len(set(said)) == 1:
        return said[:1]
    return [f"{rnic} {word}" for ((_, rnic), _), word in zip(results, said, strict=True)]


def _counts(results: Sequence[Result]) -> str:
    """Cases of each chapter, and all of them."""
    chapters: dict[str, set[str]] = {}
    known = rules()
    for result in results:
        for rule in result.case.rules:
            for section in known[rule].section.split("; "):
                chapters.setdefault(chapter_of(section), set()).add(result.case.name)
    rows = "".join(
        f"| {chapter} | {len(names)} |\n"
        for chapter, names in sorted(chapters.items(), key=lambda item: chapter_order(item[0]))
    )
    roles = Counter(name.split("/")[0] for name in {result.case.name for result in results})
    total = sum(roles.values())
    told = ", ".join(f"{count} with the {role} under test" for role, count in sorted(roles.items()))
    return f"{len(known)} rules, {total} cases: {told}.\n\n| section | cases |\n|---|---|\n{rows}"


def _reasons(by_case: Mapping[str, Sequence[tuple[Run, Result]]]) -> str:
    """What was skipped, warned of or expected to fail, and why."""
    lines = []
    for name, results in by_case.items():
        for (_, rnic), result in results:
            if result.outcome in (Outcome.SKIPPED, Outcome.EXPECTED):
                lines.append(f"- {name} ({rnic}): {result.outcome.value}. {result.reason}\n")
            elif result.outcome is Outcome.WARNED:
                lines.append(f"- {name} ({rnic}): warned. Expected was {result.expected}.\n")
    return "## Reasons\n\n" + "".join(sorted(lines)) if lines else ""
