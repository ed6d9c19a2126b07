//! Sessions without an RNIC and without Python: streams, memory and clock are made here and a test decides when anything
//! happens.
//!
//! Every action passes through `perform`, which holds it to the rules that are true at every moment: credits (profile 3),
//! the read depth, one completion for each request, nothing after the end. An RDMA operation moves the first half of its
//! octets when it is posted and the rest when a test finishes it, so that whatever changes in between is seen.
//!
//! What is punted waits in `Peer::punted` until `serve_punt` does what Python would, at once and as a whole.

use std::cell::RefCell;
use std::collections::{HashMap, VecDeque};
use std::rc::Rc;
use std::sync::atomic::AtomicU64;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use kbtp_proto::blocks::{
    Allocation, BlockStore, Entry, FinishedFree, FreeToken, HandleRange, PartitionBlocks, RingMemory, StoreConfig,
    StoreMemory, Words,
};
use kbtp_proto::memory::{RegionId, Span};
use kbtp_proto::stream::Piece;
use kbtp_proto::target::{
    Action, BindingTerms, ForcedPunts, PuntReason, Session, SessionGrant, SessionMemory, SharedStore, TaskId,
};
use kbtp_proto::types::{RequestFlag, Status};
use kbtp_proto::wire::{DataDescriptor, Operation, Request};

pub(crate) const BLOCK: u32 = 512;
pub(crate) const BLOCKS: u32 = 8;
pub(crate) const HANDLES: u64 = 4;
/// The table's handles pass 2^64, where a range test that compares instead of subtracting fails.
pub(crate) const BASE_HANDLE: u64 = 0xFFFF_FFFF_FFFF_FFFC;
pub(crate) const DRAIN: Duration = Duration::from_secs(5);
pub(crate) const DOMAIN: u64 = 3;
pub(crate) const MAX_MESSAGE: u32 = 1024;
pub(crate) const POOL: RegionId = RegionId(0);
const POOL_BASE: u64 = 1 << 16;
const POISON: u8 = 0xEE;

#[derive(Clone)]
pub(crate) struct Shared(Rc<RefCell<BlockStore>>);

impl SharedStore for Shared {
    fn with<R>(&self, act: impl FnOnce(&mut BlockStore) -> R) -> R {
        act(&mut self.0.borrow_mut())
    }
}

/// All registered memory of the target.
#[derive(Clone, Default)]
pub(crate) struct Regions(Arc<Mutex<HashMap<RegionId, Vec<u8>>>>);

impl Regions {
    pub(crate) fn with<R>(&self, span: Span, act: impl FnOnce(&mut [u8]) -> R) -> R {
        let mut regions = self.0.lock().unwrap();
        let region = regions.get_mut(&span.region).unwrap();
        act(&mut region[span.offset as usize..][..span.len as usize])
    }

    pub(crate) fn put(&self, span: Span, octets: &[u8]) {
        self.with(span, |into| into.copy_from_slice(octets));
    }

    pub(crate) fn octets(&self, span: Span) -> Vec<u8> {
        self.with(span, |octets| octets.to_vec())
    }
}

/// `SessionMemory` of one stream.
pub(crate) struct PeerMemory {
    regions: Regions,
}

impl SessionMemory for PeerMemory {
    fn read(&self, span: Span, into: &mut [u8]) {
        self.regions.with(span, |octets| into.copy_from_slice(octets));
    }

    fn copy(&mut self, from: Span, to: Span) {
        assert!(from.len > 0);
        let octets = self.regions.octets(from);
        self.regions.with(to, |into| into.copy_from_slice(&octets));
    }
}

/// One COMPLETION as the initiator sees it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Answer {
    pub(crate) status: Status,
    pub(crate) generation: u16,
    pub(crate) data_length: u32,
    pub(crate) block_offset: u64,
    pub(crate) invalidated: Option<u32>,
}

/// An RDMA operation that is not finished.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Posted {
    Write { task: TaskId, source: Piece, stag: u32 },
    Read { task: TaskId, sink: Span, stag: u32 },
    Foreign { key: u64 },
}

#[derive(Clone, Copy, Debug)]
pub(crate) struct Punted {
    pub(crate) slot: u64,
    pub(crate) length_bytes: u32,
    pub(crate) reason: PuntReason,
}

