//! Streams between two devices over loopback TCP.

mod common;

use std::io::{Read, Write};
use std::net::TcpStream;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU8, Ordering};
use std::time::{Duration, Instant};

use common::{DEPTH, PATIENCE, Pair, RECEIVE_BYTES, Side, octets_of, options, pump};
use kbtp_proto::mpa::{ActiveStartup, MpaOptions};
use kbtp_proto::types::TerminateCause;
use kbtp_rnic::api::{Access, Event, Sge, WcOpcode, WcStatus, WorkRequest};
use kbtp_rnic::device::Region;
use kbtp_rnic::error::{EndReason, Error};
use kbtp_rnic::memory::Buffer;

fn pattern(length: usize) -> Vec<u8> {
    (0..length).map(|index| (index * 31 + index / 251) as u8).collect()
}

fn whole(region: &Region) -> Sge {
    Sge {
        region: region.clone(),
        offset: 0,
        length: region.length(),
    }
}

fn send(wr_id: u64, inline: &[u8]) -> WorkRequest {
    WorkRequest::Send {
        wr_id,
        inline: inline.to_vec(),
        sges: vec![],
        invalidate_stag: None,
        solicited: false,
    }
}

fn write(wr_id: u64, from: &Region, to: &Region) -> WorkRequest {
    WorkRequest::Write {
        wr_id,
        sges: vec![whole(from)],
        remote_stag: to.stag(),
        remote_to: to.base_to(),
    }
}

fn read(wr_id: u64, from: &Region, to: &Region) -> WorkRequest {
    WorkRequest::Read {
        wr_id,
        sink: whole(to),
        remote_stag: from.stag(),
        remote_to: from.base_to(),
    }
}

fn markers() -> MpaOptions {
    MpaOptions {
        want_markers: true,
        ..MpaOptions::default()
    }
}

#[test]
fn writes_reads_and_sends_of_every_size_arrive() {
    for mpa in [
        MpaOptions::default(),
        markers(),
        MpaOptions {
            crc: false,
            ..MpaOptions::default()
        },
    ] {
        let mut pair = Pair::new(mpa.clone(), mpa);
        for length in [1, 7, 1000, 1024, 4096, 65_536, 1_000_003, 9_000_000] {
            let octets = pattern(length);
            let source = pair.client.region(&octets, Access::empty());
            let target = pair
                .server
                .region(&vec![0; length], Access::REMOTE_WRITE | Access::REMOTE_READ);
            let sink = pair.client.region(&vec![0; length], Access::empty());
            let before = pair.client.done(&pair.c).len();
            pair.c
                .post(vec![write(1, &source, &target), read(2, &target, &sink)])
                .unwrap();
            let c = pair.c.clone();
            pair.pump(|_, client| client.done(&c).len() >= before + 2);
            assert!(octets_of(&target) == octets, "written: {length}");
            assert!(octets_of(&sink) == octets, "read: {length}");
            target.revoke();
        }
    }
}

#[test]
fn many_writes_interleave_with_messages_and_keep_their_order() {
    let mut pair = Pair::plain();
    let source = pair.client.region(&pattern(300_000), Access::empty());
    let target = pair.server.region(&vec![0; 300_000], Access::REMOTE_WRITE);
    let (s, c) = (pair.s.clone(), pair.c.clone());
    for round in 0..50 {
        pair.c
            .post(vec![
                write(2 * round, &source, &target),
                send(2 * round + 1, &round.to_be_bytes()),
            ])
            .unwrap();
        pair.pump(|server, _| server.done(&s).len() as u64 == round + 1);
        let receive = pair.server.done(&s)[round as usize];
        let mut message = Vec::new();
        pair.server
            .receive_region
            .copy_out(receive.wr_id * RECEIVE_BYTES as u64, receive.length, &mut message);
        assert_eq!(message, round.to_be_bytes());
        pair.s
            .post_recv(&pair.server.receives()[receive.wr_id as usize..][..1])
            .unwrap();
    }
    pair.pump(|_, client| client.done(&c).len() == 100);
    let order: Vec<u64> = pair.client.done(&c).iter().map(|completion| completion.wr_id).collect();
    assert_eq!(order, (0..100).collect::<Vec<_>>());
    assert!(octets_of(&target) == pattern(300_000));
}

