"""Direct modes from a client's call to the target's memory and back, over both RNICs."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import kbtp
from kbtp.blocks.counter import MaskedCounter, UnmaskedCounter
from kbtp.errors import (
    AlreadyBound,
    ApiMisuse,
    ConnectionLost,
    DeadlineExceeded,
    GenerationMismatch,
    LengthError,
    NotBound,
    NotSealed,
    PeerMisbehaved,
)
from kbtp.rnic import open_rnic
from kbtp.types import BlockRef, EntryFlag, Feature, RequestFlag, Status, TerminateCause
from kbtp.verbs.api import Access
from kbtp.wire import Bind, Free, Load
from tests.initiator.direct_acks import (
    ALL_DIRECT,
    BLOCK_BYTES,
    DIRECT_ALLOC_FIELDS,
    DIRECT_LOAD_FIELDS,
    FIELDS,
    POOL_BASE,
    POOL_BLOCKS,
    TABLE_BASE,
    block,
    entry,
    slot,
)

FakeTargets = Callable[..., Any]
Connect = Callable[..., Any]
Script = Callable[["Memory", Any], None]

FIRST_TICKET = 0xFFFF_FFFE  # so that tickets wrap
SLOTS = 4


class Memory:
    """What a target exposes: table, pool, a ring of four slots for the blocks 8 to 11, and Head."""

    def __init__(self, target: Any, features: Feature) -> None:
        self.target = target
        self.features = features
        form = MaskedCounter if features & Feature.MASKED_ATOMICS else UnmaskedCounter
        self.table = bytearray(64 * 16)
        self.pool = np.frombuffer(random.Random(1).randbytes(POOL_BLOCKS * BLOCK_BYTES), np.uint8).copy()
        self.ring = bytearray(16 * SLOTS)
        self.head = np.array([form(2).encode(FIRST_TICKET)], np.uint64)
        for number in range(SLOTS):
            self.publish(FIRST_TICKET + number, block(8 + number))

    def publish(self, ticket: int, block_offset: int) -> None:
        at = 16 * (ticket % SLOTS)
        self.ring[at : at + 16] = slot(ticket & 0xFFFF_FFFF, block_offset)

    def bind(self, handle: int, *fields: Any, **more: Any) -> None:
        at = 16 * (handle - TABLE_BASE)
        self.table[at : at + 16] = entry(*fields, **more)

    def block(self, number: int, length: int = BLOCK_BYTES) -> bytes:
        return self.pool[number * BLOCK_BYTES :][:length].tobytes()

    def fields(self) -> dict[str, Any]:
        """Of HELLO_ACK: what is granted, and the STags of it."""
        fields: dict[str, Any] = {**FIELDS, "granted_features": Feature.INVALIDATE | self.features}
        for name in (*DIRECT_LOAD_FIELDS, *DIRECT_ALLOC_FIELDS):
            fields[name] = 0
        expose, read = self.target.expose, Access.REMOTE_READ
        if self.features & Feature.DIRECT_LOAD:
            fields["table_stag"] = expose(self.table, read).stag
            fields["pool_stag"] = expose(self.pool, read, POOL_BASE).stag
        if self.features & Feature.DIRECT_ALLOC:
            partition = self.pool[8 * BLOCK_BYTES : 12 * BLOCK_BYTES]
            fields["partition_stag"] = expose(partition, Access.REMOTE_WRITE, block(8)).stag
            fields["ring_stag"] = expose(self.ring, read).stag
            fields["head_stag"] = expose(self.head, Access.REMOTE_ATOMIC).stag
            fields |= {"ticket_timeout_ms": 60_000, "ring_order": 2}
        return fields

    def take(self, kind: type, **completion: Any) -> Any:
        """The next request, which is of this kind, and is completed."""
        request = self.target.receive()
        assert isinstance(request, kind)
        if kind is Bind:
            completion = {"data_length": request.data_length, "block_offset": request.block_offset, **completion}
        if completion.get("status"):
            completion |= {"data_length": 0, "block_offset": 0}
        self.target.complete(request, **completion)
        return request


def serving(script: Script, features: Feature = ALL_DIRECT, **changes: Any) -> Callable[[Any], None]:
    """A target's script: grant `features`, do what `script` says, and wait for the end of the stream."""

    def run(target: Any) -> None:
        target.accept()
        hello = target.receive()
        memory = Memory(target, features)
        script(memory, hello)
        target.send(target.hello_ack(**{**memory.fields(), **changes}))
        after = getattr(memory, "after", None)
        if after is not None:
            after()
        target.ended()

    return run


