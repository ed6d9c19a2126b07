//! From posted work to the work requests of a device: where the octets lie, what is copied, and what is cut.

use std::io;
use std::sync::Arc;

use kbtp_proto::memory::{Octets, Span};
use kbtp_proto::stream::{Payload, Piece, Work, WrKind};
use kbtp_verbs::{Depths, Kind, Pd, Sge};
use smallvec::SmallVec;

use crate::memory::{Memories, RegisteredOctets};
use crate::staging::{Staged, Staging};

/// Messages that a device does not take inline; longer ones get memory of their own.
const STAGING_BYTES: usize = 64 * 1024;

const RESULT_BYTES: usize = size_of::<u64>();

/// Posted work that is not complete.
pub(crate) struct Posted {
    pub(crate) wr_id: u64,
    pub(crate) kind: WrKind,
    /// Of the sink of a Read.
    pub(crate) length: u32,
    staged: Option<Staged>,
    /// For a message that the ring is too small for.
    _own: Option<Staging>,
}

/// One work request, ready for the device.
pub(crate) struct Prepared {
    pub(crate) kind: Kind,
    pub(crate) pieces: SmallVec<[Sge; 2]>,
    pub(crate) octets: Option<Vec<u8>>,
    pub(crate) solicited: bool,
}

/// Those that one piece of work is.
pub(crate) type Several = SmallVec<[Prepared; 1]>;

/// Makes work requests for one queue pair.
pub(crate) struct Requests {
    pd: Arc<Pd>,
    depths: Depths,
    max_message_bytes: u32,
    staging: Staging,
}

impl Requests {
    pub(crate) fn new(depths: Depths, max_message_bytes: u32, pd: &Arc<Pd>) -> io::Result<Self> {
        Ok(Self {
            pd: Arc::clone(pd),
            depths,
            max_message_bytes: max_message_bytes.max(1),
            staging: Staging::new(STAGING_BYTES, pd)?,
        })
    }

    /// `posted`, the first of all that are not complete, is; the result if it was an atomic.
    pub(crate) fn finish(&mut self, posted: &Posted) -> u64 {
        let Some(staged) = &posted.staged else { return 0 };
        self.staging.free(staged);
        self.staging.word(staged)
    }

    /// The work requests that `work` is made of; None while the send queue, which has `room`, or the staging has none for it.
    pub(crate) fn prepare(
        &mut self,
        work: &Work,
        room: u32,
        memories: &Memories,
    ) -> io::Result<Option<(Posted, Several)>> {
        let mut posted = Posted {
            wr_id: work.wr_id(),
            kind: work.kind(),
            length: 0,
            staged: None,
            _own: None,
        };
        let requests = match work {
            Work::Write { payload, stag, to, .. } => Some(self.write(payload, *stag, *to, memories)?),
            Work::Read {
                sink,
                source_stag,
                source_to,
                ..
            } => {
                posted.length = sink.len;
                Some(self.read(*sink, *source_stag, *source_to, memories)?)
            }
            work => self
                .one(work, &mut posted, memories)?
                .map(|one| Several::from_iter([one])),
        };
        let Some(requests) = requests else { return Ok(None) };
        let count = requests.len() as u32;
        if count > self.depths.sends {
            return Err(io::Error::other(
                "a message takes more work requests than the send queue has",
            ));
        }
        if count > room {
            return Ok(None); // of several, which stage nothing
        }
        Ok(Some((posted, requests)))
    }

    /// Of work that is one work request.
    fn one(&mut self, work: &Work, posted: &mut Posted, memories: &Memories) -> io::Result<Option<Prepared>> {
        match work {
            Work::Send {
                payload,
                invalidate_stag,
                solicited,
                ..
            } => {
                let invalidate = *invalidate_stag;
                let one = self.gather(payload, Kind::Send { invalidate }, posted, memories)?;
                Ok(one.map(|one| Prepared {
                    solicited: *solicited,
                    ..one
                }))
            }
            Work::WriteImmediate {
                octets,
                stag,
                to,
                immediate,
                ..
            } => {
                let (rkey, to, immediate) = (*stag, *to, *immediate);
                let payload = Payload::from_iter([Piece::Inline(octets.clone())]);
                self.gather(&payload, Kind::WriteImmediate { rkey, to, immediate }, posted, memories)
            }
            Work::FetchAdd { stag, to, add_data, .. } => {
                let (rkey, to, add) = (*stag, *to, *add_data);
                Ok(self.with_result(Kind::FetchAdd { rkey, to, add }, posted))
            }
            Work::CompareSwap {
                stag,
                to,
                swap_data,
                compare_data,
                ..
            } => {
                let kind = Kind::CompareSwap {
                    rkey: *stag,
                    to: *to,
                    compare: *compare_data,
                    swap: *swap_data,
                };
                Ok(self.with_result(kind, posted))
            }
            _ => Err(io::Error::other("the device has no such message")),
        }
    }

    fn with_result(&mut self, kind: Kind, posted: &mut Posted) -> Option<Prepared> {
        let staged = self.staging.take(RESULT_BYTES)?;
        let piece = self.staging.piece(&staged, RESULT_BYTES);
        posted.staged = Some(staged);
        Some(Prepared::of(kind, piece))
    }

