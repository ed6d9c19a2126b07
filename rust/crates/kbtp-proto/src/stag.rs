//! STags: which octets a peer may reach, on which stream, and how (RFC 5040 8.1, RFC 5041 8.2 and 8.3, RFC 5042 6).
//!
//! `StagTable` is the one place of an RNIC that grants and takes away; it knows addresses and never follows one. Each
//! failing check names the Terminate that says so. Checks run in this order: STag known, association, TO wrap, bounds,
//! rights.
//!
//! The RNIC keeps the table under a lock that many may hold for reading: they hold it from the look-up of an STag until
//! its octets are copied into or out of registered memory. `revoke` takes it for writing, so that after it returns, in any
//! thread, no octet moves through the STag. What changes with each message (STags of sinks, a region that a peer has just
//! invalidated) changes under the reader's lock, and has one of its own or is an atomic.

use std::collections::{BTreeMap, VecDeque};
use std::ops::Bound;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};

use crate::limits::{STAG_DRAWS_MAX, STAG_HISTORY};
use crate::memory::{RegionId, Span};
use crate::own_maps::{OwnMap, OwnSet};
use crate::types::{ApiMisuse, PeerMisbehaved, TerminateCause};

/// One past the highest tagged offset.
const TO_END: u128 = 1 << 64;
/// Octets an atomic works on.
pub const ATOMIC_BYTES: u32 = 8;

bitflags::bitflags! {
    /// Remote rights of a memory region; without any of them only the owner's own posts use it.
    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    pub struct Access: u8 {
        /// RDMA Reads.
        const REMOTE_READ = 1;
        /// RDMA Writes.
        const REMOTE_WRITE = 2;
        /// Atomics.
        const REMOTE_ATOMIC = 4;
    }
}

/// What lets a peer change octets; RFC 5042 6.3.6 is about all of it.
const CHANGES: Access = Access::REMOTE_WRITE.union(Access::REMOTE_ATOMIC);

/// A protection domain of one table.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct PdId {
    table: u64,
    number: u64,
}

/// One stream's view of a table.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct StreamId {
    pd: PdId,
    number: u64,
}

impl StreamId {
    /// The stream's protection domain.
    pub const fn pd(self) -> PdId {
        self.pd
    }
}

/// What is to be registered.
#[derive(Clone, Copy, Debug)]
pub struct Registration {
    /// The RNIC's number for the memory.
    pub region: RegionId,
    /// Address of the first octet in this process.
    pub address: u64,
    /// How many octets.
    pub len: u64,
    /// The owner may change the octets.
    pub writable: bool,
    /// What a peer may do.
    pub access: Access,
    /// The domain whose streams reach the region.
    pub pd: PdId,
    /// The one stream that reaches the region; None: every stream of `pd`.
    pub scope: Option<StreamId>,
    /// Tagged offset of the first octet.
    pub base_to: u64,
}

/// A region in the table.
#[derive(Debug)]
struct Region {
    id: RegionId,
    /// A peer has made it unusable; `revoke` follows.
    invalidated: AtomicBool,
    address: u64,
    len: u64,
    access: Access,
    pd: PdId,
    scope: Option<StreamId>,
    base_to: u64,
}

/// A region's name for peers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Registered {
    /// The STag.
    pub stag: u32,
    /// False if the region was born revoked, because the stream of its scope has ended.
    pub valid: bool,
}

/// The Terminates of one kind of access, one a failing check.
struct Causes {
    unknown: TerminateCause,
    foreign: TerminateCause,
    wrap: TerminateCause,
    bounds: TerminateCause,
}

// RFC 5041 7.1
const WRITE_CAUSES: Causes = Causes {
    unknown: TerminateCause::DdpInvalidStag,
    foreign: TerminateCause::DdpStagNotAssociated,
    wrap: TerminateCause::DdpToWrap,
    bounds: TerminateCause::DdpBaseOrBounds,
};
// RFC 5040 7.2 item 4; RFC 7306 8.1 for atomics
const READ_CAUSES: Causes = Causes {
    unknown: TerminateCause::RdmapInvalidStag,
    foreign: TerminateCause::RdmapStagNotAssociated,
    wrap: TerminateCause::RdmapToWrap,
    bounds: TerminateCause::RdmapBaseOrBounds,
};

/// All regions of one RNIC.
#[derive(Debug)]
pub struct StagTable {
    number: u64,
    next_number: u64,
    regions: OwnMap<u32, Region>,
    drawn: Mutex<Drawn>,
    /// Regions a peer may change, from address to end. They never overlap, so their ends rise with their starts.
    changes: BTreeMap<u64, u64>,
    /// Open streams of each domain that has one.
    stream_counts: OwnMap<PdId, usize>,
    /// Open streams, and the STags scoped to each.
    streams: OwnMap<StreamId, OwnSet<u32>>,
}

