"""Direct modes over a stream whose two ends move one item at a time, so that anything can happen in between."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kbtp.errors import ApiMisuse, ConnectionLost, PeerMisbehaved
from kbtp.initiator.batches import Batch, Results, alloc_store_batch, free_batch, load_batch
from kbtp.limits import DIRECT_LOAD_TRIES_MAX
from kbtp.types import BlockRef, EntryFlag, Feature, Status
from kbtp.verbs.api import Access, FetchAdd, RdmaRead, RdmaWrite
from kbtp.verbs.buffers import buffer_of
from kbtp.wire import AllocStore, Bind, Completion, Free, Load
from tests.initiator.direct_acks import BLOCK_BYTES, TABLE_BASE, TICKET_TIMEOUT_S, block
from tests.initiator.model_target import OTHERS, ModelTarget, contents

FREE_BLOCKS = 4


def begin(target: ModelTarget, batch: Batch) -> Batch:
    target.carrier.submit(batch, target.now_s)
    return batch


def run(target: ModelTarget, batch: Batch) -> Results:
    begin(target, batch)
    target.settle()
    assert batch.results is not None
    return batch.results


def direct_load(handles: list[Any], buffers: list[Any], allow_unsealed: bool = False) -> Batch:
    return load_batch(handles, buffers, allow_unsealed, direct=True)


def direct_alloc(data: list[Any], handles: list[int] | None = None, seal: bool = True) -> Batch:
    return alloc_store_batch(data, handles, seal, direct=True)


def sent(target: ModelTarget, kind: type) -> list[Any]:
    return [request for request in target.requests if isinstance(request, kind)]


def until_posted(target: ModelTarget, kind: Callable[[Any], bool]) -> None:
    """Go on until something of this kind is the next that the target sees."""
    while not (target.wire and kind(target.wire[0])):
        (target.execute if target.wire else target.deliver)()


# --- loads -------------------------------------------------------------------------------------


def test_a_direct_load_asks_the_target_for_nothing() -> None:
    target = ModelTarget()
    target.rebind(OTHERS, 3)
    buffer = bytearray(400)
    (result,) = run(target, direct_load([OTHERS], [buffer]))
    octets = contents(OTHERS, 2)
    assert (result.status, result.generation, result.length_bytes) == (Status.SUCCESS, 2, len(octets))
    assert result.block_offset == block(3)
    assert buffer == octets + bytes(400 - len(octets))
    assert not target.requests


def test_one_bad_item_of_a_batch_is_its_own_result() -> None:
    target = ModelTarget()
    for number in range(3):
        target.rebind(OTHERS + number, number)
    buffers: list[Any] = [bytearray(400), bytes(400), "text", bytearray(10), bytearray(400), b"", bytearray(400)]
    blocks = [OTHERS, OTHERS, OTHERS, OTHERS + 1, BlockRef(OTHERS + 2, 9, 0), OTHERS + 2, -1]
    results = run(target, direct_load(blocks, buffers))
    assert [result.status for result in results] == [
        Status.SUCCESS, None, None, Status.LENGTH_ERROR, Status.GENERATION_MISMATCH, Status.LENGTH_ERROR, None,
    ]  # fmt: skip
    assert [isinstance(result.error, ApiMisuse) for result in results] == [False, True, True, False, False, False, True]
    assert "read-only" in str(results[1].error)
    assert results[3].length_bytes == len(contents(OTHERS + 1, 2))


def test_two_loads_into_the_same_memory() -> None:
    """As with LOAD: both would be told SUCCESS."""
    target = ModelTarget()
    target.rebind(OTHERS, 0)
    target.rebind(OTHERS + 1, 1)
    memory = bytearray(800)
    view = memoryview(memory)
    one, other = begin(target, direct_load([OTHERS], [view[:400]])), direct_load([OTHERS + 1], [view[399:]])
    assert isinstance(run(target, other)[0].error, ApiMisuse)
    assert one.results is not None
    assert one.results.ok
    assert run(target, direct_load([OTHERS], [view[:400]])).ok


def test_a_registered_buffer_is_used_in_place_and_another_one_for_the_load_alone() -> None:
    target = ModelTarget()
    target.rebind(OTHERS, 0)
    before = len(target.rnic.regions)
    run(target, direct_load([OTHERS], [bytearray(400)]))
    (region,) = list(target.rnic.regions.values())[before:]
    assert not region.valid
    assert not region.access, "a peer has no right to it"


def test_what_changes_under_a_load_is_loaded_anew() -> None:
    """Draft 6.6, profile 6.3: between any two reads."""
    target = ModelTarget()
    target.rebind(OTHERS, 0)
    target.on_read += [lambda: None, lambda: target.rebind(OTHERS, 1)]
    buffer = bytearray(400)
    (result,) = run(target, direct_load([OTHERS], [buffer]))
    assert result.generation == 4
    assert buffer[: result.length_bytes] == contents(OTHERS, 4)
    assert not target.requests


def test_what_changes_under_every_try_is_left_to_load() -> None:
    target = ModelTarget()
    target.rebind(OTHERS, 0)
    target.on_read += [lambda: target.rebind(OTHERS, 1)] * (2 * DIRECT_LOAD_TRIES_MAX + 1)
    buffer = bytearray(400)
    (result,) = run(target, direct_load([OTHERS], [buffer]))
    assert len(sent(target, Load)) == 1
    assert buffer[: result.length_bytes] == contents(OTHERS, result.generation)


def test_an_unsealed_block_is_left_to_load_if_that_may_be() -> None:
    target = ModelTarget()
    target.table.bind(OTHERS, block(0), 5, False)
    assert run(target, direct_load([OTHERS], [bytearray(9)]))[0].status is Status.NOT_SEALED
    assert not target.requests
    assert run(target, direct_load([OTHERS], [bytearray(9)], allow_unsealed=True)).ok
    assert len(sent(target, Load)) == 1


def test_loads_share_the_read_depth() -> None:
    """Profile 3 "RDMA Reads": `ModelTarget.post` holds them to it."""
    target = ModelTarget(ord_=2)
    for number in range(8):
        target.rebind(OTHERS + number, number)
    buffers = [bytearray(400) for _ in range(24)]
    handles = [OTHERS + number % 8 for number in range(24)]
    begin(target, direct_load(handles, buffers))
    assert len(target.wire) == 2
    target.settle()
    for handle, buffer in zip(handles, buffers, strict=True):
        assert buffer[: len(contents(handle, 2))] == contents(handle, 2)


def test_no_more_blocks_are_on_their_way_than_arrive_in_time() -> None:
    """Profile 6.3: 16 large blocks at once would each take longer than the interval."""
    target = ModelTarget(ord_=16, block_size=2 << 20)
    begin(target, direct_load([OTHERS] * 16, [bytearray(1) for _ in range(16)]))
    assert len(target.wire) == 2


def test_a_lost_stream_ends_loads_wherever_they_are() -> None:
    target = ModelTarget(ord_=1)
    target.rebind(OTHERS, 0)
    lost = ConnectionLost("gone")
    batch = begin(target, direct_load([OTHERS] * 3, [bytearray(400) for _ in range(3)]))
    target.execute()
    target.carrier.fail(lost)
    assert batch.results is not None
    assert [result.error for result in batch.results] == [lost] * 3


# --- allocations -------------------------------------------------------------------------------


@pytest.mark.parametrize("masked", [Feature.MASKED_ATOMICS, Feature.NONE])
@pytest.mark.parametrize("length", [0, 1, 100, BLOCK_BYTES])
def test_a_direct_allocation_is_one_request(masked: Feature, length: int) -> None:
    target = ModelTarget(granted_features=Feature.INVALIDATE | Feature.DIRECT_ALLOC | masked, table_stag=0, pool_stag=0)
    data = bytes(range(256)) * 16
    (result,) = run(target, direct_alloc([data[:length]], seal=False))
    assert (result.status, result.handle, result.generation) == (Status.SUCCESS, TABLE_BASE, 2)
    assert result.length_bytes == length
    assert bytes(target.pool.view(result.block_offset, length)) == data[:length]
    assert target.table.read(TABLE_BASE).flags == EntryFlag.VALID
    (bind,) = target.requests
    assert isinstance(bind, Bind)
    assert len(target.written) == (length > 0)


def test_as_many_allocations_as_the_quota_and_no_ticket_more() -> None:
    """Draft 3.4; `ModelTarget` holds the FetchAdds to it."""
    target = ModelTarget(bound_blocks=1)
    target.mine[0] = 0
    results = run(target, direct_alloc([bytes([number]) * 9 for number in range(6)]))
    assert [result.status for result in results] == [Status.SUCCESS] * 3 + [Status.NO_SPACE] * 3
    assert run(target, free_batch([results[1].ref])).ok
    target.publish()
    assert run(target, direct_alloc([b"x", b"y"])).statuses.tolist() == [Status.SUCCESS, Status.NO_SPACE]
    # What the target allocates counts too.
    assert run(target, free_batch([results[0].ref])).ok
    target.publish()
    assert run(target, alloc_store_batch([b"x"], None, True)).ok
    assert run(target, direct_alloc([b"y"]))[0].status is Status.NO_SPACE


def test_one_bad_allocation_of_a_batch_takes_no_ticket() -> None:
    target = ModelTarget()
    target.table.bind(TABLE_BASE + 4, block(0), 0, True)
    too_long = b"x" * (BLOCK_BYTES + 1)
    data = [b"good", object(), too_long, b"good", too_long, b"good"]
    handles = [TABLE_BASE, TABLE_BASE + 1, TABLE_BASE + 2, TABLE_BASE + 40, TABLE_BASE + 4, TABLE_BASE + 3]
    results = run(target, direct_alloc(data, handles))
    assert [result.status for result in results] == [
        Status.SUCCESS, None, Status.LENGTH_ERROR, Status.HANDLE_OUT_OF_RANGE, Status.ALREADY_BOUND, Status.SUCCESS,
    ]  # fmt: skip
    assert isinstance(results[1].error, ApiMisuse)
    assert (len(sent(target, Bind)), len(sent(target, AllocStore))) == (2, 3)


def test_beyond_the_quota_the_first_check_that_fails_names_the_status() -> None:
    target = ModelTarget()
    run(target, direct_alloc([b"x"] * 4)).raise_for_status()
    results = run(target, direct_alloc([b"y"] * 3, [TABLE_BASE + 40, TABLE_BASE, TABLE_BASE + 6]))
    assert results.statuses.tolist() == [Status.HANDLE_OUT_OF_RANGE, Status.ALREADY_BOUND, Status.NO_SPACE]
    assert len(sent(target, Bind)) == 4


def test_no_handle_left_takes_no_ticket() -> None:
    target = ModelTarget(handle_count=1)
    results = run(target, direct_alloc([b"one", b"two"]))
    assert results.statuses.tolist() == [Status.SUCCESS, Status.NO_SPACE]
    assert "all 1 handles" in str(results[1].error)


def test_a_slot_that_comes_late_is_waited_for() -> None:
    target = ModelTarget()
    blocks = run(target, direct_alloc([b"x"] * 4)).refs
    assert run(target, free_batch(blocks[:1])).ok
    batch = begin(target, direct_alloc([b"late"]))
    for _ in range(4):
        while target.wire or target.back:
            (target.execute if target.wire else target.deliver)()
        assert batch.results is None
        due_s = target.carrier.due_s()
        assert due_s is not None
        target.pass_time(due_s - target.now_s)
        assert len(target.wire) == 1, "one read each time"
    target.publish()
    target.settle()
    assert batch.results is not None
    assert batch.results.ok


@pytest.mark.parametrize("status", [Status.ALREADY_BOUND, Status.TARGET_ERROR, Status.UNSUPPORTED])
def test_a_refused_bind_gives_its_ticket_back(status: Status) -> None:
    """Profile 6.11: BIND to a spare handle, FREE; then the block can be allocated again."""
    target = ModelTarget()
    target.refusals.append(status)
    (result,) = run(target, direct_alloc([b"refused"], [TABLE_BASE + 5]))
    assert (result.status, result.handle) == (status, TABLE_BASE + 5)
    assert [type(request) for request in target.requests] == [Bind, Bind, Free]
    assert target.requests[1].data_length == 0
    assert len(target.written) == 1
    assert not target.taken
    target.publish()
    assert target.ring.free_count == FREE_BLOCKS
    assert not target.session.direct_alloc_is_over
    assert run(target, direct_alloc([b"x"] * 4)).ok


def test_a_handle_that_is_bound_already_leads_to_the_next_one() -> None:
    """After RESUMED. The data is written once."""
    target = ModelTarget()
    target.table.bind(TABLE_BASE, block(0), 0, True)
    (result,) = run(target, direct_alloc([b"x"]))
    assert (result.status, result.handle) == (Status.SUCCESS, TABLE_BASE + 1)
    assert (len(target.written), len(target.requests)) == (1, 2)


def test_a_ticket_that_cannot_be_given_back_ends_direct_allocation() -> None:
    target = ModelTarget()
    target.refusals += [Status.TARGET_ERROR, Status.TARGET_ERROR]
    assert run(target, direct_alloc([b"x"]))[0].status is Status.TARGET_ERROR
    assert target.session.direct_alloc_is_over
    assert run(target, direct_alloc([b"y"])).ok
    assert len(sent(target, AllocStore)) == 1


def test_no_ticket_is_waited_for_while_an_older_one_is_not_bound() -> None:
    """Profile 6.11; `ModelTarget` holds the reads of slots to it. With one credit, BINDs come one by one."""
    target = ModelTarget()
    blocks = run(target, direct_alloc([b"x"] * 4)).refs
    run(target, free_batch(blocks))
    batch = begin(target, direct_alloc([b"a", b"b", b"c", b"d"]))
    for _ in range(40):
        if target.wire or target.back:
            (target.execute if target.wire else target.deliver)()
        else:
            target.pass_time(0.01)
    assert batch.results is None
    for _ in range(4):
        target.publish()
        target.pass_time(0.1)
        while target.wire or target.back:
            (target.execute if target.wire else target.deliver)()
    target.settle()
    assert batch.results is not None
    assert batch.results.ok


@pytest.mark.parametrize("refused", [False, True])
def test_a_bind_answered_before_its_write_has_left_ends_nothing(refused: bool) -> None:
    """The memory is the caller's again once an operation has ended, so nothing may leave it after that."""
    target = ModelTarget()
    if refused:
        target.refusals.append(Status.TICKET_MISMATCH)
    batch = begin(target, direct_alloc([bytearray(b"x" * 100)]))
    until_posted(target, lambda post: isinstance(post, RdmaWrite))
    (piece,) = target.wire[0].sges
    target.wire.rotate(-1)
    target.execute()
    target.deliver()
    assert batch.results is None
    assert piece.region.valid
    target.settle()
    assert batch.results is not None
    assert batch.results[0].status is (Status.TICKET_MISMATCH if refused else Status.SUCCESS)
    assert not piece.region.valid


