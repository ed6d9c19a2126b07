"""Keys: who may open a session, in which trust domain, and which direct modes it may use (profile 3, 4).

As text, for a file, one key a line; blank lines and those that begin with `#` say nothing:

    KEY-ID SECRET [domain=NAME] [direct=MODES]

| field | value |
|---|---|
| KEY-ID | 8 hexadecimal digits, each ID once |
| SECRET | 64 to 128 hexadecimal digits: 32 to 64 random octets |
| NAME | the trust domain, 1 to 64 of `A-Z a-z 0-9 . _ -`; without it `default` |
| MODES | `none`, `load`, `alloc` or `load,alloc`: what a target that offers direct modes grants it; without it `none` |

The target's file has all keys, an initiator's file its own one, whose domain and modes are the target's to judge.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field

from kbtp.errors import ApiMisuse
from kbtp.limits import (
    KEY_ID_MAX,
    KEY_SECRET_MAX_BYTES,
    KEY_SECRET_MIN_BYTES,
    TRUST_DOMAIN_MAX_BYTES,
)
from kbtp.types import DIRECT_MODES, Feature

DEFAULT_DOMAIN = "default"
"""The trust domain of sessions that authenticated with no key, and of keys that name none (profile 3)."""

_DIRECT_BY_NAME = {"load": Feature.DIRECT_LOAD, "alloc": Feature.DIRECT_ALLOC}
_KEY_ID = re.compile(r"[0-9a-fA-F]{8}")
_SECRET = re.compile(r"(?:[0-9a-fA-F]{2})+")
_DOMAIN = re.compile(rf"[A-Za-z0-9._-]{{1,{TRUST_DOMAIN_MAX_BYTES}}}")


@dataclass(frozen=True, slots=True)
class Key:
    """One key. Its `repr` has no secret. Raises `ApiMisuse` for values that a keys file cannot have."""

    key_id: int
    secret: bytes = field(repr=False)
    domain: str = DEFAULT_DOMAIN
    direct: Feature = Feature.NONE

    def __post_init__(self) -> None:
        if not 0 <= self.key_id <= KEY_ID_MAX:
            raise ApiMisuse(f"Key ID {self.key_id}: 32 bits expected")
        if not KEY_SECRET_MIN_BYTES <= len(self.secret) <= KEY_SECRET_MAX_BYTES:
            raise ApiMisuse(
                f"the secret has {len(self.secret)} octets: {KEY_SECRET_MIN_BYTES} to {KEY_SECRET_MAX_BYTES} expected"
            )
        if _DOMAIN.fullmatch(self.domain) is None:
            raise ApiMisuse(
                f"trust domain {self.domain!r}: 1 to {TRUST_DOMAIN_MAX_BYTES} of A-Z a-z 0-9 . _ - expected"
            )
        if self.direct & ~DIRECT_MODES:
            raise ApiMisuse(f"direct modes {self.direct!r}: DIRECT_LOAD and DIRECT_ALLOC expected")

    @property
    def name(self) -> str:
        """The Key ID as files and people write it."""
        return f"{self.key_id:08x}"

    @property
    def line(self) -> str:
        """As a keys file has it, with the secret."""
        return f"{self.name} {self.secret.hex()} domain={self.domain} direct={direct_text(self.direct)}"


@dataclass(frozen=True, slots=True)
class Keys:
    """The keys of a target, none or more. Raises `ApiMisuse` for two with one ID."""

    keys: tuple[Key, ...] = ()
    _by_id: dict[int, Key] = field(init=False, repr=False, compare=False, default_factory=dict)

    def __post_init__(self) -> None:
        for key in self.keys:
            if key.key_id in self._by_id:
                raise ApiMisuse(f"Key ID {key.name} is there twice; give each key an ID of its own")
            self._by_id[key.key_id] = key

    def __len__(self) -> int:
        return len(self.keys)

    def __iter__(self) -> Iterator[Key]:
        return iter(self.keys)

    def get(self, key_id: int) -> Key | None:
        return self._by_id.get(key_id)

    @property
    def domains(self) -> frozenset[str]:
        return frozenset(key.domain for key in self.keys)


def parse_keys(text: str) -> Keys:
    """The keys in the text of a file. Raises `ApiMisuse` naming the line, and never what may be a secret."""
    keys: list[Key] = []
    lines: dict[int, int] = {}
    for number, line in enumerate(text.splitlines(), 1):
        words = line.split()
        if words and not words[0].startswith("#"):
            try:
                key = _parse_key(words)
            except ApiMisuse as error:
                raise ApiMisuse(f"line {number}: {error}") from None
            first = lines.setdefault(key.key_id, number)
            if first != number:
                raise ApiMisuse(f"line {number}: Key ID {key.name} is there twice, first on line {first}; remove one")
            keys.append(key)
    return Keys(tuple(keys))


def _parse_key(words: list[str]) -> Key:
    if _KEY_ID.fullmatch(words[0]) is None:
        raise ApiMisuse("a Key ID of 8 hexadecimal digits is expected first")
    if len(words) < 2 or _SECRET.fullmatch(words[1]) is None:
        raise ApiMisuse("a secret in hexadecimal digits is expected after the Key ID")
    fields = {"domain": DEFAULT_DOMAIN, "direct": "none"}
    given = set()
    for word in words[2:]:
        name, equals, value = word.partition("=")
        if not equals or name not in fields or name in given:
            raise ApiMisuse("only domain=NAME and direct=MODES are expected after the secret, each once")
        given.add(name)
        fields[name] = value
    return Key(int(words[0], 16), bytes.fromhex(words[1]), fields["domain"], parse_direct(fields["direct"]))


def parse_direct(text: str) -> Feature:
    """`load`, `alloc` or `load,alloc`; none of them for `none` and for nothing. Raises `ApiMisuse`."""
    names = [name.strip() for name in text.split(",")] if isinstance(text, str) else []
    if names in ([""], ["none"]):
        return Feature.NONE
    if not names or not all(name in _DIRECT_BY_NAME for name in names):
        raise ApiMisuse(f"direct modes {text!r}: none, load, alloc or load,alloc expected")
    direct = Feature.NONE
    for name in names:
        direct |= _DIRECT_BY_NAME[name]
    return direct


def direct_text(direct: Feature) -> str:
    """The reverse of `parse_direct`."""
    return ",".join(name for name, mode in _DIRECT_BY_NAME.items() if direct & mode) or "none"
