"""Requests of one kind that are submitted together, and how each of them ended."""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias, overload

import numpy as np
import numpy.typing as npt

from kbtp.errors import ApiMisuse, KbtpError
from kbtp.initiator.operations import Operation, Result, named
from kbtp.types import BlockRef, Generation, Handle, Opcode, RequestFlag, Status
from kbtp.verbs.requester import NO_CHECKSUM, RECORD, RecordStatus

_ROW = struct.Struct("=HHIQQq")
assert _ROW.size == RECORD.itemsize

Records: TypeAlias = npt.NDArray[np.void]


class Results(Sequence[Result]):
    """One `Result` for each request of a batch, in order; as arrays for who has many."""

    __slots__ = ("_errors", "_octets", "_ok", "_records_made")

    def __init__(self, records: bytes, ok: bool, errors: Mapping[int, KbtpError]) -> None:
        """`records` are the octets of `RECORD`s, `ok` if all are SUCCESS; `errors` says by its place why a request has
        no status, or adds to it."""
        self._octets = records
        self._records_made: Records | None = None
        self._ok = ok
        self._errors = errors

    @classmethod
    def of(cls, results: Sequence[Result]) -> Results:
        records = np.zeros(len(results), RECORD)
        errors = {}
        for place, result in enumerate(results):
            status = RecordStatus.LOST if result.status is None else result.status
            fields = (status, result.generation, result.length_bytes, result.handle, result.block_offset)
            records[place] = (*fields, NO_CHECKSUM)
            if result.error is not None:
                errors[place] = result.error
        return cls(records.tobytes(), not records["status"].any(), errors)

    @property
    def rows(self) -> list[tuple[int, int, int, int, int, int]]:
        """The records as tuples of `RECORD`'s fields: for a few of them less work than arrays are."""
        return list(_ROW.iter_unpack(self._octets))

    @property
    def _records(self) -> Records:
        # Made when somebody looks: who only asks for `ok` pays nothing for it.
        if self._records_made is None:
            self._records_made = np.frombuffer(self._octets, RECORD)
        return self._records_made

    def __len__(self) -> int:
        return len(self._octets) // RECORD.itemsize

    @overload
    def __getitem__(self, index: int) -> Result: ...
    @overload
    def __getitem__(self, index: slice) -> list[Result]: ...
    def __getitem__(self, index: int | slice) -> Result | list[Result]:
        if isinstance(index, slice):
            return [self[place] for place in range(*index.indices(len(self)))]
        place = index + len(self) if index < 0 else index
        status, generation, length_bytes, handle, block_offset, _ = self._records[place].tolist()
        error = self._errors.get(place)
        known = None if status >= RecordStatus.NO_HANDLE else Status(status)
        return Result(known, handle, generation, length_bytes, block_offset, error)

    def __iter__(self) -> Iterator[Result]:
        return (self[place] for place in range(len(self)))

    def __repr__(self) -> str:
        return f"Results({list(self)})"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and list(self) == list(other)

    __hash__ = None  # type: ignore[assignment]

    @property
    def ok(self) -> bool:
        """True if every request succeeded."""
        return self._ok

    @property
    def statuses(self) -> npt.NDArray[np.uint16]:
        """The target's answers as `Status`; more than any of those where there is none and `Result.error` says why."""
        return self._records["status"]

    @property
    def handles(self) -> npt.NDArray[np.uint64]:
        return self._records["handle"]

    @property
    def generations(self) -> npt.NDArray[np.uint16]:
        return self._records["generation"]

    @property
    def lengths_bytes(self) -> npt.NDArray[np.uint32]:
        return self._records["length_bytes"]

    @property
    def block_offsets(self) -> npt.NDArray[np.uint64]:
        return self._records["block_offset"]

    @property
    def checksums(self) -> npt.NDArray[np.int64]:
        """CRC32c of what was loaded or stored; -1 where it was not asked for or is not known. Only the native RNIC
        knows it, of requests that are not in a direct mode: it has taken it for each FPDU anyway."""
        return self._records["checksum"]

    @property
    def refs(self) -> list[BlockRef]:
        """Those of the blocks; meaningful where a store or load succeeded."""
        return [BlockRef(handle, generation, length) for _, generation, length, handle, _, _ in self.rows]

    def raise_for_status(self) -> Results:
        """Itself if `ok`; else raises as the first `Result` that is not does."""
        if not self.ok:
            self[int(np.flatnonzero(self.statuses)[0])].raise_for_status()
        return self


