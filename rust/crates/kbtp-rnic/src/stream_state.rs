//! One RDMAP stream as its channel keeps it: an `IwarpStream` on a TCP connection.
//!
//! The stream lives through four states:
//!
//! ```text
//! CONNECTING     (active side) no Reply yet
//! OPEN           work is posted and completed
//! DISCONNECTING  what is posted leaves, then FIN, then the peer's FIN is awaited
//! ENDED          `StreamEnded` or `Rejected` is reported; the connection may still say goodbye on its own
//! ```

use std::collections::VecDeque;
use std::io;
use std::mem;
use std::sync::Arc;
use std::sync::atomic::{AtomicU8, AtomicU16, Ordering};

use kbtp_proto::limits;
use kbtp_proto::memory::{RegionId, Span};
use kbtp_proto::stag::StreamId as ViewId;
use kbtp_proto::stream::{PostError, Work};
use kbtp_proto::target::TaskId;
use kbtp_proto::types::TerminateCause;
use smallvec::SmallVec;

use crate::api::{Event, Recv, StreamId, WorkRequest};
use crate::completions::completion_of;
use crate::connector::{Connecting, Step, Transport};
use crate::core::Core;
use crate::device::Pd;
use crate::error::{EndReason, Error};
use crate::event_loop::{TimerId, Token};
use crate::goodbye::Goodbye;
use crate::initiator::Initiator;
use crate::iwarp_operation::IwarpOperation;
use crate::offload::Offload;
use crate::operation::{Operation, Received};
use crate::posting::{View, check_capabilities, prepare, receive_buffers, spans_of};
use crate::stream::{Shared, Stream};
use crate::stream_end::Farewell;

/// After a send failed there may still be a Terminate to read that says why; a flood of other input is not waited out.
const READS_AFTER_SEND_ERROR: usize = 16;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub(crate) enum State {
    Connecting,
    Open,
    Disconnecting,
    Ended,
}

impl State {
    /// Of a state's number.
    pub(crate) fn name(state: u8) -> &'static str {
        ["CONNECTING", "OPEN", "DISCONNECTING", "ENDED"]
            .get(usize::from(state))
            .copied()
            .unwrap_or("?")
    }
}

/// What handles show of a stream.
pub(crate) struct Facts {
    pub(crate) id: StreamId,
    pub(crate) pd: Pd,
    pub(crate) view: View,
    pub(crate) remote_address: String,
    pub(crate) ird: AtomicU16,
    pub(crate) ord: AtomicU16,
    pub(crate) state: AtomicU8,
}

/// The regions whose memory a piece of posted work holds.
pub(crate) type Held = SmallVec<[RegionId; 2]>;

/// Whom the completion of posted work is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum WorkOwner {
    /// The owner of the channel.
    Caller,
    /// The same, and the offloaded session counts it among its RDMA Reads.
    CallersRead,
    /// The offloaded session: a LOAD's data,
    Write(TaskId),
    /// a STORE's or ALLOC_STORE's,
    Read(TaskId),
    /// a COMPLETION.
    Completion,
    /// An initiator: a request.
    Request,
}

/// Posted work that is not complete.
pub(crate) struct HeldWork {
    pub(crate) regions: Held,
    pub(crate) owner: WorkOwner,
}

pub(crate) struct StreamState {
    pub(crate) token: Token,
    pub(crate) facts: Arc<Facts>,
    pub(crate) state: State,
    pub(crate) connector: Option<Box<dyn Connecting + Send>>,
    pub(crate) operation: Option<Operation>,
    pub(crate) offload: Option<Box<Offload>>,
    pub(crate) initiator: Option<Box<Initiator>>,
    /// Posted before there was an operation.
    pub(crate) early_receives: Vec<(u64, Span)>,
    /// Of each posted work request that is not complete, and of each receive, in order; None for the offloaded session's own.
    pub(crate) held_work: VecDeque<HeldWork>,
    pub(crate) held_receives: VecDeque<Option<RegionId>>,
    /// What all work of the offloaded session's own names.
    pub(crate) session_regions: Held,
    pub(crate) timer: Option<TimerId>,
    pub(crate) moved_bytes_seen: u64,
}

