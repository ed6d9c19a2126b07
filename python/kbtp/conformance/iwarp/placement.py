"""Where octets may be written: STags, their range, their stream, their rights, their life (RFC 5041 7.1 and 8).

A target is written to by Read Responses, into the sinks of its own Reads; an initiator by the RDMA Writes of LOADs.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable

from kbtp.conformance import segments
from kbtp.conformance.case import Group
from kbtp.conformance.deviation import expect
from kbtp.conformance.iwarp.conversation import completion_of, octets_due, pattern, sink_of, works_on
from kbtp.conformance.probe import InitiatorProbe, TargetProbe
from kbtp.conformance.target_side import needs_a_read
from kbtp.iwarp.ddp import TO_MASK
from kbtp.iwarp.rdmap import RdmapOpcode
from kbtp.types import Status
from kbtp.types import TerminateCause as Cause
from kbtp.wire import Load

GROUP = Group("placement", needs=("iwarp",))

SINK_BYTES = 2000
OUTSIDE = (Cause.DDP_BASE_OR_BOUNDS,)
BELOW_ZERO = (Cause.DDP_BASE_OR_BOUNDS, Cause.DDP_TO_WRAP)
WRAPPED = (Cause.DDP_TO_WRAP, Cause.DDP_BASE_OR_BOUNDS)
NO_RIGHT = (Cause.DDP_INVALID_STAG, Cause.DDP_STAG_NOT_ASSOCIATED, Cause.RDMAP_ACCESS_RIGHTS)
FOREIGN = (Cause.DDP_STAG_NOT_ASSOCIATED, Cause.DDP_INVALID_STAG)
GONE = (Cause.DDP_INVALID_STAG,)
NEAR_THE_END = TO_MASK - 3

Causes = tuple[Cause, ...]


# --- the range ---


def response_outside(probe: TargetProbe, offset: int, length: int, causes: Causes) -> None:
    """A Read Response of `length` octets at `offset` of the sink is refused."""
    session = probe.session()
    asked = sink_of(session, SINK_BYTES)
    session.stream.send_ulpdus(segments.read_response(asked.sink_stag, asked.sink_to + offset, pattern(length)))
    session.stream.expect_terminate(*causes)


def write_outside(probe: InitiatorProbe, offset_of: Callable[[Load], int], length: int, causes: Causes) -> None:
    """An RDMA Write of `length` octets outside of the buffer of a LOAD is refused."""
    session = probe.session()
    request = session.serve_until(Load)
    to = request.data.to + offset_of(request)
    session.stream.send_ulpdus(segments.write(request.data.stag, to, pattern(length)))
    session.stream.expect_terminate(*causes)


@GROUP.target("D26", "S3")
def response_before_the_sink(probe: TargetProbe) -> None:
    """A Read Response that begins one octet before its sink: 1/1/01."""
    response_outside(probe, -1, 1, BELOW_ZERO)


@GROUP.target("D26", "S3")
def response_behind_the_sink(probe: TargetProbe) -> None:
    """A Read Response of one octet right behind its sink: 1/1/01."""
    response_outside(probe, SINK_BYTES, 1, OUTSIDE)


@GROUP.target("D26", "S3")
def response_one_octet_too_long(probe: TargetProbe) -> None:
    """A Read Response whose last octet is one behind its sink: 1/1/01."""
    response_outside(probe, 0, SINK_BYTES + 1, OUTSIDE)


@GROUP.target("D28")
def response_that_wraps(probe: TargetProbe) -> None:
    """A Read Response whose octets go on beyond TO 2^64: 1/1/03 or 01."""
    session = probe.session()
    asked = sink_of(session, SINK_BYTES)
    session.stream.send_ulpdus(segments.read_response(asked.sink_stag, NEAR_THE_END, pattern(8)))
    session.stream.expect_terminate(*WRAPPED)


@GROUP.initiator("D26", "S3")
def write_before_the_buffer(probe: InitiatorProbe) -> None:
    """An RDMA Write of one octet right before the buffer of a LOAD: 1/1/01."""
    write_outside(probe, lambda _: -1, 1, BELOW_ZERO)


@GROUP.initiator("D26", "S3")
def write_behind_the_buffer(probe: InitiatorProbe) -> None:
    """An RDMA Write of one octet right behind the buffer of a LOAD: 1/1/01."""
    write_outside(probe, lambda load: load.data.length, 1, OUTSIDE)


@GROUP.initiator("D26", "S3")
def write_across_the_end(probe: InitiatorProbe) -> None:
    """An RDMA Write whose last octet is one behind the buffer of a LOAD: 1/1/01."""
    write_outside(probe, lambda load: load.data.length - 7, 8, OUTSIDE)


@GROUP.initiator("D28")
def write_that_wraps(probe: InitiatorProbe) -> None:
    """An RDMA Write whose octets go on beyond TO 2^64: 1/1/03 or 01."""
    write_outside(probe, lambda load: NEAR_THE_END - load.data.to, 8, WRAPPED)


@GROUP.initiator("D26", "D30")
def write_to_the_very_ends(probe: InitiatorProbe) -> None:
    """RDMA Writes of the first and of the last octet of the buffer, over and over, are taken; then all works."""
    session = probe.session()
    request = session.serve_until(Load)
    octets = octets_due(session, request)
    stag, to, last = request.data.stag, request.data.to, len(octets) - 1
    for _ in range(3):
        session.stream.send_ulpdus(segments.write(stag, to, b"\xff"), segments.write(stag, to + last, b"\xff"))
    session.write(request.data, octets)
    session.stream.send(completion_of(session, request))
    works_on(session)


# --- what follows a refused segment ---


@GROUP.target("D29", "D30", "D31")
def nothing_is_done_behind_a_refused_segment(probe: TargetProbe) -> None:
    """Behind a refused segment come the right Read Response and a request: neither is taken; one Terminate, the end."""
    watcher = probe.session()
    session = probe.session(initiator_id=secrets.token_bytes(16), requested_quota=2, requested_handles=2)
    asked = sink_of(session, SINK_BYTES)
    later = session.alloc_store_inline(session.handle(1), b"later")
    session.stream.send_ulpdus(
        segments.read_response(asked.sink_stag, asked.sink_to + SINK_BYTES, b"x", last=False),
        segments.read_response(asked.sink_stag, asked.sink_to, pattern(SINK_BYTES)),
        *session.stream.ulpdus_of_send(later.pack()),
    )
    session.stream.expect_terminate(*OUTSIDE)
    for index in range(2):
        watcher.expect_status(watcher.load(session.handle(index), None), Status.NOT_BOUND)


@GROUP.initiator("D30", "D31", needs=("one-by-one",))
def no_completion_behind_a_refused_write(probe: InitiatorProbe) -> None:
    """Behind a refused RDMA Write come the right one and the COMPLETION: the work fails; one Terminate, the end."""
    session = probe.session()
    request = session.serve_until(Load)
    octets = octets_due(session, request)
    stag, to = request.data.stag, request.data.to
    session.stream.send_ulpdus(
        segments.write(stag, to + len(octets), b"x"),
        segments.write(stag, to, octets),
        *session.stream.ulpdus_of_send(completion_of(session, request)),
    )
    session.stream.expect_terminate(*OUTSIDE)
    expect(not probe.work_succeeded(), "work that fails", "work that succeeds")


# --- whose STag it is ---


@GROUP.target("D27", "S1", "S2", "S7")
def sink_of_another_stream(probe: TargetProbe) -> None:
    """An RDMA Write to the sink of another stream's Read: 1/1/02 or 00; the other stream goes on, its data is right."""
    victim, intruder = probe.session(), probe.session()
    asked = sink_of(victim, SINK_BYTES)
    intruder.stream.send_ulpdus(segments.write(asked.sink_stag, asked.sink_to, b"intruder"))
    intruder.stream.expect_terminate(*FOREIGN)
    victim.stream.respond_to_read(asked, pattern(SINK_BYTES))
    expect(victim.answer().status is Status.SUCCESS, "SUCCESS", "another status")
    victim.expect_contents(0, pattern(SINK_BYTES))
    victim.release(0)


