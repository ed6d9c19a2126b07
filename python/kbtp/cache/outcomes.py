"""What became of each item of a call."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from enum import Enum

from kbtp.errors import ApiMisuse


class Outcome(Enum):
    """`Item.ok` is True for those marked with *."""

    HIT = "hit"
    """* The value is in the buffer; or there is one (contains, pin)."""
    MISS = "miss"
    """There is no value, or none that can be had: what is in the buffer is undefined."""
    STORED = "stored"
    """* The value is in the cache."""
    PRESENT = "present"
    """* There is a value under this key already; this one was not stored."""
    DELETED = "deleted"
    """* There was a value."""
    NO_SPACE = "no space"
    """It does not fit into this writer's share, or all that could make room is pinned."""
    UNAVAILABLE = "unavailable"
    """Not stored: no index or no target answers."""
    INVALID = "invalid"
    """The key or the buffer cannot be used; `Item.error` says why."""


_GOOD = frozenset((Outcome.HIT, Outcome.STORED, Outcome.PRESENT, Outcome.DELETED))


@dataclass(frozen=True, slots=True)
class Item:
    """How one item ended. `length_bytes` is the value's, also when a buffer was too small for it."""

    outcome: Outcome
    length_bytes: int = 0
    error: ApiMisuse | None = None

    @property
    def ok(self) -> bool:
        return self.outcome in _GOOD


MISS = Item(Outcome.MISS)
DELETED = Item(Outcome.DELETED)
UNAVAILABLE = Item(Outcome.UNAVAILABLE)
NO_SPACE = Item(Outcome.NO_SPACE)


def all_ok(items: Iterable[Item]) -> bool:
    return all(item.ok for item in items)


def ended(item: Item | None) -> Item:
    """What a plan has left behind, which is never nothing."""
    assert item is not None
    return item


def valid(item: Item) -> Item:
    """Raises what is wrong with an `INVALID` one: single forms do."""
    if item.error is not None:
        raise item.error
    return item


@dataclass(slots=True)
class Counters:
    """What a cache has seen since it was opened. Blocks and octets are of values that were stored or loaded whole."""

    hits: int = 0
    misses: int = 0
    stored: int = 0
    present: int = 0
    no_space: int = 0
    unavailable: int = 0
    evictions: int = 0
    stale_records: int = 0
    corrupt_values: int = 0
    bad_records: int = 0
    index_failures: int = 0
    target_failures: int = 0
    announced_again: int = 0
    bytes_loaded: int = 0
    bytes_stored: int = 0
    sessions: dict[str, int] = field(default_factory=dict)
    """By target, how often a session with it was opened."""

    def as_dict(self) -> dict[str, object]:
        return asdict(self)
