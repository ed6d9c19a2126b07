//! Registered memory, and the only `unsafe` of this crate: raw pointers to octets that somebody else owns.
//!
//! Two rules make it sound. A buffer stays where it is as long as its keepalive lives, which its registrar vouches for
//! (`Buffer::from_raw_parts`), and the keepalive is here as long as the slot of its region is held. And a `Span` turns
//! into a pointer only in `Memories::locate`, which looks at slot, generation and bounds each time.
//!
//! Octets of a buffer may change at any time under our hands, by its owner, another event loop or another process on the
//! wire. They are only ever copied, checksummed or handed to the system; a change meanwhile tears them and nothing else.
//!
//! Whoever looks at octets borrows `Memories`, which the device lends to any number of readers; a slot is filled and
//! emptied by a writer alone. What counts the holds on a slot are atomics: the last to let go leaves the buffer to `bury`.

use std::any::Any;
use std::fmt;
use std::io;
use std::ops::Deref;
use std::os::fd::{AsRawFd, BorrowedFd};
use std::ptr::NonNull;
use std::slice;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, OnceLock};

use kbtp_proto::blocks::update_word;
use kbtp_proto::crc32c;
use kbtp_proto::memory::{Octets, RegionId, Span};
use kbtp_proto::stag::Access;
use kbtp_proto::stream::Part;
use kbtp_verbs::abi::{
    IBV_ACCESS_LOCAL_WRITE, IBV_ACCESS_REMOTE_ATOMIC, IBV_ACCESS_REMOTE_READ, IBV_ACCESS_REMOTE_WRITE,
};
use kbtp_verbs::{Mr, Pd, Sge};
use smallvec::SmallVec;

use crate::core::lock;
use crate::error::Error;

/// Pieces that one `send_parts` takes; 4 KiB of stack, and well below the system's limit of 1024.
pub(crate) const PARTS_MAX: usize = 256;

const WORD_BYTES: usize = size_of::<u64>();

/// Octets up to so many are read word by word, as the 16 of an entry or a slot are to be (draft 6.6). What is longer is
/// copied, about twice as fast: blocks, of which nobody stores words. A peer that reads so many entries or slots in one
/// segment, as no sequence of the draft does, may see words torn or out of order, and cannot rely on the order of stores
/// (draft 3.3, profile 5).
const READ_AS_WORDS_MAX_BYTES: usize = 4096;

/// Octets that can be registered.
pub struct Buffer {
    address: NonNull<u8>,
    length: usize,
    writable: bool,
    _keepalive: Arc<dyn Any + Send + Sync>,
}

// SAFETY: the pointer is only used through `Memories`, under the lock of the device, and what it points to is kept by
// `_keepalive`, which is `Send` and `Sync` itself.
unsafe impl Send for Buffer {}
// SAFETY: as above; a shared `Buffer` gives nothing but numbers.
unsafe impl Sync for Buffer {}

impl Buffer {
    /// `length` octets at `address`. `keepalive` is dropped when no region and no posted work needs them any more, in
    /// whatever thread that happens, and never while a lock of this crate is held.
    ///
    /// # Safety
    ///
    /// As long as `keepalive` lives, the octets must be mapped, and writable if `writable` says so; and no Rust
    /// reference to them may exist that forbids others to read or (if `writable`) to change them.
    ///
    /// # Errors
    ///
    /// `Error::ApiMisuse` for no octets, a null pointer, or octets that would pass the end of the address space.
    pub unsafe fn from_raw_parts(
        address: usize,
        length: usize,
        writable: bool,
        keepalive: Box<dyn Any + Send + Sync>,
    ) -> Result<Self, Error> {
        if length == 0 {
            return Err(Error::misuse("a buffer to register must have at least one octet"));
        }
        let Some(pointer) = NonNull::new(std::ptr::with_exposed_provenance_mut::<u8>(address)) else {
            return Err(Error::misuse("a buffer to register must not be a null pointer"));
        };
        if isize::try_from(length).is_err() || address.checked_add(length).is_none() {
            return Err(Error::misuse(format!(
                "there cannot be {length} octets at address {address:#x}"
            )));
        }
        Ok(Self {
            address: pointer,
            length,
            writable,
            _keepalive: Arc::from(keepalive),
        })
    }

