"""The wheel in an environment of its own, without rdma-core: import, serve and doctor work.

    python interop/bare_install.py [--wheel FILE] [--folder FOLDER]

Builds the wheel unless one is given, installs it and what it depends on into a fresh environment, and there

- imports `kbtp`, and `open_rnic("auto")` takes the native RNIC;
- runs `kbtp doctor`, which says that libibverbs and librdmacm are not there;
- runs `kbtp serve`, reaches it with `kbtp doctor URL`, stores a block and loads it again;
- does all that once more without the native module, as on a machine that no wheel was built for.

Where rdma-core is installed it is hidden: the loader finds a file first that is no library. So a module that was linked
against it could not even be imported. Prints a line a check; the exit status says whether all hold.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import venv
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
DEFAULT_FOLDER = ROOT / "build" / "bare"
LIBRARIES = ("libibverbs.so.1", "librdmacm.so.1")
BUILD_TIMEOUT_S = 900.0
RUN_TIMEOUT_S = 60.0

WHICH_RNIC = "import kbtp\nrnic = kbtp.open_rnic()\nprint(rnic.name)\nrnic.close()"
ROUND_TRIP = """
import os, sys, kbtp
data = os.urandom(300_000)
with kbtp.connect(sys.argv[1]) as client:
    buffer = bytearray(len(data))
    client.load(client.alloc_store(data), into=buffer)
