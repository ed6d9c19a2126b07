"""What travelled on a KBTP connection, message by message: MPA, RDMAP and KBTP of both directions.

Nothing here takes part in a connection; it looks on. What cannot be decoded becomes a record with a `problem`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Generator, Iterator
from dataclasses import dataclass, field, replace

from kbtp.errors import PeerMisbehaved, WireFormatError
from kbtp.iwarp.ddp import TO_MASK, TaggedSegment, UntaggedSegment, parse_segment
from kbtp.iwarp.fpdu import FpduDecoder
from kbtp.iwarp.mpa import (
    ActiveStartup,
    MpaOptions,
    MpaRejected,
    MpaStartupError,
    Negotiated,
    PassiveStartup,
    PeerRequest,
    RtrKind,
)
from kbtp.iwarp.rdmap import (
    FIXED_BYTES,
    INVALIDATING,
    QN_SEND,
    QUEUE_OF,
    AtomicRequest,
    AtomicResponse,
    RdmapOpcode,
    ReadRequest,
    opcode_of,
)
from kbtp.iwarp.terminate import parse_terminate
from kbtp.limits import IRD_ORD_MAX
from kbtp.testing.describe import INITIATOR, TARGET, Record, Value, describe_message, named_values, plain
from kbtp.wire import ConnectionData

_CARRIERS = {
    RdmapOpcode.WRITE: "RDMA Write",
    RdmapOpcode.READ_REQUEST: "RDMA Read Request",
    RdmapOpcode.READ_RESPONSE: "RDMA Read Response",
    RdmapOpcode.SEND: "Send",
    RdmapOpcode.SEND_INVALIDATE: "Send with Invalidate",
    RdmapOpcode.SEND_SOLICITED: "Send with SE",
    RdmapOpcode.SEND_SOLICITED_INVALIDATE: "Send with SE and Invalidate",
    RdmapOpcode.TERMINATE: "Terminate",
    RdmapOpcode.IMMEDIATE: "Immediate Data",
    RdmapOpcode.IMMEDIATE_SOLICITED: "Immediate Data with SE",
    RdmapOpcode.ATOMIC_REQUEST: "Atomic Request",
    RdmapOpcode.ATOMIC_RESPONSE: "Atomic Response",
}
_SENDS = {opcode for opcode, queue in QUEUE_OF.items() if queue == QN_SEND and opcode not in FIXED_BYTES}


@dataclass(slots=True)
class _UntaggedMessage:
    """The message a queue is in the middle of."""

    msn: int
    octets: bytearray = field(default_factory=bytearray)


@dataclass(slots=True)
class _TaggedMessage:
    """The RDMA Write or Read Response a direction is in the middle of."""

    opcode: RdmapOpcode
    stag: int
    to: int
    length: int = 0
    segments: int = 0


@dataclass(slots=True)
class _Direction:
    """One half connection in full operation, and what its sender waits for from the other."""

    sender: str
    decoder: FpduDecoder
    may_send_rtr: bool = False
    dead: bool = False
    queues: dict[int, _UntaggedMessage] = field(default_factory=dict)
    tagged: _TaggedMessage | None = None
    requests: dict[int, tuple[str, float]] = field(default_factory=dict)
    """KBTP requests without an answer: name and time, by Request ID."""
    reads: deque[float] = field(default_factory=deque)
    atomics: dict[int, float] = field(default_factory=dict)


class Conversation:
    """The iWARP stream of one TCP connection. Feed `receive` the octets of both ends as they were captured."""

    def __init__(self) -> None:
        self.is_kbtp = False
        """Whether either side sent KBTP connection data."""
        self.foreign = ""
        """Why this is no MPA connection, once that is known."""
        self._passive = PassiveStartup(MpaOptions())
        self._request: PeerRequest | None = None
        self._active: ActiveStartup | None = None
        self._initiator: object = None
        self._directions: dict[str, _Direction] = {}
        self._rejected = False

    @property
    def is_mpa(self) -> bool:
        """Whether an MPA Request has been seen whole."""
        return self._request is not None

    def sender_at(self, end: object) -> str:
        """`end` is the initiator's if it spoke first."""
        return INITIATOR if end == self._initiator else TARGET

    def receive(self, time_s: float, end: object, octets: bytes) -> Iterator[Record]:
        """What `octets`, sent by `end`, completes."""
        if self.foreign or self._rejected or not octets:
            return
        if self._initiator is None:
            self._initiator = end
        sender = self.sender_at(end)
        if not self._directions:
            try:
                octets = yield from self._start(time_s, sender, octets)
            except MpaStartupError as error:
                self.foreign = str(error)
                if self.is_mpa:
                    yield Record(time_s, sender, "MPA", problem=str(error))
                return
        if octets and self._directions:
            yield from self._stream(time_s, self._directions[sender], octets)

    def lose(self, time_s: float, end: object, problem: str) -> Iterator[Record]:
        """Octets of `end` are missing in the capture: nothing after them can be decoded."""
        sender = self.sender_at(end)
        if sender in self._directions:
            self._directions[sender].dead = True
        if self.is_mpa:
            yield Record(time_s, sender, "capture", problem=problem)

    def finish(self, time_s: float) -> Iterator[Record]:
        """What is left open at the end of the capture."""
        for direction in self._directions.values():
            inside = direction.decoder.half_received or direction.queues or direction.tagged
            if inside and not direction.dead:
                yield Record(time_s, direction.sender, "capture", problem="it ends inside a message")
            if direction.requests:
                waiting = ", ".join(f"{request_id} {name}" for request_id, (name, _) in direction.requests.items())
                yield Record(time_s, direction.sender, "capture", problem=f"it has no answer to request {waiting}")

    def _start(self, time_s: float, sender: str, octets: bytes) -> Generator[Record, None, bytes]:
        """MPA start-up; returns the octets that belong to the stream after it."""
        if sender == INITIATOR:
            self._request = self._passive.receive_data(octets)
            if self._request is not None:
                yield self._describe_request(time_s, self._request)
            return b""
        if self._request is None:
            raise MpaStartupError("the other side spoke before an MPA Request was complete")
        if self._active is None:
            self._active = _as_it_was_requested(self._request)
        reply = self._active.receive_data(octets)
        if reply is None:
            return b""
        yield self._describe_reply(time_s, reply)
        if isinstance(reply, MpaRejected):
            self._rejected = True
            return b""
        may_send_rtr = RtrKind.SEND in self._request.rtr_offered
        self._directions = {
            INITIATOR: _Direction(INITIATOR, FpduDecoder(crc=reply.crc, markers=reply.tx_markers), may_send_rtr),
            TARGET: _Direction(TARGET, FpduDecoder(crc=reply.crc, markers=reply.rx_markers)),
        }
        return self._active.surplus

    def _describe_request(self, time_s: float, request: PeerRequest) -> Record:
        described: dict[str, Value] = {
            "revision": request.revision,
            "crc": _wanted(request.wants_crc),
            "markers": _wanted(request.wants_markers),
        }
        if request.enhanced:
            described |= {"ird": request.peer_ird, "ord": request.peer_ord}
        if request.rtr_offered:
            described["rtr"] = plain(request.rtr_offered)
        return self._with_connection_data(Record(time_s, INITIATOR, "MPA Request", "", described), request.private_data)

    def _describe_reply(self, time_s: float, reply: Negotiated | MpaRejected) -> Record:
        if isinstance(reply, MpaRejected):
            record = Record(time_s, TARGET, "MPA Reply", "", {"accepted": "no"})
        else:
            described: dict[str, Value] = {
                "accepted": "yes",
                "crc": "on" if reply.crc else "off",
                "markers": _wanted(reply.tx_markers),
                "ird": reply.peer_ird,
                "ord": reply.peer_ord,
            }
            record = Record(time_s, TARGET, "MPA Reply", "", described)
        return self._with_connection_data(record, reply.private_data)

    def _with_connection_data(self, record: Record, private_data: bytes) -> Record:
        try:
            nonce = ConnectionData.parse(private_data).nonce
        except WireFormatError as error:
            return replace(record, problem=f"no KBTP connection data: {error}")
        self.is_kbtp = True
        record.fields["nonce"] = plain(nonce)
        return record

    def _stream(self, time_s: float, direction: _Direction, octets: bytes) -> Iterator[Record]:
        if direction.dead:
            return
        try:
            for ulpdu in direction.decoder.receive(octets):
                yield from self._segment(time_s, direction, ulpdu)
        except PeerMisbehaved as error:
            # RFC 5044 8: where the next FPDU begins cannot be trusted any more.
            direction.dead = True
            problem = f"{error}; nothing after it in this direction is decoded"
            yield Record(time_s, direction.sender, "FPDU", problem=problem)

    def _segment(self, time_s: float, direction: _Direction, ulpdu: memoryview) -> Iterator[Record]:
        try:
            segment = parse_segment(ulpdu)
            opcode = opcode_of(segment)
        except PeerMisbehaved as error:
            yield Record(time_s, direction.sender, "DDP segment", problem=str(error))
            return
        if isinstance(segment, TaggedSegment):
            yield from self._tagged(time_s, direction, opcode, segment)
        else:
            yield from self._untagged(time_s, direction, opcode, segment)

    def _tagged(
        self, time_s: float, direction: _Direction, opcode: RdmapOpcode, segment: TaggedSegment
    ) -> Iterator[Record]:
        message = direction.tagged
        if message is None:
            message = direction.tagged = _TaggedMessage(opcode, segment.stag, segment.to)
        due = (message.opcode, message.stag, (message.to + message.length) & TO_MASK)
        if (opcode, segment.stag, segment.to) != due:
            direction.tagged = None
            problem = f"STag {segment.stag:#x}, TO {segment.to:#x} came, STag {due[1]:#x}, TO {due[2]:#x} was due"
            yield Record(time_s, direction.sender, _CARRIERS[opcode], problem=problem)
            return
        message.length += len(segment.payload)
        message.segments += 1
        if not segment.last:
            return
        direction.tagged = None
        described: dict[str, Value] = {
            "stag": message.stag,
            "to": message.to,
            "length": message.length,
            "segments": message.segments,
        }
        record = Record(time_s, direction.sender, _CARRIERS[opcode], "", described)
        if opcode is RdmapOpcode.READ_RESPONSE:
            reads = self._other(direction).reads
            record = _answered(record, time_s, reads.popleft() if reads else None, "RDMA Read Request")
        yield record

    def _untagged(
        self, time_s: float, direction: _Direction, opcode: RdmapOpcode, segment: UntaggedSegment
    ) -> Iterator[Record]:
        message = direction.queues.setdefault(segment.qn, _UntaggedMessage(segment.msn))
        if (segment.msn, segment.mo) != (message.msn, len(message.octets)):
            del direction.queues[segment.qn]
            came, due = f"MSN {segment.msn}, MO {segment.mo}", f"MSN {message.msn}, MO {len(message.octets)}"
            yield Record(time_s, direction.sender, _CARRIERS[opcode], problem=f"{came} came, {due} was due")
            return
        message.octets += segment.payload
        if segment.last:
            del direction.queues[segment.qn]
            yield self._message(time_s, direction, opcode, segment.ulp_word, bytes(message.octets))

    def _message(
        self, time_s: float, direction: _Direction, opcode: RdmapOpcode, ulp_word: int, octets: bytes
    ) -> Record:
        record = Record(time_s, direction.sender, _CARRIERS[opcode])
        may_be_rtr, direction.may_send_rtr = direction.may_send_rtr, False
        try:
            if opcode in _SENDS:
                if opcode in INVALIDATING:
                    record.fields["invalidate_stag"] = ulp_word
                if may_be_rtr and not octets:
                    return replace(record, message="RTR")
                return self._send(time_s, direction, record, octets)
            due_bytes = FIXED_BYTES.get(opcode, len(octets))
            if len(octets) != due_bytes:
                return replace(record, problem=f"{len(octets)} octets, it has {due_bytes}")
            if opcode is RdmapOpcode.TERMINATE:
                return _describe_terminate(record, octets)
            return self._request_or_response(time_s, direction, record, opcode, octets)
        except PeerMisbehaved as error:
            return replace(record, problem=str(error))

    def _request_or_response(
        self, time_s: float, direction: _Direction, record: Record, opcode: RdmapOpcode, octets: bytes
    ) -> Record:
        """RDMA Read Requests, atomics and Immediate Data."""
        if opcode is RdmapOpcode.READ_REQUEST:
            direction.reads.append(time_s)
            return _with_fields(record, ReadRequest.parse(octets))
        if opcode is RdmapOpcode.ATOMIC_REQUEST:
            request = AtomicRequest.parse(octets)
            direction.atomics[request.request_id] = time_s
            return _with_fields(record, request)
        if opcode is RdmapOpcode.ATOMIC_RESPONSE:
            response = AtomicResponse.parse(octets)
            asked_s = self._other(direction).atomics.pop(response.request_id, None)
            return _answered(_with_fields(record, response), time_s, asked_s, "Atomic Request")
        record.fields["data"] = plain(octets)
        return record

    def _send(self, time_s: float, direction: _Direction, record: Record, octets: bytes) -> Record:
        if not self.is_kbtp:
            record.fields["length"] = len(octets)
            return record
        described = describe_message(octets, direction.sender)
        record = replace(described, time_s=time_s, carrier=record.carrier, fields={**described.fields, **record.fields})
        request_id = record.fields.get("request_id")
        if not isinstance(request_id, int):
            return record
        if direction.sender == TARGET:
            name, asked_s = self._directions[INITIATOR].requests.pop(request_id, ("request", None))
            return _answered(record, time_s, asked_s, name)
        if request_id in direction.requests:
            return replace(record, problem=f"{record.problem} Request ID {request_id} is outstanding already".strip())
        direction.requests[request_id] = (record.message, time_s)
        return record

    def _other(self, direction: _Direction) -> _Direction:
        return self._directions[TARGET if direction.sender == INITIATOR else INITIATOR]


