//! Ring counters in both forms (draft 3.3 and 9.2), with the draft's own numbers.

use kbtp_proto::blocks::{CounterForm, ring_order_for};
use proptest::prelude::*;

fn form(masked: bool, order: u32) -> CounterForm {
    if masked {
        CounterForm::masked(order).unwrap()
    } else {
        CounterForm::unmasked(order).unwrap()
    }
}

#[test]
fn the_masked_form_uses_the_drafts_add_data_and_add_mask() {
    let form = form(true, 2);
    assert_eq!(form.add_data(), 0x0000_0001_0000_0010);
    assert_eq!(form.add_mask(), 1 << 63 | 1 << 31 | 1 << (2 + 3));
}

#[test]
fn the_unmasked_form_adds_to_the_ticket_alone() {
    let form = form(false, 2);
    assert_eq!(form.add_data(), 0x0000_0001_0000_0000);
    assert_eq!(form.add_mask(), 0);
    assert_eq!(form.advance(0xFFFF_FFFF_0000_0000), 0);
}

#[test]
fn both_fields_of_the_masked_form_wrap_alone() {
    let form = form(true, 2);
    // The Slot Offset wraps at the end of the ring and carries nothing into the filler bits.
    assert_eq!(form.advance(0x0000_0003_0000_0030), 0x0000_0004_0000_0000);
    // The Ticket wraps at 2^32; both wrap at once, because N divides 2^32.
    assert_eq!(form.advance(0xFFFF_FFFE_0000_0020), 0xFFFF_FFFF_0000_0030);
    assert_eq!(form.advance(0xFFFF_FFFF_0000_0030), 0);
}

#[test]
fn the_largest_ring_fills_the_whole_low_half() {
    let form = form(true, 28);
    assert_eq!(form.add_mask(), 1 << 63 | 1 << 31);
    assert_eq!(form.encode((1 << 28) - 1), 0x0FFF_FFFF_FFFF_FFF0);
    assert_eq!(form.advance(0x0FFF_FFFF_FFFF_FFF0), 0x1000_0000_0000_0000);
}

#[test]
fn orders_outside_the_profile_are_refused() {
    for order in [0, 29, u32::MAX] {
        assert!(CounterForm::masked(order).unwrap_err().0.starts_with("ring order"));
        assert!(CounterForm::unmasked(order).is_err());
    }
}

#[test]
fn the_smallest_ring_with_a_slot_a_block() {
    for (blocks, order) in [(1, 1), (2, 1), (3, 2), (4, 2), (5, 3), (1 << 28, 28)] {
        assert_eq!(ring_order_for(blocks), Ok(order));
    }
    assert!(ring_order_for((1 << 28) + 1).is_err());
}

proptest! {
    #[test]
    fn a_fetch_add_goes_from_one_ticket_to_the_next(
        masked: bool,
        order in 1_u32..=28,
        ticket in prop_oneof![any::<u32>(), u32::MAX - 40..=u32::MAX],
    ) {
        let form = form(masked, order);
        let value = form.encode(ticket);
        prop_assert_eq!(form.ticket_of(value), ticket);
        prop_assert_eq!(form.slot_offset_of(value), 16 * (u64::from(ticket) % (1 << order)));
        prop_assert!(form.well_formed(value));
        prop_assert_eq!(form.advance(value), form.encode(ticket.wrapping_add(1)));
    }

    #[test]
    fn no_value_leads_outside_the_ring_and_only_proper_ones_are_well_formed(
        masked: bool,
        order in 1_u32..=28,
        value: u64,
        ticket: u32,
        bit in 0..32,
    ) {
        let form = form(masked, order);
        prop_assert!(form.slot_offset_of(value) < 16 << order);
        prop_assert_eq!(form.well_formed(value), value == form.encode((value >> 32) as u32));
        prop_assert!(!form.well_formed(form.encode(ticket) ^ (1_u64 << bit)));
    }
}
