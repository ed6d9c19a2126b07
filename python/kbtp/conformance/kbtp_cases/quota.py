"""Blocks, quotas and Generations over many rounds (draft 3.1 to 3.4, profile 5, 6.5 and 6.8)."""

from __future__ import annotations

from kbtp.conformance.case import Group
from kbtp.conformance.deviation import Deviation, NotApplicable, expect
from kbtp.conformance.initiator_side import InitiatorSide, Request
from kbtp.conformance.kbtp_cases.blocks import check_offset, next_generation
from kbtp.conformance.probe import TargetProbe
from kbtp.types import Status
from kbtp.wire import Completion

GROUP = Group("quota")

ROUNDS_AT_ONCE = 8
ROUNDS_BEFORE = 20  # so that a Generation that begins anew is another one
HEIRS, HEIR_PAUSE_S = 20, 0.05


@GROUP.target("KQ1", "KQ2", "KS8")
def quota_is_kept(probe: TargetProbe) -> None:
    """As many blocks as the quota can be bound, one more is NO_SPACE, and a FREE makes room for just one."""
    side = probe.session(requested_quota=3, requested_handles=8)
    quota = side.ack.allocation_quota
    probe.need(quota < side.ack.handle_count, "a quota smaller than the range of handles")
    for index in range(quota):
        side.bind(index, b"%d" % index)
    for _ in range(3):
        side.expect_status(side.alloc_store_inline(side.handle(quota), b"more"), Status.NO_SPACE)
    side.release(0)
    side.bind(quota, b"in its place")
    side.expect_status(side.alloc_store_inline(side.handle(0), b"more"), Status.NO_SPACE)
    for index in range(1, quota):
        side.expect_contents(index, b"%d" % index)


@GROUP.target("KQ3", "KR5")
def refused_stores_cost_nothing(probe: TargetProbe) -> None:
    """An ALLOC_STORE that is refused leaves the handle unbound and its unit of quota free."""
    side = probe.session(requested_quota=1)
    too_long = side.stream.memory.lend(side.ack.block_size + 1)
    for _ in range(5):
        side.expect_status(side.alloc_store(side.handle(0), too_long), Status.LENGTH_ERROR)
        side.expect_status(side.load(side.handle(0), None), Status.NOT_BOUND)
    side.bind(0, b"room for one")


@GROUP.target("KB3", "KB1")
def no_block_is_handed_out_twice(probe: TargetProbe) -> None:
    """Blocks that are bound at the same time, in several sessions, have different Block Offsets of the pool."""
    sides = [probe.session(requested_quota=4) for _ in range(3)]
    seen: dict[int, str] = {}
    for round_ in range(3):
        for number, side in enumerate(sides):
            for index in range(min(4, side.ack.allocation_quota)):
                text = f"{round_} {number} {index}"
                completion = side.bind(index, text.encode())
                check_offset(side, completion)
                twice = f"a block that nobody else has; {seen.get(completion.block_offset)} has it"
                expect(completion.block_offset not in seen, twice, text)
                seen[completion.block_offset] = text
        for number, side in enumerate(sides):
            for index in range(min(4, side.ack.allocation_quota)):
                side.expect_contents(index, f"{round_} {number} {index}".encode())
                side.release(index)
        seen.clear()


