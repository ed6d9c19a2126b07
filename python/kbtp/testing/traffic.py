"""A capture file's KBTP connections, message by message."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from kbtp.testing.describe import Record
from kbtp.testing.dissect import Conversation
from kbtp.testing.packets import Endpoint, HalfConnection, TcpSegment, parse_tcp, read_packets


@dataclass(frozen=True, slots=True)
class Located:
    """A record and where it was captured: `connection` counts from 1 in the order they were opened."""

    connection: int
    source: Endpoint
    sink: Endpoint
    record: Record


@dataclass(slots=True)
class _Connection:
    number: int
    ends: tuple[Endpoint, Endpoint]
    first_sequence: int
    halves: dict[Endpoint, HalfConnection]
    conversation: Conversation = field(default_factory=Conversation)
    ended: set[Endpoint] = field(default_factory=set)

    def located(self, source: Endpoint, record: Record) -> Located:
        return Located(self.number, source, self.ends[source == self.ends[0]], record)

    def by_sender(self, record: Record) -> Located:
        first, second = self.ends
        return self.located(first if self.conversation.sender_at(first) == record.sender else second, record)


class CaptureDissector:
    """Reads one capture; afterwards tells what else was in it."""

    def __init__(self) -> None:
        self.packets = 0
        self.tcp_segments = 0
        self._open: dict[frozenset[Endpoint], _Connection] = {}
        self._time_s = 0.0
        self._connections = 0
        self._mpa_connections = 0
        self._kbtp_connections = 0

    @property
    def found_kbtp(self) -> bool:
        return self._kbtp_connections > 0

    def summary(self) -> str:
        """What was seen, for someone who expected more."""
        return (
            f"{self.packets} packets, {self.tcp_segments} of them TCP segments, of {self._connections} connections: "
            f"{self._mpa_connections} captured from their MPA Request on, "
            f"{self._kbtp_connections} of these with KBTP connection data"
        )

    def read(self, octets: bytes) -> Iterator[Located]:
        """Everything on connections that begin with an MPA Request, in order of time.

        Raises `CaptureError` where the file ends or makes no sense; what was read before has been yielded, and
        `finish` is still to be called.
        """
        for time_s, link_type, packet in read_packets(octets):
            self.packets += 1
            self._time_s = time_s
            segment = parse_tcp(time_s, link_type, packet)
            if segment is not None:
                self.tcp_segments += 1
                yield from self._receive(segment)

    def finish(self) -> Iterator[Located]:
        """What is left open at the end of the capture."""
        for connection in list(self._open.values()):
            yield from self._close(connection)
        self._open.clear()

    def _receive(self, segment: TcpSegment) -> Iterator[Located]:
        ends = frozenset((segment.source, segment.sink))
        connection = self._open.get(ends)
        if connection is not None and segment.opens and segment.sequence != connection.first_sequence:
            yield from self._close(connection)  # the same ports, used again
            connection = None
        if connection is None:
            self._connections += 1
            halves = {end: HalfConnection() for end in ends}
            first = (segment.source, segment.sink)
            connection = _Connection(self._connections, first, segment.sequence, halves)
            self._open[ends] = connection
        if connection.conversation.foreign and not connection.conversation.is_mpa:
            return
        ready = connection.halves[segment.source].receive(segment)
        for record in connection.conversation.receive(segment.time_s, segment.source, ready):
            yield connection.located(segment.source, record)
        ends_it = segment.rst or segment.fin
        if ends_it and connection.conversation.is_mpa and segment.source not in connection.ended:
            connection.ended.add(segment.source)
            sender = connection.conversation.sender_at(segment.source)
            yield connection.located(
                segment.source, Record(segment.time_s, sender, "TCP", "reset" if segment.rst else "closed")
            )

    def _close(self, connection: _Connection) -> Iterator[Located]:
        conversation = connection.conversation
        self._mpa_connections += conversation.is_mpa
        self._kbtp_connections += conversation.is_kbtp
        for end, half in connection.halves.items():
            if half.missing_bytes:
                problem = f"it lacks {half.missing_bytes} octets; nothing after them in this direction is decoded"
                for record in conversation.lose(self._time_s, end, problem):
                    yield connection.located(end, record)
        for record in conversation.finish(self._time_s):
            yield connection.by_sender(record)
