//! Posted work on its way through a stream, and what is still owed to the peer.

use std::fmt;
use std::sync::Arc;

use smallvec::SmallVec;

use super::events::WrKind;
use crate::known_crcs::KnownCrcs;
use crate::limits::{DDP_UNTAGGED_HEADER_BYTES, IMMEDIATE_DATA_BYTES, READ_REQUEST_BYTES};
use crate::memory::{Octets, Span};
use crate::rdmap::{
    AtomicOperation, AtomicRequest, AtomicResponse, COMPARE_MASK_UNUSED, RdmapOpcode, ReadRequest, send_opcode,
};

/// Octets that were copied when the work was posted; short ones without an allocation.
pub type Inline = SmallVec<[u8; 64]>;

/// A part of a message.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Piece {
    /// Octets that are read when their FPDU is built, or when it is sent if `Octets::is_still` says so.
    Span(Span),
    /// Octets that nobody changes before the work completes, as whoever posts this vouches for.
    Still(Span),
    /// The same, the first octets of a block whose CRCs are known, or will be.
    Known(Span, Arc<KnownCrcs>),
    /// Octets that may change at any time: they are copied into their FPDU, and its CRC is of the copy.
    Changing(Span),
    /// Octets of the stream's own.
    Inline(Inline),
}

impl Piece {
    /// Where in registered memory its octets are, if they are there.
    #[must_use]
    pub fn span(&self) -> Option<Span> {
        match self {
            Self::Span(span) | Self::Still(span) | Self::Known(span, _) | Self::Changing(span) => Some(*span),
            Self::Inline(_) => None,
        }
    }

    fn len(&self) -> u64 {
        match self {
            Self::Inline(octets) => octets.len() as u64,
            _ => self.span().map_or(0, |span| span.len.into()),
        }
    }
}

/// The parts of one message.
pub type Payload = SmallVec<[Piece; 1]>;

/// A work request.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Work {
    /// Send `payload`, which is the caller's again after `SendCompleted`.
    Send {
        /// Comes back in the completion.
        wr_id: u64,
        /// What the peer receives.
        payload: Payload,
        /// The STag that the peer shall make unusable.
        invalidate_stag: Option<u32>,
        /// Whether the peer shall raise an event.
        solicited: bool,
    },
    /// RDMA Write `payload`, which is the caller's again after `WriteCompleted`.
    Write {
        /// Comes back in the completion.
        wr_id: u64,
        /// What is written.
        payload: Payload,
        /// The peer's memory.
        stag: u32,
        /// Where in it.
        to: u64,
    },
    /// RDMA Write `octets`, which takes a receive of the peer's. No RDMAP message is that (draft 9.2).
    WriteImmediate {
        /// Comes back in the completion.
        wr_id: u64,
        /// What is written.
        octets: Inline,
        /// The peer's memory.
        stag: u32,
        /// Where in it.
        to: u64,
        /// What the peer's receive gets.
        immediate: u32,
    },
    /// RDMA Read. Waits while ORD requests are outstanding; ORD 0 allows none.
    Read {
        /// Comes back in the completion.
        wr_id: u64,
        /// Takes what is read, and says how much.
        sink: Span,
        /// The peer's memory.
        source_stag: u32,
        /// Where in it.
        source_to: u64,
    },
    /// RFC 7306 5.1.1. Shares ORD with Reads.
    FetchAdd {
        /// Comes back in the completion.
        wr_id: u64,
        /// The peer's memory.
        stag: u32,
        /// Where in it, a multiple of 8.
        to: u64,
        /// What is added.
        add_data: u64,
        /// A set bit stops the carry out of that bit.
        add_mask: u64,
    },
    /// RFC 7306 5.1.2. Shares ORD with Reads.
    CompareSwap {
        /// Comes back in the completion.
        wr_id: u64,
        /// The peer's memory.
        stag: u32,
        /// Where in it, a multiple of 8.
        to: u64,
        /// What is stored if the comparison holds.
        swap_data: u64,
        /// Which bits are stored.
        swap_mask: u64,
        /// What the memory must hold.
        compare_data: u64,
        /// Which bits are compared.
        compare_mask: u64,
    },
    /// RFC 7306 6: exactly 8 octets, delivered like a Send.
    Immediate {
        /// Comes back in the completion.
        wr_id: u64,
        /// What is delivered.
        data: [u8; IMMEDIATE_DATA_BYTES],
        /// Whether the peer shall raise an event.
        solicited: bool,
    },
}