def _as_it_was_requested(request: PeerRequest) -> ActiveStartup:
    """The initiator's half as it must be to have sent `request`, to judge the Reply by."""
    options = MpaOptions(
        crc=request.wants_crc,
        want_markers=request.wants_markers,
        revision=request.revision if request.enhanced else 1,
        peer_to_peer=request.rtr_offered,
    )
    return ActiveStartup(options, b"", min(request.peer_ird, IRD_ORD_MAX), min(request.peer_ord, IRD_ORD_MAX))


def _wanted(value: bool) -> str:
    return "wanted" if value else "not wanted"


def _with_fields(record: Record, header: ReadRequest | AtomicRequest | AtomicResponse) -> Record:
    return replace(record, fields=named_values(header))


def _answered(record: Record, time_s: float, asked_s: float | None, request: str) -> Record:
    """`record` with what it answers and after how long."""
    if asked_s is None:
        return replace(record, problem=f"{record.problem} no {request} of that kind is outstanding".strip())
    elapsed: dict[str, Value] = {"answers": request, "elapsed_s": round(time_s - asked_s, 9)}
    return replace(record, fields=record.fields | elapsed)


def _describe_terminate(record: Record, octets: bytes) -> Record:
    """Layer, type and code of a Terminate, by name, and the headers it quotes."""
    info = parse_terminate(octets)
    described: dict[str, Value] = {"layer": info.layer, "etype": info.etype, "code": info.code}
    if info.ddp_header:
        described["ddp_header"] = plain(info.ddp_header)
    if info.rdmap_header:
        described["rdmap_header"] = plain(info.rdmap_header)
    return replace(record, message=str(info), fields=described)
