"""Markers (RFC 5044 4.2 and 4.3), in both directions."""

from __future__ import annotations

from collections.abc import Callable

from kbtp.conformance.case import Group
from kbtp.conformance.deviation import expect
from kbtp.conformance.initiator_side import InitiatorSide
from kbtp.conformance.iwarp.conversation import (
    as_initiator,
    converse,
    initiator_on,
    open_on,
    pattern,
    session_with,
    stream_with,
)
from kbtp.conformance.iwarp.octets import (
    MARKER_EVERY_BYTES,
    Fpdu,
    Framer,
    Marker,
    MarkerChange,
    expect_good_crcs,
    fpdus_of,
    laid_out,
)
from kbtp.conformance.probe import Probe, TargetProbe
from kbtp.conformance.session import Session
from kbtp.conformance.target_side import TargetSide, needs_a_read
from kbtp.iwarp.rdmap import RdmapOpcode
from kbtp.limits import COMPLETION_BYTES, DDP_TAGGED_HEADER_BYTES, DDP_UNTAGGED_HEADER_BYTES
from kbtp.types import TerminateCause

GROUP = Group("mpa-markers", needs=("iwarp",))

COMPLETION_ULPDU_BYTES = DDP_UNTAGGED_HEADER_BYTES + COMPLETION_BYTES


def marked_conversation(probe: Probe) -> list[Fpdu]:
    """What comes in a conversation in which we have asked for markers."""
    session = session_with(probe, markers=True)
    converse(session)
    return fpdus_of(session.stream)


def markers_of(fpdus: list[Fpdu]) -> list[Marker]:
    return [marker for fpdu in fpdus for marker in fpdu.markers]


# --- what comes ---


@GROUP.either("F9", "F10", "F11")
def marker_at_every_512th_octet(probe: Probe) -> None:
    """Our frame has M=1: four zero octets come first, then a marker at each 512th octet; CRCs and lengths fit."""
    session = session_with(probe, markers=True)
    converse(session)
    stream = session.stream
    expect(stream.octets_in[:4] == bytes(4), "four zero octets first", stream.octets_in[:4].hex())
    expect_good_crcs(stream)
    fpdus = fpdus_of(stream)
    came_bytes = sum(fpdu.size for fpdu in fpdus)
    expect(came_bytes == len(stream.octets_in), "whole FPDUs", f"{len(stream.octets_in) - came_bytes} octets more")
    due = list(range(0, came_bytes, MARKER_EVERY_BYTES))
    expect([one.position for one in markers_of(fpdus)] == due, f"{len(due)} markers", len(markers_of(fpdus)))


@GROUP.either("F12")
def reserved_of_markers(probe: Probe) -> None:
    """RESERVED of each marker is zero."""
    for marker in markers_of(marked_conversation(probe)):
        expect(marker.reserved == 0, "RESERVED of zero", f"{marker.reserved:#06x} at octet {marker.position}")


@GROUP.either("F13", "F14")
def pointers_of_markers(probe: Probe) -> None:
    """FPDUPTR of each marker is its distance to the length field of its FPDU, also of several in one FPDU."""
    fpdus = marked_conversation(probe)
    for marker in markers_of(fpdus):
        where = f"the marker at octet {marker.position}"
        expect(marker.pointer == marker.distance, f"FPDUPTR {marker.distance} in {where}", marker.pointer)
        expect(marker.pointer % 4 == 0, f"FPDUPTR of whole words in {where}", marker.pointer)
    expect(any(len(fpdu.markers) > 1 for fpdu in fpdus), "an FPDU with several markers", "none")


@GROUP.either("F15")
def marker_between_fpdus(probe: Probe) -> None:
    """An FPDU that would begin at a 512th octet has a marker before it, of FPDUPTR 0, in its own CRC."""
    session = session_with(probe, markers=True)
    _make_one_message(session, lambda position, ulpdu: laid_out(position, ulpdu)[0] % MARKER_EVERY_BYTES == 0)
    led = [fpdu for fpdu in fpdus_of(session.stream)[1:] if fpdu.markers and fpdu.markers[0].distance == 0]
    expect(bool(led), "an FPDU behind a marker", "none")
    for fpdu in led:
        expect(fpdu.markers[0].pointer == 0, "FPDUPTR 0 between FPDUs", fpdu.markers[0].pointer)
        expect(fpdu.crc == fpdu.crc_due, "a CRC that covers it", fpdu.crc.hex())


