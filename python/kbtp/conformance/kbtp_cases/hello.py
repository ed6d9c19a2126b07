"""HELLO and HELLO_ACK as a target has to deal with them (profile 2, 3, 8.1 to 8.5)."""

from __future__ import annotations

import struct
from itertools import pairwise

from kbtp import limits
from kbtp.conformance import segments
from kbtp.conformance.case import Group
from kbtp.conformance.deviation import Deviation, expect
from kbtp.conformance.initiator_side import InitiatorSide, hello_message
from kbtp.conformance.probe import TargetProbe
from kbtp.conformance.rule import Level
from kbtp.conformance.startup import Startup, connection_data, receive_frame
from kbtp.iwarp.mpa import RtrKind
from kbtp.iwarp.rdmap import RdmapOpcode, ReadRequest
from kbtp.types import Feature, RequestFlag, Status, TerminateCause
from kbtp.wire import ConnectionData, Free, HelloAck

GROUP = Group("hello")

SKIPPABLE_OPTION = 0x8001
UNKNOWN_OPTION = 0x7001


def option(kind: int, value: bytes, *, length: int | None = None) -> bytes:
    """An option in which Length may be wrong."""
    return struct.pack(">HH", kind, len(value) if length is None else length) + value + bytes(-len(value) % 4)


def patched(message: bytes, at: int, octets: bytes) -> bytes:
    """`message` with other octets at `at`."""
    return message[:at] + octets + message[at + len(octets) :]


def expect_refused(probe: TargetProbe, hello: bytes, *allowed: Status, why: str) -> None:
    """A HELLO that gets one of the statuses in a HELLO_ACK that says no more, and the end of the stream."""
    side = probe.before_hello()
    refuse(side, hello, *allowed, why=why)


def refuse(side: InitiatorSide, hello: bytes, *allowed: Status, why: str) -> None:
    side.stream.send(hello)
    message = side.stream.next_send("a HELLO_ACK")
    ack = HelloAck.parse(message.payload)
    names = " or ".join(status.name for status in allowed)
    expect(ack.status in allowed, f"HELLO_ACK with {names}: {why}", ack.status.name)
    rest = message.payload[limits.COMMON_HEADER_BYTES : limits.HELLO_ACK_FIXED_BYTES]
    expect(not any(rest), "a refusing HELLO_ACK whose fields from 24 on are zero (profile 2)", rest.hex())
    expect(ack.request_id == int.from_bytes(hello[4:12], "big"), "the Request ID echoed", ack.request_id)
    side.stream.expect_close("a refused HELLO ends the stream (profile 2)")


# --- connection data ---


@GROUP.target("KC1")
def connection_data_is_there(probe: TargetProbe) -> None:
    """The Reply's private data begins with KBTP, version 1, reserved zeros and a nonce; two nonces differ."""
    nonces = set()
    for _ in range(2):
        data = probe.stream().reply.private_data
        expect(len(data) >= limits.CONNECTION_DATA_BYTES, "24 octets of connection data", data.hex())
        expect(data[:8] == b"KBTP\x01\x00\x00\x00", "KBTP, version 1, reserved zeros", data[:8].hex())
        nonces.add(ConnectionData.parse(data).nonce)
    expect(len(nonces) == 2, "a fresh nonce for each connection (profile 4)", "the same one twice")


@GROUP.target("KC2")
def more_private_data_is_ignored(probe: TargetProbe) -> None:
    """Octets behind the 24 of the connection data change nothing: a CM pads."""
    octets = 100 if probe.by_hand else 20  # InfiniBand's CM takes 56 in all, and pads
    probe.session(Startup(private_data=connection_data() + bytes(octets)))


@GROUP.target("KC3")
def without_connection_data_rejected(probe: TargetProbe) -> None:
    """A Request without connection data, with another magic or version gets R=1 and the target's 24 octets."""
    good = connection_data()
    if not probe.by_hand:
        for private_data in (b"HTTP" + good[4:], good[:4] + b"\x02" + good[5:]):
            told = probe.rejection(Startup(private_data=private_data))
            expect(told[:5] == b"KBTP\x01", "the target's own connection data", told.hex())
        return
    for private_data in (b"", good[:23], b"HTTP" + good[4:], good[:4] + b"\x02" + good[5:]):
        tcp = probe.tcp()
        tcp.send(Startup(private_data=private_data).frame(reply=False).pack())
        reply = receive_frame(tcp, reply=True)
        expect(reply.frame.rejected, f"R=1 in answer to the private data {private_data.hex()}", reply.octets.hex())
        expect(reply.private_data[:5] == b"KBTP\x01", "the target's own connection data", reply.private_data.hex())
        tcp.finish()
        tcp.expect_close("both sides close after R=1 (profile 3)", silent=True)


