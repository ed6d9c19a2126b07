"""DDP as a peer sees it: checklist D (RFC 5041). `end` is an active stream, its peer is written out by hand."""

from __future__ import annotations

from typing import Any

import pytest

from kbtp.iwarp.ddp import cut
from kbtp.iwarp.events import Failed, Received, SendCompleted, WriteCompleted
from kbtp.limits import PADDED_PAYLOAD_MAX_BYTES
from kbtp.types import TerminateCause

ULPDU_128_UNTAGGED, ULPDU_128_TAGGED = 110, 114  # payload of a segment at MULPDU 128


def region_of(end: Any) -> bytearray:
    octets: bytearray = next(iter(end.memory.regions.values())).octets
    return octets


# --- sending ---


def test_d1_d2_d4_d9_d10_d12_d13_a_send_in_segments(new_end: Any) -> None:
    end, payload = new_end(mulpdu=128), bytes(range(250))
    end.stream.post_send(7, [payload[:100], payload[100:101], b"", payload[101:]], invalidate_stag=0xCAFE)
    seen = end.says()
    assert [(s.mo, len(s.payload), s.last) for s in seen] == [(0, 110, False), (110, 110, False), (220, 30, True)]
    assert {(s.opcode, s.qn, s.msn, s.ulp_word) for s in seen} == {(4, 0, 1, 0xCAFE)}
    assert b"".join(s.payload for s in seen) == payload
    assert all(len(s.ulpdu) <= 128 for s in seen)
    assert end.events() == [SendCompleted(7)]


def test_d1_d2_d11_d12_a_write_in_segments(new_end: Any) -> None:
    end, payload = new_end(mulpdu=128), bytes(range(250))
    end.stream.post_write(7, [payload], 0xCAFE, 0xFFFFFFF0)
    seen = end.says()
    assert [(s.to, len(s.payload), s.last) for s in seen] == [
        (0xFFFFFFF0, 114, False),
        (0xFFFFFFF0 + 114, 114, False),
        (0xFFFFFFF0 + 228, 22, True),
    ]
    assert {(s.opcode, s.stag) for s in seen} == {(0, 0xCAFE)}
    assert b"".join(s.payload for s in seen) == payload
    assert end.events() == [WriteCompleted(7)]


@pytest.mark.parametrize(
    ("size", "header", "cuts"), [(2048, 18, [(0, 1482), (1482, 566)]), (2048, 14, [(0, 1486), (1486, 562)])]
)
def test_d12_the_examples_of_rfc_5041_5_2(size: int, header: int, cuts: list[tuple[int, int]]) -> None:
    assert [(offset, length) for offset, length, _ in cut(size, 1500 - header)] == cuts


@pytest.mark.parametrize(
    ("size", "cuts"),
    [
        (255, [255]),
        (256, [256]),
        (257, [256, 1]),
        (2856, [1428, 1428]),
        (2857, [1428, 1428, 1]),
        (3111, [1428, 1428, 255]),
        (4099, [1428, 1428, 1240, 3]),
    ],
)
def test_only_a_short_segment_needs_pad(size: int, cuts: list[int]) -> None:
    assert [length for _, length, _ in cut(size, 1428, PADDED_PAYLOAD_MAX_BYTES)] == cuts


def test_the_longest_segment_needs_no_pad() -> None:
    assert [length for _, length, _ in cut(65535, 64754, PADDED_PAYLOAD_MAX_BYTES)] == [64752, 780, 3]


PAYLOAD = bytes(at & 0xFF for at in range(3301))


@pytest.mark.parametrize(
    ("crc", "sent", "written"),
    [
        (True, [1436, 1436, 428, 1], [1440, 1440, 420, 1]),
        (False, [1436, 1436, 429], [1440, 1440, 421]),
    ],
)
def test_the_octets_that_make_a_long_payload_odd_are_a_segment_of_their_own(
    new_end: Any, new_memory: Any, wire: Any, crc: bool, sent: list[int], written: list[int]
) -> None:
    end = new_end(mulpdu=1454, crc=crc, memory=new_memory(len(PAYLOAD)))
    [(stag, region)] = end.memory.regions.items()
    end.stream.post_send(1, [PAYLOAD])
    end.stream.post_write(2, [PAYLOAD], 1, 0)
    end.hears(wire.read_request(1, 9, 0, len(PAYLOAD), stag, region.base_to))
    seen = end.says()
    for opcode, sizes in ((3, sent), (0, written), (2, written)):
        segments = [s for s in seen if s.opcode == opcode]
        assert [len(s.payload) for s in segments] == sizes
        assert b"".join(s.payload for s in segments) == PAYLOAD
        assert [s.last for s in segments] == [False] * (len(sizes) - 1) + [True]


