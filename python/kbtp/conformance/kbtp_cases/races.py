"""The races that profile 6 closes: a LOAD's block while it is freed and used anew, readers that do not read."""

from __future__ import annotations

from kbtp.conformance.case import Group
from kbtp.conformance.deviation import expect
from kbtp.conformance.initiator_side import InitiatorSide
from kbtp.conformance.kbtp_cases.rdma import answer_read, expect_nothing_more, next_read
from kbtp.conformance.memory import Lent
from kbtp.conformance.probe import TargetProbe
from kbtp.iwarp.rdmap import RdmapOpcode
from kbtp.types import RequestFlag, Status
from kbtp.wire import Load

GROUP = Group("races")

BIG_BYTES = 8 << 20  # more than the sockets of both sides take
WINDOW_BYTES = 64 << 10
OLD, NEW = b"\x5a", b"\xa5"


def big_block(probe: TargetProbe) -> InitiatorSide:
    """A session that owns a sealed block which does not fit the sockets."""
    owner = probe.session(requested_quota=3)
    probe.need(owner.ack.block_size >= BIG_BYTES, "blocks of 8 MiB")
    lent = owner.stream.memory.lend(OLD * BIG_BYTES)
    owner.expect_status(owner.alloc_store(owner.handle(0), lent), Status.SUCCESS)
    owner.stream.memory.take_back(lent)
    return owner


def slow_load(probe: TargetProbe, owner: InitiatorSide) -> tuple[InitiatorSide, Load, Lent]:
    """A session that has begun to LOAD the block and reads only a little of it."""
    reader = probe.session(receive_buffer_bytes=WINDOW_BYTES, requested_quota=0)
    lent = reader.stream.memory.lend(BIG_BYTES)
    load = reader.load(owner.handle(0), lent)
    reader.send(load)
    expect(reader.stream.await_ulpdu("the block's first octets"), "the block's first octets", "the end of the stream")
    return reader, load, lent


def any_load(probe: TargetProbe, owner: InitiatorSide) -> tuple[InitiatorSide, Load, Lent]:
    """A session whose RNIC takes the block as fast as it comes."""
    reader = probe.session(requested_quota=0)
    lent = reader.stream.memory.lend(BIG_BYTES)
    load = reader.load(owner.handle(0), lent)
    reader.send(load)
    return reader, load, lent


def all_octets(lent: Lent, octet: bytes) -> bool:
    return lent.octets.count(octet) == len(lent.octets)


@GROUP.target("KR1", "KR2", "KR3", needs=("big-blocks",), timeout_s=40.0)
def freed_while_it_is_read(probe: TargetProbe) -> None:
    """A LOAD that began before a FREE brings the old block whole, though its blocks are wanted anew meanwhile."""
    owner = big_block(probe)
    other = probe.session(requested_quota=0)
    reader, load, lent = slow_load(probe, owner) if probe.by_hand else any_load(probe, owner)
    free = owner.free(owner.handle(0))
    owner.send(free)
    if probe.by_hand:
        expect_nothing_more(owner, "a FREE completes when the LOADs that began before it are gone (profile 6.1)")
        other.expect_status(other.load(owner.handle(0), None), Status.NOT_BOUND)
    for index in (1, 2):
        store = owner.alloc_store(owner.handle(index), owner.stream.memory.lend(NEW * 4096))
        owner.send(store)
        expect(
            owner.answer(store).status in (Status.SUCCESS, Status.NO_SPACE), "the rest of the quota", "another status"
        )
    status = reader.answer(load).status
    if probe.by_hand or status is not Status.NOT_BOUND:
        expect(status is Status.SUCCESS, "SUCCESS of the LOAD", status.name)
        expect(all_octets(lent, OLD), "the old block, whole", "a mixture")
    else:  # the FREE was there first
        expect(lent.unwritten, "that nothing is written", "a block")
    expect(owner.answer(free).status is Status.SUCCESS, "SUCCESS of the FREE", "another status")


@GROUP.target("KR4", needs=("iwarp", "big-blocks", "short-waits"), timeout_s=60.0)
def reader_that_does_not_read(probe: TargetProbe) -> None:
    """A reader that a FREE waits for and that does not drain has its stream ended; then the FREE completes."""
    owner = big_block(probe)
    reader, _, _ = slow_load(probe, owner)
    free = owner.free(owner.handle(0))
    owner.send(free)
    status = owner.answer(free, within_s=probe.wait_s(probe.setup.drain_s)).status
    expect(status is Status.SUCCESS, "SUCCESS of the FREE after the drain time", status.name)
    for message in _to_the_end(reader):
        expect(message is not RdmapOpcode.SEND, "no COMPLETION for the reader", "one")


