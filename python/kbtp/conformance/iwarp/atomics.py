"""Atomics and Immediate Data (RFC 7306). What takes atomics is the Head of a session that allocates directly.

A Head that no ticket explains ends the stream when the target looks at it (profile 6.9). So each operation that leaves
one is sent in one write with the one that puts the old value back.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kbtp.conformance import segments
from kbtp.conformance.case import Group
from kbtp.conformance.deviation import Deviation, expect
from kbtp.conformance.iwarp.octets import Segment, Terminate, segments_of, terminate_of
from kbtp.conformance.kbtp_cases.direct import DirectSide, allocating, loading
from kbtp.conformance.probe import Probe, TargetProbe
from kbtp.conformance.rule import SHOULD
from kbtp.conformance.stream import Stream
from kbtp.iwarp.rdmap import QN_REQUEST, AtomicOperation, AtomicRequest, AtomicResponse, RdmapOpcode, ReadRequest
from kbtp.limits import ATOMIC_RESPONSE_BYTES, COUNTER_BYTES, SLOT_BYTES
from kbtp.types import TerminateCause as Cause

GROUP = Group("atomics", needs=("iwarp",))

NEEDS = ("direct-alloc",)
M64 = (1 << 64) - 1
LANES = 0x8000_0000_8000_0000
VECTORS = 12
SEED = 7306
AT_ONCE = 4
PROTECTED = (Cause.RDMAP_BASE_OR_BOUNDS, Cause.RDMAP_CATASTROPHIC_STREAM)
NO_RIGHT = (Cause.RDMAP_ACCESS_RIGHTS,)
FOREIGN = (Cause.RDMAP_STAG_NOT_ASSOCIATED, Cause.RDMAP_INVALID_STAG)
ANY_TERMINATE = (
    Cause.RDMAP_UNEXPECTED_OPCODE, Cause.RDMAP_UNSPECIFIED, Cause.RDMAP_CATASTROPHIC_STREAM, Cause.DDP_INVALID_MO,
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Operation:
    """Data and masks of one atomic; `means` is the value afterwards, computed without the stack under test."""

    operation: AtomicOperation
    data: int
    mask: int
    compare_data: int = 0
    compare_mask: int = M64

    def means(self, old: int) -> int:
        if self.operation is AtomicOperation.FETCH_ADD:
            return added_bit_by_bit(old, self.data, self.mask)
        if (old ^ self.compare_data) & self.compare_mask:
            return old
        return old & ~self.mask & M64 | self.data & self.mask


def added_bit_by_bit(old: int, data: int, mask: int) -> int:
    """RFC 7306 5.1.1: a carry out of a bit that the mask marks is dropped, and so is that of bit 63."""
    new = carry = 0
    for bit in range(64):
        total = (old >> bit & 1) + (data >> bit & 1) + carry
        new |= (total & 1) << bit
        carry = 0 if mask >> bit & 1 else total >> 1
    return new


def fetch_add(data: int, mask: int = 0) -> Operation:
    return Operation(AtomicOperation.FETCH_ADD, data, mask)


def set_to(value: int) -> Operation:
    """CmpSwap that compares nothing and swaps all."""
    return Operation(AtomicOperation.COMPARE_SWAP, value, M64, 0, 0)


LOOK = fetch_add(0)


# --- sending and receiving ---


def ulpdus_of(direct: DirectSide, operations: Sequence[Operation], first_id: int = 0x7306_0000) -> list[bytes]:
    """The Atomic Requests of `operations` on Head."""
    stag, to = direct.ack.head_stag, direct.ack.head_offset
    return [
        segments.atomic_request(
            direct.stream.take_msn(QN_REQUEST),
            AtomicRequest(
                one.operation, first_id + n, stag, to, one.data, one.mask, one.compare_data, one.compare_mask
            ),
        )
        for n, one in enumerate(operations)
    ]


def response(stream: Stream, request_id: int) -> int:
    """The value that the next Atomic Response brings. Raises `Deviation`."""
    message = stream.message("an Atomic Response")
    if message is None or message.opcode is not RdmapOpcode.ATOMIC_RESPONSE:
        raise Deviation("an Atomic Response", str(message or "the end of the connection"))
    answer = AtomicResponse.parse(message.payload)
    expect(answer.request_id == request_id, f"the identifier {request_id:#x}", f"{answer.request_id:#x}")
    return answer.value


def executed(direct: DirectSide, *operations: Operation) -> list[int]:
    """Send `operations` in one write; the value before each."""
    direct.stream.send_ulpdus(*ulpdus_of(direct, operations))
    return [response(direct.stream, 0x7306_0000 + n) for n in range(len(operations))]


def at_head(probe: TargetProbe) -> DirectSide:
    """A session with a Head that takes a few atomics at once."""
    direct = allocating(probe)
    word = direct.stream.reply.word
    probe.need(word is not None and word.ird >= AT_ONCE, f"an IRD of {AT_ONCE}")
    return direct


def check(probe: TargetProbe, operations: Callable[[random.Random], Operation]) -> None:
    """Random values in Head, and what each operation leaves there, against the reference."""
    direct = at_head(probe)
    draw = random.Random(SEED)
    (before,) = executed(direct, LOOK)
    for _ in range(VECTORS):
        value, operation = draw.getrandbits(64), operations(draw)
        came = executed(direct, set_to(value), operation, LOOK, set_to(before))
        after = operation.means(value)
        due = [before, value, after, after]
        expect(came == due, f"{[hex(one) for one in due]} with {operation}", [hex(one) for one in came])
    direct.side.goes_on()


# --- arithmetic ---


@GROUP.target("X4", "X9", needs=NEEDS)
def add_of_64_bits(probe: TargetProbe) -> None:
    """FetchAdd with mask 0 and with mask 2^63 is an addition modulo 2^64 and returns the old value."""
    check(probe, lambda draw: fetch_add(draw.getrandbits(64), draw.choice((0, 1 << 63))))


@GROUP.target("X10", needs=NEEDS)
def add_of_two_words(probe: TargetProbe) -> None:
    """FetchAdd with mask 0x8000000080000000: no carry goes from the low word to the high one."""
    check(probe, lambda draw: fetch_add(draw.getrandbits(64) | 0xFFFF_FFF0, LANES))


@GROUP.target("X11", needs=NEEDS)
def add_without_carry(probe: TargetProbe) -> None:
    """FetchAdd with a mask of ones is an exclusive or."""
    check(probe, lambda draw: fetch_add(draw.getrandbits(64), M64))


@GROUP.target("X12", needs=NEEDS)
def add_under_any_mask(probe: TargetProbe) -> None:
    """FetchAdd with random masks leaves what an addition bit by bit leaves."""
    check(probe, lambda draw: fetch_add(draw.getrandbits(64), draw.getrandbits(64) & draw.getrandbits(64)))


@GROUP.target("X6", needs=NEEDS)
def add_looks_at_no_comparison(probe: TargetProbe) -> None:
    """FetchAdd whose Compare Data and Compare Mask are random adds all the same."""
    check(
        probe,
        lambda draw: Operation(
            AtomicOperation.FETCH_ADD, draw.getrandbits(64), 0, draw.getrandbits(64), draw.getrandbits(64)
        ),
    )


@GROUP.target("X4", "X13", "X14", needs=NEEDS)
def compare_and_swap_under_masks(probe: TargetProbe) -> None:
    """CmpSwap compares under Compare Mask, swaps under Swap Mask, and leaves what does not match as it was."""
    check(
        probe,
        lambda draw: Operation(
            AtomicOperation.COMPARE_SWAP,
            draw.getrandbits(64),
            draw.getrandbits(64),
            draw.getrandbits(64),
            1 << draw.randrange(64) | 1 << draw.randrange(64),  # matches now and then
        ),
    )


@GROUP.target("X14", needs=NEEDS)
def compare_without_a_match(probe: TargetProbe) -> None:
    """CmpSwap that compares all 64 bits with something else leaves the value as it was and returns it."""
    direct = at_head(probe)
    (before,) = executed(direct, LOOK)
    swap = Operation(AtomicOperation.COMPARE_SWAP, 0, M64, before ^ 1, M64)
    expect(executed(direct, swap, LOOK) == [before, before], "the old value, twice", "another")
    direct.side.goes_on()


@GROUP.target("X15", needs=NEEDS)
def swap_without_comparison(probe: TargetProbe) -> None:
    """CmpSwap with Compare Mask 0 swaps whatever is there."""
    check(
        probe,
        lambda draw: Operation(AtomicOperation.COMPARE_SWAP, draw.getrandbits(64), M64, draw.getrandbits(64), 0),
    )


@GROUP.target("X16", needs=NEEDS)
def the_target_reads_what_was_added(probe: TargetProbe) -> None:
    """A ticket taken by FetchAdd is one that the target knows as taken: the value is in its own order."""
    direct = allocating(probe)
    direct.store(0, b"bound by ticket")
    direct.side.release(0)


# --- form ---


@GROUP.target("X1", "X2", "X7", "X8", needs=NEEDS)
def form_of_the_response(probe: TargetProbe) -> None:
    """After Reads on queue 1 the first Atomic Response is on queue 3 with MSN 1: 12 octets, no Invalidate STag."""
    direct = at_head(probe)
    for position in range(2):
        direct.slot_at(position)
    executed(direct, LOOK, LOOK)
    found = [one for one in segments_of(direct.stream) if one.opcode == RdmapOpcode.ATOMIC_RESPONSE]
    expect([_form(one) for one in found] == [(3, 1, 0, True, 0), (3, 2, 0, True, 0)], "QN 3, MSN 1 and 2", found)
    expect(all(len(one.payload) == ATOMIC_RESPONSE_BYTES for one in found), "12 octets", found)


def _form(segment: Segment) -> tuple[int, int, int, bool, int]:
    return segment.qn, segment.msn, segment.mo, segment.last, segment.stag


@GROUP.target("X3", "X1", needs=NEEDS)
def reserved_bits_of_a_request(probe: TargetProbe) -> None:
    """The 28 bits before AOpCode, and the Invalidate STag, are not looked at."""
    direct = at_head(probe)
    request = AtomicRequest(AtomicOperation.FETCH_ADD, 5, direct.ack.head_stag, direct.ack.head_offset, 0, 0)
    payload = (0xFFFF_FFF0).to_bytes(4, "big") + request.pack()[4:]
    msn = direct.stream.take_msn(QN_REQUEST)
    direct.stream.send_ulpdus(segments.untagged(RdmapOpcode.ATOMIC_REQUEST, msn, payload, ulp_word=0xFFFF_FFFF))
    response(direct.stream, 5)
    direct.side.goes_on()


# --- order ---


@GROUP.target("X19", "X7", needs=NEEDS)
def executed_once_in_order(probe: TargetProbe) -> None:
    """FetchAdds of a ticket each, in one write: each old value is the one before and the sum is theirs."""
    direct = at_head(probe)
    (before,) = executed(direct, LOOK)
    step = fetch_add(1 << 32, 0)
    came = executed(direct, step, step, step, set_to(before))
    due = [before + (n << 32) & M64 for n in range(4)]
    expect(came == due, str([hex(one) for one in due]), [hex(one) for one in came])
    direct.side.goes_on()


@GROUP.target("X20", "X21", "R15", needs=NEEDS)
def responses_of_reads_and_atomics(probe: TargetProbe) -> None:
    """Reads and Atomics in turn, in one write, with the MSNs of queue 1: their responses come in that order."""
    direct = at_head(probe)
    stream = direct.stream
    ulpdus, due = [], []
    for n in range(AT_ONCE // 2):
        sink = stream.memory.lend(SLOT_BYTES)
        read = ReadRequest(sink.stag, sink.to, SLOT_BYTES, direct.ack.ring_stag, direct.ack.ring_offset)
        stream.expects_reads_of_ours += 1
        ulpdus.append(segments.read_request(stream.take_msn(QN_REQUEST), read))
        ulpdus += ulpdus_of(direct, [LOOK], first_id=n)
        due += [RdmapOpcode.READ_RESPONSE, RdmapOpcode.ATOMIC_RESPONSE]
    stream.send_ulpdus(*ulpdus)
    came = [stream.message("a response") for _ in due]
    expect([None if one is None else one.opcode for one in came] == due, "responses in order", came)


@GROUP.target("X22", "R26", needs=("direct-load", "direct-alloc"))
def executed_after_what_was_written(probe: TargetProbe) -> None:
    """An RDMA Write, a FetchAdd and a Read of what was written, in one write: the Read brings it."""
    reader = loading(probe)
    direct = at_head(probe)
    block = direct.block_of(direct.take_ticket())
    direct.stream.send_ulpdus(segments.write(direct.ack.partition_stag, block, b"written"), *ulpdus_of(direct, [LOOK]))
    response(direct.stream, 0x7306_0000)
    came = reader.stream.read(reader.ack.pool_stag, block, 7)
    expect(came == b"written", "what was written before the Atomic", came)


# --- what is refused ---


def refused(direct: DirectSide, stag: int, to: int, causes: tuple[Cause, ...]) -> Terminate:
    """A FetchAdd of 1 at `to` of `stag` ends the stream."""
    request = AtomicRequest(AtomicOperation.FETCH_ADD, 1, stag, to, 1, 0)
    direct.stream.send_ulpdus(segments.atomic_request(direct.stream.take_msn(QN_REQUEST), request))
    return terminate_of(direct.stream.expect_terminate(*causes))


@GROUP.target("X17", needs=NEEDS)
def unaligned(probe: TargetProbe) -> None:
    """A FetchAdd 4 octets into Head: 0/2/07, or 0/1/01 as it ends beyond Head; M and D, no R."""
    direct = allocating(probe)
    terminate = refused(direct, direct.ack.head_stag, direct.ack.head_offset + 4, tuple(reversed(PROTECTED)))
    expect(terminate.bits == Terminate.M | Terminate.D, "M and D, no R", f"{terminate.bits:#06x}")


@GROUP.target("S3", "X18", needs=NEEDS)
def outside_of_head(probe: TargetProbe) -> None:
    """A FetchAdd 8 octets behind Head, and 8 before it: 0/1/01 (or 04)."""
    for offset in (COUNTER_BYTES, -COUNTER_BYTES):
        direct = allocating(probe)
        refused(
            direct, direct.ack.head_stag, direct.ack.head_offset + offset & M64, (PROTECTED[0], Cause.RDMAP_TO_WRAP)
        )


@GROUP.target("S4", "X18", needs=("direct-load", "direct-alloc"))
def without_the_right(probe: TargetProbe) -> None:
    """A FetchAdd at what may only be read or written: 0/1/02, and what is there stays as it was."""
    reader = loading(probe)
    reader.side.bind(0, b"as it was")
    entry = reader.entry(reader.side.handle(0))
    direct = allocating(probe)
    block = direct.slot_at(0).block_offset
    refused(direct, direct.ack.ring_stag, direct.ack.ring_offset, NO_RIGHT)
    refused(allocating(probe), direct.ack.ring_stag, direct.ack.ring_offset, (*NO_RIGHT, *FOREIGN))
    direct = allocating(probe)
    refused(direct, direct.ack.partition_stag, direct.slot_at(0).block_offset, NO_RIGHT)
    another = loading(probe)
    refused(another, another.ack.pool_stag, entry.block_offset, NO_RIGHT)
    another = loading(probe)
    refused(another, another.ack.table_stag, another.ack.table_offset, NO_RIGHT)
    expect(reader.stream.read(reader.ack.pool_stag, entry.block_offset, 9) == b"as it was", "b'as it was'", block)


@GROUP.target("S1", "S2", "X18", needs=NEEDS)
def head_of_another_stream(probe: TargetProbe) -> None:
    """A FetchAdd at another stream's Head: 0/1/03 or 00; that Head stays as it was, and its stream goes on."""
    victim, intruder = allocating(probe), allocating(probe)
    (before,) = executed(victim, LOOK)
    refused(intruder, victim.ack.head_stag, victim.ack.head_offset, FOREIGN)
    expect(executed(victim, LOOK) == [before], f"{before:#x}", "another value")
    victim.side.goes_on()


