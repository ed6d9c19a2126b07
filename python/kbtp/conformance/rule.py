"""One rule that a peer can keep or break, as the suite's tables list it."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class Level(Enum):
    """How much a rule binds. A SHOULD that is not kept, or an unclear text that was read otherwise, is a warning."""

    MUST = "MUST"
    SHOULD = "SHOULD"


@dataclass(frozen=True, slots=True)
class Rule:
    """`section` names where it stands, as "RFC 5044 7.1.1", "draft 6.3 step 1" or "profile 8.1; profile 2".

    `unobservable`: why no case can look at it through a socket; empty for a rule that has cases.
    """

    id: str
    section: str
    text: str
    level: Level = Level.MUST
    unobservable: str = ""


MUST = Level.MUST
SHOULD = Level.SHOULD
