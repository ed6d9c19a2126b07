"""What single cases make of a peer that answers by script."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from kbtp.conformance.deviation import Deviation
from kbtp.conformance.initiator_side import InitiatorSide, hello_message
from kbtp.conformance.iwarp.ddp_messages import segments_in_another_order
from kbtp.conformance.iwarp.security import STAGS_AT_LEAST, expect_unpredictable
from kbtp.conformance.target_side import ack_fields
from kbtp.types import Status
from kbtp.wire import HelloAck
from tests.conformance.conftest import Pair


class ScriptedProbe:
    """A probe for one stream, on which the peer has said already what it will say."""

    def __init__(self, side: InitiatorSide) -> None:
        self._side = side

    def before_hello(self) -> InitiatorSide:
        return self._side


@pytest.mark.parametrize("status", [Status.SUCCESS, Status.MALFORMED])
def test_a_hello_that_was_put_together_wrong(pair: Callable[..., Pair], status: Status) -> None:
    ours, theirs = pair()
    granted = ack_fields(hello_message()) if status is Status.SUCCESS else {}
    theirs.send(HelloAck(1, status=status, **granted).pack())
    probe: Any = ScriptedProbe(InitiatorSide(ours))
    if status is Status.SUCCESS:
        segments_in_another_order(probe)
    else:
        with pytest.raises(Deviation, match="MALFORMED"):
            segments_in_another_order(probe)


@pytest.mark.parametrize(
    "stags",
    [
        [0x10000000 * index + (0x1234567 if index == 7 else 0) for index in (*range(7), 6)],
        [0x100 * index for index in range(STAGS_AT_LEAST)],
        [0x7000_0000 + index * index * 0x1_0001 for index in range(STAGS_AT_LEAST)],
    ],
    ids=["one twice", "a fixed step", "close together"],
)
def test_stags_that_can_be_guessed(stags: list[int]) -> None:
    with pytest.raises(Deviation):
        expect_unpredictable(stags)
