"""What only the reference RNIC shows: its sockets, its timers by a clock that the test turns, its limits."""

from __future__ import annotations

import errno
import functools
import gc
import socket
import time

import pytest

from kbtp.errors import ConnectionLost, DeadlineExceeded
from kbtp.limits import (
    RNIC_IOV_MAX,
    TCP_KEEPALIVE_IDLE_S,
    TCP_KEEPALIVE_INTERVAL_S,
    TCP_KEEPALIVE_PROBES,
    TCP_USER_TIMEOUT_S,
)
from kbtp.rnic.reference import ReferenceOptions, ReferenceRnic, connector, listener, loop
from kbtp.rnic.reference.connector import TcpAddress
from kbtp.rnic.reference.tcp import TcpLink, address_text
from kbtp.types import TerminateCause
from kbtp.verbs.api import RdmaWrite, Send, WcStatus


class Clock:
    """Real time, and what the test adds to it."""

    def __init__(self) -> None:
        self.ahead_s = 0.0

    def monotonic(self) -> float:
        return time.monotonic() + self.ahead_s


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    for module in (loop, connector):
        monkeypatch.setattr(module, "time", clock)
    return clock


def connected_to_raw(net, rnic):
    client = net.side(rnic)
    raw_listener = net.raw_listener()
    stream = client.connect(raw_listener.getsockname(), timeout_s=1e6)
    raw = net.raw_from(raw_listener)
    raw.respond()
    net.pump(lambda: client.established(stream) is not None)
    return client, stream, raw


def sockets_of(kind: int = socket.SOCK_STREAM) -> list[socket.socket]:
    return [
        thing
        for thing in gc.get_objects()
        if isinstance(thing, socket.socket) and thing.fileno() >= 0 and thing.type == kind
    ]


# --- TCP ---


@pytest.fixture
def rnic_name() -> str:
    return "reference"


def test_sockets_of_both_sides_notice_a_peer_that_is_lost(pair) -> None:
    ports = {pair.server.listener.address[1]}
    mine = [
        sock
        for sock in sockets_of()
        if sock.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN) == 0
        and ports & {sock.getsockname()[1], sock.getpeername()[1]}
    ]

    assert len(mine) == 2
    for sock in mine:
        assert not sock.getblocking()
        options = {
            name: sock.getsockopt(socket.IPPROTO_TCP, getattr(socket, name))
            for name in ("TCP_NODELAY", "TCP_KEEPIDLE", "TCP_KEEPINTVL", "TCP_KEEPCNT", "TCP_USER_TIMEOUT")
        }
        assert options == {
            "TCP_NODELAY": 1,
            "TCP_KEEPIDLE": TCP_KEEPALIVE_IDLE_S,
            "TCP_KEEPINTVL": TCP_KEEPALIVE_INTERVAL_S,
            "TCP_KEEPCNT": TCP_KEEPALIVE_PROBES,
            "TCP_USER_TIMEOUT": round(TCP_USER_TIMEOUT_S * 1000),
        }
        assert sock.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1


def test_a_peer_that_does_not_read_is_lost_after_the_user_timeout(net) -> None:
    """TCP_USER_TIMEOUT also ends a connection whose peer leaves its window closed."""
    client, stream, raw = connected_to_raw(net, ReferenceRnic(ReferenceOptions(tcp_user_timeout_s=0.2)))
    raw.reading = False

    stream.post([RdmaWrite(1, (client.sge(bytes(64 << 20)),), 1, 0)])

    ended = client.wait_end(stream)
    assert isinstance(ended.reason, ConnectionLost)
    assert "timed out" in str(ended.reason)
    assert client.completions(stream)[0].status is WcStatus.FLUSHED


def test_f23_f25_fpdus_fit_the_segment_size_of_the_moment(net, monkeypatch) -> None:
    monkeypatch.setattr(TcpLink, "emss_bytes", lambda self: emss_bytes)
    emss_bytes = 1460
    client, stream, raw = connected_to_raw(net, ReferenceRnic())

    stream.post([RdmaWrite(1, (client.sge(bytes(10_000)),), 1, 0)])
    emss_bytes = 536
    stream.post([RdmaWrite(2, (client.sge(bytes(10_000)),), 1, 0)])
    emss_bytes = 10
    stream.post([RdmaWrite(3, (client.sge(bytes(1_000)),), 1, 0)])

    net.pump(lambda: sum(len(ulpdu) - 14 for ulpdu in raw.ulpdus()) == 21_000)
    sizes = [len(ulpdu) for ulpdu in raw.ulpdus()]
    first = sizes.index(1460 - 6), sizes.index(536 - 6), sizes.index(128)
    assert first == (0, 7, 27)
    assert max(sizes) == 1454