@dataclass(slots=True, eq=False)
class Batch:
    """Requests under way; `results` once all have ended."""

    opcode: Opcode
    flags: RequestFlag
    blocks: Sequence[BlockRef | Handle | None]
    """None: the session chooses a free handle (ALLOC_STORE only)."""
    buffers: Sequence[object] | None
    """To load into or to store from; None for FREE."""
    generation: Generation = 0
    """Instead of those of the blocks, unless 0."""
    direct: bool = False
    """In a direct mode (LOAD and ALLOC_STORE only)."""
    checksums: bool = False
    """Its results shall have those that are known."""
    meanwhile: Callable[[], None] | None = field(default=None, repr=False)
    """Called by who waits for it, once it is submitted."""
    results: Results | None = None
    when_done: Callable[[], None] | None = field(default=None, repr=False)

    def finish(self, results: Results) -> None:
        if self.results is None:
            self.results = results
            if self.when_done is not None:
                self.when_done()

    def fail(self, error: KbtpError) -> None:
        """None of it was sent."""
        ends = [one.result or Result(None, one.handle or 0, error=error) for one in self.operations()]
        self.finish(Results.of(ends))

    def operations(self) -> list[Operation]:
        """One for each request; one that can never work has already ended with its `ApiMisuse`."""
        buffers = [None] * len(self.blocks) if self.buffers is None else self.buffers
        return [self._operation(block, buffer) for block, buffer in zip(self.blocks, buffers, strict=True)]

    def _operation(self, block: BlockRef | Handle | None, buffer: object) -> Operation:
        try:
            chooses = block is None and self.opcode is Opcode.ALLOC_STORE
            handle, generation = (None, 0) if chooses else named(block, self.generation)
        except ApiMisuse as error:
            return Operation(self.opcode, None, result=Result(None, error=error))
        return Operation(self.opcode, handle, generation, self.flags, buffer, self.direct)


def load_batch(
    blocks: Sequence[BlockRef | Handle],
    into: Sequence[object],
    allow_unsealed: bool,
    direct: bool = False,
    checksums: bool = False,
    meanwhile: Callable[[], None] | None = None,
) -> Batch:
    _equally_many(blocks=blocks, into=into)
    flags = loading(allow_unsealed)
    return Batch(Opcode.LOAD, flags, blocks, into, direct=direct, checksums=checksums, meanwhile=meanwhile)


def store_batch(blocks: Sequence[BlockRef | Handle], data: Sequence[object], seal: bool) -> Batch:
    _equally_many(blocks=blocks, data=data)
    return Batch(Opcode.STORE, sealing(seal), blocks, data)


def alloc_store_batch(
    data: Sequence[object],
    handles: Sequence[Handle] | None,
    seal: bool,
    direct: bool = False,
    checksums: bool = False,
) -> Batch:
    if handles is None:
        free: Sequence[None] = [None] * len(data)
        return Batch(Opcode.ALLOC_STORE, sealing(seal), free, data, direct=direct, checksums=checksums)
    _equally_many(data=data, handles=handles)
    return Batch(Opcode.ALLOC_STORE, sealing(seal), handles, data, direct=direct, checksums=checksums)


def free_batch(blocks: Sequence[BlockRef | Handle]) -> Batch:
    _equally_many(blocks=blocks)  # what cannot be counted is refused here, before a session has anything to do with it
    return Batch(Opcode.FREE, RequestFlag.NONE, blocks, None)


def loading(allow_unsealed: bool) -> RequestFlag:
    return RequestFlag.ALLOW_UNSEALED if allow_unsealed else RequestFlag.NONE


def sealing(seal: bool) -> RequestFlag:
    return RequestFlag.SEAL if seal else RequestFlag.NONE


def _equally_many(**arguments: Sequence[object]) -> None:
    if len({*map(len, arguments.values())}) > 1:
        lengths = {name: len(values) for name, values in arguments.items()}
        said = ", ".join(f"{count} {name}" for name, count in lengths.items())
        raise ApiMisuse(f"{said}: a batch needs equally many of each")
