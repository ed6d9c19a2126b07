"""What an initiator's requests look like, and what it does with what comes back (draft 5 and 6, profile 2, 3 and 6)."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from kbtp.conformance.case import Group
from kbtp.conformance.deviation import Deviation, expect
from kbtp.conformance.kbtp_cases.initiator_hello import expect_given_up
from kbtp.conformance.probe import InitiatorProbe
from kbtp.conformance.startup import Startup
from kbtp.conformance.target_side import (
    BLOCK_BYTES,
    POOL_BASE,
    Request,
    TargetSide,
    is_not_inline,
    needs_a_read,
)
from kbtp.iwarp.rdmap import RdmapOpcode
from kbtp.types import RequestFlag, Status, TerminateCause
from kbtp.wire import AllocStore, Completion, Free, HelloAck, Load, Store

GROUP = Group("initiator-requests")


def expect_success(probe: InitiatorProbe, side: TargetSide) -> None:
    """The rest of the work goes well."""
    side.serve()
    side.stream.close()
    expect(probe.work_succeeded(), "that all of its work succeeds", "that some did not")


def expect_told(probe: InitiatorProbe, side: TargetSide, why: str) -> None:
    """All else goes well, on this stream or another one; yet the initiator tells its caller of this."""
    side.serve()
    side.stream.close()
    probe.refuse_further()
    expect(not probe.work_succeeded(), f"an error: {why}", "that all of its work succeeds")


def expect_error(probe: InitiatorProbe, side: TargetSide, why: str) -> None:
    """We close; the initiator tells its caller of the work that was not done."""
    side.stream.finish()
    while side.stream.message(f"the end of the stream: {why}") is not None:
        continue
    probe.refuse_further()
    expect(not probe.work_succeeded(), f"an error: {why}", "that all of its work succeeds")


@GROUP.initiator("KNR1", "KNR2", "KNR3", needs=("one-by-one",))
def whole_workload(probe: InitiatorProbe) -> None:
    """All of the work succeeds against an honest target, and each request keeps to the rules."""
    side = probe.session()
    opcodes = set()
    ids: set[int] = set()
    while (request := side.request_or_end()) is not None:
        check_request(side, request)
        opcodes.add(type(request).__name__)
        expect(request.request_id not in ids, "a Request ID that is not outstanding", hex(request.request_id))
        side.serve_one(request)
    expect(opcodes >= {"Load", "Store", "AllocStore", "Free"}, "LOAD, STORE, ALLOC_STORE and FREE", opcodes)
    expect(probe.work_succeeded(), "that all of its work succeeds", "that some did not")


def check_request(side: TargetSide, request: Request) -> None:
    """What holds for each request, whatever it asks."""
    payload = side.stream.messages[-1].payload
    first, count = side.ack.first_handle, side.ack.handle_count
    expect(len(payload) <= side.ack.max_message, "no more octets than Max Message", len(payload))
    expect(payload[22:24] == bytes(2), "Status 0 in a request (draft 5.1)", payload[22:24].hex())
    expect(not request.flags & RequestFlag.RECORD, "no RECORD, which was not granted (draft 6.5)", request.flags)
    if not isinstance(request, Load):
        expect(request.handle - first < count, "a handle of its own range", request.handle)
    if isinstance(request, Store | AllocStore):
        expect(request.data.length <= side.ack.block_size, "no more than Block Size", request.data.length)
        if request.flags & RequestFlag.INLINE:
            expect(
                payload[24:36] == bytes(12), "STag and Tagged Offset 0 with INLINE (draft 5.2)", payload[24:36].hex()
            )
            expect(request.data.length == len(request.inline_data), "Length of the inline data", request.data.length)


@GROUP.initiator("KNR4", needs=("one-by-one",))
def inline_no_longer_than_max_message(probe: InitiatorProbe) -> None:
    """With Max Message 1024 no message is longer, and what does not fit inline is read from memory."""
    side = probe.session(max_message=1024)
    while (request := side.request_or_end()) is not None:
        check_request(side, request)
        side.serve_one(request)
    expect(probe.work_succeeded(), "that all of its work succeeds", "that some did not")


@GROUP.initiator("KNR5", needs=("one-by-one",))
def one_credit(probe: InitiatorProbe) -> None:
    """With one Request Credit there is never a second request before the completion of the first."""
    side = probe.session(request_credits=1)
    loads = 0
    while (request := side.request_or_end()) is not None:
        if isinstance(request, Load):
            loads += 1
            if loads in (1, 5):
                side.stream.expect_silence("one request is outstanding, as many as there are credits", for_s=0.2)
        side.serve_one(request)
    expect(probe.work_succeeded(), "that all of its work succeeds", "that some did not")


@GROUP.initiator("KNR5", "KNR3")
def three_credits(probe: InitiatorProbe) -> None:
    """With three Request Credits eight loads at once are at most three, with different Request IDs."""
    side = _session_of(probe, 3)
    requests = _loads_at_once(side, 3)
    side.stream.expect_silence("three requests are outstanding, as many as there are credits", for_s=0.3)
    ids = {request.request_id for request in requests}
    expect(len(ids) == len(requests), "Request IDs that are unique among those outstanding", ids)


def _session_of(probe: InitiatorProbe, credits: int) -> TargetSide:
    """A session with so many Request Credits, which are no more than the initiator's Completion Credits (profile 2)."""
    side = probe.before_ack()
    offered = side.hello.completion_credits
    probe.need(offered >= credits, f"{credits} Completion Credits, its HELLO says {offered}")
    side.acknowledge(request_credits=credits)
    return side


