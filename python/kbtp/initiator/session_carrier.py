"""Carries batches over an RNIC that knows only streams: each request is a Send, each completion a receive.

`InitiatorSession` decides; this registers memory, posts and frees what was held.
"""

from __future__ import annotations

from bisect import bisect_right, insort
from collections.abc import Sequence
from dataclasses import dataclass, field

from kbtp.errors import ApiMisuse, ConnectionLost
from kbtp.initiator.batches import Batch, Results
from kbtp.initiator.destinations import Destinations, refuse_overlaps
from kbtp.initiator.operations import Operation
from kbtp.initiator.session import InitiatorSession
from kbtp.types import Opcode
from kbtp.verbs.api import Access, MemoryRegion, ProtectionDomain, Rnic, Send, Stream
from kbtp.verbs.buffers import RegisteredBuffer, buffer_of


@dataclass(frozen=True, slots=True, order=True)
class _Registered:
    """A buffer the caller registered: its addresses from `start` up to `end`."""

    start: int
    end: int
    region: MemoryRegion = field(compare=False)


class SessionCarrier:
    """The requests of one session on one stream."""

    def __init__(self, session: InitiatorSession, stream: Stream, rnic: Rnic, pd: ProtectionDomain) -> None:
        self._session = session
        self._stream = stream
        self._rnic = rnic
        self._pd = pd
        self._temporary: dict[Operation, MemoryRegion] = {}
        self._registered: list[_Registered] = []
        self._destinations = Destinations()

    def submit(self, batch: Batch) -> None:
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
            self._session.submit(operation)
        if not waiting:
            batch.finish(_results(operations))
        self.send_ready()

    def received(self, message: memoryview) -> None:
        """Take a message of the target's. Raises `PeerMisbehaved`."""
        self._release(self._session.received(message))

    def send_ready(self) -> None:
        """Post what the credits allow, as one batch."""
        sends: list[Send] = []
        while (operation := self._session.ready()) is not None:
            self._release(operation)  # what an earlier try with another handle held
            try:
                message = self._encode(operation)
            except ApiMisuse as error:
                self._release(operation)
                self._session.withdraw(operation, error)
                continue
            sends.append(Send(0, inline=message))
        if sends:
            try:
                self._stream.post(sends)
            except ConnectionLost:
                return  # its StreamEnded says why, and fails what was just given out

    def _encode(self, operation: Operation) -> bytes:
        request = self._session.request
        if operation.opcode is Opcode.FREE:
            return request(operation, stag=0, to=0, length=0, inline=None)
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
            self._destinations.claim(operation, buffer.address, buffer.address + size)
        region, to, temporary = self._region_for(operation, buffer, access)
        return request(operation, stag=region.stag, to=to, length=size, inline=None, invalidate=temporary)

    def add_region(self, region: MemoryRegion, octets: RegisteredBuffer) -> None:
        """Slices of `octets` are used in place, through `region`."""
        # A revoked one must not stand between an address and the region that is registered there now.
        self._registered = [one for one in self._registered if one.region.valid]
        insort(self._registered, _Registered(octets.address, octets.address + len(octets.view), region))

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

    def fail(self, error: ConnectionLost) -> None:
        """The stream has ended: everything outstanding ends with `error`."""
        for region in self._temporary.values():
            region.revoke()
        self._temporary.clear()
        self._session.fail(error)


def _results(operations: Sequence[Operation]) -> Results:
    return Results.of([operation.result for operation in operations if operation.result is not None])
