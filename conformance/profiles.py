"""How targets and initiators are configured for the suite: each profile has what some cases need."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from kbtp.conformance.case import Case
from kbtp.conformance.setup import OF_STREAMS, Setup, what_streams_have
from kbtp.verbs.api import Rnic

SHORT_S = 2.0
PATIENCE = 4.0  # with machines that do other things meanwhile
BIG_DRAIN_S = 4.0  # a big block has to get through in that
FAST = {"hello_timeout_s": SHORT_S, "drain_s": SHORT_S, "linger_s": SHORT_S, "ticket_timeout_s": SHORT_S}


@dataclass(frozen=True, slots=True)
class Profile:
    """`config` are fields of TargetConfig, as JSON has them. `keys` are trust domains of keys that are made for it; a
    word behind the domain says that this key is not trusted with direct modes.

    `direct` of an initiator: the direct modes that its workload uses. `mpa`: how its RNIC starts streams, see `rnics`.
    """

    name: str
    has: frozenset[str]
    config: dict[str, Any] = field(default_factory=dict)
    keys: tuple[str, ...] = ()
    namespace: str = ""
    times: dict[str, float] = field(default_factory=dict)
    direct: str = ""
    mpa: str = ""

    def setup(self, rnic: Rnic | None = None, **more: Any) -> Setup:
        """`rnic` carries the suite's streams."""
        return Setup(
            has=self.has | what_streams_have(rnic),
            namespace=self.namespace.encode(),
            patience=PATIENCE,
            **{**self.times, **more},
        )


TIMES = {"mpa_timeout_s": SHORT_S, "hello_timeout_s": SHORT_S, "drain_s": SHORT_S, "linger_s": SHORT_S}

TARGETS = (
    Profile("plain", frozenset({"no-keys"}), {"block_size_bytes": 1 << 20}),
    Profile(
        "small pool, namespace",
        frozenset({"no-keys", "small-pool", "namespace"}),
        {"block_size_bytes": 64 << 10, "pool_blocks": 40, "quota": 2, "namespace": "a model/bf16", **FAST},
        namespace="a model/bf16",
        times=TIMES,
    ),
    Profile(
        "direct modes",
        frozenset({"no-keys", "direct-load", "direct-alloc", "short-waits"}),
        {"block_size_bytes": 64 << 10, "pool_blocks": 256, "direct_blocks": 128, "direct": "load,alloc", **FAST},
        times=TIMES,
    ),
    Profile(
        "big blocks",
        frozenset({"no-keys", "big-blocks", "short-waits", "direct-load"}),
        {"block_size_bytes": 8 << 20, "pool_blocks": 32, "quota": 2, "drain_s": BIG_DRAIN_S, "direct": "load"},
        times={"drain_s": BIG_DRAIN_S},
    ),
    Profile(
        "keys of two domains",
        frozenset({"keys", "two-domains", "direct-alloc"}),
        {"block_size_bytes": 64 << 10, "direct_blocks": 64, "direct": "load,alloc"},
        keys=("prefill", "decode", "prefill untrusted"),
    ),
    Profile("markers, no CRC", frozenset({"no-keys", "markers", "no-crc"}), mpa="markers,no-crc"),
)

INITIATORS = (
    Profile("plain", frozenset({"no-keys", "one-by-one"})),
    Profile("keys", frozenset({"keys", "one-by-one"}), keys=("prefill",)),
    Profile("direct modes", frozenset({"no-keys", "one-by-one", "direct", "direct-loads"}), direct="load,alloc"),
    Profile("markers, no CRC", frozenset({"no-keys", "one-by-one", "markers", "no-crc"}), mpa="markers,no-crc"),
    Profile("peer to peer", frozenset({"no-keys", "one-by-one", "peer-to-peer"}), mpa="rtr"),
)


def patient(profiles: Sequence[Profile], big_drain_s: float) -> list[Profile]:
    """A reader of a big block, that others wait for, has so long before it is taken for one that does not read."""
    times = {"drain_s": big_drain_s}
    return [
        replace(one, config={**one.config, **times}, times={**one.times, **times}) if "big-blocks" in one.has else one
        for one in profiles
    ]


def divided(profiles: Sequence[Profile], cases: Sequence[Case]) -> dict[str, list[Case]]:
    """Each case with the first profile that has all it needs; with the first of all if none has."""
    found: dict[str, list[Case]] = {profile.name: [] for profile in profiles}
    for case in cases:
        fitting = next((profile for profile in profiles if case.needs - OF_STREAMS <= profile.has), profiles[0])
        found[fitting.name].append(case)
    return found
