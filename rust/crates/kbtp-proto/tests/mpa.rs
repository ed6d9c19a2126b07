//! MPA start-up: checklist M (RFC 5044 7.1) and E (RFC 6581). The frames are written out by hand here.

use kbtp_proto::mpa::{
    ActiveStartup, Answer, MpaOptions, MpaRejected, MpaStartupError, Negotiated, PassiveStartup, PeerRequest, RtrKind,
};
use kbtp_proto::types::TerminateCause;
use proptest::prelude::*;

const REQUEST: &[u8] = b"MPA ID Req Frame";
const REPLY: &[u8] = b"MPA ID Rep Frame";
const M: u8 = 0x80;
const C: u8 = 0x40;
const R: u8 = 0x20;
const S: u8 = 0x10;
const A: u32 = 0x8000_0000;
const B: u32 = 0x4000_0000;
const C_WRITE: u32 = 0x0000_8000;
const D_READ: u32 = 0x0000_4000;

fn rev1() -> MpaOptions {
    MpaOptions {
        revision: 1,
        ..MpaOptions::default()
    }
}

fn rev2() -> MpaOptions {
    MpaOptions::default()
}

fn p2p(peer_to_peer: RtrKind) -> MpaOptions {
    MpaOptions {
        peer_to_peer,
        ..MpaOptions::default()
    }
}

fn frame(key: &[u8], flags: u8, revision: u8, private_data: &[u8]) -> Vec<u8> {
    let length = (private_data.len() as u16).to_be_bytes();
    [key, &[flags, revision], &length, private_data].concat()
}

fn word(ird: u32, ord: u32, bits: u32) -> Vec<u8> {
    (bits | ird << 16 | ord).to_be_bytes().to_vec()
}

/// (control bits, IRD, ORD)
fn word_of(octets: &[u8]) -> (u32, u32, u32) {
    let word = u32::from_be_bytes(*octets[20..].first_chunk().expect("a word"));
    (word & 0xC000_C000, word >> 16 & 0x3FFF, word & 0x3FFF)
}

fn request_of(octets: &[u8], options: &MpaOptions) -> Result<Option<PeerRequest>, MpaStartupError> {
    PassiveStartup::new(options).receive_data(octets)
}

fn request_error(octets: &[u8], options: &MpaOptions) -> String {
    request_of(octets, options).expect_err("a bad Request").to_string()
}

fn answered(octets: &[u8], options: &MpaOptions) -> PassiveStartup {
    let mut passive = PassiveStartup::new(options);
    passive
        .receive_data(octets)
        .expect("a good Request")
        .expect("a whole Request");
    passive
}

fn accepted(octets: &[u8], options: &MpaOptions, ird: u16, ord: u16) -> (Vec<u8>, Negotiated) {
    answered(octets, options).accept(b"", ird, ord).expect("good depths")
}

fn active(options: &MpaOptions, ird: u16, ord: u16) -> ActiveStartup {
    ActiveStartup::new(options, b"", ird, ord).expect("good depths")
}

fn reply_error(octets: &[u8], options: &MpaOptions) -> String {
    active(options, 0, 0)
        .receive_data(octets)
        .expect_err("a bad Reply")
        .to_string()
}

fn settled(reply: &[u8], options: &MpaOptions, ird: u16, ord: u16) -> Negotiated {
    match active(options, ird, ord).receive_data(reply) {
        Ok(Some(Answer::Negotiated(settled))) => settled,
        other => unreachable!("{other:?}"),
    }
}

fn rejected(reply: &[u8], options: &MpaOptions) -> MpaRejected {
    match active(options, 1, 1).receive_data(reply) {
        Ok(Some(Answer::Rejected(rejected))) => rejected,
        other => unreachable!("{other:?}"),
    }
}

// --- the frames ---

#[test]
fn m1_m3_m8_m9_m10_m12_octets() {
    let request = ActiveStartup::new(&rev1(), b"data", 5, 5).unwrap();
    assert_eq!(request.request(), frame(REQUEST, C, 1, b"data"));
    let (reply, _) = answered(&frame(REQUEST, C, 1, b""), &rev2())
        .accept(b"yes", 0, 0)
        .unwrap();
    assert_eq!(reply, frame(REPLY, C, 1, b"yes"));
}

