"""Which status a request gets: random requests to entries in random states, against profile 1 written down again."""

from __future__ import annotations

import struct
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kbtp.types import Status
from kbtp.wire import CommonHeader

LOAD, STORE, ALLOC_STORE, FREE, BIND = 3, 4, 5, 6, 7
INLINE, SEAL, RECORD, INVALIDATE, ALLOW_UNSEALED = 1, 2, 4, 8, 16
SUCCESS, NOT_BOUND, NOT_SEALED, SEALED, ALREADY_BOUND, GENERATION_MISMATCH, HANDLE_OUT_OF_RANGE, LENGTH_ERROR = range(8)
NO_SPACE, MALFORMED, UNSUPPORTED, NO_SESSION = 8, 11, 12, 14
BLOCK = 512
SILENT = (UNSUPPORTED, MALFORMED, NO_SESSION, HANDLE_OUT_OF_RANGE)
"""Statuses whose completion says nothing of the entry (profile 2)."""

FLAGS = {
    LOAD: RECORD | INVALIDATE | ALLOW_UNSEALED,
    STORE: INLINE | SEAL | RECORD | INVALIDATE,
    ALLOC_STORE: INLINE | SEAL | RECORD | INVALIDATE,
    FREE: RECORD,
}
"""Profile 1, the flags column. BIND comes with DIRECT_ALLOC alone (8.3), all else is not a request."""


@dataclass(frozen=True)
class Request:
    version: int
    opcode: int
    flags: int
    whose: str
    state: str
    generation: str
    length: int
    inline_octets: int
    cut: int
    extra: int


@dataclass(frozen=True)
class State:
    """What the target was in before the request."""

    open: bool
    read_depth: int
    quota_reached: bool
    valid: bool
    sealed: bool
    data_length: int


def expected(request: Request, state: State) -> int:
    """Profile 1, the order of checks, line by line."""
    inline, load = request.flags & INLINE, request.opcode == LOAD
    moves = request.opcode in (LOAD, STORE, ALLOC_STORE)
    # UNSUPPORTED (version, opcode, flags). RECORD_COMPLETION is never granted on RDMAP.
    if request.version != 1 or request.opcode not in FLAGS or request.flags & ~FLAGS[request.opcode]:
        return UNSUPPORTED
    if request.flags & RECORD or (request.flags & INVALIDATE and inline):
        return UNSUPPORTED
    if request.opcode in (STORE, ALLOC_STORE) and not inline and state.read_depth == 0:  # 8.7
        return UNSUPPORTED
    # MALFORMED: the fixed part is not there, or octets follow it where none may.
    fixed = 40 if moves else 24
    if octets_of(request) < fixed or (octets_of(request) > fixed and not inline):
        return MALFORMED
    if not state.open:
        return NO_SESSION
    if request.whose in ("nobody's", "outside", "foreign") or (request.whose == "other's" and not load):
        return HANDLE_OUT_OF_RANGE
    if request.opcode == ALLOC_STORE and state.valid:
        return ALREADY_BOUND
    if request.opcode != ALLOC_STORE and not state.valid:
        return NOT_BOUND
    if request.generation == "another":
        return GENERATION_MISMATCH
    if request.opcode == STORE and state.sealed:
        return SEALED
    if load and not state.sealed and not request.flags & ALLOW_UNSEALED:
        return NOT_SEALED
    if load and request.length < state.data_length:
        return LENGTH_ERROR
    if not load and moves and (request.length > BLOCK or (inline and octets_of(request) - fixed != request.length)):
        return LENGTH_ERROR
    if request.opcode == ALLOC_STORE and state.quota_reached:
        return NO_SPACE
    return SUCCESS


def octets_of(request: Request) -> int:
    whole = 40 if request.opcode in (LOAD, STORE, ALLOC_STORE, BIND) else 24
    whole += 16 if request.flags & RECORD else 0
    whole += request.inline_octets if request.flags & INLINE else 0
    return max(24, whole - request.cut) + request.extra


