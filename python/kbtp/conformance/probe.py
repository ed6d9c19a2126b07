"""What a case is handed: the way to the peer under test. Every connection it opens is closed when the case is over."""

from __future__ import annotations

import socket
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, TypeVar

from kbtp.conformance.deviation import Deviation, NotApplicable
from kbtp.conformance.initiator_side import InitiatorSide
from kbtp.conformance.rnic_listener import RnicListener
from kbtp.conformance.rnic_stream import BELOW, RnicStream
from kbtp.conformance.session import Session
from kbtp.conformance.setup import MARGIN_S, Setup
from kbtp.conformance.startup import Startup
from kbtp.conformance.stream import Stream
from kbtp.conformance.target_side import TargetSide
from kbtp.conformance.tcp import Deadline, Tcp
from kbtp.keys import Key
from kbtp.verbs.api import Rnic

START_S = 60.0  # for an initiator to start and to connect
LOOK_AGAIN_S = 0.2

_Came = TypeVar("_Came")


class Probe(ABC):
    """Either role. `deadline` is that of the whole case."""

    def __init__(self, setup: Setup, deadline: Deadline) -> None:
        self.setup = setup
        self.deadline = deadline
        self._connections: list[Tcp | RnicStream] = []

    @abstractmethod
    def tcp(self) -> Tcp:
        """A new TCP connection with the peer under test, on which nothing was said."""

    @abstractmethod
    def stream(self, startup: Startup | None = None) -> Stream:
        """A new stream: MPA start-up is done, no FPDU was sent."""

    @abstractmethod
    def session(self, startup: Startup | None = None) -> Session:
        """A new session: HELLO and HELLO_ACK have been exchanged."""

    @property
    def key(self) -> Key | None:
        """What sessions authenticate with, unless a case says otherwise."""
        return self.setup.keys[0] if self.setup.keys else None

    @property
    def by_hand(self) -> bool:
        """What the peer under test does with our memory is seen step by step."""
        return "iwarp" in self.setup.has

    def wait_s(self, stated_s: float) -> float:
        """How long to wait for what the peer does after `stated_s`, as we were told; the case has so much more time."""
        self.deadline.extend(stated_s + MARGIN_S)
        return stated_s + MARGIN_S

    @staticmethod
    def need(holds: bool, why: str) -> None:
        """Leave the case unless `holds`: `why` says what the peer under test does not have."""
        if not holds:
            raise NotApplicable(why)

    def close(self) -> None:
        for connection in self._connections:
            connection.close()


class TargetProbe(Probe):
    """A target is under test; we connect to it, by hand or with an RNIC."""

    def __init__(self, setup: Setup, deadline: Deadline, host: str, port: int, rnic: Rnic | None = None) -> None:
        super().__init__(setup, deadline)
        self._host = host
        self._port = port
        self._rnic = rnic

    def tcp(self, *, receive_buffer_bytes: int | None = None, mss_bytes: int | None = None) -> Tcp:
        self.need(self._rnic is None, BELOW)
        tcp = Tcp.connect(
            self._host, self._port, self.deadline, receive_buffer_bytes=receive_buffer_bytes, mss_bytes=mss_bytes
        )
        self._connections.append(tcp)
        return tcp

    def stream(self, startup: Startup | None = None, *, receive_buffer_bytes: int | None = None) -> Stream:
        if self._rnic is not None:
            self.need(receive_buffer_bytes is None, BELOW)
            carried = RnicStream.connect(self._rnic, self._host, self._port, self.deadline, startup)
            self._connections.append(carried)
            return carried
        startup = startup or Startup(crc=self.setup.crc)
        stream = Stream.initiate(self.tcp(receive_buffer_bytes=receive_buffer_bytes), startup)
        if self.setup.hello_delay_s:
            self.deadline.extend(self.setup.hello_delay_s)
            stream.tcp.expect_no_octets("nothing of the target before HELLO", for_s=self.setup.hello_delay_s)
        return stream

    def rejection(self, startup: Startup) -> bytes:
        """The private data of the target's rejection, over an RNIC. Raises `Deviation` if it accepts."""
        if self._rnic is None:
            raise NotApplicable("an RNIC that is rejected")
        return RnicStream.rejection(self._rnic, self._host, self._port, self.deadline, startup)

    def before_hello(self, startup: Startup | None = None) -> InitiatorSide:
        """A stream on which HELLO is still to be sent."""
        return InitiatorSide(self.stream(startup), self.setup.namespace, self.key)

    def session(
        self, startup: Startup | None = None, *, receive_buffer_bytes: int | None = None, **hello: Any
    ) -> InitiatorSide:
        """`hello` are fields of the HELLO; the target has to grant it."""
        stream = self.stream(startup, receive_buffer_bytes=receive_buffer_bytes)
        return InitiatorSide(stream, self.setup.namespace, self.key).open(**hello)


