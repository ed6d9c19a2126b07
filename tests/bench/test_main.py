"""`python -m bench`, on one block size and without peers."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest
from click.testing import CliRunner

from bench import report
from bench.__main__ import main
from bench.ratios import Verdict
from kbtp.testing.bench.figures import ALLOC, LOAD, STORE, Cell, Figures, Spread

SOURCE = Path(__file__).parents[2] / "bench" / "baseline" / "floor.c"


def test_a_whole_comparison(tmp_path: Path) -> None:
    """Short as it is, who holds what is for others to say; that the status follows is not."""
    floor = tmp_path / "floor.so"
    subprocess.run(["cc", "-O2", "-shared", "-fPIC", "-pthread", "-o", floor, SOURCE], check=True)
    figures = tmp_path / "made" / "figures.json"
    options = "--only comparison --block-size 1MiB --no-peers --rounds 2 --seconds 5ms --rnic reference".split()
    done = CliRunner().invoke(main, ["--floor", str(floor), *options, "--json", str(figures)])
    told = json.loads(figures.read_text())
    assert {(row["contender"], row["operation"], row["outstanding"]) for row in told["rows"]} == {
        (f"{who}, {how}", operation, outstanding)
        for who in ("kbtp", "bare sockets")
        for how in ("blocking", "spin 200 us")
        for operation in (LOAD, STORE, ALLOC)
        for outstanding in (1, 32)
        if (who, operation) != ("bare sockets", ALLOC)
    }
    assert all(row["verified"] > 0 and row["p50_us"]["rounds"] == 2 for row in told["rows"])
    assert [demand["name"] for demand in told["demands"]] == [
        "32 loads of 1 MiB, GB/s / bare sockets, both spin",
        "32 stores of 1 MiB, GB/s / bare sockets, both spin",
    ]
    assert done.exit_code == (0 if all(demand["holds"] for demand in told["demands"]) else 1)
    assert [line[:5].strip() in ("ok", "short") for line in done.output.splitlines()[-2:]] == [True, True]
    assert told["machine"]["processors"] > 0


def test_the_report_shows_each_figure_with_its_spread(capsys: pytest.CaptureFixture[str]) -> None:
    rounds = [Figures(10, us, 2 * us, 3 * us, 1.5, 1500.0, None, 10) for us in (9.0, 10.0, 11.0)]
    results = {("kbtp", Cell(LOAD, 4096)): rounds, ("kbtp", Cell(LOAD, 4096, 32)): rounds}
    report.print_report(results, [Verdict("it", Spread(1.0, 0.9, 1.1, 3), 1.05, True)], ["a note [of] it"])
    lines = capsys.readouterr().out.splitlines()
    words = next(line for line in lines if line.startswith("load")).split()
    assert words == "load 4 KiB 1 kbtp 10 ±10% 20 ±10% 30 ±10% 1.5 ±0% 1,500 ±0% -".split()
    assert "a note [of] it" in lines
    assert lines[-1] == "ok     it: 1 x (0.9 to 1.1), wanted at most 1.05 x"
