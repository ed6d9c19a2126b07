"""STags: which octets a peer may reach, on which stream, and how (RFC 5040 8.1, RFC 5041 8.2 and 8.3, RFC 5042 6).

`StagTable` is the one place of an RNIC that grants and takes away. `StreamView` is what one stream sees of it;
its methods are those the iWARP stream asks of its memory, and each failing check names the Terminate that
says so. Checks run in this order: STag known, association, TO wrap, bounds, rights.

One lock guards the table. An RNIC also holds it (`StagTable.lock`) while octets are copied into or out
of registered memory, so that after `Region.revoke` returns, in any thread, no octet moves through the STag,
and so that atomics are atomic across all streams and channels of the RNIC (RFC 7306 5.3).
"""

from __future__ import annotations

import threading
from bisect import bisect_left, bisect_right
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

from kbtp.errors import ApiMisuse, PeerMisbehaved
from kbtp.limits import STAG_DRAWS_MAX, STAG_HISTORY
from kbtp.types import Stag, TerminateCause
from kbtp.verbs.api import Access
from kbtp.verbs.buffers import RegisteredBuffer, buffer_of

_TO_END = 1 << 64
_STAG_MASK = 0xFFFF_FFFF
_ATOMIC_BYTES = 8

# What lets a peer change octets; RFC 5042 6.3.6 is about all of it.
_CHANGES = Access.REMOTE_WRITE | Access.REMOTE_ATOMIC


class Domain:
    """A protection domain: its identity, and how many streams are open in it."""

    __slots__ = ("_table", "stream_count")

    def __init__(self, table: StagTable) -> None:
        self._table = table
        self.stream_count = 0

    @property
    def table(self) -> StagTable:
        return self._table


class Region:
    """A memory region: `length` octets at tagged offsets `base_to` and up, named by `stag`."""

    __slots__ = ("_access", "_base_to", "_buffer", "_pd", "_scope", "_stag", "_table", "_valid")

    def __init__(
        self, table: StagTable, stag: Stag, buffer: RegisteredBuffer, access: Access, pd: Domain,
        scope: StreamView | None, base_to: int,
    ) -> None:  # fmt: skip
        self._table = table
        self._stag = stag
        self._buffer = buffer
        self._access = access
        self._pd = pd
        self._scope = scope
        self._base_to = base_to
        self._valid = True

    @property
    def stag(self) -> Stag:
        return self._stag

    @property
    def base_to(self) -> int:
        return self._base_to

    @property
    def length(self) -> int:
        return self._buffer.view.nbytes

    @property
    def access(self) -> Access:
        return self._access

    @property
    def view(self) -> memoryview:
        return self._buffer.view

    @property
    def address(self) -> int:
        """Address of the first octet in this process."""
        return self._buffer.address

    @property
    def pd(self) -> Domain:
        return self._pd

    @property
    def scope(self) -> StreamView | None:
        """The one stream that reaches the region; None: every stream of `pd`."""
        return self._scope

    @property
    def valid(self) -> bool:
        return self._valid

    def revoke(self) -> None:
        self._table.revoke(self)

    def mark_revoked(self) -> None:
        """For the table alone."""
        self._valid = False

    def reachable_from(self, view: StreamView) -> bool:
        return self._scope is view if self._scope is not None else self._pd is view.pd


