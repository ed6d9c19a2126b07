"""Child processes of a measurement: what they answer, how they fail, that none is left."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from kbtp.testing.bench.process import BenchFailed, Child, cpu_seconds, environment

ECHO = """
import sys
from kbtp.testing.bench.process import answer_each
def handle(message):
    print("what a library prints")
    if "fail" in message:
        raise eval(message["fail"])
    return message
sys.exit(answer_each(handle))
"""
DEADLINE_S = 20.0


@pytest.fixture
def start() -> Iterator[Callable[[str], Child]]:
    with ExitStack() as stack:

        def start(program: str) -> Child:
            child = Child([sys.executable, "-c", program], env=environment())
            stack.callback(child.stop, ask_first=False)
            return child

        yield start


def state_of(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


def test_it_answers_line_by_line_and_ends_with_its_input(start: Callable[[str], Child]) -> None:
    child = start(ECHO)
    assert child.ask(number=1) == {"number": 1}
    assert child.ask(text="zwölf") == {"text": "zwölf"}
    child.stop()
    assert child.ends_within(0)
    child.stop()
    with pytest.raises(BenchFailed, match="ended with status 0"):
        child.tell(number=2)


def test_what_it_raises_is_said(start: Callable[[str], Child]) -> None:
    child = start(ECHO)
    with pytest.raises(BenchFailed, match="no room"):
        child.ask(fail="OSError('no room')")
    with pytest.raises(BenchFailed, match="ended with status 1"):
        child.answer()


def test_what_it_says_that_is_no_answer_is_told(start: Callable[[str], Child]) -> None:
    with pytest.raises(BenchFailed, match="said b'hello'"):
        start("print('hello')").answer()


def test_silence_has_an_end(start: Callable[[str], Child]) -> None:
    with pytest.raises(BenchFailed, match=r"did not answer within 0\.05 s"):
        start("import sys; sys.stdin.read()").answer(0.05)


def test_a_program_that_is_not_there() -> None:
    with pytest.raises(BenchFailed, match="cannot start nothing-of-that-name"):
        Child(["nothing-of-that-name"])


def test_a_frozen_one_does_nothing_and_can_be_stopped(start: Callable[[str], Child]) -> None:
    child = start("print('{}', flush=True)\nwhile True: pass")
    child.answer()
    child.freeze()
    deadline_s = time.monotonic() + DEADLINE_S
    while state_of(child.pid) != "T":
        assert time.monotonic() < deadline_s
    child.thaw()
    while state_of(child.pid) == "T":
        assert time.monotonic() < deadline_s
    child.freeze()
    child.stop(ask_first=False)
    assert child.ends_within(0)


def test_processor_time_is_counted() -> None:
    before_s = cpu_seconds([os.getpid()])
    deadline_s = time.monotonic() + DEADLINE_S
    while cpu_seconds([os.getpid()]) == before_s:
        assert time.monotonic() < deadline_s
