//! The free-block ring (draft 3.3): unallocated blocks in the order in which they are handed out.
//!
//! ```text
//!  0                   1                   2                   3
//!  0 1 2 3 4 5 6 7 8 9 0 1 2 3 4 5 6 7 8 9 0 1 2 3 4 5 6 7 8 9 0 1
//! +---------------------------------------------------------------+
//! |                       Sequence (Ticket)                       |  written after the Block Offset
//! +---------------------------------------------------------------+
//! |                           Reserved                            |
//! +---------------------------------------------------------------+
//! |                     Block Offset (64 bits)                    |  all ones: consumed
//! |                                                               |
//! +---------------------------------------------------------------+
//! ```
//!
//! Allocation and free are each a few *steps*, and the steps of many allocations and frees may interleave in any way:
//!
//! ```text
//! allocation   take_head_ticket -> t    read_slot(t), until it is there    consume(t)
//! free         take_tail_ticket -> u    publish(u, block), deferred until the slot is consumed
//! ```
//!
//! A slot lives through this, N tickets a turn:
//!
//! ```text
//! {t, block}  --consume(t)-->  {t, all ones}  --publish(t + N)-->  {t + N, other block}
//! ```

use std::collections::{BTreeMap, BTreeSet};

use super::counter::CounterForm;
use super::pool::Pool;
use super::words::{Words, check_count, network_word};
use crate::limits::{BLOCK_OFFSET_EMPTY, SLOT_BYTES};
use crate::types::{ApiMisuse, BlockOffset, PeerMisbehaved, TerminateCause, Ticket};

const SLOT_WORDS: usize = SLOT_BYTES / size_of::<u64>();

/// The words of a ring: two a slot, and one each for the counters, which are native integers.
pub struct RingMemory {
    /// `FreeBlockRing::slot_words_for` many.
    pub slots: Box<dyn Words>,
    /// One word.
    pub head: Box<dyn Words>,
    /// One word.
    pub tail: Box<dyn Words>,
}

/// A ring of 2^order slots over the blocks of a pool, all free at first.
///
/// One owner calls the methods. A peer of a direct mode may read the slots and advance Head with its own FetchAdds
/// (draft 6.6): then Head is checked by `audit_head` at every look and no address comes from it (profile 6.9), and a
/// FetchAdd that comes between two of the owner's steps is borne. What the peer has taken is `unbound_count` tickets;
/// `outstanding_tickets` are those of them whose block is there.
///
/// Every step that its caller takes out of turn is refused.
pub struct FreeBlockRing {
    memory: RingMemory,
    form: CounterForm,
    pool: Pool,
    available: u32,
    /// One bit a block.
    taken: Vec<u64>,
    unpublished: BTreeSet<Ticket>,
    deferred: BTreeMap<Ticket, BlockOffset>,
    /// Every ticket before it has been taken; Head was there once, by rule.
    audited: Ticket,
    /// Head's Ticket, were each ticket that was taken also consumed: the first one, and how many have been consumed.
    not_consumed_from: Ticket,
}

#[allow(clippy::missing_errors_doc, reason = "for steps out of turn, and as said")]
impl FreeBlockRing {
    /// How many words the slots of a ring of that order need.
    #[must_use]
    pub fn slot_words_for(form: CounterForm) -> u64 {
        (SLOT_WORDS as u64) << form.order()
    }

