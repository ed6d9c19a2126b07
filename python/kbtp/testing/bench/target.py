"""A target in a process of its own: `python -m kbtp.testing.bench.target CONFIG`, where CONFIG is JSON.

It prints one line when it listens, and serves until its standard input ends.
"""

from __future__ import annotations

import json
import logging
import os
import resource
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
    busy: bool = False
    """Keep a thread of the target's own interpreter spinning in pure Python."""


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
    rnic = open_spinning(settings.rnic, settings.spin_us)
    server = Server(config, rnic)
    url = str(server.listen(port=0))
    threading.Thread(target=_stop_with_input, args=(server,), daemon=True).start()
    if settings.busy:
        threading.Thread(target=spin_in_python, daemon=True).start()
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
