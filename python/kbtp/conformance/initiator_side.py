"""A KBTP session in which the peer by hand is the initiator, and a target is under test."""

from __future__ import annotations

import struct
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from kbtp.conformance.deviation import Deviation, NotApplicable, expect
from kbtp.conformance.memory import Lent
from kbtp.conformance.stream import Message, Stream
from kbtp.errors import WireFormatError
from kbtp.iwarp.rdmap import INVALIDATING, RdmapOpcode
from kbtp.keys import Key
from kbtp.limits import AUTH_MAC_BYTES, COMMON_HEADER_BYTES
from kbtp.types import Feature, Opcode, OptionType, RequestFlag, Status
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
    parse_response,
    sign_hello_octets,
)

CREDITS = 32
MESSAGE_BYTES = 1024
SENDS = (
    RdmapOpcode.SEND, RdmapOpcode.SEND_SOLICITED, RdmapOpcode.SEND_INVALIDATE, RdmapOpcode.SEND_SOLICITED_INVALIDATE,
)  # fmt: skip
Request = Load | Store | AllocStore | Free | Bind
_BLOCKS_BOUND_BY: dict[int, int] = {Opcode.ALLOC_STORE: 1, Opcode.BIND: 1, Opcode.FREE: -1}


def hello_message(**fields: Any) -> Hello:
    """A HELLO that asks for little; `fields` replace its own."""
    asked: dict[str, Any] = {
        "request_id": 0x48454C4C4F,
        "requested_features": Feature.INVALIDATE,
        "requested_quota": 4,
        "requested_handles": 8,
        "completion_credits": CREDITS,
        "max_message": MESSAGE_BYTES,
    }
    return Hello(**{**asked, **fields})


@dataclass(frozen=True, slots=True)
class Answer:
    """A COMPLETION and the Send that carried it."""

    completion: Completion
    message: Message

    @property
    def status(self) -> Status:
        return self.completion.status

    @property
    def invalidated_stag(self) -> int | None:
        return self.message.stag if self.message.opcode in INVALIDATING else None


class _Sent(NamedTuple):
    """What is kept of a request that is outstanding."""

    handle: int
    opcode: int


