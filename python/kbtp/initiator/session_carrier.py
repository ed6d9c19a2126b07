"""Carries batches over an RNIC that knows only streams: each request is a Send, each completion a receive.

`InitiatorSession` decides; this registers memory, posts and frees what was held. Operations in a direct mode are begun
by `DirectCarrier` and come back as requests: BIND, or what the direct mode cannot do.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from kbtp.errors import ApiMisuse, ConnectionLost, KbtpError, PeerMisbehaved, TicketAbandoned
from kbtp.initiator.batches import Batch, Results
from kbtp.initiator.destinations import refuse_overlaps
from kbtp.initiator.direct_carrier import DirectCarrier
from kbtp.initiator.lent_memory import LentMemory
from kbtp.initiator.operations import Operation
from kbtp.initiator.records import RecordSlots
from kbtp.initiator.session import InitiatorSession
from kbtp.types import Opcode, TerminateCause
from kbtp.verbs.api import Access, MemoryRegion, ProtectionDomain, Rnic, Send, Stream, WorkCompletion, WorkRequest
from kbtp.verbs.buffers import RegisteredBuffer, buffer_of


class SessionCarrier:
    """The requests of one session on one stream."""

    def __init__(self, session: InitiatorSession, stream: Stream, rnic: Rnic, pd: ProtectionDomain) -> None:
        self._session = session
        self._stream = stream
        self._memory = LentMemory(stream, rnic, pd)
        self._records = RecordSlots(session.ack.request_credits, stream, rnic, pd) if session.records else None
        self._direct = DirectCarrier(session, stream, self._memory, rnic, pd) if session.is_direct else None

    def submit(self, batch: Batch, now_s: float) -> None:
        """Queue a batch, which gets its `results` when all of it has ended."""
        operations = batch.operations()
        refuse_overlaps(operations)
        waiting = [operation for operation in operations if operation.result is None]
        left = len(waiting)

        def one_done(_operation: Operation) -> None:
            nonlocal left
            left -= 1
            if not left:
                batch.finish(_results(operations))

        for operation in waiting:
            operation.when_done = one_done
            if self._direct is not None and operation.direct:
                self._direct.submit(operation)
            else:
                self._session.submit(operation)
        if not waiting:
            batch.finish(_results(operations))
        self._post(now_s)

    def received(self, message: memoryview) -> None:
        """Take a message of the target's. Raises `PeerMisbehaved`."""
        self._release(self._session.received(message))

    def recorded(self, immediate: int) -> None:
        """Take a completion record of the target's. Raises `PeerMisbehaved`."""
        operation = self._session.outstanding_with(immediate)
        if self._records is None:
            raise PeerMisbehaved(TerminateCause.RDMAP_UNSPECIFIED, "a completion record came that was not asked for")
        octets = self._records.read(operation)
        self._records.release(operation)
        self._release(self._session.recorded(operation, octets))

    def _release(self, operation: Operation | None) -> None:
        if operation is not None:
            self._memory.release(operation)
            if self._records is not None:
                self._records.release(operation)

    def completed(self, completion: WorkCompletion) -> None:
        """Take what became of a post, to go on with in `advance`."""
        if self._direct is not None:
            self._direct.note(completion)

    def due_s(self) -> float | None:
        """When `advance` has something to do though nothing comes."""
        return None if self._direct is None else self._direct.due_s()

    def advance(self, now_s: float) -> None:
        """Go on with all that can. Raises `PeerMisbehaved`."""
        if self._direct is not None:
            self._direct.advance(now_s)
        self._post(now_s)

    def _post(self, now_s: float) -> None:
        if self._direct is not None:
            self._direct.post_reads(now_s)
        self._send_ready(now_s)

    def _send_ready(self, now_s: float) -> None:
        """Post what the credits allow, as one batch."""
        while ready := self._ready_posts(now_s):
            try:
                self._stream.post([post for _, posts in ready for post in posts])
            except ApiMisuse:
                self._post_one_by_one(ready)
            except ConnectionLost:
                return  # its StreamEnded says why, and fails what was just given out

    def _ready_posts(self, now_s: float) -> list[tuple[Operation, list[WorkRequest]]]:
        """What goes out for each operation."""
        ready: list[tuple[Operation, list[WorkRequest]]] = []
        while (operation := self._session.ready()) is not None:
            self._memory.release(operation)  # what an earlier try with another handle held
            posts: list[WorkRequest] = []
            try:
                if operation.opcode is Opcode.BIND and self._direct is not None:
                    posts += self._direct.data_of(operation, now_s)
                posts.append(Send(0, inline=self._encode(operation)))
            except (ApiMisuse, TicketAbandoned) as error:
                self._withdraw(operation, error)
                continue
            ready.append((operation, posts))
        return ready

    def _post_one_by_one(self, ready: list[tuple[Operation, list[WorkRequest]]]) -> None:
        """What another thread of the caller's has revoked meanwhile is misuse of its own operation alone."""
        for operation, posts in ready:
            try:
                self._stream.post(posts)
            except ApiMisuse as error:
                self._withdraw(operation, error)
            except ConnectionLost:
                return  # as in `_send_ready`, whose next post finds it too

    def _withdraw(self, operation: Operation, error: KbtpError) -> None:
        self._release(operation)
        self._session.withdraw(operation, error)

    def _encode(self, operation: Operation) -> bytes:
        record = None if self._records is None else self._records.take(operation)
        request = partial(self._session.request, record=record)
        if operation.opcode in (Opcode.FREE, Opcode.BIND):
            return request(operation, stag=0, to=0, length=operation.length_bytes, inline=None)
        if operation.is_empty:
            # Nothing to name: an empty inline payload, or a descriptor that no octet can go through (profile 8.7).
            inline = None if operation.opcode is Opcode.LOAD else b""
            return request(operation, stag=0, to=0, length=0, inline=inline)
        buffer = buffer_of(operation.buffer)
        size = len(buffer.view)
        if operation.opcode is not Opcode.LOAD and size <= self._session.inline_max_bytes:
            return request(operation, stag=0, to=0, length=size, inline=bytes(buffer.view))
        access = Access.REMOTE_READ
        if operation.opcode is Opcode.LOAD:
            access = Access.REMOTE_WRITE
            self._memory.claim(operation, buffer)
        lent = self._memory.lend(operation, buffer, access)
        return request(
            operation, stag=lent.region.stag, to=lent.to, length=size, inline=None, invalidate=lent.temporary
        )

    def add_region(self, region: MemoryRegion, octets: RegisteredBuffer) -> None:
        """Slices of `octets` are used in place, through `region`."""
        self._memory.add_region(region, octets)

    def fail(self, error: ConnectionLost) -> None:
        """The stream has ended: everything outstanding ends with `error`."""
        self._memory.revoke()
        if self._records is not None:
            self._records.revoke()
        if self._direct is not None:
            self._direct.fail(error)
        self._session.fail(error)


def _results(operations: Sequence[Operation]) -> Results:
    return Results.of([operation.result for operation in operations if operation.result is not None])
