"""An initiator that loads and allocates directly (draft 6.6, profile 6.3 and 6.11), before a target by hand."""

from __future__ import annotations

import time

from kbtp.conformance.case import Group
from kbtp.conformance.deviation import expect
from kbtp.conformance.direct_target import (
    BLOCK_BYTES,
    BLOCKS,
    POOL_BASE,
    DirectTarget,
    Step,
)
from kbtp.conformance.probe import InitiatorProbe
from kbtp.conformance.target_side import Request
from kbtp.limits import BLOCK_OFFSET_EMPTY
from kbtp.types import EntryFlag, Status
from kbtp.wire import AllocStore, Bind, Load

GROUP = Group("initiator-direct")

NEEDS = ("direct", "one-by-one")
LOAD_NEEDS = ("direct-loads", "one-by-one")
GOOD = int(EntryFlag.VALID | EntryFlag.SEALED)
PAUSE_S = 0.25  # more than the 100 ms that a direct load may take
AGAIN_MAX = 50  # reads of one entry by an initiator whose tries are bounded


def direct(probe: InitiatorProbe, **options: int) -> DirectTarget:
    return DirectTarget(probe.respond(probe.tcp()), probe.key, **options).open()


def succeed(probe: InitiatorProbe, target: DirectTarget) -> None:
    """The rest is honest, and all of the work succeeds: no wrong octet was taken for a right one."""
    target.before_read = lambda step: None
    target.run()
    target.stream.close()
    expect(probe.work_succeeded(), "that all of its work succeeds", "that some did not")


def loading(came: Step | Request) -> bool:
    """The initiator begins a direct load."""
    return isinstance(came, Step) and came.what == "entry"


def first_bound(target: DirectTarget) -> Request:
    """What the initiator's first block was bound by, directly or not; it is served."""
    bound = target.run_until("a BIND or an ALLOC_STORE", lambda came: isinstance(came, Bind | AllocStore))
    assert not isinstance(bound, Step)
    target.serve_one(bound)
    return bound


@GROUP.initiator("KNX1", "KNX6", "KNX12", needs=NEEDS)
def whole_workload(probe: InitiatorProbe) -> None:
    """The workload loads and allocates directly, in the steps of draft 6.6 and no others."""
    target = direct(probe)
    target.run()
    names = [step.what for step in target.steps]
    expect({"entry", "block", "ticket", "slot", "write"} <= set(names), "all steps of both modes", names)
    tickets = [at for at, name in enumerate(names) if name == "ticket"]
    for at in tickets:
        following = names[at + 1 : at + 4]
        expect(following == ["slot", "slot", "write"], "slot, slot once more, Write behind a FetchAdd", following)
    binds = [request for request in target.requests if isinstance(request, Bind)]
    expect(len(binds) >= 2, "BINDs", target.requests)
    expect(probe.work_succeeded(), "that all of its work succeeds", "that some did not")


@GROUP.initiator("KNX1", needs=LOAD_NEEDS)
def one_read_after_the_other(probe: InitiatorProbe) -> None:
    """The block is not read before the entry has come, nor the entry again before the block has come."""
    target = direct(probe)
    target.run_until("a direct load", loading)
    for what in ("entry", "block"):
        seen: list[Step] = []

        def hold(step: Step, seen: list[Step] = seen) -> None:
            seen.append(step)
            target.stream.expect_silence(f"the Read of the {step.what} is not answered yet", for_s=0.05)

        def held(came: Step | Request, what: str = what) -> bool:
            return isinstance(came, Step) and came.what == what

        target.before_read = hold
        target.run_until(f"a Read of the {what}", held)
        expect(len(seen) >= 1, "a Read that was held", seen)
    succeed(probe, target)


def tries_again(came: Step | Request | None, handle: int) -> bool:
    """The second read of the entry may be the first one of the next try."""
    if isinstance(came, Step):
        return came.what == "block" or came == Step("entry", handle)
    return isinstance(came, Load) and came.handle == handle


