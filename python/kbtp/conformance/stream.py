"""One stream in full operation, by hand: FPDUs out, well formed or not, and the peer's messages in, checked.

What comes is held against the rules that hold for every message (RFC 5041 4 and 5, RFC 5040 4): versions, MSN, MO,
offsets, L, sizes, who may say what. A case that looks closer has `octets_in` and the segments.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from kbtp.conformance import segments
from kbtp.conformance.deviation import Deviation, expect
from kbtp.conformance.memory import Memory
from kbtp.conformance.startup import CameFrame, Startup, accepted, receive_frame
from kbtp.conformance.tcp import Deadline, Tcp
from kbtp.errors import PeerMisbehaved
from kbtp.iwarp.ddp import MSN_MASK, Segment, TaggedSegment, cut, parse_segment
from kbtp.iwarp.fpdu import FpduDecoder, FpduEncoder
from kbtp.iwarp.mpa import MpaFrame
from kbtp.iwarp.rdmap import (
    FIXED_BYTES,
    INVALIDATING,
    QN_ATOMIC_RESPONSE,
    QN_REQUEST,
    QN_SEND,
    QN_TERMINATE,
    AtomicOperation,
    AtomicRequest,
    AtomicResponse,
    RdmapOpcode,
    ReadRequest,
    opcode_of,
)
from kbtp.iwarp.terminate import parse_terminate
from kbtp.types import TerminateCause, TerminateInfo

SEGMENT_PAYLOAD_BYTES = 1400  # of what we send: one Ethernet frame
Code = tuple[int, int, int]
"""Layer, error type and error code of a Terminate."""


@dataclass(frozen=True, slots=True)
class Message:
    """One whole message of the peer. `ulpdus` are its segments, headers included."""

    opcode: RdmapOpcode
    payload: bytes
    ulpdus: tuple[bytes, ...]
    stag: int = 0
    """Of a tagged message; of a Send that invalidates, the STag that it invalidates."""
    to: int = 0
    msn: int = 0

    @property
    def terminate(self) -> TerminateInfo:
        return parse_terminate(self.payload)

    def __str__(self) -> str:
        if self.opcode is RdmapOpcode.TERMINATE:
            return f"Terminate {self.terminate}"
        return f"{self.opcode.name} of {len(self.payload)} octets"


@dataclass(slots=True)
class _Open:
    """A message of which some segments came."""

    opcode: RdmapOpcode
    first: Segment
    payload: bytearray = field(default_factory=bytearray)
    ulpdus: list[bytes] = field(default_factory=list)


class Stream:
    """`request` and `reply` are the start-up frames; `ours` is the one we sent."""

    def __init__(self, tcp: Tcp, request: CameFrame | MpaFrame, reply: CameFrame | MpaFrame, *, active: bool) -> None:
        self.tcp = tcp
        self.active = active
        self.request = request.frame if isinstance(request, CameFrame) else request
        self.reply = reply.frame if isinstance(reply, CameFrame) else reply
        self.memory = Memory()
        ours, theirs = (self.request, self.reply) if active else (self.reply, self.request)
        self.crc = ours.crc or theirs.crc
        self.encoder = FpduEncoder(crc=self.crc, markers=theirs.markers)
        self.decoder = FpduDecoder(crc=self.crc, markers=ours.markers)
        self.octets_in = bytearray()
        self.next_msn = {QN_SEND: 1, QN_REQUEST: 1, QN_TERMINATE: 1, QN_ATOMIC_RESPONSE: 1}
        self.messages: list[Message] = []
        self.expects_reads_of_ours = 0
        self.next_atomic_id = 0x0A70_0000
        self.on_send: Callable[[bytes], None] = lambda payload: None
        """Told of each message that is cut for a Send of ours."""
        self._next_msn_in = {QN_SEND: 1, QN_REQUEST: 1, QN_TERMINATE: 1, QN_ATOMIC_RESPONSE: 1}
        self._open: dict[bool, _Open] = {}  # by the T bit
        self._ulpdus: deque[bytes] = deque()
        self._terminated = False

    @classmethod
    def initiate(cls, tcp: Tcp, startup: Startup | None = None) -> Stream:
        """Send the MPA Request, take the accepting Reply. No FPDU is sent."""
        request = (startup or Startup()).frame(reply=False)
        tcp.send(request.pack())
        return cls(tcp, request, accepted(receive_frame(tcp, reply=True)), active=True)

    @classmethod
    def respond(cls, tcp: Tcp, startup: Startup | None = None) -> Stream:
        """Take the MPA Request, send the Reply: its revision, unless `startup` says more, is that of the Request."""
        request = receive_frame(tcp, reply=False)
        if startup is None:
            startup = Startup() if request.frame.word is not None else Startup.plain()
        reply = startup.frame(reply=True)
        tcp.send(reply.pack())
        return cls(tcp, request, reply, active=False)

    @property
    def deadline(self) -> Deadline:
        """That of the case."""
        return self.tcp.deadline

    # --- what we send ---

    def finish(self) -> None:
        """FIN: we send no more, and go on receiving."""
        self.tcp.finish()

    def reset(self) -> None:
        """RST: we vanish."""
        self.tcp.reset()

    def close(self) -> None:
        self.tcp.close()

    def take_msn(self, qn: int = QN_SEND) -> int:
        """The MSN of our next message on queue `qn`, which is used up by this."""
        msn = self.next_msn[qn]
        self.next_msn[qn] = (msn + 1) & MSN_MASK
        return msn

    def fpdu(self, ulpdu: bytes) -> bytes:
        """The next FPDU of our half, markers in their places: it must be sent before the next one is made."""
        return self.encoder.encode([ulpdu])

    def send_ulpdus(self, *ulpdus: bytes) -> None:
        """Each as one FPDU, all in one write to the socket."""
        self.tcp.send(b"".join(map(self.fpdu, ulpdus)))

    def send_octets(self, octets: bytes) -> None:
        """Octets that need not be an FPDU. Where markers are due, they are the caller's."""
        self.tcp.send(octets)

    def ulpdus_of_send(
        self, payload: bytes, *, opcode: int = RdmapOpcode.SEND, invalidate_stag: int = 0,
        segment_bytes: int = SEGMENT_PAYLOAD_BYTES,
    ) -> list[bytes]:  # fmt: skip
        """The segments of a Send with the next MSN."""
        self.on_send(payload)
        msn = self.take_msn()
        return [
            segments.untagged(
                opcode, msn, payload[at : at + size], qn=QN_SEND, mo=at, last=last, ulp_word=invalidate_stag
            )
            for at, size, last in cut(len(payload), segment_bytes)
        ]

    def send(self, payload: bytes, *, opcode: int = RdmapOpcode.SEND, invalidate_stag: int = 0) -> None:
        self.send_ulpdus(*self.ulpdus_of_send(payload, opcode=opcode, invalidate_stag=invalidate_stag))

    def send_together(self, *payloads: bytes) -> None:
        """Each a Send, all in one write to the socket."""
        self.send_ulpdus(*(ulpdu for payload in payloads for ulpdu in self.ulpdus_of_send(payload)))

    def ulpdus_of_tagged(
        self, opcode: int, stag: int, to: int, payload: bytes, *, segment_bytes: int = SEGMENT_PAYLOAD_BYTES
    ) -> list[bytes]:
        """The segments of an RDMA Write or a Read Response."""
        return [
            segments.tagged(opcode, stag, to + at, payload[at : at + size], last=last)
            for at, size, last in cut(len(payload), segment_bytes)
        ]

    def write(self, stag: int, to: int, payload: bytes) -> None:
        self.send_ulpdus(*self.ulpdus_of_tagged(RdmapOpcode.WRITE, stag, to, payload))

    def respond_to_read(self, request: ReadRequest, octets: bytes) -> None:
        self.send_ulpdus(*self.ulpdus_of_tagged(RdmapOpcode.READ_RESPONSE, request.sink_stag, request.sink_to, octets))

    def request_read(
        self, source_stag: int, source_to: int, size: int, *, sink: bytes | int | None = None
    ) -> ReadRequest:
        """Send a Read Request whose sink is a new lent buffer of `size` octets; its STag is in the result."""
        lent = self.memory.lend(size if sink is None else sink)
        request = ReadRequest(lent.stag, lent.to, size, source_stag, source_to)
        self.expects_reads_of_ours += 1
        self.send_ulpdus(segments.read_request(self.take_msn(QN_REQUEST), request))
        return request

    def request_fetch_add(self, stag: int, to: int, add_data: int, add_mask: int) -> int:
        """Send a FetchAdd (RFC 7306 5.1.1), not waiting for its end; its Request ID."""
        self.next_atomic_id = (self.next_atomic_id + 1) & 0xFFFF_FFFF
        request = AtomicRequest(AtomicOperation.FETCH_ADD, self.next_atomic_id, stag, to, add_data, add_mask)
        self.send_ulpdus(segments.atomic_request(self.take_msn(QN_REQUEST), request))
        return self.next_atomic_id

    def fetch_add(self, stag: int, to: int, add_data: int, add_mask: int) -> int:
        """The value before. Raises `Deviation` if no Atomic Response answers it."""
        request_id = self.request_fetch_add(stag, to, add_data, add_mask)
        what = "an Atomic Response"
        message = self.message(what)
        if message is None or message.opcode is not RdmapOpcode.ATOMIC_RESPONSE:
            raise Deviation(what, str(message or "the end of the connection"))
        response = AtomicResponse.parse(message.payload)
        expect(response.request_id == request_id, f"{what} to {request_id:#x}", response)
        return response.value

    def read(self, stag: int, to: int, size: int) -> bytes:
        """The octets that an RDMA Read of ours brings. Raises `Deviation`."""
        return self.read_response(self.request_read(stag, to, size))

    def send_terminate(self, layer: int, etype: int, code: int, *, bits: int = 0, rest: bytes = b"") -> None:
        msn = self.take_msn(QN_TERMINATE)
        self.send_ulpdus(segments.terminate(layer, etype, code, msn=msn, bits=bits, rest=rest))

    # --- what the peer sends ---

    def ulpdu(self, what: str, *, within_s: float | None = None) -> bytes | None:
        """The next ULPDU; None at the end of the connection. Raises `Deviation` for framing that is wrong."""
        return self._ulpdus.popleft() if self.await_ulpdu(what, within_s=within_s) else None

    def await_ulpdu(self, what: str, *, within_s: float | None = None) -> bool:
        """Wait until there is a next ULPDU, and leave it; False at the end of the connection. Raises `Deviation`."""
        while not self._ulpdus:
            octets = self.tcp.receive_some(what, within_s=within_s)
            if not octets:
                return False
            self.octets_in += octets
            try:
                self._ulpdus.extend(bytes(ulpdu) for ulpdu in self.decoder.receive(octets))
            except PeerMisbehaved as error:
                raise Deviation("FPDUs that are well formed (RFC 5044 4)", str(error)) from None
        return True

    def message(self, what: str, *, within_s: float | None = None) -> Message | None:
        """The peer's next whole message of any kind, in the order of their ends; None at the end of the connection.

        Nothing is answered. Raises `Deviation` if `what` does not come, or for a message that breaks a rule.
        """
        while True:
            ulpdu = self.ulpdu(what, within_s=within_s)
            if ulpdu is None:
                return None
            message = self._segment(ulpdu)
            if message is not None:
                self.messages.append(message)
                return message

    def next_send(self, what: str, *, within_s: float | None = None) -> Message:
        """The next Send; Reads before it are answered, Writes and Read Responses placed. Raises `Deviation`."""
        while True:
            message = self.message(what, within_s=within_s)
            if message is None:
                raise Deviation(what, "the end of the connection")
            if message.opcode is RdmapOpcode.TERMINATE:
                raise Deviation(what, str(message))
            if not self.serve(message):
                return message

    def serve(self, message: Message) -> bool:
        """Do what a Read Request, Write or Read Response asks for; False for any other message."""
        if message.opcode is RdmapOpcode.READ_REQUEST:
            request = ReadRequest.parse(message.payload)
            self.respond_to_read(request, self.memory.read(request))
        elif message.opcode in (RdmapOpcode.WRITE, RdmapOpcode.READ_RESPONSE):
            self.memory.write(message.stag, message.to, message.payload)
        else:
            return False
        return True

    def read_response(self, request: ReadRequest, *, within_s: float | None = None) -> bytes:
        """The octets that answer our `request`; other Writes are placed meanwhile. Raises `Deviation`."""
        what = f"a Read Response of {request.size} octets"
        while True:
            message = self.message(what, within_s=within_s)
            if message is None:
                raise Deviation(what, "the end of the connection")
            if message.opcode is RdmapOpcode.READ_RESPONSE:
                came = (message.stag, message.to, len(message.payload)) if message.payload else (0, 0, 0)
                asked = (request.sink_stag, request.sink_to, request.size) if request.size else (0, 0, 0)
                expect(came == asked, f"{what} to the sink that was named (RFC 5040 4.4)", came)
                self.expects_reads_of_ours -= 1
                return message.payload
            if message.opcode is not RdmapOpcode.WRITE:
                raise Deviation(what, str(message))
            self.serve(message)

    # --- how it ends ---

    def expect_terminate(
        self, *allowed: TerminateCause | Code, within_s: float | None = None, why: str = "", served: bool = True
    ) -> Message:
        """A Terminate with one of the codes, the likeliest first, then nothing but the end of the connection.

        What the peer had sent before it is passed over, unless no RDMA Read of ours may be `served`. Raises
        `Deviation`.
        """
        codes = [code.value if isinstance(code, TerminateCause) else code for code in allowed]
        what = "a Terminate " + " or ".join(f"{a}/{b}/{c:02x}" for a, b, c in codes) + (f" ({why})" if why else "")
        message = self._until_the_end(what, within_s, served=served)
        if message is None:
            raise Deviation(what, "the end of the connection without a Terminate")
        info = message.terminate
        expect((info.layer, info.etype, info.code) in codes, what, message)
        self.expect_close("after its Terminate (RFC 5040 6.2.1)", within_s=within_s)
        return message

    def expect_end(self, why: str, *, within_s: float | None = None) -> Message | None:
        """The peer ends the stream, with whatever Terminate or none. Raises `Deviation`."""
        message = self._until_the_end(f"the end of the stream: {why}", within_s)
        if message is not None:
            self.expect_close(why, within_s=within_s)
        return message

    def expect_close(self, why: str, *, within_s: float | None = None) -> None:
        """No further message, then the end of the connection. Raises `Deviation`."""
        what = f"no further message, and the end of the connection: {why}"
        message = self.message(what, within_s=within_s)
        if message is not None:
            raise Deviation(what, str(message))

    def expect_silence(self, why: str, *, for_s: float = 0.3) -> None:
        """Nothing of the peer is there that was not looked at, and nothing comes for `for_s`. Raises `Deviation`."""
        if self._ulpdus or self.decoder.half_received:
            saw = f"one more FPDU: {self._ulpdus[0][:64].hex()}" if self._ulpdus else "the beginning of one more FPDU"
            raise Deviation(f"silence on an open connection: {why}", saw)
        self.tcp.expect_silence(why, for_s=for_s)

    def _until_the_end(self, what: str, within_s: float | None, *, served: bool = True) -> Message | None:
        """The Terminate, or None where the connection ends without one."""
        while (message := self.message(what, within_s=within_s)) is not None:
            expect(served or message.opcode is not RdmapOpcode.READ_RESPONSE, what, "a Read Response")
            if message.opcode is RdmapOpcode.TERMINATE:
                return message
        return None

    # --- what every message has to keep to ---

    def _segment(self, ulpdu: bytes) -> Message | None:
        expect(not self._terminated, "nothing after a Terminate (RFC 5040 5.4)", ulpdu.hex())
        try:
            segment = parse_segment(memoryview(ulpdu))
            opcode = opcode_of(segment)
        except PeerMisbehaved as error:
            raise Deviation("a segment that is well formed", f"{error}: {ulpdu[:18].hex()}") from None
        is_tagged = isinstance(segment, TaggedSegment)
        part = self._open.get(is_tagged)
        if part is None:
            part = self._open[is_tagged] = self._begin(opcode, segment)
        self._check_next(part, opcode, segment)
        part.payload += segment.payload
        part.ulpdus.append(ulpdu)
        if not segment.last:
            return None
        del self._open[is_tagged]
        return self._whole(part)

    def _begin(self, opcode: RdmapOpcode, segment: Segment) -> _Open:
        if not isinstance(segment, TaggedSegment):
            msn = self._next_msn_in[segment.qn]
            expect(segment.msn == msn, f"MSN {msn} on queue {segment.qn} (RFC 5041 4.3)", f"MSN {segment.msn}")
            self._next_msn_in[segment.qn] = (msn + 1) & MSN_MASK
            invalidates = opcode in INVALIDATING
            expect(invalidates or segment.ulp_word == 0, "0 for the Invalidate STag (RFC 5040 4.1)", segment.ulp_word)
        elif opcode is RdmapOpcode.READ_RESPONSE:
            expect(self.expects_reads_of_ours > 0, "no Read Response that nothing asked for", "one")
        return _Open(opcode, segment)

    def _check_next(self, part: _Open, opcode: RdmapOpcode, segment: Segment) -> None:
        first, at = part.first, len(part.payload)
        expect(opcode is part.opcode, f"the next segment of {part.opcode.name}", opcode.name)
        if isinstance(segment, TaggedSegment):
            assert isinstance(first, TaggedSegment)
            same = segment.stag == first.stag and segment.to == first.to + at
            expect(same, f"STag {first.stag:#x}, TO {first.to + at:#x} (RFC 5041 5.2)", segment)
        else:
            assert not isinstance(first, TaggedSegment)
            same = (segment.qn, segment.msn, segment.mo) == (first.qn, first.msn, at)
            expect(same, f"QN {first.qn}, MSN {first.msn}, MO {at} (RFC 5041 5.2)", segment)

    def _whole(self, part: _Open) -> Message:
        fixed = FIXED_BYTES.get(part.opcode)
        expect(fixed in (None, len(part.payload)), f"{part.opcode.name} of {fixed} octets", len(part.payload))
        if part.opcode is RdmapOpcode.TERMINATE:
            self._terminated = True
        ulpdus = tuple(part.ulpdus)
        if isinstance(part.first, TaggedSegment):
            return Message(part.opcode, bytes(part.payload), ulpdus, part.first.stag, part.first.to)
        return Message(part.opcode, bytes(part.payload), ulpdus, stag=part.first.ulp_word, msn=part.first.msn)

    def messages_of(self, opcode: RdmapOpcode) -> Iterator[Message]:
        """Those that came so far."""
        return (message for message in self.messages if message.opcode is opcode)
