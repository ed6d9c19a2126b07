//! What an `IwarpStream` reports through `next_event`, in order.

use crate::limits::IMMEDIATE_DATA_BYTES;
use crate::types::{PeerMisbehaved, TerminateInfo};

/// What kind of work a work request asked for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[allow(missing_docs)]
pub enum WrKind {
    Send,
    Write,
    Read,
    Atomic,
    Immediate,
    Receive,
}

/// One report. Completions come in the order of posting (RFC 5040 5.5 rule 15), deliveries in the order of sending.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Event {
    /// The last octet of the Send left the caller's memory; says nothing about the peer.
    SendCompleted {
        /// As posted.
        wr_id: u64,
    },
    /// The last octet of the RDMA Write left the caller's memory; says nothing about the peer.
    WriteCompleted {
        /// As posted.
        wr_id: u64,
    },
    /// The Immediate Data message left; says nothing about the peer.
    ImmediateCompleted {
        /// As posted.
        wr_id: u64,
    },
    /// The Read Response was placed.
    ReadCompleted {
        /// As posted.
        wr_id: u64,
        /// Octets placed: the whole sink.
        length: u32,
    },
    /// The Atomic Response came.
    AtomicCompleted {
        /// As posted.
        wr_id: u64,
        /// What the remote memory held before (RFC 7306 5.2.2).
        value: u64,
    },
    /// A Send was delivered into a receive buffer.
    Received {
        /// Of the receive buffer.
        wr_id: u64,
        /// Octets placed.
        length: u32,
        /// The STag that the Send took from the peer.
        invalidated_stag: Option<u32>,
        /// Whether the peer asked for an event.
        solicited: bool,
    },
    /// Immediate Data was delivered.
    ImmediateReceived {
        /// Of the receive buffer that it used up; the octets of the buffer are as they were.
        wr_id: u64,
        /// What came.
        data: [u8; IMMEDIATE_DATA_BYTES],
        /// Whether the peer asked for an event.
        solicited: bool,
    },
    /// The peer ended the stream; nothing goes out in answer.
    TerminateReceived {
        /// What its Terminate said.
        info: TerminateInfo,
    },
    /// The peer broke the protocol. A Terminate that says so is the next FPDU.
    Failed {
        /// How.
        error: PeerMisbehaved,
    },
}

/// A work request that the end of the stream left undone, or not known to be done.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Flushed {
    /// As posted.
    pub wr_id: u64,
    /// What it asked for.
    pub kind: WrKind,
}
