//! The native RNIC itself: its STags, its registered memory and its channels.

use std::fmt;
use std::io;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard, Weak};
use std::time::Duration;

use kbtp_proto::limits;
use kbtp_proto::memory::{Octets, RegionId, Span, StreamMemory};
use kbtp_proto::own_maps::{OwnMap, OwnSet};
use kbtp_proto::stag::{PdId, Registration, StagTable, StreamId as ViewId};
use kbtp_proto::target::{PuntCounters, PuntReason};
use kbtp_proto::types::{PeerMisbehaved, TerminateCause};

use crate::api::{Access, Capabilities};
use crate::channel::Channel;
use crate::core::{ChannelShared, LOG_TARGET, lock};
use crate::crew::Crew;
use crate::error::Error;
use crate::event_loop::one_processor;
use crate::memory::{Buffer, Keys, Memories, RegisteredOctets, Unheld};
use crate::offload::Offloaded;
use crate::options::Options;
use crate::stream::Stream;
use smallvec::SmallVec;

/// Octets that are cleared under one hold of the device's lock, for which a writer waits.
const CLEAR_MAX_BYTES: u32 = 64 * 1024;

/// Random numbers asked of the system at once.
const DRAWN_AT_ONCE: usize = 64;

/// What lets a peer change octets.
const CHANGES: Access = Access::REMOTE_WRITE.union(Access::REMOTE_ATOMIC);

type Random = Box<dyn FnMut() -> u32 + Send>;

pub(crate) struct DeviceShared {
    pub(crate) options: Options,
    /// As in the options, and zero where it would only keep the peer from the one processor there is.
    pub(crate) spin: Duration,
    /// The device's lock; see `core` for the order. I/O holds it for reading, so that event loops do not wait for each
    /// other; never twice in one thread, since a writer may have come to wait in between.
    table: RwLock<Table>,
    unheld: Arc<Unheld>,
    /// Of rdma-core; else streams are of user-space iWARP.
    pub(crate) hardware: Option<kbtp_verbs::Device>,
    channels: Mutex<Vec<Weak<ChannelShared>>>,
    /// Locked last.
    pub(crate) offloaded: Mutex<Offloaded>,
    pub(crate) punts: PuntCounters,
}

impl DeviceShared {
    /// What is valid and what is held stays so meanwhile.
    pub(crate) fn table(&self) -> RwLockReadGuard<'_, Table> {
        self.table.read().unwrap_or_else(PoisonError::into_inner)
    }

    /// Nobody looks at a registered octet meanwhile.
    pub(crate) fn table_mut(&self) -> RwLockWriteGuard<'_, Table> {
        self.table.write().unwrap_or_else(PoisonError::into_inner)
    }

    /// Run `act` with what the stream of `view` reaches of the memory, and the memory's octets.
    pub(crate) fn lend<R>(
        &self,
        view: ViewId,
        act: impl FnOnce(&mut ReachableMemory<'_>, &mut RegisteredOctets<'_>) -> R,
    ) -> R {
        let (result, invalidated) = {
            let table = self.table();
            let mut memory = ReachableMemory {
                view,
                table: &table,
                invalidated: SmallVec::new(),
            };
            let result = act(&mut memory, &mut RegisteredOctets(&table.memories));
            (result, memory.invalidated)
        };
        if !invalidated.is_empty() {
            let mut table = self.table_mut();
            invalidated.into_iter().for_each(|region| table.forget(region));
        }
        result
    }

    pub(crate) fn unheld(&self) -> &Unheld {
        &self.unheld
    }

    /// Drop what nothing names any more. Called with no lock held.
    pub(crate) fn bury(&self) {
        if self.unheld.any() {
            let dead = self.table_mut().memories.take_dead();
            drop(dead);
        }
    }
}

/// What is known of a valid region besides its rights, which the STag table keeps.
///
/// No handle: regions keep their device, and must not keep it through itself.
struct Entry {
    stag: u32,
    scope: Option<ViewId>,
    valid: Arc<AtomicBool>,
}

/// Who may reach which octets, and the octets.
pub(crate) struct Table {
    stags: StagTable,
    pub(crate) memories: Memories,
    random_u32: Mutex<Random>,
    valid: OwnMap<RegionId, Entry>,
    scoped: OwnMap<ViewId, OwnSet<RegionId>>,
}

impl Table {
    pub(crate) fn open_view(&mut self, pd: PdId) -> Result<ViewId, Error> {
        self.stags.open_stream(pd).map_err(|error| Error::misuse(error.0))
    }

