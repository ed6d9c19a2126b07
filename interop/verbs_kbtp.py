"""A KBTP target and an initiator in one process, over one RNIC: random operations, contents checked.

`python -m interop.verbs_kbtp RNIC ADDRESS OPERATIONS [records] [direct]`
"""

from __future__ import annotations

import random
import sys
import time
from dataclasses import replace

import kbtp
from kbtp.rnic import open_rnic
from kbtp.target.config import TargetConfig
from kbtp.target.server import Server
from kbtp.types import DIRECT_MODES


def main(rnic_name: str, address: str, count: int, *options: str) -> None:
    rnic = open_rnic(rnic_name)
    config = TargetConfig(block_size_bytes=256 * 1024, pool_blocks=64)
    if "direct" in options:
        config = replace(config, direct=DIRECT_MODES, direct_blocks=32)
    server = Server(config, rnic)
    where = server.listen(address, 0)
    server.start()
    client = kbtp.connect(
        f"kbtp://{address}:{where.port}",
        timeout_s=30,
        rnic=rnic_name,
        records="records" in options,
        direct="load,alloc" if "direct" in options else "none",
    )
    print("connected", client.features, flush=True)
    modes: list = ["request", "direct"] if "direct" in options else ["request"]
    rng = random.Random(1)
    blocks: dict = {}
    done: dict[str, int] = {}
    begin = time.monotonic()
    buffer = bytearray(256 * 1024)
    for _ in range(count):
        what = rng.choice(["alloc", "alloc", "store", "load", "load", "free"])
        if what == "alloc" and len(blocks) < 4:
            data = rng.randbytes(rng.choice([10, 3000, 100_000, 256 * 1024]))
            # Where only a device may move Head the target takes no ticket itself: ALLOC_STORE is TARGET_ERROR there.
            mode = rng.choice(modes if rnic.capabilities.atomics_with_processors else modes[-1:])
            done[f"alloc {mode}"] = done.get(f"alloc {mode}", 0) + 1
            blocks[client.alloc_store(data, seal=rng.random() < 0.5, mode=mode)] = data
        elif what == "load" and blocks:
            block = rng.choice(list(blocks))
            length = client.load(block, into=buffer, allow_unsealed=True, mode=rng.choice(modes))
            assert buffer[:length] == blocks[block], block
        elif what == "free" and blocks:
            block = rng.choice(list(blocks))
            client.free(block)
            del blocks[block]
        else:
            continue
        done[what] = done.get(what, 0) + 1
    print(done, time.monotonic() - begin, dict(rnic.punts), flush=True)
    client.close()
    server.stop()
    print("all well")


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]), *sys.argv[4:])
