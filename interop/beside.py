"""What runs beside a suite, in processes of its own: bare_install.py, which needs no guest, and other suites."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from interop.checks import ROOT

NAME = "the wheel where there is no rdma-core: import, serve and doctor work"
TIMEOUT_S = 600.0


class BareInstall:
    """Under way in a process of its own."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process

    def why_not(self) -> str | None:
        """Once it is done: what does not hold."""
        try:
            output, _ = self._process.communicate(timeout=TIMEOUT_S)
        except subprocess.TimeoutExpired:
            return f"not done after {TIMEOUT_S:.0f} s"
        return output if self._process.returncode else None


@contextmanager
def bare_install() -> Iterator[BareInstall]:
    command = [sys.executable, str(ROOT / "interop" / "bare_install.py")]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    with process:
        try:
            yield BareInstall(process)
        finally:
            process.terminate()


@contextmanager
def suite(name: str, arguments: Sequence[str]) -> Iterator[subprocess.Popen[bytes]]:
    """`python -m interop` for the checks of that suite alone; its status says if they hold."""
    command = ["setpriv", "--pdeathsig", "TERM", sys.executable, "-m", "interop", *arguments, "--suite", name]
    with subprocess.Popen(command) as process:
        try:
            yield process
        finally:
            process.terminate()
