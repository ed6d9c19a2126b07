//! What a stream does by itself once its session was offloaded: the work of `kbtp_proto::target::Session`.
//!
//! The session decides, this carries out: its actions become posted work, what completes goes back to it, and what it
//! does not serve is reported as if there were none. It belongs to the stream, and so to the channel of that.
//!
//! Locks: a session takes those of the block store and of the device, one inside the other, under that of its channel. It
//! reaches a stream of another channel only through a command, which that channel obeys in its next turn.

use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use kbtp_proto::blocks::{BlockStore, FinishedFree, FreeToken, HandleRange};
use kbtp_proto::memory::{RegionId, Span};
use kbtp_proto::own_maps::OwnMap;
use kbtp_proto::stream::{Inline, Payload, Piece, Work};
use kbtp_proto::target::{
    Action, BindingTerms, ForcedPunts, Session, SessionGrant, SessionMemory, SharedStore, TaskId,
};
use kbtp_proto::types::Ticket;

use crate::api::{Event, WcOpcode, WcStatus, WorkCompletion};
use crate::blocks::SharedBlocks;
use crate::core::{ChannelShared, Core, lock};
use crate::device::{DeviceShared, Region};
use crate::error::Error;
use crate::event_loop::TimerId;
use crate::memory::{RegisteredOctets, Use};
use crate::stream_state::{Held, HeldWork, StreamState, WorkOwner};

impl SharedStore for SharedBlocks {
    fn with<R>(&self, act: impl FnOnce(&mut BlockStore) -> R) -> R {
        Self::with(self, act)
    }
}

/// What a session was granted; see `kbtp.verbs.offload.SessionGrant`.
#[derive(Clone, Debug)]
#[allow(missing_docs, reason = "the fields are those of kbtp.verbs.offload.SessionGrant")]
pub struct Grant {
    pub blocks: SharedBlocks,
    pub holder: u64,
    pub domain: u64,
    pub handles: HandleRange,
    pub direct_alloc: bool,
    pub binding: BindingTerms,
    pub request_credits: u32,
    pub max_message_bytes: u32,
    pub receives: Region,
    pub read_depth: u32,
    pub drain: Duration,
}

/// Something that a channel is to do for another one.
pub(crate) enum Command {
    /// A FREE that was begun by `stream` is done.
    Freed {
        stream: u64,
        store: u64,
        finished: FinishedFree,
    },
    /// End `stream` at once.
    Abort { stream: u64, why: String },
    /// A FREE is done that no stream waits for any more.
    Tell { store: u64, finished: FinishedFree },
}

impl DeviceShared {
    /// Have `command` obeyed by the channel of `stream`; gives it back if that has ended.
    fn send_command(&self, stream: u64, command: Command) -> Option<Command> {
        let home = lock(&self.offloaded).streams.get(&stream).and_then(Weak::upgrade);
        match home {
            Some(home) => {
                home.command(command);
                None
            }
            None => Some(command),
        }
    }

    /// A channel whose owner uses the block store `store`.
    fn home_of(&self, store: u64) -> Option<Arc<ChannelShared>> {
        lock(&self.offloaded).stores.get(&store).and_then(Weak::upgrade)
    }

    /// Tell the stream that waits for `finished` of the store `store`. What no stream waits for is given back: its
    /// caller's, or that of a stream that has ended.
    #[must_use]
    pub(crate) fn route_freed(&self, store: u64, finished: FinishedFree) -> Option<FinishedFree> {
        let FreeToken::Stream { stream, .. } = finished.token else {
            return Some(finished);
        };
        let command = Command::Freed {
            stream,
            store,
            finished,
        };
        self.send_command(stream, command).map(|_| finished)
    }
}

impl Core {
    pub(crate) fn obey(&mut self, command: Command) {
        match command {
            Command::Freed {
                stream,
                store,
                finished,
            } => {
                let told = self.with_stream(stream, |stream, core| stream.freed(core, &finished));
                if told != Some(true) {
                    self.report(Event::Freed { store, finished });
                }
            }
            Command::Abort { stream, why } => {
                self.with_stream(stream, |stream, core| stream.abort_because(core, why));
            }
            Command::Tell { store, finished } => self.report(Event::Freed { store, finished }),
        }
    }

