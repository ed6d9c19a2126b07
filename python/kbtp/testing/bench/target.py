"""A target in a process of its own: `python -m kbtp.testing.bench.target CONFIG`, where CONFIG is JSON.

It prints one line when it listens, and serves until its standard input ends.
"""

from __future__ import annotations

import json
import logging
import os
import resource
import subprocess
import sys
import threading
from collections.abc import Collection
from dataclasses import asdict, dataclass

from kbtp.target.config import TargetConfig
from kbtp.target.server import Server
from kbtp.testing.bench.process import BenchFailed, Child, environment, python, report_failure
from kbtp.testing.bench.rnics import open_spinning


@dataclass(frozen=True, slots=True)
class TargetSettings:
    """What to serve, and on what."""

    block_bytes: int
    pool_blocks: int
    rnic: str = "auto"
    spin_us: int | None = None
    table_handles: int = 0
    max_sessions: int = 64
    threads: int = 1
    """Event loops, on an RNIC that can have several."""
    forced_punts: float = 0.0
    """The part of requests that an RNIC that executes sequences leaves to Python though it need not."""
    beside: str = ""
    """What spins in pure Python beside it: `THREAD`, one of its own interpreter, or `PROCESS`, one of another's."""


THREAD, PROCESS = "thread", "process"
# Ends with its parent, however that ends.
_SPIN = "import os; parent = os.getppid()\nwhile os.getppid() == parent:\n for _ in range(1_000_000): pass"


class TargetProcess(Child):
    """Raises BenchFailed if it cannot be started."""

    def __init__(self, settings: TargetSettings, *, cpus: Collection[int] | None = None) -> None:
        command = python("kbtp.testing.bench.target", json.dumps(asdict(settings)))
        super().__init__(command, env=environment(), cpus=cpus)
        try:
            ready = self.answer()
        except BenchFailed:
            self.stop()
            raise
        self.url: str = ready["url"]
        self.rnic: str = ready["rnic"]


def allow_many_files() -> None:
    """As many file descriptors as the system lets this process have."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def spin_in_python() -> None:
    while True:
        pass


def serve(settings: TargetSettings) -> None:
    allow_many_files()
    logging.getLogger("kbtp").setLevel(logging.ERROR)  # initiators that are stopped are no news
    config = TargetConfig(
        block_size_bytes=settings.block_bytes,
        pool_blocks=settings.pool_blocks,
        table_handles=settings.table_handles,
        max_sessions=settings.max_sessions,
        name="kbtp bench",
    )
    rnic = open_spinning(settings.rnic, settings.spin_us, settings.forced_punts)
    server = Server(config, rnic, threads=settings.threads)
    url = str(server.listen(port=0))
    threading.Thread(target=_stop_with_input, args=(server,), daemon=True).start()
    if settings.beside == THREAD:
        threading.Thread(target=spin_in_python, daemon=True).start()
    elif settings.beside == PROCESS:  # of the same session, as that is what processor time is shared out by
        subprocess.Popen([sys.executable, "-c", _SPIN], stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
    print(json.dumps({"url": url, "rnic": rnic.name}), flush=True)
    server.run()


def _stop_with_input(server: Server) -> None:
    # Not through sys.stdin: a thread that is still inside its lock at exit would abort the interpreter.
    while os.read(0, 1 << 10):
        continue
    server.request_stop()


def main() -> int:
    try:
        serve(TargetSettings(**json.loads(sys.argv[1])))
    except Exception as error:
        report_failure(error, sys.stdout)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
