"""What can be set on a reference RNIC."""

from __future__ import annotations

from dataclasses import dataclass, field

from kbtp.iwarp.mpa import MpaOptions
from kbtp.limits import DISCONNECT_S, GOODBYE_S, MPA_REQUEST_TIMEOUT_S, RNIC_ACCEPT_PAUSE_S, TCP_USER_TIMEOUT_S


@dataclass(frozen=True, slots=True)
class ReferenceOptions:
    """How a reference RNIC starts its streams, and how long it waits for what. All times in seconds.

    `mpa` is used by both sides: CRC, markers wanted, MPA revision and the RTR kinds offered.
    `mpa_request_timeout_s` runs from accept to the whole MPA Request (RFC 5044 7.1.2 rule 10), `goodbye_s` from a last
    Terminate or Reply to the peer's FIN, `disconnect_s` as `kbtp.limits.DISCONNECT_S` says, and after
    `tcp_user_timeout_s` without an acknowledgement the peer is lost.
    """

    mpa: MpaOptions = field(default_factory=MpaOptions)
    mpa_request_timeout_s: float = MPA_REQUEST_TIMEOUT_S
    goodbye_s: float = GOODBYE_S
    disconnect_s: float = DISCONNECT_S
    accept_pause_s: float = RNIC_ACCEPT_PAUSE_S
    tcp_user_timeout_s: float = TCP_USER_TIMEOUT_S
