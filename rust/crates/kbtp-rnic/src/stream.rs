//! One RDMAP stream as its owner sees it.

use std::fmt;
use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex};

use kbtp_proto::stag::StreamId as ViewId;
use kbtp_proto::types::{TerminateCause, Ticket};

use crate::api::{Recv, StreamId, WorkRequest};
use crate::core::{ChannelShared, Core};
use crate::device::Pd;
use crate::error::Error;
use crate::initiator::{Batches, RequestGrant};
use crate::offload::Grant;
use crate::stream_state::{Facts, State, StreamState};

pub(crate) struct Shared {
    pub(crate) channel: Arc<ChannelShared>,
    pub(crate) facts: Arc<Facts>,
}

/// A queue pair and its connection: `kbtp.verbs.api.Stream`. A handle.
///
/// Posts are tried at once. Until `Established` only receives can be posted on the active side.
#[derive(Clone)]
pub struct Stream {
    pub(crate) shared: Arc<Shared>,
}

impl Stream {
    /// What events name it by; unique in the process.
    #[must_use]
    pub fn id(&self) -> StreamId {
        self.shared.facts.id
    }

    /// Its domain.
    #[must_use]
    pub fn pd(&self) -> &Pd {
        &self.shared.facts.pd
    }

    /// `host:port` of the peer, or what `connect` was given.
    #[must_use]
    pub fn remote_address(&self) -> &str {
        &self.shared.facts.remote_address
    }

    /// RDMA Reads and atomics the peer may have outstanding here, after negotiation.
    #[must_use]
    pub fn ird(&self) -> u32 {
        self.shared.facts.ird.load(Ordering::Relaxed).into()
    }

    /// RDMA Reads and atomics this side may have outstanding; more wait in the send queue.
    #[must_use]
    pub fn ord(&self) -> u32 {
        self.shared.facts.ord.load(Ordering::Relaxed).into()
    }

    /// For people.
    #[must_use]
    pub fn state_name(&self) -> &'static str {
        State::name(self.shared.facts.state.load(Ordering::Relaxed))
    }

    /// Queue work requests, executed in order. All or none.
    ///
    /// # Errors
    ///
    /// `Error::ApiMisuse` before anything is queued (on the connecting side also until `Established`),
    /// `Error::ConnectionLost` if the stream has ended or `disconnect` was called.
    pub fn post(&self, requests: Vec<WorkRequest>) -> Result<(), Error> {
        self.with(|stream, core| stream.post(core, requests))
            .unwrap_or_else(|| Err(self.has_ended()))
    }

    /// Queue receive buffers, used in order; from `connect` until the end. All or none.
    ///
    /// # Errors
    ///
    /// As `post`.
    pub fn post_recv(&self, receives: &[Recv]) -> Result<(), Error> {
        self.with(|stream, core| stream.post_recv(core, receives))
            .unwrap_or_else(|| Err(self.has_ended()))
    }

    /// End the stream with a Terminate. Nothing of the peer's is placed or delivered from here on.
    pub fn terminate(&self, cause: TerminateCause) {
        self.with(|stream, core| stream.terminate(core, cause));
    }

    /// End the stream in order: what is posted leaves, then the connection closes.
    pub fn disconnect(&self) {
        self.with(|stream, core| stream.disconnect(core));
    }

    /// End the stream at once, without a word.
    pub fn abort(&self) {
        self.with(|stream, core| stream.abort(core));
    }

    /// Serve the requests of its session in here from now on; see `kbtp.verbs.offload`. No receive is posted.
    ///
    /// # Errors
    ///
    /// `Error::ApiMisuse` for what could never work, `Error::ConnectionLost` if the stream has ended.
    pub fn offload(&self, grant: &Grant) -> Result<(), Error> {
        self.with(|stream, core| stream.offload(core, grant))
            .unwrap_or_else(|| Err(self.has_ended()))
    }

    /// Requests that are neither resolved nor left to the owner of an offloaded session.
    #[must_use]
    pub fn outstanding(&self) -> usize {
        self.with(|stream, _| stream.outstanding()).unwrap_or(0)
    }

    /// Tickets of the BINDs that came and that the owner of an offloaded session has not resolved.
    #[must_use]
    pub fn bind_tickets(&self) -> Vec<Ticket> {
        self.with(|stream, _| stream.bind_tickets()).unwrap_or_default()
    }

    /// The owner of an offloaded session has resolved a request on `handle` that was left to it.
    pub fn resolved(&self, handle: u64) {
        self.with(|stream, _| stream.resolved(handle));
    }

    /// Carry the requests of an initiator's session from now on.
    pub(crate) fn carry(&self, grant: &RequestGrant) -> Result<Arc<Mutex<Batches>>, Error> {
        self.with(|stream, core| stream.carry(core, grant))
            .unwrap_or_else(|| Err(self.has_ended()))
    }

    pub(crate) fn view_id(&self) -> ViewId {
        self.shared.facts.view.id
    }

    /// None if it has ended.
    pub(crate) fn with<R>(&self, act: impl FnOnce(&mut StreamState, &mut Core) -> R) -> Option<R> {
        self.shared
            .channel
            .with(|core| core.with_stream(self.id().0, act))
            .flatten()
    }

    fn has_ended(&self) -> Error {
        Error::lost(format!("the stream to {} has ended", self.remote_address()))
    }
}

impl PartialEq for Stream {
    fn eq(&self, other: &Self) -> bool {
        self.id() == other.id()
    }
}

impl Eq for Stream {}

impl fmt::Debug for Stream {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Stream({} {})", self.remote_address(), self.state_name())
    }
}
