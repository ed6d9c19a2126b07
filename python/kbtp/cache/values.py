"""What a call is about: names and octets of a batch, and one value to be put until it is known how it ends."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from kbtp.cache.outcomes import Item
from kbtp.cache.record import Record
from kbtp.cache.share import Share
from kbtp.types import BlockRef

_NONE: Mapping[Share, Any] = MappingProxyType({})


class Put:
    """One value to store. `item` is None until it is known how it ends.

    What it has in common with others of its batch they share: it is replaced, and never changed.
    """

    __slots__ = ("checksum", "item", "name", "owner", "record", "refs", "said", "sessions", "shares", "view")

    def __init__(self, name: bytes, view: memoryview, item: Item | None = None) -> None:
        self.name = name
        self.view = view
        self.item = item
        self.owner = b""
        """Of the value that is there already."""
        self.shares: Sequence[Share] = ()
        self.sessions: Mapping[Share, int] = _NONE
        """The number of the session in which there are blocks for it."""
        self.refs: Mapping[Share, tuple[BlockRef, ...]] = _NONE
        """The blocks of each copy that is whole."""
        self.checksum: int | None = None
        """CRC32c of the octets that were sent, or of `view`."""
        self.record = b""
        self.said: Record | None = None
        """What `record` says."""

    def stored_in_vain(self) -> None:
        self.__init__(self.name, self.view)  # type: ignore[misc]

    def pieces(self, block_bytes: int) -> list[memoryview]:
        return [self.view[at : at + block_bytes] for at in range(0, len(self.view), block_bytes)]


@dataclass(frozen=True, slots=True)
class Values:
    """A batch, in order: what is to be put, or where what is wanted goes."""

    names: Sequence[bytes]
    views: Sequence[memoryview]
    invalid: Mapping[int, Item] = field(default_factory=dict)
    """By place, those that can never work."""

    def puts(self) -> list[Put]:
        """One for each."""
        puts = list(map(Put, self.names, self.views))
        for place, item in self.invalid.items():
            puts[place].item = item
        return puts


@dataclass(frozen=True, slots=True)
class PutOptions:
    ttl_s: float | None = None
    copies: int = 1