/// STags that were drawn and name no region: sinks of RDMA Reads, and used ones.
#[derive(Debug)]
struct Drawn {
    lent: OwnSet<u32>,
    used: OwnSet<u32>,
    /// `used`, from the oldest.
    used_order: VecDeque<u32>,
    history: usize,
}

impl Drawn {
    fn remember(&mut self, stag: u32) {
        self.used.insert(stag);
        self.used_order.push_back(stag);
        if self.used_order.len() > self.history
            && let Some(oldest) = self.used_order.pop_front()
        {
            self.used.remove(&oldest);
        }
    }
}

impl Default for StagTable {
    fn default() -> Self {
        Self::new()
    }
}

impl StagTable {
    /// An empty table that remembers `STAG_HISTORY` used STags.
    pub fn new() -> Self {
        Self::with_history(STAG_HISTORY)
    }

    /// `history`: how many used STags to remember, so that none is used again while it is among them.
    pub fn with_history(history: usize) -> Self {
        // Numbers of tables are never reused, so that a domain of one is unknown in every other.
        static NEXT_TABLE: AtomicU64 = AtomicU64::new(0);
        Self {
            number: NEXT_TABLE.fetch_add(1, Ordering::Relaxed),
            next_number: 0,
            regions: OwnMap::default(),
            drawn: Mutex::new(Drawn {
                lent: OwnSet::default(),
                used: OwnSet::default(),
                used_order: VecDeque::new(),
                history,
            }),
            changes: BTreeMap::new(),
            stream_counts: OwnMap::default(),
            streams: OwnMap::default(),
        }
    }

    fn take_number(&mut self) -> u64 {
        self.next_number += 1;
        self.next_number
    }

    /// A new protection domain.
    pub fn allocate_pd(&mut self) -> PdId {
        PdId {
            table: self.number,
            number: self.take_number(),
        }
    }

    fn check_pd(&self, pd: PdId) -> Result<(), ApiMisuse> {
        if pd.table != self.number {
            return Err(ApiMisuse("the protection domain must be one of this RNIC".into()));
        }
        Ok(())
    }

    /// What a new stream of `pd` sees; `close_stream` takes it away.
    pub fn open_stream(&mut self, pd: PdId) -> Result<StreamId, ApiMisuse> {
        self.check_pd(pd)?;
        let stream = StreamId {
            pd,
            number: self.take_number(),
        };
        self.streams.insert(stream, OwnSet::default());
        *self.stream_counts.entry(pd).or_default() += 1;
        Ok(stream)
    }

    /// The stream has ended: revoke what was scoped to it; it reaches nothing any more. Idempotent.
    pub fn close_stream(&mut self, stream: StreamId) {
        let Some(scoped) = self.streams.remove(&stream) else {
            return;
        };
        if let Some(count) = self.stream_counts.get_mut(&stream.pd) {
            *count -= 1;
            if *count == 0 {
                self.stream_counts.remove(&stream.pd);
            }
        }
        for stag in scoped {
            self.forget(stag);
        }
    }

    /// A new region. `random_u32`: an unpredictable number each call; STags must be hard to guess
    /// (RFC 5040 8.1.1 item 8).
    ///
    /// Refuses an empty region, a write or atomic right on read-only memory or on octets that another valid region
    /// already lets a peer change, `base_to` and length past 2^64, and a scope of another domain.
    pub fn register(
        &mut self,
        registration: &Registration,
        random_u32: &mut dyn FnMut() -> u32,
    ) -> Result<Registered, ApiMisuse> {
        let &Registration {
            region: id,
            address,
            len,
            writable,
            access,
            pd,
            scope,
            base_to,
        } = registration;
        self.check_pd(pd)?;
        if scope.is_some_and(|stream| stream.pd != pd) {
            return Err(ApiMisuse(
                "the stream a region is scoped to must be in the region's protection domain".into(),
            ));
        }
        let Some(end) = address.checked_add(len).filter(|_| len > 0) else {
            return Err(ApiMisuse(format!(
                "a region must hold at least one octet and end below 2^64; got {len} octets"
            )));
        };
        if u128::from(base_to) + u128::from(len) > TO_END {
            return Err(ApiMisuse(format!(
                "base_to must leave room for {len} octets below 2^64; got {base_to}"
            )));
        }
        let lets_change = access.intersects(CHANGES);
        if lets_change && !writable {
            return Err(ApiMisuse(
                "a remote write or atomic right needs writable memory; this buffer is read-only".into(),
            ));
        }
        let born_revoked = scope.is_some_and(|stream| !self.streams.contains_key(&stream));
        if lets_change && !born_revoked && self.overlaps_change(address, end) {
            // RFC 5042 6.3.6: one buffer, one STag that lets a peer change it
            return Err(ApiMisuse(
                "another valid region already lets a peer change some of these octets: revoke it first".into(),
            ));
        }
        let stag = self.draw_stag(&self.drawn(), random_u32)?;
        if born_revoked {
            self.remember(stag);
            return Ok(Registered { stag, valid: false });
        }
        if lets_change {
            self.changes.insert(address, end);
        }
        self.regions.insert(
            stag,
            Region {
                id,
                invalidated: AtomicBool::new(false),
                address,
                len,
                access,
                pd,
                scope,
                base_to,
            },
        );
        if let Some(scoped) = scope.and_then(|stream| self.streams.get_mut(&stream)) {
            scoped.insert(stag);
        }
        Ok(Registered { stag, valid: true })
    }

