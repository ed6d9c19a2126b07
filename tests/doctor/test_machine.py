"""Limits, memory, processors and RNICs: what is read, and what it means."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

import kbtp.rnic
from kbtp.doctor.facts import Limit, MachineFacts, RdmaFacts, RnicFacts, RnicTrial, Unknown
from kbtp.doctor.read_machine import read_machine
from kbtp.doctor.read_rnics import read_rnics
from kbtp.doctor.tree import Tree
from kbtp.doctor.verdicts import Finding, Level, judge_rnics
from kbtp.doctor.verdicts_machine import POOL_BYTES, judge_machine
from tests.doctor import made_up

GIB = 1 << 30
BUILD: dict[str, str | bool] = {
    "version": "1.2",
    "optimized": True,
    "crc32c": "x86_64-avx512-vpclmulqdq",
    "events": "epoll",
    "spins": True,
}
RNICS = RnicFacts(
    "1.2",
    native_build=BUILD,
    reference_crc32c="hardware instructions",
    trials=(RnicTrial("native", True), RnicTrial("reference", True)),
    auto="native",
    auto_why="it works, and none is better",
    setting_error="",
    asked_rnic=None,
    asked_rnic_error="",
    asked_spin_us=None,
    default_spin_us=200,
    crc=True,
)
MACHINE = MachineFacts(
    kernel="6.1.0",
    architecture="x86_64",
    memlock_bytes=Limit(None, None),
    may_lock_any=False,
    open_files=Limit(1 << 16, 1 << 20),
    memory_bytes=64 * GIB,
    available_memory_bytes=60 * GIB,
    huge_pages=0,
    free_huge_pages=0,
    huge_page_bytes=2 << 20,
    transparent_huge_pages="madvise",
    processors=8,
    usable_processors=8,
    cgroup_processors=None,
    cgroup_memory_bytes=None,
)
NO_RDMA = RdmaFacts((), Unknown("there is none"), ())


def with_device(root: Path) -> RdmaFacts:
    from kbtp.doctor.read_rdma import read_rdma

    return read_rdma(Tree(made_up.write(root, made_up.SIW)), (), lambda: Unknown("not asked"))


def about(findings: list[Finding], name: str) -> Finding:
    (found,) = (finding for finding in findings if finding.about == name)
    return found


def judged(facts: MachineFacts, name: str, rdma: RdmaFacts = NO_RDMA, rnics: RnicFacts = RNICS) -> Finding:
    return about(judge_machine(facts, rdma, rnics), name)


# --- reading -------------------------------------------------------------------------------------

PROC: dict[str, str | bytes] = {
    "proc/self/status": "Name:\tpython3\nCapEff:\t0000000000004000\n",
    "proc/meminfo": (
        "MemTotal: 2048 kB\nMemAvailable: 1024 kB\nHugePages_Total: 4\nHugePages_Free: 3\nHugepagesize: 2048 kB\n"
    ),
    "sys/kernel/mm/transparent_hugepage/enabled": "always [madvise] never\n",
    "sys/devices/system/cpu/online": "0-2,5\n",
}


def test_what_the_system_says(tmp_path: Path) -> None:
    facts = read_machine(Tree(made_up.write(tmp_path, PROC)))
    assert facts.may_lock_any is True
    assert (facts.memory_bytes, facts.available_memory_bytes) == (2 << 20, 1 << 20)
    assert (facts.huge_pages, facts.free_huge_pages, facts.huge_page_bytes) == (4, 3, 2 << 20)
    assert (facts.transparent_huge_pages, facts.processors) == ("madvise", 4)
    assert facts.usable_processors >= 1


def test_a_system_that_says_nothing(tmp_path: Path) -> None:
    facts = read_machine(Tree(tmp_path))
    assert facts.memory_bytes == Unknown("there is no /proc/meminfo")
    assert isinstance(facts.may_lock_any, Unknown)
    assert isinstance(facts.cgroup_processors, Unknown)
    assert isinstance(facts.cgroup_memory_bytes, Unknown)
    assert all(finding.level is not Level.PROBLEM for finding in judge_machine(facts, NO_RDMA, RNICS))


def test_a_system_that_says_odd_things(tmp_path: Path) -> None:
    odd = {
        "proc/self/status": b"CapEff:\tsomething\n\xff\xff",
        "proc/meminfo": "MemTotal:\nHugePages_Total: none\nno colon\n",
        "proc/self/cgroup": "\n0\n::\n0::/../../a\n4:cpu\n",
        "sys/kernel/mm/transparent_hugepage/enabled": "always",
        "sys/devices/system/cpu/online": "all-of-them",
        "sys/fs/cgroup/cpu.max": "much 0",
        "sys/fs/cgroup/memory.max": "-1",
    }
    facts = read_machine(Tree(made_up.write(tmp_path, {**odd})))
    for value in (facts.may_lock_any, facts.memory_bytes, facts.huge_pages, facts.processors):
        assert isinstance(value, Unknown)
    assert facts.transparent_huge_pages == Unknown("the system says 'always'")
    assert (facts.cgroup_processors, facts.cgroup_memory_bytes) == (None, None)
    assert judge_machine(facts, NO_RDMA, RNICS)


@pytest.mark.parametrize(
    ("files", "processors", "memory"),
    [
        (
            {
                "proc/self/cgroup": "0::/pods/one\n",
                "sys/fs/cgroup/pods/one/cpu.max": "max 100000\n",
                "sys/fs/cgroup/pods/cpu.max": "150000 100000\n",
                "sys/fs/cgroup/pods/one/memory.max": "1048576\n",
                "sys/fs/cgroup/pods/memory.max": "max\n",
            },
            1.5,
            1 << 20,
        ),
        (
            {
                "proc/self/cgroup": "5:cpuset:/\n4:memory:/one\n3:cpu,cpuacct:/\n",
                "sys/fs/cgroup/cpu/cpu.cfs_quota_us": "50000\n",
                "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000\n",
                "sys/fs/cgroup/memory/one/memory.limit_in_bytes": "4096\n",
                "sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712\n",
            },
            0.5,
            4096,
        ),
        ({"proc/self/cgroup": "0::/seen/from/outside\n", "sys/fs/cgroup/memory.max": "8192\n"}, None, 8192),
        ({"proc/self/cgroup": "1:cpu:/\n", "sys/fs/cgroup/cpu/cpu.cfs_quota_us": "-1\n"}, None, None),
    ],
    ids=["version 2", "version 1", "the root of a container", "no limit"],
)
def test_control_groups(
    tmp_path: Path, files: dict[str, str | bytes], processors: float | None, memory: int | None
) -> None:
    facts = read_machine(Tree(made_up.write(tmp_path, files)))
    assert (facts.cgroup_processors, facts.cgroup_memory_bytes) == (processors, memory)


# --- judging ---------------------------------------------------------------------------------------


def test_a_plain_machine_has_nothing_wrong() -> None:
    assert {finding.level for finding in judge_machine(MACHINE, NO_RDMA, RNICS)} == {Level.OK}


@pytest.mark.parametrize(
    ("soft_bytes", "may_lock_any", "level"),
    [
        (None, False, Level.OK),
        (64 << 10, True, Level.OK),
        (POOL_BYTES, False, Level.NOTE),
        (POOL_BYTES - 1, False, Level.PROBLEM),
        (POOL_BYTES - 1, Unknown("?"), Level.PROBLEM),
    ],
)
def test_locked_memory_matters_where_there_is_a_device(
    tmp_path: Path, soft_bytes: int | None, may_lock_any: bool | Unknown, level: Level
) -> None:
    facts = replace(MACHINE, memlock_bytes=Limit(soft_bytes, None), may_lock_any=may_lock_any)
    assert judged(facts, "locked memory").level is Level.OK
    found = judged(facts, "locked memory", with_device(tmp_path))
    assert found.level is level
    assert ("ulimit -l" in found.do) == (level is not Level.OK)


@pytest.mark.parametrize(
    ("soft", "level"), [(None, Level.OK), (4096, Level.OK), (1024, Level.NOTE), (64, Level.PROBLEM)]
)
def test_open_files(soft: int | None, level: Level) -> None:
    assert judged(replace(MACHINE, open_files=Limit(soft, None)), "open files").level is level


@pytest.mark.parametrize(("limit", "level"), [(None, Level.OK), (POOL_BYTES, Level.OK), (1 << 20, Level.PROBLEM)])
def test_memory_of_the_control_group(limit: int | None, level: Level) -> None:
    assert judged(replace(MACHINE, cgroup_memory_bytes=limit), "memory of the control group").level is level


@pytest.mark.parametrize(
    ("mode", "level", "says"),
    [
        ("madvise", Level.OK, "madvise: the pool of a target is made of them"),
        ("always", Level.OK, "always: the pool"),
        ("never", Level.NOTE, "never: blocks of a target take longer to find"),
        (Unknown("there is no file"), Level.NOTE, "there is no file"),
    ],
)
def test_huge_pages_for_the_pool(mode: str | Unknown, level: Level, says: str) -> None:
    found = judged(replace(MACHINE, transparent_huge_pages=mode), "transparent huge pages")
    assert found.level is level
    assert says in found.says


@pytest.mark.parametrize(
    ("machine", "rnics", "level", "says"),
    [
        ({}, {}, Level.OK, "200 us"),
        ({}, {"asked_spin_us": "7"}, Level.OK, "7 us"),
        ({}, {"asked_spin_us": "0"}, Level.OK, "switched off"),
        ({"cgroup_processors": 1.5}, {}, Level.NOTE, "the time of 1.5 processors"),
        ({"usable_processors": 1}, {}, Level.NOTE, "the time of 1 processors"),
        ({}, {"native_build": {**BUILD, "spins": False}}, Level.OK, "not done on one processor"),
        ({}, {"native_build": Unknown("no module")}, Level.OK, "never"),
        ({}, {"setting_error": "KBTP_SPIN_US is 'x'"}, Level.NOTE, "unknown"),
    ],
)
def test_whether_spinning_makes_sense(
    machine: dict[str, object], rnics: dict[str, object], level: Level, says: str
) -> None:
    facts = replace(MACHINE, **machine)  # type: ignore[arg-type]
    found = judged(facts, "looking before blocking", rnics=replace(RNICS, **rnics))  # type: ignore[arg-type]
    assert found.level is level
    assert says in found.says


# --- RNICs -----------------------------------------------------------------------------------------


def test_the_rnics_that_are_here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("KBTP_RNIC", raising=False)
    monkeypatch.delenv("KBTP_SPIN_US", raising=False)
    facts = read_rnics(kbtp.__version__)
    assert facts.auto == "native"
    assert [(trial.name, trial.works) for trial in facts.trials] == [("native", True), ("reference", True)]
    assert not isinstance(facts.native_build, Unknown)
    assert sorted(facts.native_build) == ["crc32c", "events", "optimized", "spins", "version"]
    assert facts.native_build["version"] == kbtp.__version__
    findings = judge_rnics(facts)
    assert all(finding.level is not Level.PROBLEM for finding in findings)
    assert about(findings, "auto").says == "takes native: it works, and none is better. Best first: native, reference"
    assert "events from epoll" in about(findings, "native RNIC").says


def test_without_the_native_module_the_reference_rnic_is_taken_and_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "kbtp.rnic.native", None)
    facts = read_rnics("1.2")
    assert facts.auto == "reference"
    assert isinstance(facts.native_build, Unknown)
    findings = judge_rnics(facts)
    assert about(findings, "auto").says.startswith("takes reference: native does not work (import of kbtp.rnic.native")
    assert about(findings, "native RNIC").level is Level.PROBLEM
    assert [finding.about for finding in findings if finding.level is Level.PROBLEM] == ["native RNIC"]


def test_where_nothing_works(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(_spin_us: int | None) -> kbtp.Rnic:
        raise OSError("no such device")

    monkeypatch.setattr(kbtp.rnic, "_BEST_FIRST", (kbtp.rnic._Entry("quantum", missing),))
    monkeypatch.setenv("KBTP_RNIC", "quantum")
    facts = read_rnics("1.2")
    assert facts.auto is None
    findings = judge_rnics(facts)
    assert about(findings, "auto").level is Level.PROBLEM
    assert "quantum does not work (no such device)" in about(findings, "auto").says
    assert about(findings, "quantum").level is Level.NOTE
    assert about(findings, "KBTP_RNIC").says == "quantum: no such device"


def test_no_crc_is_worth_a_word(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("KBTP_CRC", raising=False)
    assert not [finding for finding in judge_rnics(read_rnics("1.2")) if finding.about == "KBTP_CRC"]
    monkeypatch.setenv("KBTP_CRC", "off")
    found = about(judge_rnics(read_rnics("1.2")), "KBTP_CRC")
    assert found.level is Level.NOTE
    assert "not noticed" in found.says


@pytest.mark.parametrize("wrong", ["KBTP_SPIN_US", "KBTP_FORCED_PUNTS", "KBTP_CRC"])
def test_a_wrong_setting_is_a_problem(monkeypatch: pytest.MonkeyPatch, wrong: str) -> None:
    monkeypatch.setenv(wrong, "soon")
    facts = read_rnics("1.2")
    assert "soon" in facts.setting_error
    found = about(judge_rnics(facts), "settings")
    assert found.level is Level.PROBLEM


def test_an_rnic_that_was_asked_for_and_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KBTP_RNIC", "infiniswitch")
    found = about(judge_rnics(read_rnics("1.2")), "KBTP_RNIC")
    assert found.level is Level.PROBLEM
    assert "no RNIC named 'infiniswitch'" in found.says
    monkeypatch.setenv("KBTP_RNIC", "reference")
    assert about(judge_rnics(read_rnics("1.2")), "KBTP_RNIC").level is Level.OK


@pytest.mark.parametrize(
    ("build", "level", "says"),
    [
        ({"version": "1.1"}, Level.PROBLEM, "the package is version 1.2"),
        ({"optimized": False}, Level.NOTE, "not optimized"),
        ({"crc32c": "x86-software-fallback-tables"}, Level.NOTE, "software"),
    ],
)
def test_a_build_that_is_not_right(build: dict[str, str | bool], level: Level, says: str) -> None:
    found = about(judge_rnics(replace(RNICS, native_build={**BUILD, **build})), "native RNIC")
    assert found.level is level
    assert says in found.says


def test_without_the_crc32c_package_the_reference_rnic_is_told_of() -> None:
    found = about(judge_rnics(replace(RNICS, reference_crc32c=Unknown("no module named crc32c"))), "reference RNIC")
    assert found.level is Level.PROBLEM
