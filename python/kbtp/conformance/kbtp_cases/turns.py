"""Who waits for whom: requests on one handle, and on several (profile 3 "Same handle, same session")."""

from __future__ import annotations

from itertools import pairwise

from kbtp.conformance.case import Group
from kbtp.conformance.deviation import expect
from kbtp.conformance.initiator_side import Request
from kbtp.conformance.kbtp_cases.blocks import pattern
from kbtp.conformance.kbtp_cases.rdma import answer_read, expect_nothing_more, hold_read, next_read
from kbtp.conformance.probe import TargetProbe
from kbtp.types import RequestFlag, Status

GROUP = Group("turns")


@GROUP.target("KW1", "KW2")
def everything_waits_for_a_store(probe: TargetProbe) -> None:
    """While a STORE reads its data, later requests on its handle wait; then each sees what the ones before it did."""
    side = probe.session()
    side.bind(0, b"old", sealed=False)
    handle, new, lent = side.handle(0), pattern(64), side.stream.memory.lend(64)
    store = side.store(handle, side.stream.memory.lend(new), flags=RequestFlag.SEAL)
    load = side.load(handle, lent)
    refused = side.store_inline(handle, b"late")
    free = side.free(handle)
    again = side.alloc_store_inline(handle, b"again")
    side.send(store, load, refused, free, again)
    hold_read(probe, side, "four requests wait for a STORE on their handle")
    for request, status in (
        (store, Status.SUCCESS),
        (load, Status.SUCCESS),
        (refused, Status.SEALED),
        (free, Status.SUCCESS),
        (again, Status.SUCCESS),
    ):
        came = side.answer(request).status
        expect(came is status, f"{status.name} for {type(request).__name__}", came.name)
    expect(bytes(lent.octets) == new, "what the STORE stored", lent.octets.hex())
    side.expect_contents(0, b"again")


@GROUP.target("KW1")
def an_alloc_store_is_waited_for(probe: TargetProbe) -> None:
    """A LOAD and a FREE behind an ALLOC_STORE of their handle find it bound."""
    side = probe.session()
    handle, lent = side.handle(0), side.stream.memory.lend(64)
    store = side.alloc_store(handle, side.stream.memory.lend(pattern(64)))
    load, free = side.load(handle, lent), side.free(handle)
    side.send(store, load, free)
    hold_read(probe, side, "LOAD and FREE wait for the ALLOC_STORE")
    for request in (store, load, free):
        expect(side.answer(request).status is Status.SUCCESS, "SUCCESS", f"another status of {type(request).__name__}")
    expect(bytes(lent.octets) == pattern(64), "what was stored", lent.octets.hex())


@GROUP.target("KW3", needs=("iwarp",))
def other_handles_do_not_wait(probe: TargetProbe) -> None:
    """A STORE that waits for its data holds up no request on another handle, and is not complete before it has it."""
    side = probe.session()
    side.need_quota(4)
    for index in (0, 1):
        side.bind(index, b"here")
    store = side.alloc_store(side.handle(2), side.stream.memory.lend(64))
    side.send(store)
    read = next_read(side)
    side.expect_contents(0, b"here")
    side.release(1)
    side.bind(3, b"three")
    side.expect_outstanding(store)
    answer_read(side, read)
    expect(side.answer(store).status is Status.SUCCESS, "SUCCESS", "another status")


@GROUP.target("KW6", needs=("iwarp",))
def a_free_behind_a_load_does_not_wait_either(probe: TargetProbe) -> None:
    """A FREE of a block that was loaded, all of it, is not held up by a STORE on another handle that reads its data."""
    side = probe.session()
    side.need_quota(2)
    side.bind(0, b"here")
    side.send(side.alloc_store(side.handle(1), side.stream.memory.lend(64)))
    read = next_read(side)
    side.expect_contents(0, b"here")
    free = side.free(side.handle(0))
    side.send(free)
    status = side.answer(free, within_s=1.0).status
    expect(status is Status.SUCCESS, "SUCCESS", status.name)
    answer_read(side, read)


@GROUP.target("KW4", "KC5")
def many_at_once(probe: TargetProbe) -> None:
    """As many requests as there are credits, in one TCP segment, on one handle: each is completed once, in its turn."""
    side = probe.session()
    handle, count = side.handle(0), side.ack.request_credits
    requests: list[Request] = []
    for index in range(count):
        even = index % 2 == 0
        requests.append(side.alloc_store_inline(handle, pattern(50, index)) if even else side.free(handle))
    side.send(*requests)
    generations = []
    for request in requests:
        answer = side.answer(request)
        expect(answer.status is Status.SUCCESS, "SUCCESS of each in its turn", answer.status.name)
        generations.append(answer.completion.generation)
    steps = {(following - one) % 0xFFFF for one, following in pairwise(generations)}
    expect(steps <= {1}, "Generations that rise by one", generations)
    expect_nothing_more(side, "every request has its one completion (profile 3)")


@GROUP.target("KW5")
def loads_of_one_handle_together(probe: TargetProbe) -> None:
    """LOADs of one handle at once each bring the whole block."""
    side = probe.session()
    size = min(side.ack.block_size, 50_000)
    octets = pattern(size)
    side.bind(0, octets)
    lent = [side.stream.memory.lend(size) for _ in range(4)]
    loads = [side.load(side.handle(0), one) for one in lent]
    side.send(*loads)
    for load, one in zip(loads, lent, strict=True):
        expect(side.answer(load).status is Status.SUCCESS, "SUCCESS", "another status")
        expect(bytes(one.octets) == octets, "the whole block", "other octets")
