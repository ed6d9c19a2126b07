//! Two ends of a wire in one thread.
#![allow(
    dead_code,
    unreachable_pub,
    clippy::unwrap_used,
    reason = "each test file uses its part"
)]

use std::time::{Duration, Instant};

use kbtp_proto::mpa::MpaOptions;
use kbtp_rnic::api::{Access, Event, Recv, Sge, StreamId, WcStatus, WorkCompletion};
use kbtp_rnic::channel::{Channel, Listener};
use kbtp_rnic::device::{Device, Pd, Region};
use kbtp_rnic::memory::Buffer;
use kbtp_rnic::options::Options;
use kbtp_rnic::request::ConnectRequest;
use kbtp_rnic::stream::Stream;

pub const PATIENCE: Duration = Duration::from_secs(20);
pub const DEPTH: u32 = 4;
pub const RECEIVES: usize = 8;
pub const RECEIVE_BYTES: usize = 1024;

pub fn options(mpa: MpaOptions) -> Options {
    Options {
        mpa,
        goodbye: Duration::from_millis(500),
        disconnect: Duration::from_secs(1),
        ..Options::default()
    }
}

/// One channel with a domain and receive buffers of its own, and what came out of it.
pub struct Side {
    pub device: Device,
    pub pd: Pd,
    pub channel: Channel,
    pub events: Vec<Event>,
    pub requests: Vec<ConnectRequest>,
    pub receive_region: Region,
}

impl Side {
    pub fn new(options: Options) -> Self {
        Self::with_threads(options, 0)
    }

    /// With threads, those do the channel's I/O.
    pub fn with_threads(options: Options, threads: usize) -> Self {
        let device = Device::open(options);
        let pd = device.allocate_pd().unwrap();
        let channel = match threads {
            0 => device.open_channel().unwrap(),
            threads => device.open_channel_with_threads(threads).unwrap(),
        };
        let buffer = Buffer::zeroed(RECEIVES * RECEIVE_BYTES).unwrap();
        let receive_region = device.register(buffer, Access::empty(), &pd, None, 0).unwrap();
        Self {
            device,
            pd,
            channel,
            events: Vec::new(),
            requests: Vec::new(),
            receive_region,
        }
    }

    pub fn region(&self, octets: &[u8], access: Access) -> Region {
        let buffer = Buffer::zeroed(octets.len()).unwrap();
        let region = self.device.register(buffer, access, &self.pd, None, 0).unwrap();
        region.copy_in(0, octets);
        region
    }

    pub fn receives(&self) -> Vec<Recv> {
        let sge = |index: usize| Sge {
            region: self.receive_region.clone(),
            offset: (index * RECEIVE_BYTES) as u64,
            length: RECEIVE_BYTES as u64,
        };
        (0..RECEIVES)
            .map(|index| Recv {
                wr_id: index as u64,
                sge: sge(index),
            })
            .collect()
    }

    pub fn listen(&self) -> Listener {
        self.channel.listen("127.0.0.1", 0).unwrap()
    }

    pub fn connect(&self, listener: &Listener) -> Stream {
        let address = listener.address();
        self.channel
            .connect(
                &address.ip().to_string(),
                address.port(),
                &self.pd,
                b"client",
                DEPTH,
                DEPTH,
                PATIENCE,
                &self.receives(),
            )
            .unwrap()
    }

    pub fn accept(&mut self) -> Stream {
        let request = self.requests.pop().unwrap();
        request
            .accept(&self.pd, b"server", DEPTH, DEPTH, &self.receives())
            .unwrap()
    }

    pub fn poll(&mut self) {
        for event in self.channel.poll(Duration::ZERO).unwrap() {
            match event {
                Event::ConnectRequest(request) => self.requests.push(request),
                other => self.events.push(other),
            }
        }
    }

    pub fn completions(&self, stream: &Stream) -> Vec<WorkCompletion> {
        let of = |event: &Event| match event {
            Event::Completion(completion) if completion.stream == stream.id() => Some(*completion),
            _ => None,
        };
        self.events.iter().filter_map(of).collect()
    }

    pub fn done(&self, stream: &Stream) -> Vec<WorkCompletion> {
        self.completions(stream)
            .into_iter()
            .filter(|completion| completion.status == WcStatus::Success)
            .collect()
    }

    pub fn ended(&self, stream: &Stream) -> Option<&Event> {
        self.events
            .iter()
            .find(|event| matches!(event, Event::StreamEnded { stream: id, .. } if *id == stream.id()))
    }

    pub fn established(&self, id: StreamId) -> bool {
        self.events
            .iter()
            .any(|event| matches!(event, Event::Established { stream, .. } if *stream == id))
    }
}

pub fn octets_of(region: &Region) -> Vec<u8> {
    let mut octets = Vec::new();
    region.copy_out(0, region.length() as u32, &mut octets);
    octets
}

/// Let both work until the condition holds.
pub fn pump(a: &mut Side, b: &mut Side, mut until: impl FnMut(&mut Side, &mut Side) -> bool) {
    let begin = Instant::now();
    while !until(a, b) {
        assert!(
            begin.elapsed() < PATIENCE,
            "it never happened: {:?} {:?}",
            a.events,
            b.events
        );
        a.poll();
        b.poll();
    }
}

pub struct Pair {
    pub server: Side,
    pub client: Side,
    pub s: Stream,
    pub c: Stream,
    pub listener: Listener,
}

impl Pair {
    pub fn new(server: MpaOptions, client: MpaOptions) -> Self {
        let (mut server, mut client) = (Side::new(options(server)), Side::new(options(client)));
        let listener = server.listen();
        let c = client.connect(&listener);
        pump(&mut server, &mut client, |server, _| !server.requests.is_empty());
        let s = server.accept();
        pump(&mut server, &mut client, |_, client| client.established(c.id()));
        Self {
            server,
            client,
            s,
            c,
            listener,
        }
    }

    pub fn plain() -> Self {
        Self::new(MpaOptions::default(), MpaOptions::default())
    }

    pub fn pump(&mut self, mut until: impl FnMut(&Side, &Side) -> bool) {
        pump(&mut self.server, &mut self.client, |server, client| {
            until(server, client)
        });
    }
}
