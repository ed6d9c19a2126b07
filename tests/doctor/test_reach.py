"""How far a target is reached: over real sockets, and with peers that stop at each step."""

from __future__ import annotations

import contextlib
import errno
import secrets
import socket
import struct
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest

from kbtp import limits
from kbtp.doctor.reach import Step, reach, reached
from kbtp.doctor.verdicts import Level
from kbtp.doctor.verdicts_reach import Attempt, octets_text, tcp_failed
from kbtp.initiator.session import InitiatorConfig
from kbtp.iwarp.events import Received
from kbtp.iwarp.mpa import EnhancedWord, MpaFrame, MpaOptions, PassiveStartup, PeerRequest
from kbtp.iwarp.stream import IwarpStream
from kbtp.keys import Key, Keys
from kbtp.rnic import open_rnic
from kbtp.target.config import TargetConfig
from kbtp.target.server import Server
from kbtp.types import Status, TerminateCause
from kbtp.verbs.stag_table import StagTable
from kbtp.wire import ConnectionData, HelloAck

CONFIG = InitiatorConfig(handles=1, name="kbtp doctor")
TIMEOUT_S = 10.0
SHORT_S = 0.2
ORDER = ["url", "lookup", "tcp", "mpa", "hello", "end"]
KEY, OTHER_KEY = Key(7, b"k" * 32), Key(8, b"o" * 32)
NO_KEYS = Keys()
KBTP_DATA = ConnectionData(bytes(16)).pack()

Peer = Callable[[socket.socket], None]


@contextlib.contextmanager
def serving(rnic: str = "auto", keys: Keys = NO_KEYS, *, crc: bool = True) -> Iterator[str]:
    config = TargetConfig(block_size_bytes=1 << 16, pool_blocks=16, name="cache-0", namespace=b"llama", keys=keys)
    server = Server(config, open_rnic(rnic, crc=crc))
    address = server.listen(port=0)
    server.start()
    try:
        yield str(address)
    finally:
        server.stop()


@contextlib.contextmanager
def peer(work: Peer) -> Iterator[str]:
    """A URL where `work` has the one connection that comes; it is closed when it returns."""
    failures: list[BaseException] = []
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.settimeout(TIMEOUT_S)

        def serve() -> None:
            try:
                with listener.accept()[0] as sock:
                    sock.settimeout(TIMEOUT_S)
                    work(sock)
            except BaseException as error:
                failures.append(error)

        thread = threading.Thread(target=serve)
        thread.start()
        try:
            yield f"kbtp://127.0.0.1:{listener.getsockname()[1]}"
        finally:
            thread.join(TIMEOUT_S)
    assert not failures


def stops_at(steps: tuple[Step, ...], name: str) -> Step:
    """The last step, which failed, all before it having held."""
    assert [step.name for step in steps] == ORDER[: ORDER.index(name) + 1]
    assert not reached(steps)
    assert all(step.finding.level is Level.OK for step in steps[:-1])
    last = steps[-1]
    assert last.finding.level is Level.PROBLEM
    assert last.finding.do
    return last


def read_request(sock: socket.socket) -> PassiveStartup:
    startup = PassiveStartup(MpaOptions())
    request: PeerRequest | None = None
    while request is None:
        request = startup.receive_data(sock.recv(4096))
    return startup


def until_closed(sock: socket.socket) -> None:
    with contextlib.suppress(ConnectionResetError):
        while sock.recv(4096):
            pass


def says(octets: bytes) -> Peer:
    """Answers the MPA Request with `octets`, whatever they are."""

    def work(sock: socket.socket) -> None:
        read_request(sock)
        sock.sendall(octets)
        until_closed(sock)

    return work


# --- a target that is well --------------------------------------------------------------------------


