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
from child import Child, DemoFailed, Serving, running
from click.testing import CliRunner, Result
from report import Report, SharedPrefix

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

ANSWERED = events.Answered(
    prompt_token_count=90,
    cached_token_count=64,
    stored_token_count=0,
    loaded_bytes=4 * 368_640,
    look_up_s=0.002,
    load_s=0.003,
    compute_s=0.25,
    store_s=0.001,
    tokens=[7, 8, 9],
    text=" five rooms",
)
SHARED = SharedPrefix(
    ("How many rooms?", "How much is a night?"),
    first=dataclasses.replace(ANSWERED, cached_token_count=0, stored_token_count=64, text=" other"),
    second=ANSWERED,
    compared=dataclasses.replace(ANSWERED, cached_token_count=0, compute_s=1.5),
)

PROMPT = (
    "The keeper of the lighthouse is Marta, the baker is Oskar, the goat is Admiral and the doctor is Imre. "
    "Once more: the keeper of the lighthouse is"
)


DOCUMENT = (
    "The guest house of the lighthouse has five rooms. The blue room looks to the north, and the green room is the "
    "warmest. The price of a night is thirty crowns. The goat is called Admiral and has eaten two hats. "
)


@pytest.mark.timeout(180)  # four processes load a model, beside whatever else the machine is doing
def test_the_processes_of_both_parts_write_one_text(demo_folder: Path, tmp_path: Path) -> None:
    prompt, document = tmp_path / "prompt.txt", tmp_path / "document.txt"
    prompt.write_text(PROMPT, encoding="utf-8")
    document.write_text(DOCUMENT, encoding="utf-8")
    files = ["--prompt", str(prompt), "--document", str(document)]
    done = subprocess.run(
        [sys.executable, str(demo_folder / "run.py"), "--json", *files, "--new-tokens", "6"],
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

    shared = result["shared_prefix"]
    first, second, compared = shared["first"], shared["second"], shared["second_without_cache"]
    assert shared["equal"] and len(second["tokens"]) == 6
    assert (first["cached_token_count"], first["stored_token_count"]) == (0, 64)
    assert (second["cached_token_count"], second["loaded_bytes"]) == (64, 4 * 368_640)
    assert compared["cached_token_count"] == compared["look_up_s"] == compared["load_s"] == 0
    assert second["tokens"] == compared["tokens"] and second["text"] == compared["text"]


def outcome(
    monkeypatch: pytest.MonkeyPatch, *options: str, report: Report | DemoFailed = REPORT, shared: SharedPrefix = SHARED
) -> Result:
    """What the command does when its processes come to `report` and `shared`."""

    async def first_part(*_: object) -> Report:
        if isinstance(report, DemoFailed):
            raise report
        return report

    async def second_part(*_: object) -> SharedPrefix:
        return shared

    monkeypatch.setattr(run, "hand_over", first_part)
    monkeypatch.setattr(run, "share", second_part)
    return CliRunner().invoke(run.main, options)


def test_equal_texts_are_shown_with_the_tables(monkeypatch: pytest.MonkeyPatch) -> None:
    result = outcome(monkeypatch)
    assert result.exit_code == 0, result.output
    for shown in ("368,640", "prefill", "store", "load", "without the cache", "put into the cache"):
        assert shown in result.output
    assert result.output.count("yes, token for token") == 2
    assert result.output.count("' the old lamp'") == result.output.count("' five rooms'") == 2
    assert "255.0 ms with the prefix from the cache, 1,505.0 ms without" in result.output


def test_all_of_it_is_one_json_object(monkeypatch: pytest.MonkeyPatch) -> None:
    result = outcome(monkeypatch, "--json")
    assert result.exit_code == 0, result.output
    said = json.loads(result.stdout)
    assert said["equal"] and said["shared_prefix"]["equal"]
    assert said["shared_prefix"]["second"]["first_token_s"] == pytest.approx(0.255)
    assert said["shared_prefix"]["questions"] == list(SHARED.questions)


@pytest.mark.parametrize("options", [(), ("--json",)])
@pytest.mark.parametrize(
    ("of", "fields", "failure"),
    [
        ("second", {"tokens": [7, 8, 6]}, "the answers differ: new token 3 is 6 with the cache and 9 without it"),
        ("second", {"tokens": [7]}, "the answers differ: 1 new tokens with the cache and 3 without it"),
        ("second", {"cached_token_count": 0}, "the second request has found no prefix in the cache"),
        ("first", {"stored_token_count": 0}, "the first request has put nothing into the cache"),
    ],
)
def test_a_prefix_that_is_not_shared_fails_the_demo_loudly(
    monkeypatch: pytest.MonkeyPatch, options: tuple[str, ...], of: str, fields: dict[str, object], failure: str
) -> None:
    changed = dataclasses.replace(getattr(SHARED, of), **fields)
    result = outcome(monkeypatch, *options, shared=dataclasses.replace(SHARED, **{of: changed}))
    assert result.exit_code == 1
    assert f"DEMO FAILED: {failure}" in result.output
    assert ("NO" in result.stdout) == ("differ" in failure and not options)


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
SERVE = "import json, os, signal; print(json.dumps({'url': str(os.getpid())}), flush=True); signal.pause()"


async def stopped_when_ready(child: Child) -> None:
    await child.hear_serving()
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


@pytest.mark.parametrize("index_url", ["", "valkey://127.0.0.1:40124"])
def test_the_addresses_are_found_in_the_line_of_kbtp_serve(index_url: str) -> None:
    line = json.dumps({"url": "kbtp://127.0.0.1:40123", **({"index": index_url} if index_url else {})})
    assert in_child(f"print({line!r})", Child.hear_serving) == Serving("kbtp://127.0.0.1:40123", index_url)


@pytest.mark.parametrize(
    ("code", "meet", "failure"),
    [
        ("raise SystemExit(3)", Child.hear_serving, "ended with exit code 3"),
        ("pass", Child.hear_serving, "ended too early"),
        ("print('hello')", Child.hear_serving, "gave no address: 'hello'"),
        ("print('[]')", Child.hear_serving, r"gave no address: '\[\]'"),
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
        pids.append(int((await child.hear_serving()).url))
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
