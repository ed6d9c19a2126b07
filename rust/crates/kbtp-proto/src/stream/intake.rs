//! Octets from TCP become segments: MPA framing on the way in (RFC 5044 3 to 6), without copying payload twice.
//!
//! An FPDU that lies whole in what was received is checked and read in place, and so is a short one that was collected
//! first. A longer one that is still coming is placed piece by piece as it comes. Its header is judged when it is there,
//! but what is wrong with it is said only when the CRC of the whole FPDU was good (RFC 5044 8); until then its payload
//! is discarded. So a receive buffer has to be posted when the header comes, not only when the whole FPDU is there.
//!
//! BEYOND-RFC: the payload of a longer FPDU is placed before its CRC is known, for it would have to be copied once more
//! otherwise. Nothing comes of it but octets in memory that the peer may write at any time, or in buffers posted for
//! it: the stream ends on a bad CRC, and no message of that FPDU is delivered or complete.

use super::inbound::{Inbound, Placement};
use super::state::StreamState;
use crate::crc32c::{self, CRC_BYTES, join};
use crate::ddp::{TAGGED, header_bytes};
use crate::fpdu::{FpduDecoder, LENGTH_BYTES, PAD_MAX_BYTES, crc_mismatch, fpdu_bytes, pad_bytes};
use crate::limits::{DDP_UNTAGGED_HEADER_BYTES, READ_REQUEST_BYTES};
use crate::memory::{Octets, Span, StreamMemory};
use crate::terminate::Offender;
use crate::types::PeerMisbehaved;

/// An FPDU up to this long is collected and checked as a whole: placing it piece by piece would save nothing.
const SHORT_FPDU_BYTES: usize = 2048;

/// With less payload to come it is read into a staging buffer, with what follows.
const DIRECT_MIN_BYTES: u32 = 4096;

const TAIL_MAX_BYTES: usize = PAD_MAX_BYTES + CRC_BYTES;

/// A Terminate's control field, segment length, and the two headers it may quote; what comes after is not looked at.
const TERMINATE_MAX_BYTES: usize = 4 + LENGTH_BYTES + DDP_UNTAGGED_HEADER_BYTES + READ_REQUEST_BYTES;

/// The length field, if it is there.
fn ulpdu_bytes_of(octets: &[u8]) -> Option<usize> {
    octets.first_chunk().map(|&length| u16::from_be_bytes(length).into())
}

/// How much of an FPDU must be there to go on with it, as far as `octets`, its beginning, tell.
fn due_bytes(octets: &[u8]) -> usize {
    match (ulpdu_bytes_of(octets).map(fpdu_bytes), octets.get(LENGTH_BYTES)) {
        (None, _) => LENGTH_BYTES,
        (Some(whole), _) if whole <= SHORT_FPDU_BYTES => whole,
        (Some(_), None) => LENGTH_BYTES + 1,
        (Some(_), Some(&first)) => LENGTH_BYTES + header_bytes(first),
    }
}

/// What becomes of the segments.
pub(super) struct Destination<'a> {
    pub(super) inbound: &'a mut Inbound,
    pub(super) state: &'a mut StreamState,
    pub(super) memory: &'a mut dyn StreamMemory,
    pub(super) octets: &'a mut dyn Octets,
}

impl Destination<'_> {
    /// A segment whose FPDU was good; `payload_crc` if that was taken by itself.
    fn segment(&mut self, ulpdu: &[u8], payload_crc: Option<u32>) {
        self.state.may_send = true;
        if let Err(error) = self.place_and_commit(ulpdu, payload_crc) {
            self.state
                .fail(error, Offender::of(ulpdu.len() as u16, ulpdu, None).as_ref());
        }
    }

    fn place_and_commit(&mut self, ulpdu: &[u8], payload_crc: Option<u32>) -> Result<(), PeerMisbehaved> {
        let header = ulpdu.first().map_or(0, |&first| header_bytes(first));
        let payload = ulpdu.get(header..).unwrap_or_default();
        let payload_bytes = payload.len() as u32;
        match self.inbound.judge(ulpdu, payload_bytes, self.state, self.memory)? {
            Placement::Posted(span) | Placement::Tagged { span, .. } => self.octets.write(span, payload),
            Placement::Control | Placement::Nothing => {}
        }
        self.inbound
            .commit(ulpdu, payload_bytes, payload_crc, self.state, self.memory)
    }
}

