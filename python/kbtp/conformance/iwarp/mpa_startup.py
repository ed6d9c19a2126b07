"""MPA start-up: Request and Reply (RFC 5044 7.1)."""

from __future__ import annotations

from kbtp.conformance.case import Group
from kbtp.conformance.deviation import expect
from kbtp.conformance.iwarp.conversation import (
    HARMLESS,
    QUIET_S,
    expect_no_octets,
    octet_by_octet,
    open_on,
    session_with,
    startup_for,
    stream_with,
    works_on,
)
from kbtp.conformance.iwarp.octets import expect_good_crcs, spoilt
from kbtp.conformance.probe import InitiatorProbe, Probe, TargetProbe
from kbtp.conformance.startup import (
    C_BIT,
    R_BIT,
    S_BIT,
    CameFrame,
    Startup,
    accepted,
    connection_data,
    raw_frame,
    receive_frame,
)
from kbtp.conformance.stream import Stream
from kbtp.iwarp.mpa import REPLY_KEY, REQUEST_KEY, EnhancedWord
from kbtp.types import TerminateCause

GROUP = Group("mpa-startup", needs=("iwarp",))

RES_BITS = {1: 0x1F, 2: 0x0F}  # by revision: S is part of Res in RFC 5044
PRIVATE_DATA_MAX_BYTES = 512


def request(**changes: object) -> bytes:
    """A valid Request of revision 1, but for `changes`."""
    return raw_frame(**{"private_data": connection_data(), **changes})  # type: ignore[arg-type]


def reply_to(came: CameFrame, **changes: object) -> bytes:
    """A valid Reply to `came`, but for `changes`; `ulp_data` and `flags_too` are added to what it has."""
    fields: dict[str, object] = {"key": REPLY_KEY, "flags": C_BIT, "revision": 1, "private_data": connection_data()}
    if came.frame.word is not None:
        word = EnhancedWord(came.frame.word.ord_, came.frame.word.ird)
        fields |= {"flags": C_BIT | S_BIT, "revision": 2, "private_data": word.pack() + connection_data()}
    return raw_frame(**{**fields, **changes})  # type: ignore[arg-type]


# --- keys ---


@GROUP.initiator("M1", "M8")
def request_begins_with_its_key(probe: InitiatorProbe) -> None:
    """The first octets of an initiator are a Request with R=0."""
    came = receive_frame(probe.tcp(), reply=False)
    expect(not came.flags & R_BIT, "R=0 in a Request", f"flags {came.flags:#04x}")


@GROUP.target("M2", "M3")
def silence_until_the_request_is_whole(probe: TargetProbe) -> None:
    """A responder is silent on a new connection and after all but one octet of a Request; then it sends its Reply."""
    octets = Startup().frame(reply=False).pack()
    tcp = probe.tcp()
    tcp.expect_silence("no octet of a Request was sent", for_s=QUIET_S)
    tcp.send(octets[:-1])
    tcp.expect_silence("the last octet of the Request is missing", for_s=QUIET_S)
    tcp.send(octets[-1:])
    receive_frame(tcp, reply=True)


@GROUP.target("M4")
def wrong_request_key(probe: TargetProbe) -> None:
    """A key with one wrong octet, whichever: closed without a word."""
    for at in range(len(REQUEST_KEY)):
        key = bytearray(REQUEST_KEY)
        key[at] ^= 0x20
        tcp = probe.tcp()
        tcp.send(request(key=bytes(key)))
        tcp.expect_close(f"octet {at} of the key is wrong", silent=True)


@GROUP.target("M4")
def no_mpa_at_all(probe: TargetProbe) -> None:
    """What another protocol would say instead of a Request: closed without a word."""
    for octets in (b"GET / HTTP/1.1\r\nHost: target\r\n\r\n", bytes(64), b"\xff" * 64, b"\x16\x03\x01\x00\xf8" * 8):
        tcp = probe.tcp()
        tcp.send(octets)
        tcp.expect_close(f"{octets[:16]!r} is no Request", silent=True)


