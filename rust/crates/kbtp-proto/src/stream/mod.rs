//! One RDMAP stream in full operation, without I/O: octets in, octets out, events between.
//!
//! How the parts fit:
//!
//! ```text
//! post         -> Outbound: queue -> message -> segments -> build_fpdu
//! receive      -> Intake: FPDUs -> segments; Inbound: checks -> placement -> next_event
//! StreamState: what both need: outstanding requests, owed responses, events, how the stream ends
//! ```
//!
//! The twin of `kbtp.iwarp.stream`, with two differences. Payload is not held here but named, by `Span`, and moved by
//! the caller's `Octets` or by the kernel. And a Send or Write completes when the caller says that its last FPDU was
//! sent, not when that was built.
//!
//! The caller moves octets: hand `receive` whatever TCP gives, write what `build_fpdu` builds, and drain `next_event`
//! after both, since either may end the stream. To save a copy, ask `direct` after each `receive`:
//!
//! ```text
//! loop: n = readv([direct(), staging]);  direct_received(min(n, direct));  receive(the rest in staging)
//! ```

mod events;
mod frame;
mod inbound;
mod intake;
mod outbound;
mod state;
mod watched;
mod work;

pub use events::{Event, Flushed, WrKind};
pub use frame::{Outgoing, Part};
pub use watched::Moved;
pub use work::{Inline, Payload, Piece, PostError, Work};

use crate::memory::{Octets, Span, StreamMemory};
use crate::mpa::Negotiated;
use crate::types::{TerminateCause, TerminateInfo};
use inbound::Inbound;
use intake::{Destination, Intake};
use outbound::Outbound;
use state::StreamState;
use work::{Done, Receive, What};

const FIRST_MSN: u32 = 1;

/// RFC 5040, 5041, 5044 and 7306 on one TCP connection whose MPA start-up gave `negotiated`.
///
/// Work is executed in the order of posting and completes in that order (RFC 5040 5.5 rules 13 and 15): a Send posted
/// after a Read is reported after it.
#[derive(Debug)]
pub struct IwarpStream {
    state: StreamState,
    outbound: Outbound,
    inbound: Inbound,
    intake: Intake,
    eof: bool,
}

impl IwarpStream {
    /// `active`: this side sent the MPA Request. `mulpdu` as in `set_mulpdu`.
    ///
    /// `initial_msn` replaces the first MSN of queues 0 to 3, both ways, so that their wrap can be tested.
    #[must_use]
    pub fn new(negotiated: Negotiated, active: bool, mulpdu: u32, initial_msn: Option<[u32; 4]>) -> Self {
        let first_msn = initial_msn.unwrap_or([FIRST_MSN; 4]);
        let state = StreamState::new(negotiated, active);
        Self {
            outbound: Outbound::new(&state, mulpdu, first_msn),
            inbound: Inbound::new(&state, first_msn),
            intake: Intake::new(state.negotiated.crc, state.negotiated.rx_markers),
            state,
            eof: false,
        }
    }

    // --- posting ---

    /// Queue `work`.
    ///
    /// The memory that it names stays as it is, and registered, until it is reported or flushed.
    pub fn post(&mut self, work: Work) -> Result<(), PostError> {
        let wr_id = work.wr_id();
        let what = What::of(work)?;
        let kind = what.kind();
        if matches!(kind, WrKind::Read | WrKind::Atomic) && self.state.negotiated.ord == 0 {
            return Err(PostError::OrdIsZero);
        }
        self.check_alive()?;
        let id = self.state.posted(wr_id, kind);
        self.outbound.post(id, what);
        Ok(())
    }

    /// `buffer` takes the octets of one Send of the peer, or is used up by one Immediate Data message.
    pub fn post_receive(&mut self, wr_id: u64, buffer: Span) -> Result<(), PostError> {
        self.check_alive()?;
        self.state.receives.push_back(Receive { wr_id, buffer });
        Ok(())
    }

    fn check_alive(&self) -> Result<(), PostError> {
        if self.state.failed {
            Err(PostError::Ended)
        } else {
            Ok(())
        }
    }

    // --- moving octets ---

    /// Append the next FPDU to `out`, which is this stream's alone until it is empty; false if nothing may be sent now.
    ///
    /// A Read Response whose source is refused makes the stream fail in here.
    pub fn build_fpdu(&mut self, memory: &mut dyn StreamMemory, octets: &dyn Octets, out: &mut Outgoing) -> bool {
        self.outbound.build_fpdu(&mut self.state, memory, octets, out)
    }

    /// The system took the next `bytes` octets of `out`.
    pub fn sent(&mut self, out: &mut Outgoing, bytes: usize) {
        out.sent(bytes, |work| self.state.complete(Some(work), Done::Sent));
    }

    /// True if `build_fpdu` would build something.
    #[must_use]
    pub fn wants_to_send(&self) -> bool {
        self.outbound.wants_to_send(&self.state)
    }