def _loads_at_once(side: TargetSide, count: int) -> list[Any]:
    """Serve up to the loads at once; `count` of them, unanswered."""
    seen = 0

    def is_fifth(request: Request) -> bool:
        nonlocal seen
        seen += isinstance(request, Load)
        return seen == 5  # four LOADs come one by one before

    first = side.serve_until(is_fifth)
    return [first, *(side.request() for _ in range(count - 1))]


@GROUP.initiator("KNR6", needs=("one-by-one",))
def completions_in_any_order(probe: InitiatorProbe) -> None:
    """Completions need not come in the order of the requests."""
    side = _session_of(probe, 4)
    requests = _loads_at_once(side, 4)
    for request in reversed(requests):
        side.serve_one(request)
    expect_success(probe, side)


@GROUP.initiator("KNR7")
def buffers_may_be_read_and_written(probe: InitiatorProbe) -> None:
    """The descriptor of a store is readable to its last octet, that of a LOAD writable, while the request is out."""
    side = probe.session()
    store = _reading_store(side)
    octets = side.read(store.data)
    expect(len(octets) == store.data.length, "all octets of the descriptor", len(octets))
    for at in (0, store.data.length - 1):
        one = side.stream.read_response(side.stream.request_read(store.data.stag, store.data.to + at, 1))
        expect(one == octets[at : at + 1], "the same octet again", one.hex())


def _reading_store(side: TargetSide) -> Any:
    """The store of the long block, whose data the target reads."""
    return side.serve_until(needs_a_read)


@GROUP.initiator("KNR8", needs=("one-by-one",))
def load_longer_than_its_buffer(probe: InitiatorProbe) -> None:
    """A COMPLETION that says more octets were loaded than the buffer holds ends the stream."""
    side = probe.session()
    load = side.serve_until(Load)
    side.complete(load, data_length=load.data.length + 1, block_offset=POOL_BASE)
    expect_given_up(probe, side, "a LOAD of more octets than asked for")


@GROUP.initiator("KNR9")
def completion_of_nothing(probe: InitiatorProbe) -> None:
    """A COMPLETION with a Request ID that is not outstanding ends the stream."""
    side = probe.session()
    request = side.request()
    side.stream.send(Completion(request.request_id ^ 0x5555, request.handle, 2, Status.SUCCESS).pack())
    expect_given_up(probe, side, "a Request ID that is not outstanding")


@GROUP.initiator("KNR9")
def completion_twice(probe: InitiatorProbe) -> None:
    """A second COMPLETION of a request ends the stream, or at least completes nothing else."""
    side = probe.session()
    load = side.serve_until(Load)
    side.serve_one(load)
    side.stream.send(Completion(load.request_id, load.handle, 2, Status.SUCCESS, 100, POOL_BASE).pack())
    side.stream.expect_end("a COMPLETION of nothing that is outstanding")


@GROUP.initiator("KNR9")
def completion_of_another_handle(probe: InitiatorProbe) -> None:
    """A COMPLETION that names another handle than its request ends the stream."""
    side = probe.session()
    request = side.request()
    side.complete(request, handle=request.handle + 1, data_length=100, block_offset=POOL_BASE)
    expect_given_up(probe, side, "another handle")


MALFORMED_COMPLETIONS: dict[str, bytes] = {
    "rubbish": b"rubbish",
    "zeros": bytes(40),
    "short": Completion(1, 1, 2, Status.SUCCESS).pack()[:39],
    "long": Completion(1, 1, 2, Status.SUCCESS).pack() + b"?",
    "unknown-status": Completion(1, 1, 2, Status.SUCCESS).pack()[:22] + b"\x00\x63" + bytes(16),
    "version-2": b"\x02" + Completion(1, 1, 2, Status.SUCCESS).pack()[1:],
    "flags": Completion(1, 1, 2, Status.SUCCESS).pack()[:2] + b"\x00\x01" + bytes(36),
    "hello-ack": HelloAck(1, request_credits=1, max_message=1024).pack(),
    "empty": b"",
}