def packed(request: Request, handle: int, generation: int, stag: int) -> bytes:
    header = struct.pack(">BBHQQHH", request.version, request.opcode, request.flags, 77, handle, generation, 0xABCD)
    descriptor = struct.pack(">IQI", stag, 0, request.length)
    return (header + (b"" if request.opcode == FREE else descriptor) + bytes(range(256)) * 4)[: octets_of(request)]


def mostly(usual: Any, *rare: Any) -> st.SearchStrategy[Any]:
    return st.integers(0, 9).flatmap(lambda n: st.sampled_from(rare) if n == 0 else st.just(usual))


def flags_for(opcode: int) -> st.SearchStrategy[int]:
    usual = [flag for flag in (INLINE, SEAL, INVALIDATE, ALLOW_UNSEALED) if flag & FLAGS.get(opcode, 0)]
    chosen = st.sets(st.sampled_from(usual)).map(sum) if usual else st.just(0)
    return st.tuples(chosen, mostly(0, RECORD, 0x8000, INLINE, SEAL, INVALIDATE)).map(lambda both: both[0] | both[1])


LENGTHS = st.sampled_from([0, 1, 99, 100, 101, BLOCK - 1, BLOCK, BLOCK + 1])


@st.composite
def requests(draw: st.DrawFn) -> Request:
    opcode = draw(st.integers(0, 19).flatmap(lambda n: st.integers(0, 255) if n == 0 else st.integers(LOAD, FREE)))
    opcode = BIND if opcode in (1, 2) else opcode
    length = draw(LENGTHS)
    return Request(
        version=draw(mostly(1, 0, 2)),
        opcode=opcode,
        flags=draw(flags_for(opcode)),
        whose=draw(st.sampled_from(["own"] * 6 + ["other's"] * 2 + ["nobody's", "outside", "foreign"])),
        state=draw(st.sampled_from(["unbound", "unsealed", "sealed"])),
        generation=draw(st.sampled_from(["any", "any", "current", "current", "another"])),
        length=length,
        inline_octets=draw(mostly(length, *{max(0, length - 1), length + 1, 0})),
        cut=draw(mostly(0, 1, 16)),
        extra=draw(mostly(0, 1, 16)),
    )


def prepare(world: Any, request: Request, *, open_: bool, read_depth: int, quota_reached: bool) -> tuple[Any, int]:
    """The peer that will send `request`, and the handle it will name, in the state it is to be in."""
    peer = world.open(read_depth)
    # Of a quota of 2, one unit may be in the block of `handle`.
    own = world.connect(requested_handles=4, requested_quota=2) if not open_ else peer
    if open_:
        peer.hello(requested_handles=4, requested_quota=2)
    other = world.connect(requested_handles=4, requested_quota=1)
    foreign = world.target.identities.admit("another domain", other.hello_message(requested_handles=4))
    handle = {
        "own": own.handle(1),
        "other's": other.handle(3),
        "nobody's": (foreign.identity.handles.first + 4) % (1 << 64),
        "outside": (own.ack.table_base_handle - 1) % (1 << 64),
        "foreign": foreign.identity.handles.first,
    }[request.whose]
    data, seal = bytes(100), request.state == "sealed"
    if request.state != "unbound" and request.whose in ("own", "other's"):
        (own if request.whose == "own" else other).bind(handle, data, seal=seal)
    elif request.state != "unbound" and request.whose == "foreign":
        offset = world.store.begin_alloc_store(handle, foreign.identity)
        world.store.commit_alloc_store(handle, offset, 100, seal)
    used = world.store.quotas.usage(own.session.identity)
    for n in range(2 - used if quota_reached else 0):
        own.bind(own.handle(2 + n), b"")
    return peer, handle


