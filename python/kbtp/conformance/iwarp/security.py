"""Streams that must not disturb each other, octets that mean nothing, STags that nobody guesses (RFC 5042)."""

from __future__ import annotations

import random
from collections import Counter
from itertools import pairwise

from kbtp.conformance import segments
from kbtp.conformance.case import Group
from kbtp.conformance.deviation import expect
from kbtp.conformance.iwarp.conversation import HARMLESS, as_initiator, completion_of, octets_due, pattern, works_on
from kbtp.conformance.iwarp.mpa_startup import request
from kbtp.conformance.iwarp.octets import spoilt
from kbtp.conformance.probe import InitiatorProbe, Probe, TargetProbe
from kbtp.conformance.target_side import TargetSide
from kbtp.conformance.tcp import Tcp
from kbtp.iwarp.rdmap import RdmapOpcode, ReadRequest
from kbtp.types import RequestFlag, Status
from kbtp.wire import AllocStore, Load, Store

GROUP = Group("security", needs=("iwarp",))

BOGUS_STAG = 0x0BADCAFE
STAGS = 100
STAGS_AT_LEAST = 8
SPREAD = 1 << 28
HALF_OPEN = 50
RANDOM_STREAMS = 24
SEED = 5042


# --- streams beside each other ---


@GROUP.target("S7")
def faults_of_others(probe: TargetProbe) -> None:
    """While other streams end by one fault after the other, a stream stores and loads, octet for octet."""
    session = probe.session()
    for fault in (
        segments.write(BOGUS_STAG, 0, b"x"),
        segments.send(9),
        segments.untagged(0xF, 2),
        segments.read_request(1, ReadRequest(1, 0, 8, BOGUS_STAG, 0)),
        segments.terminate(0, 2, 7),
        b"\x41",
    ):
        other = probe.session()
        session.bind(0, pattern(999))
        other.stream.send_ulpdus(fault)
        session.expect_contents(0, pattern(999))
        other.stream.expect_end("a fault")
        session.release(0)


@GROUP.target("S7")
def others_that_vanish(probe: TargetProbe) -> None:
    """Streams that end by RST in the middle of an FPDU leave another alone."""
    session = probe.session()
    for _ in range(8):
        other = probe.session()
        octets = other.stream.fpdu(segments.send(2, bytes(500)))
        other.stream.send_octets(octets[:100])
        other.stream.tcp.reset()
        session.goes_on()


@GROUP.target("S9")
def others_that_never_say_what_they_want(probe: TargetProbe) -> None:
    """While many connections have sent half a Request, sessions are opened and work."""
    octets = request()
    for _ in range(HALF_OPEN):
        probe.tcp().send(octets[:10])
    probe.session().goes_on()


# --- STags ---


@GROUP.target("S6")
def stags_of_sinks(probe: TargetProbe) -> None:
    """The STags of a hundred sinks: none twice, no fixed step, spread over the 32 bits."""
    session = probe.session()
    for _ in range(STAGS):
        lent = session.stream.memory.lend(pattern(64))
        session.expect_status(session.alloc_store(session.handle(0), lent), Status.SUCCESS)
        session.release(0)
    reads = session.stream.messages_of(RdmapOpcode.READ_REQUEST)
    expect_unpredictable([ReadRequest.parse(message.payload).sink_stag for message in reads])


@GROUP.initiator("S6")
def stags_of_buffers(probe: InitiatorProbe) -> None:
    """The STags of an initiator's buffers: none again that was invalidated, no fixed step, spread over the 32 bits."""
    session = probe.session()
    stags: dict[int, bool] = {}  # whether its last COMPLETION has invalidated it
    while (came := session.serve(_names_memory)) is not None:
        assert isinstance(came, Load | Store | AllocStore)
        stag = came.data.stag
        expect(not stags.get(stag), "no STag again that was invalidated", f"{stag:#010x}")
        stags[stag] = bool(came.flags & RequestFlag.INVALIDATE)
        session.serve_one(came)
    probe.need(len(stags) >= STAGS_AT_LEAST, f"{STAGS_AT_LEAST} different STags, fewer tell nothing")
    expect_unpredictable(list(stags))


def _names_memory(came: object) -> bool:
    return isinstance(came, Load | Store | AllocStore) and not came.flags & RequestFlag.INLINE


def expect_unpredictable(stags: list[int]) -> None:
    """Of `STAGS_AT_LEAST` to `STAGS` numbers drawn at random the spread and the steps are wrong less than once in a
    million runs, and two are the same about as often. Raises `Deviation`."""
    expect(len(set(stags)) == len(stags), "no STag twice", [f"{one:#010x}" for one in stags])
    steps = Counter((later - earlier) & 0xFFFF_FFFF for earlier, later in pairwise(stags))
    step, count = steps.most_common(1)[0]
    expect(count <= 2, "no fixed step from one STag to the next", f"{count} steps of {step:#x}")
    expect(max(stags) - min(stags) >= SPREAD, "STags spread over the 32 bits", [f"{one:#010x}" for one in stags])


