"""An initiator in a process of its own: `python -m kbtp.testing.bench.initiator`, driven as `Crew` does."""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict
from functools import partial
from typing import Any, TypeAlias

import kbtp
from kbtp.initiator.client import Client
from kbtp.testing.bench.process import BenchFailed, Message, answer_each
from kbtp.testing.bench.rnics import open_spinning
from kbtp.testing.bench.workload import BlockServer, Call, Slots, Workload
from kbtp.types import BlockRef


class KbtpBlocks:
    """`BlockServer` on a session with a target. One outstanding is the single form of a call, more the batch form."""

    def __init__(self, client: Client, slots: Slots) -> None:
        self._client = client
        # The caller's own memory, registered once, as an engine does with its KV cache.
        client.register(slots.source)
        client.register(slots.destination)
        self._sources = [row.data for row in slots.source]
        self._destinations = [row.data for row in slots.destination]
        self._sealed: dict[int, BlockRef] = {}
        self._open: dict[int, BlockRef] = {}
        self._last: Callable[[Sequence[int]], list[BlockRef]] = self._opened
        """Finds what was stored last."""

    def fill(self, indices: Sequence[int]) -> None:
        stored = self._client.alloc_store_many(self._sources[: len(indices)]).raise_for_status()
        self._sealed.update(zip(indices, stored.refs, strict=True))

    def load(self, indices: Sequence[int], first_slot: int) -> Call:
        if len(indices) == 1:
            return partial(self._client.load, self._sealed[indices[0]], into=self._destinations[first_slot])
        blocks = [self._sealed[index] for index in indices]
        into = self._destinations[first_slot : first_slot + len(blocks)]
        return lambda: self._client.load_many(blocks, into).raise_for_status()

    def store(self, indices: Sequence[int], first_slot: int) -> Call:
        if not self._open:
            opened = self._client.alloc_store_many(self._sources, seal=False).raise_for_status()
            self._open = dict(enumerate(opened.refs))
        self._last = self._opened
        if len(indices) == 1:
            return partial(self._client.store, self._open[indices[0]], self._sources[first_slot], seal=False)
        blocks = self._opened(indices)
        data = self._sources[first_slot : first_slot + len(blocks)]
        return lambda: self._client.store_many(blocks, data, seal=False).raise_for_status()

    def read_back(self, indices: Sequence[int], first_slot: int) -> Call:
        blocks = self._last(indices)
        into = self._destinations[first_slot : first_slot + len(blocks)]
        return lambda: self._client.load_many(blocks, into, allow_unsealed=True).raise_for_status()

    def allocate(self, indices: Sequence[int], first_slot: int) -> Call:
        data = self._sources[first_slot : first_slot + len(indices)]

        def one() -> None:
            block = self._client.alloc_store(data[0])
            self._last = lambda _: [block]

        def many() -> None:
            stored = self._client.alloc_store_many(data).raise_for_status()
            self._last = lambda _: stored.refs

        return one if len(indices) == 1 else many

    def free(self, indices: Sequence[int]) -> Call:
        blocks = self._last(indices)
        if len(blocks) == 1:
            return partial(self._client.free, blocks[0])
        return lambda: self._client.free_many(blocks).raise_for_status()

    def finish(self) -> None:
        if self._open:
            self._client.free_many(list(self._open.values())).raise_for_status()
            self._open = {}

    def close(self) -> None:
        self._client.close()

    def _opened(self, indices: Sequence[int]) -> list[BlockRef]:
        return [self._open[index] for index in indices]


def connect(slots: Slots, blocks: int, settings: dict[str, Any]) -> tuple[BlockServer, int, Message]:
    """A session for `blocks` blocks, or as many as the target grants. Raises BenchFailed if those are too few."""
    rnic = open_spinning(settings["rnic"], settings["spin_us"])
    client = kbtp.connect(
        settings["url"],
        quota=blocks + slots.count,
        handles=settings.get("handles", 0),
        name="kbtp bench",
        namespace=settings.get("namespace"),
        key_file=settings.get("key_file"),
        rnic=rnic,
    )
    granted = client.quota_blocks
    if granted < 2 * slots.count:
        raise BenchFailed(f"the target grants {granted} blocks; to measure, {2 * slots.count} are needed")
    return KbtpBlocks(client, slots), min(blocks, granted - slots.count), {"rnic": rnic.name}


Connect: TypeAlias = Callable[[Slots, int, dict[str, Any]], tuple[BlockServer, int, Message]]


class Worker:
    """Answers `open` and `measure`; what `connect` opens is what is measured."""

    def __init__(self, connect: Connect = connect) -> None:
        self._connect = connect
        self._server: BlockServer | None = None
        self._workload: Workload | None = None

    def __call__(self, message: Message) -> Message:
        if message["do"] == "open":
            slots = Slots(message["slots"], message["block_bytes"])
            self._server, blocks, told = self._connect(slots, message["blocks"], message["settings"])
            self._workload = Workload(self._server, slots, blocks, message["settings"].get("stride", 1))
            gc.freeze()  # what this process has made up to here is not the client's garbage
            return {**told, "blocks": blocks}
        if self._workload is None:
            raise BenchFailed("nothing is open")
        calls = self._workload.measure(message["operation"], message["outstanding"], message["seconds"])
        return asdict(calls)

    def run(self) -> int:
        """Answer until standard input ends, then leave the server in order. Returns the exit status."""
        status = answer_each(self)
        if self._server is not None and status == 0:
            self._server.close()
        return status


if __name__ == "__main__":
    sys.exit(Worker().run())