def bound(*entries: tuple[Any, ...]) -> Script:
    """Entries of the table: handle, then as `entry` takes them."""

    def script(memory: Memory, _hello: Any) -> None:
        for fields in entries:
            memory.bind(*fields)

    return script


def requests(act: Callable[[Memory], None]) -> Script:
    """What the target does after HELLO_ACK."""

    def script(memory: Memory, _hello: Any) -> None:
        memory.after = lambda: act(memory)  # type: ignore[attr-defined]

    return script


def pool_octets(number: int, length: int) -> bytes:
    return random.Random(1).randbytes(POOL_BLOCKS * BLOCK_BYTES)[number * BLOCK_BYTES :][:length]


# --- HELLO -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("direct", "asked"),
    [
        ("", Feature.NONE),
        ("none", Feature.NONE),
        ("load", Feature.DIRECT_LOAD),
        ("alloc", Feature.DIRECT_ALLOC | Feature.MASKED_ATOMICS),
        (" alloc, load", ALL_DIRECT),
    ],
)
def test_hello_asks_for_what_was_asked_for(
    fake_target: FakeTargets, connect: Connect, direct: str, asked: Feature
) -> None:
    seen = []
    granted = asked & ~Feature.DIRECT_ALLOC & ~Feature.MASKED_ATOMICS
    target = fake_target(serving(lambda _, hello: seen.append(hello.requested_features), granted))
    client = connect(target.url, direct=direct)
    assert seen == [Feature.INVALIDATE | asked]
    assert client.features == Feature.INVALIDATE | granted
    client.close()


@pytest.mark.parametrize("direct", ["store", "load;alloc", "loadalloc", None])
def test_a_direct_mode_that_there_is_not(direct: Any) -> None:
    with pytest.raises(ApiMisuse, match="load, alloc or load,alloc expected"):
        kbtp.connect("kbtp://127.0.0.1", direct=direct)


def test_a_direct_mode_needs_a_read_depth() -> None:
    """Profile 3: an ORD of at least 1."""
    with pytest.raises(ApiMisuse, match="read_depth of 0"):
        kbtp.InitiatorConfig(direct=Feature.DIRECT_LOAD, read_depth=0)
    with pytest.raises(ApiMisuse, match="direct modes there are"):
        kbtp.InitiatorConfig(direct=Feature.RECORD_COMPLETION)


@pytest.mark.parametrize(
    ("atomics", "masked", "read_depth", "asked"),
    [
        (True, True, 1, ALL_DIRECT),
        (True, False, 1, Feature.DIRECT_LOAD | Feature.DIRECT_ALLOC),
        (False, False, 1, Feature.DIRECT_LOAD),
        (True, True, 0, Feature.NONE),
    ],
)
def test_what_the_rnic_cannot_do_is_not_asked_for(atomics: bool, masked: bool, read_depth: int, asked: Feature) -> None:
    """Profile 1, 3: no reads outstanding, no direct mode."""
    config = kbtp.InitiatorConfig(direct=Feature.DIRECT_LOAD | Feature.DIRECT_ALLOC)
    can = dataclasses.replace(open_rnic().capabilities, atomics=atomics, masked_atomics=masked)
    assert config.features(can, read_depth) == Feature.INVALIDATE | asked