# --- what a HELLO gets ---


@GROUP.target("KH1", "KH2", "KH3", "KH4", "KH5", "KH6")
def ack_makes_sense(probe: TargetProbe) -> None:
    """Every field of a HELLO_ACK is what profile 2 allows for a HELLO that asked for nothing special."""
    side = probe.before_hello()
    side.hello(requested_features=Feature.NONE)
    ack, message = side.ack, side.stream.messages[0].payload
    expect(ack.status is Status.SUCCESS, "SUCCESS", ack.status.name)
    expect(message[0] == 1, "Version 1", message[0])
    expect(message[2:4] == bytes(2), "no flag: nothing is resumed", message[2:4].hex())
    expect(message[12:22] == bytes(10), "Handle and Generation 0 (profile 8.1)", message[12:22].hex())
    expect(message[54:56] == bytes(2), "reserved zeros", message[54:56].hex())
    expect(len(message) <= limits.HELLO_MAX_BYTES, "at most 1024 octets", len(message))
    expect(not ack.granted_features & ~Feature.INVALIDATE, "no feature that was not asked for", ack.granted_features)
    size_fits = limits.BLOCK_SIZE_MIN_BYTES <= ack.block_size <= limits.BLOCK_SIZE_MAX_BYTES and not ack.block_size % 64
    expect(size_fits, "a Block Size of 512 octets to 1 GiB, a multiple of 64 (profile 5)", ack.block_size)
    expect(ack.pool_base % 64 == 0, "Pool Base aligned to 64 (profile 5)", ack.pool_base)
    expect(1 <= ack.request_credits <= 32, "1 to Completion Credits, 32, Request Credits", ack.request_credits)
    expect(ack.max_message >= 1024, "Max Message of 1024 or more", ack.max_message)
    expect(1 <= ack.allocation_quota <= min(4, ack.pool_blocks), "a quota of 1 to 4 blocks", ack.allocation_quota)
    expect(1 <= ack.handle_count <= 8, "1 to 8 handles", ack.handle_count)
    first = (ack.first_handle - ack.table_base_handle) % (1 << 64)
    expect(first + ack.handle_count <= ack.table_handles, "a range within the table", f"{ack.first_handle}, {first}")
    expect(ack.bound_blocks == 0, "Bound Blocks 0 of a new initiator", ack.bound_blocks)
    stags = (ack.table_stag, ack.pool_stag, ack.partition_stag, ack.ring_stag, ack.head_stag)
    expect(not any(stags), "no STag without a direct mode", stags)
    direct = (ack.ticket_timeout_ms, ack.ring_order)
    expect(not any(direct), "Ticket Timeout and Ring Order 0 without DIRECT_ALLOC", direct)


@GROUP.target("KH7", needs=("rdmap",))
def record_completion_never_granted(probe: TargetProbe) -> None:
    """RECORD_COMPLETION is not granted on RDMAP, and a request with RECORD is UNSUPPORTED."""
    side = probe.session(requested_features=Feature.RECORD_COMPLETION | Feature.INVALIDATE)
    granted = side.ack.granted_features
    expect(not granted & Feature.RECORD_COMPLETION, "RECORD_COMPLETION not granted (draft 6.5)", granted)
    load = patched(side.load(side.first, None).pack() + bytes(16), 3, b"\x04")
    side.send(load)
    status = side.answer().status
    expect(status is Status.UNSUPPORTED, "UNSUPPORTED for the flag RECORD (profile 1)", status.name)
    side.goes_on()


@GROUP.target("KH8")
def unknown_features_ignored(probe: TargetProbe) -> None:
    """Feature bits that nobody knows change nothing and are not granted."""
    side = probe.before_hello()
    side.hello(patches={24: b"\xff\xff\xff\x10"})
    expect(side.ack.status is Status.SUCCESS, "SUCCESS", side.ack.status.name)
    raw = next(side.stream.messages_of(RdmapOpcode.SEND)).payload[24:28]
    expect(raw in (bytes(4), b"\x00\x00\x00\x10"), "INVALIDATE at most of the features", raw.hex())


