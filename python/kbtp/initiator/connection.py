"""Drives one initiator session over a channel of its own. Decides nothing about the protocol.

Without a thread: whoever waits calls `pump`. The synchronous and the asyncio client are both thin covers of this.
"""

from __future__ import annotations

import logging
import secrets
from bisect import bisect_right, insort
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from kbtp import limits
from kbtp.address import Address
from kbtp.errors import (
    ApiMisuse,
    ConnectionLost,
    DeadlineExceeded,
    KbtpError,
    OperationRefused,
    PeerIncompatible,
    PeerMisbehaved,
    WireFormatError,
)
from kbtp.initiator.destinations import Destinations, refuse_overlaps
from kbtp.initiator.operations import Operation, Result
from kbtp.initiator.session import InitiatorConfig, InitiatorSession, accepted
from kbtp.types import Opcode
from kbtp.verbs.api import (
    Access,
    Established,
    Event,
    MemoryRegion,
    Recv,
    Rejected,
    Rnic,
    Send,
    Sge,
    Stream,
    StreamEnded,
    WcOpcode,
    WcStatus,
    WorkCompletion,
)
from kbtp.verbs.buffers import RegisteredBuffer, buffer_of
from kbtp.wire import ConnectionData

log = logging.getLogger("kbtp.initiator")


@dataclass(frozen=True, slots=True, order=True)
class _Registered:
    """A buffer the caller registered: its addresses from `start` up to `end`."""

    start: int
    end: int
    region: MemoryRegion = field(compare=False)


