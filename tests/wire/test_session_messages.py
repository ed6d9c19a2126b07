"""HELLO, HELLO_ACK, their options and the order they are judged in (profile 2, 4 and 8.1)."""

from __future__ import annotations

import hashlib
import hmac
from dataclasses import replace

import pytest

from kbtp.errors import ApiMisuse, WireFormatError
from kbtp.limits import HELLO_MAX_BYTES
from kbtp.types import Feature, HelloAckFlag, RequestFlag, Status
from kbtp.wire import ANONYMOUS, Auth, Free, Hello, HelloAck, parse_request, parse_response, with_zero_mac

MAC = bytes(range(32))
HELLO = Hello(
    request_id=7,
    requested_features=Feature.DIRECT_LOAD | Feature.INVALIDATE,
    requested_quota=64,
    requested_handles=256,
    completion_credits=32,
    max_message=1024,
    initiator_id=bytes(range(16)),
)
ACK = HelloAck(7, block_size=1 << 20, pool_blocks=256, request_credits=16, max_message=16384, pool_base=1 << 40)


def option(option_type: int, value: bytes) -> bytes:
    """Profile 2: Type (16), Length (16), value, padding to 4."""
    return option_type.to_bytes(2, "big") + len(value).to_bytes(2, "big") + value + bytes(-len(value) % 4)


def refusal_of(message: bytes) -> tuple[str, Status]:
    with pytest.raises(WireFormatError) as refusal:
        (parse_request if message[1] == 1 else parse_response)(message)
    return refusal.value.field, refusal.value.status


def with_octets(message: bytes, at: int, octets: bytes) -> bytes:
    return message[:at] + octets + message[at + len(octets) :]


def test_hello_without_options_has_64_octets() -> None:
    assert len(HELLO.pack()) == 64
    assert parse_request(HELLO.pack()) == HELLO


def test_an_initiator_without_identity_is_anonymous() -> None:
    hello = Hello(7, Feature.NONE, 0, 0, 1, 1024)

    assert hello.initiator_id == ANONYMOUS == bytes(16)
    assert parse_request(hello.pack()) == hello


def test_hello_ack_without_options_has_152_octets() -> None:
    assert len(ACK.pack()) == 152
    assert parse_response(ACK.pack()) == ACK


def test_each_option_and_all_together() -> None:
    options = {"name": "gpu-7/é", "namespace": b"\x00\xff", "auth": Auth(0x01020304, MAC)}

    for carried in ({}, *({key: value} for key, value in options.items()), options):
        hello, ack = replace(HELLO, **carried), replace(ACK, **carried)
        assert parse_request(hello.pack()) == hello
        assert parse_response(ack.pack()) == ack
    assert replace(HELLO, **options).pack()[-36:] == bytes.fromhex("01020304") + MAC


def test_the_longest_options_fit() -> None:
    longest = {"name": "n" * 255, "namespace": b"s" * 255, "auth": Auth(1, MAC)}

    for message in (replace(HELLO, **longest), replace(ACK, **longest)):
        assert len(message.pack()) <= HELLO_MAX_BYTES
        assert type(message).parse(message.pack()) == message


def test_more_than_1024_octets_are_malformed() -> None:
    for packed in (HELLO.pack(), ACK.pack()):
        longest = packed + option(0x8000, bytes(HELLO_MAX_BYTES - len(packed) - 4))
        assert len(longest) == HELLO_MAX_BYTES
        (parse_request if packed[1] == 1 else parse_response)(longest)

        assert refusal_of(packed + option(0x8000, bytes(HELLO_MAX_BYTES - len(packed)))) == (
            "message",
            Status.MALFORMED,
        )


@pytest.mark.parametrize("message", [HELLO.pack(), ACK.pack()], ids=["HELLO", "HELLO_ACK"])
def test_a_fixed_part_cut_anywhere_is_malformed(message: bytes) -> None:
    for length in range(2, len(message)):
        assert refusal_of(message[:length]) == ("message", Status.MALFORMED)


