"""How a session begins, or does not: profile 2, 3, 8.1 to 8.5."""

from __future__ import annotations

import struct
import sys
from collections.abc import Callable
from typing import Any

import pytest

from kbtp.target.actions import Abort, Disconnect, Terminate
from kbtp.types import Feature, HelloAckFlag, OptionType, RequestFlag, Status, TerminateCause
from kbtp.verbs.api import RdmaRead, RdmaWrite
from kbtp.wire import Auth

ALICE = bytes(range(1, 17))
BOB = bytes(range(17, 33))


def hello_octets(
    *,
    version: int = 1,
    flags: int = 0,
    credits: int = 8,
    max_message: int = 1024,
    quota: int = 0,
    options: bytes = b"",
    initiator_id: bytes = bytes(16),
) -> bytes:
    """HELLO by the table of profile 2, right or wrong."""
    header = struct.pack(">BBHQQHH", version, 1, flags, 7, 0, 0, 0)
    return header + struct.pack(">IIQII16s", 0, quota, 0, credits, max_message, initiator_id) + options


def option(kind: int, value: bytes) -> bytes:
    return struct.pack(">HH", kind, len(value)) + value + bytes(-len(value) % 4)


AUTH = option(OptionType.AUTH, bytes(36))
UNKNOWN = option(0x7FFF, b"")
FAULTS: list[tuple[str, Status, dict[str, Any]]] = [
    ("version", Status.UNSUPPORTED, {"version": 2}),
    ("flags", Status.UNSUPPORTED, {"flags": 1}),
    ("cut in the fixed part", Status.MALFORMED, {"cut": 63}),
    ("options run out", Status.MALFORMED, {"tail": struct.pack(">HH", 0x8000, 1)}),
    ("octets left over", Status.MALFORMED, {"tail": b"\x80\x00\x00"}),
    ("duplicate option", Status.MALFORMED, {"tail": option(0x8001, b"") * 2}),
    ("NAME too long", Status.MALFORMED, {"tail": option(OptionType.NAME, b"a" * 256)}),
    ("NAMESPACE too long", Status.MALFORMED, {"tail": option(OptionType.NAMESPACE, b"a" * 256)}),
    ("NAME not UTF-8", Status.MALFORMED, {"tail": option(OptionType.NAME, b"\xff")}),
    ("Completion Credits 0", Status.MALFORMED, {"credits": 0}),
    ("Max Message 1023", Status.MALFORMED, {"max_message": 1023}),
    ("second HELLO", Status.NO_SESSION, {"second": True}),
    ("unknown option", Status.UNSUPPORTED, {"options": UNKNOWN}),
    ("AUTH", Status.ACCESS_DENIED, {"auth": AUTH}),
    ("no NAMESPACE", Status.ACCESS_DENIED, {"namespace": b""}),
    ("other NAMESPACE", Status.ACCESS_DENIED, {"namespace": option(OptionType.NAMESPACE, b"model b")}),
    ("live identity", Status.ACCESS_DENIED, {"initiator_id": ALICE}),
    ("no quota left", Status.NO_SPACE, {"quota": 1}),
]


def say_hello(new_world: Callable[..., Any], *faults: dict[str, Any]) -> Any:
    """A HELLO with all of `faults` to a target whose quota is used up, where Alice is live."""
    fault = {key: value for one in faults for key, value in one.items()}
    world = new_world(namespace=b"model a")
    right = option(OptionType.NAMESPACE, b"model a")
    world.connect(namespace=b"model a", initiator_id=ALICE, requested_quota=4)
    peer = world.open()
    if fault.pop("second", False):
        peer.hello(namespace=b"model a")
    tail, cut = fault.pop("tail", b""), fault.pop("cut", None)
    options = fault.pop("options", b"") + fault.pop("namespace", right) + tail + fault.pop("auth", b"")
    peer.send(hello_octets(options=options, **fault)[:cut])
    return peer


def check_refused(peer: Any, status: Status) -> None:
    """Profile 2 and 8.1: the status, a body of zeros, and the stream ends."""
    assert peer.ack.status == status
    assert peer.ack_octets[:24] == struct.pack(">BBHQQHH", 1, 2, 0, 7, 0, 0, status)
    assert peer.ack_octets[24:] == bytes(152 - 24)
    assert isinstance(peer.end_action, Disconnect)


