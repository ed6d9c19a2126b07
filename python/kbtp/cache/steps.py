"""What a plan asks for: the only ways in which the cache touches an index or a target.

A plan (`get.py`, `put.py`, `lookups.py`, `upkeep.py`) is a generator that yields steps and is sent their replies, so
that it is the same for threads and for asyncio, and a test can stop it between any two. A step of the index may raise
`IndexUnavailable` at the `yield`; one of a target never raises: where there is no target, its reply is None.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, TypeAlias, TypeVar

from kbtp.cache.announcement import Announcement
from kbtp.errors import KbtpError
from kbtp.initiator.view import SessionTerms
from kbtp.types import BlockRef, Handle

Entry: TypeAlias = tuple[bytes, bytes]
"""A name and the octets of the record under it."""


class IndexUnavailable(KbtpError, ConnectionError):
    """The index is not there, does not answer in time, or answers what it should not."""


# --- the index -----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Lookup:
    """The records under `names`; in the same round trip tells owners what was read, and asks what others have told."""

    names: Sequence[bytes]
    touched: Mapping[bytes, Sequence[bytes]] = field(default_factory=dict)
    """By owner."""
    collect: bytes | None = None
    """The owner whose mail is wanted."""


@dataclass(frozen=True, slots=True)
class Looked:
    records: list[bytes | None]
    mail: list[bytes]
    life: bytes
    """Another one means that the index has begun anew and empty."""


@dataclass(frozen=True, slots=True)
class Publish:
    """Put each record under its name unless there is one already: a list of bool, True also for that very record."""

    entries: Sequence[Entry]
    ttl_ms: int | None = None


@dataclass(frozen=True, slots=True)
class Claim:
    """As `Publish`, of names that nobody has looked up; asks in the same round trip what others have told `owner`."""

    entries: Sequence[Entry]
    owner: bytes
    ttl_ms: int | None = None
    meanwhile: Callable[[], None] | None = field(default=None, compare=False, repr=False)
    """To be called, or not, once the index is asked: it changes nothing that another plan sees."""


@dataclass(frozen=True, slots=True)
class Claimed:
    firsts: list[bool]
    mail: list[bytes]
    life: bytes


class Removal(Enum):
    REMOVED = "removed"
    GONE = "gone"  # another record is there, or none
    PINNED = "pinned"


@dataclass(frozen=True, slots=True)
class Remove:
    """Remove each record if it is still that very one: a list of `Removal`."""

    entries: Sequence[Entry]
    spare_pinned: bool = False


@dataclass(frozen=True, slots=True)
class Discard:
    """Remove whatever is under each name: a list of records, None where there was none."""

    names: Sequence[bytes]


@dataclass(frozen=True, slots=True)
class Pin:
    """Keep evictors away from each name for `ms`: a list of bool, False where there is no record."""

    names: Sequence[bytes]
    holder: bytes
    ms: int


@dataclass(frozen=True, slots=True)
class Unpin:
    names: Sequence[bytes]
    holder: bytes


@dataclass(frozen=True, slots=True)
class Scan:
    """A part of all entries of a namespace, of all for b"": (next cursor, entries). Cursors begin and end with 0."""

    fingerprint: bytes
    cursor: int = 0


@dataclass(frozen=True, slots=True)
class Tell:
    """Names of values that are gone or were read, for an owner to find."""

    owner: bytes
    names: Sequence[bytes]


@dataclass(frozen=True, slots=True)
class Announce:
    target: Announcement


@dataclass(frozen=True, slots=True)
class Withdraw:
    incarnation: int


@dataclass(frozen=True, slots=True)
class Drain:
    """Mark a target, for as long as it lives, as one to leave; `undo` takes the mark away."""

    incarnation: int
    undo: bool = False


@dataclass(frozen=True, slots=True)
class ListTargets:
    """All targets that have announced themselves of late: a list of `Announcement`."""


IndexStep: TypeAlias = (
    Lookup | Publish | Claim | Remove | Discard | Pin | Unpin | Scan | Tell | Announce | Withdraw | Drain | ListTargets
)


# --- targets -------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Session:
    """A writer's session with a target."""

    number: int
    """Which of the link's sessions this is."""
    resumed: bool
    bound_blocks: int
    quota_blocks: int
    first_handle: Handle
    handle_count: int

    @classmethod
    def of(cls, terms: SessionTerms, number: int, *, anonymous: bool) -> Session:
        """An anonymous one is a reader's: what it stored would end with it."""
        quota_blocks = 0 if anonymous else terms.quota_blocks
        return cls(number, terms.resumed, terms.bound_blocks, quota_blocks, terms.first_handle, terms.handle_count)


@dataclass(frozen=True, slots=True)
class Open:
    """Have a session with each target: its `Session` by incarnation, None where there is none."""

    targets: Sequence[Announcement]


@dataclass(frozen=True, slots=True)
class LoadJob:
    """Blocks wanted of one target, and where each goes."""

    target: Announcement
    refs: Sequence[BlockRef]
    into: Sequence[memoryview]


@dataclass(frozen=True, slots=True)
class Load:
    """LOAD blocks of each target: its `Results` by incarnation, None where there is no session. With `checksums` they
    have those that the RNIC knows."""

    jobs: Mapping[int, LoadJob]
    checksums: bool


@dataclass(frozen=True, slots=True)
class AllocStore:
    """By target, the number of its session and what to store: its `Results` by incarnation, with the checksums that the
    RNIC knows; None if the session is another."""

    jobs: Mapping[int, tuple[int, Sequence[memoryview]]]


@dataclass(frozen=True, slots=True)
class TakeChecksums:
    """The CRC32c of each of `values`, which are in pieces, as a list: of those that the RNIC does not know."""

    values: Sequence[Sequence[memoryview]]


@dataclass(frozen=True, slots=True)
class Free:
    """By target, the number of its session and what to free; its `Results`, None if the session is another."""

    jobs: Mapping[int, tuple[int, Sequence[BlockRef | Handle]]]


# --- both at once --------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Beside:
    """A step of the index and one of targets, both on their way at once: the replies of both. Instead of the index's
    there may be the `IndexUnavailable`; where it is raised, the targets have not been asked."""

    index: Lookup
    target: Load


TARGET_STEPS = (Open, Load, AllocStore, TakeChecksums, Free)
TargetStep: TypeAlias = Open | Load | AllocStore | TakeChecksums | Free
Step: TypeAlias = IndexStep | TargetStep | Beside

_T = TypeVar("_T")
Plan: TypeAlias = Generator[Step, Any, _T]
