"""NIXL over UCX, an agent without a progress thread: reads and writes of the target agent's memory, no keys."""

from __future__ import annotations

import importlib
from base64 import b64decode
from collections.abc import Sequence
from typing import Any

from bench.peers import nixl_package
from kbtp.testing.bench.process import BenchFailed
from kbtp.testing.bench.workload import Slots

_DONE, _IN_PROGRESS = "DONE", "PROC"


def api() -> Any:
    """The module with `nixl_agent`, of whichever package is installed."""
    return importlib.import_module(f"{nixl_package()}._api")


class Nixl:
    """`BlockServer` on memory of the target agent: the blocks to load, and behind them those to replace."""

    def __init__(self, slots: Slots, blocks: int, settings: dict[str, Any]) -> None:
        nixl = api()
        config = nixl.nixl_agent_config(enable_prog_thread=False, backends=["UCX"])
        self._agent = agent = nixl.nixl_agent("initiator", config)
        target = agent.add_remote_agent(b64decode(settings["metadata"]))
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
            target.decode() if isinstance(target, bytes) else target, agent.get_xfer_descs(remote, "DRAM")
        )
        self._slots = slots.count
        self._blocks = blocks

    def fill(self, indices: Sequence[int]) -> None:
        self._transfer("WRITE", range(len(indices)), indices)

    def load(self, indices: Sequence[int], first_slot: int) -> None:
        first = self._slots + first_slot
        self._transfer("READ", range(first, first + len(indices)), indices)

    def store(self, indices: Sequence[int], first_slot: int) -> None:
        remote = [self._blocks + index for index in indices]
        self._transfer("WRITE", range(first_slot, first_slot + len(indices)), remote)

    def read_back(self, indices: Sequence[int], first_slot: int) -> None:
        self.load([self._blocks + index for index in indices], first_slot)

    def allocate(self, indices: Sequence[int], first_slot: int) -> None:
        self.store(indices, first_slot)

    def free(self, indices: Sequence[int]) -> None:
        return  # its memory has no keys

    def finish(self) -> None:
        return  # there is always room

    def close(self) -> None:
        self._agent.release_dlist_handle(self._rows)
        self._agent.release_dlist_handle(self._remote)
        self._agent.deregister_memory(self._registered)

    def _transfer(self, operation: str, rows: Sequence[int], remote: Sequence[int]) -> None:
        agent = self._agent
        handle = agent.make_prepped_xfer(operation, self._rows, list(rows), self._remote, list(remote))
        state = agent.transfer(handle)
        while state == _IN_PROGRESS:
            state = agent.check_xfer_state(handle)
        if state != _DONE:
            raise BenchFailed(f"NIXL: a {operation} ended as {state}")
        agent.release_xfer_handle(handle)
