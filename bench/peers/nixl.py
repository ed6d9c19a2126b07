"""NIXL over UCX, an initiator without a progress thread: reads and writes of the target agent's memory."""

from __future__ import annotations

import importlib
import importlib.util
from base64 import b64decode, b64encode
from collections.abc import Sequence
from typing import Any

import numpy as np

from bench.peers.one_sided import OneSided
from kbtp.testing.bench.process import BenchFailed, Message
from kbtp.testing.bench.workload import Call, Slots

PACKAGES = ("nixl_cu12", "nixl_cu13", "nixl")
_DONE, _IN_PROGRESS = "DONE", "PROC"


def _api() -> Any:
    """The module with `nixl_agent`, of whichever package is installed."""
    package = next(name for name in PACKAGES if importlib.util.find_spec(name) is not None)
    return importlib.import_module(f"{package}._api")


def target(octets: int) -> tuple[object, Message]:
    """What must live for the memory to be there, and what initiators need to know."""
    nixl = _api()
    agent = nixl.nixl_agent("target", nixl.nixl_agent_config(backends=["UCX"]))
    memory = np.zeros(octets, np.uint8)
    agent.register_memory(agent.get_reg_descs([(memory.ctypes.data, memory.nbytes, 0, "")], "DRAM"))
    metadata = b64encode(agent.get_agent_metadata()).decode()
    return (agent, memory), {"metadata": metadata, "address": memory.ctypes.data}


class Nixl(OneSided):
    def __init__(self, slots: Slots, blocks: int, settings: Message) -> None:
        super().__init__(slots, blocks)
        nixl = _api()
        config = nixl.nixl_agent_config(enable_prog_thread=False, backends=["UCX"])
        self._agent = agent = nixl.nixl_agent("initiator", config)
        peer = agent.add_remote_agent(b64decode(settings["metadata"]))
        size = slots.block_bytes
        rows = [
            (array.ctypes.data + slot * size, size, 0)
            for array in (slots.source, slots.destination)
            for slot in range(slots.count)
        ]
        areas = [(array.ctypes.data, array.nbytes, 0, "") for array in (slots.source, slots.destination)]
        self._registered = agent.get_reg_descs(areas, "DRAM")
        agent.register_memory(self._registered)
        self._rows = agent.prep_xfer_dlist("NIXL_INIT_AGENT", agent.get_xfer_descs(rows, "DRAM"))
        remote = [(settings["address"] + index * size, size, 0) for index in range(blocks + slots.count)]
        self._remote = agent.prep_xfer_dlist(
            peer.decode() if isinstance(peer, bytes) else peer, agent.get_xfer_descs(remote, "DRAM")
        )

    def read(self, slots: Sequence[int], remote: Sequence[int]) -> Call:
        return self._transfer("READ", [self._slots.count + slot for slot in slots], list(remote))

    def write(self, slots: Sequence[int], remote: Sequence[int]) -> Call:
        return self._transfer("WRITE", list(slots), list(remote))

    def close(self) -> None:
        self._agent.release_dlist_handle(self._rows)
        self._agent.release_dlist_handle(self._remote)
        self._agent.deregister_memory(self._registered)

    def _transfer(self, operation: str, rows: list[int], remote: list[int]) -> Call:
        agent = self._agent

        def transfer() -> None:
            handle = agent.make_prepped_xfer(operation, self._rows, rows, self._remote, remote)
            state = agent.transfer(handle)
            while state == _IN_PROGRESS:
                state = agent.check_xfer_state(handle)
            if state != _DONE:
                raise BenchFailed(f"NIXL: a {operation} ended as {state}")
            agent.release_xfer_handle(handle)

        return transfer
