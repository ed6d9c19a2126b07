"""Targets in this process, right and wrong, and the suite run against them; both ends of one stream."""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import pytest

from kbtp.address import Address
from kbtp.conformance import catalogue
from kbtp.conformance.case import Case, Role
from kbtp.conformance.expectations import Expectations
from kbtp.conformance.result import Result
from kbtp.conformance.runner import TargetRunner
from kbtp.conformance.setup import Setup
from kbtp.conformance.startup import Startup
from kbtp.conformance.stream import Stream
from kbtp.conformance.tcp import Deadline, Tcp
from kbtp.rnic.reference import ReferenceOptions, ReferenceRnic
from kbtp.target.config import TargetConfig
from kbtp.target.server import Server
from kbtp.verbs.api import Rnic

SHORT_S = 0.5
Pair = tuple[Stream, Stream]


@pytest.fixture
def serve() -> Iterator[Callable[..., str]]:
    """`serve(**config)`: the URL of a target over the reference RNIC, whose rules a test can break in this process."""
    with ExitStack() as stack:

        def start(**config: Any) -> str:
            rnic = ReferenceRnic(ReferenceOptions(mpa_request_timeout_s=SHORT_S))
            server = Server(TargetConfig(**{"block_size_bytes": 1 << 16, "hello_timeout_s": SHORT_S, **config}), rnic)
            address = server.listen(port=0)
            stack.callback(server.stop)
            server.start()
            return str(address)

        yield start


def cases_named(*names: str) -> list[Case]:
    """Cases of a target by group and name, each of which has to be there."""
    every = {case.name: case for case in catalogue.cases(Role.TARGET)}
    return [every[f"target/{name}"] for name in names]


def run_against(url: str, cases: list[Case], *, rnic: Rnic | None = None, **setup: Any) -> dict[str, Result]:
    """By group and name. `rnic` carries the suite's streams."""
    runner = TargetRunner(Address.parse(url), Setup(**setup), Expectations(), at_once=2, rnic=rnic)
    return {result.case.name.partition("/")[2]: result for result in runner.run(cases)}


@pytest.fixture
def pair() -> Iterator[Callable[..., Pair]]:
    """`pair(markers=False)`: both ends of one stream."""
    with ExitStack() as stack:

        def connect(*, markers: bool = False, timeout_s: float = 5.0) -> Pair:
            ends = socket.socketpair(socket.AF_UNIX)
            for end in ends:
                stack.callback(end.close)
            tcps = [_UnixTcp(end, Deadline(timeout_s)) for end in ends]
            request, reply = (Startup(markers=markers).frame(reply=reply) for reply in (False, True))
            return Stream(tcps[0], request, reply, active=True), Stream(tcps[1], request, reply, active=False)

        yield connect


class _UnixTcp(Tcp):
    """A socket pair has no TCP options."""

    def __init__(self, sock: socket.socket, deadline: Deadline) -> None:
        self.socket = sock
        self.deadline = deadline
        self.was_reset = False
        self._pushed_back = b""