def _malformed(name: str) -> None:
    """One case for each entry of MALFORMED_COMPLETIONS."""

    def run(probe: InitiatorProbe) -> None:
        side = probe.session()
        request = side.request()
        octets = MALFORMED_COMPLETIONS[name]
        if len(octets) >= 24:
            octets = (
                octets[:4] + request.request_id.to_bytes(8, "big") + request.handle.to_bytes(8, "big") + octets[20:]
            )
        side.stream.send(octets)
        expect_given_up(probe, side, f"{name} instead of a COMPLETION")

    run.__name__ = f"malformed_completion_{name}"
    run.__doc__ = f"A message that is no COMPLETION ends the stream: {name.replace('-', ' ')}."
    GROUP.initiator("KNR10")(run)


for _name in MALFORMED_COMPLETIONS:
    _malformed(_name)


ERRORS = (
    Status.NOT_BOUND, Status.NOT_SEALED, Status.GENERATION_MISMATCH, Status.HANDLE_OUT_OF_RANGE, Status.LENGTH_ERROR,
    Status.MALFORMED, Status.UNSUPPORTED, Status.TARGET_ERROR,
)  # fmt: skip


def _comes_again(side: TargetSide, refused: Load) -> bool:
    """Whether it loads the block again into a buffer that is long enough, which tells nobody of an error, rightly."""
    again = side.serve(
        lambda request: (
            isinstance(request, Load) and request.handle == refused.handle and request.data.length > refused.data.length
        )
    )
    if again is None:
        return False
    side.serve_one(again)
    side.serve()
    return True


def _error(status: Status) -> None:
    """One case for each status that a LOAD can get."""

    def run(probe: InitiatorProbe) -> None:
        side = probe.session()
        load = side.serve_until(Load)
        length = load.data.length + 1 if status is Status.LENGTH_ERROR else 0
        side.write(load.data, side.table[load.handle].octets)
        generation = 0 if status in (Status.HANDLE_OUT_OF_RANGE, Status.MALFORMED, Status.UNSUPPORTED) else 9
        side.complete(load, status, generation=generation, data_length=length)
        if status is Status.LENGTH_ERROR and _comes_again(side, load):
            return
        expect_told(probe, side, f"a LOAD with {status.name}")

    run.__name__ = f"load_refused_with_{status.name.lower()}"
    run.__doc__ = f"A LOAD that is refused with {status.name} is not taken for one that succeeded."
    GROUP.initiator("KNR11", needs=("one-by-one",))(run)


for _status in ERRORS:
    _error(_status)


@GROUP.initiator("KNR11", needs=("one-by-one",))
def store_refused(probe: InitiatorProbe) -> None:
    """An ALLOC_STORE that is refused with NO_SPACE is not taken for one that succeeded."""
    side = probe.session()
    request = side.serve_until(AllocStore)
    side.status_of_next = Status.NO_SPACE
    side.serve_one(request)
    expect_told(probe, side, "an ALLOC_STORE with NO_SPACE")


@GROUP.initiator("KNR11", needs=("one-by-one",))
def free_refused(probe: InitiatorProbe) -> None:
    """A FREE that is refused with NOT_BOUND is not taken for one that succeeded."""
    side = probe.session()
    request = side.serve_until(Free)
    side.status_of_next = Status.NOT_BOUND
    side.serve_one(request)
    expect_told(probe, side, "a FREE with NOT_BOUND")


@GROUP.initiator("KNR12")
def write_past_the_buffer(probe: InitiatorProbe) -> None:
    """An RDMA Write of an octet more than a LOAD's buffer is refused with 1/1/01."""
    side = probe.session()
    load = side.serve_until(Load)
    side.write(load.data, bytes(load.data.length + 1))
    side.stream.expect_terminate(TerminateCause.DDP_BASE_OR_BOUNDS)


@GROUP.initiator("KNR13")
def write_after_the_completion(probe: InitiatorProbe) -> None:
    """Once its LOAD is completed, and the next request has come, a buffer is the caller's: a Write is refused."""
    side = probe.session()
    load = side.serve_until_invalidating()
    side.serve_one(load)
    side.request()
    side.write(load.data, b"x")
    side.stream.expect_terminate(TerminateCause.DDP_INVALID_STAG)


@GROUP.initiator("KNR14")
def completion_longer_than_its_buffers(probe: InitiatorProbe) -> None:
    """A message of an octet more than the initiator's Max Message is refused with 1/2/05."""
    side = probe.session()
    side.request()
    side.stream.send(bytes(side.hello.max_message + 1))
    side.stream.expect_terminate(TerminateCause.DDP_MESSAGE_TOO_LONG)


