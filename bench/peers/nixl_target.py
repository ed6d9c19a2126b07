"""NIXL's target: an agent with OCTETS of registered memory. It prints one line and lives until it is killed."""

from __future__ import annotations

import json
import sys
from base64 import b64encode

import numpy as np

from bench.peers.nixl_client import api
from kbtp.testing.bench.process import own_output


def main() -> None:
    output = own_output()
    nixl = api()
    agent = nixl.nixl_agent("target", nixl.nixl_agent_config(backends=["UCX"]))
    memory = np.zeros(int(sys.argv[1]), np.uint8)
    agent.register_memory(agent.get_reg_descs([(memory.ctypes.data, memory.nbytes, 0, "")], "DRAM"))
    metadata = b64encode(agent.get_agent_metadata()).decode()
    print(json.dumps({"metadata": metadata, "address": memory.ctypes.data}), file=output, flush=True)
    sys.stdin.read()


if __name__ == "__main__":
    main()
