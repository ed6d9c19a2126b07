"""The RNIC interface: what a target and an initiator may ask of any RNIC.

The names are those of RDMA verbs. Three implementations are behind these protocols: the reference
RNIC in Python (user-space iWARP over TCP), a native one of the same wire protocol, and the devices of rdma-core.
A `Channel` is what rdma_cm calls an event channel joined with a completion channel: one owner
polls it, and everything that happens to its listeners and streams comes out of `poll`, in order.

Nothing here blocks for ever: `connect` and `poll` take a time limit in seconds, and a stream that
ends completes everything outstanding on it (status FLUSHED) before its `StreamEnded` is reported.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum, IntFlag, auto
from typing import Protocol, TypeAlias, runtime_checkable

from kbtp.errors import KbtpError
from kbtp.types import Stag, TerminateCause, TerminateInfo


class Access(IntFlag):
    """Remote rights of a memory region; without any of them only the owner's own posts use it."""

    NONE = 0
    REMOTE_READ = 1
    REMOTE_WRITE = 2
    REMOTE_ATOMIC = 4


@dataclass(frozen=True, slots=True)
class Capabilities:
    """What the wire below an RNIC can do."""

    atomics: bool
    masked_atomics: bool
    immediate: bool
    send_with_invalidate: bool
    ordered_placement: bool
    """An RDMA Write never becomes visible before earlier ones (draft 6.5): only then may completion records be used."""
    max_ird: int
    max_ord: int
    write_with_immediate: bool = False
    """`RdmaWriteImmediate`: the binding is that of InfiniBand and RoCEv2 (draft 9.2), else RDMAP's (9.1)."""
    own_base: bool = False
    """Regions begin at tagged offsets of the RNIC's own choice, their address: `register` takes no other `base_to`."""
    atomics_with_processors: bool = True
    """A peer's atomic is atomic with what this machine's processors do to the word, not with other peers' alone."""
    invalidated_by_peers: bool = True
    """A peer's Send with Invalidate works on the regions of this side."""
    executes_sequences: bool = False
    """It serves requests of KBTP by itself, as `kbtp.verbs.offload` says."""


class ProtectionDomain(Protocol):
    """Groups streams and regions: a stream reaches no region of another domain (RFC 5042 6.1.1)."""


class MemoryRegion(Protocol):
    """Registered memory: exactly `length` octets at tagged offsets `base_to` and up."""

    @property
    def stag(self) -> Stag: ...
    @property
    def base_to(self) -> int: ...
    @property
    def length(self) -> int: ...
    @property
    def access(self) -> Access: ...
    @property
    def view(self) -> memoryview:
        """The octets themselves (format "B"), read-only if the buffer is."""
        ...

    @property
    def valid(self) -> bool:
        """False once revoked, by either side."""
        ...

    def revoke(self) -> None:
        """After return no octet of the region changes or leaves through its STag. Idempotent."""
        ...


@dataclass(frozen=True, slots=True)
class Sge:
    """One piece of registered memory: `length` octets from `offset` within `region`."""

    region: MemoryRegion
    offset: int
    length: int


@dataclass(frozen=True, slots=True)
class Send:
    """Send of `inline` (copied when posted) followed by the octets of `sges`."""

    wr_id: int
    inline: bytes = b""
    sges: tuple[Sge, ...] = ()
    invalidate_stag: Stag | None = None
    solicited: bool = False


@dataclass(frozen=True, slots=True)
class RdmaWrite:
    """RDMA Write of the octets of `sges` to the peer's `remote_stag`, `remote_to`."""

    wr_id: int
    sges: tuple[Sge, ...]
    remote_stag: Stag
    remote_to: int


@dataclass(frozen=True, slots=True)
class RdmaRead:
    """RDMA Read of `sink.length` octets into `sink`.

    The sink needs no remote right: the RNIC makes just those octets writable for the response alone.
    """

    wr_id: int
    sink: Sge
    remote_stag: Stag
    remote_to: int


