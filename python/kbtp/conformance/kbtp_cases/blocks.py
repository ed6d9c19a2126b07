"""LOAD, STORE, ALLOC_STORE and FREE, as the draft tells them (draft 6)."""

from __future__ import annotations

from kbtp.conformance.case import Group
from kbtp.conformance.deviation import expect
from kbtp.conformance.probe import InitiatorProbe, TargetProbe

GROUP = Group("blocks")


@GROUP.target("KL1")
def load_brings_what_was_stored(probe: TargetProbe) -> None:
    """What was stored inline and by RDMA Read comes back octet for octet."""
    session = probe.session()
    for index, octets in enumerate((b"x", bytes(range(256)) * 64)):
        session.bind(index, octets)
        session.expect_contents(index, octets)


@GROUP.initiator("KL1", needs=("one-by-one",))
def whole_workload(probe: InitiatorProbe) -> None:
    """The whole workload succeeds against a target that keeps to the rules."""
    session = probe.session()
    session.serve()
    expect(probe.work_succeeded(), "that all of its work succeeds", "that some did not")
