"""A client of a peer in a process of its own: `python -m bench.peers.client resp|memcached|nixl`.

Driven as an initiator is. Clients are as small as they can be: one `sendmsg` for a call, values received into slots.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

from kbtp.testing.bench.initiator import Connect, Worker
from kbtp.testing.bench.process import Message
from kbtp.testing.bench.workload import BlockServer, Slots


def _connect_resp(slots: Slots, blocks: int, settings: dict[str, Any]) -> tuple[BlockServer, int, Message]:
    from bench.peers.text import Resp

    return Resp(slots, blocks, settings["port"]), blocks, {}


def _connect_memcached(slots: Slots, blocks: int, settings: dict[str, Any]) -> tuple[BlockServer, int, Message]:
    from bench.peers.text import Memcached

    return Memcached(slots, blocks, settings["port"]), blocks, {}


def _connect_nixl(slots: Slots, blocks: int, settings: dict[str, Any]) -> tuple[BlockServer, int, Message]:
    from bench.peers.nixl_client import Nixl

    return Nixl(slots, blocks, settings), blocks, {}


PROTOCOLS: dict[str, Connect] = {"resp": _connect_resp, "memcached": _connect_memcached, "nixl": _connect_nixl}


def main(arguments: Sequence[str]) -> int:
    return Worker(PROTOCOLS[arguments[0]]).run()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