class StagTable:
    """All regions of one RNIC.

    Args:
        random_u32: an unpredictable 32-bit number each call; STags must be hard to guess (RFC 5040 8.1.1 item 8).
        history: how many used STags to remember, so that none is used again while it is among them.
    """

    def __init__(self, random_u32: Callable[[], int], *, history: int = STAG_HISTORY) -> None:
        self.lock = threading.RLock()
        self._random_u32 = random_u32
        self._history = history
        self._regions: dict[Stag, Region] = {}
        self._lent: set[Stag] = set()
        self._used: OrderedDict[Stag, None] = OrderedDict()
        # Regions a peer may change, by address. They never overlap, so their ends rise with their starts.
        self._change_starts: list[int] = []
        self._change_ends: list[int] = []

    def allocate_pd(self) -> Domain:
        return Domain(self)

    def register(
        self, buffer: object, access: Access, *, pd: Domain, scope: StreamView | None = None, base_to: int = 0
    ) -> Region:
        """A new region over all octets of `buffer`; see `kbtp.verbs.api.Rnic.register`.

        Raises:
            ApiMisuse: as `buffer_of`; a write or atomic right on read-only memory, or on octets that another valid
                region already lets a peer change; `base_to` and length past 2^64; a scope of another domain.
        """
        registered = buffer_of(buffer)
        length = registered.view.nbytes
        if pd.table is not self:
            raise ApiMisuse("the protection domain must be one of this RNIC")
        if scope is not None and scope.pd is not pd:
            raise ApiMisuse("the stream a region is scoped to must be in the region's protection domain")
        if not 0 <= base_to <= _TO_END - length:
            raise ApiMisuse(f"base_to must leave room for {length} octets below 2^64; got {base_to}")
        if access & _CHANGES and not registered.writable:
            raise ApiMisuse("a remote write or atomic right needs writable memory; this buffer is read-only")
        with self.lock:
            born_revoked = scope is not None and scope.closed
            if access & _CHANGES and not born_revoked:
                self._grant_change(registered.address, registered.address + length)
            region = Region(self, self._draw_stag(), registered, access, pd, scope, base_to)
            if born_revoked:
                region.mark_revoked()
                self._remember(region.stag)
                return region
            self._regions[region.stag] = region
            if scope is not None:
                scope.scoped.add(region)
            return region

    def revoke(self, region: Region) -> None:
        """Forget `region`; idempotent. At return no octet of it can be reached through its STag."""
        with self.lock:
            if self._regions.get(region.stag) is not region:
                return
            del self._regions[region.stag]
            region.mark_revoked()
            if region.scope is not None:
                region.scope.scoped.discard(region)
            if region.access & _CHANGES:
                position = bisect_left(self._change_starts, region.address)
                del self._change_starts[position]
                del self._change_ends[position]
            self._remember(region.stag)

    def close(self) -> None:
        """Revoke every region."""
        with self.lock:
            for region in list(self._regions.values()):
                self.revoke(region)

    def memory_for(self, stream_key: object, pd: Domain) -> StreamView:
        """What the stream `stream_key` of `pd` sees; its `close` takes it away."""
        if pd.table is not self:
            raise ApiMisuse("the protection domain must be one of this RNIC")
        return StreamView(self, stream_key, pd)

    def region(self, stag: Stag) -> Region | None:
        """The valid region named `stag`."""
        return self._regions.get(stag)

    def lend_stag(self) -> Stag:
        """An STag that names no region, as the sink of one RDMA Read Response."""
        with self.lock:
            stag = self._draw_stag()
            self._lent.add(stag)
            return stag

    def return_stag(self, stag: Stag) -> None:
        with self.lock:
            if stag in self._lent:
                self._lent.remove(stag)
                self._remember(stag)

    def _draw_stag(self) -> Stag:
        for _ in range(STAG_DRAWS_MAX):
            stag = self._random_u32() & _STAG_MASK
            if stag and stag not in self._regions and stag not in self._lent and stag not in self._used:
                return stag
        raise ApiMisuse(f"random_u32 gave no fresh STag in {STAG_DRAWS_MAX} draws: it must be a source of randomness")

    def _remember(self, stag: Stag) -> None:
        self._used[stag] = None
        if len(self._used) > self._history:
            self._used.popitem(last=False)

    def _grant_change(self, start: int, end: int) -> None:
        position = bisect_right(self._change_starts, start)
        below = position > 0 and self._change_ends[position - 1] > start
        above = position < len(self._change_starts) and self._change_starts[position] < end
        if below or above:
            # RFC 5042 6.3.6: one buffer, one STag that lets a peer change it
            raise ApiMisuse("another valid region already lets a peer change some of these octets: revoke it first")
        self._change_starts.insert(position, start)
        self._change_ends.insert(position, end)


