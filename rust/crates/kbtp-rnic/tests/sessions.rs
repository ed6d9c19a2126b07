//! Sessions that the RNIC serves, on several event loops, for initiators whose requests it carries: everything in here is
//! Rust, so that the sanitizers see all of it.
#![allow(clippy::unwrap_used, clippy::panic, reason = "tests")]

mod common;

use std::collections::HashMap;
use std::net::SocketAddr;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::Duration;

use common::{DEPTH, PATIENCE, options};
use kbtp_proto::blocks::{HandleRange, StoreConfig};
use kbtp_proto::crc32c;
use kbtp_proto::initiator::Terms;
use kbtp_proto::mpa::MpaOptions;
use kbtp_proto::target::BindingTerms;
use kbtp_proto::types::{RequestFlag, Status};
use kbtp_proto::wire::{Completion, Operation};
use kbtp_rnic::api::{Access, Event, Recv, Sge, StreamId, WcOpcode, WcStatus, WorkRequest};
use kbtp_rnic::blocks::SharedBlocks;
use kbtp_rnic::channel::Channel;
use kbtp_rnic::device::{Device, Pd, Region};
use kbtp_rnic::initiator::{Asked, How, Memory, Outcome, RequestGrant};
use kbtp_rnic::memory::Buffer;
use kbtp_rnic::offload::{Grant, connect};
use kbtp_rnic::requester::{Requester, Waited};
use kbtp_rnic::stream::Stream;

const INITIATORS: u64 = 3;
const HANDLES: u64 = 4;
const FIRST_HANDLE: u64 = 1000;
const BLOCK: usize = 4096;
const BLOCKS: u32 = 32;
const CREDITS: u32 = 8;
const MESSAGE_BYTES: usize = 256;
const INLINE_MAX_BYTES: usize = 100;
const ROUNDS: usize = 30;
const DOMAIN: u64 = 1;

fn region(device: &Device, pd: &Pd, length: usize, access: Access) -> Region {
    device
        .register(Buffer::zeroed(length).unwrap(), access, pd, None, 0)
        .unwrap()
}

/// Receive `slot` and those behind it.
fn receives(region: &Region, slots: std::ops::Range<u64>) -> Vec<Recv> {
    let sge = |slot: u64| Sge {
        region: region.clone(),
        offset: slot * MESSAGE_BYTES as u64,
        length: MESSAGE_BYTES as u64,
    };
    slots
        .map(|slot| Recv {
            wr_id: slot,
            sge: sge(slot),
        })
        .collect()
}

fn greeting(octet: u8) -> WorkRequest {
    WorkRequest::Send {
        wr_id: 0,
        inline: vec![octet],
        sges: Vec::new(),
        invalidate_stag: None,
        solicited: false,
    }
}

fn range_of(initiator: u64) -> HandleRange {
    HandleRange {
        first: FIRST_HANDLE + initiator * HANDLES,
        count: HANDLES,
    }
}

/// A target of `threads` event loops; a greeting stands for HELLO, another for HELLO_ACK.
struct Target {
    device: Device,
    pd: Pd,
    channel: Channel,
    blocks: SharedBlocks,
    streams: HashMap<StreamId, (Stream, Region)>,
    joined: u64,
}

impl Target {
    fn new(threads: usize) -> Self {
        let device = Device::open(options(MpaOptions::default()));
        let pd = device.allocate_pd().unwrap();
        let pool = region(&device, &pd, BLOCK * BLOCKS as usize, Access::empty());
        let config = StoreConfig {
            block_size_bytes: BLOCK as u32,
            block_count: BLOCKS,
            pool_base: 0x10000,
            table_base_handle: FIRST_HANDLE,
            table_handles: INITIATORS * HANDLES,
            ring_order: BLOCKS.ilog2(),
            first_ticket: 0,
            direct_blocks: 0,
            masked_counters: true,
        };
        let table = Buffer::zeroed(8 * config.table_words() as usize).unwrap();
        let blocks = SharedBlocks::create(&pool, table, &config, true).unwrap();
        connect(&blocks);
        blocks.with(|store| {
            for initiator in 0..INITIATORS {
                store.quotas_mut().grant(initiator, HANDLES as u32).unwrap();
                store.assign_range(range_of(initiator), DOMAIN).unwrap();
            }
        });
        Self {
            channel: device.open_channel_with_threads(threads).unwrap(),
            device,
            pd,
            blocks,
            streams: HashMap::new(),
            joined: 0,
        }
    }