@pytest.mark.parametrize("size", [110, 220])
def test_d2_a_message_that_fills_its_segments(new_end: Any, size: int) -> None:
    end = new_end(mulpdu=128)
    end.stream.post_send(1, [bytes(size)])
    assert [(len(s.payload), s.last) for s in end.says()] == [(110, at == size) for at in range(110, size + 1, 110)]


def test_d6_d8_msn_counts_per_queue_from_1(end: Any) -> None:
    end.stream.post_send(1, [b"a"])
    end.stream.post_read(2, memoryview(bytearray(4)), 1, 0)
    end.stream.post_send(3, [b"b"])
    end.stream.post_write(4, [b"w"], 1, 0)
    end.stream.post_immediate(5, bytes(8))
    end.stream.post_fetch_add(6, 1, 0, 1, 0)
    assert [(s.qn, s.msn) for s in end.says()] == [(0, 1), (1, 1), (0, 2), (None, None), (0, 3), (1, 2)]


def test_d7_msn_wraps_both_ways(new_end: Any, wire: Any, stag: int, base_to: int) -> None:
    end = new_end(initial_msn={0: 0xFFFFFFFF, 1: 0xFFFFFFFF, 3: 0xFFFFFFFF})
    for wr_id in range(2):
        end.stream.post_send(wr_id, [b"x"])
        end.stream.post_fetch_add(wr_id, 1, 0, 1, 0)
        end.receive(wr_id)
    assert [s.msn for s in end.says()] == [0xFFFFFFFF, 0xFFFFFFFF, 0, 0]
    events = end.hears(
        wire.send(0xFFFFFFFF, b"one"),
        wire.send(0, b"two"),
        wire.atomic_response(0xFFFFFFFF, 0, 5),
        wire.atomic_response(0, 1, 6),
        wire.read_request(0xFFFFFFFF, 9, 0, 1, stag, base_to),
        wire.read_request(0, 9, 0, 1, stag, base_to),
    )
    assert [e.length for e in events if isinstance(e, Received)] == [3, 3]
    assert not end.stream.failed and len(end.says()) == 2


def test_d14_zero_length_messages_are_one_last_segment(end: Any) -> None:
    end.stream.post_send(1, [])
    end.stream.post_send(2, [b"", b""])
    end.stream.post_write(3, [], 5, 6)
    assert [(s.last, s.payload) for s in end.says()] == [(True, b"")] * 3


def test_d16_r50_messages_leave_in_submission_order(new_end: Any) -> None:
    end = new_end(mulpdu=128)
    for wr_id in range(6):
        post = end.stream.post_send if wr_id % 2 else lambda w, p: end.stream.post_write(w, p, 9, 0)
        post(wr_id, [bytes([wr_id]) * 300])
    assert [s.payload[0] for s in end.says()] == [n for n in range(6) for _ in range(3)]
    assert [e.wr_id for e in end.events()] == list(range(6))


def test_d12_a_new_mulpdu_holds_from_the_next_message(new_end: Any) -> None:
    end = new_end(mulpdu=128)
    end.stream.post_send(1, [bytes(220)])
    end.stream.post_send(2, [bytes(220)])
    (first,) = end.says(limit_bytes=1)
    end.stream.set_mulpdu(256)
    assert [len(s.payload) for s in (first, *end.says())] == [110, 110, 220]


# --- receiving ---


def test_d3_reserved_bits_are_ignored(end: Any, wire: Any, stag: int, base_to: int) -> None:
    end.receive(1)
    send, write = bytearray(wire.send(1, b"abc")), bytearray(wire.write(stag, base_to, b"\xee"))
    for ulpdu in (send, write):
        ulpdu[0] |= 0x3C
        ulpdu[1] |= 0x30
    assert end.hears(bytes(send), bytes(write)) == [Received(1, 3, None, False)]
    assert region_of(end)[0] == 0xEE


@pytest.mark.parametrize("version", [0, 2, 3])
def test_d5_ddp_version(new_end: Any, wire: Any, version: int) -> None:
    for ulpdu, expected in ((wire.write(1, 0, b"x"), (1, 1, 4)), (wire.send(1), (1, 2, 6))):
        assert new_end().refuses(bytes([ulpdu[0] & 0xFC | version]) + ulpdu[1:]) == expected


def test_d15_zero_length_write_needs_no_stag_r11(end: Any, wire: Any) -> None:
    assert end.hears(wire.write(0xBAD, 0xFFFFFFFFFFFFFFFF)) == []
    assert not end.stream.failed


