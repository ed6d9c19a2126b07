"""`kbtp doctor`."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from kbtp.cli import main
from kbtp.doctor import report
from kbtp.doctor.tree import Tree
from kbtp.key_file import write_key
from kbtp.keys import Key, Keys
from kbtp.rnic import open_rnic
from kbtp.target.config import TargetConfig
from kbtp.target.server import Server
from tests.doctor import made_up

Run = Callable[..., tuple[int, str, str]]
KEY = Key(7, b"k" * 32)


@pytest.fixture
def url() -> Iterator[str]:
    """Of a target with a key and the namespace llama."""
    config = TargetConfig(block_size_bytes=1 << 16, pool_blocks=16, namespace=b"llama", keys=Keys([KEY]))
    server = Server(config, open_rnic())
    address = server.listen(port=0)
    server.start()
    yield str(address)
    server.stop()


@pytest.fixture(autouse=True)
def bare(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A machine that has nothing, whatever the one of the tests has; files are added below it."""
    root = tmp_path / "machine"
    root.mkdir()
    monkeypatch.setattr(import_module("kbtp.cli.doctor"), "Tree", lambda: Tree(root))
    for name in ("KBTP_RNIC", "KBTP_SPIN_US", "KBTP_KEY_FILE", "KBTP_NAMESPACE"):
        monkeypatch.delenv(name, raising=False)
    return root


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Run:
    """`run(*arguments)`: exit status, standard output and standard error of `kbtp doctor`."""

    def call(*arguments: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["kbtp", "doctor", *arguments])
        with pytest.raises(SystemExit) as ended:
            main()
        captured = capsys.readouterr()
        assert isinstance(ended.value.code, int)
        return ended.value.code, captured.out, captured.err

    return call


def test_a_machine_that_has_nothing_is_told_of_and_well(run: Run) -> None:
    status, out, err = run()
    assert (status, err) == (0, "")
    assert "note     devices: none: user-space iWARP over TCP needs none" in out
    assert "auto: takes native: it works, and none is better" in out
    assert out.splitlines()[-1] == "nothing is wrong"


def test_a_problem_is_status_1_and_says_what_to_do(run: Run, bare: Path) -> None:
    made_up.write(bare, made_up.IB_DOWN)
    status, out, err = run()
    assert (status, err) == (1, "")
    lines = out.splitlines()
    at = next(index for index, line in enumerate(lines) if "mlx4_0 port 2" in line)
    assert lines[at].startswith("  problem  mlx4_0 port 2: INIT")
    assert "-> no subnet manager" in lines[at + 1]
    assert lines[-1].endswith("problems")


def test_garbage_is_survived(run: Run, bare: Path) -> None:
    made_up.write(bare, made_up.GARBAGE)
    for arguments in ((), ("--json",)):
        status, out, err = run(*arguments)
        assert (status, err) == (1, "")
        assert "unknown: " in out or '{"unknown": ' in out


@pytest.mark.parametrize("form", ["flags", "environment"])
def test_a_target_that_is_reached(
    run: Run, url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, form: str
) -> None:
    key_file = tmp_path / "one.key"
    write_key(key_file, KEY)
    arguments = ["--key-file", str(key_file), "--namespace", "llama", "--timeout", "10s"]
    if form == "environment":
        monkeypatch.setenv("KBTP_KEY_FILE", str(key_file))
        monkeypatch.setenv("KBTP_NAMESPACE", "llama")
        arguments = []
    status, out, err = run(url, *arguments)
    assert (status, err) == (0, "")
    for step in ("url", "lookup", "tcp", "mpa", "hello", "end"):
        assert f"  ok       {step}: " in out
    assert " ms]" in out


def test_a_target_that_is_not_reached(run: Run, url: str) -> None:
    status, out, err = run(url)
    assert (status, err) == (1, "")
    assert "  problem  hello: ACCESS_DENIED" in out
    assert "the first step that fails is hello; what comes after it was not tried" in out
    assert out.splitlines()[-1] == "1 problem"


def test_the_object_for_programs(run: Run, url: str, bare: Path) -> None:
    made_up.write(bare, made_up.mlx5(*made_up.MLX5_GIDS))
    status, out, err = run("--json", url)
    assert (status, err) == (1, "")
    assert len(out.splitlines()) == 1
    seen: dict[str, Any] = json.loads(out)
    assert sorted(seen) == ["format", "healthy", "problems", "reach", "sections"]
    assert (seen["format"], seen["healthy"]) == (report.FORMAT, False)
    assert list(seen["sections"]) == ["rdma", "rnic", "machine"]
    for section in seen["sections"].values():
        assert sorted(section) == ["facts", "findings"]
        for finding in section["findings"]:
            assert sorted(finding) == ["about", "do", "level", "says"]
            assert finding["level"] in ("ok", "note", "problem")
    facts = {name: section["facts"] for name, section in seen["sections"].items()}
    (device,) = facts["rdma"]["devices"]
    assert device["ports"][0]["gids"][3] == {"index": 3, "gid": "10.0.0.7", "scope": "IPv4", "type": "RoCE v2"}
    assert device["netdevs"] == [{"name": "enp1s0f0", "mtu_bytes": 1500, "state": "up"}]
    assert facts["rnic"]["auto"] == "native"
    assert facts["rnic"]["native_build"]["events"] == "epoll"
    assert facts["machine"]["memory_bytes"] == {"unknown": "there is no /proc/meminfo"}
    assert sorted(facts["machine"]["memlock_bytes"]) == ["hard", "soft"]
    reach = seen["reach"]
    assert (reach["url"], reach["reached"], reach["failed_step"]) == (url, False, "hello")
    assert [step["step"] for step in reach["steps"]] == ["url", "lookup", "tcp", "mpa", "hello"]
    for step in reach["steps"]:
        assert sorted(step) == ["about", "do", "level", "says", "seen", "step", "took_ms"]


def test_without_a_url_there_is_nothing_to_reach(run: Run) -> None:
    assert json.loads(run("--json")[1])["reach"] is None


def test_a_name_that_is_no_url_is_a_step_that_fails(run: Run) -> None:
    status, out, err = run("http://10.0.0.7")
    assert (status, err) == (1, "")
    assert "  problem  url: " in out


@pytest.mark.parametrize(
    "arguments",
    [
        ("--timeout", "forever", "kbtp://h"),
        ("--timeout", "0s", "kbtp://h"),
        ("--timeout", "soon"),
        ("--key-file", "no such file", "kbtp://h"),
        ("kbtp://h", "kbtp://h"),
    ],
)
def test_what_cannot_work_is_one_line_and_status_2(run: Run, arguments: tuple[str, ...]) -> None:
    status, out, err = run(*arguments)
    assert (status, out) == (2, "")
    assert len(err.splitlines()) == 1


def test_help_shows_examples(run: Run) -> None:
    status, out, err = run("--help")
    assert (status, err) == (0, "")
    assert "  kbtp doctor kbtp://10.0.0.7 --key-file prefill.key --timeout 1s\n" in out


def test_it_looks_at_the_machine_it_runs_on() -> None:
    """As it is, in a process of its own: nothing there makes it fail."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    done = subprocess.run(
        [sys.executable, "-m", "kbtp", "doctor", "--json", f"kbtp://127.0.0.1:{port}"],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        timeout=30,
        check=False,
    )
    assert (done.returncode, done.stderr) == (1, "")
    assert json.loads(done.stdout)["reach"]["failed_step"] == "tcp"
