"""A client of a peer in a process of its own: `python -m bench.peers.client PROTOCOL`.

Driven as an initiator is.
"""

from __future__ import annotations

import sys
from functools import partial
from importlib import import_module
from typing import Any

from kbtp.testing.bench.initiator import Worker
from kbtp.testing.bench.process import Message
from kbtp.testing.bench.workload import BlockServer, Slots

PROTOCOLS = {
    "bare-sockets": ("bench.peers.bare_sockets", "BareSockets"),
    "resp": ("bench.peers.text", "Resp"),
    "memcached": ("bench.peers.text", "Memcached"),
    "lmcache": ("bench.peers.lmcache", "LMCache"),
    "lmcache-minimal": ("bench.peers.lmcache_minimal", "MinimalLMCache"),
    "nixl": ("bench.peers.nixl", "Nixl"),
    "peercache": ("bench.peers.peercache", "PeerCache"),
    "mooncake-engine": ("bench.peers.mooncake", "TransferEngine"),
    "mooncake-store": ("bench.peers.mooncake", "Store"),
    "kbtp-cache": ("bench.cache.contender", "CacheBlocks"),
}


def connect(protocol: str, slots: Slots, blocks: int, settings: dict[str, Any]) -> tuple[BlockServer, int, Message]:
    module, name = PROTOCOLS[protocol]
    server: BlockServer = getattr(import_module(module), name)(slots, blocks, settings)
    return server, blocks, {}


if __name__ == "__main__":
    sys.exit(Worker(partial(connect, sys.argv[1])).run())
