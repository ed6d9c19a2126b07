"""What holds for every message: it comes back as it was packed, and no octets raise anything but WireFormatError."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields, replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kbtp.errors import ApiMisuse, WireFormatError
from kbtp.types import Feature, HelloAckFlag, Opcode, RequestFlag, Status
from kbtp.wire import (
    AllocStore,
    Auth,
    Bind,
    CommonHeader,
    Completion,
    CompletionDescriptor,
    CompletionRecord,
    ConnectionData,
    DataDescriptor,
    Free,
    Hello,
    HelloAck,
    Load,
    Store,
    parse_request,
    parse_response,
    with_zero_mac,
)


def unsigned(bits: int) -> st.SearchStrategy[int]:
    edges = st.sampled_from([0, 1, (1 << (bits - 1)) - 1, 1 << (bits - 1), (1 << bits) - 1])
    return st.one_of(edges, st.integers(0, (1 << bits) - 1))


U16, U32, U64 = unsigned(16), unsigned(32), unsigned(64)
STATUS = st.sampled_from(Status)
DATA = st.builds(DataDescriptor, U32, U64, U32)
SLOT = st.builds(CompletionDescriptor, U32, U64)
NAME = st.none() | st.text(max_size=255).filter(lambda name: len(name.encode("utf-8")) <= 255)
NAMESPACE = st.none() | st.binary(max_size=255)
AUTH = st.none() | st.builds(Auth, U32, st.binary(min_size=32, max_size=32))
FEATURES = st.integers(0, 0x1F).map(Feature)


@st.composite
def transfers(draw: st.DrawFn, request: type[Load] | type[Store] | type[AllocStore]) -> Load | Store | AllocStore:
    allowed = [RequestFlag.ALLOW_UNSEALED] if request is Load else [RequestFlag.SEAL, RequestFlag.INLINE]
    flags = sum(draw(st.sets(st.sampled_from([*allowed, RequestFlag.RECORD]))), start=RequestFlag.NONE)
    if not flags & (RequestFlag.INLINE | RequestFlag.RECORD) and draw(st.booleans()):
        flags |= RequestFlag.INVALIDATE
    completion = draw(SLOT) if flags & RequestFlag.RECORD else None
    header = (draw(U64), draw(U64), draw(U16), RequestFlag(flags))
    if flags & RequestFlag.INLINE:
        return request(*header, DataDescriptor(0, 0, draw(U32)), completion, draw(st.binary(max_size=200)))
    return request(*header, draw(DATA), completion)


def recorded(request: Callable[..., Any], flags: RequestFlag, *body: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    """FREE or BIND without and with RECORD."""
    return st.one_of(
        st.builds(request, U64, U64, U16, st.just(flags), *body),
        st.builds(request, U64, U64, U16, st.just(flags | RequestFlag.RECORD), *body, SLOT),
    )


HELLOS = st.builds(
    Hello,
    U64,
    FEATURES,
    U32,
    U64,
    completion_credits=st.integers(1, 0xFFFF_FFFF),
    max_message=st.integers(1024, 0xFFFF_FFFF),
    initiator_id=st.binary(min_size=16, max_size=16),
    name=NAME,
    namespace=NAMESPACE,
    auth=AUTH,
)
WIDTH_8 = {"ring_order", "counter_byte_order"}
WIDTH_64 = {
    "incarnation",
    "first_handle",
    "handle_count",
    "table_base_handle",
    "table_handles",
    "table_offset",
    "ring_offset",
    "head_offset",
    "pool_base",
}
NOT_PLAIN = {"request_id", "status", "flags", "granted_features", "name", "namespace", "auth"}
ACK_WIDTHS = {
    field.name: 8 if field.name in WIDTH_8 else 64 if field.name in WIDTH_64 else 32
    for field in fields(HelloAck)
    if field.name not in NOT_PLAIN
}
HELLO_ACKS = st.builds(
    HelloAck,
    U64,
    flags=st.sampled_from([HelloAckFlag.NONE, HelloAckFlag.RESUMED]),
    granted_features=FEATURES,
    name=NAME,
    namespace=NAMESPACE,
    auth=AUTH,
    **{name: unsigned(bits) for name, bits in ACK_WIDTHS.items()}
    | {"request_credits": st.integers(1, 0xFFFF_FFFF), "max_message": st.integers(1024, 0xFFFF_FFFF)},
)
REFUSALS = st.builds(HelloAck, U64, status=st.sampled_from(list(Status)[1:]), name=NAME, namespace=NAMESPACE, auth=AUTH)
REQUESTS = st.one_of(
    transfers(Load),
    transfers(Store),
    transfers(AllocStore),
    recorded(Free, RequestFlag.NONE),
    recorded(Bind, RequestFlag.NONE, U32, U32, U64),
    recorded(Bind, RequestFlag.SEAL, U32, U32, U64),
    HELLOS,
)
RESPONSES = st.one_of(st.builds(Completion, U64, U64, U16, STATUS, U32, U64), HELLO_ACKS, REFUSALS)
RECORDS = st.builds(CompletionRecord, U64, STATUS, U16, U32, U64)
HEADERS = st.builds(CommonHeader, unsigned(8), U16, U64, U64, U16, U16, unsigned(8))

PARSERS = [
    parse_request,
    parse_response,
    with_zero_mac,
    CommonHeader.parse,
    DataDescriptor.parse,
    CompletionDescriptor.parse,
    Hello.parse,
    HelloAck.parse,
    Load.parse,
    Store.parse,
    AllocStore.parse,
    Free.parse,
    Bind.parse,
    Completion.parse,
    CompletionRecord.parse,
    ConnectionData.parse,
]


def parse_with_all(octets: bytes) -> None:
    """Lets everything but WireFormatError out."""
    for parse in PARSERS:
        for form in (octets, bytearray(octets), memoryview(octets)):
            try:
                parsed = parse(form)
            except WireFormatError as refusal:
                assert refusal.field
                assert refusal.reason
                assert refusal.status in (Status.MALFORMED, Status.UNSUPPORTED)
                continue
            # What was ignored in parsing never keeps a message from being packed again, nor from being read the same.
            if not isinstance(parsed, bytes) and not getattr(parsed, "unknown_options", ()):
                assert type(parsed).parse(parsed.pack()) == parsed


@given(REQUESTS)
def test_a_request_comes_back_as_it_was_packed(request_: Any) -> None:
    packed = request_.pack()

    assert parse_request(packed) == request_
    assert type(request_).parse(bytearray(packed)) == request_


@given(RESPONSES)
def test_a_response_comes_back_as_it_was_packed(response: Any) -> None:
    packed = response.pack()

    assert parse_response(packed) == response
    assert type(response).parse(memoryview(packed)) == response


@given(st.one_of(HEADERS, DATA, SLOT, RECORDS))
def test_a_part_comes_back_as_it_was_packed(part: Any) -> None:
    assert type(part).parse(part.pack()) == part


@given(st.binary(max_size=1100))
def test_any_octets_raise_nothing_but_the_one_error(octets: bytes) -> None:
    parse_with_all(octets)


@given(opcode=st.sampled_from(Opcode), flags=st.sampled_from([0, 1, 2, 4, 5, 8, 0x10]), body=st.binary(max_size=400))
def test_any_body_raises_nothing_but_the_one_error(opcode: Opcode, flags: int, body: bytes) -> None:
    parse_with_all(bytes([1, opcode, 0, flags]) + bytes(20) + body)


@given(
    message=st.one_of(HELLOS, HELLO_ACKS),
    options=st.lists(
        st.tuples(st.sampled_from([0, 1, 2, 3, 4, 0x7FFF, 0x8000, 0xFFFF]), st.binary(max_size=40)), max_size=6
    ),
)
def test_any_options_raise_nothing_but_the_one_error(
    message: Hello | HelloAck, options: list[tuple[int, bytes]]
) -> None:
    octets = replace(message, name=None, namespace=None, auth=None).pack()
    for option_type, value in options:
        octets += option_type.to_bytes(2, "big") + len(value).to_bytes(2, "big") + value + bytes(-len(value) % 4)

    parse_with_all(octets)


@given(message=st.one_of(REQUESTS, RESPONSES, RECORDS), data=st.data())
def test_a_changed_message_raises_nothing_but_the_one_error(message: Any, data: st.DataObject) -> None:
    octets = bytearray(message.pack())
    places = st.one_of(st.integers(0, 3), st.integers(0, len(octets) - 1))
    for at in data.draw(st.lists(places, min_size=1, max_size=4)):
        octets[at] = data.draw(st.integers(0, 255))

    parse_with_all(bytes(octets))


@given(message=st.one_of(REQUESTS, RESPONSES), data=st.data())
def test_a_message_with_octets_cut_out_or_put_in_raises_nothing_but_the_one_error(
    message: Any, data: st.DataObject
) -> None:
    octets = message.pack()
    start = data.draw(st.integers(0, len(octets)))
    end = data.draw(st.integers(start, len(octets)))

    parse_with_all(octets[:start] + data.draw(st.binary(max_size=8)) + octets[end:])


@given(st.one_of(REQUESTS, RESPONSES))
def test_a_message_cut_at_any_octet_raises_nothing_but_the_one_error(message: Any) -> None:
    octets = message.pack()
    parse = parse_request if type(message) not in (Completion, HelloAck) else parse_response
    for length in range(len(octets)):
        try:
            parsed = parse(octets[:length])
        except WireFormatError as refusal:
            assert refusal.status is Status.MALFORMED
            continue
        # Only these are told their end by the Send that carries them.
        assert isinstance(parsed, Hello | HelloAck | Store | AllocStore)


WIDTHS: dict[type, dict[str, int]] = {
    CommonHeader: {
        "opcode": 8,
        "flags": 16,
        "request_id": 64,
        "handle": 64,
        "generation": 16,
        "status": 16,
        "version": 8,
    },
    DataDescriptor: {"stag": 32, "to": 64, "length": 32},
    CompletionDescriptor: {"stag": 32, "to": 64},
    Load: {"request_id": 64, "handle": 64, "generation": 16, "flags": 16},
    Store: {"request_id": 64, "handle": 64, "generation": 16, "flags": 16},
    AllocStore: {"request_id": 64, "handle": 64, "generation": 16, "flags": 16},
    Free: {"request_id": 64, "handle": 64, "generation": 16, "flags": 16},
    Bind: {
        "request_id": 64,
        "handle": 64,
        "generation": 16,
        "flags": 16,
        "ticket": 32,
        "data_length": 32,
        "block_offset": 64,
    },
    Completion: {
        "request_id": 64,
        "handle": 64,
        "generation": 16,
        "status": 16,
        "data_length": 32,
        "block_offset": 64,
    },
    CompletionRecord: {"request_id": 64, "status": 16, "generation": 16, "data_length": 32, "block_offset": 64},
    Hello: {
        "request_id": 64,
        "requested_features": 32,
        "requested_quota": 32,
        "requested_handles": 64,
        "completion_credits": 32,
        "max_message": 32,
    },
    HelloAck: {"request_id": 64, "status": 16, "flags": 16, "granted_features": 32, **ACK_WIDTHS},
}
STRATEGIES: dict[type, st.SearchStrategy[Any]] = {
    CommonHeader: HEADERS,
    DataDescriptor: DATA,
    CompletionDescriptor: SLOT,
    Load: transfers(Load),
    Store: transfers(Store),
    AllocStore: transfers(AllocStore),
    Free: recorded(Free, RequestFlag.NONE),
    Bind: recorded(Bind, RequestFlag.SEAL, U32, U32, U64),
    Completion: st.builds(Completion, U64, U64, U16, STATUS, U32, U64),
    CompletionRecord: RECORDS,
    Hello: HELLOS,
    HelloAck: HELLO_ACKS,
}


@pytest.mark.parametrize("message_type", WIDTHS, ids=lambda message_type: message_type.__name__)
@given(data=st.data())
def test_a_value_that_does_not_fit_its_field_is_misuse(message_type: type, data: st.DataObject) -> None:
    message = data.draw(STRATEGIES[message_type])
    field = data.draw(st.sampled_from(sorted(WIDTHS[message_type])))
    beyond = data.draw(st.integers(max_value=-1) | st.integers(min_value=1 << WIDTHS[message_type][field]))

    with pytest.raises(ApiMisuse, match=rf"^{field}: .* {WIDTHS[message_type][field]} bits$"):
        replace(message, **{field: beyond}).pack()
