"""Wireshark's dissector, which nobody here wrote, judges what both sides send.

Its RPC-over-RDMA and SMB Direct sub-dissectors take any Send for theirs and call it malformed: they are switched off.
"""

from __future__ import annotations

import subprocess
import time
from pathlib import Path

import pytest

import kbtp
from kbtp.address import Address
from kbtp.limits import COMPLETION_BYTES, HELLO_MAX_BYTES
from kbtp.rnic import open_rnic
from kbtp.target.config import TargetConfig
from kbtp.target.server import Server
from kbtp.testing.capture import CapturingProxy
from kbtp.types import Feature, RequestFlag
from kbtp.verbs.api import Access, Established, Recv, Send, Sge, StreamEnded, WcOpcode, WorkCompletion
from kbtp.wire import ConnectionData, DataDescriptor, Hello, Load

pytestmark = pytest.mark.tshark

BLOCK_BYTES = 128 * 1024
FOREIGN_STAG = 0x0BADCAFE
DEADLINE_S = 20.0


def ask_for_a_load_into_memory_of_nobody(address: Address, block: kbtp.BlockRef) -> StreamEnded:
    """HELLO, then a LOAD whose Data Descriptor names an STag this side never registered: its RNIC sends a Terminate."""
    rnic = open_rnic()
    pd, channel = rnic.allocate_pd(), rnic.open_channel()
    buffers = rnic.register(bytearray(2 * HELLO_MAX_BYTES), Access.NONE, pd=pd)
    receives = [Recv(slot, Sge(buffers, slot * HELLO_MAX_BYTES, HELLO_MAX_BYTES)) for slot in range(2)]
    stream = channel.connect(
        address.host,
        address.port,
        pd=pd,
        private_data=ConnectionData(bytes(16)).pack(),
        ird=1,
        ord_=1,
        timeout_s=DEADLINE_S,
        receives=receives,
    )
    hello = Hello(0, Feature.NONE, 0, 1, completion_credits=1, max_message=HELLO_MAX_BYTES)
    load = Load(1, block.handle, 0, RequestFlag.NONE, DataDescriptor(FOREIGN_STAG, 0, BLOCK_BYTES))
    until_s = time.monotonic() + DEADLINE_S
    while time.monotonic() < until_s:
        for event in channel.poll(1.0):
            if isinstance(event, Established):
                stream.post([Send(0, inline=hello.pack())])
            elif (
                isinstance(event, WorkCompletion) and event.opcode is WcOpcode.RECV and event.length > COMPLETION_BYTES
            ):
                stream.post([Send(0, inline=load.pack())])
            elif isinstance(event, StreamEnded):
                rnic.close()
                return event
    raise AssertionError("the stream did not end")


def record_a_session(pcap: Path) -> None:
    """HELLO, all four operations inline and by RDMA, errors, and a Terminate."""
    server = Server(TargetConfig(block_size_bytes=BLOCK_BYTES, pool_blocks=4), open_rnic())
    target = server.listen(port=0)
    server.start()
    with CapturingProxy(target.host, target.port) as proxy:
        address = Address(*proxy.address)
        with kbtp.connect(str(address), quota=3, name="recorded") as client:
            data = bytes(range(256)) * (BLOCK_BYTES // 256)
            large = client.alloc_store(data)
            small = client.alloc_store(b"small", seal=False)
            client.store(small, data[:70_000])
            into = bytearray(BLOCK_BYTES)
            assert client.load(large, into=into) == BLOCK_BYTES
            assert into == data
            with pytest.raises(kbtp.Sealed):
                client.store(small, b"no")
            client.free(small)
            with pytest.raises(kbtp.NotBound):
                client.load(small, into=into)
            ended = ask_for_a_load_into_memory_of_nobody(address, large)
            assert ended.cause is not None
            assert client.load(large, into=into) == BLOCK_BYTES
        proxy.write(pcap)
    server.stop()


def test_a_recorded_session_has_no_bad_crc_and_no_malformed_packet(tmp_path: Path) -> None:
    pcap = tmp_path / "session.pcap"
    record_a_session(pcap)
    command = ["tshark", "--disable-protocol", "rpcordma", "--disable-protocol", "smb_direct", "-r", str(pcap), "-V"]
    text = subprocess.run(command, check=True, capture_output=True, text=True, timeout=50).stdout
    assert text.count("Good CRC32") > 30
    assert "Bad CRC32" not in text
    assert "Malformed Packet" not in text
    assert "does not contain the expected length" not in text
    assert "OpCode: Unknown" not in text
    for opcode in ("Send", "Send with Invalidate", "Write", "Read Request", "Read Response", "Terminate"):
        assert f"OpCode: {opcode} (" in text, opcode
