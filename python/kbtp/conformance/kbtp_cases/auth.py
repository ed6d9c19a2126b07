"""Keys and trust domains as seen from outside (profile 3, 4)."""

from __future__ import annotations

import secrets

from kbtp.conformance.case import Group
from kbtp.conformance.deviation import Deviation, NotApplicable, expect
from kbtp.conformance.initiator_side import InitiatorSide, hello_message
from kbtp.conformance.kbtp_cases.direct import ALLOC_FEATURES, DirectSide
from kbtp.conformance.kbtp_cases.hello import UNKNOWN_OPTION, option
from kbtp.conformance.kbtp_cases.identity import fresh_id, resumed
from kbtp.conformance.kbtp_cases.rdma import next_read
from kbtp.conformance.probe import TargetProbe
from kbtp.errors import WireFormatError
from kbtp.iwarp.rdmap import RdmapOpcode
from kbtp.keys import Key
from kbtp.limits import KEY_SECRET_MIN_BYTES
from kbtp.types import Feature, Status
from kbtp.wire import Auth, check_hello_ack

GROUP = Group("authentication")

CHANGES_OF_DOMAIN = 5
TRACE_BYTES = 512  # the smallest Block Size


def keys_of(probe: TargetProbe, count: int = 1) -> tuple[Key, ...]:
    """The first keys of `count` trust domains."""
    by_domain: dict[str, Key] = {}
    for key in probe.setup.keys:
        by_domain.setdefault(key.domain, key)
    probe.need(len(by_domain) >= count, f"keys of {count} trust domains in --key-file")
    return tuple(by_domain.values())[:count]


def session_of(probe: TargetProbe, key: Key, **hello: object) -> InitiatorSide:
    side = probe.before_hello()
    side.key = key
    return side.open(**hello)


def expect_denied(side: InitiatorSide, hello: bytes, why: str) -> bytes:
    """ACCESS_DENIED and the end of the stream; the octets of the HELLO_ACK."""
    ack = side.hello(hello)
    expect(ack.status is Status.ACCESS_DENIED, f"ACCESS_DENIED: {why}", ack.status.name)
    octets = side.stream.messages[-1].payload
    side.stream.expect_close("a refused HELLO ends the stream")
    return octets


@GROUP.target("KU1", needs=("keys",))
def both_sides_prove_the_key(probe: TargetProbe) -> None:
    """A HELLO with a good MAC is served; the HELLO_ACK ends with an AUTH of the same Key ID whose MAC is right."""
    [key] = keys_of(probe)
    side = probe.before_hello()
    side.key = key
    hello = side.hello_octets()
    ack = side.hello(hello)
    expect(ack.status is Status.SUCCESS, "SUCCESS", ack.status.name)
    octets = next(side.stream.messages_of(RdmapOpcode.SEND)).payload
    try:
        check_hello_ack(octets, ack.auth, key, side.nonces, hello)
    except WireFormatError as error:
        raise Deviation("a HELLO_ACK that proves the key", str(error)) from None
    side.goes_on()


@GROUP.target("KU2", needs=("keys",))
def wrong_proofs_look_alike(probe: TargetProbe) -> None:
    """A wrong MAC, a wrong secret, an unknown Key ID and no AUTH are all ACCESS_DENIED, in the same octets."""
    [key] = keys_of(probe)
    unknown = next(one for one in range(1 << 32) if all(key.key_id != one for key in probe.setup.keys))
    answers = set()
    for why in ("wrong MAC", "wrong secret", "unknown Key ID", "no AUTH"):
        side = probe.before_hello()
        side.key = {
            "wrong MAC": key,
            "wrong secret": Key(key.key_id, secrets.token_bytes(KEY_SECRET_MIN_BYTES)),
            "unknown Key ID": Key(unknown, key.secret),
            "no AUTH": None,
        }[why]
        hello = side.hello_octets()
        if why == "wrong MAC":
            hello = hello[:-1] + bytes([hello[-1] ^ 1])
        answers.add(expect_denied(side, hello, why))
    expect(len(answers) == 1, "the same HELLO_ACK to each", answers)


@GROUP.target("KU3", needs=("keys",))
def replayed_hello(probe: TargetProbe) -> None:
    """A HELLO that was right on one connection is refused on another one, and so is one of other nonces."""
    [key] = keys_of(probe)
    first = probe.before_hello()
    first.key = key
    hello = first.hello_octets()
    expect(first.hello(hello).status is Status.SUCCESS, "SUCCESS", "another status")
    expect_denied(probe.before_hello(), hello, "a HELLO of another connection")


