"""One channel's loop: which sockets are ready, which timers are due, which events wait to be reaped."""

from __future__ import annotations

import heapq
import os
import selectors
import socket
import threading
import time
from collections.abc import Callable
from itertools import count
from typing import Protocol

from kbtp.limits import RNIC_READ_BUFFER_BYTES
from kbtp.rnic.reference.options import ReferenceOptions
from kbtp.verbs.api import ConnectRequest, Event
from kbtp.verbs.stag_table import StagTable

_LONGEST_WAIT_S = 3600.0  # what epoll takes for certain; `poll` goes round again for more


class Handler(Protocol):
    """What the loop calls for a socket. It does a bounded amount of work, so that the others get their turn."""

    def on_ready(self, *, readable: bool, writable: bool) -> None: ...


class Closable(Protocol):
    """What has to go when the channel closes."""

    def close_now(self) -> None: ...


class Question(ConnectRequest, Protocol):
    """A connect request that is rejected unless it is answered before the next `poll`."""

    def reject_unanswered(self) -> None: ...


class Timer:
    """One running timer."""

    __slots__ = ("_action",)

    def __init__(self, action: Callable[[], None]) -> None:
        self._action: Callable[[], None] | None = action

    @property
    def running(self) -> bool:
        return self._action is not None

    def cancel(self) -> None:
        self._action = None

    def fire(self) -> None:
        action, self._action = self._action, None
        if action is not None:
            action()


class Loop:
    """Used by one thread at a time, but for `wake`."""

    def __init__(self, table: StagTable, options: ReferenceOptions) -> None:
        self.table = table
        self.options = options
        self.read_buffer = memoryview(bytearray(RNIC_READ_BUFFER_BYTES))
        """Shared by all sockets: nobody keeps octets in it beyond one `on_ready`."""
        self.closables: set[Closable] = set()
        self._events: list[Event] = []
        self._questions: list[Question] = []
        self._timers: list[tuple[float, int, Timer]] = []
        self._timer_numbers = count()
        self._selector = selectors.EpollSelector()
        self._wake_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        # A wake after close must not write to a file descriptor used anew; one from a signal handler must not deadlock.
        self._wake_lock = threading.RLock()
        self._selector.register(self._wake_fd, selectors.EVENT_READ, None)
        self._polling = False
        self._closed = False

    @property
    def closed(self) -> bool:
        return self._closed

    def fileno(self) -> int:
        return self._selector.fileno()

    def watch(self, sock: socket.socket, handler: Handler, *, read: bool, write: bool) -> None:
        """Call `handler` when `sock` is ready for what is asked for; replaces what was asked before."""
        events = (selectors.EVENT_READ if read else 0) | (selectors.EVENT_WRITE if write else 0)
        key = self._selector.get_map().get(sock)
        if not events:
            if key is not None:
                self._selector.unregister(sock)
        elif key is None:
            self._selector.register(sock, events, handler)
        elif key.events != events or key.data is not handler:
            self._selector.modify(sock, events, handler)

    def unwatch(self, sock: socket.socket) -> None:
        if sock.fileno() >= 0 and sock in self._selector.get_map():
            self._selector.unregister(sock)

    def start_timer(self, delay_s: float, action: Callable[[], None]) -> Timer:
        timer = Timer(action)
        heapq.heappush(self._timers, (time.monotonic() + delay_s, next(self._timer_numbers), timer))
        return timer

    def next_timeout_s(self) -> float | None:
        if self._events:
            return 0.0
        self._drop_cancelled()
        return max(0.0, self._timers[0][0] - time.monotonic()) if self._timers else None

    def report(self, event: Event) -> None:
        """Queue `event` for the next `poll`; `fileno` shows it if this is not inside one."""
        self._events.append(event)
        if not self._polling and len(self._events) == 1:
            self.wake()

    def ask(self, question: Question) -> None:
        """Report a connect request, and see to it that it gets an answer."""
        self._questions.append(question)
        self.report(question)

    def wake(self) -> None:
        with self._wake_lock:
            if not self._closed:
                os.eventfd_write(self._wake_fd, 1)

    def poll(self, timeout_s: float) -> list[Event]:
        deadline = time.monotonic() + timeout_s
        self._polling = True
        try:
            questions, self._questions = self._questions, []
            for question in questions:
                question.reject_unanswered()
            while True:
                woken = self._turn(deadline)
                if self._events or woken or time.monotonic() >= deadline:
                    events, self._events = self._events, []
                    return events
        finally:
            self._polling = False

    def close(self) -> None:
        for closable in list(self.closables):
            closable.close_now()
        with self._wake_lock:
            self._closed = True
            os.close(self._wake_fd)
        self._selector.close()
        self._timers.clear()
        self._events.clear()

    def _turn(self, deadline: float) -> bool:
        """One round over what is ready and due; True if another thread asked to wake up."""
        wait_s = min(deadline - time.monotonic(), _LONGEST_WAIT_S)
        due_s = self.next_timeout_s()
        woken = False
        for key, events in self._selector.select(max(0.0, wait_s if due_s is None else min(wait_s, due_s))):
            if key.data is None:
                os.eventfd_read(self._wake_fd)
                woken = True
                continue
            current = self._selector.get_map().get(key.fd)
            # An earlier handler of this round may have closed the socket, and a new one may have got its number.
            if current is not None and current.data is key.data:
                key.data.on_ready(
                    readable=bool(events & selectors.EVENT_READ), writable=bool(events & selectors.EVENT_WRITE)
                )
        now = time.monotonic()
        while self._timers and self._timers[0][0] <= now:
            heapq.heappop(self._timers)[2].fire()
        return woken

    def _drop_cancelled(self) -> None:
        while self._timers and not self._timers[0][2].running:
            heapq.heappop(self._timers)