    /// `length` zeros of its own, aligned to 8.
    ///
    /// # Errors
    ///
    /// `Error::ApiMisuse` for a length of 0.
    pub fn zeroed(length: usize) -> Result<Self, Error> {
        let words: Arc<[AtomicU64]> = (0..length.div_ceil(WORD_BYTES)).map(|_| AtomicU64::new(0)).collect();
        let address = words.as_ptr().expose_provenance();
        // SAFETY: the words live in the keepalive and are never moved, hold at least `length` octets, and may be
        // changed through a shared reference because they are atomics.
        unsafe { Self::from_raw_parts(address, length, true, Box::new(words)) }
    }

    /// The same octets once more, to be registered under another STag for example.
    #[must_use]
    pub fn share(&self) -> Self {
        Self {
            _keepalive: Arc::clone(&self._keepalive),
            ..*self
        }
    }

    /// `length` of the same octets, from octet `from` on: what a peer may change lies in one region.
    ///
    /// # Errors
    ///
    /// `Error::ApiMisuse` for no octets, and for any that are not in here.
    pub fn part(&self, from: usize, length: usize) -> Result<Self, Error> {
        if length == 0 || from.checked_add(length).is_none_or(|end| end > self.length) {
            let all = self.length;
            return Err(Error::misuse(format!(
                "{length} octets from {from} on: 1 to {all} expected, and all in the buffer"
            )));
        }
        // SAFETY: `from` is less than `length`, so the result is within the buffer's octets.
        let address = unsafe { self.address.add(from) };
        Ok(Self {
            address,
            length,
            ..self.share()
        })
    }

    /// Its octets to the start of `into`, as many as both have.
    pub(crate) fn read_into(&self, into: &mut [u8]) {
        let length = self.length.min(into.len());
        // SAFETY: the keepalive keeps `length` octets; `into` is this crate's own and so is elsewhere.
        unsafe { std::ptr::copy_nonoverlapping(self.address.as_ptr(), into.as_mut_ptr(), length) }
    }

    /// `octets` to octet `from` of its own and on, as many as there is room for; nothing if it is read-only.
    pub(crate) fn write_at(&self, from: usize, octets: &[u8]) {
        let length = self.length.saturating_sub(from).min(octets.len());
        if self.writable && length > 0 {
            // SAFETY: the keepalive keeps `length` writable octets from there on; `octets` are elsewhere, being borrowed.
            unsafe { std::ptr::copy_nonoverlapping(octets.as_ptr(), self.address.as_ptr().add(from), length) }
        }
    }

    /// Let the device of `pd` at these octets as long as the result lives, which must go before the buffer.
    fn register(&self, pd: &Arc<Pd>, access: i32) -> io::Result<Mr> {
        let writes = if self.writable { IBV_ACCESS_LOCAL_WRITE } else { 0 };
        // SAFETY: the keepalive keeps the octets, writable if so said; `Keys` and `OwnMemory` keep a buffer for longer than
        // what was registered of it.
        unsafe { pd.register(self.address(), self.length, access | writes) }
    }

    /// Address of the first octet.
    #[must_use]
    pub fn address(&self) -> usize {
        self.address.as_ptr().expose_provenance()
    }

    /// How many octets.
    #[must_use]
    pub fn length(&self) -> usize {
        self.length
    }

    /// Whether they may be changed.
    #[must_use]
    pub fn writable(&self) -> bool {
        self.writable
    }
}

/// A buffer as the words of a structure whose owner lets peers look at them, and its Head be moved (draft 6.6).
pub(crate) struct BufferWords(Buffer);

impl BufferWords {
    /// Of what `name` says. Refuses octets that are no whole aligned words, or read-only.
    pub(crate) fn new(buffer: Buffer, name: &str) -> Result<Arc<Self>, Error> {
        let aligned = buffer.address.cast::<AtomicU64>().is_aligned();
        if !aligned || !buffer.writable || !buffer.length.is_multiple_of(WORD_BYTES) {
            return Err(Error::misuse(format!(
                "{name}: writable words of {WORD_BYTES} octets, aligned to that, expected"
            )));
        }
        Ok(Arc::new(Self(buffer)))
    }
}

impl Deref for BufferWords {
    type Target = [AtomicU64];

    fn deref(&self) -> &[AtomicU64] {
        let Buffer { address, length, .. } = &self.0;
        // SAFETY: the keepalive keeps `length` writable octets, which are whole aligned words. The RNIC reads them word by
        // word and changes them with atomic instructions (`Memories::read`, `Memories::atomic`), their owner through here.
        unsafe { slice::from_raw_parts(address.cast::<AtomicU64>().as_ptr(), length / WORD_BYTES) }
    }
}