def test_the_ends_of_write_and_bind_come_in_either_order() -> None:
    """Nothing orders completions of the send queue with those of the receive queue."""
    target = ModelTarget()
    batch = begin(target, direct_alloc([b"x"]))
    until_posted(target, lambda post: isinstance(post, RdmaWrite))
    target.execute()
    target.execute()
    target.back.rotate(1)
    target.settle()
    assert batch.results is not None
    assert batch.results.ok
    assert run(target, direct_alloc([b"y"])).ok


# --- tickets that run out ----------------------------------------------------------------------


def out_of_time(target: ModelTarget) -> None:
    target.pass_time(TICKET_TIMEOUT_S)


@pytest.mark.parametrize("stage", ["FetchAdd", "slot", "waiting"])
def test_a_ticket_that_runs_out_leaves_all_to_alloc_store(stage: str) -> None:
    """Profile 6.11: no FetchAdd and no RDMA Write after that."""
    target = ModelTarget(request_credits=2)
    if stage == "waiting":
        run(target, free_batch(run(target, direct_alloc([b"x"] * 4)).refs))
    writes, asked = len(target.written), len(target.requests)
    batch = begin(target, direct_alloc([b"one", b"two", b"three"]))
    until_posted(target, lambda post: isinstance(post, FetchAdd if stage == "FetchAdd" else RdmaRead))
    if stage == "waiting":
        while target.carrier.due_s() is None or target.wire or target.back:
            (target.execute if target.wire else target.deliver)()
    out_of_time(target)
    assert target.session.direct_alloc_is_over
    while target.unpublished:
        target.publish()
    target.settle()
    assert batch.results is not None
    # One block for each ticket that is lost is not there before the target takes it back.
    assert set(batch.results.statuses.tolist()) <= {Status.SUCCESS, Status.NO_SPACE}
    assert {type(request) for request in target.requests[asked:]} == {AllocStore}
    assert len(target.requests) == asked + 3
    assert len(target.written) == writes
    assert run(target, direct_alloc([b"later"], [TABLE_BASE + 7]))[0].handle == TABLE_BASE + 7
    assert isinstance(target.requests[-1], AllocStore)


