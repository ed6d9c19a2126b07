"""What a caller decides about a cache, the same for threads and for asyncio."""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Sequence
from dataclasses import dataclass, replace
from numbers import Integral, Real
from types import NoneType
from typing import Any

from kbtp import limits
from kbtp.address import Address
from kbtp.cache.eviction import DEFAULT_POLICY
from kbtp.cache.keys import Names
from kbtp.cache.requests import checked_s
from kbtp.cache.state import Identity, State
from kbtp.cache.values import PutOptions
from kbtp.errors import ApiMisuse
from kbtp.initiator.session import InitiatorConfig
from kbtp.keys import Key

# Each option may come from a configuration file: what it may be, and what to say that it is.
_KINDS: dict[str, tuple[Any, str]] = {
    "namespace": ((str, bytes), "text or octets"),
    "writer": ((str, bytes, NoneType), "text or octets, or None"),
    "read_only": (bool, "true or false"),
    "key": ((Key, NoneType), "what kbtp.key_file.read_key returns, or None"),
    "quota": (Integral, "a whole number"),
    "copies": (Integral, "a whole number"),
    "ttl_s": ((Real, NoneType), "a number, or None"),
    "eviction": (str, "text"),
    "targets": ((Sequence, NoneType), "a list of URLs, or None"),
    "timeout_s": (Real, "a number"),
    "connect_timeout_s": (Real, "a number"),
}


@dataclass(frozen=True, slots=True)
class CacheSettings:
    """Raises `ApiMisuse` for what cannot work.

    namespace: a fingerprint of all that must be equal for a value to be of use: model, dtype, layout, tensor parallel
        rank. Equal keys of different namespaces have nothing to do with each other.
    writer: whose blocks they are. A name makes them outlive this process by the target's linger time, and its next
        process has them back; two processes must not use one name at a time. None: a name of its own that nobody knows.
    read_only: takes no share of any target; puts are refused.
    key: what to authenticate with at targets that have keys. Caches of different trust domains need different
        namespaces: one cannot load what another has put.
    quota: blocks this writer may hold on each target; 0 takes the target's default.
    copies: on how many targets each value is put.
    ttl_s: how long values last unless a put says otherwise; None: until they are evicted.
    targets: URLs of the targets, if they do not announce themselves in the index.
    """

    namespace: str | bytes = b""
    writer: str | bytes | None = None
    read_only: bool = False
    key: Key | None = None
    quota: int = 0
    copies: int = 1
    ttl_s: float | None = None
    eviction: str = DEFAULT_POLICY
    targets: Sequence[str] | None = None
    timeout_s: float = limits.CACHE_TIMEOUT_S
    connect_timeout_s: float = limits.CACHE_CONNECT_TIMEOUT_S

    def __post_init__(self) -> None:
        for option, (kinds, expected) in _KINDS.items():
            value = getattr(self, option)
            if not isinstance(value, kinds) or (isinstance(value, bool) and kinds is not bool):
                shown = f"type {type(value).__name__}" if option == "key" else repr(value)  # it may be the secret
                raise ApiMisuse(f"{option} of {shown}: expected {expected}")
        for option, low, high in (("quota", 0, (1 << 32) - 1), ("copies", 1, limits.CACHE_COPIES_MAX)):
            if not low <= getattr(self, option) <= high:
                raise ApiMisuse(f"{option} of {getattr(self, option)}: expected {low} to {high}")
        for option in ("timeout_s", "connect_timeout_s"):
            if not 0 < getattr(self, option) <= limits.CACHE_TIMEOUT_MAX_S:
                at_most = f"{limits.CACHE_TIMEOUT_MAX_S:g} at most"
                raise ApiMisuse(f"{option} of {getattr(self, option)}: expected more than 0, and {at_most}")
        self._check_targets()
        self.put_options(None)

    def _check_targets(self) -> None:
        if isinstance(self.targets, str | bytes):  # a sequence too, of letters
            raise ApiMisuse(f"targets of {self.targets!r}: expected {_KINDS['targets'][1]}")
        for url in self.targets or ():
            if not isinstance(url, str):
                raise ApiMisuse(f"targets of {url!r}: expected a URL, kbtp://HOST[:PORT], for each")
            try:
                Address.parse(url)
            except ApiMisuse as error:
                raise ApiMisuse(f"targets: {error}") from None

    def check_writes(self) -> None:
        """Raises `ApiMisuse` if this is a reader."""
        if self.read_only:
            raise ApiMisuse("this cache was opened read_only: it puts nothing")

    def names(self) -> Names:
        return Names(self.namespace)

    def put_options(self, ttl_s: float | None) -> PutOptions:
        chosen_s = self.ttl_s if ttl_s is None else ttl_s
        if chosen_s is not None:
            checked_s("ttl_s of", chosen_s)
        return PutOptions(chosen_s, self.copies)

    def state(self) -> State:
        if self.writer is None:
            owner = secrets.token_bytes(limits.INITIATOR_ID_BYTES)
        else:
            writer = self.writer.encode() if isinstance(self.writer, str) else self.writer
            said = b"kbtp cache writer" + self.names().fingerprint + writer
            owner = hashlib.blake2b(said, digest_size=limits.INITIATOR_ID_BYTES).digest()
        return State(Identity(owner, self.names().fingerprint, writes=not self.read_only), self.eviction)

    def session_configs(self, owner: bytes) -> list[InitiatorConfig]:
        """How to ask a target for a session: if it has no room for a writer, as a reader."""
        namespace = self.names().namespace or None
        reader = InitiatorConfig(name="kbtp cache reader", namespace=namespace, key=self.key, handles=1)
        if self.read_only:
            return [replace(reader, quota=1), reader]  # not the default quota, which others may want
        writer = InitiatorConfig(
            initiator_id=owner, quota=self.quota, name="kbtp cache", namespace=namespace, key=self.key
        )
        return [writer, reader]