@pytest.mark.parametrize("rnic", ["native", "reference"])
def test_every_step_to_a_target_is_told(rnic: str) -> None:
    with serving(rnic) as url:
        steps = reach(url, replace(CONFIG, namespace=b"llama"), TIMEOUT_S)
    assert [step.name for step in steps] == ORDER
    assert reached(steps)
    assert all(step.took_ms >= 0 for step in steps)
    seen = {step.name: step.seen for step in steps}
    assert seen["lookup"]["addresses"] == [url.removeprefix("kbtp://")]
    assert seen["mpa"]["revision"] == 2
    assert seen["mpa"]["crc"] is True
    granted = seen["hello"]
    assert (granted["status"], granted["version"], granted["target_name"]) == ("SUCCESS", 1, "cache-0")
    assert (granted["block_size_bytes"], granted["pool_blocks"], granted["handle_count"]) == (1 << 16, 16, 1)
    assert (granted["authenticated"], granted["features"]) == (False, ["INVALIDATE"])


@pytest.mark.parametrize("rnic", ["native", "reference"])
@pytest.mark.parametrize(("serves", "said"), [(True, "off"), (False, "on"), (False, "off")])
def test_there_is_no_crc_only_if_neither_side_asks(
    monkeypatch: pytest.MonkeyPatch, rnic: str, serves: bool, said: str
) -> None:
    monkeypatch.setenv("KBTP_CRC", said)
    with serving(rnic, crc=serves) as url:
        steps = reach(url, replace(CONFIG, namespace=b"llama"), TIMEOUT_S)
    assert reached(steps)
    [mpa] = [step for step in steps if step.name == "mpa"]
    assert mpa.seen["crc"] is (serves or said == "on")