impl fmt::Debug for Buffer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Buffer({:p}, {} octets)", self.address, self.length)
    }
}

/// What a hardware RNIC knows the octets of a region by.
///
/// The owner's posts and the peers' rights have keys of their own: these are taken away at once by a revocation, those stay
/// as long as work may need them.
#[derive(Debug)]
pub(crate) struct Keys {
    local: OnceLock<Mr>,
    remote: Option<Mr>,
    buffer: Buffer,
    pd: Arc<Pd>,
}

impl Keys {
    /// Of `buffer`, which stays as long as they do.
    pub(crate) fn new(buffer: &Buffer, pd: &Arc<Pd>, access: Access) -> io::Result<Self> {
        let mut rights = 0;
        for (right, flag) in [
            (Access::REMOTE_READ, IBV_ACCESS_REMOTE_READ),
            (Access::REMOTE_WRITE, IBV_ACCESS_REMOTE_WRITE),
            (Access::REMOTE_ATOMIC, IBV_ACCESS_REMOTE_ATOMIC),
        ] {
            if access.contains(right) {
                rights |= flag;
            }
        }
        let mr = buffer.register(pd, rights)?;
        let (local, remote) = if rights == 0 {
            (OnceLock::from(mr), None)
        } else {
            (OnceLock::new(), Some(mr))
        };
        Ok(Self {
            local,
            remote,
            buffer: buffer.share(),
            pd: Arc::clone(pd),
        })
    }

    /// What peers name the octets by.
    pub(crate) fn rkey(&self) -> u32 {
        let mr = self.remote.as_ref().or_else(|| self.local.get());
        mr.map_or(0, |mr| mr.rkey)
    }

    /// What the owner's posts name them by.
    fn lkey(&self) -> io::Result<u32> {
        if let Some(mr) = self.local.get() {
            return Ok(mr.lkey);
        }
        let mr = self.buffer.register(&self.pd, 0)?;
        Ok(self.local.get_or_init(|| mr).lkey)
    }
}

/// Memory of the RNIC's own that a device may use.
#[derive(Debug)]
pub(crate) struct OwnMemory {
    mr: Mr,
    buffer: Buffer,
}

impl OwnMemory {
    /// Zeros.
    pub(crate) fn new(length: usize, pd: &Arc<Pd>) -> io::Result<Self> {
        let buffer = Buffer::zeroed(length).map_err(io::Error::other)?;
        Ok(Self {
            mr: buffer.register(pd, 0)?,
            buffer,
        })
    }

    pub(crate) fn length(&self) -> usize {
        self.buffer.length
    }

    pub(crate) fn write(&self, from: usize, octets: &[u8]) {
        self.buffer.write_at(from, octets);
    }

    /// The word at `from`, which is aligned; 0 if it is not there.
    pub(crate) fn word(&self, from: usize) -> u64 {
        let mut octets = [0; WORD_BYTES];
        if let Ok(part) = self.buffer.part(from, WORD_BYTES) {
            part.read_into(&mut octets);
        }
        u64::from_ne_bytes(octets)
    }

    pub(crate) fn piece(&self, from: usize, length: usize) -> Sge {
        Sge {
            address: (self.buffer.address() + from) as u64,
            length: length as u32,
            lkey: self.mr.lkey,
        }
    }
}

/// A place for one buffer. It is held by its registration and by each piece of posted work that names it.
#[derive(Debug, Default)]
struct Slot {
    generation: u32,
    holds: AtomicUsize,
    /// Others than the owner of posted work may change the octets meanwhile.
    restless: AtomicBool,
    /// With a hardware RNIC.
    keys: Option<Keys>,
    buffer: Option<Buffer>,
}

/// Regions that nothing holds any more and whose buffers are still in their slots, and buffers that were in none.
#[derive(Debug, Default)]
pub(crate) struct Unheld {
    regions: Mutex<Vec<RegionId>>,
    buffers: Mutex<Vec<Buffer>>,
    any: AtomicBool,
}

impl Unheld {
    /// There may be something to `bury`.
    pub(crate) fn any(&self) -> bool {
        self.any.load(Ordering::Acquire)
    }

    fn push(&self, region: RegionId) {
        lock(&self.regions).push(region);
        self.any.store(true, Ordering::Release);
    }

    /// As after the last `release`, of a buffer that is in no slot.
    pub(crate) fn bury(&self, buffer: Buffer) {
        lock(&self.buffers).push(buffer);
        self.any.store(true, Ordering::Release);
    }

