//! A stream that carries an initiator's requests.
//!
//! Plain requests are taken apart here: a block that is a number or a `BlockRef`, a buffer that has the buffer protocol.
//! What is anything else is `Unprepared`: Python then says what is wrong with it, or brings an `Octets`.

use std::time::{Duration, Instant};

use kbtp_proto::initiator::Terms;
use kbtp_proto::types::{Generation, Handle, RequestFlag, Status};
use kbtp_proto::wire::Operation as Kind;
use kbtp_rnic::initiator::{Asked, How, Memory, Outcome, RequestGrant};
use kbtp_rnic::requester::Waited;
use pyo3::exceptions::PyValueError;
use pyo3::intern;
use pyo3::prelude::*;
use pyo3::sync::PyOnceLock;
use pyo3::types::{PyBytes, PyInt, PyType};

use crate::channel::{SIGNAL_CHECK, duration};
use crate::device::Region;
use crate::errors::raised;
use crate::memory::{Extent, extent_of, kept, vouched};
use crate::stream::Stream;

/// Statuses of a record beyond those of the protocol.
const LOST: u16 = 0xFFFF;
const MISUSED: u16 = 0xFFFE;
const NO_HANDLE: u16 = 0xFFFD;

/// Octets of a record; `_native.pyi` says what stands where.
const RECORD_BYTES: usize = 32;

/// Instead of a CRC32c that is not known.
const NO_CRC: i64 = -1;

/// Octets that Python has found in an object.
#[pyclass(frozen, module = "kbtp._native")]
pub(crate) struct Octets {
    extent: Extent,
    keepalive: Py<PyAny>,
}

#[pymethods]
impl Octets {
    #[new]
    fn new(address: usize, length_bytes: usize, writable: bool, keepalive: Py<PyAny>) -> Self {
        let extent = Extent {
            address,
            length_bytes,
            writable,
        };
        Self { extent, keepalive }
    }
}

/// What carries the requests of one session.
#[pyclass(frozen, module = "kbtp._native")]
pub(crate) struct Requester(kbtp_rnic::requester::Requester);

/// The records of a batch, whether all of them are of success, and of each that could never work its place and why.
type Taken<'py> = (Bound<'py, PyBytes>, bool, Vec<(usize, String)>);

/// Status, generation, length, handle and offset of a record; its CRC32c stands by itself.
type Record = (u16, u16, u32, u64, u64);

/// What came of a batch, or its number if it is not done.
#[derive(IntoPyObject)]
enum Ran<T> {
    Done(T),
    NotDone(u64),
}

