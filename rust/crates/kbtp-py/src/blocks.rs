//! The block structures that the RNIC executes sequences on, for the target's sessions in Python.
//!
//! `kbtp.rnic.native_store` makes of this what `kbtp.blocks.BlockStore` is: holders, owners and domains are numbers here.

use std::time::Instant;

use kbtp_proto::blocks::{
    Allocation, Binding, BlockStore as ProtoStore, Entry, FreeToken, Freeing, HandleRange, Partition, PartitionBlocks,
    Pin, StoreConfig,
};
use kbtp_proto::types::{ApiMisuse, Status};
use kbtp_rnic::blocks::SharedBlocks;
use kbtp_rnic::error::Error;
use kbtp_rnic::memory::Buffer;
use pyo3::prelude::*;

use crate::device::Region;
use crate::errors::raised;
use crate::memory::{extent_of, kept};

/// flags, generation, data length, block offset
pub(crate) type EntryTuple = (u16, u16, u32, u64);

/// number, block offset, data length, generation, owner
type PinTuple = (u64, u64, u32, u16, u64);

pub(crate) fn entry_tuple(entry: Entry) -> EntryTuple {
    let Entry {
        flags,
        generation,
        data_length,
        block_offset,
    } = entry;
    (flags.bits(), generation, data_length, block_offset)
}

fn pin_tuple(pin: &Pin) -> PinTuple {
    let &Pin {
        number,
        block_offset,
        data_length,
        generation,
        owner,
    } = pin;
    (number, block_offset, data_length, generation, owner)
}

/// The octets of a structure, in an object of Python's that lets peers be shown them.
fn words(object: &Bound<'_, PyAny>, name: &str) -> PyResult<Buffer> {
    let buffer = extent_of(object).and_then(|extent| kept(object, extent));
    buffer.ok_or_else(|| {
        let wrong = format!("{name}: a buffer of words expected");
        raised(object.py(), Error::ApiMisuse(wrong))
    })
}

/// The one owner of table, ring and quotas.
#[pyclass(frozen, module = "kbtp._native")]
pub(crate) struct BlockStore(pub(crate) SharedBlocks);

impl BlockStore {
    fn with<T: Send>(
        &self,
        py: Python<'_>,
        act: impl FnOnce(&mut ProtoStore) -> Result<T, ApiMisuse> + Send,
    ) -> PyResult<T> {
        py.detach(|| self.0.with(act))
            .map_err(|error| raised(py, Error::from(error)))
    }

    fn partition<T: Send>(
        &self,
        py: Python<'_>,
        holder: u64,
        act: impl FnOnce(&mut Partition) -> Result<T, Error> + Send,
    ) -> PyResult<T> {
        let found = |store: &mut ProtoStore| match store.partition(holder) {
            Some(partition) => act(partition),
            None => Err(Error::ApiMisuse(format!("holder {holder} has no partition"))),
        };
        py.detach(|| self.0.with(found)).map_err(|error| raised(py, error))
    }

    fn look<T: Send>(&self, py: Python<'_>, look: impl FnOnce(&ProtoStore) -> T + Send) -> T {
        py.detach(|| self.0.with(|store| look(store)))
    }
}

