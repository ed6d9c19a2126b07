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
from kbtp.iwarp.events import Failed, TerminateReceived
from kbtp.iwarp.mpa import Negotiated
from kbtp.rnic.reference.completions import OF_RECEIVES, OPCODES, completion_of
from kbtp.rnic.reference.goodbye import Goodbye
from kbtp.rnic.reference.loop import Closable, Loop, Timer
from kbtp.rnic.reference.operation import Operation
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
        self._connector: Closable | None = None
        self._operation: Operation | None = None
        self._early_receives: list[tuple[int, memoryview]] = []
        self._outstanding = 0  # posted and not completed, receives apart
        self._timer: Timer | None = None
        self._moved_bytes_seen = 0
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
        operation = self._operation
        if operation is None:
            raise ApiMisuse("the stream is still connecting: post after Established")
        posts = [prepare(request, self._memory, self._ord) for request in requests]
        for post in posts:
            post(operation.iwarp)
        self._outstanding += len(posts)
        operation.send()

    def post_recv(self, receives: Sequence[Recv]) -> None:
        self._check_not_ended()
        buffers = [(receive.wr_id, receive_buffer(receive, self._memory)) for receive in receives]
        if self._operation is None:
            self._early_receives += buffers
            return
        for wr_id, buffer in buffers:
            self._operation.iwarp.post_receive(wr_id, buffer)

    def terminate(self, cause: TerminateCause) -> None:
        if self._has_ended():
            return
        if self._operation is None:
            self._end(ConnectionLost(f"this side gave up connecting to {self._remote_address}: {cause}"))
            return
        self._operation.iwarp.terminate(cause)
        self._end(ConnectionLost(f"this side ended the stream to {self._remote_address}: {cause}"))

    def disconnect(self) -> None:
        if self._has_ended() or self._state is _State.DISCONNECTING:
            return
        if self._operation is None:
            self._end(ConnectionLost(f"this side gave up connecting to {self._remote_address}"))
            return
        self._state = _State.DISCONNECTING
        self._watch_disconnect(self._operation)
        self._operation.send()

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
        self._connector = None
        self._ird, self._ord = negotiated.ird, negotiated.ord_
        operation = Operation(self._loop, link, self, negotiated, self._memory, active=active)
        self._operation = operation
        self._state = _State.OPEN
        if negotiated.failure is not None:
            self._end(
                PeerIncompatible(f"{self._remote_address} cannot serve what this side needs: {negotiated.failure}")
            )
            return
        early, self._early_receives = self._early_receives, []
        for wr_id, buffer in early:
            operation.iwarp.post_receive(wr_id, buffer)
        if active:
            self._loop.report(Established(self, negotiated.private_data))
        if surplus:
            operation.receive_octets(memoryview(surplus))
        operation.send()

    def rejected(self, link: TcpLink, private_data: bytes) -> None:
        """The peer's Reply had R=1. Receives complete as FLUSHED first; MPA is left (RFC 5044 7.1.2 rule 3)."""
        self._connector = None
        self._end(None, event=Rejected(self, private_data))
        Goodbye(self._loop, link)

    def fail_connecting(self, reason: KbtpError) -> None:
        self._end(reason)

    # --- from the operation ---

    def take_events(self, operation: Operation) -> None:
        """Report what the iWARP stream has to say, in its order. Whoever gets `StreamEnded` logs why, once."""
        while not self._has_ended() and (event := operation.iwarp.next_event()) is not None:
            match event:
                case TerminateReceived(info):
                    _log.debug("%s ended the stream with Terminate %s", self._remote_address, info)
                    operation.link.drop_unsent()
                    self._end(ConnectionLost(f"{self._remote_address} ended the stream: {info}", info), terminate=info)
                case Failed(error):
                    _log.debug("%s broke the protocol: %s; its stream ends", self._remote_address, error)
                    self._end(error)
                case _:
                    completion = completion_of(self, event)
                    self._outstanding -= completion.opcode not in OF_RECEIVES
                    self._loop.report(completion)

    def take_eof(self, operation: Operation, *, whole: bool) -> None:
        reason: KbtpError | None = None
        if not whole:
            reason = ConnectionLost(f"{self._remote_address} closed the connection in the middle of a message")
        elif self._outstanding:
            reason = ConnectionLost(
                f"{self._remote_address} closed the connection with {self._outstanding} work requests outstanding"
            )
        self._end(reason)

    def take_loss(self, error: OSError) -> None:
        self._end(
            ConnectionLost(f"the connection to {self._remote_address} was lost: {error_text(error)}"),
            farewell=_Farewell.CLOSE,
        )

    def take_silence(self, operation: Operation) -> None:
        """Disconnecting: everything owed to the peer has left; FIN once everything posted is done too."""
        link = operation.link
        if self._state is not _State.DISCONNECTING or link.send_finished or self._outstanding:
            return
        try:
            link.finish_sending()
        except OSError as error:
            self.take_loss(error)
            return
        self._watch_disconnect(operation)

    # --- within ---

    def _has_ended(self) -> bool:
        return self._state is _State.ENDED

    def _check_not_ended(self) -> None:
        if self._has_ended():
            raise ConnectionLost(f"the stream to {self._remote_address} has ended")

    def _watch_disconnect(self, operation: Operation) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._moved_bytes_seen = operation.link.moved_bytes
        self._timer = self._loop.start_timer(
            self._loop.options.disconnect_s, lambda: self._disconnect_timed_out(operation)
        )

    def _disconnect_timed_out(self, operation: Operation) -> None:
        link = operation.link
        if not link.send_finished and link.moved_bytes != self._moved_bytes_seen:
            self._watch_disconnect(operation)
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
        operation, cause = self._operation, None
        if operation is not None:
            cause = operation.stop()
            for flushed in operation.iwarp.flush():
                self._report_flushed(flushed.wr_id, OPCODES[flushed.kind])
        self._loop.report(event or StreamEnded(self, reason, terminate, cause))
        self._loop.closables.discard(self)
        if operation is not None:
            self._part(operation.link, farewell)

    def _report_flushed(self, wr_id: int, opcode: WcOpcode) -> None:
        self._loop.report(WorkCompletion(self, wr_id, opcode, WcStatus.FLUSHED))

    def _part(self, link: TcpLink, farewell: _Farewell) -> None:
        if farewell is _Farewell.GOODBYE:
            Goodbye(self._loop, link)
        elif farewell is _Farewell.RESET:
            link.reset()
        else:
            link.close()
