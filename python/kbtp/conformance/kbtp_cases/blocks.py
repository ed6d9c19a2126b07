"""LOAD, STORE, ALLOC_STORE and FREE, as the draft tells them (draft 5 and 6, profile 6.6, 8.6 and 8.7)."""

from __future__ import annotations

from kbtp.conformance.case import Group
from kbtp.conformance.deviation import Deviation, expect
from kbtp.conformance.initiator_side import InitiatorSide
from kbtp.conformance.probe import TargetProbe
from kbtp.iwarp.rdmap import RdmapOpcode
from kbtp.types import RequestFlag, Status
from kbtp.wire import Completion, DataDescriptor, Load

GROUP = Group("blocks")

SIZES = (1, 3, 4, 511, 512, 4096, 10_000)


def pattern(size: int, seed: int = 0) -> bytes:
    return bytes((seed + index * 7) % 251 for index in range(size))


def next_generation(generation: int) -> int:
    return generation % 0xFFFF + 1


def check_offset(side: InitiatorSide, completion: Completion) -> None:
    ack = side.ack
    index, rest = divmod(completion.block_offset - ack.pool_base, ack.block_size)
    fits = rest == 0 and 0 <= index < ack.pool_blocks
    expect(fits, "a Block Offset of Pool Base + k * Block Size (profile 2)", hex(completion.block_offset))


@GROUP.target("KL1", "KT1", "KA1", "KD1", "KD2", "KB1")
def what_was_stored_comes_back(probe: TargetProbe) -> None:
    """Octets stored inline or read from the initiator come back by LOAD, whatever their number."""
    side = probe.session()
    for seed, size in enumerate(SIZES):
        octets = pattern(size, seed)
        if size > side.ack.block_size:
            continue
        for fetched in (False, True):
            lent = side.stream.memory.lend(octets, writable=False)
            inline = side.alloc_store_inline(side.handle(0), octets)
            if not fetched and len(inline.pack()) > side.ack.max_message:
                continue
            store = side.alloc_store(side.handle(0), lent) if fetched else inline
            completion = side.expect_status(store, Status.SUCCESS)
            expect(completion.data_length == size, f"Data Length {size}", completion.data_length)
            check_offset(side, completion)
            if fetched and probe.by_hand:
                expect(sum(length for _, length in lent.touched) == size, "each octet read once", lent.touched)
            side.expect_contents(0, octets)
            side.release(0)


@GROUP.target("KL2", "KL3")
def load_writes_just_the_block(probe: TargetProbe) -> None:
    """A LOAD writes Data Length octets from the descriptor's Tagged Offset on and not one more."""
    side = probe.session()
    side.bind(0, pattern(100))
    lent = side.stream.memory.lend(b"\xee" * 300, readable=False, to=0xFFFF_FFFF_0000_0000)
    load = Load(side.request_id(), side.handle(0), 0, RequestFlag.NONE, DataDescriptor(lent.stag, lent.to + 50, 200))
    completion = side.expect_status(load, Status.SUCCESS)
    expect(completion.data_length == 100, "Data Length 100", completion.data_length)
    expect(
        bytes(lent.octets) == b"\xee" * 50 + pattern(100) + b"\xee" * 150, "just those 100 octets", lent.octets.hex()
    )


@GROUP.target("KL4", "KM1")
def completion_of_a_load(probe: TargetProbe) -> None:
    """A LOAD's COMPLETION has Block Offset, Data Length and Generation of the entry, and follows the data."""
    side = probe.session()
    bound = side.bind(0, pattern(50))
    lent = side.stream.memory.lend(50)
    load = side.load(side.handle(0), lent)
    side.send(load)
    if probe.by_hand:
        message = side.stream.message("the data and the COMPLETION")
        if message is None or message.opcode is not RdmapOpcode.WRITE:
            raise Deviation("the data before the COMPLETION (draft 6.5)", str(message))
        side.stream.memory.write(message.stag, message.to, message.payload)
    payload = side.stream.next_send("the COMPLETION").payload
    expect(bytes(lent.octets) == pattern(50), "the data before the COMPLETION (draft 6.5)", lent.octets.hex())
    expect(len(payload) == 40 and payload[2:4] == bytes(2), "40 octets, no flags", payload.hex())
    expect(payload[28:32] == bytes(4), "reserved zeros", payload[28:32].hex())
    completion = Completion.parse(payload)
    told = (completion.request_id, completion.handle, completion.generation, completion.data_length)
    expect(told == (load.request_id, load.handle, bound.generation, 50), "what was asked, and the entry", completion)
    expect(completion.block_offset == bound.block_offset, "the entry's Block Offset", completion)


