"""The plans that need the index alone: what is there, deleting, pins."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kbtp.cache.outcomes import DELETED, MISS, UNAVAILABLE, Item, Outcome
from kbtp.cache.record import Record
from kbtp.cache.state import State, gone_letter
from kbtp.cache.steps import Discard, Entry, IndexUnavailable, ListTargets, Pin, Plan, Scan, Tell, Unpin
from kbtp.cache.upkeep import free_orphans


@dataclass(slots=True, eq=False)
class Named:
    """One key. `item` is None until it is known how it ends."""

    name: bytes
    item: Item | None = None


def contains_many(state: State, wanted: Sequence[Named], now_s: float) -> Plan[None]:
    """Whether there is a record whose target lives. That its blocks are still there a get alone can tell."""
    asked = [one for one in wanted if one.item is None]
    try:
        records = yield from _records(state, asked, now_s)
    except IndexUnavailable as error:
        state.index_failed(error)
        records = [None] * len(asked)
    for one, record in zip(asked, records, strict=True):
        one.item = MISS if record is None else Item(Outcome.HIT, record.length_bytes)


def _records(state: State, asked: Sequence[Named], now_s: float) -> Plan[list[Record | None]]:
    """The record of each that is on a living target."""
    if not asked:
        return []
    looked = yield state.lookup([one.name for one in asked])
    state.saw_life(looked.life)
    records = [None if octets is None else state.parsed(octets) for octets in looked.records]
    if state.targets_are_old(now_s):
        state.saw_targets((yield ListTargets()), now_s)
    return [
        record
        if record is not None
        and (not record.copies or any(copy.incarnation in state.targets for copy in record.copies))
        else None
        for record in records
    ]


def delete_many(state: State, named: Sequence[Named]) -> Plan[None]:
    asked = [one for one in named if one.item is None]
    try:
        records = yield Discard([one.name for one in asked])
        gone: list[Entry] = []
        for one, octets in zip(asked, records, strict=True):
            one.item = MISS if octets is None else DELETED
            if octets:
                gone.append((one.name, octets))
        yield from _gone(state, gone)
    except IndexUnavailable as error:
        state.index_failed(error)
        for one in asked:
            one.item = one.item or UNAVAILABLE


def clear(state: State) -> Plan[int]:
    """Remove every record of the namespace; how many. Raises `IndexUnavailable`."""
    count, cursor, begun = 0, 0, False
    while cursor or not begun:
        begun = True
        cursor, entries = yield Scan(state.identity.fingerprint, cursor)
        removed = yield Discard([name for name, _ in entries])
        gone = [(name, octets) for (name, _), octets in zip(entries, removed, strict=True) if octets is not None]
        count += len(gone)
        yield from _gone(state, gone)
    return count


def _gone(state: State, entries: Sequence[Entry]) -> Plan[None]:
    """Have the blocks of these freed, whose records are removed: by their owners, where those are others."""
    letters: dict[bytes, list[bytes]] = {}
    for name, octets in state.all_lost(entries):
        record = state.parsed(octets)
        if record is not None and record.owner != state.owner:
            letters.setdefault(record.owner, []).append(gone_letter(name, octets))
    for owner, told in letters.items():
        yield Tell(owner, told)
    yield from free_orphans(state)


def pin_many(state: State, named: Sequence[Named], seconds: float) -> Plan[None]:
    asked = [one for one in named if one.item is None]
    try:
        pinned = yield Pin([one.name for one in asked], state.owner, max(1, round(seconds * 1000)))
    except IndexUnavailable as error:
        state.index_failed(error)
        pinned = [False] * len(asked)
    for one, is_pinned in zip(asked, pinned, strict=True):
        one.item = Item(Outcome.HIT) if is_pinned else MISS


def unpin_many(state: State, named: Sequence[Named]) -> Plan[None]:
    asked = [one for one in named if one.item is None]
    try:
        yield Unpin([one.name for one in asked], state.owner)
    except IndexUnavailable as error:
        state.index_failed(error)  # the pins end with their deadline
    for one in asked:
        one.item = Item(Outcome.HIT)
