"""Peers that say rubbish, too little, too much or nothing: their stream ends and nothing else (S7 to S9, S12)."""

from __future__ import annotations

import random
import socket
import struct

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kbtp.errors import ConnectionLost, PeerMisbehaved
from kbtp.types import TerminateCause as Cause
from kbtp.verbs.api import Access, RdmaWrite, Send, WcOpcode, WcStatus

R, W = Access.REMOTE_READ, Access.REMOTE_WRITE
ALL = R | W | Access.REMOTE_ATOMIC

REQUEST = b"MPA ID Req Frame" + bytes.fromhex("50 02 0004 0004 0004")


REPLY = b"MPA ID Rep Frame" + bytes.fromhex("50 02 0004 0004 0004")


def mutations_of(frame: bytes) -> st.SearchStrategy[bytes]:
    """`frame` with one octet changed and some more behind it."""
    return st.builds(
        lambda at, octet, rest: frame[:at] + bytes([octet]) + frame[at + 1 :] + rest,
        st.integers(14, len(frame) - 1),
        st.integers(0, 255),
        st.binary(max_size=40),
    )


def send_ulpdu(msn: int, payload: bytes = b"", *, mo: int = 0, last: bool = True) -> bytes:
    return struct.pack(">BBIIII", 0x41 if last else 0x01, 0x43, 0, 0, msn, mo) + payload


def write_ulpdu(stag: int, to: int, payload: bytes, *, last: bool = True) -> bytes:
    return struct.pack(">BBIQ", 0xC1 if last else 0x81, 0x40, stag, to) + payload


def read_request(msn: int, size: int, stag: int, to: int = 0) -> bytes:
    return struct.pack(">BBIIIIIQIIQ", 0x41, 0x41, 0, 1, msn, 0, 1, 0, size, stag, to)


@pytest.fixture
def raw(net, server):
    """A raw peer in full operation with `server`."""
    raw = net.raw_to(server.listener.address)
    raw.initiate()
    net.pump(lambda: bool(server.accepted))
    return raw


# --- before the stream ---


@pytest.mark.parametrize(
    "octets",
    [
        b"GET / HTTP/1.1\r\n\r\n",
        b"MPA ID Rep Frame" + bytes(4),
        b"MPA ID Req Frame" + bytes.fromhex("40 09 0000"),
        b"MPA ID Req Frame" + bytes.fromhex("40 01 0201") + bytes(513),
        b"MPA ID Req Frame" + bytes.fromhex("50 02 0003 000000"),
        REQUEST + b"surplus",
        REQUEST + REQUEST,
        bytes(100_000),
    ],
)
def test_m2_m4_m14_m15_what_is_no_request_gets_no_reply(net, server, octets) -> None:
    raw = net.raw_to(server.listener.address)

    raw.send(octets)

    net.pump(lambda: raw.gone)
    assert raw.received == b""
    assert (server.events, server.accepted) == ([], [])


@pytest.mark.parametrize("octets", [b"", b"M", REQUEST[:19], REQUEST[:-1]])
def test_s9_m22_a_half_sent_request_is_dropped_after_the_time_out(net, new_rnic, octets) -> None:
    server = net.side(new_rnic(mpa_request_timeout_s=0.05))
    server.listen()
    raws = [net.raw_to(server.listener.address) for _ in range(20)]
    for raw in raws:
        raw.send(octets)

    net.pump(lambda: all(raw.gone for raw in raws))

    assert all(raw.received == b"" for raw in raws)
    assert (server.events, server.accepted) == ([], [])
    late = net.raw_to(server.listener.address)
    late.initiate()


def test_a_connection_that_ends_before_it_is_accepted_just_vanishes(net, server) -> None:
    for linger in (False, True):
        raw = net.raw_to(server.listener.address)
        raw.send(REQUEST[:10])
        if linger:
            raw.sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        net.raws.remove(raw)
        raw.close()
    net.settle()

    assert (server.events, server.accepted) == ([], [])


def test_m16_a_request_in_single_octets(net, server) -> None:
    raw = net.raw_to(server.listener.address)
    for octet in REQUEST:
        raw.send(bytes([octet]))

    net.pump(lambda: bool(raw.received))
    assert raw.received.startswith(b"MPA ID Rep Frame")


