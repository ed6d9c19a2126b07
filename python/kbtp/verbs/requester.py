"""What an RNIC offers that carries an initiator's requests by itself, and what it needs for it.

Its streams are `CarryingStream`s. A session is opened as with any RNIC; after HELLO_ACK, its receive buffer posted
again, `carry` gives the RNIC what it needs to know. From then on the target's messages do not come out of `poll` any
more: whole batches of requests go in and records of how they ended come out. The RNIC keeps to the credits, registers
memory for one request alone where no region of the caller's covers it, and revokes it before it says how the request
ended.

A target that breaks the protocol has its stream ended, which says so with `PeerMisbehaved` as its reason. When the
stream ends, for whatever reason, batches that are not done become done: what was not answered is LOST. Its
`StreamEnded` alone says so.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Final, Protocol, TypeAlias, runtime_checkable

import numpy as np

from kbtp.types import BlockRef, Handle
from kbtp.verbs.api import MemoryRegion, Stream
from kbtp.verbs.buffers import RegisteredBuffer

RECORD: Final = np.dtype(
    [
        ("status", "=u2"),
        ("generation", "=u2"),
        ("length_bytes", "=u4"),
        ("handle", "=u8"),
        ("block_offset", "=u8"),
        ("checksum", "=i8"),
    ]
)
"""How one request ended. `status` is a `Status` or a `RecordStatus`; without an answer all else is 0. `checksum` is the
CRC32c of what was loaded or stored, or `NO_CHECKSUM`."""

NO_CHECKSUM: Final = -1
"""Nobody asked for it, or the RNIC does not know it."""


class RecordStatus(IntEnum):
    """What stands instead of a status where the target gave none."""

    NO_HANDLE = 0xFFFD
    """All handles of the session's own range are bound: nothing was sent."""
    MISUSED = 0xFFFE
    """It could never work, and was not sent."""
    LOST = 0xFFFF
    """The stream ended first: not done, or not known to be done."""


Prepare: TypeAlias = Callable[[int, object, object, object], tuple[BlockRef | None, RegisteredBuffer | None]]
"""What a request means that the RNIC does not understand as it is, from its opcode, the batch's generation, block and
buffer: a block with its generation (None: the session chooses a handle) and a buffer (None: no octets). Raises
`ApiMisuse`: the request is MISUSED then.

The RNIC understands handles, `BlockRef`s and contiguous objects with the buffer protocol.
"""


@dataclass(frozen=True, slots=True)
class RequestGrant:
    """What a HELLO got, as far as requests depend on it."""

    request_credits: int
    first_handle: Handle
    handle_count: int
    invalidate: bool
    """The target invalidates an STag with its completion when asked to."""
    inline_max_bytes: int
    """Data up to this length travels inside the request."""
    receives: MemoryRegion
    """Receive buffer `slot` has `max_message_bytes` octets from `slot * max_message_bytes`, and `wr_id` = `slot`.
    All are posted."""
    max_message_bytes: int


Taken: TypeAlias = tuple[bytes, bool, list[tuple[int, str]]]
"""The `RECORD`s of a batch, whether all of them are SUCCESS, and for each MISUSED one its place and why."""

TakenOne: TypeAlias = tuple[tuple[int, int, int, int, int], str | None]
"""The fields of a `RECORD` but for its checksum, and why if it is MISUSED."""


class Requester(Protocol):
    """Carries the requests of one stream. One thread at a time.

    `opcode` is LOAD, STORE, ALLOC_STORE or FREE, `flags` SEAL or ALLOW_UNSEALED, `generation` replaces those of the
    blocks unless it is 0. As many buffers as blocks, or None for FREE; they stay as they are, and in use, until
    the batch is done. Two loads into the same memory: the second is MISUSED. With `checksums` the records have those
    that the RNIC finds out while it moves the data.
    """

    def add_region(self, region: MemoryRegion, address: int) -> None:
        """Memory within `region`, whose first octet is at `address`, is used through it as long as that is valid."""
        ...

    def submit(
        self,
        opcode: int,
        flags: int,
        generation: int,
        blocks: Sequence[BlockRef | Handle | None],
        buffers: Sequence[object] | None,
        checksums: bool,
        /,
    ) -> int:
        """The number of the batch, of which `kbtp.verbs.api.BatchDone` says when it is done.

        Its first requests leave while the others are looked at. Raises `ValueError` for buffers that are not as many as
        the blocks: nothing was submitted. What else it raises a foreign object has raised, and part of the batch may be
        under way.
        """
        ...

    def run(
        self,
        opcode: int,
        flags: int,
        generation: int,
        blocks: Sequence[BlockRef | Handle | None],
        buffers: Sequence[object] | None,
        checksums: bool,
        timeout_s: float,
        meanwhile: Callable[[], None] | None = None,
        /,
    ) -> Taken | int:
        """Submit a batch and wait until it is done; its number if it is not in time. `meanwhile` is called before the
        wait, and takes no time from it.

        Raises as `submit`, and what `meanwhile` or the handler of a signal raises: the batch is still under way then.
        """
        ...

    def run_one(
        self,
        opcode: int,
        flags: int,
        generation: int,
        block: BlockRef | Handle | None,
        buffer: object,
        timeout_s: float,
        /,
    ) -> TakenOne | int:
        """As `run` for one request."""
        ...

    def take(self, batch: int, /) -> Taken | None:
        """What came of a batch, once; None while it is not done."""
        ...


@runtime_checkable
class CarryingStream(Stream, Protocol):
    """A `Stream` that can carry an initiator's requests."""

    def carry(self, grant: RequestGrant, prepare: Prepare) -> Requester:
        """Carry requests from now on. Raises `ApiMisuse`, `ConnectionLost` if the stream has ended."""
        ...
