"""Which targets a key belongs on: rendezvous hashing, so that one target more or less moves its own share only."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable

from kbtp.cache.announcement import Announcement

_DRAW_BITS = 64


def placement(name: bytes, targets: Iterable[Announcement]) -> list[Announcement]:
    """All of `targets`, the one that `name` belongs on first; a pool of twice as many octets draws twice as often."""
    known = list(targets)
    if len(known) <= 1:
        return known
    return sorted(known, key=lambda target: (_score(name, target), target.incarnation))


def _score(name: bytes, target: Announcement) -> float:
    drawn = hashlib.blake2b(name, digest_size=8, key=target.incarnation.to_bytes(8, "big")).digest()
    part = (int.from_bytes(drawn, "big") + 0.5) / (1 << _DRAW_BITS)
    return -math.log(part) / target.pool_bytes
