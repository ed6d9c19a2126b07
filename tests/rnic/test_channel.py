"""A channel as its owner waits on it: limits of time, file descriptors, timers, other threads, asyncio."""

from __future__ import annotations

import asyncio
import select
import signal
import threading
import traceback
from types import FrameType

import pytest

from kbtp.errors import ApiMisuse
from kbtp.verbs.api import Access, Channel, Established, Rnic, Send, StreamEnded, WorkCompletion


def readable(channel: Channel) -> bool:
    return bool(select.select([channel.fileno()], [], [], 0)[0])


def test_a_poll_without_events_returns_when_its_time_is_up(server) -> None:
    assert server.channel.poll(0) == []
    assert server.channel.poll(0.01) == []


def test_next_timeout_follows_the_timers(net, new_rnic) -> None:
    server = net.side(new_rnic(mpa_request_timeout_s=2.0))
    server.listen()
    assert server.channel.next_timeout_s() is None

    raw = net.raw_to(server.listener.address)
    net.settle()
    timeout_s = server.channel.next_timeout_s()
    assert timeout_s is not None
    assert 0 <= timeout_s <= 2.0

    raw.sock.shutdown(1)
    net.pump(lambda: raw.gone)
    assert server.channel.next_timeout_s() is None


def test_fileno_shows_input(pair) -> None:
    assert not readable(pair.server.channel)

    pair.c.post([Send(1, b"x")])

    assert readable(pair.server.channel)
    [got] = pair.server.channel.poll(0)
    assert isinstance(got, WorkCompletion)
    assert not readable(pair.server.channel)


def test_fileno_shows_events_that_a_post_made_at_once(pair) -> None:
    assert not readable(pair.client.channel)

    pair.c.post([Send(1, b"x")])

    assert readable(pair.client.channel)
    assert pair.client.channel.next_timeout_s() == 0
    [done] = pair.client.channel.poll(0)
    assert done.wr_id == 1
    assert not readable(pair.client.channel)
    assert pair.client.channel.next_timeout_s() is None


def test_events_come_in_batches(connect_pair) -> None:
    pair = connect_pair(receives=64)
    pair.c.post([Send(index, b"even") for index in range(64)])

    assert len(pair.server.channel.poll(1.0)) == 64


def test_wake_makes_a_poll_in_another_thread_return(server) -> None:
    polled: list[object] = []
    thread = threading.Thread(target=lambda: polled.append(server.channel.poll(30.0)))
    thread.start()

    server.channel.wake()

    thread.join(10.0)
    assert polled == [[]]


def test_a_wake_before_the_poll_is_not_lost(server) -> None:
    server.channel.wake()
    server.channel.wake()
    assert server.channel.poll(30.0) == []
    assert server.channel.poll(0) == []


@pytest.mark.parametrize("timeout_s", [-1.0, 0.0, float("inf")])
def test_a_time_limit_may_have_passed_or_never_come(server, timeout_s) -> None:
    server.channel.wake()
    assert server.channel.poll(timeout_s) == []


def test_signal_handlers_run_while_poll_waits(server) -> None:
    class Rang(Exception):
        pass

    rings, enough = 0, threading.Event()

    def ring(_: int, frame: FrameType | None) -> None:
        nonlocal rings
        rings += any(entry.f_code.co_name == "poll" for entry, _ in traceback.walk_stack(frame))
        if rings == 3:  # the first may have come before it waited
            raise Rang

    def keep_ringing() -> None:
        while not enough.wait(0.01):
            signal.pthread_kill(threading.main_thread().ident, signal.SIGUSR1)

    before = signal.signal(signal.SIGUSR1, ring)
    bell = threading.Thread(target=keep_ringing)
    try:
        with pytest.raises(Rang):
            bell.start()
            while True:
                server.channel.poll(float("inf"))
    finally:
        enough.set()
        bell.join()
        signal.signal(signal.SIGUSR1, before)


