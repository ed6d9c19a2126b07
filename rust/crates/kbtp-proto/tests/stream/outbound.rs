//! What may be posted, how it is cut, when it completes, and how everything is given up once.

use std::sync::Arc;

use kbtp_proto::crc32c;
use kbtp_proto::known_crcs::KnownCrcs;
use kbtp_proto::mpa::RtrKind;
use kbtp_proto::stream::{Event, Flushed, Outgoing, Part, Payload, Piece, PostError, Work, WrKind};
use kbtp_proto::types::TerminateCause;

use crate::peer::{BASE_TO, End, STAG, inline, negotiated, wire};

fn send(wr_id: u64, payload: Payload) -> Work {
    Work::Send {
        wr_id,
        payload,
        invalidate_stag: None,
        solicited: false,
    }
}

fn read(end: &End, wr_id: u64, len: usize) -> Work {
    Work::Read {
        wr_id,
        sink: end.memory.span(vec![0; len]),
        source_stag: 9,
        source_to: 0,
    }
}

fn fetch_add(wr_id: u64) -> Work {
    Work::FetchAdd {
        wr_id,
        stag: 9,
        to: 0,
        add_data: 1,
        add_mask: 0,
    }
}

#[test]
fn d2_d10_a_message_is_cut_by_the_mulpdu_of_its_beginning() {
    let mut end = End::new(negotiated(), true, 128, None);
    let span = end.memory.span((0..220).collect());
    end.stream
        .post(send(
            1,
            Payload::from_iter([Piece::Span(span.part(0, 100)), Piece::Span(span.part(100, 120))]),
        ))
        .unwrap();
    let first = wire::see(&end.send_next().unwrap(), true);
    end.stream.set_mulpdu(64768);
    let second = wire::see(&end.send_next().unwrap(), true);
    assert_eq!(
        (first.payload.len(), first.last, first.u32_at(10), first.u32_at(14)),
        (110, false, 1, 0)
    );
    assert_eq!(
        (second.payload.len(), second.last, second.u32_at(10), second.u32_at(14)),
        (110, true, 1, 110)
    );
    assert_eq!([first.payload, second.payload].concat(), end.memory.region(span.region));
    assert_eq!(end.events(), [Event::SendCompleted { wr_id: 1 }]);
    assert!(!end.stream.wants_to_send());
}

#[test]
fn a_send_completes_when_its_last_fpdu_was_sent() {
    let mut end = End::new(negotiated(), true, 128, None);
    end.stream.post(send(1, inline(&[7; 200]))).unwrap();
    let (first, last) = (end.next_fpdu().unwrap(), end.next_fpdu().unwrap());
    end.sent(first);
    assert_eq!((end.events(), end.stream.outstanding()), (vec![], 1));
    end.sent(last);
    assert_eq!(
        (end.events(), end.stream.outstanding()),
        (vec![Event::SendCompleted { wr_id: 1 }], 0)
    );
}

#[test]
fn still_memory_is_sent_from_where_it_lies_and_other_memory_is_copied() {
    for still in [true, false] {
        let mut end = End::new(negotiated(), true, 8000, None);
        end.memory.0.borrow_mut().still = still;
        let span = end.memory.span(vec![1; 5000]);
        end.stream
            .post(Work::Write {
                wr_id: 1,
                payload: Payload::from_iter([Piece::Span(span)]),
                stag: 3,
                to: 4,
            })
            .unwrap();
        let out = end.next_fpdu().unwrap();
        assert_eq!(spans_of(&out), usize::from(still));
        let whole = end.octets_of(&out);
        assert_eq!(wire::see(&whole, true).payload, vec![1; 5000]);
        end.sent(out);
        assert_eq!(end.events(), [Event::WriteCompleted { wr_id: 1 }]);
    }
}

fn spans_of(out: &Outgoing) -> usize {
    let registered = |part: &Part<'_>| matches!(part, Part::Registered(_));
    out.parts().filter(registered).count()
}

