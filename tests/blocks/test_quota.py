"""Allocation quotas (draft 3.4, profile 6.8)."""

from __future__ import annotations

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from kbtp.blocks import QuotaLedger
from kbtp.errors import ApiMisuse


def test_the_sum_of_quotas_is_not_larger_than_the_pool() -> None:
    ledger = QuotaLedger(10)
    assert ledger.grant("prefill", 6) == 6
    assert ledger.grant("decode", 6) == 4
    assert ledger.grant("reader", 6) == 0
    assert ledger.left == 0


def test_a_reader_with_a_quota_of_zero_can_charge_nothing() -> None:
    ledger = QuotaLedger(1)
    assert ledger.grant("reader", 0) == 0
    assert not ledger.charge("reader")
    ledger.release("reader")
    assert ledger.left == 1


def test_usage_stops_at_the_quota_and_goes_on_after_a_credit() -> None:
    ledger = QuotaLedger(5)
    ledger.grant("prefill", 2)
    assert [ledger.charge("prefill") for _ in range(3)] == [True, True, False]
    assert ledger.usage("prefill") == 2
    ledger.credit("prefill")
    assert ledger.charge("prefill")


def test_what_a_released_holder_still_uses_returns_unit_by_unit() -> None:
    ledger = QuotaLedger(5)
    ledger.grant("prefill", 4)
    assert ledger.charge("prefill")
    assert ledger.charge("prefill")
    ledger.release("prefill")
    assert (ledger.left, ledger.quota("prefill"), ledger.usage("prefill")) == (3, 2, 2)
    assert not ledger.charge("prefill")
    ledger.credit("prefill")
    assert ledger.left == 4
    ledger.credit("prefill")
    assert (ledger.left, ledger.quota("prefill"), ledger.usage("prefill")) == (5, 0, 0)
    assert ledger.grant("prefill", 5) == 5


def test_a_quota_set_apart_is_none_of_the_others() -> None:
    ledger = QuotaLedger(5)
    ledger.grant("prefill", 4)
    ledger.set_apart("prefill", 9)
    ledger.set_apart("decode", 2)
    assert (ledger.left, ledger.quota("prefill"), ledger.quota("decode")) == (5, 9, 2)
    assert [ledger.charge("decode") for _ in range(3)] == [True, True, False]
    ledger.credit("decode")
    ledger.release("decode")
    assert (ledger.left, ledger.quota("decode"), ledger.usage("decode")) == (5, 1, 1)
    ledger.credit("decode")
    ledger.release("prefill")
    assert ledger.left == 5
    assert ledger.grant("decode", 5) == 5


def test_a_quota_in_use_released_or_set_apart_is_not_set_apart() -> None:
    ledger = QuotaLedger(5)
    ledger.grant("prefill", 1)
    ledger.charge("prefill")
    ledger.set_apart("decode", 1)
    for holder in ("prefill", "decode"):
        with pytest.raises(ApiMisuse, match="in use, released or set apart"):
            ledger.set_apart(holder, 1)
    assert (ledger.left, ledger.quota("prefill"), ledger.quota("decode")) == (4, 1, 1)


def test_misuse_is_refused() -> None:
    ledger = QuotaLedger(5)
    ledger.grant("prefill", 4)
    with pytest.raises(ApiMisuse, match="more often than charged"):
        ledger.credit("prefill")
    with pytest.raises(ApiMisuse, match="has a quota already"):
        ledger.grant("prefill", 1)
    with pytest.raises(ApiMisuse, match="zero or more"):
        ledger.grant("decode", -1)
    for use in (ledger.charge, ledger.credit, ledger.release):
        with pytest.raises(ApiMisuse, match="'decode' has no quota"):
            use("decode")
    ledger.charge("prefill")
    ledger.release("prefill")
    with pytest.raises(ApiMisuse, match="released already"):
        ledger.release("prefill")
    with pytest.raises(ApiMisuse, match="at least 1"):
        QuotaLedger(0)


class Ledger(RuleBasedStateMachine):
    """Any order of calls against a model of dictionaries."""

    def __init__(self) -> None:
        super().__init__()
        self.ledger = QuotaLedger(7)
        self.quota: dict[str, int] = {}
        self.usage: dict[str, int] = {}
        self.released: set[str] = set()

    holders = st.sampled_from("abc")

    @rule(holder=holders, requested=st.integers(0, 9))
    def grant(self, holder: str, requested: int) -> None:
        if holder in self.quota:
            return
        granted = self.ledger.grant(holder, requested)
        assert granted == min(requested, 7 - sum(self.quota.values()))
        self.quota[holder] = granted
        self.usage[holder] = 0

    @rule(holder=holders)
    def charge(self, holder: str) -> None:
        if holder in self.quota:
            charged = self.ledger.charge(holder)
            assert charged == (self.usage[holder] < self.quota[holder])
            self.usage[holder] += charged

    @rule(holder=holders)
    def credit(self, holder: str) -> None:
        if self.usage.get(holder):
            self.ledger.credit(holder)
            self.usage[holder] -= 1
            self._settle(holder)

    @rule(holder=holders)
    def release(self, holder: str) -> None:
        if holder in self.quota and holder not in self.released:
            self.ledger.release(holder)
            self.released.add(holder)
            self._settle(holder)

    def _settle(self, holder: str) -> None:
        if holder in self.released:
            self.quota[holder] = self.usage[holder]
            if not self.usage[holder]:
                self.released.remove(holder)
                del self.quota[holder], self.usage[holder]

    @invariant()
    def same_numbers(self) -> None:
        assert self.ledger.left == 7 - sum(self.quota.values()) >= 0
        for holder in "abc":
            assert self.ledger.quota(holder) == self.quota.get(holder, 0)
            assert self.ledger.usage(holder) == self.usage.get(holder, 0)


TestLedger = Ledger.TestCase