def test_channels_of_one_rnic_may_be_polled_by_different_threads(net, new_rnic) -> None:
    """Each owner has its own channel; they share the RNIC's regions."""
    rnic = new_rnic()
    server = net.side(rnic)
    server.listen()
    stop = threading.Event()

    def serve() -> None:
        while not stop.is_set():
            for event in server.channel.poll(30.0):
                if not isinstance(event, WorkCompletion | StreamEnded):
                    server.accept(event)

    thread = threading.Thread(target=serve)
    thread.start()
    net.sides.remove(server)
    client = net.side(rnic)
    try:
        streams = [client.connect(server.listener.address) for _ in range(4)]
        net.pump(lambda: all(client.established(stream) for stream in streams))
        for stream in streams:
            stream.post([Send(index, b"x") for index in range(8)])
        for stream in streams:
            client.wait(stream, 8)
    finally:
        stop.set()
        server.channel.wake()
        thread.join()
        net.sides.append(server)


def test_asyncio_waits_on_fileno_and_next_timeout(pair) -> None:
    """What an asyncio program does: a reader on `fileno`, a timer for `next_timeout_s`, `poll(0)` for each."""

    async def exchange() -> list[bytes]:
        loop = asyncio.get_running_loop()
        done = asyncio.Event()

        def drive(side) -> None:
            side.poll()
            if pair.client.received(pair.c):
                done.set()

        for side in (pair.server, pair.client):
            loop.add_reader(side.channel.fileno(), drive, side)
        pair.c.post([Send(1, b"ping")])
        pair.s.post([Send(1, b"pong")])
        await asyncio.wait_for(done.wait(), 10.0)
        for side in (pair.server, pair.client):
            loop.remove_reader(side.channel.fileno())
        return pair.client.received(pair.c)

    assert asyncio.run(exchange()) == [b"pong"]


def test_s11_events_that_one_owner_never_reaps_hold_up_no_other(net, server, connect_pair) -> None:
    lazy = connect_pair(server=server)
    lazy.net.sides.remove(lazy.client)
    diligent = connect_pair(server=server)

    lazy.c.post([Send(index, b"x") for index in range(8)])
    diligent.c.post([Send(index, b"x") for index in range(8)])

    diligent.server.wait(diligent.s, 8)
    diligent.client.wait(diligent.c, 8)
    lazy.net.sides.append(lazy.client)
    lazy.client.wait(lazy.c, 8)


def test_a_closed_channel_says_so(net, server, new_rnic) -> None:
    server.channel.close()
    server.channel.close()
    server.channel.wake()

    for act in (
        lambda: server.channel.poll(0),
        server.channel.fileno,
        server.channel.next_timeout_s,
        lambda: server.channel.listen("127.0.0.1", 0),
        lambda: server.connect(("127.0.0.1", 1)),
    ):
        with pytest.raises(ApiMisuse, match="closed"):
            act()
    net.sides.remove(server)
    server.rnic.close()


def test_closing_a_channel_lets_everything_go(net, connect_pair, new_rnic) -> None:
    """Streams, listeners, start-ups of both kinds and goodbyes."""
    pair = connect_pair()
    half = net.raw_to(pair.server.listener.address)
    half.send(b"MPA ID")
    silent = net.raw_listener()
    pending = pair.server.connect(silent.getsockname())
    rejected = net.raw_to(pair.server.listener.address)
    pair.server.answer = lambda request: request.reject(b"")
    rejected.send(b"MPA ID Req Frame" + bytes.fromhex("40 01 0000"))
    net.pump(lambda: rejected.gone)

    pair.server.channel.close()
    net.sides.remove(pair.server)

    assert pending.remote_address
    net.pump(lambda: half.gone and pair.client.ended(pair.c) is not None)
    pair.server.rnic.close()


def test_closing_an_rnic_closes_its_channels_and_revokes_its_regions(net, pair) -> None:
    region = pair.server.region(8, Access.REMOTE_WRITE)

    pair.server.rnic.close()
    pair.server.rnic.close()
    net.sides.remove(pair.server)

    assert not region.valid
    with pytest.raises(ApiMisuse, match="closed"):
        pair.server.channel.poll(0)
    pair.client.wait_end(pair.c)


def test_an_rnic_says_what_it_can_do(server) -> None:
    rnic: Rnic = server.rnic
    assert rnic.name
    can = rnic.capabilities
    assert can.atomics
    assert can.send_with_invalidate
    assert can.max_ird >= 16
    assert can.max_ord >= 16
    assert Established.__doc__