@GROUP.target("X5", needs=NEEDS)
def aopcodes_that_there_are_not(probe: TargetProbe) -> None:
    """AOpCode 1 and 3 on Head end the stream."""
    for aopcode in (1, 3):
        direct = allocating(probe)
        request = AtomicRequest(AtomicOperation.FETCH_ADD, 1, direct.ack.head_stag, direct.ack.head_offset, 1, 0)
        payload = aopcode.to_bytes(4, "big") + request.pack()[4:]
        msn = direct.stream.take_msn(QN_REQUEST)
        direct.stream.send_ulpdus(segments.untagged(RdmapOpcode.ATOMIC_REQUEST, msn, payload))
        direct.stream.expect_terminate(*ANY_TERMINATE)


@GROUP.target("X21", "R25", needs=NEEDS)
def more_atomics_than_ird(probe: TargetProbe) -> None:
    """A flood of Atomic Requests in one write: all are answered, or the stream ends with 1/2/02 or 0/2/07."""
    direct = allocating(probe)
    count = 300
    direct.stream.send_ulpdus(*ulpdus_of(direct, [LOOK] * count))
    for _ in range(count):
        message = direct.stream.message("an Atomic Response, or the end of the stream")
        if message is not None and message.opcode is RdmapOpcode.TERMINATE:
            info = message.terminate
            code = (info.layer, info.etype, info.code)
            expect(code in (Cause.DDP_NO_BUFFER.value, Cause.RDMAP_CATASTROPHIC_STREAM.value), "1/2/02", message)
            return


# --- Immediate Data ---


@GROUP.either("X25", "X1", "X28", level=SHOULD)
def immediate_data(probe: Probe) -> None:
    """Immediate Data of 8 octets, which is no message of KBTP: the session ends in order, at the latest with ours."""
    session = probe.session()
    session.stream.send(bytes(8), opcode=RdmapOpcode.IMMEDIATE)
    session.stream.send(bytes(8), opcode=RdmapOpcode.IMMEDIATE_SOLICITED)
    session.stream.tcp.finish()
    session.stream.expect_end("we have closed")
