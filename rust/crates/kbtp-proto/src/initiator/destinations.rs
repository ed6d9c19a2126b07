//! Memory that LOADs are placing into: no two of them the same octets.
//!
//! Loads of different handles complete in any order (profile 3), so two into one place would both be told SUCCESS while
//! the buffer holds either block, or some of both. The second one is refused instead.

use std::collections::BTreeMap;

/// Address ranges, disjoint.
#[derive(Debug, Default)]
pub struct Destinations {
    /// Where each range ends, by where it starts.
    ends: BTreeMap<usize, usize>,
}

impl Destinations {
    /// Hold `start` up to `end`; false, with nothing held, if any of it is held already.
    pub fn claim(&mut self, start: usize, end: usize) -> bool {
        // Ranges are disjoint, so the last one that starts before `end` ends last of all these.
        if self
            .ends
            .range(..end)
            .next_back()
            .is_some_and(|(_, &held)| held > start)
        {
            return false;
        }
        self.ends.insert(start, end);
        true
    }

    /// Let go of the range that starts at `start`.
    pub fn release(&mut self, start: usize) {
        self.ends.remove(&start);
    }
}
