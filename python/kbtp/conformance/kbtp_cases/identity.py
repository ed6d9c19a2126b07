"""Who owns what, for how long, and what others may do with it (profile 3, 8.4, 8.9)."""

from __future__ import annotations

import secrets
from typing import Any

from kbtp.conformance.case import Group
from kbtp.conformance.deviation import Deviation, expect
from kbtp.conformance.initiator_side import InitiatorSide
from kbtp.conformance.kbtp_cases.rdma import next_read
from kbtp.conformance.probe import TargetProbe
from kbtp.iwarp.rdmap import RdmapOpcode
from kbtp.types import HelloAckFlag, RequestFlag, Status
from kbtp.wire import HelloAck

GROUP = Group("identity")

LINGER_MAX_S = 60.0  # a longer linger time is not waited for


def fresh_id() -> bytes:
    return secrets.token_bytes(16)


def reopen(probe: TargetProbe, **hello: Any) -> InitiatorSide:
    """A session of an identity whose stream has just ended: until the target has noticed, it answers ACCESS_DENIED."""
    while True:
        side = probe.before_hello()
        ack = side.hello(**hello)
        if ack.status is Status.SUCCESS:
            return side
        if ack.status is not Status.ACCESS_DENIED or probe.deadline.passed:
            raise Deviation("a session for an identity whose stream has ended", ack.status.name)
        side.stream.expect_close("a refused HELLO ends the stream")  # which paces us too
        side.stream.close()


def resumed(ack: HelloAck) -> bool:
    return bool(ack.flags & HelloAckFlag.RESUMED)


@GROUP.target("KI1", "KI2", "KH4")
def resumed_gets_back_what_it_had(probe: TargetProbe) -> None:
    """Range, quota and blocks of an Initiator ID come back with RESUMED; the old range and quota win."""
    ident = fresh_id()
    first = probe.session(initiator_id=ident, requested_quota=2, requested_handles=3)
    expect(not resumed(first.ack), "no RESUMED for a new Initiator ID", first.ack.flags)
    generation = first.bind(0, b"kept beyond the stream").generation
    first.finish()
    again = reopen(probe, initiator_id=ident, requested_quota=4, requested_handles=8)
    expect(resumed(again.ack), "RESUMED", again.ack.flags)
    for name in ("first_handle", "handle_count", "allocation_quota", "incarnation"):
        expect(getattr(first.ack, name) == getattr(again.ack, name), f"the old {name}", getattr(again.ack, name))
    expect(again.ack.bound_blocks == 1, "Bound Blocks 1", again.ack.bound_blocks)
    again.expect_contents(0, b"kept beyond the stream")
    released = again.expect_status(again.free(again.handle(0), generation=generation), Status.SUCCESS)
    expect(released.generation == generation % 0xFFFF + 1, "the Generation goes on", released.generation)
    again.finish()


@GROUP.target("KI3")
def anonymous_blocks_end_with_the_stream(probe: TargetProbe) -> None:
    """An anonymous initiator's blocks are freed when its stream ends, and are its successor's to find nowhere."""
    other = probe.session()
    owner = probe.session()
    generation = owner.bind(0, b"soon gone").generation
    handle, lent = owner.handle(0), other.stream.memory.lend(64)
    other.fetch(handle, 64)
    owner.finish()
    while other.call(other.load(handle, lent, generation=generation)).status is Status.SUCCESS:
        if probe.deadline.passed:
            raise Deviation("the blocks of an anonymous initiator freed with its stream", "that they are still bound")


@GROUP.target("KI4", needs=("no-keys",))
def live_session_is_not_replaced(probe: TargetProbe) -> None:
    """Without keys a second session of a live identity is refused with ACCESS_DENIED, and the first one goes on."""
    ident = fresh_id()
    first = probe.session(initiator_id=ident)
    second = probe.before_hello()
    ack = second.hello(initiator_id=ident)
    expect(ack.status is Status.ACCESS_DENIED, "ACCESS_DENIED", ack.status.name)
    second.stream.expect_close("a refused HELLO ends the stream")
    first.goes_on()


@GROUP.target("KI5")
def anonymous_initiators_are_many(probe: TargetProbe) -> None:
    """Two anonymous sessions are two initiators."""
    one, other = probe.session(), probe.session()
    expect(one.first != other.first, "ranges of their own", one.first)


@GROUP.target("KI6", needs=("short-waits",), timeout_s=40.0)
def blocks_linger_and_go(probe: TargetProbe) -> None:
    """After the linger time the identity is gone: its blocks are freed and its next session is a new one."""
    linger_s, ident = probe.setup.linger_s, fresh_id()
    probe.need(linger_s <= LINGER_MAX_S, f"a linger time of at most {LINGER_MAX_S:g} s, --linger says {linger_s:g} s")
    owner = probe.session(initiator_id=ident)
    generation = owner.bind(0, b"lingers").generation
    handle = owner.handle(0)
    other = probe.session()
    owner.finish()
    other.fetch(handle, 64)
    other.stream.expect_silence("the blocks linger", for_s=probe.wait_s(linger_s))
    status = other.call(other.load(handle, other.stream.memory.lend(64), generation=generation)).status
    allowed = (Status.NOT_BOUND, Status.HANDLE_OUT_OF_RANGE, Status.GENERATION_MISMATCH)
    expect(status in allowed, "the blocks freed after the linger time", status.name)
    expect(not resumed(probe.session(initiator_id=ident).ack), "a new identity", "RESUMED")