impl StreamState {
    pub(crate) fn new(
        core: &mut Core,
        token: Token,
        pd: &Pd,
        remote_address: String,
        ird: u16,
        ord: u16,
    ) -> Result<Self, Error> {
        let id = core.device.table_mut().open_view(pd.id)?;
        let facts = Facts {
            id: StreamId(token),
            pd: pd.clone(),
            view: View {
                device: Arc::clone(&core.device),
                id,
            },
            remote_address,
            ird: AtomicU16::new(ird),
            ord: AtomicU16::new(ord),
            state: AtomicU8::new(State::Connecting as u8),
        };
        Ok(Self {
            token,
            facts: Arc::new(facts),
            state: State::Connecting,
            connector: None,
            operation: None,
            offload: None,
            initiator: None,
            early_receives: Vec::new(),
            held_work: VecDeque::new(),
            held_receives: VecDeque::new(),
            session_regions: Held::new(),
            timer: None,
            moved_bytes_seen: 0,
        })
    }

    pub(crate) fn handle(&self, core: &Core) -> Option<Stream> {
        let channel = core.me.upgrade()?;
        Some(Stream {
            shared: Arc::new(Shared {
                channel,
                facts: Arc::clone(&self.facts),
            }),
        })
    }

    pub(crate) fn id(&self) -> StreamId {
        self.facts.id
    }

    pub(crate) fn pd(&self) -> &Pd {
        &self.facts.pd
    }

    pub(crate) fn view_id(&self) -> ViewId {
        self.facts.view.id
    }

    pub(crate) fn token(&self) -> Token {
        self.token
    }

    /// IRD and ORD.
    pub(crate) fn depths(&self) -> (u16, u16) {
        (
            self.facts.ird.load(Ordering::Relaxed),
            self.facts.ord.load(Ordering::Relaxed),
        )
    }

    pub(crate) fn has_ended(&self) -> bool {
        self.state == State::Ended
    }

    // --- from the ULP ---

    pub(crate) fn post(&mut self, core: &mut Core, requests: Vec<WorkRequest>) -> Result<(), Error> {
        if self.state == State::Disconnecting {
            let peer = &self.facts.remote_address;
            return Err(Error::lost(format!(
                "the stream to {peer} is disconnecting: no more work is taken"
            )));
        }
        let Some(operation) = self.operation.as_mut() else {
            return Err(Error::misuse("the stream is still connecting: post after Established"));
        };
        let mut foreign_reads = Vec::new();
        {
            let table = core.device.table();
            let ord = self.facts.ord.load(Ordering::Relaxed);
            let view = &self.facts.view;
            let works: Vec<Work> = requests
                .into_iter()
                .map(|request| prepare(request, view, ord))
                .collect::<Result<_, _>>()?;
            works.iter().try_for_each(|work| check_capabilities(work, view))?;
            for work in works {
                let regions: Held = spans_of(&work).map(|span| span.region).collect();
                for region in &regions {
                    table.memories.hold(*region);
                }
                if let (Some(_), Work::Read { wr_id, sink, .. }) = (&self.offload, &work) {
                    foreign_reads.push((*wr_id, sink.region, work));
                    continue;
                }
                if let Err(error) = operation.post(work) {
                    let waiting = foreign_reads.iter().map(|(_, region, _)| region);
                    let held = regions.iter().chain(waiting);
                    held.for_each(|region| table.memories.release(*region));
                    return Err(post_error(error));
                }
                let owner = WorkOwner::Caller;
                self.held_work.push_back(HeldWork { regions, owner });
            }
        }
        for (wr_id, region, work) in foreign_reads {
            self.post_foreign_read(core, work, wr_id, region);
        }
        self.send(core);
        Ok(())
    }

