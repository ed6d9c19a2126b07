"""The synchronous client: `kbtp.connect` gives one.

Deadlines: a call that runs out of time ends the session before it raises (profile 3: until the
completion or the end of the stream, buffer and credit are the target's). So no buffer changes
after the call has returned, whatever the target still sends.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from types import TracebackType

from kbtp import limits
from kbtp.address import Address
from kbtp.errors import ConnectionLost, refused
from kbtp.initiator.batches import (
    Batch,
    Results,
    alloc_store_batch,
    free_batch,
    load_batch,
    loading,
    sealing,
    store_batch,
)
from kbtp.initiator.connection import Connection
from kbtp.initiator.operations import advice
from kbtp.initiator.rnic_carrier import Record
from kbtp.initiator.session import InitiatorConfig
from kbtp.initiator.view import Mode, SessionView
from kbtp.types import BlockRef, Feature, Generation, Handle, Opcode, RequestFlag, Status
from kbtp.verbs.api import MemoryRegion, Rnic


class Client(SessionView):
    """A session with one target. Threads may share it: their calls take turns.

    Buffers are anything with the buffer protocol or DLPack in CPU memory, contiguous; they are used in place. A
    buffer that is used often is best registered once with `register`; slices of it are then found by their address.
    Every call takes `timeout_s`; the default is the one given to `connect`.
    """

    def __init__(
        self, address: Address, config: InitiatorConfig, rnic: Rnic, *, timeout_s: float, connect_timeout_s: float
    ) -> None:
        """Connects. Raises as `kbtp.connect` says."""
        self._timeout_s = timeout_s
        self._lock = threading.Lock()
        self._rnic = rnic
        connection = Connection(address, config, rnic, now_s=time.monotonic(), timeout_s=connect_timeout_s)
        super().__init__(connection)
        try:
            while not connection.opened and connection.error is None:
                connection.pump(connection.wait_s(limits.MAX_WAIT_S, time.monotonic()), time.monotonic)
        except BaseException:
            connection.end(ConnectionLost("interrupted while connecting"))
            raise
        if connection.error is not None:
            raise connection.error

    # --- single forms --------------------------------------------------------------------------

    def load(
        self,
        block: BlockRef | Handle,
        into: object,
        *,
        generation: Generation = 0,
        allow_unsealed: bool = False,
        mode: Mode = "request",
        timeout_s: float | None = None,
    ) -> int:
        """LOAD (draft 6.1): place the block at the start of `into`; returns its octets.

        With a `BlockRef` or a `generation` the block is that very binding or the call raises
        `GenerationMismatch`. `allow_unsealed` permits to read a block that its owner may be storing to at the
        same time: what comes may then be a mixture.

        `mode="direct"` reads entry and block itself (draft 6.6) where DIRECT_LOAD was granted; what that cannot do is
        left to LOAD. Statuses are those of LOAD, but a handle of nobody's is NOT_BOUND, and octets of `into` that are
        not part of what was loaded may have changed. It is not ordered with requests that are still outstanding.
        """
        direct = mode != "request" and self._is_direct(mode, Feature.DIRECT_LOAD)
        return self._one(Opcode.LOAD, loading(allow_unsealed), generation, block, into, timeout_s, direct)[2]

    def store(
        self,
        block: BlockRef | Handle,
        data: object,
        *,
        generation: Generation = 0,
        seal: bool = True,
        timeout_s: float | None = None,
    ) -> BlockRef:
        """STORE (draft 6.2): replace the contents of an unsealed block of ours. `seal=False` keeps it open for more."""
        return _ref(self._one(Opcode.STORE, sealing(seal), generation, block, data, timeout_s))

    def alloc_store(
        self,
        data: object,
        *,
        handle: Handle | None = None,
        seal: bool = True,
        mode: Mode = "request",
        timeout_s: float | None = None,
    ) -> BlockRef:
        """ALLOC_STORE (draft 6.3): store `data` in a new block under `handle`, or under a free handle of ours.

        `mode="direct"` takes the block itself and binds it with BIND (draft 6.6) where DIRECT_ALLOC was granted.
        """
        direct = mode != "request" and self._is_direct(mode, Feature.DIRECT_ALLOC)
        return _ref(self._one(Opcode.ALLOC_STORE, sealing(seal), 0, handle, data, timeout_s, direct))

    def free(self, block: BlockRef | Handle, *, generation: Generation = 0, timeout_s: float | None = None) -> None:
        """FREE (draft 6.4): unbind the handle and give the block back."""
        self._one(Opcode.FREE, RequestFlag.NONE, generation, block, None, timeout_s)

    # --- batch forms ---------------------------------------------------------------------------

    def load_many(
        self,
        blocks: Sequence[BlockRef | Handle],
        into: Sequence[object],
        *,
        allow_unsealed: bool = False,
        mode: Mode = "request",
        checksums: bool = False,
        meanwhile: Callable[[], None] | None = None,
        timeout_s: float | None = None,
    ) -> Results:
        """LOAD each of `blocks` into the buffer at its place in `into`; one `Result` an item, in order.

        No batch form raises for what becomes of an item: not for a refusal, a buffer that cannot be used or a lost
        connection. All of them raise `ApiMisuse` if their arguments are not equally many, or for a mode that was not
        granted. A load into memory that an
        earlier one of the batch, or one still outstanding, goes to is refused: both would be told SUCCESS.

        With `checksums`, `Results.checksums` has the CRC32c of what was moved where the RNIC knows it. `meanwhile` is
        called once the requests are on their way, with the session locked: what it raises ends the session.
        """
        direct = self._is_direct(mode, Feature.DIRECT_LOAD)
        return self._many(load_batch(blocks, into, allow_unsealed, direct, checksums, meanwhile), timeout_s)

    def store_many(
        self,
        blocks: Sequence[BlockRef | Handle],
        data: Sequence[object],
        *,
        seal: bool = True,
        timeout_s: float | None = None,
    ) -> Results:
        """STORE each of `data` to the block at its place in `blocks`; one `Result` an item."""
        return self._many(store_batch(blocks, data, seal), timeout_s)

    def alloc_store_many(
        self,
        data: Sequence[object],
        *,
        handles: Sequence[Handle] | None = None,
        seal: bool = True,
        mode: Mode = "request",
        checksums: bool = False,
        timeout_s: float | None = None,
    ) -> Results:
        """ALLOC_STORE each of `data`, under `handles` or free handles of ours; one `Result` an item."""
        direct = self._is_direct(mode, Feature.DIRECT_ALLOC)
        return self._many(alloc_store_batch(data, handles, seal, direct, checksums), timeout_s)

    def free_many(self, blocks: Sequence[BlockRef | Handle], *, timeout_s: float | None = None) -> Results:
        """FREE each of `blocks`; one `Result` an item."""
        return self._many(free_batch(blocks), timeout_s)

    # --- memory and life -----------------------------------------------------------------------

    def register(self, buffer: object) -> MemoryRegion:
        """Register `buffer` for as long as the session lasts or until the region's `revoke`.

        The target can read it, and write it if it is writable, for the whole time: give it nothing else to see.
        """
        with self._lock:
            return self._connection.register(buffer)

    def close(self) -> None:
        """End the session in order. Idempotent. Blocks of an anonymous initiator are freed by it (profile 3)."""
        with self._lock:
            try:
                self._connection.begin_disconnect()
                deadline_s = time.monotonic() + limits.CLOSE_S
                while self._connection.error is None and (now_s := time.monotonic()) < deadline_s:
                    self._connection.pump(self._connection.wait_s(deadline_s - now_s, now_s), time.monotonic)
            finally:
                self._connection.end(ConnectionLost("the client was closed"))

    def __enter__(self) -> Client:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # --- waiting -------------------------------------------------------------------------------

    def _one(
        self,
        opcode: Opcode,
        flags: RequestFlag,
        generation: Generation,
        block: BlockRef | Handle | None,
        buffer: object,
        timeout_s: float | None,
        direct: bool = False,
    ) -> Record:
        limit_s = self._timeout_s if timeout_s is None else timeout_s
        with self._lock:
            try:
                record, error = self._connection.run_one(
                    opcode, flags, generation, block, buffer, limit_s, time.monotonic, direct=direct
                )
            except BaseException:
                self._interrupted()
                raise
        if error is not None:
            raise error
        status, _, length_bytes, handle, _ = record
        if status:
            raise refused(Status(status), advice(Status(status), handle, length_bytes))
        return record

    def _many(self, batch: Batch, timeout_s: float | None) -> Results:
        limit_s = self._timeout_s if timeout_s is None else timeout_s
        with self._lock:
            try:
                return self._connection.run(batch, limit_s, time.monotonic)
            except BaseException:
                self._interrupted()
                raise

    def _interrupted(self) -> None:
        # The buffers are the caller's again when the call ends, so nothing may still be under way.
        self._connection.end(ConnectionLost("interrupted while operations were outstanding"))


def _ref(record: Record) -> BlockRef:
    _, generation, length_bytes, handle, _ = record
    return BlockRef(handle, generation, length_bytes)