    fn route_freed(&mut self, store: u64, finished: FinishedFree) {
        if let Some(finished) = self.device.route_freed(store, finished) {
            self.report(Event::Freed { store, finished });
        }
    }
}

/// Fetched of a block that is loaded before it is sent: what follows the processor fetches by itself, and a cache holds
/// that much of all the blocks of a batch.
const FETCHED_MAX_BYTES: u32 = 4096;

/// Of larger blocks nothing is: to send them takes much longer than to wait for their first octets, and it would begin only
/// when those of all of a batch have come.
const FETCHED_OF_BLOCKS_MAX_BYTES: u32 = 16 * 1024;

/// The registered memory of a device.
struct Memory<'a>(&'a DeviceShared);

impl SessionMemory for Memory<'_> {
    fn read(&self, span: Span, into: &mut [u8]) {
        RegisteredOctets(&self.0.table().memories).read_into(span, into);
    }

    fn copy(&mut self, from: Span, to: Span) {
        self.0.table().memories.copy(from, to);
    }
}

/// The offloaded session of one stream.
pub(crate) struct Offload {
    session: Session<SharedBlocks>,
    blocks: SharedBlocks,
    receives: RegionId,
    max_message_bytes: u32,
    drain: Duration,
    /// By slot: of the messages that the session has in hand.
    received: Vec<Option<WorkCompletion>>,
    /// RDMA Reads of the owner's that wait for a read slot, and the regions they hold.
    foreign_reads: OwnMap<u64, (Work, u64, RegionId)>,
    foreign_reads_posted: u64,
    timer: Option<(TimerId, Instant)>,
    /// Nothing is in hand, and nothing will be.
    pub(crate) drained: bool,
}

impl StreamState {
    /// Serve requests from now on. No receive is posted.
    pub(crate) fn offload(&mut self, core: &mut Core, grant: &Grant) -> Result<(), Error> {
        let (receives, pool) = (grant.receives.shared.id, grant.blocks.pool().shared.id);
        {
            // All of the session's work names these two: they are held once, until its end.
            let table = core.device.table();
            self.check_grant(core, grant)?;
            for region in [receives, pool] {
                table.memories.hold(region);
                self.session_regions.push(region);
            }
        }
        let number = self.id().0;
        let session_grant = SessionGrant {
            stream: number,
            holder: grant.holder,
            domain: grant.domain,
            handles: grant.handles,
            direct_alloc: grant.direct_alloc,
            binding: grant.binding,
            request_credits: grant.request_credits,
            max_message_bytes: grant.max_message_bytes,
            receives,
            pool,
            read_depth: grant.read_depth,
            drain: grant.drain,
        };
        let options = &core.device.options;
        let forced = if options.forced_punts > 0.0 {
            let seed = options.forced_punts_seed.wrapping_add(number);
            Some(ForcedPunts::new(options.forced_punts, seed).map_err(|error| Error::misuse(error.0))?)
        } else {
            None
        };
        {
            let mut offloaded = lock(&core.device.offloaded);
            offloaded.streams.insert(number, core.me.clone());
            offloaded.stores.insert(grant.blocks.number(), core.me.clone());
        }
        self.offload = Some(Box::new(Offload {
            session: Session::new(session_grant, grant.blocks.clone(), forced, core.now),
            blocks: grant.blocks.clone(),
            receives,
            max_message_bytes: grant.max_message_bytes,
            drain: grant.drain,
            received: vec![None; grant.request_credits as usize],
            foreign_reads: OwnMap::default(),
            foreign_reads_posted: 0,
            timer: None,
            drained: false,
        }));
        Ok(())
    }

