"""The sequences of the draft's section 6, as a target executes them.

| operation | draft | steps here |
|---|---|---|
| LOAD | 6.1 | pin, RDMA Write + completion, unpin when the Write has left the block |
| STORE | 6.2 | RDMA Read into staging (or inline), copy and update the entry, completion |
| ALLOC_STORE | 6.3 | quota, block from the ring, RDMA Read into it (or inline), bind, completion |
| FREE | 6.4 | clear the entry, wait for pins, clear, back to the ring, completion |
| BIND | 6.6 | quota, ticket and slot, bind, completion |

A sequence decides; what it wants done on the stream goes through `SequencePort`. Each either
completes or, when its stream ends first, leaves the block structures as if it had not begun (profile 8.9).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from kbtp.blocks import Entry
from kbtp.blocks.owner import BlockOwner, LoadPin
from kbtp.errors import PeerMisbehaved
from kbtp.target.actions import SessionMemory
from kbtp.target.checks import TargetRequest, refusal
from kbtp.target.identity import Identities, Identity
from kbtp.target.tickets import Tickets
from kbtp.types import RequestFlag, Status
from kbtp.verbs.api import MemoryRegion, Sge
from kbtp.wire import AllocStore, Bind, Free, Load, Store


@dataclass(slots=True, eq=False)
class Task:
    """One request on its way through its sequence."""

    request: TargetRequest
    slot: int
    """Which receive buffer holds it; the inline data stays there until the completion."""
    started: bool = False
    pin: LoadPin | None = None
    block_offset: int | None = None
    """The block an ALLOC_STORE took from the ring and has not bound yet."""
    staging: MemoryRegion | None = None
    """Where the data of a STORE arrives before it is copied as a whole (profile 6.5)."""

    @property
    def mutates(self) -> bool:
        return not isinstance(self.request, Load)


class SequencePort(Protocol):
    """What a sequence asks of its session."""

    def write(self, task: Task, sge: Sge) -> None:
        """RDMA Write to the task's Data Descriptor; `Sequences.written` follows."""
        ...

    def read(self, task: Task, sink: Sge) -> None:
        """RDMA Read from the task's Data Descriptor, when a read slot is free; `Sequences.fetched` follows."""
        ...

    def complete(self, task: Task, status: Status, entry: Entry | None, *, data: bool = False) -> None:
        """Send the COMPLETION: `entry` gives the Generation and, with `data`, Data Length and Block Offset."""
        ...

    def resolve(self, task: Task) -> None:
        """The request is wholly done or not done: the next one on its handle may start."""
        ...

    def misbehaved(self, error: PeerMisbehaved) -> None:
        """The initiator broke the rules of direct modes: its stream ends."""
        ...

    def fail(self, error: Exception) -> None:
        """A fault of this side's, found where another session's events are acted on: this one's stream ends."""
        ...

    def watch_free(self, block_offset: int) -> None:
        """A FREE waits for pins on this block: see that the readers drain (profile 6.1)."""
        ...

    def free_done(self, block_offset: int) -> None:
        """A FREE has returned this block, whether or not it had to wait."""
        ...