#[test]
fn still_pieces_are_sent_from_where_they_lie_whatever_the_memory() {
    let mut end = End::new(negotiated(), true, 8000, None);
    end.memory.0.borrow_mut().still = false;
    let span = end.memory.span(vec![1; 5000]);
    end.stream
        .post(send(1, Payload::from_iter([Piece::Still(span)])))
        .unwrap();
    let out = end.next_fpdu().unwrap();
    assert_eq!(spans_of(&out), 1);
    assert_eq!(wire::see(&end.octets_of(&out), true).payload, vec![1; 5000]);
}

#[test]
fn what_may_change_is_copied_with_its_crc_whatever_the_memory() {
    let mut end = End::new(negotiated(), true, 8000, None);
    end.memory.0.borrow_mut().still = true;
    let span = end.memory.span(vec![1; 5000]);
    end.stream
        .post(send(1, Payload::from_iter([Piece::Changing(span)])))
        .unwrap();
    let out = end.next_fpdu().unwrap();
    assert_eq!(spans_of(&out), 0);
    end.memory.0.borrow_mut().octets[span.region.0 as usize] = vec![2; 5000];
    assert_eq!(wire::see(&end.octets_of(&out), true).payload, vec![1; 5000]);
}

#[test]
fn a_block_whose_crcs_are_known_is_not_read_for_them_again() {
    let mut end = End::new(negotiated(), true, 9000, None);
    let octets: Vec<u8> = (0..20000).map(|n| (n % 251) as u8).collect();
    let span = end.memory.span(octets.clone());
    let known = Arc::new(KnownCrcs::default());
    let sent = |end: &mut End| {
        let piece = Piece::Known(span, Arc::clone(&known));
        end.stream.post(send(1, Payload::from_iter([piece]))).unwrap();
        let mut fpdus = Vec::new();
        while let Some(out) = end.next_fpdu() {
            fpdus.push(end.octets_of(&out));
            end.sent(out);
        }
        fpdus
    };
    // `see` checks each CRC: the first time they are made, the second time they are known.
    for _ in 0..2 {
        let payloads: Vec<_> = sent(&mut end)
            .iter()
            .map(|fpdu| wire::see(fpdu, true).payload)
            .collect();
        assert_eq!(payloads.len(), 3);
        assert_eq!(payloads.concat(), octets);
    }
    // Should the block change all the same, the peer does not take it for what it was.
    end.memory.0.borrow_mut().octets[span.region.0 as usize][10] ^= 1;
    let damaged = sent(&mut end);
    let (body, crc) = damaged[0].split_at(damaged[0].len() - 4);
    assert_ne!(crc, crc32c::wire(crc32c::update(0, body)));
    let (body, crc) = damaged[1].split_at(damaged[1].len() - 4);
    assert_eq!(crc, crc32c::wire(crc32c::update(0, body)));
}

/// An FPDU of one span and one that is copied, and the octets of both.
fn two_fpdus(end: &mut End) -> (Outgoing, Vec<u8>, usize) {
    let span = end.memory.span((0..1500).map(|n| n as u8).collect());
    let write = Work::Write {
        wr_id: 1,
        payload: Payload::from_iter([Piece::Still(span)]),
        stag: 3,
        to: 4,
    };
    end.stream.post(write).unwrap();
    end.stream.post(send(2, inline(b"behind it"))).unwrap();
    let mut out = Outgoing::default();
    assert!(end.build_into(&mut out));
    let first_bytes = out.left_bytes();
    assert!(end.build_into(&mut out));
    assert!(!end.build_into(&mut out));
    let octets = end.octets_of(&out);
    (out, octets, first_bytes)
}

