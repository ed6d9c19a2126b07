"""Plans of what has to be done besides: targets, sessions, room, records that the index has lost."""

from __future__ import annotations

from collections.abc import Container, Sequence
from itertools import islice

from kbtp import limits
from kbtp.cache.announcement import Announcement
from kbtp.cache.record import Copy
from kbtp.cache.share import Held, Share
from kbtp.cache.state import State, log
from kbtp.cache.steps import (
    Entry,
    Free,
    ListTargets,
    Load,
    LoadJob,
    Open,
    Plan,
    Publish,
    Removal,
    Remove,
    Scan,
    Session,
)
from kbtp.initiator.batches import Results
from kbtp.types import BlockRef, Handle, Status

_NOT_OURS_ANY_MORE = frozenset(
    (Status.SUCCESS, Status.NOT_BOUND, Status.GENERATION_MISMATCH, Status.HANDLE_OUT_OF_RANGE)
)


def keep_up(state: State, now_s: float) -> Plan[None]:
    """Before a put: know the targets, announce again what the index has lost, free what is to be freed."""
    if state.targets_are_old(now_s):
        state.saw_targets((yield ListTargets()), now_s)
        yield from _leave_draining(state)
    if state.must_announce:
        yield from announce_again(state, now_s)
    yield from free_orphans(state)
    if state.sweep_is_due(now_s):
        yield from sweep(state)


def remove_unsure(state: State) -> Plan[None]:
    """Before anything is looked up: records of blocks that will be freed."""
    if state.unsure:
        unsure, state.unsure = state.unsure, []
        try:
            yield Remove(unsure)
        except BaseException:
            state.unsure += unsure
            raise


def open_shares(state: State, targets: Sequence[Announcement]) -> Plan[dict[int, Share]]:
    """Have a session with each of `targets` that can be had, and settle what a former one left behind.

    The shares that can be used, by incarnation. One that another plan is about to settle is none of them yet.
    """
    if not targets:
        return {}
    sessions = yield Open(targets)
    there = {}
    for target in targets:
        session = sessions[target.incarnation]
        if session is None:
            continue
        share = there[target.incarnation] = state.share_of(target)
        share.opened(session)
        if share.is_in(session.number) and not share.settled and not share.settling:
            share.settling = True
            try:
                yield from _settle(state, share, target, session)
            finally:
                share.settling = False
    return {incarnation: share for incarnation, share in there.items() if share.settled}


def _settle(state: State, share: Share, target: Announcement, session: Session) -> Plan[None]:
    """Adopt the values of ours that are in the index, then free every other block of our range."""
    left = 0
    if session.resumed and session.bound_blocks:
        adopted = share.adopted or (yield from _adopt(state, share, target, session))
        if not adopted or not share.is_in(session.number):
            return
        left = max(0, session.bound_blocks - share.held_blocks)
        handles, tried = share.unknown_handles(), 0
        while left > 0 and tried < limits.CACHE_SETTLE_MAX_HANDLES:
            some = list(islice(handles, limits.CACHE_FREE_BATCH))
            if not some:
                left = 0  # each handle is free now, or a value's: what was counted has ended by itself
                break
            results = yield from _free(share, some)
            if results is None or not share.is_in(session.number):
                return
            tried += len(some)
            left = max(0, left - sum(1 for result in results if result.ok))
        if left:
            log.warning("%s: %d blocks of this writer's are not found; they are not used", share.url, left)
    if share.is_in(session.number):
        share.adopted = True
        share.settle(left)


def _adopt(state: State, share: Share, target: Announcement, session: Session) -> Plan[bool]:
    """What an earlier process of this writer published is ours; all of it, or False.

    Raises `IndexUnavailable`: we cannot know then.
    """
    cursor, begun = 0, False
    while cursor or not begun:
        begun = True
        cursor, entries = yield Scan(state.identity.fingerprint, cursor)
        found: list[tuple[bytes, Held]] = []
        for name, octets in entries:
            record = state.parsed(octets)
            if record is None or record.owner != state.owner or name in share:
                continue
            for copy in record.copies:
                if copy.incarnation == share.incarnation:
                    found.append((name, Held(octets, copy.refs)))
        if found and not (yield from _adopt_bound(state, share, target, session, found)):
            return False
    share.adopted = True
    log.info("%d values of this writer were in the index and are adopted", share.value_count)
    return True


def _adopt_bound(
    state: State, share: Share, target: Announcement, session: Session, found: Sequence[tuple[bytes, Held]]
) -> Plan[bool]:
    """Hold those whose blocks are all bound as recorded; False if the target did not say so of each."""
    bound = yield from _bound(target, [held.refs for _, held in found])
    if None in bound or not share.is_in(session.number):
        return False
    stale = []
    for (name, held), is_bound in zip(found, bound, strict=True):
        if is_bound:
            share.hold(name, held)
        else:
            stale.append((name, held.record))
    state.counters.stale_records += len(stale)
    yield Remove(stale)
    return True


def _bound(target: Announcement, values: Sequence[Sequence[BlockRef]]) -> Plan[list[bool | None]]:
    """Whether all blocks of each value are bound as recorded, None where the target does not say.

    A LOAD into no memory moves nothing, and is refused for the length alone if all else is right.
    """
    nowhere = memoryview(b"")
    blocks = [ref for refs in values for ref in refs]
    job = LoadJob(target, blocks, [nowhere] * len(blocks))
    results: Results | None = (yield Load({target.incarnation: job}, False))[target.incarnation]
    if results is None:
        return [None] * len(values)
    said: list[bool | None] = []
    at = 0
    for refs in values:
        statuses = {result.status for result in results[at : at + len(refs)]}
        at += len(refs)
        said.append(None if None in statuses else statuses == {Status.LENGTH_ERROR})
    return said


