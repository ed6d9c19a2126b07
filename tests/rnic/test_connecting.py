"""Start-up through the verbs: connect, accept, reject, and every way it comes to nothing."""

from __future__ import annotations

import socket

import pytest

from kbtp.errors import ApiMisuse, ConnectionLost, DeadlineExceeded, PeerIncompatible
from kbtp.iwarp.mpa import MpaOptions, PassiveStartup, RtrKind
from kbtp.types import TerminateCause as Cause
from kbtp.verbs.api import (
    Access,
    ConnectRequest,
    FetchAdd,
    RdmaRead,
    Recv,
    Rejected,
    Send,
    Sge,
    Stream,
    StreamEnded,
    WcStatus,
)

ENHANCED_MAX_BYTES = 508


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as sock:
        return sock.getsockname()[1]


def connecting(net, rnic, *, timeout_s: float = 20.0):
    """A side that connects to a socket which has accepted and said nothing yet."""
    client = net.side(rnic)
    raw_listener = net.raw_listener()
    stream = client.connect(raw_listener.getsockname(), timeout_s=timeout_s)
    return client, stream, net.raw_from(raw_listener)


# --- accept ---


def test_private_data_and_depths_reach_both_sides(net, server, new_rnic) -> None:
    seen = []

    def answer(request) -> None:
        assert isinstance(request, ConnectRequest)
        seen.append((request.private_data, request.peer_ird, request.peer_ord, request.remote_address))
        server.accepted.append(
            request.accept(pd=server.pd, private_data=b"welcome", ird=9, ord_=9, receives=server.recvs())
        )

    server.answer = answer
    client = net.side(new_rnic())
    client.depth = (3, 5)
    stream = client.connect(server.listener.address, b"hello")
    net.pump(lambda: client.established(stream) is not None)

    [(private_data, peer_ird, peer_ord, remote_address)] = seen
    assert (private_data, peer_ird, peer_ord) == (b"hello", 3, 5)
    assert remote_address.startswith("127.0.0.1:")
    assert client.established(stream).private_data == b"welcome"
    assert stream.remote_address == f"127.0.0.1:{server.listener.address[1]}"
    [accepted] = server.accepted
    assert isinstance(accepted, Stream)
    assert (accepted.remote_address, accepted.pd, stream.pd) == (remote_address, server.pd, client.pd)
    # RFC 6581 9.1: ours is never more than the peer can serve
    assert (stream.ird, stream.ord_) == (3, 5)
    assert (accepted.ird, accepted.ord_) == (9, 3)


def test_the_initiator_lowers_its_ord_to_what_the_responder_serves(connect_pair) -> None:
    pair = connect_pair(client_depth=(4, 7), server_depth=(2, 4))
    assert (pair.c.ord_, pair.s.ird) == (2, 2)


@pytest.mark.parametrize("private_data", [b"", b"x", bytes(ENHANCED_MAX_BYTES)])
def test_private_data_of_every_length(net, server, new_rnic, private_data) -> None:
    seen = []

    def answer(request) -> None:
        seen.append(request.private_data)
        server.accept(request, private_data)

    server.answer = answer
    client = net.side(new_rnic())
    stream = client.connect(server.listener.address, private_data)

    net.pump(lambda: client.established(stream) is not None)
    assert (seen, client.established(stream).private_data) == ([private_data], private_data)


def test_private_data_that_is_too_long_is_misuse(net, server, new_rnic) -> None:
    refusals = []

    def answer(request) -> None:
        for act in (lambda: server.accept(request, bytes(ENHANCED_MAX_BYTES + 1)), lambda: request.reject(bytes(600))):
            with pytest.raises(ApiMisuse, match="private data") as refusal:
                act()
            refusals.append(refusal)
        server.accept(request)

    server.answer = answer
    client = net.side(new_rnic())
    with pytest.raises(ApiMisuse, match="private data"):
        client.connect(server.listener.address, bytes(ENHANCED_MAX_BYTES + 1))
    stream = client.connect(server.listener.address)

    net.pump(lambda: client.established(stream) is not None)
    assert len(refusals) == 2, "a refused answer is none: the request could still be accepted"


