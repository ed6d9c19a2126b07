"""All checks, by the boot of the guest that they share."""

from __future__ import annotations

from interop import kbtp_in_guest, segments, siw_rping, vanishing, verbs_checks, verbs_conformance
from interop.checks import ROOT, Suite
from interop.guest.machine import Boot, Driver

SUITES = (
    Suite(
        "siw",
        Boot(driver=Driver.SIW, share=ROOT, forwards=(*siw_rping.PORTS.values(), *kbtp_in_guest.PORTS)),
        [*siw_rping.checks(), *verbs_checks.siw_checks(), *vanishing.checks()],
    ),
    Suite(
        "siw-kbtp",
        Boot(driver=Driver.SIW, share=ROOT, forwards=kbtp_in_guest.PORTS),
        [*verbs_conformance.siw_checks(), *segments.checks()],
    ),
    Suite(
        "rxe",
        Boot(driver=Driver.RXE, share=ROOT, forwards=kbtp_in_guest.PORTS),
        [*verbs_checks.rxe_checks(), *verbs_conformance.rxe_checks()],
    ),
)
