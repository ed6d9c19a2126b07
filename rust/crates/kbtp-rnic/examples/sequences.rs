//! How long LOAD and STORE take between two processes over loopback TCP, without Python, beside bare sockets.
//!
//! ```text
//! make .venv/floor
//! cargo build --release --manifest-path rust/Cargo.toml -p kbtp-rnic --example sequences
//! rust/target/release/examples/sequences floor=.venv/floor spin_us=0 ms=500 rounds=3
//! ```
//!
//! The target is this program once more, with the verb `serve`; a session is offloaded as HELLO's answer would do it.
//! Rounds of both take turns. Only the calls are timed; what comes back is compared, and so is what the target holds.
//! Where there are two processors and `taskset`, target and initiator have one each. `only=load-4096-1` measures one cell,
//! `threads=N` gives the target so many event loops, `under="valgrind --tool=callgrind"` starts it under another program.
#![allow(clippy::unwrap_used, clippy::panic, reason = "a tool for people: what fails shows")]

use std::collections::HashMap;
use std::env;
use std::fs;
use std::io::{BufRead, BufReader, Read, Write};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::thread::{self, available_parallelism};
use std::time::{Duration, Instant};

use kbtp_proto::blocks::{Allocation, HandleRange, StoreConfig};
use kbtp_proto::target::BindingTerms;
use kbtp_proto::types::RequestFlag;
use kbtp_proto::wire::{DataDescriptor, Operation, Request};
use kbtp_rnic::api::{Access, Event, Recv, Sge, StreamId, WcOpcode, WcStatus, WorkCompletion, WorkRequest};
use kbtp_rnic::blocks::SharedBlocks;
use kbtp_rnic::channel::Channel;
use kbtp_rnic::device::{Device, Pd, Region};
use kbtp_rnic::memory::Buffer;
use kbtp_rnic::offload::Grant;
use kbtp_rnic::options::Options;
use kbtp_rnic::stream::Stream;

const SLOTS: usize = 32;
const CREDITS: usize = 64;
const MESSAGE_BYTES: usize = 64;
const POOL_BASE: u64 = 0x10000;
const FIRST_HANDLE: u64 = 0x4000;
const DEPTH: u32 = 32;
const COMPARE_EVERY: usize = 64;
const WARM_UP_PART: f64 = 0.15;
const HELD_BYTES: usize = 256 << 20;
const STATUS_AT: usize = 22;

/// Each word of a block says which one it is, so that a block that comes from elsewhere is noticed; as in floor.c.
fn word_at(offset: u64) -> u64 {
    offset.wrapping_mul(0x9e37_79b9_7f4a_7c15).wrapping_add(1)
}

fn block_content(index: usize, block_bytes: usize) -> Vec<u8> {
    let begin = (index * block_bytes) as u64;
    (0..block_bytes as u64)
        .step_by(8)
        .flat_map(|at| word_at(begin + at).to_ne_bytes())
        .collect()
}

/// Blocks of each kind: half of them are for LOAD, the others for STORE.
fn blocks_of(block_bytes: usize) -> usize {
    (HELD_BYTES / block_bytes).clamp(2 * SLOTS, 2048)
}

fn sge(region: &Region, offset: usize, length: usize) -> Sge {
    Sge {
        region: region.clone(),
        offset: offset as u64,
        length: length as u64,
    }
}

fn region(device: &Device, pd: &Pd, length: usize, access: Access, base_to: u64) -> Region {
    let buffer = Buffer::zeroed(length).unwrap();
    device.register(buffer, access, pd, None, base_to).unwrap()
}

fn receives(region: &Region, slots: impl IntoIterator<Item = u64>) -> Vec<Recv> {
    slots
        .into_iter()
        .map(|slot| Recv {
            wr_id: slot,
            sge: sge(region, slot as usize * MESSAGE_BYTES, MESSAGE_BYTES),
        })
        .collect()
}

fn send(inline: Vec<u8>) -> WorkRequest {
    WorkRequest::Send {
        wr_id: 0,
        inline,
        sges: vec![],
        invalidate_stag: None,
        solicited: false,
    }
}

