"""A proxy that takes the RDMA Write RTR out of an MPA Reply.

Our RNICs serve every kind of RTR and say so (RFC 6581 9.2); siw then takes RDMA Write, whatever it has asked for. An
MPA frame has no CRC.
"""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from kbtp.iwarp.mpa import REPLY_KEY
from kbtp.limits import MPA_FRAME_BYTES

_ORD_AT, _WRITE_RTR = MPA_FRAME_BYTES + 2, 0x80
_READ_BYTES = 65536
_JOIN_S = 5.0


@contextmanager
def without_write_rtr(port: int) -> Iterator[int]:
    """The port of 127.0.0.1 whose first connection leads to `port`."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=_forward, args=(listener, port), daemon=True)
        thread.start()
        yield listener.getsockname()[1]
        thread.join(_JOIN_S)


def _forward(listener: socket.socket, port: int) -> None:
    client, _ = listener.accept()
    with client, socket.create_connection(("127.0.0.1", port)) as server:
        back = threading.Thread(target=_pump, args=(server, client), daemon=True)
        back.start()
        _pump(client, server)
        back.join(_JOIN_S)


def _pump(source: socket.socket, sink: socket.socket) -> None:
    with suppress(OSError):
        while octets := bytearray(source.recv(_READ_BYTES)):
            if octets.startswith(REPLY_KEY):
                octets[_ORD_AT] &= ~_WRITE_RTR
            sink.sendall(octets)
        sink.shutdown(socket.SHUT_WR)
