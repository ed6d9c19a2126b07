"""RDMAP as a peer sees it: checklist R (RFC 5040), and the rules of the start of full operation (M21, E17 to E23)."""

from __future__ import annotations

from typing import Any

import pytest

from kbtp.errors import ApiMisuse
from kbtp.iwarp.events import (
    Failed,
    ReadCompleted,
    Received,
    SendCompleted,
    TerminateReceived,
    WriteCompleted,
)
from kbtp.iwarp.mpa import ALL_RTR_KINDS, RtrKind
from kbtp.iwarp.rdmap import ReadRequest
from kbtp.types import TerminateCause, TerminateInfo


def sink_of(request: Any) -> tuple[int, int]:
    """Sink STag and TO of a Read Request that was seen."""
    parsed = ReadRequest.parse(request.payload)
    return parsed.sink_stag, parsed.sink_to


# --- who may speak first ---


def test_m21_the_passive_side_is_silent_until_an_fpdu_came(new_end: Any, wire: Any) -> None:
    end = new_end(active=False, tx_markers=True)
    end.stream.post_send(1, [b"early"])
    assert not end.stream.wants_to_send() and end.stream.data_to_send(1 << 20) == [] and end.events() == []
    fpdu = wire.fpdu(wire.write(0, 0))
    end.stream.receive_data(fpdu[:-1])
    assert end.stream.data_to_send(1 << 20) == []
    end.stream.receive_data(fpdu[-1:])
    assert end.stream.wants_to_send() and len(end.stream.data_to_send(1 << 20)) == 1
    assert end.events() == [SendCompleted(1)]


def test_m21_a_first_fpdu_with_a_bad_crc_is_answered_by_the_terminate_alone(new_end: Any, wire: Any) -> None:
    end = new_end(active=False)
    end.stream.post_send(1, [b"early"])
    end.stream.receive_data(wire.fpdu(wire.write(0, 0))[:-1] + b"\xff")
    assert end.terminates() == (2, 0, 2)


def test_m21_a_local_terminate_before_any_fpdu_says_nothing(new_end: Any) -> None:
    end = new_end(active=False)
    end.stream.terminate(TerminateCause.RDMAP_UNSPECIFIED)
    assert end.says() == [] and end.stream.ended and end.stream.sent_cause is None


@pytest.mark.parametrize(
    ("kind", "opcode", "vector"),
    [
        (RtrKind.SEND, 3, "41430000000000000000000000010000" + "0000"),
        (RtrKind.WRITE, 0, "c140" + "00" * 12),
        (RtrKind.READ, 1, "414100000000000000010000000100000000" + "00" * 28),
    ],
)
def test_e17_the_rtr_leaves_before_all_else(new_end: Any, kind: RtrKind, opcode: int, vector: str) -> None:
    end = new_end(rtr=kind)
    end.stream.post_write(1, [b"data"], 1, 0)
    rtr, write = end.says()
    assert (rtr.opcode, rtr.ulpdu.hex()) == (opcode, vector)
    assert write.payload == b"data"
    assert end.events() == [WriteCompleted(1)]


def test_e23_after_a_send_rtr_queue_0_goes_on_with_msn_2(new_end: Any) -> None:
    end = new_end(rtr=RtrKind.SEND)
    end.stream.post_send(1, [b"x"])
    assert [s.msn for s in end.says()] == [1, 2]
    assert end.events() == [SendCompleted(1)]


def test_e22_e23_a_read_rtr_takes_an_ord_slot_and_is_hidden(new_end: Any, wire: Any) -> None:
    end = new_end(rtr=RtrKind.READ, ord_=1)
    end.stream.post_read(1, memoryview(bytearray(4)), 9, 0)
    (rtr,) = end.says()
    assert (rtr.qn, rtr.msn) == (1, 1)
    assert end.hears(wire.read_response(0, 0)) == []
    (request,) = end.says()
    assert (request.qn, request.msn) == (1, 2)


def test_e22_a_read_rtr_leaves_even_with_ord_0(new_end: Any, wire: Any) -> None:
    end = new_end(rtr=RtrKind.READ, ord_=0)
    assert len(end.says()) == 1
    assert end.hears(wire.read_response(0, 0)) == [] and not end.stream.failed
    assert end.stream.flush() == []


