"""How streams end: what was outstanding, in which order it is reported, and what each side is told."""

from __future__ import annotations

import numpy as np
import pytest

from kbtp.errors import ConnectionLost, DeadlineExceeded, PeerMisbehaved
from kbtp.types import TerminateCause as Cause
from kbtp.verbs.api import (
    Access,
    FetchAdd,
    RdmaRead,
    RdmaWrite,
    Send,
    Sge,
    StreamEnded,
    WcOpcode,
    WcStatus,
    WorkCompletion,
)

R, W, A = Access.REMOTE_READ, Access.REMOTE_WRITE, Access.REMOTE_ATOMIC
PATIENCE_S = 20.0


TERMINATE_0_2_07 = bytes.fromhex("4147 00000000 00000002 00000001 00000000 02070000")


def connected_to_raw(net, rnic):
    """A side whose stream leads to a peer that is only a socket."""
    client = net.side(rnic)
    raw_listener = net.raw_listener()
    stream = client.connect(raw_listener.getsockname())
    raw = net.raw_from(raw_listener)
    raw.respond()
    net.pump(lambda: client.established(stream) is not None)
    return client, stream, raw


def statuses(side, stream) -> list[tuple[int, WcOpcode, WcStatus]]:
    return [(done.wr_id, done.opcode, done.status) for done in side.completions(stream)]


def assert_flushed(side, stream, count: int) -> None:
    """The last completions are `count` flushed ones."""
    flags = [done.status is WcStatus.FLUSHED for done in side.completions(stream)]
    assert flags == [False] * (len(flags) - count) + [True] * count


# --- in order ---


@pytest.mark.parametrize("by_client", [True, False])
def test_disconnect_ends_both_sides_without_a_reason(pair, by_client) -> None:
    pair.c.post([Send(1, b"last words")])
    (pair.c if by_client else pair.s).disconnect()

    for side, stream in ((pair.server, pair.s), (pair.client, pair.c)):
        ended = side.wait_end(stream)
        assert (ended.reason, ended.terminate, ended.cause) == (None, None, None)
    assert pair.server.received(pair.s) == [b"last words"]


def test_disconnect_lets_everything_posted_finish_first(pair) -> None:
    size = 3 << 20
    source = pair.server.region(b"\x5a" * size, R)
    target = pair.server.region(size, W)
    counter = pair.server.region(np.zeros(1, np.uint64), A)
    sink = pair.client.region(size)

    pair.c.post(
        [
            *(RdmaRead(index, Sge(sink, 0, size), source.stag, 0) for index in range(6)),
            FetchAdd(6, counter.stag, 0, 1, 0),
            RdmaWrite(7, (Sge(sink, 0, size),), target.stag, 0),
            Send(8, b"the end"),
        ]
    )
    pair.c.disconnect()

    assert pair.client.wait_end(pair.c).reason is None
    done = pair.client.completions(pair.c)
    assert [completion.wr_id for completion in done[:9]] == list(range(9))
    assert {completion.status for completion in done[:9]} == {WcStatus.SUCCESS}
    assert_flushed(pair.client, pair.c, len(done) - 9)
    assert pair.server.wait_end(pair.s).reason is None
    assert pair.server.received(pair.s) == [b"the end"]
    assert target.view == b"\x5a" * size


def test_disconnect_of_both_sides_at_once(pair) -> None:
    pair.c.post([Send(1, b"bye")])
    pair.server.wait(pair.s, 1)
    pair.s.post([Send(1, b"bye")])
    pair.s.disconnect()
    pair.c.disconnect()

    assert pair.server.wait_end(pair.s).reason is None
    assert pair.client.wait_end(pair.c).reason is None
    assert pair.client.received(pair.c) == [b"bye"]


def test_after_disconnect_nothing_more_is_posted(pair) -> None:
    pair.c.disconnect()
    pair.c.disconnect()

    with pytest.raises(ConnectionLost, match="disconnecting"):
        pair.c.post([Send(1)])
    pair.client.wait_end(pair.c)


def test_posting_to_an_ended_stream_raises_and_ending_it_again_does_nothing(pair) -> None:
    pair.c.disconnect()
    pair.client.wait_end(pair.c)
    pair.server.wait_end(pair.s)
    events = len(pair.client.events)

    with pytest.raises(ConnectionLost, match="has ended"):
        pair.c.post([Send(1)])
    with pytest.raises(ConnectionLost, match="has ended"):
        pair.c.post_recv(pair.client.recvs(1))
    assert not pair.client.region(8, R, stream=pair.c).valid
    pair.c.terminate(Cause.LOCAL_CATASTROPHIC)
    pair.c.disconnect()
    pair.c.abort()
    pair.net.settle()
    assert len(pair.client.events) == events


