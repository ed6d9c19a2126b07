"""One planted fault, and what was seen of it."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Mutant:
    """A rule taken out: in `file`, the one place that reads `old` reads `new` instead.

    `tests` are what pytest gets (files, node ids, -k), or, for a Rust file, what `cargo test` gets after its own
    options: as few as will do, so that a run is short. They must pass where nothing is planted.
    """

    rule: str
    """The section that says so: `draft 6.3 step 1`, `profile 6.1`, `RFC 5044 4.4`."""
    fault: str
    """What an implementation with this fault does."""
    file: str
    old: str
    new: str
    tests: tuple[str, ...]

    @property
    def in_rust(self) -> bool:
        return self.file.endswith(".rs")

    def planted(self, tree: Path) -> str:
        """The text of the file with the fault in it. Raises `ValueError` where the place is not there just once."""
        text = (tree / self.file).read_text()
        if text.count(self.old) != 1:
            raise ValueError(f"{self.file}: expected once, found {text.count(self.old)} times:\n{self.old}")
        return text.replace(self.old, self.new)


class Verdict(Enum):
    CAUGHT = "caught"
    SURVIVED = "SURVIVED"
    BROKEN = "BROKEN"
    """The tests could not even run: this says nothing about the rule."""


@dataclass(frozen=True, slots=True)
class Outcome:
    mutant: Mutant
    verdict: Verdict
    detail: str
    """The first test that failed, or the end of what was printed."""
    seconds: float
