//! A stream that carries an initiator's requests.
//!
//! Plain requests are taken apart here: a block that is a number or a `BlockRef`, a buffer that has the buffer protocol.
//! Of anything else Python is asked what it means, which brings an `Octets` or says what is wrong.
//!
//! A batch leaves in parts, the first of them small: while the target works on that, the next is taken apart. Only the
//! parts' I/O is done without the GIL, since what is taken apart are Python's objects.

use std::time::Instant;

use kbtp_proto::initiator::Terms;
use kbtp_proto::types::{Generation, Handle, RequestFlag, Status};
use kbtp_proto::wire::Operation as Kind;
use kbtp_rnic::initiator::{Asked, How, Memory, Outcome, RequestGrant};
use kbtp_rnic::requester::Waited;
use pyo3::exceptions::PyValueError;
use pyo3::intern;
use pyo3::prelude::*;
use pyo3::sync::PyOnceLock;
use pyo3::types::{PyBytes, PyInt, PySequence, PyTuple, PyType};

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

/// Requests in the first part of a batch, and how much more each further one has.
const FIRST_PART: usize = 4;
const PART_GROWTH: usize = 4;

/// What carries the requests of one session.
#[pyclass(frozen, module = "kbtp._native")]
pub(crate) struct Requester {
    requests: kbtp_rnic::requester::Requester,
    /// `(opcode, generation, block, buffer)` to a block and a buffer that are understood here; raises `ApiMisuse`.
    prepare: Py<PyAny>,
}

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
        max_message_bytes, prepare))]
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
        prepare: Py<PyAny>,
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
        let requests = py
            .detach(|| kbtp_rnic::requester::Requester::new(stream, &grant))
            .map_err(|error| raised(py, error))?;
        Ok(Self { requests, prepare })
    }

    fn add_region(&self, region: &Bound<'_, Region>, address: usize) {
        self.requests.add_region(region.get().rnic_region().clone(), address);
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
        let batch = Batch::new(how_of(opcode, flags, checksums)?, generation, blocks, buffers)?;
        self.submit_all(py, &batch, true)
    }

    /// Submit a batch and wait until it is done; `meanwhile` is called once all of it is submitted.
    #[pyo3(signature = (opcode, flags, generation, blocks, buffers, checksums, timeout_s, meanwhile = None, /))]
    #[allow(clippy::too_many_arguments, reason = "those of submit, and a time")]
    fn run<'py>(
        &self,
        py: Python<'py>,
        opcode: u8,
        flags: u16,
        generation: &Bound<'py, PyAny>,
        blocks: &Bound<'py, PyAny>,
        buffers: Option<&Bound<'py, PyAny>>,
        checksums: bool,
        timeout_s: f64,
        meanwhile: Option<&Bound<'py, PyAny>>,
    ) -> PyResult<Ran<Taken<'py>>> {
        let batch = Batch::new(how_of(opcode, flags, checksums)?, generation, blocks, buffers)?;
        let (number, outcomes) = self.submit_and_wait(py, &batch, timeout_s, meanwhile)?;
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
        buffer: &Bound<'_, PyAny>,
        timeout_s: f64,
    ) -> PyResult<Ran<(Record, Option<String>)>> {
        let batch = Batch::of_one(how_of(opcode, flags, false)?, generation, block, buffer)?;
        let (number, outcomes) = self.submit_and_wait(py, &batch, timeout_s, None)?;
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
        let outcomes = py.detach(|| self.requests.take(number))?;
        Some(taken(py, &outcomes))
    }
}

/// The requests of one call. Nobody changes its lists meanwhile.
struct Batch<'py> {
    how: How,
    generation: Bound<'py, PyAny>,
    /// None if it is no generation: Python says what is wrong with it.
    known_generation: Option<Generation>,
    blocks: Bound<'py, PyTuple>,
    buffers: Option<Bound<'py, PyTuple>>,
}

