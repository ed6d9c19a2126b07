//! MPA framing in full operation (RFC 5044 3 to 6): one ULPDU in, one FPDU out, and back.
//!
//! ```text
//! [marker] ULPDU_Length(16) | ULPDU ... | PAD 0..3 | CRC(32)
//! ```
//!
//! A marker stands at every 512th octet of a half connection that asked for them, counted from its first octet, markers
//! included (RFC 5044 4.3). Everything is a multiple of 4 octets, so a marker never splits a length or a CRC field.
//!
//! Without markers a stream builds and takes FPDUs in place, with `length_field`, `pad_bytes` and `Tail`;
//! `FpduEncoder` and `FpduDecoder` copy, and know markers.

use crate::crc32c::{self, CRC_BYTES};
use crate::limits::{MPA_MARKER_BYTES, MPA_MARKER_SPACING_BYTES, MULPDU_MIN_BYTES, ULPDU_MAX_BYTES};
use crate::types::{PeerMisbehaved, TerminateCause};

/// Octets of ULPDU_Length.
pub const LENGTH_BYTES: usize = 2;
/// The longest padding.
pub const PAD_MAX_BYTES: usize = 3;

const POINTER_MASK: u16 = 0xFFFC; // the low 2 bits of FPDUPTR are not looked at (RFC 5044 4.2)
const BETWEEN_MARKERS_BYTES: usize = MPA_MARKER_SPACING_BYTES - MPA_MARKER_BYTES;

/// The largest ULPDU for which its FPDU fits a TCP segment of `emss_bytes` (RFC 5044 4.5), within 128..64768.
pub fn mulpdu_for_emss(emss_bytes: u32, markers: bool) -> u32 {
    let mut overhead_bytes = (LENGTH_BYTES + CRC_BYTES) as u32 + emss_bytes % 4;
    if markers {
        overhead_bytes += MPA_MARKER_BYTES as u32 * emss_bytes.div_ceil(MPA_MARKER_SPACING_BYTES as u32);
    }
    emss_bytes
        .saturating_sub(overhead_bytes)
        .clamp(MULPDU_MIN_BYTES, ULPDU_MAX_BYTES)
}

/// The ULPDU_Length field of a ULPDU of `ulpdu_bytes`.
pub const fn length_field(ulpdu_bytes: u16) -> [u8; LENGTH_BYTES] {
    ulpdu_bytes.to_be_bytes()
}

/// Octets of PAD behind a ULPDU of `ulpdu_bytes`, so that all up to the CRC is a multiple of 4 (RFC 5044 4.1).
pub const fn pad_bytes(ulpdu_bytes: usize) -> usize {
    (LENGTH_BYTES + ulpdu_bytes).wrapping_neg() & PAD_MAX_BYTES
}

/// Octets of the FPDU of a ULPDU of `ulpdu_bytes`, without markers.
pub const fn fpdu_bytes(ulpdu_bytes: usize) -> usize {
    LENGTH_BYTES + ulpdu_bytes + pad_bytes(ulpdu_bytes) + CRC_BYTES
}

/// PAD and CRC of an FPDU without markers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Tail {
    octets: [u8; PAD_MAX_BYTES + CRC_BYTES],
    len: u8,
}

impl Tail {
    /// `crc`: the CRC32c over ULPDU_Length and the ULPDU of `ulpdu_bytes`; None if the stream has no CRCs.
    pub fn new(ulpdu_bytes: usize, crc: Option<u32>) -> Self {
        let pad = pad_bytes(ulpdu_bytes);
        let mut octets = [0; PAD_MAX_BYTES + CRC_BYTES];
        if let Some(crc) = crc {
            let crc = crc32c::update(crc, &octets[..pad]);
            octets[pad..pad + CRC_BYTES].copy_from_slice(&crc32c::wire(crc));
        }
        Self {
            octets,
            len: (pad + CRC_BYTES) as u8,
        }
    }

    /// What goes out.
    pub fn octets(&self) -> &[u8] {
        &self.octets[..usize::from(self.len)]
    }
}

/// One outgoing half connection.
#[derive(Debug)]
pub struct FpduEncoder {
    crc: bool,
    markers: bool,
    position: usize, // in the half connection, modulo the marker spacing
}

impl FpduEncoder {
    /// At the first octet of the half connection.
    pub const fn new(crc: bool, markers: bool) -> Self {
        Self {
            crc,
            markers,
            position: 0,
        }
    }

