"""What a case can find, other than that all is well."""

from __future__ import annotations


class Deviation(Exception):
    """The peer under test did not do what a rule says."""

    def __init__(self, expected: str, saw: str) -> None:
        super().__init__(f"expected {expected}; saw {saw}")
        self.expected = expected
        self.saw = saw


class NotApplicable(Exception):
    """The peer under test is not configured for what the case looks at, or has nothing the rule is about."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


def expect(holds: bool, expected: str, saw: object) -> None:
    """Raises `Deviation` unless `holds`."""
    if not holds:
        raise Deviation(expected, str(saw))
