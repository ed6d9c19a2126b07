"""A target tells the index that it lives, every few seconds."""

from __future__ import annotations

import logging
import threading

from kbtp.cache.announcement import Announcement
from kbtp.cache.index import Index
from kbtp.cache.steps import Announce, IndexUnavailable, Withdraw
from kbtp.limits import CACHE_BEAT_S

log = logging.getLogger("kbtp.index")


class Announcer:
    """Announces from a thread of its own until it is closed. An index that does not answer is logged once a while."""

    def __init__(self, index: Index, target: Announcement, beat_s: float = CACHE_BEAT_S) -> None:
        """The first announcement is made before this returns. Takes `index` over."""
        self._index = index
        self._target = target
        self._beat_s = beat_s
        self._ended = threading.Event()
        self._failing = False
        self._announce()
        self._thread = threading.Thread(target=self._run, name="kbtp-announcer", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Withdraw the target. Idempotent."""
        if self._ended.is_set():
            return
        self._ended.set()
        self._thread.join()
        try:
            self._index.perform(Withdraw(self._target.incarnation))
        except IndexUnavailable as error:
            log.warning("the target is not withdrawn from the index, its announcement runs out: %s", error)
        self._index.close()

    def _run(self) -> None:
        while not self._ended.wait(self._beat_s):
            self._announce()

    def _announce(self) -> None:
        try:
            self._index.perform(Announce(self._target))
        except IndexUnavailable as error:
            if not self._failing:
                log.warning("the target cannot be announced, and is not found until it can: %s", error)
            self._failing = True
        else:
            if self._failing:
                log.info("the target is announced again")
            self._failing = False