def test_e21_e22_a_read_rtr_is_answered_and_opens_the_passive_side(new_end: Any, wire: Any) -> None:
    end = new_end(active=False, rtr=ALL_RTR_KINDS)
    end.stream.post_send(1, [b"server first"])
    end.hears(wire.read_request(1, 0, 0, 0, 0, 0))
    response, send = end.says()
    assert (response.opcode, response.stag, response.to, response.payload, response.last) == (2, 0, 0, b"", True)
    assert send.payload == b"server first"


def test_e21_a_send_rtr_is_hidden_and_uses_no_receive_buffer(new_end: Any, wire: Any) -> None:
    end = new_end(active=False, rtr=ALL_RTR_KINDS)
    end.receive(1)
    assert end.hears(wire.send(1)) == [] and not end.stream.failed
    assert end.hears(wire.send(2)) == [Received(1, 0, None, False)]


@pytest.mark.parametrize(
    ("active", "rtr"), [(False, RtrKind.NONE), (False, RtrKind.WRITE | RtrKind.READ), (True, RtrKind.SEND)]
)
def test_e21_without_a_send_rtr_agreed_the_first_empty_send_is_the_ulps(
    new_end: Any, wire: Any, active: bool, rtr: RtrKind
) -> None:
    end = new_end(active=active, rtr=rtr)
    end.receive(1)
    assert end.hears(wire.send(1)) == [Received(1, 0, None, False)]


@pytest.mark.parametrize("first", ["write", "send"])
def test_e21_only_the_very_first_message_can_be_the_rtr(new_end: Any, wire: Any, first: str) -> None:
    end = new_end(active=False, rtr=ALL_RTR_KINDS)
    end.receive(1)
    end.receive(2)
    if first == "write":
        assert end.hears(wire.write(0, 0), wire.send(1)) == [Received(1, 0, None, False)]
    else:
        events = end.hears(wire.send(1, b"x"), wire.send(2))
        assert events == [Received(1, 1, None, False), Received(2, 0, None, False)]


@pytest.mark.parametrize(
    ("failure", "code"), [(TerminateCause.MPA_INSUFFICIENT_IRD, 6), (TerminateCause.MPA_NO_MATCHING_RTR, 7)]
)
def test_e11_e18_a_failed_negotiation_sends_the_terminate_alone(
    new_end: Any, failure: TerminateCause, code: int
) -> None:
    end = new_end(failure=failure)
    (failed,) = end.events()
    assert failed.error.cause is failure
    assert end.stream.wants_to_send()
    assert end.terminates() == (2, 0, code)


# --- control octet ---


@pytest.mark.parametrize("version", [0, 2, 3])
def test_r2_rdmap_version(end: Any, wire: Any, version: int) -> None:
    ulpdu = bytearray(wire.send(1))
    ulpdu[1] = ulpdu[1] & 0x3F | version << 6
    assert end.refuses(bytes(ulpdu)) == (0, 2, 5)


@pytest.mark.parametrize("opcode", [0xC, 0xD, 0xE, 0xF])
@pytest.mark.parametrize("tagged", [False, True])
def test_r3_unknown_opcode(end: Any, wire: Any, opcode: int, tagged: bool) -> None:
    ulpdu = wire.tagged(opcode, 1, 0) if tagged else wire.untagged(opcode, 0, 1)
    assert end.refuses(ulpdu) == (0, 2, 6)


@pytest.mark.parametrize("opcode", range(12))
def test_r4_wrong_t_bit(end: Any, wire: Any, opcode: int) -> None:
    tagged = opcode in (wire.WRITE, wire.READ_RESPONSE)
    ulpdu = wire.untagged(opcode, 0, 1, b"x") if tagged else wire.tagged(opcode, 1, 0, b"x")
    assert end.refuses(ulpdu) == (0, 2, 6)


@pytest.mark.parametrize(("opcode", "queue"), [(o, q) for o in (1, 3, 4, 5, 6, 7, 8, 9, 10, 11) for q in range(5)])
def test_r5_wrong_queue(end: Any, wire: Any, opcode: int, queue: int) -> None:
    right = {1: 1, 10: 1, 7: 2, 11: 3}.get(opcode, 0)
    if queue != right:
        assert end.refuses(wire.untagged(opcode, queue, 1, b"x")) == (1, 2, 1)
    else:  # on its own queue something else is wrong, or nothing
        end.stream.receive_data(wire.fpdu(wire.untagged(opcode, queue, 1, b"x")))
        assert [e.error.cause for e in end.events() if isinstance(e, Failed)] != [TerminateCause.DDP_INVALID_QN]


