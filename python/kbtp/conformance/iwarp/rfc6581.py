"""Enhanced start-up: read depths and RTR (RFC 6581)."""

from __future__ import annotations

from kbtp.conformance import segments
from kbtp.conformance.case import Group
from kbtp.conformance.deviation import expect
from kbtp.conformance.iwarp.conversation import (
    QUIET_S,
    open_on,
    session_with,
    startup_for,
    stream_with,
    works_on,
)
from kbtp.conformance.iwarp.mpa_startup import reply_to, request
from kbtp.conformance.iwarp.octets import segments_of
from kbtp.conformance.kbtp_cases.rdma import answer_read, next_read
from kbtp.conformance.probe import InitiatorProbe, TargetProbe
from kbtp.conformance.rule import SHOULD
from kbtp.conformance.startup import (
    C_BIT,
    S_BIT,
    CameFrame,
    Startup,
    accepted,
    connection_data,
    receive_frame,
)
from kbtp.conformance.stream import Message, Stream
from kbtp.conformance.tcp import Tcp
from kbtp.iwarp.mpa import ALL_RTR_KINDS, EnhancedWord, RtrKind
from kbtp.iwarp.rdmap import QN_REQUEST, QN_SEND, RdmapOpcode, ReadRequest
from kbtp.limits import IRD_ORD_ULP_MANAGED, MPA_FRAME_BYTES
from kbtp.types import TerminateCause

GROUP = Group("rfc6581", needs=("iwarp",))

ULP_PRIVATE_DATA_MAX_BYTES = 508
BOGUS_STAG = 0x0BADCAFE
RTR_OPCODES = {
    RtrKind.SEND: RdmapOpcode.SEND,
    RtrKind.WRITE: RdmapOpcode.WRITE,
    RtrKind.READ: RdmapOpcode.READ_REQUEST,
}
NO_OCTETS = ReadRequest(0x5111C, 0, 0, BOGUS_STAG, 0)


def word_of(came: CameFrame) -> EnhancedWord:
    """The word of IRD and ORD, which has to be there."""
    expect(came.frame.word is not None, "a frame with S=1 and the word of IRD and ORD", came.octets[:24].hex())
    assert came.frame.word is not None
    return came.frame.word


def reply_for(probe: TargetProbe, word: EnhancedWord) -> EnhancedWord:
    """The word that answers `word`."""
    tcp = probe.tcp()
    tcp.send(Startup(word=word).frame(reply=False).pack())
    return word_of(accepted(receive_frame(tcp, reply=True)))


# --- form ---


@GROUP.target("E1", "E2", "E5", "E4")
def enhanced_request_gets_an_enhanced_reply(probe: TargetProbe) -> None:
    """S=1 with 508 octets of private data: the Reply has Rev 2 and S=1, PD_Length counts its word, and all works."""
    private_data = connection_data().ljust(ULP_PRIVATE_DATA_MAX_BYTES, b"\0")
    stream = stream_with(probe, private_data=private_data)
    expect(stream.reply.revision >= 2, "Rev 2", stream.reply)
    expect(stream.reply.word is not None, "S=1", stream.reply)
    expect(len(stream.reply.private_data) <= ULP_PRIVATE_DATA_MAX_BYTES, "at most 508 octets", stream.reply)
    works_on(open_on(probe, stream))


@GROUP.initiator("E1", "E2", "E4")
def enhanced_request(probe: InitiatorProbe) -> None:
    """S=1 comes with Rev 2 or more, a word, and at most 508 octets of private data behind it."""
    came = receive_frame(probe.tcp(), reply=False)
    probe.need(bool(came.flags & S_BIT) or came.frame.revision > 1, "it uses nothing of RFC 6581")
    expect(came.frame.revision >= 2, "Rev 2 with S=1", came.octets[:24].hex())
    word_of(came)
    expect(len(came.private_data) <= ULP_PRIVATE_DATA_MAX_BYTES, "at most 508 octets", len(came.private_data))


@GROUP.target("E3")
def no_room_for_the_word(probe: TargetProbe) -> None:
    """S=1 with a PD_Length of 0 to 3 is malformed: closed upon."""
    for size in range(4):
        tcp = probe.tcp()
        tcp.send(request(flags=C_BIT | S_BIT, revision=2, private_data=bytes(size)))
        tcp.expect_close(f"S=1 but PD_Length {size}", silent=True)