    /// Take octets from TCP in any split. What the peer does wrong is reported as `Failed`.
    ///
    /// After a failure everything is dropped silently (RFC 5041 7).
    pub fn receive(&mut self, data: &[u8], memory: &mut dyn StreamMemory, octets: &mut dyn Octets) {
        if !self.state.failed && !self.eof {
            let (inbound, state) = (&mut self.inbound, &mut self.state);
            self.intake.receive(
                data,
                &mut Destination {
                    inbound,
                    state,
                    memory,
                    octets,
                },
            );
        }
    }

    /// Where the next octets from TCP belong: a caller may read them straight there and call `direct_received`.
    ///
    /// None when they are few or not known to be payload; never with markers. The span is good for one read, with no
    /// revocation between this call and `direct_received`; then ask again. The CRC is taken over the memory after the
    /// read, so whoever else changes it meanwhile makes the stream end with a wrong CRC.
    pub fn direct(&mut self, memory: &mut dyn StreamMemory) -> Option<Span> {
        if self.state.failed || self.eof {
            None
        } else {
            self.intake.direct(memory)
        }
    }

    /// The first `bytes` of the span that `direct` named were read.
    pub fn direct_received(&mut self, bytes: u32, octets: &dyn Octets) {
        self.intake.direct_received(bytes, octets);
    }

    /// The peer's FIN. True if it came between messages, with nothing half received.
    pub fn receive_eof(&mut self) -> bool {
        self.eof = true;
        !self.intake.half_received() && !self.inbound.in_message()
    }

    /// What there is to report, in order.
    pub fn next_event(&mut self) -> Option<Event> {
        self.state.events.pop_front()
    }

    /// Cut messages that have not begun to fit `mulpdu`, which is brought within 128..64768 (RFC 5044 4.5).
    pub fn set_mulpdu(&mut self, mulpdu: u32) {
        self.outbound.set_mulpdu(mulpdu);
    }

    /// The owner of memory that the peer reads keeps it still as long as the peer may: it is sent from where it lies.
    pub fn keep_sources_still(&mut self) {
        self.outbound.keep_sources_still();
    }

    // --- CRCs of what the peer moves ---

    /// Find out the CRC32c of what the peer writes to, or reads from, `length` octets at `to` under `stag` from now on.
    ///
    /// Ranges must be disjoint; one that begins where another did takes its place.
    pub fn watch(&mut self, stag: u32, to: u64, length: u32) {
        self.state.watched.watch(stag, to, length);
    }

    /// What was moved in memory that was watched from `to` on, and no longer is; None if it is not known.
    pub fn moved(&mut self, stag: u32, to: u64) -> Option<Moved> {
        self.state.watched.end(stag, to)
    }

    // --- ending ---

    /// End the stream with a Terminate that quotes no header: nothing is placed or delivered from here on.
    ///
    /// A passive side that has received nothing yet may not send even that (RFC 5044 7.1.2 rule 4): the stream is then
    /// `ended` at once. Without effect on a stream that has failed.
    pub fn terminate(&mut self, cause: TerminateCause) {
        if self.state.failed {
            return;
        }
        if self.state.may_send {
            self.state.end_with(cause, None);
        } else {
            self.state.failed = true;
        }
    }

    /// End the stream without a further word (a queued Terminate still goes out) and give up what is outstanding.
    ///
    /// Each work request that was not reported complete is in the result once, in order of posting, receives last.
    /// What was built and not sent is the caller's to copy or drop before the memory goes back.
    pub fn flush(&mut self, memory: &mut dyn StreamMemory) -> Vec<Flushed> {
        self.outbound.drop_work();
        self.state.flush(memory)
    }

    /// How many posts, receives apart, are neither reported nor flushed.
    #[must_use]
    pub fn outstanding(&self) -> usize {
        self.state.outstanding()
    }

    /// Nothing more is accepted: the peer broke the protocol or sent a Terminate, or this side ended the stream.
    #[must_use]
    pub fn failed(&self) -> bool {
        self.state.failed
    }

    /// Nothing more is accepted, and nothing waits to be sent either.
    #[must_use]
    pub fn ended(&self) -> bool {
        self.state.failed && self.state.terminate_payload.is_none()
    }

    /// `build_fpdu` has built the Terminate.
    #[must_use]
    pub fn terminate_sent(&self) -> bool {
        self.state.sent_cause.is_some() && self.state.terminate_payload.is_none()
    }

    /// The cause of this side's Terminate, sent or waiting.
    #[must_use]
    pub fn sent_cause(&self) -> Option<TerminateCause> {
        self.state.sent_cause
    }

    /// What the peer's Terminate said.
    #[must_use]
    pub fn received_terminate(&self) -> Option<&TerminateInfo> {
        self.state.received_terminate.as_ref()
    }
}
