"""A target whose RNIC executes sequences: what it leaves to Python and why, its threads, and where both meet."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import Any

import pytest

import kbtp
from kbtp.errors import ApiMisuse
from kbtp.rnic.native import NativeOptions, NativeRnic
from kbtp.rnic.reference import ReferenceRnic
from kbtp.target.config import TargetConfig
from kbtp.target.server import Server
from kbtp.target.session import Session
from kbtp.types import RequestFlag, Status
from kbtp.wire import DataDescriptor, Free, Load

BLOCK_BYTES = 8192
EVERY_REASON = {
    "NOT_A_REQUEST", "UNSUPPORTED", "MALFORMED", "BIND", "BEHIND_PUNT", "HEAD_OF_DEVICE", "FORCED",
}  # fmt: skip

Start = Callable[..., tuple[NativeRnic, str]]
Peers = Callable[..., Any]


@pytest.fixture
def start() -> Iterator[Start]:
    """`start(forced_punts, threads, **config)`: the RNIC and the URL of a running target."""
    with ExitStack() as stack:

        def go(forced_punts: float = 0.0, threads: int = 1, **config: Any) -> tuple[NativeRnic, str]:
            rnic = NativeRnic(NativeOptions(forced_punts=forced_punts))
            defaults = {"block_size_bytes": BLOCK_BYTES, "pool_blocks": 16, "quota": 4}
            server = Server(TargetConfig(**{**defaults, **config}), rnic, threads=threads)
            stack.callback(server.stop)
            url = str(server.listen(port=0))
            server.start()
            return rnic, url

        yield go


def use(client: kbtp.Client, seed: int) -> None:
    """One of each: eight requests."""
    octets = bytes((seed + n) % 256 for n in range(BLOCK_BYTES))
    small = client.alloc_store(octets[:100])
    large = client.alloc_store(octets)
    buffer = bytearray(BLOCK_BYTES)
    assert client.load(large, into=buffer) == BLOCK_BYTES
    assert buffer == octets
    assert client.load(small, into=buffer) == 100
    assert buffer[:100] == octets[:100]
    with pytest.raises(kbtp.Sealed):
        client.store(small, octets)
    client.free(small)
    client.free(large)
    with pytest.raises(kbtp.NotBound):
        client.load(large, into=buffer)


def counted(rnic: NativeRnic) -> dict[str, int]:
    """The reasons there were."""
    assert set(rnic.punts) == EVERY_REASON
    return {reason: count for reason, count in rnic.punts.items() if count}


def test_the_four_operations_need_no_interpreter(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    rnic, url = start()
    with kbtp.connect(url) as client:
        monkeypatch.delattr(Session, "_receive_request")
        use(client, 1)
    assert counted(rnic) == {}


def test_every_request_can_be_left_to_python(start: Start) -> None:
    rnic, url = start(forced_punts=1.0)
    with kbtp.connect(url) as client:
        use(client, 1)
    assert counted(rnic) == {"FORCED": 8}


def test_a_block_that_is_not_sealed_is_loaded_like_any_other(start: Start) -> None:
    rnic, url = start()
    with kbtp.connect(url) as client:
        block = client.alloc_store(b"draft", seal=False)
        buffer = bytearray(5)
        assert client.load(block, into=buffer, allow_unsealed=True) == 5
        assert buffer == b"draft"
        client.store(block, b"final")
        assert client.load(block, into=buffer) == 5
        assert buffer == b"final"
    assert counted(rnic) == {}


def test_what_is_no_good_request_is_answered_by_python(start: Start, peer: Peers) -> None:
    rnic, url = start()
    initiator = peer(url)
    ack = initiator.open_session()
    good = Free(7, ack.first_handle, 0, RequestFlag.NONE).pack()
    initiator.send(good[:-1] + b"\x00\x00")
    assert initiator.receive().status is Status.MALFORMED
    initiator.send(bytes([9]) + good[1:])
    assert initiator.receive().status is Status.UNSUPPORTED
    initiator.send(good)
    assert initiator.receive().status is Status.NOT_BOUND
    initiator.send(good[:1] + b"\x7f" + good[2:])
    assert initiator.receive().status is Status.UNSUPPORTED
    assert counted(rnic) == {"MALFORMED": 1, "UNSUPPORTED": 1, "NOT_A_REQUEST": 1}


@pytest.mark.parametrize("forced_punts", [0.0, 0.5])
@pytest.mark.parametrize("threads", [1, 4])
def test_sessions_on_several_event_loops(start: Start, threads: int, forced_punts: float) -> None:
    _, url = start(forced_punts, threads, pool_blocks=64)
    together = threading.Barrier(8)

    def work(number: int) -> None:
        with kbtp.connect(url, quota=4) as client:
            together.wait(10)
            for round_number in range(20):
                use(client, number * 20 + round_number)

    with ThreadPoolExecutor(8) as executor:
        for done in [executor.submit(work, number) for number in range(8)]:
            done.result(50)
    with kbtp.connect(url, quota=64) as last:
        assert last.terms.quota_blocks == 64


@pytest.mark.parametrize("initiator_rnic", [NativeRnic, ReferenceRnic])
@pytest.mark.parametrize("rnic_name", ["reference", "native", "native/0.5", "native/1.0"])
def test_either_initiator_with_either_target(serve: Callable[..., Any], initiator_rnic: type) -> None:
    server = serve()
    rnic = initiator_rnic()
    with kbtp.connect(server.url, rnic=rnic) as client:
        use(client, 3)
    rnic.close()


def test_a_block_of_another_session_on_another_loop(start: Start) -> None:
    _, url = start(threads=2)
    with kbtp.connect(url) as owner, kbtp.connect(url) as reader:
        block = owner.alloc_store(b"shared")
        buffer = bytearray(6)
        assert reader.load(block, into=buffer) == 6
        assert buffer == b"shared"


def test_a_free_that_outlives_its_stream_gives_everything_back(serve: Callable[..., Any], peer: Peers) -> None:
    """It waits for the LOAD of a peer that reads nothing; its own initiator has gone when that ends."""
    server = serve(block_size_bytes=16 << 20, pool_blocks=2, quota=1, linger_s=0.1)
    initiator_id = bytes(range(16))
    with kbtp.connect(server.url, initiator_id=initiator_id) as client:
        block = client.alloc_store(bytes(16 << 20))
    owner, reader = peer(server.url), peer(server.url, receive_buffer_bytes=4096)
    ack = owner.open_session(initiator_id=initiator_id)
    reader.open_session()
    destination = reader.register(bytearray(16 << 20))
    reader.send(Load(1, block.handle, 0, RequestFlag.NONE, DataDescriptor(destination.stag, 0, 16 << 20)).pack())
    assert server.wait_until(lambda: any(map(server.outstanding_of, list(server.target.sessions))))
    unbound = (block.handle - ack.first_handle + 1) % ack.handle_count + ack.first_handle
    owner.send(
        Free(1, block.handle, 0, RequestFlag.NONE).pack(),
        Free(2, unbound, 0, RequestFlag.NONE).pack(),
    )
    assert owner.receive().request_id == 2
    owner.reset()
    assert server.wait_until(lambda: len(server.target.sessions) == 1)
    assert server.free_blocks == 1
    reader.reset()
    assert server.wait_until(lambda: server.free_blocks == 2 and server.target.store.quotas.left == 2)


def test_only_such_an_rnic_has_threads() -> None:
    with pytest.raises(ApiMisuse, match="serves on 1"):
        Server(TargetConfig(block_size_bytes=512, pool_blocks=1), ReferenceRnic(), threads=2)
    with pytest.raises(ApiMisuse, match="1 or more"):
        Server(TargetConfig(block_size_bytes=512, pool_blocks=1), NativeRnic(), threads=0)