    /// Draft 3.3 Initialization, for any first ticket: "slot s" is the slot of ticket `first_ticket + s`.
    ///
    /// `first_ticket` is Head's first Ticket: 0 (draft 3.3), or near 2^32 to see tickets wrap. Refuses memory that does
    /// not fit, and more blocks than slots.
    pub fn new(memory: RingMemory, form: CounterForm, pool: Pool, first_ticket: Ticket) -> Result<Self, ApiMisuse> {
        let (order, block_count) = (form.order(), pool.block_count());
        let slot_count = 1_u32 << order;
        if block_count > slot_count {
            return Err(ApiMisuse(format!(
                "{block_count} blocks: 1 to {slot_count} expected on a ring of order {order}"
            )));
        }
        check_count(&*memory.slots, "ring slots", Self::slot_words_for(form))?;
        check_count(&*memory.head, "Head", 1)?;
        check_count(&*memory.tail, "Tail", 1)?;
        let ring = Self {
            memory,
            form,
            pool,
            available: block_count,
            taken: vec![0; block_count.div_ceil(u64::BITS) as usize],
            unpublished: BTreeSet::new(),
            deferred: BTreeMap::new(),
            audited: first_ticket,
            not_consumed_from: first_ticket,
        };
        for s in 0..slot_count {
            let ticket = first_ticket.wrapping_add(s);
            match ring.pool.offset_of(s) {
                Some(block_offset) => ring.write_slot(ticket, block_offset),
                None => ring.write_slot(ticket.wrapping_sub(slot_count), BLOCK_OFFSET_EMPTY),
            }
        }
        ring.memory.head.store(0, form.encode(first_ticket));
        let tail = first_ticket.wrapping_add(block_count);
        ring.memory.tail.store(0, form.encode(tail));
        Ok(ring)
    }

    // --- the steps of an allocation ---

    /// FetchAdd on Head: the turn of this allocation. Its block may not be there yet.
    pub fn take_head_ticket(&mut self) -> Ticket {
        self.fetch_add(&*self.memory.head)
    }

    /// The block for `ticket`: once its slot's Sequence equals the ticket and its Block Offset is not all ones.
    ///
    /// None until then; the allocator reads again.
    #[must_use]
    pub fn read_slot(&self, ticket: Ticket) -> Option<BlockOffset> {
        let (sequence, block_offset) = self.slot(ticket);
        (sequence == ticket && block_offset != BLOCK_OFFSET_EMPTY).then_some(block_offset)
    }

    /// Mark the slot consumed, its block taken: all ones into its Block Offset. Writes the free deferred for it.
    pub fn consume(&mut self, ticket: Ticket) -> Result<(), ApiMisuse> {
        let Some(block_offset) = self.read_slot(ticket) else {
            return Err(ApiMisuse(format!("the slot of ticket {ticket} holds no block for it")));
        };
        self.consume_block(ticket, block_offset);
        Ok(())
    }

    fn consume_block(&mut self, ticket: Ticket, block_offset: BlockOffset) {
        self.memory.slots.store(self.index(ticket) + 1, BLOCK_OFFSET_EMPTY);
        self.set_taken(block_offset, true);
        self.available -= 1;
        self.not_consumed_from = self.not_consumed_from.wrapping_add(1);
        if self.may_be_head(ticket.wrapping_add(1)) {
            self.audited = ticket.wrapping_add(1);
        }
        self.retry_deferred(ticket);
    }

    // --- the steps of a free ---

    /// FetchAdd on Tail: the turn of this free. `publish` must follow, at any time.
    pub fn take_tail_ticket(&mut self) -> Ticket {
        let ticket = self.fetch_add(&*self.memory.tail);
        self.unpublished.insert(ticket);
        ticket
    }

    /// Return a taken block under a Tail ticket. False: its slot is not due yet, and the write is deferred.
    pub fn publish(&mut self, ticket: Ticket, block_offset: BlockOffset) -> Result<bool, ApiMisuse> {
        if !self.unpublished.contains(&ticket) {
            return Err(ApiMisuse(format!(
                "ticket {ticket} was not taken from Tail, or is published already"
            )));
        }
        self.check_taken(block_offset)?;
        self.unpublished.remove(&ticket);
        Ok(self.return_block(ticket, block_offset))
    }

    fn return_block(&mut self, ticket: Ticket, block_offset: BlockOffset) -> bool {
        self.set_taken(block_offset, false);
        self.available += 1;
        let due = self.is_due(ticket);
        if due {
            self.write_slot(ticket, block_offset);
        } else {
            self.deferred.insert(ticket, block_offset);
        }
        due
    }

