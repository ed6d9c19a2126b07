"""Carries batches over an RNIC that carries requests by itself: a batch is one call into it."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

import numpy as np

from kbtp.errors import ApiMisuse, ConnectionLost, KbtpError
from kbtp.initiator.batches import Batch, Records, Results
from kbtp.initiator.operations import no_handle
from kbtp.types import BlockRef, Generation, Handle, Opcode, RequestFlag, Status
from kbtp.verbs.api import MemoryRegion
from kbtp.verbs.buffers import RegisteredBuffer, buffer_of
from kbtp.verbs.requester import NO_CHECKSUM, RECORD, RecordStatus, Requester, Taken, Unprepared

Record: TypeAlias = tuple[int, int, int, int, int]
"""The fields of a `RECORD` but for its checksum: status, generation, length, handle, block offset."""

NO_RECORD: Record = (RecordStatus.MISUSED, 0, 0, 0, 0)

Wrong: TypeAlias = dict[int, ApiMisuse]
"""By their place, the requests of a batch that were never submitted."""


class RnicCarrier:
    """The requests of one session on one stream."""

    def __init__(self, requester: Requester, handle_count: int, lost: Callable[[], ConnectionLost]) -> None:
        """`lost`: why the stream has ended."""
        self._requester = requester
        self._handle_count = handle_count
        self._lost = lost
        self._batches: dict[int, tuple[Batch, Wrong]] = {}

    def submit(self, batch: Batch, _now_s: float) -> None:
        """Queue a batch, which gets its `results` after its `BatchDone`."""
        try:
            number = self._requester.submit(
                batch.opcode, batch.flags, batch.generation, batch.blocks, batch.buffers, batch.checksums
            )
            wrong: Wrong = {}
        except Unprepared:
            blocks, buffers, wrong = self._prepared(batch)
            number = self._requester.submit(batch.opcode, batch.flags, 0, blocks, buffers, batch.checksums)
        self._batches[number] = batch, wrong

    def done(self, number: int) -> None:
        """A `BatchDone` came."""
        under_way, taken = self._batches.pop(number, None), self._requester.take(number)
        if under_way is not None and taken is not None:
            self._finish(*under_way, taken)

    def run(self, batch: Batch, timeout_s: float) -> bool:
        """Submit a batch and wait for it; False if it is not done in time: it gets its `results` from `fail` then."""
        fixed = batch.opcode, batch.flags
        try:
            ran = self._requester.run(*fixed, batch.generation, batch.blocks, batch.buffers, batch.checksums, timeout_s)
            wrong: Wrong = {}
        except Unprepared:
            blocks, buffers, wrong = self._prepared(batch)
            ran = self._requester.run(*fixed, 0, blocks, buffers, batch.checksums, timeout_s)
        if isinstance(ran, int):
            self._batches[ran] = batch, wrong
            return False
        self._finish(batch, wrong, ran)
        return True

    def run_one(
        self,
        opcode: Opcode,
        flags: RequestFlag,
        generation: Generation,
        block: BlockRef | Handle | None,
        buffer: object,
        timeout_s: float,
    ) -> tuple[Record, KbtpError | None] | None:
        """As `run` for one request, and without the detour of a batch; None if it is not done in time."""
        try:
            ran = self._requester.run_one(opcode, flags, generation, block, buffer, timeout_s)
        except Unprepared:
            buffers = None if opcode is Opcode.FREE else (buffer,)
            blocks, prepared, wrong = self._prepared(Batch(opcode, flags, (block,), buffers, generation))
            if wrong:
                return NO_RECORD, wrong[0]
            ran = self._requester.run_one(opcode, flags, 0, blocks[0], prepared and prepared[0], timeout_s)
        if isinstance(ran, int):
            return None
        record, why = ran
        return record, self._error(record[0], why) if record[0] >= RecordStatus.NO_HANDLE else None

    def add_region(self, region: MemoryRegion, octets: RegisteredBuffer) -> None:
        """Slices of `octets` are used in place, through `region`."""
        self._requester.add_region(region, octets.address)

    def fail(self, error: ConnectionLost) -> None:
        """The stream has ended: everything outstanding ends with `error`."""
        batches, self._batches = self._batches, {}
        for number, (batch, wrong) in batches.items():
            taken = self._requester.take(number)
            if taken is None:
                batch.fail(error)
            else:
                self._finish(batch, wrong, taken)

    # --- requests that need a closer look ------------------------------------------------------

    def _prepared(self, batch: Batch) -> tuple[list[BlockRef | None], list[object] | None, Wrong]:
        """What can be submitted of a batch, and by their place the requests that cannot."""
        blocks: list[BlockRef | None] = []
        buffers: list[object] | None = None if batch.buffers is None else []
        wrong: Wrong = {}
        for place, operation in enumerate(batch.operations()):
            try:
                if operation.result is not None:
                    operation.result.raise_for_status()
                if buffers is not None:
                    empty = operation.is_empty
                    buffers.append(b"" if empty else self._requester.octets(buffer_of(operation.buffer)))
            except ApiMisuse as error:
                wrong[place] = error
            else:
                handle = operation.handle
                blocks.append(None if handle is None else BlockRef(handle, operation.generation, 0))
        return blocks, buffers, wrong

    # --- how they ended ------------------------------------------------------------------------

    def _finish(self, batch: Batch, wrong: Wrong, taken: Taken) -> None:
        octets, ok, misuses = taken
        if ok and not wrong:
            batch.finish(Results(octets, ok, {}))
            return
        answered: Records = np.frombuffer(octets, RECORD)
        records = np.zeros(len(batch.blocks), RECORD)
        records["status"] = RecordStatus.MISUSED
        records["checksum"] = NO_CHECKSUM
        places = [place for place in range(len(records)) if place not in wrong]
        records[places] = answered
        errors: dict[int, KbtpError] = {**wrong}
        said = dict(misuses)
        for index, place in enumerate(places):
            status = int(answered["status"][index])
            if status >= RecordStatus.NO_HANDLE:
                errors[place] = self._error(status, said.get(index))
            if status == RecordStatus.NO_HANDLE:
                records["status"][place] = Status.NO_SPACE
        batch.finish(Results(records.tobytes(), False, errors))

    def _error(self, status: int, why: str | None) -> KbtpError:
        if status == RecordStatus.MISUSED:
            return ApiMisuse(why or "")
        if status == RecordStatus.NO_HANDLE:
            return no_handle(self._handle_count)
        return self._lost()
