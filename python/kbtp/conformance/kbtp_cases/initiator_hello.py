"""How an initiator opens a session, and what it does with the HELLO_ACK (profile 2, 3, 8.1)."""

from __future__ import annotations

import struct
from typing import Any

from kbtp import limits
from kbtp.conformance.case import Group
from kbtp.conformance.deviation import Deviation, expect
from kbtp.conformance.kbtp_cases.hello import SKIPPABLE_OPTION, UNKNOWN_OPTION, option
from kbtp.conformance.probe import InitiatorProbe
from kbtp.conformance.startup import Startup, connection_data, receive_frame
from kbtp.conformance.target_side import TargetSide
from kbtp.iwarp.rdmap import RdmapOpcode
from kbtp.types import HelloAckFlag, Status
from kbtp.wire import ANONYMOUS, Completion, ConnectionData

GROUP = Group("initiator-hello")


def expect_given_up(probe: InitiatorProbe, side: TargetSide, why: str) -> None:
    """The initiator ends the stream, sends no request before, and does not call its work done."""
    while (message := side.stream.message(f"the end of the stream: {why}")) is not None:
        if message.opcode is RdmapOpcode.TERMINATE:
            side.stream.expect_close(why)
            break
        raise Deviation(f"no request on this stream: {why}", str(message))
    side.stream.close()
    if "one-by-one" in probe.setup.has:
        probe.refuse_further()
        expect(not probe.work_succeeded(), f"an error: {why}", "that all of its work succeeds")


@GROUP.initiator("KNC1")
def connection_data_is_there(probe: InitiatorProbe) -> None:
    """The Request's private data begins with KBTP, version 1, reserved zeros and a nonce that is not all zeros."""
    data = probe.stream().request.private_data
    expect(len(data) >= limits.CONNECTION_DATA_BYTES, "24 octets of connection data", data.hex())
    expect(data[:8] == b"KBTP\x01\x00\x00\x00", "KBTP, version 1, reserved zeros", data[:8].hex())
    expect(ConnectionData.parse(data).nonce != bytes(16), "a random nonce", "zeros")


@GROUP.initiator("KNC2")
def client_server_model(probe: InitiatorProbe) -> None:
    """RFC 6581 is used with A=0, or an RTR is sent before HELLO."""
    stream = probe.stream()
    word = stream.request.word
    message = stream.message("the first message")
    expect(message is not None, "a first message", "the end of the connection")
    if word is None or not word.peer_to_peer:
        assert message is not None
        is_hello = message.opcode in (RdmapOpcode.SEND, RdmapOpcode.SEND_SOLICITED) and len(message.payload) >= 64
        expect(is_hello, "HELLO in the first FPDU (profile 3)", message)


@GROUP.initiator("KNC3")
def more_private_data_is_ignored(probe: InitiatorProbe) -> None:
    """Octets behind the connection data of the Reply are ignored."""
    startup = Startup(crc=probe.setup.crc, private_data=connection_data() + bytes(60))
    side = TargetSide(probe.stream(startup), probe.key)
    side.open().request()


@GROUP.initiator("KNC4")
def reply_without_connection_data(probe: InitiatorProbe) -> None:
    """A Reply of something that is not KBTP, or of another version, gets no HELLO."""
    good = connection_data()
    startup = Startup(private_data=good[:4] + b"\x02" + good[5:])
    if not probe.by_hand:
        probe.stream(startup).expect_close("another version of the connection data")
        return
    tcp = probe.tcp()
    receive_frame(tcp, reply=False)
    tcp.send(startup.frame(reply=True).pack())
    octets = tcp.expect_close("another version of the connection data")
    expect(b"\x01\x01\x00\x00" not in octets or len(octets) < 64, "no HELLO", octets.hex())