# --- in the stream ---


@pytest.mark.parametrize(
    ("ulpdu", "cause"),
    [
        (b"\x41", Cause.DDP_LOCAL_CATASTROPHIC),
        (b"\x40" + send_ulpdu(1)[1:], Cause.DDP_UNTAGGED_INVALID_VERSION),
        (b"\x41\x83" + send_ulpdu(1)[2:], Cause.RDMAP_INVALID_VERSION),
        (b"\x41\x4c" + send_ulpdu(1)[2:], Cause.RDMAP_UNEXPECTED_OPCODE),
        (send_ulpdu(2, b"x"), Cause.DDP_MSN_OUT_OF_RANGE),
        (send_ulpdu(1, b"x", mo=1), Cause.DDP_INVALID_MO),
        (send_ulpdu(1, bytes(1025)), Cause.DDP_MESSAGE_TOO_LONG),
        (write_ulpdu(0x1234, 0, b"x"), Cause.DDP_INVALID_STAG),
        (read_request(1, 1, 0x1234), Cause.RDMAP_INVALID_STAG),
        (read_request(1, 1, 0x1234)[:-1], Cause.RDMAP_UNSPECIFIED),
    ],
)
def test_s7_what_breaks_the_protocol_ends_its_own_stream_with_a_terminate(
    net, server, raw, connect_pair, caplog, ulpdu, cause
) -> None:
    bystander = connect_pair(server=server)

    raw.send_ulpdu(ulpdu)

    ended = server.wait_end(server.accepted[0])
    assert isinstance(ended.reason, PeerMisbehaved)
    assert ended.cause is cause
    raw.sock.shutdown(socket.SHUT_WR)
    told = raw.wait_terminate()
    assert (told.layer, told.etype, told.code) == cause.value
    assert str(cause) in str(ended.reason)
    assert not [record for record in caplog.records if record.levelname == "WARNING"], (
        "whoever gets StreamEnded logs it"
    )
    bystander.c.post([Send(1, b"unharmed")])
    bystander.server.wait(bystander.s, 1)


def test_f6_a_bad_crc(net, server, raw) -> None:
    fpdu = bytearray(raw.encoder.encode([send_ulpdu(1, b"payload")]))
    fpdu[-1] ^= 1

    raw.send(bytes(fpdu))

    assert server.wait_end(server.accepted[0]).cause is Cause.MPA_CRC
    raw.sock.shutdown(socket.SHUT_WR)
    assert raw.wait_terminate().code == 2
    assert server.received(server.accepted[0]) == []


def test_d29_d31_what_follows_an_error_has_no_effect(net, server, raw) -> None:
    memory = bytearray(16)
    region = server.region(memory, W)

    raw.send(
        b"".join(
            raw.encoder.encode([ulpdu])
            for ulpdu in (
                write_ulpdu(region.stag, 0, b"good"),
                write_ulpdu(region.stag, 14, b"bad"),
                write_ulpdu(region.stag, 8, b"late"),
                send_ulpdu(1, b"late"),
            )
        )
    )

    assert server.wait_end(server.accepted[0]).cause is Cause.DDP_BASE_OR_BOUNDS
    assert memory == b"good" + bytes(12)
    assert server.received(server.accepted[0]) == []


def test_s8_r25_a_flood_of_read_requests_ends_that_stream_only(net, server, raw, connect_pair) -> None:
    bystander = connect_pair(server=server)
    region = server.region(1 << 20, R)
    raw.reading = False

    raw.send(b"".join(raw.encoder.encode([read_request(msn, 1 << 20, region.stag)]) for msn in range(1, 100)))

    assert server.wait_end(server.accepted[0]).cause is Cause.DDP_NO_BUFFER
    bystander.c.post([Send(1, b"unharmed")])
    bystander.server.wait(bystander.s, 1)


def test_r43_the_terminate_arrives_whole_although_unread_input_remains(net, server, raw) -> None:
    """Closing at once would send a RST, which overtakes the Terminate (RFC 5040 6.2.1)."""
    raw.reading = False
    raw.send(raw.encoder.encode([send_ulpdu(9, b"x")]) + bytes(3 << 20))
    server.wait_end(server.accepted[0])

    raw.send(bytes(1 << 20))
    raw.sock.shutdown(socket.SHUT_WR)
    raw.reading = True

    assert raw.wait_terminate().code == Cause.DDP_MSN_OUT_OF_RANGE.code


