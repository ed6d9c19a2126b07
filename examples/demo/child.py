"""Child processes that are always ended, whatever becomes of the demo."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import events

PATIENCE_S = 120.0
"""How long a child may say nothing before it counts as stuck."""
STOP_S = 10.0
"""How long a child may take to end after SIGTERM before it is killed."""

_LONGEST_LINE_BYTES = 1 << 20
_HERE = Path(__file__).parent

# Numpy's matrix products use one thread unless told otherwise. It must be the same number in all model processes,
# and more of them wait for each other in a busy loop: on a machine whose processors are taken (a container, a
# build machine) the prefill of this small model then takes ten times as long, not half.
THREADS = {name: os.environ.get(name, "1") for name in ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS")}


@dataclass(frozen=True, slots=True)
class Serving:
    """Where a target is, and the index beside it; empty if it has none."""

    url: str
    index_url: str


class DemoFailed(Exception):
    """The demo did not show what it is to show; says why."""


class Child:
    """One running process; `name` is what messages call it."""

    def __init__(self, name: str, process: Process) -> None:
        self.name = name
        self._process = process

    async def tell(self, message: events.Message) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(events.to_line(message).encode())
        await self._process.stdin.drain()

    async def hear(
        self, expected: type[events.M], progress: Callable[[events.Progress], None] | None = None
    ) -> events.M:
        """The child's next message, which has to be an `expected` one; any `Progress` goes to `progress`."""
        while True:
            message = events.from_line(await self._line())
            if isinstance(message, expected):
                return message
            if progress is None or not isinstance(message, events.Progress):
                raise DemoFailed(f"the {self.name} process said {message} where {expected.__name__} was expected")
            progress(message)

    async def hear_serving(self) -> Serving:
        """The one line that `kbtp serve --json` prints as soon as it can be connected to."""
        line = await self._line()
        try:
            said = json.loads(line)
            return Serving(said["url"], said.get("index", ""))
        except (ValueError, TypeError, KeyError):
            raise DemoFailed(f"the {self.name} process gave no address: {line.strip()!r}") from None

    async def end(self) -> None:
        """Wait until the child has ended by itself, its work done."""
        await self._ended(PATIENCE_S)

    async def stop(self) -> None:
        """SIGTERM, and a clean end is expected."""
        self._process.send_signal(signal.SIGTERM)
        await self._ended(STOP_S)

    async def reap(self) -> None:
        """End the child, if it still runs, by SIGTERM or else by SIGKILL."""
        if self._process.returncode is not None:
            return
        try:
            self._process.terminate()
            await asyncio.wait_for(self._process.wait(), STOP_S)
        except asyncio.TimeoutError:
            pass
        finally:
            if self._process.returncode is None:
                self._process.kill()

    async def _line(self) -> str:
        assert self._process.stdout is not None
        try:
            line = await asyncio.wait_for(self._process.stdout.readline(), PATIENCE_S)
        except asyncio.TimeoutError:
            raise DemoFailed(f"the {self.name} process has said nothing for {PATIENCE_S:.0f} s") from None
        if not line:
            await self._ended(STOP_S)
            raise DemoFailed(f"the {self.name} process ended too early")
        return line.decode()

    async def _ended(self, patience_s: float) -> None:
        try:
            code = await asyncio.wait_for(self._process.wait(), patience_s)
        except asyncio.TimeoutError:
            raise DemoFailed(f"the {self.name} process did not end within {patience_s:.0f} s") from None
        if code != 0:
            raise DemoFailed(f"the {self.name} process ended with exit code {code}")


@asynccontextmanager
async def running(name: str, *arguments: str, environment: Mapping[str, str]) -> AsyncIterator[Child]:
    """Python with `arguments`, in a session of its own: Ctrl-C goes to the demo alone, which ends its children."""
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        *arguments,
        stdin=PIPE,
        stdout=PIPE,
        env={**os.environ, **environment},
        limit=_LONGEST_LINE_BYTES,
        start_new_session=True,
    )
    child = Child(name, process)
    try:
        yield child
    finally:
        await child.reap()


def script(name: str) -> str:
    """The path of the demo's module `name`, to run as a process."""
    return str(_HERE / f"{name}.py")


def serving(pool_blocks: int, block_bytes: int, *options: str) -> AbstractAsyncContextManager[Child]:
    """A target, on a port that is free."""
    sizes = ["--block-size", str(block_bytes), "--pool-blocks", str(pool_blocks)]
    always = ["--port", "0", "--log-level", "warning", "--json"]
    return running("target", "-m", "kbtp", "serve", *always, *sizes, *options, environment={})