pub(crate) struct Peer {
    pub(crate) session: Session<Shared>,
    pub(crate) grant: SessionGrant,
    pub(crate) memory: PeerMemory,
    /// Receive buffers that are the peer's, in the order of posting.
    pub(crate) lent: VecDeque<u64>,
    pub(crate) unanswered: HashMap<u64, u64>,
    pub(crate) answers: HashMap<u64, Answer>,
    /// Completion records: STag, tagged offset, octets.
    pub(crate) records: Vec<(u32, u64, [u8; 24])>,
    pub(crate) posted: Vec<Posted>,
    pub(crate) sends_posted: usize,
    /// COMPLETIONs leave as soon as they are posted.
    pub(crate) takes_sends: bool,
    pub(crate) punted: VecDeque<Punted>,
    pub(crate) buffers: HashMap<u32, Vec<u8>>,
    pub(crate) end_action: Option<Action>,
    pub(crate) drained: bool,
    pub(crate) ended: bool,
    next_request_id: u64,
    next_stag: u32,
}

pub(crate) struct World {
    pub(crate) store: Shared,
    pub(crate) regions: Regions,
    pub(crate) peers: Vec<Peer>,
    pub(crate) now: Instant,
    /// Python's FREEs that wait: whose, the request, its slot.
    pub(crate) python_frees: HashMap<u64, (usize, Request, u64)>,
    pub(crate) next_token: u64,
}

fn words(count: u64) -> Box<dyn Words> {
    let words: Vec<AtomicU64> = (0..count).map(|_| AtomicU64::new(0)).collect();
    Box::new(Arc::new(words))
}

impl World {
    pub(crate) fn new() -> Self {
        Self::with_direct_blocks(0)
    }

    /// The last `direct_blocks` of the blocks are for partitions.
    pub(crate) fn with_direct_blocks(direct_blocks: u32) -> Self {
        let config = StoreConfig {
            block_size_bytes: BLOCK,
            block_count: BLOCKS,
            pool_base: POOL_BASE,
            table_base_handle: BASE_HANDLE,
            table_handles: 4 * HANDLES,
            ring_order: 3,
            first_ticket: 0xFFFF_FFFE,
            direct_blocks,
            masked_counters: true,
        };
        let memory = StoreMemory {
            table: words(config.table_words()),
            ring: RingMemory {
                slots: words(config.slot_words().unwrap()),
                head: words(1),
                tail: words(1),
            },
        };
        let regions = Regions::default();
        let pool = vec![0; (BLOCK * BLOCKS) as usize];
        regions.0.lock().unwrap().insert(POOL, pool);
        let cleared = regions.clone();
        let clear = Box::new(move |offset, len| {
            cleared.with(
                Span {
                    region: POOL,
                    offset,
                    len,
                },
                |octets| octets.fill(0),
            )
        });
        let store = BlockStore::new(&config, memory, Some(clear)).unwrap();
        Self {
            store: Shared(Rc::new(RefCell::new(store))),
            regions,
            peers: Vec::new(),
            now: Instant::now(),
            python_frees: HashMap::new(),
            next_token: 0,
        }
    }

    /// A stream whose HELLO was granted `HANDLES` handles and `quota` blocks; its number.
    pub(crate) fn connect(
        &mut self,
        domain: u64,
        quota: u32,
        read_depth: u32,
        credits: u32,
        forced: Option<ForcedPunts>,
    ) -> usize {
        let number = self.peers.len();
        let holder = 70 + number as u64;
        let handles = HandleRange {
            first: BASE_HANDLE.wrapping_add(HANDLES * number as u64),
            count: HANDLES,
        };
        self.store.with(|store| {
            assert_eq!(store.quotas_mut().grant(holder, quota).unwrap(), quota);
            store.assign_range(handles, domain).unwrap();
        });
        let receives = RegionId(1 + number as u64);
        let octets = vec![POISON; (credits * MAX_MESSAGE) as usize];
        self.regions.0.lock().unwrap().insert(receives, octets);
        let grant = SessionGrant {
            stream: number as u64,
            holder,
            domain,
            handles,
            direct_alloc: false,
            binding: BindingTerms::RDMAP,
            request_credits: credits,
            max_message_bytes: MAX_MESSAGE,
            receives,
            pool: POOL,
            read_depth,
            drain: DRAIN,
        };
        self.peers.push(Peer {
            session: Session::new(grant.clone(), self.store.clone(), forced, self.now),
            memory: PeerMemory {
                regions: self.regions.clone(),
            },
            grant,
            lent: (0..u64::from(credits)).collect(),
            unanswered: HashMap::new(),
            answers: HashMap::new(),
            records: Vec::new(),
            posted: Vec::new(),
            sends_posted: 0,
            takes_sends: true,
            punted: VecDeque::new(),
            buffers: HashMap::new(),
            end_action: None,
            drained: false,
            ended: false,
            next_request_id: 0x1_0000_0000 * (1 + number as u64),
            next_stag: 0x100,
        });
        number
    }

