"""The local side of `IwarpStream`: what may be posted, what is copied when, how everything is given up once."""

from __future__ import annotations

from typing import Any

import pytest

from kbtp.errors import ApiMisuse, ConnectionLost
from kbtp.iwarp.events import Flushed, ReadCompleted, Received, SendCompleted, WrKind
from kbtp.iwarp.work import Gather
from kbtp.types import TerminateCause


def test_payload_is_read_when_its_fpdu_is_built_and_free_afterwards(new_end: Any) -> None:
    end, memory = new_end(mulpdu=128), bytearray(b"a" * 220)
    end.stream.post_send(1, [memoryview(memory)])
    memory[:] = b"b" * 220
    (first,) = end.says(limit_bytes=1)
    assert end.events() == []
    memory[:] = b"c" * 220
    (second,) = end.says()
    assert (first.payload, second.payload) == (b"b" * 110, b"c" * 110)
    assert end.events() == [SendCompleted(1)]


def test_limit_counts_whole_fpdus(end: Any) -> None:
    for wr_id in range(4):
        end.stream.post_send(wr_id, [bytes(10)])
    assert end.stream.data_to_send(0) == []
    assert [len(f) for f in end.stream.data_to_send(33)] == [36]
    assert [len(f) for f in end.stream.data_to_send(37)] == [36, 36]
    assert [len(f) for f in end.stream.data_to_send(1 << 20)] == [36]
    assert not end.stream.wants_to_send()


def test_default_mulpdu_is_that_of_emss_1460(new_end: Any) -> None:
    for markers, mulpdu in ((False, 1454), (True, 1442)):
        end = new_end(tx_markers=markers)
        end.stream.post_write(1, [bytes(5000)], 1, 0)
        sizes = [int.from_bytes(fpdu[4 * markers :][:2], "big") for fpdu in end.stream.data_to_send(1)]
        assert sizes == [mulpdu]


def test_pieces_of_other_formats_and_sizes_are_gathered() -> None:
    gather = Gather([b"", memoryview(bytes(range(8))).cast("I"), bytearray(b"xyz"), b""])
    assert gather.length_bytes == 11
    taken = [b"".join(gather.take(size)) for size in (0, 3, 6, 2)]
    assert taken == [b"", bytes(range(3)), bytes(range(3, 8)) + b"x", b"yz"]


def test_receive_data_takes_any_buffer(end: Any, wire: Any) -> None:
    for wr_id in range(3):
        end.receive(wr_id)
    for msn, kind in enumerate((bytes, bytearray, memoryview), start=1):
        end.stream.receive_data(kind(wire.fpdu(wire.send(msn, b"x"))))
    assert end.events() == [Received(n, 1, None, False) for n in range(3)]


def test_m25_without_crc(new_end: Any, wire: Any) -> None:
    end = new_end(crc=False)
    end.receive(1)
    end.stream.receive_data(wire.fpdu(wire.send(1, b"x"))[:-4] + b"junk")
    assert end.events() == [Received(1, 1, None, False)]
    end.stream.post_send(2, [b"y"])
    assert end.says()[0].payload == b"y"


@pytest.mark.parametrize(
    ("method", "arguments"),
    [
        ("post_send", (1, [memoryview(bytes(8))[::2]])),
        ("post_write", (1, [b""], 1 << 32, 0)),
        ("post_write", (1, [b""], -1, 0)),
        ("post_write", (1, [b""], 1, 1 << 64)),
        ("post_read", (1, memoryview(b"read-only"), 1, 0)),
        ("post_read", (1, memoryview(bytearray(8))[::2], 1, 0)),
        ("post_read", (1, memoryview(bytearray(1)), 1 << 32, 0)),
        ("post_read", (1, memoryview(bytearray(1)), 1, -1)),
        ("post_receive", (1, memoryview(b"read-only"))),
        ("post_immediate", (1, bytes(7))),
        ("post_immediate", (1, bytes(9))),
        ("post_fetch_add", (1, 1 << 32, 0, 0, 0)),
        ("post_fetch_add", (1, 1, 1 << 64, 0, 0)),
        ("post_fetch_add", (1, 1, 0, 1 << 64, 0)),
        ("post_fetch_add", (1, 1, 0, 0, -1)),
        ("post_compare_swap", (1, 1, 0, 0, 0, 0, 1 << 64)),
        ("set_mulpdu", (127,)),
        ("set_mulpdu", (64769,)),
    ],
)
def test_what_cannot_go_on_the_wire_is_misuse(end: Any, method: str, arguments: tuple[Any, ...]) -> None:
    with pytest.raises(ApiMisuse):
        getattr(end.stream, method)(*arguments)
    assert not end.stream.wants_to_send() and end.stream.flush() == []


def test_an_invalidate_stag_must_fit(end: Any) -> None:
    with pytest.raises(ApiMisuse, match="32 bits"):
        end.stream.post_send(1, [], invalidate_stag=1 << 32)


def test_a_message_is_at_most_4_gib() -> None:
    huge = memoryview(bytes(1 << 16))
    with pytest.raises(ApiMisuse, match="4294967295"):
        Gather([huge] * (1 << 16))


def test_posting_after_the_end_says_so(end: Any, wire: Any) -> None:
    end.hears(wire.terminate(1, 1, 0))
    posts = [
        lambda: end.stream.post_send(1, []),
        lambda: end.stream.post_write(1, [], 1, 0),
        lambda: end.stream.post_read(1, memoryview(bytearray(1)), 1, 0),
        lambda: end.stream.post_fetch_add(1, 1, 0, 1, 0),
        lambda: end.stream.post_immediate(1, bytes(8)),
        lambda: end.stream.post_receive(1, memoryview(bytearray(1))),
    ]
    for post in posts:
        with pytest.raises(ConnectionLost) as error:
            post()
        assert error.value.terminate == end.stream.received_terminate


