"""What goes wrong is counted each time, and told once in a while: a target that is away must not fill a disk."""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from collections.abc import Callable

REPEAT_S = 60.0


class Troubles:
    """Counters by kind of trouble. Threads may share it."""

    def __init__(self, log: logging.Logger, clock: Callable[[], float] = time.monotonic) -> None:
        self._log = log
        self._now_s = clock
        self._lock = threading.Lock()
        self._counts: Counter[str] = Counter()
        self._told_s: dict[str, float] = {}

    def count(self, kind: str, detail: object = "", times: int = 1) -> None:
        """One line for the first of each kind within `REPEAT_S`."""
        with self._lock:
            self._counts[kind] += times
            total, now_s = self._counts[kind], self._now_s()
            if now_s - self._told_s.get(kind, float("-inf")) < REPEAT_S:
                return
            self._told_s[kind] = now_s
        self._log.warning("%s (%d so far): %s", kind, total, detail)

    def as_dict(self) -> dict[str, int]:
        with self._lock:
            return dict(self._counts)
