"""Plans stepped by hand: what other plans, new sessions and lost answers do to one between any two of its steps."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest

from kbtp import limits
from kbtp.cache import IndexUnavailable, MemoryIndex, Outcome
from kbtp.cache.announcement import Announcement
from kbtp.cache.checksum import checksum, checksums
from kbtp.cache.get import get_many
from kbtp.cache.keys import Names
from kbtp.cache.lookups import Named, contains_many, delete_many
from kbtp.cache.outcomes import Item
from kbtp.cache.placement import placement
from kbtp.cache.put import put_many
from kbtp.cache.record import Copy, Record
from kbtp.cache.state import Identity, State, gone_letter
from kbtp.cache.steps import (
    AllocStore,
    Announce,
    Beside,
    Claim,
    Claimed,
    Discard,
    Free,
    Load,
    Lookup,
    Open,
    Plan,
    Publish,
    Remove,
    Scan,
    Session,
    Step,
    TakeChecksums,
    Tell,
    Withdraw,
)
from kbtp.cache.values import PutOptions, Values
from kbtp.errors import ApiMisuse
from kbtp.initiator.batches import Results
from kbtp.initiator.operations import Result
from kbtp.types import BlockRef, Handle, Status
from kbtp.verbs.requester import RECORD

from .conftest import BLOCK_BYTES, Clock

NAMES = Names()
FIRST_HANDLE = 100
ONE, OTHER = (Announcement(number, f"kbtp://10.0.0.{number}", BLOCK_BYTES, 16) for number in (1, 2))


def keys_of(target: Announcement, count: int) -> list[bytes]:
    """Keys that belong on `target`, of these two."""
    keys = (b"%d" % number for number in range(50))
    return [key for key in keys if placement(NAMES.of(key), [ONE, OTHER])[0] is target][:count]


def with_checksums(results: Sequence[Result], taken: Sequence[int]) -> Results:
    """All of them SUCCESS."""
    rows = [
        (Status.SUCCESS, one.generation, one.length_bytes, one.handle, 0, value)
        for one, value in zip(results, taken, strict=True)
    ]
    return Results(np.array(rows, RECORD).tobytes(), True, {})


class Cluster:
    """An index and targets of 4 blocks a writer that only count, in this process, and one writer."""

    def __init__(self, clock: Clock, *targets: Announcement) -> None:
        self.clock = clock
        self.index = MemoryIndex(clock)
        self.bound: dict[int, dict[Handle, BlockRef]] = {}
        self.sessions: dict[int, Session] = {}
        self.full: set[int] = set()
        self.knows_checksums = False
        """As an RNIC that takes them on the way."""
        self._number = self._generation = 0
        for target in targets:
            self.index.perform(Announce(target))
            self.bound[target.incarnation] = {}
            self.begin(target, resumed=False)
        self.state = self.writer()

    def writer(self) -> State:
        """Another process of the writer."""
        return State(Identity(b"writer".ljust(limits.INITIATOR_ID_BYTES), NAMES.fingerprint), "lru")

    def begin(self, target: Announcement, *, resumed: bool = True, handle_count: int = 8) -> None:
        """A new session."""
        bound = self.bound[target.incarnation]
        self._number += 1
        self.sessions[target.incarnation] = Session(self._number, resumed, len(bound), 4, FIRST_HANDLE, handle_count)

    def used(self, target: Announcement = ONE) -> int:
        return len(self.bound[target.incarnation])

    def perform(self, step: Step) -> Any:
        match step:
            case Open():
                return {one.incarnation: self.sessions.get(one.incarnation) for one in step.targets}
            case Load():
                return {number: self._load(number, job.refs) for number, job in step.jobs.items()}
            case AllocStore():
                return {number: self._alloc_store(number, *job) for number, job in step.jobs.items()}
            case TakeChecksums():
                return checksums(step.values)
            case Free():
                return {number: self._free(number, *job) for number, job in step.jobs.items()}
            case Beside():
                return self.index.perform(step.index), self.perform(step.target)
        return self.index.perform(step)

    def _load(self, number: int, refs: Sequence[BlockRef]) -> Results | None:
        if number not in self.sessions:
            return None
        said = [Status.LENGTH_ERROR if self.bound[number].get(ref.handle) == ref else Status.NOT_BOUND for ref in refs]
        return Results.of([Result(status) for status in said])

    def _alloc_store(self, number: int, session: int, pieces: Sequence[memoryview]) -> Results | None:
        if self.sessions[number].number != session:
            return None
        if number in self.full:
            return Results.of([Result(Status.NO_SPACE)] * len(pieces))
        made = []
        for piece in pieces:
            assert self.used_of(number) < 4, "more than the quota was asked for"
            self._generation += 1
            handle = next(one for one in range(FIRST_HANDLE, FIRST_HANDLE + 8) if one not in self.bound[number])
            self.bound[number][handle] = BlockRef(handle, self._generation, len(piece))
            made.append(Result(Status.SUCCESS, handle, self._generation, len(piece)))
        if not self.knows_checksums:
            return Results.of(made)
        return with_checksums(made, [checksum([piece]) for piece in pieces])

    def used_of(self, number: int) -> int:
        return len(self.bound[number])

    def _free(self, number: int, session: int, blocks: Sequence[BlockRef | Handle]) -> Results | None:
        if self.sessions[number].number != session:
            return None
        said = []
        for block in blocks:
            handle = block.handle if isinstance(block, BlockRef) else block
            was = self.bound[number].get(handle)
            there = was is not None and block in (was, handle)
            if there:
                del self.bound[number][handle]
            said.append(Result(Status.SUCCESS if there else Status.NOT_BOUND))
        return Results.of(said)

    # --- plans ---------------------------------------------------------------------------------

    def put(self, *keys: bytes, state: State | None = None, blocks: int = 1, copies: int = 1) -> Running:
        view = memoryview(bytes(blocks * BLOCK_BYTES))
        values = Values([NAMES.of(key) for key in keys], [view] * len(keys))
        plan = put_many(state or self.state, values, PutOptions(copies=copies), self.clock())
        return Running(self, plan)

    def get(self, key: bytes, *, verify: bool = False) -> Running:
        values = Values([NAMES.of(key)], [memoryview(bytearray(4 * BLOCK_BYTES))])
        return Running(self, get_many(self.state, values, verify=verify, now_s=self.clock()))

    def delete(self, key: bytes) -> None:
        named = [Named(NAMES.of(key))]
        Running(self, delete_many(self.state, named), named).end()

    def records_are_true(self) -> bool:
        """Whether each record in the index names blocks that are bound."""
        loads = []
        for name, (octets, _) in self.index._records.items():
            record = self.state.parsed(octets)
            assert record is not None, name
            loads += [
                self.bound[copy.incarnation].get(ref.handle) == ref for copy in record.copies for ref in copy.refs
            ]
        return all(loads)


class Running:
    """A plan that stops where a test wants it to."""

    def __init__(self, cluster: Cluster, plan: Plan[Any], asked: Sequence[Any] = ()) -> None:
        """`asked` have the items, unless the plan ends with them."""
        self._cluster = cluster
        self._plan = plan
        self._asked = asked
        self._items: list[Item] | None = None
        self.step: Step | None = next(plan)

    def before(self, kind: type[Any] | tuple[type[Any], ...]) -> Running:
        while self.step is not None and not isinstance(self.step, kind):
            self.take()
        assert self.step is not None, f"no {kind}"
        return self

    def take(self) -> Running:
        assert self.step is not None
        reply = self._cluster.perform(self.step)
        self._next(lambda: self._plan.send(reply))
        return self

    def answer(self, reply: Any) -> None:
        self._next(lambda: self._plan.send(reply))

    def fail(self) -> Running:
        self._next(lambda: self._plan.throw(IndexUnavailable("no answer")))
        return self

    def end(self) -> list[Outcome]:
        while self.step is not None:
            self.take()
        items = [one.item for one in self._asked] if self._items is None else self._items
        return [item.outcome for item in items]

    def interrupt(self) -> None:
        """Ctrl-C while the step is under way."""
        with pytest.raises(KeyboardInterrupt):
            self._plan.throw(KeyboardInterrupt())

    def _next(self, go_on: Callable[[], Step]) -> None:
        try:
            self.step = go_on()
        except StopIteration as done:
            self.step, self._items = None, done.value


@pytest.fixture
def cluster(clock: Clock) -> Cluster:
    return Cluster(clock, ONE)


# --- batches of small new values -------------------------------------------------------------------


def warm(cluster: Cluster) -> State:
    """A writer that does not look first, and knows what its RNIC has taken."""
    cluster.knows_checksums = True
    assert cluster.put(b"first").end() == [Outcome.STORED]
    return cluster.state


def test_a_batch_of_none_is_put_at_once(cluster: Cluster) -> None:
    state = warm(cluster)
    with pytest.raises(StopIteration) as ended:
        next(put_many(state, Values([], []), PutOptions(), cluster.clock()))
    assert ended.value.value == []


def test_one_name_twice_in_a_batch_leaks_nothing(cluster: Cluster) -> None:
    """Another one's delete between the two claims lets both of them be the first."""
    state = warm(cluster)
    put = cluster.put(b"a", b"a").before(Claim)
    assert isinstance(put.step, Claim)
    put.answer(Claimed([True, True], [], state.life or b""))
    put.end()
    held = sum(share.used_blocks for share in state.shares.values())
    assert (cluster.used(), held) == (state.shares[1].value_count, state.shares[1].value_count)