    /// A session as most tests want it.
    pub(crate) fn join(&mut self) -> usize {
        self.connect(DOMAIN, 2, 2, 4, None)
    }

    pub(crate) fn handle(&self, peer: usize, n: u64) -> u64 {
        self.peers[peer].grant.handles.first.wrapping_add(n)
    }

    pub(crate) fn entry(&self, handle: u64) -> Entry {
        self.store.with(|store| store.read(handle).unwrap())
    }

    pub(crate) fn store_free_blocks(&self) -> u32 {
        self.store.with(|store| store.free_blocks())
    }

    pub(crate) fn table(&self) -> Vec<Entry> {
        (0..4 * HANDLES)
            .map(|n| self.entry(BASE_HANDLE.wrapping_add(n)))
            .collect()
    }

    pub(crate) fn pool(&self) -> Vec<u8> {
        self.regions.octets(Span {
            region: POOL,
            offset: 0,
            len: BLOCK * BLOCKS,
        })
    }

    /// The data of a bound handle.
    pub(crate) fn data(&self, handle: u64) -> Vec<u8> {
        let entry = self.entry(handle);
        self.regions.octets(self.block(entry.block_offset, entry.data_length))
    }

    fn block(&self, block_offset: u64, len: u32) -> Span {
        let offset = self.store.with(|store| store.pool().position(block_offset).unwrap());
        Span {
            region: POOL,
            offset,
            len,
        }
    }

    // --- what the initiator does ---

    pub(crate) fn buffer(&mut self, peer: usize, octets: Vec<u8>) -> u32 {
        let peer = &mut self.peers[peer];
        peer.next_stag += 1;
        peer.buffers.insert(peer.next_stag, octets);
        peer.next_stag
    }

    /// One Send, into the oldest receive buffer.
    pub(crate) fn send(&mut self, number: usize, octets: &[u8]) {
        let peer = &mut self.peers[number];
        let slot = peer.lent.pop_front().expect("no credit");
        let span = Span {
            region: peer.grant.receives,
            offset: slot * u64::from(MAX_MESSAGE),
            len: octets.len() as u32,
        };
        self.regions.with(span, |into| into.copy_from_slice(octets));
        if octets.len() >= 24 {
            let word = |at: usize| u64::from_be_bytes(octets[at..at + 8].try_into().unwrap());
            peer.unanswered.insert(word(4), word(12));
        }
        peer.session
            .received(slot, octets.len() as u32, &mut peer.memory, self.now);
        self.perform(number);
    }

    pub(crate) fn request(&mut self, peer: usize, operation: Operation, handle: u64) -> Request {
        let peer = &mut self.peers[peer];
        peer.next_request_id += 1;
        Request {
            operation,
            request_id: peer.next_request_id,
            handle,
            generation: 0,
            flags: RequestFlag::empty(),
            data: DataDescriptor::default(),
            completion: None,
            inline_at: 0,
            inline_bytes: 0,
        }
    }

    /// LOAD into a fresh buffer; the Request ID. The buffer's STag is the newest one.
    pub(crate) fn load(&mut self, peer: usize, handle: u64, flags: RequestFlag) -> u64 {
        let stag = self.buffer(peer, vec![0; BLOCK as usize]);
        let mut request = self.request(peer, Operation::Load, handle);
        request.data = DataDescriptor {
            stag,
            to: 0,
            length: BLOCK,
        };
        request.flags = flags;
        self.send(peer, &request.pack(&[]));
        request.request_id
    }

    /// STORE or ALLOC_STORE; the Request ID.
    pub(crate) fn put(
        &mut self,
        peer: usize,
        operation: Operation,
        handle: u64,
        data: &[u8],
        flags: RequestFlag,
    ) -> u64 {
        let mut request = self.request(peer, operation, handle);
        request.data.length = data.len() as u32;
        request.flags = flags;
        let inline = flags.contains(RequestFlag::INLINE);
        if !inline {
            request.data.stag = self.buffer(peer, data.to_vec());
        }
        self.send(peer, &request.pack(if inline { data } else { &[] }));
        request.request_id
    }

    pub(crate) fn free(&mut self, peer: usize, handle: u64) -> u64 {
        let request = self.request(peer, Operation::Free, handle);
        self.send(peer, &request.pack(&[]));
        request.request_id
    }

