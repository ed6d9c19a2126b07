"""An initiator that has a key (profile 4)."""

from __future__ import annotations

import secrets

from kbtp.conformance.case import Group
from kbtp.conformance.deviation import Deviation, NotApplicable, expect
from kbtp.conformance.kbtp_cases.hello import patched
from kbtp.conformance.kbtp_cases.initiator_hello import expect_given_up
from kbtp.conformance.probe import InitiatorProbe
from kbtp.conformance.target_side import ack_fields
from kbtp.keys import Key, Keys
from kbtp.limits import KEY_SECRET_MIN_BYTES
from kbtp.wire import HelloAck, Nonces, key_of_hello, sign_hello_ack

GROUP = Group("initiator-authentication")

NEEDS = ("keys", "one-by-one")


def key_of(probe: InitiatorProbe) -> Key:
    if probe.key is None:
        raise NotApplicable("the initiator's key in --key-file")
    return probe.key


@GROUP.initiator("KNU1", needs=NEEDS)
def hello_is_signed(probe: InitiatorProbe) -> None:
    """HELLO ends with an AUTH of the key's ID whose MAC is right; with a HELLO_ACK that is signed too it goes on."""
    key, side = key_of(probe), probe.before_ack()
    found = key_of_hello(side.hello_octets, side.hello.auth, Keys((key,)), side.nonces)
    if found is None:
        raise Deviation("a HELLO whose MAC is right", side.hello_octets.hex())
    side.acknowledge()
    side.serve()
    expect(probe.work_succeeded(), "that all of its work succeeds", "that some did not")


def _unproven(name: str) -> None:
    """One case for each way in which a HELLO_ACK does not prove the key."""

    def run(probe: InitiatorProbe) -> None:
        key, side = key_of(probe), probe.before_ack()
        nonces, ack = side.nonces, HelloAck(side.hello.request_id, **ack_fields(side.hello))
        another_hello = patched(side.hello_octets, 4, bytes([side.hello_octets[4] ^ 1]))
        other = Key(key.key_id, secrets.token_bytes(KEY_SECRET_MIN_BYTES))
        octets = {
            "no-auth": ack.pack(),
            "wrong-secret": sign_hello_ack(ack, other, nonces, side.hello_octets),
            "another-key-id": sign_hello_ack(ack, Key(key.key_id ^ 1, key.secret), nonces, side.hello_octets),
            "nonces-swapped": sign_hello_ack(ack, key, Nonces(nonces.target, nonces.initiator), side.hello_octets),
            "another-hello": sign_hello_ack(ack, key, nonces, another_hello),
        }[name]
        side.stream.send(octets)
        expect_given_up(probe, side, f"a HELLO_ACK that does not prove the key: {name}")

    run.__name__ = f"ack_with_{name}"
    run.__doc__ = f"A HELLO_ACK without a valid AUTH ends the stream: {name.replace('-', ' ')}."
    GROUP.initiator("KNU2", needs=NEEDS)(run)


for _name in ("no-auth", "wrong-secret", "another-key-id", "nonces-swapped", "another-hello"):
    _unproven(_name)
