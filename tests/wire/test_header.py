"""The common header, the descriptors, and the checks that stand before all others (draft 5.1, 5.2, profile 1)."""

from __future__ import annotations

import pytest

from kbtp import limits
from kbtp.errors import ApiMisuse, WireFormatError
from kbtp.types import Opcode, RequestFlag, Status
from kbtp.wire import (
    CommonHeader,
    Completion,
    CompletionDescriptor,
    CompletionRecord,
    DataDescriptor,
    parse_request,
    parse_response,
)
from kbtp.wire import layouts as layout_table
from kbtp.wire.layouts import Layout

# Profile 1's table of opcodes, its last column.
FLAGS_OF = {
    Opcode.HELLO: set(),
    Opcode.HELLO_ACK: {0x0001},
    Opcode.LOAD: {0x0004, 0x0008, 0x0010},
    Opcode.STORE: {0x0001, 0x0002, 0x0004, 0x0008},
    Opcode.ALLOC_STORE: {0x0001, 0x0002, 0x0004, 0x0008},
    Opcode.FREE: {0x0004},
    Opcode.BIND: {0x0002, 0x0004},
    Opcode.COMPLETION: set(),
}
REQUESTS = set(Opcode) - {Opcode.HELLO_ACK, Opcode.COMPLETION}


def test_each_layout_has_the_size_its_section_gives() -> None:
    sizes = {
        "HEADER": limits.COMMON_HEADER_BYTES,
        "DATA_DESCRIPTOR": limits.DATA_DESCRIPTOR_BYTES,
        "COMPLETION_DESCRIPTOR": limits.COMPLETION_DESCRIPTOR_BYTES,
        "BIND_BODY": 40 - limits.COMMON_HEADER_BYTES,
        "COMPLETION_BODY": limits.COMPLETION_BYTES - limits.COMMON_HEADER_BYTES,
        "HELLO_BODY": limits.HELLO_FIXED_BYTES - limits.COMMON_HEADER_BYTES,
        "HELLO_ACK_BODY": limits.HELLO_ACK_FIXED_BYTES - limits.COMMON_HEADER_BYTES,
        "OPTION_HEADER": limits.OPTION_HEADER_BYTES,
        "AUTH_VALUE": limits.AUTH_VALUE_BYTES,
        "COMPLETION_RECORD": limits.COMPLETION_RECORD_BYTES,
        "TABLE_ENTRY": limits.ENTRY_BYTES,
        "RING_SLOT": limits.SLOT_BYTES,
        "CONNECTION_DATA": limits.CONNECTION_DATA_BYTES,
    }
    layouts = {name: value for name, value in vars(layout_table).items() if isinstance(value, Layout)}
    assert {name: layout.size_bytes for name, layout in layouts.items()} == sizes


@pytest.mark.parametrize("opcode", sorted(REQUESTS))
@pytest.mark.parametrize("bit", [1 << n for n in range(16)])
def test_each_flag_of_a_request_is_allowed_or_unsupported_as_its_row_says(opcode: Opcode, bit: int) -> None:
    with pytest.raises(WireFormatError) as refusal:
        parse_request(CommonHeader(opcode, bit, 1, 2, 3, 0).pack())

    # With an allowed flag it is the body that is missed; FREE has one only with RECORD, the one flag it allows.
    found = (refusal.value.field, refusal.value.status)
    assert found == (("message", Status.MALFORMED) if bit in FLAGS_OF[opcode] else ("flags", Status.UNSUPPORTED))


@pytest.mark.parametrize("opcode", [Opcode.HELLO_ACK, Opcode.COMPLETION])
@pytest.mark.parametrize("bit", [1 << n for n in range(16)])
def test_each_flag_of_a_response_is_allowed_or_unsupported_as_its_row_says(opcode: Opcode, bit: int) -> None:
    with pytest.raises(WireFormatError) as refusal:
        parse_response(CommonHeader(opcode, bit, 1, 2, 3, 0).pack())

    assert refusal.value.field == ("message" if bit in FLAGS_OF[opcode] else "flags")


