"""The native RNIC: user-space iWARP in Rust (`kbtp._native`), behind `kbtp.verbs.api`.

Here is translation alone: dataclasses to tuples and back, one call for each batch. What a post, a right or a peer's
octets mean is decided in Rust, the same way as in `kbtp.rnic.reference`.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from kbtp import _native
from kbtp.atomics import MASK64
from kbtp.errors import ApiMisuse
from kbtp.iwarp.mpa import MpaOptions
from kbtp.limits import (
    DISCONNECT_S,
    GOODBYE_S,
    MPA_REQUEST_TIMEOUT_S,
    RNIC_ACCEPT_PAUSE_S,
    RNIC_READ_DEPTH_MAX,
    RNIC_SPIN_MAX_US,
    RNIC_SPIN_US,
    TCP_USER_TIMEOUT_S,
)
from kbtp.rnic.native_requester import NativeRequester
from kbtp.rnic.native_requests import NativeRegion, receive_tuples, request_tuple
from kbtp.rnic.native_store import NativeBlockStore
from kbtp.types import Handle, TerminateCause, Ticket
from kbtp.verbs.api import (
    Access,
    BatchDone,
    Capabilities,
    Established,
    Event,
    MemoryRegion,
    ProtectionDomain,
    Recv,
    Rejected,
    Stream,
    StreamEnded,
    WcOpcode,
    WcStatus,
    WorkCompletion,
    WorkRequest,
)
from kbtp.verbs.buffers import buffer_of
from kbtp.verbs.offload import SessionGrant
from kbtp.verbs.requester import Prepare, RequestGrant

_PORT_END = 1 << 16

# What stands first in the tuple of an event.
_COMPLETION, _CONNECT_REQUEST, _ESTABLISHED, _REJECTED, _STREAM_ENDED, _FREED, _BATCH_DONE = range(7)

_OPCODES = {opcode.value: opcode for opcode in WcOpcode}

joined_checksum = _native.joined_checksum


def build() -> dict[str, str | bool]:
    """See `kbtp._native.build`."""
    return _native.build()


@dataclass(frozen=True, slots=True)
class NativeOptions:
    """How a native RNIC starts its streams, and how long it waits for what. All times in seconds but `spin_us`.

    As `kbtp.rnic.reference.ReferenceOptions`. Whoever waits looks again for `spin_us` microseconds before it blocks, an
    event loop after each thing that came: less latency for some processor time. On one processor nobody does.
    """

    mpa: MpaOptions = field(default_factory=MpaOptions)
    mpa_request_timeout_s: float = MPA_REQUEST_TIMEOUT_S
    goodbye_s: float = GOODBYE_S
    disconnect_s: float = DISCONNECT_S
    accept_pause_s: float = RNIC_ACCEPT_PAUSE_S
    tcp_user_timeout_s: float = TCP_USER_TIMEOUT_S
    spin_us: int = field(default_factory=lambda: _spin_us(os.environ.get("KBTP_SPIN_US") or RNIC_SPIN_US))
    forced_punts: float = field(default_factory=lambda: float(os.environ.get("KBTP_FORCED_PUNTS") or 0))
    """For tests: how likely a request is left to its session in Python though the RNIC could serve it, 0 to 1."""
    forced_punts_seed: int = 0


class NativeStream:
    """`kbtp.verbs.api.Stream`. Posts come from the thread that polls the channel, and are tried at once."""

    def __init__(self, channel: NativeChannel, native: _native.Stream, pd: ProtectionDomain) -> None:
        self.native = native
        self._channel = channel
        self._pd = pd

    def __repr__(self) -> str:
        return f"<NativeStream {self.remote_address} {self.native.state}>"

    @property
    def pd(self) -> ProtectionDomain:
        return self._pd

    @property
    def remote_address(self) -> str:
        return self.native.remote_address

    @property
    def ird(self) -> int:
        return self.native.ird

    @property
    def ord_(self) -> int:
        return self.native.ord_

    def post(self, requests: Sequence[WorkRequest]) -> None:
        """See `kbtp.verbs.api.Stream.post`. Refused with `ConnectionLost` after `disconnect` too."""
        self.native.post([request_tuple(request) for request in requests])

    def post_recv(self, receives: Sequence[Recv]) -> None:
        self.native.post_recv(receive_tuples(receives))

    @property
    def outstanding(self) -> int:
        return self.native.outstanding

    def offload(self, grant: SessionGrant) -> None:
        """See `kbtp.verbs.offload.OffloadedStream.offload`. Raises `ConnectionLost` if the stream has ended."""
        store, receives = grant.store, grant.receives
        if not isinstance(store, NativeBlockStore) or not isinstance(receives, NativeRegion):
            raise ApiMisuse("the store and the receive buffers must be of this RNIC")
        self._channel.reads_for(self, store, grant.reader)
        self.native.offload(
            store.native,
            holder=store.quotas.number_of(grant.holder),
            domain=store.domain_number(grant.domain),
            first_handle=grant.handles.first,
            handle_count=grant.handles.count,
            direct_alloc=grant.direct_alloc,
            records=grant.records,
            invalidates=grant.invalidates,
            head_of_device=grant.head_of_device,
            request_credits=grant.request_credits,
            max_message_bytes=grant.max_message_bytes,
            receives=receives.native,
            read_depth=grant.read_depth,
            drain_s=grant.drain_s,
        )

    def bind_tickets(self) -> list[Ticket]:
        return self.native.bind_tickets()

    def resolved(self, handle: Handle) -> None:
        self.native.resolved(handle)

    def carry(self, grant: RequestGrant, prepare: Prepare) -> NativeRequester:
        """See `kbtp.verbs.requester.CarryingStream.carry`."""
        return NativeRequester(self.native, grant, prepare)

    def terminate(self, cause: TerminateCause) -> None:
        self.native.terminate(*cause.value)

    def disconnect(self) -> None:
        self.native.disconnect()

    def abort(self) -> None:
        self.native.abort()


class NativeConnectRequest:
    """`kbtp.verbs.api.ConnectRequest`."""

    def __init__(self, channel: NativeChannel, native: _native.ConnectRequest) -> None:
        self._channel = channel
        self._native = native

    @property
    def private_data(self) -> bytes:
        return self._native.private_data

    @property
    def remote_address(self) -> str:
        return self._native.remote_address

    @property
    def peer_ird(self) -> int:
        return self._native.peer_ird

    @property
    def peer_ord(self) -> int:
        return self._native.peer_ord

    def accept(
        self, *, pd: ProtectionDomain, private_data: bytes, ird: int, ord_: int, receives: Sequence[Recv] = ()
    ) -> NativeStream:
        """See `kbtp.verbs.api.ConnectRequest.accept`. After an ApiMisuse the request can still be answered."""
        _check_depths(ird, ord_)
        domain = _domain(pd)
        native = self._native.accept(domain, bytes(private_data), ird, ord_, receive_tuples(receives))
        return self._channel.adopt(native, domain)

    def reject(self, private_data: bytes) -> None:
        """Reply with R=1, then close. Raises ApiMisuse for too long private data."""
        self._native.reject(bytes(private_data))


class NativeChannel:
    """`kbtp.verbs.api.Channel`. One thread polls, posts, connects and listens; any thread may `wake`."""

    def __init__(self, native: _native.Channel) -> None:
        self._native = native
        self._streams: dict[int, NativeStream] = {}
        self._stores: dict[int, NativeBlockStore] = {}
        self._readers: dict[int, tuple[NativeBlockStore, object]] = {}

    def listen(self, host: str, port: int) -> _native.Listener:
        """Listen on the first address of `host` ("": the system's wildcard); port 0 takes a free one.

        Raises OSError as the system gives it, ApiMisuse for a port that is none.
        """
        if not 0 <= port < _PORT_END:
            raise ApiMisuse(f"a port to listen on must be 0 to {_PORT_END - 1}; got {port}")
        return self._native.listen(host, port)

    def connect(
        self,
        host: str,
        port: int,
        *,
        pd: ProtectionDomain,
        private_data: bytes,
        ird: int,
        ord_: int,
        timeout_s: float,
        receives: Sequence[Recv] = (),
    ) -> NativeStream:
        """Start connecting; whatever fails from here on is the `StreamEnded` of the stream.

        A name is looked up by the system's resolver, which blocks this thread and knows no time limit of ours: where
        that matters, give an address. Raises ApiMisuse.
        """
        if not 0 < port < _PORT_END:
            raise ApiMisuse(f"a port to connect to must be 1 to {_PORT_END - 1}; got {port}")
        _check_depths(ird, ord_)
        domain = _domain(pd)
        native = self._native.connect(
            host, port, domain, bytes(private_data), ird, ord_, timeout_s, receive_tuples(receives)
        )
        return self.adopt(native, domain)

    def poll(self, timeout_s: float) -> list[Event]:
        events = []
        for event in self._native.poll(timeout_s):
            if event[0] == _FREED:
                self._freed(*event[1:])
            else:
                events.append(self._event(*event))
        return events

    def fileno(self) -> int:
        return self._native.fileno()

    def next_timeout_s(self) -> float | None:
        return self._native.next_timeout_s()

    def wake(self) -> None:
        self._native.wake()

    def close(self) -> None:
        self._native.close()
        self._streams.clear()

    def adopt(self, native: _native.Stream, pd: ProtectionDomain) -> NativeStream:
        """Keep the stream until its last event: its owner may have let go of it by then."""
        stream = self._streams[native.id] = NativeStream(self, native, pd)
        return stream

    def reads_for(self, stream: NativeStream, store: NativeBlockStore, reader: object) -> None:
        """`stream` pins blocks of `store` in the name of `reader` until its last event."""
        number = stream.native.id
        self._stores[store.native.number] = store
        self._readers[number] = store, reader
        store.name_reader(reader, number)

    def _freed(self, store: int, number: int | None, holder: int, entry: tuple[int, int, int, int]) -> None:
        if number is not None:
            self._stores[store].free_finished(number, entry)
        else:
            self._stores[store].free_outlived(holder)

    def _event(self, kind: int, *fields: Any) -> Event:
        if kind == _COMPLETION:
            number, wr_id, opcode, flushed, *rest = fields
            status = WcStatus.FLUSHED if flushed else WcStatus.SUCCESS
            return WorkCompletion(self._streams[number], wr_id, _OPCODES[opcode], status, *rest)
        if kind == _CONNECT_REQUEST:
            return NativeConnectRequest(self, *fields)
        if kind == _ESTABLISHED:
            number, private_data = fields
            return Established(self._streams[number], private_data)
        if kind == _BATCH_DONE:
            number, batch = fields
            return BatchDone(self._streams[number], batch)
        if kind == _REJECTED:
            number, private_data = fields
            return Rejected(self._streams.pop(number), private_data)
        number, reason, terminate, cause = fields
        if number in self._readers:
            store, reader = self._readers.pop(number)
            store.forget_reader(reader)
        return StreamEnded(self._streams.pop(number), reason, terminate, cause)


class NativeRnic:
    """`kbtp.verbs.api.Rnic`: user-space iWARP over TCP in Rust.

    Regions and domains may be used from any thread, each channel from one. An octet that was copied out of a region
    before that was revoked may still be on its way to the peer afterwards.
    Revoking a region does not take it away from work its owner has already posted.

    Raises:
        OSError: the system gives no random numbers, or no file descriptors.
    """

    def __init__(self, options: NativeOptions | None = None) -> None:
        self.options = options or NativeOptions()
        self._native = self._open()
        self._capabilities = Capabilities(executes_sequences=True, **self._native.capabilities())

    def _open(self) -> _native.Device:
        mpa = self.options.mpa
        return _native.Device(
            crc=mpa.crc,
            want_markers=mpa.want_markers,
            revision=mpa.revision,
            peer_to_peer=mpa.peer_to_peer.value,
            revision1_depth=mpa.revision1_depth,
            mpa_request_timeout_s=self.options.mpa_request_timeout_s,
            goodbye_s=self.options.goodbye_s,
            disconnect_s=self.options.disconnect_s,
            accept_pause_s=self.options.accept_pause_s,
            tcp_user_timeout_s=self.options.tcp_user_timeout_s,
            spin_us=self.options.spin_us,
            forced_punts=self.options.forced_punts,
            forced_punts_seed=self.options.forced_punts_seed,
        )

    @property
    def name(self) -> str:
        return "native"

    @property
    def capabilities(self) -> Capabilities:
        return self._capabilities

    def allocate_pd(self) -> _native.Pd:
        return self._native.allocate_pd()

    def register(
        self,
        buffer: object,
        access: Access,
        *,
        pd: ProtectionDomain,
        stream: Stream | None = None,
        base_to: int = 0,
    ) -> NativeRegion:
        """See `kbtp.verbs.api.Rnic.register`."""
        if stream is not None and not isinstance(stream, NativeStream):
            raise ApiMisuse("the stream to scope a region to must be one of this RNIC")
        domain = _domain(pd)
        registered = buffer_of(buffer)
        view = registered.view
        if not 0 <= base_to <= MASK64:
            raise ApiMisuse(f"base_to must leave room for {view.nbytes} octets below 2^64; got {base_to}")
        scope = None if stream is None else stream.native
        native = self._native.register(
            registered.address, view.nbytes, registered.writable, view, int(access), domain, scope, base_to
        )
        return NativeRegion(native, view)

    def create_block_store(
        self,
        pool: MemoryRegion,
        *,
        block_size_bytes: int,
        block_count: int,
        pool_base: int,
        table_base_handle: Handle,
        table_handles: int,
        ring_order: int,
        first_ticket: Ticket = 0,
        clear_on_free: bool = False,
        direct_blocks: int = 0,
        masked_counters: bool = True,
        freed: Callable[[object], None],
    ) -> NativeBlockStore:
        """See `kbtp.verbs.offload.OffloadingRnic.create_block_store`. Raises `ApiMisuse`, `OSError` for no memory."""
        if not isinstance(pool, NativeRegion):
            raise ApiMisuse("the pool must be registered with this RNIC")
        return NativeBlockStore(
            pool.native,
            pool.view,
            block_size_bytes=block_size_bytes,
            block_count=block_count,
            pool_base=pool_base,
            table_base_handle=table_base_handle,
            table_handles=table_handles,
            ring_order=ring_order,
            first_ticket=first_ticket,
            clear_on_free=clear_on_free,
            direct_blocks=direct_blocks,
            masked_counters=masked_counters,
            freed=freed,
        )

    def open_channel(self, *, threads: int = 0) -> NativeChannel:
        """See `kbtp.verbs.offload.OffloadingRnic.open_channel`."""
        return NativeChannel(self._native.open_channel(threads))

    @property
    def punts(self) -> dict[str, int]:
        """How many messages were left to sessions in Python, by reason."""
        return dict(self._native.punts())

    def close(self) -> None:
        """Close every channel and revoke every region. No thread may be polling then. Idempotent."""
        self._native.close()


def _spin_us(wanted: str | int) -> int:
    try:
        spin_us = int(wanted)
    except ValueError:
        spin_us = -1
    if not 0 <= spin_us <= RNIC_SPIN_MAX_US:
        raise ApiMisuse(f"KBTP_SPIN_US is {wanted!r}: expected microseconds, 0 to {RNIC_SPIN_MAX_US}")
    return spin_us


def _domain(pd: ProtectionDomain) -> _native.Pd:
    if not isinstance(pd, _native.Pd):
        raise ApiMisuse("the protection domain must be allocated from this RNIC")
    return pd


def _check_depths(ird: int, ord_: int) -> None:
    for name, depth in (("ird", ird), ("ord_", ord_)):
        if not 0 <= depth <= RNIC_READ_DEPTH_MAX:
            raise ApiMisuse(f"{name} must be 0 to {RNIC_READ_DEPTH_MAX}; got {depth}")
