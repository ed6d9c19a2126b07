//! Memory of Python objects: where their octets are, and how they are kept there. All `unsafe` of this crate is here.
//!
//! The buffer protocol joined the stable ABI with Python 3.11, its functions and their structure are the same in 3.10
//! (PEP 3118): they are declared here, so that one build serves both.

use std::ffi::{c_char, c_int, c_void};
use std::mem::MaybeUninit;

use kbtp_rnic::memory::Buffer;
use pyo3::ffi::{Py_ssize_t, PyObject};
use pyo3::prelude::*;
use pyo3::types::PyMemoryView;

/// `Py_buffer` of PEP 3118.
#[repr(C)]
struct View {
    octets: *mut c_void,
    owner: *mut PyObject,
    length: Py_ssize_t,
    item_size: Py_ssize_t,
    read_only: c_int,
    dimensions: c_int,
    format: *mut c_char,
    shape: *mut Py_ssize_t,
    strides: *mut Py_ssize_t,
    sub_offsets: *mut Py_ssize_t,
    internal: *mut c_void,
}

/// Contiguous octets, of any type and shape.
const PYBUF_SIMPLE: c_int = 0;

unsafe extern "C" {
    fn PyObject_GetBuffer(object: *mut PyObject, view: *mut View, flags: c_int) -> c_int;
    fn PyBuffer_Release(view: *mut View);
}

/// Where the octets of an object are for as long as it lives and nobody resizes it.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Extent {
    pub(crate) address: usize,
    pub(crate) length_bytes: usize,
    pub(crate) writable: bool,
}

/// None for what has no buffer protocol, or has gaps.
pub(crate) fn extent_of(object: &Bound<'_, PyAny>) -> Option<Extent> {
    let mut view = MaybeUninit::<View>::uninit();
    // SAFETY: the object is alive and the GIL held, as `object` proves; the view is this function's own.
    if unsafe { PyObject_GetBuffer(object.as_ptr(), view.as_mut_ptr(), PYBUF_SIMPLE) } != 0 {
        drop(PyErr::take(object.py()));
        return None;
    }
    // SAFETY: the call above has filled it.
    let mut view = unsafe { view.assume_init() };
    let extent = Extent {
        address: view.octets.expose_provenance(),
        length_bytes: view.length.try_into().unwrap_or(0),
        writable: view.read_only == 0,
    };
    // SAFETY: it was filled by PyObject_GetBuffer, and is released once.
    unsafe { PyBuffer_Release(&raw mut view) };
    Some(extent)
}

/// The octets of `object`, which cannot be resized while they are needed; None if that has no buffer protocol.
pub(crate) fn kept(object: &Bound<'_, PyAny>, extent: Extent) -> Option<Buffer> {
    let view = PyMemoryView::from(object).ok()?;
    // SAFETY: the memoryview exports the object's buffer, which therefore stays where `extent_of` has found it.
    unsafe { vouched(extent, view.into_any().unbind()) }.ok()
}

/// The octets of `extent`.
///
/// # Safety
///
/// `keepalive` keeps the octets where `extent` says, and writable if it says so.
pub(crate) unsafe fn vouched(extent: Extent, keepalive: Py<PyAny>) -> Result<Buffer, kbtp_rnic::error::Error> {
    let Extent {
        address,
        length_bytes,
        writable,
    } = extent;
    // SAFETY: as the caller vouches; Python code shares the octets without Rust references to them.
    unsafe { Buffer::from_raw_parts(address, length_bytes, writable, Box::new(keepalive)) }
}