fn options(spin_us: u64) -> Options {
    Options {
        spin: Duration::from_micros(spin_us),
        ..Options::default()
    }
}

// --- the target ---

struct Target {
    device: Device,
    pd: Pd,
    blocks: SharedBlocks,
    block_bytes: usize,
    channel: Channel,
    streams: HashMap<StreamId, (Stream, Region)>,
}

impl Target {
    fn new(spin_us: u64, block_bytes: usize, threads: usize) -> Self {
        let device = Device::open(options(spin_us));
        let pd = device.allocate_pd().unwrap();
        let count = 2 * blocks_of(block_bytes);
        let pool = region(&device, &pd, count * block_bytes, Access::empty(), POOL_BASE);
        let config = StoreConfig {
            block_size_bytes: block_bytes as u32,
            block_count: count as u32,
            pool_base: POOL_BASE,
            table_base_handle: FIRST_HANDLE,
            table_handles: count as u64,
            ring_order: count.next_power_of_two().ilog2(),
            first_ticket: 0,
            direct_blocks: 0,
            masked_counters: true,
        };
        let table = Buffer::zeroed(8 * config.table_words() as usize).unwrap();
        let blocks = SharedBlocks::create(&pool, table, &config, false).unwrap();
        let handles = HandleRange {
            first: FIRST_HANDLE,
            count: count as u64,
        };
        blocks.with(|store| {
            store.quotas_mut().grant(1, count as u32).unwrap();
            store.assign_range(handles, 1).unwrap();
        });
        for index in 0..count {
            let (handle, content) = (FIRST_HANDLE + index as u64, block_content(index, block_bytes));
            let Ok(Allocation::Block(block)) = blocks.with(|store| store.begin_alloc_store(handle, 1)) else {
                panic!("a block a handle");
            };
            assert_eq!(block, POOL_BASE + (index * block_bytes) as u64);
            let loads = index < count / 2;
            if loads {
                pool.copy_in(block - POOL_BASE, &content);
            }
            blocks
                .with(|store| store.commit_alloc_store(handle, block, block_bytes as u32, loads))
                .unwrap();
        }
        let channel = match threads {
            0 => device.open_channel().unwrap(),
            threads => device.open_channel_with_threads(threads).unwrap(),
        };
        Self {
            device,
            pd,
            blocks,
            block_bytes,
            channel,
            streams: HashMap::new(),
        }
    }

    fn take(&mut self, event: Event) {
        match event {
            Event::ConnectRequest(request) => {
                let buffers = region(
                    &self.device,
                    &self.pd,
                    (CREDITS + 1) * MESSAGE_BYTES,
                    Access::empty(),
                    0,
                );
                let hello = receives(&buffers, [CREDITS as u64]);
                let stream = request.accept(&self.pd, b"", DEPTH, DEPTH, &hello).unwrap();
                self.streams.insert(stream.id(), (stream, buffers));
            }
            Event::Completion(done) if done.opcode == WcOpcode::Recv && done.status == WcStatus::Success => {
                assert_eq!(done.wr_id, CREDITS as u64, "a request was left to the owner");
                let (stream, buffers) = &self.streams[&done.stream];
                let grant = Grant {
                    blocks: self.blocks.clone(),
                    holder: 1,
                    domain: 1,
                    handles: HandleRange {
                        first: FIRST_HANDLE,
                        count: 2 * blocks_of(self.block_bytes) as u64,
                    },
                    direct_alloc: false,
                    binding: BindingTerms::RDMAP,
                    request_credits: CREDITS as u32,
                    max_message_bytes: MESSAGE_BYTES as u32,
                    receives: buffers.clone(),
                    read_depth: DEPTH,
                    drain: Duration::from_secs(5),
                };
                stream.offload(&grant).unwrap();
                stream.post_recv(&receives(buffers, 0..CREDITS as u64)).unwrap();
                stream.post(vec![send(vec![1])]).unwrap();
            }
            Event::StreamEnded { stream, reason, .. } => {
                assert!(reason.is_none(), "{reason:?}");
                self.streams.remove(&stream);
            }
            _ => {}
        }
    }

