"""Direct modes as an initiator that the target trusts sees them: table, pool, ring, Head and BIND
(draft 3.2, 3.3, 3.4, 6.6; profile 2, 5, 6.4, 6.9 to 6.11, 8.10, 8.11)."""

from __future__ import annotations

import struct
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from kbtp.conformance.case import Group
from kbtp.conformance.deviation import Deviation, expect
from kbtp.conformance.initiator_side import InitiatorSide
from kbtp.conformance.kbtp_cases.blocks import next_generation, pattern
from kbtp.conformance.probe import TargetProbe
from kbtp.conformance.startup import Startup
from kbtp.iwarp.rdmap import RdmapOpcode
from kbtp.limits import BLOCK_OFFSET_EMPTY, ENTRY_BYTES, SLOT_BYTES
from kbtp.types import EntryFlag, Feature, RequestFlag, Status, TerminateCause
from kbtp.wire import Bind

GROUP = Group("direct")

LOAD_FEATURES = Feature.DIRECT_LOAD | Feature.INVALIDATE
ALLOC_FEATURES = Feature.DIRECT_ALLOC | Feature.MASKED_ATOMICS | Feature.INVALIDATE
ADD_DATA = 0x0000_0001_0000_0010
UNMASKED_ADD_DATA = 0x0000_0001_0000_0000
ENTRY = struct.Struct(">HHIQ")
SLOT = struct.Struct(">IIQ")
MASK64 = (1 << 64) - 1


@dataclass(frozen=True, slots=True)
class TableEntry:
    """Draft 3.2."""

    flags: int
    generation: int
    data_length: int
    block_offset: int


@dataclass(frozen=True, slots=True)
class Slot:
    """Draft 3.3."""

    sequence: int
    block_offset: int

    @property
    def consumed(self) -> bool:
        return self.block_offset == BLOCK_OFFSET_EMPTY


class DirectSide:
    """A session with direct modes, and the steps of draft 6.6 one by one."""

    def __init__(self, side: InitiatorSide) -> None:
        self.side = side
        self.ack = side.ack
        self.stream = side.stream

    def entry(self, handle: int) -> TableEntry:
        to = self.ack.table_offset + ENTRY_BYTES * (handle - self.ack.table_base_handle)
        return TableEntry(*ENTRY.unpack(self.stream.read(self.ack.table_stag, to, ENTRY_BYTES)))

    @property
    def slot_count(self) -> int:
        return 1 << self.ack.ring_order

    @property
    def masked(self) -> bool:
        return bool(self.ack.granted_features & Feature.MASKED_ATOMICS)

    @property
    def add_mask(self) -> int:
        """Draft 3.3: bit 63, bit 31 and bit n+3; none in the unmasked form of draft 9.2."""
        return 1 << 63 | 1 << 31 | 1 << (self.ack.ring_order + 3) if self.masked else 0

    def fetch_add(self, add_data: int | None = None, add_mask: int | None = None) -> int:
        data = (ADD_DATA if self.masked else UNMASKED_ADD_DATA) if add_data is None else add_data
        mask = self.add_mask if add_mask is None else add_mask
        return self.stream.fetch_add(self.ack.head_stag, self.ack.head_offset, data, mask)

    def take_ticket(self) -> int:
        """FetchAdd on Head. Raises `Deviation` for a counter that is not of the form of draft 3.3, or 9.2."""
        value = self.fetch_add()
        ticket, offset = value >> 32, value & 0xFFFF_FFFF
        expected = SLOT_BYTES * (ticket % self.slot_count) if self.masked else 0
        expect(offset == expected, f"Slot Offset {expected:#x} with Ticket {ticket}, all other bits zero", hex(value))
        return ticket

    def slot_at(self, position: int) -> Slot:
        to = self.ack.ring_offset + SLOT_BYTES * position
        sequence, reserved, block_offset = SLOT.unpack(self.stream.read(self.ack.ring_stag, to, SLOT_BYTES))
        expect(reserved == 0, "reserved zeros in a slot", reserved)
        return Slot(sequence, block_offset)

    def slot_of(self, ticket: int) -> Slot:
        return self.slot_at(ticket % self.slot_count)

    def block_of(self, ticket: int) -> int:
        """Read the slot until it is there, and once more to confirm. Raises `Deviation`."""
        while True:
            slot = self.slot_of(ticket)
            if slot.sequence == ticket and not slot.consumed:
                expect(self.slot_of(ticket) == slot, "the same slot again", self.slot_of(ticket))
                return slot.block_offset
            if self.stream.deadline.passed:
                raise Deviation(f"a block in the slot of ticket {ticket}", str(slot))

    def put(self, block_offset: int, octets: bytes) -> None:
        self.stream.write(self.ack.partition_stag, block_offset, octets)

    def bind(
        self, handle: int, ticket: int, length: int, block_offset: int, *, flags: RequestFlag = RequestFlag.SEAL,
        generation: int = 0,
    ) -> Bind:  # fmt: skip
        return Bind(self.side.request_id(), handle, generation, flags, ticket, length, block_offset)

    def store(self, index: int, octets: bytes) -> tuple[int, int]:
        """The whole sequence; ticket and Block Offset."""
        ticket = self.take_ticket()
        block_offset = self.block_of(ticket)
        self.put(block_offset, octets)
        bind = self.bind(self.side.handle(index), ticket, len(octets), block_offset)
        self.side.expect_status(bind, Status.SUCCESS)
        return ticket, block_offset


