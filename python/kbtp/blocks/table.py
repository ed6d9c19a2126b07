"""The block table (draft 3.2): one 16-octet entry a handle.

     0                   1                   2                   3
     0 1 2 3 4 5 6 7 8 9 0 1 2 3 4 5 6 7 8 9 0 1 2 3 4 5 6 7 8 9 0 1
    +-------------------------------+-------------------------------+
    |             Flags             |          Generation           |  \\ state word: always written in one
    +-------------------------------+-------------------------------+   > 8-octet store (profile 5)
    |                          Data Length                          |  /
    +---------------------------------------------------------------+
    |                     Block Offset (64 bits)                    |  written before a bind's state word,
    |                                                               |  after an unbind's
    +---------------------------------------------------------------+

An unbound entry keeps its Generation alone: Flags, Data Length and Block Offset are zero, so that it tells nothing of
the block it once named.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

import numpy as np

from kbtp.atomics import MASK64
from kbtp.blocks.handles import HandleRange
from kbtp.blocks.memory import Memory, network_word, words_of
from kbtp.errors import ApiMisuse
from kbtp.limits import ENTRY_BYTES, GENERATION_INITIAL, GENERATION_MAX
from kbtp.types import BlockOffset, EntryFlag, Generation, Handle

_LAYOUT = struct.Struct(">HHIQ")
_DATA_LENGTH_MAX = 0xFFFF_FFFF


@dataclass(frozen=True, slots=True)
class Entry:
    """The contents of one entry."""

    flags: EntryFlag
    generation: Generation
    data_length: int
    block_offset: BlockOffset

    @property
    def valid(self) -> bool:
        return bool(self.flags & EntryFlag.VALID)

    @property
    def sealed(self) -> bool:
        return bool(self.flags & EntryFlag.SEALED)

    @classmethod
    def unpack(cls, octets: bytes | bytearray | memoryview) -> Entry:
        """From 16 octets; any content is an entry. Raises `ApiMisuse` for another length."""
        if len(octets) != ENTRY_BYTES:
            raise ApiMisuse(f"entry: {ENTRY_BYTES} octets expected, {len(octets)} given")
        flags, generation, data_length, block_offset = _LAYOUT.unpack(octets)
        return cls(EntryFlag(flags), generation, data_length, block_offset)

    def pack(self) -> bytes:
        """16 octets. Raises `ApiMisuse` if a value does not fit its field."""
        try:
            return _LAYOUT.pack(self.flags, self.generation, self.data_length, self.block_offset)
        except struct.error as error:
            raise ApiMisuse(f"{self} does not fit an entry's fields") from error


def next_generation(generation: Generation) -> Generation:
    """Incremented by one, skipping zero (draft 6.3 step 4)."""
    return generation + 1 if generation < GENERATION_MAX else GENERATION_INITIAL


class BlockTable:
    """Entries for `handle_count` handles from `base_handle` on, in `memory`; written by its one owner alone.

    Others may read the memory at any moment, entry by entry. The order of the two stores of a bind or unbind is that of
    the program: enough where the CPU keeps stores in order and for readers in this interpreter.

    Raises `ApiMisuse` if the memory is not exactly 16 octets a handle, writable and aligned to 8. Methods that take a
    handle raise it for one outside the table.
    """

    def __init__(self, memory: Memory, base_handle: Handle, handle_count: int) -> None:
        if not 0 <= base_handle <= MASK64:
            raise ApiMisuse(f"base handle {base_handle}: 64 bits expected")
        if handle_count < 1:
            raise ApiMisuse(f"handle count {handle_count}: at least 1 expected")
        self._words = words_of(memory, "block table", ENTRY_BYTES * handle_count)
        self.base_handle = base_handle
        self.handle_count = handle_count

    def initialize(self) -> None:
        """Unbind everything with Generation 1, so that the first bind makes it 2 (profile 5)."""
        words = np.frombuffer(self._words, dtype=np.uint64)
        words[0::2] = network_word(_state_word(EntryFlag.NONE, GENERATION_INITIAL, 0))
        words[1::2] = 0

    def contains(self, handle: Handle) -> bool:
        """Profile's range test: `handle - base < count`, unsigned."""
        return (handle - self.base_handle) & MASK64 < self.handle_count

    def read(self, handle: Handle) -> Entry:
        i = self._index(handle)
        state = network_word(self._words[i])
        return Entry(
            EntryFlag(state >> 48), state >> 32 & 0xFFFF, state & _DATA_LENGTH_MAX, network_word(self._words[i + 1])
        )

    def bind(self, handle: Handle, block_offset: BlockOffset, data_length: int, seal: bool) -> Entry:
        """Draft 6.3 step 4: Block Offset, then VALID, SEALED if asked, Data Length and the next Generation.

        Raises `ApiMisuse` if the entry is VALID.
        """
        old = self.read(handle)
        if old.valid:
            raise ApiMisuse(f"handle {handle:#x} is bound")
        flags = EntryFlag.VALID | EntryFlag.SEALED if seal else EntryFlag.VALID
        new = Entry(flags, next_generation(old.generation), data_length, block_offset)
        state = _state_word(new.flags, new.generation, data_length)
        i = self._index(handle)
        # Draft 3.2: whoever sees VALID must see this Block Offset.
        self._words[i + 1] = network_word(block_offset)
        # Profile 5: Flags, Generation and Data Length in one store, so that no reader sees a part of them.
        self._words[i] = network_word(state)
        return new

    def update(self, handle: Handle, data_length: int, seal: bool) -> Entry:
        """Draft 6.2 step 3: the new Data Length and, if asked, SEALED, in one store.

        Raises `ApiMisuse` unless the entry is VALID and not SEALED.
        """
        old = self.read(handle)
        if not old.valid or old.sealed:
            raise ApiMisuse(f"handle {handle:#x} is {'sealed' if old.valid else 'not bound'}")
        flags = old.flags | EntryFlag.SEALED if seal else old.flags
        new = Entry(flags, old.generation, data_length, old.block_offset)
        self._words[self._index(handle)] = network_word(_state_word(flags, old.generation, data_length))
        return new

    def unbind(self, handle: Handle) -> Entry:
        """Draft 6.4 step 2: VALID and SEALED cleared, the next Generation; Data Length and Block Offset zero.

        Raises `ApiMisuse` unless the entry is VALID.
        """
        old = self.read(handle)
        if not old.valid:
            raise ApiMisuse(f"handle {handle:#x} is not bound")
        new = Entry(EntryFlag.NONE, next_generation(old.generation), 0, 0)
        i = self._index(handle)
        # The other way round than bind: a reader that sees VALID must not see a Block Offset that names nothing.
        self._words[i] = network_word(_state_word(new.flags, new.generation, 0))
        self._words[i + 1] = 0
        return new

    def bound_handles(self, handle_range: HandleRange) -> list[Handle]:
        """The handles of `handle_range`, which lies in the table, that are VALID now."""
        position = (handle_range.first - self.base_handle) & MASK64
        if position + handle_range.count > self.handle_count:
            raise ApiMisuse(f"{handle_range} is not inside the table")
        states = np.frombuffer(self._words, dtype=np.uint64)[2 * position : 2 * (position + handle_range.count) : 2]
        valid = np.uint64(network_word(_state_word(EntryFlag.VALID, 0, 0)))
        return [(handle_range.first + int(i)) & MASK64 for i in np.flatnonzero(states & valid)]

    @property
    def memory(self) -> memoryview:
        """The octets of all entries."""
        return self._words.cast("B")

    def _index(self, handle: Handle) -> int:
        """Of the entry's state word; the Block Offset follows."""
        if not self.contains(handle):
            raise ApiMisuse(f"handle {handle:#x} is not in the table")
        return 2 * ((handle - self.base_handle) & MASK64)


def _state_word(flags: EntryFlag, generation: Generation, data_length: int) -> int:
    if not 0 <= data_length <= _DATA_LENGTH_MAX:
        raise ApiMisuse(f"data length {data_length}: 32 bits expected")
    return flags << 48 | generation << 32 | data_length
