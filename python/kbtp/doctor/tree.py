"""Files of sysfs and procfs, which may be missing, unreadable or odd: then what is read is `Unknown`."""

from __future__ import annotations

import os
from pathlib import Path

from kbtp.doctor.facts import Number, Text, Unknown, printable

_READ_MAX_BYTES = 1 << 16


class Tree:
    """The files below `root`, named by their absolute paths without it."""

    def __init__(self, root: Path = Path("/")) -> None:
        self._root = root

    def _path(self, path: str) -> Path:
        return self._root / path.lstrip("/")

    def whole(self, path: str) -> Text:
        """All of a file, as far as files of this kind go."""
        try:
            with open(self._path(path), "rb") as file:
                return file.read(_READ_MAX_BYTES).decode(errors="replace")
        except (OSError, ValueError) as error:
            return _unknown(path, error)

    def text(self, path: str) -> Text:
        """The one value a file holds."""
        whole = self.whole(path)
        if isinstance(whole, Unknown):
            return whole
        text = printable(whole.strip("\0\n\t "))
        return text or Unknown(f"{path} is empty")

    def number(self, path: str) -> Number:
        text = self.text(path)
        if isinstance(text, Unknown):
            return text
        try:
            return int(text)
        except ValueError:
            return Unknown(f"{path} holds {text!r}, which is no number")

    def names(self, path: str) -> list[str] | Unknown:
        """What is in a folder, in order."""
        try:
            return sorted(printable(name) for name in os.listdir(self._path(path)))
        except (OSError, ValueError) as error:
            return _unknown(path, error)

    def exists(self, path: str) -> bool:
        return os.path.lexists(self._path(path))

    def may_open(self, path: str) -> bool | Unknown:
        """Whether this process may read and write the file, which is not opened."""
        if not self.exists(path):
            return Unknown(f"there is no {path}")
        try:
            return os.access(self._path(path), os.R_OK | os.W_OK)
        except (OSError, ValueError) as error:
            return _unknown(path, error)


def _unknown(path: str, error: OSError | ValueError) -> Unknown:
    if isinstance(error, FileNotFoundError):
        return Unknown(f"there is no {path}")
    said = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
    return Unknown(f"{path}: {said}")