def test_the_goodbye_to_a_peer_that_never_closes_is_bounded(net, new_rnic) -> None:
    server = net.side(new_rnic(goodbye_s=0.05))
    server.listen()
    raw = net.raw_to(server.listener.address)
    raw.initiate()
    raw.send_ulpdu(send_ulpdu(9, b"x"))
    raw.wait_terminate()

    def broken() -> bool:
        try:
            raw.sock.send(b"still talking")
        except OSError:
            return True
        return False

    net.pump(broken)


def test_r41_a_terminate_of_the_peer_is_reported_and_not_answered(net, server, raw) -> None:
    header = bytes.fromhex("c140 00001234 0000000000000010")
    raw.send_ulpdu(struct.pack(">BBIIII", 0x41, 0x47, 0, 2, 1, 0), bytes.fromhex("1101 c000 001e"), header)

    ended = server.wait_end(server.accepted[0])

    assert isinstance(ended.reason, ConnectionLost)
    assert ended.cause is None
    told = ended.terminate
    assert (told.layer, told.etype, told.code, told.ddp_segment_length, told.ddp_header) == (1, 1, 1, 30, header)
    raw.sock.shutdown(socket.SHUT_WR)
    net.pump(lambda: raw.gone)
    assert (raw.fin, raw.ulpdus()) == (True, [])
    assert "DDP_BASE_OR_BOUNDS" in str(ended.reason)


# --- peers that go, or stall ---


def test_f26_an_end_between_messages_is_orderly(net, server, raw) -> None:
    raw.send_ulpdu(send_ulpdu(1, b"bye"))

    raw.sock.shutdown(socket.SHUT_WR)

    assert server.wait_end(server.accepted[0]).reason is None
    assert server.received(server.accepted[0]) == [b"bye"]
    net.pump(lambda: raw.gone)
    assert raw.fin


@pytest.mark.parametrize(
    "octets",
    [
        b"\x00",
        b"\x00\x16" + send_ulpdu(1)[:9],
    ],
)
def test_an_end_inside_an_fpdu_is_a_loss(net, server, raw, octets) -> None:
    raw.send(octets)

    raw.sock.shutdown(socket.SHUT_WR)

    assert "in the middle of a message" in str(server.wait_end(server.accepted[0]).reason)


def test_an_end_between_the_segments_of_a_message_is_a_loss(net, server, raw) -> None:
    raw.send_ulpdu(send_ulpdu(1, b"half", last=False))

    raw.sock.shutdown(socket.SHUT_WR)

    assert "in the middle of a message" in str(server.wait_end(server.accepted[0]).reason)
    assert [done.status for done in server.completions(server.accepted[0])] == [WcStatus.FLUSHED] * 8


def test_a_reset_in_the_middle_of_a_message(net, server, raw, connect_pair) -> None:
    bystander = connect_pair(server=server)
    raw.send(raw.encoder.encode([send_ulpdu(1, bytes(100))])[:50])
    net.settle()

    raw.sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    net.raws.remove(raw)
    raw.close()

    assert "Connection reset by peer" in str(server.wait_end(server.accepted[0]).reason)
    bystander.c.post([Send(1, b"unharmed")])
    bystander.server.wait(bystander.s, 1)


def test_a_peer_that_stops_reading_holds_nobody_up(net, server, raw, connect_pair) -> None:
    bystander = connect_pair(server=server)
    raw.send_ulpdu(send_ulpdu(1))
    stream = server.accepted[0]
    server.wait(stream, 1)
    raw.reading = False
    octets = np.random.default_rng(9).bytes(64 << 20)

    stream.post([RdmaWrite(1, (server.sge(octets),), 0x5555, 0)])
    stream.post([Send(2, b"behind")])
    for index in range(8):
        bystander.c.post([Send(index, b"go on")])
        bystander.server.wait(bystander.s, index + 1)

    assert len(server.completions(stream)) == 1, "the Write cannot have left whole"
    raw.reading = True
    assert [done.opcode for done in server.wait(stream, 3)][1:] == [WcOpcode.RDMA_WRITE, WcOpcode.SEND]
    net.pump(lambda: len(raw.received) > len(octets))
    ulpdus = raw.ulpdus()
    assert b"".join(ulpdu[14:] for ulpdu in ulpdus[:-1]) == octets
    assert ulpdus[-1][18:] == b"behind"


