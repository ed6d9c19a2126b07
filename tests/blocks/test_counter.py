"""Ring counters in both forms (draft 3.3 and 9.2), with the draft's own numbers."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kbtp.atomics import fetch_add
from kbtp.blocks import CounterForm, MaskedCounter, UnmaskedCounter, ring_order_for
from kbtp.errors import ApiMisuse

FORMS = pytest.mark.parametrize("form_of", [MaskedCounter, UnmaskedCounter])
tickets = st.one_of(st.integers(0, 2**32 - 1), st.integers(2**32 - 40, 2**32 - 1))
orders = st.integers(1, 28)


def advance(form: CounterForm, value: int) -> int:
    return fetch_add(value, form.add_data, form.add_mask)


def test_masked_form_uses_the_drafts_add_data_and_add_mask() -> None:
    form = MaskedCounter(order=2)
    assert form.add_data == 0x0000000100000010
    assert form.add_mask == (1 << 63) | (1 << 31) | (1 << (2 + 3))


def test_unmasked_form_adds_to_the_ticket_alone() -> None:
    form = UnmaskedCounter(order=2)
    assert form.add_data == 0x0000000100000000
    assert form.add_mask == 0


def test_both_fields_of_the_masked_form_wrap_alone() -> None:
    form = MaskedCounter(order=2)
    # The Slot Offset wraps at the end of the ring and carries nothing into the filler bits.
    assert advance(form, 0x00000003_00000030) == 0x00000004_00000000
    # The Ticket wraps at 2^32; both wrap at once, because N divides 2^32.
    assert advance(form, 0xFFFFFFFE_00000020) == 0xFFFFFFFF_00000030
    assert advance(form, 0xFFFFFFFF_00000030) == 0x00000000_00000000


def test_unmasked_ticket_wraps() -> None:
    assert advance(UnmaskedCounter(order=2), 0xFFFFFFFF_00000000) == 0


def test_the_largest_ring_fills_the_whole_low_half() -> None:
    form = MaskedCounter(order=28)
    assert form.add_mask == (1 << 63) | (1 << 31)
    assert form.encode(2**28 - 1) == 0x0FFFFFFF_FFFFFFF0
    assert advance(form, 0x0FFFFFFF_FFFFFFF0) == 0x10000000_00000000


@FORMS
@given(order=orders, ticket=tickets)
def test_a_fetch_add_goes_from_one_ticket_to_the_next(
    form_of: type[MaskedCounter] | type[UnmaskedCounter], order: int, ticket: int
) -> None:
    form = form_of(order)
    value = form.encode(ticket)
    assert form.ticket_of(value) == ticket
    assert form.slot_offset_of(value) == 16 * (ticket % 2**order)
    assert form.well_formed(value)
    assert advance(form, value) == form.encode((ticket + 1) % 2**32)


@FORMS
@given(order=orders, value=st.integers(0, 2**64 - 1), ticket=tickets, bit=st.integers(0, 31))
def test_no_value_leads_outside_the_ring_and_only_proper_ones_are_well_formed(
    form_of: type[MaskedCounter] | type[UnmaskedCounter], order: int, value: int, ticket: int, bit: int
) -> None:
    form = form_of(order)
    assert form.slot_offset_of(value) in range(0, 16 * 2**order)
    assert form.well_formed(value) == (value == form.encode(value >> 32))
    assert not form.well_formed(form.encode(ticket) ^ (1 << bit))


@FORMS
@pytest.mark.parametrize("order", [-1, 0, 29])
def test_orders_outside_the_profile_are_refused(
    form_of: type[MaskedCounter] | type[UnmaskedCounter], order: int
) -> None:
    with pytest.raises(ApiMisuse, match="ring order"):
        form_of(order)


@pytest.mark.parametrize(("blocks", "order"), [(1, 1), (2, 1), (3, 2), (4, 2), (5, 3), (2**28, 28)])
def test_the_smallest_ring_with_a_slot_a_block(blocks: int, order: int) -> None:
    assert ring_order_for(blocks) == order


def test_more_blocks_than_the_largest_ring_has_slots() -> None:
    with pytest.raises(ApiMisuse, match="ring order 29"):
        ring_order_for(2**28 + 1)
