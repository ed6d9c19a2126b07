"""`kbtp serve --index`: the index beside a target, or another one, and the target's announcement in it."""

from __future__ import annotations

import socket
from contextlib import ExitStack
from dataclasses import dataclass

from kbtp import limits
from kbtp.address import Address
from kbtp.cache.announcement import Announcement
from kbtp.cache.announcer import Announcer
from kbtp.cache.embedded import EmbeddedIndex
from kbtp.cache.index import EMBEDDED_PORT_OFFSET, open_index, valkey_url
from kbtp.target.server import Server

EMBEDDED = "embedded"
_WILDCARDS = {"0.0.0.0": "127.0.0.1", "::": "::1"}


@dataclass(frozen=True, slots=True)
class ServedIndex:
    """Where caches find the target. `close` withdraws it, and ends an index that is a child of ours."""

    url: str
    stack: ExitStack

    def close(self) -> None:
        self.stack.close()


def serve_index(index: str, announce: str, server: Server, address: Address, asked_port: int) -> ServedIndex:
    """An embedded index is on the port behind the target's, unless the system chose that one. Raises `KbtpError`."""
    with ExitStack() as stack:
        host = announce or (socket.gethostname() if address.host in _WILDCARDS else address.host)
        reached = url = index
        if index == EMBEDDED:
            embedded = EmbeddedIndex(address.host, asked_port and address.port + EMBEDDED_PORT_OFFSET)
            stack.callback(embedded.close)
            reached = valkey_url(_WILDCARDS.get(address.host, address.host), embedded.port)
            url = valkey_url(host, embedded.port)
        about = Announcement(
            server.target.incarnation,
            str(Address(host, address.port)),
            server.config.block_size_bytes,
            server.config.pool_blocks,
        )
        announcer = Announcer(open_index(reached, limits.CACHE_TIMEOUT_S), about)
        stack.callback(announcer.close)
        return ServedIndex(url, stack.pop_all())
