"""Connecting to what is there, what is not, and what is something else: in time, and with a message that helps."""

from __future__ import annotations

import asyncio
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

import pytest

import kbtp
from kbtp.address import Address
from kbtp.errors import ApiMisuse, ConnectionLost, DeadlineExceeded, PeerIncompatible, PeerMisbehaved
from kbtp.initiator.connection import hello_delay_s
from kbtp.iwarp.mpa import MpaOptions, PassiveStartup
from kbtp.types import TerminateCause
from kbtp.wire import ConnectionData

Connect = Callable[..., Any]
FakeTargets = Callable[..., Any]
Serve = Callable[..., Any]
TcpServe = Callable[..., str]


@pytest.fixture
def tcp_server() -> Iterator[TcpServe]:
    """`tcp_server(answer, address)`: the URL of a TCP server that runs `answer(connection)` for each connection."""
    listeners: list[socket.socket] = []
    threads: list[threading.Thread] = []

    def start(answer: Callable[[socket.socket], None], address: tuple[str, int] = ("127.0.0.1", 0)) -> str:
        listener = socket.create_server(address)
        listeners.append(listener)

        def run() -> None:
            while True:
                try:
                    connection, _ = listener.accept()
                except OSError:
                    return
                with connection:
                    connection.settimeout(10)
                    answer(connection)

        threads.append(threading.Thread(target=run))
        threads[-1].start()
        return str(Address(*listener.getsockname()))

    yield start
    for listener in listeners:
        listener.shutdown(socket.SHUT_RDWR)
        listener.close()
    for thread in threads:
        thread.join(10)


def silent(connection: socket.socket) -> None:
    """Reads until the other side goes, says nothing."""
    try:
        while connection.recv(65536):
            pass
    except ConnectionError:
        return


# --- nothing there -----------------------------------------------------------------------------


def test_nothing_listens(connect: Connect) -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        port = unused.getsockname()[1]
        with pytest.raises(ConnectionLost, match=rf"127\.0\.0\.1:{port}: Connection refused.*that a target listens"):
            connect(f"kbtp://127.0.0.1:{port}")


@pytest.mark.parametrize("host", ["no-such-host.invalid", "a" * 64 + ".example"], ids=["unknown", "no IDNA"])
def test_a_name_that_cannot_be_looked_up(connect: Connect, host: str) -> None:
    with pytest.raises(ConnectionLost, match=f"cannot look up {host}: .*check the name"):
        connect(f"kbtp://{host}")


@pytest.mark.parametrize("url", ["http://127.0.0.1", "127.0.0.1:5287", "kbtp://", "kbtp://127.0.0.1:0"])
def test_a_url_that_cannot_work(connect: Connect, url: str) -> None:
    with pytest.raises(ApiMisuse):
        connect(url)


def test_arguments_that_cannot_work(serve: Serve, connect: Connect) -> None:
    url = serve().url
    with pytest.raises(ApiMisuse, match="name"):
        connect(url, name="n" * 256)
    with pytest.raises(ApiMisuse, match="namespace"):
        connect(url, namespace="n" * 256)
    with pytest.raises(ApiMisuse, match="initiator_id"):
        connect(url, initiator_id=b"short")


# --- something else there ----------------------------------------------------------------------


def test_a_silent_tcp_server(tcp_server: TcpServe, connect: Connect) -> None:
    url = tcp_server(silent)
    with pytest.raises(DeadlineExceeded, match=r"did not answer within 0\.2 s; is a KBTP target there"):
        connect(url, connect_timeout_s=0.2)


