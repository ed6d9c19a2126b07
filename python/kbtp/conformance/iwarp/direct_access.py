"""RDMA Reads and Writes of the structures that a target lends in direct modes: table, pool, ring, partition, Head."""

from __future__ import annotations

from collections.abc import Callable

from kbtp.conformance import segments
from kbtp.conformance.case import Group
from kbtp.conformance.deviation import expect
from kbtp.conformance.iwarp.conversation import pattern, sink_of
from kbtp.conformance.iwarp.octets import Segment, Terminate
from kbtp.conformance.iwarp.reads import FLOOD, IRD_EXCEEDED, answers, read_request
from kbtp.conformance.kbtp_cases.direct import DirectSide, allocating, loading
from kbtp.conformance.probe import TargetProbe
from kbtp.iwarp.ddp import TO_MASK
from kbtp.iwarp.rdmap import RdmapOpcode, ReadRequest
from kbtp.limits import COUNTER_BYTES, ENTRY_BYTES
from kbtp.types import Feature
from kbtp.types import TerminateCause as Cause
from kbtp.wire import HelloAck

GROUP = Group("direct-access", needs=("iwarp",))

LOAD = ("direct-load",)
ALLOC = ("direct-alloc",)
BOTH = ("direct-load", "direct-alloc")
READ_OUTSIDE = (Cause.RDMAP_BASE_OR_BOUNDS, Cause.RDMAP_TO_WRAP)
WRITE_OUTSIDE = (Cause.DDP_BASE_OR_BOUNDS, Cause.DDP_TO_WRAP)
READ_FOREIGN = (Cause.RDMAP_STAG_NOT_ASSOCIATED, Cause.RDMAP_INVALID_STAG)
WRITE_FOREIGN = (Cause.DDP_STAG_NOT_ASSOCIATED, Cause.DDP_INVALID_STAG)
NO_RIGHT_TO_READ = (Cause.RDMAP_ACCESS_RIGHTS,)
NO_RIGHT_TO_WRITE = (Cause.DDP_INVALID_STAG, Cause.DDP_STAG_NOT_ASSOCIATED, Cause.RDMAP_ACCESS_RIGHTS)


def pool_end(ack: HelloAck) -> int:
    return ack.pool_base + ack.pool_blocks * ack.block_size


def table_end(ack: HelloAck) -> int:
    return ack.table_offset + ENTRY_BYTES * ack.table_handles


def read_is_refused(direct: DirectSide, stag: int, to: int, size: int, causes: tuple[Cause, ...]) -> None:
    stream = direct.stream
    stream.send_ulpdus(read_request(stream, ReadRequest(1, 0, size, stag, to & TO_MASK)))
    stream.expect_terminate(*causes)


def write_is_refused(direct: DirectSide, stag: int, to: int, octets: bytes, causes: tuple[Cause, ...]) -> None:
    direct.stream.send_ulpdus(segments.write(stag, to & TO_MASK, octets))
    direct.stream.expect_terminate(*causes)


def partition_of(direct: DirectSide) -> tuple[int, int]:
    """Where the session's own blocks begin and end: they lie side by side, and its ring names them all at first."""
    slots = [direct.slot_at(position) for position in range(direct.ack.allocation_quota)]
    first = min(slot.block_offset for slot in slots)
    return first, first + direct.ack.allocation_quota * direct.ack.block_size


# --- Reads ---


@GROUP.target("R12", "R13", "R15", needs=LOAD)
def reads_to_odd_sinks(probe: TargetProbe) -> None:
    """Reads of table and pool in one write, to odd sinks, one of them across 2^64: all come in order."""
    direct = loading(probe)
    direct.side.bind(0, pattern(5000))
    ack, entry = direct.ack, direct.entry(direct.side.handle(0))
    at = ack.table_offset + ENTRY_BYTES * (direct.side.handle(0) - ack.table_base_handle)
    requests = [
        ReadRequest(0xFFFF_FFFF, TO_MASK - 3, ENTRY_BYTES, ack.table_stag, at),
        ReadRequest(0, 7, 5000, ack.pool_stag, entry.block_offset),
        ReadRequest(1, 0, 1, ack.pool_stag, entry.block_offset + 4999),
    ]
    table, whole, last = answers(direct.side, requests)
    expect(table == direct.stream.read(ack.table_stag, at, ENTRY_BYTES), "the entry", table.hex())
    expect((whole, last) == (pattern(5000), pattern(5000)[-1:]), "the octets of the block", "other ones")