@GROUP.either("F16")
def marker_before_the_crc(probe: Probe) -> None:
    """A marker between PAD and CRC points back like any other, and the CRC behind it covers it."""
    session = session_with(probe, markers=True)
    _make_one_message(session, lambda position, ulpdu: laid_out(position, ulpdu)[1])
    found = [fpdu for fpdu in fpdus_of(session.stream) if fpdu.marker_before_crc]
    expect(bool(found), "an FPDU with a marker before its CRC", "none")
    for fpdu in found:
        last = fpdu.markers[-1]
        expect(last.pointer == last.distance, f"FPDUPTR {last.distance}", last.pointer)
        expect(fpdu.crc == fpdu.crc_due, "a CRC that covers it", fpdu.crc.hex())


@GROUP.either("F18")
def markers_one_way(probe: Probe) -> None:
    """Markers for us and none for the peer, if it wants none: each direction by itself."""
    stream = stream_with(probe, markers=True)
    theirs = stream.reply if stream.active else stream.request
    probe.need(not theirs.markers, "it wants markers too")
    converse(open_on(probe, stream))
    expect_good_crcs(stream)


def _make_one_message(session: Session, fits: Callable[[int, int], bool]) -> None:
    """Have the peer send a tagged message of one segment whose place and length `fits` is content with, and another."""
    if isinstance(session, TargetSide):
        request = session.serve_until(needs_a_read)
        session.read(request.data, _fitting(_position_of(session), fits))
        session.read(request.data, 8)
        return
    initiator = as_initiator(session)
    behind_completion, _ = laid_out(_position_of(session), COMPLETION_ULPDU_BYTES)  # of the ALLOC_STORE
    octets = pattern(_fitting(behind_completion, fits))
    initiator.bind(0, octets)
    initiator.expect_contents(0, octets)
    initiator.release(0)


def _position_of(session: Session) -> int:
    return sum(fpdu.size for fpdu in fpdus_of(session.stream))


def _fitting(position: int, fits: Callable[[int, int], bool]) -> int:
    sizes = range(4, 2 * MARKER_EVERY_BYTES)
    return next(size for size in sizes if fits(position, DDP_TAGGED_HEADER_BYTES + size))


# --- what we send, where the peer asks for markers ---


def _first_message(probe: Probe, change: MarkerChange) -> Session:
    """HELLO or HELLO_ACK in the first FPDU of our half, its markers changed; nothing more is sent on that stream."""
    stream = probe.stream()
    theirs = stream.reply if stream.active else stream.request
    expect(theirs.markers, "M=1, as --with says", theirs)
    session: InitiatorSide | TargetSide
    if isinstance(probe, TargetProbe):
        session = initiator_on(probe, stream)
        octets = session.hello_octets()
    else:
        session = TargetSide(stream, probe.key)
        session.take_hello()
        octets = session.ack_octets()
    (ulpdu,) = stream.ulpdus_of_send(octets)
    stream.send_octets(Framer(crc=stream.crc, markers=True).fpdu(ulpdu, marker=change))
    return session


@GROUP.either("F9", "F18", needs=("markers",))
def markers_both_ways(probe: Probe) -> None:
    """Markers in both directions: messages of many sizes, each direction counted by itself."""
    converse(session_with(probe, markers=True))


@GROUP.either("F9", "F11", needs=("markers",))
def markers_for_the_peer_alone(probe: Probe) -> None:
    """The peer wants markers, we want none: it finds its way through ours, and sends none."""
    session = session_with(probe, markers=False)
    converse(session)
    expect_good_crcs(session.stream)


@GROUP.either("F12", "F17", needs=("markers",))
def bits_of_markers_that_nobody_looks_at(probe: Probe) -> None:
    """RESERVED and the low 2 bits of FPDUPTR may be anything."""
    session = _first_message(probe, lambda _, pointer: (0xABCD, pointer | 3))
    session.stream.next_send("what answers our first message")


@GROUP.either("F19", needs=("markers",))
def pointer_that_is_wrong(probe: Probe) -> None:
    """An FPDUPTR that does not fit, under a good CRC: 2/0/03, or all works as if nobody had looked."""
    stream = _first_message(probe, lambda _, pointer: (0, pointer + 64)).stream
    message = stream.message("a Terminate 2/0/03, or what answers our first message")
    expect(message is not None, "a Terminate 2/0/03, or an answer", "the end of the connection")
    assert message is not None
    if message.opcode is RdmapOpcode.TERMINATE:
        info = message.terminate
        expect((info.layer, info.etype, info.code) == TerminateCause.MPA_MARKER_MISMATCH.value, "2/0/03", message)
