"""Files of keys: who may read them, and how they are written (profile 4)."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path
from typing import Any, NoReturn

import pytest

from kbtp import key_file
from kbtp.errors import ApiMisuse
from kbtp.key_file import add_key, read_key, read_keys, write_key
from kbtp.keys import Key, Keys

ONE, TWO, THREE = Key(1, bytes(range(32))), Key(2, bytes(range(64)), "b"), Key(3, bytes(range(1, 33)))


def private(path: Path, text: str) -> Path:
    path.write_text(text)
    path.chmod(0o600)
    return path


def mode_of(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_keys_are_added_to_a_file_that_nobody_else_can_read(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    old_umask = os.umask(0)  # the mode is not left to it
    try:
        add_key(path, ONE)
        add_key(path, TWO)
    finally:
        os.umask(old_umask)
    assert read_keys(path) == Keys((ONE, TWO))
    assert mode_of(path) == 0o600
    assert [entry.name for entry in tmp_path.iterdir()] == ["keys"]


def test_what_is_in_a_file_stays(tmp_path: Path) -> None:
    path = private(tmp_path / "keys", f"# the prefill machines\n{ONE.line}")
    add_key(path, TWO)
    assert path.read_text() == f"# the prefill machines\n{ONE.line}\n{TWO.line}\n"


def test_a_link_stays_a_link(tmp_path: Path) -> None:
    path = private(tmp_path / "keys", "")
    link = tmp_path / "link"
    link.symlink_to(path)
    add_key(link, ONE)
    assert link.is_symlink()
    assert read_keys(path) == read_keys(link) == Keys((ONE,))


def test_an_initiators_file(tmp_path: Path) -> None:
    path = tmp_path / "a.key"
    write_key(path, ONE)
    assert read_key(path) == ONE
    assert mode_of(path) == 0o600
    with pytest.raises(ApiMisuse, match="is there already"):
        write_key(path, TWO)
    assert read_key(path) == ONE


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o620, 0o602, 0o610, 0o644, 0o777])
def test_a_file_that_others_can_use_is_refused(tmp_path: Path, mode: int) -> None:
    path = private(tmp_path / "keys", ONE.line)
    path.chmod(mode)
    for use in (read_keys, read_key, lambda path: add_key(path, TWO)):
        with pytest.raises(ApiMisuse, match=rf"keys: others may use it \(mode {mode:04o}\); chmod 600 it"):
            use(path)
    assert path.read_text() == ONE.line


def test_a_file_of_somebody_else_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = private(tmp_path / "keys", ONE.line)
    monkeypatch.setattr(os, "geteuid", lambda: path.stat().st_uid + 1)
    with pytest.raises(ApiMisuse, match=r"belongs to user .* chown it"):
        read_keys(path)


def test_what_is_no_file_is_refused(tmp_path: Path) -> None:
    """A pipe would let us wait for its writer for ever."""
    pipe, missing = tmp_path / "pipe", tmp_path / "missing"
    os.mkfifo(pipe, 0o600)
    for path in (pipe, tmp_path):
        with pytest.raises(ApiMisuse, match="not a regular file; give the file that kbtp keys new has made"):
            read_keys(path)
    with pytest.raises(ApiMisuse, match="missing: cannot be read: No such file"):
        read_keys(missing)


def test_what_is_no_text_is_refused(tmp_path: Path) -> None:
    path = private(tmp_path / "keys", "")
    path.write_bytes(b"\xff" * 100)
    with pytest.raises(ApiMisuse, match="not text; give the file that kbtp keys new has made"):
        read_keys(path)
    path.write_bytes(b"#" * ((1 << 20) + 1))
    with pytest.raises(ApiMisuse, match="more than 1048576 octets; give the file that kbtp keys new has made"):
        read_keys(path)


def test_an_error_names_file_and_line(tmp_path: Path) -> None:
    path = private(tmp_path / "keys", f"{ONE.line}\nhello\n")
    with pytest.raises(ApiMisuse, match=rf"^keys file {path}: line 2: "):
        read_keys(path)


def test_a_file_without_keys_would_let_everybody_in(tmp_path: Path) -> None:
    path = private(tmp_path / "keys", "# none yet\n")
    for read in (read_keys, read_key):
        with pytest.raises(ApiMisuse, match="no key is in it; make one with kbtp keys new"):
            read(path)


def test_an_initiator_has_one_key(tmp_path: Path) -> None:
    path = private(tmp_path / "keys", f"{ONE.line}\n{TWO.line}\n")
    with pytest.raises(ApiMisuse, match="2 keys are in it, and an initiator has one"):
        read_key(path)


def test_an_id_that_is_taken_is_not_added(tmp_path: Path) -> None:
    path = private(tmp_path / "keys", ONE.line)
    with pytest.raises(ApiMisuse, match="keys: Key ID 00000001 is in it already; make another key"):
        add_key(path, Key(1, TWO.secret))
    assert read_keys(path) == Keys((ONE,))


def test_two_writers_do_not_lose_each_others_keys(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second one comes when the first has read the file, and has not written it yet."""
    path = private(tmp_path / "keys", ONE.line)
    parse_keys = key_file.parse_keys

    def parse_while_another_writes(text: str) -> Keys:
        monkeypatch.setattr(key_file, "parse_keys", parse_keys)
        with pytest.raises(ApiMisuse, match=r"keys\.new is there: another process writes keys"):
            add_key(path, THREE)
        return parse_keys(text)

    monkeypatch.setattr(key_file, "parse_keys", parse_while_another_writes)
    add_key(path, TWO)
    assert read_keys(path) == Keys((ONE, TWO))
    add_key(path, THREE)
    assert read_keys(path) == Keys((ONE, TWO, THREE))


