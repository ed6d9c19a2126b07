//! Words to look at while a structure owns them.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

use kbtp_proto::blocks::Words;

pub(crate) type Shared = Arc<Box<[AtomicU64]>>;

pub(crate) fn zeroed(count: usize) -> Shared {
    filled(count, 0)
}

pub(crate) fn filled(count: usize, value: u64) -> Shared {
    Arc::new((0..count).map(|_| AtomicU64::new(value)).collect())
}

/// As octets of the memory, read as network byte order.
pub(crate) fn network(words: &Shared) -> Vec<u64> {
    words
        .iter()
        .map(|word| u64::from_be_bytes(word.load(Ordering::SeqCst).to_ne_bytes()))
        .collect()
}

/// As a native integer.
pub(crate) fn native(words: &Shared) -> u64 {
    words[0].load(Ordering::SeqCst)
}

/// Counts how often a word is looked at.
#[derive(Clone)]
pub(crate) struct Counted {
    pub(crate) words: Shared,
    loads: Arc<AtomicU64>,
}

impl Counted {
    pub(crate) fn new(words: Shared) -> Self {
        Self {
            words,
            loads: Arc::default(),
        }
    }

    pub(crate) fn take_loads(&self) -> u64 {
        self.loads.swap(0, Ordering::SeqCst)
    }
}

impl Words for Counted {
    fn count(&self) -> usize {
        self.words.count()
    }

    fn load(&self, index: usize) -> u64 {
        self.loads.fetch_add(1, Ordering::SeqCst);
        self.words.load(index)
    }

    fn store(&self, index: usize, value: u64) {
        self.words.store(index, value);
    }

    fn update(&self, index: usize, operate: &mut dyn FnMut(u64) -> u64) -> u64 {
        self.words.update(index, operate)
    }
}

/// Keeps every state of the memory after a store.
#[derive(Clone)]
pub(crate) struct Watched {
    pub(crate) words: Shared,
    states: Arc<Mutex<Vec<Vec<u64>>>>,
}

impl Watched {
    pub(crate) fn new(words: Shared) -> Self {
        Self {
            words,
            states: Arc::default(),
        }
    }

    pub(crate) fn take_states(&self) -> Vec<Vec<u64>> {
        std::mem::take(&mut *self.states.lock().unwrap())
    }
}

impl Words for Watched {
    fn count(&self) -> usize {
        self.words.count()
    }

    fn load(&self, index: usize) -> u64 {
        self.words.load(index)
    }

    fn store(&self, index: usize, value: u64) {
        self.words.store(index, value);
        self.states.lock().unwrap().push(network(&self.words));
    }

    fn update(&self, index: usize, operate: &mut dyn FnMut(u64) -> u64) -> u64 {
        self.words.update(index, operate)
    }
}