def test_r1_r6_r7_the_four_sends(end: Any) -> None:
    for wr_id, (stag, solicited) in enumerate([(None, False), (0xA1, False), (None, True), (0xA2, True)]):
        end.stream.post_send(wr_id, [b"p"], invalidate_stag=stag, solicited=solicited)
    assert [(s.opcode, s.qn, s.msn, s.ulp_word) for s in end.says()] == [
        (3, 0, 1, 0),
        (4, 0, 2, 0xA1),
        (5, 0, 3, 0),
        (6, 0, 4, 0xA2),
    ]


def test_r7_r31_r34_r35_receiving_the_four_sends(end: Any, wire: Any, new_region: Any) -> None:
    end.memory.regions |= {0xA1: new_region(bytearray(1)), 0xA2: new_region(bytearray(1))}
    buffers = [end.receive(wr_id) for wr_id in range(4)]
    events = end.hears(
        wire.untagged(wire.SEND, 0, 1, b"0"),
        wire.untagged(wire.SEND_INV, 0, 2, b"1", ulp_word=0xA1),
        wire.untagged(wire.SEND_SE, 0, 3, b"2"),
        wire.untagged(wire.SEND_SE_INV, 0, 4, b"3", ulp_word=0xA2),
    )
    assert events == [
        Received(0, 1, None, False),
        Received(1, 1, 0xA1, False),
        Received(2, 1, None, True),
        Received(3, 1, 0xA2, True),
    ]
    assert [chr(buffer[0]) for buffer in buffers] == ["0", "1", "2", "3"]
    assert end.refuses(wire.write(0xA1, 0, b"x")) == (1, 1, 0)


def test_r6_the_invalidate_field_of_a_plain_send_is_not_looked_at(end: Any, wire: Any, stag: int) -> None:
    end.receive(1)
    assert end.hears(wire.untagged(wire.SEND, 0, 1, ulp_word=stag)) == [Received(1, 0, None, False)]
    assert end.memory.regions[stag].valid


def test_r32_r33_an_stag_that_cannot_be_invalidated_is_0_1_09(end: Any, wire: Any, stag: int) -> None:
    end.memory.regions[stag].can_be_invalidated = False
    buffer = end.receive(1)
    segment = wire.untagged(wire.SEND_INV, 0, 1, b"data", ulp_word=stag)
    end.stream.receive_data(wire.fpdu(segment))
    (terminate,) = end.says()
    assert terminate.payload == b"\x01\x09\xc0\x00" + len(segment).to_bytes(2, "big") + segment[:18]
    assert buffer[:4] == b"data" and [type(e) for e in end.events()] == [Failed]


def test_r29_a_zero_length_send_uses_a_buffer_and_an_msn(end: Any, wire: Any) -> None:
    end.receive(1)
    end.receive(2)
    events = end.hears(wire.send(1), wire.send(2, b"x"))
    assert events == [Received(1, 0, None, False), Received(2, 1, None, False)]


def test_r10_r27_r28_writes_are_placed_before_the_send_and_not_delivered(
    end: Any, wire: Any, stag: int, base_to: int
) -> None:
    end.receive(1)
    assert end.hears(wire.write(stag, base_to, b"\x42" * 8)) == []
    assert end.hears(wire.send(1, b"look")) == [Received(1, 4, None, False)]
    assert end.memory.regions[stag].octets[:8] == b"\x42" * 8


# --- RDMA Read, answering ---


def test_r12_r13_the_response_echoes_sink_stag_and_to(new_end: Any, wire: Any, stag: int, base_to: int) -> None:
    end = new_end(mulpdu=128)
    end.hears(wire.read_request(1, 0xFEEDBEEF, 0xFFFFFFFFFFFFFFF0, 150, stag, base_to + 3))
    first, last = end.says()
    assert (first.opcode, first.stag, first.to, first.last) == (2, 0xFEEDBEEF, 0xFFFFFFFFFFFFFFF0, False)
    assert (last.opcode, last.stag, last.to, last.last) == (2, 0xFEEDBEEF, 0x62, True)
    assert first.payload + last.payload == bytes(range(3, 153))