def loading(probe: TargetProbe, **hello: Any) -> DirectSide:
    side = probe.session(requested_features=LOAD_FEATURES, **hello)
    granted = bool(side.ack.granted_features & Feature.DIRECT_LOAD)
    expect(granted, "DIRECT_LOAD granted, as --with says", side.ack.granted_features)
    return DirectSide(side)


def allocating(probe: TargetProbe, *, quota: int = 4, **hello: Any) -> DirectSide:
    side = probe.session(requested_features=ALLOC_FEATURES, requested_quota=quota, **hello)
    granted = bool(side.ack.granted_features & Feature.DIRECT_ALLOC)
    expect(granted, "DIRECT_ALLOC granted, as --with says", side.ack.granted_features)
    return DirectSide(side)


# --- direct load ---


@GROUP.target("KX1", "KX2", "KX3", needs=("direct-load",))
def entry_and_block_are_read(probe: TargetProbe) -> None:
    """Through Table and Pool STag an initiator reads its own and other entries and their blocks."""
    direct, other = loading(probe), probe.session()
    stags = (direct.ack.partition_stag, direct.ack.ring_stag, direct.ack.head_stag)
    expect(direct.ack.table_stag != 0 and direct.ack.pool_stag != 0, "Table and Pool STag", direct.ack)
    expect(not any(stags), "no STag of DIRECT_ALLOC, which was not asked for", stags)
    for owner in (direct.side, other):
        bound = owner.bind(0, pattern(300))
        entry = direct.entry(owner.handle(0))
        flags = int(EntryFlag.VALID | EntryFlag.SEALED)
        expected = TableEntry(flags, bound.generation, 300, bound.block_offset)
        expect(entry == expected, f"the entry {expected}", entry)
        octets = direct.stream.read(direct.ack.pool_stag, entry.block_offset, 300)
        expect(octets == pattern(300), "the block at its Block Offset", octets[:16].hex())


