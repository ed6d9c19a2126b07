"""A peer that breaks the rules ends its own stream or gets its status. The target logs one line; every other session
goes on, byte-exact."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

import kbtp
from kbtp.types import RequestFlag, Status, TerminateCause
from kbtp.wire import AllocStore, DataDescriptor, Free, Hello, Load, Store

Serve = Callable[..., Any]
Peers = Callable[..., Any]
Neighbours = Callable[[str], Any]

IMPATIENT = {"mpa_request_timeout_s": 0.2}
FOREIGN_STAG = 0x0BADCAFE


def alloc_store(ack: Any, data: DataDescriptor, *, request_id: int = 1, handle: int | None = None) -> bytes:
    handle = ack.first_handle if handle is None else handle
    return AllocStore(request_id, handle, 0, RequestFlag.SEAL, data).pack()


def inline(ack: Any, octets: bytes, *, request_id: int = 1, handle: int | None = None) -> bytes:
    handle = ack.first_handle if handle is None else handle
    data = DataDescriptor(0, 0, len(octets))
    return AllocStore(request_id, handle, 0, RequestFlag.SEAL | RequestFlag.INLINE, data, inline_data=octets).pack()


def only_the_neighbour_is_left(server: Any) -> bool:
    """Its session, its quota; whatever the hostile peer had is free again."""
    return bool(
        server.wait_until(
            lambda: [session.name for session in server.target.sessions] == ["neighbour"] and server.free_blocks >= 15
        )
    )


# --- before any session ------------------------------------------------------------------------


@pytest.mark.parametrize(
    "rubbish", [b"GET / HTTP/1.1\r\n\r\n", bytes(64), b"MPA ID Rep Frame" + bytes(4)], ids=["HTTP", "zeros", "Reply"]
)
def test_rubbish_instead_of_an_mpa_request(
    serve: Serve, peer: Peers, neighbour: Neighbours, warnings: Any, rubbish: bytes
) -> None:
    """RFC 5044 7.1.2: closed without a word."""
    server = serve()
    other = neighbour(server.url)
    hostile = peer(server.url)
    hostile.socket.sendall(rubbish)
    assert hostile.socket.recv(1) == b""
    assert other.works_on()
    assert warnings.wait_for_one()
    assert len(warnings.lines) == 1


def test_who_connects_and_says_nothing(
    serve: Serve, new_rnic: Any, peer: Peers, neighbour: Neighbours, warnings: Any
) -> None:
    """RFC 5044 7.1.2 rule 10, profile 8.2."""
    server = serve(new_rnic(**IMPATIENT))
    other = neighbour(server.url)
    assert peer(server.url).is_closed_by_target()
    assert other.works_on()
    assert "no MPA Request within 0.2 s" in warnings.wait_for_one()
    assert len(warnings.lines) == 1


def test_half_an_mpa_request(serve: Serve, new_rnic: Any, peer: Peers, neighbour: Neighbours, warnings: Any) -> None:
    server = serve(new_rnic(**IMPATIENT))
    other = neighbour(server.url)
    hostile = peer(server.url)
    hostile.socket.sendall(hostile.startup.request[:10])
    assert hostile.is_closed_by_target()
    assert other.works_on()
    assert warnings.wait_for_one()
    assert len(warnings.lines) == 1


def test_who_closes_in_the_middle_of_an_mpa_request(
    serve: Serve, peer: Peers, neighbour: Neighbours, warnings: Any
) -> None:
    server = serve()
    other = neighbour(server.url)
    hostile = peer(server.url)
    hostile.socket.sendall(hostile.startup.request[:10])
    hostile.socket.close()
    assert other.works_on()
    assert warnings.wait_for_one()
    assert len(warnings.lines) == 1


def test_a_hundred_connections_that_close_at_once(
    serve: Serve, peer: Peers, neighbour: Neighbours, warnings: Any
) -> None:
    """Who has not said a word has broken no rule: whatever looks whether the port is open does that."""
    server = serve()
    other = neighbour(server.url)
    for one in [peer(server.url) for _ in range(100)]:
        one.socket.close()
    assert other.works_on()
    peer(server.url).open_session()
    assert warnings.lines == []


def test_an_mpa_connection_without_hello(serve: Serve, peer: Peers, neighbour: Neighbours, warnings: Any) -> None:
    """Profile 8.2."""
    server = serve(hello_timeout_s=0.2)
    other = neighbour(server.url)
    hostile = peer(server.url)
    hostile.start_mpa()
    assert hostile.is_closed_by_target()
    assert other.works_on()
    assert "no HELLO within 0.2 s" in warnings.wait_for_one()
    assert only_the_neighbour_is_left(server)
    assert len(warnings.lines) == 1


# --- rubbish on the stream ---------------------------------------------------------------------


def test_rubbish_behind_the_mpa_reply(serve: Serve, peer: Peers, neighbour: Neighbours, warnings: Any) -> None:
    server = serve()
    other = neighbour(server.url)
    hostile = peer(server.url)
    hostile.start_mpa()
    hostile.socket.sendall(b"\x00\x20" + b"rubbish" * 20)
    assert hostile.is_closed_by_target()
    assert other.works_on()
    assert warnings.wait_for_one()
    assert only_the_neighbour_is_left(server)
    assert len(warnings.lines) == 1


def spoilt_crc(hostile: Any, ack: Any) -> bytes:
    octets = bytearray(hostile.fpdus_of(Free(1, ack.first_handle, 0, RequestFlag.NONE).pack()))
    octets[-1] ^= 1
    return bytes(octets)


@pytest.mark.parametrize(
    ("octets", "cause"),
    [
        (spoilt_crc, TerminateCause.MPA_CRC),
        (lambda hostile, _: hostile.fpdus_of(bytes(23)), TerminateCause.RDMAP_UNSPECIFIED),
        (lambda hostile, _: hostile.fpdus_of(b""), TerminateCause.RDMAP_UNSPECIFIED),
        (lambda hostile, _: hostile.fpdus_of(bytes(16385)), TerminateCause.DDP_MESSAGE_TOO_LONG),
    ],
    ids=["bad CRC", "23 octets", "empty", "longer than Max Message"],
)
def test_a_message_that_is_none(
    serve: Serve,
    peer: Peers,
    neighbour: Neighbours,
    warnings: Any,
    octets: Callable[[Any, Any], bytes],
    cause: TerminateCause,
) -> None:
    """Profile 8.5, RFC 5040 4.8, RFC 5041 7, RFC 5044 8."""
    server = serve()
    other = neighbour(server.url)
    hostile = peer(server.url)
    ack = hostile.open_session()
    hostile.socket.sendall(octets(hostile, ack))
    assert hostile.terminate() == cause.value
    assert other.works_on()
    assert cause.name in warnings.wait_for_one()
    assert only_the_neighbour_is_left(server)
    assert len(warnings.lines) == 1


def test_who_closes_in_the_middle_of_a_message(serve: Serve, peer: Peers, neighbour: Neighbours, warnings: Any) -> None:
    server = serve()
    other = neighbour(server.url)
    hostile = peer(server.url)
    ack = hostile.open_session()
    octets = hostile.fpdus_of(inline(ack, bytes(500)))
    hostile.socket.sendall(octets[:300])
    hostile.socket.close()
    assert other.works_on()
    assert "in the middle of a message" in warnings.wait_for_one()
    assert only_the_neighbour_is_left(server)
    assert len(warnings.lines) == 1


def test_who_vanishes(serve: Serve, peer: Peers, neighbour: Neighbours, warnings: Any) -> None:
    server = serve()
    other = neighbour(server.url)
    hostile = peer(server.url)
    ack = hostile.open_session()
    hostile.send(inline(ack, bytes(500)))
    assert hostile.receive().status is Status.SUCCESS
    hostile.reset()
    assert other.works_on()
    assert warnings.wait_for_one()
    assert only_the_neighbour_is_left(server)
    assert len(warnings.lines) == 1


def test_a_flood_of_rubbish_leaves_the_others_their_turns(
    serve: Serve, peer: Peers, neighbour: Neighbours, warnings: Any
) -> None:
    server = serve()
    other = neighbour(server.url)
    hostile = peer(server.url)
    hostile.open_session()
    octets = os.urandom(1 << 20)
    try:
        while True:
            hostile.socket.sendall(octets)
    except OSError:
        assert hostile.is_closed_by_target()
    assert other.works_on()
    assert only_the_neighbour_is_left(server)
    assert len(warnings.lines) == 1


# --- HELLO -------------------------------------------------------------------------------------


def test_a_quota_beyond_the_pool_is_what_there_is(serve: Serve, peer: Peers, neighbour: Neighbours) -> None:
    """Profile 1 NO_SPACE, 8.4."""
    server = serve()
    other = neighbour(server.url)
    ack = peer(server.url).open_session(requested_quota=(1 << 32) - 1, requested_handles=(1 << 64) - 1)
    assert ack.status is Status.SUCCESS
    assert ack.allocation_quota == 14
    assert other.works_on()


def test_a_quota_when_there_is_none_left(serve: Serve, peer: Peers, neighbour: Neighbours, warnings: Any) -> None:
    server = serve()
    other = neighbour(server.url)
    peer(server.url).open_session(requested_quota=14)
    hostile = peer(server.url)
    ack = hostile.open_session(requested_quota=1)
    assert ack.status is Status.NO_SPACE
    assert (ack.allocation_quota, ack.first_handle, ack.block_size) == (0, 0, 0)
    assert hostile.is_closed_by_target()
    hostile.socket.close()
    assert other.works_on()
    assert "HELLO refused: NO_SPACE" in warnings.wait_for_one()
    assert server.wait_until(lambda: len(server.target.sessions) == 2)
    assert len(warnings.lines) == 1


def test_a_second_hello(serve: Serve, peer: Peers, neighbour: Neighbours, warnings: Any) -> None:
    server = serve()
    other = neighbour(server.url)
    hostile = peer(server.url)
    hostile.open_session()
    assert hostile.hello(request_id=9).status is Status.NO_SESSION
    assert hostile.is_closed_by_target()
    hostile.socket.close()
    assert other.works_on()
    assert "HELLO refused: NO_SESSION" in warnings.wait_for_one()
    assert only_the_neighbour_is_left(server)
    assert len(warnings.lines) == 1


def test_requests_before_hello(serve: Serve, peer: Peers, neighbour: Neighbours, warnings: Any) -> None:
    """Profile 8.2: one gets its status, the second ends the stream."""
    server = serve()
    other = neighbour(server.url)
    hostile = peer(server.url)
    hostile.start_mpa()
    hostile.send(Free(1, 0, 0, RequestFlag.NONE).pack())
    assert hostile.receive().status is Status.NO_SESSION
    hostile.send(Free(2, 0, 0, RequestFlag.NONE).pack())
    assert hostile.terminate() == TerminateCause.RDMAP_UNSPECIFIED.value
    assert other.works_on()
    assert "a second request before HELLO" in warnings.wait_for_one()
    assert only_the_neighbour_is_left(server)
    assert len(warnings.lines) == 1


def test_a_hello_of_more_than_1024_octets(serve: Serve, peer: Peers, neighbour: Neighbours, warnings: Any) -> None:
    """Profile 8.1."""
    server = serve()
    other = neighbour(server.url)
    hostile = peer(server.url)
    hostile.start_mpa()
    hello = Hello(0, 0, 0, 0, 32, 1024, bytes(16)).pack()
    hostile.send(hello + bytes(1025 - len(hello)))
    assert hostile.terminate() == TerminateCause.DDP_MESSAGE_TOO_LONG.value
    assert other.works_on()
    assert warnings.wait_for_one()
    assert only_the_neighbour_is_left(server)
    assert len(warnings.lines) == 1


# --- credits and STags -------------------------------------------------------------------------


def test_more_requests_than_credits(serve: Serve, peer: Peers, neighbour: Neighbours, warnings: Any) -> None:
    """Profile 3 "Credits": the initiator ends its own stream, nobody else's."""
    server = serve(request_credits=4)
    other = neighbour(server.url)
    hostile = peer(server.url)
    ack = hostile.open_session()
    source = hostile.register(bytearray(8192))
    # The target's RDMA Reads stay unanswered, so none of these is completed.
    stores = [
        alloc_store(ack, DataDescriptor(source.stag, 0, 8192), request_id=n, handle=ack.first_handle + n)
        for n in range(5)
    ]
    hostile.send(*stores)
    assert hostile.terminate() == TerminateCause.DDP_NO_BUFFER.value
    assert other.works_on()
    assert "DDP_NO_BUFFER" in warnings.wait_for_one()
    assert only_the_neighbour_is_left(server)
    assert len(warnings.lines) == 1


