"""Work requests: checked as a whole before any is queued, then handed to the iWARP stream.

What passes here never fails later on this side, so that a post is all or none.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from kbtp.errors import ApiMisuse
from kbtp.iwarp.stream import IwarpStream
from kbtp.limits import IMMEDIATE_DATA_BYTES, RNIC_READ_DEPTH_MAX
from kbtp.verbs.api import (
    CompareSwap,
    FetchAdd,
    Immediate,
    ProtectionDomain,
    RdmaRead,
    RdmaWrite,
    Recv,
    Send,
    Sge,
    WorkRequest,
)
from kbtp.verbs.stag_table import Domain, Region, StagTable, StreamView

_U32_END = 1 << 32
_U64_END = 1 << 64

Post = Callable[[IwarpStream], None]


def domain_of(pd: ProtectionDomain, table: StagTable) -> Domain:
    if not isinstance(pd, Domain) or pd.table is not table:
        raise ApiMisuse("the protection domain must be allocated from this RNIC")
    return pd


def check_depths(ird: int, ord_: int) -> None:
    for name, depth in (("ird", ird), ("ord_", ord_)):
        if not 0 <= depth <= RNIC_READ_DEPTH_MAX:
            raise ApiMisuse(f"{name} must be 0 to {RNIC_READ_DEPTH_MAX}; got {depth}")


def octets_of(sge: Sge, view: StreamView) -> memoryview:
    """The octets of `sge`, or ApiMisuse."""
    region = sge.region
    if not isinstance(region, Region) or region.pd.table is not view.table:
        raise ApiMisuse("the region of an Sge must be registered with this RNIC")
    if not region.valid:
        raise ApiMisuse(f"the region of STag {region.stag:#010x} is revoked: register the buffer again")
    if not region.reachable_from(view):
        raise ApiMisuse("the region of an Sge must be of the stream's protection domain, and not of another stream")
    if sge.offset < 0 or sge.length < 0 or sge.offset + sge.length > region.length:
        raise ApiMisuse(
            f"an Sge must lie within its region of {region.length} octets; "
            f"got {sge.length} octets from offset {sge.offset}"
        )
    return region.view[sge.offset : sge.offset + sge.length]


def writable_octets_of(sge: Sge, view: StreamView, what: str) -> memoryview:
    octets = octets_of(sge, view)
    if octets.readonly:
        raise ApiMisuse(f"the {what} must be writable memory; this region's buffer is read-only")
    return octets


def receive_buffer(receive: Recv, view: StreamView) -> memoryview:
    return writable_octets_of(receive.sge, view, "buffer of a Recv")


def prepare(request: WorkRequest, view: StreamView, ord_: int) -> Post:
    """The call that queues `request`. Raises ApiMisuse for anything that could never work."""
    match request:
        case Send():
            return _prepare_send(request, view)
        case RdmaWrite():
            return _prepare_write(request, view)
        case RdmaRead():
            return _prepare_read(request, view, ord_)
        case FetchAdd():
            _check_depth(ord_)
            _check_u32("remote_stag", request.remote_stag)
            _check_u64s(remote_to=request.remote_to, add_data=request.add_data, add_mask=request.add_mask)
            return lambda iwarp: iwarp.post_fetch_add(
                request.wr_id, request.remote_stag, request.remote_to, request.add_data, request.add_mask
            )
        case CompareSwap():
            return _prepare_compare_swap(request, ord_)
        case Immediate():
            if len(request.data) != IMMEDIATE_DATA_BYTES:  # RFC 7306 6.3
                raise ApiMisuse(f"Immediate Data has exactly {IMMEDIATE_DATA_BYTES} octets, not {len(request.data)}")
            return lambda iwarp: iwarp.post_immediate(request.wr_id, bytes(request.data), solicited=request.solicited)
        case _:
            raise ApiMisuse(f"a work request must be one of kbtp.verbs.api; got {type(request).__name__}")


def _prepare_send(request: Send, view: StreamView) -> Post:
    payload: list[memoryview | bytes] = [bytes(request.inline)] if request.inline else []
    payload += [octets_of(sge, view) for sge in request.sges]
    _check_total(payload)
    if request.invalidate_stag is not None:
        _check_u32("invalidate_stag", request.invalidate_stag)
    return lambda iwarp: iwarp.post_send(
        request.wr_id, payload, invalidate_stag=request.invalidate_stag, solicited=request.solicited
    )


def _prepare_write(request: RdmaWrite, view: StreamView) -> Post:
    payload = [octets_of(sge, view) for sge in request.sges]
    _check_total(payload)
    _check_u32("remote_stag", request.remote_stag)
    _check_u64s(remote_to=request.remote_to)
    return lambda iwarp: iwarp.post_write(request.wr_id, payload, request.remote_stag, request.remote_to)


def _prepare_read(request: RdmaRead, view: StreamView, ord_: int) -> Post:
    sink = writable_octets_of(request.sink, view, "sink of an RdmaRead")
    _check_total([sink])
    _check_depth(ord_)
    _check_u32("remote_stag", request.remote_stag)
    _check_u64s(remote_to=request.remote_to)
    return lambda iwarp: iwarp.post_read(request.wr_id, sink, request.remote_stag, request.remote_to)


def _prepare_compare_swap(request: CompareSwap, ord_: int) -> Post:
    _check_depth(ord_)
    _check_u32("remote_stag", request.remote_stag)
    _check_u64s(
        remote_to=request.remote_to,
        swap_data=request.swap_data,
        swap_mask=request.swap_mask,
        compare_data=request.compare_data,
        compare_mask=request.compare_mask,
    )
    return lambda iwarp: iwarp.post_compare_swap(
        request.wr_id,
        request.remote_stag,
        request.remote_to,
        request.swap_data,
        request.swap_mask,
        request.compare_data,
        request.compare_mask,
    )


def _check_total(payload: Sequence[memoryview | bytes]) -> None:
    total = sum(len(piece) for piece in payload)
    if total >= _U32_END:  # RFC 5040 4: a message has at most 2^32-1 octets
        raise ApiMisuse(f"a message has at most 2^32-1 octets; got {total}")


def _check_depth(ord_: int) -> None:
    if ord_ < 1:  # it would wait in the send queue for ever (RFC 5040 6.1)
        raise ApiMisuse("RDMA Reads and atomics need an ORD of at least 1; this stream has 0")


def _check_u32(name: str, value: int) -> None:
    if not 0 <= value < _U32_END:
        raise ApiMisuse(f"{name} must be a 32-bit number; got {value}")


def _check_u64s(**values: int) -> None:
    for name, value in values.items():
        if not 0 <= value < _U64_END:
            raise ApiMisuse(f"{name} must be a 64-bit number; got {value}")