class InitiatorSide:
    """`ack` is there after `hello`; handles are named by their index in the range that it granted."""

    def __init__(self, stream: Stream, namespace: bytes = b"", key: Key | None = None) -> None:
        self.stream = stream
        self.namespace = namespace
        self.key = key
        self.ack: HelloAck = HelloAck(0)
        self._next_request_id = 0x0102030405060700
        self._early: dict[int, Answer] = {}
        self._outstanding: dict[int, list[_Sent]] = {}  # by the Request ID
        self._bound_blocks = 0
        stream.on_send = self._note_request

    # --- HELLO ---

    def hello_octets(
        self, *, extra_options: bytes = b"", patches: Mapping[int, bytes] | None = None, **fields: Any
    ) -> bytes:
        """A HELLO with what this target wants to see; `fields` replace ours.

        `extra_options` follow the others, `patches` are put over the octets from where they say on. AUTH, where the
        target has keys, is last and covers all of that (profile 4).
        """
        if self.namespace:
            fields.setdefault("namespace", self.namespace)
        octets = bytearray(hello_message(**fields).pack() + extra_options)
        for at, over in (patches or {}).items():
            octets[at : at + len(over)] = over
        if self.key is None:
            return bytes(octets)
        auth = Auth(self.key.key_id, bytes(AUTH_MAC_BYTES)).pack()
        octets += struct.pack(">HH", OptionType.AUTH, len(auth)) + auth
        return sign_hello_octets(bytes(octets), self.key, self.nonces)

    @property
    def nonces(self) -> Nonces:
        """Of the connection data of both sides (profile 3)."""
        request, reply = self.stream.request.private_data, self.stream.reply.private_data
        return Nonces(ConnectionData.parse(request).nonce, ConnectionData.parse(reply).nonce)

    def hello(self, octets: bytes | None = None, **fields: Any) -> HelloAck:
        """Send HELLO, these octets or one of `fields`, and take HELLO_ACK, whatever its status."""
        self.stream.send(self.hello_octets(**fields) if octets is None else octets)
        return self.take_ack()

    def take_ack(self) -> HelloAck:
        return self.ack_in(self.stream.next_send("a HELLO_ACK"))

    def ack_in(self, message: Message) -> HelloAck:
        came = self._parse(message)
        if not isinstance(came, HelloAck):
            raise Deviation("a HELLO_ACK", str(came))
        self.ack, self._bound_blocks = came, came.bound_blocks
        return came

    def open(self, **fields: Any) -> InitiatorSide:
        """`hello`, which has to succeed."""
        ack = self.hello(**fields)
        expect(ack.status is Status.SUCCESS, "a HELLO_ACK with SUCCESS", ack.status.name)
        return self

    @property
    def first(self) -> int:
        return self.ack.first_handle

    @property
    def nowhere(self) -> int:
        """A handle that the target's table does not have, and so nobody's range."""
        return (self.ack.table_base_handle + self.ack.table_handles) & 0xFFFF_FFFF_FFFF_FFFF

    def handle(self, index: int) -> int:
        """The handle at `index` of our range; raises `NotApplicable` if so many were not granted."""
        if index >= self.ack.handle_count:
            raise NotApplicable(f"the target grants {self.ack.handle_count} handles, the case needs {index + 1}")
        return self.ack.first_handle + index

    def need_quota(self, blocks: int) -> None:
        """Raises `NotApplicable` if so many blocks can not be bound in addition to those that are."""
        needed = self._bound_blocks + blocks
        if needed > self.ack.allocation_quota:
            raise NotApplicable(f"the target grants {self.ack.allocation_quota} blocks, the case needs {needed}")

    # --- requests ---

    def request_id(self) -> int:
        self._next_request_id += 1
        return self._next_request_id

    def send(self, *requests: Request | bytes, beyond_credits: bool = False) -> None:
        """Each a Send, all sent at once.

        Raises `NotApplicable` if Request Credits do not allow so many, unless that is what the case is about.
        """
        needed = sum(map(len, self._outstanding.values())) + len(requests)
        if self.ack.request_credits and needed > self.ack.request_credits and not beyond_credits:
            raise NotApplicable(f"the target grants {self.ack.request_credits} requests, the case needs {needed}")
        self.stream.send_together(*(one if isinstance(one, bytes) else one.pack() for one in requests))

    def answer(self, request: Request | None = None, *, within_s: float | None = None) -> Answer:
        """The completion of `request`, or the next one whatever it completes. Those of others wait for their turn."""
        if request is None and self._early:
            return self._early.pop(next(iter(self._early)))
        if request is not None and request.request_id in self._early:
            return self._early.pop(request.request_id)
        what = (
            "a COMPLETION" if request is None else f"the COMPLETION of {type(request).__name__} {request.request_id:#x}"
        )
        while True:
            message = self.stream.next_send(what, within_s=within_s)
            came = self._parse(message)
            if not isinstance(came, Completion):
                raise Deviation(what, str(came))
            self.note_completion(came)
            answer = Answer(came, message)
            if request is None or came.request_id == request.request_id:
                return answer
            self._early[came.request_id] = answer

    def expect_outstanding(self, request: Request) -> None:
        """None of the completions that came while others were awaited is that of `request`. Raises `Deviation`."""
        expect(request.request_id not in self._early, f"no COMPLETION of {type(request).__name__} yet", "one")

    def call(self, request: Request) -> Completion:
        """Send `request` and take its completion."""
        self.send(request)
        return self.answer(request).completion

    def expect_status(self, request: Request, *allowed: Status, why: str = "") -> Completion:
        """`call`, which ends with one of the statuses. Raises `Deviation`."""
        completion = self.call(request)
        names = " or ".join(status.name for status in allowed)
        expect(completion.status in allowed, f"{names}{f': {why}' if why else ''}", completion.status.name)
        return completion

    def load(
        self, handle: int, lent: Lent | None, *, generation: int = 0, flags: RequestFlag = RequestFlag.NONE
    ) -> Load:
        """A LOAD into all of `lent` (None: a descriptor of no octets)."""
        return Load(self.request_id(), handle, generation, flags, _descriptor(lent))

    def store(
        self, handle: int, lent: Lent | None, *, generation: int = 0, flags: RequestFlag = RequestFlag.NONE
    ) -> Store:
        """A STORE of all of `lent`, which the target reads."""
        return Store(self.request_id(), handle, generation, flags, _descriptor(lent))

    def alloc_store(
        self, handle: int, lent: Lent | None, *, generation: int = 0, flags: RequestFlag = RequestFlag.SEAL
    ) -> AllocStore:
        return AllocStore(self.request_id(), handle, generation, flags, _descriptor(lent))

    def store_inline(
        self, handle: int, octets: bytes, *, generation: int = 0, flags: RequestFlag = RequestFlag.NONE
    ) -> Store:
        data = DataDescriptor(0, 0, len(octets))
        return Store(self.request_id(), handle, generation, flags | RequestFlag.INLINE, data, inline_data=octets)

    def alloc_store_inline(
        self, handle: int, octets: bytes, *, generation: int = 0, flags: RequestFlag = RequestFlag.SEAL
    ) -> AllocStore:
        data = DataDescriptor(0, 0, len(octets))
        return AllocStore(self.request_id(), handle, generation, flags | RequestFlag.INLINE, data, inline_data=octets)

    def free(self, handle: int, *, generation: int = 0) -> Free:
        return Free(self.request_id(), handle, generation, RequestFlag.NONE)

    # --- what cases do again and again ---

    def bind(self, index: int, octets: bytes, *, sealed: bool = True) -> Completion:
        """Bind the handle at `index` to `octets`, inline or read from us, as they fit. Raises `Deviation`."""
        self.need_quota(1)
        flags = RequestFlag.SEAL if sealed else RequestFlag.NONE
        if len(octets) <= self.ack.max_message - 40:
            request = self.alloc_store_inline(self.handle(index), octets, flags=flags)
        else:
            request = self.alloc_store(self.handle(index), self.stream.memory.lend(octets), flags=flags)
        return self.expect_status(request, Status.SUCCESS)

    def release(self, index: int) -> Completion:
        return self.expect_status(self.free(self.handle(index)), Status.SUCCESS)

    def fetch(self, handle: int, size: int, *, flags: RequestFlag = RequestFlag.NONE) -> bytes:
        """The octets of the block, which a LOAD with SUCCESS brings; `size` is the buffer's. Raises `Deviation`."""
        lent = self.stream.memory.lend(size)
        completion = self.expect_status(self.load(handle, lent, flags=flags), Status.SUCCESS)
        return bytes(lent.octets[: completion.data_length])

    def expect_contents(self, index: int, octets: bytes, *, flags: RequestFlag = RequestFlag.NONE) -> None:
        came = self.fetch(self.handle(index), max(1, len(octets)), flags=flags)
        if came != octets:
            raise Deviation(f"the {len(octets)} octets that were stored", _difference(octets, came))

    def goes_on(self) -> None:
        """Any completion of a request shows it."""
        self.call(self.load(self.first, None, flags=RequestFlag.ALLOW_UNSEALED))

    def finish(self) -> None:
        self.stream.finish()
        self.stream.expect_close("after the initiator's FIN")

    # --- ---

    @staticmethod
    def _parse(message: Message) -> Completion | HelloAck:
        expect(message.opcode in SENDS, "a Send", message)
        try:
            return parse_response(message.payload)
        except WireFormatError as error:
            raise Deviation("a well-formed KBTP message", f"{error}: {message.payload.hex()}") from None

    def _note_request(self, octets: bytes) -> None:
        """A request, well-formed or not, is completed once if it has a common header; HELLO is not (profile 1, 2)."""
        if len(octets) >= COMMON_HEADER_BYTES and octets[1] != Opcode.HELLO:
            request_id, handle = int.from_bytes(octets[4:12], "big"), int.from_bytes(octets[12:20], "big")
            self._outstanding.setdefault(request_id, []).append(_Sent(handle, octets[1]))

    def note_completion(self, completion: Completion) -> None:
        """The request of `completion`, which echoes its handle, is outstanding, and is no more. Raises `Deviation`."""
        sent = self._outstanding.get(completion.request_id)
        if sent is None:
            raise Deviation("a COMPLETION of a request that is outstanding", f"one of {completion.request_id:#x}")
        request = next((one for one in sent if one.handle == completion.handle), None)
        if request is None:
            raise Deviation(f"handle {sent[0].handle} echoed", str(completion.handle))
        sent.remove(request)
        if not sent:
            del self._outstanding[completion.request_id]
        if completion.status is Status.SUCCESS:
            self._bound_blocks += _BLOCKS_BOUND_BY.get(request.opcode, 0)


def _descriptor(lent: Lent | None) -> DataDescriptor:
    return DataDescriptor(0, 0, 0) if lent is None else DataDescriptor(lent.stag, lent.to, len(lent))


def _difference(expected: bytes, came: bytes) -> str:
    if len(came) != len(expected):
        return f"{len(came)} octets"
    at = next(index for index, (one, other) in enumerate(zip(expected, came, strict=True)) if one != other)
    return f"other ones from octet {at} on: {came[at : at + 16].hex()}"