def test_a_bind_without_a_credit_in_time_is_not_sent() -> None:
    target = ModelTarget(request_credits=1)
    target.rebind(OTHERS, 0)
    asked = begin(target, load_batch([OTHERS], [bytearray(400)], False))
    batch = begin(target, direct_alloc([b"late"]))
    hold = target.wire.popleft()
    while target.wire or target.back:
        (target.execute if target.wire else target.deliver)()
    out_of_time(target)
    target.wire.append(hold)
    target.settle()
    assert asked.results is not None
    assert asked.results.ok
    assert batch.results is not None
    assert batch.results.ok
    assert [type(request) for request in target.requests] == [Load, AllocStore]
    assert not target.written


def test_an_abandoned_ticket_leaves_its_data_to_alloc_store() -> None:
    target = ModelTarget()
    target.refusals.append(Status.TICKET_ABANDONED)
    (result,) = run(target, direct_alloc([b"data"], [TABLE_BASE + 2]))
    assert (result.status, result.handle) == (Status.SUCCESS, TABLE_BASE + 2)
    assert [type(request) for request in target.requests] == [Bind, AllocStore]
    assert target.session.direct_alloc_is_over


def test_a_bind_that_is_on_its_way_is_waited_for() -> None:
    target = ModelTarget()
    batch = begin(target, direct_alloc([b"data"]))
    until_posted(target, lambda post: not isinstance(post, FetchAdd | RdmaRead))
    out_of_time(target)
    target.settle()
    assert batch.results is not None
    assert batch.results.ok
    assert not target.session.direct_alloc_is_over


