"""Choosing an RNIC."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from kbtp.errors import ApiMisuse
from kbtp.verbs.api import Rnic

_log = logging.getLogger("kbtp.rnic")

AUTO = "auto"


@dataclass(frozen=True, slots=True)
class _Entry:
    """An RNIC that may be there: `open` raises ImportError or OSError where it is not."""

    name: str
    open: Callable[[int | None], Rnic]


def _open_native(spin_us: int | None) -> Rnic:
    from kbtp.rnic.native import NativeOptions, NativeRnic

    return NativeRnic() if spin_us is None else NativeRnic(NativeOptions(spin_us=spin_us))


def _open_rdma_core(spin_us: int | None, device: str | None) -> Rnic:
    from kbtp.rnic.native import NativeOptions
    from kbtp.rnic.rdma_core import RdmaCoreRnic

    return RdmaCoreRnic(None if spin_us is None else NativeOptions(spin_us=spin_us), device)


def _open_reference(_spin_us: int | None) -> Rnic:
    from kbtp.rnic.reference import ReferenceRnic

    return ReferenceRnic()


@dataclass(frozen=True, slots=True)
class Trial:
    """What came of opening one RNIC: `rnic`, which is the receiver's to close, or None and why."""

    name: str
    rnic: Rnic | None
    why_not: str = ""


@dataclass(frozen=True, slots=True)
class Choice:
    """What "auto" takes, None if nothing works, and why it is that one."""

    taken: Trial | None
    why: str


_BEST_FIRST = (_Entry("native", _open_native), _Entry("reference", _open_reference))

_RDMA_CORE = "rdma_core"
"""Never taken by "auto": whoever is to be reached through a device of rdma-core must have one too."""


def open_rnic(name: str = AUTO, *, spin_us: int | None = None) -> Rnic:
    """Open the RNIC `name`, or with "auto" the best one there is; says in the log which.

    "rdma_core" takes the first RDMA device that has an active port, or what KBTP_RDMA_DEVICE names; "rdma_core:mlx5_0"
    that device.

    `spin_us`: how long whoever waits looks again before it blocks, with an RNIC that can; None is its default, or what
    the environment variable KBTP_SPIN_US says.

    Raises:
        ApiMisuse: no RNIC has that name, or (with "auto") none works here.
        ImportError, OSError: the one asked for by name is not there.
    """
    if name == AUTO:
        return _open_best(spin_us)
    for entry in _BEST_FIRST:
        if entry.name == name:
            return entry.open(spin_us)
    kind, _, device = name.partition(":")
    if kind == _RDMA_CORE:
        return _open_rdma_core(spin_us, device or None)
    known = ", ".join([AUTO, *(entry.name for entry in _BEST_FIRST), _RDMA_CORE])
    raise ApiMisuse(f"there is no RNIC named {name!r}; known are {known}")


def _open_best(spin_us: int | None) -> Rnic:
    choice = chosen(trials(spin_us))
    if choice.taken is None or choice.taken.rnic is None:
        raise ApiMisuse(f"no RNIC works on this machine: {choice.why}")
    _log.info("using RNIC %s: %s", choice.taken.name, choice.why)
    return choice.taken.rnic


def trials(spin_us: int | None = None) -> Iterator[Trial]:
    """Each RNIC, best first, opened when it is asked for: whoever stops asking opens no further one.

    Raises `ApiMisuse` for a setting that is wrong.
    """
    for entry in _BEST_FIRST:
        try:
            rnic = entry.open(spin_us)
        except (ImportError, OSError) as error:
            _log.info("RNIC %s is not there: %s", entry.name, error)
            yield Trial(entry.name, None, str(error))
        else:
            yield Trial(entry.name, rnic)


def chosen(tried: Iterable[Trial]) -> Choice:
    """What "auto" takes: the first that works."""
    passed_over: list[str] = []
    for trial in tried:
        if trial.rnic is not None:
            return Choice(trial, "; ".join(passed_over) or "it works, and none is better")
        passed_over.append(f"{trial.name} does not work ({trial.why_not})")
    return Choice(None, "; ".join(passed_over))


def native_build() -> dict[str, str | bool]:
    """What the native RNIC's build is, as `kbtp._native.build` tells. Raises ImportError where it is not there."""
    from kbtp.rnic.native import build

    return build()


def joined_checksum(first: int, second: int, second_bytes: int) -> int:
    """The CRC32c over octets with CRC32c `first` and then `second_bytes` others with `second`.

    For checksums that an RNIC has taken: it needs the native one, which alone does that.
    """
    from kbtp.rnic.native import joined_checksum as joined

    return joined(first, second, second_bytes)
