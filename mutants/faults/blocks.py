"""Faults in the block structures: pool, table, ring, quotas, pins."""

from mutants.plant import Mutant

_COUNTER = "python/kbtp/blocks/counter.py"
_RING = "python/kbtp/blocks/ring.py"
_TABLE = "python/kbtp/blocks/table.py"
_STORE = "python/kbtp/blocks/store.py"
_QUOTA = "python/kbtp/blocks/quota.py"
_HANDLES = "python/kbtp/blocks/handles.py"
_RING_TESTS = ("tests/blocks/test_ring.py", "tests/blocks/test_ring_interleavings.py")

MUTANTS = (
    Mutant(
        "draft 3.3",
        "the Add Mask lets the Slot Offset run into the bits above it",
        _COUNTER,
        "self.add_mask = 1 << 63 | 1 << 31 | 1 << order + 3",
        "self.add_mask = 1 << 63 | 1 << 31",
        ("tests/blocks/test_counter.py", *_RING_TESTS),
    ),
    Mutant(
        "draft 3.3 Allocation",
        "a slot is taken by whoever comes, not by its ticket",
        _RING,
        "return block_offset if sequence == ticket and block_offset != BLOCK_OFFSET_EMPTY else None",
        "return block_offset if block_offset != BLOCK_OFFSET_EMPTY else None",
        _RING_TESTS,
    ),
    Mutant(
        "draft 3.3 Allocation",
        "an allocated slot is not marked consumed",
        _RING,
        "        self._slots[self._index(ticket) + 1] = BLOCK_OFFSET_EMPTY\n",
        "",
        _RING_TESTS,
    ),
    Mutant(
        "draft 3.3 Free",
        "a free writes its slot whether or not that is consumed",
        _RING,
        "        if self._is_due(ticket):\n",
        "        if self._is_due(ticket) or ticket:\n",
        _RING_TESTS,
    ),
    Mutant(
        "profile 6.2",
        "a deferred free is written as soon as its slot is consumed, whose turn it may be",
        _RING,
        "return block_offset == BLOCK_OFFSET_EMPTY and sequence == (ticket - self.slot_count) & TICKET_MASK",
        "return block_offset == BLOCK_OFFSET_EMPTY",
        _RING_TESTS,
    ),
    Mutant(
        "profile 6.2",
        "a deferred free is forgotten when its slot is consumed",
        _RING,
        "        if ticket in self._deferred:\n",
        "        if ticket in self._deferred and not consumed:\n",
        _RING_TESTS,
    ),
    Mutant(
        "draft 3.3 Free",
        "a slot's Sequence is written before its Block Offset",
        _RING,
        "        self._slots[i + 1] = network_word(block_offset)\n"
        "        self._slots[i] = network_word(ticket << 32)\n",
        "        self._slots[i] = network_word(ticket << 32)\n"
        "        self._slots[i + 1] = network_word(block_offset)\n",
        _RING_TESTS,
    ),
    Mutant(
        "profile 6.9",
        "a Head that no FetchAdd can have made is believed",
        _RING,
        "        if not self.counter_form.well_formed(value):\n",
        "        if value < 0:\n",
        _RING_TESTS,
    ),
    Mutant(
        "profile 8.10",
        "a peer may take more tickets than blocks were ever offered",
        _RING,
        "        if not self._may_be_head(ticket):\n",
        "        if ticket < 0:\n",
        (*_RING_TESTS, "tests/blocks/test_partitions.py"),
    ),
    Mutant(
        "profile 5",
        "Generation 65535 is followed by 0",
        _TABLE,
        "return generation + 1 if generation < GENERATION_MAX else GENERATION_INITIAL",
        "return generation + 1 & GENERATION_MAX",
        ("tests/blocks/test_table.py",),
    ),
    Mutant(
        "draft 6.4 step 2",
        "a FREE leaves the Generation as it is",
        _TABLE,
        "new = Entry(EntryFlag.NONE, next_generation(old.generation), 0, 0)",
        "new = Entry(EntryFlag.NONE, old.generation, 0, 0)",
        ("tests/blocks/test_table.py",),
    ),
    Mutant(
        "draft 3.2",
        "VALID is written before the Block Offset it is for",
        _TABLE,
        "        self._words[i + 1] = network_word(block_offset)\n"
        "        # Profile 5: Flags, Generation and Data Length in one store, so that no reader sees a part of them.\n"
        "        self._words[i] = network_word(state)\n",
        "        self._words[i] = network_word(state)\n        self._words[i + 1] = network_word(block_offset)\n",
        ("tests/blocks/test_table.py", "tests/blocks/test_store.py"),
    ),
    Mutant(
        "profile 6.1",
        "a FREE returns a block that a LOAD still reads",
        _STORE,
        "        if old.block_offset in self._pins:\n",
        "        if old.block_offset not in self.ring.block_offsets:\n",
        ("tests/blocks/test_store.py",),
    ),
    Mutant(
        "profile 6.1",
        "the first of two LOADs that ends lets a waiting FREE go on",
        _STORE,
        "        if pins:\n            return\n",
        "",
        ("tests/blocks/test_store.py",),
    ),
    Mutant(
        "draft 6.4",
        "a block returns to the ring with its contents",
        _STORE,
        "            self.pool.clear(block_offset)\n        # Draft 3.4",
        "            pass\n        # Draft 3.4",
        ("tests/blocks/test_store.py",),
    ),
    Mutant(
        "profile 6.5",
        "a failed ALLOC_STORE keeps its unit of quota",
        _STORE,
        "        self._ring_of(holder).free(block_offset)\n        self.quotas.credit(holder)\n",
        "        self._ring_of(holder).free(block_offset)\n",
        ("tests/blocks/test_store.py",),
    ),
    Mutant(
        "draft 3.4",
        "an initiator may hold one block more than its quota",
        _QUOTA,
        "        if account.usage >= account.quota:\n",
        "        if account.usage > account.quota:\n",
        ("tests/blocks/test_quota.py",),
    ),
    Mutant(
        "profile 3 Handle ranges",
        "two initiators get the same handles",
        _HANDLES,
        "self._gaps[chosen : chosen + 1] = [(position + count, gap_count - count)] if count < gap_count else []",
        "self._gaps[chosen : chosen + 1] = [(position, gap_count)] if count < gap_count else []",
        ("tests/blocks/test_handles.py",),
    ),
)
