"""`kbtp keys`, and the verbs that use keys."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import NoReturn

import pytest

import kbtp
from kbtp.cli import main
from kbtp.key_file import add_key, read_key, read_keys
from kbtp.keys import Key, Keys
from kbtp.types import Feature

DEADLINE_S = 30.0
A, B = Key(1, bytes(range(32)), "a"), Key(2, bytes(range(1, 33)), "b")

Run = Callable[..., tuple[int, str, str]]
Start = Callable[..., "subprocess.Popen[str]"]


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Run:
    """`run(*arguments)`: exit status, standard output and standard error of `kbtp`."""

    def call(*arguments: object) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["kbtp", *map(str, arguments)])
        with pytest.raises(SystemExit) as ended:
            main()
        captured = capsys.readouterr()
        assert isinstance(ended.value.code, int)
        return ended.value.code, captured.out, captured.err

    return call


@pytest.fixture
def start() -> Iterator[Start]:
    """`start(*arguments)`: `kbtp serve` in a process of its own."""
    with ExitStack() as stack:

        def spawn(*arguments: object) -> subprocess.Popen[str]:
            process = subprocess.Popen(
                [sys.executable, "-m", "kbtp", "serve", "--port", "0", "--json", "--block-size", "4KiB",
                 "--pool-blocks", "64", *map(str, arguments)],
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
            )  # fmt: skip
            stack.enter_context(process)
            stack.callback(process.kill)
            return process

        yield spawn


def url_of(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    url: str = json.loads(process.stdout.readline())["url"]
    return url


def wait_for_line(process: subprocess.Popen[str], part: str) -> None:
    assert process.stderr is not None
    while part not in (line := process.stderr.readline()):
        assert line, f"it ended without saying {part!r}"


@pytest.fixture
def keys_file(tmp_path: Path) -> Path:
    """With A's and B's key."""
    path = tmp_path / "target.keys"
    add_key(path, A)
    add_key(path, B)
    return path


@pytest.fixture
def a_file(tmp_path: Path) -> Path:
    """With A's key alone."""
    path = tmp_path / "a.key"
    add_key(path, A)
    return path


# --- new and list ---


def test_a_new_key_and_its_initiators_file(run: Run, tmp_path: Path) -> None:
    target, client = tmp_path / "target.keys", tmp_path / "prefill.key"
    status, out, err = run("keys", "new", "--domain", "team-a", "--direct", "load", "--client", client, target)
    assert (status, err) == (0, "")
    [key] = read_keys(target)
    assert (key.domain, key.direct, len(key.secret)) == ("team-a", Feature.DIRECT_LOAD, 32)
    assert read_key(client) == key
    assert f"key {key.name} of trust domain team-a" in out
    assert f"KBTP_KEY_FILE={client}" in out
    assert key.secret.hex() not in out


def test_each_new_key_is_another_one(run: Run, tmp_path: Path) -> None:
    target = tmp_path / "target.keys"
    for _ in range(3):
        assert run("keys", "new", target)[0] == 0
    keys = list(read_keys(target))
    assert len({key.key_id for key in keys}) == len({key.secret for key in keys}) == 3
    assert {(key.domain, key.direct) for key in keys} == {("default", Feature.NONE)}


def test_the_secret_is_printed_only_when_asked_for(run: Run, tmp_path: Path) -> None:
    target = tmp_path / "target.keys"
    shown = run("keys", "new", "--show-secret", target)[1]
    [key] = read_keys(target)
    assert key.line in shown.splitlines()
    made = json.loads(run("keys", "new", "--json", target)[1])
    assert made["key_id"] in {key.name for key in read_keys(target)}
    assert "secret" not in made
    assert len(json.loads(run("keys", "new", "--json", "--show-secret", target)[1])["secret"]) == 64


def test_keys_are_listed_without_secrets(run: Run, keys_file: Path) -> None:
    status, out, err = run("keys", "list", keys_file)
    assert (status, err) == (0, "")
    assert [line.split() for line in out.splitlines()[1:]] == [["00000001", "a", "none"], ["00000002", "b", "none"]]
    assert json.loads(run("keys", "list", "--json", keys_file)[1]) == [
        {"key_id": "00000001", "domain": "a", "direct": "none"},
        {"key_id": "00000002", "domain": "b", "direct": "none"},
    ]


