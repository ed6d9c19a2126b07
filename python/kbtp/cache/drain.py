"""Leaving a target: a mark in the index, and the records that name it removed, of every namespace."""

from __future__ import annotations

from kbtp.cache.index import Index
from kbtp.cache.record import BadRecord, Record
from kbtp.cache.state import gone_letter
from kbtp.cache.steps import Drain, Entry, ListTargets, Remove, Scan, Tell
from kbtp.errors import ApiMisuse


def drain_target(index: Index, url: str, *, undo: bool = False) -> int:
    """How many records were removed. Raises `ApiMisuse` if there is no such target, `IndexUnavailable`."""
    targets = index.perform(ListTargets())
    chosen = [target.incarnation for target in targets if target.url == url]
    if not chosen:
        there = ", ".join(target.url for target in targets) or "none"
        raise ApiMisuse(f"no target announces itself as {url}; there are: {there}")
    removed = 0
    for incarnation in chosen:
        index.perform(Drain(incarnation, undo))
        if not undo:
            removed += _remove_records(index, incarnation)
    return removed


def _remove_records(index: Index, incarnation: int) -> int:
    count, cursor, begun = 0, 0, False
    while cursor or not begun:
        begun = True
        cursor, entries = index.perform(Scan(b"", cursor))
        leaving = [entry for entry in entries if _names(entry, incarnation)]
        index.perform(Remove(leaving))
        for name, octets in leaving:
            index.perform(Tell(Record.parse(octets).owner, [gone_letter(name, octets)]))
        count += len(leaving)
    return count


def _names(entry: Entry, incarnation: int) -> bool:
    try:
        record = Record.parse(entry[1])
    except BadRecord:
        return False  # a later version's: for that one to leave
    return any(copy.incarnation == incarnation for copy in record.copies)