def test_a_crc_setting_that_cannot_be(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KBTP_CRC", "maybe")
    with serving() as url:
        steps = reach(url, CONFIG, TIMEOUT_S)
    assert "KBTP_CRC is 'maybe'" in steps[-1].finding.says


def test_a_key_that_the_target_has() -> None:
    with serving(keys=Keys([KEY])) as url:
        steps = reach(url, replace(CONFIG, namespace=b"llama", key=KEY), TIMEOUT_S)
    assert reached(steps)
    assert steps[4].seen["authenticated"] is True
    assert "authenticated both ways" in steps[4].finding.says


@pytest.mark.parametrize(
    ("config", "advice"),
    [
        (CONFIG, "--key-file"),
        (replace(CONFIG, namespace=b"llama", key=OTHER_KEY), "kbtp keys list"),
        (replace(CONFIG, namespace=b"mistral", key=KEY), "--namespace"),
    ],
    ids=["no key", "a key it does not have", "another namespace"],
)
def test_a_target_that_does_not_let_us_in(config: InitiatorConfig, advice: str) -> None:
    with serving(keys=Keys([KEY])) as url:
        last = stops_at(reach(url, config, TIMEOUT_S), "hello")
    assert last.seen["status"] == "ACCESS_DENIED"
    assert advice in last.finding.do


# --- url, look-up, TCP --------------------------------------------------------------------------------


@pytest.mark.parametrize("url", ["http://10.0.0.7", "kbtp://", "kbtp://h:99999", "kbtp://h/path", "\udcff", ""])
def test_what_is_no_url(url: str) -> None:
    assert "kbtp://HOST[:PORT]" in stops_at(reach(url, CONFIG, TIMEOUT_S), "url").finding.says


@pytest.mark.parametrize("error", [socket.gaierror(-2, "Name or service not known"), UnicodeError("label too long")])
def test_a_name_that_is_not_known(monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    def fails(*_arguments: object, **_options: object) -> object:
        raise error

    monkeypatch.setattr(socket, "getaddrinfo", fails)
    last = stops_at(reach("kbtp://target.example", CONFIG, TIMEOUT_S), "lookup")
    assert "target.example: " in last.finding.says
    assert "name server" in last.finding.do


def test_a_resolver_that_does_not_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    over = threading.Event()
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_arguments, **_options: over.wait(TIMEOUT_S) and [])
    try:
        last = stops_at(reach("kbtp://target.example", CONFIG, SHORT_S), "lookup")
    finally:
        over.set()
    assert "no answer of the resolver within 0.2 s" in last.finding.says


def test_nothing_listens() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    last = stops_at(reach(f"kbtp://127.0.0.1:{port}", CONFIG, TIMEOUT_S), "tcp")
    assert last.seen == {"attempts": [{"address": f"127.0.0.1:{port}", "outcome": "refused"}]}
    assert "start the target" in last.finding.do


def test_a_connection_that_is_never_taken() -> None:
    with socket.socket() as full, contextlib.ExitStack() as stack:
        full.bind(("127.0.0.1", 0))
        full.listen(0)
        for _ in range(4):  # the first takes the one place there is, for the others the system says nothing
            waiting = stack.enter_context(socket.socket())
            waiting.setblocking(False)
            waiting.connect_ex(full.getsockname())
        last = stops_at(reach(f"kbtp://127.0.0.1:{full.getsockname()[1]}", CONFIG, SHORT_S), "tcp")
    assert "timed out" in last.finding.says
    assert "firewall" in last.finding.do


@pytest.mark.parametrize(
    ("errors", "said", "advice"),
    [
        ([OSError(errno.ENETUNREACH, "Network is unreachable")], "unreachable (Network is unreachable)", "route"),
        ([OSError(errno.EHOSTUNREACH, "No route to host")], "unreachable (No route to host)", "route"),
        ([OSError(errno.EINVAL, "Invalid argument")], "failed (Invalid argument)", "%eth0"),
        ([TimeoutError(errno.ETIMEDOUT, "Connection timed out")], "timed out", "firewall"),
        ([TimeoutError(), ConnectionRefusedError(errno.ECONNREFUSED, "no")], "timed out; 10.0.0.7:1 refused", "each"),
    ],
)
def test_why_there_is_no_connection(errors: list[OSError], said: str, advice: str) -> None:
    failed = tcp_failed([Attempt("10.0.0.7:1", error) for error in errors])
    assert said in failed.says
    assert advice in failed.do


def test_the_second_address_is_tried_when_the_first_refuses(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        dead = listener.getsockname()
    with serving() as url:
        port = int(url.rpartition(":")[2])
        rows = [(socket.AF_INET, socket.SOCK_STREAM, 6, "", address) for address in (dead, ("127.0.0.1", port))]
        monkeypatch.setattr(socket, "getaddrinfo", lambda *_arguments, **_options: rows)
        steps = reach("kbtp://target.example", replace(CONFIG, namespace=b"llama"), TIMEOUT_S)
    assert reached(steps)
    assert steps[2].seen["address"] == f"127.0.0.1:{port}"
    assert f"before that 127.0.0.1:{dead[1]} refused" in steps[2].finding.says


# --- MPA ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("octets", "said"),
    [
        (b"SSH-2.0-OpenSSH_9.2p1\r\n", '"SSH-2.0-OpenSSH_9.2p1"'),
        (b"-ERR unknown command\r\n", '"-ERR unknown command"'),
        (b"\x15\x03\x03\x00\x02\x02\x46", "15 03 03 00 02 02 46"),
        (b"MPA ID Req Frame\x50\x02\x00\x00", "it is an initiator itself"),
        (b"MPA ID Rep Frame\x50\x09\x00\x00", "MPA revision 9 came"),
        (b"MPA ID Rep Frame\x40\x01\x00\x00", "RFC 6581 10"),
    ],
)
def test_what_answers_is_shown(octets: bytes, said: str) -> None:
    with peer(says(octets)) as url:
        last = stops_at(reach(url, CONFIG, TIMEOUT_S), "mpa")
    assert said in last.finding.says
    assert last.seen["came"] == octets_text(octets)


def test_nothing_answers() -> None:
    with peer(until_closed) as url:
        last = stops_at(reach(url, CONFIG, SHORT_S), "mpa")
    assert "nothing answers the MPA Request within 0.2 s" in last.finding.says


def test_half_a_reply() -> None:
    with peer(says(b"MPA ID Rep Fr")) as url:
        last = stops_at(reach(url, CONFIG, SHORT_S), "mpa")
    assert "began and did not end" in last.finding.says
    assert "MTU" in last.finding.do


def reset(sock: socket.socket) -> None:
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))


