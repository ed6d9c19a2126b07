"""Carries batches over an RNIC that carries requests by itself: a batch is one call into it."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

import numpy as np

from kbtp.errors import ApiMisuse, ConnectionLost, KbtpError
from kbtp.initiator.batches import Batch, Records, Results
from kbtp.initiator.operations import is_empty, named, no_handle
from kbtp.types import BlockRef, Opcode, Status
from kbtp.verbs.api import MemoryRegion
from kbtp.verbs.buffers import RegisteredBuffer, buffer_of
from kbtp.verbs.requester import RECORD, RecordStatus, Requester, Taken

Record: TypeAlias = tuple[int, int, int, int, int]
"""The fields of a `RECORD` but for its checksum: status, generation, length, handle, block offset."""


def prepared(
    opcode: int, generation: object, block: object, buffer: object
) -> tuple[BlockRef | None, RegisteredBuffer | None]:
    """`kbtp.verbs.requester.Prepare`."""
    octets = None if opcode == Opcode.FREE or is_empty(buffer) else buffer_of(buffer)
    if block is None and opcode == Opcode.ALLOC_STORE:
        return None, octets
    return BlockRef(*named(block, generation), 0), octets


class RnicCarrier:
    """The requests of one session on one stream."""

    def __init__(self, requester: Requester, handle_count: int, lost: Callable[[], ConnectionLost]) -> None:
        """`lost`: why the stream has ended."""
        self._requester = requester
        self.run_one = requester.run_one
        """As `run` for one request, and without the detour of a batch; the number of one is not done in time."""
        self._handle_count = handle_count
        self._lost = lost
        self._batches: dict[int, Batch] = {}

    def submit(self, batch: Batch, _now_s: float) -> None:
        """Queue a batch, which gets its `results` after its `BatchDone`."""
        number = self._requester.submit(
            batch.opcode, batch.flags, batch.generation, batch.blocks, batch.buffers, batch.checksums
        )
        self._batches[number] = batch

    def done(self, number: int) -> None:
        """A `BatchDone` came."""
        batch, taken = self._batches.pop(number, None), self._requester.take(number)
        if batch is not None and taken is not None:
            self._finish(batch, taken)

    def run(self, batch: Batch, timeout_s: float) -> bool:
        """Submit a batch and wait for it; False if it is not done in time: it gets its `results` from `fail` then."""
        ran = self._requester.run(
            batch.opcode,
            batch.flags,
            batch.generation,
            batch.blocks,
            batch.buffers,
            batch.checksums,
            timeout_s,
            batch.meanwhile,
        )
        if isinstance(ran, int):
            self._batches[ran] = batch
            return False
        self._finish(batch, ran)
        return True

    def add_region(self, region: MemoryRegion, octets: RegisteredBuffer) -> None:
        """Slices of `octets` are used in place, through `region`."""
        self._requester.add_region(region, octets.address)

    def fail(self, error: ConnectionLost) -> None:
        """The stream has ended: everything outstanding ends with `error`."""
        batches, self._batches = self._batches, {}
        for number, batch in batches.items():
            taken = self._requester.take(number)
            if taken is None:
                batch.fail(error)
            else:
                self._finish(batch, taken)

    def _finish(self, batch: Batch, taken: Taken) -> None:
        octets, ok, misuses = taken
        errors: dict[int, KbtpError] = {}
        if not ok:
            records: Records = np.frombuffer(octets, RECORD).copy()
            said = dict(misuses)
            for place in np.flatnonzero(records["status"] >= RecordStatus.NO_HANDLE).tolist():
                status = int(records["status"][place])
                errors[place] = self.error(status, said.get(place))
                if status == RecordStatus.NO_HANDLE:
                    records["status"][place] = Status.NO_SPACE
            octets = records.tobytes()
        batch.finish(Results(octets, ok, errors))

    def error(self, status: int, why: str | None) -> KbtpError:
        """Why a request has no answer, of whose record `status` is a `RecordStatus`."""
        if status == RecordStatus.MISUSED:
            return ApiMisuse(why or "")
        if status == RecordStatus.NO_HANDLE:
            return no_handle(self._handle_count)
        return self._lost()