@GROUP.target("KX2", "KX4", needs=("direct-load",))
def entry_follows_what_happens(probe: TargetProbe) -> None:
    """An entry is not SEALED before SEAL, not VALID after FREE; each bind and free counts its Generation."""
    direct = loading(probe)
    side, handle = direct.side, direct.side.handle(0)
    unbound = direct.entry(handle)
    expect(not unbound.flags & EntryFlag.VALID and unbound.generation != 0, "not VALID, a Generation", unbound)
    side.bind(0, b"abc", sealed=False)
    opened = direct.entry(handle)
    expected = (int(EntryFlag.VALID), next_generation(unbound.generation), 3)
    told = (opened.flags, opened.generation, opened.data_length)
    expect(told == expected, f"VALID, Generation {expected[1]}, 3 octets", told)
    side.expect_status(side.store_inline(handle, b"abcd", flags=RequestFlag.SEAL), Status.SUCCESS)
    sealed = direct.entry(handle)
    told = (sealed.flags, sealed.generation, sealed.data_length)
    expect(told == (3, opened.generation, 4), "VALID and SEALED, the same Generation, 4 octets", told)
    side.release(0)
    freed = direct.entry(handle)
    following = next_generation(opened.generation)
    gone = freed.flags == 0 and freed.generation == following
    expect(gone, f"neither VALID nor SEALED, Generation {following}", freed)


@GROUP.target("KX5", needs=("direct-load",))
def table_and_pool_are_read_only(probe: TargetProbe) -> None:
    """An RDMA Write or an atomic through Table or Pool STag is refused and changes nothing."""
    watcher = loading(probe)
    watcher.side.bind(0, b"as it was")
    entry = watcher.entry(watcher.side.handle(0))
    for name in ("table_stag", "pool_stag"):
        for atomic in (False, True):
            direct = loading(probe)
            stag = getattr(direct.ack, name)
            to = direct.ack.table_offset if name == "table_stag" else entry.block_offset
            if atomic:
                try:
                    direct.stream.fetch_add(stag, to, 1, 0)
                except Deviation:
                    pass
                else:
                    raise Deviation("an atomic refused (profile 2: remote read)", "an Atomic Response")
            else:
                direct.stream.write(stag, to, b"changed?")
                direct.stream.expect_terminate((1, 1, 0), (1, 1, 2), (0, 1, 2))
    expect(watcher.entry(watcher.side.handle(0)) == entry, "the entry as it was", "another one")
    watcher.side.expect_contents(0, b"as it was")


@GROUP.target("KX6", needs=("direct-load",))
def stags_are_of_one_stream(probe: TargetProbe) -> None:
    """The STags of one session are refused on another stream: 0/1/03 (0/1/00 tolerated)."""
    first = loading(probe)
    for name, to in (("table_stag", first.ack.table_offset), ("pool_stag", first.ack.pool_base)):
        second = loading(probe)
        second.stream.request_read(getattr(first.ack, name), to, 16)
        codes = TerminateCause.RDMAP_STAG_NOT_ASSOCIATED, TerminateCause.RDMAP_INVALID_STAG
        second.stream.expect_terminate(*codes, served=False)
    first.entry(first.side.handle(0))


@GROUP.target("KX7", needs=("direct-load",))
def table_and_pool_end_where_they_say(probe: TargetProbe) -> None:
    """The last octets of table and pool are readable, one octet beyond or before is 0/1/01."""
    ack = loading(probe).ack
    table = (ack.table_offset, ack.table_offset + ENTRY_BYTES * ack.table_handles)
    pool = (ack.pool_base, ack.pool_base + ack.block_size * ack.pool_blocks)
    for name, (start, end) in (("table_stag", table), ("pool_stag", pool)):
        for to, size, good in ((end - 16, 16, True), (end - 15, 16, False), (start - 1, 16, False), (start, 16, True)):
            if to < 0:
                continue
            direct = loading(probe)
            if good:
                direct.stream.read(getattr(direct.ack, name), to, size)
            else:
                direct.stream.request_read(getattr(direct.ack, name), to, size)
                direct.stream.expect_terminate(TerminateCause.RDMAP_BASE_OR_BOUNDS, served=False)


