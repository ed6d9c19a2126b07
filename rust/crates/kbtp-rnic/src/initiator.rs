//! What a stream does by itself once it carries an initiator's requests: the work of `kbtp_proto::initiator::Session`.
//!
//! The session decides, this carries out: memory is registered when the request that names it leaves and revoked when
//! its answer is there, completions become records of the batch they belong to. Batches outlive the stream, since
//! somebody may still want to know how they ended; their lock is taken last.

use std::sync::{Arc, Mutex};

use kbtp_proto::crc32c;
use kbtp_proto::initiator::{Data, Destinations, Ended, Operation, Ready, Session, Terms};
use kbtp_proto::limits::COMPLETION_BYTES;
use kbtp_proto::memory::{Octets, RegionId, Span};
use kbtp_proto::own_maps::OwnMap;
use kbtp_proto::stag::StreamId as ViewId;
use kbtp_proto::stream::{Payload, Piece, Work};
use kbtp_proto::types::{Generation, Handle, PeerMisbehaved, RequestFlag, Status, TerminateCause};
use kbtp_proto::wire::{Completion, DataDescriptor, Operation as Kind, Packed};

use crate::api::{Event, StreamId, WcOpcode, WorkCompletion};
use crate::core::{Core, lock};
use crate::device::{Pd, Region};
use crate::error::{EndReason, Error};
use crate::memory::{Buffer, RegisteredOctets, Use};
use crate::operation::Operation as Transport;
use crate::stream_state::{HeldWork, StreamState, WorkOwner};

/// What a HELLO got, as far as requests depend on it; see `kbtp.verbs.requester.RequestGrant`.
#[derive(Clone, Debug)]
#[allow(missing_docs, reason = "the fields are those of kbtp.verbs.requester.RequestGrant")]
pub struct RequestGrant {
    pub terms: Terms,
    pub inline_max_bytes: usize,
    pub receives: Region,
    pub max_message_bytes: u32,
}

/// Octets of the caller's that a request loads into or stores from.
#[derive(Debug)]
pub struct Memory {
    address: usize,
    length_bytes: usize,
    place: Place,
}

#[derive(Debug)]
enum Place {
    /// Within a region of the caller's, from this offset.
    Registered(Region, u64),
    /// Registered for one request alone while that is outstanding.
    Own(Buffer, Option<Region>),
    /// No octets.
    Nowhere,
}

impl Memory {
    /// No octets at all.
    #[must_use]
    pub fn empty() -> Self {
        Self {
            address: 0,
            length_bytes: 0,
            place: Place::Nowhere,
        }
    }

    /// `length_bytes` octets at `address`, which are those of `region` from `offset` on.
    #[must_use]
    pub fn registered(region: Region, offset: u64, address: usize, length_bytes: usize) -> Self {
        Self {
            address,
            length_bytes,
            place: Place::Registered(region, offset),
        }
    }

    /// All octets of `buffer`.
    #[must_use]
    pub fn unregistered(buffer: Buffer) -> Self {
        Self {
            address: buffer.address(),
            length_bytes: buffer.length(),
            place: Place::Own(buffer, None),
        }
    }
}

/// One request of a batch.
#[derive(Debug)]
#[allow(
    missing_docs,
    reason = "the other fields are those of kbtp_proto::initiator::Operation"
)]
pub struct Asked {
    pub handle: Option<Handle>,
    pub generation: Generation,
    /// Nobody's for a FREE. Or why the request could never work.
    pub memory: Result<Memory, String>,
}

/// What all requests of a batch have in common.
#[derive(Clone, Copy, Debug)]
pub struct How {
    /// What they ask for.
    pub kind: Kind,
    /// SEAL or ALLOW_UNSEALED.
    pub flags: RequestFlag,
    /// The caller wants the CRC32c of what is moved.
    pub checksums: bool,
}

/// How one request of a batch ended.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Outcome {
    /// The target's answer, and the CRC32c of the data if that was asked for and is known.
    Answered(Completion, Option<u32>),
    /// All handles of the session's own range are bound: nothing was sent.
    NoHandle,
    /// It could never work, and was not sent.
    Misused(String),
    /// The stream ended first: not done, or not known to be done.
    Lost,
}