@GROUP.target("KH9", needs=("rdmap",))
def direct_alloc_needs_masked_atomics(probe: TargetProbe) -> None:
    """DIRECT_ALLOC without MASKED_ATOMICS is a contradiction on RDMAP: not granted, and no error."""
    side = probe.session(requested_features=Feature.DIRECT_ALLOC)
    expect(not side.ack.granted_features & Feature.DIRECT_ALLOC, "not granted", side.ack.granted_features)
    expect(side.ack.ticket_timeout_ms == 0, "Ticket Timeout 0", side.ack.ticket_timeout_ms)


@GROUP.target("KH10", needs=("rdmap",))
def invalidate_served_unasked(probe: TargetProbe) -> None:
    """The INVALIDATE flag is served whether or not the feature was asked for."""
    side = probe.session(requested_features=Feature.NONE)
    lent = side.stream.memory.lend(64)
    load = side.load(side.first, lent, flags=RequestFlag.INVALIDATE)
    side.send(load)
    answer = side.answer(load)
    expect(answer.invalidated_stag == lent.stag, "Send with Invalidate of the STag", answer.message)


@GROUP.target("KH11")
def credits_never_more_than_offered(probe: TargetProbe) -> None:
    """Request Credits are 1 where Completion Credits are 1, and the session works."""
    side = probe.session(completion_credits=1)
    expect(side.ack.request_credits == 1, "1 Request Credit", side.ack.request_credits)
    side.goes_on()
    side.goes_on()


@GROUP.target("KH12")
def quota_and_handles_of_zero(probe: TargetProbe) -> None:
    """Requested Quota and Handles of 0 take the target's defaults, which is no reason to refuse."""
    probe.session(requested_quota=0, requested_handles=0).goes_on()


@GROUP.target("KH13", alone=True)
def more_handles_than_there_are(probe: TargetProbe) -> None:
    """Of too many handles or blocks what there is is granted."""
    side = probe.session(requested_quota=0xFFFFFFFF, requested_handles=1 << 63)
    ack = side.ack
    expect(1 <= ack.handle_count <= ack.table_handles, "at most the table's handles", ack.handle_count)
    expect(1 <= ack.allocation_quota <= ack.pool_blocks, "at most the pool's blocks", ack.allocation_quota)
    side.finish()


@GROUP.target("KH14")
def ranges_are_disjoint(probe: TargetProbe) -> None:
    """The ranges of three sessions do not overlap, and name one incarnation, one table and one pool."""
    acks = [probe.session().ack for _ in range(3)]
    spans = sorted((ack.first_handle, ack.handle_count) for ack in acks)
    for (first, count), (following, _) in pairwise(spans):
        expect(first + count <= following, "disjoint ranges", spans)
    fixed = {
        (ack.incarnation, ack.table_base_handle, ack.table_handles, ack.pool_base, ack.block_size, ack.pool_blocks)
        for ack in acks
    }
    expect(len(fixed) == 1, "what is fixed for the incarnation is the same in all", fixed)


# --- what a HELLO is refused for, and in which order ---


@GROUP.target("KV1")
def version_and_flags(probe: TargetProbe) -> None:
    """Another version or any flag is UNSUPPORTED."""
    hello = hello_message().pack()
    expect_refused(probe, patched(hello, 0, b"\x02"), Status.UNSUPPORTED, why="version 2")
    expect_refused(probe, patched(hello, 2, b"\x00\x01"), Status.UNSUPPORTED, why="a flag")


@GROUP.target("KV2")
def malformed_hellos(probe: TargetProbe) -> None:
    """A fixed part that is not all there, bad option framing, an option twice or too long, a bad field: MALFORMED."""
    hello = hello_message().pack()
    for octets, why in (
        (hello[:63], "63 octets"),
        (hello + bytes(1), "one octet of an option"),
        (hello + option(1, b"name")[:-1], "an option that is cut"),
        (hello + option(1, b"name", length=9), "Length past the end"),
        (hello + option(1, b"a") + option(1, b"b"), "NAME twice"),
        (hello + option(SKIPPABLE_OPTION, b"a") * 2, "a skippable option twice"),
        (hello + option(1, bytes([65]) * 256), "NAME of 256 octets"),
        (hello + option(2, bytes(256)), "NAMESPACE of 256 octets"),
        (patched(hello, 40, bytes(4)), "Completion Credits 0"),
        (patched(hello, 44, struct.pack(">I", 1023)), "Max Message 1023"),
    ):
        expect_refused(probe, octets, Status.MALFORMED, why=why)


