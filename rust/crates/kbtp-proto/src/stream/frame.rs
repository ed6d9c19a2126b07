//! FPDUs on their way out: what of them lies in registered memory, and what was built here.

use super::work::{Gather, Spans, WorkId};
use crate::crc32c;
use crate::fpdu::{FpduEncoder, LENGTH_BYTES, Tail, length_field, pad_bytes};
use crate::limits::DDP_UNTAGGED_HEADER_BYTES;
use crate::memory::{Octets, Span};

const HEAD_MAX_BYTES: usize = LENGTH_BYTES + DDP_UNTAGGED_HEADER_BYTES;

/// A payload up to this long is always copied: that costs less than two more pieces in a `sendmsg`.
const COPY_MAX_BYTES: u32 = 1024;

/// Buffers kept for the next FPDUs, a stream: what is built ahead of the socket is not much more.
const SPARES_MAX: usize = 4;

/// One FPDU, to be sent as `head`, `spans` and `tail` one after the other.
///
/// The memory that `spans` name must stay as it is until all of it was sent: the CRC is in `tail` already. Hand the FPDU
/// back by `IwarpStream::fpdu_sent` when the system took its last octet, or drop it if it never will. A stream that ends
/// gives the memory back to its owner while an FPDU may still be half sent: `detach` it then.
#[derive(Debug)]
pub struct Fpdu {
    /// The whole FPDU if its payload was copied, else empty.
    whole: Vec<u8>,
    head: [u8; HEAD_MAX_BYTES],
    head_bytes: usize,
    spans: Spans,
    spans_bytes: usize,
    tail: Option<Tail>,
    pub(super) completes: Option<WorkId>,
}

impl Fpdu {
    fn copied(whole: Vec<u8>) -> Self {
        Self {
            whole,
            head: [0; HEAD_MAX_BYTES],
            head_bytes: 0,
            spans: Spans::new(),
            spans_bytes: 0,
            tail: None,
            completes: None,
        }
    }

    /// The first octets; all of them if the payload was copied.
    #[must_use]
    pub fn head(&self) -> &[u8] {
        if self.whole.is_empty() {
            self.head.get(..self.head_bytes).unwrap_or_default()
        } else {
            &self.whole
        }
    }

    /// The payload where it lies.
    #[must_use]
    pub fn spans(&self) -> &[Span] {
        &self.spans
    }

    /// PAD and CRC, if they are not in `head`.
    #[must_use]
    pub fn tail(&self) -> &[u8] {
        self.tail.as_ref().map_or(&[], Tail::octets)
    }

    /// Octets on the wire.
    #[must_use]
    pub fn total_len(&self) -> usize {
        self.head().len() + self.spans_bytes + self.tail().len()
    }

    /// Copy the payload, so that its memory may change and go from here on.
    pub fn detach(&mut self, octets: &dyn Octets) {
        if self.spans.is_empty() {
            return;
        }
        let mut whole = Vec::with_capacity(self.total_len());
        whole.extend_from_slice(self.head());
        for span in &self.spans {
            octets.read(*span, &mut whole);
        }
        whole.resize(self.head_bytes + self.spans_bytes, 0);
        whole.extend_from_slice(self.tail());
        let completes = self.completes;
        *self = Self {
            completes,
            ..Self::copied(whole)
        };
    }
}

/// The FPDUs of one outgoing half connection.
#[derive(Debug)]
pub(super) struct Framer {
    crc: bool,
    markers: Option<FpduEncoder>,
    spares: Vec<Vec<u8>>,
}

impl Framer {
    pub(super) fn new(crc: bool, markers: bool) -> Self {
        let markers = markers.then(|| FpduEncoder::new(crc, true));
        Self {
            crc,
            markers,
            spares: Vec::new(),
        }
    }

    pub(super) fn recycle(&mut self, fpdu: Fpdu) {
        self.keep(fpdu.whole);
    }

    fn keep(&mut self, mut spare: Vec<u8>) {
        if spare.capacity() > 0 && self.spares.len() < SPARES_MAX {
            spare.clear();
            self.spares.push(spare);
        }
    }

    /// The FPDU of `header` and the next `size` octets of `payload`.
    pub(super) fn gather(&mut self, header: &[u8], payload: &mut Gather, size: u32, octets: &dyn Octets) -> Fpdu {
        if self.markers.is_none() && size > COPY_MAX_BYTES {
            // Without a CRC a change on the way is only a torn payload, which is the caller's own affair.
            if let Some(spans) = payload.take_spans(size, |span| !self.crc || octets.is_still(span)) {
                return self.scattered(header, spans, size, octets);
            }
        }
        self.copied(header, size, |whole| payload.take_copy(size, octets, whole))
    }

    /// The FPDU of `header` and `size` octets that `append` adds.
    pub(super) fn copied(&mut self, header: &[u8], size: u32, append: impl FnOnce(&mut Vec<u8>)) -> Fpdu {
        let mut whole = self.spares.pop().unwrap_or_default();
        let ulpdu_bytes = header.len() + size as usize;
        whole.extend_from_slice(&length_field(ulpdu_bytes as u16));
        whole.extend_from_slice(header);
        append(&mut whole);
        whole.resize(LENGTH_BYTES + ulpdu_bytes + pad_bytes(ulpdu_bytes), 0);
        if let Some(encoder) = &mut self.markers {
            let ulpdu = whole.get(LENGTH_BYTES..LENGTH_BYTES + ulpdu_bytes).unwrap_or_default();
            let mut marked = self.spares.pop().unwrap_or_default();
            encoder.encode(&[ulpdu], &mut marked);
            self.keep(whole);
            return Fpdu::copied(marked);
        }
        // With CRC off the field is there all the same, any content (RFC 5044 4.4).
        let crc = if self.crc { crc32c::update(0, &whole) } else { 0 };
        whole.extend_from_slice(&crc32c::wire(crc));
        Fpdu::copied(whole)
    }

    fn scattered(&self, header: &[u8], spans: Spans, size: u32, octets: &dyn Octets) -> Fpdu {
        let mut fpdu = Fpdu::copied(Vec::new());
        let ulpdu_bytes = header.len() + size as usize;
        let (length, rest) = fpdu.head.split_at_mut(LENGTH_BYTES);
        length.copy_from_slice(&length_field(ulpdu_bytes as u16));
        for (to, from) in rest.iter_mut().zip(header) {
            *to = *from;
        }
        fpdu.head_bytes = LENGTH_BYTES + header.len();
        let crc = self.crc.then(|| {
            let head = crc32c::update(0, fpdu.head.get(..fpdu.head_bytes).unwrap_or_default());
            spans.iter().fold(head, |state, span| octets.crc32c(state, *span))
        });
        fpdu.tail = Some(Tail::new(ulpdu_bytes, crc));
        (fpdu.spans, fpdu.spans_bytes) = (spans, size as usize);
        fpdu
    }
}
