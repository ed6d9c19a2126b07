"""Tasks in threads of their own, for who must not wait and must not see an exception."""

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


class Turns:
    """Tasks of one kind, one after the other. Nothing is raised to who hands one in."""

    def __init__(self, name: str, wait_s: float, troubles: Troubles) -> None:
        """A task that has waited `wait_s` for those before it is given up: whoever handed it in has a deadline."""
        self._name = name
        self._wait_s = wait_s
        self._troubles = troubles
        self._thread = ThreadPoolExecutor(1, thread_name_prefix=f"kbtp-{name}")

    def submit(self, task: Callable[[], T], otherwise: T, tell: Callable[[T], None]) -> None:
        """`tell` gets the result of the task, or `otherwise` if it raises or is given up; once, whatever happens."""
        try:
            self._thread.submit(self._run, task, otherwise, tell, time.monotonic())
        except RuntimeError as closed:
            self._troubles.count(f"{self._name} after the end", closed)
            tell(otherwise)

    def _run(self, task: Callable[[], T], otherwise: T, tell: Callable[[T], None], since_s: float) -> None:
        result = otherwise
        waited_s = time.monotonic() - since_s
        if waited_s > self._wait_s:
            self._troubles.count(f"{self._name} given up", f"had to wait {waited_s:.1f} s for its turn")
        else:
            try:
                result = task()
            except Exception as error:
                self._troubles.count(f"{self._name} failed", repr(error))
        tell(result)

    def close(self) -> None:
        """Waits for the task that runs, which has a deadline, and gives up those behind it."""
        self._wait_s = -1.0
        self._thread.shutdown()


class Lane(Generic[T]):
    """As LMCache's controllers want it: tasks handed in, told of by an event, and their results asked for later."""

    def __init__(self, name: str, wait_s: float, troubles: Troubles) -> None:
        self.notifier = create_event_notifier()
        self._turns = Turns(name, wait_s, troubles)
        self._lock = threading.Lock()
        self._results: dict[int, T] = {}
        self._closed = False

    def submit(self, task: Callable[[], T], otherwise: T) -> int:
        task_id = next(_ids)
        self._turns.submit(task, otherwise, lambda result: self._end(task_id, result))
        return task_id

    def _end(self, task_id: int, result: T) -> None:
        with self._lock:
            self._results[task_id] = result
            if not self._closed:
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
        """A task handed in later is given up, and nobody is told."""
        self._turns.close()
        with self._lock:
            self._closed = True
            self.notifier.close()
