"""Whatever is posted arrives, however TCP cuts it; whatever a peer sends, only registered memory changes."""

from __future__ import annotations

import random
import struct
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from kbtp.iwarp.events import (
    AtomicCompleted,
    Failed,
    ImmediateCompleted,
    ImmediateReceived,
    ReadCompleted,
    Received,
    SendCompleted,
    TerminateReceived,
    WriteCompleted,
)
from kbtp.iwarp.fpdu import FpduEncoder

WRITE_AREA, READ_AREA, COUNTER_AREA, AREA_BYTES = 0, 1024, 2048, 1024
M64 = (1 << 64) - 1

POSTS = st.lists(
    st.one_of(
        st.tuples(st.just("send"), st.binary(max_size=400), st.booleans()),
        st.tuples(st.just("write"), st.binary(max_size=400), st.integers(0, AREA_BYTES - 400)),
        st.tuples(st.just("read"), st.integers(0, 400), st.integers(0, AREA_BYTES - 400)),
        st.tuples(st.just("add"), st.integers(0, M64), st.integers(0, 3)),
        st.tuples(st.just("immediate"), st.binary(min_size=8, max_size=8), st.booleans()),
    ),
    max_size=14,
)


class Side:
    """One end of an exchange: posts its work and knows what both ends must then report."""

    def __init__(self, end: Any, posts: list[tuple[Any, ...]], stag: int, base_to: int) -> None:
        self.end = end
        self.posts = posts
        self.sinks: dict[int, bytearray] = {}
        self.buffers: dict[int, bytearray] = {}
        stream = end.stream
        for wr_id, (kind, what, how) in enumerate(posts):
            if kind == "send":
                stream.post_send(wr_id, [what[:7], what[7:]], solicited=how)
            elif kind == "write":
                stream.post_write(wr_id, [what], stag, base_to + WRITE_AREA + how)
            elif kind == "read":
                self.sinks[wr_id] = bytearray(what)
                stream.post_read(wr_id, memoryview(self.sinks[wr_id]), stag, base_to + READ_AREA + how)
            elif kind == "add":
                stream.post_fetch_add(wr_id, stag, base_to + COUNTER_AREA + 8 * how, what, 0)
            else:
                stream.post_immediate(wr_id, what, solicited=how)

    def completions(self) -> list[Any]:
        """What this side must report of its own posts."""
        counters, events = [0] * 4, []
        for wr_id, (kind, what, how) in enumerate(self.posts):
            if kind == "send":
                events.append(SendCompleted(wr_id))
            elif kind == "write":
                events.append(WriteCompleted(wr_id))
            elif kind == "read":
                events.append(ReadCompleted(wr_id, what))
            elif kind == "add":
                events.append(AtomicCompleted(wr_id, counters[how]))
                counters[how] = (counters[how] + what) & M64
            else:
                events.append(ImmediateCompleted(wr_id))
        return events

    def deliveries_at_peer(self) -> list[Any]:
        sends = [post for post in self.posts if post[0] in ("send", "immediate")]
        return [
            Received(n, len(what), None, how) if kind == "send" else ImmediateReceived(n, what, how)
            for n, (kind, what, how) in enumerate(sends)
        ]

    def check_peer_memory(self, peer: Side, octets: bytearray, untouched: bytearray) -> None:
        """The peer's region and receive buffers are as this side's posts, one after the other, make them."""
        expected = bytearray(untouched)
        for kind, what, how in self.posts:
            if kind == "write":
                expected[WRITE_AREA + how : WRITE_AREA + how + len(what)] = what
            elif kind == "add":
                (old,) = struct.unpack_from("=Q", expected, COUNTER_AREA + 8 * how)
                struct.pack_into("=Q", expected, COUNTER_AREA + 8 * how, (old + what) & M64)
        assert octets == expected
        payloads = [what for kind, what, _ in self.posts if kind in ("send", "immediate")]
        for n, (post, payload) in enumerate(zip(self.deliveries_at_peer(), payloads, strict=True)):
            if isinstance(post, Received):
                assert peer.buffers[n][: post.length] == payload
        for wr_id, sink in self.sinks.items():
            _, length, at = self.posts[wr_id]
            assert sink == untouched[READ_AREA + at : READ_AREA + at + length]

    def post_receives(self, count: int) -> None:
        self.buffers = {n: self.end.receive(n, 400) for n in range(count)}


def carry(ends: tuple[Any, Any], rnd: random.Random) -> None:
    """Move octets both ways in random pieces, built and delivered at random moments, until all is quiet."""
    in_flight = [bytearray(), bytearray()]
    while any(end.stream.wants_to_send() for end in ends) or any(in_flight):
        side = rnd.randrange(2)
        in_flight[side] += b"".join(ends[side].stream.data_to_send(rnd.choice((1, 200, 5000))))
        size = rnd.choice((1, 3, rnd.randrange(1, 300), 1 << 20))
        ends[1 - side].stream.receive_data(bytes(in_flight[side][:size]))
        del in_flight[side][:size]


