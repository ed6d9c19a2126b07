//! libibverbs and librdmacm, found when they are first needed.

use std::ffi::{c_char, c_int, c_void};
use std::io;
use std::ptr::NonNull;
use std::sync::OnceLock;

use crate::abi::*;

macro_rules! library {
    ($($file:ident = $name:literal { $(fn $function:ident($($argument:ty),*) $(-> $result:ty)?;)* })*) => {
        /// The functions, by the names of the libraries.
        pub(crate) struct Library {
            $($(pub(crate) $function: unsafe extern "C" fn($($argument),*) $(-> $result)?,)*)*
        }

        impl Library {
            fn open() -> Result<Self, String> {
                $(
                    // SAFETY: what rdma-core's libraries do when they are loaded has no requirements.
                    let $file = unsafe { libloading::Library::new($name) }
                        .map_err(|error| format!("{} cannot be loaded ({error})", $name))?;
                    // Never unloaded: the functions are called until the end of the process.
                    let $file: &'static libloading::Library = Box::leak(Box::new($file));
                )*
                Ok(Self {
                    $($(
                        // SAFETY: the type is that of the function's declaration in the header.
                        $function: *unsafe { $file.get(concat!(stringify!($function), "\0")) }
                            .map_err(|error| format!("{} lacks {} ({error})", $name, stringify!($function)))?,
                    )*)*
                })
            }
        }
    };
}

library! {
    ibverbs = "libibverbs.so.1" {
        fn ibv_fork_init() -> c_int;
        fn ibv_get_device_name(*mut IbvDevice) -> *const c_char;
        fn ibv_query_device(*mut IbvContext, *mut IbvDeviceAttr) -> c_int;
        fn ibv_query_port(*mut IbvContext, u8, *mut IbvPortAttr) -> c_int;
        fn ibv_query_qp(*mut IbvQp, *mut IbvQpAttr, c_int, *mut IbvQpInitAttr) -> c_int;
        fn ibv_alloc_pd(*mut IbvContext) -> *mut IbvPd;
        fn ibv_dealloc_pd(*mut IbvPd) -> c_int;
        fn ibv_reg_mr(*mut IbvPd, *mut c_void, usize, c_int) -> *mut IbvMr;
        fn ibv_dereg_mr(*mut IbvMr) -> c_int;
        fn ibv_create_comp_channel(*mut IbvContext) -> *mut IbvCompChannel;
        fn ibv_destroy_comp_channel(*mut IbvCompChannel) -> c_int;
        fn ibv_create_cq(*mut IbvContext, c_int, *mut c_void, *mut IbvCompChannel, c_int) -> *mut IbvCq;
        fn ibv_destroy_cq(*mut IbvCq) -> c_int;
        fn ibv_get_cq_event(*mut IbvCompChannel, *mut *mut IbvCq, *mut *mut c_void) -> c_int;
        fn ibv_ack_cq_events(*mut IbvCq, u32);
    }
    rdmacm = "librdmacm.so.1" {
        fn rdma_get_devices(*mut c_int) -> *mut *mut IbvContext;
        fn rdma_create_event_channel() -> *mut RdmaEventChannel;
        fn rdma_destroy_event_channel(*mut RdmaEventChannel);
        fn rdma_create_id(*mut RdmaEventChannel, *mut *mut RdmaCmId, *mut c_void, c_int) -> c_int;
        fn rdma_destroy_id(*mut RdmaCmId) -> c_int;
        fn rdma_migrate_id(*mut RdmaCmId, *mut RdmaEventChannel) -> c_int;
        fn rdma_set_option(*mut RdmaCmId, c_int, c_int, *mut c_void, usize) -> c_int;
        fn rdma_bind_addr(*mut RdmaCmId, *const c_void) -> c_int;
        fn rdma_listen(*mut RdmaCmId, c_int) -> c_int;
        fn rdma_resolve_addr(*mut RdmaCmId, *const c_void, *const c_void, c_int) -> c_int;
        fn rdma_resolve_route(*mut RdmaCmId, c_int) -> c_int;
        fn rdma_create_qp(*mut RdmaCmId, *mut IbvPd, *mut IbvQpInitAttr) -> c_int;
        fn rdma_destroy_qp(*mut RdmaCmId);
        fn rdma_connect(*mut RdmaCmId, *mut RdmaConnParam) -> c_int;
        fn rdma_accept(*mut RdmaCmId, *mut RdmaConnParam) -> c_int;
        fn rdma_reject(*mut RdmaCmId, *const c_void, u8) -> c_int;
        fn rdma_disconnect(*mut RdmaCmId) -> c_int;
        fn rdma_get_cm_event(*mut RdmaEventChannel, *mut *mut RdmaCmEvent) -> c_int;
        fn rdma_ack_cm_event(*mut RdmaCmEvent) -> c_int;
        fn rdma_get_src_port(*mut RdmaCmId) -> u16;
    }
}

static LIBRARY: OnceLock<Result<Library, String>> = OnceLock::new();

/// Load the libraries, once; why that does not work.
pub(crate) fn load() -> Result<(), String> {
    LIBRARY
        .get_or_init(|| {
            let library = Library::open()?;
            // Or a fork would take registered memory away from the device, on kernels that copy it for the parent.
            // SAFETY: before any other function of the library. If it fails, nothing is different.
            unsafe { (library.ibv_fork_init)() };
            Ok(library)
        })
        .as_ref()
        .map(|_| ())
        .map_err(String::clone)
}

/// Whoever has a value of this crate has called `load` with success.
pub(crate) fn library() -> &'static Library {
    match LIBRARY.get() {
        Some(Ok(library)) => library,
        _ => unreachable!("whatever needs them comes from `open` or `Endpoint::new`, which load the libraries"),
    }
}

/// Of functions that return -1 and say why in errno.
pub(crate) fn checked(result: c_int) -> io::Result<()> {
    if result == 0 {
        Ok(())
    } else {
        Err(io::Error::last_os_error())
    }
}

/// Of functions that return the number of the error.
pub(crate) fn checked_number(result: c_int) -> io::Result<()> {
    match result {
        0 => Ok(()),
        -1 => Err(io::Error::last_os_error()),
        number => Err(io::Error::from_raw_os_error(number.abs())),
    }
}

pub(crate) fn made<T>(pointer: *mut T) -> io::Result<NonNull<T>> {
    NonNull::new(pointer).ok_or_else(io::Error::last_os_error)
}