    /// `span` in parts that are no longer than a message of the device's, and where in it each begins.
    fn cut(&self, span: Span, memories: &Memories) -> io::Result<SmallVec<[(Sge, u32); 1]>> {
        let mut parts = SmallVec::new();
        let mut from = 0;
        loop {
            let part = span.part(from, self.max_message_bytes);
            parts.push((memories.piece(part)?, from));
            from += part.len;
            if from >= span.len {
                return Ok(parts);
            }
        }
    }

    fn read(&self, sink: Span, stag: u32, to: u64, memories: &Memories) -> io::Result<Several> {
        let parts = self.cut(sink, memories)?.into_iter();
        Ok(parts
            .map(|(piece, from)| {
                let to = to.wrapping_add(from.into());
                Prepared::of(Kind::Read { rkey: stag, to }, piece)
            })
            .collect())
    }

    fn write(&self, payload: &Payload, stag: u32, mut to: u64, memories: &Memories) -> io::Result<Several> {
        let mut requests = Several::new();
        for piece in payload {
            let span = piece
                .span()
                .ok_or_else(|| io::Error::other("an RDMA Write is of registered memory"))?;
            for (part, from) in self.cut(span, memories)? {
                let to = to.wrapping_add(from.into());
                requests.push(Prepared::of(Kind::Write { rkey: stag, to }, part));
            }
            to = to.wrapping_add(span.len.into());
        }
        if requests.is_empty() {
            requests.push(Prepared::of(Kind::Write { rkey: stag, to }, Sge::default()));
        }
        Ok(requests)
    }

    /// One work request of all of `payload`: inline if it is short, else from where it lies if that can be, else from a copy.
    /// None while the staging has no room for what has to be copied.
    fn gather(
        &mut self,
        payload: &Payload,
        kind: Kind,
        posted: &mut Posted,
        memories: &Memories,
    ) -> io::Result<Option<Prepared>> {
        let octets = RegisteredOctets(memories);
        let length: usize = payload.iter().map(length_of).sum();
        // siw takes no Send with Invalidate inline; elsewhere it is one copy more.
        let invalidates = matches!(kind, Kind::Send { invalidate: Some(_) });
        if length <= self.depths.inline_bytes as usize && !invalidates {
            let mut copy = Vec::with_capacity(length);
            payload.iter().for_each(|piece| append(piece, &octets, &mut copy));
            return Ok(Some(Prepared {
                kind,
                pieces: SmallVec::new(),
                octets: Some(copy),
                solicited: false,
            }));
        }
        let spans: SmallVec<[Span; 2]> = payload.iter().filter_map(Piece::span).collect();
        let mut pieces: SmallVec<[Sge; 2]> = SmallVec::new();
        if spans.len() == payload.len() && spans.len() <= self.depths.pieces as usize {
            for span in spans {
                pieces.push(memories.piece(span)?);
            }
        } else {
            let mut copy = Vec::with_capacity(length);
            payload.iter().for_each(|piece| append(piece, &octets, &mut copy));
            match self.stage(&copy, posted)? {
                Some(piece) => pieces.push(piece),
                None => return Ok(None),
            }
        }
        Ok(Some(Prepared {
            kind,
            pieces,
            octets: None,
            solicited: false,
        }))
    }

    fn stage(&mut self, octets: &[u8], posted: &mut Posted) -> io::Result<Option<Sge>> {
        if !self.staging.holds(octets.len()) {
            let mut own = Staging::new(octets.len(), &self.pd)?;
            let staged = own.take(octets.len()).ok_or(io::ErrorKind::OutOfMemory)?;
            own.write(&staged, octets);
            let piece = own.piece(&staged, octets.len());
            posted._own = Some(own);
            return Ok(Some(piece));
        }
        let Some(staged) = self.staging.take(octets.len()) else {
            return Ok(None);
        };
        self.staging.write(&staged, octets);
        let piece = self.staging.piece(&staged, octets.len());
        posted.staged = Some(staged);
        Ok(Some(piece))
    }
}

impl Prepared {
    /// Of one piece, or none if that has no octets.
    fn of(kind: Kind, piece: Sge) -> Self {
        let mut pieces = SmallVec::new();
        if piece.length > 0 {
            pieces.push(piece);
        }
        Self {
            kind,
            pieces,
            octets: None,
            solicited: false,
        }
    }

    pub(crate) fn bytes(&self) -> usize {
        let pieces: usize = self.pieces.iter().map(|piece| piece.length as usize).sum();
        pieces + self.octets.as_ref().map_or(0, Vec::len)
    }
}

fn length_of(piece: &Piece) -> usize {
    match piece {
        Piece::Inline(octets) => octets.len(),
        _ => piece.span().map_or(0, |span| span.len as usize),
    }
}

fn append(piece: &Piece, octets: &RegisteredOctets<'_>, into: &mut Vec<u8>) {
    match piece {
        Piece::Inline(inline) => into.extend_from_slice(inline),
        _ => {
            if let Some(span) = piece.span() {
                octets.read(span, into);
            }
        }
    }
}
