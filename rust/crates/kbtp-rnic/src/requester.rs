//! A stream that carries an initiator's requests, as its owner sees it: submit a batch, wait for it, take what came of it.

use std::fmt;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use kbtp_proto::wire::Operation as Kind;

use crate::core::{LONGEST_WAIT, lock};
use crate::device::Region;
use crate::error::Error;
use crate::event_loop::ReadyBuffer;
use crate::initiator::{Asked, Batches, How, Memory, Outcome, RequestGrant};
use crate::stream::Stream;

/// Why a wait ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Waited {
    /// The batch is done.
    Done,
    /// Time ran out.
    TimedOut,
    /// A signal came: its handler may have to run in the thread that waits.
    Interrupted,
}

/// A region that the caller registered: its addresses from `start` up to `end`.
struct Named {
    start: usize,
    end: usize,
    region: Region,
}

/// A handle; one thread at a time waits.
pub struct Requester {
    stream: Stream,
    batches: Arc<Mutex<Batches>>,
    /// By `start`. Regions may overlap only if no peer can change them.
    regions: Mutex<Vec<Named>>,
}

impl Requester {
    /// Have `stream` carry requests from now on; see `kbtp.verbs.requester`.
    ///
    /// # Errors
    ///
    /// `Error::ApiMisuse` for what could never work, `Error::ConnectionLost` if the stream has ended.
    pub fn new(stream: &Stream, grant: &RequestGrant) -> Result<Self, Error> {
        Ok(Self {
            stream: stream.clone(),
            batches: stream.carry(grant)?,
            regions: Mutex::new(Vec::new()),
        })
    }

    /// Memory within `region`, whose first octet is at `address`, is used through it from now on.
    pub fn add_region(&self, region: Region, address: usize) {
        let mut regions = self.regions.lock().unwrap_or_else(PoisonError::into_inner);
        // A revoked one must not stand between an address and the region that is registered there now.
        regions.retain(|named| named.region.valid());
        let named = Named {
            start: address,
            end: address.saturating_add(usize::try_from(region.length()).unwrap_or(usize::MAX)),
            region,
        };
        let place = regions.partition_point(|other| other.start <= named.start);
        regions.insert(place, named);
    }

    /// The `length_bytes` (> 0) octets at `address`, if a region of the caller's lets the target do with them what `kind`
    /// needs.
    #[must_use]
    pub fn registered(&self, kind: Kind, address: usize, length_bytes: usize) -> Option<Memory> {
        let regions = lock(&self.regions);
        let before = regions.partition_point(|named| named.start <= address);
        let named = regions.get(before.checked_sub(1)?)?;
        let holds = address.checked_add(length_bytes)? <= named.end;
        if !holds || !named.region.valid() || !named.region.access().contains(kind.access()) {
            return None;
        }
        let offset = (address - named.start) as u64;
        Some(Memory::registered(named.region.clone(), offset, address, length_bytes))
    }

    /// Begin a batch of `count` requests; its number. `reported`: a `BatchDone` event says when it is done, for who does
    /// not `wait`.
    ///
    /// If the stream has ended, every request of it is lost.
    ///
    /// # Errors
    ///
    /// `Error::ApiMisuse` if the channel is closed.
    pub fn open_batch(&self, count: usize, reported: bool) -> Result<u64, Error> {
        self.stream
            .with(|stream, core| stream.open_batch(core, count, reported))
            .unwrap_or_else(|| Ok(lock(&self.batches).open_lost(count)))
    }

    /// Submit the next requests of `batch`, of which the first is its `first`: they leave while others are made.
    pub fn submit(&self, how: How, batch: u64, first: usize, asked: Vec<Asked>) {
        let count = asked.len();
        let submitted = self
            .stream
            .with(|stream, core| stream.submit(core, how, batch, first, asked));
        if submitted.is_none() {
            self.lose(batch, first, count);
        }
    }

    /// So many requests of `batch`, from its `first` on, are never submitted.
    pub fn lose(&self, batch: u64, first: usize, count: usize) {
        lock(&self.batches).lose(batch, first, count);
    }

    /// Move octets until the batch is done, for up to `timeout`. The channel is not locked while this waits.
    ///
    /// # Errors
    ///
    /// `Error::Io` as the system gives it.
    pub fn wait(&self, batch: u64, timeout: Duration) -> Result<Waited, Error> {
        let channel = &self.stream.shared.channel;
        let spin = channel.device.spin;
        let begin = Instant::now();
        let deadline = begin.checked_add(timeout).unwrap_or(begin + LONGEST_WAIT);
        let mut spin_until = begin + spin;
        let mut ready = None;
        loop {
            if self.is_done(batch) {
                return Ok(Waited::Done);
            }
            let moved = !spin.is_zero() && self.pump();
            let now = Instant::now();
            // Also while octets move: whoever waits has signals to look at, and a time of its own.
            if now >= deadline {
                return Ok(if self.is_done(batch) {
                    Waited::Done
                } else {
                    Waited::TimedOut
                });
            }
            if moved {
                spin_until = now + spin;
                continue;
            }
            if now < spin_until {
                if !self.fetch_ahead() {
                    std::thread::yield_now(); // to whom we may be waiting for
                }
                continue;
            }
            let Some(poller) = channel.poller() else {
                return Ok(Waited::Done); // closed, and all is lost
            };
            let ready = ready.get_or_insert_with(ReadyBuffer::new);
            let due = channel.with(|core| core.next_timer()).flatten();
            let wait = deadline.saturating_duration_since(now).min(LONGEST_WAIT);
            poller.wait(ready, due.map_or(wait, |due| due.min(wait)))?;
            channel.with(|core| core.turn(ready));
            if ready.interrupted() && !self.is_done(batch) {
                return Ok(Waited::Interrupted);
            }
            spin_until = Instant::now() + spin;
        }
    }

    /// What came of the requests of `batch`, in their order; None while it is not done.
    #[must_use]
    pub fn take(&self, batch: u64) -> Option<Vec<Outcome>> {
        lock(&self.batches).take(batch)
    }

    fn is_done(&self, batch: u64) -> bool {
        lock(&self.batches).is_done(batch)
    }

    /// Fetch some memory that will be needed next; false if there is none.
    fn fetch_ahead(&self) -> bool {
        self.stream
            .shared
            .channel
            .with(|core| core.fetch_ahead())
            .unwrap_or(false)
    }

    /// Read what has come and send what may leave; true if there was any.
    fn pump(&self) -> bool {
        self.stream.with(|stream, core| stream.pump(core)).unwrap_or(false)
    }
}

impl fmt::Debug for Requester {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Requester({:?})", self.stream)
    }
}
