"""FPDUs in full operation: length, PAD, CRC, and how TCP cuts them (RFC 5044 3 to 8)."""

from __future__ import annotations

import secrets
from itertools import pairwise

from kbtp.conformance import segments
from kbtp.conformance.case import Group
from kbtp.conformance.deviation import expect
from kbtp.conformance.initiator_side import InitiatorSide
from kbtp.conformance.iwarp.conversation import (
    HARMLESS,
    Trickle,
    completion_of,
    converse,
    octets_due,
    open_on,
    pattern,
    session_with,
    sink_of,
    stream_on,
    works_on,
)
from kbtp.conformance.iwarp.octets import Deframer, expect_good_crcs, fpdus_of, pad_bytes, spoilt
from kbtp.conformance.probe import InitiatorProbe, Probe, TargetProbe
from kbtp.conformance.rule import SHOULD
from kbtp.conformance.stream import Stream
from kbtp.iwarp.crc32c import wire_crc
from kbtp.iwarp.rdmap import RdmapOpcode
from kbtp.limits import DDP_TAGGED_HEADER_BYTES, MULPDU_MIN_BYTES, ULPDU_MAX_BYTES
from kbtp.types import Status, TerminateCause
from kbtp.wire import Load

GROUP = Group("mpa-framing", needs=("iwarp",))

AFTER_THE_ERROR_BYTES = 200_000
LARGEST_PAYLOAD_BYTES = ULPDU_MAX_BYTES - DDP_TAGGED_HEADER_BYTES


# --- what comes ---


@GROUP.either("F1", "F2", "R45")
def messages_of_every_size(probe: Probe) -> None:
    """All that comes are whole FPDUs of one segment each, with as many zero octets of PAD as the length needs."""
    session = probe.session()
    converse(session)
    deframer = Deframer()
    for fpdu in deframer.feed(bytes(session.stream.octets_in)):
        expect(fpdu.pad == bytes(pad_bytes(len(fpdu.ulpdu))), "PAD of zero octets", fpdu.pad.hex())
        expect(fpdu.size % 4 == 0, "an FPDU of whole words", fpdu.size)
    expect(not deframer.left_over, "whole FPDUs and nothing between them", deframer.left_over[:64].hex())


@GROUP.either("F4", "F5")
def crc_of_every_message(probe: Probe) -> None:
    """The CRC of each FPDU is CRC32c over length, ULPDU and PAD, least significant octet first."""
    session = probe.session()
    converse(session)
    expect_good_crcs(session.stream)


@GROUP.either("F9")
def no_markers_unasked(probe: Probe) -> None:
    """Our frame has M=0: what comes has no markers."""
    session = session_with(probe, markers=False)
    converse(session)
    expect_good_crcs(session.stream)


@GROUP.target("F23", "F24", "D12")
def no_segment_beyond_what_tcp_carries(probe: TargetProbe) -> None:
    """A block comes in segments of at most 64768 octets of ULPDU."""
    session = probe.session()
    size = min(session.ack.block_size, 1 << 20)
    session.bind(0, pattern(size))
    session.expect_contents(0, pattern(size))
    session.release(0)
    largest = max(len(fpdu.ulpdu) for fpdu in fpdus_of(session.stream))
    expect(largest <= ULPDU_MAX_BYTES, f"at most {ULPDU_MAX_BYTES} octets in a ULPDU", largest)


