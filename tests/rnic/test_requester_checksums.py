"""The checksums of a batch: what an RNIC has found out about the data that was moved, or nothing."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import crc32c
import numpy as np
import pytest

from kbtp.iwarp.mpa import MpaOptions
from kbtp.types import BlockRef, Opcode, RequestFlag, Status
from kbtp.verbs.api import RdmaRead, RdmaWrite
from kbtp.verbs.requester import NO_CHECKSUM
from tests.rnic.test_requester import HANDLES, Session, carry

pytestmark = pytest.mark.parametrize("rnic_name", ["native"], indirect=True)

LOAD, STORE, ALLOC_STORE = int(Opcode.LOAD), int(Opcode.STORE), int(Opcode.ALLOC_STORE)
DATA = bytes(range(100))


@pytest.fixture
def session(pair: Any) -> Session:
    return Session(pair, carry(pair))


def write(session: Session, request: Any, octets: bytes, at: int = 0) -> None:
    source = session.pair.server.sge(bytearray(octets))
    session.pair.s.post([RdmaWrite(1, (source,), request.data.stag, request.data.to + at)])


def read(session: Session, request: Any, length_bytes: int, at: int = 0) -> None:
    sink = session.pair.server.sge(bytearray(length_bytes))
    session.pair.s.post([RdmaRead(1, sink, request.data.stag, request.data.to + at)])


def checksums(session: Session, batch: int) -> list[int]:
    records, _ = session.done(batch)
    told: list[int] = records["checksum"].tolist()
    return told


@pytest.mark.parametrize("writes", [[(0, 100)], [(0, 30), (30, 100)], [(0, 1), (1, 2), (2, 100)]])
def test_of_a_load(session: Session, writes: list[tuple[int, int]]) -> None:
    buffer = bytearray(120)
    batch = session.requester.submit(LOAD, 0, 0, [BlockRef(7, 3, 100)], [buffer], True)
    [request] = session.requests(1)
    for first, end in writes:
        write(session, request, DATA[first:end], first)
    session.answer(request, data_length=100)
    assert checksums(session, batch) == [crc32c.crc32c(DATA)]
    assert buffer[:100] == DATA


@pytest.mark.parametrize(
    "writes",
    [
        [(0, 100), (0, 100)],
        [(50, 100), (0, 50)],
        [(0, 100), (110, 120)],
        [(0, 99)],
        [],
    ],
    ids=["twice", "not in order", "behind it too", "less than was said", "nothing"],
)
def test_of_a_load_that_was_not_written_once_and_in_order(session: Session, writes: list[tuple[int, int]]) -> None:
    octets = DATA + bytes(20)
    batch = session.requester.submit(LOAD, 0, 0, [BlockRef(7, 3, 100)], [bytearray(120)], True)
    [request] = session.requests(1)
    for first, end in writes:
        write(session, request, octets[first:end], first)
    session.answer(request, data_length=100)
    assert checksums(session, batch) == [NO_CHECKSUM]


@pytest.mark.parametrize("length_bytes", [100, 100_000])
def test_without_crc_nothing_is_known_of_what_was_moved(connect_pair: Callable[..., Any], length_bytes: int) -> None:
    off = MpaOptions(crc=False)
    pair = connect_pair(client_mpa=off, server_mpa=off)
    session = Session(pair, carry(pair))
    octets, buffer = random.Random(1).randbytes(length_bytes), bytearray(length_bytes)
    load = session.requester.submit(LOAD, 0, 0, [BlockRef(7, 3, length_bytes)], [buffer], True)
    [request] = session.requests(1)
    write(session, request, octets)
    session.answer(request, data_length=length_bytes)
    assert checksums(session, load) == [NO_CHECKSUM]
    assert buffer == octets
    store = session.requester.submit(STORE, 0, 0, [1], [octets], True)
    _, request = session.requests(2)
    read(session, request, length_bytes)
    pair.net.pump(lambda: len(pair.server.completions(pair.s)) >= 2)
    session.answer(request)
    assert checksums(session, store) == [NO_CHECKSUM]


def test_a_write_into_a_load_that_is_over_spoils_those_that_are_not(session: Session) -> None:
    """It may be the same memory under another STag."""
    cache = np.zeros((2, 128), np.uint8)
    batch = session.requester.submit(LOAD, 0, 0, [1, 2], list(cache), True)
    first, second = session.requests(2)
    write(session, first, DATA)
    write(session, second, DATA)
    write(session, first, b"late", 40)
    for request in (first, second):
        session.answer(request, data_length=100)
    assert checksums(session, batch) == [NO_CHECKSUM, NO_CHECKSUM]


def test_of_stores_inline_and_read(session: Session) -> None:
    data = [b"", DATA[:16], DATA]
    batch = session.requester.submit(STORE, int(RequestFlag.SEAL), 0, [1, 2, 3], data, True)
    requests = session.requests(3)
    read(session, requests[2], 60)
    read(session, requests[2], 40, 60)
    session.pair.net.pump(lambda: len(session.pair.server.completions(session.pair.s)) >= 2)
    for request in requests:
        session.answer(request)
    assert checksums(session, batch) == [crc32c.crc32c(one) for one in data]


@pytest.mark.parametrize("reads", [[(0, 100), (0, 1)], [(0, 60)], []], ids=["twice", "in part", "not at all"])
def test_of_a_store_that_was_not_read_once(session: Session, reads: list[tuple[int, int]]) -> None:
    batch = session.requester.submit(STORE, 0, 0, [1], [DATA], True)
    [request] = session.requests(1)
    for first, end in reads:
        read(session, request, end - first, first)
    session.pair.net.pump(lambda: len(session.pair.server.completions(session.pair.s)) >= len(reads))
    session.answer(request)
    assert checksums(session, batch) == [NO_CHECKSUM]


def test_of_data_that_is_sent_again_for_another_handle(session: Session) -> None:
    batch = session.requester.submit(ALLOC_STORE, 0, 0, [None], [DATA], True)
    for number in range(HANDLES):
        request = session.requests(number + 1)[number]
        read(session, request, 100)
        session.pair.net.pump(lambda done=number + 1: len(session.pair.server.completions(session.pair.s)) >= done)
        session.answer(request, Status.SUCCESS if number else Status.ALREADY_BOUND)
    assert checksums(session, batch) == [crc32c.crc32c(DATA)]


def test_of_what_was_refused_or_not_asked_for(session: Session) -> None:
    for wanted in (True, False):
        batch = session.requester.submit(LOAD, 0, 0, [1], [bytearray(100)], wanted)
        request = session.requests(1 if wanted else 2)[-1]
        write(session, request, DATA)
        session.answer(request, Status.NOT_BOUND if wanted else Status.SUCCESS, data_length=0 if wanted else 100)
        assert checksums(session, batch) == [NO_CHECKSUM]
