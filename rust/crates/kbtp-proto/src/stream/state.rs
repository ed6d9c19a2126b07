//! What the two halves of a stream share: who waits for whom, what is to be reported, and how the stream ends.

use std::collections::VecDeque;

use super::events::{Event, Flushed, WrKind};
use super::watched::Watched;
use super::work::{Awaiting, Done, OpenRead, Owed, Receive, Unreported, WorkId};
use crate::memory::StreamMemory;
use crate::mpa::Negotiated;
use crate::terminate::{Offender, pack_terminate};
use crate::types::{PeerMisbehaved, TerminateCause, TerminateInfo};

/// Shared by `Outbound`, which fills `awaiting` and empties `owed`, and `Inbound`, which does the reverse.
#[derive(Debug)]
pub(super) struct StreamState {
    pub(super) negotiated: Negotiated,
    pub(super) active: bool,
    pub(super) events: VecDeque<Event>,
    /// Posted work in order, from the oldest that is not reported, whose name is `oldest_id`.
    unreported: VecDeque<Unreported>,
    oldest_id: WorkId,
    /// Requests that left and have no whole response yet: at most ORD (RFC 5040 6.1).
    pub(super) awaiting: VecDeque<Awaiting>,
    /// Requests of the peer whose response was not wholly handed out: at most IRD.
    pub(super) owed: VecDeque<Owed>,
    pub(super) receives: VecDeque<Receive>,
    pub(super) watched: Watched,
    /// False on the passive side until an FPDU of the peer was validated (RFC 5044 7.1.2 rule 4).
    pub(super) may_send: bool,
    pub(super) failed: bool,
    /// The Terminate that waits to be handed out.
    pub(super) terminate_payload: Option<Vec<u8>>,
    pub(super) sent_cause: Option<TerminateCause>,
    pub(super) received_terminate: Option<TerminateInfo>,
}

impl StreamState {
    pub(super) fn new(negotiated: Negotiated, active: bool) -> Self {
        let failure = negotiated.failure.map(|cause| {
            let (ird, ord) = (negotiated.peer_ird, negotiated.peer_ord);
            PeerMisbehaved::new(
                cause,
                format!("the MPA Reply (IRD {ird}, ORD {ord}) does not fit this side"),
            )
        });
        let mut state = Self {
            negotiated,
            active,
            events: VecDeque::new(),
            unreported: VecDeque::new(),
            oldest_id: 0,
            awaiting: VecDeque::new(),
            owed: VecDeque::new(),
            receives: VecDeque::new(),
            watched: Watched::default(),
            may_send: active,
            failed: false,
            terminate_payload: None,
            sent_cause: None,
            received_terminate: None,
        };
        if let Some(error) = failure {
            state.fail(error, None);
        }
        state
    }

    pub(super) fn posted(&mut self, wr_id: u64, kind: WrKind) -> WorkId {
        self.unreported.push_back(Unreported {
            wr_id,
            kind,
            done: None,
        });
        self.oldest_id + (self.unreported.len() as u64 - 1)
    }

    /// How many posts are not reported, receives apart.
    pub(super) fn outstanding(&self) -> usize {
        self.unreported.len()
    }

    /// Completions are reported in the order of submission (RFC 5040 5.5 rule 15).
    pub(super) fn complete(&mut self, id: Option<WorkId>, done: Done) {
        let index = id
            .and_then(|id| id.checked_sub(self.oldest_id))
            .and_then(|index| usize::try_from(index).ok());
        if let Some(work) = index.and_then(|index| self.unreported.get_mut(index)) {
            work.done = Some(done);
        }
        while let Some(&Unreported {
            wr_id,
            kind,
            done: Some(done),
        }) = self.unreported.front()
        {
            self.unreported.pop_front();
            self.oldest_id += 1;
            self.events.push_back(completion(wr_id, kind, done));
        }
    }

    /// The peer broke the protocol. Nothing is looked at after the first error (RFC 5040 7.1 item 4).
    pub(super) fn fail(&mut self, error: PeerMisbehaved, offender: Option<&Offender>) {
        // A responder whose very first FPDU is bad may not have sent by the letter of RFC 5044 7.1.2 rule 4; the
        // initiator takes FPDUs by then, and is better told.
        self.end_with(error.cause, offender);
        self.events.push_back(Event::Failed { error });
    }

    /// Let one more message out, the Terminate (RFC 5041 7).
    pub(super) fn end_with(&mut self, cause: TerminateCause, offender: Option<&Offender>) {
        self.failed = true;
        self.sent_cause = Some(cause);
        self.terminate_payload = Some(pack_terminate(cause, offender));
    }

    /// A Terminate is never answered with one, so that two ends cannot keep each other busy.
    pub(super) fn ended_by_peer(&mut self, info: TerminateInfo) {
        self.failed = true;
        self.received_terminate = Some(info.clone());
        self.events.push_back(Event::TerminateReceived { info });
    }

    pub(super) fn flush(&mut self, memory: &mut dyn StreamMemory) -> Vec<Flushed> {
        self.failed = true;
        for request in std::mem::take(&mut self.awaiting) {
            if let Awaiting::Read(read) = request {
                return_sink(&read, memory);
            }
        }
        self.owed.clear();
        self.oldest_id += self.unreported.len() as u64;
        let work = self.unreported.drain(..).map(|work| Flushed {
            wr_id: work.wr_id,
            kind: work.kind,
        });
        let receives = self.receives.drain(..).map(|receive| Flushed {
            wr_id: receive.wr_id,
            kind: WrKind::Receive,
        });
        work.chain(receives).collect()
    }
}

pub(super) fn return_sink(read: &OpenRead, memory: &mut dyn StreamMemory) {
    if let Some(stag) = read.sink_stag {
        memory.return_sink_stag(stag);
    }
}

fn completion(wr_id: u64, kind: WrKind, done: Done) -> Event {
    match (done, kind) {
        (Done::Read { length }, _) => Event::ReadCompleted { wr_id, length },
        (Done::Atomic { value }, _) => Event::AtomicCompleted { wr_id, value },
        (Done::Sent, WrKind::Write) => Event::WriteCompleted { wr_id },
        (Done::Sent, WrKind::Immediate) => Event::ImmediateCompleted { wr_id },
        (Done::Sent, _) => Event::SendCompleted { wr_id },
    }
}