    /// Whether the slot is consumed *and* its turn before this one is the last it had (profile 6.2).
    ///
    /// Without the second condition a later free could be written before an earlier one that waits for the same slot,
    /// and the earlier ticket would never match.
    fn is_due(&self, ticket: Ticket) -> bool {
        let (sequence, block_offset) = self.slot(ticket);
        block_offset == BLOCK_OFFSET_EMPTY && sequence == ticket.wrapping_sub(self.slot_count())
    }

    fn write_slot(&self, ticket: Ticket, block_offset: BlockOffset) {
        let i = self.index(ticket);
        // Draft 3.3: whoever sees this Sequence must see this Block Offset.
        self.memory.slots.store(i + 1, network_word(block_offset));
        self.memory.slots.store(i, network_word(u64::from(ticket) << 32));
    }

    /// Of all frees deferred on this slot, only the one of its next turn can be due.
    fn retry_deferred(&mut self, consumed: Ticket) {
        let ticket = consumed.wrapping_add(self.slot_count());
        if let Some(block_offset) = self.deferred.remove(&ticket) {
            self.write_slot(ticket, block_offset);
        }
    }

    // --- whole allocations and frees, executed by the target ---

    /// Take the next block, or None while its slot is not ready.
    ///
    /// No ticket is taken then, for nobody would come back for it. So the FetchAdd on Head is one that changes nothing
    /// if a peer's has come between the look at the slot and itself, and the look is taken anew.
    pub fn allocate(&mut self) -> Option<BlockOffset> {
        loop {
            let seen = self.memory.head.load(0);
            let ticket = self.form.ticket_of(seen);
            let block_offset = self.read_slot(ticket)?;
            let mut advance = |value| if value == seen { self.form.advance(value) } else { value };
            if self.memory.head.update(0, &mut advance) == seen {
                self.consume_block(ticket, block_offset);
                return Some(block_offset);
            }
        }
    }

    /// Return a taken block. The free is complete even if its slot is written later (profile 6.2).
    pub fn free(&mut self, block_offset: BlockOffset) -> Result<(), ApiMisuse> {
        self.check_taken(block_offset)?;
        let ticket = self.fetch_add(&*self.memory.tail);
        self.return_block(ticket, block_offset);
        Ok(())
    }

    // --- what there is to see ---

    /// Blocks in the ring: in slots not yet consumed, or deferred.
    #[must_use]
    pub fn free_count(&self) -> u32 {
        self.available
    }

    /// Of these, blocks whose slot write is deferred.
    #[must_use]
    pub fn deferred_count(&self) -> usize {
        self.deferred.len()
    }

    /// n: there are 2^n slots.
    #[must_use]
    pub fn order(&self) -> u32 {
        self.form.order()
    }

    // --- what a peer did to Head (profile 6.9, 8.10) ---

    /// Head's next Ticket, after a look at whether its peer kept the rules.
    ///
    /// Refuses (Terminate 0/2/07) a value that no FetchAdds could have made, more tickets taken than blocks were ever
    /// offered, and a Head that went back.
    pub fn audit_head(&mut self) -> Result<Ticket, PeerMisbehaved> {
        let value = self.memory.head.load(0);
        let ticket = self.form.ticket_of(value);
        let wrong = if !self.form.well_formed(value) {
            let expected = self.form.encode(ticket);
            format!("Head is {value:#018x}, {expected:#018x} expected for ticket {ticket}")
        } else if !self.may_be_head(ticket) {
            let (first, last) = (self.audited, self.tail_ticket());
            format!("Head is at ticket {ticket}, not between {first} and Tail's {last}")
        } else {
            self.audited = ticket;
            return Ok(ticket);
        };
        Err(PeerMisbehaved::new(TerminateCause::RdmapCatastrophicStream, wrong))
    }

    /// Where a peer can move Head no more: back to the last Ticket that was by rule, if it is not by rule now.
    pub fn restore_head(&mut self) {
        if self.audit_head().is_err() {
            self.memory.head.store(0, self.form.encode(self.audited));
        }
    }

