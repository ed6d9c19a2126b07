"""Drives a target: moves events from the RNIC into the sessions and their actions back out. Decides nothing.

One thread polls one channel; every session of the target lives in it. Over an RNIC that executes sequences these see
only what it leaves to them (`kbtp.verbs.offload`).
"""

from __future__ import annotations

import logging
import secrets
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import numpy as np

from kbtp import limits
from kbtp.address import Address
from kbtp.blocks import BlockStore
from kbtp.blocks.owner import BlockOwner
from kbtp.errors import ApiMisuse, ConnectionLost, WireFormatError
from kbtp.keys import Keys
from kbtp.target.actions import Abort, Action, Disconnect, Opened, Resolved, Terminate
from kbtp.target.config import TargetConfig
from kbtp.target.hello import binding_features
from kbtp.target.identity import Identity
from kbtp.target.server_memory import pool_memory
from kbtp.target.session import Session
from kbtp.target.target import Target
from kbtp.types import Feature
from kbtp.verbs.api import (
    Access,
    BatchDone,
    Channel,
    ConnectRequest,
    Established,
    Event,
    Listener,
    MemoryRegion,
    ProtectionDomain,
    Recv,
    Rejected,
    Rnic,
    Sge,
    Stream,
    StreamEnded,
    WcOpcode,
    WorkCompletion,
    WorkRequest,
)
from kbtp.verbs.offload import OffloadedStream, OffloadingRnic, SessionGrant
from kbtp.wire import ConnectionData, Nonces

log = logging.getLogger("kbtp.target")

_BUSY_TICK_S = 0.05
"""How late a deadline may be noticed while events keep coming: looking at them costs time for every session."""


class _StreamMemory:
    """SessionMemory of one stream: the shared pool, and memory that goes with the stream."""

    def __init__(self, rnic: Rnic, pd: ProtectionDomain, pool: MemoryRegion) -> None:
        self._rnic = rnic
        self._pd = pd
        self._pool = pool
        self._own = [rnic.register(bytearray(limits.HELLO_MAX_BYTES), Access.NONE, pd=pd)]
        self.stream: Stream | None = None

    @property
    def pool(self) -> MemoryRegion:
        return self._pool

    @property
    def hello(self) -> MemoryRegion:
        return self._own[0]

    def allocate(self, length_bytes: int) -> MemoryRegion:
        """Not cleared first: what is read from it is what the peer's message or response has placed."""
        self._own = [region for region in self._own if region.valid]
        region = self._rnic.register(np.empty(length_bytes, np.uint8), Access.NONE, pd=self._pd)
        self._own.append(region)
        return region

    def expose(self, octets: memoryview, access: Access, base_to: int = 0) -> MemoryRegion:
        assert self.stream is not None
        region = self._rnic.register(octets, access, pd=self._pd, stream=self.stream, base_to=base_to)
        self._own.append(region)
        return region

    def release(self) -> None:
        for region in self._own:
            region.revoke()