impl<'py> Batch<'py> {
    fn new(
        how: How,
        generation: &Bound<'py, PyAny>,
        blocks: &Bound<'py, PyAny>,
        buffers: Option<&Bound<'py, PyAny>>,
    ) -> PyResult<Self> {
        let blocks = as_tuple(blocks)?;
        let buffers = buffers.map(as_tuple).transpose()?;
        if let Some(buffers) = &buffers
            && buffers.len() != blocks.len()
        {
            let (few, many) = (buffers.len(), blocks.len());
            return Err(PyValueError::new_err(format!("{few} buffers for {many} blocks")));
        }
        Ok(Self {
            how,
            generation: generation.clone(),
            known_generation: number(generation),
            blocks,
            buffers,
        })
    }

    fn of_one(
        how: How,
        generation: &Bound<'py, PyAny>,
        block: &Bound<'py, PyAny>,
        buffer: &Bound<'py, PyAny>,
    ) -> PyResult<Self> {
        let py = block.py();
        Ok(Self {
            how,
            generation: generation.clone(),
            known_generation: number(generation),
            blocks: PyTuple::new(py, [block])?,
            buffers: Some(PyTuple::new(py, [buffer])?),
        })
    }
}

fn as_tuple<'py>(sequence: &Bound<'py, PyAny>) -> PyResult<Bound<'py, PyTuple>> {
    sequence.cast::<PySequence>()?.to_tuple()
}

impl Requester {
    /// Submit all of a batch; its number.
    fn submit_all(&self, py: Python<'_>, batch: &Batch<'_>, reported: bool) -> PyResult<u64> {
        let (count, how) = (batch.blocks.len(), batch.how);
        let part = self.part(batch, 0, FIRST_PART)?;
        let mut submitted = part.len();
        let number = py
            .detach(|| {
                let number = self.requests.open_batch(count, reported)?;
                self.requests.submit(how, number, 0, part);
                Ok(number)
            })
            .map_err(|error| raised(py, error))?;
        while submitted < count {
            let part = self.part(batch, submitted, submitted * PART_GROWTH);
            let part = part.inspect_err(|_| self.requests.lose(number, submitted, count - submitted))?;
            let first = submitted;
            submitted += part.len();
            py.detach(|| self.requests.submit(how, number, first, part));
        }
        Ok(number)
    }