class Sequences:
    """Executes the requests of one session."""

    def __init__(
        self,
        store: BlockOwner,
        identities: Identities,
        identity: Identity,
        memory: SessionMemory,
        port: SequencePort,
        reader: object,
        tickets: Tickets | None = None,
    ) -> None:
        """`reader` is who holds the pins of this session's LOADs. `tickets`: with DIRECT_ALLOC."""
        self._store = store
        self._identities = identities
        self._identity = identity
        self._memory = memory
        self._port = port
        self._reader = reader
        self._tickets = tickets

    def start(self, task: Task) -> None:
        """Run `task` up to its first wait or its end."""
        task.started = True
        while not self._started(task):
            pass  # a block of another session was freed between the checks and the pin: checked anew

    def _started(self, task: Task) -> bool:
        """False if nothing was done because the entry that was judged has changed meanwhile, which only an RNIC that
        executes sequences can do, and only to a LOAD."""
        request = task.request
        entry = self._entry(request)
        status = refusal(request, entry, self._store.pool.block_size_bytes)
        if status is not None:
            # profile 2: LENGTH_ERROR of a LOAD says how large a buffer it takes.
            self._finish(task, status, entry, data=status is Status.LENGTH_ERROR and isinstance(request, Load))
        elif isinstance(request, Load):
            assert entry is not None
            return self._load(task, entry)
        elif isinstance(request, Store):
            self._store_mapped(task, request)
        elif isinstance(request, AllocStore):
            self._store_unmapped(task, request)
        elif isinstance(request, Bind):
            self._bind(task, request)
        else:
            self._free(task, request)
        return True

    def _entry(self, request: TargetRequest) -> Entry | None:
        """The entry `request` may touch, None if its handle is out of range (profile 1, HANDLE_OUT_OF_RANGE)."""
        if isinstance(request, Load):
            allowed = self._store.domain_of(request.handle) == self._identity.domain
        else:
            allowed = self._identity.handles.contains(request.handle)
        return self._store.read(request.handle) if allowed else None

    def _load(self, task: Task, entry: Entry) -> bool:
        pin = self._store.begin_load_of(task.request.handle, entry, self._reader)  # draft 6.1 step 1, profile 6.1
        if pin is None:
            return False
        task.pin = pin
        if pin.data_length:  # profile 6.6: an empty block moves nothing
            position = self._store.pool.position(pin.block_offset)
            self._port.write(task, Sge(self._memory.pool, position, pin.data_length))  # draft 6.1 step 2
        # The Send is posted behind the Write, so its delivery says the data is there (RFC 5040 5.5 rule 5).
        self._port.complete(task, Status.SUCCESS, entry, data=True)  # draft 6.1 step 3
        if not pin.data_length:
            self.written(task)
        return True

    def written(self, task: Task) -> None:
        """The last octet of a LOAD has left the block, or never will."""
        self._unpin(task)
        self._port.resolve(task)

    def _unpin(self, task: Task) -> None:
        pin, task.pin = task.pin, None
        if pin is not None:
            self._store.end_load(pin)

    def _store_mapped(self, task: Task, request: Store) -> None:
        if request.flags & RequestFlag.INLINE:  # draft 6.2 step 2
            self._commit_store(task, request, request.inline_data)
        elif request.data.length == 0:  # profile 6.6: truncates
            self._commit_store(task, request, b"")
        else:
            try:
                task.staging = self._memory.allocate(request.data.length)
            except MemoryError:
                self._finish(task, Status.TARGET_ERROR, self._store.read(request.handle))
                return
            self._port.read(task, Sge(task.staging, 0, request.data.length))

    def _commit_store(self, task: Task, request: Store, data: bytes | memoryview) -> None:
        entry = self._store.commit_store(request.handle, data, bool(request.flags & RequestFlag.SEAL))  # 6.2 step 3
        self._drop_staging(task)
        self._finish(task, Status.SUCCESS, entry, data=True)  # draft 6.2 step 4

    def _store_unmapped(self, task: Task, request: AllocStore) -> None:
        if self._tickets is not None and self._tickets.head_is_the_devices:
            self._finish(task, Status.TARGET_ERROR, self._store.read(request.handle))
            return
        block_offset = self._store.begin_alloc_store(request.handle, self._identity)  # draft 6.3 step 2
        if isinstance(block_offset, Status):
            self._finish(task, block_offset, self._store.read(request.handle))
            return
        task.block_offset = block_offset
        if request.flags & RequestFlag.INLINE:  # draft 6.3 step 3
            self._store.pool.view(block_offset, len(request.inline_data))[:] = request.inline_data
            self._commit_alloc_store(task, request)
        elif request.data.length == 0:
            self._commit_alloc_store(task, request)
        else:
            position = self._store.pool.position(block_offset)
            self._port.read(task, Sge(self._memory.pool, position, request.data.length))

    def _commit_alloc_store(self, task: Task, request: AllocStore) -> None:
        assert task.block_offset is not None
        seal = bool(request.flags & RequestFlag.SEAL)
        entry = self._store.commit_alloc_store(request.handle, task.block_offset, request.data.length, seal)  # step 4
        task.block_offset = None
        self._finish(task, Status.SUCCESS, entry, data=True)  # draft 6.3 step 5

    def fetched(self, task: Task) -> None:
        """The RDMA Read of a STORE or ALLOC_STORE has placed all of its data."""
        request = task.request
        if isinstance(request, Store):
            assert task.staging is not None
            self._commit_store(task, request, task.staging.view)
        elif isinstance(request, AllocStore):
            self._commit_alloc_store(task, request)

    def _free(self, task: Task, request: Free) -> None:
        block_offset = self._store.read(request.handle).block_offset

        def freed(entry: Entry) -> None:
            self._port.free_done(block_offset)
            self._identities.freed(self._identity)
            try:
                self._finish(task, Status.SUCCESS, entry)  # draft 6.4 step 4, profile 8.6
            except Exception as error:  # whoever let the last pin go must not be charged with it
                self._port.fail(error)

        if not self._store.begin_free(request.handle, self._identity, freed):
            self._port.watch_free(block_offset)

    def _bind(self, task: Task, request: Bind) -> None:
        assert self._tickets is not None  # else BIND is UNSUPPORTED
        try:
            bound = self._tickets.bind(request)
        except PeerMisbehaved as error:
            self._port.misbehaved(error)
            return
        if isinstance(bound, Status):
            self._finish(task, bound, self._store.read(request.handle))
        else:
            self._finish(task, Status.SUCCESS, bound, data=True)  # profile 8.6

    def abandon(self, task: Task) -> None:
        """The stream has ended: resolve `task` as not done, whatever it holds goes back (profile 6.5)."""
        self._unpin(task)
        self._drop_staging(task)
        block_offset, task.block_offset = task.block_offset, None
        if block_offset is not None:
            self._store.abort_alloc_store(task.request.handle, block_offset, self._identity)

    def _drop_staging(self, task: Task) -> None:
        staging, task.staging = task.staging, None
        if staging is not None:
            staging.revoke()

    def _finish(self, task: Task, status: Status, entry: Entry | None, *, data: bool = False) -> None:
        self._port.complete(task, status, entry, data=data)
        self._port.resolve(task)
