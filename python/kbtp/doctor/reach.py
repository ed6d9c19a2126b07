"""One session with a target, step by step: each within its own time, the first that fails is the last."""

from __future__ import annotations

import queue
import secrets
import socket
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from typing import TypeVar

from kbtp import limits
from kbtp.address import Address
from kbtp.doctor import verdicts_reach as means
from kbtp.doctor.verdicts import Finding, Level, ok, problem
from kbtp.doctor.verdicts_reach import Attempt, Passed, Unreached
from kbtp.errors import ApiMisuse, OperationRefused, PeerMisbehaved, WireFormatError
from kbtp.initiator.session import InitiatorConfig, SaidHello, accepted
from kbtp.iwarp.events import Failed, Received, TerminateReceived
from kbtp.iwarp.mpa import ActiveStartup, MpaOptions, MpaRejected, MpaStartupError, Negotiated
from kbtp.iwarp.stream import IwarpStream
from kbtp.rnic import crc_wanted
from kbtp.verbs.stag_table import StagTable
from kbtp.wire import CommonHeader, ConnectionData, HelloAck, Nonces

_RECEIVE_BYTES = 1 << 16
_SEND_BYTES = 1 << 20
_HELLO = 0
TIMEOUT_MAX_S = 3600.0

_Value = TypeVar("_Value")


@dataclass(frozen=True, slots=True)
class Step:
    name: str
    finding: Finding
    took_ms: float
    seen: dict[str, object]


class Deadline:
    """The end of a step."""

    def __init__(self, timeout_s: float) -> None:
        self._end_s = time.monotonic() + timeout_s

    def left_s(self) -> float:
        """Raises TimeoutError if nothing is left."""
        left_s = self._end_s - time.monotonic()
        if left_s <= 0:
            raise TimeoutError
        return left_s


class Link:
    """A TCP connection whose every wait ends with its step."""

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def send(self, octets: bytes, deadline: Deadline) -> None:
        self.sock.settimeout(deadline.left_s())
        self.sock.sendall(octets)

    def receive(self, deadline: Deadline) -> bytes:
        """Empty at the peer's FIN. Raises OSError, TimeoutError among them."""
        self.sock.settimeout(deadline.left_s())
        return self.sock.recv(_RECEIVE_BYTES)


def reach(url: str, config: InitiatorConfig, timeout_s: float) -> tuple[Step, ...]:
    """Each step within `timeout_s`. Never raises for the peer or the network."""
    steps: list[Step] = []

    def take(name: str, work: Callable[[], tuple[_Value, Passed]]) -> _Value:
        began_s = time.monotonic()
        try:
            value, passed = work()
        except Unreached as error:
            took_ms = _ms_since(began_s)
            steps.append(Step(name, problem(name, error.says, error.do), took_ms, error.seen))
            raise
        steps.append(Step(name, ok(name, passed.says), _ms_since(began_s), passed.seen))
        return value

    with suppress(Unreached), ExitStack() as stack:
        address = take("url", lambda: _parse(url))
        found = take("lookup", lambda: _look_up(address, timeout_s))
        link = take("tcp", lambda: _connect(found, timeout_s))
        stack.callback(link.sock.close)
        start = take("mpa", lambda: _start(link, config, timeout_s))
        stream = take("hello", lambda: _hello(link, start, config, timeout_s))
        take("end", lambda: _end(link, stream, timeout_s))
    return tuple(steps)


def reached(steps: tuple[Step, ...]) -> bool:
    return all(step.finding.level is not Level.PROBLEM for step in steps)


def _ms_since(began_s: float) -> float:
    return round((time.monotonic() - began_s) * 1000, 3)


def _parse(url: str) -> tuple[Address, Passed]:
    try:
        address = Address.parse(url)
    except ApiMisuse as error:
        raise Unreached(str(error), "correct the URL") from None
    return address, Passed(str(address), {"host": address.host, "port": address.port})


# --- look-up and TCP ---------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Found:
    family: socket.AddressFamily
    sockaddr: tuple[object, ...]

    def __str__(self) -> str:
        host, port = self.sockaddr[:2]
        return f"[{host}]:{port}" if self.family == socket.AF_INET6 else f"{host}:{port}"


def _look_up(address: Address, timeout_s: float) -> tuple[list[_Found], Passed]:
    """In a thread of its own: the system's resolver has its own idea of time."""
    answers: queue.SimpleQueue[list[_Found] | str] = queue.SimpleQueue()

    def ask() -> None:
        try:
            results = socket.getaddrinfo(address.host, address.port, type=socket.SOCK_STREAM, proto=socket.IPPROTO_TCP)
            answers.put([_Found(family, sockaddr) for family, _, _, _, sockaddr in results])
        except (OSError, UnicodeError) as error:
            answers.put((error.strerror if isinstance(error, OSError) else None) or str(error))

    threading.Thread(target=ask, name="kbtp-doctor-lookup", daemon=True).start()
    try:
        answer = answers.get(timeout=timeout_s)
    except queue.Empty:
        raise means.lookup_failed(address.host, f"no answer of the resolver within {timeout_s:g} s") from None
    if isinstance(answer, str):
        raise means.lookup_failed(address.host, answer)
    texts = [str(found) for found in answer]
    return answer, Passed(", ".join(texts), {"addresses": texts})


