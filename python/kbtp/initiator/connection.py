"""Drives one initiator session over a channel of its own. Decides nothing about the protocol.

Without a thread: whoever waits calls `pump`. The synchronous and the asyncio client are both thin covers of this.
"""

from __future__ import annotations

import logging
import secrets
from collections.abc import Callable
from dataclasses import replace

from kbtp import limits
from kbtp.address import Address
from kbtp.errors import (
    ConnectionLost,
    DeadlineExceeded,
    KbtpError,
    OperationRefused,
    PeerIncompatible,
    PeerMisbehaved,
    WireFormatError,
)
from kbtp.initiator.batches import Batch, Results
from kbtp.initiator.rnic_carrier import Record, RnicCarrier, prepared
from kbtp.initiator.session import InitiatorConfig, InitiatorSession, SaidHello, accepted
from kbtp.initiator.session_carrier import SessionCarrier
from kbtp.types import BlockRef, Feature, Generation, Handle, Opcode, RequestFlag, TerminateCause
from kbtp.verbs.api import (
    Access,
    BatchDone,
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
from kbtp.verbs.buffers import buffer_of
from kbtp.verbs.requester import CarryingStream, RecordStatus
from kbtp.wire import ConnectionData, HelloAck, Nonces

_NO_ANSWER = int(min(RecordStatus))  # and beyond
log = logging.getLogger("kbtp.initiator")


class Connection:
    """One target, one stream at a time, one session. Owned by one thread or event loop."""

    def __init__(
        self,
        address: Address,
        config: InitiatorConfig,
        rnic: Rnic,
        *,
        now_s: float,
        timeout_s: float,
        limit_s: float | None = None,
    ) -> None:
        """Starts to connect; `opened` or `error` tells how it went, within `timeout_s`: this address's share of the
        caller's `limit_s`."""
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
        self._limit_s = timeout_s if limit_s is None else limit_s
        self._connect_deadline_s = now_s + timeout_s
        self._attempt_deadline_s = 0.0
        self._attempts = 0
        self._unsent_hello: bytes | None = None
        self._hello_at_s: float | None = None
        self._nonce = b""
        self._said: SaidHello | None = None
        self._carrier: SessionCarrier | RnicCarrier | None = None
        self._regions: list[MemoryRegion] = []
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
            attempt_due_s = self._attempt_deadline_s
            if self._unsent_hello is not None and self._hello_at_s is not None:
                attempt_due_s = min(attempt_due_s, self._hello_at_s)
            until_attempt_s = max(0.0, attempt_due_s - now_s)
            timeout_s = until_attempt_s if timeout_s is None else min(timeout_s, until_attempt_s)
        due_s = self._carrier.due_s() if isinstance(self._carrier, SessionCarrier) else None
        if due_s is not None:
            until_due_s = max(0.0, due_s - now_s)
            timeout_s = until_due_s if timeout_s is None else min(timeout_s, until_due_s)
        return timeout_s

    def wait_s(self, left_s: float, now_s: float) -> float:
        """The least of what is left and what the connection's own timers allow."""
        own_s = self.next_timeout_s(now_s)
        return max(0.0, min(left_s, limits.MAX_WAIT_S if own_s is None else own_s))

    # --- connecting ----------------------------------------------------------------------------

    def _attempt(self, now_s: float) -> None:
        """Connect anew. HELLO goes out once the stream is there; no HELLO_ACK in time leads here again (profile 3)."""
        left_s = self._connect_deadline_s - now_s
        self._attempt_deadline_s = now_s + min(left_s, limits.HELLO_ACK_TIMEOUT_S)
        if self._stream is not None:
            stream, self._stream = self._stream, None
            stream.abort()
        self._attempts += 1
        self._unsent_hello, self._hello_at_s = None, None
        self._nonce = secrets.token_bytes(limits.CONNECTION_NONCE_BYTES)
        self._stream = self._channel.connect(
            self.address.host,
            self.address.port,
            pd=self._pd,
            private_data=ConnectionData(self._nonce).pack(),
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
            target_nonce = ConnectionData.parse(event.private_data).nonce
        except WireFormatError as error:
            self.end(PeerIncompatible(f"{self.address} speaks iWARP but is not a KBTP target ({error})"))
            return
        features = self.config.features(self._rnic.capabilities, event.stream.ord_)
        self._said = SaidHello.on(self.config, Nonces(self._nonce, target_nonce), features)
        self._unsent_hello = self._said.octets

    def _send_hello(self, now_s: float) -> None:
        """A while after the Reply, for one right behind it can be overlooked; longer on further attempts."""
        if self._unsent_hello is None or self._stream is None:
            return
        if self._hello_at_s is None:
            self._hello_at_s = now_s + hello_delay_s(self._attempts)
        if now_s < self._hello_at_s:
            return
        octets, self._unsent_hello = self._unsent_hello, None
        try:
            self._stream.post([Send(0, inline=octets)])
        except ConnectionLost:
            return  # its StreamEnded says why

    # --- driving -------------------------------------------------------------------------------

    def pump(self, timeout_s: float, now: Callable[[], float]) -> None:
        """Move everything on that can be; wait up to `timeout_s` for the first thing. Never raises for the peer."""
        if self.error is not None:
            return
        self._reap(timeout_s)
        now_s = now()
        self._advance(now_s)
        self._send_hello(now_s)
        if self.session is None and self.error is None and now_s >= self._attempt_deadline_s:
            if now_s >= self._connect_deadline_s:
                self._connect_timed_out()
            else:
                log.info("%s: no HELLO_ACK within %g s, trying again", self.address, limits.HELLO_ACK_TIMEOUT_S)
                self._attempt(now_s)

    def _advance(self, now_s: float) -> None:
        if not isinstance(self._carrier, SessionCarrier) or self.error is not None:
            return
        try:
            self._carrier.advance(now_s)
        except PeerMisbehaved as error:
            self._terminate(error)

    def _reap(self, timeout_s: float) -> None:
        if self.error is not None:
            return
        for event in self._channel.poll(timeout_s):
            if self.error is None:
                self._handle(event)

    def _handle(self, event: Event) -> None:
        if isinstance(event, BatchDone):
            if isinstance(self._carrier, RnicCarrier):
                self._carrier.done(event.batch)
        elif isinstance(event, WorkCompletion):
            if event.stream is self._stream and event.status is WcStatus.SUCCESS:
                self._completed(event)
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
        elif isinstance(reason, PeerMisbehaved):
            self._misbehaved(reason)
        elif event.terminate is not None:
            self.end(ConnectionLost(f"{self.address} ended the stream: {event.terminate}", event.terminate))
        elif reason is not None:
            self.end(reason)
        else:
            self.end(ConnectionLost(f"{self.address} closed the connection"))

    def _connect_timed_out(self) -> None:
        self.end(DeadlineExceeded(f"{self.address} did not answer within {self._limit_s:g} s; is a KBTP target there?"))

    def _completed(self, completion: WorkCompletion) -> None:
        if completion.opcode in (WcOpcode.RECV, WcOpcode.RECV_IMMEDIATE):
            self._received(completion)
        elif isinstance(self._carrier, SessionCarrier):
            self._carrier.completed(completion)

    def _received(self, completion: WorkCompletion) -> None:
        slot, size = completion.wr_id, self.config.max_message_bytes
        message = self._receives.view[slot * size : slot * size + completion.length]
        stream = self._stream
        assert stream is not None
        ack: HelloAck | None = None
        try:
            if self._carrier is None:
                assert self._said is not None  # nothing is received before `Established`
                ack = accepted(self.config, self._said, message)
            elif isinstance(self._carrier, SessionCarrier) and completion.opcode is WcOpcode.RECV_IMMEDIATE:
                self._carrier.recorded(int.from_bytes(completion.immediate[-4:], "big"))
            elif isinstance(self._carrier, SessionCarrier):
                self._carrier.received(message)
            else:  # it came before the RNIC took over, when no request was out
                raise PeerMisbehaved(TerminateCause.RDMAP_UNSPECIFIED, "a message came that answers nothing")
        except PeerMisbehaved as error:
            self._terminate(error)
            return
        except OperationRefused as error:
            self.end(error)
            return
        try:
            stream.post_recv([self._receive(slot)])  # profile 3 "Credits": before a request may use it
            if ack is not None:
                self._open(stream, ack)
        except ConnectionLost:
            return  # its StreamEnded says why

    def _open(self, stream: Stream, ack: HelloAck) -> None:
        if not self._rnic.capabilities.invalidated_by_peers:
            ack = replace(ack, granted_features=ack.granted_features & ~Feature.INVALIDATE)
        session = InitiatorSession(self.config, ack)
        if isinstance(stream, CarryingStream) and not session.is_direct and not session.records:
            requester = stream.carry(session.grant(self._receives), prepared)
            self._carrier = RnicCarrier(requester, ack.handle_count, self._why_lost)
        else:
            self._carrier = SessionCarrier(session, stream, self._rnic, self._pd)
        self.session = session

    def _terminate(self, error: PeerMisbehaved) -> None:
        if self._stream is not None:
            self._stream.terminate(error.cause)
        self._misbehaved(error)

    def _misbehaved(self, error: PeerMisbehaved) -> None:
        log.warning("%s: %s", self.address, error)
        self.end(error)

    def _why_lost(self) -> ConnectionLost:
        """The RNIC has found the stream's end, and its event waits to be polled."""
        self._reap(0)
        return self._lost()

    def end(self, error: KbtpError) -> None:
        """End the session: nothing of the target's is placed any more, then everything outstanding fails."""
        if self.error is not None:
            return
        self.error = error
        if self.before_close is not None:
            self.before_close()
        self._channel.close()
        for region in self._regions:
            region.revoke()
        self._receives.revoke()
        if self._carrier is not None:
            self._carrier.fail(self._lost())

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

    def submit(self, batch: Batch, now_s: float) -> None:
        """Queue a batch, which gets its `results` in a later `pump`, at once if the session has ended."""
        if self._carrier is None or self.error is not None:
            batch.fail(self._lost())
        else:
            self._carrier.submit(batch, now_s)

    def run(self, batch: Batch, limit_s: float, now: Callable[[], float]) -> Results:
        """Submit a batch and wait for it; a session that does not end it within `limit_s` is ended itself."""
        if isinstance(self._carrier, RnicCarrier) and self.error is None:
            if not self._carrier.run(batch, limit_s):
                self.end(deadline_exceeded(self.address, limit_s))
        else:
            self.submit(batch, now())
            if batch.meanwhile is not None:
                batch.meanwhile()
            deadline_s = now() + limit_s
            while batch.results is None:
                left_s = deadline_s - now()
                if left_s <= 0:
                    self.end(deadline_exceeded(self.address, limit_s))
                else:
                    self.pump(self.wait_s(left_s, now()), now)
        assert batch.results is not None
        return batch.results

    def run_one(
        self,
        opcode: Opcode,
        flags: RequestFlag,
        generation: Generation,
        block: BlockRef | Handle | None,
        buffer: object,
        limit_s: float,
        now: Callable[[], float],
        *,
        direct: bool = False,
    ) -> tuple[Record, KbtpError | None]:
        """As `run` for one request: its record, and why there is no answer if there is none."""
        carrier = self._carrier
        if isinstance(carrier, RnicCarrier) and self.error is None:
            ran = carrier.run_one(opcode, flags, generation, block, buffer, limit_s)
            if isinstance(ran, int):
                self.end(deadline_exceeded(self.address, limit_s))
                return (RecordStatus.LOST, 0, 0, 0, 0), self._lost()
            record, why = ran
            return record, None if record[0] < _NO_ANSWER else carrier.error(record[0], why)
        buffers = None if opcode is Opcode.FREE else (buffer,)
        result = self.run(Batch(opcode, flags, (block,), buffers, generation, direct), limit_s, now)[0]
        status = RecordStatus.LOST if result.status is None else result.status
        return (status, result.generation, result.length_bytes, result.handle, result.block_offset), result.error

    def register(self, buffer: object) -> MemoryRegion:
        """Register `buffer` until the session ends; its slices are then used in place. Raises `ApiMisuse`."""
        if self._carrier is None or self.error is not None:
            raise self._lost()
        octets = buffer_of(buffer)
        access = Access.REMOTE_READ | (Access.REMOTE_WRITE if octets.writable else Access.NONE)
        region = self._rnic.register(buffer, access, pd=self._pd, stream=self._stream)
        self._regions = [one for one in self._regions if one.valid]
        self._regions.append(region)
        self._carrier.add_region(region, octets)
        return region


def hello_delay_s(attempt: int) -> float:
    """From the Reply to HELLO on the `attempt`th connection, counted from 1."""
    if attempt == 1:
        return limits.HELLO_DELAY_S
    return min(limits.HELLO_DELAY_AGAIN_S * 4.0 ** (attempt - 2), limits.HELLO_DELAY_MAX_S)


def deadline_exceeded(address: Address, limit_s: float) -> DeadlineExceeded:
    return DeadlineExceeded(
        f"{address} did not answer within {limit_s:g} s; the session was ended so that no buffer "
        "is touched later. Connect anew, with a longer timeout_s if the target is only slow"
    )
