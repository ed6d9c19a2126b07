"""How the suite gets an initiator under test to connect.

`--run` names a command. With `{url}` in it, it is started for each case, and its exit status says whether all it had to
do succeeded. Without, it is started once and reads URLs from its standard input, one a line; it answers each, when its
work there is over, with a line `ok` or `failed`. Without `--run` the initiator connects by itself, again and again.
"""

from __future__ import annotations

import os
import select
import shlex
import subprocess
import time
from abc import ABC, abstractmethod

from kbtp.conformance.deviation import Deviation

END_OF_CASE_S = 2.0  # for an initiator to notice that its connection is gone
KILL_S = 5.0


class Initiator(ABC):
    """One initiator under test, that works at one URL at a time."""

    @abstractmethod
    def start(self, url: str) -> None:
        """Make it connect to `url`."""

    @abstractmethod
    def is_there(self) -> bool:
        """It has not ended by itself."""

    @abstractmethod
    def outcome(self, within_s: float) -> bool:
        """Whether all of its work succeeded. Raises `Deviation` if it does not come to an end."""

    @abstractmethod
    def end_of_case(self) -> None:
        """Nothing more is wanted of it at that URL."""

    @abstractmethod
    def stop(self) -> None:
        """No further case comes."""


class ByItself(Initiator):
    """It connects whenever it likes."""

    def start(self, url: str) -> None:
        pass

    def is_there(self) -> bool:
        return True

    def outcome(self, within_s: float) -> bool:
        raise Deviation("an initiator that --run starts", "one that connects by itself")

    def end_of_case(self) -> None:
        pass

    def stop(self) -> None:
        pass


class ForEachCase(Initiator):
    """A process for each case."""

    def __init__(self, command: str) -> None:
        self._command = command
        self._process: subprocess.Popen[bytes] | None = None

    def start(self, url: str) -> None:
        self.stop()
        arguments = [part.replace("{url}", url) for part in shlex.split(self._command)]
        self._process = subprocess.Popen(
            arguments, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )

    def is_there(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def outcome(self, within_s: float) -> bool:
        if self._process is None:
            raise Deviation("an initiator at work", "none that was started")
        try:
            return self._process.wait(within_s) == 0
        except subprocess.TimeoutExpired:
            raise Deviation("an initiator that comes to an end", f"one still at work after {within_s:.1f} s") from None

    def end_of_case(self) -> None:
        self.stop()

    def stop(self) -> None:
        if self._process is not None:
            _end(self._process)
            self._process = None


class LineByLine(Initiator):
    """A process that reads one URL after the other; one that hangs is replaced."""

    def __init__(self, command: str, end_of_case_s: float = END_OF_CASE_S) -> None:
        self._command = command
        self._end_of_case_s = end_of_case_s
        self._process: subprocess.Popen[bytes] | None = None
        self._answer = b""
        self._busy = False

    def start(self, url: str) -> None:
        if self._process is None or self._process.poll() is not None:
            self._process = subprocess.Popen(
                shlex.split(self._command), stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
            )
        assert self._process.stdin is not None
        self._answer, self._busy = b"", True
        self._process.stdin.write(f"{url}\n".encode())
        self._process.stdin.flush()

    def is_there(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def outcome(self, within_s: float) -> bool:
        if not self._ended(within_s):
            raise Deviation("an initiator that comes to an end", f"one still at work after {within_s:.1f} s")
        return self._answer == b"ok\n"

    def end_of_case(self) -> None:
        if self._busy and not self._ended(self._end_of_case_s):
            self.stop()

    def stop(self) -> None:
        if self._process is not None:
            _end(self._process)
            self._process, self._busy = None, False

    def _ended(self, within_s: float) -> bool:
        """Its answer has come, or it has ended itself."""
        if self._process is None or self._process.stdout is None:
            return True
        descriptor = self._process.stdout.fileno()
        end_s = time.monotonic() + within_s
        while not self._answer.endswith(b"\n"):
            left_s = end_s - time.monotonic()
            if left_s <= 0 or not select.select([descriptor], [], [], left_s)[0]:
                return False
            octets = os.read(descriptor, 1 << 10)
            if not octets:
                break
            self._answer += octets
        self._busy = False
        return True


def _end(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    try:
        process.wait(KILL_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            pipe.close()


def initiators_of(command: str | None, at_once: int, *, end_of_case_s: float = END_OF_CASE_S) -> list[Initiator]:
    """One that reads URLs from its standard input is replaced if it is at work so long after its case."""
    if command is None:
        return [ByItself()]
    if "{url}" in command:
        return [ForEachCase(command) for _ in range(at_once)]
    return [LineByLine(command, end_of_case_s) for _ in range(at_once)]