def sweep(state: State) -> Plan[None]:
    """Look through a part of the namespace's records for such as name blocks of writers that have gone.

    A get would remove them too, but nobody need ever ask for them. The next sweep goes on where this one ends.
    """
    state.sweep_cursor, entries = yield Scan(state.identity.fingerprint, state.sweep_cursor)
    by_target: dict[Announcement, list[tuple[Entry, Copy]]] = {}
    for entry in entries:
        record = state.parsed(entry[1])
        if record is None or not record.copies or record.owner == state.owner:
            continue
        # One on targets that this process does not see may be of use to those that do.
        for copy in record.copies:
            if target := state.targets.get(copy.incarnation):
                by_target.setdefault(target, []).append((entry, copy))
    found: dict[Entry, list[bool | None]] = {}
    for target, asked in by_target.items():
        bound = yield from _bound(target, [copy.refs for _, copy in asked])
        for (entry, _), is_bound in zip(asked, bound, strict=True):
            found.setdefault(entry, []).append(is_bound)
    stale = [entry for entry, copies in found.items() if all(is_bound is False for is_bound in copies)]
    state.counters.stale_records += len(stale)
    yield Remove(stale)


def make_room(state: State, share: Share, blocks: int, now_s: float, spared: Container[bytes]) -> Plan[bool]:
    """Evict until `blocks` blocks are free, and reserve them; False if that cannot be. Raises `IndexUnavailable`.

    The values of the names `spared` stay.
    """
    pinned: list[bytes] = []
    try:
        while share.room_blocks < blocks:
            if not share.settled:
                return False  # a new session has begun
            if share.orphans:
                used = share.used_blocks
                yield from free_orphans(state)
                if share.used_blocks < used:
                    continue
                return False  # the target does not answer
            victims = share.victims(blocks - share.room_blocks, now_s, spared)
            if not victims:
                return False
            pinned += yield from _evict(state, share, victims)
    finally:
        share.keep(pinned)
    if not share.settled:
        return False  # nor may one be reserved that settling counts anew
    share.reserve(blocks)  # before any other plan has its turn
    return True


def _evict(state: State, share: Share, victims: Sequence[tuple[bytes, Held]]) -> Plan[list[bytes]]:
    """Remove the records of `victims`; the names of those that are pinned."""
    try:
        removals = yield Remove([(name, held.record) for name, held in victims], spare_pinned=True)
    except BaseException:
        share.keep([name for name, _ in victims])
        raise
    pinned = []
    for (name, held), removal in zip(victims, removals, strict=True):
        if removal is Removal.PINNED:
            pinned.append(name)
        else:
            state.counters.evictions += removal is Removal.REMOVED
            state.lost(name, held.record)
    return pinned


def free_orphans(state: State) -> Plan[None]:
    """FREE every block without a record. What cannot be now is found when the next session of its target begins."""
    for share in list(state.shares.values()):
        if share.orphans and share.settled:  # else they are freed by whoever settles it
            orphans, number = share.take_orphans(), share.number
            try:
                yield from _free(share, orphans)
            except BaseException:
                share.give_up(orphans, number)  # perhaps none was asked for yet; one that is free already is no trouble
                raise


def _free(share: Share, blocks: Sequence[BlockRef | Handle]) -> Plan[Results | None]:
    assert share.session is not None
    number = share.session.number
    replies = yield Free({share.incarnation: (number, blocks)})
    results: Results | None = replies[share.incarnation]
    if results is not None:
        gone = len(blocks) if results.ok else sum(1 for one in results if one.status in _NOT_OURS_ANY_MORE)
        share.release(gone, number)
    return results


def announce_again(state: State, now_s: float) -> Plan[None]:
    """Publish what we hold to an index that began anew; what another writer has put there meanwhile is given up."""
    state.must_announce = False  # now: one that begins anew once more meanwhile is told all of it again
    try:
        yield from _announce(state, now_s)
    except BaseException:
        state.must_announce = True
        raise


def _announce(state: State, now_s: float) -> Plan[None]:
    for share in list(state.shares.values()):
        entries = iter(share.entries())
        while some := list(islice(entries, limits.CACHE_LOOKUP_MAX_NAMES)):
            for ttl_ms, alike in _by_ttl(some, now_s).items():
                won = yield Publish(alike, ttl_ms)
                for (name, record), first in zip(alike, won, strict=True):
                    if first:
                        state.counters.announced_again += 1
                    else:
                        state.lost(name, record)


def _by_ttl(entries: Sequence[tuple[bytes, Held]], now_s: float) -> dict[int | None, list[Entry]]:
    grouped: dict[int | None, list[Entry]] = {}
    for name, held in entries:
        ttl_ms = None if held.expires_at_s is None else max(1, round((held.expires_at_s - now_s) * 1000))
        grouped.setdefault(ttl_ms, []).append((name, held.record))
    return grouped


def _leave_draining(state: State) -> Plan[None]:
    """Give up every value on a target that is to be left."""
    for target in state.targets.values():
        share = state.shares.get(target.incarnation)
        if target.draining and share is not None and share.value_count:
            entries = share.entries()
            yield Remove([(name, held.record) for name, held in entries])
            for name, held in entries:
                state.lost(name, held.record)