@pytest.mark.parametrize("step", [AllocStore, Claim])
def test_an_interrupted_put_is_counted(cluster: Cluster, step: type[Step]) -> None:
    state = warm(cluster)
    cluster.put(b"a", b"b").before(step).interrupt()
    assert state.counters.unavailable == 2


def test_an_interrupted_get_of_remembered_values_is_counted(cluster: Cluster) -> None:
    state = warm(cluster)
    cluster.get(b"first", verify=True).before(Beside).interrupt()
    assert (state.counters.hits, state.counters.misses) == (0, 1)


# --- settling ------------------------------------------------------------------------------------


class Paged(MemoryIndex):
    """A scan of one record a page."""

    def perform(self, step: Any) -> Any:
        if not isinstance(step, Scan):
            return super().perform(step)
        _, entries = super().perform(Scan(step.fingerprint))
        following = step.cursor + 1
        return following if following < len(entries) else 0, entries[step.cursor : following]


def test_values_are_ours_only_when_all_pages_have_been_read(cluster: Cluster) -> None:
    """Else those of the pages that were not would be freed, under their records."""
    cluster.index = Paged(cluster.clock)
    cluster.index.perform(Announce(ONE))
    cluster.put(b"a", b"b").end()
    cluster.begin(ONE)
    state = cluster.writer()
    again = cluster.put(b"c", state=state).before(Scan).take().before(Scan)  # the second page
    assert again.fail().end() == [Outcome.UNAVAILABLE]
    assert cluster.put(b"d", state=state).end() == [Outcome.STORED]
    assert (cluster.records_are_true(), cluster.used()) == (True, 3)
    assert state.shares[1].value_count == 3


