//! What this build of the native RNIC is, and what it takes on this machine.

use kbtp_proto::crc32c;
use kbtp_rnic::{EVENTS, one_processor};
use pyo3::prelude::*;
use pyo3::types::PyDict;

/// Version, profile, the path that CRC32c takes, what event loops wait with, and whether whoever waits may spin here.
#[pyfunction]
pub(crate) fn build(py: Python<'_>) -> PyResult<Bound<'_, PyDict>> {
    let told = PyDict::new(py);
    told.set_item("version", env!("CARGO_PKG_VERSION"))?;
    told.set_item("optimized", !cfg!(debug_assertions))?;
    told.set_item("crc32c", crc32c::path())?;
    told.set_item("events", EVENTS)?;
    told.set_item("spins", !one_processor())?;
    Ok(told)
}
