"""`run.py [FRAMEWORK...]`: each connector against the real package, driven by the framework's own code.

A folder beside this file is a framework:

    requirements.txt        what is installed for it, versions pinned
    requirements-alone.txt  what is installed after that without what it declares, if there is such
    configuration.*         what an operator writes; docs/connectors/ shows it, tests/test_docs.py compares
    test_*.py               tests, each marked with the requirement it shows: @pytest.mark.requirement("exact")

An environment is `build/connectors/FRAMEWORK` or, with KBTP_CONNECTOR_ENVIRONMENTS, FRAMEWORK in that folder. It takes
gigabytes, and is made anew only if what is installed in it has changed. This project is not installed there but
found by PYTHONPATH. One line a requirement is printed; the exit status says whether all hold.
"""

from __future__ import annotations

import os
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from dataclasses import dataclass
from pathlib import Path

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
FOLDER_VARIABLE = "KBTP_CONNECTOR_ENVIRONMENTS"
DEADLINE_S = 1800.0  # of all tests of a framework; each has one of its own in pytest.ini
FAULT_CHARACTERS = 120  # the whole of it is in pytest's own report, above

REQUIREMENTS = {
    "exact": "what the framework stores it loads again, octet for octet",
    "shared": "a second process loads what the first one has stored",
    "killed": "the target killed in the middle: misses within the deadline, and the framework's code goes on",
    "back": "the target back: hits again, and nothing was restarted",
    "corrupt": "a value that is not what was stored is a miss",
    "keys": "what must not be mixed up has different keys: model, dtype, layout, rank",
}
ELSE = "else"  # tests without a mark


@dataclass(frozen=True, slots=True)
class Ran:
    """A test, the requirement it shows, and what was wrong ("" if nothing was)."""

    name: str
    requirement: str
    fault: str


def frameworks() -> list[str]:
    return sorted(path.parent.name for path in HERE.glob("*/requirements.txt"))


def environment(framework: str) -> Path:
    """The interpreter of an environment with all that `framework` and this project need."""
    folder = Path(os.environ.get(FOLDER_VARIABLE) or ROOT / "build" / "connectors") / framework
    python = folder / "bin" / "python"
    wanted, alone = HERE / framework / "requirements.txt", HERE / framework / "requirements-alone.txt"
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    ours = [*project["dependencies"], *project["optional-dependencies"]["cache"]]
    ours += [one for one in project["optional-dependencies"]["dev"] if one.startswith(("pytest>", "pytest-timeout>"))]
    installed = "\n".join([sys.version, *ours, *(path.read_text() for path in (wanted, alone) if path.exists())])
    stamp = folder / "installed"
    if python.exists() and stamp.exists() and stamp.read_text() == installed:
        return python
    print(f"{framework}: making {folder}", flush=True)
    subprocess.run([sys.executable, "-m", "venv", "--clear", folder], check=True)
    pip = [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    subprocess.run([*pip, "-r", wanted, *ours], check=True)
    if alone.exists():
        subprocess.run([*pip, "--no-deps", "-r", alone], check=True)
    stamp.write_text(installed)
    return python


def run(framework: str, python: Path) -> list[Ran]:
    """Raises `OSError` or `ElementTree.ParseError` if pytest does not get as far as a report."""
    report = ROOT / "build" / "connectors" / f"{framework}.xml"
    report.parent.mkdir(parents=True, exist_ok=True)
    report.unlink(missing_ok=True)
    subprocess.run(
        [
            *(python, "-m", "pytest", "-q", "-c", HERE / "pytest.ini", "--rootdir", ROOT),
            *("--junit-xml", report, HERE / framework),
        ],
        env={
            **os.environ,
            "PYTHONPATH": os.pathsep.join((str(ROOT / "python"), str(HERE / framework))),
            "OPENBLAS_NUM_THREADS": "1",
            "PYTHONHASHSEED": "0",  # keys of a framework may be of Python's hashes
        },
        timeout=DEADLINE_S,
        cwd=ROOT,
        check=False,  # the report says it, test by test
    )
    return [_ran(case) for case in ElementTree.parse(report).iter("testcase")]


def _ran(case: ElementTree.Element) -> Ran:
    marks = [one.get("value", "") for one in case.iter("property") if one.get("name") == "requirement"]
    faults = [one.get("message", one.tag) for kind in ("failure", "error", "skipped") for one in case.iter(kind)]
    return Ran(case.get("name", ""), marks[0] if marks else ELSE, " / ".join(faults))


def verdicts(framework: str, ran: list[Ran]) -> list[tuple[bool, str]]:
    """Whether each requirement holds, and a line about it."""
    told = []
    for name, text in {**REQUIREMENTS, ELSE: "whatever else is tested"}.items():
        tests = [one for one in ran if one.requirement == name]
        faults = [f"{one.name}: {one.fault.splitlines()[0][:FAULT_CHARACTERS]}" for one in tests if one.fault]
        if name == ELSE and not tests:
            continue
        if not tests:
            faults = ["no test shows it"]
        line = f"{'NO ' if faults else 'yes'}  {framework}: {text} (tests: {len(tests)})"
        told.append((not faults, "; ".join([line, *faults])))
    return told


def main(names: list[str]) -> int:
    unknown = [name for name in names if name not in frameworks()]
    if unknown:
        print(f"there is no {', '.join(unknown)}: {', '.join(frameworks())}", file=sys.stderr)
        return 2
    told: list[tuple[bool, str]] = []
    for framework in names or frameworks():
        try:
            told += verdicts(framework, run(framework, environment(framework)))
        except (OSError, subprocess.SubprocessError, ElementTree.ParseError) as error:
            told.append((False, f"NO   {framework}: its tests do not run: {error}"))
    print(*(line for _, line in told), sep="\n")
    return 0 if told and all(holds for holds, _ in told) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
