"""`lmcache server` as an operator starts it, and `lmcache bench server`, which compares checksums of what it loads."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from engine import configuration

LMCACHE = Path(sys.executable).with_name("lmcache")
QUIET = {"LMCACHE_TRACK_USAGE": "false", "LMCACHE_DISABLE_BANNER": "1"}
START_S, STOP_S, BENCH_S, ANSWER_S = 120.0, 30.0, 120.0, 10.0
SHAPE = "(2,64,16,2,64):float16:4"
SEQUENCES = 2
CHUNKS_OF_ALL = SEQUENCES * 2  # 512 tokens each, in chunks of 256


class Server:
    def __init__(self, url: str, log: Path, wait_until: Callable[..., bool]) -> None:
        self.log = log
        ports = [_free_port(), _free_port()]
        self.rpc, self.http = f"tcp://127.0.0.1:{ports[0]}", f"http://127.0.0.1:{ports[1]}"
        command = [LMCACHE, "server", "--host", "127.0.0.1", "--port", str(ports[0])]
        command += ["--http-host", "127.0.0.1", "--http-port", str(ports[1])]
        command += ["--l1-size-gb", "0.25", "--no-l1-use-lazy", "--chunk-size", "256", "--eviction-policy", "LRU"]
        command += ["--supported-transfer-mode", "auto"]
        command += ["--l2-adapter", json.dumps(configuration(url)), "--disable-metrics"]
        with log.open("w") as out:
            self.process = subprocess.Popen(command, stdout=out, stderr=out, env={**os.environ, **QUIET})
        assert wait_until(lambda: self._answers() or self.process.poll() is not None, START_S)
        assert self.process.poll() is None, log.read_text()

    def _answers(self) -> bool:
        with contextlib.suppress(OSError), urllib.request.urlopen(f"{self.http}/healthcheck", timeout=ANSWER_S):
            return True
        return False

    @property
    def l2(self) -> dict[str, Any]:
        with urllib.request.urlopen(f"{self.http}/status", timeout=ANSWER_S) as answer:
            [adapter] = json.load(answer)["storage_manager"]["l2_adapters"]
        return adapter

    def bench(self) -> set[str]:
        """Stores, unless it is there already, and loads what every bench does; the checksums of what was loaded."""
        command = [LMCACHE, "bench", "server", "--rpc-url", self.rpc, "--url", self.http, "--mode", "cpu"]
        command += ["--kvcache-shape-spec", SHAPE, "--num-blocks", "64", "--block-size", "16", "--num-tokens", "512"]
        command += ["--start", "0", "--end", str(SEQUENCES), "--interval", "0.1"]
        done = subprocess.run(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=BENCH_S, check=False
        )
        assert done.returncode == 0, done.stdout + self.log.read_text()
        assert "MISMATCH" not in done.stdout.upper(), done.stdout
        return set(re.findall(r"/warm\] CHECKSUM\S*: ([0-9a-f]{16})", done.stdout))

    def stop(self) -> None:
        self.process.send_signal(signal.SIGTERM)
        try:
            self.process.wait(STOP_S)
        finally:
            self.process.kill()
            self.process.wait()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


@pytest.fixture
def start_server(cluster, tmp_path, wait_until) -> Iterator[Callable[[], Server]]:
    with ExitStack() as stack:

        def start() -> Server:
            server = Server(cluster.url, tmp_path / "server.log", wait_until)
            stack.callback(server.stop)
            return server

        yield start


@pytest.mark.requirement("shared")
@pytest.mark.timeout(400)
def test_a_second_server_serves_what_the_first_has_cached(start_server, wait_until) -> None:
    first = start_server()
    computed = first.bench()
    assert computed
    assert wait_until(lambda: first.l2["cache"]["stored"] == CHUNKS_OF_ALL), first.l2
    second = start_server()
    assert second.bench() == computed
    assert second.l2["cache"]["hits"] >= CHUNKS_OF_ALL
    assert second.l2["cache"]["stored"] == 0
    assert second.l2["troubles"] == {}
