"""What KBTP has on InfiniBand and RoCEv2 alone (draft 9.2): completion records, direct allocation, the unmasked Head.

Target and initiators in one process over one device: `python -m interop.verbs_modes ADDRESS`.
"""

from __future__ import annotations

import random
import secrets
import sys
import time

import kbtp
from kbtp.blocks.counter import UnmaskedCounter
from kbtp.rnic import open_rnic
from kbtp.target.config import TargetConfig
from kbtp.target.server import Server
from kbtp.types import DIRECT_MODES, Feature, RequestFlag, Status
from kbtp.verbs.api import (
    Access,
    Event,
    FetchAdd,
    RdmaRead,
    Recv,
    Rnic,
    Send,
    Sge,
    StreamEnded,
    WcOpcode,
    WorkCompletion,
)
from kbtp.wire import Bind, Completion, ConnectionData, Hello, HelloAck, parse_response

OPERATIONS = 300
BLOCK_BYTES = 256 * 1024
TICKET_TIMEOUT_S = 1.0
PATIENCE_S = 20.0
MESSAGE_BYTES = 1024


def operate(url: str, *, direct: bool) -> None:
    """Random operations of a session with records, octets compared; with `direct` blocks are allocated directly."""
    modes = "load,alloc" if direct else "none"
    client = kbtp.connect(url, rnic="rdma_core", records=True, direct=modes, quota=8, timeout_s=PATIENCE_S)
    assert client.features & Feature.RECORD_COMPLETION
    if direct:
        assert client.features & DIRECT_MODES == DIRECT_MODES and not client.features & Feature.MASKED_ATOMICS
    rng, buffer = random.Random(7), bytearray(BLOCK_BYTES)
    blocks: dict[kbtp.BlockRef, bytes] = {}
    for _ in range(OPERATIONS):
        what = rng.choice(("alloc", "load", "load", "free"))
        if what == "alloc" and len(blocks) < 8:
            octets = rng.randbytes(rng.choice((10, 3000, BLOCK_BYTES)))
            blocks[client.alloc_store(octets, mode="direct" if direct else "request")] = octets
        elif what != "alloc" and blocks:
            block = rng.choice(list(blocks))
            if what == "load":
                length = client.load(block, buffer, mode=rng.choice(("direct", "request")) if direct else "request")
                assert buffer[:length] == blocks[block], "other octets than were stored"
            else:
                client.free(block)
                del blocks[block]
    client.close()
    print(f"{OPERATIONS} operations with records{', direct' if direct else ''}", flush=True)


class TicketTaker:
    """An initiator that takes a ticket and binds it too late."""

    def __init__(self, rnic: Rnic, address: str, port: int) -> None:
        self.pd = rnic.allocate_pd()
        self.channel = rnic.open_channel()
        self.memory = bytearray(4 * MESSAGE_BYTES)
        self.region = rnic.register(self.memory, Access.NONE, pd=self.pd)
        self.stream = self.channel.connect(
            address,
            port,
            pd=self.pd,
            private_data=ConnectionData(secrets.token_bytes(16)).pack(),
            ird=4,
            ord_=4,
            timeout_s=PATIENCE_S,
            receives=[Recv(slot, Sge(self.region, slot * MESSAGE_BYTES, MESSAGE_BYTES)) for slot in range(3)],
        )

    def event(self, opcode: WcOpcode | None = None) -> Event:
        """The next one, or the next completion of that kind."""
        deadline_s = time.monotonic() + PATIENCE_S
        while time.monotonic() < deadline_s:
            for event in self.channel.poll(0.1):
                if isinstance(event, StreamEnded):
                    raise SystemExit(f"the stream ended: {event.reason}")
                if opcode is None or (isinstance(event, WorkCompletion) and event.opcode is opcode):
                    return event
        raise SystemExit(f"no {opcode} within {PATIENCE_S:g} s")

    def message(self) -> HelloAck | Completion:
        done = self.event(WcOpcode.RECV)
        assert isinstance(done, WorkCompletion)
        at = done.wr_id * MESSAGE_BYTES
        return parse_response(memoryview(self.memory)[at : at + done.length])

    def slot(self, ring_stag: int, where: int) -> bytes:
        """Of the ring: Sequence, and from octet 8 on Block Offset."""
        slot_at = 3 * MESSAGE_BYTES
        self.stream.post([RdmaRead(2, Sge(self.region, slot_at, 16), ring_stag, where)])
        self.event(WcOpcode.RDMA_READ)
        return bytes(self.memory[slot_at : slot_at + 16])

    def run(self) -> None:
        self.event()
        hello = Hello(0, DIRECT_MODES, requested_quota=2, requested_handles=2, completion_credits=2, max_message=1024)
        self.stream.post([Send(0, inline=hello.pack())])
        ack = self.message()
        assert isinstance(ack, HelloAck) and ack.granted_features & Feature.DIRECT_ALLOC
        self.stream.post([FetchAdd(1, ack.head_stag, ack.head_offset, UnmaskedCounter.add_data, 0)])
        taken = self.event(WcOpcode.ATOMIC)
        assert isinstance(taken, WorkCompletion)
        ticket = taken.value >> 32
        where = ack.ring_offset + 16 * (ticket % (1 << ack.ring_order))
        slot = self.slot(ack.ring_stag, where)
        block_offset = int.from_bytes(slot[8:], "big")
        deadline_s = time.monotonic() + PATIENCE_S
        while self.slot(ack.ring_stag, where) == slot:  # until the target has reclaimed it
            assert time.monotonic() < deadline_s, "a ticket that is never bound is never reclaimed"
        bind = Bind(9, ack.first_handle, 0, RequestFlag.SEAL, ticket, 4, block_offset)
        self.stream.post([Send(3, inline=bind.pack())])
        answer = self.message()
        assert isinstance(answer, Completion) and answer.status is Status.TICKET_ABANDONED, answer
        self.channel.close()
        print("a ticket that ran out was reclaimed", flush=True)


def main(address: str) -> None:
    rnic = open_rnic("rdma_core")
    config = TargetConfig(
        block_size_bytes=BLOCK_BYTES,
        pool_blocks=64,
        direct=DIRECT_MODES,
        direct_blocks=32,
        ticket_timeout_s=TICKET_TIMEOUT_S,
    )
    server = Server(config, rnic)
    port = server.listen(address, 0).port
    server.start()
    operate(f"kbtp://{address}:{port}", direct=False)
    operate(f"kbtp://{address}:{port}", direct=True)
    TicketTaker(rnic, address, port).run()
    server.stop()


if __name__ == "__main__":
    main(sys.argv[1])
