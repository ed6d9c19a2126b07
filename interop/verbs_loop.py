"""Two ends of one RDMA device, in one process: every kind of work that `kbtp.verbs.api` has, and how streams end.

Run where an RDMA device is: `python -m interop.verbs_loop ADDRESS`, with an address of the device's network interface.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from functools import partial

from kbtp.rnic import open_rnic
from kbtp.verbs.api import (
    Access,
    Channel,
    CompareSwap,
    ConnectRequest,
    Established,
    Event,
    FetchAdd,
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

PATIENCE_S = 15.0


class Ends:
    """A listening and a connecting channel of one RNIC, polled in turn."""

    def __init__(self, address: str) -> None:
        self.rnic = open_rnic("rdma_core")
        self.pd = self.rnic.allocate_pd()
        self.passive, self.active = self.rnic.open_channel(), self.rnic.open_channel()
        self.listener = self.passive.listen(address, 0)
        self.address = address
        self.events: list[tuple[str, Event]] = []
        self.accepted: Stream | None = None
        self.answer: Callable[[ConnectRequest], None] = self.accept
        self.memory = bytearray(64 * 1024)
        self.region = self.rnic.register(self.memory, Access.NONE, pd=self.pd)

    def receives(self, base: int) -> list[Recv]:
        return [Recv(slot, Sge(self.region, base + slot * 4096, 4096)) for slot in range(4)]

    def accept(self, request: ConnectRequest) -> None:
        self.accepted = request.accept(
            pd=self.pd, private_data=b"yes" + bytes(21), ird=8, ord_=8, receives=self.receives(0)
        )

    def connect(self) -> Stream:
        return self.active.connect(
            self.address,
            self.listener.address[1],
            pd=self.pd,
            private_data=b"hello" + bytes(19),
            ird=8,
            ord_=8,
            timeout_s=10,
            receives=self.receives(32768),
        )

    def until(self, found: Callable[[], bool]) -> None:
        deadline = time.monotonic() + PATIENCE_S
        while not found():
            if time.monotonic() > deadline:
                ends = [event for _, event in self.events if not isinstance(event, WorkCompletion)]
                raise SystemExit(f"nothing came of it within {PATIENCE_S:g} s: {ends}")
            for name, channel in (("passive", self.passive), ("active", self.active)):
                self._reap(name, channel)

    def _reap(self, name: str, channel: Channel) -> None:
        for event in channel.poll(0.01):
            if isinstance(event, ConnectRequest):
                self.answer(event)
            self.events.append((name, event))

    def has_received(self, count: int) -> bool:
        return len(self.completions("passive", WcOpcode.RECV)) >= count

    def of(self, name: str, kind: type) -> list:
        return [event for who, event in self.events if who == name and isinstance(event, kind)]

    def completions(self, name: str, opcode: WcOpcode) -> list[WorkCompletion]:
        return [one for one in self.of(name, WorkCompletion) if one.opcode is opcode]


def main(address: str) -> None:
    ends = Ends(address)
    print(ends.rnic.name, ends.rnic.capabilities)
    stream = ends.connect()
    ends.until(lambda: bool(ends.of("active", Established)))
    print("established", ends.of("active", Established)[0].private_data[:5], stream.ird, stream.ord_, ends.accepted)
    peer = ends.accepted
    assert peer is not None
    # Send, short and long, both ways
    for size in (5, 300, 4000):
        before = len(ends.completions("passive", WcOpcode.RECV))
        stream.post([Send(size, inline=bytes([size % 251]) * size)])
        ends.until(partial(ends.has_received, before + 1))
        got = ends.completions("passive", WcOpcode.RECV)[-1]
        at = got.wr_id * 4096
        assert got.length == size and ends.memory[at : at + size] == bytes([size % 251]) * size
        peer.post_recv([Recv(got.wr_id, Sge(ends.region, at, 4096))])
    print("sends")
    size = 20 << 20
    source, target = bytearray(bytes(range(256)) * (size // 256)), bytearray(size)
    sregion = ends.rnic.register(source, Access.NONE, pd=ends.pd)
    tregion = ends.rnic.register(target, Access.REMOTE_WRITE | Access.REMOTE_READ, pd=ends.pd)
    t0 = time.monotonic()
    stream.post([RdmaWrite(1, (Sge(sregion, 0, size),), tregion.stag, tregion.base_to)])
    ends.until(lambda: bool(ends.completions("active", WcOpcode.RDMA_WRITE)))
    assert target == source
    print("write", size, time.monotonic() - t0)
    back = bytearray(size)
    bregion = ends.rnic.register(back, Access.NONE, pd=ends.pd)
    stream.post([RdmaRead(2, Sge(bregion, 0, size), tregion.stag, tregion.base_to)])
    ends.until(lambda: bool(ends.completions("active", WcOpcode.RDMA_READ)))
    assert back == source
    print("read")
    if ends.rnic.capabilities.atomics:
        word = bytearray((5).to_bytes(8, sys.byteorder))
        wregion = ends.rnic.register(word, Access.REMOTE_ATOMIC, pd=ends.pd)
        stream.post([FetchAdd(3, wregion.stag, wregion.base_to, 7, 0)])
        stream.post([CompareSwap(4, wregion.stag, wregion.base_to, 99, 2**64 - 1, 12, 2**64 - 1)])
        ends.until(lambda: len(ends.completions("active", WcOpcode.ATOMIC)) == 2)
        assert [one.value for one in ends.completions("active", WcOpcode.ATOMIC)] == [5, 12]
        assert int.from_bytes(word, sys.byteorder) == 99
        print("atomics")
    if ends.rnic.capabilities.write_with_immediate:
        stream.post([RdmaWriteImmediate(5, b"r" * 24, tregion.stag, tregion.base_to + 8, 0x12345678)])
        ends.until(lambda: bool(ends.completions("passive", WcOpcode.RECV_IMMEDIATE)))
        (record,) = ends.completions("passive", WcOpcode.RECV_IMMEDIATE)
        assert record.immediate == bytes(4) + bytes.fromhex("12345678") and target[8:32] == b"r" * 24
        print("write with immediate")
    # the end, in order
    stream.disconnect()
    ends.until(lambda: bool(ends.of("active", StreamEnded)) and bool(ends.of("passive", StreamEnded)))
    print("ended", ends.of("active", StreamEnded)[0], ends.of("passive", StreamEnded)[0])
    # a wrong STag
    ends.events.clear()
    stream = ends.connect()
    ends.until(lambda: bool(ends.of("active", Established)))
    stream.post([RdmaWrite(1, (Sge(sregion, 0, 100),), 0x1234500, tregion.base_to)])
    ends.until(lambda: bool(ends.of("active", StreamEnded)) and bool(ends.of("passive", StreamEnded)))
    print("wrong STag:", ends.of("active", StreamEnded)[0], ends.of("passive", StreamEnded)[0])
    # refused
    ends.events.clear()
    ends.answer = lambda request: request.reject(b"no" + bytes(22))
    ends.connect()
    ends.until(lambda: bool(ends.of("active", Rejected)) or bool(ends.of("active", StreamEnded)))
    print("refused:", ends.of("active", Rejected), ends.of("active", StreamEnded))
    # nobody listens
    ends.events.clear()
    ends.listener.close()
    ends.connect()
    ends.until(lambda: bool(ends.of("active", StreamEnded)))
    print("nobody:", ends.of("active", StreamEnded)[0].reason)
    ends.passive.close()
    ends.active.close()
    ends.rnic.close()
    print("all well")


if __name__ == "__main__":
    main(sys.argv[1])
