"""`kbtp conformance`."""

from __future__ import annotations

import json
import socket
import sys
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from kbtp.cli import main
from kbtp.conformance import catalogue
from kbtp.key_file import add_key
from kbtp.keys import Key
from kbtp.rnic import open_rnic
from kbtp.target.config import TargetConfig
from kbtp.target.server import Server

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    server = Server(TargetConfig(block_size_bytes=1 << 16), open_rnic())
    address = server.listen(port=0)
    server.start()
    yield str(address)
    server.stop()


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Run:
    """`run(*arguments)`: exit status, standard output and standard error of `kbtp conformance`."""

    def call(*arguments: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["kbtp", "conformance", *arguments])
        with pytest.raises(SystemExit) as ended:
            main()
        captured = capsys.readouterr()
        assert isinstance(ended.value.code, int)
        return ended.value.code, captured.out, captured.err

    return call


def test_cases_are_listed_without_a_peer(run: Run) -> None:
    status, out, _ = run("--list")
    assert status == 0
    assert len(out.splitlines()) == len(catalogue.cases())
    status, out, _ = run("--list", "-k", "profile 6.1;", "-k", "target/races/freed")
    assert "target/races/freed-while-it-is-read  [KR1, KR2, KR3; profile 6.1; draft 6.4 step 2]" in out


def test_a_target_that_passes(run: Run, url: str, tmp_path: Path) -> None:
    junit = tmp_path / "junit.xml"
    status, out, err = run(url, "-k", "target/blocks/", "--junit", str(junit))
    assert status == 0, err
    assert "draft 6" in out and "passed" in out
    assert len(ElementTree.parse(junit).getroot()) == len(
        [case for case in catalogue.cases() if case.name.startswith("target/blocks/")]
    )


def test_json_and_expectations(run: Run, url: str, tmp_path: Path) -> None:
    file = tmp_path / "expectations.toml"
    file.write_text(
        '[skip]\n"target/blocks/allow-unsealed" = "we have no seals"\n'
        '[fail]\n"target/blocks/any-request-id-is-echoed" = "fixed in 2.1"\n'
    )
    status, out, err = run(url, "-k", "blocks/a", "--expect", str(file), "--json")
    told = json.loads(out)
    outcomes = {case["name"].rpartition("/")[2]: case["outcome"] for case in told["cases"]}
    assert outcomes["allow-unsealed"] == "skipped"
    assert outcomes["any-request-id-is-echoed"] == "passed though expected to fail"
    assert outcomes["alloc-store-of-a-bound-handle"] == "passed"
    assert (status, told["failed"], err) == (1, True, "")


def test_a_report_that_cannot_be_written_costs_nothing_else(run: Run, url: str, tmp_path: Path) -> None:
    junit = tmp_path / "no such folder" / "junit.xml"
    status, out, err = run(url, "-k", "target/blocks/allow-unsealed", "--json", "--junit", str(junit))
    assert [case["outcome"] for case in json.loads(out)["cases"]] == ["passed"]
    assert (status, err) == (
        2,
        f"kbtp: cannot write --junit {junit}: No such file or directory; "
        "name a file that you may write, in a folder that is there\n",
    )


@pytest.mark.parametrize("streams", [(), ("--rnic", "native")], ids=["by hand", "native"])
def test_a_place_to_listen_that_is_taken(run: Run, streams: tuple[str, ...]) -> None:
    words = ("-k", "initiator-requests/whole-workload")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        place = f"127.0.0.1:{taken.getsockname()[1]}"
        status, _, err = run("--role", "initiator", "--listen", place, *streams, *words)
    assert (status, len(err.splitlines())) == (2, 1)
    assert f"cannot listen on kbtp://{place}: Address already in use" in err
    assert "name an address of this machine and a port that is free" in err


def test_what_a_target_is_not_configured_for_is_skipped_with_the_reason(run: Run, url: str) -> None:
    status, out, _ = run(url, "-k", "target/direct/", "--json")
    assert status == 0
    cases = json.loads(out)["cases"]
    assert {case["outcome"] for case in cases} == {"skipped"}
    assert all("not configured for it: the target grants DIRECT_" in case["reason"] for case in cases)


def test_what_keys_there_are_says_the_key_file(run: Run, url: str, tmp_path: Path) -> None:
    """Cases for targets without keys are not run against one with, nor the other way round."""
    file, words = (
        tmp_path / "keys",
        ("-k", "auth-without-keys", "-k", "replayed-hello", "-k", "identity-is-of-a-domain"),
    )

    def skipped(*arguments: str) -> set[str]:
        _, out, _ = run(url, *arguments, *words, "--json")
        return {case["name"].rpartition("/")[2] for case in json.loads(out)["cases"] if case["outcome"] == "skipped"}

    assert skipped("--with", "short-waits") == {"replayed-hello", "identity-is-of-a-domain"}
    add_key(file, Key(1, bytes(range(32)), "here"))
    assert skipped("--key-file", str(file)) == {"auth-without-keys", "identity-is-of-a-domain"}
    add_key(file, Key(2, bytes(range(32)), "there"))
    assert skipped("--key-file", str(file), "--with", "keys") == {"auth-without-keys"}


@pytest.mark.parametrize("streams", [(), ("--rnic", "native")], ids=["by hand", "native"])
def test_an_initiator_that_passes(run: Run, streams: tuple[str, ...]) -> None:
    command = f"{sys.executable} -m kbtp.conformance.workload"
    words = ("-k", "initiator-requests/whole-workload")
    status, out, err = run("--role", "initiator", "--run", command, *streams, *words)
    assert (status, err) == (0, "")
    assert "passed" in out


def test_nobody_listens(run: Run) -> None:
    status, _, err = run("kbtp://127.0.0.1:1", "-k", "target/blocks/allow")
    assert status == 1
    assert "Connection refused" in err


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ((), "needs its URL"),
        (("kbtp://127.0.0.1", "--run", "x"), "neither --run nor --listen"),
        (("kbtp://127.0.0.1", "--role", "initiator"), "give --listen or --run"),
        (("--role", "initiator"), "give --run and the command"),
        (("--role", "initiator", "--run", "no-such-program {url}"), "there is no program 'no-such-program'"),
        (("--role", "initiator", "--run", ""), "there is no program ''"),
        (("--role", "initiator", "--run", "'./client"), "No closing quotation"),
        (("kbtp://127.0.0.1", "--with", "magic"), "there are direct-load"),
        (("kbtp://127.0.0.1", "--with", "keys"), "--key-file says otherwise"),
        (("kbtp://127.0.0.1", "-k", "no such case"), "no case holds"),
        (("kbtp://127.0.0.1", "--expect", "none.toml"), "cannot read none.toml"),
        (("kbtp://127.0.0.1", "--key-file", "none.keys"), "cannot be read"),
    ],
)
def test_what_cannot_work_is_said(run: Run, arguments: tuple[str, ...], said: str) -> None:
    status, _, err = run(*arguments)
    assert status == 2
    assert said in err
