"""A TCP connection on which no wait outlives the case."""

from __future__ import annotations

import socket
import struct
import time
from collections.abc import Iterable

from kbtp.conformance.deviation import Deviation

RECEIVE_BYTES = 1 << 16
_LINGER_RESET = struct.pack("ii", 1, 0)


class Deadline:
    """When a case is over, whatever it waits for."""

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._end_s = time.monotonic() + timeout_s

    def restart(self) -> None:
        """Only now has the case begun."""
        self._end_s = time.monotonic() + self._timeout_s

    def extend(self, more_s: float) -> None:
        """The case has to wait so much longer."""
        self._timeout_s += more_s
        self._end_s += more_s

    def left_s(self, at_most_s: float | None = None) -> float:
        """Seconds left, at least a little, so that what is there already can still be seen."""
        left = max(0.001, self._end_s - time.monotonic())
        return left if at_most_s is None else min(left, at_most_s)

    @property
    def passed(self) -> bool:
        return time.monotonic() >= self._end_s


class Tcp:
    """Sends never fail: a peer that is gone shows when something is expected of it."""

    def __init__(self, sock: socket.socket, deadline: Deadline) -> None:
        self.socket = sock
        self.deadline = deadline
        self.was_reset = False
        self._pushed_back = b""
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    @classmethod
    def connect(
        cls, host: str, port: int, deadline: Deadline, *, receive_buffer_bytes: int | None = None,
        mss_bytes: int | None = None,
    ) -> Tcp:  # fmt: skip
        """Raises OSError if nobody listens. `receive_buffer_bytes` keeps the window small, `mss_bytes` what comes."""
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        sock = socket.socket(family)
        try:
            if receive_buffer_bytes is not None:
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer_bytes)
            if mss_bytes is not None:
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_MAXSEG, mss_bytes)
            sock.settimeout(deadline.left_s())
            sock.connect((host, port))
        except OSError:
            sock.close()
            raise
        return cls(sock, deadline)

    # --- what we do ---

    def send(self, octets: bytes) -> None:
        """All of `octets`. Raises `Deviation` if the peer leaves them unread until the case is over."""
        self.socket.settimeout(self.deadline.left_s())
        try:
            self.socket.sendall(octets)
        except TimeoutError:
            raise Deviation(f"a peer that reads {len(octets)} octets", "one that stopped reading") from None
        except OSError:
            self.was_reset = True

    def send_in_pieces(self, pieces: Iterable[bytes]) -> None:
        """Each piece a TCP segment of its own, as far as that can be asked for."""
        for piece in pieces:
            self.send(piece)

    def finish(self) -> None:
        """FIN: we send no more, and go on receiving."""
        try:
            self.socket.shutdown(socket.SHUT_WR)
        except OSError:
            self.was_reset = True

    def reset(self) -> None:
        """RST: we vanish."""
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _LINGER_RESET)
        self.socket.close()

    def close(self) -> None:
        self.socket.close()

    # --- what we see ---

    def receive_some(self, what: str, *, within_s: float | None = None) -> bytes:
        """Whatever comes next; no octets at all if the peer has closed.

        Raises `Deviation` if nothing comes, or if the case is over, however much the peer still sends.
        """
        if self.deadline.passed:
            raise Deviation(what, "the end of the time of the case")
        if self._pushed_back:
            octets, self._pushed_back = self._pushed_back, b""
            return octets
        wait_s = self.deadline.left_s(within_s)
        octets_or_none = self._receive(RECEIVE_BYTES, wait_s)
        if octets_or_none is None:
            raise Deviation(what, f"nothing within {wait_s:.1f} s")
        return octets_or_none

    def receive(self, count: int, what: str, *, within_s: float | None = None) -> bytes:
        """Exactly `count` octets. Raises `Deviation` if the peer closes before."""
        octets = bytearray()
        while len(octets) < count:
            some = self.receive_some(what, within_s=within_s)
            if not some:
                raise Deviation(what, f"the end of the connection after {len(octets)} of {count} octets")
            octets += some
        self._pushed_back = bytes(octets[count:]) + self._pushed_back
        return bytes(octets[:count])

    def expect_close(self, why: str, *, within_s: float | None = None, silent: bool = False) -> bytes:
        """The peer closes; what it still sends before is returned. `silent`: it may send nothing.

        Raises `Deviation`.
        """
        octets = bytearray()
        while some := self.receive_some(f"the peer closes the connection: {why}", within_s=within_s):
            octets += some
            if silent:
                raise Deviation(f"the peer closes without a word: {why}", f"{len(octets)} octets: {octets[:64].hex()}")
        return bytes(octets)

    def expect_silence(self, why: str, *, for_s: float = 0.3) -> None:
        """The peer neither sends nor closes for `for_s` seconds. Raises `Deviation`, also if the case has less left."""
        if self._is_closed_in_silence(f"silence on an open connection: {why}", for_s):
            raise Deviation(f"silence on an open connection: {why}", "the end of the connection")

    def expect_no_octets(self, why: str, *, for_s: float) -> None:
        """The peer sends nothing for `for_s` seconds; it may close. Raises `Deviation` as `expect_silence` does."""
        self._is_closed_in_silence(why, for_s)

    def _is_closed_in_silence(self, what: str, for_s: float) -> bool:
        left_s = self.deadline.left_s(for_s)
        octets = self._pushed_back or self._receive(RECEIVE_BYTES, left_s)
        if octets:
            raise Deviation(what, f"{len(octets)} octets: {octets[:64].hex()}")
        if octets is None and left_s < for_s:
            raise Deviation(what, f"the end of the time of the case after {left_s:.1f} of {for_s:.1f} s")
        return octets is not None

    def _receive(self, count: int, wait_s: float) -> bytes | None:
        self.socket.settimeout(wait_s)
        try:
            return self.socket.recv(count)
        except TimeoutError:
            return None
        except OSError:
            self.was_reset = True
            return b""
