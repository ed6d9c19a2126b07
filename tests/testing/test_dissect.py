"""A conversation told from outside: what each message was, what it answers, and what is wrong with it."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kbtp.iwarp.ddp import pack_tagged, pack_untagged
from kbtp.iwarp.fpdu import FpduEncoder
from kbtp.iwarp.mpa import ActiveStartup, MpaOptions, PassiveStartup, RtrKind
from kbtp.iwarp.rdmap import AtomicOperation, AtomicRequest, AtomicResponse, RdmapOpcode, ReadRequest, control_octet
from kbtp.iwarp.terminate import Offender, pack_terminate
from kbtp.testing.describe import INITIATOR, TARGET, Record, describe_message
from kbtp.testing.dissect import Conversation
from kbtp.types import Feature, RequestFlag, Status, TerminateCause
from kbtp.wire import AllocStore, Completion, ConnectionData, DataDescriptor, Free, Hello, HelloAck, Load

NONCE = bytes(range(16))
CONNECTION_DATA = ConnectionData(NONCE).pack()
HELLO = Hello(1, Feature.INVALIDATE, 4, 16, 8, 1024, name="prefill")
LOAD = Load(7, 0x1FF, 0, RequestFlag.NONE, DataDescriptor(0x1234, 0x5000, 4096))


class Link:
    """Makes the octets of both ends and shows them to a `Conversation`; `time_s` is the test's to set."""

    def __init__(self, private_data: bytes = CONNECTION_DATA, options: MpaOptions | None = None) -> None:
        self.conversation = Conversation()
        self.time_s = 0.0
        options = options or MpaOptions()
        self.active = ActiveStartup(options, private_data, 16, 16)
        self.passive = PassiveStartup(MpaOptions(want_markers=options.want_markers))
        self.passive.receive_data(self.active.request)
        self.encoders: dict[str, FpduEncoder] = {}
        self.msn: dict[tuple[str, int], int] = {}

    def show(self, sender: str, octets: bytes) -> list[Record]:
        return list(self.conversation.receive(self.time_s, f"the {sender}'s end", octets))

    def start(self) -> list[Record]:
        reply, negotiated = self.passive.accept(CONNECTION_DATA, 16, 16)
        for sender in (INITIATOR, TARGET):
            markers = negotiated.tx_markers if sender == TARGET else negotiated.rx_markers
            self.encoders[sender] = FpduEncoder(crc=negotiated.crc, markers=markers)
        return self.show(INITIATOR, self.active.request) + self.show(TARGET, reply)

    def untagged(
        self, sender: str, opcode: int, octets: bytes, *, qn: int = 0, word: int = 0, cut: int = 1 << 20
    ) -> bytes:
        """The FPDUs of one untagged message in segments of `cut` octets."""
        msn = self.msn[sender, qn] = self.msn.get((sender, qn), 0) + 1
        fpdus = b""
        for at in range(0, max(1, len(octets)), cut):
            header = pack_untagged(0x40 | opcode, word, qn, msn, at, last=at + cut >= len(octets))
            fpdus += self.encoders[sender].encode([header, octets[at : at + cut]])
        return fpdus

    def tagged(
        self, sender: str, opcode: RdmapOpcode, stag: int, to: int, octets: bytes, *, last: bool = True
    ) -> bytes:
        header = pack_tagged(control_octet(opcode), stag, to, last=last)
        return self.encoders[sender].encode([header, octets])

    def send(self, sender: str, octets: bytes, *, cut: int = 1 << 20) -> list[Record]:
        return self.show(sender, self.untagged(sender, RdmapOpcode.SEND, octets, cut=cut))


@pytest.fixture
def link() -> Link:
    """Past start-up and HELLO."""
    link = Link()
    link.start()
    link.send(INITIATOR, HELLO.pack())
    link.send(TARGET, HelloAck(1, block_size=4096, request_credits=8, max_message=1024).pack())
    return link


def only(records: list[Record]) -> Record:
    assert len(records) == 1
    return records[0]


