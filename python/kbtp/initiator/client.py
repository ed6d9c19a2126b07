"""The synchronous client: `kbtp.connect` gives one.

Deadlines: a call that runs out of time ends the session before it raises (profile 3: until the
completion or the end of the stream, buffer and credit are the target's). So no buffer changes
after the call has returned, whatever the target still sends.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from types import TracebackType

from kbtp import limits
from kbtp.address import Address
from kbtp.errors import ConnectionLost, DeadlineExceeded
from kbtp.initiator.connection import Connection
from kbtp.initiator.operations import (
    BlockRef,
    Operation,
    Result,
    alloc_store_batch,
    alloc_store_operation,
    free_batch,
    free_operation,
    load_batch,
    load_operation,
    store_batch,
    store_operation,
)
from kbtp.initiator.session import InitiatorConfig
from kbtp.initiator.view import SessionView
from kbtp.types import Generation, Handle
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
                connection.pump(self._wait_s(limits.MAX_WAIT_S), time.monotonic)
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
        timeout_s: float | None = None,
    ) -> int:
        """LOAD (draft 6.1): place the block at the start of `into`; returns its octets.

        With a `BlockRef` or a `generation` the block is that very binding or the call raises
        `GenerationMismatch`. `allow_unsealed` permits to read a block that its owner may be storing to at the
        same time: what comes may then be a mixture.
        """
        return self._one(load_operation(block, into, generation, allow_unsealed), timeout_s).length_bytes

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
        return self._one(store_operation(block, data, generation, seal), timeout_s).ref

    def alloc_store(
        self, data: object, *, handle: Handle | None = None, seal: bool = True, timeout_s: float | None = None
    ) -> BlockRef:
        """ALLOC_STORE (draft 6.3): store `data` in a new block under `handle`, or under a free handle of ours."""
        return self._one(alloc_store_operation(data, handle, seal), timeout_s).ref

    def free(self, block: BlockRef | Handle, *, generation: Generation = 0, timeout_s: float | None = None) -> None:
        """FREE (draft 6.4): unbind the handle and give the block back."""
        self._one(free_operation(block, generation), timeout_s)

    # --- batch forms ---------------------------------------------------------------------------

    def load_many(
        self,
        blocks: Sequence[BlockRef | Handle],
        into: Sequence[object],
        *,
        allow_unsealed: bool = False,
        timeout_s: float | None = None,
    ) -> list[Result]:
        """LOAD each of `blocks` into the buffer at its place in `into`; one `Result` an item, in order.

        No batch form raises for what becomes of an item: not for a refusal, a buffer that cannot be used or a lost
        connection. All of them raise `ApiMisuse` if their arguments are not equally many. A load into memory that an
        earlier one of the batch, or one still outstanding, goes to is refused: both would be told SUCCESS.
        """
        return self._many(load_batch(blocks, into, allow_unsealed), timeout_s)

    def store_many(
        self,
        blocks: Sequence[BlockRef | Handle],
        data: Sequence[object],
        *,
        seal: bool = True,
        timeout_s: float | None = None,
    ) -> list[Result]:
        """STORE each of `data` to the block at its place in `blocks`; one `Result` an item."""
        return self._many(store_batch(blocks, data, seal), timeout_s)

    def alloc_store_many(
        self,
        data: Sequence[object],
        *,
        handles: Sequence[Handle] | None = None,
        seal: bool = True,
        timeout_s: float | None = None,
    ) -> list[Result]:
        """ALLOC_STORE each of `data`, under `handles` or free handles of ours; one `Result` an item."""
        return self._many(alloc_store_batch(data, handles, seal), timeout_s)

    def free_many(self, blocks: Sequence[BlockRef | Handle], *, timeout_s: float | None = None) -> list[Result]:
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
                while self._connection.error is None and time.monotonic() < deadline_s:
                    self._connection.pump(self._wait_s(deadline_s - time.monotonic()), time.monotonic)
            finally:
                self._connection.end(ConnectionLost("the client was closed"))

    def __enter__(self) -> Client:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # --- waiting -------------------------------------------------------------------------------

    def _one(self, operation: Operation, timeout_s: float | None) -> Result:
        return self._many([operation], timeout_s)[0].raise_for_status()

    def _many(self, operations: list[Operation], timeout_s: float | None) -> list[Result]:
        limit_s = self._timeout_s if timeout_s is None else timeout_s
        deadline_s = time.monotonic() + limit_s
        with self._lock:
            try:
                self._connection.submit(operations)
                self._wait(operations, deadline_s, limit_s)
            except BaseException:
                # The buffers are the caller's again when this returns, so nothing may still be under way.
                self._connection.end(ConnectionLost("interrupted while operations were outstanding"))
                raise
        return [operation.result for operation in operations if operation.result is not None]

    def _wait(self, operations: list[Operation], deadline_s: float, limit_s: float) -> None:
        waiting = list(reversed(operations))
        while waiting:
            if waiting[-1].result is not None:
                waiting.pop()
                continue
            left_s = deadline_s - time.monotonic()
            if left_s <= 0:
                self._connection.end(deadline_exceeded(self._connection, limit_s))
                continue
            self._connection.pump(self._wait_s(left_s), time.monotonic)

    def _wait_s(self, left_s: float) -> float:
        """The least of what is left and what the connection's own timers allow."""
        own_s = self._connection.next_timeout_s(time.monotonic())
        return max(0.0, min(left_s, limits.MAX_WAIT_S if own_s is None else own_s))


def deadline_exceeded(connection: Connection, limit_s: float) -> DeadlineExceeded:
    return DeadlineExceeded(
        f"{connection.address} did not answer within {limit_s:g} s; the session was ended so that no buffer "
        "is touched later. Connect anew, with a longer timeout_s if the target is only slow"
    )