@pytest.mark.parametrize("message", [HELLO.pack(), ACK.pack()], ids=["HELLO", "HELLO_ACK"])
def test_options_cut_anywhere_but_between_two_are_malformed(message: bytes) -> None:
    options = [option(1, b"name!"), option(2, b""), option(0xFFFF, b"xy"), option(3, bytes(4) + MAC)]
    whole = message + b"".join(options)
    between = {len(message + b"".join(options[:n])) for n in range(len(options) + 1)}

    for length in range(len(message), len(whole) + 1):
        if length in between:
            (parse_request if message[1] == 1 else parse_response)(whole[:length])
        else:
            assert refusal_of(whole[:length]) == ("options", Status.MALFORMED)


@pytest.mark.parametrize("message", [HELLO.pack(), ACK.pack()], ids=["HELLO", "HELLO_ACK"])
@pytest.mark.parametrize(
    ("options", "field"),
    [
        ([option(1, b"a"), option(1, b"b")], "options"),
        ([option(2, b"a"), option(2, b"a")], "options"),
        ([option(0x8001, b""), option(1, b"a"), option(0x8001, b"")], "options"),
        ([option(1, b"n" * 256)], "name"),
        ([option(1, b"\xff")], "name"),
        ([option(2, b"s" * 256)], "namespace"),
        ([option(3, bytes(35))], "auth"),
        ([option(3, bytes(37))], "auth"),
        ([option(3, b"")], "auth"),
        ([option(3, bytes(36)), option(1, b"a")], "auth"),
        ([option(3, bytes(36)), option(0xFFFF, b"")], "auth"),
        ([option(3, bytes(36)), option(9, b"")], "auth"),
    ],
)
def test_malformed_options(message: bytes, options: list[bytes], field: str) -> None:
    assert refusal_of(message + b"".join(options)) == (field, Status.MALFORMED)


def test_unknown_options_are_kept_for_later_judgement() -> None:
    message = HELLO.pack() + option(4, b"") + option(0x8000, b"skip") + option(0x7FFF, b"x") + option(3, bytes(36))

    hello = Hello.parse(message)

    assert hello == replace(HELLO, unknown_options=(4, 0x7FFF), auth=Auth(0, bytes(32)))
    with pytest.raises(WireFormatError, match=r"^options: unknown type 0x0004, 0x7fff$") as refusal:
        hello.check_options()
    assert refusal.value.status is Status.UNSUPPORTED


def test_hello_in_the_order_of_profile_8_1() -> None:
    # Everything is wrong at once; each step puts right what was found.
    message = HELLO.pack() + option(4, b"") + option(1, b"a") + b"\x00"
    message = with_octets(message, 40, bytes(8))
    message = with_octets(message, 0, b"\x02\x01\x00\x01")

    found = [refusal_of(message)]
    message = with_octets(message, 0, b"\x01")
    found.append(refusal_of(message))
    message = with_octets(message, 2, bytes(2))
    found.append(refusal_of(message))
    message = message[:-1]
    found.append(refusal_of(message))
    message = with_octets(message, 40, b"\x00\x00\x00\x01")
    found.append(refusal_of(message))
    message = with_octets(message, 44, b"\x00\x00\x04\x00")
    hello = Hello.parse(message)
    with pytest.raises(WireFormatError) as refusal:
        hello.check_options()
    found.append((refusal.value.field, refusal.value.status))

    assert found == [
        ("version", Status.UNSUPPORTED),
        ("flags", Status.UNSUPPORTED),
        ("options", Status.MALFORMED),
        ("completion_credits", Status.MALFORMED),
        ("max_message", Status.MALFORMED),
        ("options", Status.UNSUPPORTED),
    ]


def test_hello_ack_judges_unknown_options_last() -> None:
    unknown = option(4, b"")

    assert refusal_of(ACK.pack() + unknown) == ("options", Status.UNSUPPORTED)
    assert refusal_of(with_octets(ACK.pack(), 44, bytes(4)) + unknown) == ("max_message", Status.MALFORMED)
    assert refusal_of(with_octets(ACK.pack(), 40, bytes(4)) + unknown) == ("request_credits", Status.MALFORMED)
    assert refusal_of(with_octets(ACK.pack(), 22, b"\x00\x10") + unknown) == ("status", Status.MALFORMED)


@pytest.mark.parametrize("status", [status for status in Status if status is not Status.SUCCESS])
def test_a_refusal_has_all_fields_zero(status: Status) -> None:
    refused = replace(ACK, status=status, name="target")

    packed = refused.pack()

    assert packed[22:24] == status.to_bytes(2, "big")
    assert packed[24:152] == bytes(128)
    assert parse_response(packed) == HelloAck(7, status=status, name="target")