def test_start_up() -> None:
    link = Link(options=MpaOptions(peer_to_peer=RtrKind.SEND | RtrKind.READ))
    request, reply = link.start()
    assert (request.carrier, request.sender, request.problem) == ("MPA Request", INITIATOR, "")
    assert request.fields["rtr"] == ["SEND", "READ"]
    assert request.fields["nonce"] == NONCE.hex()
    assert (request.fields["ird"], request.fields["ord"]) == (16, 16)
    assert (reply.carrier, reply.sender, reply.fields["accepted"], reply.fields["crc"]) == (
        "MPA Reply",
        TARGET,
        "yes",
        "on",
    )
    assert link.conversation.is_kbtp


def test_a_reject_ends_the_story() -> None:
    link = Link()
    link.show(INITIATOR, link.active.request)
    reply = only(link.show(TARGET, link.passive.reject(CONNECTION_DATA)))
    assert reply.fields["accepted"] == "no"
    assert link.show(TARGET, b"anything") == []


def test_revision_1_is_followed_too() -> None:
    link = Link(options=MpaOptions(revision=1))
    request, reply = link.start()
    assert request.fields["revision"] == 1
    assert "ird" not in request.fields
    assert reply.problem == ""
    assert only(link.send(INITIATOR, HELLO.pack())).message == "HELLO"


def test_all_ones_depths_are_followed() -> None:
    """RFC 6581 9.1: 0x3FFF leaves the depth to the ULP."""
    link = Link()
    request = bytearray(link.active.request)
    request[20:24] = b"\x3f\xff\x3f\xff"
    link.passive = PassiveStartup(MpaOptions())
    link.passive.receive_data(bytes(request))
    reply, _ = link.passive.accept(CONNECTION_DATA, 16, 16)
    assert only(link.show(INITIATOR, bytes(request))).fields["ird"] == 0x3FFF
    assert only(link.show(TARGET, reply)).problem == ""


def test_iwarp_that_is_not_kbtp() -> None:
    link = Link(private_data=b"")
    link.show(INITIATOR, link.active.request)
    reply, negotiated = link.passive.accept(b"", 16, 16)
    assert "no KBTP connection data" in only(link.show(TARGET, reply)).problem
    link.encoders[INITIATOR] = FpduEncoder(crc=negotiated.crc, markers=False)
    assert only(link.send(INITIATOR, b"something")) == Record(0.0, INITIATOR, "Send", "", {"length": 9})
    assert not link.conversation.is_kbtp


@pytest.mark.parametrize("first", [b"GET / HTTP/1.1\r\n", b"MPA ID Rep Frame", b"\x00"])
def test_connections_of_something_else_are_dropped(first: bytes) -> None:
    link = Link()
    assert link.show(INITIATOR, first) == []
    assert link.conversation.foreign
    assert link.show(TARGET, b"more") == []
    assert not link.conversation.is_mpa


def test_octets_between_request_and_reply_are_a_fault() -> None:
    """RFC 5044 7.1.2: the initiator waits for the Reply."""
    link = Link()
    request, fault = link.show(INITIATOR, link.active.request) + link.show(INITIATOR, b"!")
    assert request.carrier == "MPA Request"
    assert "before its Reply" in fault.problem


def test_a_target_that_speaks_first() -> None:
    link = Link()
    assert link.show(INITIATOR, link.active.request[:10]) == []
    assert link.show(TARGET, b"MPA ID Rep Frame") == []
    assert "before an MPA Request was complete" in link.conversation.foreign


def test_hello_and_its_answer() -> None:
    link = Link()
    link.start()
    hello = only(link.send(INITIATOR, HELLO.pack()))
    assert (hello.message, hello.fields["name"], hello.fields["requested_features"]) == (
        "HELLO",
        "prefill",
        ["INVALIDATE"],
    )
    link.time_s = 0.25
    ack = only(link.send(TARGET, HelloAck(1, status=Status.ACCESS_DENIED).pack()))
    assert (ack.message, ack.fields["status"]) == ("HELLO_ACK", "ACCESS_DENIED")
    assert (ack.fields["answers"], ack.fields["elapsed_s"]) == ("HELLO", 0.25)


