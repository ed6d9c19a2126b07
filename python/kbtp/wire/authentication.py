"""The MACs of HELLO and HELLO_ACK (profile 4): what they cover, how they are made, how they are compared.

    HMAC-SHA256(secret, label || initiator nonce || target nonce || messages)

| MAC of | label, NUL-padded to 16 octets | messages |
|---|---|---|
| HELLO | `KBTP1 HELLO` | the HELLO, its MAC zeroed |
| HELLO_ACK | `KBTP1 HELLO_ACK` | the HELLO as sent, the HELLO_ACK, its MAC zeroed |
"""

from __future__ import annotations

import hmac
from dataclasses import dataclass, replace
from typing import TypeVar

from kbtp.errors import WireFormatError
from kbtp.keys import Key, Keys
from kbtp.limits import AUTH_MAC_BYTES, KEY_SECRET_MIN_BYTES
from kbtp.wire.header import Octets
from kbtp.wire.options import Auth
from kbtp.wire.session_messages import Hello, HelloAck, with_zero_mac

_LABEL_BYTES = 16
_HELLO_LABEL = b"KBTP1 HELLO".ljust(_LABEL_BYTES, b"\0")
_HELLO_ACK_LABEL = b"KBTP1 HELLO_ACK".ljust(_LABEL_BYTES, b"\0")
_NO_KEY = bytes(KEY_SECRET_MIN_BYTES)
"""The secret that a MAC under an unknown Key ID is computed with, for it to take as long; it proves nothing."""

_Message = TypeVar("_Message", Hello, HelloAck)


@dataclass(frozen=True, slots=True)
class Nonces:
    """Of the connection data of both sides (profile 3), fresh for each connection."""

    initiator: bytes
    target: bytes


def sign_hello(hello: Hello, key: Key, nonces: Nonces) -> bytes:
    """`hello` packed, with AUTH. Raises `ApiMisuse` as `Hello.pack` does."""
    return sign_hello_octets(_with_room(hello, key).pack(), key, nonces)


def sign_hello_octets(unsigned: bytes, key: Key, nonces: Nonces) -> bytes:
    """The same of a HELLO that is packed already, well formed or not: it ends with an AUTH whose MAC is zero."""
    return unsigned[:-AUTH_MAC_BYTES] + _mac(key.secret, _HELLO_LABEL, nonces, unsigned)


def sign_hello_ack(ack: HelloAck, key: Key, nonces: Nonces, hello: bytes) -> bytes:
    """`ack` packed, with AUTH. `hello` is the HELLO as it came."""
    return sign_hello_ack_octets(_with_room(ack, key).pack(), key, nonces, hello)


def sign_hello_ack_octets(unsigned: bytes, key: Key, nonces: Nonces, hello: bytes) -> bytes:
    """The same of a HELLO_ACK that is packed already, well formed or not: it ends with an AUTH whose MAC is zero."""
    return unsigned[:-AUTH_MAC_BYTES] + _mac(key.secret, _HELLO_ACK_LABEL, nonces, hello, unsigned)


def key_of_hello(hello: Octets, auth: Auth | None, keys: Keys, nonces: Nonces) -> Key | None:
    """The key that the HELLO in `hello`, whose AUTH is `auth`, was signed with; None if it was with none of `keys`.

    An unknown Key ID and a wrong MAC take the same time.
    """
    if auth is None:
        return None
    key = keys.get(auth.key_id)
    secret = _NO_KEY if key is None else key.secret
    right = hmac.compare_digest(auth.mac, _mac(secret, _HELLO_LABEL, nonces, with_zero_mac(hello)))
    return key if right else None


def check_hello_ack(ack: Octets, auth: Auth | None, key: Key, nonces: Nonces, hello: bytes) -> None:
    """Raises `WireFormatError` unless the HELLO_ACK in `ack`, whose AUTH is `auth`, was signed with `key`."""
    if auth is None:
        raise WireFormatError("auth", "HELLO_ACK has no AUTH: the target does not prove that it has the key")
    right = hmac.compare_digest(auth.mac, _mac(key.secret, _HELLO_ACK_LABEL, nonces, hello, with_zero_mac(ack)))
    if auth.key_id != key.key_id or not right:
        raise WireFormatError("auth", "the MAC of HELLO_ACK is wrong: the target does not prove that it has the key")


def _with_room(message: _Message, key: Key) -> _Message:
    return replace(message, auth=Auth(key.key_id, bytes(AUTH_MAC_BYTES)))


def _mac(secret: bytes, label: bytes, nonces: Nonces, *messages: Octets) -> bytes:
    return hmac.digest(secret, b"".join((label, nonces.initiator, nonces.target, *messages)), "sha256")
