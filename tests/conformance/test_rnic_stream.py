"""The suite's streams on an RNIC: what is above iWARP is looked at all the same, what is below is left out."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence

import pytest

from kbtp.address import Address
from kbtp.conformance import catalogue
from kbtp.conformance.case import Role
from kbtp.conformance.deviation import Deviation, NotApplicable
from kbtp.conformance.expectations import Expectations
from kbtp.conformance.initiators import initiators_of
from kbtp.conformance.probe import TargetProbe
from kbtp.conformance.result import Outcome, Result
from kbtp.conformance.runner import InitiatorRunner
from kbtp.conformance.setup import Setup, what_streams_have
from kbtp.conformance.startup import Startup
from kbtp.conformance.tcp import Deadline, Tcp
from kbtp.iwarp.rdmap import RdmapOpcode
from kbtp.rnic import open_rnic
from kbtp.rnic.reference import ReferenceRnic
from kbtp.target.session import Session
from kbtp.types import Feature, RequestFlag, Status
from tests.conformance.conftest import cases_named, run_against

RNICS = ("native", "reference")
Serve = Callable[..., str]


def setup_of(rnic_name: str, *more: str) -> frozenset[str]:
    return what_streams_have(open_rnic(rnic_name)) | {"no-keys", *more}


@pytest.mark.parametrize("rnic_name", RNICS)
def test_cases_pass_that_an_rnic_carries(serve: Serve, rnic_name: str) -> None:
    cases = cases_named(
        "hello/ack-makes-sense",
        "hello/hello-too-long",
        "hello/second-hello",
        "blocks/what-was-stored-comes-back",
        "initiator-memory/invalidate",
        "identity/resumed-gets-back-what-it-had",
        "credits/a-credit-is-there-when-its-completion-is",
    )
    results = run_against(serve(), cases, rnic=open_rnic(rnic_name), has=setup_of(rnic_name))
    assert {str(result) for result in results.values()} == {f"{case.name}: passed" for case in cases}


@pytest.mark.parametrize("rnic_name", RNICS)
def test_direct_modes_pass_too(serve: Serve, rnic_name: str) -> None:
    url = serve(pool_blocks=64, direct_blocks=32, direct=Feature.DIRECT_LOAD | Feature.DIRECT_ALLOC)
    cases = cases_named(
        "direct/entry-and-block-are-read", "direct/whole-sequence", "direct/each-stag-has-its-one-right"
    )
    has = setup_of(rnic_name, "direct-load", "direct-alloc")
    results = run_against(url, cases, rnic=open_rnic(rnic_name), has=has)
    assert {str(result) for result in results.values()} == {f"{case.name}: passed" for case in cases}


def test_what_needs_a_peer_by_hand_or_another_binding_is_left_out_with_that_reason(serve: Serve) -> None:
    cases = cases_named("blocks/requests-in-many-segments", "records/errors-have-their-record")
    results = run_against(serve(), cases, rnic=open_rnic("native"), has=setup_of("native"))
    assert "speaks iWARP by hand" in results["blocks/requests-in-many-segments"].reason
    assert "InfiniBand" in results["records/errors-have-their-record"].reason


def test_a_broken_target_is_found(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    honest = Session.complete
    monkeypatch.setattr(
        Session,
        "complete",
        lambda self, task, status, entry, **rest: honest(self, task, Status.NOT_BOUND, entry, **rest),
    )
    cases = cases_named("blocks/what-was-stored-comes-back")
    results = run_against(serve(), cases, rnic=ReferenceRnic(), has=setup_of("reference"))
    assert results["blocks/what-was-stored-comes-back"].outcome is Outcome.FAILED


def test_a_look_below_is_no_finding(serve: Serve) -> None:
    host, _, port = serve().removeprefix("kbtp://").rpartition(":")
    probe = TargetProbe(Setup(has=setup_of("native")), Deadline(5.0), host, int(port), open_rnic("native"))
    stream = probe.stream()
    for look in (
        probe.tcp,
        lambda: stream.tcp,
        lambda: stream.send_ulpdus(b""),
        lambda: stream.await_ulpdu("anything"),
        lambda: probe.stream(Startup.plain()),
    ):
        with pytest.raises(NotApplicable):
            look()
    probe.close()


def test_lent_memory_tells_whether_it_was_written(serve: Serve) -> None:
    host, _, port = serve().removeprefix("kbtp://").rpartition(":")
    probe = TargetProbe(Setup(has=setup_of("native")), Deadline(5.0), host, int(port), open_rnic("native"))
    side = probe.session()
    side.bind(0, b"octets")
    lent = side.stream.memory.lend(6)
    side.expect_status(side.load(side.handle(1), lent), Status.NOT_BOUND)
    assert lent.unwritten
    side.expect_status(side.load(side.handle(0), lent), Status.SUCCESS)
    assert not lent.unwritten
    side.stream.memory.take_back(lent)
    side.send(side.load(side.handle(0), lent, flags=RequestFlag.NONE))
    with pytest.raises(Deviation, match="the end of the stream"):
        side.answer()
    assert not list(side.stream.messages_of(RdmapOpcode.WRITE))
    probe.close()


def test_a_pause_before_the_first_fpdu(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    pauses: list[float] = []
    monkeypatch.setattr(Tcp, "expect_no_octets", lambda self, why, *, for_s: pauses.append(for_s))
    results = run_against(serve(), cases_named("hello/ack-makes-sense"), hello_delay_s=0.25, crc=False)
    assert results["hello/ack-makes-sense"].outcome is Outcome.PASSED
    assert pauses == [0.25]


INITIATORS = (
    "initiator-hello/connection-data-is-there",
    "initiator-hello/reply-without-connection-data",
    "initiator-hello/rejected-connection",
    "initiator-hello/tries-again-without-an-ack",
    "initiator-requests/whole-workload",
    "initiator-requests/write-past-the-buffer",
    "initiator-requests/target-that-vanishes",
)


@pytest.mark.parametrize("rnic_name", RNICS)
def test_an_initiator_connects_to_an_rnic(rnic_name: str) -> None:
    results = run_initiators(INITIATORS, rnic_name)
    assert {str(result) for result in results.values()} == {f"initiator/{name}: passed" for name in INITIATORS}


def test_how_an_initiator_starts_its_stream_is_below_an_rnic() -> None:
    names = ("mpa-startup/request-begins-with-its-key", "mpa-startup/reply-in-any-segmentation")
    results = run_initiators(names, "native")
    assert {result.outcome for result in results.values()} == {Outcome.SKIPPED}


def run_initiators(names: Sequence[str], rnic_name: str) -> dict[str, Result]:
    """The workload over the RNIC in user space, connected to ours."""
    setup = Setup(has=setup_of(rnic_name, "one-by-one"))
    command = f"{sys.executable} -m kbtp.conformance.workload --rnic native"
    runner = InitiatorRunner(
        setup, Expectations(), initiators_of(command, 2), Address("127.0.0.1", 0), rnic=open_rnic(rnic_name)
    )
    every = {case.name.partition("/")[2]: case for case in catalogue.cases(Role.INITIATOR)}
    return {result.case.name.partition("/")[2]: result for result in runner.run([every[name] for name in names])}
