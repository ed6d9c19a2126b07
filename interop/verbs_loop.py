"""Two ends of one RDMA device, in one process: every kind of work that `kbtp.verbs.api` has, and how streams end.

Run where an RDMA device is: `python -m interop.verbs_loop ADDRESS`, with an address of the device's network interface.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import TypeVar

from kbtp.atomics import MASK64
from kbtp.errors import ConnectionLost
from kbtp.rnic import open_rnic
from kbtp.verbs.api import (
    Access,
    Channel,
    CompareSwap,
    ConnectRequest,
    Established,
    Event,
    FetchAdd,
    MemoryRegion,
    RdmaRead,
    RdmaWrite,
    RdmaWriteImmediate,
    Recv,
    Rejected,
    Send,
    Sge,
    Stream,
    StreamEnded,
    WcOpcode,
    WorkCompletion,
)

PATIENCE_S = 20.0
MESSAGE_BYTES = 4096
RECEIVES = 4
LONG_BYTES = 9 << 20
"""More than rxe sends as one message."""

_EventT = TypeVar("_EventT", bound=Event)


class Ends:
    """A listening and a connecting channel of one RNIC, polled in turn."""

    def __init__(self, address: str) -> None:
        self.rnic = open_rnic("rdma_core")
        self.pd = self.rnic.allocate_pd()
        self.passive, self.active = self.rnic.open_channel(), self.rnic.open_channel()
        self.listener = self.passive.listen(address, 0)
        self.address = address
        self.events: list[tuple[Channel, Event]] = []
        self.answer: Callable[[ConnectRequest], None] = self.accept
        self.accepted: Stream | None = None
        self.memory = bytearray(2 * RECEIVES * MESSAGE_BYTES)
        self.region = self.rnic.register(self.memory, Access.NONE, pd=self.pd)

    def receive(self, slot: int) -> Recv:
        return Recv(slot, Sge(self.region, slot * MESSAGE_BYTES, MESSAGE_BYTES))

    def accept(self, request: ConnectRequest) -> None:
        receives = [self.receive(slot) for slot in range(RECEIVES)]
        self.accepted = request.accept(pd=self.pd, private_data=b"yes", ird=8, ord_=8, receives=receives)

    def begin(self) -> Stream:
        receives = [self.receive(RECEIVES + slot) for slot in range(RECEIVES)]
        port = self.listener.address[1]
        return self.active.connect(
            self.address, port, pd=self.pd, private_data=b"hello", ird=8, ord_=8, timeout_s=10, receives=receives
        )

    def connect(self) -> Stream:
        self.events.clear()
        stream = self.begin()
        self.until(lambda: bool(self.of(self.active, Established)))
        return stream

    def until(self, found: Callable[[], bool]) -> None:
        deadline_s = time.monotonic() + PATIENCE_S
        while not found():
            if time.monotonic() > deadline_s:
                seen = [event for _, event in self.events if not isinstance(event, WorkCompletion)]
                raise SystemExit(f"nothing came of it within {PATIENCE_S:g} s: {seen}")
            for channel in (self.passive, self.active):
                for event in channel.poll(0.01):
                    if isinstance(event, ConnectRequest):
                        self.answer(event)
                    self.events.append((channel, event))

    def of(self, channel: Channel, kind: type[_EventT]) -> list[_EventT]:
        return [event for where, event in self.events if where is channel and isinstance(event, kind)]

    def completions(self, channel: Channel, opcode: WcOpcode) -> list[WorkCompletion]:
        return [one for one in self.of(channel, WorkCompletion) if one.opcode is opcode]

    def await_completions(self, channel: Channel, opcode: WcOpcode, count: int = 1) -> list[WorkCompletion]:
        self.until(lambda: len(self.completions(channel, opcode)) >= count)
        return self.completions(channel, opcode)

    def both_ended(self) -> tuple[StreamEnded, StreamEnded]:
        self.until(lambda: bool(self.of(self.active, StreamEnded)) and bool(self.of(self.passive, StreamEnded)))
        return self.of(self.active, StreamEnded)[0], self.of(self.passive, StreamEnded)[0]

    def register(self, octets: bytearray, access: Access = Access.NONE) -> MemoryRegion:
        return self.rnic.register(octets, access, pd=self.pd)


def sends(ends: Ends) -> None:
    stream = ends.connect()
    assert stream.ord_ and stream.ird, "both sides asked for 8"
    for count, size in enumerate((0, 5, 300, MESSAGE_BYTES), start=1):
        stream.post([Send(size, inline=bytes([count]) * size)])
        got = ends.await_completions(ends.passive, WcOpcode.RECV, count)[-1]
        at = got.wr_id * MESSAGE_BYTES
        assert got.length == size and ends.memory[at : at + size] == bytes([count]) * size
    _end(ends, stream)


def reads_and_writes(ends: Ends) -> None:
    stream = ends.connect()
    source = bytearray(bytes(range(256)) * (LONG_BYTES // 256))
    there, back = bytearray(LONG_BYTES), bytearray(LONG_BYTES)
    target = ends.register(there, Access.REMOTE_WRITE | Access.REMOTE_READ)
    stream.post([RdmaWrite(1, (Sge(ends.register(source), 0, LONG_BYTES),), target.stag, target.base_to)])
    ends.await_completions(ends.active, WcOpcode.RDMA_WRITE)
    stream.post([RdmaRead(2, Sge(ends.register(back), 0, LONG_BYTES), target.stag, target.base_to)])
    ends.await_completions(ends.active, WcOpcode.RDMA_READ)
    assert there == source == back
    target.revoke()
    _end(ends, stream)


def atomics(ends: Ends) -> None:
    stream = ends.connect()
    word = bytearray((5).to_bytes(8, sys.byteorder))
    region = ends.register(word, Access.REMOTE_ATOMIC)
    stream.post([FetchAdd(3, region.stag, region.base_to, 7, 0)])
    stream.post([CompareSwap(4, region.stag, region.base_to, 99, MASK64, 12, MASK64)])
    done = ends.await_completions(ends.active, WcOpcode.ATOMIC, 2)
    assert [one.value for one in done] == [5, 12] and int.from_bytes(word, sys.byteorder) == 99
    _end(ends, stream)


def write_with_immediate(ends: Ends) -> None:
    stream = ends.connect()
    there = bytearray(64)
    region = ends.register(there, Access.REMOTE_WRITE)
    stream.post([RdmaWriteImmediate(5, b"r" * 24, region.stag, region.base_to + 8, 0x12345678)])
    (record,) = ends.await_completions(ends.passive, WcOpcode.RECV_IMMEDIATE)
    assert record.immediate == bytes.fromhex("00000000 12345678") and there[8:32] == b"r" * 24
    _end(ends, stream)


def a_wrong_stag(ends: Ends) -> None:
    stream = ends.connect()
    source = ends.register(bytearray(100))
    stream.post([RdmaRead(1, Sge(source, 0, 100), 0x1234500, 0)])
    ended, _ = ends.both_ended()
    assert isinstance(ended.reason, ConnectionLost), ended


def refusals(ends: Ends) -> None:
    ends.events.clear()
    ends.answer = lambda request: request.reject(b"no")
    ends.begin()
    ends.until(lambda: bool(ends.of(ends.active, Rejected)))
    assert ends.of(ends.active, Rejected)[0].private_data.startswith(b"no")
    ends.listener.close()
    ends.begin()
    ends.until(lambda: bool(ends.of(ends.active, StreamEnded)))
    assert "nobody listens there" in str(ends.of(ends.active, StreamEnded)[0].reason)


def _end(ends: Ends, stream: Stream) -> None:
    stream.disconnect()
    assert [ended.reason for ended in ends.both_ended()] == [None, None]


def main(address: str) -> None:
    ends = Ends(address)
    can = ends.rnic.capabilities
    steps: list[Callable[[Ends], None]] = [sends, reads_and_writes, a_wrong_stag]
    steps += [atomics] * can.atomics + [write_with_immediate] * can.write_with_immediate + [refusals]
    for step in steps:
        step(ends)
        print(step.__name__, flush=True)
    ends.passive.close()
    ends.active.close()
    ends.rnic.close()


if __name__ == "__main__":
    main(sys.argv[1])
