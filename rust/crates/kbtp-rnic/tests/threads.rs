//! A channel whose I/O is done by threads of its own.
#![allow(clippy::unwrap_used, clippy::panic, reason = "tests")]

mod common;

use std::time::{Duration, Instant};

use common::{PATIENCE, Side, octets_of, options, pump};
use kbtp_proto::mpa::MpaOptions;
use kbtp_rnic::api::{Access, Event, Sge, WcOpcode, WorkRequest};
use kbtp_rnic::device::Region;
use kbtp_rnic::error::Error;
use kbtp_rnic::options::Options;

fn sides(threads: usize) -> (Side, Side) {
    let options = options(MpaOptions::default());
    (Side::with_threads(options.clone(), threads), Side::new(options))
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
        sges: Vec::new(),
        invalidate_stag: None,
        solicited: false,
    }
}

#[test]
fn streams_on_several_loops_move_octets_and_keep_the_order_of_their_events() {
    const STREAMS: usize = 5;
    let (mut server, mut client) = sides(2);
    let listener = server.listen();
    let octets: Vec<u8> = (0..100_000u32).map(|n| (n % 251) as u8).collect();
    let source = server.region(&octets, Access::empty());
    let mut streams = Vec::new();
    for _ in 0..STREAMS {
        let c = client.connect(&listener);
        pump(&mut server, &mut client, |server, _| !server.requests.is_empty());
        let s = server.accept();
        let sink = client.region(&vec![0; octets.len()], Access::REMOTE_WRITE);
        streams.push((s, c, sink));
    }
    for (s, c, sink) in &streams {
        // RFC 5044 7.1.2: the active side speaks first.
        pump(&mut server, &mut client, |_, client| client.established(c.id()));
        c.post(vec![send(1, b"go")]).unwrap();
        let write = WorkRequest::Write {
            wr_id: 1,
            sges: vec![whole(&source)],
            remote_stag: sink.stag(),
            remote_to: 0,
        };
        s.post(vec![write, send(2, b"done")]).unwrap();
    }
    for (s, c, sink) in &streams {
        pump(&mut server, &mut client, |server, client| {
            client.done(c).len() == 2 && server.done(s).len() == 3
        });
        assert_eq!(octets_of(sink), octets);
        let order = server.done(s).into_iter().map(|done| done.opcode);
        let order: Vec<_> = order.filter(|opcode| *opcode != WcOpcode::Recv).collect();
        assert_eq!(order, [WcOpcode::RdmaWrite, WcOpcode::Send]);
    }
    for (_, c, _) in &streams {
        c.disconnect();
    }
    for (s, c, _) in &streams {
        pump(&mut server, &mut client, |server, client| {
            server.ended(s).is_some() && client.ended(c).is_some()
        });
        assert!(matches!(
            server.events.iter().rev().find(|event| is_of(event, s.id())),
            Some(Event::StreamEnded { reason: None, .. })
        ));
    }
}

fn is_of(event: &Event, id: kbtp_rnic::api::StreamId) -> bool {
    match event {
        Event::Completion(completion) => completion.stream == id,
        Event::StreamEnded { stream, .. } => *stream == id,
        _ => false,
    }
}

#[test]
fn loops_that_spin_serve_every_stream_in_turn() {
    const STREAMS: usize = 3;
    const ROUNDS: usize = 20;
    let spinning = Options {
        spin: Duration::from_millis(1),
        ..options(MpaOptions::default())
    };
    for threads in [0, 1] {
        let mut server = Side::with_threads(spinning.clone(), threads);
        let mut client = Side::new(spinning.clone());
        let listener = server.listen();
        let mut streams = Vec::new();
        for _ in 0..STREAMS {
            let c = client.connect(&listener);
            pump(&mut server, &mut client, |server, _| !server.requests.is_empty());
            streams.push((server.accept(), c));
        }
        let region = server.region(b"abcdefgh", Access::REMOTE_READ);
        let sink = client.region(&[0; 8], Access::empty());
        for round in 1..=ROUNDS {
            for (_, c) in &streams {
                pump(&mut server, &mut client, |_, client| client.established(c.id()));
                let read = WorkRequest::Read {
                    wr_id: round as u64,
                    sink: whole(&sink),
                    remote_stag: region.stag(),
                    remote_to: 0,
                };
                c.post(vec![read]).unwrap();
                pump(&mut server, &mut client, |_, client| client.done(c).len() == round);
                assert_eq!(octets_of(&sink), b"abcdefgh");
                sink.clear(0, 8);
            }
        }
    }
}

#[test]
fn timers_run_though_nobody_polls() {
    let (mut server, mut client) = sides(1);
    let listener = server.listen();
    let c = client.connect(&listener);
    pump(&mut server, &mut client, |server, _| !server.requests.is_empty());
    let s = server.accept();
    pump(&mut server, &mut client, |_, client| client.established(c.id()));
    s.disconnect(); // from this thread: the loop may have gone to sleep without any timer
    let begin = Instant::now();
    let events = server.channel.poll(PATIENCE).unwrap();
    assert!(!events.is_empty() && begin.elapsed() < PATIENCE);
    server.events.extend(events);
    pump(
        &mut server,
        &mut Side::new(options(MpaOptions::default())),
        |server, _| server.ended(&s).is_some(),
    );
    assert!(format!("{:?}", server.ended(&s)).contains("did not close its side"));
}

#[test]
fn a_request_is_rejected_if_it_is_not_answered_before_the_next_poll_and_answered_once() {
    let (mut server, mut client) = sides(3);
    let listener = server.listen();
    let ignored = client.connect(&listener);
    let rejected = |client: &Side, id| {
        let is = |event: &Event| matches!(event, Event::Rejected { stream, .. } if *stream == id);
        client.events.iter().any(is)
    };
    pump(&mut server, &mut client, |server, client| {
        server.requests.clear();
        rejected(client, ignored.id())
    });
    let refused = client.connect(&listener);
    pump(&mut server, &mut client, |server, _| !server.requests.is_empty());
    let request = server.requests.pop().unwrap();
    let accept = |ird| request.accept(&server.pd, b"", ird, 1, &[]);
    assert!(matches!(accept(u32::MAX), Err(Error::ApiMisuse(_))));
    request.reject(b"no").unwrap();
    assert!(matches!(accept(1), Err(Error::ApiMisuse(_))));
    pump(&mut server, &mut client, |_, client| rejected(client, refused.id()));
}

#[test]
fn wake_and_close_reach_a_waiting_poll() {
    let (server, _) = sides(2);
    assert!(server.channel.next_timeout().unwrap().is_none());
    for close in [false, true] {
        let channel = server.channel.clone();
        let waiter = std::thread::spawn(move || channel.poll(PATIENCE).map(|events| events.len()));
        std::thread::sleep(Duration::from_millis(50));
        let begin = Instant::now();
        if close {
            server.channel.close();
        } else {
            server.channel.wake();
        }
        assert_eq!(waiter.join().unwrap().is_err(), close);
        assert!(begin.elapsed() < Duration::from_secs(5));
    }
    assert!(server.channel.fd().is_err());
    server.channel.wake();
    server.channel.close();
}

#[test]
fn a_device_that_closes_ends_its_loops() {
    let (server, _) = sides(2);
    server.device.close();
    assert!(server.channel.poll(Duration::ZERO).is_err());
    server.channel.close();
}