/// One incoming half connection.
#[derive(Debug)]
pub(super) struct Intake {
    crc: bool,
    /// Does all the framing of a half connection with markers.
    markers: Option<FpduDecoder>,
    /// The beginning of an FPDU that is short, or of which it is not known yet.
    short: Vec<u8>,
    long: Option<LongFpdu>,
}

impl Intake {
    pub(super) fn new(crc: bool, markers: bool) -> Self {
        let markers = markers.then(|| FpduDecoder::new(crc, true));
        Self {
            crc,
            markers,
            short: Vec::new(),
            long: None,
        }
    }

    /// The octets so far end inside an FPDU.
    pub(super) fn half_received(&self) -> bool {
        !self.short.is_empty() || self.long.is_some() || self.markers.as_ref().is_some_and(FpduDecoder::half_received)
    }

    /// Take `data`, up to the end of the stream at most.
    pub(super) fn receive(&mut self, mut data: &[u8], to: &mut Destination<'_>) {
        if let Some(decoder) = &mut self.markers {
            receive_marked(decoder, data, to);
            return;
        }
        while !data.is_empty() && !to.state.failed {
            data = match &mut self.long {
                None => self.begin(data, to),
                Some(long) => {
                    let rest = long.take(data, self.crc, to);
                    if long.finished() {
                        long.finish(self.crc, to);
                        self.long = None;
                    }
                    rest
                }
            };
        }
    }

    /// Where the rest of the payload goes that comes now, if it may be read straight there.
    pub(super) fn direct(&mut self, memory: &mut dyn StreamMemory) -> Option<Span> {
        self.long.as_mut()?.open_direct(memory)
    }

    /// `bytes` of the span that `direct` named are there.
    pub(super) fn direct_received(&mut self, bytes: u32, octets: &dyn Octets) {
        if let Some(long) = &mut self.long {
            long.take_direct(bytes, self.crc, octets);
        }
    }

    /// The next FPDU from its first octet on; what is left of `data`.
    fn begin<'a>(&mut self, mut data: &'a [u8], to: &mut Destination<'_>) -> &'a [u8] {
        if self.short.is_empty()
            && let Some(size) = ulpdu_bytes_of(data).map(fpdu_bytes)
            && let Some((fpdu, rest)) = data.split_at_checked(size)
        {
            self.whole(fpdu, to);
            return rest;
        }
        loop {
            let missing = due_bytes(&self.short).saturating_sub(self.short.len());
            if missing == 0 {
                break;
            }
            let (part, rest) = data.split_at(missing.min(data.len()));
            if part.is_empty() {
                return rest;
            }
            self.short.extend_from_slice(part);
            data = rest;
        }
        let mut octets = std::mem::take(&mut self.short);
        let ulpdu_bytes = ulpdu_bytes_of(&octets).unwrap_or_default();
        if octets.len() == fpdu_bytes(ulpdu_bytes) {
            self.whole(&octets, to);
        } else {
            self.long = Some(LongFpdu::new(&octets, ulpdu_bytes, self.crc, to));
        }
        octets.clear();
        self.short = octets;
        data
    }