#[test]
fn atomics_immediates_and_invalidation() {
    let mut pair = Pair::plain();
    let counter = pair.server.region(&5u64.to_ne_bytes(), Access::REMOTE_ATOMIC);
    let (s, c) = (pair.s.clone(), pair.c.clone());
    let (remote_stag, remote_to) = (counter.stag(), 0);
    pair.c
        .post(vec![
            WorkRequest::FetchAdd {
                wr_id: 1,
                remote_stag,
                remote_to,
                add_data: 3,
                add_mask: 0,
            },
            WorkRequest::CompareSwap {
                wr_id: 2,
                remote_stag,
                remote_to,
                swap_data: 99,
                swap_mask: u64::MAX,
                compare_data: 8,
                compare_mask: u64::MAX,
            },
            WorkRequest::Immediate {
                wr_id: 3,
                data: *b"12345678",
                solicited: true,
            },
            WorkRequest::Send {
                wr_id: 4,
                inline: b"take it back".to_vec(),
                sges: vec![],
                invalidate_stag: Some(remote_stag),
                solicited: false,
            },
        ])
        .unwrap();
    pair.pump(|server, client| server.done(&s).len() == 2 && client.done(&c).len() == 4);
    let values: Vec<u64> = pair.client.done(&c).iter().map(|completion| completion.value).collect();
    assert_eq!(values, [5, 8, 0, 0]);
    let received = pair.server.done(&s);
    assert_eq!(
        (received[0].opcode, received[0].immediate),
        (WcOpcode::RecvImmediate, Some(*b"12345678"))
    );
    assert!(received[0].solicited);
    assert_eq!(received[1].invalidated_stag, Some(remote_stag));
    assert!(!counter.valid());
}

#[test]
fn a_write_without_the_right_ends_the_stream_with_its_terminate() {
    let mut pair = Pair::plain();
    let source = pair.client.region(b"octets", Access::empty());
    let target = pair.server.region(b"secret", Access::REMOTE_READ);
    pair.c.post(vec![write(1, &source, &target)]).unwrap();
    let (s, c) = (pair.s.clone(), pair.c.clone());
    pair.pump(|server, client| server.ended(&s).is_some() && client.ended(&c).is_some());
    let Some(Event::StreamEnded {
        reason: Some(EndReason::PeerMisbehaved(error)),
        cause,
        ..
    }) = pair.server.ended(&s)
    else {
        panic!("{:?}", pair.server.events);
    };
    assert_eq!(
        (error.cause, *cause),
        (TerminateCause::DdpInvalidStag, Some(TerminateCause::DdpInvalidStag))
    );
    let Some(Event::StreamEnded {
        terminate: Some(info), ..
    }) = pair.client.ended(&c)
    else {
        panic!("{:?}", pair.client.events);
    };
    assert_eq!(
        (info.layer, info.etype, info.code),
        TerminateCause::DdpInvalidStag.value()
    );
    assert_eq!(octets_of(&target), b"secret");
}

#[test]
fn disconnect_lets_what_is_posted_leave_and_flushes_receives() {
    let mut pair = Pair::plain();
    pair.c.post(vec![send(7, b"last words")]).unwrap();
    pair.c.disconnect();
    assert!(matches!(
        pair.c.post(vec![send(8, b"")]),
        Err(Error::ConnectionLost { .. })
    ));
    let (s, c) = (pair.s.clone(), pair.c.clone());
    pair.pump(|server, client| server.ended(&s).is_some() && client.ended(&c).is_some());
    for (side, stream) in [(&pair.server, &s), (&pair.client, &c)] {
        assert!(matches!(
            side.ended(stream),
            Some(Event::StreamEnded {
                reason: None,
                cause: None,
                ..
            })
        ));
        assert!(matches!(side.events.last(), Some(Event::StreamEnded { .. })));
    }
    assert_eq!(pair.server.done(&s)[0].length, 10);
    let flushed = pair.client.completions(&c);
    assert_eq!(
        flushed
            .iter()
            .filter(|completion| completion.status == WcStatus::Flushed)
            .count(),
        8
    );
    assert!(matches!(pair.s.post_recv(&[]), Err(Error::ConnectionLost { .. })));
}