    /// Forgets `region`, named by `stag`; idempotent. At return no octet of it can be reached through its STag.
    pub fn revoke(&mut self, stag: u32, region: RegionId) {
        if self.regions.get(&stag).is_some_and(|found| found.id == region) {
            self.forget(stag);
        }
    }

    /// Revokes every region.
    pub fn close(&mut self) {
        let stags: Vec<u32> = self.regions.keys().copied().collect();
        for stag in stags {
            self.forget(stag);
        }
    }

    /// True until `region`, named by `stag`, is revoked or invalidated.
    pub fn is_valid(&self, stag: u32, region: RegionId) -> bool {
        self.valid_region(stag).is_some_and(|found| found.id == region)
    }

    fn valid_region(&self, stag: u32) -> Option<&Region> {
        let invalidated = |region: &&Region| region.invalidated.load(Ordering::Acquire);
        self.regions.get(&stag).filter(|region| !invalidated(region))
    }

    fn forget(&mut self, stag: u32) {
        let Some(region) = self.regions.remove(&stag) else {
            return;
        };
        if let Some(scoped) = region.scope.and_then(|stream| self.streams.get_mut(&stream)) {
            scoped.remove(&stag);
        }
        if region.access.intersects(CHANGES) {
            self.changes.remove(&region.address);
        }
        self.remember(stag);
    }

    /// An STag that names no region, as the sink of one RDMA Read Response.
    pub fn lend_stag(&self, random_u32: &mut dyn FnMut() -> u32) -> Result<u32, ApiMisuse> {
        let mut drawn = self.drawn();
        let stag = self.draw_stag(&drawn, random_u32)?;
        drawn.lent.insert(stag);
        Ok(stag)
    }

    /// `stag` from `lend_stag` names nothing any more. Idempotent.
    pub fn return_stag(&self, stag: u32) {
        let mut drawn = self.drawn();
        if drawn.lent.remove(&stag) {
            drawn.remember(stag);
        }
    }

    fn drawn(&self) -> MutexGuard<'_, Drawn> {
        self.drawn.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn draw_stag(&self, drawn: &Drawn, random_u32: &mut dyn FnMut() -> u32) -> Result<u32, ApiMisuse> {
        (0..STAG_DRAWS_MAX)
            .map(|_| random_u32())
            .find(|stag| {
                let taken = self.regions.contains_key(stag) || drawn.lent.contains(stag) || drawn.used.contains(stag);
                *stag != 0 && !taken
            })
            .ok_or_else(|| {
                ApiMisuse(format!(
                    "random_u32 gave no fresh STag in {STAG_DRAWS_MAX} draws: it must be a source of randomness"
                ))
            })
    }

    fn remember(&self, stag: u32) {
        self.drawn().remember(stag);
    }

    fn overlaps_change(&self, start: u64, end: u64) -> bool {
        let below = self.changes.range(..=start).next_back();
        let above = self.changes.range((Bound::Excluded(start), Bound::Unbounded)).next();
        below.is_some_and(|(_, &below_end)| below_end > start)
            || above.is_some_and(|(&above_start, _)| above_start < end)
    }

    // --- what a stream asks for ---

    /// Where `len` > 0 octets of an RDMA Write segment go (RFC 5041 5.2, 7.1).
    pub fn place(&self, stream: StreamId, stag: u32, to: u64, len: u32) -> Result<Span, PeerMisbehaved> {
        let region = self.reach(stream, stag, to, len, &WRITE_CAUSES)?;
        if !region.access.contains(Access::REMOTE_WRITE) {
            // DDP has no code for a missing right; RFC 5041 7.1's "invalid STag" is the convention
            return Err(PeerMisbehaved::new(
                TerminateCause::DdpInvalidStag,
                format!("RDMA Write to STag {stag:#010x} not granted"),
            ));
        }
        Ok(region.span(to, len))
    }