@GROUP.initiator("E3")
def no_room_for_the_word_of_the_reply(probe: InitiatorProbe) -> None:
    """A Reply with S=1 and a PD_Length of 3 is malformed: closed upon."""
    tcp = probe.tcp()
    came = receive_frame(tcp, reply=False)
    tcp.send(reply_to(came, flags=C_BIT | S_BIT, revision=2, private_data=bytes(3)))
    tcp.expect_close("S=1 but PD_Length 3", silent=True)


@GROUP.target("E5")
def plain_request_of_revision_2(probe: TargetProbe) -> None:
    """Rev 2 with S=0 gets a Reply with S=0."""
    tcp = probe.tcp()
    tcp.send(request(revision=2))
    came = accepted(receive_frame(tcp, reply=True))
    expect(not came.flags & S_BIT, "S=0", f"flags {came.flags:#04x}")


@GROUP.initiator("E5", level=SHOULD)
def plain_reply_to_an_enhanced_request(probe: InitiatorProbe) -> None:
    """A Reply with S=0 to a Request with S=1 is closed upon."""
    tcp = probe.tcp()
    came = receive_frame(tcp, reply=False)
    probe.need(came.frame.word is not None, "its Request is a plain one")
    tcp.send(Startup.plain().frame(reply=True).pack())
    tcp.expect_close("the Reply has no word", silent=True)


@GROUP.target("E7")
def revision_2_is_understood_or_refused(probe: TargetProbe) -> None:
    """Rev 2 with S=1: a Reply of Rev 2, or the connection is closed; never a Reply of Rev 1."""
    tcp = probe.tcp()
    tcp.send(Startup().frame(reply=False).pack())
    what = "a Reply, or the end of the connection"
    octets = tcp.receive_some(what)
    if octets:
        octets += tcp.receive(max(0, MPA_FRAME_BYTES - len(octets)), what)
        expect(octets[17] >= 2, "Rev 2 in the Reply", octets.hex())


@GROUP.initiator("E8", level=SHOULD)
def comes_again_with_a_good_request(probe: InitiatorProbe) -> None:
    """An initiator whose Request was closed upon need not come again; if it does, its Request is a good one."""
    tcp = probe.tcp()
    receive_frame(tcp, reply=False)
    tcp.close()
    again = probe.next_tcp_or_none(within_s=1.0)
    if again is not None:
        receive_frame(again, reply=False)


# --- IRD and ORD ---


@GROUP.target("E9")
def ord_of_the_reply(probe: TargetProbe) -> None:
    """With IRD 0, 1 and 3 of ours the Reply's ORD is no more."""
    for ird in (0, 1, 3):
        word = reply_for(probe, EnhancedWord(ird, 1))
        expect(word.ord_ <= ird, f"ORD of at most {ird}", word)


@GROUP.target("E10")
def ird_of_the_reply(probe: TargetProbe) -> None:
    """With ORD 0 and 1 of ours the Reply's IRD is no less."""
    for ord_ in (0, 1):
        word = reply_for(probe, EnhancedWord(4, ord_))
        expect(word.ird >= ord_, f"IRD of at least {ord_}", word)


@GROUP.initiator("E11")
def reply_wants_more_reads_than_it_can_serve(probe: InitiatorProbe) -> None:
    """ORD of the Reply is beyond IRD of the Request: 2/0/06, or the stream goes on with more IRD."""
    tcp = probe.tcp()
    came = receive_frame(tcp, reply=False)
    probe.need(came.frame.word is not None, "its Request is a plain one")
    reply = startup_for(came, word=EnhancedWord(16, word_of(came).ird + 1)).frame(reply=True)
    tcp.send(reply.pack())
    stream = Stream(tcp, came, reply, active=False)
    first = stream.message("a Terminate 2/0/06, or HELLO")
    expect(first is not None, "a Terminate 2/0/06, or HELLO", "the end of the connection")
    assert first is not None
    if first.opcode is RdmapOpcode.TERMINATE:
        info = first.terminate
        expect((info.layer, info.etype, info.code) == TerminateCause.MPA_INSUFFICIENT_IRD.value, "2/0/06", first)
        stream.expect_close("after its Terminate")


