"""An initiator's session: HELLO, credits, handles, which request a completion answers. No I/O, no clock.

Operations are submitted in any number; `ready` gives out as many as there are credits (profile 3
"Credits"), `received` takes each message of the target.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from kbtp import limits
from kbtp.atomics import MASK64
from kbtp.errors import ApiMisuse, KbtpError, PeerMisbehaved, WireFormatError, refused
from kbtp.initiator.direct import direct_checks
from kbtp.initiator.operations import Operation, Result, no_handle
from kbtp.keys import Key
from kbtp.types import DIRECT_MODES, Feature, Handle, HelloAckFlag, Opcode, RequestFlag, Status, TerminateCause
from kbtp.verbs.api import Capabilities, MemoryRegion
from kbtp.verbs.requester import RequestGrant
from kbtp.wire import (
    AllocStore,
    Bind,
    Completion,
    CompletionDescriptor,
    CompletionRecord,
    DataDescriptor,
    Free,
    Hello,
    HelloAck,
    Load,
    Nonces,
    Store,
    check_hello_ack,
    parse_response,
    sign_hello,
)

_U32_MAX = (1 << 32) - 1
HELLO_REQUEST_ID = 0


@dataclass(frozen=True, slots=True)
class InitiatorConfig:
    """What an initiator asks a target for. Zero means the target's default. Raises `ApiMisuse`."""

    initiator_id: bytes | None = None
    """16 octets under which blocks outlive the connection; None: anonymous, blocks end with it (profile 3)."""
    quota: int = 0
    """Blocks to allocate at most."""
    handles: int = 0
    name: str | None = None
    namespace: bytes | None = None
    key: Key | None = None
    """What to authenticate with (profile 4); None: not at all."""
    completion_credits: int = limits.DEFAULT_COMPLETION_CREDITS
    max_message_bytes: int = limits.DEFAULT_INITIATOR_MAX_MESSAGE_BYTES
    read_depth: int = limits.DEFAULT_READ_DEPTH
    inline_max_bytes: int = limits.DEFAULT_INLINE_MAX_BYTES
    """Data up to this length travels inside the request where the target's Max Message allows."""
    direct: Feature = Feature.NONE
    """DIRECT_LOAD, DIRECT_ALLOC or both: direct modes to ask for (draft 6.6)."""
    records: bool = False
    """Have requests completed by records (draft 6.5) where RNIC and target can."""

    def __post_init__(self) -> None:
        if self.initiator_id is not None and (
            not isinstance(self.initiator_id, bytes)
            or len(self.initiator_id) != limits.INITIATOR_ID_BYTES
            or not any(self.initiator_id)
        ):
            raise ApiMisuse(f"initiator_id {self.initiator_id!r}: expected 16 octets that are not all zero, or None")
        for label, value, low, high in (
            ("quota", self.quota, 0, (1 << 32) - 1),
            ("handles", self.handles, 0, (1 << 64) - 1),
            ("completion_credits", self.completion_credits, 1, limits.CREDITS_MAX),
            ("max_message_bytes", self.max_message_bytes, limits.MIN_MAX_MESSAGE_BYTES, limits.MAX_MESSAGE_MAX_BYTES),
            ("read_depth", self.read_depth, 0, limits.IRD_ORD_MAX),
            ("inline_max_bytes", self.inline_max_bytes, 0, limits.MAX_MESSAGE_MAX_BYTES),
        ):
            if not low <= value <= high:
                raise ApiMisuse(f"{label} of {value}: must be {low} to {high}")
        if self.direct & ~DIRECT_MODES:
            raise ApiMisuse(f"direct {self.direct!r}: DIRECT_LOAD and DIRECT_ALLOC are the direct modes there are")
        if self.direct and not self.read_depth:
            raise ApiMisuse("read_depth of 0: a direct mode reads from the target, and needs 1 at least")
        self.hello().pack()  # raises `ApiMisuse` for a name or namespace that does not fit

    def features(self, capabilities: Capabilities, read_depth: int) -> Feature:
        """What to ask for on a stream of an RNIC that can have `read_depth` reads outstanding (profile 3)."""
        features = Feature.INVALIDATE if capabilities.invalidated_by_peers else Feature.NONE
        if self.records and capabilities.write_with_immediate and capabilities.ordered_placement:  # draft 6.5
            features |= Feature.RECORD_COMPLETION
        if read_depth:
            features |= self.direct & Feature.DIRECT_LOAD
            if self.direct & Feature.DIRECT_ALLOC and capabilities.atomics:
                masked = Feature.MASKED_ATOMICS if capabilities.masked_atomics else Feature.NONE
                features |= Feature.DIRECT_ALLOC | masked
        return features

    def hello(self, requested_features: Feature = Feature.INVALIDATE) -> Hello:
        return Hello(
            request_id=HELLO_REQUEST_ID,
            requested_features=requested_features,
            requested_quota=self.quota,
            requested_handles=self.handles,
            completion_credits=self.completion_credits,
            max_message=self.max_message_bytes,
            initiator_id=self.initiator_id or bytes(limits.INITIATOR_ID_BYTES),
            name=self.name,
            namespace=self.namespace,
        )


