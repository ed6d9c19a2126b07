//! Initiators that allocate and load by themselves (draft 6.6), in threads of their own, at a target whose requests the
//! RNIC serves on two event loops: peers read and move words of table and rings while others store them. Everything in
//! here is Rust, so that the sanitizers see all of it.
#![allow(clippy::unwrap_used, clippy::panic, reason = "tests")]

mod common;

use std::collections::{HashMap, VecDeque};
use std::net::SocketAddr;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::{Duration, Instant};

use common::{DEPTH, PATIENCE, options};
use kbtp_proto::blocks::{Binding, CounterForm, HandleRange, PartitionBlocks, StoreConfig};
use kbtp_proto::mpa::MpaOptions;
use kbtp_proto::target::BindingTerms;
use kbtp_proto::types::{Opcode, RequestFlag, Status};
use kbtp_proto::wire::{Bind, CommonHeader, Completion, DataDescriptor, Operation, Request};
use kbtp_rnic::api::{Access, Event, Recv, Sge, StreamId, WcOpcode, WcStatus, WorkCompletion, WorkRequest};
use kbtp_rnic::blocks::SharedBlocks;
use kbtp_rnic::channel::Channel;
use kbtp_rnic::device::{Device, Pd, Region};
use kbtp_rnic::memory::Buffer;
use kbtp_rnic::offload::{Grant, connect};
use kbtp_rnic::stream::Stream;

const INITIATORS: u64 = 3;
const HANDLES: u64 = 4;
const FIRST_HANDLE: u64 = 1000;
/// Large enough for its CRC to be worth knowing, were it not the initiator's to change.
const BLOCK: usize = 16384;
/// Of each initiator's own; one more is nobody's.
const OWN: u32 = 3;
const POOL_BASE: u64 = 0x10000;
const CREDITS: u64 = 8;
const MESSAGE_BYTES: usize = 256;
const ROUNDS: u64 = 60;
const DOMAIN: u64 = 1;
const SEALED: u16 = 3;

fn register(device: &Device, pd: &Pd, buffer: Buffer, access: Access, stream: Option<&Stream>, base_to: u64) -> Region {
    device.register(buffer, access, pd, stream, base_to).unwrap()
}

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

fn message(region: &Region, done: &WorkCompletion) -> Vec<u8> {
    let mut octets = Vec::new();
    region.copy_out(done.wr_id * MESSAGE_BYTES as u64, done.length, &mut octets);
    octets
}

