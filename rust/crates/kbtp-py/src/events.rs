//! Events of a channel as tuples; `_native.pyi` says what stands where.

use kbtp_proto::blocks::FreeToken;
use kbtp_rnic::api::{Event, WcOpcode, WcStatus, WorkCompletion};
use pyo3::prelude::*;
use pyo3::types::PyBytes;

use crate::blocks::entry_tuple;
use crate::channel::ConnectRequest;
use crate::errors;

const COMPLETION: u8 = 0;
const CONNECT_REQUEST: u8 = 1;
const ESTABLISHED: u8 = 2;
const REJECTED: u8 = 3;
const STREAM_ENDED: u8 = 4;
const FREED: u8 = 5;
const BATCH_DONE: u8 = 6;

pub(crate) fn tuple(py: Python<'_>, event: Event) -> PyResult<Bound<'_, PyAny>> {
    let made = match event {
        Event::Completion(done) => completion(py, done)?,
        Event::ConnectRequest(request) => (CONNECT_REQUEST, ConnectRequest::new(request))
            .into_pyobject(py)?
            .into_any(),
        Event::Established { stream, private_data } => (ESTABLISHED, stream.0, PyBytes::new(py, &private_data))
            .into_pyobject(py)?
            .into_any(),
        Event::Rejected { stream, private_data } => (REJECTED, stream.0, PyBytes::new(py, &private_data))
            .into_pyobject(py)?
            .into_any(),
        Event::Freed { store, finished } => {
            let number = match finished.token {
                FreeToken::Python(number) => Some(number),
                FreeToken::Stream { .. } => None,
            };
            (FREED, store, number, finished.holder, entry_tuple(finished.entry))
                .into_pyobject(py)?
                .into_any()
        }
        Event::BatchDone { stream, batch } => (BATCH_DONE, stream.0, batch).into_pyobject(py)?.into_any(),
        Event::StreamEnded {
            stream,
            reason,
            terminate,
            cause,
        } => {
            let reason = reason.map(|why| errors::reason(py, why)).transpose()?;
            let terminate = terminate.map(|info| errors::terminate_info(py, &info)).transpose()?;
            let cause = cause.map(|sent| errors::cause(py, sent)).transpose()?;
            (STREAM_ENDED, stream.0, reason, terminate, cause)
                .into_pyobject(py)?
                .into_any()
        }
    };
    Ok(made)
}

fn completion(py: Python<'_>, done: WorkCompletion) -> PyResult<Bound<'_, PyAny>> {
    let immediate = PyBytes::new(py, done.immediate.as_ref().map_or(&[], |octets| octets.as_slice()));
    let fields = (
        COMPLETION,
        done.stream.0,
        done.wr_id,
        opcode(done.opcode),
        done.status == WcStatus::Flushed,
        done.length,
        done.value,
        done.invalidated_stag,
        immediate,
        done.solicited,
    );
    Ok(fields.into_pyobject(py)?.into_any())
}

/// The values of `kbtp.verbs.api.WcOpcode`.
fn opcode(opcode: WcOpcode) -> u8 {
    match opcode {
        WcOpcode::Send => 1,
        WcOpcode::RdmaWrite => 2,
        WcOpcode::RdmaRead => 3,
        WcOpcode::Atomic => 4,
        WcOpcode::Immediate => 5,
        WcOpcode::Recv => 6,
        WcOpcode::RecvImmediate => 7,
    }
}
