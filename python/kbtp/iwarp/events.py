"""What an `IwarpStream` reports through `next_event`, in order."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, auto
from typing import TypeAlias

from kbtp.errors import PeerMisbehaved
from kbtp.types import Stag, TerminateInfo


class WrKind(Enum):
    """What kind of work a work request asked for."""

    SEND = auto()
    WRITE = auto()
    READ = auto()
    ATOMIC = auto()
    IMMEDIATE = auto()
    RECEIVE = auto()


@dataclass(frozen=True, slots=True)
class SendCompleted:
    """The last octet of the Send was copied out of the caller's memory; says nothing about the peer."""

    wr_id: int


@dataclass(frozen=True, slots=True)
class WriteCompleted:
    """The last octet of the RDMA Write was copied out of the caller's memory; says nothing about the peer."""

    wr_id: int


@dataclass(frozen=True, slots=True)
class ImmediateCompleted:
    """The Immediate Data message was built; says nothing about the peer."""

    wr_id: int


@dataclass(frozen=True, slots=True)
class ReadCompleted:
    """The Read Response was placed: `length` octets, the whole sink."""

    wr_id: int
    length: int


@dataclass(frozen=True, slots=True)
class AtomicCompleted:
    """The Atomic Response came; `value` is what the remote memory held before (RFC 7306 5.2.2)."""

    wr_id: int
    value: int


@dataclass(frozen=True, slots=True)
class Received:
    """A Send of `length` octets was delivered into the receive buffer `wr_id`."""

    wr_id: int
    length: int
    invalidated_stag: Stag | None
    solicited: bool


@dataclass(frozen=True, slots=True)
class ImmediateReceived:
    """Immediate Data was delivered; it used up the receive buffer `wr_id` but left its octets alone."""

    wr_id: int
    data: bytes
    solicited: bool


@dataclass(frozen=True, slots=True)
class TerminateReceived:
    """The peer ended the stream; nothing goes out in answer."""

    info: TerminateInfo


@dataclass(frozen=True, slots=True)
class Failed:
    """The peer broke the protocol. A Terminate that says so waits in `data_to_send`."""

    error: PeerMisbehaved


Event: TypeAlias = (
    SendCompleted
    | WriteCompleted
    | ImmediateCompleted
    | ReadCompleted
    | AtomicCompleted
    | Received
    | ImmediateReceived
    | TerminateReceived
    | Failed
)


@dataclass(frozen=True, slots=True)
class Flushed:
    """A work request that the end of the stream left undone, or not known to be done."""

    wr_id: int
    kind: WrKind
