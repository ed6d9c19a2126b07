"""The MACs of profile 4, against the profile's formula written down a second time."""

from __future__ import annotations

import hashlib
from contextlib import suppress
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kbtp.errors import WireFormatError
from kbtp.keys import Key, Keys
from kbtp.types import Feature, Status
from kbtp.wire import Auth, Hello, HelloAck, Nonces, check_hello_ack, key_of_hello, sign_hello, sign_hello_ack

KEY = Key(0x01020304, bytes(range(32)), "a")
OTHER = Key(0x01020305, bytes(range(1, 33)), "b")
KEYS = Keys((KEY, OTHER))
NONCES = Nonces(initiator=b"i" * 16, target=b"t" * 16)
HELLO = Hello(7, Feature.INVALIDATE, 3, 4, 8, 1024, bytes(range(16)), name="prefill", namespace=b"llama")
ACK = HelloAck(7, block_size=512, pool_blocks=4, request_credits=4, max_message=1024, first_handle=9, handle_count=4)


def hmac_sha256(secret: bytes, message: bytes) -> bytes:
    """RFC 2104, for keys of up to one block."""
    padded = secret.ljust(64, b"\0")
    inner = hashlib.sha256(bytes(octet ^ 0x36 for octet in padded) + message).digest()
    return hashlib.sha256(bytes(octet ^ 0x5C for octet in padded) + inner).digest()


def key_of(octets: bytes, keys: Keys = KEYS, nonces: Nonces = NONCES) -> Key | None:
    return key_of_hello(octets, Hello.parse(octets).auth, keys, nonces)


def check_ack(octets: bytes, hello: bytes, key: Key = KEY, nonces: Nonces = NONCES) -> None:
    check_hello_ack(octets, HelloAck.parse(octets).auth, key, nonces, hello)


SECRETS = st.binary(min_size=32, max_size=64)
NONCE = st.binary(min_size=16, max_size=16)
NAMES = st.none() | st.text(st.characters(codec="utf-8", exclude_characters="\0"), max_size=60)
HELLOS = st.builds(
    Hello,
    st.integers(0, (1 << 64) - 1),
    st.just(Feature.INVALIDATE),
    st.integers(0, (1 << 32) - 1),
    st.integers(0, (1 << 64) - 1),
    st.integers(1, (1 << 32) - 1),
    st.integers(1024, (1 << 32) - 1),
    NONCE,
    name=NAMES,
    namespace=st.none() | st.binary(max_size=255),
)


@given(HELLOS, SECRETS, st.integers(0, (1 << 32) - 1), NONCE, NONCE)
def test_hello_and_hello_ack_have_the_mac_of_the_profile(
    hello: Hello, secret: bytes, key_id: int, one: bytes, two: bytes
) -> None:
    key, nonces = Key(key_id, secret), Nonces(initiator=one, target=two)
    zeroed = Auth(key_id, bytes(32))

    said = sign_hello(hello, key, nonces)
    mac = hmac_sha256(secret, b"KBTP1 HELLO\0\0\0\0\0" + one + two + replace(hello, auth=zeroed).pack())
    assert said == replace(hello, auth=Auth(key_id, mac)).pack()
    assert key_of(said, Keys((key,)), nonces) == key

    ack = sign_hello_ack(ACK, key, nonces, said)
    mac = hmac_sha256(secret, b"KBTP1 HELLO_ACK\0" + one + two + said + replace(ACK, auth=zeroed).pack())
    assert ack == replace(ACK, auth=Auth(key_id, mac)).pack()
    check_ack(ack, said, key, nonces)


def test_a_known_answer() -> None:
    """Made with another implementation of HMAC; fixes labels, order and zeroing for those who start from here."""
    said = sign_hello(HELLO, KEY, NONCES)
    assert said[-32:].hex() == "3a6da4643dfabdc1f0694d3441ee807174aec9f72981dbbc13613d47bf042737"
    assert (
        sign_hello_ack(ACK, KEY, NONCES, said)[-32:].hex()
        == "3e4545ff99deac083f2ca37ab5bd8ced69f7464d6b9a4c2925ae85720f259fc4"
    )


