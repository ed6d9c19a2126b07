"""`kbtp stat`."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import pytest

import kbtp
from kbtp.cli import main
from kbtp.rnic import open_rnic
from kbtp.target.config import TargetConfig
from kbtp.target.server import Server

Run = Callable[..., tuple[int, str, str]]
Serve = Callable[..., "subprocess.Popen[str]"]


@pytest.fixture
def url() -> Iterator[str]:
    """Of a target called cache-0 with the namespace llama."""
    config = TargetConfig(block_size_bytes=1 << 20, pool_blocks=64, name="cache-0", namespace=b"llama")
    server = Server(config, open_rnic())
    address = server.listen(port=0)
    server.start()
    yield str(address)
    server.stop()


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Run:
    """`run(*arguments)`: exit status, standard output and standard error of `kbtp`."""

    def call(*arguments: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["kbtp", *arguments])
        with pytest.raises(SystemExit) as ended:
            main()
        captured = capsys.readouterr()
        assert isinstance(ended.value.code, int)
        return ended.value.code, captured.out, captured.err

    return call


def test_it_prints_what_a_session_sees(run: Run, url: str) -> None:
    status, out, err = run("stat", url, "--namespace", "llama")
    assert (status, err) == (0, "")
    seen = {" ".join(words[:-1]): words[-1] for words in (line.split() for line in out.splitlines())}
    assert seen["url"] == url
    assert seen["target name"] == "cache-0"
    assert "block size bytes 1048576 (1 MiB)" in " ".join(out.split())
    assert "pool blocks 64 (64 MiB)" in " ".join(out.split())
    assert seen["features"] == "INVALIDATE"


def test_it_prints_json_for_programs(run: Run, url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KBTP_NAMESPACE", "llama")
    status, out, err = run("stat", url, "--json")
    assert (status, err) == (0, "")
    assert len(out.splitlines()) == 1
    seen: dict[str, Any] = json.loads(out)
    assert (seen["url"], seen["block_size_bytes"], seen["pool_blocks"], seen["quota_blocks"]) == (url, 1 << 20, 64, 4)
    assert (seen["handle_count"], seen["namespace"], seen["resumed"]) == (1, "llama", False)
    assert len(seen["incarnation"]) == 16
    assert seen["connect_ms"] > 0


def unused_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        port: int = one.getsockname()[1]
        return port


def test_a_dead_port_is_one_line_and_status_1(run: Run) -> None:
    port = unused_port()
    status, out, err = run("stat", f"kbtp://127.0.0.1:{port}")
    assert (status, out) == (1, "")
    assert len(err.splitlines()) == 1
    assert f"kbtp: cannot connect to 127.0.0.1:{port}: Connection refused" in err


def test_a_silent_port_is_one_line_in_time(run: Run) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        status, out, err = run("stat", f"kbtp://127.0.0.1:{silent.getsockname()[1]}", "--timeout", "100ms")
    assert (status, out) == (1, "")
    assert "did not answer within 0.1 s" in err
    assert len(err.splitlines()) == 1


def test_another_namespace_is_one_line(run: Run, url: str) -> None:
    status, out, err = run("stat", url, "--namespace", "mistral")
    assert (status, out) == (1, "")
    assert err.startswith("kbtp: ACCESS_DENIED: HELLO refused: the namespace differs")
    assert len(err.splitlines()) == 1


@pytest.mark.parametrize(
    "arguments",
    [
        ("http://127.0.0.1",),
        ("kbtp://",),
        (),
        ("kbtp://127.0.0.1", "--timeout", "soon"),
        ("kbtp://h", "--name", "n" * 9),
    ],
)
def test_what_cannot_work_is_one_line_and_status_2(run: Run, arguments: tuple[str, ...]) -> None:
    status, out, err = run("stat", *arguments)
    assert (status, out) == (2, "")
    assert len(err.splitlines()) == 1
    assert err.startswith("kbtp: ")


def test_ctrl_c_is_status_130(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("kbtp.connect", interrupted)
    status, out, err = run("stat", "kbtp://127.0.0.1")
    assert (status, out.strip(), err.strip()) == (130, "", "")


def test_help_shows_examples(run: Run) -> None:
    for arguments in ((), ("--help",), ("stat", "-h")):
        status, out, err = run(*arguments)
        assert (status, err) == (0, "")
        assert "Examples:\n" in out
        assert "  kbtp stat kbtp://127.0.0.1\n" in out


@pytest.mark.parametrize("form", [[], ["--json"]])
def test_whoever_stops_reading_is_not_shouted_at(url: str, form: list[str]) -> None:
    with ExitStack() as stack:
        reader, writer = os.pipe()
        os.close(reader)
        stack.callback(os.close, writer)
        done = subprocess.run(
            [sys.executable, "-m", "kbtp", "stat", url, "--namespace", "llama", *form],
            stdout=writer,
            stderr=subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
            timeout=30,
            check=False,
        )
    assert (done.returncode, done.stderr) == (1, b"")


# --- what an initiator is not told: the counters that `kbtp serve` prints ------------------------


@pytest.fixture
def serve() -> Iterator[Serve]:
    """`serve(*arguments)`: `kbtp serve` with 8 blocks in a process of its own; `forced_punts`: of the native RNIC."""
    with ExitStack() as stack:

        def start(*arguments: str, forced_punts: str = "") -> subprocess.Popen[str]:
            process = subprocess.Popen(
                [sys.executable, "-m", "kbtp", "serve", "--port", "0", "--pool-blocks", "8", *arguments],
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                text=True,
                env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "KBTP_FORCED_PUNTS": forced_punts},
            )
            stack.enter_context(process)
            stack.callback(process.kill)
            return process

        yield start


def line_of(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline()


def store(client: kbtp.Client, times: int) -> None:
    for _ in range(times):
        client.alloc_store(b"x")


@pytest.mark.parametrize("rnic", ["native", "reference"])
def test_a_target_prints_its_counters_when_it_is_asked(serve: Serve, rnic: str) -> None:
    process = serve("--json", "--rnic", rnic, forced_punts="1")
    url = json.loads(line_of(process))["url"]
    with kbtp.connect(url, quota=4) as client:
        store(client, 3)
        process.send_signal(signal.SIGUSR1)
        counters = json.loads(line_of(process))
        assert (counters["sessions"], counters["used_blocks"], counters["pool_blocks"]) == (1, 3, 8)
        if rnic == "native":
            left = {reason: count for reason, count in counters["punts"].items() if count}
            assert left == {"FORCED": 3}
            assert "BEHIND_PUNT" in counters["punts"]
        else:
            assert counters["punts"] is None
        store(client, 1)  # it goes on serving


@pytest.mark.parametrize(("forced_punts", "said"), [("", "none"), ("1", "1 FORCED")])
def test_counters_are_for_people_too(serve: Serve, forced_punts: str, said: str) -> None:
    process = serve("--rnic", "native", forced_punts=forced_punts)
    url = line_of(process).split()[2]
    with kbtp.connect(url, quota=4) as client:
        store(client, 1)
        process.send_signal(signal.SIGUSR1)
        assert line_of(process) == f"kbtp: sessions: 1, blocks used: 1 of 8, requests left to Python: {said}\n"


def test_whoever_no_longer_reads_counters_does_not_stop_the_target(serve: Serve) -> None:
    process = serve("--json")
    url = json.loads(line_of(process))["url"]
    assert process.stdout is not None
    process.stdout.close()
    process.send_signal(signal.SIGUSR1)
    with kbtp.connect(url, quota=4) as client:
        store(client, 1)
    process.send_signal(signal.SIGTERM)
    assert process.wait(30) == 0