def test_of_two_that_settle_neither_frees_what_the_other_stores(cluster: Cluster) -> None:
    cluster.put(b"old").end()
    cluster.index.clear()
    cluster.index.perform(Announce(ONE))
    cluster.begin(ONE)
    state = cluster.writer()
    one, other = (cluster.put(key, state=state).before(Open) for key in (b"one", b"other"))
    one.before(Free)
    while other.step is not None and not isinstance(other.step, Publish):
        other.take()
    outcomes = one.end() + other.end()
    assert cluster.records_are_true()
    assert outcomes.count(Outcome.STORED) == cluster.used() == state.shares[1].used_blocks
    assert cluster.put(b"more", state=state).end() == [Outcome.STORED]


def test_what_a_session_stored_that_is_followed_by_another_is_not_published(cluster: Cluster) -> None:
    one = cluster.put(b"one").before(Publish)
    cluster.begin(ONE)
    assert cluster.put(b"other").end() == [Outcome.STORED]  # by a session that frees what has no record
    assert one.end() == [Outcome.UNAVAILABLE]
    assert cluster.records_are_true()
    assert cluster.used() == cluster.state.shares[1].used_blocks == 1


def test_blocks_reserved_in_one_session_are_not_used_in_the_next(clock: Clock) -> None:
    cluster = Cluster(clock, ONE, OTHER)
    cluster.put(*keys_of(OTHER, 4)).end()
    one, other = keys_of(ONE, 2)
    putting = cluster.put(one, blocks=2, copies=2).before(Remove)  # there is room on one target
    cluster.begin(ONE)
    assert cluster.put(other, blocks=3).end() == [Outcome.STORED]
    assert putting.end() == [Outcome.STORED]
    assert cluster.used(ONE) == cluster.state.shares[1].used_blocks == 3
    assert cluster.records_are_true()


