"""A KBTP session in which the peer by hand is the target, and an initiator is under test."""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from kbtp.conformance.deviation import Deviation, NotApplicable, expect
from kbtp.conformance.initiator_side import SENDS
from kbtp.conformance.stream import Message, Stream
from kbtp.errors import WireFormatError
from kbtp.iwarp.rdmap import RdmapOpcode
from kbtp.keys import Key
from kbtp.limits import AUTH_MAC_BYTES
from kbtp.types import Feature, OptionType, RequestFlag, Status
from kbtp.wire import (
    AllocStore,
    Auth,
    Bind,
    Completion,
    ConnectionData,
    DataDescriptor,
    Free,
    Hello,
    HelloAck,
    Load,
    Nonces,
    Store,
    parse_request,
    sign_hello_ack_octets,
)

Request = Load | Store | AllocStore | Free | Bind
BLOCK_BYTES = 1 << 20
POOL_BASE = 1 << 16
FIRST_HANDLE = 1000
LONG_BYTES = 50_000


def ack_fields(hello: Hello) -> dict[str, Any]:
    """A HELLO_ACK that no initiator has to object to."""
    return {
        "granted_features": hello.requested_features & Feature.INVALIDATE,
        "block_size": BLOCK_BYTES,
        "pool_blocks": 64,
        "allocation_quota": min(64, hello.requested_quota or 16),
        "request_credits": min(32, hello.completion_credits),
        "max_message": 16384,
        "incarnation": 0x1234567812345678,
        "first_handle": FIRST_HANDLE,
        "handle_count": min(1000, hello.requested_handles or 64),
        "table_base_handle": 0,
        "table_handles": 4096,
        "pool_base": POOL_BASE,
    }


def is_not_inline(request: object) -> bool:
    """A store whose data is in memory of the initiator, so that the target reads it."""
    return isinstance(request, Store | AllocStore) and not request.flags & RequestFlag.INLINE


def needs_a_read(request: object) -> bool:
    """The same of the workload's long block: whether a short one is inline is the initiator's choice."""
    return isinstance(request, Store | AllocStore) and is_not_inline(request) and request.data.length >= LONG_BYTES


@dataclass(slots=True)
class Entry:
    """What the scripted target keeps of a handle."""

    generation: int = 1
    octets: bytes = b""
    sealed: bool = False
    bound: bool = False


