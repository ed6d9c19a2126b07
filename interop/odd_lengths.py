"""`python -m interop.odd_lengths URL...`: sessions whose blocks have lengths that Linux siw may stumble over.

Needs kbtp alone, so that it runs in the guest as well. siw takes a CRC for wrong if a TCP segment ends between PAD and CRC
(docs/testing.md). In each batch of a session one block has any length that is a multiple of 4, and the one behind it
such a length that a segment would end just there if the FPDUs of both were sent one behind the other.
Fails at the first session that is lost, or whose octets differ.
"""

from __future__ import annotations

import argparse
import random
import sys

import kbtp
from kbtp.errors import KbtpError
from kbtp.iwarp.fpdu import mulpdu_for_emss
from kbtp.limits import COMPLETION_BYTES, DDP_TAGGED_HEADER_BYTES, DDP_UNTAGGED_HEADER_BYTES, DEFAULT_INLINE_MAX_BYTES
from kbtp.rnic import open_rnic

EMSS_BYTES = 1448
"""Of an Ethernet's 1500 octets, what IPv4 and TCP with timestamps leave."""

BATCHES = 4
ALLOC_STORE_BYTES = 56
_LENGTH_BYTES, _CRC_BYTES = 2, 4
_MULPDU_BYTES = mulpdu_for_emss(EMSS_BYTES, markers=False)


def fpdus_bytes(message_bytes: int, header_bytes: int) -> int:
    """Of one message, without the PAD of the last."""
    segments = max(1, -(-message_bytes // (_MULPDU_BYTES - header_bytes)))
    return message_bytes + segments * (_LENGTH_BYTES + header_bytes + _CRC_BYTES)


def second_bytes(first_bytes: int, header_bytes: int, ahead_bytes: int, pad_bytes: int, segments: int) -> int:
    """How long the second of two messages is, so that a TCP segment ends between its last FPDU's PAD and CRC.

    `ahead_bytes` are of other FPDUs than those of the first message, and stand before the second one.
    """
    sent_bytes = fpdus_bytes(first_bytes, header_bytes) + ahead_bytes
    last_bytes = -(sent_bytes + _LENGTH_BYTES + header_bytes) % EMSS_BYTES
    payload_max = _MULPDU_BYTES - header_bytes
    return (segments * payload_max) + last_bytes - pad_bytes


class Draw:
    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)

    def stores_inline(self) -> list[bytes]:
        return self._pair(0, 1000, DDP_UNTAGGED_HEADER_BYTES, 0, ALLOC_STORE_BYTES)

    def stores(self) -> list[bytes]:
        return self._pair(DEFAULT_INLINE_MAX_BYTES, 8000, DDP_TAGGED_HEADER_BYTES, 0, 0)

    def loads(self) -> list[bytes]:
        completion_bytes = fpdus_bytes(COMPLETION_BYTES, DDP_UNTAGGED_HEADER_BYTES)
        return self._pair(0, 8000, DDP_TAGGED_HEADER_BYTES, completion_bytes, 0)

    def _pair(self, least: int, most: int, header_bytes: int, ahead_bytes: int, fixed_bytes: int) -> list[bytes]:
        draw, second = self._random, 0
        while second <= least:
            first, pad = draw.randint(least // 4 + 1, most // 4) * 4, draw.randint(1, 3)
            segments = draw.randint(0, most // _MULPDU_BYTES)
            second = second_bytes(first + fixed_bytes, header_bytes, ahead_bytes, pad, segments) - fixed_bytes
        return [draw.randbytes(length) for length in (first, second)]


def exchange(client: kbtp.Client, data: list[bytes]) -> None:
    stored = client.alloc_store_many(data)
    into = [bytearray(len(octets)) for octets in data]
    for result in stored:
        if not result.ok:
            raise ValueError(f"storing {list(map(len, data))} octets: {result}")
    blocks = stored.refs
    loaded = client.load_many(blocks, into=into)
    for result in loaded:
        if not result.ok:
            raise ValueError(f"loading {list(map(len, data))} octets: {result}")
    if [bytes(octets) for octets in into] != data:
        raise ValueError("other octets")
    client.free_many(blocks)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m interop.odd_lengths", description=__doc__)
    parser.add_argument("urls", nargs="+")
    parser.add_argument("--rnic", action="append")
    parser.add_argument("--count", type=int, default=50)
    parser.add_argument("--timeout", type=float, default=30.0, help="seconds, for each connecting")
    arguments = parser.parse_args()
    draw = Draw(1)
    failed = 0
    for url in arguments.urls:
        for name in arguments.rnic:
            for number in range(arguments.count):
                batches = [make() for make in (draw.stores_inline, draw.stores, draw.loads) for _ in range(BATCHES)]
                try:
                    with kbtp.connect(url, connect_timeout_s=arguments.timeout, timeout_s=10, rnic=open_rnic(name)) as client:
                        for data in batches:
                            exchange(client, data)
                except (KbtpError, ValueError) as error:
                    print(f"session {number} of {arguments.count}, {name}, {url}: {type(error).__name__}: {error}", flush=True)
                    failed += 1
    print(failed, "failed")
    return 0


if __name__ == "__main__":
    sys.exit(main())
