"""Non-blocking TCP sockets as MPA wants them (RFC 5044 5 and 7)."""

from __future__ import annotations

import os
import socket
import struct
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import islice

from kbtp.limits import (
    RNIC_IOV_MAX,
    TCP_KEEPALIVE_IDLE_S,
    TCP_KEEPALIVE_INTERVAL_S,
    TCP_KEEPALIVE_PROBES,
)

_LINGER_RESET = struct.pack("ii", 1, 0)


def address_text(address: tuple[object, ...]) -> str:
    """`host:port` of a socket address, IPv6 hosts in brackets."""
    host, port = address[0], address[1]
    return f"[{host}]:{port}" if ":" in str(host) else f"{host}:{port}"


def error_text(error: OSError) -> str:
    if isinstance(error, socket.gaierror):  # its numbers are the resolver's own
        return error.strerror or str(error)
    return os.strerror(error.errno) if error.errno else str(error)


def set_stream_options(sock: socket.socket, user_timeout_s: float) -> None:
    """No delay, since an FPDU is written whole; and a peer that is lost without a FIN is noticed."""
    sock.setblocking(False)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, TCP_KEEPALIVE_IDLE_S)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, TCP_KEEPALIVE_INTERVAL_S)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, TCP_KEEPALIVE_PROBES)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, max(1, round(user_timeout_s * 1000)))


@dataclass(frozen=True, slots=True)
class _Run:
    """What one `sendmsg` may take; `end` are the flags of the one that takes its last octet."""

    pieces: deque[memoryview]
    end: int

    def take(self, sent_bytes: int) -> None:
        while self.pieces and sent_bytes >= len(self.pieces[0]):
            sent_bytes -= len(self.pieces.popleft())
        if sent_bytes:
            self.pieces[0] = self.pieces[0][sent_bytes:]


class TcpLink:
    """A connected socket and the octets that wait to go out on it."""

    def __init__(self, sock: socket.socket, peer: str) -> None:
        self.sock = sock
        self.peer = peer
        self.unsent_bytes = 0
        self.moved_bytes = 0
        """Octets sent and received so far: a measure of progress."""
        self.send_finished = False
        self.receive_finished = False
        self._unsent: deque[_Run] = deque()

    @property
    def open(self) -> bool:
        return self.sock.fileno() >= 0

    def queue(self, pieces: Iterable[bytes], *, ends_segment: bool = False) -> None:
        """One `sendmsg` takes no more than `pieces`; with `ends_segment` a TCP segment ends behind the last of them."""
        run = _Run(deque(memoryview(piece) for piece in pieces), socket.MSG_EOR if ends_segment else 0)
        if run.pieces:
            self._unsent.append(run)
            self.unsent_bytes += sum(map(len, run.pieces))

    def drop_unsent(self) -> None:
        self._unsent.clear()
        self.unsent_bytes = 0

    def send_queued(self) -> None:
        """Send until all is out or the socket takes no more. Raises OSError when the connection is broken."""
        while self._unsent:
            run = self._unsent[0]
            pieces = list(islice(run.pieces, RNIC_IOV_MAX))
            try:
                sent = self.sock.sendmsg(pieces, (), run.end if len(pieces) == len(run.pieces) else 0)
            except BlockingIOError:
                return
            self.unsent_bytes -= sent
            self.moved_bytes += sent
            run.take(sent)
            if not run.pieces:
                self._unsent.popleft()

    def receive(self, buffer: memoryview) -> int | None:
        """Octets read into `buffer`, 0 at the peer's FIN, None if there are none now. Raises OSError."""
        try:
            received = self.sock.recv_into(buffer)
        except BlockingIOError:
            return None
        self.moved_bytes += received
        if received == 0:
            self.receive_finished = True
        return received

    def emss_bytes(self) -> int:
        """The effective maximum segment size now; it changes with the path (RFC 5044 4.5)."""
        return self.sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_MAXSEG)

    def finish_sending(self) -> None:
        """Send a FIN. Raises OSError."""
        self.send_finished = True
        self.sock.shutdown(socket.SHUT_WR)

    def close(self) -> None:
        self.drop_unsent()
        self.sock.close()

    def reset(self) -> None:
        """Close with a RST, so that the peer cannot take it for an orderly end."""
        if self.open:
            self.sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _LINGER_RESET)
        self.close()