@GROUP.target("KX8", needs=("direct-load",))
def no_direct_mode_without_read_depth(probe: TargetProbe) -> None:
    """An initiator whose ORD is 0 gets no direct mode, and its session all the same."""
    features = LOAD_FEATURES | ALLOC_FEATURES
    side = probe.session(Startup.of_depth(16, 0), requested_features=features)
    direct = side.ack.granted_features & (Feature.DIRECT_LOAD | Feature.DIRECT_ALLOC)
    expect(not direct, "neither direct mode (profile 3)", side.ack.granted_features)
    side.goes_on()


# --- ring and Head ---


@GROUP.target("KX11", needs=("direct-alloc",))
def terms_of_direct_allocation(probe: TargetProbe) -> None:
    """HELLO_ACK of DIRECT_ALLOC: three STags, a Ticket Timeout, a Ring Order that fits the quota, MASKED_ATOMICS."""
    ack = allocating(probe).ack
    stags = (ack.partition_stag, ack.ring_stag, ack.head_stag)
    expect(all(stags), "Partition, Ring and Head STag", stags)
    expect(not (ack.table_stag or ack.pool_stag), "no STag of DIRECT_LOAD, which was not asked for", ack)
    expect(ack.ticket_timeout_ms > 0, "a Ticket Timeout", ack.ticket_timeout_ms)
    fits = 1 <= ack.ring_order <= 28 and 1 << ack.ring_order >= ack.allocation_quota
    expect(fits, f"a Ring Order of 1 to 28, 2^n >= {ack.allocation_quota}", ack.ring_order)
    masked = bool(ack.granted_features & Feature.MASKED_ATOMICS)
    expect(masked or "rdmap" not in probe.setup.has, "MASKED_ATOMICS on RDMAP", ack.granted_features)


@GROUP.target("KX12", "KX13", needs=("direct-alloc",))
def ring_as_it_begins(probe: TargetProbe) -> None:
    """Slot s < F holds Sequence s and a block, the others Sequence s - N and all ones; Head begins at Ticket 0."""
    direct = allocating(probe, quota=3)
    quota, count = direct.ack.allocation_quota, direct.slot_count
    base = direct.fetch_add(0, direct.add_mask) >> 32
    seen = set()
    for position in range(count):
        slot = direct.slot_at((base + position) % count)
        if position < quota:
            expect(slot.sequence == base + position, f"Sequence {base + position}", slot)
            index, rest = divmod(slot.block_offset - direct.ack.pool_base, direct.ack.block_size)
            expect(not rest and 0 <= index < direct.ack.pool_blocks, "a block of the pool", slot)
            seen.add(slot.block_offset)
        else:
            sequence = (base + position - count) & 0xFFFF_FFFF
            expect(slot == Slot(sequence, BLOCK_OFFSET_EMPTY), f"Sequence {sequence:#x}, all ones", slot)
    expect(len(seen) == quota, f"{quota} different blocks", seen)


@GROUP.target("KX12", needs=("direct-alloc",))
def one_block_has_a_ring_of_two(probe: TargetProbe) -> None:
    """N is at least 2, also for a partition of one block (profile 5)."""
    direct = allocating(probe, quota=1)
    expect(direct.ack.allocation_quota == 1, "a quota of 1", direct.ack.allocation_quota)
    for round_ in range(4):
        direct.store(0, b"%d" % round_)
        direct.side.expect_contents(0, b"%d" % round_)
        direct.side.release(0)


@GROUP.target("KX13", needs=("direct-alloc",))
def head_advances_and_wraps(probe: TargetProbe) -> None:
    """FetchAdd with the Add Mask gives the Tickets one by one, their Slot Offsets wrap at the end of the ring."""
    direct = allocating(probe, quota=2)
    last = None
    for round_ in range(3 * direct.slot_count):
        ticket, _ = direct.store(0, b"%d" % round_)
        expect(last is None or ticket == (last + 1) & 0xFFFF_FFFF, "the next Ticket", ticket)
        last = ticket
        direct.side.release(0)


