"""LMCache's `lmcache_server`, reached as LMCache's own connector reaches it, without the event loop around that.

Its protocol classes, one request at a time on one socket, a batch as one after the other, each value received into its
slot. A PUT is not answered: behind those of a call goes an EXIST, whose answer tells that they are done.
"""

from __future__ import annotations

import os
import socket
from importlib import import_module
from typing import Any

from bench.peers.keyed import Keyed
from kbtp.testing.bench.process import BenchFailed, Message
from kbtp.testing.bench.workload import Call, Slots

_HASH_SHIFT = 32


class LMCache(Keyed[Any]):
    """`BlockServer` over one connection."""

    def __init__(self, slots: Slots, blocks: int, settings: Message) -> None:
        self._protocol: Any = import_module("lmcache.v1.protocol")
        torch: Any = import_module("torch")
        key: Any = import_module("lmcache.utils").CacheEngineKey
        self._layout = import_module("lmcache.v1.memory_management").MemoryFormat(1)
        self._octets, self._asked = torch.uint8, torch.float16
        self._shape, self._no_shape = torch.Size([slots.block_bytes, 1, 1, 1]), torch.Size([0, 0, 0, 0])
        self._socket = socket.create_connection(("127.0.0.1", settings["port"]))
        # Unlike the connector, which sends no question behind a PUT: its delayed acknowledgement would take 40 ms.
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._block_bytes = slots.block_bytes
        self._sources = [row.data for row in slots.source]
        self._destinations = [row.data for row in slots.destination]
        self._header = memoryview(bytearray(self._protocol.ServerMetaMessage.packlength()))
        # Of blocks to load, and of blocks to replace; clients side by side have keys of their own.
        mark = int.from_bytes(os.urandom(4), "big") << _HASH_SHIFT
        keys = [key("bench", 1, 0, mark + number, torch.uint8) for number in range(blocks + slots.count)]
        super().__init__(keys[:blocks], keys[blocks:])

    def close(self) -> None:
        self._socket.close()

    # --- requests ------------------------------------------------------------------------------

    def get(self, keys: list[Any], first_slot: int) -> Call:
        into = self._destinations[first_slot : first_slot + len(keys)]

        def get() -> None:
            for key, slot in zip(keys, into, strict=True):
                if self._ask(self._protocol.ClientCommand.GET, key).length != self._block_bytes:
                    raise BenchFailed("LMCache: a value of another length")
                self._receive(slot)

        return get

    def put(self, keys: list[Any], first_slot: int) -> Call:
        data = self._sources[first_slot : first_slot + len(keys)]
        protocol, length, shape = self._protocol, self._block_bytes, self._shape

        def put() -> None:
            for key, slot in zip(keys, data, strict=True):
                put = protocol.ClientCommand.PUT
                message = protocol.ClientMetaMessage(put, key, length, self._layout, self._octets, shape)
                self._socket.sendall(message.serialize())
                self._socket.sendall(slot)
            self._ask(protocol.ClientCommand.EXIST, keys[-1])

        return put

    def _ask(self, command: Any, key: Any) -> Any:
        """The header of the answer. Raises BenchFailed for a refusal."""
        protocol = self._protocol
        message = protocol.ClientMetaMessage(command, key, 0, self._layout, self._asked, self._no_shape)
        self._socket.sendall(message.serialize())
        self._receive(self._header)
        answer = protocol.ServerMetaMessage.deserialize(self._header)
        if answer.code != protocol.ServerReturnCode.SUCCESS:
            raise BenchFailed(f"LMCache: {command.name}: {answer.code.name}")
        return answer

    def _receive(self, into: memoryview) -> None:
        while into:
            got = self._socket.recv_into(into)
            if not got:
                raise BenchFailed("the server closed the connection")
            into = into[got:]