@pytest.mark.parametrize(
    ("stag", "to", "cause"),
    [
        (FOREIGN_STAG, 0, TerminateCause.DDP_INVALID_STAG),
        (None, 1, TerminateCause.DDP_BASE_OR_BOUNDS),
        (None, (1 << 64) - 4000, TerminateCause.DDP_TO_WRAP),
    ],
    ids=["foreign STag", "beyond its region", "TO wraps"],
)
def test_a_load_to_memory_that_is_not_its_own(
    serve: Serve,
    peer: Peers,
    neighbour: Neighbours,
    warnings: Any,
    stag: int | None,
    to: int,
    cause: TerminateCause,
) -> None:
    """Profile 6.7: the initiator's RNIC refuses the RDMA Write and says so; the block is not left pinned."""
    server = serve()
    other = neighbour(server.url)
    hostile = peer(server.url)
    ack = hostile.open_session()
    source = hostile.register(bytearray(8192))
    hostile.send(alloc_store(ack, DataDescriptor(source.stag, 0, 8192)))
    assert hostile.receive().status is Status.SUCCESS
    destination = hostile.register(bytearray(8192))
    data = DataDescriptor(destination.stag if stag is None else stag, to, 8192)
    hostile.send(Load(2, ack.first_handle, 0, RequestFlag.NONE, data).pack())
    assert hostile.refusal() is cause
    assert destination.view[0] == 0
    assert other.works_on()
    assert cause.name in warnings.wait_for_one()
    assert only_the_neighbour_is_left(server)
    assert len(warnings.lines) == 1


