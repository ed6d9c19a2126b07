"""The asyncio client: `kbtp.connect_async` gives one.

The event loop waits on the RNIC's file descriptor; there is no thread. Many tasks may have
operations outstanding at once. Deadlines are those of the synchronous client; a cancelled call ends
when its operation has, bounded by its deadline, because until then its buffer is the target's.
"""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import Sequence
from functools import partial
from types import TracebackType

from kbtp import limits
from kbtp.address import Address
from kbtp.errors import ConnectionLost, DeadlineExceeded
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
from kbtp.initiator.connection import Connection, deadline_exceeded
from kbtp.initiator.operations import Result
from kbtp.initiator.session import InitiatorConfig
from kbtp.initiator.view import Mode, SessionView
from kbtp.types import BlockRef, Feature, Generation, Handle, Opcode, RequestFlag
from kbtp.verbs.api import MemoryRegion, Rnic


class AsyncClient(SessionView):
    """A session with one target, for one event loop. The methods are those of `Client`, awaited."""

    def __init__(self, connection: Connection, timeout_s: float) -> None:
        super().__init__(connection)
        self._timeout_s = timeout_s
        self._loop = asyncio.get_running_loop()
        self._timer: asyncio.TimerHandle | None = None
        self._changed = asyncio.Event()
        connection.before_close = self._stop_watching
        if connection.error is None:
            self._loop.add_reader(connection.fileno(), self._pump)
            self._arm()

    @classmethod
    async def connect(
        cls, address: Address, config: InitiatorConfig, rnic: Rnic, *, timeout_s: float, connect_timeout_s: float
    ) -> AsyncClient:
        """Connects; raises as `Client` does. Names are resolved without blocking the loop."""
        deadline_s = time.monotonic() + connect_timeout_s
        addresses = await _resolve(address, connect_timeout_s)
        while True:
            resolved = addresses.pop(0)
            # One that does not answer must leave time for the others.
            share_s = (deadline_s - time.monotonic()) / (len(addresses) + 1)
            try:
                return await cls._open(resolved, config, rnic, timeout_s, share_s, connect_timeout_s)
            except ConnectionLost:
                if not addresses:
                    raise

    @classmethod
    async def _open(
        cls, address: Address, config: InitiatorConfig, rnic: Rnic, timeout_s: float, share_s: float, limit_s: float
    ) -> AsyncClient:
        connection = Connection(address, config, rnic, now_s=time.monotonic(), timeout_s=share_s, limit_s=limit_s)
        client = cls(connection, timeout_s)
        try:
            while not connection.opened and connection.error is None:
                await client._wait_for_change()
        except BaseException:
            connection.end(ConnectionLost("interrupted while connecting"))
            raise
        if connection.error is not None:
            raise connection.error
        return client

    # --- single forms --------------------------------------------------------------------------

    async def load(
        self,
        block: BlockRef | Handle,
        into: object,
        *,
        generation: Generation = 0,
        allow_unsealed: bool = False,
        mode: Mode = "request",
        timeout_s: float | None = None,
    ) -> int:
        """See `Client.load`."""
        direct = self._is_direct(mode, Feature.DIRECT_LOAD)
        batch = Batch(Opcode.LOAD, loading(allow_unsealed), (block,), (into,), generation, direct)
        return (await self._one(batch, timeout_s)).length_bytes

    async def store(
        self,
        block: BlockRef | Handle,
        data: object,
        *,
        generation: Generation = 0,
        seal: bool = True,
        timeout_s: float | None = None,
    ) -> BlockRef:
        """See `Client.store`."""
        return (await self._one(Batch(Opcode.STORE, sealing(seal), (block,), (data,), generation), timeout_s)).ref

    async def alloc_store(
        self,
        data: object,
        *,
        handle: Handle | None = None,
        seal: bool = True,
        mode: Mode = "request",
        timeout_s: float | None = None,
    ) -> BlockRef:
        """See `Client.alloc_store`."""
        direct = self._is_direct(mode, Feature.DIRECT_ALLOC)
        batch = Batch(Opcode.ALLOC_STORE, sealing(seal), (handle,), (data,), direct=direct)
        return (await self._one(batch, timeout_s)).ref

    async def free(
        self, block: BlockRef | Handle, *, generation: Generation = 0, timeout_s: float | None = None
    ) -> None:
        """See `Client.free`."""
        await self._one(Batch(Opcode.FREE, RequestFlag.NONE, (block,), None, generation), timeout_s)

    # --- batch forms ---------------------------------------------------------------------------

    async def load_many(
        self,
        blocks: Sequence[BlockRef | Handle],
        into: Sequence[object],
        *,
        allow_unsealed: bool = False,
        mode: Mode = "request",
        checksums: bool = False,
        timeout_s: float | None = None,
    ) -> Results:
        """See `Client.load_many`."""
        direct = self._is_direct(mode, Feature.DIRECT_LOAD)
        return await self._many(load_batch(blocks, into, allow_unsealed, direct, checksums), timeout_s)

    async def store_many(
        self,
        blocks: Sequence[BlockRef | Handle],
        data: Sequence[object],
        *,
        seal: bool = True,
        timeout_s: float | None = None,
    ) -> Results:
        """See `Client.store_many`."""
        return await self._many(store_batch(blocks, data, seal), timeout_s)

    async def alloc_store_many(
        self,
        data: Sequence[object],
        *,
        handles: Sequence[Handle] | None = None,
        seal: bool = True,
        mode: Mode = "request",
        checksums: bool = False,
        timeout_s: float | None = None,
    ) -> Results:
        """See `Client.alloc_store_many`."""
        direct = self._is_direct(mode, Feature.DIRECT_ALLOC)
        return await self._many(alloc_store_batch(data, handles, seal, direct, checksums), timeout_s)

    async def free_many(self, blocks: Sequence[BlockRef | Handle], *, timeout_s: float | None = None) -> Results:
        """See `Client.free_many`."""
        return await self._many(free_batch(blocks), timeout_s)

    # --- memory and life -----------------------------------------------------------------------

    def register(self, buffer: object) -> MemoryRegion:
        """See `Client.register`."""
        return self._connection.register(buffer)

    async def close(self) -> None:
        """End the session in order. Idempotent."""
        self._connection.begin_disconnect()
        closing = self._loop.call_later(limits.CLOSE_S, self._connection.end, ConnectionLost("the client was closed"))
        try:
            while self._connection.error is None:
                await self._wait_for_change()
        finally:
            closing.cancel()
            self._connection.end(ConnectionLost("the client was closed"))

    async def __aenter__(self) -> AsyncClient:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    # --- the event loop ------------------------------------------------------------------------

    def _pump(self) -> None:
        self._connection.pump(0, time.monotonic)
        self._changed.set()
        self._arm()

    def _arm(self) -> None:
        """Keep one timer set for what the connection's own deadlines need."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._connection.error is None:
            wait_s = self._connection.next_timeout_s(time.monotonic())
            if wait_s is not None:
                self._timer = self._loop.call_later(wait_s, self._pump)

    def _stop_watching(self) -> None:
        self._loop.remove_reader(self._connection.fileno())
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._changed.set()

    async def _wait_for_change(self) -> None:
        self._changed.clear()
        await self._changed.wait()

    async def _one(self, batch: Batch, timeout_s: float | None) -> Result:
        return (await self._many(batch, timeout_s))[0].raise_for_status()

    async def _many(self, batch: Batch, timeout_s: float | None) -> Results:
        limit_s = self._timeout_s if timeout_s is None else timeout_s
        done: asyncio.Future[None] = self._loop.create_future()
        batch.when_done = partial(_resolve_once, done)
        try:
            self._connection.submit(batch, time.monotonic())
        except BaseException:
            # Part of it may be under way, and the buffers are the caller's again when this call ends.
            self._connection.end(ConnectionLost("interrupted while operations were outstanding"))
            raise
        self._arm()
        expiry = self._loop.call_later(limit_s, self._expire, limit_s)
        cancelled: asyncio.CancelledError | None = None
        try:
            while not done.done():
                try:
                    await asyncio.shield(done)
                except asyncio.CancelledError as error:
                    cancelled = error
        finally:
            expiry.cancel()
        if cancelled is not None:
            raise cancelled
        assert batch.results is not None
        return batch.results

    def _expire(self, limit_s: float) -> None:
        self._connection.end(deadline_exceeded(self._connection.address, limit_s))


async def _resolve(address: Address, timeout_s: float) -> list[Address]:
    """The addresses of a host, best first. Raises `ConnectionLost`."""
    found = asyncio.get_running_loop().getaddrinfo(address.host, address.port, type=socket.SOCK_STREAM)
    try:
        results = await asyncio.wait_for(found, timeout_s)
    except (asyncio.TimeoutError, TimeoutError):  # one class from Python 3.11 on, where it is an OSError too
        raise DeadlineExceeded(f"cannot look up {address.host} within {timeout_s:g} s") from None
    except (OSError, UnicodeError) as error:  # a name that IDNA cannot encode is a UnicodeError
        raise ConnectionLost(f"cannot look up {address.host}: {error}: check the name") from error
    return [Address(host, address.port) for host in dict.fromkeys(str(result[4][0]) for result in results)]


def _resolve_once(done: asyncio.Future[None]) -> None:
    if not done.done():
        done.set_result(None)
