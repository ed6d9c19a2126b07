"""Where a target writes completion records (draft 6.5): a slot for each request that is outstanding on one stream."""

from __future__ import annotations

from kbtp.initiator.operations import Operation
from kbtp.limits import COMPLETION_RECORD_BYTES
from kbtp.verbs.api import Access, ProtectionDomain, Rnic, Stream
from kbtp.wire import CompletionDescriptor


class RecordSlots:
    """As many as there are Request Credits, so that one is free whenever a request may leave."""

    def __init__(self, count: int, stream: Stream, rnic: Rnic, pd: ProtectionDomain) -> None:
        self._memory = bytearray(count * COMPLETION_RECORD_BYTES)
        self._region = rnic.register(self._memory, Access.REMOTE_WRITE, pd=pd, stream=stream)
        self._free = list(range(count))
        self._taken: dict[Operation, int] = {}

    def take(self, operation: Operation) -> CompletionDescriptor:
        """The slot of `operation`, until `release`."""
        slot = self._taken[operation] = self._taken[operation] if operation in self._taken else self._free.pop()
        return CompletionDescriptor(self._region.stag, self._region.base_to + slot * COMPLETION_RECORD_BYTES)

    def read(self, operation: Operation) -> bytes:
        """What is in its slot: the target's once the receive that says so is complete."""
        at = self._taken[operation] * COMPLETION_RECORD_BYTES
        return bytes(self._memory[at : at + COMPLETION_RECORD_BYTES])

    def release(self, operation: Operation) -> None:
        """Idempotent."""
        slot = self._taken.pop(operation, None)
        if slot is not None:
            self._free.append(slot)

    def revoke(self) -> None:
        """The stream has ended."""
        self._region.revoke()