@GROUP.target("E12")
def ird_of_nothing(probe: TargetProbe) -> None:
    """IRD 0 of ours: the session works without RDMA Reads, or R=1 names the ORD that the target needs."""
    tcp = probe.tcp()
    ours = Startup.of_depth(0, 0).frame(reply=False)
    tcp.send(ours.pack())
    came = receive_frame(tcp, reply=True)
    if came.frame.rejected:
        expect(word_of(came).ord_ > 0, "the ORD that it needs", came.octets.hex())
    else:
        works_on(open_on(probe, Stream(tcp, ours, came, active=True)))


@GROUP.target("E13")
def depths_left_to_the_ulp(probe: TargetProbe) -> None:
    """0x3FFF is answered crosswise: ORD with IRD, IRD with ORD."""
    word = reply_for(probe, EnhancedWord(4, IRD_ORD_ULP_MANAGED))
    expect(word.ird == IRD_ORD_ULP_MANAGED, "IRD 0x3FFF for ORD 0x3FFF", word)
    word = reply_for(probe, EnhancedWord(IRD_ORD_ULP_MANAGED, 1))
    expect(word.ord_ == IRD_ORD_ULP_MANAGED, "ORD 0x3FFF for IRD 0x3FFF", word)
    works_on(session_with(probe, word=EnhancedWord(IRD_ORD_ULP_MANAGED, IRD_ORD_ULP_MANAGED)))


@GROUP.initiator("E13", level=SHOULD)
def depths_left_to_the_ulp_by_the_reply(probe: InitiatorProbe) -> None:
    """0x3FFF in both depths of the Reply leaves those of the initiator alone."""
    works_on(session_with(probe, word=EnhancedWord(IRD_ORD_ULP_MANAGED, IRD_ORD_ULP_MANAGED)))


@GROUP.target("E20")
def the_ulp_knows_our_ird(probe: TargetProbe) -> None:
    """With IRD 2 of ours and three STOREs under way, two Read Requests come and the third waits for an answer."""
    session = probe.session(Startup.of_depth(2, 1), requested_quota=3)
    session.need_quota(3)
    lent = [session.stream.memory.lend(bytes((n,)) * 2000) for n in range(3)]
    session.send(*(session.alloc_store(session.handle(n), lent[n]) for n in range(3)))
    asked = [next_read(session) for _ in range(2)]
    session.stream.expect_silence("as many Reads as our IRD are outstanding", for_s=QUIET_S)
    for read in asked:
        answer_read(session, read)
    for _ in range(3):
        session.answer()


# --- RTR ---


@GROUP.target("E14", "E16")
def kinds_of_rtr_in_the_reply(probe: TargetProbe) -> None:
    """A of the Reply is ours; with A=1 it names a kind of RTR, whichever we offer and even if that is none."""
    for kinds in (RtrKind.SEND, RtrKind.WRITE, RtrKind.READ, ALL_RTR_KINDS, RtrKind.NONE):
        word = reply_for(probe, EnhancedWord(4, 4, True, kinds))
        expect(word.peer_to_peer, "A=1 for A=1", word)
        expect(bool(word.rtr), "at least one of B, C and D", word)


@GROUP.target("E14", "E15")
def client_server_model(probe: TargetProbe) -> None:
    """A=0 with B, C and D set: the Reply has all four zero, and the session works without RTR."""
    tcp = probe.tcp()
    ours = Startup.of_depth(4, 4).frame(reply=False)
    octets = bytearray(ours.pack())
    octets[20] |= 0x40
    octets[22] |= 0xC0
    tcp.send(bytes(octets))
    came = accepted(receive_frame(tcp, reply=True))
    word = came.octets[20:24]
    expect(not word[0] & 0xC0 and not word[2] & 0xC0, "A, B, C and D zero", word.hex())
    works_on(open_on(probe, Stream(tcp, ours, came, active=True)))