def test_a_load_from_request_to_completion(link: Link) -> None:
    load = only(link.send(INITIATOR, LOAD.pack()))
    assert (load.carrier, load.message) == ("Send", "LOAD")
    assert load.fields["data"] == {"stag": 0x1234, "to": 0x5000, "length": 4096}
    assert link.show(TARGET, link.tagged(TARGET, RdmapOpcode.WRITE, 0x1234, 0x5000, bytes(1000), last=False)) == []
    write = only(link.show(TARGET, link.tagged(TARGET, RdmapOpcode.WRITE, 0x1234, 0x5000 + 1000, bytes(3096))))
    assert write.carrier == "RDMA Write"
    assert write.fields == {"stag": 0x1234, "to": 0x5000, "length": 4096, "segments": 2}
    link.time_s = 0.001
    completion = only(link.send(TARGET, Completion(7, 0x1FF, 2, Status.SUCCESS, 4096, 0x8000).pack(), cut=16))
    assert (completion.fields["answers"], completion.fields["elapsed_s"]) == ("LOAD", 0.001)
    assert completion.problem == ""
    assert list(link.conversation.finish(1.0)) == []


def test_a_store_by_rdma_read(link: Link) -> None:
    request = AllocStore(8, 3, 0, RequestFlag.SEAL | RequestFlag.INVALIDATE, DataDescriptor(0x99, 0, 512))
    assert only(link.send(INITIATOR, request.pack())).fields["flags"] == ["SEAL", "INVALIDATE"]
    read = ReadRequest(0x77, 0, 512, 0x99, 0)
    asked = only(link.show(TARGET, link.untagged(TARGET, RdmapOpcode.READ_REQUEST, read.pack(), qn=1)))
    assert (asked.carrier, asked.fields["source_stag"], asked.fields["size"]) == ("RDMA Read Request", 0x99, 512)
    link.time_s = 0.5
    response = only(link.show(INITIATOR, link.tagged(INITIATOR, RdmapOpcode.READ_RESPONSE, 0x77, 0, bytes(512))))
    assert (response.fields["answers"], response.fields["elapsed_s"]) == ("RDMA Read Request", 0.5)
    completion = Completion(8, 3, 2, Status.SUCCESS, 512, 0x8000).pack()
    done = only(link.show(TARGET, link.untagged(TARGET, RdmapOpcode.SEND_SOLICITED_INVALIDATE, completion, word=0x99)))
    assert (done.carrier, done.fields["invalidate_stag"]) == ("Send with SE and Invalidate", 0x99)


def test_inline_data_is_counted_not_shown(link: Link) -> None:
    request = AllocStore(8, 3, 0, RequestFlag.INLINE, DataDescriptor(0, 0, 5), None, b"hello")
    record = only(link.send(INITIATOR, request.pack()))
    assert record.fields["inline_data_bytes"] == 5
    assert "inline_data" not in record.fields


def test_atomics_and_immediate_data(link: Link) -> None:
    request = AtomicRequest(AtomicOperation.FETCH_ADD, 5, 0x10, 0, 1 << 32, 1 << 63)
    asked = only(link.show(INITIATOR, link.untagged(INITIATOR, RdmapOpcode.ATOMIC_REQUEST, request.pack(), qn=1)))
    assert (asked.carrier, asked.fields["operation"]) == ("Atomic Request", "FETCH_ADD")
    octets = AtomicResponse(5, 42).pack()
    answer = only(link.show(TARGET, link.untagged(TARGET, RdmapOpcode.ATOMIC_RESPONSE, octets, qn=3)))
    assert (answer.fields["value"], answer.fields["answers"]) == (42, "Atomic Request")
    immediate = only(link.show(TARGET, link.untagged(TARGET, RdmapOpcode.IMMEDIATE, b"12345678")))
    assert immediate.fields == {"data": b"12345678".hex()}


