//! Registered memory of a queue pair's own: octets that a device does not take inline, and the results of atomics.
//!
//! A ring, since work completes in the order of posting.

use std::io;
use std::sync::Arc;

use kbtp_verbs::{Pd, Sge};

use crate::memory::OwnMemory;

const ALIGNMENT_BYTES: usize = 8;

/// A place in the ring.
#[derive(Debug)]
pub(crate) struct Staged {
    pub(crate) at: usize,
    /// What `free` gives back: the octets that were asked for, and those that were left out before them.
    spent_bytes: usize,
}

/// See the head of this module.
#[derive(Debug)]
pub(crate) struct Staging {
    memory: OwnMemory,
    next: usize,
    used_bytes: usize,
}

impl Staging {
    pub(crate) fn new(length: usize, pd: &Arc<Pd>) -> io::Result<Self> {
        Ok(Self {
            memory: OwnMemory::new(length.next_multiple_of(ALIGNMENT_BYTES), pd)?,
            next: 0,
            used_bytes: 0,
        })
    }

    /// Whether so many octets fit once all places are free.
    pub(crate) fn holds(&self, length: usize) -> bool {
        length <= self.memory.length()
    }

    /// Room for so many octets, aligned; None while there is none.
    pub(crate) fn take(&mut self, length: usize) -> Option<Staged> {
        let (place, next, used_bytes) = place(self.memory.length(), self.next, self.used_bytes, length)?;
        (self.next, self.used_bytes) = (next, used_bytes);
        Some(place)
    }

    /// Give back the place that was taken first.
    pub(crate) fn free(&mut self, staged: &Staged) {
        self.used_bytes -= staged.spent_bytes;
    }

    pub(crate) fn write(&self, staged: &Staged, octets: &[u8]) {
        self.memory.write(staged.at, octets);
    }

    pub(crate) fn word(&self, staged: &Staged) -> u64 {
        self.memory.word(staged.at)
    }

    pub(crate) fn piece(&self, staged: &Staged, length: usize) -> Sge {
        self.memory.piece(staged.at, length)
    }
}

/// The place of `length` octets in a ring of `all`, of which `used` before `next` are taken; and both afterwards.
fn place(all: usize, next: usize, used: usize, length: usize) -> Option<(Staged, usize, usize)> {
    let length = length.next_multiple_of(ALIGNMENT_BYTES);
    let skipped = if next + length > all { all - next } else { 0 };
    let spent_bytes = skipped + length;
    if used + spent_bytes > all {
        return None;
    }
    let at = if skipped > 0 { 0 } else { next };
    Some((Staged { at, spent_bytes }, at + length, used + spent_bytes))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn places_are_aligned_and_do_not_pass_the_end() {
        let (first, next, used) = place(64, 0, 0, 5).unwrap();
        assert_eq!((first.at, next, used), (0, 8, 8));
        let (second, next, used) = place(64, next, used, 40).unwrap();
        assert_eq!((second.at, next, used), (8, 48, 48));
        // 16 are left behind, and none before while the first is in use
        assert!(place(64, next, used, 24).is_none());
        let used = used - first.spent_bytes;
        assert!(place(64, next, used, 16).is_some_and(|(third, ..)| third.at == 48));
        let used = used - second.spent_bytes;
        let (third, next, used) = place(64, next, used, 24).unwrap();
        assert_eq!((third.at, next, used), (0, 24, 40));
        assert_eq!(used - third.spent_bytes, 0);
    }

    #[test]
    fn what_is_longer_than_the_ring_never_fits() {
        assert!(place(64, 0, 0, 64).is_some());
        assert!(place(64, 0, 0, 65).is_none());
    }
}