    /// The stream has ended: revoke what was scoped to it; nothing is reached through the view any more.
    pub(crate) fn close_view(&mut self, view: ViewId) {
        self.stags.close_stream(view);
        for region in self.scoped.remove(&view).unwrap_or_default() {
            self.forget(region);
        }
    }

    pub(crate) fn register(
        &mut self,
        buffer: Buffer,
        access: Access,
        pd: &Pd,
        scope: Option<ViewId>,
        base_to: u64,
    ) -> Result<Region, Error> {
        let (address, length, writable) = (buffer.address() as u64, buffer.length() as u64, buffer.writable());
        let keys = hardware_keys(&buffer, access, pd)?;
        let rkey = keys.as_ref().map(Keys::rkey);
        let base_to = match rkey {
            // Devices of rdma-core name octets by their address.
            Some(_) if base_to == 0 || base_to == address => address,
            Some(_) => {
                return Err(Error::misuse(format!(
                    "base_to of {base_to:#x}: regions of this RNIC begin at their address, {address:#x}"
                )));
            }
            None => base_to,
        };
        let id = self.memories.insert(buffer, access.intersects(CHANGES), keys);
        let registration = Registration {
            region: id,
            address,
            len: length,
            writable,
            access,
            pd: pd.id,
            scope,
            base_to,
        };
        let registered = match self.stags.register(&registration, &mut *lock(&self.random_u32)) {
            Ok(registered) => registered,
            Err(error) => {
                self.memories.release(id);
                return Err(Error::misuse(error.0));
            }
        };
        let valid = Arc::new(AtomicBool::new(registered.valid));
        if registered.valid {
            self.valid.insert(
                id,
                Entry {
                    stag: registered.stag,
                    scope,
                    valid: Arc::clone(&valid),
                },
            );
            if let Some(view) = scope {
                self.scoped.entry(view).or_default().insert(id);
            }
        } else {
            self.memories.release(id);
        }
        let shared = RegionShared {
            device: Arc::clone(&pd.device),
            id,
            pd: pd.id,
            scope,
            stag: rkey.unwrap_or(registered.stag),
            base_to,
            length,
            access,
            writable,
            valid,
        };
        Ok(Region {
            shared: Arc::new(shared),
        })
    }

    /// Nothing reaches `region` through its STag any more. Idempotent.
    pub(crate) fn forget(&mut self, region: RegionId) {
        let Some(Entry { stag, scope, valid }) = self.valid.remove(&region) else {
            return;
        };
        self.stags.revoke(stag, region);
        self.memories.revoke_keys(region);
        valid.store(false, Ordering::Release);
        if let Some(scoped) = scope.and_then(|view| self.scoped.get_mut(&view)) {
            scoped.remove(&region);
        }
        self.memories.release(region);
    }

    fn close(&mut self) {
        for region in self.valid.keys().copied().collect::<Vec<_>>() {
            self.forget(region);
        }
    }
}

/// What the device of `pd` is to know `buffer` by, if there is one.
fn hardware_keys(buffer: &Buffer, access: Access, pd: &Pd) -> Result<Option<Keys>, Error> {
    let (Some(of_device), Some(hardware)) = (&pd.hardware, &pd.device.hardware) else {
        return Ok(None);
    };
    if access.intersects(CHANGES) && !buffer.writable() {
        return Ok(None); // refused by the table, which says why
    }
    let length = buffer.length() as u64;
    let keys = if length > hardware.max_region_bytes {
        Err(io::ErrorKind::InvalidInput.into())
    } else {
        Keys::new(buffer, of_device, access)
    };
    keys.map(Some).map_err(|error| {
        let why = kbtp_verbs::explain_registration(hardware, length, &error);
        Error::Io(io::Error::new(error.kind(), why))
    })
}

/// The registered memory that one stream reaches.
pub(crate) struct ReachableMemory<'a> {
    view: ViewId,
    table: &'a Table,
    /// By the peer, and still to be forgotten.
    invalidated: SmallVec<[RegionId; 1]>,
}

