"""The plan of a put: look up, make room, store sealed blocks, publish (docs/cache.md, "A put, state by state")."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from itertools import accumulate

from kbtp.cache.announcement import Announcement
from kbtp.cache.checksum import BlockChecksums
from kbtp.cache.outcomes import NO_SPACE, UNAVAILABLE, Item, Outcome, ended
from kbtp.cache.placement import placement
from kbtp.cache.record import Copy, Record
from kbtp.cache.share import Held, Share
from kbtp.cache.small import Small
from kbtp.cache.state import State
from kbtp.cache.steps import AllocStore, Claim, Claimed, Entry, IndexUnavailable, Plan, Publish, Remove, TakeChecksums
from kbtp.cache.upkeep import announce_again, free_orphans, keep_up, make_room, open_shares, remove_unsure
from kbtp.cache.values import Put, PutOptions, Values
from kbtp.errors import ApiMisuse
from kbtp.initiator.batches import Results
from kbtp.initiator.operations import Result
from kbtp.limits import CACHE_CLAIM_MAX_BYTES, CACHE_RECORD_MAX_BLOCKS
from kbtp.types import Status


def put_many(state: State, values: Values, options: PutOptions, now_s: float) -> Plan[list[Item]]:
    """How each of `values` ends."""
    small = None
    if options.copies == 1 and options.ttl_s is None and not values.invalid:
        small = Small.reserved(state, values.names, values.views, now_s)
    if small is not None:
        return (yield from _put_small(state, small, values, options, now_s))
    puts = values.puts()
    return (yield from _ended(state, puts, _put_any(state, puts, options, now_s)))


def _put_any(state: State, puts: Sequence[Put], options: PutOptions, now_s: float) -> Plan[None]:
    valid = [put for put in puts if put.item is None]
    if _is_reserved(state, valid, options, now_s):
        yield from _claim(state, valid, options, now_s)
    yield from _look_and_put(state, puts, options, now_s)


def _ended(state: State, puts: Sequence[Put], plan: Plan[None]) -> Plan[list[Item]]:
    """The items of all `puts` when `plan` is done."""
    try:
        yield from plan
    except IndexUnavailable as error:
        state.index_failed(error)
    finally:
        for put in puts:
            put.item = put.item or UNAVAILABLE
        _count(state, puts)
    present = [put for put in puts if put.owner]
    if present:
        state.used([put.name for put in present], [put.owner for put in present])
    return [ended(put.item) for put in puts]


def _count(state: State, puts: Sequence[Put]) -> None:
    outcomes = [put.item.outcome for put in puts if put.item is not None]
    counters = state.counters
    stored = outcomes.count(Outcome.STORED)
    counters.stored += stored
    if stored < len(outcomes):
        counters.present += outcomes.count(Outcome.PRESENT)
        counters.no_space += outcomes.count(Outcome.NO_SPACE)
        counters.unavailable += outcomes.count(Outcome.UNAVAILABLE)
    counters.bytes_stored += sum([len(p.view) for p in puts if p.item is not None and p.item.outcome is Outcome.STORED])


# --- without looking first -----------------------------------------------------------------------


class _Place:
    """Where values go that are placed alike, and how many blocks of each target they need."""

    __slots__ = ("block_bytes", "blocks", "sessions", "shares")

    def __init__(self, shares: Sequence[Share]) -> None:
        self.shares = shares
        self.sessions = {share: share.number for share in shares}
        self.block_bytes = shares[0].block_bytes
        self.blocks = 0


def _place(state: State, targets: Sequence[Announcement], copies: int) -> _Place | None:
    """That of values that belong on the first of `targets`; None if they cannot all be stored there at once."""
    shares = [share for one in targets[:copies] if (share := state.shares.get(one.incarnation)) and share.settled]
    if len({share.block_bytes for share in shares}) != 1 or len(shares) < min(copies, len(targets)):
        return None
    return _Place(shares)


def _is_reserved(state: State, puts: Sequence[Put], options: PutOptions, now_s: float) -> bool:
    """Reserve blocks for all of `puts` if they are likely to be new and there is room already."""
    octets = sum([len(put.view) for put in puts])
    if not puts or octets > CACHE_CLAIM_MAX_BYTES or not state.may_claim([put.name for put in puts], now_s):
        return False
    targets = [target for target in state.targets.values() if not target.draining]
    places: dict[tuple[int, ...], _Place] = {}
    placed: list[_Place] = []
    place = None
    for put in puts:
        if place is None or len(targets) > 1:
            order = placement(put.name, targets)
            key = tuple([target.incarnation for target in order[: options.copies]])
            place = places.get(key)
            if place is None:
                place = _place(state, order, options.copies)
                if place is None:
                    return False
                places[key] = place
        blocks = -(-len(put.view) // place.block_bytes)
        if not 0 < blocks < CACHE_RECORD_MAX_BLOCKS:
            return False
        place.blocks += blocks
        placed.append(place)
    wanted: dict[Share, int] = {}
    for place in places.values():
        for share in place.shares:
            wanted[share] = wanted.get(share, 0) + place.blocks
    if any(blocks > share.room_blocks for share, blocks in wanted.items()):
        return False
    for share, blocks in wanted.items():
        share.reserve(blocks)
    for put, place in zip(puts, placed, strict=True):
        put.shares, put.sessions = place.shares, place.sessions
    return True


def _claim(state: State, puts: Sequence[Put], options: PutOptions, now_s: float) -> Plan[None]:
    """Store and publish `puts`. Where that is not done, or somebody was first, they are to be looked up."""
    yield from _store(state, puts)
    yield from _claim_stored(state, puts, options, now_s)


def _claim_stored(state: State, puts: Sequence[Put], options: PutOptions, now_s: float) -> Plan[None]:
    stored = [put for put in puts if put.refs]
    if stored:
        yield from _publish(state, stored, options, now_s, claim=True)
    yield from _saw_claimed(state, puts, now_s)


def _saw_claimed(state: State, puts: Sequence[Put], now_s: float) -> Plan[None]:
    for put in puts:
        if put.item is not None and (put.item.outcome is Outcome.STORED or put.item.outcome is Outcome.INVALID):
            continue
        state.looked_before_put(False)
        put.stored_in_vain()
    if state.must_announce:
        yield from announce_again(state, now_s)


# --- values of one block, without looking first ---------------------------------------------------


def _put_small(state: State, small: Small, values: Values, options: PutOptions, now_s: float) -> Plan[list[Item]]:
    """As `_put_any`, and not a step more if all goes well."""
    share, number = small.share, small.number
    reply: dict[int, Results | None]
    try:
        reply = yield AllocStore({share.incarnation: (number, small.views)})
    except BaseException:
        state.counters.unavailable += len(small.names)
        raise
    if not small.are_stored(reply[share.incarnation]):
        puts = _sent(small, values)
        return (yield from _ended(state, puts, _small_stored_in_part(state, share, puts, reply, options, now_s)))
    try:
        claimed: Claimed = yield Claim(small.entries, small.owner, meanwhile=small.prepare)
        state.saw_life(claimed.life)
        state.read_mail(claimed.mail)
    except BaseException as error:
        state.unsure += small.entries
        share.give_up(small.refs(), number)  # published or not: without its blocks a record is stale, and so a miss
        state.counters.unavailable += len(small.names)
        if not isinstance(error, IndexUnavailable):
            raise
        state.index_failed(error)
        return [UNAVAILABLE] * len(small.names)
    if all(claimed.firsts) and share.is_in(number):
        return (yield from _small_held(state, small, now_s))
    puts = _sent(small, values)
    return (yield from _ended(state, puts, _small_claimed_in_part(state, small, puts, claimed.firsts, options, now_s)))


def _small_held(state: State, small: Small, now_s: float) -> Plan[list[Item]]:
    items = small.held(state)
    state.counters.stored += len(items)
    state.counters.bytes_stored += sum(small.lengths_bytes)
    try:
        if any(share.orphans for share in state.shares.values()):
            yield from free_orphans(state)
        if state.must_announce:
            yield from announce_again(state, now_s)
    except IndexUnavailable as error:
        state.index_failed(error)
    return items


def _small_stored_in_part(
    state: State,
    share: Share,
    puts: Sequence[Put],
    reply: Mapping[int, Results | None],
    options: PutOptions,
    now_s: float,
) -> Plan[None]:
    yield from _saw_stored(state, puts, {share: puts}, reply)
    yield from _claim_stored(state, puts, options, now_s)
    yield from _look_and_put(state, puts, options, now_s)


def _small_claimed_in_part(
    state: State, small: Small, puts: Sequence[Put], firsts: Sequence[bool], options: PutOptions, now_s: float
) -> Plan[None]:
    for put, (_, record), ref in zip(puts, small.entries, small.refs(), strict=True):
        put.record, put.refs = record, {small.share: (ref,)}
    yield from _saw_published(state, puts, firsts, None)
    yield from _saw_claimed(state, puts, now_s)
    yield from _look_and_put(state, puts, options, now_s)


def _sent(small: Small, values: Values) -> list[Put]:
    """Those that were sent as `small`."""
    puts = values.puts()
    for put in puts:
        put.shares, put.sessions = [small.share], {small.share: small.number}
    return puts


# --- looking first -------------------------------------------------------------------------------


def _look_and_put(state: State, puts: Sequence[Put], options: PutOptions, now_s: float) -> Plan[None]:
    """Those of `puts` that have no item yet."""
    wanted = [put for put in puts if put.item is None]
    if wanted:
        yield from _look_up(state, wanted, now_s)
        yield from _put(state, puts, options, now_s)


def _look_up(state: State, puts: Sequence[Put], now_s: float) -> Plan[None]:
    """Tell those that are there already; a record of targets that are not there any more, or are left, makes way."""
    yield from remove_unsure(state)
    looked = yield state.lookup([put.name for put in puts], collect=True)
    state.saw_life(looked.life)
    state.read_mail(looked.mail)
    yield from keep_up(state, now_s)
    state.looked_before_put(not any(looked.records))
    gone: list[Entry] = []
    for put, octets in zip(puts, looked.records, strict=True):
        if octets is None:
            continue
        record = state.parsed(octets)
        if record is not None and state.lasts(record):
            put.item, put.owner = Item(Outcome.PRESENT, record.length_bytes), record.owner
        elif record is not None:
            gone.append((put.name, octets))
        else:
            put.item = UNAVAILABLE  # what a later version put there is not ours to remove
    if gone:
        state.counters.stale_records += len(gone)
        yield Remove(gone)
        for name, octets in gone:
            state.lost(name, octets)


def _put(state: State, puts: Sequence[Put], options: PutOptions, now_s: float) -> Plan[None]:
    """Store and publish those of `puts` that fit beside each other and beside those that are there already."""
    wanted = [put for put in puts if put.item is None]
    yield from _choose(state, wanted, options.copies)
    wanted = [put for put in wanted if put.item is None]
    present = {put.name for put in puts if put.owner}
    try:
        yield from _reserve(state, wanted, present, now_s)
    except BaseException:
        for put in wanted:
            for share, number in put.sessions.items():
                share.release(_blocks(put, share), number)
        raise
    wanted = [put for put in wanted if put.item is None]
    if wanted:
        yield from _store(state, wanted)
        yield from _publish(state, [put for put in wanted if put.item is None], options, now_s)


def _choose(state: State, puts: Sequence[Put], copies: int) -> Plan[None]:
    """Each of `puts` has shares to go to afterwards, an item that says why not, or nothing to store."""
    targets = [target for target in state.targets.values() if not target.draining] if puts else []
    there = yield from open_shares(state, targets)
    for put in puts:
        if not put.view:
            continue
        shares = [there[one.incarnation] for one in placement(put.name, targets) if one.incarnation in there]
        fitting = [one for one in shares if _blocks(put, one) <= min(one.quota_blocks, CACHE_RECORD_MAX_BLOCKS - 1)]
        # All copies are cut alike, so that one record describes them.
        put.shares = [one for one in fitting if one.block_bytes == fitting[0].block_bytes][:copies]
        if not put.shares:
            put.item = NO_SPACE if shares else UNAVAILABLE


def _reserve(state: State, puts: Sequence[Put], present: Collection[bytes], now_s: float) -> Plan[None]:
    """Reserve blocks for as many of `puts` as there is room for, from the first on.

    No value of a batch makes way for another one of it: neither one of `puts` nor one that is there already, of the
    names `present`.
    """
    by_share: dict[Share, list[Put]] = {}
    for put in puts:
        for share in put.shares:
            by_share.setdefault(share, []).append(put)
    for share, going in by_share.items():
        room = share.quota_blocks - sum(len(held.refs) for name in present if (held := share.get(name)))
        ends = accumulate(_blocks(put, share) for put in going)
        fitting = [put for put, end in zip(going, ends, strict=True) if end <= room]
        blocks = sum(_blocks(put, share) for put in fitting)
        if fitting and (yield from make_room(state, share, blocks, now_s, present)):
            for put in fitting:
                put.sessions = {**put.sessions, share: share.number}
            continue
        for put in fitting:  # not all at once: then as many as can be
            if len(fitting) > 1 and (yield from make_room(state, share, _blocks(put, share), now_s, present)):
                put.sessions = {**put.sessions, share: share.number}
    for put in puts:
        if put.shares and not put.sessions:
            put.item = NO_SPACE if any(share.settled for share in put.shares) else UNAVAILABLE


def _blocks(put: Put, share: Share) -> int:
    return -(-len(put.view) // share.block_bytes)


def _store(state: State, puts: Sequence[Put]) -> Plan[None]:
    """Each of `puts` has blocks afterwards, or an item that says why not."""
    jobs: dict[Share, list[Put]] = {}
    for put in puts:
        for share, number in put.sessions.items():
            if share.number == number:  # else a new session has begun meanwhile, and has counted without these
                jobs.setdefault(share, []).append(put)
    reply: dict[int, Results | None] = yield AllocStore(
        {share.incarnation: (share.number, _pieces(going, share.block_bytes)) for share, going in jobs.items()}
    )
    yield from _saw_stored(state, puts, jobs, reply)


def _saw_stored(
    state: State, puts: Sequence[Put], jobs: Mapping[Share, Sequence[Put]], reply: Mapping[int, Results | None]
) -> Plan[None]:
    why: dict[Put, Item] = {}
    for share, going in jobs.items():
        results = reply[share.incarnation]
        if results is None:
            state.counters.target_failures += 1
            continue  # what was bound of it is found when the next session begins
        at, block_bytes = 0, share.block_bytes
        refs = results.refs if results.ok else None
        blocks = BlockChecksums(results)
        for put in going:
            end = at - (-len(put.view) // block_bytes)
            if refs is not None:
                put.refs = {**put.refs, share: tuple(refs[at:end])} if put.refs else {share: tuple(refs[at:end])}
            elif (item := _look_at(put, share, results[at:end])) is not None:
                why[put] = item
            if put.checksum is None and share in put.refs:
                put.checksum = blocks.of_value(at, end)
            at = end
    for put in puts:
        if put.shares and not put.refs:
            put.item = why.get(put, UNAVAILABLE)
    try:
        yield from free_orphans(state)
    except BaseException:
        _give_up(puts)
        raise


def _pieces(puts: Sequence[Put], block_bytes: int) -> list[memoryview]:
    views = [put.view for put in puts]
    if max(map(len, views)) <= block_bytes and all(views):
        return views
    return [piece for put in puts for piece in put.pieces(block_bytes)]


def _look_at(put: Put, share: Share, results: Sequence[Result]) -> Item | None:
    """The blocks of a copy that is whole; else they are orphans, and why it is not, if that is known."""
    number = put.sessions[share]
    refs = tuple(result.ref for result in results if result.ok)
    if len(refs) == len(results):
        put.refs = {**put.refs, share: refs}
        return None
    share.give_up(refs, number)
    # What was refused, or never sent; of what was lost with the session nothing is known.
    unbound = [one for one in results if one.status not in (Status.SUCCESS, None) or isinstance(one.error, ApiMisuse)]
    share.release(len(unbound), number)
    failed = next(result for result in results if not result.ok)
    if isinstance(failed.error, ApiMisuse):
        return Item(Outcome.INVALID, error=failed.error)
    return NO_SPACE if failed.status is Status.NO_SPACE else None


def _publish(
    state: State, puts: Sequence[Put], options: PutOptions, now_s: float, *, claim: bool = False
) -> Plan[None]:
    try:
        unknown = [put for put in puts if put.checksum is None]
        if unknown:
            taken = yield TakeChecksums([[put.view] for put in unknown])
            for put, checksum in zip(unknown, taken, strict=True):
                put.checksum = checksum
        owner = state.owner
        for put in puts:
            assert put.checksum is not None
            copies = tuple([Copy(share.incarnation, refs) for share, refs in put.refs.items()])
            block_bytes = put.shares[0].block_bytes if put.shares else 1
            put.said = Record(owner, len(put.view), put.checksum, block_bytes, copies)
            put.record = put.said.pack()
        ttl_ms = None if options.ttl_s is None else max(1, round(options.ttl_s * 1000))
        entries = [(put.name, put.record) for put in puts]
        if claim:
            claimed: Claimed = yield Claim(entries, state.owner, ttl_ms)
            state.saw_life(claimed.life)
            state.read_mail(claimed.mail)
            won = claimed.firsts
        else:
            won = yield Publish(entries, ttl_ms)
    except BaseException:
        state.unsure += [(put.name, put.record) for put in puts if put.record]
        _give_up(puts)  # published or not: without its blocks the record is stale, and so a miss
        raise
    yield from _saw_published(state, puts, won, None if options.ttl_s is None else now_s + options.ttl_s)


def _saw_published(state: State, puts: Sequence[Put], won: Sequence[bool], expires_at_s: float | None) -> Plan[None]:
    """Hold those of `puts` that `won` says were the first, give up the blocks of the others."""
    lost: list[Put] = []
    stored: list[Put] = []
    items: dict[int, Item] = {}
    for put, first in zip(puts, won, strict=True):
        if not first:
            put.item = Item(Outcome.PRESENT, 0)
            _give_up([put])
            continue
        for share in put.refs:
            if share.number != put.sessions[share]:
                lost.append(put)  # a new session has begun meanwhile, and frees what was not published before
                put.item = UNAVAILABLE
                _give_up([put])
                break
        else:
            length_bytes = len(put.view)
            put.item = items.get(length_bytes) or items.setdefault(length_bytes, Item(Outcome.STORED, length_bytes))
            stored.append(put)
    keep = state.remembered.keep
    for put in reversed(stored):  # the end of a prefix goes first
        for share, refs in put.refs.items():
            share.hold(put.name, Held(put.record, refs, expires_at_s))
        if put.said is not None:
            keep(put.name, put.record, put.said)
    state.unsure += [(put.name, put.record) for put in lost]
    yield from remove_unsure(state)
    yield from free_orphans(state)


def _give_up(puts: Sequence[Put]) -> None:
    for put in puts:
        for share, refs in put.refs.items():
            share.give_up(refs, put.sessions[share])