def test_the_receives_of_accept_are_there_before_the_first_message(net, server, new_rnic) -> None:
    raw = net.raw_to(server.listener.address)
    raw.initiate()
    raw.send_ulpdu(bytes.fromhex("4143 00000000 00000000 00000001 00000000"), b"first")

    net.pump(lambda: bool(server.accepted) and bool(server.completions(server.accepted[0])))
    assert server.received(server.accepted[0]) == [b"first"]


def test_an_accepted_stream_may_be_posted_to_at_once(net, server, new_rnic) -> None:
    server.answer = lambda request: server.accept(request).post([Send(1, b"greeting")])
    client = net.side(new_rnic(MpaOptions(peer_to_peer=RtrKind.WRITE)))
    stream = client.connect(server.listener.address)

    net.pump(lambda: bool(client.completions(stream)))
    assert client.received(stream) == [b"greeting"]


def test_receives_may_be_posted_before_the_stream_is_established_but_no_work(net, server, new_rnic) -> None:
    client = net.side(new_rnic())
    stream = client.connect(server.listener.address)

    stream.post_recv(client.recvs(1, first_wr_id=100))
    with pytest.raises(ApiMisuse, match="post after Established"):
        stream.post([Send(1)])

    net.pump(lambda: client.established(stream) is not None)
    stream.abort()
    client.wait_end(stream)
    assert [done.wr_id for done in client.completions(stream)] == [*range(8), 100]


def test_many_connections_at_once(net, server, new_rnic) -> None:
    client = net.side(new_rnic())
    streams = [client.connect(server.listener.address) for _ in range(50)]

    net.pump(lambda: all(client.established(stream) for stream in streams))
    for stream in streams:
        stream.post([Send(1, b"x")])
    net.pump(lambda: all(server.completions(stream) for stream in server.accepted))


@pytest.mark.parametrize(
    ("bound", "host", "text"),
    [
        ("127.0.0.1", "127.0.0.1", "127.0.0.1"),
        ("0.0.0.0", "127.0.0.1", "127.0.0.1"),
        ("::1", "::1", "[::1]"),
        ("localhost", "localhost", "localhost"),
        ("127.0.0.1", "localhost", "localhost"),  # where that is ::1 too, one address after the other is tried
    ],
)
def test_addresses_and_names(net, new_rnic, bound, host, text) -> None:
    server = net.side(new_rnic())
    _, port = server.listen(bound).address
    client = net.side(new_rnic())

    stream = client.connect((host, port))

    net.pump(lambda: client.established(stream) is not None)
    assert stream.remote_address == f"{text}:{port}"


# --- reject ---


def test_reject_carries_private_data_and_no_stream_ended_follows(net, server, new_rnic) -> None:
    server.answer = lambda request: request.reject(b"not you")
    client = net.side(new_rnic())
    stream = client.connect(server.listener.address)
    scoped = client.region(8, Access.REMOTE_WRITE, stream=stream)

    net.pump(lambda: client.rejected(stream) is not None)
    net.settle()

    assert client.rejected(stream) == Rejected(stream, b"not you")
    assert client.ended(stream) is None
    assert [done.status for done in client.completions(stream)] == [WcStatus.FLUSHED] * 8
    assert client.events[-1] is client.rejected(stream)
    assert not scoped.valid
    with pytest.raises(ConnectionLost, match="has ended"):
        stream.post([Send(1)])


def test_r43_after_a_reject_the_connection_ends_with_a_fin(net, server) -> None:
    server.answer = lambda request: request.reject(b"no")
    raw = net.raw_to(server.listener.address)
    raw.send(b"MPA ID Req Frame" + bytes.fromhex("40 01 0000"))

    net.pump(lambda: raw.gone)
    assert raw.fin
    assert raw.received == b"MPA ID Rep Frame" + bytes.fromhex("60 01 0002") + b"no"


