"""A stream that carries an initiator's requests (`kbtp.verbs.requester`), against a target that is only a stream."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from kbtp.errors import ApiMisuse, ConnectionLost, PeerMisbehaved
from kbtp.types import BlockRef, Opcode, RequestFlag, Status
from kbtp.verbs.api import Access, BatchDone, RdmaWrite, Recv, Send, Sge
from kbtp.verbs.buffers import RegisteredBuffer, buffer_of
from kbtp.verbs.requester import NO_CHECKSUM, RECORD, CarryingStream, RecordStatus, Requester, RequestGrant
from kbtp.wire import Completion, Free, Load, Store, parse_request

pytestmark = pytest.mark.parametrize("rnic_name", ["native"], indirect=True)

CREDITS = 3
FIRST_HANDLE = 40
HANDLES = 2
LOAD, STORE, ALLOC_STORE, FREE = int(Opcode.LOAD), int(Opcode.STORE), int(Opcode.ALLOC_STORE), int(Opcode.FREE)
ANY = 0


@dataclass
class Session:
    """`requester` on one end of `pair`, requests as a target reads them on the other."""

    pair: Any
    requester: Requester

    def requests(self, count: int) -> list[Any]:
        """All requests so far, once there are `count`."""
        self.pair.net.pump(lambda: len(self.pair.server.received(self.pair.s)) >= count)
        received = self.pair.server.received(self.pair.s)
        assert len(received) == count
        return [parse_request(octets) for octets in received]

    def answer(self, request: Any, status: Status = Status.SUCCESS, **fields: int) -> None:
        answer = Completion(
            **{"request_id": request.request_id, "handle": request.handle, "generation": 2, "status": status, **fields}
        )
        self.pair.s.post([Send(0, inline=answer.pack())])

    def done(self, batch: int) -> tuple[np.ndarray, dict[int, str]]:
        """Records and misuses of `batch`, once its event has come."""
        events = self.pair.client.events
        self.pair.net.pump(lambda: BatchDone(self.pair.c, batch) in events)
        taken = self.requester.take(batch)
        assert taken is not None
        records = np.frombuffer(taken[0], RECORD)
        assert taken[1] == (not records["status"].any())
        return records, dict(taken[2])


def grant(pair: Any, **changes: Any) -> RequestGrant:
    receive = pair.client.buffers[pair.c][0].sge
    granted = {
        "request_credits": CREDITS,
        "first_handle": FIRST_HANDLE,
        "handle_count": HANDLES,
        "invalidate": True,
        "inline_max_bytes": 16,
        "receives": receive.region,
        "max_message_bytes": receive.length,
    }
    return RequestGrant(**{**granted, **changes})


@dataclass
class Elsewhere:
    """A block or a buffer that the RNIC does not understand, and what it stands for."""

    meant: Any


def prepare(
    opcode: int, generation: object, block: object, buffer: object
) -> tuple[BlockRef | None, RegisteredBuffer | None]:
    if isinstance(block, Elsewhere) and isinstance(buffer, Elsewhere):
        return block.meant, buffer.meant
    raise ApiMisuse(f"{opcode} {generation!r} {block!r} {buffer!r} is nothing")


def carry(pair: Any, **changes: Any) -> Requester:
    assert isinstance(pair.c, CarryingStream)
    return pair.c.carry(grant(pair, **changes), prepare)


@pytest.fixture
def session(pair: Any) -> Session:
    return Session(pair, carry(pair))


def test_a_load_is_placed_where_the_request_says(session: Session) -> None:
    buffer = bytearray(100)
    batch = session.requester.submit(LOAD, 0, ANY, [BlockRef(7, 3, 100)], [buffer], False)

    [request] = session.requests(1)
    assert isinstance(request, Load)
    assert (request.handle, request.generation, request.data.length) == (7, 3, 100)
    assert request.flags is RequestFlag.INVALIDATE  # the STag is for this request alone
    source = session.pair.server.sge(bytearray(b"k" * 90))
    session.pair.s.post([RdmaWrite(1, (source,), request.data.stag, request.data.to)])
    session.answer(request, data_length=90, block_offset=4096)

    records, misuses = session.done(batch)
    assert records.tolist() == [(Status.SUCCESS, 2, 90, 7, 4096, NO_CHECKSUM)]
    assert (bytes(buffer), misuses) == (b"k" * 90 + bytes(10), {})


def test_memory_of_a_region_is_used_through_it(session: Session) -> None:
    cache = np.zeros((4, 256), np.uint8)
    region = session.pair.client.region(cache, Access.REMOTE_WRITE, session.pair.c)
    session.requester.add_region(region, buffer_of(cache).address)
    session.requester.submit(LOAD, 0, ANY, [1, 2], [cache[2], np.zeros(256, np.uint8)], False)

    within, outside = session.requests(2)
    assert (within.data.stag, within.data.to, within.flags) == (region.stag, region.base_to + 512, RequestFlag.NONE)
    assert outside.data.stag != region.stag

    region.revoke()
    session.requester.submit(LOAD, 0, ANY, [3], [cache[1]], False)
    assert session.requests(3)[2].data.stag != region.stag


def test_a_region_that_is_revoked_while_its_request_waits_for_a_credit(session: Session) -> None:
    cache = np.zeros(4 * 256, np.uint8).reshape(4, 256)
    region = session.pair.client.region(cache, Access.REMOTE_WRITE, session.pair.c)
    session.requester.add_region(region, buffer_of(cache).address)
    batch = session.requester.submit(LOAD, 0, ANY, range(4), list(cache), False)
    requests = session.requests(CREDITS)
    region.revoke()
    for request in requests:
        session.answer(request, Status.NOT_BOUND)

    records, misuses = session.done(batch)
    assert records["status"].tolist() == [Status.NOT_BOUND] * 3 + [RecordStatus.MISUSED]
    assert "is revoked: register the buffer again" in misuses[3]


def test_data_travels_inside_a_request_as_far_as_it_may(session: Session) -> None:
    session.requester.submit(STORE, int(RequestFlag.SEAL), ANY, [1, 2, 3], [b"", b"s" * 16, b"l" * 17], False)
    empty, short, long = session.requests(3)
    assert all(isinstance(request, Store) for request in (empty, short, long))
    assert bytes(empty.inline_data) == b""
    assert (bytes(short.inline_data), short.flags) == (b"s" * 16, RequestFlag.INLINE | RequestFlag.SEAL)
    assert (long.data.length, long.flags) == (17, RequestFlag.INVALIDATE | RequestFlag.SEAL)


def test_requests_wait_for_credits_and_batches_for_their_last(session: Session) -> None:
    batch = session.requester.submit(FREE, 0, ANY, range(5), None, False)
    for answered in range(5):
        requests = session.requests(min(5, answered + CREDITS))
        assert isinstance(requests[answered], Free)
        assert session.requester.take(batch) is None
        session.answer(requests[answered], Status.NOT_BOUND)
    assert session.done(batch)[0]["status"].tolist() == [Status.NOT_BOUND] * 5
    assert session.requester.take(batch) is None


def test_handles_are_chosen_until_none_is_left(session: Session) -> None:
    batch = session.requester.submit(ALLOC_STORE, 0, ANY, [None] * 3, [b"x"] * 3, False)
    first, second = session.requests(2)
    assert (first.handle, second.handle) == (FIRST_HANDLE, FIRST_HANDLE + 1)
    session.answer(first)
    session.answer(second, Status.ALREADY_BOUND)  # there is no other left to try
    assert session.done(batch)[0]["status"].tolist() == [Status.SUCCESS, RecordStatus.NO_HANDLE, RecordStatus.NO_HANDLE]


def test_a_handle_that_is_bound_is_tried_no_more_and_the_data_goes_out_again(session: Session) -> None:
    data = b"l" * 100
    batch = session.requester.submit(ALLOC_STORE, 0, ANY, [None], [data], False)
    [first] = session.requests(1)
    session.answer(first, Status.ALREADY_BOUND)
    _, second = session.requests(2)
    assert (first.handle, second.handle) == (FIRST_HANDLE, FIRST_HANDLE + 1)
    assert first.data.stag != second.data.stag
    session.answer(second, data_length=100)
    assert session.done(batch)[0].tolist() == [(Status.SUCCESS, 2, 100, FIRST_HANDLE + 1, 0, NO_CHECKSUM)]


def test_two_loads_into_the_same_memory(session: Session) -> None:
    buffer = np.zeros(64, np.uint8)
    first = session.requester.submit(LOAD, 0, ANY, [1, 2], [buffer[:40], buffer[30:]], False)
    second = session.requester.submit(LOAD, 0, ANY, [3], [buffer[:1]], False)
    assert "in the same memory" in session.done(second)[1][0]
    [request] = session.requests(1)
    session.answer(request, data_length=40)
    records, misuses = session.done(first)
    assert records["status"].tolist() == [Status.SUCCESS, RecordStatus.MISUSED]
    assert list(misuses) == [1]
    session.requester.submit(LOAD, 0, ANY, [4], [buffer[:40]], False)
    assert session.requests(2)[1].handle == 4


def test_memory_that_cannot_be_written_takes_no_load(session: Session) -> None:
    batch = session.requester.submit(LOAD, 0, ANY, [1], [b"read only"], False)
    records, misuses = session.done(batch)
    assert records["status"].tolist() == [RecordStatus.MISUSED]
    assert "writable memory" in misuses[0]


@pytest.mark.parametrize(
    ("block", "buffer"),
    [
        (-1, b"x"), (1 << 64, b"x"), ("7", b"x"), (1.0, b"x"), (None, b"x"), (BlockRef(1, 1 << 16, 0), b"x"),
        (1, None), (1, object()), (1, np.zeros((4, 4), np.uint8)[:, 0]),
    ],
)  # fmt: skip
def test_what_is_not_understood_and_means_nothing_is_not_sent(session: Session, block: Any, buffer: Any) -> None:
    batch = session.requester.submit(STORE, 0, 9, [5, block, 6], [b"y", buffer, b"z"], False)
    first, last = session.requests(2)
    assert (first.handle, last.handle) == (5, 6)
    session.answer(first)
    session.answer(last)
    records, misuses = session.done(batch)
    assert records["status"].tolist() == [Status.SUCCESS, RecordStatus.MISUSED, Status.SUCCESS]
    assert misuses == {1: f"{STORE} 9 {block!r} {buffer!r} is nothing"}

    alone = session.requester.run_one(STORE, 0, 9, block, buffer, 1.0)
    assert alone == ((RecordStatus.MISUSED, 0, 0, 0, 0), misuses[1])


def test_a_generation_that_is_none_is_asked_about_as_it_is(session: Session) -> None:
    octets, _, misuses = session.requester.run(STORE, 0, 1 << 16, [5], [b"y"], False, 1.0)  # type: ignore[misc]
    assert np.frombuffer(octets, RECORD)["status"].tolist() == [RecordStatus.MISUSED]
    assert misuses == [(0, f"{STORE} 65536 5 b'y' is nothing")]


@pytest.mark.parametrize("buffers", [[b"x"], [b"x", b"y", b"z"]])
def test_as_many_buffers_as_blocks(session: Session, buffers: list[bytes]) -> None:
    with pytest.raises(ValueError, match=f"{len(buffers)} buffers for 2 blocks"):
        session.requester.run(STORE, 0, ANY, [1, 2], buffers, False, 1.0)
    assert session.requester.take(1) is None


def test_what_is_found_elsewhere_is_stored_too(session: Session) -> None:
    octets = buffer_of(bytearray(b"found elsewhere"))
    blocks = [Elsewhere(BlockRef(1, 5, 0)), 2, Elsewhere(BlockRef(3, 0, 0))]
    session.requester.submit(STORE, 0, ANY, blocks, [Elsewhere(octets), b"here", Elsewhere(None)], False)
    requests = session.requests(3)
    assert [bytes(one.inline_data) for one in requests] == [b"found elsewhere", b"here", b""]
    assert [(one.handle, one.generation) for one in requests] == [(1, 5), (2, 0), (3, 0)]


def test_an_exception_that_is_no_misuse_is_raised_and_the_batch_ends_with_what_had_left(pair: Any) -> None:
    def interrupted(*_: object) -> Any:
        raise KeyboardInterrupt

    session = Session(pair, pair.c.carry(grant(pair), interrupted))
    blocks = [*range(8), Elsewhere(None)]
    with pytest.raises(KeyboardInterrupt):
        session.requester.submit(FREE, 0, ANY, blocks, None, False)
    for sent in range(1, 5):
        session.answer(session.requests(min(sent + CREDITS - 1, 4))[sent - 1])
        session.pair.net.settle()
    taken = session.requester.take(1)
    assert taken is not None
    statuses = np.frombuffer(taken[0], RECORD)["status"].tolist()
    assert statuses == [Status.SUCCESS] * 4 + [RecordStatus.LOST] * 5


def test_a_batch_of_nothing_is_done(session: Session) -> None:
    batch = session.requester.submit(FREE, 0, ANY, [], None, False)
    assert len(session.done(batch)[0]) == 0
    assert session.requester.run(FREE, 0, ANY, [], None, False, 0) == (b"", True, [])


# --- waiting -----------------------------------------------------------------------------------


def served_by(session: Session, serve: Callable[[], None]) -> threading.Thread:
    """`serve` in a thread that polls the target's end alone."""
    session.pair.net.sides.remove(session.pair.client)
    thread = threading.Thread(target=serve)
    thread.start()
    return thread


