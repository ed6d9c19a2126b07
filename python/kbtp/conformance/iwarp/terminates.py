"""The Terminate, sent and received, and what follows it (RFC 5040 4.8, 5.4, 6.2 and 7.1)."""

from __future__ import annotations

import secrets

from kbtp.conformance import segments
from kbtp.conformance.case import Group
from kbtp.conformance.deviation import expect
from kbtp.conformance.iwarp.conversation import HARMLESS, pattern, sink_of
from kbtp.conformance.iwarp.octets import Terminate, segments_of, spoilt, terminate_of
from kbtp.conformance.kbtp_cases.identity import reopen
from kbtp.conformance.probe import InitiatorProbe, Probe, TargetProbe
from kbtp.conformance.rule import SHOULD
from kbtp.conformance.session import Session
from kbtp.conformance.stream import Message, Stream
from kbtp.iwarp.rdmap import QN_SEND, RdmapOpcode, ReadRequest
from kbtp.limits import DDP_TAGGED_HEADER_BYTES, DDP_UNTAGGED_HEADER_BYTES
from kbtp.types import TerminateCause as Cause

GROUP = Group("terminates", needs=("iwarp",))

BOGUS_STAG = 0x0BADCAFE
RESERVED_BITS = 0x1FFF


def _ended_with(stream: Stream, ulpdu: bytes, *causes: Cause) -> tuple[Message, Terminate]:
    stream.send_ulpdus(ulpdu)
    message = stream.expect_terminate(*causes)
    return message, terminate_of(message)


def _expect_quotes(terminate: Terminate, ulpdu: bytes, bits: int, header_bytes: int, rdmap_header: bytes) -> None:
    expect(terminate.bits == bits, f"control bits {bits:#06x}", f"{terminate.bits:#06x}")
    expect(terminate.segment_length == len(ulpdu), f"a segment length of {len(ulpdu)}", terminate.segment_length)
    expect(terminate.ddp_header == ulpdu[:header_bytes], ulpdu[:header_bytes].hex(), terminate.ddp_header.hex())
    expect(terminate.rdmap_header == rdmap_header, rdmap_header.hex(), terminate.rdmap_header.hex())
    expect(not terminate.left_over, "nothing behind what is quoted", terminate.left_over.hex())


# --- what is in it ---


@GROUP.either("D34", "R38", "R36")
def tagged_error(probe: Probe) -> None:
    """An RDMA Write to a bogus STag: M and D, the length of the segment, its 14 octets of header, no R."""
    ulpdu = segments.write(BOGUS_STAG, 0x0102_0304_0506_0708, pattern(33))
    _, terminate = _ended_with(probe.session().stream, ulpdu, Cause.DDP_INVALID_STAG)
    _expect_quotes(terminate, ulpdu, Terminate.M | Terminate.D, DDP_TAGGED_HEADER_BYTES, b"")


@GROUP.either("D34", "R38", "R36")
def untagged_error(probe: Probe) -> None:
    """A Send with an MSN that is over: M and D, the length of the segment, its 18 octets of header, no R."""
    ulpdu = segments.send(0, pattern(33))
    _, terminate = _ended_with(probe.session().stream, ulpdu, Cause.DDP_MSN_OUT_OF_RANGE)
    _expect_quotes(terminate, ulpdu, Terminate.M | Terminate.D, DDP_UNTAGGED_HEADER_BYTES, b"")


@GROUP.either("R22", "R38", "R36")
def read_error(probe: Probe) -> None:
    """A Read from a bogus STag: M, D and R, the 18 octets of DDP header and the 28 of the Read Request."""
    request = ReadRequest(0x5111C, 0x1234_5678_9ABC_DEF0, 77, BOGUS_STAG, 0x0FED_CBA9_8765_4321)
    ulpdu = segments.read_request(1, request)
    _, terminate = _ended_with(probe.session().stream, ulpdu, Cause.RDMAP_INVALID_STAG)
    bits = Terminate.M | Terminate.D | Terminate.R
    _expect_quotes(terminate, ulpdu, bits, DDP_UNTAGGED_HEADER_BYTES, request.pack())


@GROUP.either("R39", "R36")
def llp_error(probe: Probe) -> None:
    """A wrong CRC: neither M, D nor R, and no header."""
    stream = probe.session().stream
    stream.send_octets(spoilt(stream.fpdu(HARMLESS)))
    terminate = terminate_of(stream.expect_terminate(Cause.MPA_CRC))
    expect(terminate.bits == 0, "control bits 0", f"{terminate.bits:#06x}")
    expect(not terminate.left_over.strip(b"\0"), "no header", terminate.left_over.hex())


@GROUP.either("R9")
def form(probe: Probe) -> None:
    """A Terminate is one untagged segment: queue 2, MSN 1, MO 0, L=1, Invalidate STag 0."""
    stream = probe.session().stream
    _ended_with(stream, segments.write(BOGUS_STAG, 0, b"x"), Cause.DDP_INVALID_STAG)
    last = segments_of(stream)[-1]
    fields = (last.tagged, last.qn, last.msn, last.mo, last.last, last.stag)
    expect(fields == (False, 2, 1, 0, True, 0), "T=0, QN 2, MSN 1, MO 0, L=1, no STag", last.ulpdu[:18].hex())