impl StreamMemory for ReachableMemory<'_> {
    fn place(&mut self, stag: u32, to: u64, len: u32) -> Result<Span, PeerMisbehaved> {
        self.table.stags.place(self.view, stag, to, len)
    }

    fn read_source(&mut self, stag: u32, to: u64, len: u32) -> Result<Span, PeerMisbehaved> {
        self.table.stags.read_source(self.view, stag, to, len)
    }

    fn atomic(&mut self, stag: u32, to: u64, operate: &mut dyn FnMut(u64) -> u64) -> Result<u64, PeerMisbehaved> {
        let span = self.table.stags.atomic(self.view, stag, to)?;
        let old = self.table.memories.atomic(span.region, span.offset, operate);
        old.ok_or_else(|| {
            // The table has checked that the word is there and aligned.
            PeerMisbehaved::new(TerminateCause::LocalCatastrophic, format!("no word at TO {to:#x}"))
        })
    }

    fn invalidate(&mut self, stag: u32) -> Result<(), PeerMisbehaved> {
        let region = self.table.stags.invalidate(self.view, stag)?;
        self.invalidated.push(region);
        Ok(())
    }

    fn lend_sink_stag(&mut self) -> u32 {
        // Without randomness, 0: it names no region either, and only the peer that is asked learns it.
        let mut random_u32 = lock(&self.table.random_u32);
        self.table.stags.lend_stag(&mut *random_u32).unwrap_or(0)
    }

    fn return_sink_stag(&mut self, stag: u32) {
        self.table.stags.return_stag(stag);
    }
}

/// Binding 9.2 needs Write with Immediate, binding 9.1 has none (draft 9).
fn hardware_capabilities(hardware: &kbtp_verbs::Device) -> Capabilities {
    Capabilities {
        atomics: hardware.atomics != kbtp_verbs::Atomics::None,
        masked_atomics: false,
        immediate: false,
        send_with_invalidate: hardware.send_with_invalidate,
        ordered_placement: !hardware.iwarp,
        write_with_immediate: !hardware.iwarp,
        own_base: true,
        // Memory that a program registers, no peer invalidates: that takes memory windows, which not every device has.
        invalidated_by_peers: false,
        atomics_with_processors: hardware.atomics == kbtp_verbs::Atomics::System,
        max_ird: hardware.max_ird.into(),
        max_ord: hardware.max_ord.into(),
    }
}

/// User-space iWARP over TCP, or a device of rdma-core. A handle: clones are the same device.
///
/// Regions and domains may be used from any thread, each channel from one. Revoking a region does not take it away from
/// work its owner has already posted.
#[derive(Clone)]
pub struct Device {
    pub(crate) shared: Arc<DeviceShared>,
}

impl Device {
    /// STags come from the system's source of randomness.
    #[must_use]
    pub fn open(options: Options) -> Self {
        let mut drawn = Vec::new();
        let random_u32 = move || {
            if drawn.is_empty() {
                // Zeros, should the system have no randomness: the table then refuses to draw an STag.
                let mut octets = [0; DRAWN_AT_ONCE * size_of::<u32>()];
                let _ = getrandom::fill(&mut octets);
                drawn.extend(octets.as_chunks().0.iter().copied().map(u32::from_ne_bytes));
            }
            drawn.pop().unwrap_or(0)
        };
        Self::with_random(options, Box::new(random_u32))
    }

    /// Over a device of rdma-core, which draws the STags itself.
    #[must_use]
    pub fn open_hardware(options: Options, hardware: kbtp_verbs::Device) -> Self {
        for complaint in &hardware.complaints {
            log::warn!(target: LOG_TARGET, "{complaint}");
        }
        let mut drawn = 0u32;
        // They name regions in the table alone: no peer sees them.
        let count = move || {
            drawn = drawn.wrapping_add(1);
            drawn
        };
        Self::with(options, Box::new(count), Some(hardware))
    }

    /// `random_u32`: an unpredictable number each call; STags must be hard to guess (RFC 5040 8.1.1 item 8).
    #[must_use]
    pub fn with_random(options: Options, random_u32: Random) -> Self {
        Self::with(options, random_u32, None)
    }

    fn with(options: Options, random_u32: Random, hardware: Option<kbtp_verbs::Device>) -> Self {
        let table = Table {
            stags: StagTable::new(),
            memories: Memories::default(),
            random_u32: Mutex::new(random_u32),
            valid: OwnMap::default(),
            scoped: OwnMap::default(),
        };
        Self {
            shared: Arc::new(DeviceShared {
                spin: if one_processor() { Duration::ZERO } else { options.spin },
                options,
                unheld: Arc::clone(table.memories.unheld()),
                table: RwLock::new(table),
                hardware,
                channels: Mutex::new(Vec::new()),
                offloaded: Mutex::new(Offloaded::default()),
                punts: PuntCounters::default(),
            }),
        }
    }

