//! The verbs as values: work requests in, events out; the twins of the dataclasses of `kbtp.verbs.api`.

use kbtp_proto::blocks::FinishedFree;
use kbtp_proto::types::{TerminateCause, TerminateInfo};

use crate::device::Region;
use crate::error::EndReason;
use crate::request::ConnectRequest;

pub use kbtp_proto::stag::Access;

/// Names one stream of a channel; never used again.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct StreamId(pub u64);

/// What the wire below an RNIC can do.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[allow(missing_docs, reason = "the names say it; see kbtp.verbs.api.Capabilities")]
pub struct Capabilities {
    pub atomics: bool,
    pub masked_atomics: bool,
    pub immediate: bool,
    pub send_with_invalidate: bool,
    pub ordered_placement: bool,
    pub write_with_immediate: bool,
    pub own_base: bool,
    pub invalidated_by_peers: bool,
    pub atomics_with_processors: bool,
    pub max_ird: u32,
    pub max_ord: u32,
}

/// One piece of registered memory: `length` octets from `offset` within `region`.
#[derive(Clone, Debug)]
#[allow(missing_docs, reason = "said above")]
pub struct Sge {
    pub region: Region,
    pub offset: u64,
    pub length: u64,
}

/// A receive buffer; one is consumed by each Send or Immediate of the peer.
#[derive(Clone, Debug)]
#[allow(missing_docs, reason = "said above")]
pub struct Recv {
    pub wr_id: u64,
    pub sge: Sge,
}

/// Work to post, executed in order.
#[derive(Clone, Debug)]
#[allow(missing_docs, reason = "the fields are those of kbtp.verbs.api")]
pub enum WorkRequest {
    /// Send of `inline` (copied when posted) followed by the octets of `sges`.
    Send {
        wr_id: u64,
        inline: Vec<u8>,
        sges: Vec<Sge>,
        invalidate_stag: Option<u32>,
        solicited: bool,
    },
    /// RDMA Write of the octets of `sges` to the peer's `remote_stag`, `remote_to`.
    Write {
        wr_id: u64,
        sges: Vec<Sge>,
        remote_stag: u32,
        remote_to: u64,
    },
    /// RDMA Write of `inline` (copied when posted), which takes a receive of the peer's and gives that `immediate`.
    WriteImmediate {
        wr_id: u64,
        inline: Vec<u8>,
        remote_stag: u32,
        remote_to: u64,
        immediate: u32,
    },
    /// RDMA Read of `sink.length` octets into `sink`.
    Read {
        wr_id: u64,
        sink: Sge,
        remote_stag: u32,
        remote_to: u64,
    },
    /// RFC 7306 FetchAdd.
    FetchAdd {
        wr_id: u64,
        remote_stag: u32,
        remote_to: u64,
        add_data: u64,
        add_mask: u64,
    },
    /// RFC 7306 CmpSwap.
    CompareSwap {
        wr_id: u64,
        remote_stag: u32,
        remote_to: u64,
        swap_data: u64,
        swap_mask: u64,
        compare_data: u64,
        compare_mask: u64,
    },
    /// RFC 7306 Immediate Data.
    Immediate { wr_id: u64, data: [u8; 8], solicited: bool },
}

/// What a work completion completes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[allow(missing_docs, reason = "the names say it")]
pub enum WcOpcode {
    Send,
    RdmaWrite,
    RdmaRead,
    Atomic,
    Immediate,
    Recv,
    RecvImmediate,
}

impl WcOpcode {
    pub(crate) fn of_receive(self) -> bool {
        matches!(self, Self::Recv | Self::RecvImmediate)
    }
}

/// How a work request ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum WcStatus {
    /// Done.
    Success,
    /// The stream ended first: not done, or not known to be done.
    Flushed,
}

/// One completed work request.
///
/// Send, RdmaWrite and Immediate complete when their last octet has left the registered memory: the buffer may change
/// from then on; it says nothing about the peer. RdmaRead and Atomic complete on their response.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[allow(missing_docs, reason = "the fields are those of kbtp.verbs.api.WorkCompletion")]
pub struct WorkCompletion {
    pub stream: StreamId,
    pub wr_id: u64,
    pub opcode: WcOpcode,
    pub status: WcStatus,
    pub length: u32,
    pub value: u64,
    pub invalidated_stag: Option<u32>,
    pub immediate: Option<[u8; 8]>,
    pub solicited: bool,
}

/// What `Channel::poll` reports, in order.
#[derive(Debug)]
pub enum Event {
    /// A peer asks to connect: answer before the next `poll`, which else rejects it.
    ConnectRequest(ConnectRequest),
    /// `stream` (from `Channel::connect`) was accepted; `ird` and `ord` of the stream are the negotiated ones now.
    Established {
        /// Which stream.
        stream: StreamId,
        /// The peer's.
        private_data: Vec<u8>,
    },
    /// The peer refused `stream`: its last event. Its receives were flushed before.
    Rejected {
        /// Which stream.
        stream: StreamId,
        /// The peer's.
        private_data: Vec<u8>,
    },
    /// A work request is complete.
    Completion(WorkCompletion),
    /// A FREE that waited for LOADs is done: one that was begun by a caller of the block store, or by the offloaded
    /// session of a stream that has ended.
    Freed {
        /// `SharedBlocks::number`.
        store: u64,
        /// What became of it.
        finished: FinishedFree,
    },
    /// A batch of requests that `stream` carries is done.
    BatchDone {
        /// Which stream.
        stream: StreamId,
        /// As `Requester::submit` numbered it.
        batch: u64,
    },
    /// The last event of a stream. Its scoped regions are revoked and its other completions already reported.
    StreamEnded {
        /// Which stream.
        stream: StreamId,
        /// None after an orderly close by either side with nothing left to do.
        reason: Option<EndReason>,
        /// The peer's Terminate.
        terminate: Option<TerminateInfo>,
        /// The cause of the Terminate this side sent.
        cause: Option<TerminateCause>,
    },
}