class InitiatorProbe(Probe):
    """An initiator is under test; it connects to us, by hand or to an RNIC. `start` makes it, `is_there` is False once
    it has ended, `outcome` waits for how its work went. The time of the case begins when it has connected.
    """

    def __init__(
        self,
        setup: Setup,
        deadline: Deadline,
        listener: socket.socket | RnicListener,
        start: Callable[[], None] | None = None,
        is_there: Callable[[], bool] = lambda: True,
        outcome: Callable[[float], bool] | None = None,
    ) -> None:
        super().__init__(setup, deadline)
        self._listener = listener
        self._start = start
        self._is_there = is_there
        self._outcome = outcome

    def tcp(self) -> Tcp:
        """The initiator's next connection; before the first one it may have to start up."""
        return self._started(self._accept)

    def limit_mss(self, mss_bytes: int) -> None:
        """Connections from now on are offered no larger TCP segments: what comes is cut small."""
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_MAXSEG, mss_bytes)

    def next_tcp(self, what: str, *, within_s: float | None = None) -> Tcp:
        """A further connection of an initiator that is at work, a retry for example. Raises `Deviation`."""
        return self._in_time(self._accept, what, within_s)

    def next_tcp_or_none(self, *, within_s: float | None = None) -> Tcp | None:
        return self._accept(self.deadline.left_s(within_s))

    def stream(self, startup: Startup | None = None) -> Stream:
        if isinstance(self._listener, RnicListener):
            return self._started(self._carried(self._listener, startup))
        return self.respond(self.tcp(), startup)

    def next_stream(self, what: str, *, within_s: float | None = None) -> Stream:
        """On a further connection. Raises `Deviation`."""
        if isinstance(self._listener, RnicListener):
            return self._in_time(self._carried(self._listener, None), what, within_s)
        return self.respond(self.next_tcp(what, within_s=within_s))

    def respond(self, tcp: Tcp, startup: Startup | None = None) -> Stream:
        """A stream by hand on a connection of the initiator."""
        return Stream.respond(tcp, startup or Startup(crc=self.setup.crc))

    def reject(self) -> None:
        """Over an RNIC: the initiator connects, and is turned away."""
        listener = self._listener
        if not isinstance(listener, RnicListener):
            raise NotApplicable("an RNIC that rejects a connection")
        self._started(lambda within_s: listener.reject(within_s) or None)

    def before_ack(self, startup: Startup | None = None) -> TargetSide:
        """A stream on which HELLO has come and HELLO_ACK is still to be sent."""
        side = TargetSide(self.stream(startup), self.key)
        side.take_hello()
        return side

    def session(self, startup: Startup | None = None, **ack: Any) -> TargetSide:
        """`ack` are fields of the HELLO_ACK that replace ours."""
        return TargetSide(self.stream(startup), self.key).open(**ack)

    def refuse_further(self) -> None:
        """Whoever connects from now on finds nobody, so that an initiator which tries again comes to an end."""
        self._listener.close()

    def work_succeeded(self) -> bool:
        """Whether all of the initiator's work has succeeded, as it says itself (needs "one-by-one")."""
        if self._outcome is None:
            raise NotApplicable("how its work went, an initiator says only where --run starts it")
        return self._outcome(self.deadline.left_s())

    @property
    def _socket(self) -> socket.socket:
        if isinstance(self._listener, RnicListener):
            raise NotApplicable(BELOW)
        return self._listener

    def _started(self, accept: Callable[[float], _Came | None]) -> _Came:
        """What comes of the initiator's next connection, which it is started for if need be. Raises `Deviation`."""
        what = "a connection of the initiator"
        if self._start is None:
            return self._in_time(accept, what, None)
        self._start()
        self._start = None
        end_s = time.monotonic() + START_S
        while (came := accept(LOOK_AGAIN_S)) is None:
            if time.monotonic() >= end_s or not self._is_there():
                raise Deviation(what, "no connection in time" if self._is_there() else "its end without one")
        self.deadline.restart()
        return came

    def _in_time(self, accept: Callable[[float], _Came | None], what: str, within_s: float | None) -> _Came:
        came = accept(self.deadline.left_s(within_s))
        if came is None:
            raise Deviation(what, "no connection in time")
        return came

    def _accept(self, within_s: float) -> Tcp | None:
        self._socket.settimeout(within_s)
        try:
            sock, _ = self._socket.accept()
        except TimeoutError:
            return None
        tcp = Tcp(sock, self.deadline)
        self._connections.append(tcp)
        return tcp

    def _carried(self, listener: RnicListener, startup: Startup | None) -> Callable[[float], RnicStream | None]:
        def accept(within_s: float) -> RnicStream | None:
            stream = listener.accept(self.deadline, startup, within_s)
            self._connections += [stream] if stream is not None else []
            return stream

        return accept
