//! Words whose stores other threads and peers may watch.

use std::ops::Deref;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use crate::types::ApiMisuse;

/// Aligned 64-bit words that stay where they are, for instance those of a registered memory region.
///
/// An index is below `count`; who uses words has compared that with what it needs.
pub trait Words: Send {
    /// How many there are.
    fn count(&self) -> usize;

    /// What the word holds, seen no earlier than what was stored before it.
    fn load(&self, index: usize) -> u64;

    /// Replace the word in one 8-octet store, seen no earlier than what was stored before it.
    fn store(&self, index: usize, value: u64);

    /// Store `operate(old)` and return `old`; no atomic comes between.
    fn update(&self, index: usize, operate: &mut dyn FnMut(u64) -> u64) -> u64;
}

impl<T> Words for Arc<T>
where
    T: Deref<Target = [AtomicU64]> + Send + Sync,
{
    fn count(&self) -> usize {
        self.len()
    }

    fn load(&self, index: usize) -> u64 {
        self[index].load(Ordering::Acquire)
    }

    fn store(&self, index: usize, value: u64) {
        self[index].store(value, Ordering::Release);
    }

    fn update(&self, index: usize, operate: &mut dyn FnMut(u64) -> u64) -> u64 {
        update_word(&self[index], operate)
    }
}

/// `Words::update` of one word, by a compare-and-swap: atomic instructions of others are not overrun.
pub fn update_word(word: &AtomicU64, operate: &mut dyn FnMut(u64) -> u64) -> u64 {
    let mut old = word.load(Ordering::SeqCst);
    loop {
        match word.compare_exchange_weak(old, operate(old), Ordering::SeqCst, Ordering::SeqCst) {
            Ok(old) => return old,
            Err(now) => old = now,
        }
    }
}

/// The native word whose octets in memory are the 64-bit `value` in network byte order, and the reverse.
pub(super) const fn network_word(value: u64) -> u64 {
    value.to_be()
}

/// Refuses anything but exactly `expected` words.
pub(super) fn check_count(words: &dyn Words, name: &str, expected: u64) -> Result<(), ApiMisuse> {
    let count = words.count();
    if count as u64 != expected {
        return Err(ApiMisuse(format!("{name}: {expected} words expected, {count} given")));
    }
    Ok(())
}
