//! Whatever a peer sends, nothing panics and only memory that it may write changes.
//!
//! `Memory` panics by itself for a span that is not wholly in its region.

use kbtp_proto::fpdu::FpduEncoder;
use kbtp_proto::mpa::Negotiated;
use kbtp_proto::stream::{Event, Work};
use proptest::prelude::*;

use crate::peer::{BASE_TO, End, STAG, negotiated, wire};

/// A stream with work outstanding.
fn busy(settled: Negotiated, active: bool) -> End {
    let mut end = End::new(settled, active, 1454, None);
    for wr_id in 0..3 {
        end.receive(wr_id, 48);
    }
    let sink = end.memory.span(vec![0; 32]);
    end.stream
        .post(Work::Read {
            wr_id: 3,
            sink,
            source_stag: 1,
            source_to: 0,
        })
        .unwrap();
    end.stream
        .post(Work::FetchAdd {
            wr_id: 4,
            stag: 1,
            to: 0,
            add_data: 1,
            add_mask: 0,
        })
        .unwrap();
    while end.send_next().is_some() {}
    end
}

fn check(mut end: End) {
    let sent: Vec<Vec<u8>> = std::iter::from_fn(|| end.send_next()).collect();
    let events = end.events();
    let failures = events
        .iter()
        .filter(|event| matches!(event, Event::Failed { .. }))
        .count();
    let ends = failures
        + events
            .iter()
            .filter(|event| matches!(event, Event::TerminateReceived { .. }))
            .count();
    assert_eq!(ends, usize::from(end.stream.failed()));
    assert_eq!(sent.iter().filter(|fpdu| fpdu[3] == 0x47).count(), failures);
    if end.stream.failed() {
        assert!(end.send_next().is_none() && end.stream.direct(&mut end.memory).is_none());
    }
    end.stream.flush(&mut end.memory);
    assert!(end.memory.0.borrow().lent.is_empty());
}

fn small() -> impl Strategy<Value = u32> {
    prop_oneof![4 => 0u32..5, 1 => Just(0x7FFF_FFFF), 1 => Just(u32::MAX)]
}

fn stags() -> impl Strategy<Value = u32> {
    prop_oneof![Just(STAG), Just(0xABCD_0001), small()]
}

fn offsets() -> impl Strategy<Value = u64> {
    prop_oneof![
        0xFF0u64..0x1110,
        0u64..16,
        Just(u64::MAX),
        Just(u64::MAX - 7),
        Just(1 << 63),
        any::<u64>()
    ]
}

/// The two octets of control, most often plausible ones.
fn controls() -> impl Strategy<Value = (u8, u8)> {
    prop_oneof![
        1 => any::<(u8, u8)>(),
        6 => (prop_oneof![Just(0x01u8), Just(0x41), Just(0x81), Just(0xC1)], 0x40u8..0x4C),
    ]
}

fn payloads() -> impl Strategy<Value = Vec<u8>> {
    let read = (stags(), offsets(), small(), stags(), offsets())
        .prop_map(|(sink, sink_to, size, source, source_to)| wire::read_header(sink, sink_to, size, source, source_to));
    let atomic = (small(), small(), stags(), offsets()).prop_map(|(operation, request, stag, to)| {
        wire::atomic_request(1, operation, request, stag, to, [1, 0, 0, u64::MAX]).split_off(18)
    });
    let response =
        (small(), offsets()).prop_map(|(request, value)| wire::atomic_response(1, request, value).split_off(18));
    let long = (2000usize..9000).prop_map(|size| vec![7; size]);
    prop_oneof![4 => prop::collection::vec(any::<u8>(), 0..80), 2 => read, 2 => atomic, 2 => response, 1 => long]
}

