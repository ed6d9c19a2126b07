"""Which status a request gets, in the order of profile 1: the first check that fails names it.

UNSUPPORTED, MALFORMED and NO_SESSION are found when a request arrives; the rest when its turn
comes, because the requests before it on the same handle may change the answer.
"""

from __future__ import annotations

from kbtp.blocks import Entry
from kbtp.types import Feature, Opcode, RequestFlag, Status
from kbtp.wire import AllocStore, Bind, CommonHeader, DataDescriptor, Free, Load, Store

TargetRequest = Load | Store | AllocStore | Free | Bind


def granted(header: CommonHeader, features: Feature, read_depth: int) -> bool:
    """False if `header` asks for what this session does not have: UNSUPPORTED, found with the flags.

    `read_depth` is how many RDMA Reads the target may have outstanding towards this initiator.
    """
    if header.flags & RequestFlag.RECORD and not features & Feature.RECORD_COMPLETION:
        return False  # draft 6.5
    if header.flags & RequestFlag.INVALIDATE and not features & Feature.INVALIDATE:
        return False
    if header.opcode == Opcode.BIND:
        return bool(features & Feature.DIRECT_ALLOC)  # profile 8.3
    fetches = header.opcode in (Opcode.STORE, Opcode.ALLOC_STORE) and not header.flags & RequestFlag.INLINE
    return not (fetches and read_depth == 0)  # profile 3 "RDMA Reads", 8.7


def refusal(request: TargetRequest, entry: Entry | None, block_size_bytes: int) -> Status | None:
    """The status that refuses `request`, or None; `entry` is None where the handle is out of range.

    NO_SPACE and the ticket statuses come after these and need the ring's owner.
    """
    if entry is None:
        return Status.HANDLE_OUT_OF_RANGE
    if isinstance(request, AllocStore | Bind):
        if entry.valid:  # draft 6.3 step 1
            return Status.ALREADY_BOUND
    elif not entry.valid:  # draft 6.1, 6.2 and 6.4 step 1
        return Status.NOT_BOUND
    if request.generation not in (0, entry.generation):  # draft 5.1: zero means any
        return Status.GENERATION_MISMATCH
    if isinstance(request, Store) and entry.sealed:  # draft 6.2 step 1
        return Status.SEALED
    if isinstance(request, Load):
        if not entry.sealed and not request.flags & RequestFlag.ALLOW_UNSEALED:  # draft 6.1 step 1
            return Status.NOT_SEALED
        if entry.data_length > request.data.length:  # draft 6.1 step 2
            return Status.LENGTH_ERROR
    if isinstance(request, Store | AllocStore) and not _data_fits(request, block_size_bytes):
        return Status.LENGTH_ERROR
    if isinstance(request, Bind) and request.data_length > block_size_bytes:
        return Status.LENGTH_ERROR
    return None


def _data_fits(request: Store | AllocStore, block_size_bytes: int) -> bool:
    if request.flags & RequestFlag.INLINE and request.data.length != len(request.inline_data):
        return False
    return request.data.length <= block_size_bytes


def data_descriptor(request: TargetRequest) -> DataDescriptor:
    assert not isinstance(request, Free | Bind)  # they move no data
    return request.data


def invalidated_stag(request: TargetRequest) -> int | None:
    """Which STag the completion of a well-formed request invalidates (draft 5.1 INVALIDATE, profile 2)."""
    if isinstance(request, Free | Bind) or not request.flags & RequestFlag.INVALIDATE:
        return None
    return request.data.stag
