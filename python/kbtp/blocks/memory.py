"""Views of caller-given memory whose stores other threads and peers may watch."""

from __future__ import annotations

import sys
from typing import TypeAlias

import numpy as np

from kbtp.errors import ApiMisuse

Memory: TypeAlias = "bytearray | memoryview"
"""Writable, contiguous octets that stay where they are, for instance those of a registered memory region."""

WORD_BYTES = 8


def octets_of(memory: Memory, name: str, length_bytes: int) -> memoryview:
    """`memory` as writable octets (format "B"). Raises `ApiMisuse` unless it is exactly `length_bytes` long."""
    view = memoryview(memory)
    if view.readonly:
        raise ApiMisuse(f"{name}: writable memory expected, this is read-only")
    if not view.c_contiguous:
        raise ApiMisuse(f"{name}: contiguous memory expected")
    if view.nbytes != length_bytes:
        raise ApiMisuse(f"{name}: {length_bytes} octets expected, {view.nbytes} given")
    return view.cast("B")


def words_of(memory: Memory, name: str, length_bytes: int) -> memoryview:
    """`memory` as native 64-bit words (format "Q"), aligned so that storing a word is one 8-octet store.

    CPython stores an item of this format with a single 8-octet copy. A big-endian numpy item would not do: numpy
    copies the octets first and swaps them in place afterwards, and a peer could read what lies between.

    Raises `ApiMisuse` for a wrong length, read-only memory, or memory not aligned to 8 octets.
    """
    octets = octets_of(memory, name, length_bytes)
    if address_of(octets) % WORD_BYTES:
        raise ApiMisuse(f"{name}: memory aligned to {WORD_BYTES} octets expected")
    return octets.cast("Q")


def address_of(octets: memoryview) -> int:
    """Where the first octet lies in this process; `octets` is not empty."""
    return int(np.frombuffer(octets, dtype=np.uint8).ctypes.data)


def network_word(value: int) -> int:
    """The native word whose octets in memory are the 64-bit `value` in network byte order, and the reverse."""
    return int.from_bytes(value.to_bytes(WORD_BYTES, "big"), sys.byteorder)