    fn check_grant(&self, core: &Core, grant: &Grant) -> Result<(), Error> {
        let needed = u64::from(grant.request_credits) * u64::from(grant.max_message_bytes);
        let here = |region: &Region| Arc::ptr_eq(&region.shared.device, &core.device) && region.valid();
        if !here(&grant.receives) || !here(grant.blocks.pool()) || !grant.receives.shared.writable {
            return Err(Error::misuse(
                "receive buffers and pool must be registered with this RNIC",
            ));
        }
        if grant.receives.length() < needed {
            return Err(Error::misuse(format!(
                "the receive buffers of {} requests take {needed} octets",
                grant.request_credits
            )));
        }
        if self.offload.is_some() || self.operation.is_none() || !self.held_receives.is_empty() {
            return Err(Error::misuse(
                "a session is offloaded once, after Established and before receives for its requests are posted",
            ));
        }
        Ok(())
    }

    /// Requests in hand.
    pub(crate) fn outstanding(&self) -> usize {
        self.offload.as_ref().map_or(0, |offload| offload.session.outstanding())
    }

    pub(crate) fn resolved(&mut self, handle: u64) {
        if let Some(offload) = &mut self.offload {
            offload.session.resolved(handle);
        }
    }

    /// See `Session::bind_tickets`.
    pub(crate) fn bind_tickets(&self) -> Vec<Ticket> {
        let session = self.offload.as_ref().map(|offload| &offload.session);
        session.into_iter().flat_map(Session::bind_tickets).collect()
    }

    /// False if it has no offloaded session.
    fn freed(&mut self, core: &mut Core, finished: &FinishedFree) -> bool {
        let (Some(offload), FreeToken::Stream { request, .. }) = (&mut self.offload, finished.token) else {
            return false;
        };
        let memory = &mut Memory(&core.device);
        offload
            .session
            .freed(TaskId(request), &finished.entry, memory, core.now);
        self.perform(core);
        self.send(core);
        true
    }

    // --- what completes ---

    /// A receive is complete. `perform` follows.
    pub(crate) fn take_receive(&mut self, core: &mut Core, completion: WorkCompletion) {
        let Some(completion) = self.take_answer(core, completion) else {
            return;
        };
        if let Some(offload) = &mut self.offload
            && completion.opcode == WcOpcode::Recv
            && completion.status == WcStatus::Success
            && let Ok(slot) = usize::try_from(completion.wr_id)
            && let Some(place) = offload.received.get_mut(slot)
        {
            *place = Some(completion);
            let memory = &mut Memory(&core.device);
            let (slot, length) = (completion.wr_id, completion.length);
            offload.session.received(slot, length, memory, core.now);
        } else {
            self.perform(core); // what is left to the owner keeps its order
            core.report(Event::Completion(completion));
        }
    }

    /// Posted work of `owner` is complete. `perform` follows.
    pub(crate) fn take_work(&mut self, core: &mut Core, owner: WorkOwner, completion: WorkCompletion) {
        if owner == WorkOwner::Caller || owner == WorkOwner::CallersRead {
            core.report(Event::Completion(completion));
        }
        let Some(offload) = &mut self.offload else { return };
        let (memory, now) = (&mut Memory(&core.device), core.now);
        match owner {
            WorkOwner::Caller | WorkOwner::Request => {}
            WorkOwner::CallersRead => offload.session.foreign_read_done(now),
            WorkOwner::Write(task) => offload.session.written(task, memory, now),
            WorkOwner::Read(task) => offload.session.fetched(task, memory, now),
            WorkOwner::Completion => offload.session.sent(),
        }
    }

    /// An RDMA Read of the owner's shares the read slots with the session's; its memory is held already.
    pub(crate) fn post_foreign_read(&mut self, core: &mut Core, work: Work, wr_id: u64, region: RegionId) {
        if let Some(offload) = &mut self.offload {
            let key = offload.foreign_reads_posted;
            offload.foreign_reads_posted += 1;
            offload.foreign_reads.insert(key, (work, wr_id, region));
            offload.session.foreign_read(key, core.now);
            self.perform(core);
        }
    }

    // --- what the session decided ---