def test_a_partial_send_goes_on_where_it_stopped(net) -> None:
    client, stream, raw = connected_to_raw(net, ReferenceRnic())
    [sock] = [
        sock
        for sock in sockets_of()
        if sock is not raw.sock
        and sock.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN) == 0
        and sock.getsockname() == raw.sock.getpeername()
    ]
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
    octets = bytes(range(256)) * 4096

    stream.post([RdmaWrite(1, (client.sge(octets),), 1, 0)])

    client.wait(stream, 1)
    net.pump(lambda: sum(len(ulpdu) - 14 for ulpdu in raw.ulpdus()) == len(octets))
    assert b"".join(ulpdu[14:] for ulpdu in raw.ulpdus()) == octets


class SlowSocket:
    """Takes `takes` octets of each sendmsg in turn, None of one while it is full; notes what it was given."""

    def __init__(self, takes: list[int | None]) -> None:
        self.takes = takes
        self.given: list[tuple[bytes, int, int]] = []

    def sendmsg(self, pieces: list[memoryview], ancillary: tuple[()], flags: int) -> int:
        taken = self.takes.pop(0)
        if taken is None:
            raise BlockingIOError
        self.given.append((b"".join(pieces), len(pieces), flags))
        return taken


def test_a_sendmsg_takes_no_more_than_to_where_a_segment_ends_whatever_the_socket_takes() -> None:
    sock = SlowSocket([3, None, 1, 2, 1, 4])
    link = TcpLink(sock, "peer")
    link.queue([b"ab", b"cd"], ends_segment=True)
    link.queue([])
    link.queue([b"pad"], ends_segment=True)
    link.queue([b"ef", b"gh"])

    link.send_queued()
    link.send_queued()

    assert sock.given == [
        (b"abcd", 2, socket.MSG_EOR),
        (b"d", 1, socket.MSG_EOR),
        (b"pad", 1, socket.MSG_EOR),
        (b"d", 1, socket.MSG_EOR),
        (b"efgh", 2, 0),
    ]
    assert (link.unsent_bytes, link.moved_bytes) == (0, 11)


def test_a_segment_does_not_end_within_a_run_of_many_pieces() -> None:
    sock = SlowSocket([RNIC_IOV_MAX, 2])
    link = TcpLink(sock, "peer")
    link.queue([b"x"] * (RNIC_IOV_MAX + 2), ends_segment=True)

    link.send_queued()

    assert [(pieces, flags) for _, pieces, flags in sock.given] == [(RNIC_IOV_MAX, 0), (2, socket.MSG_EOR)]


def test_a_socket_that_has_nothing_to_read_after_all() -> None:
    ours, theirs = socket.socketpair()
    ours.setblocking(False)
    link = TcpLink(ours, "peer")
    buffer = memoryview(bytearray(8))

    assert (link.receive(buffer), link.moved_bytes, link.receive_finished) == (None, 0, False)
    theirs.send(b"abc")
    assert (link.receive(buffer), link.moved_bytes) == (3, 3)
    theirs.close()
    assert (link.receive(buffer), link.receive_finished) == (0, True)
    link.close()
    link.reset()


def test_addresses_are_written_with_brackets_where_they_need_them() -> None:
    assert address_text(("127.0.0.1", 5287)) == "127.0.0.1:5287"
    assert address_text(("fe80::1", 5287, 0, 2)) == "[fe80::1]:5287"


# --- connecting to one address after the other ---


def addresses(*ports_and_hosts: tuple[str, int]) -> list[TcpAddress]:
    return [TcpAddress(socket.AF_INET, address) for address in ports_and_hosts]


def refusing_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as sock:
        return sock.getsockname()[1]


def test_a_refused_address_makes_room_for_the_next(net, server, monkeypatch) -> None:
    there = server.listener.address
    monkeypatch.setattr(
        "kbtp.rnic.reference.channel.resolve",
        lambda host, port: addresses(("127.0.0.1", refusing_port()), ("255.255.255.255", 1), there),
    )
    client = net.side(ReferenceRnic())

    stream = client.connect(("name", 1))

    net.pump(lambda: client.established(stream) is not None)
    assert stream.remote_address == "name:1"


def test_when_every_address_fails_each_is_named(net, monkeypatch) -> None:
    ports = [refusing_port(), refusing_port()]
    monkeypatch.setattr(
        "kbtp.rnic.reference.channel.resolve", lambda host, port: addresses(*(("127.0.0.1", port) for port in ports))
    )
    client = net.side(ReferenceRnic())

    ended = client.wait_end(client.connect(("name", 1)))

    for port in ports:
        assert f"127.0.0.1:{port}: Connection refused" in str(ended.reason)


