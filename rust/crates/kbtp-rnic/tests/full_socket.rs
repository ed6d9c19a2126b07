//! A peer that does not read: what the socket does not take waits where it lies, and what may happen meanwhile.
#![allow(clippy::unwrap_used, clippy::panic, reason = "tests")]

mod common;

use std::mem::ManuallyDrop;
use std::os::fd::FromRawFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicU8, Ordering};
use std::thread;

use common::{PATIENCE, Pair, Side, octets_of, options, pump};
use kbtp_proto::initiator::Terms;
use kbtp_proto::mpa::MpaOptions;
use kbtp_proto::types::TerminateCause;
use kbtp_rnic::api::{Access, Event, Sge, WcOpcode, WcStatus, WorkRequest};
use kbtp_rnic::device::Region;
use kbtp_rnic::initiator::RequestGrant;
use kbtp_rnic::memory::Buffer;
use kbtp_rnic::requester::Requester;
use kbtp_rnic::stream::Stream;
use socket2::Socket;

/// More than a socket takes on both sides together.
const LARGE_BYTES: usize = 24_000_000;

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

fn write(wr_id: u64, from: &Region, to: &Region) -> WorkRequest {
    WorkRequest::Write {
        wr_id,
        sges: vec![whole(from)],
        remote_stag: to.stag(),
        remote_to: 0,
    }
}

/// Memory that the test sees and changes behind the RNIC's back.
fn memory_of(side: &Side, octets: &[u8], access: Access) -> (Arc<[AtomicU8]>, Region) {
    let memory: Arc<[AtomicU8]> = octets.iter().map(|octet| AtomicU8::new(*octet)).collect();
    let address = memory.as_ptr().expose_provenance();
    // SAFETY: the keepalive holds the octets, which are atomics and so may change under a shared reference.
    let buffer = unsafe { Buffer::from_raw_parts(address, octets.len(), true, Box::new(Arc::clone(&memory))) }.unwrap();
    let region = side.device.register(buffer, access, &side.pd, None, 0).unwrap();
    (memory, region)
}

fn spoil(memory: &[AtomicU8]) {
    memory.iter().for_each(|octet| octet.store(0xEE, Ordering::Relaxed));
}

/// Poll `side` alone, more often than it takes for its socket to be full.
fn fill_socket(side: &mut Side) {
    for _ in 0..64 {
        side.poll();
    }
}

#[test]
fn posted_work_keeps_its_memory_until_its_last_octet_has_left_whatever_is_revoked() {
    for access in [Access::empty(), Access::REMOTE_WRITE] {
        let mut pair = Pair::plain();
        let octets = pattern(LARGE_BYTES);
        let (memory, source) = memory_of(&pair.client, &octets, access);
        let target = pair.server.region(&vec![0; LARGE_BYTES], Access::REMOTE_WRITE);
        pair.c.post(vec![write(1, &source, &target)]).unwrap();
        fill_socket(&mut pair.client);
        source.revoke();
        assert_eq!(
            pair.client.done(&pair.c),
            [],
            "the socket has taken everything: make it longer"
        );
        assert_eq!(Arc::strong_count(&memory), 2);

        let c = pair.c.clone();
        pair.pump(|_, client| client.done(&c).len() == 1);
        assert_eq!(Arc::strong_count(&memory), 1, "nothing needs the memory any more");
        spoil(&memory); // the buffer may change again
        pair.c.post(vec![write(2, &target_of(&pair.client), &target)]).unwrap();
        pair.pump(|_, client| client.done(&c).len() == 2);
        let s = pair.s.clone();
        pair.c.disconnect();
        pair.pump(|server, client| server.ended(&s).is_some() && client.ended(&c).is_some());
        assert!(
            octets_of(&target)[1..] == octets[1..],
            "the octets at the time of the post"
        );
    }
}

/// One octet, for a Write that changes little.
fn target_of(side: &Side) -> Region {
    side.region(&[1], Access::empty())
}

/// The socket that is connected to `port` takes less at once than is built for it.
fn narrow_socket_to(port: u16) {
    for entry in std::fs::read_dir("/proc/self/fd").unwrap() {
        let number = entry.unwrap().file_name().to_str().unwrap().parse().unwrap();
        // SAFETY: nobody takes it for the owner, and a number that another thread closes meanwhile only fails.
        let fd = ManuallyDrop::new(unsafe { Socket::from_raw_fd(number) });
        if fd
            .peer_addr()
            .is_ok_and(|peer| peer.as_socket().is_some_and(|peer| peer.port() == port))
        {
            fd.set_send_buffer_size(150_000).unwrap();
        }
    }
}

/// `stream` carries requests from now on, of which there are none.
fn carry(side: &Side, stream: &Stream) -> Requester {
    let grant = RequestGrant {
        terms: Terms {
            request_credits: 1,
            first_handle: 0,
            handle_count: 1,
            invalidate: false,
        },
        inline_max_bytes: 0,
        receives: side.region(&[0; 128], Access::empty()),
        max_message_bytes: 64,
    };
    Requester::new(stream, &grant).unwrap()
}

#[test]
fn a_read_response_that_waits_is_as_it_was_and_a_revoked_source_gives_nothing_more() {
    for carries in [false, true] {
        wait_and_be_revoked(carries);
    }
}