class TargetSide:
    """A small honest target, until the case departs from it: `serve` does that, `request` and `complete` do not."""

    def __init__(self, stream: Stream, key: Key | None) -> None:
        self.stream = stream
        self.key = key
        self.hello_octets = b""
        self.hello = Hello(0, Feature.NONE, 0, 0, 1, 1024)
        self.ack = HelloAck(0)
        self.table: dict[int, Entry] = {}
        self.invalidates = True
        self.status_of_next: Status | None = None
        """What the next completion says, whatever was done."""

    # --- HELLO ---

    def take_hello(self) -> Hello:
        message = self.stream.next_send("a HELLO")
        came = self._parse(message)
        if not isinstance(came, Hello):
            raise Deviation("a HELLO, the first message of a session", str(came))
        self.hello, self.hello_octets = came, message.payload
        return came

    def ack_octets(
        self, *, extra_options: bytes = b"", patches: Mapping[int, bytes] | None = None, **changes: Any
    ) -> bytes:
        """The HELLO_ACK that answers the HELLO that came, `ack` from now on; `changes` replace fields of one that is
        right, or of one that grants nothing if they have a status that refuses (profile 2).

        `extra_options` follow the others, `patches` are put over the octets from where they say on. AUTH, where the
        HELLO has one of our key, is last and covers all of that (profile 4).
        """
        refuses = changes.get("status", Status.SUCCESS) is not Status.SUCCESS
        granted = {} if refuses else ack_fields(self.hello)
        self.ack = HelloAck(**{"request_id": self.hello.request_id, **granted, **changes})
        octets = bytearray(self.ack.pack() + extra_options)
        for at, over in (patches or {}).items():
            octets[at : at + len(over)] = over
        # Whether the MAC of HELLO is right is the matter of one case; the others go on as if it were.
        if self.key is None or self.hello.auth is None or self.hello.auth.key_id != self.key.key_id:
            return bytes(octets)
        auth = Auth(self.key.key_id, bytes(AUTH_MAC_BYTES)).pack()
        octets += struct.pack(">HH", OptionType.AUTH, len(auth)) + auth
        return sign_hello_ack_octets(bytes(octets), self.key, self.nonces, self.hello_octets)

    @property
    def nonces(self) -> Nonces:
        """Of the connection data of both sides (profile 3)."""
        request, reply = self.stream.request.private_data, self.stream.reply.private_data
        return Nonces(ConnectionData.parse(request).nonce, ConnectionData.parse(reply).nonce)

    def acknowledge(self, **changes: Any) -> HelloAck:
        """Send HELLO_ACK; `changes` replace fields of one that is right."""
        self.stream.send(self.ack_octets(**changes))
        return self.ack

    def open(self, **changes: Any) -> TargetSide:
        self.take_hello()
        self.acknowledge(**changes)
        return self

    # --- requests ---

    def request(self, *, within_s: float | None = None) -> Request:
        """The initiator's next request, unanswered. Raises `Deviation` if none comes."""
        request = self.request_or_end(within_s=within_s)
        if request is None:
            raise Deviation("a request", "the end of the connection")
        return request

    def request_or_end(self, *, within_s: float | None = None) -> Request | None:
        """None: the initiator has closed the connection. Raises `Deviation` if nothing comes, or no request."""
        message = self.stream.message("a request, or the end of the connection", within_s=within_s)
        if message is None:
            return None
        came = self._parse(message)
        if isinstance(came, Hello):
            raise Deviation("a request", "a second HELLO")
        request: Request = came
        return request

    def complete(self, request: Request, status: Status = Status.SUCCESS, **fields: Any) -> Completion:
        """Send the COMPLETION of `request`, as asked with or without Invalidate; `fields` replace its own."""
        entry = self.table.get(request.handle, Entry())
        if self.status_of_next is not None:
            status, self.status_of_next = self.status_of_next, None
        completion = replace(Completion(request.request_id, request.handle, entry.generation, status), **fields)
        self.send_completion(request, completion.pack())
        return completion

    def send_completion(self, request: Request, octets: bytes) -> None:
        asked = request.flags & RequestFlag.INVALIDATE and self.invalidates
        if asked and not isinstance(request, Free | Bind):
            self.stream.send(octets, opcode=RdmapOpcode.SEND_INVALIDATE, invalidate_stag=request.data.stag)
        else:
            self.stream.send(octets)

    def read(self, data: DataDescriptor, length: int | None = None) -> bytes:
        """RDMA Read `length` octets, or all, of the initiator's buffer."""
        size = data.length if length is None else length
        return self.stream.read_response(self.stream.request_read(data.stag, data.to, size))

    def write(self, data: DataDescriptor, octets: bytes) -> None:
        """RDMA Write to the initiator's buffer."""
        self.stream.write(data.stag, data.to, octets)

    # --- the honest target ---

    def serve(self, until: Callable[[Request], bool] | type[Any] | None = None) -> Request | None:
        """Serve requests up to the one that `until` accepts (or that is of that class), which is returned unserved.

        None: the initiator has closed the connection before.
        """
        while (request := self.request_or_end()) is not None:
            found = isinstance(request, until) if isinstance(until, type) else until is not None and until(request)
            if found:
                return request
            self.serve_one(request)
        return None

    def serve_until(self, until: Callable[[Request], bool] | type[Any]) -> Any:
        """`serve`, where the request has to come. Raises `Deviation`."""
        request = self.serve(until)
        if request is None:
            name = until.__name__
            raise Deviation(f"a request of the kind {name}: the workload has one", "the end of the connection")
        return request

    def serve_until_invalidating(self) -> Load:
        """`serve` up to a LOAD with INVALIDATE. Raises `NotApplicable` if there is none: nobody has to ask for that."""
        load = self.serve(lambda request: isinstance(request, Load) and bool(request.flags & RequestFlag.INVALIDATE))
        if not isinstance(load, Load):
            raise NotApplicable("a LOAD with INVALIDATE, for which an initiator need not ask")
        return load

    def serve_one(self, request: Request) -> None:
        entry = self.table.setdefault(request.handle, Entry())
        if isinstance(request, Load):
            if entry.bound:
                self.write(request.data, entry.octets)
            self._complete_data(request, entry, Status.SUCCESS if entry.bound else Status.NOT_BOUND)
        elif isinstance(request, Store | AllocStore):
            self._store(request)
        elif isinstance(request, Free):
            status = Status.SUCCESS if entry.bound else Status.NOT_BOUND
            if entry.bound:
                entry.bound, entry.sealed, entry.generation = False, False, entry.generation % 0xFFFF + 1
            self.complete(request, status, generation=entry.generation)
        else:
            self.complete(request, Status.UNSUPPORTED, generation=0)

    def _store(self, request: Store | AllocStore) -> None:
        inline = request.flags & RequestFlag.INLINE
        self.bind_entry(request, bytes(request.inline_data) if inline else self.read(request.data))

    def bind_entry(self, request: Store | AllocStore, octets: bytes) -> None:
        """Store `octets`, however they came, and complete the request."""
        entry = self.table.setdefault(request.handle, Entry())
        entry.octets = octets
        if isinstance(request, AllocStore):
            entry.generation = entry.generation % 0xFFFF + 1
        entry.bound, entry.sealed = True, bool(request.flags & RequestFlag.SEAL)
        self._complete_data(request, entry, Status.SUCCESS)

    def _complete_data(self, request: Request, entry: Entry, status: Status) -> None:
        if status is Status.SUCCESS:
            block_offset = self.block_offset(request.handle)
            length = len(entry.octets)
            self.complete(request, generation=entry.generation, data_length=length, block_offset=block_offset)
        else:
            self.complete(request, status, generation=entry.generation)

    def block_offset(self, handle: int) -> int:
        """Where its block lies, says this target."""
        return POOL_BASE + (handle - self.ack.first_handle) % 64 * BLOCK_BYTES

    def goes_on(self) -> None:
        """The initiator's workload has another request, or ends in order."""
        request = self.request_or_end()
        if request is not None:
            self.serve_one(request)

    def finish(self) -> None:
        self.serve()

    @staticmethod
    def _parse(message: Message) -> Any:
        if message.opcode is RdmapOpcode.TERMINATE:
            raise Deviation("a request", str(message))
        expect(message.opcode in SENDS, "a Send", message)
        try:
            return parse_request(message.payload)
        except WireFormatError as error:
            raise Deviation("a well-formed KBTP request", f"{error}: {message.payload.hex()}") from None
