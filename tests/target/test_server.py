"""The server around the target: starting, listening, refusing, draining, and faults that stay in their session."""

from __future__ import annotations

import logging
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

import kbtp
from kbtp import limits
from kbtp.address import Address
from kbtp.errors import AccessDenied, ConnectionLost, PeerIncompatible
from kbtp.initiator.batches import load_batch
from kbtp.iwarp.mpa import ActiveStartup, MpaOptions, MpaRejected
from kbtp.keys import Key, Keys
from kbtp.rnic import open_rnic
from kbtp.target.actions import Abort, Disconnect, Resolved, Terminate
from kbtp.target.config import TargetConfig
from kbtp.target.server import Server
from kbtp.target.session import Session
from kbtp.target.target import Target
from kbtp.types import Feature, TerminateCause
from kbtp.verbs.api import Send
from kbtp.wire import ConnectionData

DEADLINE_S = 10.0
LOOK_AGAIN_S = 0.01  # what the RNIC does by itself nobody tells

Serve = Callable[..., Any]


class WatchedServer(Server):
    """Tells when it has done something, so that a test can wait for a state."""

    def __init__(self, config: TargetConfig) -> None:
        super().__init__(config, open_rnic())
        self.changed = threading.Condition()

    def _step(self, until_s: float = float("inf")) -> None:
        super()._step(until_s)
        with self.changed:
            self.changed.notify_all()

    def wait_until(self, predicate: Callable[[], bool]) -> bool:
        deadline_s = time.monotonic() + DEADLINE_S
        with self.changed:
            while not (seen := predicate()) and time.monotonic() < deadline_s:
                self.changed.wait(LOOK_AGAIN_S)
        return seen


@pytest.fixture(autouse=True)
def _over_each_rnic(best_rnic: str) -> None:
    """Both sides of every test here."""


@pytest.fixture
def serve() -> Iterator[Serve]:
    """`serve(host, **config)`: a running server and its URL."""
    with ExitStack() as stack:

        def start(host: str = "127.0.0.1", **config: Any) -> tuple[WatchedServer, str]:
            server = WatchedServer(TargetConfig(**{"block_size_bytes": 8192, "pool_blocks": 8, "quota": 4, **config}))
            stack.callback(server.stop)
            address = server.listen(host, 0)
            server.start()
            return server, str(address)

        yield start


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]


# --- listening ---------------------------------------------------------------------------------


def test_a_free_port_is_taken_and_told(serve: Serve) -> None:
    _, url = serve()
    address = Address.parse(url)
    assert address.host == "127.0.0.1"
    assert address.port != 0
    with kbtp.connect(url) as client:
        assert client.terms.pool_blocks == 8


def test_ipv6(serve: Serve) -> None:
    _, url = serve("::1")
    assert url.startswith("kbtp://[::1]:")
    with kbtp.connect(url) as client:
        assert client.load(client.alloc_store(b"x"), into=bytearray(1)) == 1


def test_a_port_in_use_is_an_oserror(serve: Serve) -> None:
    _, url = serve()
    other = Server(TargetConfig(block_size_bytes=512, pool_blocks=1), open_rnic())
    with pytest.raises(OSError, match="in use"):
        other.listen("127.0.0.1", Address.parse(url).port)
    other.close()


def test_one_server_listens_on_several_addresses() -> None:
    server = WatchedServer(TargetConfig(block_size_bytes=512, pool_blocks=2, quota=1))
    urls = [str(server.listen(host, 0)) for host in ("127.0.0.1", "127.0.0.2", "::1")]
    server.start()
    block = None
    clients = [kbtp.connect(url) for url in urls]
    block = clients[0].alloc_store(b"x")
    assert [client.load(block, into=bytearray(1)) for client in clients] == [1, 1, 1]
    for client in clients:
        client.close()
    server.stop()


def test_two_servers_in_one_process_know_nothing_of_each_other(serve: Serve) -> None:
    (_, one_url), (_, two_url) = serve(), serve()
    with kbtp.connect(one_url) as one, kbtp.connect(two_url) as two:
        block = one.alloc_store(b"one")
        two.alloc_store(b"two")
        assert one.incarnation != two.incarnation
        assert one.terms.first_handle != two.terms.first_handle
        with pytest.raises(kbtp.HandleOutOfRange):
            two.load(block, into=bytearray(3))


# --- refusing ----------------------------------------------------------------------------------


