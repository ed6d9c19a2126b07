"""Segments and messages as they should be: headers, MSN, MO, TO, L, order (RFC 5041 4 and 5, RFC 5040 4.1)."""

from __future__ import annotations

from collections.abc import Iterator

from kbtp.conformance import segments
from kbtp.conformance.case import Group
from kbtp.conformance.deviation import Deviation, NotApplicable, expect
from kbtp.conformance.iwarp.conversation import (
    HARMLESS,
    completion_of,
    converse,
    initiator_on,
    octets_due,
    open_on,
    pattern,
    session_with,
    stream_on,
    works_on,
)
from kbtp.conformance.iwarp.octets import Segment, segments_of
from kbtp.conformance.probe import InitiatorProbe, Probe, TargetProbe
from kbtp.conformance.session import Session
from kbtp.conformance.stream import Stream
from kbtp.conformance.target_side import TargetSide
from kbtp.iwarp.rdmap import INVALIDATING, QUEUE_OF, RdmapOpcode
from kbtp.types import RequestFlag, Status, TerminateCause
from kbtp.wire import AllocStore, Load

GROUP = Group("ddp-messages", needs=("iwarp",))

SMALL_MSS_BYTES = 88  # so that even a HELLO_ACK takes several segments
BOGUS_STAG = 0x0BADCAFE


def segments_of_a_conversation(probe: Probe) -> list[Segment]:
    session = probe.session()
    converse(session)
    return segments_of(session.stream)


def small_session(probe: Probe) -> Session:
    """A session in which what comes is cut into small segments."""
    if isinstance(probe, TargetProbe):
        return open_on(probe, stream_on(probe.tcp(mss_bytes=SMALL_MSS_BYTES), active=True))
    assert isinstance(probe, InitiatorProbe)
    probe.limit_mss(SMALL_MSS_BYTES)
    return session_with(probe)


def messages_in(segments_in: list[Segment]) -> Iterator[list[Segment]]:
    """The segments of each message, in the order of their ends. Tagged and untagged ones may be open side by side."""
    still_open: dict[bool, list[Segment]] = {True: [], False: []}
    for segment in segments_in:
        still_open[segment.tagged].append(segment)
        if segment.last:
            yield still_open[segment.tagged]
            still_open[segment.tagged] = []


# --- headers ---


@GROUP.either("D1")
def header_that_belongs_to_the_opcode(probe: Probe) -> None:
    """RDMA Writes and Read Responses come tagged, all else untagged on the queue of its opcode."""
    for segment in segments_of_a_conversation(probe):
        opcode = RdmapOpcode(segment.opcode)
        queue = QUEUE_OF[opcode]
        expect(segment.tagged == (queue is None), f"{opcode.name} with the T bit that fits it", segment.ulpdu[:2].hex())
        expect(queue in (None, segment.qn), f"{opcode.name} on queue {queue}", segment.qn)


@GROUP.either("D3", "D4")
def ddp_control_of_all(probe: Probe) -> None:
    """DV is 1 and Rsvd 0 in every segment."""
    for segment in segments_of_a_conversation(probe):
        expect((segment.dv, segment.rsvd) == (1, 0), "DV 1, Rsvd 0", segment.ulpdu[:2].hex())


@GROUP.either("R1")
def rdmap_control_of_all(probe: Probe) -> None:
    """RV is 1 and Rsv 0 in every segment."""
    for segment in segments_of_a_conversation(probe):
        expect((segment.rv, segment.rsv) == (1, 0), "RV 1, Rsv 0", segment.ulpdu[:2].hex())


@GROUP.either("R6")
def invalidate_stag_of_all(probe: Probe) -> None:
    """The Invalidate STag is 0 in all that do not invalidate."""
    for segment in segments_of_a_conversation(probe):
        if not segment.tagged and segment.opcode not in INVALIDATING:
            expect(segment.stag == 0, "an Invalidate STag of 0", f"{segment.stag:#x} in opcode {segment.opcode}")


@GROUP.either("D3", "R1", "R6")
def reserved_fields_of_ours(probe: Probe) -> None:
    """Rsvd, Rsv and the Invalidate STag of ours are ones: none is looked at, all works."""
    stream = probe.stream()
    session: Session
    if isinstance(probe, TargetProbe):
        side = initiator_on(probe, stream)
        stream.send_ulpdus(_all_ones(stream, side.hello_octets()))
        side.take_ack()
        session = side
    else:
        target = TargetSide(stream, probe.key)
        target.take_hello()
        stream.send_ulpdus(_all_ones(stream, target.ack_octets()))
        session = target
    stream.send_ulpdus(segments.tagged(RdmapOpcode.WRITE, BOGUS_STAG, 0, ddp_reserved=0xF, rdmap_reserved=3))
    works_on(session)


