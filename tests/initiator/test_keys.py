"""A client with a key: it signs HELLO, and stays only with a target that proves that it has the key (profile 4)."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import kbtp
from kbtp import limits
from kbtp.errors import AccessDenied, ApiMisuse, PeerMisbehaved
from kbtp.key_file import write_key
from kbtp.keys import Key, Keys
from kbtp.types import Status, TerminateCause
from kbtp.wire import ConnectionData, HelloAck, Nonces, key_of_hello, parse_request, sign_hello_ack

KEY, OTHER = Key(1, bytes(range(32))), Key(2, bytes(range(1, 33)), "b")
TARGET_NONCE = bytes(range(16))
OWN_DATA = ConnectionData(TARGET_NONCE).pack()

Connect = Callable[..., Any]
Serve = Callable[..., Any]
FakeTargets = Callable[..., Any]


def accept(target: Any) -> tuple[bytes, Nonces]:
    """The next connection's HELLO and its nonces, as a script sees them."""
    target.accept(OWN_DATA)
    return target.receive_octets(), Nonces(initiator=target.peer_nonce, target=TARGET_NONCE)


def ack_of(target: Any) -> HelloAck:
    return HelloAck.parse(target.hello_ack())


def test_both_sides_prove_what_they_have(fake_target: FakeTargets, connect: Connect) -> None:
    def script(target: Any) -> None:
        said, nonces = accept(target)
        assert key_of_hello(said, parse_request(said).auth, Keys((KEY,)), nonces) == KEY
        target.send(sign_hello_ack(ack_of(target), KEY, nonces, said))
        assert target.ended().reason is None

    assert connect(fake_target(script).url, key=KEY).terms.quota_blocks == 4


def unsigned(target: Any, _said: bytes, _nonces: Nonces) -> bytes:
    octets: bytes = target.hello_ack()
    return octets


def of_another_key(target: Any, said: bytes, nonces: Nonces) -> bytes:
    return sign_hello_ack(ack_of(target), OTHER, nonces, said)


def of_another_secret(target: Any, said: bytes, nonces: Nonces) -> bytes:
    return sign_hello_ack(ack_of(target), Key(KEY.key_id, OTHER.secret), nonces, said)


def of_another_connection(target: Any, said: bytes, nonces: Nonces) -> bytes:
    return sign_hello_ack(ack_of(target), KEY, Nonces(initiator=bytes(16), target=nonces.target), said)


def of_another_hello(target: Any, said: bytes, nonces: Nonces) -> bytes:
    return sign_hello_ack(ack_of(target), KEY, nonces, said + b"\x80\x00\x00\x00")


def changed_on_the_way(target: Any, said: bytes, nonces: Nonces) -> bytes:
    octets = bytearray(sign_hello_ack(ack_of(target), KEY, nonces, said))
    octets[39] ^= 8  # Allocation Quota
    return bytes(octets)


@pytest.mark.parametrize(
    "answer", [unsigned, of_another_key, of_another_secret, of_another_connection, of_another_hello, changed_on_the_way]
)
def test_a_target_that_does_not_prove_it_is_left(
    fake_target: FakeTargets, connect: Connect, answer: Callable[[Any, bytes, Nonces], bytes]
) -> None:
    def script(target: Any) -> None:
        target.send(answer(target, *accept(target)))
        terminate = target.ended().terminate
        assert (terminate.layer, terminate.etype, terminate.code) == TerminateCause.RDMAP_UNSPECIFIED.value

    with pytest.raises(PeerMisbehaved, match="does not prove that it has the key"):
        connect(fake_target(script).url, key=KEY)


def test_a_refusal_need_not_be_signed(fake_target: FakeTargets, connect: Connect) -> None:
    """Profile 2: it has no options. There is nothing in it to be misled by."""

    def script(target: Any) -> None:
        accept(target)
        target.send(HelloAck(0, status=Status.NO_SPACE).pack())
        target.ended()

    with pytest.raises(kbtp.NoSpace):
        connect(fake_target(script).url, key=KEY)


def test_each_attempt_has_a_nonce_and_a_mac_of_its_own(
    fake_target: FakeTargets, connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = []

    def script(target: Any) -> None:
        for _ in range(2):
            said, nonces = accept(target)
            assert key_of_hello(said, parse_request(said).auth, Keys((KEY,)), nonces) == KEY
            seen.append((nonces.initiator, said[-32:]))
        target.send(sign_hello_ack(ack_of(target), KEY, nonces, said))
        target.ended()

    monkeypatch.setattr(limits, "HELLO_ACK_TIMEOUT_S", 0.5)
    connect(fake_target(script).url, key=KEY)
    assert len(set(seen)) == 2
    assert len({nonce for nonce, _ in seen}) == 2


# --- with a real target ---


def test_a_key_from_a_file(serve: Serve, connect: Connect, tmp_path: Path) -> None:
    url = serve(keys=Keys((KEY, OTHER))).url
    path = tmp_path / "a.key"
    write_key(path, KEY)
    client = connect(url, key_file=path)
    block = client.alloc_store(b"x")
    assert connect(url, key=KEY).load(block, into=bytearray(1)) == 1
    path.chmod(0o644)
    with pytest.raises(ApiMisuse, match="others may use it"):
        connect(url, key_file=path)


def test_without_a_key(serve: Serve, connect: Connect) -> None:
    url = serve(keys=Keys((KEY,))).url
    with pytest.raises(AccessDenied, match=r"the target wants a key \(give key or key_file\)"):
        connect(url)


def test_with_a_key_that_the_target_does_not_have(serve: Serve, connect: Connect) -> None:
    for url in (serve(keys=Keys((KEY,))).url, serve().url):
        with pytest.raises(AccessDenied, match="the target does not have our key 00000002, or it has no keys at all"):
            connect(url, key=OTHER)


def test_the_key_is_given_once(tmp_path: Path, connect: Connect) -> None:
    with pytest.raises(ApiMisuse, match="key and key_file say the same thing"):
        connect("kbtp://127.0.0.1", key=KEY, key_file=tmp_path / "key")