def test_d17_d18_a_send_in_segments_is_delivered_once(end: Any, wire: Any) -> None:
    buffer = end.receive(5, 100)
    assert end.hears(wire.send(1, b"abc", last=False), wire.send(1, b"", mo=3, last=False)) == []
    assert end.hears(wire.send(1, b"defg", mo=3)) == [Received(5, 7, None, False)]
    assert buffer[:7] == b"abcdefg" and not any(buffer[7:])


@pytest.mark.parametrize("mos", [(4,), (64,), (0xFFFFFFF0,), (0, 4), (0, 2), (0, 0)])
def test_d19_d23_any_mo_but_the_next_is_1_2_04(end: Any, wire: Any, mos: tuple[int, ...]) -> None:
    end.receive(1)
    assert end.refuses(*(wire.send(1, b"abc", mo=mo, last=False) for mo in mos)) == (1, 2, 4)


@pytest.mark.parametrize("qn", [1, 2, 3, 4, 7, 0xFFFFFFFF])
def test_d20_r5_a_send_on_another_queue_is_1_2_01(end: Any, wire: Any, qn: int) -> None:
    end.receive(1)
    assert end.refuses(wire.untagged(wire.SEND, qn, 1, b"x")) == (1, 2, 1)


def test_d21_no_receive_buffer_is_1_2_02(end: Any, wire: Any) -> None:
    end.receive(1)
    end.stream.receive_data(wire.fpdu(wire.send(1, b"x")))
    assert end.refuses(wire.send(2, b"x")) == (1, 2, 2)


@pytest.mark.parametrize("msn", [0, 2, 3, 0xFFFFFFFF])
def test_d22_any_msn_but_the_next_is_1_2_03(end: Any, wire: Any, msn: int) -> None:
    end.receive(1)
    end.receive(2)
    assert end.refuses(wire.send(msn, b"x")) == (1, 2, 3)
    assert [type(e) for e in end.events()] == [Failed]


def test_d22_a_finished_msn_is_1_2_03(end: Any, wire: Any) -> None:
    end.receive(1)
    end.receive(2)
    assert end.refuses(wire.send(1, b"x"), wire.send(1, b"x")) == (1, 2, 3)


def test_d24_r30_past_the_end_of_the_buffer_is_1_2_05(end: Any, wire: Any) -> None:
    memory = bytearray(b"\xaa" * 12)
    end.stream.post_receive(1, memoryview(memory)[:8])
    assert end.refuses(wire.send(1, b"x" * 8, last=False), wire.send(1, b"y", mo=8)) == (1, 2, 5)
    assert memory == b"x" * 8 + b"\xaa" * 4


def test_d24_the_buffer_can_be_filled_to_the_octet(end: Any, wire: Any) -> None:
    buffer = end.receive(1, 8)
    assert end.hears(wire.send(1, b"12345678")) == [Received(1, 8, None, False)]
    assert buffer == b"12345678"


@pytest.mark.parametrize(
    ("to", "length", "cause"),
    [
        (0x1000 - 1, 1, (1, 1, 1)),
        (0x1000 - 1, 2, (1, 1, 1)),
        (0x1100, 1, (1, 1, 1)),
        (0x10FF, 2, (1, 1, 1)),
        (0x0FFF, 258, (1, 1, 1)),
        (0xFFFFFFFFFFFFFFFF, 2, (1, 1, 3)),
    ],
)
def test_d26_d28_d29_d34_write_outside_the_range(
    end: Any, wire: Any, stag: int, to: int, length: int, cause: tuple[int, int, int]
) -> None:
    before, segment = bytes(region_of(end)), wire.write(stag, to, bytes(length))
    end.stream.receive_data(wire.fpdu(segment))
    (terminate,) = end.says()
    assert (terminate.payload[0] >> 4, terminate.payload[0] & 0xF, terminate.payload[1]) == cause
    # M and D are set, R is clear; the segment's length and its 14-octet header follow.
    assert terminate.payload[2:] == b"\xc0\x00" + len(segment).to_bytes(2, "big") + segment[:14]
    assert region_of(end) == before


def test_d26_the_whole_range_can_be_written(end: Any, wire: Any, stag: int, base_to: int) -> None:
    assert end.hears(wire.write(stag, base_to, b"\x55" * 256)) == []
    assert region_of(end) == b"\x55" * 256


def test_d25_unknown_stag_is_1_1_00(end: Any, wire: Any, base_to: int) -> None:
    assert end.refuses(wire.write(0xBAD, base_to, b"x")) == (1, 1, 0)


def test_d27_stag_of_another_stream_is_1_1_02(
    new_end: Any, new_memory: Any, wire: Any, stag: int, base_to: int
) -> None:
    end = new_end(memory=new_memory(associated=False))
    assert end.refuses(wire.write(stag, base_to, b"x")) == (1, 1, 2)