@GROUP.target("KI7", "KS6")
def handles_of_others(probe: TargetProbe) -> None:
    """Every initiator of the domain may LOAD a handle; STORE, ALLOC_STORE and FREE are its owner's alone."""
    owner, other = probe.session(), probe.session()
    owner.bind(0, b"for all to read")
    handle, free_handle = owner.handle(0), owner.handle(1)
    expect(other.fetch(handle, 64) == b"for all to read", "the owner's octets", "other ones")
    for request in (
        other.store_inline(handle, b"x"),
        other.alloc_store_inline(free_handle, b"x"),
        other.alloc_store_inline(handle, b"x"),
        other.free(handle),
        other.free(free_handle),
    ):
        completion = other.expect_status(request, Status.HANDLE_OUT_OF_RANGE)
        expect(completion.generation == 0, "Generation 0: nothing of others is told", completion.generation)
    owner.expect_contents(0, b"for all to read")


@GROUP.target("KI8")
def ranges_end_where_they_say(probe: TargetProbe) -> None:
    """The handle before the range, the one behind it and those that wrap are out of range, the last one is not."""
    side = probe.session(requested_handles=2)
    first, count, mask = side.first, side.ack.handle_count, (1 << 64) - 1
    for handle in ((first - 1) & mask, (first + count) & mask, mask, (first + count + (1 << 63)) & mask):
        if handle - first < count:
            continue
        side.expect_status(side.alloc_store_inline(handle, b"x"), Status.HANDLE_OUT_OF_RANGE)
    last = side.ack.handle_count - 1
    side.bind(last, b"the last one")
    side.release(last)
    side.expect_status(side.load(mask, None), Status.HANDLE_OUT_OF_RANGE)


@GROUP.target("KI9", "KR5")
def end_of_stream_with_requests_outstanding(probe: TargetProbe) -> None:
    """A stream that ends while an ALLOC_STORE reads from the initiator leaves nothing bound; range and quota return."""
    ident, octets = fresh_id(), bytes(range(200))
    side = probe.session(initiator_id=ident, requested_quota=1)
    side.send(side.alloc_store(side.handle(0), side.stream.memory.lend(octets)))
    if probe.by_hand:
        next_read(side)
    side.stream.reset()
    again = reopen(probe, initiator_id=ident)
    if not probe.by_hand and again.ack.bound_blocks:  # it was done before the stream ended, and so all of it
        again.expect_contents(0, octets)
        again.release(0)
    else:
        expect(again.ack.bound_blocks == 0, "Bound Blocks 0: the ALLOC_STORE was not done", again.ack.bound_blocks)
    again.expect_status(again.load(again.handle(0), None), Status.NOT_BOUND)
    again.bind(0, b"the unit of quota is free")
    again.release(0)
    again.finish()


@GROUP.target("KI9", "KR6")
def end_of_stream_during_a_store(probe: TargetProbe) -> None:
    """A STORE that the end of the stream cuts short left the block as it was, or empty, and never sealed or mixed."""
    ident, old, new = fresh_id(), b"old" * 1000, b"new" * 1000
    side = probe.session(initiator_id=ident)
    side.bind(0, old, sealed=False)
    store = side.store(side.handle(0), side.stream.memory.lend(new), flags=RequestFlag.SEAL)
    side.send(store)
    if probe.by_hand:
        read = next_read(side)
        response = side.stream.ulpdus_of_tagged(RdmapOpcode.READ_RESPONSE, read.sink_stag, read.sink_to, new)
        side.stream.send_ulpdus(response[0])
    side.stream.reset()
    again = reopen(probe, initiator_id=ident)
    came = again.fetch(again.handle(0), 8192, flags=RequestFlag.ALLOW_UNSEALED)
    if not probe.by_hand and came == new:  # it was done before the stream ended, and so all of it
        again.expect_status(again.store_inline(again.handle(0), b"again"), Status.SEALED)
        again.release(0)
        again.finish()
        return
    expect(came in (old, b""), "the old octets or none", came[:32])
    again.expect_status(again.load(again.handle(0), None), Status.NOT_SEALED)
    again.expect_status(again.store_inline(again.handle(0), b"again"), Status.SUCCESS)
    again.expect_contents(0, b"again", flags=RequestFlag.ALLOW_UNSEALED)
    again.release(0)
    again.finish()


@GROUP.target("KI10")
def a_resumed_generation_is_respected(probe: TargetProbe) -> None:
    """Blocks that outlive their stream keep generation, length and seal."""
    ident = fresh_id()
    side = probe.session(initiator_id=ident)
    side.need_quota(2)
    sealed = side.bind(0, b"sealed")
    side.bind(1, b"open", sealed=False)
    side.finish()
    again = reopen(probe, initiator_id=ident)
    load = again.load(again.handle(0), again.stream.memory.lend(64), generation=sealed.generation)
    completion = again.expect_status(load, Status.SUCCESS)
    told = (completion.data_length, completion.block_offset)
    expect(told == (6, sealed.block_offset), "Data Length and Block Offset as before", told)
    again.expect_status(again.store_inline(again.handle(0), b"x"), Status.SEALED)
    again.expect_status(again.store_inline(again.handle(1), b"more"), Status.SUCCESS)
    for index in (0, 1):
        again.release(index)
    again.finish()
