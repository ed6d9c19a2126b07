//! Which of the session's own handles an ALLOC_STORE takes if the caller names none.

use std::collections::HashSet;

use crate::types::Handle;

/// Picks a handle of the session's own range that is not known to be bound.
///
/// After RESUMED some are bound that this process does not know of: the target then answers ALREADY_BOUND, which marks
/// the handle, and another is tried.
#[derive(Debug)]
pub struct HandleChooser {
    first: Handle,
    count: u64,
    bound: HashSet<Handle>,
    next: u64,
}

impl HandleChooser {
    /// None of the `count` handles from `first` is bound yet.
    #[must_use]
    pub fn new(first: Handle, count: u64) -> Self {
        Self {
            first,
            count,
            bound: HashSet::new(),
            next: 0,
        }
    }

    /// How many there are, bound or not.
    #[must_use]
    pub fn count(&self) -> u64 {
        self.count
    }

    /// A handle, marked as bound; None if all are.
    pub fn take(&mut self) -> Option<Handle> {
        // One more than are bound is looked at, so this ends whatever the range's size.
        while (self.bound.len() as u64) < self.count {
            let handle = self.first.wrapping_add(self.next);
            self.next = (self.next + 1) % self.count;
            if self.bound.insert(handle) {
                return Some(handle);
            }
        }
        None
    }

    /// `handle` holds a block; without effect on one of somebody else's.
    pub fn bound(&mut self, handle: Handle) {
        if handle.checked_sub(self.first).is_some_and(|place| place < self.count) {
            self.bound.insert(handle);
        }
    }

    /// `handle` holds no block any more.
    pub fn free(&mut self, handle: Handle) {
        self.bound.remove(&handle);
    }
}