def _all_ones(stream: Stream, payload: bytes) -> bytes:
    return segments.untagged(
        RdmapOpcode.SEND, stream.take_msn(), payload, ulp_word=0xFFFF_FFFF, ddp_reserved=0xF, rdmap_reserved=3
    )


# --- numbers ---


@GROUP.either("D6", "D8", "D9")
def msn_of_each_queue(probe: Probe) -> None:
    """On each queue MSN begins with 1 and rises by 1 a message; all segments of a message have the same."""
    session = small_session(probe)
    converse(session)
    due: dict[int, int] = {}
    for message in messages_in(segments_of(session.stream)):
        first = message[0]
        if first.tagged:
            continue
        due[first.qn] = due.get(first.qn, 0) + 1
        for segment in message:
            same = (segment.qn, segment.msn, segment.opcode, segment.stag) == (
                first.qn, due[first.qn], first.opcode, first.stag
            )  # fmt: skip
            expect(same, f"queue {first.qn}, MSN {due[first.qn]}, the same opcode", segment.ulpdu[:18].hex())


@GROUP.either("D2", "D9", "D10", "D13")
def cut_untagged_messages(probe: Probe) -> None:
    """In small segments: MO rises from 0 by what was sent, L is in the last alone, QN, MSN and RsvdULP are the same."""
    session = small_session(probe)
    if isinstance(session, TargetSide):
        inline = session.serve(_is_inline)
        if inline is None:
            raise NotApplicable("a request with inline data, for which an initiator may use a descriptor always")
        session.serve_one(inline)
    works_on(session)
    cut = [one for one in messages_in(segments_of(session.stream)) if not one[0].tagged and len(one) > 1]
    expect(bool(cut), "a message of several segments, as our MSS is small", "none")
    for message in cut:
        at = 0
        for segment in message:
            expect(segment.mo == at, f"MO {at}", segment.mo)
            at += len(segment.payload)


def _is_inline(request: object) -> bool:
    return isinstance(request, AllocStore) and bool(request.flags & RequestFlag.INLINE)


@GROUP.either("D2", "D11")
def cut_tagged_messages(probe: Probe) -> None:
    """In small segments: TO rises by what was sent, STag and opcode are the same, L is set in the last alone."""
    session = small_session(probe)
    converse(session)
    cut = [one for one in messages_in(segments_of(session.stream)) if one[0].tagged and len(one) > 1]
    expect(bool(cut), "a message of several segments, as our MSS is small", "none")
    for message in cut:
        to = message[0].to
        for segment in message:
            same = (segment.stag, segment.opcode, segment.to) == (message[0].stag, message[0].opcode, to)
            expect(same, f"STag {message[0].stag:#x}, TO {to}", segment.ulpdu[:14].hex())
            to += len(segment.payload)


@GROUP.initiator("D14", "R13")
def empty_read_response(probe: InitiatorProbe) -> None:
    """A Read of no octets is answered with one segment, L=1."""
    session = probe.session()
    request = session.request()
    session.stream.read_response(session.stream.request_read(BOGUS_STAG, 0, 0))
    responses = [one for one in messages_in(segments_of(session.stream)) if one[0].opcode == RdmapOpcode.READ_RESPONSE]
    expect([len(one) for one in responses] == [1], "one Read Response of one segment", responses)
    session.serve_one(request)
    works_on(session)


# --- what we send ---


@GROUP.either("D15", "R11", "R10")
def empty_writes(probe: Probe) -> None:
    """More RDMA Writes of no octets to bogus STags than there are receive buffers: nobody looks at them, all works."""
    session = probe.session()
    ulpdus = [segments.write(BOGUS_STAG + n, (1 << 64) - 1 - n) for n in range(100)]
    session.stream.send_ulpdus(*ulpdus, HARMLESS)
    works_on(session)


@GROUP.target("D17")
def hello_in_several_segments(probe: TargetProbe) -> None:
    """HELLO in two segments, in 64, and in one and an empty last one: it is as long as its last segment says."""
    for segment_bytes in (30, 1):
        session = probe.before_hello()
        payload = session.hello_octets()
        session.stream.send_ulpdus(*session.stream.ulpdus_of_send(payload, segment_bytes=segment_bytes))
        expect(session.take_ack().status is Status.SUCCESS, "SUCCESS", session.ack.status.name)
    session = probe.before_hello()
    session.stream.send_ulpdus(*_with_an_empty_last(session.stream, session.hello_octets()))
    expect(session.take_ack().status is Status.SUCCESS, "SUCCESS", session.ack.status.name)


