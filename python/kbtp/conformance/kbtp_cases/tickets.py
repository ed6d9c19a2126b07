"""Tickets that run out, Heads that lie, and what remains of direct allocation beyond a stream
(draft 3.4; profile 6.9 to 6.11, 8.10)."""

from __future__ import annotations

from kbtp.conformance.case import Group
from kbtp.conformance.deviation import Deviation, expect
from kbtp.conformance.kbtp_cases.direct import ALLOC_FEATURES, DirectSide, Slot, allocating
from kbtp.conformance.kbtp_cases.identity import fresh_id, reopen, resumed
from kbtp.conformance.probe import TargetProbe
from kbtp.conformance.setup import MARGIN_S
from kbtp.types import Feature, Status, TerminateCause

GROUP = Group("tickets")

PATIENCE_S = 10.0  # a longer Ticket Timeout is not waited for


def wait_for_the_timeout(probe: TargetProbe, direct: DirectSide) -> None:
    """Until a ticket that was taken before has been abandoned, and the target has had time to notice."""
    timeout_s = direct.ack.ticket_timeout_ms / 1000
    probe.need(timeout_s <= PATIENCE_S, f"a Ticket Timeout of at most {PATIENCE_S:g} s, this one has {timeout_s:g} s")
    direct.stream.expect_silence("a ticket runs out", for_s=timeout_s * 1.5 + MARGIN_S / 2)


def expect_refused_atomic(direct: DirectSide) -> None:
    try:
        direct.fetch_add()
    except Deviation as deviation:
        ended = "Terminate" in deviation.saw or "the end of the stream" in deviation.saw
        expect(ended, "a Terminate, or what an RNIC makes of it", deviation.saw)
        return
    raise Deviation("a FetchAdd refused: direct allocation is over", "an Atomic Response")


@GROUP.target("KX31", "KX32", "KX33", needs=("direct-alloc", "short-waits"), timeout_s=40.0)
def ticket_that_runs_out(probe: TargetProbe) -> None:
    """A ticket not bound in time is reclaimed: BIND is TICKET_ABANDONED, its block and unit of quota are free."""
    direct = allocating(probe, quota=1)
    side, ticket = direct.side, direct.take_ticket()
    block_offset = direct.block_of(ticket)
    wait_for_the_timeout(probe, direct)
    side.expect_status(direct.bind(side.handle(0), ticket, 0, block_offset), Status.TICKET_ABANDONED)
    slot = direct.slot_of(ticket + 1)
    expect(slot == Slot(ticket + 1, block_offset), "the block back in the ring, with a new ticket", slot)
    completion = side.bind(0, b"its block, by ALLOC_STORE")
    expect(completion.block_offset == block_offset, "the block that was reclaimed", hex(completion.block_offset))
    side.expect_contents(0, b"its block, by ALLOC_STORE")


@GROUP.target("KX34", needs=("direct-alloc", "short-waits"), timeout_s=40.0)
def no_write_after_reclaim(probe: TargetProbe) -> None:
    """Before a block is reclaimed the Partition STag is invalidated: a late RDMA Write is refused, 1/1/00."""
    direct = allocating(probe, quota=2)
    ticket = direct.take_ticket()
    block_offset = direct.block_of(ticket)
    wait_for_the_timeout(probe, direct)
    direct.put(block_offset, b"late")
    direct.stream.expect_terminate(TerminateCause.DDP_INVALID_STAG)


@GROUP.target("KX34", needs=("direct-alloc", "short-waits"), timeout_s=40.0)
def no_ticket_after_reclaim(probe: TargetProbe) -> None:
    """After a reclaim direct allocation is over for this session: Head STag is invalid too."""
    direct = allocating(probe, quota=2)
    direct.take_ticket()
    wait_for_the_timeout(probe, direct)
    expect_refused_atomic(direct)


@GROUP.target("KX35", needs=("direct-alloc",), timeout_s=40.0)
def bind_in_time(probe: TargetProbe) -> None:
    """A ticket that is bound shortly before its time is over is bound, and direct allocation goes on."""
    direct = allocating(probe, quota=2)
    timeout_s = direct.ack.ticket_timeout_ms / 1000
    probe.need(timeout_s <= PATIENCE_S, f"a Ticket Timeout of at most {PATIENCE_S:g} s")
    for _ in range(3):
        ticket = direct.take_ticket()
        block_offset = direct.block_of(ticket)
        direct.stream.expect_silence("half the Ticket Timeout", for_s=timeout_s / 2)
        bind = direct.bind(direct.side.handle(0), ticket, 0, block_offset)
        direct.side.expect_status(bind, Status.SUCCESS)
        direct.side.release(0)


