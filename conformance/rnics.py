"""RNICs that start streams as a profile says; `kbtp` has no options for that, since nobody else wants them."""

from __future__ import annotations

from kbtp.iwarp.mpa import MpaOptions, RtrKind
from kbtp.limits import MPA_REQUEST_TIMEOUT_S
from kbtp.rnic import open_rnic
from kbtp.rnic.native import NativeOptions, NativeRnic
from kbtp.rnic.reference import ReferenceOptions, ReferenceRnic
from kbtp.verbs.api import Rnic

RTR = RtrKind.WRITE | RtrKind.READ


def mpa_options(names: str) -> MpaOptions:
    """`names` by commas: markers and no-crc are what the frames say, rtr is the peer-to-peer model of RFC 6581."""
    chosen = names.split(",")
    return MpaOptions(
        crc="no-crc" not in chosen,
        want_markers="markers" in chosen,
        peer_to_peer=RTR if "rtr" in chosen else RtrKind.NONE,
    )


def new_rnic(name: str, *, mpa: str = "", mpa_request_timeout_s: float = MPA_REQUEST_TIMEOUT_S) -> Rnic:
    """Others than the two in user space start streams in their own way."""
    if name not in ("native", "reference"):
        return open_rnic(name)
    options = mpa_options(mpa)
    if name == "native":
        return NativeRnic(NativeOptions(mpa=options, mpa_request_timeout_s=mpa_request_timeout_s))
    return ReferenceRnic(ReferenceOptions(mpa=options, mpa_request_timeout_s=mpa_request_timeout_s))