def test_a_request_nobody_answers_is_rejected_by_the_next_poll(net, server, new_rnic, caplog) -> None:
    server.answer = lambda request: None
    client = net.side(new_rnic())
    stream = client.connect(server.listener.address)

    net.pump(lambda: client.rejected(stream) is not None)
    assert client.rejected(stream).private_data == b""
    assert "neither accepted nor rejected" in caplog.text


def test_a_request_is_answered_once(net, server, new_rnic) -> None:
    def answer(request) -> None:
        server.accept(request)
        with pytest.raises(ApiMisuse, match="answer once"):
            server.accept(request)
        with pytest.raises(ApiMisuse, match="answer once"):
            request.reject(b"")

    server.answer = answer
    client = net.side(new_rnic())
    stream = client.connect(server.listener.address)
    net.pump(lambda: client.established(stream) is not None)


def test_what_accept_refuses_can_be_put_right(net, server, new_rnic) -> None:
    def answer(request) -> None:
        common = {"pd": server.pd, "private_data": b"", "ird": 1, "ord_": 1}
        elsewhere = Sge(client.region(8), 0, 8)
        for wrong in (
            {"pd": client.pd},
            {"ird": 1 << 14},
            {"ord_": -1},
            {"receives": [Recv(1, elsewhere)]},
            {"private_data": bytes(509)},
        ):
            with pytest.raises(ApiMisuse):
                request.accept(**{**common, **wrong})
        server.accept(request)

    client = net.side(new_rnic())
    server.answer = answer
    stream = client.connect(server.listener.address)
    net.pump(lambda: client.established(stream) is not None)


# --- nobody there, or nobody who answers ---


def test_a_refused_connection_ends_the_stream_and_says_what_to_check(net, new_rnic) -> None:
    client = net.side(new_rnic())
    port = free_port()

    stream = client.connect(("127.0.0.1", port))

    ended = client.wait_end(stream)
    assert isinstance(ended.reason, ConnectionLost)
    assert f"127.0.0.1:{port}: Connection refused" in str(ended.reason)
    assert "check" in str(ended.reason)
    assert [done.status for done in client.completions(stream)] == [WcStatus.FLUSHED] * 8


def test_a_name_that_does_not_exist_ends_the_stream(net, new_rnic) -> None:
    client = net.side(new_rnic())

    for host in ("no-such-host.invalid", "a" * 64 + ".invalid"):
        ended = client.wait_end(client.connect((host, 1)))
        assert isinstance(ended.reason, ConnectionLost)
        assert f"cannot look up {host}" in str(ended.reason)
        assert "Unknown error" not in str(ended.reason)


@pytest.mark.parametrize(("port", "ird", "ord_"), [(0, 1, 1), (65536, 1, 1), (1, -1, 1), (1, 1, 1 << 14)])
def test_arguments_of_connect_that_can_never_work(net, new_rnic, port, ird, ord_) -> None:
    client = net.side(new_rnic())
    with pytest.raises(ApiMisuse):
        client.channel.connect("127.0.0.1", port, pd=client.pd, private_data=b"", ird=ird, ord_=ord_, timeout_s=1.0)
    assert client.channel.poll(0) == []


def test_receives_and_domains_of_another_rnic_are_refused(net, server, new_rnic) -> None:
    client = net.side(new_rnic())
    arguments = {"private_data": b"", "ird": 1, "ord_": 1, "timeout_s": 1.0}
    with pytest.raises(ApiMisuse, match="registered with this RNIC"):
        client.channel.connect(*server.listener.address, pd=client.pd, receives=server.recvs(1), **arguments)
    with pytest.raises(ApiMisuse, match="allocated from this RNIC"):
        client.channel.connect(*server.listener.address, pd=server.pd, **arguments)
    net.settle()
    assert (client.events, server.accepted) == ([], [])


def test_a_server_that_says_nothing_hits_the_deadline(net, new_rnic) -> None:
    client, stream, raw = connecting(net, new_rnic(), timeout_s=0.05)

    ended = client.wait_end(stream)

    assert isinstance(ended.reason, DeadlineExceeded)
    assert "no MPA Reply" in str(ended.reason)
    net.pump(lambda: raw.gone)
    assert bytes(raw.received[:16]) == b"MPA ID Req Frame"


