//! CRC32c as MPA puts it on the wire (RFC 5044 4.4).

use crc_fast::{CrcAlgorithm, Digest, crc32_iscsi, get_calculator_target};

/// Octets of the CRC field.
pub const CRC_BYTES: usize = 4;

/// What a CRC is exclusive-ored with at both ends, so that leading and trailing zeros count.
const XOR: u32 = u32::MAX;

/// The CRC over some octets, whose CRC is `state` (0 for none), and then `octets`.
pub fn update(state: u32, octets: &[u8]) -> u32 {
    if state == 0 {
        return crc32_iscsi(octets); // the same; with no digest to fill, a short message takes a quarter less
    }
    let mut digest = Digest::new_with_init_state(CrcAlgorithm::Crc32Iscsi, u64::from(state ^ XOR));
    digest.update(octets);
    digest.finalize() as u32
}

/// Which instructions `update` takes on this processor, as crc-fast calls them.
#[must_use]
pub fn path() -> String {
    get_calculator_target(CrcAlgorithm::Crc32Iscsi)
}

/// Castagnoli's polynomial, its bits reversed as the CRC's are.
const POLYNOMIAL: u32 = 0x82F6_3B78;

/// What `join` needs to know of octets: x to the power of eight times their number, modulo the polynomial.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Shift(u32);

impl Shift {
    /// Of `length_bytes` octets.
    #[must_use]
    pub fn of(length_bytes: u32) -> Self {
        let (mut power, mut square, mut left) = (1 << 31, 1 << 23, length_bytes); // 1, and x to the power of 8
        while left > 0 {
            if left & 1 == 1 {
                power = product(square, power);
            }
            square = product(square, square);
            left >>= 1;
        }
        Self(power)
    }
}

/// The CRC over octets with CRC `first` and then others with CRC `second`, of which `shift` is.
#[must_use]
pub fn join(first: u32, second: u32, shift: Shift) -> u32 {
    product(shift.0, first) ^ second
}

/// Of two polynomials over GF(2), the coefficient of x to the power of 0 in the highest bit, modulo `POLYNOMIAL`.
fn product(a: u32, mut b: u32) -> u32 {
    let mut product = 0;
    for bit in (0..u32::BITS).rev() {
        if a >> bit & 1 == 1 {
            product ^= b;
        }
        b = (b >> 1) ^ if b & 1 == 1 { POLYNOMIAL } else { 0 };
    }
    product
}

/// The CRC field: least significant octet first, the one little endian field of iWARP.
pub const fn wire(state: u32) -> [u8; CRC_BYTES] {
    state.to_le_bytes()
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;
    use proptest::prelude::*;

    /// Bit by bit, and sharing nothing with `update`.
    pub(crate) fn slow_crc(octets: &[u8]) -> u32 {
        !octets.iter().fold(u32::MAX, |crc, &octet| {
            (0..8).fold(crc ^ u32::from(octet), |crc, _| {
                (crc >> 1) ^ if crc & 1 == 1 { 0x82F6_3B78 } else { 0 }
            })
        })
    }

    #[test]
    fn f4_the_examples_of_rfc_3720_b4() {
        let counting: Vec<u8> = (0..32).collect();
        let falling: Vec<u8> = (0..32).rev().collect();
        for (octets, crc) in [
            (&[0; 32][..], [0xAA, 0x36, 0x91, 0x8A]),
            (&[0xFF; 32], [0x43, 0xAB, 0xA8, 0x62]),
            (&counting, [0x4E, 0x79, 0xDD, 0x46]),
            (&falling, [0x5C, 0xDB, 0x3F, 0x11]),
            (b"123456789", [0x83, 0x92, 0x06, 0xE3]),
        ] {
            assert_eq!(wire(update(0, octets)), crc);
            assert_eq!(wire(slow_crc(octets)), crc);
        }
    }

    #[test]
    fn every_length_at_every_alignment() {
        let octets: Vec<u8> = (0..700u32).map(|n| (n * n) as u8).collect();
        for start in 0..16 {
            for end in start..octets.len() {
                let piece = &octets[start..end];
                assert_eq!(update(0, piece), slow_crc(piece), "{start}..{end}");
            }
        }
    }

    proptest! {
        #[test]
        fn known_crcs_are_joined(
            first in proptest::collection::vec(any::<u8>(), 0..300), second in proptest::collection::vec(any::<u8>(), 0..3000),
        ) {
            let shift = Shift::of(second.len() as u32);
            let joined = join(update(0, &first), update(0, &second), shift);
            prop_assert_eq!(joined, slow_crc(&[first, second].concat()));
        }

        #[test]
        fn pieces_add_up(pieces in proptest::collection::vec(proptest::collection::vec(any::<u8>(), 0..2000), 0..6)) {
            let state = pieces.iter().fold(0, |state, piece| update(state, piece));
            prop_assert_eq!(state, slow_crc(&pieces.concat()));
        }
    }
}
