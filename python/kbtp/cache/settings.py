"""What a caller decides about a cache, the same for threads and for asyncio."""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Sequence
from dataclasses import dataclass, replace

from kbtp import limits
from kbtp.cache.eviction import DEFAULT_POLICY
from kbtp.cache.keys import Names
from kbtp.cache.put import PutOptions
from kbtp.cache.requests import checked_s
from kbtp.cache.state import Identity, State
from kbtp.errors import ApiMisuse
from kbtp.initiator.session import InitiatorConfig
from kbtp.keys import Key


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
        if not 1 <= self.copies <= limits.CACHE_COPIES_MAX:
            raise ApiMisuse(f"{self.copies} copies: 1 to {limits.CACHE_COPIES_MAX} are possible")
        self.put_options(None)

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