/// The requests of one call.
#[derive(Debug)]
struct Batch {
    outcomes: Vec<Option<Outcome>>,
    left: usize,
    /// An event says when it is done.
    reported: bool,
}

/// All batches of a stream that nobody has taken yet.
#[derive(Debug, Default)]
pub(crate) struct Batches {
    batches: OwnMap<u64, Batch>,
    submitted: u64,
}

impl Batches {
    fn open(&mut self, count: usize, reported: bool) -> u64 {
        self.submitted += 1;
        let batch = Batch {
            outcomes: vec![None; count],
            left: count,
            reported,
        };
        self.batches.insert(self.submitted, batch);
        self.submitted
    }

    /// A batch of a stream that has ended.
    pub(crate) fn open_lost(&mut self, count: usize) -> u64 {
        let number = self.open(count, false);
        self.lose(number, 0, count);
        number
    }

    /// `count` requests of a batch, from the `first` on, were not submitted before the stream ended.
    pub(crate) fn lose(&mut self, batch: u64, first: usize, count: usize) {
        for index in (first..).take(count) {
            self.end(Item { batch, index }, Outcome::Lost);
        }
    }

    /// True if that was the last one of a batch whose end is to be reported.
    fn end(&mut self, item: Item, outcome: Outcome) -> bool {
        let Some(batch) = self.batches.get_mut(&item.batch) else {
            return false;
        };
        let Some(place @ None) = batch.outcomes.get_mut(item.index) else {
            return false;
        };
        *place = Some(outcome);
        batch.left -= 1;
        batch.left == 0 && batch.reported
    }

    pub(crate) fn is_done(&self, number: u64) -> bool {
        self.batches.get(&number).is_none_or(|batch| batch.left == 0)
    }

    /// The outcomes of a batch that is done; None if it is not, or not there.
    pub(crate) fn take(&mut self, number: u64) -> Option<Vec<Outcome>> {
        if self.batches.get(&number)?.left > 0 {
            return None;
        }
        let batch = self.batches.remove(&number)?;
        Some(batch.outcomes.into_iter().flatten().collect())
    }
}

/// Which request of which batch.
#[derive(Clone, Copy, Debug)]
struct Item {
    batch: u64,
    index: usize,
}

#[derive(Debug)]
struct Context {
    item: Item,
    memory: Memory,
    /// Its memory is held in `Initiator::destinations`.
    claimed: bool,
    checksum: Checksum,
}

/// Where the CRC32c of a request's data comes from, that the caller may want.
#[derive(Clone, Copy, Debug)]
enum Checksum {
    Unwanted,
    Wanted,
    /// The stream watches the memory that begins here.
    Watched {
        stag: u32,
        to: u64,
    },
    Taken(u32),
}

const SHARED_MEMORY: &str = "another load is placing a block in the same memory: give every load of a batch memory of \
                             its own, and wait for a load before its buffer is used again";

/// The requests that one stream carries.
pub(crate) struct Initiator {
    stream: StreamId,
    pd: Pd,
    view: ViewId,
    session: Session<Context>,
    destinations: Destinations,
    batches: Arc<Mutex<Batches>>,
    receives: RegionId,
    max_message_bytes: u32,
    inline_max_bytes: usize,
}

impl Initiator {
    fn open_batch(&mut self, core: &mut Core, count: usize, reported: bool) -> u64 {
        let batch = lock(&self.batches).open(count, reported);
        if count == 0 && reported {
            self.report(core, batch);
        }
        batch
    }

    fn submit(&mut self, core: &mut Core, how: How, batch: u64, first: usize, asked: Vec<Asked>) {
        let How { kind, flags, checksums } = how;
        for (index, one) in (first..).zip(asked) {
            let memory = match one.memory {
                Ok(memory) => memory,
                Err(why) => {
                    self.end(core, Item { batch, index }, Outcome::Misused(why));
                    continue;
                }
            };
            let claims = kind == Kind::Load && memory.length_bytes > 0;
            let end = memory.address.saturating_add(memory.length_bytes);
            let claimed = claims && self.destinations.claim(memory.address, end);
            let context = Context {
                item: Item { batch, index },
                memory,
                claimed,
                checksum: if checksums {
                    Checksum::Wanted
                } else {
                    Checksum::Unwanted
                },
            };
            if claims && !claimed {
                self.end_item(core, context, Outcome::Misused(SHARED_MEMORY.into()));
                continue;
            }
            self.session.submit(Operation {
                kind,
                handle: one.handle,
                generation: one.generation,
                flags,
                context,
            });
        }
    }