    fn take(&self) -> (Vec<RegionId>, Vec<Buffer>) {
        self.any.store(false, Ordering::Release);
        let regions = std::mem::take(&mut *lock(&self.regions));
        (regions, std::mem::take(&mut *lock(&self.buffers)))
    }
}

/// All buffers of a device, by `RegionId`: the slot's number below, how often the slot was used above.
#[derive(Debug, Default)]
pub(crate) struct Memories {
    slots: Vec<Slot>,
    free: Vec<u32>,
    unheld: Arc<Unheld>,
}

fn parts_of(region: RegionId) -> (usize, u32) {
    (region.0 as u32 as usize, (region.0 >> u32::BITS) as u32)
}

impl Memories {
    /// Held once, by the registration. `restless`: see `set_restless`.
    pub(crate) fn insert(&mut self, buffer: Buffer, restless: bool, keys: Option<Keys>) -> RegionId {
        let index = self.free.pop().unwrap_or_else(|| {
            self.slots.push(Slot::default());
            (self.slots.len() - 1) as u32
        });
        let slot = &mut self.slots[index as usize];
        slot.holds = AtomicUsize::new(1);
        slot.restless = AtomicBool::new(restless);
        slot.keys = keys;
        slot.buffer = Some(buffer);
        RegionId(u64::from(slot.generation) << u32::BITS | u64::from(index))
    }

    /// Whoever calls this has a hold already, or sees to it that another one stays meanwhile.
    pub(crate) fn hold(&self, region: RegionId) {
        if let Some(slot) = self.slot(region) {
            slot.holds.fetch_add(1, Ordering::Relaxed);
        }
    }

    /// Undo one `insert` or `hold`. After the last, nothing names the buffer any more; it waits in `take_dead`.
    pub(crate) fn release(&self, region: RegionId) {
        if let Some(slot) = self.slot(region)
            && slot.holds.fetch_sub(1, Ordering::AcqRel) == 1
        {
            self.unheld.push(region);
        }
    }

    /// Its octets may change while work that was posted from them is under way: they are sent from a copy.
    pub(crate) fn set_restless(&self, region: RegionId) {
        if let Some(slot) = self.slot(region) {
            slot.restless.store(true, Ordering::Relaxed);
        }
    }

    /// No peer reaches the region any more, after return.
    pub(crate) fn revoke_keys(&mut self, region: RegionId) {
        let index = parts_of(region).0;
        if self.slot(region).is_some()
            && let Some(keys) = self.slots.get_mut(index).and_then(|slot| slot.keys.as_mut())
        {
            keys.remote = None;
        }
    }

    /// What a hardware RNIC finds the octets of `span` by.
    pub(crate) fn piece(&self, span: Span) -> io::Result<Sge> {
        let found = self.slot(span.region).and_then(|slot| slot.keys.as_ref());
        let (Some(keys), Some(pointer)) = (found, self.locate(span, false)) else {
            return Err(io::Error::other("the memory of a work request is not there"));
        };
        Ok(Sge {
            address: pointer.as_ptr().expose_provenance() as u64,
            length: span.len,
            lkey: keys.lkey()?,
        })
    }

    pub(crate) fn unheld(&self) -> &Arc<Unheld> {
        &self.unheld
    }

    /// Buffers to drop once no lock is held: a keepalive may run anything, such as Python's finalizers.
    pub(crate) fn take_dead(&mut self) -> Vec<Buffer> {
        let (regions, mut dead) = self.unheld.take();
        for region in regions {
            let index = parts_of(region).0;
            if let Some(slot) = self.slots.get_mut(index) {
                slot.generation = slot.generation.wrapping_add(1);
                slot.keys = None;
                dead.extend(slot.buffer.take());
                self.free.push(index as u32);
            }
        }
        dead
    }

    /// Overwrite the octets of `span` with zeros, if they are there.
    pub(crate) fn clear(&self, span: Span) {
        if let Some(pointer) = self.locate(span, true) {
            // SAFETY: `locate` gave `len` writable octets that stay while `self` is borrowed.
            unsafe { pointer.write_bytes(0, span.len as usize) }
        }
    }

