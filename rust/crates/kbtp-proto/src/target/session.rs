//! One initiator's session after HELLO, as far as the RNIC serves it: what arrives, what completes, whose turn it is.
//!
//! A request goes one way of these, and then is no more:
//!
//! ```text
//! received --> not well-formed -----------------------------------------> Punt
//!          --> waits for its turn --> start --> RDMA operation --> done --> Repost, Send
//!                                          \--> cannot be served here ----> Punt, untouched; `resolved` when Python has
//! ```

use std::collections::VecDeque;
use std::time::Instant;

use super::actions::{Action, SessionGrant, SessionMemory, SharedStore};
use super::checks::granted;
use super::punt::{ForcedPunts, PuntReason};
use super::sequences::Task;
use super::turns::{Next, TaskId, Turns};
use crate::blocks::Entry;
use crate::limits::COMPLETIONS_POSTED_PER_CREDIT;
use crate::memory::Span;
use crate::own_maps::OwnMap;
use crate::stream::Piece;
use crate::types::{ApiMisuse, Opcode, Status, Ticket};
use crate::wire::{
    Bind, CommonHeader, Completion, CompletionDescriptor, HEAD_BYTES_MAX, Operation, Request, WireFormatError,
};

/// Decides everything about one stream that Python does not. After each call, drain `next_action`.
#[derive(Debug)]
pub struct Session<S> {
    pub(super) grant: SessionGrant,
    pub(super) store: S,
    pub(super) tasks: OwnMap<TaskId, Task>,
    /// BINDs that are not resolved, Python's that they all are.
    binds: OwnMap<TaskId, HeldBind>,
    pub(super) now: Instant,
    forced: Option<ForcedPunts>,
    actions: VecDeque<Action>,
    turns: Turns,
    tasks_named: u64,
    completions_posted: usize,
    held_completions: VecDeque<HeldCompletion>,
    reads_posted: u32,
    waiting_reads: VecDeque<WaitingRead>,
    read_deadline: Option<Instant>,
    draining: bool,
    /// The stream ends or has ended: nothing more may start.
    ending: bool,
}

/// A BIND that came.
#[derive(Clone, Copy, Debug)]
struct HeldBind {
    ticket: Ticket,
    slot: u64,
    length_bytes: u32,
}

/// A message that has its turn on a handle.
enum WellFormed {
    Request(Request),
    Bind(Bind),
}

/// A COMPLETION that waits for room in the send queue.
#[derive(Debug)]
struct HeldCompletion {
    completion: Completion,
    slot: u64,
    invalidate_stag: Option<u32>,
    /// A record goes there instead.
    record: Option<CompletionDescriptor>,
}

/// An RDMA Read that waits for a read slot.
#[derive(Debug)]
enum WaitingRead {
    /// Into the block of the task.
    Own {
        task: TaskId,
        sink: Span,
    },
    Foreign {
        key: u64,
    },
}

impl<S: SharedStore> Session<S> {
    /// The session of a stream whose HELLO_ACK is about to leave.
    pub fn new(grant: SessionGrant, store: S, forced: Option<ForcedPunts>, now: Instant) -> Self {
        Self {
            grant,
            store,
            tasks: OwnMap::default(),
            binds: OwnMap::default(),
            now,
            forced,
            actions: VecDeque::new(),
            turns: Turns::default(),
            tasks_named: 0,
            completions_posted: 0,
            held_completions: VecDeque::new(),
            reads_posted: 0,
            waiting_reads: VecDeque::new(),
            read_deadline: None,
            draining: false,
            ending: false,
        }
    }

    /// What to do next on the stream.
    pub fn next_action(&mut self) -> Option<Action> {
        self.actions.pop_front()
    }

    /// Requests that are neither resolved nor punted, and completions that wait for room in the send queue.
    #[must_use]
    pub fn outstanding(&self) -> usize {
        self.turns.len() + self.held_completions.len()
    }

    // --- what comes in ---

