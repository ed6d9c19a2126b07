"""Takes the steps of direct loads and direct allocations on one stream: reads, FetchAdds, RDMA Writes and BINDs.

What is next is for `direct_load.py` and `direct_alloc.py` to say. This shares the stream between them:

- No more RDMA Reads and FetchAdds are posted than the stream may have outstanding; the next one of a sequence goes
  before the first one of another.
- Loads are begun as far as their blocks arrive in the time that a direct load has (profile 6.3).
- Tickets are taken within the quota (draft 3.4) and no more than there are credits to bind them with. Only the holder
  of the oldest unbound ticket waits for its slot (profile 6.11).
"""

from __future__ import annotations

import logging
from collections import deque
from dataclasses import dataclass
from functools import partial
from typing import TypeAlias

from kbtp.errors import ApiMisuse, ConnectionLost, TicketAbandoned
from kbtp.initiator.direct import (
    BindSpare,
    BindTaken,
    DirectTerms,
    Ended,
    FreeSpare,
    ReadBlock,
    ReadStep,
    ReadStructure,
    Step,
    TakeTicket,
    UseRequest,
    Wait,
)
from kbtp.initiator.direct_alloc import DirectAlloc
from kbtp.initiator.direct_load import DirectLoad
from kbtp.initiator.lent_memory import Lent, LentMemory
from kbtp.initiator.operations import Operation, Result
from kbtp.initiator.session import InitiatorSession
from kbtp.limits import DIRECT_LOAD_WINDOW_BYTES, ENTRY_BYTES
from kbtp.types import Opcode, RequestFlag
from kbtp.verbs.api import (
    Access,
    FetchAdd,
    ProtectionDomain,
    RdmaRead,
    RdmaWrite,
    Rnic,
    Sge,
    Stream,
    WcOpcode,
    WcStatus,
    WorkCompletion,
    WorkRequest,
)
from kbtp.verbs.buffers import RegisteredBuffer, buffer_of

log = logging.getLogger("kbtp.initiator")

_Read: TypeAlias = RdmaRead | FetchAdd

_STRUCTURE_BYTES = ENTRY_BYTES  # a ring slot has as many


@dataclass(slots=True, eq=False)
class _Flow:
    """An operation in a direct mode."""

    operation: Operation
    sequence: DirectLoad | DirectAlloc
    buffer: RegisteredBuffer | None
    """None: there are no octets."""
    step: Step | None = None
    """None: not begun."""
    lent: Lent | None = None
    written: bool = False
    """The RDMA Write of its data is posted."""
    leaving: bool = False
    """That Write has not left the caller's memory yet."""
    bind_result: Result | None = None
    """What became of BIND, until the flow goes on with it."""

    @property
    def awaits_slot(self) -> bool:
        """It has asked for a ticket, and BIND is not due yet."""
        return isinstance(self.step, TakeTicket | ReadStructure | Wait)


