//! What a segment must be like, and long FPDUs that come in pieces.

use kbtp_proto::mpa::{Negotiated, RtrKind};
use kbtp_proto::stream::{Event, Work};

use crate::peer::{BASE_TO, End, STAG, inline, negotiated, wire};

fn big_end(len: usize) -> End {
    let mut end = End::active();
    end.memory = crate::peer::Memory::new(vec![0; len]);
    end
}

fn failed_with(events: &[Event], cause: (u8, u8, u8)) {
    let [Event::Failed { error }] = events else {
        panic!("{events:?}")
    };
    assert_eq!(error.cause.value(), cause);
}

/// Hand `octets` over as a caller does that reads straight into memory: `direct` first, `staging` octets beside it.
pub(crate) fn read_directly(end: &mut End, mut octets: &[u8], staging: usize, most: usize) -> usize {
    let mut direct_reads = 0;
    while !octets.is_empty() {
        let direct = end.stream.direct(&mut end.memory);
        let room = direct.map_or(0, |span| span.len as usize);
        let (came, rest) = octets.split_at(octets.len().min(room + staging).min(most));
        let (straight, staged) = came.split_at(room.min(came.len()));
        if let Some(span) = direct {
            direct_reads += 1;
            end.memory.copy_in(span, straight);
            end.stream.direct_received(straight.len() as u32, &end.memory);
        }
        end.take(staged);
        octets = rest;
    }
    direct_reads
}

#[test]
fn a_long_write_is_read_straight_into_memory() {
    let payload: Vec<u8> = (0..60_001).map(|at| (at * 7) as u8).collect();
    let octets = wire::fpdu(&wire::write(STAG, BASE_TO + 10, &payload));
    for most in [usize::MAX, 5000, 1] {
        let mut end = big_end(70_000);
        end.receive(1, 8);
        let both = [&octets[..], &wire::fpdu(&wire::send(1, b"done"))].concat();
        assert!(read_directly(&mut end, &both, 64, most) > 0);
        let region = end.memory.0.borrow().octets[0].clone();
        assert_eq!(region[10..60_011], payload);
        assert!(region[..10].iter().chain(&region[60_011..]).all(|octet| *octet == 0));
        assert!(matches!(
            end.events()[..],
            [Event::Received {
                wr_id: 1,
                length: 4,
                ..
            }]
        ));
        assert!(end.stream.receive_eof());
    }
}

#[test]
fn long_sends_and_read_responses_are_read_straight_into_their_buffers() {
    let mut end = big_end(16);
    let buffer = end.receive(1, 40_000);
    let sink = end.memory.span(vec![0; 30_000]);
    end.stream
        .post(Work::Read {
            wr_id: 2,
            sink,
            source_stag: 9,
            source_to: 9,
        })
        .unwrap();
    let request = end.says().remove(0);
    let sink_stag = u32::from_be_bytes(request.payload[..4].try_into().unwrap());
    let octets = [
        wire::fpdu(&wire::part_of_send(1, 0, false, &[1; 20_000])),
        wire::fpdu(&wire::tagged(wire::READ_RESPONSE, sink_stag, 0, false, &[3; 10_000])),
        wire::fpdu(&wire::part_of_send(1, 20_000, true, &[2; 20_000])),
        wire::fpdu(&wire::tagged(
            wire::READ_RESPONSE,
            sink_stag,
            10_000,
            true,
            &[4; 20_000],
        )),
    ]
    .concat();
    assert!(read_directly(&mut end, &octets, 64, usize::MAX) >= 4);
    assert_eq!(
        end.memory.region(buffer.region),
        [vec![1; 20_000], vec![2; 20_000]].concat()
    );
    assert_eq!(
        end.memory.region(sink.region),
        [vec![3; 10_000], vec![4; 20_000]].concat()
    );
    assert_eq!(
        end.events(),
        [
            Event::Received {
                wr_id: 1,
                length: 40_000,
                invalidated_stag: None,
                solicited: false
            },
            Event::ReadCompleted {
                wr_id: 2,
                length: 30_000
            },
        ]
    );
}

#[test]
fn f6_a_bad_crc_of_a_long_fpdu_delivers_nothing() {
    let mut octets = wire::fpdu(&wire::send(1, &[1; 10_000]));
    octets[5000] ^= 1;
    for direct in [false, true] {
        let mut end = big_end(16);
        end.receive(1, 10_000);
        if direct {
            read_directly(&mut end, &octets, 64, usize::MAX);
        } else {
            octets.chunks(3000).for_each(|part| end.take(part));
        }
        failed_with(&end.events(), (2, 0, 2));
        assert_eq!(end.terminates(), (2, 0, 2));
    }
}

