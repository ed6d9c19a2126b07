//! Partitions, and what an initiator allocates there itself (draft 6.6).

use super::BlockStore;
use crate::blocks::{Entry, HolderId, Partition, PartitionBlocks, PartitionError, RingMemory};
use crate::types::{ApiMisuse, BlockOffset, Handle, Status, Ticket};

/// What `bind_ticket` did.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Binding {
    /// The entry as bound.
    Bound(Entry),
    /// NO_SPACE or TICKET_MISMATCH, and nothing has changed.
    Refused(Status),
}

#[allow(clippy::missing_errors_doc, reason = "for calls out of turn, and as said")]
impl BlockStore {
    /// A ring of its own over `blocks`, which are the holder's quota from now on (draft 3.4).
    ///
    /// The holder may have a quota in the shared ring, but nothing bound: that quota is given back.
    pub fn open_partition(
        &mut self,
        holder: HolderId,
        blocks: PartitionBlocks,
        memory: RingMemory,
    ) -> Result<(), ApiMisuse> {
        self.quotas.check_unused(holder)?;
        self.partitions.open(holder, blocks, memory)?;
        self.quotas.set_apart(holder, blocks.count)
    }

    /// That of `holder`, if it has one.
    pub fn partition(&mut self, holder: HolderId) -> Option<&mut Partition> {
        self.partitions.of(holder)
    }

    /// Give it back, and the holder's quota with it; every block is home, no ticket is taken. What the blocks hold is still
    /// to be cleared before they are another's.
    pub fn close_partition(&mut self, holder: HolderId) -> Result<Partition, ApiMisuse> {
        let partition = self.partitions.close(holder)?;
        self.quotas.release(holder)?;
        Ok(partition)
    }

    /// Draft 6.6 BIND: bind a handle that is not bound to the block that `holder` took with `ticket` and wrote.
    ///
    /// NO_SPACE if that exceeds the quota, in which the ticket itself counts once (profile 8.10). TICKET_MISMATCH if the
    /// ticket is not one that was taken and not bound, or its slot holds another block. Audits Head.
    pub fn bind_ticket(
        &mut self,
        handle: Handle,
        holder: HolderId,
        ticket: Ticket,
        block_offset: BlockOffset,
        data_length: u32,
        seal: bool,
    ) -> Result<Binding, PartitionError> {
        let partition = self.partitions.of(holder).ok_or_else(|| no_partition(holder))?;
        let outstanding = partition.ring.is_outstanding(ticket)?;
        let unbound = partition.ring.unbound_count();
        let in_slot = partition.read_slot(ticket);
        self.check_bindable(handle)?;
        self.check_length(data_length)?;
        if !self.quotas.charge(holder, unbound.saturating_sub(outstanding.into()))? {
            return Ok(Binding::Refused(Status::NoSpace));
        }
        if !outstanding || in_slot != Some(block_offset) {
            self.quotas.credit(holder)?;
            return Ok(Binding::Refused(Status::TicketMismatch));
        }
        self.ring_of(holder).consume(ticket)?;
        Ok(Binding::Bound(self.table.bind(
            handle,
            block_offset,
            data_length,
            seal,
        )?))
    }

    /// Draft 3.4: the block of one of `Partition::outstanding_tickets` returns to the ring with a new ticket; tells which it was.
    ///
    /// No RDMA Write of the initiator reaches the block any more. The unit of usage is released: it was no more than the
    /// ticket. Audits Head.
    pub fn reclaim_ticket(&mut self, holder: HolderId, ticket: Ticket) -> Result<BlockOffset, PartitionError> {
        let partition = self.partitions.of(holder).ok_or_else(|| no_partition(holder))?;
        let outstanding = partition.ring.is_outstanding(ticket)?;
        let Some(block_offset) = partition.read_slot(ticket).filter(|_| outstanding) else {
            return Err(ApiMisuse(format!("ticket {ticket} of holder {holder} is not outstanding")).into());
        };
        partition.ring.consume(ticket)?;
        self.forget(block_offset)?;
        self.ring_of(holder).free(block_offset)?;
        Ok(block_offset)
    }
}

fn no_partition(holder: HolderId) -> ApiMisuse {
    ApiMisuse(format!("holder {holder} has no partition"))
}
