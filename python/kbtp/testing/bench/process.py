"""Child processes that answer one JSON object a line for each they are told, and what they cost."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TextIO, TypeAlias

from kbtp.errors import KbtpError

Message: TypeAlias = dict[str, Any]

ANSWER_S = 120.0
STOP_S = 5.0
_CPUCLOCK_SCHED = 2


class BenchFailed(KbtpError):
    """A process that is part of a measurement did not do what it should."""


class Child:
    """A process, in a session of its own: Ctrl-C reaches us alone, and we stop it.

    It ends when its standard input does. While it is frozen neither it nor what it has started uses a processor,
    whatever it spins on.
    """

    def __init__(
        self,
        command: Sequence[str],
        *,
        env: Mapping[str, str] | None = None,
        speaks: bool = True,
        cpus: Collection[int] | None = None,
    ) -> None:
        """`speaks`: its standard output is for `answer`, else it goes nowhere. `cpus`: where it may run.

        Raises BenchFailed.
        """
        self.name = Path(command[0]).name if command[1:2] != ["-m"] else command[2]
        try:
            with _running_on(cpus):  # what is started there stays there, with all its threads
                self._process = subprocess.Popen(
                    command,
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE if speaks else subprocess.DEVNULL,
                    env={**os.environ, **(env or {})},
                    start_new_session=True,
                )
        except OSError as error:
            raise BenchFailed(f"cannot start {self.name}: {error.strerror}") from None
        self._unread = b""
        self._frozen = False

    @property
    def pid(self) -> int:
        return self._process.pid

    def ends_within(self, timeout_s: float) -> bool:
        try:
            self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            return False
        return True

    def tell(self, **message: object) -> None:
        """Raises BenchFailed if it has ended."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(message).encode() + b"\n")
            self._process.stdin.flush()
        except (OSError, ValueError):  # a ValueError: we have closed it
            raise self._ended() from None

    def answer(self, timeout_s: float = ANSWER_S) -> Message:
        """Its next line. Raises BenchFailed with the error it reports, or if there is none in time."""
        assert self._process.stdout is not None
        deadline_s = time.monotonic() + timeout_s
        while b"\n" not in self._unread:
            left_s = deadline_s - time.monotonic()
            if left_s <= 0 or not select.select([self._process.stdout], [], [], left_s)[0]:
                raise BenchFailed(f"{self.name} did not answer within {timeout_s:g} s")
            octets = os.read(self._process.stdout.fileno(), 1 << 20)
            if not octets:
                raise self._ended()
            self._unread += octets
        line, _, self._unread = self._unread.partition(b"\n")
        try:
            message: Message = json.loads(line)
        except ValueError:
            raise BenchFailed(f"{self.name} said {line[:200]!r}") from None
        if "error" in message:
            raise BenchFailed(f"{self.name}: {message['error']}")
        return message

    def ask(self, **message: object) -> Message:
        self.tell(**message)
        return self.answer()

    def freeze(self) -> None:
        self._frozen = True
        self._signal(signal.SIGSTOP)

    def thaw(self) -> None:
        self._frozen = False
        self._signal(signal.SIGCONT)

    def stop(self, *, ask_first: bool = True) -> None:
        """End it and wait until it has ended: first asked (its input closes), then made to. Idempotent."""
        if self._frozen:
            self.thaw()
        if self._process.stdin is not None:
            with contextlib.suppress(OSError):
                self._process.stdin.close()
        try:
            self._process.wait(STOP_S if ask_first else 0)
        except subprocess.TimeoutExpired:
            self._signal(signal.SIGKILL)
            self._process.wait()
        if self._process.stdout is not None:
            self._process.stdout.close()

    def _signal(self, number: signal.Signals) -> None:
        """To all of its session: to itself and what it has started."""
        if self._process.poll() is None:  # else the number may be another's by now
            os.killpg(self.pid, number)

    def _ended(self) -> BenchFailed:
        try:
            status = self._process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            return BenchFailed(f"{self.name} closed its output")
        return BenchFailed(f"{self.name} ended with status {status}")


def end_in_order_on_sigterm() -> None:
    """For programs that start children, of which those that are frozen would outlive them."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))


@contextlib.contextmanager
def _running_on(cpus: Collection[int] | None) -> Iterator[None]:
    """This thread, for the time being."""
    if cpus is None:
        yield
        return
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, cpus)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


def python(module: str, *arguments: str) -> list[str]:
    """The command that runs `module` with this interpreter, which finds what we find."""
    return [sys.executable, "-m", module, *arguments]


def environment() -> dict[str, str]:
    """For children that run Python: the path to import from, and no threads in numpy that nobody asked for."""
    return {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path), "OPENBLAS_NUM_THREADS": "1"}


def answer_each(handle: Callable[[Message], Message]) -> int:
    """The child's side: answer each line of standard input until it ends. Returns the exit status."""
    with own_output() as output:
        try:
            for line in sys.stdin:
                print(json.dumps(handle(json.loads(line))), file=output, flush=True)
        except Exception as error:
            report_failure(error, output)
            return 1
    return 0


def own_output() -> TextIO:
    """Standard output for us alone: what libraries print there goes to standard error from now on."""
    output = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    return output


def report_failure(error: Exception, output: TextIO) -> None:
    """As an answer; with a traceback on standard error if nobody raised it on purpose."""
    if not isinstance(error, KbtpError | OSError | MemoryError):
        traceback.print_exc()
    print(json.dumps({"error": f"{error}" or type(error).__name__}), file=output, flush=True)


def cpu_seconds(pids: Iterable[int]) -> float:
    """User and system time that the processes, all threads of each, have had so far.

    Raises BenchFailed if one of them is not there.
    """
    return sum(map(_cpu_seconds, pids))


def _cpu_seconds(pid: int) -> float:
    # The number of its clock as Linux makes it (clock_getcpuclockid(3)): /proc/PID/stat is as coarse as a clock tick.
    try:
        return time.clock_gettime(~pid << 3 | _CPUCLOCK_SCHED)
    except (OSError, OverflowError):  # the latter: of a number that no process has
        raise BenchFailed(f"there is no process {pid}") from None
