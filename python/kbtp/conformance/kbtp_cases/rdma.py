"""What a target does with the initiator's memory: Data Descriptors, INVALIDATE, RDMA Reads and their depth
(draft 5.1, 5.2, 9.1; profile 2, 3 "RDMA Reads", 6.7, 8.7, 8.8)."""

from __future__ import annotations

from collections.abc import Callable

from kbtp.conformance.case import Group
from kbtp.conformance.deviation import Deviation, expect
from kbtp.conformance.initiator_side import InitiatorSide
from kbtp.conformance.kbtp_cases.blocks import pattern
from kbtp.conformance.kbtp_cases.hello import patched
from kbtp.conformance.memory import Lent
from kbtp.conformance.probe import TargetProbe
from kbtp.conformance.startup import Startup
from kbtp.iwarp.rdmap import RdmapOpcode, ReadRequest
from kbtp.types import RequestFlag, Status
from kbtp.wire import AllocStore, DataDescriptor, Load, Store

GROUP = Group("initiator-memory")

QUIET_S = 0.3


def next_read(side: InitiatorSide, what: str = "a Read Request of the target") -> ReadRequest:
    """The target's next message, which is a Read Request; it is left unanswered."""
    message = side.stream.message(what)
    if message is None or message.opcode is not RdmapOpcode.READ_REQUEST:
        raise Deviation(what, str(message))
    return ReadRequest.parse(message.payload)


def answer_read(side: InitiatorSide, request: ReadRequest) -> None:
    side.stream.respond_to_read(request, side.stream.memory.read(request))


def hold_read(probe: TargetProbe, side: InitiatorSide, why: str) -> None:
    """By hand: the target's next Read is answered only once nothing else has come."""
    if probe.by_hand:
        read = next_read(side)
        expect_nothing_more(side, why)
        answer_read(side, read)


def expect_nothing_more(side: InitiatorSide, why: str) -> None:
    side.stream.expect_silence(why, for_s=QUIET_S)


@GROUP.target("KD3")
def reads_name_the_descriptor(probe: TargetProbe) -> None:
    """RDMA Reads of a STORE stay within the descriptor: STag, Tagged Offset and Length are taken as given."""
    side = probe.session()
    side.bind(0, b"", sealed=False)
    lent = side.stream.memory.lend(pattern(1000), to=0xFFFF_0000_0000_0000, writable=False)
    for start, length in ((100, 700), (900, 100)):  # whoever reads beyond the second is refused
        lent.touched.clear()
        data = DataDescriptor(lent.stag, lent.to + start, length)
        side.expect_status(Store(side.request_id(), side.handle(0), 0, RequestFlag.NONE, data), Status.SUCCESS)
        within = all(at >= start and at + size <= start + length for at, size in lent.touched)
        expect(within, f"reads of {length} octets from {start} on", lent.touched)
        side.expect_contents(0, pattern(1000)[start : start + length], flags=RequestFlag.ALLOW_UNSEALED)


@GROUP.target("KD4", "KD7", needs=("invalidate",))
def invalidate(probe: TargetProbe) -> None:
    """With INVALIDATE every completion of a well-formed request, success or error, invalidates its STag."""
    side = probe.session()
    flags = RequestFlag.INVALIDATE
    handle, unbound = side.handle(0), side.handle(1)
    unsealed = flags | RequestFlag.ALLOW_UNSEALED
    attempts: list[tuple[Callable[[Lent], Load | Store | AllocStore], Status]] = [
        (lambda lent: side.alloc_store(handle, lent, flags=flags), Status.SUCCESS),
        (lambda lent: side.store(handle, lent, flags=flags), Status.SUCCESS),
        (lambda lent: side.load(handle, lent, flags=flags), Status.NOT_SEALED),
        (lambda lent: side.load(handle, lent, flags=unsealed), Status.SUCCESS),
        (lambda lent: side.load(unbound, lent, flags=flags), Status.NOT_BOUND),
        (lambda lent: side.load(side.nowhere, lent, flags=flags), Status.HANDLE_OUT_OF_RANGE),
        (lambda lent: side.load(handle, lent, flags=flags, generation=7777), Status.GENERATION_MISMATCH),
        (lambda lent: side.alloc_store(handle, lent, flags=flags), Status.ALREADY_BOUND),
        (lambda lent: Load(side.request_id(), handle, 0, unsealed, DataDescriptor(lent.stag, lent.to, 1)),
         Status.LENGTH_ERROR),
    ]  # fmt: skip
    if probe.by_hand:
        unknown = DataDescriptor(0x12345678, 0, 0)
        attempts.append((lambda _: Load(side.request_id(), unbound, 0, flags, unknown), Status.NOT_BOUND))
    for attempt, status in attempts:
        request = attempt(side.stream.memory.lend(pattern(100)))
        side.send(request)
        answer = side.answer(request)
        expect(answer.status is status, status.name, answer.status.name)
        expect(answer.invalidated_stag == request.data.stag, f"Send with Invalidate with {status.name}", answer.message)
    lent = side.stream.memory.lend(100)
    side.expect_status(side.load(handle, lent), Status.NOT_SEALED)
    expect(side.stream.messages[-1].opcode is RdmapOpcode.SEND, "a plain Send without INVALIDATE", "another")