/// A segment that looks right enough to get past some of the checks.
fn plausible_ulpdus() -> impl Strategy<Value = Vec<u8>> {
    let numbers = (stags(), small(), 0u32..4, prop_oneof![small(), 0u32..91]);
    (controls(), numbers, stags(), offsets(), payloads()).prop_map(|((first, control), numbers, stag, to, payload)| {
        let mut ulpdu = vec![first, control];
        if first & 0x80 != 0 {
            ulpdu.extend(stag.to_be_bytes());
            ulpdu.extend(to.to_be_bytes());
        } else {
            let (ulp_word, qn, msn, mo) = (numbers.0, numbers.2, numbers.1, numbers.3);
            [ulp_word, qn, msn, mo]
                .iter()
                .for_each(|number| ulpdu.extend(number.to_be_bytes()));
        }
        ulpdu.extend(payload);
        ulpdu
    })
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(500))]

    #[test]
    fn s12_plausible_segments(
        ulpdus in prop::collection::vec(plausible_ulpdus(), 1..7),
        markers: bool,
        active: bool,
        step in 1usize..9000,
    ) {
        let mut end = busy(Negotiated { rx_markers: markers, ..negotiated() }, active);
        let mut encoder = FpduEncoder::new(true, markers);
        let mut octets = Vec::new();
        ulpdus.iter().for_each(|ulpdu| encoder.encode(&[ulpdu], &mut octets));
        octets.chunks(step).for_each(|part| end.take(part));
        check(end);
    }

    #[test]
    fn s12_arbitrary_octets(
        octets in prop::collection::vec(any::<u8>(), 0..9000),
        markers: bool,
        crc: bool,
        step in 1usize..9000,
    ) {
        let mut end = busy(Negotiated { rx_markers: markers, crc, ..negotiated() }, true);
        octets.chunks(step).for_each(|part| end.take(part));
        check(end);
    }

    #[test]
    fn s12_mutated_good_octets(
        changes in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 0..4),
        step in 1usize..600,
    ) {
        let good = [
            wire::send(1, b"hello"),
            wire::write(STAG, BASE_TO, b"world"),
            wire::read_request(1, 200, STAG, BASE_TO),
            wire::atomic_request(2, 0, 1, STAG, BASE_TO, [1, 0, 0, u64::MAX]),
            wire::tagged(wire::READ_RESPONSE, 0xABCD_0001, 0, true, &[0; 32]),
            wire::atomic_response(1, 0, 5),
            wire::on_queue(wire::IMM, 0, 2, &[0; 8]),
            wire::send(3, b"bye"),
        ];
        let mut octets = good.map(|ulpdu| wire::fpdu(&ulpdu)).concat();
        for (index, octet) in &changes {
            let at = index.index(octets.len());
            octets[at] = *octet;
        }
        let mut end = busy(Negotiated { crc: false, ..negotiated() }, true);
        octets.chunks(step).for_each(|part| end.take(part));
        prop_assert!(!changes.is_empty() || !end.stream.failed());
        check(end);
    }

    #[test]
    fn f20_f21_any_split_gives_the_same_events(cuts in prop::collection::vec(1usize..4000, 1..50), markers: bool) {
        let mut encoder = FpduEncoder::new(true, markers);
        let mut octets = Vec::new();
        for n in 1..40u32 {
            let (msn, text) = (2 * n - 1, vec![n as u8; 3 * n as usize]);
            for ulpdu in [
                wire::part_of_send(msn, 0, false, &text),
                wire::write(STAG, BASE_TO + u64::from(n), &text[..n as usize]),
                wire::part_of_send(msn, 3 * n, true, &vec![7; 97 * n as usize]),
                wire::on_queue(wire::IMM, 0, msn + 1, &[n as u8; 8]),
            ] {
                encoder.encode(&[&ulpdu], &mut octets);
            }
        }
        encoder.encode(&[&wire::send(1, b"")], &mut octets);
        let outcome = |cuts: &[usize]| {
            let mut end = End::new(Negotiated { rx_markers: markers, ..negotiated() }, true, 1454, None);
            for wr_id in 0..100 {
                end.receive(wr_id, 4000);
            }
            let (mut rest, mut cuts) = (&octets[..], cuts.iter().cycle());
            while !rest.is_empty() {
                let (part, after) = rest.split_at((*cuts.next().unwrap()).min(rest.len()));
                end.take(part);
                rest = after;
            }
            let said = std::iter::from_fn(|| end.send_next()).collect::<Vec<_>>();
            (end.events(), said, end.memory.0.borrow().octets.clone())
        };
        let whole = outcome(&[usize::MAX]);
        prop_assert_eq!((whole.0.len(), whole.1.len()), (2 * 39 + 1, 1));
        prop_assert!(outcome(&cuts) == whole);
    }
}
