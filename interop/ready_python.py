"""A Python in the guest that has everything imported: without KVM that takes each process five seconds and more.

`ready_python.py serve` waits for programs to run; `ready_python.py -m MODULE ARGUMENTS` has one run by it, in a
process forked there, as if it ran here: with these arguments, environment and standard files, and in this network
namespace. Its status is that of the program, and its end that of the program too. Nothing of the project is imported
before it is wanted.
"""

from __future__ import annotations

import ctypes
import importlib
import json
import os
import select
import signal
import socket
import sys
from contextlib import suppress

PLACE = "/run/kbtp-ready-python"
"""A file, since abstract names are each network namespace's own."""
LISTENS = "ready_python listens"
MODULES = (
    "conformance.rnics",
    "interop.operations",
    "kbtp.cli.serve",
    "kbtp.conformance.workload",
    "kbtp.target.server",
)
REQUEST_BYTES = 1 << 17
STANDARD_FILES = 3
NETWORK = "/proc/self/ns/net"
TOLD_BYTES = 1


def run_there(arguments: list[str]) -> int:
    """The status of `python ARGUMENTS`."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as server:
        server.connect(PLACE)
        request = json.dumps({"arguments": arguments, "environment": dict(os.environ), "folder": os.getcwd()})
        network = os.open(NETWORK, os.O_RDONLY)
        socket.send_fds(server, [request.encode()], [*range(STANDARD_FILES), network])
        status = server.recv(TOLD_BYTES)
    return status[0] if status else 1


def enter_network(network: int) -> None:
    """Go to the network namespace of that descriptor. Raises OSError."""
    if os.path.samestat(os.fstat(network), os.stat(NETWORK)):  # which needs no rights
        return
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.setns(network, 0):
        raise OSError(ctypes.get_errno(), "setns")


class Server:
    """Forks what it is asked to run, and waits for the ends of both sides."""

    def __init__(self) -> None:
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._listener.bind(PLACE)
        self._listener.listen()
        self._callers: dict[int, tuple[socket.socket, int]] = {}
        """By the descriptor of the process: who asked for it, and its number."""

    def serve(self) -> list[str]:
        """Returns in a forked process alone: what that has to run."""
        while True:
            callers = {caller.fileno(): process for process, (caller, _) in self._callers.items()}
            listener = self._listener.fileno()
            ready, _, _ = select.select([listener, *self._callers, *callers], [], [])
            for one in ready:
                if one == listener:
                    arguments = self._fork()
                    if arguments is not None:
                        return arguments
                elif one in self._callers:
                    self._ended(one)
                elif callers[one] in self._callers:  # it says no more: it is gone
                    signal.pidfd_send_signal(callers[one], signal.SIGKILL)
                    self._ended(callers[one])

    def _fork(self) -> list[str] | None:
        """What to run, in the process that does it."""
        caller, _ = self._listener.accept()
        octets, files, _, _ = socket.recv_fds(caller, REQUEST_BYTES, STANDARD_FILES + 1)
        pid = os.fork()
        if pid:
            self._callers[os.pidfd_open(pid)] = caller, pid
        else:
            for one, file in enumerate(files[:STANDARD_FILES]):
                os.dup2(file, one)
            enter_network(files[STANDARD_FILES])
            self._listener.close()
            caller.close()
            for process, (another, _) in self._callers.items():
                os.close(process)
                another.close()
        for file in files:
            os.close(file)
        if pid:
            return None
        request = json.loads(octets)
        os.environ.update(request["environment"])
        os.chdir(request["folder"])
        arguments: list[str] = request["arguments"]
        return arguments

    def _ended(self, process: int) -> None:
        caller, pid = self._callers.pop(process)
        _, status = os.waitpid(pid, 0)
        os.close(process)
        with suppress(OSError), caller:
            caller.send(bytes([os.waitstatus_to_exitcode(status) & 0xFF]))


def main() -> None:
    if sys.argv[1] != "serve":
        sys.exit(run_there(sys.argv[1:]))
    server = Server()
    print(LISTENS, flush=True)
    for module in MODULES:
        importlib.import_module(module)
    _, module, *arguments = server.serve()
    sys.argv = ["", *arguments]
    sys.modules.pop(module, None)  # it is run anew, as the main program
    runpy = importlib.import_module("runpy")
    runpy.run_module(module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
