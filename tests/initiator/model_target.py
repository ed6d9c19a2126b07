"""A target in memory that direct modes reach: what is posted waits until it is told to execute or to deliver one thing.

Table, pool and ring are real ones. Both directions are queues, in order, as a stream is; between any two of their items
a test does what it likes.
"""

from __future__ import annotations

from collections import deque
from typing import Any

import numpy as np

from kbtp.blocks.counter import MaskedCounter, UnmaskedCounter
from kbtp.blocks.pool import Pool
from kbtp.blocks.ring import FreeBlockRing
from kbtp.blocks.table import BlockTable
from kbtp.errors import ApiMisuse, ConnectionLost
from kbtp.initiator.session import InitiatorConfig, InitiatorSession
from kbtp.initiator.session_carrier import SessionCarrier
from kbtp.types import Feature, Opcode, RequestFlag, Status
from kbtp.verbs.api import FetchAdd, RdmaRead, RdmaWrite, Send, WcOpcode, WcStatus, WorkCompletion
from kbtp.verbs.buffers import buffer_of
from kbtp.wire import Completion, parse_request
from tests.initiator.direct_acks import (
    BLOCK_BYTES,
    HEAD_STAG,
    PARTITION_STAG,
    POOL_BASE,
    POOL_BLOCKS,
    POOL_STAG,
    RING_STAG,
    TABLE_BASE,
    TABLE_STAG,
    block,
    direct_ack,
)

TABLE_HANDLES = 64
OTHERS = TABLE_BASE + 32
"""First handle of another initiator's; its blocks are the first of the pool."""
PARTITION = range(8, 12)


class Region:
    """Registered memory, reached by its STag alone."""

    def __init__(self, buffer: object, stag: int, access: object) -> None:
        self.view, self.stag, self.access = buffer_of(buffer).view, stag, access
        self.base_to, self.length, self.valid = 0, len(self.view), True

    def revoke(self) -> None:
        self.valid = False


class ModelRnic:
    """Registers; nothing else is asked of it."""

    def __init__(self) -> None:
        self.regions: dict[int, Region] = {}
        self.refuses = False

    def register(self, buffer: object, access: object, **_: object) -> Region:
        if self.refuses:
            raise ApiMisuse("this memory cannot be registered")
        stag = 0x1000 + len(self.regions)
        self.regions[stag] = Region(buffer, stag, access)
        return self.regions[stag]


