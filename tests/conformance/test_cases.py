"""What single cases make of a peer that answers by script."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from kbtp.conformance.deviation import Deviation, NotApplicable
from kbtp.conformance.initiator_side import InitiatorSide, hello_message
from kbtp.conformance.iwarp.ddp_messages import segments_in_another_order
from kbtp.conformance.iwarp.faults import too_long
from kbtp.conformance.iwarp.rfc6581 import revision_2_is_understood_or_refused
from kbtp.conformance.iwarp.security import STAGS_AT_LEAST, expect_unpredictable
from kbtp.conformance.kbtp_cases.identity import reopen
from kbtp.conformance.kbtp_cases.quota import whole_pool
from kbtp.conformance.probe import Probe
from kbtp.conformance.target_side import ack_fields
from kbtp.conformance.tcp import Tcp
from kbtp.types import Status
from kbtp.wire import HelloAck
from tests.conformance.conftest import Pair


class ScriptedProbe:
    """A probe for streams on which the peer has said already what it will say."""

    need = staticmethod(Probe.need)

    def __init__(self, *sides: InitiatorSide) -> None:
        self._sides = list(sides)
        self.deadline = sides[0].stream.tcp.deadline

    def before_hello(self) -> InitiatorSide:
        return self._sides.pop(0)

    def tcp(self) -> Tcp:
        return self._sides.pop(0).stream.tcp


def ack(status: Status) -> bytes:
    granted = ack_fields(hello_message()) if status is Status.SUCCESS else {}
    return HelloAck(1, status=status, **granted).pack()


@pytest.mark.parametrize("status", [Status.SUCCESS, Status.MALFORMED])
def test_a_hello_that_was_put_together_wrong(pair: Callable[..., Pair], status: Status) -> None:
    ours, theirs = pair()
    theirs.send(ack(status))
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


@pytest.mark.parametrize("octets", [b"MPA", b""])
def test_half_a_reply_is_a_finding_and_none_is_allowed(pair: Callable[..., Pair], octets: bytes) -> None:
    ours, theirs = pair()
    theirs.tcp.send(octets)
    theirs.tcp.finish()
    probe: Any = ScriptedProbe(InitiatorSide(ours))
    if octets:
        with pytest.raises(Deviation, match="the end of the connection"):
            revision_2_is_understood_or_refused(probe)
    else:
        revision_2_is_understood_or_refused(probe)


def test_a_message_too_long_for_one_segment(pair: Callable[..., Pair]) -> None:
    ours, _ = pair()
    side = InitiatorSide(ours)
    side.ack = HelloAck(1, **{**ack_fields(hello_message()), "max_message": 1 << 17})
    ulpdus = too_long(side)
    assert sum(map(len, ulpdus)) - 18 * len(ulpdus) == (1 << 17) + 1
    side.stream.send_ulpdus(ulpdus[0])


def test_refused_connections_are_closed_until_one_is_accepted(pair: Callable[..., Pair]) -> None:
    pairs = [pair() for _ in range(3)]
    for (_, theirs), status in zip(pairs, (Status.ACCESS_DENIED, Status.ACCESS_DENIED, Status.SUCCESS), strict=True):
        theirs.send(ack(status))
        theirs.tcp.finish()
    sides = [InitiatorSide(ours) for ours, _ in pairs]
    probe: Any = ScriptedProbe(*sides)
    assert reopen(probe) is sides[2]
    assert [side.stream.tcp.socket.fileno() < 0 for side in sides] == [True, True, False]


def test_a_pool_that_others_have_tells_nothing(pair: Callable[..., Pair]) -> None:
    pairs = [pair() for _ in range(2)]
    for (_, theirs), status in zip(pairs, (Status.NO_SPACE, Status.SUCCESS), strict=True):
        theirs.send(ack(status))
    probe: Any = ScriptedProbe(*(InitiatorSide(ours) for ours, _ in pairs))
    with pytest.raises(NotApplicable, match="quota that nobody else has"):
        whole_pool(probe)
