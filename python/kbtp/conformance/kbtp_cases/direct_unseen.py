"""What an initiator in direct mode shows to a target whose RNIC answers its RDMA Reads and FetchAdds: what it asks for,
where Head is, and what lies in the pool."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from kbtp.conformance.deviation import expect
from kbtp.conformance.direct_target import BLOCK_BYTES, DirectTarget, Step
from kbtp.conformance.rnic_stream import RnicStream
from kbtp.conformance.target_side import Request
from kbtp.limits import BLOCK_OFFSET_EMPTY
from kbtp.wire import AllocStore, Bind, Load

LOADS = 12  # that the workload does
NOT_TAKEN_S = 0.2  # in which an initiator that did not look at a slot would have written to its block
TURN_S = 0.0002


def workload_was_direct(target: DirectTarget) -> None:
    """Raises `Deviation`."""
    binds = sum(isinstance(request, Bind) for request in target.requests)
    expect(target.tickets_taken == binds, f"{target.tickets_taken} BINDs for as many tickets", binds)
    loads = sum(isinstance(request, Load) for request in target.requests)
    expect(loads < LOADS, f"fewer LOADs than the {LOADS} loads of the workload", loads)


def given_up(target: DirectTarget) -> None:
    """The entry is always one that cannot be, so that it does no harm if an initiator finds it at rest."""
    bind = target.bind_first(lambda *right: (right[0], right[1], BLOCK_BYTES + 1, right[3]))
    with turning(target, bind.handle):
        came = target.next_step()
    expect(isinstance(came, Load), "a LOAD", came)
    target.mirror(bind.handle)
    assert isinstance(came, Load)
    target.serve_one(came)


@contextmanager
def turning(target: DirectTarget, handle: int) -> Iterator[None]:
    """The Data Length of its entry is another one all the time."""
    flags, generation, length, offset = target.entry(handle)
    over = threading.Event()

    def turn() -> None:
        turns = 0
        while not over.wait(TURN_S):
            turns += 1
            target.put_entry(handle, flags, generation, length + turns % BLOCK_BYTES, offset)

    thread = threading.Thread(target=turn)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def slot_comes_late(target: DirectTarget, stream: RnicStream, block_offset: int) -> None:
    """The initiator looks at the slot while it is each of the three that are no good."""
    before = target.block(block_offset)
    stream.wait_until(lambda: target.tickets_taken == 1, "a FetchAdd on Head")
    for sequence, offset in ((-8, BLOCK_OFFSET_EMPTY), (-8, block_offset), (0, BLOCK_OFFSET_EMPTY)):
        target.put_slot(0, sequence, offset)
        slot = f"a slot with Sequence {sequence} and Block Offset {offset:#x}"
        stream.expect_silence(f"no BIND for {slot}", for_s=NOT_TAKEN_S)
        expect(target.block(block_offset) == before, f"no RDMA Write for {slot}", "one")
    target.put_slot(0, 0, block_offset)
    bound = target.bind_first()
    expect(isinstance(bound, Bind), "a BIND", bound)


def allocates(came: Step | Request) -> bool:
    return isinstance(came, AllocStore | Bind)


def ticket_runs_out(target: DirectTarget, stream: RnicStream, block_offset: int, late_s: float) -> None:
    """The slot gets its block after the ticket ran out."""
    before = target.block(block_offset)
    stream.wait_until(lambda: target.tickets_taken == 1, "a FetchAdd on Head")
    stream.serve_for(late_s)
    target.put_slot(0, 0, block_offset)
    came = target.run(allocates)
    expect(came is None or isinstance(came, AllocStore), "ALLOC_STORE, or the end", came)
    expect(target.block(block_offset) == before, "no Write to a block whose ticket ran out (profile 6.11)", "one")
    expect(target.tickets_taken == 1, "no other FetchAdd (profile 6.11)", target.tickets_taken)