#[pymethods]
impl Requester {
    #[new]
    #[pyo3(signature = (stream, *, request_credits, first_handle, handle_count, invalidate, inline_max_bytes, receives,
        max_message_bytes))]
    #[allow(clippy::too_many_arguments, reason = "all by keyword")]
    fn new(
        py: Python<'_>,
        stream: &Bound<'_, Stream>,
        request_credits: u32,
        first_handle: u64,
        handle_count: u64,
        invalidate: bool,
        inline_max_bytes: usize,
        receives: &Bound<'_, Region>,
        max_message_bytes: u32,
    ) -> PyResult<Self> {
        let grant = RequestGrant {
            terms: Terms {
                request_credits,
                first_handle,
                handle_count,
                invalidate,
            },
            inline_max_bytes,
            receives: receives.get().rnic_region().clone(),
            max_message_bytes,
        };
        let stream = &stream.get().0;
        py.detach(|| kbtp_rnic::requester::Requester::new(stream, &grant))
            .map(Self)
            .map_err(|error| raised(py, error))
    }

    fn add_region(&self, region: &Bound<'_, Region>, address: usize) {
        self.0.add_region(region.get().rnic_region().clone(), address);
    }

    /// Submit a batch, of which an event says when it is done.
    #[allow(clippy::too_many_arguments, reason = "those of run, but for the time")]
    fn submit(
        &self,
        py: Python<'_>,
        opcode: u8,
        flags: u16,
        generation: &Bound<'_, PyAny>,
        blocks: &Bound<'_, PyAny>,
        buffers: Option<&Bound<'_, PyAny>>,
        checksums: bool,
    ) -> PyResult<u64> {
        let how = how_of(opcode, flags, checksums)?;
        let asked = self.all_asked(how.kind, generation, blocks, buffers)?;
        py.detach(|| self.0.submit(how, asked, true))
            .map_err(|error| raised(py, error))
    }

    /// Submit a batch and wait until it is done.
    #[allow(clippy::too_many_arguments, reason = "those of submit, and a time")]
    fn run<'py>(
        &self,
        py: Python<'py>,
        opcode: u8,
        flags: u16,
        generation: &Bound<'_, PyAny>,
        blocks: &Bound<'py, PyAny>,
        buffers: Option<&Bound<'py, PyAny>>,
        checksums: bool,
        timeout_s: f64,
    ) -> PyResult<Ran<Taken<'py>>> {
        let how = how_of(opcode, flags, checksums)?;
        let asked = self.all_asked(how.kind, generation, blocks, buffers)?;
        let (number, outcomes) = self.submit_and_wait(py, how, asked, timeout_s)?;
        Ok(match outcomes {
            Some(outcomes) => Ran::Done(taken(py, &outcomes)),
            None => Ran::NotDone(number),
        })
    }

    /// As `run`, for one request: its record, and why if it could never work.
    #[allow(clippy::too_many_arguments, reason = "those of run")]
    fn run_one(
        &self,
        py: Python<'_>,
        opcode: u8,
        flags: u16,
        generation: &Bound<'_, PyAny>,
        block: &Bound<'_, PyAny>,
        buffer: Option<&Bound<'_, PyAny>>,
        timeout_s: f64,
    ) -> PyResult<Ran<(Record, Option<String>)>> {
        let how = how_of(opcode, flags, false)?;
        let generation = number(generation).ok_or_else(|| unprepared(py))?;
        let asked = vec![self.one_asked(how.kind, generation, block, buffer)?];
        let (number, outcomes) = self.submit_and_wait(py, how, asked, timeout_s)?;
        let Some(outcome) = outcomes.and_then(|outcomes| outcomes.into_iter().next()) else {
            return Ok(Ran::NotDone(number));
        };
        let record = record_of(&outcome);
        let why = match outcome {
            Outcome::Misused(why) => Some(why),
            _ => None,
        };
        Ok(Ran::Done((record, why)))
    }

    /// None if the batch is not done.
    fn take<'py>(&self, py: Python<'py>, number: u64) -> Option<Taken<'py>> {
        let outcomes = py.detach(|| self.0.take(number))?;
        Some(taken(py, &outcomes))
    }
}

impl Requester {
    fn submit_and_wait(
        &self,
        py: Python<'_>,
        how: How,
        asked: Vec<Asked>,
        timeout_s: f64,
    ) -> PyResult<(u64, Option<Vec<Outcome>>)> {
        let timeout = duration(timeout_s);
        let first = timeout.min(SIGNAL_CHECK);
        let begin = Instant::now();
        let (number, mut waited) = py
            .detach(|| {
                let number = self.0.submit(how, asked, false)?;
                Ok((number, self.0.wait(number, first)?))
            })
            .map_err(|error| raised(py, error))?;
        while waited != Waited::Done {
            py.check_signals()?;
            let left = timeout.saturating_sub(begin.elapsed());
            if left == Duration::ZERO {
                return Ok((number, None));
            }
            waited = py
                .detach(|| self.0.wait(number, left.min(SIGNAL_CHECK)))
                .map_err(|error| raised(py, error))?;
        }
        Ok((number, self.0.take(number)))
    }

