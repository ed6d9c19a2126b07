//! Full operation over a queue pair of rdma-core: posted work becomes work requests, completions become events.
//!
//! The device places and sends by itself. What a send queue has no room for waits here, and so does what is received
//! before the stream takes it. Every work request is signalled, so that memory is its owner's again only when the device
//! says so.

use std::collections::VecDeque;
use std::io;
use std::os::fd::AsFd;
use std::sync::Arc;

use kbtp_proto::limits::IMMEDIATE_DATA_BYTES;
use kbtp_proto::memory::Span;
use kbtp_proto::stream::{Event, Flushed, PostError, Work, WrKind};
use kbtp_proto::types::{PeerMisbehaved, TerminateCause};
use kbtp_verbs::{CmEvent, Completion, Depths, Device, Endpoint, Failure, Pd, SendWork};
use smallvec::SmallVec;

use crate::core::Core;
use crate::device::DeviceShared;
use crate::event_loop::{Poller, Token, Watch, of_manager};
use crate::operation::Received;
use crate::verbs_outstanding::Outstanding;
use crate::verbs_requests::{Posted, Prepared, Requests};

/// In a work request's id: it is a receive.
const OF_RECEIVE: u64 = 1 << 63;

/// Asked of a device, which may have less. Receives cover the credits of a session, since an iWARP device ends a stream
/// whose peer's message finds none.
const SENDS_MAX: u32 = 512;
const RECEIVES_MAX: u32 = 2048;
const PIECES_MAX: u32 = 4;

/// A request, a COMPLETION, a record, and the first of inline data.
const INLINE_BYTES: u32 = 256;

/// Work requests that one call hands to the device.
const BATCH: usize = 16;

/// What one completion counts for, so that a busy stream lets others have a turn.
const COMPLETION_COUNTS_BYTES: usize = 4096;

/// A queue pair in use.
pub(crate) struct VerbsOperation {
    endpoint: Endpoint,
    depths: Depths,
    requests: Requests,
    waiting: VecDeque<Work>,
    posted: Outstanding<Posted>,
    waiting_receives: VecDeque<(u64, Span)>,
    posted_receives: VecDeque<u64>,
    completions: Vec<Completion>,
    events: VecDeque<Event>,
    completion_watch: Watch,
    manager_watch: Watch,
    /// The file descriptor of completions is readable, and nobody has taken that yet.
    notified: bool,
    /// The next completion makes it readable.
    armed: bool,
    failure: Option<String>,
    flushed: bool,
    /// The connection is no more, without a failure.
    closed: bool,
    cause: Option<TerminateCause>,
    pub(crate) moved_bytes: u64,
    pub(crate) send_finished: bool,
}

impl VerbsOperation {
    /// On `endpoint`, whose device is known and that is not connected yet.
    pub(crate) fn new(mut endpoint: Endpoint, pd: &Arc<Pd>, hardware: &Device) -> io::Result<Self> {
        let receives = RECEIVES_MAX.min(hardware.max_requests);
        let sends = SENDS_MAX.min(hardware.max_requests);
        let spare = hardware.max_completions.saturating_sub(sends);
        let depths = endpoint.create_queues(
            pd,
            Depths {
                sends,
                receives: receives.min(spare.max(1)),
                pieces: PIECES_MAX.min(hardware.max_pieces).max(1),
                inline_bytes: INLINE_BYTES,
            },
        )?;
        endpoint.request_notification()?;
        Ok(Self {
            endpoint,
            depths,
            requests: Requests::new(depths, hardware.max_message_bytes, pd)?,
            waiting: VecDeque::new(),
            posted: Outstanding::new(),
            waiting_receives: VecDeque::new(),
            posted_receives: VecDeque::new(),
            completions: Vec::new(),
            events: VecDeque::new(),
            completion_watch: Watch::default(),
            manager_watch: Watch::default(),
            notified: false,
            armed: true,
            failure: None,
            flushed: false,
            closed: false,
            cause: None,
            moved_bytes: 0,
            send_finished: false,
        })
    }

    pub(crate) fn endpoint(&mut self) -> &mut Endpoint {
        &mut self.endpoint
    }

    /// The connection is there: say so if packets are likely to be lost on it.
    pub(crate) fn check_mtu(&self, core: &mut Core, peer: &str) {
        let hardware = core.device.hardware.as_ref();
        if let Some(complaint) = hardware.and_then(|hardware| self.endpoint.mtu_complaint(hardware)) {
            core.log(log::Level::Warn, format!("{peer}: {complaint}"));
        }
    }

    // --- from the stream ---

    pub(crate) fn post(&mut self, work: Work) -> Result<(), PostError> {
        if self.failed() {
            return Err(PostError::Ended);
        }
        self.waiting.push_back(work);
        Ok(())
    }

    pub(crate) fn post_receive(&mut self, wr_id: u64, buffer: Span) -> Result<(), PostError> {
        if self.failed() {
            return Err(PostError::Ended);
        }
        self.waiting_receives.push_back((wr_id, buffer));
        Ok(())
    }