    /// What STOREs left behind: each block whole, or never stored.
    fn check(&self) {
        let mut octets = Vec::new();
        for index in blocks_of(self.block_bytes)..2 * blocks_of(self.block_bytes) {
            octets.clear();
            self.blocks
                .pool()
                .copy_out((index * self.block_bytes) as u64, self.block_bytes as u32, &mut octets);
            let untouched = octets.iter().all(|&octet| octet == 0);
            assert!(
                untouched || octets == block_content(index, self.block_bytes),
                "block {index} is damaged"
            );
        }
    }
}

fn serve(spin_us: u64, block_bytes: usize, threads: usize) {
    let mut target = Target::new(spin_us, block_bytes, threads);
    let listener = target.channel.listen("127.0.0.1", 0).unwrap();
    println!("{}", listener.address().port());
    let channel = target.channel.clone();
    thread::spawn(move || {
        std::io::stdin().read_to_end(&mut Vec::new()).unwrap();
        channel.close();
    });
    let mut events = Vec::new();
    while target.channel.poll_into(Duration::from_secs(60), &mut events).is_ok() {
        for event in events.drain(..) {
            target.take(event);
        }
    }
    target.check();
    println!("whole");
}

// --- the initiator ---

struct Initiator {
    channel: Channel,
    stream: Stream,
    memory: Region,
    buffers: Region,
    block_bytes: usize,
    events: Vec<Event>,
    arrived: Vec<WorkCompletion>,
    seed: u64,
}

impl Initiator {
    fn new(spin_us: u64, port: u16, block_bytes: usize) -> Self {
        let device = Device::open(options(spin_us));
        let pd = device.allocate_pd().unwrap();
        let access = Access::REMOTE_WRITE | Access::REMOTE_READ;
        let memory = region(&device, &pd, SLOTS * block_bytes, access, 0);
        let buffers = region(&device, &pd, CREDITS * MESSAGE_BYTES, Access::empty(), 0);
        let channel = device.open_channel().unwrap();
        let posted = receives(&buffers, 0..CREDITS as u64);
        let timeout = Duration::from_secs(5);
        let stream = channel
            .connect("127.0.0.1", port, &pd, b"", DEPTH, DEPTH, timeout, &posted)
            .unwrap();
        let mut events = Vec::new();
        while !events.iter().any(|event| matches!(event, Event::Established { .. })) {
            channel.poll_into(timeout, &mut events).unwrap();
        }
        let mut initiator = Self {
            channel,
            stream,
            memory,
            buffers,
            block_bytes,
            events,
            arrived: Vec::new(),
            seed: 1,
        };
        initiator.stream.post(vec![send(vec![0])]).unwrap();
        initiator.reap(1);
        initiator.repost();
        initiator
    }

    fn reap(&mut self, count: usize) {
        while self.arrived.len() < count {
            self.channel
                .poll_into(Duration::from_secs(10), &mut self.events)
                .unwrap();
            for event in self.events.drain(..) {
                match event {
                    Event::Completion(done) => {
                        assert_eq!(done.status, WcStatus::Success);
                        if done.opcode == WcOpcode::Recv {
                            self.arrived.push(done);
                        }
                    }
                    other => panic!("{other:?}"),
                }
            }
        }
    }

    fn repost(&mut self) {
        let slots = self.arrived.drain(..).map(|done| done.wr_id);
        self.stream.post_recv(&receives(&self.buffers, slots)).unwrap();
    }

    fn random(&mut self) -> u64 {
        self.seed ^= self.seed << 13;
        self.seed ^= self.seed >> 7;
        self.seed ^= self.seed << 17;
        self.seed
    }

    /// One call: so many requests, posted together and waited for together.
    fn call(&mut self, operation: Operation, indices: &[usize], first_slot: usize) {
        let requests = indices.iter().enumerate().map(|(number, index)| {
            let request = Request {
                operation,
                request_id: number as u64,
                handle: FIRST_HANDLE + *index as u64,
                generation: 0,
                flags: RequestFlag::empty(),
                data: DataDescriptor {
                    stag: self.memory.stag(),
                    to: ((first_slot + number) * self.block_bytes) as u64,
                    length: self.block_bytes as u32,
                },
                completion: None,
                inline_at: 0,
                inline_bytes: 0,
            };
            send(request.pack(&[]).into_vec())
        });
        self.stream.post(requests.collect()).unwrap();
        self.reap(indices.len());
    }