# --- octets that mean nothing ---


@GROUP.target("S12", timeout_s=20)
def random_octets(probe: TargetProbe) -> None:
    """Random octets instead of FPDUs, and instead of a Request: those streams end, a stored block is as it was."""
    draw = random.Random(SEED)
    session = probe.session()
    session.bind(0, pattern(4096))
    for _ in range(RANDOM_STREAMS):
        tcp = probe.tcp()
        tcp.send(draw.randbytes(draw.randrange(1, 600)))
        _finished(tcp)
        stream = probe.stream()
        stream.send_octets(draw.randbytes(draw.randrange(1, 600)))
        _finished(stream.tcp)
    session.expect_contents(0, pattern(4096))
    session.release(0)


@GROUP.target("S12", timeout_s=20)
def random_segments(probe: TargetProbe) -> None:
    """Segments with good CRCs and random headers: those streams end or go on, a stored block is as it was."""
    draw = random.Random(SEED)
    session = probe.session()
    session.bind(0, pattern(4096))
    for _ in range(RANDOM_STREAMS):
        stream = probe.session().stream
        stream.send_ulpdus(*(_random_segment(draw) for _ in range(10)))
        _finished(stream.tcp)
    session.expect_contents(0, pattern(4096))
    session.release(0)


@GROUP.target("S12", timeout_s=20)
def random_bits_of_a_request(probe: TargetProbe) -> None:
    """Well-framed requests with one bit flipped behind the headers: a stored block of another is as it was."""
    draw = random.Random(SEED)
    session = probe.session()
    session.bind(0, pattern(4096))
    for _ in range(RANDOM_STREAMS):
        other = probe.session()
        octets = bytearray(other.alloc_store_inline(other.handle(0), pattern(100)).pack())
        octets[draw.randrange(len(octets))] ^= 1 << draw.randrange(8)
        other.stream.send(bytes(octets))
        _finished(other.stream.tcp)
    session.expect_contents(0, pattern(4096))
    session.release(0)


@GROUP.initiator("S12")
def random_octets_for_an_initiator(probe: InitiatorProbe) -> None:
    """Random octets instead of FPDUs: the initiator ends the stream."""
    stream = probe.session().stream
    stream.send_octets(random.Random(SEED).randbytes(2000))
    stream.tcp.finish()
    stream.expect_end("rubbish came")


@GROUP.initiator("S12", needs=("one-by-one",))
def random_segments_for_an_initiator(probe: InitiatorProbe) -> None:
    """RDMA Writes to random STags before the right ones: the stream ends, the work fails, it never succeeds wrongly."""
    session = probe.session()
    came = session.serve_until(Load)
    draw = random.Random(SEED)
    octets = octets_due(session, came)
    session.stream.send_ulpdus(
        *(segments.write(draw.getrandbits(32), draw.getrandbits(64), draw.randbytes(20)) for _ in range(10)),
        segments.write(came.data.stag, came.data.to, octets),
        *session.stream.ulpdus_of_send(completion_of(session, came)),
    )
    session.stream.expect_end("STags that there are not")
    expect(not probe.work_succeeded(), "work that fails", "work that succeeds")


def _random_segment(draw: random.Random) -> bytes:
    payload = draw.randbytes(draw.randrange(0, 80))
    if draw.random() < 0.5:
        return segments.tagged(draw.randrange(16), draw.getrandbits(32), draw.getrandbits(64), payload)
    return segments.untagged(
        draw.randrange(16), draw.randrange(4), payload, qn=draw.randrange(4), mo=draw.choice((0, 9))
    )


def _finished(tcp: Tcp) -> None:
    """We close our half and see the other close, whatever it says before."""
    tcp.finish()
    tcp.expect_close("we have closed")


# --- kinds of Send ---


@GROUP.either("R7", "R35")
def solicited_sends(probe: Probe) -> None:
    """Messages by Send and by Send with Solicited Event in turn, one MSN after the other: all work alike."""
    session = probe.session()
    if isinstance(session, TargetSide):
        while (came := session.serve(Load)) is not None:
            assert isinstance(came, Load)
            session.write(came.data, octets_due(session, came))
            session.stream.send(completion_of(session, came), opcode=RdmapOpcode.SEND_SOLICITED)
        return
    initiator = as_initiator(session)
    for opcode in (RdmapOpcode.SEND_SOLICITED, RdmapOpcode.SEND, RdmapOpcode.SEND_SOLICITED):
        message = initiator.load(initiator.first, None)
        initiator.stream.send(message.pack(), opcode=opcode)
        initiator.answer(message)
    works_on(session)


@GROUP.either("F6", "S12")
def wrong_crc_of_the_first_fpdu(probe: Probe) -> None:
    """The very first FPDU of ours has a wrong CRC: the stream ends."""
    stream = probe.stream()
    stream.send_octets(spoilt(stream.fpdu(HARMLESS)))
    stream.tcp.finish()
    stream.expect_end("the first FPDU has a wrong CRC")