    /// What the wire below can do.
    #[must_use]
    pub fn capabilities(&self) -> Capabilities {
        if let Some(hardware) = &self.shared.hardware {
            return hardware_capabilities(hardware);
        }
        Capabilities {
            atomics: true,
            masked_atomics: true,
            immediate: true,
            send_with_invalidate: true,
            ordered_placement: true,
            write_with_immediate: false,
            own_base: false,
            invalidated_by_peers: true,
            atomics_with_processors: true,
            max_ird: limits::RNIC_READ_DEPTH_MAX.into(),
            max_ord: limits::RNIC_READ_DEPTH_MAX.into(),
        }
    }

    /// How many messages offloaded sessions have left to their owner, by reason.
    pub fn punts(&self) -> impl Iterator<Item = (PuntReason, u64)> {
        self.shared.punts.read()
    }

    /// As given.
    #[must_use]
    pub fn options(&self) -> &Options {
        &self.shared.options
    }

    /// A new protection domain.
    ///
    /// # Errors
    ///
    /// `Error::Io` as a device of rdma-core gives it.
    pub fn allocate_pd(&self) -> Result<Pd, Error> {
        let hardware = self.shared.hardware.as_ref();
        Ok(Pd {
            device: Arc::clone(&self.shared),
            id: self.shared.table_mut().stags.allocate_pd(),
            hardware: hardware.map(|hardware| hardware.context.allocate_pd()).transpose()?,
        })
    }

    /// Register `buffer`, reachable through the STag by every stream of `pd`, or by `stream` alone if given. Scoped to a
    /// stream that has ended the region is born revoked.
    ///
    /// # Errors
    ///
    /// `Error::ApiMisuse`: see `kbtp.verbs.api.Rnic.register`.
    pub fn register(
        &self,
        buffer: Buffer,
        access: Access,
        pd: &Pd,
        stream: Option<&Stream>,
        base_to: u64,
    ) -> Result<Region, Error> {
        if !Arc::ptr_eq(&pd.device, &self.shared) {
            return Err(Error::misuse("the protection domain must be allocated from this RNIC"));
        }
        let result = self
            .shared
            .table_mut()
            .register(buffer, access, pd, stream.map(Stream::view_id), base_to);
        self.shared.bury();
        result
    }

    /// A channel of this device, whose owner does its I/O in `poll`.
    ///
    /// # Errors
    ///
    /// `Error::Io` as the system gives it, for want of file descriptors for example.
    pub fn open_channel(&self) -> Result<Channel, Error> {
        let shared = ChannelShared::open(Arc::clone(&self.shared), None)?;
        self.remember(&shared);
        Ok(Channel { shared, crew: None })
    }

    /// A channel of this device whose I/O is done by `threads` (0 counts as 1) event loops of its own. Streams that are
    /// accepted are spread over them.
    ///
    /// # Errors
    ///
    /// `Error::Io` as the system gives it, for want of file descriptors or threads for example.
    pub fn open_channel_with_threads(&self, threads: usize) -> Result<Channel, Error> {
        let crew = Crew::start(&self.shared, threads)?;
        for one in crew.loops() {
            self.remember(one);
        }
        let first = crew.loops().first().map(Arc::clone);
        let shared = first.ok_or_else(|| Error::misuse("a channel needs an event loop"))?;
        Ok(Channel {
            shared,
            crew: Some(crew),
        })
    }

    fn remember(&self, channel: &Arc<ChannelShared>) {
        let mut channels = lock(&self.shared.channels);
        channels.retain(|channel| channel.strong_count() > 0);
        channels.push(Arc::downgrade(channel));
    }

    /// Close every channel and revoke every region. Idempotent.
    pub fn close(&self) {
        let channels = std::mem::take(&mut *lock(&self.shared.channels));
        for channel in channels.iter().filter_map(Weak::upgrade) {
            channel.close();
        }
        self.shared.table_mut().close();
        self.shared.bury();
    }
}

/// A protection domain: a stream reaches no region of another (RFC 5042 6.1.1).
#[derive(Clone)]
pub struct Pd {
    pub(crate) device: Arc<DeviceShared>,
    pub(crate) id: PdId,
    pub(crate) hardware: Option<Arc<kbtp_verbs::Pd>>,
}

impl PartialEq for Pd {
    fn eq(&self, other: &Self) -> bool {
        self.id == other.id
    }
}

impl Eq for Pd {}

impl fmt::Debug for Pd {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.id.fmt(f)
    }
}

