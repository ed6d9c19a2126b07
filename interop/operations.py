"""`python -m interop.operations URL`: random LOADs, STOREs, ALLOC_STOREs, FREEs and direct loads, every octet compared.

Needs kbtp alone, so that it runs in the guest as well. Fails at the first thing that goes wrong.
"""

from __future__ import annotations

import argparse
import random
import sys
from collections import Counter
from collections.abc import Callable
from enum import Enum

import kbtp
from kbtp.errors import KbtpError
from kbtp.rnic import open_rnic

QUOTA = 16
SHORT_BYTES = 100
BLOCK_BYTES = 64 * 1024
"""What the target must have at least: `kbtp serve --block-size 64KiB --max-quota 16`."""


class Kind(Enum):
    LOAD = "LOAD"
    STORE = "STORE"
    ALLOC_STORE = "ALLOC_STORE"
    FREE = "FREE"
    DIRECT_LOAD = "DIRECT_LOAD"


class WrongOctets(Exception):
    """A load succeeded and brought something else than was stored."""


class Workload:
    """One session's blocks and what they must hold."""

    def __init__(self, client: kbtp.Client, seed: int, multiple_bytes: int) -> None:
        """Lengths are multiples of `multiple_bytes`."""
        self.done: Counter[Kind] = Counter()
        self._client = client
        self._random = random.Random(seed)
        self._multiple_bytes = multiple_bytes
        self._sealed: dict[kbtp.BlockRef, bytes] = {}
        self._unsealed: dict[kbtp.BlockRef, bytes] = {}
        self._do: dict[Kind, Callable[[], None]] = {
            Kind.LOAD: self._load,
            Kind.STORE: self._store,
            Kind.ALLOC_STORE: self._alloc_store,
            Kind.FREE: self._free,
        }
        if client.features & kbtp.Feature.DIRECT_LOAD:
            self._do[Kind.DIRECT_LOAD] = self._direct_load

    def run(self, count: int) -> None:
        """At least `count` of each kind, in random order. Raises KbtpError or WrongOctets."""
        while missing := [kind for kind in self._do if self.done[kind] < count]:
            kind = self._possible(self._random.choice(missing))
            self._do[kind]()
            self.done[kind] += 1

    def _possible(self, kind: Kind) -> Kind:
        """`kind`, or what has to come first."""
        blocks = len(self._sealed) + len(self._unsealed)
        if kind is Kind.ALLOC_STORE:
            return kind if blocks < QUOTA else Kind.FREE
        needed = {Kind.STORE: self._unsealed, Kind.DIRECT_LOAD: self._sealed}.get(kind)
        there = blocks if needed is None else len(needed)
        if there:
            return kind
        return Kind.ALLOC_STORE if blocks < QUOTA else Kind.FREE

    def _octets(self) -> bytes:
        """Short ones travel within the request, long ones by RDMA Read."""
        most = self._random.choice((SHORT_BYTES, BLOCK_BYTES)) // self._multiple_bytes
        return self._random.randbytes(self._multiple_bytes * self._random.randint(1, most))

    def _keep(self, block: kbtp.BlockRef, octets: bytes, *, sealed: bool) -> None:
        (self._sealed if sealed else self._unsealed)[block] = octets

    def _any(self) -> tuple[kbtp.BlockRef, bytes]:
        return self._random.choice([*self._sealed.items(), *self._unsealed.items()])

    def _alloc_store(self) -> None:
        octets, seal = self._octets(), self._random.random() < 0.5
        self._keep(self._client.alloc_store(octets, seal=seal), octets, sealed=seal)

    def _store(self) -> None:
        block = self._random.choice(list(self._unsealed))
        octets, seal = self._octets(), self._random.random() < 0.5
        del self._unsealed[block]
        self._keep(self._client.store(block, octets, seal=seal), octets, sealed=seal)

    def _load(self) -> None:
        block, octets = self._any()
        into = bytearray(BLOCK_BYTES)
        _compare(into, self._client.load(block, into=into, allow_unsealed=block in self._unsealed), octets)

    def _direct_load(self) -> None:
        block, octets = self._random.choice(list(self._sealed.items()))
        into = bytearray(BLOCK_BYTES)
        _compare(into, self._client.load(block, into=into, mode="direct"), octets)

    def _free(self) -> None:
        block, _ = self._any()
        self._client.free(block)
        self._sealed.pop(block, None)
        self._unsealed.pop(block, None)


def _compare(into: bytearray, length: int, octets: bytes) -> None:
    if into[:length] != octets or into.count(0, length) != len(into) - length:
        raise WrongOctets(f"a load of {len(octets)} octets brought {length}, other ones than were stored")


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m interop.operations", description=__doc__)
    parser.add_argument("url")
    parser.add_argument("--rnic", default="auto")
    parser.add_argument("--count", type=int, default=1000, help="of each kind")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--timeout", type=float, default=30.0, help="seconds, for connecting")
    parser.add_argument("--operation-timeout", type=float, default=30.0, help="seconds, for each operation")
    parser.add_argument("--multiple", type=int, default=1, help="lengths are multiples of this")
    arguments = parser.parse_args()
    try:
        with kbtp.connect(
            arguments.url,
            quota=QUOTA,
            direct="load",
            timeout_s=arguments.operation_timeout,
            connect_timeout_s=arguments.timeout,
            rnic=open_rnic(arguments.rnic),
        ) as client:
            print("session is open", flush=True)
            workload = Workload(client, arguments.seed, arguments.multiple)
            workload.run(arguments.count)
    except (KbtpError, WrongOctets) as error:
        print(f"{type(error).__name__}: {error}")
        return 1
    print(", ".join(f"{workload.done[kind]} {kind.value}" for kind in Kind if kind in workload.done))
    return 0


if __name__ == "__main__":
    sys.exit(main())