    /// A Send of the peer, `length_bytes` long, is in the receive buffer `slot`.
    pub fn received(&mut self, slot: u64, length_bytes: u32, memory: &mut dyn SessionMemory, now: Instant) {
        if self.ending {
            return;
        }
        self.now = now;
        match self.parse(slot, length_bytes, memory) {
            Ok(WellFormed::Bind(Bind { handle, ticket })) => {
                let task = self.next_task();
                let held = HeldBind {
                    ticket,
                    slot,
                    length_bytes,
                };
                self.binds.insert(task, held);
                self.turns.arrive(handle, task, true, Some(PuntReason::Bind));
                self.advance(memory);
            }
            Ok(WellFormed::Request(request)) => {
                let task = self.next_task();
                self.tasks.insert(task, Task::new(request, slot, length_bytes));
                let forced = self.forced.as_mut().is_some_and(ForcedPunts::draw);
                let of_device = self.grant.binding.head_of_device && request.operation == Operation::AllocStore;
                let of_device = of_device.then_some(PuntReason::HeadOfDevice);
                let punt = of_device.or(forced.then_some(PuntReason::Forced));
                self.turns.arrive(request.handle, task, request.mutates(), punt);
                self.advance(memory);
            }
            // Python answers at once, as it does without an RNIC that serves requests: it touches nothing.
            Err(reason) => self.act(Action::Punt {
                slot,
                length_bytes,
                reason,
            }),
        }
    }

    /// The RDMA Write of `task` is done.
    pub fn written(&mut self, task: TaskId, memory: &mut dyn SessionMemory, now: Instant) {
        if self.ending {
            return;
        }
        self.now = now;
        let result = self.load_written(task);
        self.check(result);
        self.advance(memory);
    }

    /// The RDMA Read of `task` has placed all of its data.
    pub fn fetched(&mut self, task: TaskId, memory: &mut dyn SessionMemory, now: Instant) {
        if self.ending {
            return;
        }
        self.read_done(now);
        let result = self.store_fetched(task);
        self.check(result);
        self.post_reads();
        self.advance(memory);
    }

    /// A COMPLETION has left.
    pub fn sent(&mut self) {
        self.completions_posted = self.completions_posted.saturating_sub(1);
        self.post_completions();
        self.report_if_drained();
    }

    /// A FREE of this session that waited for LOADs is done: `entry` is what the handle's became.
    pub fn freed(&mut self, task: TaskId, entry: &Entry, memory: &mut dyn SessionMemory, now: Instant) {
        if self.ending {
            return;
        }
        self.now = now;
        self.finish(task, Status::Success, Some(entry), false); // draft 6.4 step 4, profile 8.6
        self.advance(memory);
    }

    /// Python has resolved a well-formed request on `handle` that was punted to it.
    pub fn resolved(&mut self, handle: u64) {
        if let Some(task) = self.turns.resolved(handle) {
            self.binds.remove(&task);
        }
    }

    /// Tickets of the BINDs that came and that Python has not resolved, whether it has them yet or not: none of these is
    /// abandoned before (profile 6.11).
    pub fn bind_tickets(&self) -> impl Iterator<Item = Ticket> {
        self.binds.values().map(|bind| bind.ticket)
    }

    // --- Python's RDMA Reads ---

    /// Python wants to post an RDMA Read, which shares the read depth; `Action::ForeignRead` says when.
    pub fn foreign_read(&mut self, key: u64, now: Instant) {
        self.now = now;
        self.waiting_reads.push_back(WaitingRead::Foreign { key });
        self.post_reads();
    }

    /// An RDMA Read of Python's is done.
    pub fn foreign_read_done(&mut self, now: Instant) {
        self.read_done(now);
        self.post_reads();
        self.report_if_drained();
    }

    // --- time and the end ---

    /// End the stream if the peer let a deadline pass.
    pub fn tick(&mut self, now: Instant) {
        self.now = now;
        if !self.ending && self.read_deadline.is_some_and(|deadline| deadline <= now) {
            // profile 8.8
            let drain_s = self.grant.drain.as_secs_f64();
            self.abort(format!("an RDMA Read was not answered within {drain_s} s"));
        }
    }

    /// When `tick` must be called next; None if no deadline runs.
    #[must_use]
    pub fn next_deadline(&self) -> Option<Instant> {
        self.read_deadline.filter(|_| !self.ending)
    }

    /// The stream is to end in order: `Action::Drained` says when nothing is outstanding.
    ///
    /// What is punted from here on, or waits to be, is none of Python's concern any more.
    pub fn drain(&mut self) {
        self.draining = true;
        self.report_if_drained();
    }

