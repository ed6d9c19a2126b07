"""COMPLETION and the completion record (draft 6.5, profile 2)."""

from __future__ import annotations

import pytest

from kbtp.errors import ApiMisuse, WireFormatError
from kbtp.types import Opcode, Status
from kbtp.wire import CommonHeader, Completion, CompletionRecord, parse_response

COMPLETION = Completion(1, 2, 3, Status.SUCCESS, data_length=4, block_offset=5)
RECORD = CompletionRecord(1, Status.SUCCESS, 3, data_length=4, block_offset=5)


@pytest.mark.parametrize("status", Status)
def test_each_status_round_trips(status: Status) -> None:
    completion, record = Completion(1, 2, 3, status), CompletionRecord(1, status, 3)

    assert parse_response(completion.pack()) == Completion.parse(completion.pack()) == completion
    assert CompletionRecord.parse(record.pack()) == record


@pytest.mark.parametrize("length", [*range(40), 41, 56, 1024])
def test_completion_has_exactly_40_octets(length: int) -> None:
    with pytest.raises(WireFormatError) as refusal:
        parse_response((COMPLETION.pack() + bytes(1024))[:length])
    assert (refusal.value.field, refusal.value.status) == ("message", Status.MALFORMED)


@pytest.mark.parametrize("length", [*range(24), 25, 40])
def test_a_completion_record_has_exactly_24_octets(length: int) -> None:
    with pytest.raises(WireFormatError, match=r"^record: "):
        CompletionRecord.parse((RECORD.pack() + bytes(40))[:length])


def test_completion_in_the_order_of_checks() -> None:
    def field_at_fault(**header: int) -> str:
        values = {"opcode": Opcode.COMPLETION, "flags": 0, "status": 16, "version": 1} | header
        with pytest.raises(WireFormatError) as refusal:
            parse_response(CommonHeader(request_id=1, handle=2, generation=3, **values).pack() + bytes(16))
        return refusal.value.field

    assert field_at_fault(version=2, opcode=Opcode.LOAD, flags=1) == "version"
    assert field_at_fault(opcode=Opcode.LOAD, flags=1) == "opcode"
    assert field_at_fault(flags=1) == "flags"
    assert field_at_fault() == "status"


def test_completion_parse_takes_no_other_opcode() -> None:
    with pytest.raises(WireFormatError, match=r"^opcode: "):
        Completion.parse(CommonHeader(Opcode.HELLO_ACK, 0, 1, 2, 3, 0).pack() + bytes(16))


@pytest.mark.parametrize("status", [16, 0xFFFF])
def test_an_unknown_status_of_a_record(status: int) -> None:
    with pytest.raises(WireFormatError, match=rf"^status: {status} is not a KBTP status"):
        CompletionRecord.parse(RECORD.pack()[:8] + status.to_bytes(2, "big") + RECORD.pack()[10:])


@pytest.mark.parametrize(
    ("field", "message"),
    [
        ("request_id", Completion(1 << 64, 2, 3, Status.SUCCESS)),
        ("handle", Completion(1, -1, 3, Status.SUCCESS)),
        ("generation", Completion(1, 2, 1 << 16, Status.SUCCESS)),
        ("data_length", Completion(1, 2, 3, Status.SUCCESS, 1 << 32)),
        ("block_offset", Completion(1, 2, 3, Status.SUCCESS, 0, 1 << 64)),
        ("request_id", CompletionRecord(-1, Status.SUCCESS, 3)),
        ("generation", CompletionRecord(1, Status.SUCCESS, 1 << 16)),
        ("data_length", CompletionRecord(1, Status.SUCCESS, 3, -1)),
        ("block_offset", CompletionRecord(1, Status.SUCCESS, 3, 0, -1)),
    ],
)
def test_a_value_that_does_not_fit_is_misuse(field: str, message: Completion | CompletionRecord) -> None:
    with pytest.raises(ApiMisuse, match=rf"^{field}: "):
        message.pack()
