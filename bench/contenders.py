"""Who is compared: each with a server and clients in processes of their own, frozen while others have their turn."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Protocol

from bench.peers import PeerKind
from kbtp.testing.bench.crew import Crew, blocks_for
from kbtp.testing.bench.figures import ALLOC, ALLOC_ALONE, LOAD, STORE, Cell, Figures
from kbtp.testing.bench.process import Child, Message
from kbtp.testing.bench.target import TargetProcess, TargetSettings

SLOTS = 32
BLOCK_SIZE_MULTIPLE_BYTES = 64


@dataclass(frozen=True, slots=True)
class Places:
    """Processors for servers and for clients; None: wherever the system puts them."""

    servers: frozenset[int] | None = None
    clients: frozenset[int] | None = None


ANYWHERE = Places()


def halves() -> Places:
    """Servers on one half of the processors, clients on the other, where there are two.

    Otherwise it is for the system to say, anew in each round, whether a client and its server share one: the time of a
    small exchange then differs severalfold from round to round, on anybody's part.
    """
    processors = sorted(os.sched_getaffinity(0))
    half = len(processors) // 2
    return Places(frozenset(processors[half:]), frozenset(processors[:half])) if half else ANYWHERE


class Contender(Protocol):
    """Between `open` and `close` it holds blocks of one size, and waits frozen for its turns."""

    @property
    def name(self) -> str: ...
    @property
    def operations(self) -> Sequence[str]: ...
    def open(self, block_bytes: int, initiators: int) -> None: ...
    def measure(self, cell: Cell, seconds: float) -> Figures: ...
    def close(self) -> None: ...


class _Processes:
    """The processes of a contender. They run only while it measures."""

    def __init__(self) -> None:
        self._stack = ExitStack()
        self._children: list[Child] = []

    def keep(self, child: Child, *, ask_first: bool = True) -> None:
        self._stack.callback(child.stop, ask_first=ask_first)
        self._children.append(child)

    def enter(self, crew: Crew) -> None:
        self._stack.enter_context(crew)
        self._children += crew.children

    def freeze(self) -> None:
        for child in self._children:
            child.freeze()

    def thaw(self) -> None:
        for child in self._children:
            child.thaw()

    def close(self) -> None:
        # Each is thawed by being stopped; all of them first, as one may wait for another to say goodbye.
        self.thaw()
        self._children = []
        self._stack.close()


class Kbtp:
    """A target and initiators of this project."""

    operations: Sequence[str] = (LOAD, STORE, ALLOC, ALLOC_ALONE)

    def __init__(
        self,
        name: str,
        *,
        rnic: str,
        spin_us: int,
        places: Places = ANYWHERE,
        threads: int = 1,
        forced_punts: float = 0.0,
        settings: Callable[[TargetSettings], TargetSettings] = lambda settings: settings,
        handles: int = 0,
        blocks: int | None = None,
        stride: int = 1,
        beside: Callable[[TargetProcess], Child | None] = lambda target: None,
    ) -> None:
        """`threads` and `forced_punts` are the target's, `settings` changes others of it; `beside` starts a process
        that runs next to it.

        `blocks` is how many to store instead of what `blocks_for` says, of which every `stride`th is loaded;
        `handles` is how many to ask for.
        """
        self.name = name
        self._rnic = rnic
        self._spin_us = spin_us
        self._places = places
        self._settings = settings
        self._threads = threads
        self._forced_punts = forced_punts
        self._handles = handles
        self._blocks = blocks
        self._stride = stride
        self._beside = beside
        self._processes = _Processes()
        self.told: Message = {}

    def open(self, block_bytes: int, initiators: int) -> None:
        blocks = self._blocks or blocks_for(block_bytes, SLOTS, initiators)
        size = block_bytes + -block_bytes % BLOCK_SIZE_MULTIPLE_BYTES
        pool_blocks = (blocks + SLOTS) * initiators
        settings = self._settings(
            TargetSettings(
                size,
                pool_blocks,
                self._rnic,
                self._spin_us,
                threads=self._threads,
                forced_punts=self._forced_punts,
            )
        )
        try:
            target = TargetProcess(settings, cpus=self._places.servers)
            self._processes.keep(target)
            self._target = target
            reach: Message = {"url": target.url, "rnic": self._rnic, "spin_us": self._spin_us}
            crew = Crew(
                initiators,
                block_bytes=block_bytes,
                blocks=blocks,
                slots=SLOTS,
                settings={**reach, "handles": self._handles, "stride": self._stride},
                server_pids=lambda: [target.pid],
                cpus=self._places.clients,
            )
            self._processes.enter(crew)
            self._crew = crew
            self.told = {"target": target.rnic, "initiators": crew.told["rnic"]}
            beside = self._beside(target)
            if beside is not None:
                self._processes.keep(beside, ask_first=False)
        except BaseException:
            self._processes.close()
            raise
        self._processes.freeze()

    def measure(self, cell: Cell, seconds: float) -> Figures:
        self._processes.thaw()
        figures = self._crew.measure(cell, seconds)
        self._processes.freeze()
        return figures

    def close(self) -> None:
        self._processes.close()


class Peer:
    """Another block or key-value store, with a client of `bench.peers`."""

    operations: Sequence[str] = (LOAD, STORE)

    def __init__(self, kind: PeerKind, places: Places = ANYWHERE) -> None:
        self.name = kind.name
        self.is_judged = kind.is_judged
        self._places = places
        self._kind = kind
        self._processes = _Processes()

    def open(self, block_bytes: int, initiators: int) -> None:
        blocks = blocks_for(block_bytes, SLOTS, initiators)
        octets = (blocks + SLOTS) * initiators * block_bytes
        try:
            servers, reach = self._kind.start(octets, self._places.servers)
            for server in servers:
                self._processes.keep(server, ask_first=False)
            command, env = self._kind.client()
            crew = Crew(
                initiators,
                block_bytes=block_bytes,
                blocks=blocks,
                slots=SLOTS,
                settings=reach,
                command=command,
                server_pids=lambda: [server.pid for server in servers],
                env=env,
                cpus=self._places.clients,
            )
            self._processes.enter(crew)
            self._crew = crew
        except BaseException:
            self._processes.close()
            raise
        self._processes.freeze()

    def measure(self, cell: Cell, seconds: float) -> Figures:
        self._processes.thaw()
        figures = self._crew.measure(cell, seconds)
        self._processes.freeze()
        return figures

    def close(self) -> None:
        self._processes.close()