@GROUP.target("KV3")
def unknown_options(probe: TargetProbe) -> None:
    """An unknown option below 0x8000 is UNSUPPORTED, one from 0x8000 on is skipped."""
    hello = hello_message().pack()
    expect_refused(probe, hello + option(UNKNOWN_OPTION, b"?"), Status.UNSUPPORTED, why="option 0x7001")
    side = probe.before_hello()
    side.hello(extra_options=option(SKIPPABLE_OPTION, b"whatever") + option(0xFFFF, b""))
    expect(side.ack.status is Status.SUCCESS, "options from 0x8000 on skipped", side.ack.status.name)


@GROUP.target("KV4")
def second_hello(probe: TargetProbe) -> None:
    """A second HELLO gets a HELLO_ACK with NO_SESSION, and the stream ends."""
    side = probe.session()
    refuse(side, hello_message(request_id=2).pack(), Status.NO_SESSION, why="a second HELLO")


@GROUP.target("KV5")
def hello_checks_in_order(probe: TargetProbe) -> None:
    """Of two faults of a HELLO the one that profile 8.1 checks first names the status."""
    hello = hello_message().pack()
    flags, short, unknown = patched(hello, 2, b"\x00\x01"), hello[:63], hello + option(UNKNOWN_OPTION, b"")
    expect_refused(probe, flags[:63], Status.UNSUPPORTED, why="a flag, and 63 octets")
    expect_refused(probe, unknown + bytes(1), Status.MALFORMED, why="an unknown option, and bad framing")
    refuse(probe.session(), short, Status.MALFORMED, why="a second HELLO, of 63 octets")
    refuse(probe.session(), flags, Status.UNSUPPORTED, why="a second HELLO, with a flag")
    refuse(probe.session(), unknown, Status.NO_SESSION, why="a second HELLO, with an unknown option")


@GROUP.target("KV5", "KP2", needs=("namespace",))
def hello_checks_in_order_with_namespace(probe: TargetProbe) -> None:
    """An unknown option is found before a wrong namespace, that before NO_SPACE."""
    wrong, unknown = probe.setup.namespace + b"?", option(UNKNOWN_OPTION, b"")
    for namespace, more, status, why in (
        (wrong, unknown, Status.UNSUPPORTED, "both faults"),
        (wrong, b"", Status.ACCESS_DENIED, "another namespace"),
        (None, b"", Status.ACCESS_DENIED, "no namespace"),
    ):
        side = probe.before_hello()
        refuse(side, side.hello_octets(namespace=namespace, extra_options=more), status, why=why)
    side = probe.before_hello()
    side.hello(namespace=probe.setup.namespace)
    expect(side.ack.status is Status.SUCCESS, "SUCCESS with the namespace", side.ack.status.name)


@GROUP.target("KP1")
def longest_options(probe: TargetProbe) -> None:
    """A NAME of 255 octets, an empty one, and a HELLO of exactly 1024 octets are served."""
    for name in ("n" * 255, ""):
        side = probe.before_hello()
        side.hello(name=name)
        expect(side.ack.status is Status.SUCCESS, "SUCCESS", side.ack.status.name)
    side = probe.before_hello()
    room = limits.HELLO_MAX_BYTES - len(side.hello_octets(extra_options=option(SKIPPABLE_OPTION, b"")))
    side.hello(extra_options=option(SKIPPABLE_OPTION, bytes(room)))
    expect(side.ack.status is Status.SUCCESS, "SUCCESS for a HELLO of 1024 octets", side.ack.status.name)


@GROUP.target("KV6")
def hello_too_long(probe: TargetProbe) -> None:
    """A HELLO of 1025 octets ends the stream with 1/2/05."""
    side = probe.before_hello()
    side.stream.send(hello_message().pack() + bytes(1025 - 64))
    side.stream.expect_terminate(TerminateCause.DDP_MESSAGE_TOO_LONG)


# --- before HELLO ---


@GROUP.target("KV7", "KS14")
def request_before_hello(probe: TargetProbe) -> None:
    """A request before HELLO gets one COMPLETION with NO_SESSION; the next one ends the stream."""
    side = probe.before_hello()
    completion = side.expect_status(side.free(7), Status.NO_SESSION)
    expect(completion.generation == 0, "Generation 0", completion.generation)
    side.send(side.free(7))
    side.stream.expect_end("a second request before HELLO (profile 8.2)")


