//! FPDUs on their way out: what of them lies in registered memory, and what was built here.

use std::collections::VecDeque;
use std::mem;

use smallvec::SmallVec;

use super::work::{Gather, Lying, WorkId};
use crate::crc32c::{self, Shift, join};
use crate::fpdu::{FpduEncoder, LENGTH_BYTES, Tail, length_field, pad_bytes};
use crate::memory::{Octets, Span};
use crate::mpa::Negotiated;

/// A payload up to this long is always copied: that costs less than two more pieces in a `sendmsg`.
const COPY_MAX_BYTES: u32 = 1024;

/// A piece of what goes out next.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Part<'a> {
    /// Octets that were built or copied here.
    Own(&'a [u8]),
    /// Octets that go out from where they lie.
    Registered(Span),
}

impl Part<'_> {
    /// How many octets.
    #[must_use]
    pub fn length_bytes(&self) -> usize {
        match self {
            Self::Own(octets) => octets.len(),
            Self::Registered(span) => span.len as usize,
        }
    }
}

#[derive(Clone, Copy, Debug)]
enum Place {
    /// So many of `Outgoing::own`.
    Own(usize),
    Registered(Span),
}

/// FPDUs of one stream that were built and are not all sent.
///
/// The memory that `parts` names must stay as it is until it was sent: its CRC is taken already. Hand what the system took
/// to `IwarpStream::sent`, and then `keep_lent` the rest. A stream that ends gives the memory back to its owner while an
/// FPDU may still be half sent: `copy_batch` it then, or drop it.
#[derive(Debug, Default)]
pub struct Outgoing {
    own: Vec<u8>,
    /// How many of `own` are sent.
    own_sent: usize,
    places: VecDeque<Place>,
    left_bytes: usize,
    /// Of all that was built since nothing was left.
    sent_bytes: usize,
    /// Which work is complete when so many octets are sent.
    completions: VecDeque<(usize, WorkId)>,
    /// A `sendmsg` takes no more than so many octets with those that are sent. No place goes on behind such an end.
    ends: VecDeque<usize>,
    /// It names memory that no posted work holds.
    has_lent: bool,
}