def full_listener() -> tuple[socket.socket, list[socket.socket]]:
    """A listener whose backlog is full: a further connection stays unanswered."""
    sock = socket.create_server(("127.0.0.1", 0), backlog=0)
    fillers = []
    for _ in range(3):
        filler = socket.socket()
        filler.setblocking(False)
        filler.connect_ex(sock.getsockname())
        fillers.append(filler)
    return sock, fillers


def test_an_address_that_does_not_answer_leaves_time_for_the_next(net, server, monkeypatch, clock) -> None:
    silent, fillers = full_listener()
    there = server.listener.address
    monkeypatch.setattr(
        "kbtp.rnic.reference.channel.resolve", lambda host, port: addresses(silent.getsockname(), there)
    )
    client = net.side(ReferenceRnic())
    stream = client.connect(("name", 1), timeout_s=1000.0)
    net.settle()
    assert client.established(stream) is None

    clock.ahead_s = 600.0

    net.pump(lambda: client.established(stream) is not None)
    for sock in (silent, *fillers):
        sock.close()


def test_an_address_that_does_not_answer_hits_the_deadline(net, clock) -> None:
    silent, fillers = full_listener()
    client = net.side(ReferenceRnic())
    stream = client.connect(silent.getsockname(), timeout_s=1000.0)
    net.settle()

    clock.ahead_s = 1000.0

    ended = client.wait_end(stream)
    assert isinstance(ended.reason, DeadlineExceeded)
    assert "no TCP connection" in str(ended.reason)
    for sock in (silent, *fillers):
        sock.close()


# --- time ---


def test_disconnect_waits_as_long_as_octets_move(net, clock) -> None:
    client, stream, raw = connected_to_raw(net, ReferenceRnic(ReferenceOptions(disconnect_s=1000.0)))
    raw.reading = False
    stream.post([RdmaWrite(1, (client.sge(bytes(64 << 20)),), 1, 0)])
    stream.disconnect()

    drained = 0

    def drained_to(target: int) -> bool:
        nonlocal drained
        drained += len(raw.sock.recv(1 << 20))
        return drained >= target

    for megabytes in (8, 16, 24):
        net.pump(functools.partial(drained_to, megabytes << 20))
        clock.ahead_s += 1001.0
        net.settle()
        assert client.ended(stream) is None, "octets moved since the last look"

    def still() -> bool:
        clock.ahead_s += 1001.0
        return client.ended(stream) is not None

    net.pump(still)
    assert isinstance(client.ended(stream).reason, DeadlineExceeded)


def test_s9_the_time_out_runs_from_accept_and_is_not_extended_by_octets(net, clock) -> None:
    server = net.side(ReferenceRnic())
    server.listen()
    raw = net.raw_to(server.listener.address)
    net.settle()

    clock.ahead_s += 3.0
    raw.send(b"MPA ID")
    net.settle()
    assert not raw.gone
    clock.ahead_s += 3.0

    net.pump(lambda: raw.gone)


# --- accepting ---


def test_accept_that_fails_pauses_and_goes_on(net, monkeypatch, caplog) -> None:
    server = net.side(ReferenceRnic(ReferenceOptions(accept_pause_s=0.02)))
    failures = [OSError(errno.EMFILE, "Too many open files"), OSError(errno.ECONNABORTED, "aborted")]
    accept = socket.socket.accept

    def sometimes(sock: socket.socket):
        if failures:
            raise failures.pop(0)
        return accept(sock)

    server.listen()
    monkeypatch.setattr(socket.socket, "accept", sometimes)
    client = net.side(ReferenceRnic())
    stream = client.connect(server.listener.address)

    net.pump(lambda: client.established(stream) is not None)
    assert caplog.text.count("cannot accept on 127.0.0.1") == 2
    assert "Too many open files" in caplog.text


def test_a_paused_listener_may_be_closed(net, monkeypatch) -> None:
    server = net.side(ReferenceRnic(ReferenceOptions(accept_pause_s=0.02)))
    server.listen()
    net.raw_to(server.listener.address)

    def never(sock: socket.socket):
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr(socket.socket, "accept", never)
    server.poll()
    server.listener.close()
    net.settle()


