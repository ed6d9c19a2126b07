"""From what an `IwarpStream` reports to work completions of the verbs."""

from __future__ import annotations

from typing import TypeAlias

from kbtp.iwarp.events import (
    AtomicCompleted,
    ImmediateCompleted,
    ImmediateReceived,
    ReadCompleted,
    Received,
    SendCompleted,
    WriteCompleted,
    WrKind,
)
from kbtp.verbs.api import Stream, WcOpcode, WcStatus, WorkCompletion

Completed: TypeAlias = (
    SendCompleted | WriteCompleted | ImmediateCompleted | ReadCompleted | AtomicCompleted | Received | ImmediateReceived
)

OPCODES = {
    WrKind.SEND: WcOpcode.SEND,
    WrKind.WRITE: WcOpcode.RDMA_WRITE,
    WrKind.READ: WcOpcode.RDMA_READ,
    WrKind.ATOMIC: WcOpcode.ATOMIC,
    WrKind.IMMEDIATE: WcOpcode.IMMEDIATE,
    WrKind.RECEIVE: WcOpcode.RECV,
}
"""Of flushed work. A flushed receive is RECV: what it would have received is not known."""

OF_RECEIVES = frozenset({WcOpcode.RECV, WcOpcode.RECV_IMMEDIATE})


def completion_of(stream: Stream, event: Completed) -> WorkCompletion:
    """The successful completion of `stream` that `event` reports."""
    done = WcStatus.SUCCESS
    match event:
        case SendCompleted(wr_id):
            return WorkCompletion(stream, wr_id, WcOpcode.SEND, done)
        case WriteCompleted(wr_id):
            return WorkCompletion(stream, wr_id, WcOpcode.RDMA_WRITE, done)
        case ImmediateCompleted(wr_id):
            return WorkCompletion(stream, wr_id, WcOpcode.IMMEDIATE, done)
        case ReadCompleted(wr_id, length):
            return WorkCompletion(stream, wr_id, WcOpcode.RDMA_READ, done, length=length)
        case AtomicCompleted(wr_id, value):
            return WorkCompletion(stream, wr_id, WcOpcode.ATOMIC, done, value=value)
        case Received(wr_id, length, stag, solicited):
            return WorkCompletion(
                stream, wr_id, WcOpcode.RECV, done, length=length, invalidated_stag=stag, solicited=solicited
            )
        case ImmediateReceived(wr_id, data, solicited):
            return WorkCompletion(
                stream, wr_id, WcOpcode.RECV_IMMEDIATE, done, length=len(data), immediate=data, solicited=solicited
            )