@GROUP.target("M5")
def reply_where_a_request_is_due(probe: TargetProbe) -> None:
    """Two responders: a Reply instead of a Request is closed upon."""
    tcp = probe.tcp()
    tcp.send(request(key=REPLY_KEY))
    tcp.expect_close("a Reply came where a Request was due", silent=True)


@GROUP.initiator("M6")
def request_where_a_reply_is_due(probe: InitiatorProbe) -> None:
    """Two initiators: a Request instead of a Reply is closed upon."""
    tcp = probe.tcp()
    tcp.send(reply_to(receive_frame(tcp, reply=False), key=REQUEST_KEY))
    tcp.expect_close("a Request came where a Reply was due", silent=True)


@GROUP.initiator("M7")
def wrong_reply_key(probe: InitiatorProbe) -> None:
    """A wrong key instead of a Reply is closed upon."""
    tcp = probe.tcp()
    tcp.send(reply_to(receive_frame(tcp, reply=False), key=b"MPA ID Rep Framf"))
    tcp.expect_close("the key of the Reply is wrong", silent=True)


# --- flags and revision ---


@GROUP.target("M8", "M9")
def reserved_bits_of_a_request(probe: TargetProbe) -> None:
    """R and Res of a Request are not looked at, in either revision; Res of the Reply is zero."""
    word = EnhancedWord(4, 4).pack()
    for revision, flags, private_data in ((1, C_BIT, b""), (2, C_BIT | S_BIT, word)):
        tcp = probe.tcp()
        set_too = flags | R_BIT | RES_BITS[revision]
        tcp.send(request(flags=set_too, revision=revision, private_data=private_data + connection_data()))
        came = accepted(receive_frame(tcp, reply=True))
        expect(not came.flags & RES_BITS[came.frame.revision], "Res of the Reply zero", f"flags {came.flags:#04x}")


@GROUP.initiator("M9")
def reserved_bits_of_a_reply(probe: InitiatorProbe) -> None:
    """Res of the Request is zero; that of a Reply is not looked at."""
    tcp = probe.tcp()
    came = receive_frame(tcp, reply=False)
    expect(not came.flags & RES_BITS[came.frame.revision], "Res of the Request zero", f"flags {came.flags:#04x}")
    ours = startup_for(came).frame(reply=True)
    octets = bytearray(ours.pack())
    octets[16] |= RES_BITS[came.frame.revision]
    tcp.send(bytes(octets))
    works_on(open_on(probe, Stream(tcp, came, ours, active=False)))


@GROUP.initiator("M10", "E1", "E24")
def revision_says_what_is_used(probe: InitiatorProbe) -> None:
    """A Request of Rev 1 without S, or of Rev 2 with S and the word of IRD and ORD: RFC 6581 is used for something."""
    came = receive_frame(probe.tcp(), reply=False)
    enhanced = came.frame.word is not None
    expect(came.frame.revision == (2 if enhanced else 1), "Rev 2 if and only if S=1", came.octets[:24].hex())


@GROUP.target("M10", "E6")
def revision_1_is_answered_in_revision_1(probe: TargetProbe) -> None:
    """A Request of Rev 1 gets a Reply of Rev 1 without S, and the session works."""
    stream = probe.stream(Startup.plain())
    plain = stream.reply.revision == 1 and stream.reply.word is None
    expect(plain, "a Reply of Rev 1 with S=0", stream.reply)
    works_on(open_on(probe, stream))


@GROUP.target("M11")
def revision_that_nobody_speaks(probe: TargetProbe) -> None:
    """A Request of Rev 9, or 255, is closed upon."""
    for revision in (9, 255):
        tcp = probe.tcp()
        tcp.send(request(revision=revision))
        tcp.expect_close(f"Rev {revision} cannot be spoken", silent=True)