/// `carries`: responses go out from where they lie.
fn wait_and_be_revoked(carries: bool) {
    let mut pair = Pair::plain();
    let octets = vec![0xAA; LARGE_BYTES];
    let (memory, source) = memory_of(&pair.client, &octets, Access::REMOTE_READ);
    let sink = pair.server.region(&vec![0; LARGE_BYTES], Access::empty());
    let (s, c) = (pair.s.clone(), pair.c.clone());
    // RFC 5044 7.1.2: the active side speaks first.
    c.post(vec![WorkRequest::Send {
        wr_id: 1,
        inline: b"go".to_vec(),
        sges: vec![],
        invalidate_stag: None,
        solicited: false,
    }])
    .unwrap();
    pair.pump(|server, client| server.done(&s).len() == 1 && client.done(&c).len() == 1);
    let _carried = carries.then(|| carry(&pair.client, &c));
    pair.s
        .post(vec![WorkRequest::Read {
            wr_id: 1,
            sink: whole(&sink),
            remote_stag: source.stag(),
            remote_to: 0,
        }])
        .unwrap();
    narrow_socket_to(pair.listener.address().port());
    fill_socket(&mut pair.client);
    source.revoke();
    assert_eq!(Arc::strong_count(&memory), 1, "a response holds nothing");
    spoil(&memory);

    pair.pump(|server, client| server.ended(&s).is_some() && client.ended(&c).is_some());
    assert!(matches!(
        pair.client.ended(&c),
        Some(Event::StreamEnded {
            cause: Some(TerminateCause::RdmapInvalidStag),
            ..
        })
    ));
    let Some(Event::StreamEnded { terminate, .. }) = pair.server.ended(&s) else {
        panic!("it ended");
    };
    assert!(
        terminate.is_some(),
        "what was built has gone out whole, and the Terminate behind it"
    );
    let came = octets_of(&sink);
    let placed = came.iter().take_while(|octet| **octet == 0xAA).count();
    assert!(placed > 0 && placed < LARGE_BYTES);
    assert!(
        came.iter().all(|octet| *octet != 0xEE),
        "nothing of what came after the revocation"
    );
}

#[test]
fn a_stream_that_ends_sends_what_was_built_and_then_its_terminate() {
    let mut pair = Pair::plain();
    let (memory, source) = memory_of(&pair.client, &vec![0xAA; LARGE_BYTES], Access::empty());
    let target = pair.server.region(&vec![0; LARGE_BYTES], Access::REMOTE_WRITE);
    pair.c.post(vec![write(1, &source, &target)]).unwrap();
    fill_socket(&mut pair.client);
    pair.c.terminate(TerminateCause::RdmapUnspecified);
    source.revoke();
    pair.client.poll();
    let flushed = pair.client.completions(&pair.c);
    assert!(
        flushed
            .iter()
            .any(|done| done.opcode == WcOpcode::RdmaWrite && done.status == WcStatus::Flushed)
    );
    assert_eq!(Arc::strong_count(&memory), 1, "its owner has the memory back");
    spoil(&memory);

    let s = pair.s.clone();
    pair.pump(|server, _| server.ended(&s).is_some());
    let Some(Event::StreamEnded { terminate, .. }) = pair.server.ended(&s) else {
        panic!("it ended");
    };
    assert!(terminate.is_some(), "{terminate:?}");
    assert!(octets_of(&target).iter().all(|octet| *octet != 0xEE));
}

#[test]
fn two_event_loops_move_octets_of_one_region_at_once() {
    const BYTES: usize = 1_000_000;
    const ROUNDS: u64 = 12;
    let mut server = Side::with_threads(options(MpaOptions::default()), 2);
    let listener = server.listen();
    let access = Access::REMOTE_WRITE | Access::REMOTE_READ;
    let shared = server.region(&vec![0; 2 * BYTES], access);
    let mut clients = Vec::new();
    for _ in 0..2 {
        let mut client = Side::new(options(MpaOptions::default()));
        let c = client.connect(&listener);
        pump(&mut server, &mut client, |server, _| !server.requests.is_empty());
        server.accept();
        pump(&mut server, &mut client, |_, client| client.established(c.id()));
        clients.push((client, c));
    }
    let stag = shared.stag();
    let threads: Vec<_> = clients
        .into_iter()
        .enumerate()
        .map(|(number, (mut client, c))| {
            thread::spawn(move || {
                let octets = pattern(BYTES + number)[number..].to_vec();
                let (from, back) = (
                    client.region(&octets, Access::empty()),
                    client.region(&vec![0; BYTES], Access::empty()),
                );
                let remote_to = (number * BYTES) as u64;
                for round in 0..ROUNDS {
                    let write = WorkRequest::Write {
                        wr_id: 2 * round,
                        sges: vec![whole(&from)],
                        remote_stag: stag,
                        remote_to,
                    };
                    let read = WorkRequest::Read {
                        wr_id: 2 * round + 1,
                        sink: whole(&back),
                        remote_stag: stag,
                        remote_to,
                    };
                    back.clear(0, BYTES as u32);
                    c.post(vec![write, read]).unwrap();
                    let due = 2 * (round + 1) as usize;
                    while client.done(&c).len() < due {
                        let events = client.channel.poll(PATIENCE).unwrap();
                        assert!(!events.is_empty(), "it never happened");
                        client.events.extend(events);
                    }
                    assert!(octets_of(&back) == octets, "client {number}, round {round}");
                }
            })
        })
        .collect();
    threads.into_iter().for_each(|thread| thread.join().unwrap());
}