    /// `update_word` of the aligned native word at `offset`; None if there is no such word.
    pub(crate) fn atomic(&self, region: RegionId, offset: u64, operate: &mut dyn FnMut(u64) -> u64) -> Option<u64> {
        let pointer = self
            .locate(
                Span {
                    region,
                    offset,
                    len: WORD_BYTES as u32,
                },
                true,
            )?
            .cast::<u64>();
        if !pointer.is_aligned() {
            return None;
        }
        // SAFETY: `locate` gave 8 octets that stay while `self` is borrowed, and they are aligned. Atomics of all event loops
        // come through here, and the owner must use atomic instructions too: that is what registering the right means.
        let word = unsafe { AtomicU64::from_ptr(pointer.as_ptr()) };
        Some(update_word(word, operate))
    }

    /// Append the octets of `span` to `into`. Of a few, each aligned word is read in one load, in the order of addresses: who
    /// stores words meanwhile, as the owner of a table or a ring does, is seen to have stored whole ones (profile 5).
    fn read(&self, span: Span, into: &mut Vec<u8>) {
        let Some(pointer) = self.locate(span, false) else {
            return;
        };
        let before = pointer.align_offset(WORD_BYTES).min(span.len as usize);
        let words = (span.len as usize - before) / WORD_BYTES;
        if words == 0 || span.len as usize > READ_AS_WORDS_MAX_BYTES {
            return into.extend_from_slice(self.octets(span));
        }
        into.extend_from_slice(self.octets(span.part(0, before as u32)));
        // SAFETY: `locate` gave `len` octets that stay while `self` is borrowed, of which these are whole aligned words;
        // they are only loaded, which read-only memory bears too.
        let aligned = unsafe { slice::from_raw_parts(pointer.add(before).cast::<AtomicU64>().as_ptr(), words) };
        into.extend(
            aligned
                .iter()
                .flat_map(|word| word.load(Ordering::Acquire).to_ne_bytes()),
        );
        let after = (before + words * WORD_BYTES) as u32;
        into.extend_from_slice(self.octets(span.part(after, u32::MAX)));
    }

    /// The octets of `from` to `to`, or as many as both have; nothing if either is not there.
    pub(crate) fn copy(&self, from: Span, to: Span) {
        if let (Some(source), Some(target)) = (self.locate(from, false), self.locate(to, true)) {
            // SAFETY: `locate` gave so many octets of each, writable those of `to`; should they overlap, `copy` is for that.
            unsafe { std::ptr::copy(source.as_ptr(), target.as_ptr(), from.len.min(to.len) as usize) }
        }
    }

    /// None for a region that nothing holds.
    fn slot(&self, region: RegionId) -> Option<&Slot> {
        let (index, generation) = parts_of(region);
        self.slots
            .get(index)
            .filter(|slot| slot.generation == generation && slot.holds.load(Ordering::Relaxed) > 0)
    }

    /// Where the octets of `span` are, if they are.
    fn locate(&self, span: Span, for_writing: bool) -> Option<NonNull<u8>> {
        let buffer = self.slot(span.region)?.buffer.as_ref()?;
        let end = span.offset.checked_add(u64::from(span.len))?;
        if end > buffer.length as u64 || (for_writing && !buffer.writable) {
            return None;
        }
        // SAFETY: `offset` is at most `length`, so the result is within or at the end of the buffer's octets.
        Some(unsafe { buffer.address.add(span.offset as usize) })
    }

    /// Have the octets of `span` fetched into the processor's cache: takes at most as long as to read them.
    pub(crate) fn prefetch(&self, span: Span, for_what: Use) {
        let (lines, rest) = self.octets(span).as_chunks::<LINE_BYTES>();
        lines.iter().for_each(|line| prefetch_line(line, for_what));
        if !rest.is_empty() {
            prefetch_line(rest, for_what);
        }
    }

    /// The octets of `span` to look at now. None that are not there: what cannot be located is empty.
    fn octets(&self, span: Span) -> &[u8] {
        match self.locate(span, false) {
            // SAFETY: `locate` gave `len` octets that stay while `self` is borrowed. See the head of this module for
            // what a change meanwhile can do.
            Some(pointer) => unsafe { slice::from_raw_parts(pointer.as_ptr(), span.len as usize) },
            None => &[],
        }
    }
}

/// The octets of a device, as a stream needs them. Whoever holds a borrow of `Memories` holds the device's lock, as one of
/// its readers at least: nothing that it finds is revoked or goes meanwhile.
pub(crate) struct RegisteredOctets<'a>(pub(crate) &'a Memories);