def test_no_more_sessions_than_allowed(serve: Serve, caplog: pytest.LogCaptureFixture) -> None:
    server, url = serve(max_sessions=2)
    first, second = kbtp.connect(url), kbtp.connect(url)
    with pytest.raises(PeerIncompatible, match="or full"):
        kbtp.connect(url)
    assert [message.split(": ", 1)[1] for message in warnings(caplog)] == ["refused, 2 sessions are open"]
    first.close()
    assert server.wait_until(lambda: len(server.target.sessions) == 1)
    kbtp.connect(url).close()
    second.close()


@pytest.mark.parametrize(
    "private_data",
    [b"", b"NFS/RDMA" * 3, b"KBTP\x02" + bytes(19), b"KBTP\x01" + bytes(18)],
    ids=["none", "another protocol", "version 2", "one octet short"],
)
def test_who_does_not_speak_kbtp_is_told_with_r_1(
    serve: Serve, caplog: pytest.LogCaptureFixture, private_data: bytes
) -> None:
    """Profile 3 "Connection data": the 24 octets of the target come back with the refusal."""
    _, url = serve()
    startup = ActiveStartup(MpaOptions(), private_data, 16, 16)
    with socket.create_connection((Address.parse(url).host, Address.parse(url).port), DEADLINE_S) as peer:
        peer.sendall(startup.request)
        answer = None
        while answer is None:
            answer = startup.receive_data(peer.recv(4096))
        assert isinstance(answer, MpaRejected)
        assert ConnectionData.parse(answer.private_data).version == 1
        assert peer.recv(1) == b""
    assert len(warnings(caplog)) == 1
    assert "refused, not a KBTP initiator" in warnings(caplog)[0]


@pytest.mark.parametrize(
    ("asked", "said"),
    [("", []), ("load", ["granted DIRECT_LOAD"]), ("load,alloc", ["granted DIRECT_LOAD, DIRECT_ALLOC"])],
)
def test_the_log_says_who_was_granted_direct_modes(
    serve: Serve, caplog: pytest.LogCaptureFixture, asked: str, said: list[str]
) -> None:
    caplog.set_level(logging.INFO, "kbtp.target")
    _, url = serve(direct=Feature.DIRECT_LOAD | Feature.DIRECT_ALLOC, direct_blocks=4)
    with kbtp.connect(url, name="prefill 3", direct=asked):
        pass
    granted = [record.getMessage() for record in caplog.records if "granted" in record.getMessage()]
    assert [message.partition("prefill 3: ")[2] for message in granted] == said


def test_an_initiator_that_cannot_read_gets_no_direct_mode(serve: Serve) -> None:
    """Profile 3 "RDMA Reads": whether it is this side's IRD or its own ORD that is zero."""
    _, url = serve(direct=Feature.DIRECT_LOAD, read_depth=0)
    with kbtp.connect(url, direct="load") as client:
        assert not client.features & Feature.DIRECT_LOAD


def test_a_refused_hello_is_one_line_in_the_log(serve: Serve, caplog: pytest.LogCaptureFixture) -> None:
    server, url = serve(namespace=b"llama")
    with pytest.raises(AccessDenied):
        kbtp.connect(url, namespace="mistral")
    assert server.wait_until(lambda: not server.target.sessions)
    assert [message.split(": ", 1)[1] for message in warnings(caplog)] == [
        "session ended: HELLO refused: ACCESS_DENIED"
    ]