@GROUP.target("KX14", "KX15", "KX2", needs=("direct-alloc",))
def whole_sequence(probe: TargetProbe) -> None:
    """FetchAdd, slot, confirming read, RDMA Write, BIND: the block is bound, sealed, and its slot consumed."""
    direct, other = allocating(probe), probe.session()
    side, handle = direct.side, direct.side.handle(0)
    ticket = direct.take_ticket()
    block_offset = direct.block_of(ticket)
    direct.put(block_offset, pattern(500))
    completion = side.expect_status(direct.bind(handle, ticket, 500, block_offset), Status.SUCCESS)
    told = (completion.data_length, completion.block_offset)
    expect(told == (500, block_offset), "Data Length and Block Offset", told)
    expect(direct.slot_of(ticket).consumed, "the slot consumed", direct.slot_of(ticket))
    expect(other.fetch(handle, 600) == pattern(500), "what was written", "other octets")
    side.expect_status(side.store_inline(handle, b"x"), Status.SEALED)
    freed = side.release(0)
    expect(freed.generation == next_generation(completion.generation), "the next Generation", freed.generation)
    unsealed = direct.take_ticket()
    bind = direct.bind(handle, unsealed, 0, direct.block_of(unsealed), flags=RequestFlag.NONE)
    side.expect_status(bind, Status.SUCCESS)
    side.expect_status(side.load(handle, None), Status.NOT_SEALED)
    side.expect_contents(0, b"", flags=RequestFlag.ALLOW_UNSEALED)


@GROUP.target("KX16", "KX17", "KX18", needs=("direct-alloc",))
def bind_checks_in_order(probe: TargetProbe) -> None:
    """BIND: UNSUPPORTED, MALFORMED, OUT_OF_RANGE, ALREADY_BOUND, GENERATION_MISMATCH, LENGTH_ERROR, the ticket's."""
    direct = allocating(probe, quota=3)
    side, ack = direct.side, direct.ack
    bound_ticket, bound_offset = direct.store(0, b"bound")
    ticket = direct.take_ticket()
    block_offset = direct.block_of(ticket)
    bound, handle, never = side.handle(0), side.handle(1), (ticket + 1) & 0xFFFF_FFFF
    too_long, wrong = ack.block_size + 1, 7777
    invalid = direct.bind(handle, never, 0, 0).pack()
    for what, octets, status in (
        ("INLINE, cut", invalid[:2] + b"\x00\x01" + invalid[4:39], Status.UNSUPPORTED),
        ("INVALIDATE", invalid[:2] + b"\x00\x08" + invalid[4:], Status.UNSUPPORTED),
        ("39 octets", invalid[:39], Status.MALFORMED),
        ("41 octets", invalid + b"?", Status.MALFORMED),
        ("out of range", direct.bind(side.nowhere, never, too_long, 0, generation=wrong).pack(),
         Status.HANDLE_OUT_OF_RANGE),
        ("bound", direct.bind(bound, never, too_long, 0, generation=wrong).pack(), Status.ALREADY_BOUND),
        ("wrong generation", direct.bind(handle, never, too_long, 0, generation=wrong).pack(),
         Status.GENERATION_MISMATCH),
        ("too long", direct.bind(handle, never, too_long, 0).pack(), Status.LENGTH_ERROR),
        ("never taken", direct.bind(handle, never, 5, block_offset).pack(), Status.TICKET_MISMATCH),
        ("bound already", direct.bind(handle, bound_ticket, 5, bound_offset).pack(), Status.TICKET_MISMATCH),
        ("another Block Offset", direct.bind(handle, ticket, 5, bound_offset).pack(), Status.TICKET_MISMATCH),
        ("no Block Offset at all", direct.bind(handle, ticket, 5, block_offset + 1).pack(), Status.TICKET_MISMATCH),
        ("all ones", direct.bind(handle, ticket, 5, BLOCK_OFFSET_EMPTY).pack(), Status.TICKET_MISMATCH),
        ("long ago", direct.bind(handle, (ticket - direct.slot_count) & 0xFFFF_FFFF, 5, block_offset).pack(),
         Status.TICKET_MISMATCH),
    ):  # fmt: skip
        side.send(octets)
        status_came = side.answer().status
        expect(status_came is status, f"{status.name} for a BIND: {what}", status_came.name)
    direct.put(block_offset, b"after all that")
    bind = direct.bind(handle, ticket, 14, block_offset)
    side.expect_status(bind, Status.SUCCESS, why="a refused BIND leaves its ticket outstanding (profile 6.11)")
    side.expect_contents(1, b"after all that")


