"""What a target session decides to do on its stream; the server does it, in order."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, TypeAlias

from kbtp.types import Feature, Handle, TerminateCause
from kbtp.verbs.api import Access, MemoryRegion, Recv, WorkRequest

if TYPE_CHECKING:
    from kbtp.target.identity import Identity


@dataclass(frozen=True, slots=True)
class Terminate:
    """End the stream with this Terminate."""

    cause: TerminateCause
    why: str


@dataclass(frozen=True, slots=True)
class Disconnect:
    """End the stream once everything posted before has left. `why`: what the peer did wrong, if it did."""

    why: str = ""


@dataclass(frozen=True, slots=True)
class Abort:
    """End the stream at once: the peer is not listening, or this side cannot go on."""

    why: str
    error: Exception | None = None
    """What went wrong here, for the log, if something did."""


@dataclass(frozen=True, slots=True)
class Opened:
    """HELLO is granted: requests may come once the HELLO_ACK behind this has left.

    Comes before any receive buffer for them is posted.
    """

    identity: Identity
    features: Feature
    served: Feature
    """Those whose flags requests may have."""
    head_of_device: bool
    """Only the device may move the Head of its ring."""
    receives: MemoryRegion
    request_credits: int


@dataclass(frozen=True, slots=True)
class Resolved:
    """A request on `handle` that the RNIC left to this session is wholly done or not done.

    Comes only if the RNIC executes sequences.
    """

    handle: Handle


Action: TypeAlias = WorkRequest | Recv | Terminate | Disconnect | Abort | Opened | Resolved


class SessionMemory(Protocol):
    """Registered memory as a session sees it. None but what `expose` returns gives the peer any right."""

    @property
    def pool(self) -> MemoryRegion:
        """The block pool, from the first block on."""
        ...

    @property
    def hello(self) -> MemoryRegion:
        """The receive buffer that is there before HELLO (profile 8.1): 1024 octets."""
        ...

    def allocate(self, length_bytes: int) -> MemoryRegion:
        """Fresh memory for this session's stream; revoked with it."""
        ...

    def expose(self, octets: memoryview, access: Access, base_to: int = 0) -> MemoryRegion:
        """`octets` themselves, for the peer of this session's stream alone; revoked with it."""
        ...