def test_news_of_an_earlier_session_that_comes_late_is_none(cluster: Cluster) -> None:
    cluster.put(b"kept").end()
    cluster.state.puts_to_look_up = 2
    late = cluster.put(b"late").before(Open)
    former = cluster.sessions[1]
    cluster.begin(ONE)
    stored = cluster.put(b"other").before(Publish)
    now = cluster.sessions[1]
    cluster.sessions[1] = former
    late.take()
    cluster.sessions[1] = now
    assert late.end() + stored.end() == [Outcome.STORED, Outcome.STORED]
    assert (cluster.records_are_true(), cluster.used()) == (True, 3)


def test_a_block_that_was_counted_and_has_ended_by_itself_is_room(cluster: Cluster) -> None:
    cluster.bound[1][FIRST_HANDLE] = BlockRef(FIRST_HANDLE, 1, 1)
    cluster.begin(ONE)
    del cluster.bound[1][FIRST_HANDLE]
    assert cluster.put(b"key", blocks=4).end() == [Outcome.STORED]


def test_a_session_that_begins_while_the_one_before_is_settled_is_settled_next(cluster: Cluster) -> None:
    cluster.put(b"key").end()
    cluster.index.clear()
    cluster.index.perform(Announce(ONE))
    cluster.begin(ONE)
    state = cluster.writer()
    one = cluster.put(b"one", state=state).before(Scan)
    cluster.begin(ONE)
    assert cluster.put(b"other", state=state).end() == [Outcome.UNAVAILABLE]
    assert one.end() == [Outcome.UNAVAILABLE]
    assert cluster.put(b"more", blocks=4, state=state).end() == [Outcome.STORED]
    assert cluster.used() == state.shares[1].used_blocks == 4


def test_a_target_that_claims_blocks_without_end_is_asked_for_so_many(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "CACHE_SETTLE_MAX_HANDLES", 3 * limits.CACHE_FREE_BATCH)
    cluster.bound[1][7] = BlockRef(7, 1, 1)  # of no handle of the range
    cluster.begin(ONE, handle_count=1 << 62)
    putting, tried = cluster.put(b"key", blocks=3), 0
    while isinstance(step := putting.before((Free, Publish)).step, Free):
        [(_, handles)] = step.jobs.values()
        tried += len(handles)
        assert tried <= limits.CACHE_SETTLE_MAX_HANDLES
        putting.take()
    assert putting.end() == [Outcome.STORED]
    assert cluster.put(b"large", blocks=4).end() == [Outcome.NO_SPACE]  # the one that was not found counts


# --- targets -------------------------------------------------------------------------------------


def test_a_target_may_leave_the_list_while_it_is_read_from(cluster: Cluster) -> None:
    cluster.put(b"key").end()
    for kind in (Beside, Load):
        getting = cluster.get(b"key").before(kind)
        cluster.state.saw_targets([], cluster.clock())
        assert getting.end() == [Outcome.MISS]
        cluster.state.saw_targets([ONE], cluster.clock())
        cluster.put(b"key").end()
        cluster.state.remembered.forget(NAMES.of(b"key"))


@pytest.mark.parametrize("kind", [Open, AllocStore, Publish])
def test_a_target_may_die_while_it_is_put_to(cluster: Cluster, kind: type) -> None:
    putting = cluster.put(b"key").before(kind)
    cluster.state.saw_targets([Announcement(3, ONE.url, BLOCK_BYTES, 16)], cluster.clock())
    assert putting.end() == [Outcome.STORED]