@pytest.mark.parametrize("opcode", range(256))
def test_what_opcodes_come_from_which_side(opcode: int) -> None:
    message = CommonHeader(opcode, 0xFFFF, 1, 2, 3, 0).pack()

    for parse, spoken in ((parse_request, REQUESTS), (parse_response, set(Opcode) - REQUESTS)):
        with pytest.raises(WireFormatError) as refusal:
            parse(message)
        assert refusal.value.status is Status.UNSUPPORTED
        assert refusal.value.field == ("flags" if opcode in spoken else "opcode")


def test_the_header_is_parsed_without_being_judged() -> None:
    header = CommonHeader.parse(bytes(range(0xE0, 0x100)))

    assert header == CommonHeader(
        version=0xE0,
        opcode=0xE1,
        flags=0xE2E3,
        request_id=0xE4E5E6E7E8E9EAEB,
        handle=0xECEDEEEFF0F1F2F3,
        generation=0xF4F5,
        status=0xF6F7,
    )


@pytest.mark.parametrize("length", range(24))
def test_fewer_than_24_octets_are_no_header(length: int) -> None:
    with pytest.raises(WireFormatError, match=r"^message: .* 24 octets, only \d+ are there") as refusal:
        CommonHeader.parse(bytes(length))
    assert refusal.value.field == "message"


@pytest.mark.parametrize("length", range(16))
def test_fewer_than_16_octets_are_no_descriptor(length: int) -> None:
    with pytest.raises(WireFormatError, match=r"^data: "):
        DataDescriptor.parse(bytes(length))
    with pytest.raises(WireFormatError, match=r"^completion: "):
        CompletionDescriptor.parse(bytes(length))


def test_descriptors_take_the_first_16_octets() -> None:
    octets = bytes(range(0x10, 0x30))

    data = DataDescriptor.parse(octets)
    completion = CompletionDescriptor.parse(octets)

    assert data == DataDescriptor(stag=0x10111213, to=0x1415161718191A1B, length=0x1C1D1E1F)
    assert data.pack() == octets[:16]
    assert completion == CompletionDescriptor(stag=0x10111213, to=0x1415161718191A1B)
    assert completion.pack() == octets[:12] + bytes(4)


@pytest.mark.parametrize(
    ("field", "bits"),
    [
        ("version", 8),
        ("opcode", 8),
        ("flags", 16),
        ("request_id", 64),
        ("handle", 64),
        ("generation", 16),
        ("status", 16),
    ],
)
@pytest.mark.parametrize("beyond", [-1, 0, 1 << 70])
def test_a_value_that_does_not_fit_the_header_is_misuse(field: str, bits: int, beyond: int) -> None:
    values = {"opcode": 3, "flags": 0, "request_id": 1, "handle": 2, "generation": 3, "status": 0}

    with pytest.raises(ApiMisuse, match=rf"^{field}: .* {bits} bits$"):
        CommonHeader(**{**values, field: beyond or 1 << bits}).pack()


@pytest.mark.parametrize("value", [None, 1.0, "1", b"1"])
def test_a_value_that_is_no_integer_is_misuse(value: object) -> None:
    with pytest.raises(ApiMisuse, match=r"^stag: "):
        DataDescriptor(value, 0, 0).pack()  # type: ignore[arg-type]


@pytest.mark.parametrize("status", [16, 0xFFFF])
def test_a_number_that_is_no_status_is_misuse(status: int) -> None:
    with pytest.raises(ApiMisuse, match=r"^status: \d+ is not a KBTP status"):
        Completion(1, 2, 3, status).pack()  # type: ignore[arg-type]
    with pytest.raises(ApiMisuse, match=r"^status: \d+ is not a KBTP status"):
        CompletionRecord(1, status, 3).pack()  # type: ignore[arg-type]


def test_an_error_says_which_field_and_why() -> None:
    with pytest.raises(WireFormatError) as refusal:
        parse_request(CommonHeader(Opcode.LOAD, RequestFlag.SEAL, 1, 2, 3, 0).pack())

    assert str(refusal.value) == "flags: 0x0002 is not allowed with LOAD"