    pub(crate) fn next_event(&mut self) -> Option<Event> {
        self.events.pop_front()
    }

    pub(crate) fn failed(&self) -> bool {
        self.cause.is_some() || self.failure.is_some() || self.closed
    }

    pub(crate) fn is_flushed(&self) -> bool {
        self.flushed && !self.failed()
    }

    /// No message says so to the peer, which sees the connection end.
    pub(crate) fn terminate(&mut self, cause: TerminateCause) {
        self.cause.get_or_insert(cause);
    }

    // --- from the loop ---

    pub(crate) fn watch(&mut self, core: &mut Core, token: Token) {
        let poller = core.poller();
        let of_completions = self.endpoint.completion_fd();
        let completions = of_completions.map_or(Ok(()), |fd| self.completion_watch.set(poller, fd, token, true, false));
        let manager = self
            .manager_watch
            .set(poller, self.endpoint.fd(), of_manager(token), true, false);
        if let Err(error) = completions.and(manager) {
            core.log(
                log::Level::Error,
                format!("the system does not watch a queue pair: {error}"),
            );
        }
    }

    pub(crate) fn unwatch(&mut self, poller: &Poller) {
        // They are registered, so this cannot fail; closing them would do the same.
        if let Some(fd) = self.endpoint.completion_fd() {
            let _ = self.completion_watch.clear(poller, fd);
        }
        let _ = self.manager_watch.clear(poller, self.endpoint.fd().as_fd());
    }

    pub(crate) fn notified(&mut self) {
        self.notified = true;
    }

    /// Take what the connection manager has to say.
    pub(crate) fn managed(&mut self) {
        loop {
            match self.endpoint.event() {
                Ok(None) => return,
                Ok(Some(CmEvent::Disconnected)) => self.closed = true,
                Ok(Some(CmEvent::DeviceRemoved)) => self.fail("the RDMA device is gone".into()),
                Ok(Some(CmEvent::Failed(what, status))) => self.fail(format!("{what} (status {status})")),
                Ok(Some(CmEvent::Rejected(status, parameters))) => {
                    let why = kbtp_verbs::refusal(status, &parameters.private_data);
                    self.fail(why.unwrap_or_else(|| "it refused the connection after all".into()));
                }
                Ok(Some(_)) => {}
                Err(error) => {
                    self.fail(error.to_string());
                    return;
                }
            }
        }
    }

    /// What is complete, and when nothing is, how the connection ended.
    pub(crate) fn receive(&mut self) -> io::Result<Received> {
        let mut found = self.reap()?;
        if found == 0 {
            if self.notified {
                self.notified = false;
                self.armed &= !self.endpoint.take_notifications();
            }
            if !self.armed {
                self.endpoint.request_notification()?;
                self.armed = true;
                found = self.reap()?;
            }
        }
        if found > 0 {
            return Ok(Received::Octets {
                bytes: found * COMPLETION_COUNTS_BYTES,
                more: true,
            });
        }
        if self.flushed && self.failure.is_none() && !self.closed {
            self.managed();
        }
        match &self.failure {
            Some(why) => Err(io::Error::other(why.clone())),
            None if self.closed => Ok(Received::Eof { whole: true }),
            None => Ok(Received::Nothing),
        }
    }

    fn reap(&mut self) -> io::Result<usize> {
        let mut completions = std::mem::take(&mut self.completions);
        completions.clear();
        let polled = self.endpoint.poll(&mut completions);
        for completion in &completions {
            self.moved_bytes += COMPLETION_COUNTS_BYTES as u64;
            if completion.id & OF_RECEIVE != 0 {
                self.received(completion);
            } else {
                self.completed(completion);
            }
        }
        let found = completions.len();
        self.completions = completions;
        polled.map(|()| found)
    }

    fn received(&mut self, completion: &Completion) {
        match Failure::of(completion.status) {
            None => {}
            Some(Failure::MessageTooLong) => {
                let error = PeerMisbehaved::new(
                    TerminateCause::DdpMessageTooLong,
                    "a message came that is longer than its receive buffer",
                );
                self.events.push_back(Event::Failed { error });
                self.cause.get_or_insert(TerminateCause::DdpMessageTooLong);
                return;
            }
            Some(failure) => return self.take_failure(failure),
        }
        let Some(wr_id) = self.posted_receives.pop_front() else {
            return;
        };
        self.events.push_back(match completion.immediate {
            Some(immediate) => {
                let mut data = [0; IMMEDIATE_DATA_BYTES];
                data[IMMEDIATE_DATA_BYTES - size_of::<u32>()..].copy_from_slice(&immediate.to_be_bytes());
                Event::ImmediateReceived {
                    wr_id,
                    data,
                    solicited: false,
                }
            }
            None => Event::Received {
                wr_id,
                length: completion.length,
                invalidated_stag: completion.invalidated,
                solicited: false,
            },
        });
    }