@GROUP.target("R19", "S3", needs=LOAD)
def reads_outside_by_one_octet(probe: TargetProbe) -> None:
    """Reads one octet before and behind table and pool, and across their ends: 0/1/01."""
    places: tuple[Callable[[HelloAck], tuple[int, int, int]], ...] = (
        lambda ack: (ack.pool_stag, ack.pool_base - 1, 1),
        lambda ack: (ack.pool_stag, pool_end(ack), 1),
        lambda ack: (ack.pool_stag, pool_end(ack) - 7, 8),
        lambda ack: (ack.pool_stag, ack.pool_base, pool_end(ack) - ack.pool_base + 1),
        lambda ack: (ack.table_stag, ack.table_offset - 1, 1),
        lambda ack: (ack.table_stag, table_end(ack), 1),
        lambda ack: (ack.table_stag, table_end(ack) - 7, 8),
    )
    for place in places:
        direct = loading(probe)
        read_is_refused(direct, *place(direct.ack), READ_OUTSIDE)


@GROUP.target("R19", needs=LOAD)
def reads_of_the_very_ends(probe: TargetProbe) -> None:
    """Reads of the first and of the last octet of table and pool are answered."""
    direct = loading(probe)
    ack = direct.ack
    for stag, first, end in (
        (ack.pool_stag, ack.pool_base, pool_end(ack)),
        (ack.table_stag, ack.table_offset, table_end(ack)),
    ):
        direct.stream.read(stag, first, 1)
        direct.stream.read(stag, end - 1, 1)


@GROUP.target("R20", needs=LOAD)
def read_that_wraps(probe: TargetProbe) -> None:
    """A Read of 8 octets from TO 2^64 - 4 of the pool: 0/1/04 or 01."""
    direct = loading(probe)
    read_is_refused(direct, direct.ack.pool_stag, TO_MASK - 3, 8, tuple(reversed(READ_OUTSIDE)))


@GROUP.target("R16", needs=LOAD)
def read_of_more_than_2_to_the_31(probe: TargetProbe) -> None:
    """A Read of 2^31 + 8 octets of the table: 0/1/01."""
    direct = loading(probe)
    probe.need(table_end(direct.ack) - direct.ack.table_offset < 1 << 31, "a table of less than 2 GiB")
    read_is_refused(direct, direct.ack.table_stag, direct.ack.table_offset, 0x8000_0008, READ_OUTSIDE)


@GROUP.target("R18", "S1", "S2", needs=LOAD)
def reads_through_stags_of_another_stream(probe: TargetProbe) -> None:
    """Reads through another stream's Table and Pool STag: 0/1/03 or 00; that stream goes on."""
    victim = loading(probe)
    read_is_refused(loading(probe), victim.ack.pool_stag, victim.ack.pool_base, 8, READ_FOREIGN)
    read_is_refused(loading(probe), victim.ack.table_stag, victim.ack.table_offset, 8, READ_FOREIGN)
    victim.entry(victim.side.handle(0))


@GROUP.target("R21", "S4", needs=ALLOC)
def reads_of_what_may_be_written(probe: TargetProbe) -> None:
    """Reads of the partition and of Head: 0/1/02."""
    direct = allocating(probe)
    read_is_refused(direct, direct.ack.partition_stag, direct.slot_at(0).block_offset, 8, NO_RIGHT_TO_READ)
    direct = allocating(probe)
    read_is_refused(direct, direct.ack.head_stag, direct.ack.head_offset, COUNTER_BYTES, NO_RIGHT_TO_READ)


@GROUP.target("S10", "R14", needs=ALLOC)
def empty_reads_of_what_may_be_written(probe: TargetProbe) -> None:
    """Reads of no octets of the partition and of Head are answered."""
    direct = allocating(probe)
    for stag in (direct.ack.partition_stag, direct.ack.head_stag):
        expect(direct.stream.read(stag, 0, 0) == b"", "no octets", "some")
    direct.side.goes_on()