print(bytes(buffer) == data)
"""


class Fault(Exception):
    """A check that does not hold."""


class Environment:
    """A fresh environment with the wheel in it, on a machine that seems to have no rdma-core."""

    def __init__(self, folder: Path, wheel: Path) -> None:
        self._python = folder / "venv" / "bin" / "python"
        self._home = folder / "home"
        hidden = folder / "hidden"
        for made in (self._home, hidden):
            made.mkdir(parents=True)
        for library in LIBRARIES:
            (hidden / library).touch()
        self._variables = {
            "PATH": f"{self._python.parent}:/usr/bin:/bin",
            "HOME": str(self._home),
            "LD_LIBRARY_PATH": str(hidden),
        }
        venv.create(folder / "venv", with_pip=True)
        pip = [str(self._python), "-m", "pip", "-q", "--disable-pip-version-check", "install", str(wheel)]
        _run(pip, timeout_s=BUILD_TIMEOUT_S)

    def python(self, program: str, *arguments: str) -> str:
        """What `program` prints. Raises `Fault` if it fails."""
        return self._run([str(self._python), "-c", program, *arguments]).strip()

    def doctor(self, *arguments: str) -> dict[str, object]:
        """What `kbtp doctor --json` says, whether or not it finds a problem."""
        told = self._run([*self._kbtp, "doctor", "--json", *arguments], may_fail=True)
        seen: dict[str, object] = json.loads(told)
        return seen

    @contextmanager
    def serving(self) -> Iterator[str]:
        """The URL of a target, which has to end with status 0."""
        command = [*self._kbtp, "serve", "--port", "0", "--pool-blocks", "16", "--json", "--log-level", "warning"]
        with subprocess.Popen(
            command, stdout=subprocess.PIPE, text=True, env=self._variables, cwd=self._home
        ) as process:
            try:
                assert process.stdout is not None
                yield json.loads(process.stdout.readline())["url"]
                process.terminate()
                status = process.wait(RUN_TIMEOUT_S)
            finally:
                process.kill()
        if status != 0:
            raise Fault(f"kbtp serve ended with status {status}")

    def without_native(self) -> None:
        """Take the native module away."""
        for path in self._python.parent.parent.glob("lib/python*/site-packages/kbtp/_native*.so"):
            path.unlink()

    @property
    def _kbtp(self) -> list[str]:
        return [str(self._python.parent / "kbtp")]

    def _run(self, command: list[str], *, may_fail: bool = False) -> str:
        return _run(command, timeout_s=RUN_TIMEOUT_S, may_fail=may_fail, env=self._variables, cwd=self._home)


def _run(
    command: list[str],
    *,
    timeout_s: float,
    may_fail: bool = False,
    env: dict[str, str] | None = None,
    cwd: Path | None = None,
) -> str:
    done = subprocess.run(command, capture_output=True, text=True, timeout=timeout_s, check=False, env=env, cwd=cwd)
    if (done.returncode and not may_fail) or "Traceback" in done.stderr:
        raise Fault(f"{' '.join(command[:4])} ended with status {done.returncode}: {done.stderr.strip()[-2000:]}")
    return done.stdout


def build_wheel(folder: Path) -> Path:
    _run(
        [
            sys.executable,
            "-m",
            "pip",
            "-q",
            "--disable-pip-version-check",
            "wheel",
            "--no-deps",
            "-w",
            str(folder),
            ".",
        ],
        timeout_s=BUILD_TIMEOUT_S,
        cwd=ROOT,
    )
    (wheel,) = folder.glob("kbtp-*.whl")
    return wheel


# --- checks --------------------------------------------------------------------------------------


def takes(environment: Environment, rnic: str) -> None:
    named = environment.python(WHICH_RNIC)
    if named != rnic:
        raise Fault(f"open_rnic takes {named!r}, not {rnic!r}")


def doctor_says(environment: Environment, rnic: str) -> None:
    seen = environment.doctor()
    libraries = _at(seen, "sections", "rdma", "facts", "libraries")
    assert isinstance(libraries, list)
    if [library["name"] for library in libraries if library["loads"]]:
        raise Fault(f"rdma-core is not hidden: {libraries}")
    auto = _at(seen, "sections", "rnic", "facts", "auto")
    if auto != rnic:
        raise Fault(f"kbtp doctor says that auto takes {auto!r}, not {rnic!r}")


def serves(environment: Environment) -> None:
    with environment.serving() as url:
        reach = environment.doctor(url)["reach"]
        if not _at({"reach": reach}, "reach", "reached"):
            raise Fault(f"kbtp doctor does not reach it: {reach}")
        if environment.python(ROUND_TRIP, url) != "True":
            raise Fault("a block came back otherwise than it was stored")


def _at(value: object, *keys: str) -> object:
    for key in keys:
        assert isinstance(value, dict)
        value = value[key]
    return value


def checks_of(environment: Environment) -> Iterator[tuple[str, Callable[[], object]]]:
    for rnic in ("native", "reference"):
        if rnic == "reference":
            environment.without_native()
        yield f"{rnic}: kbtp is imported, and open_rnic takes it", lambda rnic=rnic: takes(environment, rnic)  # type: ignore[misc]
        yield f"{rnic}: kbtp doctor finds no rdma-core", lambda rnic=rnic: doctor_says(environment, rnic)  # type: ignore[misc]
        yield f"{rnic}: kbtp serve is reached, a block stored and loaded", lambda: serves(environment)


def run(folder: Path, wheel: Path | None) -> bool:
    folder.mkdir(parents=True, exist_ok=True)
    held = True
    with tempfile.TemporaryDirectory(dir=folder) as fresh:
        environment = Environment(Path(fresh), wheel or build_wheel(Path(fresh)))
        for name, check in checks_of(environment):
            try:
                check()
            except (Fault, subprocess.TimeoutExpired, ValueError, AssertionError, KeyError) as error:
                held = False
                print(f"FAILED  {name}: {error}", flush=True)
            else:
                print(f"ok      {name}", flush=True)
    return held


def main() -> int:
    parser = argparse.ArgumentParser(description="The wheel in a fresh environment without rdma-core.")
    parser.add_argument("--wheel", type=Path, help="this wheel, instead of building one")
    parser.add_argument("--folder", type=Path, default=DEFAULT_FOLDER, help="where to work (default: build/bare)")
    arguments = parser.parse_args()
    try:
        return 0 if run(arguments.folder, arguments.wheel) else 1
    except Fault as error:
        print(f"FAILED  the wheel: {error}", flush=True)
        return 1


if __name__ == "__main__":
    sys.exit(main())
