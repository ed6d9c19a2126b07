"""Initiators in direct mode before a target whose RNIC answers them: what they do wrong is found all the same."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from kbtp.address import Address
from kbtp.conformance import catalogue
from kbtp.conformance.case import Role
from kbtp.conformance.expectations import Expectations
from kbtp.conformance.initiators import initiators_of
from kbtp.conformance.result import Outcome, Result
from kbtp.conformance.runner import InitiatorRunner
from kbtp.conformance.setup import Setup, what_streams_have
from kbtp.rnic import open_rnic

UNSEEN = (
    "whole-workload",
    "bad-entry-not-valid",
    "bad-entry-not-sealed",
    "bad-entry-before-the-pool",
    "bad-entry-behind-the-pool",
    "bad-entry-between-blocks",
    "bad-entry-longer-than-a-block",
    "bad-entry-longer-than-the-buffer",
    "entry-that-never-rests",
    "slot-that-comes-late",
    "ticket-that-ran-out",
    "refused-bind",
    "no-ticket-beyond-the-quota",
)
STEP_BY_STEP = (
    "one-read-after-the-other",
    "entry-changes-under-way-flags",
    "entry-changes-under-way-generation",
    "entry-changes-under-way-length",
    "entry-changes-under-way-block-offset",
    "block-changes-with-its-generation",
    "two-torn-reads-that-agree",
    "too-long-between-the-entry-reads",
    "confirming-read-that-differs",
)

# An initiator of the facade that leaves one rule of the direct modes out.
BROKEN = """
import sys
from kbtp.conformance import workload
from kbtp.initiator import direct_alloc, direct_load, session
from kbtp.initiator.direct import BindTaken, Ended, Wait
from kbtp.initiator.operations import Result, TakenBlock
from kbtp.limits import BLOCK_OFFSET_EMPTY
from kbtp.types import Status
from kbtp.wire.layouts import RING_SLOT, TABLE_ENTRY
{fault}
sys.exit(workload.main())
"""

BELIEVES_ENTRIES = """
def outcome(self, octets):
    flags, generation, length_bytes, block_offset = TABLE_ENTRY.unpack_from(octets)
    return Ended(Result(Status.SUCCESS, self._handle, generation, min(length_bytes, self._buffer_bytes), block_offset))
direct_load.DirectLoad._outcome = outcome
"""
TRIES_FOR_EVER = "direct_load.DIRECT_LOAD_TRIES_MAX = 1 << 60"
BELIEVES_SLOTS = """
def slot_read(self, octets, now_s):
    _, block_offset = RING_SLOT.unpack_from(octets)
    if block_offset != BLOCK_OFFSET_EMPTY:
        return BindTaken(TakenBlock(self._ticket, block_offset))
    return Wait(now_s + 0.001)
direct_alloc.DirectAlloc._slot_read = slot_read
"""
BELIEVES_SEQUENCES = """
def slot_read(self, octets, now_s):
    sequence, _ = RING_SLOT.unpack_from(octets)
    if sequence == self._ticket:
        return BindTaken(TakenBlock(self._ticket, self._terms.ack.pool_base))
    return Wait(now_s + 0.001)
direct_alloc.DirectAlloc._slot_read = slot_read
"""
HAS_NO_CLOCK = "direct_alloc.DirectAlloc.ran_out = lambda self, now_s: False"
COUNTS_NO_QUOTA = "session.InitiatorSession.reserve_block = lambda self: True"


def run(names: Sequence[str], rnic_name: str, command: Sequence[str], *, direct: str = "load,alloc") -> list[Result]:
    """An initiator over the native RNIC, connected to ours."""
    rnic = open_rnic(rnic_name)
    setup = Setup(has=what_streams_have(rnic) | {"no-keys", "one-by-one", "direct", "direct-loads"})
    started = shlex.join([*command, "--rnic", "native", "--direct", direct])
    runner = InitiatorRunner(setup, Expectations(), initiators_of(started, 2), Address("127.0.0.1", 0), rnic=rnic)
    every = {case.name: case for case in catalogue.cases(Role.INITIATOR)}
    cases = [every[f"initiator/initiator-direct/{name}"] for name in names]
    return list(runner.run([replace(case, timeout_s=4.0) for case in cases]))


@pytest.mark.parametrize("rnic_name", ["native", "reference"])
def test_the_workload_passes(rnic_name: str) -> None:
    results = run(UNSEEN, rnic_name, [sys.executable, "-m", "kbtp.conformance.workload"])
    assert {str(result) for result in results} == {f"initiator/initiator-direct/{name}: passed" for name in UNSEEN}


def test_what_has_to_be_answered_step_by_step_is_left_out_with_that_reason() -> None:
    results = run(STEP_BY_STEP, "native", [sys.executable, "-m", "kbtp.conformance.workload"])
    assert len(results) == len(STEP_BY_STEP)
    assert all("speaks iWARP by hand" in result.reason for result in results)
    every = {case.name for case in catalogue.cases(Role.INITIATOR) if "initiator-direct" in case.name}
    told = {f"initiator/initiator-direct/{name}" for name in (*UNSEEN, *STEP_BY_STEP)}
    assert told == every - {"initiator/initiator-direct/no-grant-no-direct-mode"}


@pytest.mark.parametrize(
    ("fault", "caught_by"),
    [
        (BELIEVES_ENTRIES, ("bad-entry-not-valid", "bad-entry-not-sealed", "bad-entry-longer-than-the-buffer")),
        (BELIEVES_ENTRIES, ("bad-entry-before-the-pool", "bad-entry-behind-the-pool", "bad-entry-between-blocks")),
        (BELIEVES_ENTRIES, ("bad-entry-longer-than-a-block",)),
        (TRIES_FOR_EVER, ("entry-that-never-rests", "bad-entry-longer-than-a-block")),
        (BELIEVES_SLOTS, ("slot-that-comes-late",)),
        (BELIEVES_SEQUENCES, ("slot-that-comes-late",)),
        (HAS_NO_CLOCK, ("ticket-that-ran-out",)),
        (COUNTS_NO_QUOTA, ("no-ticket-beyond-the-quota",)),
    ],
    ids=[
        "refused entries", "impossible offsets", "impossible lengths", "tries", "empty", "Sequence", "clock", "quota",
    ],
)  # fmt: skip
def test_a_fault_is_caught(tmp_path: Path, fault: str, caught_by: tuple[str, ...]) -> None:
    file = tmp_path / "initiator.py"
    file.write_text(BROKEN.format(fault=fault))
    results = run(caught_by, "native", [sys.executable, str(file)])
    assert {result.outcome for result in results} == {Outcome.FAILED}, [str(result) for result in results]


def test_an_initiator_that_never_loads_directly_is_found() -> None:
    [result] = run(("whole-workload",), "native", [sys.executable, "-m", "kbtp.conformance.workload"], direct="alloc")
    assert "fewer LOADs" in str(result.expected)
