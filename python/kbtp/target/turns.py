"""Profile 3 "Same handle, same session": which request of a session may start when."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator

from kbtp.target.sequences import Task


class Turns:
    """The requests of one session that are not resolved, in the order they came.

    A mutating request waits for every earlier one on its handle, a LOAD for every earlier mutating one.
    """

    def __init__(self) -> None:
        self._by_handle: dict[int, list[Task]] = {}
        self._ready_handles: deque[int] = deque()

    def __iter__(self) -> Iterator[Task]:
        return (task for tasks in self._by_handle.values() for task in tasks)

    def __len__(self) -> int:
        return sum(map(len, self._by_handle.values()))

    def __bool__(self) -> bool:
        return bool(self._by_handle)

    def add(self, task: Task) -> None:
        self._by_handle.setdefault(task.request.handle, []).append(task)
        self._ready_handles.append(task.request.handle)

    def resolved(self, task: Task) -> bool:
        """`task` is wholly done or not done. False if that was known before."""
        handle = task.request.handle
        tasks = self._by_handle.get(handle, [])
        if task not in tasks:
            return False
        tasks.remove(task)
        if tasks:
            self._ready_handles.append(handle)
        else:
            del self._by_handle[handle]
        return True

    def startable(self) -> Task | None:
        """A task whose turn has come, to be started now."""
        while self._ready_handles:
            task = self._startable_on(self._ready_handles[0])
            if task is not None:
                return task
            self._ready_handles.popleft()
        return None

    def _startable_on(self, handle: int) -> Task | None:
        for position, task in enumerate(self._by_handle.get(handle, ())):
            if not task.started:
                return task if position == 0 or not task.mutates else None
            if task.mutates:
                return None
        return None

    def clear(self) -> None:
        self._by_handle.clear()
        self._ready_handles.clear()