@pytest.mark.parametrize(
    ("features", "changes", "field"),
    [
        (ALL_DIRECT, {"table_stag": 0}, "Table STag"),
        (ALL_DIRECT, {"pool_stag": 0}, "Pool STag"),
        (ALL_DIRECT, {"partition_stag": 0}, "Partition STag"),
        (ALL_DIRECT, {"ring_stag": 0}, "Ring STag"),
        (ALL_DIRECT, {"head_stag": 0}, "Head STag"),
        (ALL_DIRECT, {"ticket_timeout_ms": 0}, "Ticket Timeout"),
        (ALL_DIRECT, {"ring_order": 0}, "Ring Order"),
        (ALL_DIRECT, {"ring_order": 29, "allocation_quota": 4}, "Ring Order"),
        (ALL_DIRECT, {"ring_order": 1}, "Allocation Quota"),
        (ALL_DIRECT, {"allocation_quota": 0}, "Allocation Quota"),
        (ALL_DIRECT, {"head_offset": 4}, "Head Offset"),
        (ALL_DIRECT, {"ring_offset": (1 << 64) - 16}, "Ring Offset"),
        (ALL_DIRECT, {"table_offset": (1 << 64) - 16}, "Table Offset"),
        (ALL_DIRECT, {"pool_base": (1 << 64) - 64}, "Pool Base"),
        (Feature.NONE, {"table_stag": 1}, "Table STag"),
        (Feature.NONE, {"pool_stag": 1}, "Pool STag"),
        (Feature.DIRECT_LOAD, {"partition_stag": 1}, "Partition STag"),
        (Feature.DIRECT_LOAD, {"ring_stag": 1}, "Ring STag"),
        (Feature.DIRECT_LOAD, {"head_stag": 1}, "Head STag"),
        (Feature.DIRECT_LOAD, {"ticket_timeout_ms": 1}, "Ticket Timeout"),
        (Feature.DIRECT_LOAD, {"ring_order": 1}, "Ring Order"),
        (Feature.NONE, {"granted_features": Feature.RECORD_COMPLETION}, "Granted Features"),
    ],
)
def test_a_hello_ack_that_grants_a_direct_mode_that_cannot_be(
    fake_target: FakeTargets, best_rnic: str, features: Feature, changes: dict[str, Any], field: str
) -> None:
    """Profile 2: each field goes with its feature."""

    def script(target: Any) -> None:
        target.accept()
        target.receive()
        target.send(target.hello_ack(**{**Memory(target, features).fields(), **changes}))
        terminate = target.ended().terminate
        assert (terminate.layer, terminate.etype, terminate.code) == TerminateCause.RDMAP_UNSPECIFIED.value

    with pytest.raises(PeerMisbehaved, match=f"impossible {field}"):
        kbtp.connect(fake_target(script).url, direct="load,alloc")


def test_a_direct_mode_that_was_not_granted_is_misuse(fake_target: FakeTargets, connect: Connect) -> None:
    client = connect(fake_target(serving(bound(), Feature.NONE)).url, direct="load,alloc")
    for call in (
        lambda: client.load(TABLE_BASE, into=bytearray(1), mode="direct"),
        lambda: client.load_many([TABLE_BASE], into=[bytearray(1)], mode="direct"),
    ):
        with pytest.raises(ApiMisuse, match=r'needs DIRECT_LOAD.*connect with direct="load"'):
            call()
    for call in (
        lambda: client.alloc_store(b"x", mode="direct"),
        lambda: client.alloc_store_many([b"x"], mode="direct"),
    ):
        with pytest.raises(ApiMisuse, match=r'needs DIRECT_ALLOC.*connect with direct="alloc"'):
            call()
    with pytest.raises(ApiMisuse, match='expected "request" or "direct"'):
        client.load(TABLE_BASE, into=bytearray(1), mode="fast")
    client.close()


# --- loads -------------------------------------------------------------------------------------


@pytest.mark.parametrize("length", [0, 1, 100, BLOCK_BYTES])
def test_a_block_is_loaded_without_a_request(fake_target: FakeTargets, connect: Connect, length: int) -> None:
    target = fake_target(serving(bound((TABLE_BASE + 1, 7, length, block(3)))))
    client = connect(target.url, direct="load,alloc")
    buffer = bytearray(BLOCK_BYTES + 1)
    assert client.load(BlockRef(TABLE_BASE + 1, 7, length), into=buffer, mode="direct") == length
    assert buffer == pool_octets(3, length) + bytes(len(buffer) - length)
    registered = np.zeros((2, BLOCK_BYTES), np.uint8)
    client.register(registered)
    assert client.load(TABLE_BASE + 1, into=registered[1], mode="direct") == length
    assert registered[1, :length].tobytes() == pool_octets(3, length)
    assert not registered[0].any()
    client.close()


