"""Which eviction policy keeps more of what request traces ask for: `python -m bench.eviction TRACE...`.

A trace has a JSON object a line, of which `hash_ids` are the blocks of a request in order, as in the traces published
with the Mooncake paper (FAST 2025). A request reads the longest prefix that is there and puts the rest; what counts is
the part of all block references that was read.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from kbtp.cache.eviction import Lru, Policy, S3Fifo

PARTS = (10, 25, 50)


@dataclass(frozen=True, slots=True)
class Contender:
    name: str
    policy: type[Lru] | type[S3Fifo]
    end_first: bool


CONTENDERS = (
    Contender("LRU, in order", Lru, False),
    Contender("LRU, end first", Lru, True),
    Contender("S3-FIFO, end first", S3Fifo, True),
)


def requests_of(path: Path) -> list[list[bytes]]:
    with path.open() as lines:
        return [[b"%d" % number for number in json.loads(line)["hash_ids"]] for line in lines]


def unique_of(requests: Sequence[Sequence[bytes]]) -> int:
    return len({block for request in requests for block in request})


def hit_percent(requests: Sequence[Sequence[bytes]], policy: Policy, capacity: int, *, end_first: bool) -> float:
    held: set[bytes] = set()
    hits = references = 0
    for request in requests:
        found = 0
        while found < len(request) and request[found] in held:
            found += 1
        hits += found
        references += len(request)
        for part in (request[:found], request[found:]):
            for block in reversed(part) if end_first else part:
                if block in held:
                    policy.used(block)
                    continue
                while len(held) >= capacity:
                    victim = policy.victim()
                    assert victim is not None
                    held.discard(victim)
                held.add(block)
                policy.add(block)
    return 100 * hits / references


def main(paths: Sequence[str]) -> None:
    print("| trace | pool |" + "".join(f" {one.name} |" for one in CONTENDERS))
    print("|---|---|" + "---|" * len(CONTENDERS))
    for path in paths:
        requests = requests_of(Path(path))
        unique = unique_of(requests)
        for part in (*PARTS, None):
            capacity = unique if part is None else unique * part // 100
            percents = [hit_percent(requests, one.policy(), capacity, end_first=one.end_first) for one in CONTENDERS]
            pool = "all" if part is None else f"{part} %"
            print(f"| {Path(path).stem} | {pool} |" + "".join(f" {percent:.2f} |" for percent in percents))


if __name__ == "__main__":
    main(sys.argv[1:])