def test_run_waits_for_the_answers(session: Session) -> None:
    def serve() -> None:
        for request in session.requests(2):
            session.answer(request, Status.NOT_BOUND)
        session.pair.net.pump(lambda: len(session.pair.server.received(session.pair.s)) == 3)
        session.answer(session.requests(3)[2])

    thread = served_by(session, serve)
    ran = session.requester.run(FREE, 0, ANY, [1, 2], None, False, 10.0)
    assert isinstance(ran, tuple)
    assert np.frombuffer(ran[0], RECORD)["handle"].tolist() == [1, 2]
    assert session.requester.run_one(FREE, 0, ANY, 3, None, 10.0) == ((Status.SUCCESS, 2, 0, 3, 0), None)
    thread.join()


def test_what_is_done_meanwhile_is_done_once_the_requests_have_left(session: Session) -> None:
    session.pair.net.sides.remove(session.pair.client)
    ran = session.requester.run(
        FREE, 0, ANY, [1, 2], None, False, 10.0, lambda: [session.answer(one) for one in session.requests(2)] and None
    )
    assert isinstance(ran, tuple)
    assert np.frombuffer(ran[0], RECORD)["handle"].tolist() == [1, 2]


def test_what_is_raised_meanwhile_ends_a_wait(session: Session) -> None:
    with pytest.raises(KeyError, match="meanwhile"):
        session.requester.run(FREE, 0, ANY, [1], None, False, 10.0, lambda: {}["meanwhile"])
    assert [request.handle for request in session.requests(1)] == [1]