HOSTILE_HEADS: dict[str, tuple[int, int]] = {
    "ticket-alone": (0x0000_0001_0000_0000, 0),
    "slot-alone": (0x0000_0000_0000_0010, 0),
    "filler-bits": (0x0000_0000_8000_0000, 0),
    "far-ahead": (0x1000_0000_0000_0000, 0),
}


def _hostile(name: str) -> None:
    """One case for each entry of HOSTILE_HEADS."""

    def run(probe: TargetProbe) -> None:
        direct = allocating(probe, quota=4)
        bystander = probe.session()
        add_data, add_mask = HOSTILE_HEADS[name]
        direct.fetch_add(add_data, add_mask)
        within_s = direct.ack.ticket_timeout_ms / 4000 + MARGIN_S
        probe.need(within_s <= PATIENCE_S, f"a Ticket Timeout of at most {4 * PATIENCE_S:g} s")
        direct.stream.expect_terminate(TerminateCause.RDMAP_CATASTROPHIC_STREAM, within_s=within_s)
        bystander.goes_on()

    run.__name__ = f"hostile_head_{name}"
    run.__doc__ = f"A Head that no FetchAdd of the draft makes ends the stream with 0/2/07: {name.replace('-', ' ')}."
    form = ("rdmap",) if name == "ticket-alone" else ()  # in the unmasked form it is what a FetchAdd makes
    GROUP.target("KX36", needs=("direct-alloc", *form), timeout_s=30.0)(run)


for _name in HOSTILE_HEADS:
    _hostile(_name)


@GROUP.target("KX36", "KX37", needs=("direct-alloc",), timeout_s=30.0)
def more_tickets_than_the_ring_has(probe: TargetProbe) -> None:
    """As many tickets as the ring holds blocks may be taken; one ticket more ends the stream with 0/2/07."""
    direct = allocating(probe, quota=2)
    within_s = direct.ack.ticket_timeout_ms / 4000 + MARGIN_S
    probe.need(within_s <= PATIENCE_S, f"a Ticket Timeout of at most {4 * PATIENCE_S:g} s")
    for _ in range(direct.ack.allocation_quota):
        direct.take_ticket()
    direct.stream.expect_silence("as many tickets as the quota are no fault", for_s=within_s - MARGIN_S + 0.2)
    direct.fetch_add()
    direct.stream.expect_terminate(TerminateCause.RDMAP_CATASTROPHIC_STREAM, within_s=within_s)


@GROUP.target("KX38", needs=("direct-alloc",))
def tickets_at_the_end_of_the_stream(probe: TargetProbe) -> None:
    """Tickets that were not bound when the stream ends are reclaimed: after RESUMED the whole quota is there."""
    ident = fresh_id()
    direct = allocating(probe, quota=2, initiator_id=ident)
    for _ in range(2):
        direct.take_ticket()
    direct.side.finish()
    side = reopen(probe, initiator_id=ident, requested_features=ALLOC_FEATURES)
    expect(resumed(side.ack), "RESUMED", side.ack.flags)
    again = DirectSide(side)
    for index in range(2):
        again.store(index, b"%d" % index)
        side.expect_contents(index, b"%d" % index)
    for index in range(2):
        side.release(index)
    side.finish()


@GROUP.target("KX39", needs=("direct-alloc",))
def resumed_with_its_partition(probe: TargetProbe) -> None:
    """After RESUMED an identity has its partition again: its blocks, and DIRECT_ALLOC on the rest."""
    ident = fresh_id()
    direct = allocating(probe, quota=2, initiator_id=ident)
    _, block_offset = direct.store(0, b"kept")
    direct.side.finish()
    side = reopen(probe, initiator_id=ident, requested_features=ALLOC_FEATURES)
    expect(bool(side.ack.granted_features & Feature.DIRECT_ALLOC), "DIRECT_ALLOC again", side.ack.granted_features)
    again = DirectSide(side)
    _, other = again.store(1, b"new")
    expect(abs(other - block_offset) == side.ack.block_size, "the other block of the partition", hex(other))
    side.expect_contents(0, b"kept")
    for index in range(2):
        side.release(index)
    side.finish()


@GROUP.target("KX39", needs=("direct-alloc",))
def no_partition_for_blocks_outside(probe: TargetProbe) -> None:
    """An identity that has bound blocks of the shared ring is not granted DIRECT_ALLOC when it is resumed."""
    ident = fresh_id()
    first = probe.session(initiator_id=ident, requested_quota=2)
    first.bind(0, b"of the shared ring")
    first.finish()
    side = reopen(probe, initiator_id=ident, requested_features=ALLOC_FEATURES)
    granted = side.ack.granted_features
    expect(not granted & Feature.DIRECT_ALLOC, "no DIRECT_ALLOC (profile 6.10)", granted)
    side.expect_contents(0, b"of the shared ring")
    side.release(0)
    side.finish()