@GROUP.initiator("M11")
def reply_of_a_revision_that_nobody_speaks(probe: InitiatorProbe) -> None:
    """A Reply of Rev 9 is closed upon."""
    tcp = probe.tcp()
    tcp.send(reply_to(receive_frame(tcp, reply=False), revision=9))
    tcp.expect_close("Rev 9 cannot be spoken", silent=True)


@GROUP.either("M23")
def crc_is_offered(probe: Probe) -> None:
    """C=1 in the frame of the peer, although ours has C=0."""
    stream = stream_with(probe, crc=False)
    theirs = stream.reply if stream.active else stream.request
    expect(theirs.crc, "C=1", theirs)


# --- private data ---


@GROUP.target("M12", "M26", "M21")
def nothing_behind_the_reply(probe: TargetProbe) -> None:
    """The Reply ends after PD_Length octets: no marker and no CRC follow, nor does anything before our first FPDU."""
    probe.stream(Startup(markers=True)).expect_silence("no FPDU was sent yet", for_s=QUIET_S)


@GROUP.initiator("M12", "M26", "M20")
def nothing_behind_the_request(probe: InitiatorProbe) -> None:
    """The Request ends after PD_Length octets: no marker, no CRC and no FPDU follow before the Reply."""
    tcp = probe.tcp()
    receive_frame(tcp, reply=False)
    tcp.expect_silence("no Reply was sent yet", for_s=QUIET_S)


@GROUP.target("M13", "M17")
def private_data_of_any_size(probe: TargetProbe) -> None:
    """24 to 512 octets of private data that begin as KBTP's do: the session works, so the frame was taken exactly."""
    for size in (24, 25, 27, 100, 508, PRIVATE_DATA_MAX_BYTES):
        private_data = connection_data().ljust(size, b"\xa5")
        works_on(open_on(probe, probe.stream(Startup.plain(private_data=private_data))))


@GROUP.target("M13", "M18")
def private_data_that_is_not_kbtp(probe: TargetProbe) -> None:
    """Private data of 0, 1 and 512 octets that says nothing of KBTP: a Reply with R=1, then nothing of MPA."""
    for size in (0, 1, 23, PRIVATE_DATA_MAX_BYTES):
        tcp = probe.tcp()
        tcp.send(request(private_data=bytes(size)))
        came = receive_frame(tcp, reply=True)
        expect(came.frame.rejected, "a Reply with R=1", came.octets.hex())
        expect_no_octets(tcp, "nothing after a Reply with R=1")


@GROUP.initiator("M13", "M17")
def reply_of_any_size(probe: InitiatorProbe) -> None:
    """A Reply with 512 octets of private data is taken exactly: the session works."""
    word_bytes = len(EnhancedWord(0, 0).pack())  # there or not: at most 512 octets in any case
    works_on(session_with(probe, private_data=connection_data().ljust(PRIVATE_DATA_MAX_BYTES - word_bytes, b"\xa5")))


@GROUP.target("M14")
def too_much_private_data(probe: TargetProbe) -> None:
    """A PD_Length of 513, or of 65535: closed upon."""
    for size in (513, 65535):
        tcp = probe.tcp()
        tcp.send(request(private_data=connection_data().ljust(513, b"\0"), length=size))
        tcp.expect_close(f"PD_Length is {size}", silent=True)


@GROUP.initiator("M14")
def reply_with_too_much_private_data(probe: InitiatorProbe) -> None:
    """A Reply with a PD_Length of 513: closed upon."""
    tcp = probe.tcp()
    came = receive_frame(tcp, reply=False)
    tcp.send(reply_to(came, private_data=(EnhancedWord(16, 16).pack() + connection_data()).ljust(513, b"\0")))
    tcp.expect_close("PD_Length is 513", silent=True)


@GROUP.target("M15")
def octets_behind_the_request(probe: TargetProbe) -> None:
    """Octets that come with the Request, before there is a Reply: closed upon."""
    tcp = probe.tcp()
    tcp.send(request() + b"surplus")
    tcp.expect_close("octets came between the Request and its Reply", silent=True)