#[test]
fn m4_wrong_request_key_closes_as_soon_as_it_is_seen() {
    for at in 0..16 {
        let mut request = frame(REQUEST, C, 1, b"");
        request[at] ^= 0x80;
        assert!(request_error(&request[..=at], &rev2()).starts_with("no MPA Request: the key b'MPA ID Req Frame'"));
    }
}

#[test]
fn m5_m6_m7_the_wrong_role_closes() {
    let error = request_error(&frame(REPLY, C, 1, b""), &rev2());
    assert_eq!(error, "an MPA Reply came where a Request was due");
    let error = reply_error(&frame(REQUEST, C, 1, b""), &rev1());
    assert_eq!(error, "an MPA Request came where a Reply was due");
    let error = reply_error(b"HTTP/1.1 400 Bad Request", &rev1());
    assert_eq!(
        error,
        "no MPA Reply: the key b'MPA ID Rep Frame' was due, b'HTTP/1.1 400 Bad' came"
    );
}

#[test]
fn m8_m9_what_is_ignored() {
    assert!(request_of(&frame(REQUEST, C | R, 1, b""), &rev2()).unwrap().is_some());
    for reserved in [0x10, 0x08, 0x0F, 0x1F] {
        let request = request_of(&frame(REQUEST, C | reserved, 1, b"private"), &rev2())
            .unwrap()
            .unwrap();
        assert_eq!((&request.private_data[..], request.enhanced), (&b"private"[..], false));
        let reply = frame(REPLY, C | reserved, 1, b"private");
        assert_eq!(settled(&reply, &rev1(), 8, 8).private_data, b"private");
    }
}

#[test]
fn m11_m14_e3_e7_headers_that_close() {
    for revision in [0, 3, 9, 255] {
        let expected = format!("MPA revision {revision} came, this side speaks 1 to 2");
        assert_eq!(request_error(&frame(REQUEST, C, revision, b""), &rev2()), expected);
        assert_eq!(
            reply_error(&frame(REPLY, C | S, revision, &word(0, 0, 0)), &rev2()),
            expected
        );
    }
    assert!(request_error(&frame(REQUEST, C | S, 2, &word(0, 0, 0)), &rev1()).starts_with("MPA revision 2 came"));
    let long = frame(REQUEST, C, 1, &[0; 513]);
    assert_eq!(
        request_error(&long[..20], &rev2()),
        "PD_Length 513 came, at most 512 is allowed"
    );
    for length in [0, 1, 3] {
        let no_room = "leaves no room for IRD and ORD (RFC 6581 9)";
        assert!(request_error(&frame(REQUEST, C | S, 2, &vec![0; length]), &rev2()).ends_with(no_room));
        assert!(reply_error(&frame(REPLY, C | S, 2, &vec![0; length]), &rev2()).ends_with(no_room));
    }
}

#[test]
fn m13_private_data_of_any_legal_length() {
    for length in [0, 1, 512] {
        let data: Vec<u8> = (0..length).map(|n: u32| n as u8).collect();
        let request = request_of(&frame(REQUEST, C, 1, &data), &rev2()).unwrap().unwrap();
        assert_eq!(request.private_data, data);
        assert_eq!(settled(&frame(REPLY, C, 1, &data), &rev1(), 8, 8).private_data, data);
        assert_eq!(ActiveStartup::new(&rev1(), &data, 0, 0).unwrap().request()[20..], data);
    }
}

#[test]
fn m15_octets_after_the_request_before_the_reply_close() {
    let request = frame(REQUEST, C, 1, b"hi");
    let expected = "1 octets came after the Request and before its Reply";
    assert_eq!(request_error(&[&request[..], b"x"].concat(), &rev2()), expected);
    let error = answered(&request, &rev2()).receive_data(b"x").unwrap_err();
    assert_eq!(error.to_string(), expected);
}