def test_fields_of_a_refusal_are_not_read() -> None:
    message = with_octets(HelloAck(7, status=Status.ACCESS_DENIED).pack(), 24, b"\xff" * 128)

    assert parse_response(message) == HelloAck(7, status=Status.ACCESS_DENIED)


def test_resumed() -> None:
    ack = replace(ACK, flags=HelloAckFlag.RESUMED, bound_blocks=5)

    assert ack.pack()[2:4] == b"\x00\x01"
    assert parse_response(ack.pack()) == ack
    with pytest.raises(ApiMisuse, match=r"^flags: 0x0002 is not allowed with HELLO_ACK"):
        replace(ACK, flags=HelloAckFlag(2)).pack()


def test_features_nobody_knows_are_dropped() -> None:
    everything = b"\xff\xff\xff\xff"

    hello = Hello.parse(with_octets(HELLO.pack(), 24, everything))
    ack = HelloAck.parse(with_octets(ACK.pack(), 24, everything))

    known = Feature.RECORD_COMPLETION | Feature.DIRECT_LOAD | Feature.DIRECT_ALLOC
    known |= Feature.MASKED_ATOMICS | Feature.INVALIDATE
    assert hello.requested_features == ack.granted_features == known


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("request_id", 1 << 64),
        ("requested_features", 1 << 32),
        ("requested_quota", -1),
        ("requested_handles", 1 << 64),
        ("completion_credits", 0),
        ("completion_credits", 1 << 32),
        ("max_message", 1023),
        ("max_message", 1 << 32),
        ("initiator_id", bytes(15)),
        ("initiator_id", bytes(17)),
        ("initiator_id", 0),
        ("name", "é" * 128),
        ("name", "\ud800"),
        ("namespace", bytes(256)),
        ("unknown_options", (4,)),
    ],
)
def test_what_a_target_would_refuse_is_not_packed_as_hello(field: str, value: object) -> None:
    with pytest.raises(ApiMisuse, match=rf"^{field}: "):
        replace(HELLO, **{field: value}).pack()


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("request_id", -1),
        ("request_credits", 0),
        ("max_message", 1023),
        ("block_size", 1 << 32),
        ("ring_order", 256),
        ("counter_byte_order", -1),
        ("incarnation", 1 << 64),
        ("table_stag", 1 << 32),
        ("pool_base", -1),
        ("status", 16),
        ("name", "n" * 256),
        ("namespace", bytes(256)),
    ],
)
def test_what_an_initiator_would_refuse_is_not_packed_as_hello_ack(field: str, value: object) -> None:
    with pytest.raises(ApiMisuse, match=rf"^{field}: "):
        replace(ACK, **{field: value}).pack()


@pytest.mark.parametrize(
    ("auth", "field"), [(Auth(1 << 32, MAC), "key_id"), (Auth(1, MAC[:-1]), "mac"), (Auth(1, MAC + b"\x00"), "mac")]
)
def test_an_auth_that_does_not_fit_is_misuse(auth: Auth, field: str) -> None:
    for message in (HELLO, ACK):
        with pytest.raises(ApiMisuse, match=rf"^{field}: "):
            replace(message, auth=auth).pack()


def test_the_mac_covers_the_message_with_the_mac_zeroed() -> None:
    for unsigned in (replace(HELLO, name="a", auth=Auth(9, bytes(32))), replace(ACK, auth=Auth(9, bytes(32)))):
        mac = hmac.new(b"key", unsigned.pack(), hashlib.sha256).digest()
        sent = replace(unsigned, auth=Auth(9, mac)).pack()

        covered = with_zero_mac(bytearray(sent))

        assert sent[-32:] == mac
        assert covered == unsigned.pack()


def test_without_auth_there_is_no_mac_to_zero() -> None:
    for message in (HELLO.pack(), ACK.pack()):
        with pytest.raises(WireFormatError, match=r"^auth: "):
            with_zero_mac(message)
    with pytest.raises(WireFormatError, match=r"^opcode: "):
        with_zero_mac(Free(1, 2, 3, RequestFlag.NONE).pack())
