"""What a cache knows between calls. Plans change it, and only between two of their steps."""

from __future__ import annotations

import hashlib
import logging
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from kbtp import limits
from kbtp.cache.announcement import Announcement
from kbtp.cache.eviction import policy_named
from kbtp.cache.outcomes import Counters
from kbtp.cache.record import BadRecord, Record
from kbtp.cache.remembered import Remembered
from kbtp.cache.share import Share
from kbtp.cache.steps import Entry, IndexUnavailable, Lookup

log = logging.getLogger("kbtp.cache")


@dataclass(frozen=True, slots=True)
class Identity:
    """Who a cache is: the writer's Initiator ID, and the fingerprint of the namespace."""

    owner: bytes
    fingerprint: bytes
    writes: bool = True


class State:
    """Shares, known targets, what is to be told to other owners, and the counters."""

    def __init__(self, identity: Identity, eviction: str) -> None:
        policy_named(eviction)
        self.identity = identity
        self.counters = Counters()
        self.shares: dict[int, Share] = {}
        self.targets: dict[int, Announcement] = {}
        self.targets_read_at_s = -math.inf
        self.swept_at_s: float | None = None
        self.sweep_cursor = 0
        self.life: bytes | None = None
        self.must_announce = False
        """The index has lost our records."""
        self.unsure: list[Entry] = []
        """Records that were given up though they may have been published."""
        self.remembered = Remembered()
        self.puts_to_look_up = 0
        """How many more have to be of new names before one is stored without looking first."""
        self._index_is_away = False
        self._eviction = eviction
        self._mail: dict[bytes, dict[bytes, None]] = {}
        self._mail_count = 0

    @property
    def owner(self) -> bytes:
        return self.identity.owner

    def share_of(self, target: Announcement) -> Share:
        share = self.shares.get(target.incarnation)
        if share is None:
            share = Share(target.incarnation, target.url, target.block_bytes, policy_named(self._eviction))
            self.shares[target.incarnation] = share
        share.url = target.url
        return share

    # --- the index -----------------------------------------------------------------------------

    def lookup(self, names: Sequence[bytes], *, collect: bool = False) -> Lookup:
        """The step, with what there is to tell."""
        mail, self._mail, self._mail_count = self._mail, {}, 0
        return Lookup(names, {owner: list(read) for owner, read in mail.items()}, self.owner if collect else None)

    def saw_life(self, life: bytes) -> None:
        if self.life is not None and life != self.life:
            log.warning("the index has begun anew: what this writer holds is announced again")
            self.must_announce = True
        self.life = life
        self._index_is_away = False

    def index_failed(self, error: IndexUnavailable) -> None:
        """One line of the log, however many calls find it so."""
        self.counters.index_failures += 1
        if not self._index_is_away:
            log.warning("the index is not available: %s", error)
        self._index_is_away = True

    def parsed(self, octets: bytes) -> Record | None:
        """None for what cannot be read: a later version's, or damaged."""
        try:
            return Record.parse(octets)
        except BadRecord as error:
            self.counters.bad_records += 1
            log.warning("a record that cannot be read: %s", error)
            return None

    def sweep_is_due(self, now_s: float) -> bool:
        """Now and then; counted from the first put on."""
        if self.swept_at_s is None:
            self.swept_at_s = now_s
        due = now_s - self.swept_at_s >= limits.CACHE_SWEEP_S
        if due:
            self.swept_at_s = now_s
        return due

    def looked_before_put(self, were_new: bool) -> None:
        self.puts_to_look_up = max(0, self.puts_to_look_up - 1) if were_new else limits.CACHE_CLAIM_AFTER

    def may_claim(self, names: Iterable[bytes], now_s: float) -> bool:
        """Whether a put of `names` need not look first: they are new as far as can be told, and nothing else is due."""
        return (
            not self.puts_to_look_up
            and not self.unsure
            and not self.must_announce
            and not self.targets_are_old(now_s)
            and self.swept_at_s is not None
            and now_s - self.swept_at_s < limits.CACHE_SWEEP_S
            and not self.remembered.has_any(names)
        )

    # --- targets -------------------------------------------------------------------------------

    def targets_are_old(self, now_s: float) -> bool:
        return now_s - self.targets_read_at_s > limits.CACHE_TARGETS_REFRESH_S

    def saw_targets(self, targets: Iterable[Announcement], now_s: float) -> None:
        seen = {target.incarnation: target for target in targets}
        urls = {target.url for target in seen.values()}
        for share in list(self.shares.values()):
            if share.incarnation not in seen and share.url in urls:
                del self.shares[share.incarnation]  # another life has begun there: nothing of this one is left
        self.targets = seen
        self.targets_read_at_s = now_s

    def lasts(self, record: Record) -> bool:
        """Whether one of its targets is there and is to stay."""
        targets = [self.targets.get(copy.incarnation) for copy in record.copies]
        return not targets or any(target is not None and not target.draining for target in targets)

    # --- uses ----------------------------------------------------------------------------------

    def used(self, names: Sequence[bytes], owners: Sequence[bytes]) -> None:
        """Values were used together, in this order: their owners' policies hear of it, from the end (docs/cache.md)."""
        ended = list(zip(reversed(names), reversed(owners), strict=True))
        ours = [name for name, owner in ended if owner == self.owner]
        for share in self.shares.values():
            share.used_all(ours)
        if len(ours) == len(ended):
            return
        for name, owner in ended:
            if owner != self.owner and self._mail_count < limits.CACHE_MAIL_MAX:
                self._mail_count += 1
                self._mail.setdefault(owner, {})[name] = None

    def read_mail(self, letters: Iterable[bytes]) -> None:
        """What others have told: the name of a value they read, or of one whose record they removed."""
        for letter in letters:
            name, gone, record_hash = letter.partition(GONE)
            for share in self.shares.values():
                held = share.get(name)
                if held is not None and gone and record_hash == _record_hash(held.record):
                    share.drop(name)
                elif not gone:
                    share.used(name)

    def lost(self, name: bytes, record: bytes) -> bool:
        """This record is gone: if it was ours, its blocks are to be freed, all copies of them. Whether it was."""
        self.remembered.forget(name)
        was_ours = False
        for share in self.shares.values():
            held = share.get(name)
            if held is not None and held.record == record:
                share.drop(name)
                was_ours = True
        return was_ours

    def all_lost(self, entries: Sequence[Entry]) -> list[Entry]:
        """As `lost` of each: those that were not ours."""
        self.remembered.forget_all([name for name, _ in entries])
        ours: set[Entry] = set()
        for share in self.shares.values():
            ours.update(share.drop_all(entries))
        return [entry for entry in entries if entry not in ours]


GONE = b" gone "


def gone_letter(name: bytes, record: bytes) -> bytes:
    """Tells the owner of `record` that it has been removed; another one under that name meanwhile is not meant."""
    return name + GONE + _record_hash(record)


def _record_hash(record: bytes) -> bytes:
    return hashlib.blake2b(record, digest_size=8).hexdigest().encode()