    fn all_asked(
        &self,
        kind: Kind,
        generation: &Bound<'_, PyAny>,
        blocks: &Bound<'_, PyAny>,
        buffers: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<Vec<Asked>> {
        let generation = number(generation).ok_or_else(|| unprepared(blocks.py()))?;
        let mut buffers = buffers.map(|buffers| buffers.try_iter()).transpose()?;
        let mut asked = Vec::with_capacity(blocks.len()?);
        for block in blocks.try_iter()? {
            let buffer = buffers.as_mut().and_then(Iterator::next).transpose()?;
            asked.push(self.one_asked(kind, generation, &block?, buffer.as_ref())?);
        }
        Ok(asked)
    }

    fn one_asked(
        &self,
        kind: Kind,
        generation: Generation,
        block: &Bound<'_, PyAny>,
        buffer: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<Asked> {
        let (handle, of_block) = named(kind, block)?;
        let memory = match buffer {
            _ if kind == Kind::Free => Memory::empty(),
            Some(buffer) => self.memory_of(kind, buffer)?,
            None => return Err(unprepared(block.py())),
        };
        Ok(Asked {
            handle,
            generation: if generation == 0 { of_block } else { generation },
            memory,
        })
    }

    fn memory_of(&self, kind: Kind, buffer: &Bound<'_, PyAny>) -> PyResult<Memory> {
        if let Ok(octets) = buffer.cast::<Octets>() {
            let Octets { extent, keepalive } = octets.get();
            if let Some(memory) = self.0.registered(kind, extent.address, extent.length_bytes) {
                return Ok(memory);
            }
            let keepalive = keepalive.clone_ref(buffer.py());
            // SAFETY: the one caller, NativeRequester, has the extent from `buffer_of`, whose view is the keepalive.
            let buffer = unsafe { vouched(*extent, keepalive) };
            return buffer
                .map(Memory::unregistered)
                .map_err(|error| raised(octets.py(), error));
        }
        let py = buffer.py();
        let extent = extent_of(buffer).ok_or_else(|| unprepared(py))?;
        if extent.length_bytes == 0 {
            return Ok(Memory::empty());
        }
        match self.0.registered(kind, extent.address, extent.length_bytes) {
            Some(memory) => Ok(memory),
            None => kept(buffer, extent)
                .map(Memory::unregistered)
                .ok_or_else(|| unprepared(py)),
        }
    }
}

/// `kbtp.verbs.requester.Unprepared`.
fn unprepared(py: Python<'_>) -> PyErr {
    let class = py
        .import("kbtp.verbs.requester")
        .and_then(|module| module.getattr("Unprepared"));
    match class.and_then(|class| class.call0()) {
        Ok(exception) => PyErr::from_value(exception),
        Err(failure) => failure,
    }
}

fn how_of(opcode: u8, flags: u16, checksums: bool) -> PyResult<How> {
    let kind = Kind::of_opcode(opcode)
        .ok_or_else(|| PyValueError::new_err(format!("no operation has the opcode {opcode}")))?;
    Ok(How {
        kind,
        flags: RequestFlag::from_bits_retain(flags),
        checksums,
    })
}

/// The handle, None if the session is to choose one, and the generation of a reference, 0 otherwise.
fn named(kind: Kind, block: &Bound<'_, PyAny>) -> PyResult<(Option<Handle>, Generation)> {
    static BLOCK_REF: PyOnceLock<Py<PyType>> = PyOnceLock::new();
    let py = block.py();
    if block.is_none() && kind == Kind::AllocStore {
        return Ok((None, 0));
    }
    if let Some(handle) = number(block) {
        return Ok((Some(handle), 0));
    }
    let class = BLOCK_REF.import(py, "kbtp.types", "BlockRef")?;
    if !block.is_instance(class)? {
        return Err(unprepared(py));
    }
    let handle = number(&block.getattr(intern!(py, "handle"))?).ok_or_else(|| unprepared(py))?;
    let generation = number(&block.getattr(intern!(py, "generation"))?).ok_or_else(|| unprepared(py))?;
    Ok((Some(handle), generation))
}

/// None for what is no integer, or does not fit.
fn number<'py, N: FromPyObjectOwned<'py>>(value: &Bound<'py, PyAny>) -> Option<N> {
    if value.is_instance_of::<PyInt>() {
        value.extract().ok()
    } else {
        None
    }
}

fn record_of(outcome: &Outcome) -> Record {
    match outcome {
        Outcome::Answered(answer, _) => (
            answer.status as u16,
            answer.generation,
            answer.data_length,
            answer.handle,
            answer.block_offset,
        ),
        Outcome::NoHandle => (NO_HANDLE, 0, 0, 0, 0),
        Outcome::Misused(_) => (MISUSED, 0, 0, 0, 0),
        Outcome::Lost => (LOST, 0, 0, 0, 0),
    }
}

fn taken<'py>(py: Python<'py>, outcomes: &[Outcome]) -> Taken<'py> {
    let mut records = Vec::with_capacity(outcomes.len() * RECORD_BYTES);
    let mut ok = true;
    let mut misuses = Vec::new();
    for (index, outcome) in outcomes.iter().enumerate() {
        let (status, generation, length, handle, offset) = record_of(outcome);
        let crc = match outcome {
            Outcome::Answered(_, crc) => crc.map_or(NO_CRC, i64::from),
            _ => NO_CRC,
        };
        ok &= status == Status::Success as u16;
        records.extend_from_slice(&status.to_ne_bytes());
        records.extend_from_slice(&generation.to_ne_bytes());
        records.extend_from_slice(&length.to_ne_bytes());
        records.extend_from_slice(&handle.to_ne_bytes());
        records.extend_from_slice(&offset.to_ne_bytes());
        records.extend_from_slice(&crc.to_ne_bytes());
        if let Outcome::Misused(why) = outcome {
            misuses.push((index, why.clone()));
        }
    }
    (PyBytes::new(py, &records), ok, misuses)
}
