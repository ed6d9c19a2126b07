"""RDMA Reads, in both directions (RFC 5040 4.4 and 5.2).

A target reads for each STORE, and is read from by initiators that load directly; an initiator is read from.
"""

from __future__ import annotations

from collections.abc import Callable

from kbtp.conformance import segments
from kbtp.conformance.case import Group
from kbtp.conformance.deviation import Deviation, expect
from kbtp.conformance.iwarp.conversation import (
    QUIET_S,
    pattern,
    sink_of,
    works_on,
)
from kbtp.conformance.iwarp.ddp_messages import messages_in
from kbtp.conformance.iwarp.octets import Segment, segments_of
from kbtp.conformance.kbtp_cases.rdma import answer_read, next_read
from kbtp.conformance.probe import InitiatorProbe, Probe, TargetProbe
from kbtp.conformance.session import Session
from kbtp.conformance.startup import Startup
from kbtp.conformance.stream import Stream
from kbtp.conformance.target_side import TargetSide, needs_a_read
from kbtp.iwarp.ddp import TO_MASK
from kbtp.iwarp.rdmap import QN_REQUEST, RdmapOpcode, ReadRequest
from kbtp.limits import READ_REQUEST_BYTES
from kbtp.types import Status
from kbtp.types import TerminateCause as Cause
from kbtp.wire import AllocStore, DataDescriptor, Load, Store

GROUP = Group("reads", needs=("iwarp",))

BOGUS_STAG = 0x0BADCAFE
FLOOD = 300
IRD_EXCEEDED = (Cause.DDP_NO_BUFFER, Cause.RDMAP_CATASTROPHIC_STREAM)
Causes = tuple[Cause, ...]


def read_request(stream: Stream, request: ReadRequest) -> bytes:
    """The ULPDU of `request`, whose response may come."""
    stream.expects_reads_of_ours += 1
    return segments.read_request(stream.take_msn(QN_REQUEST), request)


def source_of(session: TargetSide) -> DataDescriptor:
    """Memory that the initiator lets us read: that of the long block when it is stored."""
    request = session.serve_until(needs_a_read)
    assert isinstance(request, Store | AllocStore)
    return request.data


def answers(session: Session, requests: list[ReadRequest]) -> list[bytes]:
    """Send all `requests` in one write; the octets of each response, checked for its sink."""
    stream = session.stream
    stream.send_ulpdus(*(read_request(stream, request) for request in requests))
    return [stream.read_response(request) for request in requests]


# --- Reads of the target ---


@GROUP.target("R8")
def form_of_a_read_request(probe: TargetProbe) -> None:
    """The Read Request of a STORE: one segment on queue 1, MO 0, L=1, 28 octets that name the source as it was lent."""
    session = probe.session()
    lent = session.stream.memory.lend(pattern(1000), to=0xFEDC_BA98_7654_3210)
    session.send(session.alloc_store(session.handle(0), lent))
    session.stream.message("a Read Request")
    segment = segments_of(session.stream)[-1]
    fields = (segment.opcode, segment.qn, segment.msn, segment.mo, segment.last, segment.stag)
    expect(fields == (RdmapOpcode.READ_REQUEST, 1, 1, 0, True, 0), "queue 1, MSN 1, MO 0, L=1", segment.ulpdu.hex())
    expect(len(segment.payload) == READ_REQUEST_BYTES, "28 octets", segment.payload.hex())
    named = segment.payload[12:16], segment.payload[16:20], segment.payload[20:28]
    due = (1000).to_bytes(4, "big"), lent.stag.to_bytes(4, "big"), lent.to.to_bytes(8, "big")
    expect(named == due, "size, source STag and source TO as lent", segment.payload.hex())


@GROUP.target("R24", "E10")
def no_more_reads_than_our_ird(probe: TargetProbe) -> None:
    """With IRD 1 of ours one Read is outstanding at a time, however many STOREs wait."""
    session = probe.session(Startup.of_depth(1, 1), requested_quota=3)
    session.need_quota(3)
    for index in range(3):
        session.send(session.alloc_store(session.handle(index), session.stream.memory.lend(pattern(500))))
    for _ in range(3):
        read = next_read(session)
        session.stream.expect_silence("one Read is outstanding, our IRD is 1", for_s=QUIET_S)
        answer_read(session, read)
        session.answer()


@GROUP.target("R46", "R13")
def store_is_complete_with_its_last_octet(probe: TargetProbe) -> None:
    """While the last octet of the Read Response is missing no COMPLETION comes; with it the data is there."""
    session = probe.session()
    octets = pattern(3000)
    asked = sink_of(session, len(octets))
    session.stream.send_ulpdus(segments.read_response(asked.sink_stag, asked.sink_to, octets[:-1], last=False))
    session.stream.expect_silence("an octet of the Read Response is missing", for_s=QUIET_S)
    last = len(octets) - 1
    session.stream.send_ulpdus(segments.read_response(asked.sink_stag, asked.sink_to + last, octets[last:]))
    expect(session.answer().status is Status.SUCCESS, "SUCCESS", "another status")
    session.expect_contents(0, octets)
    session.release(0)