@GROUP.target("KD8")
def initiator_refuses_the_stag(probe: TargetProbe) -> None:
    """A bad STag is no KBTP status: the initiator's Terminate ends the stream, and the target others serve on."""
    side, other = probe.session(), probe.session()
    side.bind(0, pattern(100))
    if not probe.by_hand:
        lent = side.stream.memory.lend(200)
        side.stream.memory.take_back(lent)
        side.send(side.load(side.handle(0), lent))
        side.stream.expect_end("an RDMA Write to memory that is not lent any more")
        other.goes_on()
        return
    side.send(Load(side.request_id(), side.handle(0), 0, RequestFlag.NONE, DataDescriptor(0xBAD0BAD0, 0, 200)))
    message = side.stream.message("the RDMA Write")
    if message is None or message.opcode is not RdmapOpcode.WRITE:
        raise Deviation("an RDMA Write to the STag as it was given", str(message))
    expect(message.stag == 0xBAD0BAD0, "the STag as it was given", hex(message.stag))
    side.stream.send_terminate(1, 1, 0)
    side.stream.expect_end("a Terminate of the initiator")
    other.goes_on()


@GROUP.target("KR7", "KD9")
def read_depth_is_kept(probe: TargetProbe) -> None:
    """No more RDMA Reads are outstanding than the initiator's IRD; further STOREs wait, and come to their turn."""
    for depth in (1, 3):
        side = probe.session(Startup.of_depth(depth, 1))
        side.need_quota(4)
        lent = [side.stream.memory.lend(pattern(64, seed)) for seed in range(4)]
        stores = [side.alloc_store(side.handle(index), one) for index, one in enumerate(lent)]
        side.send(*stores)
        if probe.by_hand:
            reads = [next_read(side) for _ in range(depth)]
            expect_nothing_more(side, f"{depth} RDMA Reads are outstanding, as many as IRD allows (RFC 5040 6.1)")
            for read in reads:
                answer_read(side, read)
        for store in stores:
            expect(side.answer(store).status is Status.SUCCESS, "SUCCESS", "another status")
        for index in range(4):
            side.expect_contents(index, pattern(64, index))


@GROUP.target("KR8", needs=("iwarp",))
def waiting_stores_hold_nothing_up(probe: TargetProbe) -> None:
    """While STOREs wait for the read depth, other requests are completed."""
    side = probe.session(Startup.of_depth(1, 1), requested_quota=5)
    side.need_quota(5)
    for index in (0, 1):
        side.bind(index, b"here")
    side.send(*(side.alloc_store(side.handle(index), side.stream.memory.lend(64)) for index in (2, 3, 4)))
    read = next_read(side)
    side.expect_contents(0, b"here")
    side.release(1)
    answer_read(side, read)
    for _ in range(3):
        expect(side.answer().status is Status.SUCCESS, "SUCCESS of each ALLOC_STORE", "another status")