#[test]
fn whatever_part_the_system_takes_the_rest_is_next_and_work_completes_with_its_last_octet() {
    let all_bytes = two_fpdus(&mut End::new(negotiated(), true, 8000, None)).1.len();
    for taken_bytes in 0..=all_bytes {
        let mut end = End::new(negotiated(), true, 8000, None);
        let (mut out, octets, first_bytes) = two_fpdus(&mut end);
        end.stream.sent(&mut out, taken_bytes);
        assert_eq!(end.octets_of(&out), octets[taken_bytes..]);
        let due = [
            (first_bytes, Event::WriteCompleted { wr_id: 1 }),
            (all_bytes, Event::SendCompleted { wr_id: 2 }),
        ];
        let (done, open): (Vec<_>, Vec<_>) = due.into_iter().partition(|(bytes, _)| *bytes <= taken_bytes);
        let events = |due: Vec<(usize, Event)>| due.into_iter().map(|(_, event)| event).collect::<Vec<_>>();
        assert_eq!(end.events(), events(done));
        end.sent(out);
        assert_eq!(end.events(), events(open));
    }
}

#[test]
fn what_is_left_of_a_half_sent_fpdu_can_be_copied_before_its_memory_goes() {
    for taken_bytes in [0, 1, 700, 1530] {
        let mut end = End::new(negotiated(), true, 8000, None);
        let (mut out, octets, _) = two_fpdus(&mut end);
        end.stream.sent(&mut out, taken_bytes);
        let mut rest = Vec::new();
        while !out.is_empty() {
            out.copy_batch(&end.memory, &mut rest);
        }
        assert_eq!(rest, octets[taken_bytes..]);
    }
}

/// How many octets each `sendmsg` may take of all that `end` has to say, which is built at once.
fn batches_of(end: &mut End) -> Vec<usize> {
    let mut out = Outgoing::default();
    while end.build_into(&mut out) {}
    let mut batches = Vec::new();
    while !out.is_empty() {
        let bytes = out.batch_bytes();
        assert_eq!(out.batch().map(|part| part.length_bytes()).sum::<usize>(), bytes);
        batches.push(bytes);
        end.stream.sent(&mut out, bytes);
    }
    batches
}

/// Sends of 8, 9, 7, 12 and 16 octets: the second and the third have PAD.
fn post_five(end: &mut End) {
    for (wr_id, length) in [8, 9, 7, 12, 16].into_iter().enumerate() {
        end.stream.post(send(wr_id as u64, inline(&vec![1; length]))).unwrap();
    }
}

#[test]
fn an_fpdu_with_pad_has_a_sendmsg_of_its_own() {
    let mut end = End::new(negotiated(), true, 1454, None);
    post_five(&mut end);
    assert_eq!(batches_of(&mut end), [32, 36, 32, 36 + 40]);
    assert_eq!(end.events().len(), 5);
}

#[test]
fn without_crc_or_with_markers_nothing_is_kept_apart() {
    for (crc, tx_markers) in [(false, false), (true, true)] {
        let negotiated = kbtp_proto::mpa::Negotiated {
            crc,
            tx_markers,
            ..negotiated()
        };
        let mut end = End::new(negotiated, true, 1454, None);
        post_five(&mut end);
        assert_eq!(batches_of(&mut end).len(), 1);
    }
}

#[test]
fn an_fpdu_with_pad_stays_apart_whatever_part_of_it_the_system_takes() {
    let ends = [32, 68, 100, 176];
    for taken_bytes in 0..176 {
        let mut end = End::new(negotiated(), true, 1454, None);
        post_five(&mut end);
        let mut out = Outgoing::default();
        while end.build_into(&mut out) {}
        end.stream.sent(&mut out, taken_bytes);
        let next_end = ends.into_iter().find(|end| *end > taken_bytes).unwrap();
        assert_eq!(out.batch_bytes(), next_end - taken_bytes);
        assert_eq!(
            out.batch().map(|part| part.length_bytes()).sum::<usize>(),
            next_end - taken_bytes
        );
        let mut copy = Vec::new();
        out.copy_batch(&end.memory, &mut copy);
        assert_eq!((copy.len(), out.left_bytes()), (next_end - taken_bytes, 176 - next_end));
    }
}

