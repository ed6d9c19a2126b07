"""Full operation (RFC 5044 3 to 6): octets between one TCP connection and its `IwarpStream`, both ways."""

from __future__ import annotations

from typing import Protocol

from kbtp.iwarp.fpdu import mulpdu_for_emss, runs
from kbtp.iwarp.mpa import Negotiated
from kbtp.iwarp.stream import IwarpStream
from kbtp.limits import RNIC_PUMP_MAX_BYTES, RNIC_UNSENT_MAX_BYTES
from kbtp.rnic.reference.loop import Loop
from kbtp.rnic.reference.tcp import TcpLink
from kbtp.types import TerminateCause
from kbtp.verbs.stag_table import StreamView

# After a send failed there may still be a Terminate to read that says why; a flood of other input is not waited out.
_READS_AFTER_SEND_ERROR = 16


class Owner(Protocol):
    """The stream that an operation works for. Any of these may end the stream, and so `stop` the operation."""

    def take_events(self, operation: Operation) -> None:
        """`operation.iwarp` may have something to report."""
        ...

    def take_eof(self, operation: Operation, *, whole: bool) -> None:
        """The peer's FIN came; `whole` says whether between messages."""
        ...

    def take_loss(self, error: OSError) -> None:
        """The connection is broken."""
        ...

    def take_silence(self, operation: Operation) -> None:
        """All that could be sent is with the system."""
        ...


class Operation:
    """Receives and sends in bounded turns, so that no stream keeps the others of its channel waiting."""

    def __init__(
        self, loop: Loop, link: TcpLink, owner: Owner, negotiated: Negotiated, memory: StreamView, *, active: bool
    ) -> None:
        self.link = link
        self._loop = loop
        self._owner = owner
        self._markers = negotiated.tx_markers
        self._pad_stands_alone = negotiated.pad_stands_alone
        self._emss_bytes = link.emss_bytes()
        self._stopped = False
        mulpdu = mulpdu_for_emss(self._emss_bytes, markers=self._markers)
        self.iwarp = IwarpStream(negotiated, memory, active=active, mulpdu=mulpdu)

    def on_ready(self, *, readable: bool, writable: bool) -> None:
        if readable:
            self._receive()
        self.send()

    def receive_octets(self, octets: memoryview) -> None:
        with self._loop.table.lock:
            self.iwarp.receive_data(octets)
        self._owner.take_events(self)

    def send(self) -> None:
        """Build FPDUs and send them until the socket takes no more, nothing is left, or others should have a turn."""
        if self._has_stopped():
            return
        turn_is_over = False
        try:
            turn_is_over = self._send_turn()
        except OSError as error:
            self._send_failed(error)
        waits = turn_is_over or self.link.unsent_bytes > 0
        if not self._has_stopped() and not waits:
            self._owner.take_silence(self)
        if not self._has_stopped():
            self._loop.watch(self.link.sock, self, read=True, write=waits)

    def stop(self) -> TerminateCause | None:
        """Receive and send no more, but for a Terminate that waits; its cause."""
        self._stopped = True
        self._loop.unwatch(self.link.sock)
        if self.link.send_finished:
            return None
        cause = self.iwarp.sent_cause
        if cause is not None:
            self._queue(self.iwarp.data_to_send(RNIC_UNSENT_MAX_BYTES))
        return cause

    def _has_stopped(self) -> bool:
        return self._stopped

    def _receive(self) -> None:
        try:
            received = self.link.receive(self._loop.read_buffer)
        except OSError as error:
            self._owner.take_loss(error)
            return
        if received == 0:
            self._owner.take_eof(self, whole=self.iwarp.receive_eof())
        elif received:
            self.receive_octets(self._loop.read_buffer[:received])

    def _send_turn(self) -> bool:
        """True if it ended only because others should have a turn. Raises OSError."""
        budget_bytes = RNIC_PUMP_MAX_BYTES
        self.link.send_queued()
        while not self.link.unsent_bytes and not self.link.send_finished and self.iwarp.wants_to_send():
            if budget_bytes <= 0:
                return True
            budget_bytes -= self._build()
            if self._has_stopped():
                break
            self.link.send_queued()
        return False

    def _build(self) -> int:
        """Queue the next FPDUs on the socket; how many octets."""
        emss_bytes = self.link.emss_bytes()
        if emss_bytes != self._emss_bytes:
            self._emss_bytes = emss_bytes
            self.iwarp.set_mulpdu(mulpdu_for_emss(emss_bytes, markers=self._markers))
        with self._loop.table.lock:
            fpdus = self.iwarp.data_to_send(RNIC_UNSENT_MAX_BYTES)
        self._queue(fpdus)
        self._owner.take_events(self)
        return sum(map(len, fpdus))

    def _queue(self, fpdus: list[bytes]) -> None:
        if not self._pad_stands_alone:
            self.link.queue(fpdus)
            return
        # Each run ends a segment, not only one with PAD: whatever the socket still holds then, that starts one as well.
        for run in runs(fpdus):
            self.link.queue(run, ends_segment=True)

    def _send_failed(self, error: OSError) -> None:
        for _ in range(_READS_AFTER_SEND_ERROR):
            try:
                received = self.link.receive(self._loop.read_buffer)
            except OSError:
                break
            if not received:
                break
            self.receive_octets(self._loop.read_buffer[:received])
            if self._has_stopped():
                return
        self._owner.take_loss(error)