def test_a_server_that_closes_before_its_reply(net, new_rnic) -> None:
    client, stream, raw = connecting(net, new_rnic())
    net.pump(lambda: len(raw.received) > 0)

    raw.sock.shutdown(socket.SHUT_WR)

    ended = client.wait_end(stream)
    assert "closed the connection before its MPA Reply" in str(ended.reason)
    assert "revision 2" in str(ended.reason)


def test_a_server_that_resets_before_its_reply(net, new_rnic) -> None:
    client, stream, raw = connecting(net, new_rnic())
    raw.reading = False
    net.pump(lambda: raw.sock.recv(1, socket.MSG_PEEK) != b"")

    raw.close()

    assert "before its MPA Reply: Connection reset by peer" in str(client.wait_end(stream).reason)


@pytest.mark.parametrize(
    ("reply", "message"),
    [
        (b"HTTP/1.1 400 Bad Request\r\n\r\n", "no MPA Reply"),
        (b"MPA ID Req Frame" + bytes(4), "Request came where a Reply was due"),
        (b"MPA ID Rep Frame" + bytes.fromhex("40 01 0000"), "without IRD and ORD"),
        (b"MPA ID Rep Frame" + bytes.fromhex("50 02 0201"), "PD_Length 513"),
        (b"MPA ID Rep Frame" + bytes.fromhex("50 09 0000"), "revision 9"),
    ],
)
def test_m6_m7_a_reply_that_is_none_closes_the_connection(net, new_rnic, reply, message) -> None:
    client, stream, raw = connecting(net, new_rnic())

    raw.send(reply)

    ended = client.wait_end(stream)
    assert isinstance(ended.reason, PeerIncompatible)
    assert message in str(ended.reason)
    net.pump(lambda: raw.gone)


def test_m16_a_reply_in_single_octets(net, new_rnic) -> None:
    client, stream, raw = connecting(net, new_rnic())
    startup = PassiveStartup(MpaOptions())
    net.pump(lambda: len(raw.received) == 30)
    startup.receive_data(bytes(raw.received))
    reply, _ = startup.accept(b"slowly", 4, 4)

    for octet in reply:
        raw.send(bytes([octet]))

    net.pump(lambda: client.established(stream) is not None)
    assert client.established(stream).private_data == b"slowly"


def test_octets_right_behind_the_reply_are_not_lost(net, new_rnic) -> None:
    client, stream, raw = connecting(net, new_rnic())
    startup = PassiveStartup(MpaOptions())
    net.pump(lambda: len(raw.received) == 30)
    startup.receive_data(bytes(raw.received))
    reply, _ = startup.accept(b"", 4, 4)

    raw.send(reply + raw.encoder.encode([bytes.fromhex("4143 00000000 00000000 00000001 00000000"), b"at once"]))

    net.pump(lambda: bool(client.completions(stream)))
    assert client.received(stream) == [b"at once"]


@pytest.mark.parametrize("end", ["abort", "disconnect", "terminate"])
def test_a_stream_may_be_ended_while_it_connects(net, new_rnic, end) -> None:
    client, stream, raw = connecting(net, new_rnic())

    if end == "terminate":
        stream.terminate(Cause.RDMAP_UNSPECIFIED)
    else:
        getattr(stream, end)()

    ended = client.wait_end(stream)
    assert isinstance(ended.reason, ConnectionLost)
    assert ended.cause is None
    net.pump(lambda: raw.gone)


# --- start-up that fails after the Reply ---


