"""`python -m interop.odd_lengths URL...`: sessions whose blocks have lengths that Linux siw may stumble over.

siw takes a CRC for wrong where a TCP segment ends between PAD and CRC (docs/testing.md). Each batch has two blocks: one
of any length that is a multiple of 4, and one of such a length that a segment would end just there if the FPDUs of both
were sent one behind the other. Needs kbtp alone, so that it runs in the guest as well.
"""

from __future__ import annotations

import argparse
import random
import sys
from contextlib import closing
from dataclasses import dataclass

import kbtp
from kbtp.errors import KbtpError
from kbtp.iwarp.crc32c import CRC_BYTES
from kbtp.iwarp.fpdu import LENGTH_BYTES, mulpdu_for_emss
from kbtp.limits import (
    COMPLETION_BYTES,
    COMPLETION_DESCRIPTOR_BYTES,
    DDP_TAGGED_HEADER_BYTES,
    DDP_UNTAGGED_HEADER_BYTES,
    DEFAULT_INLINE_MAX_BYTES,
)
from kbtp.rnic import AUTO, open_rnic

EMSS_BYTES = 1448
"""What IPv4 and TCP with timestamps leave of an MTU of 1500 octets."""

MULPDU_BYTES = mulpdu_for_emss(EMSS_BYTES, markers=False)
BLOCK_BYTES = 16 * 1024


class WrongOctets(Exception):
    """A load succeeded and brought something else than was stored."""


@dataclass(frozen=True, slots=True)
class Way:
    """How blocks of `least` to `most` octets travel: one a message, behind a DDP header and `fixed_bytes` of KBTP.

    Before the second one are FPDUs of `between_bytes` besides those of the first.
    """

    least: int
    most: int
    header_bytes: int
    fixed_bytes: int = 0
    between_bytes: int = 0

    def pair(self, draw: random.Random) -> list[bytes]:
        second = 0
        while not self.least <= second <= self.most:
            first = 4 * draw.randint(self.least // 4 + 1, self.most // 4)
            second = self._second(first, segments=draw.randint(0, 4), pad_bytes=draw.randint(1, 3))
        return [draw.randbytes(first), draw.randbytes(second)]

    def _second(self, first: int, *, segments: int, pad_bytes: int) -> int:
        ahead_bytes = fpdus_bytes(self.fixed_bytes + first, self.header_bytes) + self.between_bytes
        last_bytes = -(ahead_bytes + LENGTH_BYTES + self.header_bytes) % EMSS_BYTES
        return segments * (MULPDU_BYTES - self.header_bytes) + last_bytes - pad_bytes - self.fixed_bytes


def fpdus_bytes(message_bytes: int, header_bytes: int) -> int:
    """All FPDUs of a message that is a multiple of 4 octets."""
    segments = -(-message_bytes // (MULPDU_BYTES - header_bytes))
    return message_bytes + segments * (LENGTH_BYTES + header_bytes + CRC_BYTES)


WAYS = (
    # In the request.
    Way(1, 1000, DDP_UNTAGGED_HEADER_BYTES, fixed_bytes=COMPLETION_BYTES + COMPLETION_DESCRIPTOR_BYTES),
    # Read from the initiator.
    Way(DEFAULT_INLINE_MAX_BYTES + 1, BLOCK_BYTES, DDP_TAGGED_HEADER_BYTES),
    # Written to the initiator, each before its COMPLETION.
    Way(
        1,
        BLOCK_BYTES,
        DDP_TAGGED_HEADER_BYTES,
        between_bytes=fpdus_bytes(COMPLETION_BYTES, DDP_UNTAGGED_HEADER_BYTES),
    ),
)


def session(client: kbtp.Client, batches: list[list[bytes]]) -> None:
    """Raises KbtpError, and WrongOctets."""
    for data in batches:
        blocks = client.alloc_store_many(data).raise_for_status().refs
        into = [bytearray(len(octets)) for octets in data]
        client.load_many(blocks, into).raise_for_status()
        if into != data:
            raise WrongOctets(f"loads of {list(map(len, data))} octets brought other ones than were stored")
        last = bytearray(len(data[1]))
        if data is batches[-1] and (client.load(blocks[1], last, mode="direct") != len(last) or last != data[1]):
            raise WrongOctets(f"a direct load of {len(last)} octets brought other ones than were stored")
        client.free_many(blocks).raise_for_status()


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m interop.odd_lengths", description=__doc__)
    parser.add_argument("urls", nargs="+", metavar="URL")
    parser.add_argument("--rnic", action="append", help="sessions over each of these")
    parser.add_argument("--count", type=int, default=50, help="sessions, for each URL and RNIC")
    parser.add_argument("--timeout", type=float, default=30.0, help="seconds, for each connecting and operation")
    arguments = parser.parse_args()
    draw, timeout_s = random.Random(1), arguments.timeout
    for url, name in [(url, name) for url in arguments.urls for name in arguments.rnic or [AUTO]]:
        with closing(open_rnic(name)) as rnic:
            for number in range(arguments.count):
                batches = [way.pair(draw) for way in WAYS]
                try:
                    with kbtp.connect(
                        url, direct="load", connect_timeout_s=timeout_s, timeout_s=timeout_s, rnic=rnic
                    ) as client:
                        session(client, batches)
                except (KbtpError, WrongOctets) as error:
                    lengths = [list(map(len, data)) for data in batches]
                    print(f"session {number} of {name} with {url}, {lengths} octets: {type(error).__name__}: {error}")
                    return 1
        print(f"{arguments.count} sessions of {name} with {url}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
