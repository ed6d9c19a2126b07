"""The plan of a get: one look-up, one batch of LOADs, then every doubt is a miss (docs/cache.md, "A get")."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

from kbtp.cache.announcement import Announcement
from kbtp.cache.checksum import BlockChecksums
from kbtp.cache.outcomes import MISS, Item, Outcome, ended
from kbtp.cache.record import Copy, Record
from kbtp.cache.remembered import Known
from kbtp.cache.state import State, log
from kbtp.cache.steps import (
    Beside,
    IndexUnavailable,
    ListTargets,
    Load,
    LoadJob,
    Looked,
    Plan,
    Remove,
    TakeChecksums,
)
from kbtp.cache.upkeep import announce_again
from kbtp.cache.values import Values
from kbtp.errors import ApiMisuse
from kbtp.initiator.batches import Results
from kbtp.initiator.destinations import Destinations
from kbtp.initiator.operations import Result
from kbtp.types import Status
from kbtp.verbs.buffers import buffer_of

STALE = frozenset((Status.NOT_BOUND, Status.GENERATION_MISMATCH, Status.HANDLE_OUT_OF_RANGE, Status.LENGTH_ERROR))


@dataclass(slots=True, eq=False)
class Get:
    """One value wanted. `item` is None until it is known how it ends."""

    name: bytes
    view: memoryview
    item: Item | None = None
    octets: bytes = b""
    record: Record | None = None
    copies: list[tuple[Announcement, Copy]] = field(default_factory=list)
    """Those not tried yet, and where they are: another call may read the list of targets anew meanwhile."""
    stale: bool = False
    """A block that the record names is gone, or is not what it says it is."""

    def pieces(self) -> list[memoryview]:
        record = self.record
        assert record is not None
        step, length_bytes = record.block_bytes, record.length_bytes
        if length_bytes <= step:
            return [self.view if len(self.view) == length_bytes else self.view[:length_bytes]]
        return [self.view[at : min(at + step, length_bytes)] for at in range(0, length_bytes, step)]

    def hit(self) -> None:
        assert self.record is not None
        self.item = Item(Outcome.HIT, self.record.length_bytes)


def get_many(state: State, values: Values, *, verify: bool, now_s: float) -> Plan[list[Item]]:
    """How each of `values` ends, which are loaded into its views."""
    known = _known(state, values) if verify and not values.invalid else None
    if known is not None:
        return (yield from _load_known(state, values, *known, now_s))
    gets = _gets_of(values)
    return (yield from _ended(state, gets, verify, now_s, _get_any(state, gets, verify, now_s)))


def _gets_of(values: Values) -> list[Get]:
    gets = list(map(Get, values.names, values.views))
    for place, item in values.invalid.items():
        gets[place].item = item
    return gets


def _get_any(state: State, gets: Sequence[Get], verify: bool, now_s: float) -> Plan[None]:
    wanted = [get for get in gets if get.item is None]
    if _are_remembered(state, wanted):
        yield from _load_beside(state, wanted, verify, now_s)
    else:
        yield from _look_up(state, wanted, now_s)


def _ended(state: State, gets: Sequence[Get], verify: bool, now_s: float, plan: Plan[None]) -> Plan[list[Item]]:
    """The items of all `gets` when `plan` is done, and every copy tried."""
    try:
        yield from plan
        while wanted := [get for get in gets if get.item is None]:
            yield from _load(state, wanted, verify)
    finally:
        for get in gets:
            get.item = get.item or MISS
            state.counters.misses += get.item.outcome is Outcome.MISS
    _count(state, gets)
    try:
        yield from _remove_stale(state, gets)
        if state.must_announce:
            yield from announce_again(state, now_s)
    except IndexUnavailable as error:
        state.index_failed(error)
    return [ended(get.item) for get in gets]


def _count(state: State, gets: Sequence[Get]) -> None:
    names, owners = [], []
    for get in gets:
        if get.item is not None and get.item.outcome is Outcome.HIT and get.record is not None:
            names.append(get.name)
            owners.append(get.record.owner)
            state.counters.bytes_loaded += get.record.length_bytes
            state.remembered.keep(get.name, get.octets, get.record)
    state.counters.hits += len(names)
    state.used(names, owners)


def _look_up(state: State, gets: Sequence[Get], now_s: float) -> Plan[None]:
    if not gets:
        return
    try:
        looked = yield state.lookup([get.name for get in gets])
        yield from _saw(state, gets, looked, now_s)
    except IndexUnavailable as error:
        state.index_failed(error)
    _prepare_all(state, gets)


def _saw(state: State, gets: Sequence[Get], looked: Looked, now_s: float) -> Plan[None]:
    """Raises `IndexUnavailable`."""
    state.saw_life(looked.life)
    for get, octets in zip(gets, looked.records, strict=True):
        known = state.remembered.get(get.name)
        if octets is not None and known is not None and known[0] == octets:
            get.octets, get.record, _ = known
            continue
        state.remembered.forget(get.name)
        if octets is not None:
            get.octets, get.record = octets, state.parsed(octets)
    if state.targets_are_old(now_s) and _unknown(state, gets):
        state.saw_targets((yield ListTargets()), now_s)


# --- while the index is asked --------------------------------------------------------------------


def _are_remembered(state: State, gets: Sequence[Get]) -> bool:
    """Whether the blocks of all are known from before, on targets that are. If not `gets` are as they were."""
    for get in gets:
        known = state.remembered.get(get.name)
        if known is None:
            break
        get.octets, get.record, _ = known
        _prepare(state, get)
        if get.item is not None:
            break
    else:
        _refuse_overlaps(gets)
        if gets and all(get.item is None for get in gets):
            return True
    for get in gets:
        _forget(get)
    return False


def _forget(get: Get) -> None:
    get.item, get.octets, get.record, get.copies, get.stale = None, b"", None, [], False


def _load_beside(state: State, gets: Sequence[Get], verify: bool, now_s: float) -> Plan[None]:
    """Load by what is remembered while the index is asked.

    What came counts only if each record in the index is the remembered one, octet for octet. If not, all of `gets` are
    as if they had been looked up and nothing else.
    """
    jobs, load = _jobs(gets, verify)
    looked, replies = yield from _beside(state, [get.name for get in gets], load)
    yield from _saw_beside(state, gets, jobs, looked, replies, verify, now_s)


_Replies: TypeAlias = Mapping[int, Results | None]


def _beside(state: State, names: Sequence[bytes], load: Load) -> Plan[tuple[Looked | IndexUnavailable, _Replies]]:
    try:
        replies: tuple[Looked | IndexUnavailable, _Replies] = yield Beside(state.lookup(names), load)
        return replies
    except IndexUnavailable as error:
        return error, {}


def _saw_beside(
    state: State,
    gets: Sequence[Get],
    jobs: _Jobs,
    looked: Looked | IndexUnavailable,
    replies: _Replies,
    verify: bool,
    now_s: float,
) -> Plan[None]:
    if isinstance(looked, Looked) and looked.records == [get.octets for get in gets]:
        state.saw_life(looked.life)
        yield from _loaded(state, gets, jobs, replies, verify)
        return
    for get in gets:
        _forget(get)
    try:
        if isinstance(looked, IndexUnavailable):
            raise looked
        yield from _saw(state, gets, looked, now_s)
    except IndexUnavailable as error:
        state.index_failed(error)
    _prepare_all(state, gets)


# --- what most gets are of -----------------------------------------------------------------------


def _known(state: State, values: Values) -> tuple[Announcement, list[Known]] | None:
    """If all are remembered as values of one block each on one target that is there."""
    known = []
    where: int | None = None
    for name, view in zip(values.names, values.views, strict=True):
        remembered = state.remembered.get(name)
        if remembered is None:
            return None
        record = remembered[1]
        if len(record.copies) != 1 or record.length_bytes > min(record.block_bytes, len(view)):
            return None
        incarnation = record.copies[0].incarnation
        if where is not None and where != incarnation:
            return None
        where = incarnation
        known.append(remembered)
    target = None if where is None else state.targets.get(where)
    return None if target is None else (target, known)


def _load_known(
    state: State, values: Values, target: Announcement, known: Sequence[Known], now_s: float
) -> Plan[list[Item]]:
    """As `_load_beside`, and no more than is to be done if all goes well."""
    records = [record for _, record, _ in known]
    into = [
        view if len(view) == record.length_bytes else view[: record.length_bytes]
        for view, record in zip(values.views, records, strict=True)
    ]
    job = LoadJob(target, [record.copies[0].refs[0] for record in records], into)
    try:
        looked, replies = yield from _beside(state, values.names, Load({target.incarnation: job}, True))
    except BaseException:
        state.counters.misses += len(values.names)
        raise
    results = replies.get(target.incarnation)
    if (
        results is not None
        and results.ok
        and isinstance(looked, Looked)
        and looked.records == [octets for octets, _, _ in known]
        and [(row[2], row[5]) for row in results.rows] == [(one.length_bytes, one.checksum) for one in records]
    ):
        return (yield from _hits(state, values.names, known, looked.life, now_s))
    gets = _gets_of(values)
    for get, (octets, record, _) in zip(gets, known, strict=True):
        get.octets, get.record = octets, record
    jobs = {target: [(get, record.copies[0]) for get, record in zip(gets, records, strict=True)]}
    return (yield from _ended(state, gets, True, now_s, _saw_beside(state, gets, jobs, looked, replies, True, now_s)))


def _hits(state: State, names: Sequence[bytes], known: Sequence[Known], life: bytes, now_s: float) -> Plan[list[Item]]:
    state.saw_life(life)
    lengths_bytes = [record.length_bytes for _, record, _ in known]
    state.counters.hits += len(names)
    state.counters.bytes_loaded += sum(lengths_bytes)
    state.remembered.keep_all(dict(zip(names, known, strict=True)))
    state.used(names, [record.owner for _, record, _ in known])
    if state.must_announce:
        try:
            yield from announce_again(state, now_s)
        except IndexUnavailable as error:
            state.index_failed(error)
    items = {length_bytes: Item(Outcome.HIT, length_bytes) for length_bytes in lengths_bytes}
    return [items[length_bytes] for length_bytes in lengths_bytes]


# --- what was looked up --------------------------------------------------------------------------


def _prepare_all(state: State, gets: Sequence[Get]) -> None:
    for get in gets:
        _prepare(state, get)
    _refuse_overlaps([get for get in gets if get.item is None])


def _unknown(state: State, gets: Iterable[Get]) -> bool:
    """Whether a value is on targets alone of which we have not heard."""
    return any(
        get.record is not None
        and get.record.copies
        and not any(copy.incarnation in state.targets for copy in get.record.copies)
        for get in gets
    )


def _prepare(state: State, get: Get) -> None:
    record = get.record
    if record is None:
        get.item = MISS
    elif record.length_bytes > len(get.view):
        error = ApiMisuse(f"the value has {record.length_bytes} octets, the buffer {len(get.view)}")
        get.item = Item(Outcome.INVALID, record.length_bytes, error)
    elif not record.copies:
        get.item = Item(Outcome.HIT)
    else:
        get.copies = [(seen, copy) for copy in record.copies if (seen := state.targets.get(copy.incarnation))]
        if not get.copies:
            get.item = MISS


def _refuse_overlaps(gets: Sequence[Get]) -> None:
    """A session sees its own loads alone: of two targets, or of a copy that is tried later, each would say that what it
    moved is right."""
    if len({copy.incarnation for get in gets for _, copy in get.copies}) <= 1:
        return
    held = Destinations()
    for get in gets:
        assert get.record is not None
        start = buffer_of(get.view).address
        try:
            held.claim(get, start, start + get.record.length_bytes)
        except ApiMisuse as error:
            get.item = Item(Outcome.INVALID, error=error)


_Jobs: TypeAlias = dict[Announcement, list[tuple[Get, Copy]]]


def _load(state: State, gets: Sequence[Get], verify: bool) -> Plan[None]:
    """Try the next copy of each. One that is not whole then has another copy to try, or is a miss."""
    jobs, load = _jobs(gets, verify)
    yield from _loaded(state, gets, jobs, (yield load), verify)


def _jobs(gets: Sequence[Get], verify: bool) -> tuple[_Jobs, Load]:
    jobs: _Jobs = {}
    for get in gets:
        target, copy = get.copies.pop(0)
        jobs.setdefault(target, []).append((get, copy))
    load = {
        target.incarnation: LoadJob(
            target,
            [ref for _, copy in tried for ref in copy.refs],
            [piece for get, _ in tried for piece in get.pieces()],
        )
        for target, tried in jobs.items()
    }
    return jobs, Load(load, verify)


def _loaded(
    state: State, gets: Sequence[Get], jobs: _Jobs, replies: Mapping[int, Results | None], verify: bool
) -> Plan[None]:
    whole: list[tuple[Get, int | None]] = []
    for target, tried in jobs.items():
        results: Results | None = replies[target.incarnation]
        if results is None:
            state.counters.target_failures += 1
        else:
            whole += _whole(state, tried, results)
    if verify:
        yield from _judge(state, whole)
    else:
        for get, _ in whole:
            get.hit()
    for get in gets:
        if get.item is None and not get.copies:
            get.item = MISS


def _whole(state: State, tried: Sequence[tuple[Get, Copy]], results: Results) -> Iterator[tuple[Get, int | None]]:
    """Those of which each block came as recorded, with the checksum of the value if it is known."""
    blocks = BlockChecksums(results)
    at = 0
    for get, copy in tried:
        end = at + len(copy.refs)
        as_recorded = results.ok and blocks.lengths[at:end] == [ref.length_bytes for ref in copy.refs]
        if as_recorded or _is_whole(state, get, copy, results[at:end]):
            yield get, blocks.of_value(at, end)
        at = end


def _is_whole(state: State, get: Get, copy: Copy, results: Sequence[Result]) -> bool:
    for ref, result in zip(copy.refs, results, strict=True):
        if result.ok and result.length_bytes == ref.length_bytes:
            continue
        if isinstance(result.error, ApiMisuse):
            get.item = Item(Outcome.INVALID, error=result.error)
        elif result.ok or result.status in STALE:
            get.stale = True
        else:
            state.counters.target_failures += 1
        return False
    return True


def _judge(state: State, whole: Sequence[tuple[Get, int | None]]) -> Plan[None]:
    """A value is what was put only if its checksum is."""
    unknown = [get for get, checksum in whole if checksum is None]
    taken: dict[Get, int] = {}
    if unknown:
        taken = dict(zip(unknown, (yield TakeChecksums([get.pieces() for get in unknown])), strict=True))
    for get, checksum in whole:
        assert get.record is not None
        if (taken[get] if checksum is None else checksum) == get.record.checksum:
            get.hit()
            continue
        state.counters.corrupt_values += 1
        get.stale = True
        log.error("a value of %d octets does not match its checksum: not used", get.record.length_bytes)


def _remove_stale(state: State, gets: Sequence[Get]) -> Plan[None]:
    gone = [get for get in gets if get.stale and get.item is MISS]
    if not gone:
        return
    state.counters.stale_records += len(gone)
    yield Remove([(get.name, get.octets) for get in gone])
    for get in gone:
        state.lost(get.name, get.octets)
