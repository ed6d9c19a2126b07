"""Files of keys: read if nobody else can read them, written so that nobody else ever can (profile 4).

What they hold is described in `kbtp.keys`.
"""

from __future__ import annotations

import os
import stat
from pathlib import Path

from kbtp.errors import ApiMisuse
from kbtp.keys import Key, Keys, parse_keys
from kbtp.limits import KEYS_FILE_MAX_BYTES

_OTHERS = stat.S_IRWXG | stat.S_IRWXO


def read_keys(path: str | os.PathLike[str]) -> Keys:
    """All keys of a file, at least one. Raises `ApiMisuse` saying what to do."""
    try:
        keys = parse_keys(_read(path))
    except ApiMisuse as error:
        raise ApiMisuse(f"keys file {os.fspath(path)}: {error}") from None
    if not keys:
        raise ApiMisuse(f"keys file {os.fspath(path)}: no key is in it; make one with kbtp keys new")
    return keys


def read_key(path: str | os.PathLike[str]) -> Key:
    """The one key of an initiator's file. Raises as `read_keys` does, and if there are several."""
    keys = list(read_keys(path))
    if len(keys) > 1:
        raise ApiMisuse(
            f"keys file {os.fspath(path)}: {len(keys)} keys are in it, and an initiator has one; "
            "give it a file of its own (kbtp keys new --client FILE)"
        )
    return keys[0]


def add_key(path: str | os.PathLike[str], key: Key) -> None:
    """Append `key` to a file that is there, or make one. Whoever reads meanwhile sees the old or the new file, whole.

    Raises `ApiMisuse` if the file may not be read, has that Key ID already, or is being written by another process.
    """
    real = Path(os.path.realpath(path))
    try:
        if real.exists():
            text = _read(real)
            Keys((*parse_keys(text), key))
        else:
            text = "# Keys of kbtp, one a line: KEY-ID SECRET domain=NAME direct=MODES\n"
    except ApiMisuse as error:
        raise ApiMisuse(f"keys file {os.fspath(path)}: {error}") from None
    if text and not text.endswith("\n"):
        text += "\n"
    _write(real, f"{text}{key.line}\n")


def write_key(path: str | os.PathLike[str], key: Key) -> None:
    """Make the file of an initiator, which must not be there yet. Raises `ApiMisuse`."""
    if os.path.lexists(path):
        raise ApiMisuse(f"keys file {os.fspath(path)}: it is there already; an initiator's file holds one key")
    _write(Path(path), f"{key.line}\n")


def _read(path: str | os.PathLike[str]) -> str:
    try:
        # Not blocking: a pipe under that name would have us wait for its writer.
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError as error:
        raise ApiMisuse(f"cannot be read: {error.strerror}") from None
    try:
        # Asked of what was opened, not of the name, which may be another file by now.
        _check_private(os.fstat(descriptor))
        with open(descriptor, "rb", closefd=False) as file:
            octets = file.read(KEYS_FILE_MAX_BYTES + 1)
    finally:
        os.close(descriptor)
    if len(octets) > KEYS_FILE_MAX_BYTES:
        raise ApiMisuse(f"it has more than {KEYS_FILE_MAX_BYTES} octets")
    try:
        return octets.decode("ascii")
    except UnicodeDecodeError:
        raise ApiMisuse("it is not text") from None


def _check_private(found: os.stat_result) -> None:
    if not stat.S_ISREG(found.st_mode):
        raise ApiMisuse("it is not a regular file")
    if found.st_uid != os.geteuid():
        raise ApiMisuse(f"it belongs to user {found.st_uid}, not to user {os.geteuid()} who reads it; chown it")
    if found.st_mode & _OTHERS:
        raise ApiMisuse(
            f"others may use it (mode {stat.S_IMODE(found.st_mode):04o}); chmod 600 it and, if somebody may have read "
            "it, make new keys"
        )


def _write(path: Path, text: str) -> None:
    """Through a new file beside it, whose name keeps a second writer away."""
    beside = path.with_name(f"{path.name}.new")
    try:
        descriptor = os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    except FileExistsError:
        raise ApiMisuse(
            f"{beside} is there: another process writes {path.name}, or was interrupted; remove it then"
        ) from None
    except OSError as error:
        raise ApiMisuse(f"cannot write {beside}: {error.strerror}") from None
    try:
        with open(descriptor, "w", encoding="ascii") as file:
            file.write(text)
            file.flush()
            os.fsync(descriptor)
        os.replace(beside, path)
    except OSError as error:
        beside.unlink(missing_ok=True)
        raise ApiMisuse(f"cannot write {path}: {error.strerror}") from None
