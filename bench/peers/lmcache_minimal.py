"""LMCache's `lmcache_server` through a client that is as small as it can be, and sends a whole call at once.

Headers of one length each way, no answer to a PUT.
"""

from __future__ import annotations

import struct

from bench.peers.text import TextClient

_PUT, _GET, _EXIST = 1, 2, 3
_SUCCESS = 200
_FORMAT, _UINT8 = 1, 6
_REQUEST = struct.Struct("9i150s")  # command, length, format, type, location, 4 x shape, key
_RESPONSE = struct.Struct("9i")  # code, length, format, type, 4 x shape, location
# To an EXIST, where the server itself says a type and no shape.
_FLOAT16 = 2
_THERE = _RESPONSE.pack(_SUCCESS, 0, _FORMAT, _FLOAT16, 0, 0, 0, 0, 0)


def _request(command: int, key: bytes, length: int) -> bytes:
    # Of a key all but the hash, in hexadecimal digits, says what is cached; it is the same for all.
    name = b"bench@1@0@%s@uint8" % key
    return _REQUEST.pack(command, length, _FORMAT, _UINT8, 0, length, 1, 1, 1, name.ljust(150))


class MinimalLMCache(TextClient):
    """After the last PUT of a call comes an EXIST: its answer tells that they are done."""

    value_tail = b""
    put_tail = b""

    def get_request(self, key: bytes) -> bytes:
        return _request(_GET, key, 0)

    def put_request(self, key: bytes, length: int) -> bytes:
        return _request(_PUT, key, length)

    def value_head(self, key: bytes, length: int) -> bytes:
        return _RESPONSE.pack(_SUCCESS, length, _FORMAT, _UINT8, length, 1, 1, 1, 0)

    def after_puts(self, last: bytes) -> bytes:
        return _request(_EXIST, last, 0)

    def answer_to_puts(self, count: int) -> bytes:
        return _THERE
