//! CRCs of what the peer moves to or from memory that somebody watches.
//!
//! Each FPDU has a CRC over its payload and what surrounds it, so whoever wants one over all that was moved need not read
//! those octets once more: the payload's own CRC is taken first, and joined to both. Only if nothing else happened with
//! that memory: each octet was moved once, in order. Of anything else nothing is known, and who wants a CRC takes it.

use std::collections::BTreeMap;

use crate::crc32c::{Shift, join};

/// What was moved to or from memory that was watched.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Moved {
    /// So many octets from the first on.
    pub length: u32,
    /// Their CRC32c.
    pub crc: u32,
}

#[derive(Debug)]
struct Range {
    length: u32,
    moved: u32,
    /// None once something is not known of what was moved.
    crc: Option<u32>,
}

impl Range {
    fn next(&mut self, length: u32, crc: Option<u32>, shift: Shift) {
        self.moved += length;
        self.crc = self.crc.zip(crc).map(|(before, crc)| join(before, crc, shift));
    }
}

/// Ranges of memory by STag and first address, disjoint.
#[derive(Debug, Default)]
pub(super) struct Watched {
    ranges: BTreeMap<(u32, u64), Range>,
    /// Most segments of a message are of one length.
    last_shift: Option<(u32, Shift)>,
}

impl Watched {
    pub(super) fn is_empty(&self) -> bool {
        self.ranges.is_empty()
    }

    pub(super) fn watch(&mut self, stag: u32, to: u64, length: u32) {
        let range = Range {
            length,
            moved: 0,
            crc: Some(0),
        };
        self.ranges.insert((stag, to), range);
    }

    pub(super) fn end(&mut self, stag: u32, to: u64) -> Option<Moved> {
        let Range { moved, crc, .. } = self.ranges.remove(&(stag, to))?;
        crc.map(|crc| Moved { length: moved, crc })
    }

    pub(super) fn shift(&mut self, length: u32) -> Shift {
        match self.last_shift {
            Some((of, shift)) if of == length => shift,
            _ => {
                let shift = Shift::of(length);
                self.last_shift = Some((length, shift));
                shift
            }
        }
    }

    /// The peer has written `length` octets with this CRC32c, None if it was not taken.
    ///
    /// Memory can have several STags. So what is written anywhere but to the next octets of a range may have changed any.
    pub(super) fn written(&mut self, stag: u32, to: u64, length: u32, crc: Option<u32>) {
        if self.is_empty() {
            return;
        }
        let shift = self.shift(length);
        match self.range_at(stag, to) {
            Some((range, from)) if from == range.moved && length <= range.length - range.moved => {
                range.next(length, crc, shift);
            }
            _ => self.ranges.values_mut().for_each(|range| range.crc = None),
        }
    }

    /// The peer is sent `length` octets with this CRC32c. What it reads elsewhere is nobody's concern.
    pub(super) fn read(&mut self, stag: u32, to: u64, length: u32, crc: Option<u32>) {
        if self.is_empty() {
            return;
        }
        let shift = self.shift(length);
        if let Some((range, from)) = self.range_at(stag, to) {
            if from == range.moved && length <= range.length - range.moved {
                range.next(length, crc, shift);
            } else {
                range.crc = None;
            }
        }
    }

    /// The range that holds `to`, and how far behind its first octet that is.
    fn range_at(&mut self, stag: u32, to: u64) -> Option<(&mut Range, u32)> {
        let (&(of, first), range) = self.ranges.range_mut(..=(stag, to)).next_back()?;
        let from = u32::try_from(to.checked_sub(first)?).ok()?;
        (of == stag && from < range.length).then_some((range, from))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::crc32c::update;
    use proptest::prelude::*;

    const STAG: u32 = 7;

    fn crc(octets: &[u8]) -> Option<u32> {
        Some(update(0, octets))
    }

    fn watching(length: u32) -> Watched {
        let mut watched = Watched::default();
        watched.watch(STAG, 100, length);
        watched
    }

    proptest! {
        #[test]
        fn segments_in_order_add_up(
            octets in proptest::collection::vec(any::<u8>(), 1..3000), size in 1usize..900, reads in any::<bool>(),
        ) {
            let mut watched = watching(octets.len() as u32);
            let mut to = 100;
            for part in octets.chunks(size) {
                let length = part.len() as u32;
                if reads {
                    watched.read(STAG, to, length, crc(part));
                } else {
                    watched.written(STAG, to, length, crc(part));
                }
                to += u64::from(length);
            }
            let moved = Moved { length: octets.len() as u32, crc: update(0, &octets) };
            prop_assert_eq!(watched.end(STAG, 100), Some(moved));
            prop_assert!(watched.is_empty());
        }
    }

    #[test]
    fn what_is_shorter_than_the_memory_is_known_as_far_as_it_goes() {
        let mut watched = watching(10);
        watched.written(STAG, 100, 3, crc(b"abc"));
        let moved = Moved {
            length: 3,
            crc: update(0, b"abc"),
        };
        assert_eq!(watched.end(STAG, 100), Some(moved));
        assert_eq!(watched.end(STAG, 100), None);
    }

    #[test]
    fn nothing_is_known_of_memory_that_was_written_otherwise() {
        let strays: [&[(u32, u64, u32)]; 6] = [
            &[(STAG, 100, 6), (STAG, 100, 6)],   // once more
            &[(STAG, 103, 3), (STAG, 100, 3)],   // not in order
            &[(STAG, 100, 11)],                  // too much
            &[(STAG, 100, 6), (STAG, 98, 3)],    // from before it
            &[(STAG, 100, 6), (STAG + 1, 0, 3)], // under another STag, which may be of the same memory
            &[(STAG, 100, 6), (STAG, u64::MAX, 3)],
        ];
        for stray in strays {
            let mut watched = watching(10);
            for &(stag, to, length) in stray {
                watched.written(stag, to, length, Some(1));
            }
            assert_eq!(watched.end(STAG, 100), None, "{stray:?}");
        }
    }

    #[test]
    fn nothing_is_known_of_memory_that_was_read_twice_but_elsewhere_may_be_read() {
        let mut watched = watching(10);
        watched.read(STAG, 100, 10, Some(1));
        watched.read(STAG + 1, 100, 10, Some(2));
        watched.read(STAG, 110, 10, Some(3));
        assert_eq!(watched.ranges.get(&(STAG, 100)).and_then(|range| range.crc), Some(1));
        watched.read(STAG, 104, 2, Some(4));
        assert_eq!(watched.end(STAG, 100), None);
    }

    #[test]
    fn without_a_crc_nothing_is_known() {
        let mut watched = watching(10);
        watched.written(STAG, 100, 5, None);
        watched.written(STAG, 105, 5, Some(1));
        assert_eq!(watched.end(STAG, 100), None);
    }
}
