"""What a peer may not reach: checklist S1 to S5, D25 to D32, R17 to R23, R32, R33, X17, X18, each over a real stream.

The offending side is told by a Terminate; the side that was attacked reports `PeerMisbehaved` and its cause.
"""

from __future__ import annotations

import numpy as np
import pytest

from kbtp.errors import ConnectionLost, PeerMisbehaved
from kbtp.types import TerminateCause as Cause
from kbtp.verbs.api import Access, CompareSwap, FetchAdd, RdmaRead, RdmaWrite, Send, Sge, WcStatus

R, W, A = Access.REMOTE_READ, Access.REMOTE_WRITE, Access.REMOTE_ATOMIC
ALL = R | W | A
TO_END = 1 << 64


def write(pair, stag: int, to: int, length: int = 8):
    return RdmaWrite(1, (pair.client.sge(b"\xff" * length),), stag, to)


def read(pair, stag: int, to: int, length: int = 8):
    return RdmaRead(1, Sge(pair.client.region(length), 0, length), stag, to)


def atomic(pair, stag: int, to: int):
    return FetchAdd(1, stag, to, 1, 0)


def swap(pair, stag: int, to: int):
    return CompareSwap(1, stag, to, 1, 1, 0, 0)


def expect_refused(pair, request, cause: Cause) -> None:
    """`request` of the client ends the stream with `cause`, at both ends."""
    pair.c.post([request])

    at_server = pair.server.wait_end(pair.s)
    assert isinstance(at_server.reason, PeerMisbehaved)
    assert (at_server.cause, at_server.terminate) == (cause, None)
    at_client = pair.client.wait_end(pair.c)
    assert isinstance(at_client.reason, ConnectionLost)
    assert at_client.cause is None
    assert at_client.terminate is not None
    assert at_client.reason.terminate == at_client.terminate
    assert (at_client.terminate.layer, at_client.terminate.etype, at_client.terminate.code) == cause.value


@pytest.mark.parametrize(
    ("make", "cause"),
    [
        (write, Cause.DDP_INVALID_STAG),
        (read, Cause.RDMAP_INVALID_STAG),
        (atomic, Cause.RDMAP_INVALID_STAG),
        (swap, Cause.RDMAP_INVALID_STAG),
    ],
)
@pytest.mark.parametrize("revoked", [False, True])
def test_d25_r17_x18_an_unknown_or_revoked_stag(pair, make, cause, revoked) -> None:
    region = pair.server.region(np.zeros(1, np.uint64), ALL)
    if revoked:
        region.revoke()

    expect_refused(pair, make(pair, region.stag if revoked else region.stag ^ 1, 0), cause)
    assert region.view == bytes(8)


@pytest.mark.parametrize("other_domain", [True, False])
@pytest.mark.parametrize(
    ("make", "cause"),
    [
        (write, Cause.DDP_STAG_NOT_ASSOCIATED),
        (read, Cause.RDMAP_STAG_NOT_ASSOCIATED),
        (atomic, Cause.RDMAP_STAG_NOT_ASSOCIATED),
        (lambda _, stag, to: Send(1, b"", invalidate_stag=stag), Cause.RDMAP_CANNOT_INVALIDATE),
    ],
)
def test_s1_s2_a_stag_of_another_domain_or_stream(connect_pair, make, cause, other_domain) -> None:
    pair = connect_pair()
    if other_domain:
        rnic = pair.server.rnic
        region = rnic.register(np.zeros(1, np.uint64), ALL, pd=rnic.allocate_pd())
    else:
        other = connect_pair(server=pair.server)
        region = pair.server.region(np.zeros(1, np.uint64), ALL, stream=other.s)

    expect_refused(pair, make(pair, region.stag, 0), cause)
    assert region.valid
    assert region.view == bytes(8)


@pytest.mark.parametrize(("make", "cause"), [(write, Cause.DDP_BASE_OR_BOUNDS), (read, Cause.RDMAP_BASE_OR_BOUNDS)])
@pytest.mark.parametrize(("to", "length"), [(99, 1), (99, 8), (116, 1), (101, 16), (100, 17), (0, 1), (1 << 63, 4)])
def test_s3_an_octet_out_of_bounds(pair, make, cause, to, length) -> None:
    memory = bytearray(18)
    region = pair.server.rnic.register(memoryview(memory)[1:17], ALL, pd=pair.server.pd, base_to=100)

    expect_refused(pair, make(pair, region.stag, to, length), cause)
    assert memory == bytes(18)


@pytest.mark.parametrize("to", [92, 99, 101, 108, 116])
def test_s3_an_atomic_out_of_bounds(pair, to) -> None:
    octets = np.zeros(4, np.uint64).view(np.uint8)
    region = pair.server.rnic.register(octets[8:16], A, pd=pair.server.pd, base_to=100)

    expect_refused(pair, atomic(pair, region.stag, to), Cause.RDMAP_BASE_OR_BOUNDS)
    assert not octets.any()


