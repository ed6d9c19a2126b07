"""Where TCP segments begin and end, as the peer's kernel counts them: an FPDU with PAD is one of its own."""

from __future__ import annotations

import os
import socket
import stat
import struct
from collections.abc import Iterator
from contextlib import contextmanager

from kbtp.iwarp.mpa import MpaOptions
from kbtp.verbs.api import RdmaWrite, Send

DATA_SEGMENTS_IN = struct.Struct("152xI")
"""In Linux's struct tcp_info."""


def connected_to_raw(net, rnic, *, crc: bool = True):
    client = net.side(rnic)
    raw_listener = net.raw_listener()
    stream = client.connect(raw_listener.getsockname())
    raw = net.raw_from(raw_listener)
    raw.respond(options=MpaOptions(crc=crc))
    net.pump(lambda: client.established(stream) is not None)
    return client, stream, raw


def segments_in(raw) -> int:
    info = raw.sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, DATA_SEGMENTS_IN.size)
    return DATA_SEGMENTS_IN.unpack(info)[0]


@contextmanager
def corked(raw) -> Iterator[None]:
    """Nothing leaves the other side's socket meanwhile, as when the peer's window is closed."""
    with socket_bound_to(raw.sock.getpeername()) as theirs:
        theirs.setsockopt(socket.IPPROTO_TCP, socket.TCP_CORK, 1)
        yield
        theirs.setsockopt(socket.IPPROTO_TCP, socket.TCP_CORK, 0)


def socket_bound_to(address: tuple[str, int]) -> socket.socket:
    """Of those that this process has, whoever made it."""
    for name in os.listdir("/proc/self/fd"):
        path = f"/proc/self/fd/{name}"
        if os.path.exists(path) and stat.S_ISSOCK(os.stat(path).st_mode):
            sock = socket.socket(fileno=os.dup(int(name)))
            if sock.getsockname() == address:
                return sock
            sock.close()
    raise AssertionError(f"no socket is bound to {address}")


def test_an_fpdu_with_pad_is_a_segment_of_its_own(net, new_rnic) -> None:
    client, stream, raw = connected_to_raw(net, new_rnic())
    odd, even = bytes(range(255)), bytes(range(256))

    before = segments_in(raw)
    stream.post([Send(1, even), RdmaWrite(2, (client.sge(even),), 1, 0), Send(3, odd), Send(4, even), Send(5, even)])

    net.pump(lambda: len(raw.ulpdus()) == 5)
    assert segments_in(raw) - before == 3


def test_what_waits_in_the_socket_is_not_joined_by_an_fpdu_with_pad(net, new_rnic) -> None:
    client, stream, raw = connected_to_raw(net, new_rnic())

    before = segments_in(raw)
    with corked(raw):
        for number, length in enumerate((8, 9, 12)):
            stream.post([Send(number, bytes(length))])
            client.wait(stream, number + 1)

    net.pump(lambda: len(raw.ulpdus()) == 3)
    assert segments_in(raw) - before == 3


def test_without_crc_an_fpdu_with_pad_is_as_any_other(net, new_rnic) -> None:
    _, stream, raw = connected_to_raw(net, new_rnic(MpaOptions(crc=False)), crc=False)

    before, received = segments_in(raw), len(raw.received)
    stream.post([Send(1, bytes(12)), Send(2, bytes(9)), Send(3, bytes(12))])

    net.pump(lambda: len(raw.received) - received == 36 + 36 + 36)
    assert segments_in(raw) - before == 1