@settings(max_examples=400, deadline=None)
@given(
    sent=requests(),
    open_=mostly(True, False),
    read_depth=mostly(2, 0),
    quota_reached=st.booleans(),
)
def test_status_and_completion_of_any_request(
    new_world: Callable[..., Any], sent: Request, open_: bool, read_depth: int, quota_reached: bool
) -> None:
    """Profile 1 (order of checks) and 2 (what a completion says)."""
    check(new_world, sent, open_, read_depth, quota_reached)


def check(
    new_world: Callable[..., Any],
    request: Request,
    open_: bool = True,
    read_depth: int = 2,
    quota_reached: bool = False,
) -> int:
    """Send `request`; everything about its completion is as the profile says. The status."""
    world = new_world()
    peer, handle = prepare(world, request, open_=open_, read_depth=read_depth, quota_reached=quota_reached)
    entry = world.store.read(handle) if world.store.in_table(handle) else None
    state = State(
        open=open_,
        read_depth=read_depth,
        quota_reached=quota_reached,
        valid=entry is not None and entry.valid,
        sealed=entry is not None and entry.sealed,
        data_length=entry.data_length if entry is not None else 0,
    )
    current = entry.generation if entry is not None else 1
    table_before = world.table()
    pool_before = bytes(world.pool.view)
    stag = peer.buffer(bytes(BLOCK))
    status = expected(request, state)
    peer.send(packed(request, handle, {"any": 0, "current": current, "another": current ^ 3}[request.generation], stag))
    peer.finish_all()

    answer = peer.answers[77]
    assert answer.status == status
    well_formed = status not in (UNSUPPORTED, MALFORMED)
    assert answer.invalidated == (stag if request.flags & INVALIDATE and well_formed else None)
    if status in SILENT:
        assert answer.generation == 0
    elif status != SUCCESS:
        assert answer.generation == current
    if status != SUCCESS:
        tells_size = status == LENGTH_ERROR and request.opcode == LOAD
        assert (answer.data_length, answer.block_offset) == (100 if tells_size else 0, 0)
        assert world.table() == table_before
        assert bytes(world.pool.view) == pool_before
    else:
        check_success(world, peer, request, handle, entry, answer)
    assert peer.end_action is None
    return status


def check_success(world: Any, peer: Any, request: Request, handle: int, before: Any, answer: Any) -> None:
    """Profile 8.6 and draft 6: what SUCCESS says is the entry, and the entry is what was asked for."""
    after = world.store.read(handle)
    assert answer.generation == after.generation
    if request.opcode == FREE:
        assert (answer.data_length, answer.block_offset) == (0, 0)
        assert (after.valid, after.sealed, after.generation) == (False, False, before.generation + 1)
        return
    assert (answer.data_length, answer.block_offset) == (after.data_length, after.block_offset)
    assert world.store.pool.contains(after.block_offset)
    if request.opcode == LOAD:
        assert after == before
        return
    assert after.valid
    assert after.sealed == bool(request.flags & SEAL)
    assert after.data_length == request.length
    assert after.generation == before.generation + (request.opcode == ALLOC_STORE)
    data = (bytes(range(256)) * 4)[: request.length] if request.flags & INLINE else bytes(request.length)
    assert world.store.pool.view(after.block_offset, request.length) == data