#[test]
fn what_is_wrong_with_a_long_fpdu_is_said_after_its_crc() {
    let mut octets = wire::fpdu(&wire::write(0xBAD, BASE_TO, &[1; 10_000]));
    let mut end = big_end(16);
    let (almost, last) = octets.split_at(octets.len() - 1);
    end.take(almost);
    assert!(!end.stream.failed() && end.stream.direct(&mut end.memory).is_none());
    end.take(last);
    let events = end.events();
    failed_with(&events, (1, 1, 0));
    let terminate = end.says().remove(0);
    assert_eq!(terminate.payload[4..6], 10_014u16.to_be_bytes());
    assert_eq!(terminate.payload[6..], octets[2..16]);

    *octets.last_mut().unwrap() ^= 1;
    let mut other = big_end(16);
    octets.chunks(4000).for_each(|part| other.take(part));
    failed_with(&other.events(), (2, 0, 2));
}

#[test]
fn d32_a_revocation_bites_within_a_long_fpdu() {
    let octets = wire::fpdu(&wire::write(STAG, BASE_TO, &[1; 20_000]));
    for direct in [false, true] {
        let mut end = big_end(20_000);
        end.take(&octets[..5000]);
        end.memory.revoke(STAG);
        if direct {
            assert_eq!(end.stream.direct(&mut end.memory), None);
        }
        end.take(&octets[5000..]);
        failed_with(&end.events(), (1, 1, 0));
        assert!(end.memory.0.borrow().octets[0][4984..].iter().all(|octet| *octet == 0));
    }
}

#[test]
fn nothing_is_placed_once_the_stream_has_ended() {
    let octets = wire::fpdu(&wire::write(STAG, BASE_TO, &[1; 20_000]));
    let mut end = big_end(20_000);
    end.take(&octets[..5000]);
    end.stream.flush(&mut end.memory);
    assert_eq!(end.stream.direct(&mut end.memory), None);
    end.take(&octets[5000..]);
    assert!(end.memory.0.borrow().octets[0][4984..].iter().all(|octet| *octet == 0));
    assert_eq!(end.events(), []);
}

#[test]
fn a_long_terminate_is_understood() {
    let info = [&[0x11, 1, 0xC0, 0, 0, 46][..], &wire::write(1, 2, b""), &[0; 5000]].concat();
    let octets = wire::fpdu(&wire::on_queue(wire::TERMINATE, 2, 1, &info));
    let mut end = End::active();
    octets.chunks(1000).for_each(|part| end.take(part));
    let events = end.events();
    let [Event::TerminateReceived { info }] = &events[..] else {
        panic!("{events:?}")
    };
    assert_eq!(
        (info.layer, info.etype, info.code, info.ddp_segment_length),
        (1, 1, 1, Some(46))
    );
    assert_eq!(info.ddp_header, wire::write(1, 2, b""));
}

#[test]
fn d22_d23_d24_msn_mo_and_size() {
    let cases: [(Vec<u8>, (u8, u8, u8)); 5] = [
        (wire::send(2, b"x"), (1, 2, 3)),
        (wire::part_of_send(1, 4, true, b"x"), (1, 2, 4)),
        (wire::send(1, &[0; 65]), (1, 2, 5)),
        (wire::send(1, &[0; 5000]), (1, 2, 5)),
        (wire::on_queue(wire::READ_REQUEST, 1, 1, &[0; 4000]), (0, 2, 0xFF)),
    ];
    for (ulpdu, cause) in cases {
        for split in [usize::MAX, 100] {
            let mut end = End::active();
            end.receive(1, 64);
            wire::fpdu(&ulpdu).chunks(split).for_each(|part| end.take(part));
            assert_eq!(end.terminates(), cause);
        }
    }
    assert_eq!(End::active().refuses(&[wire::send(1, b"")]), (1, 2, 2), "no buffer");
}

#[test]
fn a_message_inside_another_is_refused() {
    let mut end = End::active();
    end.receive(1, 64);
    let immediate = wire::on_queue(wire::IMM, 0, 1, &[0; 8]);
    assert_eq!(
        end.refuses(&[wire::part_of_send(1, 0, false, b"a"), immediate]),
        (0, 2, 6)
    );
    let half = wire::tagged(wire::WRITE, STAG, BASE_TO, false, b"a");
    assert_eq!(
        End::active().refuses(&[half.clone(), wire::tagged(wire::READ_RESPONSE, 1, 0, true, b"")]),
        (0, 2, 6)
    );
    assert_eq!(
        End::active().refuses(&[half, wire::write(STAG + 1, BASE_TO, b"b")]),
        (1, 1, 0)
    );
}

#[test]
fn r31_r32_send_with_invalidate() {
    let send = |msn, stag| {
        let header = wire::Untagged {
            opcode: wire::SEND_INV,
            ulp_word: stag,
            qn: 0,
            msn,
            mo: 0,
            last: true,
        };
        wire::untagged(&header, b"bye")
    };
    let mut end = End::active();
    end.receive(1, 8);
    end.receive(2, 8);
    assert_eq!(
        end.hears(&[send(1, STAG)]),
        [Event::Received {
            wr_id: 1,
            length: 3,
            invalidated_stag: Some(STAG),
            solicited: false
        }]
    );
    assert_eq!(end.refuses(&[send(2, STAG)]), (0, 1, 9));
}

