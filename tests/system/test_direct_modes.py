"""Direct modes on the wire (draft 6.6): an initiator that reads, allocates and binds by itself, at a target over each
RNIC."""

from __future__ import annotations

import socket
import struct
import time
from collections.abc import Callable
from typing import Any

import pytest

import kbtp
from kbtp.types import Feature, RequestFlag, Status
from kbtp.wire import AllocStore, Bind, DataDescriptor, Free, Load

Serve = Callable[..., Any]
Peers = Callable[..., Any]

BLOCK = 8192
EMPTY = (1 << 64) - 1
ADD_DATA = 0x0000_0001_0000_0010
LOADS = Feature.DIRECT_LOAD
ALLOCATES = Feature.DIRECT_ALLOC | Feature.MASKED_ATOMICS
TRUSTED = {"quota": 0, "direct": Feature.DIRECT_LOAD | Feature.DIRECT_ALLOC, "direct_blocks": 8}
ENTRY = struct.Struct(">HHIQ")
SLOT = struct.Struct(">IIQ")


class Direct:
    """An initiator in direct modes, on a connection by hand."""

    def __init__(self, peer: Any, features: Feature = LOADS | ALLOCATES, quota: int = 4, **hello: Any) -> None:
        self.peer = peer
        self.ack = peer.open_session(requested_features=features, requested_quota=quota, **hello)
        assert self.ack.status is Status.SUCCESS
        assert self.ack.granted_features == features
        self._next_id = 0

    def handle(self, n: int) -> int:
        return int(self.ack.first_handle) + n

    def next_id(self) -> int:
        self._next_id += 1
        return self._next_id

    def take_ticket(self, times: int = 1) -> int:
        """FetchAdd on Head; with `times`, one that no rule allows: as if it were so many."""
        mask = 1 << 63 | 1 << 31 | 1 << (self.ack.ring_order + 3)
        return self.peer.fetch_add(self.ack.head_stag, self.ack.head_offset, times * ADD_DATA, mask) >> 32

    def slot(self, ticket: int) -> int | None:
        to = self.ack.ring_offset + 16 * (ticket % (1 << self.ack.ring_order))
        sequence, _, block_offset = SLOT.unpack(self.peer.read(self.ack.ring_stag, to, 16))
        return block_offset if sequence == ticket and block_offset != EMPTY else None

    def take_block(self, data: bytes) -> tuple[int, int]:
        """A ticket and its block, with `data` in it."""
        ticket = self.take_ticket()
        block_offset = self.slot(ticket)
        assert block_offset is not None
        self.peer.write(self.ack.partition_stag, block_offset, data)
        return ticket, block_offset

    def entry(self, handle: int) -> tuple[int, int, int, int]:
        to = self.ack.table_offset + 16 * (handle - self.ack.table_base_handle)
        return ENTRY.unpack(self.peer.read(self.ack.table_stag, to, 16))

    def bind(self, n: int, ticket: int, block_offset: int, length: int = BLOCK) -> bytes:
        return Bind(self.next_id(), self.handle(n), 0, RequestFlag.SEAL, ticket, length, block_offset).pack()

    def alloc_store(self, n: int, data: bytes) -> bytes:
        flags = RequestFlag.SEAL | RequestFlag.INLINE
        described = DataDescriptor(0, 0, len(data))
        return AllocStore(self.next_id(), self.handle(n), 0, flags, described, inline_data=data).pack()

    def free(self, n: int) -> bytes:
        return Free(self.next_id(), self.handle(n), 0, RequestFlag.NONE).pack()

    def load(self, n: int, region: Any) -> bytes:
        data = DataDescriptor(region.stag, 0, region.length)
        return Load(self.next_id(), self.handle(n), 0, RequestFlag.NONE, data).pack()

    def ask(self, *requests: bytes) -> list[Any]:
        """All at once; their completions, in the order of the requests."""
        self.peer.send(*requests)
        answers = [self.peer.receive() for _ in requests]
        return sorted(answers, key=lambda answer: answer.request_id)


@pytest.fixture
def direct(serve: Serve, peer: Peers) -> Callable[..., tuple[Any, Direct]]:
    """`direct(**config)`: a target and an initiator in direct modes."""

    def join(features: Feature = LOADS | ALLOCATES, quota: int = 4, **config: Any) -> tuple[Any, Direct]:
        server = serve(**{**TRUSTED, **config})
        return server, Direct(peer(server.url), features, quota)

    return join


def octets(seed: int) -> bytes:
    return bytes((seed + n) % 256 for n in range(BLOCK))


