"""What is the native RNIC's own: memory that Rust keeps, numbers that must fit, a module like its stub."""

from __future__ import annotations

import weakref

import numpy as np
import pytest

import kbtp
from kbtp.errors import ApiMisuse
from kbtp.limits import RNIC_PUMP_MAX_BYTES, RNIC_SPIN_MAX_US
from kbtp.rnic.native import NativeOptions, NativeRnic
from kbtp.target.config import TargetConfig
from kbtp.target.server import Server
from kbtp.verbs.api import Access, Immediate, RdmaWrite, Recv, Send, Sge, WcStatus


@pytest.fixture
def rnic_name() -> str:
    return "native"


def test_memory_lives_as_long_as_its_region_is_valid(pair) -> None:
    memory = np.zeros(16, np.uint8)
    alive = weakref.ref(memory)
    region = pair.client.region(memory, Access.REMOTE_WRITE)
    stag = region.stag
    del memory

    assert alive() is not None
    native = region.native
    del region
    pair.c.post([Send(1)])
    pair.server.wait(pair.s, 1)
    pair.s.post([RdmaWrite(2, (pair.server.sge(b"written"),), stag, 0), Send(3)])
    pair.client.wait(pair.c, 2)
    kept = alive()
    assert kept is not None
    assert bytes(kept[:7]) == b"written"
    del kept

    native.revoke()
    assert alive() is None


def test_posted_work_keeps_the_memory_of_a_revoked_region(pair) -> None:
    memory = np.zeros(16, np.uint8)
    alive = weakref.ref(memory)
    region = pair.client.region(memory)
    pair.c.post_recv([Recv(99, Sge(region, 0, 16))])
    region.revoke()
    del memory, region
    assert alive() is not None

    pair.c.abort()
    pair.client.wait_end(pair.c)
    assert alive() is None


def test_closing_the_rnic_lets_all_memory_go() -> None:
    rnic = NativeRnic()
    memory = np.zeros(16, np.uint8)
    alive = weakref.ref(memory)
    rnic.register(memory, Access.REMOTE_READ, pd=rnic.allocate_pd())
    del memory
    assert alive() is not None

    rnic.close()
    assert alive() is None


def test_an_rnic_that_is_only_forgotten_lets_all_memory_go() -> None:
    rnic = NativeRnic()
    memory = np.zeros(16, np.uint8)
    alive = weakref.ref(memory)
    rnic.register(memory, Access.REMOTE_READ, pd=rnic.allocate_pd())
    rnic.open_channel().listen("127.0.0.1", 0)
    del memory, rnic
    assert alive() is None


@pytest.mark.parametrize("wr_id", [-1, 1 << 64])
def test_a_wr_id_has_64_bits(pair, wr_id) -> None:
    for request in (Send(wr_id), Immediate(wr_id, bytes(8))):
        with pytest.raises(ApiMisuse, match="wr_id must be a 64-bit number"):
            pair.c.post([request])
    with pytest.raises(ApiMisuse, match="wr_id must be a 64-bit number"):
        pair.c.post_recv([Recv(wr_id, pair.client.sge(8))])

    pair.c.post([Send((1 << 64) - 1)])
    [done] = pair.client.wait(pair.c, 1)
    assert (done.wr_id, done.status) == ((1 << 64) - 1, WcStatus.SUCCESS)


@pytest.mark.parametrize("base_to", [-1, 1 << 64, (1 << 64) - 7])
def test_a_region_ends_below_2_to_the_64(base_to) -> None:
    rnic = NativeRnic()
    with pytest.raises(ApiMisuse, match=r"base_to must leave room for 8 octets below 2\^64"):
        rnic.register(bytearray(8), Access.NONE, pd=rnic.allocate_pd(), base_to=base_to)
    region = rnic.register(bytearray(8), Access.NONE, pd=rnic.allocate_pd(), base_to=(1 << 64) - 8)
    assert (region.base_to, region.length, region.access) == ((1 << 64) - 8, 8, Access.NONE)
    rnic.close()


def test_spinning_changes_nothing_but_the_time_it_takes(net) -> None:
    side = net.side(NativeRnic(NativeOptions(spin_us=200)))
    side.listen()
    assert side.channel.poll(0) == []
    assert side.channel.poll(0.001) == []
    net.raw_to(side.listener.address).initiate()
    assert len(side.accepted) == 1


def test_a_store_of_many_turns_leaves_while_its_caller_spins() -> None:
    length_bytes = 32 * RNIC_PUMP_MAX_BYTES
    server = Server(TargetConfig(block_size_bytes=length_bytes, pool_blocks=1), NativeRnic())
    url = str(server.listen(port=0))
    server.start()
    spinning = NativeRnic(NativeOptions(spin_us=RNIC_SPIN_MAX_US))
    # A second of spinning at the end of each turn would be more than the time there is.
    with kbtp.connect(url, quota=1, rnic=spinning, timeout_s=15) as client:
        block = client.alloc_store(bytes(length_bytes))
        assert block.length_bytes == length_bytes
    server.stop()


def test_a_stream_shows_where_it_stands(pair) -> None:
    assert repr(pair.c) == f"<NativeStream {pair.c.remote_address} OPEN>"
    pair.c.abort()
    assert repr(pair.c).endswith(" ENDED>")