def test_a_lost_stream_ends_allocations_wherever_they_are() -> None:
    lost = ConnectionLost("gone")
    for steps in range(14):
        target = ModelTarget(request_credits=2)
        target.refusals.append(Status.TARGET_ERROR)
        batch = begin(target, direct_alloc([b"1", b"2", b"3"]))
        for _ in range(steps):
            if target.wire or target.back:
                (target.execute if target.wire else target.deliver)()
        target.carrier.fail(lost)
        assert batch.results is not None
        for result in batch.results:
            assert result.error is lost or result.status is not None


# --- what goes wrong on this side ---------------------------------------------------------------


def test_memory_that_cannot_be_registered_is_misuse_and_takes_no_ticket() -> None:
    target = ModelTarget()
    target.rebind(OTHERS, 0)
    target.rnic.refuses = True
    for batch in (direct_load([OTHERS], [bytearray(400)]), direct_alloc([b"x"])):
        assert isinstance(run(target, batch)[0].error, ApiMisuse)
    assert not target.taken
    target.rnic.refuses = False
    assert run(target, direct_load([OTHERS], [bytearray(400)])).ok
    assert run(target, direct_alloc([b"x"] * 4)).ok


def test_a_region_that_its_caller_revokes_meanwhile_is_not_used() -> None:
    target = ModelTarget()
    target.rebind(OTHERS, 0)
    memory = bytearray(400)
    region = target.rnic.register(memory, Access.NONE)
    target.carrier.add_region(region, buffer_of(memory))  # type: ignore[arg-type]
    batch = begin(target, direct_alloc([memory]))
    until_posted(target, lambda post: isinstance(post, RdmaRead))
    region.revoke()
    target.settle()
    assert batch.results is not None
    assert batch.results.ok
    assert len(target.written) == 1


