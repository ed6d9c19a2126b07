"""Which status a request gets, and which first where several would fit (profile 1, draft 5.1, profile 8.3 and 8.6)."""

from __future__ import annotations

from collections.abc import Sequence

from kbtp.conformance.case import Group
from kbtp.conformance.deviation import expect
from kbtp.conformance.initiator_side import InitiatorSide
from kbtp.conformance.kbtp_cases.hello import patched
from kbtp.conformance.probe import TargetProbe
from kbtp.types import RequestFlag, Status
from kbtp.wire import Completion, DataDescriptor, HelloAck, Load

GROUP = Group("order-of-checks")

VERSION, OPCODE, FLAGS, GENERATION = 0, 1, 2, 20
Faulty = Sequence[tuple[str, bytes, Status]]


def expect_each(side: InitiatorSide, faulty: Faulty) -> None:
    """Each message gets the status beside it, and nothing of the entry where the status must not tell."""
    for what, octets, status in faulty:
        side.send(octets)
        completion = side.answer().completion
        expect(completion.status is status, f"{status.name} for {what}", completion.status.name)
        expect(completion.request_id == int.from_bytes(octets[4:12], "big"), "the Request ID echoed", what)
        expect(completion.handle == int.from_bytes(octets[12:20], "big"), "the Handle echoed", what)
        check_told(completion, what)
    side.goes_on()


def check_told(completion: Completion, what: str) -> None:
    """What a refusal may tell (profile 2 COMPLETION)."""
    silent = (Status.UNSUPPORTED, Status.MALFORMED, Status.NO_SESSION, Status.HANDLE_OUT_OF_RANGE)
    if completion.status in silent:
        expect(
            completion.generation == 0, f"Generation 0 with {completion.status.name} ({what})", completion.generation
        )
    elif completion.status is not Status.SUCCESS:
        expect(completion.generation != 0, f"the entry's Generation ({what})", 0)
    if completion.status is not Status.SUCCESS:
        expect(completion.block_offset == 0, f"Block Offset 0 with an error ({what})", completion.block_offset)


def world(probe: TargetProbe) -> tuple[InitiatorSide, int, int, int, int, int]:
    """A session with a sealed, an unsealed and an unbound handle, and what their generations are; 300 octets each."""
    side = probe.session()
    sealed = side.bind(0, b"s" * 300)
    side.bind(1, b"u" * 300, sealed=False)
    return side, side.handle(0), side.handle(1), side.handle(2), side.nowhere, sealed.generation


def wrong(generation: int) -> int:
    return generation % 0xFFFF + 1


@GROUP.target("KO2", "KS1", "KS2", "KS5", "KS7", "KS11", "KS12")
def load_in_order(probe: TargetProbe) -> None:
    """LOAD: UNSUPPORTED, MALFORMED, HANDLE_OUT_OF_RANGE, NOT_BOUND, GENERATION_MISMATCH, NOT_SEALED, LENGTH_ERROR."""
    side, sealed, unsealed, unbound, out, generation = world(probe)
    short = DataDescriptor(1, 0, 299)

    def load(handle: int, bad_generation: int = 0) -> bytes:
        return Load(side.request_id(), handle, bad_generation, RequestFlag.NONE, short).pack()

    bad = wrong(generation)
    expect_each(
        side,
        [
            (
                "version 2, and a flag of no LOAD",
                patched(load(out, bad), VERSION, b"\x02\x03\x00\x01"),
                Status.UNSUPPORTED,
            ),
            ("flag SEAL, cut", patched(load(out, bad), FLAGS, b"\x00\x02")[:39], Status.UNSUPPORTED),
            ("flag INLINE, cut", patched(load(out, bad), FLAGS, b"\x00\x01")[:39], Status.UNSUPPORTED),
            ("a flag nobody knows", patched(load(sealed), FLAGS, b"\x80\x00"), Status.UNSUPPORTED),
            ("39 octets, out of range", load(out, bad)[:39], Status.MALFORMED),
            ("24 octets, out of range", load(out, bad)[:24], Status.MALFORMED),
            ("41 octets, out of range", load(out, bad) + b"?", Status.MALFORMED),
            ("out of range, wrong generation", load(out, bad), Status.HANDLE_OUT_OF_RANGE),
            ("unbound, wrong generation", load(unbound, 7777), Status.NOT_BOUND),
            ("wrong generation, short buffer", load(sealed, bad), Status.GENERATION_MISMATCH),
            ("wrong generation, unsealed", load(unsealed, 7777), Status.GENERATION_MISMATCH),
            ("unsealed, short buffer", load(unsealed), Status.NOT_SEALED),
            ("short buffer", load(sealed, generation), Status.LENGTH_ERROR),
        ],
    )


