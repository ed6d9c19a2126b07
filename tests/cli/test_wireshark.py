"""`kbtp wireshark`: the dissector comes and goes, and nothing else does."""

from __future__ import annotations

import errno
import json
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from kbtp.cli.wireshark import dissector, wireshark


def run(*arguments: str) -> Result:
    return CliRunner().invoke(wireshark, list(arguments))


def test_it_is_installed_printed_and_removed(tmp_path: Path) -> None:
    folder = tmp_path / "new" / "plugins"
    path = folder / "kbtp.lua"
    assert run("install", "--folder", str(folder), "--print").output == f"{path}\n"
    assert not folder.exists()
    assert run("install", "--folder", str(folder)).output == f"{path}\n"
    assert path.read_text() == dissector()
    assert run("remove", "--folder", str(folder)).output == f"{path}\n"
    assert list(folder.iterdir()) == []


def test_an_older_one_is_replaced(tmp_path: Path) -> None:
    path = tmp_path / "kbtp.lua"
    path.write_text(dissector().partition("\n")[0] + "\n-- of an older release")
    assert run("install", "--folder", str(tmp_path)).exit_code == 0
    assert path.read_text() == dissector()


@pytest.mark.parametrize("verb", ["install", "remove"])
def test_a_file_of_somebody_else_is_left_alone(tmp_path: Path, verb: str) -> None:
    path = tmp_path / "kbtp.lua"
    path.write_text("-- mine\n")
    result = run(verb, "--folder", str(tmp_path))
    assert (result.exit_code, path.read_text()) == (2, "-- mine\n")
    assert "is not the dissector" in result.output
    assert "--folder" in result.output


@pytest.mark.parametrize("verb", ["install", "remove"])
def test_what_cannot_be_read_is_left_alone(tmp_path: Path, verb: str) -> None:
    path = tmp_path / "kbtp.lua"
    path.mkdir()
    result = run(verb, "--folder", str(tmp_path))
    assert (result.exit_code, result.output) == (2, f"Error: {path}: Is a directory\n")


def test_what_may_not_be_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def unlink(_path: Path) -> None:
        raise PermissionError(errno.EACCES, "Permission denied")

    run("install", "--folder", str(tmp_path))
    monkeypatch.setattr(Path, "unlink", unlink)
    result = run("remove", "--folder", str(tmp_path))
    assert (result.exit_code, result.output) == (2, f"Error: {tmp_path / 'kbtp.lua'}: Permission denied\n")


def test_json_says_where(tmp_path: Path) -> None:
    for verb in ("install", "remove"):
        assert json.loads(run(verb, "--folder", str(tmp_path), "--json").output) == {"path": str(tmp_path / "kbtp.lua")}


def test_what_is_not_there_cannot_be_removed(tmp_path: Path) -> None:
    result = run("remove", "--folder", str(tmp_path))
    assert result.exit_code == 1
    assert result.output.startswith(f"Error: {tmp_path / 'kbtp.lua'} is not there; ")


def test_a_folder_that_cannot_be(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    assert run("install", "--folder", str(tmp_path / "file" / "plugins")).exit_code == 2


def test_tshark_says_where(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tshark = tmp_path / "tshark"
    tshark.write_text(f"#!/bin/sh\nprintf 'Temp:\\t/t\\nPersonal Lua Plugins:\\t{tmp_path}/lua\\n'\n")
    tshark.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    assert run("install", "--print").output == f"{tmp_path}/lua/kbtp.lua\n"


@pytest.mark.parametrize("script", ["#!/bin/sh\nexec sleep 60\n", "#!/no/such/program\n"], ids=["hangs", "broken"])
@pytest.mark.parametrize("verb", ["install", "remove"])
def test_a_tshark_that_does_not_say_where(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, verb: str, script: str
) -> None:
    tshark = tmp_path / "tshark"
    tshark.write_text(script)
    tshark.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    monkeypatch.setattr(sys.modules["kbtp.cli.wireshark"], "_ASK_TIMEOUT_S", 0.1)
    result = run(verb)
    assert result.exit_code == 2
    assert result.output.startswith(f"Error: {tshark} does not say ")
    assert "--folder" in result.output


def test_without_tshark_it_is_the_usual_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("HOME", str(tmp_path))
    assert run("install", "--print").output == f"{tmp_path}/.local/lib/wireshark/plugins/kbtp.lua\n"