@dataclass(frozen=True, slots=True)
class FetchAdd:
    """RFC 7306 FetchAdd; each bit of `add_mask` is the top bit of a field. Old value in `WorkCompletion.value`."""

    wr_id: int
    remote_stag: Stag
    remote_to: int
    add_data: int
    add_mask: int


@dataclass(frozen=True, slots=True)
class CompareSwap:
    """RFC 7306 CmpSwap. Old value in `WorkCompletion.value`."""

    wr_id: int
    remote_stag: Stag
    remote_to: int
    swap_data: int
    swap_mask: int
    compare_data: int
    compare_mask: int


@dataclass(frozen=True, slots=True)
class Immediate:
    """RFC 7306 Immediate Data: exactly 8 octets, delivered like a Send."""

    wr_id: int
    data: bytes
    solicited: bool = False


@dataclass(frozen=True, slots=True)
class RdmaWriteImmediate:
    """RDMA Write of `inline` (copied when posted), which takes a receive of the peer's too: RECV_IMMEDIATE there."""

    wr_id: int
    inline: bytes
    remote_stag: Stag
    remote_to: int
    immediate: int
    """32 bits."""


WorkRequest: TypeAlias = Send | RdmaWrite | RdmaRead | FetchAdd | CompareSwap | Immediate | RdmaWriteImmediate


@dataclass(frozen=True, slots=True)
class Recv:
    """A receive buffer; one is consumed by each Send or Immediate of the peer."""

    wr_id: int
    sge: Sge


class WcOpcode(Enum):
    """What a work completion completes."""

    SEND = auto()
    RDMA_WRITE = auto()
    RDMA_READ = auto()
    ATOMIC = auto()
    IMMEDIATE = auto()
    RECV = auto()
    RECV_IMMEDIATE = auto()


class WcStatus(Enum):
    SUCCESS = auto()
    FLUSHED = auto()
    """The stream ended first: not done, or not known to be done."""


@dataclass(frozen=True, slots=True)
class WorkCompletion:
    """One completed work request.

    SEND, RDMA_WRITE and IMMEDIATE complete when their last octet has left the local memory: the buffer may
    change from then on; it says nothing about the peer. RDMA_READ and ATOMIC complete on their response.
    """

    stream: Stream
    wr_id: int
    opcode: WcOpcode
    status: WcStatus
    length: int = 0
    value: int = 0
    invalidated_stag: Stag | None = None
    immediate: bytes = b""
    """8 octets; of an `RdmaWriteImmediate` its 32 bits are the last four, and the others zero."""
    solicited: bool = False


@runtime_checkable
class Stream(Protocol):
    """One RDMAP stream (a queue pair and its connection)."""

    @property
    def pd(self) -> ProtectionDomain: ...
    @property
    def remote_address(self) -> str: ...
    @property
    def ird(self) -> int:
        """RDMA Reads and atomics the peer may have outstanding here, after negotiation."""
        ...

    @property
    def ord_(self) -> int:
        """RDMA Reads and atomics this side may have outstanding; more wait in the send queue."""
        ...

    def post(self, requests: Sequence[WorkRequest]) -> None:
        """Queue work requests, executed in order. All or none: raises `ApiMisuse` before anything is queued (on
        the connecting side also until `Established`), `ConnectionLost` if the stream has ended or `disconnect` was
        called."""
        ...

    def post_recv(self, receives: Sequence[Recv]) -> None:
        """Queue receive buffers, used in order; from `connect` until the end. Raises as `post` does."""
        ...

    def terminate(self, cause: TerminateCause) -> None:
        """End the stream with a Terminate. Nothing of the peer's is placed or delivered from here on."""
        ...

    def disconnect(self) -> None:
        """End the stream in order: what is posted leaves, then the connection closes."""
        ...

    def abort(self) -> None:
        """End the stream at once, without a word."""
        ...


class Listener(Protocol):
    @property
    def address(self) -> tuple[str, int]:
        """Host and port really bound."""
        ...

    def close(self) -> None: ...


