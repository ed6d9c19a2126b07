//! Errors of the RNIC as the exceptions of `kbtp.errors`. This is the one place that maps them.

use std::io;

use kbtp_proto::types::{PeerMisbehaved, TerminateCause, TerminateInfo};
use kbtp_rnic::error::{EndReason, Error};
use pyo3::exceptions::PyOSError;
use pyo3::prelude::*;
use pyo3::types::PyBytes;

/// The exception to raise for `error`.
pub(crate) fn raised(py: Python<'_>, error: Error) -> PyErr {
    let exception = match error {
        Error::ApiMisuse(message) => of_class(py, "ApiMisuse", (message,)),
        Error::ConnectionLost { message, terminate } => connection_lost(py, message, terminate.as_ref()),
        Error::Io(error) => return os_error(py, &error),
        Error::PeerMisbehaved(error) => peer_misbehaved(py, error),
    };
    exception.map_or_else(|failure| failure, PyErr::from_value)
}

/// The exception that says why a stream ended.
pub(crate) fn reason(py: Python<'_>, reason: EndReason) -> PyResult<Bound<'_, PyAny>> {
    match reason {
        EndReason::ConnectionLost { message, terminate } => connection_lost(py, message, terminate.as_ref()),
        EndReason::DeadlineExceeded(message) => of_class(py, "DeadlineExceeded", (message,)),
        EndReason::PeerIncompatible(message) => of_class(py, "PeerIncompatible", (message,)),
        EndReason::PeerMisbehaved(error) => peer_misbehaved(py, error),
    }
}

/// `kbtp.types.TerminateInfo`.
pub(crate) fn terminate_info<'py>(py: Python<'py>, info: &TerminateInfo) -> PyResult<Bound<'py, PyAny>> {
    let ddp_header = PyBytes::new(py, &info.ddp_header);
    let rdmap_header = PyBytes::new(py, &info.rdmap_header);
    let fields = (
        info.layer,
        info.etype,
        info.code,
        info.ddp_segment_length,
        ddp_header,
        rdmap_header,
    );
    py.import("kbtp.types")?.getattr("TerminateInfo")?.call1(fields)
}

/// `kbtp.types.TerminateCause`.
pub(crate) fn cause(py: Python<'_>, cause: TerminateCause) -> PyResult<Bound<'_, PyAny>> {
    py.import("kbtp.types")?
        .getattr("TerminateCause")?
        .call1((cause.value(),))
}

fn peer_misbehaved(py: Python<'_>, error: PeerMisbehaved) -> PyResult<Bound<'_, PyAny>> {
    of_class(py, "PeerMisbehaved", (cause(py, error.cause)?, error.message))
}

fn connection_lost<'py>(
    py: Python<'py>,
    message: String,
    terminate: Option<&TerminateInfo>,
) -> PyResult<Bound<'py, PyAny>> {
    let terminate = terminate.map(|info| terminate_info(py, info)).transpose()?;
    of_class(py, "ConnectionLost", (message, terminate))
}

fn of_class<'py>(
    py: Python<'py>,
    name: &str,
    arguments: impl pyo3::call::PyCallArgs<'py>,
) -> PyResult<Bound<'py, PyAny>> {
    py.import("kbtp.errors")?.getattr(name)?.call1(arguments)
}

/// With its number, so that Python makes the subclass of it that belongs to that.
fn os_error(py: Python<'_>, error: &io::Error) -> PyErr {
    let Some(number) = error.raw_os_error() else {
        return PyOSError::new_err(error.to_string());
    };
    match py.import("os").and_then(|os| os.call_method1("strerror", (number,))) {
        Ok(text) => PyOSError::new_err((number, text.unbind())),
        Err(failure) => failure,
    }
}