impl RegisteredOctets<'_> {
    /// The octets of `span` to the start of `into`, as many as both have.
    pub(crate) fn read_into(&self, span: Span, into: &mut [u8]) {
        let octets = self.0.octets(span);
        let length = octets.len().min(into.len());
        if let (Some(into), Some(octets)) = (into.get_mut(..length), octets.get(..length)) {
            into.copy_from_slice(octets);
        }
    }
}

impl Octets for RegisteredOctets<'_> {
    fn write(&mut self, span: Span, data: &[u8]) {
        let Some(pointer) = self.0.locate(span, true) else {
            return;
        };
        let length = data.len().min(span.len as usize);
        // SAFETY: `locate` gave `len` writable octets; `data` is not registered memory, so the two do not overlap.
        unsafe { std::ptr::copy_nonoverlapping(data.as_ptr(), pointer.as_ptr(), length) }
    }

    fn crc32c(&self, state: u32, span: Span) -> u32 {
        crc32c::update(state, self.0.octets(span))
    }

    fn read(&self, span: Span, into: &mut Vec<u8>) {
        self.0.read(span, into);
    }

    /// Not what peers may write: with several event loops they do so at any time.
    fn is_still(&self, span: Span) -> bool {
        let restless = |slot: &Slot| slot.restless.load(Ordering::Relaxed);
        self.0.slot(span.region).is_none_or(|slot| !restless(slot))
    }
}

/// What octets are fetched for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Use {
    Read,
    Write,
}

/// What processors fetch at once; where it is more, some are asked for twice.
const LINE_BYTES: usize = 64;

/// A hint, if the processor has such: nothing is read, and nothing fails.
#[inline]
fn prefetch_line(line: &[u8], for_what: Use) {
    #[cfg(all(target_arch = "x86_64", not(miri)))]
    // SAFETY: a prefetch may name any address, and changes nothing. Processors without PREFETCHW take it for nothing.
    unsafe {
        use std::arch::asm;
        use std::arch::x86_64::{_MM_HINT_T1, _mm_prefetch};
        match for_what {
            Use::Read => _mm_prefetch::<_MM_HINT_T1>(line.as_ptr().cast()),
            Use::Write => asm!("prefetchw [{0}]", in(reg) line.as_ptr(), options(nostack, preserves_flags, readonly)),
        }
    }
    #[cfg(any(not(target_arch = "x86_64"), miri))]
    let _ = (line, for_what);
}

/// Read from `fd` straight into `span`, and what comes after that into `staging`; as readv.
pub(crate) fn receive_into(
    fd: BorrowedFd<'_>,
    memories: &Memories,
    span: Span,
    staging: &mut [u8],
) -> io::Result<usize> {
    let Some(pointer) = memories.locate(span, true) else {
        return Err(io::Error::from(io::ErrorKind::InvalidInput));
    };
    let parts = [
        libc::iovec {
            iov_base: pointer.as_ptr().cast(),
            iov_len: span.len as usize,
        },
        libc::iovec {
            iov_base: staging.as_mut_ptr().cast(),
            iov_len: staging.len(),
        },
    ];
    // SAFETY: the first part is writable registered memory that stays while `memories` is borrowed, the second a
    // buffer that is borrowed for writing.
    let received = unsafe { libc::readv(fd.as_raw_fd(), parts.as_ptr(), parts.len() as libc::c_int) };
    usize::try_from(received).map_err(|_| io::Error::last_os_error())
}

/// Send the first `PARTS_MAX` of `parts`; how many octets the system took. With `ends_segment` a TCP segment ends behind
/// the last of them, if it took all.
pub(crate) fn send_parts<'a>(
    fd: BorrowedFd<'_>,
    memories: &Memories,
    mut parts: impl Iterator<Item = Part<'a>>,
    ends_segment: bool,
) -> io::Result<usize> {
    let mut vectors: SmallVec<[libc::iovec; PARTS_MAX]> = SmallVec::new();
    for part in parts.by_ref().take(PARTS_MAX) {
        let octets = match part {
            Part::Own(octets) => octets,
            Part::Registered(span) => memories.octets(span),
        };
        if !octets.is_empty() {
            vectors.push(libc::iovec {
                iov_base: octets.as_ptr().cast_mut().cast(),
                iov_len: octets.len(),
            });
        }
    }
    // SAFETY: all zeros is a msghdr without address, pieces, control data and flags.
    let mut message: libc::msghdr = unsafe { std::mem::zeroed() };
    message.msg_iov = vectors.as_mut_ptr();
    message.msg_iovlen = vectors.len() as _;
    let end = if ends_segment && parts.next().is_none() {
        libc::MSG_EOR
    } else {
        0
    };
    // SAFETY: each vector points to octets that are borrowed until the end of this function, and are only read.
    let sent = unsafe { libc::sendmsg(fd.as_raw_fd(), &raw const message, libc::MSG_NOSIGNAL | end) };
    usize::try_from(sent).map_err(|_| io::Error::last_os_error())
}

