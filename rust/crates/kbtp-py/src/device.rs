//! The device, its domains and its regions.

use std::time::Duration;

use kbtp_proto::mpa::{MpaOptions, RtrKind};
use kbtp_rnic::api::Access;
use kbtp_rnic::options::Options;
use pyo3::exceptions::PyOSError;
use pyo3::prelude::*;
use pyo3::types::PyDict;

use crate::channel::{Channel, duration};
use crate::errors::raised;
use crate::memory::{Extent, vouched};
use crate::stream::Stream;

/// The RNIC itself.
#[pyclass(frozen, module = "kbtp._native")]
pub(crate) struct Device(kbtp_rnic::device::Device);

/// A protection domain.
#[pyclass(frozen, module = "kbtp._native")]
pub(crate) struct Pd(pub(crate) kbtp_rnic::device::Pd);

/// Registered memory.
#[pyclass(frozen, module = "kbtp._native")]
pub(crate) struct Region(kbtp_rnic::device::Region);

impl Region {
    pub(crate) fn rnic_region(&self) -> &kbtp_rnic::device::Region {
        &self.0
    }
}

#[pymethods]
impl Device {
    #[new]
    #[pyo3(signature = (*, crc, want_markers, revision, peer_to_peer, revision1_depth, mpa_request_timeout_s, goodbye_s,
        disconnect_s, accept_pause_s, tcp_user_timeout_s, spin_us, forced_punts, forced_punts_seed))]
    #[allow(clippy::too_many_arguments, reason = "all by keyword")]
    fn new(
        crc: bool,
        want_markers: bool,
        revision: u8,
        peer_to_peer: u8,
        revision1_depth: u16,
        mpa_request_timeout_s: f64,
        goodbye_s: f64,
        disconnect_s: f64,
        accept_pause_s: f64,
        tcp_user_timeout_s: f64,
        spin_us: u64,
        forced_punts: f64,
        forced_punts_seed: u64,
    ) -> Self {
        let mpa = MpaOptions {
            crc,
            want_markers,
            revision,
            peer_to_peer: RtrKind::from_bits_truncate(peer_to_peer),
            revision1_depth,
        };
        Self(kbtp_rnic::device::Device::open(Options {
            mpa,
            mpa_request_timeout: duration(mpa_request_timeout_s),
            goodbye: duration(goodbye_s),
            disconnect: duration(disconnect_s),
            accept_pause: duration(accept_pause_s),
            tcp_user_timeout: duration(tcp_user_timeout_s),
            spin: Duration::from_micros(spin_us),
            forced_punts,
            forced_punts_seed,
        }))
    }

    /// Over the RDMA device `name` of rdma-core, or the first one that can be used.
    #[staticmethod]
    #[pyo3(signature = (*, name, disconnect_s, spin_us, forced_punts, forced_punts_seed))]
    fn rdma_core(
        py: Python<'_>,
        name: Option<&str>,
        disconnect_s: f64,
        spin_us: u64,
        forced_punts: f64,
        forced_punts_seed: u64,
    ) -> PyResult<Self> {
        let hardware = py
            .detach(|| kbtp_verbs::open(name))
            .map_err(|missing| PyOSError::new_err(missing.0))?;
        let options = Options {
            disconnect: duration(disconnect_s),
            spin: Duration::from_micros(spin_us),
            forced_punts,
            forced_punts_seed,
            ..Options::default()
        };
        Ok(Self(kbtp_rnic::device::Device::open_hardware(options, hardware)))
    }

    /// What stands in `kbtp.verbs.api.Capabilities`, by name.
    fn capabilities<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        let can = self.0.capabilities();
        let named = PyDict::new(py);
        for (name, value) in [
            ("atomics", can.atomics),
            ("masked_atomics", can.masked_atomics),
            ("immediate", can.immediate),
            ("send_with_invalidate", can.send_with_invalidate),
            ("ordered_placement", can.ordered_placement),
            ("write_with_immediate", can.write_with_immediate),
            ("own_base", can.own_base),
            ("invalidated_by_peers", can.invalidated_by_peers),
            ("atomics_with_processors", can.atomics_with_processors),
        ] {
            named.set_item(name, value)?;
        }
        named.set_item("max_ird", can.max_ird)?;
        named.set_item("max_ord", can.max_ord)?;
        Ok(named)
    }

    fn allocate_pd(&self, py: Python<'_>) -> PyResult<Pd> {
        let pd = py.detach(|| self.0.allocate_pd());
        pd.map(Pd).map_err(|error| raised(py, error))
    }

    #[allow(
        clippy::too_many_arguments,
        reason = "those of kbtp.verbs.api and what its buffer is made of"
    )]
    fn register(
        &self,
        py: Python<'_>,
        address: usize,
        length: usize,
        writable: bool,
        keepalive: Py<PyAny>,
        access: u8,
        pd: &Bound<'_, Pd>,
        stream: Option<&Bound<'_, Stream>>,
        base_to: u64,
    ) -> PyResult<Region> {
        let extent = Extent {
            address,
            length_bytes: length,
            writable,
        };
        // SAFETY: the one caller, NativeRnic.register, has all of it from `buffer_of`, whose view is the keepalive.
        let buffer = unsafe { vouched(extent, keepalive) };
        let buffer = buffer.map_err(|error| raised(py, error))?;
        let (access, pd) = (Access::from_bits_truncate(access), &pd.get().0);
        let stream = stream.map(|stream| &stream.get().0);
        py.detach(|| self.0.register(buffer, access, pd, stream, base_to))
            .map(Region)
            .map_err(|error| raised(py, error))
    }

    fn open_channel(&self, py: Python<'_>, threads: usize) -> PyResult<Channel> {
        let open = || match threads {
            0 => self.0.open_channel(),
            threads => self.0.open_channel_with_threads(threads),
        };
        py.detach(open).map(Channel::new).map_err(|error| raised(py, error))
    }

    fn punts(&self) -> Vec<(&'static str, u64)> {
        let punts = self.0.punts();
        punts.map(|(reason, count)| (reason.name(), count)).collect()
    }

    fn close(&self, py: Python<'_>) {
        py.detach(|| self.0.close());
    }
}

#[pymethods]
impl Region {
    #[getter]
    fn stag(&self) -> u32 {
        self.0.stag()
    }

    #[getter]
    fn base_to(&self) -> u64 {
        self.0.base_to()
    }

    #[getter]
    fn length(&self) -> u64 {
        self.0.length()
    }

    #[getter]
    fn access(&self) -> u8 {
        self.0.access().bits()
    }

    #[getter]
    fn valid(&self, py: Python<'_>) -> bool {
        py.detach(|| self.0.valid())
    }

    fn revoke(&self, py: Python<'_>) {
        py.detach(|| self.0.revoke());
    }
}
