"""What an initiator under test has to do, done with `kbtp`: `python -m kbtp.conformance.workload [URL]`.

In one session with the target at URL, one after the other:

1. ALLOC_STORE a sealed block of 100 octets, LOAD it;
2. ALLOC_STORE a sealed block of 100,000 octets from memory that the target reads, LOAD it;
3. ALLOC_STORE an unsealed block, LOAD it with ALLOW_UNSEALED, STORE to it and seal it, LOAD it;
4. LOAD the second block eight times, as many at once as there are credits;
5. FREE the three blocks and leave.

With --direct it allocates and loads sealed blocks directly (draft 6.6) where the target grants that.

What was loaded is compared with what was stored. The first thing that goes wrong ends it, with exit status 1. Without
URL it reads URLs from its standard input and answers each with a line `ok` or `failed`.
"""

from __future__ import annotations

import argparse
import logging
import sys
from collections.abc import Callable

import kbtp
from kbtp.errors import KbtpError
from kbtp.initiator.view import Mode
from kbtp.rnic import open_rnic
from kbtp.verbs.api import Rnic

SHORT_BYTES = 100
LONG_BYTES = 100_000
LOADS_AT_ONCE = 8


class WrongOctets(Exception):
    """A load succeeded and brought something else than was stored."""


def work(client: kbtp.Client) -> None:
    """Raises `KbtpError` or `WrongOctets` at the first thing that goes wrong."""
    load: Mode = "direct" if client.features & kbtp.Feature.DIRECT_LOAD else "request"
    alloc: Mode = "direct" if client.features & kbtp.Feature.DIRECT_ALLOC else "request"
    short, long = _pattern(SHORT_BYTES, 1), _pattern(LONG_BYTES, 2)
    first = client.alloc_store(short, mode=alloc)
    _compare(client, first, short, mode=load)
    second = client.alloc_store(long, mode=alloc)
    _compare(client, second, long, mode=load)
    third = client.alloc_store(short, seal=False, mode=alloc)
    _compare(client, third, short, allow_unsealed=True)
    third = client.store(third, long)
    _compare(client, third, long, mode=load)
    buffers = [bytearray(LONG_BYTES) for _ in range(LOADS_AT_ONCE)]
    for result in client.load_many([second] * LOADS_AT_ONCE, into=buffers, mode=load):
        if result.error is not None:
            raise result.error
    if any(buffer != long for buffer in buffers):
        raise WrongOctets(f"one of {LOADS_AT_ONCE} loads at once brought other octets than were stored")
    for block in (first, second, third):
        client.free(block)


def _pattern(size: int, seed: int) -> bytes:
    return bytes((seed + index) % 251 for index in range(size))


def _compare(
    client: kbtp.Client, block: kbtp.BlockRef, octets: bytes, *, allow_unsealed: bool = False, mode: Mode = "request"
) -> None:
    into = bytearray(len(octets))
    size = client.load(block, into=into, allow_unsealed=allow_unsealed, mode=mode)
    if size != len(octets) or into != octets:
        raise WrongOctets(f"a load of {len(octets)} octets brought {size}, other ones than were stored")


def _succeeds(url: str, rnic: Rnic, options: argparse.Namespace) -> bool:
    try:
        with kbtp.connect(
            url,
            quota=8,
            handles=16,
            timeout_s=options.timeout,
            connect_timeout_s=options.timeout,
            rnic=rnic,
            key_file=options.key_file,
            direct=options.direct,
        ) as client:
            work(client)
    except (KbtpError, WrongOctets) as error:
        print(f"{url}: {error}", file=sys.stderr)
        return False
    return True


def main(new_rnic: Callable[[str], Rnic] = open_rnic) -> int:
    parser = argparse.ArgumentParser(prog="python -m kbtp.conformance.workload", description=__doc__)
    parser.add_argument("url", nargs="?")
    parser.add_argument("--rnic", default="auto")
    parser.add_argument("--timeout", type=float, default=5.0, help="seconds, for connecting and for each operation")
    parser.add_argument("--key-file", help="the key to authenticate with")
    parser.add_argument("--direct", default="", help="direct modes to use: load, alloc or load,alloc")
    arguments = parser.parse_args()
    logging.basicConfig(level=logging.ERROR, stream=sys.stderr)
    rnic = new_rnic(arguments.rnic)
    if arguments.url is not None:
        return 0 if _succeeds(arguments.url, rnic, arguments) else 1
    for line in sys.stdin:
        print("ok" if _succeeds(line.strip(), rnic, arguments) else "failed", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
