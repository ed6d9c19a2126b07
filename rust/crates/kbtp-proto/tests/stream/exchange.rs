//! Whatever is posted arrives, however TCP cuts it and however it is read.

use kbtp_proto::memory::{RegionId, Span};
use kbtp_proto::mpa::Negotiated;
use kbtp_proto::stream::{Event, Inline, Payload, Piece, Work};
use proptest::prelude::*;

use crate::peer::{BASE_TO, End, Memory, STAG, negotiated};

const AREA_BYTES: usize = 16_384;
const PAYLOAD_MAX_BYTES: usize = 12_000;
const READ_AREA: usize = AREA_BYTES;
const COUNTER_AREA: usize = 2 * AREA_BYTES;
const COUNTERS: usize = 4;

#[derive(Clone, Debug)]
enum Post {
    Send { size: usize, seed: u8, solicited: bool },
    Write { size: usize, seed: u8, at: usize },
    Read { size: usize, at: usize },
    Add { value: u64, counter: usize },
    Immediate { data: [u8; 8], solicited: bool },
}

fn sizes() -> impl Strategy<Value = usize> {
    prop_oneof![4 => 0usize..400, 1 => 0..PAYLOAD_MAX_BYTES]
}

fn posts() -> impl Strategy<Value = Vec<Post>> {
    let at = || 0..AREA_BYTES - PAYLOAD_MAX_BYTES;
    let post = prop_oneof![
        (sizes(), any::<u8>(), any::<bool>()).prop_map(|(size, seed, solicited)| Post::Send { size, seed, solicited }),
        (sizes(), any::<u8>(), at()).prop_map(|(size, seed, at)| Post::Write { size, seed, at }),
        (sizes(), at()).prop_map(|(size, at)| Post::Read { size, at }),
        (any::<u64>(), 0..COUNTERS).prop_map(|(value, counter)| Post::Add { value, counter }),
        (any::<[u8; 8]>(), any::<bool>()).prop_map(|(data, solicited)| Post::Immediate { data, solicited }),
    ];
    prop::collection::vec(post, 0..12)
}

fn octets(size: usize, seed: u8) -> Vec<u8> {
    (0..size)
        .map(|at| (at as u8).wrapping_mul(31).wrapping_add((at >> 8) as u8) ^ seed)
        .collect()
}

/// Half inline, half in a region, so that all ways of sending are seen.
fn payload(memory: &Memory, octets: &[u8]) -> Payload {
    let (inline, rest) = octets.split_at(octets.len().min(7) * (octets.len() % 2));
    Payload::from_iter([
        Piece::Inline(Inline::from_slice(inline)),
        Piece::Span(memory.span(rest.to_vec())),
    ])
}

struct Side {
    end: End,
    posts: Vec<Post>,
    sinks: Vec<(u64, Span)>,
    buffers: Vec<Span>,
}

impl Side {
    fn new(posts: Vec<Post>, active: bool, settled: Negotiated, mulpdu: u32, wrap: bool, still: bool) -> Self {
        let initial_msn = wrap.then_some([u32::MAX - 1, u32::MAX, 1, u32::MAX]);
        let mut end = End::new(settled, active, mulpdu, initial_msn);
        let mut region = octets(COUNTER_AREA, 9);
        region.resize(COUNTER_AREA + 8 * COUNTERS, 0);
        end.memory = Memory::new(region);
        end.memory.0.borrow_mut().still = still;
        let mut side = Self {
            end,
            posts,
            sinks: Vec::new(),
            buffers: Vec::new(),
        };
        side.post();
        side
    }