def test_s4_write_without_the_right_is_1_1_00(
    new_end: Any, new_memory: Any, wire: Any, stag: int, base_to: int
) -> None:
    end = new_end(memory=new_memory(rights=frozenset({"read"})))
    assert end.refuses(wire.write(stag, base_to, b"x")) == (1, 1, 0)


def test_d34_an_untagged_error_quotes_18_octets(end: Any, wire: Any) -> None:
    segment = wire.send(2, b"hello")
    end.stream.receive_data(wire.fpdu(segment))
    (terminate,) = end.says()
    assert terminate.payload == b"\x12\x03\xc0\x00" + b"\x00\x17" + segment[:18]


def test_d30_d31_f7_r42_after_an_error_everything_is_dropped(end: Any, wire: Any, stag: int, base_to: int) -> None:
    buffer = end.receive(1)
    end.stream.post_send(2, [b"never"])
    end.stream.receive_data(wire.fpdu(wire.write(stag, base_to, b"\x77", last=False)))
    end.stream.receive_data(
        b"".join(
            map(
                wire.fpdu,
                (
                    wire.write(stag, base_to - 1, b"\x88", last=False),  # the first error
                    wire.write(stag, base_to + 1, b"\x99"),
                    wire.send(1, b"late"),
                    wire.send(9, b"a second error"),
                    wire.terminate(0, 0, 0),
                ),
            )
        )
    )
    end.stream.receive_data(wire.fpdu(wire.send(1, b"later still")))
    assert region_of(end)[:2] == b"\x77\x01" and not any(buffer)
    (failed,) = end.events()
    assert failed.error.cause is TerminateCause.DDP_BASE_OR_BOUNDS
    assert end.terminates() == (1, 1, 1)
    assert end.says() == [] and end.stream.received_terminate is None


def test_d32_s5_a_revoked_stag_is_refused_in_mid_message(end: Any, wire: Any, stag: int, base_to: int) -> None:
    end.hears(wire.write(stag, base_to, b"\x77", last=False))
    end.memory.regions[stag].valid = False
    assert end.refuses(wire.write(stag, base_to + 1, b"\x88")) == (1, 1, 0)
    assert region_of(end)[:2] == b"\x77\x01"


@pytest.mark.parametrize("ulpdu", [b"\x41", b"\xc1", b"\x41\x43" + bytes(15), b"\xc1\x40" + bytes(11), b""])
def test_d33_shorter_than_its_header_is_1_0_00_without_headers(end: Any, wire: Any, ulpdu: bytes) -> None:
    end.stream.receive_data(wire.fpdu(ulpdu))
    (terminate,) = end.says()
    assert terminate.payload == bytes.fromhex("10000000")


# --- messages inside messages ---


def test_a_tagged_and_an_untagged_message_may_be_open_at_once(end: Any, wire: Any, stag: int, base_to: int) -> None:
    end.receive(1)
    assert end.hears(
        wire.send(1, b"ab", last=False),
        wire.write(stag, base_to, b"\x01", last=False),
        wire.send(1, b"cd", mo=2),
        wire.write(stag, base_to + 1, b"\x02"),
    ) == [Received(1, 4, None, False)]


def test_a_request_inside_a_send_is_refused(end: Any, wire: Any) -> None:
    end.receive(1)
    assert end.refuses(wire.send(1, b"ab", last=False), wire.read_request(1, 1, 0, 0, 0, 0)) == (0, 2, 6)


def test_another_kind_of_send_inside_a_send_is_refused(end: Any, wire: Any) -> None:
    end.receive(1)
    other = wire.untagged(wire.SEND_SE, 0, 1, b"cd", mo=2)
    assert end.refuses(wire.send(1, b"ab", last=False), other) == (0, 2, 6)


def test_a_read_response_inside_a_write_is_refused(end: Any, wire: Any, stag: int, base_to: int) -> None:
    end.stream.post_read(1, memoryview(bytearray(4)), 1, 0)
    (request,) = end.says()
    sink_stag = int.from_bytes(request.payload[:4], "big")
    response = wire.read_response(sink_stag, 0, b"data")
    assert end.refuses(wire.write(stag, base_to, b"x", last=False), response) == (0, 2, 6)


def test_another_stag_inside_a_write_is_refused(end: Any, wire: Any, new_region: Any, stag: int, base_to: int) -> None:
    end.memory.regions[7] = new_region(bytearray(8))
    assert end.refuses(wire.write(stag, base_to, b"x", last=False), wire.write(7, 0, b"y")) == (1, 1, 0)