@pytest.mark.parametrize(("_name", "status", "fault"), FAULTS, ids=[name for name, _, _ in FAULTS])
def test_each_check_of_hello(new_world: Callable[..., Any], _name: str, status: Status, fault: dict[str, Any]) -> None:
    """Profile 8.1."""
    check_refused(say_hello(new_world, fault), status)


PAIRS = [
    (f"{one[0]} before {two[0]}", one[1], one[2], two[2])
    for i, one in enumerate(FAULTS)
    for two in FAULTS[i + 1 :]
    if one[1] != two[1] and not set(one[2]) & set(two[2]) and not ("cut" in one[2] and "auth" in two[2])
]


@pytest.mark.parametrize(("_name", "status", "earlier", "later"), PAIRS, ids=[pair[0] for pair in PAIRS])
def test_the_earlier_check_names_the_status(
    new_world: Callable[..., Any], _name: str, status: Status, earlier: dict[str, Any], later: dict[str, Any]
) -> None:
    """Profile 8.1: HELLOs that two checks would refuse."""
    check_refused(say_hello(new_world, later, earlier), status)


def test_an_unknown_option_from_0x8000_on_is_skipped(world: Any) -> None:
    """Profile 2."""
    peer = world.open()
    peer.send(hello_octets(options=option(0x8000, b"what")))
    assert peer.ack.status == Status.SUCCESS


def test_hello_ack_says_what_there_is(new_world: Callable[..., Any]) -> None:
    """Profile 2 HELLO_ACK, 8.1: Request ID echoed, Handle and Generation 0, Version 1."""
    world = new_world(name="cache 1", namespace=b"model a")
    peer = world.connect(name="prefill", namespace=b"model a", request_id=0xFEED_F00D_0000_0001)
    ack = peer.ack
    assert peer.ack_octets[:24] == struct.pack(">BBHQQHH", 1, 2, 0, 0xFEED_F00D_0000_0001, 0, 0, 0)
    assert (ack.block_size, ack.pool_blocks) == (512, 4)
    assert (ack.allocation_quota, ack.request_credits, ack.max_message) == (2, 4, 1024)
    assert (ack.incarnation, ack.table_base_handle, ack.table_handles) == (
        world.target.incarnation,
        world.target.table_base_handle,
        16,
    )
    assert (ack.first_handle, ack.handle_count) == (ack.table_base_handle, 4)
    assert (ack.bound_blocks, ack.pool_base) == (0, world.config.pool_base)
    assert ack.counter_byte_order == (sys.byteorder == "big")
    assert (ack.name, ack.namespace, ack.auth) == ("cache 1", b"model a", None)
    assert peer.session.name == "prefill"


def test_nothing_of_the_direct_modes_is_shown(world: Any) -> None:
    """Profile 2: STags, ring and Ticket Timeout are zero without DIRECT_LOAD and DIRECT_ALLOC."""
    ack = world.connect(requested_features=0x1F).ack
    assert (ack.table_stag, ack.pool_stag, ack.partition_stag, ack.ring_stag, ack.head_stag) == (0,) * 5
    assert (ack.table_offset, ack.ring_offset, ack.head_offset, ack.ring_order, ack.ticket_timeout_ms) == (0,) * 5


@pytest.mark.parametrize("asked", [*range(32), 0x20, 0xFFFF_FFFF])
def test_of_all_features_only_invalidate_is_granted(world: Any, asked: int) -> None:
    """Profile 1 and 8.3: RECORD_COMPLETION never on RDMAP, direct modes not offered, unknown bits ignored."""
    peer = world.open()
    octets = hello_octets()
    peer.send(octets[:24] + struct.pack(">I", asked) + octets[28:])
    assert peer.ack.status == Status.SUCCESS
    assert peer.ack.granted_features == asked & Feature.INVALIDATE