@GROUP.target("KB3", "KB4", "KQ4", "KH15", needs=("small-pool",), alone=True, timeout_s=30.0)
def whole_pool(probe: TargetProbe) -> None:
    """The quotas of all sessions together are no more than the pool, all of which can be bound, again and again."""
    holders: list[InitiatorSide] = []
    pool = granted = handles = 0
    while True:
        side = probe.before_hello()
        ack = side.hello(requested_quota=7, requested_handles=8)
        if ack.status is not Status.SUCCESS:
            expect(ack.status is Status.NO_SPACE, "NO_SPACE where no quota is left (profile 1)", ack.status.name)
            break
        holders.append(side)
        pool, granted, handles = ack.pool_blocks, granted + ack.allocation_quota, handles + ack.handle_count
        expect(granted <= pool, f"quotas of {pool} blocks in all (draft 3.4)", granted)
    probe.need(bool(holders), "quota that nobody else has")
    reader = probe.before_hello()
    ack = reader.hello(requested_quota=0, requested_handles=1)
    no_handles = ack.status is Status.NO_SPACE and (granted < pool or handles >= holders[0].ack.table_handles)
    probe.need(not no_handles, "handles for more initiators than share the pool")
    expect(ack.status is Status.SUCCESS, "SUCCESS for a reader that asks for no quota (profile 1)", ack.status.name)
    reader.goes_on()
    for round_ in range(3):
        offsets = set()
        for number, side in enumerate(holders):
            for index in range(side.ack.allocation_quota):
                offsets.add(side.bind(index, b"%d %d %d" % (round_, number, index)).block_offset)
        expect(len(offsets) == granted, f"{granted} different blocks", len(offsets))
        for number, side in enumerate(holders):
            for index in range(side.ack.allocation_quota):
                side.expect_contents(index, b"%d %d %d" % (round_, number, index))
                side.release(index)
    for side in holders:
        side.finish()


@GROUP.target("KG2", "KB2", timeout_s=90.0)
def generation_wraps(probe: TargetProbe) -> None:
    """Generation 65535 is followed by 1, at a bind or a free, and 0 never comes."""
    side = probe.session(requested_handles=1, requested_quota=1)
    generation = side.bind(0, b"").generation
    at_once = max(1, min(ROUNDS_AT_ONCE, side.ack.request_credits // 2))
    for _ in range(0xFFFF // 2 // at_once + 1):
        for completion in _rounds(side, at_once):
            came, expected = completion.generation, next_generation(generation)
            if completion.status is not Status.SUCCESS or came != expected:
                raise Deviation(f"SUCCESS with Generation {expected}", f"{completion.status.name} with {came}")
            generation = came
    side.expect_contents(0, b"")
    side.release(0)


def _rounds(side: InitiatorSide, count: int) -> list[Completion]:
    """FREE and ALLOC_STORE of the first handle, `count` times, all outstanding at once where credits allow."""
    handle = side.handle(0)
    requests: list[Request] = []
    for _ in range(count):
        requests += [side.free(handle), side.alloc_store_inline(handle, b"")]
    if len(requests) > side.ack.request_credits:
        return [side.call(request) for request in requests]
    side.send(*requests)
    return [side.answer(request).completion for request in requests]


@GROUP.target("KG3", alone=True)
def generations_survive_the_owner(probe: TargetProbe) -> None:
    """A handle that goes to another initiator does not begin its Generations anew."""
    first = probe.session()
    for _ in range(ROUNDS_BEFORE):
        first.bind(0, b"first")
        first.release(0)
    handle, generation = first.handle(0), first.bind(0, b"first").generation
    witness = probe.session()
    first.finish()
    heir = _next_owner(probe, handle, witness)
    index = handle - heir.first
    came, expected = heir.bind(index, b"second").generation, next_generation(next_generation(generation))
    expect(came == expected, f"Generation {expected}: the FREE and the ALLOC_STORE each count (profile 5)", came)
    heir.expect_status(heir.load(handle, None, generation=generation), Status.GENERATION_MISMATCH)
    heir.release(index)


def _next_owner(probe: TargetProbe, handle: int, witness: InitiatorSide) -> InitiatorSide:
    """The session that is granted a range with `handle`, of those that ask for all handles there are.

    Those that were granted others keep them meanwhile. Raises `NotApplicable` if nobody gets it.
    """
    for _ in range(HEIRS):
        side = probe.before_hello()
        ack = side.hello(requested_quota=1, requested_handles=(1 << 64) - 1)
        if ack.status is Status.SUCCESS and 0 <= handle - ack.first_handle < ack.handle_count:
            return side
        expect(ack.status in (Status.SUCCESS, Status.NO_SPACE), "SUCCESS or NO_SPACE", ack.status.name)
        witness.stream.expect_silence("the target notices that the owner is gone", for_s=HEIR_PAUSE_S)
    raise NotApplicable(f"none of {HEIRS} initiators was granted a handle that another one had before")