    pub(crate) fn post_recv(&mut self, core: &mut Core, receives: &[Recv]) -> Result<(), Error> {
        let buffers = {
            let table = core.device.table();
            let buffers = receive_buffers(receives, &self.facts.view)?;
            for (_, span) in &buffers {
                table.memories.hold(span.region);
            }
            buffers
        };
        self.held_receives
            .extend(buffers.iter().map(|(_, span)| Some(span.region)));
        match self.operation.as_mut() {
            None => self.early_receives.extend(buffers),
            Some(operation) => {
                for (wr_id, span) in buffers {
                    operation.post_receive(wr_id, span).map_err(post_error)?;
                }
                if operation.has_to_send() {
                    self.send(core); // to the device's queue
                }
            }
        }
        Ok(())
    }

    pub(crate) fn terminate(&mut self, core: &mut Core, cause: TerminateCause) {
        let peer = &self.facts.remote_address;
        let reason = match self.operation.as_mut() {
            None => EndReason::lost(format!("this side gave up connecting to {peer}: {cause}")),
            Some(operation) => {
                operation.terminate(cause);
                EndReason::lost(format!("this side ended the stream to {peer}: {cause}"))
            }
        };
        self.end(core, Some(reason));
    }

    pub(crate) fn disconnect(&mut self, core: &mut Core) {
        if self.state == State::Disconnecting {
            return;
        }
        if self.operation.is_none() {
            let peer = &self.facts.remote_address;
            let reason = EndReason::lost(format!("this side gave up connecting to {peer}"));
            self.end(core, Some(reason));
            return;
        }
        self.set_state(State::Disconnecting);
        if !self.drain_offloaded(core) {
            self.watch_disconnect(core);
        }
        self.send(core);
    }

    pub(crate) fn abort(&mut self, core: &mut Core) {
        self.abort_because(
            core,
            format!("this side aborted the stream to {}", self.facts.remote_address),
        );
    }

    pub(crate) fn abort_because(&mut self, core: &mut Core, why: String) {
        let reason = EndReason::lost(why);
        self.end_with(core, Some(reason), None, Farewell::Reset, None);
    }

    // --- from start-up ---

    /// It never was: the ULP has not seen it.
    pub(crate) fn discard(&mut self, core: &mut Core) {
        self.set_state(State::Ended);
        core.device.table_mut().close_view(self.facts.view.id);
        self.release_all(core);
    }

    pub(crate) fn connect_through(&mut self, core: &mut Core, mut connector: Box<dyn Connecting + Send>) {
        let step = connector.start(core);
        self.connector = Some(connector);
        self.take_step(core, step);
    }

    /// Start-up is done: full operation on `transport`, which is the stream's from here on (RFC 5044 7.1).
    pub(crate) fn open(&mut self, core: &mut Core, transport: Transport, active: bool) {
        match transport {
            Transport::Iwarp {
                link,
                negotiated,
                surplus,
            } => {
                let (depths, failure) = ((negotiated.ird, negotiated.ord), negotiated.failure);
                let private_data = negotiated.private_data.clone();
                match IwarpOperation::new(link, self.facts.view.id, negotiated, active) {
                    Ok(operation) => self.operation = Some(Operation::Iwarp(Box::new(operation))),
                    Err(error) => return self.take_loss(core, &error),
                }
                self.set_open(depths);
                match failure {
                    None => self.begin(core, active.then_some(private_data), &surplus),
                    Some(cause) => {
                        let peer = &self.facts.remote_address;
                        let why = format!("{peer} cannot serve what this side needs: {cause}");
                        self.end(core, Some(EndReason::PeerIncompatible(why)));
                    }
                }
            }
            Transport::Verbs {
                operation,
                ird,
                ord,
                private_data,
                receives_posted,
            } => {
                operation.check_mtu(core, &self.facts.remote_address);
                self.operation = Some(Operation::Verbs(operation));
                self.set_open((ird, ord));
                self.early_receives.drain(..receives_posted);
                self.begin(core, active.then_some(private_data), &[]);
            }
        }
    }