@GROUP.target("D27", "S2", "R48")
def response_to_a_read_of_another_stream(probe: TargetProbe) -> None:
    """A Read Response to the sink of another stream's Read ends the intruder's stream alone."""
    victim, intruder = probe.session(), probe.session()
    asked = sink_of(victim, SINK_BYTES)
    intruder.stream.send_ulpdus(segments.read_response(asked.sink_stag, asked.sink_to, pattern(SINK_BYTES)))
    intruder.stream.expect_end("the Read is not of this stream")
    victim.stream.respond_to_read(asked, bytes(SINK_BYTES))
    expect(victim.answer().status is Status.SUCCESS, "SUCCESS", "another status")
    victim.expect_contents(0, bytes(SINK_BYTES))
    victim.release(0)


# --- what it may be used for ---


@GROUP.initiator("S4")
def write_to_what_may_be_read(probe: InitiatorProbe) -> None:
    """An RDMA Write to the source of a STORE, which the target may only read: refused."""
    session = probe.session()
    request = session.serve_until(needs_a_read)
    session.stream.send_ulpdus(segments.write(request.data.stag, request.data.to, b"x"))
    session.stream.expect_terminate(*NO_RIGHT)


@GROUP.initiator("R47", "R48")
def response_to_what_may_be_read(probe: InitiatorProbe) -> None:
    """A Read Response that nobody asked for, to the source of a STORE: refused."""
    session = probe.session()
    request = session.serve_until(needs_a_read)
    session.stream.send_ulpdus(segments.read_response(request.data.stag, request.data.to, b"x"))
    session.stream.expect_end("it may not be written")