    /// The next request that there is a credit for, and the region that its data is sent from.
    fn next_message(&mut self, core: &mut Core, stream: &mut Transport) -> Option<(Payload, Option<RegionId>)> {
        loop {
            let mut ready = match self.session.ready()? {
                Ok(ready) => ready,
                Err(Ended::NoHandle(mut operation)) => {
                    operation.context.checksum.known(stream, 0); // of an earlier try with another handle
                    self.end_item(core, operation.context, Outcome::NoHandle);
                    continue;
                }
                Err(_) => continue,
            };
            let (data, inline) = match self.prepare(core, &mut ready, stream) {
                Ok(Prepared::Nothing) => (Data::None, None),
                Ok(Prepared::Described(descriptor, alone)) => (Data::Described { descriptor, alone }, None),
                Ok(Prepared::Inline(length_bytes, octets)) => (Data::Inline(length_bytes), Some(octets)),
                Err(error) => {
                    let operation = self.session.withdraw(ready);
                    self.end_item(core, operation.context, Outcome::Misused(error.to_string()));
                    continue;
                }
            };
            let region = match &inline {
                Some(Piece::Span(span)) => Some(span.region),
                _ => None,
            };
            let mut payload = Payload::new();
            payload.push(Piece::Inline(self.session.send(ready, data)));
            payload.extend(inline);
            return Some((payload, region));
        }
    }

    /// Let the target at the memory of `ready`, or copy it.
    fn prepare(&self, core: &mut Core, ready: &mut Ready<Context>, stream: &mut Transport) -> Result<Prepared, Error> {
        let kind = ready.operation.kind;
        let Context { memory, checksum, .. } = &mut ready.operation.context;
        checksum.known(stream, 0); // of an earlier try with another handle
        if kind == Kind::Free {
            return Ok(Prepared::Nothing);
        }
        let length = u32::try_from(memory.length_bytes).map_err(|_| {
            Error::misuse(format!(
                "length: {} is not an unsigned integer of 32 bits",
                memory.length_bytes
            ))
        })?;
        if kind.stores() && memory.length_bytes <= self.inline_max_bytes {
            let octets = memory.piece(length)?;
            if checksum.is_wanted() {
                *checksum = Checksum::Taken(match &octets {
                    Piece::Span(span) => RegisteredOctets(&core.device.table().memories).crc32c(0, *span),
                    Piece::Inline(octets) => crc32c::update(0, octets),
                    _ => return Err(Error::misuse("no such piece is made of a request's data")),
                });
            }
            return Ok(Prepared::Inline(length, octets));
        }
        let (region, offset, alone): (&Region, _, _) = match &mut memory.place {
            // No octet goes through it (profile 8.7).
            Place::Nowhere => return Ok(Prepared::Described(DataDescriptor::default(), false)),
            Place::Registered(region, offset) => (check_valid(region)?, *offset, false),
            Place::Own(buffer, region) => {
                let mut table = core.device.table_mut();
                if let Some(former) = region.take() {
                    table.forget(former.shared.id); // an earlier try with another handle
                }
                let registered = table.register(buffer.share(), kind.access(), &self.pd, Some(self.view), 0)?;
                (region.insert(registered), 0, true)
            }
        };
        let span = Span {
            region: region.shared.id,
            offset,
            len: length,
        };
        core.ahead.add(span, if kind.stores() { Use::Read } else { Use::Write });
        let (stag, to) = (region.stag(), region.base_to() + offset);
        if checksum.is_wanted() {
            stream.watch_memory(stag, to, length);
            *checksum = Checksum::Watched { stag, to };
        }
        Ok(Prepared::Described(DataDescriptor { stag, to, length }, alone))
    }

