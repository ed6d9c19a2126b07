//! MPA framing: checklist F (RFC 5044 3 to 6). The other side here builds its octets word by word.

use kbtp_proto::crc32c;
use kbtp_proto::ddp::{UntaggedHeader, pack_untagged};
use kbtp_proto::fpdu::{FpduDecoder, FpduEncoder, fpdu_bytes, mulpdu_for_emss};
use kbtp_proto::types::{PeerMisbehaved, TerminateCause};
use proptest::prelude::*;

/// A half connection, sent word by word (RFC 5044 4.3).
struct Half {
    position: usize,
    markers: bool,
    pointer_xor: usize,
    reserved: u16,
}

impl Half {
    fn new(markers: bool) -> Self {
        Self {
            position: 0,
            markers,
            pointer_xor: 0,
            reserved: 0,
        }
    }

    fn fpdu(&mut self, ulpdu: &[u8]) -> Vec<u8> {
        let mut body = (ulpdu.len() as u16).to_be_bytes().to_vec();
        body.extend(ulpdu);
        while !body.len().is_multiple_of(4) {
            body.push(0);
        }
        let (mut out, mut start) = (Vec::new(), None);
        for word in body.chunks(4) {
            self.marker(&mut out, start);
            start = start.or(Some(self.position));
            out.extend(word);
            self.position += 4;
        }
        self.marker(&mut out, start);
        let crc = crc32c::wire(crc32c::update(0, &out));
        out.extend(crc);
        self.position += 4;
        out
    }

    fn marker(&mut self, out: &mut Vec<u8>, start: Option<usize>) {
        if self.markers && self.position.is_multiple_of(512) {
            let pointer = start.map_or(0, |start| self.position - start) ^ self.pointer_xor;
            out.extend(self.reserved.to_be_bytes());
            out.extend((pointer as u16).to_be_bytes());
            self.position += 4;
        }
    }
}

fn encode(encoder: &mut FpduEncoder, ulpdu: &[u8]) -> Vec<u8> {
    let mut out = Vec::new();
    encoder.encode(&[ulpdu], &mut out);
    out
}

/// The ULPDUs in `octets`, which come in steps of the sizes in `steps`, over and over.
fn decode(decoder: &mut FpduDecoder, octets: &[u8], steps: &[usize]) -> Result<Vec<Vec<u8>>, PeerMisbehaved> {
    let (mut rest, mut got) = (octets, Vec::new());
    for step in steps.iter().cycle() {
        if rest.is_empty() {
            break;
        }
        let (mut data, behind) = rest.split_at(rest.len().min(*step));
        while let Some(ulpdu) = decoder.next(&mut data)? {
            got.push(ulpdu.to_vec());
        }
        assert!(data.is_empty(), "what is not whole yet is kept");
        rest = behind;
    }
    Ok(got)
}

fn decode_whole(octets: &[u8], crc: bool, markers: bool) -> Result<Vec<Vec<u8>>, PeerMisbehaved> {
    let mut decoder = FpduDecoder::new(crc, markers);
    let got = decode(&mut decoder, octets, &[octets.len()])?;
    assert!(!decoder.half_received());
    Ok(got)
}

fn cause_of(octets: &[u8], crc: bool, markers: bool) -> Option<TerminateCause> {
    decode_whole(octets, crc, markers).err().map(|error| error.cause)
}

fn send(msn: u32, payload_bytes: usize) -> Vec<u8> {
    let header = UntaggedHeader {
        control: 0x43,
        ulp_word: 0,
        qn: 0,
        msn,
        mo: 0,
        last: true,
    };
    [&pack_untagged(&header)[..], &vec![0; payload_bytes]].concat()
}

#[test]
fn f5_f10_f15_figures_5_and_6_of_rfc_5044() {
    let figure_5 = encode(&mut FpduEncoder::new(true, true), &send(1, 24));
    assert_eq!((figure_5.len(), &figure_5[..4]), (0x34, &[0; 4][..]));
    assert_eq!(figure_5[0x30..], [0x52, 0x23, 0x99, 0x83]);
    let mut encoder = FpduEncoder::new(true, true);
    assert_eq!(encode(&mut encoder, &send(1, 464)).len(), 492);
    let figure_6 = encode(&mut encoder, &send(2, 24));
    assert_eq!(
        (&figure_6[20..24], &figure_6[figure_6.len() - 4..]),
        (&[0, 0, 0, 20][..], &[0x84, 0x92, 0x58, 0x98][..])
    );
}

