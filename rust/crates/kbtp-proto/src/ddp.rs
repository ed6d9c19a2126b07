//! DDP segments (RFC 5041 4): two headers, and how a message is cut.
//!
//! ```text
//! tagged    T=1 L Rsvd DV | RsvdULP(8) | STag(32) | TO(64) | payload
//! untagged  T=0 L Rsvd DV | RsvdULP(8) | RsvdULP(32) | QN(32) | MSN(32) | MO(32) | payload
//! ```
//!
//! RsvdULP is RDMAP's: its control octet, and in untagged segments a 32-bit word, the Invalidate STag.

use crate::limits::{DDP_TAGGED_HEADER_BYTES, DDP_UNTAGGED_HEADER_BYTES};
use crate::types::{PeerMisbehaved, TerminateCause};

/// The version spoken (RFC 5041 4.1).
pub const DDP_VERSION: u8 = 1;

pub(crate) const TAGGED: u8 = 0x80;
const LAST: u8 = 0x40;
const VERSION_MASK: u8 = 0x03;

/// The header of a segment for a tagged buffer: an RDMA Write or a Read Response. `control` is RDMAP's octet.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TaggedHeader {
    /// RDMAP's control octet.
    pub control: u8,
    /// The buffer's STag.
    pub stag: u32,
    /// Tagged offset of the payload's first octet.
    pub to: u64,
    /// The message ends with this segment.
    pub last: bool,
}

/// The header of a segment for the next buffer of queue `qn`. `control` and `ulp_word` are RDMAP's.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct UntaggedHeader {
    /// RDMAP's control octet.
    pub control: u8,
    /// The Invalidate STag.
    pub ulp_word: u32,
    /// Queue number.
    pub qn: u32,
    /// Message sequence number.
    pub msn: u32,
    /// Offset of the payload in the message.
    pub mo: u32,
    /// The message ends with this segment.
    pub last: bool,
}

/// The header of a segment of either kind.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SegmentHeader {
    /// T=1.
    Tagged(TaggedHeader),
    /// T=0.
    Untagged(UntaggedHeader),
}

impl SegmentHeader {
    /// RDMAP's control octet.
    pub const fn control(&self) -> u8 {
        match self {
            Self::Tagged(header) => header.control,
            Self::Untagged(header) => header.control,
        }
    }

    /// The message ends with this segment.
    pub const fn last(&self) -> bool {
        match self {
            Self::Tagged(header) => header.last,
            Self::Untagged(header) => header.last,
        }
    }

    /// How many octets it has on the wire.
    pub const fn bytes(&self) -> usize {
        match self {
            Self::Tagged(_) => DDP_TAGGED_HEADER_BYTES,
            Self::Untagged(_) => DDP_UNTAGGED_HEADER_BYTES,
        }
    }
}

const fn first_octet(tagged: u8, last: bool) -> u8 {
    tagged | (if last { LAST } else { 0 }) | DDP_VERSION
}

/// The 14-octet header. A caller's TO counts modulo 2^64, so that a message that wraps is the peer's to refuse.
pub fn pack_tagged(header: &TaggedHeader) -> [u8; DDP_TAGGED_HEADER_BYTES] {
    let mut octets = [0; DDP_TAGGED_HEADER_BYTES];
    octets[0] = first_octet(TAGGED, header.last);
    octets[1] = header.control;
    octets[2..6].copy_from_slice(&header.stag.to_be_bytes());
    octets[6..].copy_from_slice(&header.to.to_be_bytes());
    octets
}

/// The 18-octet header.
pub fn pack_untagged(header: &UntaggedHeader) -> [u8; DDP_UNTAGGED_HEADER_BYTES] {
    let mut octets = [0; DDP_UNTAGGED_HEADER_BYTES];
    octets[0] = first_octet(0, header.last);
    octets[1] = header.control;
    octets[2..6].copy_from_slice(&header.ulp_word.to_be_bytes());
    octets[6..10].copy_from_slice(&header.qn.to_be_bytes());
    octets[10..14].copy_from_slice(&header.msn.to_be_bytes());
    octets[14..].copy_from_slice(&header.mo.to_be_bytes());
    octets
}

/// How long the header of a segment is, by the T bit in its first octet.
pub const fn header_bytes(first: u8) -> usize {
    if first & TAGGED != 0 {
        DDP_TAGGED_HEADER_BYTES
    } else {
        DDP_UNTAGGED_HEADER_BYTES
    }
}