@GROUP.target("KL5")
def load_of_an_empty_block(probe: TargetProbe) -> None:
    """An ALLOC_STORE of no octets binds an empty block; its LOAD moves nothing, checks no STag, and succeeds."""
    side = probe.session()
    for request in (side.alloc_store(side.handle(0), None), side.alloc_store_inline(side.handle(1), b"")):
        completion = side.expect_status(request, Status.SUCCESS)
        expect(completion.data_length == 0, "Data Length 0", completion.data_length)
        load = Load(side.request_id(), request.handle, 0, RequestFlag.NONE, DataDescriptor(0xBAD, 5, 0))
        completion = side.expect_status(load, Status.SUCCESS)
        expect(completion.data_length == 0, "Data Length 0", completion.data_length)
        side.expect_status(side.free(request.handle), Status.SUCCESS)
    writes = [message for message in side.stream.messages if message.opcode is RdmapOpcode.WRITE]
    expect(not writes, "no RDMA Write (profile 8.7)", writes)


@GROUP.target("KL6", "KS2")
def allow_unsealed(probe: TargetProbe) -> None:
    """An unsealed block is loaded only with ALLOW_UNSEALED; a sealed one with or without."""
    side = probe.session()
    side.bind(0, b"open", sealed=False)
    side.expect_status(side.load(side.handle(0), side.stream.memory.lend(9)), Status.NOT_SEALED)
    side.expect_contents(0, b"open", flags=RequestFlag.ALLOW_UNSEALED)
    side.expect_status(side.store_inline(side.handle(0), b"shut", flags=RequestFlag.SEAL), Status.SUCCESS)
    for flags in (RequestFlag.NONE, RequestFlag.ALLOW_UNSEALED):
        side.expect_contents(0, b"shut", flags=flags)


@GROUP.target("KT1", "KT2", "KT3", "KM3")
def store_changes_the_block(probe: TargetProbe) -> None:
    """A STORE replaces octets and Data Length; block and Generation stay; SEAL seals, and then it is refused."""
    side = probe.session()
    bound = side.bind(0, pattern(1000), sealed=False)
    for octets, fetched in ((pattern(20, 1), True), (pattern(500, 2), False), (b"", False), (b"end", True)):
        lent = side.stream.memory.lend(octets)
        store = side.store(side.handle(0), lent) if fetched else side.store_inline(side.handle(0), octets)
        completion = side.expect_status(store, Status.SUCCESS)
        told = (completion.data_length, completion.block_offset, completion.generation)
        expect(told == (len(octets), bound.block_offset, bound.generation), "length, block and Generation", told)
        side.expect_contents(0, octets, flags=RequestFlag.ALLOW_UNSEALED)
    side.expect_status(side.store_inline(side.handle(0), b"", flags=RequestFlag.SEAL), Status.SUCCESS)
    side.expect_status(side.store_inline(side.handle(0), b"late"), Status.SEALED)
    side.expect_contents(0, b"")