class DirectCarrier:
    """The direct modes of one session on one stream."""

    def __init__(
        self, session: InitiatorSession, stream: Stream, memory: LentMemory, rnic: Rnic, pd: ProtectionDomain
    ) -> None:
        self._session = session
        self._stream = stream
        self._memory = memory
        self._terms = DirectTerms(session.ack)
        self._structures = rnic.register(bytearray(_STRUCTURE_BYTES * stream.ord_), Access.NONE, pd=pd, stream=stream)
        self._idle_reads = list(range(stream.ord_))
        """Each a place in `_structures`, and the wr_id of what is posted."""
        self._posted: dict[int, tuple[_Flow, ReadStep]] = {}
        self._completed: list[WorkCompletion] = []
        self._loads_max = max(1, min(stream.ord_, DIRECT_LOAD_WINDOW_BYTES // session.ack.block_size))
        self._new_loads: deque[_Flow] = deque()
        self._new_allocs: deque[_Flow] = deque()
        self._going_on: deque[_Flow] = deque()
        """Begun, and a read or FetchAdd is next."""
        self._loads: set[_Flow] = set()
        self._allocs: dict[_Flow, None] = {}
        """Begun and not resolved, in the order of their tickets."""
        self._binds: dict[Operation, _Flow] = {}
        self._writes: dict[int, _Flow] = {}
        """By their wr_id, which is the Request ID of the BIND they were posted with."""

    # --- from the session's carrier ------------------------------------------------------------

    def submit(self, operation: Operation) -> None:
        """Queue a LOAD or ALLOC_STORE to be done in a direct mode."""
        if operation.opcode is Opcode.ALLOC_STORE and self._session.direct_alloc_is_over:
            self._session.submit(operation)
            return
        is_load = operation.opcode is Opcode.LOAD
        try:
            buffer = None if operation.is_empty else buffer_of(operation.buffer)
            if is_load and buffer is not None and not buffer.writable:
                raise ApiMisuse("a block is loaded into writable memory; this buffer is read-only")
        except ApiMisuse as error:
            operation.finish(Result(None, operation.handle or 0, error=error))
            return
        (self._new_loads if is_load else self._new_allocs).append(self._flow(operation, buffer))

    def _flow(self, operation: Operation, buffer: RegisteredBuffer | None) -> _Flow:
        size = 0 if buffer is None else len(buffer.view)
        if operation.opcode is not Opcode.LOAD:
            return _Flow(operation, DirectAlloc(self._terms, operation.handle, size), buffer)
        assert operation.handle is not None
        allow_unsealed = bool(operation.flags & RequestFlag.ALLOW_UNSEALED)
        load = DirectLoad(self._terms, operation.handle, operation.generation, size, allow_unsealed=allow_unsealed)
        return _Flow(operation, load, buffer)

    def note(self, completion: WorkCompletion) -> None:
        """Keep the end of a read, FetchAdd or Write for `advance`."""
        if completion.opcode in (WcOpcode.RDMA_READ, WcOpcode.ATOMIC, WcOpcode.RDMA_WRITE):
            self._completed.append(completion)

    def due_s(self) -> float | None:
        """When the next ticket runs out, or the next slot is to be read again."""
        times = [
            flow.sequence.deadline_s
            for flow in self._allocs
            if flow.awaits_slot and isinstance(flow.sequence, DirectAlloc) and flow.sequence.deadline_s is not None
        ]
        oldest = next(iter(self._allocs), None)
        if oldest is not None and isinstance(oldest.step, Wait):
            times.append(oldest.step.until_s)
        return min(times, default=None)

    def advance(self, now_s: float) -> None:
        """Go on with what has completed or is due, as far as the next posts. Raises `PeerMisbehaved`."""
        completed, self._completed = self._completed, []
        for completion in completed:
            if completion.opcode is WcOpcode.RDMA_WRITE:
                self._write_left(completion.wr_id)
            else:
                self._take(completion, now_s)
        self._look_after_tickets(now_s)

    def data_of(self, bind: Operation, now_s: float) -> list[WorkRequest]:
        """What goes out before `bind`, which has its credit now. Raises `TicketAbandoned` if its time is over."""
        flow = self._binds[bind]
        assert isinstance(flow.sequence, DirectAlloc)
        no_more_writes = self._session.direct_alloc_is_over and not flow.written and bind.length_bytes
        if flow.sequence.ran_out(now_s) or no_more_writes:
            raise TicketAbandoned("the ticket ran out before its BIND could be sent")
        if flow.written or not bind.length_bytes:
            return []
        assert bind.taken is not None
        source = self._piece(flow, bind.length_bytes)
        flow.written = flow.leaving = True
        self._writes[bind.request_id] = flow
        return [RdmaWrite(bind.request_id, (source,), self._terms.ack.partition_stag, bind.taken.block_offset)]

    def fail(self, error: ConnectionLost) -> None:
        """The stream has ended: everything begun or queued ends with `error`."""
        flows = [*self._loads, *self._allocs, *self._new_loads, *self._new_allocs]
        self._loads.clear()
        self._allocs.clear()
        self._new_loads.clear()
        self._new_allocs.clear()
        for flow in flows:
            result = Result(None, flow.operation.handle or 0, error=error)
            flow.step = Ended(result)
            flow.operation.finish(result)

    # --- reads and FetchAdds -------------------------------------------------------------------

    def post_reads(self, now_s: float) -> None:
        """Post what the stream may have outstanding."""
        while posts := self._readers_posts(now_s):
            try:
                self._stream.post(posts)
            except ApiMisuse:
                self._post_one_by_one(posts)
            except ConnectionLost:
                return  # its StreamEnded says why, and fails what was just given out

    def _readers_posts(self, now_s: float) -> list[_Read]:
        posts: list[_Read] = []
        while self._idle_reads and (reader := self._next_reader()) is not None:
            flow, step = reader
            try:
                post = self._work_request(flow, step, self._idle_reads[-1])
            except ApiMisuse as error:
                self._misused(flow, error)
                continue
            flow.sequence.posted(now_s)
            self._posted[self._idle_reads.pop()] = flow, step
            posts.append(post)
        return posts

    def _post_one_by_one(self, posts: list[_Read]) -> None:
        """What another thread of the caller's has revoked meanwhile is misuse of its own flow alone."""
        for post in posts:
            try:
                self._stream.post([post])
            except ApiMisuse as error:
                flow, _ = self._posted.pop(post.wr_id)
                self._idle_reads.append(post.wr_id)
                self._misused(flow, error)
            except ConnectionLost:
                return  # as in `post_reads`, whose next post finds it too

    def _misused(self, flow: _Flow, error: ApiMisuse) -> None:
        self._act(flow, Ended(Result(None, flow.operation.handle or 0, error=error)))

    def _next_reader(self) -> tuple[_Flow, ReadStep] | None:
        """A flow that has a read or FetchAdd to post."""
        while True:
            if self._going_on:
                flow = self._going_on.popleft()
                if isinstance(flow.step, ReadStep):
                    return flow, flow.step
            elif self._new_allocs and len(self._allocs) < self._session.ack.request_credits:
                self._begin_alloc(self._new_allocs.popleft())
            elif self._new_loads and len(self._loads) < self._loads_max:
                self._begin_load(self._new_loads.popleft())
            else:
                return None

    def _work_request(self, flow: _Flow, step: ReadStep, place: int) -> _Read:
        match step:
            case TakeTicket(stag, to, add_data, add_mask):
                return FetchAdd(place, stag, to, add_data, add_mask)
            case ReadBlock(stag, to, length_bytes):
                return RdmaRead(place, self._piece(flow, length_bytes), stag, to)
            case ReadStructure(stag, to):
                sink = Sge(self._structures, _STRUCTURE_BYTES * place, _STRUCTURE_BYTES)
                return RdmaRead(place, sink, stag, to)

    def _piece(self, flow: _Flow, length_bytes: int) -> Sge:
        """The first octets of the caller's buffer. The target needs no right to them: the reads and writes are ours."""
        assert flow.buffer is not None
        if flow.lent is None or not flow.lent.region.valid:
            sink = flow.operation.opcode is Opcode.LOAD
            flow.lent = self._memory.lend(flow.operation, flow.buffer, Access.NONE, sink=sink)
        return Sge(flow.lent.region, flow.lent.offset, length_bytes)

    def _take(self, completion: WorkCompletion, now_s: float) -> None:
        place = completion.wr_id
        flow, step = self._posted.pop(place)
        self._idle_reads.append(place)
        if completion.status is not WcStatus.SUCCESS or flow.step is not step:
            return
        start = _STRUCTURE_BYTES * place
        octets = bytes(self._structures.view[start : start + _STRUCTURE_BYTES])
        self._act(flow, flow.sequence.completed(octets, completion.value, now_s))

    # --- steps ---------------------------------------------------------------------------------

    def _begin_load(self, flow: _Flow) -> None:
        self._loads.add(flow)
        step = flow.sequence.begin()
        if flow.buffer is not None:
            try:
                self._memory.claim(flow.operation, flow.buffer)
            except ApiMisuse as error:
                self._misused(flow, error)
                return
        self._act(flow, step)

    def _begin_alloc(self, flow: _Flow) -> None:
        """A ticket is taken only for what can be bound: there is memory to write from, a handle and quota."""
        self._allocs[flow] = None
        step = flow.sequence.begin()
        operation = flow.operation
        if isinstance(step, TakeTicket):
            try:
                if flow.buffer is not None:
                    self._piece(flow, len(flow.buffer.view))
                if not (self._session.reserve_handle(operation) and self._session.reserve_block()):
                    step = UseRequest()
            except ApiMisuse as error:
                self._misused(flow, error)
                return
        self._act(flow, step)

    def _act(self, flow: _Flow, step: Step) -> None:
        flow.step = step
        match step:
            case TakeTicket() | ReadStructure() | ReadBlock():
                self._going_on.append(flow)
            case BindTaken() | BindSpare():
                self._bind(flow, step)
            case FreeSpare(handle, generation):
                freed = Operation(Opcode.FREE, handle, generation, when_done=partial(self._freed, flow))
                self._session.submit(freed)
            case Ended(result, direct_alloc_is_over):
                self._leave(flow)
                flow.operation.finish(result)
                if direct_alloc_is_over:
                    self._end_direct_alloc()
            case UseRequest(direct_alloc_is_over):
                self._leave(flow)
                self._session.submit(flow.operation)
                if direct_alloc_is_over:
                    self._end_direct_alloc()

    def _leave(self, flow: _Flow) -> None:
        self._loads.discard(flow)
        self._allocs.pop(flow, None)
        self._memory.release(flow.operation)

    def _bind(self, flow: _Flow, step: BindTaken | BindSpare) -> None:
        operation = flow.operation
        bind = Operation(Opcode.BIND, None, taken=step.taken, when_done=partial(self._bound, flow))
        if isinstance(step, BindTaken):
            bind.handle, bind.reserved_handle = operation.handle, operation.reserved_handle
            bind.flags = operation.flags & RequestFlag.SEAL
            bind.length_bytes = 0 if flow.buffer is None else len(flow.buffer.view)
            operation.reserved_handle = None
        self._binds[bind] = flow
        self._session.submit(bind)

    def _bound(self, flow: _Flow, bind: Operation) -> None:
        del self._binds[bind]
        assert bind.result is not None
        flow.bind_result = bind.result
        if bind.result.status is None and self._writes.pop(bind.request_id, None) is not None:
            flow.leaving = False  # BIND was not posted, nor was its Write
        self._go_on_from_bind(flow)

    def _write_left(self, wr_id: int) -> None:
        flow = self._writes.pop(wr_id)
        flow.leaving = False
        self._go_on_from_bind(flow)

    def _go_on_from_bind(self, flow: _Flow) -> None:
        """A peer can answer BIND too early. While the Write leaves, its memory must not be the caller's again."""
        result = flow.bind_result
        if result is not None and not flow.leaving and isinstance(flow.step, BindTaken | BindSpare):
            assert isinstance(flow.sequence, DirectAlloc)
            flow.bind_result = None
            self._act(flow, flow.sequence.answered(result, flow.step.taken))

    def _freed(self, flow: _Flow, _free: Operation) -> None:
        if isinstance(flow.step, FreeSpare):
            assert isinstance(flow.sequence, DirectAlloc)
            self._act(flow, flow.sequence.freed())

    # --- tickets -------------------------------------------------------------------------------

    def _look_after_tickets(self, now_s: float) -> None:
        for flow in self._allocs:
            if flow.awaits_slot and isinstance(flow.sequence, DirectAlloc) and flow.sequence.ran_out(now_s):
                self._end_direct_alloc()
                break
        oldest = next(iter(self._allocs), None)
        if oldest is not None and isinstance(oldest.step, Wait) and oldest.step.until_s <= now_s:
            assert isinstance(oldest.sequence, DirectAlloc)
            self._act(oldest, oldest.sequence.waited())

    def _end_direct_alloc(self) -> None:
        """Profile 6.11: a ticket ran out. No FetchAdd and no RDMA Write from here on; ALLOC_STORE does the rest."""
        if self._session.direct_alloc_is_over:
            return
        self._session.direct_alloc_is_over = True
        log.warning("a ticket ran out: blocks are allocated by ALLOC_STORE for the rest of the session")
        new_allocs, self._new_allocs = self._new_allocs, deque()
        for flow in [*self._allocs, *new_allocs]:
            if flow.step is None or flow.awaits_slot:
                self._act(flow, UseRequest())