#[test]
fn f1_f2_f3_length_and_padding() {
    for length in 1..9u8 {
        let mut fpdu = encode(&mut FpduEncoder::new(true, false), &vec![0xFF; usize::from(length)]);
        assert_eq!(fpdu[..2], [0, length]);
        assert_eq!(fpdu.len(), fpdu_bytes(usize::from(length)));
        assert!(fpdu.len().is_multiple_of(4));
        let body = fpdu.len() - 4;
        for pad in &mut fpdu[2 + usize::from(length)..body] {
            assert_eq!(*pad, 0);
            *pad = 0xAA;
        }
        let crc = crc32c::wire(crc32c::update(0, &fpdu[..body]));
        fpdu[body..].copy_from_slice(&crc);
        assert_eq!(
            decode_whole(&fpdu, true, false).expect("pad is not looked at"),
            [vec![0xFF; length.into()]]
        );
    }
}

#[test]
fn f1_pieces_are_one_ulpdu() {
    let mut out = b"before".to_vec();
    FpduEncoder::new(true, false).encode(&[b"head", b"payload", b"", b"tail"], &mut out);
    assert_eq!(
        decode_whole(&out[6..], true, false).expect("a good FPDU"),
        [b"headpayloadtail"]
    );
}

#[test]
fn f6_any_bit_wrong_is_a_crc_error() {
    for at in 0..16 {
        let mut fpdu = encode(&mut FpduEncoder::new(true, false), &[0; 10]);
        fpdu[at] ^= 1;
        fpdu.resize(fpdu.len() + 512, 0); // a length field that is wrong takes what follows
        assert_eq!(cause_of(&fpdu, true, false), Some(TerminateCause::MpaCrc));
    }
}

#[test]
fn m25_without_crc_the_field_is_zero_and_garbage_is_accepted() {
    let mut fpdu = encode(&mut FpduEncoder::new(false, false), b"data");
    assert_eq!(fpdu[8..], [0; 4]);
    fpdu[8..].copy_from_slice(&[0xDE, 0xAD, 0xBE, 0xEF]);
    assert_eq!(decode_whole(&fpdu, false, false).expect("no CRC"), [b"data"]);
}

#[test]
fn f11_f13_f14_f16_f20_f21_every_size_in_any_split() {
    for markers in [false, true] {
        let (mut half, mut encoder, mut stream) = (Half::new(markers), FpduEncoder::new(true, markers), Vec::new());
        let ulpdus: Vec<Vec<u8>> = (1..1101)
            .map(|size| (0..size).map(|n| (n * size) as u8).collect())
            .collect();
        for ulpdu in &ulpdus {
            let fpdu = encode(&mut encoder, ulpdu);
            assert_eq!(fpdu, half.fpdu(ulpdu));
            stream.extend(fpdu);
        }
        for steps in [&[1][..], &[stream.len()], &[1, 2, 3, 5, 699, 8999], &[4, 512], &[1448]] {
            let mut decoder = FpduDecoder::new(true, markers);
            assert_eq!(decode(&mut decoder, &stream, steps).expect("good FPDUs"), ulpdus);
            assert!(!decoder.half_received());
        }
        if markers {
            for marker in stream.chunks(512) {
                assert!(marker[..2] == [0, 0] && marker[3].is_multiple_of(4));
            }
        }
    }
}

#[test]
fn f22_the_largest_ulpdu() {
    let ulpdu: Vec<u8> = (0..64768u32).map(|n| n as u8).collect();
    for markers in [false, true] {
        let fpdu = encode(&mut FpduEncoder::new(true, markers), &ulpdu);
        assert_eq!(fpdu, Half::new(markers).fpdu(&ulpdu));
        for steps in [fpdu.len(), 1448] {
            let got = decode(&mut FpduDecoder::new(true, markers), &fpdu, &[steps]).expect("a good FPDU");
            assert_eq!(got, [&ulpdu[..]]);
        }
    }
}