    /// Appends the FPDU of the ULPDU that `pieces` make up, 1 to 64768 octets.
    ///
    /// The pieces are copied first and the CRC is taken over the copy: memory that changes meanwhile can tear the
    /// payload but never makes the CRC wrong.
    pub fn encode(&mut self, pieces: &[&[u8]], out: &mut Vec<u8>) {
        let start = out.len();
        let ulpdu_bytes: usize = pieces.iter().map(|piece| piece.len()).sum();
        debug_assert!(
            ulpdu_bytes <= ULPDU_MAX_BYTES as usize,
            "a ULPDU of {ulpdu_bytes} octets"
        );
        let length = length_field(ulpdu_bytes as u16);
        let pad = [0; PAD_MAX_BYTES];
        let mut writer = Writer {
            half: self,
            out,
            from_length_field: 0,
            begun: false,
        };
        writer.put(&length);
        for piece in pieces {
            writer.put(piece);
        }
        writer.put(&pad[..pad_bytes(ulpdu_bytes)]);
        writer.marker_if_due(); // one between PAD and CRC belongs to this FPDU (RFC 5044 4.3)
        let crc = if self.crc { crc32c::update(0, &out[start..]) } else { 0 };
        out.extend(crc32c::wire(crc));
        self.position = (self.position + CRC_BYTES) % MPA_MARKER_SPACING_BYTES;
    }
}

/// Puts the octets of one FPDU behind each other, with the markers that fall before them.
struct Writer<'a> {
    half: &'a mut FpduEncoder,
    out: &'a mut Vec<u8>,
    from_length_field: u16, // octets from the first of ULPDU_Length to here, markers counted
    begun: bool,
}

impl Writer<'_> {
    fn put(&mut self, mut octets: &[u8]) {
        while !octets.is_empty() {
            self.marker_if_due();
            let room = if self.half.markers {
                MPA_MARKER_SPACING_BYTES - self.half.position
            } else {
                octets.len()
            };
            let (run, rest) = octets.split_at(room.min(octets.len()));
            self.out.extend_from_slice(run);
            self.from_length_field = self.from_length_field.wrapping_add(run.len() as u16);
            self.half.position = (self.half.position + run.len()) % MPA_MARKER_SPACING_BYTES;
            self.begun = true;
            octets = rest;
        }
    }

    fn marker_if_due(&mut self) {
        if !self.half.markers || self.half.position != 0 {
            return;
        }
        self.out.extend([0, 0]);
        self.out.extend(self.from_length_field.to_be_bytes());
        self.half.position = MPA_MARKER_BYTES;
        if self.begun {
            self.from_length_field = self.from_length_field.wrapping_add(MPA_MARKER_BYTES as u16);
        }
    }
}

/// One incoming half connection.
///
/// FPDUs that lie whole in what was received, without markers, are read in place; only one that is still incomplete is
/// kept, so memory is bounded by one FPDU.
#[derive(Debug)]
pub struct FpduDecoder {
    crc: bool,
    markers: bool,
    position: usize, // of the next FPDU in the half connection, modulo the marker spacing
    partial: Vec<u8>,
    handed_out: bool, // `partial` is a whole FPDU that was handed out
    unmarked: Vec<u8>,
}

impl FpduDecoder {
    /// At the first octet of the half connection.
    pub const fn new(crc: bool, markers: bool) -> Self {
        Self {
            crc,
            markers,
            position: 0,
            partial: Vec::new(),
            handed_out: false,
            unmarked: Vec::new(),
        }
    }

    /// True if the octets so far end inside an FPDU.
    pub fn half_received(&self) -> bool {
        !self.handed_out && !self.partial.is_empty()
    }

    /// The next ULPDU that `data` completes; moves `data` behind it. None: all of `data` was taken.
    ///
    /// Refuses with MPA_CRC or MPA_MARKER_MISMATCH. Framing cannot be trusted from there on: the caller gives up this
    /// half connection (RFC 5044 8).
    pub fn next<'a, 'd: 'a>(&'a mut self, data: &mut &'d [u8]) -> Result<Option<&'a [u8]>, PeerMisbehaved> {
        if self.handed_out {
            self.partial.clear();
            self.handed_out = false;
        }
        if self.partial.is_empty()
            && let Some(size) = self.size(data)
            && let Some((fpdu, rest)) = data.split_at_checked(size)
        {
            *data = rest;
            return self.ulpdu(fpdu).map(Some);
        }
        self.take_up_to(data, self.head_bytes());
        let Some(size) = self.size(&self.partial) else {
            return Ok(None);
        };
        self.take_up_to(data, size);
        if self.partial.len() < size {
            return Ok(None);
        }
        self.handed_out = true;
        let fpdu = std::mem::take(&mut self.partial);
        let checked = self.check(&fpdu);
        self.partial = fpdu;
        checked?;
        Ok(Some(if self.markers {
            cut_ulpdu(&self.unmarked)
        } else {
            cut_ulpdu(&self.partial)
        }))
    }

