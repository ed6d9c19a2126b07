"""Opening an RNIC that spins for as long as a measurement says."""

from __future__ import annotations

from dataclasses import replace

from kbtp.rnic import open_rnic
from kbtp.verbs.api import Rnic


def open_spinning(name: str, spin_us: int | None, forced_punts: float = 0.0) -> Rnic:
    """The RNIC `name`. With `spin_us` its `poll` looks so long before it blocks, if it is one that can.

    `forced_punts` is the part of requests left to Python. Raises as `open_rnic` does.
    """
    rnic = open_rnic(name)
    if rnic.name != "native":
        return rnic
    from kbtp.rnic.native import NativeOptions, NativeRnic

    options = NativeOptions()
    if spin_us is not None:
        options = replace(options, spin_us=spin_us)
    if forced_punts:
        options = replace(options, forced_punts=forced_punts)
    rnic.close()
    return NativeRnic(options)