@pytest.mark.parametrize(("offered", "granted"), [(1, 1), (3, 3), (4, 4), (5, 4), (0xFFFF_FFFF, 4)])
def test_request_credits_are_at_most_the_completion_credits(world: Any, offered: int, granted: int) -> None:
    """Profile 2: 1 to Completion Credits; profile 3: as many receive buffers are posted before HELLO_ACK."""
    peer = world.connect(completion_credits=offered)
    assert peer.ack.request_credits == granted == len(peer.lent)
    assert {recv.sge.length for recv in peer.lent} == {1024}


# --- quota and handles (8.4) ---


def test_what_there_is_of_the_quota_is_granted(world: Any) -> None:
    """Profile 8.4, draft 3.4: the sum of quotas is at most F."""
    assert world.connect(requested_quota=3).ack.allocation_quota == 3
    assert world.connect(requested_quota=3).ack.allocation_quota == 1
    refused = world.open()
    refused.hello(requested_quota=1)
    check_refused(refused, Status.NO_SPACE)


def test_requested_quota_0_is_the_default_and_may_be_nothing(world: Any) -> None:
    """Profile 8.4: a pure reader."""
    assert [world.connect().ack.allocation_quota for _ in range(2)] == [2, 2]
    reader = world.connect()
    assert (reader.ack.allocation_quota, reader.ack.handle_count) == (0, 1)
    assert reader.status(reader.alloc_store(reader.handle(), b"x", flags=world.INLINE)) is Status.NO_SPACE
    owner = world.peers[0]
    owner.bind(owner.handle(), b"to be read")
    assert reader.look(owner.handle()) == b"to be read"


def test_the_operators_cap_on_quotas(new_world: Callable[..., Any]) -> None:
    world = new_world(max_quota=1)
    assert world.connect(requested_quota=4).ack.allocation_quota == 1
    assert world.connect().ack.allocation_quota == 1


def test_what_there_is_of_the_handles_is_granted(world: Any) -> None:
    """Profile 8.4 and 3: disjoint ranges; NO_SPACE if there are none, and the quota is not kept."""
    one, two = world.connect(requested_handles=10), world.connect(requested_handles=10, requested_quota=1)
    assert (one.ack.handle_count, two.ack.handle_count) == (10, 6)
    assert not {one.handle(n) for n in range(10)} & {two.handle(n) for n in range(6)}
    refused = world.open()
    refused.hello(requested_quota=1)
    check_refused(refused, Status.NO_SPACE)
    assert world.store.quotas.left == 1


def test_a_refused_hello_keeps_nothing(new_world: Callable[..., Any]) -> None:
    world = new_world()
    first = world.connect(requested_quota=4)
    refused = world.open()
    refused.hello(requested_quota=1, initiator_id=ALICE)
    check_refused(refused, Status.NO_SPACE)
    refused.end()
    first.end()
    assert world.connect(initiator_id=ALICE).ack.flags == HelloAckFlag.NONE
    world.end_all()
    world.advance(world.config.linger_s)
    world.check_nothing_is_left()


# --- namespace and identity ---


def test_any_namespace_will_do_for_a_target_without_one(world: Any) -> None:
    """Profile 2 NAMESPACE: it must equal the target's, when it has one."""
    assert world.connect(namespace=b"anything").ack.namespace is None


def test_auth_to_a_target_without_keys(world: Any) -> None:
    """Profile 4."""
    peer = world.open()
    peer.hello(auth=Auth(1, bytes(32)))
    check_refused(peer, Status.ACCESS_DENIED)


def test_resumed_with_range_quota_and_bound_blocks(world: Any) -> None:
    """Profile 3 "Identity", 8.4: the old range and quota win over what is asked for."""
    before = world.connect(initiator_id=ALICE, requested_quota=3, requested_handles=5)
    assert before.ack.flags == HelloAckFlag.NONE
    before.bind(before.handle(1), b"one")
    before.bind(before.handle(4), b"four", seal=False)
    before.end()
    after = world.connect(initiator_id=ALICE, requested_quota=1, requested_handles=1)
    assert after.ack.flags == HelloAckFlag.RESUMED
    assert (after.ack.first_handle, after.ack.handle_count) == (before.ack.first_handle, 5)
    assert (after.ack.allocation_quota, after.ack.bound_blocks) == (3, 2)
    assert after.look(after.handle(1)) == b"one"
    assert after.look(after.handle(4)) == b"four"


