"""Opening an RNIC that spins for as long as a measurement says."""

from __future__ import annotations

from kbtp.rnic import open_rnic
from kbtp.verbs.api import Rnic


def open_spinning(name: str, spin_us: int | None) -> Rnic:
    """The RNIC `name`. With `spin_us` its `poll` looks so long before it blocks, if it is one that can.

    Raises as `open_rnic` does.
    """
    rnic = open_rnic(name)
    if spin_us is None or rnic.name != "native":
        return rnic
    from kbtp.rnic.native import NativeOptions, NativeRnic

    rnic.close()
    return NativeRnic(NativeOptions(spin_us=spin_us))
