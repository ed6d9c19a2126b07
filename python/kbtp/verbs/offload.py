"""What an RNIC offers that executes the four sequences of the draft's section 6 by itself, and what it needs for it.

`Capabilities.executes_sequences` says that an RNIC is an `OffloadingRnic`, and its streams are `OffloadedStream`s. It
owns the block structures then (`create_block_store`), so that it and the target's sessions never meet in them.

A session is opened as with any RNIC: HELLO comes out of `poll`. Before HELLO_ACK is posted, `offload` gives the RNIC
what it needs to know. From then on requests are served in the RNIC, and neither they nor the work for them comes out of
`poll`. What the RNIC does not finish it leaves untouched: that message comes out of `poll` as any other, with its
receive buffer; the session serves it and says so with `resolved`. Until then the RNIC starts nothing on that handle.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from kbtp.blocks import HandleRange
from kbtp.blocks.owner import BlockOwner
from kbtp.types import Handle, Ticket
from kbtp.verbs.api import Channel, MemoryRegion, Rnic, Stream


@dataclass(frozen=True, slots=True)
class SessionGrant:
    """What a HELLO got, as far as the sequences depend on it. Times in seconds."""

    store: BlockOwner
    """From `create_block_store` of the same RNIC."""
    holder: object
    """Who holds the quota of its allocations."""
    reader: object
    """Who pins blocks in the session's name: `LoadPin.owner` of the RNIC's own LOADs too."""
    domain: str
    handles: HandleRange
    direct_alloc: bool
    """BIND is a well-formed request: it is left to the session when its turn on its handle has come."""
    records: bool
    """RECORD is granted (draft 6.5)."""
    invalidates: bool
    """INVALIDATE is served."""
    head_of_device: bool
    """With DIRECT_ALLOC: the peer's atomics on Head are not atomic with a processor's; ALLOC_STORE is the session's."""
    request_credits: int
    max_message_bytes: int
    receives: MemoryRegion
    """Receive buffer `slot` has `max_message_bytes` octets from `slot * max_message_bytes`, and `wr_id` = `slot`."""
    read_depth: int
    drain_s: float
    """How long the peer may take over an RDMA Read, and its LOAD over a block that someone wants to free."""


@runtime_checkable
class OffloadedStream(Stream, Protocol):
    """A `Stream` whose requests the RNIC serves once `offload` was called.

    `disconnect` lets the RNIC finish what it has begun. RDMA Reads that are posted never wait in front of other work:
    those beyond the depth, which the RNIC's own share, wait by themselves.
    """

    @property
    def outstanding(self) -> int:
        """Requests that the RNIC has neither resolved nor left to the session."""
        ...

    def bind_tickets(self) -> Sequence[Ticket]:
        """Tickets of the BINDs that came and are not resolved, whether or not the session has them yet."""
        ...

    def offload(self, grant: SessionGrant) -> None:
        """Serve the requests from now on. No receive buffer is posted at that moment. Raises `ApiMisuse`."""
        ...

    def resolved(self, handle: Handle) -> None:
        """One of the well-formed requests on `handle` that were left to the session is resolved."""
        ...


@runtime_checkable
class OffloadingRnic(Rnic, Protocol):
    """An RNIC that executes sequences."""

    def create_block_store(
        self,
        pool: MemoryRegion,
        *,
        block_size_bytes: int,
        block_count: int,
        pool_base: int,
        table_base_handle: Handle,
        table_handles: int,
        ring_order: int,
        first_ticket: int = 0,
        clear_on_free: bool = False,
        direct_blocks: int = 0,
        masked_counters: bool = True,
        freed: Callable[[object], None],
    ) -> BlockOwner:
        """As `kbtp.blocks.BlockStore.create`, over a region of this RNIC.

        `freed(holder)` is called in `poll`, after a FREE that outlived the stream it came from.
        """
        ...

    def open_channel(self, *, threads: int = 0) -> Channel:
        """With `threads`, that many of the RNIC's own do the I/O and spread the accepted streams among themselves:
        `poll` only waits. Without, `poll` does it."""
        ...

    @property
    def punts(self) -> Mapping[str, int]:
        """How many messages were left to sessions, by reason."""
        ...