@GROUP.initiator("KNR15")
def a_buffer_for_each_completion(probe: InitiatorProbe) -> None:
    """There is a receive buffer for the completion of each request that is outstanding."""
    side = probe.session()
    credits = min(8, side.ack.request_credits)
    requests = _loads_at_once(side, credits)
    for request in requests:
        side.complete(request, Status.NOT_BOUND, generation=3)
    side.goes_on()


@GROUP.initiator("KNR16", needs=("one-by-one",))
def target_that_closes(probe: InitiatorProbe) -> None:
    """A connection that ends while a request is outstanding is an error, not a success."""
    side = probe.session()
    side.serve_until(Load)
    expect_error(probe, side, "the connection ended before the completion")


@GROUP.initiator("KNR16", needs=("one-by-one",))
def target_that_vanishes(probe: InitiatorProbe) -> None:
    """A connection that is reset while a request is outstanding is an error, not a success."""
    side = probe.session()
    side.serve_until(Load)
    side.stream.reset()
    probe.refuse_further()
    expect(not probe.work_succeeded(), "an error: the connection was reset", "that all of its work succeeds")


@GROUP.initiator("KNR17")
def terminate_of_the_target(probe: InitiatorProbe) -> None:
    """A Terminate ends the stream: nothing but the end of the connection follows."""
    side = probe.session()
    side.serve_until(Load)
    side.stream.send_terminate(0, 0, 0)
    side.stream.expect_close("after our Terminate (RFC 5040 5.4)")


@GROUP.initiator("KNR18", needs=("one-by-one",))
def reads_in_pieces(probe: InitiatorProbe) -> None:
    """A target may read a store's data in several RDMA Reads, and write a LOAD's in several Writes."""
    side = probe.session()
    store = _reading_store(side)
    octets = bytearray()
    for at in range(0, store.data.length, 30_000):
        size = min(30_000, store.data.length - at)
        request = side.stream.request_read(store.data.stag, store.data.to + at, size)
        octets += side.stream.read_response(request)
    side.bind_entry(store, bytes(octets))
    load = side.serve_until(lambda request: isinstance(request, Load) and request.handle == store.handle)
    for at in (50_000, 0):
        piece = bytes(octets[at : at + 50_000])
        side.stream.write(load.data.stag, load.data.to + at, piece)
    generation = side.table[store.handle].generation
    side.complete(load, generation=generation, data_length=len(octets), block_offset=POOL_BASE + BLOCK_BYTES)
    expect_success(probe, side)


@GROUP.initiator("KNR19", needs=("one-by-one",))
def target_without_invalidate(probe: InitiatorProbe) -> None:
    """A COMPLETION by a plain Send completes a request that asked for INVALIDATE all the same."""
    side = probe.session()
    side.invalidates = False
    expect_success(probe, side)


@GROUP.initiator("KNR20")
def invalidating_something_else(probe: InitiatorProbe) -> None:
    """A COMPLETION that invalidates an STag which no outstanding request names ends the stream."""
    side = probe.session()
    load = side.serve_until(Load)
    completion = Completion(load.request_id, load.handle, 2, Status.NOT_BOUND)
    side.stream.send(completion.pack(), opcode=RdmapOpcode.SEND_INVALIDATE, invalidate_stag=load.data.stag ^ 0x55AA)
    side.stream.expect_end("an STag that is not there (RFC 5040 5.3)")


@GROUP.initiator("KNR21")
def no_read_depth(probe: InitiatorProbe) -> None:
    """A target whose ORD is 0 never reads: a store without INLINE is then a request that it must refuse."""
    startup = replace(Startup.of_depth(16, 0), crc=probe.setup.crc)
    side = TargetSide(probe.stream(startup), probe.key).open()
    store = side.serve_until(is_not_inline)
    side.complete(store, Status.UNSUPPORTED, generation=0)
    side.goes_on()


@GROUP.initiator("KNR22", needs=("one-by-one",))
def wrong_octets(probe: InitiatorProbe) -> None:
    """The octets that a LOAD hands to its caller are those that were written, to the last one."""
    side = probe.session()
    load = side.serve_until(lambda request: isinstance(request, Load) and request.data.length > 1000)
    entry = side.table[load.handle]
    entry.octets = entry.octets[:-1] + bytes([entry.octets[-1] ^ 1])
    side.serve_one(load)
    side.serve()
    side.stream.close()
    try:
        succeeded = probe.work_succeeded()
    except Deviation as deviation:
        raise Deviation("a workload that compares what it loads", deviation.saw) from None
    expect(not succeeded, "that the changed octet is noticed", "that all of its work succeeds")
