"""What a caller asks for and what comes of it: operations on blocks, references to them, results."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

from kbtp.errors import ApiMisuse, KbtpError, refused
from kbtp.types import BlockOffset, Generation, Handle, Opcode, RequestFlag, Status


@dataclass(frozen=True, slots=True)
class BlockRef:
    """Names one stored block: what one process stores, another loads by.

    `generation` is the binding's: once the block is freed, the reference is refused and never
    served from whatever the handle is bound to next. Plain values, so it travels as JSON or in a message.
    """

    handle: Handle
    generation: Generation
    length_bytes: int


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
            raise refused(self.status, _advice(self))
        return self


def _advice(result: Result) -> str:
    text = {
        Status.NOT_BOUND: "nothing is stored under this handle (never stored, or freed)",
        Status.NOT_SEALED: "the block is still being written; pass allow_unsealed=True to read it all the same",
        Status.SEALED: "a sealed block does not change; free it and store anew",
        Status.ALREADY_BOUND: "the handle holds a block; free it, or let the client choose a handle",
        Status.GENERATION_MISMATCH: "the handle was freed and bound again since this reference was made",
        Status.HANDLE_OUT_OF_RANGE: "loads need a handle that the target has assigned, stores and frees one of our own",
        Status.LENGTH_ERROR: "longer than the target's block size, or the block is longer than the buffer"
        + (f": it holds {result.length_bytes} octets" if result.length_bytes else ""),
        Status.NO_SPACE: "the session's quota is used up; free blocks, or connect with a larger quota",
        Status.UNSUPPORTED: "the target does not offer this operation, flag or option in this session",
        Status.ACCESS_DENIED: "namespace, authentication or identity refused",
        Status.TARGET_ERROR: "the target could not do it for a reason of its own; the block is as it was",
    }
    return f"handle {result.handle}: {text.get(result.status or Status.TARGET_ERROR, 'refused by the target')}"


@dataclass(slots=True, eq=False)
class Operation:
    """One request on its way; becomes `result` when its completion comes or its session ends."""

    opcode: Opcode
    handle: Handle | None
    """None: the session chooses a free one (ALLOC_STORE only)."""
    generation: Generation = 0
    flags: RequestFlag = RequestFlag.NONE
    buffer: object = None
    """The memory to load into or to store from."""
    chosen_handle: Handle = 0
    request_id: int = 0
    length_bytes: int = 0
    result: Result | None = None
    when_done: Callable[[Operation], None] | None = field(default=None, repr=False)

    @property
    def is_empty(self) -> bool:
        """True if the buffer has no octets. What is no buffer at all is not empty: `buffer_of` judges it."""
        try:
            return memoryview(self.buffer).nbytes == 0  # type: ignore[arg-type]
        except (TypeError, ValueError, BufferError):
            return False  # no buffer protocol, no letter for its type, or released

    def finish(self, result: Result) -> None:
        if self.result is None:
            self.result = result
            if self.when_done is not None:
                self.when_done(self)


def load_operation(block: BlockRef | Handle, into: object, generation: Generation, allow_unsealed: bool) -> Operation:
    handle, generation = _named(block, generation)
    flags = RequestFlag.ALLOW_UNSEALED if allow_unsealed else RequestFlag.NONE
    return Operation(Opcode.LOAD, handle, generation, flags, into)


def store_operation(block: BlockRef | Handle, data: object, generation: Generation, seal: bool) -> Operation:
    handle, generation = _named(block, generation)
    return Operation(Opcode.STORE, handle, generation, _seal(seal), data)


def alloc_store_operation(data: object, handle: Handle | None, seal: bool) -> Operation:
    if handle is not None:
        _check_field("handle", handle, 64)
    return Operation(Opcode.ALLOC_STORE, handle, 0, _seal(seal), data)


def free_operation(block: BlockRef | Handle, generation: Generation) -> Operation:
    handle, generation = _named(block, generation)
    return Operation(Opcode.FREE, handle, generation)


def _seal(seal: bool) -> RequestFlag:
    return RequestFlag.SEAL if seal else RequestFlag.NONE


def _named(block: BlockRef | Handle, generation: Generation) -> tuple[Handle, Generation]:
    """A reference brings its generation; a bare handle means any, unless one is given (draft 5.1)."""
    handle = block.handle if isinstance(block, BlockRef) else block
    if isinstance(block, BlockRef) and not generation:
        generation = block.generation
    _check_field("handle", handle, 64)
    _check_field("generation", generation, 16)
    return handle, generation


def _check_field(label: str, value: object, bits: int) -> None:
    if not isinstance(value, int) or not 0 <= value < 1 << bits:
        raise ApiMisuse(f"{label} {value!r}: expected a BlockRef or an integer of {bits} bits")


def load_batch(blocks: Sequence[BlockRef | Handle], into: Sequence[object], allow_unsealed: bool) -> list[Operation]:
    _equally_many(blocks=blocks, into=into)
    return [
        _item(Opcode.LOAD, partial(load_operation, block, buffer, 0, allow_unsealed))
        for block, buffer in zip(blocks, into, strict=True)
    ]


def store_batch(blocks: Sequence[BlockRef | Handle], data: Sequence[object], seal: bool) -> list[Operation]:
    _equally_many(blocks=blocks, data=data)
    return [
        _item(Opcode.STORE, partial(store_operation, block, buffer, 0, seal))
        for block, buffer in zip(blocks, data, strict=True)
    ]


def alloc_store_batch(data: Sequence[object], handles: Sequence[Handle] | None, seal: bool) -> list[Operation]:
    chosen: Sequence[Handle | None] = [None] * len(data) if handles is None else handles
    _equally_many(data=data, handles=chosen)
    return [
        _item(Opcode.ALLOC_STORE, partial(alloc_store_operation, buffer, handle, seal))
        for buffer, handle in zip(data, chosen, strict=True)
    ]


def free_batch(blocks: Sequence[BlockRef | Handle]) -> list[Operation]:
    return [_item(Opcode.FREE, partial(free_operation, block, 0)) for block in blocks]


def _item(opcode: Opcode, make: Callable[[], Operation]) -> Operation:
    """What `make` makes; if it raises `ApiMisuse`, an operation that has already ended with it."""
    try:
        return make()
    except ApiMisuse as error:
        return Operation(opcode, None, result=Result(None, error=error))


def _equally_many(**arguments: Sequence[object]) -> None:
    lengths = {name: len(values) for name, values in arguments.items()}
    if len(set(lengths.values())) > 1:
        said = ", ".join(f"{count} {name}" for name, count in lengths.items())
        raise ApiMisuse(f"{said}: a batch needs equally many of each")