def test_a_writer_that_was_interrupted_is_not_passed_over(tmp_path: Path) -> None:
    path = private(tmp_path / "keys", ONE.line)
    (tmp_path / "keys.new").touch()
    with pytest.raises(ApiMisuse, match=r"keys\.new is there: .* or was interrupted; remove it then"):
        add_key(path, TWO)
    assert read_keys(path) == Keys((ONE,))
    assert (tmp_path / "keys.new").exists()


def test_an_initiators_file_takes_the_place_of_no_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It was not there when `write_key` began."""
    path = tmp_path / "a.key"
    monkeypatch.setattr(os, "fsync", lambda _: private(path, ONE.line))
    with pytest.raises(ApiMisuse, match="is there already"):
        write_key(path, TWO)
    assert read_key(path) == ONE
    assert [entry.name for entry in tmp_path.iterdir()] == ["a.key"]


@pytest.mark.parametrize("write", [add_key, write_key])
def test_a_writer_that_is_interrupted_leaves_nothing_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, write: Any
) -> None:
    def interrupt(_: int) -> NoReturn:
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "fsync", interrupt)
    with pytest.raises(KeyboardInterrupt):
        write(tmp_path / "keys", ONE)
    assert list(tmp_path.iterdir()) == []


def test_what_the_system_refuses_is_said_with_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A target that reads its keys again goes on with those it has: for `ApiMisuse` alone."""
    loop = tmp_path / "loop"
    loop.symlink_to(loop)
    for use in (read_keys, lambda path: add_key(path, ONE)):
        with pytest.raises(ApiMisuse, match="loop: cannot be read: Too many levels of symbolic links"):
            use(loop)
    with pytest.raises(ApiMisuse, match="mem: cannot be read: Input/output error"):
        read_keys("/proc/self/mem")  # a regular file that nobody else can read
    path = private(tmp_path / "keys", ONE.line)

    def fail(_: int) -> NoReturn:
        raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))

    with pytest.raises(ApiMisuse, match="keys: cannot be read: Stale file handle"), monkeypatch.context() as patched:
        patched.setattr(os, "fstat", fail)
        read_keys(path)


def test_where_nothing_can_be_written(tmp_path: Path) -> None:
    with pytest.raises(ApiMisuse, match="cannot write"):
        add_key(tmp_path / "nowhere" / "keys", ONE)
    (tmp_path / "folder").mkdir(mode=0o700)
    with pytest.raises(ApiMisuse, match="not a regular file"):
        add_key(tmp_path / "folder", ONE)
