"""Published traces through `kbtp replay`: with room for all, what is known of them; with less, no less than LRU."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from bench.cache.behaviour import Requirement
from bench.eviction import PARTS, hit_percent, requests_of, unique_of
from kbtp.cache.eviction import Lru
from kbtp.testing.bench.process import environment

BLOCK_BYTES = 512
TIMEOUT_S = 1800.0


def replayed(trace: Path, *options: str) -> dict[str, Any]:
    """What `kbtp replay` says; of one that says nothing, that it was wrong."""
    command = [
        sys.executable,
        "-m",
        "kbtp",
        "replay",
        str(trace),
        "--block-bytes",
        str(BLOCK_BYTES),
        "--json",
        *options,
    ]
    done = subprocess.run(
        command,
        check=False,
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        timeout=TIMEOUT_S,
    )
    said: dict[str, Any] = json.loads(done.stdout) if done.stdout else {"wrong_octets": -1, "hit_blocks": -1}
    return said


def requirements(traces: Sequence[Path], advance: Callable[[str], None]) -> list[Requirement]:
    made = []
    for trace in traces:
        requests = requests_of(trace)
        unique, references = unique_of(requests), sum(map(len, requests))
        advance(f"{trace.name}, room for all")
        said = replayed(trace)
        percent = 100 * said["hit_blocks"] / references
        known = hit_percent(requests, Lru(), unique, end_first=False)
        holds = abs(percent - known) < 1e-9 and not said["wrong_octets"]
        seen = f"{percent:.2f} % of block references, known {known:.2f} %, {said['wrong_octets']} wrong octets"
        made.append(Requirement(f"{trace.stem}, room for all", holds, seen))
        for part in PARTS:
            advance(f"{trace.name}, room for {part} %")
            said = replayed(trace, "--pool", f"{part}%")
            percent = 100 * said["hit_blocks"] / references
            plain = hit_percent(requests, Lru(), unique * part // 100, end_first=False)
            seen = f"{percent:.2f} %, LRU {plain:.2f} %, {said['wrong_octets']} wrong octets"
            holds = percent >= plain - 1e-9 and not said["wrong_octets"]
            made.append(Requirement(f"{trace.stem}, room for {part} %", holds, seen))
    return made