impl Outgoing {
    /// Everything is sent.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.left_bytes == 0
    }

    /// Octets that are not sent.
    #[must_use]
    pub fn left_bytes(&self) -> usize {
        self.left_bytes
    }

    /// How many `parts` there are.
    #[must_use]
    pub fn part_count(&self) -> usize {
        self.places.len()
    }

    /// What is not sent, in order.
    pub fn parts(&self) -> impl Iterator<Item = Part<'_>> {
        let mut own = self.own.get(self.own_sent..).unwrap_or_default();
        self.places.iter().map(move |place| match place {
            Place::Own(bytes) => {
                let (part, rest) = own.split_at((*bytes).min(own.len()));
                own = rest;
                Part::Own(part)
            }
            Place::Registered(span) => Part::Registered(*span),
        })
    }

    /// How many octets the next `sendmsg` may take: all, or those up to the end of an FPDU that ends a TCP segment.
    #[must_use]
    pub fn batch_bytes(&self) -> usize {
        self.ends.front().map_or(self.left_bytes, |end| end - self.sent_bytes)
    }

    /// The parts that the next `sendmsg` may take.
    pub fn batch(&self) -> impl Iterator<Item = Part<'_>> {
        let mut room_bytes = self.batch_bytes();
        self.parts().take_while(move |part| {
            let within = room_bytes > 0;
            room_bytes = room_bytes.saturating_sub(part.length_bytes());
            within
        })
    }

    /// Append what the next `sendmsg` would take to `into`, and forget it: its work is flushed.
    pub fn copy_batch(&mut self, octets: &dyn Octets, into: &mut Vec<u8>) {
        for part in self.batch() {
            match part {
                Part::Own(own) => into.extend_from_slice(own),
                Part::Registered(span) => octets.read(span, into),
            }
        }
        self.sent(self.batch_bytes(), |_| {});
    }

    /// Copy what is not sent and names the source of a Read Response, which may be revoked as soon as its STag can be: call
    /// it before that.
    pub fn keep_lent(&mut self, octets: &dyn Octets) {
        if !mem::take(&mut self.has_lent) || self.is_empty() {
            return;
        }
        let mut own = Vec::with_capacity(self.left_bytes);
        let mut places = VecDeque::with_capacity(self.places.len());
        for part in self.parts() {
            match part {
                Part::Own(part) => own.extend_from_slice(part),
                Part::Registered(span) => octets.read(span, &mut own),
            }
            places.push_back(Place::Own(part.length_bytes()));
        }
        (self.own, self.own_sent, self.places) = (own, 0, places);
    }

    /// Forget everything; the allocations stay.
    pub fn clear(&mut self) {
        self.own.clear();
        self.places.clear();
        self.completions.clear();
        self.ends.clear();
        (self.own_sent, self.left_bytes, self.sent_bytes) = (0, 0, 0);
        self.has_lent = false;
    }

    /// The next `bytes` are sent; calls `complete` with the work that is complete now.
    pub(super) fn sent(&mut self, bytes: usize, mut complete: impl FnMut(WorkId)) {
        let mut bytes = bytes.min(self.left_bytes);
        self.left_bytes -= bytes;
        self.sent_bytes += bytes;
        while bytes > 0
            && let Some(place) = self.places.front_mut()
        {
            let all = match place {
                Place::Own(length) => *length,
                Place::Registered(span) => span.len as usize,
            };
            let part = bytes.min(all);
            bytes -= part;
            self.own_sent += if matches!(place, Place::Own(_)) { part } else { 0 };
            if part == all {
                self.places.pop_front();
                continue;
            }
            *place = match *place {
                Place::Own(length) => Place::Own(length - part),
                Place::Registered(span) => Place::Registered(span.part(part as u32, span.len)),
            };
        }
        while self.ends.front().is_some_and(|end| *end <= self.sent_bytes) {
            self.ends.pop_front();
        }
        while let Some((due_bytes, work)) = self.completions.front().copied()
            && due_bytes <= self.sent_bytes
        {
            self.completions.pop_front();
            complete(work);
        }
        if self.left_bytes == 0 {
            self.clear();
        }
    }

    /// `work` is complete when all that was built so far is sent.
    pub(super) fn completes(&mut self, work: WorkId) {
        self.completions.push_back((self.built_bytes(), work));
    }

    /// What was built so far ends a TCP segment.
    fn end_segment(&mut self) {
        if self.left_bytes > 0 && !self.is_at_end() {
            self.ends.push_back(self.built_bytes());
        }
    }

    fn is_at_end(&self) -> bool {
        self.ends.back().is_some_and(|end| *end == self.built_bytes())
    }

    /// Since nothing was left.
    fn built_bytes(&self) -> usize {
        self.sent_bytes + self.left_bytes
    }

    /// What was appended to `own` since it had `start` octets goes out next.
    fn put_own(&mut self, start: usize) {
        let (bytes, at_end) = (self.own.len() - start, self.is_at_end());
        self.left_bytes += bytes;
        match self.places.back_mut() {
            Some(Place::Own(length)) if !at_end => *length += bytes,
            _ => self.places.push_back(Place::Own(bytes)),
        }
    }

    fn put_span(&mut self, span: Span) {
        self.left_bytes += span.len as usize;
        self.places.push_back(Place::Registered(span));
    }
}

/// The FPDUs of one outgoing half connection.
#[derive(Debug)]
pub(super) struct Framer {
    crc: bool,
    markers: Option<FpduEncoder>,
    pad_stands_alone: bool,
    still_sources: bool,
}

impl Framer {
    pub(super) fn new(negotiated: &Negotiated) -> Self {
        let crc = negotiated.crc;
        Self {
            crc,
            markers: negotiated.tx_markers.then(|| FpduEncoder::new(crc, true)),
            pad_stands_alone: negotiated.pad_stands_alone(),
            still_sources: false,
        }
    }

    pub(super) fn keep_sources_still(&mut self) {
        self.still_sources = true;
    }

    /// The FPDU of `header` and the next `size` octets of `payload`.
    pub(super) fn gather(
        &mut self,
        header: &[u8],
        payload: &mut Gather,
        size: u32,
        octets: &dyn Octets,
        out: &mut Outgoing,
    ) {
        if self.markers.is_none() && size > COPY_MAX_BYTES {
            // Without a CRC a change on the way is only a torn payload, which is the caller's own affair.
            if let Some(spans) = payload.take_spans(size, |span| !self.crc || octets.is_still(span)) {
                self.scattered(header, &spans, octets, out);
                return;
            }
        }
        self.copied(header, size, out, None, |own| payload.take_copy(size, octets, own));
    }