RIGHT = Request(
    version=1,
    opcode=LOAD,
    flags=0,
    whose="own",
    state="sealed",
    generation="current",
    length=100,
    inline_octets=100,
    cut=0,
    extra=0,
)
REACHABLE: list[tuple[int, int, dict[str, Any]]] = [
    (LOAD, SUCCESS, {}),
    (LOAD, SUCCESS, {"whose": "other's"}),
    (LOAD, SUCCESS, {"state": "unsealed", "flags": ALLOW_UNSEALED | INVALIDATE, "generation": "any"}),
    (LOAD, SUCCESS, {"length": BLOCK + 1}),
    (LOAD, UNSUPPORTED, {"version": 0}),
    (LOAD, UNSUPPORTED, {"flags": RECORD}),
    (LOAD, UNSUPPORTED, {"flags": SEAL}),
    (LOAD, UNSUPPORTED, {"flags": INLINE}),
    (LOAD, MALFORMED, {"cut": 1, "flags": INVALIDATE}),
    (LOAD, MALFORMED, {"extra": 1}),
    (LOAD, NO_SESSION, {"open": False, "flags": INVALIDATE}),
    (LOAD, HANDLE_OUT_OF_RANGE, {"whose": "nobody's", "flags": INVALIDATE}),
    (LOAD, HANDLE_OUT_OF_RANGE, {"whose": "outside"}),
    (LOAD, HANDLE_OUT_OF_RANGE, {"whose": "foreign"}),
    (LOAD, NOT_BOUND, {"state": "unbound"}),
    (LOAD, GENERATION_MISMATCH, {"generation": "another", "whose": "other's"}),
    (LOAD, NOT_SEALED, {"state": "unsealed"}),
    (LOAD, LENGTH_ERROR, {"length": 99, "flags": INVALIDATE}),
    (STORE, SUCCESS, {"state": "unsealed"}),
    (STORE, SUCCESS, {"state": "unsealed", "flags": INLINE | SEAL}),
    (STORE, SUCCESS, {"state": "unsealed", "flags": INVALIDATE, "length": 0}),
    (STORE, UNSUPPORTED, {"flags": ALLOW_UNSEALED}),
    (STORE, UNSUPPORTED, {"flags": INLINE | INVALIDATE}),
    (STORE, UNSUPPORTED, {"flags": 0, "read_depth": 0}),
    (STORE, MALFORMED, {"cut": 1}),
    (STORE, MALFORMED, {"flags": INLINE, "inline_octets": 0, "cut": 1}),
    (STORE, NO_SESSION, {"open": False}),
    (STORE, HANDLE_OUT_OF_RANGE, {"whose": "other's"}),
    (STORE, NOT_BOUND, {"state": "unbound"}),
    (STORE, GENERATION_MISMATCH, {"state": "unsealed", "generation": "another"}),
    (STORE, SEALED, {}),
    (STORE, LENGTH_ERROR, {"state": "unsealed", "length": BLOCK + 1}),
    (STORE, LENGTH_ERROR, {"state": "unsealed", "flags": INLINE, "inline_octets": 99}),
    (STORE, LENGTH_ERROR, {"state": "unsealed", "flags": INLINE, "extra": 1}),
    (ALLOC_STORE, SUCCESS, {"state": "unbound"}),
    (ALLOC_STORE, SUCCESS, {"state": "unbound", "flags": INLINE | SEAL}),
    (ALLOC_STORE, SUCCESS, {"state": "unbound", "flags": INVALIDATE, "length": 0}),
    (ALLOC_STORE, UNSUPPORTED, {"state": "unbound", "flags": INLINE | INVALIDATE}),
    (ALLOC_STORE, UNSUPPORTED, {"state": "unbound", "read_depth": 0}),
    (ALLOC_STORE, MALFORMED, {"extra": 1}),
    (ALLOC_STORE, NO_SESSION, {"open": False}),
    (ALLOC_STORE, HANDLE_OUT_OF_RANGE, {"whose": "other's", "state": "unbound"}),
    (ALLOC_STORE, ALREADY_BOUND, {}),
    (ALLOC_STORE, GENERATION_MISMATCH, {"state": "unbound", "generation": "another"}),
    (ALLOC_STORE, LENGTH_ERROR, {"state": "unbound", "length": BLOCK + 1}),
    (ALLOC_STORE, LENGTH_ERROR, {"state": "unbound", "flags": INLINE, "inline_octets": 101}),
    (ALLOC_STORE, NO_SPACE, {"state": "unbound", "quota_reached": True}),
    (FREE, SUCCESS, {}),
    (FREE, SUCCESS, {"state": "unsealed", "generation": "any"}),
    (FREE, UNSUPPORTED, {"flags": INVALIDATE}),
    (FREE, UNSUPPORTED, {"version": 2}),
    (FREE, MALFORMED, {"extra": 16}),
    (FREE, NO_SESSION, {"open": False}),
    (FREE, HANDLE_OUT_OF_RANGE, {"whose": "other's"}),
    (FREE, NOT_BOUND, {"state": "unbound", "generation": "another"}),
    (FREE, GENERATION_MISMATCH, {"generation": "another"}),
    (BIND, UNSUPPORTED, {"flags": SEAL}),
]