#[test]
fn terminate_and_abort_are_told_apart_by_the_peer() {
    let mut pair = Pair::plain();
    pair.c.post(vec![send(0, b"hello")]).unwrap();
    let (s, c) = (pair.s.clone(), pair.c.clone());
    pair.pump(|server, _| !server.done(&s).is_empty());
    pair.s.terminate(TerminateCause::LocalCatastrophic);
    pair.pump(|_, client| client.ended(&c).is_some());
    assert!(matches!(
        pair.client.ended(&c),
        Some(Event::StreamEnded { terminate: Some(_), .. })
    ));

    let mut pair = Pair::plain();
    let s = pair.s.clone();
    pair.c.abort();
    pair.pump(|server, _| server.ended(&s).is_some());
    let Some(Event::StreamEnded {
        reason: Some(EndReason::ConnectionLost { message, .. }),
        ..
    }) = pair.server.ended(&s)
    else {
        panic!("{:?}", pair.server.events);
    };
    assert!(message.contains("was lost"), "{message}");
}

#[test]
fn nothing_is_written_after_revoke_returns() {
    const LENGTH: usize = 8_000_000;
    let mut pair = Pair::plain();
    let source = pair.client.region(&vec![0xAA; LENGTH], Access::empty());
    let octets: Arc<[AtomicU8]> = (0..LENGTH).map(|_| AtomicU8::new(0)).collect();
    let address = octets.as_ptr().expose_provenance();
    // SAFETY: the keepalive holds the octets, which are atomics and so may change under a shared reference.
    let buffer = unsafe { Buffer::from_raw_parts(address, LENGTH, true, Box::new(Arc::clone(&octets))) }.unwrap();
    let target = pair
        .server
        .device
        .register(buffer, Access::REMOTE_WRITE, &pair.server.pd, None, 0)
        .unwrap();
    let written = || octets.iter().filter(|octet| octet.load(Ordering::Relaxed) != 0).count();

    pair.c.post(vec![write(1, &source, &target)]).unwrap();
    pair.pump(|_, _| written() > 0);
    target.revoke();
    let before = written();
    assert!(
        before < LENGTH,
        "it was over before it could be revoked: make it longer"
    );
    assert_eq!(Arc::strong_count(&octets), 1, "nothing needs the memory any more");

    let (s, c) = (pair.s.clone(), pair.c.clone());
    pair.pump(|server, client| server.ended(&s).is_some() && client.ended(&c).is_some());
    assert_eq!(written(), before);
    assert!(matches!(
        pair.server.ended(&s),
        Some(Event::StreamEnded {
            cause: Some(TerminateCause::DdpInvalidStag),
            ..
        })
    ));
}