@GROUP.initiator("D17")
def hello_ack_in_several_segments(probe: InitiatorProbe) -> None:
    """HELLO_ACK in segments of one octet and an empty last one, with RDMA Writes between them: all works."""
    session = probe.before_ack()
    ulpdus = session.stream.ulpdus_of_send(session.ack_octets(), segment_bytes=1)
    for ulpdu in ulpdus[:-1]:
        session.stream.send_ulpdus(ulpdu, HARMLESS)
    session.stream.send_ulpdus(ulpdus[-1])
    works_on(session)


def _with_an_empty_last(stream: Stream, payload: bytes) -> list[bytes]:
    msn = stream.take_msn()
    return [segments.send(msn, payload, last=False), segments.send(msn, b"", mo=len(payload))]


@GROUP.target("D18", "R27")
def requests_are_delivered_once_in_order(probe: TargetProbe) -> None:
    """ALLOC_STORE, LOAD, FREE, ALLOC_STORE and LOAD of one handle in one write: each is done once, in that order."""
    session = probe.session()
    handle = session.handle(0)
    old, new = session.stream.memory.lend(5), session.stream.memory.lend(5)
    requests = (
        session.alloc_store_inline(handle, b"older"),
        session.load(handle, old),
        session.free(handle),
        session.alloc_store_inline(handle, b"newer"),
        session.load(handle, new),
    )
    session.send(*requests)
    for request in requests:
        expect(session.answer(request).status is Status.SUCCESS, f"SUCCESS of {type(request).__name__}", "another")
    expect((bytes(old.octets), bytes(new.octets)) == (b"older", b"newer"), "b'older' and b'newer'", (old, new))
    session.release(0)


@GROUP.target("D19")
def segments_in_another_order(probe: TargetProbe) -> None:
    """HELLO with its second half first, whose L is set: it is put together right, or refused with 1/2/04."""
    session = probe.before_hello()
    payload = session.hello_octets()
    first, second = session.stream.ulpdus_of_send(payload, segment_bytes=-(-len(payload) // 2))
    session.stream.send_ulpdus(second, first)
    what = "a HELLO_ACK, or a Terminate 1/2/04"
    message = session.stream.message(what)
    if message is None:
        raise Deviation(what, "the end of the connection")
    if message.opcode is not RdmapOpcode.TERMINATE:
        status = session.ack_in(message).status
        expect(status is Status.SUCCESS, "SUCCESS of a HELLO that was put together right", status.name)
    else:
        info = message.terminate
        expect((info.layer, info.etype, info.code) == TerminateCause.DDP_INVALID_MO.value, "1/2/04", message)


# --- order of what comes ---


@GROUP.target("D16", "R28", "R50")
def data_before_its_completion(probe: TargetProbe) -> None:
    """Of eight LOADs at once each has its octets written before its COMPLETION comes."""
    session = probe.session()
    octets = pattern(min(session.ack.block_size, 50_000))
    session.bind(0, octets)
    lent = [session.stream.memory.lend(len(octets)) for _ in range(8)]
    requests = [session.load(session.handle(0), one) for one in lent]
    session.send(*requests)
    for _ in requests:
        answer = session.answer()
        index = next(at for at, request in enumerate(requests) if request.request_id == answer.completion.request_id)
        expect(bytes(lent[index].octets) == octets, "all octets before the COMPLETION", "other ones")
    session.release(0)


@GROUP.initiator("R28", "R50", needs=("one-by-one",))
def load_is_done_with_its_completion(probe: InitiatorProbe) -> None:
    """The RDMA Writes of a LOAD and its COMPLETION right behind them: the initiator finds all octets in its buffer."""
    session = probe.session()
    while (request := session.serve(Load)) is not None:
        assert isinstance(request, Load)
        octets = octets_due(session, request)
        data = request.data
        ulpdus = session.stream.ulpdus_of_tagged(RdmapOpcode.WRITE, data.stag, data.to, octets, segment_bytes=5000)
        completion = completion_of(session, request)
        session.stream.send_ulpdus(*ulpdus, *session.stream.ulpdus_of_send(completion))
    expect(probe.work_succeeded(), "work that succeeds, as its loads brought what was stored", "work that failed")
