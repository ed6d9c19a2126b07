"""What `post` and `post_recv` refuse, and that they take all or nothing."""

from __future__ import annotations

import numpy as np
import pytest

from kbtp.errors import ApiMisuse
from kbtp.verbs.api import Access, CompareSwap, FetchAdd, Immediate, RdmaRead, RdmaWrite, Recv, Send, Sge

U32_END, U64_END = 1 << 32, 1 << 64


def wrong_requests(pair) -> dict[str, object]:
    region = pair.client.region(16)
    revoked = pair.client.region(16)
    revoked.revoke()
    read_only = pair.client.region(b"read only")
    elsewhere = pair.server.region(16)
    other_domain = pair.client.rnic.register(bytearray(16), Access.NONE, pd=pair.client.rnic.allocate_pd())
    whole = Sge(region, 0, 16)
    return {
        "past the end": Send(9, sges=(Sge(region, 8, 9),)),
        "negative offset": Send(9, sges=(Sge(region, -1, 4),)),
        "negative length": Send(9, sges=(Sge(region, 4, -1),)),
        "revoked": Send(9, sges=(whole, Sge(revoked, 0, 1))),
        "another RNIC's": RdmaWrite(9, (Sge(elsewhere, 0, 1),), 1, 0),
        "another domain's": RdmaWrite(9, (Sge(other_domain, 0, 1),), 1, 0),
        "not a region": RdmaWrite(9, (Sge(object(), 0, 1),), 1, 0),
        "read-only sink": RdmaRead(9, Sge(read_only, 0, 4), 1, 0),
        "invalidate STag": Send(9, invalidate_stag=U32_END),
        "write STag": RdmaWrite(9, (whole,), -1, 0),
        "write TO": RdmaWrite(9, (whole,), 1, U64_END),
        "read STag": RdmaRead(9, whole, U32_END, 0),
        "read TO": RdmaRead(9, whole, 1, -1),
        "add STag": FetchAdd(9, U32_END, 0, 1, 0),
        "add data": FetchAdd(9, 1, 0, U64_END, 0),
        "add mask": FetchAdd(9, 1, 0, 1, -1),
        "swap STag": CompareSwap(9, -1, 0, 0, 0, 0, 0),
        "swap compare": CompareSwap(9, 1, 0, 0, 0, U64_END, 0),
        "immediate of 7": Immediate(9, bytes(7)),
        "immediate of 9": Immediate(9, bytes(9)),
        "2^32 octets": RdmaWrite(9, (Sge(pair.client.region(1 << 24), 0, 1 << 24),) * 256, 1, 0),
        "no work request": "send this",
    }


WRONG = [
    "past the end",
    "negative offset",
    "negative length",
    "revoked",
    "another RNIC's",
    "another domain's",
    "not a region",
    "read-only sink",
    "invalidate STag",
    "write STag",
    "write TO",
    "read STag",
    "read TO",
    "add STag",
    "add data",
    "add mask",
    "swap STag",
    "swap compare",
    "immediate of 7",
    "immediate of 9",
    "2^32 octets",
    "no work request",
]


@pytest.mark.parametrize("what", WRONG)
def test_a_wrong_request_is_refused_with_all_that_was_posted_with_it(pair, what) -> None:
    wrong = wrong_requests(pair)
    assert list(wrong) == WRONG

    with pytest.raises(ApiMisuse):
        pair.c.post([Send(1, b"good"), wrong[what], Send(2, b"good")])

    pair.c.post([Send(3, b"after")])
    [got] = pair.server.wait(pair.s, 1)
    assert got.length == 5
    assert [done.wr_id for done in pair.client.wait(pair.c, 1)] == [3]


def test_a_wrong_receive_is_refused_with_all_that_was_posted_with_it(connect_pair) -> None:
    pair = connect_pair(receives=0)
    region = pair.server.region(16)
    for wrong in (Sge(region, 0, 17), Sge(pair.server.region(b"read only"), 0, 4), Sge(pair.client.region(4), 0, 4)):
        with pytest.raises(ApiMisuse):
            pair.s.post_recv([Recv(1, Sge(region, 0, 16)), Recv(2, wrong)])

    pair.s.post_recv([Recv(3, Sge(region, 0, 16))])
    pair.c.post([Send(1, b"x")])
    assert [got.wr_id for got in pair.server.wait(pair.s, 1)] == [3]


def test_a_region_of_another_stream_is_not_ours_to_post(connect_pair) -> None:
    pair = connect_pair()
    other = pair.client.connect(pair.server.listener.address)
    pair.net.pump(lambda: pair.client.established(other) is not None)
    scoped = pair.client.region(8, Access.REMOTE_READ, stream=pair.c)

    pair.c.post([Send(1, sges=(Sge(scoped, 0, 8),))])
    with pytest.raises(ApiMisuse, match="not of another stream"):
        other.post([Send(1, sges=(Sge(scoped, 0, 8),))])


def test_a_scope_must_be_a_stream_of_the_same_rnic_and_domain(pair) -> None:
    with pytest.raises(ApiMisuse, match="protection domain"):
        pair.client.region(8, Access.REMOTE_READ, stream=pair.s)
    with pytest.raises(ApiMisuse, match="stream"):
        pair.client.region(8, Access.REMOTE_READ, stream=object())
    with pytest.raises(ApiMisuse, match="allocated from this RNIC"):
        pair.client.rnic.register(bytearray(8), Access.NONE, pd=pair.server.pd)


def test_reads_and_atomics_without_ord_are_refused(connect_pair) -> None:
    pair = connect_pair(client_depth=(4, 0))
    whole = Sge(pair.client.region(8), 0, 8)
    for request in (RdmaRead(1, whole, 1, 0), FetchAdd(1, 1, 0, 1, 0), CompareSwap(1, 1, 0, 1, 1, 1, 1)):
        with pytest.raises(ApiMisuse, match="ORD of at least 1"):
            pair.c.post([request])


def test_nothing_to_post_is_fine(pair) -> None:
    pair.c.post([])
    pair.c.post_recv([])
    assert pair.client.completions(pair.c) == []


def test_a_region_revoked_after_the_post_does_not_harm_the_work(pair) -> None:
    region = pair.server.region(b"posted before")
    receive = pair.server.region(16)

    pair.s.post([Send(1, sges=(Sge(region, 0, 13),))])
    pair.s.post_recv([Recv(50, Sge(receive, 0, 16))])
    region.revoke()
    receive.revoke()
    pair.c.post([Send(index, np.uint8(index).tobytes()) for index in range(9)])

    pair.net.pump(lambda: any(got.wr_id == 50 for got in pair.server.completions(pair.s)))
    pair.net.pump(lambda: pair.client.received(pair.c) == [b"posted before"])
    assert receive.view[0] == 8
