"""The sending half of a stream: posted work and owed responses become messages, segments and FPDUs.

One message is under way at a time. Posted work keeps its order, and so do responses; the two take turns, so that
neither a peer that reads nor a caller that writes without pause holds the other up. A Read or an atomic that finds
ORD requests outstanding waits, and everything posted after it waits behind it (RFC 5040 5.5 rule 13).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import TypeAlias

from kbtp.errors import ApiMisuse, PeerMisbehaved
from kbtp.iwarp.ddp import MESSAGE_MAX_BYTES, MSN_MASK, cut, pack_tagged, pack_untagged
from kbtp.iwarp.events import ImmediateCompleted, SendCompleted, WriteCompleted, WrKind
from kbtp.iwarp.fpdu import FpduEncoder
from kbtp.iwarp.mpa import RtrKind
from kbtp.iwarp.rdmap import (
    QN_ATOMIC_RESPONSE,
    QN_REQUEST,
    QN_SEND,
    QN_TERMINATE,
    AtomicRequest,
    RdmapOpcode,
    ReadRequest,
    control_octet,
)
from kbtp.iwarp.state import StreamState
from kbtp.iwarp.terminate import Offender
from kbtp.iwarp.work import AtomicWork, Gather, OwedRead, PostedWork, ReadWork, SendWork, WriteWork
from kbtp.limits import (
    DDP_TAGGED_HEADER_BYTES,
    DDP_UNTAGGED_HEADER_BYTES,
    MULPDU_MIN_BYTES,
    PADDED_PAYLOAD_MAX_BYTES,
    ULPDU_MAX_BYTES,
)

FIRST_MSN = 1
_SINK_TO = 0  # a lent STag names one sink, counted from its first octet
_REQUEST_ID_MASK = 0xFFFF_FFFF
_RTR_WR_ID = 0

Ulpdus: TypeAlias = Iterator[tuple[list[bytes | memoryview], bool]]
"""The ULPDUs of one message, each in pieces and with its L flag."""


@dataclass(frozen=True, slots=True)
class _Message:
    """The message under way; `finish` is called when its last FPDU is built."""

    ulpdus: Ulpdus
    finish: Callable[[], object]


def _nothing() -> None:
    """A request is not finished when it has left: its response finishes it."""


class Outbound:
    def __init__(self, state: StreamState, mulpdu: int, initial_msn: Mapping[int, int]) -> None:
        self._state = state
        self._encoder = FpduEncoder(crc=state.negotiated.crc, markers=state.negotiated.tx_markers)
        self._queue: deque[PostedWork] = deque()
        self._message: _Message | None = None
        self._response_is_due = True
        self._next_msn = {
            queue: initial_msn.get(queue, FIRST_MSN)
            for queue in (QN_SEND, QN_REQUEST, QN_TERMINATE, QN_ATOMIC_RESPONSE)
        }
        self._next_request_id = 0
        pad_stands_alone = state.negotiated.pad_stands_alone
        self._padded_max_bytes = PADDED_PAYLOAD_MAX_BYTES if pad_stands_alone else MESSAGE_MAX_BYTES
        self.set_mulpdu(mulpdu)
        self._rtr = self._rtr_work() if state.active else None
        if self._rtr is not None:
            self._queue.append(self._rtr)

    def set_mulpdu(self, mulpdu: int) -> None:
        if not MULPDU_MIN_BYTES <= mulpdu <= ULPDU_MAX_BYTES:
            raise ApiMisuse(f"MULPDU must be {MULPDU_MIN_BYTES} to {ULPDU_MAX_BYTES}, not {mulpdu} (RFC 5044 4.5)")
        self._mulpdu = mulpdu

    def post(self, work: PostedWork) -> None:
        self._queue.append(work)
        self._state.unreported.append(work)

    def drop_work(self) -> None:
        """Forget what has not left; the work itself is flushed by the state."""
        self._queue.clear()
        self._message = None

    def wants_to_send(self) -> bool:
        state = self._state
        if state.failed:
            return state.terminate_payload is not None
        return state.may_send and (self._message is not None or bool(state.owed) or self._may_begin_work())

    def data_to_send(self, limit_bytes: int) -> list[bytes]:
        built: list[bytes] = []
        built_bytes = 0
        while built_bytes < limit_bytes and (fpdu := self._next_fpdu()) is not None:
            built.append(fpdu)
            built_bytes += len(fpdu)
        return built

    def _next_fpdu(self) -> bytes | None:
        state = self._state
        if not state.failed:
            if not state.may_send:
                return None
            self._message = self._message or self._begin_message()
            if self._message is None:
                return None
            ulpdu = next(self._message.ulpdus, None)
            if ulpdu is not None:
                pieces, last = ulpdu
                fpdu = self._encoder.encode(pieces)
                if last:
                    finish, self._message = self._message.finish, None
                    finish()
                return fpdu
        return self._terminate_fpdu()

    def _terminate_fpdu(self) -> bytes | None:
        """RFC 5040 4.8: queue 2, MSN 1, one segment; nothing follows it."""
        self._message = None
        payload, self._state.terminate_payload = self._state.terminate_payload, None
        if payload is None:
            return None
        msn = self._take_msn(QN_TERMINATE)
        header = pack_untagged(control_octet(RdmapOpcode.TERMINATE), 0, QN_TERMINATE, msn, 0, last=True)
        return self._encoder.encode((header, payload))

    # --- which message is next ---

    def _may_begin_work(self) -> bool:
        if not self._queue:
            return False
        work = self._queue[0]
        if work is self._rtr or not isinstance(work, ReadWork | AtomicWork):
            return True
        return len(self._state.awaiting) < self._state.negotiated.ord_

    def _begin_message(self) -> _Message | None:
        if self._state.owed and (self._response_is_due or not self._may_begin_work()):
            self._response_is_due = False
            return self._begin_response()
        if self._may_begin_work():
            self._response_is_due = True
            return self._begin_work(self._queue.popleft())
        return None

    def _begin_response(self) -> _Message:
        owed = self._state.owed[0]
        # The IRD slot is free, and the next response may begin, when this one was handed out.
        finish = self._state.owed.popleft
        if isinstance(owed, OwedRead):
            return _Message(self._read_response(owed), finish)
        response = self._untagged(RdmapOpcode.ATOMIC_RESPONSE, QN_ATOMIC_RESPONSE, Gather([owed.pack()]))
        return _Message(response, finish)

    def _begin_work(self, work: PostedWork) -> _Message:
        state = self._state
        if isinstance(work, SendWork):
            send, completed = work, SendCompleted if work.kind is WrKind.SEND else ImmediateCompleted
            ulpdus = self._untagged(send.opcode, QN_SEND, send.payload, send.ulp_word)
            return _Message(ulpdus, lambda: state.complete(send, completed(send.wr_id)))
        if isinstance(work, WriteWork):
            write = work
            ulpdus = self._write(write)
            return _Message(ulpdus, lambda: state.complete(write, WriteCompleted(write.wr_id)))
        if isinstance(work, ReadWork):
            return self._begin_read(work)
        return self._begin_atomic(work)

    def _begin_read(self, read: ReadWork) -> _Message:
        if read is not self._rtr:
            read.sink_stag = self._state.memory.lend_sink_stag()
        request = ReadRequest(read.sink_stag or 0, _SINK_TO, len(read.sink), read.source_stag, read.source_to)
        self._state.awaiting.append(read)
        return _Message(self._untagged(RdmapOpcode.READ_REQUEST, QN_REQUEST, Gather([request.pack()])), _nothing)

    def _begin_atomic(self, atomic: AtomicWork) -> _Message:
        atomic.request_id = self._next_request_id
        self._next_request_id = (self._next_request_id + 1) & _REQUEST_ID_MASK
        request = AtomicRequest(
            atomic.operation,
            atomic.request_id,
            atomic.stag,
            atomic.to,
            atomic.data,
            atomic.mask,
            atomic.compare_data,
            atomic.compare_mask,
        )
        self._state.awaiting.append(atomic)
        return _Message(self._untagged(RdmapOpcode.ATOMIC_REQUEST, QN_REQUEST, Gather([request.pack()])), _nothing)

    def _rtr_work(self) -> PostedWork | None:
        """RFC 6581 9.2: one zero-length message of the chosen kind before all else."""
        kind = self._state.negotiated.rtr
        if kind is RtrKind.SEND:
            return SendWork(_RTR_WR_ID, WrKind.SEND, RdmapOpcode.SEND, 0, Gather(()))
        if kind is RtrKind.WRITE:
            return WriteWork(_RTR_WR_ID, WrKind.WRITE, Gather(()), 0, 0)
        if kind is RtrKind.READ:
            return ReadWork(_RTR_WR_ID, WrKind.READ, memoryview(bytearray()), 0, 0)
        return None

    # --- how a message is cut (RFC 5041 5.2) ---

    def _take_msn(self, queue: int) -> int:
        msn = self._next_msn[queue]
        self._next_msn[queue] = (msn + 1) & MSN_MASK
        return msn

    def _cut(self, message_bytes: int, header_bytes: int) -> Iterator[tuple[int, int, bool]]:
        return cut(message_bytes, self._mulpdu - header_bytes, self._padded_max_bytes)

    def _untagged(self, opcode: RdmapOpcode, queue: int, payload: Gather, ulp_word: int = 0) -> Ulpdus:
        control, msn = control_octet(opcode), self._take_msn(queue)
        for mo, size, last in self._cut(payload.length_bytes, DDP_UNTAGGED_HEADER_BYTES):
            yield [pack_untagged(control, ulp_word, queue, msn, mo, last=last), *payload.take(size)], last

    def _write(self, write: WriteWork) -> Ulpdus:
        control = control_octet(RdmapOpcode.WRITE)
        for offset, size, last in self._cut(write.payload.length_bytes, DDP_TAGGED_HEADER_BYTES):
            header = pack_tagged(control, write.stag, write.to + offset, last=last)
            yield [header, *write.payload.take(size)], last

    def _read_response(self, owed: OwedRead) -> Ulpdus:
        """The source is looked up before each segment, for all that is left: a revoked STag gives nothing more away.

        A Read of size 0 looks at no STag (RFC 5040 5.2.1).
        """
        control, request = control_octet(RdmapOpcode.READ_RESPONSE), owed.request
        for offset, size, last in self._cut(request.size, DDP_TAGGED_HEADER_BYTES):
            pieces: list[bytes | memoryview] = [
                pack_tagged(control, request.sink_stag, request.sink_to + offset, last=last)
            ]
            if size:
                left = request.advanced(offset)
                try:
                    source = self._state.memory.read_source(left.source_stag, left.source_to, left.size)
                except PeerMisbehaved as error:
                    self._state.fail(error, Offender.of(owed.ulpdu, left.pack()))
                    return
                pieces.append(source[:size])
            yield pieces, last
