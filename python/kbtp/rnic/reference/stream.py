"""One RDMAP stream: an `IwarpStream` on a TCP connection, seen through the verbs.

The stream lives through four states:

    CONNECTING   (active side) no Reply yet
    OPEN         work is posted and completed
    DISCONNECTING  what is posted leaves, then FIN, then the peer's FIN is awaited
    ENDED        `StreamEnded` or `Rejected` is reported; the connection may still say goodbye on its own
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from enum import Enum, auto

from kbtp.errors import ApiMisuse, ConnectionLost, DeadlineExceeded, KbtpError, PeerIncompatible
from kbtp.iwarp import events as iwarp_events
from kbtp.iwarp.events import WrKind
from kbtp.iwarp.fpdu import mulpdu_for_emss
from kbtp.iwarp.mpa import Negotiated
from kbtp.iwarp.stream import IwarpStream
from kbtp.limits import RNIC_PUMP_MAX_BYTES, RNIC_UNSENT_MAX_BYTES
from kbtp.rnic.reference.goodbye import Goodbye
from kbtp.rnic.reference.loop import Closable, Loop, Timer
from kbtp.rnic.reference.posting import prepare, receive_buffer
from kbtp.rnic.reference.tcp import TcpLink, error_text
from kbtp.types import TerminateCause, TerminateInfo
from kbtp.verbs.api import (
    Established,
    Recv,
    Rejected,
    StreamEnded,
    WcOpcode,
    WcStatus,
    WorkCompletion,
    WorkRequest,
)
from kbtp.verbs.stag_table import Domain, StreamView

_log = logging.getLogger("kbtp.rnic")

_OPCODES = {
    WrKind.SEND: WcOpcode.SEND,
    WrKind.WRITE: WcOpcode.RDMA_WRITE,
    WrKind.READ: WcOpcode.RDMA_READ,
    WrKind.ATOMIC: WcOpcode.ATOMIC,
    WrKind.IMMEDIATE: WcOpcode.IMMEDIATE,
    WrKind.RECEIVE: WcOpcode.RECV,
}

# After a send failed there may still be a Terminate to read that says why; a flood of other input is not waited out.
_READS_AFTER_SEND_ERROR = 16


class _State(Enum):
    CONNECTING = auto()
    OPEN = auto()
    DISCONNECTING = auto()
    ENDED = auto()


class _Farewell(Enum):
    """What becomes of the TCP connection of a stream that ended."""

    GOODBYE = auto()
    RESET = auto()
    CLOSE = auto()


class ReferenceStream:
    """`kbtp.verbs.api.Stream`. Posts come from the thread that polls the channel, and are tried at once.

    Until `Established` only receives can be posted on the active side.
    """

    def __init__(self, loop: Loop, pd: Domain, remote_address: str, ird: int, ord_: int) -> None:
        self._loop = loop
        self._pd = pd
        self._remote_address = remote_address
        self._ird = ird
        self._ord = ord_
        self._state = _State.CONNECTING
        self._memory = loop.table.memory_for(self, pd)
        self._link: TcpLink | None = None
        self._iwarp: IwarpStream | None = None
        self._early_receives: list[tuple[int, memoryview]] = []
        self._outstanding = 0  # posted and not completed, receives apart
        self._more_to_build = False
        self._timer: Timer | None = None
        self._moved_bytes_seen = 0
        self._emss_bytes = 0
        self._tx_markers = False
        self._connector: Closable | None = None
        loop.closables.add(self)

    def __repr__(self) -> str:
        return f"<ReferenceStream {self._remote_address} {self._state.name}>"

    @property
    def pd(self) -> Domain:
        return self._pd

    @property
    def remote_address(self) -> str:
        return self._remote_address

    @property
    def ird(self) -> int:
        return self._ird

    @property
    def ord_(self) -> int:
        return self._ord

    @property
    def memory(self) -> StreamView:
        """What this stream reaches of the RNIC's regions; also the scope of regions that are its alone."""
        return self._memory

    def post(self, requests: Sequence[WorkRequest]) -> None:
        """See `kbtp.verbs.api.Stream.post`. Refused with `ConnectionLost` after `disconnect` too."""
        self._check_not_ended()
        if self._state is _State.DISCONNECTING:
            raise ConnectionLost(f"the stream to {self._remote_address} is disconnecting: no more work is taken")
        if self._iwarp is None:
            raise ApiMisuse("the stream is still connecting: post after Established")
        posts = [prepare(request, self._memory, self._ord) for request in requests]
        for post in posts:
            post(self._iwarp)
        self._outstanding += len(posts)
        self._send()

    def post_recv(self, receives: Sequence[Recv]) -> None:
        self._check_not_ended()
        buffers = [(receive.wr_id, receive_buffer(receive, self._memory)) for receive in receives]
        if self._iwarp is None:
            self._early_receives += buffers
            return
        for wr_id, buffer in buffers:
            self._iwarp.post_receive(wr_id, buffer)

    def terminate(self, cause: TerminateCause) -> None:
        if self._has_ended():
            return
        if self._iwarp is None:
            self._end(ConnectionLost(f"this side gave up connecting to {self._remote_address}: {cause}"))
            return
        self._iwarp.terminate(cause)
        self._end(ConnectionLost(f"this side ended the stream to {self._remote_address}: {cause}"))

    def disconnect(self) -> None:
        if self._state is _State.CONNECTING:
            self._end(ConnectionLost(f"this side gave up connecting to {self._remote_address}"))
        elif self._state is _State.OPEN:
            self._state = _State.DISCONNECTING
            self._watch_disconnect()
            self._send()

    def abort(self) -> None:
        self._end(ConnectionLost(f"this side aborted the stream to {self._remote_address}"), farewell=_Farewell.RESET)

    def close_now(self) -> None:
        """The channel closes: as `abort`."""
        self.abort()

    # --- from the connector or the listener ---

    def discard(self) -> None:
        """It never was: the ULP has not seen it."""
        self._state = _State.ENDED
        self._memory.close()
        self._loop.closables.discard(self)

    def connect_through(self, connector: Closable) -> None:
        """`connector` works until it calls one of the methods below, or is closed because the stream ends first."""
        self._connector = connector

    def open(self, link: TcpLink, negotiated: Negotiated, *, active: bool, surplus: bytes = b"") -> None:
        """Start-up is done: full operation on `link`, which is the stream's from here on (RFC 5044 7.1)."""
        self._link, self._connector = link, None
        self._ird, self._ord = negotiated.ird, negotiated.ord_
        self._tx_markers = negotiated.tx_markers
        self._emss_bytes = link.emss_bytes()
        mulpdu = mulpdu_for_emss(self._emss_bytes, markers=self._tx_markers)
        iwarp = IwarpStream(negotiated, self._memory, active=active, mulpdu=mulpdu)
        self._iwarp = iwarp
        self._state = _State.OPEN
        if negotiated.failure is not None:
            self._end(
                PeerIncompatible(f"{self._remote_address} cannot serve what this side needs: {negotiated.failure}")
            )
            return
        early, self._early_receives = self._early_receives, []
        for wr_id, buffer in early:
            iwarp.post_receive(wr_id, buffer)
        if active:
            self._loop.report(Established(self, negotiated.private_data))
        if surplus:
            self._receive_octets(memoryview(surplus))
        self._send()

    def rejected(self, link: TcpLink, private_data: bytes) -> None:
        """The peer's Reply had R=1. Receives complete as FLUSHED first; MPA is left (RFC 5044 7.1.2 rule 3)."""
        self._link = link
        self._end(None, event=Rejected(self, private_data))

    def fail_connecting(self, reason: KbtpError) -> None:
        self._end(reason)

    # --- from the loop ---

    def on_ready(self, *, readable: bool, writable: bool) -> None:
        if readable:
            self._receive()
        self._send()

    # --- within ---

    def _has_ended(self) -> bool:
        return self._state is _State.ENDED

    def _check_not_ended(self) -> None:
        if self._has_ended():
            raise ConnectionLost(f"the stream to {self._remote_address} has ended")

    def _connection(self) -> TcpLink:
        if self._link is None:
            raise ApiMisuse("the stream has no connection yet")
        return self._link

    def _receive(self) -> None:
        link = self._connection()
        try:
            received = link.receive(self._loop.read_buffer)
        except OSError as error:
            self._lose(error)
            return
        if received == 0:
            self._receive_eof()
        elif received:
            self._receive_octets(self._loop.read_buffer[:received])

    def _receive_octets(self, octets: memoryview) -> None:
        iwarp = self._iwarp
        if iwarp is None:
            return
        with self._loop.table.lock:
            iwarp.receive_data(octets)
        self._reap(iwarp)

    def _receive_eof(self) -> None:
        iwarp = self._iwarp
        if iwarp is None:
            return
        whole = iwarp.receive_eof()
        self._reap(iwarp)
        if self._has_ended():
            return
        reason: KbtpError | None = None
        if not whole:
            reason = ConnectionLost(f"{self._remote_address} closed the connection in the middle of a message")
        elif self._outstanding:
            reason = ConnectionLost(
                f"{self._remote_address} closed the connection with {self._outstanding} work requests outstanding"
            )
        self._end(reason)

    def _reap(self, iwarp: IwarpStream) -> None:
        """Report what the iWARP stream has to say, in its order."""
        while not self._has_ended():
            event = iwarp.next_event()
            if event is None:
                return
            match event:
                case iwarp_events.TerminateReceived(info):
                    _log.warning("%s ended the stream with Terminate %s", self._remote_address, info)
                    self._connection().drop_unsent()
                    self._end(ConnectionLost(f"{self._remote_address} ended the stream: {info}", info), terminate=info)
                case iwarp_events.Failed(error):
                    _log.warning("%s broke the protocol: %s; its stream ends", self._remote_address, error)
                    self._end(error)
                case _:
                    self._report_completion(event)

    def _report_completion(self, event: iwarp_events.Event) -> None:
        match event:
            case iwarp_events.Received(wr_id, length, invalidated_stag, solicited):
                completion = WorkCompletion(
                    self,
                    wr_id,
                    WcOpcode.RECV,
                    WcStatus.SUCCESS,
                    length=length,
                    invalidated_stag=invalidated_stag,
                    solicited=solicited,
                )
            case iwarp_events.ImmediateReceived(wr_id, data, solicited):
                completion = WorkCompletion(
                    self,
                    wr_id,
                    WcOpcode.RECV_IMMEDIATE,
                    WcStatus.SUCCESS,
                    length=len(data),
                    immediate=data,
                    solicited=solicited,
                )
            case iwarp_events.SendCompleted(wr_id):
                completion = self._done(wr_id, WcOpcode.SEND)
            case iwarp_events.WriteCompleted(wr_id):
                completion = self._done(wr_id, WcOpcode.RDMA_WRITE)
            case iwarp_events.ImmediateCompleted(wr_id):
                completion = self._done(wr_id, WcOpcode.IMMEDIATE)
            case iwarp_events.ReadCompleted(wr_id, length):
                completion = self._done(wr_id, WcOpcode.RDMA_READ, length=length)
            case iwarp_events.AtomicCompleted(wr_id, value):
                completion = self._done(wr_id, WcOpcode.ATOMIC, value=value)
            case _:
                return
        self._loop.report(completion)

    def _done(self, wr_id: int, opcode: WcOpcode, *, length: int = 0, value: int = 0) -> WorkCompletion:
        self._outstanding -= 1
        return WorkCompletion(self, wr_id, opcode, WcStatus.SUCCESS, length=length, value=value)

    def _send(self) -> None:
        """Build FPDUs and send them until the socket takes no more, nothing is left, or others should have a turn."""
        iwarp, link = self._iwarp, self._link
        if iwarp is None or link is None or self._has_ended():
            return
        budget_bytes = RNIC_PUMP_MAX_BYTES
        self._more_to_build = False
        try:
            link.send_queued()
            while not link.unsent_bytes and not link.send_finished:
                if budget_bytes <= 0:
                    self._more_to_build = True
                    break
                built_bytes = self._build(iwarp, link)
                if self._has_ended() or not built_bytes:
                    break
                budget_bytes -= built_bytes
                link.send_queued()
        except OSError as error:
            self._send_failed(error)
        if not self._has_ended():
            self._finish_if_done(iwarp, link)
        if not self._has_ended():
            write = self._more_to_build or bool(link.unsent_bytes)
            self._loop.watch(link.sock, self, read=True, write=write)

    def _build(self, iwarp: IwarpStream, link: TcpLink) -> int:
        """Queue the next FPDUs on the socket; how many octets."""
        emss_bytes = link.emss_bytes()
        if emss_bytes != self._emss_bytes:
            self._emss_bytes = emss_bytes
            iwarp.set_mulpdu(mulpdu_for_emss(emss_bytes, markers=self._tx_markers))
        with self._loop.table.lock:
            fpdus = iwarp.data_to_send(RNIC_UNSENT_MAX_BYTES)
        link.queue(fpdus)
        self._reap(iwarp)
        return sum(map(len, fpdus))

    def _send_failed(self, error: OSError) -> None:
        for _ in range(_READS_AFTER_SEND_ERROR):
            link = self._connection()
            try:
                received = link.receive(self._loop.read_buffer)
            except OSError:
                break
            if not received:
                break
            self._receive_octets(self._loop.read_buffer[:received])
            if self._has_ended():
                return
        self._lose(error)

    def _lose(self, error: OSError) -> None:
        self._end(
            ConnectionLost(f"the connection to {self._remote_address} was lost: {error_text(error)}"),
            farewell=_Farewell.CLOSE,
        )

    def _finish_if_done(self, iwarp: IwarpStream, link: TcpLink) -> None:
        """Disconnecting: FIN once everything posted is done and everything owed to the peer has left."""
        if self._state is not _State.DISCONNECTING or link.send_finished:
            return
        if self._outstanding or link.unsent_bytes or self._more_to_build or iwarp.wants_to_send():
            return
        try:
            link.finish_sending()
        except OSError as error:
            self._lose(error)
            return
        self._watch_disconnect()

    def _watch_disconnect(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._moved_bytes_seen = self._connection().moved_bytes
        self._timer = self._loop.start_timer(self._loop.options.disconnect_s, self._disconnect_timed_out)

    def _disconnect_timed_out(self) -> None:
        link = self._connection()
        if not link.send_finished and link.moved_bytes != self._moved_bytes_seen:
            self._watch_disconnect()
            return
        what = "did not close its side" if link.send_finished else "did not let the posted work finish"
        self._end(
            DeadlineExceeded(f"{self._remote_address} {what} within {self._loop.options.disconnect_s} s of disconnect"),
            farewell=_Farewell.RESET,
        )

    def _end(
        self,
        reason: KbtpError | None,
        *,
        terminate: TerminateInfo | None = None,
        farewell: _Farewell = _Farewell.GOODBYE,
        event: Rejected | None = None,
    ) -> None:
        """Make placement impossible, flush, report the end, and let the connection go (profile 3)."""
        if self._has_ended():
            return
        self._state = _State.ENDED
        self._memory.close()
        if self._timer is not None:
            self._timer.cancel()
        if self._connector is not None:
            self._connector.close_now()
        for wr_id, _ in self._early_receives:
            self._report_flushed(wr_id, WcOpcode.RECV)
        iwarp, link = self._iwarp, self._link
        cause = None
        if iwarp is not None:
            cause = iwarp.sent_cause
            if link is not None and cause is not None:
                link.queue(iwarp.data_to_send(RNIC_UNSENT_MAX_BYTES))  # the Terminate, after which there is no more
            for flushed in iwarp.flush():
                self._report_flushed(flushed.wr_id, _OPCODES[flushed.kind])
        self._loop.report(event or StreamEnded(self, reason, terminate, cause))
        self._loop.closables.discard(self)
        if link is not None:
            self._loop.unwatch(link.sock)
            self._part(link, farewell)

    def _report_flushed(self, wr_id: int, opcode: WcOpcode) -> None:
        self._loop.report(WorkCompletion(self, wr_id, opcode, WcStatus.FLUSHED))

    def _part(self, link: TcpLink, farewell: _Farewell) -> None:
        if farewell is _Farewell.GOODBYE:
            Goodbye(self._loop, link)
        elif farewell is _Farewell.RESET:
            link.reset()
        else:
            link.close()
