//! Which sockets are ready and which timers are due: epoll, a wake-up and a heap.
//!
//! rustix calls epoll itself: mio and polling hide the epoll file descriptor, which asyncio and select need, and are
//! made for portability that is of no use here.

use std::cmp::Reverse;
use std::collections::BinaryHeap;
use std::fs;
use std::io;
use std::os::fd::{AsRawFd, BorrowedFd, OwnedFd, RawFd};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use kbtp_proto::own_maps::OwnMap;
use rustix::event::{EventfdFlags, Timespec, epoll, eventfd};

/// Names one thing that has a socket or a timer. Never used again, so that a late readiness finds nobody.
pub(crate) type Token = u64;

/// The eventfd's.
const WAKE: Token = 0;

/// In the token of a file descriptor: it is the connection manager's, of whatever the rest names.
const OF_MANAGER: Token = 1 << 63;

/// See `OF_MANAGER`.
pub(crate) fn of_manager(token: Token) -> Token {
    token | OF_MANAGER
}

/// What `of_manager` was given, and whether it was.
pub(crate) fn split(token: Token) -> (Token, bool) {
    (token & !OF_MANAGER, token & OF_MANAGER != 0)
}

static NEXT_TOKEN: AtomicU64 = AtomicU64::new(WAKE + 1);

/// Unique in the process, so that it can name a stream of any channel.
pub(crate) fn new_token() -> Token {
    NEXT_TOKEN.fetch_add(1, Ordering::Relaxed)
}

/// What tells which sockets are ready.
pub const EVENTS: &str = "epoll";

/// The machine has one processor, whichever of several this process may use: its peers have others.
#[must_use]
pub fn one_processor() -> bool {
    match fs::read_to_string("/sys/devices/system/cpu/online") {
        Ok(list) => !list.contains(['-', ',']),
        Err(_) => thread::available_parallelism().is_ok_and(|count| count.get() == 1),
    }
}

/// How many sockets one wait reports at most; the others come with the next.
const READY_MAX: usize = 128;

/// What one wait found.
pub(crate) struct ReadyBuffer {
    events: Vec<epoll::Event>,
    interrupted: bool,
}

impl ReadyBuffer {
    pub(crate) fn new() -> Self {
        Self {
            events: Vec::with_capacity(READY_MAX),
            interrupted: false,
        }
    }

    /// Everything but the wake-up, and whether it is readable; else it is only writable.
    pub(crate) fn sockets(&self) -> impl Iterator<Item = (Token, bool)> {
        self.events
            .iter()
            .filter(|event| event.data.u64() != WAKE)
            .map(|event| {
                // An error or a hang-up is for whoever looks, whatever it looks for.
                let flags = event.flags;
                (event.data.u64(), flags.intersects(!epoll::EventFlags::OUT))
            })
    }

    pub(crate) fn any(&self) -> bool {
        !self.events.is_empty()
    }

    /// A signal came: its handler may have to run in the thread that waits, as Python's do.
    pub(crate) fn interrupted(&self) -> bool {
        self.interrupted
    }

    pub(crate) fn woken(&self) -> bool {
        self.events.iter().any(|event| event.data.u64() == WAKE)
    }
}

/// The file descriptors of one channel.
pub(crate) struct Poller {
    epoll: OwnedFd,
    wake: OwnedFd,
    /// The eventfd is set, or about to be: saves system calls.
    wake_is_set: AtomicBool,
    /// Somebody outside has asked for the epoll file descriptor, and may wait for it.
    shown: AtomicBool,
}

impl Poller {
    pub(crate) fn new() -> io::Result<Self> {
        let epoll = epoll::create(epoll::CreateFlags::CLOEXEC)?;
        let wake = eventfd(0, EventfdFlags::NONBLOCK | EventfdFlags::CLOEXEC)?;
        epoll::add(&epoll, &wake, epoll::EventData::new_u64(WAKE), epoll::EventFlags::IN)?;
        Ok(Self {
            epoll,
            wake,
            wake_is_set: AtomicBool::new(false),
            shown: AtomicBool::new(false),
        })
    }

    /// For waiting elsewhere.
    pub(crate) fn show(&self) -> RawFd {
        self.shown.store(true, Ordering::SeqCst);
        self.epoll.as_raw_fd()
    }

    pub(crate) fn is_shown(&self) -> bool {
        self.shown.load(Ordering::SeqCst)
    }