#[test]
fn m16_m2_any_segmentation() {
    let options = p2p(RtrKind::all());
    let mut active = ActiveStartup::new(&options, b"ping", 3, 5).unwrap();
    let (mut passive, request) = (PassiveStartup::new(&options), active.request().to_vec());
    for (at, octet) in request.iter().enumerate() {
        let came = passive.receive_data(&[*octet]).unwrap();
        assert_eq!(came.is_some(), at + 1 == request.len());
        assert!(came.is_none_or(|request| request.private_data == b"ping"));
    }
    let (reply, _) = passive.accept(b"pong", 9, 9).unwrap();
    for (at, octet) in reply.iter().enumerate() {
        assert_eq!(active.receive_data(&[*octet]).unwrap().is_some(), at + 1 == reply.len());
    }
}

#[test]
fn m17_octets_after_the_reply_are_not_lost() {
    let mut active = active(&rev1(), 0, 0);
    let octets = [&frame(REPLY, C, 1, b"pd")[..], b"first FPDU"].concat();
    assert!(active.receive_data(&octets).unwrap().is_some());
    assert_eq!(active.surplus(), b"first FPDU");
}

#[test]
fn m18_m19_a_rejecting_reply() {
    let reply = answered(&frame(REQUEST, C, 1, b""), &rev2())
        .reject(b"no", 0, 0)
        .unwrap();
    assert_eq!(reply, frame(REPLY, C | R, 1, b"no"));
    assert_eq!(
        rejected(&reply, &rev1()),
        MpaRejected {
            private_data: b"no".to_vec(),
            peer_ird: 0,
            peer_ord: 0
        }
    );
}

#[test]
fn m23_m24_f9_f18_crc_and_markers() {
    assert!(MpaOptions::default().crc);
    for (ours, theirs) in [(false, false), (false, true), (true, false), (true, true)] {
        let options = MpaOptions { crc: ours, ..rev1() };
        let flags = if theirs { C } else { 0 };
        assert_eq!(
            settled(&frame(REPLY, flags, 1, b""), &options, 8, 8).crc,
            ours || theirs
        );
        assert_eq!(
            accepted(&frame(REQUEST, flags, 1, b""), &options, 8, 8).1.crc,
            ours || theirs
        );

        let options = MpaOptions {
            want_markers: ours,
            ..rev1()
        };
        let flags = C | if theirs { M } else { 0 };
        let (reply, passive) = accepted(&frame(REQUEST, flags, 1, b""), &options, 8, 8);
        for settled in [settled(&frame(REPLY, flags, 1, b""), &options, 8, 8), passive] {
            assert_eq!((settled.tx_markers, settled.rx_markers), (theirs, ours));
        }
        assert_eq!(reply[16] & M != 0, ours);
        assert_eq!(active(&options, 0, 0).request()[16] & M != 0, ours);
    }
}

// --- RFC 6581 ---

#[test]
fn e1_e2_e5_enhanced_frames() {
    let request = ActiveStartup::new(&p2p(RtrKind::all()), b"hi", 16, 17).unwrap();
    let private_data = [&word(16, 17, A | B | C_WRITE | D_READ)[..], b"hi"].concat();
    assert_eq!(request.request(), frame(REQUEST, C | S, 2, &private_data));

    let enhanced = frame(REQUEST, C | S, 2, &word(3, 4, 0));
    let (reply, _) = answered(&enhanced, &rev2()).accept(b"ok", 5, 2).unwrap();
    assert_eq!(reply, frame(REPLY, C | S, 2, &[&word(5, 2, 0)[..], b"ok"].concat()));
    let reply = answered(&enhanced, &rev2()).reject(b"no", 0, 0).unwrap();
    assert_eq!(reply, frame(REPLY, C | S | R, 2, &[&word(0, 0, 0)[..], b"no"].concat()));

    let (reply, plain) = accepted(&frame(REQUEST, C, 2, b"data"), &rev2(), 8, 8);
    assert_eq!(reply, frame(REPLY, C, 2, b""));
    assert_eq!((plain.ird, plain.ord, &plain.private_data[..]), (0, 0, &b"data"[..]));
}

