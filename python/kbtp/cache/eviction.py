"""Which value goes when there is no room. No I/O, no clock; which of them to use is told in docs/cache.md.

A policy holds names. What is read or put together is counted from its end to its beginning, since a prefix is worth
nothing without what it begins with: that is for the caller to do.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable
from typing import Protocol

from kbtp.errors import ApiMisuse


class Policy(Protocol):
    """Names of values, the next victim among them."""

    def add(self, name: bytes) -> None:
        """A new value; counts as a use if it is there already."""

    def add_all(self, names: Iterable[bytes]) -> None:
        """As `add` of each, in order."""

    def used(self, name: bytes) -> None:
        """Nothing if it is not there."""

    def used_all(self, names: Iterable[bytes]) -> None:
        """As `used` of each, in order."""

    def remove(self, name: bytes) -> None:
        """It went without being a victim. Nothing if it is not there."""

    def remove_all(self, names: Iterable[bytes]) -> None: ...

    def victim(self) -> bytes | None:
        """The value that goes next, no longer held; None if there is none."""

    def __len__(self) -> int: ...


class Lru:
    """The least recently used goes."""

    def __init__(self) -> None:
        self._order: OrderedDict[bytes, None] = OrderedDict()

    def add(self, name: bytes) -> None:
        self._order[name] = None
        self._order.move_to_end(name)

    def add_all(self, names: Iterable[bytes]) -> None:
        order, move_to_end = self._order, self._order.move_to_end
        for name in names:
            order[name] = None
            move_to_end(name)

    def used(self, name: bytes) -> None:
        if name in self._order:
            self._order.move_to_end(name)

    def used_all(self, names: Iterable[bytes]) -> None:
        order, move_to_end = self._order, self._order.move_to_end
        for name in names:
            if name in order:
                move_to_end(name)

    def remove(self, name: bytes) -> None:
        self._order.pop(name, None)

    def remove_all(self, names: Iterable[bytes]) -> None:
        pop = self._order.pop
        for name in names:
            pop(name, None)

    def victim(self) -> bytes | None:
        return self._order.popitem(last=False)[0] if self._order else None

    def __len__(self) -> int:
        return len(self._order)


class S3Fifo:
    """Three queues (Yang et al., SOSP 2023): most values are used once and leave by the small one.

    What is used while in the small queue goes on to the main one; names that left the small one are remembered, and
    return to the main one. A value of the main queue goes round once more for each use, up to three.
    """

    SMALL_PART = 0.1
    USES_MAX = 3

    def __init__(self) -> None:
        self._small: OrderedDict[bytes, int] = OrderedDict()
        self._main: OrderedDict[bytes, int] = OrderedDict()
        self._ghosts: OrderedDict[bytes, None] = OrderedDict()

    def add(self, name: bytes) -> None:
        if name in self._small or name in self._main:
            self.used(name)
        elif name in self._ghosts:
            del self._ghosts[name]
            self._main[name] = 0
        else:
            self._small[name] = 0

    def add_all(self, names: Iterable[bytes]) -> None:
        for name in names:
            self.add(name)

    def used(self, name: bytes) -> None:
        for queue in (self._small, self._main):
            if name in queue:
                queue[name] = min(self.USES_MAX, queue[name] + 1)

    def used_all(self, names: Iterable[bytes]) -> None:
        for name in names:
            self.used(name)

    def remove(self, name: bytes) -> None:
        self._small.pop(name, None)
        self._main.pop(name, None)

    def remove_all(self, names: Iterable[bytes]) -> None:
        for name in names:
            self.remove(name)

    def victim(self) -> bytes | None:
        held = len(self)
        while self._small and (not self._main or len(self._small) >= max(1, self.SMALL_PART * held)):
            name, uses = self._small.popitem(last=False)
            if not uses:
                self._remember(name, held)
                return name
            self._main[name] = 0
        while self._main:
            name, uses = self._main.popitem(last=False)
            if not uses:
                return name
            self._main[name] = uses - 1
        return None

    def _remember(self, name: bytes, held: int) -> None:
        self._ghosts[name] = None
        while len(self._ghosts) > held * (1 - self.SMALL_PART):
            self._ghosts.popitem(last=False)

    def __len__(self) -> int:
        return len(self._small) + len(self._main)


POLICIES: dict[str, Callable[[], Policy]] = {"lru": Lru, "s3-fifo": S3Fifo}
DEFAULT_POLICY = "lru"


def policy_named(name: str) -> Policy:
    """Raises `ApiMisuse`."""
    if name not in POLICIES:
        raise ApiMisuse(f"eviction {name!r}: one of {', '.join(POLICIES)} expected")
    return POLICIES[name]()
