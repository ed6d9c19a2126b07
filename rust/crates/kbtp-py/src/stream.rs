//! A stream, and the work requests that are posted to it.

use kbtp_proto::blocks::HandleRange;
use kbtp_proto::target::BindingTerms;
use kbtp_proto::types::TerminateCause;
use kbtp_rnic::api::{Recv, Sge, WorkRequest};
use kbtp_rnic::offload::Grant;
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use pyo3::types::PyTuple;

use crate::blocks::BlockStore;
use crate::channel::duration;
use crate::device::Region;
use crate::errors::raised;

const SEND: u8 = 0;
const RDMA_WRITE: u8 = 1;
const RDMA_READ: u8 = 2;
const FETCH_ADD: u8 = 3;
const COMPARE_SWAP: u8 = 4;
const IMMEDIATE: u8 = 5;
const WRITE_IMMEDIATE: u8 = 6;

/// A region, an offset and a length in it.
pub(crate) type Piece<'py> = (Bound<'py, Region>, u64, u64);

/// `wr_id` and the buffer of a receive.
pub(crate) type Receive<'py> = (u64, Piece<'py>);

/// One RDMAP stream.
#[pyclass(frozen, module = "kbtp._native")]
pub(crate) struct Stream(pub(crate) kbtp_rnic::stream::Stream);

#[pymethods]
impl Stream {
    #[getter]
    fn id(&self) -> u64 {
        self.0.id().0
    }

    #[getter]
    fn remote_address(&self) -> &str {
        self.0.remote_address()
    }

    #[getter]
    fn state(&self, py: Python<'_>) -> &'static str {
        py.detach(|| self.0.state_name())
    }

    #[getter]
    fn ird(&self, py: Python<'_>) -> u32 {
        py.detach(|| self.0.ird())
    }

    #[getter]
    fn ord_(&self, py: Python<'_>) -> u32 {
        py.detach(|| self.0.ord())
    }

    fn post(&self, py: Python<'_>, requests: Vec<Bound<'_, PyTuple>>) -> PyResult<()> {
        let requests = requests.iter().map(work_request).collect::<PyResult<Vec<_>>>()?;
        py.detach(|| self.0.post(requests)).map_err(|error| raised(py, error))
    }

    fn post_recv(&self, py: Python<'_>, receives: Vec<Receive<'_>>) -> PyResult<()> {
        let receives = recvs(receives);
        py.detach(|| self.0.post_recv(&receives))
            .map_err(|error| raised(py, error))
    }

    #[getter]
    fn outstanding(&self, py: Python<'_>) -> usize {
        py.detach(|| self.0.outstanding())
    }

    #[allow(clippy::too_many_arguments, reason = "all by keyword")]
    #[pyo3(signature = (store, *, holder, domain, first_handle, handle_count, direct_alloc, records,
        invalidates, head_of_device, request_credits, max_message_bytes, receives, read_depth, drain_s))]
    fn offload(
        &self,
        py: Python<'_>,
        store: &Bound<'_, BlockStore>,
        holder: u64,
        domain: u64,
        first_handle: u64,
        handle_count: u64,
        direct_alloc: bool,
        records: bool,
        invalidates: bool,
        head_of_device: bool,
        request_credits: u32,
        max_message_bytes: u32,
        receives: &Bound<'_, Region>,
        read_depth: u32,
        drain_s: f64,
    ) -> PyResult<()> {
        let grant = Grant {
            blocks: store.get().0.clone(),
            holder,
            domain,
            handles: HandleRange {
                first: first_handle,
                count: handle_count,
            },
            direct_alloc,
            binding: BindingTerms {
                records,
                invalidates,
                head_of_device,
            },
            request_credits,
            max_message_bytes,
            receives: receives.get().rnic_region().clone(),
            read_depth,
            drain: duration(drain_s),
        };
        py.detach(|| self.0.offload(&grant)).map_err(|error| raised(py, error))
    }

    fn bind_tickets(&self, py: Python<'_>) -> Vec<u32> {
        py.detach(|| self.0.bind_tickets())
    }

    fn resolved(&self, py: Python<'_>, handle: u64) {
        py.detach(|| self.0.resolved(handle));
    }

    fn terminate(&self, py: Python<'_>, layer: u8, etype: u8, code: u8) -> PyResult<()> {
        let cause = TerminateCause::from_value((layer, etype, code))
            .ok_or_else(|| PyValueError::new_err("no Terminate cause has this layer, error type and code"))?;
        py.detach(|| self.0.terminate(cause));
        Ok(())
    }

    fn disconnect(&self, py: Python<'_>) {
        py.detach(|| self.0.disconnect());
    }

    fn abort(&self, py: Python<'_>) {
        py.detach(|| self.0.abort());
    }
}

