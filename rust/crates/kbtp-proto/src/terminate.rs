//! The Terminate message (RFC 5040 4.8): which headers it quotes, its octets, and what came in one.

use crate::ddp::header_bytes;
use crate::limits::READ_REQUEST_BYTES;
use crate::types::{PeerMisbehaved, TerminateCause, TerminateInfo};

/// RDMAP found the error.
pub const LAYER_RDMAP: u8 = 0;
/// DDP found the error.
pub const LAYER_DDP: u8 = 1;
/// The layers below DDP, MPA among them, found the error.
pub const LAYER_LLP: u8 = 2;

const LOCAL_CATASTROPHIC: u8 = 0;
const REMOTE_PROTECTION: u8 = 1;
const M: u16 = 0x8000;
const D: u16 = 0x4000;
const R: u16 = 0x2000;

/// The segment that a Terminate is about: its whole length and its DDP header.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Offender {
    /// Octets of the segment, its header included.
    pub segment_bytes: u16,
    /// 14 or 18 octets.
    pub ddp_header: Vec<u8>,
    /// The header of a Read Request, advanced by what was sent, if one is to blame.
    pub read_request: Option<[u8; READ_REQUEST_BYTES]>,
}

impl Offender {
    /// `head` is the segment of `segment_bytes` or its beginning. None if not even the DDP header is there to be quoted.
    pub fn of(segment_bytes: u16, head: &[u8], read_request: Option<[u8; READ_REQUEST_BYTES]>) -> Option<Self> {
        let ddp_header = head.get(..header_bytes(*head.first()?))?.to_vec();
        Some(Self {
            segment_bytes,
            ddp_header,
            read_request,
        })
    }
}

/// The payload of the Terminate for `cause`.
///
/// RFC 5040 4.8 figure 10: errors of the LLP and local catastrophic ones of RDMAP quote nothing; the others quote
/// length and DDP header; a Read Request is quoted as well if a remote protection error is its fault.
pub fn pack_terminate(cause: TerminateCause, offender: Option<&Offender>) -> Vec<u8> {
    let (layer, etype, code) = cause.value();
    let quotes = layer == LAYER_DDP || (layer == LAYER_RDMAP && etype != LOCAL_CATASTROPHIC);
    let offender = offender.filter(|_| quotes);
    let read_request = offender
        .filter(|_| layer == LAYER_RDMAP && etype == REMOTE_PROTECTION)
        .and_then(|offender| offender.read_request);
    let bits = offender.map_or(0, |_| M | D) | read_request.map_or(0, |_| R);
    let mut payload = vec![layer << 4 | etype, code];
    payload.extend(bits.to_be_bytes());
    if let Some(offender) = offender {
        payload.extend(offender.segment_bytes.to_be_bytes());
        payload.extend(&offender.ddp_header);
    }
    payload.extend(read_request.iter().flatten());
    payload
}