# --- how long it lives ---


@GROUP.initiator("D32", "S5")
def write_after_the_completion(probe: InitiatorProbe) -> None:
    """An RDMA Write to the buffer of a LOAD after its COMPLETION: 1/1/00."""
    session = probe.session()
    request = session.serve_until(Load)
    session.serve_one(request)
    session.request()  # the next one: the COMPLETION was delivered
    session.stream.send_ulpdus(segments.write(request.data.stag, request.data.to, b"late"))
    session.stream.expect_terminate(*GONE)


@GROUP.initiator("D32", "S5")
def write_that_goes_on_after_the_completion(probe: InitiatorProbe) -> None:
    """An RDMA Write of two segments with the COMPLETION between them: the second is refused, 1/1/00."""
    session = probe.session()
    request = session.serve_until(Load)
    octets = octets_due(session, request)
    stag, to = request.data.stag, request.data.to
    session.write(request.data, octets)
    session.stream.send_ulpdus(
        segments.write(stag, to, octets[:1], last=False),
        *session.stream.ulpdus_of_send(completion_of(session, request)),
    )
    session.request()  # the next one: the COMPLETION was delivered
    session.stream.send_ulpdus(segments.write(stag, to + 1, octets[1:2]))
    session.stream.expect_terminate(*GONE)


@GROUP.initiator("R31", "R35")
def write_after_a_send_with_invalidate(probe: InitiatorProbe) -> None:
    """A COMPLETION that invalidates the STag of its LOAD is delivered; an RDMA Write to it afterwards: 1/1/00."""
    session = probe.session()
    request = session.serve_until_invalidating()
    session.write(request.data, octets_due(session, request))
    session.stream.send(
        completion_of(session, request), opcode=RdmapOpcode.SEND_INVALIDATE, invalidate_stag=request.data.stag
    )
    following = session.request()
    session.stream.send_ulpdus(segments.write(request.data.stag, request.data.to, b"late"))
    end = session.stream.expect_terminate(*GONE)
    expect(following.request_id != request.request_id, "the next request, as the COMPLETION was delivered", end)


@GROUP.target("D32", "S5")
def response_after_the_response(probe: TargetProbe) -> None:
    """A Read Response to a sink whose Read is answered already: nothing is placed, the block stays as it was."""
    watcher = probe.session()
    session = probe.session(initiator_id=secrets.token_bytes(16), requested_quota=1, requested_handles=1)
    asked = sink_of(session, SINK_BYTES)
    session.stream.respond_to_read(asked, pattern(SINK_BYTES))
    expect(session.answer().status is Status.SUCCESS, "SUCCESS", "another status")
    session.stream.send_ulpdus(segments.read_response(asked.sink_stag, asked.sink_to, bytes(SINK_BYTES)))
    session.stream.expect_end("the Read is over")
    came = watcher.fetch(session.handle(0), SINK_BYTES)
    expect(came == pattern(SINK_BYTES), "the octets that were stored", "other ones")
