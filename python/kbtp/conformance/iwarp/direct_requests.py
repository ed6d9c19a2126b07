"""Reads and Atomics that an initiator requests in direct modes (RFC 5040 4.4 and 6.1, RFC 7306 5.2)."""

from __future__ import annotations

from kbtp.conformance.case import Group
from kbtp.conformance.deviation import expect
from kbtp.conformance.direct_target import DirectTarget, Step
from kbtp.conformance.iwarp.octets import Segment, segments_of
from kbtp.conformance.probe import InitiatorProbe
from kbtp.conformance.startup import READ_DEPTH, Startup
from kbtp.conformance.stream import Stream
from kbtp.iwarp.rdmap import AtomicOperation, RdmapOpcode
from kbtp.limits import ATOMIC_REQUEST_BYTES, READ_REQUEST_BYTES

GROUP = Group("direct-requests", needs=("iwarp",))

NEEDS = ("direct",)
HELD_S = 0.05
HELD_READS = 6
M64 = (1 << 64) - 1


def requests_of_the_workload(probe: InitiatorProbe, opcode: RdmapOpcode) -> list[Segment]:
    """The segments of `opcode` that come while all of the workload is served."""
    target = DirectTarget(Stream.respond(probe.tcp()), probe.key).open()
    target.run()
    found = [segment for segment in segments_of(target.stream) if segment.opcode == opcode]
    expect(bool(found), f"a {opcode.name} in the workload", "none")
    return found


def _on_queue_1(segment: Segment) -> bool:
    return (segment.tagged, segment.qn, segment.mo, segment.last, segment.stag) == (False, 1, 0, True, 0)


@GROUP.initiator("R8", needs=NEEDS)
def form_of_read_requests(probe: InitiatorProbe) -> None:
    """Read Requests are one segment each: queue 1, MO 0, L=1, Invalidate STag 0, 28 octets."""
    for segment in requests_of_the_workload(probe, RdmapOpcode.READ_REQUEST):
        expect(_on_queue_1(segment), "queue 1, MO 0, L=1, no STag", segment.ulpdu[:18].hex())
        expect(len(segment.payload) == READ_REQUEST_BYTES, "28 octets", segment.payload.hex())


@GROUP.initiator("X1", "X2", "X3", "X6", needs=NEEDS)
def form_of_atomic_requests(probe: InitiatorProbe) -> None:
    """Atomic Requests have 52 octets on queue 1; FetchAdd has reserved bits and Compare Data 0, Compare Mask ones."""
    for segment in requests_of_the_workload(probe, RdmapOpcode.ATOMIC_REQUEST):
        payload = segment.payload
        expect(_on_queue_1(segment), "queue 1, MO 0, L=1, no STag", segment.ulpdu[:18].hex())
        expect(len(payload) == ATOMIC_REQUEST_BYTES, "52 octets", payload.hex())
        expect(
            payload[:4] == AtomicOperation.FETCH_ADD.to_bytes(4, "big"), "FetchAdd, reserved zero", payload[:4].hex()
        )
        compare = int.from_bytes(payload[36:44], "big"), int.from_bytes(payload[44:52], "big")
        expect(compare == (0, M64), "Compare Data 0, Compare Mask of ones", payload[36:].hex())


@GROUP.initiator("R24", "E10", "R46", needs=NEEDS)
def no_more_reads_than_our_ird(probe: InitiatorProbe) -> None:
    """IRD 1 in our Reply: while a Read is not answered no other request comes."""
    target = DirectTarget(Stream.respond(probe.tcp(), Startup.of_depth(1, READ_DEPTH)), probe.key).open()
    held: list[Step] = []

    def hold(step: Step) -> None:
        if len(held) < HELD_READS:
            target.stream.expect_silence(f"the Read of the {step.what} is outstanding, our IRD is 1", for_s=HELD_S)
        held.append(step)

    target.before_read = hold
    target.run_until("a Read that others wait behind", lambda _: len(held) >= HELD_READS)


@GROUP.initiator("R24", "E10", needs=NEEDS)
def no_reads_without_ird(probe: InitiatorProbe) -> None:
    """IRD 0 in our Reply, and yet both direct modes granted: what comes first is no Read and no Atomic."""
    target = DirectTarget(Stream.respond(probe.tcp(), Startup.of_depth(0, READ_DEPTH)), probe.key).open()
    first = target.stream.message("a request, a Terminate, or the end of the connection")
    came = None if first is None else first.opcode
    expect(came not in (RdmapOpcode.READ_REQUEST, RdmapOpcode.ATOMIC_REQUEST), "no Read and no Atomic", first)


@GROUP.initiator("X30", "R46", needs=NEEDS)
def atomic_is_complete_with_its_response(probe: InitiatorProbe) -> None:
    """While a FetchAdd is not answered the ring is not read: the initiator does not know its ticket."""
    target = DirectTarget(Stream.respond(probe.tcp()), probe.key).open()
    target.before_atomic = lambda: target.stream.expect_silence("the FetchAdd is not answered", for_s=HELD_S)
    target.run_until("a FetchAdd", lambda came: isinstance(came, Step) and came.what == "ticket")
