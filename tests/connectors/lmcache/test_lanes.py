"""The threads behind LMCache's controllers, by themselves."""

from __future__ import annotations

import logging
import select

from kbtp.connectors.lmcache.lanes import Lane
from kbtp.connectors.troubles import Troubles

LONG_S = 600.0


def is_told(lane: Lane[str], timeout_s: float) -> bool:
    return bool(select.select([lane.notifier.fileno()], [], [], timeout_s)[0])


def test_a_task_s_end_is_told_and_its_result_is_there_once() -> None:
    lane: Lane[str] = Lane("load", LONG_S, Troubles(logging.getLogger("kbtp.connectors.test")))
    task_id = lane.submit(lambda: "loaded", "missed")
    assert is_told(lane, LONG_S)
    assert lane.take(task_id) == "loaded"
    assert lane.take(task_id) is None
    lane.close()


def test_a_task_handed_in_after_the_end_is_given_up() -> None:
    """LMCache's controllers may end after their adapter, whose event is gone by then."""
    troubles = Troubles(logging.getLogger("kbtp.connectors.test"))
    lane: Lane[str] = Lane("load", LONG_S, troubles)
    lane.close()
    task_id = lane.submit(lambda: "loaded", "missed")
    assert lane.take(task_id) == "missed"
    assert troubles.as_dict() == {"load after the end": 1}
