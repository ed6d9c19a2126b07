"""The two forms of a ring counter: masked (draft 3.3) and unmasked (draft 9.2).

    masked    |63          Ticket          32|31   zero   n+4|n+3  Slot Offset  0|
    unmasked  |63          Ticket          32|31               zero             0|

A counter is a 64-bit value in the target's byte order, modified only with FetchAdd (RFC 7306 5.1.1).
"""

from __future__ import annotations

from typing import Protocol

from kbtp.errors import ApiMisuse
from kbtp.limits import RING_ORDER_MAX, RING_ORDER_MIN, SLOT_BYTES
from kbtp.types import Ticket

TICKET_MASK = 0xFFFF_FFFF


class CounterForm(Protocol):
    """How Head and Tail of a ring of 2^order slots hold a Ticket, and what one FetchAdd is."""

    @property
    def order(self) -> int: ...
    @property
    def add_data(self) -> int: ...
    @property
    def add_mask(self) -> int: ...

    def encode(self, ticket: Ticket) -> int:
        """The counter's value when the next FetchAdd is to return `ticket`."""
        ...

    def ticket_of(self, value: int) -> Ticket:
        """Bits 63-32 of any 64-bit value."""
        ...

    def slot_offset_of(self, value: int) -> int:
        """Octets from slot 0 to the slot of the value's Ticket, as this form tells it: always inside the ring."""
        ...

    def well_formed(self, value: int) -> bool:
        """Whether FetchAdds from a proper start can have made this value (profile 6.9)."""
        ...


class MaskedCounter:
    """Draft 3.3: Ticket and Slot Offset in one value, advancing together.

    `order` is n, with N = 2^n slots; 1 to 28 (profile 5: with n = 0 the Slot Offset has no room for its own increment).
    """

    add_data = 0x0000_0001_0000_0010

    def __init__(self, order: int) -> None:
        self.order = checked_order(order)
        self.add_mask = 1 << 63 | 1 << 31 | 1 << order + 3
        self._slot_offset_mask = (SLOT_BYTES << order) - 1

    def encode(self, ticket: Ticket) -> int:
        return ticket << 32 | (SLOT_BYTES * ticket) & self._slot_offset_mask

    def ticket_of(self, value: int) -> Ticket:
        return value >> 32

    def slot_offset_of(self, value: int) -> int:
        return value & self._slot_offset_mask

    def well_formed(self, value: int) -> bool:
        return value == self.encode(self.ticket_of(value))


class UnmaskedCounter:
    """Draft 9.2: the Ticket alone; the slot is computed as 16 * (ticket mod N)."""

    add_data = 0x0000_0001_0000_0000
    add_mask = 0

    def __init__(self, order: int) -> None:
        self.order = checked_order(order)
        self._slot_offset_mask = (SLOT_BYTES << order) - 1

    def encode(self, ticket: Ticket) -> int:
        return ticket << 32

    def ticket_of(self, value: int) -> Ticket:
        return value >> 32

    def slot_offset_of(self, value: int) -> int:
        return SLOT_BYTES * self.ticket_of(value) & self._slot_offset_mask

    def well_formed(self, value: int) -> bool:
        return value == self.encode(self.ticket_of(value))


def checked_order(order: int) -> int:
    """`order` itself. Raises `ApiMisuse` outside profile 5's range."""
    if not RING_ORDER_MIN <= order <= RING_ORDER_MAX:
        raise ApiMisuse(f"ring order {order}: {RING_ORDER_MIN} to {RING_ORDER_MAX} expected")
    return order


def ring_order_for(block_count: int) -> int:
    """The smallest order whose ring has a slot for every block (draft 3.3, profile 5)."""
    return checked_order(max(RING_ORDER_MIN, (block_count - 1).bit_length()))