    /// The completions of a call say SUCCESS.
    fn check_statuses(&self) {
        for done in &self.arrived {
            let mut message = Vec::new();
            self.buffers
                .copy_out(done.wr_id * MESSAGE_BYTES as u64, done.length, &mut message);
            assert_eq!(message.get(STATUS_AT..STATUS_AT + 2), Some(&[0, 0][..]), "{message:?}");
        }
    }

    /// The blocks that a call is about, all of their octets or the first and last words.
    fn check_blocks(&self, indices: &[usize], first_slot: usize, whole: bool) {
        for (number, &index) in indices.iter().enumerate() {
            let at = ((first_slot + number) * self.block_bytes) as u64;
            if whole {
                let mut octets = Vec::new();
                self.memory.copy_out(at, self.block_bytes as u32, &mut octets);
                assert!(
                    octets == block_content(index, self.block_bytes),
                    "block {index} is damaged"
                );
            }
            for word in [0, self.block_bytes as u64 - 8] {
                let mut octets = Vec::new();
                self.memory.copy_out(at + word, 8, &mut octets);
                let due = word_at((index * self.block_bytes) as u64 + word);
                assert_eq!(octets, due.to_ne_bytes(), "block {index} came back as another one");
            }
            self.memory.clear(at, 8);
        }
    }

    fn fill(&self, indices: &[usize], first_slot: usize) {
        for (number, &index) in indices.iter().enumerate() {
            let at = ((first_slot + number) * self.block_bytes) as u64;
            self.memory.copy_in(at, &block_content(index, self.block_bytes));
        }
    }

    fn measure(&mut self, operation: Operation, outstanding: usize, seconds: f64) -> (Vec<u64>, usize) {
        let blocks = blocks_of(self.block_bytes);
        let stores = operation == Operation::Store;
        let warm_until = Instant::now() + Duration::from_secs_f64(seconds * WARM_UP_PART);
        let until = warm_until + Duration::from_secs_f64(seconds);
        let mut calls_ns = Vec::new();
        for turn in 0.. {
            let (first, stride) = (self.random() as usize % blocks, blocks / outstanding);
            let indices: Vec<_> = (0..outstanding)
                .map(|number| (first + number * stride) % blocks + if stores { blocks } else { 0 })
                .collect();
            let first_slot = turn % (SLOTS - outstanding + 1);
            if stores {
                self.fill(&indices, first_slot);
            }
            let began = Instant::now();
            self.call(operation, &indices, first_slot);
            let ended = Instant::now();
            self.check_statuses();
            self.repost();
            if !stores {
                self.check_blocks(&indices, first_slot, turn % COMPARE_EVERY == 0);
            }
            if began >= warm_until {
                calls_ns.push((ended - began).as_nanos() as u64);
            }
            if ended > until && !calls_ns.is_empty() {
                return (calls_ns, turn + 1);
            }
        }
        unreachable!("it counts for ever")
    }
}

// --- side by side ---

struct Server {
    child: Child,
    input: Option<ChildStdin>,
    output: BufReader<ChildStdout>,
    port: u16,
}

impl Server {
    fn start(mut command: Command) -> Self {
        let mut child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
        pin(child.id(), 1);
        let mut output = BufReader::new(child.stdout.take().unwrap());
        let mut line = String::new();
        output.read_line(&mut line).unwrap();
        let digits: String = line.chars().filter(char::is_ascii_digit).collect();
        Self {
            input: child.stdin.take(),
            child,
            output,
            port: digits.parse().unwrap(),
        }
    }

    /// What it says at its end.
    fn stop(mut self) -> String {
        drop(self.input.take());
        let mut rest = String::new();
        self.output.read_to_string(&mut rest).unwrap();
        assert!(self.child.wait().unwrap().success());
        rest
    }
}

/// Otherwise the system says anew for each round whether both sides share a processor.
fn pin(process: u32, processor: usize) {
    if available_parallelism().is_ok_and(|count| count.get() > 1) || processor > 0 {
        let arguments = ["-a", "-p", "-c", &processor.to_string(), &process.to_string()];
        let _ = Command::new("taskset").args(arguments).stdout(Stdio::null()).status();
    }
}