class StreamView:
    """One stream's view of the table. Its methods raise `PeerMisbehaved` with the Terminate for what was wrong."""

    def __init__(self, table: StagTable, stream_key: object, pd: Domain) -> None:
        self.table = table
        self.stream_key = stream_key
        self.pd = pd
        self.closed = False
        self.scoped: set[Region] = set()
        with table.lock:
            pd.stream_count += 1

    def close(self) -> None:
        """The stream has ended: revoke what was scoped to it; nothing is reached through this view any more."""
        with self.table.lock:
            if self.closed:
                return
            self.closed = True
            self.pd.stream_count -= 1
            for region in list(self.scoped):
                self.table.revoke(region)

    def place(self, stag: Stag, to: int, length: int) -> memoryview:
        """Where `length` > 0 octets of an RDMA Write segment go (RFC 5041 5.2, 7.1)."""
        with self.table.lock:
            region = self._reach(stag, to, length, _WRITE_CAUSES)
            if not region.access & Access.REMOTE_WRITE:
                # DDP has no code for a missing right; RFC 5041 7.1's "invalid STag" is the convention
                raise PeerMisbehaved(TerminateCause.DDP_INVALID_STAG, f"RDMA Write to STag {stag:#010x} not granted")
            return _slice(region, to, length)

    def read_source(self, stag: Stag, to: int, length: int) -> memoryview:
        """The `length` > 0 octets an RDMA Read asks for (RFC 5040 7.2)."""
        with self.table.lock:
            region = self._reach(stag, to, length, _READ_CAUSES)
            if not region.access & Access.REMOTE_READ:
                raise PeerMisbehaved(TerminateCause.RDMAP_ACCESS_RIGHTS, f"RDMA Read of STag {stag:#010x} not granted")
            return _slice(region, to, length)

    def atomic(self, stag: Stag, to: int, operate: Callable[[int], int]) -> int:
        """Replace the native 64-bit integer at `to` by `operate` of it; returns the old one (RFC 7306 5)."""
        with self.table.lock:
            region = self._reach(stag, to, _ATOMIC_BYTES, _READ_CAUSES)
            if not region.access & Access.REMOTE_ATOMIC:
                raise PeerMisbehaved(TerminateCause.RDMAP_ACCESS_RIGHTS, f"atomic on STag {stag:#010x} not granted")
            if (region.address + to - region.base_to) % _ATOMIC_BYTES:
                # RFC 7306 5.1: it is the buffer's address that must be aligned
                raise PeerMisbehaved(TerminateCause.RDMAP_CATASTROPHIC_STREAM, f"atomic at unaligned TO {to:#x}")
            word = _slice(region, to, _ATOMIC_BYTES).cast("Q")
            old: int = word[0]
            word[0] = operate(old)
            return old

    def invalidate(self, stag: Stag) -> None:
        """Send with Invalidate (RFC 5040 5.3).

        Refused besides an unknown or foreign STag: a region without remote rights, which no peer was ever told of,
        and one of the whole domain while that holds more than one stream, since the peer of one stream
        must not take it away from the others (RFC 5040 8.1.1 item 7).
        """
        with self.table.lock:
            region = None if self.closed else self.table.region(stag)
            if region is None:
                reason = "is unknown"
            elif not region.reachable_from(self):
                reason = "is of another stream"
            elif not region.access:
                reason = "has no remote right"
            elif region.scope is None and self.pd.stream_count > 1:
                reason = "is shared by streams"
            else:
                self.table.revoke(region)
                return
        raise PeerMisbehaved(
            TerminateCause.RDMAP_CANNOT_INVALIDATE, f"Send with Invalidate of STag {stag:#010x}, which {reason}"
        )

    def lend_sink_stag(self) -> Stag:
        """An STag in no table, for the response of one RDMA Read."""
        return self.table.lend_stag()

    def return_sink_stag(self, stag: Stag) -> None:
        self.table.return_stag(stag)

    def _reach(self, stag: Stag, to: int, length: int, causes: _Causes) -> Region:
        region = None if self.closed else self.table.region(stag)
        if region is None:
            raise PeerMisbehaved(causes.unknown, f"STag {stag:#010x} is unknown or revoked")
        if not region.reachable_from(self):
            raise PeerMisbehaved(causes.foreign, f"STag {stag:#010x} is not of this stream or its protection domain")
        if to + length > _TO_END:
            raise PeerMisbehaved(causes.wrap, f"TO {to:#x} and {length} octets pass 2^64")
        if to < region.base_to or to + length > region.base_to + region.length:
            raise PeerMisbehaved(
                causes.bounds,
                f"TO {to:#x} and {length} octets are outside STag {stag:#010x}, "
                f"which has {region.length} octets from {region.base_to:#x}",
            )
        return region


@dataclass(frozen=True, slots=True)
class _Causes:
    """The Terminates of one kind of access, one a failing check."""

    unknown: TerminateCause
    foreign: TerminateCause
    wrap: TerminateCause
    bounds: TerminateCause


# RFC 5041 7.1
_WRITE_CAUSES = _Causes(
    unknown=TerminateCause.DDP_INVALID_STAG,
    foreign=TerminateCause.DDP_STAG_NOT_ASSOCIATED,
    wrap=TerminateCause.DDP_TO_WRAP,
    bounds=TerminateCause.DDP_BASE_OR_BOUNDS,
)
# RFC 5040 7.2 item 4; RFC 7306 8.1 for atomics
_READ_CAUSES = _Causes(
    unknown=TerminateCause.RDMAP_INVALID_STAG,
    foreign=TerminateCause.RDMAP_STAG_NOT_ASSOCIATED,
    wrap=TerminateCause.RDMAP_TO_WRAP,
    bounds=TerminateCause.RDMAP_BASE_OR_BOUNDS,
)


def _slice(region: Region, to: int, length: int) -> memoryview:
    start = to - region.base_to
    return region.view[start : start + length]
