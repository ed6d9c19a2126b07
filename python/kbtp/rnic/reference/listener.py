"""The passive side of start-up: accepted connections until their MPA Request is answered (RFC 5044 7.1)."""

from __future__ import annotations

import logging
import socket

from kbtp.iwarp.mpa import MpaStartupError, PassiveStartup
from kbtp.limits import (
    MPA_FRAME_BYTES,
    MPA_PRIVATE_DATA_MAX_BYTES,
    RNIC_ACCEPT_BATCH,
    RNIC_LISTEN_BACKLOG,
    RNIC_PENDING_REQUESTS_MAX,
)
from kbtp.rnic.reference.goodbye import Goodbye
from kbtp.rnic.reference.loop import Closable, Loop
from kbtp.rnic.reference.request import ReferenceConnectRequest
from kbtp.rnic.reference.tcp import TcpLink, address_text, error_text, set_stream_options

_log = logging.getLogger("kbtp.rnic")

# One octet more than the longest Request shows that something came after it.
_REQUEST_READ_BYTES = MPA_FRAME_BYTES + MPA_PRIVATE_DATA_MAX_BYTES + 1


class IncomingConnection:
    """An accepted connection whose MPA Request is not whole yet.

    It simply vanishes when its peer goes, says something else, or takes too long (RFC 5044 7.1.2 rule 10).
    """

    def __init__(self, listener: ReferenceListener, loop: Loop, link: TcpLink) -> None:
        self._listener = listener
        self._loop = loop
        self._link = link
        self._startup = PassiveStartup(loop.options.mpa)
        self._said_something = False
        self._timer = loop.start_timer(loop.options.mpa_request_timeout_s, self._timed_out)
        loop.watch(link.sock, self, read=True, write=False)

    def on_ready(self, *, readable: bool, writable: bool) -> None:
        try:
            received = self._link.receive(self._loop.read_buffer[:_REQUEST_READ_BYTES])
        except OSError as error:
            self._drop(error_text(error))
            return
        if received == 0:
            # One that closes without an octet, such as a probe of the port, did nothing worth a line.
            self._drop(
                "closed before its MPA Request was whole", logging.WARNING if self._said_something else logging.DEBUG
            )
        elif received:
            self._said_something = True
            self._receive_request(self._loop.read_buffer[:received])

    def close_now(self) -> None:
        self._let_go()
        self._link.close()

    def _receive_request(self, octets: memoryview) -> None:
        try:
            request = self._startup.receive_data(octets)
        except MpaStartupError as error:
            # RFC 5044 7.1.2: close TCP, neither Reply nor Terminate
            _log.warning("%s: no stream: %s", self._link.peer, error)
            self._let_go()
            Goodbye(self._loop, self._link)
            return
        if request is not None:
            self._let_go()
            self._listener.ask(
                ReferenceConnectRequest(self._loop, self._link, self._startup, request, self._listener.forget)
            )

    def _timed_out(self) -> None:
        self._drop(f"no MPA Request within {self._loop.options.mpa_request_timeout_s} s")

    def _drop(self, why: str, level: int = logging.WARNING) -> None:
        _log.log(level, "%s: no stream: %s", self._link.peer, why)
        self.close_now()

    def _let_go(self) -> None:
        self._timer.cancel()
        self._loop.unwatch(self._link.sock)
        self._listener.forget(self)


class ReferenceListener:
    """`kbtp.verbs.api.Listener`."""

    def __init__(self, loop: Loop, host: str, port: int) -> None:
        self._loop = loop
        self._pending: set[Closable] = set()
        self._paused = False
        family, kind, protocol, _, address = socket.getaddrinfo(
            host or None, port, type=socket.SOCK_STREAM, proto=socket.IPPROTO_TCP, flags=socket.AI_PASSIVE
        )[0]
        self._sock = socket.socket(family, kind, protocol)
        try:
            self._sock.setblocking(False)
            self._sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            self._sock.bind(address)
            self._sock.listen(RNIC_LISTEN_BACKLOG)
            bound = self._sock.getsockname()
        except BaseException:
            self._sock.close()
            raise
        self._address = (str(bound[0]), int(bound[1]))
        loop.closables.add(self)
        self._watch()

    @property
    def address(self) -> tuple[str, int]:
        return self._address

    def close(self) -> None:
        """Stop listening; connections whose request is not answered yet are dropped. Idempotent."""
        self._loop.closables.discard(self)
        self._loop.unwatch(self._sock)
        self._sock.close()
        for pending in list(self._pending):
            pending.close_now()

    def close_now(self) -> None:
        self.close()

    def on_ready(self, *, readable: bool, writable: bool) -> None:
        for _ in range(RNIC_ACCEPT_BATCH):
            if len(self._pending) >= RNIC_PENDING_REQUESTS_MAX:
                break
            try:
                sock, address = self._sock.accept()
            except BlockingIOError:
                break
            except OSError as error:
                self._pause(error)
                break
            try:
                set_stream_options(sock, self._loop.options.tcp_user_timeout_s)
            except OSError:  # it was reset before it was accepted
                sock.close()
                continue
            self._pending.add(IncomingConnection(self, self._loop, TcpLink(sock, address_text(address))))
        self._watch()

    def ask(self, request: ReferenceConnectRequest) -> None:
        """A whole Request came: the ULP has to answer it."""
        self._pending.add(request)
        self._loop.ask(request)

    def forget(self, pending: Closable) -> None:
        """It is answered or gone, and makes room for another."""
        self._pending.discard(pending)
        self._watch()

    def _pause(self, error: OSError) -> None:
        """Out of file descriptors or the like: trying again at once would spin."""
        _log.warning("cannot accept on %s: %s; trying again soon", address_text(self._address), error_text(error))
        self._paused = True
        self._loop.start_timer(self._loop.options.accept_pause_s, self._resume)

    def _resume(self) -> None:
        self._paused = False
        self._watch()

    def _watch(self) -> None:
        if self._sock.fileno() >= 0:
            room = len(self._pending) < RNIC_PENDING_REQUESTS_MAX
            self._loop.watch(self._sock, self, read=room and not self._paused, write=False)