def registered(target: ModelTarget, memory: Any) -> Any:
    region = target.rnic.register(memory, Access.NONE)
    target.carrier.add_region(region, buffer_of(memory))  # type: ignore[arg-type]
    return region


def test_a_load_does_not_go_through_a_read_only_view_of_its_memory() -> None:
    target = ModelTarget()
    target.rebind(OTHERS, 0)
    memory = bytearray(400)
    registered(target, memoryview(memory).toreadonly())
    (result,) = run(target, direct_load([OTHERS], [memory]))
    assert result.ok
    assert memory[: result.length_bytes] == contents(OTHERS, 2)
    regions = len(target.rnic.regions)
    assert run(target, direct_alloc([memory])).ok
    assert len(target.rnic.regions) == regions, "to write from it, it is used in place"


def test_a_region_that_is_revoked_at_the_last_moment_is_misuse_of_its_load_alone() -> None:
    """By another thread of the caller's, between the check and the post. With an ORD of 1, others wait for it."""
    for ord_ in (1, 4):
        target = ModelTarget(ord_=ord_)
        for number in range(3):
            target.rebind(OTHERS + number, number)
        buffers = [bytearray(400) for _ in range(3)]
        target.revoked_at_post.append(registered(target, buffers[1]))
        results = run(target, direct_load([OTHERS, OTHERS + 1, OTHERS + 2], buffers))
        assert [result.ok for result in results] == [True, False, True]
        assert isinstance(results[1].error, ApiMisuse)
        assert run(target, direct_load([OTHERS] * 8, [bytearray(400) for _ in range(8)])).ok


