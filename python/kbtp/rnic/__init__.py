"""Choosing an RNIC."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace

from kbtp.errors import ApiMisuse
from kbtp.verbs.api import Rnic

_log = logging.getLogger("kbtp.rnic")

AUTO = "auto"

CRC_VARIABLE = "KBTP_CRC"
_ON, _OFF = ("on", "1", "true", "t", "yes", "y"), ("off", "0", "false", "f", "no", "n")
"""As command line options read the variable."""


def crc_wanted(asked: bool | None = None) -> bool:
    """Whether streams in user space ask for the CRCs of MPA: as `asked`, or as KBTP_CRC says; on where nobody does.

    Raises `ApiMisuse` for a KBTP_CRC that says neither.
    """
    if asked is not None:
        return asked
    said = os.environ.get(CRC_VARIABLE) or _ON[0]
    if said.lower() not in (*_ON, *_OFF):
        raise ApiMisuse(f"{CRC_VARIABLE} is {said!r}: expected {_ON[0]} or {_OFF[0]}")
    return said.lower() in _ON


@dataclass(frozen=True, slots=True)
class _Asked:
    """What whoever opens an RNIC may say of it; None of `spin_us` is its default."""

    spin_us: int | None
    crc: bool


@dataclass(frozen=True, slots=True)
class _Entry:
    """An RNIC that may be there: `open` raises ImportError or OSError where it is not."""

    name: str
    open: Callable[[_Asked], Rnic]


def _open_native(asked: _Asked) -> Rnic:
    from kbtp.rnic.native import NativeOptions, NativeRnic

    options = NativeOptions() if asked.spin_us is None else NativeOptions(spin_us=asked.spin_us)
    return NativeRnic(replace(options, mpa=replace(options.mpa, crc=asked.crc)))


def _open_rdma_core(asked: _Asked, device: str | None) -> Rnic:
    from kbtp.rnic.native import NativeOptions
    from kbtp.rnic.rdma_core import RdmaCoreRnic

    if not asked.crc:
        raise ApiMisuse(f"{_RDMA_CORE} has no say in CRCs, its device has: leave out crc, --no-crc and {CRC_VARIABLE}")
    return RdmaCoreRnic(None if asked.spin_us is None else NativeOptions(spin_us=asked.spin_us), device)


def _open_reference(asked: _Asked) -> Rnic:
    from kbtp.rnic.reference import ReferenceOptions, ReferenceRnic

    options = ReferenceOptions()
    return ReferenceRnic(replace(options, mpa=replace(options.mpa, crc=asked.crc)))


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


def open_rnic(name: str = AUTO, *, spin_us: int | None = None, crc: bool | None = None) -> Rnic:
    """Open the RNIC `name`, or with "auto" the best one there is; says in the log which.

    "rdma_core" takes the first RDMA device that has an active port, or what KBTP_RDMA_DEVICE names; "rdma_core:mlx5_0"
    that device.

    `spin_us`: how long whoever waits looks again before it blocks, with an RNIC that can; None is its default, or what
    the environment variable KBTP_SPIN_US says.

    `crc`: ask for a CRC of each frame; None is what KBTP_CRC says, or on. A stream has none only if neither side asks
    (RFC 5044 7.1.1). Without, what TCP's checksum overlooks is not noticed by the stream.

    Raises:
        ApiMisuse: no RNIC has that name, (with "auto") none works here, or it has no say in what was asked for.
        ImportError, OSError: the one asked for by name is not there.
    """
    asked = _Asked(spin_us, crc_wanted(crc))
    if name == AUTO:
        return _open_best(asked)
    for entry in _BEST_FIRST:
        if entry.name == name:
            return _told(entry.open(asked), asked)
    kind, _, device = name.partition(":")
    if kind == _RDMA_CORE:
        return _open_rdma_core(asked, device or None)
    known = ", ".join([AUTO, *(entry.name for entry in _BEST_FIRST), _RDMA_CORE])
    raise ApiMisuse(f"there is no RNIC named {name!r}; known are {known}")


def _told(rnic: Rnic, asked: _Asked) -> Rnic:
    if not asked.crc:
        _log.warning("RNIC %s asks for no CRC: what TCP's checksum overlooks is not noticed", rnic.name)
    return rnic


def _open_best(asked: _Asked) -> Rnic:
    choice = chosen(_trials(asked))
    if choice.taken is None or choice.taken.rnic is None:
        raise ApiMisuse(f"no RNIC works on this machine: {choice.why}")
    _log.info("using RNIC %s: %s", choice.taken.name, choice.why)
    return _told(choice.taken.rnic, asked)


def trials() -> Iterator[Trial]:
    """Each RNIC, best first, opened when it is asked for: whoever stops asking opens no further one.

    Raises `ApiMisuse` for a setting that is wrong.
    """
    return _trials(_Asked(None, crc_wanted()))


def _trials(asked: _Asked) -> Iterator[Trial]:
    for entry in _BEST_FIRST:
        try:
            rnic = entry.open(asked)
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
