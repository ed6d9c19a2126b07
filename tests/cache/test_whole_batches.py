"""What is done for a whole batch at once is what is done value by value."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kbtp import limits
from kbtp.cache.eviction import POLICIES, Lru, Policy
from kbtp.cache.keys import Names
from kbtp.cache.outcomes import Outcome
from kbtp.cache.record import Copy, Record
from kbtp.cache.remembered import COUNT_OF_ONE_BLOCK, Remembered
from kbtp.cache.requests import buffers_of, named_of, values_of
from kbtp.cache.share import Held, Share
from kbtp.cache.state import Identity, State
from kbtp.types import BlockRef

BLOCK_BYTES = 4096
NAMES = [b"%d" % number for number in range(6)]
OWNER = bytes(limits.INITIATOR_ID_BYTES)
BATCHES = st.lists(st.tuples(st.booleans(), st.lists(st.sampled_from(NAMES), unique=True)), max_size=12)
"""Whether each is put, else deleted, and which."""


def ref_of(generation: int) -> BlockRef:
    return BlockRef(generation, generation, BLOCK_BYTES)


def record_of(generation: int) -> Record:
    return Record(OWNER, BLOCK_BYTES, 0, BLOCK_BYTES, (Copy(1, (ref_of(generation),)),))


def held_of(generation: int) -> Held:
    return Held(record_of(generation).pack(), (ref_of(generation),))


def victims_of(share: Share) -> list[bytes]:
    return [name for name, _ in share.victims(len(NAMES), 0.0)]


@pytest.mark.parametrize("make", POLICIES.values(), ids=POLICIES)
@given(batches=BATCHES)
def test_a_share_holds_and_drops_them(make: Callable[[], Policy], batches: list[tuple[bool, list[bytes]]]) -> None:
    whole, single = (Share(1, "kbtp://10.0.0.1", BLOCK_BYTES, make()) for _ in range(2))
    for number, (puts, names) in enumerate(batches):
        whole.used_all(names[::2])
        for name in names[::2]:
            single.used(name)
        if puts:
            values = {name: held_of(10 * number + place) for place, name in enumerate(names)}
            whole.hold_all(values)
            for name, held in values.items():
                single.hold(name, held)
            continue
        # One that is held with another record stays.
        held_now = {name: held.record for name in names if (held := whole.get(name)) is not None}
        entries = [(name, b"another" if name == NAMES[0] else held_now.get(name, b"none")) for name in names]
        dropped = [entry for entry in entries if entry[0] in held_now and entry[0] != NAMES[0]]
        assert whole.drop_all(entries) == dropped
        for name, _ in dropped:
            single.drop(name)
    assert whole.entries() == single.entries()
    assert sorted(whole.orphans, key=repr) == sorted(single.orphans, key=repr)
    assert victims_of(whole) == victims_of(single)


@given(batches=BATCHES, most_blocks=st.integers(0, 14))
def test_they_are_remembered(batches: list[tuple[bool, list[bytes]]], most_blocks: int) -> None:
    whole, single = Remembered(most_blocks), Remembered(most_blocks)
    for number, (puts, names) in enumerate(batches):
        if puts:
            records = {name: record_of(number % 3) for name in names}
            known = {name: (record.pack(), record, COUNT_OF_ONE_BLOCK) for name, record in records.items()}
            whole.keep_all(known)
            for name, record in records.items():
                single.keep(name, record.pack(), record)
        else:
            whole.forget_all(names)
            for name in names:
                single.forget(name)
        assert [whole.get(name) for name in NAMES] == [single.get(name) for name in NAMES]


def state_with(*shares: Mapping[bytes, int]) -> State:
    """By name, the generation of what each holds."""
    state = State(Identity(OWNER, b"fingerprint"), "lru")
    for number, values in enumerate(shares):
        share = state.shares[number] = Share(number, "kbtp://10.0.0.1", BLOCK_BYTES, Lru())
        for name, generation in values.items():
            share.hold(name, held_of(generation))
            state.remembered.keep(name, held_of(generation).record, record_of(generation))
    return state


_HELD = st.dictionaries(st.sampled_from(NAMES), st.integers(1, 2))
_GONE = st.lists(st.tuples(st.sampled_from(NAMES), st.integers(1, 2)), unique=True)
"""One name may be there with two records: another writer's came between."""


@given(first=_HELD, second=_HELD, gone=_GONE)
def test_of_what_is_lost_the_rest_was_not_ours(
    first: dict[bytes, int], second: dict[bytes, int], gone: list[tuple[bytes, int]]
) -> None:
    whole, single = state_with(first, second), state_with(first, second)
    entries = [(name, held_of(generation).record) for name, generation in gone]
    assert whole.all_lost(entries) == [entry for entry in entries if not single.lost(*entry)]
    for number in (0, 1):
        assert whole.shares[number].entries() == single.shares[number].entries()
        assert whole.shares[number].orphans == single.shares[number].orphans
    assert not whole.remembered.has_any([name for name, _ in gone])


class Interrupted(Lru):
    def remove_all(self, names: Iterable[bytes]) -> None:
        raise KeyboardInterrupt


def test_who_is_interrupted_while_it_drops_still_has_every_victim() -> None:
    share = Share(1, "kbtp://10.0.0.1", BLOCK_BYTES, Interrupted())
    share.hold_all({name: held_of(place) for place, name in enumerate(NAMES)})
    with pytest.raises(KeyboardInterrupt):
        share.drop_all([(NAMES[0], held_of(0).record)])
    assert victims_of(share) == NAMES


class Once:
    """A buffer that gives its octets away once, as a DLPack capsule may be."""

    def __init__(self) -> None:
        self.asked = 0

    def __dlpack_device__(self) -> tuple[int, int]:
        return 1, 0

    def __dlpack__(self, **_: object) -> object:
        self.asked += 1
        return np.zeros(4, np.uint8).__dlpack__()


def test_each_buffer_is_asked_for_its_octets_once() -> None:
    once = Once()
    values = values_of(Names(), [b"a", b"b"], [once, "text"])
    assert (once.asked, len(values.views[0]), values.invalid.keys()) == (1, 4, {1})


@pytest.mark.parametrize("wrong", ["key", "buffer"])
def test_one_that_is_wrong_is_so_by_itself(wrong: str) -> None:
    names, keys = Names(), [b"a", b"" if wrong == "key" else b"b", b"c"]
    buffers: list[object] = [bytearray(1), "text" if wrong == "buffer" else bytearray(2), bytearray(3)]
    values = values_of(names, keys, buffers)
    assert [len(view) for view in values.views] == [1, 0, 3]
    assert (values.names[0], values.names[2]) == (names.of(b"a"), names.of(b"c"))
    assert buffers_of(names, keys, buffers).invalid.keys() == {1}
    for asked in (values.puts(), named_of(names, keys) if wrong == "key" else []):
        items = [one.item for one in asked]
        assert [item and item.outcome for item in items] == ([None, Outcome.INVALID, None] if items else [])