@GROUP.target("KO3", "KS1", "KS3", "KS5", "KS7", "KS11", "KS12")
def store_in_order(probe: TargetProbe) -> None:
    """STORE: UNSUPPORTED, MALFORMED, HANDLE_OUT_OF_RANGE, NOT_BOUND, GENERATION_MISMATCH, SEALED, LENGTH_ERROR."""
    side, sealed, unsealed, unbound, out, generation = world(probe)
    too_long = DataDescriptor(1, 0, side.ack.block_size + 1)

    def store(handle: int, bad_generation: int = 0) -> bytes:
        octets = side.store(handle, None, generation=bad_generation).pack()
        return patched(octets, 24, too_long.pack())

    inline = side.store_inline(unsealed, b"inline data").pack()
    bad = wrong(generation)
    expect_each(
        side,
        [
            ("version 0, cut", patched(store(out), VERSION, b"\x00")[:39], Status.UNSUPPORTED),
            ("flag ALLOW_UNSEALED, cut", patched(store(out), FLAGS, b"\x00\x10")[:39], Status.UNSUPPORTED),
            ("39 octets, out of range", store(out)[:39], Status.MALFORMED),
            ("octets behind, without INLINE", store(out) + b"?", Status.MALFORMED),
            ("out of range, wrong generation, too long", store(out, bad), Status.HANDLE_OUT_OF_RANGE),
            ("unbound, wrong generation", store(unbound, 7777), Status.NOT_BOUND),
            ("wrong generation, sealed", store(sealed, bad), Status.GENERATION_MISMATCH),
            ("sealed, too long", store(sealed, generation), Status.SEALED),
            ("too long", store(unsealed), Status.LENGTH_ERROR),
            ("inline, Length one less", patched(inline, 36, b"\x00\x00\x00\x0a"), Status.LENGTH_ERROR),
            ("inline, Length one more", patched(inline, 36, b"\x00\x00\x00\x0c"), Status.LENGTH_ERROR),
            ("inline, sealed, Length wrong", patched(patched(inline, 12, sealed.to_bytes(8, "big")), 36, b"\x00" * 4),
             Status.SEALED),
        ],
    )  # fmt: skip
    side.expect_contents(1, b"u" * 300, flags=RequestFlag.ALLOW_UNSEALED)


@GROUP.target("KO4", "KS4", "KS5", "KS7", "KS8", "KQ1")
def alloc_store_in_order(probe: TargetProbe) -> None:
    """ALLOC_STORE: UNSUPPORTED, MALFORMED, OUT_OF_RANGE, ALREADY_BOUND, GENERATION_MISMATCH, LENGTH_ERROR, NO_SPACE."""
    side = probe.session(requested_quota=1)
    if side.ack.allocation_quota != 1:
        probe.need(False, "the target grants more quota than was asked for")
    generation = side.bind(0, b"the only block").generation
    bound, unbound, out = side.handle(0), side.handle(1), side.nowhere
    too_long = DataDescriptor(1, 0, side.ack.block_size + 1)

    def alloc_store(handle: int, bad_generation: int = 0) -> bytes:
        return patched(side.alloc_store(handle, None, generation=bad_generation).pack(), 24, too_long.pack())

    inline = side.alloc_store_inline(unbound, b"inline data").pack()
    expect_each(
        side,
        [
            ("flag ALLOW_UNSEALED, cut", patched(alloc_store(out), FLAGS, b"\x00\x10")[:39], Status.UNSUPPORTED),
            ("39 octets, out of range", alloc_store(out)[:39], Status.MALFORMED),
            ("out of range, wrong generation", alloc_store(out, 7777), Status.HANDLE_OUT_OF_RANGE),
            ("bound, wrong generation", alloc_store(bound, wrong(generation)), Status.ALREADY_BOUND),
            ("wrong generation, too long", alloc_store(unbound, 7777), Status.GENERATION_MISMATCH),
            ("too long, quota reached", alloc_store(unbound), Status.LENGTH_ERROR),
            ("inline, Length wrong, quota reached", patched(inline, 36, b"\x00" * 4), Status.LENGTH_ERROR),
            ("quota reached", inline, Status.NO_SPACE),
        ],
    )
    side.expect_contents(0, b"the only block")