@pytest.mark.parametrize("opcode", ["STORE", "ALLOC_STORE"])
@pytest.mark.parametrize(
    ("stag", "to", "cause"),
    [
        (FOREIGN_STAG, 0, TerminateCause.RDMAP_INVALID_STAG),
        (None, 1, TerminateCause.RDMAP_BASE_OR_BOUNDS),
        (None, (1 << 64) - 4000, TerminateCause.RDMAP_TO_WRAP),
    ],
    ids=["foreign STag", "beyond its region", "TO wraps"],
)
def test_a_store_from_memory_that_is_not_its_own(
    serve: Serve,
    peer: Peers,
    neighbour: Neighbours,
    warnings: Any,
    opcode: str,
    stag: int | None,
    to: int,
    cause: TerminateCause,
) -> None:
    """Profile 6.5, 6.7: the Read Request is refused; no block is lost."""
    server = serve()
    other = neighbour(server.url)
    hostile = peer(server.url)
    ack = hostile.open_session()
    source = hostile.register(bytearray(8192))
    data = DataDescriptor(source.stag if stag is None else stag, to, 8192)
    if opcode == "STORE":
        hostile.send(AllocStore(1, ack.first_handle, 0, RequestFlag.INLINE, DataDescriptor(0, 0, 0)).pack())
        assert hostile.receive().status is Status.SUCCESS
        hostile.send(Store(2, ack.first_handle, 0, RequestFlag.NONE, data).pack())
    else:
        hostile.send(alloc_store(ack, data))
    assert hostile.refusal() is cause
    assert other.works_on()
    assert cause.name in warnings.wait_for_one()
    assert only_the_neighbour_is_left(server)
    assert len(warnings.lines) == 1


