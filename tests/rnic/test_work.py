"""Work requests over a loopback stream: what each side sees of each of them."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from kbtp.iwarp.mpa import MpaOptions, RtrKind
from kbtp.verbs.api import (
    Access,
    CompareSwap,
    FetchAdd,
    Immediate,
    RdmaRead,
    RdmaWrite,
    Send,
    Sge,
    WcOpcode,
    WcStatus,
)

R, W, A = Access.REMOTE_READ, Access.REMOTE_WRITE, Access.REMOTE_ATOMIC
U64_MAX = (1 << 64) - 1


# --- Send ---


def test_a_send_gathers_inline_octets_and_pieces_of_regions(pair) -> None:
    region = pair.client.region(b"0123456789")

    pair.c.post([Send(7, b"head ", (Sge(region, 2, 3), Sge(region, 0, 0), Sge(region, 9, 1)))])

    [sent] = pair.client.wait(pair.c, 1)
    [got] = pair.server.wait(pair.s, 1)
    assert (sent.wr_id, sent.opcode, sent.status) == (7, WcOpcode.SEND, WcStatus.SUCCESS)
    assert (got.wr_id, got.opcode, got.status, got.length) == (0, WcOpcode.RECV, WcStatus.SUCCESS, 9)
    assert pair.server.received(pair.s) == [b"head 2349"]


def test_r29_an_empty_send_uses_a_receive_buffer(pair) -> None:
    pair.c.post([Send(1), Send(2, b"after")])

    first, second = pair.server.wait(pair.s, 2)
    assert (first.wr_id, first.length) == (0, 0)
    assert (second.wr_id, second.length) == (1, 5)


def test_r34_a_solicited_send_says_so(pair) -> None:
    pair.c.post([Send(1, b"a"), Send(2, b"b", solicited=True)])

    assert [got.solicited for got in pair.server.wait(pair.s, 2)] == [False, True]


def test_a_region_may_change_until_its_octets_leave(pair) -> None:
    """The passive side's Send is held until the active one has spoken (RFC 5044 7.1.2 rule 4)."""
    memory = bytearray(b"old")

    pair.s.post([Send(1, b"inline ", (pair.server.sge(memory),))])
    pair.net.settle()
    assert pair.server.completions(pair.s) == []
    memory[:] = b"new"
    pair.c.post([Send(1, b"go")])

    pair.client.wait(pair.c, 2)
    assert pair.client.received(pair.c) == [b"inline new"]


def test_r31_send_with_invalidate_takes_the_region_away(pair) -> None:
    region = pair.server.region(16, W, stream=pair.s)

    pair.c.post([Send(1, b"done", invalidate_stag=region.stag), Send(2, b"plain")])

    first, second = pair.server.wait(pair.s, 2)
    assert first.invalidated_stag == region.stag
    assert second.invalidated_stag is None
    assert not region.valid


def test_sends_go_both_ways_at_once(pair) -> None:
    pair.c.post([Send(1, b"ping")])
    pair.server.wait(pair.s, 1)
    pair.s.post([Send(1, b"pong")])
    pair.c.post([Send(2, b"ping")])

    assert [got.length for got in pair.client.wait(pair.c, 3) if got.opcode is WcOpcode.RECV] == [4]
    pair.server.wait(pair.s, 3)


# --- RDMA Write and Read ---


def test_r28_a_write_is_there_when_a_later_send_is_delivered(pair) -> None:
    target = pair.server.region(1 << 20, W)
    octets = np.random.default_rng(1).bytes(1 << 20)

    pair.c.post([RdmaWrite(1, (pair.client.sge(octets),), target.stag, target.base_to), Send(2, b"look")])

    [got] = pair.server.wait(pair.s, 1)
    assert got.opcode is WcOpcode.RECV, "a Write is not reported to the peer"
    assert target.view == octets
    assert [done.opcode for done in pair.client.wait(pair.c, 2)] == [WcOpcode.RDMA_WRITE, WcOpcode.SEND]


def test_a_write_gathers_and_lands_at_its_offset(pair) -> None:
    target = pair.server.rnic.register(bytearray(16), W, pd=pair.server.pd, base_to=0xFFFF_FFFF_0000_0000)
    source = pair.client.region(b"abcdef")

    pair.c.post(
        [
            RdmaWrite(1, (Sge(source, 4, 2), Sge(source, 0, 2)), target.stag, target.base_to + 5),
            RdmaWrite(2, (), 0xDEAD, 0xBEEF),  # R11: nothing to write, nothing is checked
            Send(3),
        ]
    )

    pair.server.wait(pair.s, 1)
    assert target.view == b"\0" * 5 + b"efab" + b"\0" * 7