#[test]
fn f12_f17_what_of_a_marker_is_ignored() {
    let mut half = Half {
        pointer_xor: 3,
        reserved: 0xFFFF,
        ..Half::new(true)
    };
    let stream = [half.fpdu(&[0; 700]), half.fpdu(&[0; 300])].concat();
    assert_eq!(
        decode_whole(&stream, true, true).expect("good FPDUs"),
        [vec![0; 700], vec![0; 300]]
    );
}

#[test]
fn f19_wrong_fpduptr_with_a_good_crc_or_none() {
    for (size, pointer_xor) in [(20, 4), (700, 8), (700, 0xFFFC)] {
        let fpdu = Half {
            pointer_xor,
            ..Half::new(true)
        }
        .fpdu(&vec![0; size]);
        for crc in [true, false] {
            assert_eq!(cause_of(&fpdu, crc, true), Some(TerminateCause::MpaMarkerMismatch));
        }
    }
}

#[test]
fn f26_half_received() {
    for markers in [false, true] {
        let fpdu = encode(&mut FpduEncoder::new(true, markers), b"abcd");
        for at in [1, 2, 5, 11] {
            let mut decoder = FpduDecoder::new(true, markers);
            assert!(!decoder.half_received());
            assert!(
                decode(&mut decoder, &fpdu[..at], &[at])
                    .expect("nothing yet")
                    .is_empty()
            );
            assert!(decoder.half_received());
            assert_eq!(
                decode(&mut decoder, &fpdu[at..], &[99]).expect("a good FPDU"),
                [b"abcd"]
            );
            assert!(!decoder.half_received());
        }
    }
}

#[test]
fn f23_f24_f25_mulpdu_formula() {
    for (emss, without, with_markers) in [
        (1460, 1454, 1442),
        (1448, 1442, 1430),
        (8948, 8942, 8870),
        (536, 530, 522),
        (1461, 1454, 1442),
        (100, 128, 128),
        (0, 128, 128),
        (65535, 64768, 64768),
        (u32::MAX, 64768, 64768),
    ] {
        assert_eq!(
            (mulpdu_for_emss(emss, false), mulpdu_for_emss(emss, true)),
            (without, with_markers)
        );
    }
}

#[test]
fn f23_an_fpdu_of_mulpdu_octets_fits_the_segment() {
    for emss in (536..9001).step_by(61) {
        for markers in [false, true] {
            let mut encoder = FpduEncoder::new(true, markers);
            let ulpdu = vec![0; mulpdu_for_emss(emss, markers) as usize];
            assert!((0..200).all(|_| encode(&mut encoder, &ulpdu).len() <= emss as usize));
        }
    }
}

proptest! {
    #[test]
    fn what_is_encoded_is_decoded(
        ulpdus in proptest::collection::vec(proptest::collection::vec(any::<u8>(), 1..1500), 1..12),
        steps in proptest::collection::vec(1usize..2000, 1..20),
        crc: bool,
        markers: bool,
    ) {
        let mut encoder = FpduEncoder::new(crc, markers);
        let stream: Vec<u8> = ulpdus.iter().flat_map(|ulpdu| encode(&mut encoder, ulpdu)).collect();
        prop_assert_eq!(decode(&mut FpduDecoder::new(crc, markers), &stream, &steps), Ok(ulpdus));
    }

    #[test]
    fn any_octets_are_taken_or_refused(
        octets in proptest::collection::vec(any::<u8>(), 0..3000),
        steps in proptest::collection::vec(1usize..200, 1..20),
        crc: bool,
        markers: bool,
    ) {
        let got = decode(&mut FpduDecoder::new(crc, markers), &octets, &steps);
        if let Err(error) = got {
            prop_assert!([TerminateCause::MpaCrc, TerminateCause::MpaMarkerMismatch].contains(&error.cause));
        }
    }
}