struct Alive(Arc<AtomicBool>, #[allow(dead_code)] Box<[u8]>);

impl Drop for Alive {
    fn drop(&mut self) {
        self.0.store(false, Ordering::SeqCst);
    }
}

#[test]
fn memory_is_kept_while_posted_work_needs_it_and_no_longer() {
    let mut pair = Pair::plain();
    let alive = Arc::new(AtomicBool::new(true));
    let octets: Box<[u8]> = vec![7; 16].into();
    let address = octets.as_ptr().expose_provenance();
    let keepalive = Box::new(Alive(Arc::clone(&alive), octets));
    // SAFETY: the octets live in the keepalive and are only read.
    let buffer = unsafe { Buffer::from_raw_parts(address, 16, false, keepalive) }.unwrap();
    let region = pair
        .client
        .device
        .register(buffer, Access::REMOTE_READ, &pair.client.pd, None, 0)
        .unwrap();
    // The peer does not answer yet, so a Read before it keeps the Send waiting in the queue.
    let counter = pair.server.region(&[0; 8], Access::REMOTE_ATOMIC);
    let mut work: Vec<WorkRequest> = (0..u64::from(DEPTH) + 1)
        .map(|wr_id| WorkRequest::FetchAdd {
            wr_id,
            remote_stag: counter.stag(),
            remote_to: 0,
            add_data: 1,
            add_mask: 0,
        })
        .collect();
    work.push(WorkRequest::Send {
        wr_id: 9,
        inline: vec![],
        sges: vec![whole(&region)],
        invalidate_stag: None,
        solicited: false,
    });
    pair.c.post(work).unwrap();
    region.revoke();
    assert!(alive.load(Ordering::SeqCst), "a posted Send still needs it");
    let (s, c) = (pair.s.clone(), pair.c.clone());
    pair.pump(|server, client| server.done(&s).len() == 1 && client.done(&c).len() == 6);
    assert!(!alive.load(Ordering::SeqCst));
    let mut message = Vec::new();
    pair.server.receive_region.copy_out(0, 16, &mut message);
    assert_eq!(message, [7; 16]);
}

#[test]
fn misuse_is_refused_as_a_whole() {
    let mut pair = Pair::plain();
    let region = pair.client.region(b"12345678", Access::empty());
    let foreign = pair.server.region(b"12345678", Access::empty());
    let sge = |region: &Region, offset, length| Sge {
        region: region.clone(),
        offset,
        length,
    };
    for (wrong, why) in [
        (sge(&foreign, 0, 1), "registered with this RNIC"),
        (sge(&region, 4, 5), "lie within its region of 8 octets"),
        (sge(&region, u64::MAX, 2), "lie within its region"),
    ] {
        let bad = WorkRequest::Write {
            wr_id: 1,
            sges: vec![wrong],
            remote_stag: 1,
            remote_to: 0,
        };
        match pair.c.post(vec![send(0, b"x"), bad]) {
            Err(Error::ApiMisuse(message)) => assert!(message.contains(why), "{message}"),
            other => panic!("{other:?}"),
        }
    }
    region.revoke();
    let revoked = WorkRequest::Write {
        wr_id: 1,
        sges: vec![whole(&region)],
        remote_stag: 1,
        remote_to: 0,
    };
    assert!(matches!(pair.c.post(vec![revoked]), Err(Error::ApiMisuse(_))));
    pair.c.post(vec![send(5, b"still there")]).unwrap();
    let s = pair.s.clone();
    pair.pump(|server, _| !server.done(&s).is_empty());
    assert_eq!(pair.server.done(&s)[0].length, 11);
}

#[test]
fn a_request_is_rejected_or_answered_once() {
    let (mut server, mut client) = (
        Side::new(options(MpaOptions::default())),
        Side::new(options(MpaOptions::default())),
    );
    let listener = server.listen();
    let refused = client.connect(&listener);
    pump(&mut server, &mut client, |server, _| !server.requests.is_empty());
    let request = server.requests.pop().unwrap();
    assert_eq!((request.private_data(), request.peer_ird()), (&b"client"[..], DEPTH));
    request.reject(b"no").unwrap();
    assert!(matches!(request.reject(b"no"), Err(Error::ApiMisuse(_))));
    let rejected = |client: &Side| {
        client.events.iter().any(|event| {
            matches!(event, Event::Rejected { stream, private_data } if *stream == refused.id() && private_data == b"no")
        })
    };
    pump(&mut server, &mut client, |_, client| rejected(client));
    assert_eq!(client.completions(&refused).len(), 8);

    let ignored = client.connect(&listener);
    pump(&mut server, &mut client, |server, client| {
        server.requests.clear();
        client
            .events
            .iter()
            .any(|event| matches!(event, Event::Rejected { stream, .. } if *stream == ignored.id()))
    });
}

#[test]
fn wake_and_close_reach_a_waiting_poll() {
    let side = Side::new(options(MpaOptions::default()));
    for close in [false, true] {
        let channel = side.channel.clone();
        let waiter = std::thread::spawn(move || channel.poll(PATIENCE).map(|events| events.len()));
        std::thread::sleep(Duration::from_millis(50));
        let begin = Instant::now();
        if close {
            side.channel.close()
        } else {
            side.channel.wake()
        }
        assert_eq!(waiter.join().unwrap().is_err(), close);
        assert!(begin.elapsed() < Duration::from_secs(5));
    }
    assert!(side.channel.fd().is_err());
    side.channel.wake();
    side.channel.close();
}

#[test]
fn nobody_there_and_nobody_who_answers() {
    let mut side = Side::new(options(MpaOptions::default()));
    let silent = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let port = silent.local_addr().unwrap().port();
    let gone = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let gone_port = gone.local_addr().unwrap().port();
    drop(gone);
    let connect = |side: &Side, host: &str, port| {
        side.channel
            .connect(host, port, &side.pd, b"", 1, 1, Duration::from_millis(200), &[])
            .unwrap()
    };
    for (stream, why) in [
        (connect(&side, "127.0.0.1", port), "no MPA Reply from 127.0.0.1:"),
        (connect(&side, "127.0.0.1", gone_port), "Connection refused"),
        (
            connect(&side, "no-such-host.invalid", 1),
            "cannot look up no-such-host.invalid",
        ),
    ] {
        let begin = Instant::now();
        while side.ended(&stream).is_none() {
            assert!(begin.elapsed() < PATIENCE);
            side.poll();
        }
        let Some(Event::StreamEnded {
            reason: Some(reason), ..
        }) = side.ended(&stream)
        else {
            panic!()
        };
        assert!(reason.to_string().contains(why), "{reason}");
    }
}

/// Octets after a good start-up that are no FPDUs: the stream ends, everything else goes on.
#[test]
fn garbage_ends_its_stream_only() {
    let mut pair = Pair::plain();
    for seed in 0..200u64 {
        let mut raw = TcpStream::connect(pair.listener.address()).unwrap();
        let startup = ActiveStartup::new(&MpaOptions::default(), b"", 1, 1).unwrap();
        raw.write_all(startup.request()).unwrap();
        pair.pump(|server, _| !server.requests.is_empty());
        let victim = pair.server.accept();
        let mut state = seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) | 1;
        let garbage: Vec<u8> = (0..3000)
            .map(|_| {
                state ^= state << 13;
                state ^= state >> 7;
                state ^= state << 17;
                state as u8
            })
            .collect();
        // Its end may come while this writes.
        let _ = raw.write_all(&garbage[..(seed as usize * 15).min(3000)]);
        let _ = raw.shutdown(std::net::Shutdown::Write);
        pair.pump(|server, _| server.ended(&victim).is_some());
        let _ = raw.read_to_end(&mut Vec::new());
    }
    pair.c.post(vec![send(1, b"still here")]).unwrap();
    let s = pair.s.clone();
    pair.pump(|server, _| !server.done(&s).is_empty());
}

