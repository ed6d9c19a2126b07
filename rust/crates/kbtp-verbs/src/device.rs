//! Devices, their protection domains and their memory regions.

use std::ffi::{CStr, c_int, c_void};
use std::io;
use std::mem::MaybeUninit;
use std::ptr::NonNull;
use std::sync::Arc;

use crate::abi::*;
use crate::library::{checked_number, library, made};

/// Octets that this process may pin (RLIMIT_MEMLOCK); None: as many as it likes.
pub(crate) fn memlock_limit() -> Option<u64> {
    let mut limit = MaybeUninit::<libc::rlimit>::zeroed();
    // SAFETY: it fills the structure that is this function's own, which is valid as zeros too.
    let limit = unsafe {
        libc::getrlimit(libc::RLIMIT_MEMLOCK, limit.as_mut_ptr());
        limit.assume_init()
    };
    (limit.rlim_cur != libc::RLIM_INFINITY).then_some(limit.rlim_cur)
}

/// A device that is opened; for ever, since whoever has registered memory needs it.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct Context(pub(crate) NonNull<IbvContext>);

// SAFETY: libibverbs may be called by several threads with the same context, and contexts are never closed.
unsafe impl Send for Context {}
// SAFETY: as above.
unsafe impl Sync for Context {}

/// The devices that librdmacm has opened. The libraries are loaded.
pub(crate) fn contexts() -> io::Result<Vec<Context>> {
    let mut count = 0;
    // SAFETY: it says how many there are in `count`. The list is never given back, and with it no device is closed.
    let list = made(unsafe { (library().rdma_get_devices)(&raw mut count) })?;
    let pointers = (0..usize::try_from(count).unwrap_or(0)).map(|index| {
        // SAFETY: the list has `count` pointers.
        unsafe { *list.as_ptr().add(index) }
    });
    Ok(pointers.filter_map(NonNull::new).map(Context).collect())
}

impl Context {
    pub(crate) fn raw(self) -> *mut IbvContext {
        self.0.as_ptr()
    }

    /// Such as `mlx5_0`.
    #[must_use]
    pub fn name(self) -> String {
        // SAFETY: the context is open, and with it its device, whose name stays.
        let name = unsafe { CStr::from_ptr((library().ibv_get_device_name)((*self.raw()).device)) };
        name.to_string_lossy().into_owned()
    }

    /// An iWARP device; others are InfiniBand or RoCE.
    #[must_use]
    pub fn is_iwarp(self) -> bool {
        // SAFETY: the context is open, and with it its device.
        unsafe { (*(*self.raw()).device).transport_type == IBV_TRANSPORT_IWARP }
    }

    pub(crate) fn attributes(self) -> io::Result<IbvDeviceAttr> {
        let mut attributes = MaybeUninit::zeroed();
        // SAFETY: it fills the structure, which is valid as zeros too.
        unsafe {
            checked_number((library().ibv_query_device)(self.raw(), attributes.as_mut_ptr()))?;
            Ok(attributes.assume_init())
        }
    }

    pub(crate) fn port_attributes(self, port: u8) -> io::Result<IbvPortAttr> {
        let mut attributes = MaybeUninit::zeroed();
        // SAFETY: it fills no more of the structure than there is, which is valid as zeros too.
        unsafe {
            checked_number((library().ibv_query_port)(self.raw(), port, attributes.as_mut_ptr()))?;
            Ok(attributes.assume_init())
        }
    }

    /// A new protection domain.
    ///
    /// # Errors
    ///
    /// As the system gives it.
    pub fn allocate_pd(self) -> io::Result<Arc<Pd>> {
        // SAFETY: the context is open.
        let pd = made(unsafe { (library().ibv_alloc_pd)(self.raw()) })?;
        Ok(Arc::new(Pd(pd, self)))
    }
}

/// A protection domain.
pub struct Pd(pub(crate) NonNull<IbvPd>, Context);

// SAFETY: libibverbs may be called by several threads with the same domain.
unsafe impl Send for Pd {}
// SAFETY: as above.
unsafe impl Sync for Pd {}

impl Pd {
    /// Of which device.
    #[must_use]
    pub fn context(&self) -> Context {
        self.1
    }

    /// Let the device at `length` octets at `address`; `access` is of `IBV_ACCESS_*`.
    ///
    /// # Safety
    ///
    /// As long as the region lives, the octets must be mapped, and writable if `access` has a right to write, which
    /// LOCAL_WRITE is; the device changes them without any regard to references then.
    ///
    /// # Errors
    ///
    /// As the system gives it.
    pub unsafe fn register(self: &Arc<Self>, address: usize, length: usize, access: c_int) -> io::Result<Mr> {
        let octets = std::ptr::with_exposed_provenance_mut::<c_void>(address);
        // SAFETY: the domain is there; the caller vouches for the octets.
        let mr = made(unsafe { (library().ibv_reg_mr)(self.0.as_ptr(), octets, length, access) })?;
        // SAFETY: the library has just made it.
        let (lkey, rkey) = unsafe { (mr.as_ref().lkey, mr.as_ref().rkey) };
        Ok(Mr {
            mr,
            lkey,
            rkey,
            _pd: Arc::clone(self),
        })
    }
}

impl std::fmt::Debug for Pd {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Pd({:p})", self.0)
    }
}

impl Drop for Pd {
    fn drop(&mut self) {
        // SAFETY: whatever belongs to it has a clone of the `Arc`, and is gone. It cannot fail then.
        unsafe { (library().ibv_dealloc_pd)(self.0.as_ptr()) };
    }
}

/// Memory that a device reaches.
pub struct Mr {
    mr: NonNull<IbvMr>,
    /// For the own posts.
    pub lkey: u32,
    /// For peers.
    pub rkey: u32,
    _pd: Arc<Pd>,
}

// SAFETY: libibverbs may be called by several threads.
unsafe impl Send for Mr {}
// SAFETY: a shared `Mr` gives nothing but numbers.
unsafe impl Sync for Mr {}

impl Drop for Mr {
    fn drop(&mut self) {
        // SAFETY: made by `register`, given back once. After return the device reaches nothing through its keys.
        unsafe { (library().ibv_dereg_mr)(self.mr.as_ptr()) };
    }
}

impl std::fmt::Debug for Mr {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Mr({:#010x})", self.rkey)
    }
}
