"""When to try again what is not there. Time is an argument."""

from __future__ import annotations

from kbtp.limits import CACHE_BACKOFF_MAX_S, CACHE_BACKOFF_MIN_S


class Backoff:
    """At once at first; after each failure in a row twice as late, up to a cap."""

    def __init__(self) -> None:
        self._pause_s = CACHE_BACKOFF_MIN_S
        self._next_try_s = float("-inf")

    def may_try(self, now_s: float) -> bool:
        return now_s >= self._next_try_s

    def failed(self, now_s: float) -> None:
        self._next_try_s = now_s + self._pause_s
        self._pause_s = min(2 * self._pause_s, CACHE_BACKOFF_MAX_S)

    def worked(self) -> None:
        self._pause_s = CACHE_BACKOFF_MIN_S
        self._next_try_s = float("-inf")