    /// Carry out what the session has decided since the last time.
    pub(crate) fn perform(&mut self, core: &mut Core) {
        if self.offload.is_none() {
            return;
        }
        while let Some(action) = self.offload.as_mut().and_then(|offload| offload.session.next_action()) {
            self.act(core, action);
        }
        self.set_offload_timer(core);
    }

    fn act(&mut self, core: &mut Core, action: Action) {
        let Some(offload) = &mut self.offload else { return };
        match action {
            Action::Write { task, source, stag, to } => {
                if let Some(span) = source.span()
                    && span.len <= FETCHED_OF_BLOCKS_MAX_BYTES
                {
                    let fetched = span.part(0, FETCHED_MAX_BYTES);
                    core.device.table().memories.prefetch(fetched, Use::Read);
                }
                let payload = Payload::from_iter([source]);
                let (wr_id, owner) = (task.0, WorkOwner::Write(task));
                let work = Work::Write {
                    wr_id,
                    payload,
                    stag,
                    to,
                };
                self.post_work(work, Held::new(), owner);
            }
            Action::Read { task, sink, stag, to } => {
                core.ahead.add(sink, Use::Write);
                let work = Work::Read {
                    wr_id: task.0,
                    sink,
                    source_stag: stag,
                    source_to: to,
                };
                self.post_work(work, Held::new(), WorkOwner::Read(task));
            }
            Action::ForeignRead { key } => {
                if let Some((work, _, region)) = offload.foreign_reads.remove(&key)
                    && !self.post_work(work, Held::from_elem(region, 1), WorkOwner::CallersRead)
                {
                    core.device.table().memories.release(region); // held while it waited
                }
            }
            Action::Send {
                message,
                invalidate_stag,
            } => {
                let work = Work::Send {
                    wr_id: 0,
                    payload: Payload::from_iter([Piece::Inline(Inline::from_slice(&message))]),
                    invalidate_stag,
                    solicited: false,
                };
                self.post_work(work, Held::new(), WorkOwner::Completion);
            }
            Action::Record {
                record,
                stag,
                to,
                immediate,
            } => {
                let work = Work::WriteImmediate {
                    wr_id: 0,
                    octets: Inline::from_slice(&record),
                    stag,
                    to,
                    immediate,
                };
                self.post_work(work, Held::new(), WorkOwner::Completion);
            }
            Action::Repost { slot } => self.repost(slot),
            Action::Punt { slot, reason, .. } => {
                core.device.punts.count(reason);
                let taken = usize::try_from(slot)
                    .ok()
                    .and_then(|slot| offload.received.get_mut(slot))
                    .and_then(Option::take);
                if let Some(completion) = taken {
                    core.report(Event::Completion(completion));
                }
            }
            Action::Freed(finished) => {
                let store = offload.blocks.number();
                core.route_freed(store, finished);
            }
            Action::Abort { why } => self.abort_because(core, why),
            Action::Drained => {
                offload.drained = true;
                self.watch_disconnect(core);
                core.wake_owner();
            }
        }
    }

    /// Post work whose memory is held, `regions` for this work alone; false, and nothing happens, if the stream has failed,
    /// which it then reports itself.
    fn post_work(&mut self, work: Work, regions: Held, owner: WorkOwner) -> bool {
        let Some(operation) = self.operation.as_mut() else {
            return false;
        };
        let posted = operation.post(work).is_ok();
        if posted {
            self.held_work.push_back(HeldWork { regions, owner });
        }
        posted
    }

    fn repost(&mut self, slot: u64) {
        let Some(offload) = &self.offload else { return };
        let buffer = Span {
            region: offload.receives,
            offset: slot.saturating_mul(offload.max_message_bytes.into()),
            len: offload.max_message_bytes,
        };
        self.post_slot(slot, buffer);
    }

    /// Post the receive buffer `slot` again, in memory that the session holds.
    pub(crate) fn post_slot(&mut self, slot: u64, buffer: Span) {
        if let Some(operation) = self.operation.as_mut()
            && operation.post_receive(slot, buffer).is_ok()
        {
            self.held_receives.push_back(None);
        }
    }