def _to_the_end(reader: InitiatorSide) -> list[RdmapOpcode]:
    came = []
    while (message := reader.stream.message("the end of the reader's stream")) is not None:
        came.append(message.opcode)
    return came


@GROUP.target(
    "KR11",
    needs=(
        "iwarp",
        "big-blocks",
    ),
    timeout_s=40.0,
)
def slow_reader_without_a_free(probe: TargetProbe) -> None:
    """A reader that is slow and in nobody's way gets its block; others are served meanwhile."""
    owner = big_block(probe)
    reader, load, lent = slow_load(probe, owner)
    for _ in range(20):
        owner.bind(1, b"meanwhile")
        owner.release(1)
    expect(reader.answer(load).status is Status.SUCCESS, "SUCCESS of the LOAD", "another status")
    expect(all_octets(lent, OLD), "the block, whole", "other octets")
    owner.release(0)


@GROUP.target("KR3")
def sealing_does_not_disturb_a_load(probe: TargetProbe) -> None:
    """A STORE that seals while the block is loaded with ALLOW_UNSEALED lets both succeed."""
    owner, reader = probe.session(), probe.session(requested_quota=0)
    owner.bind(0, b"x" * 1000, sealed=False)
    store = owner.store(owner.handle(0), owner.stream.memory.lend(b"y" * 1000), flags=RequestFlag.SEAL)
    owner.send(store)
    read = next_read(owner) if probe.by_hand else None
    lent = reader.stream.memory.lend(1000)
    load = reader.load(owner.handle(0), lent, flags=RequestFlag.ALLOW_UNSEALED)
    completion = reader.expect_status(load, Status.SUCCESS)
    expect(completion.data_length in (0, 1000), "a Data Length of before or between", completion.data_length)
    if read is not None:
        answer_read(owner, read)
    expect(owner.answer(store).status is Status.SUCCESS, "SUCCESS", "another status")
    expect(reader.fetch(owner.handle(0), 1000) == b"y" * 1000, "the sealed block", "other octets")


@GROUP.target("KR12")
def other_sessions_see_a_free_at_once(probe: TargetProbe) -> None:
    """After the completion of a FREE no session loads the block; after that of an ALLOC_STORE every one loads it."""
    owner, reader = probe.session(), probe.session(requested_quota=0)
    handle = owner.handle(0)
    for round_ in range(20):
        octets = b"round %d" % round_
        bound = owner.bind(0, octets)
        expect(reader.fetch(handle, 64) == octets, "what was stored", "other octets")
        owner.release(0)
        lent = reader.stream.memory.lend(64)
        status = reader.call(reader.load(handle, lent, generation=bound.generation)).status
        expect(status is Status.NOT_BOUND, "NOT_BOUND", status.name)
        expect(lent.unwritten, "that nothing is written", lent.touched)


@GROUP.target("KR13")
def many_rounds_of_reuse(probe: TargetProbe) -> None:
    """Blocks that say whose they are, loaded by others while they are freed and used anew, are never mixed up."""
    owner, reader = probe.session(requested_quota=2), probe.session(requested_quota=0)
    size = min(owner.ack.block_size, 8192)
    index_of = {0: owner.handle(0), 1: owner.handle(1)}
    for round_ in range(60):
        index = round_ % 2
        octets = round_.to_bytes(4, "big") * (size // 4)
        bound = owner.bind(index, octets)
        lent = reader.stream.memory.lend(size)
        load = reader.load(index_of[index], lent)
        free = owner.free(owner.handle(index))
        reader.send(load)
        owner.send(free)
        completion = reader.answer(load).completion
        if completion.status is Status.SUCCESS:
            expect(completion.generation == bound.generation, "the Generation that was loaded", completion.generation)
            expect(bytes(lent.octets) == octets, f"the block of round {round_}", lent.octets[:8].hex())
        else:
            expect(completion.status is Status.NOT_BOUND, "SUCCESS or NOT_BOUND", completion.status.name)
        expect(owner.answer(free).status is Status.SUCCESS, "SUCCESS of the FREE", "another status")
