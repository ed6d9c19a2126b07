"""Some initiators in processes of their own, measured at the same time."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import ExitStack

from kbtp.testing.bench.figures import Calls, Cell, Figures, figures_of
from kbtp.testing.bench.process import Child, Message, cpu_seconds, environment, python

WORKING_SET_BYTES = 128 << 20
BLOCKS_MAX = 4096
INITIATOR = python("kbtp.testing.bench.initiator")


def blocks_for(block_bytes: int, slots: int, initiators: int) -> int:
    """Blocks that each initiator loads from: together more than a cache holds, where that is not too many."""
    return max(slots, min(BLOCKS_MAX, WORKING_SET_BYTES // block_bytes // initiators))


def memory_bytes(block_bytes: int, slots: int, initiators: int) -> int:
    """What a target and its initiators need: blocks to load and room to store, a source and a destination each."""
    return initiators * block_bytes * (blocks_for(block_bytes, slots, initiators) + 3 * slots)


class Crew:
    """`count` initiators with a server. Close it, or use it as a context."""

    def __init__(
        self,
        count: int,
        *,
        block_bytes: int,
        blocks: int,
        slots: int,
        settings: Message,
        command: Sequence[str] = INITIATOR,
        server_pids: Callable[[], Sequence[int]] = lambda: (),
        env: Mapping[str, str] | None = None,
        cpus: Collection[int] | None = None,
    ) -> None:
        """Starts them and has each store the `blocks` it will load; `settings` are for its `Connect`.

        Raises BenchFailed.
        """
        self._server_pids = server_pids
        self.told: Message = {}
        with ExitStack() as stack:
            whole_env = {**environment(), **(env or {})}
            self.children = [self._started(stack, Child(command, env=whole_env, cpus=cpus)) for _ in range(count)]
            for child in self.children:
                child.tell(
                    do="open",
                    block_bytes=block_bytes,
                    blocks=blocks,
                    slots=slots,
                    settings=settings,
                )
            for child in self.children:
                self.told = child.answer()
            self._stack = stack.pop_all()

    @staticmethod
    def _started(stack: ExitStack, child: Child) -> Child:
        stack.callback(child.stop)
        return child

    def measure(self, cell: Cell, seconds: float) -> Figures:
        """One round of `cell`, by the first `cell.initiators` of the crew. Raises BenchFailed."""
        at_work = self.children[: cell.initiators]
        pids = self._server_pids()
        before_s = cpu_seconds(pids)
        for child in at_work:
            child.tell(do="measure", operation=cell.operation, outstanding=cell.outstanding, seconds=seconds)
        answers = [child.answer() for child in at_work]
        used_s = cpu_seconds(pids) - before_s if pids else None
        return figures_of(cell, [Calls(**answer) for answer in answers], used_s)

    def close(self) -> None:
        self._stack.close()

    def __enter__(self) -> Crew:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
