//! How fast RDMA Writes, RDMA Reads and small Sends go between two threads over loopback TCP.
//!
//! ```text
//! cargo run --release -p kbtp-rnic --example throughput
//! ```
#![allow(clippy::unwrap_used, reason = "a tool for people: what fails shows")]

use std::sync::mpsc;
use std::thread;
use std::time::{Duration, Instant};

use kbtp_rnic::api::{Access, Event, Recv, Sge, WcStatus, WorkRequest};
use kbtp_rnic::channel::Channel;
use kbtp_rnic::device::{Device, Region};
use kbtp_rnic::memory::Buffer;
use kbtp_rnic::options::Options;

const BLOCK_BYTES: usize = 1 << 20;
const BLOCKS: usize = 2048;
const IN_FLIGHT: usize = 8;
const PINGS: u64 = 20_000;

fn sge(region: &Region, offset: usize, length: usize) -> Sge {
    Sge {
        region: region.clone(),
        offset: offset as u64,
        length: length as u64,
    }
}

fn receives(region: &Region) -> Vec<Recv> {
    (0..16)
        .map(|index| Recv {
            wr_id: index,
            sge: sge(region, index as usize * 64, 64),
        })
        .collect()
}

fn options(spin: Duration) -> Options {
    Options {
        spin,
        ..Options::default()
    }
}

/// Answers every Send with one, until the stream ends.
fn serve(told: &mpsc::Sender<(u16, u32)>, spin: Duration) {
    let device = Device::open(options(spin));
    let pd = device.allocate_pd();
    let remote = Access::REMOTE_WRITE | Access::REMOTE_READ;
    let pool = device
        .register(Buffer::zeroed(BLOCK_BYTES * IN_FLIGHT).unwrap(), remote, &pd, None, 0)
        .unwrap();
    let buffers = device
        .register(Buffer::zeroed(1024).unwrap(), Access::empty(), &pd, None, 0)
        .unwrap();
    let channel = device.open_channel().unwrap();
    let listener = channel.listen("127.0.0.1", 0).unwrap();
    told.send((listener.address().port(), pool.stag())).unwrap();
    let (mut events, mut stream) = (Vec::new(), None);
    loop {
        channel.poll_into(Duration::from_secs(10), &mut events).unwrap();
        for event in events.drain(..) {
            match event {
                Event::ConnectRequest(request) => {
                    stream = Some(request.accept(&pd, b"", 16, 16, &receives(&buffers)).unwrap());
                }
                Event::Completion(done) if done.status == WcStatus::Success && done.length > 0 => {
                    let stream = stream.as_ref().unwrap();
                    stream
                        .post_recv(&receives(&buffers)[done.wr_id as usize..][..1])
                        .unwrap();
                    stream.post(vec![ping()]).unwrap();
                }
                Event::StreamEnded { .. } => return,
                _ => {}
            }
        }
    }
}

fn ping() -> WorkRequest {
    WorkRequest::Send {
        wr_id: 0,
        inline: vec![1; 40],
        sges: vec![],
        invalidate_stag: None,
        solicited: false,
    }
}

/// Wait for `count` completions that `counts` likes.
fn reap(channel: &Channel, events: &mut Vec<Event>, count: usize, counts: impl Fn(&Event) -> bool) -> Vec<u64> {
    let mut seen = Vec::new();
    while seen.len() < count {
        channel.poll_into(Duration::from_secs(10), events).unwrap();
        for event in events.drain(..) {
            if let Event::Completion(done) = &event
                && counts(&event)
            {
                seen.push(done.wr_id);
            }
        }
    }
    seen
}

fn main() {
    let spin = Duration::from_micros(std::env::args().nth(1).map_or(0, |us| us.parse().unwrap()));
    let (tell, told) = mpsc::channel();
    let server = thread::spawn(move || serve(&tell, spin));
    let (port, stag) = told.recv().unwrap();

    let device = Device::open(options(spin));
    let pd = device.allocate_pd();
    let memory = device
        .register(
            Buffer::zeroed(BLOCK_BYTES * IN_FLIGHT).unwrap(),
            Access::empty(),
            &pd,
            None,
            0,
        )
        .unwrap();
    let buffers = device
        .register(Buffer::zeroed(1024).unwrap(), Access::empty(), &pd, None, 0)
        .unwrap();
    let channel = device.open_channel().unwrap();
    let timeout = Duration::from_secs(5);
    let stream = channel
        .connect("127.0.0.1", port, &pd, b"", 16, 16, timeout, &receives(&buffers))
        .unwrap();
    let mut events = Vec::new();
    while !events.iter().any(|event| matches!(event, Event::Established { .. })) {
        channel.poll_into(Duration::from_secs(1), &mut events).unwrap();
    }

    let place = |index: usize| sge(&memory, index % IN_FLIGHT * BLOCK_BYTES, BLOCK_BYTES);
    let write = |index: usize| WorkRequest::Write {
        wr_id: index as u64,
        sges: vec![place(index)],
        remote_stag: stag,
        remote_to: (index % IN_FLIGHT * BLOCK_BYTES) as u64,
    };
    let read = |index: usize| WorkRequest::Read {
        wr_id: index as u64,
        sink: place(index),
        remote_stag: stag,
        remote_to: (index % IN_FLIGHT * BLOCK_BYTES) as u64,
    };
    for (name, work) in [
        ("RDMA Write", &write as &dyn Fn(usize) -> WorkRequest),
        ("RDMA Read", &read),
    ] {
        let begin = Instant::now();
        stream.post((0..IN_FLIGHT).map(work).collect()).unwrap();
        let mut posted = IN_FLIGHT;
        let mut done = 0;
        while done < BLOCKS {
            for _ in reap(&channel, &mut events, 1, |_| true) {
                done += 1;
                if posted < BLOCKS {
                    stream.post(vec![work(posted)]).unwrap();
                    posted += 1;
                }
            }
        }
        let seconds = begin.elapsed().as_secs_f64();
        println!(
            "{name}: {:.2} GB/s in blocks of {BLOCK_BYTES} octets",
            (BLOCKS * BLOCK_BYTES) as f64 / seconds / 1e9
        );
    }
    let begin = Instant::now();
    for _ in 0..PINGS {
        stream.post(vec![ping()]).unwrap();
        let answers = reap(
            &channel,
            &mut events,
            1,
            |event| matches!(event, Event::Completion(done) if done.length > 0),
        );
        stream
            .post_recv(&receives(&buffers)[answers[0] as usize..][..1])
            .unwrap();
    }
    println!(
        "Send and answer: {:.1} us",
        begin.elapsed().as_secs_f64() * 1e6 / PINGS as f64
    );
    stream.disconnect();
    server.join().unwrap();
}
