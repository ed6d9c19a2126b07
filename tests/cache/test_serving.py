"""`kbtp serve --index` and `kbtp drain`: what an operator of a first cluster types."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import pytest
from click.testing import CliRunner

from kbtp.address import Address
from kbtp.cache import Cache, Outcome
from kbtp.cache.embedded import EmbeddedIndex, _free_port
from kbtp.cache.index import open_index
from kbtp.cache.steps import ListTargets
from kbtp.cli import cli
from kbtp.limits import CACHE_TIMEOUT_S

DEADLINE_S = 30.0
Start = Callable[..., tuple["subprocess.Popen[str]", dict[str, Any]]]


@pytest.fixture
def start() -> Iterator[Start]:
    """`start(*arguments)`: `kbtp serve` in a process of its own, and its ready line."""
    with ExitStack() as stack:

        def spawn(*arguments: str) -> tuple[subprocess.Popen[str], dict[str, Any]]:
            small = ("--block-size", "4KiB", "--pool-blocks", "16", "--quota", "8", "--json")
            process = subprocess.Popen(
                [sys.executable, "-m", "kbtp", "serve", *small, *arguments],
                stdout=subprocess.PIPE,
                text=True,
                env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
            )
            stack.enter_context(process)
            stack.callback(process.kill)
            assert process.stdout is not None
            line = process.stdout.readline()
            return process, json.loads(line) if line else {}

        yield spawn


def free_pair() -> int:
    """A port that is free, and the one behind it too."""
    with socket.socket() as behind:
        while True:
            port = _free_port("127.0.0.1")
            with contextlib.suppress(OSError):
                behind.bind(("127.0.0.1", port + 1))
                return port


def test_the_target_s_url_is_all_a_cache_needs(start: Start) -> None:
    process, ready = start("--port", str(free_pair()), "--index")
    assert ready["index"] == f"valkey://127.0.0.1:{Address.parse(ready['url']).port + 1}"
    with Cache(ready["url"]) as cache, Cache(ready["index"]) as other:
        assert cache.put(b"key", b"value") is Outcome.STORED
        into = bytearray(5)
        assert other.get_into(b"key", into) == 5
        assert into == b"value"
        process.send_signal(signal.SIGTERM)
        assert process.wait(DEADLINE_S) == 0
        assert cache.get_into(b"key", into) is None
        assert cache.put(b"key", b"value") is Outcome.UNAVAILABLE


def test_a_target_that_hangs_costs_no_more_than_the_deadline(start: Start) -> None:
    process, ready = start("--port", "0", "--index")
    with Cache(ready["index"], timeout_s=0.5) as cache:
        assert cache.put(b"key", bytes(10_000)) is Outcome.STORED
        process.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, process.pid, os.WSTOPPED)  # all of its threads have stopped then
        began_s = time.monotonic()
        assert cache.get_into(b"key", bytearray(10_000)) is None
        assert cache.put(b"other", b"value") is Outcome.UNAVAILABLE
        assert time.monotonic() - began_s < DEADLINE_S
        process.send_signal(signal.SIGCONT)
        deadline_s = time.monotonic() + DEADLINE_S
        while cache.get_into(b"key", bytearray(10_000)) is None:
            assert time.monotonic() < deadline_s
        assert cache.put(b"other", b"value") is Outcome.STORED


def test_targets_share_an_index_and_one_is_drained(start: Start) -> None:
    index = EmbeddedIndex()
    with ExitStack() as stack:
        stack.callback(index.close)
        urls = [start("--port", "0", "--index", index.url)[1]["url"] for _ in range(2)]
        with Cache(index.url) as cache:
            keys = [b"%d" % number for number in range(8)]
            assert all(item.ok for item in cache.put_many(keys, [bytes(100)] * len(keys)))
            told = CliRunner().invoke(cli, ["drain", index.url, urls[0], "--json"])
            said = json.loads(told.stdout)
            assert (said["target"], said["draining"]) == (urls[0], True)
            assert cache.contains_many(keys).count(cache.contains_many([b"none"])[0]) == said["removed_records"]
        undone = CliRunner().invoke(cli, ["drain", index.url, urls[0], "--undo"])
        assert undone.stdout == f"kbtp: {urls[0]} is used again\n"
        nowhere = CliRunner().invoke(cli, ["drain", index.url, "kbtp://127.0.0.1:1"])
        assert "no target announces itself as kbtp://127.0.0.1:1" in str(nowhere.exception)


def test_a_target_that_ends_withdraws(start: Start) -> None:
    embedded = EmbeddedIndex()
    with ExitStack() as stack:
        stack.callback(embedded.close)
        index = open_index(embedded.url, CACHE_TIMEOUT_S)
        stack.callback(index.close)
        process, ready = start("--port", "0", "--index", embedded.url, "--announce", "cache-1")
        [target] = index.perform(ListTargets())
        assert (target.url, target.pool_blocks) == (ready["url"].replace("127.0.0.1", "cache-1"), 16)
        process.send_signal(signal.SIGTERM)
        process.wait(DEADLINE_S)
        assert index.perform(ListTargets()) == []


def test_whoever_listens_everywhere_is_told_where_to_find(start: Start) -> None:
    _, ready = start("--host", "0.0.0.0", "--port", "0", "--index", "--announce", "localhost")
    assert ready["index"].startswith("valkey://localhost:")
    with Cache(ready["index"]) as cache:
        assert cache.put(b"key", b"value") is Outcome.STORED


def test_an_index_that_cannot_be_is_told(start: Start) -> None:
    process, ready = start("--port", "0", "--index", "http://host")
    assert (ready, process.wait(DEADLINE_S)) == ({}, 2)
    embedded = EmbeddedIndex()
    try:
        process, ready = start("--port", str(embedded.port - 1), "--index")
        assert (ready, process.wait(DEADLINE_S)) == ({}, 2)
    finally:
        embedded.close()


def test_an_index_that_was_away_is_told_again(start: Start) -> None:
    """The target announces itself to an index that comes later."""
    port = _free_port("127.0.0.1")
    _, ready = start("--port", "0", "--index", f"valkey://127.0.0.1:{port}")
    embedded = EmbeddedIndex(port=port)
    with ExitStack() as stack:
        stack.callback(embedded.close)
        index = open_index(embedded.url, CACHE_TIMEOUT_S)
        stack.callback(index.close)
        deadline_s = time.monotonic() + DEADLINE_S
        while not (targets := index.perform(ListTargets())):
            assert time.monotonic() < deadline_s
        assert targets[0].url == ready["url"]