    // --- time and the end ---

    fn set_offload_timer(&mut self, core: &mut Core) {
        let token = self.token();
        let Some(offload) = &mut self.offload else { return };
        let mut next = offload.session.next_deadline();
        if offload.session.outstanding() > 0 {
            // One of them may be a FREE that waits.
            let of_frees = offload.blocks.with(|store| store.next_deadline());
            next = [next, of_frees].into_iter().flatten().min();
        }
        let Some(next) = next else { return };
        // Deadlines mostly move away: a timer that fires too early costs less than one set anew for each request.
        if offload.timer.is_some_and(|(_, at)| at <= next) {
            return;
        }
        if let Some((timer, _)) = offload.timer.take() {
            core.timers.cancel(&mut Some(timer));
        }
        let delay = next.saturating_duration_since(core.now);
        offload.timer = Some((core.start_timer(delay, token), next));
    }

    /// True if `timer` was the session's.
    pub(crate) fn offload_timer_fired(&mut self, core: &mut Core, timer: TimerId) -> bool {
        let Some(offload) = &mut self.offload else { return false };
        if offload.timer.is_none_or(|(running, _)| running != timer) {
            return false;
        }
        offload.timer = None;
        let now = core.now;
        offload.session.tick(now);
        let drain_s = offload.drain.as_secs_f64();
        for stream in offload.blocks.with(|store| store.take_overdue(now)) {
            // profile 6.1
            let why = format!("a LOAD did not drain within {drain_s} s of a FREE");
            let _ = core.device.send_command(stream, Command::Abort { stream, why });
        }
        self.perform(core);
        self.send(core);
        true
    }

    /// Let what is in hand finish, and nothing else begin; false if that is so already.
    pub(crate) fn drain_offloaded(&mut self, core: &mut Core) -> bool {
        let Some(offload) = &mut self.offload else { return false };
        offload.session.drain();
        self.perform(core);
        true
    }

    /// The disconnect waits for what is in hand.
    pub(crate) fn is_draining(&self) -> bool {
        self.offload.as_ref().is_some_and(|offload| !offload.drained)
    }

    /// The stream has ended: everything in hand is resolved as not done. The owner's reads that waited are given back.
    pub(crate) fn end_offloaded(&mut self, core: &mut Core) -> Vec<u64> {
        let Some(mut offload) = self.offload.take() else {
            return Vec::new();
        };
        lock(&core.device.offloaded).streams.remove(&self.id().0);
        if let Some((timer, _)) = offload.timer.take() {
            core.timers.cancel(&mut Some(timer));
        }
        offload.session.end();
        while let Some(action) = offload.session.next_action() {
            if let Action::Freed(finished) = action {
                core.route_freed(offload.blocks.number(), finished);
            }
        }
        let mut waiting: Vec<_> = offload.foreign_reads.into_iter().collect();
        waiting.sort_unstable_by_key(|(key, _)| *key);
        let table = core.device.table();
        waiting
            .into_iter()
            .map(|(_, (_, wr_id, region))| {
                table.memories.release(region);
                wr_id
            })
            .collect()
    }
}

/// Have the streams of `device` told what `blocks` finishes out of their sight; what none waits for is reported.
pub fn connect(blocks: &SharedBlocks) {
    let (device, number) = (Arc::downgrade(&blocks.pool().shared.device), blocks.number());
    blocks.set_router(move |finished| {
        let Some(device) = device.upgrade() else { return };
        if let Some(finished) = device.route_freed(number, finished)
            && let Some(channel) = device.home_of(number)
        {
            channel.command(Command::Tell {
                store: number,
                finished,
            });
        }
    });
}

/// Who is to be told what.
#[derive(Default)]
pub(crate) struct Offloaded {
    /// The channel of each offloaded stream.
    streams: OwnMap<u64, Weak<ChannelShared>>,
    /// By `SharedBlocks::number`: a channel whose owner uses the store.
    stores: OwnMap<u64, Weak<ChannelShared>>,
}
