"""The target of a peer in a process of its own: `python -m bench.peers.target NAME OCTETS [MORE...]`.

It prints one line, what initiators need to know, and lives until its standard input ends.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from importlib import import_module

from kbtp.testing.bench.process import Message, own_output, report_failure

TARGETS = {
    "bare-sockets": ("bench.peers.bare_sockets", "target"),
    "nixl": ("bench.peers.nixl", "target"),
    "peercache": ("bench.peers.peercache", "target"),
    "mooncake-engine": ("bench.peers.mooncake", "engine_target"),
    "mooncake-store": ("bench.peers.mooncake", "store_target"),
}


def main(name: str, octets: str, *arguments: str) -> int:
    output = own_output()
    module, function = TARGETS[name]
    try:
        start: Callable[..., tuple[object, Message]] = getattr(import_module(module), function)
        _alive, told = start(int(octets), *arguments)
    except Exception as error:
        report_failure(error, output)
        return 1
    print(json.dumps(told), file=output, flush=True)
    sys.stdin.read()
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
