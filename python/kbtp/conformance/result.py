"""How one case ended."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from kbtp.conformance.case import Case


class Outcome(Enum):
    """The value is what reports print."""

    PASSED = "passed"
    FAILED = "failed"
    WARNED = "warned"  # a SHOULD, or a text that can be read otherwise
    SKIPPED = "skipped"
    EXPECTED = "failed as expected"
    UNEXPECTED = "passed though expected to fail"
    BROKEN = "broken"  # the case itself raised something it should not
    NOT_RUN = "not run"

    @property
    def fails_the_run(self) -> bool:
        return self in (Outcome.FAILED, Outcome.UNEXPECTED, Outcome.BROKEN, Outcome.NOT_RUN)


@dataclass(frozen=True, slots=True)
class Result:
    """`reason`: why it was skipped, why it was expected to fail, or how it broke."""

    case: Case
    outcome: Outcome
    expected: str = ""
    saw: str = ""
    reason: str = ""
    duration_s: float = 0.0

    def __str__(self) -> str:
        told = f"expected {self.expected}; saw {self.saw}" if self.expected else self.reason
        return f"{self.case.name}: {self.outcome.value}{': ' if told else ''}{told}"
