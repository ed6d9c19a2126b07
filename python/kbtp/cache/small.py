"""Values of one block each, all new, on the one target there is: what most puts are of, with as little as can be done.

Before the blocks are sent is only what decides whether they may be; what need not wait for the index is made while it
is asked. Whatever else happens than that all goes well is for the plan of any put (`put.py`).
"""

from __future__ import annotations

from collections.abc import Sequence

from kbtp.cache.outcomes import Item, Outcome
from kbtp.cache.record import Copy, Record, pack_small
from kbtp.cache.remembered import COUNT_OF_ONE_BLOCK, Known
from kbtp.cache.share import Held, Share
from kbtp.cache.state import State
from kbtp.cache.steps import Entry
from kbtp.initiator.batches import Results
from kbtp.limits import CACHE_CLAIM_MAX_BYTES
from kbtp.types import BlockRef
from kbtp.verbs.requester import NO_CHECKSUM


class Small:
    """Some values, for which blocks of `share` are reserved in its session `number`."""

    __slots__ = (
        "_held",
        "_items",
        "_known",
        "_refs",
        "_rows",
        "entries",
        "lengths_bytes",
        "names",
        "number",
        "owner",
        "share",
        "views",
    )

    def __init__(self, owner: bytes, share: Share, names: Sequence[bytes], views: Sequence[memoryview]) -> None:
        self.owner = owner
        self.share = share
        self.number = share.number
        self.names = names
        self.views = views
        self.lengths_bytes = [len(view) for view in views]
        self.entries: Sequence[Entry] = ()
        """Once all are stored."""
        self._rows: Sequence[tuple[int, int, int, int, int, int]] = ()
        self._items: list[Item] = []
        self._refs: list[BlockRef] = []
        self._held: dict[bytes, Held] = {}
        self._known: dict[bytes, Known] = {}

    @classmethod
    def reserved(cls, state: State, names: Sequence[bytes], views: Sequence[memoryview], now_s: float) -> Small | None:
        """None, and nothing reserved, if they are not such values, or are not likely to be new."""
        # One of them twice is for the plan of any put: both may turn out to be first, if it is deleted in between.
        if len(state.targets) != 1 or not 0 < len(names) == len(set(names)) or not state.may_claim(names, now_s):
            return None
        [target] = state.targets.values()
        share = state.shares.get(target.incarnation)
        if share is None or not share.settled or target.draining or len(names) > share.room_blocks:
            return None
        small = cls(state.owner, share, names, views)
        lengths_bytes = small.lengths_bytes
        if not 0 < min(lengths_bytes) <= max(lengths_bytes) <= share.block_bytes:
            return None
        if sum(lengths_bytes) > CACHE_CLAIM_MAX_BYTES:
            return None
        share.reserve(len(names))
        return small

    def are_stored(self, results: Results | None) -> bool:
        """Whether all blocks are sealed and their checksums known; then there are `entries`."""
        if results is None or not results.ok:
            return False
        rows = results.rows
        checksums = [row[5] for row in rows]
        if NO_CHECKSUM in checksums:
            return False
        share = self.share
        records = pack_small(self.owner, share.block_bytes, share.incarnation, self.lengths_bytes, rows)
        self.entries = list(zip(self.names, records, strict=True))
        self._rows = rows
        return True

    def prepare(self) -> None:
        """What `held` needs, if it is not there yet. Of what others see nothing changes."""
        if self._items:
            return
        owner, incarnation, block_bytes = self.owner, self.share.incarnation, self.share.block_bytes
        held, known = {}, {}
        for (name, octets), ref, row in zip(
            reversed(self.entries), reversed(self.refs()), reversed(self._rows), strict=True
        ):  # the end of a prefix goes first
            refs = (ref,)
            record = Record(owner, ref.length_bytes, row[5], block_bytes, (Copy(incarnation, refs),))
            held[name] = Held(octets, refs)
            known[name] = (octets, record, COUNT_OF_ONE_BLOCK)
        items = {length_bytes: Item(Outcome.STORED, length_bytes) for length_bytes in self.lengths_bytes}
        self._held, self._known = held, known
        # The last: whoever was interrupted before begins anew.
        self._items = [items[length_bytes] for length_bytes in self.lengths_bytes]

    def refs(self) -> list[BlockRef]:
        if not self._refs:
            rows = self._rows
            self._refs = [
                BlockRef(row[3], row[1], length) for row, length in zip(rows, self.lengths_bytes, strict=True)
            ]
        return self._refs

    def held(self, state: State) -> list[Item]:
        """All of them are published, and are ours from now on: the items of each."""
        self.prepare()
        self.share.hold_all(self._held)
        state.remembered.keep_all(self._known)
        return self._items