@GROUP.target("KR9")
def no_read_depth_at_all(probe: TargetProbe) -> None:
    """With an IRD of 0, or MPA revision 1, stores without INLINE are UNSUPPORTED, found with the flags."""
    for startup in (Startup.of_depth(0, 0), Startup.plain())[: 2 if probe.by_hand else 1]:
        side = probe.session(startup)
        lent = side.stream.memory.lend(64)
        bound = side.bind(0, b"inline", sealed=False)
        for request in (
            side.alloc_store(side.handle(1), lent),
            side.alloc_store(side.handle(1), None),
            side.store(side.handle(0), lent),
            side.store(side.nowhere, lent, generation=7777),
        ):
            completion = side.expect_status(request, Status.UNSUPPORTED)
            expect(completion.generation == 0, "Generation 0", completion.generation)
        cut = side.store(side.handle(0), lent).pack()[:30]
        side.send(cut)
        status = side.answer().status
        expect(status is Status.UNSUPPORTED, "UNSUPPORTED before MALFORMED", status.name)
        completion = side.expect_status(side.store_inline(side.handle(0), b"more"), Status.SUCCESS)
        expect(completion.generation == bound.generation, "the block as it was", completion.generation)


@GROUP.target(
    "KR10",
    needs=(
        "iwarp",
        "short-waits",
    ),
    timeout_s=40.0,
)
def read_that_nobody_answers(probe: TargetProbe) -> None:
    """An RDMA Read that the initiator does not answer within the drain time ends its stream; the block is as it was."""
    other = probe.session()
    side = probe.session()
    side.send(side.alloc_store(side.handle(0), side.stream.memory.lend(64)))
    next_read(side)
    side.stream.expect_end("a Read that nobody answers (profile 8.8)", within_s=probe.wait_s(probe.setup.drain_s))
    other.goes_on()


@GROUP.target("KR5", needs=("iwarp",), alone=True)
def response_that_ends_too_early(probe: TargetProbe) -> None:
    """A Read Response shorter than asked never becomes a stored block."""
    other = probe.session()
    side = probe.session()
    handle = side.handle(0)
    side.send(side.alloc_store(handle, side.stream.memory.lend(64)))
    read = next_read(side)
    side.stream.respond_to_read(read, bytes(32))
    side.stream.expect_end("a Read Response of 32 octets for 64 (RFC 5040 4.4)")
    status = other.call(other.load(handle, other.stream.memory.lend(64), flags=RequestFlag.ALLOW_UNSEALED)).status
    expect(status in (Status.NOT_BOUND, Status.HANDLE_OUT_OF_RANGE), "nothing bound", status.name)


@GROUP.target("KD10")
def zero_octets_post_nothing(probe: TargetProbe) -> None:
    """A STORE of no octets posts no RDMA Read, whatever its STag, and INVALIDATE uses the STag as given."""
    side = probe.session()
    side.bind(0, b"full", sealed=False)
    data = DataDescriptor(0xDEADBEEF, 0x55, 0)
    flags = RequestFlag.INVALIDATE if probe.by_hand else RequestFlag.NONE
    store = Store(side.request_id(), side.handle(0), 0, flags, data)
    side.send(store)
    answer = side.answer(store)
    expect(answer.status is Status.SUCCESS, "SUCCESS", answer.status.name)
    if probe.by_hand:
        expect(answer.invalidated_stag == 0xDEADBEEF, "Send with Invalidate of the STag as given", answer.message)
    reads = list(side.stream.messages_of(RdmapOpcode.READ_REQUEST))
    expect(not reads, "no RDMA Read", reads)
    side.expect_contents(0, b"", flags=RequestFlag.ALLOW_UNSEALED)


@GROUP.target("KD11")
def inline_needs_no_memory(probe: TargetProbe) -> None:
    """With INLINE nothing is read from the initiator, whatever STag and Tagged Offset say."""
    side = probe.session()
    octets = patched(side.alloc_store_inline(side.handle(0), b"inline").pack(), 24, b"\xff" * 12)
    side.send(octets)
    expect(side.answer().status is Status.SUCCESS, "SUCCESS", "another status")
    reads = list(side.stream.messages_of(RdmapOpcode.READ_REQUEST))
    expect(not reads, "no RDMA Read", reads)
    side.expect_contents(0, b"inline", flags=RequestFlag.ALLOW_UNSEALED)
