"""What a run tells: by section, as JSON, as JUnit XML."""

from __future__ import annotations

import json
import xml.etree.ElementTree as ElementTree

from kbtp.conformance.catalogue import cases
from kbtp.conformance.report import as_junit, as_object, by_chapter, chapter_of, document_of
from kbtp.conformance.result import Outcome, Result

CASE = next(case for case in cases() if case.name == "target/hello/hello-too-long")
RESULTS = [
    Result(CASE, Outcome.PASSED, duration_s=0.25),
    Result(CASE, Outcome.FAILED, "a Terminate", "\x00 & <nothing>", duration_s=1.0),
    Result(CASE, Outcome.WARNED, "this", "that"),
    Result(CASE, Outcome.SKIPPED, reason="it takes a day"),
    Result(CASE, Outcome.EXPECTED, "this", "that", "fixed in 2.1"),
    Result(CASE, Outcome.BROKEN, reason="Traceback\n  KeyError"),
]


def test_chapters_and_documents() -> None:
    assert document_of("RFC 5044 7.1.1") == "RFC 5044"
    assert chapter_of("RFC 5044 7.1.1") == "RFC 5044 7"
    assert (document_of("draft 6.3 step 1"), chapter_of("draft 6.3 step 1")) == ("draft", "draft 6")
    assert chapter_of("profile 10") == "profile 10"
    counts = by_chapter(RESULTS)
    assert list(counts) == ["profile 8"]
    assert counts["profile 8"][Outcome.FAILED] == 1


def test_chapters_come_in_order() -> None:
    chapters = list(by_chapter([Result(case, Outcome.PASSED) for case in cases()]))
    assert chapters.index("profile 2") < chapters.index("profile 8")
    assert chapters.index("RFC 5044 4") < chapters.index("RFC 5044 7")


def test_json() -> None:
    told = json.loads(json.dumps(as_object(RESULTS, "kbtp://127.0.0.1")))
    assert told["failed"] is True
    assert told["counts"]["failed"] == 1
    assert told["cases"][1] == {
        "name": "target/hello/hello-too-long",
        "role": "target",
        "title": CASE.title,
        "rules": ["KV6"],
        "sections": ["profile 8.1"],
        "level": "MUST",
        "outcome": "failed",
        "expected": "a Terminate",
        "saw": "\x00 & <nothing>",
        "reason": "",
        "duration_s": 1.0,
    }
    assert as_object(RESULTS[:1], "x")["failed"] is False


def test_junit() -> None:
    suite = ElementTree.fromstring(as_junit(RESULTS, "kbtp://127.0.0.1"))
    assert suite.attrib == {
        "name": "kbtp conformance of kbtp://127.0.0.1",
        "tests": "6",
        "failures": "1",
        "errors": "1",
        "skipped": "2",
        "time": "1.250",
    }
    passed, failed, warned, skipped, _, broken = suite
    assert passed.attrib == {"classname": "target.hello", "name": "hello-too-long", "time": "0.250"}
    assert "profile 8.1: target/hello/hello-too-long: failed: expected a Terminate; saw ? & <nothing>" in (
        failed[0].get("message") or ""
    )
    assert [one[0].tag for one in (failed, warned, skipped, broken)] == ["failure", "system-out", "skipped", "error"]
    assert "KeyError" in (broken[0].text or "")