def test_run_that_is_not_done_in_time_gives_the_number_of_its_batch(session: Session) -> None:
    batch = session.requester.run(FREE, 0, ANY, [1], None, False, 0.01)
    assert isinstance(batch, int)
    assert session.requester.take(batch) is None
    assert isinstance(session.requester.run_one(FREE, 0, ANY, 2, None, 0.0), int)


def test_the_handler_of_a_signal_ends_a_wait(session: Session) -> None:
    def handler(*_: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGUSR2, handler)
    try:
        thread = served_by(session, lambda: (session.requests(1), os.kill(os.getpid(), signal.SIGUSR2)))
        with pytest.raises(KeyboardInterrupt):
            session.requester.run(FREE, 0, ANY, [1], None, False, 30.0)
        thread.join()
    finally:
        signal.signal(signal.SIGUSR2, before)


# --- the end -----------------------------------------------------------------------------------


def test_what_is_not_answered_when_the_stream_ends_is_lost(session: Session) -> None:
    buffer = bytearray(100)
    batch = session.requester.submit(LOAD, 0, ANY, range(5), [bytearray(8) for _ in range(5)], False)
    session.answer(session.requests(CREDITS)[0], data_length=8)
    session.requests(CREDITS + 1)
    session.pair.s.abort()
    session.pair.client.wait_end(session.pair.c)

    taken = session.requester.take(batch)
    assert taken is not None
    assert np.frombuffer(taken[0], RECORD)["status"].tolist() == [Status.SUCCESS] + [RecordStatus.LOST] * 4
    assert BatchDone(session.pair.c, batch) not in session.pair.client.events
    late = session.requester.run(LOAD, 0, ANY, [1], [buffer], False, 1.0)
    assert isinstance(late, tuple)
    assert np.frombuffer(late[0], RECORD)["status"].tolist() == [RecordStatus.LOST]