@GROUP.target("F23", "F25", "D12")
def segments_fit_the_emss(probe: TargetProbe) -> None:
    """An MSS of 1000 and of 536 of ours: no ULPDU is longer than fits one TCP segment, with markers and without."""
    for mss_bytes in (1000, 536):
        for markers in (False, True):
            overhead_bytes = 6 + mss_bytes % 4 + (4 * -(-mss_bytes // 512) if markers else 0)
            stream = stream_on(probe.tcp(mss_bytes=mss_bytes), active=True, markers=markers)
            _loads_a_block(probe, stream, 5000)
            largest = max(len(fpdu.ulpdu) for fpdu in fpdus_of(stream))
            expect(largest <= mss_bytes - overhead_bytes, f"ULPDUs of {mss_bytes - overhead_bytes} octets", largest)


@GROUP.target("F24")
def smallest_mulpdu(probe: TargetProbe) -> None:
    """With an MSS of 88 of ours MULPDU is 128: no ULPDU is longer, and none but the last of a message much shorter."""
    stream = stream_on(probe.tcp(mss_bytes=88), active=True)
    _loads_a_block(probe, stream, 5000)
    largest = max(len(fpdu.ulpdu) for fpdu in fpdus_of(stream))
    expect(largest <= MULPDU_MIN_BYTES, f"ULPDUs of at most {MULPDU_MIN_BYTES} octets", largest)
    cut = [len(fpdu.ulpdu) for fpdu in fpdus_of(stream) if not fpdu.ulpdu[0] & 0x40]
    smallest_bytes = MULPDU_MIN_BYTES - 7  # whoever keeps to whole 8-octet words sends a little less
    expect(all(size >= smallest_bytes for size in cut), f"{smallest_bytes} octets and more", min(cut, default=0))


def _loads_a_block(probe: TargetProbe, stream: Stream, size: int) -> None:
    session = open_on(probe, stream)
    assert isinstance(session, InitiatorSide)
    octets = pattern(min(size, session.ack.block_size))
    session.bind(0, octets)
    session.expect_contents(0, octets)
    session.release(0)


# --- what we send ---


@GROUP.target("F3")
def pad_that_is_not_zero(probe: TargetProbe) -> None:
    """PAD of ones, which the CRC covers, is taken."""
    session = probe.session()
    for size in (1, 2, 3):
        request = session.alloc_store_inline(session.handle(0), pattern(size))
        (ulpdu,) = session.stream.ulpdus_of_send(request.pack())
        session.stream.send_octets(_with_pad(ulpdu))
        expect(session.answer(request).status is Status.SUCCESS, "SUCCESS", request)
        session.expect_contents(0, pattern(size))
        session.release(0)


@GROUP.initiator("F3")
def pad_that_is_not_zero_in_a_write(probe: InitiatorProbe) -> None:
    """PAD of ones in RDMA Writes, which the CRC covers, is taken."""
    session = probe.session()
    request = session.serve_until(Load)
    octets = octets_due(session, request)
    for at in range(len(octets)):
        ulpdu = segments.write(request.data.stag, request.data.to + at, octets[at : at + 1], last=at == len(octets) - 1)
        session.stream.send_octets(_with_pad(ulpdu))
    session.stream.send(completion_of(session, request))
    works_on(session)


def _with_pad(ulpdu: bytes) -> bytes:
    pad = b"\xff" * pad_bytes(len(ulpdu))
    body = len(ulpdu).to_bytes(2, "big") + ulpdu + pad
    return segments.bare_fpdu(ulpdu, wire_crc(body), pad=pad)


@GROUP.target("F5", "F6")
def one_wrong_bit(probe: TargetProbe) -> None:
    """A bit that was flipped in the header, the payload, PAD or the CRC itself is noticed: 2/0/02."""
    for name, at in (("DDP header", 3), ("payload", 24), ("PAD", -5), ("CRC", -1), ("CRC", -4)):
        session = probe.session()
        request = session.alloc_store_inline(session.handle(0), b"x")
        (ulpdu,) = session.stream.ulpdus_of_send(request.pack())
        fpdu = bytearray(session.stream.fpdu(ulpdu))
        fpdu[at] ^= 0x10
        session.stream.send_octets(bytes(fpdu))
        session.stream.expect_terminate(TerminateCause.MPA_CRC, why=f"a bit of the {name} was flipped")


@GROUP.target("F6", "F7", "D30")
def nothing_is_delivered_after_a_wrong_crc(probe: TargetProbe) -> None:
    """Neither the ALLOC_STORE under a wrong CRC is executed nor the good one behind it; the only answer is 2/0/02."""
    watcher = probe.session()
    session = probe.session(initiator_id=secrets.token_bytes(16), requested_quota=2, requested_handles=2)
    first, second = (session.alloc_store_inline(session.handle(index), b"unseen") for index in range(2))
    spoilt_fpdu = spoilt(session.stream.fpdu(session.stream.ulpdus_of_send(first.pack())[0]))
    good_fpdu = session.stream.fpdu(session.stream.ulpdus_of_send(second.pack())[0])
    session.stream.send_octets(spoilt_fpdu + good_fpdu)
    session.stream.expect_terminate(TerminateCause.MPA_CRC)
    expect(not list(session.stream.messages_of(RdmapOpcode.SEND))[1:], "no COMPLETION", "one")
    for index in range(2):
        watcher.expect_status(watcher.load(session.handle(index), None), Status.NOT_BOUND)


@GROUP.initiator("F6", "F7", needs=("one-by-one",))
def no_completion_is_delivered_after_a_wrong_crc(probe: InitiatorProbe) -> None:
    """A COMPLETION behind an FPDU with a wrong CRC is not delivered: the work fails; the answer is 2/0/02."""
    session = probe.session()
    stream = session.stream
    request = session.request()
    stream.send_octets(spoilt(stream.fpdu(HARMLESS)))
    session.complete(request, generation=2)
    stream.expect_terminate(TerminateCause.MPA_CRC)
    expect(not probe.work_succeeded(), "work that fails", "work that succeeds")


@GROUP.either("F8", "R43")
def terminate_arrives_although_more_is_on_the_way(probe: Probe) -> None:
    """We go on sending behind an FPDU with a wrong CRC: the Terminate arrives whole all the same, and then the FIN."""
    stream = probe.session().stream
    stream.send_octets(spoilt(stream.fpdu(HARMLESS)) + bytes(AFTER_THE_ERROR_BYTES))
    stream.expect_terminate(TerminateCause.MPA_CRC)
    expect(not stream.tcp.was_reset, "a FIN after the Terminate", "a RST")


@GROUP.either("F26", level=SHOULD)
def terminate_although_we_have_finished(probe: Probe) -> None:
    """Our FIN right behind an FPDU with a wrong CRC: the Terminate still comes."""
    stream = probe.session().stream
    stream.send_octets(spoilt(stream.fpdu(HARMLESS)))
    stream.tcp.finish()
    stream.expect_terminate(TerminateCause.MPA_CRC)


@GROUP.either("F26")
def fin_between_messages(probe: Probe) -> None:
    """Our FIN between two messages: the other side closes too, without a Terminate."""
    stream = probe.session().stream
    stream.tcp.finish()
    message = stream.expect_end("we have closed")
    expect(message is None, "the end of the connection without a Terminate", message)


# --- how TCP cuts it ---


@GROUP.target("F20", timeout_s=20)
def hello_cut_at_every_octet(probe: TargetProbe) -> None:
    """HELLO in two TCP segments, cut at each octet in turn: HELLO_ACK comes."""
    at = 1
    while True:
        session = probe.before_hello()
        octets = _hello_fpdu(session)
        if at == len(octets):
            break
        session.stream.tcp.send_in_pieces((octets[:at], octets[at:]))
        expect(session.take_ack().status is Status.SUCCESS, f"SUCCESS with HELLO cut at octet {at}", session.ack)
        session.stream.tcp.close()
        at += 1


def _hello_fpdu(session: InitiatorSide) -> bytes:
    (ulpdu,) = session.stream.ulpdus_of_send(session.hello_octets())
    return session.stream.fpdu(ulpdu)


@GROUP.either("F20", "M16", timeout_s=20)
def all_in_odd_pieces(probe: Probe) -> None:
    """All that we say is cut at odd places, the first octets of each message one a TCP segment: all works."""
    stream = stream_on(Trickle.over(probe.tcp()), active=isinstance(probe, TargetProbe))
    converse(open_on(probe, stream))


@GROUP.target("F21")
def many_fpdus_in_one_segment(probe: TargetProbe) -> None:
    """As many requests as there are credits in one write to the socket: each is answered."""
    session = probe.session()
    requests = [session.load(session.first, None) for _ in range(session.ack.request_credits)]
    session.send(*requests)
    for request in requests:
        session.answer(request)


@GROUP.initiator("F21")
def write_and_completion_in_one_segment(probe: InitiatorProbe) -> None:
    """Small RDMA Writes, and the COMPLETION behind them, in one write to the socket: all is done."""
    session = probe.session()
    request = session.serve_until(Load)
    octets = octets_due(session, request)
    ulpdus = session.stream.ulpdus_of_tagged(
        RdmapOpcode.WRITE, request.data.stag, request.data.to, octets, segment_bytes=7
    )
    session.stream.send_ulpdus(*ulpdus, *session.stream.ulpdus_of_send(completion_of(session, request)))
    works_on(session)


@GROUP.target("F22")
def largest_ulpdu(probe: TargetProbe) -> None:
    """A Read Response of one segment with a ULPDU of 64768 octets is placed."""
    session = probe.session()
    probe.need(session.ack.block_size >= LARGEST_PAYLOAD_BYTES, f"blocks of {LARGEST_PAYLOAD_BYTES} octets")
    octets = pattern(LARGEST_PAYLOAD_BYTES)
    asked = sink_of(session, len(octets))
    session.stream.send_ulpdus(segments.read_response(asked.sink_stag, asked.sink_to, octets))
    expect(session.answer().status is Status.SUCCESS, "SUCCESS", "another status")
    session.expect_contents(0, octets)
    session.release(0)


@GROUP.initiator("F22")
def largest_write(probe: InitiatorProbe) -> None:
    """An RDMA Write with a ULPDU of 64768 octets is placed."""
    session = probe.session()
    request = session.serve_until(_is_long)
    octets = octets_due(session, request)
    cuts = (0, LARGEST_PAYLOAD_BYTES, len(octets))
    for start, end in pairwise(cuts):
        data = request.data
        last = end == len(octets)
        session.stream.send_ulpdus(segments.write(data.stag, data.to + start, octets[start:end], last=last))
    session.stream.send(completion_of(session, request))
    works_on(session)


def _is_long(request: object) -> bool:
    return isinstance(request, Load) and request.data.length > LARGEST_PAYLOAD_BYTES
