"""The initiator by hand holds each completion against the requests that are outstanding, whichever it waits for."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from kbtp.conformance.deviation import Deviation, NotApplicable
from kbtp.conformance.initiator_side import InitiatorSide, Request, hello_message
from kbtp.conformance.target_side import ack_fields
from kbtp.types import Status
from kbtp.wire import Completion, HelloAck
from tests.conformance.conftest import Pair

Sides = Callable[[], tuple[InitiatorSide, Callable[..., None]]]


@pytest.fixture
def sides(pair: Callable[..., Pair]) -> Sides:
    """`sides()`: the initiator, and what completes a request as its target."""

    def make() -> tuple[InitiatorSide, Callable[..., None]]:
        ours, theirs = pair()

        def complete(request: Request, *, handle: int | None = None, status: Status = Status.NOT_BOUND) -> None:
            named = request.handle if handle is None else handle
            theirs.send(Completion(request.request_id, named, 0, status).pack())

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


def test_no_more_is_asked_for_than_was_granted(sides: Sides) -> None:
    side, complete = sides()
    side.ack = HelloAck(0, **{**ack_fields(hello_message()), "request_credits": 2, "allocation_quota": 1})
    first = side.alloc_store_inline(7, b"")
    side.send(first, side.load(8, None))
    with pytest.raises(NotApplicable, match="grants 2 requests, the case needs 3"):
        side.send(side.load(9, None))
    side.send(side.load(9, None), beyond_credits=True)
    complete(first, status=Status.SUCCESS)
    side.answer(first)
    with pytest.raises(NotApplicable, match="grants 1 blocks, the case needs 2"):
        side.bind(1, b"")
