"""What becomes of a case, however it ends; no case takes the run with it."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from kbtp.address import Address
from kbtp.conformance import runner as runner_module
from kbtp.conformance.case import Case, Role
from kbtp.conformance.deviation import Deviation, NotApplicable
from kbtp.conformance.expectations import Expectations
from kbtp.conformance.probe import TargetProbe
from kbtp.conformance.result import Outcome, Result
from kbtp.conformance.rule import Level
from kbtp.conformance.runner import TargetRunner
from kbtp.conformance.setup import Setup
from kbtp.wire import ConnectionData

RULE = "KL1"


def make(
    name: str, function: Callable[[TargetProbe], None], *, level: Level | None = None, needs: tuple[str, ...] = (),
    alone: bool = False, timeout_s: float = 5.0,
) -> Case:  # fmt: skip
    name = f"target/group/{name}"
    return Case(name, Role.TARGET, (RULE,), "A title.", function, frozenset(needs), alone, timeout_s, level)


def holds(_probe: TargetProbe) -> None:
    pass


def deviates(_probe: TargetProbe) -> None:
    raise Deviation("this", "that")


def does_not_apply(_probe: TargetProbe) -> None:
    raise NotApplicable("it has no blocks")


def breaks(_probe: TargetProbe) -> None:
    raise KeyError("a fault of the case")


def takes_too_long(_probe: TargetProbe) -> None:
    raise TimeoutError("timed out")


def cannot_be_parsed(_probe: TargetProbe) -> None:
    ConnectionData.parse(b"HTTP/1.1 400 Bad Request")


@pytest.fixture(autouse=True)
def _soon_alive(monkeypatch: pytest.MonkeyPatch) -> None:
    """Behind each case that failed the runner asks whether the target is there, and `listener` never answers."""
    monkeypatch.setattr(runner_module, "ALIVE_TIMEOUT_S", 0.5)


@pytest.fixture
def listener() -> Iterator[socket.socket]:
    """Accepts connections in the kernel and never says anything."""
    with socket.create_server(("127.0.0.1", 0), backlog=64) as one:
        yield one


def run(
    listener: socket.socket, *cases: Case, expectations: Expectations | None = None, at_once: int = 1
) -> dict[str, Result]:
    address = Address(*listener.getsockname()[:2])
    results = TargetRunner(address, Setup(), expectations or Expectations(), at_once=at_once).run(cases)
    return {result.case.name.rpartition("/")[2]: result for result in results}


def test_each_end_of_a_case_has_its_outcome(listener: socket.socket) -> None:
    expectations = Expectations(
        skip={"target/group/left-out": "it takes a day"},
        fail={"target/group/known": "fixed in 2.1", "target/group/mended": "fixed in 2.1"},
    )
    results = run(
        listener,
        make("holds", holds),
        make("deviates", deviates),
        make("should", deviates, level=Level.SHOULD),
        make("not-there", does_not_apply),
        make("not-configured", deviates, needs=("keys",)),
        make("breaks", breaks),
        make("left-out", deviates),
        make("known", deviates),
        make("mended", holds),
        expectations=expectations,
    )
    assert {name: result.outcome for name, result in results.items()} == {
        "holds": Outcome.PASSED,
        "deviates": Outcome.FAILED,
        "should": Outcome.WARNED,
        "not-there": Outcome.SKIPPED,
        "not-configured": Outcome.SKIPPED,
        "breaks": Outcome.BROKEN,
        "left-out": Outcome.SKIPPED,
        "known": Outcome.EXPECTED,
        "mended": Outcome.UNEXPECTED,
    }
    assert (results["deviates"].expected, results["deviates"].saw) == ("this", "that")
    assert results["not-there"].reason == "it has no blocks"
    assert "not configured for it: the peer has keys" in results["not-configured"].reason
    assert "a fault of the case" in results["breaks"].reason
    failing = {name for name, result in results.items() if result.outcome.fails_the_run}
    assert failing == {"deviates", "breaks", "mended"}


@pytest.mark.parametrize("does", [takes_too_long, cannot_be_parsed])
def test_what_the_peer_does_wrong_is_no_fault_of_the_case(
    listener: socket.socket, does: Callable[[TargetProbe], None]
) -> None:
    result = run(listener, make("one", does))["one"]
    assert result.outcome is Outcome.FAILED
    assert result.expected and result.saw


def test_no_case_waits_beyond_its_time(listener: socket.socket) -> None:
    """A target that accepts and says nothing fails what expects something, within the case's time."""

    def expects_a_reply(probe: TargetProbe) -> None:
        probe.stream()

    result = run(listener, make("silent", expects_a_reply, timeout_s=0.3))["silent"]
    assert result.outcome is Outcome.FAILED
    assert (result.expected, result.saw[:15]) == ("an MPA Reply", "nothing within ")


def test_a_target_that_is_gone_ends_the_run() -> None:
    listener = socket.create_server(("127.0.0.1", 0))

    def kills(probe: TargetProbe) -> None:
        listener.close()
        probe.stream()

    results = run(listener, make("kills", kills), make("after", holds), make("alone", holds, alone=True))
    assert results["kills"].outcome is Outcome.FAILED
    assert results["after"].outcome is results["alone"].outcome is Outcome.NOT_RUN
    assert "gone since target/group/kills" in results["alone"].reason


def test_cases_run_side_by_side_and_those_that_must_be_alone_do_not(listener: socket.socket) -> None:
    both = threading.Barrier(2)
    running: set[str] = set()
    seen_alone: list[set[str]] = []

    def meets(_probe: TargetProbe) -> None:
        running.add("one")
        both.wait(5)
        running.discard("one")

    def alone(_probe: TargetProbe) -> None:
        seen_alone.append(set(running))

    results = run(listener, make("alone", alone, alone=True), make("first", meets), make("second", meets), at_once=2)
    assert {result.outcome for result in results.values()} == {Outcome.PASSED}
    assert seen_alone == [set()]


def test_who_leaves_in_the_middle_waits_for_no_further_case(
    listener: socket.socket, monkeypatch: pytest.MonkeyPatch
) -> None:
    left, ran = threading.Event(), []

    class Threads(ThreadPoolExecutor):
        def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
            super().shutdown(wait=False, cancel_futures=cancel_futures)
            left.set()
            super().shutdown(wait)

    def is_at_work(_probe: TargetProbe) -> None:
        left.wait(5)

    def runs(_probe: TargetProbe) -> None:
        ran.append(True)

    monkeypatch.setattr(runner_module, "ThreadPoolExecutor", Threads)
    address = Address(*listener.getsockname()[:2])
    cases = [make("first", holds), make("at-work", is_at_work), make("never", runs)]
    results = TargetRunner(address, Setup(), Expectations()).run(cases)
    next(results)
    results.close()
    assert not ran


def test_connections_are_closed_behind_a_case(listener: socket.socket) -> None:
    def connects(probe: TargetProbe) -> None:
        probe.tcp()

    run(listener, make("connects", connects))
    accepted, _ = listener.accept()
    with accepted:
        accepted.settimeout(5)
        assert accepted.recv(1) == b""
