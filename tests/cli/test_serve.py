"""`kbtp serve`: its ready line, how it ends, what it refuses, and where its settings come from."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

import kbtp
from kbtp.address import Address
from kbtp.cli import main
from kbtp.cli.serve import available_memory_bytes
from kbtp.errors import ConnectionLost
from kbtp.target.config import TargetConfig
from kbtp.target.server import Server
from kbtp.types import Feature

DEADLINE_S = 30.0
SMALL = ("--block-size", "4KiB", "--pool-blocks", "8")

Start = Callable[..., "subprocess.Popen[str]"]
Run = Callable[..., tuple[int, str, str]]
Settings = Callable[..., TargetConfig]


# --- as a process ------------------------------------------------------------------------------


@pytest.fixture
def start() -> Iterator[Start]:
    """`start(*arguments)`: `kbtp serve` in a process of its own."""
    with ExitStack() as stack:

        def spawn(*arguments: str, program: tuple[str, ...] = ("-m", "kbtp")) -> subprocess.Popen[str]:
            process = subprocess.Popen(
                [sys.executable, *program, "serve", *arguments],
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
            )
            stack.enter_context(process)
            stack.callback(process.kill)
            return process

        yield spawn


def ready_line(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline()


def test_the_ready_line_is_for_people(start: Start) -> None:
    process = start("--port", "0", *SMALL)
    ready = ready_line(process)
    match = re.fullmatch(r"kbtp: serving (kbtp://127\.0\.0\.1:\d+) with 8 blocks of 4 KiB \(32 KiB\)\n", ready)
    assert match is not None, ready
    with kbtp.connect(match[1], quota=8) as client:
        assert client.load(client.alloc_store(b"x"), into=bytearray(1)) == 1
    process.send_signal(signal.SIGTERM)
    out, err = process.communicate(timeout=DEADLINE_S)
    assert (process.returncode, out) == (0, "")
    assert "Traceback" not in err


def test_sessions_are_spread_over_threads(start: Start) -> None:
    process = start("--port", "0", "--json", "--threads", "3", "--quota", "2", *SMALL)
    url = json.loads(ready_line(process))["url"]
    until_s = time.monotonic() + DEADLINE_S
    while rnic_threads_of(process) != ["kbtp-rnic-0", "kbtp-rnic-1", "kbtp-rnic-2"]:  # each names itself once it runs
        assert time.monotonic() < until_s
    with ExitStack() as stack:
        clients = [stack.enter_context(kbtp.connect(url)) for _ in range(4)]
        blocks = [client.alloc_store(b"%d" % n) for n, client in enumerate(clients)]
        for client in clients:
            for n, block in enumerate(blocks):
                buffer = bytearray(1)
                assert client.load(block, into=buffer) == 1
                assert buffer == b"%d" % n
    process.send_signal(signal.SIGTERM)
    assert process.wait(DEADLINE_S) == 0


def rnic_threads_of(process: subprocess.Popen[str]) -> list[str]:
    names = [path.read_text().strip() for path in Path(f"/proc/{process.pid}/task").glob("*/comm")]
    return sorted(name for name in names if name.startswith("kbtp-rnic"))


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_drains_and_exits_0(start: Start, number: signal.Signals) -> None:
    """With a session open. The ready line is an object for programs this time."""
    process = start("--port", "0", "--json", "--quota", "2", "--namespace", "llama", *SMALL)
    ready = json.loads(ready_line(process))
    assert ready == {
        "url": ready["url"],
        "block_size_bytes": 4096,
        "pool_blocks": 8,
        "quota_blocks": 2,
        "namespace": "llama",
        "pid": process.pid,
    }
    client = kbtp.connect(ready["url"], namespace="llama")
    block = client.alloc_store(b"x")
    process.send_signal(number)
    _, err = process.communicate(timeout=DEADLINE_S)
    assert process.returncode == 0
    assert "Traceback" not in err
    with pytest.raises(ConnectionLost):
        client.load(block, into=bytearray(1))


def test_a_second_signal_does_not_wait(start: Start) -> None:
    """Whoever asks twice has lost patience: here the client would keep the target for a minute."""
    patient = "import kbtp.limits; kbtp.limits.CLOSE_S = 60.0; from kbtp.cli import main; main()"
    process = start("--port", "0", "--json", *SMALL, program=("-c", patient))
    address = Address.parse(json.loads(ready_line(process))["url"])
    with kbtp.connect(str(address)):
        process.send_signal(signal.SIGTERM)
        while listens(address):  # then it is draining
            assert process.poll() is None
        process.send_signal(signal.SIGTERM)
        assert process.wait(DEADLINE_S) == 128 + signal.SIGTERM


def listens(address: Address) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex((address.host, address.port)) == 0


def test_what_cannot_work_is_one_line_and_status_2_for_the_shell_too(start: Start) -> None:
    process = start("--block-size", "1XB")
    out, err = process.communicate(timeout=DEADLINE_S)
    assert (process.returncode, out) == (2, "")
    assert err.startswith("kbtp: Invalid value for '--block-size': unknown unit 'XB' in '1XB': use one of ")
    assert len(err.splitlines()) == 1


# --- in this process ---------------------------------------------------------------------------


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Iterator[Run]:
    """`run(*arguments)`: exit status, standard output and standard error of `kbtp serve` in this process."""
    handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}

    def call(*arguments: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["kbtp", "serve", *arguments])
        with pytest.raises(SystemExit) as ended:
            main()
        captured = capsys.readouterr()
        assert isinstance(ended.value.code, int)
        return ended.value.code, captured.out, captured.err

    yield call
    for number, handler in handlers.items():
        signal.signal(number, handler)


def test_the_ready_line_is_for_programs(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Server, "run", Server.close)
    status, out, err = run("--port", "0", "--json", "--namespace", "llama", *SMALL)
    assert (status, err) == (0, "")
    ready = json.loads(out)
    assert (ready["pool_blocks"], ready["namespace"], ready["pid"]) == (8, "llama", os.getpid())


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_it_serves_until_a_signal_comes(run: Run, monkeypatch: pytest.MonkeyPatch, number: signal.Signals) -> None:
    serve_until_stopped = Server.run

    def signal_once_served(server: Server) -> None:
        signaller = threading.Thread(target=lambda: os.kill(os.getpid(), number))
        signaller.start()
        serve_until_stopped(server)
        signaller.join(DEADLINE_S)

    monkeypatch.setattr(Server, "run", signal_once_served)
    status, out, err = run("--port", "0", *SMALL)
    assert (status, err) == (0, "")
    assert out.startswith("kbtp: serving kbtp://127.0.0.1:")


def test_the_second_signal_exits_at_once(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    exits: list[int] = []
    monkeypatch.setattr(os, "_exit", exits.append)

    def signalled_twice(server: Server) -> None:
        signal.raise_signal(signal.SIGTERM)
        assert server.stopping
        assert exits == []
        signal.raise_signal(signal.SIGINT)
        server.close()

    monkeypatch.setattr(Server, "run", signalled_twice)
    assert run("--port", "0", *SMALL)[0] == 0
    assert exits == [128 + signal.SIGINT]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--block-size", "1XB"), "'--block-size': unknown unit 'XB'"),
        (("--block-size", "1000"), "block size of 1000 octets: must be 512 to 1073741824, a multiple of 64"),
        (("--block-size", "0", "--pool-size", "1MiB"), "holds no block of 0"),
        (("--pool-size", "1000"), "a pool of 1000 octets holds no block of 1048576"),
        (("--pool-size", "4MiB", "--pool-blocks", "4"), "say the same thing; give one of them"),
        (("--pool-blocks", "0"), "pool blocks of 0"),
        (("--pool-size", "512TiB", "--block-size", "1GiB"), "of memory are available; give a smaller --pool-size"),
        (("--quota", "9", *SMALL), "quota of 9: must be 0 to 8"),
        (("--credits", "0", *SMALL), "request credits of 0"),
        (("--name", "n" * 256, *SMALL), "name of 256 octets"),
        (("--namespace", "n" * 256, *SMALL), "namespace of 256 octets"),
        (("--linger", "soon", *SMALL), "'soon' is not a time such as 30s, 5min, 2h or forever"),
        (("--port", "65536"), "'--port'"),
        (("--rnic", "mlx5", *SMALL), "there is no RNIC named 'mlx5'; known are auto, native, reference"),
        (("--rnic", "rdma_core:nosuch0", *SMALL), "cannot open the RNIC rdma_core:nosuch0: "),
        (("--threads", "0", *SMALL), "'--threads'"),
        (("--threads", "2", "--rnic", "reference", *SMALL), "2 threads: the RNIC 'reference' serves on 1"),
        (("--host", "no-such-host.invalid", *SMALL), "cannot listen on kbtp://no-such-host.invalid:5287"),
        (("--host", "a" * 64, *SMALL), "cannot listen on"),
        (("--log-level", "loud"), "'--log-level'"),
        (("--no-such-option",), "--no-such-option"),
        (("surplus",), "surplus"),
    ],
)
def test_what_cannot_work_is_one_line_and_status_2(run: Run, arguments: tuple[str, ...], said: str) -> None:
    status, out, err = run(*arguments)
    assert (status, out) == (2, "")
    assert said in err
    assert err.startswith("kbtp: ")
    assert len(err.splitlines()) == 1


def test_a_port_in_use(run: Run) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        status, out, err = run("--port", str(port), *SMALL)
    assert (status, out) == (2, "")
    assert err == f"kbtp: cannot listen on kbtp://127.0.0.1:{port}: Address already in use\n"


@pytest.mark.parametrize("error", [MemoryError("no more"), OSError(12, "Cannot allocate memory")])
def test_a_pool_that_the_system_does_not_give(run: Run, monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr("mmap.mmap", refuse)
    status, _, err = run("--port", "0", *SMALL)
    assert status == 2
    assert err.startswith("kbtp: cannot allocate a pool of 32 KiB: ")


# --- where settings come from ------------------------------------------------------------------


@pytest.fixture
def settings(run: Run, monkeypatch: pytest.MonkeyPatch) -> Settings:
    """`settings(*arguments)`: the configuration of the target that `kbtp serve` would run."""
    seen: list[TargetConfig] = []

    def note(server: Server) -> None:
        seen.append(server.config)
        server.close()

    monkeypatch.setattr(Server, "run", note)

    def call(*arguments: str) -> TargetConfig:
        status, _, err = run("--port", "0", *arguments)
        assert (status, err) == (0, "")
        return seen.pop()

    return call


@pytest.fixture
def config_file(tmp_path: Path) -> Callable[[str], str]:
    """`config_file(text)`: the path of a TOML file with that text."""

    def write(text: str) -> str:
        path = tmp_path / "kbtp.toml"
        path.write_text(text)
        return str(path)

    return write


def test_without_settings_the_defaults_are_those_of_the_code(settings: Settings) -> None:
    assert settings() == TargetConfig()


def test_every_setting_by_flag(settings: Settings) -> None:
    config = settings(
        "--block-size", "2MiB", "--pool-size", "7MiB", "--quota", "1", "--max-quota", "2", "--namespace", "llama",
        "--name", "cache-0", "--linger", "forever", "--drain", "250ms", "--credits", "7", "--direct", "load,alloc",
        "--direct-blocks", "2", "--ticket-timeout", "1500ms",
    )  # fmt: skip
    assert config == TargetConfig(
        block_size_bytes=2 << 20, pool_blocks=3, quota=1, max_quota=2, namespace=b"llama", name="cache-0",
        linger_s=float("inf"), drain_s=0.25, request_credits=7,
        direct=Feature.DIRECT_LOAD | Feature.DIRECT_ALLOC, direct_blocks=2, ticket_timeout_s=1.5,
    )  # fmt: skip


def test_no_crc_is_asked_for_only_by_who_says_so(
    run: Run, config_file: Callable[[str], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[bool] = []

    def note(server: Server) -> None:
        seen.append(server._rnic.options.mpa.crc)
        server.close()

    monkeypatch.setattr(Server, "run", note)
    monkeypatch.delenv("KBTP_CRC", raising=False)
    path = config_file("[serve]\ncrc = false\n")
    for name in ("native", "reference"):
        for arguments in ((), ("--no-crc",), ("--config", path), ("--config", path, "--crc")):
            status, _, _ = run("--port", "0", "--rnic", name, *arguments)
            assert status == 0
    assert seen == [True, False, False, True] * 2
    monkeypatch.setenv("KBTP_CRC", "off")
    for arguments in ((), ("--crc",)):
        run("--port", "0", *arguments)
    assert seen[8:] == [False, True]


def test_every_setting_by_file(settings: Settings, config_file: Callable[[str], str]) -> None:
    path = config_file("""
        [serve]
        host = "127.0.0.2"
        block-size = "2MiB"
        pool-size = 7340032
        quota = 1
        max-quota = 2
        namespace = "llama"
        name = "cache-0"
        linger = inf
        drain = 0.25
        credits = 7
        direct = "load,alloc"
        direct-blocks = 2
        ticket-timeout = 1.5
        log-level = "warning"
    """)
    assert settings("--config", path) == TargetConfig(
        block_size_bytes=2 << 20, pool_blocks=3, quota=1, max_quota=2, namespace=b"llama", name="cache-0",
        linger_s=float("inf"), drain_s=0.25, request_credits=7,
        direct=Feature.DIRECT_LOAD | Feature.DIRECT_ALLOC, direct_blocks=2, ticket_timeout_s=1.5,
    )  # fmt: skip


def test_a_flag_wins_over_the_environment_and_that_over_the_file(
    settings: Settings, config_file: Callable[[str], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = config_file('[serve]\nname = "file"\nnamespace = "file"\nquota = 1\n')
    monkeypatch.setenv("KBTP_NAME", "environment")
    monkeypatch.setenv("KBTP_NAMESPACE", "environment")
    config = settings("--config", path, "--name", "flag")
    assert (config.name, config.namespace, config.quota) == ("flag", b"environment", 1)
    monkeypatch.setenv("KBTP_CONFIG", path)
    assert settings().quota == 1


def test_the_size_of_the_pool_comes_from_where_it_counts_most(
    settings: Settings, config_file: Callable[[str], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = config_file('[serve]\npool-size = "4MiB"\n')
    assert settings("--config", path).pool_blocks == 4
    assert settings("--config", path, "--pool-blocks", "5").pool_blocks == 5
    monkeypatch.setenv("KBTP_POOL_BLOCKS", "6")
    assert settings("--config", path).pool_blocks == 6
    assert settings("--config", path, "--pool-size", "7MiB").pool_blocks == 7


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (
            "[serve]\nblok-size = 1\n",
            "unknown setting 'blok-size' in [serve]; there are announce, block-size, crc, credits, ",
        ),
        ("[serve]\nconfig = 'x'\n", "unknown setting 'config'"),
        ("[serve]\nblock_size = 1\n", "unknown setting 'block_size'"),
        ("block-size = 4096\n", "unknown table or setting 'block-size'; settings belong in [serve]"),
        ("[server]\nquota = 1\n", "unknown table or setting 'server'"),
        ("serve = 5\n", "[serve] must be a table"),
        ("[serve\n", "cannot read"),
        ("[serve]\nquota = 'many'\n", "'many' is not a valid integer"),
        ("[serve]\nblock-size = true\n", "True is not size"),
        ("[serve]\nblock-size = '1XB'\n", "unknown unit 'XB'"),
    ],
)
def test_a_file_that_cannot_work(run: Run, config_file: Callable[[str], str], text: str, said: str) -> None:
    status, out, err = run("--config", config_file(text))
    assert (status, out) == (2, "")
    assert said in err
    assert len(err.splitlines()) == 1


def test_a_file_that_cannot_be_read(run: Run, tmp_path: Path) -> None:
    missing, binary = tmp_path / "missing.toml", tmp_path / "binary.toml"
    binary.write_bytes(b"\xff\xfe")
    for path in (missing, binary, tmp_path):
        status, _, err = run("--config", str(path))
        assert status == 2
        assert str(path) in err
        assert len(err.splitlines()) == 1


# --- memory ------------------------------------------------------------------------------------

MEMINFO = "MemTotal:  32000 kB\nMemFree:  9000 kB\nMemAvailable:   16000 kB\n"


@pytest.mark.parametrize(
    ("files", "available"),
    [
        ({"meminfo": MEMINFO}, 16000 * 1024),
        ({"meminfo": MEMINFO, "memory.max": "max\n"}, 16000 * 1024),
        (
            {"meminfo": MEMINFO, "memory.max": "9000", "memory.current": "7000", "memory.stat": "anon 5\n"},
            2000,
        ),
        (
            {"meminfo": MEMINFO, "memory.max": "9000", "memory.current": "7000", "memory.stat": "inactive_file 500\n"},
            2500,
        ),
        ({"meminfo": MEMINFO, "memory.max": "5000", "memory.current": "7000", "memory.stat": ""}, 0),
        ({"meminfo": MEMINFO, "memory.max": "nonsense"}, 16000 * 1024),
        ({}, None),
    ],
    ids=["system", "group without limit", "group", "group with cached files", "group used up", "unreadable", "nothing"],
)
def test_the_memory_there_is_is_the_least_that_anyone_says(
    monkeypatch: pytest.MonkeyPatch, files: dict[str, str], available: int | None
) -> None:
    def read_text(path: Path) -> Any:
        try:
            return files[path.name]
        except KeyError:
            raise FileNotFoundError(path) from None

    monkeypatch.setattr(Path, "read_text", read_text)
    assert available_memory_bytes() == available


def test_where_nobody_says_how_much_memory_there_is_it_is_tried(
    settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys.modules["kbtp.cli.serve"], "available_memory_bytes", lambda: None)
    assert settings(*SMALL).pool_blocks == 8