@GROUP.target("KO5", "KS1", "KS5", "KS11", "KS12")
def free_in_order(probe: TargetProbe) -> None:
    """FREE: UNSUPPORTED, MALFORMED, HANDLE_OUT_OF_RANGE, NOT_BOUND, GENERATION_MISMATCH."""
    side, sealed, _, unbound, out, generation = world(probe)

    def free(handle: int, bad_generation: int = 0) -> bytes:
        return side.free(handle, generation=bad_generation).pack()

    expect_each(
        side,
        [
            ("flag SEAL, too long", patched(free(out), FLAGS, b"\x00\x02") + b"?", Status.UNSUPPORTED),
            ("flag INVALIDATE", patched(free(sealed), FLAGS, b"\x00\x08"), Status.UNSUPPORTED),
            ("25 octets, out of range", free(out) + b"?", Status.MALFORMED),
            ("out of range, wrong generation", free(out, 7777), Status.HANDLE_OUT_OF_RANGE),
            ("unbound, wrong generation", free(unbound, 7777), Status.NOT_BOUND),
            ("wrong generation", free(sealed, wrong(generation)), Status.GENERATION_MISMATCH),
        ],
    )
    side.expect_contents(0, b"s" * 300)


@GROUP.target("KO6", "KS12")
def opcodes_that_no_initiator_sends(probe: TargetProbe) -> None:
    """HELLO_ACK, COMPLETION, BIND without DIRECT_ALLOC and opcodes nobody knows are UNSUPPORTED; the stream stays."""
    side, sealed, *_ = world(probe)
    free = side.free(sealed).pack()
    faulty: list[tuple[str, bytes, Status]] = [
        (f"opcode {opcode}", patched(free, OPCODE, bytes([opcode])), Status.UNSUPPORTED)
        for opcode in (0, 2, 7, 8, 9, 255)
    ]
    faulty.append(("a whole HELLO_ACK", HelloAck(5, request_credits=1, max_message=1024).pack(), Status.UNSUPPORTED))
    faulty.append(("a whole COMPLETION", Completion(6, sealed, 0, Status.SUCCESS).pack(), Status.UNSUPPORTED))
    bind = patched(free, OPCODE, b"\x07") + bytes(16)
    faulty.append(("a whole BIND", bind, Status.UNSUPPORTED))
    expect_each(side, faulty)


@GROUP.target("KO7")
def status_in_a_request_is_ignored(probe: TargetProbe) -> None:
    """Status in a request, and STag and Tagged Offset with INLINE, are not looked at."""
    side = probe.session()
    octets = side.alloc_store_inline(side.handle(0), b"data").pack()
    octets = patched(patched(octets, 22, b"\xff\xff"), 24, b"\xab" * 12)
    side.send(octets)
    status = side.answer().status
    expect(status is Status.SUCCESS, "SUCCESS", status.name)
    side.expect_contents(0, b"data")


@GROUP.target("KO8")
def length_error_tells_the_length(probe: TargetProbe) -> None:
    """LENGTH_ERROR of a LOAD carries the entry's Data Length, no Block Offset, and touches no octet of the buffer."""
    side = probe.session()
    side.bind(0, b"0123456789")
    for size in (0, 1, 9):
        lent = side.stream.memory.lend(size) if size else None
        completion = side.expect_status(side.load(side.handle(0), lent), Status.LENGTH_ERROR)
        told = (completion.data_length, completion.block_offset)
        expect(told == (10, 0), "Data Length 10 and Block Offset 0", told)
        expect(lent is None or lent.unwritten, "that nothing is written", lent and lent.touched)
    too_long = side.store_inline(side.handle(1), b"x").pack()
    side.send(patched(too_long, 36, bytes(4)))
    side.answer()


@GROUP.target("KO9", "KD6")
def invalidate_with_what_it_does_not_go_with(probe: TargetProbe) -> None:
    """INVALIDATE with INLINE is UNSUPPORTED, and the completions of UNSUPPORTED and MALFORMED invalidate nothing."""
    side = probe.session()
    lent = side.stream.memory.lend(64)
    load = side.load(side.first, lent, flags=RequestFlag.INVALIDATE).pack()
    inline = patched(side.alloc_store_inline(side.handle(0), b"x").pack(), FLAGS, b"\x00\x09")
    for what, octets, status in (
        ("INVALIDATE with INLINE", inline, Status.UNSUPPORTED),
        ("INVALIDATE, version 3", patched(load, VERSION, b"\x03"), Status.UNSUPPORTED),
        ("INVALIDATE, one octet more", load + b"?", Status.MALFORMED),
        ("INVALIDATE, one octet less", load[:-1], Status.MALFORMED),
    ):
        side.send(octets)
        answer = side.answer()
        expect(answer.status is status, f"{status.name} for {what}", answer.status.name)
        expect(answer.invalidated_stag is None, f"a plain Send for {what}", answer.message)