#[cfg(test)]
mod tests {
    use super::*;
    use kbtp_proto::blocks::Words;

    fn span(region: RegionId, offset: u64, len: u32) -> Span {
        Span { region, offset, len }
    }

    #[test]
    fn octets_are_where_the_span_says() {
        let mut memories = Memories::default();
        let region = memories.insert(Buffer::zeroed(11).unwrap(), false, None);
        RegisteredOctets(&memories).write(span(region, 3, 4), b"abcd");
        let mut out = Vec::new();
        RegisteredOctets(&memories).read(span(region, 2, 9), &mut out);
        assert_eq!(out, b"\0abcd\0\0\0\0");
    }

    #[test]
    fn octets_are_read_from_wherever_they_begin_and_end() {
        let mut memories = Memories::default();
        let long = READ_AS_WORDS_MAX_BYTES + 40;
        let region = memories.insert(Buffer::zeroed(long).unwrap(), false, None);
        let all: Vec<u8> = (0..long).map(|n| n as u8).collect();
        RegisteredOctets(&memories).write(span(region, 0, long as u32), &all);
        for from in 0..=16 {
            for to in (from..=40).chain(long - 8..=long) {
                let mut out = vec![99];
                RegisteredOctets(&memories).read(span(region, from as u64, (to - from) as u32), &mut out);
                assert_eq!((out[0], &out[1..]), (99, &all[from..to]));
            }
        }
    }

    #[test]
    fn words_are_whole_aligned_and_writable() {
        let buffer = Buffer::zeroed(24).unwrap();
        let words = BufferWords::new(buffer.share(), "Head").unwrap();
        assert_eq!(words.count(), 3);
        words.store(1, 5);
        assert_eq!(words.update(1, &mut |old| old + 2), 5);
        let mut octets = [0; 24];
        buffer.read_into(&mut octets);
        assert_eq!((&octets[8..16], words.load(1)), (&7_u64.to_ne_bytes()[..], 7));
        let address = buffer.address();
        for (skip, length, writable) in [(4, 8, true), (0, 12, true), (0, 8, false)] {
            // SAFETY: the octets are those of `buffer`, which is kept.
            let part = unsafe { Buffer::from_raw_parts(address + skip, length, writable, Box::new(buffer.share())) };
            let Err(error) = BufferWords::new(part.unwrap(), "Head") else {
                panic!("{length} octets are taken")
            };
            assert!(
                error.to_string().contains("Head: writable words of 8 octets"),
                "{error}"
            );
        }
    }

    #[test]
    fn a_span_out_of_bounds_is_empty_and_is_not_written() {
        let mut memories = Memories::default();
        let region = memories.insert(Buffer::zeroed(8).unwrap(), false, None);
        for wrong in [span(region, 1, 8), span(region, u64::MAX, 1), span(RegionId(77), 0, 1)] {
            RegisteredOctets(&memories).write(wrong, b"x");
            let mut out = Vec::new();
            RegisteredOctets(&memories).read(wrong, &mut out);
            assert!(out.is_empty());
        }
        assert_eq!(memories.octets(span(region, 0, 8)), [0; 8]);
    }

    #[test]
    fn a_released_region_names_nothing_even_when_its_slot_is_used_again() {
        let mut memories = Memories::default();
        let first = memories.insert(Buffer::zeroed(8).unwrap(), false, None);
        memories.hold(first);
        memories.release(first);
        assert!(!memories.unheld().any());
        memories.release(first);
        assert!(memories.unheld().any() && memories.locate(span(first, 0, 1), false).is_none());
        assert_eq!(memories.take_dead().len(), 1);
        let second = memories.insert(Buffer::zeroed(8).unwrap(), false, None);
        assert_ne!(first, second);
        assert!(memories.locate(span(first, 0, 1), false).is_none());
        memories.release(first);
        assert!(memories.locate(span(second, 0, 1), false).is_some());
    }

