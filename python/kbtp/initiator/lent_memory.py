"""The callers' memory that operations of one session use: registered by the caller, or for one operation alone."""

from __future__ import annotations

from bisect import bisect_right, insort
from dataclasses import dataclass, field

from kbtp.initiator.destinations import Destinations
from kbtp.initiator.operations import Operation
from kbtp.verbs.api import Access, MemoryRegion, ProtectionDomain, Rnic, Stream
from kbtp.verbs.buffers import RegisteredBuffer


@dataclass(frozen=True, slots=True, order=True)
class _Registered:
    """A buffer the caller registered: its addresses from `start` up to `end`."""

    start: int
    end: int
    region: MemoryRegion = field(compare=False)


@dataclass(frozen=True, slots=True)
class Lent:
    """Memory of a caller's: `offset` octets into `region`, which is for one operation alone if `temporary`."""

    region: MemoryRegion
    offset: int
    temporary: bool

    @property
    def to(self) -> int:
        """Its tagged offset."""
        return self.region.base_to + self.offset


class LentMemory:
    """What is lent to the operations of one session on one stream."""

    def __init__(self, stream: Stream, rnic: Rnic, pd: ProtectionDomain) -> None:
        self._stream = stream
        self._rnic = rnic
        self._pd = pd
        self._temporary: dict[Operation, MemoryRegion] = {}
        self._registered: list[_Registered] = []
        self._destinations = Destinations()

    def add_region(self, region: MemoryRegion, octets: RegisteredBuffer) -> None:
        """Slices of `octets` are used in place, through `region`."""
        # A revoked one must not stand between an address and the region that is registered there now.
        self._registered = [one for one in self._registered if one.region.valid]
        insort(self._registered, _Registered(octets.address, octets.address + len(octets.view), region))

    def lend(self, operation: Operation, buffer: RegisteredBuffer, access: Access, *, sink: bool = False) -> Lent:
        """`buffer` for `operation`, with at least these rights for the target, until `release`. Raises `ApiMisuse`.

        `sink`: octets are placed there without a right of the target's, so what was registered must be writable.
        """
        start, end = buffer.address, buffer.address + len(buffer.view)
        position = bisect_right(self._registered, start, key=lambda one: one.start)
        for one in self._registered[max(0, position - 1) : position]:
            fits = one.end >= end and access in one.region.access and not (sink and one.region.view.readonly)
            if fits and one.region.valid:
                return Lent(one.region, start - one.start, False)
        region = self._rnic.register(buffer.view, access, pd=self._pd, stream=self._stream)
        self._temporary[operation] = region
        return Lent(region, 0, True)

    def claim(self, operation: Operation, buffer: RegisteredBuffer) -> None:
        """`operation` places a block there, and no other one may. Raises `ApiMisuse` if another one does."""
        self._destinations.claim(operation, buffer.address, buffer.address + len(buffer.view))

    def release(self, operation: Operation) -> None:
        """`operation` uses no memory any more."""
        self._destinations.release(operation)
        region = self._temporary.pop(operation, None)
        if region is not None:
            region.revoke()

    def revoke(self) -> None:
        """The stream has ended."""
        for region in self._temporary.values():
            region.revoke()
        self._temporary.clear()