@GROUP.target("KV8")
def hello_after_a_refused_request(probe: TargetProbe) -> None:
    """A HELLO after the one request that came too early opens the session."""
    side = probe.before_hello()
    side.expect_status(side.free(7), Status.NO_SESSION)
    side.open().goes_on()


@GROUP.target("KO1")
def early_request_checks_in_order(probe: TargetProbe) -> None:
    """Before HELLO too UNSUPPORTED comes first, then MALFORMED, then NO_SESSION."""
    free = Free(1, 7, 0, RequestFlag.NONE).pack()
    for octets, status in ((patched(free, 0, b"\x09") + b"?", Status.UNSUPPORTED), (free + b"?", Status.MALFORMED)):
        side = probe.before_hello()
        side.send(octets)
        came = side.answer().status
        expect(came is status, status.name, came.name)


@GROUP.target("KD5", needs=("rdmap",))
def no_session_invalidates_too(probe: TargetProbe) -> None:
    """The COMPLETION with NO_SESSION of a request with INVALIDATE invalidates its STag."""
    side = probe.before_hello()
    lent = side.stream.memory.lend(64)
    side.send(side.load(1, lent, flags=RequestFlag.INVALIDATE))
    answer = side.answer()
    expect(answer.status is Status.NO_SESSION, "NO_SESSION", answer.status.name)
    expect(answer.invalidated_stag == lent.stag, "Send with Invalidate", answer.message)


@GROUP.target("KV9", level=Level.SHOULD)
def message_without_common_header(probe: TargetProbe) -> None:
    """A message of less than 24 octets ends the stream with 0/2/ff."""
    for size in (0, 1, 23):
        side = probe.session()
        side.stream.send(bytes(size))
        side.stream.expect_terminate(TerminateCause.RDMAP_UNSPECIFIED)


@GROUP.target("KV10")
def message_without_common_header_ends_the_stream(probe: TargetProbe) -> None:
    """A message of less than 24 octets ends the stream, one way or another, also in place of HELLO."""
    for side in (probe.session(), probe.before_hello()):
        side.stream.send(bytes([1, 1]) + bytes(21))
        side.stream.expect_end("a message of 23 octets (profile 1)")


@GROUP.target("KV11")
def hello_has_to_come_in_time(probe: TargetProbe) -> None:
    """A stream on which no HELLO comes is ended within the time that the target waits for it."""
    side = probe.before_hello()
    side.stream.expect_end("no HELLO in time (profile 8.2)", within_s=probe.wait_s(probe.setup.hello_timeout_s))


@GROUP.target("KV12", needs=("iwarp",))
def mpa_request_has_to_come_in_time(probe: TargetProbe) -> None:
    """A connection on which no MPA Request comes is closed within the time that the target waits for it."""
    tcp = probe.tcp()
    tcp.expect_close("no MPA Request (profile 8.2)", within_s=probe.wait_s(probe.setup.mpa_timeout_s), silent=True)


@GROUP.target("KV13")
def nothing_before_the_ack(probe: TargetProbe) -> None:
    """A target says nothing on a stream before HELLO."""
    probe.stream().expect_silence("no HELLO was sent")


@GROUP.target("KC4", needs=("iwarp",))
def rtr_is_served(probe: TargetProbe) -> None:
    """A peer that sends an RTR of any kind the Reply names is served; a Send RTR takes none of its credits."""
    for kind in (RtrKind.SEND, RtrKind.WRITE, RtrKind.READ):
        side = probe.before_hello(Startup.peer_to_peer(kind))
        stream = side.stream
        word = stream.reply.word
        if word is None or not word.rtr & kind:
            continue
        if kind is RtrKind.SEND:
            stream.send(b"")
        elif kind is RtrKind.WRITE:
            stream.send_ulpdus(segments.write(0, 0))
        else:
            stream.expects_reads_of_ours += 1
            stream.send_ulpdus(segments.read_request(stream.take_msn(1), ReadRequest(0, 0, 0, 0, 0)))
            response = stream.message("the Response to the Read RTR")
            if response is None or response.opcode is not RdmapOpcode.READ_RESPONSE:
                raise Deviation("a Read Response of no octets (RFC 6581 9.2)", str(response))
        side.open().goes_on()
