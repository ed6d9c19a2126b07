"""The proxy forwards every octet, both closes and resets, and records what it forwarded."""

from __future__ import annotations

import contextlib
import select
import socket
import struct
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from kbtp.testing.capture import CapturingProxy
from kbtp.testing.packets import Endpoint, HalfConnection, TcpSegment, parse_tcp, read_packets

TIMEOUT_S = 20.0


class OneConnection:
    """A listener that serves one connection with a function, in a thread."""

    def __init__(self, serve: Callable[[socket.socket], None]) -> None:
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.listener.settimeout(TIMEOUT_S)
        self.port = self.listener.getsockname()[1]
        self.thread = threading.Thread(target=self._run, args=(serve,))
        self.thread.start()

    def _run(self, serve: Callable[[socket.socket], None]) -> None:
        connection, _ = self.listener.accept()
        with connection:
            connection.settimeout(TIMEOUT_S)
            serve(connection)

    def end(self) -> None:
        self.thread.join(TIMEOUT_S)
        self.listener.close()
        assert not self.thread.is_alive()


def receive_all(connection: socket.socket) -> bytes:
    return b"".join(iter(lambda: connection.recv(65536), b""))


def segments_in(path: Path) -> Iterator[TcpSegment]:
    for packet in read_packets(path.read_bytes()):
        segment = parse_tcp(*packet)
        assert segment is not None
        yield segment


def octets_in(path: Path) -> dict[Endpoint, bytes]:
    halves: dict[Endpoint, HalfConnection] = {}
    got: dict[Endpoint, bytes] = {}
    for segment in segments_in(path):
        half = halves.setdefault(segment.source, HalfConnection())
        got[segment.source] = got.get(segment.source, b"") + half.receive(segment)
    return got


def test_both_directions_and_both_closes(tmp_path: Path) -> None:
    def answer_with_length(connection: socket.socket) -> None:
        connection.sendall(str(len(receive_all(connection))).encode())

    target = OneConnection(answer_with_length)
    with CapturingProxy("127.0.0.1", target.port) as proxy:
        with socket.create_connection(proxy.address, TIMEOUT_S) as client:
            here = Endpoint(*client.getsockname())
            client.sendall(b"x" * 5000)
            client.shutdown(socket.SHUT_WR)
            assert receive_all(client) == b"5000"
        target.end()
        proxy.write(tmp_path / "session.pcap")
    there = Endpoint("127.0.0.1", target.port)
    assert octets_in(tmp_path / "session.pcap") == {here: b"x" * 5000, there: b"5000"}
    assert [segment.source for segment in segments_in(tmp_path / "session.pcap") if segment.fin] == [here, there]


def test_a_slow_reader_holds_the_writer_up_and_loses_nothing(tmp_path: Path) -> None:
    """More than all the buffers on the way hold; the reader begins once the writer is at work."""
    octets = bytes(range(256)) * 4096 * 20
    started = threading.Event()
    got: list[bytes] = []

    def read_late(connection: socket.socket) -> None:
        assert started.wait(TIMEOUT_S)
        got.append(receive_all(connection))

    target = OneConnection(read_late)
    with CapturingProxy("127.0.0.1", target.port) as proxy:
        with socket.create_connection(proxy.address, TIMEOUT_S) as client:
            client.sendall(octets[: 1 << 20])
            started.set()
            client.sendall(octets[1 << 20 :])
            client.shutdown(socket.SHUT_WR)
            assert receive_all(client) == b""
        target.end()
    assert got == [octets]


@pytest.mark.parametrize("reset_by", ["client", "target"])
def test_a_reset_reaches_the_other_end(reset_by: str, tmp_path: Path) -> None:
    felt: list[type[Exception] | None] = []

    def reset(connection: socket.socket) -> None:
        assert connection.recv(1) == b"x"
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        connection.close()

    def feel(connection: socket.socket) -> None:
        connection.sendall(b"x")
        try:
            receive_all(connection)
            felt.append(None)
        except ConnectionError as error:
            felt.append(type(error))

    target = OneConnection(feel if reset_by == "client" else reset)
    with CapturingProxy("127.0.0.1", target.port) as proxy:
        with socket.create_connection(proxy.address, TIMEOUT_S) as client:
            (reset if reset_by == "client" else feel)(client)
        target.end()
        proxy.write(tmp_path / "session.pcap")
    assert felt == [ConnectionResetError]
    assert any(segment.rst for segment in segments_in(tmp_path / "session.pcap"))


def test_what_came_before_a_reset_is_recorded_and_forwarded(tmp_path: Path) -> None:
    heard: list[bytes] = []

    def flood(connection: socket.socket) -> None:
        connection.setblocking(False)
        poller = select.poll()
        poller.register(connection, select.POLLIN | select.POLLOUT)
        while not any(events & ~select.POLLOUT for _, events in poller.poll(TIMEOUT_S * 1000)):
            with contextlib.suppress(BlockingIOError, ConnectionError):
                connection.send(bytes(1 << 16))
        heard.append(connection.recv(5))

    for each in range(10):
        target = OneConnection(flood)
        with CapturingProxy("127.0.0.1", target.port) as proxy:
            with socket.create_connection(proxy.address, TIMEOUT_S) as client:
                client.recv(1)
                client.sendall(b"words")
            # Octets it has not read: the client's end of the connection is reset as it closes.
            target.end()
            proxy.write(tmp_path / f"{each}.pcap")
        assert any(segment.payload == b"words" for segment in segments_in(tmp_path / f"{each}.pcap"))
    assert heard == [b"words"] * 10


def test_a_target_that_is_not_there_resets() -> None:
    with socket.create_server(("127.0.0.1", 0)) as gone:
        port = gone.getsockname()[1]
    with (
        CapturingProxy("127.0.0.1", port) as proxy,
        pytest.raises(ConnectionResetError),  # which may be there before the connection is
        socket.create_connection(proxy.address, TIMEOUT_S) as client,
    ):
        receive_all(client)


def test_leaving_closes_what_is_open() -> None:
    begun, ended = threading.Event(), threading.Event()

    def wait_for_the_end(connection: socket.socket) -> None:
        begun.set()
        assert receive_all(connection) == b""
        ended.set()

    target = OneConnection(wait_for_the_end)
    proxy = CapturingProxy("localhost", target.port)
    with proxy:
        client = socket.create_connection(proxy.address, TIMEOUT_S)
        assert begun.wait(TIMEOUT_S)
    assert ended.wait(TIMEOUT_S)
    assert receive_all(client) == b""
    client.close()
    target.end()