def test_resumed_when_nothing_is_left_to_grant(world: Any) -> None:
    """Profile 8.4: a returning identity needs nothing new."""
    world.connect(initiator_id=ALICE, requested_quota=2).end()
    world.connect(requested_quota=2, requested_handles=100)
    assert world.connect(initiator_id=ALICE, requested_quota=4).ack.allocation_quota == 2


def test_a_live_identity_is_not_replaced_without_keys(world: Any) -> None:
    """Profile 3 "Identity": ACCESS_DENIED until it has ended."""
    live = world.connect(initiator_id=ALICE)
    live.bind(live.handle(), b"mine")
    other = world.open()
    other.hello(initiator_id=ALICE)
    check_refused(other, Status.ACCESS_DENIED)
    other.end()
    assert live.look(live.handle()) == b"mine"
    live.end()
    assert world.connect(initiator_id=ALICE).ack.bound_blocks == 1


def test_an_anonymous_initiator_is_nobody_else(world: Any) -> None:
    one, two = world.connect(), world.connect()
    assert one.ack.first_handle != two.ack.first_handle
    assert two.ack.flags == HelloAckFlag.NONE


def test_different_ids_are_different_identities(world: Any) -> None:
    world.connect(initiator_id=ALICE).end()
    assert world.connect(initiator_id=BOB).ack.flags == HelloAckFlag.NONE


# --- out of turn (8.1, 8.2, 8.5) ---


def test_a_second_hello_ends_the_stream(world: Any) -> None:
    """Profile 8.1: HELLO_ACK with NO_SESSION."""
    peer = world.connect()
    peer.hello(requested_quota=1)
    check_refused(peer, Status.NO_SESSION)


def test_a_second_hello_lets_nothing_more_start(world: Any) -> None:
    """What was posted before it still leaves; what waited is resolved by the end of the stream as not done."""
    peer = world.connect(read_depth=1)
    peer.bind(peer.handle(), b"whole")
    load = peer.load(peer.handle())
    peer.alloc_store(peer.handle(1), b"posted")
    peer.store(peer.handle(), b"waits for the LOAD")
    peer.hello()
    check_refused(peer, Status.NO_SESSION)
    write, read = peer.posted
    peer.finish(read)
    peer.finish(write)
    assert peer.buffers[write.remote_stag][:5] == b"whole"
    assert list(peer.answers)[1:] == [load]
    assert not peer.posted


def test_a_second_hello_lets_no_waiting_read_be_posted(world: Any) -> None:
    """Profile 3: reads beyond the depth wait in the target; after the end was decided they wait for ever."""
    peer = world.connect(read_depth=1)
    peer.alloc_store(peer.handle(), b"posted")
    peer.alloc_store(peer.handle(1), b"waits for the first")
    peer.hello()
    peer.finish()
    assert not peer.posted


def test_a_hello_over_1024_octets_has_a_terminate(new_world: Callable[..., Any]) -> None:
    """Profile 8.1: 1/2/05, also where the receive buffer would have held it."""
    world = new_world(max_message_bytes=2048)
    peer = world.connect()
    peer.send(hello_octets(options=option(0x8000, bytes(1024))))
    assert isinstance(peer.end_action, Terminate)
    assert peer.end_action.cause is TerminateCause.DDP_MESSAGE_TOO_LONG
    assert len(peer.acks) == 1


def test_a_request_before_hello_gets_one_completion_the_next_ends_the_stream(world: Any) -> None:
    """Profile 8.2."""
    peer = world.open()
    first = peer.load(5)
    assert peer.status(first) is Status.NO_SESSION
    second = peer.free(5)
    assert peer.status(second) is None
    assert isinstance(peer.end_action, Terminate)


