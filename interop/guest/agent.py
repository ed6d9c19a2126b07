"""Runs commands in the guest for `machine.Guest`. Alone in the guest: it imports nothing of the project.

The caller sends a shell script, its length before it in 4 octets, big-endian. It gets records of the same form: the
output as it comes, then a record of no octets and the exit status in 4 octets. When the caller closes the connection
before that, the script and all it has started are killed, unless they left its process group.
"""

from __future__ import annotations

import os
import select
import signal
import socket
import struct
import subprocess
import threading

PORT = 1
READY = "agent listens"

_WORD = struct.Struct(">I")
HOME = "/root"
_READ_BYTES = 65536


def main() -> None:
    listener = socket.create_server(("0.0.0.0", PORT), backlog=16)
    with open("/dev/console", "w") as console:
        print(READY, file=console, flush=True)
    while True:
        caller, _ = listener.accept()
        threading.Thread(target=serve, args=(caller,), daemon=True).start()


def serve(caller: socket.socket) -> None:
    with caller:
        (length,) = _WORD.unpack(_exactly(caller, _WORD.size))
        process = subprocess.Popen(
            ["/bin/sh", "-c", _exactly(caller, length).decode()],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            cwd=HOME,
        )
        try:
            _relay(process, caller)
        except OSError:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def _exactly(caller: socket.socket, length: int) -> bytes:
    octets = b""
    while len(octets) < length:
        octets += caller.recv(length - len(octets)) or _end()
    return octets


def _end() -> bytes:
    raise ConnectionError("the caller is gone")


def _relay(process: subprocess.Popen[bytes], caller: socket.socket) -> None:
    assert process.stdout is not None
    with process.stdout as output:
        while True:
            ready, _, _ = select.select([output.fileno(), caller.fileno()], [], [])
            if caller.fileno() in ready:
                _end()
            octets = os.read(output.fileno(), _READ_BYTES)
            if not octets:
                break
            caller.sendall(_WORD.pack(len(octets)) + octets)
    caller.sendall(_WORD.pack(0) + _WORD.pack(process.wait() & 0xFF))


if __name__ == "__main__":
    main()