@GROUP.target("KU1", needs=("keys",))
def every_octet_is_covered(probe: TargetProbe) -> None:
    """A HELLO of which one octet was changed, wherever, is refused."""
    [key] = keys_of(probe)
    for at in (4, 11, 27, 31, 39, 43, 48, 63, 70):
        side = probe.before_hello()
        side.key = key
        octets = bytearray(side.hello_octets(name="covered too"))
        octets[at] ^= 1
        expect_denied(side, bytes(octets), f"octet {at} was changed")


@GROUP.target("KU4", needs=("no-keys",))
def auth_without_keys(probe: TargetProbe) -> None:
    """A target without keys answers AUTH with ACCESS_DENIED."""
    side = probe.before_hello()
    auth = Auth(1, bytes(32))
    expect_denied(side, hello_message(namespace=probe.setup.namespace or None, auth=auth).pack(), "AUTH without keys")


@GROUP.target("KU5")
def malformed_auth(probe: TargetProbe) -> None:
    """An AUTH that is not last, or has another length than 36 octets, is MALFORMED, with or without keys."""
    hello, auth = hello_message().pack(), option(3, bytes(36))
    for octets, why in (
        (hello + auth + option(1, b"name"), "NAME behind AUTH"),
        (hello + auth + option(0x8001, b""), "a skippable option behind AUTH"),
        (hello + option(3, bytes(35)), "35 octets"),
        (hello + option(3, bytes(37)), "37 octets"),
        (hello + option(3, b""), "no octets"),
        (hello + auth + auth, "AUTH twice"),
    ):
        ack = probe.before_hello().hello(octets)
        expect(ack.status is Status.MALFORMED, f"MALFORMED: {why}", ack.status.name)


@GROUP.target(
    "KU6",
    needs=("keys",),
)
def new_session_replaces_a_live_one(probe: TargetProbe) -> None:
    """With keys a second session of an identity ends the first one's stream, and is RESUMED with what it had."""
    [key] = keys_of(probe)
    ident = fresh_id()
    first = session_of(probe, key, initiator_id=ident)
    first.need_quota(2)
    first.bind(0, b"of the first session")
    if probe.by_hand:
        first.send(first.alloc_store(first.handle(1), first.stream.memory.lend(64)))
        next_read(first, "the Read Request of an ALLOC_STORE that is outstanding")
    second = session_of(probe, key, initiator_id=ident)
    expect(resumed(second.ack), "RESUMED", second.ack.flags)
    expect(second.ack.bound_blocks == 1, "Bound Blocks 1: the outstanding ALLOC_STORE was not done", second.ack)
    first.stream.expect_end("its identity has a new session")
    second.expect_contents(0, b"of the first session")
    second.expect_status(second.load(second.handle(1), None), Status.NOT_BOUND)
    second.bind(1, b"of the second")
    for index in (0, 1):
        second.release(index)
    second.finish()


@GROUP.target("KU6", needs=("keys",))
def refused_hello_replaces_nothing(probe: TargetProbe) -> None:
    """A HELLO that fails any check leaves the live session of its identity alone."""
    [key] = keys_of(probe)
    ident = fresh_id()
    live = session_of(probe, key, initiator_id=ident)
    for change in ("mac", "option", "flags"):
        side = probe.before_hello()
        side.key = key
        patches = {2: b"\x00\x01"} if change == "flags" else {}
        more = option(UNKNOWN_OPTION, b"") if change == "option" else b""
        octets = side.hello_octets(initiator_id=ident, patches=patches, extra_options=more)
        if change == "mac":
            octets = octets[:-1] + bytes([octets[-1] ^ 1])
        ack = side.hello(octets)
        expect(ack.status is not Status.SUCCESS, "a refusal", ack.status.name)
        live.goes_on()


@GROUP.target("KU7", "KS6", needs=("keys", "two-domains"))
def nothing_is_learnt_of_another_domain(probe: TargetProbe) -> None:
    """A handle of another domain is HANDLE_OUT_OF_RANGE with Generation 0, bound or not, whatever is asked."""
    here, there = keys_of(probe, 2)
    owner, other = session_of(probe, here), session_of(probe, there)
    bound = owner.bind(0, b"secret")
    owner.bind(1, b"", sealed=False)
    answers = set()
    for index in range(3):
        handle = owner.handle(index)
        for generation in (0, bound.generation):
            for lent in (None, other.stream.memory.lend(64)):
                completion = other.call(other.load(handle, lent, generation=generation))
                answers.add((completion.status, completion.generation, completion.data_length, completion.block_offset))
                expect(lent is None or lent.unwritten, "no octet written", "some")
        other.expect_status(other.free(handle), Status.HANDLE_OUT_OF_RANGE)
        other.expect_status(other.store_inline(handle, b"x"), Status.HANDLE_OUT_OF_RANGE)
    expect(answers == {(Status.HANDLE_OUT_OF_RANGE, 0, 0, 0)}, "one answer to all, that tells nothing", answers)
    owner.expect_contents(0, b"secret")


