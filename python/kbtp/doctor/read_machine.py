"""Limits of this process, memory, processors, control groups, kernel."""

from __future__ import annotations

import os
import resource
from pathlib import PurePosixPath

from kbtp.doctor.facts import Limit, MachineFacts, Number, Text, Unknown
from kbtp.doctor.tree import Tree

_CAP_IPC_LOCK = 14
_CGROUP = "/sys/fs/cgroup"
_V1_UNLIMITED_BYTES = 1 << 62
"""What version 1 of control groups calls no limit is just below 2^63."""


def read_machine(tree: Tree) -> MachineFacts:
    system = os.uname()
    memory = _memory(tree)
    return MachineFacts(
        kernel=system.release,
        architecture=system.machine,
        memlock_bytes=_limit(resource.RLIMIT_MEMLOCK),
        may_lock_any=_may_lock_any(tree),
        open_files=_limit(resource.RLIMIT_NOFILE),
        memory_bytes=_bytes(memory, "MemTotal"),
        available_memory_bytes=_bytes(memory, "MemAvailable"),
        huge_pages=_of(memory, "HugePages_Total"),
        free_huge_pages=_of(memory, "HugePages_Free"),
        huge_page_bytes=_bytes(memory, "Hugepagesize"),
        transparent_huge_pages=_transparent(tree.text("/sys/kernel/mm/transparent_hugepage/enabled")),
        processors=_online(tree),
        usable_processors=len(os.sched_getaffinity(0)),
        cgroup_processors=_cgroup_processors(tree),
        cgroup_memory_bytes=_cgroup_memory_bytes(tree),
    )


def _limit(which: int) -> Limit:
    soft, hard = (None if value == resource.RLIM_INFINITY else value for value in resource.getrlimit(which))
    return Limit(soft, hard)


def _may_lock_any(tree: Tree) -> bool | Unknown:
    status = tree.whole("/proc/self/status")
    for line in [] if isinstance(status, Unknown) else status.splitlines():
        name, _, value = line.partition(":")
        if name == "CapEff":
            try:
                return bool(int(value, 16) >> _CAP_IPC_LOCK & 1)
            except ValueError:
                break
    return Unknown("/proc/self/status does not tell")


def _memory(tree: Tree) -> dict[str, list[str]] | Unknown:
    text = tree.whole("/proc/meminfo")
    if isinstance(text, Unknown):
        return text
    return {name: value.split() for name, _, value in (line.partition(":") for line in text.splitlines())}


def _of(memory: dict[str, list[str]] | Unknown, name: str) -> Number:
    if isinstance(memory, Unknown):
        return memory
    try:
        return int(memory[name][0])
    except (KeyError, IndexError, ValueError):
        return Unknown(f"/proc/meminfo does not tell {name}")


def _bytes(memory: dict[str, list[str]] | Unknown, name: str) -> Number:
    kibibytes = _of(memory, name)
    return kibibytes if isinstance(kibibytes, Unknown) else kibibytes * 1024


def _transparent(text: Text) -> Text:
    """Of `always [madvise] never` that in brackets."""
    if isinstance(text, Unknown):
        return text
    return text.partition("[")[2].partition("]")[0] or Unknown(f"the system says {text!r}")


def _online(tree: Tree) -> Number:
    """Of a list such as `0-3,8`."""
    text = tree.text("/sys/devices/system/cpu/online")
    if isinstance(text, Unknown):
        return os.cpu_count() or text
    try:
        ranges = [[int(end) for end in part.split("-")] for part in text.split(",")]
    except ValueError:
        return Unknown(f"/sys/devices/system/cpu/online holds {text!r}")
    return sum(ends[-1] - ends[0] + 1 for ends in ranges)


# --- control groups: the least of what this process's own and all above it allow ------------------


def _groups(tree: Tree) -> list[tuple[str, str]] | Unknown:
    """Each controller and group, innermost first; version 2 has no name for its controllers."""
    text = tree.whole("/proc/self/cgroup")
    if isinstance(text, Unknown):
        return text
    groups = []
    for line in text.splitlines():
        controllers, _, path = line.partition(":")[2].partition(":")
        inside = PurePosixPath("/", *(part for part in path.split("/") if part != ".."))
        for controller in controllers.split(","):
            groups += [(controller, str(group).rstrip("/")) for group in (inside, *inside.parents)]
    return groups


def _cgroup_processors(tree: Tree) -> float | Unknown | None:
    groups = _groups(tree)
    if isinstance(groups, Unknown):
        return groups
    found = []
    for controller, group in groups:
        if controller == "":
            quota, _, period = _one_of(tree, f"{group}/cpu.max").partition(" ")
        elif controller == "cpu":
            quota, period = (_one_of(tree, f"/cpu{group}/cpu.cfs_{name}_us") for name in ("quota", "period"))
        else:
            continue
        if quota.isdecimal() and period.isdecimal() and int(period):
            found.append(int(quota) / int(period))
    return min(found, default=None)


def _cgroup_memory_bytes(tree: Tree) -> int | Unknown | None:
    groups = _groups(tree)
    if isinstance(groups, Unknown):
        return groups
    found = []
    for controller, group in groups:
        if controller == "":
            limit = _one_of(tree, f"{group}/memory.max")
        elif controller == "memory":
            limit = _one_of(tree, f"/memory{group}/memory.limit_in_bytes")
        else:
            continue
        if limit.isdecimal() and int(limit) < _V1_UNLIMITED_BYTES:
            found.append(int(limit))
    return min(found, default=None)


def _one_of(tree: Tree, path: str) -> str:
    """What a file of a control group holds; nothing where there is no such limit."""
    text = tree.text(_CGROUP + path)
    return "" if isinstance(text, Unknown) else text