class Server:
    """A running target. `run` serves in the calling thread, `start` in one of its own."""

    def __init__(
        self,
        config: TargetConfig,
        rnic: Rnic,
        *,
        threads: int = 1,
        read_keys: Callable[[], Keys] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Allocates the pool. `threads`: event loops of an RNIC that executes sequences; no other can have several.

        `read_keys`: where those of the configuration came from, for `request_keys`.

        Raises `MemoryError` or `OSError` if the system will not give so much, and `ApiMisuse` for a wrong `threads`.
        """
        self._rnic = rnic
        self._clock = clock
        self._pd = rnic.allocate_pd()
        self._pool_memory = pool_memory(config.pool_bytes)
        base_to = 0 if rnic.capabilities.own_base else config.pool_base
        self._pool = rnic.register(self._pool_memory, Access.NONE, pd=self._pd, base_to=base_to)
        # Block Offsets are tagged offsets of this region, wherever the RNIC has it begin (profile 2).
        self.config = config = replace(config, pool_base=self._pool.base_to)
        self._offloads = rnic.capabilities.executes_sequences
        if threads < 1 or (threads > 1 and not self._offloads):
            possible = "1 or more" if self._offloads else "1"
            raise ApiMisuse(f"{threads} threads: the RNIC {rnic.name!r} serves on {possible}")
        table_base_handle = secrets.randbits(36) << 16
        self.target = Target(
            config,
            self._create_store(table_base_handle),
            incarnation=secrets.randbits(64),
            table_base_handle=table_base_handle,
            masked_atomics=rnic.capabilities.masked_atomics,
            binding=binding_features(rnic.capabilities),
            head_of_device=not rnic.capabilities.atomics_with_processors,
        )
        if isinstance(rnic, OffloadingRnic):
            self._channel: Channel = rnic.open_channel(threads=threads)
        else:
            self._channel = rnic.open_channel()
        self._listeners: list[Listener] = []
        self._sessions: dict[Stream, Session] = {}
        self._streams: dict[Session, Stream] = {}
        self._memories: dict[Stream, _StreamMemory] = {}
        self._reasons: dict[Stream, str] = {}
        """Why this side ended a stream, for the one line that is logged when it has."""
        self._key_source = read_keys
        self._keys_requested = False
        self._stop = threading.Event()
        self._draining = False
        self._thread: threading.Thread | None = None
        self._next_tick_s = 0.0

    def _create_store(self, table_base_handle: int) -> BlockOwner:
        config = self.config
        create: Callable[..., BlockOwner] = partial(BlockStore.create, self._pool.view)
        if isinstance(self._rnic, OffloadingRnic):
            create = partial(self._rnic.create_block_store, self._pool, freed=self._freed)
        return create(
            block_size_bytes=config.block_size_bytes,
            block_count=config.pool_blocks,
            pool_base=config.pool_base,
            table_base_handle=table_base_handle,
            table_handles=config.handle_count,
            ring_order=config.ring_order,
            first_ticket=config.first_ticket,
            clear_on_free=config.clears_blocks,
            direct_blocks=config.direct_blocks,
            masked_counters=self._rnic.capabilities.masked_atomics,
        )

    def _freed(self, holder: object) -> None:
        assert isinstance(holder, Identity)
        self.target.identities.freed(holder)

    # --- life ----------------------------------------------------------------------------------

    def listen(self, host: str = "127.0.0.1", port: int = limits.DEFAULT_PORT) -> Address:
        """Start to listen; port 0 takes a free one. Raises OSError, such as for an address in use."""
        listener = self._channel.listen(host, port)
        self._listeners.append(listener)
        return Address(*listener.address)

    def start(self) -> None:
        """Serve in a background thread until `stop`."""
        self._thread = threading.Thread(target=self.run, name="kbtp-target", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Drain and end (thread-safe, idempotent): no new sessions, what is outstanding finishes within `drain_s`."""
        self._stop.set()
        self._channel.wake()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join()
            self._thread = None

    @property
    def stopping(self) -> bool:
        return self._stop.is_set()

    def request_stop(self) -> None:
        """As `stop`, without waiting: for signal handlers and other threads."""
        self._stop.set()
        self._channel.wake()

    def request_keys(self) -> None:
        """Have the keys read again by the serving thread: for signal handlers and other threads."""
        self._keys_requested = True
        self._channel.wake()

    def _read_keys(self) -> None:
        self._keys_requested = False
        if self._key_source is None:
            return
        try:
            keys = self._key_source()
            self.target.replace_keys(keys)
        except ApiMisuse as error:
            log.error("the keys stay as they are: %s", error)
        else:
            log.info("%d keys were read", len(keys))

    def run(self) -> None:
        """Serve until `stop` or `request_stop`, then drain, close everything and return."""
        try:
            while not self._stop.is_set():
                self._step()
            self._drain()
        finally:
            self.close()

    def close(self) -> None:
        """Close at once. `run` has returned, or was never called."""
        self._channel.close()
        for stream in list(self._sessions):
            self._forget(stream)
        self._pool.revoke()

    def _drain(self) -> None:
        """Let what is outstanding finish; then give the peers a moment to close too, idle ones may never notice."""
        self._draining = True
        for listener in self._listeners:
            listener.close()
        for session in list(self._sessions.values()):
            session.drain()
        self._perform()
        deadline_s = self._clock() + self.config.drain_s
        while self._sessions and self._clock() < deadline_s and self._outstanding():
            self._step(deadline_s)
        if self._outstanding():
            log.warning("%d requests did not finish within %g s", self._outstanding(), self.config.drain_s)
        deadline_s = self._clock() + limits.CLOSE_S
        while self._sessions and self._clock() < deadline_s:
            self._step(deadline_s)

    def outstanding_of(self, session: Session) -> int:
        """Requests of `session` that are not resolved yet, here or in the RNIC."""
        stream = self._streams.get(session)
        executing = stream.outstanding if isinstance(stream, OffloadedStream) else 0
        return session.outstanding + executing

    def _outstanding(self) -> int:
        return sum(map(self.outstanding_of, self._sessions.values()))

    # --- events in -----------------------------------------------------------------------------

    def _step(self, until_s: float = float("inf")) -> None:
        events = self._channel.poll(0)
        now_s = self._clock()
        told = self._keys_requested or (self._stop.is_set() and not self._draining)
        if not events and not told:  # else that poll may have used up the wake that told so
            timeout_s = max(0.0, min(self.target.next_deadline_s(), until_s, now_s + limits.MAX_WAIT_S) - now_s)
            events = self._channel.poll(timeout_s)
            now_s = self._clock()
            self._next_tick_s = 0.0
        self.target.now_s = now_s
        if self._keys_requested:
            self._read_keys()
        for event in events:
            self._dispatch(event, now_s)
        if now_s >= self._next_tick_s:
            self.target.tick(now_s)
            self._next_tick_s = now_s + _BUSY_TICK_S
        self._perform()

    def _dispatch(self, event: Event, now_s: float) -> None:
        if isinstance(event, Established | Rejected | BatchDone):
            return  # answers to a `connect` or a request, which a target never does
        try:
            if isinstance(event, StreamEnded):
                self._stream_ended(event, now_s)
            elif isinstance(event, WorkCompletion):
                self._work_completed(event, now_s)
            else:
                self._connect_requested(event, now_s)
        except Exception:  # a fault of ours in one session must not end the others
            if isinstance(event, StreamEnded | WorkCompletion):
                self._fault(event.stream)
            else:
                log.exception("%s: internal error, the connection is refused", event.remote_address)

    def _connect_requested(self, request: ConnectRequest, now_s: float) -> None:
        own_nonce = secrets.token_bytes(limits.CONNECTION_NONCE_BYTES)
        own_data = ConnectionData(own_nonce).pack()
        try:
            peer_nonce = ConnectionData.parse(request.private_data).nonce
        except WireFormatError as error:  # profile 3 "Connection data"
            log.warning("%s: refused, not a KBTP initiator (%s)", request.remote_address, error)
            request.reject(own_data)
            return
        if self._stop.is_set() or len(self._sessions) >= self.config.max_sessions:
            log.warning("%s: refused, %d sessions are open", request.remote_address, len(self._sessions))
            request.reject(own_data)
            return
        memory = _StreamMemory(self._rnic, self._pd, self._pool)
        stream = request.accept(
            pd=self._pd,
            private_data=own_data,
            ird=self.config.read_depth,
            ord_=self.config.read_depth,
            receives=[Recv(0, Sge(memory.hello, 0, limits.HELLO_MAX_BYTES))],
        )
        memory.stream = stream
        self._memories[stream] = memory
        self._sessions[stream] = session = self.target.open_session(
            memory,
            nonces=Nonces(peer_nonce, own_nonce),
            read_depth=stream.ord_,
            peer_read_depth=min(stream.ird, request.peer_ord),
            peer=request.remote_address,
            now_s=now_s,
            offloads=self._offloads,
        )
        self._streams[session] = stream

    def _work_completed(self, completion: WorkCompletion, now_s: float) -> None:
        session = self._sessions.get(completion.stream)
        if session is None:
            return
        if completion.opcode is WcOpcode.RECV:
            session.received(completion, now_s)
        else:
            session.completed(completion, now_s)

    def _stream_ended(self, event: StreamEnded, now_s: float) -> None:
        session = self._forget(event.stream)
        if session is None:
            return
        # Said first: who waits for the session to be gone finds the line there.
        who = f"{session.peer} {session.name}".rstrip()
        if session.key is not None:
            who += f" (key {session.key.name})"
        reason = self._reasons.pop(event.stream, None) or event.reason
        if reason is not None:
            log.warning("%s: session ended: %s", who, reason)
        else:
            log.info("%s: session ended", who)
        self.target.end_session(session, now_s)

    def _forget(self, stream: Stream) -> Session | None:
        memory = self._memories.pop(stream, None)
        if memory is not None:
            memory.release()
        session = self._sessions.pop(stream, None)
        if session is not None:
            del self._streams[session]
        return session

    # --- actions out ---------------------------------------------------------------------------

    def _perform(self) -> None:
        """Do what the sessions decided. What one session does can give another something to do."""
        while self.target.has_actions:
            session = self.target.has_actions.pop()
            actions, session.actions = session.actions, []
            stream = self._streams.get(session)
            if stream is not None:
                try:
                    self._act(stream, actions)
                except Exception:  # as in `_dispatch`
                    self._fault(stream)

    def _fault(self, stream: Stream) -> None:
        log.exception("%s: internal error, the session is ended", stream.remote_address)
        stream.abort()

    def _act(self, stream: Stream, actions: list[Action]) -> None:
        """What was granted, receive buffers, work requests, what is resolved, then the end of the stream if decided.

        Posting a buffer earlier than its place in the list is harmless; later would break the credit rule.
        """
        requests: list[WorkRequest] = []
        receives: list[Recv] = []
        resolved: list[int] = []
        opened: Opened | None = None
        end: Terminate | Disconnect | Abort | None = None
        for action in actions:
            if isinstance(action, Terminate | Abort):
                end = action
                break
            if isinstance(action, Disconnect):
                end = action  # what ends the stream at once may still follow, and takes its place
            elif isinstance(action, Recv):
                receives.append(action)
            elif isinstance(action, Resolved):
                resolved.append(action.handle)
            elif isinstance(action, Opened):
                opened = action
            else:
                requests.append(action)
        try:
            if opened is not None:
                self._opened(stream, opened)
            if receives:
                stream.post_recv(receives)
            if requests:
                stream.post(requests)
        except ConnectionLost:
            return  # its StreamEnded is on the way and resolves everything
        if resolved and isinstance(stream, OffloadedStream):
            for handle in resolved:
                stream.resolved(handle)
        if isinstance(end, Terminate):
            self._reasons[stream] = f"{end.why} [{end.cause}]"
            stream.terminate(end.cause)
        elif isinstance(end, Abort):
            if end.error is not None:
                log.error("%s: internal error, the session is ended", stream.remote_address, exc_info=end.error)
            self._reasons[stream] = end.why
            stream.abort()
        elif end is not None:
            if end.why:
                self._reasons[stream] = end.why
            stream.disconnect()

    def _opened(self, stream: Stream, opened: Opened) -> None:
        modes = [feature.name for feature in (Feature.DIRECT_LOAD, Feature.DIRECT_ALLOC) if feature & opened.features]
        session = self._sessions[stream]
        if modes:
            log.info("%s: granted %s", f"{session.peer} {session.name}".rstrip(), ", ".join(map(str, modes)))
        if not isinstance(stream, OffloadedStream):
            return
        session.tickets_in_rnic = stream.bind_tickets
        stream.offload(
            SessionGrant(
                store=self.target.store,
                holder=opened.identity,
                reader=session,
                domain=opened.identity.domain,
                handles=opened.identity.handles,
                direct_alloc=bool(opened.features & Feature.DIRECT_ALLOC),
                records=bool(opened.served & Feature.RECORD_COMPLETION),
                invalidates=bool(opened.served & Feature.INVALIDATE),
                head_of_device=opened.head_of_device,
                request_credits=opened.request_credits,
                max_message_bytes=self.config.max_message_bytes,
                receives=opened.receives,
                read_depth=stream.ord_,
                drain_s=self.config.drain_s,
            )
        )