def test_a_read_fetches_exactly_what_it_asks_for(pair) -> None:
    octets = np.random.default_rng(2).bytes(300_000)
    source = pair.server.region(octets, R)
    sink = pair.client.region(300_100)

    pair.c.post([RdmaRead(1, Sge(sink, 50, 299_000), source.stag, 1000)])

    [done] = pair.client.wait(pair.c, 1)
    assert (done.opcode, done.length) == (WcOpcode.RDMA_READ, 299_000)
    assert sink.view == bytes(50) + octets[1000:] + bytes(1050)


def test_s10_a_read_of_nothing_needs_no_right(pair) -> None:
    write_only = pair.server.region(8, W)
    sink = pair.client.region(1)

    pair.c.post([RdmaRead(1, Sge(sink, 0, 0), write_only.stag, 0), RdmaRead(2, Sge(sink, 0, 0), 0xBAD, 99)])

    assert [(done.wr_id, done.length) for done in pair.client.wait(pair.c, 2)] == [(1, 0), (2, 0)]


def test_r26_a_read_sees_the_write_before_it(pair) -> None:
    target = pair.server.region(8, R | W)
    sink = pair.client.region(8)

    pair.c.post(
        [
            RdmaWrite(1, (pair.client.sge(b"new data"),), target.stag, 0),
            RdmaRead(2, Sge(sink, 0, 8), target.stag, 0),
        ]
    )

    pair.client.wait(pair.c, 2)
    assert sink.view == b"new data"


def test_r24_requests_beyond_ord_wait_and_hold_up_what_is_behind(connect_pair) -> None:
    pair = connect_pair(client_depth=(0, 1))
    counter = np.zeros(1, np.uint64)
    region = pair.server.region(counter, R | A)
    sink = pair.client.region(80)

    pair.c.post(
        [
            *(FetchAdd(index, region.stag, 0, 1, 0) for index in range(5)),
            *(RdmaRead(index, Sge(sink, 8 * (index - 5), 8), region.stag, 0) for index in range(5, 10)),
            Send(10, b"last"),
        ]
    )

    done = pair.client.wait(pair.c, 11)
    assert [completion.wr_id for completion in done] == list(range(11))
    assert [completion.value for completion in done[:5]] == [0, 1, 2, 3, 4]
    assert np.frombuffer(sink.view, np.uint64)[:5].tolist() == [5] * 5


# --- atomics ---


def test_x9_to_x16_fetch_add_with_masks_on_native_integers(pair) -> None:
    words = np.array([10, U64_MAX, 0x0000_0001_FFFF_FFFF], np.uint64)
    region = pair.server.region(words, A)

    pair.c.post(
        [
            FetchAdd(1, region.stag, 0, 5, 0),
            FetchAdd(2, region.stag, 8, 1, 1 << 63),
            FetchAdd(3, region.stag, 16, 1, 0x8000_0000_8000_0000),
        ]
    )

    assert [done.value for done in pair.client.wait(pair.c, 3)] == [10, U64_MAX, 0x0000_0001_FFFF_FFFF]
    assert words.tolist() == [15, 0, 0x0000_0001_0000_0000]


def test_x13_x14_compare_swap(pair) -> None:
    words = np.array([0x1234, 0x1234], np.uint64)
    region = pair.server.region(words, A)

    pair.c.post(
        [
            CompareSwap(1, region.stag, 0, 0xFF, 0xFF, 0x1200, 0xFF00),
            CompareSwap(2, region.stag, 8, 0xFF, 0xFF, 0x1300, 0xFF00),
        ]
    )

    assert [done.value for done in pair.client.wait(pair.c, 2)] == [0x1234, 0x1234]
    assert words.tolist() == [0x12FF, 0x1234]


def test_x23_fetch_adds_of_many_streams_sum_exactly(connect_pair) -> None:
    first = connect_pair()
    pairs = [first, *(connect_pair(server=first.server) for _ in range(3))]
    counter = np.zeros(1, np.uint64)
    region = first.server.region(counter, A)

    for pair in pairs:
        pair.c.post([FetchAdd(index, region.stag, 0, 1, 0) for index in range(50)])

    olds = [done.value for pair in pairs for done in pair.client.wait(pair.c, 50)]
    assert sorted(olds) == list(range(200))
    assert counter[0] == 200


# --- Immediate Data ---


def test_x24_to_x27_immediate_data_is_delivered_in_order_and_after_the_write(pair) -> None:
    target = pair.server.region(5, W)

    pair.c.post(
        [
            Send(1, b"first"),
            RdmaWrite(2, (pair.client.sge(b"words"),), target.stag, 0),
            Immediate(3, b"\x01\x02\x03\x04\x05\x06\x07\x08", solicited=True),
            Immediate(4, bytes(8)),
        ]
    )

    _, second, third = pair.server.wait(pair.s, 3)
    assert (second.opcode, second.wr_id, second.immediate) == (WcOpcode.RECV_IMMEDIATE, 1, bytes(range(1, 9)))
    assert (second.length, second.solicited, third.solicited) == (8, True, False)
    assert third.immediate == bytes(8)
    assert target.view == b"words"
    assert [done.opcode for done in pair.client.wait(pair.c, 4)][2:] == [WcOpcode.IMMEDIATE] * 2