def test_r44_flush_gives_up_everything_outstanding_once(new_end: Any, wire: Any) -> None:
    end = new_end(ord_=1)
    end.stream.post_send(1, [b"done"])
    end.stream.post_read(2, memoryview(bytearray(1)), 9, 0)
    end.stream.post_send(3, [b"sent, but behind the read"])
    end.stream.post_fetch_add(4, 9, 0, 1, 0)
    end.stream.post_write(5, [b"w"], 9, 0)
    end.stream.post_immediate(6, bytes(8))
    end.receive(7)
    end.receive(8)
    end.says()
    assert end.events() == [SendCompleted(1)] and len(end.memory.lent) == 1

    assert end.stream.flush() == [
        Flushed(2, WrKind.READ),
        Flushed(3, WrKind.SEND),
        Flushed(4, WrKind.ATOMIC),
        Flushed(5, WrKind.WRITE),
        Flushed(6, WrKind.IMMEDIATE),
        Flushed(7, WrKind.RECEIVE),
        Flushed(8, WrKind.RECEIVE),
    ]
    assert end.memory.lent == set()
    assert end.stream.flush() == [] and end.says() == [] and end.stream.ended
    assert end.hears(wire.send(1, b"late")) == []


def test_r44_flush_in_mid_message_stops_it(new_end: Any) -> None:
    end = new_end(mulpdu=128)
    end.stream.post_send(1, [bytes(1000)])
    end.says(limit_bytes=1)
    assert end.stream.flush() == [Flushed(1, WrKind.SEND)]
    assert end.says() == [] and end.events() == []


def test_flush_leaves_a_queued_terminate(end: Any, wire: Any) -> None:
    end.stream.receive_data(wire.fpdu(wire.send(1)))
    assert end.stream.failed and end.stream.flush() == []
    assert not end.stream.ended
    assert end.terminates() == (1, 2, 2)


def test_a_half_received_send_flushes_its_buffer(end: Any, wire: Any) -> None:
    end.receive(1)
    end.hears(wire.send(1, b"half", last=False))
    assert end.stream.flush() == [Flushed(1, WrKind.RECEIVE)]


def test_a_half_received_read_flushes_and_its_sink_closes(end: Any, wire: Any) -> None:
    sink = bytearray(2)
    end.stream.post_read(1, memoryview(sink), 9, 0)
    sink_stag = int.from_bytes(end.says()[0].payload[:4], "big")
    end.hears(wire.read_response(sink_stag, 0, b"x", last=False))
    assert end.stream.flush() == [Flushed(1, WrKind.READ)]
    end.hears(wire.read_response(sink_stag, 1, b"y"))
    assert sink == b"x\0"


def test_eof_between_messages(end: Any, wire: Any) -> None:
    end.receive(1)
    end.hears(wire.send(1, b"x"))
    assert end.stream.receive_eof()
    assert not end.stream.failed


@pytest.mark.parametrize("kind", ["fpdu", "send", "write"])
def test_eof_in_the_middle(end: Any, wire: Any, stag: int, base_to: int, kind: str) -> None:
    end.receive(1)
    if kind == "fpdu":
        end.stream.receive_data(wire.fpdu(wire.send(1))[:-1])
    elif kind == "send":
        end.hears(wire.send(1, b"x", last=False))
    else:
        end.hears(wire.write(stag, base_to, b"x", last=False))
    assert not end.stream.receive_eof()


def test_nothing_is_taken_after_eof_but_work_still_leaves(end: Any, wire: Any) -> None:
    end.receive(1)
    end.stream.post_send(2, [b"x"])
    assert end.stream.receive_eof()
    end.stream.receive_data(wire.fpdu(wire.send(1)))
    assert len(end.says()) == 1 and end.events() == [SendCompleted(2)]


def test_a_terminate_hides_events_of_nobody(end: Any, wire: Any) -> None:
    """What was delivered before the failure is still reported, in order, before it."""
    end.receive(1)
    events = end.hears(wire.send(1, b"good"), wire.send(9, b"bad"))
    assert events[0] == Received(1, 4, None, False)
    assert events[1].error.cause is TerminateCause.DDP_MSN_OUT_OF_RANGE and len(events) == 2


def test_revoking_while_a_read_waits(end: Any, wire: Any, stag: int, base_to: int) -> None:
    """A good response before the bad one leaves first; then the Terminate (RFC 5040 5.5 rule 20)."""
    end.hears(
        wire.read_request(1, 1, 0, 1, stag, base_to),
        wire.read_request(2, 2, 0, 1, 0xBAD, 0),
        wire.read_request(3, 3, 0, 1, stag, base_to),
    )
    assert [s.opcode for s in end.says()] == [wire.READ_RESPONSE, wire.TERMINATE]


def test_the_longest_wait_of_all_completes(new_end: Any, wire: Any) -> None:
    """ORD 1 and eight reads posted at once: each response lets the next one go."""
    end = new_end(ord_=1)
    for wr_id in range(8):
        end.stream.post_read(wr_id, memoryview(bytearray(1)), 9, 0)
    done = []
    while seen := end.says():
        (request,) = seen
        done += end.hears(wire.read_response(int.from_bytes(request.payload[:4], "big"), 0, b"x"))
    assert done == [ReadCompleted(wr_id, 1) for wr_id in range(8)]