@GROUP.initiator("KNH1", "KNH2", "KNH3")
def hello_is_well_formed(probe: InitiatorProbe) -> None:
    """HELLO: Version 1, no flags, Status 0, at least 1 credit, Max Message of 1024 or more, at most 1024 octets."""
    side = TargetSide(probe.stream(), probe.key)
    hello = side.take_hello()
    octets = side.hello_octets
    expect(octets[:4] == b"\x01\x01\x00\x00", "Version 1, opcode 1, no flags", octets[:4].hex())
    expect(octets[22:24] == bytes(2), "Status 0 (draft 5.1)", octets[22:24].hex())
    expect(hello.completion_credits >= 1, "Completion Credits of 1 or more", hello.completion_credits)
    expect(hello.max_message >= limits.MIN_MAX_MESSAGE_BYTES, "Max Message of 1024 or more", hello.max_message)
    expect(len(octets) <= limits.HELLO_MAX_BYTES, "at most 1024 octets", len(octets))
    expect(not hello.unknown_options, "options that the profile knows", hello.unknown_options)


@GROUP.initiator("KNH4")
def nothing_before_the_ack(probe: InitiatorProbe) -> None:
    """Nothing is sent between HELLO and HELLO_ACK."""
    side = probe.before_ack()
    side.stream.expect_silence("HELLO_ACK is still to come (profile 2)", for_s=0.5)
    side.acknowledge()
    side.request()


@GROUP.initiator("KNH5", timeout_s=30.0)
def tries_again_without_an_ack(probe: InitiatorProbe) -> None:
    """An initiator that gets no HELLO_ACK tries again on a new connection, with a fresh nonce."""
    first = probe.before_ack()
    second = TargetSide(probe.next_stream("a second connection (profile 3)"), probe.key)
    second.open().request()
    nonces = {ConnectionData.parse(one.stream.request.private_data).nonce for one in (first, second)}
    expect(len(nonces) == 2, "a fresh nonce for each connection (profile 4)", "the same one twice")


@GROUP.initiator("KNH6")
def refused_hello(probe: InitiatorProbe) -> None:
    """A HELLO_ACK with NO_SPACE ends it: no request follows."""
    _refused(probe, Status.NO_SPACE)


@GROUP.initiator("KNH6")
def denied_hello(probe: InitiatorProbe) -> None:
    """A HELLO_ACK with ACCESS_DENIED ends it: no request follows."""
    _refused(probe, Status.ACCESS_DENIED)


@GROUP.initiator("KNH6")
def unsupported_hello(probe: InitiatorProbe) -> None:
    """A HELLO_ACK with UNSUPPORTED ends it: no request follows."""
    _refused(probe, Status.UNSUPPORTED)


def _refused(probe: InitiatorProbe, status: Status) -> None:
    side = probe.before_ack()
    side.acknowledge(status=status)
    side.stream.finish()
    expect_given_up(probe, side, f"HELLO_ACK with {status.name}")


IMPOSSIBLE: dict[str, dict[str, Any]] = {
    "block-size": {"block_size": 500},
    "credits": {"request_credits": 1 << 20},
    "quota": {"allocation_quota": 65},
    "range": {"first_handle": 4090, "handle_count": 64},
    "resumed": {"flags": HelloAckFlag.RESUMED},
    "request-id": {"request_id": 0x7777777777777777},
    "ticket-timeout": {"ticket_timeout_ms": 1000},
    "stag": {"pool_stag": 0x1234},
}


def _impossible(name: str) -> None:
    """One case for each entry of IMPOSSIBLE."""

    def run(probe: InitiatorProbe) -> None:
        side = probe.before_ack()
        named = name == "resumed" and side.hello.initiator_id != ANONYMOUS
        probe.need(not named, "an anonymous initiator: one with an Initiator ID may have been there before")
        side.acknowledge(**IMPOSSIBLE[name])
        expect_given_up(probe, side, f"HELLO_ACK with {IMPOSSIBLE[name]}")

    run.__name__ = f"ack_with_impossible_{name}"
    run.__doc__ = f"A HELLO_ACK that cannot be ends the stream: {name.replace('-', ' ')}."
    GROUP.initiator("KNH7")(run)