def test_r14_s10_a_read_of_size_0_checks_no_stag(end: Any, wire: Any) -> None:
    end.hears(wire.read_request(1, 5, 6, 0, 0xBAD, 0xFFFFFFFFFFFFFFFF))
    (response,) = end.says()
    assert (response.opcode, response.stag, response.to, response.payload, response.last) == (2, 5, 6, b"", True)


def test_r15_responses_come_in_request_order(end: Any, wire: Any, stag: int, base_to: int) -> None:
    end.hears(*(wire.read_request(n, n, 0, 1, stag, base_to + n) for n in range(1, 5)))
    assert [(s.stag, s.payload[0]) for s in end.says()] == [(n, n) for n in range(1, 5)]


def test_r16_the_size_is_unsigned(end: Any, wire: Any, stag: int, new_region: Any) -> None:
    sizes = []

    class Huge:
        def read_source(self, stag: int, to: int, length: int) -> memoryview:
            sizes.append(length)
            return memoryview(bytes(1 << 16))

    end.memory.read_source = Huge().read_source
    end.hears(wire.read_request(1, 1, 0, 0x80000001, stag, 0))
    (first,) = end.says(limit_bytes=1)
    assert sizes == [0x80000001] and not first.last


@pytest.mark.parametrize(
    ("to", "size", "cause"),
    [
        (0x0FFF, 1, (0, 1, 1)),
        (0x1100, 1, (0, 1, 1)),
        (0x10FF, 2, (0, 1, 1)),
        (0x1000, 257, (0, 1, 1)),
        (0xFFFFFFFFFFFFFFFF, 2, (0, 1, 4)),
    ],
)
def test_r19_r20_r22_read_outside_the_range(
    end: Any, wire: Any, stag: int, to: int, size: int, cause: tuple[int, int, int]
) -> None:
    segment = wire.read_request(1, 0xAABBCCDD, 0x2000, size, stag, to)
    end.stream.receive_data(wire.fpdu(segment))
    (terminate,) = end.says()
    assert terminate.payload[:2] == bytes([cause[0] << 4 | cause[1], cause[2]])
    # M, D and R are set; length, 18-octet DDP header and the Read Request header follow.
    assert terminate.payload[2:] == b"\xe0\x00" + b"\x00\x2e" + segment


def test_r17_unknown_source_is_0_1_00(end: Any, wire: Any) -> None:
    assert end.refuses(wire.read_request(1, 1, 0, 1, 0xBAD, 0)) == (0, 1, 0)


def test_r18_source_of_another_stream_is_0_1_03(
    new_end: Any, new_memory: Any, wire: Any, stag: int, base_to: int
) -> None:
    end = new_end(memory=new_memory(associated=False))
    assert end.refuses(wire.read_request(1, 1, 0, 1, stag, base_to)) == (0, 1, 3)


def test_r21_source_without_read_right_is_0_1_02(
    new_end: Any, new_memory: Any, wire: Any, stag: int, base_to: int
) -> None:
    end = new_end(memory=new_memory(rights=frozenset({"write"})))
    assert end.refuses(wire.read_request(1, 1, 0, 1, stag, base_to)) == (0, 1, 2)


def test_r23_a_source_revoked_in_mid_read_is_quoted_advanced(new_end: Any, wire: Any, stag: int, base_to: int) -> None:
    end = new_end(mulpdu=128)
    segment = wire.read_request(1, 0xAABBCCDD, 0x2000, 250, stag, base_to)
    end.hears(segment)
    (first,) = end.says(limit_bytes=1)
    assert len(first.payload) == 114
    end.memory.regions[stag].valid = False
    (terminate,) = end.says()
    advanced = wire.read_header(0xAABBCCDD, 0x2000 + 114, 250 - 114, stag, base_to + 114)
    assert terminate.payload == b"\x01\x00\xe0\x00" + b"\x00\x2e" + segment[:18] + advanced
    assert [type(e) for e in end.events()] == [Failed]


