"""Minimal clients of peers with requests and responses on one connection: RESP (Redis, Valkey), memcached's.

Every length is known beforehand, so a response is received into prepared pieces: what stands around the values into
scratch memory, each value into its slot.
"""

from __future__ import annotations

import os
import socket
from abc import abstractmethod
from typing import TypeAlias

from bench.peers.keyed import Keyed
from kbtp.testing.bench.process import BenchFailed, Message
from kbtp.testing.bench.workload import Call, Slots

_Piece: TypeAlias = bytes | memoryview
_IOV_MAX = 128


class TextClient(Keyed[bytes]):
    """`BlockServer` over one connection: one `sendmsg` for a call, values received into their slots."""

    value_tail: bytes
    put_tail: bytes

    def __init__(self, slots: Slots, blocks: int, settings: Message) -> None:
        self._socket = socket.create_connection(("127.0.0.1", settings["port"]))
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._sources = [row.data for row in slots.source]
        self._destinations = [row.data for row in slots.destination]
        mark = os.urandom(4).hex().encode()  # clients side by side have keys of their own
        # Of blocks to load and of blocks to replace: keys of one length, so that responses are of one length too.
        super().__init__(
            [b"a%s%07d" % (mark, index) for index in range(blocks)],
            [b"b%s%07d" % (mark, index) for index in range(slots.count)],
        )
        self._scratch = memoryview(bytearray(1 << 12))
        self._gets = {key: self.get_request(key) for key in (*self._loaded, *self._stored)}
        self._puts = {key: self.put_request(key, slots.block_bytes) for key in (*self._loaded, *self._stored)}
        self._head = len(self.value_head(self._loaded[0], slots.block_bytes))
        self._value_start = self.value_head(b"", 0)[:1]

    @abstractmethod
    def get_request(self, key: bytes) -> bytes: ...

    @abstractmethod
    def put_request(self, key: bytes, length: int) -> bytes:
        """What goes before the value; `put_tail` goes behind it."""

    @abstractmethod
    def value_head(self, key: bytes, length: int) -> bytes:
        """What comes before a value; `value_tail` comes behind it."""

    @abstractmethod
    def answer_to_puts(self, count: int) -> bytes: ...

    def after_puts(self, last: bytes) -> bytes:
        """What must follow the puts of a call, of which this is the last key, to be answered."""
        return b""

    def close(self) -> None:
        self._socket.close()

    # --- the wire ------------------------------------------------------------------------------

    def get(self, keys: list[bytes], first_slot: int) -> Call:
        into = self._destinations[first_slot : first_slot + len(keys)]
        return lambda: self._got(keys, into)

    def _got(self, keys: list[bytes], into: list[memoryview]) -> None:
        self._send([b"".join([self._gets[key] for key in keys])])
        scratch, head, tail = self._scratch, self._head, len(self.value_tail)
        pieces: list[memoryview] = []
        for slot in into:
            pieces += (scratch[:head], slot, scratch[head : head + tail])
        self._receive(pieces)
        if scratch[:1] != self._value_start or scratch[head : head + tail] != self.value_tail:
            raise BenchFailed(f"not a value: {bytes(scratch[: head + tail])!r}")

    def put(self, keys: list[bytes], first_slot: int) -> Call:
        data = self._sources[first_slot : first_slot + len(keys)]
        return lambda: self._done(keys, data)

    def _done(self, keys: list[bytes], data: list[memoryview]) -> None:
        pieces: list[_Piece] = []
        for key, slot in zip(keys, data, strict=True):
            pieces += (self._puts[key], slot, self.put_tail)
        self._send([*pieces, self.after_puts(keys[-1])])
        wanted = self.answer_to_puts(len(keys))
        answer = self._scratch[: len(wanted)]
        self._receive([answer])
        if answer != wanted:
            raise BenchFailed(f"not stored: {bytes(answer)!r}")

    def _send(self, pieces: list[_Piece]) -> None:
        first = 0
        while first < len(pieces):
            sent = self._socket.sendmsg(pieces[first : first + _IOV_MAX])
            while first < len(pieces) and sent >= len(pieces[first]):
                sent -= len(pieces[first])
                first += 1
            if sent:
                pieces[first] = memoryview(pieces[first])[sent:]

    def _receive(self, pieces: list[memoryview]) -> None:
        first = 0
        while first < len(pieces):
            got = self._socket.recvmsg_into(pieces[first : first + _IOV_MAX])[0]
            if not got:
                raise BenchFailed("the server closed the connection")
            while first < len(pieces) and got >= len(pieces[first]):
                got -= len(pieces[first])
                first += 1
            if got:
                pieces[first] = pieces[first][got:]


class Resp(TextClient):
    """Redis and Valkey."""

    value_tail = put_tail = b"\r\n"

    def get_request(self, key: bytes) -> bytes:
        return b"*2\r\n$3\r\nGET\r\n$%d\r\n%s\r\n" % (len(key), key)

    def put_request(self, key: bytes, length: int) -> bytes:
        return b"*3\r\n$3\r\nSET\r\n$%d\r\n%s\r\n$%d\r\n" % (len(key), key, length)

    def value_head(self, key: bytes, length: int) -> bytes:
        return b"$%d\r\n" % length

    def answer_to_puts(self, count: int) -> bytes:
        return b"+OK\r\n" * count


class Memcached(TextClient):
    value_tail = b"\r\nEND\r\n"
    put_tail = b"\r\n"

    def get_request(self, key: bytes) -> bytes:
        return b"get %s\r\n" % key

    def put_request(self, key: bytes, length: int) -> bytes:
        return b"set %s 0 0 %d\r\n" % (key, length)

    def value_head(self, key: bytes, length: int) -> bytes:
        return b"VALUE %s 0 %d\r\n" % (key, length)

    def answer_to_puts(self, count: int) -> bytes:
        return b"STORED\r\n" * count