def test_a_peer_that_closes_while_work_is_outstanding_is_a_loss(net, new_rnic) -> None:
    client, stream, raw = connected_to_raw(net, new_rnic())
    sink = client.region(8)
    stream.post([Send(1, b"x"), RdmaRead(2, Sge(sink, 0, 8), 1, 0)])
    net.pump(lambda: len(raw.ulpdus()) == 2)

    raw.close()

    ended = client.wait_end(stream)
    assert isinstance(ended.reason, ConnectionLost)
    assert "1 work requests outstanding" in str(ended.reason)
    assert statuses(client, stream)[:2] == [
        (1, WcOpcode.SEND, WcStatus.SUCCESS),
        (2, WcOpcode.RDMA_READ, WcStatus.FLUSHED),
    ]


def test_disconnect_does_not_wait_for_ever_for_the_peers_fin(net, new_rnic) -> None:
    client, stream, _ = connected_to_raw(net, new_rnic(disconnect_s=0.05))

    stream.disconnect()

    ended = client.wait_end(stream)
    assert isinstance(ended.reason, DeadlineExceeded)
    assert "did not close its side" in str(ended.reason)


def test_disconnect_does_not_wait_for_ever_for_posted_work(net, new_rnic) -> None:
    client, stream, _ = connected_to_raw(net, new_rnic(disconnect_s=0.05))
    stream.post([FetchAdd(1, 1, 0, 1, 0)])

    stream.disconnect()

    ended = client.wait_end(stream)
    assert isinstance(ended.reason, DeadlineExceeded)
    assert "did not let the posted work finish" in str(ended.reason)
    assert (1, WcOpcode.ATOMIC, WcStatus.FLUSHED) in statuses(client, stream)


# --- with a Terminate ---


@pytest.mark.parametrize("by_client", [True, False])
def test_r41_r44_terminate_by_either_side(pair, by_client) -> None:
    pair.c.post([Send(1, b"x")])
    pair.server.wait(pair.s, 1)
    here, there = ((pair.client, pair.c), (pair.server, pair.s))[:: 1 if by_client else -1]

    here[1].terminate(Cause.RDMAP_UNSPECIFIED)

    ended = here[0].wait_end(here[1])
    assert isinstance(ended.reason, ConnectionLost)
    assert (ended.cause, ended.terminate) == (Cause.RDMAP_UNSPECIFIED, None)
    told = there[0].wait_end(there[1])
    assert isinstance(told.reason, ConnectionLost)
    assert told.terminate is not None
    assert (told.terminate.layer, told.terminate.etype, told.terminate.code) == (0, 2, 0xFF)
    assert_flushed(pair.client, pair.c, 8)
    assert_flushed(pair.server, pair.s, 7)


def test_m21_a_passive_side_that_may_not_send_yet_just_closes(pair) -> None:
    pair.s.terminate(Cause.DDP_NO_BUFFER)

    ended = pair.server.wait_end(pair.s)
    assert ended.reason is not None
    assert ended.cause is None, "no Terminate was sent"
    assert pair.client.wait_end(pair.c).reason is None


def test_a_terminate_comes_after_what_was_sent_before(pair) -> None:
    target = pair.server.region(1 << 20, W)

    pair.c.post([RdmaWrite(1, (pair.client.sge(b"\x01" * (1 << 20)),), target.stag, 0), Send(2, b"done")])
    pair.client.wait(pair.c, 2)
    pair.c.terminate(Cause.RDMAP_CATASTROPHIC_STREAM)

    told = pair.server.wait_end(pair.s)
    assert told.terminate is not None
    assert pair.server.received(pair.s) == [b"done"]
    assert target.view == b"\x01" * (1 << 20)


def test_d21_a_send_without_a_receive_buffer(connect_pair) -> None:
    pair = connect_pair(receives=2)

    pair.c.post([Send(index, b"x") for index in range(3)])

    ended = pair.server.wait_end(pair.s)
    assert isinstance(ended.reason, PeerMisbehaved)
    assert ended.cause is Cause.DDP_NO_BUFFER
    assert pair.server.received(pair.s) == [b"x", b"x"]
    told = pair.client.wait_end(pair.c)
    assert told.terminate is not None
    assert (told.terminate.layer, told.terminate.etype, told.terminate.code) == (1, 2, 2)


