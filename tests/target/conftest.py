"""A target without an RNIC: streams, memory and clock are made here and a test decides when anything happens.

`World` is one target and what its server does: it carries actions out and brings completions in. `Peer` is one
initiator's end of a stream. Every action of a session passes through `Peer.perform`, which holds it to the rules
that are true at every moment: credits (profile 3), the read depth, one completion for each request, nothing
after the end.

An RDMA operation moves the first half of its octets when it is posted and the rest when a test finishes it, so that
whatever changes in between is seen.
"""

from __future__ import annotations

import struct
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

import pytest

from kbtp.atomics import fetch_add
from kbtp.blocks import BlockStore, Entry
from kbtp.keys import Key
from kbtp.target.actions import Abort, Action, Disconnect, Opened, Terminate
from kbtp.target.config import TargetConfig
from kbtp.target.target import Target
from kbtp.types import Feature, Opcode, RequestFlag, Status
from kbtp.verbs.api import Access, RdmaRead, RdmaWrite, Recv, Send, Sge, WcOpcode, WcStatus, WorkCompletion
from kbtp.wire import (
    AllocStore,
    Bind,
    Completion,
    DataDescriptor,
    Free,
    Hello,
    HelloAck,
    Load,
    Nonces,
    Store,
    parse_response,
    sign_hello,
)

BLOCK = 512
BLOCKS = 4
HANDLES = 16
BASE_HANDLE = 0xFFFF_FFFF_FFFF_FFF8
"""The table's handles pass 2^64, where a range test that compares instead of subtracting fails."""
INCARNATION = 0x0123_4567_89AB_CDEF
START_S = 1000.0
POISON = 0xEE
NONCES = Nonces(initiator=b"i" * 16, target=b"t" * 16)


class Region:
    """A registered region over `memory`."""

    def __init__(
        self, memory: bytearray | memoryview, base_to: int = 0, stag: int = 0, access: Access = Access.NONE
    ) -> None:
        self.view = memoryview(memory)
        self.length = len(memory)
        self.base_to = base_to
        self.stag = stag
        self.access = access
        self.valid = True

    def revoke(self) -> None:
        self.valid = False


class Memory:
    """SessionMemory of one stream; refuses to give more once `exhausted`."""

    def __init__(self, pool: Region) -> None:
        self.pool = pool
        self.hello = Region(bytearray(1024))
        self.given: list[Region] = []
        self.exposed: list[Region] = []
        self.exhausted = False

    def allocate(self, length_bytes: int) -> Region:
        if self.exhausted:
            raise MemoryError
        region = Region(bytearray([POISON]) * length_bytes)
        self.given.append(region)
        return region

    def expose(self, octets: memoryview, access: Access, base_to: int = 0) -> Region:
        self.exposed.append(Region(octets, base_to, 0xD00 + len(self.exposed), access))
        return self.exposed[-1]

    @property
    def held_regions(self) -> int:
        """Regions given and not revoked, the receive buffers not counted."""
        return sum(region.valid for region in (*self.given[1:], *self.exposed))


@dataclass(frozen=True)
class Answer:
    """One COMPLETION as the initiator sees it."""

    completion: Completion
    invalidated: int | None

    @property
    def status(self) -> Status:
        return Status(self.completion.status)

    @property
    def generation(self) -> int:
        return self.completion.generation

    @property
    def data_length(self) -> int:
        return self.completion.data_length

    @property
    def block_offset(self) -> int:
        return self.completion.block_offset


