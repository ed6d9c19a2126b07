//! RFC 7306 5.1 arithmetic on 64-bit values.

/// The value FetchAdd stores (RFC 7306 5.1.1).
///
/// Each bit of `add_mask` is the most significant bit of a field: its carry is dropped, as is that of bit 63.
/// The bits below every field's top are added as usual; a carry into a top bit and the two top bits themselves meet in
/// an exclusive or, which is an addition without a carry out.
pub const fn fetch_add(old: u64, add_data: u64, add_mask: u64) -> u64 {
    let below_tops = !add_mask;
    (old & below_tops).wrapping_add(add_data & below_tops) ^ ((old ^ add_data) & add_mask)
}

/// The value CmpSwap stores (RFC 7306 5.1.2): `old` unless every bit under `compare_mask` is equal.
pub const fn compare_swap(old: u64, swap_data: u64, swap_mask: u64, compare_data: u64, compare_mask: u64) -> u64 {
    if (old ^ compare_data) & compare_mask != 0 {
        return old;
    }
    (old & !swap_mask) | (swap_data & swap_mask)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn bit_serial_fetch_add(old: u64, add: u64, mask: u64) -> u64 {
        let (mut carry, mut new) = (0, 0);
        for bit in 0..64 {
            let total = (old >> bit & 1) + (add >> bit & 1) + carry;
            new |= (total & 1) << bit;
            carry = if mask >> bit & 1 == 1 { 0 } else { total >> 1 };
        }
        new
    }

    fn bit_serial_compare_swap(old: u64, swap: u64, swap_mask: u64, compare: u64, compare_mask: u64) -> u64 {
        let bit_of = |value: u64, bit: u32| value >> bit & 1;
        if (0..64).any(|bit| bit_of(compare_mask, bit) == 1 && bit_of(old, bit) != bit_of(compare, bit)) {
            return old;
        }
        (0..64).fold(0, |new, bit| {
            new | (if bit_of(swap_mask, bit) == 1 {
                bit_of(swap, bit)
            } else {
                bit_of(old, bit)
            }) << bit
        })
    }

    proptest! {
        #[test]
        fn x12_any_mask_adds_as_the_bit_serial_adder(old: u64, add: u64, mask: u64) {
            prop_assert_eq!(fetch_add(old, add, mask), bit_serial_fetch_add(old, add, mask));
        }

        #[test]
        fn x9_without_inner_fields_it_is_a_plain_add(old: u64, add: u64) {
            prop_assert_eq!(fetch_add(old, add, 0), old.wrapping_add(add));
            prop_assert_eq!(fetch_add(old, add, 1 << 63), old.wrapping_add(add));
        }

        #[test]
        fn x11_a_full_mask_is_an_exclusive_or(old: u64, add: u64) {
            prop_assert_eq!(fetch_add(old, add, u64::MAX), old ^ add);
        }

        #[test]
        fn x13_compare_swap_bit_by_bit(old: u64, swap: u64, swap_mask: u64, noise: u64, compare_mask: u64) {
            // A compare value that is near `old` matches often enough to see both outcomes.
            for compare in [old ^ (noise & !compare_mask), old ^ noise] {
                prop_assert_eq!(
                    compare_swap(old, swap, swap_mask, compare, compare_mask),
                    bit_serial_compare_swap(old, swap, swap_mask, compare, compare_mask)
                );
            }
        }

        #[test]
        fn x15_without_a_compare_mask_it_always_swaps(old: u64, swap: u64, compare: u64) {
            prop_assert_eq!(compare_swap(old, swap, u64::MAX, compare, 0), swap);
        }
    }

    #[test]
    fn x10_no_carry_between_two_lanes() {
        let lanes = 0x8000_0000_8000_0000;
        assert_eq!(
            fetch_add(0x0000_0001_FFFF_FFFF, 0x0000_0002_0000_0001, lanes),
            0x0000_0003_0000_0000
        );
    }

    #[test]
    fn x14_a_mismatch_leaves_the_value() {
        assert_eq!(compare_swap(5, 9, u64::MAX, 4, u64::MAX), 5);
        assert_eq!(compare_swap(5, 9, u64::MAX, 5, u64::MAX), 9);
    }
}
