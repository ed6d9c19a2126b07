"""The receiving half of a stream: FPDUs become segments, segments are checked and placed, messages delivered.

Checks come in this order, and the first that fails names the Terminate: CRC and markers (`fpdu`), DDP header and
version (`ddp`), RDMAP version, opcode, T bit and queue (`rdmap`), then here MSN, MO, the message's size, the buffer,
and last the rights (`memory`). TCP keeps order and a sender must too (RFC 5041 5.3), so MSN and MO are exactly the
next ones: a hole would hand old buffer content to the caller.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

from kbtp.atomics import compare_swap, fetch_add
from kbtp.errors import PeerMisbehaved
from kbtp.iwarp.ddp import MSN_MASK, TaggedSegment, UntaggedSegment, parse_segment
from kbtp.iwarp.events import AtomicCompleted, ImmediateReceived, ReadCompleted, Received
from kbtp.iwarp.fpdu import FpduDecoder
from kbtp.iwarp.mpa import RtrKind
from kbtp.iwarp.outbound import FIRST_MSN
from kbtp.iwarp.rdmap import (
    FIXED_BYTES,
    INVALIDATING,
    QN_ATOMIC_RESPONSE,
    QN_REQUEST,
    QN_SEND,
    QN_TERMINATE,
    SOLICITED,
    AtomicOperation,
    AtomicRequest,
    AtomicResponse,
    RdmapOpcode,
    ReadRequest,
    opcode_of,
)
from kbtp.iwarp.state import StreamState
from kbtp.iwarp.terminate import Offender, parse_terminate
from kbtp.iwarp.work import AtomicWork, OwedRead, ReadWork
from kbtp.types import TerminateCause


class Inbound:
    def __init__(self, state: StreamState, initial_msn: Mapping[int, int]) -> None:
        self._state = state
        self._decoder = FpduDecoder(crc=state.negotiated.crc, markers=state.negotiated.rx_markers)
        self._expected_msn = {
            queue: initial_msn.get(queue, FIRST_MSN)
            for queue in (QN_SEND, QN_REQUEST, QN_TERMINATE, QN_ATOMIC_RESPONSE)
        }
        self._send_rtr_may_come = not state.active and RtrKind.SEND in state.negotiated.rtr
        self._open_send: RdmapOpcode | None = None
        self._send_bytes = 0  # of the open Send, placed so far
        self._open_tagged: tuple[RdmapOpcode, int] | None = None  # its opcode and STag

    @property
    def half_received(self) -> bool:
        return self._decoder.half_received or self._open_send is not None or self._open_tagged is not None

    def receive(self, data: bytes | bytearray | memoryview) -> None:
        state = self._state
        try:
            for ulpdu in self._decoder.receive(data):
                state.may_send = True
                try:
                    self._segment(ulpdu)
                except PeerMisbehaved as error:
                    state.fail(error, Offender.of(ulpdu))
                if state.failed:
                    return
        except PeerMisbehaved as error:
            state.fail(error, None)

    def _segment(self, ulpdu: memoryview) -> None:
        segment = parse_segment(ulpdu)
        opcode = opcode_of(segment)
        if isinstance(segment, TaggedSegment):
            self._tagged(segment, opcode)
        else:
            self._untagged(segment, opcode, ulpdu)
        self._send_rtr_may_come = False

    # --- tagged: RDMA Write and Read Response ---

    def _tagged(self, segment: TaggedSegment, opcode: RdmapOpcode) -> None:
        if self._open_tagged is not None:
            open_opcode, open_stag = self._open_tagged
            if opcode is not open_opcode:
                raise PeerMisbehaved(
                    TerminateCause.RDMAP_UNEXPECTED_OPCODE, f"{opcode.name} came inside a message of {open_opcode.name}"
                )
            if segment.payload and segment.stag != open_stag:
                raise PeerMisbehaved(TerminateCause.DDP_INVALID_STAG, "the STag changed inside a message")
        if opcode is RdmapOpcode.WRITE:
            length = len(segment.payload)
            if length:  # the STag and TO of an empty segment are not checked (RFC 5041 5.2)
                self._state.memory.place(segment.stag, segment.to, length)[:] = segment.payload
        else:
            self._read_response(segment)
        if segment.last:
            self._open_tagged = None
        elif self._open_tagged is None:
            self._open_tagged = (opcode, segment.stag)

    def _read_response(self, segment: TaggedSegment) -> None:
        """Responses come in the order of the requests (RFC 5040 5.5 rule 20): only the oldest one's sink is open."""
        awaiting = self._state.awaiting
        read = awaiting[0] if awaiting else None
        if not isinstance(read, ReadWork):
            raise PeerMisbehaved(TerminateCause.DDP_INVALID_STAG, "a Read Response came that no request asked for next")
        length = len(segment.payload)
        start, end = read.placed_bytes, read.placed_bytes + length
        if length:
            if segment.stag != read.sink_stag:
                raise PeerMisbehaved(
                    TerminateCause.DDP_INVALID_STAG,
                    f"a Read Response came for STag {segment.stag:#010x}, not the one due",
                )
            if segment.to != start or end > len(read.sink):
                raise PeerMisbehaved(
                    TerminateCause.DDP_BASE_OR_BOUNDS,
                    f"{length} octets came for TO {segment.to}, {len(read.sink) - start} are due at TO {start}",
                )
            read.sink[start:end] = segment.payload
            read.placed_bytes = end
        if segment.last:
            if end != len(read.sink):
                raise PeerMisbehaved(
                    TerminateCause.DDP_BASE_OR_BOUNDS, f"a Read Response ended after {end} of {len(read.sink)} octets"
                )
            awaiting.popleft()
            self._state.return_sink(read)
            self._state.complete(read, ReadCompleted(read.wr_id, end))

    # --- untagged: all others ---

    def _untagged(self, segment: UntaggedSegment, opcode: RdmapOpcode, ulpdu: memoryview) -> None:
        expected = self._expected_msn[segment.qn]
        if segment.msn != expected:
            raise PeerMisbehaved(
                TerminateCause.DDP_MSN_OUT_OF_RANGE, f"MSN {segment.msn} came on queue {segment.qn}, {expected} is next"
            )
        if opcode is RdmapOpcode.TERMINATE:  # may cut a Send short
            self._terminate(segment)
            return
        if self._open_send is not None and opcode is not self._open_send:
            raise PeerMisbehaved(
                TerminateCause.RDMAP_UNEXPECTED_OPCODE,
                f"{opcode.name} came inside a message of {self._open_send.name}",
            )
        mo_due = self._send_bytes if opcode not in FIXED_BYTES else 0
        if segment.mo != mo_due:
            raise PeerMisbehaved(TerminateCause.DDP_INVALID_MO, f"MO {segment.mo} came, {mo_due} is next")
        if opcode not in FIXED_BYTES:
            self._send(segment, opcode)
            return
        if not segment.last or len(segment.payload) != FIXED_BYTES[opcode]:
            # RFC 5040 and 7306 give no code for this.
            raise PeerMisbehaved(
                TerminateCause.RDMAP_UNSPECIFIED,
                f"{opcode.name} with {len(segment.payload)} octets came, it has {FIXED_BYTES[opcode]} in one segment",
            )
        if opcode is RdmapOpcode.READ_REQUEST:
            self._check_ird()
            self._state.owed.append(OwedRead(ReadRequest.parse(segment.payload), bytes(ulpdu)))
        elif opcode is RdmapOpcode.ATOMIC_REQUEST:
            self._check_ird()
            self._atomic_request(AtomicRequest.parse(segment.payload))
        elif opcode is RdmapOpcode.ATOMIC_RESPONSE:
            self._atomic_response(AtomicResponse.parse(segment.payload))
        else:
            self._immediate(segment, opcode)
        self._delivered(segment.qn)

    def _delivered(self, queue: int) -> None:
        self._expected_msn[queue] = (self._expected_msn[queue] + 1) & MSN_MASK

    def _terminate(self, segment: UntaggedSegment) -> None:
        if segment.mo or not segment.last:
            raise PeerMisbehaved(TerminateCause.DDP_INVALID_MO, "a Terminate is one segment (RFC 5040 4.8)")
        self._state.ended_by_peer(parse_terminate(segment.payload))

    def _check_receive_posted(self) -> None:
        if not self._state.receives:
            raise PeerMisbehaved(TerminateCause.DDP_NO_BUFFER, "a message came but no receive buffer is posted")

    def _send(self, segment: UntaggedSegment, opcode: RdmapOpcode) -> None:
        state = self._state
        length = len(segment.payload)
        if self._send_rtr_may_come and opcode is RdmapOpcode.SEND and segment.last and not length:
            # The RTR indication has its MSN but is not the ULP's (RFC 6581 9.2, profile 3).
            self._delivered(QN_SEND)
            return
        self._check_receive_posted()
        receive = state.receives[0]
        end = segment.mo + length
        if end > len(receive.buffer):
            raise PeerMisbehaved(
                TerminateCause.DDP_MESSAGE_TOO_LONG,
                f"a Send of at least {end} octets came, the receive buffer has {len(receive.buffer)}",
            )
        receive.buffer[segment.mo : end] = segment.payload
        if not segment.last:
            self._open_send, self._send_bytes = opcode, end
            return
        invalidated_stag = None
        if opcode in INVALIDATING:  # after placement, before delivery (RFC 5040 5.3)
            state.memory.invalidate(segment.ulp_word)
            invalidated_stag = segment.ulp_word
        state.receives.popleft()
        self._open_send, self._send_bytes = None, 0
        state.events.append(Received(receive.wr_id, end, invalidated_stag, opcode in SOLICITED))
        self._delivered(QN_SEND)

    def _immediate(self, segment: UntaggedSegment, opcode: RdmapOpcode) -> None:
        self._check_receive_posted()
        receive = self._state.receives.popleft()
        self._state.events.append(
            ImmediateReceived(receive.wr_id, bytes(segment.payload), solicited=opcode in SOLICITED)
        )

    def _check_ird(self) -> None:
        ird = self._state.negotiated.ird
        if len(self._state.owed) >= ird:
            # To DDP this is a message on queue 1 without a buffer (RFC 5040 6.1, RFC 5042 6.4.3.3).
            raise PeerMisbehaved(
                TerminateCause.DDP_NO_BUFFER, f"a Read or Atomic Request came while {ird} (IRD) are being answered"
            )

    def _atomic_request(self, request: AtomicRequest) -> None:
        if request.operation is AtomicOperation.FETCH_ADD:
            operate = partial(fetch_add, add_data=request.data, add_mask=request.mask)
        else:
            operate = partial(
                compare_swap,
                swap_data=request.data,
                swap_mask=request.mask,
                compare_data=request.compare_data,
                compare_mask=request.compare_mask,
            )
        old = self._state.memory.atomic(request.stag, request.to, operate)
        self._state.owed.append(AtomicResponse(request.request_id, old))

    def _atomic_response(self, response: AtomicResponse) -> None:
        awaiting = self._state.awaiting
        atomic = awaiting[0] if awaiting else None
        if not isinstance(atomic, AtomicWork):
            # No atomic is outstanding as the oldest request, so queue 3 has no buffer for this (RFC 7306 5.2.2).
            raise PeerMisbehaved(TerminateCause.DDP_NO_BUFFER, "an Atomic Response came that no request asked for next")
        if response.request_id != atomic.request_id:
            raise PeerMisbehaved(
                TerminateCause.RDMAP_UNSPECIFIED,
                f"an Atomic Response for request {response.request_id:#x} came, {atomic.request_id:#x} is next",
            )
        awaiting.popleft()
        self._state.complete(atomic, AtomicCompleted(atomic.wr_id, response.value))
