"""Where peers that are Python packages are found: here, or in an environment of their own.

`build/peers/NAME` or, with KBTP_BENCH_PEERS, NAME in that folder; each made by `python -m venv`, with numpy.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from pathlib import Path

_ROOT = Path(__file__).resolve().parents[2]
FOLDER_VARIABLE = "KBTP_BENCH_PEERS"


def folder() -> Path:
    return Path(os.environ.get(FOLDER_VARIABLE) or _ROOT / "build" / "peers")


def package_folder(package: str, home: str) -> Path | None:
    """Where `package` lies in the environment `home`, None if it is not there."""
    return next(iter(sorted((folder() / home).glob(f"lib/python3*/site-packages/{package}"))), None)


def interpreter_with(package: str, home: str) -> str | None:
    """An interpreter that can import `package`: this one, or else that of the environment `home`."""
    if importlib.util.find_spec(package) is not None:
        return sys.executable
    return None if package_folder(package, home) is None else str(folder() / home / "bin" / "python")


def sources() -> dict[str, str]:
    """For interpreters of such environments: this project, and nothing of what is installed beside it."""
    return {"PYTHONPATH": os.pathsep.join((str(_ROOT), str(_ROOT / "python"))), "OPENBLAS_NUM_THREADS": "1"}


def wanted(home: str, *packages: str) -> str:
    """How to get there."""
    path = folder() / home
    shown = path.relative_to(_ROOT) if path.is_relative_to(_ROOT) else path
    return f"python3 -m venv {shown} && {shown}/bin/pip install {' '.join(packages)} numpy"