@GROUP.target("M16")
def request_in_any_segmentation(probe: TargetProbe) -> None:
    """A Request octet by octet, and in two parts split at each octet: the Reply comes."""
    octets = Startup().frame(reply=False).pack()
    works_on(session_with(probe, pieces=octet_by_octet))
    for at in range(1, len(octets)):
        tcp = probe.tcp()
        tcp.send_in_pieces((octets[:at], octets[at:]))
        accepted(receive_frame(tcp, reply=True))


@GROUP.initiator("M16")
def reply_in_any_segmentation(probe: InitiatorProbe) -> None:
    """A Reply octet by octet: the session works."""
    works_on(session_with(probe, pieces=octet_by_octet))


@GROUP.initiator("M19")
def rejected(probe: InitiatorProbe) -> None:
    """After a Reply with R=1 no FPDU comes."""
    tcp = probe.tcp()
    came = receive_frame(tcp, reply=False)
    tcp.send(reply_to(came, flags=C_BIT | R_BIT | (S_BIT if came.frame.word else 0)))
    expect_no_octets(tcp, "no FPDU after a Reply with R=1")


# --- waiting ---


@GROUP.target("M22", "S9")
def request_that_is_never_whole(probe: TargetProbe) -> None:
    """Connections without a Request, and with half of one, are closed without a word, by and by."""
    waiting = [probe.tcp() for _ in range(4)]
    octets = request()
    for tcp, sent_bytes in zip(waiting, (0, 1, 19, len(octets) - 1), strict=True):
        tcp.send(octets[:sent_bytes])
    within_s = probe.wait_s(probe.setup.mpa_timeout_s)
    for tcp in waiting:
        tcp.expect_close("no Request has come for long", silent=True, within_s=within_s)


@GROUP.initiator("M22", timeout_s=15)
def reply_that_never_comes(probe: InitiatorProbe) -> None:
    """An initiator that gets half a Reply gives up and closes."""
    tcp = probe.tcp()
    came = receive_frame(tcp, reply=False)
    tcp.send(reply_to(came)[:19])
    tcp.expect_close("no Reply has come for long", silent=True)


# --- CRC ---


@GROUP.either("M24")
def crc_if_one_side_wants_it(probe: Probe) -> None:
    """Ours says C=0, the peer's C=1: CRCs come, and those we send are checked."""
    stream = stream_with(probe, crc=False)
    probe.need(stream.crc, "it asks for no CRC")
    open_on(probe, stream)
    expect_good_crcs(stream)
    stream.send_octets(spoilt(stream.fpdu(HARMLESS)))
    stream.expect_terminate(TerminateCause.MPA_CRC)


@GROUP.either("M24")
def crc_whatever_the_peer_wants(probe: Probe) -> None:
    """Ours says C=1: CRCs come, and those we send are checked."""
    stream = stream_with(probe)
    open_on(probe, stream)
    expect_good_crcs(stream)
    stream.send_octets(spoilt(stream.fpdu(HARMLESS)))
    stream.expect_terminate(TerminateCause.MPA_CRC)


@GROUP.either("M24", needs=("no-crc",))
def crc_that_we_alone_want(probe: Probe) -> None:
    """Ours says C=1, the peer's C=0: CRCs come, and those we send are checked."""
    stream = stream_with(probe)
    theirs = stream.reply if stream.active else stream.request
    expect(not theirs.crc, "C=0, as --with says", theirs)
    open_on(probe, stream)
    expect_good_crcs(stream)
    stream.send_octets(spoilt(stream.fpdu(HARMLESS)))
    stream.expect_terminate(TerminateCause.MPA_CRC)


@GROUP.either("M25", needs=("no-crc",))
def crc_that_nobody_wants(probe: Probe) -> None:
    """With C=0 on both sides the CRC field is there, and rubbish in it is not looked at."""
    stream = stream_with(probe, crc=False)
    expect(not stream.crc, "C=0 on both sides, as --with says", stream.reply)
    session = open_on(probe, stream)
    stream.send_octets(spoilt(stream.fpdu(HARMLESS)))
    works_on(session)
