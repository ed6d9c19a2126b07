"""The demo as a whole, and what it does when a process fails."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import os
import subprocess
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path

import events
import pytest
import run
from child import Child, DemoFailed, running
from click.testing import CliRunner, Result
from report import Report

import kbtp

REPORT = Report(
    prompt_tokens=18,
    blocks=1,
    octets=368_640,
    prefill_s=1.0,
    store_s=0.001,
    connect_s=0.001,
    load_s=0.001,
    first_token_without_cache_s=1.1,
    first_token_with_cache_s=0.1,
    reference_tokens=[5, 6, 7],
    reference_text=" the old lamp",
    cached_tokens=[5, 6, 7],
    cached_text=" the old lamp",
)


PROMPT = (
    "The keeper of the lighthouse is Marta, the baker is Oskar, the goat is Admiral and the doctor is Imre. "
    "Once more: the keeper of the lighthouse is"
)


@pytest.mark.timeout(180)  # two processes load a model, beside whatever else the machine is doing
def test_three_processes_write_one_text(demo_folder: Path, tmp_path: Path) -> None:
    prompt = tmp_path / "prompt.txt"
    prompt.write_text(PROMPT, encoding="utf-8")
    done = subprocess.run(
        [sys.executable, str(demo_folder / "run.py"), "--json", "--prompt", str(prompt), "--new-tokens", "6"],
        capture_output=True,
        text=True,
        timeout=170,
        check=False,
        env={**os.environ, "PYTHONPATH": str(Path(kbtp.__file__).parents[1])},
    )
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert result["equal"] and len(result["cached_tokens"]) == 6
    assert result["cached_text"].startswith(" Marta"), "which only a cached block can have told the decode process"
    assert (result["blocks"], result["octets"]) == (2, 2 * 368_640)
    assert "prefill: 32 of 32 tokens" in done.stderr


def outcome(monkeypatch: pytest.MonkeyPatch, *options: str, report: Report | DemoFailed) -> Result:
    """What the command does when its processes come to `report`."""

    async def processes(*_: object) -> Report:
        if isinstance(report, DemoFailed):
            raise report
        return report

    monkeypatch.setattr(run, "demo", processes)
    return CliRunner().invoke(run.main, options)


def test_equal_texts_are_shown_with_the_table(monkeypatch: pytest.MonkeyPatch) -> None:
    result = outcome(monkeypatch, report=REPORT)
    assert result.exit_code == 0, result.output
    for shown in ("368,640", "prefill", "store", "load", "without the cache", "yes, token for token"):
        assert shown in result.output
    assert result.output.count("' the old lamp'") == 2


@pytest.mark.parametrize("options", [(), ("--json",)])
def test_texts_that_differ_fail_the_demo_loudly(monkeypatch: pytest.MonkeyPatch, options: tuple[str, ...]) -> None:
    result = outcome(monkeypatch, *options, report=dataclasses.replace(REPORT, cached_tokens=[5, 9, 7]))
    assert result.exit_code == 1
    assert "DEMO FAILED: the texts differ: new token 2 is 9 with the cache and 6 without it" in result.output


def test_a_process_that_fails_fails_the_demo_loudly(monkeypatch: pytest.MonkeyPatch) -> None:
    result = outcome(monkeypatch, report=DemoFailed("the target process ended with exit code 3"))
    assert result.exit_code == 1
    assert "DEMO FAILED: the target process ended with exit code 3" in result.output


def in_child(code: str, meet: Callable[[Child], Awaitable[object]]) -> object:
    """What comes of meeting a child process that runs `code`; the child has ended when this returns or raises."""

    async def met() -> object:
        async with running("prefill", "-c", code, environment={}) as child:
            return await meet(child)

    return asyncio.run(met())


# Says its process id where a target says its address, and stays until it is stopped.
SERVE = "import os, signal; print(f'kbtp://{os.getpid()}', flush=True); signal.pause()"


async def stopped_when_ready(child: Child) -> None:
    await child.hear_url()
    await child.stop()


def test_a_message_comes_through_as_it_was() -> None:
    stored = events.Stored(18, 2**64 - 1, [(2**64 - 1, 65535, 368_640), (0, 1, 0)], [5, 6], 1.5, 0.25)

    async def echoed(child: Child) -> events.Stored:
        await child.tell(stored)
        return await child.hear(events.Stored)

    heard = in_child("print(input())", echoed)
    assert isinstance(heard, events.Stored)
    assert [tuple(block) for block in heard.blocks] == stored.blocks
    assert dataclasses.replace(heard, blocks=[]) == dataclasses.replace(stored, blocks=[])


def test_progress_is_heard_on_the_way_to_another_message() -> None:
    lines = events.to_line(events.Progress(64, 96)) + events.to_line(events.Loaded(0.5, 0.25))
    seen: list[events.Progress] = []
    heard = in_child(f"print({lines!r}, end='')", lambda child: child.hear(events.Loaded, seen.append))
    assert heard == events.Loaded(0.5, 0.25)
    assert seen == [events.Progress(64, 96)]


def test_the_address_is_found_in_the_line_of_kbtp_serve() -> None:
    line = "kbtp: serving kbtp://127.0.0.1:40123 with 64 blocks"
    assert in_child(f"print({line!r})", Child.hear_url) == "kbtp://127.0.0.1:40123"


@pytest.mark.parametrize(
    ("code", "meet", "failure"),
    [
        ("raise SystemExit(3)", Child.hear_url, "ended with exit code 3"),
        ("pass", Child.hear_url, "ended too early"),
        ("print('hello')", Child.hear_url, "gave no address: 'hello'"),
        ("raise SystemExit(4)", Child.end, "ended with exit code 4"),
        (SERVE, stopped_when_ready, "ended with exit code -15"),
        (
            f"print({events.to_line(events.Progress(1, 2))!r})",
            lambda child: child.hear(events.Loaded),
            "where Loaded was expected",
        ),
    ],
)
def test_a_child_that_fails_is_named(code: str, meet: Callable[[Child], Awaitable[object]], failure: str) -> None:
    with pytest.raises(DemoFailed, match=f"the prefill process .*{failure}"):
        in_child(code, meet)


def test_a_child_that_obeys_sigterm_stops_cleanly() -> None:
    obeying = "import signal, sys; signal.signal(signal.SIGTERM, lambda *_: sys.exit(0)); "
    assert in_child(obeying + SERVE, stopped_when_ready) is None


def test_a_child_is_ended_when_the_demo_fails() -> None:
    pids: list[int] = []

    async def fail(child: Child) -> None:
        pids.append(int((await child.hear_url()).removeprefix("kbtp://")))
        raise DemoFailed("of another process")

    with pytest.raises(DemoFailed, match="of another process"):
        in_child(SERVE, fail)
    with pytest.raises(ProcessLookupError):
        os.kill(pids[0], 0)


def test_equal_texts_show_no_difference() -> None:
    assert REPORT.difference == ""
    assert REPORT.as_dict()["equal"] is True


@pytest.mark.parametrize(
    ("cached_tokens", "difference"),
    [
        ([5, 9, 7], "new token 2 is 9 with the cache and 6 without it"),
        ([5, 6], "2 new tokens with the cache and 3 without it"),
    ],
)
def test_different_texts_show_where(cached_tokens: list[int], difference: str) -> None:
    report = dataclasses.replace(REPORT, cached_tokens=cached_tokens)
    assert report.difference == difference
    assert report.as_dict()["equal"] is False