@GROUP.target("KX18", needs=("direct-alloc",))
def one_ticket_two_binds(probe: TargetProbe) -> None:
    """Of two BINDs of one ticket at once, for two handles, one succeeds and the other is TICKET_MISMATCH."""
    direct = allocating(probe)
    side, ticket = direct.side, direct.take_ticket()
    block_offset = direct.block_of(ticket)
    binds = [direct.bind(side.handle(index), ticket, 0, block_offset) for index in (0, 1)]
    side.send(*binds)
    statuses = sorted(side.answer(bind).status for bind in binds)
    expect(statuses == [Status.SUCCESS, Status.TICKET_MISMATCH], "SUCCESS and TICKET_MISMATCH", statuses)


@GROUP.target("KX19", "KX20", needs=("direct-alloc",))
def own_ring_for_everything(probe: TargetProbe) -> None:
    """ALLOC_STORE takes its blocks from the session's own ring, FREE brings blocks back to it, with a new Ticket."""
    direct = allocating(probe, quota=2)
    side, count = direct.side, direct.slot_count
    head = direct.fetch_add(0, direct.add_mask) >> 32
    blocks = {direct.slot_at((head + position) % count).block_offset for position in range(2)}
    completion = side.bind(0, b"by request")
    expect(completion.block_offset in blocks, "a block of the own partition", hex(completion.block_offset))
    expect(direct.fetch_add(0, direct.add_mask) >> 32 == (head + 1) & 0xFFFF_FFFF, "one Ticket more taken", "not so")
    side.release(0)
    slot = direct.slot_of(head + 2)
    expect(slot == Slot((head + 2) & 0xFFFF_FFFF, completion.block_offset), "the freed block, Ticket F", slot)


@GROUP.target("KX21", needs=("direct-alloc",))
def tickets_count_as_usage(probe: TargetProbe) -> None:
    """Tickets that were taken and not bound count against the quota: an ALLOC_STORE beyond it is NO_SPACE."""
    direct = allocating(probe, quota=2)
    side = direct.side
    tickets = [direct.take_ticket() for _ in range(2)]
    side.expect_status(side.alloc_store_inline(side.handle(0), b"x"), Status.NO_SPACE)
    for index, ticket in enumerate(tickets):
        bind = direct.bind(side.handle(index), ticket, 0, direct.block_of(ticket))
        side.expect_status(bind, Status.SUCCESS, why="its own ticket counts once (profile 8.10)")


@GROUP.target("KX22", "KX23", needs=("direct-alloc",))
def deferred_free(probe: TargetProbe) -> None:
    """A FREE whose slot is not consumed yet completes, leaves the slot alone, and is written when it is consumed."""
    direct = allocating(probe, quota=2)
    probe.need(direct.slot_count == 2, "a ring of two slots for two blocks")
    side, held = direct.side, direct.take_ticket()
    block_offset = direct.block_of(held)
    _, freed_offset = direct.store(0, b"freed while another ticket is out")
    side.release(0)
    slot = direct.slot_of(held)
    expect(slot == Slot(held, block_offset), "the slot of the ticket that is out, as it was (draft 3.3)", slot)
    direct.put(block_offset, b"held")
    side.expect_status(direct.bind(side.handle(1), held, 4, block_offset), Status.SUCCESS)
    following = (held + 2) & 0xFFFF_FFFF
    slot = direct.slot_of(following)
    expect(slot == Slot(following, freed_offset), "the freed block in the slot, with its own Ticket", slot)
    side.expect_contents(1, b"held")
    direct.store(0, b"and the freed one again")


