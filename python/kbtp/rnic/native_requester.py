"""The native RNIC's `kbtp.verbs.requester.Requester`: what carries an initiator's requests in Rust."""

from __future__ import annotations

from functools import partial

from kbtp import _native
from kbtp.errors import ApiMisuse
from kbtp.rnic.native_requests import NativeRegion
from kbtp.types import BlockRef
from kbtp.verbs.api import MemoryRegion
from kbtp.verbs.requester import Prepare, RequestGrant


class NativeRequester:
    """Calls that are made for each request go to Rust without a detour."""

    __slots__ = ("_native", "run", "run_one", "submit", "take")

    def __init__(self, stream: _native.Stream, grant: RequestGrant, prepare: Prepare) -> None:
        self._native = native = _native.Requester(
            stream,
            request_credits=grant.request_credits,
            first_handle=grant.first_handle,
            handle_count=grant.handle_count,
            invalidate=grant.invalidate,
            inline_max_bytes=grant.inline_max_bytes,
            receives=_region(grant.receives),
            max_message_bytes=grant.max_message_bytes,
            prepare=partial(_prepared, prepare),
        )
        self.submit = native.submit
        self.run = native.run
        self.run_one = native.run_one
        self.take = native.take

    def add_region(self, region: MemoryRegion, address: int) -> None:
        self._native.add_region(_region(region), address)


def _prepared(
    prepare: Prepare, opcode: int, generation: object, block: object, buffer: object
) -> tuple[BlockRef | None, object]:
    found, octets = prepare(opcode, generation, block, buffer)
    if octets is None:
        return found, b""
    return found, _native.Octets(octets.address, octets.view.nbytes, octets.writable, octets.view)


def _region(region: MemoryRegion) -> _native.Region:
    if not isinstance(region, NativeRegion):
        raise ApiMisuse("the region must be registered with this RNIC")
    return region.native