    /// CRC first: nothing of a bad FPDU is used (RFC 5044 8).
    fn whole(&self, fpdu: &[u8], to: &mut Destination<'_>) {
        let (body, came) = fpdu.split_last_chunk::<CRC_BYTES>().unwrap_or((&[], &[0; CRC_BYTES]));
        let ulpdu_bytes = ulpdu_bytes_of(body).unwrap_or_default();
        let ulpdu = body.get(LENGTH_BYTES..LENGTH_BYTES + ulpdu_bytes).unwrap_or_default();
        let mut payload_crc = None;
        if self.crc {
            let (crc, of_payload) = crcs_of(body, ulpdu, to.state);
            if crc32c::wire(crc) != *came {
                to.state.fail(crc_mismatch(fpdu.len()), None);
                return;
            }
            payload_crc = of_payload;
        }
        to.segment(ulpdu, payload_crc);
    }
}

/// The CRC32c over `body`, an FPDU but for its CRC, and if somebody may want it that over the payload alone.
fn crcs_of(body: &[u8], ulpdu: &[u8], state: &mut StreamState) -> (u32, Option<u32>) {
    let first = ulpdu.first().copied().unwrap_or_default();
    if !state.watched.is_empty()
        && first & TAGGED != 0
        && let Some(payload) = ulpdu.get(header_bytes(first)..)
        && let Some((head, rest)) = body.split_at_checked(LENGTH_BYTES + header_bytes(first))
        && let Some(pad) = rest.get(payload.len()..)
    {
        let (of_head, of_payload) = (crc32c::update(0, head), crc32c::update(0, payload));
        let unpadded = join(of_head, of_payload, state.watched.shift(payload.len() as u32));
        return (crc32c::update(unpadded, pad), Some(of_payload));
    }
    (crc32c::update(0, body), None)
}

fn receive_marked(decoder: &mut FpduDecoder, data: &[u8], to: &mut Destination<'_>) {
    let mut left_bytes = data.len();
    while left_bytes > 0 && !to.state.failed {
        let mut rest = data.get(data.len() - left_bytes..).unwrap_or_default();
        match decoder.next(&mut rest) {
            Ok(Some(ulpdu)) => to.segment(ulpdu, None),
            Ok(None) => return,
            Err(error) => to.state.fail(error, None),
        }
        left_bytes = rest.len();
    }
}

/// A longer FPDU on its way in.
#[derive(Debug)]
struct LongFpdu {
    ulpdu_bytes: usize,
    /// The DDP header, and the beginning of the payload if that is for the stream itself.
    kept: Vec<u8>,
    payload_bytes: u32,
    received_bytes: u32,
    /// Where the payload goes, or why it goes nowhere.
    judged: Result<Placement, PeerMisbehaved>,
    /// The span that `direct` named last.
    direct: Option<Span>,
    /// Over what came so far; over the payload alone if there is a `head_crc`.
    crc_state: u32,
    /// Over what comes before the payload, if somebody may want the CRC of that alone.
    head_crc: Option<u32>,
    tail: [u8; TAIL_MAX_BYTES],
    tail_bytes: usize,
}

impl LongFpdu {
    /// `head`: the length field and the DDP header.
    fn new(head: &[u8], ulpdu_bytes: usize, crc: bool, to: &mut Destination<'_>) -> Self {
        let kept = head.get(LENGTH_BYTES..).unwrap_or_default().to_vec();
        let payload_bytes = ulpdu_bytes.saturating_sub(kept.len()) as u32;
        let judged = to.inbound.judge(&kept, payload_bytes, to.state, to.memory);
        let of_head = if crc { crc32c::update(0, head) } else { 0 };
        let apart = crc && !to.state.watched.is_empty() && matches!(judged, Ok(Placement::Tagged { .. }));
        Self {
            ulpdu_bytes,
            judged,
            kept,
            payload_bytes,
            received_bytes: 0,
            direct: None,
            crc_state: if apart { 0 } else { of_head },
            head_crc: apart.then_some(of_head),
            tail: [0; TAIL_MAX_BYTES],
            tail_bytes: 0,
        }
    }

    fn left_bytes(&self) -> u32 {
        self.payload_bytes - self.received_bytes
    }

