"""Every index keeps the same promises: in this process, in Valkey, in a Valkey cluster, and asked by asyncio."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import socket
import ssl
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
import valkey

from kbtp import limits
from kbtp.cache import IndexUnavailable, MemoryIndex
from kbtp.cache.announcement import Announcement
from kbtp.cache.commands import exchange, record_key
from kbtp.cache.embedded import EmbeddedIndex, _free_port, _program
from kbtp.cache.index import ask, index_url, open_async_index, open_index
from kbtp.cache.keys import Names
from kbtp.cache.steps import (
    Announce,
    Claim,
    Claimed,
    Discard,
    Drain,
    IndexStep,
    ListTargets,
    Looked,
    Lookup,
    Pin,
    Publish,
    Removal,
    Remove,
    Scan,
    Tell,
    Unpin,
    Withdraw,
)
from kbtp.cache.valkey_connections import Connection, Pool, begin
from kbtp.cache.valkey_wire import Dialogue, Wire, Wires
from kbtp.errors import ApiMisuse

DEADLINE_S = 10.0
TRICKLE_S = 0.01
NAMES = Names("model")
A, B, C = (NAMES.of(key) for key in (b"a", b"b", b"c"))
OWNER = bytes(range(16))
Perform = Callable[[IndexStep], Any]


class FromAsyncio:
    """An asyncio index, asked step by step."""

    def __init__(self, url: str, timeout_s: float = limits.CACHE_TIMEOUT_S) -> None:
        self._loop = asyncio.new_event_loop()
        self._index = open_async_index(url, timeout_s)

    def perform(self, step: IndexStep) -> Any:
        return self._loop.run_until_complete(self._index.perform(step))

    def close(self) -> None:
        self._loop.run_until_complete(self._index.close())
        self._loop.close()


@pytest.fixture(scope="module")
def single() -> Iterator[str]:
    embedded = EmbeddedIndex()
    yield embedded.url
    embedded.close()


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """One node with all slots: it refuses what names keys of several as any cluster does."""
    folder: Path = tmp_path_factory.mktemp("cluster")
    port = _free_port("127.0.0.1")
    settings = f"--port {port} --cluster-port {_free_port('127.0.0.1')} --cluster-enabled yes --bind 127.0.0.1"
    command = [_program(), *settings.split(), "--dir", str(folder), "--save", "", "--appendonly", "no"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            while "Ready to accept connections" not in process.stdout.readline():
                assert process.poll() is None
            node = valkey.Valkey(port=port)
            node.execute_command("CLUSTER", "ADDSLOTSRANGE", 0, 16383)
            deadline_s = time.monotonic() + DEADLINE_S
            while node.execute_command("CLUSTER INFO")["cluster_state"] != "ok" and time.monotonic() < deadline_s:
                pass
            node.close()
            yield f"valkey+cluster://127.0.0.1:{port}"
        finally:
            process.kill()


@pytest.fixture(scope="module")
def sentinel(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """One Sentinel, and the primary it watches."""
    folder: Path = tmp_path_factory.mktemp("sentinel")
    primary, port = _free_port("127.0.0.1"), _free_port("127.0.0.1")
    file = folder / "sentinel.conf"
    file.write_text(f"port {port}\nbind 127.0.0.1\nsentinel monitor index 127.0.0.1 {primary} 1\n")
    with ExitStack() as stack:
        for command in (
            [_program(), "--port", str(primary), "--bind", "127.0.0.1", "--save", "", "--dir", str(folder)],
            [_program(), str(file), "--sentinel", "--dir", str(folder)],
        ):
            process = stack.enter_context(subprocess.Popen(command, stdout=subprocess.PIPE, text=True))
            stack.callback(process.kill)
            assert process.stdout is not None
            while not re.search("Ready to accept|[+]monitor", process.stdout.readline()):
                assert process.poll() is None
        yield f"valkey+sentinel://127.0.0.1:{port}/index"


KINDS = ("memory", "valkey", "cluster", "valkey, asyncio", "cluster, asyncio", "sentinel", "sentinel, asyncio")


@pytest.fixture(params=KINDS)
def perform(request: pytest.FixtureRequest) -> Iterator[Perform]:
    kind = request.param
    if kind == "memory":
        yield MemoryIndex(time.monotonic).perform
        return
    fixture = {"valkey": "single"}.get(kind.partition(",")[0], kind.partition(",")[0])
    url = request.getfixturevalue(fixture)
    index = FromAsyncio(url) if kind.endswith("asyncio") else open_index(url, limits.CACHE_TIMEOUT_S)
    _, entries = index.perform(Scan(NAMES.fingerprint))
    index.perform(Discard([name for name, _ in entries]))
    index.perform(Lookup([], collect=OWNER))
    yield index.perform
    index.close()


def test_the_first_record_stays(perform: Perform) -> None:
    assert perform(Publish([(A, b"1"), (B, b"2")])) == [True, True]
    assert perform(Publish([(A, b"other"), (C, b"3")])) == [False, True]
    assert perform(Lookup([A, B, C, NAMES.of(b"none")])).records == [b"1", b"2", b"3", None]


def test_to_publish_a_record_again_is_to_be_first_still(perform: Perform) -> None:
    perform(Publish([(A, b"1")]))
    assert perform(Publish([(A, b"1")])) == [True]


def test_the_same_name_twice(perform: Perform) -> None:
    assert perform(Publish([(A, b"1"), (A, b"2")])) == [True, False]


def test_only_the_record_that_is_named_is_removed(perform: Perform) -> None:
    perform(Publish([(A, b"1"), (B, b"2")]))
    assert perform(Remove([(A, b"other"), (B, b"2"), (C, b"3")])) == [Removal.GONE, Removal.REMOVED, Removal.GONE]
    assert perform(Lookup([A, B])).records == [b"1", None]


def test_a_pinned_record_is_spared_if_pins_are_heeded(perform: Perform) -> None:
    perform(Publish([(A, b"1"), (B, b"2")]))
    assert perform(Pin([A, C], b"holder", 60_000)) == [True, False]
    assert perform(Remove([(A, b"1"), (B, b"2")], spare_pinned=True)) == [Removal.PINNED, Removal.REMOVED]
    assert perform(Remove([(A, b"1")])) == [Removal.REMOVED]
    perform(Publish([(A, b"1")]))
    assert perform(Remove([(A, b"1")], spare_pinned=True)) == [Removal.REMOVED]  # pins go with the record


def test_each_holder_has_a_pin_of_its_own(perform: Perform) -> None:
    perform(Publish([(A, b"1")]))
    perform(Pin([A], b"one", 60_000))
    perform(Pin([A], b"other", 60_000))
    perform(Unpin([A], b"one"))
    assert perform(Remove([(A, b"1")], spare_pinned=True)) == [Removal.PINNED]
    perform(Unpin([A], b"other"))
    assert perform(Remove([(A, b"1")], spare_pinned=True)) == [Removal.REMOVED]


def test_discard_says_what_was_there(perform: Perform) -> None:
    perform(Publish([(A, b"1")]))
    assert perform(Discard([A, B])) == [b"1", None]
    assert perform(Lookup([A])).records == [None]


def test_a_scan_finds_the_namespace_and_no_other(perform: Perform) -> None:
    other = Names("other").of(b"a")
    perform(Publish([(A, b"1"), (B, b"2"), (other, b"x")]))
    cursor, found = perform(Scan(NAMES.fingerprint))
    while cursor:
        cursor, more = perform(Scan(NAMES.fingerprint, cursor))
        found += more
    assert dict(found) == {A: b"1", B: b"2"}
    perform(Discard([other]))


def test_a_scan_goes_page_by_page(perform: Perform) -> None:
    names = {NAMES.of(b"%d" % number) for number in range(3000)}
    perform(Publish([(name, b"record") for name in names]))
    cursor, found = perform(Scan(NAMES.fingerprint))
    while cursor:
        cursor, more = perform(Scan(NAMES.fingerprint, cursor))
        found += more
    assert {name for name, _ in found} == names


def test_mail_is_read_once(perform: Perform) -> None:
    perform(Lookup([A], touched={OWNER: [A, B]}))
    perform(Tell(OWNER, [C]))
    looked: Looked = perform(Lookup([], collect=OWNER))
    assert looked.mail == [A, B, C]
    assert perform(Lookup([], collect=OWNER)).mail == []


def test_a_life_is_one(perform: Perform) -> None:
    assert perform(Lookup([])).life == perform(Lookup([A])).life


def test_what_is_claimed_is_published_and_mail_and_life_come_with_it(perform: Perform) -> None:
    perform(Tell(OWNER, [C]))
    claimed: Claimed = perform(Claim([(A, b"1"), (B, b"2"), (A, b"other")], OWNER, ttl_ms=60_000))
    assert (claimed.firsts, claimed.mail) == ([True, True, False], [C])
    assert claimed.life == perform(Lookup([])).life
    claimed = perform(Claim([(A, b"1"), (B, b"other")], OWNER))
    assert (claimed.firsts, claimed.mail) == ([True, False], [])
    assert perform(Lookup([A, B])).records == [b"1", b"2"]


@pytest.mark.parametrize("there", [[], [A], [B], [A, B]], ids=len)
def test_what_is_claimed_at_once_is_the_first_where_nothing_was(perform: Perform, there: list[bytes]) -> None:
    perform(Publish([(name, b"there") for name in there]))
    claimed: Claimed = perform(Claim([(A, b"1"), (B, b"2"), (C, b"3")], OWNER))
    assert claimed.firsts == [A not in there, B not in there, True]
    assert perform(Lookup([A, B, C])).records == [
        b"there" if A in there else b"1",
        b"there" if B in there else b"2",
        b"3",
    ]
    assert perform(Claim([(A, b"1"), (B, b"2"), (C, b"3")], OWNER)).firsts == claimed.firsts


def test_of_two_claims_of_one_name_the_first_is_there(perform: Perform) -> None:
    claimed: Claimed = perform(Claim([(A, b"1"), (B, b"2"), (A, b"other")], OWNER))
    assert claimed.firsts == [True, True, False]
    assert perform(Lookup([A, B])).records == [b"1", b"2"]


def test_nothing_is_asked_for(perform: Perform) -> None:
    assert perform(Publish([])) == perform(Remove([])) == perform(Discard([])) == perform(Pin([], b"holder", 1)) == []
    assert perform(Lookup([])).records == []


def test_targets_come_and_go(perform: Perform) -> None:
    one = Announcement(1, "kbtp://127.0.0.1:1", 4096, 16)
    other = Announcement(2**63 + 5, "kbtp://127.0.0.1:2", 8192, 32)
    perform(Announce(one))
    perform(Announce(other))
    perform(Announce(one))
    assert sorted(perform(ListTargets()), key=lambda target: target.incarnation) == [one, other]
    perform(Drain(other.incarnation))
    assert {target.incarnation: target.draining for target in perform(ListTargets())} == {1: False, 2**63 + 5: True}
    perform(Drain(other.incarnation, undo=True))
    assert not any(target.draining for target in perform(ListTargets()))
    perform(Withdraw(one.incarnation))
    perform(Withdraw(other.incarnation))
    assert perform(ListTargets()) == []


def test_many_names_are_looked_up_in_order(perform: Perform) -> None:
    names = [NAMES.of(b"%d" % number) for number in range(limits.CACHE_LOOKUP_MAX_NAMES + 10)]
    perform(Publish([(names[0], b"first"), (names[-1], b"last")]))
    records = perform(Lookup(names)).records
    assert (records[0], records[-1], records.count(None)) == (b"first", b"last", len(names) - 2)


def test_records_expire(perform: Perform) -> None:
    perform(Publish([(A, b"1")], ttl_ms=20))
    deadline_s = time.monotonic() + DEADLINE_S
    while perform(Lookup([A])).records != [None]:
        assert time.monotonic() < deadline_s


def test_a_local_socket(tmp_path: Path) -> None:
    path = tmp_path / "index.sock"
    command = [_program(), "--port", "0", "--unixsocket", str(path), "--save", "", "--dir", str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        while "Ready to accept" not in process.stdout.readline() and not path.exists():
            assert process.poll() is None
        index = open_index(f"unix://{path}", limits.CACHE_TIMEOUT_S)
        assert index.perform(Publish([(A, b"1")])) == [True]
        index.close()
        process.kill()


@pytest.mark.parametrize("reply", [None, 7, b"x", "x", [], [7], [None], [b"x", 7], [[b"x"]]], ids=repr)
@pytest.mark.parametrize(
    "step",
    [
        Lookup([A, B], collect=OWNER),
        Publish([(A, b"1"), (B, b"2")]),
        Claim([(A, b"1"), (B, b"2")], OWNER),
        Remove([(A, b"1"), (B, b"2")]),
        Discard([A, B]),
        Scan(NAMES.fingerprint),
        ListTargets(),
    ],
    ids=lambda step: type(step).__name__,
)
def test_an_answer_that_is_none_is_no_answer(step: IndexStep, reply: Any) -> None:
    asking = exchange(step)
    commands = next(asking)
    with pytest.raises((IndexUnavailable, StopIteration)) as ended:
        for _ in range(3):
            commands = asking.send([reply] * len(commands))
    if isinstance(ended.value, StopIteration):  # only None and octets pass for a record
        assert isinstance(step, Discard)
        assert set(ended.value.value) <= {None, b"x"}


# --- where it is ---------------------------------------------------------------------------------


def test_a_target_s_url_names_the_index_beside_it() -> None:
    assert index_url("kbtp://cache") == "valkey://cache:5288"
    assert index_url("kbtp://[::1]:7000") == "valkey://[::1]:7001"
    assert index_url("redis://host/3") == "redis://host/3"


@pytest.mark.parametrize("url", ["http://host", "host:6379", "valkey+star://host", "valkey+sentinel://host"])
def test_a_url_that_names_none(url: str) -> None:
    with pytest.raises(ApiMisuse, match=r"names no index|SERVICE"):
        open_index(url, 1.0)


@pytest.mark.parametrize(
    "url",
    [
        "valkey://host:abc",
        "valkey://host:99999",
        "valkey://[::1",
        "valkey://host?socket_timeout=long",
        "valkey+cluster://host:abc",
        "valkey+sentinel://host:abc/service",
    ],
)
def test_a_url_that_cannot_be_used(url: str) -> None:
    for open_ in (open_index, open_async_index):
        with pytest.raises(ApiMisuse, match="the URL of the index cannot be used"):
            open_(url, 1.0)


@pytest.mark.parametrize(
    "url",
    ["valkeys+sentinel://host/service", "rediss+sentinel://host/service", "valkey+sentinel://:secret@host/service"],
)
def test_a_sentinel_is_not_asked_without_what_the_url_says(url: str) -> None:
    for open_ in (open_index, open_async_index):
        with pytest.raises(ApiMisuse, match="cannot be reached with TLS or a password") as refused:
            open_(url, 1.0)
        assert "secret" not in str(refused.value)


@pytest.mark.parametrize("open_", [lambda url: open_index(url, 1.0), FromAsyncio], ids=["threads", "asyncio"])
def test_a_cluster_that_is_not_there_does_not_answer(open_: Callable[[str], FromAsyncio]) -> None:
    index = open_(f"valkey+cluster://127.0.0.1:{_free_port('127.0.0.1')}")
    with pytest.raises(IndexUnavailable):
        index.perform(Lookup([A]))
    index.close()


@pytest.mark.parametrize("open_", [open_index, FromAsyncio], ids=["threads", "asyncio"])
@pytest.mark.parametrize("url", ["valkey://a..b", "valkey+cluster://a..b", "valkey+sentinel://a..b/index"])
def test_an_index_whose_host_can_be_no_name_does_not_answer(url: str, open_: Callable[..., FromAsyncio]) -> None:
    index = open_(url, 1.0)
    with pytest.raises(IndexUnavailable):
        index.perform(Lookup([A]))
    index.close()


@contextmanager
def trickling() -> Iterator[int]:
    """The port of a server that answers octet by octet, without end."""
    ended = threading.Event()

    def answer() -> None:
        with contextlib.suppress(OSError):
            connected, _ = listening.accept()
            listening.close()
            with connected:
                connected.sendall(b"$1000000\r\n")
                for _ in range(round(DEADLINE_S / TRICKLE_S)):
                    if ended.wait(TRICKLE_S):
                        break
                    connected.sendall(b"x")

    with socket.create_server(("127.0.0.1", 0)) as listening:
        port = listening.getsockname()[1]
        thread = threading.Thread(target=answer)
        thread.start()
        try:
            yield port
        finally:
            ended.set()
            thread.join()


@pytest.mark.parametrize("open_", [open_index, FromAsyncio], ids=["threads", "asyncio"])
@pytest.mark.parametrize(
    "url", ["valkey://127.0.0.1:{}", "valkey+cluster://127.0.0.1:{}", "valkey+sentinel://127.0.0.1:{}/index"]
)
def test_an_index_that_trickles_does_not_answer_in_time(url: str, open_: Callable[..., FromAsyncio]) -> None:
    with trickling() as port:
        index = open_(url.format(port), 0.5)
        with pytest.raises(IndexUnavailable, match=r"[Tt]imeout|deadline"):
            index.perform(Lookup([A]))
        index.close()


class ByClient:
    """Asks as the client for a cluster does, over the connections of a pool of the package's."""

    def __init__(self, url: str, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._client = valkey.Valkey(connection_pool=Pool.from_url(url))

    def perform(self, step: IndexStep) -> Any:
        begin(self._timeout_s)
        plan = exchange(step)
        pipeline = self._client.pipeline(transaction=False)
        commands = next(plan)
        for command in commands:
            pipeline.execute_command(*command)
        try:
            plan.send(pipeline.execute() if len(commands) > 1 else [self._client.execute_command(*commands[0])])
        except StopIteration as done:
            return done.value

    def close(self) -> None:
        self._client.connection_pool.disconnect()


@contextmanager
def waiting() -> Iterator[tuple[int, threading.Event]]:
    """The port of a server whose record under each name is the name, and what lets it answer."""
    let = threading.Event()

    def answer(connected: socket.socket) -> None:
        with contextlib.suppress(OSError), connected:
            while said := connected.recv(1 << 16):
                if b"MGET" not in said:
                    connected.sendall(b"+OK\r\n" * said.count(b"SETINFO\r\n"))
                    continue
                name = next(part for part in said.split(b"\r\n") if part.startswith(b"kbtp:r:"))
                let.wait(DEADLINE_S)
                connected.sendall(b"*2\r\n$4\r\nlife\r\n$%d\r\n%b\r\n" % (len(name), name))

    def serve(listening: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while True:
                threading.Thread(target=answer, args=listening.accept()[:1], daemon=True).start()

    with socket.create_server(("127.0.0.1", 0)) as listening:
        threading.Thread(target=serve, args=[listening], daemon=True).start()
        yield listening.getsockname()[1], let
        listening.shutdown(socket.SHUT_RDWR)


INTERRUPTED = [
    (open_index, Wire, "send", 0),
    (open_index, Wire, "receive", 0),
    (open_index, Wire, "_read", 0),
    (ByClient, Connection, "can_read", 1),
    (ByClient, Connection, "read_response", 0),
]


@pytest.mark.parametrize(("open_", "asked", "where", "calls"), INTERRUPTED)
@pytest.mark.parametrize("touched", [{}, {OWNER: [A]}], ids=["one command", "several"])
def test_the_answer_to_a_question_that_was_interrupted_is_not_that_to_the_next(
    monkeypatch: pytest.MonkeyPatch,
    open_: Callable[..., Any],
    asked: type,
    where: str,
    calls: int,
    touched: dict[bytes, list[bytes]],
) -> None:
    """Else the value under one key would come out under another one, its checksum right."""
    with waiting() as (port, let):
        index = open_(f"valkey://127.0.0.1:{port}", DEADLINE_S)
        let.set()
        assert index.perform(Lookup([C])).records == [record_key(C)]
        let.clear()
        call, left = getattr(asked, where), iter([False] * calls + [True])  # those before it is asked

        def interrupted(*arguments: Any, **options: Any) -> Any:
            if where == "send":  # all that is asked for is on its way
                call(*arguments, **options)
            if next(left, False):
                raise KeyboardInterrupt
            return None if where == "send" else call(*arguments, **options)

        monkeypatch.setattr(asked, where, interrupted)
        with pytest.raises(KeyboardInterrupt):
            index.perform(Lookup([A], touched))
        threading.Timer(0.1, let.set).start()
        assert index.perform(Lookup([B])).records == [record_key(B)]
        index.close()


def test_nor_is_it_that_to_a_question_nobody_waited_for() -> None:
    with waiting() as (port, let):
        index = open_index(f"valkey://127.0.0.1:{port}", DEADLINE_S)
        ask(index, Lookup([A])).forget()
        asked = ask(index, Lookup([B]))
        let.set()
        assert index.perform(Lookup([C])).records == [record_key(C)]
        assert asked.answer().records == [record_key(B)]
        index.close()


@pytest.mark.parametrize("reply", [b"+OK\r\n+OK\r\n", b"!\r\n", b"-ERR no\r\n", b""], ids=repr)
def test_a_connection_that_answers_what_it_should_not_is_asked_nothing_more(reply: bytes) -> None:
    """Neither too much, nor what is no answer, nor a refusal, nor nothing."""
    with socket.create_server(("127.0.0.1", 0)) as listening:

        def answer() -> None:
            with listening.accept()[0] as connected:
                while b"MGET" not in connected.recv(1 << 16):
                    connected.sendall(b"+OK\r\n")
                connected.sendall(reply)

        wires = Wires(Pool.from_url(f"valkey://127.0.0.1:{listening.getsockname()[1]}"))
        thread = threading.Thread(target=answer)
        thread.start()
        begin(DEADLINE_S)
        with pytest.raises(valkey.ValkeyError):
            Dialogue(wires, Lookup([A])).finish()
        thread.join()
        assert not wires._idle
        assert wires._pool._available_connections[0]._sock is None


def test_a_primary_that_has_become_a_replica_is_looked_for_anew() -> None:
    answers = [b"-READONLY You can't write against a read only replica.\r\n", b"*2\r\n$4\r\nlife\r\n$1\r\n1\r\n"]
    with socket.create_server(("127.0.0.1", 0)) as listening:

        def answer() -> None:
            for said in answers:
                with listening.accept()[0] as connected:
                    while b"MGET" not in connected.recv(1 << 16):
                        connected.sendall(b"+OK\r\n")
                    connected.sendall(said)

        thread = threading.Thread(target=answer)
        thread.start()
        index = open_index(f"valkey://127.0.0.1:{listening.getsockname()[1]}", DEADLINE_S)
        assert index.perform(Lookup([A])).records == [b"1"]
        thread.join()
        index.close()


def test_a_process_that_was_forked_has_connections_of_its_own(single: str, monkeypatch: pytest.MonkeyPatch) -> None:
    index = open_index(single, limits.CACHE_TIMEOUT_S)
    index.perform(Lookup([A]))
    wires = index._wires  # type: ignore[attr-defined]
    [parents] = wires._idle
    monkeypatch.setattr(os, "getpid", lambda: -1)
    assert wires.take() is not parents
    monkeypatch.undo()
    index.close()


def test_an_index_over_tls_with_records_that_do_not_come_at_once() -> None:
    """More than a socket takes at once, each way."""
    names = [NAMES.of(b"%d" % number) for number in range(40_000)]
    keys = [record_key(name) for name in names]
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(Path(__file__).with_name("tls.pem"))
    with socket.create_server(("127.0.0.1", 0)) as listening:

        def answer() -> None:
            with context.wrap_socket(listening.accept()[0], server_side=True) as connected:
                while b"LIB-" in connected.recv(1 << 16):
                    connected.sendall(b"+OK\r\n")
                said = b""
                while not said.endswith(keys[-1] + b"\r\n"):
                    said += connected.recv(1 << 16)
                for some in (keys[at : at + limits.CACHE_LOOKUP_MAX_NAMES] for at in range(0, len(keys), 4096)):
                    values = b"".join(b"$%d\r\n%b\r\n" % (len(key), key) for key in some)
                    connected.sendall(b"*%d\r\n$4\r\nlife\r\n%b" % (1 + len(some), values))

        thread = threading.Thread(target=answer)
        thread.start()
        index = open_index(f"valkeys://127.0.0.1:{listening.getsockname()[1]}?ssl_cert_reqs=none", DEADLINE_S)
        assert index.perform(Lookup(names)).records == keys
        thread.join()
        index.close()


def test_nor_is_it_where_asking_has_connected_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    with waiting() as (port, let):
        index = ByClient(f"valkey://127.0.0.1:{port}", DEADLINE_S)
        let.set()
        assert index.perform(Lookup([C])).records == [record_key(C)]
        let.clear()
        send, read = Connection.send_command, Connection.read_response
        asked = threading.Event()

        def unconnected(self: Any, *arguments: Any, **options: Any) -> None:
            first = arguments[0] == "MGET" and not asked.is_set()
            if first:
                self.disconnect()
            send(self, *arguments, **options)
            if first:
                asked.set()

        interruptions = iter([True])

        def interrupted(self: Any, *arguments: Any, **options: Any) -> Any:
            if asked.is_set() and next(interruptions, False):
                raise KeyboardInterrupt
            return read(self, *arguments, **options)

        monkeypatch.setattr(Connection, "send_command", unconnected)
        monkeypatch.setattr(Connection, "read_response", interrupted)
        with pytest.raises(KeyboardInterrupt):
            index.perform(Lookup([A]))
        threading.Timer(0.1, let.set).start()
        assert index.perform(Lookup([B])).records == [record_key(B)]
        index.close()


def test_an_index_that_is_not_there_is_not_asked_again_at_once() -> None:
    index = open_index(f"valkey://127.0.0.1:{_free_port('127.0.0.1')}", 1.0)
    with pytest.raises(IndexUnavailable, match="refused"):
        index.perform(Lookup([A]))
    with pytest.raises(IndexUnavailable, match="not asked again yet"):
        index.perform(Lookup([A]))
    index.close()


def test_an_index_that_was_restarted_is_asked_anew() -> None:
    with ExitStack() as stack:
        first = EmbeddedIndex()
        index = open_index(first.url, limits.CACHE_TIMEOUT_S)
        stack.callback(index.close)
        life = index.perform(Lookup([A])).life
        first.close()
        second = EmbeddedIndex(port=first.port)
        stack.callback(second.close)
        assert index.perform(Lookup([A])).life != life
