"""Completion records at the initiator (draft 6.5, profile 7): who asks for them, and which request one ends."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from kbtp.errors import PeerMisbehaved
from kbtp.initiator.batches import Batch
from kbtp.initiator.operations import Operation
from kbtp.initiator.session import InitiatorConfig, InitiatorSession
from kbtp.rnic import open_rnic
from kbtp.types import Feature, Opcode, RequestFlag, Status
from kbtp.wire import CompletionDescriptor, CompletionRecord, Free, HelloAck, parse_request

RDMAP = open_rnic("reference").capabilities
INFINIBAND = replace(RDMAP, write_with_immediate=True, invalidated_by_peers=False)
SLOT = CompletionDescriptor(7, 48)
FIRST_HANDLE = 5000


@pytest.mark.parametrize(
    ("records", "capabilities", "asked"),
    [
        (True, INFINIBAND, Feature.RECORD_COMPLETION),
        (False, INFINIBAND, Feature.NONE),
        (True, RDMAP, Feature.INVALIDATE),
        (True, replace(INFINIBAND, ordered_placement=False), Feature.NONE),
    ],
)
def test_records_are_asked_for_where_the_rnic_can(records: bool, capabilities: Any, asked: Feature) -> None:
    assert InitiatorConfig(records=records).features(capabilities, 4) == asked


def session() -> InitiatorSession:
    ack = HelloAck(
        0,
        granted_features=Feature.RECORD_COMPLETION,
        request_credits=2,
        max_message=1024,
        allocation_quota=4,
        first_handle=FIRST_HANDLE,
        handle_count=3,
    )
    return InitiatorSession(InitiatorConfig(records=True), ack)


def sent(one: InitiatorSession) -> Operation:
    (operation,) = Batch(Opcode.FREE, RequestFlag.NONE, (FIRST_HANDLE,), None, 0).operations()
    one.submit(operation)
    assert one.ready() is operation
    message = one.request(operation, stag=0, to=0, length=0, inline=None, record=SLOT)
    request = parse_request(memoryview(message))
    assert isinstance(request, Free) and request.completion == SLOT and request.flags is RequestFlag.RECORD
    return operation


def test_a_record_ends_the_request_whose_id_it_has() -> None:
    one = session()
    operation = sent(one)
    assert one.outstanding_with(operation.request_id & 0xFFFF_FFFF) is operation
    record = CompletionRecord(operation.request_id, Status.GENERATION_MISMATCH, 9)
    assert one.recorded(operation, record.pack()) is operation
    result = operation.result
    assert result is not None and (result.status, result.handle, result.generation) == (
        Status.GENERATION_MISMATCH, FIRST_HANDLE, 9,
    )  # fmt: skip
    assert not one.outstanding


def test_inline_data_leaves_room_for_the_completion_descriptor() -> None:
    assert session().inline_max_bytes == 1024 - 56  # profile 3


@pytest.mark.parametrize("change", ["another request", "an unknown status", "nobody's immediate"])
def test_a_record_that_fits_nothing_is_misbehaviour(change: str) -> None:
    one = session()
    operation = sent(one)
    octets = bytearray(CompletionRecord(operation.request_id, Status.SUCCESS, 1).pack())
    if change == "another request":
        octets[0] ^= 1
    elif change == "an unknown status":
        octets[8] = 0x77
    with pytest.raises(PeerMisbehaved):
        if change == "nobody's immediate":
            one.outstanding_with(operation.request_id + 1)
        else:
            one.recorded(operation, bytes(octets))
    assert one.outstanding == 1