@pytest.mark.parametrize(
    "arguments",
    [
        ("new", "--domain", "a b", "FILE"),
        ("new", "--direct", "store", "FILE"),
        ("new", "--client", "FILE", "FILE"),
        ("new",),
        ("list", "MISSING"),
        ("list",),
    ],
)
def test_what_cannot_work_is_one_line_and_changes_nothing(
    run: Run, keys_file: Path, arguments: tuple[str, ...]
) -> None:
    names = {"FILE": keys_file, "MISSING": keys_file.with_name("missing")}
    status, out, err = run("keys", *(names.get(argument, argument) for argument in arguments))
    assert (status, out) == (2, "")
    assert len(err.splitlines()) == 1
    assert read_keys(keys_file) == Keys((A, B))


def test_an_initiators_file_is_not_left_where_its_key_was_not_added(run: Run, keys_file: Path, tmp_path: Path) -> None:
    keys_file.chmod(0o644)
    client = tmp_path / "new.key"
    status, _, err = run("keys", "new", "--client", client, keys_file)
    assert status == 2
    assert "chmod 600 it" in err
    assert not client.exists()


def test_nor_where_that_was_interrupted(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*_: object) -> NoReturn:
        raise KeyboardInterrupt

    monkeypatch.setattr(sys.modules["kbtp.cli.keys"], "add_key", interrupt)
    assert run("keys", "new", "--client", tmp_path / "new.key", tmp_path / "target.keys")[0] == 130
    assert list(tmp_path.iterdir()) == []


# --- serve, stat, bench ---


def test_a_target_with_keys(
    run: Run, start: Start, keys_file: Path, a_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = url_of(start("--keys", keys_file))
    status, _, err = run("stat", url)
    assert status == 1
    assert err.startswith("kbtp: ACCESS_DENIED: ")
    assert "the target wants a key" in err
    assert json.loads(run("stat", url, "--json", "--key-file", a_file)[1])["url"] == url
    monkeypatch.setenv("KBTP_KEY_FILE", str(a_file))
    assert json.loads(run("stat", url, "--json")[1])["url"] == url
    short = ("--rnic", "reference", "--rounds", "1", "--seconds", "10ms", "--outstanding", "4", "--initiators", "1")
    status, out, err = run("bench", url, *short, "--block-size", "4KiB", "--operation", "load", "--json")
    assert (status, err) == (0, "")
    assert json.loads(out)["rows"]


def test_a_target_of_benchs_own_has_no_keys(run: Run, a_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KBTP_KEY_FILE", str(a_file))
    short = ("--rnic", "reference", "--rounds", "1", "--seconds", "10ms", "--outstanding", "4", "--initiators", "1")
    assert run("bench", *short, "--block-size", "4KiB", "--operation", "load", "--json")[0] == 0


def test_the_keys_file_is_a_setting_like_any_other(run: Run, start: Start, keys_file: Path, tmp_path: Path) -> None:
    config = tmp_path / "kbtp.toml"
    config.write_text(f'[serve]\nkeys = "{keys_file}"\n')
    url = url_of(start("--config", config))
    assert run("stat", url)[0] == 1
    with kbtp.connect(url, key=A):
        pass


@pytest.mark.parametrize("why", ["chmod 600 it", "cannot be read", "no key is in it"])
def test_a_keys_file_that_cannot_be_used_keeps_a_target_from_starting(run: Run, keys_file: Path, why: str) -> None:
    if why == "chmod 600 it":
        keys_file.chmod(0o640)
    elif why == "no key is in it":
        keys_file.write_text("")
    else:
        keys_file.unlink()
    status, out, err = run("serve", "--keys", keys_file)
    assert (status, out) == (2, "")
    assert why in err
    assert len(err.splitlines()) == 1


def test_sighup_reads_the_keys_again(start: Start, keys_file: Path) -> None:
    process = start("--keys", keys_file)
    url = url_of(process)
    stays, goes = kbtp.connect(url, key=A), kbtp.connect(url, key=B)
    new = Key(3, bytes(range(2, 34)), "c")
    keys_file.write_text(f"{A.line}\n{new.line}\n")
    process.send_signal(signal.SIGHUP)
    wait_for_line(process, "2 keys were read")
    wait_for_line(process, "its key is not valid any more")
    with pytest.raises(kbtp.ConnectionLost):
        goes.alloc_store(b"x")
    with kbtp.connect(url, key=new) as client:
        client.free(client.alloc_store(b"x"))
    stays.free(stays.alloc_store(b"x"))

    keys_file.chmod(0o644)
    process.send_signal(signal.SIGHUP)
    wait_for_line(process, "the keys stay as they are")
    stays.free(stays.alloc_store(b"x"))
    stays.close()
    process.send_signal(signal.SIGTERM)
    assert process.wait(DEADLINE_S) == 0
