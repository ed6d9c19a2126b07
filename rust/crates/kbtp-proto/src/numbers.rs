//! Maps by numbers that this side drew or counted itself, so that no peer chooses which of them share a bucket.

use std::collections::HashMap;
use std::hash::{BuildHasherDefault, Hasher};

/// Spreads a number over 64 bits; no defence against numbers that a peer chose.
#[derive(Clone, Copy, Debug, Default)]
pub struct NumberHasher(u64);

impl Hasher for NumberHasher {
    fn finish(&self) -> u64 {
        self.0
    }

    fn write(&mut self, octets: &[u8]) {
        for &octet in octets {
            self.write_u64(u64::from(octet));
        }
    }

    fn write_u32(&mut self, number: u32) {
        self.write_u64(u64::from(number));
    }

    fn write_u64(&mut self, number: u64) {
        // An odd multiplier (2^64 by the golden ratio) brings the low bits up to where the map takes its tags from.
        self.0 = (self.0.rotate_left(32) ^ number).wrapping_mul(0x9E37_79B9_7F4A_7C15);
    }
}

/// By such a number.
pub type NumberMap<V> = HashMap<u64, V, BuildHasherDefault<NumberHasher>>;