    fn tail_due_bytes(&self) -> usize {
        pad_bytes(self.ulpdu_bytes) + CRC_BYTES
    }

    fn finished(&self) -> bool {
        self.left_bytes() == 0 && self.tail_bytes == self.tail_due_bytes()
    }

    /// The next octets, payload or what follows it; what is left of `data`.
    fn take<'a>(&mut self, data: &'a [u8], crc: bool, to: &mut Destination<'_>) -> &'a [u8] {
        self.direct = None;
        let left = self.left_bytes() as usize;
        if left == 0 {
            let room = self
                .tail
                .get_mut(self.tail_bytes..pad_bytes(self.ulpdu_bytes) + CRC_BYTES)
                .unwrap_or_default();
            let (part, rest) = data.split_at(room.len().min(data.len()));
            for (to, from) in room.iter_mut().zip(part) {
                *to = *from;
            }
            self.tail_bytes += part.len();
            return rest;
        }
        let (part, rest) = data.split_at(left.min(data.len()));
        if let Some(span) = self.span_of_next(part.len() as u32, to.memory) {
            to.octets.write(span, part);
        } else if matches!(self.judged, Ok(Placement::Control)) {
            let room = (DDP_UNTAGGED_HEADER_BYTES + TERMINATE_MAX_BYTES).saturating_sub(self.kept.len());
            self.kept.extend(part.iter().take(room));
        }
        if crc {
            self.crc_state = crc32c::update(self.crc_state, part);
        }
        self.received_bytes += part.len() as u32;
        rest
    }

    /// Where the next `len` octets go. The STag is looked up anew each time: a revocation bites at once.
    fn span_of_next(&mut self, len: u32, memory: &mut dyn StreamMemory) -> Option<Span> {
        match self.judged {
            Ok(Placement::Posted(span)) => Some(span.part(self.received_bytes, len)),
            Ok(Placement::Tagged { stag, to, .. }) => {
                match memory.place(stag, to.wrapping_add(self.received_bytes.into()), len) {
                    Ok(span) => Some(span),
                    Err(error) => {
                        self.judged = Err(error);
                        None
                    }
                }
            }
            _ => None,
        }
    }

    fn open_direct(&mut self, memory: &mut dyn StreamMemory) -> Option<Span> {
        let left = self.left_bytes();
        self.direct = if left < DIRECT_MIN_BYTES {
            None
        } else {
            self.span_of_next(left, memory)
        };
        self.direct
    }

    fn take_direct(&mut self, bytes: u32, crc: bool, octets: &dyn Octets) {
        if let Some(span) = self.direct.take() {
            let came = span.part(0, bytes.min(self.left_bytes()));
            if crc {
                self.crc_state = octets.crc32c(self.crc_state, came);
            }
            self.received_bytes += came.len;
        }
    }

    /// All of it is there: see whether it counts.
    fn finish(&mut self, crc: bool, to: &mut Destination<'_>) {
        let (pad, came) = self.tail.split_at(pad_bytes(self.ulpdu_bytes));
        let payload_crc = self.head_crc.map(|_| self.crc_state);
        let unpadded = self.head_crc.map_or(self.crc_state, |head| {
            join(head, self.crc_state, to.state.watched.shift(self.payload_bytes))
        });
        if crc && came.first_chunk() != Some(&crc32c::wire(crc32c::update(unpadded, pad))) {
            to.state.fail(crc_mismatch(fpdu_bytes(self.ulpdu_bytes)), None);
            return;
        }
        to.state.may_send = true;
        let judged = std::mem::replace(&mut self.judged, Ok(Placement::Nothing));
        let result = judged.and_then(|_| {
            to.inbound
                .commit(&self.kept, self.payload_bytes, payload_crc, to.state, to.memory)
        });
        if let Err(error) = result {
            to.state
                .fail(error, Offender::of(self.ulpdu_bytes as u16, &self.kept, None).as_ref());
        }
    }
}