@GROUP.target("R13")
def response_that_is_too_short(probe: TargetProbe) -> None:
    """A Read Response whose last segment comes before all octets are there ends the stream: no SUCCESS."""
    session = probe.session()
    asked = sink_of(session, 1000)
    session.stream.send_ulpdus(segments.read_response(asked.sink_stag, asked.sink_to, pattern(999)))
    session.stream.expect_end("the Read Response is an octet short")
    expect(not list(session.stream.messages_of(RdmapOpcode.SEND))[1:], "no COMPLETION", "one")


@GROUP.target("R47", "D25")
def response_to_a_bogus_stag(probe: TargetProbe) -> None:
    """A Read Response, due, to an STag that there is not: 1/1/00."""
    session = probe.session()
    asked = sink_of(session, 100)
    session.stream.send_ulpdus(segments.read_response(asked.sink_stag ^ 0x55, asked.sink_to, pattern(100)))
    session.stream.expect_terminate(Cause.DDP_INVALID_STAG)


# --- Reads of the target's and of the initiator's memory ---


@GROUP.either("R14", "R15", "D14")
def reads_of_no_octets(probe: Probe) -> None:
    """Reads of no octets from bogus STags: an empty Read Response of one segment for each, in order."""
    session = probe.session()
    pending = session.request() if isinstance(session, TargetSide) else None
    requests = [ReadRequest(0xA000 + n, n << 40, 0, BOGUS_STAG + n, TO_MASK) for n in range(4)]
    for request in requests:  # one at a time: IRD may be 1
        expect(answers(session, [request]) == [b""], "no octets", "some")
    responses = [one for one in messages_in(segments_of(session.stream)) if _is_response(one)]
    expect([len(one) for one in responses] == [1] * 4, "one segment each", [len(one) for one in responses])
    if isinstance(session, TargetSide) and pending is not None:
        session.serve_one(pending)
    works_on(session)


def _is_response(message: list[Segment]) -> bool:
    return message[0].opcode == RdmapOpcode.READ_RESPONSE


@GROUP.initiator("R12", "R13", "R15")
def responses_in_order_to_their_sinks(probe: InitiatorProbe) -> None:
    """Reads of several sizes at once: responses in that order, each to STag and TO of its sink, whatever these are."""
    session = probe.session()
    source = source_of(session)
    word = session.stream.request.word
    sizes = (1000, 1, 77, 4096)[: max(1, 1 if word is None else word.ird)]
    requests = [
        ReadRequest(0xFFFF_FFFF - n, TO_MASK - 0xFFFF - n, size, source.stag, source.to + n)
        for n, size in enumerate(sizes)
    ]
    came = answers(session, requests)
    whole = session.read(source)
    due = [whole[n : n + size] for n, size in enumerate(sizes)]
    expect(came == due, "the octets at each offset", "other ones")


@GROUP.initiator("R12")
def sink_to_that_wraps(probe: InitiatorProbe) -> None:
    """A Sink TO is not interpreted: a response whose TO passes 2^64 is sent all the same."""
    session = probe.session()
    source = source_of(session)
    request = ReadRequest(0xFFFF_FFFF, TO_MASK - 3, 8, source.stag, source.to)
    expect(answers(session, [request])[0] == session.read(source, 8), "8 octets", "other ones")


def _refused(probe: InitiatorProbe, change: Callable[[DataDescriptor], ReadRequest], causes: Causes) -> None:
    session = probe.session()
    stream = session.stream
    stream.send_ulpdus(read_request(stream, change(source_of(session))))
    stream.expect_terminate(*causes)


@GROUP.initiator("R19", "S3")
def read_one_octet_before(probe: InitiatorProbe) -> None:
    """A Read of one octet right before the source of a STORE: 0/1/01."""
    below = (Cause.RDMAP_BASE_OR_BOUNDS, Cause.RDMAP_TO_WRAP)
    _refused(probe, lambda data: ReadRequest(1, 0, 1, data.stag, (data.to - 1) & TO_MASK), below)


@GROUP.initiator("R19", "S3")
def read_one_octet_behind(probe: InitiatorProbe) -> None:
    """A Read of one octet right behind the source of a STORE: 0/1/01."""
    _refused(probe, lambda data: ReadRequest(1, 0, 1, data.stag, data.to + data.length), (Cause.RDMAP_BASE_OR_BOUNDS,))


@GROUP.initiator("R19", "S3")
def read_one_octet_too_many(probe: InitiatorProbe) -> None:
    """A Read of one octet more than the source of a STORE has: 0/1/01."""
    _refused(probe, lambda data: ReadRequest(1, 0, data.length + 1, data.stag, data.to), (Cause.RDMAP_BASE_OR_BOUNDS,))


