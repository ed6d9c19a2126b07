"""What came out of a run: as an object for JSON, as JUnit XML, and counted by section."""

from __future__ import annotations

import xml.etree.ElementTree as ElementTree
from collections import Counter
from collections.abc import Sequence
from typing import Any

from kbtp.conformance.catalogue import level_of, sections_of
from kbtp.conformance.result import Outcome, Result


def document_of(section: str) -> str:
    """The document of a section: "RFC 5044" of "RFC 5044 7.1.1", "profile" of "profile 8.1"."""
    words = section.split()
    return " ".join(words[:2]) if words[0] == "RFC" else words[0]


def chapter_of(section: str) -> str:
    """The section without its subsections: "RFC 5044 7" of "RFC 5044 7.1.1"."""
    document = document_of(section)
    rest = section[len(document) :].split()
    return f"{document} {rest[0].split('.')[0]}" if rest else document


def by_chapter(results: Sequence[Result]) -> dict[str, Counter[Outcome]]:
    """How the cases of each chapter ended; one that looks at rules of several counts in each."""
    counted: dict[str, Counter[Outcome]] = {}
    for result in results:
        for chapter in dict.fromkeys(map(chapter_of, sections_of(result.case))):
            counted.setdefault(chapter, Counter())[result.outcome] += 1
    return dict(sorted(counted.items(), key=lambda item: _order(item[0])))


def _order(chapter: str) -> tuple[str, int]:
    document, _, number = chapter.rpartition(" ")
    return document, int(number) if number.isdigit() else 0


def as_object(results: Sequence[Result], peer: str) -> dict[str, Any]:
    """For JSON."""
    return {
        "peer": peer,
        "cases": [
            {
                "name": result.case.name,
                "role": result.case.role.value,
                "title": result.case.title,
                "rules": list(result.case.rules),
                "sections": list(sections_of(result.case)),
                "level": level_of(result.case).value,
                "outcome": result.outcome.value,
                "expected": result.expected,
                "saw": result.saw,
                "reason": result.reason,
                "duration_s": round(result.duration_s, 3),
            }
            for result in results
        ],
        "counts": {outcome.value: count for outcome, count in Counter(one.outcome for one in results).items()},
        "failed": any(result.outcome.fails_the_run for result in results),
    }


def as_junit(results: Sequence[Result], peer: str) -> str:
    """JUnit XML, one test suite."""
    counts = Counter(result.outcome for result in results)
    suite = ElementTree.Element(
        "testsuite",
        name=f"kbtp conformance of {peer}",
        tests=str(len(results)),
        failures=str(counts[Outcome.FAILED] + counts[Outcome.UNEXPECTED]),
        errors=str(counts[Outcome.BROKEN] + counts[Outcome.NOT_RUN]),
        skipped=str(counts[Outcome.SKIPPED] + counts[Outcome.EXPECTED]),
        time=f"{sum(result.duration_s for result in results):.3f}",
    )
    for result in results:
        role, group, name = result.case.name.split("/")
        case = ElementTree.SubElement(
            suite, "testcase", classname=f"{role}.{group}", name=name, time=f"{result.duration_s:.3f}"
        )
        tag = {
            Outcome.FAILED: "failure",
            Outcome.UNEXPECTED: "failure",
            Outcome.BROKEN: "error",
            Outcome.NOT_RUN: "error",
            Outcome.SKIPPED: "skipped",
            Outcome.EXPECTED: "skipped",
            Outcome.WARNED: "system-out",
        }.get(result.outcome)
        if tag is not None:
            told = _printable(f"{'; '.join(sections_of(result.case))}: {result}")
            element = ElementTree.SubElement(case, tag)
            element.text = told
            if tag != "system-out":
                element.set("message", told.splitlines()[0])
    return ElementTree.tostring(suite, encoding="unicode", xml_declaration=True)


def _printable(text: str) -> str:
    return "".join(c if c.isprintable() or c == "\n" else "?" for c in text)