def test_r25_s8_more_requests_than_ird_are_1_2_02(new_end: Any, wire: Any, stag: int, base_to: int) -> None:
    end = new_end(ird=2)
    assert end.refuses(*(wire.read_request(n, 1, 0, 1, stag, base_to) for n in (1, 2, 3))) == (1, 2, 2)


def test_r25_ird_0_takes_no_request(new_end: Any, wire: Any) -> None:
    assert new_end(ird=0).refuses(wire.read_request(1, 0, 0, 0, 0, 0)) == (1, 2, 2)


def test_r25_a_slot_is_free_once_its_response_left(new_end: Any, wire: Any, stag: int, base_to: int) -> None:
    end = new_end(ird=1, mulpdu=128)
    for msn in (1, 2, 3):
        end.hears(wire.read_request(msn, 1, 0, 200, stag, base_to))
        assert len(end.says()) == 2
    end.hears(wire.read_request(4, 1, 0, 200, stag, base_to))
    assert len(end.says(limit_bytes=1)) == 1  # half of the response
    assert end.refuses(wire.read_request(5, 1, 0, 1, stag, base_to)) == (1, 2, 2)


def test_r26_a_read_sees_the_write_before_it(end: Any, wire: Any, stag: int, base_to: int) -> None:
    end.hears(wire.write(stag, base_to, b"new"), wire.read_request(1, 1, 0, 3, stag, base_to))
    (response,) = end.says()
    assert response.payload == b"new"


@pytest.mark.parametrize("payload", [b"", bytes(24), bytes(27), bytes(29), bytes(52)])
def test_r49_read_request_of_another_length_is_0_2_ff(end: Any, wire: Any, payload: bytes) -> None:
    assert end.refuses(wire.untagged(wire.READ_REQUEST, 1, 1, payload)) == (0, 2, 0xFF)


def test_r8_r49_a_read_request_is_one_segment(new_end: Any, wire: Any) -> None:
    not_last = wire.untagged(wire.READ_REQUEST, 1, 1, bytes(28), last=False)
    assert new_end().refuses(not_last) == (0, 2, 0xFF)
    assert new_end().refuses(wire.untagged(wire.READ_REQUEST, 1, 1, bytes(28), mo=4)) == (1, 2, 4)


def test_responses_and_work_take_turns(new_end: Any, wire: Any, stag: int, base_to: int) -> None:
    end = new_end()
    end.hears(*(wire.read_request(n, n, 0, 1, stag, base_to) for n in (1, 2, 3)))
    for wr_id in range(3):
        end.stream.post_send(wr_id, [b"x"])
    assert [s.opcode for s in end.says()] == [2, 3, 2, 3, 2, 3]


# --- RDMA Read, asking ---


def test_r8_read_request_octets(end: Any, wire: Any) -> None:
    end.stream.post_read(1, memoryview(bytearray(5)), 0x11223344, 0x1000)
    (request,) = end.says()
    sink_stag, sink_to = sink_of(request)
    assert (request.qn, request.msn, request.mo, request.last, request.ulp_word) == (1, 1, 0, True, 0)
    assert request.payload == wire.read_header(sink_stag, sink_to, 5, 0x11223344, 0x1000)
    assert end.memory.lent == {sink_stag}


def test_r46_a_read_completes_on_its_response(end: Any, wire: Any) -> None:
    sink = bytearray(10)
    end.stream.post_read(1, memoryview(sink), 9, 0)
    stag, to = sink_of(end.says()[0])
    assert end.hears(wire.read_response(stag, to, b"01234", last=False)) == []
    assert end.hears(wire.read_response(stag, to + 5, b"56789")) == [ReadCompleted(1, 10)]
    assert sink == b"0123456789" and end.memory.lent == set()


def test_r46_an_empty_read(end: Any, wire: Any) -> None:
    end.stream.post_read(1, memoryview(bytearray()), 9, 0)
    stag, to = sink_of(end.says()[0])
    assert end.hears(wire.read_response(stag, to)) == [ReadCompleted(1, 0)]