@pytest.mark.parametrize(
    ("make", "cause"),
    [(write, Cause.DDP_TO_WRAP), (read, Cause.RDMAP_TO_WRAP), (atomic, Cause.RDMAP_TO_WRAP)],
)
def test_d28_r20_an_access_that_wraps(pair, make, cause) -> None:
    octets = np.zeros(1, np.uint64)
    region = pair.server.rnic.register(octets, ALL, pd=pair.server.pd, base_to=TO_END - 8)

    expect_refused(pair, make(pair, region.stag, TO_END - 1), cause)
    assert not octets.any()


@pytest.mark.parametrize(
    ("granted", "make", "cause"),
    [
        (R | A, write, Cause.DDP_INVALID_STAG),
        (Access.NONE, write, Cause.DDP_INVALID_STAG),
        (W | A, read, Cause.RDMAP_ACCESS_RIGHTS),
        (R | W, atomic, Cause.RDMAP_ACCESS_RIGHTS),
        (R | W, swap, Cause.RDMAP_ACCESS_RIGHTS),
    ],
)
def test_s4_a_right_that_was_not_granted(pair, granted, make, cause) -> None:
    region = pair.server.region(np.zeros(1, np.uint64), granted)

    expect_refused(pair, make(pair, region.stag, 0), cause)
    assert region.view == bytes(8)


@pytest.mark.parametrize("make", [atomic, swap])
def test_x17_an_atomic_at_an_address_that_is_not_aligned(pair, make) -> None:
    octets = np.zeros(2, np.uint64)
    region = pair.server.region(octets, A)

    expect_refused(pair, make(pair, region.stag, 4), Cause.RDMAP_CATASTROPHIC_STREAM)
    assert not octets.any()


@pytest.mark.parametrize("known", [True, False])
def test_r32_r33_send_with_invalidate_of_what_is_shared_or_unknown(connect_pair, known) -> None:
    pair = connect_pair()
    connect_pair(server=pair.server)
    region = pair.server.region(8, W)

    stag = region.stag if known else region.stag ^ 1
    expect_refused(pair, Send(1, b"gone", invalidate_stag=stag), Cause.RDMAP_CANNOT_INVALIDATE)
    assert region.valid


def test_r31_after_send_with_invalidate_a_write_is_refused(pair) -> None:
    region = pair.server.region(8, W, stream=pair.s)
    pair.c.post([Send(1, invalidate_stag=region.stag)])
    pair.server.wait(pair.s, 1)

    expect_refused(pair, write(pair, region.stag, 0), Cause.DDP_INVALID_STAG)
    assert region.view == bytes(8)


def test_s5_d32_a_region_revoked_under_a_write_in_flight_does_not_change_any_more(pair) -> None:
    size = 32 << 20
    memory = bytearray(size)
    region = pair.server.region(memory, W)
    pair.c.post([RdmaWrite(1, (pair.client.sge(b"\xff" * size),), region.stag, 0)])
    pair.net.pump(lambda: memory[0] != 0)

    region.revoke()
    placed = memory.count(b"\xff")
    ended = pair.server.wait_end(pair.s)

    assert 0 < placed < size, "the Write was in flight"
    assert memory.count(b"\xff") == placed
    assert ended.cause is Cause.DDP_INVALID_STAG
    pair.client.wait_end(pair.c)


def test_r23_a_region_revoked_under_a_read_in_flight_gives_no_more_away(pair) -> None:
    size = 32 << 20
    region = pair.server.region(b"\xff" * size, R)
    sink = pair.client.region(size)
    pair.c.post([RdmaRead(1, Sge(sink, 0, size), region.stag, 0)])
    pair.net.pump(lambda: sink.view[0] != 0)

    region.revoke()
    ended = pair.client.wait_end(pair.c)

    [flushed] = [done for done in pair.client.completions(pair.c) if done.wr_id == 1][:1]
    assert flushed.status is WcStatus.FLUSHED
    terminate = ended.terminate
    assert terminate is not None
    assert (terminate.layer, terminate.etype, terminate.code) == Cause.RDMAP_INVALID_STAG.value
    left = int.from_bytes(terminate.rdmap_header[12:16], "big")
    assert 0 < left < size
    assert sink.view[: size - left] == b"\xff" * (size - left)
    assert sink.view[size - left :] == bytes(left)
    assert pair.server.wait_end(pair.s).cause is Cause.RDMAP_INVALID_STAG


def test_the_sink_of_a_read_needs_no_right_and_gives_none(pair) -> None:
    source = pair.server.region(b"fetched!", R)
    sink = pair.client.region(8)

    pair.c.post([RdmaRead(1, Sge(sink, 0, 8), source.stag, 0)])

    pair.client.wait(pair.c, 1)
    assert (sink.view, sink.access) == (b"fetched!", Access.NONE)


def test_a_region_is_refused_twice_to_peers_that_could_change_it(pair) -> None:
    memory = bytearray(64)
    first = pair.server.region(memory, W)
    with pytest.raises(ValueError, match="already lets a peer change"):
        pair.server.region(memoryview(memory)[10:20], A)
    first.revoke()
    assert pair.server.region(memory, W).valid
