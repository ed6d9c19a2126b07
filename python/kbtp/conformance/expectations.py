"""Which cases a run leaves out or expects to fail, each with its reason.

    [skip]
    "target/session/linger-is-kept" = "our target keeps nothing beyond a stream"

    [fail]
    "target/rdmap/*" = "fixed in 2.1"

A pattern that matches no case is an error, and so is a reason that says nothing.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path

from kbtp.conformance.case import Case
from kbtp.errors import ApiMisuse

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

REASON_MIN_WORDS = 2


@dataclass(frozen=True, slots=True)
class Expectations:
    """Patterns of case names, and why."""

    skip: dict[str, str] = field(default_factory=dict)
    fail: dict[str, str] = field(default_factory=dict)

    def skip_reason(self, case: Case) -> str:
        return _matching(self.skip, case)

    def fail_reason(self, case: Case) -> str:
        return _matching(self.fail, case)

    @classmethod
    def read(cls, path: Path, cases: Sequence[Case]) -> Expectations:
        """Raises `ApiMisuse` that names the entry which cannot be."""
        try:
            tables = tomllib.loads(path.read_text())
        except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
            raise ApiMisuse(f"cannot read {path}: {error}") from None
        for name in tables:
            if name not in ("skip", "fail"):
                raise ApiMisuse(f"{path}: there is no table [{name}], only [skip] and [fail]")
        for name, table in tables.items():
            _check(path, name, table, cases)
        return cls(tables.get("skip", {}), tables.get("fail", {}))


def _check(path: Path, name: str, table: object, cases: Sequence[Case]) -> None:
    if not isinstance(table, dict):
        raise ApiMisuse(f"{path}: [{name}] must be a table")
    for pattern, reason in table.items():
        if not isinstance(reason, str) or len(reason.split()) < REASON_MIN_WORDS:
            raise ApiMisuse(f"{path}: [{name}] {pattern!r} needs a reason, in words")
        if not any(fnmatchcase(case.name, pattern) for case in cases):
            raise ApiMisuse(f"{path}: [{name}] {pattern!r} is the name of no case")


def _matching(table: dict[str, str], case: Case) -> str:
    return next((reason for pattern, reason in table.items() if fnmatchcase(case.name, pattern)), "")