@runtime_checkable
class ConnectRequest(Protocol):
    """A peer asks to connect: answer with `accept` or `reject` before the next `poll`, which else rejects it."""

    @property
    def private_data(self) -> bytes: ...
    @property
    def remote_address(self) -> str: ...
    @property
    def peer_ird(self) -> int: ...
    @property
    def peer_ord(self) -> int: ...

    def accept(
        self, *, pd: ProtectionDomain, private_data: bytes, ird: int, ord_: int, receives: Sequence[Recv] = ()
    ) -> Stream:
        """`receives` are there before the peer's first message can be. The stream may be posted to at once."""
        ...

    def reject(self, private_data: bytes) -> None: ...


@dataclass(frozen=True, slots=True)
class Established:
    """`stream` (from `Channel.connect`) was accepted with the peer's `private_data`."""

    stream: Stream
    private_data: bytes


@dataclass(frozen=True, slots=True)
class Rejected:
    """The peer refused `stream` (from `Channel.connect`): its last event. Its receives were FLUSHED before."""

    stream: Stream
    private_data: bytes


@dataclass(frozen=True, slots=True)
class StreamEnded:
    """The last event of a stream. Its scoped regions are revoked and its other completions already reported.

    `reason` is None after an orderly close by either side with nothing left to do;
    `terminate` is the peer's Terminate, `cause` the one this side sent.
    """

    stream: Stream
    reason: KbtpError | None
    terminate: TerminateInfo | None = None
    cause: TerminateCause | None = None


@dataclass(frozen=True, slots=True)
class BatchDone:
    """A batch of requests that `stream` carries is done; see `kbtp.verbs.requester`."""

    stream: Stream
    batch: int


Event: TypeAlias = ConnectRequest | Established | Rejected | WorkCompletion | BatchDone | StreamEnded


class Channel(Protocol):
    """One owner's streams and listeners, and everything that happens to them."""

    def listen(self, host: str, port: int) -> Listener:
        """Raises OSError as the system gives it (address in use, not available)."""
        ...

    def connect(
        self,
        host: str,
        port: int,
        *,
        pd: ProtectionDomain,
        private_data: bytes,
        ird: int,
        ord_: int,
        timeout_s: float,
        receives: Sequence[Recv] = (),
    ) -> Stream:
        """Start connecting; `Established`, `Rejected` or `StreamEnded` follows within `timeout_s`."""
        ...

    def poll(self, timeout_s: float) -> list[Event]:
        """Do the I/O that is due and reap events; wait up to `timeout_s` (0: not at all) while there are none."""
        ...

    def fileno(self) -> int:
        """Readable when `poll(0)` has I/O to do; for asyncio and select."""
        ...

    def next_timeout_s(self) -> float | None:
        """Seconds until `poll(0)` must be called even if `fileno` stays quiet; None: no timer runs."""
        ...

    def wake(self) -> None:
        """Make a `poll` in another thread return now. The only method another thread may call."""
        ...

    def close(self) -> None:
        """Abort every stream, close every listener. Idempotent."""
        ...


class Rnic(Protocol):
    """A device with the RDMA function."""

    @property
    def name(self) -> str: ...
    @property
    def capabilities(self) -> Capabilities: ...

    def allocate_pd(self) -> ProtectionDomain: ...

    def register(
        self,
        buffer: object,
        access: Access,
        *,
        pd: ProtectionDomain,
        stream: Stream | None = None,
        base_to: int = 0,
    ) -> MemoryRegion:
        """Register anything with the buffer protocol or a DLPack CPU tensor, octet-exact, contiguous.

        Reachable through the STag: by every stream of `pd`, or by `stream` alone if given. The first octet
        has tagged offset `base_to`. With `Capabilities.own_base` that is its address, which may be given instead of 0,
        and until `stream` ends the others of `pd` reach the region too.

        Raises `ApiMisuse` for a zero length, a null pointer, a buffer that is not
        contiguous or not in CPU memory, a write or atomic right on read-only memory, or a write or atomic right on
        octets that another valid region already lets a peer change (RFC 5042 6.3.6); `OSError` as a device gives it.
        Scoped to a stream that has ended the region is born revoked: the end of a stream may always come first.
        """
        ...

    def open_channel(self) -> Channel: ...

    def close(self) -> None: ...