impl Work {
    /// What it asks for.
    #[must_use]
    pub fn kind(&self) -> WrKind {
        match self {
            Self::Send { .. } => WrKind::Send,
            Self::Write { .. } | Self::WriteImmediate { .. } => WrKind::Write,
            Self::Read { .. } => WrKind::Read,
            Self::FetchAdd { .. } | Self::CompareSwap { .. } => WrKind::Atomic,
            Self::Immediate { .. } => WrKind::Immediate,
        }
    }

    /// What comes back in the completion.
    #[must_use]
    pub fn wr_id(&self) -> u64 {
        match self {
            Self::Send { wr_id, .. }
            | Self::Write { wr_id, .. }
            | Self::WriteImmediate { wr_id, .. }
            | Self::Read { wr_id, .. }
            | Self::FetchAdd { wr_id, .. }
            | Self::CompareSwap { wr_id, .. }
            | Self::Immediate { wr_id, .. } => *wr_id,
        }
    }
}

/// Why work was not taken. Nothing of it is queued then.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PostError {
    /// The stream is over; `IwarpStream::received_terminate` may say why.
    Ended,
    /// A Read or atomic where none is allowed.
    OrdIsZero,
    /// More octets than a message counts.
    TooLong(u64),
    /// RDMAP has no such message.
    NotOfRdmap,
}

impl fmt::Display for PostError {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Ended => out.write_str("the stream has ended"),
            Self::OrdIsZero => {
                out.write_str("ORD is 0 on this stream: no Read and no atomic can ever leave (RFC 5040 6.1)")
            }
            Self::NotOfRdmap => out.write_str("RDMAP has no RDMA Write with Immediate (RFC 5040 4.3, RFC 7306 6)"),
            Self::TooLong(bytes) => {
                write!(out, "a message may have {} octets, not {bytes} (RFC 5041 4)", u32::MAX)
            }
        }
    }
}

impl std::error::Error for PostError {}

/// The pieces of one message, taken from the front segment by segment.
#[derive(Debug)]
pub(super) struct Gather {
    pieces: Payload,
    index: usize,
    offset: u32,
    length_bytes: u32,
}

impl Gather {
    pub(super) fn new(pieces: Payload) -> Result<Self, PostError> {
        let length = pieces.iter().fold(0u64, |sum, piece| sum.saturating_add(piece.len()));
        let length_bytes = u32::try_from(length).map_err(|_| PostError::TooLong(length))?;
        Ok(Self {
            pieces,
            index: 0,
            offset: 0,
            length_bytes,
        })
    }

    /// The pieces of a message of at most 64 octets.
    pub(super) fn of_octets(octets: &[u8]) -> Self {
        let length_bytes = octets.len() as u32;
        let mut pieces = Payload::new();
        pieces.push(Piece::Inline(Inline::from_slice(octets)));
        Self {
            pieces,
            index: 0,
            offset: 0,
            length_bytes,
        }
    }

    pub(super) fn length_bytes(&self) -> u32 {
        self.length_bytes
    }

    /// The spans that the next `size` octets lie in; None, with nothing taken, if `fits` says of one that it does not.
    pub(super) fn take_spans(&mut self, size: u32, fits: impl Fn(Span) -> bool) -> Option<Spans> {
        let (index, offset) = (self.index, self.offset);
        let mut spans = Spans::new();
        let mut ok = true;
        self.walk(size, |piece, from, len| match Lying::of(piece, from, len, &fits) {
            Some(lying) if ok => spans.push(lying),
            _ => ok = false,
        });
        if ok {
            return Some(spans);
        }
        (self.index, self.offset) = (index, offset);
        None
    }

