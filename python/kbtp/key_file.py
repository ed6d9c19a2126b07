"""Files of keys: read if nobody else can read them, written so that nobody else ever can (profile 4).

What they hold is described in `kbtp.keys`.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from kbtp.errors import ApiMisuse
from kbtp.keys import Key, Keys, parse_keys
from kbtp.limits import KEYS_FILE_MAX_BYTES

_OTHERS = stat.S_IRWXG | stat.S_IRWXO
_GIVE_A_KEYS_FILE = "give the file that kbtp keys new has made"


def read_keys(path: str | os.PathLike[str]) -> Keys:
    """All keys of a file, at least one. Raises `ApiMisuse` saying what to do."""
    with _naming(path):
        keys = parse_keys(_read(path))
        if not keys:
            raise ApiMisuse("no key is in it; make one with kbtp keys new")
    return keys


def read_key(path: str | os.PathLike[str]) -> Key:
    """The one key of an initiator's file. Raises as `read_keys` does, and if there are several."""
    keys = list(read_keys(path))
    with _naming(path):
        if len(keys) > 1:
            raise ApiMisuse(
                f"{len(keys)} keys are in it, and an initiator has one; "
                "give it a file of its own (kbtp keys new --client FILE)"
            )
    return keys[0]


def add_key(path: str | os.PathLike[str], key: Key) -> None:
    """Append `key` to a file that is there, or make one. Whoever reads meanwhile sees the old or the new file, whole.

    Raises `ApiMisuse` if the file may not be read, has that Key ID already, or is being written by another process.
    """
    real = Path(os.path.realpath(path))
    with _new_beside(real) as beside:
        with _naming(path):
            try:
                text = _read(real)
            except FileNotFoundError:
                text = "# Keys of kbtp, one a line: KEY-ID SECRET domain=NAME direct=MODES\n"
            if parse_keys(text).get(key.key_id) is not None:
                raise ApiMisuse(f"Key ID {key.name} is in it already; make another key")
        if text and not text.endswith("\n"):
            text += "\n"
        beside.write(f"{text}{key.line}\n")
        os.replace(beside.path, real)


def write_key(path: str | os.PathLike[str], key: Key) -> None:
    """Make the file of an initiator, which must not be there yet. Raises `ApiMisuse`."""
    there = ApiMisuse(
        f"keys file {os.fspath(path)}: it is there already, and an initiator's file holds one key; give another name"
    )
    if os.path.lexists(path):
        raise there
    with _new_beside(Path(path)) as beside:
        beside.write(f"{key.line}\n")
        try:
            os.link(beside.path, path)  # takes the place of no other, as a rename would
        except FileExistsError:
            raise there from None
        beside.path.unlink()


@contextmanager
def _naming(path: str | os.PathLike[str]) -> Iterator[None]:
    """What goes wrong in reading `path` is an `ApiMisuse` with its name."""
    try:
        yield
    except ApiMisuse as error:
        raise ApiMisuse(f"keys file {os.fspath(path)}: {error}") from None
    except OSError as error:
        raise ApiMisuse(f"keys file {os.fspath(path)}: cannot be read: {error.strerror}") from None


def _read(path: str | os.PathLike[str]) -> str:
    # Not blocking: a pipe under that name would have us wait for its writer.
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    try:
        # Asked of what was opened, not of the name, which may be another file by now.
        _check_private(os.fstat(descriptor))
        with open(descriptor, "rb", closefd=False) as file:
            octets = file.read(KEYS_FILE_MAX_BYTES + 1)
    finally:
        os.close(descriptor)
    if len(octets) > KEYS_FILE_MAX_BYTES:
        raise ApiMisuse(f"it has more than {KEYS_FILE_MAX_BYTES} octets; {_GIVE_A_KEYS_FILE}")
    try:
        return octets.decode("ascii")
    except UnicodeDecodeError:
        raise ApiMisuse(f"it is not text; {_GIVE_A_KEYS_FILE}") from None


def _check_private(found: os.stat_result) -> None:
    if not stat.S_ISREG(found.st_mode):
        raise ApiMisuse(f"it is not a regular file; {_GIVE_A_KEYS_FILE}")
    if found.st_uid != os.geteuid():
        raise ApiMisuse(f"it belongs to user {found.st_uid}, not to user {os.geteuid()} who reads it; chown it")
    if found.st_mode & _OTHERS:
        raise ApiMisuse(
            f"others may use it (mode {stat.S_IMODE(found.st_mode):04o}); chmod 600 it and, if somebody may have read "
            "it, make new keys"
        )


@dataclass(frozen=True, slots=True)
class _NewFile:
    path: Path
    descriptor: int

    def write(self, text: str) -> None:
        with open(self.descriptor, "w", encoding="ascii", closefd=False) as file:
            file.write(text)
            file.flush()
            os.fsync(self.descriptor)


@contextmanager
def _new_beside(path: Path) -> Iterator[_NewFile]:
    """A new file that becomes `path` when it is moved there, and goes if it is not.

    Its name keeps a second writer away: from before the old file is read until the new one is in its place.
    """
    beside = path.parent / f"{path.name}.new"
    try:
        descriptor = os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    except FileExistsError:
        raise ApiMisuse(
            f"{beside} is there: another process writes {path.name}, or was interrupted; remove it then"
        ) from None
    except OSError as error:
        raise ApiMisuse(f"cannot write {beside}: {error.strerror}") from None
    try:
        yield _NewFile(beside, descriptor)
    except BaseException as error:
        beside.unlink(missing_ok=True)
        if isinstance(error, OSError):
            raise ApiMisuse(f"cannot write {path}: {error.strerror}") from None
        raise
    finally:
        os.close(descriptor)