@pytest.mark.parametrize(
    ("end", "said"), [(lambda _sock: None, "closed the connection"), (reset, "broke the connection")]
)
def test_the_connection_ends_instead_of_a_reply(end: Peer, said: str) -> None:
    def work(sock: socket.socket) -> None:
        read_request(sock)
        end(sock)

    with peer(work) as url:
        last = stops_at(reach(url, CONFIG, TIMEOUT_S), "mpa")
    assert said in last.finding.says


@pytest.mark.parametrize(
    ("data", "said"), [(KBTP_DATA, "a KBTP target rejects"), (b"", "is no KBTP target, and rejects")]
)
def test_a_reply_that_rejects(data: bytes, said: str) -> None:
    def work(sock: socket.socket) -> None:
        sock.sendall(read_request(sock).reject(data))
        until_closed(sock)

    with peer(work) as url:
        last = stops_at(reach(url, CONFIG, TIMEOUT_S), "mpa")
    assert said in last.finding.says
    assert last.seen == {"rejected": True, "private_data": data.hex()}


def test_a_reply_of_another_protocol_over_iwarp() -> None:
    def work(sock: socket.socket) -> None:
        sock.sendall(read_request(sock).accept(b"iSER", 4, 4)[0])
        until_closed(sock)

    with peer(work) as url:
        last = stops_at(reach(url, CONFIG, TIMEOUT_S), "mpa")
    assert "it speaks iWARP and is no KBTP target" in last.finding.says
    assert last.seen["private_data"] == b"iSER".hex()


def test_a_reply_that_asks_for_too_much_gets_its_terminate() -> None:
    answers: list[bytes] = []
    frame = MpaFrame(reply=True, markers=False, crc=True, revision=2, word=EnhancedWord(16, 9000))

    def work(sock: socket.socket) -> None:
        read_request(sock)
        sock.sendall(frame.pack())
        while octets := sock.recv(4096):
            answers.append(octets)

    with peer(work) as url:
        last = stops_at(reach(url, CONFIG, TIMEOUT_S), "mpa")
    assert "MPA_INSUFFICIENT_IRD" in last.finding.says
    assert answers


# --- HELLO and the end ----------------------------------------------------------------------------------

ACK = {
    "block_size": 1 << 16,
    "pool_blocks": 4,
    "allocation_quota": 4,
    "request_credits": 4,
    "max_message": 4096,
    "first_handle": 0,
    "handle_count": 1,
    "table_handles": 16,
}


class Answering:
    """The passive side, up to its first message."""

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        reply, negotiated = read_request(sock).accept(KBTP_DATA, 16, 16)
        sock.sendall(reply)
        table = StagTable(lambda: secrets.randbits(32))
        self.stream = IwarpStream(negotiated, table.memory_for(self, table.allocate_pd()), active=False)
        self.stream.post_receive(0, memoryview(bytearray(limits.HELLO_MAX_BYTES)))
        while not isinstance(self.stream.next_event(), Received):
            self.stream.receive_data(sock.recv(4096))

    def send(self, message: bytes) -> None:
        self.stream.post_send(0, [message])
        self.flush()

    def flush(self) -> None:
        self.sock.sendall(b"".join(self.stream.data_to_send(1 << 20)))


def answers(message: bytes) -> Peer:
    def work(sock: socket.socket) -> None:
        Answering(sock).send(message)
        until_closed(sock)

    return work


def test_no_answer_to_hello() -> None:
    def work(sock: socket.socket) -> None:
        Answering(sock)
        until_closed(sock)

    with peer(work) as url:
        last = stops_at(reach(url, CONFIG, SHORT_S), "hello")
    assert "no answer to HELLO within 0.2 s" in last.finding.says