def test_r46_completions_keep_the_order_of_submission(end: Any, wire: Any) -> None:
    end.stream.post_write(1, [b"w"], 1, 0)
    end.stream.post_read(2, memoryview(bytearray(1)), 9, 0)
    end.stream.post_send(3, [b"s"])
    seen = end.says()
    assert [s.opcode for s in seen] == [0, 1, 3]
    assert end.events() == [WriteCompleted(1)]
    stag, to = sink_of(seen[1])
    assert end.hears(wire.read_response(stag, to, b"r")) == [ReadCompleted(2, 1), SendCompleted(3)]


def test_r24_never_more_than_ord_outstanding(new_end: Any, wire: Any) -> None:
    end = new_end(ord_=2)
    for wr_id in range(4):
        end.stream.post_read(wr_id, memoryview(bytearray(1)), 9, 0)
    end.stream.post_send(4, [b"behind"])
    first, second = end.says()
    assert not end.stream.wants_to_send()
    end.hears(wire.read_response(*sink_of(first), b"x"))
    (third,) = end.says()
    end.hears(wire.read_response(*sink_of(second), b"x"), wire.read_response(*sink_of(third), b"x"))
    assert [s.opcode for s in end.says()] == [1, 3]


def test_r24_reads_are_misuse_with_ord_0(new_end: Any) -> None:
    end = new_end(ord_=0)
    with pytest.raises(ApiMisuse, match="ORD is 0"):
        end.stream.post_read(1, memoryview(bytearray(1)), 9, 0)
    with pytest.raises(ApiMisuse, match="ORD is 0"):
        end.stream.post_fetch_add(1, 9, 0, 1, 0)


@pytest.fixture
def reading(end: Any) -> tuple[Any, bytearray, int, int]:
    """An end that asked for 8 octets: (end, sink, sink STag, sink TO)."""
    sink = bytearray(8)
    end.stream.post_read(1, memoryview(sink), 9, 0)
    (request,) = end.says()
    return end, sink, *sink_of(request)


def test_r47_r48_response_for_another_stag_is_1_1_00(reading: Any, wire: Any, stag: int) -> None:
    end, sink, _, to = reading
    assert end.refuses(wire.read_response(stag, to, bytes([255]) * 8)) == (1, 1, 0)
    assert not any(sink)


@pytest.mark.parametrize(
    ("at", "payload", "last"),
    [(1, b"x", False), (-1, b"x", False), (0, b"x" * 9, True), (0, b"x" * 7, True), (0, b"", True)],
)
def test_r13_r48_response_that_does_not_fit_is_1_1_01(
    reading: Any, wire: Any, at: int, payload: bytes, last: bool
) -> None:
    end, sink, sink_stag, to = reading
    assert end.refuses(wire.read_response(sink_stag, (to + at) % 2**64, payload, last)) == (1, 1, 1)
    assert not any(sink[len(payload) :])


def test_r48_unasked_response_is_1_1_00(end: Any, wire: Any) -> None:
    assert end.refuses(wire.read_response(1, 0)) == (1, 1, 0)


def test_r48_a_response_to_an_answered_request_is_1_1_00(reading: Any, wire: Any) -> None:
    end, sink, sink_stag, to = reading
    response = wire.read_response(sink_stag, to, b"12345678")
    assert end.hears(response) == [ReadCompleted(1, 8)]
    sink[:] = bytes(8)
    assert end.refuses(response) == (1, 1, 0)
    assert not any(sink)


def test_r48_the_sink_cannot_be_written_by_rdma_write(reading: Any, wire: Any) -> None:
    end, sink, sink_stag, to = reading
    assert end.refuses(wire.write(sink_stag, to, b"12345678")) == (1, 1, 0)
    assert not any(sink)


# --- Terminate and the end ---


def test_r41_a_terminate_is_delivered_and_not_answered(end: Any, wire: Any) -> None:
    end.stream.post_send(1, [b"x"])
    (event,) = end.hears(wire.terminate(1, 1, 0, b"\x00\x13" + bytes.fromhex("c1400000") + bytes(10), 0xC000))
    info = TerminateInfo(1, 1, 0, 19, bytes.fromhex("c1400000") + bytes(10))
    assert event == TerminateReceived(info) and end.stream.received_terminate == info
    assert end.says() == [] and not end.stream.wants_to_send()
    assert end.stream.failed and end.stream.ended and not end.stream.terminate_sent