fn send(octets: Vec<u8>) -> WorkRequest {
    WorkRequest::Send {
        wr_id: 0,
        inline: octets,
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

/// What a HELLO_ACK would say of direct modes: STags, of blocks at their Block Offsets and of all else at 0.
#[derive(Clone, Copy)]
struct Terms {
    number: u64,
    table: u32,
    pool: u32,
    partition: u32,
    slots: u32,
    head: u32,
    form: CounterForm,
}

/// A target of two event loops; a greeting stands for HELLO, another for HELLO_ACK.
struct Target {
    device: Device,
    pd: Pd,
    channel: Channel,
    blocks: SharedBlocks,
    pool: Buffer,
    table: Buffer,
    streams: HashMap<StreamId, (Stream, Region)>,
    joined: HashMap<StreamId, u64>,
    terms: Arc<Mutex<Vec<Terms>>>,
}

impl Target {
    fn new() -> Self {
        let device = Device::open(options(MpaOptions::default()));
        let pd = device.allocate_pd().unwrap();
        let direct_blocks = INITIATORS as u32 * OWN;
        let config = StoreConfig {
            block_size_bytes: BLOCK as u32,
            block_count: 1 + direct_blocks,
            pool_base: POOL_BASE,
            table_base_handle: FIRST_HANDLE,
            table_handles: INITIATORS * HANDLES,
            ring_order: 1,
            first_ticket: u32::MAX - 20,
            direct_blocks,
            masked_counters: true,
        };
        let pool = Buffer::zeroed(BLOCK * config.block_count as usize).unwrap();
        let table = Buffer::zeroed(8 * config.table_words() as usize).unwrap();
        let region = register(&device, &pd, pool.share(), Access::empty(), None, POOL_BASE);
        let blocks = SharedBlocks::create(&region, table.share(), &config, true).unwrap();
        connect(&blocks);
        Self {
            channel: device.open_channel_with_threads(2).unwrap(),
            device,
            pd,
            blocks,
            pool,
            table,
            streams: HashMap::new(),
            joined: HashMap::new(),
            terms: Arc::default(),
        }
    }

    fn handle(&mut self, event: Event) {
        match event {
            Event::ConnectRequest(request) => {
                let buffer = Buffer::zeroed(CREDITS as usize * MESSAGE_BYTES).unwrap();
                let buffers = register(&self.device, &self.pd, buffer, Access::empty(), None, 0);
                let stream = request
                    .accept(&self.pd, b"", DEPTH, DEPTH, &receives(&buffers, 0..1))
                    .unwrap();
                self.streams.insert(stream.id(), (stream, buffers));
            }
            Event::Completion(done) if done.opcode == WcOpcode::Recv && done.status == WcStatus::Success => {
                match self.joined.get(&done.stream) {
                    None => self.join(done.stream),
                    Some(&number) => self.bind(number, &done),
                }
            }
            _ => {}
        }
    }

    fn join(&mut self, id: StreamId) {
        let (stream, buffers) = &self.streams[&id];
        let number = self.joined.len() as u64;
        self.joined.insert(id, number);
        let own = PartitionBlocks {
            first: 1 + number as u32 * OWN,
            count: OWN,
        };
        let order = own.ring_order().unwrap();
        let (slots, head) = (Buffer::zeroed(16 << order).unwrap(), Buffer::zeroed(8).unwrap());
        self.blocks
            .open_partition(number, own, slots.share(), head.share())
            .unwrap();
        self.blocks
            .with(|store| store.assign_range(range_of(number), DOMAIN))
            .unwrap();
        let extent = self
            .pool
            .part(own.first as usize * BLOCK, OWN as usize * BLOCK)
            .unwrap();
        let extent_to = POOL_BASE + u64::from(own.first) * BLOCK as u64;
        let stag = |buffer: Buffer, access, base_to| {
            register(&self.device, &self.pd, buffer, access, Some(stream), base_to).stag()
        };
        self.terms.lock().unwrap().push(Terms {
            number,
            table: stag(self.table.share(), Access::REMOTE_READ, 0),
            pool: stag(self.pool.share(), Access::REMOTE_READ, POOL_BASE),
            partition: stag(extent, Access::REMOTE_WRITE, extent_to),
            slots: stag(slots, Access::REMOTE_READ, 0),
            head: stag(head, Access::REMOTE_ATOMIC, 0),
            form: CounterForm::masked(order).unwrap(),
        });
        let grant = Grant {
            blocks: self.blocks.clone(),
            holder: number,
            domain: DOMAIN,
            handles: range_of(number),
            direct_alloc: true,
            binding: BindingTerms::RDMAP,
            request_credits: CREDITS as u32,
            max_message_bytes: MESSAGE_BYTES as u32,
            receives: buffers.clone(),
            read_depth: DEPTH,
            drain: Duration::from_secs(5),
        };
        stream.offload(&grant).unwrap();
        stream.post_recv(&receives(buffers, 0..CREDITS)).unwrap();
        stream.post(vec![send(vec![number as u8])]).unwrap();
    }

    /// What is left to the owner: a BIND.
    fn bind(&self, number: u64, done: &WorkCompletion) {
        let (stream, buffers) = &self.streams[&done.stream];
        let octets = message(buffers, done);
        let header = CommonHeader::parse(&octets).unwrap();
        let Bind { handle, ticket } = Bind::parse(&octets, done.length).unwrap();
        assert!(stream.bind_tickets().contains(&ticket));
        let data_length = u32::from_be_bytes(octets[28..32].try_into().unwrap());
        let block_offset = u64::from_be_bytes(octets[32..40].try_into().unwrap());
        let seal = header.flags & RequestFlag::SEAL.bits() != 0;
        let (binding, entry) = self.blocks.with(|store| {
            let binding = store.bind_ticket(handle, number, ticket, block_offset, data_length, seal);
            store.partition(number).unwrap().audit_head().unwrap();
            (binding.unwrap(), store.read(handle).unwrap())
        });
        let status = match binding {
            Binding::Bound(_) => Status::Success,
            Binding::Refused(status) => status,
        };
        let answer = Completion {
            request_id: header.request_id,
            handle,
            generation: entry.generation,
            status,
            data_length: entry.data_length,
            block_offset: entry.block_offset,
        };
        stream
            .post_recv(&receives(buffers, done.wr_id..done.wr_id + 1))
            .unwrap();
        // First: what follows the answer on this handle is the RNIC's again.
        stream.resolved(handle);
        stream.post(vec![send(answer.pack().to_vec())]).unwrap();
    }
}

/// Flags, generation, data length, block offset.
type Entry = (u16, u16, u32, u64);

struct Initiator {
    channel: Channel,
    stream: Stream,
    receives: Region,
    memory: Region,
    done: VecDeque<WorkCompletion>,
    answers: HashMap<u64, Completion>,
    next_request_id: u64,
    terms: Terms,
}

impl Initiator {
    fn join(address: SocketAddr, terms: &Mutex<Vec<Terms>>) -> Self {
        let device = Device::open(options(MpaOptions::default()));
        let pd = device.allocate_pd().unwrap();
        let channel = device.open_channel().unwrap();
        let buffer = Buffer::zeroed(CREDITS as usize * MESSAGE_BYTES).unwrap();
        let buffers = register(&device, &pd, buffer, Access::empty(), None, 0);
        let host = address.ip().to_string();
        let slots = receives(&buffers, 0..CREDITS);
        let stream = channel
            .connect(&host, address.port(), &pd, b"", DEPTH, DEPTH, PATIENCE, &slots)
            .unwrap();
        let mut greeted = None;
        while greeted.is_none() {
            for event in channel.poll(PATIENCE).unwrap() {
                match event {
                    Event::Established { .. } => stream.post(vec![send(vec![0])]).unwrap(),
                    Event::Completion(done) if done.opcode == WcOpcode::Recv => {
                        greeted = message(&buffers, &done).first().copied();
                    }
                    _ => {}
                }
            }
        }
        stream.post_recv(&receives(&buffers, 0..1)).unwrap();
        let number = u64::from(greeted.unwrap());
        let terms = *terms
            .lock()
            .unwrap()
            .iter()
            .find(|terms| terms.number == number)
            .unwrap();
        let memory = Buffer::zeroed(2 * BLOCK).unwrap();
        Self {
            memory: register(&device, &pd, memory, Access::REMOTE_WRITE, Some(&stream), 0),
            channel,
            stream,
            receives: buffers,
            done: VecDeque::new(),
            answers: HashMap::new(),
            next_request_id: 0,
            terms,
        }
    }

    fn handle(&self, n: u64) -> u64 {
        range_of(self.terms.number).first + n
    }

    fn poll(&mut self) {
        let events = self.channel.poll(PATIENCE).unwrap();
        assert!(!events.is_empty(), "it never happened");
        for event in events {
            let Event::Completion(done) = event else {
                panic!("{event:?}")
            };
            assert_eq!(done.status, WcStatus::Success);
            if done.opcode == WcOpcode::Recv {
                let answer = Completion::parse(&message(&self.receives, &done)).unwrap();
                self.stream
                    .post_recv(&receives(&self.receives, done.wr_id..done.wr_id + 1))
                    .unwrap();
                self.answers.insert(answer.request_id, answer);
            } else {
                self.done.push_back(done);
            }
        }
    }

    /// Post `request` and wait until it is done; its value.
    fn run(&mut self, request: WorkRequest, opcode: WcOpcode) -> u64 {
        self.stream.post(vec![request]).unwrap();
        loop {
            while let Some(done) = self.done.pop_front() {
                if done.opcode == opcode {
                    return done.value;
                }
            }
            self.poll();
        }
    }

    fn answer(&mut self, request_id: u64) -> Completion {
        loop {
            if let Some(answer) = self.answers.remove(&request_id) {
                return answer;
            }
            self.poll();
        }
    }

    fn read(&mut self, stag: u32, to: u64, length: usize) -> Vec<u8> {
        let sink = Sge {
            region: self.memory.clone(),
            offset: BLOCK as u64,
            length: length as u64,
        };
        let read = WorkRequest::Read {
            wr_id: 1,
            sink,
            remote_stag: stag,
            remote_to: to,
        };
        self.run(read, WcOpcode::RdmaRead);
        let mut octets = Vec::new();
        self.memory.copy_out(BLOCK as u64, length as u32, &mut octets);
        octets
    }

    fn entry(&mut self, handle: u64) -> Entry {
        let octets = self.read(self.terms.table, 16 * (handle - FIRST_HANDLE), 16);
        let word = |at: usize| u64::from_be_bytes(octets[at..at + 8].try_into().unwrap());
        let state = word(0);
        ((state >> 48) as u16, (state >> 32) as u16, state as u32, word(8))
    }

    // --- what it does by itself ---

    fn take_ticket(&mut self) -> u32 {
        let form = self.terms.form;
        let fetch_add = WorkRequest::FetchAdd {
            wr_id: 2,
            remote_stag: self.terms.head,
            remote_to: 0,
            add_data: form.add_data(),
            add_mask: form.add_mask(),
        };
        form.ticket_of(self.run(fetch_add, WcOpcode::Atomic))
    }

    /// Reads the slot of its ticket until its block is there, and once more to confirm (draft 6.6).
    fn await_block(&mut self, ticket: u32) -> u64 {
        let to = 16 * u64::from(ticket & ((1 << self.terms.form.order()) - 1));
        let mut last = None;
        let deadline = Instant::now() + PATIENCE;
        loop {
            assert!(
                Instant::now() < deadline,
                "the slot of ticket {ticket} never holds its block"
            );
            let octets = self.read(self.terms.slots, to, 16);
            let sequence = u32::from_be_bytes(octets[..4].try_into().unwrap());
            let block_offset = u64::from_be_bytes(octets[8..].try_into().unwrap());
            let seen = (sequence == ticket && block_offset != u64::MAX).then_some(block_offset);
            if seen.is_some() && seen == last {
                return block_offset;
            }
            last = seen;
        }
    }

    fn write(&mut self, block_offset: u64, octet: u8) {
        self.memory.copy_in(0, &[octet; BLOCK]);
        let source = Sge {
            region: self.memory.clone(),
            offset: 0,
            length: BLOCK as u64,
        };
        let write = WorkRequest::Write {
            wr_id: 3,
            sges: vec![source],
            remote_stag: self.terms.partition,
            remote_to: block_offset,
        };
        self.run(write, WcOpcode::RdmaWrite);
    }

    /// Entry, block, entry: whole, since nobody frees it meanwhile.
    fn load_directly(&mut self, n: u64, octet: u8) {
        let handle = self.handle(n);
        let before = self.entry(handle);
        assert_eq!((before.0, before.2), (SEALED, BLOCK as u32));
        assert_eq!(self.read(self.terms.pool, before.3, BLOCK), [octet; BLOCK]);
        assert_eq!(self.entry(handle), before);
    }

    /// Entries of all others may change at any moment, and are whole all the same.
    fn look_at_the_others(&mut self) {
        for handle in FIRST_HANDLE..FIRST_HANDLE + INITIATORS * HANDLES {
            let (flags, generation, data_length, _) = self.entry(handle);
            let bound = flags == SEALED && [3, BLOCK as u32].contains(&data_length);
            assert!(bound || (flags, data_length) == (0, 0), "{flags} {data_length}");
            assert_eq!(generation % 2 == 0, bound);
        }
    }

    // --- what it asks for ---

    fn ask(&mut self, octets: Vec<u8>) -> u64 {
        let request_id = u64::from_be_bytes(octets[4..12].try_into().unwrap());
        self.stream.post(vec![send(octets)]).unwrap();
        request_id
    }

    fn request(
        &mut self,
        operation: Operation,
        n: u64,
        flags: RequestFlag,
        data: DataDescriptor,
        inline: &[u8],
    ) -> u64 {
        self.next_request_id += 1;
        let request = Request {
            operation,
            request_id: self.next_request_id,
            handle: self.handle(n),
            generation: 0,
            flags,
            data,
            completion: None,
            inline_at: 0,
            inline_bytes: 0,
        };
        self.ask(request.pack(inline).to_vec())
    }

    fn alloc_store(&mut self, n: u64) -> u64 {
        let flags = RequestFlag::INLINE | RequestFlag::SEAL;
        let data = DataDescriptor {
            length: 3,
            ..DataDescriptor::default()
        };
        self.request(Operation::AllocStore, n, flags, data, b"xyz")
    }

    fn free(&mut self, n: u64) -> u64 {
        self.request(Operation::Free, n, RequestFlag::empty(), DataDescriptor::default(), b"")
    }

    fn load(&mut self, n: u64) -> u64 {
        let data = DataDescriptor {
            stag: self.memory.stag(),
            to: 0,
            length: BLOCK as u32,
        };
        self.request(Operation::Load, n, RequestFlag::empty(), data, b"")
    }

    fn load_by_request(&mut self, n: u64, octet: u8) {
        self.memory.copy_in(0, &[0; BLOCK]);
        let loaded = self.load(n);
        self.succeeds(loaded);
        let mut octets = Vec::new();
        self.memory.copy_out(0, BLOCK as u32, &mut octets);
        assert_eq!(octets, [octet; BLOCK]);
    }

    fn bind(&mut self, n: u64, ticket: u32, block_offset: u64) -> u64 {
        self.next_request_id += 1;
        let header = CommonHeader {
            version: 1,
            opcode: Opcode::Bind as u8,
            flags: RequestFlag::SEAL.bits(),
            request_id: self.next_request_id,
            handle: self.handle(n),
            generation: 0,
            status: 0,
        };
        let mut octets = header.pack().to_vec();
        octets.extend(ticket.to_be_bytes());
        octets.extend((BLOCK as u32).to_be_bytes());
        octets.extend(block_offset.to_be_bytes());
        self.ask(octets)
    }

    fn succeeds(&mut self, request_id: u64) -> Completion {
        let answer = self.answer(request_id);
        assert_eq!(answer.status, Status::Success);
        answer
    }

    /// One block by itself, one by request, on the one ring at the same time.
    fn round(&mut self, octet: u8) {
        let stored = self.alloc_store(1);
        let ticket = self.take_ticket();
        let block_offset = self.await_block(ticket);
        self.write(block_offset, octet);
        let wrong = self.bind(0, ticket, block_offset + BLOCK as u64);
        let bound = self.bind(0, ticket, block_offset);
        assert_eq!(self.answer(wrong).status, Status::TicketMismatch);
        let entry = self.succeeds(bound);
        assert_eq!((entry.block_offset, entry.data_length), (block_offset, BLOCK as u32));
        assert_ne!(self.succeeds(stored).block_offset, block_offset);
        self.load_by_request(0, octet);
        self.load_directly(0, octet);
        self.look_at_the_others();
        let freed = [self.free(0), self.free(1)];
        for request_id in freed {
            self.succeeds(request_id);
        }
    }
}

/// Have `play` played by so many initiators, each in a thread of its own, at one target.
fn play(initiators: u64, play: fn(&mut Initiator)) {
    let mut target = Target::new();
    let listener = target.channel.listen("127.0.0.1", 0).unwrap();
    let (address, blocks, terms) = (listener.address(), target.blocks.clone(), Arc::clone(&target.terms));
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
    let initiators: Vec<_> = (0..initiators)
        .map(|_| {
            let terms = Arc::clone(&terms);
            thread::spawn(move || {
                let mut initiator = Initiator::join(address, &terms);
                play(&mut initiator);
                initiator.channel.close();
            })
        })
        .collect();
    let count = initiators.len() as u64;
    for initiator in initiators {
        initiator.join().unwrap();
    }
    over.store(true, Ordering::Release);
    server.join().unwrap();
    for number in 0..count {
        blocks.close_partition(number).unwrap();
    }
}

#[test]
fn initiators_in_direct_modes_while_sequences_run() {
    play(INITIATORS, |initiator| {
        for round in 0..ROUNDS {
            initiator.round((round as u8) ^ (initiator.terms.number as u8 * 64));
        }
    });
}

/// Its Partition STag reaches the block still: it breaks its word, and that is no fault of the stream of a LOAD.
#[test]
fn a_sealed_block_that_its_owner_writes_is_loaded_as_it_is() {
    play(1, |initiator| {
        let ticket = initiator.take_ticket();
        let block_offset = initiator.await_block(ticket);
        let bound = initiator.bind(0, ticket, block_offset);
        initiator.succeeds(bound);
        for octet in 1..4 {
            initiator.write(block_offset, octet);
            initiator.load_by_request(0, octet);
        }
        let freed = initiator.free(0);
        initiator.succeeds(freed);
    });
}