    /// The stream has ended: nothing of the peer's can be placed any more (profile 3 "End of a stream").
    ///
    /// Every request is resolved as wholly done or not done. Actions that follow say nothing to the peer. A FREE of this
    /// session may still wait for pins of others: its token comes to the RNIC when they are gone, and no session is there
    /// to be told; its holder is.
    pub fn end(&mut self) {
        self.ending = true;
        self.actions.retain(|action| matches!(action, Action::Freed(_)));
        self.held_completions.clear();
        self.waiting_reads.clear();
        self.turns = Turns::default();
        self.binds.clear();
        let mut tasks: Vec<_> = std::mem::take(&mut self.tasks).into_iter().collect();
        tasks.sort_unstable_by_key(|(id, _)| *id);
        for (_, task) in tasks {
            let result = self.abandon(task);
            self.check(result);
        }
    }

    // --- requests ---

    /// The checks that do not depend on the handle's entry, in the order of profile 1.
    fn parse(&self, slot: u64, length_bytes: u32, memory: &dyn SessionMemory) -> Result<WellFormed, PuntReason> {
        let mut buffer = [0; HEAD_BYTES_MAX];
        let message = self.message(slot, length_bytes);
        let head_span = message.part(0, HEAD_BYTES_MAX as u32);
        let head = buffer
            .get_mut(..head_span.len as usize)
            .ok_or(PuntReason::NotARequest)?;
        memory.read(head_span, head);
        let header = CommonHeader::parse(head).ok_or(PuntReason::NotARequest)?; // profile 1, 8.5
        let why = |error: WireFormatError| match error.status {
            Status::Unsupported => PuntReason::Unsupported,
            _ => PuntReason::Malformed,
        };
        if header.opcode == Opcode::Bind as u8 && self.grant.direct_alloc {
            if !granted(&header, self.grant.read_depth, self.grant.binding) {
                return Err(PuntReason::Unsupported);
            }
            return Bind::parse(head, length_bytes).map(WellFormed::Bind).map_err(why);
        }
        Operation::of_opcode(header.opcode).ok_or(PuntReason::NotARequest)?;
        if !granted(&header, self.grant.read_depth, self.grant.binding) {
            return Err(PuntReason::Unsupported);
        }
        Request::parse(head, length_bytes).map(WellFormed::Request).map_err(why)
    }

    /// The octets of the message in `slot`.
    pub(super) fn message(&self, slot: u64, length_bytes: u32) -> Span {
        Span {
            region: self.grant.receives,
            offset: slot.saturating_mul(self.grant.max_message_bytes.into()),
            len: length_bytes,
        }
    }

    fn next_task(&mut self) -> TaskId {
        let id = TaskId(self.tasks_named);
        self.tasks_named += 1;
        id
    }

    /// Start or punt every request whose turn on its handle has come.
    fn advance(&mut self, memory: &mut dyn SessionMemory) {
        while !self.ending
            && let Some(next) = self.turns.next()
        {
            match next {
                Next::Start(task) => {
                    let result = self.start(task, memory);
                    self.check(result);
                }
                Next::Punt(task, reason) => self.punt(task, reason),
            }
        }
        self.report_if_drained();
    }

    fn punt(&mut self, task: TaskId, reason: PuntReason) {
        let request = self.tasks.remove(&task).map(|task| (task.slot, task.length_bytes));
        // A BIND stays known until it is resolved.
        let bind = self.binds.get(&task).map(|bind| (bind.slot, bind.length_bytes));
        if let Some((slot, length_bytes)) = request.or(bind) {
            self.act(Action::Punt {
                slot,
                length_bytes,
                reason,
            });
        }
    }

    // --- what a sequence asks for ---

    /// RDMA Write of `source` to the task's Data Descriptor; `written` follows.
    pub(super) fn write(&mut self, task: TaskId, request: &Request, source: Piece) {
        let (stag, to) = (request.data.stag, request.data.to);
        self.act(Action::Write { task, source, stag, to });
    }

    /// RDMA Read into `sink` from the task's Data Descriptor, when a read slot is free; `fetched` follows.
    pub(super) fn read(&mut self, task: TaskId, sink: Span) {
        self.waiting_reads.push_back(WaitingRead::Own { task, sink });
        self.post_reads();
    }