def test_a_region_that_is_revoked_at_the_last_moment_is_misuse_of_its_allocation_alone() -> None:
    """Its ticket is given back; what goes out together with its BIND does go out."""
    target = ModelTarget()
    data = [bytes([number]) * 90 for number in range(3)]
    target.revoked_at_post.append(registered(target, memory := bytearray(data[1])))
    results = run(target, direct_alloc([data[0], memory, data[2]]))
    assert [result.ok for result in results] == [True, False, True]
    assert isinstance(results[1].error, ApiMisuse)
    for result, octets in zip(results, data, strict=True):
        if result.ok:
            assert bytes(target.pool.view(result.block_offset, 90)) == octets
    assert [type(request) for request in target.requests] == [Bind, Bind, Bind, Free]
    assert not target.taken
    target.publish()
    assert run(target, direct_alloc([b"x"] * 2)).ok
    assert not target.session.direct_alloc_is_over


def test_what_is_given_to_a_stream_that_has_ended_ends_with_it() -> None:
    target = ModelTarget()
    target.ended = True
    batches = [begin(target, direct_load([OTHERS], [bytearray(400)])), begin(target, direct_alloc([b"x"]))]
    lost = ConnectionLost("gone")
    target.carrier.fail(lost)
    for batch in batches:
        assert batch.results is not None
        assert batch.results[0].error is lost


# --- a target that breaks the protocol ---------------------------------------------------------


def test_a_head_that_cannot_be_is_the_targets_fault() -> None:
    target = ModelTarget()
    begin(target, direct_alloc([b"x"]))
    target.execute()
    add, value = target.back.popleft()
    target.back.append((add, value ^ 1 << 16))
    with pytest.raises(PeerMisbehaved, match="no FetchAdd can have made"):
        target.deliver()


