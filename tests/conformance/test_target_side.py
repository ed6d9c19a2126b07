"""The HELLO_ACK of the target by hand proves the key that the HELLO was signed with, whatever a case makes of it."""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import Any

import pytest

from kbtp.conformance.initiator_side import InitiatorSide
from kbtp.conformance.kbtp_cases.hello import SKIPPABLE_OPTION, option
from kbtp.conformance.target_side import TargetSide
from kbtp.keys import Key
from kbtp.limits import AUTH_MAC_BYTES
from kbtp.types import Status
from kbtp.wire import HelloAck, check_hello_ack, sign_hello_ack_octets
from tests.conformance.conftest import Pair

KEY = Key(0x5EED, bytes(range(32)))
ANOTHER = Key(0x5EEE, bytes(32))


@pytest.fixture
def target(pair: Callable[..., Pair]) -> Callable[..., TargetSide]:
    """`target(ours, theirs)`: the target with key `ours`, to which a HELLO signed with `theirs` has come."""

    def make(ours: Key | None, theirs: Key | None) -> TargetSide:
        initiators, targets = pair()
        initiator = InitiatorSide(initiators, key=theirs)
        initiator.stream.send(initiator.hello_octets())
        side = TargetSide(targets, ours)
        side.take_hello()
        return side

    return make


@pytest.mark.parametrize(
    "made",
    [
        {},
        {"block_size": 500},
        {"status": Status.NO_SPACE},
        {"patches": {54: b"\xff\xff"}, "extra_options": option(SKIPPABLE_OPTION, b"whatever")},
    ],
    ids=["right", "a field", "a refusal", "patches and an option"],
)
def test_auth_covers_all_of_it(target: Callable[..., TargetSide], made: dict[str, Any]) -> None:
    side = target(KEY, KEY)
    octets = side.ack_octets(**made)
    check_hello_ack(octets, HelloAck.parse(octets).auth, KEY, side.nonces, side.hello_octets)


def test_a_patch_is_signed_where_the_message_is_no_hello_ack_any_more(target: Callable[..., TargetSide]) -> None:
    side = target(KEY, KEY)
    octets = side.ack_octets(patches={44: struct.pack(">I", 1023)})
    unsigned = octets[:-AUTH_MAC_BYTES] + bytes(AUTH_MAC_BYTES)
    assert octets == sign_hello_ack_octets(unsigned, KEY, side.nonces, side.hello_octets)


@pytest.mark.parametrize(("ours", "theirs"), [(None, None), (None, KEY), (KEY, None), (KEY, ANOTHER)])
def test_without_the_same_key_there_is_no_auth(
    target: Callable[..., TargetSide], ours: Key | None, theirs: Key | None
) -> None:
    side = target(ours, theirs)
    octets = side.ack_octets()
    assert (octets, HelloAck.parse(octets).auth) == (side.ack.pack(), None)


def test_a_refusal_grants_nothing(target: Callable[..., TargetSide]) -> None:
    """All fields from octet 24 on are zero (profile 2); AUTH is an option behind them."""
    plain, signed = (target(key, key).ack_octets(status=Status.ACCESS_DENIED) for key in (None, KEY))
    assert plain[24:] == bytes(152 - 24)
    assert signed[:152] == plain