def test_a_flooding_stream_does_not_starve_the_others(net, server, raw, connect_pair) -> None:
    """While one peer's input never ends, another's exchange goes on poll by poll."""
    bystander = connect_pair(server=server)
    region = server.region(1 << 16, W)
    fpdu = raw.encoder.encode([write_ulpdu(region.stag, 0, bytes(40_000))])
    flood = memoryview(fpdu * 200)

    def pour() -> None:
        nonlocal flood
        try:
            sent = raw.sock.send(flood)
            flood = memoryview(bytes(flood[sent:]) + fpdu * (sent // len(fpdu)))
        except BlockingIOError:
            pass

    exchanges = 0
    for _ in range(2000):
        pour()
        server.poll()
        bystander.client.poll()
        if len(server.completions(bystander.s)) == exchanges:
            if exchanges == 8:
                break
            bystander.c.post([Send(exchanges, b"x")])
            exchanges += 1
    assert exchanges == 8


# --- anything at all ---


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_s12_random_start_up_octets_never_crash_either_side(net, server, data) -> None:
    octets = data.draw(st.one_of(st.binary(max_size=600), mutations_of(REQUEST), mutations_of(REPLY)))
    to_server = net.raw_to(server.listener.address)
    raw_listener = net.raw_listener()
    stream = server.connect(raw_listener.getsockname())
    to_client = net.raw_from(raw_listener)

    for raw in (to_server, to_client):
        raw.send(octets)
        raw.sock.shutdown(socket.SHUT_WR)

    net.pump(lambda: to_server.gone and (server.ended(stream) or server.rejected(stream)))
    net.pump(lambda: all(server.ended(accepted) for accepted in server.accepted))


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(octets=st.binary(min_size=1, max_size=400), valid_first=st.booleans())
def test_s12_random_octets_never_crash_nor_write_outside_of_regions(net, server, octets, valid_first) -> None:
    memory = np.zeros(64, np.uint64)
    region = server.region(memory[16:48], ALL)
    raw = net.raw_to(server.listener.address)
    raw.initiate()
    before = len(server.accepted)
    if valid_first:
        raw.send_ulpdu(write_ulpdu(region.stag, 0, b"ok"))

    raw.send(octets)
    raw.sock.shutdown(socket.SHUT_WR)
    net.pump(lambda: raw.gone and all(server.ended(stream) for stream in server.accepted))

    assert before <= len(server.accepted)
    assert not memory[:16].any()
    assert not memory[48:].any()
    region.revoke()


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(seed=st.integers(0, 1 << 32))
def test_s12_well_framed_random_segments_never_crash_nor_write_outside_of_regions(net, server, seed) -> None:
    draw = random.Random(seed)
    memory = np.zeros(64, np.uint64)
    region = server.region(memory[16:48], ALL)
    raw = net.raw_to(server.listener.address)
    raw.initiate()
    for _ in range(10):
        ulpdu = bytearray(
            draw.choice(
                [
                    write_ulpdu(region.stag, draw.randrange(0, 300), draw.randbytes(draw.randrange(0, 100))),
                    send_ulpdu(draw.randrange(0, 4), draw.randbytes(20), mo=draw.choice([0, 0, 7])),
                    read_request(draw.randrange(0, 3), draw.randrange(0, 300), region.stag, draw.randrange(0, 300)),
                ]
            )
        )
        if draw.random() < 0.5:
            ulpdu[draw.randrange(len(ulpdu))] ^= 1 << draw.randrange(8)
        raw.send_ulpdu(bytes(ulpdu))

    raw.sock.shutdown(socket.SHUT_WR)
    net.pump(lambda: raw.gone and all(server.ended(stream) for stream in server.accepted))

    assert not memory[:16].any()
    assert not memory[48:].any()
    region.revoke()
