//! Channels, listeners and connect requests.

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use pyo3::prelude::*;
use pyo3::types::PyBytes;

use crate::device::Pd;
use crate::errors::raised;
use crate::events;
use crate::stream::{Receive, Stream, recvs};

/// Longer is not told apart from for ever.
const LONGEST_S: f64 = 1e9;

/// A signal that comes while a wait lasts ends it. One that comes between two waits of a poll, or to another thread, is
/// noticed after so long.
pub(crate) const SIGNAL_CHECK: Duration = Duration::from_millis(500);

/// `seconds`, or the nearest time there is: infinity is a fine time limit, and a negative one has passed.
pub(crate) fn duration(seconds: f64) -> Duration {
    Duration::try_from_secs_f64(seconds.min(LONGEST_S)).unwrap_or(Duration::ZERO)
}

/// One owner's streams and listeners.
#[pyclass(frozen, module = "kbtp._native")]
pub(crate) struct Channel {
    inner: kbtp_rnic::channel::Channel,
    /// Tells a `poll` that somebody woke from one that it is only time to look for signals.
    woken: AtomicBool,
}

impl Channel {
    pub(crate) fn new(inner: kbtp_rnic::channel::Channel) -> Self {
        Self {
            inner,
            woken: AtomicBool::new(false),
        }
    }
}

#[pymethods]
impl Channel {
    fn listen(&self, py: Python<'_>, host: &str, port: u16) -> PyResult<Listener> {
        py.detach(|| self.inner.listen(host, port))
            .map(Listener)
            .map_err(|error| raised(py, error))
    }

    #[allow(clippy::too_many_arguments, reason = "those of kbtp.verbs.api")]
    fn connect(
        &self,
        py: Python<'_>,
        host: &str,
        port: u16,
        pd: &Bound<'_, Pd>,
        private_data: &[u8],
        ird: u32,
        ord_: u32,
        timeout_s: f64,
        receives: Vec<Receive<'_>>,
    ) -> PyResult<Stream> {
        let (pd, timeout, receives) = (&pd.get().0, duration(timeout_s), recvs(receives));
        py.detach(|| {
            self.inner
                .connect(host, port, pd, private_data, ird, ord_, timeout, &receives)
        })
        .map(Stream)
        .map_err(|error| raised(py, error))
    }

    fn poll<'py>(&self, py: Python<'py>, timeout_s: f64) -> PyResult<Vec<Bound<'py, PyAny>>> {
        let deadline = Instant::now() + duration(timeout_s);
        loop {
            let (events, time_is_up) = py.detach(|| {
                let until = deadline.min(Instant::now() + SIGNAL_CHECK);
                let events = self.inner.poll(until.saturating_duration_since(Instant::now()));
                (events, Instant::now() >= until)
            });
            let events = events.map_err(|error| raised(py, error))?;
            let woken = self.woken.swap(false, Ordering::SeqCst);
            if !events.is_empty() || woken || !time_is_up || Instant::now() >= deadline {
                return events.into_iter().map(|event| events::tuple(py, event)).collect();
            }
            py.check_signals()?;
        }
    }

    fn fileno(&self, py: Python<'_>) -> PyResult<i32> {
        py.detach(|| self.inner.fd()).map_err(|error| raised(py, error))
    }

    fn next_timeout_s(&self, py: Python<'_>) -> PyResult<Option<f64>> {
        let next = py
            .detach(|| self.inner.next_timeout())
            .map_err(|error| raised(py, error))?;
        Ok(next.map(|timeout| timeout.as_secs_f64()))
    }

    fn wake(&self) {
        self.woken.store(true, Ordering::SeqCst);
        self.inner.wake();
    }

    fn close(&self, py: Python<'_>) {
        py.detach(|| self.inner.close());
    }
}

/// A listening socket.
#[pyclass(frozen, module = "kbtp._native")]
pub(crate) struct Listener(kbtp_rnic::channel::Listener);

#[pymethods]
impl Listener {
    #[getter]
    fn address(&self) -> (String, u16) {
        let address = self.0.address();
        (address.ip().to_string(), address.port())
    }

    fn close(&self, py: Python<'_>) {
        py.detach(|| self.0.close());
    }
}

/// A peer asks to connect.
#[pyclass(frozen, module = "kbtp._native")]
pub(crate) struct ConnectRequest(kbtp_rnic::request::ConnectRequest);

impl ConnectRequest {
    pub(crate) fn new(request: kbtp_rnic::request::ConnectRequest) -> Self {
        Self(request)
    }
}

#[pymethods]
impl ConnectRequest {
    #[getter]
    fn private_data<'py>(&self, py: Python<'py>) -> Bound<'py, PyBytes> {
        PyBytes::new(py, self.0.private_data())
    }

    #[getter]
    fn remote_address(&self) -> &str {
        self.0.remote_address()
    }

    #[getter]
    fn peer_ird(&self) -> u32 {
        self.0.peer_ird()
    }

    #[getter]
    fn peer_ord(&self) -> u32 {
        self.0.peer_ord()
    }

    fn accept(
        &self,
        py: Python<'_>,
        pd: &Bound<'_, Pd>,
        private_data: &[u8],
        ird: u32,
        ord_: u32,
        receives: Vec<Receive<'_>>,
    ) -> PyResult<Stream> {
        let (pd, receives) = (&pd.get().0, recvs(receives));
        py.detach(|| self.0.accept(pd, private_data, ird, ord_, &receives))
            .map(Stream)
            .map_err(|error| raised(py, error))
    }

    fn reject(&self, py: Python<'_>, private_data: &[u8]) -> PyResult<()> {
        py.detach(|| self.0.reject(private_data))
            .map_err(|error| raised(py, error))
    }
}
