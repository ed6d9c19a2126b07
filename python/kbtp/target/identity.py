"""Who owns which handles, quota and bound blocks, and for how long (profile 3 "Identity", 8.4).

An identity is the pair (trust domain, Initiator ID). It outlives its stream by the linger time; an
anonymous initiator is an identity of its own that ends with its stream.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

from kbtp.blocks import Entry, HandleRange
from kbtp.blocks.owner import BlockOwner
from kbtp.limits import INITIATOR_ID_BYTES
from kbtp.target.config import TargetConfig
from kbtp.types import BlockOffset, Status
from kbtp.wire import Hello

ANONYMOUS = bytes(INITIATOR_ID_BYTES)


@dataclass(slots=True, eq=False)
class Identity:
    """One owner of a handle range and a quota. Compared and hashed by being itself."""

    domain: str
    initiator_id: bytes
    handles: HandleRange = field(init=False)
    quota: int = field(init=False)
    live: bool = True
    expires_at_s: float | None = None
    leaving: bool = False
    """Its blocks are being freed; range and quota return when the last of them has been."""

    @property
    def anonymous(self) -> bool:
        return self.initiator_id == ANONYMOUS


@dataclass(frozen=True, slots=True)
class Admission:
    """What a HELLO got: its identity, and whether that existed before (RESUMED)."""

    identity: Identity
    resumed: bool


class Identities:
    """All identities of one incarnation, live, lingering and leaving."""

    def __init__(
        self,
        config: TargetConfig,
        store: BlockOwner,
        watch_free: Callable[[BlockOffset], None],
        free_done: Callable[[BlockOffset], None],
    ) -> None:
        """`watch_free` is told of each block whose return to the ring waits for LOADs (profile 6.1), `free_done` when
        it has returned."""
        self._config = config
        self._store = store
        self._watch_free = watch_free
        self._free_done = free_done
        self._by_key: dict[tuple[str, bytes], Identity] = {}
        self._lingering: set[Identity] = set()

    def live(self, domain: str, initiator_id: bytes) -> Identity | None:
        """The identity, if a session has it now."""
        known = self._by_key.get((domain, initiator_id))
        return known if known is not None and known.live else None

    def admit(self, domain: str, hello: Hello, *, direct_alloc: bool = False) -> Admission | Status:
        """Resume or create the identity of a HELLO that passed every other check (profile 8.1, 8.4).

        `direct_alloc`: a new one gets its quota as a partition of its own, if there is room.
        """
        known = self._by_key.get((domain, hello.initiator_id))
        if known is not None:
            if known.live:  # profile 3: without keys a live session is not replaced
                return Status.ACCESS_DENIED
            known.live, known.expires_at_s = True, None
            self._lingering.discard(known)
            return Admission(known, resumed=True)
        return self._create(domain, hello, direct_alloc)

    def _create(self, domain: str, hello: Hello, direct_alloc: bool) -> Admission | Status:
        store = self._store
        identity = Identity(domain, hello.initiator_id)
        identity.quota = self._grant_quota(identity, hello.requested_quota, direct_alloc)
        if hello.requested_quota and not identity.quota:
            self._give_back_quota(identity)
            return Status.NO_SPACE
        handles = store.assign_range(hello.requested_handles or self._config.default_handles(identity.quota), domain)
        if handles is None:
            self._give_back_quota(identity)
            return Status.NO_SPACE
        identity.handles = handles
        if not identity.anonymous:
            self._by_key[domain, hello.initiator_id] = identity
        return Admission(identity, resumed=False)

    def _grant_quota(self, identity: Identity, requested: int, direct_alloc: bool) -> int:
        """Profile 8.4: all of it in a partition, else what the shared ring or partitions have left, what is more."""
        config, store = self._config, self._store
        if direct_alloc:
            wanted = min(requested or config.default_direct_quota, config.quota_cap)
            if store.open_partition(identity, wanted) is not None:
                return wanted
        wanted = min(requested or config.default_quota, config.quota_cap)
        left = min(wanted, store.largest_partition)
        if direct_alloc and left > store.quotas.left and store.open_partition(identity, left) is not None:
            return left
        return store.quotas.grant(identity, wanted)

    def ensure_partition(self, identity: Identity) -> bool:
        """Whether `identity`, new or resumed, may allocate directly: it has a partition, or has bound nothing and there
        is one of the size of its quota (profile 6.10)."""
        store = self._store
        if store.partition_of(identity) is not None:
            return True  # its one ring: all that it has bound came from there
        unused = identity.quota > 0 and not store.quotas.usage(identity)
        return unused and store.open_partition(identity, identity.quota) is not None

    def _give_back_quota(self, identity: Identity) -> None:
        if self._store.partition_of(identity) is not None:
            self._store.close_partition(identity)
        else:
            self._store.quotas.release(identity)

    def depart(self, identity: Identity, now_s: float) -> None:
        """The stream of `identity` has ended and all its requests are resolved (profile 3 "End of a stream")."""
        identity.live = False
        if identity.anonymous or self._config.linger_s == 0:
            self._leave(identity)
        else:
            identity.expires_at_s = now_s + self._config.linger_s
            self._lingering.add(identity)

    def expire(self, now_s: float) -> None:
        """Free what belonged to identities whose linger time is over."""
        for identity in [one for one in self._lingering if _expiry_s(one) <= now_s]:
            self._lingering.discard(identity)
            self._leave(identity)

    def next_deadline_s(self) -> float:
        return min(map(_expiry_s, self._lingering), default=math.inf)

    def _leave(self, identity: Identity) -> None:
        identity.leaving = True
        self._by_key.pop((identity.domain, identity.initiator_id), None)
        for handle in self._store.bound_handles(identity.handles):
            block_offset = self._store.read(handle).block_offset
            if not self._store.begin_free(handle, identity, partial(self._left, identity, block_offset)):
                self._watch_free(block_offset)
        self.freed(identity)

    def _left(self, identity: Identity, block_offset: BlockOffset, _entry: Entry) -> None:
        self._free_done(block_offset)
        self.freed(identity)

    def freed(self, identity: Identity) -> None:
        """To be called after each block of `identity` that was freed: the last one of a leaving identity ends it."""
        if not identity.leaving or self._store.quotas.usage(identity):
            return
        identity.leaving = False
        self._give_back_quota(identity)
        self._store.release_range(identity.handles)


def _expiry_s(identity: Identity) -> float:
    return math.inf if identity.expires_at_s is None else identity.expires_at_s