#[test]
fn e4_ulp_private_data_is_508_octets_at_most() {
    assert_eq!(
        ActiveStartup::new(&rev2(), &[0; 508], 0, 0).unwrap().request().len(),
        532
    );
    let too_long = |limit, length| format!("private data may have {limit} octets here, not {length} (RFC 6581 9)");
    let misuse = |options: &MpaOptions, length: usize| {
        ActiveStartup::new(options, &vec![0; length], 0, 0)
            .unwrap_err()
            .to_string()
    };
    assert_eq!(misuse(&rev2(), 509), too_long(508, 509));
    assert_eq!(misuse(&rev1(), 513), too_long(512, 513));
    assert_eq!(misuse(&rev1(), 100_000), too_long(512, 100_000));
    let passive = answered(&frame(REQUEST, C | S, 2, &word(0, 0, 0)), &rev2());
    assert_eq!(
        passive.accept(&[0; 509], 0, 0).unwrap_err().to_string(),
        too_long(508, 509)
    );
    assert_eq!(
        passive.reject(&[0; 509], 0, 0).unwrap_err().to_string(),
        too_long(508, 509)
    );
}

#[test]
fn e6_revision_1_has_the_depth_that_is_configured() {
    let (_, default) = accepted(&frame(REQUEST, C, 1, b""), &rev2(), 8, 8);
    assert_eq!((default.revision, default.ird, default.ord), (1, 0, 0));
    let options = MpaOptions {
        revision1_depth: 3,
        ..rev1()
    };
    let (_, passive) = accepted(&frame(REQUEST, C, 1, b""), &options, 8, 2);
    let active = settled(&frame(REPLY, C, 1, b""), &options, 8, 2);
    for settled in [passive, active] {
        assert_eq!(
            (settled.ird, settled.ord, settled.peer_ird, settled.peer_ord),
            (3, 2, 3, 3)
        );
        assert_eq!(settled.failure, None);
    }
}

#[test]
fn e8_plain_reply_to_an_enhanced_request_closes() {
    for (flags, revision, length) in [(C, 2, 8), (C | S, 1, 8), (C, 1, 0)] {
        let error = reply_error(&frame(REPLY, flags, revision, &vec![0; length]), &rev2());
        assert_eq!(
            error,
            "a Reply without IRD and ORD came to a Request of MPA revision 2 (RFC 6581 10)"
        );
    }
}

#[test]
fn e9_e10_depths_are_lowered_to_what_the_other_side_serves() {
    for (asked_ird, our_ord, expected) in [(4, 8, 4), (8, 4, 4), (0, 8, 0), (0x3FFE, 5, 5)] {
        let (reply, settled) = accepted(&frame(REQUEST, C | S, 2, &word(asked_ird, 0, 0)), &rev2(), 8, our_ord);
        assert_eq!((word_of(&reply).2, settled.ord), (u32::from(expected), expected));
    }
    for (our_ord, reply_ird, expected) in [(8, 8, 8), (8, 3, 3), (2, 8, 2), (8, 0, 0)] {
        let result = settled(&frame(REPLY, C | S, 2, &word(reply_ird, 0, 0)), &rev2(), 8, our_ord);
        assert_eq!((result.ord, result.failure), (expected, None));
    }
    for asked_ord in [2, 16] {
        let (reply, settled) = accepted(&frame(REQUEST, C | S, 2, &word(0, asked_ord, 0)), &rev2(), 8, 8);
        assert_eq!((word_of(&reply).1, settled.ird), (8, 8));
    }
}

#[test]
fn e11_e12_a_depth_that_this_side_cannot_serve() {
    assert_eq!(
        settled(&frame(REPLY, C | S, 2, &word(8, 8, 0)), &rev2(), 8, 8).failure,
        None
    );
    for (options, bits) in [(rev2(), 0), (p2p(RtrKind::all()), A | B)] {
        let result = settled(&frame(REPLY, C | S, 2, &word(8, 9, bits)), &options, 8, 8);
        assert_eq!(
            (result.failure, result.rtr),
            (Some(TerminateCause::MpaInsufficientIrd), RtrKind::empty())
        );
    }
    let reply = answered(&frame(REQUEST, C | S, 2, &word(1, 1, 0)), &rev2())
        .reject(b"", 0, 7)
        .unwrap();
    assert_eq!(
        rejected(&reply, &rev2()),
        MpaRejected {
            private_data: vec![],
            peer_ird: 0,
            peer_ord: 7
        }
    );
}

