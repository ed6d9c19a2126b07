//! Maps whose keys are numbers of this side's own making: counters, STags it drew, offsets of its blocks, handles of a
//! range it assigned, of which a peer can have only as many in use as it has credits.
//!
//! So no peer chooses which of them share a bucket, and the hash need not be a slow one.

use std::collections::{HashMap, HashSet};
use std::hash::{BuildHasherDefault, Hasher};

/// A `HashMap` of such keys.
pub type OwnMap<K, V> = HashMap<K, V, BuildHasherDefault<OwnHasher>>;
/// A `HashSet` of such keys.
pub type OwnSet<K> = HashSet<K, BuildHasherDefault<OwnHasher>>;

/// Multiplies by an odd number, 2^64 by the golden ratio.
#[derive(Clone, Copy, Debug, Default)]
pub struct OwnHasher(u64);

impl Hasher for OwnHasher {
    /// A map takes its buckets from the low bits, which those of a multiple of a block's size say nothing about.
    fn finish(&self) -> u64 {
        self.0 ^ (self.0 >> 32)
    }

    fn write(&mut self, octets: &[u8]) {
        octets.iter().for_each(|&octet| self.write_u64(octet.into()));
    }

    fn write_u32(&mut self, number: u32) {
        self.write_u64(number.into());
    }

    fn write_u64(&mut self, number: u64) {
        self.0 = (self.0.rotate_left(32) ^ number).wrapping_mul(0x9E37_79B9_7F4A_7C15);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::hash::BuildHasher;

    /// How many of 1024 keys share the fullest of 1024 buckets.
    fn fullest(keys: impl Iterator<Item = u64>) -> usize {
        let hashes = BuildHasherDefault::<OwnHasher>::default();
        let mut buckets = vec![0; 1024];
        for key in keys.take(1024) {
            buckets[(hashes.hash_one(key) % 1024) as usize] += 1;
        }
        buckets.into_iter().max().unwrap_or(0)
    }

    #[test]
    fn counters_and_multiples_of_a_block_size_are_spread() {
        for step in [1, 512, 4096, 64 << 10, 1 << 20, 4 << 20] {
            assert!(fullest((0..).map(|n| 0x10000 + n * step)) <= 16, "{step}");
        }
    }
}