    fn completed(&mut self, completion: &Completion) {
        if let Some(failure) = Failure::of(completion.status) {
            return self.take_failure(failure);
        }
        self.posted.complete(completion.id);
        while let Some(posted) = self.posted.pop_complete() {
            self.tell(&posted);
        }
    }

    fn tell(&mut self, posted: &Posted) {
        let (wr_id, length) = (posted.wr_id, posted.length);
        let value = self.requests.finish(posted);
        self.events.push_back(match posted.kind {
            WrKind::Write => Event::WriteCompleted { wr_id },
            WrKind::Read => Event::ReadCompleted { wr_id, length },
            WrKind::Atomic => Event::AtomicCompleted { wr_id, value },
            WrKind::Immediate => Event::ImmediateCompleted { wr_id },
            WrKind::Send | WrKind::Receive => Event::SendCompleted { wr_id },
        });
    }

    fn take_failure(&mut self, failure: Failure) {
        match failure {
            Failure::Flushed => self.flushed = true,
            Failure::MessageTooLong => self.fail("a message of this side's was longer than the peer takes".into()),
            Failure::Because(why) => self.fail(why.into()),
        }
    }

    fn fail(&mut self, why: String) {
        self.failure.get_or_insert(why);
    }

    // --- to the device ---

    fn receives_fit(&self) -> bool {
        self.posted_receives.len() < self.depths.receives as usize
    }

    pub(crate) fn has_to_send(&self) -> bool {
        let receive = !self.waiting_receives.is_empty() && self.receives_fit();
        let send = !self.waiting.is_empty() && self.posted.requests() < self.depths.sends;
        !self.failed() && (receive || send)
    }

    /// Post what there is room for: receives first, since a Send may tell the peer of them (profile 3 "Credits").
    pub(crate) fn send_batch(&mut self, device: &DeviceShared) -> io::Result<usize> {
        self.post_receives(device)?;
        let mut batch: SmallVec<[(u64, Prepared); BATCH]> = SmallVec::new();
        {
            let table = device.table();
            while batch.len() < BATCH && self.posted.requests() < self.depths.sends {
                let Some(work) = self.waiting.pop_front() else { break };
                let room = self.depths.sends - self.posted.requests();
                match self.requests.prepare(&work, room, &table.memories)? {
                    Some((posted, requests)) => {
                        let id = self.posted.push(posted, requests.len() as u32);
                        batch.extend(requests.into_iter().map(|prepared| (id, prepared)));
                    }
                    None => {
                        self.waiting.push_front(work);
                        break;
                    }
                }
            }
        }
        if batch.is_empty() {
            return Ok(usize::MAX); // room comes with completions: this turn is over
        }
        let works: SmallVec<[SendWork<'_>; BATCH]> = batch
            .iter()
            .map(|(id, prepared)| SendWork {
                id: *id,
                kind: prepared.kind,
                pieces: &prepared.pieces,
                octets: prepared.octets.as_deref(),
                solicited: prepared.solicited,
            })
            .collect();
        self.endpoint.post(&works)?;
        let bytes: usize = batch.iter().map(|(_, prepared)| prepared.bytes()).sum();
        self.moved_bytes += bytes as u64;
        Ok(bytes)
    }

    /// Those that wait, before the connection is there too.
    pub(crate) fn post_receives(&mut self, device: &DeviceShared) -> io::Result<()> {
        while self.receives_fit() {
            let Some((wr_id, buffer)) = self.waiting_receives.pop_front() else {
                break;
            };
            let piece = device.table().memories.piece(buffer)?;
            self.endpoint.post_receive(OF_RECEIVE, piece)?;
            self.posted_receives.push_back(wr_id);
        }
        Ok(())
    }

    // --- the end ---

    /// End the connection; the peer's answer comes through `managed`.
    pub(crate) fn finish_sending(&mut self) -> io::Result<()> {
        self.send_finished = true;
        self.endpoint.disconnect()
    }

    /// Nothing is sent, placed or delivered any more; the cause that this side ended the stream for.
    pub(crate) fn stop(&mut self) -> Option<TerminateCause> {
        self.endpoint.close_queues();
        self.cause
    }

    /// What was posted and is not done.
    pub(crate) fn flush(&mut self) -> Vec<Flushed> {
        let posted = self.posted.drain().map(|posted| (posted.wr_id, posted.kind));
        let waiting = self.waiting.drain(..).map(|work| (work.wr_id(), work.kind()));
        let posted_receives = self.posted_receives.drain(..);
        let receives = posted_receives.chain(self.waiting_receives.drain(..).map(|(wr_id, _)| wr_id));
        posted
            .chain(waiting)
            .chain(receives.map(|wr_id| (wr_id, WrKind::Receive)))
            .map(|(wr_id, kind)| Flushed { wr_id, kind })
            .collect()
    }
}