def test_what_one_binds_by_itself_others_load(direct: Any, peer: Peers) -> None:
    server, one = direct()
    ticket, block_offset = one.take_block(octets(1))
    [bound] = one.ask(one.bind(0, ticket, block_offset))
    assert (bound.status, bound.data_length, bound.block_offset) == (Status.SUCCESS, BLOCK, block_offset)
    assert one.slot(ticket) is None
    buffer = bytearray(BLOCK)
    with kbtp.connect(server.url, quota=1) as other:
        assert other.load(bound.handle, into=buffer) == BLOCK
    assert buffer == octets(1)

    reader = Direct(peer(server.url), LOADS, 0)
    flags, generation, length, offset = before = reader.entry(bound.handle)
    assert (flags, generation, length, offset) == (3, bound.generation, BLOCK, block_offset)
    assert reader.peer.read(reader.ack.pool_stag, offset, length) == octets(1)
    assert reader.entry(bound.handle) == before
    [freed] = one.ask(one.free(0))
    assert reader.entry(bound.handle) == (0, freed.generation, 0, 0)


def test_what_one_stores_by_request_others_load_by_themselves(direct: Any) -> None:
    server, one = direct(LOADS, 0)
    with kbtp.connect(server.url, quota=4) as other:
        blocks = [other.alloc_store(octets(n)) for n in range(4)]
        for n, block in enumerate(blocks):
            _, _, length, offset = one.entry(block.handle)
            assert one.peer.read(one.ack.pool_stag, offset, length) == octets(n)


def test_bind_needs_direct_allocation_and_the_stream_stays(direct: Any) -> None:
    """Profile 8.3."""
    _, one = direct(LOADS)
    stored, refused, freed = one.ask(one.alloc_store(0, b"data"), one.bind(0, 0, one.ack.pool_base), one.free(0))
    assert (stored.status, freed.status) == (Status.SUCCESS, Status.SUCCESS)
    assert (refused.status, refused.generation) == (Status.UNSUPPORTED, 0)


def test_a_bind_has_its_turn_among_the_requests_on_its_handle(direct: Any) -> None:
    """Profile 3 "Same handle, same session"; what an RNIC serves and what it leaves to the session alike."""
    _, one = direct()
    region = one.peer.register(bytearray(BLOCK))
    for round_ in range(8):
        ticket, block_offset = one.take_block(octets(round_))
        answers = one.ask(
            one.alloc_store(0, b"first"),
            one.free(0),
            one.bind(0, ticket, block_offset),
            one.load(0, region),
            one.bind(0, ticket, block_offset),
            one.free(0),
            one.alloc_store(0, b"last"),
            one.free(0),
        )
        assert [answer.status.name for answer in answers] == [
            "SUCCESS", "SUCCESS", "SUCCESS", "SUCCESS", "ALREADY_BOUND", "SUCCESS", "SUCCESS", "SUCCESS",
        ]  # fmt: skip
        assert bytes(region.view) == octets(round_)


def test_the_targets_own_allocations_come_from_the_same_ring_and_count_tickets(direct: Any) -> None:
    """Profile 6.8, 6.10."""
    server, one = direct()
    free_blocks = server.free_blocks
    (first, first_offset), (second, second_offset) = one.take_block(octets(1)), one.take_block(octets(2))
    answers = one.ask(one.alloc_store(0, b"a"), one.alloc_store(1, b"b"))
    assert [answer.status for answer in answers] == [Status.SUCCESS, Status.SUCCESS]
    mine = {first_offset, second_offset, *(answer.block_offset for answer in answers)}
    partition = range(one.ack.pool_base + 8 * BLOCK, one.ack.pool_base + 12 * BLOCK, BLOCK)
    assert mine == set(partition)
    [refused] = one.ask(one.alloc_store(2, b"c"))
    assert refused.status is Status.NO_SPACE
    bound = one.ask(one.bind(2, second, second_offset), one.bind(3, first, first_offset))
    assert [answer.status for answer in bound] == [Status.SUCCESS, Status.SUCCESS]
    freed = one.ask(*(one.free(n) for n in range(4)))
    assert [answer.status for answer in freed] == [Status.SUCCESS] * 4
    assert server.free_blocks == free_blocks
    assert one.slot(one.take_ticket()) in mine


def test_tickets_that_were_not_bound_are_reclaimed_when_the_stream_ends(direct: Any, peer: Peers) -> None:
    """Profile 3 "End of a stream"."""
    server, one = direct()
    for n in range(3):
        one.take_block(octets(n))
    one.peer.reset()
    assert server.wait_until(lambda: not server.target.sessions and server.free_blocks == 16)
    again = Direct(peer(server.url), quota=8)
    assert again.ack.allocation_quota == 8


