"""Tasks as LMCache's controllers want them: handed in, told of by an event, and their results asked for later."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Generic, TypeVar

from lmcache.v1.platform import create_event_notifier

from kbtp.connectors.troubles import Troubles

T = TypeVar("T")
_ids = itertools.count()  # unique over lanes too


class Lane(Generic[T]):
    """Tasks of one kind, one after the other in a thread of their own. Nothing is raised to who hands one in."""

    def __init__(self, name: str, wait_s: float, troubles: Troubles) -> None:
        """A task that has waited `wait_s` for those before it is given up: whoever handed it in has a deadline."""
        self.notifier = create_event_notifier()
        self._name = name
        self._wait_s = wait_s
        self._troubles = troubles
        self._lock = threading.Lock()
        self._results: dict[int, T] = {}
        self._thread = ThreadPoolExecutor(1, thread_name_prefix=f"kbtp-{name}")

    def submit(self, task: Callable[[], T], otherwise: T) -> int:
        """`otherwise` is the result if the task raises or is given up."""
        task_id = next(_ids)
        try:
            self._thread.submit(self._run, task_id, task, otherwise, time.monotonic())
        except RuntimeError as closed:
            self._troubles.count(f"{self._name} after the end", closed)
            self._end(task_id, otherwise)
        return task_id

    def _run(self, task_id: int, task: Callable[[], T], otherwise: T, since_s: float) -> None:
        result = otherwise
        waited_s = time.monotonic() - since_s
        if waited_s > self._wait_s:
            self._troubles.count(f"{self._name} given up", f"had to wait {waited_s:.1f} s for its turn")
        else:
            try:
                result = task()
            except Exception as error:
                self._troubles.count(f"{self._name} failed", repr(error))
        self._end(task_id, result)

    def _end(self, task_id: int, result: T) -> None:
        with self._lock:
            self._results[task_id] = result
        self.notifier.notify()

    def take(self, task_id: int) -> T | None:
        """The result, once; None while there is none."""
        with self._lock:
            return self._results.pop(task_id, None)

    def take_all(self) -> dict[int, T]:
        with self._lock:
            results, self._results = self._results, {}
        return results

    def close(self) -> None:
        """Waits for the task that runs, which has a deadline; those behind it are dropped."""
        self._thread.shutdown(cancel_futures=True)
        self.notifier.close()