    /// What the target's `message` ends.
    fn take_answer(&mut self, core: &mut Core, stream: &mut Transport, message: &[u8]) -> Result<(), PeerMisbehaved> {
        match self.session.received(message)? {
            Ended::Answered(mut operation, completion) => {
                let checksum = &mut operation.context.checksum;
                let known = match operation.kind {
                    Kind::Load => checksum.known(stream, completion.data_length),
                    _ => checksum.known(stream, operation.context.memory.length_bytes as u32),
                }
                .filter(|_| completion.status == Status::Success);
                self.end_item(core, operation.context, Outcome::Answered(completion, known));
            }
            Ended::NoHandle(operation) => self.end_item(core, operation.context, Outcome::NoHandle),
            Ended::Again => {}
        }
        Ok(())
    }

    /// The target is kept from the memory of an item before anybody learns how it ended.
    fn end_item(&mut self, core: &mut Core, context: Context, outcome: Outcome) {
        let Context {
            item, memory, claimed, ..
        } = context;
        if claimed {
            self.destinations.release(memory.address);
        }
        if let Place::Own(buffer, region) = memory.place {
            if let Some(region) = region {
                core.device.table_mut().forget(region.shared.id);
            }
            core.device.unheld().bury(buffer);
        }
        self.end(core, item, outcome);
    }

    fn end(&self, core: &mut Core, item: Item, outcome: Outcome) {
        // Of what is lost with the stream, the stream's end is the report.
        let told = outcome == Outcome::Lost;
        if lock(&self.batches).end(item, outcome) && !told {
            self.report(core, item.batch);
        }
    }

    fn report(&self, core: &mut Core, batch: u64) {
        let stream = self.stream;
        core.report(Event::BatchDone { stream, batch });
    }
}

/// How the data of a request travels.
enum Prepared {
    Nothing,
    /// So many octets within the request.
    Inline(u32, Piece),
    /// The STag is for this request alone if so said.
    Described(DataDescriptor, bool),
}

impl Memory {
    /// Its octets, for a request to carry: in registered memory from where they lie, which belong to the request until it
    /// has left.
    fn piece(&self, length: u32) -> Result<Piece, Error> {
        Ok(match &self.place {
            Place::Registered(region, offset) => Piece::Span(Span {
                region: check_valid(region)?.shared.id,
                offset: *offset,
                len: length,
            }),
            Place::Own(buffer, _) => {
                let mut octets = Packed::from_elem(0, self.length_bytes);
                buffer.read_into(&mut octets);
                Piece::Inline(octets)
            }
            Place::Nowhere => Piece::Inline(Packed::new()),
        })
    }
}

impl Checksum {
    fn is_wanted(self) -> bool {
        !matches!(self, Self::Unwanted)
    }

    /// What the stream, which no longer watches, knows of `length` octets: nothing if it was others that were moved.
    fn known(&mut self, stream: &mut Transport, length: u32) -> Option<u32> {
        match *self {
            Self::Unwanted | Self::Wanted => None,
            Self::Taken(crc) => Some(crc),
            Self::Watched { stag, to } => {
                *self = Self::Wanted;
                let moved = stream.moved(stag, to)?;
                (moved.length == length).then_some(moved.crc)
            }
        }
    }
}

fn check_valid(region: &Region) -> Result<&Region, Error> {
    if region.valid() {
        return Ok(region);
    }
    let stag = region.stag();
    Err(Error::misuse(format!(
        "the region of STag {stag:#010x} is revoked: register the buffer again"
    )))
}

impl StreamState {
    /// Carry requests from now on. Every receive is posted, in slots of `max_message_bytes`.
    pub(crate) fn carry(&mut self, core: &Core, grant: &RequestGrant) -> Result<Arc<Mutex<Batches>>, Error> {
        if !Arc::ptr_eq(&grant.receives.shared.device, &core.device) || !grant.receives.valid() {
            return Err(Error::misuse("receive buffers must be registered with this RNIC"));
        }
        if self.offload.is_some() || self.initiator.is_some() || self.operation.is_none() || core.has_threads() {
            return Err(Error::misuse(
                "a stream carries requests once, after Established, on a channel without threads",
            ));
        }
        if let Some(operation) = self.operation.as_mut() {
            // The target reads what is to be stored, and that is left alone until its request has ended.
            operation.keep_sources_still();
        }
        let receives = grant.receives.shared.id;
        core.device.table().memories.hold(receives);
        self.session_regions.push(receives);
        let batches = Arc::new(Mutex::new(Batches::default()));
        self.initiator = Some(Box::new(Initiator {
            stream: self.id(),
            pd: self.pd().clone(),
            view: self.view_id(),
            session: Session::new(grant.terms),
            destinations: Destinations::default(),
            batches: Arc::clone(&batches),
            receives,
            max_message_bytes: grant.max_message_bytes,
            inline_max_bytes: grant.inline_max_bytes,
        }));
        Ok(batches)
    }