@pytest.mark.parametrize(
    ("octets", "status"),
    [
        (struct.pack(">BBHQQHH", 2, 6, 0, 9, 1, 0, 0), Status.UNSUPPORTED),
        (struct.pack(">BBHQQHH", 1, 99, 0, 9, 1, 0, 0), Status.UNSUPPORTED),
        (struct.pack(">BBHQQHHIIQ", 1, 7, 0, 9, 1, 0, 0, 0, 0, 0), Status.UNSUPPORTED),
        (struct.pack(">BBHQQHHx", 1, 6, 0, 9, 1, 0, 0), Status.MALFORMED),
        (struct.pack(">BBHQQHH", 1, 6, 0, 9, 1, 0, 0), Status.NO_SESSION),
    ],
)
def test_a_request_before_hello_is_checked_in_order(world: Any, octets: bytes, status: Status) -> None:
    """Profile 1: UNSUPPORTED, MALFORMED, NO_SESSION; whichever it was, it was the one before HELLO (8.2)."""
    peer = world.open()
    peer.send(octets)
    assert (peer.answers[9].status, peer.answers[9].generation) == (status, 0)
    peer.send(octets)
    assert isinstance(peer.end_action, Terminate)


def test_a_request_before_hello_does_not_spoil_the_session(world: Any) -> None:
    """Profile 8.2: the next request ends the stream, HELLO is none; refusals within the session are harmless."""
    peer = world.open()
    peer.free(5)
    peer.hello()
    assert peer.ack.status == Status.SUCCESS
    for _ in range(3):
        assert peer.status(peer.free(peer.handle())) is Status.NOT_BOUND
    assert peer.end_action is None


@pytest.mark.parametrize("flags", [RequestFlag.NONE, RequestFlag.INVALIDATE])
def test_a_no_session_completion_invalidates_too(world: Any, flags: RequestFlag) -> None:
    """Profile 8.7."""
    peer = world.open()
    answer = peer.answers[peer.load(5, flags=flags, stag=0xABCD)]
    assert answer.status is Status.NO_SESSION
    assert answer.invalidated == (0xABCD if flags else None)


def test_no_hello_in_time(world: Any) -> None:
    """Profile 3: HELLO must come within 5 s."""
    peer = world.open()
    assert world.target.next_deadline_s() == world.now_s + 5
    world.advance(4.9)
    assert peer.end_action is None
    world.advance(0.1)
    assert isinstance(peer.end_action, Abort)
    assert world.target.next_deadline_s() == float("inf")
    world.advance(1)


def test_a_request_before_hello_does_not_stop_the_clock(world: Any) -> None:
    peer = world.open()
    world.advance(3)
    peer.free(1)
    world.advance(2)
    assert isinstance(peer.end_action, Abort)


def test_a_session_has_no_hello_deadline(world: Any) -> None:
    peer = world.connect()
    world.advance(5000)
    assert peer.end_action is None


@pytest.mark.parametrize("length", [0, 1, 23])
@pytest.mark.parametrize("with_session", [False, True])
def test_a_message_without_a_common_header_ends_the_stream(world: Any, length: int, with_session: bool) -> None:
    """Profile 8.5: Terminate 0/2/FF."""
    peer = world.connect() if with_session else world.open()
    peer.send(bytes([1, 1] + [0] * 22)[:length])
    assert isinstance(peer.end_action, Terminate)
    assert peer.end_action.cause is TerminateCause.RDMAP_UNSPECIFIED


def test_after_the_end_was_decided_messages_are_not_looked_at(world: Any) -> None:
    """Those that were on their way: neither answered nor done."""
    peer = world.connect()
    peer.bind(peer.handle(), b"stays")
    peer.send(b"")
    request = peer.free(peer.handle())
    assert peer.status(request) is None
    assert peer.entry(peer.handle()).valid
    assert not any(isinstance(operation, RdmaRead | RdmaWrite) for operation in peer.posted)


@pytest.mark.parametrize("with_session", [False, True])
def test_flushed_receive_buffers_are_not_messages(world: Any, with_session: bool) -> None:
    """A stream that the peer closed is not a peer that sent too short a message."""
    peer = world.connect() if with_session else world.open()
    peer.flush()
    world.perform()
    assert peer.end_action is None


def test_a_name_is_one_line_in_a_log(world: Any) -> None:
    """Profile 2 NAME: for logs and metrics; the octets are the peer's."""
    name = world.connect(name="decode 3\n2030-01-01 CRITICAL \x1b[31mforged").session.name
    assert name.startswith("decode 3")
    assert name.isprintable()