@dataclass(frozen=True, slots=True)
class SaidHello:
    """A HELLO as it leaves on one connection."""

    octets: bytes
    nonces: Nonces
    features: Feature

    @classmethod
    def on(cls, config: InitiatorConfig, nonces: Nonces, features: Feature = Feature.INVALIDATE) -> SaidHello:
        """A HELLO that asks for `features`."""
        hello = config.hello(features)
        octets = hello.pack() if config.key is None else sign_hello(hello, config.key, nonces)
        return cls(octets, nonces, features)


class HandleChooser:
    """Picks a handle of the session's own range that is not known to be bound.

    After RESUMED some are bound that this process does not know of: the target then answers
    ALREADY_BOUND, which marks the handle, and another is tried.
    """

    def __init__(self, first: Handle, count: int) -> None:
        self._first = first
        self._count = count
        self._bound: set[Handle] = set()
        self._next = 0

    def take(self) -> Handle | None:
        """A handle, marked as bound; None if all are."""
        for _ in range(self._count if len(self._bound) < self._count else 0):
            handle = self._first + self._next
            self._next = (self._next + 1) % self._count
            if handle not in self._bound:
                self._bound.add(handle)
                return handle
        return None

    def bound(self, handle: Handle) -> None:
        if 0 <= handle - self._first < self._count:
            self._bound.add(handle)

    def free(self, handle: Handle) -> None:
        self._bound.discard(handle)