def test_a_terminate_is_told_by_name(link: Link) -> None:
    offender = Offender.of(pack_tagged(control_octet(RdmapOpcode.WRITE), 1, 2, last=True))
    octets = pack_terminate(TerminateCause.DDP_INVALID_STAG, offender)
    record = only(link.show(INITIATOR, link.untagged(INITIATOR, RdmapOpcode.TERMINATE, octets, qn=2)))
    assert record.message == "DDP_INVALID_STAG (1/1/00)"
    assert (record.fields["layer"], record.fields["etype"], record.fields["code"]) == (1, 1, 0)
    assert len(str(record.fields["ddp_header"])) == 28


def test_a_send_rtr_is_no_message() -> None:
    """Profile 3: a Send RTR is an empty message before HELLO; anywhere else an empty Send is a fault."""
    link = Link(options=MpaOptions(peer_to_peer=RtrKind.SEND))
    link.start()
    assert only(link.send(INITIATOR, b"")).message == "RTR"
    assert "only 0 are there" in only(link.send(INITIATOR, b"")).problem


@pytest.mark.parametrize("sender", [INITIATOR, TARGET])
def test_markers_are_followed(sender: str) -> None:
    link = Link(options=MpaOptions(want_markers=True))
    link.start()
    for index in range(20):
        octets = HELLO.pack() if sender == INITIATOR else HelloAck(index, request_credits=8, max_message=1024).pack()
        assert only(link.send(sender, octets)).message in ("HELLO", "HELLO_ACK")


# --- what goes wrong ---


def test_a_bad_crc_ends_that_direction_only(link: Link) -> None:
    octets = bytearray(link.untagged(INITIATOR, RdmapOpcode.SEND, LOAD.pack()))
    octets[30] ^= 1
    record = only(link.show(INITIATOR, bytes(octets)))
    assert record.carrier == "FPDU"
    assert "CRC" in record.problem
    assert link.send(INITIATOR, LOAD.pack()) == []
    assert only(link.send(TARGET, Completion(9, 0, 0, Status.MALFORMED).pack())).message == "COMPLETION"


def test_a_malformed_request_shows_header_and_answer(link: Link) -> None:
    record = only(link.send(INITIATOR, LOAD.pack()[:-1]))
    assert (record.message, record.fields["handle"]) == ("LOAD", 0x1FF)
    assert record.problem.startswith("MALFORMED: ")
    answer = only(link.send(TARGET, Completion(7, 0, 0, Status.MALFORMED).pack()))
    assert (answer.fields["answers"], answer.problem) == ("LOAD", "")


def test_an_unknown_opcode_and_a_short_message(link: Link) -> None:
    unknown = bytearray(LOAD.pack())
    unknown[1] = 99
    record = only(link.send(INITIATOR, bytes(unknown)))
    assert (record.message, record.problem[:12]) == ("opcode 99", "UNSUPPORTED:")
    short = only(link.send(INITIATOR, b"\x01\x03"))
    assert (short.fields["octets"], short.message) == ("0103", "")
    assert "only 2 are there" in short.problem


def test_a_completion_of_nothing(link: Link) -> None:
    record = only(link.send(TARGET, Completion(99, 0, 0, Status.SUCCESS).pack()))
    assert record.problem == "no request of that kind is outstanding"


def test_a_request_id_used_twice(link: Link) -> None:
    link.send(INITIATOR, LOAD.pack())
    assert "outstanding already" in only(link.send(INITIATOR, LOAD.pack())).problem


def test_what_the_capture_ends_with(link: Link) -> None:
    link.send(INITIATOR, LOAD.pack())
    link.send(INITIATOR, Free(8, 3, 0, RequestFlag.NONE).pack())
    link.show(TARGET, link.tagged(TARGET, RdmapOpcode.WRITE, 0x1234, 0x5000, bytes(1000), last=False))
    problems = {record.sender: record.problem for record in link.conversation.finish(9.0)}
    assert problems == {INITIATOR: "it has no answer to request 7 LOAD, 8 FREE", TARGET: "it ends inside a message"}