    /// The `len` > 0 octets an RDMA Read asks for (RFC 5040 7.2).
    pub fn read_source(&self, stream: StreamId, stag: u32, to: u64, len: u32) -> Result<Span, PeerMisbehaved> {
        let region = self.reach(stream, stag, to, len, &READ_CAUSES)?;
        if !region.access.contains(Access::REMOTE_READ) {
            return Err(PeerMisbehaved::new(
                TerminateCause::RdmapAccessRights,
                format!("RDMA Read of STag {stag:#010x} not granted"),
            ));
        }
        Ok(region.span(to, len))
    }

    /// The 8-aligned native 64-bit integer an atomic works on (RFC 7306 5).
    pub fn atomic(&self, stream: StreamId, stag: u32, to: u64) -> Result<Span, PeerMisbehaved> {
        let region = self.reach(stream, stag, to, ATOMIC_BYTES, &READ_CAUSES)?;
        if !region.access.contains(Access::REMOTE_ATOMIC) {
            return Err(PeerMisbehaved::new(
                TerminateCause::RdmapAccessRights,
                format!("atomic on STag {stag:#010x} not granted"),
            ));
        }
        let span = region.span(to, ATOMIC_BYTES);
        if !(region.address + span.offset).is_multiple_of(u64::from(ATOMIC_BYTES)) {
            // RFC 7306 5.1: it is the buffer's address that must be aligned
            return Err(PeerMisbehaved::new(
                TerminateCause::RdmapCatastrophicStream,
                format!("atomic at unaligned TO {to:#x}"),
            ));
        }
        Ok(span)
    }

    /// Send with Invalidate (RFC 5040 5.3).
    ///
    /// Refused besides an unknown or foreign STag: a region without remote rights, which no peer was ever told of,
    /// and one of the whole domain while that holds more than one stream, since the peer of one stream
    /// must not take it away from the others (RFC 5040 8.1.1 item 7).
    ///
    /// Nobody finds the region any more. `revoke` it before the Send is delivered: then nobody who found it earlier moves
    /// its octets either.
    pub fn invalidate(&self, stream: StreamId, stag: u32) -> Result<RegionId, PeerMisbehaved> {
        let streams = self.stream_counts.get(&stream.pd).copied().unwrap_or_default();
        let reason = match self.region_for(stream, stag) {
            None => "is unknown",
            Some(region) if !region.reachable_from(stream) => "is of another stream",
            Some(region) if region.access.is_empty() => "has no remote right",
            Some(region) if region.scope.is_none() && streams > 1 => "is shared by streams",
            Some(region) if region.invalidated.swap(true, Ordering::AcqRel) => "is unknown",
            Some(region) => return Ok(region.id),
        };
        Err(PeerMisbehaved::new(
            TerminateCause::RdmapCannotInvalidate,
            format!("Send with Invalidate of STag {stag:#010x}, which {reason}"),
        ))
    }

    /// A stream that has ended finds nothing.
    fn region_for(&self, stream: StreamId, stag: u32) -> Option<&Region> {
        self.valid_region(stag).filter(|_| self.streams.contains_key(&stream))
    }

    fn reach(
        &self,
        stream: StreamId,
        stag: u32,
        to: u64,
        len: u32,
        causes: &Causes,
    ) -> Result<&Region, PeerMisbehaved> {
        let region = self
            .region_for(stream, stag)
            .ok_or_else(|| PeerMisbehaved::new(causes.unknown, format!("STag {stag:#010x} is unknown or revoked")))?;
        if !region.reachable_from(stream) {
            return Err(PeerMisbehaved::new(
                causes.foreign,
                format!("STag {stag:#010x} is not of this stream or its protection domain"),
            ));
        }
        let end = u128::from(to) + u128::from(len);
        if end > TO_END {
            return Err(PeerMisbehaved::new(
                causes.wrap,
                format!("TO {to:#x} and {len} octets pass 2^64"),
            ));
        }
        let (base_to, region_len) = (region.base_to, region.len);
        if to < base_to || end > u128::from(base_to) + u128::from(region_len) {
            return Err(PeerMisbehaved::new(
                causes.bounds,
                format!(
                    "TO {to:#x} and {len} octets are outside STag {stag:#010x}, \
                     which has {region_len} octets from {base_to:#x}"
                ),
            ));
        }
        Ok(region)
    }
}

impl Region {
    fn reachable_from(&self, stream: StreamId) -> bool {
        self.scope.map_or(self.pd == stream.pd, |scope| scope == stream)
    }

    /// `to` was found to be inside.
    fn span(&self, to: u64, len: u32) -> Span {
        Span {
            region: self.id,
            offset: to - self.base_to,
            len,
        }
    }
}