    /// Profile 3 "RDMA Reads": those beyond the depth wait here, where no completion waits behind them.
    fn post_reads(&mut self) {
        while !self.ending
            && self.reads_posted < self.grant.read_depth
            && let Some(read) = self.waiting_reads.pop_front()
        {
            match read {
                WaitingRead::Own { task, sink } => {
                    let Some(Task { request, placed, .. }) = self.tasks.get_mut(&task) else {
                        continue;
                    };
                    *placed = true;
                    let (stag, to) = (request.data.stag, request.data.to);
                    self.act(Action::Read { task, sink, stag, to });
                }
                WaitingRead::Foreign { key } => self.act(Action::ForeignRead { key }),
            }
            if self.reads_posted == 0 {
                self.read_deadline = self.drain_deadline();
            }
            self.reads_posted += 1;
        }
    }

    fn read_done(&mut self, now: Instant) {
        self.now = now;
        self.reads_posted = self.reads_posted.saturating_sub(1);
        self.read_deadline = if self.reads_posted > 0 {
            self.drain_deadline()
        } else {
            None
        };
    }

    /// None if that is beyond the end of the clock.
    pub(super) fn drain_deadline(&self) -> Option<Instant> {
        self.now.checked_add(self.grant.drain)
    }

    /// Send the COMPLETION: `entry` gives the Generation and, with `data`, Data Length and Block Offset.
    pub(super) fn complete(&mut self, task: TaskId, status: Status, entry: Option<&Entry>, data: bool) {
        let Some(Task { request, slot, .. }) = self.tasks.get(&task) else {
            return;
        };
        let told = entry.filter(|_| data);
        let located = told.filter(|_| status == Status::Success); // profile 2: LENGTH_ERROR of a LOAD has the size only
        let completion = Completion {
            request_id: request.request_id,
            handle: request.handle,
            generation: entry.map_or(0, |entry| entry.generation),
            status,
            data_length: told.map_or(0, |entry| entry.data_length),
            block_offset: located.map_or(0, |entry| entry.block_offset),
        };
        self.held_completions.push_back(HeldCompletion {
            completion,
            slot: *slot,
            invalidate_stag: request.invalidates(),
            record: request.completion,
        });
        self.post_completions();
    }

    /// The request is wholly done or not done: the next one on its handle may start.
    pub(super) fn resolve(&mut self, task: TaskId) {
        if let Some(Task { request, .. }) = self.tasks.remove(&task) {
            self.turns.resolve(request.handle, task);
        }
    }

    pub(super) fn finish(&mut self, task: TaskId, status: Status, entry: Option<&Entry>, data: bool) {
        self.complete(task, status, entry, data);
        self.resolve(task);
    }

    /// Post what the send queue has room for. A peer that sends requests and reads no completions thus comes to the end of
    /// its receive buffers, and of its stream (1/2/02), rather than of this side's memory.
    fn post_completions(&mut self) {
        let posted_max = self.grant.request_credits as usize * COMPLETIONS_POSTED_PER_CREDIT;
        while !self.ending
            && self.completions_posted < posted_max
            && let Some(held) = self.held_completions.pop_front()
        {
            // profile 3 "Credits": before the Send that releases the credit
            self.act(Action::Repost { slot: held.slot });
            self.act(match held.record {
                None => Action::Send {
                    message: held.completion.pack(),
                    invalidate_stag: held.invalidate_stag,
                },
                Some(CompletionDescriptor { stag, to }) => Action::Record {
                    record: held.completion.pack_record(),
                    stag,
                    to,
                    immediate: held.completion.request_id as u32, // profile 7: the low 32 bits
                },
            });
            self.completions_posted += 1;
        }
    }

    fn report_if_drained(&mut self) {
        let finished = self.outstanding() == 0 && self.waiting_reads.is_empty();
        if self.draining && finished && !self.ending {
            self.ending = true;
            self.act(Action::Drained);
        }
    }

    /// A call out of turn to the block store is a fault in here: the session ends, and no other.
    fn check(&mut self, result: Result<(), ApiMisuse>) {
        if let Err(fault) = result {
            self.abort(format!("internal error: {fault}"));
        }
    }

    fn abort(&mut self, why: String) {
        self.ending = true;
        self.act(Action::Abort { why });
    }

    pub(super) fn act(&mut self, action: Action) {
        self.actions.push_back(action);
    }
}