for _name in IMPOSSIBLE:
    _impossible(_name)


@GROUP.initiator("KNH8")
def ack_fields_out_of_bounds(probe: InitiatorProbe) -> None:
    """Request Credits of 0 end the stream."""
    side = probe.before_ack()
    side.acknowledge(patches={40: bytes(4)})
    expect_given_up(probe, side, "Request Credits 0")


@GROUP.initiator("KNH8")
def ack_with_small_max_message(probe: InitiatorProbe) -> None:
    """Max Message below 1024 ends the stream."""
    side = probe.before_ack()
    side.acknowledge(patches={44: struct.pack(">I", 1023)})
    expect_given_up(probe, side, "Max Message 1023")


@GROUP.initiator("KNH9")
def ack_with_skippable_options(probe: InitiatorProbe) -> None:
    """Options from 0x8000 on in HELLO_ACK are skipped, reserved octets ignored, unknown features too."""
    side = probe.before_ack()
    side.acknowledge(patches={54: b"\xff\xff"}, extra_options=option(SKIPPABLE_OPTION, b"whatever"))
    side.request()


@GROUP.initiator("KNH10")
def ack_with_unknown_option(probe: InitiatorProbe) -> None:
    """An unknown option below 0x8000 in HELLO_ACK ends the stream."""
    side = probe.before_ack()
    side.acknowledge(extra_options=option(UNKNOWN_OPTION, b"?"))
    expect_given_up(probe, side, "option 0x7001")


@GROUP.initiator("KNH11")
def something_else_than_an_ack(probe: InitiatorProbe) -> None:
    """A COMPLETION in answer to HELLO ends the stream."""
    side = probe.before_ack()
    side.stream.send(Completion(side.hello.request_id, 0, 0, Status.SUCCESS).pack())
    expect_given_up(probe, side, "a COMPLETION for a HELLO")


@GROUP.initiator("KNH11")
def rubbish_instead_of_an_ack(probe: InitiatorProbe) -> None:
    """Octets that are no message in answer to HELLO end the stream."""
    side = probe.before_ack()
    side.stream.send(bytes(152))
    expect_given_up(probe, side, "152 zeros")


@GROUP.initiator("KNH11")
def cut_ack(probe: InitiatorProbe) -> None:
    """A HELLO_ACK that is an octet short ends the stream."""
    side = probe.before_ack()
    side.stream.send(side.ack_octets()[:151])
    expect_given_up(probe, side, "151 octets")


@GROUP.initiator("KNH11")
def ack_of_another_version(probe: InitiatorProbe) -> None:
    """A HELLO_ACK of version 2 ends the stream."""
    side = probe.before_ack()
    side.acknowledge(patches={0: b"\x02"})
    expect_given_up(probe, side, "version 2")


@GROUP.initiator("KNH12")
def second_ack(probe: InitiatorProbe) -> None:
    """A second HELLO_ACK ends the stream."""
    side = probe.before_ack()
    side.acknowledge()
    side.acknowledge()
    side.stream.expect_end("a second HELLO_ACK")


@GROUP.initiator("KNC5")
def rejected_connection(probe: InitiatorProbe) -> None:
    """After R=1 no FPDU comes, and both sides close."""
    if not probe.by_hand:
        probe.reject()
        probe.refuse_further()
        expect(not probe.work_succeeded(), "an error: the connection was rejected", "that all of its work succeeds")
        return
    tcp = probe.tcp()
    request = receive_frame(tcp, reply=False)
    revision, word = request.frame.revision, request.frame.word
    tcp.send(Startup(revision=revision, word=word, rejected=True).frame(reply=True).pack())
    tcp.finish()
    tcp.expect_close("both sides close after R=1 (profile 3)", silent=True)