CHANGES: dict[str, tuple[int, int, int, int]] = {
    "flags": (GOOD ^ int(EntryFlag.SEALED), 0, 0, 0),
    "generation": (GOOD, 1, 0, 0),
    "length": (GOOD, 0, -1, 0),
    "block-offset": (GOOD, 0, 0, BLOCK_BYTES),
}


def _change(name: str) -> None:
    """One case for each entry of CHANGES."""

    def run(probe: InitiatorProbe) -> None:
        target = direct(probe)
        step = target.run_until("a direct load", loading)
        assert isinstance(step, Step)
        handle, (good, generation, length, offset) = step.at, target.entry(step.at)
        flags, *more = CHANGES[name]
        changed = (flags, generation + more[0], length + more[1], offset + more[2])

        def second_entry(read: Step) -> None:
            if read.what == "block":
                target.put_entry(handle, *changed)

        target.before_read = second_entry
        target.run_until("the second read of the entry", loading)
        target.put_entry(handle, good, generation, length, offset)
        target.before_read = lambda read: None
        came = target.next_step()
        expect(tries_again(came, handle), "another try, or a LOAD of the handle: the two reads differed", came)
        if came is not None and not isinstance(came, Step):
            target.serve_one(came)
        succeed(probe, target)

    run.__name__ = f"entry_changes_under_way_{name}"
    run.__doc__ = f"A block whose entry is another one after it was read is not taken: {name.replace('-', ' ')}."
    GROUP.initiator("KNX2", needs=LOAD_NEEDS)(run)


for _name in CHANGES:
    _change(_name)


@GROUP.initiator("KNX2", needs=LOAD_NEEDS)
def block_changes_with_its_generation(probe: InitiatorProbe) -> None:
    """Octets that were read while the block was freed and used anew never come out as those that were stored."""
    target = direct(probe)
    step = target.run_until("a direct load", loading)
    assert isinstance(step, Step)
    flags, generation, length, offset = target.entry(step.at)
    start = offset - POOL_BASE
    stored = bytes(target.pool.octets[start : start + length])

    def reuse(read: Step) -> None:
        if read.what == "block":
            target.pool.octets[start : start + length] = bytes(length)
            target.put_entry(step.at, flags, generation + 2, length, offset)

    target.before_read = reuse
    target.run_until("the second read of the entry", loading)
    target.pool.octets[start : start + length] = stored
    target.put_entry(step.at, flags, generation, length, offset)
    succeed(probe, target)


@GROUP.initiator("KNX15", needs=LOAD_NEEDS)
def two_torn_reads_that_agree(probe: InitiatorProbe) -> None:
    """An entry that shows another block's Block Offset twice, and then its own, gives nobody that block's octets."""
    target = direct(probe)
    bind = first_bound(target)
    flags, generation, length, offset = target.entry(bind.handle)
    target.put_entry(bind.handle, flags, generation, length, offset + BLOCK_BYTES)
    reads = 0

    def torn(step: Step) -> None:
        nonlocal reads
        reads += step == Step("entry", bind.handle)
        if reads == 3:
            target.put_entry(bind.handle, flags, generation, length, offset)

    target.before_read = torn
    target.run_until("the second read of the entry", lambda came: reads == 2)
    came = target.next_step()
    expect(tries_again(came, bind.handle), "a third read of the entry (profile 6.3)", came)
    if came is not None and not isinstance(came, Step):
        target.serve_one(came)
    target.put_entry(bind.handle, flags, generation, length, offset)
    succeed(probe, target)


BAD_ENTRIES: dict[str, tuple[int, int, int]] = {
    "not-valid": (int(EntryFlag.SEALED), 100, POOL_BASE),
    "not-sealed": (int(EntryFlag.VALID), 100, POOL_BASE),
    "before-the-pool": (GOOD, 100, POOL_BASE - BLOCK_BYTES),
    "behind-the-pool": (GOOD, 100, POOL_BASE + BLOCKS * BLOCK_BYTES),
    "between-blocks": (GOOD, 100, POOL_BASE + 64),
    "longer-than-a-block": (GOOD, BLOCK_BYTES + 1, POOL_BASE),
    "longer-than-the-buffer": (GOOD, 101, POOL_BASE),
}