def test_refusals_are_those_of_load(fake_target: FakeTargets, connect: Connect) -> None:
    script = bound(
        (TABLE_BASE, 3, 0, 0, EntryFlag.NONE), (TABLE_BASE + 1, 3), (TABLE_BASE + 2, 3, 9, block(0), EntryFlag.VALID)
    )
    client = connect(fake_target(serving(script)).url, direct="load,alloc")
    buffer = bytearray(99)
    with pytest.raises(NotBound):
        client.load(TABLE_BASE, into=buffer, mode="direct")
    with pytest.raises(GenerationMismatch):
        client.load(TABLE_BASE + 1, into=buffer, generation=2, mode="direct")
    with pytest.raises(NotSealed):
        client.load(TABLE_BASE + 2, into=buffer, mode="direct")
    with pytest.raises(LengthError, match="it holds 100 octets"):
        client.load(TABLE_BASE + 1, into=buffer, mode="direct")
    with pytest.raises(kbtp.HandleOutOfRange):
        client.load(TABLE_BASE + 64, into=buffer, mode="direct")
    assert buffer == bytes(99)
    client.close()


def test_a_batch_of_direct_loads(fake_target: FakeTargets, connect: Connect) -> None:
    """More of them than reads may be outstanding, and some that cannot be."""
    entries = [(TABLE_BASE + number, 2, 100 * number, block(number)) for number in range(POOL_BLOCKS)]
    client = connect(fake_target(serving(bound(*entries))).url, direct="load,alloc")
    order = [number % POOL_BLOCKS for number in range(100)]
    buffers: list[Any] = [bytearray(BLOCK_BYTES) for _ in order]
    buffers[50], buffers[51] = "text", b"constant"
    results = client.load_many([TABLE_BASE + number for number in order], into=buffers, mode="direct")
    assert [type(results[place].error) for place in (49, 50, 51, 52)] == [type(None), ApiMisuse, ApiMisuse, type(None)]
    for place, number in enumerate(order):
        if place not in (50, 51):
            assert results[place].ok
            assert buffers[place][: 100 * number] == pool_octets(number, 100 * number)
    client.close()


def test_what_is_torn_for_ever_is_left_to_load(fake_target: FakeTargets, connect: Connect) -> None:
    def act(memory: Memory) -> None:
        load = memory.take(Load, data_length=5)
        assert (load.handle, load.generation, load.data.length) == (TABLE_BASE, 2, 100)

    def script(memory: Memory, hello: Any) -> None:
        memory.bind(TABLE_BASE, 2, 5, block(0) + 1)
        requests(act)(memory, hello)

    client = connect(fake_target(serving(script)).url, direct="load,alloc")
    assert client.load(BlockRef(TABLE_BASE, 2, 5), into=bytearray(100), mode="direct") == 5
    client.close()


def test_a_table_that_is_not_the_initiators_any_more_ends_the_session(
    fake_target: FakeTargets, connect: Connect
) -> None:
    def script(memory: Memory, _hello: Any) -> None:
        exposed = memory.fields()
        memory.fields = lambda: {**exposed, "table_stag": exposed["pool_stag"]}  # type: ignore[method-assign]

    client = connect(fake_target(serving(script)).url, direct="load,alloc")
    batch = client.load_many([TABLE_BASE] * 3, into=[bytearray(9) for _ in range(3)], mode="direct")
    assert [type(result.error) for result in batch] == [ConnectionLost] * 3
    assert client.closed


# --- allocations -------------------------------------------------------------------------------


@pytest.mark.parametrize("length", [0, 1, 100, BLOCK_BYTES])
@pytest.mark.parametrize("masked", [Feature.MASKED_ATOMICS, Feature.NONE])
def test_a_block_is_allocated_written_and_bound(
    fake_target: FakeTargets, connect: Connect, length: int, masked: Feature
) -> None:
    """Draft 6.6, and 9.2 without masked atomics. BIND comes behind the data."""
    octets = random.Random(length).randbytes(length)

    def act(memory: Memory) -> None:
        bind = memory.take(Bind, generation=9)
        assert (bind.ticket, bind.block_offset, bind.data_length) == (FIRST_TICKET, block(8), length)
        assert (bind.flags, bind.generation, bind.handle) == (RequestFlag.SEAL, 0, TABLE_BASE)
        assert memory.block(8, length) == octets

    features = Feature.DIRECT_ALLOC | masked
    client = connect(fake_target(serving(requests(act), features)).url, direct="alloc")
    assert client.features == Feature.INVALIDATE | features
    assert client.alloc_store(octets, mode="direct") == BlockRef(TABLE_BASE, 9, length)
    client.close()


