"""The reference RNIC itself."""

from __future__ import annotations

import secrets
from collections.abc import Callable

from kbtp.errors import ApiMisuse
from kbtp.limits import RNIC_READ_DEPTH_MAX
from kbtp.rnic.reference.channel import ReferenceChannel
from kbtp.rnic.reference.options import ReferenceOptions
from kbtp.rnic.reference.posting import domain_of
from kbtp.rnic.reference.stream import ReferenceStream
from kbtp.verbs.api import Access, Capabilities, ProtectionDomain, Stream
from kbtp.verbs.stag_table import Domain, Region, StagTable


def _random_u32() -> int:
    return secrets.randbits(32)


class ReferenceRnic:
    """`kbtp.verbs.api.Rnic`: user-space iWARP over TCP in Python.

    Regions and domains may be used from any thread, each channel from one. An octet that was copied out of a region
    before that was revoked may still be on its way to the peer afterwards.
    Revoking a region does not take it away from work its owner has already posted.
    """

    def __init__(self, options: ReferenceOptions | None = None, *, random_u32: Callable[[], int] = _random_u32) -> None:
        self.options = options or ReferenceOptions()
        self._table = StagTable(random_u32)
        self._channels: set[ReferenceChannel] = set()

    @property
    def name(self) -> str:
        return "reference"

    @property
    def capabilities(self) -> Capabilities:
        return Capabilities(
            atomics=True,
            masked_atomics=True,
            immediate=True,
            send_with_invalidate=True,
            ordered_placement=True,
            max_ird=RNIC_READ_DEPTH_MAX,
            max_ord=RNIC_READ_DEPTH_MAX,
        )

    def allocate_pd(self) -> Domain:
        return self._table.allocate_pd()

    def register(
        self,
        buffer: object,
        access: Access,
        *,
        pd: ProtectionDomain,
        stream: Stream | None = None,
        base_to: int = 0,
    ) -> Region:
        """See `kbtp.verbs.api.Rnic.register`."""
        if stream is not None and not isinstance(stream, ReferenceStream):
            raise ApiMisuse("the stream to scope a region to must be one of this RNIC")
        domain = domain_of(pd, self._table)
        scope = stream.memory if stream is not None else None
        return self._table.register(buffer, access, pd=domain, scope=scope, base_to=base_to)

    def open_channel(self) -> ReferenceChannel:
        channel = ReferenceChannel(self._table, self.options, self._channels.discard)
        self._channels.add(channel)
        return channel

    def close(self) -> None:
        """Close every channel and revoke every region. No thread may be polling then. Idempotent."""
        for channel in list(self._channels):
            channel.close()
        self._table.close()
