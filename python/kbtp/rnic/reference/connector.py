"""The active side of start-up: one TCP address after the other, then the MPA Request and its Reply."""

from __future__ import annotations

import errno
import os
import socket
import time
from collections.abc import Sequence
from dataclasses import dataclass

from kbtp.errors import ConnectionLost, DeadlineExceeded, KbtpError, PeerIncompatible
from kbtp.iwarp.mpa import ActiveStartup, MpaRejected, MpaStartupError
from kbtp.rnic.reference.loop import Loop
from kbtp.rnic.reference.stream import ReferenceStream
from kbtp.rnic.reference.tcp import TcpLink, address_text, error_text, set_stream_options


@dataclass(frozen=True, slots=True)
class TcpAddress:
    """One result of name resolution."""

    family: socket.AddressFamily
    sockaddr: tuple[object, ...]

    def __str__(self) -> str:
        return address_text(self.sockaddr)


def resolve(host: str, port: int) -> list[TcpAddress]:
    """Addresses of `host`, best first. Blocks as the system's resolver does; raises OSError."""
    results = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, proto=socket.IPPROTO_TCP)
    return [TcpAddress(family, sockaddr) for family, _, _, _, sockaddr in results]


class _Attempt:
    """One address that is being tried."""

    def __init__(self, connector: Connector, link: TcpLink) -> None:
        self.link = link
        self.connected = False
        self._connector = connector

    def on_ready(self, *, readable: bool, writable: bool) -> None:
        self._connector.proceed(self, readable=readable)


class Connector:
    """Works for one stream until that is open, rejected or failed, within `timeout_s`."""

    def __init__(
        self,
        loop: Loop,
        stream: ReferenceStream,
        startup: ActiveStartup,
        addresses: Sequence[TcpAddress],
        timeout_s: float,
    ) -> None:
        self._loop = loop
        self._stream = stream
        self._startup = startup
        self._untried = list(addresses)
        self._timeout_s = timeout_s
        self._deadline = time.monotonic() + timeout_s
        self._timer = loop.start_timer(timeout_s, self._timed_out)
        self._attempt: _Attempt | None = None
        self._refusals: list[str] = []
        stream.connect_through(self)

    def start(self) -> None:
        """Failures are reported as the end of the stream, never raised."""
        self._try_next_address()

    def close_now(self) -> None:
        self._timer.cancel()
        if self._attempt is not None:
            self._loop.unwatch(self._attempt.link.sock)
            self._attempt.link.close()

    def proceed(self, attempt: _Attempt, *, readable: bool) -> None:
        """The socket of `attempt` is ready."""
        link = attempt.link
        if not attempt.connected:
            error_number = link.sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
            if error_number:
                self._refusals.append(f"{link.peer}: {os.strerror(error_number)}")
                self._try_next_address()
            else:
                self._send_request(attempt)
            return
        try:
            link.send_queued()
            self._loop.watch(link.sock, attempt, read=True, write=link.unsent_bytes > 0)
            received = link.receive(self._loop.read_buffer) if readable else None
        except OSError as error:
            self._fail(ConnectionLost(f"{link.peer} ended the connection before its MPA Reply: {error_text(error)}"))
            return
        if received == 0:
            self._fail(
                ConnectionLost(
                    f"{link.peer} closed the connection before its MPA Reply: "
                    f"check that it is an iWARP peer and speaks MPA revision {self._loop.options.mpa.revision}"
                )
            )
        elif received:
            self._receive_reply(link, self._loop.read_buffer[:received])

    def _try_next_address(self) -> None:
        self.close_now()
        self._attempt = None
        remaining_s = self._deadline - time.monotonic()
        while self._untried:
            # One that does not answer must leave time for the others.
            share_s = remaining_s / len(self._untried)
            address = self._untried.pop(0)
            try:
                link = self._begin(address)
            except OSError as error:
                self._refusals.append(f"{address}: {error_text(error)}")
                continue
            self._attempt = _Attempt(self, link)
            self._timer = self._loop.start_timer(max(0.0, share_s), self._timed_out)
            self._loop.watch(link.sock, self._attempt, read=False, write=True)
            return
        self._fail(
            ConnectionLost(
                f"cannot connect to {'; '.join(self._refusals)}: check the address, and that a target listens there"
            )
        )

    def _begin(self, address: TcpAddress) -> TcpLink:
        sock = socket.socket(address.family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
        try:
            set_stream_options(sock, self._loop.options.tcp_user_timeout_s)
            result = sock.connect_ex(address.sockaddr)
            if result not in (0, errno.EINPROGRESS):
                raise OSError(result, "")
        except BaseException:
            sock.close()
            raise
        return TcpLink(sock, str(address))

    def _send_request(self, attempt: _Attempt) -> None:
        attempt.connected = True
        self._timer.cancel()
        self._timer = self._loop.start_timer(self._deadline - time.monotonic(), self._timed_out)
        attempt.link.queue([self._startup.request])
        self._loop.watch(attempt.link.sock, attempt, read=True, write=True)

    def _receive_reply(self, link: TcpLink, octets: memoryview) -> None:
        try:
            result = self._startup.receive_data(octets)
        except MpaStartupError as error:
            # RFC 5044 7.1.2: close TCP, without a further word
            self._fail(PeerIncompatible(f"{link.peer}: {error}"))
            return
        if result is None:
            return
        self._timer.cancel()
        self._loop.unwatch(link.sock)
        self._attempt = None
        if isinstance(result, MpaRejected):
            self._stream.rejected(link, result.private_data)
        else:
            self._stream.open(link, result, active=True, surplus=self._startup.surplus)

    def _timed_out(self) -> None:
        connected = self._attempt is not None and self._attempt.connected
        if self._attempt is not None and not connected and self._untried:
            self._refusals.append(f"{self._attempt.link.peer}: no answer")
            self._try_next_address()
            return
        phase = "MPA Reply" if connected else "TCP connection"
        peer = self._stream.remote_address
        self._fail(DeadlineExceeded(f"no {phase} from {peer} within {self._timeout_s} s"))

    def _fail(self, reason: KbtpError) -> None:
        self.close_now()
        self._attempt = None
        self._stream.fail_connecting(reason)