class InitiatorSession:
    """From HELLO_ACK to the end of the stream."""

    def __init__(self, config: InitiatorConfig, ack: HelloAck) -> None:
        """`ack` is the accepting HELLO_ACK, already checked by `accepted`."""
        self.config = config
        self.ack = ack
        self.handles = HandleChooser(ack.first_handle, ack.handle_count)
        self._queue: deque[Operation] = deque()
        self._outstanding: dict[int, Operation] = {}
        self._next_request_id = HELLO_REQUEST_ID + 1
        self._used_blocks = ack.bound_blocks
        self.direct_alloc_is_over = False
        """A ticket ran out (profile 6.11)."""

    @property
    def records(self) -> bool:
        """Requests are completed by completion records (draft 6.5)."""
        return bool(self.ack.granted_features & Feature.RECORD_COMPLETION)

    @property
    def is_direct(self) -> bool:
        return bool(self.ack.granted_features & DIRECT_MODES)

    @property
    def outstanding(self) -> int:
        return len(self._outstanding)

    @property
    def inline_max_bytes(self) -> int:
        """Octets of data that a request may carry inside (profile 3 "Inline data")."""
        room = self.ack.max_message - limits.COMMON_HEADER_BYTES - limits.DATA_DESCRIPTOR_BYTES
        room -= limits.COMPLETION_DESCRIPTOR_BYTES if self.records else 0
        return min(self.config.inline_max_bytes, room)

    def grant(self, receives: MemoryRegion) -> RequestGrant:
        """What an RNIC that carries the requests itself has to know. `receives` holds the receive buffers."""
        return RequestGrant(
            request_credits=self.ack.request_credits,
            first_handle=self.ack.first_handle,
            handle_count=self.ack.handle_count,
            invalidate=bool(self.ack.granted_features & Feature.INVALIDATE),
            inline_max_bytes=self.inline_max_bytes,
            receives=receives,
            max_message_bytes=self.config.max_message_bytes,
        )

    def submit(self, operation: Operation) -> None:
        self._queue.append(operation)

    def ready(self) -> Operation | None:
        """The next operation if there is a credit for it, with its handle chosen and its Request ID given.

        The caller then hands it to `request` or, if its buffer cannot be used, to `withdraw`.
        """
        while self._queue and len(self._outstanding) < self.ack.request_credits:
            operation = self._queue.popleft()
            handle = operation.handle
            if handle is None and self.reserve_handle(operation):
                handle, operation.reserved_handle = operation.reserved_handle, None
            if handle is None:
                operation.finish(Result(Status.NO_SPACE, error=no_handle(self.ack.handle_count)))
                continue
            operation.chosen_handle = handle
            operation.request_id = self._next_request_id
            self._next_request_id = (self._next_request_id + 1) & ((1 << 64) - 1)
            self._outstanding[operation.request_id] = operation
            self._used_blocks += operation.opcode is Opcode.ALLOC_STORE
            return operation
        return None

    def withdraw(self, operation: Operation, error: KbtpError) -> None:
        """`operation` from `ready` will not be sent: it ends with `error`."""
        del self._outstanding[operation.request_id]
        self._used_blocks -= operation.opcode is Opcode.ALLOC_STORE
        if operation.handle is None:
            self.handles.free(operation.chosen_handle)
        operation.finish(Result(None, operation.chosen_handle, error=error))

    def reserve_handle(self, operation: Operation) -> bool:
        """Choose the handle of `operation` now, unless it has one; False if all are bound."""
        if operation.handle is None and operation.reserved_handle is None:
            operation.reserved_handle = self.handles.take()
        return operation.handle is not None or operation.reserved_handle is not None

    def reserve_block(self) -> bool:
        """Count a ticket before it is taken (draft 3.4, profile 6.8); False if that is more than the quota.

        It counts until a FREE of what was bound with it has completed.
        """
        if self._used_blocks >= self.ack.allocation_quota:
            return False
        self._used_blocks += 1
        return True

    def request(
        self,
        operation: Operation,
        *,
        stag: int,
        to: int,
        length: int,
        inline: bytes | None,
        invalidate: bool = False,
        record: CompletionDescriptor | None = None,
    ) -> bytes:
        """The request of `operation`: its data inline, or in the buffer that `stag`, `to`, `length` name.

        `invalidate`: the STag is for this request alone, so its completion may invalidate it (draft 5.1), unless it
        is a record, which goes to `record`.
        """
        operation.length_bytes = length
        flags = operation.flags
        if record is not None:
            flags |= RequestFlag.RECORD
        if inline is not None:
            flags |= RequestFlag.INLINE
        elif invalidate and record is None and self.ack.granted_features & Feature.INVALIDATE:
            flags |= RequestFlag.INVALIDATE
        common = (operation.request_id, operation.chosen_handle, operation.generation)
        data = DataDescriptor(stag, to, length)
        if operation.opcode is Opcode.FREE:
            return Free(*common, flags, record).pack()
        if operation.opcode is Opcode.BIND:
            assert operation.taken is not None
            return Bind(*common, flags, operation.taken.ticket, length, operation.taken.block_offset, record).pack()
        if operation.opcode is Opcode.LOAD:
            return Load(*common, flags, data, record).pack()
        kind = Store if operation.opcode is Opcode.STORE else AllocStore
        return kind(*common, flags, data, record, inline or b"").pack()

    def received(self, message: memoryview) -> Operation | None:
        """The operation that `message` ends, its `result` set; None if it was put back to try another handle.

        Raises `PeerMisbehaved` for anything but a completion of an outstanding request.
        """
        completion = _parse_completion(message)
        operation = self._outstanding.get(completion.request_id)
        if operation is None:
            raise _misbehaved(f"COMPLETION for Request ID {completion.request_id}, which is not outstanding")
        if completion.handle != operation.chosen_handle:
            raise _misbehaved(f"COMPLETION names handle {completion.handle}, asked was {operation.chosen_handle}")
        return self._ended(operation, completion)

    def outstanding_with(self, immediate: int) -> Operation:
        """The operation whose record has come: `immediate` is the low 32 bits of its Request ID (profile 7)."""
        for operation in self._outstanding.values():
            if operation.request_id & _U32_MAX == immediate:
                return operation
        raise _misbehaved(f"a completion record for Request ID {immediate:#x} (32 bits), which is not outstanding")

    def recorded(self, operation: Operation, octets: bytes) -> Operation | None:
        """As `received`, of the completion record of `operation`."""
        try:
            record = CompletionRecord.parse(octets)
        except WireFormatError as error:
            raise _misbehaved(f"a completion record: {error}") from error
        if record.request_id != operation.request_id:
            raise _misbehaved(f"the record of Request ID {operation.request_id} names {record.request_id}")
        completion = Completion(
            record.request_id,
            operation.chosen_handle,
            record.generation,
            record.status,
            record.data_length,
            record.block_offset,
        )
        return self._ended(operation, completion)

    def _ended(self, operation: Operation, completion: Completion) -> Operation | None:
        if (
            operation.opcode is Opcode.LOAD
            and completion.status is Status.SUCCESS
            and completion.data_length > operation.length_bytes
        ):
            raise _misbehaved(f"LOAD of {completion.data_length} octets into {operation.length_bytes}")
        if operation.opcode is Opcode.BIND and completion.status is Status.SUCCESS:
            _check_bound(operation, completion)
        del self._outstanding[completion.request_id]
        if self._try_another_handle(operation, completion):
            return None
        self._note_handle(operation, completion)
        operation.finish(
            Result(
                Status(completion.status),
                completion.handle,
                completion.generation,
                completion.data_length,
                completion.block_offset,
            )
        )
        return operation

    def _try_another_handle(self, operation: Operation, completion: Completion) -> bool:
        if operation.handle is not None or completion.status is not Status.ALREADY_BOUND:
            return False
        self._used_blocks -= operation.opcode is Opcode.ALLOC_STORE
        self._queue.appendleft(operation)
        return True

    def _note_handle(self, operation: Operation, completion: Completion) -> None:
        success = completion.status is Status.SUCCESS
        if operation.opcode in (Opcode.ALLOC_STORE, Opcode.BIND):
            # A ticket whose BIND was refused is still out (profile 6.11).
            self._used_blocks -= operation.opcode is Opcode.ALLOC_STORE and not success
            if success or completion.status is Status.ALREADY_BOUND:
                self.handles.bound(operation.chosen_handle)
            elif operation.handle is None:
                self.handles.free(operation.chosen_handle)
        elif operation.opcode is Opcode.FREE and (success or completion.status is Status.NOT_BOUND):
            self._used_blocks -= success
            self.handles.free(operation.chosen_handle)

    def fail(self, error: KbtpError) -> None:
        """The stream has ended: everything submitted ends with `error`."""
        for operation in [*self._outstanding.values(), *self._queue]:
            operation.finish(Result(None, operation.chosen_handle, error=error))
        self._outstanding.clear()
        self._queue.clear()