def test_nothing_is_placed_once_a_request_has_ended(session: Session) -> None:
    buffer = bytearray(8)
    batch = session.requester.submit(LOAD, 0, ANY, [1], [buffer], False)
    [request] = session.requests(1)
    session.answer(request, Status.NOT_BOUND)
    session.done(batch)
    session.pair.s.post([RdmaWrite(1, (session.pair.server.sge(b"too late"),), request.data.stag, request.data.to)])
    assert isinstance(session.pair.client.wait_end(session.pair.c).reason, PeerMisbehaved)
    assert buffer == bytes(8)


@pytest.mark.parametrize(
    ("message", "said"),
    [
        (Completion(99, 1, 0, Status.SUCCESS).pack(), "Request ID 99, which is not outstanding"),
        (Completion(1, 2, 0, Status.SUCCESS).pack(), "names handle 2, asked was 1"),
        (bytes(40), "version"),
        (Completion(1, 1, 0, Status.SUCCESS).pack()[:39], "message"),
        (Completion(1, 1, 0, Status.SUCCESS).pack() + bytes(500), "message"),
    ],
)
def test_a_target_that_breaks_the_protocol(session: Session, message: bytes, said: str) -> None:
    batch = session.requester.submit(FREE, 0, ANY, [1], None, False)
    session.requests(1)
    session.pair.s.post([Send(0, inline=message)])
    reason = session.pair.client.wait_end(session.pair.c).reason
    assert isinstance(reason, PeerMisbehaved)
    assert said in str(reason)
    taken = session.requester.take(batch)
    assert taken is not None
    assert np.frombuffer(taken[0], RECORD)["status"].tolist() == [RecordStatus.LOST]


# --- what could never work ---------------------------------------------------------------------


def test_a_stream_carries_requests_once_and_only_while_it_lives(pair: Any) -> None:
    carry(pair)
    with pytest.raises(ApiMisuse, match="carries requests once"):
        carry(pair)
    pair.c.abort()
    with pytest.raises(ConnectionLost):
        carry(pair)


def test_receive_buffers_of_another_rnic(pair: Any, new_rnic: Any) -> None:
    other = new_rnic()
    region = other.register(bytearray(64), Access.NONE, pd=other.allocate_pd())
    with pytest.raises(ApiMisuse, match="registered with this RNIC"):
        carry(pair, receives=region)
    other.close()


def test_receives_are_used_again(session: Session) -> None:
    """More answers than there are receive buffers."""
    for number in range(20):
        batch = session.requester.submit(FREE, 0, ANY, [number], None, False)
        session.answer(session.requests(number + 1)[number])
        session.pair.s.post_recv([Recv(0, Sge(session.pair.server.buffers[session.pair.s][0].sge.region, 0, 64))])
        assert session.done(batch)[0]["handle"].tolist() == [number]