#[test]
fn the_octets_that_make_a_long_payload_odd_are_a_segment_of_their_own() {
    let payload: Vec<u8> = (0..3301).map(|n| n as u8).collect();
    let mut end = End::new(negotiated(), true, 1454, None);
    let source = end.memory.add(payload.clone());
    end.memory.0.borrow_mut().granted.insert(77, (source, 0, true));
    let span = end.memory.span(payload.clone());
    end.stream
        .post(send(1, Payload::from_iter([Piece::Still(span)])))
        .unwrap();
    let write = Work::Write {
        wr_id: 2,
        payload: Payload::from_iter([Piece::Still(span)]),
        stag: 3,
        to: 4,
    };
    end.stream.post(write).unwrap();
    end.take(&wire::fpdu(&wire::read_request(1, 3301, 77, 0)));
    let mut seen = end.says();
    seen.sort_by_key(|seen| seen.opcode);
    for (opcode, sizes) in [
        (wire::WRITE, [1440, 1440, 420, 1]),
        (wire::READ_RESPONSE, [1440, 1440, 420, 1]),
        (wire::SEND, [1436, 1436, 428, 1]),
    ] {
        let of_it: Vec<_> = seen.iter().filter(|seen| seen.opcode == opcode).collect();
        assert_eq!(of_it.iter().map(|seen| seen.payload.len()).collect::<Vec<_>>(), sizes);
        assert_eq!(
            of_it.iter().flat_map(|seen| seen.payload.clone()).collect::<Vec<_>>(),
            payload
        );
        assert_eq!(
            of_it.iter().map(|seen| seen.last).collect::<Vec<_>>(),
            [false, false, false, true]
        );
    }
}

/// A Read Response of two FPDUs, and a Send behind it.
fn response(end: &mut End, size: u32) -> Outgoing {
    let region = end.memory.add((0..size).map(|n| (n * 7) as u8).collect());
    let granted = (region, BASE_TO, true);
    end.memory.0.borrow_mut().granted.insert(STAG, granted);
    end.hears(&[wire::read_request(1, size, STAG, BASE_TO)]);
    end.stream.post(send(2, inline(b"behind it"))).unwrap();
    let mut out = Outgoing::default();
    while end.build_into(&mut out) {}
    out
}

#[test]
fn a_response_is_sent_from_where_it_lies_only_if_its_source_stays_still() {
    for (size, watched) in [(2001, true), (2004, false), (900, true)] {
        let [copied, lent] = [false, true].map(|still| {
            let mut end = End::new(negotiated(), true, 1454, None);
            if still {
                end.stream.keep_sources_still();
            }
            if watched {
                end.stream.watch(STAG, BASE_TO, size);
            }
            let out = response(&mut end, size);
            (end.octets_of(&out), spans_of(&out), end.stream.moved(STAG, BASE_TO))
        });
        assert_eq!((&copied.0, copied.2), (&lent.0, lent.2));
        assert_eq!(copied.1, 0);
        assert_eq!(lent.1, if size > 1024 { 1 } else { 0 }, "short ones are copied");
        assert_eq!(watched, lent.2.is_some());
    }
}

#[test]
fn what_is_left_of_a_lent_response_can_be_kept_when_its_source_goes() {
    for taken_bytes in [0, 1, 700, 1475, 2100] {
        let mut end = End::new(negotiated(), true, 1454, None);
        end.stream.keep_sources_still();
        let mut out = response(&mut end, 2001);
        let octets = end.octets_of(&out);
        end.stream.sent(&mut out, taken_bytes);
        let batch_bytes = out.batch_bytes();
        out.keep_lent(&end.memory);
        assert_eq!(spans_of(&out), 0);
        assert_eq!(out.batch().map(|part| part.length_bytes()).sum::<usize>(), batch_bytes);
        assert_eq!(end.octets_of(&out), octets[taken_bytes.min(octets.len())..]);
        end.sent(out);
        assert_eq!(end.events(), [Event::SendCompleted { wr_id: 2 }]);
    }
}

