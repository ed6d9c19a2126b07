"""All that was found, as lines for people and as one object for programs; docs/doctor.md describes that."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields, is_dataclass
from enum import Enum

from kbtp.doctor.facts import MachineFacts, RdmaFacts, RnicFacts, Unknown, printable
from kbtp.doctor.reach import Step, reached
from kbtp.doctor.verdicts import Finding, Level, judge_rdma, judge_rnics
from kbtp.doctor.verdicts_machine import judge_machine

FORMAT = 1
"""Of the JSON object: raised when something in it changes its meaning or goes away, not when something is added."""
_LEVEL_WIDTH = max(len(level.value) for level in Level)


@dataclass(frozen=True, slots=True)
class Section:
    name: str
    title: str
    facts: object
    findings: tuple[Finding, ...]


@dataclass(frozen=True, slots=True)
class Visit:
    """How far the target at `url` was reached."""

    url: str
    steps: tuple[Step, ...]


@dataclass(frozen=True, slots=True)
class Report:
    sections: tuple[Section, ...]
    visit: Visit | None = None

    @classmethod
    def of(cls, rdma: RdmaFacts, rnics: RnicFacts, machine: MachineFacts, visit: Visit | None = None) -> Report:
        return cls(
            (
                Section("rdma", "RDMA devices", rdma, tuple(judge_rdma(rdma))),
                Section("rnic", "RNICs of kbtp", rnics, tuple(judge_rnics(rnics))),
                Section("machine", "This machine", machine, tuple(judge_machine(machine, rdma, rnics))),
            ),
            visit,
        )

    @property
    def findings(self) -> list[Finding]:
        found = [finding for section in self.sections for finding in section.findings]
        return found + ([] if self.visit is None else [step.finding for step in self.visit.steps])

    @property
    def problems(self) -> int:
        return sum(finding.level is Level.PROBLEM for finding in self.findings)


# --- for people --------------------------------------------------------------------------------


def lines_of(report: Report) -> Iterator[str]:
    for section in report.sections:
        yield section.title
        for finding in section.findings:
            yield from _lines(finding, finding.says)
        yield ""
    if report.visit is not None:
        yield printable(report.visit.url)
        for step in report.visit.steps:
            yield from _lines(step.finding, f"{step.finding.says} [{step.took_ms:.1f} ms]")
        failed = failed_step(report.visit)
        if failed is not None:
            yield f"  the first step that fails is {failed}; what comes after it was not tried"
        yield ""
    count = report.problems
    yield "nothing is wrong" if not count else "1 problem" if count == 1 else f"{count} problems"


def _lines(finding: Finding, says: str) -> Iterator[str]:
    yield f"  {finding.level.value:<{_LEVEL_WIDTH}}  {finding.about}: {says}"
    if finding.do:
        yield f"  {'':<{_LEVEL_WIDTH}}  -> {finding.do}"


def failed_step(visit: Visit) -> str | None:
    return next((step.name for step in visit.steps if step.finding.level is Level.PROBLEM), None)


# --- for programs ------------------------------------------------------------------------------


def object_of(report: Report) -> dict[str, object]:
    return {
        "format": FORMAT,
        "healthy": not report.problems,
        "problems": report.problems,
        "sections": {
            section.name: {"findings": list(map(_finding, section.findings)), "facts": plain(section.facts)}
            for section in report.sections
        },
        "reach": None if report.visit is None else _visit(report.visit),
    }


def _visit(visit: Visit) -> dict[str, object]:
    return {
        "url": visit.url,
        "reached": reached(visit.steps),
        "failed_step": failed_step(visit),
        "steps": [
            {"step": step.name, "took_ms": step.took_ms, **_finding(step.finding), "seen": step.seen}
            for step in visit.steps
        ],
    }


def _finding(finding: Finding) -> dict[str, object]:
    return {"level": finding.level.value, "about": finding.about, "says": finding.says, "do": finding.do}


def plain(value: object) -> object:
    """`value` of what JSON has; what is unknown becomes {"unknown": why}."""
    if isinstance(value, Unknown):
        return {"unknown": value.why}
    if isinstance(value, Enum):
        return value.value
    if is_dataclass(value):
        return {field.name: plain(getattr(value, field.name)) for field in fields(value)}
    if isinstance(value, tuple):
        return [plain(item) for item in value]
    return value
