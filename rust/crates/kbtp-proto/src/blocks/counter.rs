//! The two forms of a ring counter: masked (draft 3.3) and unmasked (draft 9.2).
//!
//! ```text
//! masked    |63          Ticket          32|31   zero   n+4|n+3  Slot Offset  0|
//! unmasked  |63          Ticket          32|31               zero             0|
//! ```
//!
//! A counter is a 64-bit value in the target's byte order, modified only with FetchAdd (RFC 7306 5.1.1).

use crate::atomics::fetch_add;
use crate::limits::{RING_ORDER_MAX, RING_ORDER_MIN, SLOT_BYTES};
use crate::types::{ApiMisuse, Ticket};

/// How Head and Tail of a ring of 2^order slots hold a Ticket, and what one FetchAdd is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CounterForm {
    order: u32,
    masked: bool,
}

impl CounterForm {
    /// Draft 3.3: Ticket and Slot Offset in one value, advancing together.
    ///
    /// `order` is n, with N = 2^n slots; 1 to 28 (profile 5: with n = 0 the Slot Offset has no room for its own
    /// increment).
    ///
    /// # Errors
    ///
    /// For another order.
    pub fn masked(order: u32) -> Result<Self, ApiMisuse> {
        Ok(Self {
            order: checked_order(order)?,
            masked: true,
        })
    }

    /// Draft 9.2: the Ticket alone; the slot is computed as 16 * (ticket mod N).
    ///
    /// # Errors
    ///
    /// As `masked`.
    pub fn unmasked(order: u32) -> Result<Self, ApiMisuse> {
        Ok(Self {
            order: checked_order(order)?,
            masked: false,
        })
    }

    /// Of the ring.
    #[must_use]
    pub fn order(self) -> u32 {
        self.order
    }

    /// What a FetchAdd adds.
    #[must_use]
    pub fn add_data(self) -> u64 {
        if self.masked {
            1 << 32 | SLOT_BYTES as u64
        } else {
            1 << 32
        }
    }

    /// The top bits of the fields it adds to.
    #[must_use]
    pub fn add_mask(self) -> u64 {
        if self.masked {
            1 << 63 | 1 << 31 | 1 << (self.order + 3)
        } else {
            0
        }
    }

    /// What one FetchAdd makes of `value`.
    #[must_use]
    pub fn advance(self, value: u64) -> u64 {
        fetch_add(value, self.add_data(), self.add_mask())
    }

    /// The counter's value when the next FetchAdd is to return `ticket`.
    #[must_use]
    pub fn encode(self, ticket: Ticket) -> u64 {
        let offset = if self.masked { self.offset_of_ticket(ticket) } else { 0 };
        u64::from(ticket) << 32 | offset
    }

    /// Bits 63-32 of any 64-bit value.
    #[must_use]
    pub fn ticket_of(self, value: u64) -> Ticket {
        (value >> 32) as Ticket
    }

    /// Octets from slot 0 to the slot of the value's Ticket, as this form tells it: always inside the ring.
    #[must_use]
    pub fn slot_offset_of(self, value: u64) -> u64 {
        if self.masked {
            value & self.slot_offset_mask()
        } else {
            self.offset_of_ticket(self.ticket_of(value))
        }
    }

    /// Whether FetchAdds from a proper start can have made this value (profile 6.9).
    #[must_use]
    pub fn well_formed(self, value: u64) -> bool {
        value == self.encode(self.ticket_of(value))
    }

    fn offset_of_ticket(self, ticket: Ticket) -> u64 {
        (SLOT_BYTES as u64 * u64::from(ticket)) & self.slot_offset_mask()
    }

    fn slot_offset_mask(self) -> u64 {
        ((SLOT_BYTES as u64) << self.order) - 1
    }
}

fn checked_order(order: u32) -> Result<u32, ApiMisuse> {
    if !(RING_ORDER_MIN..=RING_ORDER_MAX).contains(&order) {
        return Err(ApiMisuse(format!(
            "ring order {order}: {RING_ORDER_MIN} to {RING_ORDER_MAX} expected"
        )));
    }
    Ok(order)
}

/// The smallest order whose ring has a slot for every block (draft 3.3, profile 5).
///
/// # Errors
///
/// For more blocks than the largest ring has slots.
pub fn ring_order_for(block_count: u32) -> Result<u32, ApiMisuse> {
    let bits = u32::BITS - block_count.saturating_sub(1).leading_zeros();
    checked_order(bits.max(RING_ORDER_MIN))
}
