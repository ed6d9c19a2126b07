"""Regions of the native RNIC, and work requests as the tuples that `kbtp._native` takes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

from kbtp import _native
from kbtp.atomics import MASK64
from kbtp.errors import ApiMisuse
from kbtp.limits import IMMEDIATE_DATA_BYTES
from kbtp.types import Stag
from kbtp.verbs.api import (
    Access,
    CompareSwap,
    FetchAdd,
    Immediate,
    RdmaRead,
    RdmaWrite,
    RdmaWriteImmediate,
    Recv,
    Send,
    Sge,
    WorkRequest,
)

_U32_END = 1 << 32

# What stands first in the tuple of a work request.
_SEND, _RDMA_WRITE, _RDMA_READ, _FETCH_ADD, _COMPARE_SWAP, _IMMEDIATE, _WRITE_IMMEDIATE = range(7)

Request: TypeAlias = tuple[object, ...]
Piece: TypeAlias = tuple[_native.Region, int, int]
Receive: TypeAlias = tuple[int, Piece]


class NativeRegion:
    """`kbtp.verbs.api.MemoryRegion`."""

    __slots__ = ("_view", "native")

    def __init__(self, native: _native.Region, view: memoryview) -> None:
        self.native = native
        self._view = view

    @property
    def stag(self) -> Stag:
        return self.native.stag

    @property
    def base_to(self) -> int:
        return self.native.base_to

    @property
    def length(self) -> int:
        return self._view.nbytes

    @property
    def access(self) -> Access:
        return Access(self.native.access)

    @property
    def view(self) -> memoryview:
        return self._view

    @property
    def valid(self) -> bool:
        return self.native.valid

    def revoke(self) -> None:
        self.native.revoke()


def request_tuple(request: WorkRequest) -> Request:
    """The tuple of `request`, with every number in the range of its field. The rest is checked in Rust."""
    match request:
        case Send(wr_id, inline, sges, invalidate_stag, solicited):
            if invalidate_stag is not None:
                _check_u32("invalidate_stag", invalidate_stag)
            _check_u64s(wr_id=wr_id)
            return _SEND, wr_id, bytes(inline), _pieces(sges), invalidate_stag, bool(solicited)
        case RdmaWrite(wr_id, sges, stag, to):
            _check_u32("remote_stag", stag)
            _check_u64s(wr_id=wr_id, remote_to=to)
            return _RDMA_WRITE, wr_id, _pieces(sges), stag, to
        case RdmaRead(wr_id, sink, stag, to):
            _check_u32("remote_stag", stag)
            _check_u64s(wr_id=wr_id, remote_to=to)
            return _RDMA_READ, wr_id, _piece(sink), stag, to
        case FetchAdd(wr_id, stag, to, data, mask):
            _check_u32("remote_stag", stag)
            _check_u64s(wr_id=wr_id, remote_to=to, add_data=data, add_mask=mask)
            return _FETCH_ADD, wr_id, stag, to, data, mask
        case CompareSwap(wr_id, stag, to, swap, swap_mask, compare, compare_mask):
            _check_u32("remote_stag", stag)
            _check_u64s(wr_id=wr_id, remote_to=to, swap_data=swap, swap_mask=swap_mask)
            _check_u64s(compare_data=compare, compare_mask=compare_mask)
            return _COMPARE_SWAP, wr_id, stag, to, swap, swap_mask, compare, compare_mask
        case Immediate(wr_id, data, solicited):
            if len(data) != IMMEDIATE_DATA_BYTES:  # RFC 7306 6.3
                raise ApiMisuse(f"Immediate Data has exactly {IMMEDIATE_DATA_BYTES} octets, not {len(data)}")
            _check_u64s(wr_id=wr_id)
            return _IMMEDIATE, wr_id, bytes(data), bool(solicited)
        case RdmaWriteImmediate(wr_id, inline, stag, to, immediate):
            _check_u32("remote_stag", stag)
            _check_u32("immediate", immediate)
            _check_u64s(wr_id=wr_id, remote_to=to)
            return _WRITE_IMMEDIATE, wr_id, bytes(inline), stag, to, immediate
        case _:
            raise ApiMisuse(f"a work request must be one of kbtp.verbs.api; got {type(request).__name__}")


def receive_tuples(receives: Sequence[Recv]) -> list[Receive]:
    for receive in receives:
        _check_u64s(wr_id=receive.wr_id)
    return [(receive.wr_id, _piece(receive.sge)) for receive in receives]


def _pieces(sges: Sequence[Sge]) -> list[Piece]:
    return [_piece(sge) for sge in sges]


def _piece(sge: Sge) -> Piece:
    region = sge.region
    if not isinstance(region, NativeRegion):
        raise ApiMisuse("the region of an Sge must be registered with this RNIC")
    if sge.offset < 0 or sge.length < 0 or sge.offset + sge.length > region.length:
        raise ApiMisuse(
            f"an Sge must lie within its region of {region.length} octets; "
            f"got {sge.length} octets from offset {sge.offset}"
        )
    return region.native, sge.offset, sge.length


def _check_u32(name: str, value: int) -> None:
    if not 0 <= value < _U32_END:
        raise ApiMisuse(f"{name} must be a 32-bit number; got {value}")


def _check_u64s(**values: int) -> None:
    for name, value in values.items():
        if not 0 <= value <= MASK64:
            raise ApiMisuse(f"{name} must be a 64-bit number; got {value}")