def test_a_target_may_leave_the_list_while_values_are_adopted(cluster: Cluster) -> None:
    cluster.put(b"key").end()
    cluster.begin(ONE)
    state = cluster.writer()
    putting = cluster.put(b"other", state=state).before(Scan)
    state.saw_targets([], cluster.clock())
    assert putting.end() == [Outcome.STORED]
    assert state.shares[1].value_count == 2


def test_a_share_of_a_life_that_has_ended_is_dropped_however_late_the_next_one_is_seen(cluster: Cluster) -> None:
    cluster.put(b"key").end()
    for listed in ([], [Announcement(3, ONE.url, BLOCK_BYTES, 16)]):
        cluster.state.saw_targets(listed, cluster.clock())
    assert not cluster.state.shares


def test_a_sweep_leaves_what_is_on_targets_that_it_does_not_see(clock: Clock) -> None:
    cluster = Cluster(clock, ONE, OTHER)
    sweeper = State(Identity(bytes(limits.INITIATOR_ID_BYTES), NAMES.fingerprint), "lru")
    cluster.put(b"key", blocks=1, copies=1).end()
    [number] = [number for number, bound in cluster.bound.items() if bound]
    seen, unseen = (OTHER, ONE) if number == ONE.incarnation else (ONE, OTHER)
    cluster.index.perform(Withdraw(unseen.incarnation))
    cluster.put(b"x", state=sweeper).end()
    clock.now_s += limits.CACHE_SWEEP_S + 1
    cluster.index.perform(Announce(seen))
    cluster.put(b"y", state=sweeper).before(Scan).end()
    assert cluster.index.perform(Lookup([NAMES.of(b"key")])).records != [None]
    assert sweeper.counters.stale_records == 0


def test_a_sweep_leaves_what_has_another_copy(clock: Clock) -> None:
    cluster = Cluster(clock, ONE, OTHER)
    sweeper = State(Identity(bytes(limits.INITIATOR_ID_BYTES), NAMES.fingerprint), "lru")
    cluster.put(b"x", state=sweeper).end()
    cluster.put(b"key", copies=2).end()
    for target in (ONE, OTHER):
        kept, cluster.bound[target.incarnation] = cluster.bound[target.incarnation], {}
        clock.now_s += limits.CACHE_SWEEP_S + 1
        for one in (ONE, OTHER):
            cluster.index.perform(Announce(one))
        cluster.put(b"y", state=sweeper).before(Scan).end()
        assert cluster.index.perform(Lookup([NAMES.of(b"key")])).records != [None]
        cluster.bound[target.incarnation] = kept
    assert sweeper.counters.stale_records == 0


# --- an index that begins anew -------------------------------------------------------------------


def test_an_index_that_begins_anew_while_it_is_told_is_told_all_again(clock: Clock) -> None:
    cluster = Cluster(clock, ONE, OTHER)

    def begin_anew() -> None:
        cluster.index.clear()
        for target in (ONE, OTHER):
            cluster.index.perform(Announce(target))

    keys = keys_of(ONE, 1) + keys_of(OTHER, 1)
    cluster.put(*keys).end()
    begin_anew()
    announcing = cluster.put(b"new").before(Publish).take()  # of one target's
    begin_anew()
    named = [Named(NAMES.of(b"none"))]
    Running(cluster, contains_many(cluster.state, named, clock()), named).end()  # sees it, and tells nothing
    announcing.end()
    cluster.put(b"next").end()
    assert None not in cluster.index.perform(Lookup([NAMES.of(key) for key in keys])).records


# --- leaks ---------------------------------------------------------------------------------------


def test_room_that_was_made_is_given_back_if_there_is_none_elsewhere(clock: Clock) -> None:
    cluster = Cluster(clock, ONE, OTHER)
    cluster.put(*keys_of(OTHER, 4)).end()
    assert cluster.put(*keys_of(ONE, 1), copies=2).before(Remove).fail().end() == [Outcome.UNAVAILABLE]
    assert cluster.put(b"last", blocks=4, copies=2).end() == [Outcome.STORED]
    assert [share.used_blocks for share in cluster.state.shares.values()] == [4, 4]