    pub(crate) fn wake(&self) {
        if !self.wake_is_set.swap(true, Ordering::SeqCst) {
            // It can only fail when the counter is full, and then it is set anyway.
            let _ = rustix::io::write(&self.wake, &1u64.to_ne_bytes());
        }
    }

    /// There is a wake-up to take.
    pub(crate) fn is_woken(&self) -> bool {
        self.wake_is_set.load(Ordering::SeqCst)
    }

    /// Forget the wake-up; whoever called this looks around once more. In this order a wake meanwhile is part of this one,
    /// and never leaves the flag set with nothing to read, which would lose all later ones.
    pub(crate) fn take_wake(&self) {
        let _ = rustix::io::read(&self.wake, &mut [0u8; 8]);
        self.wake_is_set.store(false, Ordering::SeqCst);
    }

    /// Wait up to `timeout`; an interrupted wait found nothing.
    pub(crate) fn wait(&self, ready: &mut ReadyBuffer, timeout: Duration) -> io::Result<()> {
        let timeout = Timespec::try_from(timeout).unwrap_or(Timespec {
            tv_sec: i32::MAX.into(),
            tv_nsec: 0,
        });
        ready.events.clear();
        ready.interrupted = false;
        match epoll::wait(
            &self.epoll,
            rustix::buffer::spare_capacity(&mut ready.events),
            Some(&timeout),
        ) {
            Ok(_) => Ok(()),
            Err(rustix::io::Errno::INTR) => {
                ready.interrupted = true;
                Ok(())
            }
            Err(error) => Err(error.into()),
        }
    }
}

/// What a socket is watched for; belongs to whoever owns the socket.
#[derive(Debug, Default)]
pub(crate) struct Watch {
    now: Option<(Token, bool, bool)>,
}

impl Watch {
    /// Be told of `token` when `fd` is ready for what is asked for; replaces what was asked before.
    pub(crate) fn set(
        &mut self,
        poller: &Poller,
        fd: BorrowedFd<'_>,
        token: Token,
        read: bool,
        write: bool,
    ) -> io::Result<()> {
        if !read && !write {
            return self.clear(poller, fd);
        }
        let wanted = Some((token, read, write));
        if self.now == wanted {
            return Ok(());
        }
        let mut flags = epoll::EventFlags::empty();
        flags.set(epoll::EventFlags::IN, read);
        flags.set(epoll::EventFlags::OUT, write);
        let data = epoll::EventData::new_u64(token);
        if self.now.is_none() {
            epoll::add(&poller.epoll, fd, data, flags)?;
        } else {
            epoll::modify(&poller.epoll, fd, data, flags)?;
        }
        self.now = wanted;
        Ok(())
    }

    pub(crate) fn clear(&mut self, poller: &Poller, fd: BorrowedFd<'_>) -> io::Result<()> {
        if self.now.take().is_some() {
            epoll::delete(&poller.epoll, fd)?;
        }
        Ok(())
    }
}

/// Names one running timer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(crate) struct TimerId(u64);

/// All timers of a channel.
#[derive(Debug, Default)]
pub(crate) struct Timers {
    heap: BinaryHeap<Reverse<(Instant, TimerId)>>,
    running: OwnMap<TimerId, Token>,
    started: u64,
}

impl Timers {
    pub(crate) fn start(&mut self, at: Instant, token: Token) -> TimerId {
        self.started += 1;
        let timer = TimerId(self.started);
        self.heap.push(Reverse((at, timer)));
        self.running.insert(timer, token);
        timer
    }

    pub(crate) fn cancel(&mut self, timer: &mut Option<TimerId>) {
        if let Some(timer) = timer.take() {
            self.running.remove(&timer);
        }
    }

    pub(crate) fn next(&mut self) -> Option<Instant> {
        while let Some(&Reverse((at, timer))) = self.heap.peek() {
            if self.running.contains_key(&timer) {
                return Some(at);
            }
            self.heap.pop();
        }
        None
    }

    /// The next timer due at `now`, and whose it is.
    pub(crate) fn pop_due(&mut self, now: Instant) -> Option<(TimerId, Token)> {
        let at = self.next()?;
        if at > now {
            return None;
        }
        let Reverse((_, timer)) = self.heap.pop()?;
        self.running.remove(&timer).map(|token| (timer, token))
    }
}