class ModelTarget:
    """The target, the stream to it, and the carrier under test at its other end."""

    def __init__(self, *, ord_: int = 4, **changes: Any) -> None:
        self.ack = direct_ack(**changes)
        self.table = BlockTable(np.zeros(2 * TABLE_HANDLES, np.uint64), TABLE_BASE, TABLE_HANDLES)
        self.table.initialize()
        self._memory = np.zeros(POOL_BLOCKS * BLOCK_BYTES, np.uint8)
        self.pool = Pool(self._memory, BLOCK_BYTES, POOL_BLOCKS, POOL_BASE)
        self._slots, self._head = np.zeros(8, np.uint64), np.zeros(1, np.uint64)
        masked = self.ack.granted_features & Feature.MASKED_ATOMICS
        form = MaskedCounter(2) if masked else UnmaskedCounter(2)
        blocks = [block(number) for number in PARTITION]
        self.ring = FreeBlockRing(self._slots, self._head, np.zeros(1, np.uint64), 2, blocks, form, 0xFFFF_FFFE)
        self.form = form
        self.taken: dict[int, bool] = {}
        """Tickets that are out; True: their slot was seen and was not ready."""
        self.mine: dict[int, int] = {}
        """The initiator's bound handles, and their blocks."""
        self.unpublished: list[tuple[int, int]] = []
        self.refusals: deque[Status] = deque()
        """What the next BINDs are refused with."""
        self.requests: list[Any] = []
        self.written: list[RdmaWrite] = []
        self.on_read: deque[Any] = deque()
        """Called one each before RDMA Reads are served."""
        self.wire: deque[Any] = deque()
        self.back: deque[Any] = deque()
        self.ord_ = ord_
        self.ended = False
        self.revoked_at_post: list[Region] = []
        """What another thread revokes just before it is posted."""
        self.now_s = 50.0
        self.rnic = ModelRnic()
        self.session = InitiatorSession(InitiatorConfig(direct=self.ack.granted_features & ~Feature(0x19)), self.ack)
        self.carrier = SessionCarrier(self.session, self, self.rnic, object())  # type: ignore[arg-type]

    # --- the stream ---

    def post(self, requests: list[Any]) -> None:
        if self.ended:
            raise ConnectionLost("the stream has ended")
        for request in requests:  # all or none
            for region in [request.sink.region] if isinstance(request, RdmaRead) else _sources(request):
                if region in self.revoked_at_post:
                    region.revoke()
                if not region.valid:
                    raise ApiMisuse("the region is revoked")
            if isinstance(request, RdmaRead) and request.sink.region.view.readonly:
                raise ApiMisuse("the sink must be writable memory")
        self.wire += requests
        reading = [one for one in (*self.wire, *self.back) if isinstance(one, RdmaRead | FetchAdd | WorkCompletion)]
        assert len(reading) <= self.ord_, "more reads and atomics than the stream may have outstanding"

    def execute(self) -> None:
        """The target takes the next item of the stream."""
        match self.wire.popleft():
            case RdmaRead() as read:
                if self.on_read:
                    self.on_read.popleft()()
                self.back.append((read, self._read(read)))
            case FetchAdd() as add:
                self.back.append((add, self._fetch_add(add)))
            case RdmaWrite() as write:
                self._write(write)
                self.back.append(write)
            case Send() as send:
                self._request(parse_request(send.inline))

    def deliver(self) -> None:
        """The initiator takes what comes next from the target."""
        match self.back.popleft():
            case bytes() as message:
                self.carrier.received(memoryview(message))
            case (RdmaRead() as read, bytes() as octets):
                read.sink.region.view[read.sink.offset : read.sink.offset + len(octets)] = octets
                self.carrier.completed(WorkCompletion(self, read.wr_id, WcOpcode.RDMA_READ, WcStatus.SUCCESS))  # type: ignore[arg-type]
            case (FetchAdd() as add, int() as value):
                done = WorkCompletion(self, add.wr_id, WcOpcode.ATOMIC, WcStatus.SUCCESS, value=value)  # type: ignore[arg-type]
                self.carrier.completed(done)
            case RdmaWrite() as write:
                self.carrier.completed(WorkCompletion(self, write.wr_id, WcOpcode.RDMA_WRITE, WcStatus.SUCCESS))  # type: ignore[arg-type]
        self.pass_time(0.0001)

    def pass_time(self, seconds: float) -> None:
        self.now_s += seconds
        self.carrier.advance(self.now_s)

    def settle(self) -> None:
        """Execute and deliver until nothing is under way and no timer runs."""
        while self.wire or self.back or self.carrier.due_s() is not None:
            if self.wire:
                self.execute()
            elif self.back:
                self.deliver()
            else:
                self.pass_time(max(0.0, (self.carrier.due_s() or 0.0) - self.now_s))

    # --- what the initiator reaches ---

    def _read(self, read: RdmaRead) -> bytes:
        if read.remote_stag == TABLE_STAG:
            at = read.remote_to - self.ack.table_offset
            return self.table.read(TABLE_BASE + at // 16).pack()
        if read.remote_stag == POOL_STAG:
            return bytes(self.pool.view(read.remote_to, read.sink.length))
        assert read.remote_stag == RING_STAG
        index = (read.remote_to - self.ack.ring_offset) // 16
        ticket = next(one for one in self.taken if one % 4 == index)
        older = list(self.taken)[: list(self.taken).index(ticket)]
        assert not (self.taken[ticket] and older), "it waits for a ticket and holds an older one"
        self.taken[ticket] = self.ring.read_slot(ticket) is None
        return self._slots[2 * index : 2 * index + 2].tobytes()

    def _fetch_add(self, add: FetchAdd) -> int:
        assert (add.remote_stag, add.remote_to) == (HEAD_STAG, self.ack.head_offset)
        assert (add.add_data, add.add_mask) == (self.form.add_data, self.form.add_mask)
        assert len(self.mine) + len(self.taken) < self.ack.allocation_quota, "beyond the quota"
        value = int(self._head[0])
        self.taken[self.ring.take_head_ticket()] = False
        return value

    def _write(self, write: RdmaWrite) -> None:
        assert write.remote_stag == PARTITION_STAG
        assert write.remote_to in [block(number) for number in PARTITION]
        self.written.append(write)
        (piece,) = write.sges
        assert piece.region.valid
        octets = piece.region.view[piece.offset : piece.offset + piece.length]
        self.pool.view(write.remote_to, piece.length)[:] = octets

    # --- requests ---

    def _request(self, request: Any) -> None:
        self.requests.append(request)
        handlers = {
            Opcode.LOAD: self._load, Opcode.ALLOC_STORE: self._alloc_store, Opcode.FREE: self._free,
            Opcode.BIND: self._bind,
        }  # fmt: skip
        status, length, block_offset = handlers[request.OPCODE](request)
        generation = self.table.read(request.handle).generation
        answer = Completion(
            request.request_id, request.handle, generation, status, data_length=length, block_offset=block_offset
        )
        self.back.append(answer.pack())

    def _load(self, request: Any) -> tuple[Status, int, int]:
        entry = self.table.read(request.handle)
        if not entry.valid:
            return Status.NOT_BOUND, 0, 0
        if request.generation not in (0, entry.generation):
            return Status.GENERATION_MISMATCH, 0, 0
        if request.data.length < entry.data_length:
            return Status.LENGTH_ERROR, entry.data_length, 0
        region = self.rnic.regions[request.data.stag]
        start = request.data.to
        region.view[start : start + entry.data_length] = self.pool.view(entry.block_offset, entry.data_length)
        return Status.SUCCESS, entry.data_length, entry.block_offset

    def _alloc_store(self, request: Any) -> tuple[Status, int, int]:
        length = request.data.length
        if not 0 <= request.handle - self.ack.first_handle < self.ack.handle_count:
            return Status.HANDLE_OUT_OF_RANGE, 0, 0
        if self.table.read(request.handle).valid:
            return Status.ALREADY_BOUND, 0, 0
        if length > self.ack.block_size:
            return Status.LENGTH_ERROR, 0, 0
        full = len(self.mine) + len(self.taken) >= self.ack.allocation_quota
        block_offset = None if full else self.ring.allocate()
        if block_offset is None:
            return Status.NO_SPACE, 0, 0
        self.pool.view(block_offset, length)[:] = request.inline_data
        return self._bound(request, block_offset, length)

    def _bound(self, request: Any, block_offset: int, length: int) -> tuple[Status, int, int]:
        self.table.bind(request.handle, block_offset, length, bool(request.flags & RequestFlag.SEAL))
        self.mine[request.handle] = block_offset
        return Status.SUCCESS, length, block_offset

    def _bind(self, request: Any) -> tuple[Status, int, int]:
        if self.refusals:
            return self.refusals.popleft(), 0, 0
        if self.table.read(request.handle).valid:
            return Status.ALREADY_BOUND, 0, 0
        if request.ticket not in self.taken or self.ring.read_slot(request.ticket) != request.block_offset:
            return Status.TICKET_MISMATCH, 0, 0
        self.ring.consume(request.ticket)
        del self.taken[request.ticket]
        return self._bound(request, request.block_offset, request.data_length)

    def _free(self, request: Any) -> tuple[Status, int, int]:
        if request.handle not in self.mine:
            return Status.NOT_BOUND, 0, 0
        self.table.unbind(request.handle)
        self.unpublished.append((self.ring.take_tail_ticket(), self.mine.pop(request.handle)))
        return Status.SUCCESS, 0, 0

    def publish(self) -> None:
        """The oldest free writes its slot, or is deferred on it."""
        if self.unpublished:
            self.ring.publish(*self.unpublished.pop(0))

    # --- the other initiator ---

    def rebind(self, handle: int, number: int) -> None:
        """The other initiator frees what the handle names, and stores other octets, maybe elsewhere."""
        if self.table.read(handle).valid:
            self.table.unbind(handle)
        self._memory[number * BLOCK_BYTES : (number + 1) * BLOCK_BYTES] = 0
        bound = self.table.bind(handle, block(number), 0, False)
        octets = contents(handle, bound.generation)
        self.pool.view(block(number), len(octets))[:] = octets
        self.table.update(handle, len(octets), True)


def _sources(request: Any) -> list[Any]:
    return [piece.region for piece in request.sges] if isinstance(request, RdmaWrite | Send) else []


def contents(handle: int, generation: int) -> bytes:
    """What the other initiator stores under this binding: it tells of itself."""
    return (f"{handle}/{generation};" * 40)[: 50 + 37 * (generation % 5)].encode()
