"""One stream in full operation that an RNIC carries: what `stream.Stream` does by hand, as posts and completions.

Nothing can be malformed here below KBTP, and segments, sequence numbers and Terminate codes are not seen: cases about
those need "iwarp". What the peer reads and writes in lent memory the RNIC does by itself.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

from kbtp.conformance.deviation import Deviation, NotApplicable, expect
from kbtp.conformance.memory import Lent, Memory
from kbtp.conformance.rnic_channel import RnicChannel
from kbtp.conformance.startup import Startup
from kbtp.conformance.stream import SEGMENT_PAYLOAD_BYTES, Code, Message, Stream
from kbtp.conformance.tcp import Deadline, Tcp
from kbtp.errors import ConnectionLost
from kbtp.iwarp.mpa import EnhancedWord
from kbtp.iwarp.rdmap import INVALIDATING, RdmapOpcode, ReadRequest
from kbtp.types import TerminateCause
from kbtp.verbs.api import (
    Access,
    ConnectRequest,
    Established,
    Event,
    FetchAdd,
    MemoryRegion,
    ProtectionDomain,
    RdmaRead,
    RdmaWrite,
    Recv,
    Rejected,
    Rnic,
    Send,
    Sge,
    StreamEnded,
    WcOpcode,
    WcStatus,
    WorkCompletion,
)
from kbtp.verbs.api import Stream as VerbsStream

BELOW = "a look below KBTP, where an RNIC does everything itself"
RECEIVES = 64
RECEIVE_BYTES = 1024
LOOK_AGAIN_S = 0.05
"""The RNIC in Python serves the peer's Reads only while it is polled."""


class RnicLent(Lent):
    """What the peer does is seen only by what it leaves behind: `touched` stays empty."""

    def __init__(self, region: MemoryRegion, octets: bytearray, access: Access) -> None:
        readable, writable = bool(access & Access.REMOTE_READ), bool(access & Access.REMOTE_WRITE)
        super().__init__(region.stag, region.base_to, octets, readable, writable)
        self._before = bytes(octets)

    @property
    def unwritten(self) -> bool:
        return self.octets == self._before


class RnicMemory(Memory):
    """Lent memory is registered with the RNIC, for one stream."""

    def __init__(self, rnic: Rnic, pd: ProtectionDomain, stream: VerbsStream) -> None:
        super().__init__()
        self._rnic, self._pd, self._stream = rnic, pd, stream
        self._regions: dict[int, MemoryRegion] = {}

    def lend(
        self, octets: bytes | int, *, readable: bool = True, writable: bool = True, atomic: bool = False,
        to: int = 0x1000,
    ) -> Lent:  # fmt: skip
        """`to` holds where the RNIC lets us choose it. The peer may do atomics where `atomic`."""
        access = _rights(readable, writable) | (Access.REMOTE_ATOMIC if atomic else Access.NONE)
        return self._register_lent(bytearray(octets), access, to)

    def lend_again(self, lent: Lent, *, readable: bool = True, writable: bool = True) -> Lent:
        return self._register_lent(lent.octets, _rights(readable, writable), lent.to)

    def _register_lent(self, memory: bytearray, access: Access, to: int) -> Lent:
        region = self.register(memory or bytearray(1), access, to=to)
        lent = RnicLent(region, memory, access)
        self._lent[region.stag] = lent
        self._regions[region.stag] = region
        return lent

    def register(self, memory: bytearray, access: Access, *, to: int = 0) -> MemoryRegion:
        base_to = 0 if self._rnic.capabilities.own_base else to
        return self._rnic.register(memory, access, pd=self._pd, stream=self._stream, base_to=base_to)

    def take_back(self, lent: Lent) -> None:
        super().take_back(lent)
        self._regions.pop(lent.stag).revoke()


def _rights(readable: bool, writable: bool) -> Access:
    return (Access.REMOTE_READ if readable else Access.NONE) | (Access.REMOTE_WRITE if writable else Access.NONE)