@GROUP.target("R25", "S8", "S7", needs=LOAD)
def flood_of_reads(probe: TargetProbe) -> None:
    """A flood of Reads of the pool, none of the answers read: the stream ends with 1/2/02 or 0/2/07; others go on."""
    bystander, direct = probe.session(), loading(probe)
    stream, ack = direct.stream, direct.ack
    size = min(ack.block_size, 1 << 20)
    request = ReadRequest(1, 0, size, ack.pool_stag, ack.pool_base)
    stream.send_ulpdus(*(read_request(stream, request) for _ in range(FLOOD)))
    bystander.goes_on()
    stream.expect_terminate(*IRD_EXCEEDED)


@GROUP.target("R23", needs=("direct-load", "big-blocks"))
def read_that_fails_half_way(probe: TargetProbe) -> None:
    """The Pool STag is invalidated while a long Read is answered: all comes, or the Terminate quotes what was left."""
    features = Feature.DIRECT_LOAD | Feature.INVALIDATE
    side = probe.session(receive_buffer_bytes=1 << 16, requested_features=features)
    stream, ack = side.stream, side.ack
    asked = ReadRequest(0x5111C, 0x1000_0000, ack.block_size, ack.pool_stag, ack.pool_base)
    stream.send_ulpdus(read_request(stream, asked))
    came_bytes = _payload_bytes(stream.ulpdu("a segment of the Read Response"))
    request = side.load(side.first, None)
    stream.send(request.pack(), opcode=RdmapOpcode.SEND_INVALIDATE, invalidate_stag=ack.pool_stag)
    while came_bytes < asked.size:
        ulpdu = stream.ulpdu("the rest of the Read Response, a COMPLETION or a Terminate")
        segment = Segment.parse(ulpdu or b"")
        if segment.opcode == RdmapOpcode.TERMINATE:
            left = asked.advanced(came_bytes)
            quoted = Terminate.parse(segment.payload).rdmap_header
            expect(quoted == left.pack(), f"{left} quoted", quoted.hex())
            return
        came_bytes += _payload_bytes(ulpdu)


def _payload_bytes(ulpdu: bytes | None) -> int:
    """Octets of a Read Response; none if it is something else."""
    segment = Segment.parse(ulpdu or b"")
    return len(segment.payload) if segment.opcode == RdmapOpcode.READ_RESPONSE else 0


@GROUP.target("R31", "R35", needs=LOAD)
def send_with_invalidate(probe: TargetProbe) -> None:
    """A request by Send with Invalidate of the Table STag is answered; a Read through that STag afterwards: 0/1/00."""
    for opcode in (RdmapOpcode.SEND_INVALIDATE, RdmapOpcode.SEND_SOLICITED_INVALIDATE):
        direct = loading(probe)
        request = direct.side.load(direct.side.first, None)
        direct.stream.send(request.pack(), opcode=opcode, invalidate_stag=direct.ack.table_stag)
        direct.side.answer(request)
        direct.stream.read(direct.ack.pool_stag, direct.ack.pool_base, 8)
        to = direct.ack.table_offset
        read_is_refused(direct, direct.ack.table_stag, to, 8, (Cause.RDMAP_INVALID_STAG,))


@GROUP.target("R32", "S1", needs=LOAD)
def invalidate_of_another_stream(probe: TargetProbe) -> None:
    """A Send with Invalidate of another stream's Pool STag: 0/1/09 or 0/2/09; that stream still reads through it."""
    victim, intruder = loading(probe), probe.session()
    request = intruder.load(intruder.first, None)
    stag = victim.ack.pool_stag
    intruder.stream.send(request.pack(), opcode=RdmapOpcode.SEND_INVALIDATE, invalidate_stag=stag)
    intruder.stream.expect_terminate(Cause.RDMAP_CANNOT_INVALIDATE, (0, 2, 9))
    victim.stream.read(stag, victim.ack.pool_base, 8)


# --- Writes ---