@GROUP.initiator("R16", "R19")
def read_of_more_than_2_to_the_31(probe: InitiatorProbe) -> None:
    """A Read of 2^31 + 8 octets, which as a signed number would be few: 0/1/01."""
    causes = (Cause.RDMAP_BASE_OR_BOUNDS, Cause.RDMAP_TO_WRAP)
    _refused(probe, lambda data: ReadRequest(1, 0, 0x8000_0008, data.stag, data.to), causes)


@GROUP.initiator("R20")
def read_that_wraps(probe: InitiatorProbe) -> None:
    """A Read from TO 2^64 - 4 of 8 octets: 0/1/04 or 01."""
    causes = (Cause.RDMAP_TO_WRAP, Cause.RDMAP_BASE_OR_BOUNDS)
    _refused(probe, lambda data: ReadRequest(1, 0, 8, data.stag, TO_MASK - 3), causes)


@GROUP.initiator("R21", "S4")
def read_of_what_may_be_written(probe: InitiatorProbe) -> None:
    """A Read from the buffer of a LOAD, which the target may only write: 0/1/02."""
    session = probe.session()
    request = session.serve_until(Load)
    stream = session.stream
    stream.send_ulpdus(read_request(stream, ReadRequest(1, 0, 8, request.data.stag, request.data.to)))
    stream.expect_terminate(Cause.RDMAP_ACCESS_RIGHTS)


@GROUP.initiator("S10")
def empty_read_of_what_may_be_written(probe: InitiatorProbe) -> None:
    """A Read of no octets from the buffer of a LOAD is answered, and all works."""
    session = probe.session()
    request = session.serve_until(Load)
    nothing = ReadRequest(1, 0, 0, request.data.stag, request.data.to)
    expect(answers(session, [nothing]) == [b""], "no octets", "some")
    session.serve_one(request)
    works_on(session)


@GROUP.target("S10")
def empty_read_of_a_sink(probe: TargetProbe) -> None:
    """A Read of no octets from the sink of the target's own Read is answered, and the STORE is done."""
    session = probe.session()
    asked = sink_of(session, 100)
    nothing = ReadRequest(1, 0, 0, asked.sink_stag, asked.sink_to)
    expect(answers(session, [nothing]) == [b""], "no octets", "some")
    session.stream.respond_to_read(asked, pattern(100))
    expect(session.answer().status is Status.SUCCESS, "SUCCESS", "another status")
    session.release(0)


@GROUP.target("R18", "R21", "S2", "S4")
def read_from_sinks(probe: TargetProbe) -> None:
    """A Read from a sink of the target, on its own stream and on another: 0/1/00, 02 or 03; nothing is given away."""
    causes = (Cause.RDMAP_ACCESS_RIGHTS, Cause.RDMAP_STAG_NOT_ASSOCIATED, Cause.RDMAP_INVALID_STAG)
    for other_stream in (False, True):
        session = probe.session()
        asked = sink_of(session, 100)
        reader = probe.session() if other_stream else session
        source = ReadRequest(1, 0, 100, asked.sink_stag, asked.sink_to)
        reader.stream.send_ulpdus(read_request(reader.stream, source))
        reader.stream.expect_terminate(*causes)


# --- too many ---


@GROUP.target("D21")
def more_requests_than_buffers(probe: TargetProbe) -> None:
    """One STORE more than there are Request Credits, none of their Reads answered: no buffer is left, 1/2/02."""
    session = probe.session()
    lent = session.stream.memory.lend(pattern(100))
    count = session.ack.request_credits + 1
    session.send(*(session.alloc_store(session.handle(0), lent) for _ in range(count)), beyond_credits=True)
    session.stream.expect_terminate(Cause.DDP_NO_BUFFER)


@GROUP.target("R25", "S8", "S7")
def flood_of_reads_at_a_target(probe: TargetProbe) -> None:
    """A flood of Reads of no octets at once: all are answered, or the stream ends; other streams go on."""
    bystander, session = probe.session(), probe.session()
    _flood(session, ReadRequest(1, 0, 0, 0, 0))
    bystander.goes_on()


@GROUP.initiator("R25", "S8")
def flood_of_reads_at_an_initiator(probe: InitiatorProbe) -> None:
    """A flood of Reads, none of the answers read meanwhile: the stream ends with 1/2/02 or 0/2/07."""
    session = probe.session()
    source = source_of(session)
    stream = session.stream
    request = ReadRequest(1, 0, source.length, source.stag, source.to)
    stream.send_ulpdus(*(read_request(stream, request) for _ in range(FLOOD)))
    stream.expect_terminate(*IRD_EXCEEDED)


def _flood(session: Session, request: ReadRequest) -> None:
    stream = session.stream
    stream.send_ulpdus(*(read_request(stream, request) for _ in range(FLOOD)))
    for _ in range(FLOOD):
        message = stream.message("a Read Response, or the end of the stream")
        if message is None or message.opcode is RdmapOpcode.READ_RESPONSE:
            continue
        info = message.terminate
        code = (info.layer, info.etype, info.code)
        if code not in [cause.value for cause in IRD_EXCEEDED]:
            raise Deviation("a Terminate 1/2/02 or 0/2/07, or all the responses", str(message))
        return