/// The header at the beginning of `ulpdu`, which is the ULPDU or as much of it as there is, at least its header.
///
/// Refuses a header that is not all there and another DDP version.
pub fn parse_header(ulpdu: &[u8]) -> Result<SegmentHeader, PeerMisbehaved> {
    let whole = ulpdu.first().is_some_and(|&first| ulpdu.len() >= header_bytes(first));
    let (true, Some(&[first, control])) = (whole, ulpdu.first_chunk()) else {
        // RFC 5041 6.2.2: fatal, without a code of its own.
        return Err(PeerMisbehaved::new(
            TerminateCause::DdpLocalCatastrophic,
            format!("a ULPDU of {} octets is shorter than its DDP header", ulpdu.len()),
        ));
    };
    let (tagged, last, version) = (first & TAGGED != 0, first & LAST != 0, first & VERSION_MASK);
    if version != DDP_VERSION {
        let cause = if tagged {
            TerminateCause::DdpTaggedInvalidVersion
        } else {
            TerminateCause::DdpUntaggedInvalidVersion
        };
        return Err(PeerMisbehaved::new(
            cause,
            format!("DDP version {version} came, {DDP_VERSION} is spoken"),
        ));
    }
    let mut fields = Fields(&ulpdu[2..]);
    Ok(if tagged {
        SegmentHeader::Tagged(TaggedHeader {
            control,
            stag: fields.u32(),
            to: fields.u64(),
            last,
        })
    } else {
        SegmentHeader::Untagged(UntaggedHeader {
            control,
            ulp_word: fields.u32(),
            qn: fields.u32(),
            msn: fields.u32(),
            mo: fields.u32(),
            last,
        })
    })
}

/// Big-endian fields one after the other, from octets whose number was checked before; past their end all are zero.
pub(crate) struct Fields<'a>(pub(crate) &'a [u8]);

impl Fields<'_> {
    fn take<const N: usize>(&mut self) -> [u8; N] {
        let Some((octets, rest)) = self.0.split_first_chunk() else {
            self.0 = &[];
            return [0; N];
        };
        self.0 = rest;
        *octets
    }

    pub(crate) fn u32(&mut self) -> u32 {
        u32::from_be_bytes(self.take())
    }

    pub(crate) fn u64(&mut self) -> u64 {
        u64::from_be_bytes(self.take())
    }
}

/// One segment of a message that is cut.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Segment {
    /// Of its payload, in the message.
    pub offset: u32,
    /// Octets of payload.
    pub size: u32,
    /// The message ends with it.
    pub last: bool,
}

/// The segments of a message, front to back; from `cut`.
#[derive(Clone, Debug)]
pub struct Cut {
    message_bytes: u32,
    segment_bytes: u32,
    padded_max_bytes: u32,
    next_offset: Option<u32>,
}

/// The segments of a message; one empty segment for an empty message (RFC 5041 5.2). `segment_bytes` is not 0.
///
/// A segment of more than `padded_max_bytes` is a multiple of 4 octets, so that its FPDU needs no PAD: the octets that are
/// too many for that make up the next one.
pub const fn cut(message_bytes: u32, segment_bytes: u32, padded_max_bytes: u32) -> Cut {
    Cut {
        message_bytes,
        segment_bytes,
        padded_max_bytes,
        next_offset: Some(0),
    }
}

impl Iterator for Cut {
    type Item = Segment;