def test_e11_a_responder_that_wants_more_than_our_ird_gets_a_terminate(net, new_rnic) -> None:
    client, stream, raw = connecting(net, new_rnic())
    net.pump(lambda: len(raw.received) == 30)
    raw.received.clear()

    raw.send(b"MPA ID Rep Frame" + bytes.fromhex("50 02 0004 0004 0009"))

    ended = client.wait_end(stream)
    assert isinstance(ended.reason, PeerIncompatible)
    assert ended.cause is Cause.MPA_INSUFFICIENT_IRD
    assert client.established(stream) is None
    raw.sock.shutdown(socket.SHUT_WR)
    told = raw.wait_terminate()
    assert (told.layer, told.etype, told.code) == (2, 0, 6)


def test_e18_no_common_rtr_kind_gets_a_terminate(net, new_rnic) -> None:
    client, stream, raw = connecting(net, new_rnic(MpaOptions(peer_to_peer=RtrKind.WRITE)))
    net.pump(lambda: len(raw.received) == 30)
    raw.received.clear()

    raw.send(b"MPA ID Rep Frame" + bytes.fromhex("50 02 0004 8004 4004"))

    assert client.wait_end(stream).cause is Cause.MPA_NO_MATCHING_RTR
    told = raw.wait_terminate()
    assert (told.layer, told.etype, told.code) == (2, 0, 7)


# --- revision 1 ---


@pytest.mark.parametrize("which", ["client", "server"])
def test_e6_e7_revision_1(net, new_rnic, connect_pair, which) -> None:
    revision1 = MpaOptions(revision=1)
    if which == "client":
        pair = connect_pair(client_mpa=revision1)
        assert (pair.c.ird, pair.c.ord_, pair.s.ird, pair.s.ord_) == (0, 0, 0, 0)
        pair.c.post([Send(1, b"plain")])
        pair.server.wait(pair.s, 1)
        sink = pair.client.region(8)
        with pytest.raises(ApiMisuse, match="ORD"):
            pair.c.post([RdmaRead(1, Sge(sink, 0, 8), 1, 0)])
        with pytest.raises(ApiMisuse, match="ORD"):
            pair.c.post([Send(2, b"not alone"), FetchAdd(1, 1, 0, 1, 0)])
        return
    server = net.side(new_rnic(revision1))
    server.listen()
    client = net.side(new_rnic())
    stream = client.connect(server.listener.address)
    ended = client.wait_end(stream)
    assert isinstance(ended, StreamEnded)
    assert "closed the connection before its MPA Reply" in str(ended.reason)
    assert server.accepted == []


def test_revision_1_with_a_configured_depth(connect_pair) -> None:
    depth2 = MpaOptions(revision=1, revision1_depth=2)
    pair = connect_pair(client_mpa=depth2, server_mpa=depth2)
    assert (pair.c.ord_, pair.s.ird) == (2, 2)


# --- listening ---


def test_listen_raises_what_the_system_says(net, server, new_rnic) -> None:
    with pytest.raises(OSError, match="in use"):
        server.channel.listen(*server.listener.address)
    with pytest.raises(OSError, match=r"[Nn]ame"):
        server.channel.listen("no-such-host.invalid", 0)
    with pytest.raises(ApiMisuse, match="port"):
        server.channel.listen("127.0.0.1", 65536)


def test_a_closed_listener_accepts_nobody_and_leaves_streams_alone(net, connect_pair, new_rnic) -> None:
    pair = connect_pair()
    raw = net.raw_to(pair.server.listener.address)
    raw.send(b"MPA ID")
    net.settle()
    address = pair.server.listener.address

    pair.server.listener.close()
    pair.server.listener.close()

    net.pump(lambda: raw.gone)
    late = net.side(new_rnic())
    assert "refused" in str(late.wait_end(late.connect(address)).reason)
    pair.c.post([Send(1, b"still here")])
    pair.server.wait(pair.s, 1)


def test_a_request_that_outlives_its_listener_cannot_be_accepted(net, server, new_rnic) -> None:
    requests = []
    server.answer = requests.append
    client = net.side(new_rnic())
    stream = client.connect(server.listener.address)
    while not requests:
        client.poll()
        server.poll()

    server.listener.close()

    with pytest.raises(ApiMisuse, match="gone"):
        server.accept(requests[0])
    assert isinstance(client.wait_end(stream).reason, ConnectionLost)
