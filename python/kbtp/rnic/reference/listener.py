"""The passive side of start-up: accepted connections until their MPA Request is answered (RFC 5044 7.1)."""

from __future__ import annotations

import logging
import socket
from collections.abc import Sequence
from enum import Enum, auto

from kbtp.errors import ApiMisuse
from kbtp.iwarp.mpa import MpaStartupError, PassiveStartup, PeerRequest
from kbtp.limits import (
    MPA_FRAME_BYTES,
    MPA_PRIVATE_DATA_MAX_BYTES,
    RNIC_ACCEPT_BATCH,
    RNIC_LISTEN_BACKLOG,
    RNIC_PENDING_REQUESTS_MAX,
)
from kbtp.rnic.reference.goodbye import Goodbye
from kbtp.rnic.reference.loop import Loop
from kbtp.rnic.reference.posting import check_depths, domain_of, receive_buffer
from kbtp.rnic.reference.stream import ReferenceStream
from kbtp.rnic.reference.tcp import TcpLink, address_text, error_text, set_stream_options
from kbtp.verbs.api import ProtectionDomain, Recv

_log = logging.getLogger("kbtp.rnic")

# One octet more than the longest Request shows that something came after it.
_REQUEST_READ_BYTES = MPA_FRAME_BYTES + MPA_PRIVATE_DATA_MAX_BYTES + 1


class _State(Enum):
    READING = auto()
    ASKED = auto()
    DONE = auto()


class IncomingConnection:
    """An accepted connection; once its Request came it is a `kbtp.verbs.api.ConnectRequest`.

    Not yet accepted by the ULP it simply vanishes when its peer goes or says something else.
    """

    def __init__(self, listener: ReferenceListener, loop: Loop, link: TcpLink) -> None:
        self._listener = listener
        self._loop = loop
        self._link = link
        self._state = _State.READING
        self._startup = PassiveStartup(loop.options.mpa)
        self._request: PeerRequest | None = None
        self._timer = loop.start_timer(loop.options.mpa_request_timeout_s, self._timed_out)
        loop.watch(link.sock, self, read=True, write=False)

    @property
    def private_data(self) -> bytes:
        return self._asked().private_data

    @property
    def remote_address(self) -> str:
        return self._link.peer

    @property
    def peer_ird(self) -> int:
        return self._asked().peer_ird

    @property
    def peer_ord(self) -> int:
        return self._asked().peer_ord

    def accept(
        self, *, pd: ProtectionDomain, private_data: bytes, ird: int, ord_: int, receives: Sequence[Recv] = ()
    ) -> ReferenceStream:
        """See `kbtp.verbs.api.ConnectRequest.accept`. Raises ApiMisuse and is not answered then."""
        self._check_unanswered()
        check_depths(ird, ord_)
        stream = ReferenceStream(self._loop, domain_of(pd, self._loop.table), self._link.peer, ird, ord_)
        try:
            for receive in receives:
                receive_buffer(receive, stream.memory)
            reply, negotiated = self._startup.accept(private_data, ird, ord_)
        except ApiMisuse:
            stream.discard()
            raise
        self._finish()
        stream.post_recv(receives)
        self._link.queue([reply])
        stream.open(self._link, negotiated, active=False)
        return stream

    def reject(self, private_data: bytes) -> None:
        """Reply with R=1, then close (RFC 5044 7.1.2 rule 2). Raises ApiMisuse for too long private data."""
        self._check_unanswered()
        reply = self._startup.reject(private_data)
        self._finish()
        self._link.queue([reply])
        Goodbye(self._loop, self._link)

    def reject_unanswered(self) -> None:
        """The owner polls again: the answer is no."""
        if self._state is _State.ASKED:
            _log.warning("the connect request of %s was neither accepted nor rejected: rejected", self._link.peer)
            self.reject(b"")

    def on_ready(self, *, readable: bool, writable: bool) -> None:
        try:
            received = self._link.receive(self._loop.read_buffer[:_REQUEST_READ_BYTES])
        except OSError as error:
            self._drop(error_text(error))
            return
        if received is None:
            return
        if received == 0:
            self._drop("closed before its MPA Request was whole")
            return
        try:
            self._request = self._startup.receive_data(self._loop.read_buffer[:received])
        except MpaStartupError as error:
            # RFC 5044 7.1.2: close TCP, neither Reply nor Terminate
            _log.debug("%s: no stream: %s", self._link.peer, error)
            self._finish()
            Goodbye(self._loop, self._link)
            return
        if self._request is not None:
            self._state = _State.ASKED
            self._timer.cancel()
            self._loop.unwatch(self._link.sock)
            self._loop.ask(self)

    def close_now(self) -> None:
        if self._state is not _State.DONE:
            self._finish()
            self._link.close()

    def _asked(self) -> PeerRequest:
        if self._request is None:
            raise ApiMisuse("the MPA Request is not there yet")
        return self._request

    def _check_unanswered(self) -> None:
        if self._state is not _State.ASKED:
            raise ApiMisuse(
                f"the connect request of {self._link.peer} is answered or gone: answer once, before the next poll"
            )

    def _timed_out(self) -> None:
        self._drop(f"no MPA Request within {self._loop.options.mpa_request_timeout_s} s")

    def _drop(self, why: str) -> None:
        _log.debug("%s: no stream: %s", self._link.peer, why)
        self.close_now()

    def _finish(self) -> None:
        self._state = _State.DONE
        self._timer.cancel()
        self._loop.unwatch(self._link.sock)
        self._listener.forget(self)


class ReferenceListener:
    """`kbtp.verbs.api.Listener`."""

    def __init__(self, loop: Loop, host: str, port: int) -> None:
        self._loop = loop
        self._pending: set[IncomingConnection] = set()
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

    def forget(self, incoming: IncomingConnection) -> None:
        self._pending.discard(incoming)
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
