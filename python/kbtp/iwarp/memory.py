"""What a stream asks of registered memory; `verbs` answers it with its STag table."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from kbtp.types import Stag


class StreamMemory(Protocol):
    """The registered memory that one stream may reach.

    Every refusal is `PeerMisbehaved` with the Terminate cause to send. Each call checks anew: a region that was
    revoked between two segments of one message is refused from the next segment on (RFC 5041 8.3).
    """

    def place(self, stag: Stag, to: int, length: int) -> memoryview:
        """Exactly `length` (> 0) writable octets for a segment of an RDMA Write.

        Raises PeerMisbehaved with DDP_INVALID_STAG, DDP_BASE_OR_BOUNDS, DDP_STAG_NOT_ASSOCIATED or DDP_TO_WRAP
        (RFC 5041 7).
        """
        ...

    def read_source(self, stag: Stag, to: int, length: int) -> memoryview:
        """Exactly `length` (> 0) readable octets: what is left to send of a Read Response.

        Raises PeerMisbehaved with one of the RDMAP remote protection causes 00 to 04 (RFC 5040 4.8).
        """
        ...

    def atomic(self, stag: Stag, to: int, operate: Callable[[int], int]) -> int:
        """Store `operate(old)` over the native 64-bit value at `to` and return `old` (RFC 7306 5).

        No other atomic of this RNIC may come between the load and the store. Raises PeerMisbehaved with
        one of the RDMAP remote protection causes 00 to 04, or RDMAP_CATASTROPHIC_STREAM for an address that is not
        8-aligned (RFC 7306 8.1); memory is then as it was.
        """
        ...

    def invalidate(self, stag: Stag) -> None:
        """Make `stag` unusable for the peer, as a Send with Invalidate asks.

        Raises PeerMisbehaved with RDMAP_CANNOT_INVALIDATE (RFC 5040 7.2, 8.1.1 item 7).
        """
        ...

    def lend_sink_stag(self) -> Stag:
        """An unpredictable STag, in no table, that names the sink of one Read Request."""
        ...

    def return_sink_stag(self, stag: Stag) -> None:
        """`stag` from `lend_sink_stag` names nothing any more."""
        ...
