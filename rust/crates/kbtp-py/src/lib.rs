//! The native RNIC as the Python module `kbtp._native`.
//!
//! Numbers, octets and tuples go through here, `kbtp.rnic.native` makes the verbs' types of them. Whatever may take
//! time, or a lock of the RNIC, runs without the GIL.

mod blocks;
mod build;
mod channel;
mod checksum;
mod device;
mod errors;
mod events;
mod limits;
mod logging;
mod memory;
mod requester;
mod stream;

use pyo3::prelude::*;

#[pymodule]
fn _native(module: &Bound<'_, PyModule>) -> PyResult<()> {
    logging::install();
    module.add_class::<blocks::BlockStore>()?;
    module.add_class::<channel::Channel>()?;
    module.add_class::<channel::ConnectRequest>()?;
    module.add_class::<channel::Listener>()?;
    module.add_class::<device::Device>()?;
    module.add_class::<device::Pd>()?;
    module.add_class::<device::Region>()?;
    module.add_class::<requester::Octets>()?;
    module.add_class::<requester::Requester>()?;
    module.add_class::<stream::Stream>()?;
    module.add_function(wrap_pyfunction!(build::build, module)?)?;
    module.add_function(wrap_pyfunction!(checksum::joined_checksum, module)?)?;
    module.add_function(wrap_pyfunction!(limits::limits, module)?)
}