    /// Moves octets from the front of `data` to the incomplete FPDU until that has `size`.
    fn take_up_to(&mut self, data: &mut &[u8], size: usize) {
        let missing = size.saturating_sub(self.partial.len());
        let (octets, rest) = data.split_at(missing.min(data.len()));
        self.partial.extend_from_slice(octets);
        *data = rest;
    }

    /// Octets of the marker before the length field, if there is one.
    fn lead_bytes(&self) -> usize {
        if self.markers && self.position == 0 {
            MPA_MARKER_BYTES
        } else {
            0
        }
    }

    fn head_bytes(&self) -> usize {
        self.lead_bytes() + LENGTH_BYTES
    }

    /// Size on the wire of the FPDU at the front of `octets`, markers included; None while its length field is not there.
    fn size(&self, octets: &[u8]) -> Option<usize> {
        let lead = self.lead_bytes();
        let &length = octets.get(lead..)?.first_chunk()?;
        let size = fpdu_bytes(usize::from(u16::from_be_bytes(length)));
        if !self.markers {
            return Some(size);
        }
        // The last word, the CRC, has no marker behind it: that one belongs to the next FPDU.
        let before_marker = MPA_MARKER_SPACING_BYTES - (self.position + lead);
        let inner_markers = size.saturating_sub(before_marker).div_ceil(BETWEEN_MARKERS_BYTES);
        Some(lead + size + inner_markers * MPA_MARKER_BYTES)
    }

    fn ulpdu<'a>(&'a mut self, fpdu: &'a [u8]) -> Result<&'a [u8], PeerMisbehaved> {
        self.check(fpdu)?;
        Ok(cut_ulpdu(if self.markers { &self.unmarked } else { fpdu }))
    }

    /// Checks one whole FPDU, and puts it without its markers into `unmarked` if it has them.
    ///
    /// CRC first: nothing of a bad FPDU is used (RFC 5044 8).
    fn check(&mut self, fpdu: &[u8]) -> Result<(), PeerMisbehaved> {
        if self.crc
            && let Some((body, &crc)) = fpdu.split_last_chunk()
            && crc32c::wire(crc32c::update(0, body)) != crc
        {
            return Err(crc_mismatch(fpdu.len()));
        }
        if self.markers {
            self.remove_markers(fpdu)
        } else {
            Ok(())
        }
    }

    fn remove_markers(&mut self, fpdu: &[u8]) -> Result<(), PeerMisbehaved> {
        self.unmarked.clear();
        let (mut from_length_field, mut begun, mut rest) = (0, false, fpdu);
        while !rest.is_empty() {
            if self.position == 0
                && let Some((&[_, _, high, low], behind)) = rest.split_first_chunk()
            {
                let pointer = u16::from_be_bytes([high, low]) & POINTER_MASK;
                if usize::from(pointer) != from_length_field {
                    return Err(PeerMisbehaved::new(
                        TerminateCause::MpaMarkerMismatch,
                        format!("FPDUPTR {pointer} came, the length field is {from_length_field} octets back"),
                    ));
                }
                self.position = MPA_MARKER_BYTES;
                from_length_field += if begun { MPA_MARKER_BYTES } else { 0 };
                rest = behind;
            }
            let (run, behind) = rest.split_at((MPA_MARKER_SPACING_BYTES - self.position).min(rest.len()));
            self.unmarked.extend_from_slice(run);
            from_length_field += run.len();
            begun = true;
            self.position = (self.position + run.len()) % MPA_MARKER_SPACING_BYTES;
            rest = behind;
        }
        Ok(())
    }
}

/// What a CRC that does not match is refused with; `fpdu_bytes` is the whole FPDU with its markers.
pub fn crc_mismatch(fpdu_bytes: usize) -> PeerMisbehaved {
    PeerMisbehaved::new(
        TerminateCause::MpaCrc,
        format!("the CRC of an FPDU of {fpdu_bytes} octets does not match its content"),
    )
}

/// The ULPDU in a whole FPDU without markers.
fn cut_ulpdu(fpdu: &[u8]) -> &[u8] {
    let Some((&length, rest)) = fpdu.split_first_chunk() else {
        return &[];
    };
    rest.get(..usize::from(u16::from_be_bytes(length))).unwrap_or_default()
}