    /// The blocks from `first` on, of those for partitions, are the peer's own.
    pub(crate) fn open_partition(&self, peer: usize, first: u32, count: u32) {
        let blocks = PartitionBlocks { first, count };
        let memory = RingMemory {
            slots: words(2 << blocks.ring_order().unwrap()),
            head: words(1),
            tail: words(1),
        };
        let holder = self.peers[peer].grant.holder;
        self.store
            .with(|store| store.open_partition(holder, blocks, memory))
            .unwrap();
    }

    /// A block bound to `handle`, as a place to start from.
    pub(crate) fn bind(&self, holder: u64, handle: u64, data: &[u8], seal: bool) {
        let allocation = self
            .store
            .with(|store| store.begin_alloc_store(handle, holder).unwrap());
        let Allocation::Block(block_offset) = allocation else {
            panic!("{allocation:?}")
        };
        let length = data.len() as u32;
        self.regions
            .with(self.block(block_offset, length), |octets| octets.copy_from_slice(data));
        self.store
            .with(|store| store.commit_alloc_store(handle, block_offset, length, seal))
            .unwrap();
    }

    pub(crate) fn bind_own(&self, peer: usize, n: u64, data: &[u8], seal: bool) {
        self.bind(self.peers[peer].grant.holder, self.handle(peer, n), data, seal);
    }

    pub(crate) fn status(&self, peer: usize, request_id: u64) -> Option<Status> {
        self.peers[peer].answers.get(&request_id).map(|answer| answer.status)
    }

    // --- what the target does ---

    pub(crate) fn perform(&mut self, number: usize) {
        let mut finished = Vec::new();
        let peer = &mut self.peers[number];
        while let Some(action) = peer.session.next_action() {
            assert_eq!(peer.end_action, None, "{action:?}");
            match action {
                Action::Freed(free) => finished.push(free),
                _ if peer.ended => panic!("{action:?} after the end"),
                Action::Repost { slot } => repost(peer, &self.regions, slot),
                Action::Send {
                    message,
                    invalidate_stag,
                } => {
                    take(peer, &message, invalidate_stag);
                    peer.sends_posted += 1;
                    if peer.takes_sends {
                        peer.sends_posted -= 1;
                        peer.session.sent();
                    }
                }
                Action::Record {
                    record,
                    stag,
                    to,
                    immediate,
                } => {
                    peer.unanswered.retain(|id, _| *id as u32 != immediate);
                    peer.records.push((stag, to, record));
                    peer.session.sent();
                }
                Action::Write { task, source, stag, to } => {
                    assert_eq!(to, 0);
                    post(peer, &self.regions, Posted::Write { task, source, stag });
                }
                Action::Read { task, sink, stag, to } => {
                    assert_eq!(to, 0);
                    post(peer, &self.regions, Posted::Read { task, sink, stag });
                }
                Action::ForeignRead { key } => post(peer, &self.regions, Posted::Foreign { key }),
                Action::Punt {
                    slot,
                    length_bytes,
                    reason,
                } => peer.punted.push_back(Punted {
                    slot,
                    length_bytes,
                    reason,
                }),
                Action::Drained => {
                    assert!(!peer.drained);
                    peer.drained = true;
                }
                Action::Abort { .. } => peer.end_action = Some(action),
            }
        }
        for free in finished {
            self.route(free);
        }
    }

    /// Tell the origin of a FREE that had to wait.
    fn route(&mut self, free: FinishedFree) {
        match free.token {
            FreeToken::Stream { stream, request } => {
                let number = stream as usize;
                let peer = &mut self.peers[number];
                assert_eq!(free.holder, peer.grant.holder);
                if !peer.ended {
                    peer.session
                        .freed(TaskId(request), &free.entry, &mut peer.memory, self.now);
                    self.perform(number);
                }
            }
            FreeToken::Python(token) => {
                if let Some((number, request, slot)) = self.python_frees.remove(&token)
                    && !self.peers[number].ended
                {
                    self.answer(number, &request, slot, Status::Success, Some(free.entry));
                }
            }
        }
    }

    // --- what the RNIC reports ---

    pub(crate) fn foreign_read(&mut self, number: usize, key: u64) {
        let peer = &mut self.peers[number];
        peer.session.foreign_read(key, self.now);
    }

    pub(crate) fn finish(&mut self, number: usize, n: usize) {
        let peer = &mut self.peers[number];
        let operation = peer.posted.remove(n);
        move_half(peer, &self.regions, &operation, false);
        match operation {
            Posted::Write { task, .. } => peer.session.written(task, &mut peer.memory, self.now),
            Posted::Read { task, .. } => peer.session.fetched(task, &mut peer.memory, self.now),
            Posted::Foreign { .. } => peer.session.foreign_read_done(self.now),
        }
        self.perform(number);
    }