pub(crate) fn recvs(receives: Vec<Receive<'_>>) -> Vec<Recv> {
    receives
        .into_iter()
        .map(|(wr_id, piece)| Recv { wr_id, sge: sge(piece) })
        .collect()
}

fn sge((region, offset, length): Piece<'_>) -> Sge {
    Sge {
        region: region.get().rnic_region().clone(),
        offset,
        length,
    }
}

fn sges(pieces: Vec<Piece<'_>>) -> Vec<Sge> {
    pieces.into_iter().map(sge).collect()
}

/// The request that `tuple` stands for; `_native.pyi` says what stands where in it.
fn work_request(tuple: &Bound<'_, PyTuple>) -> PyResult<WorkRequest> {
    match tuple.get_item(0)?.extract::<u8>()? {
        SEND => {
            let (_, wr_id, inline, pieces, invalidate_stag, solicited) =
                tuple.extract::<(u8, u64, Vec<u8>, Vec<Piece<'_>>, Option<u32>, bool)>()?;
            Ok(WorkRequest::Send {
                wr_id,
                inline,
                sges: sges(pieces),
                invalidate_stag,
                solicited,
            })
        }
        RDMA_WRITE => {
            let (_, wr_id, pieces, remote_stag, remote_to) = tuple.extract::<(u8, u64, Vec<Piece<'_>>, u32, u64)>()?;
            Ok(WorkRequest::Write {
                wr_id,
                sges: sges(pieces),
                remote_stag,
                remote_to,
            })
        }
        RDMA_READ => {
            let (_, wr_id, sink, remote_stag, remote_to) = tuple.extract::<(u8, u64, Piece<'_>, u32, u64)>()?;
            Ok(WorkRequest::Read {
                wr_id,
                sink: sge(sink),
                remote_stag,
                remote_to,
            })
        }
        FETCH_ADD => {
            let (_, wr_id, remote_stag, remote_to, add_data, add_mask) =
                tuple.extract::<(u8, u64, u32, u64, u64, u64)>()?;
            Ok(WorkRequest::FetchAdd {
                wr_id,
                remote_stag,
                remote_to,
                add_data,
                add_mask,
            })
        }
        COMPARE_SWAP => {
            let (_, wr_id, remote_stag, remote_to, swap_data, swap_mask, compare_data, compare_mask) =
                tuple.extract::<(u8, u64, u32, u64, u64, u64, u64, u64)>()?;
            Ok(WorkRequest::CompareSwap {
                wr_id,
                remote_stag,
                remote_to,
                swap_data,
                swap_mask,
                compare_data,
                compare_mask,
            })
        }
        IMMEDIATE => {
            let (_, wr_id, data, solicited) = tuple.extract::<(u8, u64, [u8; 8], bool)>()?;
            Ok(WorkRequest::Immediate { wr_id, data, solicited })
        }
        WRITE_IMMEDIATE => {
            let (_, wr_id, inline, remote_stag, remote_to, immediate) =
                tuple.extract::<(u8, u64, Vec<u8>, u32, u64, u32)>()?;
            Ok(WorkRequest::WriteImmediate {
                wr_id,
                inline,
                remote_stag,
                remote_to,
                immediate,
            })
        }
        other => Err(PyValueError::new_err(format!("no work request has the number {other}"))),
    }
}
