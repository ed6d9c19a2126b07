"""What a check is, and what it has to work with."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from interop.guest.machine import Boot, Guest
from kbtp.iwarp.mpa import MpaOptions, RtrKind
from kbtp.rnic.native import NativeOptions, NativeRnic
from kbtp.rnic.reference import ReferenceOptions, ReferenceRnic
from kbtp.verbs.api import Rnic

RNICS = ("native", "reference")

ROOT = Path(__file__).parent.parent
"""Shared with the guest: kbtp runs there from this tree."""


class CheckFailed(Exception):
    """What a check says does not hold; the text says what was seen."""


@dataclass(frozen=True, slots=True)
class Check:
    name: str
    run: Callable[[Guest], None]
    """Raises CheckFailed, or any exception, where it does not hold."""


@dataclass(frozen=True, slots=True)
class Suite:
    """Checks that share one boot of the guest."""

    name: str
    boot: Boot
    checks: Sequence[Check]


def open_rnic(name: str, *, crc: bool = True, rtr: RtrKind = RtrKind.NONE) -> Rnic:
    """One of RNICS, which starts its streams like that."""
    mpa = MpaOptions(crc=crc, peer_to_peer=rtr)
    if name == "native":
        return NativeRnic(NativeOptions(mpa=mpa))
    return ReferenceRnic(ReferenceOptions(mpa=mpa))


def set_siw(guest: Guest, parameter: str, on: bool) -> None:
    """For connections from here on."""
    done = guest.run(f"echo {int(on)} >/sys/module/siw/parameters/{parameter}")
    if done.status:
        raise CheckFailed(f"siw's {parameter} cannot be set: {done.output}")