@pytest.mark.parametrize("fields", [{"data_length": 3}, {"block_offset": block(0)}])
def test_a_bind_that_bound_something_else_is_the_targets_fault(fields: dict[str, int]) -> None:
    """Profile 8.6."""
    target = ModelTarget()
    begin(target, direct_alloc([b"data"]))
    while not (target.back and isinstance(target.back[0], bytes)):
        (target.execute if target.wire else target.deliver)()
    told = Completion.parse(target.back.popleft())
    good = {"data_length": told.data_length, "block_offset": told.block_offset, **fields}
    target.back.append(Completion(told.request_id, told.handle, told.generation, told.status, **good).pack())
    with pytest.raises(PeerMisbehaved, match="asked was 4 at"):
        target.deliver()


# --- anything, in any order --------------------------------------------------------------------

ACTIONS = st.sampled_from(
    ["execute"] * 8
    + ["deliver"] * 8
    + ["load", "load", "alloc", "alloc", "alloc at", "store", "free", "free", "rebind", "publish", "publish"]
    + ["refuse", "time", "long time"]
)


class Anything:
    """Both modes in any order, and a record of what must come of them."""

    def __init__(self) -> None:
        self.target = ModelTarget(ord_=3, request_credits=3)
        for number in range(4):
            self.target.rebind(OTHERS + number, number)
        self.loads: list[tuple[Batch, int, bytearray]] = []
        self.stores: list[tuple[Batch, bytes]] = []
        self.count = 0

    def act(self, action: str, number: int) -> None:
        target = self.target
        if action == "execute" and target.wire:
            target.execute()
        elif action == "deliver" and target.back:
            target.deliver()
        elif action == "load":
            buffer = bytearray(b"?" * 300)
            self.loads.append((begin(target, direct_load([OTHERS + number], [buffer])), OTHERS + number, buffer))
        elif action in ("alloc", "alloc at", "store"):
            self.count += 1
            data = bytes([self.count & 0xFF]) * (1 + self.count % 50)
            handles = [TABLE_BASE + number] if action == "alloc at" else None
            self.stores.append(
                (begin(target, alloc_store_batch([data], handles, True, direct=action != "store")), data)
            )
        elif action == "free":
            bound = [one[0].results[0].ref for one in self.stores if one[0].results and one[0].results.ok]
            for ref in bound[:1]:
                begin(target, free_batch([ref]))
                self.stores = [one for one in self.stores if not (one[0].results and one[0].results[0].ref == ref)]
        elif action == "rebind":
            target.rebind(OTHERS + number, number)
        elif action == "publish":
            target.publish()
        elif action == "refuse":
            target.refusals.append(Status.TARGET_ERROR)
        elif action in ("time", "long time"):
            target.pass_time(0.005 if action == "time" else 0.11)


@given(st.lists(st.tuples(ACTIONS, st.integers(0, 3)), max_size=120))
def test_nothing_is_ever_silently_wrong(actions: list[tuple[str, int]]) -> None:
    """What a load returned is what that binding held; what a store returned is there; no block is lost or doubled."""
    anything = Anything()
    target = anything.target
    for action, number in actions:
        anything.act(action, number)
    target.refusals.clear()
    for _ in range(8):
        while target.unpublished:
            target.publish()
        target.settle()
    for batch, handle, buffer in anything.loads:
        assert batch.results is not None
        (result,) = batch.results
        assert result.ok
        assert buffer[: result.length_bytes] == contents(handle, result.generation)
    bound = []
    for batch, data in anything.stores:
        assert batch.results is not None
        (result,) = batch.results
        assert result.status in (Status.SUCCESS, Status.NO_SPACE, Status.ALREADY_BOUND, Status.TARGET_ERROR)
        if result.ok:
            bound.append(result.handle)
            assert bytes(target.pool.view(target.mine[result.handle], len(data))) == data
            assert result.length_bytes == len(data)
    assert sorted(bound) == sorted(target.mine)
    if not target.session.direct_alloc_is_over:
        assert not target.taken
        assert target.ring.free_count + len(target.mine) == FREE_BLOCKS
