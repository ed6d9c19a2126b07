"""The end of a connection that still has something to say.

A last Terminate or rejecting Reply reaches the peer only if the connection ends with a FIN: closing a socket with
unread input sends a RST, which can overtake it. So: what is queued leaves, FIN, read until the peer's FIN or
a time-out, close (RFC 5040 6.2.1).
"""

from __future__ import annotations

from kbtp.rnic.reference.loop import Loop
from kbtp.rnic.reference.tcp import TcpLink

_LAST_READS = 16


class Goodbye:
    """Owns `link` from here on; nobody waits for it."""

    def __init__(self, loop: Loop, link: TcpLink) -> None:
        self._loop = loop
        self._link = link
        loop.closables.add(self)
        self._timer = loop.start_timer(loop.options.goodbye_s, self.close_now)
        self._proceed()

    def on_ready(self, *, readable: bool, writable: bool) -> None:
        try:
            if readable:
                self._link.receive(self._loop.read_buffer)
        except OSError:
            self.close_now()
            return
        self._proceed()

    def close_now(self) -> None:
        """Time is up, or the connection is broken, or the channel closes: what can be read is, to avoid a RST."""
        self._timer.cancel()
        self._loop.closables.discard(self)
        self._loop.unwatch(self._link.sock)
        try:
            for _ in range(_LAST_READS):
                if not self._link.receive(self._loop.read_buffer):
                    break
        except OSError:
            pass  # broken, and closed now anyway
        self._link.close()

    def _proceed(self) -> None:
        link = self._link
        try:
            link.send_queued()
            if not link.unsent_bytes and not link.send_finished:
                link.finish_sending()
        except OSError:
            self.close_now()
            return
        if link.send_finished and link.receive_finished:
            self.close_now()
        else:
            self._loop.watch(link.sock, self, read=not link.receive_finished, write=not link.send_finished)