# --- which error, and what follows ---


@GROUP.either("R42")
def only_the_first_error(probe: Probe) -> None:
    """Three faults in one TCP segment: the Terminate is about the first."""
    stream = probe.session().stream
    stream.send_ulpdus(
        segments.untagged(RdmapOpcode.SEND, 1, qn=7),
        segments.write(BOGUS_STAG, 0, b"x"),
        segments.untagged(0xF, stream.next_msn[QN_SEND]),
    )
    stream.expect_terminate(Cause.DDP_INVALID_QN)


@GROUP.target("R40", "D31")
def nothing_after_the_terminate(probe: TargetProbe) -> None:
    """A fault behind requests that have much to answer: the Terminate comes, and nothing behind it."""
    session = probe.session()
    session.bind(0, pattern(min(session.ack.block_size, 100_000)))
    lent = session.stream.memory.lend(100_000)
    requests = [session.load(session.handle(0), lent).pack() for _ in range(min(16, session.ack.request_credits))]
    ulpdus = [ulpdu for octets in requests for ulpdu in session.stream.ulpdus_of_send(octets)]
    session.stream.send_ulpdus(*ulpdus, segments.write(BOGUS_STAG, 0, b"x"))
    session.stream.expect_terminate(Cause.DDP_INVALID_STAG)


@GROUP.initiator("R40", "D31")
def nothing_after_the_terminate_of_an_initiator(probe: InitiatorProbe) -> None:
    """A fault while its first request waits: the Terminate comes, and nothing behind it."""
    session = probe.session()
    session.request()
    _ended_with(session.stream, segments.write(BOGUS_STAG, 0, b"x"), Cause.DDP_INVALID_STAG)


# --- received ---


def _terminate_it(stream: Stream, *, bits: int = 0, rest: bytes = b"") -> None:
    stream.send_ulpdus(segments.terminate(*Cause.RDMAP_CATASTROPHIC_STREAM.value, bits=bits, rest=rest))


@GROUP.either("R41")
def terminate_is_not_answered(probe: Probe) -> None:
    """A Terminate of ours: the connection is closed, without a Terminate."""
    stream = probe.session().stream
    _terminate_it(stream)
    message = stream.expect_end("we have sent a Terminate")
    expect(message is None, "the end of the connection without a Terminate", message)


@GROUP.either("R37", "R41")
def reserved_bits_of_a_terminate(probe: Probe) -> None:
    """Reserved bits of a Terminate, and octets that it does not announce, are not looked at."""
    stream = probe.session().stream
    _terminate_it(stream, bits=RESERVED_BITS, rest=bytes(range(40)))
    message = stream.expect_end("we have sent a Terminate")
    expect(message is None, "the end of the connection without a Terminate", message)


@GROUP.either("R37", "R38")
def terminate_that_quotes(probe: Probe) -> None:
    """A Terminate of ours that quotes a Read Request, and one cut short in its quotation, end the stream in order."""
    stream = probe.session().stream
    bits = Terminate.M | Terminate.D | Terminate.R
    quoted = segments.read_request(1, ReadRequest(1, 0, 8, BOGUS_STAG, 0))
    _terminate_it(stream, bits=bits, rest=len(quoted).to_bytes(2, "big") + quoted[:30])
    message = stream.expect_end("we have sent a Terminate")
    expect(message is None, "the end of the connection without a Terminate", message)


@GROUP.target("R44")
def terminate_ends_what_is_outstanding_at_a_target(probe: TargetProbe) -> None:
    """Our Terminate while a STORE waits for its data: the block is free again, the identity has its quota back."""
    identity = secrets.token_bytes(16)
    session = probe.session(initiator_id=identity, requested_quota=1, requested_handles=1)
    sink_of(session, 100)
    _terminate_it(session.stream)
    session.stream.expect_end("we have sent a Terminate")
    again = reopen(probe, initiator_id=identity)
    expect(again.ack.bound_blocks == 0, "no bound block", again.ack.bound_blocks)
    again.bind(0, b"again")
    again.release(0)


@GROUP.initiator("R44", needs=("one-by-one",))
def terminate_ends_what_is_outstanding_at_an_initiator(probe: InitiatorProbe) -> None:
    """Our Terminate instead of a COMPLETION: the work fails at once."""
    session = probe.session()
    session.request()
    _terminate_it(session.stream)
    session.stream.expect_end("we have sent a Terminate")
    expect(not probe.work_succeeded(), "work that fails", "work that succeeds")


@GROUP.either("R41", level=SHOULD)
def fin_right_behind_our_terminate(probe: Probe) -> None:
    """A Terminate of ours and a FIN at once: the other side closes in order, without a RST."""
    stream = probe.session().stream
    _terminate_it(stream)
    stream.tcp.finish()
    stream.expect_end("we have sent a Terminate and closed")
    expect(not stream.tcp.was_reset, "a FIN", "a RST")


# --- Sends of other kinds ---


@GROUP.either("R29")
def send_of_no_octets(probe: Probe) -> None:
    """A Send of no octets is delivered like any other: being no message of KBTP, it ends the session."""
    session: Session = probe.session()
    session.stream.send(b"")
    session.stream.expect_end("a Send of no octets is no message of KBTP (profile 1)")
