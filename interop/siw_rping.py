"""rping between siw and our user-space RNICs: both roles, CRC on and off, both RTR kinds, short and long messages."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial

from interop.checks import RNICS, Check, CheckFailed, open_rnic, set_siw
from interop.guest.machine import HOST_ADDRESS, Guest
from interop.rping import PingFailed, Server, ping
from interop.rtr_choice import without_write_rtr
from interop.startup import Startup, newest_startup
from kbtp.iwarp.mpa import RtrKind

SHORT_BYTES, LONG_BYTES = 64, 65_000
PORTS = {SHORT_BYTES: 7174, LONG_BYTES: 7175}
"""An `rping -s` serves one length."""

PINGS = 3
CONNECTIONS = 200
MANY_MAX_WORDS = 2000
PING_S = 30.0
START_S = 20.0

# ETHTOOL_SGRO by way of SIOCETHTOOL. Segments that GRO puts together reach siw as one, which hides its fault.
_SEGMENTS_STAY_APART = """python3 -c '
import array, fcntl, socket, struct
off = array.array("B", struct.pack("II", 0x2C, 0))
fcntl.ioctl(socket.socket(), 0x8946, struct.pack("16sQ16x", b"eth0", off.buffer_info()[0]))
'"""


@dataclass(frozen=True, slots=True)
class _Way:
    """How the two sides start their connection."""

    crc: bool
    rtr: RtrKind
    length: int

    def __str__(self) -> str:
        crc = "CRC" if self.crc else "no CRC"
        rtr = f"{self.rtr.name} RTR, " if self.rtr else ""
        return f"{crc}, {rtr}{self.length:,} octets"


_WAYS = tuple(
    _Way(crc, rtr, length)
    for crc in (True, False)
    for rtr in (RtrKind.NONE, RtrKind.WRITE, RtrKind.READ)
    for length in (SHORT_BYTES, LONG_BYTES)
)


def checks() -> list[Check]:
    made = []
    for name in RNICS:
        made += [Check(f"rping: {name} connects to siw, {way}", partial(_connect, name, way)) for way in _WAYS]
        made += [Check(f"rping: siw connects to {name}, {way}", partial(_listen, name, way)) for way in _WAYS]
    for name in RNICS:
        made.append(Check(f"rping: {CONNECTIONS} connections of {name} to siw, none lost", partial(_many, name)))
    return made


@contextmanager
def serving(guest: Guest, length: int) -> Iterator[tuple[str, int]]:
    """`rping -s` in the guest, for any number of clients one after the other or at once; its address here."""
    port = PORTS[length]
    # It says nothing when it listens, but /proc/net/rdma_cm does not either: the port in use is a TCP one with siw.
    listens = f"until grep -q ':{port:04X} .* 0A ' /proc/net/tcp; do usleep 20000; done; echo it listens"
    with guest.start(f"rping -s -P -a 0.0.0.0 -p {port} -S {length} & {listens}; wait") as call:
        call.await_line("it listens", START_S)
        yield "127.0.0.1", guest.port(port)


def _connect(name: str, way: _Way, guest: Guest) -> None:
    rnic = open_rnic(name, crc=way.crc, rtr=way.rtr)
    with serving(guest, way.length) as address:
        ping(rnic, address, length=way.length, count=PINGS, timeout_s=PING_S)
    _compare(way, guest)


def _many(name: str, guest: Guest) -> None:
    """siw's accept race and its split CRC (docs/testing.md): lengths differ, so that segments end anywhere."""
    rnic, lengths = open_rnic(name), random.Random(name)
    done = guest.run(_SEGMENTS_STAY_APART)
    if done.status:
        raise CheckFailed(f"GRO cannot be switched off: {done.output}")
    with serving(guest, LONG_BYTES) as address:
        for number in range(CONNECTIONS):
            length = 4 * lengths.randint(16, MANY_MAX_WORDS)
            try:
                ping(rnic, address, length=length, count=1, timeout_s=PING_S)
            except PingFailed as error:
                raise CheckFailed(f"connection {number}, {length} octets: {error}") from error


def _listen(name: str, way: _Way, guest: Guest) -> None:
    """siw asks for no CRC by itself; it is on when either side asks for it."""
    set_siw(guest, "peer_to_peer", bool(way.rtr))
    with ExitStack() as stack:
        server = stack.enter_context(Server(open_rnic(name, crc=way.crc), way.length, PING_S))
        port = server.port
        if way.rtr is RtrKind.READ:
            port = stack.enter_context(without_write_rtr(port))
        script = f"rping -c -a {HOST_ADDRESS} -p {port} -C {PINGS} -S {way.length} -V"
        with guest.start(script) as call:
            server.serve(PINGS)
            done = call.finish(PING_S)
    if done.status and not _only_its_end_failed(done.output):
        raise CheckFailed(f"rping ended with status {done.status}: {done.output}")
    _compare(way, guest)


def _only_its_end_failed(output: str) -> bool:
    """When all is done and the connection has ended, rping's thread of the connection manager may find its file
    descriptor closed, and ends the program with a status of its own. Whatever else rping dislikes it says."""
    return set(output.split("\n")) <= {"client DISCONNECT EVENT...", "rdma_get_cm_event: Bad file descriptor", ""}


def _compare(way: _Way, guest: Guest) -> None:
    """What was asked for is what went over the wire."""
    assert guest.recording is not None
    seen = newest_startup(guest.recording)
    if seen != Startup(way.crc, way.rtr):
        raise CheckFailed(f"the connection began otherwise: {seen}")