@GROUP.initiator("E15")
def client_server_model_of_the_request(probe: InitiatorProbe) -> None:
    """A Request with A=0 has B=C=D=0; those of the Reply are not looked at."""
    tcp = probe.tcp()
    came = receive_frame(tcp, reply=False)
    probe.need(came.frame.word is not None, "its Request is a plain one")
    probe.need(not came.octets[20] & 0x80, "it asks for the peer-to-peer model")
    word = came.octets[20:24]
    expect(not word[0] & 0x40 and not word[2] & 0xC0, "B, C and D zero with A=0", word.hex())
    ours = Startup().frame(reply=True)
    octets = bytearray(ours.pack())
    octets[20] |= 0x40
    octets[22] |= 0xC0
    tcp.send(bytes(octets))
    works_on(open_on(probe, Stream(tcp, came, ours, active=False)))


def _replied(tcp: Tcp, came: CameFrame, kinds: RtrKind) -> Stream:
    """The stream after a Reply in the peer-to-peer model."""
    reply = startup_for(came, word=EnhancedWord(16, 16, True, kinds)).frame(reply=True)
    tcp.send(reply.pack())
    return Stream(tcp, came, reply, active=False)


@GROUP.initiator("E17", "E23", needs=("peer-to-peer",))
def rtr_comes_first(probe: InitiatorProbe) -> None:
    """With A=1 the first message is an empty one of a kind that both sides named; HELLO follows with the next MSN."""
    tcp = probe.tcp()
    came = receive_frame(tcp, reply=False)
    kinds = word_of(came).rtr
    expect(word_of(came).peer_to_peer, "A=1, as --with says", came.octets[:24].hex())
    stream = _replied(tcp, came, kinds)
    first = stream.message("an RTR")
    expect(first is not None, "an RTR", "the end of the connection")
    assert first is not None
    common = [opcode for kind, opcode in RTR_OPCODES.items() if kind in kinds]
    expect(first.opcode in common and _is_empty(first), f"an empty {' or '.join(one.name for one in common)}", first)
    stream.serve(first)
    works_on(open_on(probe, stream))


def _is_empty(message: Message) -> bool:
    if message.opcode is RdmapOpcode.READ_REQUEST:
        return ReadRequest.parse(message.payload).size == 0
    return not message.payload


@GROUP.initiator("E18", needs=("peer-to-peer",))
def no_common_rtr(probe: InitiatorProbe) -> None:
    """With A=1 and no kind in common: 2/0/07."""
    tcp = probe.tcp()
    came = receive_frame(tcp, reply=False)
    others = ALL_RTR_KINDS & ~word_of(came).rtr
    expect(bool(others), "a kind of RTR that it does not offer, as --with says", came.octets[:24].hex())
    _replied(tcp, came, others).expect_terminate(TerminateCause.MPA_NO_MATCHING_RTR)


@GROUP.target("E21", "E22", "E23")
def read_rtr(probe: TargetProbe) -> None:
    """A Read RTR is answered with an empty Read Response before HELLO; HELLO has MSN 1, the next Read MSN 2."""
    stream = probe.stream(Startup.peer_to_peer(RtrKind.READ))
    _read_nothing(stream)
    session = open_on(probe, stream)
    _read_nothing(stream)
    works_on(session)
    last = [one for one in segments_of(stream) if one.opcode == RdmapOpcode.READ_RESPONSE]
    expect(all(one.last for one in last), "L=1 in each empty Read Response", last)


def _read_nothing(stream: Stream) -> None:
    stream.expects_reads_of_ours += 1
    stream.send_ulpdus(segments.read_request(stream.take_msn(QN_REQUEST), NO_OCTETS))
    expect(stream.read_response(NO_OCTETS) == b"", "no octets", "some")


@GROUP.target("E23")
def send_rtr(probe: TargetProbe) -> None:
    """A Send RTR uses up MSN 1 of queue 0: HELLO with MSN 2 opens the session."""
    stream = probe.stream(Startup.peer_to_peer(RtrKind.SEND))
    stream.send_ulpdus(segments.send(stream.take_msn(QN_SEND)))
    works_on(open_on(probe, stream))


@GROUP.target("E23")
def write_rtr(probe: TargetProbe) -> None:
    """A Write RTR uses up nothing: HELLO with MSN 1 opens the session."""
    stream = probe.stream(Startup.peer_to_peer(RtrKind.WRITE))
    stream.send_ulpdus(segments.write(BOGUS_STAG, 0))
    works_on(open_on(probe, stream))
