"""Connections of the package `valkey` with a deadline for a whole step, which look for an answer before they sleep."""

from __future__ import annotations

import math
import os
import ssl
import threading
import time
from collections.abc import Sequence
from typing import Any

import valkey
import valkey.sentinel

from kbtp import limits


class _Deadline(threading.local):
    at_s = 0.0


_deadline = _Deadline()


def begin(timeout_s: float) -> None:
    """What this thread does with connections from now on ends in time, with `valkey.TimeoutError`."""
    _deadline.at_s = time.monotonic() + timeout_s


def left_s() -> float:
    """Raises `TimeoutError`."""
    left_s = _deadline.at_s - time.monotonic()
    if left_s <= 0:
        raise TimeoutError("the deadline has passed")
    return left_s


class _Socket:
    """None of its calls goes beyond the deadline: `socket_timeout` counts for each `recv` alone."""

    def __init__(self, socket: Any) -> None:
        self.raw = self._socket = socket
        self._timeout_s: float | None = socket.gettimeout()
        self._set_s = self._timeout_s
        self._recv_into = socket.recv_into

    def __getattr__(self, name: str) -> Any:
        return getattr(self._socket, name)

    def settimeout(self, timeout_s: float | None) -> None:
        self._timeout_s = timeout_s  # set with the next call: who looks again and again sets it to 0 each time

    def recv(self, octets: int) -> Any:
        self._limit()
        return self._socket.recv(octets)

    def recv_into(self, buffer: Any) -> Any:
        self._limit()
        return self._recv_into(buffer)

    def sendall(self, octets: Any) -> None:
        if self._set_s != 0:
            self._set_s = 0.0
            self._socket.settimeout(0.0)
        try:
            sent = self._socket.send(octets)  # most often all of it, without a wait
        except (BlockingIOError, ssl.SSLWantReadError, ssl.SSLWantWriteError):
            sent = 0
        left = memoryview(octets)[sent:]
        while left:
            self._limit()
            left = left[self._socket.send(left) :]

    def _limit(self) -> None:
        limit_s = self._timeout_s
        if limit_s != 0:  # else it does not wait
            limit_s = left_s() if limit_s is None else min(left_s(), limit_s)
        if limit_s != self._set_s:
            self._set_s = limit_s
            self._socket.settimeout(limit_s)


def _spin_s() -> float:
    """What KBTP_SPIN_US says, as for the native RNIC; on one processor nothing comes while we look."""
    wanted = os.environ.get("KBTP_SPIN_US") or str(limits.RNIC_SPIN_US)
    return int(wanted) / 1e6 if wanted.isdigit() and (os.cpu_count() or 1) > 1 else 0.0


SPIN_S = _spin_s()


class _Timely:
    """Looks for an answer for a while before it sleeps, as an RNIC does: that halves a round trip.

    Whoever is interrupted gives it back to its pool with answers that are still to come: none of them is that to the
    question of who takes it next.
    """

    socket_connect_timeout: float | None
    _sock: Any
    _owed = 0

    def connect(self) -> None:
        """Also done whenever it is taken out of its pool, and by sending where nothing is connected: what is owed then
        is the answer to what is being sent."""
        if self._owed and self._sock is not None:
            self.disconnect()
        super().connect()  # type: ignore[misc]

    def disconnect(self, *arguments: Any) -> None:
        self._owed = 0
        super().disconnect(*arguments)  # type: ignore[misc]

    def send_command(self, *arguments: Any, **options: Any) -> None:
        self._owed += 1
        super().send_command(*arguments, **options)  # type: ignore[misc]

    def pack_commands(self, commands: Sequence[Any]) -> Any:
        self._owed += len(commands)
        return super().pack_commands(commands)  # type: ignore[misc]

    def read_response(self, *arguments: Any, **options: Any) -> Any:
        until_s = time.perf_counter() + SPIN_S
        while not self.can_read(0) and time.perf_counter() < until_s:  # type: ignore[attr-defined]
            os.sched_yield()  # to the index, if it is to run here
        try:
            response = super().read_response(*arguments, **options)  # type: ignore[misc]
        except valkey.ResponseError:  # an answer too
            self._owed -= 1
            raise
        self._owed -= 1
        return response

    @property
    def socket(self) -> Any:
        """For who has no use for the rest of it any more."""
        return self._sock.raw

    def _connect(self) -> _Socket:
        wanted_s = self.socket_connect_timeout
        self.socket_connect_timeout = min(left_s(), math.inf if wanted_s is None else wanted_s)
        try:
            return _Socket(super()._connect())  # type: ignore[misc]
        finally:
            self.socket_connect_timeout = wanted_s


class Connection(_Timely, valkey.Connection):
    pass


class TlsConnection(_Timely, valkey.SSLConnection):
    pass


class UnixConnection(_Timely, valkey.UnixDomainSocketConnection):
    pass


class SentinelConnection(_Timely, valkey.sentinel.SentinelManagedConnection):
    pass


BY_SCHEME = {"valkey": Connection, "valkeys": TlsConnection, "unix": UnixConnection}
_TIMELY = {valkey.Connection: Connection, valkey.SSLConnection: TlsConnection}


class Pool(valkey.ConnectionPool):
    """For who chooses the class of connections by himself, as the client of a cluster does."""

    def __init__(self, connection_class: Any = valkey.Connection, **options: Any) -> None:
        super().__init__(_TIMELY.get(connection_class, connection_class), **options)