def test_the_attempts_on_a_silent_server_end_in_time(
    tcp_server: TcpServe, connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The HELLO_ACK time limit is that of one attempt, the connect time limit that of all."""
    monkeypatch.setattr("kbtp.limits.HELLO_ACK_TIMEOUT_S", 0.05)
    attempts: list[int] = []

    def answer(connection: socket.socket) -> None:
        attempts.append(1)
        silent(connection)

    with pytest.raises(DeadlineExceeded):
        connect(tcp_server(answer), connect_timeout_s=0.3)
    assert len(attempts) > 1


def test_a_tcp_server_of_another_protocol(tcp_server: TcpServe, connect: Connect) -> None:
    def banner(connection: socket.socket) -> None:
        connection.sendall(b"SSH-2.0-OpenSSH_9.6\r\n")
        silent(connection)

    with pytest.raises(PeerIncompatible, match="no MPA Reply"):
        connect(tcp_server(banner))


def test_a_tcp_server_that_closes(tcp_server: TcpServe, connect: Connect) -> None:
    def hang_up(connection: socket.socket) -> None:
        connection.recv(65536)

    with pytest.raises(ConnectionLost, match="before its MPA Reply"):
        connect(tcp_server(hang_up))


@pytest.mark.parametrize(
    "private_data", [b"", b"NFS/RDMA" * 3, b"KBTP\x02" + bytes(19)], ids=["none", "another protocol", "version 2"]
)
def test_an_iwarp_listener_of_another_protocol(fake_target: FakeTargets, connect: Connect, private_data: bytes) -> None:
    """Profile 3 "Connection data"."""

    def script(target: Any) -> None:
        target.accept(private_data)
        target.ended()

    with pytest.raises(PeerIncompatible, match="speaks iWARP but is not a KBTP target"):
        connect(fake_target(script).url)


def test_a_listener_that_rejects(fake_target: FakeTargets, connect: Connect) -> None:
    def script(target: Any) -> None:
        target.connect_request().reject(b"")

    with pytest.raises(PeerIncompatible, match="refused the connection: not a KBTP target, or full"):
        connect(fake_target(script).url)


def test_rubbish_right_behind_the_mpa_reply(tcp_server: TcpServe, connect: Connect) -> None:
    """The stream has ended before HELLO could be sent: that, too, is told and not raised at whoever polls."""

    def answer(connection: socket.socket) -> None:
        startup = PassiveStartup(MpaOptions())
        while startup.receive_data(connection.recv(1)) is None:
            continue
        reply, _ = startup.accept(ConnectionData(bytes(16)).pack(), 16, 16)
        connection.sendall(reply + b"\x00\x10" + b"rubbish" * 10)
        silent(connection)

    with pytest.raises(PeerMisbehaved, match=str(TerminateCause.MPA_CRC).split()[0]):
        connect(tcp_server(answer))


# --- the first FPDU lost -----------------------------------------------------------------------


def test_hello_waits_on_a_second_connection(
    tcp_server: TcpServe, connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Profile 3 "A HELLO that is overlooked": it may have come too soon after the Reply; here it waits for ever."""
    monkeypatch.setattr("kbtp.limits.HELLO_ACK_TIMEOUT_S", 0.1)
    monkeypatch.setattr("kbtp.limits.HELLO_DELAY_AGAIN_S", 100.0)
    monkeypatch.setattr("kbtp.limits.HELLO_DELAY_MAX_S", 100.0)
    behind_the_reply: list[bytes] = []

    def answer(connection: socket.socket) -> None:
        startup = PassiveStartup(MpaOptions())
        while startup.receive_data(connection.recv(1)) is None:
            continue
        reply, _ = startup.accept(ConnectionData(bytes(16)).pack(), 16, 16)
        connection.sendall(reply)
        octets = b""
        with suppress(ConnectionResetError):
            while more := connection.recv(65536):
                octets += more
        behind_the_reply.append(octets)

    with pytest.raises(DeadlineExceeded):
        connect(tcp_server(answer), connect_timeout_s=0.35)
    first, second = behind_the_reply[:2]
    assert first
    assert not second


@pytest.mark.parametrize(("attempt", "delay_s"), [(1, 0.005), (2, 0.1), (3, 0.4), (4, 1.6), (5, 1.6)])
def test_how_long_hello_waits(attempt: int, delay_s: float) -> None:
    assert hello_delay_s(attempt) == pytest.approx(delay_s)


def test_hello_is_sent_again_on_a_new_connection(
    fake_target: FakeTargets, connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Profile 3: an initiator that gets no HELLO_ACK in time retries on a new connection."""
    monkeypatch.setattr("kbtp.limits.HELLO_ACK_TIMEOUT_S", 0.1)
    monkeypatch.setattr("kbtp.limits.HELLO_DELAY_AGAIN_S", 0.0)

    def script(target: Any) -> None:
        target.accept()
        first = target.receive()
        target.ended()
        target.accept()
        assert target.receive() == first
        monkeypatch.setattr("kbtp.limits.HELLO_ACK_TIMEOUT_S", 3.0)
        target.send(target.hello_ack())
        target.complete(target.receive())

    connect(fake_target(script).url).free(1000)


# --- names with several addresses --------------------------------------------------------------


def addresses(*hosts: str) -> Callable[..., Any]:
    """A `getaddrinfo` by which target.example has these addresses."""
    system = socket.getaddrinfo

    def look_up(name: object, port: int, *arguments: Any, **options: Any) -> list[Any]:
        if name != "target.example":
            return system(name, port, *arguments, **options)
        family = {host: socket.AF_INET6 if ":" in host else socket.AF_INET for host in hosts}
        return [(family[host], socket.SOCK_STREAM, socket.IPPROTO_TCP, "", (host, port)) for host in hosts]

    return look_up


@pytest.mark.parametrize("rnic_name", ["reference"])  # the native one looks names up without Python
def test_all_addresses_of_a_name_are_tried(serve: Serve, connect: Connect, monkeypatch: pytest.MonkeyPatch) -> None:
    port = Address.parse(serve().url).port
    monkeypatch.setattr("socket.getaddrinfo", addresses("127.0.0.9", "127.0.0.1"))
    connect(f"kbtp://target.example:{port}").alloc_store(b"x")


def test_a_silent_address_leaves_time_for_the_others(
    tcp_server: TcpServe, serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The asyncio client looks names up by itself."""
    server = serve()
    port = Address.parse(server.url).port
    tcp_server(silent, ("127.0.0.2", port))
    monkeypatch.setattr("socket.getaddrinfo", addresses("127.0.0.2", "127.0.0.1"))

    async def scenario() -> str:
        async with await kbtp.connect_async(f"kbtp://target.example:{port}", connect_timeout_s=1.0) as client:
            return client.terms.url

    assert asyncio.run(scenario()) == server.url


def test_a_resolver_that_hangs_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    answer = threading.Event()
    monkeypatch.setattr("socket.getaddrinfo", lambda *_, **__: answer.wait(10) and [])

    async def scenario() -> None:
        try:
            with pytest.raises(DeadlineExceeded, match=r"cannot look up target\.example within 0\.05 s"):
                await kbtp.connect_async("kbtp://target.example", connect_timeout_s=0.05)
        finally:
            answer.set()

    asyncio.run(scenario())


# --- nothing stays open ------------------------------------------------------------------------


def open_files() -> int:
    return len(os.listdir("/proc/self/fd"))


def test_no_file_descriptor_is_left(
    serve: Serve, tcp_server: TcpServe, connect: Connect, fake_target: FakeTargets
) -> None:
    """Whatever comes of connecting. The targets' ends may take a moment longer, so theirs are given one."""
    server = serve(max_sessions=2)
    silent_url = tcp_server(silent)
    connect(server.url).close()
    before = open_files()
    for _ in range(5):
        client = connect(server.url)
        client.alloc_store(bytes(5000))
        client.close()
        with pytest.raises(ApiMisuse):
            connect("kbtp://127.0.0.1:0")
        with pytest.raises(ConnectionLost):
            connect("kbtp://127.0.0.9:1")
        with pytest.raises(DeadlineExceeded):
            connect(silent_url, connect_timeout_s=0.02)
        assert server.wait_until(lambda: not server.target.sessions)
    deadline_s = time.monotonic() + 10
    while open_files() > before:
        assert time.monotonic() < deadline_s, f"{open_files() - before} file descriptors are left"
        connect(server.url).close()