/// What a received Terminate says, by its M, D and R bits; reserved bits and further octets are ignored.
///
/// A header that is announced but not all there is left out. Refuses one without a whole control field.
pub fn parse_terminate(payload: &[u8]) -> Result<TerminateInfo, PeerMisbehaved> {
    let Some((&[layer_and_type, code, bits_high, bits_low], rest)) = payload.split_first_chunk() else {
        return Err(PeerMisbehaved::new(
            TerminateCause::RdmapUnspecified,
            format!(
                "a Terminate of {} octets is shorter than its control field",
                payload.len()
            ),
        ));
    };
    let bits = u16::from_be_bytes([bits_high, bits_low]);
    let mut info = TerminateInfo {
        layer: layer_and_type >> 4,
        etype: layer_and_type & 0xF,
        code,
        ..TerminateInfo::default()
    };
    if bits & (M | D) != 0
        && let Some((&length, rest)) = rest.split_first_chunk()
    {
        info.ddp_segment_length = (bits & M != 0).then_some(u16::from_be_bytes(length));
        if bits & D != 0
            && let Some(&first) = rest.first()
            && let Some((header, rest)) = rest.split_at_checked(header_bytes(first))
        {
            info.ddp_header = header.to_vec();
            if bits & R != 0
                && let Some(read_request) = rest.first_chunk::<READ_REQUEST_BYTES>()
            {
                info.rdmap_header = read_request.to_vec();
            }
        }
    }
    Ok(info)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const READ: [u8; READ_REQUEST_BYTES] = [7; READ_REQUEST_BYTES];

    fn untagged() -> Vec<u8> {
        [&[0x41][..], &[0; 17]].concat()
    }

    fn tagged() -> Vec<u8> {
        [&[0xC1][..], &[0; 13]].concat()
    }

    fn offender(segment_bytes: u16, ddp_header: Vec<u8>, read: bool) -> Offender {
        Offender {
            segment_bytes,
            ddp_header,
            read_request: read.then_some(READ),
        }
    }

    fn info(layer: u8, etype: u8, code: u8, ddp_segment_length: Option<u16>, ddp_header: Vec<u8>) -> TerminateInfo {
        TerminateInfo {
            layer,
            etype,
            code,
            ddp_segment_length,
            ddp_header,
            rdmap_header: Vec::new(),
        }
    }

    #[test]
    fn r36_r38_r39_which_headers_a_cause_quotes() {
        for &cause in TerminateCause::ALL {
            let payload = pack_terminate(cause, Some(&offender(46, untagged(), true)));
            assert_eq!(payload[..2], [cause.layer() << 4 | cause.etype(), cause.code()]);
            let rest = if cause.layer() == LAYER_LLP || cause == TerminateCause::LocalCatastrophic {
                vec![0, 0]
            } else if (cause.layer(), cause.etype()) == (0, 1) {
                [&[0xE0, 0, 0, 46][..], &untagged(), &READ].concat()
            } else {
                [&[0xC0, 0, 0, 46][..], &untagged()].concat()
            };
            assert_eq!(payload[2..], rest, "{cause}");
        }
    }

    #[test]
    fn r36_r_is_clear_unless_a_read_request_is_to_blame() {
        let cause = TerminateCause::RdmapInvalidStag;
        assert_eq!(
            pack_terminate(cause, Some(&offender(70, untagged(), false)))[2..4],
            [0xC0, 0]
        );
        assert_eq!(pack_terminate(cause, None), [1, 0, 0, 0]);
    }

    #[test]
    fn r38_the_quoted_header_is_cut_by_its_t_bit() {
        for header in [untagged(), tagged()] {
            let segment = [&header[..], b"payload"].concat();
            let bytes = u16::try_from(segment.len()).unwrap();
            assert_eq!(
                Offender::of(bytes, &segment, None),
                Some(offender(bytes, header.clone(), false))
            );
            assert_eq!(Offender::of(1, &header[..header.len() - 1], None), None);
        }
        assert_eq!(Offender::of(0, &[], None), None);
    }

    #[test]
    fn what_is_packed_is_parsed() {
        for &cause in TerminateCause::ALL {
            for offender in [
                None,
                Some(offender(19, tagged(), false)),
                Some(offender(46, untagged(), true)),
            ] {
                let parsed = parse_terminate(&pack_terminate(cause, offender.as_ref())).unwrap();
                assert_eq!((parsed.layer, parsed.etype, parsed.code), cause.value());
                if !parsed.ddp_header.is_empty() {
                    let offender = offender.unwrap();
                    assert_eq!(parsed.ddp_segment_length, Some(offender.segment_bytes));
                    assert_eq!(parsed.ddp_header, offender.ddp_header);
                    assert!(parsed.rdmap_header.is_empty() || parsed.rdmap_header == READ);
                }
            }
        }
    }

    #[test]
    fn r37_what_the_bits_do_not_announce_is_ignored() {
        let parse = |octets: &[u8]| parse_terminate(octets).unwrap();
        assert_eq!(
            parse(&[&[0x12, 3, 0x1F, 0xFF][..], &[0; 48]].concat()),
            info(1, 2, 3, None, vec![])
        );
        assert_eq!(parse(&[0x12, 3, 0x80, 0, 0, 0xFF]), info(1, 2, 3, Some(255), vec![]));
        assert_eq!(
            parse(&[&[0x12, 3, 0x40, 0, 0, 0][..], &untagged()].concat()),
            info(1, 2, 3, None, untagged()),
            "a length that M does not vouch for is skipped"
        );
    }

    #[test]
    fn headers_that_are_not_all_there_are_left_out() {
        let whole = pack_terminate(TerminateCause::RdmapInvalidStag, Some(&offender(46, untagged(), true)));
        let parse = |end: usize| parse_terminate(&whole[..end]).unwrap();
        assert_eq!(parse(whole.len() - 1), info(0, 1, 0, Some(46), untagged()));
        assert_eq!(parse(6 + 17), info(0, 1, 0, Some(46), vec![]));
        assert_eq!(parse(5), info(0, 1, 0, None, vec![]));
    }

    proptest! {
        #[test]
        fn any_octets_parse_or_are_too_short(payload in proptest::collection::vec(any::<u8>(), 0..80)) {
            match parse_terminate(&payload) {
                Ok(_) => prop_assert!(payload.len() >= 4),
                Err(error) => {
                    prop_assert!(payload.len() < 4);
                    prop_assert_eq!(error.cause, TerminateCause::RdmapUnspecified);
                }
            }
        }
    }
}