# --- order and batches ---


def test_r46_completions_come_in_the_order_of_submission(pair) -> None:
    region = pair.server.region(np.zeros(1024, np.uint64), R | W | A)
    sink = pair.client.region(8192)

    pair.c.post(
        [
            RdmaRead(0, Sge(sink, 0, 8192), region.stag, 0),
            Send(1, b"x"),
            FetchAdd(2, region.stag, 0, 1, 0),
            RdmaWrite(3, (Sge(sink, 0, 8192),), region.stag, 0),
            Immediate(4, bytes(8)),
            RdmaRead(5, Sge(sink, 0, 1), region.stag, 0),
        ]
    )

    assert [done.wr_id for done in pair.client.wait(pair.c, 6)] == list(range(6))


def test_a_batch_of_hundreds_is_one_post(connect_pair) -> None:
    pair = connect_pair(receives=300)

    pair.c.post([Send(index, bytes([index % 256])) for index in range(300)])

    assert [got.wr_id for got in pair.server.wait(pair.s, 300)] == list(range(300))


def test_transfers_larger_than_every_buffer_in_both_directions(pair) -> None:
    size = 5 << 20
    to_server, to_client = (np.random.default_rng(seed).bytes(size) for seed in (3, 4))
    at_server = pair.server.region(size, W)
    at_client = pair.client.region(size, W)

    pair.c.post([RdmaWrite(1, (pair.client.sge(to_server),), at_server.stag, 0), Send(2)])
    pair.net.pump(lambda: len(pair.server.completions(pair.s)) > 0 or len(pair.client.completions(pair.c)) > 0)
    pair.s.post([RdmaWrite(1, (pair.server.sge(to_client),), at_client.stag, 0), Send(2)])

    pair.server.wait(pair.s, 3)
    pair.client.wait(pair.c, 3)
    assert at_server.view == to_server
    assert at_client.view == to_client


# --- every way to start a stream ---

_OPTIONS = [
    MpaOptions(crc=crc, want_markers=markers, peer_to_peer=rtr)
    for crc, markers in itertools.product((True, False), (True, False))
    for rtr in (RtrKind.NONE, RtrKind.SEND, RtrKind.WRITE, RtrKind.READ)
]


@pytest.mark.parametrize("client_mpa", _OPTIONS, ids=str)
@pytest.mark.parametrize("server_markers", [False, True])
def test_everything_works_with_every_option_of_start_up(connect_pair, client_mpa, server_markers) -> None:
    pair = connect_pair(client_mpa=client_mpa, server_mpa=MpaOptions(crc=False, want_markers=server_markers))
    memory = np.zeros(512, np.uint64)
    region = pair.server.region(memory, R | W | A, stream=pair.s)
    octets = np.random.default_rng(5).bytes(4000)
    sink = pair.client.region(4000)

    pair.c.post(
        [
            RdmaWrite(1, (pair.client.sge(octets),), region.stag, 8),
            FetchAdd(2, region.stag, 0, 3, 0),
            RdmaRead(3, Sge(sink, 0, 4000), region.stag, 8),
        ]
    )
    # A Send may overtake the response of a Read before it (RFC 5040 5.5), so the region goes only after that.
    assert [done.status for done in pair.client.wait(pair.c, 3)] == [WcStatus.SUCCESS] * 3
    pair.c.post([Send(4, b"hello", invalidate_stag=region.stag)])

    [got] = pair.server.wait(pair.s, 1)
    assert (got.wr_id, got.length, got.invalidated_stag) == (0, 5, region.stag), "a Send RTR takes no receive of ours"
    assert (memory[0], sink.view) == (3, octets)
    pair.s.post([Send(1, b"back")])
    assert pair.client.wait(pair.c, 5)[4].opcode is WcOpcode.RECV


@pytest.mark.parametrize("rtr", [RtrKind.SEND, RtrKind.WRITE, RtrKind.READ])
def test_e21_after_an_rtr_the_passive_side_may_speak_first(connect_pair, rtr) -> None:
    pair = connect_pair(client_mpa=MpaOptions(peer_to_peer=rtr))

    pair.s.post([Send(1, b"server speaks first")])

    [got] = pair.client.wait(pair.c, 1)
    assert (got.opcode, got.length) == (WcOpcode.RECV, 19)


def test_m21_without_an_rtr_the_passive_side_waits_for_the_active_one(pair) -> None:
    pair.s.post([Send(1, b"held back")])
    pair.net.settle()
    assert pair.client.completions(pair.c) == []

    pair.c.post([Send(1, b"go")])

    assert [done.opcode for done in pair.client.wait(pair.c, 2)] == [WcOpcode.SEND, WcOpcode.RECV]