@pytest.mark.parametrize("stag", [0, 1, 0xFFFFFFFF])
def test_writing_to_the_targets_memory(
    serve: Serve, peer: Peers, neighbour: Neighbours, warnings: Any, stag: int
) -> None:
    server = serve()
    other = neighbour(server.url)
    hostile = peer(server.url)
    hostile.open_session()
    hostile.stream.post_write(1, [bytes(100)], stag, 65536)
    hostile.answer()
    assert hostile.terminate() == TerminateCause.DDP_INVALID_STAG.value
    assert other.works_on()
    assert warnings.wait_for_one()
    assert only_the_neighbour_is_left(server)
    assert len(warnings.lines) == 1


# --- peers that take their time ----------------------------------------------------------------


def test_a_peer_that_stops_reading_during_a_large_load(
    serve: Serve, peer: Peers, neighbour: Neighbours, warnings: Any
) -> None:
    """The others do not wait for it. Once somebody waits for its block it is given up (profile 6.1)."""
    server = serve(block_size_bytes=16 << 20, pool_blocks=16)
    initiator_id = bytes(range(16))
    with kbtp.connect(server.url, quota=1, initiator_id=initiator_id) as owner:
        block = owner.alloc_store(bytes(16 << 20))
    assert server.wait_until(lambda: not server.target.sessions)
    server.target.config = server.config = replace(server.config, drain_s=0.2)  # only now: the STORE took its time
    other = neighbour(server.url)
    with kbtp.connect(server.url, initiator_id=initiator_id) as owner:
        hostile = peer(server.url, receive_buffer_bytes=4096)
        hostile.open_session()
        destination = hostile.register(bytearray(16 << 20))
        data = DataDescriptor(destination.stag, 0, 16 << 20)
        hostile.send(Load(1, block.handle, 0, RequestFlag.NONE, data).pack())
        assert other.works_on()
        assert warnings.lines == []
        owner.free(block)
        assert "did not drain within 0.2 s" in warnings.wait_for_one()
        assert owner.alloc_store(b"x").length_bytes == 1
    assert only_the_neighbour_is_left(server)
    assert other.works_on()
    assert len(warnings.lines) == 1