    /// The FPDU of `header` and `size` octets that `append` adds. With `apart`, which is of `size`, the CRC32c of those
    /// octets alone, if the stream has CRCs.
    pub(super) fn copied(
        &mut self,
        header: &[u8],
        size: u32,
        out: &mut Outgoing,
        apart: Option<Shift>,
        append: impl FnOnce(&mut Vec<u8>),
    ) -> Option<u32> {
        let (start, ulpdu_bytes) = (out.own.len(), header.len() + size as usize);
        if let Some(encoder) = &mut self.markers {
            let mut ulpdu = header.to_vec();
            append(&mut ulpdu);
            ulpdu.resize(ulpdu_bytes, 0);
            encoder.encode(&[&ulpdu], &mut out.own);
            out.put_own(start);
            return None;
        }
        let stands_alone = self.pad_stands_alone && pad_bytes(ulpdu_bytes) > 0;
        if stands_alone {
            out.end_segment();
        }
        out.own.extend_from_slice(&length_field(ulpdu_bytes as u16));
        out.own.extend_from_slice(header);
        append(&mut out.own);
        out.own
            .resize(start + LENGTH_BYTES + ulpdu_bytes + pad_bytes(ulpdu_bytes), 0);
        // With CRC off the field is there all the same, any content (RFC 5044 4.4).
        let body = out.own.get(start..).unwrap_or_default();
        let (mut crc, mut payload_crc) = (0, None);
        if let Some(shift) = apart.filter(|_| self.crc)
            && let Some((head, rest)) = body.split_at_checked(LENGTH_BYTES + header.len())
            && let Some((payload, pad)) = rest.split_at_checked(size as usize)
        {
            let of_payload = crc32c::update(0, payload);
            payload_crc = Some(of_payload);
            crc = crc32c::update(join(crc32c::update(0, head), of_payload, shift), pad);
        } else if self.crc {
            crc = crc32c::update(0, body);
        }
        out.own.extend_from_slice(&crc32c::wire(crc));
        out.put_own(start);
        if stands_alone {
            out.end_segment();
        }
        payload_crc
    }

    /// As `copied`, of the source of a Read Response; from where it lies if it stays as it is and that is worth it.
    pub(super) fn lent(
        &mut self,
        header: &[u8],
        source: Span,
        octets: &dyn Octets,
        out: &mut Outgoing,
        apart: Option<Shift>,
    ) -> Option<u32> {
        if !self.still_sources || self.markers.is_some() || source.len <= COPY_MAX_BYTES {
            return self.copied(header, source.len, out, apart, |own| octets.read(source, own));
        }
        out.has_lent = true;
        let mut payload_crc = None;
        self.around(header, &[source], out, |head| match apart {
            Some(shift) => {
                let of_payload = octets.crc32c(0, source);
                payload_crc = Some(of_payload);
                join(head, of_payload, shift)
            }
            None => octets.crc32c(head, source),
        });
        payload_crc
    }

    fn scattered(&self, header: &[u8], spans: &[Lying], octets: &dyn Octets, out: &mut Outgoing) {
        let places: SmallVec<[Span; 2]> = spans.iter().map(|lying| lying.span).collect();
        self.around(header, &places, out, |head| {
            spans.iter().fold(head, |state, lying| lying.crc32c(state, octets))
        });
    }

    /// The FPDU whose payload lies in `spans`; `crc` continues the CRC32c of what is before it over it.
    fn around(&self, header: &[u8], spans: &[Span], out: &mut Outgoing, crc: impl FnOnce(u32) -> u32) {
        let start = out.own.len();
        let ulpdu_bytes = spans.iter().fold(header.len(), |sum, span| sum + span.len as usize);
        out.own.extend_from_slice(&length_field(ulpdu_bytes as u16));
        out.own.extend_from_slice(header);
        let crc = self
            .crc
            .then(|| crc(crc32c::update(0, out.own.get(start..).unwrap_or_default())));
        out.put_own(start);
        spans.iter().for_each(|span| out.put_span(*span));
        let behind = out.own.len();
        out.own.extend_from_slice(Tail::new(ulpdu_bytes, crc).octets());
        out.put_own(behind);
    }
}
