//! Which handles belong to which initiator (profile 3, "Handle ranges are disjoint").

use std::collections::BTreeMap;

use crate::types::{ApiMisuse, Handle};

/// Names a trust domain (profile 3).
pub type DomainId = u64;

/// `count` handles from `first` on, modulo 2^64.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct HandleRange {
    /// The first of them.
    pub first: Handle,
    /// How many.
    pub count: u64,
}

impl HandleRange {
    /// Profile's range test: `handle - first < count`, unsigned.
    #[must_use]
    pub fn contains(&self, handle: Handle) -> bool {
        handle.wrapping_sub(self.first) < self.count
    }

    /// Where `inner` starts in here; None if it is not wholly inside.
    pub(super) fn position_of(&self, inner: HandleRange) -> Option<u64> {
        let position = inner.first.wrapping_sub(self.first);
        let end = position.checked_add(inner.count)?;
        (end <= self.count).then_some(position)
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Assigned {
    count: u64,
    domain: DomainId,
}

/// The ranges that initiators were given of the table's handles. Which range an initiator gets is decided in Python, by
/// `kbtp.blocks.HandleRanges`; here they are looked up.
///
/// Positions, not handles, are kept, so that a table whose handles pass 2^64 needs no case of its own.
#[derive(Clone, Debug)]
pub struct AssignedRanges {
    table: HandleRange,
    by_position: BTreeMap<u64, Assigned>,
}

impl AssignedRanges {
    /// None assigned yet.
    #[must_use]
    pub fn new(table: HandleRange) -> Self {
        Self {
            table,
            by_position: BTreeMap::new(),
        }
    }

    /// `range` belongs to an initiator of `domain` now.
    ///
    /// # Errors
    ///
    /// For no handles, handles outside of the table, and handles of another range.
    pub fn assign(&mut self, range: HandleRange, domain: DomainId) -> Result<(), ApiMisuse> {
        let inside = self.table.position_of(range).filter(|_| range.count > 0);
        let Some(position) = inside else {
            return Err(ApiMisuse(format!("{range:?} is not inside the table")));
        };
        let end = position + range.count;
        let before = self.by_position.range(..end).next_back();
        if before.is_some_and(|(other, assigned)| other + assigned.count > position) {
            return Err(ApiMisuse(format!("{range:?} has handles that are assigned already")));
        }
        let count = range.count;
        self.by_position.insert(position, Assigned { count, domain });
        Ok(())
    }

    /// Give back a range of `assign`.
    ///
    /// # Errors
    ///
    /// For anything else.
    pub fn release(&mut self, range: HandleRange) -> Result<(), ApiMisuse> {
        let position = range.first.wrapping_sub(self.table.first);
        if self.by_position.get(&position).map(|assigned| assigned.count) != Some(range.count) {
            return Err(ApiMisuse(format!("{range:?} is not assigned")));
        }
        self.by_position.remove(&position);
        Ok(())
    }

    /// The domain of the initiator that `handle` was assigned to, if it was (profile 1, HANDLE_OUT_OF_RANGE of a LOAD).
    #[must_use]
    pub fn domain_of(&self, handle: Handle) -> Option<DomainId> {
        let position = handle.wrapping_sub(self.table.first);
        let (first, assigned) = self.by_position.range(..=position).next_back()?;
        (position - first < assigned.count).then_some(assigned.domain)
    }
}
