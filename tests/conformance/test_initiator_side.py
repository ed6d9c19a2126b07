"""The initiator by hand holds each completion against the requests that are outstanding, whichever it waits for."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from kbtp.conformance.deviation import Deviation
from kbtp.conformance.initiator_side import InitiatorSide
from kbtp.types import Status
from kbtp.wire import Completion, Load
from tests.conformance.conftest import Pair

Sides = Callable[[], tuple[InitiatorSide, Callable[..., None]]]


@pytest.fixture
def sides(pair: Callable[..., Pair]) -> Sides:
    """`sides()`: the initiator, and what completes a request as its target."""

    def make() -> tuple[InitiatorSide, Callable[..., None]]:
        ours, theirs = pair()

        def complete(request: Load, *, handle: int | None = None) -> None:
            named = request.handle if handle is None else handle
            theirs.send(Completion(request.request_id, named, 0, Status.NOT_BOUND).pack())

        return InitiatorSide(ours), complete

    return make


def test_completions_in_another_order(sides: Sides) -> None:
    side, complete = sides()
    first, second = side.load(7, None), side.load(8, None)
    side.send(first, second.pack())
    complete(second)
    complete(first)
    assert [side.answer(request).completion.handle for request in (first, second)] == [7, 8]


def test_a_request_that_is_completed_twice(sides: Sides) -> None:
    side, complete = sides()
    first, second = side.load(7, None), side.load(8, None)
    side.send(first, second)
    complete(first)
    complete(first)
    complete(second)
    side.answer(first)
    with pytest.raises(Deviation, match="outstanding"):
        side.answer(second)


def test_a_completion_of_nothing_that_was_sent(sides: Sides) -> None:
    side, complete = sides()
    sent, never_sent = side.load(7, None), side.load(8, None)
    side.send(sent)
    complete(never_sent)
    complete(sent)
    with pytest.raises(Deviation, match="outstanding"):
        side.answer(sent)


def test_a_handle_that_is_not_echoed_is_noticed_when_it_comes(sides: Sides) -> None:
    side, complete = sides()
    first, second = side.load(7, None), side.load(8, None)
    side.send(first, second)
    complete(first, handle=9)
    complete(second)
    with pytest.raises(Deviation, match="handle 7 echoed"):
        side.answer(second)


def test_a_request_id_may_be_used_again_once_it_is_completed(sides: Sides) -> None:
    side, complete = sides()
    load = side.load(7, None)
    for _ in range(2):
        side.send(load)
        complete(load)
        assert side.answer(load).status is Status.NOT_BOUND
