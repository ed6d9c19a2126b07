"""Handle ranges (profile 3 "Handle ranges are disjoint", 8.4)."""

from __future__ import annotations

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kbtp.blocks import HandleRange, HandleRanges
from kbtp.errors import ApiMisuse


def test_the_range_test_is_unsigned() -> None:
    handles = HandleRange(first=100, count=10)
    assert handles.contains(100)
    assert handles.contains(109)
    assert not handles.contains(110)
    assert not handles.contains(99)
    assert list(HandleRange(2**64 - 1, 2)) == [2**64 - 1, 0]
    assert HandleRange(2**64 - 1, 2).contains(0)


def test_first_fit_and_what_there_is_is_granted() -> None:
    ranges = HandleRanges(base_handle=1000, handle_count=10)
    first = ranges.assign(4)
    assert first == HandleRange(1000, 4)
    second = ranges.assign(4)
    assert second == HandleRange(1004, 4)
    ranges.release(first)
    assert ranges.assign(2) == HandleRange(1000, 2)
    # Two gaps of two are left: neither holds three, so the longest is granted whole.
    assert ranges.assign(3) == HandleRange(1002, 2)
    assert ranges.assign(2**63) == HandleRange(1008, 2)
    assert ranges.assign(1) is None


def test_released_neighbours_grow_together() -> None:
    ranges = HandleRanges(base_handle=0, handle_count=9)
    a, b, c = (ranges.assign(3) for _ in range(3))
    assert a and b and c
    ranges.release(a)
    ranges.release(c)
    ranges.release(b)
    assert ranges.assign(9) == HandleRange(0, 9)


def test_the_range_of_a_handle() -> None:
    ranges = HandleRanges(base_handle=2**64 - 2, handle_count=6)
    a = ranges.assign(3)
    b = ranges.assign(2)
    assert a == HandleRange(2**64 - 2, 3)
    assert [ranges.range_of(h) for h in (2**64 - 3, 2**64 - 2, 0, 1, 2, 3, 4)] == [None, a, a, b, b, None, None]


def test_misuse_is_refused() -> None:
    ranges = HandleRanges(base_handle=0, handle_count=9)
    a = ranges.assign(3)
    assert a
    for never_assigned in (HandleRange(3, 3), HandleRange(0, 2), HandleRange(0, 4), HandleRange(1, 2)):
        with pytest.raises(ApiMisuse, match="is not assigned"):
            ranges.release(never_assigned)
    ranges.release(a)
    with pytest.raises(ApiMisuse, match="is not assigned"):
        ranges.release(a)
    with pytest.raises(ApiMisuse, match="at least 1"):
        ranges.assign(0)
    for base, count in ((-1, 1), (2**64, 1), (0, 0), (0, 2**64)):
        with pytest.raises(ApiMisuse, match="handle"):
            HandleRanges(base, count)


class Ranges(RuleBasedStateMachine):
    """Any order of assign and release: ranges stay disjoint, no handle is lost, gaps are as long as can be."""

    @initialize(base=st.sampled_from([0, 5000, 2**64 - 7, 2**64 - 12]))
    def start(self, base: int) -> None:
        self.base = base
        self.ranges = HandleRanges(base, 12)
        self.assigned: list[HandleRange] = []

    def positions(self, handles: HandleRange) -> set[int]:
        return {(handle - self.base) % 2**64 for handle in handles}

    def longest_gap(self) -> int:
        taken = set().union(*map(self.positions, self.assigned))
        text = "".join("x" if position in taken else "." for position in range(12))
        return max(map(len, text.split("x")))

    @rule(wanted=st.integers(1, 14))
    def assign(self, wanted: int) -> None:
        longest = self.longest_gap()
        granted = self.ranges.assign(wanted)
        if granted is None:
            assert longest == 0
            return
        assert granted.count == min(wanted, longest)
        self.assigned.append(granted)

    @precondition(lambda self: self.assigned)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        released = data.draw(st.sampled_from(self.assigned))
        self.assigned.remove(released)
        self.ranges.release(released)

    @invariant()
    def disjoint_and_none_lost(self) -> None:
        taken = [position for handles in self.assigned for position in self.positions(handles)]
        assert len(taken) == len(set(taken))
        assert set(taken) <= set(range(12))
        assert self.ranges.free_count == 12 - len(taken)
        for position in range(12):
            handle = (self.base + position) % 2**64
            owner = [handles for handles in self.assigned if handles.contains(handle)]
            assert self.ranges.range_of(handle) == (owner[0] if owner else None)


TestRanges = Ranges.TestCase