def test_a_batch_of_direct_allocations(fake_target: FakeTargets, connect: Connect) -> None:
    """Tickets that wrap, one item that cannot be, one that is refused and given back."""

    def act(memory: Memory) -> None:
        tickets = []
        for handle in (TABLE_BASE + 1, TABLE_BASE + 2):
            bind = memory.take(Bind, status=Status.SUCCESS if handle == TABLE_BASE + 1 else Status.ALREADY_BOUND)
            assert (bind.handle, bind.flags) == (handle, RequestFlag.NONE)
            tickets.append(bind.ticket)
        bind = memory.take(Bind)
        assert bind.handle == TABLE_BASE + 3
        spare = memory.take(Bind, generation=5)
        assert (spare.ticket, spare.data_length) == (tickets[1], 0)
        freed = memory.take(Free)
        assert (freed.handle, freed.generation) == (spare.handle, 5)
        assert memory.block(8, 3) + memory.block(10, 5) == b"onethree"
        assert (tickets, bind.ticket) == ([FIRST_TICKET, FIRST_TICKET + 1], 0)

    client = connect(fake_target(serving(requests(act))).url, direct="load,alloc")
    results = client.alloc_store_many(
        [b"one", b"two", object(), b"three"],
        handles=[TABLE_BASE + 1, TABLE_BASE + 2, TABLE_BASE + 4, TABLE_BASE + 3],
        seal=False,
        mode="direct",
    )
    assert [result.status for result in results] == [Status.SUCCESS, Status.ALREADY_BOUND, None, Status.SUCCESS]
    assert isinstance(results[2].error, ApiMisuse)
    client.close()


def test_a_refused_bind_raises_after_the_ticket_was_given_back(fake_target: FakeTargets, connect: Connect) -> None:
    given_back = []

    def act(memory: Memory) -> None:
        memory.take(Bind, status=Status.ALREADY_BOUND)
        memory.take(Bind)
        freed = memory.target.receive()
        given_back.append(freed)
        memory.target.complete(freed)

    client = connect(fake_target(serving(requests(act))).url, direct="alloc,load")
    with pytest.raises(AlreadyBound):
        client.alloc_store(b"x", handle=TABLE_BASE, mode="direct")
    assert given_back
    client.close()


def test_a_slot_that_never_comes_ends_with_the_calls_deadline(fake_target: FakeTargets, connect: Connect) -> None:
    def script(memory: Memory, _hello: Any) -> None:
        memory.publish(FIRST_TICKET, block(-1))

    client = connect(fake_target(serving(script)).url, direct="load,alloc")
    with pytest.raises(DeadlineExceeded):
        client.alloc_store(b"x", mode="direct", timeout_s=0.1)
    assert client.closed


def test_a_ticket_that_runs_out_leaves_the_call_to_alloc_store(fake_target: FakeTargets, connect: Connect) -> None:
    """Profile 6.11: and all later ones; the client says so."""

    def act(memory: Memory) -> None:
        for _ in range(2):
            memory.take(kbtp.wire.AllocStore, data_length=1, block_offset=block(9))

    def script(memory: Memory, hello: Any) -> None:
        memory.publish(FIRST_TICKET, block(-1))
        requests(act)(memory, hello)

    client = connect(fake_target(serving(script, ticket_timeout_ms=50)).url, direct="load,alloc")
    assert client.features & Feature.DIRECT_ALLOC
    assert client.alloc_store(b"x", mode="direct").length_bytes == 1
    assert not client.features & Feature.DIRECT_ALLOC
    assert client.features & Feature.DIRECT_LOAD
    assert client.alloc_store(b"x", mode="direct").length_bytes == 1
    client.close()


def test_a_head_that_cannot_be_ends_the_session_with_a_terminate(fake_target: FakeTargets, connect: Connect) -> None:
    def script(target: Any) -> None:
        target.accept()
        target.receive()
        memory = Memory(target, ALL_DIRECT)
        memory.head[0] |= np.uint64(1 << 16)
        target.send(target.hello_ack(**memory.fields()))
        terminate = target.ended().terminate
        assert (terminate.layer, terminate.etype, terminate.code) == TerminateCause.RDMAP_UNSPECIFIED.value

    client = connect(fake_target(script).url, direct="load,alloc")
    with pytest.raises(ConnectionLost, match="no FetchAdd can have made"):
        client.alloc_store(b"x", mode="direct")
    assert client.closed
