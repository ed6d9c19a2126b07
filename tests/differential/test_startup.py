"""Both MPA start-ups, told the same, answer the same."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kbtp.errors import ApiMisuse
from kbtp.iwarp.mpa import (
    ActiveStartup,
    EnhancedWord,
    MpaFrame,
    MpaOptions,
    MpaRejected,
    MpaStartupError,
    Negotiated,
    PassiveStartup,
    RtrKind,
)

pytestmark = pytest.mark.timeout(600)

DEPTHS = st.sampled_from([0, 1, 2, 300, 0x3FFE, 0x3FFF])
KINDS = st.integers(0, 7)
SIDES = st.fixed_dictionaries(
    {
        "crc": st.booleans(),
        "want_markers": st.booleans(),
        "revision": st.sampled_from([2, 2, 2, 1, 0, 3]),
        "peer_to_peer": KINDS,
        "revision1_depth": DEPTHS,
        "private_data": st.sampled_from([0, 4, 508, 509, 512, 513]).map(lambda size: (b"p" * size).hex()),
        "ird": DEPTHS,
        "ord": DEPTHS,
        "accepts": st.sampled_from([None, True, True, False]),
    }
)


@st.composite
def frames(draw: st.DrawFn) -> bytes:
    """A frame that fits most of the time, with an octet changed some of the time, and what comes behind it."""
    word = EnhancedWord(draw(DEPTHS), draw(DEPTHS), draw(st.booleans()), RtrKind(draw(KINDS)))
    frame = MpaFrame(
        reply=draw(st.booleans()),
        markers=draw(st.booleans()),
        crc=draw(st.booleans()),
        revision=draw(st.sampled_from([2, 2, 1, 1, 0, 3])),
        private_data=draw(st.binary(max_size=8)),
        rejected=draw(st.sampled_from([False, False, True])),
        word=draw(st.none() | st.just(word)),
    )
    octets = bytearray(frame.pack())
    for at in draw(st.lists(st.integers(0, len(octets) - 1), max_size=1)):
        octets[at] ^= draw(st.integers(1, 255))
    return bytes(octets) + draw(st.sampled_from([b"", b"", b"behind"]))


def _told(negotiated: Negotiated) -> dict[str, Any]:
    values = dataclasses.asdict(negotiated)
    values["ord"] = values.pop("ord_")
    values["private_data"] = negotiated.private_data.hex()
    values["failure"] = None if negotiated.failure is None else list(negotiated.failure.value)
    return values


def _active(options: MpaOptions, side: dict[str, Any], pieces: list[bytes]) -> Any:
    startup = ActiveStartup(options, bytes.fromhex(side["private_data"]), side["ird"], side["ord"])
    outcome: Any = None
    for piece in pieces:
        try:
            answer = startup.receive_data(piece)
        except MpaStartupError as error:
            outcome = {"error": str(error)}
            break
        if isinstance(answer, MpaRejected):
            outcome = [answer.private_data.hex(), answer.peer_ird, answer.peer_ord]
            break
        if answer is not None:
            outcome = _told(answer)
            break
    return {"request": startup.request.hex(), "outcome": outcome, "surplus": startup.surplus.hex()}


def _passive(options: MpaOptions, side: dict[str, Any], pieces: list[bytes]) -> Any:
    startup = PassiveStartup(options)
    for piece in pieces:
        try:
            request = startup.receive_data(piece)
        except MpaStartupError as error:
            return {"error": str(error)}
        if request is None:
            continue
        told = [getattr(request, field.name) for field in dataclasses.fields(request)]
        return {"request": [request.private_data.hex(), *told[1:]], "answer": _answer(startup, side)}
    return None


def _answer(startup: PassiveStartup, side: dict[str, Any]) -> Any:
    private_data = bytes.fromhex(side["private_data"])
    try:
        if side["accepts"]:
            reply, negotiated = startup.accept(private_data, side["ird"], side["ord"])
            return {"reply": reply.hex(), "negotiated": _told(negotiated)}
        return {"reply": startup.reject(private_data, ird=side["ird"], ord_=side["ord"]).hex()}
    except ApiMisuse:
        return "misuse"


@settings(max_examples=400, deadline=None)
@given(side=SIDES, octets=frames(), cuts=st.lists(st.integers(1, 60), max_size=3))
def test_startups_settle_the_same(native_stack: Any, side: dict[str, Any], octets: bytes, cuts: list[int]) -> None:
    pieces = []
    for cut in cuts:
        pieces.append(octets[:cut])
        octets = octets[cut:]
    pieces.append(octets)
    try:
        options = MpaOptions(
            crc=side["crc"],
            want_markers=side["want_markers"],
            revision=side["revision"],
            peer_to_peer=RtrKind(side["peer_to_peer"]),
            revision1_depth=side["revision1_depth"],
        )
        ours = _active(options, side, pieces) if side["accepts"] is None else _passive(options, side, pieces)
    except ApiMisuse:
        ours = "misuse"

    theirs = native_stack.ask("startup", **side, pieces=[piece.hex() for piece in pieces])
    assert _without_quotation(ours) == _without_quotation(theirs)


def _without_quotation(outcome: Any) -> Any:
    """Languages quote octets each in its own way."""
    if isinstance(outcome, dict):
        return {name: _without_quotation(value) for name, value in outcome.items()}
    return outcome.partition(" was due, ")[0] if isinstance(outcome, str) else outcome
