"""What the suite is told of the peer under test, and how long that takes over things."""

from __future__ import annotations

from dataclasses import dataclass

from kbtp.keys import Key
from kbtp.limits import DRAIN_S, HELLO_TIMEOUT_S, LINGER_S, MPA_REQUEST_TIMEOUT_S
from kbtp.verbs.api import Rnic

NEEDS = {
    "iwarp": "the suite speaks iWARP by hand, with no RNIC between it and the peer",
    "rdmap": "streams are those of RDMAP (draft 9.1)",
    "invalidate": "a peer's Send with Invalidate works on memory that the suite lends",
    "infiniband": "streams are those of InfiniBand or RoCEv2 (draft 9.2)",
    "direct-load": "the target grants DIRECT_LOAD to whoever asks",
    "direct-alloc": "the target grants DIRECT_ALLOC to whoever asks",
    "direct-loads": "the initiator loads directly where it may",
    "direct": "the initiator loads and allocates directly where it may",
    "markers": "the peer asks for markers",
    "no-crc": "the peer does not ask for CRCs",
    "peer-to-peer": "the initiator starts in the peer-to-peer model of RFC 6581, without one of the kinds of RTR",
    "keys": "the peer has keys, and --key-file holds at least one of them",
    "two-domains": "--key-file holds keys of two trust domains",
    "no-keys": "the target has no keys",
    "namespace": "the target has the namespace of --namespace",
    "big-blocks": "blocks of 8 MiB, so that one does not fit the socket buffers",
    "small-pool": "a pool of at most 64 blocks that nobody else uses",
    "short-waits": "the target waits no longer than a few seconds for a HELLO, a slow reader and a lingering initiator",
    "one-by-one": "the initiator under test is started for each case and says whether its work succeeded",
}
"""What a case may need of the peer under test; `--with` names what is there."""

BY_HAND = frozenset({"iwarp", "rdmap", "invalidate"})
OF_STREAMS = BY_HAND | {"infiniband"}


def what_streams_have(rnic: Rnic | None) -> frozenset[str]:
    """Of `OF_STREAMS`, with the RNIC that carries our streams, or by hand."""
    if rnic is None:
        return BY_HAND
    can = rnic.capabilities
    binding = "infiniband" if can.write_with_immediate else "rdmap"
    return frozenset({binding, "invalidate"} if can.invalidated_by_peers else {binding})


MARGIN_S = 2.0  # on top of the time that a peer says it waits


@dataclass(frozen=True, slots=True)
class Setup:
    """How the peer under test is configured. `keys` are those of the target that we may use; `patience` times as
    long as usual is waited for what it should do. `hello_delay_s` passes between the target's MPA Reply and the first
    FPDU to it: one that listens for FPDUs only a moment after its Reply overlooks what comes before."""

    has: frozenset[str] = BY_HAND | {"no-keys"}
    namespace: bytes = b""
    keys: tuple[Key, ...] = ()
    mpa_timeout_s: float = MPA_REQUEST_TIMEOUT_S
    hello_timeout_s: float = HELLO_TIMEOUT_S
    drain_s: float = DRAIN_S
    linger_s: float = LINGER_S
    patience: float = 1.0
    hello_delay_s: float = 0.0
    crc: bool = True
    """Ask a peer for CRCs, where a case does not say how to start."""