@GROUP.target("S4", "R47", needs=LOAD)
def writes_to_what_may_be_read(probe: TargetProbe) -> None:
    """RDMA Writes to table and pool, and a Read Response to the pool, are refused; nothing changes."""
    watcher = loading(probe)
    watcher.side.bind(0, b"as it was")
    block = watcher.entry(watcher.side.handle(0)).block_offset
    direct = loading(probe)
    write_is_refused(direct, direct.ack.pool_stag, block, b"changed", NO_RIGHT_TO_WRITE)
    direct = loading(probe)
    write_is_refused(direct, direct.ack.table_stag, direct.ack.table_offset, b"changed", NO_RIGHT_TO_WRITE)
    direct = loading(probe)
    sink_of(direct.side, 7)
    direct.stream.send_ulpdus(segments.read_response(direct.ack.pool_stag, block, b"changed"))
    direct.stream.expect_terminate(*NO_RIGHT_TO_WRITE)
    came = watcher.stream.read(watcher.ack.pool_stag, block, 9)
    expect(came == b"as it was", "b'as it was'", came)


@GROUP.target("S4", needs=ALLOC)
def writes_to_ring_and_head(probe: TargetProbe) -> None:
    """RDMA Writes to the ring, which may be read, and to Head, which takes atomics, are refused."""
    direct = allocating(probe)
    write_is_refused(direct, direct.ack.ring_stag, direct.ack.ring_offset, bytes(8), NO_RIGHT_TO_WRITE)
    direct = allocating(probe)
    write_is_refused(direct, direct.ack.head_stag, direct.ack.head_offset, bytes(8), NO_RIGHT_TO_WRITE)


@GROUP.target("D26", "D29", "S3", needs=BOTH, alone=True)
def writes_across_the_ends_of_a_partition(probe: TargetProbe) -> None:
    """RDMA Writes across both ends of a partition, and one octet outside: 1/1/01, no octet of them is placed."""
    watcher = loading(probe)
    ack = watcher.ack
    for at_end in (False, True):
        for offset, octets in ((-4, b"\xff" * 8), (0 if at_end else -1, b"\xff")):
            direct = allocating(probe)
            edge = partition_of(direct)[at_end]
            first, end = max(ack.pool_base, edge - 8), min(pool_end(ack), edge + 8)
            before = watcher.stream.read(ack.pool_stag, first, end - first)
            write_is_refused(direct, direct.ack.partition_stag, edge + offset, octets, WRITE_OUTSIDE)
            after = watcher.stream.read(ack.pool_stag, first, end - first)
            expect(after == before, f"{before.hex()} around the edge", after.hex())


@GROUP.target("D28", needs=ALLOC)
def write_that_wraps(probe: TargetProbe) -> None:
    """An RDMA Write of 8 octets to TO 2^64 - 4 of the partition: 1/1/03 or 01."""
    direct = allocating(probe)
    write_is_refused(direct, direct.ack.partition_stag, TO_MASK - 3, bytes(8), tuple(reversed(WRITE_OUTSIDE)))


@GROUP.target("D27", "S1", "S2", needs=ALLOC)
def write_to_a_partition_of_another_stream(probe: TargetProbe) -> None:
    """An RDMA Write to another stream's partition: 1/1/02 or 00; that stream goes on."""
    victim = allocating(probe)
    block = victim.slot_at(0).block_offset
    write_is_refused(allocating(probe), victim.ack.partition_stag, block, b"intruder", WRITE_FOREIGN)
    victim.side.goes_on()


@GROUP.target("R26", "R10", needs=BOTH)
def read_behind_a_write(probe: TargetProbe) -> None:
    """RDMA Writes to a block, and a Read of the pool behind them in one write: the Read brings what was written."""
    features = loading(probe).ack.granted_features | allocating(probe).ack.granted_features
    direct = DirectSide(probe.session(requested_features=features, requested_quota=2))
    probe.need(bool(direct.ack.pool_stag and direct.ack.partition_stag), "both direct modes in one session")
    block = direct.block_of(direct.take_ticket())
    stream = direct.stream
    for n in range(8):
        octets = bytes((n + 1,)) * 3000
        asked = ReadRequest(n, 0, len(octets), direct.ack.pool_stag, block)
        writes = stream.ulpdus_of_tagged(RdmapOpcode.WRITE, direct.ack.partition_stag, block, octets)
        stream.send_ulpdus(*writes, read_request(stream, asked))
        expect(stream.read_response(asked) == octets, f"octets of {n + 1}", "other ones")