@pytest.mark.parametrize("markers", [(False, False), (True, False), (True, True)])
@settings(max_examples=40, deadline=None)
@given(ours=POSTS, theirs=POSTS, seed=st.integers(0, 1 << 32), ord_=st.integers(1, 3), wrap=st.booleans())
def test_f20_d7_r24_r46_two_streams_exchange_anything(
    new_end: Any,
    new_memory: Any,
    stag: int,
    base_to: int,
    markers: tuple[bool, bool],
    ours: list[Any],
    theirs: list[Any],
    seed: int,
    ord_: int,
    wrap: bool,
) -> None:
    sides = []
    for n, posts in enumerate((ours, theirs)):
        memory = new_memory(length=3 * AREA_BYTES)
        memory.regions[stag].octets[COUNTER_AREA:] = bytes(AREA_BYTES)
        end = new_end(
            active=n == 0,
            memory=memory,
            mulpdu=128,
            tx_markers=markers[n],
            rx_markers=markers[1 - n],
            ird=ord_,
            ord_=ord_,
            initial_msn={0: 0xFFFFFFFE, 1: 0xFFFFFFFF, 3: 0xFFFFFFFF} if wrap else None,
        )
        sides.append(Side(end, posts, stag, base_to))
    active, passive = sides
    active.end.stream.post_write(len(ours), [], 0, 0)  # so that the passive side may speak
    untouched = bytearray(active.end.memory.regions[stag].octets)
    for side, peer in ((active, passive), (passive, active)):
        side.post_receives(len(peer.deliveries_at_peer()))

    carry((active.end, passive.end), random.Random(seed))

    for side, peer in ((active, passive), (passive, active)):
        events = side.end.events()
        delivered = [e for e in events if isinstance(e, Received | ImmediateReceived)]
        completed = [e for e in events if not isinstance(e, Received | ImmediateReceived)]
        assert delivered == peer.deliveries_at_peer()
        extra = [WriteCompleted(len(ours))] if side is active else []
        assert completed == side.completions() + extra
        peer.check_peer_memory(side, side.end.memory.regions[stag].octets, untouched)
        assert not side.end.stream.failed and side.end.stream.receive_eof()
        assert side.end.memory.lent == set() and side.end.stream.flush() == []


@pytest.mark.parametrize("markers", [False, True])
@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 1 << 32))
def test_f20_f21_any_split_of_the_same_octets_gives_the_same_events(
    new_end: Any, wire: Any, new_marked_half: Any, stag: int, base_to: int, markers: bool, seed: int
) -> None:
    fpdu: Callable[[bytes], bytes] = new_marked_half().fpdu if markers else wire.fpdu
    octets = b"".join(
        fpdu(ulpdu)
        for n in range(1, 60)
        for ulpdu in (
            wire.send(2 * n - 1, b"s" * n, last=False),
            wire.write(stag, base_to + n, b"w" * n),
            wire.send(2 * n - 1, b"t" * 5 * n, mo=n),
            wire.untagged(wire.IMM, 0, 2 * n, struct.pack(">Q", n)),
        )
    ) + fpdu(wire.send(1))

    def outcome(cuts: list[int]) -> tuple[list[str], list[bytes], bytes]:
        end = new_end(rx_markers=markers)
        for wr_id in range(200):
            end.receive(wr_id, 400)
        for start, stop in zip([0, *cuts], [*cuts, len(octets)], strict=True):
            end.stream.receive_data(octets[start:stop])
        return list(map(repr, end.events())), end.stream.data_to_send(1 << 20), bytes(end.memory.regions[stag].octets)

    rnd = random.Random(seed)
    whole = outcome([])
    assert len(whole[0]) == 2 * 59 + 1 and len(whole[1]) == 1
    assert outcome(sorted(rnd.sample(range(1, len(octets)), rnd.choice((1, 20, 1000))))) == whole


def test_f20_one_octet_at_a_time_gives_the_same_events(new_end: Any, wire: Any) -> None:
    octets = b"".join(wire.fpdu(wire.send(n, bytes(n))) for n in range(1, 30))
    end = new_end()
    for wr_id in range(29):
        end.receive(wr_id)
    for octet in octets:
        end.stream.receive_data(bytes([octet]))
    assert end.events() == [Received(n, n + 1, None, False) for n in range(29)]


SMALL = st.one_of(st.integers(0, 4), st.sampled_from((0x7FFFFFFF, 0xFFFFFFFF)))
STAGS = st.one_of(st.just(0x11223344), st.just(0xABCD0001), SMALL)
OFFSETS = st.one_of(
    st.integers(0xFF0, 0x1110), st.integers(0, 16), st.sampled_from((M64, M64 - 7, 1 << 63)), st.integers(0, M64)
)
CONTROL = st.tuples(st.integers(0, 255), st.integers(0, 255)) | st.tuples(
    st.sampled_from((0x01, 0x41, 0x81, 0xC1)), st.integers(0x40, 0x4B)
)
PAYLOADS = st.one_of(
    st.binary(max_size=80),
    st.builds(
        lambda sink, sink_to, size, source, source_to: struct.pack(">IQIIQ", sink, sink_to, size, source, source_to),
        STAGS,
        OFFSETS,
        SMALL,
        STAGS,
        OFFSETS,
    ),
    st.builds(
        lambda first, request, stag, to: struct.pack(">IIIQQQQQ", first, request, stag, to, 1, 0, 0, M64),
        SMALL,
        SMALL,
        STAGS,
        OFFSETS,
    ),
    st.builds(lambda request, value: struct.pack(">IQ", request, value), SMALL, OFFSETS),
)


