//! Whose turn it is on a handle (profile 3 "Same handle, same session"), punts included.
//!
//! A mutating request waits for every earlier one of its session on its handle, a LOAD for every earlier mutating one.
//! A punted request is Python's, whose session keeps the same order among the requests it sees. What is left to keep
//! here is the order between both, and that is simple: a handle is served here or there, never in both at once.
//!
//! ```text
//!   nothing -> requests of ours -> ours, then some to be punted -> all of ours resolved: Python's -> all resolved: nothing
//! ```

use std::collections::VecDeque;
use std::collections::hash_map::Entry;

use smallvec::SmallVec;

use super::punt::PuntReason;
use crate::own_maps::OwnMap;

/// Names a request of a session from its arrival until it is resolved or punted; never given twice.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct TaskId(pub u64);

/// What may happen next on a handle.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Next {
    /// This task starts.
    Start(TaskId),
    /// This task goes to Python, for this reason.
    Punt(TaskId, PuntReason),
}

#[derive(Clone, Copy, Debug)]
struct Turn {
    task: TaskId,
    mutates: bool,
    started: bool,
    punt: Option<PuntReason>,
}

#[derive(Debug, Default)]
struct Queue {
    /// In the order of arrival; those to be punted come last.
    turns: SmallVec<[Turn; 2]>,
    /// Requests that Python has and has not resolved, in the order of arrival. Not none: `turns` holds nothing of ours.
    punted: SmallVec<[TaskId; 2]>,
}

/// The requests of one session that are not resolved.
#[derive(Debug, Default)]
pub(super) struct Turns {
    by_handle: OwnMap<u64, Queue>,
    /// Handles on which something may be able to start.
    ready: VecDeque<u64>,
    waiting: usize,
}

impl Turns {
    /// Requests that are neither resolved nor punted.
    pub(super) fn len(&self) -> usize {
        self.waiting
    }

    /// A request comes in behind all others on its handle. `punt`: it is not to be served here.
    pub(super) fn arrive(&mut self, handle: u64, task: TaskId, mutates: bool, punt: Option<PuntReason>) {
        let queue = self.by_handle.entry(handle).or_default();
        let behind = !queue.punted.is_empty() || queue.turns.last().is_some_and(|turn| turn.punt.is_some());
        queue.turns.push(Turn {
            task,
            mutates,
            started: false,
            punt: punt.or(behind.then_some(PuntReason::BehindPunt)),
        });
        self.waiting += 1;
        self.ready.push_back(handle);
    }

    /// What may happen now, as long as there is something.
    pub(super) fn next(&mut self) -> Option<Next> {
        while let Some(handle) = self.ready.front() {
            if let Some(queue) = self.by_handle.get_mut(handle)
                && let Some(next) = queue.next()
            {
                self.waiting -= usize::from(matches!(next, Next::Punt(..)));
                return Some(next);
            }
            self.ready.pop_front();
        }
        None
    }

    /// A task of ours is wholly done or not done. False if it is none, or no more.
    pub(super) fn resolve(&mut self, handle: u64, task: TaskId) -> bool {
        let Entry::Occupied(mut entry) = self.by_handle.entry(handle) else {
            return false;
        };
        let queue = entry.get_mut();
        let Some(position) = queue.turns.iter().position(|turn| turn.task == task) else {
            return false;
        };
        queue.turns.remove(position);
        self.waiting -= 1;
        if queue.is_empty() {
            entry.remove();
        } else {
            self.ready.push_back(handle);
        }
        true
    }

    /// Python has resolved one of the requests on `handle` that it was given. None if it has none there.
    ///
    /// Which one is not said; it is taken to be the oldest. LOADs may be resolved in another order among themselves, and
    /// nobody minds; one that mutates is resolved after all before it and before all behind it.
    pub(super) fn resolved(&mut self, handle: u64) -> Option<TaskId> {
        let Entry::Occupied(mut entry) = self.by_handle.entry(handle) else {
            return None;
        };
        let queue = entry.get_mut();
        if queue.punted.is_empty() {
            return None;
        }
        let oldest = queue.punted.remove(0);
        if queue.is_empty() {
            entry.remove();
        }
        Some(oldest)
    }
}

impl Queue {
    fn is_empty(&self) -> bool {
        self.turns.is_empty() && self.punted.is_empty()
    }

    fn next(&mut self) -> Option<Next> {
        if let Some(Turn {
            task,
            punt: Some(reason),
            ..
        }) = self.turns.first().copied()
        {
            self.turns.remove(0);
            self.punted.push(task);
            return Some(Next::Punt(task, reason));
        }
        for (position, turn) in self.turns.iter_mut().enumerate() {
            if turn.punt.is_some() {
                return None;
            }
            if !turn.started {
                if position > 0 && turn.mutates {
                    return None;
                }
                turn.started = true;
                return Some(Next::Start(turn.task));
            }
            if turn.mutates {
                return None;
            }
        }
        None
    }
}
