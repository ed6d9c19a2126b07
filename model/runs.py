"""Every run of a model: what is checked, and what must come of it.

A run without `finds` must hold, exhaustively. The others take a rule out with a switch of the model, and the checker
must then find the violation: so each rule is needed, and each model can fail.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass


class Search(enum.Enum):
    """How the states are searched, and for what."""

    SAFETY = "safety"
    """Assertions, and states where nothing moves though something should."""
    FAIRNESS = "fairness"
    """The model's claim about what must come in the end, if everybody who can go on does."""
    SHORTEST = "shortest"
    """As SAFETY, breadth first: the trace of a violation is as short as can be."""


@dataclass(frozen=True, slots=True)
class Run:
    name: str
    model: str
    says: str
    switches: tuple[str, ...] = ()
    search: Search = Search.SAFETY
    finds: str | None = None
    """A piece of what the checker says of the violation that it must find."""


STUCK = "invalid end state"

HOLDING = (
    Run("counter-1", "counter", "the masked counter, n = 1", ("ORDER=1",)),
    Run("counter-2", "counter", "the masked counter, n = 2", ("ORDER=2",)),
    Run("counter-4", "counter", "the masked counter, n = 4, the widest", ("ORDER=4",)),
    Run("ring-2-1", "ring", "N = 2, F = 1, 1 allocator", ("N=2", "F=1")),
    Run("ring-2-2", "ring", "N = F = 2, 2 allocators", ("N=2", "F=2")),
    Run("ring-4-3", "ring", "N = 4, F = 3, 3 allocators", ("N=4", "F=3")),
    Run("ring-4-4", "ring", "N = F = 4, 3 allocators", ("N=4", "F=4", "ALLOCATORS=3")),
    Run("ring-2-2-ends", "ring", "N = F = 2: an allocation ends", ("N=2", "F=2"), Search.FAIRNESS),
    Run("ring-4-3-ends", "ring", "N = 4, F = 3: an allocation ends", ("N=4", "F=3"), Search.FAIRNESS),
    Run("direct-2-1", "direct", "N = 2, F = 1", ("N=2", "F=1")),
    Run("direct-2-2", "direct", "N = F = 2, 2 allocators, and the target's own", ("N=2", "F=2")),
    Run("direct-4-2", "direct", "N = 4, F = 2, 2 allocators", ("N=4", "F=2", "OWN=0")),
    Run(
        "direct-4-3",
        "direct",
        "N = 4, F = 3, 2 allocators, no timeouts",
        ("N=4", "F=3", "ALLOCATORS=2", "OWN=0", "TIMEOUTS=0"),
    ),
    Run("same-handle", "same_handle", "FREE and BIND of one handle"),
    Run("head", "head", "a hostile initiator and its Head"),
    Run("load", "load", "LOAD beside FREE and reuse"),
    Run("direct-load", "direct_load", "direct load beside FREE and reuse, three reads"),
    Run("direct-load-ascending", "direct_load", "the same, two reads in order", ("TWO_READS", "ASCENDING")),
)

WITHOUT_A_RULE = (
    Run("counter-0", "counter", "draft 3.3: n = 0", ("ORDER=0",), Search.SHORTEST, "counter=="),
    Run("draft-6.1", "load", "draft 6.1: no pin", ("DRAFT_6_1",), Search.SHORTEST, "first=="),
    Run("no-drain", "load", "a reader that never drains", ("NO_DRAIN",), Search.SHORTEST, STUCK),
    Run("draft-6.2", "ring", "draft 3.3: any consumed slot", ("DRAFT_6_2",), Search.SHORTEST, STUCK),
    Run("no-deferral", "ring", "slots overwritten", ("NO_DEFERRAL",), Search.SHORTEST, "holder["),
    Run("ticket-first", "ring", "ticket before quota", ("TICKET_FIRST",), Search.SHORTEST, STUCK),
    Run("stalls", "ring", "an allocation that stops", ("STALLS",), Search.SHORTEST, STUCK),
    Run("free-waits", "same_handle", "FREE waits for its slot", ("FREE_WAITS",), Search.SHORTEST, STUCK),
    Run("draft-6.3", "direct_load", "draft 6.6: generations compared", ("DRAFT_6_3",), Search.SHORTEST, "first=="),
    Run("two-reads", "direct_load", "the entry read twice, 16 octets", ("TWO_READS",), Search.SHORTEST, "first=="),
    Run("old-generation", "direct_load", "generations repeat", ("GENERATIONS=1",), Search.SHORTEST, "first=="),
    Run("owner-writes", "direct_load", "a sealed block written to", ("OWNER_WRITES",), Search.SHORTEST, "first=="),
    Run("draft-6.9", "head", "draft 3.3: Slot Offset as address", ("DRAFT_6_9",), Search.SHORTEST, "at<2"),
    Run("any-bind", "head", "BIND of a ticket nobody took", ("ANY_BIND",), Search.SHORTEST, "sequence[at]"),
    Run("two-owners", "head", "BIND while a slot is written", ("TWO_OWNERS",), Search.SHORTEST, "offered<0"),
    Run("no-confirm", "direct", "the slot read once", ("NO_CONFIRM",), Search.SHORTEST, "lies[first]"),
    Run(
        "keep-partition-stag",
        "direct",
        "reclaim, Partition STag left",
        ("KEEP_PARTITION_STAG",),
        Search.SHORTEST,
        "lies[first]",
    ),
    Run("keep-head-stag", "direct", "reclaim, Head STag left", ("KEEP_HEAD_STAG",), Search.SHORTEST, "waits[i]"),
    Run("snapshot-first", "direct", "snapshot before that", ("SNAPSHOT_FIRST",), Search.SHORTEST, "taken[i]"),
    Run(
        "early-timeout",
        "direct",
        "timeout before the slot",
        ("EARLY_TIMEOUT", "ALLOCATORS=1"),
        Search.SHORTEST,
        "block[i]",
    ),
    Run("abandon-received", "direct", "abandoned beside its BIND", ("ABANDON_RECEIVED",), Search.SHORTEST, "in_time"),
    Run(
        "hold-and-wait",
        "direct",
        "BIND after the last slot",
        ("HOLD_AND_WAIT", "TIMEOUTS=0"),
        Search.SHORTEST,
        "taken[i]",
    ),
    Run(
        "taken-within-n",
        "direct",
        "a ticket more than N behind Head",
        ("TAKEN_WITHIN_N", "TIMEOUTS=0"),
        Search.SHORTEST,
        "wanted[a]",
    ),
    Run(
        "forget-ticket",
        "direct",
        "a ticket taken in vain, forgotten",
        ("FORGET_TICKET", "TIMEOUTS=0"),
        Search.SHORTEST,
        "wanted[a]",
    ),
)

RUNS = HOLDING + WITHOUT_A_RULE