    /// Append the next `size` octets.
    pub(super) fn take_copy(&mut self, size: u32, octets: &dyn Octets, into: &mut Vec<u8>) {
        self.walk(size, |piece, from, len| match piece {
            Piece::Span(span) | Piece::Still(span) | Piece::Known(span, _) | Piece::Changing(span) => {
                octets.read(span.part(from, len), into);
            }
            Piece::Inline(inline) => {
                let (from, to) = (from as usize, (from + len) as usize);
                into.extend_from_slice(inline.get(from..to).unwrap_or_default());
            }
        });
    }

    fn walk(&mut self, mut size: u32, mut each: impl FnMut(&Piece, u32, u32)) {
        while size > 0
            && let Some(piece) = self.pieces.get(self.index)
        {
            // The sum of all lengths fits 32 bits, so each does.
            let left = piece.len() as u32 - self.offset;
            let len = left.min(size);
            if len > 0 {
                each(piece, self.offset, len);
            }
            size -= len;
            self.offset += len;
            if len == left {
                (self.index, self.offset) = (self.index + 1, 0);
            }
        }
    }
}

/// Where the payload of one FPDU lies.
pub(super) type Spans = SmallVec<[Lying; 2]>;

/// Octets that are sent from where they lie.
#[derive(Debug)]
pub(super) struct Lying {
    pub(super) span: Span,
    /// Who knows their CRC, and how far behind the block's first octet they begin.
    known: Option<(Arc<KnownCrcs>, u32)>,
}

impl Lying {
    /// Of `len` octets of `piece` from its octet `from` on.
    fn of(piece: &Piece, from: u32, len: u32, fits: impl Fn(Span) -> bool) -> Option<Self> {
        let (span, known) = match piece {
            Piece::Known(span, known) => (*span, Some((Arc::clone(known), from))),
            Piece::Still(span) => (*span, None),
            Piece::Span(span) if fits(*span) => (*span, None),
            _ => return None,
        };
        let span = span.part(from, len);
        Some(Self { span, known })
    }

    /// The CRC32c `state` continued over them.
    pub(super) fn crc32c(&self, state: u32, octets: &dyn Octets) -> u32 {
        match &self.known {
            Some((known, from)) => known.continued(state, self.span, *from, octets),
            None => octets.crc32c(state, self.span),
        }
    }
}

/// Names posted work; counts up from the first.
pub(super) type WorkId = u64;

/// Work that waits to leave. The indication that this side is ready to receive has no `id`: nobody posted it.
#[derive(Debug)]
pub(super) struct Job {
    pub(super) id: Option<WorkId>,
    pub(super) what: What,
}

#[derive(Debug)]
pub(super) enum What {
    /// A Send of any kind, or Immediate Data.
    Send {
        opcode: RdmapOpcode,
        ulp_word: u32,
        payload: Gather,
    },
    Write {
        payload: Gather,
        stag: u32,
        to: u64,
    },
    Read {
        sink: Option<Span>,
        source_stag: u32,
        source_to: u64,
    },
    /// Its identifier is set when it leaves.
    Atomic(AtomicRequest),
}

