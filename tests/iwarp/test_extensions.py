"""RFC 7306 as a peer sees it: checklist X. Arithmetic is compared with a bit-serial adder."""

from __future__ import annotations

import struct
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kbtp.atomics import compare_swap, fetch_add
from kbtp.iwarp.events import (
    AtomicCompleted,
    Failed,
    ImmediateCompleted,
    ImmediateReceived,
    ReadCompleted,
    Received,
)

M64 = (1 << 64) - 1
FETCH_ADD, COMPARE_SWAP = 0, 2
U64 = st.integers(0, M64)


def native(memory: Any, stag: int, at: int = 0) -> int:
    (value,) = struct.unpack_from("=Q", memory.regions[stag].octets, at)
    return value


def store(memory: Any, stag: int, value: int, at: int = 0) -> None:
    struct.pack_into("=Q", memory.regions[stag].octets, at, value)


def answer(end: Any, *ulpdus: bytes) -> list[tuple[int, int]]:
    """(identifier, value) of each Atomic Response."""
    end.hears(*ulpdus)
    seen = end.says()
    assert all((s.opcode, s.qn, s.mo, s.last, len(s.payload)) == (0xB, 3, 0, True, 12) for s in seen)
    return [struct.unpack(">IQ", s.payload) for s in seen]


def bit_serial_fetch_add(old: int, add: int, mask: int) -> int:
    carry = new = 0
    for bit in range(64):
        total = (old >> bit & 1) + (add >> bit & 1) + carry
        new |= (total & 1) << bit
        carry = 0 if mask >> bit & 1 else total >> 1
    return new


# --- asking ---


def test_x1_x2_x3_x6_fetch_add_octets(end: Any) -> None:
    end.stream.post_fetch_add(1, 0x11223344, 0x1000, 0x0102030405060708, 0x8000000000000000)
    (request,) = end.says()
    assert (request.opcode, request.qn, request.msn, request.ulp_word) == (0xA, 1, 1, 0)
    first, identifier, *fields = struct.unpack(">IIIQQQQQ", request.payload)
    assert first == FETCH_ADD and identifier == 0
    assert fields == [0x11223344, 0x1000, 0x0102030405060708, 0x8000000000000000, 0, M64]


def test_x2_compare_swap_octets(end: Any) -> None:
    end.stream.post_compare_swap(1, 5, 8, 0xAA, 0xFF, 0xBB, 0xF0)
    (request,) = end.says()
    assert struct.unpack(">IIIQQQQQ", request.payload) == (COMPARE_SWAP, 0, 5, 8, 0xAA, 0xFF, 0xBB, 0xF0)


def test_x8_x30_an_atomic_completes_on_its_response(end: Any, wire: Any) -> None:
    end.stream.post_read(1, memoryview(bytearray(1)), 9, 0)
    end.stream.post_fetch_add(2, 9, 0, 1, 0)
    read, atomic = end.says()
    assert [read.msn, atomic.msn] == [1, 2] and end.events() == []
    sink_stag = int.from_bytes(read.payload[:4], "big")
    assert end.hears(wire.read_response(sink_stag, 0, b"r")) == [ReadCompleted(1, 1)]
    identifier = int.from_bytes(atomic.payload[4:8], "big")
    assert end.hears(wire.atomic_response(1, identifier, M64)) == [AtomicCompleted(2, M64)]


def test_x21_r24_reads_and_atomics_share_ord(new_end: Any, wire: Any) -> None:
    end = new_end(ord_=2)
    end.stream.post_fetch_add(1, 9, 0, 1, 0)
    end.stream.post_read(2, memoryview(bytearray(1)), 9, 0)
    end.stream.post_compare_swap(3, 9, 0, 1, 2, 3, 4)
    assert [s.opcode for s in end.says()] == [0xA, 1]
    end.hears(wire.atomic_response(1, 0, 0))
    assert [(s.opcode, s.msn) for s in end.says()] == [(0xA, 3)]