@st.composite
def plausible_ulpdus(draw: st.DrawFn) -> bytes:
    """A segment that looks right enough to get past some of the checks."""
    first, control = draw(CONTROL)
    payload = draw(PAYLOADS)
    if first & 0x80:
        return bytes((first, control)) + struct.pack(">IQ", draw(STAGS), draw(OFFSETS)) + payload
    numbers = (draw(STAGS), draw(SMALL), draw(st.integers(0, 3)), draw(st.one_of(SMALL, st.integers(0, 90))))
    return bytes((first, control)) + struct.pack(">IIII", *numbers) + payload


class Guarded:
    """A stream with work outstanding, all of its memory between guard octets."""

    GUARD = b"\xa5" * 64

    def __init__(self, new_end: Any, stag: int, **negotiated: Any) -> None:
        self.end = new_end(**negotiated)
        self.arenas = []
        region = self.end.memory.regions[stag]
        # The region is a slice of the arena: what is written outside it shows.
        region.octets = self.slice_of(256)
        for wr_id in range(3):
            self.end.stream.post_receive(wr_id, self.slice_of(48))
        self.end.stream.post_read(3, self.slice_of(32), 1, 0)
        self.end.stream.post_fetch_add(4, 1, 0, 1, 0)
        self.end.stream.data_to_send(1 << 20)

    def slice_of(self, length: int) -> memoryview:
        arena = bytearray(self.GUARD + bytes(length) + self.GUARD)
        self.arenas.append(arena)
        return memoryview(arena)[len(self.GUARD) : -len(self.GUARD)]

    def check(self) -> None:
        for arena in self.arenas:
            assert arena.startswith(self.GUARD) and arena.endswith(self.GUARD)
        fpdus = self.end.stream.data_to_send(1 << 20)
        ends = [e for e in self.end.events() if isinstance(e, Failed | TerminateReceived)]
        assert len(ends) == self.end.stream.failed
        terminates = [fpdu for fpdu in fpdus if len(fpdu) > 4 and fpdu[3] == 0x47]
        assert len(terminates) == sum(isinstance(e, Failed) for e in ends)
        if self.end.stream.failed:
            assert self.end.stream.data_to_send(1 << 20) == []
        self.end.stream.flush()
        assert self.end.memory.lent == set()


@settings(max_examples=250, deadline=None)
@given(ulpdus=st.lists(plausible_ulpdus(), min_size=1, max_size=6), markers=st.booleans(), active=st.booleans())
def test_s12_plausible_segments_never_raise_nor_write_outside(
    new_end: Any, stag: int, ulpdus: list[bytes], markers: bool, active: bool
) -> None:
    guarded = Guarded(new_end, stag, rx_markers=markers, active=active)
    encoder = FpduEncoder(crc=True, markers=markers)
    for ulpdu in ulpdus:
        guarded.end.stream.receive_data(encoder.encode((ulpdu,)))
    guarded.check()


@settings(max_examples=200, deadline=None)
@given(octets=st.binary(max_size=600), markers=st.booleans(), crc=st.booleans(), step=st.integers(1, 600))
@example(octets=bytes(600), markers=False, crc=False, step=600)
def test_s12_arbitrary_octets_never_raise_nor_write_outside(
    new_end: Any, stag: int, octets: bytes, markers: bool, crc: bool, step: int
) -> None:
    guarded = Guarded(new_end, stag, rx_markers=markers, crc=crc)
    for at in range(0, len(octets), step):
        guarded.end.stream.receive_data(octets[at : at + step])
    guarded.check()


@settings(max_examples=200, deadline=None)
@given(data=st.data())
def test_s12_mutated_good_octets_never_raise_nor_write_outside(
    new_end: Any, wire: Any, stag: int, base_to: int, data: st.DataObject
) -> None:
    guarded = Guarded(new_end, stag, crc=False)
    good = bytearray().join(
        map(
            wire.fpdu,
            (
                wire.send(1, b"hello"),
                wire.write(stag, base_to, b"world"),
                wire.read_request(1, 1, 0, 200, stag, base_to),
                wire.atomic_request(2, 0, 1, stag, base_to, 1, 0),
                wire.read_response(0xABCD0001, 0, bytes(32)),
                wire.atomic_response(1, 0, 5),
                wire.untagged(wire.IMM, 0, 2, bytes(8)),
                wire.untagged(wire.SEND_INV, 0, 3, b"bye", ulp_word=stag),
            ),
        )
    )
    for _ in range(data.draw(st.integers(0, 3))):
        good[data.draw(st.integers(0, len(good) - 1))] = data.draw(st.integers(0, 255))
    guarded.end.stream.receive_data(good)
    guarded.check()
