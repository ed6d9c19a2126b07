"""An initiator that loads and allocates directly (draft 6.6, profile 6.3 and 6.11).

By hand each RDMA Read and FetchAdd is seen and answered. An RNIC answers them unseen: cases that need no more than what
lies in memory and what the initiator asks for are asked there too, each with what it shows by that.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from kbtp.conformance.case import Group
from kbtp.conformance.deviation import expect
from kbtp.conformance.direct_target import BLOCK_BYTES, OWN_BLOCKS, POOL_BASE, DirectTarget, Shown, Step
from kbtp.conformance.kbtp_cases import direct_unseen
from kbtp.conformance.probe import InitiatorProbe
from kbtp.conformance.rnic_stream import RnicStream
from kbtp.conformance.target_side import Request
from kbtp.limits import BLOCK_OFFSET_EMPTY
from kbtp.types import EntryFlag, Status
from kbtp.wire import AllocStore, Bind, Load

GROUP = Group("initiator-direct")

NEEDS = ("direct", "one-by-one")
LOAD_NEEDS = ("direct-loads", "one-by-one")
STEP_BY_STEP = ("iwarp",)
GOOD = int(EntryFlag.VALID | EntryFlag.SEALED)
PAUSE_S = 0.25  # more than the 100 ms that a direct load may take
AGAIN_MAX = 50  # reads of one entry by an initiator whose tries are bounded


def before_ack(probe: InitiatorProbe, **options: int) -> DirectTarget:
    """Who lets an RNIC answer has its memory right before HELLO_ACK; see `DirectTarget.open`."""
    return DirectTarget(probe.stream(), probe.key, own_blocks=0 if probe.by_hand else OWN_BLOCKS, **options)


def direct(probe: InitiatorProbe, **options: int) -> DirectTarget:
    return before_ack(probe, **options).open()


def succeed(probe: InitiatorProbe, target: DirectTarget) -> None:
    """The rest is honest, and all of the work succeeds: no wrong octet was taken for a right one."""
    target.before_read = lambda step: None
    target.run()
    target.stream.close()
    expect(probe.work_succeeded(), "that all of its work succeeds", "that some did not")


def loading(came: Step | Request) -> bool:
    """The initiator begins a direct load."""
    return isinstance(came, Step) and came.what == "entry"


@GROUP.initiator("KNX1", "KNX6", "KNX12", needs=NEEDS)
def whole_workload(probe: InitiatorProbe) -> None:
    """The workload loads and allocates directly, in the steps of draft 6.6 and no others."""
    target = direct(probe)
    target.run()
    if probe.by_hand:
        steps_of_the_workload(target)
    else:
        direct_unseen.workload_was_direct(target)
    binds = [request for request in target.requests if isinstance(request, Bind)]
    expect(len(binds) >= 2, "BINDs", target.requests)
    expect(probe.work_succeeded(), "that all of its work succeeds", "that some did not")


def steps_of_the_workload(target: DirectTarget) -> None:
    """Raises `Deviation`."""
    names = [step.what for step in target.steps]
    expect({"entry", "block", "ticket", "slot", "write"} <= set(names), "all steps of both modes", names)
    tickets = [at for at, name in enumerate(names) if name == "ticket"]
    for at in tickets:
        following = names[at + 1 : at + 4]
        expect(following == ["slot", "slot", "write"], "slot, slot once more, Write behind a FetchAdd", following)


@GROUP.initiator("KNX1", needs=LOAD_NEEDS + STEP_BY_STEP)
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
    GROUP.initiator("KNX2", needs=LOAD_NEEDS + STEP_BY_STEP)(run)


for _name in CHANGES:
    _change(_name)


@GROUP.initiator("KNX2", needs=LOAD_NEEDS + STEP_BY_STEP)
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


@GROUP.initiator("KNX15", needs=LOAD_NEEDS + STEP_BY_STEP)
def two_torn_reads_that_agree(probe: InitiatorProbe) -> None:
    """An entry that shows another block's Block Offset twice, and then its own, gives nobody that block's octets."""
    target = direct(probe)
    bind = target.bind_first()
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


REFUSED: dict[str, tuple[int, int]] = {
    "not-valid": (int(EntryFlag.SEALED), 100),
    "not-sealed": (int(EntryFlag.VALID), 100),
    "longer-than-the-buffer": (GOOD, 101),
}
"""Flags and Data Length that a LOAD would be refused with too."""

IMPOSSIBLE: dict[str, tuple[int, Callable[[DirectTarget], int]]] = {
    "before-the-pool": (100, lambda target: target.pool.to - BLOCK_BYTES),
    "behind-the-pool": (100, lambda target: target.pool.to + len(target.pool)),
    "between-blocks": (100, lambda target: target.pool.to + 64),
    "longer-than-a-block": (BLOCK_BYTES + 1, lambda target: target.pool.to),
}
"""Data Length and Block Offset."""


def _bad_entry(name: str) -> None:
    """One case for each entry of REFUSED and IMPOSSIBLE."""

    def run(probe: InitiatorProbe) -> None:
        target = direct(probe)

        def bad(*right: int) -> Shown:
            _, generation, _, offset = right
            if name in REFUSED:
                flags, length = REFUSED[name]
                return flags, generation, length, offset
            length, where = IMPOSSIBLE[name]
            return GOOD, generation, length, where(target)

        bind = target.bind_first(bad)
        reads = 0
        while (came := target.next_step()) == Step("entry", bind.handle):
            reads += 1
            expect(reads <= AGAIN_MAX, f"at most {AGAIN_MAX} reads of an entry that cannot be, then LOAD", reads)
        expect(not isinstance(came, Step), "no Read of a block for an entry that cannot be (profile 6.3)", came)
        expect(not isinstance(came, Bind | AllocStore), "LOAD or an error, for an entry that cannot be", came)
        # That a Read of the block ended the stream an RNIC may not say; nobody has to give up for a torn entry.
        expect(isinstance(came, Load) or probe.by_hand or name in REFUSED, "LOAD, for an entry that cannot be", came)
        target.mirror(bind.handle)
        if isinstance(came, Load):
            target.serve_one(came)
            succeed(probe, target)

    run.__name__ = f"bad_entry_{name}"
    run.__doc__ = f"Before the block is read its entry is looked at: {name.replace('-', ' ')}."
    GROUP.initiator("KNX3", needs=LOAD_NEEDS)(run)


for _name in (*REFUSED, *IMPOSSIBLE):
    _bad_entry(_name)


@GROUP.initiator("KNX4", needs=LOAD_NEEDS)
def entry_that_never_rests(probe: InitiatorProbe) -> None:
    """An entry that is another one each time it is read is given up, and LOAD used."""
    target = direct(probe)
    if not probe.by_hand:
        direct_unseen.given_up(target)
        succeed(probe, target)
        return
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


@GROUP.initiator("KNX5", needs=LOAD_NEEDS + STEP_BY_STEP)
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
    target = before_ack(probe)
    block_offset, seen = target.slot(0)[2], 0
    target.put_slot(0, -8, BLOCK_OFFSET_EMPTY)
    target.open()
    if isinstance(target.stream, RnicStream):
        direct_unseen.slot_comes_late(target, target.stream, block_offset)
        succeed(probe, target)
        return

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


@GROUP.initiator("KNX8", needs=NEEDS + STEP_BY_STEP)
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
    target = before_ack(probe, ticket_timeout_ms=timeout_ms)
    block_offset = target.slot(0)[2]
    target.put_slot(0, -8, BLOCK_OFFSET_EMPTY)
    target.open()
    if isinstance(target.stream, RnicStream):
        direct_unseen.ticket_runs_out(target, target.stream, block_offset, timeout_ms / 1000 * 1.5)
        return
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
    target = before_ack(probe)
    target.open(allocation_quota=2)
    target.run(lambda came: target.tickets_taken == 3 or isinstance(came, AllocStore))
    tickets = target.tickets_taken
    expect(tickets <= 2, "no FetchAdd beyond the quota of 2 (draft 3.4)", f"{tickets} with 2 blocks bound")