def _bad_entry(name: str) -> None:
    """One case for each entry of BAD_ENTRIES."""

    def run(probe: InitiatorProbe) -> None:
        target = direct(probe)
        bind = first_bound(target)
        flags, generation, length, offset = target.entry(bind.handle)
        bad_flags, bad_length, bad_offset = BAD_ENTRIES[name]
        target.put_entry(bind.handle, bad_flags, generation, bad_length, bad_offset)
        reads = 0
        while (came := target.next_step()) == Step("entry", bind.handle):
            reads += 1
            expect(reads <= AGAIN_MAX, f"at most {AGAIN_MAX} reads of an entry that cannot be, then LOAD", reads)
        expect(not isinstance(came, Step), "no Read of a block for an entry that cannot be (profile 6.3)", came)
        target.put_entry(bind.handle, flags, generation, length, offset)
        if isinstance(came, Load):
            target.serve_one(came)
            succeed(probe, target)

    run.__name__ = f"bad_entry_{name}"
    run.__doc__ = f"Before the block is read its entry is looked at: {name.replace('-', ' ')}."
    GROUP.initiator("KNX3", needs=LOAD_NEEDS)(run)


for _name in BAD_ENTRIES:
    _bad_entry(_name)


@GROUP.initiator("KNX4", needs=LOAD_NEEDS)
def entry_that_never_rests(probe: InitiatorProbe) -> None:
    """An entry that is another one each time it is read is given up, and LOAD used."""
    target = direct(probe)
    step = target.run_until("a direct load", loading)
    assert isinstance(step, Step)
    flags, generation, length, offset = target.entry(step.at)
    reads = 0

    def turn(read: Step) -> None:
        nonlocal reads
        if read == Step("entry", step.at):
            reads += 1
            target.put_entry(step.at, flags, generation ^ (reads & 1), length, offset)

    target.before_read = turn
    came = target.run_until("a LOAD", lambda came: isinstance(came, Load) or reads > AGAIN_MAX)
    expect(isinstance(came, Load), f"a LOAD after at most {AGAIN_MAX} tries", f"{reads} reads of the entry")
    target.put_entry(step.at, flags, generation, length, offset)
    assert isinstance(came, Load)
    target.serve_one(came)
    succeed(probe, target)


@GROUP.initiator("KNX5", needs=LOAD_NEEDS)
def too_long_between_the_entry_reads(probe: InitiatorProbe) -> None:
    """More than 100 ms between the two reads of the entry: what was read is discarded, since Generations repeat."""
    target = direct(probe)
    step = target.run_until("a direct load", loading)
    assert isinstance(step, Step)
    began_s = time.monotonic()
    paused = False

    def pause(read: Step) -> None:
        nonlocal paused
        if read.what == "block" and not paused:
            paused = True
            target.stream.expect_silence("the Read of the block is not answered yet", for_s=PAUSE_S)

    target.before_read = pause
    target.run_until("the second read of the entry", loading)
    took_s = time.monotonic() - began_s
    came = target.next_step()
    expect(tries_again(came, step.at), f"another try: {took_s:.2f} s lay between the reads of the entry", came)
    if came is not None and not isinstance(came, Step):
        target.serve_one(came)
    succeed(probe, target)


# --- direct allocation ---


def taking(came: Step | Request) -> bool:
    return isinstance(came, Step) and came.what == "ticket"


@GROUP.initiator("KNX7", needs=NEEDS)
def slot_that_comes_late(probe: InitiatorProbe) -> None:
    """A slot with another Sequence, or that is empty, is read again until the block is there; nothing is written."""
    target = direct(probe)
    block_offset, seen = target.slot(0)[2], 0
    target.put_slot(0, -8, BLOCK_OFFSET_EMPTY)

    def late(read: Step) -> None:
        nonlocal seen
        if read == Step("slot", 0):
            seen += 1
            if seen == 2:
                target.put_slot(0, -8, block_offset)
            elif seen == 3:
                target.put_slot(0, 0, BLOCK_OFFSET_EMPTY)
            elif seen == 4:
                target.put_slot(0, 0, block_offset)

    target.before_read = late
    target.run_until("a Write of the block", lambda came: isinstance(came, Step) and came.what == "write")
    expect(seen >= 5, "five reads of the slot or more: two that agree after three that are no good", seen)
    succeed(probe, target)