    fn post(&mut self) {
        for (wr_id, post) in (0..).zip(self.posts.clone()) {
            let memory = &self.end.memory;
            let to = |at: usize| BASE_TO + at as u64;
            let work = match post {
                Post::Send { size, seed, solicited } => {
                    let payload = payload(memory, &octets(size, seed));
                    Work::Send {
                        wr_id,
                        payload,
                        invalidate_stag: None,
                        solicited,
                    }
                }
                Post::Write { size, seed, at } => Work::Write {
                    wr_id,
                    payload: payload(memory, &octets(size, seed)),
                    stag: STAG,
                    to: to(at),
                },
                Post::Read { size, at } => {
                    let sink = memory.span(vec![0; size]);
                    self.sinks.push((wr_id, sink));
                    Work::Read {
                        wr_id,
                        sink,
                        source_stag: STAG,
                        source_to: to(READ_AREA + at),
                    }
                }
                Post::Add { value, counter } => {
                    let to = to(COUNTER_AREA + 8 * counter);
                    Work::FetchAdd {
                        wr_id,
                        stag: STAG,
                        to,
                        add_data: value,
                        add_mask: 0,
                    }
                }
                Post::Immediate { data, solicited } => Work::Immediate { wr_id, data, solicited },
            };
            self.end.stream.post(work).unwrap();
        }
    }

    /// What this side must report of its own posts.
    fn completions(&self) -> Vec<Event> {
        let mut counters = [0u64; COUNTERS];
        let complete = |(wr_id, post): (u64, &Post)| match *post {
            Post::Send { .. } => Event::SendCompleted { wr_id },
            Post::Write { .. } => Event::WriteCompleted { wr_id },
            Post::Read { size, .. } => Event::ReadCompleted {
                wr_id,
                length: size as u32,
            },
            Post::Immediate { .. } => Event::ImmediateCompleted { wr_id },
            Post::Add { value: added, counter } => {
                let value = counters[counter];
                counters[counter] = value.wrapping_add(added);
                Event::AtomicCompleted { wr_id, value }
            }
        };
        (0..).zip(&self.posts).map(complete).collect()
    }

    fn deliveries_at_peer(&self) -> Vec<Event> {
        let delivered = self
            .posts
            .iter()
            .filter(|post| matches!(post, Post::Send { .. } | Post::Immediate { .. }));
        let deliver = |(wr_id, post): (u64, &Post)| match *post {
            Post::Immediate { data, solicited } => Event::ImmediateReceived { wr_id, data, solicited },
            Post::Send { size, solicited, .. } => Event::Received {
                wr_id,
                length: size as u32,
                invalidated_stag: None,
                solicited,
            },
            _ => unreachable!(),
        };
        (0..).zip(delivered).map(deliver).collect()
    }

    fn check_peer_memory(&self, peer: &Self) {
        let untouched = octets(COUNTER_AREA, 9);
        let mut expected = untouched.clone();
        expected.resize(COUNTER_AREA + 8 * COUNTERS, 0);
        let mut buffers = peer.buffers.iter();
        for post in &self.posts {
            match *post {
                Post::Write { size, seed, at } => expected[at..at + size].copy_from_slice(&octets(size, seed)),
                Post::Add { value, counter } => {
                    let at = COUNTER_AREA + 8 * counter;
                    let old = u64::from_ne_bytes(expected[at..at + 8].try_into().unwrap());
                    expected[at..at + 8].copy_from_slice(&old.wrapping_add(value).to_ne_bytes());
                }
                Post::Send { size, seed, .. } => {
                    let buffer = peer.end.memory.region(buffers.next().unwrap().region);
                    assert!(buffer[..size] == octets(size, seed));
                    assert!(buffer[size..].iter().all(|octet| *octet == 0));
                }
                Post::Immediate { .. } => drop(buffers.next()),
                Post::Read { .. } => {}
            }
        }
        assert!(peer.end.memory.region(RegionId(0)) == expected);
        for (wr_id, sink) in &self.sinks {
            let Post::Read { size, at } = self.posts[*wr_id as usize] else {
                unreachable!()
            };
            assert!(self.end.memory.region(sink.region) == untouched[READ_AREA + at..READ_AREA + at + size]);
        }
    }
}

