"""One request of a caller's and what comes of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from kbtp.errors import ApiMisuse, KbtpError, refused
from kbtp.types import BlockOffset, BlockRef, Generation, Handle, Opcode, RequestFlag, Status, Ticket


@dataclass(frozen=True, slots=True)
class Result:
    """How one item of a batch ended.

    `status` is the target's answer, None if there was none; then `error` says why (misuse, lost
    connection, deadline). `length_bytes` is the block's Data Length, also with LENGTH_ERROR of a load.
    """

    status: Status | None
    handle: Handle = 0
    generation: Generation = 0
    length_bytes: int = 0
    block_offset: BlockOffset = 0
    error: KbtpError | None = None

    @property
    def ok(self) -> bool:
        return self.status is Status.SUCCESS

    @property
    def ref(self) -> BlockRef:
        """The block this result is about; meaningful after SUCCESS of a store or load."""
        return BlockRef(self.handle, self.generation, self.length_bytes)

    def raise_for_status(self) -> Result:
        """Itself if `ok`; else raises `error` or the `OperationRefused` of `status`."""
        if self.error is not None:
            raise self.error
        if self.status is not None and self.status is not Status.SUCCESS:
            raise refused(self.status, advice(self.status, self.handle, self.length_bytes))
        return self


def advice(status: Status, handle: Handle, length_bytes: int) -> str:
    text = {
        Status.NOT_BOUND: "nothing is stored under this handle (never stored, or freed)",
        Status.NOT_SEALED: "the block is still being written; pass allow_unsealed=True to read it all the same",
        Status.SEALED: "a sealed block does not change; free it and store anew",
        Status.ALREADY_BOUND: "the handle holds a block; free it, or let the client choose a handle",
        Status.GENERATION_MISMATCH: "the handle was freed and bound again since this reference was made",
        Status.HANDLE_OUT_OF_RANGE: "loads need a handle that the target has assigned, stores and frees one of our own",
        Status.LENGTH_ERROR: "longer than the target's block size, or the block is longer than the buffer"
        + (f": it holds {length_bytes} octets" if length_bytes else ""),
        Status.NO_SPACE: "the session's quota is used up; free blocks, or connect with a larger quota",
        Status.TICKET_MISMATCH: "the target does not know the ticket of this direct allocation, so nothing was stored; "
        "store again: the session uses ALLOC_STORE from here on",
        Status.UNSUPPORTED: "the target does not offer this operation, flag or option in this session",
        Status.ACCESS_DENIED: "namespace, authentication or identity refused",
        Status.TARGET_ERROR: "the target could not do it for a reason of its own; the block is as it was",
    }
    return f"handle {handle}: {text.get(status, 'refused by the target')}"


@dataclass(frozen=True, slots=True)
class TakenBlock:
    """A block that a ticket stands for, until BIND or the end of the ticket (draft 6.6)."""

    ticket: Ticket
    block_offset: BlockOffset


@dataclass(slots=True, eq=False)
class Operation:
    """One request on its way; becomes `result` when its completion comes or its session ends."""

    opcode: Opcode
    handle: Handle | None
    """None: the session chooses a free one (ALLOC_STORE and BIND only)."""
    generation: Generation = 0
    flags: RequestFlag = RequestFlag.NONE
    buffer: object = None
    """The memory to load into or to store from."""
    direct: bool = False
    """To be done in a direct mode (draft 6.6), as far as that can."""
    taken: TakenBlock | None = None
    """What BIND binds."""
    reserved_handle: Handle | None = None
    """What the session has chosen before it is asked for the request."""
    chosen_handle: Handle = 0
    request_id: int = 0
    length_bytes: int = 0
    result: Result | None = None
    when_done: Callable[[Operation], None] | None = field(default=None, repr=False)

    @property
    def is_empty(self) -> bool:
        return is_empty(self.buffer)

    def finish(self, result: Result) -> None:
        if self.result is None:
            self.result = result
            if self.when_done is not None:
                self.when_done(self)


def is_empty(buffer: object) -> bool:
    """True if it has no octets. What is no buffer at all is not empty: `buffer_of` judges it."""
    try:
        return memoryview(buffer).nbytes == 0  # type: ignore[arg-type]
    except (TypeError, ValueError, BufferError):
        return False  # no buffer protocol, no letter for its type, or released


def named(block: object, generation: object) -> tuple[Handle, Generation]:
    """A reference brings its generation; a bare handle means any, unless one is given (draft 5.1)."""
    handle: object = block.handle if isinstance(block, BlockRef) else block
    if isinstance(block, BlockRef) and not generation:
        generation = block.generation
    return _number("handle", handle, 64), _number("generation", generation, 16)


def _number(label: str, value: object, bits: int) -> int:
    if not isinstance(value, int) or not 0 <= value < 1 << bits:
        raise ApiMisuse(f"{label} {value!r}: expected a BlockRef or an integer of {bits} bits")
    return value


def no_handle(count: int) -> KbtpError:
    return refused(
        Status.NO_SPACE, f"all {count} handles of this session are bound; free some, or ask for more handles"
    )
