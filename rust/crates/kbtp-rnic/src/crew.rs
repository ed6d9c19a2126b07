//! A channel whose I/O is done by threads of its own: one event loop each, and one outbox for what its owner polls.
//!
//! The listeners live in the first loop, and each stream that is accepted moves to the next one in turn. The owner's
//! `poll` does no I/O: it waits for the outbox alone. A loop moves its events there before it lets go of the channel's
//! lock, so that those of one stream keep their order; the outbox's lock is taken inside that one and never the other
//! way round.

use std::io;
use std::mem;
use std::os::fd::RawFd;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, Weak};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use crate::api::Event;
use crate::core::{ChannelShared, LOG_TARGET, LONGEST_TIMER, LONGEST_WAIT, lock};
use crate::device::DeviceShared;
use crate::event_loop::{Poller, ReadyBuffer};
use crate::request::ConnectRequest;

/// What the loops of a channel have for its owner.
pub(crate) struct Outbox {
    poller: Poller,
    state: Mutex<OutboxState>,
}

#[derive(Default)]
struct OutboxState {
    events: Vec<Event>,
    /// The owner asked for a `poll` to return.
    woken: bool,
    /// Reported, and rejected unless they are answered before the next `poll`.
    questions: Vec<ConnectRequest>,
}

impl Outbox {
    fn new() -> io::Result<Self> {
        Ok(Self {
            poller: Poller::new()?,
            state: Mutex::new(OutboxState::default()),
        })
    }

    /// Called by a loop, under the lock of its channel.
    pub(crate) fn push(&self, events: &mut Vec<Event>) {
        if events.is_empty() {
            return;
        }
        lock(&self.state).events.append(events);
        self.poller.wake();
    }

    pub(crate) fn wake(&self) {
        lock(&self.state).woken = true;
        self.poller.wake();
    }

    /// Move the events to `into`; true if there were any, or a wake.
    fn reap(&self, into: &mut Vec<Event>) -> bool {
        let mut state = lock(&self.state);
        into.clear();
        mem::swap(&mut state.events, into);
        let questions = into.iter().filter_map(|event| match event {
            Event::ConnectRequest(request) => Some(request.clone()),
            _ => None,
        });
        state.questions.extend(questions);
        mem::take(&mut state.woken) || !into.is_empty()
    }

    fn reject_unanswered(&self) {
        let questions = mem::take(&mut lock(&self.state).questions);
        for question in questions {
            question.reject_unanswered();
        }
    }
}

/// The loops of one channel and their threads.
pub(crate) struct Crew {
    loops: Vec<Arc<ChannelShared>>,
    outbox: Arc<Outbox>,
    threads: Mutex<Vec<JoinHandle<()>>>,
    accepted: AtomicUsize,
}

impl Crew {
    /// Start `threads` (at least one) loops of `device`.
    pub(crate) fn start(device: &Arc<DeviceShared>, threads: usize) -> io::Result<Arc<Self>> {
        let outbox = Arc::new(Outbox::new()?);
        let loops = (0..threads.max(1))
            .map(|_| ChannelShared::open(Arc::clone(device), Some(Arc::clone(&outbox))))
            .collect::<io::Result<Vec<_>>>()?;
        let crew = Arc::new(Self {
            loops,
            outbox,
            threads: Mutex::new(Vec::new()),
            accepted: AtomicUsize::new(0),
        });
        for (number, one) in crew.loops.iter().enumerate() {
            one.join_crew(&crew);
            let Some(poller) = one.poller() else { continue };
            let (me, spin) = (Arc::downgrade(one), device.spin);
            let thread = thread::Builder::new()
                .name(format!("kbtp-rnic-{number}"))
                .spawn(move || run(&poller, &me, spin))?;
            lock(&crew.threads).push(thread);
        }
        Ok(crew)
    }

    pub(crate) fn loops(&self) -> &[Arc<ChannelShared>] {
        &self.loops
    }

    pub(crate) fn outbox(&self) -> &Outbox {
        &self.outbox
    }

    /// Where the next accepted stream is to live.
    pub(crate) fn next_loop(&self) -> Option<Arc<ChannelShared>> {
        let turn = self.accepted.fetch_add(1, Ordering::Relaxed);
        self.loops.get(turn % self.loops.len().max(1)).map(Arc::clone)
    }

    /// The file descriptor that shows whether there is something to reap.
    pub(crate) fn show(&self) -> RawFd {
        self.outbox.poller.show()
    }

    /// Wait for events up to `timeout`; false if the channel is closed.
    pub(crate) fn poll_into(&self, timeout: Duration, events: &mut Vec<Event>) -> io::Result<bool> {
        let begin = Instant::now();
        let deadline = begin.checked_add(timeout).unwrap_or(begin + LONGEST_TIMER);
        let mut ready = ReadyBuffer::new();
        self.outbox.reject_unanswered();
        loop {
            if self.loops.first().is_none_or(|first| first.poller().is_none()) {
                return Ok(false);
            }
            let now = Instant::now();
            if self.outbox.reap(events) || now >= deadline {
                return Ok(true);
            }
            let wait = deadline.saturating_duration_since(now).min(LONGEST_WAIT);
            self.outbox.poller.wait(&mut ready, wait)?;
            if ready.woken() {
                self.outbox.poller.take_wake();
            }
            if ready.interrupted() {
                self.outbox.reap(events);
                return Ok(true);
            }
        }
    }

    /// Close every loop and wait for the threads to end. Idempotent.
    pub(crate) fn close(&self) {
        for one in &self.loops {
            one.close();
        }
        let threads = mem::take(&mut *lock(&self.threads));
        for thread in threads {
            if thread.thread().id() != thread::current().id() {
                // A loop that panicked has said so itself.
                let _ = thread.join();
            }
        }
    }
}

/// One event loop, until its channel is closed or nobody knows it any more. It spins only after something came.
fn run(poller: &Poller, channel: &Weak<ChannelShared>, spin: Duration) {
    let mut ready = ReadyBuffer::new();
    let mut due = Some(Duration::ZERO);
    let mut spins_until = None;
    loop {
        let wait = match spins_until {
            Some(_) => Duration::ZERO,
            None => due.unwrap_or(LONGEST_WAIT).min(LONGEST_WAIT),
        };
        if let Err(error) = poller.wait(&mut ready, wait) {
            log::error!(target: LOG_TARGET, "an event loop ends, and its streams with it: {error}");
            if let Some(channel) = channel.upgrade() {
                channel.close();
            }
            return;
        }
        let Some(channel) = channel.upgrade() else { return };
        let mut was_busy = false;
        let next = channel.with(|core| {
            core.turn(&ready);
            was_busy = ready.any() || (spins_until.is_some() && core.probe());
            let until = if was_busy {
                core.now.checked_add(spin)
            } else {
                spins_until
            };
            (core.next_timer(), until.filter(|until| core.now < *until))
        });
        let Some(next) = next else { return };
        (due, spins_until) = next;
        if spins_until.is_some() && !was_busy {
            // Whoever else has work on this processor, such as an index, does it now and not at the end of our slice.
            thread::yield_now();
        }
    }
}