    fn set_open(&mut self, (ird, ord): (u16, u16)) {
        self.facts.ird.store(ird, Ordering::Relaxed);
        self.facts.ord.store(ord, Ordering::Relaxed);
        self.state = State::Open;
        self.facts.state.store(self.state as u8, Ordering::Relaxed);
    }

    /// `established`: the peer's private data, on the active side.
    fn begin(&mut self, core: &mut Core, established: Option<Vec<u8>>, surplus: &[u8]) {
        let Some(operation) = self.operation.as_mut() else {
            return;
        };
        for (wr_id, span) in mem::take(&mut self.early_receives) {
            // Refused only by a stream that has failed, which this one has not.
            let _ = operation.post_receive(wr_id, span);
        }
        if let Some(private_data) = established {
            core.report(Event::Established {
                stream: self.facts.id,
                private_data,
            });
        }
        if !surplus.is_empty() {
            operation.receive_octets(&core.device, surplus);
            self.take_events(core);
        }
        self.send(core);
    }

    pub(crate) fn fail_connecting(&mut self, core: &mut Core, reason: EndReason) {
        self.end(core, Some(reason));
    }

    fn take_step(&mut self, core: &mut Core, step: Step) {
        match step {
            Step::Continue => {}
            Step::Open(transport) => {
                self.connector = None;
                self.open(core, transport, true);
            }
            Step::Rejected { link, private_data } => {
                // Receives complete as flushed first; MPA is left (RFC 5044 7.1.2 rule 3).
                self.connector = None;
                let rejected = Event::Rejected {
                    stream: self.facts.id,
                    private_data,
                };
                self.end_with(core, None, None, Farewell::Close, Some(rejected));
                if let Some(link) = link {
                    Goodbye::start(core, self.token, link);
                }
            }
            Step::Failed(reason) => self.fail_connecting(core, reason),
        }
    }

    // --- from the loop ---

    /// One of its file descriptors is readable: that of the connection manager if `managed`. `on_ready` follows.
    pub(crate) fn notified(&mut self, managed: bool) {
        match &mut self.operation {
            Some(operation) if managed => operation.managed(),
            Some(operation) => operation.notified(),
            None => {}
        }
    }

    pub(crate) fn on_ready(&mut self, core: &mut Core, readable: bool) {
        if let Some(connector) = self.connector.as_mut() {
            let step = connector.on_ready(core, readable, &self.early_receives);
            self.take_step(core, step);
            return;
        }
        if readable {
            self.receive(core);
        }
        self.send(core);
    }

    /// As `on_ready`, when it is not known whether there is anything; true if octets came or left.
    pub(crate) fn pump(&mut self, core: &mut Core) -> bool {
        let moved_bytes = |stream: &Self| stream.operation.as_ref().map(Operation::moved_bytes);
        let before = moved_bytes(self);
        self.receive(core);
        // What waits for room in the socket, or for the next turn, would otherwise wait until whoever spins has done with it.
        let waits = |operation: &Operation| operation.has_unsent() || operation.has_to_send();
        if moved_bytes(self) != before || self.operation.as_ref().is_some_and(waits) {
            self.send(core);
        }
        moved_bytes(self) != before
    }

    pub(crate) fn on_timer(&mut self, core: &mut Core, timer: TimerId) {
        if let Some(connector) = self.connector.as_mut() {
            let step = connector.timed_out(core);
            self.take_step(core, step);
        } else if self.timer == Some(timer) {
            self.disconnect_timed_out(core);
        } else {
            self.offload_timer_fired(core, timer);
        }
    }