#[test]
fn read_responses_must_be_the_ones_due() {
    let ask = || {
        let mut end = End::active();
        let sink = end.memory.span(vec![0; 4]);
        end.stream
            .post(Work::Read {
                wr_id: 1,
                sink,
                source_stag: 9,
                source_to: 0,
            })
            .unwrap();
        let request = end.says().remove(0);
        (end, u32::from_be_bytes(request.payload[..4].try_into().unwrap()))
    };
    let response = |stag, to, payload: &[u8]| wire::tagged(wire::READ_RESPONSE, stag, to, true, payload);
    assert_eq!(
        End::active().refuses(&[response(1, 0, b"x")]),
        (1, 1, 0),
        "nobody asked"
    );
    for (stag, to, payload, cause) in [
        (1, 0, &b"wxyz"[..], (1, 1, 0)),
        (0, 1, b"wxy", (1, 1, 1)),
        (0, 0, b"vwxyz", (1, 1, 1)),
        (0, 0, b"wxy", (1, 1, 1)),
    ] {
        let (mut end, sink_stag) = ask();
        assert_eq!(
            end.refuses(&[response(sink_stag.wrapping_add(stag), to, payload)]),
            cause
        );
    }
}

#[test]
fn x29_atomic_responses_must_be_the_ones_due() {
    let ask = || {
        let mut end = End::active();
        end.stream
            .post(Work::FetchAdd {
                wr_id: 1,
                stag: 9,
                to: 0,
                add_data: 1,
                add_mask: 0,
            })
            .unwrap();
        end.says();
        end
    };
    assert_eq!(End::active().refuses(&[wire::atomic_response(1, 0, 5)]), (1, 2, 2));
    assert_eq!(ask().refuses(&[wire::atomic_response(1, 1, 5)]), (0, 2, 0xFF));
    assert_eq!(
        ask().hears(&[wire::atomic_response(1, 0, 5)]),
        [Event::AtomicCompleted { wr_id: 1, value: 5 }]
    );
}

#[test]
fn x16_atomics_are_executed_in_host_order() {
    let mut end = End::active();
    let region = kbtp_proto::memory::RegionId(0);
    let word = kbtp_proto::memory::Span {
        region,
        offset: 8,
        len: 8,
    };
    end.memory.copy_in(word, &40u64.to_ne_bytes());
    end.hears(&[
        wire::atomic_request(1, 0, 5, STAG, BASE_TO + 8, [2, 0, 0, u64::MAX]),
        wire::atomic_request(2, 2, 6, STAG, BASE_TO + 8, [7, u64::MAX, 42, u64::MAX]),
    ]);
    let values: Vec<Vec<u8>> = end
        .says()
        .into_iter()
        .map(|message| message.payload[4..].to_vec())
        .collect();
    assert_eq!(values, [40u64.to_be_bytes(), 42u64.to_be_bytes()]);
    assert_eq!(end.memory.region(region)[8..16], 7u64.to_ne_bytes());
    assert_eq!(
        end.refuses(&[wire::atomic_request(3, 0, 7, STAG, BASE_TO + 1, [1, 0, 0, 0])]),
        (0, 2, 7)
    );
}

#[test]
fn e23_the_send_readiness_uses_no_buffer() {
    let settled = Negotiated {
        rtr: RtrKind::all(),
        ..negotiated()
    };
    let mut end = End::new(settled, false, 1454, None);
    assert_eq!(end.hears(&[wire::send(1, b"")]), []);
    assert!(!end.stream.failed());
    end.receive(1, 8);
    end.receive(2, 8);
    let received = |wr_id, length| Event::Received {
        wr_id,
        length,
        invalidated_stag: None,
        solicited: false,
    };
    assert_eq!(
        end.hears(&[wire::send(2, b""), wire::send(3, b"x")]),
        [received(1, 0), received(2, 1)]
    );
}

#[test]
fn eof_is_whole_only_between_messages() {
    let mut whole = End::active();
    whole.receive(1, 8);
    whole.hears(&[wire::send(1, b"x")]);
    assert!(whole.stream.receive_eof() && !whole.stream.failed());
    whole
        .stream
        .post(Work::Send {
            wr_id: 2,
            payload: inline(b"x"),
            invalidate_stag: None,
            solicited: false,
        })
        .unwrap();
    assert_eq!(
        (whole.says().len(), whole.hears(&[wire::send(2, b"late")]).len()),
        (1, 1)
    );

    let long = wire::fpdu(&wire::write(STAG, BASE_TO, &[0; 4000]));
    for octets in [
        wire::fpdu(&wire::send(1, b"x"))[..27].to_vec(),
        wire::fpdu(&wire::part_of_send(1, 0, false, b"x")),
        wire::fpdu(&wire::tagged(wire::WRITE, STAG, BASE_TO, false, b"x")),
        long[..1].to_vec(),
        long[..3000].to_vec(),
        long[..long.len() - 1].to_vec(),
    ] {
        let mut end = End::active();
        end.receive(1, 8);
        end.take(&octets);
        assert!(!end.stream.receive_eof());
    }
}
