"""What the two halves of a stream share: who waits for whom, what is to be reported, and how the stream ends."""

from __future__ import annotations

from collections import deque

from kbtp.errors import PeerMisbehaved
from kbtp.iwarp.events import Event, Failed, Flushed, TerminateReceived, WrKind
from kbtp.iwarp.memory import StreamMemory
from kbtp.iwarp.mpa import Negotiated
from kbtp.iwarp.terminate import Offender, pack_terminate
from kbtp.iwarp.work import AtomicWork, Owed, ReadWork, Receive, Work
from kbtp.types import TerminateCause, TerminateInfo


class StreamState:
    """Shared by `Outbound`, which fills `awaiting` and empties `owed`, and `Inbound`, which does the reverse."""

    def __init__(self, negotiated: Negotiated, memory: StreamMemory, *, active: bool) -> None:
        self.negotiated = negotiated
        self.memory = memory
        self.active = active
        self.events: deque[Event] = deque()
        self.unreported: deque[Work] = deque()
        """Posted work in order, from the oldest that has not completed."""
        self.awaiting: deque[ReadWork | AtomicWork] = deque()
        """Requests that left and have no whole response yet: at most ORD (RFC 5040 6.1)."""
        self.owed: deque[Owed] = deque()
        """Requests of the peer whose response was not wholly handed out: at most IRD."""
        self.receives: deque[Receive] = deque()
        self.may_send = active
        """False on the passive side until an FPDU of the peer was validated (RFC 5044 7.1.2 rule 4)."""
        self.failed = False
        self.terminate_payload: bytes | None = None
        """The Terminate that waits to be handed out."""
        self.sent_cause: TerminateCause | None = None
        self.received_terminate: TerminateInfo | None = None
        if negotiated.failure is not None:
            self.fail(
                PeerMisbehaved(
                    negotiated.failure,
                    f"the MPA Reply (IRD {negotiated.peer_ird}, ORD {negotiated.peer_ord}) does not fit this side",
                ),
                None,
            )

    def complete(self, work: Work, completion: Event) -> None:
        """Completions are reported in the order of submission (RFC 5040 5.5 rule 15)."""
        work.completion = completion
        while self.unreported and (oldest := self.unreported[0].completion):
            self.unreported.popleft()
            self.events.append(oldest)

    def fail(self, error: PeerMisbehaved, offender: Offender | None) -> None:
        """The peer broke the protocol. Nothing is looked at after the first error (RFC 5040 7.1 item 4)."""
        # A responder whose very first FPDU is bad may not have sent by the letter of RFC 5044 7.1.2 rule 4; the
        # initiator takes FPDUs by then, and is better told.
        self.end_with(error.cause, offender)
        self.events.append(Failed(error))

    def end_with(self, cause: TerminateCause, offender: Offender | None) -> None:
        """Let one more message out, the Terminate (RFC 5041 7)."""
        self.failed = True
        self.sent_cause = cause
        self.terminate_payload = pack_terminate(cause, offender)

    def ended_by_peer(self, info: TerminateInfo) -> None:
        """A Terminate is never answered with one, so that two ends cannot keep each other busy."""
        self.failed = True
        self.received_terminate = info
        self.events.append(TerminateReceived(info))

    def flush(self) -> list[Flushed]:
        self.failed = True
        for request in self.awaiting:
            self.return_sink(request)
        self.awaiting.clear()
        self.owed.clear()
        flushed = [Flushed(work.wr_id, work.kind) for work in self.unreported]
        flushed += [Flushed(receive.wr_id, WrKind.RECEIVE) for receive in self.receives]
        self.unreported.clear()
        self.receives.clear()
        return flushed

    def return_sink(self, request: ReadWork | AtomicWork) -> None:
        if isinstance(request, ReadWork) and request.sink_stag:
            self.memory.return_sink_stag(request.sink_stag)
