"""One RDMAP stream in full operation, without I/O: octets in, octets out, events between.

How the parts fit:

    post_*  -> Outbound: queue -> message -> segments -> FPDUs -> data_to_send
    receive_data -> Inbound: FPDUs -> segments -> checks -> placement -> next_event
    StreamState: what both need: outstanding requests, owed responses, events, how the stream ends

The caller moves octets: hand `receive_data` whatever TCP gives, write what `data_to_send` builds, and drain
`next_event` after both, since either may end the stream.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from kbtp.errors import ApiMisuse, ConnectionLost
from kbtp.iwarp.events import Event, Flushed, WrKind
from kbtp.iwarp.fpdu import mulpdu_for_emss
from kbtp.iwarp.inbound import Inbound
from kbtp.iwarp.memory import StreamMemory
from kbtp.iwarp.mpa import Negotiated
from kbtp.iwarp.outbound import Outbound
from kbtp.iwarp.rdmap import COMPARE_MASK_UNUSED, AtomicOperation, RdmapOpcode, send_opcode
from kbtp.iwarp.state import StreamState
from kbtp.iwarp.work import AtomicWork, Gather, PostedWork, ReadWork, Receive, SendWork, WriteWork, octets_of
from kbtp.limits import COUNTER_BYTES, IMMEDIATE_DATA_BYTES
from kbtp.types import Stag, TerminateCause, TerminateInfo

DEFAULT_EMSS_BYTES = 1460  # Ethernet without jumbo frames
Octets = bytes | bytearray | memoryview


def _check_bits(name: str, value: int, bits: int) -> None:
    if not 0 <= value < 1 << bits:
        raise ApiMisuse(f"{name} must fit {bits} bits, {value:#x} does not")


class IwarpStream:
    """RFC 5040, 5041, 5044 and 7306 on one TCP connection whose MPA start-up gave `negotiated`.

    Every `post_*` raises ApiMisuse for arguments that cannot go on the wire and ConnectionLost once the stream has
    failed. Work is executed in the order of posting and completes in that order (RFC 5040 5.5 rules 13 and 15): a Send
    posted after a Read is reported after it.
    """

    def __init__(
        self,
        negotiated: Negotiated,
        memory: StreamMemory,
        *,
        active: bool,
        mulpdu: int | None = None,
        initial_msn: Mapping[int, int] | None = None,
    ) -> None:
        """`active`: this side sent the MPA Request. `mulpdu` defaults to that of an EMSS of 1460 octets.

        `initial_msn` replaces the first MSN of the given queues, both ways, so that their wrap can be tested.
        """
        if mulpdu is None:
            mulpdu = mulpdu_for_emss(DEFAULT_EMSS_BYTES, markers=negotiated.tx_markers)
        self._state = StreamState(negotiated, memory, active=active)
        self._outbound = Outbound(self._state, mulpdu, initial_msn or {})
        self._inbound = Inbound(self._state, initial_msn or {})
        self._eof = False

    # --- posting ---

    def post_send(
        self, wr_id: int, payload: Sequence[Octets], *, invalidate_stag: Stag | None = None, solicited: bool = False
    ) -> None:
        """Send the octets of `payload`. They are read when each FPDU is built and are free after `SendCompleted`."""
        opcode = send_opcode(invalidate=invalidate_stag is not None, solicited=solicited)
        _check_bits("invalidate_stag", invalidate_stag or 0, 32)
        self._post(SendWork(wr_id, WrKind.SEND, opcode, invalidate_stag or 0, Gather(payload)))

    def post_write(self, wr_id: int, payload: Sequence[Octets], stag: Stag, to: int) -> None:
        """RDMA Write the octets of `payload` to the peer's `stag` at `to`; free after `WriteCompleted`."""
        _check_bits("stag", stag, 32)
        _check_bits("to", to, 64)
        self._post(WriteWork(wr_id, WrKind.WRITE, Gather(payload), stag, to))

    def post_read(self, wr_id: int, sink: memoryview, source_stag: Stag, source_to: int) -> None:
        """RDMA Read `len(sink)` octets into `sink`. Waits while ORD requests are outstanding; ORD 0 allows none."""
        _check_bits("source_stag", source_stag, 32)
        _check_bits("source_to", source_to, 64)
        view = octets_of(sink, writable=True)
        _check_bits("the sink's length", len(view), 32)
        self._check_ord()
        self._post(ReadWork(wr_id, WrKind.READ, view, source_stag, source_to))

    def post_fetch_add(self, wr_id: int, stag: Stag, to: int, add_data: int, add_mask: int) -> None:
        """RFC 7306 5.1.1. Shares ORD with Reads."""
        # Compare Data and Compare Mask are sent, and ignored by the peer (RFC 7306 5.2.1).
        self._post_atomic(wr_id, AtomicOperation.FETCH_ADD, stag, to, (add_data, add_mask, 0, COMPARE_MASK_UNUSED))

    def post_compare_swap(
        self, wr_id: int, stag: Stag, to: int, swap_data: int, swap_mask: int, compare_data: int, compare_mask: int
    ) -> None:
        """RFC 7306 5.1.2. Shares ORD with Reads."""
        operands = (swap_data, swap_mask, compare_data, compare_mask)
        self._post_atomic(wr_id, AtomicOperation.COMPARE_SWAP, stag, to, operands)

    def post_immediate(self, wr_id: int, data: bytes, *, solicited: bool = False) -> None:
        """RFC 7306 6: exactly 8 octets, delivered like a Send."""
        if len(data) != IMMEDIATE_DATA_BYTES:
            raise ApiMisuse(f"Immediate Data has {IMMEDIATE_DATA_BYTES} octets, not {len(data)}")
        opcode = RdmapOpcode.IMMEDIATE_SOLICITED if solicited else RdmapOpcode.IMMEDIATE
        self._post(SendWork(wr_id, WrKind.IMMEDIATE, opcode, 0, Gather((bytes(data),))))

    def post_receive(self, wr_id: int, buffer: memoryview) -> None:
        """`buffer` takes the octets of one Send of the peer, or is used up by one Immediate Data message."""
        receive = Receive(wr_id, octets_of(buffer, writable=True))
        self._check_alive()
        self._state.receives.append(receive)

    def _post_atomic(
        self, wr_id: int, operation: AtomicOperation, stag: Stag, to: int, operands: tuple[int, int, int, int]
    ) -> None:
        _check_bits("stag", stag, 32)
        _check_bits("to", to, 64)
        for operand in operands:
            _check_bits("an atomic's operand", operand, 8 * COUNTER_BYTES)
        self._check_ord()
        self._post(AtomicWork(wr_id, WrKind.ATOMIC, operation, stag, to, *operands))

    def _post(self, work: PostedWork) -> None:
        self._check_alive()
        self._outbound.post(work)

    def _check_ord(self) -> None:
        if self._state.negotiated.ord_ == 0:
            raise ApiMisuse("ORD is 0 on this stream: no Read and no atomic can ever leave (RFC 5040 6.1)")

    def _check_alive(self) -> None:
        if self._state.failed:
            raise ConnectionLost("the stream has ended", self._state.received_terminate)

    # --- moving octets ---

    def data_to_send(self, limit_bytes: int) -> list[bytes]:
        """Whole FPDUs, one a list element, until at least `limit_bytes` are built or nothing may be sent.

        Their payload is a copy. A Read Response whose source is refused makes the stream fail in here.
        """
        return self._outbound.data_to_send(limit_bytes)

    def wants_to_send(self) -> bool:
        """True if `data_to_send` would return something."""
        return self._outbound.wants_to_send()

    def receive_data(self, data: Octets) -> None:
        """Take octets from TCP in any split. Never raises for what the peer sends: `Failed` is reported instead.

        After a failure everything is dropped silently (RFC 5041 7).
        """
        if not self._state.failed and not self._eof:
            self._inbound.receive(data)

    def receive_eof(self) -> bool:
        """The peer's FIN. True if it came between messages, with nothing half received."""
        self._eof = True
        return not self._inbound.half_received

    def next_event(self) -> Event | None:
        return self._state.events.popleft() if self._state.events else None

    def set_mulpdu(self, mulpdu: int) -> None:
        """Cut messages that have not begun to fit `mulpdu` (RFC 5044 4.5). Raises ApiMisuse outside 128..64768."""
        self._outbound.set_mulpdu(mulpdu)

    # --- ending ---

    def terminate(self, cause: TerminateCause) -> None:
        """End the stream with a Terminate that quotes no header: nothing is placed or delivered from here on.

        A passive side that has received nothing yet may not send even that (RFC 5044 7.1.2 rule 4): the stream is then
        `ended` at once. Without effect on a stream that has failed.
        """
        if self._state.failed:
            return
        if self._state.may_send:
            self._state.end_with(cause, None)
        else:
            self._state.failed = True

    def flush(self) -> list[Flushed]:
        """End the stream without a further word (a queued Terminate still goes out) and give up what is outstanding.

        Each work request that was not reported complete is in the result once, in order of posting, receives last.
        """
        self._outbound.drop_work()
        return self._state.flush()

    @property
    def failed(self) -> bool:
        """Nothing more is accepted: the peer broke the protocol or sent a Terminate, or this side ended the stream."""
        return self._state.failed

    @property
    def ended(self) -> bool:
        """Nothing more is accepted, and nothing waits to be sent either."""
        return self._state.failed and self._state.terminate_payload is None

    @property
    def terminate_sent(self) -> bool:
        """`data_to_send` has handed the Terminate out."""
        return self._state.sent_cause is not None and self._state.terminate_payload is None

    @property
    def sent_cause(self) -> TerminateCause | None:
        """The cause of this side's Terminate, sent or waiting."""
        return self._state.sent_cause

    @property
    def received_terminate(self) -> TerminateInfo | None:
        return self._state.received_terminate