def test_an_orderly_end_is_no_warning(serve: Serve, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    server, url = serve()
    kbtp.connect(url, name="decode-0").close()
    assert server.wait_until(lambda: not server.target.sessions)
    assert warnings(caplog) == []
    assert any(record.getMessage().endswith(" decode-0: session ended") for record in caplog.records)


# --- stopping ----------------------------------------------------------------------------------


def test_stopping_ends_idle_sessions_in_order(
    serve: Serve, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "CLOSE_S", 0.05)
    server, url = serve()
    client = kbtp.connect(url)
    assert not server.stopping
    server.stop()
    server.stop()
    assert server.stopping
    assert warnings(caplog) == []
    with pytest.raises(ConnectionLost):
        client.alloc_store(b"x")
    with pytest.raises(ConnectionLost, match="Connection refused"):
        kbtp.connect(url)


def test_stopping_lets_what_is_outstanding_finish(serve: Serve) -> None:
    """A load of 64 MiB is under way when the server is told to stop."""
    server, url = serve(block_size_bytes=64 << 20, pool_blocks=1, quota=1)
    data = bytes(range(256)) * (1 << 18)
    with kbtp.connect(url) as client:
        block = client.alloc_store(data)
        buffer = bytearray(64 << 20)
        load = load_batch([block], [buffer], False)
        client._connection.submit(load, time.monotonic())  # and nobody reads yet
        assert server.wait_until(lambda: any(map(server.outstanding_of, list(server.target.sessions))))
        server.request_stop()
        deadline_s = time.monotonic() + DEADLINE_S
        while load.results is None and time.monotonic() < deadline_s:
            client._connection.pump(LOOK_AGAIN_S, time.monotonic)
        assert load.results is not None and load.results.ok
        assert buffer == data


def test_a_request_that_does_not_finish_is_not_waited_for(
    serve: Serve, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The client's RNIC is not polled any more once the LOAD is under way, so the target cannot get rid of the data."""
    monkeypatch.setattr(limits, "CLOSE_S", 0.05)
    server, url = serve(block_size_bytes=32 << 20, pool_blocks=1, quota=1, drain_s=0.2)
    server.config = replace(server.config, drain_s=0.01)  # of the server's stopping, not of the session's reads
    client = kbtp.connect(url)
    block = client.alloc_store(b"x", seal=False)
    with server.changed:
        server.target.store.commit_store(block.handle, bytes(32 << 20), seal=True)
    monkeypatch.setattr(client._connection, "pump", lambda *_: None)
    carrier = client._connection._carrier
    monkeypatch.setattr(client._connection, "_carrier", SimpleNamespace(submit=carrier.submit, fail=carrier.fail))
    stopping = threading.Thread(target=server.stop)
    monkeypatch.setattr(client._connection, "before_close", lambda: (stopping.start(), stopping.join(DEADLINE_S)))
    with pytest.raises(kbtp.DeadlineExceeded):
        client.load(block, into=bytearray(32 << 20), timeout_s=0.05)
    assert not stopping.is_alive()
    assert "1 requests did not finish within 0.01 s" in warnings(caplog)


def test_a_server_that_never_ran_is_closed() -> None:
    server = Server(TargetConfig(block_size_bytes=512, pool_blocks=1), open_rnic())
    url = str(server.listen(port=0))
    server.close()
    with pytest.raises(ConnectionLost):
        kbtp.connect(url)


def test_it_serves_in_the_calling_thread_until_asked_to_stop() -> None:
    server = Server(TargetConfig(block_size_bytes=512, pool_blocks=1), open_rnic())
    url = str(server.listen(port=0))

    def use() -> None:
        with kbtp.connect(url) as client:
            client.alloc_store(b"x")
        server.request_stop()

    user = threading.Thread(target=use)
    user.start()
    server.run()
    user.join(DEADLINE_S)
    assert server.target.store.free_blocks == 1


def test_a_wake_used_up_by_other_work_is_not_lost(serve: Serve) -> None:
    """`stop` comes between the two polls of a step; it must not sleep through it."""
    server, _ = serve()
    poll = server._channel.poll

    def poll_after_a_stop(timeout_s: float) -> list[Any]:
        if not server.stopping:
            server._stop.set()
            server._channel.wake()
        return poll(timeout_s)

    server._channel.poll = poll_after_a_stop
    server._channel.wake()
    server._thread.join(DEADLINE_S)
    assert not server._thread.is_alive()


# --- ending streams ---


class StreamThatIsEnded:
    """Tells how."""

    def __init__(self) -> None:
        self.how: list[object] = []

    def post(self, requests: list[Send]) -> None:
        self.how += [request.inline for request in requests]

    def terminate(self, cause: TerminateCause) -> None:
        self.how.append(cause)

    def abort(self) -> None:
        self.how.append("abort")

    def disconnect(self) -> None:
        self.how.append("disconnect")


@pytest.mark.parametrize(
    ("ends", "how", "why"),
    [
        ([Disconnect("refused")], "disconnect", "refused"),
        ([Disconnect("refused"), Abort("replaced")], "abort", "replaced"),
        ([Disconnect("refused"), Resolved(7), Abort("replaced")], "abort", "replaced"),
        (
            [Disconnect(), Terminate(TerminateCause.RDMAP_UNSPECIFIED, "Head")],
            TerminateCause.RDMAP_UNSPECIFIED,
            f"Head [{TerminateCause.RDMAP_UNSPECIFIED}]",
        ),
        ([Abort("replaced"), Abort("again")], "abort", "replaced"),
    ],
)
def test_an_end_at_once_takes_the_place_of_one_in_order(serve: Serve, ends: list[Any], how: object, why: str) -> None:
    """Both may be decided before the server gets to do either."""
    server, _ = serve()
    server.stop()
    stream: Any = StreamThatIsEnded()
    server._act(stream, [Send(0, b"HELLO_ACK"), *ends])
    assert stream.how == [b"HELLO_ACK", how]
    assert server._reasons == {stream: why}


class StoppedInBetween(Server):
    """Asked to stop after it has looked whether it is, and before it waits for what comes next."""

    def _step(self, until_s: float = float("inf")) -> None:
        self.request_stop()
        super()._step(until_s)


def test_a_stop_in_the_very_moment_before_a_wait_is_not_missed() -> None:
    server = StoppedInBetween(TargetConfig(block_size_bytes=512, pool_blocks=1), open_rnic())
    serving = threading.Thread(target=server.run, daemon=True)
    serving.start()
    serving.join(DEADLINE_S)
    assert not serving.is_alive()


# --- faults of our own -------------------------------------------------------------------------


def break_for(monkeypatch: pytest.MonkeyPatch, owner: type, method: str, name: str) -> None:
    """Make `method` of the session called `name` fail with an error nobody expects."""
    real = getattr(owner, method)

    def broken(self: Any, *arguments: Any, **options: Any) -> Any:
        session = self if isinstance(self, Session) else arguments[0]
        if session.name == name:
            raise ZeroDivisionError("a fault")
        return real(self, *arguments, **options)

    monkeypatch.setattr(owner, method, broken)


# Where Python serves the requests: a fault in here is one of the session's.
IN_PYTHON = pytest.mark.parametrize("rnic_name", ["reference", "native/1.0"])


@IN_PYTHON
@pytest.mark.parametrize("method", ["_receive_request", "completed"])
def test_an_internal_error_ends_its_session_and_no_other(
    serve: Serve, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    server, url = serve()
    with kbtp.connect(url, name="good") as good, kbtp.connect(url, name="bad") as bad:
        block = good.alloc_store(b"g" * 5000)
        break_for(monkeypatch, Session, method, "bad")
        with pytest.raises(ConnectionLost):
            bad.alloc_store(bytes(5000))
        buffer = bytearray(5000)
        assert good.load(block, into=buffer) == 5000
        assert buffer == b"g" * 5000
        assert server.wait_until(lambda: len(server.target.sessions) == 1)
        assert server.target.store.free_blocks == 7
    internal = [record for record in caplog.records if "internal error" in record.getMessage()]
    assert len(internal) == 1
    assert internal[0].exc_info is not None


@IN_PYTHON
def test_what_the_rnic_refuses_to_post_ends_its_session_and_no_other(
    serve: Serve, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, url = serve()
    with kbtp.connect(url, name="good") as good, kbtp.connect(url, name="bad") as bad:
        real = Server._act

        def act(self: Server, stream: Any, actions: Any) -> None:
            if self._sessions[stream].name == "bad":
                raise kbtp.ApiMisuse("this RNIC will not do that")
            real(self, stream, actions)

        monkeypatch.setattr(Server, "_act", act)
        with pytest.raises(ConnectionLost):
            bad.alloc_store(b"x")
        assert good.load(good.alloc_store(b"g"), into=bytearray(1)) == 1


def test_an_error_while_a_session_is_ended_ends_no_other(
    serve: Serve, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    server, url = serve()
    with kbtp.connect(url, name="good") as good:
        with kbtp.connect(url, name="bad"):
            break_for(monkeypatch, Target, "end_session", "bad")
        assert server.wait_until(lambda: any("internal error" in message for message in warnings(caplog)))
        assert good.load(good.alloc_store(b"g"), into=bytearray(1)) == 1


def test_an_error_in_the_session_that_takes_another_s_place_ends_that_one(
    serve: Serve, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    key = Key(1, bytes(32))
    server, url = serve(keys=Keys((key,)))
    old = kbtp.connect(url, key=key, initiator_id=bytes(range(16)), name="old")
    real = Session._open

    def broken(self: Session, granted: Any, admission: Any) -> None:
        if admission.resumed:
            raise ZeroDivisionError("a fault")
        real(self, granted, admission)

    monkeypatch.setattr(Session, "_open", broken)
    with pytest.raises(ConnectionLost):
        kbtp.connect(url, key=key, initiator_id=bytes(range(16)), name="new")
    assert server.wait_until(lambda: not server.target.sessions)
    assert [record.getMessage().split(": ")[1] for record in caplog.records if record.exc_info] == [
        "internal error, the session is ended"
    ]
    old.close()


def test_an_error_while_a_session_is_opened_refuses_that_one(
    serve: Serve, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, url = serve()
    with kbtp.connect(url) as good:
        with monkeypatch.context() as patch:
            patch.setattr("kbtp.target.server._StreamMemory", lambda *_: 1 / 0)
            with pytest.raises(PeerIncompatible):
                kbtp.connect(url)
        assert good.load(good.alloc_store(b"g"), into=bytearray(1)) == 1
        kbtp.connect(url).close()
    assert any("internal error, the connection is refused" in message for message in warnings(caplog))