    fn handle(&mut self, event: Event) {
        match event {
            Event::ConnectRequest(request) => {
                let buffers = region(
                    &self.device,
                    &self.pd,
                    CREDITS as usize * MESSAGE_BYTES,
                    Access::empty(),
                );
                let stream = request
                    .accept(&self.pd, b"", DEPTH, DEPTH, &receives(&buffers, 0..1))
                    .unwrap();
                self.streams.insert(stream.id(), (stream, buffers));
            }
            Event::Completion(done) if done.opcode == WcOpcode::Recv && done.status == WcStatus::Success => {
                let (stream, buffers) = &self.streams[&done.stream];
                let grant = Grant {
                    blocks: self.blocks.clone(),
                    holder: self.joined,
                    domain: DOMAIN,
                    handles: range_of(self.joined),
                    direct_alloc: false,
                    binding: BindingTerms::RDMAP,
                    request_credits: CREDITS,
                    max_message_bytes: MESSAGE_BYTES as u32,
                    receives: buffers.clone(),
                    read_depth: DEPTH,
                    drain: Duration::from_secs(5),
                };
                self.joined += 1;
                stream.offload(&grant).unwrap();
                stream.post_recv(&receives(buffers, 0..CREDITS.into())).unwrap();
                stream.post(vec![greeting(grant.holder as u8)]).unwrap();
            }
            _ => {}
        }
    }
}

/// What an ALLOC_STORE bound, and which octet its data repeats.
#[derive(Clone, Copy)]
struct Stored {
    handle: u64,
    generation: u16,
    length: usize,
    octet: u8,
}

/// With the CRC32c of what was moved.
type Answer = (Completion, Option<u32>);

/// A session with the target.
struct Initiator {
    device: Device,
    pd: Pd,
    channel: Channel,
    stream: Stream,
    requester: Requester,
    number: u64,
}

impl Initiator {
    fn join(address: SocketAddr) -> Self {
        let device = Device::open(options(MpaOptions::default()));
        let pd = device.allocate_pd().unwrap();
        let channel = device.open_channel().unwrap();
        let buffers = region(&device, &pd, CREDITS as usize * MESSAGE_BYTES, Access::empty());
        let slots = receives(&buffers, 0..CREDITS.into());
        let host = address.ip().to_string();
        let stream = channel
            .connect(&host, address.port(), &pd, b"", DEPTH, DEPTH, PATIENCE, &slots)
            .unwrap();
        let mut number = None;
        while number.is_none() {
            for event in channel.poll(PATIENCE).unwrap() {
                match event {
                    Event::Established { .. } => stream.post(vec![greeting(0)]).unwrap(),
                    Event::Completion(done) if done.opcode == WcOpcode::Recv => {
                        let mut octets = Vec::new();
                        buffers.copy_out(0, done.length, &mut octets);
                        number = octets.first().copied().map(u64::from);
                    }
                    _ => {}
                }
            }
        }
        let number = number.unwrap();
        stream.post_recv(&receives(&buffers, 0..1)).unwrap();
        let terms = Terms {
            request_credits: CREDITS,
            first_handle: range_of(number).first,
            handle_count: HANDLES,
            invalidate: true,
        };
        let grant = RequestGrant {
            terms,
            inline_max_bytes: INLINE_MAX_BYTES,
            receives: buffers,
            max_message_bytes: MESSAGE_BYTES as u32,
        };
        let requester = Requester::new(&stream, &grant).unwrap();
        Self {
            device,
            pd,
            channel,
            stream,
            requester,
            number,
        }
    }

    /// `length` times `octet` in registered memory.
    fn memory(&self, length: usize, octet: u8, access: Access) -> (Memory, Option<Region>) {
        if length == 0 {
            return (Memory::empty(), None);
        }
        let buffer = Buffer::zeroed(length).unwrap();
        let address = buffer.address();
        let region = self
            .device
            .register(buffer, access, &self.pd, Some(&self.stream), 0)
            .unwrap();
        region.copy_in(0, &vec![octet; length]);
        (Memory::registered(region.clone(), 0, address, length), Some(region))
    }