def accepted(config: InitiatorConfig, said: SaidHello, message: memoryview) -> HelloAck:
    """The HELLO_ACK in `message`, if it opens a session. `said` is what it answers.

    Raises the `OperationRefused` of its status, or `PeerMisbehaved` if it is not a HELLO_ACK or grants what
    was not asked or cannot be (profile 2), or if it does not prove that the target has our key (profile 4).
    """
    try:
        ack = parse_response(message)
    except WireFormatError as error:
        raise _misbehaved(f"answer to HELLO: {error}") from error
    if isinstance(ack, Completion):
        if ack.status in (Status.MALFORMED, Status.UNSUPPORTED):
            raise refused(Status(ack.status), "the target did not understand HELLO")
        raise _misbehaved("COMPLETION where HELLO_ACK was due")
    if ack.status is not Status.SUCCESS:
        raise refused(Status(ack.status), _hello_advice(Status(ack.status), config.key))
    if config.key is not None:
        try:
            check_hello_ack(message, ack.auth, config.key, said.nonces, said.octets)
        except WireFormatError as error:
            raise _misbehaved(str(error)) from error
    for label, holds in (
        ("Request ID", ack.request_id == HELLO_REQUEST_ID),
        ("Granted Features", not ack.granted_features & ~(said.features | Feature.INVALIDATE)),
        ("Block Size", limits.BLOCK_SIZE_MIN_BYTES <= ack.block_size <= limits.BLOCK_SIZE_MAX_BYTES),
        ("Request Credits", 1 <= ack.request_credits <= config.completion_credits),
        ("Max Message", ack.max_message >= limits.MIN_MAX_MESSAGE_BYTES),
        ("Allocation Quota", ack.allocation_quota <= ack.pool_blocks),
        ("Handle Count", 1 <= ack.handle_count <= ack.table_handles),
        ("First Handle", (ack.first_handle - ack.table_base_handle) & MASK64 <= ack.table_handles - ack.handle_count),
        ("RESUMED", config.initiator_id is not None or not ack.flags & HelloAckFlag.RESUMED),
        *direct_checks(ack),
    ):
        if not holds:
            raise _misbehaved(f"HELLO_ACK with an impossible {label}: {ack}")
    return ack


