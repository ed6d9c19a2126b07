//! The CRC of what the peer moves in watched memory is that of the octets that are there, however they came or went.

use kbtp_proto::memory::RegionId;
use kbtp_proto::stream::Moved;
use proptest::prelude::*;

use crate::inbound::read_directly;
use crate::peer::{BASE_TO, End, Memory, STAG, negotiated, wire};

const REGION_BYTES: usize = 40_000;

fn end_with(octets: Vec<u8>) -> End {
    let mut end = End::active();
    end.memory = Memory::new(octets);
    end
}

fn counting(length: usize) -> Vec<u8> {
    (0..length)
        .map(|at| (at as u8).wrapping_mul(7) ^ (at >> 8) as u8)
        .collect()
}

fn crc_of(octets: &[u8]) -> u32 {
    u32::from_le_bytes(wire::crc(octets))
}

/// FPDUs of Writes of `data` to `to`, cut after `segment_bytes`, two messages if `two`.
fn writes(data: &[u8], to: u64, segment_bytes: usize, two: bool) -> Vec<u8> {
    let count = data.len().div_ceil(segment_bytes);
    let segment = |(number, part): (usize, &[u8])| {
        let last = number + 1 == count || two && number == count / 2;
        let to = to + (number * segment_bytes) as u64;
        wire::fpdu(&wire::tagged(wire::WRITE, STAG, to, last, part))
    };
    data.chunks(segment_bytes).enumerate().flat_map(segment).collect()
}

proptest! {
    #[test]
    fn what_is_written(
        length in 1usize..30_000, segment_bytes in prop_oneof![1usize..2000, 2000usize..20_000], offset in 0usize..5000,
        most in 1usize..20_000, two in any::<bool>(),
    ) {
        let mut end = end_with(vec![0; REGION_BYTES]);
        let to = BASE_TO + offset as u64;
        end.stream.watch(STAG, to, length as u32 + 9);
        let octets = writes(&counting(length), to, segment_bytes, two);
        read_directly(&mut end, &octets, 64, most);
        prop_assert!(!end.stream.failed());
        let there = &end.memory.region(RegionId(0))[offset..offset + length];
        prop_assert_eq!(there, counting(length));
        prop_assert_eq!(end.stream.moved(STAG, to), Some(Moved { length: length as u32, crc: crc_of(there) }));
    }

    #[test]
    fn what_is_read(length in 1usize..30_000, first in 1usize..30_000, mulpdu in 128u32..20_000) {
        let mut end = end_with(counting(REGION_BYTES));
        end.stream.set_mulpdu(mulpdu);
        end.stream.watch(STAG, BASE_TO + 100, length as u32);
        let first = first.min(length);
        let requests = [(1, 0, first), (2, first, length - first)];
        for (msn, at, size) in requests.into_iter().filter(|(_, _, size)| *size > 0) {
            end.hears(&[wire::read_request(msn, size as u32, STAG, BASE_TO + 100 + at as u64)]);
        }
        let sent: Vec<u8> = end.says().into_iter().flat_map(|seen| seen.payload).collect();
        prop_assert_eq!(&sent, &counting(REGION_BYTES)[100..100 + length]);
        let moved = Moved { length: length as u32, crc: crc_of(&sent) };
        prop_assert_eq!(end.stream.moved(STAG, BASE_TO + 100), Some(moved));
    }
}

#[test]
fn a_wrong_crc_ends_the_stream_of_a_watched_write_too() {
    for length in [40, 5000] {
        let mut end = end_with(vec![0; REGION_BYTES]);
        end.stream.watch(STAG, BASE_TO, length);
        let mut octets = writes(&counting(length as usize), BASE_TO, 6000, false);
        octets[30] ^= 1;
        end.take(&octets);
        assert_eq!(end.terminates(), (2, 0, 2));
        assert_eq!(end.stream.moved(STAG, BASE_TO), Some(Moved { length: 0, crc: 0 }));
    }
}

#[test]
fn nothing_is_known_without_crcs_or_with_markers() {
    let mut settled = negotiated();
    settled.crc = false;
    let mut end = End::new(settled, true, 1454, None);
    end.stream.watch(STAG, BASE_TO, 40);
    end.hears(&[wire::write(STAG, BASE_TO, &[1; 40])]);
    assert_eq!(end.stream.moved(STAG, BASE_TO), None);

    let mut settled = negotiated();
    settled.tx_markers = true;
    let mut end = End::new(settled, true, 1454, None);
    end.stream.watch(STAG, BASE_TO, 40);
    end.hears(&[wire::read_request(1, 40, STAG, BASE_TO)]);
    assert!(end.send_next().is_some());
    assert_eq!(end.stream.moved(STAG, BASE_TO), None);
}