@pytest.mark.parametrize("full", [ONE, OTHER])
def test_one_copy_without_room_leaves_the_other_one(clock: Clock, full: Announcement) -> None:
    cluster = Cluster(clock, ONE, OTHER)
    cluster.full = {full.incarnation}
    assert cluster.put(b"key", copies=2).end() == [Outcome.STORED]
    assert sorted(share.used_blocks for share in cluster.state.shares.values()) == [0, 1]
    cluster.delete(b"key")
    assert cluster.used(ONE) + cluster.used(OTHER) == 0


def test_an_interruption_while_it_is_published_frees_the_blocks_with_the_next_put(cluster: Cluster) -> None:
    cluster.put(b"key").before(Publish).interrupt()
    assert cluster.put(b"next").end() == [Outcome.STORED]
    assert cluster.used() == cluster.state.shares[1].used_blocks == 1


def test_blocks_that_are_being_freed_when_it_is_interrupted_are_freed_by_the_next_put(cluster: Cluster) -> None:
    """The interruption may have come before a request has left, and the session goes on."""
    cluster.put(b"old").end()
    cluster.index.perform(Discard([NAMES.of(b"old")]))
    cluster.state.shares[1].drop(NAMES.of(b"old"))
    cluster.put(b"key").before(Free).interrupt()
    assert cluster.put(b"next", blocks=4).end() == [Outcome.STORED]
    assert cluster.used() == cluster.state.shares[1].used_blocks == 4


def test_blocks_that_are_stored_when_others_are_freed_and_it_is_interrupted_are_freed_too(clock: Clock) -> None:
    cluster = Cluster(clock, ONE, OTHER)
    [key] = keys_of(OTHER, 1)
    cluster.put(key).end()
    both = cluster.put(b"both", copies=2).before(AllocStore)
    cluster.index.perform(Discard([NAMES.of(key)]))
    cluster.state.shares[OTHER.incarnation].drop(NAMES.of(key))
    both.before(Free).interrupt()
    assert cluster.put(b"last", blocks=4, copies=2).end() == [Outcome.STORED]
    assert (cluster.used(ONE), cluster.used(OTHER)) == (4, 4)
    assert [share.used_blocks for share in cluster.state.shares.values()] == [4, 4]