class RnicStream(Stream):
    """`connect` and `accept` make one. What only a stream by hand can do raises `NotApplicable`."""

    memory: RnicMemory

    def __init__(self, channel: RnicChannel, deadline: Deadline, startup: Startup, *, active: bool) -> None:
        """Of the end that is `active` nobody else has the channel."""
        self._deadline = deadline
        self.active = active
        self.messages: list[Message] = []
        self.on_send: Callable[[bytes], None] = lambda payload: None
        self._rnic = rnic = channel.rnic
        self._pd = rnic.allocate_pd()
        self._channel = channel
        self._octets = bytearray(RECEIVES * RECEIVE_BYTES)
        self._buffers = rnic.register(self._octets, Access.NONE, pd=self._pd)
        self._inbox: list[Message] = []
        self._done: dict[int, int] = {}
        self._reads: dict[int, tuple[int, bytearray, MemoryRegion]] = {}  # by the STag of the sink
        self._last_wr_id = RECEIVES
        self._ended: StreamEnded | None = None
        self._answer: Established | Rejected | None = None
        self.request = self.reply = startup.frame(reply=False)

    @classmethod
    def connect(
        cls, rnic: Rnic, host: str, port: int, deadline: Deadline, startup: Startup | None = None
    ) -> RnicStream:
        """A stream that the target has accepted. Raises `Deviation`, `NotApplicable` for what verbs cannot ask for."""
        startup = startup or Startup()
        stream = cls(RnicChannel(rnic), deadline, startup, active=True)
        try:
            answer = stream._connect(host, port, startup)
            if isinstance(answer, Rejected):
                raise Deviation("an accepted stream", "a rejected one")
        except BaseException:
            stream.close()
            raise
        stream.reply = Startup(private_data=answer.private_data).frame(reply=True)
        return stream

    @classmethod
    def rejection(cls, rnic: Rnic, host: str, port: int, deadline: Deadline, startup: Startup) -> bytes:
        """The private data with which the target rejects us. Raises as `connect`."""
        stream = cls(RnicChannel(rnic), deadline, startup, active=True)
        try:
            answer = stream._connect(host, port, startup)
        finally:
            stream.close()
        if not isinstance(answer, Rejected):
            raise Deviation("a rejected stream", "an accepted one")
        return answer.private_data

    @classmethod
    def accept(cls, channel: RnicChannel, request: ConnectRequest, deadline: Deadline, startup: Startup) -> RnicStream:
        """Raises `NotApplicable` for what verbs cannot ask for."""
        word = _check(startup)
        stream = cls(channel, deadline, startup, active=False)
        verbs = request.accept(
            pd=stream._pd, private_data=startup.private_data, ird=word.ird, ord_=word.ord_, receives=stream._receives()
        )
        stream._use(verbs)
        stream.request = Startup(private_data=request.private_data).frame(reply=False)
        return stream

    @property
    def tcp(self) -> Tcp:  # type: ignore[override]
        raise NotApplicable(BELOW)

    @property
    def deadline(self) -> Deadline:
        return self._deadline

    def _connect(self, host: str, port: int, startup: Startup) -> Established | Rejected:
        """Raises `Deviation` if there is no answer."""
        word = _check(startup)
        verbs = self._channel.verbs.connect(
            host, port, pd=self._pd, private_data=startup.private_data, ird=word.ird, ord_=word.ord_,
            timeout_s=self.deadline.left_s(), receives=self._receives(),
        )  # fmt: skip
        self._use(verbs)
        self._wait(lambda: self._answer is not None, "an answer to a connection")
        if self._answer is None:
            raise Deviation("an answer to a connection", str(self._ended))
        return self._answer

    def _use(self, verbs: VerbsStream) -> None:
        self._verbs = verbs
        self._channel.hand_events_of(verbs, self._take)
        self.memory = RnicMemory(self._rnic, self._pd, verbs)

    def _receives(self) -> list[Recv]:
        return [self._receive(slot) for slot in range(RECEIVES)]

    def _receive(self, slot: int) -> Recv:
        return Recv(slot, Sge(self._buffers, slot * RECEIVE_BYTES, RECEIVE_BYTES))

    # --- what we send ---

    def send(self, payload: bytes, *, opcode: int = RdmapOpcode.SEND, invalidate_stag: int = 0) -> None:
        self.on_send(payload)
        self._post([Send(self._wr_id(), payload, invalidate_stag=invalidate_stag if opcode in INVALIDATING else None)])

    def send_together(self, *payloads: bytes) -> None:
        """Each a Send, all posted at once."""
        for payload in payloads:
            self.on_send(payload)
        self._post([Send(self._wr_id(), payload) for payload in payloads])

    def write(self, stag: int, to: int, payload: bytes) -> None:
        region = self.memory.register(bytearray(payload), Access.NONE)
        self._post([RdmaWrite(self._wr_id(), (Sge(region, 0, len(payload)),), stag, to)])

    def request_read(
        self, source_stag: int, source_to: int, size: int, *, sink: bytes | int | None = None
    ) -> ReadRequest:
        """The sink is a buffer of its own."""
        octets = bytearray(size if sink is None else sink)
        region = self.memory.register(octets, Access.NONE)
        wr_id = self._wr_id()
        self._reads[region.stag] = wr_id, octets, region
        self._post([RdmaRead(wr_id, Sge(region, 0, size), source_stag, source_to)])
        return ReadRequest(region.stag, region.base_to, size, source_stag, source_to)

    def read_response(self, request: ReadRequest, *, within_s: float | None = None) -> bytes:
        wr_id, octets, _ = self._reads.pop(request.sink_stag)
        self._result(wr_id, f"the end of an RDMA Read of {request.size} octets", within_s)
        return bytes(octets)

    def request_fetch_add(self, stag: int, to: int, add_data: int, add_mask: int) -> int:
        wr_id = self._wr_id()
        self._post([FetchAdd(wr_id, stag, to, add_data, add_mask)])
        return wr_id

    def fetch_add(self, stag: int, to: int, add_data: int, add_mask: int) -> int:
        return self._result(self.request_fetch_add(stag, to, add_data, add_mask), "the end of a FetchAdd", None)

    def send_ulpdus(self, *ulpdus: bytes) -> None:
        raise NotApplicable(BELOW)

    def ulpdus_of_send(
        self, payload: bytes, *, opcode: int = RdmapOpcode.SEND, invalidate_stag: int = 0,
        segment_bytes: int = SEGMENT_PAYLOAD_BYTES,
    ) -> list[bytes]:  # fmt: skip
        raise NotApplicable(BELOW)

    def send_terminate(self, layer: int, etype: int, code: int, *, bits: int = 0, rest: bytes = b"") -> None:
        """An RNIC says by itself which code it is."""
        self._verbs.terminate(TerminateCause((layer, etype, code)))
        self._pump(0)

    def finish(self) -> None:
        """We send no more."""
        self._verbs.disconnect()
        self._pump(0)

    def reset(self) -> None:
        """We vanish."""
        self.close()

    def close(self) -> None:
        if self.active:
            self._channel.close()
        elif self._ended is None:
            self._verbs.abort()

    def _wr_id(self) -> int:
        self._last_wr_id += 1
        return self._last_wr_id

    def _post(self, requests: list[Send] | list[RdmaWrite] | list[RdmaRead] | list[FetchAdd]) -> None:
        """A peer that is gone shows when something is expected of it."""
        try:
            self._verbs.post(requests)
        except ConnectionLost:
            return
        self._pump(0)

    # --- what the peer sends ---

    def await_ulpdu(self, what: str, *, within_s: float | None = None) -> bool:
        raise NotApplicable(BELOW)

    def respond_to_read(self, request: ReadRequest, octets: bytes) -> None:
        raise NotApplicable(BELOW)

    def message(self, what: str, *, within_s: float | None = None) -> Message | None:
        """The peer's next Send; None at the end of the stream. Raises `Deviation`."""
        if not self._wait(lambda: bool(self._inbox), what, within_s):
            return None
        self.messages.append(self._inbox.pop(0))
        return self.messages[-1]

    def next_send(self, what: str, *, within_s: float | None = None) -> Message:
        """Raises `Deviation`."""
        message = self.message(what, within_s=within_s)
        if message is None:
            raise Deviation(what, f"the end of the stream: {self._reason()}")
        return message

    def messages_of(self, opcode: RdmapOpcode) -> Iterator[Message]:
        """Those that came so far; Sends alone are seen."""
        return (message for message in self.messages if message.opcode is opcode)

    # --- how it ends ---

    def expect_terminate(
        self, *allowed: TerminateCause | Code, within_s: float | None = None, why: str = "", served: bool = True
    ) -> Message:
        """The peer ends the stream; what it says there is not seen, nor in the result. Raises `Deviation`."""
        what = f"the end of the stream: {why or 'a fault of ours'}"
        if not served:
            self._wait(lambda: any(wr_id in self._done for wr_id, *_ in self._reads.values()), what, within_s)
            expect(self._ended is not None, what, "an RDMA Read that is served")
        self.expect_end(why or "a fault of ours", within_s=within_s)
        return Message(RdmapOpcode.TERMINATE, b"", ())

    def expect_end(self, why: str, *, within_s: float | None = None) -> Message | None:
        while self.message(f"the end of the stream: {why}", within_s=within_s) is not None:
            pass
        return None

    def expect_close(self, why: str, *, within_s: float | None = None) -> None:
        """No further message, then the end of the stream. Raises `Deviation`."""
        what = f"no further message, and the end of the stream: {why}"
        message = self.message(what, within_s=within_s)
        if message is not None:
            raise Deviation(what, str(message))

    def expect_silence(self, why: str, *, for_s: float = 0.3) -> None:
        """No message is there that was not looked at, and none comes for `for_s`. Raises `Deviation`."""
        what = f"silence on an open stream: {why}"
        left_s = self.deadline.left_s(for_s)
        end_s = time.monotonic() + left_s
        while not self._inbox and self._ended is None and (rest_s := end_s - time.monotonic()) > 0:
            self._pump(min(LOOK_AGAIN_S, rest_s))
        expect(not self._inbox, what, "a message")
        expect(self._ended is None, what, "the end of the stream")
        expect(left_s >= for_s, what, f"the end of the time of the case after {left_s:.1f} of {for_s:.1f} s")

    # --- what lent memory shows ---

    def wait_until(self, shown: Callable[[], bool], what: str) -> None:
        """The peer's RDMA operations make it so. Messages that come meanwhile wait. Raises `Deviation`."""
        if not self._wait(shown, what):
            raise Deviation(what, f"the end of the stream: {self._reason()}")

    def serve_for(self, time_s: float) -> None:
        """The peer's RDMA operations go on for so long, if it does. Messages that come meanwhile wait."""
        end_s = time.monotonic() + self.deadline.left_s(time_s)
        while self._ended is None and (rest_s := end_s - time.monotonic()) > 0:
            self._pump(min(LOOK_AGAIN_S, rest_s))

    # --- ---

    def _result(self, wr_id: int, what: str, within_s: float | None) -> int:
        if not self._wait(lambda: wr_id in self._done, what, within_s):
            raise Deviation(what, f"the end of the stream: {self._reason()}")
        return self._done.pop(wr_id)

    def _reason(self) -> str:
        return str(self._ended.reason if self._ended is not None and self._ended.reason is not None else "in order")

    def _wait(self, found: Callable[[], bool], what: str, within_s: float | None = None) -> bool:
        """False: the stream has ended before. Raises `Deviation` if neither comes in time."""
        wait_s = self.deadline.left_s(within_s)
        end_s = time.monotonic() + wait_s
        while not found():
            if self._ended is not None:
                return False
            rest_s = end_s - time.monotonic()
            if rest_s <= 0:
                raise Deviation(what, f"nothing within {wait_s:.1f} s")
            self._pump(min(LOOK_AGAIN_S, rest_s))
        return True

    def _pump(self, timeout_s: float) -> None:
        self._channel.pump(timeout_s)

    def _take(self, event: Event) -> None:
        if isinstance(event, StreamEnded | Rejected):
            self._ended = event if isinstance(event, StreamEnded) else StreamEnded(event.stream, None)
        if isinstance(event, Established | Rejected):
            self._answer = event
        if isinstance(event, WorkCompletion) and event.status is WcStatus.SUCCESS:
            if event.opcode in (WcOpcode.RECV, WcOpcode.RECV_IMMEDIATE):
                self._came(event)
            elif event.opcode in (WcOpcode.RDMA_READ, WcOpcode.ATOMIC):
                self._done[event.wr_id] = event.value

    def _came(self, event: WorkCompletion) -> None:
        start = event.wr_id * RECEIVE_BYTES
        invalidated = event.invalidated_stag
        opcode = RdmapOpcode.SEND if invalidated is None else RdmapOpcode.SEND_INVALIDATE
        payload = bytes(self._octets[start : start + event.length])
        if event.opcode is WcOpcode.RECV_IMMEDIATE:
            opcode, payload = RdmapOpcode.IMMEDIATE, event.immediate
        self._inbox.append(Message(opcode, payload, (), invalidated or 0))
        try:
            self._verbs.post_recv([self._receive(event.wr_id)])
        except ConnectionLost:
            return


def _check(startup: Startup) -> EnhancedWord:
    """Its depths. Raises `NotApplicable` for what verbs cannot ask for."""
    if startup.word is None or startup.word.rtr or startup.markers:
        raise NotApplicable("how an RNIC starts a stream, nobody chooses")
    return startup.word