    /// Read until nothing is left or others should have a turn.
    fn receive(&mut self, core: &mut Core) {
        let mut budget_bytes = limits::RNIC_PUMP_MAX_BYTES;
        while let Some(operation) = self.operation.as_mut() {
            match operation.receive(&core.device, &mut core.staging) {
                Ok(Received::Nothing) => {
                    if operation.is_flushed() && self.timer.is_none() {
                        self.watch_disconnect(core);
                    }
                    return;
                }
                Ok(Received::Eof { whole }) => {
                    self.take_eof(core, whole);
                    return;
                }
                Ok(Received::Octets { bytes, more }) => {
                    core.busy_stream = Some(self.token);
                    core.ahead.clear();
                    self.take_events(core);
                    budget_bytes = budget_bytes.saturating_sub(bytes);
                    if !more || budget_bytes == 0 {
                        return;
                    }
                }
                Err(error) => {
                    self.take_loss(core, &error);
                    return;
                }
            }
        }
    }

    /// Send until the socket takes no more, nothing is left, or others should have a turn.
    pub(crate) fn send(&mut self, core: &mut Core) {
        if self.operation.is_none() {
            return;
        }
        let turn_is_over = match self.send_turn(core) {
            Ok(turn_is_over) => turn_is_over,
            Err(error) => {
                self.send_failed(core, &error);
                return;
            }
        };
        let waits = |operation: &Operation| turn_is_over || operation.has_unsent();
        if self.operation.as_ref().is_some_and(|operation| !waits(operation)) {
            self.take_silence(core);
        }
        if let Some(operation) = self.operation.as_mut() {
            let write = waits(operation);
            operation.watch(core, self.token, write);
        }
    }

    /// True if it ended only because others should have a turn.
    fn send_turn(&mut self, core: &mut Core) -> io::Result<bool> {
        let mut budget_bytes = limits::RNIC_PUMP_MAX_BYTES;
        while let Some(operation) = self.operation.as_mut() {
            if !operation.has_unsent() && !operation.has_to_send() {
                return Ok(false);
            }
            if budget_bytes == 0 {
                return Ok(true);
            }
            let result = operation.send_batch(&core.device, &mut core.outgoing, core.now);
            let full = operation.has_unsent();
            self.take_events(core);
            budget_bytes = budget_bytes.saturating_sub(result?);
            if full {
                return Ok(false);
            }
        }
        Ok(false)
    }

    fn send_failed(&mut self, core: &mut Core, error: &io::Error) {
        for _ in 0..READS_AFTER_SEND_ERROR {
            let Some(operation) = self.operation.as_mut() else {
                return;
            };
            match operation.receive(&core.device, &mut core.staging) {
                Ok(Received::Octets { .. }) => self.take_events(core),
                _ => break,
            }
        }
        self.take_loss(core, error);
    }

    // --- from the operation ---

    /// Report what the iWARP stream has to say, in its order. Whoever gets `StreamEnded` logs why, once.
    fn take_events(&mut self, core: &mut Core) {
        let mut released = Held::new();
        while let Some(event) = self.operation.as_mut().and_then(Operation::next_event) {
            match completion_of(self.facts.id, event) {
                Ok(completion) if completion.opcode.of_receive() => {
                    released.extend(self.held_receives.pop_front().flatten());
                    self.take_receive(core, completion);
                }
                Ok(completion) => {
                    if let Some(HeldWork { regions, owner }) = self.held_work.pop_front() {
                        released.extend(regions);
                        self.take_work(core, owner, completion);
                    }
                }
                Err(end) => {
                    self.perform(core);
                    self.take_end(core, end);
                }
            }
        }
        self.perform(core);
        if !released.is_empty() {
            let table = core.device.table();
            released.into_iter().for_each(|region| table.memories.release(region));
        }
    }
}

/// A post is refused by the stream itself only once that has failed: everything else was checked before.
fn post_error(error: PostError) -> Error {
    match error {
        PostError::Ended => Error::lost(error.to_string()),
        PostError::OrdIsZero | PostError::TooLong(_) | PostError::NotOfRdmap => Error::misuse(error.to_string()),
    }
}