def test_blocks_that_were_never_asked_for_are_room_whatever_became_of_the_others(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    said = Results.of([Result(Status.NO_SPACE), Result(None, error=ApiMisuse("its region is revoked"))])
    monkeypatch.setattr(cluster, "_alloc_store", lambda *_: said)
    assert cluster.put(b"key", blocks=2).end() == [Outcome.NO_SPACE]
    assert cluster.state.shares[1].used_blocks == 0


# --- without looking first -----------------------------------------------------------------------


@pytest.fixture(params=[True, False], ids=["checksums known", "checksums to be taken"])
def claiming(cluster: Cluster, request: pytest.FixtureRequest) -> Cluster:
    """Its writer has put once, which tells it all that a put without a look-up needs."""
    cluster.knows_checksums = request.param
    cluster.put(b"first").end()
    return cluster


def test_what_somebody_else_has_put_meanwhile_is_present_and_its_blocks_are_freed(claiming: Cluster) -> None:
    claim = claiming.put(b"key").before(Claim)
    other = claiming.writer()
    other.identity = Identity(bytes(limits.INITIATOR_ID_BYTES), NAMES.fingerprint)
    assert claiming.put(b"key", state=other).end() == [Outcome.STORED]
    assert claim.take().before(Free).before(Lookup).end() == [Outcome.PRESENT]
    assert (claiming.records_are_true(), claiming.used()) == (True, 2)


def test_after_a_name_that_was_there_others_are_looked_up_for_a_while(claiming: Cluster) -> None:
    assert claiming.put(b"1", b"1").end() == [Outcome.STORED, Outcome.PRESENT]
    for _ in range(limits.CACHE_CLAIM_AFTER):
        assert isinstance(claiming.put(b"x").step, Lookup)
        assert claiming.put(b"x").end() == [Outcome.STORED]
        claiming.delete(b"x")
    assert isinstance(claiming.put(b"x").step, AllocStore)


@pytest.mark.parametrize("blocks", [1, 4], ids=["that is known", "there is no room for"])
def test_what_may_not_be_new_or_not_fit_is_looked_up(claiming: Cluster, blocks: int) -> None:
    assert isinstance(claiming.put(b"first" if blocks == 1 else b"other", blocks=blocks).step, Lookup)
    assert claiming.state.shares[1].used_blocks == claiming.used() == 1


def test_a_record_on_a_target_that_has_gone_makes_way_for_one_that_is_claimed(claiming: Cluster) -> None:
    gone = Record(bytes(limits.INITIATOR_ID_BYTES), 1, 0, BLOCK_BYTES, (Copy(99, (BlockRef(1, 1, 1),)),)).pack()
    claiming.index.perform(Publish([(NAMES.of(b"key"), gone)]))
    assert claiming.put(b"key").end() == [Outcome.STORED]
    assert (claiming.records_are_true(), claiming.used()) == (True, 2)
    assert claiming.state.counters.stale_records == 1


@pytest.mark.parametrize("kind", [AllocStore, Claim])
def test_a_session_that_is_followed_by_another_while_it_claims(claiming: Cluster, kind: type) -> None:
    putting = claiming.put(b"key").before(kind)
    claiming.begin(ONE)
    claiming.state.puts_to_look_up = 1
    assert claiming.put(b"other").end() == [Outcome.STORED]
    assert putting.end() == [Outcome.STORED]
    assert claiming.records_are_true()
    assert claiming.used() == claiming.state.shares[1].used_blocks == 3


def test_an_index_that_is_lost_while_it_is_claimed_leaks_nothing(claiming: Cluster) -> None:
    putting = claiming.put(b"key").before(Claim)
    claiming.index.perform(putting.step)  # its answer is lost
    assert putting.fail().end() == [Outcome.UNAVAILABLE]
    assert claiming.put(b"next", blocks=3).end() == [Outcome.STORED]
    assert claiming.records_are_true()
    assert claiming.used() == claiming.state.shares[1].used_blocks == 4


def test_a_batch_of_which_somebody_has_put_a_part_frees_that_and_holds_the_rest(claiming: Cluster) -> None:
    claim = claiming.put(b"1", b"2", b"3").before(Claim)
    other = claiming.writer()
    other.identity = Identity(bytes(limits.INITIATOR_ID_BYTES), NAMES.fingerprint)
    record = Record(other.owner, 1, 0, BLOCK_BYTES, (Copy(1, (BlockRef(1, 1, 1),)),)).pack()
    claiming.index.perform(Publish([(NAMES.of(b"2"), record)]))
    assert claim.end() == [Outcome.STORED, Outcome.PRESENT, Outcome.STORED]
    assert claiming.used() == claiming.state.shares[1].used_blocks == 3
    assert claiming.state.shares[1].value_count == 3


def test_what_is_made_while_the_index_is_asked_is_made_once(claiming: Cluster) -> None:
    claim = claiming.put(b"1", b"2").before(Claim)
    assert isinstance(claim.step, Claim)
    for _ in range(2):
        if claim.step.meanwhile is not None:
            claim.step.meanwhile()
    assert claim.end() == [Outcome.STORED, Outcome.STORED]
    assert claiming.state.counters.bytes_stored == 3 * BLOCK_BYTES
    claiming.delete(b"1")
    assert claiming.used() == claiming.state.shares[1].used_blocks == 2
    assert claiming.records_are_true()


def test_a_claim_that_is_interrupted_leaks_nothing(claiming: Cluster) -> None:
    claiming.put(b"key").before(Claim).interrupt()
    assert claiming.put(b"next", blocks=3).end() == [Outcome.STORED]
    assert claiming.used() == claiming.state.shares[1].used_blocks == 4


def test_what_is_refused_though_there_was_room_is_told_as_ever(claiming: Cluster) -> None:
    claiming.full.add(1)
    assert claiming.put(b"key").end() == [Outcome.NO_SPACE]
    assert claiming.used() == claiming.state.shares[1].used_blocks == 1


def test_a_claim_hears_of_what_others_have_deleted_and_of_a_new_life(claiming: Cluster) -> None:
    name = NAMES.of(b"first")
    [record] = claiming.index.perform(Discard([name]))
    claiming.index.perform(Tell(claiming.state.owner, [gone_letter(name, record)]))
    assert claiming.put(b"key").before(Claim).end() == [Outcome.STORED]
    assert claiming.used() == 1
    claiming.index.clear()
    claiming.index.perform(Announce(ONE))
    claiming.put(b"other").before(Claim).end()
    assert claiming.index.perform(Lookup([NAMES.of(b"key")])).records != [None]


# --- while the index is asked --------------------------------------------------------------------


@pytest.fixture(params=[True, False], ids=["verified", "not verified"])
def verify(request: pytest.FixtureRequest) -> bool:
    verified: bool = request.param
    return verified


@pytest.mark.parametrize("answered", [True, False])
def test_what_was_loaded_while_the_index_failed_is_a_miss(cluster: Cluster, answered: bool, verify: bool) -> None:
    cluster.put(b"key").end()
    getting = cluster.get(b"key", verify=verify).before(Beside)
    if answered:
        assert isinstance(getting.step, Beside)
        reply = IndexUnavailable("no answer"), {1: Results.of([Result(Status.SUCCESS, 1, 1, BLOCK_BYTES)])}
        getting._next(lambda: getting._plan.send(reply))
    else:
        getting.fail()
    assert (getting.step, getting.end()) == (None, [Outcome.MISS])
    assert cluster.state.counters.index_failures == 1


def test_what_is_remembered_and_gone_is_stale_like_any_other(cluster: Cluster, verify: bool) -> None:
    cluster.put(b"key").end()
    cluster.bound[1].clear()
    assert cluster.get(b"key", verify=verify).before(Beside).take().before(Remove).end() == [Outcome.MISS]
    assert cluster.state.counters.stale_records == 1
    assert cluster.index.perform(Lookup([NAMES.of(b"key")])).records == [None]
    assert isinstance(cluster.get(b"key").step, Lookup)


@pytest.mark.parametrize(
    ("length_bytes", "flipped", "outcome"),
    [(BLOCK_BYTES, 0, Outcome.HIT), (BLOCK_BYTES, 1, Outcome.MISS), (BLOCK_BYTES - 1, 0, Outcome.MISS)],
    ids=["as recorded", "another checksum", "another length"],
)
def test_what_was_loaded_by_what_is_remembered_counts_if_it_is_as_recorded(
    cluster: Cluster, length_bytes: int, flipped: int, outcome: Outcome
) -> None:
    cluster.put(b"key").end()
    getting = cluster.get(b"key", verify=True).before(Beside)
    assert isinstance(getting.step, Beside)
    taken = checksum([memoryview(bytes(BLOCK_BYTES))]) ^ flipped
    loaded = with_checksums([Result(Status.SUCCESS, 1, 1, length_bytes)], [taken])
    reply = cluster.index.perform(getting.step.index), {1: loaded}
    getting._next(lambda: getting._plan.send(reply))
    assert getting.end() == [outcome]
    counters = cluster.state.counters
    assert (counters.hits, counters.corrupt_values) == (int(outcome is Outcome.HIT), flipped)
    there = cluster.index.perform(Lookup([NAMES.of(b"key")])).records != [None]
    assert there is (outcome is Outcome.HIT)


def test_what_is_remembered_and_was_deleted_is_a_miss_and_not_stale(cluster: Cluster, verify: bool) -> None:
    cluster.put(b"key").end()
    cluster.index.perform(Discard([NAMES.of(b"key")]))
    assert cluster.get(b"key", verify=verify).before(Beside).end() == [Outcome.MISS]
    assert cluster.state.counters.stale_records == 0
    assert isinstance(cluster.get(b"key").step, Lookup)