#[test]
fn a_scoped_region_goes_with_its_stream() {
    let pair = Pair::plain();
    let buffer = Buffer::zeroed(8).unwrap();
    let region = pair
        .server
        .device
        .register(buffer, Access::REMOTE_WRITE, &pair.server.pd, Some(&pair.s), 100)
        .unwrap();
    assert!(region.valid());
    pair.s.abort();
    assert!(!region.valid());
    let buffer = Buffer::zeroed(8).unwrap();
    let late = pair
        .server
        .device
        .register(buffer, Access::REMOTE_WRITE, &pair.server.pd, Some(&pair.s), 0)
        .unwrap();
    assert!(!late.valid());
    pair.server.device.close();
    assert!(!pair.server.receive_region.valid());
    pair.server.device.close();
}

/// Where the name has an IPv6 address too, nobody listens there.
#[test]
fn the_next_address_of_a_name_is_tried() {
    let (mut server, mut client) = (
        Side::new(options(MpaOptions::default())),
        Side::new(options(MpaOptions::default())),
    );
    let port = server.listen().address().port();
    let stream = client
        .channel
        .connect("localhost", port, &client.pd, b"", 1, 1, PATIENCE, &[])
        .unwrap();
    pump(&mut server, &mut client, |server, _| !server.requests.is_empty());
    server.accept();
    pump(&mut server, &mut client, |_, client| client.established(stream.id()));
    assert_eq!(stream.remote_address(), format!("localhost:{port}"));
}

/// A Write of one thread's stream either finds a region or not, whenever another thread takes it away.
#[test]
fn regions_come_and_go_while_another_thread_polls() {
    let mut pair = Pair::plain();
    let (device, pd) = (pair.server.device.clone(), pair.server.pd.clone());
    let stop = Arc::new(AtomicBool::new(false));
    let busy = std::thread::spawn({
        let stop = Arc::clone(&stop);
        move || {
            let mut rounds = 0;
            while !stop.load(Ordering::SeqCst) {
                let access = Access::REMOTE_WRITE | Access::REMOTE_READ;
                let region = device
                    .register(Buffer::zeroed(4096).unwrap(), access, &pd, None, 0)
                    .unwrap();
                region.copy_in(0, &[1; 4096]);
                region.revoke();
                assert!(!region.valid());
                rounds += 1;
            }
            rounds
        }
    });
    let source = pair.client.region(&pattern(100_000), Access::empty());
    let target = pair.server.region(&vec![0; 100_000], Access::REMOTE_WRITE);
    let c = pair.c.clone();
    for round in 1..=100 {
        pair.c.post(vec![write(round, &source, &target)]).unwrap();
        pair.pump(|_, client| client.done(&c).len() as u64 == round);
    }
    pair.c.post(vec![send(0, b"all written")]).unwrap();
    let s = pair.s.clone();
    pair.pump(|server, _| !server.done(&s).is_empty());
    stop.store(true, Ordering::SeqCst);
    assert!(busy.join().unwrap() > 0);
    assert!(octets_of(&target) == pattern(100_000));
}