pub(crate) struct RegionShared {
    pub(crate) device: Arc<DeviceShared>,
    pub(crate) id: RegionId,
    pub(crate) pd: PdId,
    pub(crate) scope: Option<ViewId>,
    pub(crate) writable: bool,
    stag: u32,
    base_to: u64,
    length: u64,
    access: Access,
    /// Changes under the device's lock.
    valid: Arc<AtomicBool>,
}

/// A memory region. A handle: dropping it revokes nothing.
#[derive(Clone)]
pub struct Region {
    pub(crate) shared: Arc<RegionShared>,
}

impl Region {
    /// Names it to peers.
    #[must_use]
    pub fn stag(&self) -> u32 {
        self.shared.stag
    }

    /// Tagged offset of its first octet.
    #[must_use]
    pub fn base_to(&self) -> u64 {
        self.shared.base_to
    }

    /// In octets.
    #[must_use]
    pub fn length(&self) -> u64 {
        self.shared.length
    }

    /// Remote rights.
    #[must_use]
    pub fn access(&self) -> Access {
        self.shared.access
    }

    /// False once revoked, by either side.
    #[must_use]
    pub fn valid(&self) -> bool {
        self.shared.valid.load(Ordering::Acquire)
    }

    /// After return no octet of the region changes or leaves through its STag. Idempotent.
    pub fn revoke(&self) {
        self.shared.device.table_mut().forget(self.shared.id);
        self.shared.device.bury();
    }

    /// Append `length` octets from `offset` to `into`; nothing if the region is revoked or does not have them.
    pub fn copy_out(&self, offset: u64, length: u32, into: &mut Vec<u8>) {
        let table = self.shared.device.table();
        if self.valid() {
            RegisteredOctets(&table.memories).read(
                Span {
                    region: self.shared.id,
                    offset,
                    len: length,
                },
                into,
            );
        }
    }

    /// Overwrite `length` octets from `offset` with zeros; nothing if the region is revoked, read-only or does not have
    /// them. Other work gets a turn now and then.
    pub fn clear(&self, offset: u64, length: u32) {
        let all = Span {
            region: self.shared.id,
            offset,
            len: length,
        };
        for from in (0..length).step_by(CLEAR_MAX_BYTES as usize) {
            let table = self.shared.device.table();
            table.memories.clear(all.part(from, CLEAR_MAX_BYTES));
        }
    }

    /// Copy `data` to `offset`; nothing if the region is revoked, read-only or does not have the octets.
    pub fn copy_in(&self, offset: u64, data: &[u8]) {
        let table = self.shared.device.table();
        if let Ok(len) = u32::try_from(data.len())
            && self.valid()
        {
            RegisteredOctets(&table.memories).write(
                Span {
                    region: self.shared.id,
                    offset,
                    len,
                },
                data,
            );
        }
    }
}

impl PartialEq for Region {
    fn eq(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.shared, &other.shared)
    }
}

impl Eq for Region {}

impl fmt::Debug for Region {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Region({:#010x}, {} octets)", self.stag(), self.length())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::mpsc;
    use std::thread;

    const PATIENCE: Duration = Duration::from_secs(20);

    #[test]
    fn one_stream_reaches_its_memory_while_another_one_does() {
        let device = Device::open(Options::default());
        let pd = device.allocate_pd().unwrap();
        let [one, other] = [(), ()].map(|()| device.shared.table_mut().open_view(pd.id).unwrap());
        let (tell, told) = mpsc::channel();
        let shared = Arc::clone(&device.shared);
        let came = device.shared.lend(one, |_, _| {
            thread::spawn(move || shared.lend(other, |_, _| tell.send(()).unwrap()));
            told.recv_timeout(PATIENCE)
        });
        assert!(came.is_ok(), "it waited");
    }

    #[test]
    fn an_stag_that_the_peer_invalidates_is_revoked_when_the_loan_is_over() {
        let device = Device::open(Options::default());
        let pd = device.allocate_pd().unwrap();
        let view = device.shared.table_mut().open_view(pd.id).unwrap();
        let buffer = Buffer::zeroed(8).unwrap();
        let region = device.register(buffer, Access::REMOTE_WRITE, &pd, None, 0).unwrap();
        device.shared.lend(view, |memory, _| {
            assert!(memory.place(region.stag(), 0, 8).is_ok());
            memory.invalidate(region.stag()).unwrap();
            assert!(memory.place(region.stag(), 0, 8).is_err());
        });
        assert!(!region.valid() && device.shared.unheld.any());
        let again = Buffer::zeroed(8).unwrap();
        assert!(device.register(again, Access::REMOTE_WRITE, &pd, None, 0).is_ok());
    }
}