    /// Begin a batch of `count` requests; its number. `reported`: an event says when it is done.
    pub(crate) fn open_batch(&mut self, core: &mut Core, count: usize, reported: bool) -> Result<u64, Error> {
        let Some(initiator) = &mut self.initiator else {
            return Err(Error::misuse("the stream carries no requests"));
        };
        Ok(initiator.open_batch(core, count, reported))
    }

    /// Submit the requests of a batch from the `first` on.
    pub(crate) fn submit(&mut self, core: &mut Core, how: How, batch: u64, first: usize, asked: Vec<Asked>) {
        if let Some(initiator) = &mut self.initiator {
            initiator.submit(core, how, batch, first, asked);
        }
        self.post_requests(core);
        self.send(core);
    }

    /// Post what there are credits for.
    fn post_requests(&mut self, core: &mut Core) {
        loop {
            let (Some(initiator), Some(operation)) = (&mut self.initiator, &mut self.operation) else {
                return;
            };
            if operation.failed() {
                return;
            }
            let Some((payload, region)) = initiator.next_message(core, operation) else {
                return;
            };
            let work = Work::Send {
                wr_id: 0,
                payload,
                invalidate_stag: None,
                solicited: false,
            };
            // A stream that has failed refuses; the request is then outstanding, and lost when the stream ends.
            if operation.post(work).is_ok() {
                if let Some(region) = region {
                    core.device.table().memories.hold(region);
                }
                self.held_work.push_back(HeldWork {
                    regions: region.into_iter().collect(),
                    owner: WorkOwner::Request,
                });
            }
        }
    }

    /// A message of the target's, if this stream carries requests; gives it back if not.
    pub(crate) fn take_answer(&mut self, core: &mut Core, completion: WorkCompletion) -> Option<WorkCompletion> {
        let (Some(initiator), Some(operation)) = (&mut self.initiator, &mut self.operation) else {
            return Some(completion);
        };
        if completion.opcode != WcOpcode::Recv {
            self.answer_misbehaved(
                core,
                PeerMisbehaved::new(TerminateCause::RdmapUnspecified, "no COMPLETION came"),
            );
            return None;
        }
        let buffer = Span {
            region: initiator.receives,
            offset: completion.wr_id.saturating_mul(initiator.max_message_bytes.into()),
            len: initiator.max_message_bytes,
        };
        let mut octets = [0; COMPLETION_BYTES + 1]; // one more, so that what is too long is seen to be
        let length = (completion.length as usize).min(octets.len());
        let message = octets.get_mut(..length).unwrap_or_default();
        RegisteredOctets(&core.device.table().memories).read_into(buffer, message);
        match initiator.take_answer(core, operation, message) {
            Ok(()) => {
                self.post_slot(completion.wr_id, buffer); // profile 3 "Credits": before a request may use it
                self.post_requests(core);
            }
            Err(error) => self.answer_misbehaved(core, error),
        }
        None
    }

    fn answer_misbehaved(&mut self, core: &mut Core, error: PeerMisbehaved) {
        if let Some(operation) = &mut self.operation {
            operation.terminate(error.cause);
        }
        self.end(core, Some(EndReason::PeerMisbehaved(error)));
    }

    /// The stream has ended, and nothing of the target's is placed any more: what is not answered is lost.
    pub(crate) fn end_initiator(&mut self, core: &mut Core) {
        if let Some(mut initiator) = self.initiator.take() {
            for operation in initiator.session.fail() {
                initiator.end_item(core, operation.context, Outcome::Lost);
            }
        }
    }
}