    fn submit_and_wait(
        &self,
        py: Python<'_>,
        batch: &Batch<'_>,
        timeout_s: f64,
        meanwhile: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<(u64, Option<Vec<Outcome>>)> {
        let timeout = duration(timeout_s);
        let number = self.submit_all(py, batch, false)?;
        if let Some(meanwhile) = meanwhile {
            meanwhile.call0()?;
        }
        let begin = Instant::now(); // what is done meanwhile takes no time from the batch
        loop {
            let left = timeout.saturating_sub(begin.elapsed());
            let waited = py
                .detach(|| self.requests.wait(number, left.min(SIGNAL_CHECK)))
                .map_err(|error| raised(py, error))?;
            if waited == Waited::Done {
                return Ok((number, self.requests.take(number)));
            }
            py.check_signals()?;
            if begin.elapsed() >= timeout {
                return Ok((number, None));
            }
        }
    }

    /// The next requests of `batch`, at most `count`, of which the first is its `first`.
    fn part(&self, batch: &Batch<'_>, first: usize, count: usize) -> PyResult<Vec<Asked>> {
        let end = first.saturating_add(count).min(batch.blocks.len());
        let mut asked = Vec::with_capacity(end - first);
        for index in first..end {
            let block = batch.blocks.get_borrowed_item(index)?;
            let buffer = match &batch.buffers {
                Some(buffers) => Some(buffers.get_borrowed_item(index)?),
                None => None,
            };
            asked.push(self.one_asked(batch, &block, buffer.as_deref())?);
        }
        Ok(asked)
    }

    fn one_asked(
        &self,
        batch: &Batch<'_>,
        block: &Bound<'_, PyAny>,
        buffer: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<Asked> {
        let kind = batch.how.kind;
        if let Some(generation) = batch.known_generation
            && let Some(asked) = self.understood(kind, generation, block, buffer)?
        {
            return Ok(asked);
        }
        let py = block.py();
        let prepared = self
            .prepare
            .bind(py)
            .call1((kind.opcode() as u8, &batch.generation, block, buffer))
            .and_then(|prepared| {
                let (block, buffer) = prepared.extract::<(Bound<'_, PyAny>, Bound<'_, PyAny>)>()?;
                self.understood(kind, 0, &block, Some(&buffer))
            });
        let why = match prepared {
            Ok(Some(asked)) => return Ok(asked),
            Ok(None) => "neither a block nor a buffer is known that this could be".into(),
            Err(error) => misuse(py, error)?,
        };
        Ok(Asked {
            handle: None,
            generation: 0,
            memory: Err(why),
        })
    }

    /// None for what is not plain.
    fn understood(
        &self,
        kind: Kind,
        generation: Generation,
        block: &Bound<'_, PyAny>,
        buffer: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<Option<Asked>> {
        let Some((handle, of_block)) = named(kind, block)? else {
            return Ok(None);
        };
        let memory = match buffer {
            _ if kind == Kind::Free => Some(Memory::empty()),
            Some(buffer) => self.memory_of(kind, buffer)?,
            None => None,
        };
        Ok(memory.map(|memory| Asked {
            handle,
            generation: if generation == 0 { of_block } else { generation },
            memory: Ok(memory),
        }))
    }

    fn memory_of(&self, kind: Kind, buffer: &Bound<'_, PyAny>) -> PyResult<Option<Memory>> {
        let py = buffer.py();
        if let Ok(octets) = buffer.cast::<Octets>() {
            let Octets { extent, keepalive } = octets.get();
            if let Some(memory) = self.requests.registered(kind, extent.address, extent.length_bytes) {
                return Ok(Some(memory));
            }
            let keepalive = keepalive.clone_ref(py);
            // SAFETY: the one caller, NativeRequester, has the extent from `buffer_of`, whose view is the keepalive.
            let buffer = unsafe { vouched(*extent, keepalive) };
            return match buffer {
                Ok(buffer) => Ok(Some(Memory::unregistered(buffer))),
                Err(error) => Err(raised(py, error)),
            };
        }
        let Some(extent) = extent_of(buffer) else {
            return Ok(None);
        };
        if extent.length_bytes == 0 {
            return Ok(Some(Memory::empty()));
        }
        let registered = self.requests.registered(kind, extent.address, extent.length_bytes);
        Ok(registered.or_else(|| kept(buffer, extent).map(Memory::unregistered)))
    }
}

/// What `error` says if it is an `ApiMisuse`; else it is raised.
fn misuse(py: Python<'_>, error: PyErr) -> PyResult<String> {
    if error.is_instance(py, &py.import("kbtp.errors")?.getattr("ApiMisuse")?) {
        return Ok(error.value(py).to_string());
    }
    Err(error)
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

/// The handle, None if the session is to choose one, and the generation of a reference, 0 otherwise. None for what is
/// no block.
fn named(kind: Kind, block: &Bound<'_, PyAny>) -> PyResult<Option<(Option<Handle>, Generation)>> {
    static BLOCK_REF: PyOnceLock<Py<PyType>> = PyOnceLock::new();
    let py = block.py();
    if block.is_none() {
        return Ok((kind == Kind::AllocStore).then_some((None, 0)));
    }
    if let Some(handle) = number(block) {
        return Ok(Some((Some(handle), 0)));
    }
    if !block.is_instance(BLOCK_REF.import(py, "kbtp.types", "BlockRef")?)? {
        return Ok(None);
    }
    let handle = number(&block.getattr(intern!(py, "handle"))?);
    let generation = number(&block.getattr(intern!(py, "generation"))?);
    Ok(handle
        .zip(generation)
        .map(|(handle, generation)| (Some(handle), generation)))
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
