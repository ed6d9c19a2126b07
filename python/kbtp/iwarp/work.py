"""Posted work on its way through a stream, and what is still owed to the peer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

from kbtp.errors import ApiMisuse
from kbtp.iwarp.ddp import MESSAGE_MAX_BYTES
from kbtp.iwarp.events import Event, WrKind
from kbtp.iwarp.rdmap import AtomicOperation, AtomicResponse, RdmapOpcode, ReadRequest
from kbtp.types import Stag


def octets_of(buffer: bytes | bytearray | memoryview, *, writable: bool = False) -> memoryview:
    """`buffer` as a flat view of octets. Raises ApiMisuse if it is not contiguous, or must be writable and is not."""
    view = memoryview(buffer)
    if not view.c_contiguous:
        raise ApiMisuse("a buffer must be contiguous")
    if writable and view.readonly:
        raise ApiMisuse("a buffer that data is to be placed in must be writable")
    return view.cast("B")


class Gather:
    """The pieces of one message, taken from the front segment by segment."""

    def __init__(self, pieces: Sequence[bytes | bytearray | memoryview]) -> None:
        self._pieces = [octets_of(piece) for piece in pieces]
        self._index = 0
        self._offset = 0
        self.length_bytes = sum(map(len, self._pieces))
        if self.length_bytes > MESSAGE_MAX_BYTES:
            raise ApiMisuse(f"a message may have {MESSAGE_MAX_BYTES} octets, not {self.length_bytes} (RFC 5041 4)")

    def take(self, size: int) -> list[memoryview]:
        """The next `size` octets, in as many pieces as they lie in."""
        taken = []
        while size:
            piece = self._pieces[self._index]
            part = piece[self._offset : self._offset + size]
            taken.append(part)
            size -= len(part)
            self._offset += len(part)
            if self._offset == len(piece):
                self._index, self._offset = self._index + 1, 0
        return taken


@dataclass(slots=True, eq=False)
class Work:
    """A posted work request; `completion` is set once it is complete, and reported when all earlier ones are."""

    wr_id: int
    kind: WrKind
    completion: Event | None = field(init=False, default=None)


@dataclass(slots=True, eq=False)
class SendWork(Work):
    """A Send of any kind, or Immediate Data."""

    opcode: RdmapOpcode
    ulp_word: int
    payload: Gather


@dataclass(slots=True, eq=False)
class WriteWork(Work):
    payload: Gather
    stag: Stag
    to: int


@dataclass(slots=True, eq=False)
class ReadWork(Work):
    """`sink_stag` is lent when the request leaves; `placed_bytes` of the response are in `sink`."""

    sink: memoryview
    source_stag: Stag
    source_to: int
    sink_stag: Stag | None = field(init=False, default=None)
    placed_bytes: int = field(init=False, default=0)


@dataclass(slots=True, eq=False)
class AtomicWork(Work):
    operation: AtomicOperation
    stag: Stag
    to: int
    data: int
    mask: int
    compare_data: int
    compare_mask: int
    request_id: int = field(init=False, default=0)


PostedWork: TypeAlias = SendWork | WriteWork | ReadWork | AtomicWork


@dataclass(frozen=True, slots=True)
class Receive:
    """A posted receive buffer."""

    wr_id: int
    buffer: memoryview


@dataclass(frozen=True, slots=True)
class OwedRead:
    """A Read Request of the peer's; `ulpdu` is its whole segment, for a Terminate to quote."""

    request: ReadRequest
    ulpdu: bytes


Owed: TypeAlias = OwedRead | AtomicResponse
"""A response that the peer's request is owed; each takes one IRD slot until it was handed out."""