def _hello_advice(status: Status, key: Key | None) -> str:
    if status is Status.ACCESS_DENIED:
        other = (
            "a session with this initiator_id is still open, or the target wants a key (give key or key_file)"
            if key is None
            else f"the target does not have our key {key.name}, or it has no keys at all"
        )
        return f"HELLO refused: the namespace differs from the target's, or {other}"
    if status is Status.NO_SPACE:
        return "HELLO refused: the target has no quota or no handles left; ask for less or free some"
    return "HELLO refused"


def _parse_completion(message: memoryview) -> Completion:
    try:
        response = parse_response(message)
    except WireFormatError as error:
        raise _misbehaved(f"COMPLETION: {error}") from error
    if not isinstance(response, Completion):
        raise _misbehaved("HELLO_ACK where a COMPLETION was due")
    return response


def _check_bound(bind: Operation, completion: Completion) -> None:
    """Profile 8.6: on SUCCESS BIND tells what it bound."""
    assert bind.taken is not None
    if (completion.data_length, completion.block_offset) != (bind.length_bytes, bind.taken.block_offset):
        raise _misbehaved(
            f"BIND of {completion.data_length} octets at {completion.block_offset:#x}, "
            f"asked was {bind.length_bytes} at {bind.taken.block_offset:#x}"
        )


def _misbehaved(message: str) -> PeerMisbehaved:
    return PeerMisbehaved(TerminateCause.RDMAP_UNSPECIFIED, message)