def test_x29_an_unasked_response_is_1_2_02(new_end: Any, wire: Any) -> None:
    assert new_end().refuses(wire.atomic_response(1, 0, 0)) == (1, 2, 2)
    end = new_end()
    end.stream.post_read(1, memoryview(bytearray(1)), 9, 0)
    end.stream.post_fetch_add(2, 9, 0, 1, 0)
    end.says()
    assert end.refuses(wire.atomic_response(1, 0, 0)) == (1, 2, 2)  # the read is due first


def test_x29_a_wrong_identifier_is_0_2_ff(end: Any, wire: Any) -> None:
    end.stream.post_fetch_add(1, 9, 0, 1, 0)
    end.says()
    assert end.refuses(wire.atomic_response(1, 1, 0)) == (0, 2, 0xFF)


def test_x20_a_read_response_while_an_atomic_is_due_is_1_1_00(end: Any, wire: Any) -> None:
    end.stream.post_fetch_add(1, 9, 0, 1, 0)
    end.says()
    assert end.refuses(wire.read_response(0, 0)) == (1, 1, 0)


# --- answering ---


def test_x7_the_response_has_identifier_and_old_value(end: Any, wire: Any, stag: int, base_to: int) -> None:
    store(end.memory, stag, 0x0102030405060708)
    assert answer(end, wire.atomic_request(1, FETCH_ADD, 0xC0FFEE01, stag, base_to, 1, 0)) == [
        (0xC0FFEE01, 0x0102030405060708)
    ]
    assert native(end.memory, stag) == 0x0102030405060709


@pytest.mark.parametrize(
    ("old", "add", "mask", "new"),
    [
        (5, 7, 0, 12),
        (M64, 1, 0, 0),
        (M64, 1, 1 << 63, 0),
        (M64, 0x0000000100000001, 0x8000000080000000, 0),
        (0x00000001FFFFFFFF, 1, 0x8000000080000000, 0x0000000100000000),
        (0x00000001FFFFFFFF, 1, 0, 0x0000000200000000),
        (0b1100, 0b1010, M64, 0b0110),
    ],
)
def test_x4_x9_x10_x11_fetch_add(
    end: Any, wire: Any, stag: int, base_to: int, old: int, add: int, mask: int, new: int
) -> None:
    store(end.memory, stag, old)
    assert answer(end, wire.atomic_request(1, FETCH_ADD, 1, stag, base_to, add, mask)) == [(1, old)]
    assert native(end.memory, stag) == new


@given(old=U64, add=U64, mask=U64)
def test_x12_fetch_add_equals_the_bit_serial_adder(old: int, add: int, mask: int) -> None:
    assert fetch_add(old, add, mask) == bit_serial_fetch_add(old, add, mask)
    assert fetch_add(old, add, 0) == fetch_add(old, add, 1 << 63) == (old + add) & M64
    assert fetch_add(old, add, M64) == old ^ add


def test_x6_fetch_add_ignores_the_compare_fields(end: Any, wire: Any, stag: int, base_to: int) -> None:
    store(end.memory, stag, 40)
    answer(end, wire.atomic_request(1, FETCH_ADD, 1, stag, base_to, 2, 0, 0xDEAD, 0xBEEF))
    assert native(end.memory, stag) == 42