@pytest.mark.parametrize("length", [1025, 4096])
def test_d24_r30_a_send_longer_than_its_receive_buffer(pair, length) -> None:
    pair.c.post([Send(1, bytes(1024)), Send(2, b"\xff" * length)])

    ended = pair.server.wait_end(pair.s)
    assert ended.cause is Cause.DDP_MESSAGE_TOO_LONG
    assert [len(octets) for octets in pair.server.received(pair.s)] == [1024]
    second, third = (pair.server.buffers[pair.s][index].sge for index in (1, 2))
    assert second.region.view[third.offset : third.offset + 1024] == bytes(1024), "nothing past the end"


# --- without a word ---


def test_abort_flushes_at_once_and_the_peer_sees_a_loss(pair) -> None:
    sink = pair.client.region(8)
    pair.c.post([Send(1, b"x"), RdmaRead(2, Sge(sink, 0, 0), 1, 0)])

    pair.c.abort()

    ended = pair.client.wait_end(pair.c)
    assert "aborted" in str(ended.reason)
    assert (ended.terminate, ended.cause) == (None, None)
    assert_flushed(pair.client, pair.c, 1 + 8)
    told = pair.server.wait_end(pair.s)
    assert isinstance(told.reason, ConnectionLost)
    assert "was lost: Connection reset by peer" in str(told.reason)


def test_a_post_that_finds_the_connection_dead_is_flushed_not_raised(pair) -> None:
    pair.s.abort()
    assert pair.server.channel.poll(0)[-1].stream is pair.s

    pair.c.post([Send(1, b"into the void")])
    pair.net.pump(lambda: pair.client.ended(pair.c) is not None)

    assert isinstance(pair.client.wait_end(pair.c).reason, ConnectionLost)


def test_a_terminate_that_came_before_the_connection_broke_is_still_read(net, new_rnic) -> None:
    client, stream, raw = connected_to_raw(net, new_rnic())
    stream.post([Send(1, b"never read")])
    raw.sock.send(raw.encoder.encode([TERMINATE_0_2_07]))
    raw.close()  # a RST, because of the unread Send

    stream.post([Send(2, b"cannot be sent")])  # before anybody polled

    ended = client.wait_end(stream)
    assert ended.terminate is not None
    assert (ended.terminate.layer, ended.terminate.etype, ended.terminate.code) == (0, 2, 7)


# --- order at the end ---


def test_scoped_regions_are_revoked_before_the_flushes_are_reported(pair) -> None:
    scoped = pair.server.region(8, W, stream=pair.s)
    shared = pair.server.region(8, W)
    pair.c.abort()

    seen = []
    while not seen:
        seen = [(type(event), scoped.valid) for event in pair.server.channel.poll(PATIENCE_S)]

    assert seen == [(WorkCompletion, False)] * 8 + [(StreamEnded, False)]
    assert shared.valid


def test_work_and_receives_are_flushed_in_their_order(connect_pair) -> None:
    pair = connect_pair(client_depth=(0, 1))
    sink = pair.client.region(8)
    pair.c.post(
        [
            RdmaRead(1, Sge(sink, 0, 8), pair.server.region(8, R).stag, 0),
            Send(2, b"x"),
            FetchAdd(3, 1, 0, 1, 0),
            RdmaWrite(4, (), 1, 0),
        ]
    )

    pair.c.abort()
    pair.client.wait_end(pair.c)

    assert statuses(pair.client, pair.c) == [
        (1, WcOpcode.RDMA_READ, WcStatus.FLUSHED),
        (2, WcOpcode.SEND, WcStatus.FLUSHED),
        (3, WcOpcode.ATOMIC, WcStatus.FLUSHED),
        (4, WcOpcode.RDMA_WRITE, WcStatus.FLUSHED),
        *((index, WcOpcode.RECV, WcStatus.FLUSHED) for index in range(8)),
    ]


def test_closing_the_channel_aborts_its_streams(pair) -> None:
    scoped = pair.client.region(8, W, stream=pair.c)

    pair.client.channel.close()
    pair.net.sides.remove(pair.client)

    assert not scoped.valid
    assert "reset by peer" in str(pair.server.wait_end(pair.s).reason)
    pair.client.rnic.close()