#[test]
fn e13_all_ones() {
    for ((ird, ord), said) in [((5, 0x3FFF), (0, 0x3FFF, 3)), ((0x3FFF, 5), (0, 8, 0x3FFF))] {
        let (reply, settled) = accepted(&frame(REQUEST, C | S, 2, &word(ird, ord, 0)), &rev2(), 8, 3);
        assert_eq!(word_of(&reply), said, "answered crosswise");
        assert_eq!((settled.ird, settled.ord), (8, 3));
    }
    let result = settled(&frame(REPLY, C | S, 2, &word(0x3FFF, 0x3FFF, 0)), &rev2(), 6, 7);
    assert_eq!((result.ird, result.ord, result.failure), (6, 7, None));
}

#[test]
fn e14_e15_e16_reply_repeats_a_and_offers_a_kind() {
    for (offered, rtr) in [
        (0, RtrKind::empty()),
        (B, RtrKind::SEND),
        (C_WRITE, RtrKind::WRITE),
        (D_READ, RtrKind::READ),
        (B | C_WRITE | D_READ, RtrKind::all()),
    ] {
        let (reply, settled) = accepted(&frame(REQUEST, C | S, 2, &word(4, 4, A | offered)), &rev2(), 8, 8);
        let (bits, _, _) = word_of(&reply);
        assert!(bits & A != 0 && bits & (B | C_WRITE | D_READ) != 0);
        assert_eq!(settled.rtr, rtr);

        assert_eq!(word_of(active(&rev2(), 1, 1).request()).0, 0);
        let (reply, client) = accepted(&frame(REQUEST, C | S, 2, &word(4, 4, offered)), &rev2(), 8, 8);
        assert_eq!((word_of(&reply).0, client.rtr), (0, RtrKind::empty()));
        let result = crate::settled(&frame(REPLY, C | S, 2, &word(4, 4, offered)), &rev2(), 8, 8);
        assert_eq!((result.rtr, result.failure), (RtrKind::empty(), None));
    }
}

#[test]
fn e17_initiator_chooses_a_kind_that_both_set() {
    for (ours, theirs, chosen) in [
        (RtrKind::all(), B | C_WRITE | D_READ, RtrKind::WRITE),
        (RtrKind::all(), B | D_READ, RtrKind::READ),
        (RtrKind::all(), B, RtrKind::SEND),
        (RtrKind::SEND, B | C_WRITE | D_READ, RtrKind::SEND),
        (RtrKind::READ | RtrKind::SEND, C_WRITE | B, RtrKind::SEND),
    ] {
        let result = settled(&frame(REPLY, C | S, 2, &word(4, 4, A | theirs)), &p2p(ours), 8, 8);
        assert_eq!((result.rtr, result.failure), (chosen, None));
    }
}

#[test]
fn e18_no_common_kind_is_2_0_07() {
    let no_match = (RtrKind::empty(), Some(TerminateCause::MpaNoMatchingRtr));
    for bits in [0, A | C_WRITE, A] {
        let result = settled(&frame(REPLY, C | S, 2, &word(4, 4, bits)), &p2p(RtrKind::SEND), 8, 8);
        assert_eq!((result.rtr, result.failure), no_match);
    }
    let read = p2p(RtrKind::READ);
    let result = settled(&frame(REPLY, C | S, 2, &word(0, 0, A | D_READ)), &read, 8, 8);
    assert_eq!(
        (result.rtr, result.failure),
        no_match,
        "a Read needs a place at the responder"
    );
    let result = settled(&frame(REPLY, C | S, 2, &word(1, 0, A | D_READ)), &read, 8, 0);
    assert_eq!((result.rtr, result.ord), (RtrKind::READ, 0));
}

#[test]
fn e10_responder_raises_its_ird_for_a_read_rtr_or_does_not_offer_it() {
    let (reply, settled) = accepted(&frame(REQUEST, C | S, 2, &word(0, 0, A | D_READ)), &rev2(), 0, 8);
    assert_eq!((word_of(&reply).1, settled.ird, settled.rtr), (1, 1, RtrKind::READ));
    let (reply, settled) = accepted(
        &frame(REQUEST, C | S, 2, &word(0, 0, A | D_READ | C_WRITE)),
        &rev2(),
        0,
        8,
    );
    assert_eq!(
        (word_of(&reply), settled.rtr),
        ((A | B | C_WRITE, 0, 0), RtrKind::WRITE)
    );
}

