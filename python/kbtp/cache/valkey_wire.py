"""A server asked without the detour of its client: commands out in one call, replies in as they come.

The package `valkey` finds the server, connects, encrypts and authenticates. From then on the connection's socket is
ours, since a look-up is most of what a small value costs; `libvalkey`, which the package uses too, packs and parses.
"""

from __future__ import annotations

import os
import select
import ssl
import time
from collections.abc import Sequence
from typing import Any

import libvalkey
import valkey
import valkey.exceptions

from kbtp.cache.commands import Command, exchange
from kbtp.cache.steps import IndexStep
from kbtp.cache.valkey_connections import SPIN_S, left_s

_READ_BYTES = 1 << 16
_NOT_YET = (BlockingIOError, ssl.SSLWantReadError, ssl.SSLWantWriteError)
_NONE = object()


class _Refusal(Exception):
    """An answer that says what is wrong."""


class Wire:
    """One connection, for one question at a time.

    Whoever is interrupted, or fails, leaves answers behind that are nobody's: none is asked again (`Wires.drop`).
    """

    def __init__(self, connection: Any) -> None:
        """`connection`, which is connected, is asked in no other way from now on."""
        self.connection = connection
        self._socket = connection.socket
        self._socket.settimeout(0.0)
        self._reader = libvalkey.Reader(
            protocolError=valkey.exceptions.InvalidResponse, replyError=_Refusal, notEnoughData=_NONE
        )

    def send(self, commands: Sequence[Command]) -> None:
        left = memoryview(b"".join(map(libvalkey.pack_command, commands)))
        while left:
            try:
                left = left[self._socket.send(left) :]  # most often all of it, without a wait
            except _NOT_YET as why:
                self._wait(why, select.POLLOUT)

    def receive(self, count: int) -> list[Any]:
        """The replies to so many commands. Raises `valkey.ValkeyError` for what refuses or is none."""
        gets = self._reader.gets
        replies: list[Any] = []
        while len(replies) < count:
            self._read()
            while (reply := gets()) is not _NONE:
                replies.append(reply)
        if len(replies) > count:
            raise valkey.exceptions.InvalidResponse("there are more answers than questions")
        for reply in replies:
            if type(reply) is _Refusal:
                raise _refused(str(reply))
        return replies

    def _read(self) -> None:
        until_s = time.perf_counter() + SPIN_S
        while True:
            try:
                octets = self._socket.recv(_READ_BYTES)
                break
            except _NOT_YET as why:
                if time.perf_counter() >= until_s:
                    self._wait(why, select.POLLIN)
                else:
                    os.sched_yield()  # to the index, if it is to run here
        if not octets:
            raise valkey.ConnectionError("the server has closed the connection")
        self._reader.feed(octets)

    def _wait(self, why: OSError, events: int) -> None:
        """Until there is something to do for what could not be done yet. Raises `TimeoutError` at the deadline."""
        if isinstance(why, ssl.SSLWantReadError):
            events = select.POLLIN
        elif isinstance(why, ssl.SSLWantWriteError):
            events = select.POLLOUT
        watched = select.poll()
        watched.register(self._socket, events)
        watched.poll(left_s() * 1000)


def _refused(why: str) -> valkey.ValkeyError:
    # A primary that has become a replica: connecting anew finds the primary there is now.
    return (valkey.ConnectionError if why.startswith("READONLY ") else valkey.ResponseError)(why)


class Wires:
    """Connections that are not asked anything at the moment. Threads may share it."""

    def __init__(self, pool: Any) -> None:
        self._pool = pool
        self._idle: list[Wire] = []
        self._pid = os.getpid()

    def take(self) -> Wire:
        """Connects if there is none. Raises `OSError` and `valkey.ValkeyError`."""
        if self._pid != os.getpid():  # those are the parent's, which goes on using them
            self._idle, self._pid = [], os.getpid()
        try:
            return self._idle.pop()
        except IndexError:
            return Wire(self._pool.get_connection("MGET"))

    @property
    def has_idle(self) -> bool:
        return bool(self._idle) and self._pid == os.getpid()

    def give_back(self, wire: Wire) -> None:
        """All that it was asked is answered."""
        self._idle.append(wire)

    def drop(self, wire: Wire) -> None:
        wire.connection.disconnect()
        self._pool.release(wire.connection)

    def drop_all(self) -> None:
        while True:
            try:
                self.drop(self._idle.pop())
            except IndexError:
                return


class Dialogue:
    """What one step asks and is answered. It has been asked when this is made, and may be answered much later.

    Raises as a connection of the package does.
    """

    __slots__ = ("_count", "_plan", "_reply", "_wire", "_wires")

    def __init__(self, wires: Wires, step: IndexStep) -> None:
        self._wires = wires
        self._plan = exchange(step)
        self._wire: Wire | None = None
        self._reply: Any = None
        self._count = 0
        self._go_on(None)

    def finish(self) -> Any:
        """The reply of the step."""
        while self._wire is not None:
            self._go_on(self._wire)
        return self._reply

    def forget(self) -> None:
        """Nobody waits for the answer."""
        wire, self._wire = self._wire, None
        if wire is not None:
            self._wires.drop(wire)

    def _go_on(self, asked: Wire | None) -> None:
        """Wait for what was asked, if anything was, and ask what is next."""
        try:
            try:
                commands = next(self._plan) if asked is None else self._plan.send(asked.receive(self._count))
            except StopIteration as done:
                self._reply, self._wire = done.value, None
                if asked is not None:
                    self._wires.give_back(asked)
                return
            if asked is None:
                self._wire = asked = self._wires.take()
            self._count = len(commands)
            asked.send(commands)
        except BaseException as error:
            self.forget()
            if isinstance(error, OSError) and not isinstance(error, TimeoutError):
                raise valkey.ConnectionError(str(error)) from error
            raise