/// Move octets both ways in pieces that `steps` choose, built and read at moments that they choose, until all is quiet.
fn carry(sides: &mut [Side; 2], steps: &[(bool, u8, u16)]) {
    let mut in_flight = [Vec::new(), Vec::new()];
    let mut steps = steps.iter().cycle();
    while sides.iter().any(|side| side.end.stream.wants_to_send()) || in_flight.iter().any(|octets| !octets.is_empty())
    {
        let &(side, fpdus, size) = steps.next().unwrap();
        let from = usize::from(side);
        for _ in 0..fpdus % 4 {
            in_flight[from].extend(sides[from].end.send_next().unwrap_or_default());
        }
        let to = &mut sides[1 - from].end;
        let came: Vec<u8> = in_flight[from]
            .drain(..in_flight[from].len().min(size.into()))
            .collect();
        let direct = if fpdus & 4 == 0 {
            to.stream.direct(&mut to.memory)
        } else {
            None
        };
        let (straight, staged) = came.split_at(direct.map_or(0, |span| span.len as usize).min(came.len()));
        if let Some(span) = direct {
            to.memory.copy_in(span, straight);
            to.stream.direct_received(straight.len() as u32, &to.memory);
        }
        to.take(staged);
    }
}

fn steps() -> impl Strategy<Value = Vec<(bool, u8, u16)>> {
    let sizes = prop_oneof![1u16..4, 1u16..300, 1u16..9000, Just(u16::MAX)];
    let noise = prop::collection::vec((any::<bool>(), any::<u8>(), sizes), 1..40);
    // Whatever the noise does not do, these do.
    noise.prop_map(|mut steps| {
        steps.extend([(false, 1, 700), (true, 1, 700)]);
        steps
    })
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(150))]

    #[test]
    fn f20_d7_r24_r46_two_streams_exchange_anything(
        ours in posts(),
        theirs in posts(),
        steps in steps(),
        depth in 1u16..4,
        mulpdu in prop_oneof![Just(128u32), Just(1454), Just(9000), Just(64_768)],
        markers in prop_oneof![Just((false, false)), Just((true, false)), Just((true, true))],
        (wrap, still, crc) in (any::<bool>(), any::<bool>(), prop::bool::weighted(0.9)),
    ) {
        let settled = |tx_markers, rx_markers| Negotiated {
            crc, tx_markers, rx_markers, ird: depth, ord: depth, ..negotiated()
        };
        let mut active = Side::new(ours, true, settled(markers.0, markers.1), mulpdu, wrap, still);
        let passive = Side::new(theirs, false, settled(markers.1, markers.0), mulpdu, wrap, still);
        // So that the passive side may speak.
        let last = active.posts.len() as u64;
        active.end.stream.post(Work::Write { wr_id: last, payload: Payload::new(), stag: 0, to: 0 }).unwrap();
        let mut sides = [active, passive];
        for (side, peer) in [(0, 1), (1, 0)] {
            for wr_id in (0..).take(sides[peer].deliveries_at_peer().len()) {
                let buffer = sides[side].end.receive(wr_id, PAYLOAD_MAX_BYTES);
                sides[side].buffers.push(buffer);
            }
        }

        carry(&mut sides, &steps);

        let mut events = sides.each_mut().map(|side| side.end.events());
        for (side, peer) in [(0, 1), (1, 0)] {
            let (delivered, completed): (Vec<_>, Vec<_>) = std::mem::take(&mut events[side])
                .into_iter()
                .partition(|event| matches!(event, Event::Received { .. } | Event::ImmediateReceived { .. }));
            prop_assert_eq!(delivered, sides[peer].deliveries_at_peer());
            let mut due = sides[side].completions();
            due.extend((side == 0).then_some(Event::WriteCompleted { wr_id: last }));
            prop_assert_eq!(completed, due);
            sides[side].check_peer_memory(&sides[peer]);
        }
        for side in &mut sides {
            prop_assert!(!side.end.stream.failed() && side.end.stream.receive_eof());
            prop_assert!(side.end.stream.flush(&mut side.end.memory).is_empty());
            prop_assert!(side.end.memory.0.borrow().lent.is_empty());
        }
    }
}
