"""Credits and sizes of messages (profile 3 "Credits", "Inline data", 8.5)."""

from __future__ import annotations

from kbtp.conformance.case import Group
from kbtp.conformance.deviation import expect
from kbtp.conformance.kbtp_cases.blocks import pattern
from kbtp.conformance.kbtp_cases.rdma import next_read
from kbtp.conformance.probe import TargetProbe
from kbtp.conformance.startup import Startup
from kbtp.types import RequestFlag, Status, TerminateCause

GROUP = Group("credits")


@GROUP.target("KC6", "KC7", needs=("iwarp",))
def one_request_too_many(probe: TargetProbe) -> None:
    """An initiator with more than Request Credits outstanding ends its own stream, with 1/2/02, and nobody else's."""
    other = probe.session()
    side = probe.session(Startup.of_depth(1, 1), completion_credits=2)
    credits = side.ack.request_credits
    lent = side.stream.memory.lend(64)
    side.send(*(side.alloc_store(side.handle(0), lent) for _ in range(credits)))
    next_read(side)
    side.send(side.free(side.handle(0)), beyond_credits=True)
    side.stream.expect_terminate(TerminateCause.DDP_NO_BUFFER, TerminateCause.DDP_MSN_OUT_OF_RANGE)
    other.goes_on()


@GROUP.target("KC5", "KC8")
def a_credit_is_there_when_its_completion_is(probe: TargetProbe) -> None:
    """A request may be sent as soon as a completion has come, again and again, with one credit and with all."""
    for credits in (1, 4):
        side = probe.session(completion_credits=credits)
        loads = [side.load(side.first, None) for _ in range(side.ack.request_credits)]
        side.send(*loads)
        for _ in range(40):
            side.answer()
            side.send(side.load(side.first, None))
        side.stream.finish()


@GROUP.target("KC9")
def completions_never_exceed_the_buffers(probe: TargetProbe) -> None:
    """With every Request Credit in use no more completions come than the initiator has Completion Credits."""
    for credits in (1, 2, 5):
        side = probe.session(completion_credits=credits)
        granted = side.ack.request_credits
        expect(granted <= credits, f"at most {credits} Request Credits, as many as Completion Credits", granted)
        for _ in range(3):
            loads = [side.load(side.first, None) for _ in range(granted)]
            side.send(*loads)
            for load in loads:
                status = side.answer(load).status
                expect(status is Status.NOT_BOUND, "NOT_BOUND", status.name)
            side.stream.expect_silence("each request has its one completion", for_s=0.1)


@GROUP.target("KC10", "KV14")
def longest_message(probe: TargetProbe) -> None:
    """A message of Max Message octets is served, one of an octet more ends the stream with 1/2/05."""
    side = probe.session()
    size = side.ack.max_message - 40
    probe.need(side.ack.block_size >= size, "blocks that take the longest inline data")
    octets = pattern(size)
    side.expect_status(side.alloc_store_inline(side.handle(0), octets), Status.SUCCESS)
    side.expect_contents(0, octets)
    side.send(side.alloc_store_inline(side.handle(1), octets + b"?"))
    side.stream.expect_terminate(TerminateCause.DDP_MESSAGE_TOO_LONG)


@GROUP.target("KC11")
def same_request_id_twice_in_a_row(probe: TargetProbe) -> None:
    """Request IDs are unique only among those outstanding: one that was completed may be used again."""
    side = probe.session()
    load = side.load(side.first, None)
    for _ in range(3):
        expect(side.call(load).request_id == load.request_id, "the Request ID echoed", "another one")


@GROUP.target("KC12")
def completions_in_any_order(probe: TargetProbe) -> None:
    """Requests on several handles, with reads answered in turn, are each completed once."""
    side = probe.session()
    side.need_quota(3)
    lent = [side.stream.memory.lend(pattern(200, seed)) for seed in range(3)]
    stores = [side.alloc_store(side.handle(index), one) for index, one in enumerate(lent)]
    loads = [side.load(side.handle(7), None, flags=RequestFlag.ALLOW_UNSEALED) for _ in range(3)]
    side.send(stores[0], loads[0], stores[1], loads[1], stores[2], loads[2])
    for load in loads:
        expect(side.answer(load).status is Status.NOT_BOUND, "NOT_BOUND", "another status")
    for store in stores:
        expect(side.answer(store).status is Status.SUCCESS, "SUCCESS", "another status")
