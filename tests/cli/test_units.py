"""Sizes and times as people write them."""

from __future__ import annotations

import math

import click
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kbtp.cli.units import Seconds, Size, format_size, parse_seconds, parse_size


@pytest.mark.parametrize(
    ("text", "octets"),
    [
        ("0", 0),
        ("65536", 65536),
        ("12B", 12),
        ("64KiB", 65536),
        ("64 KiB", 65536),
        (" 1.5GiB ", 3 << 29),
        ("2MB", 2_000_000),
        ("1kB", 1000),
        ("0.1TB", 100_000_000_000),
        ("3TiB", 3 << 40),
        ("12345678901234567891KiB", 12345678901234567891 * 1024),
    ],
)
def test_sizes(text: str, octets: int) -> None:
    assert parse_size(text) == octets


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("1XB", "unknown unit 'XB'.*KiB"),
        ("1KB", "unknown unit 'KB'"),
        ("1kib", "unknown unit"),
        ("1.1KiB", "not a whole number of octets"),
        ("0.5", "not a whole number"),
        ("-1", "not a size such as 65536, 64KiB or 1.5GiB"),
        ("", "not a size"),
        ("KiB", "not a size"),
        ("1e3", "not a size"),
        ("inf", "not a size"),
    ],
)
def test_what_is_no_size(text: str, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        parse_size(text)


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("0", 0.0),
        ("30", 30.0),
        ("250ms", 0.25),
        ("30s", 30.0),
        ("1.5min", 90.0),
        ("2m", 120.0),
        ("2 h", 7200.0),
        ("1d", 86400.0),
        ("forever", math.inf),
        (" forever ", math.inf),
    ],
)
def test_times(text: str, seconds: float) -> None:
    assert parse_seconds(text) == seconds


@pytest.mark.parametrize(
    ("text", "said"), [("1y", "unknown unit 'y'.*min"), ("-1s", "30s, 5min, 2h or forever"), ("never", "not a time")]
)
def test_what_is_no_time(text: str, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        parse_seconds(text)


@given(st.text(max_size=20) | st.from_regex(r"\s*\d+(\.\d+)?\s*[A-Za-z]{0,3}", fullmatch=True))
def test_nothing_but_a_value_error_is_raised(text: str) -> None:
    for parse in (parse_size, parse_seconds):
        try:
            assert parse(text) >= 0
        except ValueError:
            continue


def test_a_number_of_any_length_is_read() -> None:
    assert parse_size("9" * 400) == int("9" * 400)


@pytest.mark.parametrize(
    ("octets", "text"),
    [
        (0, "0 octets"),
        (1023, "1023 octets"),
        (1024, "1 KiB"),
        (1536, "1.5 KiB"),
        (1 << 20, "1 MiB"),
        (5 << 30, "5 GiB"),
        (3 << 40, "3 TiB"),
        (1234567, "1.177 MiB"),
    ],
)
def test_sizes_are_written_for_people(octets: int, text: str) -> None:
    assert format_size(octets) == text


def test_values_of_a_file_are_numbers_or_text() -> None:
    assert Size().convert(4096, None, None) == 4096
    assert Size().convert("4KiB", None, None) == 4096
    assert Seconds().convert(1.5, None, None) == 1.5
    assert Seconds().convert(math.inf, None, None) == math.inf
    assert Seconds().convert("forever", None, None) == math.inf


@pytest.mark.parametrize("value", [True, None, [1], {}, 1.5, -1, "many"])
def test_anything_else_is_a_bad_parameter(value: object) -> None:
    with pytest.raises(click.BadParameter):
        Size().convert(value, None, None)
    if value != 1.5:
        with pytest.raises(click.BadParameter):
            Seconds().convert(value, None, None)