#[test]
fn a_payload_that_is_partly_inline_is_copied_in_order() {
    let mut end = End::new(negotiated(), true, 1454, None);
    let span = end.memory.span(vec![2; 2000]);
    let mut payload = inline(&[1; 100]);
    payload.push(Piece::Span(span));
    payload.push(Piece::Span(span.part(0, 0)));
    end.stream.post(send(1, payload)).unwrap();
    let (first, second) = (end.next_fpdu().unwrap(), end.next_fpdu().unwrap());
    assert_eq!((spans_of(&first), spans_of(&second)), (0, 0), "the rest is short");
    let sent = [first, second]
        .map(|fpdu| wire::see(&end.octets_of(&fpdu), true).payload)
        .concat();
    assert_eq!(sent, [vec![1; 100], vec![2; 2000]].concat());
}

#[test]
fn m25_without_crc_the_field_is_there() {
    let mut end = End::new(
        kbtp_proto::mpa::Negotiated {
            crc: false,
            ..negotiated()
        },
        true,
        8000,
        None,
    );
    let span = end.memory.span(vec![1; 5001]);
    end.stream
        .post(send(1, Payload::from_iter([Piece::Span(span)])))
        .unwrap();
    end.stream.post(send(2, inline(b"y"))).unwrap();
    assert_eq!(end.says().len(), 2);
    end.receive(3, 4);
    end.take(&[&wire::fpdu(&wire::send(1, b"x"))[..24], b"junk"].concat());
    assert!(matches!(
        end.events()[..],
        [
            _,
            _,
            Event::Received {
                wr_id: 3,
                length: 1,
                ..
            }
        ]
    ));
}

#[test]
fn r24_ord_holds_reads_and_what_is_behind_them() {
    let mut end = End::new(kbtp_proto::mpa::Negotiated { ord: 1, ..negotiated() }, true, 1454, None);
    for wr_id in 0..3 {
        let work = read(&end, wr_id, 1);
        end.stream.post(work).unwrap();
    }
    end.stream.post(send(3, inline(b"last"))).unwrap();
    let mut done = Vec::new();
    for _ in 0..3 {
        let seen = end.says();
        assert_eq!(seen[0].opcode, wire::READ_REQUEST);
        let sink_stag = u32::from_be_bytes(seen[0].payload[..4].try_into().unwrap());
        done.extend(end.hears(&[wire::tagged(wire::READ_RESPONSE, sink_stag, 0, true, b"x")]));
    }
    assert_eq!(
        done[..3],
        [0, 1, 2].map(|wr_id| Event::ReadCompleted { wr_id, length: 1 })
    );
    assert_eq!(
        done[3..],
        [Event::SendCompleted { wr_id: 3 }],
        "it left behind the last request"
    );
    assert!(end.memory.0.borrow().lent.is_empty());
}

#[test]
fn r46_completions_come_in_order_of_posting() {
    let mut end = End::active();
    let work = read(&end, 1, 0);
    end.stream.post(work).unwrap();
    end.stream.post(send(2, inline(b"x"))).unwrap();
    end.says();
    assert_eq!(end.events(), []);
    let done = end.hears(&[wire::tagged(wire::READ_RESPONSE, 0, 0, true, b"")]);
    assert_eq!(
        done,
        [
            Event::ReadCompleted { wr_id: 1, length: 0 },
            Event::SendCompleted { wr_id: 2 }
        ]
    );
}

#[test]
fn what_cannot_leave_is_refused() {
    let mut end = End::new(kbtp_proto::mpa::Negotiated { ord: 0, ..negotiated() }, true, 1454, None);
    let work = read(&end, 1, 1);
    assert_eq!(end.stream.post(work), Err(PostError::OrdIsZero));
    assert_eq!(end.stream.post(fetch_add(1)), Err(PostError::OrdIsZero));
    let huge = kbtp_proto::memory::Span {
        len: u32::MAX,
        ..end.memory.span(vec![])
    };
    let payload = Payload::from_iter([
        Piece::Span(huge),
        Piece::Span(kbtp_proto::memory::Span { len: 1, ..huge }),
    ]);
    assert_eq!(end.stream.post(send(1, payload)), Err(PostError::TooLong(1 << 32)));
    assert!(!end.stream.wants_to_send() && end.stream.flush(&mut end.memory).is_empty());
}