def test_r41_a_terminate_may_cut_a_send_short(end: Any, wire: Any) -> None:
    end.receive(1)
    (event,) = end.hears(wire.send(1, b"half", last=False), wire.terminate(0, 0, 0))
    assert event == TerminateReceived(TerminateInfo(0, 0, 0))


def test_r40_r41_nothing_is_taken_after_a_terminate(end: Any, wire: Any) -> None:
    end.receive(1)
    end.hears(wire.terminate(0, 0, 0))
    assert end.hears(wire.send(1, b"late"), wire.terminate(0, 0, 0), wire.send(7)) == []
    assert end.says() == []


@pytest.mark.parametrize(("msn", "mo", "last", "cause"), [(2, 0, True, (1, 2, 3)), (1, 4, True, (1, 2, 4))])
def test_r9_a_terminate_is_msn_1_mo_0(
    end: Any, wire: Any, msn: int, mo: int, last: bool, cause: tuple[int, int, int]
) -> None:
    assert end.refuses(wire.untagged(wire.TERMINATE, 2, msn, bytes(4), mo, last)) == cause


def test_r9_a_terminate_too_short_to_say_anything_is_0_2_ff(end: Any, wire: Any) -> None:
    assert end.refuses(wire.untagged(wire.TERMINATE, 2, 1, bytes(3))) == (0, 2, 0xFF)


def test_r39_r40_a_local_terminate_quotes_nothing_and_is_the_last_word(end: Any, wire: Any) -> None:
    end.stream.post_send(1, [b"never sent"])
    end.receive(2)
    end.stream.terminate(TerminateCause.RDMAP_UNSPECIFIED)
    assert end.stream.failed and not end.stream.ended and not end.stream.terminate_sent
    assert end.hears(wire.send(1, b"late")) == []
    (terminate,) = end.says()
    assert terminate.payload == bytes.fromhex("02ff0000")
    assert end.stream.sent_cause is TerminateCause.RDMAP_UNSPECIFIED and end.stream.ended
    end.stream.terminate(TerminateCause.LOCAL_CATASTROPHIC)
    assert end.says() == [] and end.stream.sent_cause is TerminateCause.RDMAP_UNSPECIFIED


def test_e19_another_set_up_error_is_2_0_05(end: Any) -> None:
    end.stream.terminate(TerminateCause.MPA_LOCAL_CATASTROPHIC)
    (terminate,) = end.says()
    assert terminate.payload == bytes.fromhex("20050000")


def test_r40_a_message_under_way_is_cut_short_by_the_terminate(new_end: Any, wire: Any) -> None:
    end = new_end(mulpdu=128)
    end.stream.post_send(1, [bytes(1000)])
    assert [s.last for s in end.says(limit_bytes=1)] == [False]
    end.stream.receive_data(wire.fpdu(wire.send(5)))
    assert end.terminates() == (1, 2, 3)


def test_f6_f7_f8_a_bad_crc_is_2_0_02_and_nothing_of_it_is_placed(end: Any, wire: Any, stag: int, base_to: int) -> None:
    before = bytes(end.memory.regions[stag].octets)
    bad = bytearray(wire.fpdu(wire.write(stag, base_to, b"\xff" * 16)))
    bad[-1] ^= 1
    end.stream.receive_data(bytes(bad) + wire.fpdu(wire.write(stag, base_to, b"\xff" * 16)))
    (terminate,) = end.says()
    assert terminate.payload == bytes.fromhex("20020000")
    assert end.memory.regions[stag].octets == before


def test_nothing_is_placed_after_a_segment_that_failed(end: Any, wire: Any, stag: int, base_to: int) -> None:
    """RFC 5041 7: also if both came together."""
    before = bytes(end.memory.regions[stag].octets)
    end.stream.receive_data(wire.fpdu(wire.send(7)) + wire.fpdu(wire.write(stag, base_to, b"\xff" * 16)))
    assert end.terminates() == (1, 2, 3)
    assert end.memory.regions[stag].octets == before


def test_f19_a_marker_mismatch_is_2_0_03(new_end: Any, wire: Any, marked_half: Any) -> None:
    end = new_end(rx_markers=True)
    end.stream.receive_data(marked_half.fpdu(wire.write(0, 0), pointer_xor=4))
    assert end.terminates() == (2, 0, 3)
