//! Work in a send queue, oldest first, in whose order it is told as complete.
//!
//! RFC 5040 5.5 rule 15 has work complete in the order it was posted in, and verbs say the same. Linux siw completes what
//! follows an RDMA Read as soon as that has left, the Read when its response is there. So each completion names its
//! work, and waits for those before it: whoever took the first completion for that of the oldest work would take a Read
//! for done whose octets have not come.

use std::collections::VecDeque;

/// `T` is what is to be known of the work.
pub(crate) struct Outstanding<T> {
    works: VecDeque<Entry<T>>,
    /// Of the oldest work; the others follow one by one.
    first_id: u64,
    requests: u32,
}

struct Entry<T> {
    work: T,
    requests: u32,
    /// Of them, not complete.
    left: u32,
}

impl<T> Outstanding<T> {
    pub(crate) fn new() -> Self {
        Self {
            works: VecDeque::new(),
            first_id: 0,
            requests: 0,
        }
    }

    /// Work requests whose place in the send queue may still be taken.
    pub(crate) fn requests(&self) -> u32 {
        self.requests
    }

    /// `work` is made of so many work requests, all of which get the id that is returned.
    pub(crate) fn push(&mut self, work: T, requests: u32) -> u64 {
        let id = self.first_id + self.works.len() as u64;
        self.works.push_back(Entry {
            work,
            requests,
            left: requests,
        });
        self.requests += requests;
        id
    }

    /// One work request with `id` is complete.
    pub(crate) fn complete(&mut self, id: u64) {
        let index = id
            .checked_sub(self.first_id)
            .and_then(|index| usize::try_from(index).ok());
        if let Some(entry) = index.and_then(|index| self.works.get_mut(index)) {
            entry.left = entry.left.saturating_sub(1);
        }
    }

    /// The oldest work, if all of it is complete.
    pub(crate) fn pop_complete(&mut self) -> Option<T> {
        let entry = self.works.pop_front_if(|entry| entry.left == 0)?;
        self.first_id += 1;
        self.requests -= entry.requests;
        Some(entry.work)
    }

    /// What is not complete, or behind what is not.
    pub(crate) fn drain(&mut self) -> impl Iterator<Item = T> {
        self.first_id += self.works.len() as u64;
        self.requests = 0;
        self.works.drain(..).map(|entry| entry.work)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_write_that_completes_before_the_read_ahead_of_it_waits_for_that() {
        let mut outstanding = Outstanding::new();
        let read = outstanding.push("read", 1);
        let write = outstanding.push("write", 1);
        outstanding.complete(write);
        assert_eq!(outstanding.pop_complete(), None);
        assert_eq!(outstanding.requests(), 2);
        outstanding.complete(read);
        assert_eq!(outstanding.pop_complete(), Some("read"));
        assert_eq!(outstanding.pop_complete(), Some("write"));
        assert_eq!(outstanding.pop_complete(), None);
        assert_eq!(outstanding.requests(), 0);
    }

    #[test]
    fn work_of_several_requests_is_complete_with_the_last_of_them() {
        let mut outstanding = Outstanding::new();
        outstanding.push("first", 1);
        outstanding.complete(0);
        assert_eq!(outstanding.pop_complete(), Some("first"));
        let id = outstanding.push("long", 2);
        outstanding.complete(id);
        assert_eq!(outstanding.pop_complete(), None);
        outstanding.complete(id);
        assert_eq!(outstanding.pop_complete(), Some("long"));
    }

    #[test]
    fn what_is_drained_is_told_once() {
        let mut outstanding = Outstanding::new();
        let read = outstanding.push("read", 1);
        let write = outstanding.push("write", 1);
        outstanding.complete(write);
        assert_eq!(outstanding.drain().collect::<Vec<_>>(), ["read", "write"]);
        outstanding.complete(read);
        assert_eq!(outstanding.pop_complete(), None);
        assert_eq!(outstanding.push("next", 1), 2);
    }
}