@pytest.mark.parametrize(
    ("old", "swap", "swap_mask", "compare", "compare_mask", "new"),
    [
        (5, 9, M64, 5, M64, 9),
        (5, 9, M64, 6, M64, 5),
        (0xAAAA5555, 0x1234, 0xFFFF, 0, 0, 0xAAAA1234),
        (0x1122334455667788, 0xFF, 0xFF, 0x1122 << 48, 0xFFFF << 48, 0x11223344556677FF),
        (0x1122334455667788, 0xFF, 0xFF, 0x1123 << 48, 0xFFFF << 48, 0x1122334455667788),
    ],
)
def test_x4_x13_x14_x15_compare_swap(
    end: Any,
    wire: Any,
    stag: int,
    base_to: int,
    old: int,
    swap: int,
    swap_mask: int,
    compare: int,
    compare_mask: int,
    new: int,
) -> None:
    store(end.memory, stag, old)
    request = wire.atomic_request(1, COMPARE_SWAP, 1, stag, base_to, swap, swap_mask, compare, compare_mask)
    assert answer(end, request) == [(1, old)]
    assert native(end.memory, stag) == new == compare_swap(old, swap, swap_mask, compare, compare_mask)


def test_x16_memory_is_in_native_order(end: Any, wire: Any, stag: int, base_to: int) -> None:
    store(end.memory, stag, 0)
    end.hears(
        wire.atomic_request(1, FETCH_ADD, 1, stag, base_to, 0x0102030405060708, 0),
        wire.read_request(2, 1, 0, 8, stag, base_to),
    )
    _, read = end.says()
    assert read.payload == struct.pack("=Q", 0x0102030405060708)


def test_x3_reserved_bits_of_the_first_word_are_ignored(end: Any, wire: Any, stag: int, base_to: int) -> None:
    store(end.memory, stag, 1)
    assert answer(end, wire.atomic_request(1, 0xFFFFFFF0 | FETCH_ADD, 1, stag, base_to, 1, 0)) == [(1, 1)]


@pytest.mark.parametrize("operation", [1, *range(3, 16)])
def test_x5_an_unknown_operation_is_0_2_06(end: Any, wire: Any, stag: int, base_to: int, operation: int) -> None:
    before = bytes(end.memory.regions[stag].octets)
    assert end.refuses(wire.atomic_request(1, operation, 1, stag, base_to, 1, 0)) == (0, 2, 6)
    assert end.memory.regions[stag].octets == before


@pytest.mark.parametrize("length", [0, 51, 53])
def test_x2_an_atomic_request_of_another_length_is_0_2_ff(end: Any, wire: Any, length: int) -> None:
    assert end.refuses(wire.untagged(wire.ATOMIC_REQUEST, 1, 1, bytes(length))) == (0, 2, 0xFF)


def test_x17_unaligned_is_0_2_07_with_m_and_d(end: Any, wire: Any, stag: int, base_to: int) -> None:
    before = bytes(end.memory.regions[stag].octets)
    segment = wire.atomic_request(1, FETCH_ADD, 1, stag, base_to + 4, 1, 0)
    end.stream.receive_data(wire.fpdu(segment))
    (terminate,) = end.says()
    assert terminate.payload == b"\x02\x07\xc0\x00\x00\x46" + segment[:18]
    assert end.memory.regions[stag].octets == before


@pytest.mark.parametrize(
    ("to", "cause"), [(0x0FF8, (0, 1, 1)), (0x1100, (0, 1, 1)), (0x10FC, (0, 1, 1)), (M64 - 3, (0, 1, 4))]
)
def test_x18_outside_the_range_without_r(end: Any, wire: Any, stag: int, to: int, cause: tuple[int, int, int]) -> None:
    segment = wire.atomic_request(1, FETCH_ADD, 1, stag, to, 1, 0)
    end.stream.receive_data(wire.fpdu(segment))
    (terminate,) = end.says()
    assert terminate.payload == bytes([cause[1], cause[2]]) + b"\xc0\x00\x00\x46" + segment[:18]


def test_x18_unknown_stag_and_missing_right(new_end: Any, new_memory: Any, wire: Any, stag: int, base_to: int) -> None:
    assert new_end().refuses(wire.atomic_request(1, FETCH_ADD, 1, 0xBAD, base_to, 1, 0)) == (0, 1, 0)
    end = new_end(memory=new_memory(rights=frozenset({"read", "write"})))
    assert end.refuses(wire.atomic_request(1, FETCH_ADD, 1, stag, base_to, 1, 0)) == (0, 1, 2)


