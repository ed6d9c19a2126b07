"""KBTP between this machine and the guest: our package runs inside, over any RNIC that is there.

`target_in_guest` and `target_here` serve, `operate_in_guest` and `operate_here` are random operations on them. An
RNIC is its name for `open_rnic`, so what is checked over one can be checked over another.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from interop.checks import ROOT, CheckFailed
from interop.guest.machine import HOST_ADDRESS, Guest
from interop.operations import BLOCK_BYTES, QUOTA
from interop.ready_python import LISTENS
from kbtp.limits import DEFAULT_PORT

PORTS = (DEFAULT_PORT,)
_ENVIRONMENT = "env PYTHONPATH=/mnt/python:/mnt"
_READY_PYTHON = "/mnt/interop/ready_python.py"
PYTHON_IN_GUEST = f"{_ENVIRONMENT} python3 -IS {_READY_PYTHON}"
"""In a guest that `prepared` has made ready."""

START_S = 300.0
"""Without KVM the first import of everything takes its time."""

OPERATIONS_S = 300.0

_SERVE = ["--block-size", str(BLOCK_BYTES), "--pool-blocks", "64", "--max-quota", str(QUOTA), "--direct", "load"]
_READY = "kbtp://"


@contextmanager
def prepared(guest: Guest) -> Iterator[None]:
    """A Python there has everything imported, and runs what `PYTHON_IN_GUEST` is asked to run."""
    with guest.start(f"exec {_ENVIRONMENT} python3 {_READY_PYTHON} serve") as call:
        call.await_line(LISTENS, START_S)
        yield


@contextmanager
def target_in_guest(guest: Guest, rnic: str, *options: str) -> Iterator[str]:
    """`kbtp serve` there; its URL here."""
    serve = f"exec {PYTHON_IN_GUEST} -m kbtp serve --host 0.0.0.0 --rnic {rnic} {' '.join([*_SERVE, *options])}"
    with guest.start(serve) as call:
        call.await_line(_READY, START_S)
        yield f"kbtp://127.0.0.1:{guest.port(DEFAULT_PORT)}"


@contextmanager
def target_here(rnic: str, *options: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """`kbtp serve` on this machine: its process, and its URL in the guest."""
    command = [sys.executable, "-m", "kbtp", "serve", "--port", "0", "--rnic", rnic, *_SERVE, *options]
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "python")}
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True, env=environment) as process:
        try:
            assert process.stdout is not None
            port = process.stdout.readline().partition(_READY)[2].split()[0].rpartition(":")[2]
            yield process, f"kbtp://{HOST_ADDRESS}:{port}"
        finally:
            process.kill()


def operate_here(url: str, rnic: str, *, count: int, multiple_bytes: int = 1) -> str:
    """What was done. Raises CheckFailed. Over siw lengths are multiples of 4: see docs/testing.md."""
    return _here("operations", url, "--rnic", rnic, "--count", str(count), "--multiple", str(multiple_bytes))


def connect_here(url: str, rnic: str, *, count: int, multiple_bytes: int) -> str:
    """Sessions one after the other: what became of them. Raises CheckFailed."""
    return _here("connections", url, "--rnic", rnic, "--count", str(count), "--multiple", str(multiple_bytes))


def _here(program: str, *arguments: str) -> str:
    command = [sys.executable, "-m", f"interop.{program}", *arguments]
    environment = {**os.environ, "PYTHONPATH": f"{ROOT / 'python'}:{ROOT}"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=OPERATIONS_S, check=False)
    if done.returncode:
        raise CheckFailed(done.stdout + done.stderr)
    return done.stdout


def operate_in_guest(guest: Guest, url: str, rnic: str, *, count: int, multiple_bytes: int = 1) -> str:
    """As `operate_here`, from the guest."""
    done = guest.run(
        f"{PYTHON_IN_GUEST} -m interop.operations {url} --rnic {rnic} --count {count} --multiple {multiple_bytes}",
        timeout_s=START_S + OPERATIONS_S,
    )
    if done.status:
        raise CheckFailed(done.output)
    return done.output