@pytest.mark.parametrize(("opcode", "status", "changes"), REACHABLE)
def test_every_status_of_every_opcode(
    new_world: Callable[..., Any], opcode: int, status: int, changes: dict[str, Any]
) -> None:
    """Profile 1: those an RDMAP binding without direct modes can give (TARGET_ERROR: test_failures)."""
    around = {
        "open_": changes.get("open", True),
        "read_depth": changes.get("read_depth", 2),
        "quota_reached": changes.get("quota_reached", False),
    }
    fields = {key: value for key, value in changes.items() if key not in ("open", "read_depth", "quota_reached")}
    assert check(new_world, replace(RIGHT, opcode=opcode, **fields), **around) == status


ORDER = [
    UNSUPPORTED,
    MALFORMED,
    NO_SESSION,
    HANDLE_OUT_OF_RANGE,
    NOT_BOUND,
    GENERATION_MISMATCH,
    NOT_SEALED,
    LENGTH_ERROR,
]


@pytest.mark.parametrize("first_fault", range(len(ORDER)))
def test_all_faults_from_one_on(new_world: Callable[..., Any], first_fault: int) -> None:
    """Profile 1: a LOAD with every fault from the n-th on, and none before, gets the status of the n-th."""
    status = ORDER[first_fault]
    faults = ORDER[first_fault:]
    world = new_world()
    request = Request(
        version=2 if UNSUPPORTED in faults else 1,
        opcode=LOAD,
        flags=0 if NOT_SEALED in faults else ALLOW_UNSEALED,
        whose="nobody's" if HANDLE_OUT_OF_RANGE in faults else "own",
        state="unbound" if NOT_BOUND in faults else "unsealed",
        generation="another" if GENERATION_MISMATCH in faults else "current",
        length=99,
        inline_octets=0,
        cut=1 if MALFORMED in faults else 0,
        extra=0,
    )
    peer, handle = prepare(world, request, open_=NO_SESSION not in faults, read_depth=2, quota_reached=True)
    current = world.store.read(handle).generation
    peer.send(packed(request, handle, current ^ 3 if GENERATION_MISMATCH in faults else current, 0))
    assert peer.answers[77].status == status


STORE_ORDER = [HANDLE_OUT_OF_RANGE, NOT_BOUND, GENERATION_MISMATCH, SEALED, LENGTH_ERROR]
ALLOC_ORDER = [HANDLE_OUT_OF_RANGE, ALREADY_BOUND, GENERATION_MISMATCH, LENGTH_ERROR, NO_SPACE]


@pytest.mark.parametrize("status", STORE_ORDER)
def test_all_faults_of_a_store_from_one_on(world: Any, status: int) -> None:
    """Profile 1."""
    faults = STORE_ORDER[STORE_ORDER.index(status) :]
    peer = world.connect()
    if NOT_BOUND not in faults:
        peer.bind(peer.handle(), b"old", seal=SEALED in faults)
    handle = (peer.ack.table_base_handle - 1) % (1 << 64) if HANDLE_OUT_OF_RANGE in faults else peer.handle()
    request = peer.store(handle, bytes(BLOCK + 1), generation=9 if GENERATION_MISMATCH in faults else 0)
    assert peer.status(request) == status