#[test]
fn posting_after_the_end_says_so() {
    let mut end = End::active();
    end.hears(&[wire::on_queue(wire::TERMINATE, 2, 1, &[0x11, 0, 0, 0])]);
    assert_eq!(end.stream.post(send(1, inline(b""))), Err(PostError::Ended));
    let buffer = end.memory.span(vec![0]);
    assert_eq!(end.stream.post_receive(1, buffer), Err(PostError::Ended));
    assert_eq!(end.stream.received_terminate().unwrap().layer, 1);
    assert!(end.stream.ended() && end.send_next().is_none());
}

#[test]
fn r44_flush_gives_up_everything_outstanding_once() {
    let mut end = End::new(kbtp_proto::mpa::Negotiated { ord: 1, ..negotiated() }, true, 1454, None);
    end.stream.post(send(1, inline(b"done"))).unwrap();
    let work = read(&end, 2, 1);
    end.stream.post(work).unwrap();
    end.stream.post(send(3, inline(b"sent, but behind the read"))).unwrap();
    end.stream.post(fetch_add(4)).unwrap();
    end.stream
        .post(Work::Write {
            wr_id: 5,
            payload: inline(b"w"),
            stag: 9,
            to: 0,
        })
        .unwrap();
    end.stream
        .post(Work::Immediate {
            wr_id: 6,
            data: [0; 8],
            solicited: false,
        })
        .unwrap();
    end.receive(7, 1);
    end.receive(8, 1);
    end.says();
    assert_eq!(end.events(), [Event::SendCompleted { wr_id: 1 }]);
    assert_eq!(end.memory.0.borrow().lent.len(), 1);

    let kinds = [
        WrKind::Read,
        WrKind::Send,
        WrKind::Atomic,
        WrKind::Write,
        WrKind::Immediate,
        WrKind::Receive,
        WrKind::Receive,
    ];
    let expected: Vec<Flushed> = kinds
        .into_iter()
        .zip(2..)
        .map(|(kind, wr_id)| Flushed { wr_id, kind })
        .collect();
    assert_eq!(end.stream.flush(&mut end.memory), expected);
    assert!(end.memory.0.borrow().lent.is_empty());
    assert!(end.stream.flush(&mut end.memory).is_empty() && end.says().is_empty() && end.stream.ended());
    assert_eq!(end.hears(&[wire::send(1, b"late")]), []);
}

#[test]
fn an_fpdu_that_is_sent_after_flush_completes_nothing() {
    let mut end = End::active();
    end.stream.post(send(1, inline(b"x"))).unwrap();
    let fpdu = end.next_fpdu().unwrap();
    assert_eq!(
        end.stream.flush(&mut end.memory),
        [Flushed {
            wr_id: 1,
            kind: WrKind::Send
        }]
    );
    end.sent(fpdu);
    assert_eq!(end.events(), []);
}

#[test]
fn e17_the_readiness_leaves_first_and_is_nobodys() {
    for (kind, opcode, msn) in [
        (RtrKind::SEND, wire::SEND, 2),
        (RtrKind::WRITE, wire::WRITE, 1),
        (RtrKind::READ, wire::READ_REQUEST, 1),
    ] {
        let mut end = End::new(
            kbtp_proto::mpa::Negotiated {
                rtr: kind,
                ord: 0,
                ..negotiated()
            },
            true,
            1454,
            None,
        );
        end.stream.post(send(1, inline(b"x"))).unwrap();
        let seen = end.says();
        assert_eq!((seen.len(), seen[0].opcode, seen[1].u32_at(10)), (2, opcode, msn));
        assert_eq!(end.events(), [Event::SendCompleted { wr_id: 1 }]);
        if kind == RtrKind::READ {
            assert_eq!(end.hears(&[wire::tagged(wire::READ_RESPONSE, 0, 0, true, b"")]), []);
            assert!(!end.stream.failed());
        }
    }
}