def test_a_connection_reset_before_it_was_accepted_is_passed_over(net, server, monkeypatch) -> None:
    answers = [OSError(errno.EINVAL, "Invalid argument")]
    configure = listener.set_stream_options

    def fail_once(sock: socket.socket, user_timeout_s: float) -> None:
        if answers:
            raise answers.pop()
        configure(sock, user_timeout_s)

    monkeypatch.setattr(listener, "set_stream_options", fail_once)
    first = net.raw_to(server.listener.address)
    net.pump(lambda: first.gone)

    net.raw_to(server.listener.address).initiate()
    assert len(server.accepted) == 1


def test_s9_connections_without_a_request_are_bounded_and_make_room_when_they_go(net, server, monkeypatch) -> None:
    monkeypatch.setattr(listener, "RNIC_PENDING_REQUESTS_MAX", 2)
    half = [net.raw_to(server.listener.address) for _ in range(2)]
    net.settle()
    waiting = net.raw_to(server.listener.address)
    waiting.send(b"MPA ID Req Frame" + bytes.fromhex("40 01 0000"))
    net.settle()
    assert server.accepted == []

    half[0].sock.shutdown(socket.SHUT_WR)

    net.pump(lambda: len(server.accepted) == 1)


# --- when sockets break at awkward moments ---


def break_method(monkeypatch: pytest.MonkeyPatch, method: str) -> None:
    """Let a method of every `TcpLink` fail from here on."""

    def fail(link: TcpLink, *_: object) -> None:
        raise OSError(errno.ENETDOWN, "Network is down")

    monkeypatch.setattr(TcpLink, method, fail)


def test_a_fin_that_cannot_be_sent_is_a_loss(pair, monkeypatch) -> None:
    break_method(monkeypatch, "finish_sending")

    pair.c.disconnect()

    assert "Network is down" in str(pair.client.wait_end(pair.c).reason)


def test_a_goodbye_that_cannot_be_said_just_ends(net, server, monkeypatch) -> None:
    server.answer = lambda request: request.reject(b"")
    break_method(monkeypatch, "finish_sending")
    raw = net.raw_to(server.listener.address)
    raw.send(b"MPA ID Req Frame" + bytes.fromhex("40 01 0000"))

    net.pump(lambda: raw.gone)


def test_a_goodbye_whose_peer_resets_just_ends(net, server) -> None:
    server.answer = lambda request: request.reject(b"")
    raw = net.raw_to(server.listener.address)
    raw.send(b"MPA ID Req Frame" + bytes.fromhex("40 01 0000"))
    net.pump(lambda: raw.fin)

    raw.sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\x01\0\0\0\0\0\0\0")
    net.raws.remove(raw)
    raw.close()

    net.settle()
    assert server.channel.next_timeout_s() is None


def test_a_stream_that_cannot_read_is_a_loss(pair, monkeypatch) -> None:
    pair.c.post([Send(1, b"x")])
    break_method(monkeypatch, "receive")

    assert "Network is down" in str(pair.server.wait_end(pair.s).reason)


def test_a_stream_that_can_neither_send_nor_read_is_a_loss(pair, monkeypatch) -> None:
    break_method(monkeypatch, "send_queued")
    break_method(monkeypatch, "receive")

    pair.c.post([Send(1, b"x")])

    ended = pair.client.wait_end(pair.c)
    assert "Network is down" in str(ended.reason)
    assert pair.client.completions(pair.c)[0].status is WcStatus.FLUSHED


def test_a_request_whose_peer_is_gone_may_be_accepted_and_its_stream_ends(net, server) -> None:
    raw = net.raw_to(server.listener.address)
    raw.send(b"MPA ID Req Frame" + bytes.fromhex("50 02 0004 0004 0004"))
    [request] = server.channel.poll(20.0)
    raw.sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\x01\0\0\0\0\0\0\0")
    net.raws.remove(raw)
    raw.close()

    stream = server.accept(request)

    assert isinstance(server.wait_end(stream).reason, ConnectionLost)


def test_a_terminate_survives_the_channel_being_closed_at_once(net) -> None:
    """Unread input would make the close a RST, which can overtake the Terminate."""
    client, stream, raw = connected_to_raw(net, ReferenceRnic())
    raw.send(b"\0\x16 not read yet")

    stream.terminate(TerminateCause.RDMAP_UNSPECIFIED)
    client.channel.close()
    net.sides.remove(client)

    assert raw.wait_terminate().code == 0xFF


def test_a_stream_shows_where_it_stands(pair) -> None:
    address = pair.c.remote_address
    assert repr(pair.c) == f"<ReferenceStream {address} OPEN>"
    pair.c.abort()
    assert repr(pair.c) == f"<ReferenceStream {address} ENDED>"