def test_octets_the_capture_lacks(link: Link) -> None:
    record = only(list(link.conversation.lose(3.0, "the target's end", "it lacks 5 octets")))
    assert (record.sender, record.problem) == (TARGET, "it lacks 5 octets")
    assert link.send(TARGET, Completion(99, 0, 0, Status.SUCCESS).pack()) == []
    assert list(link.conversation.finish(9.0)) == []


def test_segments_that_do_not_continue_their_message(link: Link) -> None:
    link.show(TARGET, link.tagged(TARGET, RdmapOpcode.WRITE, 1, 0x5000, bytes(8), last=False))
    strayed = only(link.show(TARGET, link.tagged(TARGET, RdmapOpcode.WRITE, 1, 0x6000, bytes(8))))
    assert strayed.problem == "STag 0x1, TO 0x6000 came, STag 0x1, TO 0x5008 was due"
    header = pack_untagged(control_octet(RdmapOpcode.SEND), 0, 0, 50, 4, last=True)
    early = only(link.show(TARGET, link.encoders[TARGET].encode([header, bytes(30)])))
    assert early.problem == "MSN 50, MO 4 came, MSN 50, MO 0 was due"


@pytest.mark.parametrize(
    ("opcode", "octets", "qn", "problem"),
    [
        (RdmapOpcode.READ_REQUEST, bytes(27), 1, "27 octets, it has 28"),
        (RdmapOpcode.IMMEDIATE, bytes(9), 0, "9 octets, it has 8"),
        (RdmapOpcode.ATOMIC_REQUEST, b"\0\0\0\x07" + bytes(48), 1, "AOpCode 7"),
        (RdmapOpcode.TERMINATE, b"\0", 2, "shorter than its control field"),
        (RdmapOpcode.ATOMIC_RESPONSE, bytes(12), 3, "no Atomic Request of that kind is outstanding"),
        (0xF, bytes(4), 0, "opcode 0xf is not known"),
        (RdmapOpcode.SEND, bytes(24), 3, "on queue 3"),
    ],
)
def test_rdmap_that_is_wrong(link: Link, opcode: int, octets: bytes, qn: int, problem: str) -> None:
    record = only(link.show(TARGET, link.untagged(TARGET, opcode, octets, qn=qn)))
    assert problem in record.problem


def test_a_read_response_nobody_asked_for(link: Link) -> None:
    record = only(link.show(TARGET, link.tagged(TARGET, RdmapOpcode.READ_RESPONSE, 1, 0, b"")))
    assert record.problem == "no RDMA Read Request of that kind is outstanding"


def test_a_message_by_itself() -> None:
    assert describe_message(LOAD.pack()).sender == INITIATOR
    completion = describe_message(Completion(1, 2, 3, Status.NO_SPACE).pack())
    assert (completion.sender, completion.fields["status"]) == (TARGET, "NO_SPACE")
    assert describe_message(b"").problem


@given(st.binary(max_size=200), st.sampled_from([None, INITIATOR, TARGET]))
def test_no_message_raises(octets: bytes, sender: str | None) -> None:
    describe_message(octets, sender)


@given(st.lists(st.tuples(st.sampled_from([INITIATOR, TARGET]), st.binary(max_size=80)), max_size=6), st.booleans())
def test_no_conversation_raises(octets: list[tuple[str, bytes]], started: bool) -> None:
    link = Link()
    if started:
        link.start()
    for sender, piece in octets:
        link.show(sender, piece)
    list(link.conversation.finish(0.0))


@given(st.sampled_from([INITIATOR, TARGET]), st.integers(0, 15), st.integers(0, 3), st.binary(max_size=80), st.data())
def test_no_segment_raises(sender: str, opcode: int, qn: int, octets: bytes, data: st.DataObject) -> None:
    link = Link()
    link.start()
    for _ in range(2):
        fpdu = link.untagged(sender, opcode, octets, qn=qn)
        if data.draw(st.booleans()):
            fpdu = link.encoders[sender].encode([octets or b"\0"])
        link.show(sender, fpdu)
    list(link.conversation.finish(0.0))
