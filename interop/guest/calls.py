"""A command that runs in the guest, seen from this machine; `agent` has the other half."""

from __future__ import annotations

import socket
import struct
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from types import TracebackType

_WORD = struct.Struct(">I")
_CONNECT_S = 10.0


class CallFailed(Exception):
    """The guest did not run the command to its end in time; the text has what it said until then."""


@dataclass(frozen=True, slots=True)
class Finished:
    status: int
    output: str
    """Standard output and standard error as they came."""


class Call:
    """One script in the guest. Closing it kills what still runs."""

    def __init__(self, agent: tuple[str, int], script: str) -> None:
        self._script = script
        self._deadline_s: float | None = None
        self._output = b""
        self._socket = socket.create_connection(agent, timeout=_CONNECT_S)
        octets = script.encode()
        self._socket.sendall(_WORD.pack(len(octets)) + octets)
        self._status: int | None = None

    def __enter__(self) -> Call:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        self._socket.close()

    def await_line(self, part: str, timeout_s: float) -> str:
        """The next line of the output that contains `part`. Raises CallFailed."""
        seen = len(self._output)
        self._deadline_s = time.monotonic() + timeout_s
        while True:
            *lines, _ = self._output[seen:].decode(errors="replace").split("\n")
            for line in lines:
                if part in line:
                    return line
            if not self._receive():
                raise CallFailed(f"{self._shortened()} ended without {part!r}: {self.output}")

    def finish(self, timeout_s: float) -> Finished:
        """Wait for its end. Raises CallFailed."""
        self._deadline_s = time.monotonic() + timeout_s
        while self._receive():
            pass
        assert self._status is not None
        return Finished(self._status, self.output)

    def relay(self) -> int:
        """Print the output as it comes, without any deadline; the exit status."""
        self._deadline_s = None
        for octets in self._records():
            sys.stdout.buffer.write(octets)
            sys.stdout.buffer.flush()
        assert self._status is not None
        return self._status

    @property
    def output(self) -> str:
        return self._output.decode(errors="replace")

    def _records(self) -> Iterator[bytes]:
        seen = len(self._output)
        while self._receive():
            yield self._output[seen:]
            seen = len(self._output)

    def _receive(self) -> bool:
        """Take one record; False at the end."""
        if self._status is not None:
            return False
        (length,) = _WORD.unpack(self._exactly(_WORD.size))
        if length == 0:
            (self._status,) = _WORD.unpack(self._exactly(_WORD.size))
            return False
        self._output += self._exactly(length)
        return True

    def _exactly(self, length: int) -> bytes:
        octets = b""
        while len(octets) < length:
            remaining_s = None if self._deadline_s is None else self._deadline_s - time.monotonic()
            if remaining_s is not None and remaining_s <= 0:
                raise CallFailed(f"{self._shortened()} is not done in time: {self.output}")
            self._socket.settimeout(remaining_s)
            try:
                more = self._socket.recv(length - len(octets))
            except TimeoutError:
                continue
            except OSError as error:
                raise CallFailed(f"the guest is gone: {error}: {self.output}") from None
            if not more:
                raise CallFailed(f"the guest is gone: {self.output}")
            octets += more
        return octets

    def _shortened(self) -> str:
        return self._script.strip().split("\n")[0][:80]
