"""`python -m interop.connections URL`: sessions one after the other, in each of which a block is stored and loaded.

Fails at the first that is not opened, or whose octets differ. Tells how many took longer than one connection does.
"""

from __future__ import annotations

import argparse
import random
import sys
import time

import kbtp
from kbtp.errors import KbtpError
from kbtp.limits import HELLO_ACK_TIMEOUT_S
from kbtp.rnic import open_rnic

BLOCK_BYTES_MAX = 16 * 1024


def exchange(url: str, rnic_name: str, octets: bytes, timeout_s: float) -> None:
    """Raises KbtpError, and ValueError for other octets than were stored."""
    with kbtp.connect(url, connect_timeout_s=timeout_s, rnic=open_rnic(rnic_name)) as client:
        block = client.alloc_store(octets)
        into = bytearray(len(octets))
        if client.load(block, into=into) != len(octets) or into != octets:
            raise ValueError(f"{len(octets)} octets came back as others")
        client.free(block)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m interop.connections", description=__doc__)
    parser.add_argument("url")
    parser.add_argument("--rnic", default="auto")
    parser.add_argument("--count", type=int, default=200)
    parser.add_argument("--multiple", type=int, default=1, help="lengths are multiples of this")
    parser.add_argument("--timeout", type=float, default=30.0, help="seconds, for each connecting")
    arguments = parser.parse_args()
    draw, again = random.Random(1), 0
    for number in range(arguments.count):
        length = arguments.multiple * draw.randint(1, BLOCK_BYTES_MAX // arguments.multiple)
        began_s = time.monotonic()
        try:
            exchange(arguments.url, arguments.rnic, draw.randbytes(length), arguments.timeout)
        except (KbtpError, ValueError) as error:
            print(f"session {number} of {arguments.count}: {type(error).__name__}: {error}")
            return 1
        again += time.monotonic() - began_s > HELLO_ACK_TIMEOUT_S
    print(f"{arguments.count} sessions, {again} of them on a further connection")
    return 0


if __name__ == "__main__":
    sys.exit(main())
