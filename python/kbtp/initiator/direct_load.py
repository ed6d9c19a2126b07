"""Direct Load (draft 6.6, profile 6.3): the entry, the block, the entry twice again. No I/O, no clock.

Each read is issued after the one before it has completed. What the first entry says is believed when those that follow
have the same 16 octets and came within the interval in which no Generation can come again. Else all is discarded, and
the last entry is the first of the next try. After the last try LOAD is used.

Two entries would not do for data: a read is not atomic, and two torn ones can agree. If the first and the third do,
Flags and Generation were the same all the time between, so the second, wholly inside, has the Block Offset that goes
with them (docs/draft-review.md, 4). A refusal costs nobody an octet: two entries are enough for it.
"""

from __future__ import annotations

from typing import TypeGuard

from kbtp.initiator.direct import DirectTerms, Ended, ReadBlock, ReadStructure, Step, UseRequest
from kbtp.initiator.operations import Result
from kbtp.limits import DIRECT_LOAD_INTERVAL_S, DIRECT_LOAD_TRIES_MAX
from kbtp.types import EntryFlag, Generation, Handle, Status
from kbtp.wire.layouts import TABLE_ENTRY


class DirectLoad:
    """One load. `buffer_bytes` is how much room there is; `generation` 0 means any (draft 5.1)."""

    def __init__(
        self, terms: DirectTerms, handle: Handle, generation: Generation, buffer_bytes: int, *, allow_unsealed: bool
    ) -> None:
        self._terms = terms
        self._handle = handle
        self._generation = generation
        self._buffer_bytes = buffer_bytes
        self._allow_unsealed = allow_unsealed
        self._tries_left = DIRECT_LOAD_TRIES_MAX
        self._first: bytes | None = None
        self._first_posted_s = 0.0
        self._entry_posted_s = 0.0
        self._reading_block = False
        self._seen_again = False
        """The second entry was as the first, and the third is being read."""

    def begin(self) -> Step:
        if self._terms.entry_to(self._handle) is None:
            return Ended(Result(Status.HANDLE_OUT_OF_RANGE, self._handle))
        return self._read_entry()

    def posted(self, now_s: float) -> None:
        if not self._reading_block:
            self._entry_posted_s = now_s

    def completed(self, octets: bytes, value: int, now_s: float) -> Step:
        if self._reading_block:
            self._reading_block = False
            return self._read_entry()
        # From before the first read to after the second one: the time between them is not more than that.
        within = now_s - self._first_posted_s <= DIRECT_LOAD_INTERVAL_S
        if octets == self._first and within:
            outcome = self._outcome(octets)
            if _has_data(outcome) and not self._seen_again:
                self._seen_again = True
                return self._read_entry()
            if outcome is not None:
                return outcome
        return self._try(octets)

    def _try(self, first: bytes) -> Step:
        if not self._tries_left:
            return UseRequest()
        self._tries_left -= 1
        self._first = first
        self._seen_again = False
        self._first_posted_s = self._entry_posted_s
        outcome = self._outcome(first)
        if _has_data(outcome):
            self._reading_block = True
            return ReadBlock(self._terms.ack.pool_stag, outcome.result.block_offset, outcome.result.length_bytes)
        return outcome if isinstance(outcome, UseRequest) else self._read_entry()

    def _read_entry(self) -> ReadStructure:
        to = self._terms.entry_to(self._handle)
        assert to is not None
        return ReadStructure(self._terms.ack.table_stag, to)

    def _outcome(self, octets: bytes) -> Ended | UseRequest | None:
        """What LOAD would answer, by an entry and in the order of profile 1; None if no entry can be like this."""
        flags, generation, length_bytes, block_offset = TABLE_ENTRY.unpack_from(octets)
        if not flags & EntryFlag.VALID:
            return self._refused(Status.NOT_BOUND, generation)
        if self._generation not in (0, generation):
            return self._refused(Status.GENERATION_MISMATCH, generation)
        if not flags & EntryFlag.SEALED:
            return UseRequest() if self._allow_unsealed else self._refused(Status.NOT_SEALED, generation)
        torn = not generation or length_bytes > self._terms.ack.block_size or not self._terms.holds(block_offset)
        if torn:
            return None
        if length_bytes > self._buffer_bytes:
            return self._refused(Status.LENGTH_ERROR, generation, length_bytes)
        return Ended(Result(Status.SUCCESS, self._handle, generation, length_bytes, block_offset))

    def _refused(self, status: Status, generation: Generation, length_bytes: int = 0) -> Ended:
        return Ended(Result(status, self._handle, generation, length_bytes))


def _has_data(outcome: Ended | UseRequest | None) -> TypeGuard[Ended]:
    return isinstance(outcome, Ended) and outcome.result.ok and bool(outcome.result.length_bytes)