#[pymethods]
impl BlockStore {
    #[new]
    #[pyo3(signature = (pool, table, *, block_size_bytes, block_count, pool_base, table_base_handle, table_handles,
        ring_order, first_ticket, direct_blocks, masked_counters, clear_on_free))]
    #[allow(clippy::too_many_arguments, reason = "all by keyword")]
    fn new(
        py: Python<'_>,
        pool: &Bound<'_, Region>,
        table: &Bound<'_, PyAny>,
        block_size_bytes: u32,
        block_count: u32,
        pool_base: u64,
        table_base_handle: u64,
        table_handles: u64,
        ring_order: u32,
        first_ticket: u32,
        direct_blocks: u32,
        masked_counters: bool,
        clear_on_free: bool,
    ) -> PyResult<Self> {
        let config = StoreConfig {
            block_size_bytes,
            block_count,
            pool_base,
            table_base_handle,
            table_handles,
            ring_order,
            first_ticket,
            direct_blocks,
            masked_counters,
        };
        let table = words(table, "block table")?;
        let pool = pool.get().rnic_region();
        let blocks = py
            .detach(|| SharedBlocks::create(pool, table, &config, clear_on_free))
            .map_err(|error| raised(py, error))?;
        kbtp_rnic::offload::connect(&blocks);
        Ok(Self(blocks))
    }

    #[getter]
    fn number(&self) -> u64 {
        self.0.number()
    }

    fn read(&self, py: Python<'_>, handle: u64) -> PyResult<EntryTuple> {
        self.with(py, |store| store.read(handle)).map(entry_tuple)
    }

    #[getter]
    fn free_blocks(&self, py: Python<'_>) -> u32 {
        self.look(py, ProtoStore::free_blocks)
    }

    fn bound_handles(&self, py: Python<'_>, first: u64, count: u64) -> PyResult<Vec<u64>> {
        self.with(py, |store| store.bound_handles(HandleRange { first, count }))
    }

    fn bound_count(&self, py: Python<'_>, first: u64, count: u64) -> PyResult<u64> {
        self.with(py, |store| store.bound_count(HandleRange { first, count }))
    }

    fn assign_range(&self, py: Python<'_>, first: u64, count: u64, domain: u64) -> PyResult<()> {
        self.with(py, |store| store.assign_range(HandleRange { first, count }, domain))
    }

    fn release_range(&self, py: Python<'_>, first: u64, count: u64) -> PyResult<()> {
        self.with(py, |store| store.release_range(HandleRange { first, count }))
    }

    fn domain_of(&self, py: Python<'_>, handle: u64) -> Option<u64> {
        self.look(py, |store| store.domain_of(handle))
    }

    fn begin_load(&self, py: Python<'_>, handle: u64, owner: u64) -> PyResult<PinTuple> {
        self.with(py, |store| store.begin_load(handle, owner))
            .map(|pin| pin_tuple(&pin))
    }

    fn end_load(&self, py: Python<'_>, pin: PinTuple) -> PyResult<Option<(u64, EntryTuple)>> {
        let (number, block_offset, data_length, generation, owner) = pin;
        let pin = Pin {
            number,
            block_offset,
            data_length,
            generation,
            owner,
        };
        let finished = self.with(py, |store| store.end_load(&pin))?;
        let of_python = py.detach(|| finished.and_then(|finished| self.0.route(finished)));
        Ok(of_python.map(|(number, entry)| (number, entry_tuple(entry))))
    }

    fn begin_alloc_store(&self, py: Python<'_>, handle: u64, holder: u64) -> PyResult<(Option<u64>, u16)> {
        let allocation = self.with(py, |store| store.begin_alloc_store(handle, holder))?;
        Ok(match allocation {
            Allocation::Block(block_offset) => (Some(block_offset), Status::Success as u16),
            Allocation::Refused(status) => (None, status as u16),
        })
    }

    fn commit_alloc_store(
        &self,
        py: Python<'_>,
        handle: u64,
        block_offset: u64,
        data_length: u32,
        seal: bool,
    ) -> PyResult<EntryTuple> {
        self.with(py, |store| {
            store.commit_alloc_store(handle, block_offset, data_length, seal)
        })
        .map(entry_tuple)
    }

    fn abort_alloc_store(&self, py: Python<'_>, handle: u64, block_offset: u64, holder: u64) -> PyResult<()> {
        self.with(py, |store| store.abort_alloc_store(handle, block_offset, holder))
    }

    // --- partitions (draft 6.6) ---

    fn open_partition(
        &self,
        py: Python<'_>,
        holder: u64,
        first: u32,
        count: u32,
        slots: &Bound<'_, PyAny>,
        head: &Bound<'_, PyAny>,
    ) -> PyResult<()> {
        let (slots, head) = (words(slots, "ring slots")?, words(head, "Head")?);
        py.detach(|| {
            let blocks = PartitionBlocks { first, count };
            self.0.open_partition(holder, blocks, slots, head)
        })
        .map_err(|error| raised(py, error))
    }

    fn close_partition(&self, py: Python<'_>, holder: u64) -> PyResult<()> {
        py.detach(|| self.0.close_partition(holder))
            .map_err(|error| raised(py, error))
    }

    fn partition_free_count(&self, py: Python<'_>, holder: u64) -> PyResult<u32> {
        self.partition(py, holder, |partition| Ok(partition.free_count()))
    }

    fn audit_head(&self, py: Python<'_>, holder: u64) -> PyResult<u32> {
        self.partition(py, holder, |partition| Ok(partition.audit_head()?))
    }

    fn restore_head(&self, py: Python<'_>, holder: u64) -> PyResult<()> {
        self.partition(py, holder, |partition| {
            partition.restore_head();
            Ok(())
        })
    }

    fn outstanding_tickets(&self, py: Python<'_>, holder: u64) -> PyResult<Vec<u32>> {
        self.partition(py, holder, |partition| Ok(partition.outstanding_tickets()?))
    }

    fn read_slot(&self, py: Python<'_>, holder: u64, ticket: u32) -> PyResult<Option<u64>> {
        self.partition(py, holder, |partition| Ok(partition.read_slot(ticket)))
    }

    #[allow(clippy::too_many_arguments, reason = "those of kbtp.blocks.BlockStore")]
    fn bind_ticket(
        &self,
        py: Python<'_>,
        handle: u64,
        holder: u64,
        ticket: u32,
        block_offset: u64,
        data_length: u32,
        seal: bool,
    ) -> PyResult<(Option<EntryTuple>, u16)> {
        let bind = |store: &mut ProtoStore| store.bind_ticket(handle, holder, ticket, block_offset, data_length, seal);
        let binding = py
            .detach(|| self.0.with(bind))
            .map_err(|error| raised(py, error.into()))?;
        Ok(match binding {
            Binding::Bound(entry) => (Some(entry_tuple(entry)), Status::Success as u16),
            Binding::Refused(status) => (None, status as u16),
        })
    }

    fn reclaim_ticket(&self, py: Python<'_>, holder: u64, ticket: u32) -> PyResult<u64> {
        py.detach(|| self.0.with(|store| store.reclaim_ticket(holder, ticket)))
            .map_err(|error| raised(py, error.into()))
    }

    fn commit_store(&self, py: Python<'_>, handle: u64, data: &[u8], seal: bool) -> PyResult<EntryTuple> {
        py.detach(|| self.0.store(handle, data, seal))
            .map(entry_tuple)
            .map_err(|error| raised(py, error))
    }

    fn begin_free(&self, py: Python<'_>, handle: u64, holder: u64, number: u64) -> PyResult<Option<EntryTuple>> {
        // The target in Python looks after the deadline itself, with `pinned_frees`.
        let deadline: Option<Instant> = None;
        let token = FreeToken::Python(number);
        let freeing = self.with(py, |store| store.begin_free(handle, holder, token, deadline))?;
        Ok(match freeing {
            Freeing::Freed(entry) => Some(entry_tuple(entry)),
            Freeing::Waiting => None,
        })
    }

    fn pinned_frees(&self, py: Python<'_>) -> Vec<(u64, Vec<PinTuple>)> {
        let frees = self.look(py, ProtoStore::pinned_frees);
        frees
            .into_iter()
            .map(|free| (free.block_offset, free.pins.iter().map(pin_tuple).collect()))
            .collect()
    }

    #[getter]
    fn quota_left(&self, py: Python<'_>) -> u32 {
        self.look(py, |store| store.quotas().left())
    }

    fn grant(&self, py: Python<'_>, holder: u64, requested: u32) -> PyResult<u32> {
        self.with(py, |store| store.quotas_mut().grant(holder, requested))
    }

    fn release(&self, py: Python<'_>, holder: u64) -> PyResult<()> {
        self.with(py, |store| store.quotas_mut().release(holder))
    }

    fn usage(&self, py: Python<'_>, holder: u64) -> u32 {
        self.look(py, |store| store.quotas().usage(holder))
    }

    fn quota(&self, py: Python<'_>, holder: u64) -> u32 {
        self.look(py, |store| store.quotas().quota(holder))
    }
}