@GROUP.target("KT4", "KA2")
def stores_of_a_whole_block(probe: TargetProbe) -> None:
    """Block Size octets fit a block, one more is a LENGTH_ERROR that changes nothing and reads nothing."""
    side = probe.session()
    size = side.ack.block_size
    probe.need(size <= 1 << 21, f"blocks of {size} octets take too long for this case")
    octets = pattern(251) * (size // 251) + bytes(size % 251)
    lent = side.stream.memory.lend(octets)
    side.expect_status(side.alloc_store(side.handle(0), lent, flags=RequestFlag.NONE), Status.SUCCESS)
    longer = side.stream.memory.lend(size + 1)
    side.expect_status(side.store(side.handle(0), longer), Status.LENGTH_ERROR)
    side.expect_status(side.alloc_store(side.handle(1), longer), Status.LENGTH_ERROR)
    expect(not longer.touched, "no RDMA Read for what does not fit", longer.touched)
    side.expect_contents(0, octets, flags=RequestFlag.ALLOW_UNSEALED)


@GROUP.target("KA3", "KF1", "KG1", "KB2", "KM2")
def bind_and_free_count_the_generation(probe: TargetProbe) -> None:
    """Binding and freeing each increment the Generation by one; FREE's COMPLETION has the new one and zeros else."""
    side = probe.session()
    generation = side.bind(0, b"first").generation
    expect(generation != 0, "a Generation that is not 0", generation)
    for round_ in range(3):
        freed = side.expect_status(side.free(side.handle(0), generation=generation), Status.SUCCESS)
        told = (freed.generation, freed.data_length, freed.block_offset)
        expect(told == (next_generation(generation), 0, 0), "the Generation after the increment, and zeros", told)
        side.expect_status(side.load(side.handle(0), None), Status.NOT_BOUND)
        side.expect_status(side.free(side.handle(0)), Status.NOT_BOUND)
        store = side.alloc_store_inline(side.handle(0), b"again", generation=freed.generation)
        generation = next_generation(freed.generation)
        came = side.expect_status(store, Status.SUCCESS).generation
        expect(came == generation, f"Generation {generation} in round {round_}", came)


@GROUP.target("KM4", "KS5")
def generation_zero_means_any(probe: TargetProbe) -> None:
    """A request names the Generation it expects, or 0 for any; every other one is GENERATION_MISMATCH."""
    side = probe.session()
    generation = side.bind(0, b"data", sealed=False).generation
    for asked, status in (
        (0, Status.SUCCESS),
        (generation, Status.SUCCESS),
        (next_generation(generation), Status.GENERATION_MISMATCH),
        (0xFFFF if generation != 0xFFFF else 1, Status.GENERATION_MISMATCH),
    ):
        lent = side.stream.memory.lend(9)
        load = side.load(side.handle(0), lent, generation=asked, flags=RequestFlag.ALLOW_UNSEALED)
        completion = side.expect_status(load, status)
        expect(completion.generation == generation, "the entry's current Generation", completion.generation)
        side.expect_status(side.store_inline(side.handle(0), b"data", generation=asked), status)
    side.expect_status(side.free(side.handle(0), generation=next_generation(generation)), Status.GENERATION_MISMATCH)
    side.expect_contents(0, b"data", flags=RequestFlag.ALLOW_UNSEALED)


@GROUP.target("KA4", "KS4")
def alloc_store_of_a_bound_handle(probe: TargetProbe) -> None:
    """An ALLOC_STORE of a bound handle is ALREADY_BOUND; it reads nothing and changes nothing."""
    side = probe.session()
    side.bind(0, b"mine")
    lent = side.stream.memory.lend(100)
    side.expect_status(side.alloc_store(side.handle(0), lent), Status.ALREADY_BOUND)
    expect(not lent.touched, "no RDMA Read", lent.touched)
    side.expect_contents(0, b"mine")


@GROUP.target("KM5")
def any_request_id_is_echoed(probe: TargetProbe) -> None:
    """Request IDs are the initiator's to choose: all 64 bits come back."""
    side = probe.session()
    for request_id in (0, 1, 1 << 63, (1 << 64) - 1):
        load = Load(request_id, side.first, 0, RequestFlag.NONE, DataDescriptor(0, 0, 0))
        came = side.call(load).request_id
        expect(came == request_id, hex(request_id), hex(came))


@GROUP.target("KY1")
def sends_of_any_kind(probe: TargetProbe) -> None:
    """HELLO and requests come in Send or Send with Solicited Event."""
    side = probe.before_hello()
    side.stream.send(side.hello_octets(), opcode=RdmapOpcode.SEND_SOLICITED)
    expect(side.take_ack().status is Status.SUCCESS, "SUCCESS", side.ack.status.name)
    load = side.load(side.first, None)
    side.stream.send(load.pack(), opcode=RdmapOpcode.SEND_SOLICITED)
    side.answer(load)


@GROUP.target("KM6", needs=("iwarp",))
def requests_in_many_segments(probe: TargetProbe) -> None:
    """A request may come in any number of DDP segments and TCP segments, its data too."""
    side = probe.session()
    request = side.alloc_store_inline(side.handle(0), pattern(100))
    ulpdus = side.stream.ulpdus_of_send(request.pack(), segment_bytes=7)
    octets = b"".join(map(side.stream.fpdu, ulpdus))
    side.stream.tcp.send_in_pieces(octets[at : at + 11] for at in range(0, len(octets), 11))
    side.answer(request)
    side.expect_contents(0, pattern(100))
