"""The RNICs that there are: what is about transfers runs over each of them."""

from __future__ import annotations

import importlib
import os
import pkgutil
import signal
from collections.abc import Callable, Generator

import coverage
import pytest

import kbtp.rnic
from kbtp.iwarp.mpa import MpaOptions
from kbtp.rnic.reference import ReferenceOptions, ReferenceRnic
from kbtp.verbs.api import Rnic

# A shell ignores it for what it starts in the background, and whatever a test starts would ignore it too.
signal.signal(signal.SIGINT, signal.default_int_handler)

collect_ignore = ["connectors"]  # needs the frameworks: `make test-connectors`


def _reference(mpa: MpaOptions, times: dict[str, float]) -> Rnic:
    return ReferenceRnic(ReferenceOptions(mpa=mpa, **times))


def _native(mpa: MpaOptions, times: dict[str, float]) -> Rnic:
    from kbtp.rnic.native import NativeOptions, NativeRnic  # what needs no RNIC is tested without it being built

    return NativeRnic(NativeOptions(mpa=mpa, **times))


RNICS: dict[str, Callable[[MpaOptions, dict[str, float]], Rnic]] = {"reference": _reference, "native": _native}


# A target over the native RNIC leaves that share of the requests to its sessions in Python: none, some, all. Initiators
# and whole systems do so under `make punts` alone, to keep `make test` short.
PUNTING = ("native/0.5", "native/1.0")
PUNTS_EVERYWHERE = os.environ.get("KBTP_TEST_PUNTS") == "everywhere"
TARGETS = ("serve", "target", "_over_each_rnic")


# What `make test` demands coverage of has its tests here.
COVERED = frozenset(("wire", "iwarp", "blocks", "target", "initiator", "cache"))


def _is_traced(item: pytest.Item) -> bool:
    """Whether coverage follows a test. It makes one of hypothesis's three times slower, and those are not what a line
    should owe its coverage to: which examples are drawn is chance."""
    function = getattr(item, "obj", None)
    drawn = getattr(function, "is_hypothesis_test", False) or item.name == "runTest"
    untraced = drawn or item.get_closest_marker("untraced") is not None
    return not COVERED.isdisjoint(item.path.parts) and not untraced


TRACER = pytest.StashKey[coverage.Coverage]()


@pytest.hookimpl(tryfirst=True)
def pytest_collection(session: pytest.Session) -> None:
    """Coverage sees the packages being imported, which is when their classes and functions are defined; of what comes
    then it sees the tests that it follows, and not how all modules are collected, nor how their results are."""
    tracer = coverage.Coverage.current()
    if tracer is None:
        return
    for name in sorted(COVERED):
        package = importlib.import_module(f"kbtp.{name}")
        for module in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
            importlib.import_module(module.name)
    session.config.stash[TRACER] = tracer
    # In a worker there is one below, which nobody asks and which goes on as soon as the upper one has stopped.
    while (running := coverage.Coverage.current()) is not None:
        running.stop()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    tracer = item.config.stash.get(TRACER, None)
    if tracer is None or not _is_traced(item):
        return (yield)
    tracer.start()
    try:
        return (yield)
    finally:
        tracer.stop()


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """A test that uses `rnic_name`, itself or through another fixture, runs once for each RNIC, and if it has a target
    with forced punts too."""
    chosen = any("rnic_name" in str(mark.args[0]) for mark in metafunc.definition.iter_markers("parametrize"))
    if "rnic_name" in metafunc.fixturenames and not chosen:
        about_targets = PUNTS_EVERYWHERE or not {"initiator", "system"} & set(metafunc.definition.path.parts)
        has_target = about_targets and not set(TARGETS).isdisjoint(metafunc.fixturenames)
        metafunc.parametrize("rnic_name", [*RNICS, *(PUNTING if has_target else ())], indirect=True)


@pytest.fixture
def rnic_name(request: pytest.FixtureRequest) -> str:
    """An RNIC of `RNICS` and, behind a slash, the share of forced punts if there are any."""
    name: str = request.param
    return name


@pytest.fixture
def new_rnic(rnic_name: str) -> Callable[..., Rnic]:
    """`new_rnic(mpa=MpaOptions(...), goodbye_s=...)`: an RNIC of the kind under test."""

    def make(mpa: MpaOptions | None = None, **times: float) -> Rnic:
        return RNICS[rnic_name.partition("/")[0]](mpa or MpaOptions(), times)

    return make


@pytest.fixture
def best_rnic(rnic_name: str, monkeypatch: pytest.MonkeyPatch) -> str:
    """The RNIC under test is the one that `open_rnic()` takes, and so `kbtp.connect` too."""
    name, _, punts = rnic_name.partition("/")
    entries = [entry for entry in kbtp.rnic._BEST_FIRST if entry.name == name]
    assert entries
    monkeypatch.setattr(kbtp.rnic, "_BEST_FIRST", tuple(entries))
    monkeypatch.setenv("KBTP_FORCED_PUNTS", punts)
    return name
