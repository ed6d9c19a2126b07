"""`make bench-cache`: it runs, says a line a requirement, and its status is what they say."""

from __future__ import annotations

from pathlib import Path

from click.testing import CliRunner

from bench.cache.__main__ import main

TRACE = Path(__file__).parents[1] / "cache" / "mooncake_cut.jsonl"


def test_each_requirement_is_a_line() -> None:
    quick = ["--only", "traces", "--only", "behaviour", "--kills", "2", "--writers", "2", "--writers-for", "1s"]
    result = CliRunner().invoke(main, [*quick, str(TRACE)])
    assert (result.exit_code, result.stdout.count("ok     ")) == (0, 8), result.output
    assert "short" not in result.stdout


def test_speed_is_compared_with_the_session_below() -> None:
    result = CliRunner().invoke(main, ["--only", "speed", "--block-size", "1MiB", "--rounds", "1", "--seconds", "20ms"])
    assert result.exit_code in (0, 1), result.output
    assert "32 of 1 MiB, get_into / LOAD, GB/s" in result.stdout
    assert "kbtp.Cache: load, 1 of 1 MiB: p50" in result.stdout


def test_what_was_not_shown_does_not_hold() -> None:
    result = CliRunner().invoke(main, ["--only", "traces"])
    assert (result.exit_code, result.stdout) == (1, "short  traces: none was given, so nothing was shown\n")