SIGNED = sign_hello(HELLO, KEY, NONCES)
SIGNED_ACK = sign_hello_ack(ACK, KEY, NONCES, SIGNED)


@given(st.integers(0, 8 * len(SIGNED) - 1))
def test_no_bit_of_hello_can_be_changed(bit: int) -> None:
    octets = bytearray(SIGNED)
    octets[bit // 8] ^= 1 << bit % 8
    with suppress(WireFormatError):  # it is no HELLO any more
        assert key_of(bytes(octets)) is None


@given(st.integers(0, 8 * len(SIGNED_ACK) - 1))
def test_no_bit_of_hello_ack_can_be_changed(bit: int) -> None:
    octets = bytearray(SIGNED_ACK)
    octets[bit // 8] ^= 1 << bit % 8
    with pytest.raises(WireFormatError):
        check_ack(bytes(octets), SIGNED)


@given(st.integers(0, 255), st.sampled_from(["initiator", "target"]))
def test_it_is_for_this_connection_alone(bit: int, whose: Any) -> None:
    """What was recorded on another one proves nothing: its nonces differ."""
    nonce = bytearray(getattr(NONCES, whose))
    nonce[bit // 8 % 16] ^= 1 << bit % 8
    elsewhere = replace(NONCES, **{whose: bytes(nonce)})
    assert key_of(SIGNED, nonces=elsewhere) is None
    with pytest.raises(WireFormatError, match="MAC of HELLO_ACK"):
        check_ack(SIGNED_ACK, SIGNED, nonces=elsewhere)


def test_nonces_do_not_change_places() -> None:
    assert key_of(SIGNED, nonces=Nonces(initiator=NONCES.target, target=NONCES.initiator)) is None


def test_hello_ack_is_the_answer_to_this_hello() -> None:
    other = sign_hello(replace(HELLO, requested_quota=9), KEY, NONCES)
    with pytest.raises(WireFormatError, match="MAC of HELLO_ACK"):
        check_ack(SIGNED_ACK, other)


def test_each_key_is_known_by_its_id_and_its_secret() -> None:
    assert key_of(sign_hello(HELLO, OTHER, NONCES)) == OTHER
    for wrong in (Key(KEY.key_id, OTHER.secret), Key(OTHER.key_id, KEY.secret), Key(99, KEY.secret)):
        assert key_of(sign_hello(HELLO, wrong, NONCES)) is None
        with pytest.raises(WireFormatError, match="MAC of HELLO_ACK"):
            check_ack(sign_hello_ack(ACK, wrong, NONCES, SIGNED), SIGNED)


def test_the_secret_of_no_key_opens_nothing() -> None:
    """An unknown Key ID is checked against a secret too, which everybody can read here."""
    assert key_of(sign_hello(HELLO, Key(99, bytes(32)), NONCES)) is None


def test_without_auth_nothing_is_proved() -> None:
    assert key_of(HELLO.pack()) is None
    with pytest.raises(WireFormatError, match="no AUTH"):
        check_ack(ACK.pack(), SIGNED)


def test_a_mac_of_hello_is_none_of_hello_ack() -> None:
    """The labels tell them apart: what one side sent cannot be sent back to it."""
    mac = SIGNED[-32:]
    with pytest.raises(WireFormatError, match="MAC of HELLO_ACK"):
        check_ack(replace(ACK, auth=Auth(KEY.key_id, mac)).pack(), SIGNED)


def test_a_refusal_can_be_signed_too() -> None:
    refusal = HelloAck(7, status=Status.NO_SPACE)
    check_ack(sign_hello_ack(refusal, KEY, NONCES, SIGNED), SIGNED)
