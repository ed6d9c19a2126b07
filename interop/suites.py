"""All checks, by the boot of the guest that they share."""

from __future__ import annotations

from interop import siw_rping
from interop.checks import ROOT, Suite
from interop.guest.machine import Boot, Driver

SUITES = (
    Suite(
        "siw",
        Boot(driver=Driver.SIW, share=ROOT, forwards=tuple(siw_rping.PORTS.values())),
        siw_rping.checks(),
    ),
)