# --- rights ---


@GROUP.target("KX24", needs=("direct-alloc",))
def each_stag_has_its_one_right(probe: TargetProbe) -> None:
    """Partition is written and nothing else, Ring read, Head changed by atomics: every other access is refused."""
    read, written, changed = (0, 1, 2), ((1, 1, 0), (1, 1, 2), (0, 1, 2)), (0, 1, 2)
    attempts: list[tuple[str, Callable[[DirectSide], object], tuple[tuple[int, int, int], ...]]] = [
        ("read Partition", lambda one: one.stream.request_read(one.ack.partition_stag, first_block(one), 16), (read,)),
        ("read Head", lambda one: one.stream.request_read(one.ack.head_stag, one.ack.head_offset, 8), (read,)),
        ("write Ring", lambda one: one.stream.write(one.ack.ring_stag, one.ack.ring_offset, bytes(16)), written),
        ("write Head", lambda one: one.stream.write(one.ack.head_stag, one.ack.head_offset, bytes(8)), written),
        ("atomic on Ring", lambda one: send_atomic(one, one.ack.ring_stag, one.ack.ring_offset), (changed,)),
        ("atomic on Partition", lambda one: send_atomic(one, one.ack.partition_stag, first_block(one)), (changed,)),
        ("atomic past Head", lambda one: send_atomic(one, one.ack.head_stag, one.ack.head_offset + 8), ((0, 1, 1),)),
    ]
    for what, attempt, codes in attempts:
        direct = allocating(probe, quota=1)
        attempt(direct)
        direct.stream.expect_terminate(*codes, why=what, served=False)


def first_block(direct: DirectSide) -> int:
    return direct.block_of(direct.take_ticket())


def send_atomic(direct: DirectSide, stag: int, to: int) -> None:
    """A FetchAdd that is to be refused."""
    direct.stream.request_fetch_add(stag, to, 1, 0)


@GROUP.target("KX25", needs=("direct-alloc",))
def partition_is_the_own_one(probe: TargetProbe) -> None:
    """Through Partition STag just the session's own blocks are written: an octet before or behind is 1/1/01."""
    for where in ("before", "behind"):
        direct = allocating(probe, quota=2)
        count, size = direct.slot_count, direct.ack.block_size
        offsets = sorted(direct.slot_at(position).block_offset for position in range(count))[:2]
        expect(offsets[1] == offsets[0] + size, "a contiguous partition", offsets)
        to = offsets[0] - 1 if where == "before" else offsets[1] + size - 1
        direct.stream.write(direct.ack.partition_stag, to, b"xx")
        direct.stream.expect_terminate(TerminateCause.DDP_BASE_OR_BOUNDS, why=where)


@GROUP.target("KX26", needs=("direct-alloc",))
def contents_beside_the_block_are_not_served(probe: TargetProbe) -> None:
    """A LOAD of a block that was bound directly brings Data Length octets, not what else was written there."""
    direct = allocating(probe)
    ticket = direct.take_ticket()
    block_offset = direct.block_of(ticket)
    direct.put(block_offset, b"seen, and unseen")
    direct.side.expect_status(direct.bind(direct.side.handle(0), ticket, 4, block_offset), Status.SUCCESS)
    direct.side.expect_contents(0, b"seen")
    writes = list(direct.stream.messages_of(RdmapOpcode.WRITE))
    expect(all(len(message.payload) == 4 for message in writes), "4 octets", writes)