@pytest.mark.parametrize(
    ("end", "said"), [(lambda _sock: None, "closed the connection"), (reset, "broke the connection")]
)
def test_the_connection_ends_instead_of_an_ack(end: Peer, said: str) -> None:
    def work(sock: socket.socket) -> None:
        Answering(sock)
        end(sock)

    with peer(work) as url:
        last = stops_at(reach(url, CONFIG, TIMEOUT_S), "hello")
    assert said in last.finding.says


def test_a_terminate_instead_of_an_ack() -> None:
    def work(sock: socket.socket) -> None:
        target = Answering(sock)
        target.stream.terminate(TerminateCause.DDP_NO_BUFFER)
        target.flush()
        until_closed(sock)

    with peer(work) as url:
        last = stops_at(reach(url, CONFIG, TIMEOUT_S), "hello")
    assert "Terminate DDP_NO_BUFFER" in last.finding.says


@pytest.mark.parametrize(
    ("status", "advice"),
    [(Status.NO_SPACE, "--pool-size"), (Status.UNSUPPORTED, "update"), (Status.TARGET_ERROR, "log")],
)
def test_an_ack_that_refuses(status: Status, advice: str) -> None:
    with peer(answers(HelloAck(0, status=status).pack())) as url:
        last = stops_at(reach(url, CONFIG, TIMEOUT_S), "hello")
    assert last.finding.says.startswith(status.name)
    assert advice in last.finding.do


def test_a_target_that_does_not_prove_that_it_has_our_key() -> None:
    with peer(answers(HelloAck(0, **ACK).pack())) as url:
        last = stops_at(reach(url, replace(CONFIG, key=KEY), TIMEOUT_S), "hello")
    assert "did not prove that it has our key" in last.finding.says
    assert last.seen == {"authenticated": False}
    assert "send it nothing" in last.finding.do


@pytest.mark.parametrize("message", [b"", b"rubbish", HelloAck(0, **{**ACK, "handle_count": 99}).pack()])
def test_an_answer_that_is_none(message: bytes) -> None:
    with peer(answers(message)) as url:
        last = stops_at(reach(url, CONFIG, TIMEOUT_S), "hello")
    assert "breaks the protocol" in last.finding.says


def test_octets_that_are_no_iwarp() -> None:
    def work(sock: socket.socket) -> None:
        Answering(sock)
        sock.sendall(bytes(64))
        until_closed(sock)

    with peer(work) as url:
        last = stops_at(reach(url, CONFIG, TIMEOUT_S), "hello")
    assert "breaks the protocol" in last.finding.says


def test_a_target_that_does_not_end() -> None:
    def work(sock: socket.socket) -> None:
        Answering(sock).send(HelloAck(0, **ACK).pack())
        until_closed(sock)
        with contextlib.suppress(ConnectionResetError):
            seen_closed.wait(TIMEOUT_S)

    seen_closed = threading.Event()
    with peer(work) as url:
        last = stops_at(reach(url, CONFIG, SHORT_S), "end")
        seen_closed.set()
    assert "did not close its side within 0.2 s" in last.finding.says
    assert "blocks are not in danger" in last.finding.do


def test_a_target_that_resets_at_the_end() -> None:
    def work(sock: socket.socket) -> None:
        Answering(sock).send(HelloAck(0, **ACK).pack())
        until_closed(sock)
        reset(sock)

    with peer(work) as url:
        last = stops_at(reach(url, CONFIG, TIMEOUT_S), "end")
    assert "broke the connection" in last.finding.says


@pytest.mark.parametrize(
    ("octets", "text"),
    [
        (b"HTTP/1.1 400 Bad Request\r\nServer: x\r\n", '"HTTP/1.1 400 Bad Request Server: x"'),
        (b"a" * 60, f'"{"a" * 48}"...'),
        (b"\r\n", "0d 0a"),
        (b"\x1b[31mred", "1b 5b 33 31 6d 72 65 64"),
        ("é".encode(), "c3 a9"),
    ],
)
def test_octets_are_shown_as_text_only_where_they_are_text(octets: bytes, text: str) -> None:
    assert octets_text(octets) == text