#[test]
fn m21_the_passive_side_waits_for_a_good_fpdu() {
    let mut end = End::new(negotiated(), false, 1454, None);
    end.stream.post(send(1, inline(b"x"))).unwrap();
    assert!(!end.stream.wants_to_send() && end.send_next().is_none());
    end.hears(&[wire::write(0, 0, b"")]);
    assert!(end.stream.wants_to_send() && end.says().len() == 1);

    let mut silent = End::new(negotiated(), false, 1454, None);
    silent.stream.terminate(TerminateCause::LocalCatastrophic);
    assert!(silent.stream.ended() && silent.send_next().is_none() && silent.stream.sent_cause().is_none());
}

#[test]
fn r40_nothing_follows_a_terminate() {
    let mut end = End::new(negotiated(), true, 128, None);
    end.stream.post(send(1, inline(&[0; 500]))).unwrap();
    end.send_next();
    end.stream.terminate(TerminateCause::LocalCatastrophic);
    end.stream.terminate(TerminateCause::MpaLocalCatastrophic);
    assert!(!end.stream.terminate_sent());
    assert_eq!(end.terminates(), (0, 0, 0));
    assert_eq!(end.stream.sent_cause(), Some(TerminateCause::LocalCatastrophic));
}

#[test]
fn e11_a_failed_negotiation_says_so_and_nothing_else() {
    let settled = kbtp_proto::mpa::Negotiated {
        failure: Some(TerminateCause::MpaInsufficientIrd),
        ..negotiated()
    };
    let mut end = End::new(settled, true, 1454, None);
    assert_eq!(end.terminates(), (2, 0, 6));
    let events = end.events();
    let [Event::Failed { error }] = &events[..] else {
        panic!("{events:?}")
    };
    assert_eq!(error.message, "the MPA Reply (IRD 4, ORD 4) does not fit this side");
}

#[test]
fn r13_r15_responses_take_turns_with_work() {
    let mut end = End::active();
    end.hears(&[
        wire::read_request(1, 4, STAG, BASE_TO),
        wire::atomic_request(2, 0, 77, STAG, BASE_TO + 8, [1, 0, 0, u64::MAX]),
    ]);
    end.stream.post(send(1, inline(b"a"))).unwrap();
    end.stream.post(send(2, inline(b"b"))).unwrap();
    let seen = end.says();
    assert_eq!(
        seen.iter().map(|message| message.opcode).collect::<Vec<_>>(),
        [wire::READ_RESPONSE, wire::SEND, wire::ATOMIC_RESPONSE, wire::SEND]
    );
    assert_eq!(
        (&seen[0].payload[..], &seen[0].header[2..6]),
        (&[0, 1, 2, 3][..], &7u32.to_be_bytes()[..])
    );
    assert_eq!(seen[2].payload[..4], 77u32.to_be_bytes());
}

#[test]
fn r23_a_read_that_fails_half_way_quotes_what_was_left() {
    let mut end = End::new(negotiated(), true, 128, None);
    end.hears(&[wire::read_request(1, 200, STAG, BASE_TO)]);
    assert_eq!(end.send_next().unwrap().len(), 2 + 128 + 2 + 4);
    end.memory.revoke(STAG);
    let seen = end.says();
    let [terminate] = &seen[..] else { panic!("{seen:?}") };
    let request = wire::read_request(1, 200, STAG, BASE_TO);
    let expected = [
        &[0x01, 0x00, 0xE0, 0x00, 0, 46][..],
        &request[..18],
        &wire::read_header(7, 100 + 114, 200 - 114, STAG, BASE_TO + 114),
    ];
    assert_eq!(terminate.payload, expected.concat());
}

#[test]
fn r25_more_requests_than_ird_end_the_stream() {
    let mut end = End::active();
    let requests: Vec<_> = (1..=5).map(|msn| wire::read_request(msn, 1, STAG, BASE_TO)).collect();
    assert_eq!(end.refuses(&requests), (1, 2, 2));
}