@GROUP.initiator("KNX8", needs=NEEDS)
def confirming_read_that_differs(probe: InitiatorProbe) -> None:
    """A Block Offset that the confirming read does not show again is not used."""
    target = direct(probe)
    block_offset, seen = target.slot(0)[2], 0

    def torn(read: Step) -> None:
        nonlocal seen
        if read == Step("slot", 0):
            seen += 1
            target.put_slot(0, 0, block_offset + BLOCK_BYTES if seen == 1 else block_offset)

    target.before_read = torn
    written = target.run_until("a Write of the block", lambda came: isinstance(came, Step) and came.what == "write")
    expect(written == Step("write", block_offset), f"a Write at {block_offset:#x}, which was read twice", written)
    expect(seen >= 3, "three reads of the slot or more", seen)
    succeed(probe, target)


@GROUP.initiator("KNX9", needs=NEEDS)
def ticket_that_ran_out(probe: InitiatorProbe) -> None:
    """An initiator whose ticket ran out while it waited for the slot writes nothing and takes no other ticket."""
    timeout_ms = 400
    target = direct(probe, ticket_timeout_ms=timeout_ms)
    block_offset = target.slot(0)[2]
    target.put_slot(0, -8, BLOCK_OFFSET_EMPTY)
    target.run_until("a FetchAdd", taking)
    end_s = time.monotonic() + timeout_ms / 1000 * 1.5

    def late(read: Step) -> None:
        if read == Step("slot", 0) and time.monotonic() >= end_s:
            target.put_slot(0, 0, block_offset)

    target.before_read = late
    steps = len(target.steps)
    came = target.run(lambda came: isinstance(came, AllocStore))
    done = {step.what for step in target.steps[steps:]}
    expect(not done & {"write", "ticket"}, "no Write and no other FetchAdd (profile 6.11)", target.steps[steps:])
    expect(came is None or isinstance(came, AllocStore), "ALLOC_STORE, or the end", came)


@GROUP.initiator("KNX10", needs=NEEDS)
def refused_bind(probe: InitiatorProbe) -> None:
    """A BIND that is refused is told to the caller; its ticket goes back by BIND to a spare handle, if at all."""
    target = direct(probe)
    bind = target.run_until("a BIND", lambda came: isinstance(came, Bind))
    assert isinstance(bind, Bind)
    target.complete(bind, Status.ALREADY_BOUND, generation=9)
    again = target.run(lambda came: isinstance(came, Bind))
    if again is not None:
        assert isinstance(again, Bind)
        same = again.ticket == bind.ticket and again.handle != bind.handle
        expect(same, "its ticket given back by BIND to a spare handle (profile 6.11)", again)
    target.stream.close()
    probe.refuse_further()
    expect(not probe.work_succeeded(), "an error: the block was not bound as asked for", "that its work succeeds")


@GROUP.initiator("KNX11", needs=("one-by-one",))
def no_grant_no_direct_mode(probe: InitiatorProbe) -> None:
    """Where no direct mode is granted neither Read nor FetchAdd nor BIND comes."""
    session = probe.session()
    while (request := session.request_or_end()) is not None:
        expect(not isinstance(request, Bind), "no BIND without DIRECT_ALLOC", request)
        session.serve_one(request)


@GROUP.initiator("KNX14", needs=NEEDS)
def no_ticket_beyond_the_quota(probe: InitiatorProbe) -> None:
    """With two blocks bound and a quota of two no third ticket is taken: the workload has three blocks."""
    target = DirectTarget(probe.respond(probe.tcp()), probe.key)
    target.open(allocation_quota=2)
    tickets = 0

    def third(came: Step | Request) -> bool:
        nonlocal tickets
        tickets += taking(came)
        return tickets == 3 or isinstance(came, AllocStore)

    target.run(third)
    expect(tickets <= 2, "no FetchAdd beyond the quota of 2 (draft 3.4)", f"{tickets} with 2 blocks bound")