    pub(crate) fn finish_all(&mut self, number: usize) {
        while !self.peers[number].posted.is_empty() {
            self.finish(number, 0);
        }
    }

    /// All COMPLETIONs that were posted leave.
    pub(crate) fn take_sends(&mut self, number: usize) {
        while self.peers[number].sends_posted > 0 {
            self.peers[number].sends_posted -= 1;
            self.peers[number].session.sent();
            self.perform(number);
        }
    }

    pub(crate) fn advance(&mut self, time: Duration) {
        self.now += time;
        for number in 0..self.peers.len() {
            self.peers[number].session.tick(self.now);
            self.perform(number);
        }
    }

    pub(crate) fn resolved(&mut self, number: usize, handle: u64) {
        self.peers[number].session.resolved(handle);
        self.perform(number);
    }

    pub(crate) fn drain(&mut self, number: usize) {
        self.peers[number].session.drain();
        self.perform(number);
    }

    /// The stream ends.
    pub(crate) fn end(&mut self, number: usize) {
        let peer = &mut self.peers[number];
        peer.end_action = None;
        peer.ended = true;
        peer.posted.clear();
        peer.punted.clear();
        peer.session.end();
        assert_eq!(peer.session.outstanding(), 0);
        self.perform(number);
    }

    /// What Python does when the identity of an ended stream leaves.
    pub(crate) fn leave(&mut self, number: usize) {
        let SessionGrant { handles, holder, .. } = self.peers[number].grant;
        for handle in self.store.with(|store| store.bound_handles(handles).unwrap()) {
            let token = FreeToken::Python(u64::MAX);
            self.store
                .with(|store| store.begin_free(handle, holder, token, None).unwrap());
        }
    }
}

pub(crate) fn repost(peer: &mut Peer, regions: &Regions, slot: u64) {
    assert!(!peer.lent.contains(&slot));
    let span = Span {
        region: peer.grant.receives,
        offset: slot * u64::from(MAX_MESSAGE),
        len: MAX_MESSAGE,
    };
    regions.with(span, |octets| octets.fill(POISON)); // whoever still needs what was in it loses
    peer.lent.push_back(slot);
}

pub(crate) fn take(peer: &mut Peer, message: &[u8], invalidated: Option<u32>) {
    let word = |at: usize| u64::from_be_bytes(message[at..at + 8].try_into().unwrap());
    let half = |at: usize| u16::from_be_bytes(message[at..at + 2].try_into().unwrap());
    assert_eq!((message.len(), half(0), half(2)), (40, 0x0108, 0));
    let request_id = word(4);
    let handle = peer.unanswered.remove(&request_id);
    assert_eq!(handle, Some(word(12)), "one completion a request, Handle echoed");
    let free = peer.lent.len() + peer.unanswered.len();
    assert_eq!(
        free, peer.grant.request_credits as usize,
        "profile 3: reposted for this one, and only this"
    );
    let answer = Answer {
        status: Status::from_value(half(22)).unwrap(),
        generation: half(20),
        data_length: (word(24) >> 32) as u32,
        block_offset: word(32),
        invalidated,
    };
    assert_eq!(peer.answers.insert(request_id, answer), None);
}

fn post(peer: &mut Peer, regions: &Regions, operation: Posted) {
    move_half(peer, regions, &operation, true);
    peer.posted.push(operation);
    let reads = peer
        .posted
        .iter()
        .filter(|posted| !matches!(posted, Posted::Write { .. }));
    assert!(reads.count() <= peer.grant.read_depth as usize);
}

fn move_half(peer: &mut Peer, regions: &Regions, operation: &Posted, first: bool) {
    let (span, stag, writes) = match operation {
        Posted::Write { source, stag, .. } => (source.span().unwrap(), *stag, true),
        Posted::Read { sink, stag, .. } => (*sink, *stag, false),
        Posted::Foreign { .. } => return,
    };
    let half = span.len / 2;
    let part = if first {
        span.part(0, half)
    } else {
        span.part(half, span.len - half)
    };
    let from = if first { 0 } else { half as usize };
    let there = &mut peer.buffers.get_mut(&stag).unwrap()[from..from + part.len as usize];
    assert!(span.len > 0);
    regions.with(part, |here| {
        if writes {
            there.copy_from_slice(here);
        } else {
            here.copy_from_slice(there);
        }
    });
}

pub(crate) fn range_contains(range: HandleRange, handle: u64) -> bool {
    handle.wrapping_sub(range.first) < range.count
}