struct Settings(HashMap<String, String>);

impl Settings {
    fn of(arguments: impl Iterator<Item = String>) -> Self {
        let pairs = arguments.map(|argument| {
            let (name, value) = argument.split_once('=').expect("name=value");
            (name.to_owned(), value.to_owned())
        });
        Self(pairs.collect())
    }

    fn number(&self, name: &str, default: u64) -> u64 {
        self.0.get(name).map_or(default, |value| value.parse().unwrap())
    }
}

struct Figures {
    p50_us: f64,
    p99_us: f64,
    per_second: f64,
    /// Of the server, for each operation: what else runs meanwhile says less about it than about the time by the clock.
    cpu_us: f64,
}

/// Processor time of a process so far, user and system, in clock ticks of 10 ms.
fn cpu_us(process: u32) -> f64 {
    let text = fs::read_to_string(format!("/proc/{process}/stat")).unwrap();
    let fields = text.rsplit_once(") ").unwrap().1.split(' ').skip(11).take(2);
    fields.map(|ticks| ticks.parse::<f64>().unwrap() * 1e4).sum()
}

/// Of what `measure` gives: the time of each measured call, and how many calls there were in all.
fn figures(server: &Server, outstanding: usize, measure: impl FnOnce() -> (Vec<u64>, usize)) -> Figures {
    let before_us = cpu_us(server.child.id());
    let (mut calls_ns, calls) = measure();
    let used_us = cpu_us(server.child.id()) - before_us;
    calls_ns.sort_unstable();
    let total_ns: u64 = calls_ns.iter().sum();
    let part = |part: f64| calls_ns[((calls_ns.len() - 1) as f64 * part) as usize] as f64 / 1e3;
    Figures {
        p50_us: part(0.5),
        p99_us: part(0.99),
        per_second: (calls_ns.len() * outstanding) as f64 / total_ns as f64 * 1e9,
        cpu_us: used_us / (calls * outstanding) as f64,
    }
}

fn bare(floor: &str, server: &Server, cell: &Cell, seconds: f64, spin_us: u64) -> (Vec<u64>, usize) {
    let blocks = blocks_of(cell.block_bytes);
    let (verb, first) = match cell.operation {
        Operation::Store => ("put", blocks),
        _ => ("get", 0),
    };
    let numbers = [
        u64::from(server.port),
        cell.block_bytes as u64,
        cell.outstanding as u64,
        first as u64,
        blocks as u64,
        (seconds * 1e3) as u64,
        spin_us,
    ];
    let output = Command::new(floor)
        .arg(verb)
        .args(numbers.map(|number| number.to_string()))
        .output()
        .unwrap();
    let text = String::from_utf8(output.stdout).unwrap();
    let number_at = |name: &str| text.split_once(name).expect(&text).1;
    let list = number_at("\"calls_ns\": [").trim_end().trim_end_matches("]}");
    let calls_ns: Vec<_> = list.split(',').map(|call| call.parse().unwrap()).collect();
    let warm_up = number_at("\"warm_up_calls\": ").split(',').next().unwrap();
    let calls = calls_ns.len() + warm_up.parse::<usize>().unwrap();
    (calls_ns, calls)
}

#[derive(Clone, Copy)]
struct Cell {
    operation: Operation,
    block_bytes: usize,
    outstanding: usize,
}

impl Cell {
    fn name(&self) -> String {
        let verb = if self.operation == Operation::Store {
            "store"
        } else {
            "load"
        };
        format!("{verb}-{}-{}", self.block_bytes, self.outstanding)
    }
}

/// The best of each figure over the rounds: what else runs meanwhile only makes it worse.
fn best(rounds: &[Figures]) -> Figures {
    let least = |of: fn(&Figures) -> f64| rounds.iter().map(of).fold(f64::INFINITY, f64::min);
    Figures {
        p50_us: least(|figures| figures.p50_us),
        p99_us: least(|figures| figures.p99_us),
        per_second: rounds.iter().map(|figures| figures.per_second).fold(0.0, f64::max),
        cpu_us: least(|figures| figures.cpu_us),
    }
}

