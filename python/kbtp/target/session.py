"""One initiator's session at the target: what happens from its first message to the end of its stream.

No I/O and no clock here: messages, work completions and the time come in, `Action`s go out.

| state | what may come | what it leads to |
|---|---|---|
| before HELLO | HELLO | HELLO_ACK; SUCCESS opens the session, anything else ends the stream (profile 8.1) |
| | any other request | one COMPLETION (NO_SESSION); the next one ends the stream (profile 8.2) |
| waiting | the end of the session that has its identity (profile 3) | as SUCCESS above |
| open | a request | checks, then its turn on its handle, its sequence, one COMPLETION |
| | a second HELLO | HELLO_ACK (NO_SESSION), then the stream ends |
| ended | | every request is resolved as wholly done or not done (profile 3) |
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kbtp import limits
from kbtp.blocks import Entry
from kbtp.errors import PeerMisbehaved, WireFormatError
from kbtp.keys import Key
from kbtp.target.actions import Abort, Action, Disconnect, Opened, Resolved, SessionMemory, Terminate
from kbtp.target.checks import TargetRequest, data_descriptor, granted, invalidated_stag
from kbtp.target.direct import DirectModes, offered_features
from kbtp.target.hello import (
    Trust,
    accepting,
    granted_features,
    packed,
    parse_hello,
    refusing,
    served_features,
    trust_of,
)
from kbtp.target.identity import Admission, Identity
from kbtp.target.sequences import Sequences, Task
from kbtp.target.tickets import Tickets
from kbtp.target.turns import Turns
from kbtp.types import Feature, Opcode, Status, TerminateCause, Ticket
from kbtp.verbs.api import (
    MemoryRegion,
    RdmaRead,
    RdmaWrite,
    RdmaWriteImmediate,
    Recv,
    Send,
    Sge,
    WcOpcode,
    WcStatus,
    WorkCompletion,
    WorkRequest,
)
from kbtp.wire import (
    Bind,
    CommonHeader,
    Completion,
    Hello,
    Nonces,
    parse_request,
)

if TYPE_CHECKING:
    from kbtp.target.target import Target

# What the wr_id of a Send or a completion record says; those of other RDMA Writes and Reads name their tasks.
_HELLO_ACK = 0
_COMPLETION = 1
_FIRST_TASK = 2


@dataclass(frozen=True, slots=True)
class _GrantedHello:
    """A HELLO that every check has passed."""

    hello: Hello
    octets: bytes
    trust: Trust
    offered: Feature
    """Direct modes that it may get."""
    receives: MemoryRegion
    credits: int


class Session:
    """Decides everything about one stream. `actions` is what the server has to do next, in order."""

    def __init__(
        self,
        target: Target,
        memory: SessionMemory,
        *,
        nonces: Nonces,
        read_depth: int,
        peer_read_depth: int,
        peer: str,
        now_s: float,
        offloads: bool,
    ) -> None:
        """`read_depth`: RDMA Reads this side may have outstanding, min(own ORD, the peer's IRD) (profile 3).
        `peer_read_depth`: RDMA Reads and atomics that the peer may have outstanding here.

        `offloads`: the RNIC executes sequences, and this sees only the requests that it leaves.
        """
        self._target = target
        self._offloads = offloads
        self._memory = memory
        self._nonces = nonces
        self._read_depth = read_depth
        self._peer_read_depth = peer_read_depth
        self.peer = peer
        self.name = ""
        self.actions: list[Action] = []
        self.identity: Identity | None = None
        self.key: Key | None = None
        """What it authenticated with (profile 4)."""
        self._waiting: _GrantedHello | None = None
        self.ended = False
        self._ending = False
        """Nothing more is started: the end is decided, in order or at once, or has begun."""
        self._ending_at_once = False
        """Its peer has no say any more in how long that takes."""
        self._draining = False
        self.features = Feature.NONE
        """What HELLO_ACK has granted."""
        self.tickets_in_rnic: Callable[[], Iterable[Ticket]] = tuple
        """Those of BINDs that came to an RNIC which executes sequences and are not resolved, also if this has them not
        yet."""
        self._direct: DirectModes | None = None
        self._receives: MemoryRegion | None = None
        self._sequences: Sequences | None = None
        self._refused_before_hello = False
        self._hello_deadline_s = now_s + target.config.hello_timeout_s
        self._next_wr_id = _FIRST_TASK
        self._completions_posted = 0
        self._completions_posted_max = limits.COMPLETIONS_POSTED_PER_CREDIT
        self._held_completions: deque[tuple[WorkRequest, int]] = deque()
        self._posted: dict[int, Task] = {}
        self._turns = Turns()
        self._advancing = False
        self._reads_posted = 0
        self._waiting_reads: deque[tuple[Task, Sge]] = deque()
        self._read_deadline_s = math.inf

    @property
    def outstanding(self) -> int:
        """Requests that are not resolved yet, and completions that wait for room in the send queue."""
        return len(self._turns) + len(self._held_completions)

    # --- what comes in -------------------------------------------------------------------------

    def received(self, completion: WorkCompletion, now_s: float) -> None:
        """A Send of the peer is in the receive buffer `completion.wr_id`."""
        if self._ending or self.ended or completion.status is WcStatus.FLUSHED:
            return
        slot = completion.wr_id
        region, size = self._receive_buffer()
        message = region.view[slot * size : slot * size + completion.length]
        if len(message) < limits.COMMON_HEADER_BYTES:  # profile 1, 8.5
            self._terminate(TerminateCause.RDMAP_UNSPECIFIED, f"message of {len(message)} octets has no common header")
            return
        header = CommonHeader.parse(message)
        if header.opcode == Opcode.HELLO:
            self._receive_hello(header, message, now_s)
        else:
            self._receive_request(header, message, slot)

    def completed(self, completion: WorkCompletion, now_s: float) -> None:
        """Something this session posted is done, or was flushed by the end of the stream."""
        if completion.opcode is WcOpcode.SEND or completion.wr_id == _COMPLETION:
            self._sent(completion)
            return
        task = self._posted.pop(completion.wr_id, None)
        if task is None or self._sequences is None:
            return
        if completion.opcode is WcOpcode.RDMA_READ:
            self._reads_posted -= 1
            self._read_deadline_s = now_s + self._target.config.drain_s if self._reads_posted else math.inf
        if completion.status is WcStatus.FLUSHED:
            self._ending = self._ending_at_once = True  # `end` follows and resolves everything
        elif completion.opcode is WcOpcode.RDMA_READ:
            self._sequences.fetched(task)
            self._post_reads()
        else:
            self._sequences.written(task)
        self._advance()

    def _sent(self, completion: WorkCompletion) -> None:
        if completion.wr_id == _COMPLETION and completion.status is WcStatus.SUCCESS:
            self._completions_posted -= 1
            self._post_completions()
            self._disconnect_if_drained()

    def end(self) -> None:
        """The stream has ended: nothing of the peer's can be placed any more (profile 3 "End of a stream")."""
        self.ended = True
        for task in list(self._turns):
            if self._sequences is not None:
                self._sequences.abandon(task)
        if self._direct is not None:
            self._direct.end()
        self._turns.clear()
        self._posted.clear()
        self._waiting_reads.clear()
        self._held_completions.clear()
        self.actions.clear()

    def tick(self, now_s: float) -> None:
        """End the stream if the peer let a deadline pass, also one that is ending in order."""
        if self._ending_at_once or self.ended:
            return
        if self._awaits_hello and self._hello_deadline_s <= now_s:  # profile 3, 8.2
            self.abort(f"no HELLO within {self._target.config.hello_timeout_s:g} s")
        elif self._read_deadline_s <= now_s:  # profile 8.8
            self.abort(f"an RDMA Read was not answered within {self._target.config.drain_s:g} s")
        elif self._tickets is not None and self._tickets.next_deadline_s() <= now_s:
            received = [task.request.ticket for task in self._turns if isinstance(task.request, Bind)]
            try:
                self._tickets.tick(now_s, [*received, *self.tickets_in_rnic()])
            except PeerMisbehaved as error:  # profile 6.9
                self.misbehaved(error)

    def next_deadline_s(self) -> float:
        if self._ending_at_once or self.ended:
            return math.inf
        if self._awaits_hello:
            return self._hello_deadline_s
        return min(self._read_deadline_s, self._tickets.next_deadline_s() if self._tickets is not None else math.inf)

    @property
    def _tickets(self) -> Tickets | None:
        return self._direct.tickets if self._direct is not None else None

    @property
    def _awaits_hello(self) -> bool:
        return self.identity is None and self._waiting is None and not self._ending

    def drain(self) -> None:
        """The target is going: finish what is outstanding, then end the stream in order."""
        self._draining = True
        self._disconnect_if_drained()

    def abort(self, why: str) -> None:
        """End the stream at once, even if it is ending in order; `end` follows. Idempotent."""
        self._end_at_once(Abort(why))

    def fail(self, error: Exception) -> None:
        """A fault of this side's in this session, found where another's events or a deadline are acted on."""
        self._end_at_once(Abort("internal error", error))

    # --- HELLO ---------------------------------------------------------------------------------

    def _receive_hello(self, header: CommonHeader, message: memoryview, now_s: float) -> None:
        """Checks in the order of profile 8.1."""
        if len(message) > limits.HELLO_MAX_BYTES:  # only a second HELLO finds a receive buffer that long
            self._terminate(TerminateCause.DDP_MESSAGE_TOO_LONG, f"HELLO of {len(message)} octets")
            return
        try:
            hello = parse_hello(message, in_session=self.identity is not None)
        except WireFormatError as error:
            self._refuse_hello(header, error.status)
            return
        octets = bytes(message)
        trust = trust_of(self._target, hello, octets, self._nonces)
        if trust is None:
            self._refuse_hello(header, Status.ACCESS_DENIED)
            return
        self.key = trust.key
        credits = min(hello.completion_credits, self._target.config.request_credits)
        try:
            receives = self._memory.allocate(credits * self._target.config.max_message_bytes)
        except MemoryError:
            self._refuse_hello(header, Status.TARGET_ERROR)
            return
        offered = offered_features(
            self._target.config,
            trust.direct,
            hello,
            binding=self._target.binding,
            masked_atomics=self._target.masked_atomics,
            peer_read_depth=self._peer_read_depth,
        )
        granted = _GrantedHello(hello, octets, trust, offered, receives, credits)
        live = self._target.identities.live(trust.domain, hello.initiator_id)
        if live is not None and trust.key is not None:  # profile 3 "Identity"
            self._waiting = granted
            self._target.replace(live, self)
            return
        direct_alloc = bool(offered & Feature.DIRECT_ALLOC)
        admission = self._target.identities.admit(trust.domain, hello, direct_alloc=direct_alloc)
        if isinstance(admission, Status):
            self._refuse_hello(header, admission)
        else:
            self._open(granted, admission)

    def succeed(self, identity: Identity) -> bool:
        """Everything of the session that had `identity` is resolved. False: this one does not want it any more."""
        if self._waiting is None or self._ending or self.ended:
            return False
        granted, self._waiting = self._waiting, None
        self._open(granted, Admission(identity, resumed=True))
        return True

    def _open(self, granted: _GrantedHello, admission: Admission) -> None:
        target, hello, receives, credits = self._target, granted.hello, granted.receives, granted.credits
        self.identity = identity = admission.identity
        # It goes into logs, one line each: what the peer chose must not start a second one.
        self.name = "".join(c if c.isprintable() else "?" for c in hello.name or "")
        direct_alloc = bool(granted.offered & Feature.DIRECT_ALLOC)
        partition = direct_alloc and target.identities.ensure_partition(identity)
        self.features = granted_features(hello, granted.offered, target.binding, partition=partition)
        self._direct = direct = DirectModes(
            self.features,
            target.config,
            target.store,
            identity,
            self._memory,
            target.now_s,
            head_of_device=target.head_of_device,
        )
        self._sequences = Sequences(
            target.store, target.identities, identity, self._memory, self, reader=self, tickets=direct.tickets
        )
        self._receives = receives
        self._completions_posted_max = credits * limits.COMPLETIONS_POSTED_PER_CREDIT
        of_device = target.head_of_device and direct.tickets is not None
        self._act(Opened(identity, self.features, self._served_features, of_device, receives, credits))
        for slot in range(credits):  # profile 3 "Credits": the buffers are there before HELLO_ACK releases them
            self._repost(slot)
        ack = accepting(
            target, hello, admission, features=self.features, request_credits=credits, direct=direct.ack_fields()
        )
        self._act(Send(wr_id=_HELLO_ACK, inline=packed(ack, granted.trust, granted.octets, self._nonces)))

    def _refuse_hello(self, header: CommonHeader, status: Status) -> None:
        """Every failing HELLO_ACK ends the stream (profile 8.1)."""
        self._act(Send(wr_id=_HELLO_ACK, inline=refusing(header, status).pack()))
        self._disconnect(f"HELLO refused: {status.name}")

    @property
    def _served_features(self) -> Feature:
        return served_features(self.features, self._target.binding)

    # --- requests ------------------------------------------------------------------------------

    def _receive_request(self, header: CommonHeader, message: memoryview, slot: int) -> None:
        """The checks that do not depend on the handle's entry, in the order of profile 1."""
        if self.identity is None and self._refused_before_hello:  # profile 8.2
            self._terminate(TerminateCause.RDMAP_UNSPECIFIED, "a second request before HELLO")
            return
        try:
            if not granted(header, self._served_features, self._read_depth):
                raise WireFormatError("flags", "not granted in this session", Status.UNSUPPORTED)
            request = parse_request(message)
        except WireFormatError as error:
            self._refused_before_hello = True
            self._complete_header(header, error.status, slot)
            return
        assert isinstance(request, TargetRequest)
        if self.identity is None:
            self._refused_before_hello = True
            self._complete_header(header, Status.NO_SESSION, slot, invalidated_stag(request))
            return
        self._turns.add(Task(request, slot))
        self._advance()

    def _advance(self) -> None:
        """Start every request whose turn on its handle has come. Not re-entered by what it starts."""
        if self._advancing or self._sequences is None:
            return
        self._advancing = True
        while not self._ending and (task := self._turns.startable()) is not None:
            self._sequences.start(task)
        self._advancing = False

    # --- what a sequence asks for (SequencePort) -----------------------------------------------

    def write(self, task: Task, sge: Sge) -> None:
        data = data_descriptor(task.request)
        self._act(RdmaWrite(self._track(task), (sge,), data.stag, data.to))

    def read(self, task: Task, sink: Sge) -> None:
        self._waiting_reads.append((task, sink))
        self._post_reads()

    def _post_reads(self) -> None:
        """Profile 3 "RDMA Reads": those beyond the depth wait here, where no completion waits behind them."""
        while self._waiting_reads and self._reads_posted < self._read_depth and not self._ending:
            task, sink = self._waiting_reads.popleft()
            data = data_descriptor(task.request)
            self._act(RdmaRead(self._track(task), sink, data.stag, data.to))
            if not self._reads_posted:
                self._read_deadline_s = self._target.now_s + self._target.config.drain_s
            self._reads_posted += 1

    def complete(self, task: Task, status: Status, entry: Entry | None, *, data: bool = False) -> None:
        request = task.request
        size_only = data and status is not Status.SUCCESS  # profile 2: LENGTH_ERROR of a LOAD
        message = Completion(
            request_id=request.request_id,
            handle=request.handle,
            generation=entry.generation if entry is not None else 0,
            status=status,
            data_length=entry.data_length if data and entry is not None else 0,
            block_offset=entry.block_offset if data and entry is not None and not size_only else 0,
        )
        post: WorkRequest = Send(wr_id=_COMPLETION, inline=message.pack(), invalidate_stag=invalidated_stag(request))
        if request.completion is not None:  # draft 6.5, profile 7
            at = request.completion
            post = RdmaWriteImmediate(
                _COMPLETION, message.record().pack(), at.stag, at.to, message.request_id & 0xFFFF_FFFF
            )
        self._post_completion(post, task.slot)

    def resolve(self, task: Task) -> None:
        if not self._turns.resolved(task):
            return
        if self._offloads:
            self._act(Resolved(task.request.handle))
        self._disconnect_if_drained()
        self._advance()

    def misbehaved(self, error: PeerMisbehaved) -> None:
        self._terminate(error.cause, str(error))

    def watch_free(self, block_offset: int) -> None:
        self._target.watch_free(block_offset)

    def free_done(self, block_offset: int) -> None:
        self._target.free_done(block_offset)

    # --- what goes out -------------------------------------------------------------------------

    def _complete_header(
        self, header: CommonHeader, status: Status, slot: int, invalidate_stag: int | None = None
    ) -> None:
        """A completion that says nothing of any entry (profile 2)."""
        message = Completion(request_id=header.request_id, handle=header.handle, generation=0, status=status)
        self._post_completion(Send(wr_id=_COMPLETION, inline=message.pack(), invalidate_stag=invalidate_stag), slot)

    def _post_completion(self, post: WorkRequest, slot: int) -> None:
        self._held_completions.append((post, slot))
        self._post_completions()

    def _post_completions(self) -> None:
        """Post what the send queue has room for. A peer that sends requests and reads no completions thus comes to
        the end of its receive buffers, and of its stream (1/2/02), rather than of this side's memory."""
        while self._held_completions and self._completions_posted < self._completions_posted_max:
            if self._ending or self.ended:
                return
            post, slot = self._held_completions.popleft()
            self._repost(slot)  # profile 3 "Credits": before the Send that releases the credit
            self._act(post)
            self._completions_posted += 1

    def _receive_buffer(self) -> tuple[MemoryRegion, int]:
        if self._receives is None:
            return self._memory.hello, limits.HELLO_MAX_BYTES
        return self._receives, self._target.config.max_message_bytes

    def _repost(self, slot: int) -> None:
        region, size = self._receive_buffer()
        self._act(Recv(wr_id=slot, sge=Sge(region, slot * size, size)))

    def _track(self, task: Task) -> int:
        wr_id = self._next_wr_id
        self._next_wr_id += 1
        self._posted[wr_id] = task
        return wr_id

    def _terminate(self, cause: TerminateCause, why: str) -> None:
        self._end_at_once(Terminate(cause, why))

    def _end_at_once(self, how: Abort | Terminate) -> None:
        if not self._ending_at_once and not self.ended:
            self._ending = self._ending_at_once = True
            self._act(how)

    def _disconnect(self, why: str = "") -> None:
        self._ending = True
        self._act(Disconnect(why))

    def _disconnect_if_drained(self) -> None:
        finished = not self._turns and not self._held_completions
        if self._draining and finished and not self._ending and not self.ended:
            self._disconnect()

    def _act(self, action: Action) -> None:
        self.actions.append(action)
        self._target.has_actions.add(self)