def test_x19_atomics_are_executed_in_order_once_each(end: Any, wire: Any, stag: int, base_to: int) -> None:
    store(end.memory, stag, 0)
    requests = [wire.atomic_request(n, FETCH_ADD, 100 + n, stag, base_to, n, 0) for n in (1, 2, 3)]
    assert answer(end, *requests) == [(101, 0), (102, 1), (103, 3)]
    assert native(end.memory, stag) == 6


def test_x8_x20_mixed_responses_come_in_request_order(end: Any, wire: Any, stag: int, base_to: int) -> None:
    end.hears(
        wire.atomic_request(1, FETCH_ADD, 1, stag, base_to, 0, 0),
        wire.read_request(2, 77, 0, 1, stag, base_to),
        wire.atomic_request(3, FETCH_ADD, 3, stag, base_to, 0, 0),
    )
    assert [(s.opcode, s.msn) for s in end.says()] == [(0xB, 1), (2, None), (0xB, 2)]


def test_x21_r25_atomics_count_against_ird(new_end: Any, wire: Any, stag: int, base_to: int) -> None:
    end = new_end(ird=1)
    read = wire.read_request(1, 1, 0, 1, stag, base_to)
    assert end.refuses(read, wire.atomic_request(2, FETCH_ADD, 1, stag, base_to, 1, 0)) == (1, 2, 2)


def test_x22_an_atomic_sees_the_write_before_it(end: Any, wire: Any, stag: int, base_to: int) -> None:
    write = wire.write(stag, base_to, struct.pack("=Q", 99))
    assert answer(end, write, wire.atomic_request(1, FETCH_ADD, 1, stag, base_to, 1, 0)) == [(1, 99)]


# --- Immediate Data ---


def test_x1_x24_immediate_octets(end: Any) -> None:
    end.stream.post_immediate(1, b"12345678")
    end.stream.post_immediate(2, b"abcdefgh", solicited=True)
    seen = end.says()
    assert [(s.opcode, s.qn, s.msn, s.mo, s.last, s.ulp_word) for s in seen] == [
        (8, 0, 1, 0, True, 0),
        (9, 0, 2, 0, True, 0),
    ]
    assert [s.payload for s in seen] == [b"12345678", b"abcdefgh"]
    assert end.events() == [ImmediateCompleted(1), ImmediateCompleted(2)]


def test_x25_x26_x27_immediate_is_delivered_in_order_with_sends(end: Any, wire: Any, stag: int, base_to: int) -> None:
    buffers = [end.receive(wr_id) for wr_id in range(3)]
    events = end.hears(
        wire.send(1, b"send"),
        wire.write(stag, base_to, b"\x42"),
        wire.untagged(wire.IMM, 0, 2, b"12345678"),
        wire.untagged(wire.IMM_SE, 0, 3, b"abcdefgh"),
    )
    assert events == [
        Received(0, 4, None, False),
        ImmediateReceived(1, b"12345678", False),
        ImmediateReceived(2, b"abcdefgh", True),
    ]
    assert end.memory.regions[stag].octets[0] == 0x42
    assert not any(buffers[1]) and not any(buffers[2])


@pytest.mark.parametrize("length", [0, 7, 9])
def test_x24_immediate_of_another_length_is_0_2_ff(end: Any, wire: Any, length: int) -> None:
    end.receive(1)
    assert end.refuses(wire.untagged(wire.IMM, 0, 1, bytes(length))) == (0, 2, 0xFF)
    assert [type(e) for e in end.events()] == [Failed]


def test_x25_immediate_without_a_buffer_is_1_2_02(end: Any, wire: Any) -> None:
    assert end.refuses(wire.untagged(wire.IMM, 0, 1, bytes(8))) == (1, 2, 2)