@pytest.mark.parametrize("status", ALLOC_ORDER)
def test_all_faults_of_an_alloc_store_from_one_on(world: Any, status: int) -> None:
    """Profile 1."""
    faults = ALLOC_ORDER[ALLOC_ORDER.index(status) :]
    peer = world.connect(requested_quota=1)
    peer.bind(peer.handle(0 if ALREADY_BOUND in faults else 1), b"old")
    handle = (peer.ack.table_base_handle - 1) % (1 << 64) if HANDLE_OUT_OF_RANGE in faults else peer.handle()
    length = BLOCK + 1 if LENGTH_ERROR in faults else BLOCK
    request = peer.alloc_store(handle, bytes(length), generation=9 if GENERATION_MISMATCH in faults else 0)
    assert peer.status(request) == status


FREE_ORDER = [HANDLE_OUT_OF_RANGE, NOT_BOUND, GENERATION_MISMATCH]


@pytest.mark.parametrize("status", FREE_ORDER)
def test_all_faults_of_a_free_from_one_on(world: Any, status: int) -> None:
    """Profile 1."""
    faults = FREE_ORDER[FREE_ORDER.index(status) :]
    peer = world.connect()
    if NOT_BOUND not in faults:
        peer.bind(peer.handle(), b"old")
    handle = (peer.ack.table_base_handle - 1) % (1 << 64) if HANDLE_OUT_OF_RANGE in faults else peer.handle()
    assert peer.status(peer.free(handle, generation=9)) == status


@pytest.mark.parametrize("opcode", [0, 2, 7, 8, 9, 255])
@pytest.mark.parametrize("length", [24, 40, 152])
def test_what_is_not_a_request_is_unsupported_and_the_stream_stays(world: Any, opcode: int, length: int) -> None:
    """Profile 8.3: BIND without DIRECT_ALLOC, COMPLETION or HELLO_ACK from an initiator."""
    peer = world.connect()
    peer.send((CommonHeader(opcode, 0, 5, 6, 7, 8).pack() + bytes(128))[:length])
    answer = peer.answers[5]
    assert (answer.status, answer.generation, answer.completion.handle) == (Status.UNSUPPORTED, 0, 6)
    assert peer.end_action is None


@pytest.mark.parametrize("opcode", [STORE, ALLOC_STORE])
@pytest.mark.parametrize("length", [0, 100])
@pytest.mark.parametrize("octets", [24, 39, 40, 41])
def test_read_depth_0(new_world: Callable[..., Any], opcode: int, length: int, octets: int) -> None:
    """Profile 8.7: UNSUPPORTED whatever its Length, found with the flags, so also where the rest is malformed."""
    peer = new_world().connect(read_depth=0)
    message = struct.pack(">BBHQQHHIQIx", 1, opcode, 0, 5, peer.handle(), 0, 0, 0x77, 0, length)
    peer.send(message[:octets])
    assert peer.answers[5].status is Status.UNSUPPORTED


def test_read_depth_0_leaves_inline_and_loads(new_world: Callable[..., Any]) -> None:
    """Profile 3 "RDMA Reads"."""
    peer = new_world().connect(read_depth=0)
    peer.bind(peer.handle(), b"inline will do")
    assert peer.look(peer.handle()) == b"inline will do"


def test_status_in_a_request_is_ignored_and_so_are_stag_and_to_with_inline(world: Any) -> None:
    """Profile 8.6."""
    peer = world.connect()
    header = struct.pack(">BBHQQHH", 1, ALLOC_STORE, INLINE | SEAL, 5, peer.handle(), 0, 0xFFFF)
    peer.send(header + struct.pack(">IQI", 0xFFFF_FFFF, (1 << 64) - 1, 3) + b"abc")
    assert peer.answers[5].status is Status.SUCCESS
    assert peer.look(peer.handle()) == b"abc"
