"""RFC 7306 5.1 arithmetic on 64-bit values, shared by the RNIC's atomics and the free-block ring's counters."""

from __future__ import annotations

MASK64 = (1 << 64) - 1


def fetch_add(old: int, add_data: int, add_mask: int) -> int:
    """The value FetchAdd stores (RFC 7306 5.1.1).

    Each bit of `add_mask` is the most significant bit of a field: its carry is dropped, as is that of bit 63.
    The bits below every field's top are added as usual; a carry into a top bit and the two top bits
    themselves meet in an exclusive or, which is an addition without a carry out.
    """
    below_tops = ~add_mask & MASK64
    return (((old & below_tops) + (add_data & below_tops)) & MASK64) ^ ((old ^ add_data) & add_mask)


def compare_swap(old: int, swap_data: int, swap_mask: int, compare_data: int, compare_mask: int) -> int:
    """The value CmpSwap stores (RFC 7306 5.1.2): `old` unless every bit under `compare_mask` is equal."""
    if (old ^ compare_data) & compare_mask:
        return old
    return (old & ~swap_mask & MASK64) | (swap_data & swap_mask)
