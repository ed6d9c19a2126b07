"""Plans of what has to be done besides: targets, sessions, room, records that the index has lost."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice

from kbtp import limits
from kbtp.cache.announcement import Announcement
from kbtp.cache.record import Copy
from kbtp.cache.share import Held, Share
from kbtp.cache.state import State, log
from kbtp.cache.steps import Entry, Free, ListTargets, Load, Loaded, LoadJob, Open, Plan, Publish, Removal, Remove, Scan
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


def open_shares(state: State, targets: Sequence[Announcement]) -> Plan[None]:
    """Have a session with each of `targets` that can be had, and settle what a former one left behind."""
    if not targets:
        return
    sessions = yield Open(targets)
    for target in targets:
        session = sessions[target.incarnation]
        share = state.share_of(target)
        if session is None:
            share.settled = False
            continue
        share.opened(session)
        if not share.settled:
            yield from _settle(state, share)


def _settle(state: State, share: Share) -> Plan[None]:
    """Adopt the values of ours that are in the index, then free every other block of our range."""
    session = share.session
    assert session is not None
    if session.resumed and session.bound_blocks:
        if not share.value_count:
            yield from _adopt(state, share)
        left = session.bound_blocks - share.held_blocks
        handles = share.unknown_handles()
        while left > 0 and (some := list(islice(handles, limits.CACHE_FREE_BATCH))):
            results = yield from _free(share, some)
            if results is None:
                return
            left -= sum(1 for result in results if result.ok)
    share.settle()


def _adopt(state: State, share: Share) -> Plan[None]:
    """What an earlier process of this writer published is ours. Raises `IndexUnavailable`: we cannot know then."""
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
        yield from _adopt_bound(state, share, found)
    log.info("%d values of this writer were in the index and are adopted", share.value_count)


def _adopt_bound(state: State, share: Share, found: Sequence[tuple[bytes, Held]]) -> Plan[None]:
    """Hold those whose blocks are all bound as recorded."""
    target = state.targets.get(share.incarnation)
    if not found or target is None:
        return
    bound = yield from _bound(target, [held.refs for _, held in found])
    stale = []
    for (name, held), is_bound in zip(found, bound, strict=True):
        if is_bound:
            share.hold(name, held)
        elif is_bound is not None:
            stale.append((name, held.record))
    state.counters.stale_records += len(stale)
    yield Remove(stale)


def _bound(target: Announcement, values: Sequence[Sequence[BlockRef]]) -> Plan[list[bool | None]]:
    """Whether all blocks of each value are bound as recorded, None where the target does not say.

    A LOAD into no memory moves nothing, and is refused for the length alone if all else is right.
    """
    nowhere = memoryview(b"")
    job = LoadJob(target, [(refs, [nowhere] * len(refs)) for refs in values])
    loaded: Loaded | None = (yield Load({target.incarnation: job}, False))[target.incarnation]
    if loaded is None:
        return [None] * len(values)
    said: list[bool | None] = []
    for refs, (results, at) in zip(values, loaded.places, strict=True):
        statuses = {result.status for result in results[at : at + len(refs)]}
        said.append(None if None in statuses else statuses == {Status.LENGTH_ERROR})
    return said


def sweep(state: State) -> Plan[None]:
    """Look through a part of the namespace's records for such as name blocks of writers that have gone.

    A get would remove them too, but nobody need ever ask for them. The next sweep goes on where this one ends.
    """
    state.sweep_cursor, entries = yield Scan(state.identity.fingerprint, state.sweep_cursor)
    stale: list[Entry] = []
    by_target: dict[int, list[tuple[Entry, Copy]]] = {}
    for entry in entries:
        record = state.parsed(entry[1])
        if record is None or not record.copies or record.owner == state.owner:
            continue
        there = [copy for copy in record.copies if copy.incarnation in state.targets]
        if there:
            by_target.setdefault(there[0].incarnation, []).append((entry, there[0]))
        else:
            stale.append(entry)
    for incarnation, asked in by_target.items():
        bound = yield from _bound(state.targets[incarnation], [copy.refs for _, copy in asked])
        stale += [entry for (entry, _), is_bound in zip(asked, bound, strict=True) if is_bound is False]
    state.counters.stale_records += len(stale)
    yield Remove(stale)


def make_room(state: State, share: Share, blocks: int, now_s: float) -> Plan[bool]:
    """Evict until `blocks` blocks are free, and reserve them; False if that cannot be. Raises `IndexUnavailable`."""
    spared: list[bytes] = []
    try:
        while share.room_blocks < blocks:
            if share.orphans:
                used = share.used_blocks
                yield from free_orphans(state)
                if share.used_blocks < used:
                    continue
                return False  # the target does not answer
            victims = share.victims(blocks - share.room_blocks, now_s)
            if not victims:
                return False
            spared += yield from _evict(state, share, victims)
    finally:
        share.keep(spared)
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
        if share.orphans and share.session is not None:
            yield from _free(share, share.take_orphans())


def _free(share: Share, blocks: Sequence[BlockRef | Handle]) -> Plan[Results | None]:
    assert share.session is not None
    replies = yield Free({share.incarnation: (share.session.number, blocks)})
    results: Results | None = replies[share.incarnation]
    if results is not None:
        share.release(sum(1 for result in results if result.status in _NOT_OURS_ANY_MORE))
    return results


def announce_again(state: State, now_s: float) -> Plan[None]:
    """Publish what we hold to an index that began anew; what another writer has put there meanwhile is given up."""
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
    state.must_announce = False


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