fn compare(settings: &Settings, block_bytes: usize, cells: &[Cell]) {
    let (spin_us, seconds) = (settings.number("spin_us", 0), settings.number("ms", 500) as f64 / 1e3);
    let program = env::current_exe().unwrap();
    let mut command = match settings.0.get("under") {
        None => Command::new(program),
        Some(other) => {
            let mut words = other.split(' ');
            let mut command = Command::new(words.next().unwrap());
            command.args(words).arg(program);
            command
        }
    };
    let threads = settings.number("threads", 1).to_string();
    command.args(["serve", &spin_us.to_string(), &block_bytes.to_string(), &threads]);
    let target = Server::start(command);
    let floor = settings.0.get("floor");
    let floor_server = floor.map(|floor| {
        let mut command = Command::new(floor);
        let octets = 2 * blocks_of(block_bytes) * block_bytes;
        command.args(["serve", &octets.to_string(), &spin_us.to_string()]);
        Server::start(command)
    });
    let mut initiator = Initiator::new(spin_us, target.port, block_bytes);
    for cell in cells {
        let (mut ours, mut theirs) = (Vec::new(), Vec::new());
        for _ in 0..settings.number("rounds", 3) {
            let outstanding = cell.outstanding;
            ours.push(figures(&target, outstanding, || {
                initiator.measure(cell.operation, outstanding, seconds)
            }));
            if let (Some(floor), Some(server)) = (floor, &floor_server) {
                let measure = || bare(floor, server, cell, seconds, spin_us);
                theirs.push(figures(server, outstanding, measure));
            }
        }
        print(cell, &best(&ours), theirs.first().map(|_| best(&theirs)).as_ref());
    }
    initiator.stream.disconnect();
    initiator.reap_end();
    assert_eq!(target.stop(), "whole\n");
    if let Some(server) = floor_server {
        server.stop();
    }
}

impl Initiator {
    fn reap_end(&mut self) {
        while !self
            .events
            .iter()
            .any(|event| matches!(event, Event::StreamEnded { .. }))
        {
            self.channel
                .poll_into(Duration::from_secs(10), &mut self.events)
                .unwrap();
        }
    }
}

fn print(cell: &Cell, ours: &Figures, bare: Option<&Figures>) {
    let gigabytes = |figures: &Figures| figures.per_second * cell.block_bytes as f64 / 1e9;
    let line = |figures: &Figures| {
        format!(
            "{:9.1} {:9.1} us {:9.0}/s {:6.2} GB/s {:7.2} us cpu",
            figures.p50_us,
            figures.p99_us,
            figures.per_second,
            gigabytes(figures),
            figures.cpu_us
        )
    };
    print!("{:18} {}", cell.name(), line(ours));
    if let Some(bare) = bare {
        let ratio = (ours.p50_us / bare.p50_us, ours.per_second / bare.per_second);
        print!("   bare {}   p50 x{:.2}, rate x{:.2}", line(bare), ratio.0, ratio.1);
    }
    println!();
    std::io::stdout().flush().unwrap();
}

fn main() {
    let mut arguments = env::args().skip(1).peekable();
    if arguments.next_if_eq("serve").is_some() {
        let numbers: Vec<u64> = arguments.map(|argument| argument.parse().unwrap()).collect();
        serve(numbers[0], numbers[1] as usize, numbers[2] as usize);
        return;
    }
    let settings = Settings::of(arguments);
    pin(std::process::id(), 0);
    for block_bytes in [4 << 10, 64 << 10, 256 << 10, 1 << 20, 4 << 20] {
        let wanted = |cell: &Cell| settings.0.get("only").is_none_or(|only| cell.name().starts_with(only));
        let kinds = [
            (Operation::Load, 1),
            (Operation::Load, 32),
            (Operation::Store, 1),
            (Operation::Store, 32),
        ];
        let cells = kinds.map(|(operation, outstanding)| Cell {
            operation,
            block_bytes,
            outstanding,
        });
        let cells: Vec<_> = cells.into_iter().filter(wanted).collect();
        if !cells.is_empty() {
            compare(&settings, block_bytes, &cells);
        }
    }
}