@GROUP.target("KU10", needs=("keys", "two-domains"))
def identity_is_of_a_domain(probe: TargetProbe) -> None:
    """The same Initiator ID in two trust domains is two identities."""
    here, there = keys_of(probe, 2)
    ident = fresh_id()
    first = session_of(probe, here, initiator_id=ident)
    first.bind(0, b"of one domain")
    second = session_of(probe, there, initiator_id=ident)
    expect(not resumed(second.ack), "a new identity", "RESUMED")
    expect(second.first != first.first, "a range of its own", second.first)
    first.goes_on()
    first.expect_contents(0, b"of one domain")
    first.release(0)
    for side in (first, second):
        side.finish()


@GROUP.target("KX9", needs=("keys", "two-domains"))
def no_direct_load_with_two_domains(probe: TargetProbe) -> None:
    """Where the pool holds octets of two domains nobody is granted DIRECT_LOAD."""
    for key in keys_of(probe, 2):
        side = session_of(probe, key, requested_features=Feature.DIRECT_LOAD)
        granted = side.ack.granted_features
        expect(not granted & Feature.DIRECT_LOAD, "no DIRECT_LOAD (profile 6.4)", granted)
        expect(not (side.ack.table_stag or side.ack.pool_stag), "no STag", side.ack)


@GROUP.target("KX10", needs=("keys", "direct-alloc"))
def untrusted_key_gets_no_direct_mode(probe: TargetProbe) -> None:
    """A key that the target does not trust with direct modes gets a session without them."""
    key = next((key for key in probe.setup.keys if not key.direct), None)
    if key is None:
        raise NotApplicable("a key without direct modes in --key-file")
    side = session_of(probe, key, requested_features=Feature.DIRECT_LOAD | ALLOC_FEATURES)
    granted = side.ack.granted_features & (Feature.DIRECT_LOAD | Feature.DIRECT_ALLOC)
    expect(not granted, "no direct mode", side.ack.granted_features)
    side.goes_on()


@GROUP.target("KU8", needs=("keys", "two-domains", "direct-alloc"), alone=True, timeout_s=20.0)
def blocks_are_cleared_for_another_domain(probe: TargetProbe) -> None:
    """Who binds blocks without writing to them finds nothing there of another trust domain."""
    here, there = keys_of(probe, 2)
    trace = secrets.token_bytes(16)
    changed_domain = False
    for _ in range(CHANGES_OF_DOMAIN):
        for features in (Feature.NONE, ALLOC_FEATURES):
            written = _write_blocks(session_of(probe, here, requested_features=features), trace)
            other = DirectSide(session_of(probe, there, requested_features=ALLOC_FEATURES))
            probe.need(other.ack.head_stag != 0, "a key of the second domain with DIRECT_ALLOC")
            changed_domain = bool(written & _expect_cleared(other, trace)) or changed_domain
        if changed_domain:
            return
    raise NotApplicable("a block that one trust domain had before the other: the target gave each its own")


def _write_blocks(owner: InitiatorSide, trace: bytes) -> set[int]:
    """The Block Offsets of all blocks that `owner` may have: it has filled them with `trace`, and left them."""
    written = {
        owner.bind(index, trace * (TRACE_BYTES // len(trace))).block_offset
        for index in range(min(owner.ack.allocation_quota, owner.ack.handle_count))
    }
    owner.finish()
    return written


def _expect_cleared(other: DirectSide, trace: bytes) -> set[int]:
    """The Block Offsets of all blocks that `other` may have: `trace` is in none of them."""
    bound = set()
    for index in range(min(other.ack.allocation_quota, other.ack.handle_count)):
        ticket = other.take_ticket()
        block_offset = other.block_of(ticket)
        bind = other.bind(other.side.handle(index), ticket, TRACE_BYTES, block_offset)
        other.side.expect_status(bind, Status.SUCCESS)
        came = other.side.fetch(other.side.handle(index), TRACE_BYTES)
        expect(trace not in came, "no octet of the other domain", came[:16].hex())
        bound.add(block_offset)
    other.side.finish()
    return bound
