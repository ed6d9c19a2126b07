//! What a session is given, and what it decides to do on its stream; the RNIC does it, in order.

use std::time::Duration;

use super::punt::PuntReason;
use super::turns::TaskId;
use crate::blocks::{BlockStore, DomainId, FinishedFree, HandleRange, HolderId, OwnerId};
use crate::limits::{COMPLETION_BYTES, COMPLETION_RECORD_BYTES};
use crate::memory::{RegionId, Span};
use crate::stream::Piece;

/// What a session has of what depends on the binding (draft 9).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BindingTerms {
    /// RECORD is granted (draft 6.5, 9.2).
    pub records: bool,
    /// INVALIDATE is served.
    pub invalidates: bool,
    /// The peer's atomics on Head are not atomic with a processor's: no ticket may be taken here.
    pub head_of_device: bool,
}

impl BindingTerms {
    /// Draft 9.1, profile 8.3.
    pub const RDMAP: Self = Self {
        records: false,
        invalidates: true,
        head_of_device: false,
    };
}

/// What the HELLO of a stream was granted, so that its requests can be served without asking Python again.
#[derive(Clone, Debug)]
pub struct SessionGrant {
    /// The stream: who holds the pins of LOADs, and who is told of FREEs that had to wait.
    pub stream: OwnerId,
    /// Whose quota an ALLOC_STORE takes a unit of.
    pub holder: HolderId,
    /// The trust domain, whose handles may be loaded.
    pub domain: DomainId,
    /// The handles that may be changed.
    pub handles: HandleRange,
    /// BINDs are requests, and have their turns.
    pub direct_alloc: bool,
    /// Which flags requests may have.
    pub binding: BindingTerms,
    /// Receive buffers that were posted for requests.
    pub request_credits: u32,
    /// Octets of each.
    pub max_message_bytes: u32,
    /// Where they lie, one behind the other: a receive's wr_id is its slot.
    pub receives: RegionId,
    /// The block pool, from the first block on.
    pub pool: RegionId,
    /// RDMA Reads that may be outstanding towards the initiator: min(own ORD, the peer's IRD) (profile 3).
    pub read_depth: u32,
    /// How long the initiator may take for an RDMA Read, or for a LOAD that a FREE waits for (profile 6.1, 8.8).
    pub drain: Duration,
}

/// Something to do on the stream.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Action {
    /// RDMA Write of `source`; `Session::written` follows when its last octet has left.
    Write {
        /// Whose data it is.
        task: TaskId,
        /// In the block, from its first octet on: one piece.
        source: Piece,
        /// The initiator's memory.
        stag: u32,
        /// Where in it.
        to: u64,
    },
    /// RDMA Read into `sink`; `Session::fetched` follows when all of it is placed.
    Read {
        /// Whose data it is.
        task: TaskId,
        /// In the block.
        sink: Span,
        /// The initiator's memory.
        stag: u32,
        /// Where in it.
        to: u64,
    },
    /// Post the RDMA Read that `Session::foreign_read` named so; `Session::foreign_read_done` follows.
    ForeignRead {
        /// Its name.
        key: u64,
    },
    /// The receive buffer of `slot` is the peer's again. Before the Send that tells the peer so (profile 3 "Credits").
    Repost {
        /// Which one.
        slot: u64,
    },
    /// Send a COMPLETION; `Session::sent` follows.
    Send {
        /// Its octets.
        message: [u8; COMPLETION_BYTES],
        /// The STag that the initiator's RNIC makes unusable.
        invalidate_stag: Option<u32>,
    },
    /// RDMA Write with Immediate of a completion record; `Session::sent` follows.
    Record {
        /// Its octets.
        record: [u8; COMPLETION_RECORD_BYTES],
        /// The initiator's slot for it.
        stag: u32,
        /// Where that is.
        to: u64,
        /// Profile 7.
        immediate: u32,
    },
    /// Hand the receive completion of `slot` to Python. If it is a well-formed request, `Session::resolved` follows.
    Punt {
        /// The buffer that holds the message.
        slot: u64,
        /// The message's octets.
        length_bytes: u32,
        /// For its counter.
        reason: PuntReason,
    },
    /// A FREE, of another session since one's own waits for one's own LOADs, waited for a LOAD of this one and is complete:
    /// tell whom its token names.
    Freed(FinishedFree),
    /// End the stream at once: the peer is not listening, or something in here is wrong.
    Abort {
        /// One line for the log.
        why: String,
    },
    /// After `Session::drain`: everything is resolved and every completion posted.
    Drained,
}

/// Registered memory as a session sees it. Whatever it names is registered and stays so until `Session::end`.
pub trait SessionMemory {
    /// The octets of `span` into `into`, which has `span.len` octets.
    fn read(&self, span: Span, into: &mut [u8]);

    /// The octets of `from` to `to`, which is as long and does not overlap it.
    fn copy(&mut self, from: Span, to: Span);
}

/// The one `BlockStore` of a target as its sessions share it.
pub trait SharedStore {
    /// One critical section: nobody else sees or changes the store while `act` runs. It is never entered twice, and
    /// `SessionMemory` may be called within.
    fn with<R>(&self, act: impl FnOnce(&mut BlockStore) -> R) -> R;
}
