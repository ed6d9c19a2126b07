"""Sizes and times as people write them: `64KiB`, `1.5GiB`, `30s`, `2h`, `forever`."""

from __future__ import annotations

import math
import re
from fractions import Fraction
from typing import Generic, TypeVar

import click

_SIZE_UNITS = {"": 1, "B": 1}
_SIZE_UNITS |= {f"{letter}iB": 1024**power for power, letter in enumerate("KMGT", start=1)}
_SIZE_UNITS |= {f"{letter}B": 1000**power for power, letter in enumerate("kMGT", start=1)}
_TIME_UNITS = {"": 1.0, "ms": 0.001, "s": 1.0, "min": 60.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
_QUANTITY = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*")

FOREVER = "forever"

_Number = TypeVar("_Number", int, float)


def parse_size(text: str) -> int:
    """Octets. Raises ValueError naming the units there are."""
    value, unit = _split(text, "a size such as 65536, 64KiB or 1.5GiB")
    if unit not in _SIZE_UNITS:
        raise ValueError(f"unknown unit {unit!r} in {text!r}: use one of {', '.join(u for u in _SIZE_UNITS if u)}")
    octets = Fraction(value) * _SIZE_UNITS[unit]
    if octets.denominator != 1:
        raise ValueError(f"{text!r} is not a whole number of octets")
    return octets.numerator


def parse_seconds(text: str) -> float:
    """Seconds; `forever` is infinite. Raises ValueError naming the units there are."""
    if text.strip() == FOREVER:
        return math.inf
    value, unit = _split(text, f"a time such as 30s, 5min, 2h or {FOREVER}")
    if unit not in _TIME_UNITS:
        raise ValueError(f"unknown unit {unit!r} in {text!r}: use one of {', '.join(u for u in _TIME_UNITS if u)}")
    return float(value) * _TIME_UNITS[unit]


def _split(text: str, expected: str) -> tuple[str, str]:
    match = _QUANTITY.fullmatch(text)
    if match is None:
        raise ValueError(f"{text!r} is not {expected}")
    return match[1], match[2]


def format_size(octets: int) -> str:
    """The largest binary unit that keeps the number whole or leaves at most one decimal."""
    for power, letter in ((4, "T"), (3, "G"), (2, "M"), (1, "K")):
        if octets >= 1024**power:
            return f"{octets / 1024**power:.4g} {letter}iB"
    return f"{octets} octets"


class _Quantity(click.ParamType, Generic[_Number]):  # type: ignore[type-arg]  # generic only in newer click
    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> _Number | None:
        if isinstance(value, int | float) and not isinstance(value, bool):
            value = repr(value)
        if not isinstance(value, str):
            self.fail(f"{value!r} is not {self.name}", param, ctx)
        try:
            return self.parse(value)
        except ValueError as error:
            self.fail(str(error), param, ctx)

    def parse(self, text: str) -> _Number:
        raise ValueError(text)


class Size(_Quantity[int]):
    """A click type: octets."""

    name = "size"

    def parse(self, text: str) -> int:
        return parse_size(text)


class Seconds(_Quantity[float]):
    """A click type: seconds."""

    name = "time"

    def parse(self, text: str) -> float:
        return math.inf if text == "inf" else parse_seconds(text)