class Connection:
    """One target, one stream at a time, one session. Owned by one thread or event loop."""

    def __init__(
        self, address: Address, config: InitiatorConfig, rnic: Rnic, *, now_s: float, timeout_s: float
    ) -> None:
        """Starts to connect; `opened` or `error` tells how it went, within `timeout_s`."""
        self.address = address
        self.config = config
        self.session: InitiatorSession | None = None
        self.error: KbtpError | None = None
        self.before_close: Callable[[], None] | None = None
        """Called once, while `fileno` is still open: whoever watches it stops."""
        self._rnic = rnic
        self._pd = rnic.allocate_pd()
        self._channel = rnic.open_channel()
        size = config.completion_credits * config.max_message_bytes
        self._receives = rnic.register(bytearray(size), Access.NONE, pd=self._pd)
        self._stream: Stream | None = None
        self._timeout_s = timeout_s
        self._connect_deadline_s = now_s + timeout_s
        self._attempt_deadline_s = 0.0
        self._temporary: dict[Operation, MemoryRegion] = {}
        self._registered: list[_Registered] = []
        self._destinations = Destinations()
        try:
            self._attempt(now_s)
        except BaseException:
            self._channel.close()
            raise

    @property
    def opened(self) -> bool:
        return self.session is not None

    def fileno(self) -> int:
        return self._channel.fileno()

    def next_timeout_s(self, now_s: float) -> float | None:
        """Seconds until `pump` is due even if `fileno` stays quiet."""
        timeout_s = self._channel.next_timeout_s()
        if self.session is None and self.error is None:
            until_attempt_s = max(0.0, self._attempt_deadline_s - now_s)
            timeout_s = until_attempt_s if timeout_s is None else min(timeout_s, until_attempt_s)
        return timeout_s

    # --- connecting ----------------------------------------------------------------------------

    def _attempt(self, now_s: float) -> None:
        """Connect anew. HELLO goes out once the stream is there; no HELLO_ACK in time leads here again (profile 3)."""
        left_s = self._connect_deadline_s - now_s
        self._attempt_deadline_s = now_s + min(left_s, limits.HELLO_ACK_TIMEOUT_S)
        if self._stream is not None:
            stream, self._stream = self._stream, None
            stream.abort()
        self._stream = self._channel.connect(
            self.address.host,
            self.address.port,
            pd=self._pd,
            private_data=ConnectionData(secrets.token_bytes(limits.CONNECTION_NONCE_BYTES)).pack(),
            ird=self.config.read_depth,
            ord_=self.config.read_depth,
            timeout_s=left_s,
            receives=[self._receive(slot) for slot in range(self.config.completion_credits)],
        )

    def _receive(self, slot: int) -> Recv:
        size = self.config.max_message_bytes
        return Recv(slot, Sge(self._receives, slot * size, size))

    def _established(self, event: Established) -> None:
        try:
            ConnectionData.parse(event.private_data)
        except WireFormatError as error:
            self.end(PeerIncompatible(f"{self.address} speaks iWARP but is not a KBTP target ({error})"))
            return
        try:
            event.stream.post([Send(0, inline=self.config.hello().pack())])
        except ConnectionLost:
            return  # its StreamEnded says why

    # --- driving -------------------------------------------------------------------------------

    def pump(self, timeout_s: float, now: Callable[[], float]) -> None:
        """Move everything on that can be; wait up to `timeout_s` for the first thing. Never raises for the peer."""
        if self.error is not None:
            return
        for event in self._channel.poll(timeout_s):
            if self.error is None:
                self._handle(event)
        now_s = now()
        if self.session is None and self.error is None and now_s >= self._attempt_deadline_s:
            if now_s >= self._connect_deadline_s:
                self._connect_timed_out()
            else:
                log.info("%s: no HELLO_ACK within %g s, trying again", self.address, limits.HELLO_ACK_TIMEOUT_S)
                self._attempt(now_s)

    def _handle(self, event: Event) -> None:
        if isinstance(event, WorkCompletion):
            if event.stream is self._stream and event.opcode is WcOpcode.RECV and event.status is WcStatus.SUCCESS:
                self._received(event)
        elif isinstance(event, Established):
            if event.stream is self._stream:
                self._established(event)
        elif isinstance(event, Rejected):
            if event.stream is self._stream:
                self.end(PeerIncompatible(f"{self.address} refused the connection: not a KBTP target, or full"))
        elif isinstance(event, StreamEnded) and event.stream is self._stream:
            self._stream_ended(event)

    def _stream_ended(self, event: StreamEnded) -> None:
        reason = event.reason
        if isinstance(reason, DeadlineExceeded) and self.session is None:
            self._connect_timed_out()
        elif isinstance(reason, ConnectionLost):
            self.end(reason)
        elif event.terminate is not None:
            self.end(ConnectionLost(f"{self.address} ended the stream: {event.terminate}", event.terminate))
        elif reason is not None:
            self.end(reason)
        else:
            self.end(ConnectionLost(f"{self.address} closed the connection"))

    def _connect_timed_out(self) -> None:
        self.end(
            DeadlineExceeded(
                f"{self.address} did not answer within {round(self._timeout_s, 2):g} s; is a KBTP target there?"
            )
        )

    def _received(self, completion: WorkCompletion) -> None:
        slot, size = completion.wr_id, self.config.max_message_bytes
        message = self._receives.view[slot * size : slot * size + completion.length]
        assert self._stream is not None
        try:
            if self.session is None:
                self.session = InitiatorSession(self.config, accepted(self.config, message))
                operation = None
            else:
                operation = self.session.received(message)
        except PeerMisbehaved as error:
            log.warning("%s: %s", self.address, error)
            self._stream.terminate(error.cause)
            self.end(error)
            return
        except OperationRefused as error:
            self.end(error)
            return
        try:
            self._stream.post_recv([self._receive(slot)])  # profile 3 "Credits": before a request may use it
        except ConnectionLost:
            return  # its StreamEnded says why
        self._release(operation)
        self.send_ready()

    def end(self, error: KbtpError) -> None:
        """End the session: nothing of the target's is placed any more, then everything outstanding fails."""
        if self.error is not None:
            return
        self.error = error
        if self.before_close is not None:
            self.before_close()
        self._channel.close()
        for region in self._temporary.values():
            region.revoke()
        self._temporary.clear()
        for one in self._registered:
            one.region.revoke()
        self._receives.revoke()
        if self.session is not None:
            self.session.fail(self._lost())

    def _lost(self) -> ConnectionLost:
        """`error` as those see it whose operations cannot be done any more."""
        if isinstance(self.error, ConnectionLost):
            return self.error
        return ConnectionLost(str(self.error or "not connected"))

    def begin_disconnect(self) -> None:
        """End in order: let what was posted leave and say goodbye. `error` is set when that is done."""
        if self.error is None and self._stream is not None:
            self._stream.disconnect()

    # --- operations ----------------------------------------------------------------------------

    def submit(self, operations: Sequence[Operation]) -> None:
        """Queue operations; each gets its `result` in a later `pump`, at once if the session has ended."""
        if self.session is None or self.error is not None:
            for operation in operations:
                operation.finish(Result(None, operation.handle or 0, error=self._lost()))
            return
        refuse_overlaps(operations)
        for operation in operations:
            if operation.result is None:
                self.session.submit(operation)
        self.send_ready()

    def send_ready(self) -> None:
        """Post what the credits allow, as one batch."""
        session, stream = self.session, self._stream
        if session is None or stream is None or self.error is not None:
            return
        sends: list[Send] = []
        while (operation := session.ready()) is not None:
            self._release(operation)  # what an earlier try with another handle held
            try:
                message = self._encode(session, operation)
            except ApiMisuse as error:
                self._release(operation)
                session.withdraw(operation, error)
                continue
            sends.append(Send(0, inline=message))
        if sends:
            try:
                stream.post(sends)
            except ConnectionLost:
                return  # its StreamEnded says why, and fails what was just given out

    def _encode(self, session: InitiatorSession, operation: Operation) -> bytes:
        if operation.opcode is Opcode.FREE:
            return session.request(operation, stag=0, to=0, length=0, inline=None)
        if operation.is_empty:
            # Nothing to name: an empty inline payload, or a descriptor that no octet can go through (profile 8.7).
            inline = None if operation.opcode is Opcode.LOAD else b""
            return session.request(operation, stag=0, to=0, length=0, inline=inline)
        buffer = buffer_of(operation.buffer)
        size = len(buffer.view)
        if operation.opcode is not Opcode.LOAD and size <= session.inline_max_bytes:
            return session.request(operation, stag=0, to=0, length=size, inline=bytes(buffer.view))
        access = Access.REMOTE_READ
        if operation.opcode is Opcode.LOAD:
            access = Access.REMOTE_WRITE
            self._destinations.claim(operation, buffer.address, buffer.address + size)
        region, to, temporary = self._region_for(operation, buffer, access)
        return session.request(operation, stag=region.stag, to=to, length=size, inline=None, invalidate=temporary)

    def register(self, buffer: object) -> MemoryRegion:
        """Register `buffer` until the session ends; its slices are then used in place. Raises `ApiMisuse`."""
        if self._stream is None or self.error is not None:
            raise self._lost()
        octets = buffer_of(buffer)
        access = Access.REMOTE_READ | (Access.REMOTE_WRITE if octets.writable else Access.NONE)
        region = self._rnic.register(buffer, access, pd=self._pd, stream=self._stream)
        # A revoked one must not stand between an address and the region that is registered there now.
        self._registered = [one for one in self._registered if one.region.valid]
        insort(self._registered, _Registered(octets.address, octets.address + len(octets.view), region))
        return region

    def _region_for(
        self, operation: Operation, buffer: RegisteredBuffer, access: Access
    ) -> tuple[MemoryRegion, int, bool]:
        """The region that lets the target at `buffer`, its tagged offset there, whether it is for `operation` alone."""
        start, end = buffer.address, buffer.address + len(buffer.view)
        position = bisect_right(self._registered, start, key=lambda one: one.start)
        for one in self._registered[max(0, position - 1) : position]:
            if one.end >= end and one.region.valid and access in one.region.access:
                return one.region, one.region.base_to + start - one.start, False
        region = self._rnic.register(buffer.view, access, pd=self._pd, stream=self._stream)
        self._temporary[operation] = region
        return region, region.base_to, True

    def _release(self, operation: Operation | None) -> None:
        if operation is None:
            return
        self._destinations.release(operation)
        region = self._temporary.pop(operation, None)
        if region is not None:
            region.revoke()