    /// Tickets taken by a peer and not consumed (draft 3.4). Nobody's number if Head is not by rule.
    #[must_use]
    pub fn unbound_count(&self) -> u32 {
        let next = self.form.ticket_of(self.memory.head.load(0));
        next.wrapping_sub(self.not_consumed_from)
    }

    /// Whether a peer has taken `ticket` and its block lies in its slot. Audits Head, and refuses as that does.
    pub fn is_outstanding(&mut self, ticket: Ticket) -> Result<bool, PeerMisbehaved> {
        let head = self.audit_head()?;
        Ok(was_taken(ticket, head) && self.read_slot(ticket).is_some())
    }

    /// All that `is_outstanding` holds for, oldest first.
    pub fn outstanding_tickets(&mut self) -> Result<Vec<Ticket>, PeerMisbehaved> {
        let head = self.audit_head()?;
        if head == self.not_consumed_from {
            // The slots are many, and others wait for the store meanwhile.
            return Ok(Vec::new());
        }
        let written = (0..self.slot_count()).filter_map(|slot| {
            let (sequence, block_offset) = self.slot(slot);
            (block_offset != BLOCK_OFFSET_EMPTY).then_some(sequence)
        });
        let mut tickets: Vec<_> = written.filter(|&ticket| was_taken(ticket, head)).collect();
        tickets.sort_unstable_by_key(|ticket| ticket.wrapping_sub(head));
        Ok(tickets)
    }

    /// Whether FetchAdds can have taken Head from where it was to `ticket`: not back, and not beyond Tail.
    fn may_be_head(&self, ticket: Ticket) -> bool {
        ticket.wrapping_sub(self.audited) <= self.tail_ticket().wrapping_sub(self.audited)
    }

    fn tail_ticket(&self) -> Ticket {
        self.form.ticket_of(self.memory.tail.load(0))
    }

    fn slot_count(&self) -> u32 {
        1 << self.form.order()
    }

    /// Sequence and Block Offset of the slot of `ticket`; the address comes from the ticket, not from a counter.
    fn slot(&self, ticket: Ticket) -> (Ticket, BlockOffset) {
        let i = self.index(ticket);
        let sequence = (network_word(self.memory.slots.load(i)) >> 32) as Ticket;
        (sequence, network_word(self.memory.slots.load(i + 1)))
    }

    /// Of the slot's Sequence word; the Block Offset follows.
    fn index(&self, ticket: Ticket) -> usize {
        SLOT_WORDS * (ticket & (self.slot_count() - 1)) as usize
    }

    fn fetch_add(&self, counter: &dyn Words) -> Ticket {
        self.form
            .ticket_of(counter.update(0, &mut |value| self.form.advance(value)))
    }

    fn check_taken(&self, block_offset: BlockOffset) -> Result<(), ApiMisuse> {
        let taken = self.pool.index_of(block_offset).is_some_and(|index| {
            let bit = 1 << (index % u64::BITS);
            self.taken[(index / u64::BITS) as usize] & bit != 0
        });
        if taken {
            return Ok(());
        }
        Err(ApiMisuse(format!(
            "block offset {block_offset:#x} was not taken from this ring"
        )))
    }

    fn set_taken(&mut self, block_offset: BlockOffset, taken: bool) {
        // A slot holds what this ring wrote there: nobody else may write.
        let Some(index) = self.pool.index_of(block_offset) else {
            return;
        };
        let word = &mut self.taken[(index / u64::BITS) as usize];
        let bit = 1 << (index % u64::BITS);
        *word = if taken { *word | bit } else { *word & !bit };
    }
}

/// Whether Head at `head` has come by `ticket`. One that is farther before it than this is ahead of it.
fn was_taken(ticket: Ticket, head: Ticket) -> bool {
    (1..=Ticket::MAX / 2).contains(&head.wrapping_sub(ticket))
}