class Peer:
    """One initiator and the stream between it and the target."""

    def __init__(self, world: World, read_depth: int, peer_read_depth: int, nonces: Nonces) -> None:
        self.world = world
        self.read_depth = read_depth
        self.memory = Memory(world.pool)
        self.session: Any = world.target.open_session(
            self.memory,
            nonces=nonces,
            read_depth=read_depth,
            peer_read_depth=peer_read_depth,
            peer="192.0.2.1:4791",
            now_s=world.now_s,
        )
        self.lent = [Recv(0, Sge(self.memory.hello, 0, 1024))]
        """Receive buffers the target has posted and that are still free: the peer's credits."""
        self.credits = 1
        self.unanswered: dict[int, int] = {}
        self.posted: list[RdmaWrite | RdmaRead] = []
        self.buffers: dict[int, bytearray] = {}
        self.answers: dict[int, Answer] = {}
        self.takes_sends = True
        """Whether what the target sends leaves at once; else it waits for `take_sends`."""
        self.untaken: list[Send] = []
        self.acks: list[HelloAck] = []
        self.ack_octets = b""
        self.end_action: Terminate | Disconnect | Abort | None = None
        self.ended = False
        self.next_request_id = 0x1_0000_0001
        self.next_stag = 0x100

    # --- what the target does ---

    def perform(self, action: Action) -> None:
        ends_at_once = isinstance(action, Terminate | Abort) and isinstance(self.end_action, Disconnect)
        assert self.end_action is None or ends_at_once, f"{action} after {self.end_action}"
        if isinstance(action, Recv):
            slot = action.sge.region.view[action.sge.offset : action.sge.offset + action.sge.length]
            slot[:] = bytes([POISON]) * len(slot)  # whoever still needs what was in it loses
            self.lent.append(action)
        elif isinstance(action, Send):
            self.untaken.append(action)
            self._receive(action)
        elif isinstance(action, RdmaWrite):
            self.posted.append(action)
            self._move(action, first_half=True)
        elif isinstance(action, RdmaRead):
            self.posted.append(action)
            assert len(self.reads) <= self.read_depth
            self._move(action, first_half=True)
        elif not isinstance(action, Opened):
            assert isinstance(action, Terminate | Disconnect | Abort)
            self.end_action = action

    def _receive(self, send: Send) -> None:
        message = parse_response(send.inline)
        if isinstance(message, HelloAck):
            self.acks.append(message)
            self.ack_octets = send.inline
            assert send.invalidate_stag is None
            if message.status == Status.SUCCESS:
                self.credits = message.request_credits
                assert len(self.lent) == self.credits, "profile 3: the buffers are there before HELLO_ACK"
                assert len({recv.wr_id for recv in self.lent}) == self.credits
            return
        assert self.unanswered.pop(message.request_id) == message.handle, "one completion a request, Handle echoed"
        assert len(self.lent) + len(self.unanswered) == self.credits, "profile 3: reposted for this one, and only this"
        self.answers[message.request_id] = Answer(message, send.invalidate_stag)

    def _move(self, operation: RdmaWrite | RdmaRead, *, first_half: bool) -> None:
        sge = operation.sges[0] if isinstance(operation, RdmaWrite) else operation.sink
        assert sge.region.valid
        here = sge.region.view[sge.offset : sge.offset + sge.length]
        there = memoryview(self.buffers[operation.remote_stag])[operation.remote_to : operation.remote_to + sge.length]
        assert len(there) == sge.length > 0
        half = slice(0, sge.length // 2) if first_half else slice(sge.length // 2, sge.length)
        if isinstance(operation, RdmaWrite):
            there[half] = here[half]
        else:
            here[half] = there[half]

    @property
    def reads(self) -> list[RdmaRead]:
        return [operation for operation in self.posted if isinstance(operation, RdmaRead)]

    @property
    def writes(self) -> list[RdmaWrite]:
        return [operation for operation in self.posted if isinstance(operation, RdmaWrite)]

    # --- what the RNIC reports ---

    def finish(self, operation: RdmaWrite | RdmaRead | None = None) -> None:
        """`operation`, or the oldest one posted, is done."""
        operation = operation or self.posted[0]
        self.posted.remove(operation)
        self._move(operation, first_half=False)
        self._report(operation, WcStatus.SUCCESS)
        self.world.perform()

    def take_sends(self) -> None:
        """The Sends posted so far have left."""
        sends, self.untaken = self.untaken, []
        for send in sends:
            completion = WorkCompletion(None, send.wr_id, WcOpcode.SEND, WcStatus.SUCCESS)  # type: ignore[arg-type]
            self.session.completed(completion, self.world.now_s)

    def finish_all(self) -> None:
        while self.posted:
            self.finish()

    def _report(self, operation: RdmaWrite | RdmaRead, status: WcStatus) -> None:
        opcode = WcOpcode.RDMA_WRITE if isinstance(operation, RdmaWrite) else WcOpcode.RDMA_READ
        completion = WorkCompletion(None, operation.wr_id, opcode, status)  # type: ignore[arg-type]
        self.world.target.now_s = self.world.now_s
        self.session.completed(completion, self.world.now_s)

    def end(self) -> None:
        """The stream ends: everything outstanding is flushed, then the session hears of it."""
        self.flush()
        self.world.target.end_session(self.session, self.world.now_s)
        self.ended = True
        self.world.perform()

    def flush(self) -> None:
        operations, self.posted = self.posted, []
        for operation in operations:
            self._report(operation, WcStatus.FLUSHED)
        for recv in self.lent:
            flushed = WorkCompletion(None, recv.wr_id, WcOpcode.RECV, WcStatus.FLUSHED)  # type: ignore[arg-type]
            self.session.received(flushed, self.world.now_s)

    # --- what the initiator does ---

    def send(self, octets: bytes) -> None:
        """One Send, into the oldest receive buffer the target has posted."""
        assert self.lent, "no credit"
        recv = self.lent.pop(0)
        assert len(octets) <= recv.sge.length
        recv.sge.region.view[recv.sge.offset : recv.sge.offset + len(octets)] = octets
        if len(octets) >= 24 and octets[1] != Opcode.HELLO:
            self.unanswered[int.from_bytes(octets[4:12], "big")] = int.from_bytes(octets[12:20], "big")
        completion = WorkCompletion(
            None,  # type: ignore[arg-type]
            recv.wr_id,
            WcOpcode.RECV,
            WcStatus.SUCCESS,
            len(octets),
        )
        self.world.target.now_s = self.world.now_s
        self.session.received(completion, self.world.now_s)
        self.world.perform()

    @staticmethod
    def hello_message(**fields: Any) -> Hello:
        defaults = {
            "request_id": 7,
            "requested_features": 0,
            "requested_quota": 0,
            "requested_handles": 0,
            "completion_credits": 8,
            "max_message": 1024,
        }
        return Hello(**{**defaults, **fields})

    def hello(self, **fields: Any) -> HelloAck:
        """HELLO and its answer."""
        answered = len(self.acks)
        self.say_hello(**fields)
        assert len(self.acks) == answered + 1
        return self.acks[-1]

    def say_hello(self, *, key: Key | None = None, nonces: Nonces = NONCES, **fields: Any) -> bytes:
        """HELLO, signed with `key` if there is one; its octets. It may have to wait for its answer."""
        hello = self.hello_message(**fields)
        octets = hello.pack() if key is None else sign_hello(hello, key, nonces)
        self.send(octets)
        return octets

    @property
    def ack(self) -> HelloAck:
        return self.acks[-1]

    def handle(self, n: int = 0) -> int:
        """The n-th handle of the peer's own range."""
        return (self.ack.first_handle + n) % (1 << 64)

    def buffer(self, octets: bytes) -> int:
        """Register a buffer; its STag."""
        self.next_stag += 1
        self.buffers[self.next_stag] = bytearray(octets)
        return self.next_stag

    def _request_id(self) -> int:
        self.next_request_id += 1
        return self.next_request_id

    def load(
        self, handle: int, length: int = BLOCK, *, generation: int = 0, flags: int = 0, stag: int | None = None
    ) -> int:
        """LOAD into a fresh buffer; the Request ID."""
        stag = self.buffer(bytes(length)) if stag is None else stag
        request = Load(self._request_id(), handle, generation, RequestFlag(flags), DataDescriptor(stag, 0, length))
        self.send(request.pack())
        return request.request_id

    def _put(self, form: Any, handle: int, data: bytes, generation: int, flags: int, stag: int | None) -> int:
        inline = flags & RequestFlag.INLINE
        if not inline:
            stag = self.buffer(data) if stag is None else stag
        descriptor = DataDescriptor(stag or 0, 0, len(data))
        request_id = self._request_id()
        self.send(
            form(
                request_id,
                handle,
                generation,
                RequestFlag(flags),
                descriptor,
                inline_data=data if inline else b"",
            ).pack()
        )
        return request_id

    def store(self, handle: int, data: bytes, *, generation: int = 0, flags: int = 0, stag: int | None = None) -> int:
        return self._put(Store, handle, data, generation, flags, stag)

    def alloc_store(
        self, handle: int, data: bytes, *, generation: int = 0, flags: int = 0, stag: int | None = None
    ) -> int:
        return self._put(AllocStore, handle, data, generation, flags, stag)

    def free(self, handle: int, *, generation: int = 0) -> int:
        request = Free(self._request_id(), handle, generation, RequestFlag.NONE)
        self.send(request.pack())
        return request.request_id

    def bind(self, handle: int, data: bytes, *, seal: bool = True) -> Answer:
        """A block bound to `handle`, as a place to start from."""
        flags = RequestFlag.INLINE | (RequestFlag.SEAL if seal else 0)
        answer = self.answers[self.alloc_store(handle, data, flags=flags)]
        assert answer.status is Status.SUCCESS
        return answer

    # --- what an initiator in direct mode does by itself (draft 6.6) ---

    def region(self, name: str) -> Region:
        """What the STag of that name in HELLO_ACK reaches; fails if it reaches nothing any more."""
        stag = getattr(self.ack, f"{name}_stag")
        region = next(region for region in self.memory.exposed if region.stag == stag)
        assert region.valid, f"{name}_stag is invalid"
        return region

    def head(self) -> int:
        assert self.region("head").access is Access.REMOTE_ATOMIC
        return int.from_bytes(self.region("head").view, sys.byteorder)

    def set_head(self, value: int) -> None:
        """CmpSwap allows it."""
        self.region("head").view[:] = value.to_bytes(8, sys.byteorder)

    def take_ticket(self) -> int:
        """FetchAdd on Head with the Add Data and Add Mask of draft 3.3, or of 9.2 if that was granted."""
        old = self.head()
        masked = self.ack.granted_features & Feature.MASKED_ATOMICS
        top = 1 << self.ack.ring_order + 3
        self.set_head(fetch_add(old, 0x0000000100000010, 1 << 63 | 1 << 31 | top) if masked else old + (1 << 32))
        return old >> 32

    def slot(self, ticket: int) -> int | None:
        """The block that the slot of `ticket` holds for it."""
        assert self.region("ring").access is Access.REMOTE_READ
        at = 16 * (ticket % (1 << self.ack.ring_order))
        sequence, _, block_offset = struct.unpack(">IIQ", self.region("ring").view[at : at + 16])
        return block_offset if sequence == ticket and block_offset != (1 << 64) - 1 else None

    def put(self, block_offset: int, data: bytes) -> None:
        """RDMA Write through Partition STag."""
        region = self.region("partition")
        assert region.access is Access.REMOTE_WRITE
        at = block_offset - region.base_to
        assert 0 <= at <= region.length - len(data)
        region.view[at : at + len(data)] = data

    def take_block(self, data: bytes = b"") -> tuple[int, int]:
        """A ticket and its block, with `data` in it."""
        ticket = self.take_ticket()
        block_offset = self.slot(ticket)
        assert block_offset is not None
        self.put(block_offset, data)
        return ticket, block_offset

    def bind_ticket(
        self, handle: int, ticket: int, block_offset: int, length: int = 0, *, generation: int = 0, flags: int = 2
    ) -> int:
        """BIND, with SEAL; the Request ID."""
        request = Bind(self._request_id(), handle, generation, RequestFlag(flags), ticket, length, block_offset)
        self.send(request.pack())
        return request.request_id

    def loaded(self, request_id: int, handle: int) -> bytes:
        """What an unhurried LOAD, sent and finished now, gives. For looking, not for testing loads."""
        self.finish_all()
        answer = self.answers[request_id]
        assert answer.completion.handle == handle
        return bytes(self.buffers[self.next_stag][: answer.data_length])

    def look(self, handle: int) -> bytes:
        """The octets of the block of `handle`, by a LOAD."""
        return self.loaded(self.load(handle, flags=RequestFlag.ALLOW_UNSEALED), handle)

    def status(self, request_id: int) -> Status | None:
        """The status of the completion, None if it has not come."""
        answer = self.answers.get(request_id)
        return answer.status if answer else None

    def entry(self, handle: int) -> Entry:
        return self.world.store.read(handle)


class World:
    """One target of four blocks of 512 octets and sixteen handles, and its peers."""

    INLINE, SEAL, RECORD, INVALIDATE, ALLOW_UNSEALED = (
        RequestFlag.INLINE,
        RequestFlag.SEAL,
        RequestFlag.RECORD,
        RequestFlag.INVALIDATE,
        RequestFlag.ALLOW_UNSEALED,
    )

    masked_atomics: ClassVar[bool] = True
    create_store: ClassVar[Callable[..., Any]] = staticmethod(BlockStore.create)

    def __init__(self, **config: Any) -> None:
        defaults = {
            "block_size_bytes": BLOCK,
            "pool_blocks": BLOCKS,
            "table_handles": HANDLES,
            "quota": 2,
            "request_credits": 4,
            "max_message_bytes": 1024,
            "read_depth": 2,
            "linger_s": 60.0,
            "drain_s": 5.0,
            "hello_timeout_s": 5.0,
        }
        self.config = TargetConfig(**{**defaults, **config})
        self.now_s = START_S
        self.pool = Region(bytearray(self.config.pool_bytes), self.config.pool_base)
        self.store = self.create_store(
            self.pool.view,
            block_size_bytes=self.config.block_size_bytes,
            block_count=self.config.pool_blocks,
            pool_base=self.config.pool_base,
            table_base_handle=BASE_HANDLE,
            table_handles=self.config.handle_count,
            ring_order=self.config.ring_order,
            first_ticket=self.config.first_ticket,
            clear_on_free=self.config.clears_blocks,
            direct_blocks=self.config.direct_blocks,
            masked_counters=self.masked_atomics,
        )
        self.target = Target(
            self.config,
            self.store,
            incarnation=INCARNATION,
            table_base_handle=BASE_HANDLE,
            masked_atomics=self.masked_atomics,
        )
        self.peers: list[Peer] = []

    def open(self, read_depth: int = 2, peer_read_depth: int = 4, *, nonces: Nonces = NONCES) -> Peer:
        """A new stream, before HELLO."""
        peer = Peer(self, read_depth, peer_read_depth, nonces)
        self.peers.append(peer)
        return peer

    def connect(self, read_depth: int = 2, peer_read_depth: int = 4, **hello: Any) -> Peer:
        """A new stream with a session on it."""
        peer = self.open(read_depth, peer_read_depth)
        assert peer.hello(**hello).status == Status.SUCCESS
        return peer

    def perform(self) -> None:
        """Carry out what the sessions decided, as the server does."""
        by_session = {peer.session: peer for peer in self.peers}
        while self.target.has_actions:
            session = self.target.has_actions.pop()
            actions, session.actions = session.actions, []
            peer = by_session[session]
            for action in actions:
                peer.perform(action)
            if peer.takes_sends:
                peer.take_sends()

    def advance(self, seconds: float) -> None:
        """Let time pass and the target look at its deadlines."""
        self.now_s += seconds
        self.target.tick(self.now_s)
        self.perform()

    def table(self) -> list[Entry]:
        """Every entry there is."""
        return [self.store.read((BASE_HANDLE + n) % (1 << 64)) for n in range(self.config.handle_count)]

    def end_all(self) -> None:
        for peer in self.peers:
            if not peer.ended:
                peer.end()

    def check_nothing_is_left(self) -> None:
        """All streams have ended and all lingers are over: everything is free again, and can all be had by one."""
        assert all(peer.ended for peer in self.peers)
        assert self.target.next_deadline_s() == float("inf")
        assert not self.target.sessions
        assert list(self.store.pinned_frees()) == []
        assert self.store.free_blocks == self.config.pool_blocks
        assert self.store.quotas.left == self.config.shared_blocks
        assert sum(peer.memory.held_regions for peer in self.peers) == 0
        key = next(iter(self.config.keys), None)
        last = self.connect(key=key, requested_quota=self.config.pool_blocks, requested_handles=(1 << 64) - 1)
        assert last.ack.allocation_quota == self.config.shared_blocks
        assert (last.ack.first_handle, last.ack.handle_count) == (BASE_HANDLE, self.config.handle_count)
        for n in range(self.config.shared_blocks):
            last.bind(last.handle(n), bytes([n]) * BLOCK)
        last.end()
        assert self.store.free_blocks == self.config.pool_blocks


class NativeWorld(World):
    """A target whose block structures are those of the native RNIC."""

    @staticmethod
    def create_store(pool: memoryview, **numbers: Any) -> Any:
        from kbtp.rnic.native import NativeRnic  # what needs no RNIC is tested without it being built

        rnic = NativeRnic()
        region = rnic.register(pool, Access.NONE, pd=rnic.allocate_pd(), base_to=numbers["pool_base"])
        return rnic.create_block_store(region, **numbers, freed=lambda _holder: None)


@pytest.fixture(params=[World, NativeWorld])
def new_world_of_any_store(request: pytest.FixtureRequest) -> Callable[..., World]:
    """As `new_world`: once for each store there is."""
    made: Callable[..., World] = request.param
    return made


@pytest.fixture(scope="session")
def new_world() -> Callable[..., World]:
    """Makes a `World`; keyword arguments are those of TargetConfig."""
    return World


@pytest.fixture
def world() -> Iterator[World]:
    """A world that must come out even: at the end of the test all streams end, all lingers pass, nothing is left."""
    it = World()
    yield it
    it.end_all()
    it.advance(it.config.linger_s)
    it.check_nothing_is_left()