@pytest.mark.parametrize("times", [5, 6, 1 << 20])
def test_more_tickets_than_blocks_were_offered_end_the_stream(direct: Any, times: int) -> None:
    """Profile 6.9, 8.10: Terminate 0/2/07, at the latest a quarter of the Ticket Timeout later."""
    server, one = direct(ticket_timeout_s=0.2)
    one.take_ticket(times)
    assert one.peer.terminate() == (0, 2, 7)
    assert server.wait_until(lambda: not server.target.sessions and server.free_blocks == 16)


def test_whoever_lets_a_ticket_run_out_reaches_its_block_no_more(direct: Any) -> None:
    """Draft 3.4, profile 6.11."""
    server, one = direct(ticket_timeout_s=0.1)
    ticket, block_offset = one.take_block(octets(1))
    [session] = server.target.sessions
    partition = server.target.store.partition_of(session.identity)
    assert server.wait_until(lambda: partition.read_slot(ticket) is None)
    [refused] = one.ask(one.bind(0, ticket, block_offset))
    assert refused.status is Status.TICKET_ABANDONED
    [stored] = one.ask(one.alloc_store(0, b"by request it goes on"))
    assert stored.status is Status.SUCCESS
    one.peer.write(one.ack.partition_stag, block_offset, b"late")
    assert one.peer.terminate() == (1, 1, 0)  # RFC 5041 7: invalid STag


def test_a_bind_that_came_in_time_is_served_before_its_ticket_is_abandoned(direct: Any, peer: Peers) -> None:
    """Profile 6.11, also where it waits behind a FREE, and that for a LOAD that does not drain."""
    big, timeout_s = 16 << 20, 1.0
    server, one = direct(quota=2, block_size_bytes=big, direct_blocks=2, pool_blocks=3, ticket_timeout_s=timeout_s)
    source = one.peer.register(bytearray(big))
    stored = AllocStore(99, one.handle(0), 0, RequestFlag.SEAL, DataDescriptor(source.stag, 0, big))
    assert one.ask(stored.pack())[0].status is Status.SUCCESS
    [session] = server.target.sessions
    slow = peer(server.url, receive_buffer_bytes=4096)
    slow.open_session()
    destination = slow.register(bytearray(big))
    slow.send(Load(1, one.handle(0), 0, RequestFlag.NONE, DataDescriptor(destination.stag, 0, big)).pack())
    assert slow.socket.recv(1, socket.MSG_PEEK)
    ticket, block_offset = one.take_block(b"again")
    one.peer.send(one.free(0), one.bind(0, ticket, block_offset, 5))
    assert server.wait_until(lambda: server.outstanding_of(session) == 2)
    late_s = time.monotonic() + 2 * timeout_s
    server._clock = lambda: time.monotonic() + 2 * timeout_s
    assert server.wait_until(lambda: server.target.now_s > late_s + timeout_s)
    slow.reset()
    freed, bound = one.peer.receive(), one.peer.receive()
    assert (freed.status, bound.status) == (Status.SUCCESS, Status.SUCCESS)
    assert one.entry(bound.handle) == (3, bound.generation, 5, block_offset)


@pytest.mark.parametrize(
    ("stag", "right"),
    [("table", "read"), ("pool", "read"), ("ring", "read"), ("partition", "write"), ("head", "atomic")],
)
def test_an_stag_is_for_one_stream_and_one_right(direct: Any, peer: Peers, stag: str, right: str) -> None:
    server, one = direct()
    foreign = Direct(peer(server.url))
    target = getattr(one.ack, f"{stag}_stag")
    to = {"partition": one.ack.pool_base + 8 * BLOCK, "pool": one.ack.pool_base}.get(stag, 0)
    for who, what, expected in (
        (foreign, right, {(1, 1), (0, 1)}),
        (one, "read" if right != "read" else "write", {(1, 1), (0, 1)}),
    ):
        with pytest.raises(AssertionError, match="the target closed"):
            use(who, what, target, to)
        info = who.peer.stream.received_terminate
        assert (info.layer, info.etype) in expected
    assert server.wait_until(lambda: not server.target.sessions and server.free_blocks == 16)


def use(who: Direct, what: str, stag: int, to: int) -> None:
    """Ends with "the target closed the connection" if the target does not let it."""
    if what == "read":
        who.peer.read(stag, to, 8)
    elif what == "write":
        who.peer.write(stag, to, bytes(8))
        who.peer.receive()
    else:
        who.peer.fetch_add(stag, to, 1, 0)