    fn next(&mut self) -> Option<Segment> {
        let offset = self.next_offset?;
        let left = self.message_bytes - offset;
        let mut size = left.min(self.segment_bytes);
        if size > self.padded_max_bytes {
            size -= size % 4;
        }
        let last = size == left;
        self.next_offset = if last { None } else { Some(offset + size) };
        Some(Segment { offset, size, last })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::limits::PADDED_PAYLOAD_MAX_BYTES;
    use proptest::prelude::*;

    fn cause_of(ulpdu: &[u8]) -> TerminateCause {
        parse_header(ulpdu).unwrap_err().cause
    }

    proptest! {
        #[test]
        fn a_tagged_header_is_parsed_as_packed(control: u8, stag: u32, to: u64, last: bool, payload: Vec<u8>) {
            let header = TaggedHeader { control, stag, to, last };
            let ulpdu = [&pack_tagged(&header)[..], &payload].concat();
            prop_assert_eq!(parse_header(&ulpdu), Ok(SegmentHeader::Tagged(header)));
        }

        #[test]
        fn an_untagged_header_is_parsed_as_packed(
            control: u8, ulp_word: u32, qn: u32, msn: u32, mo: u32, last: bool
        ) {
            let header = UntaggedHeader { control, ulp_word, qn, msn, mo, last };
            prop_assert_eq!(parse_header(&pack_untagged(&header)), Ok(SegmentHeader::Untagged(header)));
        }

        #[test]
        fn any_octets_parse_or_are_refused(ulpdu in proptest::collection::vec(any::<u8>(), 0..40)) {
            if let Ok(header) = parse_header(&ulpdu) {
                prop_assert!(ulpdu.len() >= header.bytes());
            }
        }

        #[test]
        fn the_segments_make_up_the_message(
            message_bytes in 0u32..100_000,
            segment_bytes in 1u32..70_000,
            padded_max_bytes in prop_oneof![Just(PADDED_PAYLOAD_MAX_BYTES), Just(u32::MAX)],
        ) {
            let segments: Vec<Segment> = cut(message_bytes, segment_bytes, padded_max_bytes).collect();
            let mut at = 0;
            for (index, segment) in segments.iter().enumerate() {
                prop_assert_eq!(segment.offset, at);
                prop_assert!(segment.size <= segment_bytes);
                prop_assert!(segment.size <= padded_max_bytes || segment.size.is_multiple_of(4));
                prop_assert_eq!(segment.last, index + 1 == segments.len());
                at += segment.size;
            }
            prop_assert_eq!(at, message_bytes);
            prop_assert!(segments.len() == 1 || segments.iter().all(|segment| segment.size > 0));
        }
    }

    #[test]
    fn d3_reserved_bits_are_ignored() {
        let mut octets = pack_tagged(&TaggedHeader {
            control: 0x40,
            stag: 1,
            to: 2,
            last: true,
        });
        octets[0] |= 0x3C;
        assert!(parse_header(&octets).is_ok());
    }

    #[test]
    fn d5_ddp_version() {
        for version in [0, 2, 3] {
            let mut tagged = [0; DDP_TAGGED_HEADER_BYTES];
            tagged[0] = TAGGED | version;
            assert_eq!(cause_of(&tagged), TerminateCause::DdpTaggedInvalidVersion);
            let mut untagged = [0; DDP_UNTAGGED_HEADER_BYTES];
            untagged[0] = version;
            assert_eq!(cause_of(&untagged), TerminateCause::DdpUntaggedInvalidVersion);
        }
    }

    #[test]
    fn d33_shorter_than_its_header() {
        for ulpdu in [&[][..], &[0x41], &[0xC1], &[0x41; 17], &[0xC1; 13]] {
            assert_eq!(cause_of(ulpdu), TerminateCause::DdpLocalCatastrophic);
        }
    }

    #[test]
    fn d12_the_examples_of_rfc_5041_5_2() {
        for (header, sizes) in [(18, [1482, 566]), (14, [1486, 562])] {
            let cuts: Vec<u32> = cut(2048, 1500 - header, u32::MAX).map(|segment| segment.size).collect();
            assert_eq!(cuts, sizes);
        }
        assert_eq!(
            cut(0, 100, PADDED_PAYLOAD_MAX_BYTES).collect::<Vec<_>>(),
            [Segment {
                offset: 0,
                size: 0,
                last: true
            }]
        );
        assert_eq!(cut(u32::MAX, u32::MAX, u32::MAX).count(), 1);
        assert_eq!(cut(u32::MAX, 1 << 31, u32::MAX).count(), 2);
    }

    #[test]
    fn only_a_short_segment_needs_pad() {
        for (message_bytes, sizes) in [
            (256, &[256][..]),
            (255, &[255]),
            (257, &[256, 1]),
            (4099, &[1428, 1428, 1240, 3]),
            (2856, &[1428, 1428]),
            (2857, &[1428, 1428, 1]),
            (3111, &[1428, 1428, 255]),
        ] {
            let cuts: Vec<u32> = cut(message_bytes, 1428, PADDED_PAYLOAD_MAX_BYTES)
                .map(|segment| segment.size)
                .collect();
            assert_eq!(cuts, sizes);
        }
        // The longest ULPDU is no multiple of 4 with its length field.
        let cuts: Vec<u32> = cut(65535, 64754, PADDED_PAYLOAD_MAX_BYTES)
            .map(|segment| segment.size)
            .collect();
        assert_eq!(cuts, [64752, 780, 3]);
    }
}