def test_a_peer_that_does_not_answer_a_read(serve: Serve, peer: Peers, neighbour: Neighbours, warnings: Any) -> None:
    """Profile 8.8."""
    server = serve(drain_s=0.2)
    other = neighbour(server.url)
    hostile = peer(server.url)
    ack = hostile.open_session()
    hostile.send(alloc_store(ack, DataDescriptor(FOREIGN_STAG, 0, 8192)))
    assert "an RDMA Read was not answered within 0.2 s" in warnings.wait_for_one()
    assert hostile.is_closed_by_target()
    assert other.works_on()
    assert only_the_neighbour_is_left(server)
    assert len(warnings.lines) == 1


VICTIM = """
import sys
import kbtp

with kbtp.connect(sys.argv[1], quota=4, name="victim") as client:
    blocks = [client.alloc_store(bytes(8 << 20)) for _ in range(4)]
    print("working", flush=True)
    buffers = [bytearray(8 << 20) for _ in range(16)]
    while True:
        client.load_many(blocks * 4, into=buffers)
"""

# 88 MiB at least are still to be sent then: more than the sockets of both sides hold, so that the target cannot finish
# them while the victim stands still.
MANY_OUTSTANDING = 12


def stopped_in_the_middle(server: Any, victim: subprocess.Popen[bytes]) -> bool:
    """Stop it where it is. True if so many requests of it are outstanding that some will be lost; else it goes on."""
    victim.send_signal(signal.SIGSTOP)
    os.waitpid(victim.pid, os.WUNTRACED)
    sessions = list(server.target.sessions)
    if any(one.name == "victim" and server.outstanding_of(one) >= MANY_OUTSTANDING for one in sessions):
        return True
    victim.send_signal(signal.SIGCONT)
    return False


def test_an_initiator_that_is_killed_in_the_middle_of_a_transfer(
    serve: Serve, neighbour: Neighbours, warnings: Any
) -> None:
    server = serve(block_size_bytes=8 << 20, pool_blocks=16)
    other = neighbour(server.url)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    with subprocess.Popen(
        [sys.executable, "-c", VICTIM, server.url], stdout=subprocess.PIPE, env=environment
    ) as victim:
        assert victim.stdout is not None
        assert victim.stdout.readline() == b"working\n"
        assert server.free_blocks <= 12
        assert server.wait_until(lambda: stopped_in_the_middle(server, victim))
        victim.send_signal(signal.SIGKILL)
        assert victim.wait(10) == -signal.SIGKILL
    assert only_the_neighbour_is_left(server)
    assert other.works_on()
    assert "victim" in warnings.wait_for_one()
    assert len(warnings.lines) == 1


def test_a_peer_that_only_shuts_its_side_down(serve: Serve, peer: Peers, neighbour: Neighbours) -> None:
    server = serve()
    other = neighbour(server.url)
    hostile = peer(server.url)
    hostile.open_session()
    hostile.socket.shutdown(socket.SHUT_WR)
    assert only_the_neighbour_is_left(server)
    assert hostile.is_closed_by_target()
    assert other.works_on()
