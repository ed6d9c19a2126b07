"""The stack in Rust as a process that does what it is told, and a stream in Python that writes down what it is told.

What a recorded stream was told is a script that the other stack can be given too: whatever can be seen of the two must
be the same, octet by octet.
"""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeAlias

import pytest

from kbtp.errors import ApiMisuse, ConnectionLost
from kbtp.iwarp.events import Event, Failed, ImmediateReceived, TerminateReceived
from kbtp.iwarp.mpa import Negotiated, RtrKind
from kbtp.iwarp.stream import IwarpStream
from kbtp.types import TerminateCause
from kbtp.verbs.api import Access
from kbtp.verbs.stag_table import StagTable

Json: TypeAlias = dict[str, Any]

MANIFEST = Path(__file__).resolve().parents[2] / "rust" / "Cargo.toml"
STAG_STEP = 0x1111
LONG_FPDU_BYTES = 2048
"""The native stream judges the header of an FPDU that is longer when the header comes (see `intake` there)."""


class NativeStack:
    """`rust/crates/kbtp-proto/examples/differential`, running."""

    def __init__(self, program: Path) -> None:
        self._program = program
        self._start()

    def _start(self) -> None:
        self._process = subprocess.Popen([self._program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def ask(self, task: str, **what: Any) -> Any:
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(json.dumps({"task": task, **what}) + "\n")
        self._process.stdin.flush()
        answer = self._process.stdout.readline()
        if not answer:  # the next question, of a smaller example perhaps, finds it running
            status = self._process.wait()
            self._start()
            raise AssertionError(f"the native stack ended with {status}")
        return json.loads(answer)

    def close(self) -> None:
        self._process.communicate()


@pytest.fixture(scope="session")
def native_stack() -> Iterator[NativeStack]:
    command = [os.environ.get("CARGO", "cargo"), "build", "--quiet", "--locked", "--manifest-path", str(MANIFEST)]
    command += ["--package", "kbtp-proto", "--example", "differential", "--message-format", "json"]
    messages = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
    programs = [message.get("executable") for message in map(json.loads, messages.splitlines())]
    stack = NativeStack(Path(next(filter(None, programs))))
    yield stack
    stack.close()


def told(event: Event) -> list[Any]:
    """The event as the native stack tells it."""
    name = type(event).__name__
    if isinstance(event, Failed):
        error = event.error
        return [name, list(error.cause.value), str(error).removesuffix(f" [{error.cause}]")]
    if isinstance(event, TerminateReceived):
        info = event.info
        numbers = [info.layer, info.etype, info.code]
        return [name, numbers, info.ddp_segment_length, info.ddp_header.hex(), info.rdmap_header.hex()]
    if isinstance(event, ImmediateReceived):
        return [name, event.wr_id, event.data.hex(), event.solicited]
    return [name, *(getattr(event, field) for field in event.__slots__)]


class RecordedEnd:
    """One end of a connection; `do` is the way to do anything with it."""

    def __init__(
        self,
        options: Json,
        regions: list[Json],
        *,
        active: bool = True,
        mulpdu: int = 128,
        first_msn: list[int] | None = None,
        first_stag: int = 0xABCD_0001,
        still: bool = False,
        direct: bool = False,
    ) -> None:
        self.script: Json = {
            "options": options, "regions": regions, "active": active, "mulpdu": mulpdu, "first_msn": first_msn,
            "first_stag": first_stag, "still": still, "direct": direct, "steps": [],
        }  # fmt: skip
        self.seen: list[Json] = []
        self.buffers: dict[int, bytearray] = {}
        self._marked = options["rx_markers"]
        self._half_fpdu = bytearray()
        self._ended_in_long_fpdu = False
        self._eof_came = False
        self._grant(first_stag, regions)
        msn = None if first_msn is None else dict(enumerate(first_msn))
        settled = _negotiated(**options)
        self.stream = IwarpStream(settled, self._view, active=active, mulpdu=mulpdu, initial_msn=msn)

    def _grant(self, first_stag: int, regions: list[Json]) -> None:
        self._next_stag = first_stag
        table = StagTable(self._draw)
        domain, other_domain = table.allocate_pd(), table.allocate_pd()
        self._view, self._other_view = table.memory_for("stream", domain), table.memory_for("other", domain)
        scopes = {"stream": self._view, "other_stream": self._other_view}
        self.regions = [
            table.register(
                bytearray.fromhex(region["octets"]),
                Access(region["access"]),
                pd=other_domain if region["scope"] == "other_domain" else domain,
                scope=scopes.get(region["scope"]),
                base_to=region["base_to"],
            )
            for region in regions
        ]

    def _draw(self) -> int:
        stag, self._next_stag = self._next_stag, (self._next_stag + STAG_STEP) & 0xFFFF_FFFF
        return stag

    @property
    def in_long_fpdu(self) -> bool:
        return not self._marked and fpdu_bytes(self._half_fpdu) > LONG_FPDU_BYTES

    def do(self, step: Json) -> Any:
        """One step; what came of it, as the native stack tells it."""
        self.script["steps"].append(step)
        how = {name: value for name, value in step.items() if name != "do"}
        try:
            result = getattr(self, f"_{step['do']}")(**how)
        except ConnectionLost:
            result = "ended"
        except ApiMisuse:
            result = "misuse"
        stream = self.stream
        self.seen.append(
            {
                "result": result,
                "events": [told(event) for event in iter(stream.next_event, None)],
                "wants_to_send": stream.wants_to_send(),
                "failed": stream.failed,
                "ended": stream.ended,
                "terminate_sent": stream.terminate_sent,
                "sent_cause": list(stream.sent_cause.value) if stream.sent_cause else None,
            }
        )
        return result

    def check(self, native_stack: NativeStack) -> None:
        """The stream in Rust, told the same, has shown the same."""
        native = native_stack.ask("stream", **self.script)
        assert "steps" in native, native
        for number, (ours, theirs) in enumerate(zip(self.seen, native["steps"], strict=True)):
            assert ours == theirs, f"Python and Rust differ in step {number}: {self.script['steps'][number]}"
        rights = [[region.stag, region.valid] for region in self.regions]
        assert rights == [region[:2] for region in native["regions"]]
        # What a long FPDU carries is placed before its CRC is known, as far as it has come.
        if not self._ended_in_long_fpdu and not self.in_long_fpdu:
            assert [region.view.hex() for region in self.regions] == [region[2] for region in native["regions"]]
            assert {str(wr_id): buffer.hex() for wr_id, buffer in self.buffers.items()} == native["buffers"]

    # --- the steps ---

    def _receive(self, wr_id: int, length_bytes: int) -> None:
        self.stream.post_receive(wr_id, self._buffer(wr_id, length_bytes))

    def _send(self, wr_id: int, pieces: list[str], invalidate_stag: int | None, solicited: bool) -> None:
        octets = [bytes.fromhex(piece) for piece in pieces]
        self.stream.post_send(wr_id, octets, invalidate_stag=invalidate_stag, solicited=solicited)

    def _write(self, wr_id: int, pieces: list[str], stag: int, to: int) -> None:
        self.stream.post_write(wr_id, [bytes.fromhex(piece) for piece in pieces], stag, to)

    def _read(self, wr_id: int, length_bytes: int, stag: int, to: int) -> None:
        self.stream.post_read(wr_id, self._buffer(wr_id, length_bytes), stag, to)

    def _fetch_add(self, wr_id: int, stag: int, to: int, operands: list[int]) -> None:
        self.stream.post_fetch_add(wr_id, stag, to, *operands)

    def _compare_swap(self, wr_id: int, stag: int, to: int, operands: list[int]) -> None:
        self.stream.post_compare_swap(wr_id, stag, to, *operands)

    def _immediate(self, wr_id: int, data: str, solicited: bool) -> None:
        self.stream.post_immediate(wr_id, bytes.fromhex(data), solicited=solicited)

    def _buffer(self, wr_id: int, length_bytes: int) -> memoryview:
        self.buffers[wr_id] = bytearray(length_bytes)
        return memoryview(self.buffers[wr_id])

    def _hear(self, octets: str) -> None:
        deaf = self.stream.failed or self._eof_came
        self.stream.receive_data(bytes.fromhex(octets))
        if not deaf:
            had_long = self._follow(bytes.fromhex(octets))
            self._ended_in_long_fpdu = self.stream.failed and had_long

    def _follow(self, octets: bytes) -> bool:
        """Keep the beginning of the FPDU that `octets` end in; was any of them long?"""
        self._half_fpdu += octets
        had_long = False
        while size := fpdu_bytes(self._half_fpdu):
            had_long = had_long or size > LONG_FPDU_BYTES
            if size > len(self._half_fpdu):
                break
            del self._half_fpdu[:size]
        return had_long and not self._marked

    def _out(self, limit_bytes: int) -> list[str]:
        return [fpdu.hex() for fpdu in self.stream.data_to_send(limit_bytes)]

    def _revoke(self, region: int) -> None:
        self.regions[region].revoke()

    def _close_other_stream(self) -> None:
        self._other_view.close()

    def _set_mulpdu(self, mulpdu: int) -> None:
        self.stream.set_mulpdu(mulpdu)

    def _terminate(self, cause: list[int]) -> None:
        self.stream.terminate(TerminateCause(tuple(cause)))

    def _eof(self) -> bool:
        self._eof_came = True
        return self.stream.receive_eof()

    def _flush(self) -> list[list[Any]]:
        return [[flushed.wr_id, flushed.kind.name] for flushed in self.stream.flush()]


def _negotiated(*, ord: int, ird: int, rtr: int, failure: list[int] | None, **flags: bool) -> Negotiated:
    cause = None if failure is None else TerminateCause(tuple(failure))
    return Negotiated(
        **flags, ird=ird, ord_=ord, peer_ird=ord, peer_ord=ird, revision=2, rtr=RtrKind(rtr), failure=cause
    )  # fmt: skip


def fpdu_bytes(octets: bytes | bytearray) -> int:
    """Size of the FPDU, without markers, that `octets` begin; 0 if they do not tell."""
    if len(octets) < 2:
        return 0
    with_length = 2 + int.from_bytes(octets[:2], "big")
    return with_length + -with_length % 4 + 4


@pytest.fixture(scope="session")
def recorded_end() -> Callable[..., RecordedEnd]:
    return RecordedEnd