    /// Inline, through a descriptor, a whole block and none at all.
    fn store(&self, round: usize) -> Vec<Stored> {
        let lengths = [10, 3000, BLOCK, 0];
        let octet = (round as u8) ^ (self.number as u8 * 64);
        let (asked, regions): (Vec<_>, Vec<_>) = (range_of(self.number).first..)
            .zip(lengths)
            .map(|(handle, length)| {
                let (memory, region) = self.memory(length, octet, Access::REMOTE_READ);
                let asked = Asked {
                    handle: Some(handle),
                    generation: 0,
                    memory: Ok(memory),
                };
                (asked, region)
            })
            .unzip();
        let answers = self.run(Operation::AllocStore, RequestFlag::SEAL, asked);
        regions.into_iter().flatten().for_each(|region| region.revoke());
        let stored = |((answer, checksum), length): (Answer, usize)| {
            assert_eq!(answer.status, Status::Success);
            assert_eq!(checksum, Some(crc32c::update(0, &vec![octet; length])));
            Stored {
                handle: answer.handle,
                generation: answer.generation,
                length,
                octet,
            }
        };
        answers.into_iter().zip(lengths).map(stored).collect()
    }

    /// Each of `blocks` that is still there must be whole; how many are.
    fn load(&self, blocks: &[Stored]) -> usize {
        let (asked, regions): (Vec<_>, Vec<_>) = blocks
            .iter()
            .map(|block| {
                let (memory, region) = self.memory(BLOCK, 0, Access::REMOTE_WRITE);
                let asked = Asked {
                    handle: Some(block.handle),
                    generation: block.generation,
                    memory: Ok(memory),
                };
                (asked, region.unwrap())
            })
            .unzip();
        let answers = self.run(Operation::Load, RequestFlag::empty(), asked);
        let mut there = 0;
        for (((answer, checksum), region), block) in answers.iter().zip(regions).zip(blocks) {
            if answer.status == Status::Success {
                let mut octets = Vec::new();
                region.copy_out(0, BLOCK as u32, &mut octets);
                assert_eq!(octets[..block.length], vec![block.octet; block.length]);
                assert!(octets[block.length..].iter().all(|octet| *octet == 0));
                assert_eq!(*checksum, Some(crc32c::update(0, &octets[..block.length])));
                there += 1;
            } else {
                assert!([Status::NotBound, Status::GenerationMismatch].contains(&answer.status));
            }
            region.revoke();
        }
        there
    }

    fn free(&self, blocks: &[Stored]) {
        let asked = blocks
            .iter()
            .map(|block| Asked {
                handle: Some(block.handle),
                generation: block.generation,
                memory: Ok(Memory::empty()),
            })
            .collect();
        let answers = self.run(Operation::Free, RequestFlag::empty(), asked);
        assert!(answers.iter().all(|(answer, _)| answer.status == Status::Success));
    }

    fn run(&self, kind: Operation, flags: RequestFlag, asked: Vec<Asked>) -> Vec<Answer> {
        let how = How {
            kind,
            flags,
            checksums: true,
        };
        let batch = self.requester.open_batch(asked.len(), false).unwrap();
        self.requester.submit(how, batch, 0, asked);
        assert_eq!(self.requester.wait(batch, PATIENCE).unwrap(), Waited::Done);
        let answered = |outcome| match outcome {
            Outcome::Answered(completion, checksum) => (completion, checksum),
            other => panic!("{other:?}"),
        };
        self.requester.take(batch).unwrap().into_iter().map(answered).collect()
    }
}

#[test]
fn initiators_in_threads_of_their_own_and_sessions_on_two_loops() {
    let mut target = Target::new(2);
    let listener = target.channel.listen("127.0.0.1", 0).unwrap();
    let (address, blocks) = (listener.address(), target.blocks.clone());
    let over = Arc::new(AtomicBool::new(false));
    let stop = Arc::clone(&over);
    let server = thread::spawn(move || {
        while !stop.load(Ordering::Acquire) {
            for event in target.channel.poll(Duration::from_millis(20)).unwrap() {
                target.handle(event);
            }
        }
        target.channel.close();
    });
    let everyones = Arc::new(Mutex::new(Vec::<Stored>::new()));
    let initiators: Vec<_> = (0..INITIATORS)
        .map(|_| {
            let everyones = Arc::clone(&everyones);
            thread::spawn(move || {
                let initiator = Initiator::join(address);
                for round in 0..ROUNDS {
                    let own = initiator.store(round);
                    everyones.lock().unwrap().extend(&own);
                    assert_eq!(initiator.load(&own), own.len());
                    let latest: Vec<_> = everyones.lock().unwrap().iter().rev().take(12).copied().collect();
                    initiator.load(&latest);
                    initiator.free(&own);
                }
                initiator.channel.close();
            })
        })
        .collect();
    for initiator in initiators {
        initiator.join().unwrap();
    }
    over.store(true, Ordering::Release);
    server.join().unwrap();
    blocks.with(|store| {
        assert_eq!(store.free_blocks(), BLOCKS);
        assert!((0..INITIATORS).all(|initiator| store.quotas().usage(initiator) == 0));
    });
}