#[test]
fn e20_peer_depths_reach_the_ulp() {
    let request = request_of(&frame(REQUEST, C | S, 2, &word(11, 12, 0)), &rev2())
        .unwrap()
        .unwrap();
    assert_eq!((request.peer_ird, request.peer_ord), (11, 12));
    let result = settled(&frame(REPLY, C | S, 2, &word(6, 5, 0)), &rev2(), 8, 8);
    assert_eq!((result.peer_ird, result.peer_ord), (6, 5));
    let reply = frame(REPLY, C | S | R, 2, &[&word(6, 5, 0)[..], b"pd"].concat());
    assert_eq!(
        rejected(&reply, &rev2()),
        MpaRejected {
            private_data: b"pd".to_vec(),
            peer_ird: 6,
            peer_ord: 5
        }
    );
}

#[test]
fn both_halves_agree() {
    let mut active = ActiveStartup::new(&p2p(RtrKind::all()), b"ping", 3, 9).unwrap();
    let passive = answered(
        active.request(),
        &MpaOptions {
            want_markers: true,
            ..rev2()
        },
    );
    let (reply, theirs) = passive.accept(b"pong", 7, 5).unwrap();
    let Ok(Some(Answer::Negotiated(ours))) = active.receive_data(&reply) else {
        unreachable!()
    };
    assert_eq!(
        (ours.ird, ours.ord, &ours.private_data[..], ours.rtr),
        (3, 7, &b"pong"[..], RtrKind::WRITE)
    );
    assert_eq!(
        (theirs.ird, theirs.ord, &theirs.private_data[..], theirs.rtr),
        (7, 3, &b"ping"[..], RtrKind::all())
    );
    assert!(ours.tx_markers && theirs.rx_markers && !ours.rx_markers && !theirs.tx_markers);
}

#[test]
fn what_is_misuse() {
    let too_deep = |name| format!("{name} must be 0 to 16382, not 16383");
    let misuse = |ird, ord| ActiveStartup::new(&rev2(), b"", ird, ord).unwrap_err().to_string();
    assert_eq!(
        (misuse(0x3FFF, 0), misuse(0, 0x3FFF)),
        (too_deep("ird"), too_deep("ord_"))
    );
    let passive = answered(&frame(REQUEST, C, 1, b""), &rev2());
    assert_eq!(passive.accept(b"", 0x3FFF, 0).unwrap_err().to_string(), too_deep("ird"));
    assert_eq!(
        passive.reject(b"", 0, 0x3FFF).unwrap_err().to_string(),
        too_deep("ord_")
    );

    let misuse = |options: MpaOptions| options.checked().unwrap_err().to_string();
    assert_eq!(
        misuse(MpaOptions {
            revision1_depth: 0x3FFF,
            ..rev1()
        }),
        too_deep("revision1_depth")
    );
    assert_eq!(
        misuse(MpaOptions { revision: 3, ..rev2() }),
        "MPA revision must be 1 or 2, not 3"
    );
    assert_eq!(
        misuse(MpaOptions {
            peer_to_peer: RtrKind::SEND,
            ..rev1()
        }),
        "the peer-to-peer model needs MPA revision 2 (RFC 6581)"
    );
    assert_eq!(p2p(RtrKind::SEND).checked(), Ok(p2p(RtrKind::SEND)));
    let early = PassiveStartup::new(&rev2()).accept(b"", 0, 0).unwrap_err();
    assert_eq!(early.to_string(), "there is no complete MPA Request to answer yet");
}

proptest! {
    #[test]
    fn any_octets_are_taken_or_refused(flags: u8, revision in 0u8..4, rest in proptest::collection::vec(any::<u8>(), 0..600)) {
        for (key, other) in [(REQUEST, REPLY), (REPLY, REQUEST)] {
            for key in [key, other] {
                let octets = [key, &[flags, revision], &rest].concat();
                for at in [0, 7, 17, 21, 30] {
                    let (first, second) = octets.split_at(at.min(octets.len()));
                    let mut passive = PassiveStartup::new(&rev2());
                    let _ = passive.receive_data(first).and_then(|_| passive.receive_data(second));
                    let mut active = active(&rev2(), 4, 4);
                    let _ = active.receive_data(first).and_then(|_| active.receive_data(second));
                }
            }
        }
    }
}