    #[test]
    fn only_memory_that_others_may_change_is_restless() {
        let mut memories = Memories::default();
        let [quiet, peers] = [false, true].map(|restless| memories.insert(Buffer::zeroed(8).unwrap(), restless, None));
        let still = |memories: &Memories, region| RegisteredOctets(memories).is_still(span(region, 0, 8));
        assert!(still(&memories, quiet) && !still(&memories, peers));
        memories.set_restless(quiet);
        assert!(!still(&memories, quiet));
    }

    #[test]
    fn read_only_memory_is_not_written() {
        static OCTETS: [u8; 4] = *b"keep";
        let address = OCTETS.as_ptr().expose_provenance();
        // SAFETY: a static lives for ever, and is registered for reading only.
        let buffer = unsafe { Buffer::from_raw_parts(address, 4, false, Box::new(())) }.unwrap();
        let mut memories = Memories::default();
        let region = memories.insert(buffer, false, None);
        RegisteredOctets(&memories).write(span(region, 0, 4), b"gone");
        assert_eq!(memories.octets(span(region, 0, 4)), b"keep");
        assert!(memories.atomic(region, 0, &mut |old| old).is_none());
    }

    #[test]
    fn atomics_return_the_old_value() {
        let mut memories = Memories::default();
        let region = memories.insert(Buffer::zeroed(16).unwrap(), false, None);
        assert_eq!(memories.atomic(region, 8, &mut |old| old + 5), Some(0));
        assert_eq!(memories.atomic(region, 8, &mut |old| old + 1), Some(5));
        assert_eq!(memories.atomic(region, 4, &mut |old| old + 1), None);
        assert_eq!(memories.atomic(region, 9, &mut |old| old + 1), None);
    }

    #[test]
    fn a_part_is_some_of_the_same_octets() {
        let whole = Buffer::zeroed(16).unwrap();
        let part = whole.part(8, 8).unwrap();
        BufferWords::new(part.share(), "Head").unwrap().store(0, u64::MAX);
        let mut octets = [0; 16];
        whole.read_into(&mut octets);
        assert_eq!(octets, [[0; 8], [0xFF; 8]].concat()[..]);
        for (from, length) in [(8, 9), (16, 1), (0, 0), (usize::MAX, 2)] {
            assert!(matches!(whole.part(from, length), Err(Error::ApiMisuse(_))));
        }
    }

    #[test]
    fn no_octets_no_buffer() {
        assert!(matches!(Buffer::zeroed(0), Err(Error::ApiMisuse(_))));
        // SAFETY: nothing is made of it.
        let null = unsafe { Buffer::from_raw_parts(0, 8, true, Box::new(())) };
        assert!(matches!(null, Err(Error::ApiMisuse(_))));
    }
}

/// Apart from those that run in Miri, which has no sockets.
#[cfg(test)]
mod socket_tests {
    use std::io::Read;
    use std::net::{TcpListener, TcpStream};
    use std::os::fd::AsFd;

    use super::*;
    use socket2::Socket;

    /// TCP segments with octets that came in on `sock`; `tcpi_data_segs_in` of Linux's tcp_info.
    fn segments_received(sock: &TcpStream) -> u32 {
        let mut info = [0_u32; 64];
        let mut length = size_of_val(&info) as libc::socklen_t;
        // SAFETY: `info` takes as many octets as `length` says, and any octets make a u32.
        let status = unsafe {
            let into = info.as_mut_ptr().cast();
            libc::getsockopt(
                sock.as_raw_fd(),
                libc::IPPROTO_TCP,
                libc::TCP_INFO,
                into,
                &raw mut length,
            )
        };
        assert!(status == 0 && length as usize > 39 * size_of::<u32>());
        info[38]
    }

    #[test]
    fn what_ends_a_segment_is_not_joined_by_what_is_sent_behind_it() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let ours = Socket::from(TcpStream::connect(listener.local_addr().unwrap()).unwrap());
        let mut theirs = listener.accept().unwrap().0;
        // Nothing leaves meanwhile, as when the peer's window is closed.
        ours.set_tcp_cork(true).unwrap();
        for octets in [&b"head"[..], b"and pad", b"behind"] {
            let part = [Part::Own(octets)].into_iter();
            let sent = send_parts(ours.as_fd(), &Memories::default(), part, true).unwrap();
            assert_eq!(sent, octets.len());
        }
        ours.set_tcp_cork(false).unwrap();
        theirs.read_exact(&mut [0; 17]).unwrap();
        assert_eq!(segments_received(&theirs), 3);
    }
}
