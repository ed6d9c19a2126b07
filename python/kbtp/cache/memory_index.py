"""An index in this process: for tests, and to see by what rules any index has to go."""

from __future__ import annotations

import secrets
import threading
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from kbtp import limits
from kbtp.cache.announcement import Announcement
from kbtp.cache.steps import (
    Announce,
    Claim,
    Claimed,
    Discard,
    Drain,
    Entry,
    IndexStep,
    ListTargets,
    Looked,
    Lookup,
    Pin,
    Publish,
    Removal,
    Remove,
    Scan,
    Tell,
    Unpin,
    Withdraw,
)


class MemoryIndex:
    """Caches of one process may share it: a step is atomic. `now_s` is the clock that expiry, pins and beats go by."""

    def __init__(self, now_s: Callable[[], float]) -> None:
        self._now_s = now_s
        self._lock = threading.Lock()
        self.clear()

    def clear(self) -> None:
        """Begin anew, as an index does that was restarted without a disk."""
        self._life = secrets.token_bytes(8)
        self._records: dict[bytes, tuple[bytes, float | None]] = {}
        self._pins: dict[bytes, dict[bytes, float]] = {}
        self._mail: dict[bytes, deque[bytes]] = {}
        self._targets: dict[int, tuple[Announcement, float]] = {}
        self._draining: set[int] = set()

    def perform(self, step: IndexStep) -> Any:
        with self._lock:
            return self._perform(step)

    def close(self) -> None:
        """There is nothing to close."""

    def _perform(self, step: IndexStep) -> Any:
        match step:
            case Lookup():
                return self._lookup(step)
            case Publish():
                return self._publish(step.entries, step.ttl_ms)
            case Claim():
                firsts = self._publish(step.entries, step.ttl_ms)
                return Claimed(firsts, list(self._mail.pop(step.owner, ())), self._life)
            case Remove():
                return [self._remove(name, record, step.spare_pinned) for name, record in step.entries]
            case Discard():
                return [self._discard(name) for name in step.names]
            case Pin():
                return [self._pin(name, step) for name in step.names]
            case Unpin():
                for name in step.names:
                    self._pins.get(name, {}).pop(step.holder, None)
            case Scan():
                return 0, [
                    (n, r) for n in list(self._records) if n.startswith(step.fingerprint) and (r := self._get(n))
                ]
            case Tell():
                self._tell(step.owner, list(step.names))
            case _:
                return self._about_targets(step)

    def _about_targets(self, step: IndexStep) -> Any:
        match step:
            case Announce():
                self._targets[step.target.incarnation] = step.target, self._now_s()
            case Withdraw():
                self._targets.pop(step.incarnation, None)
            case Drain():
                (self._draining.discard if step.undo else self._draining.add)(step.incarnation)
            case ListTargets():
                oldest_s = self._now_s() - limits.CACHE_BEAT_TTL_S
                return [
                    target.marked(draining=target.incarnation in self._draining)
                    for target, beat_s in self._targets.values()
                    if beat_s >= oldest_s
                ]

    def _lookup(self, step: Lookup) -> Looked:
        for owner, names in step.touched.items():
            self._tell(owner, list(names))
        mail = self._mail.pop(step.collect, deque()) if step.collect is not None else ()
        return Looked([self._get(name) for name in step.names], list(mail), self._life)

    def _get(self, name: bytes) -> bytes | None:
        record, expires_at_s = self._records.get(name, (None, None))
        if expires_at_s is not None and expires_at_s <= self._now_s():
            del self._records[name]
            return None
        return record

    def _publish(self, entries: Sequence[Entry], ttl_ms: int | None) -> list[bool]:
        expires_at_s = None if ttl_ms is None else self._now_s() + ttl_ms / 1000
        firsts = []
        for name, record in entries:
            present = self._get(name)
            if present is None:
                self._records[name] = record, expires_at_s
            firsts.append(present is None or present == record)
        return firsts

    def _remove(self, name: bytes, record: bytes, spare_pinned: bool) -> Removal:
        if self._get(name) != record:
            return Removal.GONE
        if spare_pinned and max(self._pins.get(name, {}).values(), default=0.0) > self._now_s():
            return Removal.PINNED
        self._discard(name)
        return Removal.REMOVED

    def _discard(self, name: bytes) -> bytes | None:
        record = self._get(name)
        self._records.pop(name, None)
        self._pins.pop(name, None)
        return record

    def _pin(self, name: bytes, step: Pin) -> bool:
        if self._get(name) is None:
            return False
        pins = self._pins.setdefault(name, {})
        pins[step.holder] = max(pins.get(step.holder, 0.0), self._now_s() + step.ms / 1000)
        return True

    def _tell(self, owner: bytes, names: list[bytes]) -> None:
        self._mail.setdefault(owner, deque(maxlen=limits.CACHE_MAIL_MAX)).extend(names)
