"""PeerCache's transport over TCP: reads and writes of another process's memory, no directory look-up."""

from __future__ import annotations

import importlib
from types import SimpleNamespace
from typing import Any

import numpy as np

from bench.peers.one_sided import Addressed
from kbtp.testing.bench.process import BenchFailed, Message
from kbtp.testing.bench.workload import Call, Slots


def _transport() -> Any:
    settings = SimpleNamespace(rdma_bind_host="127.0.0.1", local_hostname="127.0.0.1", max_channels_per_peer=16)
    return importlib.import_module("peercache.transport").TcpTransport(settings)


def target(octets: int) -> tuple[object, Message]:
    transport = _transport()
    memory = np.zeros(octets, np.uint8)
    transport.register_mr(memory.ctypes.data, memory.nbytes)
    return (transport, memory), {"address": memory.ctypes.data, "endpoint": transport.local_endpoint()}


class PeerCache(Addressed):
    def __init__(self, slots: Slots, blocks: int, settings: Message) -> None:
        super().__init__(slots, blocks, settings["address"])
        self._transport = _transport()
        self._endpoint = settings["endpoint"]

    def transfer(self, write: bool, local: list[int], remote: list[int], lengths: list[int]) -> Call:
        move = self._transport.batch_write_v if write else self._transport.batch_read_v
        endpoints = [self._endpoint] * len(local)
        keys = [0] * len(local)

        def transfer() -> None:
            if not all(move(endpoints, local, remote, keys, lengths)):
                raise BenchFailed("PeerCache: a transfer failed")

        return transfer

    def close(self) -> None:
        self._transport.close()