def _connect(found: list[_Found], timeout_s: float) -> tuple[Link, Passed]:
    """To the first address that takes the connection; one that does not answer leaves time for the others."""
    deadline, failed = Deadline(timeout_s), []
    for index, address in enumerate(found):
        with ExitStack() as stack:
            try:
                sock = stack.enter_context(socket.socket(address.family, socket.SOCK_STREAM, socket.IPPROTO_TCP))
                sock.settimeout(deadline.left_s() / (len(found) - index))
                sock.connect(address.sockaddr)
                link = Link(sock)
            except OSError as error:
                failed.append(Attempt(str(address), error))
                continue
            stack.pop_all()
        tried: list[dict[str, str]] = [{"address": one.address, "outcome": one.outcome} for one in failed]
        before = "".join(f"; before that {attempt}" for attempt in failed)
        return link, Passed(f"connected to {address}{before}", {"address": str(address), "attempts": tried})
    raise means.tcp_failed(failed)


# --- MPA ---------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Start:
    negotiated: Negotiated
    nonces: Nonces
    surplus: bytes


def _start(link: Link, config: InitiatorConfig, timeout_s: float) -> tuple[_Start, Passed]:
    deadline, came = Deadline(timeout_s), b""
    nonce = secrets.token_bytes(limits.CONNECTION_NONCE_BYTES)
    try:
        mpa = MpaOptions(crc=crc_wanted())
    except ApiMisuse as error:
        raise Unreached(str(error), "correct or unset it") from None
    startup = ActiveStartup(mpa, ConnectionData(nonce).pack(), config.read_depth, config.read_depth)
    result: Negotiated | MpaRejected | None = None
    try:
        link.send(startup.request, deadline)
        while result is None:
            octets = link.receive(deadline)
            if not octets:
                raise means.closed_before_reply("closed the connection")
            came += octets
            result = startup.receive_data(octets)
    except TimeoutError:
        raise means.silent_before_reply(timeout_s, came) from None
    except OSError as error:
        raise means.closed_before_reply(f"broke the connection ({error.strerror})") from None
    except MpaStartupError as error:
        raise means.no_mpa_reply(came, error) from None
    if isinstance(result, MpaRejected):
        raise means.rejected(result)
    seen = means.mpa_seen(result)
    if result.failure is not None:
        stream = _stream(result)
        stream.terminate(result.failure)
        _last_words(link, stream, deadline)
        raise means.cannot_serve(result.failure, seen)
    try:
        target_nonce = ConnectionData.parse(result.private_data).nonce
    except WireFormatError as error:
        raise means.not_kbtp(error, {**seen, "private_data": result.private_data.hex()}) from None
    return _Start(result, Nonces(nonce, target_nonce), startup.surplus), means.mpa_passed(result)


def _stream(negotiated: Negotiated) -> IwarpStream:
    """One that reaches no memory of ours."""
    table = StagTable(lambda: secrets.randbits(32))
    return IwarpStream(negotiated, table.memory_for(object(), table.allocate_pd()), active=True)


def _last_words(link: Link, stream: IwarpStream, deadline: Deadline) -> None:
    with suppress(OSError):
        link.send(b"".join(stream.data_to_send(_SEND_BYTES)), deadline)


# --- HELLO and the end -------------------------------------------------------------------------


def _hello(link: Link, start: _Start, config: InitiatorConfig, timeout_s: float) -> tuple[IwarpStream, Passed]:
    deadline, stream = Deadline(timeout_s), _stream(start.negotiated)
    said = SaidHello.on(config, start.nonces)
    size = config.max_message_bytes
    room = memoryview(bytearray(config.completion_credits * size))
    for slot in range(config.completion_credits):
        stream.post_receive(slot, room[slot * size : (slot + 1) * size])
    stream.post_send(_HELLO, [said.octets])
    try:
        message = _answer(link, stream, start.surplus, room, size, deadline)
    except TimeoutError:
        raise means.silent_before_ack(timeout_s) from None
    except OSError as error:
        raise means.closed_before_ack(f"broke the connection ({error.strerror})") from None
    try:
        ack: HelloAck = accepted(config, said, message)
    except OperationRefused as error:
        raise means.hello_refused(error, config.key) from None
    except PeerMisbehaved as error:
        stream.terminate(error.cause)
        _last_words(link, stream, deadline)
        raise means.hello_misanswered(error) from None
    return stream, means.hello_passed(ack, CommonHeader.parse(message).version, config.key)


def _answer(
    link: Link, stream: IwarpStream, surplus: bytes, room: memoryview, size: int, deadline: Deadline
) -> memoryview:
    """The first message of the target. Raises OSError, TimeoutError among them, and `Unreached`."""
    octets = surplus
    while True:
        stream.receive_data(octets)
        link.send(b"".join(stream.data_to_send(_SEND_BYTES)), deadline)
        while (event := stream.next_event()) is not None:
            if isinstance(event, Received):
                return room[event.wr_id * size : event.wr_id * size + event.length]
            if isinstance(event, TerminateReceived):
                raise means.ended_with_terminate(event.info)
            if isinstance(event, Failed):
                _last_words(link, stream, deadline)
                raise means.hello_misanswered(event.error)
        octets = link.receive(deadline)
        if not octets:
            raise means.closed_before_ack("closed the connection")


def _end(link: Link, stream: IwarpStream, timeout_s: float) -> tuple[None, Passed]:
    """FIN both ways (profile 3)."""
    deadline = Deadline(timeout_s)
    try:
        link.sock.shutdown(socket.SHUT_WR)
        while octets := link.receive(deadline):
            stream.receive_data(octets)
            while (event := stream.next_event()) is not None:
                if isinstance(event, TerminateReceived):
                    raise means.ended_with_terminate(event.info)
    except TimeoutError:
        raise means.not_ended(f"did not close its side within {timeout_s:g} s") from None
    except OSError as error:
        raise means.not_ended(f"broke the connection ({error.strerror})") from None
    return None, Passed("in order: both sides have closed")