impl What {
    pub(super) fn of(work: Work) -> Result<Self, PostError> {
        Ok(match work {
            Work::Send {
                payload,
                invalidate_stag,
                solicited,
                ..
            } => {
                let opcode = send_opcode(invalidate_stag.is_some(), solicited);
                let (ulp_word, payload) = (invalidate_stag.unwrap_or(0), Gather::new(payload)?);
                Self::Send {
                    opcode,
                    ulp_word,
                    payload,
                }
            }
            Work::Write { payload, stag, to, .. } => {
                let payload = Gather::new(payload)?;
                Self::Write { payload, stag, to }
            }
            Work::WriteImmediate { .. } => return Err(PostError::NotOfRdmap),
            Work::Read {
                sink,
                source_stag,
                source_to,
                ..
            } => {
                let sink = Some(sink);
                Self::Read {
                    sink,
                    source_stag,
                    source_to,
                }
            }
            Work::FetchAdd {
                stag,
                to,
                add_data,
                add_mask,
                ..
            } => {
                // Compare Data and Compare Mask are sent, and ignored by the peer (RFC 7306 5.2.1).
                let operands = [add_data, add_mask, 0, COMPARE_MASK_UNUSED];
                Self::atomic(AtomicOperation::FetchAdd, stag, to, operands)
            }
            Work::CompareSwap {
                stag,
                to,
                swap_data,
                swap_mask,
                compare_data,
                compare_mask,
                ..
            } => {
                let operands = [swap_data, swap_mask, compare_data, compare_mask];
                Self::atomic(AtomicOperation::CompareSwap, stag, to, operands)
            }
            Work::Immediate {
                data, solicited: false, ..
            } => Self::immediate(RdmapOpcode::Immediate, &data),
            Work::Immediate {
                data, solicited: true, ..
            } => Self::immediate(RdmapOpcode::ImmediateSolicited, &data),
        })
    }

    fn atomic(operation: AtomicOperation, stag: u32, to: u64, operands: [u64; 4]) -> Self {
        let [data, mask, compare_data, compare_mask] = operands;
        Self::Atomic(AtomicRequest {
            operation,
            request_id: 0,
            stag,
            to,
            data,
            mask,
            compare_data,
            compare_mask,
        })
    }

    fn immediate(opcode: RdmapOpcode, data: &[u8]) -> Self {
        Self::Send {
            opcode,
            ulp_word: 0,
            payload: Gather::of_octets(data),
        }
    }

    pub(super) fn kind(&self) -> WrKind {
        match self {
            Self::Send {
                opcode: RdmapOpcode::Immediate | RdmapOpcode::ImmediateSolicited,
                ..
            } => WrKind::Immediate,
            Self::Send { .. } => WrKind::Send,
            Self::Write { .. } => WrKind::Write,
            Self::Read { .. } => WrKind::Read,
            Self::Atomic(_) => WrKind::Atomic,
        }
    }
}

/// A request that left and has no whole response yet.
#[derive(Debug)]
pub(super) enum Awaiting {
    Read(OpenRead),
    Atomic { id: Option<WorkId>, request_id: u32 },
}

/// A Read whose response is due. `sink` is None for the indication of readiness, which reads nothing.
#[derive(Clone, Copy, Debug)]
pub(super) struct OpenRead {
    pub(super) id: Option<WorkId>,
    pub(super) sink: Option<Span>,
    pub(super) sink_stag: Option<u32>,
    pub(super) placed_bytes: u32,
}

impl OpenRead {
    pub(super) fn sink_bytes(&self) -> u32 {
        self.sink.map_or(0, |sink| sink.len)
    }
}

/// Posted work that is not reported; `done` once it is complete, and reported when all earlier work is.
#[derive(Debug)]
pub(super) struct Unreported {
    pub(super) wr_id: u64,
    pub(super) kind: WrKind,
    pub(super) done: Option<Done>,
}

/// What a completion says besides which work it is.
#[derive(Clone, Copy, Debug)]
pub(super) enum Done {
    Sent,
    Read { length: u32 },
    Atomic { value: u64 },
}

/// A posted receive buffer.
#[derive(Clone, Copy, Debug)]
pub(super) struct Receive {
    pub(super) wr_id: u64,
    pub(super) buffer: Span,
}

/// A response that the peer's request is owed; each takes one IRD slot until it was handed out.
#[derive(Debug)]
pub(super) enum Owed {
    /// `ulpdu` is the whole segment of the request, for a Terminate to quote.
    Read {
        request: ReadRequest,
        ulpdu: [u8; DDP_UNTAGGED_HEADER_BYTES + READ_REQUEST_BYTES],
    },
    Atomic(AtomicResponse),
}
