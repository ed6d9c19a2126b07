"""LOAD, STORE, ALLOC_STORE, FREE and BIND (draft 5 and 6, profile 2)."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from kbtp.errors import ApiMisuse, WireFormatError
from kbtp.types import RequestFlag, Status
from kbtp.wire import (
    AllocStore,
    Bind,
    CommonHeader,
    CompletionDescriptor,
    DataDescriptor,
    Free,
    Load,
    Request,
    Store,
    parse_request,
)

RECORD, INLINE, INVALIDATE, SEAL = (
    RequestFlag.RECORD,
    RequestFlag.INLINE,
    RequestFlag.INVALIDATE,
    RequestFlag.SEAL,
)
DATA = DataDescriptor(stag=0x11, to=0x22, length=0x33)
SLOT = CompletionDescriptor(stag=0x44, to=0x55)
STORING = [Store, AllocStore]

# One of each, without and with RECORD, and the octets of each before inline data.
MAKERS: list[tuple[Callable[[RequestFlag, CompletionDescriptor | None], Request], int]] = [
    (lambda flags, slot: Load(1, 2, 3, flags, DATA, slot), 40),
    (lambda flags, slot: Store(1, 2, 3, flags, DATA, slot), 40),
    (lambda flags, slot: AllocStore(1, 2, 3, flags, DATA, slot), 40),
    (lambda flags, slot: Free(1, 2, 3, flags, slot), 24),
    (lambda flags, slot: Bind(1, 2, 3, flags, 4, 5, 6, slot), 40),
]
OF_EACH = pytest.mark.parametrize(("make", "size_bytes"), MAKERS, ids=["LOAD", "STORE", "ALLOC_STORE", "FREE", "BIND"])


@OF_EACH
def test_with_record_16_octets_more(make: Callable[..., Request], size_bytes: int) -> None:
    plain, with_record = make(RequestFlag.NONE, None), make(RECORD, SLOT)

    assert len(plain.pack()) == size_bytes
    assert len(with_record.pack()) == size_bytes + 16
    assert parse_request(plain.pack()) == plain
    assert parse_request(with_record.pack()) == with_record


@OF_EACH
def test_record_and_its_descriptor_come_together(make: Callable[..., Request], size_bytes: int) -> None:
    for request in (make(RECORD, None), make(RequestFlag.NONE, SLOT)):
        with pytest.raises(ApiMisuse, match=r"^completion: "):
            request.pack()


@OF_EACH
def test_a_message_cut_anywhere_is_malformed(make: Callable[..., Request], size_bytes: int) -> None:
    for request in (make(RequestFlag.NONE, None), make(RECORD, SLOT)):
        message = request.pack()
        for length in range(len(message)):
            with pytest.raises(WireFormatError) as refusal:
                parse_request(message[:length])
            assert (refusal.value.field, refusal.value.status) == ("message", Status.MALFORMED)


@OF_EACH
def test_octets_after_a_message_are_malformed(make: Callable[..., Request], size_bytes: int) -> None:
    for request in (make(RequestFlag.NONE, None), make(RECORD, SLOT)):
        for extra in (1, 16, 1000):
            with pytest.raises(WireFormatError, match=rf"^message: {extra} octets follow") as refusal:
                parse_request(request.pack() + bytes(extra))
            assert refusal.value.status is Status.MALFORMED


@OF_EACH
def test_a_flag_of_another_opcode_is_misuse(make: Callable[..., Request], size_bytes: int) -> None:
    with pytest.raises(ApiMisuse, match=r"^flags: 0x8000 is not allowed with "):
        make(RequestFlag(0x8000), None).pack()


@OF_EACH
def test_parse_of_a_class_takes_its_own_opcode_only(make: Callable[..., Request], size_bytes: int) -> None:
    request = make(RequestFlag.NONE, None)

    assert type(request).parse(request.pack()) == request
    for other in (Load, Store, AllocStore, Free, Bind):
        if type(request) is not other:
            with pytest.raises(WireFormatError) as refusal:
                other.parse(request.pack())
            assert (refusal.value.field, refusal.value.status) == ("opcode", Status.UNSUPPORTED)


@OF_EACH
def test_the_status_of_a_request_is_ignored(make: Callable[..., Request], size_bytes: int) -> None:
    message = bytearray(make(RequestFlag.NONE, None).pack())
    message[22:24] = b"\xff\xff"

    assert parse_request(message) == make(RequestFlag.NONE, None)


@pytest.mark.parametrize("storing", STORING)
def test_inline_data_is_a_view_into_the_message(storing: type[Store] | type[AllocStore]) -> None:
    sent = storing(1, 2, 3, INLINE, DataDescriptor(0, 0, 4), inline_data=b"data")
    received = bytearray(sent.pack())

    request = storing.parse(received)

    assert request == sent
    assert isinstance(request.inline_data, memoryview)
    assert request.inline_data.obj is received
    received[40:] = b"DATA"
    assert request.inline_data == b"DATA"


@pytest.mark.parametrize("storing", STORING)
def test_inline_data_follows_the_completion_descriptor(storing: type[Store] | type[AllocStore]) -> None:
    sent = storing(1, 2, 3, INLINE | RECORD, DataDescriptor(0, 0, 4), SLOT, memoryview(b"data"))

    assert sent.pack()[56:] == b"data"
    assert parse_request(sent.pack()) == sent


@pytest.mark.parametrize("storing", STORING)
@pytest.mark.parametrize("length", [0, 3, 5, 0xFFFF_FFFF])
def test_a_length_that_is_not_the_inline_data_s_is_for_the_session(
    storing: type[Store] | type[AllocStore], length: int
) -> None:
    sent = storing(1, 2, 3, INLINE, DataDescriptor(0, 0, length), inline_data=b"data")

    received = parse_request(sent.pack())

    assert received == sent


@pytest.mark.parametrize("storing", STORING)
def test_inline_data_needs_the_flag(storing: type[Store] | type[AllocStore]) -> None:
    with pytest.raises(ApiMisuse, match=r"^inline_data: "):
        storing(1, 2, 3, RequestFlag.NONE, DATA, inline_data=b"x").pack()


@pytest.mark.parametrize("storing", STORING)
@pytest.mark.parametrize("data", [DataDescriptor(1, 0, 0), DataDescriptor(0, 1, 0)])
def test_inline_goes_without_stag_and_tagged_offset(
    storing: type[Store] | type[AllocStore], data: DataDescriptor
) -> None:
    with pytest.raises(ApiMisuse, match=r"^data: "):
        storing(1, 2, 3, INLINE, data).pack()


@pytest.mark.parametrize("request_type", [Load, Store, AllocStore])
def test_invalidate_goes_with_neither_inline_nor_record(request_type: type[Load] | type[Store]) -> None:
    assert parse_request(request_type(1, 2, 3, INVALIDATE, DATA).pack()) == request_type(1, 2, 3, INVALIDATE, DATA)

    with pytest.raises(ApiMisuse, match=r"^flags: INVALIDATE"):
        request_type(1, 2, 3, INVALIDATE | RECORD, DATA, SLOT).pack()
    # Whether or not the Completion Descriptor is there: UNSUPPORTED stands before MALFORMED (profile 1).
    header = CommonHeader(request_type.OPCODE, INVALIDATE | RECORD, 1, 2, 3, 0).pack()
    for body in (b"", DATA.pack(), DATA.pack() + SLOT.pack()):
        with pytest.raises(WireFormatError) as refusal:
            parse_request(header + body)
        assert (refusal.value.field, refusal.value.status) == ("flags", Status.UNSUPPORTED)


def test_store_and_alloc_store_differ_though_their_fields_do_not() -> None:
    store, alloc_store = Store(1, 2, 3, SEAL, DATA), AllocStore(1, 2, 3, SEAL, DATA)

    assert store != alloc_store
    assert not isinstance(alloc_store, Store)
    assert store.pack()[1] == 4
    assert alloc_store.pack()[1] == 5
    assert store.pack()[2:] == alloc_store.pack()[2:]


@pytest.mark.parametrize(
    ("field", "request_"),
    [
        ("request_id", Load(1 << 64, 2, 3, RequestFlag.NONE, DATA)),
        ("handle", Free(1, -1, 3, RequestFlag.NONE)),
        ("generation", Store(1, 2, 0x10000, RequestFlag.NONE, DATA)),
        ("flags", Store(1, 2, 3, 0x10000, DATA)),  # type: ignore[arg-type]
        ("flags", Store(1, 2, 3, -1, DATA)),  # type: ignore[arg-type]
        ("stag", Load(1, 2, 3, RequestFlag.NONE, DataDescriptor(1 << 32, 0, 0))),
        ("to", AllocStore(1, 2, 3, RequestFlag.NONE, DataDescriptor(0, 1 << 64, 0))),
        ("length", Load(1, 2, 3, RequestFlag.NONE, DataDescriptor(0, 0, 1 << 32))),
        ("stag", Load(1, 2, 3, RECORD, DATA, CompletionDescriptor(-1, 0))),
        ("to", Free(1, 2, 3, RECORD, CompletionDescriptor(0, -1))),
        ("ticket", Bind(1, 2, 3, RequestFlag.NONE, 1 << 32, 5, 6)),
        ("data_length", Bind(1, 2, 3, RequestFlag.NONE, 4, 1 << 32, 6)),
        ("block_offset", Bind(1, 2, 3, RequestFlag.NONE, 4, 5, 1 << 64)),
    ],
)
def test_a_value_that_does_not_fit_is_misuse(field: str, request_: Request) -> None:
    with pytest.raises(ApiMisuse, match=rf"^{field}: "):
        request_.pack()
